//! Real inputs: recorded forwards in `profiles/recorded`, public solver instances and original traces in `tests/corpus`.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use terrace_profiles::{Profile, import};

/// The workspace's root: where it was built, or, for a binary that was carried to another machine, what `TERRACE_ROOT` says.
pub fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        std::env::var_os("TERRACE_ROOT")
            .map_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/..").into(), PathBuf::from)
    })
}

/// The recorded profiles, by name.
pub fn recorded() -> Vec<PathBuf> {
    files(&root().join("profiles/recorded"), &[".profile", ".profile.gz"])
}

/// The public solver instances (minimalloc's CSV form), by name.
pub fn instances() -> Vec<PathBuf> {
    files(&root().join("tests/corpus/instances"), &[".csv", ".csv.gz"])
}

/// A file of `tests/corpus`.
pub fn file(name: &str) -> PathBuf {
    root().join("tests/corpus").join(name)
}

/// The one profile in a file.
pub fn read(path: &Path) -> Profile {
    let mut profiles = import::read_file(path, &import::Options::default()).expect("a file of the corpus is valid");
    assert_eq!(profiles.len(), 1, "{} holds one profile", path.display());
    profiles.remove(0)
}

fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for entry in entries {
            let path = entry.expect("the folder can be listed").path();
            if path.is_dir() {
                folders.push(path);
            } else if endings.iter().any(|ending| path.to_string_lossy().ends_with(ending)) {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "{} holds no input", folder.display());
    found.sort();
    found
}
