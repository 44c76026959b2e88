//! The C face: `include/terrace.h`, function by function. The header says what a caller needs to know; here is what each
//! function makes of it.
//!
//! ```text
//!   ffi.rs            terrace_create .. terrace_on_failure: arguments checked, then one call of a `Handle`
//!   ffi/handle.rs     a device behind its lock, and what a panic or a fork makes of it
//!   ffi/failure.rs    statuses and the text of the last failure
//!   ffi/torch.rs      terrace_torch_*: devices by ordinal, and the functions that PyTorch calls
//!   ffi/throw.rs      C++ exceptions, for PyTorch alone
//!   ffi/tape.rs       a record of what a device was asked for, as a profile
//! ```
//!
//! No panic crosses: each function runs inside `guarded`. Pointers are checked for null and alignment; whether they point at
//! what they say is the caller's promise.

mod failure;
mod handle;
mod tape;
mod throw;
mod torch;

use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use terrace_profiles::units::{Align, Bytes};

use crate::backing::{Backing, Stream};
use crate::device::Config;
use crate::host::HostBacking;
use crate::pool::PoolId;

pub use failure::{Failure, Status};
use failure::{guarded, last, pointer};
pub use handle::{FailureCallback, Handle};
pub use throw::OutOfMemoryThrower;
pub use torch::*;

/// `TERRACE_HOST`: memory of this process.
pub const BACKING_HOST: u32 = 1;
/// `TERRACE_CUDA`: a CUDA device.
pub const BACKING_CUDA: u32 = 2;

/// What a device is opened with; `terrace_options` in C. It only ever grows at its end: `size` says how much of it the caller
/// knows. 0 stands for the default everywhere but in `size`, `backing` and `budget`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `sizeof(terrace_options)`.
    pub size: u64,
    /// Bytes of the one reservation.
    pub budget: u64,
    /// What every request is rounded up to: a power of two.
    pub align: u64,
    /// [`BACKING_HOST`] or [`BACKING_CUDA`].
    pub backing: u32,
    /// Which CUDA device.
    pub ordinal: u32,
    /// Not 0: redzones and poison.
    pub debug: u32,
    /// Steps in a row that may differ before a key is given up.
    pub patience: u32,
    /// Most keys with a plan.
    pub most_keys: u32,
    /// 0.
    pub reserved: u32,
}

/// The id of a graph pool, as CUDA has it; `terrace_pool` in C, and passed as C++ passes a `std::pair` of two numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The first half.
    pub first: u64,
    /// The second.
    pub second: u64,
}

impl Pool {
    fn id(self) -> PoolId {
        (self.first, self.second)
    }
}

/// The version: major, minor and patch, a byte each.
pub const VERSION: u32 = part(env!("CARGO_PKG_VERSION_MAJOR")) << 16
    | part(env!("CARGO_PKG_VERSION_MINOR")) << 8
    | part(env!("CARGO_PKG_VERSION_PATCH"));

/// Every reservation begins at a multiple of it.
const MOST_ALIGN: u64 = 4096;

const fn part(text: &str) -> u32 {
    match u32::from_str_radix(text, 10) {
        Ok(number) if number < 256 => number,
        _ => panic!("a part of the version does not fit a byte"),
    }
}

/// The version of the library, to hold against the header's `TERRACE_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_version() -> u32 {
    VERSION
}

/// The name of a status: `TERRACE_OK`. A number that is none is `TERRACE_OTHER`.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_status_name(status: c_int) -> *const c_char {
    let known = usize::try_from(status).ok().and_then(|status| Status::ALL.get(status));
    known.unwrap_or(&Status::Other).name().as_ptr()
}

/// The text of this thread's last failure; empty before the first.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_last_error() -> *const c_char {
    last()
}

/// Opens a device.
///
/// # Safety
/// `options` is null or points at as many readable bytes as its `size` says; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_create(options: *const Options, out: *mut *mut Handle) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise; the options' `size` bytes are readable.
        unsafe {
            create(out, || {
                let options = pointer(options, "options")?;
                read_options(options.as_ptr())
            })
        }
    })
}

/// Opens memory of this process as a device, with defaults.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_create_host(budget: u64, out: *mut *mut Handle) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { create(out, || Ok(Options { budget, backing: BACKING_HOST, ..Options::default() })) })
}

/// Opens a CUDA device, with defaults.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_create_cuda(ordinal: u32, budget: u64, out: *mut *mut Handle) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { create(out, || Ok(Options { budget, ordinal, backing: BACKING_CUDA, ..Options::default() })) })
}

