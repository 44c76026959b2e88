//! What is placed, in order of address: for items that meet so many others that sorting those anew each time costs more than
//! walking past all that is placed.
//!
//! A sorted list in runs of a few hundred entries: an entry moves no more than a run, a walk touches memory in order.

/// Entries at which a run is cut in two.
const LONGEST_RUN: usize = 512;

/// Something placed: the key it is ordered by, its item, and the sections `[first, last)` it lives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// An offset or an end.
    pub key: u64,
    /// Which item.
    pub item: u32,
    /// Its first section.
    pub first: u32,
    /// The first section after it.
    pub last: u32,
}

/// Entries in ascending order of key and item.
#[derive(Debug, Default)]
pub struct Ladder {
    /// None is empty, but for the only one.
    runs: Vec<Vec<Entry>>,
}

impl Ladder {
    /// Exactly these.
    pub fn fill(&mut self, mut entries: Vec<Entry>) {
        entries.sort_unstable();
        self.runs = entries.chunks(LONGEST_RUN / 2).map(<[Entry]>::to_vec).collect();
    }

    /// Adds one.
    pub fn insert(&mut self, entry: Entry) {
        let at = self.run_of(&entry);
        let Some(run) = self.runs.get_mut(at) else {
            self.runs.push(vec![entry]);
            return;
        };
        run.insert(run.partition_point(|known| *known < entry), entry);
        if run.len() >= LONGEST_RUN {
            let rest = run.split_off(LONGEST_RUN / 2);
            self.runs.insert(at + 1, rest);
        }
    }

    /// Takes out one that is there.
    pub fn remove(&mut self, entry: &Entry) {
        let at = self.run_of(entry);
        let run = &mut self.runs[at];
        let place = run.binary_search(entry).expect("what is taken out was put in");
        run.remove(place);
        if run.is_empty() {
            self.runs.remove(at);
        }
    }

    /// Calls `each` for those that share a section with `[first, last)`, lowest first, until it says no. Returns how many
    /// were walked past.
    #[inline]
    pub fn each(&self, first: u32, last: u32, mut each: impl FnMut(&Entry) -> bool) -> u64 {
        let mut walked = 0;
        for run in &self.runs {
            walked += run.len() as u64;
            for entry in run.iter().filter(|entry| entry.first < last && entry.last > first) {
                if !each(entry) {
                    return walked;
                }
            }
        }
        walked
    }

    /// The run in which the entry is or would be.
    fn run_of(&self, entry: &Entry) -> usize {
        self.runs.partition_point(|run| run[0] <= *entry).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn it_stays_sorted_and_complete_through_any_changes() {
        let mut state = 3_u64;
        let mut next = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let (mut ladder, mut plain) = (Ladder::default(), BTreeSet::new());
        for round in 0..20_000 {
            let fresh = Entry { key: next(1000), item: round, first: next(50) as u32, last: 50 + next(50) as u32 };
            if next(9) < 5 {
                ladder.insert(fresh);
                plain.insert(fresh);
            } else if let Some(known) = plain.range(fresh..).next().copied() {
                ladder.remove(&known);
                plain.remove(&known);
            }
            if round == 10_000 {
                ladder.fill(plain.iter().rev().copied().collect());
            }
        }
        assert!(plain.len() > 1000);
        let mut all = Vec::new();
        ladder.each(0, u32::MAX, |entry| {
            all.push(*entry);
            true
        });
        assert!(all.iter().eq(&plain));
        let mut met = Vec::new();
        ladder.each(20, 30, |entry| {
            met.push(*entry);
            met.len() < 40
        });
        let slowly = plain.iter().filter(|entry| entry.first < 30 && entry.last > 20).take(40);
        assert!(met.iter().eq(slowly));
    }
}
