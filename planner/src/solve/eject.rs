//! Ejection search: lower the ceiling, throw out what is in the way, put it back elsewhere.
//!
//! ```text
//!   ceiling  - - - - - - - - - -      The ceiling is set below the best placement known. Items that end above it are taken
//!              |  b  |  +---+         out. One after the other is put back: into the lowest gap that holds it, or else to
//!       +---+  +-----+  | c |         where the items in its way weigh least; those are taken out in turn. Once nothing is
//!       | a |    +------+---+         out, a better placement is found and the ceiling is lowered again.
//!       +---+----+  d   |
//! ```
//!
//! An item's weight says how hard it is to place: large, long, and often found no gap. The last part is what ends quarrels:
//! whoever is thrown out again and again becomes too heavy to be thrown out. (Y. Nagata and O. Bräysy, "A powerful route
//! minimization heuristic for the vehicle routing problem with time windows", 2009, for vehicles and customers.)
//!
//! A step looks only at the items that one item meets, so it costs the same however long the whole record is.

use super::fit::{NOBODY, Rule, Taken, UNPLACED, WALKED_PER_LOOK, entry, forbidden, gap, is_wide, walk};
use super::ladder::{Entry, Ladder};
use super::overlap::Overlap;
use super::race::Stop;
use crate::sweep::Partition;

/// How an ejector differs from others: two that walk different ways find more than one that walks twice as far.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// What its random choices start from.
    pub seed: u64,
    /// How hard an item is to place.
    pub weight: Weight,
    /// Percent of the way from the bound to the best placement at which the ceiling is set.
    pub greed: u64,
}

/// How hard an item is to place, before anything was tried.
#[derive(Clone, Copy, Debug)]
pub enum Weight {
    /// The square root of its area.
    Area,
    /// Its size times the square root of its width.
    Size,
}

/// Weights before anything was tried are from 1 to this.
const HEAVIEST: u64 = 1 << 24;

/// A weight grows to at most so many times what it was.
const MOST_FAILURES: u64 = 1 << 16;

/// What is fixed outweighs all items together: 2^32 of them, each at most 2^40.
const FIXED: u128 = 1 << 80;

/// What a step costs beside its looks at other items.
const STEP: u64 = 32;

/// Steps at one ceiling after which an ejector is content with less: so many, and so many for each item that was above it.
const PATIENCE: u64 = 300;
const PATIENCE_PER_ITEM: u64 = 24;

/// With each success the ceiling is set so much lower, in percent of the way to the bound, but never below the boldest.
const EMBOLDENED: u64 = 5;
const BOLDEST: u64 = 50;

/// A search that can be stopped and go on.
pub struct Ejector<'a> {
    part: &'a Partition,
    overlap: &'a Overlap,
    style: Style,
    random: u64,
    /// Offsets, some of them [`UNPLACED`].
    offsets: Vec<u64>,
    /// What is to be put back.
    out: Vec<u32>,
    /// How hard each item is to place, before anything was tried.
    hardness: Vec<u32>,
    /// That times one more than how often it found no gap.
    weight: Vec<u64>,
    /// No item ends above.
    ceiling: u64,
    /// Steps since the ceiling was set.
    steps: u64,
    /// Steps at one ceiling after which it is stuck.
    patience: u64,
    /// What is placed by offset and by end, if some items are better served by that.
    ladders: Option<[Ladder; 2]>,
    taken: Vec<Taken>,
    ends: Vec<(u64, u32)>,
}

