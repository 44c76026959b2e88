//! The checks themselves: each a rule, an argument's name, and an error that says both.

use std::collections::HashMap;

use terrace_profiles::shape::{Gdn, HEAD_DIM, ShapeError, WORKSPACE_ALIGN};
use terrace_profiles::units::Bytes;

use crate::error::Error;
use crate::metadata::{Bounds, expect_length};
use crate::view::{Dtype, Grid, Place, PoolMut, Tensor, TensorMut, Workspace};
use crate::window::Ends;

/// What kind of device a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Cpu,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Cuda,
}

impl Target {
    fn place(self) -> Place {
        match self {
            Self::Cpu => Place::Host,
            Self::Cuda => Place::Device,
        }
    }

    /// Bytes that rows begin at a multiple of.
    fn align(self, dtype: Dtype) -> u64 {
        match self {
            Self::Cpu => dtype.bytes(),
            Self::Cuda => 16,
        }
    }
}

/// Element types of a pool.
pub(super) const STATE_TYPES: &str = "fp32 or bf16";

pub(super) fn grid<'a>(pool: &'a Option<PoolMut<'_>>) -> Option<&'a Grid> {
    pool.as_ref().map(|pool| &pool.grid)
}

pub(super) fn heads(q: &Tensor<'_>, v: &Tensor<'_>) -> Result<Gdn, Error> {
    let (key_heads, value_heads) = (q.heads(), v.heads());
    let narrow = |heads| u32::try_from(heads).unwrap_or(u32::MAX);
    let shape = Gdn::new(narrow(key_heads), narrow(value_heads));
    // A number beyond 32 bits would be named wrongly.
    shape.map_err(|_| ShapeError::Heads { key_heads, value_heads }.into())
}

/// Kernels count these in 32 bits.
pub(super) fn most(name: &'static str, given: u64) -> Result<(), Error> {
    let most = i32::MAX as u64;
    if given > most { Err(Error::TooMany { name, most, given }) } else { Ok(()) }
}

pub(super) fn check_scale(scale: Option<f32>) -> Result<f32, Error> {
    let scale = scale.unwrap_or_else(|| (HEAD_DIM as f32).sqrt().recip());
    if scale.is_finite() { Ok(scale) } else { Err(Error::Scale { given: scale }) }
}

