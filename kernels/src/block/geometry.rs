//! What a layer is like: checked once, so that every size that follows from it is one.

use terrace_profiles::model::Model;
use terrace_profiles::shape::layer::{Mlp, Rank, served_widths};
use terrace_profiles::shape::terrace::{self, CONV_TAPS, Run};
use terrace_profiles::shape::{Gdn, Layout, Window};
use terrace_profiles::units::Bytes;

use super::error::BlockError;
use crate::device::Device;
use crate::view::Dtype;

/// How much of a layer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Mixer and feed-forward.
    Layer,
    /// The mixer alone.
    Mixer,
}

/// What a layer is like and in which numbers it runs: checked, so that every size that follows from it is one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Geometry {
    pub(super) rank: Rank,
    heads: Gdn,
    pub(super) eps: f32,
    pub(super) part: Part,
    pub(super) element: Dtype,
}

impl Geometry {
    /// A layer of a model on one card, in `element`: fp32 on the CPU, bf16 or fp16 on CUDA.
    ///
    /// # Errors
    /// [`BlockError::Model`]: heads, experts or a convolution that are not served.
    pub fn new(model: &Model, part: Part, element: Dtype) -> Result<Self, BlockError> {
        let rank = model.whole;
        let refuse = |reason: String| BlockError::Model { model: model.id.clone(), reason };
        if !served_widths(&rank) {
            let (keys, values) = (rank.key_dim, rank.value_dim);
            return Err(refuse(format!("its heads are {keys} and {values} wide; only 128 is served")));
        }
        let narrow = |heads| u32::try_from(heads).unwrap_or(u32::MAX);
        let heads = Gdn::new(narrow(rank.key_heads), narrow(rank.value_heads));
        let heads = heads.map_err(|error| refuse(error.to_string()))?;
        if model.conv_kernel != CONV_TAPS {
            return Err(refuse(format!("its convolution is {} wide; only {CONV_TAPS} is served", model.conv_kernel)));
        }
        let multiple = |what: &str, width: u64| {
            let reason = format!("its {what} is {width} wide; a multiple of 8 is expected");
            if width.is_multiple_of(8) { Ok(()) } else { Err(refuse(reason)) }
        };
        multiple("residual stream", rank.hidden)?;
        match (part, rank.mlp) {
            (Part::Mixer, _) => {}
            (Part::Layer, Mlp::Dense { intermediate }) => multiple("feed-forward", intermediate)?,
            (Part::Layer, Mlp::Moe { experts, .. }) => {
                let reason =
                    format!("its feed-forward has {experts} experts, which are not served; run its mixer alone");
                return Err(refuse(reason));
            }
        }
        Ok(Self { rank, heads, eps: model.norm_eps as f32, part, element })
    }

    /// Widths and heads.
    pub fn rank(&self) -> &Rank {
        &self.rank
    }

    /// The type of activations and projections.
    pub fn element(&self) -> Dtype {
        self.element
    }

    /// Where the weights lie in their span.
    pub fn weights(&self) -> Layout {
        terrace::weights(&self.rank, self.element.bytes(), self.part == Part::Layer)
    }

    /// Where the state of a sequence lies in its span.
    pub fn state(&self) -> Layout {
        terrace::state(&self.rank, self.element.bytes())
    }

    /// The residual stream of so many tokens.
    ///
    /// # Errors
    /// [`BlockError::Tokens`]: more than a size can say.
    pub fn residual(&self, tokens: u64) -> Result<Bytes, BlockError> {
        let row = self.rank.hidden * self.element.bytes();
        tokens
            .checked_mul(row)
            .and_then(Bytes::new)
            .ok_or(BlockError::Tokens { given: tokens, most: u64::MAX / row / 2 })
    }

    /// How its operations run on a device, in a window of the kernels.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "the window is the CUDA kernels' concern"))]
    pub(super) fn run(&self, device: &Device, window: Window) -> Run {
        match device {
            Device::Cpu(cpu) => Run::cpu(self.heads, cpu.threads()),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Run::cuda(self.heads, window),
        }
    }

    /// Whether the numbers are those of the device.
    pub(super) fn check_element(&self, device: &Device) -> Result<(), BlockError> {
        let (served, expected) = match device {
            Device::Cpu(_) => (self.element == Dtype::F32, "fp32"),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => (self.element != Dtype::F32, "bf16 or fp16"),
        };
        if served { Ok(()) } else { Err(BlockError::Element { given: self.element, expected }) }
    }
}
