//! How much memory a prefill needs, and the largest window that fits in what there is. Sizes come from `profiles::shape`, so
//! that a planner can predict them without a device: they depend on the heads and the window, never on the tokens.

#[cfg(feature = "cuda")]
use terrace_profiles::shape::gdn_workspace;
use terrace_profiles::shape::{Design, Gdn, Layout, Window, gdn_cpu_workspace};
use terrace_profiles::units::Bytes;

use crate::device::Device;
use crate::error::Error;

/// The parts of the workspace that a prefill on this device needs, in order. A decode step needs none.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "the window is the CUDA kernels' concern"))]
pub fn workspace(device: &Device, shape: Gdn, window: Window, design: Design) -> Layout {
    match device {
        Device::Cpu(cpu) => gdn_cpu_workspace(shape, cpu.threads()),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => gdn_workspace(shape, window, design),
    }
}

/// The largest window whose workspace fits in `budget`.
///
/// # Errors
/// [`Error::Budget`] when not even a window of 64 tokens fits; it says what that needs.
pub fn choose_window(device: &Device, budget: Bytes, shape: Gdn, design: Design) -> Result<Window, Error> {
    let total = |window| workspace(device, shape, window, design).total();
    let smallest = total(Window::MIN);
    Window::descending().find(|window| total(*window) <= budget).ok_or(Error::Budget { budget, smallest })
}
