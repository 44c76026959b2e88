//! The tables of a layer as Terrace runs it: what the kernels of a block ask for, operation by operation, and what is predicted
//! for them. Both read it here.
//!
//! ```text
//! norm -> x -> in_proj -> qkvzba -> conv -> conv_out, g, beta -> gdn -> o -> gated_norm (in o) -> out_proj (adds to the residual)
//! norm -> x -> gate_up -> gate_up -> silu (in its first half) -> down (adds to the residual)
//! ```
//!
//! A projection that ends a half adds to the residual stream itself, so neither its result nor a copy of the stream is kept. A
//! row of a projected buffer is padded to whole tiles of a projection.

use super::layer::{ACTIVATION, FP32, Mlp, Rank, Table, mlp as unfused_mlp};
use super::{CHUNK, Design, Gdn, HEAD_DIM, Layout, Window, gdn_cpu_workspace, gdn_workspace};
use crate::synth::MAX_DECODE;
use crate::units::Overflow;

/// What a projection on CUDA may use beside its arguments, in bytes.
pub const GEMM_WORKSPACE: u64 = 16 << 20;
/// Columns of a tile of a projection.
pub const TILE_COLUMNS: u64 = 128;

/// How operations run: how wide a number is, and what they need beside their arguments. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// Of an activation.
    pub activation: u64,
    /// The workspace of Gated DeltaNet; 0 for a decode step, which needs none.
    pub gdn: u64,
    /// The workspace of a projection.
    pub gemm: u64,
}

impl Run {
    /// On CUDA, in 16 bits.
    pub fn cuda(heads: Gdn, window: Window) -> Self {
        let gdn = gdn_workspace(heads, window, Design::Fused).total().get();
        Self { activation: ACTIVATION, gdn, gemm: GEMM_WORKSPACE }
    }

    /// On so many threads of the host, in fp32.
    pub fn cpu(heads: Gdn, threads: u32) -> Self {
        Self { activation: FP32, gdn: gdn_cpu_workspace(heads, threads).total().get(), gemm: 0 }
    }

    /// The same for a decode step.
    #[must_use]
    pub fn decode(self) -> Self {
        Self { gdn: 0, ..self }
    }
}

/// Tokens that the Gated DeltaNet kernels hold at once inside a layer's window, which may be larger: no more than the fastest.
/// `None`, all tokens at once, is the fastest too.
///
/// # Errors
/// The window, unless it is a positive multiple of [`CHUNK`].
pub fn kernel_window(layer: Option<u64>) -> Result<Window, u64> {
    match layer {
        None => Ok(Window::DEFAULT),
        Some(tokens) if tokens == 0 || !tokens.is_multiple_of(CHUNK) => Err(tokens),
        Some(tokens) => Ok(Window::new(tokens).unwrap_or(Window::MAX).min(Window::DEFAULT)),
    }
}

/// Numbers of a row of what the input projection gives: q, k, v, z, b and a of one token, and padding.
pub const fn projected(rank: &Rank) -> u64 {
    (rank.qkv() + rank.values() + 2 * rank.value_heads).next_multiple_of(TILE_COLUMNS)
}

/// A Gated DeltaNet mixer over `tokens` of the prompt: q, k and v are read as views of the convolution's output and z as a view
/// of the projection's, the states are used in the pool they lie in, and the norm and its gate work in place.
///
/// # Errors
/// A size that is no size.
pub fn gdn_mixer(rank: &Rank, tokens: u64, run: Run) -> Result<Table, Overflow> {
    const OPS: &[&str] = &["norm", "in_proj", "conv", "gdn", "gated_norm", "out_proj"];
    let r = rank;
    Table::new(
        OPS,
        [
            ("x", &[tokens, r.hidden, run.activation][..], ["norm", "in_proj", "in_proj"]),
            ("qkvzba", &[tokens, projected(r), run.activation], ["in_proj", "gated_norm", "gated_norm"]),
            ("in_proj_workspace", &[run.gemm], ["in_proj", "in_proj", "in_proj"]),
            ("conv_out", &[tokens, r.qkv(), run.activation], ["conv", "gdn", "gdn"]),
            ("g", &[tokens, r.value_heads, FP32], ["conv", "gdn", "gdn"]),
            ("beta", &[tokens, r.value_heads, run.activation], ["conv", "gdn", "gdn"]),
            ("gdn_workspace", &[run.gdn], ["gdn", "gdn", "gdn"]),
            ("o", &[tokens, r.values(), run.activation], ["gdn", "out_proj", "out_proj"]),
            ("out_proj_workspace", &[run.gemm], ["out_proj", "out_proj", "out_proj"]),
        ],
    )
}

/// The operation alone: its workspace.
///
/// # Errors
/// A size that is no size.
pub fn gdn_op(heads: Gdn, window: Window) -> Result<Table, Overflow> {
    let workspace = gdn_workspace(heads, window, Design::Fused).total().get();
    Table::new(&["gdn"], [("gdn_workspace", &[workspace][..], ["gdn", "gdn", "gdn"])])
}

