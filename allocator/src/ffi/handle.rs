//! What a `terrace_device*` points at: a device behind its lock, made safe against panics and forks.
//!
//! A panic inside a call leaves the device half changed, and a device that hands out an address twice is worse than none: so
//! the device is *dead* from then on. Every later call fails with [`Status::Panic`] and the first panic's text, frees do
//! nothing, and what it had handed out stays valid until it is destroyed.
//!
//! A forked child has the parent's handles but neither its threads, whose locks may be held forever, nor its CUDA context. It
//! is noticed before any lock is taken: a handler that `fork()` runs in the child raises a number that each handle remembers.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use terrace_profiles::Profile;
use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::allocator::Allocator;
use crate::backing::{Backing, Stream};
use crate::device::{Config, Device};
use crate::error::Error;
use crate::ffi::failure::{Failure, Status, panic_text};
use crate::ffi::tape::Tape;

/// Called when a request finds no room, before anything is waited for: `user` as it was registered, and the bytes asked for.
/// Not 0: something was freed, try again. It runs on the thread whose request it is, without the lock, and must not unwind.
pub type FailureCallback = unsafe extern "C" fn(user: *mut c_void, bytes: u64) -> c_int;

/// What a `terrace_device*` points at; opaque in C.
pub struct Handle {
    allocator: Allocator,
    /// Where the reservation lies. Read without the lock, which is enough to tell whose a pointer is: it changes only while
    /// nothing lives in it.
    base: AtomicU64,
    bytes: AtomicU64,
    /// The text of the panic that killed it.
    death: OnceLock<String>,
    /// [`FORKS`] when it was opened.
    forks: u64,
    callback: Mutex<Option<Callback>>,
    /// Whether there is one.
    calls: AtomicBool,
    tape: Mutex<Option<Tape>>,
    /// Whether there is one.
    taping: AtomicBool,
}

