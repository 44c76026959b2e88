//! From the lifetime graph to the problem: sizes rounded up, stretches of lives turned into pieces.

use terrace_profiles::units::{Align, Bytes, Offset};
use terrace_profiles::{Life, Profile};

use crate::error::Error;
use crate::graph::{self, Graph};
use crate::options::Options;
use crate::problem::{Buffer, Piece, Problem, Reserved};
use crate::spaces::{self, MOST_BORDERS};

/// The problem of a checked profile, and for each buffer of the profile the index of its storage in the problem.
pub fn problem(profile: &Profile, lives: &[Life], options: &Options) -> Result<(Problem, Vec<u32>), Error> {
    let graph = Graph::new(profile, lives, options.lanes, options.free)?;
    let mut buffers = Vec::with_capacity(graph.storages.len());
    for (index, storage) in graph.storages.iter().enumerate() {
        let align = storage.align.map_or(options.align, |own| own.max(options.align));
        let round = |bytes: Bytes| bytes.align_up(align).map_err(|_| Error::TotalTooLarge { buffer: index });
        let largest = storage.members.iter().map(|member| lives[*member as usize].bytes).max().unwrap_or(Bytes::ZERO);
        let (lifetime, stretches) = graph::stretches(storage, lives, options.free, largest);
        let mut pieces = Vec::with_capacity(stretches.len());
        for (lifetime, range) in stretches {
            let (from, to) = rounded(range.start, range.end, align, round)?;
            pieces.push(Piece { lifetime, from, to });
        }
        let (size, fixed, lane, pieces) = (round(largest)?, storage.fixed, storage.lane, pieces.into());
        buffers.push(Buffer { size, align, lifetime, fixed, lane, pieces });
    }
    let reserved = reserved(&buffers, options)?;
    Ok((Problem { buffers, apart: graph.apart, reserved }, graph.storage_of))
}

/// What is reserved, the borders of the spaces, and one wherever a segment may end below everything piled up.
fn reserved(buffers: &[Buffer], options: &Options) -> Result<Vec<Reserved>, Error> {
    let mut reserved = options.reserved.clone();
    reserved.extend(spaces::borders(&options.spaces, options.align, buffers)?);
    if let Some(segment) = options.segment {
        let larger = |(_, buffer): &(usize, &Buffer)| buffer.size > segment;
        if let Some((buffer, Buffer { size, .. })) = buffers.iter().enumerate().find(larger) {
            return Err(Error::LargerThanSegment { buffer, size: *size, segment });
        }
        let own = |buffer: &Buffer| buffer.size.get().saturating_add(buffer.align.get());
        let fixed = |buffer: &Buffer| buffer.fixed.map_or(0, Offset::get);
        let total = buffers.iter().fold(0_u64, |sum, buffer| sum.saturating_add(own(buffer)));
        let highest = buffers.iter().map(fixed).chain(reserved.iter().map(|reserved| reserved.to.get())).max();
        // Twice, since below each border as much may stay free as is used.
        let top = total.saturating_mul(2).saturating_add(highest.unwrap_or(0));
        if segment.is_zero() || top / segment.get() > MOST_BORDERS {
            return Err(Error::TooManySegments { segment, limit: MOST_BORDERS });
        }
        let borders = (1..=top / segment.get()).filter_map(|count| Offset::new(count * segment.get()));
        reserved.extend(borders.map(|at| Reserved { from: at, to: at }));
    }
    Ok(reserved)
}

/// A range in use, widened to the alignment.
fn rounded(
    start: u64,
    end: u64,
    align: Align,
    round: impl Fn(Bytes) -> Result<Bytes, Error>,
) -> Result<(Bytes, Bytes), Error> {
    let bytes = |value| Bytes::new(value).expect("a range lies within the size of its buffer");
    Ok((bytes(start).align_down(align), round(bytes(end))?))
}
