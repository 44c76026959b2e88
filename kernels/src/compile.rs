//! The door to NVRTC, NVIDIA's compiler as a library: kernel text in, machine code and the compiler's log out. No toolkit is needed
//! to build this crate; NVRTC is looked for when the first kernel is compiled.
//!
//! Where it is looked for, in this order:
//!
//! 1. `TERRACE_NVRTC`: the path of the library. If it is set, nothing else is tried.
//! 2. What the loader finds, or the process has loaded, as PyTorch does: `libnvrtc.so.13`, `libnvrtc.so.12`, `libnvrtc.so`.
//! 3. `$CUDA_HOME/lib64`, `$CUDA_PATH/lib64` and `/usr/local/cuda/lib64`.
//! 4. A virtual environment, where pip puts it: `$VIRTUAL_ENV/lib/python3.*/site-packages/nvidia/{cu13,cuda_nvrtc}/lib`.
//!
//! cudarc's own layer is not used: it takes no path and panics where there is no library. What is needed is a dozen functions
//! whose C signatures have not changed since CUDA 11.
//!
//! Refused: include paths. Kernels include nothing, so what is compiled is the text alone, and a text has one meaning.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::{env, fmt, fs, ptr};

use libloading::Library;

use crate::source::Unit;
use crate::tile::{Arch, Element};

/// Why a kernel was not compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// There is no NVRTC, or it cannot be used.
    #[error(
        "no CUDA compiler: {reason}; install NVRTC 12.1 or newer (pip install nvidia-cuda-nvrtc, or the CUDA toolkit) or set \
         TERRACE_NVRTC to the path of its libnvrtc.so"
    )]
    NoNvrtc {
        /// Where it was looked for, and what was wrong there.
        reason: String,
    },
    /// The compiler refused a kernel: a bug in the kernel, or a compiler too old for it.
    #[error("NVRTC {version} does not compile {unit} for {arch}: {status}\n{log}")]
    Refused {
        /// The file.
        unit: &'static str,
        /// What for.
        arch: &'static str,
        /// Which compiler.
        version: String,
        /// The name of its status.
        status: String,
        /// All that it said.
        log: String,
    },
}

/// Machine code of one unit, and what the compiler said.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// A cubin, or for [`Arch::Ptx80`] PTX that ends with a null byte: what the driver loads.
    pub image: Vec<u8>,
    /// The log: what [`usage`] reads.
    pub log: String,
}

/// What one kernel takes, by the compiler's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The entry point.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread that are kept in local memory for want of registers: stores and loads.
    pub spilled: u32,
    /// Bytes of a thread's stack frame.
    pub stack: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
}

/// A loaded NVRTC. There is one for each process; see [`Compiler::get`].
pub struct Compiler {
    calls: Calls,
    /// Where it was loaded from.
    path: PathBuf,
    /// Release and build, as the compiler prints them into PTX.
    version: String,
    /// Architectures it knows: major times ten plus minor.
    supported: Vec<c_int>,
}

type Program = *mut c_void;
type Status = c_int;

/// The functions of nvrtc.h that are used; `_library` keeps them loaded.
struct Calls {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    supported_count: unsafe extern "C" fn(*mut c_int) -> Status,
    supported: unsafe extern "C" fn(*mut c_int) -> Status,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    cubin: Bytes,
    ptx: Bytes,
    log: Bytes,
    status_name: unsafe extern "C" fn(Status) -> *const c_char,
    _library: Library,
}

/// A size and the bytes: how NVRTC hands out each of its results.
#[derive(Clone, Copy)]
struct Bytes {
    size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

impl Compiler {
    /// The compiler of this process, looked for once it is first asked for, and again if it was not there.
    ///
    /// # Errors
    /// [`CompileError::NoNvrtc`], with every place that was tried.
    pub fn get() -> Result<Arc<Self>, CompileError> {
        static FOUND: OnceLock<Arc<Compiler>> = OnceLock::new();
        if let Some(found) = FOUND.get() {
            return Ok(found.clone());
        }
        let found = Arc::new(Self::find()?);
        tracing::debug!(target: "terrace::kernels", path = %found.path.display(), version = found.version, "NVRTC loaded");
        Ok(FOUND.get_or_init(|| found).clone())
    }

