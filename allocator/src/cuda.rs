//! A CUDA device as a backing, through the driver alone: no toolkit to build, and `libcuda` to run.
//!
//! The device's whole memory is set aside once as *addresses*, and a reservation maps memory at their beginning. So a device
//! that releases and reserves again, larger or smaller, gets the same base, and plans and graphs that hold addresses stay
//! true:
//!
//! ```text
//! addresses  [ base ................................................ base + total )   from `new` to drop
//! memory     [ one cuMemCreate, mapped )                                              from `reserve` to `release`
//! ```
//!
//! Where the driver has no virtual memory management, a reservation is one `cuMemAlloc` and its base may move.
//!
//! Each call makes the device's primary context current and restores what the caller had; it also relaxes the thread's capture
//! mode for its own duration, since otherwise asking about an event would break a capture that another thread has begun. After
//! `fork()` a child gets [`BackingError::Forked`] from every call, and its drop touches nothing. Once the context is gone, as at
//! exit, `release` succeeds and drop is silent.
//!
//! Refused: recording, waiting and reading on a stream that is being captured, which would break the capture. `release` and
//! drop wait for the whole device, which breaks a capture on any of its streams: not while one is under way.

use std::collections::HashMap;
use std::ptr;

use cudarc::driver::{result, result::DriverError, sys};
use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::backing::{Backing, BackingError, Event, Stream, head, known, may_release, may_reserve, offset_in};

/// One device of this process, with one reservation at most.
#[derive(Debug)]
pub struct CudaBacking {
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    total: Bytes,
    /// The process that opened the device.
    owner: u32,
    /// Addresses for all of the device's memory; none where a reservation is a plain allocation.
    addresses: Option<Addresses>,
    held: Option<DeviceSpan>,
    reservations: u64,
    events: HashMap<u64, sys::CUevent>,
    /// Events whose work is done, for the next `record`.
    spare: Vec<sys::CUevent>,
    newest_event: u64,
}

// SAFETY: the context and the events are handles that the driver lets any thread use; what is tied to a thread, its current
// context and its capture mode, is set anew in each call by `Entered`.
unsafe impl Send for CudaBacking {}

#[derive(Clone, Copy, Debug)]
struct Addresses {
    base: sys::CUdeviceptr,
    bytes: usize,
    /// What the size of a mapping is a multiple of.
    granularity: usize,
}

impl CudaBacking {
    /// Opens a device. The error says in one sentence what is missing: the driver, a device, or one with this ordinal.
    pub fn new(ordinal: u32) -> Result<Self, BackingError> {
        let count = Self::device_count()?;
        if ordinal >= count {
            let reason = format!("there is no CUDA device {ordinal}: this machine has {count}, counted from 0");
            return Err(BackingError::NoDevice(reason));
        }
        let broken = |e| BackingError::NoDevice(format!("CUDA device {ordinal} does not open: {}", said(e)));
        let device = result::device::get(ordinal.cast_signed()).map_err(broken)?;
        let name = result::device::get_name(device).map_err(broken)?;
        // SAFETY: `device` came from cuDeviceGet.
        let total = unsafe { result::device::total_mem(device) }.map_err(broken)?;
        // SAFETY: as above; `drop` gives this one reference back.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(broken)?;
        let mut backing = Self {
            device,
            context,
            name,
            total: Bytes::new(total as u64).unwrap_or_default(),
            owner: std::process::id(),
            addresses: None,
            held: None,
            reservations: 0,
            events: HashMap::new(),
            spare: Vec::new(),
            newest_event: 0,
        };
        let entered = backing.enter("new")?;
        let addresses = Addresses::reserve(device, total);
        drop(entered);
        // A driver that cannot do this can still allocate, so its refusal is no error.
        backing.addresses = addresses.inspect_err(|e| tracing::debug!("no fixed base: {}", said(*e))).ok();
        Ok(backing)
    }

    /// How many CUDA devices this process may use.
    pub fn device_count() -> Result<u32, BackingError> {
        // cudarc panics on its first call where there is no libcuda, so it is looked for first.
        // SAFETY: this opens libcuda, whose loading is what the caller asked for, and runs nothing of it.
        if !unsafe { sys::is_culib_present() } {
            let reason = "there is no CUDA driver: libcuda.so.1 cannot be loaded (it comes with the NVIDIA driver)";
            return Err(BackingError::NoDevice(reason.to_owned()));
        }
        let broken = |e| BackingError::NoDevice(format!("the CUDA driver does not start: {}", said(e)));
        result::init().map_err(broken)?;
        match result::device::get_count().map_err(broken)? {
            count if count > 0 => Ok(count.unsigned_abs()),
            _ => Err(BackingError::NoDevice("the CUDA driver is here, but it shows no device".to_owned())),
        }
    }

