//! Time, compressed: a problem becomes sections, sections fall into partitions, partitions are what the solvers see.
//!
//! ```text
//!   buffers   a |--------|                 A section is a run of births closed by the first death after it: the set
//!             b    |--------------|        alive there is maximal, so nothing is lost by looking only at sections.
//!             c             |--|           Only their order matters from here on; ticks are gone.
//!             d                     |--|
//!   sections    [   0   )[ 1       )[2 )   a = [0,1)  b = [0,2)  c = [1,2)  d = [2,3)
//!   partitions  [        0         )[1 )   no buffer crosses from section 1 to 2: two independent problems
//! ```
//!
//! `n` buffers give at most `n` sections. Buffers without bytes take no part; buffers with a fixed offset become obstacles.

use terrace_profiles::units::{Offset, Tick};

use crate::problem::{Buffer, Problem};

/// One independent sub-problem, in units of [`Partition::unit`] bytes and numbered sections.
#[derive(Debug, Default)]
pub struct Partition {
    /// The greatest common divisor of all bytes in it: one unit.
    pub unit: u64,
    /// For each item the index of its buffer in the problem. Items are in order of birth.
    pub ids: Vec<u32>,
    /// Units each item takes.
    pub size: Vec<u64>,
    /// Units each item's offset must be a multiple of.
    pub align: Vec<u64>,
    /// Ticks each item lives.
    pub ticks: Vec<u64>,
    /// First section of each item.
    pub first: Vec<u32>,
    /// First section after each item.
    pub last: Vec<u32>,
    /// What is in use in which sections, where some item has gaps: see [`Partition::shape`].
    gaps: Option<Gaps>,
    /// What lies at a fixed offset: lowest first.
    pub obstacles: Vec<Rect>,
    /// Pairs of items that share no byte although their sections would allow it.
    pub apart: Vec<(u32, u32)>,
    /// Item, and the units `[from, to)` of something fixed that it shares no byte with at any time.
    pub keep_off: Vec<(u32, u64, u64)>,
    /// Units `[from, to)` that no item may take at any time, ascending and apart; empty ones are borders not to be crossed.
    pub reserved: Vec<(u64, u64)>,
    /// The load of each section, obstacles included.
    pub load: Vec<u64>,
    /// No placement of the items ends below this.
    pub bound: u64,
}

/// Units `[from, to)` in use in the sections `[first, last)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rect {
    /// First unit: from the item's offset, for an obstacle from the base.
    pub from: u64,
    /// First unit after it.
    pub to: u64,
    /// First section.
    pub first: u32,
    /// First section after it.
    pub last: u32,
}

/// The rectangles of all items, one after the other.
#[derive(Debug, Default)]
struct Gaps {
    rects: Vec<Rect>,
    /// Where each item's begin; one entry more than items.
    start: Vec<u32>,
    /// Whether some item uses only part of its bytes at times (and not just none).
    windowed: bool,
}

impl Rect {
    /// Whether the two share a section.
    pub fn meets(&self, other: &Rect) -> bool {
        self.first < other.last && other.first < self.last
    }
}

