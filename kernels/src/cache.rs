//! Compiled kernels on disk, so that a process compiles only what no process before it has.
//!
//! Where: `$TERRACE_CACHE_DIR`, else `$XDG_CACHE_HOME/terrace`, else `~/.cache/terrace`. An empty `TERRACE_CACHE_DIR` switches the
//! cache off. At most `TERRACE_CACHE_MAX_BYTES` lie there (default 256 MiB); past that the entries that were unused for longest
//! go. [`clear`] empties it, and so does removing the folder, at any time.
//!
//! ```text
//! <sha256 of compiler, architecture, flags and text>.cubin
//!   "TRRCUBN1" | key, 32 bytes | length of the code, 8 bytes, little endian | sha256 of the code, 32 bytes | the code
//! ```
//!
//! Many processes may use one folder at once. An entry is written under a name of its own and renamed, so a reader sees all of it
//! or nothing; of two that write the same entry the last wins, with the same bytes. An entry that is damaged is not used: it is
//! said in the trace, compiled anew and replaced. A folder that cannot be written costs time, never a call: said in the trace.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use std::{env, process};

use sha2::{Digest, Sha256};

/// What names an entry.
pub(crate) type Key = [u8; 32];

const MAGIC: &[u8; 8] = b"TRRCUBN1";
const HEADER: usize = 8 + 32 + 8 + 32;
const DEFAULT_MAX_BYTES: u64 = 256 << 20;
/// A file that is being written is this young; an older one was left by a process that died.
const ABANDONED: Duration = Duration::from_secs(600);

/// A folder of compiled kernels, or none.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    max_bytes: u64,
}

/// Removes every entry of the cache that the environment names. Processes that have loaded theirs keep running. Returns how many
/// entries there were.
///
/// # Errors
/// The first entry that could not be removed.
pub fn clear() -> io::Result<usize> {
    Cache::from_environment().clear()
}

/// The name of what a compiler makes of a text.
pub(crate) fn key(compiler: &str, arch: &str, flags: &[String], text: &str) -> Key {
    let mut hash = Sha256::new();
    let parts = [compiler, arch].into_iter().chain(flags.iter().map(String::as_str)).chain([text]);
    for part in parts {
        // With their lengths, so that no two lists of parts read the same.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

impl Cache {
    /// The cache that the environment names.
    pub fn from_environment() -> Self {
        let max_bytes = match env::var("TERRACE_CACHE_MAX_BYTES") {
            Err(_) => DEFAULT_MAX_BYTES,
            Ok(text) => text.parse().unwrap_or_else(|_| {
                tracing::warn!(target: "terrace::kernels", text, "TERRACE_CACHE_MAX_BYTES is no number of bytes; 256 MiB");
                DEFAULT_MAX_BYTES
            }),
        };
        let folder = match env::var_os("TERRACE_CACHE_DIR") {
            Some(folder) => Some(PathBuf::from(folder)),
            None => user_folder(),
        };
        Self { folder: folder.filter(|folder| !folder.as_os_str().is_empty()), max_bytes }
    }

    /// A cache in a folder, which is made when the first entry is written.
    pub fn new(folder: impl Into<PathBuf>, max_bytes: u64) -> Self {
        Self { folder: Some(folder.into()), max_bytes }
    }

    /// No cache: everything is compiled.
    pub const fn off() -> Self {
        Self { folder: None, max_bytes: 0 }
    }

    /// The folder; `None` where the cache is off.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The entry, or what `make` makes, which then becomes the entry.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn get_or<E>(&self, key: &Key, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        if let Some(code) = self.get(key) {
            return Ok(code);
        }
        let code = make()?;
        self.put(key, &code);
        Ok(code)
    }

    fn get(&self, key: &Key) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(target: "terrace::kernels", path = %path.display(), %error, "cached kernel unreadable; compiling");
                return None;
            }
        };
        let Some(code) = open(key, &bytes) else {
            tracing::warn!(target: "terrace::kernels", path = %path.display(), "cached kernel damaged; compiling it anew");
            return None;
        };
        // So that what is used stays. A file system that keeps no times makes the oldest entry go, which is good enough.
        let _ = File::options().write(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(code.to_vec())
    }

    fn put(&self, key: &Key, code: &[u8]) {
        let Some(path) = self.path(key) else { return };
        if let Err(error) = self.write(&path, key, code) {
            tracing::warn!(target: "terrace::kernels", path = %path.display(), %error, "compiled kernel not cached");
            return;
        }
        self.trim();
    }

    fn write(&self, path: &Path, key: &Key, code: &[u8]) -> io::Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let folder = path.parent().unwrap_or(Path::new("."));
        make_folder(folder)?;
        // Of this process and call alone: pid for other processes, count for other threads.
        let mine = folder.join(format!("{}.{}.part", process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        let written = File::create(&mine).and_then(|mut file| {
            file.write_all(MAGIC)?;
            file.write_all(key)?;
            file.write_all(&(code.len() as u64).to_le_bytes())?;
            file.write_all(&Sha256::digest(code))?;
            file.write_all(code)
        });
        written.and_then(|()| fs::rename(&mine, path)).inspect_err(|_| {
            let _ = fs::remove_file(&mine);
        })
    }

    /// Removes the entries unused for longest until the rest fits, and what dead processes left half written. Another process may
    /// be doing the same: a file that is gone is no failure.
    fn trim(&self) {
        let Some(folder) = self.folder() else { return };
        let now = SystemTime::now();
        let (mut entries, mut total) = (Vec::new(), 0);
        for file in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(about) = file.metadata() else { continue };
            let used = about.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if has_ending(&file.path(), "cubin") {
                total += about.len();
                entries.push((used, about.len(), file.path()));
            } else if has_ending(&file.path(), "part") && now.duration_since(used).is_ok_and(|age| age > ABANDONED) {
                let _ = fs::remove_file(file.path());
            }
        }
        entries.sort();
        for (_, bytes, path) in entries {
            if total <= self.max_bytes {
                break;
            }
            tracing::debug!(target: "terrace::kernels", path = %path.display(), bytes, "cached kernel removed to make room");
            let _ = fs::remove_file(path);
            total -= bytes;
        }
    }

    /// Removes every entry and returns how many there were.
    ///
    /// # Errors
    /// The first entry that could not be removed.
    pub fn clear(&self) -> io::Result<usize> {
        let Some(folder) = self.folder() else { return Ok(0) };
        let files = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            files => files?,
        };
        let mut count = 0;
        for file in files {
            let path = file?.path();
            if has_ending(&path, "cubin") {
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => count += 1,
                }
            }
        }
        Ok(count)
    }

    fn path(&self, key: &Key) -> Option<PathBuf> {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        Some(self.folder()?.join(name).with_extension("cubin"))
    }
}

