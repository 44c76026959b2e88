//! Which vector instructions the processor has. The same code is compiled for each level; a process keeps to one, so that
//! equal inputs give equal bits in it, whatever the threads.
//!
//! This file is where a level's code is entered, so the one `unsafe` of that is here.

use std::sync::LazyLock;

/// Code to be compiled for each level, with its tile of rows and columns and whether multiply-add is one instruction.
pub(crate) trait Kernel {
    /// Runs it; to be marked `inline(always)`, or it would not be compiled for the level.
    fn run<const FMA: bool, const ROWS: usize, const COLUMNS: usize>(self);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// What the target is compiled for anyway.
    Base,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The best that this processor has.
    pub fn best() -> Self {
        static BEST: LazyLock<Isa> = LazyLock::new(Isa::detect);
        *BEST
    }

    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Base
    }

    pub fn run(self, kernel: impl Kernel) {
        match self {
            // Without FMA instructions a fused multiply-add is a library call for each element.
            Self::Base => kernel.run::<{ cfg!(any(target_feature = "fma", target_arch = "aarch64")) }, 4, 8>(),
            // SAFETY: these values are made by `detect` alone, which asked for the features.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512(kernel) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(kernel: impl Kernel) {
    kernel.run::<true, 4, 16>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn avx512(kernel: impl Kernel) {
    kernel.run::<true, 8, 32>();
}
