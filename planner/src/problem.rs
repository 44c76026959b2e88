//! What must be placed, as plain data: a dynamic-storage-allocation instance and an answer to it.
//!
//! ```text
//!   offset
//!     ^      +-----+            size: height        lifetime: width, half-open
//!     |      |  b  |  +---+     A placement moves rectangles up and down, never sideways; no two may share a point.
//!     |  +---+-----+  | c |
//!     |  |    a    |  +---+
//!     +--+---------+--+---+----> tick
//! ```

use std::ops::Range;

use serde::{Deserialize, Serialize};
use terrace_profiles::units::{Align, Bytes, Lifetime, Offset};

use crate::error::Error;

/// One thing to place: the bytes of a buffer, or of several that share them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// Bytes it takes, already rounded up to the alignment.
    pub size: Bytes,
    /// Its offset is a multiple of this.
    pub align: Align,
    /// From its birth to its death.
    pub lifetime: Lifetime,
    /// Its offset, where that is given.
    pub fixed: Option<Offset>,
    /// Buffers of different lanes never share a byte, whatever their lifetimes.
    pub lane: u32,
    /// Where the life has gaps or uses only part of the bytes: what is in use when. Empty: all bytes, all the time.
    pub pieces: Box<[Piece]>,
}

/// A stretch of a life in which the bytes `[from, to)` of a buffer are in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// When.
    pub lifetime: Lifetime,
    /// First byte in use, from the buffer's offset.
    pub from: Bytes,
    /// First byte after it.
    pub to: Bytes,
}

/// A dynamic-storage-allocation instance: give each buffer an offset so that no byte is used twice at one tick and the
/// [`Makespan`](Placement::makespan) is small.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// What to place.
    pub buffers: Vec<Buffer>,
    /// Pairs (by index) that never share a byte although their lifetimes would allow it.
    pub apart: Vec<(u32, u32)>,
    /// Bytes that no buffer may take at any time, and borders that none may cross.
    pub reserved: Vec<Reserved>,
}

/// Bytes `[from, to)` of the arena that belong to someone else. Without any, where `from` is `to`, it is a border: a buffer
/// may end or begin there but not reach over it, as between two segments of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Reserved {
    /// First byte.
    pub from: Offset,
    /// First byte after it.
    pub to: Offset,
}

/// An answer: an offset for each buffer of a [`Problem`], in the same order. Worth nothing until
/// [`check`](crate::check::check) has seen it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Offset of each buffer.
    pub offsets: Vec<Offset>,
}

impl Buffer {
    /// A buffer with nothing but size, alignment and life.
    pub fn new(size: Bytes, align: Align, lifetime: Lifetime) -> Self {
        Self { size, align, lifetime, fixed: None, lane: 0, pieces: Box::default() }
    }

    /// Whether the buffer, at that offset, takes a reserved byte or crosses a border.
    pub fn runs_into(&self, offset: Offset, reserved: &Reserved) -> bool {
        offset < reserved.to && reserved.from.get() < offset.get() + self.size.get()
    }

    /// What is in use when: the pieces, or the whole.
    pub fn in_use(&self) -> impl Iterator<Item = (Lifetime, Range<u64>)> + '_ {
        let whole = self.pieces.is_empty().then_some((self.lifetime, 0..self.size.get()));
        whole.into_iter().chain(self.pieces.iter().map(|piece| (piece.lifetime, piece.from.get()..piece.to.get())))
    }
}

impl Problem {
    /// Refuses what no solver can represent: sums beyond 2^63 - 1, pairs that name no buffer, lanes with more than one set
    /// of fixed offsets, fixed offsets that are not aligned.
    pub fn validate(&self) -> Result<(), Error> {
        let mut sum = Bytes::ZERO;
        let mut highest_fixed = Bytes::ZERO;
        for (index, buffer) in self.buffers.iter().enumerate() {
            // The alignment is added too, so that no offset a solver can reach overflows.
            let slack = Bytes::new(buffer.align.get()).expect("an alignment is at most 2^40");
            sum = sum
                .checked_add(buffer.size)
                .and_then(|sum| sum.checked_add(slack))
                .map_err(|_| Error::TotalTooLarge { buffer: index })?;
            if let Some(offset) = buffer.fixed {
                if !offset.is_aligned(buffer.align) {
                    return Err(Error::FixedNotAligned { buffer: index, offset, align: buffer.align });
                }
                highest_fixed = highest_fixed.max(Bytes::new(offset.get()).expect("an offset is at most 2^63 - 1"));
            }
            for (life, range) in buffer.in_use() {
                let inside = buffer.lifetime.start <= life.start && life.end <= buffer.lifetime.end;
                assert!(inside, "a piece of buffer {index} lies outside its life");
                assert!(range.end <= buffer.size.get(), "a piece of buffer {index} lies outside its bytes");
            }
        }
        for reserved in &self.reserved {
            highest_fixed = highest_fixed.max(Bytes::new(reserved.to.get()).expect("an offset is at most 2^63 - 1"));
            let inside = |(_, buffer): &(usize, &Buffer)| buffer.fixed.is_some_and(|at| buffer.runs_into(at, reserved));
            if let Some((buffer, _)) = self.buffers.iter().enumerate().find(inside) {
                return Err(Error::FixedInReserved { buffer, from: reserved.from, to: reserved.to });
            }
        }
        // All the rest may have to lie above the highest fixed buffer, and below each border leave free what crosses it.
        let count = self.buffers.len();
        let rest = if self.reserved.is_empty() { Ok(sum) } else { sum.checked_add(sum) };
        rest.and_then(|rest| rest.checked_add(highest_fixed))
            .map_err(|_| Error::TotalTooLarge { buffer: count.saturating_sub(1) })?;
        if let Some(&(a, b)) = self.apart.iter().find(|(a, b)| *a as usize >= count || *b as usize >= count || a == b) {
            return Err(Error::BadPair { a, b, buffers: count });
        }
        let mut pinned_lanes = self.buffers.iter().filter(|buffer| buffer.fixed.is_some()).map(|buffer| buffer.lane);
        if let Some(first) = pinned_lanes.next()
            && let Some(second) = pinned_lanes.find(|lane| *lane != first)
        {
            return Err(Error::FixedInTwoLanes { first, second });
        }
        Ok(())
    }

    /// The sum of all sizes. [`Problem::validate`] has shown that it does not overflow.
    pub fn total(&self) -> Bytes {
        let sum = self.buffers.iter().map(|buffer| buffer.size.get()).sum();
        Bytes::new(sum).expect("validate() bounds the sum")
    }
}

impl Placement {
    /// `max(offset + size)` over the buffers: the bytes the arena needs.
    pub fn makespan(&self, problem: &Problem) -> Bytes {
        let top = |(buffer, offset): (&Buffer, &Offset)| offset.get() + buffer.size.get();
        let tops = problem.buffers.iter().zip(&self.offsets).map(top);
        Bytes::new(tops.max().unwrap_or(0)).expect("validate() bounds every top")
    }
}