/// One call of the operation with all it takes, for whoever makes the inputs too: q, k, v and o of 16 bits, g and beta in fp32.
///
/// # Errors
/// A size that is no size.
pub fn gdn_call(heads: Gdn, tokens: u64, window: Window) -> Result<Table, Overflow> {
    let workspace = gdn_workspace(heads, window, Design::Fused).total().get();
    let (keys, values) = (u64::from(heads.key_heads()), u64::from(heads.value_heads()));
    Table::new(
        &["inputs", "gdn"],
        [
            ("q", &[tokens, keys, HEAD_DIM, ACTIVATION][..], ["inputs", "gdn", "gdn"]),
            ("k", &[tokens, keys, HEAD_DIM, ACTIVATION], ["inputs", "gdn", "gdn"]),
            ("v", &[tokens, values, HEAD_DIM, ACTIVATION], ["inputs", "gdn", "gdn"]),
            ("g", &[tokens, values, FP32], ["inputs", "gdn", "gdn"]),
            ("beta", &[tokens, values, FP32], ["inputs", "gdn", "gdn"]),
            ("o", &[tokens, values, HEAD_DIM, ACTIVATION], ["gdn", "gdn", "gdn"]),
            ("gdn_workspace", &[workspace], ["gdn", "gdn", "gdn"]),
        ],
    )
}

/// A feed-forward over `tokens` of the prompt. Experts are sized as other engines run them.
///
/// # Errors
/// A size that is no size.
pub fn mlp(rank: &Rank, tokens: u64, run: Run) -> Result<Table, Overflow> {
    let Mlp::Dense { intermediate } = rank.mlp else { return unfused_mlp(rank, tokens) };
    Table::new(
        &["norm", "gate_up", "silu", "down"],
        [
            ("x", &[tokens, rank.hidden, run.activation][..], ["norm", "gate_up", "gate_up"]),
            ("gate_up", &[tokens, 2 * intermediate, run.activation], ["gate_up", "down", "down"]),
            ("gate_up_workspace", &[run.gemm], ["gate_up", "gate_up", "gate_up"]),
            ("down_workspace", &[run.gemm], ["down", "down", "down"]),
        ],
    )
}

/// Taps of the convolution over time; other widths are not served.
pub const CONV_TAPS: u64 = 4;

/// The weights of a layer as it reads them, one after the other: projections in activations, one row for each output, and what
/// is read once a token in fp32. `index` holds the bounds and the slot of decode steps of each length, for kernels that read
/// them on the device.
pub fn weights(rank: &Rank, activation: u64, whole: bool) -> Layout {
    let matrix = |outputs: u64, inputs: u64| outputs * inputs * activation;
    let mixer = [
        ("in_norm", rank.hidden * FP32),
        ("in_proj", matrix(projected(rank), rank.hidden)),
        // One tap after the other.
        ("conv", CONV_TAPS * rank.qkv() * FP32),
        ("decay", rank.value_heads * FP32),
        ("dt_bias", rank.value_heads * FP32),
        ("gated_norm", rank.value_dim * FP32),
        ("out_proj", matrix(rank.hidden, rank.values())),
        ("index", 4 * INDEX),
    ];
    let Mlp::Dense { intermediate } = rank.mlp else { return Layout::new(mixer) };
    let mlp = [
        ("mlp_norm", rank.hidden * FP32),
        ("gate_up", matrix(2 * intermediate, rank.hidden)),
        ("down", matrix(rank.hidden, intermediate)),
    ];
    Layout::new(mixer.into_iter().chain(whole.then_some(mlp).into_iter().flatten()))
}

/// 32-bit numbers of the part `index` of [`weights`]: 0 and `n` for each length `n` of a decode step, then the slot, 0.
pub const INDEX: u64 = 2 * MAX_DECODE + 1;

/// What a sequence carries through a layer from one window, chunk or token to the next: the fp32 states of Gated DeltaNet, and
/// the inputs of the convolution at the last tokens, written by turns.
pub fn state(rank: &Rank, activation: u64) -> Layout {
    let inputs = (CONV_TAPS - 1) * rank.qkv() * activation;
    Layout::new([("recurrent", rank.state()), ("conv.a", inputs), ("conv.b", inputs)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_of_a_layer_holds_a_window_of_the_kernels() {
        let inside = |tokens| kernel_window(tokens).map(Window::tokens);
        assert_eq!((inside(None), inside(Some(64)), inside(Some(640))), (Ok(640), Ok(64), Ok(640)));
        assert_eq!((inside(Some(1024)), inside(Some(1 << 40))), (Ok(640), Ok(640)));
        assert_eq!((inside(Some(0)), inside(Some(100))), (Err(0), Err(100)));
    }

    #[test]
    fn a_decode_step_asks_for_no_workspace_of_the_operation() {
        let rank = crate::model::Model::named("qwen3.6-27b").unwrap().whole;
        let run = Run::cuda(Gdn::new(16, 48).unwrap(), Window::DEFAULT);
        let names = |run| gdn_mixer(&rank, 1, run).unwrap().rows.into_iter().map(|row| row.name).collect::<Vec<_>>();
        assert!(names(run).contains(&"gdn_workspace"));
        assert!(!names(run.decode()).contains(&"gdn_workspace"));
        assert_eq!(projected(&rank), 129 * 128);
    }

    #[test]
    fn a_call_is_its_inputs_its_output_and_a_workspace_that_no_prompt_changes() {
        let heads = Gdn::new(16, 48).unwrap();
        let table = gdn_call(heads, 4128, Window::DEFAULT).unwrap();
        let sizes: Vec<_> = table.rows.iter().map(|row| (row.name, row.bytes.get())).collect();
        let (keys, values, gates) = (4128 * 16 * 256, 4128 * 48 * 256, 4128 * 48 * 4);
        let workspace = gdn_workspace(heads, Window::DEFAULT, Design::Fused).total().get();
        let expected = [
            ("q", keys),
            ("k", keys),
            ("v", values),
            ("g", gates),
            ("beta", gates),
            ("o", values),
            ("gdn_workspace", workspace),
        ];
        assert_eq!(sizes, expected);
        assert!(gdn_call(heads, u64::MAX / 4, Window::DEFAULT).is_err(), "sizes that are none are refused");
    }
}
