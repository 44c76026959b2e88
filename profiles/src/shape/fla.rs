//! The buffers of a Gated DeltaNet layer as FLA's pipeline allocates them, for all tokens at once: fla-core 0.6 and vLLM's
//! copy, which keeps an fp32 `A` beside the inverse.
//!
//! ```text
//! qkvz -> conv -> q k v -> l2norm -> A -> Ai -> w u -> h v_new -> o -> core
//! ```
//!
//! Frames hold nearly all of it to the end of the operation, although `v` is dead once `u` exists.

use super::CHUNK;
use super::layer::{ACTIVATION, FP32, Rank, Table, most_chunks};
use crate::units::Overflow;

/// Whose copy of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copy {
    /// fla-core 0.6: `A` is 16 bits wide and inverted where it is made; the norms of q and k are kept.
    Fla,
    /// vLLM's vendored kernels: an fp32 `A`, then its inverse.
    Vllm,
}

/// Where the frames of the operation end.
const END: &str = "copy";

/// Rows as [`Table::new`] takes them.
type Rows = Vec<(&'static str, [u64; 3], [&'static str; 3])>;

/// What the operation itself allocates, without its output and final state.
fn op_rows(rank: &Rank, copy: Copy, tokens: u64, sequences: u64) -> Rows {
    let r = rank;
    let keys = r.key_heads * r.key_dim;
    let chunks = most_chunks(tokens, sequences);
    let state = r.value_heads * r.key_dim * r.value_dim;
    let mut rows: Rows = vec![
        ("q_l2", [tokens, keys, ACTIVATION], ["l2norm", "fwd_o", END]),
        ("k_l2", [tokens, keys, ACTIVATION], ["l2norm", "fwd_o", END]),
    ];
    if copy == Copy::Fla {
        rows.push(("q_rstd", [tokens, r.key_heads, FP32], ["l2norm", "l2norm", END]));
        rows.push(("k_rstd", [tokens, r.key_heads, FP32], ["l2norm", "l2norm", END]));
    }
    rows.push(("g_cumsum", [tokens, r.value_heads, FP32], ["cumsum", "fwd_o", END]));
    if copy == Copy::Vllm {
        rows.push(("A", [tokens, r.value_heads * CHUNK, FP32], ["kkt", "solve_tril", "solve_tril"]));
    }
    rows.extend([
        ("Ai", [tokens, r.value_heads * CHUNK, ACTIVATION], ["solve_tril", "recompute_w_u", END]),
        ("w", [tokens, r.values(), ACTIVATION], ["recompute_w_u", "fwd_h", END]),
        ("u", [tokens, r.values(), ACTIVATION], ["recompute_w_u", "fwd_h", END]),
        ("h", [chunks, state, ACTIVATION], ["fwd_h", "fwd_o", END]),
        ("v_new", [tokens, r.values(), ACTIVATION], ["fwd_h", "fwd_o", END]),
    ]);
    rows
}

/// The operation alone: what it takes beyond its output and final state.
///
/// # Errors
/// A size that is no size.
pub fn gdn_op(rank: &Rank, copy: Copy, tokens: u64, sequences: u64) -> Result<Table, Overflow> {
    const OPS: &[&str] = &["l2norm", "cumsum", "kkt", "solve_tril", "recompute_w_u", "fwd_h", "fwd_o", END];
    let rows = op_rows(rank, copy, tokens, sequences);
    Table::new(OPS, rows.iter().map(|(name, size, ops)| (*name, &size[..], *ops)))
}

/// The whole layer but the residual stream.
///
/// # Errors
/// A size that is no size.
pub fn gdn_mixer(rank: &Rank, copy: Copy, tokens: u64, sequences: u64) -> Result<Table, Overflow> {
    const OPS: &[&str] = &[
        "norm",
        "in_proj",
        "in_proj_ba",
        "concat",
        "zeros",
        "conv",
        "rearrange",
        "gating",
        "gather",
        "l2norm",
        "cumsum",
        "kkt",
        "solve_tril",
        "recompute_w_u",
        "fwd_h",
        "fwd_o",
        END,
        "gated_norm",
        "out_proj",
        "add",
    ];
    let r = rank;
    let keys = r.key_heads * r.key_dim;
    let concat = r.qkv() * u64::from(r.interleaved);
    let mut rows: Rows = vec![
        ("x", [tokens, r.hidden, ACTIVATION], ["norm", "in_proj_ba", END]),
        // z is a view of it.
        ("qkvz", [tokens, r.qkv() + r.values(), ACTIVATION], ["in_proj", "gated_norm", "gated_norm"]),
        ("ba", [tokens, 2 * r.value_heads, ACTIVATION], ["in_proj_ba", "gating", END]),
        ("b", [tokens, r.value_heads, ACTIVATION], ["in_proj_ba", "gating", END]),
        ("a", [tokens, r.value_heads, ACTIVATION], ["in_proj_ba", "gating", END]),
        ("qkv_concat", [tokens, concat, ACTIVATION], ["concat", "conv", END]),
        ("core_attn_out", [tokens, r.values(), ACTIVATION], ["zeros", "gated_norm", "gated_norm"]),
        ("conv_out", [tokens, r.qkv(), ACTIVATION], ["conv", "rearrange", END]),
        ("q", [tokens, keys, ACTIVATION], ["rearrange", "l2norm", END]),
        ("k", [tokens, keys, ACTIVATION], ["rearrange", "l2norm", END]),
        ("v", [tokens, r.values(), ACTIVATION], ["rearrange", "recompute_w_u", END]),
        ("g", [tokens, r.value_heads, FP32], ["gating", "cumsum", END]),
        ("beta", [tokens, r.value_heads, ACTIVATION], ["gating", "recompute_w_u", END]),
        ("initial_state", [sequences, r.state(), 1], ["gather", "fwd_h", END]),
    ];
    rows.extend(op_rows(rank, copy, tokens, sequences));
    rows.extend([
        ("final_state", [sequences, r.state(), 1], ["fwd_h", END, END]),
        ("o", [tokens, r.values(), ACTIVATION], ["fwd_o", END, END]),
        ("norm_out", [tokens, r.values(), ACTIVATION], ["gated_norm", "out_proj", "out_proj"]),
        ("out", [tokens, r.hidden, ACTIVATION], ["out_proj", "add", "add"]),
    ]);
    Table::new(OPS, rows.iter().map(|(name, size, ops)| (*name, &size[..], *ops)))
}
