//! The one error of this crate. Each prints as one sentence that names the argument, what was expected and what was given.
//! Whatever is refused here was refused before anything was written.

use terrace_profiles::shape::ShapeError;
use terrace_profiles::units::Bytes;

use crate::view::{Dtype, Place};

/// Why a call was not served.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Heads or a window that are not served.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A dimension differs from what the other arguments say.
    #[error("{name} has {given} {}; expected {expected}", counted(what, *given))]
    Dimension {
        /// The argument.
        name: &'static str,
        /// Of what: tokens, heads, elements per head, slots.
        what: &'static str,
        /// What would have been right.
        expected: u64,
        /// What came.
        given: u64,
    },
    /// More than a kernel counts to.
    #[error("there are {given} {name}; at most {most} are served")]
    TooMany {
        /// What there are too many of.
        name: &'static str,
        /// The most.
        most: u64,
        /// What came.
        given: u64,
    },
    /// Only a head size of 128 is served.
    #[error("{name} has {given} elements per head; only 128 are served")]
    HeadDim {
        /// The argument.
        name: &'static str,
        /// What came.
        given: u64,
    },
    /// An element type that this argument does not take.
    #[error("{name} is {given}; expected {expected}")]
    Dtype {
        /// The argument.
        name: &'static str,
        /// What is taken.
        expected: &'static str,
        /// What came.
        given: Dtype,
    },
    /// Strides that reach beyond memory, or with which rows that are written would share elements.
    #[error(
        "{name} has strides of {row} and {head} elements, with which {what}; expected at least {min_row} and {min_head}"
    )]
    Strides {
        /// The argument.
        name: &'static str,
        /// From a token or slot to the next.
        row: u64,
        /// From a head to the next.
        head: u64,
        /// What goes wrong.
        what: &'static str,
        /// The contiguous row stride.
        min_row: u64,
        /// The contiguous head stride.
        min_head: u64,
    },
    /// A slice ends before its last row.
    #[error("{name} is a slice of {given} elements; its shape and strides need {expected}")]
    TooShort {
        /// The argument.
        name: &'static str,
        /// Elements up to the end of the last row.
        expected: u64,
        /// Elements of the slice.
        given: u64,
    },
    /// A null pointer where there are elements.
    #[error("{name} is a null pointer; expected the address of its first element")]
    Null {
        /// The argument.
        name: &'static str,
    },
    /// An address or stride that the device cannot load from.
    #[error("{name} has {what} {given}; expected a multiple of {align} bytes")]
    Misaligned {
        /// The argument.
        name: &'static str,
        /// Address, token stride, head stride or slot stride, in bytes.
        what: &'static str,
        /// The alignment.
        align: u64,
        /// The number, in bytes.
        given: u64,
    },
    /// Memory that the device cannot reach.
    #[error("{name} is in {given} memory; this device needs {expected} memory")]
    Place {
        /// The argument.
        name: &'static str,
        /// Where it should be.
        expected: Place,
        /// Where it is.
        given: Place,
    },
    /// Something that is written lies over something else.
    #[error("{written} and {other} overlap; expected memory of its own for {written}{}", hint(written, other))]
    Overlap {
        /// The argument that is written.
        written: &'static str,
        /// The other.
        other: &'static str,
    },
    /// Too small a workspace.
    #[error("the workspace has {} bytes; expected at least {}", given.get(), expected.get())]
    Workspace {
        /// What the shape and the window need.
        expected: Bytes,
        /// What came.
        given: Bytes,
    },
    /// Not even the smallest window fits.
    #[error(
        "a workspace of {} bytes holds no window; the smallest, of 64 tokens, needs {}", budget.get(), smallest.get()
    )]
    Budget {
        /// What there is.
        budget: Bytes,
        /// What a window of 64 tokens needs.
        smallest: Bytes,
    },
    /// A list whose length another argument gives.
    #[error("{name} has {given} {}; expected {expected}", if *given == 1 { "entry" } else { "entries" })]
    Length {
        /// The argument.
        name: &'static str,
        /// Entries that it should have.
        expected: u64,
        /// Entries that it has.
        given: u64,
    },
    /// `cu_seqlens` without its first entry.
    #[error("cu_seqlens is empty; expected one entry more than there are sequences, the first 0")]
    NoBounds,
    /// `cu_seqlens` that does not begin at the first token.
    #[error("cu_seqlens[0] is {given}; expected 0")]
    FirstBound {
        /// What came.
        given: i64,
    },
    /// `cu_seqlens` that goes back.
    #[error("cu_seqlens[{row}] is {given}, below cu_seqlens[{}], which is {before}; expected no decrease", row - 1)]
    Decreasing {
        /// The first entry that goes back.
        row: usize,
        /// The entry before it.
        before: i64,
        /// The entry.
        given: i64,
    },
    /// `cu_seqlens` that ends after the last token.
    #[error("cu_seqlens[{row}] is {given}; expected at most {tokens}, the tokens of q")]
    PastEnd {
        /// The first entry beyond.
        row: usize,
        /// Tokens there are.
        tokens: u64,
        /// The entry.
        given: i64,
    },
    /// `chunk_indices` that are not those of `cu_seqlens`.
    #[error("chunk_indices[{row}] is {given:?}; expected {expected:?} from cu_seqlens (sequence, chunk inside it)")]
    ChunkIndices {
        /// The first row that differs.
        row: u64,
        /// What `cu_seqlens` gives.
        expected: [i64; 2],
        /// What came.
        given: [i64; 2],
    },
    /// `chunk_offsets` that are not those of `cu_seqlens`.
    #[error("chunk_offsets[{row}] is {given}; expected {expected} from cu_seqlens (chunks of the sequences before it)")]
    ChunkOffsets {
        /// The first row that differs.
        row: u64,
        /// What `cu_seqlens` gives.
        expected: i64,
        /// What came.
        given: i64,
    },
    /// A slot that the pool does not have.
    #[error("{name}[{sequence}] is {given}; expected a slot from 0 to below {slots}")]
    Slot {
        /// The argument.
        name: &'static str,
        /// The sequence.
        sequence: usize,
        /// Slots of the pool.
        slots: u64,
        /// What came.
        given: i64,
    },
    /// Two sequences would write one slot.
    #[error("{name}[{second}] is {slot}, as is {name}[{first}]; expected a slot of its own for each final state")]
    SlotTwice {
        /// The argument.
        name: &'static str,
        /// The first sequence with the slot.
        first: usize,
        /// The second.
        second: usize,
        /// The slot.
        slot: i32,
    },
    /// A scale that makes every output infinite or undefined.
    #[error("scale is {given}; expected a finite number")]
    Scale {
        /// What came.
        given: f32,
    },
    /// A checkpoint interval of nothing.
    #[error("checkpoints every 0 chunks are not served; expected at least 1")]
    NoInterval,
    /// Too many tokens of one sequence for a decode step.
    #[error("sequence {sequence} has {given} tokens; a decode step takes at most {most}, more are a prefill")]
    DecodeLength {
        /// The sequence.
        sequence: usize,
        /// The most.
        most: u64,
        /// What came.
        given: u64,
    },
    /// A layer that was not loaded or did not run.
    #[error(transparent)]
    Block(#[from] crate::block::BlockError),
    /// The device, its driver or the compiler; the message says which, and what to do.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
}

/// Heads, or one head.
fn counted(what: &'static str, count: u64) -> &'static str {
    if count == 1 { what.strip_suffix('s').unwrap_or(what) } else { what }
}

/// What to do instead, where there is something.
fn hint(written: &str, other: &str) -> &'static str {
    match (written, other) {
        ("last", "initial") | ("initial", "last") => ", or States::InPlace for one pool",
        _ => "",
    }
}
