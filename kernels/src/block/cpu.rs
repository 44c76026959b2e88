//! The operations of a layer on the host, in fp32.
//!
//! A row is computed by one task in an order of its own, and a projection by one kernel for any number of rows, so that windows
//! and threads change no bit. Spans become slices in this file alone.

use terrace_profiles::shape::HEAD_DIM;
use terrace_profiles::shape::layer::Mlp;
use terrace_profiles::shape::terrace::{CONV_TAPS, projected};
use terrace_profiles::units::DeviceSpan;

use super::op::{Op, Places};
use crate::cpu::each_task;

/// Rows of a task of everything but projections.
const ROWS: usize = 16;
/// Rows and columns of a task of a projection.
const TILE: usize = 256;
/// Above it `ln(1 + e^x)` is x in fp32.
const SOFTPLUS_LINEAR: f32 = 20.0;

/// One operation over a window.
///
/// # Safety
/// As [`super::Layer::prefill`].
pub(super) unsafe fn run(op: Op, at: &Places<'_>) {
    let geometry = &at.layer.geometry;
    let rank = &geometry.rank;
    let (tokens, hidden) = (at.piece.tokens as usize, rank.hidden as usize);
    let (qkv, values, columns) = (rank.qkv() as usize, rank.values() as usize, projected(rank) as usize);
    // SAFETY: weights, buffers and the residual stream are host memory of the sizes in `shape::terrace`, and no two overlap: the
    // caller's promise, and the memory's. No name is asked for twice below.
    let (weight, buffer) = unsafe {
        (
            |name| numbers(at.weight(name)) as &[f32],
            |name: &str, row: usize| &mut numbers(at.buffers.at(name))[..tokens * row],
        )
    };
    let wide = match rank.mlp {
        Mlp::Dense { intermediate } => intermediate as usize,
        Mlp::Moe { .. } => 0,
    };
    // SAFETY: as above.
    let residual = unsafe { &mut numbers(at.residual)[..tokens * hidden] };
    match op {
        Op::InNorm => norm(residual, weight("in_norm"), geometry.eps, buffer("x", hidden)),
        Op::MlpNorm => norm(residual, weight("mlp_norm"), geometry.eps, buffer("x", hidden)),
        Op::InProj => {
            let to = &mut Rows { width: columns, all: buffer("qkvzba", columns) };
            project(Matrix::dense(buffer("x", hidden), hidden), weight("in_proj"), to, false);
        }
        Op::Conv => conv(at, buffer("qkvzba", columns), buffer("conv_out", qkv), weight),
        Op::Gdn => unreachable!("Gated DeltaNet is a call of its own"),
        Op::GatedNorm => {
            let z = Matrix { width: values, stride: columns, all: &buffer("qkvzba", columns)[qkv..] };
            gated_norm(buffer("o", values), z, weight("gated_norm"), geometry.eps);
        }
        Op::OutProj => {
            let to = &mut Rows { width: hidden, all: residual };
            project(Matrix::dense(buffer("o", values), values), weight("out_proj"), to, true);
        }
        Op::GateUp => {
            let to = &mut Rows { width: 2 * wide, all: buffer("gate_up", 2 * wide) };
            project(Matrix::dense(buffer("x", hidden), hidden), weight("gate_up"), to, false);
        }
        Op::Silu => silu_mul(buffer("gate_up", 2 * wide), wide),
        Op::Down => {
            let from = Matrix { width: wide, stride: 2 * wide, all: buffer("gate_up", 2 * wide) };
            project(from, weight("down"), &mut Rows { width: hidden, all: residual }, true);
        }
    }
}

/// A span as numbers.
///
/// # Safety
/// It is host memory of this process, aligned for fp32, whose use obeys the rules of references for as long as the slice is used.
unsafe fn numbers<'a>(span: DeviceSpan) -> &'a mut [f32] {
    let address = std::ptr::with_exposed_provenance_mut::<f32>(span.address as usize);
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(address, span.bytes.get() as usize / 4) }
}

/// Rows of `width` numbers, `stride` apart, to read.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    width: usize,
    stride: usize,
    all: &'a [f32],
}

impl<'a> Matrix<'a> {
    fn dense(all: &'a [f32], width: usize) -> Self {
        Self { width, stride: width, all }
    }

    fn row(&self, row: usize) -> &'a [f32] {
        &self.all[row * self.stride..][..self.width]
    }
}

/// Rows of `width` numbers, one after the other, to write.
struct Rows<'a> {
    width: usize,
    all: &'a mut [f32],
}

/// `y = x / sqrt(mean x^2 + eps) weight`, row by row.
fn norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let width = weight.len();
    let tasks: Vec<_> = x.chunks(ROWS * width).zip(y.chunks_mut(ROWS * width)).collect();
    each_task(tasks, |(x, y)| {
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let scale = normal(x, eps);
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = x * scale * weight;
            }
        }
    });
}

/// `1 / sqrt(mean x^2 + eps)`. Eight sums side by side, so that it is compiled into vectors.
fn normal(x: &[f32], eps: f32) -> f32 {
    let mut sums = [0.0_f32; 8];
    for eight in x.chunks_exact(8) {
        for (sum, x) in sums.iter_mut().zip(eight) {
            *sum += x * x;
        }
    }
    let sum: f32 = sums.iter().sum();
    (sum / x.len() as f32 + eps).sqrt().recip()
}

