//! A CUDA device that kernels are launched on, through the driver alone: `libcuda` to run, and no toolkit to build.
//!
//! ```text
//! Device::open(ordinal) -> its primary context, as PyTorch uses it      (no memory is taken)
//!   .on(stream)         -> the same device, its work queued on that stream
//!     first use         -> compile, or read from the cache, and load: seconds; `prepare` does it ahead of time
//!     each call         -> launches on the stream, nothing else: no copy, no wait, no allocation; a graph can capture it
//! ```
//!
//! Each call makes the primary context current and restores what the caller had; it also relaxes the thread's capture mode for
//! its own duration, since otherwise loading a module would break a capture that another thread has begun. After `fork()` a child
//! gets [`CudaError::Forked`] from every call, and its drop touches nothing.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{result, result::DriverError, sys};

use crate::block::Lt;
use crate::cache::{self, Cache};
use crate::compile::{self, CompileError, Compiler};
use crate::source::Unit;
use crate::tile::{Arch, Element, Entry};

/// Why a device did not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver, or one that does not start.
    #[error("there is no CUDA driver: {reason}")]
    NoDriver {
        /// What is missing.
        reason: String,
    },
    /// An ordinal that no device has.
    #[error("there is no CUDA device {ordinal}: this machine has {count}, counted from 0")]
    NoDevice {
        /// What was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// A driver from before kernel parameters could be larger than 4 KiB.
    #[error("the CUDA driver is for CUDA {}.{}; expected 12.1 or newer (driver 530)", version / 1000, version % 1000 / 10)]
    OldDriver {
        /// Major times 1000 plus minor times 10.
        version: i32,
    },
    /// A device without the matrix instructions that the kernels use.
    #[error("CUDA device {ordinal}, {name}, has compute capability {major}.{minor}; expected 8.0 or newer")]
    OldDevice {
        /// Which.
        ordinal: u32,
        /// Its name.
        name: String,
        /// Its compute capability.
        major: u32,
        /// And the part after the dot.
        minor: u32,
    },
    /// The process is a fork of the one that opened the device.
    #[error(
        "this process is a fork of process {owner}, which opened the device; expected a device opened after fork()"
    )]
    Forked {
        /// The process that opened it.
        owner: u32,
    },
    /// More blocks than one launch can have.
    #[error("{sequences} sequences of {value_heads} value heads need more blocks than one launch has, 2^31 - 1")]
    Grid {
        /// Sequences of the call.
        sequences: u64,
        /// Value heads.
        value_heads: u64,
    },
    /// A kernel was not compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The driver refused a call.
    #[error("CUDA device {ordinal} refuses {call}: {reason}")]
    Driver {
        /// Which device.
        ordinal: u32,
        /// What was called.
        call: &'static str,
        /// What the driver says.
        reason: String,
    },
}

/// One device of this process and a stream of it. Clones share the device.
#[derive(Clone)]
pub struct Device {
    opened: Arc<Opened>,
    stream: u64,
}

/// What clones share.
struct Opened {
    ordinal: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    arch: Arch,
    /// The process that opened it.
    owner: u32,
    cache: Cache,
    /// Flags of the compiler besides the usual.
    extra_flags: Vec<String>,
    modules: [[OnceLock<Module>; Element::ALL.len()]; Unit::ALL.len()],
    /// What projects in a layer, once one has run.
    projections: OnceLock<Lt>,
    /// Held while a module or a handle is made, so that it is made once.
    making: Mutex<()>,
}

// SAFETY: the context, modules and functions are handles that the driver lets any thread use; what is tied to a thread, its
// current context and its capture mode, is set anew in each call by `Entered`.
unsafe impl Send for Opened {}
// SAFETY: as above; all that changes is behind locks.
unsafe impl Sync for Opened {}

/// A loaded unit.
struct Module {
    handle: sys::CUmodule,
    unit: Unit,
    arch: Arch,
    kernels: Vec<(Entry, sys::CUfunction)>,
    /// Blocks of [`Entry::Stream`] that the device holds at once; 0 where there is no such kernel.
    resident: u32,
}