/// Closes a device and gives its reservation back. Null is nothing. In a forked child nothing is touched.
///
/// # Safety
/// `device` is null or came from a `terrace_create`, was not destroyed before, and nobody uses it or its memory any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_destroy(device: *mut Handle) -> Status {
    guarded(|| {
        if device.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { handle(device) }?.not_forked()?;
        // SAFETY: the pointer came from `Arc::into_raw` in `create`, and this gives up the reference that was made there.
        drop(unsafe { Arc::from_raw(device.cast_const()) });
        Ok(())
    })
}

/// Begins a step: a forward of the kind that the key's bytes name.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; `key` points at `length` readable bytes, or `length` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_begin_step(
    device: *mut Handle,
    key: *const c_void,
    length: usize,
    on: *mut c_void,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (handle, key) = unsafe { (handle(device)?, slice(key.cast::<u8>(), length, "key")?) };
        handle.begin_step(key, stream(on))
    })
}

/// Ends the step that this thread began.
///
/// # Safety
/// `device` as in [`terrace_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_end_step(device: *mut Handle) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handle(device) }?;
        handle.end_step()
    })
}

/// Serves a request. No bytes: null.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; `label` is null or a text that ends with a null byte; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_alloc(
    device: *mut Handle,
    bytes: u64,
    on: *mut c_void,
    label: *const c_char,
    out: *mut *mut c_void,
) -> Status {
    guarded(|| {
        let out = pointer(out, "out")?;
        // SAFETY: checked; the caller lets it be written.
        unsafe { out.write(ptr::null_mut()) };
        // SAFETY: the caller's promise.
        let handle = unsafe { handle(device) }?;
        let bytes = size(bytes, "bytes")?;
        // SAFETY: the caller's promise.
        let label =
            if label.is_null() { Cow::Borrowed("") } else { unsafe { CStr::from_ptr(label) }.to_string_lossy() };
        let address = handle.alloc(bytes, stream(on), &label)?;
        // SAFETY: as above.
        unsafe { out.write(ptr::with_exposed_provenance_mut(address as usize)) };
        Ok(())
    })
}

/// Frees. Null is nothing; a pointer that is not live is counted, and told.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; nobody uses the buffer any more, but for work queued on its stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_free(device: *mut Handle, at: *mut c_void) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handle(device) }?;
        if at.is_null() { Ok(()) } else { handle.free(address(at)) }
    })
}

/// Says that another stream uses a buffer.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; the stream lives until the buffer is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_record_stream(device: *mut Handle, at: *mut c_void, on: *mut c_void) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handle(device) }?;
        let at = pointer(at.cast::<u8>(), "ptr")?;
        handle.record_stream(address(at.as_ptr().cast()), stream(on))
    })
}

/// From here on, requests on these streams, or on all if none is named, belong to that pool.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; `streams` points at `count` of them, or `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_begin_pool(
    device: *mut Handle,
    pool: Pool,
    streams: *const *mut c_void,
    count: usize,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (handle, streams) = unsafe { (handle(device)?, slice(streams, count, "streams")?) };
        let streams: Vec<Stream> = streams.iter().copied().map(stream).collect();
        handle.locked(|device| device.begin_pool(pool.id(), &streams))
    })
}

/// The capture into that pool ends; its memory stays pinned.
///
/// # Safety
/// `device` as in [`terrace_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_end_pool(device: *mut Handle, pool: Pool) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| Ok(unsafe { handle(device) }?.locked(|device| device.end_pool(pool.id()))??))
}

/// No graph uses that pool any more.
///
/// # Safety
/// `device` as in [`terrace_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_release_pool(device: *mut Handle, pool: Pool) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| Ok(unsafe { handle(device) }?.locked(|device| device.release_pool(pool.id()))??))
}

/// Where the reservation lies.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; `base` and `bytes` are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_reservation(device: *mut Handle, base: *mut *mut c_void, bytes: *mut u64) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (at, size) = unsafe { handle(device) }?.span();
        let (base, bytes) = (pointer(base, "base")?, pointer(bytes, "bytes")?);
        // SAFETY: checked; the caller lets them be written.
        unsafe {
            base.write(ptr::with_exposed_provenance_mut(at as usize));
            bytes.write(size);
        }
        Ok(())
    })
}

/// Replaces the reservation by one of that size, between steps and with nothing in it. Plans stay.
///
/// # Safety
/// `device` as in [`terrace_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_resize(device: *mut Handle, budget: u64) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { handle(device) }?.resize(size(budget, "budget")?))
}

