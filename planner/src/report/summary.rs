//! The figures of a plan, gathered once for every format that prints them.
//!
//! What is alive at the peak is listed by storage, with the bytes in use there: aliases count once and a gap counts
//! nothing, so that the list adds up to the load.

use serde::Serialize;
use terrace_profiles::units::{Bytes, Offset, Tick};

use super::picture::{arenas, slots_of_storages};
use crate::plan::{Plan, Slot};
use crate::planning::Verdict;
use crate::spaces::ranges;

/// The figures of a plan; also what the JSON report prints, field by field.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub name: String,
    /// Buffers of the profile.
    pub buffers: usize,
    pub alignment: u64,
    /// All rounded sizes together.
    pub total_bytes: Bytes,
    pub lower_bound: Bytes,
    pub makespan: Bytes,
    /// Makespan over lower bound; 1 for an empty plan.
    pub ratio: f64,
    /// Makespan less lower bound.
    pub gap_bytes: Bytes,
    pub optimal: bool,
    /// Whether a time limit cut the search, so that another run may differ.
    pub interrupted: bool,
    pub strategy: String,
    pub nodes: u64,
    /// What was asked for, if anything.
    pub capacity: Option<Bytes>,
    /// Capacity less makespan, where the plan fits.
    pub headroom: Option<Bytes>,
    /// Makespan less capacity, where it does not.
    pub short_bytes: Option<Bytes>,
    pub fits: bool,
    /// Whether nothing can fit, rather than that nothing was found.
    pub proven_not_to_fit: bool,
    /// Where nothing can fit: buffers that alone do not, largest first.
    pub culprits: Vec<Culprit>,
    /// Whether each of them is known to be needed for that.
    pub culprits_minimal: bool,
    pub fingerprint: String,
    pub profile_fingerprint: String,
    /// The buffer (of the problem) whose own end, and not the load, is the lower bound.
    pub bound_by_buffer: Option<u32>,
    pub lanes: Vec<LaneFigures>,
    /// The memories that the arena is made of, if any were named.
    pub spaces: Vec<SpaceFigures>,
    pub peak_tick: Tick,
    /// The sum over [`Summary::peak`]: the greatest load, of all lanes together.
    pub peak_bytes: Bytes,
    /// What is in use at the peak, largest first.
    pub peak: Vec<InUse>,
    pub notes: Vec<(String, String)>,
}

/// One lane of the problem: buffers that share bytes with each other and with no other lane's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct LaneFigures {
    /// The streams whose buffers it holds.
    pub name: String,
    pub lane: u32,
    /// Storages placed.
    pub storages: usize,
    /// Its greatest load.
    pub load: Bytes,
    /// Where that is.
    pub tick: Tick,
    /// What of the arena is its own.
    pub bytes: Bytes,
}

/// One of the memories that the arena is made of.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct SpaceFigures {
    pub capacity: Bytes,
    /// Where it begins in the arena: what lies in it has its own offset from there.
    pub offset: Offset,
    /// Storages in it.
    pub storages: usize,
    /// What they need of it, from its beginning.
    pub bytes: Bytes,
}

/// A storage in use at its lane's peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct InUse {
    pub label: String,
    /// Bytes in use, rounded up.
    pub bytes: Bytes,
    /// Of the first byte in use.
    pub offset: Offset,
    pub birth: Tick,
    pub death: Tick,
    pub lane: u32,
    /// Further buffers alive in the same bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub aliases: usize,
    /// Index into [`Plan::labels`]; `None` for a storage that no buffer uses.
    #[serde(skip)]
    pub label_index: Option<u32>,
}

/// One of the storages that cannot all fit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Culprit {
    pub label: String,
    /// All its bytes, rounded up.
    pub bytes: Bytes,
    pub birth: Tick,
    pub death: Tick,
}

/// What the buffers of one label take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LabelFigures {
    pub buffers: u64,
    /// The storages they opened, rounded up.
    pub total: u64,
    pub peak_buffers: u64,
    pub peak: u64,
}

impl Summary {
    /// The figures of the plan that fits, or of the best one that does not.
    pub(crate) fn of_verdict(verdict: &Verdict) -> Self {
        let summary = Self::of(verdict.best());
        match verdict {
            Verdict::Fits(_) => summary,
            Verdict::DoesNotFit(refusal) => Self {
                capacity: Some(refusal.capacity),
                headroom: None,
                short_bytes: summary.makespan.checked_sub(refusal.capacity),
                fits: false,
                proven_not_to_fit: refusal.proven,
                culprits: refusal.culprits.as_ref().map_or_else(Vec::new, |known| named(&refusal.best, &known.buffers)),
                culprits_minimal: refusal.culprits.as_ref().is_some_and(|known| known.minimal),
                ..summary
            },
        }
    }

