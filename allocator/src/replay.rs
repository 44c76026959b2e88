//! Which slot a request belongs to, once a step has left its script.
//!
//! ```text
//!   slots     a  b  c  d  e  f        requests  a  b  X  d  c  ...
//!                   ^head                             X fits nowhere: undecided, the head stays
//!                                                     d is found one further on: c is left behind, X may have been c
//!                                                       grown; if X is larger than c it was, else X was extra
//!                                                     c, if it still comes, was reordered
//!
//!             a  b  c  d  e  f                    a  b  X  Y  c  ...
//!                   ^head                             X is smaller than c, but could be it: c, with reservations
//!                                                     X is freed before Y comes, and c would still live: X was extra,
//!                                                     c is the head again, and Y is looked at like X
//! ```
//!
//! A request is matched by its place in its lane and its size, never by its call site, which does not tell the layers of a
//! loop apart. Wrong guesses cost memory, never safety: whether the slot's bytes are free is looked up, not inferred.

use std::ops::Range;

use crate::divergence::Divergence;
use crate::record::Request;
use crate::script::Script;

/// How far from the head a slot of the right size is looked for, either way. On recorded runs 64 finds all repeats of
/// dense8-mixed and 16 does not.
pub const LOOKAHEAD: u32 = 64;

/// What a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// This slot's.
    Slot(u32),
    /// None that is known yet.
    Undecided,
}

/// The state of matching one step against its script.
#[derive(Clone, Debug)]
pub struct Matcher {
    taken: Vec<bool>,
    lanes: Vec<LaneState>,
}

#[derive(Clone, Debug, Default)]
struct LaneState {
    /// All slots before this turn are taken or left behind.
    head: u32,
    /// Requests since the last match that fitted nowhere: index in the record and size.
    undecided: Vec<(u32, u64)>,
    /// The last request, where it was not exactly what the head expected.
    unsure: Option<Unsure>,
}

/// A match that the next request confirms, or that was none.
#[derive(Clone, Copy, Debug)]
struct Unsure {
    turn: u32,
    request: u32,
    size: u64,
    /// Where the head was.
    head: u32,
}

impl Matcher {
    /// Nothing matched yet.
    pub fn new(script: &Script) -> Self {
        let lanes = vec![LaneState::default(); script.lanes.len()];
        Self { taken: vec![false; script.template.slots.len()], lanes }
    }

    /// A request came for exactly the next slot of its lane; for steps that were on script so far.
    pub fn take_next(&mut self, script: &Script, slot: u32) {
        self.taken[slot as usize] = true;
        self.lanes[script.template.slots[slot as usize].lane as usize].head = script.turn[slot as usize] + 1;
    }

    /// Finds the slot of a request of `size` bytes, which comes after `earlier` in the record. `tell` hears of each divergence,
    /// `known` of earlier requests of which it is known now that they were a slot's, or no slot's after all.
    pub fn find(
        &mut self,
        script: &Script,
        lane: u32,
        size: u64,
        earlier: &[Request],
        tell: &mut impl FnMut(Divergence),
        known: &mut impl FnMut(u32, Option<u32>),
    ) -> Match {
        let request = earlier.len() as u32;
        let Some(slots) = script.lanes.get(lane as usize) else {
            tell(Divergence::OtherLane { lane, actual: size });
            return Match::Undecided;
        };
        self.decide(script, slots, lane, earlier, tell, known);
        let head = self.skip_taken(slots, lane);
        let info = |turn: u32| &script.template.slots[slots[turn as usize] as usize];
        let end = slots.len() as u32;
        let exact = (head < end && info(head).seen == size).then_some(head);
        let found = exact.or_else(|| self.nearest(script, slots, head, size)).or_else(|| {
            // Nothing of that size is near: the slot at the head itself, with another size, if it can hold it.
            let near = (head < end).then(|| info(head))?;
            let holds = near.outlives || (size <= near.size && size >= near.seen / 2);
            holds.then_some(head)
        });
        let Some(turn) = found else {
            self.lanes[lane as usize].undecided.push((request, size));
            return Match::Undecided;
        };
        let slot = slots[turn as usize];
        self.taken[slot as usize] = true;
        let state = &mut self.lanes[lane as usize];
        state.unsure = Some(Unsure { turn, request, size, head });
        state.head = head.max(turn + 1);
        if exact.is_some() {
            self.confirm(script, slots, lane, tell, known);
        }
        Match::Slot(slot)
    }

    /// Whether the last match of the lane was one. It was not if the request is gone already though its slot would live on.
    fn decide(
        &mut self,
        script: &Script,
        slots: &[u32],
        lane: u32,
        earlier: &[Request],
        tell: &mut impl FnMut(Divergence),
        known: &mut impl FnMut(u32, Option<u32>),
    ) {
        let state = &mut self.lanes[lane as usize];
        let Some(Unsure { turn, request, size, head }) = state.unsure else { return };
        let slot = slots[turn as usize];
        if earlier[request as usize].freed && script.until[slot as usize] > turn + 1 {
            state.unsure = None;
            state.head = head;
            self.taken[slot as usize] = false;
            tell(Divergence::Extra { actual: size });
            known(request, None);
        } else {
            self.confirm(script, slots, lane, tell, known);
        }
    }

