//! What follows from a placement before anything else is placed: bounds under unplaced items, and dead ends.
//!
//! The *clock* of a search is the (offset, rank) of the last item placed; whatever comes later has a higher one. Two rules
//! follow, each with a witness that is remembered so that nothing is looked at twice while it holds:
//!
//! - **Support.** An unplaced item whose own lowest offset the clock has passed does not lie there in any canonical
//!   solution below: something still unplaced will lie under it. So it lies at or above the lowest top that one of its
//!   unplaced neighbours can have; the witness is that neighbour.
//! - **First in a section.** What is left in a section must begin at or below its latest level. If no unplaced item can,
//!   this is a dead end; if only one can, it lies below all others there, which rise above its lowest top. The witnesses
//!   are two items that can.

use super::state::State;

/// The (offset, rank + 1) of the last item placed; (0, 0) at the start.
pub type Clock = (i64, u32);

/// The remembered witnesses. Each is tested before it is trusted, so they need no undo.
pub struct Inference {
    support: Vec<u32>,
    first: Vec<[u32; 2]>,
}

impl Inference {
    pub fn new(state: &State<'_>) -> Self {
        Self { support: (0..state.ground.len() as u32).collect(), first: vec![[0, 0]; state.ground.sections()] }
    }

    /// Applies both rules to a group of unplaced items and the sections they lie in; `false` at a dead end.
    pub fn holds(
        &mut self,
        state: &mut State<'_>,
        group: &[u32],
        sections: std::ops::Range<u32>,
        clock: Clock,
    ) -> bool {
        if state.ground.solid {
            for &item in group {
                let passed = state.low[item as usize] <= clock.0
                    && (state.low[item as usize], state.rank[item as usize] + 1) <= clock;
                if passed && !self.supported(state, item as usize, clock.0) {
                    return false;
                }
            }
        }
        sections.into_iter().all(|section| self.can_begin(state, section as usize, clock.0))
    }

    fn supported(&mut self, state: &mut State<'_>, item: usize, offset: i64) -> bool {
        let top = |state: &State<'_>, other: usize| state.bound[other].max(offset) + state.ground.size[other];
        let known = self.support[item] as usize;
        if !state.placed[known] && known != item && top(state, known) <= state.bound[item] {
            return true;
        }
        let (mut lowest, mut witness) = (i64::MAX, None);
        for &other in state.ground.neighbours.of(item) {
            if !state.placed[other as usize] && top(state, other as usize) < lowest {
                (lowest, witness) = (top(state, other as usize), Some(other));
            }
        }
        // Without a neighbour left to lie on it would have to lie where it no longer may.
        let Some(witness) = witness else { return false };
        self.support[item] = witness;
        state.raise(item, lowest)
    }

    fn can_begin(&mut self, state: &mut State<'_>, section: usize, offset: i64) -> bool {
        if state.left[section] == 0 {
            return true;
        }
        let latest = state.latest[section];
        if offset > latest {
            return false;
        }
        let can = |state: &State<'_>, item: u32| !state.placed[item as usize] && state.bound[item as usize] <= latest;
        let [one, two] = self.first[section];
        if one != two && can(state, one) && can(state, two) {
            return true;
        }
        let here = state.ground.in_section(section);
        let mut able = here.iter().copied().filter(|&item| can(state, item));
        let Some(one) = able.next() else { return false };
        if let Some(two) = able.next() {
            self.first[section] = [one, two];
            return true;
        }
        if !state.ground.solid {
            return true;
        }
        let top = state.bound[one as usize] + state.ground.size[one as usize];
        here.iter().all(|&item| item == one || state.placed[item as usize] || state.raise(item as usize, top))
    }
}
