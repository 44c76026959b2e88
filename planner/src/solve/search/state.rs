//! Where a search stands: what is placed, how low the rest can lie, and what must be undone to go back.

use super::ground::Ground;
use crate::solve::order;

/// The state, changed by [`State::place`] and what is inferred from it, and put back by [`State::undo`].
pub struct State<'a> {
    pub ground: &'a Ground<'a>,
    pub capacity: i64,
    /// Where each placed item lies; for an unplaced one the lowest offset that the placed ones leave it.
    pub low: Vec<i64>,
    /// No solution below here has the unplaced item lower. Above `low` where something still unplaced must lie under it.
    pub bound: Vec<i64>,
    pub placed: Vec<bool>,
    /// Units still to be placed in each section, and the highest level at which they may begin.
    pub left: Vec<i64>,
    pub latest: Vec<i64>,
    /// Unplaced items that reach from the section before into this one.
    pub crossing: Vec<u32>,
    /// Who comes first of those with one offset.
    pub rank: Vec<u32>,
    columns: Vec<Column>,
    log: Vec<Undo>,
}

/// What ranks compare: larger comes first.
enum Column {
    /// The units that are left in the fullest section of the item.
    Tightness,
    Constant(Vec<u64>),
}

/// A value to put back.
enum Undo {
    Low(u32, i64),
    Bound(u32, i64),
    Rank(u32, u32),
    Placed(u32),
}

impl<'a> State<'a> {
    pub fn new(ground: &'a Ground<'a>, order: order::Order, capacity: i64) -> Self {
        let part = ground.part;
        let mut left: Vec<i64> = part.load.iter().map(|&load| load as i64).collect();
        // What is fixed is never placed.
        for obstacle in &part.obstacles {
            for left in &mut left[obstacle.first as usize..obstacle.last as usize] {
                *left -= (obstacle.to - obstacle.from) as i64;
            }
        }
        let mut crossing = vec![0; ground.sections() + 1];
        for item in 0..ground.len() {
            for border in borders(ground, item) {
                crossing[border] += 1;
            }
        }
        let low: Vec<i64> = (0..ground.len()).map(|item| ground.lowest_fit(item, 0)).collect();
        let columns = order.bytes().map(|letter| match letter {
            b'T' => Column::Tightness,
            letter => Column::Constant(order::column(part, letter)),
        });
        Self {
            ground,
            capacity,
            bound: low.clone(),
            low,
            placed: vec![false; ground.len()],
            latest: left.iter().enumerate().map(|(section, &left)| ground.latest(section, left, capacity)).collect(),
            left,
            crossing,
            rank: order::ranks(part, order),
            columns: columns.collect(),
            log: Vec::new(),
        }
    }

    /// A point to go back to.
    pub fn mark(&self) -> usize {
        self.log.len()
    }

    /// Whether nothing fits already.
    pub fn is_hopeless(&self) -> bool {
        let too_high = |item: usize| self.low[item] + self.ground.size[item] > self.capacity;
        self.latest.iter().any(|&latest| latest < 0) || (0..self.ground.len()).any(too_high)
    }

    /// Whether the item at its lowest offset leaves room for the rest of its own sections: cheap, before it is placed.
    pub fn seems_to_fit(&self, item: usize) -> bool {
        let top = self.low[item] + self.ground.size[item];
        if !self.ground.is_open() || !self.ground.solid {
            return top <= self.capacity;
        }
        let size = self.ground.size[item];
        let in_rect = |rect: &crate::sweep::Rect| {
            self.latest[rect.first as usize..rect.last as usize].iter().all(|&latest| latest + size >= top)
        };
        top <= self.capacity && self.ground.rects(item).iter().all(in_rect)
    }

