//! The portfolio: a problem in, the best placement within the budget out.
//!
//! ```text
//!   lane -> parts -> heuristics, raced -> local search -> exact search, raced -> placement + proof
//!                    \__ each stops at the lower bound, or at what another part needs anyway __/
//! ```
//!
//! Nothing here reads a clock, and threads never decide: strategies have numbers, those below the first one that reaches
//! its goal always run to their end, and the lowest number wins. So equal problem and options give equal placements on any
//! machine and any number of threads. Only [`Control::cancel`] can cut that short, and then the proof says so.

mod culprits;
mod eject;
mod exact;
mod fit;
mod heuristic;
mod improve;
mod keep;
mod ladder;
mod neighbours;
mod order;
mod overlap;
mod race;
mod search;
mod skyline;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use terrace_profiles::units::Offset;

use crate::bound::lower_bound;
use crate::error::Error;
use crate::options::{Effort, Options};
use crate::plan::Proof;
use crate::problem::{Placement, Problem};
use crate::sweep::{self, Partition};
pub use culprits::{Culprits, culprits};
use exact::{Exact, SEARCH_ORDERS};
use heuristic::{Heuristic, pile};
pub use keep::solve_keeping;
use neighbours::Neighbours;
use overlap::Overlap;
use race::{Stop, race};
use search::Ground;

/// How a solve is run, as opposed to what is asked: none of it changes the answer, unless `cancel` is set.
#[derive(Clone, Copy, Default)]
pub struct Control<'a> {
    /// Threads to use; 0 means one.
    pub threads: usize,
    /// Set it from outside to stop soon with the best placement so far.
    pub cancel: Option<&'a AtomicBool>,
    /// Called now and then with what is being done.
    pub progress: Option<&'a (dyn Fn(&str) + Sync)>,
}

/// A placement and what is known about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solved {
    /// The offsets.
    pub placement: Placement,
    /// Their proof.
    pub proof: Proof,
    /// Whether a capacity was asked for that nothing can meet, and that is proven.
    pub refuted: bool,
    /// The lanes and where each begins.
    bases: Vec<(u32, u64)>,
}

/// Looks of the local search at other items that count as one node.
const VISITS_PER_NODE: u64 = 64;

/// What the local search may spend where someone waits: nodes, and looks for each item.
const QUICK_NODES: u64 = 2000;
const QUICK_VISITS_PER_ITEM: u64 = 128;

/// Up to so many items every dive is a matter of milliseconds.
const SMALL_ITEMS: usize = 1 << 14;

/// Beyond so many items the local search does more in the time of one more heuristic.
const LARGE_ITEMS: usize = 1 << 16;

/// Larger parts are left to the heuristics and the local search.
const MOST_SEARCHED_ITEMS: usize = 4096;

/// One member of the portfolio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strategy {
    Heuristic(Heuristic),
    Ejection,
    Search(order::Order),
    /// The exact search by all its orders and nothing else: quick to prove, poor where it cannot.
    Prove,
}

fn strategies() -> impl Iterator<Item = Strategy> {
    let heuristics = heuristic::all().map(Strategy::Heuristic);
    heuristics.chain([Strategy::Ejection]).chain(SEARCH_ORDERS.into_iter().map(Strategy::Search))
}

/// The names of all strategies, as they appear in [`Proof::strategy`].
pub fn strategy_names() -> Vec<String> {
    strategies().map(Strategy::name).collect()
}

/// The best placement within the budget.
pub fn solve(problem: &Problem, options: &Options, control: &Control<'_>) -> Result<Solved, Error> {
    let solved = portfolio(problem, None, options, control)?;
    Ok(solved.expect("the portfolio ends in a pile, which always has an answer"))
}

/// What one strategy makes of a problem on its own; `None` if it gives up on it, as those that need a list of pairs do on
/// large problems, or if it is not one of [`strategy_names`]. For tests and benchmarks that look at each.
pub fn solve_with(
    strategy: &str,
    problem: &Problem,
    options: &Options,
    control: &Control<'_>,
) -> Result<Option<Solved>, Error> {
    match strategies().find(|known| known.name() == strategy) {
        Some(known) => portfolio(problem, Some(known), options, control),
        None => Ok(None),
    }
}

