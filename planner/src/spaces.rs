//! Several memories as one arena: where each begins, and what none of its buffers may cross.
//!
//! ```text
//!   |  fast: 256 KiB  | slow: 2 MiB in segments of at most 1 MiB  |     Spaces lie one after the other, and each ends in a
//!   |                 |                   |                       |     border (see Reserved). So whatever places buffers
//!   0              262144              1310720                 2359296  low fills the first spaces first, a capacity is
//!                                                                      their sum, and every proof holds for all of them.
//! ```
//!
//! Sizes are rounded up to the alignment and offsets are multiples of it, so of each space and segment only whole multiples
//! count.

use serde::{Deserialize, Serialize};
use terrace_profiles::units::{Align, Bytes, Offset};

use crate::error::Error;
use crate::problem::{Buffer, Reserved};

/// One memory that buffers can lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// Its bytes.
    pub capacity: Bytes,
    /// The largest piece that can be had of it at once; `None` for all.
    pub segment: Option<Bytes>,
}

/// Cuts of one arena, at most.
pub(crate) const MOST_BORDERS: u64 = 1 << 16;

/// Where in the one arena each space begins and ends, in their order.
pub fn ranges(spaces: &[Space], align: Align) -> Vec<(Offset, Offset)> {
    let mut end = 0_u64;
    let mut next = |space: &Space| {
        let base = end;
        // Beyond what an offset can say nothing is ever placed.
        end = base.saturating_add(usable(space, align)).min(i64::MAX as u64);
        let offset = |at| Offset::new(at).expect("it was bounded just now");
        (offset(base), offset(end))
    };
    spaces.iter().map(&mut next).collect()
}

/// The bytes of a space that buffers can take: whole multiples, in each of its segments.
fn usable(space: &Space, align: Align) -> u64 {
    let whole = |bytes: u64| bytes - bytes % align.get();
    match space.segment.map(Bytes::get) {
        Some(segment) if segment > 0 => {
            let rest = whole(space.capacity.get() % segment);
            (space.capacity.get() / segment).saturating_mul(whole(segment)).saturating_add(rest)
        }
        _ => whole(space.capacity.get()),
    }
}

/// The borders between spaces and between their segments.
///
/// # Errors
/// A buffer larger than every segment; a buffer whose own alignment a border breaks; too many segments.
pub(crate) fn borders(spaces: &[Space], align: Align, buffers: &[Buffer]) -> Result<Vec<Reserved>, Error> {
    let mut borders = Vec::new();
    for (space, (from, to)) in spaces.iter().zip(ranges(spaces, align)) {
        let segment = space.segment.map_or(u64::MAX, |segment| segment.get() - segment.get() % align.get());
        let too_many = |segment| Error::TooManySegments { segment, limit: MOST_BORDERS };
        if segment == 0 {
            return Err(too_many(space.segment.unwrap_or(Bytes::ZERO)));
        }
        let mut at = from.get();
        while at < to.get() {
            at = at.saturating_add(segment).min(to.get());
            let border = Offset::new(at).expect("below the end of a space");
            borders.push(Reserved { from: border, to: border });
            if borders.len() as u64 > MOST_BORDERS {
                return Err(too_many(space.segment.unwrap_or(space.capacity)));
            }
        }
    }
    let largest = (0..borders.len()).map(|place| {
        let before = place.checked_sub(1).map_or(0, |before| borders[before].to.get());
        borders[place].from.get() - before
    });
    if borders.is_empty() {
        return Ok(borders);
    }
    let largest = Bytes::new(largest.max().unwrap_or(0)).expect("a part of the arena");
    for (index, buffer) in buffers.iter().enumerate() {
        if buffer.size > largest {
            return Err(Error::LargerThanSegment { buffer: index, size: buffer.size, segment: largest });
        }
        // A multiple of it in the arena must be one in its space.
        if let Some(border) = borders.iter().find(|border| !border.from.is_aligned(buffer.align)) {
            return Err(Error::BorderNotAligned { buffer: index, align: buffer.align, border: border.from });
        }
    }
    Ok(borders)
}
