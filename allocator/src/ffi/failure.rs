//! What a C caller is told: a status, and a text for each thread's last failure.
//!
//! Refused: letting a panic out. Whatever happens inside a call becomes a [`Status`]; one that panicked is [`Status::Panic`].

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use crate::backing::BackingError;
use crate::error::Error;

/// What a call came to; `terrace_status` in C. Numbers are never reused.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The budget is spent, or the device has less free than was to be reserved.
    OutOfMemory = 1,
    /// An argument is wrong; the text names it.
    BadArgument = 2,
    /// There is no driver, or no such device.
    NoDevice = 3,
    /// This library was built without what was asked for.
    NotBuilt = 4,
    /// The driver refused.
    Driver = 5,
    /// Only possible between steps, and one is open.
    StepOpen = 6,
    /// A step was ended that this thread never began. Counted; nothing else happened.
    NoStep = 7,
    /// That graph pool is not there, or not being captured.
    NoSuchPool = 8,
    /// Nothing that lives begins at that pointer. Counted; nothing else happened.
    NotLive = 9,
    /// Only possible with nothing in the reservation.
    NotEmpty = 10,
    /// This process is a fork of the one that opened the device.
    Forked = 11,
    /// This call panicked, or an earlier one on this device did, which left the device dead.
    Panic = 12,
    /// Anything else; the text says what.
    Other = 13,
}

impl Status {
    /// All of them, by number.
    pub const ALL: [Self; 14] = [
        Self::Ok,
        Self::OutOfMemory,
        Self::BadArgument,
        Self::NoDevice,
        Self::NotBuilt,
        Self::Driver,
        Self::StepOpen,
        Self::NoStep,
        Self::NoSuchPool,
        Self::NotLive,
        Self::NotEmpty,
        Self::Forked,
        Self::Panic,
        Self::Other,
    ];

    /// Its name in C.
    pub const fn name(self) -> &'static CStr {
        match self {
            Self::Ok => c"TERRACE_OK",
            Self::OutOfMemory => c"TERRACE_OUT_OF_MEMORY",
            Self::BadArgument => c"TERRACE_BAD_ARGUMENT",
            Self::NoDevice => c"TERRACE_NO_DEVICE",
            Self::NotBuilt => c"TERRACE_NOT_BUILT",
            Self::Driver => c"TERRACE_DRIVER",
            Self::StepOpen => c"TERRACE_STEP_OPEN",
            Self::NoStep => c"TERRACE_NO_STEP",
            Self::NoSuchPool => c"TERRACE_NO_SUCH_POOL",
            Self::NotLive => c"TERRACE_NOT_LIVE",
            Self::NotEmpty => c"TERRACE_NOT_EMPTY",
            Self::Forked => c"TERRACE_FORKED",
            Self::Panic => c"TERRACE_PANIC",
            Self::Other => c"TERRACE_OTHER",
        }
    }
}

/// Why a call failed.
#[derive(Debug)]
pub struct Failure {
    /// What it came to; not [`Status::Ok`].
    pub status: Status,
    /// One sentence; of a spent budget, the whole report.
    pub text: String,
}

impl Failure {
    pub(super) fn new(status: Status, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    /// `why` continues the argument's name: `is null`.
    pub(super) fn argument(name: &str, why: &str) -> Self {
        Self::new(Status::BadArgument, format!("{name} {why}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::OutOfMemory(report) => return Self::new(Status::OutOfMemory, report.details().trim_end()),
            Error::Backing(error) => return error.clone().into(),
            Error::BudgetTooSmall { .. } => Status::BadArgument,
            Error::StepOpen { .. } => Status::StepOpen,
            Error::NotEmpty { .. } => Status::NotEmpty,
            Error::ReservationLost { .. } => Status::OutOfMemory,
            Error::NoSuchPool(_) => Status::NoSuchPool,
            _ => Status::Other,
        };
        Self::new(status, error.to_string())
    }
}

impl From<BackingError> for Failure {
    fn from(error: BackingError) -> Self {
        let status = match &error {
            BackingError::NoDevice(_) => Status::NoDevice,
            BackingError::Reserve { .. } => Status::OutOfMemory,
            BackingError::Forked { .. } => Status::Forked,
            BackingError::Call { .. } => Status::Driver,
        };
        Self::new(status, error.to_string())
    }
}

/// Runs a call whose panic becomes a failure.
pub(super) fn caught<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        Err(Failure::new(Status::Panic, format!("the library panicked: {}", panic_text(payload))))
    })
}

/// Runs a call for C: its status, and its text kept for `terrace_last_error`.
pub(super) fn guarded(call: impl FnOnce() -> Result<(), Failure>) -> Status {
    match caught(call) {
        Ok(()) => Status::Ok,
        Err(failure) => {
            keep(&failure.text);
            failure.status
        }
    }
}

/// What a panic said.
pub(super) fn panic_text(payload: Box<dyn Any + Send>) -> String {
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
pub(super) fn keep(text: &str) {
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
