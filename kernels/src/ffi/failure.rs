//! What a C caller is told: a status, and a text for each thread's last failure. No panic gets out: one becomes
//! [`Status::Panic`].

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use crate::error::Error;

/// What a call came to; `terrace_gdn_status` in C. Numbers are never reused.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done, or queued.
    Ok = 0,
    /// An argument is wrong; the text names it.
    BadArgument = 1,
    /// No driver, no such device, or one that is too old.
    NoDevice = 2,
    /// No NVRTC.
    NoCompiler = 3,
    /// The compiler or the driver refused.
    Driver = 4,
    /// This library was built without CUDA.
    NotBuilt = 5,
    /// This process is a fork of the one that first used the device.
    Forked = 6,
    /// The call panicked.
    Panic = 7,
    /// Anything else.
    Other = 8,
}

impl Status {
    /// All of them, by number.
    pub const ALL: [Self; 9] = [
        Self::Ok,
        Self::BadArgument,
        Self::NoDevice,
        Self::NoCompiler,
        Self::Driver,
        Self::NotBuilt,
        Self::Forked,
        Self::Panic,
        Self::Other,
    ];

    /// Its name in C.
    pub const fn name(self) -> &'static CStr {
        match self {
            Self::Ok => c"TERRACE_GDN_OK",
            Self::BadArgument => c"TERRACE_GDN_BAD_ARGUMENT",
            Self::NoDevice => c"TERRACE_GDN_NO_DEVICE",
            Self::NoCompiler => c"TERRACE_GDN_NO_COMPILER",
            Self::Driver => c"TERRACE_GDN_DRIVER",
            Self::NotBuilt => c"TERRACE_GDN_NOT_BUILT",
            Self::Forked => c"TERRACE_GDN_FORKED",
            Self::Panic => c"TERRACE_GDN_PANIC",
            Self::Other => c"TERRACE_GDN_OTHER",
        }
    }
}

/// Why a call failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub status: Status,
    /// One sentence; of a refused kernel also the compiler's log.
    pub text: String,
}

impl Failure {
    /// `why` continues the argument's name: `is null`.
    pub fn argument(name: &str, why: &str) -> Self {
        Self { status: Status::BadArgument, text: format!("{name} {why}") }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        #[cfg(feature = "cuda")]
        if let Error::Cuda(error) = error {
            return error.into();
        }
        Self { status: Status::BadArgument, text: error.to_string() }
    }
}

#[cfg(feature = "cuda")]
impl From<crate::cuda::CudaError> for Failure {
    fn from(error: crate::cuda::CudaError) -> Self {
        use crate::compile::CompileError;
        use crate::cuda::CudaError;
        let status = match &error {
            CudaError::NoDriver { .. }
            | CudaError::NoDevice { .. }
            | CudaError::OldDriver { .. }
            | CudaError::OldDevice { .. } => Status::NoDevice,
            CudaError::Forked { .. } => Status::Forked,
            CudaError::Grid { .. } => Status::BadArgument,
            CudaError::Compile(CompileError::NoNvrtc { .. }) => Status::NoCompiler,
            CudaError::Compile(CompileError::Refused { .. }) | CudaError::Driver { .. } => Status::Driver,
        };
        Self { status, text: error.to_string() }
    }
}

/// Runs a call for C: its status, and its text kept for `terrace_gdn_last_error`.
pub(super) fn guarded(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        Err(Failure { status: Status::Panic, text: format!("the library panicked: {}", panic_text(payload)) })
    });
    match result {
        Ok(()) => Status::Ok,
        Err(failure) => {
            keep(&failure.text);
            failure.status
        }
    }
}

fn panic_text(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return *text,
        Err(payload) => payload,
    };
    match payload.downcast::<&str>() {
        Ok(text) => (*text).to_owned(),
        Err(other) => {
            // It could panic again when dropped.
            std::mem::forget(other);
            "(no text)".to_owned()
        }
    }
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Keeps a text as this thread's last failure. A thread that is about to end keeps nothing.
fn keep(text: &str) {
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some(text));
}

/// This thread's last failure, or an empty text; valid until the next one.
pub(super) fn last() -> *const c_char {
    let last = LAST.try_with(|last| last.borrow().as_ref().map(|text| text.as_ptr()));
    last.ok().flatten().unwrap_or(c"".as_ptr())
}

/// A pointer argument that must point at something.
pub(super) fn pointer<T>(at: *const T, name: &str) -> Result<NonNull<T>, Failure> {
    let at = NonNull::new(at.cast_mut()).ok_or_else(|| Failure::argument(name, "is null"))?;
    if at.is_aligned() { Ok(at) } else { Err(Failure::argument(name, "is not aligned: it points into something else")) }
}
