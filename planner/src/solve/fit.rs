//! Fit into what is free: the heuristics that others ship, so that a plan is never worse than theirs.
//!
//! [`fit`] takes items in some order and puts each into a gap between the placed items it meets in time: the lowest that is
//! wide enough (first fit: TFLite Micro, XNNPACK) or the narrowest (best fit: XLA). [`replay`] walks through time instead and
//! acts like an allocator with a free list that merges neighbours (ggml's gallocr, ONNX Runtime's pattern planner).
//!
//! Both give up as soon as something ends at or above a ceiling: what is already known to be no better need not be finished,
//! and "never worse than first fit" costs little where something better is known.

use std::collections::{BTreeMap, BTreeSet};

use super::ladder::{Entry, Ladder};
use super::overlap::Overlap;
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

/// Offsets for the items taken in `order`, all ending below `ceiling`; `None` if that fails or it is stopped.
pub fn fit(
    part: &Partition,
    order: &[u32],
    rule: Rule,
    overlap: &Overlap,
    ceiling: u64,
    stop: &Stop<'_>,
) -> Option<Vec<u64>> {
    let mut offsets = vec![UNPLACED; part.len()];
    let mut ladder = Ladder::default();
    let any_wide = (0..part.len()).any(|item| is_wide(part, overlap, item));
    let mut taken = Vec::new();
    for (count, &item) in order.iter().enumerate() {
        if count % 256 == 0 && stop.now() {
            return None;
        }
        let item = item as usize;
        if is_wide(part, overlap, item) {
            walk(part, item, rule, &ladder, &mut taken);
        } else {
            forbidden(part, item, overlap, &offsets, &mut taken);
            taken.sort_unstable();
        }
        let offset = gap(part, item, rule, &taken, ceiling - 1)?;
        offsets[item] = offset;
        if any_wide {
            ladder.insert(entry(part, item, offset));
        }
    }
    Some(offsets)
}

/// Entries of a ladder that are walked past in the time of one look at a placed item, sorting included.
pub const WALKED_PER_LOOK: u64 = 16;

/// Whether walking a ladder costs less than sorting what the item meets; only in a plain part.
pub fn is_wide(part: &Partition, overlap: &Overlap, item: usize) -> bool {
    part.is_plain() && overlap.looks(part, item) * WALKED_PER_LOOK > part.len() as u64
}

/// The item in a ladder of offsets.
pub fn entry(part: &Partition, item: usize, offset: u64) -> Entry {
    Entry { key: offset, item: item as u32, first: part.first[item], last: part.last[item] }
}

/// The offsets at which the item would meet a placed one, ascending: all of them or, where that is enough, those up to the
/// first gap that holds it. Only in a plain part. Returns how many entries of the ladder were walked past.
pub fn walk(part: &Partition, item: usize, rule: Rule, by_offset: &Ladder, taken: &mut Vec<Taken>) -> u64 {
    taken.clear();
    let (size, mut free) = (part.size[item], 0);
    by_offset.each(part.first[item], part.last[item], |entry| {
        let start = (entry.key + 1).saturating_sub(size);
        let end = entry.key + part.size[entry.item as usize];
        taken.push((start, end, entry.item));
        let gap_before = free < start;
        free = free.max(part.aligned(item, end));
        rule == Rule::Best || !gap_before
    })
}

/// The offset of an item that has none yet.
pub const UNPLACED: u64 = u64::MAX;

/// Offsets `[start, end)` that an item cannot have, and because of which item: [`NOBODY`] if of something fixed.
pub type Taken = (u64, u64, u32);

/// In a [`Taken`]: something fixed.
pub const NOBODY: u32 = u32::MAX;

