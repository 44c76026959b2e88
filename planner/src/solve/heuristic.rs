//! The heuristics of the portfolio: ways to place all items of a part at once, without looking back.

use super::fit::{self, Rule};
use super::order::{self, Order};
use super::overlap::Overlap;
use super::race::Stop;
use super::skyline;
use crate::sweep::Partition;

/// A way to place all items of a part at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heuristic {
    /// Interval colouring, where all items have one size.
    Colour,
    /// The skyline dive, ties broken by an order.
    Dive(Order),
    /// An allocator with a free list, event by event.
    Replay(Rule),
    /// Into gaps, in an order.
    Fit(Order, Rule),
}

/// Where every dive is a matter of milliseconds: those that mostly reach the bound side by side, then the others.
pub const SMALL: [Heuristic; 6] = [
    Heuristic::Colour,
    Heuristic::Dive("AW"),
    Heuristic::Dive("TLE"),
    Heuristic::Dive("E"),
    Heuristic::Dive("ZB"),
    Heuristic::Dive("TAW"),
];

/// What is quick on any input and mostly reaches the bound.
pub const FIRST: [Heuristic; 3] = [Heuristic::Colour, Heuristic::Dive("AW"), Heuristic::Dive("E")];

/// Dives that sometimes look often: the first of them seldom.
pub const SECOND: [Heuristic; 3] = [Heuristic::Dive("ZB"), Heuristic::Dive("TLE"), Heuristic::Dive("TAW")];

/// What others ship, so that a plan is never worse than theirs: ggml and ONNX Runtime; TensorFlow Lite Micro; XLA.
pub const PROMISED: [Heuristic; 3] =
    [Heuristic::Replay(Rule::Best), Heuristic::Fit("ZI", Rule::First), Heuristic::Fit("ZLI", Rule::Best)];

/// What is worth a try where the bound was not reached.
pub const REST: [Heuristic; 6] = [
    Heuristic::Replay(Rule::First),
    Heuristic::Fit("ZB", Rule::First),
    Heuristic::Fit("A", Rule::First),
    Heuristic::Fit("B", Rule::First),
    Heuristic::Fit("B", Rule::Best),
    Heuristic::Fit("TLE", Rule::Best),
];

/// The one of [`SMALL`] and of [`FIRST`] that runs even when cancelled, so that there is an answer: cheap on any input.
pub const LAST_RESORT: usize = 1;

/// All of them.
pub fn all() -> impl Iterator<Item = Heuristic> {
    SMALL.into_iter().chain(PROMISED).chain(REST)
}

impl Heuristic {
    /// Offsets for all items, all ending below `ceiling`; `None` if that fails, it does not apply, or it was stopped.
    pub fn place<'o>(
        self,
        part: &Partition,
        overlap: impl FnOnce() -> &'o Overlap,
        ceiling: u64,
        stop: &Stop<'_>,
    ) -> Option<Vec<u64>> {
        match self {
            Self::Colour => fit::colour(part),
            Self::Dive(order) => skyline::dive(part, &order::ranks(part, order), ceiling, stop),
            Self::Replay(rule) => fit::replay(part, rule, ceiling, stop),
            Self::Fit(order, rule) => fit::fit(part, &order::sorted(part, order), rule, overlap(), ceiling, stop),
        }
    }

    /// Its name in [`Proof::strategy`](crate::Proof::strategy).
    pub fn name(self) -> String {
        let rule_name = |rule| match rule {
            Rule::First => "first-fit",
            Rule::Best => "best-fit",
        };
        match self {
            Self::Colour => "interval-colouring".to_owned(),
            Self::Dive(order) => format!("dive/{order}"),
            Self::Replay(rule) => format!("replay/{}", rule_name(rule)),
            Self::Fit(order, rule) => format!("{}/{order}", rule_name(rule)),
        }
    }
}

/// Every item above all before it: valid whatever the constraints.
pub fn pile(part: &Partition) -> Vec<u64> {
    let mut top = 0;
    (0..part.len())
        .map(|item| {
            let offset = part.lowest_fit(item, top);
            top = offset + part.size[item];
            offset
        })
        .collect()
}
