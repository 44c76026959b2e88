//! The skyline dive: always place what can lie lowest, never look back.
//!
//! ```text
//!   floor   ____                  Each section has a floor: the top of what lies in it so far. The next item is the one
//!          |    |__               whose floor (the highest over its sections) is lowest; ties go to the better rank. It is
//!          |       |____          put there, and the floors of its sections rise to its top.
//!   ------ sections ------>
//! ```
//!
//! This is the first branch of the exact search ([`super::search`]) taken without a capacity, in O(n) memory and without any
//! list of overlapping pairs. Floors live in a tree that answers "highest floor in this range, and where". Each unplaced
//! item waits at one section whose floor was the highest of its range when last looked at; floors only rise, so an item's
//! true floor is never below that of the section it waits at, and the lowest section with a waiter tells who is next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::race::Stop;
use crate::sweep::Partition;

/// A dive that needs more looks than this, and this for each item, is given up: other orders do the same work for less.
const LOOKS: u64 = 3 << 20;
const LOOKS_PER_ITEM: u64 = 48;

/// Offsets in units for each item, ties broken by `rank` (lower first), all ending below `ceiling`; `None` if that fails, if
/// it was stopped or if it looks too often.
pub fn dive(part: &Partition, rank: &[u32], ceiling: u64, stop: &Stop<'_>) -> Option<Vec<u64>> {
    Dive::new(part, rank).run(ceiling, stop)
}

struct Dive<'a> {
    part: &'a Partition,
    rank: &'a [u32],
    by_rank: Vec<u32>,
    floors: Floors,
    /// For each section the ranks of the items that wait there, best first.
    waiting: Vec<BinaryHeap<Reverse<u32>>>,
    /// Sections by (floor, best rank); an entry that differs from `announced` is stale.
    sections: BinaryHeap<Reverse<(u64, u32, u32)>>,
    announced: Vec<Option<(u64, u32)>>,
    /// For items in a pair kept apart: the top of the partners placed so far.
    partners: Option<Partners>,
    offsets: Vec<u64>,
}

impl<'a> Dive<'a> {
    fn new(part: &'a Partition, rank: &'a [u32]) -> Self {
        let mut by_rank = vec![0; part.len()];
        for (item, &rank) in (0_u32..).zip(rank) {
            by_rank[rank as usize] = item;
        }
        // An item in no section at all still needs a place to wait.
        let sections = part.load.len().max(1);
        let mut waiting = vec![BinaryHeap::new(); sections];
        for item in 0..part.len() {
            waiting[part.first[item] as usize].push(Reverse(rank[item]));
        }
        let mut dive = Self {
            part,
            rank,
            by_rank,
            floors: Floors::new(sections),
            waiting,
            sections: BinaryHeap::new(),
            announced: vec![None; sections],
            partners: (!part.apart.is_empty()).then(|| Partners::new(part)),
            offsets: vec![0; part.len()],
        };
        for section in 0..sections {
            dive.announce(section);
        }
        dive
    }

    fn run(mut self, ceiling: u64, stop: &Stop<'_>) -> Option<Vec<u64>> {
        let mut looks = LOOKS + LOOKS_PER_ITEM * self.part.len() as u64;
        while let Some(Reverse((floor, rank, section))) = self.sections.pop() {
            let section = section as usize;
            if self.announced[section] != Some((floor, rank)) {
                continue;
            }
            self.announced[section] = None;
            looks = looks.checked_sub(1)?;
            if looks.is_multiple_of(4096) && stop.now() {
                return None;
            }
            if self.floors.at(section) == floor {
                self.waiting[section].pop();
                if self.settle(self.by_rank[rank as usize] as usize, section, floor) >= ceiling {
                    return None;
                }
            }
            self.announce(section);
        }
        Some(self.offsets)
    }

    /// Places the item if its floor is still that of the section it waited at, else lets it wait where its floor is. Returns
    /// where it ends, as far as that is known.
    fn settle(&mut self, item: usize, section: usize, floor: u64) -> u64 {
        let (lowest, at) = self.lowest(item);
        if lowest > floor && at != section {
            self.waiting[at].push(Reverse(self.rank[item]));
            self.announce(at);
            return lowest + self.part.size[item];
        }
        let offset = self.part.lowest_fit(item, lowest.max(self.partners.as_ref().map_or(0, |p| p.top_of(item))));
        self.offsets[item] = offset;
        for rect in self.part.shape(item) {
            self.floors.raise(rect.first as usize, rect.last as usize, offset + rect.to);
        }
        if let Some(partners) = &mut self.partners {
            partners.placed(item, offset + self.part.size[item]);
        }
        offset + self.part.size[item]
    }

    /// The lowest offset over the floors of the item's sections, and the section that forbids less.
    fn lowest(&self, item: usize) -> (u64, usize) {
        self.part
            .shape(item)
            .map(|rect| {
                let (floor, at) = self.floors.highest(rect.first as usize, rect.last as usize);
                (floor.saturating_sub(rect.from), at)
            })
            .max_by_key(|(floor, at)| (*floor, Reverse(*at)))
            .unwrap_or((0, self.part.first[item] as usize))
    }