/// The offsets at which the item would meet a placed one or something fixed, in no order.
pub fn forbidden(part: &Partition, item: usize, overlap: &Overlap, offsets: &[u64], taken: &mut Vec<Taken>) {
    taken.clear();
    let size = part.size[item];
    if part.is_solid() {
        overlap.each(part, item, |other| {
            let offset = offsets[other];
            if offset != UNPLACED {
                taken.push(((offset + 1).saturating_sub(size), offset + part.size[other], other as u32));
            }
        });
    } else {
        overlap.each(part, item, |other| {
            if offsets[other] != UNPLACED {
                for own in part.shape(item) {
                    for their in part.shape(other).filter(|their| their.meets(&own)) {
                        let (from, to) = (offsets[other] + their.from, offsets[other] + their.to);
                        forbid(taken, (own.from, own.to), (from, to), other as u32);
                    }
                }
            }
        });
    }
    for other in overlap.apart_of(item).filter(|&other| offsets[other] != UNPLACED) {
        forbid(taken, (0, size), (offsets[other], offsets[other] + part.size[other]), other as u32);
    }
    for obstacle in &part.obstacles {
        for own in part.shape(item).filter(|own| own.meets(obstacle)) {
            forbid(taken, (own.from, own.to), (obstacle.from, obstacle.to), NOBODY);
        }
    }
    for &(_, from, to) in part.keep_off.iter().filter(|(kept, ..)| *kept as usize == item) {
        forbid(taken, (0, size), (from, to), NOBODY);
    }
    for &(from, to) in &part.reserved {
        // A border is crossed only by what begins before it.
        let start = (from + 1).saturating_sub(part.size[item]);
        if start < to {
            taken.push((start, to, NOBODY));
        }
    }
}

/// The offsets at which `own` bytes of an item would meet `their` bytes.
fn forbid(taken: &mut Vec<Taken>, own: (u64, u64), their: (u64, u64), other: u32) {
    if own.0 < own.1 && their.0 < their.1 {
        let (start, end) = ((their.0 + 1).saturating_sub(own.1), their.1.saturating_sub(own.0));
        if start < end {
            taken.push((start, end, other));
        }
    }
}

/// The offset that the rule chooses among those not in `taken` (ascending) from which the item ends at or below `most`.
pub fn gap(part: &Partition, item: usize, rule: Rule, taken: &[Taken], most: u64) -> Option<u64> {
    let highest = most.checked_sub(part.size[item])?;
    let (mut offset, mut best) = (0, None::<(u64, u64)>);
    for &(start, end, _) in taken {
        if offset < start {
            if best.is_none_or(|(width, _)| start - offset < width) {
                best = Some((start - offset, offset));
            }
            if rule == Rule::First {
                break;
            }
        }
        offset = offset.max(part.aligned(item, end));
    }
    // Above all that is placed there is room without end, the widest gap of all.
    let offset = best.map_or(offset, |(_, offset)| offset);
    (offset <= highest).then_some(offset)
}

/// Offsets from replaying the lives against a free list, all ending below `ceiling`; only for a plain part.
pub fn replay(part: &Partition, rule: Rule, ceiling: u64, stop: &Stop<'_>) -> Option<Vec<u64>> {
    if !part.is_plain() {
        return None;
    }
    if part.align.iter().any(|&align| align != 1) {
        return replay_aligned(part, rule, ceiling, stop);
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
        if offsets[item] + part.size[item] >= ceiling {
            return None;
        }
    }
    Some(offsets)
}

/// The same by walking past all that is alive, where free ranges do not fit by their length alone.
fn replay_aligned(part: &Partition, rule: Rule, ceiling: u64, stop: &Stop<'_>) -> Option<Vec<u64>> {
    let mut offsets = vec![0; part.len()];
    let (mut alive, mut taken): (Vec<u32>, Vec<Taken>) = (Vec::new(), Vec::new());
    for item in 0..part.len() {
        if item % 256 == 0 && stop.now() {
            return None;
        }
        alive.retain(|&other| part.last[other as usize] > part.first[item]);
        taken.clear();
        taken.extend(alive.iter().map(|&other| {
            let offset: u64 = offsets[other as usize];
            ((offset + 1).saturating_sub(part.size[item]), offset + part.size[other as usize], other)
        }));
        offsets[item] = gap(part, item, rule, &taken, ceiling - 1)?;
        let place = alive.partition_point(|&other| offsets[other as usize] < offsets[item]);
        alive.insert(place, item as u32);
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
