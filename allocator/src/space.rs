//! The free bytes of a reservation: a best fit that keeps its low end clear for plans.
//!
//! ```text
//!   0            claimed            the rest                    total
//!   |<-- plan -->|- - - - - - - - - [block][free][block][block]|
//! ```
//!
//! Blocks are taken from the high end of the smallest free range that is wide enough, so that what lives long gathers at
//! the top. While a plan is replayed its range is *claimed*: nothing in it is given out from here.
//!
//! Each free range says whose queued work may still touch it ([`After`]); ranges merge only with neighbours that say the
//! same. What that asks of the stream that gets the bytes is `order.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::order::After;

/// Free ranges of `[0, total)`, merged with their neighbours.
#[derive(Debug)]
pub struct Space {
    total: u64,
    free: u64,
    by_start: BTreeMap<u64, (u64, After)>,
    by_size: BTreeSet<(After, u64, u64)>,
}

impl Space {
    /// All of `[0, total)` is free, and nothing was ever queued on it.
    pub fn new(total: u64) -> Self {
        let mut space = Self { total, free: 0, by_start: BTreeMap::new(), by_size: BTreeSet::new() };
        space.give(0..total, After::Ends);
        space
    }

    /// Where the space ends.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Free bytes, in whatever pieces.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Free bytes below `end`.
    pub fn free_below(&self, end: u64) -> u64 {
        self.by_start.range(..end).map(|(start, (length, _))| (start + length).min(end) - start).sum()
    }

    /// The largest free range, whatever its parts wait for.
    pub fn largest(&self) -> u64 {
        let (mut largest, mut end, mut length) = (0, 0, 0);
        for (start, (size, _)) in &self.by_start {
            length = if *start == end { length + size } else { *size };
            end = start + size;
            largest = largest.max(length);
        }
        largest
    }

    /// The narrowest free range with `size` bytes that waits for exactly that: its length.
    pub fn narrowest(&self, size: u64, after: After) -> Option<u64> {
        let (found, length, _) = *self.by_size.range((after, size, 0)..).next()?;
        (found == after).then_some(length)
    }

    /// Takes `size` bytes that wait for exactly that, or tells that no such range is that wide.
    pub fn take(&mut self, size: u64, after: After) -> Option<u64> {
        debug_assert!(size > 0);
        let &(found, length, start) = self.by_size.range((after, size, 0)..).next()?;
        if found != after {
            return None;
        }
        if length > size {
            self.resize(start, length - size);
        } else {
            self.remove(start);
        }
        Some(start + length - size)
    }

    /// Takes exactly these bytes, if they are free and all wait for that.
    pub fn take_at(&mut self, range: Range<u64>, after: After) -> bool {
        let Some((&start, &(length, found))) = self.by_start.range(..=range.start).next_back() else { return false };
        if found != after || start + length < range.end {
            return false;
        }
        self.take_range(range);
        true
    }

    /// Takes all that is free in a range and returns the pieces.
    pub fn take_range(&mut self, range: Range<u64>) -> Vec<(Range<u64>, After)> {
        let before = self.by_start.range(..range.start).next_back();
        let first = before.filter(|(start, (length, _))| *start + length > range.start);
        let touched: Vec<u64> =
            first.into_iter().chain(self.by_start.range(range.clone())).map(|(at, _)| *at).collect();
        let mut taken = Vec::with_capacity(touched.len());
        for start in touched {
            let (length, after) = self.remove(start);
            let end = start + length;
            if start < range.start {
                self.insert(start, range.start - start, after);
            }
            if end > range.end {
                self.insert(range.end, end - range.end, after);
            }
            taken.push((start.max(range.start)..end.min(range.end), after));
        }
        taken
    }

    /// Gives a range back; none of it may be free already.
    pub fn give(&mut self, range: Range<u64>, after: After) {
        let Range { start, mut end } = range;
        if start >= end {
            return;
        }
        assert!(end <= self.total, "a range beyond the reservation was given back");
        let mut joined = None;
        if let Some((&before, &(length, same))) = self.by_start.range(..=start).next_back() {
            assert!(before + length <= start, "bytes were given back twice");
            joined = (before + length == start && same == after).then_some(before);
        }
        if let Some((&next, &(length, same))) = self.by_start.range(start..).next() {
            assert!(end <= next, "bytes were given back twice");
            if end == next && same == after {
                self.remove(next);
                end = next + length;
            }
        }
        match joined {
            Some(before) => self.resize(before, end - before),
            None => self.insert(start, end - start, after),
        }
    }