impl Partition {
    /// How many items.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// What the item uses in which sections.
    pub fn shape(&self, item: usize) -> impl Iterator<Item = Rect> + Clone + '_ {
        let (whole, rects) = match &self.gaps {
            None => (Some(self.hull(item)), &[][..]),
            Some(gaps) => (None, &gaps.rects[gaps.start[item] as usize..gaps.start[item + 1] as usize]),
        };
        whole.into_iter().chain(rects.iter().copied())
    }

    /// The item as if it had no gaps.
    pub fn hull(&self, item: usize) -> Rect {
        Rect { from: 0, to: self.size[item], first: self.first[item], last: self.last[item] }
    }

    /// Whether every item uses all its bytes in all its sections, and nothing else constrains it.
    pub fn is_plain(&self) -> bool {
        self.gaps.is_none() && self.apart.is_empty() && self.is_open()
    }

    /// Whether nothing but other items restricts where an item may lie.
    pub fn is_open(&self) -> bool {
        self.obstacles.is_empty() && self.keep_off.is_empty() && self.reserved.is_empty()
    }

    /// Whether every item uses all its bytes in all its sections.
    pub fn is_solid(&self) -> bool {
        self.gaps.is_none()
    }

    /// Whether some item uses, at times, some but not all of its bytes.
    pub fn is_windowed(&self) -> bool {
        self.gaps.as_ref().is_some_and(|gaps| gaps.windowed)
    }

    /// The least multiple of the item's alignment that is not below `at`.
    pub fn aligned(&self, item: usize, at: u64) -> u64 {
        let mask = self.align[item] - 1;
        (at + mask) & !mask
    }

    /// An offset above everything fixed that the item would meet at `offset`, if there is any.
    fn blocked_until(&self, item: usize, offset: u64) -> Option<u64> {
        let meets = |own: Rect, from: u64, to: u64| offset + own.from < to && from < offset + own.to;
        let timed = self
            .shape(item)
            .flat_map(|own| self.obstacles.iter().map(move |obstacle| (own, obstacle)))
            .filter(|(own, obstacle)| own.meets(obstacle) && meets(*own, obstacle.from, obstacle.to))
            .map(|(own, obstacle)| obstacle.to - own.from);
        let hull = self.hull(item);
        let always = self
            .keep_off
            .iter()
            .filter(|(kept, from, to)| *kept as usize == item && meets(hull, *from, *to))
            .map(|(_, _, to)| *to);
        // The lowest that ends above the offset: those before it are out of the way.
        let place = self.reserved.partition_point(|&(_, to)| to <= offset);
        let reserved = self.reserved.get(place).filter(|(from, to)| meets(hull, *from, *to)).map(|(_, to)| *to);
        timed.chain(always).chain(reserved).max()
    }

    /// The lowest offset not below `at` at which the item is aligned and meets no obstacle.
    pub fn lowest_fit(&self, item: usize, at: u64) -> u64 {
        let mut offset = self.aligned(item, at);
        if self.is_open() {
            return offset;
        }
        loop {
            match self.blocked_until(item, offset) {
                Some(next) => offset = self.aligned(item, next),
                None => return offset,
            }
        }
    }
}

/// Member of another group, and member with a fixed offset, in the table from members to items.
const OUTSIDE: u32 = u32::MAX;
const FIXED: u32 = u32::MAX - 1;

/// The independent sub-problems of the buffers of one lane whose offsets count from `base`, the one with the highest bound
/// first.
pub fn partitions(problem: &Problem, lane: u32, base: u64) -> Vec<Partition> {
    let members: Vec<u32> = (0_u32..)
        .zip(&problem.buffers)
        .filter(|(_, buffer)| buffer.lane == lane && !buffer.size.is_zero())
        .map(|(index, _)| index)
        .collect();
    let (rects, start) = compress(problem, &members);
    let hulls: Vec<(u32, u32)> = (0..members.len())
        .map(|member| {
            let own = &rects[start[member] as usize..start[member + 1] as usize];
            (own.iter().map(|r| r.first).min().unwrap_or(0), own.iter().map(|r| r.last).max().unwrap_or(0))
        })
        .collect();
    let apart = pairs_inside(problem, &members);
    let reserved = reserved_above(problem, base);
    let (members, rects, start, hulls) = (&members, &rects, &start, &hulls);
    let compressed = Compressed { problem, members, rects, start, hulls, apart: &apart, reserved: &reserved };
    let mut parts: Vec<Partition> = cut(problem, members, hulls, &apart)
        .iter()
        .map(|group| build(&compressed, group))
        .filter(|part| part.len() > 0)
        .collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bound * part.unit));
    parts
}

/// The rectangles of each member in sections; what is in use for no byte has none.
fn compress(problem: &Problem, members: &[u32]) -> (Vec<Rect>, Vec<u32>) {
    let mut rects = Vec::with_capacity(members.len());
    let mut start = Vec::with_capacity(members.len() + 1);
    // A death sorts before a birth at its tick.
    let mut changes: Vec<(Tick, bool, u32)> = Vec::with_capacity(2 * members.len());
    start.push(0);
    for &member in members {
        for (life, range) in problem.buffers[member as usize].in_use().filter(|(_, range)| !range.is_empty()) {
            let rect = rects.len() as u32;
            changes.push((life.start, true, rect));
            changes.push((life.end, false, rect));
            rects.push(Rect { from: range.start, to: range.end, first: 0, last: 0 });
        }
        start.push(rects.len() as u32);
    }
    changes.sort_unstable();
    let (mut section, mut open) = (0, false);
    for (_, born, rect) in changes {
        if born {
            open = true;
            rects[rect as usize].first = section;
        } else {
            section += u32::from(open);
            open = false;
            rects[rect as usize].last = section;
        }
    }
    (rects, start)
}

