//! A plan as the snapshot that PyTorch's allocator would have dumped: see [`super::snapshot`] for the file.
//!
//! The trace takes one segment for each lane's part of the arena, then allocates and frees in tick order at
//! `base + offset`. Each stretch in use is one allocation: a plain buffer is one from birth to death, aliases are one
//! together, a life with gaps is several, since a viewer keyed by address cannot show two at one place. What the
//! profile never freed stays allocated.

use std::io::{self, Write};

use super::picture::{Arena, Rect, arenas, rects, ticks};
use super::snapshot::{Action, Block, BlockState, Segment, Snapshot, TraceEvent};
use crate::plan::Plan;

/// Where the arena lies in the snapshot: its zeroes leave the offset readable in the lower digits of each address.
const BASE: u64 = 0x7f00_0000_0000;
/// Larger arenas begin at 0: the viewer keeps addresses as doubles, exact up to 2^53.
const MOST_ABOVE_BASE: u64 = 1 << 46;

/// Writes the snapshot; see the module's page.
pub(super) fn write(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    let base = if plan.makespan().get() <= MOST_ABOVE_BASE { BASE } else { 0 };
    let (rects, arenas) = (rects(plan), arenas(plan));
    let trace = Trace { plan, base, rects: &rects, kept: kept(plan) };
    let segments = arenas.iter().map(|arena| trace.segment(arena)).collect();
    Snapshot { segments, events: trace.events(&arenas) }.write(out)
}

struct Trace<'a> {
    plan: &'a Plan,
    base: u64,
    rects: &'a [Rect],
    /// For each storage whether it is never freed.
    kept: Vec<bool>,
}

fn kept(plan: &Plan) -> Vec<bool> {
    let mut kept = vec![false; plan.problem().buffers.len()];
    for slot in plan.slots().iter().filter(|slot| !slot.freed) {
        kept[slot.storage as usize] = true;
    }
    kept
}

