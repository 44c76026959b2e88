//! The few arrows between crates, and one door for each dependency: read from the manifests and sources.

use std::fs;
use std::path::Path;

use terrace_tests::corpus::root;

/// Crate and the crates of this workspace that it may name.
const ARROWS: &[(&str, &[&str])] = &[
    ("profiles", &[]),
    ("planner", &["terrace-profiles"]),
    ("allocator", &["terrace-planner", "terrace-profiles"]),
    ("allocator/python", &["terrace-allocator", "terrace-kernels", "terrace-profiles"]),
    ("kernels", &["terrace-profiles"]),
    ("tests", &["terrace-allocator", "terrace-kernels", "terrace-planner", "terrace-profiles"]),
    ("benches", &["terrace-allocator", "terrace-kernels", "terrace-planner", "terrace-profiles", "terrace-tests"]),
];

/// Dependency (as its path begins in Rust) and the files that may name it.
const DOORS: &[(&str, &[&str])] = &[
    ("bincode::", &["profiles/src/codec.rs"]),
    ("clap::", &["planner/src/cli.rs", "planner/src/cli/args.rs"]),
    ("clap_complete::", &["planner/src/cli.rs", "planner/src/cli/args.rs"]),
    ("crc32fast::", &["profiles/src/codec.rs"]),
    ("cudarc::", &["allocator/src/cuda.rs", "kernels/src/cuda.rs", "kernels/src/block/lt.rs"]),
    ("flate2::", &["profiles/src/import/source.rs"]),
    ("half::", &["kernels/src/view.rs", "kernels/src/view/grid.rs"]),
    ("indicatif::", &["planner/src/cli/watch.rs"]),
    ("libloading::", &["kernels/src/compile.rs", "kernels/src/block/lt.rs"]),
    ("matrixmultiply::", &["kernels/src/block/cpu.rs"]),
    ("parking_lot::", &["allocator/src/allocator.rs", "allocator/src/fake.rs"]),
    ("petgraph::", &["planner/src/graph.rs"]),
    ("pyo3::", &["allocator/python/src/lib.rs", "allocator/python/src/device.rs", "allocator/python/src/files.rs"]),
    ("rayon::", &["kernels/src/cpu.rs", "kernels/src/cpu/decode.rs"]),
    ("safetensors::", &["kernels/src/block/checkpoint.rs"]),
    ("sha2::", &["profiles/src/codec.rs", "kernels/src/cache.rs"]),
    ("tempfile::", &["planner/src/cli/output.rs"]),
    ("toml::", &["profiles/src/toml_file.rs"]),
];

#[test]
fn crates_depend_only_along_the_arrows() {
    for (krate, allowed) in ARROWS {
        let manifest = fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        let named = manifest.lines().filter_map(|line| {
            let name = line.split(['=', '.', ' ']).next()?;
            name.starts_with("terrace-").then_some(name)
        });
        for name in named {
            assert!(allowed.contains(&name), "{krate} may not depend on {name}");
        }
    }
}

#[test]
fn each_dependency_has_one_door() {
    for krate in ["profiles", "planner", "allocator", "allocator/python", "kernels"] {
        each_source(&root().join(krate).join("src"), &mut |path, text| {
            // Unit tests may use what they like.
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            for (dependency, doors) in DOORS {
                let is_door = doors.iter().any(|door| path.ends_with(door));
                let named = code.lines().filter(|line| !line.trim_start().starts_with("//")).any(|line| {
                    line.match_indices(dependency).any(|(at, _)| {
                        let before = line[..at].chars().next_back();
                        !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':')
                    })
                });
                assert!(is_door || !named, "{} names {dependency}", path.display());
            }
        });
    }
}

#[test]
fn planner_and_profiles_forbid_unsafe_code() {
    for krate in ["profiles", "planner"] {
        let lib = fs::read_to_string(root().join(krate).join("src/lib.rs")).unwrap();
        assert!(lib.contains("#![forbid(unsafe_code)]"), "{krate}");
    }
}

#[test]
fn the_planner_reads_no_clock_and_no_environment() {
    each_source(&root().join("planner/src"), &mut |path, text| {
        let in_cli = path.components().any(|part| part.as_os_str().to_string_lossy().starts_with("cli"));
        if in_cli || path.ends_with("main.rs") {
            return;
        }
        for forbidden in ["Instant::now", "SystemTime", "std::env", "std::fs", "File::open"] {
            assert!(!text.contains(forbidden), "{} uses {forbidden}", path.display());
        }
    });
}

fn each_source(folder: &Path, see: &mut dyn FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            each_source(&path, see);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            see(&path, &fs::read_to_string(&path).unwrap());
        }
    }
}
