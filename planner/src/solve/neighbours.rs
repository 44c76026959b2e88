//! Which items meet in time: the interference pairs, listed where that pays and refused where it would be quadratic.

use crate::sweep::Partition;

/// Most pairs that are listed: 64 MiB of indices.
const MOST_PAIRS: u64 = 8 << 20;

/// For each item the items it may not share bytes with, ascending.
pub struct Neighbours {
    start: Vec<u32>,
    items: Vec<u32>,
    /// For each entry of `items` how far above the item's offset the other must lie, if it lies above; only where some
    /// item has gaps, otherwise the item's size.
    rise: Option<Vec<u64>>,
    /// Pairs that are here whether or not they meet in time, the smaller first, ascending.
    apart: Vec<(u32, u32)>,
}

impl Neighbours {
    /// All pairs, or `None` if there are more than [`MOST_PAIRS`].
    pub fn new(part: &Partition) -> Option<Self> {
        let mut pairs = Vec::new();
        let most = MOST_PAIRS.saturating_sub(part.apart.len() as u64);
        overlapping_hulls(part, most, |a, b| {
            if part.is_solid()
                || part.shape(a as usize).any(|own| part.shape(b as usize).any(|other| own.meets(&other)))
            {
                pairs.push((a, b));
            }
        })?;
        let mut apart: Vec<(u32, u32)> = part.apart.iter().map(|&(a, b)| (a.min(b), a.max(b))).collect();
        apart.sort_unstable();
        pairs.extend(&apart);
        pairs.sort_unstable();
        pairs.dedup();
        Some(Self::from_pairs(part, &pairs, apart))
    }

    fn from_pairs(part: &Partition, pairs: &[(u32, u32)], apart: Vec<(u32, u32)>) -> Self {
        let mut start = vec![0_u32; part.len() + 1];
        for &(a, b) in pairs {
            start[a as usize + 1] += 1;
            start[b as usize + 1] += 1;
        }
        for item in 0..part.len() {
            start[item + 1] += start[item];
        }
        let mut next = start.clone();
        let mut items = vec![0; 2 * pairs.len()];
        // Ascending pairs fill each list in ascending order: first the smaller partners, then the larger.
        for &(a, b) in pairs {
            for (from, to) in [(a, b), (b, a)] {
                items[next[from as usize] as usize] = to;
                next[from as usize] += 1;
            }
        }
        for item in 0..part.len() {
            items[start[item] as usize..start[item + 1] as usize].sort_unstable();
        }
        let mut neighbours = Self { start, items, rise: None, apart };
        if !part.is_solid() {
            let rises = (0..part.len()).flat_map(|item| {
                let neighbours = &neighbours;
                neighbours.of(item).iter().map(move |&other| neighbours.rise(part, item, other as usize))
            });
            neighbours.rise = Some(rises.collect());
        }
        neighbours
    }

    /// The neighbours of an item.
    pub fn of(&self, item: usize) -> &[u32] {
        &self.items[self.start[item] as usize..self.start[item + 1] as usize]
    }

    /// The neighbours of an item, each with how far above the item's offset it must lie if it lies above.
    pub fn with_rise<'a>(&'a self, part: &'a Partition, item: usize) -> impl Iterator<Item = (u32, u64)> + 'a {
        let range = self.start[item] as usize..self.start[item + 1] as usize;
        range.map(move |entry| (self.items[entry], self.rise.as_ref().map_or(part.size[item], |rise| rise[entry])))
    }

    /// Whether the two share no byte even where they do not meet in time.
    pub fn are_apart(&self, item: usize, other: usize) -> bool {
        let pair = (item.min(other) as u32, item.max(other) as u32);
        !self.apart.is_empty() && self.apart.binary_search(&pair).is_ok()
    }

    /// How far above `item` its neighbour `other` must lie so that nothing in use meets.
    fn rise(&self, part: &Partition, item: usize, other: usize) -> u64 {
        if self.are_apart(item, other) {
            return part.size[item];
        }
        let touching = part.shape(item).flat_map(|own| part.shape(other).map(move |their| (own, their)));
        let timed =
            touching.filter(|(own, their)| own.meets(their)).map(|(own, their)| own.to.saturating_sub(their.from));
        timed.max().unwrap_or(0)
    }
}

/// Calls `each` for every pair of items whose hulls share a section; `None` once there are more than `most`.
fn overlapping_hulls(part: &Partition, most: u64, mut each: impl FnMut(u32, u32)) -> Option<()> {
    let mut alive: Vec<u32> = Vec::new();
    let mut count = 0;
    for item in 0..part.len() as u32 {
        let first = part.first[item as usize];
        // Items come in order of birth: what has died before this one meets none of the later ones either.
        alive.retain(|&other| part.last[other as usize] > first);
        count += alive.len() as u64;
        if count > most {
            return None;
        }
        for &other in &alive {
            each(other, item);
        }
        alive.push(item);
    }
    Some(())
}
