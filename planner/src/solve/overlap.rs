//! Which items meet in time, told without a list of pairs: O(n) memory on any input.
//!
//! ```text
//!   items, by birth   0  1  2 | 3  4 | 5  6  7  8 | 9        At some sections the items then alive are noted: a checkpoint.
//!                     checkpoint     checkpoint              Who meets item 6: the noted ones of the checkpoint before its
//!                                                            birth, and all born from there until it dies, less the dead.
//! ```
//!
//! Items are in order of birth, so those born in a stretch of sections are a range of indices. A checkpoint is made once as
//! many were born since the last as were alive there: all notes together are about as long as the list of items, and what is
//! looked at in vain is at most about as much as what is alive.

use crate::sweep::Partition;

/// Fewer births than this are no reason for a checkpoint.
const FEWEST_BIRTHS: u32 = 32;

/// The index of a part.
pub struct Overlap {
    /// How many items are born before each section; one entry more than sections.
    born: Vec<u32>,
    /// The last checkpoint at or before each section.
    checkpoint: Vec<u32>,
    /// Items born before each checkpoint.
    born_before: Vec<u32>,
    /// Items alive at checkpoint `k`: `alive[start[k]..start[k + 1]]`.
    start: Vec<u32>,
    alive: Vec<u32>,
    /// Pairs that share no byte whether or not they meet, in both directions, ascending.
    apart: Vec<(u32, u32)>,
}

impl Overlap {
    /// The index of a part.
    pub fn new(part: &Partition) -> Self {
        let sections = part.load.len();
        let mut born = vec![0; sections + 1];
        for &first in &part.first {
            // Items in use in no section at all are born in the first and die there: nobody meets them.
            if let Some(count) = born.get_mut(first as usize + 1) {
                *count += 1;
            }
        }
        for section in 0..sections {
            born[section + 1] += born[section];
        }
        let both = part.apart.iter().flat_map(|&(a, b)| [(a, b), (b, a)]);
        let mut apart: Vec<(u32, u32)> = both.collect();
        apart.sort_unstable();
        apart.dedup();
        let mut overlap =
            Self { born, checkpoint: Vec::new(), born_before: Vec::new(), start: vec![0], alive: Vec::new(), apart };
        overlap.note(part);
        overlap
    }

    fn note(&mut self, part: &Partition) {
        let (mut alive, mut limit): (Vec<u32>, u32) = (Vec::new(), 0);
        for section in 0..part.load.len() {
            let (before, after) = (self.born[section], self.born[section + 1]);
            let since = self.born_before.last().map_or(0, |last| before - last);
            if since >= limit {
                alive.retain(|&item| part.last[item as usize] as usize > section);
                self.born_before.push(before);
                self.alive.extend(&alive);
                self.start.push(self.alive.len() as u32);
                limit = FEWEST_BIRTHS.max(alive.len() as u32);
            }
            self.checkpoint.push(self.born_before.len() as u32 - 1);
            alive.extend(before..after);
        }
    }

    /// Calls `each` for every item whose hull shares a section with the item's.
    #[inline]
    pub fn each(&self, part: &Partition, item: usize, mut each: impl FnMut(usize)) {
        let (first, last) = (part.first[item], part.last[item]);
        let Some(&checkpoint) = self.checkpoint.get(first as usize) else { return };
        let checkpoint = checkpoint as usize;
        let noted = &self.alive[self.start[checkpoint] as usize..self.start[checkpoint + 1] as usize];
        for &other in noted {
            if part.last[other as usize] > first && other as usize != item {
                each(other as usize);
            }
        }
        let (own, end) = (self.born[first as usize], self.born[last as usize]);
        for other in self.born_before[checkpoint] as usize..own as usize {
            if part.last[other] > first {
                each(other);
            }
        }
        for other in own as usize..end.max(own) as usize {
            if other != item && part.last[other] > first {
                each(other);
            }
        }
    }

    /// The items that share no byte with the item although their sections would allow it.
    pub fn apart_of(&self, item: usize) -> impl Iterator<Item = usize> + '_ {
        let item = item as u32;
        let begin = self.apart.partition_point(|pair| pair.0 < item);
        self.apart[begin..].iter().take_while(move |pair| pair.0 == item).map(|pair| pair.1 as usize)
    }

    /// About how many items [`Overlap::each`] looks at for this one.
    pub fn looks(&self, part: &Partition, item: usize) -> u64 {
        let (first, last) = (part.first[item] as usize, part.last[item] as usize);
        let Some(&checkpoint) = self.checkpoint.get(first) else { return 0 };
        let checkpoint = checkpoint as usize;
        let noted = self.start[checkpoint + 1] - self.start[checkpoint];
        u64::from(noted) + u64::from(self.born[last].saturating_sub(self.born_before[checkpoint]))
    }
}

#[cfg(test)]
mod tests {
    use terrace_profiles::units::{Align, Bytes, Interval, Tick};

    use super::*;
    use crate::problem::{Buffer, Problem};
    use crate::sweep;

    /// Random lives, some short and some through everything.
    fn part(seed: u64, count: usize) -> Partition {
        let mut state = seed;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let buffers = (0..count).map(|_| {
            let start = next(500);
            let longest = if next(5) == 0 { 500 } else { 20 };
            let life = Interval::new(Tick(start), Tick(start + 1 + next(longest))).unwrap();
            Buffer::new(Bytes::new(1 + next(9)).unwrap(), Align::ONE, life)
        });
        let problem =
            Problem { buffers: buffers.chain([whole()]).collect(), apart: vec![(0, 1), (1, 2)], ..Problem::default() };
        sweep::partitions(&problem, 0, 0).remove(0)
    }

    /// Holds the part together.
    fn whole() -> Buffer {
        Buffer::new(Bytes::new(1).unwrap(), Align::ONE, Interval::new(Tick(0), Tick(2000)).unwrap())
    }

    #[test]
    fn it_tells_what_looking_at_all_pairs_tells() {
        for seed in 0..20 {
            let part = part(seed, 300);
            let overlap = Overlap::new(&part);
            for item in 0..part.len() {
                let mut met = Vec::new();
                overlap.each(&part, item, |other| met.push(other));
                met.sort_unstable();
                let slowly = (0..part.len()).filter(|&other| other != item && part.hull(item).meets(&part.hull(other)));
                assert_eq!(met, slowly.collect::<Vec<_>>(), "seed {seed}, item {item}");
                assert!(overlap.looks(&part, item) >= met.len() as u64);
            }
            assert!(overlap.alive.len() <= 2 * part.len() + 300, "the notes stay short");
            let pairs: usize = (0..part.len()).map(|item| overlap.apart_of(item).count()).sum();
            assert_eq!(pairs, 4);
        }
    }
}
