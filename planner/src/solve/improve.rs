//! Local search: two ejectors side by side that share what they find.
//!
//! Both work for an equal share of work, then the better placement becomes the one that both must beat. Who works on which
//! thread changes nothing: the shares are counted in work, not in time, and of equal placements the first ejector's counts.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::eject::{Ejector, Style, Weight};
use super::overlap::Overlap;
use super::race::{Stop, race};
use crate::sweep::Partition;

/// What the ejectors are like.
const STYLES: [Style; 2] =
    [Style { seed: 1, weight: Weight::Size, greed: 90 }, Style { seed: 2, weight: Weight::Area, greed: 97 }];

/// Work of one ejector until it hears of the other: about a hundredth of a second.
const SHARE: u64 = 1 << 19;

/// Improves `best` (a complete placement and where it ends) until it ends at `goal` or about so much work is done. Returns
/// the work.
pub fn improve(
    part: &Partition,
    overlap: &Overlap,
    goal: u64,
    budget: u64,
    threads: usize,
    cancel: Option<&AtomicBool>,
    best: &mut (u64, Vec<u64>),
) -> u64 {
    let ejectors = STYLES.map(|style| Mutex::new((Ejector::new(part, overlap, style), (u64::MAX, Vec::new()))));
    let mut spent = 0;
    while best.0 > goal && spent < budget && !Stop::when(cancel).now() {
        // Longer records want more between two talks: to hear costs a look at every item.
        let share = SHARE.max(16 * part.len() as u64).min((budget - spent).div_ceil(STYLES.len() as u64));
        let (known, placement) = (best.0, &best.1);
        let work = race(
            threads,
            cancel,
            ejectors.len(),
            |index, stop| {
                let (ejector, own) = &mut *ejectors[index].lock().expect("no ejector panics");
                if ejector.ceiling() >= known {
                    ejector.start(placement, known, goal);
                } else if ejector.is_stuck() {
                    ejector.relent(placement, known, goal);
                }
                own.0 = known;
                ejector.run(goal, share, own, stop)
            },
            |_| false,
        );
        spent += work.iter().sum::<u64>();
        for ejector in &ejectors {
            let (_, own) = &mut *ejector.lock().expect("no ejector panics");
            if own.0 < best.0 {
                std::mem::swap(best, own);
            }
        }
    }
    spent
}