/// Pairs of positions in `members` that must be kept apart.
fn pairs_inside(problem: &Problem, members: &[u32]) -> Vec<(u32, u32)> {
    if problem.apart.is_empty() {
        return Vec::new();
    }
    let mut position = vec![u32::MAX; problem.buffers.len()];
    for (at, &member) in (0_u32..).zip(members) {
        position[member as usize] = at;
    }
    let local = problem.apart.iter().map(|&(a, b)| (position[a as usize], position[b as usize]));
    local.filter(|&(a, b)| a != u32::MAX && b != u32::MAX).collect()
}

/// Groups of members that no section border separates; members of a pair stay together.
fn cut(problem: &Problem, members: &[u32], hulls: &[(u32, u32)], apart: &[(u32, u32)]) -> Vec<Vec<u32>> {
    let mut reach: Vec<u32> = hulls.iter().map(|hull| hull.1).collect();
    for &(a, b) in apart {
        let (early, late) = if hulls[a as usize].0 <= hulls[b as usize].0 { (a, b) } else { (b, a) };
        // The earlier one reaches into the first section of the later one.
        reach[early as usize] = reach[early as usize].max(hulls[late as usize].0 + 1);
    }
    let mut order: Vec<u32> = (0..hulls.len() as u32).collect();
    let birth = |member: u32| problem.buffers[members[member as usize] as usize].lifetime.start;
    order.sort_by_key(|&member| (hulls[member as usize].0, birth(member), member));
    let mut groups: Vec<Vec<u32>> = Vec::new();
    let mut end = 0;
    for member in order {
        if groups.is_empty() || hulls[member as usize].0 >= end {
            groups.push(Vec::new());
        }
        end = end.max(reach[member as usize]);
        groups.last_mut().expect("a group was just pushed").push(member);
    }
    groups
}

/// The members of a lane, time compressed.
struct Compressed<'a> {
    problem: &'a Problem,
    /// Indices of the buffers.
    members: &'a [u32],
    /// Their rectangles, and where those of each member begin.
    rects: &'a [Rect],
    start: &'a [u32],
    /// First section of each member and the first after it.
    hulls: &'a [(u32, u32)],
    /// Pairs of members kept apart.
    apart: &'a [(u32, u32)],
    /// What is reserved, in bytes from the lane's base.
    reserved: &'a [(u64, u64)],
}

