//! What a step asked for, as it happened; and the template that is planned from it.
//!
//! A [`Record`] is written while a step runs for the first time, or differs from its plan. A [`Template`] is what is known
//! about all steps of a key: the requests in order, each with the largest size seen, and which of them outlive the step and
//! are therefore never planned.

use serde::{Deserialize, Serialize};

/// One request of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes, rounded.
    pub size: u64,
    /// The stream by order of first appearance in the step.
    pub lane: u32,
    /// Index into the device's labels.
    pub label: u32,
    /// The slot of the replayed plan that it was matched with.
    pub slot: Option<u32>,
    /// Whether the plan served it.
    pub in_plan: bool,
    /// Whether it was freed before the step ended.
    pub freed: bool,
}

/// Something that happened to the request with that index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Happened {
    /// It came.
    Alloc(u32),
    /// It was freed.
    Free(u32),
}

/// The requests and frees of one step.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The requests, in order.
    pub requests: Vec<Request>,
    /// Requests and their frees, in order.
    pub order: Vec<Happened>,
}

impl Record {
    /// Writes down a request and returns its index.
    pub fn alloc(&mut self, request: Request) -> u32 {
        let index = u32::try_from(self.requests.len()).expect("a step has fewer than 2^32 requests");
        self.requests.push(request);
        self.order.push(Happened::Alloc(index));
        index
    }

    /// Strikes out the last request: it could not be served.
    pub fn undo_alloc(&mut self) {
        let last = self.order.pop();
        debug_assert_eq!(last, Some(Happened::Alloc(self.requests.len() as u32 - 1)));
        self.requests.pop();
    }

    /// Writes down that a request of this step was freed.
    pub fn free(&mut self, request: u32) {
        self.requests[request as usize].freed = true;
        self.order.push(Happened::Free(request));
    }
}

/// What is known about the steps of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// The requests, in order.
    pub slots: Vec<SlotInfo>,
    /// Requests and frees, in order. What outlives the step is never freed.
    pub order: Vec<Happened>,
}

/// One request of a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotInfo {
    /// The largest size seen, rounded.
    pub seen: u64,
    /// The size that is planned: `seen`, or more where it keeps growing.
    pub size: u64,
    /// The stream by order of first appearance.
    pub lane: u32,
    /// Index into the device's labels.
    pub label: u32,
    /// Whether it outlives the step: an output, or persistent.
    pub outlives: bool,
    /// How often it was larger than ever before.
    pub growths: u32,
}

impl Template {
    /// The template of a step seen for the first time.
    pub fn first(record: &Record) -> Self {
        let slots = record.requests.iter().map(|request| SlotInfo {
            seen: request.size,
            size: request.size,
            lane: request.lane,
            label: request.label,
            outlives: !request.freed,
            growths: 0,
        });
        Self { slots: slots.collect(), order: record.order.clone() }
    }

    /// The template after another step: its requests in the order they came now, each at least as large as its slot was.
    /// What grows again and again is planned with room for a few more steps like the last, so that not every step differs.
    pub fn after(&self, record: &Record, align: u64) -> Self {
        let mut next = Self::first(record);
        for (slot, request) in next.slots.iter_mut().zip(&record.requests) {
            let Some(old) = request.slot.map(|slot| &self.slots[slot as usize]) else { continue };
            slot.seen = old.seen.max(request.size);
            slot.growths = old.growths + u32::from(request.size > old.seen);
            slot.size = slot.seen.max(old.size);
            if slot.growths >= 2 && request.size > old.seen {
                let step = request.size - old.seen;
                slot.size = slot.size.max((slot.seen + step * STEPS_OF_ROOM).next_multiple_of(align));
            }
        }
        next
    }
}

/// Growth is planned for that many further steps: a decode grows its attention buffers at each.
const STEPS_OF_ROOM: u64 = 8;
