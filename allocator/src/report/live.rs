//! What lives now, each buffer at its place: as plain data, as a page, and as the snapshot that PyTorch's allocator would
//! dump.
//!
//! ```text
//!   address
//!     ^    +-------------- kv 0 -----------+     The page draws steps from left to right: a buffer begins at the step it was
//!     |    +---------------- kv 1 ---------+     asked for in and reaches to now. What is free is what nothing covers.
//!     |              +------- logits ------+
//!     +------------------------------------> step
//! ```
//!
//! Both are written by the planner's report: the page from a plan whose offsets are given, the snapshot from plain segments and
//! blocks. Here is only how a device becomes one and the other.

use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::Range;

use serde::Serialize;
use terrace_planner::report::snapshot::{Action, Block, BlockState as Shown, Segment, Snapshot, TraceEvent};
use terrace_planner::{LaneRule, Options, Proof, Verdict, placed};
use terrace_profiles::units::{Align, Bytes, Offset, Tick};
use terrace_profiles::{Action as Recorded, BufferId, Event, LabelId, LaneId, Profile};

use super::{page, quoted};
use crate::device::{BlockState, Device};
use crate::error::Error;
use crate::pool::PoolId;
use crate::script::Kind;

/// Everything that lives in a reservation at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveMap {
    /// What the memory belongs to.
    pub device: String,
    /// Where the reservation begins.
    pub address: u64,
    /// Its bytes.
    pub reservation: u64,
    /// Every size and offset is a multiple of it.
    pub align: u64,
    /// Steps begun so far.
    pub steps: u64,
    /// The key of the open step.
    pub open: Option<String>,
    /// The pinned ranges of graph pools, from the reservation's start.
    pub pools: Vec<(PoolId, Range<u64>)>,
    /// What lives, by offset; none overlaps another.
    pub buffers: Vec<LiveBuffer>,
}

/// One live buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveBuffer {
    /// From the reservation's start.
    pub offset: u64,
    /// What it takes.
    pub bytes: u64,
    /// What was asked for; rounded for those that are on script.
    pub asked: u64,
    /// Who asked.
    pub label: String,
    /// On which stream.
    pub stream: u64,
    /// In which step; 0 outside of steps.
    pub step: u64,
    /// What it is.
    pub state: LiveState,
}

/// What a live buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LiveState {
    /// In its slot of the open step's plan.
    Planned,
    /// In a slot of a plan whose step has ended.
    Outlived,
    /// Outside plans.
    Outside,
    /// Freed, but another stream may still use it.
    Pending,
    /// In a graph pool.
    Pool(PoolId),
}

impl Device {
    /// Everything that lives now.
    pub fn live_map(&self) -> LiveMap {
        let mut buffers = self.on_script();
        for (&offset, block) in &self.live {
            let state = match block.state {
                BlockState::Slot(_) if self.open.is_some() && block.step == self.steps => LiveState::Planned,
                BlockState::Slot(_) => LiveState::Outlived,
                BlockState::Outside { .. } => LiveState::Outside,
                BlockState::Pending(_) => LiveState::Pending,
                // What lives inside is listed below, the rest of the range is nobody's.
                BlockState::Pinned(_) => continue,
            };
            let label = self.labels.text(block.label).to_owned();
            let (bytes, asked, stream, step) = (block.size, block.asked, block.stream.0, block.step);
            buffers.push(LiveBuffer { offset, bytes, asked, label, stream, step, state });
        }
        let mut pools = Vec::new();
        for (&id, pool) in &self.pools {
            pools.extend(pool.ranges().iter().map(|(offset, size)| (id, *offset..offset + size)));
            for (offset, bytes, label, stream) in pool.live() {
                let (label, state) = (self.labels.text(label).to_owned(), LiveState::Pool(id));
                buffers.push(LiveBuffer { offset, bytes, asked: bytes, label, stream: stream.0, step: 0, state });
            }
        }
        pools.sort_by_key(|(_, range)| range.start);
        buffers.sort_by_key(|buffer| buffer.offset);
        LiveMap {
            device: self.backing.name(),
            address: self.span.address,
            reservation: self.space.total(),
            align: self.config.align.get(),
            steps: self.steps,
            open: self.open.as_ref().map(|open| String::from_utf8_lossy(&open.key).into_owned()),
            pools,
            buffers,
        }
    }