fn portfolio(
    problem: &Problem,
    only: Option<Strategy>,
    options: &Options,
    control: &Control<'_>,
) -> Result<Option<Solved>, Error> {
    problem.validate()?;
    let mut offsets = vec![0_u64; problem.buffers.len()];
    let mut proof = Proof { optimal: true, strategy: "none".to_owned(), nodes: 0, interrupted: false };
    for (buffer, offset) in problem.buffers.iter().zip(&mut offsets) {
        *offset = buffer.fixed.map_or(0, Offset::get);
    }
    let (mut refuted, mut bases) = (false, Vec::new());
    // Lanes share nothing, so each lies above those before it; the one with fixed offsets must lie at the base.
    let mut lanes: Vec<u32> = problem.buffers.iter().map(|buffer| buffer.lane).collect();
    lanes.sort_unstable();
    lanes.dedup();
    let pinned = |lane: &u32| !problem.buffers.iter().any(|buffer| buffer.lane == *lane && buffer.fixed.is_some());
    lanes.sort_by_key(|lane| (pinned(lane), *lane));
    let stacked = lanes.len() > 1;
    let (mut base, mut widest) = (0_u64, 0);
    for lane in lanes {
        let coarsest = problem.buffers.iter().filter(|b| b.lane == lane).map(|b| b.align.get()).max().unwrap_or(1);
        let aligned = base.next_multiple_of(coarsest);
        // A hole between lanes is not part of either lane's bound.
        proof.optimal &= aligned == base;
        base = aligned;
        bases.push((lane, base));
        let room = options.capacity.map(|capacity| capacity.get().saturating_sub(base));
        let lane = Lane { problem, lane, room, only, options, control };
        let Some(solved) = lane.solve(&mut offsets, base) else { return Ok(None) };
        // Above a lane that might be smaller there might be more room.
        refuted |= solved.refuted && proof.optimal;
        proof.optimal &= solved.optimal;
        proof.nodes += solved.nodes;
        proof.interrupted |= solved.interrupted;
        if solved.makespan > widest {
            widest = solved.makespan;
            proof.strategy = solved.strategy;
        }
        base += solved.makespan;
    }
    if stacked && (!problem.reserved.is_empty() || problem.buffers.iter().any(|buffer| buffer.fixed.is_some())) {
        // Under what is fixed or reserved there may be bytes that its lane never uses and another could.
        proof.optimal &= base <= lower_bound(problem).bytes.get();
    }
    let offsets = offsets.into_iter().map(|offset| Offset::new(offset).expect("validate() bounds every offset"));
    refuted |= proof.optimal && options.capacity.is_some_and(|capacity| base > capacity.get());
    Ok(Some(Solved { placement: Placement { offsets: offsets.collect() }, proof, refuted, bases }))
}

/// The buffers of one lane, to be placed from a base.
struct Lane<'a> {
    problem: &'a Problem,
    lane: u32,
    /// Bytes left under the capacity.
    room: Option<u64>,
    /// The one strategy to use, or the portfolio.
    only: Option<Strategy>,
    options: &'a Options,
    control: &'a Control<'a>,
}

/// What became of a lane; bytes above its base.
struct Outcome {
    makespan: u64,
    optimal: bool,
    /// Whether the room is proven too small.
    refuted: bool,
    strategy: String,
    nodes: u64,
    interrupted: bool,
}

impl Lane<'_> {
    fn solve(&self, offsets: &mut [u64], base: u64) -> Option<Outcome> {
        let (strategy, nodes, interrupted) = ("none".to_owned(), 0, false);
        let (makespan, optimal) = (self.floor(), true);
        let refuted = self.room.is_some_and(|room| makespan > room);
        let mut lane = Outcome { makespan, optimal, refuted, strategy, nodes, interrupted };
        for part in sweep::partitions(self.problem, self.lane, base) {
            // Nothing is gained below what an earlier part, or a single buffer, needs anyway.
            let goal = part.bound.max(lane.makespan / part.unit);
            let room = self.room.map(|room| room / part.unit);
            let mut attempt = Attempt::new(&part, goal, room, self.options, self.control);
            match self.only {
                None => attempt.run(),
                Some(strategy) => attempt.run_only(strategy)?,
            }
            let makespan = attempt.makespan * part.unit;
            for (item, &id) in part.ids.iter().enumerate() {
                offsets[id as usize] = base + attempt.offsets[item] * part.unit;
            }
            lane.nodes += attempt.nodes;
            lane.refuted |= attempt.refuted;
            lane.interrupted |= attempt.interrupted;
            if makespan > lane.makespan || lane.strategy == "none" {
                // The part that needs most decides: the others could not make the lane smaller.
                lane.optimal = attempt.optimal;
                lane.strategy = attempt.strategy;
                lane.makespan = lane.makespan.max(makespan);
            }
        }
        Some(lane)
    }

    /// What single buffers need: the end of what is fixed, the size of what is never in use.
    fn floor(&self) -> u64 {
        let own = self.problem.buffers.iter().filter(|buffer| buffer.lane == self.lane);
        own.map(|buffer| buffer.fixed.map_or(0, Offset::get) + buffer.size.get()).max().unwrap_or(0)
    }
}