fn build(lane: &Compressed<'_>, group: &[u32]) -> Partition {
    let Compressed { problem, members, rects, start, hulls, apart, reserved } = *lane;
    let base = group.iter().map(|&m| hulls[m as usize].0).min().unwrap_or(0);
    let sections = group.iter().map(|&m| hulls[m as usize].1).max().unwrap_or(0).saturating_sub(base);
    let own = |member: u32| &rects[start[member as usize] as usize..start[member as usize + 1] as usize];
    let buffer = |member: u32| &problem.buffers[members[member as usize] as usize];

    let closed = reserved.iter().flat_map(|&(from, to)| [from, to]);
    let unit = group.iter().flat_map(|&m| quanta(buffer(m), own(m))).chain(closed).fold(0, gcd).max(1);
    let mut part = Partition { unit, ..Partition::default() };
    part.reserved = reserved.iter().map(|&(from, to)| (from / unit, to / unit)).collect();
    let mut change = vec![0_u64; sections as usize + 1];
    let mut gaps = Gaps { start: vec![0], ..Gaps::default() };
    let mut item_of = vec![OUTSIDE; if apart.is_empty() { 0 } else { hulls.len() }];
    let mut has_gaps = false;
    for &member in group {
        let (whole, origin) = (buffer(member), buffer(member).fixed.map_or(0, |offset| offset.get() / unit));
        let scaled = own(member).iter().map(|r| Rect {
            from: origin + r.from / unit,
            to: origin + r.to / unit,
            first: r.first - base,
            last: r.last - base,
        });
        for rect in scaled.clone() {
            change[rect.first as usize] = change[rect.first as usize].wrapping_add(rect.to - rect.from);
            change[rect.last as usize] = change[rect.last as usize].wrapping_sub(rect.to - rect.from);
        }
        if let Some(item) = item_of.get_mut(member as usize) {
            *item = if whole.fixed.is_some() { FIXED } else { part.ids.len() as u32 };
        }
        if whole.fixed.is_some() {
            part.obstacles.extend(scaled);
            continue;
        }
        part.ids.push(members[member as usize]);
        part.size.push(whole.size.get() / unit);
        part.ticks.push(whole.lifetime.end.0 - whole.lifetime.start.0);
        part.align.push(whole.align.get() / unit);
        part.first.push(hulls[member as usize].0 - base);
        part.last.push(hulls[member as usize].1.saturating_sub(base));
        has_gaps |= !whole.pieces.is_empty();
        gaps.windowed |= scaled.clone().any(|r| r.from != 0 || r.to != whole.size.get() / unit);
        gaps.rects.extend(scaled);
        gaps.start.push(gaps.rects.len() as u32);
    }
    part.obstacles.sort_unstable();
    part.gaps = has_gaps.then_some(gaps);
    if !apart.is_empty() {
        for &(a, b) in apart {
            match (item_of[a as usize], item_of[b as usize]) {
                (OUTSIDE, _) | (_, OUTSIDE) | (FIXED, FIXED) => {}
                (FIXED, item) => part.keep_off.push(span_kept_off(buffer(a), item, unit)),
                (item, FIXED) => part.keep_off.push(span_kept_off(buffer(b), item, unit)),
                pair => part.apart.push(pair),
            }
        }
    }
    part.load = change[..sections as usize]
        .iter()
        .scan(0_u64, |load, change| {
            *load = load.wrapping_add(*change);
            Some(*load)
        })
        .collect();
    let greatest = |values: &[u64]| values.iter().copied().max().unwrap_or(0);
    part.bound = greatest(&part.load).max(greatest(&part.size));
    if !part.reserved.is_empty() {
        part.bound = lifted(&part.reserved, part.bound);
        let own_top = |item: usize| part.lowest_fit(item, 0) + part.size[item];
        part.bound = part.bound.max((0..part.len()).map(own_top).max().unwrap_or(0));
    }
    part
}

/// All numbers of bytes that a placement of this buffer is made of.
fn quanta(buffer: &Buffer, rects: &[Rect]) -> impl Iterator<Item = u64> {
    let own = [buffer.size.get(), buffer.align.get(), buffer.fixed.map_or(0, Offset::get)];
    own.into_iter().chain(rects.iter().flat_map(|rect| [rect.from, rect.to]))
}

/// The lowest level below which so many units are not reserved.
fn lifted(reserved: &[(u64, u64)], units: u64) -> u64 {
    reserved.iter().fold(units, |level, &(from, to)| if from < level { level + (to - from) } else { level })
}

/// What is reserved above a base, from there; ascending, and what overlaps joined.
fn reserved_above(problem: &Problem, base: u64) -> Vec<(u64, u64)> {
    let above = |at: Offset| at.get().saturating_sub(base);
    let mut spans: Vec<(u64, u64)> =
        problem.reserved.iter().map(|span| (above(span.from), above(span.to))).filter(|(_, to)| *to > 0).collect();
    spans.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::with_capacity(spans.len());
    for (from, to) in spans {
        match joined.last_mut() {
            Some(before) if from < before.1 || (before.0, before.1) == (from, to) => before.1 = before.1.max(to),
            // A border where a range ends forbids nothing more.
            Some(before) if from == to && from == before.1 => {}
            _ => joined.push((from, to)),
        }
    }
    joined
}

