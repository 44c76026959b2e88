//! Planning again without moving what need not move: as many old offsets as possible, at no cost in makespan.
//!
//! First the problem is solved afresh: what that needs is what the stable placement may need. Then offsets are wished for:
//! those that contradict each other go, and the rest is pinned. Where the others no longer fit around all pins, halving
//! finds those that cannot stay, as in [`culprits`](super::culprits). Lanes are treated one by one, each above its own base.

use std::collections::BTreeMap;

use terrace_profiles::units::{Bytes, Offset, Tick};

use super::{Control, Solved, portfolio};
use crate::error::Error;
use crate::options::{Effort, Options};
use crate::problem::{Buffer, Problem};

/// Attempts to pin, for each lane: what is not decided by then moves.
const MOST_ATTEMPTS: u32 = 64;

/// Above so many buffers only the quick heuristics are asked whether pins can stay.
const MOST_BUFFERS: usize = 4096;

/// Places the problem like [`solve`](super::solve()), with as many buffers as possible at the offsets wished for (one entry
/// for each buffer). Never needs more than `solve` does. Also tells how many wishes are met.
///
/// # Errors
/// As [`solve`](super::solve()).
pub fn solve_keeping(
    problem: &Problem,
    wishes: &[Option<Offset>],
    options: &Options,
    control: &Control<'_>,
) -> Result<(Solved, usize), Error> {
    assert_eq!(wishes.len(), problem.buffers.len(), "one wish for each buffer");
    let mut solved = super::solve(problem, options, control)?;
    for (lane, base) in solved.bases.clone() {
        let ids: Vec<u32> = (0_u32..).zip(&problem.buffers).filter(|(_, b)| b.lane == lane).map(|(id, _)| id).collect();
        let top = |id: &u32| solved.placement.offsets[*id as usize].get() + problem.buffers[*id as usize].size.get();
        let room = ids.iter().map(top).max().unwrap_or(0) - base;
        let mut stable = Stable::new(problem, &ids, base, room, options, control);
        let wished = stable.compatible(wishes);
        stable.pin(&wished);
        solved.proof.nodes += stable.nodes;
        for (&id, offset) in ids.iter().zip(stable.best.iter().flatten()) {
            solved.placement.offsets[id as usize] = Offset::new(base + offset).expect("it ends within the makespan");
        }
    }
    let met =
        wishes.iter().zip(&solved.placement.offsets).filter(|(wish, offset)| wish.as_ref() == Some(offset)).count();
    Ok((solved, met))
}

/// One lane while pins are tried in it.
struct Stable<'a> {
    /// Its buffers alone, at base 0.
    problem: Problem,
    ids: &'a [u32],
    base: u64,
    options: Options,
    control: &'a Control<'a>,
    /// Pins that go together, as (index, offset).
    kept: Vec<(u32, u64)>,
    /// Offsets that meet all kept pins.
    best: Option<Vec<u64>>,
    attempts: u32,
    nodes: u64,
}

impl<'a> Stable<'a> {
    fn new(
        problem: &Problem,
        ids: &'a [u32],
        base: u64,
        room: u64,
        options: &Options,
        control: &'a Control<'a>,
    ) -> Self {
        let mut own = super::culprits::only(problem, ids);
        own.reserved.retain(|reserved| reserved.to.get() > base);
        for reserved in &mut own.reserved {
            let above = |at: Offset| Offset::new(at.get().saturating_sub(base)).expect("lower than before");
            (reserved.from, reserved.to) = (above(reserved.from), above(reserved.to));
        }
        let budget_nodes = options.budget_nodes / u64::from(MOST_ATTEMPTS);
        // Each attempt is a solve of its own.
        let effort = if ids.len() > MOST_BUFFERS { Effort::Quick } else { options.effort };
        let options = Options { capacity: Bytes::new(room), budget_nodes, effort, ..options.clone() };
        let (kept, best, attempts, nodes) = (Vec::new(), None, 0, 0);
        Self { problem: own, ids, base, options, control, kept, best, attempts, nodes }
    }