impl Device {
    /// Opens a device, for work on the default stream; see [`Device::on`].
    ///
    /// # Errors
    /// What is missing: the driver, a device with that ordinal, or one new enough.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        Self::open_with(ordinal, Cache::from_environment())
    }

    /// The same with a cache of one's own for compiled kernels.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn open_with(ordinal: u32, cache: Cache) -> Result<Self, CudaError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let failed = |call| failed(ordinal, call);
        let device = result::device::get(ordinal.cast_signed()).map_err(failed("cuDeviceGet"))?;
        let name = result::device::get_name(device).map_err(failed("cuDeviceGetName"))?;
        let attribute = |which| {
            // SAFETY: `device` came from cuDeviceGet.
            let value = unsafe { result::device::get_attribute(device, which) };
            value.map(c_int::unsigned_abs).map_err(failed("cuDeviceGetAttribute"))
        };
        let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let Some(arch) = Arch::of(major, minor) else {
            return Err(CudaError::OldDevice { ordinal, name, major, minor });
        };
        // SAFETY: as above; `drop` gives this one reference back.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let opened = Opened {
            ordinal,
            device,
            context,
            name,
            arch,
            owner: std::process::id(),
            cache,
            extra_flags: Vec::new(),
            modules: Default::default(),
            projections: OnceLock::new(),
            making: Mutex::new(()),
        };
        Ok(Self { opened: Arc::new(opened), stream: 0 })
    }

    /// The same, with kernels that are compiled with this macro defined: those of `GDN_MUTANT_` are wrong on purpose.
    ///
    /// # Errors
    /// As [`Device::open`].
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    pub fn open_mutant(ordinal: u32, name: &str) -> Result<Self, CudaError> {
        let mut device = Self::open_with(ordinal, Cache::off())?;
        let opened = Arc::get_mut(&mut device.opened).expect("nobody shares it yet");
        opened.extra_flags.push(format!("--define-macro={name}"));
        Ok(device)
    }

    /// The device that everybody in this process shares who asks here: opened once, and never closed.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn shared(ordinal: u32) -> Result<Self, CudaError> {
        static SHARED: Mutex<Option<HashMap<u32, Device>>> = Mutex::new(None);
        let mut shared = lock(&SHARED);
        let devices = shared.get_or_insert_default();
        if let Some(device) = devices.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = Self::open(ordinal)?;
        devices.insert(ordinal, device.clone());
        Ok(device)
    }

    /// How many CUDA devices this process may use.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] or [`CudaError::OldDriver`].
    pub fn count() -> Result<u32, CudaError> {
        // cudarc panics on its first call where there is no libcuda, so it is looked for first.
        // SAFETY: this opens libcuda, whose loading is what the caller asked for, and runs nothing of it.
        if !unsafe { sys::is_culib_present() } {
            let reason = "libcuda.so.1 cannot be loaded (it comes with the NVIDIA driver)".to_owned();
            return Err(CudaError::NoDriver { reason });
        }
        let broken = |e| CudaError::NoDriver { reason: format!("it does not start: {}", said(e)) };
        result::init().map_err(broken)?;
        let mut version = 0;
        // SAFETY: the version goes to a local.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(broken)?;
        if version < 12_010 {
            return Err(CudaError::OldDriver { version });
        }
        result::device::get_count().map(c_int::unsigned_abs).map_err(broken)
    }

    /// The same device, its work queued on a stream: its `cudaStream_t` or `CUstream` as a number; 0 is the default stream.
    ///
    /// # Safety
    /// The stream belongs to this device's primary context and lives as long as calls that are given the device.
    pub unsafe fn on(&self, stream: u64) -> Self {
        Self { opened: self.opened.clone(), stream }
    }

    /// Compiles and loads all kernels for one type of q, k, v and o, so that no call does: a first call inside a graph capture,
    /// or one that is timed, would otherwise pay for it.
    ///
    /// # Errors
    /// What a first call would say.
    pub fn prepare(&self, element: Element) -> Result<(), CudaError> {
        Unit::ALL.iter().try_for_each(|unit| self.begin(*unit, element).map(|_| ()))
    }

    /// Its name, as the driver has it.
    pub fn name(&self) -> &str {
        &self.opened.name
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.opened.ordinal
    }

    /// What is compiled for it, unless the compiler is too old to know it: then [`Arch::Ptx80`].
    pub fn arch(&self) -> Arch {
        self.opened.arch
    }

    /// Waits for everything that was queued on the device's stream.
    ///
    /// # Errors
    /// What the driver says, also of work that was queued.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        let stream = ptr::with_exposed_provenance_mut(self.stream as usize);
        // SAFETY: the stream is the promise of `on`.
        unsafe { result::stream::synchronize(stream) }.map_err(failed(self.opened.ordinal, "cuStreamSynchronize"))
    }

    /// Copies to the device's memory, after what its stream has, and waits.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// There is room at the address, and nobody else uses it.
    pub unsafe fn upload(&self, address: u64, bytes: &[u8]) -> Result<(), CudaError> {
        self.synchronize()?;
        let _entered = self.enter()?;
        let failed = |call| failed(self.opened.ordinal, call);
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_htod_sync(address, bytes) }.map_err(failed("cuMemcpyHtoD"))?;
        // The copy of pageable memory may still be on its way on the default stream.
        // SAFETY: 0 is that stream.
        unsafe { result::stream::synchronize(ptr::null_mut()) }.map_err(failed("cuStreamSynchronize"))
    }

    /// Copies from the device's memory, once its stream is done.
    ///
    /// # Errors
    /// What the driver says, also of work that was queued.
    ///
    /// # Safety
    /// As many bytes are readable at the address.
    pub unsafe fn download(&self, address: u64, into: &mut [u8]) -> Result<(), CudaError> {
        self.synchronize()?;
        let _entered = self.enter()?;
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtoh_sync(into, address) }.map_err(failed(self.opened.ordinal, "cuMemcpyDtoH"))
    }

    /// Numbers of rows for which cuBLASLt refused the projection that was pinned for its shape: where it is above 0, another
    /// window may have other bits.
    pub fn unpinned_projections(&self) -> u64 {
        self.opened.projections.get().map_or(0, Lt::unpinned)
    }

    /// The stream that work is queued on, as a number.
    pub(crate) fn stream(&self) -> u64 {
        self.stream
    }

    /// What projects in a layer. The context is current.
    pub(crate) fn projections(&self) -> Result<&Lt, crate::block::BlockError> {
        let place = &self.opened.projections;
        if let Some(lt) = place.get() {
            return Ok(lt);
        }
        let _making = lock(&self.opened.making);
        if let Some(lt) = place.get() {
            return Ok(lt);
        }
        let lt = Lt::new()?;
        Ok(place.get_or_init(|| lt))
    }

    /// The context is current until the result is dropped.
    fn enter(&self) -> Result<Entered, CudaError> {
        let opened = &*self.opened;
        if std::process::id() != opened.owner {
            return Err(CudaError::Forked { owner: opened.owner });
        }
        Entered::new(opened.context).map_err(failed(opened.ordinal, "cuCtxPushCurrent"))
    }

    /// A run of launches of one unit's kernels: the context is current until it is dropped.
    pub(crate) fn begin(&self, unit: Unit, element: Element) -> Result<Launches<'_>, CudaError> {
        let opened = &*self.opened;
        let entered = self.enter()?;
        let module = opened.module(unit, element)?;
        Ok(Launches { module, ordinal: opened.ordinal, stream: self.stream, count: 0, _entered: entered })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Opened { ordinal, name, arch, .. } = &*self.opened;
        f.debug_struct("Device")
            .field("ordinal", ordinal)
            .field("name", name)
            .field("arch", arch)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

