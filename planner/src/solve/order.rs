//! Orders: who comes first when several could.
//!
//! An order is a word of letters, compared from the left. `T`: the greatest load over the item's sections (the tightest
//! first); `W`: width, the number of its sections; `A`: area, size times width; `L`: life, the number of its ticks; `E`:
//! extent, size times life; `Z`: size; each larger first. `B`: birth, earlier first; `I`: index in the problem,
//! lower first. Ties go to the earlier birth.
//!
//! Counting sections weighs a life by how often the set of live buffers changes, counting ticks by time: on real traces
//! now one, now the other reaches the lower bound (ResNet-50 and synth-10k want `TLE`, PanGu either, S_1 `E`).

use crate::sweep::Partition;

/// A word of the letters above.
pub type Order = &'static str;

/// The rank of each item: 0 comes first.
pub fn ranks(part: &Partition, order: Order) -> Vec<u32> {
    let sorted = sorted(part, order);
    let mut ranks = vec![0; sorted.len()];
    for (rank, &item) in (0..).zip(&sorted) {
        ranks[item as usize] = rank;
    }
    ranks
}

/// The items in that order.
pub fn sorted(part: &Partition, order: Order) -> Vec<u32> {
    let columns: Vec<Vec<u64>> = order.bytes().map(|letter| column(part, letter)).collect();
    let mut items: Vec<u32> = (0..part.len() as u32).collect();
    // Stable, and items are in order of birth.
    items.sort_by(|&a, &b| {
        let (a, b) = (a as usize, b as usize);
        columns.iter().map(|column| column[b].cmp(&column[a])).find(|c| c.is_ne()).unwrap_or(std::cmp::Ordering::Equal)
    });
    items
}

/// What one letter compares; larger comes first.
pub fn column(part: &Partition, letter: u8) -> Vec<u64> {
    let items = 0..part.len();
    match letter {
        b'T' => tightness(part),
        b'W' => items.map(|item| width(part, item)).collect(),
        b'A' => items.map(|item| area(part, item)).collect(),
        b'L' => part.ticks.clone(),
        b'E' => items.map(|item| part.size[item].saturating_mul(part.ticks[item])).collect(),
        b'Z' => part.size.clone(),
        b'I' => items.map(|item| u64::from(u32::MAX - part.ids[item])).collect(),
        b'B' => items.map(|item| u64::from(u32::MAX - part.first[item])).collect(),
        other => unreachable!("'{}' is not a letter of an order", char::from(other)),
    }
}

fn width(part: &Partition, item: usize) -> u64 {
    part.shape(item).map(|rect| u64::from(rect.last - rect.first)).sum()
}

fn area(part: &Partition, item: usize) -> u64 {
    part.shape(item)
        .map(|rect| (rect.to - rect.from).saturating_mul(u64::from(rect.last - rect.first)))
        .fold(0, u64::saturating_add)
}

/// The greatest load over each item's sections, by a table of maxima over runs of 2^k sections.
fn tightness(part: &Partition) -> Vec<u64> {
    let mut levels = vec![part.load.clone()];
    while 1 << levels.len() <= part.load.len() {
        let (last, half) = (levels.last().expect("one level at least"), 1 << (levels.len() - 1));
        levels.push(last.iter().zip(&last[half..]).map(|(a, b)| *a.max(b)).collect());
    }
    let greatest = |first: usize, last: usize| {
        let level = (last - first).ilog2() as usize;
        levels[level][first].max(levels[level][last - (1 << level)])
    };
    let over_shape = |item| part.shape(item).map(|r| greatest(r.first as usize, r.last as usize)).max().unwrap_or(0);
    (0..part.len()).map(over_shape).collect()
}