/// Bytes to set aside for steps before anything else is sized.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_required_bytes(device: *mut Handle, out: *mut u64) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { tell(out, "out", handle(device)?.locked(|device| device.required_bytes().get())?) })
}

/// The most that any plan so far needed.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_arena_bytes(device: *mut Handle, out: *mut u64) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { tell(out, "out", handle(device)?.locked(|device| device.arena_bytes().get())?) })
}

/// The figures so far as JSON, like `snprintf`: as much as fits and a null byte into the buffer, the whole length into
/// `length`.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; `buffer` may be written for `capacity` bytes, or `capacity` is 0; `length` is null or
/// may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_stats_json(
    device: *mut Handle,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { handle(device) }?;
        let json = handle.locked(|device| device.stats().to_json())?;
        // SAFETY: the caller's promise.
        unsafe { tell(length, "length", json.len()) }?;
        if capacity == 0 {
            return Ok(());
        }
        let buffer = pointer(buffer, "buffer")?;
        let fits = json.len().min(capacity - 1);
        // SAFETY: the buffer has `capacity` bytes, and `fits` and one more are no more than that.
        unsafe {
            buffer.copy_from_nonoverlapping(pointer(json.as_ptr().cast(), "json")?, fits);
            buffer.add(fits).write(0);
        }
        Ok(())
    })
}

/// Gives back what was freed on several streams and is done; with `wait`, waits for all of it.
///
/// # Safety
/// `device` as in [`terrace_destroy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_drain(device: *mut Handle, wait: c_int) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { handle(device) }?.locked(|device| device.drain(wait != 0)))
}

/// Sets what is called when a request finds no room; null for nothing.
///
/// # Safety
/// `device` as in [`terrace_destroy`]; the callback may be called with `user` from any thread until another is set, does not
/// unwind, and calls on the same device only from the same thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_on_failure(
    device: *mut Handle,
    callback: Option<FailureCallback>,
    user: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    guarded(|| unsafe { handle(device) }?.set_callback(callback, user))
}

/// # Safety
/// `device` is null or came from `create` and was not destroyed.
unsafe fn handle<'a>(device: *mut Handle) -> Result<&'a Handle, Failure> {
    // SAFETY: checked for null and alignment; that it is a device is the caller's promise.
    Ok(unsafe { pointer(device, "device")?.as_ref() })
}

/// # Safety
/// `out` is null or may be written.
unsafe fn create(out: *mut *mut Handle, options: impl FnOnce() -> Result<Options, Failure>) -> Result<(), Failure> {
    let out = pointer(out, "out")?;
    // SAFETY: checked; the caller lets it be written. Before anything can fail, so that a failure leaves no old pointer there.
    unsafe { out.write(ptr::null_mut()) };
    let options = options()?;
    let config = config(options)?;
    let handle = Handle::open(backing(options.backing, options.ordinal)?, config)?;
    // SAFETY: as above.
    unsafe { out.write(Arc::into_raw(handle).cast_mut()) };
    Ok(())
}

/// The options of a caller whose header may be older or newer. What it knows and this library does not must be 0.
///
/// # Safety
/// Aligned, with a readable `size`, and as many readable bytes as that says.
unsafe fn read_options(from: *const Options) -> Result<Options, Failure> {
    const KNOWN: usize = size_of::<Options>();
    // SAFETY: the caller's promise.
    let size = unsafe { (*from).size };
    let size = usize::try_from(size).ok().filter(|size| (KNOWN..=4096).contains(size)).ok_or_else(|| {
        Failure::argument(
            "options.size",
            &format!("is {size}; set it to sizeof(terrace_options), which is {KNOWN} here"),
        )
    })?;
    // SAFETY: the caller's promise; `size` is at least `KNOWN`.
    let (known, newer) = unsafe {
        let newer = from.cast::<u8>().add(KNOWN);
        (from.read(), std::slice::from_raw_parts(newer, size - KNOWN))
    };
    if let Some(at) = newer.iter().position(|byte| *byte != 0) {
        let why =
            format!("asks at byte {} for what this library, {}, does not know", KNOWN + at, env!("CARGO_PKG_VERSION"));
        return Err(Failure::argument("options", &why));
    }
    if known.reserved != 0 {
        return Err(Failure::argument("options.reserved", "is not 0"));
    }
    Ok(known)
}