impl Opened {
    fn module(&self, unit: Unit, element: Element) -> Result<&Module, CudaError> {
        let place = &self.modules[unit as usize][element as usize];
        if let Some(module) = place.get() {
            return Ok(module);
        }
        let _making = lock(&self.making);
        if let Some(module) = place.get() {
            return Ok(module);
        }
        let module = self.load(unit, element)?;
        Ok(place.get_or_init(|| module))
    }

    fn load(&self, unit: Unit, element: Element) -> Result<Module, CudaError> {
        let compiler = Compiler::get()?;
        let arch = compiler.best(self.arch);
        if arch == Arch::Ptx80 {
            let (device, name) = (self.arch.name(), &self.name);
            tracing::info!(target: "terrace::kernels", name, device, "no cubin for this device: PTX for compute_80");
        }
        let (text, flags) = (unit.text(arch), [compile::flags(arch, element), self.extra_flags.clone()].concat());
        let key = cache::key(compiler.version(), arch.name(), &flags, &text);
        let image = self.cache.get_or(&key, || {
            let started = std::time::Instant::now();
            let compiled = compiler.compile_text(unit.name(), &text, arch, &flags)?;
            let elapsed_ms = started.elapsed().as_millis();
            tracing::info!(target: "terrace::kernels", unit = unit.name(), arch = arch.name(), ?element, elapsed_ms, "compiled");
            Ok::<_, CompileError>(compiled.image)
        })?;
        // SAFETY: a cubin, or PTX that ends with a null byte, as NVRTC made it: what came from the cache has its checksum.
        let handle = unsafe { result::module::load_data(image.as_ptr().cast()) }
            .map_err(failed(self.ordinal, "cuModuleLoadData"))?;
        let mut module = Module { handle, unit, arch, kernels: Vec::new(), resident: 0 };
        for entry in unit.entries(arch) {
            let kernel = self.kernel(&module, entry).inspect_err(|_| module.unload())?;
            module.kernels.push((entry, kernel));
            if entry == Entry::Stream {
                module.resident = self.resident(kernel, entry, arch).inspect_err(|_| module.unload())?;
            }
        }
        Ok(module)
    }

