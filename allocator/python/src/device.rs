//! One device as Python has it: a [`Handle`] that PyTorch's functions may share.
//!
//! Reports come as JSON, since Python reads that into plain dictionaries; keys and figures are those of the Rust types.

use std::path::Path;
use std::sync::Arc;

use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use terrace_allocator::ffi::{BACKING_CUDA, BACKING_HOST, Failure, Handle, Options, Status, backing, config, register};
use terrace_allocator::{Existing, Identity, Stream};
use terrace_profiles::units::Bytes;

use crate::TerraceError;
use crate::files::write_profile;

/// A reservation of device memory and everything that is served from it.
#[pyclass(frozen, module = "terrace._terrace")]
pub struct Device {
    handle: Arc<Handle>,
}

#[pymethods]
impl Device {
    /// Opens a device and makes its one reservation.
    #[new]
    #[pyo3(signature = (backing, budget, *, ordinal=0, align=0, debug=false, patience=0, most_keys=0))]
    #[allow(clippy::too_many_arguments, reason = "keywords of a Python constructor")]
    fn new(
        py: Python<'_>,
        backing: &str,
        budget: u64,
        ordinal: u32,
        align: u64,
        debug: bool,
        patience: u32,
        most_keys: u32,
    ) -> PyResult<Self> {
        let kind = kind(backing)?;
        let size = size_of::<Options>() as u64;
        let debug = u32::from(debug);
        let options = Options { size, budget, align, backing: kind, ordinal, debug, patience, most_keys, reserved: 0 };
        let open = || Handle::open(self::backing(kind, ordinal)?, config(options)?);
        Ok(Self { handle: py.detach(open).map_err(raised)? })
    }

    /// Bytes of a device, without opening it for good: all of them, and those that are free now.
    #[staticmethod]
    fn memory_of(py: Python<'_>, backing: &str, ordinal: u32) -> PyResult<Option<(u64, u64)>> {
        let kind = kind(backing)?;
        let memory = py.detach(|| Ok(self::backing(kind, ordinal)?.memory())).map_err(raised)?;
        Ok(memory.map(|(total, free)| (total.get(), free.get())))
    }

    /// The device's name.
    fn name(&self) -> PyResult<String> {
        self.ask(|device| device.backing().name())
    }

    /// Where the reservation begins, and its bytes.
    fn reservation(&self) -> (u64, u64) {
        self.handle.span()
    }

    /// How often the backing was asked for memory.
    fn reservations(&self) -> PyResult<u64> {
        self.ask(|device| device.backing().reservations())
    }

    /// Makes it the device that PyTorch's requests for this ordinal go to, until the process ends.
    fn register(&self, ordinal: i32) -> PyResult<()> {
        register(ordinal, Arc::clone(&self.handle)).map_err(raised)
    }

    /// Begins a step of that key on a stream, given by its handle.
    fn begin_step(&self, py: Python<'_>, key: &[u8], stream: u64) -> PyResult<()> {
        py.detach(|| self.handle.begin_step(key, Stream(stream))).map_err(raised)
    }