    /// What lives now as a page with a map to zoom into.
    ///
    /// # Errors
    /// As [`LiveMap::to_html`].
    pub fn live_map_html(&self) -> Result<String, Error> {
        self.live_map().to_html()
    }

    /// What lives now as the file that `torch.cuda.memory._dump_snapshot` would write, for pytorch.org/memory_viz.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn live_snapshot(&self, out: &mut impl Write) -> io::Result<()> {
        self.live_map().write_snapshot(out)
    }

    /// What lives of a step that is on script: it stands in no table, only in how far the script has come.
    fn on_script(&self) -> Vec<LiveBuffer> {
        let Some(on) = &self.script else { return Vec::new() };
        let mut alive = HashMap::new();
        for op in &on.script.ops[..on.cursor] {
            match op.kind {
                Kind::Alloc => drop(alive.insert(op.slot, op)),
                Kind::Free => drop(alive.remove(&op.slot)),
                Kind::Outside => {}
            }
        }
        let buffer = |op: &crate::script::Op| LiveBuffer {
            offset: op.offset,
            bytes: op.seen,
            asked: op.seen,
            label: self.labels.text(on.script.template.slots[op.slot as usize].label).to_owned(),
            stream: on.streams[op.lane as usize].0,
            step: self.steps,
            state: LiveState::Planned,
        };
        alive.into_values().map(buffer).collect()
    }
}

impl LiveMap {
    /// One JSON object.
    pub fn to_json(&self) -> String {
        super::json(self)
    }

    /// A page with a map to zoom into; it needs nothing but itself.
    ///
    /// # Errors
    /// What the planner's check says: two live buffers that overlap, which is a bug in this crate.
    pub fn to_html(&self) -> Result<String, Error> {
        Ok(page(&self.verdict()?))
    }