    /// Makes the context current until the guard is dropped.
    fn enter(&self, call: &'static str) -> Result<Entered, BackingError> {
        if std::process::id() != self.owner {
            return Err(BackingError::Forked { call, owner: self.owner });
        }
        Entered::new(self.context).map_err(failed(call))
    }

    fn map(&self, bytes: Bytes) -> Result<sys::CUdeviceptr, DriverError> {
        match self.addresses {
            Some(addresses) => addresses.map(self.device, bytes),
            // SAFETY: plain memory of the current context; nothing reads it before it is written.
            None => unsafe { result::malloc_sync(bytes.get() as usize) },
        }
    }

    /// Ends the reservation. Everything queued is waited for: an unmapped page under a running kernel is a fault.
    fn unmap(&self, span: DeviceSpan) -> Result<(), DriverError> {
        result::ctx::synchronize()?;
        match self.addresses {
            Some(addresses) => addresses.unmap(span.bytes),
            // SAFETY: the address came from `malloc_sync`, and `held` is cleared with it.
            None => unsafe { result::memory_free(span.address) },
        }
    }

    fn is_capturing_now(stream: Stream) -> Result<bool, DriverError> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's handle is a stream of this context, as every method of `Backing` asks; the other is ours.
        match unsafe { sys::cuStreamIsCapturing(handle(stream), &raw mut status) }.result() {
            Ok(()) => Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
            // The legacy stream, while a stream that synchronises with it is being captured: nothing may go there now.
            Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(true),
            Err(e) => Err(e),
        }
    }

    fn refuse_capturing(stream: Stream, call: &'static str) -> Result<(), BackingError> {
        if Self::is_capturing_now(stream).map_err(failed(call))? {
            return Err(BackingError::Call { call, reason: "the stream is being captured into a graph".to_owned() });
        }
        Ok(())
    }

    /// The event is done with: the next `record` may use it again.
    fn recycle(&mut self, event: Event) {
        self.spare.extend(self.events.remove(&event.0));
    }
}

impl Addresses {
    fn reserve(device: sys::CUdevice, total: usize) -> Result<Self, DriverError> {
        let properties = properties(device);
        let (mut granularity, mut base) = (0, 0);
        let recommended = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: both pointers are to locals that outlive the call.
        unsafe { sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, recommended) }
            .result()?;
        let bytes = total.next_multiple_of(granularity.max(1));
        // SAFETY: asks for any range of that size; the address is written to a local.
        unsafe { sys::cuMemAddressReserve(&raw mut base, bytes, 0, 0, 0) }.result()?;
        Ok(Self { base, bytes, granularity: granularity.max(1) })
    }

    fn mapped(self, bytes: Bytes) -> Option<usize> {
        (bytes.get() as usize).checked_next_multiple_of(self.granularity).filter(|size| *size <= self.bytes)
    }

    fn map(self, device: sys::CUdevice, bytes: Bytes) -> Result<sys::CUdeviceptr, DriverError> {
        let size = self.mapped(bytes).ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        let properties = properties(device);
        let access = sys::CUmemAccessDesc {
            location: properties.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mut memory = 0;
        // SAFETY: the size is a multiple of the granularity, and the pointers are to locals.
        unsafe { sys::cuMemCreate(&raw mut memory, size, &raw const properties, 0) }.result()?;
        // SAFETY: the range is ours and nothing is mapped in it: `may_reserve` allows one reservation at a time.
        let mapped = unsafe { sys::cuMemMap(self.base, size, 0, memory, 0) }.result();
        // SAFETY: the handle came from cuMemCreate. A mapping keeps the memory, so from here unmapping frees it.
        unsafe { sys::cuMemRelease(memory) }.result().and(mapped)?;
        // SAFETY: the range was just mapped; the description is a local.
        unsafe { sys::cuMemSetAccess(self.base, size, &raw const access, 1) }.result().inspect_err(|_| {
            let _ = self.unmap(bytes);
        })?;
        Ok(self.base)
    }

    fn unmap(self, bytes: Bytes) -> Result<(), DriverError> {
        let size = self.mapped(bytes).ok_or(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE))?;
        // SAFETY: exactly what `map` mapped for a reservation of that size.
        unsafe { sys::cuMemUnmap(self.base, size) }.result()
    }
}