    fn find() -> Result<Self, CompileError> {
        let mut tried: Vec<String> = Vec::new();
        for place in places() {
            match Self::open(&place) {
                Ok(compiler) => return Ok(compiler),
                // A file that is not there is said in two words; all else needs the loader's.
                Err(_) if place.is_absolute() && !place.exists() => tried.push(format!("{} (absent)", place.display())),
                Err(reason) => {
                    let place = place.display().to_string();
                    let reason = reason.strip_prefix(&format!("{place}: ")).unwrap_or(&reason);
                    tried.push(format!("{place} ({reason})"));
                }
            }
        }
        Err(CompileError::NoNvrtc { reason: format!("NVRTC was looked for as {}", tried.join(", ")) })
    }

    /// Loads the library at a path, or of a name that the loader knows.
    fn open(path: &Path) -> Result<Self, String> {
        preload_builtins(path);
        // SAFETY: loading runs NVRTC's initialisers, which is what the caller, or TERRACE_NVRTC, asked for.
        let library = unsafe { Library::new(path) }.map_err(|error| {
            // The loader's own words are one step down.
            let why = std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string);
            why.replace('\n', " ")
        })?;
        // SAFETY: the library calls itself libnvrtc, and `Calls` has the signatures of nvrtc.h.
        let calls = unsafe { Calls::of(library) }?;
        let mut compiler = Self { calls, path: path.to_owned(), version: String::new(), supported: Vec::new() };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: all pointers are to locals, the last to as many numbers as NVRTC has just said.
        unsafe {
            compiler.done((compiler.calls.version)(&raw mut major, &raw mut minor))?;
            // The first with kernel parameters above 4 KiB.
            if (major, minor) < (12, 1) {
                return Err(format!("it is {major}.{minor}, older than 12.1"));
            }
            compiler.done((compiler.calls.supported_count)(&raw mut count))?;
            let mut supported = vec![0; usize::try_from(count).unwrap_or_default()];
            compiler.done((compiler.calls.supported)(supported.as_mut_ptr()))?;
            compiler.supported = supported;
        }
        compiler.version = compiler.build(major, minor)?;
        Ok(compiler)
    }

    /// NVRTC tells major and minor, and hides the rest in what it makes: two builds of 13.0 must not share cached code. It is
    /// also a first compilation, and fails where a part of NVRTC is missing.
    fn build(&self, major: c_int, minor: c_int) -> Result<String, String> {
        let (status, made) = self.run("terrace_probe.cu", "", Arch::Ptx80, &[]);
        let ptx = made.map_err(|log| format!("{}: {}", self.status_name(status), log.trim().replace('\n', " ")))?;
        let ptx = String::from_utf8_lossy(&ptx.image).into_owned();
        let after = |mark: &str| ptx.split_once(mark).and_then(|(_, rest)| rest.split_whitespace().next());
        let release = after(", V").map_or_else(|| format!("{major}.{minor}"), str::to_owned);
        Ok(after("Build ID: ").map_or(release.clone(), |id| format!("{release} {id}")))
    }

    /// Release and build: `13.0.88 CL-36424714`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What to compile for a device: what was asked for, or PTX if this compiler does not know that architecture.
    pub fn best(&self, arch: Arch) -> Arch {
        if self.supported.contains(&arch.number()) { arch } else { Arch::Ptx80 }
    }

    /// Compiles a unit for one architecture and element type.
    ///
    /// # Errors
    /// [`CompileError::Refused`], with the compiler's log.
    pub fn compile(&self, unit: Unit, arch: Arch, element: Element) -> Result<Compiled, CompileError> {
        self.compile_text(unit.name(), &unit.text(arch), arch, &flags(arch, element))
    }

    /// The same for any text; `flags` are all the compiler's flags.
    pub(crate) fn compile_text(
        &self,
        name: &'static str,
        text: &str,
        arch: Arch,
        flags: &[String],
    ) -> Result<Compiled, CompileError> {
        let (status, made) = self.run(name, text, arch, flags);
        made.map_err(|log| CompileError::Refused {
            unit: name,
            arch: arch.name(),
            version: self.version.clone(),
            status: self.status_name(status),
            log: log.trim_end().to_owned(),
        })
    }