/// What a device is opened with, of options that C gave.
///
/// # Errors
/// A budget or an alignment that cannot be.
pub fn config(options: Options) -> Result<Config, Failure> {
    let mut config = Config::new(size(options.budget, "budget")?);
    if options.align != 0 {
        config.align =
            Align::new(options.align).map_err(|error| Failure::argument("align", &format!("is wrong: {error}")))?;
    }
    config.debug = options.debug != 0;
    if config.align.get() > MOST_ALIGN {
        return Err(Failure::argument("align", &format!("is {}, more than {MOST_ALIGN}", options.align)));
    }
    if config.debug && config.align > Align::DEFAULT {
        // Redzones are as wide as that: what follows one is no more aligned.
        return Err(Failure::argument("align", &format!("is {}, but with debug it is at most 512", options.align)));
    }
    if options.patience != 0 {
        config.patience = options.patience;
    }
    if options.most_keys != 0 {
        config.most_keys = options.most_keys as usize;
    }
    Ok(config)
}

/// The memory that a number of [`Options::backing`] names.
///
/// # Errors
/// No such number, or no such device.
pub fn backing(kind: u32, ordinal: u32) -> Result<Box<dyn Backing>, Failure> {
    match kind {
        BACKING_HOST => Ok(Box::new(HostBacking::new())),
        BACKING_CUDA => cuda(ordinal),
        other => Err(Failure::argument("backing", &format!("is {other}, not TERRACE_HOST or TERRACE_CUDA"))),
    }
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: u32) -> Result<Box<dyn Backing>, Failure> {
    Ok(Box::new(crate::cuda::CudaBacking::new(ordinal)?))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_ordinal: u32) -> Result<Box<dyn Backing>, Failure> {
    Err(Failure::new(Status::NotBuilt, "this library was built without CUDA: build it with its feature `cuda`"))
}

fn size(bytes: u64, name: &str) -> Result<Bytes, Failure> {
    Bytes::new(bytes)
        .ok_or_else(|| Failure::argument(name, &format!("is {bytes}, more than 2^63 - 1: a negative size?")))
}

fn stream(handle: *mut c_void) -> Stream {
    Stream(handle.addr() as u64)
}

fn address(at: *mut c_void) -> u64 {
    at.addr() as u64
}

/// # Safety
/// `at` points at `count` readable values, or `count` is 0.
unsafe fn slice<'a, T>(at: *const T, count: usize, name: &str) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    let at = pointer(at, name)?;
    if count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::argument(name, &format!("cannot have {count} elements")));
    }
    // SAFETY: checked for null, alignment and size; the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(at.as_ptr(), count) })
}