thread_local! {
    /// This thread is inside a failure callback.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

#[derive(Clone, Copy)]
struct Callback {
    call: FailureCallback,
    user: *mut c_void,
}

// SAFETY: whoever registers a callback promises that it may be called with this pointer from any thread; here it is only
// passed on.
unsafe impl Send for Callback {}

impl Handle {
    /// Opens a device. Its address must be as aligned as its requests are to be.
    ///
    /// # Errors
    /// As [`Device::new`], and an alignment that the memory does not have.
    pub fn open(backing: Box<dyn Backing>, config: Config) -> Result<Arc<Self>, Failure> {
        watch_forks();
        let align = config.align.get();
        let allocator = Allocator::new(backing, config)?;
        let span = allocator.device().reservation();
        if !span.address.is_multiple_of(align) {
            let why = format!("is {align}, and this device's memory begins at {:#x}; ask for less", span.address);
            return Err(Failure::argument("align", &why));
        }
        Ok(Arc::new(Self {
            allocator,
            base: AtomicU64::new(span.address),
            bytes: AtomicU64::new(span.bytes.get()),
            death: OnceLock::new(),
            forks: FORKS.load(Ordering::Relaxed),
            callback: Mutex::new(None),
            calls: AtomicBool::new(false),
            tape: Mutex::new(None),
            taping: AtomicBool::new(false),
        }))
    }

    /// Where the reservation lies: its first address and its bytes.
    pub fn span(&self) -> (u64, u64) {
        (self.base.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Whether the address lies in the reservation.
    pub(super) fn holds(&self, address: u64) -> bool {
        let (base, bytes) = self.span();
        address.checked_sub(base).is_some_and(|offset| offset < bytes)
    }

    /// See [`Device::resize`].
    ///
    /// # Errors
    /// As [`Device::resize`], and what [`Handle::locked`] says.
    pub fn resize(&self, budget: Bytes) -> Result<(), Failure> {
        let resized = self.locked(|device| {
            let resized = device.resize(budget);
            let DeviceSpan { address, bytes } = device.reservation();
            self.base.store(address, Ordering::Relaxed);
            self.bytes.store(bytes.get(), Ordering::Relaxed);
            resized
        })?;
        Ok(resized?)
    }

    /// That this process opened the device.
    pub(super) fn not_forked(&self) -> Result<(), Failure> {
        if self.forks == FORKS.load(Ordering::Relaxed) {
            return Ok(());
        }
        let text = "this process is a fork of the one that opened the device; open a device after fork()";
        Err(Failure::new(Status::Forked, text))
    }

    /// Runs a call under the lock; a panic in it kills the device. Steps, requests and frees have functions of their own here, which
    /// a tape sees.
    ///
    /// # Errors
    /// This process is a fork of the one that opened the device, or an earlier call panicked, or this one did.
    pub fn locked<T>(&self, call: impl FnOnce(&mut Device) -> T) -> Result<T, Failure> {
        self.not_forked()?;
        let mut device = self.allocator.device();
        if let Some(death) = self.death.get() {
            let text = format!("the device is dead, destroy it: an earlier call panicked: {death}");
            return Err(Failure::new(Status::Panic, text));
        }
        // The lock is held until the death is noted, so no other call sees what the panic left.
        catch_unwind(AssertUnwindSafe(|| call(&mut device))).map_err(|payload| {
            let text = panic_text(payload);
            let failure = Failure::new(Status::Panic, format!("the library panicked, and the device is dead: {text}"));
            let _ = self.death.set(text);
            failure
        })
    }

    /// See [`Device::begin_step`].
    ///
    /// # Errors
    /// As [`Device::begin_step`], and what [`Handle::locked`] says.
    pub fn begin_step(&self, key: &[u8], stream: Stream) -> Result<(), Failure> {
        Ok(self.locked(|device| {
            device.begin_step(key, stream)?;
            self.on_tape(|tape| tape.begin_step(key));
            Ok::<_, Error>(())
        })??)
    }

    /// See [`Device::end_step`].
    ///
    /// # Errors
    /// As [`Device::end_step`], [`Status::NoStep`] if this thread has begun none, and what [`Handle::locked`] says.
    pub fn end_step(&self) -> Result<(), Failure> {
        let balanced = self.locked(|device| {
            let before = device.stats().divergences.unbalanced;
            device.end_step()?;
            let balanced = device.stats().divergences.unbalanced == before;
            if balanced {
                self.on_tape(Tape::end_step);
            }
            Ok::<_, Error>(balanced)
        })??;
        let text = "this thread has begun no step that it could end";
        if balanced { Ok(()) } else { Err(Failure::new(Status::NoStep, text)) }
    }

    /// Writes down every step, request and free from here on; what an earlier call has written so far is dropped.
    pub fn start_tape(&self) {
        *self.tape.lock().unwrap_or_else(PoisonError::into_inner) = Some(Tape::default());
        self.taping.store(true, Ordering::Relaxed);
    }

    /// What was written down since [`Handle::start_tape`], as a profile of that name; `None` if nothing was started.
    pub fn take_tape(&self, name: &str) -> Option<Profile> {
        self.taping.store(false, Ordering::Relaxed);
        let tape = self.tape.lock().unwrap_or_else(PoisonError::into_inner).take();
        tape.map(|tape| tape.into_profile(name))
    }

    /// Called under the device's lock, so that the tape has the order of the device.
    fn on_tape(&self, write: impl FnOnce(&mut Tape)) {
        if self.taping.load(Ordering::Relaxed)
            && let Some(tape) = &mut *self.tape.lock().unwrap_or_else(PoisonError::into_inner)
        {
            write(tape);
        }
    }

    /// Serves a request. If there is a failure callback, nothing is waited for as long as that frees something; a request of
    /// the callback itself does not call it.
    ///
    /// # Errors
    /// As [`Device::alloc`], and what [`Handle::locked`] says.
    pub fn alloc(&self, bytes: Bytes, stream: Stream, label: &str) -> Result<u64, Failure> {
        let mut calls = self.calls.load(Ordering::Relaxed) && !INSIDE.get();
        loop {
            let served = self.locked(|device| {
                device.call_first = calls;
                let served = device.alloc(bytes, stream, label);
                if let Ok(span) = &served {
                    self.on_tape(|tape| tape.alloc(span.address, bytes, stream, label));
                }
                served
            })?;
            match served {
                Ok(span) => return Ok(span.address),
                Err(Error::OutOfMemory(_)) if calls => calls = self.call_back(bytes),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Frees.
    ///
    /// # Errors
    /// [`Status::NotLive`] if nothing that lives begins there, and what [`Handle::locked`] says.
    pub fn free(&self, address: u64) -> Result<(), Failure> {
        self.about(address, "free", |device| {
            device.note_thread(address);
            device.free(address);
            self.on_tape(|tape| tape.free(address));
        })
    }

    /// See [`Device::record_stream`].
    ///
    /// # Errors
    /// [`Status::NotLive`] as for a free, and what [`Handle::locked`] says.
    pub fn record_stream(&self, address: u64, stream: Stream) -> Result<(), Failure> {
        self.about(address, "record_stream", |device| device.record_stream(address, stream))
    }

    /// A call about a buffer. The core only counts the pointers that are not live; C is told.
    fn about(&self, address: u64, what: &str, call: impl FnOnce(&mut Device)) -> Result<(), Failure> {
        let unknown = |device: &Device| {
            let counts = &device.stats().divergences;
            counts.unknown_free + counts.freed_twice
        };
        let live = self.locked(|device| {
            let before = unknown(device);
            call(device);
            unknown(device) == before
        })?;
        if live {
            return Ok(());
        }
        let whose = if self.holds(address) { "no live buffer begins" } else { "this device has no memory" };
        Err(Failure::new(Status::NotLive, format!("{what} ignored: {whose} at {address:#x}")))
    }

    pub(super) fn set_callback(&self, call: Option<FailureCallback>, user: *mut c_void) -> Result<(), Failure> {
        self.not_forked()?;
        let mut callback = self.callback.lock().unwrap_or_else(PoisonError::into_inner);
        *callback = call.map(|call| Callback { call, user });
        self.calls.store(call.is_some(), Ordering::Relaxed);
        Ok(())
    }

    /// Whether there is a callback and it freed something.
    #[cold]
    fn call_back(&self, bytes: Bytes) -> bool {
        let callback = *self.callback.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(callback) = callback else { return false };
        INSIDE.set(true);
        // SAFETY: whoever registered it promised that it may be called so, from any thread, until it is replaced.
        let freed = unsafe { (callback.call)(callback.user, bytes.get()) } != 0;
        INSIDE.set(false);
        freed
    }
}

/// How often this process came out of a `fork()` as the child since the first device was opened.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Has each `fork()` from now on raise [`FORKS`] in the child.
#[cfg(unix)]
fn watch_forks() {
    type Handler = Option<unsafe extern "C" fn()>;
    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }
    unsafe extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    static WATCHING: std::sync::Once = std::sync::Once::new();
    // SAFETY: the handler lives as long as the library, and does the one thing that is allowed after a fork: it writes memory.
    // A refusal for want of memory is no reason to refuse a device.
    WATCHING.call_once(|| _ = unsafe { pthread_atfork(None, None, Some(in_child)) });
}

#[cfg(not(unix))]
fn watch_forks() {}
