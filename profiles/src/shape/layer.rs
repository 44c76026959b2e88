//! Every buffer of a layer: what it holds, how large it is, which operation makes it and which reads it last.
//!
//! ```text
//! norm -> x -> in_proj -> qkvz -> conv -> ... -> out_proj -> add     a mixer (here, `fla`)
//! norm -> x -> gate_up -> silu -> down -> add                        an MLP (here)
//! ```
//!
//! A [`Table`] lists operations in order and, for each buffer, three of them: where it is born, its last reader, and where a
//! Python frame lets go of it. What lies outside a layer (the residual stream, logits) is in `synth`. Sizes are those of
//! one rank: [`Rank`] is what tensor parallelism leaves of the heads and of the feed-forward.

use super::{CHUNK, Design, Gdn, HEAD_DIM, Window, gdn_workspace};
use crate::units::{Bytes, Overflow};

/// Bytes of an activation: bf16 or fp16.
pub const ACTIVATION: u64 = 2;
/// Bytes of an fp32 number.
pub const FP32: u64 = 4;

/// What one card holds of a layer. Products of two fields stay far below 2^63: `model` lets no field above 2^24.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    /// Width of the residual stream; never split.
    pub hidden: u64,
    /// Heads of q and k of a Gated DeltaNet layer.
    pub key_heads: u64,
    /// Heads of its v, gates, output and state.
    pub value_heads: u64,
    /// Width of a key.
    pub key_dim: u64,
    /// Width of a value.
    pub value_dim: u64,
    /// Whether q, k, v and z come interleaved by key head, so that q, k and v are copied once more.
    pub interleaved: bool,
    /// Query heads of a full-attention layer.
    pub heads: u64,
    /// Its key and value heads.
    pub kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Whether its output is gated, so that the projection is a query wider.
    pub gated: bool,
    /// The feed-forward.
    pub mlp: Mlp,
}

/// A feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mlp {
    /// One, for every token.
    Dense {
        /// Width between its two projections.
        intermediate: u64,
    },
    /// Experts, a few for each token, and one that every token shares.
    Moe {
        /// How many there are.
        experts: u64,
        /// How many serve a token.
        per_token: u64,
        /// Width of each.
        intermediate: u64,
        /// Width of the shared one; 0 if there is none.
        shared: u64,
    },
}

/// One buffer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// What it holds.
    pub name: &'static str,
    /// Its size.
    pub bytes: Bytes,
    /// The operation that makes it.
    pub born: &'static str,
    /// The last one that reads it.
    pub last_reader: &'static str,
    /// The one at whose end Python's frames let go of it.
    pub frame: &'static str,
}

/// The buffers of a part of a layer and the operations that make and read them, both in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The operations; no name twice.
    pub ops: &'static [&'static str],
    /// The buffers, by birth.
    pub rows: Vec<Row>,
}

impl Table {
    /// Rows as `(name, factors of the size, born, last reader, frame)`; those of no bytes are left out.
    pub(crate) fn new<'a>(
        ops: &'static [&'static str],
        rows: impl IntoIterator<Item = (&'static str, &'a [u64], [&'static str; 3])>,
    ) -> Result<Self, Overflow> {
        let mut table = Self { ops, rows: Vec::new() };
        for (name, factors, [born, last_reader, frame]) in rows {
            let bytes = product(factors)?;
            if bytes > Bytes::ZERO {
                table.rows.push(Row { name, bytes, born, last_reader, frame });
            }
        }
        table.rows.sort_by_key(|row| ops.iter().position(|op| *op == row.born));
        Ok(table)
    }
}

/// The product, if it is a size.
pub(crate) fn product(factors: &[u64]) -> Result<Bytes, Overflow> {
    let product = factors.iter().try_fold(1_u64, |product, factor| product.checked_mul(*factor));
    product.and_then(Bytes::new).ok_or(Overflow)
}