    fn announce(&mut self, section: usize) {
        let Some(&Reverse(rank)) = self.waiting[section].peek() else { return };
        let key = (self.floors.at(section), rank);
        if self.announced[section].is_none_or(|known| key < known) {
            self.announced[section] = Some(key);
            self.sections.push(Reverse((key.0, key.1, section as u32)));
        }
    }
}

/// The tops of placed partners in pairs kept apart.
struct Partners {
    of: Vec<Vec<u32>>,
    top: Vec<u64>,
}

impl Partners {
    fn new(part: &Partition) -> Self {
        let mut of = vec![Vec::new(); part.len()];
        for &(a, b) in &part.apart {
            of[a as usize].push(b);
            of[b as usize].push(a);
        }
        Self { of, top: vec![0; part.len()] }
    }

    fn top_of(&self, item: usize) -> u64 {
        self.top[item]
    }

    fn placed(&mut self, item: usize, top: u64) {
        for &partner in &self.of[item] {
            let known = &mut self.top[partner as usize];
            *known = top.max(*known);
        }
    }
}

/// Floors of all sections: range maximum with its place, and raising a range to a value above all of it.
struct Floors {
    sections: usize,
    leaves: usize,
    highest: Vec<u64>,
    /// Whether all sections under the node have its floor; what lies below such a node is out of date.
    level: Vec<bool>,
}

impl Floors {
    fn new(sections: usize) -> Self {
        let leaves = sections.next_power_of_two();
        Self { sections, leaves, highest: vec![0; 2 * leaves], level: vec![true; 2 * leaves] }
    }

    fn at(&self, section: usize) -> u64 {
        let (mut node, mut low, mut width) = (1, 0, self.leaves);
        while !self.level[node] && width > 1 {
            width /= 2;
            let right = section >= low + width;
            node = 2 * node + usize::from(right);
            low += if right { width } else { 0 };
        }
        self.highest[node]
    }

    /// The highest floor in `[from, to)` and the first section there that has it.
    fn highest(&self, from: usize, to: usize) -> (u64, usize) {
        debug_assert!(from < to && to <= self.sections);
        self.query(1, 0, self.leaves, from, to)
    }

    fn query(&self, node: usize, low: usize, width: usize, from: usize, to: usize) -> (u64, usize) {
        if self.level[node] || width == 1 {
            return (self.highest[node], from.max(low));
        }
        if from <= low && low + width <= to {
            return (self.highest[node], self.first_highest(node, low, width));
        }
        let half = width / 2;
        let middle = low + half;
        if to <= middle {
            return self.query(2 * node, low, half, from, to);
        }
        if from >= middle {
            return self.query(2 * node + 1, middle, half, from, to);
        }
        let left = self.query(2 * node, low, half, from, to);
        let right = self.query(2 * node + 1, middle, half, from, to);
        if right.0 > left.0 { right } else { left }
    }

    fn first_highest(&self, mut node: usize, mut low: usize, mut width: usize) -> usize {
        while !self.level[node] && width > 1 {
            width /= 2;
            let left = 2 * node;
            if self.highest[left] == self.highest[node] {
                node = left;
            } else {
                node = left + 1;
                low += width;
            }
        }
        low
    }

    /// Sets the floors in `[from, to)`, none of which is above `floor`, to it.
    fn raise(&mut self, from: usize, to: usize, floor: u64) {
        if from < to {
            self.assign(1, 0, self.leaves, (from, to), floor);
        }
    }

    fn assign(&mut self, node: usize, low: usize, width: usize, range: (usize, usize), floor: u64) {
        if range.0 <= low && low + width <= range.1 {
            self.highest[node] = floor;
            self.level[node] = true;
            return;
        }
        let (left, right) = (2 * node, 2 * node + 1);
        if self.level[node] {
            for child in [left, right] {
                self.highest[child] = self.highest[node];
                self.level[child] = true;
            }
            self.level[node] = false;
        }
        let middle = low + width / 2;
        if range.0 < middle {
            self.assign(left, low, width / 2, range, floor);
        }
        if range.1 > middle {
            self.assign(right, middle, width / 2, range, floor);
        }
        self.highest[node] = self.highest[left].max(self.highest[right]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_agree_with_a_plain_array() {
        let (sections, mut seed) = (13, 7_u64);
        let mut next = |bound: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % bound
        };
        let (mut floors, mut plain) = (Floors::new(sections), vec![0_u64; sections]);
        for _ in 0..2000 {
            let from = next(sections as u64) as usize;
            let to = from + 1 + next((sections - from) as u64) as usize;
            let highest = *plain[from..to].iter().max().unwrap();
            let first = from + plain[from..to].iter().position(|floor| *floor == highest).unwrap();
            assert_eq!(floors.highest(from, to), (highest, first));
            let floor = highest + next(5);
            floors.raise(from, to, floor);
            plain[from..to].fill(floor);
            let section = next(sections as u64) as usize;
            assert_eq!(floors.at(section), plain[section]);
        }
    }
}