pub(super) fn check_tensors(
    target: Target,
    shape: Gdn,
    inputs: [&Tensor<'_>; 5],
    o: &TensorMut<'_>,
) -> Result<(), Error> {
    let [q, k, v, g, beta] = inputs.map(|view| &view.grid);
    let (keys, values) = (u64::from(shape.key_heads()), u64::from(shape.value_heads()));
    let tokens = q.rows;
    let rows = [("q", q, keys), ("k", k, keys), ("v", v, values), ("o", &o.grid, values)];
    for (name, grid, heads) in rows {
        if grid.width != HEAD_DIM {
            return Err(Error::HeadDim { name, given: grid.width });
        }
        dimensions(name, grid, tokens, heads)?;
    }
    for (name, grid) in [("g", g), ("beta", beta)] {
        dimensions(name, grid, tokens, values)?;
        dimension(name, "elements per head", 1, grid.width)?;
    }
    let dtype = q.dtype();
    let (types, same, or_same) = match (target, dtype) {
        (Target::Cuda, _) => ("bf16 or fp16", "the type of q", "fp32 or the type of q"),
        (Target::Cpu, _) => ("bf16, fp16 or fp32", "the type of q", "fp32 or the type of q"),
    };
    if target == Target::Cuda && dtype == Dtype::F32 {
        return Err(Error::Dtype { name: "q", expected: types, given: dtype });
    }
    for (name, grid) in [("k", k), ("v", v), ("o", &o.grid)] {
        if grid.dtype() != dtype {
            return Err(Error::Dtype { name, expected: same, given: grid.dtype() });
        }
    }
    for (name, grid) in [("g", g), ("beta", beta)] {
        if grid.dtype() != dtype && grid.dtype() != Dtype::F32 {
            return Err(Error::Dtype { name, expected: or_same, given: grid.dtype() });
        }
    }
    for (name, grid, _) in rows {
        check_grid(target, name, grid, target.align(dtype))?;
    }
    for (name, grid) in [("g", g), ("beta", beta)] {
        check_grid(target, name, grid, grid.dtype().bytes())?;
    }
    check_written("o", &o.grid)
}

pub(super) fn check_pool(
    target: Target,
    name: &'static str,
    shape: Gdn,
    grid: &Grid,
    expected: &'static str,
) -> Result<(), Error> {
    dimension(name, "value heads", u64::from(shape.value_heads()), grid.heads)?;
    let is_taken = grid.dtype() == Dtype::F32 || (expected == STATE_TYPES && grid.dtype() == Dtype::Bf16);
    if !is_taken {
        return Err(Error::Dtype { name, expected, given: grid.dtype() });
    }
    most("slots", grid.rows)?;
    check_grid(target, name, grid, target.align(grid.dtype()))
}

fn dimensions(name: &'static str, grid: &Grid, tokens: u64, heads: u64) -> Result<(), Error> {
    dimension(name, "tokens", tokens, grid.rows)?;
    dimension(name, "heads", heads, grid.heads)
}

fn dimension(name: &'static str, what: &'static str, expected: u64, given: u64) -> Result<(), Error> {
    if expected == given { Ok(()) } else { Err(Error::Dimension { name, what, expected, given }) }
}

pub(super) fn check_place(target: Target, name: &'static str, given: Place) -> Result<(), Error> {
    let expected = target.place();
    if expected == given { Ok(()) } else { Err(Error::Place { name, expected, given }) }
}

/// Whether every row is where a load can reach it.
fn check_grid(target: Target, name: &'static str, grid: &Grid, align: u64) -> Result<(), Error> {
    check_place(target, name, grid.place())?;
    if grid.is_empty() {
        return Ok(());
    }
    if grid.address() == 0 {
        return Err(Error::Null { name });
    }
    let size = grid.dtype().bytes();
    let strides = |what| Error::Strides {
        name,
        row: grid.row_stride,
        head: grid.head_stride,
        what,
        min_row: grid.heads.saturating_mul(grid.width),
        min_head: grid.width,
    };
    let expected = grid.extent().ok_or_else(|| strides("it ends beyond 2^63 bytes"))?;
    let places = [
        ("address", grid.address(), true),
        ("a row stride of", grid.row_stride.saturating_mul(size), grid.rows > 1),
        ("a head stride of", grid.head_stride.saturating_mul(size), grid.heads > 1),
    ];
    for (what, given, matters) in places {
        if matters && !given.is_multiple_of(align) {
            return Err(Error::Misaligned { name, what, align, given });
        }
    }
    match grid.len() {
        Some(given) if given < expected => Err(Error::TooShort { name, expected, given }),
        _ => Ok(()),
    }
}

pub(super) fn check_written(name: &'static str, grid: &Grid) -> Result<(), Error> {
    if grid.is_injective() {
        return Ok(());
    }
    let (row, head) = (grid.row_stride, grid.head_stride);
    let (min_row, min_head) = (grid.heads.saturating_mul(grid.width), grid.width);
    Err(Error::Strides { name, row, head, what: "its rows would share elements", min_row, min_head })
}

/// Whether each sequence that uses its slot has one, and one of its own where they are written.
pub(super) fn check_slots(
    name: &'static str,
    slots: Option<&[i32]>,
    used: Option<&[bool]>,
    sequences: usize,
    pool: u64,
    written: bool,
) -> Result<(), Error> {
    let Some(slots) = slots else {
        return if sequences as u64 <= pool {
            Ok(())
        } else {
            Err(Error::Slot { name, sequence: pool as usize, slots: pool, given: pool as i64 })
        };
    };
    expect_length(name, sequences as u64, slots.len())?;
    let mut seen = HashMap::with_capacity(if written { slots.len() } else { 0 });
    for (sequence, &slot) in slots.iter().enumerate() {
        if used.is_some_and(|used| !used[sequence]) {
            continue;
        }
        if u64::try_from(slot).map_or(true, |slot| slot >= pool) {
            return Err(Error::Slot { name, sequence, slots: pool, given: slot.into() });
        }
        if written && let Some(first) = seen.insert(slot, sequence) {
            return Err(Error::SlotTwice { name, first, second: sequence, slot });
        }
    }
    Ok(())
}

pub(super) fn checkpoint_rows(bounds: &Bounds<'_>, ends: &Ends<'_>) -> u64 {
    (0..bounds.len()).map(|sequence| ends.checkpoints(bounds.length(sequence)).cast_unsigned()).sum()
}

pub(super) fn check_workspace(target: Target, workspace: &Workspace<'_>, expected: Bytes) -> Result<(), Error> {
    check_place(target, "the workspace", workspace.place())?;
    let span = workspace.span();
    if span.bytes < expected {
        return Err(Error::Workspace { expected, given: span.bytes });
    }
    if span.address == 0 {
        return Err(Error::Null { name: "the workspace" });
    }
    let align = WORKSPACE_ALIGN;
    if !span.address.is_multiple_of(align) {
        return Err(Error::Misaligned { name: "the workspace", what: "address", align, given: span.address });
    }
    Ok(())
}

type Named<'a> = (&'static str, Option<&'a Grid>);

/// Whether what is written lies apart from everything else.
pub(super) fn check_overlap(
    written: &[Named<'_>],
    read: &[Named<'_>],
    workspace: Option<&Workspace<'_>>,
) -> Result<(), Error> {
    for (index, (name, grid)) in written.iter().enumerate() {
        let Some(grid) = grid else { continue };
        for (other, theirs) in read.iter().chain(&written[..index]) {
            if theirs.is_some_and(|theirs| grid.may_overlap(theirs)) {
                return Err(Error::Overlap { written: name, other });
            }
        }
    }
    let Some(workspace) = workspace else { return Ok(()) };
    let span = workspace.span();
    let (start, end) = (span.address, span.address.saturating_add(span.bytes.get()));
    for (other, grid) in written.iter().chain(read) {
        let Some(grid) = grid.filter(|grid| !grid.is_empty()) else { continue };
        let (first, last) = grid.byte_range();
        if first < end && start < last {
            return Err(Error::Overlap { written: "the workspace", other });
        }
    }
    Ok(())
}