/// `y = x w^T`, or `y += x w^T`; `w` is `[y.width, x.width]`.
fn project(x: Matrix<'_>, w: &[f32], y: &mut Rows<'_>, add: bool) {
    /// What each task writes is its own: a tile of y.
    #[derive(Clone, Copy)]
    struct Tile(*mut f32);
    // SAFETY: the tiles of the tasks do not overlap.
    unsafe impl Send for Tile {}

    let (inputs, outputs) = (x.width, y.width);
    let rows = y.all.len() / outputs;
    assert_eq!(w.len(), outputs * inputs, "a weight is as large as its projection");
    assert!(rows == 0 || x.all.len() >= (rows - 1) * x.stride + inputs, "a projection has its input");
    let base = y.all.as_mut_ptr();
    let mut tasks = Vec::new();
    for row in (0..rows).step_by(TILE) {
        for column in (0..outputs).step_by(TILE) {
            // SAFETY: the offset is of an element of y.
            tasks.push((row, column, Tile(unsafe { base.add(row * outputs + column) })));
        }
    }
    let stride = |stride: usize| isize::try_from(stride).expect("a stride is far below 2^63");
    each_task(tasks, |(row, column, tile)| {
        let Tile(to) = tile;
        let (rows, columns) = (TILE.min(rows - row), TILE.min(outputs - column));
        // SAFETY: the strides stay inside x, w and this task's tile of y, as asserted above; the kernel reads x and w alone, and
        // writes the tile alone. Where it does not add, it does not read y either.
        unsafe {
            matrixmultiply::sgemm(
                rows,
                inputs,
                columns,
                1.0,
                x.all.as_ptr().add(row * x.stride),
                stride(x.stride),
                1,
                w.as_ptr().add(column * inputs),
                1,
                stride(inputs),
                if add { 1.0 } else { 0.0 },
                to,
                stride(outputs),
                1,
            );
        }
    });
}

/// The convolution over time and its SiLU, the gates, and the inputs that the next window begins with.
fn conv<'w>(at: &Places<'_>, projected: &[f32], out: &mut [f32], weight: impl Fn(&'static str) -> &'w [f32]) {
    let rank = &at.layer.geometry.rank;
    let (qkv, heads, tokens) = (rank.qkv() as usize, rank.value_heads as usize, at.piece.tokens as usize);
    let stride = projected.len() / tokens;
    let input = Matrix { width: qkv, stride, all: projected };
    let taps = CONV_TAPS as usize;
    let [before, after] = at.conv_states();
    // SAFETY: both are parts of the state, whose use the caller of `Layer::prefill` promised; they do not overlap.
    let (before, after) = unsafe { (numbers(before) as &[f32], numbers(after)) };
    let zeros = vec![0.0; qkv];
    // The input at a token, counted so that the first `taps - 1` come from the window before.
    let row = |token: usize| match token.checked_sub(taps - 1) {
        Some(token) => input.row(token),
        None if at.state.fresh => &zeros[..],
        None => &before[token * qkv..][..qkv],
    };
    let kernel = weight("conv");
    let tasks: Vec<_> = out.chunks_mut(ROWS * qkv).enumerate().collect();
    each_task(tasks, |(task, out)| {
        for (token, out) in (task * ROWS..).zip(out.chunks_exact_mut(qkv)) {
            out.fill(0.0);
            for tap in 0..taps {
                let weights = &kernel[tap * qkv..][..qkv];
                for ((out, x), weight) in out.iter_mut().zip(row(token + tap)).zip(weights) {
                    *out += x * weight;
                }
            }
            out.iter_mut().for_each(|x| *x = silu(*x));
        }
    });
    for (place, after) in after.chunks_exact_mut(qkv).enumerate() {
        after.copy_from_slice(row(tokens + place));
    }
    let (decay, dt_bias) = (weight("decay"), weight("dt_bias"));
    // SAFETY: as in `run`; nobody else asks for these two here.
    let (g, beta) = unsafe { (numbers(at.buffers.at("g")), numbers(at.buffers.at("beta"))) };
    let first = (rank.qkv() + rank.values()) as usize;
    for token in 0..tokens {
        let (b, a) = projected[token * stride + first..][..2 * heads].split_at(heads);
        for head in 0..heads {
            g[token * heads + head] = decay[head] * softplus(a[head] + dt_bias[head]);
            beta[token * heads + head] = sigmoid(b[head]);
        }
    }
}

/// `o <- o / sqrt(mean o^2 + eps) weight silu(z)`, head by head.
fn gated_norm(o: &mut [f32], z: Matrix<'_>, weight: &[f32], eps: f32) {
    let tasks: Vec<_> = o.chunks_mut(ROWS * z.width).enumerate().collect();
    each_task(tasks, |(task, o)| {
        for (token, o) in (task * ROWS..).zip(o.chunks_exact_mut(z.width)) {
            let heads = o.chunks_exact_mut(HEAD_DIM as usize).zip(z.row(token).chunks_exact(HEAD_DIM as usize));
            for (o, z) in heads {
                let scale = normal(o, eps);
                for ((o, z), weight) in o.iter_mut().zip(z).zip(weight) {
                    *o = *o * scale * weight * silu(*z);
                }
            }
        }
    });
}

/// `gate <- silu(gate) up`, where a row is gate and up side by side.
fn silu_mul(gate_up: &mut [f32], wide: usize) {
    let tasks: Vec<_> = gate_up.chunks_mut(ROWS * 2 * wide).collect();
    each_task(tasks, |rows| {
        for row in rows.chunks_exact_mut(2 * wide) {
            let (gate, up) = row.split_at_mut(wide);
            for (gate, up) in gate.iter_mut().zip(up) {
                *gate = silu(*gate) * *up;
            }
        }
    });
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

fn softplus(x: f32) -> f32 {
    if x > SOFTPLUS_LINEAR { x } else { x.exp().ln_1p() }
}
