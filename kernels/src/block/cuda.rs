//! The operations of a layer on CUDA: `block.cu` for what is read once and written once, cuBLASLt for the projections. Everything
//! is queued on the device's stream, and nothing waits.

use terrace_profiles::shape::layer::Mlp;
use terrace_profiles::shape::terrace::projected;

use super::lt::Projection;
use super::op::{Op, Places};
use crate::cuda::{CudaError, Device, Launches, Parameters};
use crate::error::Error;
use crate::source::Unit;
use crate::tile::{BLOCK_THREADS, Element, Entry};
use crate::view::Dtype;

/// `block::Params` in `block.cu`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct BlockParams {
    x: u64,
    y: u64,
    weight: u64,
    state_in: u64,
    state_out: u64,
    g: u64,
    beta: u64,
    decay: u64,
    dt_bias: u64,
    seed: u64,
    rows: i64,
    count: i64,
    x_stride: i64,
    y_stride: i64,
    width: i32,
    heads: i32,
    gates: i32,
    fresh: i32,
    eps: f32,
    scale: f32,
}

/// What the kernels' struct has to measure.
pub(crate) const BLOCK_BYTES: usize = size_of::<BlockParams>();
const _: () = assert!(BLOCK_BYTES == 136);

// SAFETY: `source` has the compiler hold its size against the kernels' own; a test below compares the fields.
unsafe impl Parameters for BlockParams {
    const UNIT: Unit = Unit::Block;
}

/// Tokens that a thread of the convolution walks along: `RUN` in `block.cu`.
pub(crate) const RUN: u64 = 16;
/// Elements that a thread of `block_fill` writes.
const FILLED: u64 = 4;
/// Elements that are read and written at a time.
const GROUP: u64 = 8;

/// One operation over a window.
///
/// # Safety
/// As [`super::Layer::prefill`].
pub(super) unsafe fn run(device: &Device, op: Op, at: &Places<'_>) -> Result<(), Error> {
    let geometry = &at.layer.geometry;
    let rank = &geometry.rank;
    let (tokens, hidden, values) = (at.piece.tokens, rank.hidden, rank.values());
    let columns = projected(rank);
    let element = kind(geometry.element);
    let wide = if let Mlp::Dense { intermediate } = rank.mlp { intermediate } else { 0 };
    let buffer = |name: &str| at.buffers.at(name).address;
    let signed = u64::cast_signed;
    // Widths are below 2^24 and heads below 2^10.
    let narrow = |number: u64| number as i32;
    let norm = |weight: &'static str| BlockParams {
        x: at.residual.address,
        y: buffer("x"),
        weight: at.weight(weight).address,
        x_stride: signed(hidden),
        y_stride: signed(hidden),
        width: narrow(hidden),
        eps: geometry.eps,
        ..BlockParams::default()
    };
    let project = |x, stride, inputs, weight: &'static str, y, outputs, add, workspace: &str| {
        let (weight, workspace) = (at.weight(weight).address, at.buffers.find(workspace));
        let few = at.piece.kernel.is_none();
        Projection { rows: tokens, inputs, outputs, x, x_stride: stride, weight, y, add, element, few, workspace }
    };
    let mut launches = device.begin(Unit::Block, element)?;
    let (entry, blocks, params) = match op {
        Op::InNorm => (Entry::BlockNorm, tokens, norm("in_norm")),
        Op::MlpNorm => (Entry::BlockNorm, tokens, norm("mlp_norm")),
        Op::Conv => {
            let [state_in, state_out] = at.conv_states().map(|span| span.address);
            let params = BlockParams {
                x: buffer("qkvzba"),
                y: buffer("conv_out"),
                weight: at.weight("conv").address,
                state_in,
                state_out,
                g: buffer("g"),
                beta: buffer("beta"),
                decay: at.weight("decay").address,
                dt_bias: at.weight("dt_bias").address,
                rows: signed(tokens),
                x_stride: signed(columns),
                y_stride: signed(rank.qkv()),
                width: narrow(rank.qkv()),
                heads: narrow(rank.value_heads),
                gates: narrow(rank.qkv() + values),
                fresh: i32::from(at.state.fresh),
                ..BlockParams::default()
            };
            let parts = (rank.qkv() / GROUP).div_ceil(BLOCK_THREADS.into());
            let gates = (tokens * rank.value_heads).div_ceil(BLOCK_THREADS.into());
            (Entry::BlockConv, tokens.div_ceil(RUN) * parts + gates, params)
        }
        Op::GatedNorm => {
            let params = BlockParams {
                x: buffer("qkvzba") + rank.qkv() * geometry.element.bytes(),
                y: buffer("o"),
                weight: at.weight("gated_norm").address,
                rows: signed(tokens),
                x_stride: signed(columns),
                y_stride: signed(values),
                heads: narrow(rank.value_heads),
                eps: geometry.eps,
                ..BlockParams::default()
            };
            (Entry::BlockGatedNorm, (tokens * rank.value_heads).div_ceil(u64::from(BLOCK_THREADS) / 32), params)
        }
        Op::Silu => {
            let params = BlockParams {
                y: buffer("gate_up"),
                rows: signed(tokens),
                y_stride: signed(2 * wide),
                width: narrow(wide),
                ..BlockParams::default()
            };
            (Entry::BlockSilu, (tokens * (wide / GROUP)).div_ceil(BLOCK_THREADS.into()), params)
        }
        Op::InProj | Op::OutProj | Op::GateUp | Op::Down => {
            let (x, residual) = (at.buffers.find("x").map_or(0, |span| span.address), at.residual.address);
            let projection = match op {
                Op::InProj => {
                    project(x, hidden, hidden, "in_proj", buffer("qkvzba"), columns, false, "in_proj_workspace")
                }
                Op::OutProj => {
                    project(buffer("o"), values, values, "out_proj", residual, hidden, true, "out_proj_workspace")
                }
                Op::GateUp => {
                    project(x, hidden, hidden, "gate_up", buffer("gate_up"), 2 * wide, false, "gate_up_workspace")
                }
                _ => project(buffer("gate_up"), 2 * wide, wide, "down", residual, hidden, true, "down_workspace"),
            };
            // SAFETY: the spans hold what `shape::terrace` says, by the caller's promise and the memory's; `launches` keeps the
            // context current.
            unsafe { device.projections()?.project(&projection, device.stream()) }?;
            return Ok(());
        }
        Op::Gdn => unreachable!("Gated DeltaNet is a call of its own"),
    };
    // SAFETY: as above.
    unsafe { launch(&mut launches, entry, blocks, &params) }
}

