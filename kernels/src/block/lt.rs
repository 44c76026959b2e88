//! Projections by cuBLASLt, through cudarc's thin layer: its safe one allocates a workspace of its own.
//!
//! cuBLASLt's heuristic picks another kernel for another number of rows, and with it another order of summation. So it is asked
//! once for each shape of weights, at [`PIN_ROWS`] rows, and what it says is used for every number of rows that the library
//! accepts it for: then the windows of a prompt have the bits of the whole. A choice that sums in parts (split-K) is not taken.
//! Where the library refuses the pinned choice, its own is used, counted ([`Lt::unpinned`]) and traced. Decode steps, which have
//! other bits anyway, have the library's own choice for their few rows: there only split sums fill a device.
//!
//! The library is loaded when it is first needed: by name, from `TERRACE_CUBLASLT`, or where a toolkit or a virtual environment
//! has it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use libloading::Library;
use terrace_profiles::shape::terrace::GEMM_WORKSPACE;
use terrace_profiles::units::DeviceSpan;

use super::error::BlockError;
use crate::tile::Element;

/// Rows that choices are made for: a window that fills an H200, and the bend of its curve of time against window.
const PIN_ROWS: u64 = 2048;
/// From cublas_api.h, which cudarc's part for cuBLASLt leaves out.
const CUBLAS_OP_T: i32 = 1;
/// Choices that are looked at, best first, for one that does not sum in parts.
const CHOICES: usize = 24;

/// `y = x weight^T`, or `y += x weight^T`: `x [rows, inputs]` with rows `x_stride` apart, `weight [outputs, inputs]`,
/// `y [rows, outputs]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projection {
    pub rows: u64,
    pub inputs: u64,
    pub outputs: u64,
    pub x: u64,
    pub x_stride: u64,
    pub weight: u64,
    pub y: u64,
    pub add: bool,
    pub element: Element,
    /// A decode step.
    pub few: bool,
    pub workspace: Option<DeviceSpan>,
}

/// A handle of the library in one context.
pub(crate) struct Lt {
    handle: sys::cublasLtHandle_t,
    chosen: Mutex<HashMap<Shape, HashMap<u64, Choice>>>,
    unpinned: AtomicU64,
}

// SAFETY: the library lets any thread use a handle; what changes is behind a lock.
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

/// What a choice depends on beside the rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    inputs: u64,
    outputs: u64,
    x_stride: u64,
    add: bool,
    element: Element,
    few: bool,
}

#[derive(Clone, Copy)]
struct Choice(sys::cublasLtMatmulAlgo_t);

impl Lt {
    /// A handle in the current context.
    pub fn new() -> Result<Self, BlockError> {
        find()?;
        let handle = result::create_handle().map_err(|status| refused("cublasLtCreate", status))?;
        // SAFETY: takes nothing.
        let version = unsafe { sys::cublasLtGetVersion() };
        tracing::info!(target: "terrace::kernels", version, "cuBLASLt loaded");
        Ok(Self { handle, chosen: Mutex::new(HashMap::new()), unpinned: AtomicU64::new(0) })
    }

    /// Numbers of rows for which the pinned choice was refused.
    pub fn unpinned(&self) -> u64 {
        self.unpinned.load(Ordering::Relaxed)
    }

