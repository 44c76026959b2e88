//! The planners that others ship, written anew and the plain way, sharing no code with ours: what a plan must never be worse
//! than, and what the benchmark measures beside it.
//!
//! All of them know sizes, alignments and lives only: no gaps, fixed offsets, lanes or pairs kept apart.

use std::cmp::Reverse;

use terrace_planner::problem::{Buffer, Problem};

use crate::generate::Random;

/// Which gap between what is placed already a buffer goes into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gap {
    Lowest,
    Narrowest,
}

/// First fit, the largest first, ties as they came: TensorFlow Lite Micro's `GreedyMemoryPlanner`, XNNPACK.
pub fn first_fit(problem: &Problem) -> Vec<u64> {
    let mut order: Vec<u32> = (0..problem.buffers.len() as u32).collect();
    order.sort_by_key(|&index| Reverse(problem.buffers[index as usize].size));
    place(problem, &order, Gap::Lowest)
}

/// Best fit, the largest first, then the longest life: XLA's `GlobalDecreasingSizeBestFitHeap` in its spatial order.
pub fn best_fit(problem: &Problem) -> Vec<u64> {
    let mut order: Vec<u32> = (0..problem.buffers.len() as u32).collect();
    order.sort_by_key(|&index| {
        let buffer = &problem.buffers[index as usize];
        Reverse((buffer.size, buffer.lifetime.end.0 - buffer.lifetime.start.0))
    });
    place(problem, &order, Gap::Narrowest)
}

/// Best fit in order of birth among what is alive at that moment: ggml's gallocr, ONNX Runtime's `MemPatternPlanner`.
pub fn birth_order(problem: &Problem) -> Vec<u64> {
    let mut births: Vec<u32> = (0..problem.buffers.len() as u32).collect();
    births.sort_by_key(|&index| problem.buffers[index as usize].lifetime.start);
    let mut offsets = vec![0; problem.buffers.len()];
    // Alive now, by offset.
    let mut alive: Vec<(u64, u64, u32)> = Vec::new();
    for index in births {
        let buffer = &problem.buffers[index as usize];
        alive.retain(|&(_, _, other)| problem.buffers[other as usize].lifetime.end > buffer.lifetime.start);
        let offset = choose(buffer, &alive, Gap::Narrowest);
        offsets[index as usize] = offset;
        let at = alive.partition_point(|taken| taken.0 < offset);
        alive.insert(at, (offset, offset + buffer.size.get(), index));
    }
    offsets
}

/// Hill climbing over orders of first fit: TVM's `hill_climb` of its unified static memory planner. A buffer that touches
/// the peak changes places with one that lies below it; what is worse is accepted with a probability that falls as one over
/// the attempts.
pub fn hill_climb(problem: &Problem, attempts: u32, seed: u64) -> Vec<u64> {
    let mut random = Random::new(seed);
    let mut order: Vec<u32> = (0..problem.buffers.len() as u32).collect();
    order.sort_by_key(|&index| Reverse(problem.buffers[index as usize].size));
    let top = |offsets: &[u64], index: u32| offsets[index as usize] + problem.buffers[index as usize].size.get();
    let peak = |offsets: &[u64]| order_of(problem).map(|index| top(offsets, index)).max().unwrap_or(0);
    let mut offsets = place(problem, &order, Gap::Lowest);
    let (mut best, mut current) = (offsets.clone(), peak(&offsets));
    let mut lowest = current;
    for attempt in 1..=u64::from(attempts) {
        let highest: Vec<u32> = order_of(problem).filter(|&index| top(&offsets, index) == current).collect();
        let Some(&late) = highest.get(random.below(highest.len().max(1) as u64) as usize) else { break };
        let lives = |index: u32| problem.buffers[index as usize].lifetime;
        let below: Vec<u32> =
            order_of(problem).filter(|&other| other != late && lives(other).overlaps(&lives(late))).collect();
        let Some(&early) = below.get(random.below(below.len().max(1) as u64) as usize) else { break };
        let position = |wanted: u32| order.iter().position(|&index| index == wanted).expect("every buffer is in order");
        let (a, b) = (position(late), position(early));
        order.swap(a, b);
        let tried = place(problem, &order, Gap::Lowest);
        let reached = peak(&tried);
        if reached < lowest {
            (lowest, best) = (reached, tried.clone());
        }
        if reached <= current || random.below(attempt) == 0 {
            (offsets, current) = (tried, reached);
        } else {
            order.swap(a, b);
        }
    }
    best
}

