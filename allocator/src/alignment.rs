//! The cheapest explanation of a few requests by the slots of a lane: matched, extra, or slots skipped.
//!
//! ```text
//!     turns    a   b   c   d   e        one row for each request, a cell for each turn that may come next; a row reaches
//!   start  0 . . .                      from BEHIND turns before the likeliest to AHEAD of it
//!   a      . 0 . .
//!   X      .   E                        down: the request is extra        EXTRA
//!   d      .       S S 0                right: slots are skipped          SKIP_FIRST, and SKIP for each
//!   e      .             0              down and right: it is the slot's  what the caller says for the pair
//! ```
//!
//! Alignment with affine gaps (Gotoh, 1982) in a band, a row at a time. The last row may be written again, since the next request tells
//! more about the one before it.

/// Of a request that no slot expects. Two requests that have the wrong size cost more than one that is extra.
pub const EXTRA: u32 = 20;
/// Of a slot that nobody asks for, where the one before it was asked for.
const SKIP_FIRST: u32 = 12;
/// Of each slot that nobody asks for.
const SKIP: u32 = 1;
/// More than any explanation costs: not possible.
pub const NEVER: u32 = 1 << 24;

/// Turns of a row before the likeliest, and after it.
const BEHIND: u32 = 32;
const AHEAD: u32 = 64;
const WIDTH: usize = (BEHIND + AHEAD + 1) as usize;

/// Where a cell's costs come from: whether the request is extra, and whether slots are skipped after it, of which the turn before is not
/// the first.
const IS_EXTRA: u8 = 1;
const SKIPPED: u8 = 2;
const SKIPPED_MORE: u8 = 4;

/// Requests from one turn on, and all explanations of them that are near the cheapest.
#[derive(Clone, Debug)]
pub struct Alignment {
    /// The turn that comes next before the first request, and how many there are.
    start: u32,
    end: u32,
    rows: Vec<Row>,
    /// Costs of the row before the last, and of the last.
    before: Costs,
    last: Costs,
    /// Whether the row before the last is still known.
    revisable: bool,
}

#[derive(Clone, Debug)]
struct Row {
    first: u32,
    from: Vec<u8>,
    /// The turn that comes next by the cheapest explanation.
    likeliest: u32,
}

/// The cost of each cell of a row.
#[derive(Clone, Debug, Default)]
struct Costs {
    first: u32,
    any: Vec<u32>,
    /// Of those that end with the request, and no slot skipped after it.
    asked: Vec<u32>,
}

/// How the cheapest explanation ends, as of the last request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The turn that comes next.
    pub next: u32,
    /// Whether the last request is that of the turn before it.
    pub matched: bool,
}

impl Alignment {
    /// No request yet; the lane has turns up to `end`, and `start` comes next.
    pub fn new(start: u32, end: u32) -> Self {
        let turns = (end - start).min(AHEAD) + 1;
        let any: Vec<u32> = (0..turns).map(skipping).collect();
        let last = Costs { first: start, asked: any.clone(), any };
        Self { start, end, rows: Vec::new(), before: Costs::default(), last, revisable: false }
    }

    /// Takes a request in; `cost` says what it costs to be that turn's.
    pub fn push(&mut self, cost: impl Fn(u32) -> u32) -> Ends {
        let likeliest = self.rows.last().map_or(self.start, |row| row.likeliest);
        std::mem::swap(&mut self.before, &mut self.last);
        let first = self.before.first.max(likeliest.saturating_sub(BEHIND));
        self.rows.push(Row { first, from: Vec::new(), likeliest });
        self.revisable = true;
        self.write(cost)
    }

    /// Writes the last row again; none where a later one was struck out.
    pub fn revise(&mut self, cost: impl Fn(u32) -> u32) -> Option<Ends> {
        self.revisable.then(|| self.write(cost))
    }

    /// Writes the last row.
    fn write(&mut self, cost: impl Fn(u32) -> u32) -> Ends {
        let row = self.rows.last_mut().expect("a row was pushed");
        let Costs { first, any, asked } = &mut self.last;
        *first = row.first;
        let width = ((self.end - *first) as usize + 1).min(WIDTH);
        any.clear();
        asked.clear();
        row.from.clear();
        let above = |turn: u32| self.before.any.get(turn.checked_sub(self.before.first)? as usize).copied();
        let mut skipped = NEVER;
        let mut cheapest = (NEVER, Ends { next: *first, matched: false });
        for next in *first..*first + width as u32 {
            let matched = next
                .checked_sub(1)
                .filter(|turn| *turn >= self.start)
                .map_or(NEVER, |turn| above(turn).map_or(NEVER, |cell| cell.saturating_add(cost(turn)).min(NEVER)));
            let extra = above(next).map_or(NEVER, |cell| (cell + EXTRA).min(NEVER));
            let mut from = 0;
            if let Some(left) = asked.last() {
                let opened = left + SKIP_FIRST;
                if skipped < opened {
                    from |= SKIPPED_MORE;
                }
                skipped = (skipped.min(opened) + SKIP).min(NEVER);
            }
            let ended = matched.min(extra);
            if extra < matched {
                from |= IS_EXTRA;
            }
            if skipped < ended {
                from |= SKIPPED;
            }
            if ended < cheapest.0 {
                cheapest = (ended, Ends { next, matched: matched <= extra });
            }
            asked.push(ended);
            any.push(ended.min(skipped));
            row.from.push(from);
        }
        row.likeliest = cheapest.1.next;
        cheapest.1
    }

    /// Strikes out the last request, for once: before another one comes, there is no second.
    pub fn pop(&mut self) {
        debug_assert!(self.revisable, "the row before the last is known");
        self.rows.pop();
        std::mem::swap(&mut self.before, &mut self.last);
        self.revisable = false;
    }