/// # Safety
/// `out` is null or may be written.
unsafe fn tell<T>(out: *mut T, name: &str, value: T) -> Result<(), Failure> {
    let out = pointer(out, name)?;
    // SAFETY: checked; the caller lets it be written.
    unsafe { out.write(value) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;
    use crate::backing::{BackingError, Event};
    use terrace_profiles::units::DeviceSpan;

    /// Host memory whose events panic, as a bug inside the library would.
    struct Panics(HostBacking);

    impl Backing for Panics {
        fn name(&self) -> String {
            self.0.name()
        }
        fn memory(&self) -> Option<(Bytes, Bytes)> {
            None
        }
        fn reserve(&mut self, bytes: Bytes) -> Result<DeviceSpan, BackingError> {
            self.0.reserve(bytes)
        }
        fn release(&mut self, span: DeviceSpan) -> Result<(), BackingError> {
            self.0.release(span)
        }
        fn reservations(&self) -> u64 {
            self.0.reservations()
        }
        fn record(&mut self, _stream: Stream) -> Result<Event, BackingError> {
            panic!("event {} is odd", 7)
        }
        fn is_done(&mut self, event: Event) -> Result<bool, BackingError> {
            self.0.is_done(event)
        }
        fn wait(&mut self, stream: Stream, event: Event) -> Result<(), BackingError> {
            self.0.wait(stream, event)
        }
        fn synchronize(&mut self, event: Event) -> Result<(), BackingError> {
            self.0.synchronize(event)
        }
        fn forget(&mut self, event: Event) {
            self.0.forget(event);
        }
        fn is_capturing(&mut self, _stream: Stream) -> bool {
            false
        }
        fn fill(&mut self, span: DeviceSpan, byte: u8, stream: Stream) -> Result<(), BackingError> {
            self.0.fill(span, byte, stream)
        }
        fn read(&mut self, span: DeviceSpan, into: &mut [u8], stream: Stream) -> Result<(), BackingError> {
            self.0.read(span, into, stream)
        }
    }

    fn text() -> String {
        // SAFETY: the text ends with a null byte and lives until this thread's next failure.
        unsafe { CStr::from_ptr(terrace_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_status_and_the_device_is_dead() {
        let config = Config::new(Bytes::new(1 << 20).unwrap());
        let handle = Handle::open(Box::new(Panics(HostBacking::new())), config).unwrap();
        let device = Arc::into_raw(handle).cast_mut();
        let (nothing, mut at) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live device, and pointers to what is on this stack.
        unsafe {
            assert_eq!(terrace_alloc(device, 512, nothing, ptr::null(), &raw mut at), Status::Ok);
            assert_eq!(terrace_begin_step(device, ptr::null(), 0, nothing), Status::Ok);
            // The end of a step records an event.
            assert_eq!(terrace_end_step(device), Status::Panic);
            assert_eq!(text(), "the library panicked, and the device is dead: event 7 is odd");
            assert_eq!(terrace_alloc(device, 512, nothing, ptr::null(), &raw mut at), Status::Panic);
            assert_eq!(text(), "the device is dead, destroy it: an earlier call panicked: event 7 is odd");
            assert!(at.is_null());
            assert_eq!(terrace_free(device, nothing), Status::Ok);
            assert_eq!(terrace_drain(device, 1), Status::Panic);
            assert_eq!(terrace_destroy(device), Status::Ok);
        }
    }

    #[test]
    fn a_text_with_a_null_byte_is_kept_whole() {
        failure::keep("one\0two");
        assert_eq!(text(), "one?two");
    }

    #[test]
    fn an_error_of_one_thread_is_not_anothers() {
        failure::keep("mine");
        assert_eq!(std::thread::spawn(text).join().unwrap(), "");
        assert_eq!(text(), "mine");
    }

    #[test]
    fn statuses_are_numbered_in_order() {
        for (number, status) in (0..).zip(Status::ALL) {
            assert_eq!(status as c_int, number);
            assert_eq!(terrace_status_name(number), status.name().as_ptr());
        }
        for none in [-1, 14, c_int::MAX] {
            assert_eq!(terrace_status_name(none), Status::Other.name().as_ptr());
        }
    }

    #[test]
    fn an_error_of_the_library_has_its_own_status() {
        let check = |error: crate::Error, status| assert_eq!(Failure::from(error).status, status);
        check(crate::Error::NoSuchPool((1, 2)), Status::NoSuchPool);
        check(crate::Error::NotEmpty { live: 1, bytes: 1, pinned: 0 }, Status::NotEmpty);
        check(crate::Error::StepOpen { what: "it", step: "a".to_owned() }, Status::StepOpen);
        check(BackingError::NoDevice("none".to_owned()).into(), Status::NoDevice);
        check(BackingError::Forked { call: "it", owner: 1 }.into(), Status::Forked);
        check(BackingError::Call { call: "it", reason: "no".to_owned() }.into(), Status::Driver);
        check(BackingError::Reserve { asked: Bytes::ZERO, reason: "no".to_owned() }.into(), Status::OutOfMemory);
    }

    #[test]
    fn a_newer_header_may_ask_for_nothing_unknown() {
        #[repr(C)]
        struct Newer {
            known: Options,
            more: u64,
        }
        let known =
            Options { size: size_of::<Newer>() as u64, budget: 4096, backing: BACKING_HOST, ..Options::default() };
        let mut device = ptr::null_mut();
        for (more, status) in [(0, Status::Ok), (1, Status::BadArgument)] {
            let newer = Newer { known, more };
            // SAFETY: as many bytes as the size says, and a pointer to what is on this stack.
            unsafe {
                assert_eq!(terrace_create((&raw const newer).cast(), &raw mut device), status);
                terrace_destroy(device);
            }
        }
        assert!(text().starts_with("options asks at byte 48 "), "{}", text());
        for size in [0, 47, 4097, u64::MAX] {
            let options = Options { size, ..known };
            // SAFETY: as above; a wrong size is refused before more is read.
            assert_eq!(unsafe { terrace_create(&raw const options, &raw mut device) }, Status::BadArgument);
        }
    }

    #[test]
    fn a_label_need_not_be_unicode() {
        let mut device = ptr::null_mut();
        let label = CString::new([0xff, b'x']).unwrap();
        let mut at = ptr::null_mut();
        // SAFETY: a live device, a text that ends, and pointers to what is on this stack.
        unsafe {
            assert_eq!(terrace_create_host(4096, &raw mut device), Status::Ok);
            let served = terrace_alloc(device, 8192, ptr::null_mut(), label.as_ptr(), &raw mut at);
            assert_eq!(served, Status::OutOfMemory);
            assert!(text().contains("\u{fffd}x asked for 8192 bytes"), "{}", text());
            assert_eq!(terrace_destroy(device), Status::Ok);
        }
    }
}