fn order_of(problem: &Problem) -> impl Iterator<Item = u32> {
    0..problem.buffers.len() as u32
}

/// Puts the buffers into gaps one by one.
fn place(problem: &Problem, order: &[u32], gap: Gap) -> Vec<u64> {
    let mut placed = Placed::new(problem);
    let mut offsets = vec![0; problem.buffers.len()];
    let mut taken = Vec::new();
    for &index in order {
        let buffer = &problem.buffers[index as usize];
        placed.alive_with(buffer, &offsets, &mut taken);
        offsets[index as usize] = choose(buffer, &taken, gap);
        placed.add(index);
    }
    offsets
}

/// The gap that is wide enough, above or between the `taken` ranges (ascending by start).
fn choose(buffer: &Buffer, taken: &[(u64, u64, u32)], gap: Gap) -> u64 {
    let (size, align) = (buffer.size.get(), buffer.align.get());
    let (mut free, mut best) = (0_u64, None::<(u64, u64)>);
    for &(start, end, _) in taken {
        if free + size <= start && best.is_none_or(|(width, _)| start - free < width) {
            best = Some((start - free, free));
            if gap == Gap::Lowest {
                break;
            }
        }
        free = free.max(end.next_multiple_of(align));
    }
    best.map_or(free, |(_, offset)| offset)
}

/// What is placed, in blocks of time, so that a buffer looks only at those near it.
struct Placed<'a> {
    problem: &'a Problem,
    block: u64,
    begin: u64,
    blocks: Vec<Vec<u32>>,
}

impl<'a> Placed<'a> {
    fn new(problem: &'a Problem) -> Self {
        let lives = || problem.buffers.iter().map(|buffer| buffer.lifetime);
        let begin = lives().map(|life| life.start.0).min().unwrap_or(0);
        let end = lives().map(|life| life.end.0).max().unwrap_or(0);
        // Blocks as long as a mean life: few blocks for each buffer, few buffers in each block.
        let total: u128 = lives().map(|life| u128::from(life.end.0 - life.start.0)).sum();
        let mean = (total / problem.buffers.len().max(1) as u128).max(1) as u64;
        let block = mean.max((end - begin) / (4 * problem.buffers.len().max(1) as u64)).max(1);
        Self { problem, block, begin, blocks: vec![Vec::new(); ((end - begin) / block + 1) as usize] }
    }

    fn range(&self, buffer: &Buffer) -> std::ops::RangeInclusive<usize> {
        let at = |tick: u64| ((tick - self.begin) / self.block) as usize;
        at(buffer.lifetime.start.0)..=at(buffer.lifetime.end.0 - 1)
    }

    fn add(&mut self, index: u32) {
        for block in self.range(&self.problem.buffers[index as usize]) {
            self.blocks[block].push(index);
        }
    }

    /// What is placed and alive together with the buffer, by offset.
    fn alive_with(&self, buffer: &Buffer, offsets: &[u64], taken: &mut Vec<(u64, u64, u32)>) {
        taken.clear();
        let own = self.range(buffer);
        for block in own.clone() {
            for &index in &self.blocks[block] {
                let other = &self.problem.buffers[index as usize];
                // Each pair is met in the first block that both touch.
                let first = *self.range(other).start().max(own.start()) == block;
                if first && other.lifetime.overlaps(&buffer.lifetime) {
                    let offset = offsets[index as usize];
                    taken.push((offset, offset + other.size.get(), index));
                }
            }
        }
        taken.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Features, problem};
    use crate::oracle::is_valid;

    #[test]
    fn every_peer_places_without_a_clash() {
        for seed in 0..60 {
            let mut random = Random::new(seed);
            let features = Features { aligns: seed % 2 == 0, ..Features::default() };
            let problem = problem(&mut random, 30, 40, 25, features);
            for offsets in
                [first_fit(&problem), best_fit(&problem), birth_order(&problem), hill_climb(&problem, 20, seed)]
            {
                assert!(is_valid(&problem, &offsets), "seed {seed}");
            }
        }
    }
}
