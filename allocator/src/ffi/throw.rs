//! C++ exceptions from Rust, for PyTorch, which takes a null pointer for memory: a failed request must throw.
//!
//! The exception is libstdc++'s own `std::runtime_error`, thrown by its own `std::__throw_runtime_error(const char*)`, which is
//! found in the running process. So this library needs no C++ to build and links none; where the process has no libstdc++
//! there is nobody to catch anything, and the report is printed and the process aborted.
//!
//! A spent budget is thrown by whoever registered for it, if anybody did: what PyTorch takes for its own `OutOfMemoryError` is a class
//! of its library, which only code that was compiled against it can throw.

use std::ffi::c_char;
use std::sync::Mutex;

use crate::ffi::failure::{Failure, Status, keep, last};

/// `std::__throw_runtime_error`.
type Thrower = unsafe extern "C-unwind" fn(*const c_char) -> !;

/// Throws an exception of its choice with that text; `terrace_torch_thrower` in C. One that returns has thrown nothing.
pub type OutOfMemoryThrower = unsafe extern "C-unwind" fn(text: *const c_char);

static OUT_OF_MEMORY: Mutex<Option<OutOfMemoryThrower>> = Mutex::new(None);

/// Has spent budgets thrown by that from here on; none: as everything else.
pub(super) fn on_out_of_memory(thrower: Option<OutOfMemoryThrower>) {
    *OUT_OF_MEMORY.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = thrower;
}

/// Throws `std::runtime_error`. The caller's frames, up to C++, must be of an ABI that unwinds.
pub(super) fn throw(failure: Failure) -> ! {
    let text = text_for_torch(&failure);
    let registered = match failure.status {
        Status::OutOfMemory => *OUT_OF_MEMORY.lock().unwrap_or_else(std::sync::PoisonError::into_inner),
        _ => None,
    };
    drop(failure);
    keep(&text);
    drop(text);
    if let Some(registered) = registered {
        // SAFETY: whoever registered it promised that it may be called so; the text ends with a null byte and stays while it runs.
        // Nothing that needs dropping is left in the Rust frames that the exception passes.
        unsafe { registered(last()) };
    }
    throw_plainly()
}

/// Throws this thread's last failure as `std::runtime_error`.
fn throw_plainly() -> ! {
    let Some(thrower) = thrower() else {
        // SAFETY: the text ends with a null byte and lives until this thread's next failure.
        let text = unsafe { std::ffi::CStr::from_ptr(last()) }.to_string_lossy();
        eprintln!("{text}\nterrace: no libstdc++ in this process, so there is nobody to throw this to: aborting");
        std::process::abort();
    };
    // SAFETY: the symbol is what its name says, and the text, which outlives the call, ends with a null byte. Nothing that needs
    // dropping is left in the Rust frames that the exception passes.
    unsafe { thrower(last()) }
}

/// Of a spent budget, a text that begins as PyTorch's own: programs look for "CUDA out of memory".
fn text_for_torch(failure: &Failure) -> String {
    match failure.status {
        Status::OutOfMemory if failure.text.starts_with("out of memory") => format!("CUDA {}", failure.text),
        Status::OutOfMemory => format!("CUDA out of memory: {}", failure.text),
        _ => format!("terrace: {}", failure.text),
    }
}

#[cfg(unix)]
fn thrower() -> Option<Thrower> {
    use std::ffi::{c_int, c_void};
    use std::ptr;

    unsafe extern "C" {
        fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
        fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    }
    const SYMBOL: *const c_char = c"_ZSt21__throw_runtime_errorPKc".as_ptr();
    /// The symbols that every object of the process sees.
    const RTLD_DEFAULT: *mut c_void = if cfg!(target_os = "linux") { ptr::null_mut() } else { -2_isize as *mut c_void };
    const RTLD_LAZY: c_int = 1;
    /// Only if it is there already.
    const RTLD_NOLOAD: c_int = if cfg!(target_os = "linux") { 4 } else { 0x10 };

    // SAFETY: both names end with a null byte, and looking a symbol up runs no code of the library it is in.
    let mut found = unsafe { dlsym(RTLD_DEFAULT, SYMBOL) };
    if found.is_null() {
        // Python loads extensions, and libstdc++ with them, where only they see it; by its name it is found all the same.
        // SAFETY: as above; nothing is loaded, and the reference that this takes is kept, so the symbol stays.
        found = unsafe {
            let library = dlopen(c"libstdc++.so.6".as_ptr(), RTLD_LAZY | RTLD_NOLOAD);
            if library.is_null() { library } else { dlsym(library, SYMBOL) }
        };
    }
    // SAFETY: a pointer that is not null and came from dlsym is the function of that name, which has this signature.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Thrower>(found) })
}

#[cfg(not(unix))]
fn thrower() -> Option<Thrower> {
    None
}
