//! Profiles between PyTorch and files: what is recorded in Python becomes a file that `plan solve` reads.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use terrace_profiles::{Profile, codec, import, text};

/// Reads a snapshot of torch (or any other file that is imported) and writes the profile of one device. A name that ends in `.bin` gets
/// the binary form, any other the text. Returns how many events it has.
#[pyfunction]
#[pyo3(signature = (source, target, device=None))]
pub fn import_profile(py: Python<'_>, source: &str, target: &str, device: Option<u32>) -> PyResult<usize> {
    py.detach(|| {
        let options = import::Options { device, ..import::Options::default() };
        let profiles = import::read_file(Path::new(source), &options).map_err(|error| refused(&error))?;
        let [profile] = &profiles[..] else {
            let names: Vec<&str> = profiles.iter().map(|profile| profile.name.as_str()).collect();
            let text = format!("{source} holds {} profiles ({}), choose one by device", names.len(), names.join(", "));
            return Err(PyValueError::new_err(text));
        };
        write_profile(profile, Path::new(target))?;
        Ok(profile.events.len())
    })
}

/// Writes a profile, whole or not at all.
pub fn write_profile(profile: &Profile, target: &Path) -> PyResult<()> {
    let mut bytes = Vec::new();
    if target.extension().is_some_and(|ending| ending == "bin") {
        bytes = codec::encode_profile(profile).map_err(|error| refused(&error))?;
    } else {
        text::write_text(profile, &mut bytes)?;
    }
    replace(target, &bytes).map_err(|error| PyOSError::new_err(format!("{}: {error}", target.display())))
}

fn replace(target: &Path, bytes: &[u8]) -> io::Result<()> {
    // What is no plain file (/dev/null, a pipe) cannot be replaced, only written to.
    if target.metadata().is_ok_and(|known| !known.is_file()) {
        return fs::OpenOptions::new().write(true).open(target)?.write_all(bytes);
    }
    let mut beside = target.as_os_str().to_owned();
    beside.push(format!(".{}.part", std::process::id()));
    fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, target)).inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

fn refused(error: &terrace_profiles::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}