impl<'a> Trace<'a> {
    fn segment(&self, arena: &Arena) -> Segment<'a> {
        let inside = |rect: &&Rect| self.stays(rect) && arena.from <= rect.from && rect.to <= arena.to;
        let left = self.rects.iter().filter(inside).map(|rect| Block {
            address: self.base + rect.from,
            bytes: rect.to - rect.from,
            asked: rect.asked,
            state: BlockState::Allocated,
            label: Some(self.label(rect)),
        });
        let (address, bytes) = (self.base + arena.from, arena.to - arena.from);
        Segment::around(address, bytes, self.stream_of(arena), (0, 0), left.collect())
    }

    /// Segments first; at one tick frees before allocations, since lives are half-open.
    fn events(&self, arenas: &[Arena]) -> Vec<TraceEvent<'a>> {
        let segments = arenas.iter().map(|arena| TraceEvent {
            action: Action::SegmentAlloc,
            address: self.base + arena.from,
            bytes: arena.to - arena.from,
            stream: self.stream_of(arena),
            time_us: ticks(self.plan).0,
            label: None,
        });
        let frees = self.rects.iter().filter(|rect| !self.stays(rect));
        let mut events: Vec<(Action, &Rect)> = frees
            .flat_map(|rect| [(Action::FreeRequested, rect), (Action::FreeCompleted, rect)])
            .chain(self.rects.iter().map(|rect| (Action::Alloc, rect)))
            .collect();
        let time = |action, rect: &Rect| if action == Action::Alloc { rect.birth } else { rect.death };
        events.sort_by_key(|&(action, rect)| (time(action, rect), action == Action::Alloc, rect.slot, rect.from));
        let events = events.into_iter().map(|(action, rect)| TraceEvent {
            action,
            address: self.base + rect.from,
            bytes: rect.asked,
            stream: self.stream(rect),
            time_us: time(action, rect),
            label: Some(self.label(rect)),
        });
        segments.chain(events).collect()
    }

    /// Whether the rectangle is the last stretch of something never freed.
    fn stays(&self, rect: &Rect) -> bool {
        let storage = self.plan.slots()[rect.slot as usize].storage as usize;
        self.kept[storage] && rect.death == self.plan.problem().buffers[storage].lifetime.end.0
    }

    fn label(&self, rect: &Rect) -> &'a str {
        self.plan.label(&self.plan.slots()[rect.slot as usize])
    }

    fn stream(&self, rect: &Rect) -> u64 {
        u64::from(self.plan.slots()[rect.slot as usize].lane)
    }

    /// The stream of a buffer inside: lanes of the problem are numbered otherwise than streams.
    fn stream_of(&self, arena: &Arena) -> u64 {
        let inside = self.rects.iter().find(|rect| arena.from <= rect.from && rect.to <= arena.to);
        inside.map_or(0, |rect| self.stream(rect))
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReportFormat;
    use super::super::snapshot::tests::{Value, read};
    use super::super::tests::{SMALL, body, bytes, odd_plan, plan};
    use super::*;

    fn snapshot(plan: &Plan) -> Value {
        read(&bytes(plan, ReportFormat::TorchSnapshot))
    }

    fn trace(snapshot: &Value) -> Vec<(&str, i128, i128, i128, i128)> {
        let events = snapshot.at("device_traces").list()[0].list().iter();
        let base = i128::from(BASE);
        events
            .map(|e| (e.text("action"), e.int("addr") - base, e.int("size"), e.int("stream"), e.int("time_us")))
            .collect()
    }

    #[test]
    fn the_trace_replays_the_plan_in_tick_order() {
        let snapshot = snapshot(&plan(SMALL));
        let expected = [
            ("segment_alloc", 0, 3072, 0, 0),
            ("alloc", 0, 1000, 0, 0),
            ("alloc", 1024, 2048, 0, 4),
            ("free_requested", 0, 1000, 0, 6),
            ("free_completed", 0, 1000, 0, 6),
            ("alloc", 0, 900, 0, 6),
            ("free_requested", 0, 900, 0, 10),
            ("free_completed", 0, 900, 0, 10),
            ("free_requested", 1024, 2048, 0, 12),
            ("free_completed", 1024, 2048, 0, 12),
        ];
        assert_eq!(trace(&snapshot), expected);
        let frames = snapshot.at("device_traces").list()[0].list()[1].at("frames").list();
        let frame = (frames[0].text("filename"), frames[0].int("line"), frames[0].text("name"));
        assert_eq!((frames.len(), frame), (1, ("net.py", 1, "a")));
    }

    #[test]
    fn the_segment_holds_what_is_never_freed_and_free_space() {
        let mut body = body(SMALL);
        body.slots[1].freed = false;
        let snapshot = snapshot(&Plan::new(body).unwrap());
        let segment = &snapshot.at("segments").list()[0];
        assert_eq!((segment.int("total_size"), segment.int("allocated_size")), (3072, 2048));
        let blocks: Vec<_> = segment.at("blocks").list().iter().map(|b| (b.int("size"), b.text("state"))).collect();
        assert_eq!(blocks, [(1024, "inactive"), (2048, "active_allocated")]);
        assert_eq!(segment.at("segment_pool_id"), &Value::List(vec![Value::Int(0), Value::Int(0)]));
        assert_eq!(snapshot.at("external_annotations").list(), []);
        assert_eq!(snapshot.at("allocator_settings").int("max_split_size"), -1);
    }

    #[test]
    fn lanes_are_segments_gaps_are_frees_and_aliases_one_allocation() {
        let snapshot = snapshot(&odd_plan());
        let expected = [
            ("segment_alloc", 0, 3072, 0, 0),
            ("segment_alloc", 3072, 1024, 1, 0),
            ("alloc", 0, 1000, 0, 0),
            ("free_requested", 0, 1000, 0, 2),
            ("free_completed", 0, 1000, 0, 2),
            ("alloc", 512, 488, 0, 4),
            ("alloc", 1024, 2048, 0, 4),
            ("free_requested", 512, 488, 0, 6),
            ("free_completed", 512, 488, 0, 6),
            ("alloc", 3072, 900, 1, 6),
            ("free_requested", 3072, 900, 1, 10),
            ("free_completed", 3072, 900, 1, 10),
        ];
        assert_eq!(trace(&snapshot), expected);
    }

    #[test]
    fn long_lists_go_in_batches_and_many_labels_need_wide_references() {
        let labels: Vec<&'static str> = (0..400).map(|k| &*format!("f{k}.py:{k}:g{k}").leak()).collect();
        let rows: Vec<_> = (0..2000).map(|k| (512, labels[k % 400], k as u64, k as u64 + 1, 0)).collect();
        let snapshot = snapshot(&plan(&rows));
        let trace = snapshot.at("device_traces").list()[0].list();
        assert_eq!(trace.len(), 1 + 3 * 2000);
        assert_eq!(trace.last().unwrap().at("frames").list()[0].text("name"), "g399");
    }

    #[test]
    fn an_arena_too_large_for_doubles_begins_at_zero() {
        let snapshot = snapshot(&plan(&[(1 << 60, "x", 0, 1, 0)]));
        assert_eq!(snapshot.at("segments").list()[0].int("address"), 0);
    }
}