    /// What the free ranges wait for, each once.
    pub fn waits(&self) -> Vec<After> {
        let mut waits = Vec::new();
        let mut next = self.by_size.first();
        while let Some(&(after, _, _)) = next {
            waits.push(after);
            next = self.by_size.range((after, u64::MAX, u64::MAX)..).next();
        }
        waits
    }

    /// The free ranges that wait for exactly that, the widest first.
    pub fn ranges(&self, after: After) -> impl Iterator<Item = Range<u64>> {
        let all = self.by_size.range((after, 0, 0)..=(after, u64::MAX, u64::MAX)).rev();
        all.map(|(_, length, start)| *start..start + length)
    }

    /// From now on, what waited for `from` waits for `to`.
    pub fn rename(&mut self, from: After, to: After) {
        if from == to {
            return;
        }
        let ranges: Vec<Range<u64>> = self.ranges(from).collect();
        for range in ranges {
            self.remove(range.start);
            self.give(range, to);
        }
    }

    fn insert(&mut self, start: u64, length: u64, after: After) {
        self.free += length;
        self.by_start.insert(start, (length, after));
        self.by_size.insert((after, length, start));
    }

    /// The free range that begins at `start` now has that length.
    fn resize(&mut self, start: u64, new: u64) {
        let (length, after) = self.by_start.get_mut(&start).expect("a free range begins there");
        let old = std::mem::replace(length, new);
        self.by_size.remove(&(*after, old, start));
        self.by_size.insert((*after, new, start));
        self.free = self.free - old + new;
    }

    fn remove(&mut self, start: u64) -> (u64, After) {
        let (length, after) = self.by_start.remove(&start).expect("a free range begins there");
        self.free -= length;
        self.by_size.remove(&(after, length, start));
        (length, after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Stream;

    const ENDS: After = After::Ends;

    #[test]
    fn blocks_come_from_the_top_and_merge_when_given_back() {
        let mut space = Space::new(100);
        let taken = [10, 20, 30].map(|size| space.take(size, ENDS));
        assert_eq!(taken, [Some(90), Some(70), Some(40)]);
        space.give(70..90, ENDS);
        assert_eq!(
            (space.take(15, ENDS), space.free(), space.largest()),
            (Some(75), 45, 40),
            "the narrowest range that fits"
        );
        space.give(75..90, ENDS);
        space.give(40..70, ENDS);
        space.give(90..100, ENDS);
        assert_eq!((space.free(), space.largest()), (100, 100));
        assert_eq!(space.take(101, ENDS), None);
    }

    #[test]
    fn a_claimed_range_is_taken_around_what_lives_in_it() {
        let mut space = Space::new(100);
        space.take(10, ENDS);
        let low = space.take_range(0..20);
        assert_eq!(low, [(0..20, ENDS)]);
        space.give(5..10, ENDS);
        assert_eq!(space.take_range(0..50), [(5..10, ENDS), (20..50, ENDS)]);
        assert_eq!((space.free(), space.take(40, ENDS), space.take(1, ENDS)), (40, Some(50), None));
    }

    #[test]
    fn ranges_merge_only_where_they_wait_for_the_same() {
        let mut space = Space::new(100);
        space.take(40, ENDS);
        let work = After::Work(Stream(7));
        space.give(60..70, work);
        space.give(80..100, work);
        assert_eq!((space.narrowest(15, work), space.narrowest(21, work)), (Some(20), None));
        assert_eq!((space.largest(), space.waits()), (70, vec![ENDS, work]));
        assert!(!space.take_at(55..65, ENDS));
        assert!(space.take_at(62..65, work));
        space.give(62..65, work);
        space.rename(work, ENDS);
        assert_eq!((space.take(70, ENDS), space.waits()), (Some(0), vec![ENDS]));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn giving_back_twice_is_noticed() {
        let mut space = Space::new(100);
        space.take(10, ENDS);
        space.give(90..95, ENDS);
        space.give(94..96, ENDS);
    }
}
