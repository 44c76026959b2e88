//! Why a capacity cannot be met: a set of buffers that alone do not fit, each of them needed for that.
//!
//! Where the load at one tick exceeds the capacity, the largest buffers there say so. Where only a finished search does,
//! QuickXplain halves the problem: what a refuted rest does not need goes (U. Junker, "QuickXplain: Preferred Explanations
//! and Relaxations for Over-Constrained Problems", AAAI 2004). That takes about `k log n` searches for `k` of `n` buffers.

use std::cell::Cell;

use serde::Serialize;
use terrace_profiles::units::{Bytes, Offset};

use super::{Control, Strategy, portfolio};
use crate::bound::{LowerBound, lower_bound};
use crate::options::Options;
use crate::problem::{Buffer, Problem};

/// Buffers that no arena of the capacity asked for can hold, whatever else there is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Culprits {
    /// Their indices in the problem, ascending.
    pub buffers: Vec<u32>,
    /// Whether without any one of them the rest is known to fit. Otherwise some may not be needed: the node budget was
    /// spent before that was known.
    pub minimal: bool,
}

/// The culprits of a problem that cannot fit into the capacity. Searches spend at most as many nodes as the options allow.
pub fn culprits(problem: &Problem, capacity: Bytes, options: &Options, control: &Control<'_>) -> Culprits {
    let end = |buffer: &Buffer| buffer.fixed.map_or(0, Offset::get) + buffer.size.get();
    if let Some(alone) = problem.buffers.iter().position(|buffer| end(buffer) > capacity.get()) {
        return Culprits { buffers: vec![alone as u32], minimal: true };
    }
    let bound = lower_bound(problem);
    let loaded = (bound.bytes > capacity).then(|| too_much_load(problem, &bound, capacity));
    if let Some(mut buffers) = loaded.clone()
        && buffers.iter().all(|&index| problem.buffers[index as usize].fixed.is_none())
    {
        buffers.sort_unstable();
        return Culprits { buffers, minimal: true };
    }
    let mut suspects = loaded.unwrap_or_else(|| (0..problem.buffers.len() as u32).collect());
    // Neighbours in time stay together, so that whole stretches go at once.
    suspects.sort_by_key(|&index| (problem.buffers[index as usize].lifetime.start, index));
    let (left, decided) = (Cell::new(options.budget_nodes), Cell::new(true));
    let halving = Halving { problem, capacity, options, control, left, decided };
    let mut buffers = halving.needed(&mut Vec::new(), false, &suspects);
    buffers.sort_unstable();
    Culprits { buffers, minimal: halving.decided.get() }
}

/// Of the buffers that witness the bound the largest, until they exceed the capacity: so none of them can be spared.
fn too_much_load(problem: &Problem, bound: &LowerBound, capacity: Bytes) -> Vec<u32> {
    let mut in_use: Vec<(u64, u32)> = Vec::new();
    for witness in &bound.witness {
        in_use.extend(witness.buffers.iter().map(|&index| {
            let here = problem.buffers[index as usize].in_use().filter(|(life, _)| life.contains(witness.tick));
            (here.map(|(_, range)| range.end - range.start).sum(), index)
        }));
    }
    in_use.sort_unstable_by_key(|&(bytes, index)| (std::cmp::Reverse(bytes), index));
    let mut sum = 0;
    let needed = in_use.iter().take_while(|(bytes, _)| {
        let more = sum <= capacity.get();
        sum += bytes;
        more
    });
    needed.map(|(_, index)| *index).collect()
}

struct Halving<'a> {
    problem: &'a Problem,
    capacity: Bytes,
    options: &'a Options,
    control: &'a Control<'a>,
    /// Nodes left to spend.
    left: Cell<u64>,
    /// Whether every question so far had an answer.
    decided: Cell<bool>,
}

impl Halving<'_> {
    /// What is needed of `rest` so that it and `kept` cannot fit, which both together do not. `changed` says whether `kept`
    /// was extended since it was last asked about.
    fn needed(&self, kept: &mut Vec<u32>, changed: bool, rest: &[u32]) -> Vec<u32> {
        if changed && self.refutes(kept) {
            return Vec::new();
        }
        if rest.len() <= 1 {
            return rest.to_vec();
        }
        let (early, late) = rest.split_at(rest.len() / 2);
        let before = kept.len();
        kept.extend(early);
        let mut needed = self.needed(kept, true, late);
        kept.truncate(before);
        kept.extend(&needed);
        let more = self.needed(kept, !needed.is_empty(), early);
        kept.truncate(before);
        needed.extend(more);
        needed
    }

    /// Whether these buffers alone are known not to fit.
    fn refutes(&self, buffers: &[u32]) -> bool {
        let problem = only(self.problem, buffers);
        let budget_nodes = (self.options.budget_nodes / 8).min(self.left.get());
        let options = Options { capacity: Some(self.capacity), budget_nodes, ..self.options.clone() };
        // A part of a valid problem is valid, and the search always has an answer.
        let Ok(Some(solved)) = portfolio(&problem, Some(Strategy::Prove), &options, self.control) else { return false };
        self.left.set(self.left.get().saturating_sub(solved.proof.nodes));
        let fits = solved.placement.makespan(&problem) <= self.capacity;
        self.decided.set(self.decided.get() && (fits || solved.refuted));
        solved.refuted
    }
}

/// The problem of some of the buffers.
pub fn only(problem: &Problem, buffers: &[u32]) -> Problem {
    let mut place = vec![u32::MAX; problem.buffers.len()];
    for (at, &index) in (0..).zip(buffers) {
        place[index as usize] = at;
    }
    let kept: Vec<Buffer> = buffers.iter().map(|&index| problem.buffers[index as usize].clone()).collect();
    let pairs = problem.apart.iter().map(|&(a, b)| (place[a as usize], place[b as usize]));
    let apart = pairs.filter(|&(a, b)| a != u32::MAX && b != u32::MAX).collect();
    Problem { buffers: kept, apart, reserved: problem.reserved.clone() }
}
