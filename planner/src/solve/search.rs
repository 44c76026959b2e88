//! The exact search: canonical placements under a capacity, depth first.
//!
//! ```text
//!   offset                      A placement is canonical if its items, taken by (offset, rank), each lie exactly at the
//!     ^    +----+               lowest offset that those before leave free. Every placement can be pushed down to a
//!     |    | 3? |  +---+        canonical one, so looking at canonical ones alone loses nothing (M. D. Moffitt, "MiniMalloc",
//!     | +--+----+  | 2 |        ASPLOS 2023). The (offset, rank) of the last one placed is the clock: it only moves forward.
//!     | |    1     |   |        A border that nothing unplaced crosses splits the rest into groups that know nothing of
//!     +-+----------+---+-> t    each other: each is solved alone, and the failure of one is the failure of all.
//! ```
//!
//! At each node:
//!
//! - *candidates* are the unplaced items of the group whose lowest offset the clock has not passed and no inference
//!   forbids, lowest first;
//! - *dominance*: an item that would lie at or above the lowest possible top of another unplaced item leaves a hole into
//!   which that one could be pushed: no candidate;
//! - *inference* ([`infer`]): bounds under unplaced items, dead ends;
//! - *memory* ([`memo`]): a group in a state that has failed before fails at once;
//! - *jumping back*: when a group fails, everything since the placement that split it off goes, however much of it was
//!   about other groups.
//!
//! The stack is explicit and every change is undone from one log, so depth costs no recursion and a node no allocation.
//! A search can be asked to go on after its budget.

mod ground;
mod infer;
mod memo;
mod state;

use super::order;
use super::race::Stop;
pub use ground::Ground;
use infer::{Clock, Inference};
use memo::{Key, Memo};
use state::State;

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

/// A search for a placement within a capacity, by one order.
pub struct Search<'a> {
    state: State<'a>,
    inference: Inference,
    memo: Memo,
    /// The items, each group of unplaced ones in a row, and where each stands.
    items: Vec<u32>,
    place_of: Vec<u32>,
    stack: Vec<Frame>,
    /// Candidates of all levels, and groups that wait for their turn.
    candidates: Vec<(i64, u32, u32)>,
    waiting: Vec<Task>,
    scratch: Vec<i64>,
    begun: bool,
    nodes: u64,
}

/// Unplaced items that nothing unplaced joins to others: `items[from..to]`, and the sections they lie in.
#[derive(Clone, Copy)]
struct Group {
    from: u32,
    to: u32,
    first: u32,
    last: u32,
}

/// A group to be placed, and what its failure takes down.
#[derive(Clone, Copy)]
struct Task {
    group: Group,
    clock: Clock,
    /// The level whose placement made this group; `NONE` for the whole problem.
    owner: u32,
    /// The state before that placement.
    mark: usize,
    /// The group to place after this one, in `waiting`.
    next: u32,
}

/// One level: a group, and how far its candidates are tried.
struct Frame {
    task: Task,
    /// Range in `candidates`, and the next to try.
    next: u32,
    end: u32,
    /// Length of `waiting` here.
    waiting: u32,
    /// Nodes visited before.
    nodes: u64,
    key: Key,
}

const NONE: u32 = u32::MAX;

/// Failures that cost fewer nodes are not worth remembering.
const WORTH_REMEMBERING: u64 = 2;

impl<'a> Search<'a> {
    /// A search that has visited nothing yet; ties in its order go to the earlier birth.
    pub fn new(ground: &'a Ground<'a>, order: order::Order, capacity: u64) -> Self {
        let state = State::new(ground, order, capacity as i64);
        let items: Vec<u32> = (0..ground.len() as u32).collect();
        Self {
            inference: Inference::new(&state),
            state,
            memo: Memo::new(items.len()),
            place_of: items.clone(),
            items,
            stack: Vec::new(),
            candidates: Vec::new(),
            waiting: Vec::new(),
            scratch: vec![0; ground.len()],
            begun: false,
            nodes: 0,
        }
    }

    /// Nodes visited so far.
    pub fn nodes(&self) -> u64 {
        self.nodes
    }

    /// Goes on until `budget` nodes have been visited in all.
    pub fn run(&mut self, budget: u64, stop: &Stop<'_>) -> Verdict {
        if !self.begun {
            self.begun = true;
            if self.state.is_hopeless() {
                return Verdict::Refuted;
            }
            let all =
                Group { from: 0, to: self.items.len() as u32, first: 0, last: self.state.ground.sections() as u32 };
            if !self.open(Task { group: all, clock: (0, 0), owner: NONE, mark: 0, next: NONE }) {
                return self.found();
            }
        }
        loop {
            let Some(level) = self.stack.len().checked_sub(1) else { return self.refuted() };
            let frame = &mut self.stack[level];
            if frame.next == frame.end {
                self.fail();
                continue;
            }
            let (_, _, item) = self.candidates[frame.next as usize];
            if self.nodes >= budget || (self.nodes.is_multiple_of(1024) && stop.now()) {
                return Verdict::Spent;
            }
            frame.next += 1;
            if self.state.seems_to_fit(item as usize) {
                self.nodes += 1;
                let task = frame.task;
                if let Some(task) = self.place(item, task, level as u32)
                    && !self.open(task)
                {
                    return self.found();
                }
            }
        }
    }

