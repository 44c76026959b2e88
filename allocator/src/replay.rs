//! Which slot a request belongs to, once a step has left its script.
//!
//! ```text
//!   slots     a  b  c  d  e  f        requests  a  b  X  d  e  f
//!                                                     X is not c's size: from here on requests are aligned with the slots
//!                                                     d is d, whether X was extra and c is missing, or X was c
//!                                                     after SURE exact matches in a row the alignment says what each was
//! ```
//!
//! A request is matched by its place in its lane, its size, and whether it is gone already when the next one comes; never by its call site,
//! which does not tell the layers of a loop apart. It is served at once, by the explanation that is the cheapest so far; what it was,
//! is told and learnt when that is clear. Wrong guesses cost memory, never safety: whether the slot's bytes are free is looked
//! up, not inferred.

use crate::alignment::{Alignment, EXTRA, Ends, NEVER};
use crate::divergence::Divergence;
use crate::record::{Request, SlotInfo};
use crate::script::Script;

/// Exact matches in a row, one turn after the other, after which nothing before them is looked at again.
const SURE: usize = 12;
/// Requests that are aligned at once: what is longer is settled as it looks then.
const MOST: usize = 4096;
/// How far from its turn a request may come, so that it is the same out of order.
const NEAR: u32 = 64;

/// Costs of being a slot's request, beside [`EXTRA`]: with another size, which is a little less than that; with a much larger one, which is less
/// than to be extra where the slot is missing too; and to be gone when the next request comes, where the slot would live on.
const OTHER_SIZE: u32 = 18;
const MUCH_LARGER: u32 = 24;
const GONE: u32 = 18;

/// The state of matching one step against its script.
#[derive(Clone, Debug)]
pub struct Matcher {
    /// By slot: whether its request came.
    taken: Vec<bool>,
    lanes: Vec<LaneState>,
}

#[derive(Clone, Debug, Default)]
struct LaneState {
    /// The turn that comes next after what is settled.
    head: u32,
    unclear: Option<Unclear>,
}

/// Requests that are aligned from the head on.
#[derive(Clone, Debug)]
struct Unclear {
    alignment: Alignment,
    asked: Vec<Asked>,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    /// Index in the record.
    request: u32,
    size: u64,
    /// Exact matches in a row that end with it.
    exact: usize,
    next: u32,
}

impl Matcher {
    /// Nothing matched yet.
    pub fn new(script: &Script) -> Self {
        let (lanes, slots) = (vec![LaneState::default(); script.lanes.len()], script.template.slots.len());
        Self { taken: vec![false; slots], lanes }
    }

    /// A request came for exactly the next slot of its lane; for steps that were on script so far.
    pub fn take_next(&mut self, script: &Script, slot: u32) {
        self.taken[slot as usize] = true;
        self.lanes[script.template.slots[slot as usize].lane as usize].head = script.turn[slot as usize] + 1;
    }

    /// The slot of a request of `size` bytes, which comes after `earlier` in the record; none that is known yet, otherwise. `tell` hears of each divergence,
    /// `known` of earlier requests of which it is known now that they were a slot's, or no slot's after all.
    pub fn find(
        &mut self,
        script: &Script,
        lane: u32,
        size: u64,
        earlier: &[Request],
        tell: &mut impl FnMut(Divergence),
        known: &mut impl FnMut(u32, Option<u32>),
    ) -> Option<u32> {
        let Some(slots) = script.lanes.get(lane as usize) else {
            tell(Divergence::OtherLane { lane, actual: size });
            return None;
        };
        let turns = Turns { script, slots };
        if let Some(unclear) = &mut self.lanes[lane as usize].unclear {
            unclear.look_again(&turns, earlier);
            if unclear.asked.last().is_some_and(|asked| asked.exact >= SURE) || unclear.asked.len() >= MOST {
                self.settle(&turns, lane, false, tell, known);
            }
        }
        let state = &mut self.lanes[lane as usize];
        let head = state.head;
        let expected = turns.slot(head).filter(|slot| turns.info(*slot).seen == size);
        if let (None, Some(slot)) = (&state.unclear, expected) {
            self.take_next(script, slot);
            return Some(slot);
        }
        let new = || Unclear { alignment: Alignment::new(head, slots.len() as u32), asked: Vec::new() };
        let unclear = state.unclear.get_or_insert_with(new);
        let ends = unclear.ask(&turns, earlier.len() as u32, size);
        let turn = ends.matched.then(|| ends.next - 1);
        turn.and_then(|turn| turns.slot(turn)).filter(|slot| turns.info(*slot).holds(size))
    }

    /// The request that was found last could not be served: it never came.
    pub fn undo(&mut self, script: &Script, lane: u32, found: Option<u32>) {
        let Some(state) = self.lanes.get_mut(lane as usize) else { return };
        match (&mut state.unclear, found) {
            (Some(unclear), _) => {
                unclear.alignment.pop();
                unclear.asked.pop();
                if unclear.asked.is_empty() {
                    state.unclear = None;
                }
            }
            (None, Some(slot)) => {
                self.taken[slot as usize] = false;
                state.head = script.turn[slot as usize];
            }
            (None, None) => {}
        }
    }

