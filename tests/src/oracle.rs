//! Right answers the slow way, sharing no code with the planner: a pairwise validator and the true optimum of small problems.

use terrace_planner::problem::{Buffer, Problem};
use terrace_profiles::units::Offset;

/// Whether two buffers at those offsets ever use one byte at one tick, or must not share one at all.
fn clash(problem: &Problem, a: usize, a_offset: u64, b: usize, b_offset: u64) -> bool {
    let (first, second) = (&problem.buffers[a], &problem.buffers[b]);
    let whole = a_offset < b_offset + second.size.get() && b_offset < a_offset + first.size.get();
    let pair = |x: u32, y: u32| (x as usize, y as usize) == (a, b) || (y as usize, x as usize) == (a, b);
    if first.lane != second.lane || problem.apart.iter().any(|&(x, y)| pair(x, y)) {
        return whole && !first.size.is_zero() && !second.size.is_zero();
    }
    first.in_use().any(|(life, own)| {
        second.in_use().any(|(other, their)| {
            let (own, their) = (own.start + a_offset..own.end + a_offset, their.start + b_offset..their.end + b_offset);
            life.overlaps(&other) && own.start < their.end && their.start < own.end
        })
    })
}

/// Whether a buffer at that offset takes no reserved byte and has no border inside.
fn is_free(problem: &Problem, buffer: &Buffer, offset: u64) -> bool {
    let bytes = || offset..offset + buffer.size.get();
    problem.reserved.iter().all(|reserved| {
        let (from, to) = (reserved.from.get(), reserved.to.get());
        bytes().all(|byte| byte < from || to <= byte) && bytes().skip(1).all(|byte| from < to || byte != from)
    })
}

/// Whether every rule holds, by looking at all pairs.
pub fn is_valid(problem: &Problem, offsets: &[u64]) -> bool {
    let alone = |(buffer, &offset): (&Buffer, &u64)| {
        offset % buffer.align.get() == 0
            && buffer.fixed.is_none_or(|fixed| fixed.get() == offset)
            && is_free(problem, buffer, offset)
    };
    problem.buffers.iter().zip(offsets).all(alone)
        && (0..offsets.len()).all(|a| (0..a).all(|b| !clash(problem, a, offsets[a], b, offsets[b])))
}

/// The smallest makespan there is, by trying every offset of every buffer. For about five small buffers.
pub fn exhaustive_optimum(problem: &Problem) -> u64 {
    let sum: u64 = problem.buffers.iter().map(|buffer| buffer.size.get() + buffer.align.get()).sum();
    let closed = problem.reserved.iter().map(|reserved| reserved.to);
    let highest = problem.buffers.iter().filter_map(|b| b.fixed).chain(closed).map(Offset::get).max().unwrap_or(0);
    let mut best = 2 * sum + highest + 1;
    deepen(problem, &mut Vec::new(), 0, &mut best);
    best
}

fn deepen(problem: &Problem, offsets: &mut Vec<u64>, makespan: u64, best: &mut u64) {
    let index = offsets.len();
    if makespan >= *best {
        return;
    }
    let Some(buffer) = problem.buffers.get(index) else {
        *best = makespan;
        return;
    };
    let mut offset = buffer.fixed.map_or(0, Offset::get);
    while offset + buffer.size.get() < *best {
        let free = is_free(problem, buffer, offset);
        if free && (0..index).all(|other| !clash(problem, index, offset, other, offsets[other])) {
            offsets.push(offset);
            deepen(problem, offsets, makespan.max(offset + buffer.size.get()), best);
            offsets.pop();
        }
        if buffer.fixed.is_some() {
            return;
        }
        offset += buffer.align.get();
    }
}

/// The smallest makespan there is, by trying every order of first fit, which includes an optimal one as long as each buffer
/// uses all its bytes whenever it is in use. For about eight buffers of any size.
pub fn ordered_optimum(problem: &Problem) -> u64 {
    let count = problem.buffers.len();
    let mut offsets: Vec<Option<u64>> = problem.buffers.iter().map(|b| b.fixed.map(Offset::get)).collect();
    let tops = problem.buffers.iter().filter_map(|b| b.fixed.map(|fixed| fixed.get() + b.size.get()));
    let makespan = tops.max().unwrap_or(0);
    let mut best = u64::MAX;
    permute(problem, &mut offsets, count, makespan, &mut best);
    best
}

fn permute(problem: &Problem, offsets: &mut Vec<Option<u64>>, count: usize, makespan: u64, best: &mut u64) {
    if makespan >= *best {
        return;
    }
    let mut complete = true;
    for index in 0..count {
        if offsets[index].is_some() {
            continue;
        }
        complete = false;
        let buffer = &problem.buffers[index];
        let placed = |offsets: &[Option<u64>], at: u64| {
            is_free(problem, buffer, at)
                && (0..count).all(|other| offsets[other].is_none_or(|offset| !clash(problem, index, at, other, offset)))
        };
        // A lowest fit lies at the base or just above something placed or reserved.
        let tops = (0..count).filter_map(|other| offsets[other].map(|at| at + problem.buffers[other].size.get()));
        let tops = tops.chain(problem.reserved.iter().map(|reserved| reserved.to.get()));
        let mut candidates: Vec<u64> = tops.chain([0]).map(|at| at.next_multiple_of(buffer.align.get())).collect();
        candidates.sort_unstable();
        let lowest = candidates.into_iter().find(|&at| placed(offsets, at)).expect("above everything there is room");
        offsets[index] = Some(lowest);
        permute(problem, offsets, count, makespan.max(lowest + buffer.size.get()), best);
        offsets[index] = None;
    }
    if complete {
        *best = makespan;
    }
}