impl Rank {
    /// Numbers that q, k and v of one token have together.
    pub const fn qkv(&self) -> u64 {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Numbers of one token's value, output or gate z.
    pub const fn values(&self) -> u64 {
        self.value_heads * self.value_dim
    }

    /// Bytes of the fp32 states of one sequence.
    pub const fn state(&self) -> u64 {
        self.value_heads * self.key_dim * self.value_dim * FP32
    }
}

/// A Gated DeltaNet layer as Terrace runs it over `tokens` of the prompt: q, k and v are read as views of the convolution's
/// output, the states are used in the pool they lie in, and the norm and its gate work in place.
///
/// # Errors
/// A size that is no size.
pub fn gdn_mixer(rank: &Rank, heads: Gdn, tokens: u64, window: Window) -> Result<Table, Overflow> {
    const OPS: &[&str] = &["norm", "in_proj", "in_proj_ba", "conv", "gating", "gdn", "gated_norm", "out_proj", "add"];
    let r = rank;
    let workspace = gdn_workspace(heads, window, Design::Fused).total().get();
    Table::new(
        OPS,
        [
            ("x", &[tokens, r.hidden, ACTIVATION][..], ["norm", "in_proj_ba", "in_proj_ba"]),
            // z is a view of it.
            ("qkvz", &[tokens, r.qkv() + r.values(), ACTIVATION], ["in_proj", "gated_norm", "gated_norm"]),
            ("ba", &[tokens, 2 * r.value_heads, ACTIVATION], ["in_proj_ba", "gating", "gating"]),
            ("conv_out", &[tokens, r.qkv(), ACTIVATION], ["conv", "gdn", "gdn"]),
            ("g", &[tokens, r.value_heads, FP32], ["gating", "gdn", "gdn"]),
            ("beta", &[tokens, r.value_heads, ACTIVATION], ["gating", "gdn", "gdn"]),
            ("gdn_workspace", &[workspace], ["gdn", "gdn", "gdn"]),
            ("o", &[tokens, r.values(), ACTIVATION], ["gdn", "out_proj", "out_proj"]),
            ("out", &[tokens, r.hidden, ACTIVATION], ["out_proj", "add", "add"]),
        ],
    )
}

/// The operation alone as Terrace runs it: its workspace.
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

/// Full attention over `tokens` of the prompt; `padded` is the length that the kernel pads its log-sum-exp to. Keys and values
/// go to the KV pool, which is not part of it.
///
/// # Errors
/// A size that is no size.
pub fn attention(rank: &Rank, tokens: u64, padded: u64) -> Result<Table, Overflow> {
    const OPS: &[&str] = &["norm", "qkv", "qk_norm", "attention", "gate", "o_proj", "add"];
    let r = rank;
    let query = r.heads * r.head_dim;
    let projected = query * (1 + u64::from(r.gated)) + 2 * r.kv_heads * r.head_dim;
    // The gate is a view of the projection, and so is v.
    let read_by = if r.gated { "gate" } else { "attention" };
    Table::new(
        OPS,
        [
            ("x", &[tokens, r.hidden, ACTIVATION][..], ["norm", "qkv", "o_proj"]),
            ("qkv", &[tokens, projected, ACTIVATION], ["qkv", read_by, "o_proj"]),
            ("q", &[tokens, query, ACTIVATION], ["qk_norm", "attention", "o_proj"]),
            ("k", &[tokens, r.kv_heads * r.head_dim, ACTIVATION], ["qk_norm", "attention", "o_proj"]),
            ("lse", &[padded, r.heads, FP32], ["attention", "attention", "attention"]),
            ("attention_out", &[tokens, query, ACTIVATION], ["attention", "o_proj", "o_proj"]),
            ("out", &[tokens, r.hidden, ACTIVATION], ["o_proj", "add", "add"]),
        ],
    )
}

/// The feed-forward over `tokens` of the prompt. Its last projection writes over its input, which nobody reads any more.
///
/// # Errors
/// A size that is no size.
pub fn mlp(rank: &Rank, tokens: u64) -> Result<Table, Overflow> {
    match rank.mlp {
        Mlp::Dense { intermediate } => Table::new(
            &["norm", "gate_up", "silu", "down", "add"],
            [
                ("x", &[tokens, rank.hidden, ACTIVATION][..], ["norm", "add", "add"]),
                ("gate_up", &[tokens, 2 * intermediate, ACTIVATION], ["gate_up", "silu", "down"]),
                ("silu", &[tokens, intermediate, ACTIVATION], ["silu", "down", "down"]),
            ],
        ),
        Mlp::Moe { experts, per_token, intermediate, shared } => {
            moe(rank.hidden, tokens, [experts, per_token, intermediate, shared])
        }
    }
}

/// Experts as a fused kernel runs them: rows sorted by expert, two grouped projections that share one buffer, and a sum.
fn moe(hidden: u64, tokens: u64, [experts, per_token, intermediate, shared]: [u64; 4]) -> Result<Table, Overflow> {
    const OPS: &[&str] = &[
        "norm",
        "shared_gate_up",
        "shared_silu",
        "shared_down",
        "router",
        "topk",
        "sort",
        "gate_up",
        "silu",
        "down",
        "sum",
        "add",
    ];
    /// Rows of a tile of the grouped projections, which each expert's rows are padded to.
    const TILE_ROWS: u64 = 64;
    let routed = tokens.checked_mul(per_token).ok_or(Overflow)?;
    let sorted = experts.checked_mul(TILE_ROWS - 1).and_then(|padding| padding.checked_add(routed)).ok_or(Overflow)?;
    Table::new(
        OPS,
        [
            ("x", &[tokens, hidden, ACTIVATION][..], ["norm", "add", "add"]),
            ("shared_gate_up", &[tokens, 2 * shared, ACTIVATION], ["shared_gate_up", "shared_silu", "shared_down"]),
            ("shared_silu", &[tokens, shared, ACTIVATION], ["shared_silu", "shared_down", "shared_down"]),
            ("shared_out", &[tokens, hidden * u64::from(shared > 0), ACTIVATION], ["shared_down", "sum", "sum"]),
            ("router_logits", &[tokens, experts, ACTIVATION], ["router", "topk", "sum"]),
            ("topk_weights", &[routed, FP32], ["topk", "sum", "sum"]),
            ("topk_ids", &[routed, 4], ["topk", "sort", "sum"]),
            ("sorted_ids", &[sorted, 4], ["sort", "down", "sum"]),
            ("experts", &[routed, hidden.max(2 * intermediate), ACTIVATION], ["gate_up", "sum", "sum"]),
            ("experts_silu", &[routed, intermediate, ACTIVATION], ["silu", "down", "sum"]),
        ],
    )
}

/// The most chunks that `tokens` in `sequences` can have: each but the last a token long.
pub fn most_chunks(tokens: u64, sequences: u64) -> u64 {
    let short = sequences.max(1).min(tokens.max(1)) - 1;
    short + (tokens - short.min(tokens)).div_ceil(CHUNK)
}

/// Whether the kernels of this workspace serve keys and values of such widths.
pub const fn served_widths(rank: &Rank) -> bool {
    rank.key_dim == HEAD_DIM && rank.value_dim == HEAD_DIM
}

#[cfg(test)]
mod tests {
    use super::*;

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
