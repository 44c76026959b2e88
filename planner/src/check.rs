//! The independent check: naive on purpose, and sharing no code with the solvers.
//!
//! It replays the life of the arena tick by tick and looks, at each birth, whether the neighbours in address order reach
//! into the new span. A placement that passes is a plan; nothing else is.

use std::collections::{BTreeMap, HashSet};

use terrace_profiles::units::{Bytes, Offset, Tick};

use crate::problem::{Placement, Problem};

/// How a placement breaks its problem.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the sentence of each variant is its doc")]
pub enum Violation {
    #[error("{offsets} offsets were given for {buffers} buffers")]
    WrongCount { offsets: usize, buffers: usize },
    #[error("buffer {buffer} lies at offset {offset}, not a multiple of its alignment {align}")]
    Misaligned { buffer: usize, offset: Offset, align: u64 },
    #[error("buffer {buffer} lies at offset {offset} but is fixed at {fixed}")]
    NotWhereFixed { buffer: usize, offset: Offset, fixed: Offset },
    #[error("buffer {buffer} ends at byte {end}, beyond the capacity of {capacity}")]
    OverCapacity { buffer: usize, end: u64, capacity: u64 },
    #[error("buffers {first} and {second} both use byte {byte} at tick {tick}")]
    Overlap { first: usize, second: usize, byte: u64, tick: u64 },
    #[error("buffers {first} and {second} share byte {byte} but belong to different lanes")]
    SharedByLanes { first: usize, second: usize, byte: u64 },
    #[error("buffer {buffer} runs into byte {byte}, which is reserved or begins another segment")]
    InReserved { buffer: usize, byte: u64 },
    #[error("buffers {first} and {second} share byte {byte} but must be kept apart")]
    NotApart { first: usize, second: usize, byte: u64 },
}

/// Accepts a placement that keeps every rule of its problem and ends within `capacity`; otherwise names the first rule
/// that it breaks.
pub fn check(problem: &Problem, placement: &Placement, capacity: Option<Bytes>) -> Result<(), Violation> {
    let (buffers, offsets) = (&problem.buffers, &placement.offsets);
    if buffers.len() != offsets.len() {
        return Err(Violation::WrongCount { offsets: offsets.len(), buffers: buffers.len() });
    }
    for (index, (buffer, &offset)) in buffers.iter().zip(offsets).enumerate() {
        if offset.get() % buffer.align.get() != 0 {
            return Err(Violation::Misaligned { buffer: index, offset, align: buffer.align.get() });
        }
        if let Some(fixed) = buffer.fixed
            && fixed != offset
        {
            return Err(Violation::NotWhereFixed { buffer: index, offset, fixed });
        }
        let end = u128::from(offset.get()) + u128::from(buffer.size.get());
        let limit = capacity.map_or(i64::MAX as u64, Bytes::get);
        if end > u128::from(limit) {
            let end = u64::try_from(end).unwrap_or(u64::MAX);
            return Err(Violation::OverCapacity { buffer: index, end, capacity: limit });
        }
        for reserved in problem.reserved.iter().filter(|_| !buffer.size.is_zero()) {
            if offset.get() < reserved.to.get() && u128::from(reserved.from.get()) < end {
                return Err(Violation::InReserved { buffer: index, byte: reserved.from.get().max(offset.get()) });
            }
        }
    }
    no_byte_twice_at_a_tick(problem, placement)?;
    lanes_share_nothing(problem, placement)?;
    pairs_share_nothing(problem, placement)
}

fn no_byte_twice_at_a_tick(problem: &Problem, placement: &Placement) -> Result<(), Violation> {
    // Deaths sort before births of the same tick: lives are half-open.
    let mut changes: Vec<(Tick, bool, u64, u64, usize)> = Vec::with_capacity(2 * problem.buffers.len());
    for (index, (buffer, offset)) in problem.buffers.iter().zip(&placement.offsets).enumerate() {
        for (life, range) in buffer.in_use().filter(|(_, range)| !range.is_empty()) {
            let (from, to) = (offset.get() + range.start, offset.get() + range.end);
            changes.push((life.start, true, from, to, index));
            changes.push((life.end, false, from, to, index));
        }
    }
    changes.sort_unstable();
    let mut alive: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    for (tick, born, from, to, index) in changes {
        if !born {
            alive.remove(&from);
            continue;
        }
        let below = alive.range(..=from).next_back().filter(|(_, (end, _))| *end > from);
        let above = alive.range(from..).next().filter(|(start, _)| **start < to);
        if let Some((&start, &(_, other))) = below.or(above) {
            let (first, second) = (other.min(index), other.max(index));
            return Err(Violation::Overlap { first, second, byte: start.max(from), tick: tick.0 });
        }
        alive.insert(from, (to, index));
    }
    Ok(())
}

fn lanes_share_nothing(problem: &Problem, placement: &Placement) -> Result<(), Violation> {
    let lanes: HashSet<u32> = problem.buffers.iter().map(|buffer| buffer.lane).collect();
    if lanes.len() < 2 {
        return Ok(());
    }
    let mut spans: Vec<(u64, u64, usize)> = problem
        .buffers
        .iter()
        .zip(&placement.offsets)
        .enumerate()
        .filter(|(_, (buffer, _))| !buffer.size.is_zero())
        .map(|(index, (buffer, offset))| (offset.get(), offset.get() + buffer.size.get(), index))
        .collect();
    spans.sort_unstable();
    // Going up, the span of each lane that reaches highest so far is the one another lane would run into.
    let mut highest: BTreeMap<u32, (u64, usize)> = BTreeMap::new();
    for (from, to, index) in spans {
        let lane = problem.buffers[index].lane;
        if let Some((_, &(_, other))) = highest.iter().find(|(l, (end, _))| **l != lane && *end > from) {
            let (first, second) = (other.min(index), other.max(index));
            return Err(Violation::SharedByLanes { first, second, byte: from });
        }
        let reach = highest.entry(lane).or_insert((to, index));
        if to > reach.0 {
            *reach = (to, index);
        }
    }
    Ok(())
}

fn pairs_share_nothing(problem: &Problem, placement: &Placement) -> Result<(), Violation> {
    let span = |index: u32| {
        let start = placement.offsets[index as usize].get();
        (start, start + problem.buffers[index as usize].size.get())
    };
    for &(a, b) in &problem.apart {
        let ((a_from, a_to), (b_from, b_to)) = (span(a), span(b));
        if a_from < b_to && b_from < a_to && a_from < a_to && b_from < b_to {
            let byte = a_from.max(b_from);
            return Err(Violation::NotApart { first: a.min(b) as usize, second: a.max(b) as usize, byte });
        }
    }
    Ok(())
}
