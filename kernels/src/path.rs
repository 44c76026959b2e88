//! Which path a call took and why: returned by every call, counted for the process, and traced (target `terrace::gdn`).

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

/// What served a call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Path {
    /// The path.
    pub route: Route,
    /// Why this one, in words.
    pub why: Cow<'static, str>,
    /// The architecture that the kernels were compiled for, such as `sm_90a`; none on the CPU.
    pub arch: Option<Cow<'static, str>>,
    /// Windows that the tokens were worked through in; 0 for decode.
    pub windows: u64,
    /// Chunks of all sequences; 0 for decode.
    pub chunks: u64,
    /// Kernel launches; 0 on the CPU.
    pub launches: u64,
    /// Bytes of tables that the host held for it at a time.
    pub table_bytes: u64,
}

/// The paths there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// Chunks in fp32 on the host.
    CpuPrefill,
    /// Tokens one by one on the host.
    CpuDecode,
    /// One kernel for each window.
    CudaFused,
    /// One kernel for all windows.
    CudaStreamed,
    /// Three kernels for each window.
    CudaStaged,
    /// One kernel for the step.
    CudaDecode,
}

impl Route {
    /// Every route, in the order of [`Counts`].
    pub const ALL: [Self; 6] =
        [Self::CpuPrefill, Self::CpuDecode, Self::CudaFused, Self::CudaStreamed, Self::CudaStaged, Self::CudaDecode];

    /// As it is traced.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CpuPrefill => "cpu-prefill",
            Self::CpuDecode => "cpu-decode",
            Self::CudaFused => "cuda-fused",
            Self::CudaStreamed => "cuda-streamed",
            Self::CudaStaged => "cuda-staged",
            Self::CudaDecode => "cuda-decode",
        }
    }
}

/// Calls of this process so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    served: [u64; Route::ALL.len()],
    /// Calls that returned an error.
    pub refused: u64,
}

impl Counts {
    /// Calls that a route served.
    pub fn served(&self, route: Route) -> u64 {
        self.served[route as usize]
    }
}

static SERVED: [AtomicU64; Route::ALL.len()] = [const { AtomicU64::new(0) }; Route::ALL.len()];
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// Calls of this process so far.
pub fn counts() -> Counts {
    let served = std::array::from_fn(|route| SERVED[route].load(Ordering::Relaxed));
    Counts { served, refused: REFUSED.load(Ordering::Relaxed) }
}

/// Counts and traces what came of a call, and passes it on.
pub(crate) fn note<E: std::fmt::Display>(result: Result<Path, E>) -> Result<Path, E> {
    match &result {
        Ok(path) => {
            SERVED[path.route as usize].fetch_add(1, Ordering::Relaxed);
            tracing::debug!(
                target: "terrace::gdn",
                route = path.route.name(),
                arch = path.arch.as_deref(),
                windows = path.windows,
                chunks = path.chunks,
                launches = path.launches,
                "{}",
                path.why
            );
        }
        Err(error) => {
            REFUSED.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(target: "terrace::gdn", "refused: {error}");
        }
    }
    result
}
