//! The exact search: canonical placements under a capacity, by depth first with undo.
//!
//! A placement is *canonical* if its items, taken by (offset, rank), each lie exactly at the lowest offset that those before
//! leave free. Every placement can be pushed down to a canonical one, so looking at canonical ones alone loses nothing
//! (M. D. Moffitt, "MiniMalloc", ASPLOS 2023). At each node:
//!
//! - *candidates* are the unplaced items whose lowest offset is not below the last one placed, lowest first;
//! - *dominance*: an item that would lie at or above the lowest possible top of another unplaced item leaves a hole into
//!   which that one could be pushed: no candidate;
//! - *inference*: in each section, the floor (or the last offset, which only grows) plus what is still to be placed there
//!   must not exceed the capacity;
//! - *hatless*: if nothing unplaced meets the item just placed and the branch fails, its siblings fail too.
//!
//! The stack is explicit and every change is undone from one log, so depth costs no recursion and a node no allocation.

use super::Stop;
use super::neighbours::Neighbours;
use crate::sweep::Partition;

/// How a search ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Offsets in units that end within the capacity.
    Found(Vec<u64>),
    /// There are none.
    Refuted,
    /// All was looked at and nothing found, but items that use only part of their bytes can interleave in ways that are no
    /// canonical placement: this proves nothing.
    Exhausted,
    /// The node budget was spent, or the search was stopped.
    Spent,
}

/// Looks for a placement within `capacity` units, visiting at most `budget` nodes. Also tells how many it visited.
pub fn search(
    part: &Partition,
    neighbours: &Neighbours,
    rank: &[u32],
    capacity: u64,
    budget: u64,
    stop: &Stop<'_>,
) -> (Verdict, u64) {
    if part.bound > capacity {
        return (Verdict::Refuted, 0);
    }
    let mut search = Search::new(part, neighbours, rank, capacity);
    let verdict = search.run(budget, stop);
    (verdict, search.nodes)
}

struct Search<'a> {
    part: &'a Partition,
    neighbours: &'a Neighbours,
    rank: &'a [u32],
    capacity: u64,
    /// Where each item lies, or the lowest offset that the placed ones leave it.
    offset: Vec<u64>,
    unplaced: Unplaced,
    /// Top of what lies in each section.
    floor: Vec<u64>,
    /// Units still to be placed in each section.
    remaining: Vec<u64>,
    log: Vec<Undo>,
    stack: Vec<Frame>,
    nodes: u64,
}

/// A value to put back.
enum Undo {
    Offset(u32, u64),
    Floor(u32, u64),
}

/// One level: what was placed to get here, and how far its own candidates are tried.
struct Frame {
    /// The item placed to open this level; `NONE` for the root.
    item: u32,
    /// Length of the log before it was placed.
    log: usize,
    /// Candidates up to this key are tried.
    tried: (u64, u32),
    /// Whether nothing unplaced meets `item`.
    hatless: bool,
    /// Candidates lie below this.
    ceiling: u64,
}

const NONE: u32 = u32::MAX;

/// A set of items with O(1) removal and O(1) undo in reverse order.
struct Unplaced {
    items: Vec<u32>,
    position: Vec<u32>,
}

impl<'a> Search<'a> {
    fn new(part: &'a Partition, neighbours: &'a Neighbours, rank: &'a [u32], capacity: u64) -> Self {
        let mut remaining = part.load.clone();
        // What is fixed is never placed.
        for obstacle in &part.obstacles {
            for left in &mut remaining[obstacle.first as usize..obstacle.last as usize] {
                *left -= obstacle.to - obstacle.from;
            }
        }
        Self {
            part,
            neighbours,
            rank,
            capacity,
            offset: (0..part.len()).map(|item| part.lowest_fit(item, 0)).collect(),
            unplaced: Unplaced::all(part.len()),
            floor: vec![0; part.load.len()],
            remaining,
            log: Vec::new(),
            stack: Vec::new(),
            nodes: 0,
        }
    }

    fn run(&mut self, budget: u64, stop: &Stop<'_>) -> Verdict {
        if (0..self.part.len()).any(|item| self.offset[item] + self.part.size[item] > self.capacity) {
            return Verdict::Refuted;
        }
        self.open(NONE, 0, false, None);
        loop {
            if self.unplaced.items.is_empty() {
                return Verdict::Found(self.offset.clone());
            }
            let frame = self.stack.last().expect("the root is popped only on return");
            let (tried, ceiling) = (frame.tried, frame.ceiling);
            if let Some((key, item)) = self.next_candidate(tried, ceiling) {
                self.stack.last_mut().expect("as above").tried = key;
                if self.nodes >= budget {
                    return Verdict::Spent;
                }
                self.nodes += 1;
                if self.nodes.is_multiple_of(1024) && stop.now() {
                    return Verdict::Spent;
                }
                self.place(item, key);
            } else if !self.close() {
                return if self.part.is_windowed() { Verdict::Exhausted } else { Verdict::Refuted };
            }
        }
    }

