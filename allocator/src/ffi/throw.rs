//! C++ exceptions from Rust, for PyTorch, which takes a null pointer for memory: a failed request must throw.
//!
//! The exception is libstdc++'s own `std::runtime_error`, thrown by its own `std::__throw_runtime_error(const char*)`, which is
//! found in the running process. So this library needs no C++ to build and links none; where the process has no libstdc++
//! there is nobody to catch anything, and the report is printed and the process aborted.

use std::ffi::c_char;

use crate::ffi::failure::{Failure, Status, keep, last};

/// `std::__throw_runtime_error`.
type Thrower = unsafe extern "C-unwind" fn(*const c_char) -> !;

/// Throws `std::runtime_error`. The caller's frames, up to C++, must be of an ABI that unwinds.
pub(super) fn throw(failure: Failure) -> ! {
    let text = text_for_torch(&failure);
    drop(failure);
    let Some(thrower) = thrower() else {
        eprintln!("{text}\nterrace: no libstdc++ in this process, so there is nobody to throw this to: aborting");
        std::process::abort();
    };
    keep(&text);
    drop(text);
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