    /// Places the item at its lowest offset and lifts its neighbours. `Some` if that leaves room, and then whether some
    /// border is no longer crossed by anything unplaced.
    pub fn place(&mut self, item: usize) -> Option<bool> {
        let ground = self.ground;
        let offset = self.low[item];
        self.log.push(Undo::Placed(item as u32));
        self.placed[item] = true;
        let mut fits = true;
        for rect in ground.rects(item) {
            let (top, used) = (offset + rect.to as i64, (rect.to - rect.from) as i64);
            for section in rect.first as usize..rect.last as usize {
                self.change(section, -used);
                fits &= self.left[section] == 0 || top <= self.latest[section];
            }
        }
        let mut uncrossed = false;
        for border in borders(ground, item) {
            self.crossing[border] -= 1;
            uncrossed |= self.crossing[border] == 0;
        }
        if !fits {
            return None;
        }
        for (other, rise) in ground.neighbours.with_rise(ground.part, item) {
            let other = other as usize;
            if self.placed[other] || offset + rise as i64 <= self.low[other] {
                continue;
            }
            let low = ground.lowest_fit(other, offset + rise as i64);
            self.log.push(Undo::Low(other as u32, self.low[other]));
            self.low[other] = low;
            if !self.raise(other, low) {
                return None;
            }
        }
        Some(uncrossed)
    }

    /// Raises what is known of an unplaced item; `false` if it no longer fits.
    pub fn raise(&mut self, item: usize, bound: i64) -> bool {
        if self.bound[item] < bound {
            let bound = self.ground.lowest_fit(item, bound);
            self.log.push(Undo::Bound(item as u32, self.bound[item]));
            self.bound[item] = bound;
            return bound + self.ground.size[item] <= self.capacity;
        }
        true
    }

    /// Ranks a group of unplaced items afresh, by what is left in their sections now. Sorts the slice.
    pub fn rank_afresh(&mut self, group: &mut [u32], tightness: &mut [i64]) {
        for &item in group.iter() {
            let in_rect = |rect: &crate::sweep::Rect| {
                self.left[rect.first as usize..rect.last as usize].iter().copied().max().unwrap_or(0)
            };
            tightness[item as usize] = self.ground.rects(item as usize).iter().map(in_rect).max().unwrap_or(0);
        }
        let (columns, rank) = (&self.columns, &self.rank);
        group.sort_unstable_by(|&a, &b| {
            let (x, y) = (a as usize, b as usize);
            let by_columns = columns.iter().map(|column| match column {
                Column::Tightness => tightness[y].cmp(&tightness[x]),
                Column::Constant(values) => values[y].cmp(&values[x]),
            });
            by_columns.fold(std::cmp::Ordering::Equal, std::cmp::Ordering::then).then(rank[x].cmp(&rank[y]))
        });
        for (rank, &item) in (0..).zip(group.iter()) {
            self.log.push(Undo::Rank(item, self.rank[item as usize]));
            self.rank[item as usize] = rank;
        }
    }

    /// Goes back to a mark.
    pub fn undo(&mut self, mark: usize) {
        while self.log.len() > mark {
            match self.log.pop().expect("the log is longer than the mark") {
                Undo::Low(item, low) => self.low[item as usize] = low,
                Undo::Bound(item, bound) => self.bound[item as usize] = bound,
                Undo::Rank(item, rank) => self.rank[item as usize] = rank,
                Undo::Placed(item) => self.take_back(item as usize),
            }
        }
    }

    fn take_back(&mut self, item: usize) {
        let ground = self.ground;
        self.placed[item] = false;
        for rect in ground.rects(item) {
            for section in rect.first as usize..rect.last as usize {
                self.change(section, (rect.to - rect.from) as i64);
            }
        }
        for border in borders(ground, item) {
            self.crossing[border] += 1;
        }
    }

    fn change(&mut self, section: usize, units: i64) {
        self.left[section] += units;
        if self.ground.is_open() {
            self.latest[section] -= units;
        } else {
            self.latest[section] = self.ground.latest(section, self.left[section], self.capacity);
        }
    }
}

/// The borders between sections that the item, or its bond to a partner kept apart, crosses.
fn borders(ground: &Ground<'_>, item: usize) -> std::ops::Range<usize> {
    ground.first[item] as usize + 1..ground.reach[item] as usize
}
