//! The extension module `terrace._terrace`: the one shared object that holds the allocator and the kernels.
//!
//! It exports both sets of C symbols (`terrace.h`, `terrace_gdn.h`) beside the module's own functions, so that PyTorch, ctypes and
//! Python speak to one and the same devices.

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _terrace {
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        // Naming them links the kernels, and with them their C symbols.
        module.add("GDN_VERSION", terrace_kernels::ffi::VERSION)?;
        module.add("VERSION", terrace_allocator::ffi::VERSION)
    }
}
