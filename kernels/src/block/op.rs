//! The operations of a layer, and the one that CPU and CUDA share: Gated DeltaNet, which this crate's calls compute on either.

use terrace_profiles::shape::terrace::INDEX;
use terrace_profiles::shape::{Design, HEAD_DIM, Window};
use terrace_profiles::synth::MAX_DECODE;
use terrace_profiles::units::DeviceSpan;

use super::buffers::Buffers;
use super::{Layer, State, part};
use crate::args::{Decode, Prefill, States};
use crate::device::{Device, decode, prefill};
use crate::error::Error;
use crate::metadata::Sequences;
use crate::view::{Dtype, Indices, Place, PoolMut, Tensor, TensorMut, Workspace};

/// One operation of the tables in `shape::terrace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    InNorm,
    InProj,
    Conv,
    Gdn,
    GatedNorm,
    OutProj,
    MlpNorm,
    GateUp,
    Silu,
    Down,
}

impl Op {
    /// By the table's name and its own in it.
    pub fn of(table: &str, op: &str) -> Self {
        match (table, op) {
            ("gdn", "norm") => Self::InNorm,
            ("gdn", "in_proj") => Self::InProj,
            ("gdn", "conv") => Self::Conv,
            ("gdn", "gdn") => Self::Gdn,
            ("gdn", "gated_norm") => Self::GatedNorm,
            ("gdn", "out_proj") => Self::OutProj,
            ("mlp", "norm") => Self::MlpNorm,
            ("mlp", "gate_up") => Self::GateUp,
            ("mlp", "silu") => Self::Silu,
            ("mlp", "down") => Self::Down,
            _ => unreachable!("{table} has no operation {op}"),
        }
    }
}

/// A window of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Its first token.
    pub first: u64,
    pub tokens: u64,
    /// Tokens that Gated DeltaNet's kernels hold at once; none in a decode step.
    pub kernel: Option<Window>,
}

/// All that an operation reads and writes.
pub(super) struct Places<'a> {
    pub layer: &'a Layer,
    pub piece: Piece,
    /// The window's rows.
    pub residual: DeviceSpan,
    pub state: &'a State,
    pub buffers: &'a Buffers<'a>,
}

impl Places<'_> {
    /// A part of the weights.
    pub fn weight(&self, name: &'static str) -> DeviceSpan {
        part(self.layer.weights, &self.layer.geometry.weights(), name)
    }

    /// The convolution's last inputs, to read and to write.
    pub fn conv_states(&self) -> [DeviceSpan; 2] {
        let layout = self.layer.geometry.state();
        let [a, b] = ["conv.a", "conv.b"].map(|name| part(self.state.span, &layout, name));
        if self.state.turn { [b, a] } else { [a, b] }
    }
}

/// Gated DeltaNet over a window: q, k and v are views of the convolution's output.
///
/// # Safety
/// As [`Layer::prefill`].
pub(super) unsafe fn gdn(at: &Places<'_>) -> Result<(), Error> {
    let Layer { device, geometry, .. } = at.layer;
    let (rank, element, tokens) = (&geometry.rank, geometry.element, at.piece.tokens);
    let place = match device {
        Device::Cpu(_) => Place::Host,
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Place::Device,
    };
    let conv_out = at.buffers.at("conv_out").address;
    let view = |first: u64, heads: u64| {
        // SAFETY: rows of q, k and v side by side, as the convolution wrote them.
        let view = unsafe {
            let address = conv_out + first * element.bytes();
            Tensor::from_raw(place, address, element, [tokens, heads, HEAD_DIM])
        };
        view.strides(rank.qkv(), HEAD_DIM)
    };
    let keys = rank.key_heads * HEAD_DIM;
    let [q, k, v] = [view(0, rank.key_heads), view(keys, rank.key_heads), view(2 * keys, rank.value_heads)];
    let gate = |name: &str, dtype: Dtype| {
        // SAFETY: as the convolution's operation wrote it.
        unsafe { Tensor::from_raw(place, at.buffers.at(name).address, dtype, [tokens, rank.value_heads, 1]) }
    };
    let (g, beta) = (gate("g", Dtype::F32), gate("beta", element));
    let o = at.buffers.at("o").address;
    // SAFETY: the buffer is as large, and nobody else has it.
    let o = unsafe { TensorMut::from_raw(place, o, element, [tokens, rank.value_heads, HEAD_DIM]) };
    let [recurrent, _] = at.state.parts(geometry);
    // SAFETY: the caller's promise about the state; `shape::terrace::state` makes it this large.
    let pool = unsafe { PoolMut::from_raw(place, recurrent.address, Dtype::F32, [1, rank.value_heads]) };
    let has_initial = [!at.state.fresh];
    let Some(window) = at.piece.kernel else {
        // The step starts from what the pool holds.
        assert!(!at.state.fresh, "`Layer::decode` refuses a sequence that has not begun");
        let bounds = [0, tokens as i32];
        let index = at.weight("index").address;
        let (cu_seqlens, slots) = match place {
            Place::Host => (Indices::host(&bounds), Indices::host(&[0])),
            // SAFETY: `weights` has written them there.
            Place::Device => unsafe {
                (Indices::device(index + 8 * (tokens - 1), 2), Indices::device(index + 8 * MAX_DECODE, 1))
            },
        };
        decode(device, Decode { q, k, v, g, beta, o, cu_seqlens, slots, pool, scale: None, l2norm: true })?;
        return Ok(());
    };
    let workspace = at.buffers.at("gdn_workspace");
    // SAFETY: the buffer is as large as `shape` says that it must be.
    let workspace = unsafe { Workspace::from_raw(place, workspace) };
    let states = States::InPlace { pool, slots: None, has_initial: Some(&has_initial) };
    let sequences = Sequences::default();
    let args = Prefill {
        q,
        k,
        v,
        g,
        beta,
        o,
        sequences,
        states,
        checkpoints: None,
        scale: None,
        l2norm: true,
        window,
        design: Design::Fused,
    };
    prefill(device, args, workspace)?;
    Ok(())
}

/// What the part `index` of the weights holds.
pub(super) fn index() -> [i32; INDEX as usize] {
    let mut index = [0; INDEX as usize];
    for (place, entry) in index.iter_mut().enumerate().take(2 * MAX_DECODE as usize) {
        *entry = if place % 2 == 1 { (place / 2 + 1) as i32 } else { 0 };
    }
    index
}