    /// For each request the turn whose it is, if any; what comes next before each; and what comes next in the end. With `over` no more
    /// requests come, so that all later turns are skipped.
    pub fn explanation(&self, over: bool) -> (Vec<Explained>, u32) {
        let likeliest = self.rows.last().map_or(self.start, |row| row.likeliest);
        let tail = |next: u32| if over { skipping(self.end - next) } else { 0 };
        let ends = (self.last.first..).zip(&self.last.asked).map(|(next, cost)| (cost + tail(next), next));
        let end = if over { ends.min().map_or(likeliest, |(_, next)| next) } else { likeliest };
        let mut next = end;
        let mut explained = Vec::with_capacity(self.rows.len());
        // The explanation ends with the last request; before the others slots may have been skipped.
        let mut asked = true;
        for row in self.rows.iter().rev() {
            let from = |next: u32| row.from[(next - row.first) as usize];
            if !asked && from(next) & SKIPPED != 0 {
                while from(next) & SKIPPED_MORE != 0 {
                    next -= 1;
                }
                next -= 1;
            }
            let is_extra = from(next) & IS_EXTRA != 0;
            next -= u32::from(!is_extra);
            explained.push(Explained { turn: (!is_extra).then_some(next), next });
            asked = false;
        }
        explained.reverse();
        (explained, end)
    }
}

/// What a request is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explained {
    /// The turn whose it is; none if it is extra.
    pub turn: Option<u32>,
    /// The turn that would have come next.
    pub next: u32,
}

fn skipping(turns: u32) -> u32 {
    if turns == 0 { 0 } else { SKIP_FIRST + SKIP * turns }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// The explanation of requests by turns, of single letters each.
    fn explain(turns: &str, requests: &str) -> String {
        let (turns, requests) = (turns.as_bytes(), requests.as_bytes());
        let mut alignment = Alignment::new(0, turns.len() as u32);
        for request in requests {
            let cost = |turn: u32| if turns[turn as usize] == *request { 0 } else { NEVER };
            let ends = alignment.push(cost);
            assert_eq!(alignment.revise(cost), Some(ends), "the same again changes nothing");
        }
        let (explained, end) = alignment.explanation(true);
        let each = explained.iter().map(|e| e.turn.map_or("-".to_owned(), |turn| turn.to_string()));
        format!("{} to {end}", each.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn the_cheapest_explanation_is_found() {
        assert_eq!(explain("abcdef", "abcdef"), "0 1 2 3 4 5 to 6");
        assert_eq!(explain("abcdef", "abXcdef"), "0 1 - 2 3 4 5 to 6");
        assert_eq!(explain("abcdef", "abef"), "0 1 4 5 to 6");
        assert_eq!(explain("abcdef", "ab"), "0 1 to 2");
        assert_eq!(explain("abcdef", "XYZ"), "- - - to 0");
        assert_eq!(explain("", "XY"), "- - to 0");
        // A repeat: the layers look alike, and one of them is left out or comes twice; which one is the same to all.
        assert_eq!(explain("abcabcabcz", "abcabcz"), "3 4 5 6 7 8 9 to 10");
        assert_eq!(explain("abcabcz", "abcabcabcz"), "- - - 0 1 2 3 4 5 6 to 7");
        // Long beyond the width of a row.
        let many: String = (0..800_u32).map(|i| char::from(b'a' + (i * i / 7 % 23) as u8)).collect();
        let found = explain(&many, &format!("{}X{}", &many[..400], &many[408..]));
        assert!(found.ends_with("797 798 799 to 800") && found.contains(" 399 - 408 "), "{found}");
    }

    /// All explanations, tried one by one.
    fn oracle(turns: &[u8], requests: &[u8], skipped: bool, cost: u32) -> u32 {
        let Some((request, others)) = requests.split_first() else {
            let rest = turns.len() as u32;
            return cost + if skipped { rest * SKIP } else { skipping(rest) };
        };
        let extra = oracle(turns, others, false, cost + EXTRA);
        let Some((turn, later)) = turns.split_first() else { return extra };
        let own = if turn == request { 0 } else { 15 };
        let matched = oracle(later, others, false, cost + own);
        let skip = oracle(later, requests, true, cost + SKIP + if skipped { 0 } else { SKIP_FIRST });
        extra.min(matched).min(skip)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// Of each request: its kind, and whether one came before the next that is struck out.
        #[test]
        fn no_explanation_is_cheaper(turns in vec(0..3_u8, 0..7), requests in vec((0..3_u8, any::<bool>()), 0..7)) {
            let own = |turn: u32, request: u8| if turns[turn as usize] == request { 0 } else { 15 };
            let mut alignment = Alignment::new(0, turns.len() as u32);
            for &(request, struck) in &requests {
                alignment.push(|turn| own(turn, request));
                if struck {
                    alignment.push(|_| 0);
                    alignment.pop();
                    prop_assert_eq!(alignment.revise(|_| 0), None, "the costs of the row before it are gone");
                }
            }
            let (explained, end) = alignment.explanation(true);
            // What the explanation says costs what it should.
            let requests: Vec<u8> = requests.iter().map(|(request, _)| *request).collect();
            let (mut cost, mut at) = (0, 0);
            for (request, e) in requests.iter().zip(&explained) {
                cost += skipping(e.next - at);
                cost += e.turn.map_or(EXTRA, |turn| own(turn, *request));
                at = e.next + u32::from(e.turn.is_some());
            }
            prop_assert_eq!(at, end, "{:?}", explained);
            cost += skipping(turns.len() as u32 - end);
            prop_assert_eq!(cost, oracle(&turns, &requests, false, 0), "{:?}", explained);
        }
    }
}
