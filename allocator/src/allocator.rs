//! A device behind one lock, for runtimes that allocate from several threads.

use parking_lot::{Mutex, MutexGuard};
use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::backing::{Backing, Stream};
use crate::device::{Config, Device};
use crate::error::Error;
use crate::exhausted::OnExhausted;
use crate::stats::Stats;

/// A [`Device`] that many threads share. Every method takes the one lock; none holds it while it calls out.
pub struct Allocator {
    device: Mutex<Device>,
    on_exhausted: Mutex<Option<OnExhausted>>,
}

/// An open step; dropping it ends the step.
pub struct Step<'a> {
    allocator: &'a Allocator,
}

impl Allocator {
    /// Opens a device and makes its one reservation.
    ///
    /// # Errors
    /// As [`Device::new`].
    pub fn new(backing: Box<dyn Backing>, config: Config) -> Result<Self, Error> {
        Ok(Self { device: Mutex::new(Device::new(backing, config)?), on_exhausted: Mutex::new(None) })
    }

    /// Sets what is called when a request finds no room, before anything is waited for. It runs without the lock, so it may
    /// free.
    pub fn on_exhausted(&self, call: OnExhausted) {
        *self.on_exhausted.lock() = Some(call);
    }

    /// See [`Device::alloc`].
    ///
    /// # Errors
    /// As [`Device::alloc`].
    #[inline]
    pub fn alloc(&self, bytes: Bytes, stream: Stream, label: &str) -> Result<DeviceSpan, Error> {
        match self.device.lock().alloc(bytes, stream, label) {
            Err(Error::OutOfMemory(report)) => self.alloc_after_call(bytes, stream, label, report),
            served => served,
        }
    }

    #[cold]
    fn alloc_after_call(
        &self,
        bytes: Bytes,
        stream: Stream,
        label: &str,
        report: Box<crate::Exhausted>,
    ) -> Result<DeviceSpan, Error> {
        let Some(call) = &mut *self.on_exhausted.lock() else { return Err(Error::OutOfMemory(report)) };
        call(bytes);
        self.device.lock().alloc(bytes, stream, label)
    }

    /// See [`Device::free`].
    #[inline]
    pub fn free(&self, address: u64) {
        self.device.lock().free(address);
    }

    /// Begins a step that ends when the result is dropped.
    ///
    /// # Errors
    /// As [`Device::begin_step`].
    pub fn step(&self, key: &[u8], stream: Stream) -> Result<Step<'_>, Error> {
        self.device.lock().begin_step(key, stream)?;
        Ok(Step { allocator: self })
    }

    /// The figures so far.
    pub fn stats(&self) -> Stats {
        self.device.lock().stats().clone()
    }

    /// Everything else that a device can do, under the lock.
    pub fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock()
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.allocator.device.lock().end_step() {
            tracing::error!(target: "terrace::step", %error, "the end of a step could not be marked");
        }
    }
}