    /// The step is over: all that is unclear is settled, and what was never asked for is missing.
    pub fn finish(
        &mut self,
        script: &Script,
        all: &[Request],
        tell: &mut impl FnMut(Divergence),
        known: &mut impl FnMut(u32, Option<u32>),
    ) {
        for (lane, slots) in (0..).zip(&script.lanes) {
            let turns = Turns { script, slots };
            if let Some(unclear) = &mut self.lanes[lane as usize].unclear {
                unclear.look_again(&turns, all);
                self.settle(&turns, lane, true, tell, known);
            }
        }
        for (slot, taken) in (0..).zip(&self.taken) {
            if !taken {
                tell(Divergence::Missing { slot, expected: script.template.slots[slot as usize].seen });
            }
        }
    }

    /// Tells what the unclear requests of a lane were.
    fn settle(
        &mut self,
        turns: &Turns<'_>,
        lane: u32,
        over: bool,
        tell: &mut impl FnMut(Divergence),
        known: &mut impl FnMut(u32, Option<u32>),
    ) {
        let state = &mut self.lanes[lane as usize];
        let Some(unclear) = state.unclear.take() else { return };
        let (explained, end) = unclear.alignment.explanation(over);
        state.head = end;
        for turn in explained.iter().filter_map(|explained| explained.turn) {
            self.taken[turns.slots[turn as usize] as usize] = true;
        }
        for (asked, explained) in unclear.asked.iter().zip(&explained) {
            let own = explained.turn.map(|turn| turns.slots[turn as usize]);
            let slot = own.or_else(|| self.missing_near(turns, explained.next, end, asked.size));
            known(asked.request, slot);
            let Some(slot) = slot else {
                tell(Divergence::Extra { actual: asked.size });
                continue;
            };
            self.taken[slot as usize] = true;
            let (info, actual) = (turns.info(slot), asked.size);
            let expected = info.seen;
            match actual {
                _ if actual > expected => tell(Divergence::Grew { slot, expected, actual }),
                // What outlives the step is served outside: smaller or at another turn, nothing is different.
                _ if info.outlives => {}
                _ if own.is_none() => tell(Divergence::Reordered { slot, turn: explained.next }),
                _ if actual < expected => tell(Divergence::Shrink { slot, expected, actual }),
                _ => {}
            }
        }
    }

    /// The slot nearest to a turn, of those before `end`, that was that large and that nobody asked for; of two equally near, the later.
    fn missing_near(&self, turns: &Turns<'_>, next: u32, end: u32, size: u64) -> Option<u32> {
        let fits =
            |turn: u32| turns.slot(turn).filter(|slot| !self.taken[*slot as usize] && turns.info(*slot).seen == size);
        (0..NEAR).find_map(|distance| {
            let ahead = next.checked_add(distance).filter(|turn| *turn < end).and_then(fits);
            ahead.or_else(|| next.checked_sub(distance + 1).and_then(fits))
        })
    }
}

impl Unclear {
    /// Takes a request in.
    fn ask(&mut self, turns: &Turns<'_>, request: u32, size: u64) -> Ends {
        let ends = self.alignment.push(|turn| turns.cost(turn, size, false));
        self.asked.push(Asked { request, size, exact: 0, next: 0 });
        self.count(turns, ends);
        ends
    }

    /// Another request comes, or none any more: whether the last one is gone already says something about what it was.
    fn look_again(&mut self, turns: &Turns<'_>, earlier: &[Request]) {
        let Some(&Asked { request, size, .. }) = self.asked.last() else { return };
        if earlier[request as usize].freed
            && let Some(ends) = self.alignment.revise(|turn| turns.cost(turn, size, true))
        {
            self.count(turns, ends);
        }
    }

    /// How many exact matches in a row end with the last request.
    fn count(&mut self, turns: &Turns<'_>, ends: Ends) {
        let (last, earlier) = self.asked.split_last_mut().expect("a request was asked for");
        let exact = ends.matched && turns.slot(ends.next - 1).is_some_and(|slot| turns.info(slot).seen == last.size);
        let before = earlier.last().filter(|before| before.next + 1 == ends.next).map_or(0, |before| before.exact);
        last.next = ends.next;
        last.exact = if exact { before + 1 } else { 0 };
    }
}

/// A lane's slots in order.
struct Turns<'a> {
    script: &'a Script,
    slots: &'a [u32],
}

impl Turns<'_> {
    fn slot(&self, turn: u32) -> Option<u32> {
        self.slots.get(turn as usize).copied()
    }

    fn info(&self, slot: u32) -> &SlotInfo {
        &self.script.template.slots[slot as usize]
    }

    /// What it costs to be that turn's request; `gone` once it is known that it was freed before the next one came. That one lives on says
    /// nothing: frees by a garbage collector come late.
    fn cost(&self, turn: u32, size: u64, gone: bool) -> u32 {
        let slot = self.slots[turn as usize];
        let info = self.info(slot);
        let lives_on = self.script.until[slot as usize] > turn + 1;
        let life = if gone && lives_on { GONE } else { 0 };
        life + match size {
            _ if size == info.seen => 0,
            _ if info.outlives => OTHER_SIZE,
            _ if size < info.seen / 2 => NEVER,
            _ if size > info.seen.saturating_mul(2) => MUCH_LARGER,
            _ => OTHER_SIZE,
        }
    }
}

impl SlotInfo {
    /// Whether a request of that size can be served by the slot.
    fn holds(&self, size: u64) -> bool {
        self.outlives || size <= self.size
    }
}

const _: () = assert!(OTHER_SIZE < EXTRA && OTHER_SIZE + GONE > EXTRA, "one that only comes and goes is extra");