    /// The last match of the lane is one.
    fn confirm(
        &mut self,
        script: &Script,
        slots: &[u32],
        lane: u32,
        tell: &mut impl FnMut(Divergence),
        known: &mut impl FnMut(u32, Option<u32>),
    ) {
        let Some(Unsure { turn, size, head, .. }) = self.lanes[lane as usize].unsure.take() else { return };
        self.settle(script, slots, lane, head..turn, tell, known);
        let slot = slots[turn as usize];
        let info = &script.template.slots[slot as usize];
        let expected = info.seen;
        match size {
            _ if size > expected => tell(Divergence::Grew { slot, expected, actual: size }),
            // What outlives the step is served outside: smaller or at another turn, nothing is different.
            _ if info.outlives => {}
            _ if turn < head => tell(Divergence::Reordered { slot, turn: head }),
            _ if size < expected => tell(Divergence::Shrink { slot, expected, actual: size }),
            _ => {}
        }
    }

    /// The request that was found last could not be served: it never came.
    pub fn undo(&mut self, script: &Script, lane: u32, found: Match, request: u32) {
        let Some(state) = self.lanes.get_mut(lane as usize) else { return };
        let unsure = state.unsure.take_if(|unsure| unsure.request == request);
        match found {
            Match::Slot(slot) if let Some(unsure) = unsure => {
                self.taken[slot as usize] = false;
                state.head = unsure.head;
            }
            Match::Slot(slot) => {
                self.taken[slot as usize] = false;
                state.head = state.head.min(script.turn[slot as usize]);
            }
            Match::Undecided => state.undecided.retain(|(other, _)| *other != request),
        }
    }

    /// The step is over: what was never asked for is missing, what is undecided was the tail grown, or extra.
    pub fn finish(
        &mut self,
        script: &Script,
        all: &[Request],
        tell: &mut impl FnMut(Divergence),
        known: &mut impl FnMut(u32, Option<u32>),
    ) {
        for (lane, slots) in (0..).zip(&script.lanes) {
            self.decide(script, slots, lane, all, tell, known);
            let head = self.lanes[lane as usize].head;
            self.settle(script, slots, lane, head..slots.len() as u32, tell, known);
        }
        for (slot, taken) in (0..).zip(&self.taken) {
            if !taken {
                tell(Divergence::Missing { slot, expected: script.template.slots[slot as usize].seen });
            }
        }
    }

    fn skip_taken(&mut self, slots: &[u32], lane: u32) -> u32 {
        let state = &mut self.lanes[lane as usize];
        while slots.get(state.head as usize).is_some_and(|slot| self.taken[*slot as usize]) {
            state.head += 1;
        }
        state.head
    }

    /// The turn nearest to the head whose slot is not taken and was exactly that large; of two equally near, the later.
    fn nearest(&self, script: &Script, slots: &[u32], head: u32, size: u64) -> Option<u32> {
        let fits = |turn: u32| {
            let slot = slots[turn as usize] as usize;
            !self.taken[slot] && script.template.slots[slot].seen == size
        };
        (1..=LOOKAHEAD).find_map(|distance| {
            let ahead = head.checked_add(distance).filter(|turn| (*turn as usize) < slots.len() && fits(*turn));
            ahead.or_else(|| head.checked_sub(distance).filter(|turn| fits(*turn)))
        })
    }

    /// A request was found: what was undecided before it belongs to the slots it skipped, unless it is much smaller, and is extra
    /// otherwise.
    fn settle(
        &mut self,
        script: &Script,
        slots: &[u32],
        lane: u32,
        mut skipped: Range<u32>,
        tell: &mut impl FnMut(Divergence),
        known: &mut impl FnMut(u32, Option<u32>),
    ) {
        let state = &mut self.lanes[lane as usize];
        for (request, actual) in state.undecided.drain(..) {
            let own = skipped.by_ref().find(|turn| {
                let slot = slots[*turn as usize] as usize;
                !self.taken[slot] && actual >= script.template.slots[slot].seen / 2
            });
            match own {
                Some(turn) => {
                    let slot = slots[turn as usize];
                    self.taken[slot as usize] = true;
                    let expected = script.template.slots[slot as usize].seen;
                    // A smaller one follows one that grew: too late for its slot, but it is known now whose it was.
                    let grown = actual > expected;
                    let (grew, shrink) =
                        (Divergence::Grew { slot, expected, actual }, Divergence::Shrink { slot, expected, actual });
                    tell(if grown { grew } else { shrink });
                    known(request, Some(slot));
                }
                None => tell(Divergence::Extra { actual }),
            }
        }
    }
}
