//! The one error of this crate. Each prints as one sentence that names the culprit and what to do.

use terrace_profiles::units::{Align, Bytes, Offset};

use crate::check::Violation;

/// What can go wrong between a profile and a checked plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The profile could not be read or contradicts itself.
    #[error(transparent)]
    Profile(#[from] terrace_profiles::Error),
    /// The sizes cannot be added up.
    #[error("the sizes up to buffer {buffer}, rounded up, add up to more than 2^63 - 1 bytes")]
    TotalTooLarge {
        /// The buffer at which the sum passed the limit.
        buffer: usize,
    },
    /// A fixed offset breaks its own alignment.
    #[error(
        "buffer {buffer} is fixed at offset {offset}, which is not a multiple of its alignment {align}; pass a smaller --align"
    )]
    FixedNotAligned {
        /// The buffer.
        buffer: usize,
        /// Where it is fixed.
        offset: Offset,
        /// Its alignment.
        align: Align,
    },
    /// Two fixed buffers want the same bytes at the same time.
    #[error("buffers {first} and {second} are fixed at offsets where both use the same bytes at tick {tick}")]
    FixedOverlap {
        /// One buffer.
        first: usize,
        /// The other.
        second: usize,
        /// A tick at which both are in use.
        tick: u64,
    },
    /// A fixed buffer lies where nothing may.
    #[error("buffer {buffer} is fixed where bytes {from} to {to} are reserved; reserve others, or move the buffer")]
    FixedInReserved {
        /// The buffer.
        buffer: usize,
        /// First reserved byte.
        from: Offset,
        /// First byte after it; the same for a border between segments.
        to: Offset,
    },
    /// A buffer fits into no segment.
    #[error("buffer {buffer} takes {size}, rounded up, more than the largest segment of {segment}; raise --segment")]
    LargerThanSegment {
        /// The buffer.
        buffer: usize,
        /// Its bytes.
        size: Bytes,
        /// The largest segment.
        segment: Bytes,
    },
    /// A space or segment ends where a buffer's own alignment breaks.
    #[error(
        "buffer {buffer} is aligned to {align}, but a space or segment ends at byte {border}; make each a multiple of {align}"
    )]
    BorderNotAligned {
        /// The buffer.
        buffer: usize,
        /// Its alignment.
        align: Align,
        /// Where the space or segment ends in the arena.
        border: Offset,
    },
    /// Segments so small that an arena would be cut too often.
    #[error("segments of {segment} cut the arena more than {limit} times; raise --segment")]
    TooManySegments {
        /// The largest segment.
        segment: Bytes,
        /// The most cuts.
        limit: u64,
    },
    /// Lanes are stacked on each other; only one can have offsets given from outside.
    #[error(
        "lanes {first} and {second} both hold buffers with fixed offsets; only one lane may, or share the lanes with --lanes shared"
    )]
    FixedInTwoLanes {
        /// One lane.
        first: u32,
        /// The other.
        second: u32,
    },
    /// A keep-apart pair names no buffer.
    #[error("the pair ({a}, {b}) to keep apart does not name two of the {buffers} buffers")]
    BadPair {
        /// One index.
        a: u32,
        /// The other.
        b: u32,
        /// How many buffers there are.
        buffers: usize,
    },
    /// Too many cross-lane pairs to list.
    #[error(
        "ordering the lanes by their waits needs more than {limit} pairs of buffers kept apart; use --lanes separate"
    )]
    TooManyPairs {
        /// The most pairs kept.
        limit: usize,
    },
    /// The independent check refused a placement.
    #[error("the plan is not valid: {0}")]
    Check(#[from] Violation),
    /// A plan file contradicts itself.
    #[error("{name}: {reason}")]
    BadPlan {
        /// The file.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Two aliases of one storage are fixed at different offsets.
    #[error("buffers {first} and {second} are aliases but are fixed at different offsets")]
    AliasFixedTwice {
        /// One buffer.
        first: u32,
        /// The other.
        second: u32,
    },
    /// The interference of so many buffers cannot be drawn.
    #[error(
        "an interference graph of {buffers} buffers cannot be drawn; dot draws up to {limit}, html and svg draw any plan"
    )]
    TooLargeToDraw {
        /// How many storages.
        buffers: usize,
        /// The most drawn.
        limit: usize,
    },
    /// A buffer's label says no tensor.
    #[error(
        "label '{label}' does not end in the number of a tensor, which the tflite format needs; label each buffer so"
    )]
    NamesNoTensor {
        /// The label.
        label: String,
    },
    /// Two buffers claim one tensor.
    #[error("two buffers at different offsets are named tensor {tensor}; give each tensor one buffer")]
    TensorTwice {
        /// The tensor.
        tensor: u32,
    },
    /// An offset that the tflite format cannot hold.
    #[error(
        "'{label}' lies at offset {offset}, and offsets of TensorFlow Lite Micro end at 2147483647; plan a smaller arena"
    )]
    BeyondTflite {
        /// The buffer's label.
        label: String,
        /// Where it lies.
        offset: Offset,
    },
}
