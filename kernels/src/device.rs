//! Where a call runs, and the two calls.

use crate::args::{Decode, Prefill};
use crate::cpu::{self, Cpu};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::Error;
#[cfg(feature = "cuda")]
use crate::launch;
use crate::path::{self, Path};
use crate::view::Workspace;

/// Where a call runs. Nothing falls back from one to another: an error is the caller's to handle.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// This process's processors.
    Cpu(Cpu),
    /// A CUDA device, and the stream that work is queued on.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Device),
}

/// Runs a prefill.
///
/// On the host it is done when this returns. On a device it is queued, and its arguments must stay as they are until the
/// stream has come to its end; nothing here waits.
///
/// # Errors
/// Whatever is wrong with the arguments, before anything is written; or what the device said.
pub fn prefill(device: &Device, args: Prefill<'_>, workspace: Workspace<'_>) -> Result<Path, Error> {
    path::note(match device {
        Device::Cpu(cpu) => cpu::prefill(cpu, args, workspace),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => launch::prefill(device, args, &workspace),
    })
}

/// Runs a decode step. As for [`prefill`], on the host it is done when this returns, on a device it is queued.
///
/// # Errors
/// Whatever is wrong with the arguments, before anything is written; or what the device said.
pub fn decode(device: &Device, args: Decode<'_>) -> Result<Path, Error> {
    path::note(match device {
        Device::Cpu(cpu) => cpu::decode(cpu, args),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => launch::decode(device, args),
    })
}