/// Memory of one device, for this process alone.
fn properties(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device },
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// The context is current and the thread's capture mode relaxed while this lives.
struct Entered {
    mode: sys::CUstreamCaptureMode,
}

impl Entered {
    fn new(context: sys::CUcontext) -> Result<Self, DriverError> {
        // SAFETY: the context is the retained primary one; the driver refuses it once it was destroyed.
        unsafe { sys::cuCtxPushCurrent_v2(context) }.result()?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps the mode of this thread with a local; `drop` swaps it back.
        let swapped = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result();
        // Made before the error is looked at, so that the context is popped either way: an unswapped mode is still relaxed,
        // and putting that back fails as it did here.
        let entered = Self { mode };
        swapped.map(|()| entered)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: both undo what `new` did on this thread, with locals. Errors mean that the context is gone.
        unsafe {
            let _ = sys::cuThreadExchangeStreamCaptureMode(&raw mut self.mode);
            let _ = sys::cuCtxPopCurrent_v2(&raw mut popped);
        }
    }
}

fn handle(stream: Stream) -> sys::CUstream {
    ptr::with_exposed_provenance_mut(stream.0 as usize)
}

fn said(error: DriverError) -> String {
    let text = |c: Result<&std::ffi::CStr, DriverError>| c.map(|c| c.to_string_lossy().into_owned()).ok();
    let name = text(error.error_name()).unwrap_or_else(|| format!("CUDA error {}", error.0 as u32));
    text(error.error_string()).map_or(name.clone(), |why| format!("{why} ({name})"))
}

fn failed(call: &'static str) -> impl FnOnce(DriverError) -> BackingError {
    move |error| BackingError::Call { call, reason: said(error) }
}

/// Whether the context is no more, and its memory and events with it.
fn is_gone(error: DriverError) -> bool {
    use sys::CUresult as R;
    matches!(
        error.0,
        R::CUDA_ERROR_DEINITIALIZED
            | R::CUDA_ERROR_NOT_INITIALIZED
            | R::CUDA_ERROR_INVALID_CONTEXT
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
    )
}

impl Backing for CudaBacking {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn memory(&self) -> Option<(Bytes, Bytes)> {
        let _entered = self.enter("memory").ok()?;
        let (free, total) = result::mem_get_info().ok()?;
        Some((Bytes::new(total as u64)?, Bytes::new(free as u64)?))
    }

    fn reserve(&mut self, bytes: Bytes) -> Result<DeviceSpan, BackingError> {
        let _entered = self.enter("reserve")?;
        may_reserve(self.held, bytes)?;
        let address = self.map(bytes).map_err(|error| {
            let free = result::mem_get_info().map_or("unknown".to_owned(), |(free, _)| match Bytes::new(free as u64) {
                Some(free) => free.to_string(),
                None => free.to_string(),
            });
            let reason = format!("{}; {free} of the {} of {} are free", said(error), self.total, self.name);
            BackingError::Reserve { asked: bytes, reason }
        })?;
        let span = DeviceSpan { address, bytes };
        self.held = Some(span);
        self.reservations += 1;
        Ok(span)
    }

    fn release(&mut self, span: DeviceSpan) -> Result<(), BackingError> {
        if std::process::id() != self.owner {
            return Err(BackingError::Forked { call: "release", owner: self.owner });
        }
        may_release(self.held, span)?;
        match Entered::new(self.context).and_then(|_entered| self.unmap(span)) {
            Err(error) if !is_gone(error) => Err(failed("release")(error)),
            _ => {
                self.held = None;
                Ok(())
            }
        }
    }

    fn reservations(&self) -> u64 {
        self.reservations
    }