    fn kernel(&self, module: &Module, entry: Entry) -> Result<sys::CUfunction, CudaError> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as DYNAMIC_SHARED;
        // SAFETY: the module was just loaded.
        let kernel = unsafe { result::module::get_function(module.handle, entry.name().to_owned()) }
            .map_err(failed(self.ordinal, "cuModuleGetFunction"))?;
        let shared = entry.dynamic_shared(module.arch).cast_signed();
        // Up to 48 KiB need no leave.
        if shared > 48 << 10 {
            // SAFETY: the function is of that module.
            unsafe { result::function::set_function_attribute(kernel, DYNAMIC_SHARED, shared) }
                .map_err(failed(self.ordinal, "cuFuncSetAttribute"))?;
        }
        Ok(kernel)
    }
}

impl Opened {
    /// How many blocks of a kernel all multiprocessors hold.
    fn resident(&self, kernel: sys::CUfunction, entry: Entry, arch: Arch) -> Result<u32, CudaError> {
        use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS;
        // SAFETY: the device came from cuDeviceGet.
        let multiprocessors = unsafe { result::device::get_attribute(self.device, MULTIPROCESSORS) }
            .map_err(failed(self.ordinal, "cuDeviceGetAttribute"))?;
        let mut each = 0;
        let (threads, shared) = (entry.threads().cast_signed(), entry.dynamic_shared(arch) as usize);
        // SAFETY: the function is of a loaded module; the answer goes to a local.
        unsafe { sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut each, kernel, threads, shared) }
            .result()
            .map_err(failed(self.ordinal, "cuOccupancyMaxActiveBlocksPerMultiprocessor"))?;
        Ok(each.unsigned_abs() * multiprocessors.unsigned_abs())
    }
}