impl<'a> Ejector<'a> {
    /// One that has nothing to start from yet.
    pub fn new(part: &'a Partition, overlap: &'a Overlap, style: Style) -> Self {
        Self {
            part,
            overlap,
            style,
            random: style.seed,
            offsets: Vec::new(),
            out: Vec::new(),
            weight: hardness(part, style.weight).into_iter().map(u64::from).collect(),
            hardness: hardness(part, style.weight),
            ceiling: u64::MAX,
            steps: 0,
            patience: 0,
            ladders: (0..part.len()).any(|item| is_wide(part, overlap, item)).then(Default::default),
            taken: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// What it tries to stay below.
    pub fn ceiling(&self) -> u64 {
        self.ceiling
    }

    /// Whether it has worked long at one ceiling.
    pub fn is_stuck(&self) -> bool {
        self.steps > self.patience
    }

    /// Starts from a complete placement that ends at `top`, and tries to get nearer to `goal`.
    pub fn start(&mut self, placement: &[u64], top: u64, goal: u64) {
        self.offsets.clear();
        self.offsets.extend_from_slice(placement);
        self.out.clear();
        if let Some([by_offset, by_end]) = &mut self.ladders {
            by_offset.fill((0..self.part.len()).map(|item| entry(self.part, item, placement[item])).collect());
            by_end.fill((0..self.part.len()).map(|item| entry_by_end(self.part, item, placement[item])).collect());
        }
        self.lower(top, goal);
    }

    /// After a long time in vain it starts again from a complete placement and is content with less.
    pub fn relent(&mut self, placement: &[u64], top: u64, goal: u64) {
        self.style.greed = (self.style.greed + 101) / 2;
        self.start(placement, top, goal);
    }

    /// Takes out what ends above the new ceiling. Weights stay: they tell what is hard to place at any.
    fn lower(&mut self, top: u64, goal: u64) {
        let way = u128::from(top - goal) * u128::from(self.style.greed) / 100;
        self.ceiling = (goal + way as u64).min(top - 1);
        for item in 0..self.part.len() {
            let end = self.offsets[item].saturating_add(self.part.size[item]);
            if end > self.ceiling {
                self.take_out(item);
            }
        }
        self.steps = 0;
        self.patience = PATIENCE + PATIENCE_PER_ITEM * self.out.len() as u64;
    }

    /// Goes on for about so much work or until `goal` is reached; puts the best complete placement found, if it ends below
    /// `best.0`, there. Returns the work done.
    pub fn run(&mut self, goal: u64, budget: u64, best: &mut (u64, Vec<u64>), stop: &Stop<'_>) -> u64 {
        let mut work = 0;
        let mut steps = 0_u32;
        while work < budget {
            steps = steps.wrapping_add(1);
            if steps.is_multiple_of(64) && stop.now() {
                break;
            }
            if self.out.is_empty() {
                let top = self.top();
                if top < best.0 {
                    best.0 = top;
                    best.1.clone_from(&self.offsets);
                    self.style.greed = self.style.greed.saturating_sub(EMBOLDENED).max(BOLDEST);
                }
                if top <= goal {
                    break;
                }
                self.lower(top, goal);
                work += self.part.len() as u64;
            }
            self.steps += 1;
            work += self.step();
        }
        work
    }

    fn top(&self) -> u64 {
        self.offsets.iter().zip(&self.part.size).map(|(offset, size)| offset + size).max().unwrap_or(0)
    }

    /// Puts one item back.
    fn step(&mut self) -> u64 {
        let choice = self.below(self.out.len() as u64) as usize;
        let item = self.out.swap_remove(choice) as usize;
        let looks = self.look(item);
        if let Some(offset) = gap(self.part, item, Rule::First, &self.taken, self.ceiling) {
            self.put(item, offset);
        } else {
            let hardness = u64::from(self.hardness[item]);
            self.weight[item] = (self.weight[item] + hardness).min(hardness * MOST_FAILURES);
            self.look_at_ends(item);
            match self.cheapest(item) {
                Some(offset) => self.force(item, offset),
                // Wherever it goes it meets something fixed: this ceiling is out of reach.
                None => self.out.push(item as u32),
            }
        }
        STEP + looks
    }

    /// Fills `taken`: all of it, or, where that is known to be enough, up to the first gap that holds the item.
    fn look(&mut self, item: usize) -> u64 {
        match &self.ladders {
            Some([by_offset, _]) if is_wide(self.part, self.overlap, item) => {
                let walked = walk(self.part, item, Rule::First, by_offset, &mut self.taken);
                walked / WALKED_PER_LOOK + self.taken.len() as u64
            }
            _ => {
                forbidden(self.part, item, self.overlap, &self.offsets, &mut self.taken);
                self.taken.sort_unstable();
                self.taken.len() as u64
            }
        }
    }

    /// Fills `ends` from `taken`, which is complete.
    fn look_at_ends(&mut self, item: usize) {
        self.ends.clear();
        match &self.ladders {
            Some([_, by_end]) if is_wide(self.part, self.overlap, item) => {
                let ends = &mut self.ends;
                by_end.each(self.part.first[item], self.part.last[item], |entry| {
                    ends.push((entry.key, entry.item));
                    true
                });
            }
            _ => {
                self.ends.extend(self.taken.iter().map(|&(_, end, other)| (end, other)));
                self.ends.sort_unstable();
            }
        }
    }

    fn put(&mut self, item: usize, offset: u64) {
        self.offsets[item] = offset;
        if let Some([by_offset, by_end]) = &mut self.ladders {
            by_offset.insert(entry(self.part, item, offset));
            by_end.insert(entry_by_end(self.part, item, offset));
        }
    }

    /// Nothing happens to what is out already.
    fn take_out(&mut self, item: usize) {
        let offset = std::mem::replace(&mut self.offsets[item], UNPLACED);
        if offset == UNPLACED {
            return;
        }
        self.out.push(item as u32);
        if let Some([by_offset, by_end]) = &mut self.ladders {
            by_offset.remove(&entry(self.part, item, offset));
            by_end.remove(&entry_by_end(self.part, item, offset));
        }
    }

    /// The offset at which what lies in the way weighs least; one at random of several. Looking at the ends of what lies
    /// there is enough: from anywhere else the item can sink to one and meets nothing new.
    fn cheapest(&mut self, item: usize) -> Option<u64> {
        let highest = self.ceiling.checked_sub(self.part.size[item])?;
        let (mut begun, mut ended) = (0, 0);
        let (mut in_the_way, mut offset) = (0_u128, 0_u64);
        let (mut least, mut cheapest, mut equals) = (FIXED, None, 0);
        loop {
            while let Some(&(_, _, other)) = self.taken.get(begun).filter(|taken| taken.0 <= offset) {
                in_the_way += self.weight_of(other);
                begun += 1;
            }
            while let Some(&(_, other)) = self.ends.get(ended).filter(|end| end.0 <= offset) {
                in_the_way -= self.weight_of(other);
                ended += 1;
            }
            if in_the_way < least {
                (least, cheapest, equals) = (in_the_way, Some(offset), 1);
            } else if in_the_way == least && least < FIXED {
                equals += 1;
                if self.below(equals) == 0 {
                    cheapest = Some(offset);
                }
            }
            match self.ends.get(ended) {
                Some(&(end, _)) => offset = self.part.aligned(item, end),
                None => return cheapest,
            }
            if offset > highest {
                return cheapest;
            }
        }
    }

    /// Puts the item there and takes out what lies in its way.
    fn force(&mut self, item: usize, offset: u64) {
        for at in 0..self.taken.len() {
            let (start, end, other) = self.taken[at];
            if start <= offset && offset < end {
                self.take_out(other as usize);
            }
        }
        self.put(item, offset);
    }

    fn weight_of(&self, other: u32) -> u128 {
        if other == NOBODY { FIXED } else { u128::from(self.weight[other as usize]) }
    }

    /// A number below `bound`, by SplitMix64.
    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }
}

fn entry_by_end(part: &Partition, item: usize, offset: u64) -> Entry {
    Entry { key: offset + part.size[item], ..entry(part, item, offset) }
}

/// For each item how hard it is to place, from 1 to [`HEAVIEST`]. Products and square roots only, which are the same on
/// every machine.
fn hardness(part: &Partition, weight: Weight) -> Vec<u32> {
    let of = |item: usize| {
        let sections: u64 = part.shape(item).map(|rect| u64::from(rect.last - rect.first)).sum();
        let (size, width) = (part.size[item] as f64, sections as f64);
        match weight {
            Weight::Area => (size * width).sqrt(),
            Weight::Size => size * width.sqrt(),
        }
    };
    let heaviest = (0..part.len()).map(of).fold(1.0, f64::max);
    (0..part.len()).map(|item| (of(item) / heaviest * HEAVIEST as f64).max(1.0) as u32).collect()
}
