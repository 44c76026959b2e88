//! A plan as rectangles: what every drawing of it starts from.
//!
//! ```text
//!   address
//!     ^    +----+--------+      One rectangle a storage, from birth to death; one a stretch where only some bytes
//!     |    |  a |   b    |      are in use or the life has gaps. No two share a point: the check has seen to that.
//!     |    +----+----+---+
//!     +---------------------> tick
//! ```

use terrace_profiles::units::Bytes;

use super::summary::{LabelFigures, by_label};
use crate::plan::{Plan, Slot};

/// Bytes in use over a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rect {
    /// First and last of the half-open stretch, in ticks.
    pub birth: u64,
    pub death: u64,
    /// The half-open span, from the arena's base.
    pub from: u64,
    pub to: u64,
    /// The buffer that opened the storage: an index into [`Plan::slots`].
    pub slot: u32,
    /// Bytes asked for in the span, not rounded.
    pub asked: u64,
}

/// A stretch of the arena that belongs to one lane of the problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arena {
    pub lane: u32,
    pub from: u64,
    pub to: u64,
}

/// The slots of each storage, in order of allocation.
pub(super) fn slots_of_storages(plan: &Plan) -> Vec<Vec<&Slot>> {
    let mut slots = vec![Vec::new(); plan.problem().buffers.len()];
    for slot in plan.slots() {
        slots[slot.storage as usize].push(slot);
    }
    slots
}

/// What is in use when, by birth and address, without what is empty.
pub(super) fn rects(plan: &Plan) -> Vec<Rect> {
    // For each storage the slot that opened it and the most that any of its slots asked for.
    let mut opened: Vec<Option<(u32, u64)>> = vec![None; plan.problem().buffers.len()];
    for (index, slot) in plan.slots().iter().enumerate() {
        let entry = opened[slot.storage as usize].get_or_insert((index as u32, 0));
        entry.1 = entry.1.max(slot.bytes.get());
    }
    let mut rects = Vec::with_capacity(plan.slots().len());
    for (storage, buffer) in plan.problem().buffers.iter().enumerate() {
        let Some((slot, asked)) = opened[storage] else { continue };
        let base = plan.placement().offsets[storage].get();
        for (life, range) in buffer.in_use().filter(|(_, range)| !range.is_empty()) {
            rects.push(Rect {
                birth: life.start.0,
                death: life.end.0,
                from: base + range.start,
                to: base + range.end,
                slot,
                // At least a byte: the end of a part may be nothing but rounding.
                asked: asked.min(range.end).saturating_sub(range.start).max(1),
            });
        }
    }
    rects.sort_by_key(|rect| (rect.birth, rect.from, rect.slot));
    rects
}

/// The buffers that live in bytes another one opened, each over its own life.
pub(super) fn aliases(plan: &Plan) -> Vec<Rect> {
    let mut opened = vec![false; plan.problem().buffers.len()];
    let mut rects = Vec::new();
    for (index, slot) in plan.slots().iter().enumerate() {
        if !std::mem::replace(&mut opened[slot.storage as usize], true) {
            continue;
        }
        let bytes = slot.bytes.align_up(plan.align()).map_or(plan.size(slot), |bytes| bytes.min(plan.size(slot)));
        if !bytes.is_zero() {
            let from = plan.offset(slot).get();
            let (birth, death) = (slot.birth.0, slot.death.0);
            let (slot, asked) = (index as u32, slot.bytes.get());
            rects.push(Rect { birth, death, from, to: from + bytes.get(), slot, asked });
        }
    }
    rects
}

/// First birth and last death; `(0, 1)` where there is nothing.
pub(super) fn ticks(plan: &Plan) -> (u64, u64) {
    let lives = || plan.problem().buffers.iter().map(|buffer| buffer.lifetime);
    let first = lives().map(|life| life.start.0).min().unwrap_or(0);
    let last = lives().map(|life| life.end.0).max().unwrap_or(1);
    (first, last)
}

/// The arena from bottom to top, cut where the lane changes: together exactly the makespan.
pub(super) fn arenas(plan: &Plan) -> Vec<Arena> {
    let mut spans: Vec<(u64, u32)> = plan
        .problem()
        .buffers
        .iter()
        .zip(&plan.placement().offsets)
        .filter(|(buffer, _)| !buffer.size.is_zero())
        .map(|(buffer, offset)| (offset.get(), buffer.lane))
        .collect();
    spans.sort_unstable();
    let mut arenas: Vec<Arena> = Vec::new();
    for (from, lane) in spans {
        match arenas.last_mut() {
            None => arenas.push(Arena { lane, from: 0, to: 0 }),
            Some(last) if last.lane != lane => {
                last.to = from;
                arenas.push(Arena { lane, from, to: from });
            }
            Some(_) => {}
        }
    }
    if let Some(last) = arenas.last_mut() {
        last.to = plan.makespan().get();
    }
    arenas
}

/// A colour for each label, as `rrggbb`. A label keeps its colour from plan to plan unless a larger one has the same.
pub(super) fn colours(plan: &Plan) -> Vec<&'static str> {
    let figures = by_label(plan);
    let mut order: Vec<usize> = (0..figures.len()).collect();
    let rank = |label: &usize| {
        let LabelFigures { peak, total, .. } = figures[*label];
        (std::cmp::Reverse((peak, total)), plan.labels()[*label].as_str())
    };
    order.sort_by(|a, b| rank(a).cmp(&rank(b)));
    let mut taken = [false; PALETTE.len()];
    let mut colours = vec![PALETTE[0]; figures.len()];
    for label in order {
        let home = hash(&plan.labels()[label]) as usize % PALETTE.len();
        // 31 steps are another tone and a hue far away; having no factor in common with 72, they visit every colour.
        let free = (0..PALETTE.len()).map(|step| (home + 31 * step) % PALETTE.len()).find(|colour| !taken[*colour]);
        let colour = free.unwrap_or(home);
        taken[colour] = true;
        colours[label] = PALETTE[colour];
    }
    colours
}