fn span_kept_off(fixed: &Buffer, item: u32, unit: u64) -> (u32, u64, u64) {
    let from = fixed.fixed.map_or(0, Offset::get);
    (item, from / unit, (from + fixed.size.get()) / unit)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use terrace_profiles::units::{Align, Bytes, Interval};

    use super::*;
    use crate::problem::{Piece, Reserved};

    fn buffer(start: u64, end: u64, size: u64) -> Buffer {
        let life = Interval::new(Tick(start), Tick(end)).unwrap();
        Buffer::new(Bytes::new(size).unwrap(), Align::ONE, life)
    }

    #[test]
    fn the_drawing_at_the_top_is_true() {
        let buffers = vec![buffer(0, 9, 4), buffer(3, 18, 4), buffer(12, 15, 8), buffer(20, 23, 2)];
        let parts = partitions(&Problem { buffers, ..Problem::default() }, 0, 0);
        assert_eq!(parts.len(), 2);
        assert_eq!((&parts[0].first[..], &parts[0].last[..]), (&[0, 0, 1][..], &[1, 2, 2][..]));
        assert_eq!(parts[0].ids, [0, 1, 2]);
        assert_eq!((parts[0].unit, &parts[0].load[..], parts[0].bound), (1, &[8, 12][..], 12));
        assert_eq!((&parts[1].ids[..], parts[1].bound), (&[3][..], 2));
    }

    #[test]
    fn sizes_are_divided_by_their_greatest_common_divisor() {
        let mut buffers = vec![buffer(0, 2, 1024), buffer(1, 3, 1536)];
        for buffer in &mut buffers {
            buffer.align = Align::DEFAULT;
        }
        let parts = partitions(&Problem { buffers, ..Problem::default() }, 0, 0);
        assert_eq!((parts[0].unit, &parts[0].size[..], &parts[0].align[..]), (512, &[2, 3][..], &[1, 1][..]));
    }

    #[test]
    fn a_pair_kept_apart_is_not_partitioned() {
        let buffers = vec![buffer(0, 1, 4), buffer(5, 6, 4)];
        let parts = partitions(&Problem { buffers, apart: vec![(0, 1)], ..Problem::default() }, 0, 0);
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].apart, [(0, 1)]);
    }

    #[test]
    fn fixed_buffers_become_obstacles_that_items_rise_above() {
        let mut fixed = buffer(2, 4, 10);
        fixed.fixed = Offset::new(5);
        let parts = partitions(&Problem { buffers: vec![buffer(0, 6, 8), fixed], ..Problem::default() }, 0, 0);
        assert_eq!(parts[0].len(), 1);
        assert_eq!(parts[0].lowest_fit(0, 0), 15);
        assert_eq!(parts[0].bound, 18);
    }

    #[test]
    fn what_is_reserved_lifts_the_bound_and_borders_are_not_crossed() {
        let reserved = [(4, 6), (5, 8), (8, 8), (12, 12)];
        let reserved =
            reserved.map(|(from, to)| Reserved { from: Offset::new(from).unwrap(), to: Offset::new(to).unwrap() });
        let buffers = vec![buffer(0, 2, 3), buffer(0, 2, 3), buffer(0, 2, 4)];
        let problem = Problem { buffers, reserved: reserved.to_vec(), ..Problem::default() };
        let parts = partitions(&problem, 0, 0);
        assert_eq!(parts[0].reserved, [(4, 8), (12, 12)]);
        assert_eq!(parts[0].bound, 14);
        assert_eq!((parts[0].lowest_fit(0, 0), parts[0].lowest_fit(0, 2), parts[0].lowest_fit(2, 9)), (0, 8, 12));
        assert_eq!(partitions(&problem, 0, 10)[0].reserved, [(2, 2)]);
    }

    #[test]
    fn a_gap_leaves_sections_free() {
        let mut gapped = buffer(0, 9, 4);
        let piece = |a, b| Piece {
            lifetime: Interval::new(Tick(a), Tick(b)).unwrap(),
            from: Bytes::ZERO,
            to: Bytes::new(4).unwrap(),
        };
        gapped.pieces = Box::new([piece(0, 3), piece(6, 9)]);
        let parts = partitions(&Problem { buffers: vec![gapped, buffer(3, 6, 4)], ..Problem::default() }, 0, 0);
        assert_eq!(parts[0].load, [4, 4, 4]);
        assert_eq!(parts[0].shape(0).map(|r| (r.first, r.last)).collect::<Vec<_>>(), [(0, 1), (2, 3)]);
        assert!(!parts[0].is_solid() && !parts[0].is_windowed());
    }
}