    /// Writes the snapshot: one segment for each graph pool's range and for what is between, a block for each buffer, and a
    /// trace in the order of steps.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_snapshot(&self, out: &mut dyn Write) -> io::Result<()> {
        let segments: Vec<Segment<'_>> =
            self.segments().into_iter().map(|(pool, range)| self.segment(pool, range)).collect();
        let taken = segments.iter().map(|segment| TraceEvent {
            action: Action::SegmentAlloc,
            address: segment.address,
            bytes: segment.bytes,
            stream: segment.stream,
            time_us: 0,
            label: None,
        });
        let event = |action, buffer| self.event(action, buffer);
        let in_order = self.by_step();
        let freed = in_order.iter().filter(|buffer| buffer.state == LiveState::Pending);
        let events = taken
            .chain(in_order.iter().map(|buffer| event(Action::Alloc, buffer)))
            .chain(freed.map(|buffer| TraceEvent { time_us: self.steps, ..event(Action::FreeRequested, buffer) }))
            .collect();
        Snapshot { segments, events }.write(out)
    }

    fn event<'a>(&self, action: Action, buffer: &'a LiveBuffer) -> TraceEvent<'a> {
        let &LiveBuffer { offset, asked: bytes, stream, step: time_us, ref label, .. } = buffer;
        TraceEvent { action, address: self.address + offset, bytes, stream, time_us, label: Some(label) }
    }

    fn by_step(&self) -> Vec<&LiveBuffer> {
        let mut buffers: Vec<&LiveBuffer> = self.buffers.iter().collect();
        buffers.sort_by_key(|buffer| (buffer.step, buffer.offset));
        buffers
    }

    /// The reservation, cut where a pool begins or ends; ranges of one pool side by side are one.
    fn segments(&self) -> Vec<(PoolId, Range<u64>)> {
        let mut segments: Vec<(PoolId, Range<u64>)> = Vec::new();
        let mut add = |pool, range: Range<u64>| match segments.last_mut() {
            _ if range.is_empty() => {}
            Some((last, before)) if *last == pool && before.end == range.start => before.end = range.end,
            _ => segments.push((pool, range)),
        };
        let mut at = 0;
        for (pool, range) in &self.pools {
            add((0, 0), at..range.start);
            add(*pool, range.clone());
            at = range.end;
        }
        add((0, 0), at..self.reservation);
        segments
    }

    fn segment(&self, pool: PoolId, range: Range<u64>) -> Segment<'_> {
        let inside = self.buffers.iter().filter(|buffer| range.contains(&buffer.offset));
        let blocks = inside.map(|buffer| Block {
            address: self.address + buffer.offset,
            bytes: buffer.bytes,
            asked: buffer.asked.min(buffer.bytes),
            state: if buffer.state == LiveState::Pending { Shown::PendingFree } else { Shown::Allocated },
            label: Some(&buffer.label),
        });
        Segment::around(self.address + range.start, range.end - range.start, 0, pool, blocks.collect())
    }

    /// The map as a plan whose offsets are given and whose ticks are steps.
    fn verdict(&self) -> Result<Verdict, Error> {
        let mut profile = Profile {
            name: format!("what lives on {}", self.device),
            notes: vec![
                ("reservation".to_owned(), format!("{} bytes at {:#x}", self.reservation, self.address)),
                ("steps".to_owned(), self.steps.to_string()),
            ],
            ..Profile::default()
        };
        if let Some(key) = &self.open {
            profile.notes.push(("open step".to_owned(), quoted(key.as_bytes())));
        }
        let align = Align::new(self.align).unwrap_or_default();
        let (mut labels, mut lanes, mut offsets) = (Ids::default(), Ids::default(), Vec::new());
        for (id, buffer) in (0..).zip(self.by_step()) {
            // What was asked for, where it rounds to what is taken: the page shows the difference as rounding.
            let asked =
                Bytes::new(buffer.asked).filter(|asked| asked.align_up(align).is_ok_and(|up| up.get() == buffer.bytes));
            let bytes = asked.or(Bytes::new(buffer.bytes)).unwrap_or_default();
            let (label, lane) = (LabelId(labels.id(buffer.label.clone())), LaneId(lanes.id(buffer.lane())));
            let action = Recorded::Alloc { id: BufferId(id), bytes, label, lane, hints: None };
            profile.events.push(Event { tick: Tick(buffer.step), action });
            offsets.push(Offset::new(buffer.offset).unwrap_or_default());
        }
        (profile.labels, profile.lanes) = (labels.texts, lanes.texts);
        let (lanes, capacity) = (LaneRule::Shared, Bytes::new(self.reservation));
        let options = Options { align, lanes, capacity, ..Options::default() };
        let proof = Proof { optimal: false, strategy: "as it lies".to_owned(), nodes: 0, interrupted: false };
        Ok(placed(&profile, &options, &offsets, proof)?)
    }
}

impl LiveBuffer {
    /// What the page calls its stream and state.
    fn lane(&self) -> String {
        let state = match self.state {
            LiveState::Planned => "planned".to_owned(),
            LiveState::Outlived => "outlived its step".to_owned(),
            LiveState::Outside => "outside plans".to_owned(),
            LiveState::Pending => "freed, waits for events".to_owned(),
            LiveState::Pool((a, b)) => format!("graph pool ({a}, {b})"),
        };
        format!("stream {}, {state}", self.stream)
    }
}

/// Texts by first appearance.
#[derive(Default)]
struct Ids {
    texts: Vec<String>,
    known: HashMap<String, u32>,
}

impl Ids {
    fn id(&mut self, text: String) -> u32 {
        *self.known.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            (self.texts.len() - 1) as u32
        })
    }
}
