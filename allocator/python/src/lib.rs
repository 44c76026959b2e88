//! The extension module `terrace._terrace`: the one shared object that holds the allocator and the kernels.
//!
//! It exports both sets of C symbols (`terrace.h`, `terrace_gdn.h`) beside what Python calls, so that PyTorch, ctypes and Python speak
//! to one and the same devices:
//!
//! ```text
//!   PyTorch  --C symbols-->  terrace_torch_malloc, ... ---.
//!   Python   --Device----->  steps, figures, files  ------+-->  one device per ordinal
//!   ctypes   --C symbols-->  terrace_gdn_prefill, ...           (kernels need none)
//! ```
//!
//! Here is only what Python cannot do by itself; what PyTorch has to be told is in the package beside this crate. Nothing holds the
//! interpreter's lock while it waits for a device's.

mod device;
mod files;

use pyo3::prelude::*;

pyo3::create_exception!(
    _terrace,
    TerraceError,
    pyo3::exceptions::PyRuntimeError,
    "The allocator refused; the text is one sentence that says what to do."
);

/// The extension module.
#[pymodule]
mod _terrace {
    use super::*;

    #[pymodule_export]
    use super::TerraceError;
    #[pymodule_export]
    use super::device::Device;
    #[pymodule_export]
    use super::files::import_profile;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        // Naming them links the kernels, and with them their C symbols.
        module.add("GDN_VERSION", terrace_kernels::ffi::VERSION)?;
        module.add("VERSION", terrace_allocator::ffi::VERSION)
    }
}
