//! From the lifetime graph to the problem: sizes rounded up, stretches of lives turned into pieces.

use terrace_profiles::units::{Align, Bytes};
use terrace_profiles::{Life, Profile};

use crate::error::Error;
use crate::graph::{self, Graph};
use crate::options::Options;
use crate::problem::{Buffer, Piece, Problem};

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
    Ok((Problem { buffers, apart: graph.apart }, graph.storage_of))
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