    /// Ends the step that this thread began; planning happens here.
    fn end_step(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.handle.end_step()).map_err(raised)
    }

    /// Serves a request and returns its address; 0 for no bytes.
    #[pyo3(signature = (size, stream=0, label=""))]
    fn alloc(&self, py: Python<'_>, size: u64, stream: u64, label: &str) -> PyResult<u64> {
        let size = bytes(size, "size")?;
        py.detach(|| self.handle.alloc(size, Stream(stream), label)).map_err(raised)
    }

    /// Frees what begins at an address.
    fn free(&self, py: Python<'_>, address: u64) -> PyResult<()> {
        py.detach(|| self.handle.free(address)).map_err(raised)
    }

    /// Says that another stream uses what begins at an address.
    fn record_stream(&self, py: Python<'_>, address: u64, stream: u64) -> PyResult<()> {
        py.detach(|| self.handle.record_stream(address, Stream(stream))).map_err(raised)
    }

    /// Gives back what was freed on several streams and is done; with `wait`, waits for all of it.
    fn drain(&self, py: Python<'_>, wait: bool) -> PyResult<()> {
        py.detach(|| self.ask(|device| device.drain(wait)))
    }

    /// Replaces the reservation by one of that size, between steps and with nothing in it.
    fn resize(&self, py: Python<'_>, budget: u64) -> PyResult<()> {
        let budget = bytes(budget, "budget")?;
        py.detach(|| self.handle.resize(budget)).map_err(raised)
    }

    /// Bytes to set aside for steps before anything else is sized.
    fn required_bytes(&self) -> PyResult<u64> {
        self.ask(|device| device.required_bytes().get())
    }

    /// The most that any plan so far needed.
    fn arena_bytes(&self) -> PyResult<u64> {
        self.ask(|device| device.arena_bytes().get())
    }

    /// The figures since the device was opened, as JSON.
    fn stats_json(&self) -> PyResult<String> {
        self.ask(|device| device.stats().to_json())
    }

    /// A reservation in which the same can lie again where it lay.
    fn suggested_budget(&self) -> PyResult<u64> {
        self.ask(|device| device.suggested_budget().get())
    }

    /// What lives, the most that did, what came and went, as JSON.
    fn usage_json(&self) -> PyResult<String> {
        self.ask(|device| device.usage().to_json())
    }

    /// Bytes that were freed and wait for other streams.
    fn pending_bytes(&self) -> PyResult<u64> {
        self.ask(|device| device.accounting().pending)
    }

    /// From here on the peak is counted anew.
    fn reset_peak(&self) -> PyResult<()> {
        self.ask(terrace_allocator::Device::reset_peak)
    }

    /// From here on what is served and freed is counted anew.
    fn reset_accumulated(&self) -> PyResult<()> {
        self.ask(terrace_allocator::Device::reset_accumulated)
    }

    /// The figures in Prometheus' text format, with these labels.
    #[allow(clippy::needless_pass_by_value, reason = "an argument from Python is converted into a value")]
    fn prometheus(&self, labels: Vec<(String, String)>) -> PyResult<String> {
        let labels: Vec<(&str, &str)> = labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        self.ask(|device| device.stats().to_prometheus(&labels))
    }

    /// Where the bytes are, which features are active, and what steps left behind: for a person.
    fn report(&self) -> PyResult<String> {
        self.ask(|device| format!("{}{}", device.boot_summary(), device.leak_report()))
    }

    /// The same as JSON: one object of the summary, one of what was left behind.
    fn report_json(&self) -> PyResult<(String, String)> {
        self.ask(|device| (device.boot_summary().to_json(), device.leak_report().to_json()))
    }

    /// The plan of a key as a page with a memory map; `None` while the key has none.
    fn plan_html(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<String>> {
        py.detach(|| self.ask(|device| device.plan_html(key)))?.map_err(|error| raised(error.into()))
    }

    /// Everything that lives, as JSON.
    fn live_json(&self) -> PyResult<String> {
        self.ask(|device| device.live_map().to_json())
    }

    /// Everything that lives as the pickle of a torch snapshot.
    fn live_pickle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut pickle = Vec::new();
        self.ask(|device| device.live_map())?
            .write_snapshot(&mut pickle)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(PyBytes::new(py, &pickle))
    }

    /// Saves the plans of all keys.
    fn save(&self, py: Python<'_>, path: &str, rank: u32, tag: &str) -> PyResult<()> {
        let identity = Identity { rank, tag: tag.to_owned() };
        py.detach(|| self.ask(|device| device.save_to(Path::new(path), &identity)))?
            .map_err(|error| raised(error.into()))
    }

    /// Loads the plans of a file; what came of it, as JSON.
    fn load(&self, py: Python<'_>, path: &str, rank: u32, tag: &str, replace: bool) -> PyResult<String> {
        let identity = Identity { rank, tag: tag.to_owned() };
        let existing = if replace { Existing::Replace } else { Existing::Keep };
        let loaded = py.detach(|| self.ask(|device| device.load_from(Path::new(path), &identity, existing)))?;
        loaded.map(|loaded| loaded.to_json()).map_err(|error| raised(error.into()))
    }

    /// Writes down every step, request and free from here on.
    fn start_tape(&self) {
        self.handle.start_tape();
    }

    /// Forgets what was written down.
    fn drop_tape(&self) {
        drop(self.handle.take_tape(""));
    }

    /// Writes what was written down to a file as a profile, and returns how many events it has; `None` if nothing was started.
    fn stop_tape(&self, py: Python<'_>, path: &str, name: &str) -> PyResult<Option<usize>> {
        let Some(profile) = self.handle.take_tape(name) else { return Ok(None) };
        py.detach(|| write_profile(&profile, Path::new(path)))?;
        Ok(Some(profile.events.len()))
    }
}

impl Device {
    /// Asks under the device's lock.
    fn ask<T>(&self, call: impl FnOnce(&mut terrace_allocator::Device) -> T) -> PyResult<T> {
        self.handle.locked(call).map_err(raised)
    }
}

fn kind(backing: &str) -> PyResult<u32> {
    match backing {
        "cuda" => Ok(BACKING_CUDA),
        "host" => Ok(BACKING_HOST),
        other => Err(PyValueError::new_err(format!("backing is {other:?}, not 'cuda' or 'host'"))),
    }
}

fn bytes(bytes: u64, name: &str) -> PyResult<Bytes> {
    Bytes::new(bytes).ok_or_else(|| PyValueError::new_err(format!("{name} is {bytes}, more than 2^63 - 1")))
}

/// A failure as the exception that Python expects of its kind.
fn raised(failure: Failure) -> PyErr {
    match failure.status {
        Status::BadArgument => PyValueError::new_err(failure.text),
        Status::OutOfMemory => PyMemoryError::new_err(failure.text),
        _ => TerraceError::new_err(failure.text),
    }
}