    fn found(&self) -> Verdict {
        Verdict::Found(self.state.low.iter().map(|&low| low as u64).collect())
    }

    fn refuted(&self) -> Verdict {
        if self.state.ground.solid { Verdict::Refuted } else { Verdict::Exhausted }
    }

    /// Places an item of a task; what is then to be done, or `None` at a dead end.
    fn place(&mut self, item: u32, task: Task, level: u32) -> Option<Task> {
        let (mark, key) = (self.state.mark(), (self.state.low[item as usize], self.state.rank[item as usize] + 1));
        let mut group = task.group;
        // Placed items stand behind the group they were in; deeper levels only move what stands before.
        group.to -= 1;
        self.swap(self.place_of[item as usize], group.to);
        let placed = self.state.place(item as usize);
        let rest = &self.items[group.from as usize..group.to as usize];
        let holds = placed.is_some() && self.inference.holds(&mut self.state, rest, group.first..group.last, key);
        if !holds {
            self.state.undo(mark);
            return None;
        }
        let next = Task { group, clock: key, owner: level, mark, next: task.next };
        Some(if placed == Some(true) && group.from < group.to { self.split(next) } else { next })
    }

    fn swap(&mut self, one: u32, other: u32) {
        self.items.swap(one as usize, other as usize);
        for place in [one, other] {
            self.place_of[self.items[place as usize] as usize] = place;
        }
    }

    /// Splits a task at the borders that nothing unplaced crosses, and ranks each group afresh. All but the first wait.
    fn split(&mut self, task: Task) -> Task {
        let Group { from, to, .. } = task.group;
        let ground = self.state.ground;
        let range = from as usize..to as usize;
        self.items[range.clone()].sort_unstable_by_key(|&item| (ground.first[item as usize], item));
        let waiting = self.waiting.len();
        let mut start = range.start;
        while start < range.end {
            let first = ground.first[self.items[start] as usize];
            let (mut end, mut last) = (start, first);
            while end < range.end && (end == start || ground.first[self.items[end] as usize] < last) {
                last = last.max(ground.reach[self.items[end] as usize]);
                end += 1;
            }
            // Later in the same order of ranks, so the clock's rank no longer means anything; its offset does.
            self.state.rank_afresh(&mut self.items[start..end], &mut self.scratch);
            let group = Group { from: start as u32, to: end as u32, first, last: last.min(ground.sections() as u32) };
            let next = if self.waiting.len() == waiting { task.next } else { self.waiting.len() as u32 - 1 };
            self.waiting.push(Task { group, clock: (task.clock.0, 0), next, ..task });
            start = end;
        }
        for place in range {
            self.place_of[self.items[place] as usize] = place as u32;
        }
        self.waiting.pop().expect("a task with items has a group")
    }

    /// Opens a level for a task, or for what waits if that has no items; `false` if nothing is left at all.
    fn open(&mut self, mut task: Task) -> bool {
        while task.group.from == task.group.to {
            if task.next == NONE {
                return false;
            }
            task = self.waiting[task.next as usize];
        }
        let State { low, bound, rank, ground, .. } = &self.state;
        let group = &self.items[task.group.from as usize..task.group.to as usize];
        let ceiling = group.iter().map(|&item| low[item as usize] + ground.size[item as usize]).min().unwrap_or(0);
        let first = self.candidates.len();
        let mut key = Key::default();
        for &item in group {
            let at = (low[item as usize], rank[item as usize]);
            let passed = (at.0, at.1 + 1) <= task.clock;
            key.add(item, at.0, passed);
            if at.0 < ceiling && !passed && bound[item as usize] == at.0 {
                self.candidates.push((at.0, at.1, item));
            }
        }
        if self.memo.knows(key) {
            self.candidates.truncate(first);
        }
        self.candidates[first..].sort_unstable();
        let (next, end, waiting) = (first as u32, self.candidates.len() as u32, self.waiting.len() as u32);
        self.stack.push(Frame { task, next, end, waiting, nodes: self.nodes, key });
        true
    }

    /// Leaves the current level: its group cannot be placed, so neither can what made it be.
    fn fail(&mut self) {
        let frame = self.stack.pop().expect("a level is open");
        if self.nodes - frame.nodes >= WORTH_REMEMBERING {
            self.memo.refute(frame.key);
        }
        self.state.undo(frame.task.mark);
        if frame.task.owner == NONE {
            return;
        }
        self.stack.truncate(frame.task.owner as usize + 1);
        let owner = self.stack.last().expect("an owner is a level below");
        self.candidates.truncate(owner.end as usize);
        self.waiting.truncate(owner.waiting as usize);
    }
}