/// The state of one part while strategies are tried on it.
struct Attempt<'a> {
    part: &'a Partition,
    goal: u64,
    room: Option<u64>,
    options: &'a Options,
    control: &'a Control<'a>,
    overlap: OnceLock<Overlap>,
    neighbours: OnceLock<Option<Neighbours>>,
    offsets: Vec<u64>,
    makespan: u64,
    optimal: bool,
    refuted: bool,
    strategy: String,
    nodes: u64,
    interrupted: bool,
}

impl<'a> Attempt<'a> {
    fn new(part: &'a Partition, goal: u64, room: Option<u64>, options: &'a Options, control: &'a Control<'a>) -> Self {
        let (neighbours, offsets, strategy) = (OnceLock::new(), Vec::new(), String::new());
        let (makespan, optimal, nodes, interrupted) = (u64::MAX, false, 0, false);
        Self {
            part,
            goal,
            room,
            options,
            control,
            overlap: OnceLock::new(),
            neighbours,
            offsets,
            makespan,
            optimal,
            refuted: room.is_some_and(|room| part.bound > room),
            strategy,
            nodes,
            interrupted,
        }
    }

    fn run(&mut self) {
        let items = self.part.len();
        self.heuristics(if items <= SMALL_ITEMS { &heuristic::SMALL } else { &heuristic::FIRST });
        let budget = self.options.budget_nodes;
        let quick = budget.min(QUICK_NODES + items as u64 * QUICK_VISITS_PER_ITEM / VISITS_PER_NODE);
        match self.options.effort {
            Effort::Quick => {
                if items > SMALL_ITEMS && items <= LARGE_ITEMS {
                    self.heuristics(&heuristic::SECOND[..1]);
                }
                self.improve(quick);
            }
            Effort::Full => {
                // What the search finds at once needs no improving.
                self.search(&SEARCH_ORDERS, true);
                self.improve(quick);
                // After a first improvement what is no better is soon given up.
                if items > SMALL_ITEMS && items <= LARGE_ITEMS {
                    self.heuristics(&heuristic::SECOND);
                }
                self.heuristics(&heuristic::PROMISED);
                if items <= LARGE_ITEMS {
                    self.heuristics(&heuristic::REST);
                }
                // Where the exact search can still do much, it gets the greater part.
                let share = if items <= MOST_SEARCHED_ITEMS { budget / 4 } else { budget };
                self.improve(share.saturating_sub(quick));
                self.search(&SEARCH_ORDERS, false);
            }
        }
        self.close();
    }

    /// `None` if the strategy gives up.
    fn run_only(&mut self, strategy: Strategy) -> Option<()> {
        match strategy {
            Strategy::Heuristic(heuristic) => {
                let offsets = heuristic.place(self.part, || self.overlap(), u64::MAX, &Stop::never())?;
                self.nodes += self.part.len() as u64;
                self.keep(self.top(&offsets), offsets, || strategy.name());
            }
            Strategy::Ejection => {
                self.pile_up();
                self.improve(self.options.budget_nodes);
            }
            Strategy::Search(order) => {
                self.pile_up();
                self.search(&[order], true);
                self.search(&[order], false);
            }
            Strategy::Prove => {
                self.pile_up();
                for first in [true, false] {
                    if !self.refuted {
                        self.search(&SEARCH_ORDERS, first);
                    }
                }
            }
        }
        self.close();
        (self.offsets.len() == self.part.len()).then_some(())
    }

    /// Some answer, for what can only lower one.
    fn pile_up(&mut self) {
        let pile = pile(self.part);
        self.keep(self.top(&pile), pile, || "pile".to_owned());
    }

    fn close(&mut self) {
        self.optimal |= self.makespan <= self.goal;
        self.interrupted = self.cancelled() && !self.optimal;
    }

