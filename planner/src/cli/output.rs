//! Where bytes go: a file appears whole or not at all, `-` is standard output.

use std::io::{self, Write};
use std::path::Path;

use super::{Failure, failed_write};

/// A place to write to.
pub struct Output<'a> {
    path: &'a Path,
    standard: &'a mut dyn Write,
}

impl<'a> Output<'a> {
    /// The file at `path`, or `standard` for `-`.
    pub fn to(path: &'a Path, standard: &'a mut dyn Write) -> Self {
        Self { path, standard }
    }

    /// Writes all of it: to a file beside the target first, synced, then renamed over it.
    pub fn write(self, bytes: &[u8]) -> Result<(), Failure> {
        if self.path.as_os_str() == "-" {
            return self.standard.write_all(bytes).and_then(|()| self.standard.flush()).map_err(|error| {
                match error.kind() {
                    io::ErrorKind::BrokenPipe => Failure::Closed,
                    _ => failed_write(Path::new("standard output"), error),
                }
            });
        }
        self.replace(bytes).map_err(|error| failed_write(self.path, error))
    }

    fn replace(&self, bytes: &[u8]) -> io::Result<()> {
        // What is no plain file (/dev/null, a pipe) cannot be replaced, only written to.
        if self.path.metadata().is_ok_and(|known| !known.is_file()) {
            return std::fs::OpenOptions::new().write(true).open(self.path)?.write_all(bytes);
        }
        let folder = self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Asked first, so that an error is about the folder and not about a temporary name in it.
        folder.metadata()?;
        let mut beside = tempfile::Builder::new()
            .prefix(".plan-")
            .tempfile_in(folder)
            .map_err(|error| io::Error::from(error.kind()))?;
        beside.write_all(bytes)?;
        beside.as_file().sync_all()?;
        allow_what_a_new_file_allows(beside.as_file())?;
        beside.persist(self.path).map_err(|failed| failed.error)?;
        Ok(())
    }
}

/// Temporary files are private; a report is for whoever the umask lets read.
#[cfg(unix)]
fn allow_what_a_new_file_allows(file: &std::fs::File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn allow_what_a_new_file_allows(_: &std::fs::File) -> io::Result<()> {
    Ok(())
}