    /// The figures of `plan`, which fits whatever was asked: else there would be no plan.
    pub(crate) fn of(plan: &Plan) -> Self {
        let peak = in_use_at_peak(plan);
        let bound = plan.lower_bound();
        let capacity = plan.options().capacity;
        Self {
            name: plan.name().to_owned(),
            buffers: plan.slots().len(),
            alignment: plan.align().get(),
            total_bytes: plan.total(),
            lower_bound: bound.bytes,
            makespan: plan.makespan(),
            ratio: plan.ratio(),
            gap_bytes: plan.makespan().checked_sub(bound.bytes).unwrap_or(Bytes::ZERO),
            optimal: plan.proof().optimal,
            interrupted: plan.proof().interrupted,
            strategy: plan.proof().strategy.clone(),
            nodes: plan.proof().nodes,
            capacity,
            headroom: capacity.and_then(|capacity| capacity.checked_sub(plan.makespan())),
            short_bytes: None,
            fits: true,
            proven_not_to_fit: false,
            culprits: Vec::new(),
            culprits_minimal: false,
            fingerprint: plan.fingerprint().to_string(),
            profile_fingerprint: plan.profile().to_string(),
            bound_by_buffer: bound.buffer,
            lanes: lanes(plan),
            spaces: spaces(plan),
            peak_tick: plan.peak_tick(),
            peak_bytes: sum(peak.iter().map(|row| row.bytes.get())),
            peak,
            notes: plan.notes().to_vec(),
        }
    }
}

/// The figures of each label, in the order of [`Plan::labels`].
pub(super) fn by_label(plan: &Plan) -> Vec<LabelFigures> {
    let mut figures = vec![LabelFigures::default(); plan.labels().len()];
    for slot in plan.slots() {
        figures[slot.label as usize].buffers += 1;
    }
    for (storage, slots) in slots_of_storages(plan).iter().enumerate() {
        if let Some(first) = slots.first() {
            figures[first.label as usize].total += plan.problem().buffers[storage].size.get();
        }
    }
    for row in in_use_at_peak(plan) {
        if let Some(label) = row.label_index {
            figures[label as usize].peak_buffers += 1;
            figures[label as usize].peak += row.bytes.get();
        }
    }
    figures
}

fn in_use_at_peak(plan: &Plan) -> Vec<InUse> {
    let slots = slots_of_storages(plan);
    let mut rows = Vec::new();
    for witness in &plan.lower_bound().witness {
        for &storage in &witness.buffers {
            let buffer = &plan.problem().buffers[storage as usize];
            let here = || buffer.in_use().filter(|(life, _)| life.contains(witness.tick)).map(|(_, range)| range);
            let alive: Vec<&Slot> = slots[storage as usize]
                .iter()
                .copied()
                .filter(|slot| slot.birth <= witness.tick && witness.tick < slot.death)
                .collect();
            let owner = alive.first().or(slots[storage as usize].last());
            let base = plan.placement().offsets[storage as usize].get();
            let offset = base + here().map(|range| range.start).min().unwrap_or(0);
            rows.push(InUse {
                label: owner.map_or_else(String::new, |slot| plan.label(slot).to_owned()),
                bytes: sum(here().map(|range| range.end - range.start)),
                offset: Offset::new(offset).expect("the check bounds every offset"),
                birth: buffer.lifetime.start,
                death: buffer.lifetime.end,
                lane: buffer.lane,
                aliases: alive.len().saturating_sub(1),
                label_index: owner.map(|slot| slot.label),
            });
        }
    }
    rows.sort_by_key(|row| (std::cmp::Reverse(row.bytes), row.offset, row.birth));
    rows
}

fn spaces(plan: &Plan) -> Vec<SpaceFigures> {
    let options = plan.options();
    let placed = || plan.problem().buffers.iter().zip(&plan.placement().offsets).filter(|(b, _)| !b.size.is_zero());
    let figures = options.spaces.iter().zip(ranges(&options.spaces, options.align)).map(|(space, (from, to))| {
        let inside = || placed().filter(|(_, offset)| (from..to).contains(offset));
        let tops = inside().map(|(buffer, offset)| offset.get() + buffer.size.get() - from.get());
        let (storages, bytes) = (inside().count(), Bytes::new(tops.max().unwrap_or(0)).expect("a part of the arena"));
        SpaceFigures { capacity: space.capacity, offset: from, storages, bytes }
    });
    figures.collect()
}