    fn heuristics(&mut self, heuristics: &[Heuristic]) {
        if self.is_enough() {
            return;
        }
        self.say("trying orders");
        // What is no better than the best before them is given up early.
        let (ceiling, first) = (self.makespan, self.offsets.is_empty());
        let tries = race(
            self.threads(),
            self.control.cancel,
            heuristics.len(),
            |index, stop| {
                // Never stopped: there must be some answer.
                let never = Stop::never();
                let stop = if first && index == heuristic::LAST_RESORT { &never } else { stop };
                let offsets = heuristics[index].place(self.part, || self.overlap(), ceiling, stop);
                offsets.map(|offsets| (self.top(&offsets), offsets))
            },
            |found| found.as_ref().is_some_and(|(makespan, _)| *makespan <= self.goal),
        );
        for (heuristic, found) in heuristics.iter().zip(tries) {
            self.nodes += self.part.len() as u64;
            if let Some((makespan, offsets)) = found {
                self.keep(makespan, offsets, || heuristic.name());
            }
        }
        if self.offsets.len() != self.part.len() {
            // Every heuristic gave up or was stopped: items in a pile always fit.
            self.pile_up();
        }
    }

    /// Local search for about so many nodes.
    fn improve(&mut self, nodes: u64) {
        if self.is_enough() || nodes == 0 {
            return;
        }
        self.say("improving");
        let budget = nodes.saturating_mul(VISITS_PER_NODE);
        // With a capacity only that is asked for.
        let goal = self.room.map_or(self.goal, |room| room.max(self.goal));
        let mut best = (self.makespan, std::mem::take(&mut self.offsets));
        let (part, threads, cancel) = (self.part, self.threads(), self.control.cancel);
        let visits = improve::improve(part, self.overlap(), goal, budget, threads, cancel, &mut best);
        self.nodes += visits / VISITS_PER_NODE;
        let better = best.0 < self.makespan;
        (self.makespan, self.offsets) = best;
        if better {
            self.strategy = Strategy::Ejection.name();
        }
    }

    /// The exact search by these orders, first at the goal, then (unless `first`) wherever the answer may be.
    fn search(&mut self, orders: &[order::Order], first: bool) {
        if self.part.len() > MOST_SEARCHED_ITEMS || self.is_enough() {
            return;
        }
        let Some(ground) = self.neighbours().and_then(|neighbours| Ground::new(self.part, neighbours)) else { return };
        self.say("searching");
        let (floor, ceiling, cancel) = (self.goal, self.makespan, self.control.cancel);
        let (threads, best, nodes) = (self.control.threads, None, 0);
        let mut exact = Exact { ground: &ground, orders, threads, cancel, floor, ceiling, best, nodes };
        let budget = self.options.budget_nodes;
        let budget = if first { budget / 4 } else { budget - budget / 4 };
        match self.room.filter(|room| *room >= self.goal) {
            // With a capacity only that is asked for; it may be refuted where the goal alone would be too hard.
            Some(room) => _ = exact.probe(room, budget),
            None if first => _ = exact.probe(self.goal, budget),
            None => exact.close(budget),
        }
        let Exact { floor, best, nodes, .. } = exact;
        self.nodes += nodes;
        self.refuted |= self.room.is_some_and(|room| room >= self.goal && floor > room);
        if let Some((offsets, order)) = best {
            self.keep(self.top(&offsets), offsets, || Strategy::Search(order).name());
        }
        self.goal = self.goal.max(floor);
    }

    /// Whether the best so far need not get better: nothing can, or it fits where that is all that was asked.
    fn is_enough(&self) -> bool {
        self.makespan <= self.goal || self.room.is_some_and(|room| self.makespan <= room)
    }

    fn threads(&self) -> usize {
        // Threads cost more than small parts do.
        if self.part.len() < 512 { 1 } else { self.control.threads }
    }

    fn overlap(&self) -> &Overlap {
        self.overlap.get_or_init(|| Overlap::new(self.part))
    }

    fn neighbours(&self) -> Option<&Neighbours> {
        self.neighbours.get_or_init(|| Neighbours::new(self.part)).as_ref()
    }

    fn keep(&mut self, makespan: u64, offsets: Vec<u64>, strategy: impl Fn() -> String) {
        if makespan < self.makespan {
            (self.makespan, self.offsets, self.strategy) = (makespan, offsets, strategy());
        }
    }

    fn top(&self, offsets: &[u64]) -> u64 {
        offsets.iter().zip(&self.part.size).map(|(offset, size)| offset + size).max().unwrap_or(0)
    }

    fn cancelled(&self) -> bool {
        self.control.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    fn say(&self, what: &str) {
        if let Some(progress) = self.control.progress {
            progress(&format!("{what}: {} buffers in {} sections", self.part.len(), self.part.load.len()));
        }
    }
}

impl Strategy {
    fn name(self) -> String {
        match self {
            Self::Heuristic(heuristic) => heuristic.name(),
            Self::Ejection => "ejection".to_owned(),
            Self::Search(order) => format!("search/{order}"),
            Self::Prove => "search".to_owned(),
        }
    }
}
