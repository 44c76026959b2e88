//! A device behind one lock, for runtimes that allocate from several threads.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use terrace_profiles::Memory;
use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::backing::{Backing, Stream};
use crate::device::{Config, Device};
use crate::error::Error;
use crate::exhausted::OnExhausted;
use crate::report::{BootSummary, LeakReport, LiveMap};
use crate::stats::Stats;
use crate::step::this_thread;

/// A [`Device`] that many threads share. Every method takes the one lock; none holds it while it calls out.
pub struct Allocator {
    device: Mutex<Device>,
    on_exhausted: Mutex<Option<OnExhausted>>,
    /// The thread that is inside the callback; 0 for none.
    calling: AtomicU64,
}

/// The callback is running; over when dropped, also if it panics.
struct Calling<'a>(&'a AtomicU64);

/// An open step; dropping it ends the step. It is a forward's [`Memory`]: requests are made on the step's stream.
pub struct Step<'a> {
    allocator: &'a Allocator,
    stream: Stream,
}

impl Allocator {
    /// Opens a device and makes its one reservation.
    ///
    /// # Errors
    /// As [`Device::new`].
    pub fn new(backing: Box<dyn Backing>, config: Config) -> Result<Self, Error> {
        let device = Mutex::new(Device::new(backing, config)?);
        Ok(Self { device, on_exhausted: Mutex::new(None), calling: AtomicU64::new(0) })
    }

    /// Sets what is called when a request finds no room, before anything is waited for. It runs without the lock, so it may
    /// free; a request that it makes itself is not worth another call.
    pub fn on_exhausted(&self, call: OnExhausted) {
        *self.on_exhausted.lock() = Some(call);
        self.device.lock().call_first = true;
    }

    /// See [`Device::alloc`].
    ///
    /// # Errors
    /// As [`Device::alloc`].
    #[inline]
    pub fn alloc(&self, bytes: Bytes, stream: Stream, label: &str) -> Result<DeviceSpan, Error> {
        // Not in the `match`: there the lock would be held to its end.
        let served = self.device.lock().alloc(bytes, stream, label);
        match served {
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
        let here = this_thread();
        // A request of the callback itself finds no room either: calling it again would not end.
        if self.calling.load(Ordering::Relaxed) == here {
            return Err(Error::OutOfMemory(report));
        }
        let mut call = self.on_exhausted.lock();
        let Some(call) = &mut *call else { return Err(Error::OutOfMemory(report)) };
        self.calling.store(here, Ordering::Relaxed);
        let calling = Calling(&self.calling);
        call(bytes);
        drop(calling);
        let mut device = self.device.lock();
        device.call_first = false;
        let served = device.alloc(bytes, stream, label);
        device.call_first = true;
        served
    }

    /// See [`Device::free`]. Frees may come from any thread; those of a step's buffers that come from another than the one that
    /// began it are counted.
    #[inline]
    pub fn free(&self, address: u64) {
        let mut device = self.device.lock();
        device.note_thread(address);
        device.free(address);
    }

    /// Begins a step that ends when the result is dropped.
    ///
    /// # Errors
    /// As [`Device::begin_step`].
    pub fn step(&self, key: &[u8], stream: Stream) -> Result<Step<'_>, Error> {
        self.device.lock().begin_step(key, stream)?;
        Ok(Step { allocator: self, stream })
    }

    /// The figures so far.
    pub fn stats(&self) -> Stats {
        self.device.lock().stats().clone()
    }

    /// See [`Device::boot_summary`].
    pub fn boot_summary(&self) -> BootSummary {
        self.device.lock().boot_summary()
    }

    /// See [`Device::leak_report`].
    pub fn leak_report(&self) -> LeakReport {
        self.device.lock().leak_report()
    }

    /// See [`Device::live_map`]; it is drawn without the lock.
    pub fn live_map(&self) -> LiveMap {
        self.device.lock().live_map()
    }

    /// Everything else that a device can do, under the lock.
    pub fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock()
    }
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

impl Memory for Step<'_> {
    fn alloc(&mut self, bytes: Bytes, label: &str) -> Result<DeviceSpan, Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.allocator.alloc(bytes, self.stream, label)?)
    }

    fn free(&mut self, span: DeviceSpan) {
        self.allocator.free(span.address);
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.allocator.device.lock().end_step() {
            tracing::error!(target: "terrace::step", %error, "the end of a step could not be marked");
        }
    }
}