    fn record(&mut self, stream: Stream) -> Result<Event, BackingError> {
        let _entered = self.enter("record")?;
        Self::refuse_capturing(stream, "record")?;
        let event = match self.spare.pop() {
            Some(event) => event,
            None => result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failed("record"))?,
        };
        // SAFETY: the event is ours and of this context; the stream is the caller's, as above.
        if let Err(error) = unsafe { result::event::record(event, handle(stream)) } {
            self.spare.push(event);
            return Err(failed("record")(error));
        }
        self.newest_event += 1;
        self.events.insert(self.newest_event, event);
        Ok(Event(self.newest_event))
    }

    fn is_done(&mut self, event: Event) -> Result<bool, BackingError> {
        let _entered = self.enter("is_done")?;
        known(event, self.newest_event, "is_done")?;
        let Some(raw) = self.events.get(&event.0) else { return Ok(true) };
        // SAFETY: the event is ours and was recorded; it is destroyed only in `drop`.
        match unsafe { result::event::query(*raw) } {
            Ok(()) => {
                self.recycle(event);
                Ok(true)
            }
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failed("is_done")(error)),
        }
    }

    fn wait(&mut self, stream: Stream, event: Event) -> Result<(), BackingError> {
        let _entered = self.enter("wait")?;
        Self::refuse_capturing(stream, "wait")?;
        known(event, self.newest_event, "wait")?;
        let Some(raw) = self.events.get(&event.0) else { return Ok(()) };
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is ours and was recorded; the wait is for that record, also if the event is recorded anew later.
        unsafe { result::stream::wait_event(handle(stream), *raw, flags) }.map_err(failed("wait"))
    }

    fn synchronize(&mut self, event: Event) -> Result<(), BackingError> {
        let _entered = self.enter("synchronize")?;
        known(event, self.newest_event, "synchronize")?;
        let Some(raw) = self.events.get(&event.0) else { return Ok(()) };
        // SAFETY: as in `is_done`.
        unsafe { result::event::synchronize(*raw) }.map_err(failed("synchronize"))?;
        self.recycle(event);
        Ok(())
    }

    fn forget(&mut self, event: Event) {
        // Recording an event anew while its old record is pending is allowed, so it can be used again at once.
        self.recycle(event);
    }

    fn is_capturing(&mut self, stream: Stream) -> bool {
        let Ok(_entered) = self.enter("is_capturing") else { return false };
        Self::is_capturing_now(stream).unwrap_or(false)
    }

    fn fill(&mut self, span: DeviceSpan, byte: u8, stream: Stream) -> Result<(), BackingError> {
        let _entered = self.enter("fill")?;
        offset_in(self.held, span, "fill")?;
        // SAFETY: the span lies inside the reservation; the stream is the caller's.
        unsafe { result::memset_d8_async(span.address, byte, span.bytes.get() as usize, handle(stream)) }
            .map_err(failed("fill"))
    }

    fn read(&mut self, span: DeviceSpan, into: &mut [u8], stream: Stream) -> Result<(), BackingError> {
        let _entered = self.enter("read")?;
        Self::refuse_capturing(stream, "read")?;
        let span = head(span, into, "read")?;
        offset_in(self.held, span, "read")?;
        // SAFETY: `head` cut the span to `into`, and it lies inside the reservation; `into` outlives the copy, since the stream
        // is waited for here. If that wait fails the context is broken, and no copy runs in it any more.
        unsafe {
            result::memcpy_dtoh_async(into, span.address, handle(stream))
                .and_then(|()| result::stream::synchronize(handle(stream)))
        }
        .map_err(failed("read"))
    }
}