/// FNV-1a, folded: the same on every machine and in every version.
fn hash(text: &str) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    (hash ^ (hash >> 32)) as u32
}

/// 24 hues in three tones of even lightness (OKLCH 0.72, 0.62, 0.82): each bears black text, and stands out from a white
/// ground as from a dark one.
#[rustfmt::skip]
const PALETTE: [&str; 72] = [
    "e482a1", "e8828b", "e88575", "e58a60", "dd904d", "d2983f", "c3a03a", "b0a940", "9bb050", "82b664", "66ba7a", "47bd91",
    "21bea8", "10bcbc", "0eb9cf", "2fb4df", "50aeeb", "6da7f1", "86a0f3", "9d99f0", "b192e7", "c28cda", "d087ca", "dc83b6",
    "c75f7b", "ca6164", "ca644b", "c56a31", "bd720f", "ae7c06", "9e8401", "8c8c01", "74942b", "569947", "2e9d61", "0b9d7b",
    "029b8f", "03999f", "0396af", "0393c2", "2e8dd1", "5485d7", "6f7dd6", "8676d1", "996fc7", "a969b8", "b764a6", "c16192",
    "fbabb6", "fcaca5", "faaf95", "f5b488", "ecba7f", "e0c07b", "d2c67c", "c2cc84", "b0d18f", "9dd59e", "8cd7af", "7dd9c1",
    "74d8d2", "72d6e1", "78d3ef", "85cef9", "96c9ff", "a8c4ff", "b8beff", "c8b8fc", "d7b3f3", "e4afe6", "eeacd8", "f6abc7",
];

/// At most `most` + 1 round places along `[from, to]`: multiples of a power of two for addresses.
pub(super) fn address_marks(to: u64, most: u64) -> Vec<u64> {
    let mut step = 1_u64;
    while to / step > most {
        step *= 2;
    }
    (0..=to / step).map(|k| k * step).collect()
}

/// At most `most` + 1 round places along `[from, to]`: multiples of 1, 2 or 5 times a power of ten for ticks.
pub(super) fn tick_marks(from: u64, to: u64, most: u64) -> Vec<u64> {
    let span = to.saturating_sub(from);
    let steps = (0..19).flat_map(|power| [1, 2, 5].map(|k| k * 10_u64.pow(power)));
    let step = steps.into_iter().find(|step| span / step <= most).unwrap_or(u64::MAX);
    (from.div_ceil(step)..=to / step).map(|k| k * step).collect()
}

/// An address for people: `0` and not `0 B`, and no decimals that say nothing.
pub(super) fn address(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        bytes => {
            let text = Bytes::new(bytes).map_or_else(|| bytes.to_string(), |bytes| bytes.to_string());
            text.replacen(".00 ", " ", 1).replacen(".0 ", " ", 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SMALL, odd_plan, plan};
    use super::*;

    #[test]
    fn a_plain_buffer_is_one_rectangle() {
        let rects = rects(&plan(SMALL));
        let first = Rect { birth: 0, death: 6, from: 0, to: 1024, slot: 0, asked: 1000 };
        assert_eq!((rects.len(), rects[0]), (3, first));
        assert_eq!(ticks(&plan(SMALL)), (0, 12));
    }

    #[test]
    fn a_gap_splits_a_rectangle_and_an_alias_is_listed_apart() {
        let plan = odd_plan();
        let shape: Vec<_> = rects(&plan).iter().map(|r| (r.slot, r.birth, r.death, r.from, r.to, r.asked)).collect();
        let expected = [
            (0, 0, 2, 0, 1024, 1000),
            (0, 4, 6, 512, 1024, 488),
            (1, 4, 12, 1024, 3072, 2048),
            (2, 6, 10, 3072, 4096, 900),
        ];
        assert_eq!(shape, expected);
        let view: Vec<_> = aliases(&plan).iter().map(|r| (r.slot, r.birth, r.death, r.from, r.to)).collect();
        assert_eq!(view, [(3, 5, 12, 1024, 1536)]);
    }

    #[test]
    fn the_arenas_of_the_lanes_tile_the_makespan() {
        let (main, copy) = (Arena { lane: 0, from: 0, to: 3072 }, Arena { lane: 1, from: 3072, to: 4096 });
        assert_eq!(arenas(&odd_plan()), [main, copy]);
        assert_eq!(arenas(&plan(&[])), []);
    }

    #[test]
    fn labels_have_colours_of_their_own_while_there_are_enough() {
        let names: Vec<String> = (0..72).map(|k| format!("label {k}")).collect();
        let leaked: Vec<&'static str> = names.into_iter().map(|name| &*name.leak()).collect();
        let rows: Vec<_> = (0..72).map(|k| (512, leaked[k], k as u64, k as u64 + 1, 0)).collect();
        let mut colours = colours(&plan(&rows));
        assert_eq!(colours, super::colours(&plan(&rows)));
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), 72);
    }

    #[test]
    fn marks_are_round() {
        assert_eq!(address_marks(3072, 4), [0, 1024, 2048, 3072]);
        assert_eq!(tick_marks(3, 12, 5), [4, 6, 8, 10, 12]);
        assert_eq!(tick_marks(0, u64::MAX, 8).len(), 4);
        assert_eq!((address(0), address(3 << 30), address(1536)), ("0".into(), "3 GiB".into(), "1.5 KiB".into()));
    }
}
