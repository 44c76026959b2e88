//! What a search never changes: where each item lies in time, who meets whom, what is fixed.
//!
//! A [`Partition`] answers the same questions, but one item at a time; the search asks millions of times, so here they are
//! flat arrays, indexed by item or by section, shared by all searches of one part.

use crate::solve::neighbours::Neighbours;
use crate::sweep::{Partition, Rect};

/// Items in sections, at most: 32 MiB of indices. Parts with more are not searched.
const MOST_CELLS: usize = 8 << 20;

/// The constant facts of a part.
pub struct Ground<'a> {
    pub part: &'a Partition,
    pub neighbours: &'a Neighbours,
    /// Units each item takes.
    pub size: Vec<i64>,
    /// First section of each item, and the first after what it or a partner kept apart reaches.
    pub first: Vec<u32>,
    pub reach: Vec<u32>,
    /// Whether every item uses all its bytes whenever it is in use: only then is a placement that cannot be pushed down
    /// *canonical*, and a finished search a proof.
    pub solid: bool,
    /// Whether an item may lie anywhere above its neighbours: no alignment, nothing fixed.
    pub anywhere: bool,
    rects: Lists<Rect>,
    in_section: Lists<u32>,
    fixed: Lists<(i64, i64)>,
}

/// Lists one after the other.
struct Lists<T> {
    all: Vec<T>,
    start: Vec<u32>,
}

impl<T: Copy> Lists<T> {
    /// Turns (list, value) pairs into `count` lists, each in the order of the pairs.
    fn new(count: usize, pairs: impl Iterator<Item = (u32, T)> + Clone, zero: T) -> Self {
        let mut start = vec![0_u32; count + 1];
        for (list, _) in pairs.clone() {
            start[list as usize + 1] += 1;
        }
        for list in 0..count {
            start[list + 1] += start[list];
        }
        let (mut next, mut all) = (start.clone(), vec![zero; start[count] as usize]);
        for (list, value) in pairs {
            let place = &mut next[list as usize];
            all[*place as usize] = value;
            *place += 1;
        }
        Self { all, start }
    }

    fn of(&self, list: usize) -> &[T] {
        &self.all[self.start[list] as usize..self.start[list + 1] as usize]
    }
}

impl<'a> Ground<'a> {
    /// The facts of a part; `None` if they would take too much memory.
    pub fn new(part: &'a Partition, neighbours: &'a Neighbours) -> Option<Self> {
        let items = 0..part.len() as u32;
        let cells =
            items.clone().flat_map(|item| part.shape(item as usize)).map(|rect| (rect.last - rect.first) as usize);
        if cells.sum::<usize>() > MOST_CELLS {
            return None;
        }
        let sections = part.load.len();
        let rects = items.clone().flat_map(|item| part.shape(item as usize).map(move |rect| (item, rect)));
        let nothing = Rect { from: 0, to: 0, first: 0, last: 0 };
        let rects = Lists::new(part.len(), rects, nothing);
        let cells = items.flat_map(|item| {
            part.shape(item as usize).flat_map(move |rect| (rect.first..rect.last).map(move |section| (section, item)))
        });
        let in_section = Lists::new(sections, cells, 0);
        // From the top down: what is left to place is counted from the capacity.
        let everywhere = |&(from, to): &(u64, u64)| Rect { from, to, first: 0, last: sections as u32 };
        let mut obstacles: Vec<Rect> = part.reserved.iter().filter(|(from, to)| from < to).map(everywhere).collect();
        if obstacles.len().saturating_mul(sections) > MOST_CELLS {
            return None;
        }
        obstacles.extend(&part.obstacles);
        obstacles.sort_unstable_by(|one, other| other.cmp(one));
        let obstacles = obstacles.iter().flat_map(|obstacle| {
            (obstacle.first..obstacle.last).map(move |section| (section, (obstacle.from as i64, obstacle.to as i64)))
        });
        let fixed = Lists::new(sections, obstacles, (0, 0));
        let mut reach = part.last.clone();
        for &(a, b) in &part.apart {
            let (early, late) = if part.first[a as usize] <= part.first[b as usize] { (a, b) } else { (b, a) };
            reach[early as usize] = reach[early as usize].max(part.first[late as usize] + 1);
        }
        Some(Self {
            part,
            neighbours,
            size: part.size.iter().map(|&size| size as i64).collect(),
            first: part.first.clone(),
            reach,
            solid: !part.is_windowed(),
            anywhere: part.is_open() && part.align.iter().all(|&align| align == 1),
            rects,
            in_section,
            fixed,
        })
    }

    /// How many items.
    pub fn len(&self) -> usize {
        self.size.len()
    }

    /// How many sections.
    pub fn sections(&self) -> usize {
        self.part.load.len()
    }

    /// What the item uses in which sections.
    pub fn rects(&self, item: usize) -> &[Rect] {
        self.rects.of(item)
    }

    /// The items in use in a section.
    pub fn in_section(&self, section: usize) -> &[u32] {
        self.in_section.of(section)
    }

    /// The lowest offset not below `at` at which the item may lie as far as alignment and fixed things go.
    pub fn lowest_fit(&self, item: usize, at: i64) -> i64 {
        if self.anywhere { at } else { self.part.lowest_fit(item, at as u64) as i64 }
    }

    /// The highest level in a section above which `units` are free below the capacity; negative if there is none.
    pub fn latest(&self, section: usize, units: i64, capacity: i64) -> i64 {
        let (mut level, mut units) = (capacity, units);
        for &(from, to) in self.fixed.of(section) {
            if level - to >= units {
                break;
            }
            units -= (level - to).max(0);
            level = level.min(from);
        }
        level - units
    }

    /// Whether nothing is fixed, so that `latest` is a subtraction.
    pub fn is_open(&self) -> bool {
        self.fixed.all.is_empty()
    }
}