    /// One program from creation to destruction. The error is the log.
    fn run(&self, name: &str, text: &str, arch: Arch, flags: &[String]) -> (Status, Result<Compiled, String>) {
        let c = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let (name, text) = (c(name), c(text));
        let flags: Vec<CString> = flags.iter().map(|flag| c(flag)).collect();
        let flags: Vec<*const c_char> = flags.iter().map(|flag| flag.as_ptr()).collect();
        let mut program = ptr::null_mut();
        // SAFETY: both texts end with a null byte and outlive the call; there are no headers.
        let created =
            unsafe { (self.calls.create)(&raw mut program, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) };
        if created != 0 {
            return (created, Err(String::new()));
        }
        // SAFETY: the program was created above, and the flags are as many as is said and outlive the call.
        let status = unsafe { (self.calls.compile)(program, flags.len() as c_int, flags.as_ptr()) };
        let code = if arch == Arch::Ptx80 { self.calls.ptx } else { self.calls.cubin };
        // SAFETY: the program was created above.
        let (log, image) = unsafe { (self.calls.log.read(program), code.read(program)) };
        // SAFETY: created above, and used no more.
        unsafe { (self.calls.destroy)(&raw mut program) };
        let log = log.map(|log| String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()).unwrap_or_default();
        match image {
            _ if status != 0 => (status, Err(log)),
            Ok(image) => (status, Ok(Compiled { image, log })),
            Err(status) => (status, Err(log)),
        }
    }

    fn done(&self, status: Status) -> Result<(), String> {
        if status == 0 { Ok(()) } else { Err(self.status_name(status)) }
    }