impl Module {
    fn unload(&self) {
        // SAFETY: loaded once, and unloaded where nobody uses it any more. An error means that the context is gone.
        let _ = unsafe { result::module::unload(self.handle) };
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if std::process::id() != self.owner {
            return;
        }
        if let Ok(_entered) = Entered::new(self.context) {
            drop(self.projections.take());
            self.modules.iter().flatten().filter_map(OnceLock::get).for_each(Module::unload);
        }
        // SAFETY: gives back the one reference that `open` took.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Launches of one call, in the order of the stream.
pub(crate) struct Launches<'a> {
    module: &'a Module,
    ordinal: u32,
    stream: u64,
    count: u64,
    _entered: Entered,
}

/// What a kernel takes: one struct, by value.
///
/// # Safety
/// The layout is that of the struct which each kernel of [`Parameters::entries`] takes.
pub(crate) unsafe trait Parameters {
    /// The unit whose kernels take it.
    const UNIT: Unit;
}

impl Launches<'_> {
    /// What the kernels were compiled for.
    pub fn arch(&self) -> Arch {
        self.module.arch
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Blocks of [`Entry::Stream`] that the device holds at once; 0 where there is no such kernel.
    pub fn resident(&self) -> u32 {
        self.module.resident
    }

    /// Queues zeros over so many 32-bit words.
    ///
    /// # Safety
    /// They are the caller's to write, until the stream has.
    pub unsafe fn zero(&mut self, address: u64, words: u32) -> Result<(), CudaError> {
        let stream = ptr::with_exposed_provenance_mut(self.stream as usize);
        // SAFETY: the caller's promise; the stream is that of `Device::on`.
        unsafe { sys::cuMemsetD32Async(address, 0, words as usize, stream) }
            .result()
            .map_err(failed(self.ordinal, "cuMemsetD32Async"))
    }

    /// Queues one kernel after what the stream has. No blocks: no launch.
    ///
    /// Programmatic dependent launch was measured and left out: at the default window the next launch's walks then begin where
    /// intra-chunk blocks have just ended, two on a multiprocessor, and take 5% longer (H200).
    ///
    /// # Safety
    /// The pointers and numbers in `parameters` are what the kernel's text says they are, until the stream has run it.
    pub unsafe fn launch<P: Parameters>(&mut self, entry: Entry, blocks: u32, parameters: &P) -> Result<(), CudaError> {
        if blocks == 0 {
            return Ok(());
        }
        let kernels = &self.module.kernels;
        let kernel = kernels.iter().find(|(name, _)| *name == entry).map(|(_, kernel)| *kernel);
        let kernel = kernel.filter(|_| P::UNIT == self.module.unit).ok_or_else(|| CudaError::Driver {
            ordinal: self.ordinal,
            call: "cuLaunchKernel",
            reason: format!("{} is not in {}", entry.name().to_string_lossy(), P::UNIT.name()),
        })?;
        let mut all = [ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
        let stream = ptr::with_exposed_provenance_mut(self.stream as usize);
        let shared = entry.dynamic_shared(self.module.arch);
        let (grid, block) = ((blocks, 1, 1), (entry.threads(), 1, 1));
        // Blocks of `Stream` wait for each other, so they must all be there: what a cooperative launch is for.
        let is_cooperative = entry == Entry::Stream;
        // SAFETY: the function is of a loaded module of the current context; it takes one parameter, whose layout `P` vouches for
        // and which the driver copies before it returns. The stream is the promise of `Device::on`, the parameters' contents the
        // caller's.
        let launched = unsafe {
            if is_cooperative {
                result::launch_cooperative_kernel(kernel, grid, block, shared, stream, &mut all)
            } else {
                result::launch_kernel(kernel, grid, block, shared, stream, &mut all)
            }
        };
        let call = if is_cooperative { "cuLaunchCooperativeKernel" } else { "cuLaunchKernel" };
        launched.map_err(failed(self.ordinal, call))?;
        self.count += 1;
        Ok(())
    }
}

/// The context is current and the thread's capture mode relaxed while this lives.
struct Entered {
    mode: sys::CUstreamCaptureMode,
    /// What is undone on drop belongs to this thread.
    _here: std::marker::PhantomData<*const ()>,
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
        let entered = Self { mode, _here: std::marker::PhantomData };
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

fn said(error: DriverError) -> String {
    let text = |c: Result<&std::ffi::CStr, DriverError>| c.map(|c| c.to_string_lossy().into_owned()).ok();
    let name = text(error.error_name()).unwrap_or_else(|| format!("CUDA error {}", error.0 as u32));
    text(error.error_string()).map_or(name.clone(), |why| format!("{why} ({name})"))
}

fn failed(ordinal: u32, call: &'static str) -> impl FnOnce(DriverError) -> CudaError {
    move |error| CudaError::Driver { ordinal, call, reason: said(error) }
}

/// What a lock holds is whole even if a thread panicked with it: it is changed by one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