    /// The unplaced item with the lowest (offset, rank) above `tried`, if its offset is below the ceiling.
    fn next_candidate(&self, tried: (u64, u32), ceiling: u64) -> Option<((u64, u32), u32)> {
        let mut best = ((ceiling, 0), NONE);
        for &item in &self.unplaced.items {
            let key = (self.offset[item as usize], self.rank[item as usize] + 1);
            if key > tried && key < best.0 {
                best = (key, item);
            }
        }
        (best.1 != NONE).then_some(best)
    }

    /// Places the item at its lowest offset and opens the next level, unless some section or neighbour cannot fit then.
    fn place(&mut self, item: u32, key: (u64, u32)) {
        let log = self.log.len();
        let index = item as usize;
        let offset = key.0;
        self.unplaced.remove(item);
        let mut fits = true;
        for rect in self.part.shape(index) {
            let (top, used) = (offset + rect.to, rect.to - rect.from);
            for section in rect.first..rect.last {
                let at = section as usize;
                self.log.push(Undo::Floor(section, self.floor[at]));
                self.floor[at] = top;
                self.remaining[at] -= used;
                fits &= top + self.remaining[at] <= self.capacity;
            }
        }
        // Offsets only grow: below this one every section is closed.
        let capacity = self.capacity;
        fits = fits && self.remaining.iter().all(|&left| left == 0 || offset + left <= capacity);
        let mut hatless = true;
        if fits {
            for (other, rise) in self.neighbours.with_rise(self.part, index) {
                if !self.unplaced.contains(other) {
                    continue;
                }
                hatless = false;
                let other_index = other as usize;
                let raised = offset + rise;
                if raised > self.offset[other_index] {
                    let lowest = self.part.lowest_fit(other_index, raised);
                    self.log.push(Undo::Offset(other, self.offset[other_index]));
                    self.offset[other_index] = lowest;
                    fits &= lowest + self.part.size[other_index] <= capacity;
                    if !fits {
                        break;
                    }
                }
            }
        }
        if fits {
            self.open(item, log, hatless, Some(key));
        } else {
            self.undo(item, log);
        }
    }

    fn open(&mut self, item: u32, log: usize, hatless: bool, after: Option<(u64, u32)>) {
        let top = |&item: &u32| self.offset[item as usize] + self.part.size[item as usize];
        let ceiling = self.unplaced.items.iter().map(top).min().unwrap_or(0);
        self.stack.push(Frame { item, log, tried: after.unwrap_or((0, 0)), hatless, ceiling });
    }

    /// Leaves the current level, and further ones whose siblings cannot help; `false` at the root.
    fn close(&mut self) -> bool {
        loop {
            let frame = self.stack.pop().expect("a level is open");
            if frame.item == NONE {
                return false;
            }
            self.undo(frame.item, frame.log);
            if !frame.hatless {
                return true;
            }
        }
    }

    fn undo(&mut self, item: u32, log: usize) {
        for entry in self.log.drain(log..).rev() {
            match entry {
                Undo::Offset(other, offset) => self.offset[other as usize] = offset,
                Undo::Floor(section, floor) => self.floor[section as usize] = floor,
            }
        }
        for rect in self.part.shape(item as usize) {
            for left in &mut self.remaining[rect.first as usize..rect.last as usize] {
                *left += rect.to - rect.from;
            }
        }
        self.unplaced.restore(item);
    }
}

impl Unplaced {
    fn all(count: usize) -> Self {
        let items: Vec<u32> = (0..count as u32).collect();
        Self { position: items.clone(), items }
    }

    fn contains(&self, item: u32) -> bool {
        let position = self.position[item as usize] as usize;
        self.items.get(position) == Some(&item)
    }

    fn remove(&mut self, item: u32) {
        let position = self.position[item as usize] as usize;
        self.items.swap_remove(position);
        if let Some(&moved) = self.items.get(position) {
            self.position[moved as usize] = position as u32;
        }
    }

    /// Undoes the latest `remove`, which must have been of this item.
    fn restore(&mut self, item: u32) {
        let position = self.position[item as usize] as usize;
        let last = self.items.len();
        if position == last {
            self.items.push(item);
        } else {
            let moved = self.items[position];
            self.items.push(moved);
            self.position[moved as usize] = last as u32;
            self.items[position] = item;
        }
    }
}