/// The code in an entry, if it is whole and this key's.
fn open<'a>(key: &Key, entry: &'a [u8]) -> Option<&'a [u8]> {
    let (header, code) = entry.split_at_checked(HEADER)?;
    let (magic, header) = header.split_at(8);
    let (named, header) = header.split_at(32);
    let (length, sum) = header.split_at(8);
    let whole = magic == MAGIC && named == key && length == (code.len() as u64).to_le_bytes();
    (whole && sum == &Sha256::digest(code)[..]).then_some(code)
}

fn user_folder() -> Option<PathBuf> {
    // A relative path there is to be ignored, says the specification of these variables.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(caches.join("terrace"))
}

/// What lies there is run, so nobody else may write it.
fn make_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|it| it == ending)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn named(name: &str) -> Key {
        key("1.0", "sm_80", &[], name)
    }

    /// What a lookup gives, and whether it had to be made.
    fn look(cache: &Cache, key: &Key, code: &[u8]) -> (Vec<u8>, bool) {
        let mut made = false;
        let got = cache.get_or(key, || {
            made = true;
            Ok::<_, Infallible>(code.to_vec())
        });
        let Ok(got) = got;
        (got, made)
    }

    fn files(cache: &Cache) -> Vec<PathBuf> {
        let mut all: Vec<_> = fs::read_dir(cache.folder().unwrap()).unwrap().map(|file| file.unwrap().path()).collect();
        all.sort();
        all
    }

    #[test]
    fn what_was_made_once_is_read_the_next_time() {
        let folder = folder();
        let cache = Cache::new(folder.path().join("not/yet/there"), 1 << 20);
        assert_eq!(look(&cache, &named("a"), b"code"), (b"code".to_vec(), true));
        assert_eq!(look(&cache, &named("a"), b"other"), (b"code".to_vec(), false));
        assert_eq!(look(&cache, &named("b"), b""), (vec![], true));
        assert_eq!(look(&cache, &named("b"), b"other"), (vec![], false));
        assert_eq!(files(&cache).len(), 2, "nothing is left half written");
        assert_eq!(cache.clear().unwrap(), 2);
        assert_eq!(cache.clear().unwrap(), 0);
        assert_eq!(look(&cache, &named("a"), b"other"), (b"other".to_vec(), true));
    }

    #[test]
    fn each_part_of_a_key_counts() {
        let flags = |all: &[&str]| all.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>();
        let keys = [
            key("1.0", "sm_80", &flags(&["-a"]), "text"),
            key("1.1", "sm_80", &flags(&["-a"]), "text"),
            key("1.0", "sm_86", &flags(&["-a"]), "text"),
            key("1.0", "sm_80", &flags(&["-b"]), "text"),
            key("1.0", "sm_80", &flags(&["-a", ""]), "text"),
            key("1.0", "sm_80", &flags(&["-", "a"]), "text"),
            key("1.0", "sm_80", &flags(&["-a"]), "text "),
            key("1.0", "sm_80", &flags(&["-at"]), "ext"),
        ];
        let different: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(different.len(), keys.len());
    }

    #[test]
    fn a_damaged_entry_is_made_anew_and_replaced() {
        let folder = folder();
        let cache = Cache::new(folder.path(), 1 << 20);
        let key = named("a");
        look(&cache, &key, b"the code");
        let path = cache.path(&key).unwrap();
        let whole = fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> = (0..whole.len()).map(|length| whole[..length].to_vec()).collect();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            damaged.push(bytes);
        }
        damaged.push([&whole[..], b"!"].concat());
        for bytes in damaged {
            fs::write(&path, &bytes).unwrap();
            assert_eq!(look(&cache, &key, b"the code"), (b"the code".to_vec(), true), "{bytes:?}");
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
        // A whole entry under another's name.
        look(&cache, &named("b"), b"b's code");
        fs::copy(cache.path(&named("b")).unwrap(), &path).unwrap();
        assert_eq!(look(&cache, &key, b"the code"), (b"the code".to_vec(), true));
    }

    #[test]
    fn past_the_cap_what_was_unused_for_longest_goes() {
        let folder = folder();
        let code = [7; 1000];
        let cache = Cache::new(folder.path(), 3 * (HEADER as u64 + 1000));
        let age = |name: &str, seconds: u64| {
            let file = File::options().write(true).open(cache.path(&named(name)).unwrap()).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
        };
        for (name, seconds) in [("a", 300), ("b", 200), ("c", 100)] {
            look(&cache, &named(name), &code);
            age(name, seconds);
        }
        assert!(!look(&cache, &named("a"), &code).1, "all three fit, and this one is now used");
        look(&cache, &named("d"), &code);
        assert!(look(&cache, &named("b"), &code).1, "b was the oldest");
        let kept: Vec<bool> = ["a", "d"].iter().map(|name| !look(&cache, &named(name), &code).1).collect();
        assert_eq!(kept, [true, true]);
    }

    #[test]
    fn what_a_dead_process_left_is_removed_and_what_a_living_one_writes_is_not() {
        let folder = folder();
        let cache = Cache::new(folder.path(), 1 << 20);
        let (dead, living) = (folder.path().join("1.0.part"), folder.path().join("2.0.part"));
        fs::write(&living, b"x").unwrap();
        let file = File::create(&dead).unwrap();
        file.set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
        look(&cache, &named("a"), b"code");
        assert!(!dead.exists() && living.exists());
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_time_and_no_call() {
        let folder = folder();
        let file = folder.path().join("file");
        fs::write(&file, b"in the way").unwrap();
        for cache in [Cache::new(file.join("below"), 1 << 20), Cache::new(&file, 1 << 20), Cache::off()] {
            for _time in 0..2 {
                assert_eq!(look(&cache, &named("a"), b"code"), (b"code".to_vec(), true));
            }
        }
        assert_eq!(fs::read(&file).unwrap(), b"in the way");
    }

    #[test]
    fn writers_and_readers_at_once_see_whole_entries() {
        let folder = folder();
        // A cap that two of the four entries reach: some are removed while others are read.
        let cache = Cache::new(folder.path(), 2 * (HEADER as u64 + (64 << 10)));
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let cache = &cache;
                scope.spawn(move || {
                    for round in 0..50_u8 {
                        let name = (thread + round) % 4;
                        let code = vec![name; 64 << 10];
                        assert_eq!(look(cache, &named(&name.to_string()), &code).0, code);
                    }
                });
            }
        });
        assert!(files(&cache).iter().all(|path| has_ending(path, "cubin")), "{:?}", files(&cache));
    }

    #[test]
    fn processes_at_once_see_whole_entries() {
        // This test binary again, as often as there are writers; each runs the test below in the same folder.
        let folder = folder();
        let program = env::current_exe().unwrap();
        let mut children: Vec<_> = (0..4)
            .map(|_| {
                let mut command = process::Command::new(&program);
                command.args(["--exact", "cache::tests::one_process_of_many", "--quiet"]);
                command.env("TERRACE_TEST_CACHE", folder.path()).stdout(process::Stdio::null());
                command.spawn().unwrap()
            })
            .collect();
        for child in &mut children {
            assert!(child.wait().unwrap().success());
        }
        let cache = Cache::new(folder.path(), u64::MAX);
        assert!(!look(&cache, &named("3"), b"").1, "they wrote here");
        assert!(files(&cache).iter().all(|path| has_ending(path, "cubin")), "{:?}", files(&cache));
    }

    #[test]
    fn one_process_of_many() {
        let Some(folder) = env::var_os("TERRACE_TEST_CACHE") else { return };
        let cache = Cache::new(folder, u64::MAX);
        for round in 0..200_u8 {
            let name = round % 4;
            let code = vec![name; 16 << 10];
            if round % 7 == 0 {
                let _ = fs::remove_file(cache.path(&named(&name.to_string())).unwrap());
            }
            assert_eq!(look(&cache, &named(&name.to_string()), &code).0, code);
        }
    }
}