    fn status_name(&self, status: Status) -> String {
        // SAFETY: NVRTC answers every number with a static text.
        let text = unsafe { (self.calls.status_name)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: not null, static, and ends with a null byte.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("path", &self.path).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Calls {
    /// # Safety
    /// The library is an NVRTC.
    unsafe fn of(library: Library) -> Result<Self, String> {
        macro_rules! call {
            ($name:literal) => {
                // SAFETY: the caller's promise; each field has the signature that nvrtc.h gives this name.
                *unsafe { library.get($name) }.map_err(|_| {
                    let name = String::from_utf8_lossy($name).into_owned();
                    format!("it has no function {name}")
                })?
            };
        }
        Ok(Self {
            version: call!(b"nvrtcVersion"),
            supported_count: call!(b"nvrtcGetNumSupportedArchs"),
            supported: call!(b"nvrtcGetSupportedArchs"),
            create: call!(b"nvrtcCreateProgram"),
            destroy: call!(b"nvrtcDestroyProgram"),
            compile: call!(b"nvrtcCompileProgram"),
            cubin: Bytes { size: call!(b"nvrtcGetCUBINSize"), get: call!(b"nvrtcGetCUBIN") },
            ptx: Bytes { size: call!(b"nvrtcGetPTXSize"), get: call!(b"nvrtcGetPTX") },
            log: Bytes { size: call!(b"nvrtcGetProgramLogSize"), get: call!(b"nvrtcGetProgramLog") },
            status_name: call!(b"nvrtcGetErrorString"),
            _library: library,
        })
    }
}

impl Bytes {
    /// # Safety
    /// The program was created and not destroyed.
    unsafe fn read(self, program: Program) -> Result<Vec<u8>, Status> {
        let mut size = 0;
        // SAFETY: the caller's promise; the size goes to a local.
        let status = unsafe { (self.size)(program, &raw mut size) };
        if status != 0 {
            return Err(status);
        }
        let mut bytes = vec![0_u8; size];
        // SAFETY: the caller's promise; there are as many bytes as NVRTC has just asked for.
        let status = unsafe { (self.get)(program, bytes.as_mut_ptr().cast()) };
        if status == 0 { Ok(bytes) } else { Err(status) }
    }
}

/// All flags of a compilation. They are part of the cache's key.
pub(crate) fn flags(arch: Arch, element: Element) -> Vec<String> {
    let fp16 = i32::from(element == Element::Fp16);
    vec![
        format!("--gpu-architecture={}", arch.name()),
        "--std=c++17".to_owned(),
        format!("--define-macro=GDN_FP16={fp16}"),
        // Registers, spills and shared memory go to the log.
        "--ptxas-options=-v".to_owned(),
    ]
}

/// Reads what `--ptxas-options=-v` makes the compiler say of each kernel:
///
/// ```text
/// ptxas info    : Compiling entry function 'gdn_window' for 'sm_90a'
/// ptxas info    : Function properties for gdn_window
/// ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
/// ptxas info    : Used 168 registers, used 1 barriers, 396 bytes smem, 360 bytes cmem[0]
/// ```
pub fn usage(log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let entry = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(Usage { entry, registers: 0, spilled: 0, stack: 0, shared: 0 });
        }
        let Some(kernel) = all.last_mut() else { continue };
        // A function that is called, not launched, has a stack too; all of it counts for the kernel named last.
        kernel.stack += number_before(line, " bytes stack frame");
        kernel.spilled += number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
        kernel.registers += number_before(line, " registers");
        kernel.shared += number_before(line, " bytes smem");
    }
    all
}

fn number_before(line: &str, words: &str) -> u32 {
    let number = line.split_once(words).and_then(|(before, _)| before.rsplit([' ', ',']).next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn places() -> Vec<PathBuf> {
    if let Some(path) = env::var_os("TERRACE_NVRTC").filter(|path| !path.is_empty()) {
        return vec![path.into()];
    }
    let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    let mut places: Vec<PathBuf> = names.iter().map(Into::into).collect();
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    for home in homes.chain(["/usr/local/cuda".into()]) {
        places.push(home.join("lib64").join("libnvrtc.so"));
    }
    if let Some(environment) = env::var_os("VIRTUAL_ENV").map(PathBuf::from) {
        let lib = fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
        for python in lib.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3")) {
            let nvidia = python.path().join("site-packages/nvidia");
            places.push(nvidia.join("cu13/lib/libnvrtc.so.13"));
            places.push(nvidia.join("cuda_nvrtc/lib/libnvrtc.so.12"));
        }
    }
    places
}

/// NVRTC loads `libnvrtc-builtins.so.MAJOR.MINOR` by name, and a wheel's copy is in no folder that the loader searches: so what
/// lies beside the library is loaded first, and stays. Where nothing lies beside it, the loader is left to find it.
fn preload_builtins(library: &Path) {
    // A bare name is the loader's to find.
    let Some(folder) = library.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("libnvrtc-builtins.so.") {
            // SAFETY: a part of the NVRTC that the caller is about to load.
            if let Ok(builtins) = unsafe { Library::new(entry.path()) } {
                std::mem::forget(builtins);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_read_kernel_by_kernel() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
            ptxas info    : Function properties for a\n\
            ptxas         .     400 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads\n\
            ptxas info    : Used 34 registers, used 0 barriers, 400 bytes cumulative stack size, 360 bytes cmem[0]\n\
            ptxas info    : Compile time = 9.387 ms\n\
            ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
            ptxas info    : Function properties for b\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 396 bytes smem\n";
        let kernel = |entry: &str, registers, spilled, stack, shared| Usage {
            entry: entry.to_owned(),
            registers,
            spilled,
            stack,
            shared,
        };
        assert_eq!(usage(log), [kernel("a", 34, 36, 400, 0), kernel("b", 255, 0, 0, 396)]);
        assert_eq!(usage(""), []);
        assert_eq!(usage("registers spill bytes smem\n'"), []);
    }

    #[test]
    fn a_path_without_a_library_says_what_is_wrong_and_what_to_do() {
        let error = Compiler::open(Path::new("/nowhere/libnvrtc.so")).unwrap_err();
        assert!(error.contains("/nowhere/libnvrtc.so"), "{error}");
        assert!(!error.contains('\n'), "{error}");
        let said = CompileError::NoNvrtc { reason: "NVRTC was looked for as x (absent)".to_owned() }.to_string();
        assert!(said.contains("TERRACE_NVRTC") && said.contains("pip install"), "{said}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_that_is_no_nvrtc_is_refused_by_name() {
        let error = Compiler::open(Path::new("libc.so.6")).unwrap_err();
        assert_eq!(error, "it has no function nvrtcVersion");
    }
}