impl Drop for CudaBacking {
    /// Gives everything back; says nothing when there is nothing left to give, and touches nothing in a forked child.
    fn drop(&mut self) {
        if std::process::id() != self.owner {
            return;
        }
        if let Ok(_entered) = Entered::new(self.context) {
            if let Some(held) = self.held.take() {
                let _ = self.unmap(held);
            }
            for event in self.events.drain().map(|(_, event)| event).chain(self.spare.drain(..)) {
                // SAFETY: the event is ours, and no one has it after this.
                let _ = unsafe { result::event::destroy(event) };
            }
            if let Some(addresses) = self.addresses.take() {
                // SAFETY: the range is ours; what was mapped in it was unmapped above, or the driver refuses.
                let _ = unsafe { sys::cuMemAddressFree(addresses.base, addresses.bytes) };
            }
        }
        // SAFETY: gives back the one reference that `new` took.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These tests take turns: one that ends waits for the device, which would break another's capture.
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

    /// A device and a stream of its own, or a skip that says so. `tests/src/gpu.rs` is the same gate for those outside.
    fn open() -> Option<(CudaBacking, Stream, impl Drop)> {
        let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let required = std::env::var("REQUIRE_GPU").is_ok_and(|value| value == "1");
        match CudaBacking::new(0) {
            Ok(backing) => {
                let _entered = backing.enter("test").unwrap();
                let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
                Some((backing, Stream(stream.expose_provenance() as u64), turn))
            }
            Err(reason) if required => panic!("REQUIRE_GPU=1, but no CUDA device: {reason}"),
            Err(reason) => {
                // Not `eprintln!`, which the harness keeps to itself.
                let _ = std::io::Write::write_all(
                    &mut std::io::stderr(),
                    format!("SKIP no CUDA device: {reason}\n").as_bytes(),
                );
                None
            }
        }
    }

    #[test]
    fn a_capture_survives_every_call_and_takes_no_event() {
        let Some((mut backing, stream, _turn)) = open() else { return };
        let span = backing.reserve(Bytes::new(1 << 20).unwrap()).unwrap();
        let (before, pending) = (backing.record(stream).unwrap(), backing.record(Stream(0)).unwrap());
        {
            let _entered = backing.enter("test").unwrap();
            let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            // SAFETY: the stream is this test's.
            unsafe { result::stream::begin_capture(handle(stream), global) }.unwrap();
        }
        assert!(backing.is_capturing(stream));
        assert!(matches!(backing.record(stream), Err(BackingError::Call { call: "record", .. })));
        assert!(matches!(backing.wait(stream, pending), Err(BackingError::Call { call: "wait", .. })));
        backing.fill(span, 7, stream).unwrap();
        let mut backing = std::thread::spawn(move || {
            backing.synchronize(before).unwrap();
            while !backing.is_done(pending).unwrap() {}
            let other = backing.record(Stream(2)).unwrap();
            backing.synchronize(other).unwrap();
            backing.memory().unwrap();
            backing.fill(span, 3, Stream(2)).unwrap();
            let mut byte = [0];
            backing.read(span, &mut byte, Stream(2)).unwrap();
            assert_eq!(byte, [3]);
            backing
        })
        .join()
        .unwrap();
        {
            let _entered = backing.enter("test").unwrap();
            // SAFETY: as above.
            let graph = unsafe { result::stream::end_capture(handle(stream)) }.expect("no call broke the capture");
            assert!(!graph.is_null());
        }
        assert!(!backing.is_capturing(stream));
        backing.record(stream).unwrap();
    }

    #[test]
    fn the_callers_context_is_left_as_it_was() {
        let Some((mut backing, stream, _turn)) = open() else { return };
        assert_eq!(result::ctx::get_current().unwrap(), None);
        let span = backing.reserve(Bytes::new(512).unwrap()).unwrap();
        backing.fill(span, 1, stream).unwrap();
        backing.reserve(Bytes::new(512).unwrap()).unwrap_err();
        let event = backing.record(stream).unwrap();
        backing.synchronize(event).unwrap();
        backing.release(span).unwrap();
        drop(backing);
        assert_eq!(result::ctx::get_current().unwrap(), None);
    }

    #[test]
    fn events_are_made_once_and_used_again() {
        let Some((mut backing, stream, _turn)) = open() else { return };
        for _round in 0..100 {
            let event = backing.record(stream).unwrap();
            backing.synchronize(event).unwrap();
            let event = backing.record(stream).unwrap();
            backing.forget(event);
        }
        assert_eq!((backing.spare.len(), backing.events.len()), (1, 0));
    }

    #[test]
    fn a_forked_child_gets_an_error_from_every_call() {
        let Some((mut backing, stream, _turn)) = open() else { return };
        let span = backing.reserve(Bytes::new(512).unwrap()).unwrap();
        let event = backing.record(stream).unwrap();
        let mine = std::mem::replace(&mut backing.owner, 0);
        let forked = |result: Result<(), BackingError>| assert!(matches!(result, Err(BackingError::Forked { .. })));
        forked(backing.reserve(span.bytes).map(|_| ()));
        forked(backing.release(span));
        forked(backing.record(stream).map(|_| ()));
        forked(backing.is_done(event).map(|_| ()));
        forked(backing.wait(stream, event));
        forked(backing.synchronize(event));
        forked(backing.fill(span, 0, stream));
        forked(backing.read(span, &mut [0], stream));
        assert_eq!(backing.memory(), None);
        backing.owner = mine;
        backing.synchronize(event).unwrap();
        backing.release(span).unwrap();
    }
}
