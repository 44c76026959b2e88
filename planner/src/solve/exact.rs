//! Where the exact search looks: which capacities, by which orders, for how long.
//!
//! A tight capacity prunes most, so the lower bound is tried first; where that stays open, bisection between what is
//! refuted and what is found. Several orders search side by side: which one is quick differs from problem to problem by
//! orders of magnitude, and none is good at all. Each goes on where it stopped, with twice the nodes, until one decides.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::order::Order;
use super::race::race;
use super::search::{Ground, Search, Verdict};

/// Static orders of the exact search, tried side by side.
pub const SEARCH_ORDERS: [Order; 5] = ["TLE", "TAW", "TWA", "WAT", "LET"];

/// Nodes that each order visits before the next round, at first.
const FIRST_ROUND: u64 = 1000;

/// Rounds of fewer nodes are over before a thread would have begun.
const WORTH_A_THREAD: u64 = 2000;

/// The capacities that are left to look at, and what was found.
pub struct Exact<'a> {
    pub ground: &'a Ground<'a>,
    pub orders: &'a [Order],
    pub threads: usize,
    pub cancel: Option<&'a AtomicBool>,
    /// Nothing ends below.
    pub floor: u64,
    /// Something ends here.
    pub ceiling: u64,
    /// Offsets that end at the ceiling and the order that found them, once any was found here.
    pub best: Option<(Vec<u64>, Order)>,
    /// Nodes visited.
    pub nodes: u64,
}

impl Exact<'_> {
    /// Tries one capacity on so many nodes at most; afterwards `floor` or `ceiling` say what is known. Whether it was
    /// decided.
    pub fn probe(&mut self, capacity: u64, budget: u64) -> bool {
        let until = self.nodes + budget;
        let searches: Vec<Mutex<Search<'_>>> =
            self.orders.iter().map(|order| Mutex::new(Search::new(self.ground, order, capacity))).collect();
        let mut each = 0;
        while self.nodes < until && !self.is_cancelled() {
            let fair = (until - self.nodes).div_ceil(self.orders.len() as u64);
            let more = each.max(FIRST_ROUND).min(fair);
            each += more;
            let tries = race(
                if more < WORTH_A_THREAD { 1 } else { self.threads },
                self.cancel,
                searches.len(),
                |index, stop| {
                    let mut search = searches[index].lock().expect("no search panics");
                    let before = search.nodes();
                    (search.run(each, stop), search.nodes() - before)
                },
                |(verdict, _)| *verdict != Verdict::Spent,
            );
            for (order, (verdict, nodes)) in self.orders.iter().zip(tries) {
                self.nodes += nodes;
                match verdict {
                    Verdict::Spent => {}
                    Verdict::Found(offsets) => {
                        self.found(offsets, order);
                        return true;
                    }
                    Verdict::Refuted => {
                        self.floor = self.floor.max(capacity + 1);
                        return true;
                    }
                    // No order and no budget changes this answer.
                    Verdict::Exhausted => return false,
                }
            }
        }
        false
    }

    fn found(&mut self, offsets: Vec<u64>, order: Order) {
        let tops = offsets.iter().zip(&self.ground.part.size).map(|(offset, size)| offset + size);
        let top = tops.max().unwrap_or(0);
        if top < self.ceiling {
            (self.ceiling, self.best) = (top, Some((offsets, order)));
        }
    }

    /// Lowers the ceiling and raises the floor until they meet or so many nodes are spent: bisection, and again with more
    /// nodes for each capacity where that left some undecided.
    pub fn close(&mut self, budget: u64) {
        let until = self.nodes + budget;
        let mut each = (budget / 32).max(FIRST_ROUND);
        // Up to here all was tried in vain.
        let mut tried = self.floor;
        while self.floor < self.ceiling && self.nodes < until && !self.is_cancelled() {
            if tried >= self.ceiling {
                (tried, each) = (self.floor, each.saturating_mul(4));
            }
            let capacity = tried + (self.ceiling - tried) / 2;
            let capacity = capacity.min(self.ceiling - 1);
            if !self.probe(capacity, each.min(until - self.nodes)) {
                tried = capacity + 1;
            }
            tried = tried.max(self.floor);
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }
}