fn named(plan: &Plan, storages: &[u32]) -> Vec<Culprit> {
    let slots = slots_of_storages(plan);
    let mut rows: Vec<Culprit> = Vec::with_capacity(storages.len());
    for &storage in storages {
        let buffer = &plan.problem().buffers[storage as usize];
        let label = slots[storage as usize].first().map_or_else(String::new, |slot| plan.label(slot).to_owned());
        let (bytes, birth, death) = (buffer.size, buffer.lifetime.start, buffer.lifetime.end);
        rows.push(Culprit { label, bytes, birth, death });
    }
    rows.sort_by_key(|row| (std::cmp::Reverse(row.bytes), row.birth));
    rows
}

fn lanes(plan: &Plan) -> Vec<LaneFigures> {
    let arenas = arenas(plan);
    let figures = plan.lower_bound().witness.iter().map(|witness| {
        let mine = plan.problem().buffers.iter().filter(|buffer| buffer.lane == witness.lane);
        let own = arenas.iter().filter(|arena| arena.lane == witness.lane).map(|arena| arena.to - arena.from);
        LaneFigures {
            name: lane_name(plan, witness.lane),
            lane: witness.lane,
            storages: mine.count(),
            load: witness.bytes,
            tick: witness.tick,
            bytes: sum(own),
        }
    });
    figures.collect()
}

/// The streams whose buffers a lane of the problem holds.
pub(super) fn lane_name(plan: &Plan, lane: u32) -> String {
    let mut streams: Vec<u32> = plan
        .slots()
        .iter()
        .filter(|slot| plan.problem().buffers[slot.storage as usize].lane == lane)
        .map(|slot| slot.lane)
        .collect();
    streams.sort_unstable();
    streams.dedup();
    let names: Vec<&str> = streams.iter().map(|stream| plan.lanes()[*stream as usize].as_str()).collect();
    if names.is_empty() { lane.to_string() } else { names.join(" + ") }
}

fn sum(bytes: impl Iterator<Item = u64>) -> Bytes {
    Bytes::new(bytes.sum()).expect("a part of what validate() has added up")
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SMALL, odd_plan, plan, refusal};
    use super::*;

    #[test]
    fn the_list_at_the_peak_adds_up_to_the_load() {
        let summary = Summary::of(&plan(SMALL));
        assert_eq!((summary.peak_tick, summary.peak_bytes.get()), (Tick(4), 3072));
        let rows: Vec<_> =
            summary.peak.iter().map(|row| (row.label.as_str(), row.bytes.get(), row.offset.get())).collect();
        assert_eq!(rows, [("net.py:2:b", 2048, 1024), ("net.py:1:a", 1024, 0)]);
        assert_eq!((summary.total_bytes.get(), summary.gap_bytes.get(), summary.ratio), (4096, 0, 1.0));
    }

    #[test]
    fn aliases_count_once_and_parts_count_what_is_in_use() {
        let plan = odd_plan();
        let summary = Summary::of(&plan);
        // Lane 0: all of b and half of a at tick 4; lane 1: c at tick 6.
        let rows: Vec<_> = summary.peak.iter().map(|row| (row.bytes.get(), row.offset.get(), row.lane)).collect();
        assert_eq!(rows, [(2048, 1024, 0), (1024, 3072, 1), (512, 512, 0)]);
        assert_eq!(summary.peak_bytes, plan.lower_bound().bytes);
        let lanes: Vec<_> =
            summary.lanes.iter().map(|lane| (lane.name.as_str(), lane.storages, lane.bytes.get())).collect();
        assert_eq!(lanes, [("main", 2, 3072), ("copy", 1, 1024)]);
        let view = by_label(&plan)[3];
        assert_eq!(view, LabelFigures { buffers: 1, ..LabelFigures::default() });
    }

    #[test]
    fn a_refusal_says_how_much_is_short() {
        let summary = Summary::of_verdict(&refusal(2048, true));
        let figures = (summary.capacity, summary.headroom, summary.short_bytes);
        assert_eq!(figures, (Bytes::new(2048), None, Bytes::new(1024)));
        assert!(!summary.fits && summary.proven_not_to_fit);
    }

    #[test]
    fn an_empty_plan_has_ratio_one_and_no_peak() {
        let summary = Summary::of(&plan(&[]));
        assert_eq!((summary.ratio, summary.peak_tick, summary.peak.len()), (1.0, Tick(0), 0));
    }
}
