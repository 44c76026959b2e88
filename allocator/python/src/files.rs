//! Profiles between PyTorch and files: what is recorded in Python becomes a file that `plan solve` reads.

use std::fs;
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
    let mut beside = target.as_os_str().to_owned();
    beside.push(format!(".{}.part", std::process::id()));
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, target));
    written.map_err(|error| {
        let _ = fs::remove_file(&beside);
        PyOSError::new_err(format!("{}: {error}", target.display()))
    })
}

fn refused(error: &terrace_profiles::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}
