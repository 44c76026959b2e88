//! The free bytes of a reservation: a best fit that keeps its low end clear for plans.
//!
//! ```text
//!   0            claimed            the rest                    total
//!   |<-- plan -->|- - - - - - - - - [block][free][block][block]|
//! ```
//!
//! Blocks are taken from the high end of the smallest free range that is wide enough, so that what lives long gathers at
//! the top. While a plan is replayed its range is *claimed*: nothing in it is given out from here.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Free ranges of `[0, total)`, merged with their neighbours.
#[derive(Debug)]
pub struct Space {
    total: u64,
    free: u64,
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Space {
    /// All of `[0, total)` is free.
    pub fn new(total: u64) -> Self {
        let mut space = Self { total, free: 0, by_start: BTreeMap::new(), by_size: BTreeSet::new() };
        space.give(0..total);
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

    /// The largest free range.
    pub fn largest(&self) -> u64 {
        self.by_size.last().map_or(0, |(size, _)| *size)
    }

    /// Takes `size` bytes, or tells that no free range is that wide.
    pub fn take(&mut self, size: u64) -> Option<u64> {
        debug_assert!(size > 0);
        let &(length, start) = self.by_size.range((size, 0)..).next()?;
        self.remove(start, length);
        if length > size {
            self.insert(start, length - size);
        }
        Some(start + length - size)
    }

    /// Takes all that is free in a range and returns the pieces.
    pub fn take_range(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        let before = self.by_start.range(..range.start).next_back().map(|(start, length)| (*start, *length));
        let first = before.filter(|(start, length)| start + length > range.start);
        let rest = self.by_start.range(range.clone()).map(|(start, length)| (*start, *length));
        let touched: Vec<(u64, u64)> = first.into_iter().chain(rest).collect();
        let mut taken = Vec::with_capacity(touched.len());
        for (start, length) in touched {
            let end = start + length;
            self.remove(start, length);
            if start < range.start {
                self.insert(start, range.start - start);
            }
            if end > range.end {
                self.insert(range.end, end - range.end);
            }
            taken.push(start.max(range.start)..end.min(range.end));
        }
        taken
    }

    /// Gives a range back; none of it may be free already.
    pub fn give(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        if start >= end {
            return;
        }
        assert!(end <= self.total, "a range beyond the reservation was given back");
        if let Some((&before, &length)) = self.by_start.range(..=start).next_back() {
            assert!(before + length <= start, "bytes were given back twice");
            if before + length == start {
                self.remove(before, length);
                start = before;
            }
        }
        if let Some((&after, &length)) = self.by_start.range(range.start..).next() {
            assert!(end <= after, "bytes were given back twice");
            if end == after {
                self.remove(after, length);
                end = after + length;
            }
        }
        self.insert(start, end - start);
    }

    fn insert(&mut self, start: u64, length: u64) {
        self.free += length;
        self.by_start.insert(start, length);
        self.by_size.insert((length, start));
    }

    fn remove(&mut self, start: u64, length: u64) {
        self.free -= length;
        self.by_start.remove(&start);
        self.by_size.remove(&(length, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_from_the_top_and_merge_when_given_back() {
        let mut space = Space::new(100);
        assert_eq!((space.take(10), space.take(20), space.take(30)), (Some(90), Some(70), Some(40)));
        space.give(70..90);
        assert_eq!(
            (space.take(15), space.free(), space.largest()),
            (Some(75), 45, 40),
            "the narrowest range that fits"
        );
        space.give(75..90);
        space.give(40..70);
        space.give(90..100);
        assert_eq!((space.free(), space.largest()), (100, 100));
        assert_eq!(space.take(101), None);
    }

    #[test]
    fn a_claimed_range_is_taken_around_what_lives_in_it() {
        let mut space = Space::new(100);
        space.take(10);
        let low = space.take_range(0..20);
        assert_eq!(low, [0..20]);
        space.give(5..10);
        assert_eq!(space.take_range(0..50), [5..10, 20..50]);
        assert_eq!((space.free(), space.take(40), space.take(1)), (40, Some(50), None));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn giving_back_twice_is_noticed() {
        let mut space = Space::new(100);
        space.take(10);
        space.give(90..95);
        space.give(94..96);
    }
}