    /// Queues a projection.
    ///
    /// # Safety
    /// The context of the handle is current, the stream is of it, and the addresses hold what [`Projection`] says until the
    /// stream has run it.
    pub unsafe fn project(&self, p: &Projection, stream: u64) -> Result<(), BlockError> {
        let problem = Problem::new(p, p.rows)?;
        let Choice(algo) = self.choice(p, &problem)?;
        let (one, add) = (1.0_f32, if p.add { 1.0_f32 } else { 0.0 });
        let pointer = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let (workspace, size) = p.workspace.map_or((0, 0), |span| (span.address, span.bytes.get() as usize));
        // SAFETY: descriptors and choice were made for this problem, and the caller promised the rest. C is D, which the library
        // allows.
        unsafe {
            result::matmul(
                self.handle,
                problem.operation,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&add).cast(),
                pointer(p.weight),
                problem.weight,
                pointer(p.x),
                problem.x,
                pointer(p.y),
                problem.y,
                pointer(p.y),
                problem.y,
                &raw const algo,
                pointer(workspace),
                size,
                ptr::with_exposed_provenance_mut(stream as usize),
            )
        }
        .map_err(|status| refused("cublasLtMatmul", status))
    }

    fn choice(&self, p: &Projection, problem: &Problem) -> Result<Choice, BlockError> {
        let Projection { inputs, outputs, x_stride, add, element, few, .. } = *p;
        let shape = Shape { inputs, outputs, x_stride, add, element, few };
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = chosen.entry(shape).or_default();
        if let Some(choice) = chosen.get(&p.rows) {
            return Ok(*choice);
        }
        // A decode step has no other window to agree with.
        let pin_rows = if few { p.rows } else { PIN_ROWS };
        let pinned = match chosen.get(&pin_rows) {
            Some(choice) => *choice,
            None => {
                let choice = self.heuristic(&Problem::new(p, pin_rows)?, few)?;
                chosen.insert(pin_rows, choice);
                choice
            }
        };
        let choice = if pin_rows == p.rows || self.accepts(problem, pinned) {
            pinned
        } else {
            self.unpinned.fetch_add(1, Ordering::Relaxed);
            let (rows, inputs, outputs) = (p.rows, p.inputs, p.outputs);
            tracing::warn!(target: "terrace::kernels", rows, inputs, outputs, "cuBLASLt refuses the pinned choice");
            self.heuristic(problem, few)?
        };
        chosen.insert(p.rows, choice);
        Ok(choice)
    }

    /// Whether the library runs a choice on a problem, in the workspace there is.
    fn accepts(&self, problem: &Problem, Choice(algo): Choice) -> bool {
        let Problem { operation, weight, x, y } = *problem;
        let mut checked = empty();
        // SAFETY: all descriptors live; the result is a local.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(self.handle, operation, weight, x, y, y, &raw const algo, &raw mut checked)
        };
        status.result().is_ok() && checked.workspaceSize as u64 <= GEMM_WORKSPACE
    }

    /// The library's best choice that sums each number in one go, or, where `split` allows it, in parts.
    fn heuristic(&self, problem: &Problem, split: bool) -> Result<Choice, BlockError> {
        let Problem { operation, weight, x, y } = *problem;
        let preference = Preference::new(split)?;
        let mut found = [empty(); CHOICES];
        let mut count = 0;
        // SAFETY: all descriptors live, and there is room for as many results as are asked for.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                operation,
                weight,
                x,
                y,
                y,
                preference.0,
                CHOICES as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        }
        .result()
        .map_err(|status| refused("cublasLtMatmulAlgoGetHeuristic", status))?;
        let found = found.iter().take(count.unsigned_abs() as usize);
        let whole = |one: &&sys::cublasLtMatmulHeuristicResult_t| {
            one.state.result().is_ok()
                && one.workspaceSize as u64 <= GEMM_WORKSPACE
                && (split || sums_in_one_go(&one.algo))
        };
        found.into_iter().find(whole).map(|one| Choice(one.algo)).ok_or_else(|| BlockError::Lt {
            reason: format!("has no kernel for a projection of this shape ({count} looked at, all sum in parts)"),
        })
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and used no more.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Neither split over K nor reduced afterwards.
fn sums_in_one_go(algo: &sys::cublasLtMatmulAlgo_t) -> bool {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let read = |which: Attribute| {
        let (mut value, mut written) = (0_u32, 0);
        // SAFETY: both attributes are 32 bits, and both results are locals.
        let status = unsafe {
            sys::cublasLtMatmulAlgoConfigGetAttribute(algo, which, (&raw mut value).cast(), 4, &raw mut written)
        };
        status.result().is_ok().then_some(value)
    };
    let split = read(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
    let reduced = read(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
    matches!(split, Some(0 | 1)) && reduced == Some(0)
}

/// Results that the library fills in.
fn empty() -> sys::cublasLtMatmulHeuristicResult_t {
    let state = sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
    let algo = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
    sys::cublasLtMatmulHeuristicResult_t { algo, workspaceSize: 0, state, wavesCount: 0.0, reserved: [0; 4] }
}

/// The descriptors of a projection. The library counts columns first: it sees `y^T = weight x^T`.
struct Problem {
    operation: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
}

impl Problem {
    fn new(p: &Projection, rows: u64) -> Result<Self, BlockError> {
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA as TRANSPOSED;
        let number = match p.element {
            Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Element::Fp16 => sys::cudaDataType::CUDA_R_16F,
        };
        let failed = |call: &'static str| move |status| refused(call, status);
        let mut problem =
            Self { operation: ptr::null_mut(), weight: ptr::null_mut(), x: ptr::null_mut(), y: ptr::null_mut() };
        problem.operation =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F)
                .map_err(failed("cublasLtMatmulDescCreate"))?;
        let transposed = CUBLAS_OP_T;
        // SAFETY: the descriptor was just made, and the attribute is an operation.
        unsafe {
            result::set_matmul_desc_attribute(
                problem.operation,
                TRANSPOSED,
                ptr::from_ref(&transposed).cast(),
                size_of_val(&transposed),
            )
        }
        .map_err(failed("cublasLtMatmulDescSetAttribute"))?;
        let layout = |rows: u64, columns: u64, stride: u64| {
            result::create_matrix_layout(number, rows, columns, stride.cast_signed())
                .map_err(failed("cublasLtMatrixLayoutCreate"))
        };
        problem.weight = layout(p.inputs, p.outputs, p.inputs)?;
        problem.x = layout(p.inputs, rows, p.x_stride)?;
        problem.y = layout(p.outputs, rows, p.outputs)?;
        Ok(problem)
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        for layout in [self.weight, self.x, self.y].into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: made by `new`, and used no more.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
        if !self.operation.is_null() {
            // SAFETY: as above.
            let _ = unsafe { result::destroy_matmul_desc(self.operation) };
        }
    }
}

/// What choices may use: the workspace, and a reduction after the sum only where it is in parts.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(split: bool) -> Result<Self, BlockError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference =
            Self(result::create_matmul_pref().map_err(|status| refused("cublasLtMatmulPreferenceCreate", status))?);
        // All schemes, or none.
        let (most, reductions) = (GEMM_WORKSPACE as usize, if split { u32::MAX } else { 0 });
        let attributes = [
            (
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                ptr::from_ref(&most).cast::<c_void>(),
                size_of_val(&most),
            ),
            (Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ptr::from_ref(&reductions).cast(), 4),
        ];
        for (attribute, value, size) in attributes {
            // SAFETY: the preference was just made; the first attribute is a size and the second 32 bits.
            unsafe { result::set_matmul_pref_attribute(preference.0, attribute, value, size) }
                .map_err(|status| refused("cublasLtMatmulPreferenceSetAttribute", status))?;
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and used no more.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

fn refused(call: &str, status: result::CublasError) -> BlockError {
    BlockError::Lt { reason: format!("refuses {call}: {:?}", status.0) }
}

/// Sees to it that cudarc finds the library: it panics where it does not. What is loaded here by its path is found by its name
/// afterwards, since the loader knows what it has.
fn find() -> Result<(), BlockError> {
    let mut places: Vec<PathBuf> = Vec::new();
    if let Some(path) = std::env::var_os("TERRACE_CUBLASLT").filter(|path| !path.is_empty()) {
        places.push(path.into());
    }
    for home in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from) {
        places.push(home.join("lib64/libcublasLt.so"));
    }
    places.push("/usr/local/cuda/lib64/libcublasLt.so".into());
    if let Some(environment) = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from) {
        for python in std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten() {
            let nvidia = python.path().join("site-packages/nvidia");
            places.push(nvidia.join("cu13/lib/libcublasLt.so.13"));
            places.push(nvidia.join("cublas/lib/libcublasLt.so.12"));
        }
    }
    for place in places.iter().filter(|place| place.exists()) {
        // SAFETY: loading runs the library's initialisers, which is what the caller asked for.
        if let Ok(library) = unsafe { Library::new(place) } {
            // It stays for the life of the process, as cudarc's own handle of it does.
            std::mem::forget(library);
            break;
        }
    }
    // SAFETY: as above.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    let tried = places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ");
    let reason = format!(
        "is not found as libcublasLt.so, nor as {tried}; install the CUDA libraries (pip install nvidia-cublas), or set \
         TERRACE_CUBLASLT to its path"
    );
    Err(BlockError::Lt { reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_library_or_a_device_the_error_says_which() {
        // Where there is a device, this is a handle; elsewhere it must not panic, as cudarc would.
        if let Err(error) = Lt::new() {
            let said = error.to_string();
            let missing = said.contains("is not found as libcublasLt.so") && said.contains("TERRACE_CUBLASLT");
            assert!(missing || said.contains("refuses cublasLtCreate: CUBLAS_STATUS_"), "{said}");
            assert!(!said.contains('\n'), "{said}");
        }
    }
}
