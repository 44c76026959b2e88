//! Fit into what is free: the heuristics that others ship, so that a plan is never worse than theirs.
//!
//! [`fit`] takes items in some order and puts each into a gap between the placed items it meets in time: the lowest that is
//! wide enough (first fit: TFLite Micro, XNNPACK) or the narrowest (best fit: XLA). [`replay`] walks through time instead and
//! acts like an allocator with a free list that merges neighbours (ggml's gallocr, ONNX Runtime's pattern planner); it needs
//! no list of pairs.

use std::collections::{BTreeMap, BTreeSet};

use super::neighbours::Neighbours;
use super::race::Stop;
use crate::sweep::Partition;

/// Which of the gaps that are wide enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The one with the lowest offset.
    First,
    /// The narrowest; the lowest of several.
    Best,
}

/// Offsets for the items taken in `order`; `None` if stopped.
pub fn fit(part: &Partition, order: &[u32], rule: Rule, neighbours: &Neighbours, stop: &Stop<'_>) -> Option<Vec<u64>> {
    let mut offsets = vec![UNPLACED; part.len()];
    let mut taken = Vec::new();
    for (count, &item) in order.iter().enumerate() {
        if count % 256 == 0 && stop.now() {
            return None;
        }
        let item = item as usize;
        forbidden(part, item, neighbours, &offsets, &mut taken);
        offsets[item] = gap(part, item, rule, &taken);
    }
    Some(offsets)
}

const UNPLACED: u64 = u64::MAX;

/// The offsets at which the item would meet a placed neighbour or something fixed: ranges, ascending by start.
fn forbidden(part: &Partition, item: usize, neighbours: &Neighbours, offsets: &[u64], taken: &mut Vec<(u64, u64)>) {
    taken.clear();
    let mut forbid = |own_from: u64, own_to: u64, from: u64, to: u64| {
        // At offset o the item uses [o + own_from, o + own_to).
        if own_from < own_to && from < to {
            let (start, end) = ((from + 1).saturating_sub(own_to), to.saturating_sub(own_from));
            if start < end {
                taken.push((start, end));
            }
        }
    };
    let placed = neighbours.of(item).iter().map(|&other| other as usize).filter(|&other| offsets[other] != UNPLACED);
    if part.is_solid() {
        // Here all bytes are in use all the time, apart or not.
        for other in placed {
            forbid(0, part.size[item], offsets[other], offsets[other] + part.size[other]);
        }
    } else {
        for other in placed {
            if neighbours.are_apart(item, other) {
                forbid(0, part.size[item], offsets[other], offsets[other] + part.size[other]);
                continue;
            }
            for own in part.shape(item) {
                for their in part.shape(other).filter(|their| their.meets(&own)) {
                    forbid(own.from, own.to, offsets[other] + their.from, offsets[other] + their.to);
                }
            }
        }
    }
    for obstacle in &part.obstacles {
        for own in part.shape(item).filter(|own| own.meets(obstacle)) {
            forbid(own.from, own.to, obstacle.from, obstacle.to);
        }
    }
    for &(_, from, to) in part.keep_off.iter().filter(|(kept, ..)| *kept as usize == item) {
        forbid(0, part.size[item], from, to);
    }
    for &(from, to) in &part.reserved {
        // A border is crossed only by what begins before it.
        let start = (from + 1).saturating_sub(part.size[item]);
        if start < to {
            taken.push((start, to));
        }
    }
    taken.sort_unstable();
}

/// The offset that the rule chooses among those not in `taken`.
fn gap(part: &Partition, item: usize, rule: Rule, taken: &[(u64, u64)]) -> u64 {
    let (mut offset, mut best) = (0, None);
    for &(start, end) in taken {
        if offset < start {
            match rule {
                Rule::First => return offset,
                Rule::Best => best = best.min(Some((start - offset, offset))).or(Some((start - offset, offset))),
            }
        }
        offset = offset.max(part.aligned(item, end));
    }
    best.map_or(offset, |(_, offset)| offset)
}

/// Offsets from replaying the lives against a free list; only for a plain part with one alignment.
pub fn replay(part: &Partition, rule: Rule, stop: &Stop<'_>) -> Option<Vec<u64>> {
    if !part.is_plain() || part.align.iter().any(|&align| align != 1) {
        return None;
    }
    let mut deaths: Vec<u32> = (0..part.len() as u32).collect();
    deaths.sort_by_key(|&item| part.last[item as usize]);
    let mut deaths = deaths.into_iter().peekable();
    let (mut free, mut offsets) = (FreeList::default(), vec![0; part.len()]);
    for item in 0..part.len() {
        if item % 4096 == 0 && stop.now() {
            return None;
        }
        while let Some(dead) = deaths.next_if(|&dead| part.last[dead as usize] <= part.first[item]) {
            free.give(offsets[dead as usize], part.size[dead as usize]);
        }
        offsets[item] = free.take(part.size[item], rule);
    }
    Some(offsets)
}

/// Free ranges below the top, merged with their neighbours; above the top everything is free.
#[derive(Default)]
struct FreeList {
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
    top: u64,
}

impl FreeList {
    fn take(&mut self, size: u64, rule: Rule) -> u64 {
        let found = match rule {
            Rule::Best => self.by_size.range((size, 0)..).next().map(|&(length, start)| (start, length)),
            Rule::First => self.by_start.iter().find(|(_, length)| **length >= size).map(|(s, l)| (*s, *l)),
        };
        // A range that ends at the top can grow.
        let found = found.or_else(|| {
            let last = self.by_start.last_key_value().map(|(start, length)| (*start, *length));
            last.filter(|(start, length)| start + length == self.top)
        });
        let Some((start, length)) = found else {
            self.top += size;
            return self.top - size;
        };
        self.remove(start, length);
        if length > size {
            self.insert(start + size, length - size);
        }
        self.top = self.top.max(start + size);
        start
    }

    fn give(&mut self, mut start: u64, mut length: u64) {
        if let Some((&before, &size)) = self.by_start.range(..start).next_back().filter(|(s, l)| **s + **l == start) {
            self.remove(before, size);
            (start, length) = (before, size + length);
        }
        if let Some(&after) = self.by_start.get(&(start + length)) {
            self.remove(start + length, after);
            length += after;
        }
        self.insert(start, length);
    }

    fn insert(&mut self, start: u64, length: u64) {
        self.by_start.insert(start, length);
        self.by_size.insert((length, start));
    }

    fn remove(&mut self, start: u64, length: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(length, start));
    }
}

/// Offsets where all items have one size: each takes the lowest free row, which needs as many rows as are ever alive at
/// once and is therefore optimal (interval colouring); `None` where sizes differ.
pub fn colour(part: &Partition) -> Option<Vec<u64>> {
    let size = *part.size.first()?;
    if !part.is_plain() || part.size.iter().any(|&other| other != size) {
        return None;
    }
    let step = part.align.iter().copied().max().map(|align| size.next_multiple_of(align))?;
    let mut deaths: Vec<u32> = (0..part.len() as u32).collect();
    deaths.sort_by_key(|&item| part.last[item as usize]);
    let mut deaths = deaths.into_iter().peekable();
    let (mut rows, mut used, mut row_of) = (BTreeSet::new(), 0, vec![0; part.len()]);
    for item in 0..part.len() {
        while let Some(dead) = deaths.next_if(|&dead| part.last[dead as usize] <= part.first[item]) {
            rows.insert(row_of[dead as usize]);
        }
        row_of[item] = rows.pop_first().unwrap_or_else(|| {
            used += 1;
            used - 1
        });
    }
    Some(row_of.iter().map(|row| row * step).collect())
}