    /// The wishes of this lane that lie within its room and contradict neither what is fixed nor each other, the buffers
    /// that take most bytes for longest first.
    fn compatible(&self, wishes: &[Option<Offset>]) -> Vec<(u32, u64)> {
        let room = self.options.capacity.map_or(0, Bytes::get);
        let mut offset: Vec<Option<u64>> = vec![None; self.ids.len()];
        for (index, (&id, buffer)) in self.ids.iter().zip(&self.problem.buffers).enumerate() {
            let wish = wishes[id as usize].filter(|wish| buffer.fixed.is_none() && wish.is_aligned(buffer.align));
            let above = wish.and_then(|wish| wish.get().checked_sub(self.base));
            let inside = above.filter(|at| at.checked_add(buffer.size.get()).is_some_and(|end| end <= room));
            offset[index] = buffer.fixed.map(Offset::get).or(inside);
        }
        self.drop_overlaps(&mut offset);
        self.drop_pairs(&mut offset);
        let free = |index: &u32| self.problem.buffers[*index as usize].fixed.is_none();
        let mut wished: Vec<(u32, u64)> = (0_u32..)
            .zip(offset)
            .filter(|(index, _)| free(index))
            .filter_map(|(index, at)| Some((index, at?)))
            .collect();
        wished.sort_by_key(|(index, _)| (std::cmp::Reverse(self.weight(*index)), *index));
        wished
    }

    /// Who stays where two cannot: what is fixed, then the greater.
    fn weight(&self, index: u32) -> (bool, u128) {
        let Buffer { size, lifetime, fixed, .. } = &self.problem.buffers[index as usize];
        (fixed.is_some(), u128::from(size.get()) * u128::from(lifetime.end.0 - lifetime.start.0))
    }

    fn lesser(&self, one: u32, other: u32) -> u32 {
        if (self.weight(one), other) < (self.weight(other), one) { one } else { other }
    }

    /// Walks through time and drops the lesser of two that use one byte at one tick.
    fn drop_overlaps(&self, offset: &mut [Option<u64>]) {
        let mut changes: Vec<(Tick, bool, u32, u64, u64)> = Vec::new();
        for (index, buffer) in (0_u32..).zip(&self.problem.buffers) {
            for (life, range) in buffer.in_use().filter(|(_, range)| !range.is_empty()) {
                changes.push((life.start, true, index, range.start, range.end));
                changes.push((life.end, false, index, range.start, range.end));
            }
        }
        changes.sort_unstable();
        // In use now: first byte to (end, whose).
        let mut alive: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
        for (_, born, index, from, to) in changes {
            let Some(at) = offset[index as usize] else { continue };
            let (from, to) = (at + from, at + to);
            if !born {
                alive.remove(&from);
                continue;
            }
            loop {
                let below = alive.range(..to).next_back().filter(|(_, (end, _))| *end > from);
                let Some((&start, &(_, other))) = below else {
                    alive.insert(from, (to, index));
                    break;
                };
                let lesser = self.lesser(index, other);
                offset[lesser as usize] = None;
                if lesser == index {
                    alive.retain(|_, (_, whose)| *whose != index);
                    break;
                }
                alive.remove(&start);
                alive.retain(|_, (_, whose)| *whose != other);
            }
        }
    }

    /// Drops the lesser of two that must be apart and are not.
    fn drop_pairs(&self, offset: &mut [Option<u64>]) {
        let size = |index: u32| self.problem.buffers[index as usize].size.get();
        for &(a, b) in &self.problem.apart {
            if let (Some(x), Some(y)) = (offset[a as usize], offset[b as usize])
                && x < y + size(b)
                && y < x + size(a)
            {
                offset[self.lesser(a, b) as usize] = None;
            }
        }
    }

    /// Pins all of these beside what is kept, or halves of them where that does not fit.
    fn pin(&mut self, wished: &[(u32, u64)]) {
        if wished.is_empty() || self.fits_with(wished) || wished.len() == 1 {
            return;
        }
        let (first, rest) = wished.split_at(wished.len() / 2);
        self.pin(first);
        self.pin(rest);
    }

    fn fits_with(&mut self, wished: &[(u32, u64)]) -> bool {
        if self.attempts == MOST_ATTEMPTS {
            return false;
        }
        self.attempts += 1;
        let mut problem = self.problem.clone();
        for &(index, at) in self.kept.iter().chain(wished) {
            problem.buffers[index as usize].fixed = Offset::new(at);
        }
        let Ok(Some(solved)) = portfolio(&problem, None, &self.options, self.control) else { return false };
        self.nodes += solved.proof.nodes;
        let fits = self.options.capacity.is_some_and(|room| solved.placement.makespan(&problem) <= room);
        if fits {
            self.kept.extend(wished);
            self.best = Some(solved.placement.offsets.iter().map(|offset| offset.get()).collect());
        }
        fits
    }
}
