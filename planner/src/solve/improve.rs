//! Local search over orders: the squeaky wheel.
//!
//! First fit depends only on the order. Whatever ends above the target was placed too late, so it moves forward and all is
//! placed again; the best placement seen is kept. (D. E. Joslin and D. P. Clements, "Squeaky Wheel Optimization", 1999.)

use super::fit::{Rule, fit};
use super::neighbours::Neighbours;
use super::order;
use super::race::Stop;
use crate::sweep::Partition;

/// Rounds without a better placement after which the priorities start afresh from another order.
const PATIENCE: u32 = 40;

/// Orders to start from.
const STARTS: [order::Order; 3] = ["Z", "A", "TAW"];

/// The best placement found within `budget` visits of placed neighbours, and how many it made.
pub fn squeaky_wheel(
    part: &Partition,
    neighbours: &Neighbours,
    target: u64,
    budget: u64,
    stop: &Stop<'_>,
) -> (Option<Vec<u64>>, u64) {
    let round = part.len() as u64 + 2 * neighbours.pairs() as u64;
    let (mut nodes, mut best): (u64, Option<(u64, Vec<u64>)>) = (0, None);
    'starts: for start in STARTS.iter().cycle() {
        let sorted = order::sorted(part, start);
        let mut priority = vec![0_u64; part.len()];
        for (place, &item) in sorted.iter().rev().enumerate() {
            priority[item as usize] = 1024 * (place as u64 + 1);
        }
        let (mut own_best, mut waited) = (u64::MAX, 0);
        while waited < PATIENCE {
            if nodes + round > budget {
                break 'starts;
            }
            nodes += round;
            let mut items = sorted.clone();
            items.sort_by_key(|&item| std::cmp::Reverse(priority[item as usize]));
            let Some(offsets) = fit(part, &items, Rule::First, neighbours, stop) else { break 'starts };
            let top = |item: usize| offsets[item] + part.size[item];
            let makespan = (0..part.len()).map(top).max().unwrap_or(0);
            waited = if makespan < own_best { 0 } else { waited + 1 };
            own_best = own_best.min(makespan);
            let late: Vec<usize> = (0..part.len()).filter(|&item| top(item) > target).collect();
            for item in late {
                priority[item] = priority[item].saturating_add(priority[item] / 8 + 1024);
            }
            if best.as_ref().is_none_or(|(known, _)| makespan < *known) {
                best = Some((makespan, offsets));
            }
            if makespan <= target {
                break 'starts;
            }
        }
    }
    (best.map(|(_, offsets)| offsets), nodes)
}