/// Queues [`super::weights::fill`].
///
/// # Safety
/// There are `count` elements at `address`, which nobody else uses until the work is done.
pub(super) unsafe fn fill(
    device: &Device,
    address: u64,
    element: Dtype,
    count: u64,
    seed: u64,
    scale: f32,
) -> Result<(), Error> {
    let params = BlockParams { y: address, seed, count: count.cast_signed(), scale, ..BlockParams::default() };
    let mut launches = device.begin(Unit::Block, kind(element))?;
    let blocks = count.div_ceil(FILLED * u64::from(BLOCK_THREADS));
    // SAFETY: the caller's promise.
    unsafe { launch(&mut launches, Entry::BlockFill, blocks, &params) }
}

/// # Safety
/// The addresses in `params` hold what the kernel reads and writes, until the stream has run it.
unsafe fn launch(launches: &mut Launches<'_>, entry: Entry, blocks: u64, params: &BlockParams) -> Result<(), Error> {
    let most = i32::MAX as u32;
    let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks <= most);
    let blocks = blocks.ok_or(CudaError::Driver {
        ordinal: 0,
        call: "cuLaunchKernel",
        reason: format!("a window needs more than the {most} blocks of one launch"),
    })?;
    // SAFETY: the caller's promise.
    unsafe { launches.launch(entry, blocks, params) }?;
    Ok(())
}

fn kind(element: Dtype) -> Element {
    // `Geometry` lets no fp32 reach CUDA.
    if element == Dtype::F16 { Element::Fp16 } else { Element::Bf16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_has_the_fields_of_the_kernels_in_their_order() {
        let text = include_str!("../../cuda/block.cu");
        let body = text.split_once("struct Params {").unwrap().1.split_once("};").unwrap().0;
        let theirs: Vec<(&str, bool)> = body
            .split(';')
            .map(str::trim)
            .filter(|field| !field.is_empty())
            .map(|field| {
                let (kind, name) = field.rsplit_once(' ').unwrap();
                (name, kind.ends_with('*') || ["u64", "i64"].contains(&kind))
            })
            .collect();
        let source = include_str!("cuda.rs");
        let body = source.split_once("struct BlockParams {").unwrap().1.split_once('}').unwrap().0;
        let ours: Vec<(&str, bool)> = body
            .split(',')
            .map(str::trim)
            .filter(|field| !field.is_empty())
            .map(|field| {
                let (name, kind) = field.split_once(": ").unwrap();
                (name, ["u64", "i64"].contains(&kind))
            })
            .collect();
        assert_eq!(ours, theirs);
        assert!(text.contains(&format!("constexpr int RUN = {RUN};")));
        assert!(text.contains(&format!("constexpr int THREADS = {BLOCK_THREADS};")));
    }
}
