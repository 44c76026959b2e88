//! When the budget is spent: what can still be freed, and a report that says where the bytes are.

use std::fmt;

use serde::Serialize;
use terrace_profiles::units::Bytes;

use crate::backing::{Event, Stream};
use crate::device::{BlockState, Device};
use crate::error::Error;

/// Called when a request finds no room, before anything else is tried, with the bytes missing. It may free what it can.
pub type OnExhausted = Box<dyn FnMut(Bytes) + Send>;

/// Where the bytes of a spent budget are. Prints as one sentence; [`Exhausted::details`] has the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Exhausted {
    /// Bytes asked for.
    pub asked: u64,
    /// Who asked.
    pub label: String,
    /// The reservation.
    pub reservation: u64,
    /// Free bytes, in whatever pieces.
    pub free: u64,
    /// The largest free piece.
    pub largest_free: u64,
    /// Kept for the plan of the open step.
    pub claimed: u64,
    /// In use outside plans.
    pub outside: u64,
    /// Of that, what a plan should have served.
    pub overflow: u64,
    /// Pinned by graph pools.
    pub pinned: u64,
    /// Freed, but another stream may still use it.
    pub pending: u64,
    /// The largest plans: key and bytes.
    pub planned: Vec<(String, u64)>,
    /// The largest live buffers: label and bytes.
    pub live: Vec<(String, u64)>,
}

/// How many plans and buffers a report lists.
const LISTED: usize = 10;

impl Device {
    /// Frees what can be freed and tries once more.
    #[cold]
    pub(crate) fn take_when_exhausted(&mut self, bytes: Bytes, size: u64, label: &str) -> Result<u64, Error> {
        for wait in [false, true] {
            self.drain(wait);
            if let Some(offset) = self.space.take(size) {
                return Ok(offset);
            }
        }
        Err(Error::OutOfMemory(Box::new(self.exhausted(bytes, label))))
    }

    /// Gives back what was freed on several streams and is done; with `wait`, waits for all of it.
    pub fn drain(&mut self, wait: bool) {
        let pending: Vec<u64> = self
            .live
            .iter()
            .filter(|(_, block)| matches!(block.state, BlockState::Pending(_)))
            .map(|(offset, _)| *offset)
            .collect();
        for offset in pending {
            let block = self.live.get_mut(&offset).expect("just listed");
            let BlockState::Pending(events) = &mut block.state else { continue };
            let events = std::mem::take(events);
            let left = self.unfinished(events, wait);
            if left.is_empty() {
                let block = self.live.remove(&offset).expect("just listed");
                self.give(offset, block.size);
            } else {
                self.live.get_mut(&offset).expect("just listed").state = BlockState::Pending(left);
            }
        }
    }

    /// Keeps freed bytes until what the given streams have queued so far is done.
    pub(crate) fn free_after(&mut self, offset: u64, streams: &[Stream]) {
        let mut events = Vec::new();
        for &stream in streams {
            // An event cannot be recorded on a capturing stream; the bytes then stay until the device is asked to drain
            // with the stream's capture over, which the event of the owning stream stands in for.
            let recorded = if self.backing.is_capturing(stream) { None } else { self.backing.record(stream).ok() };
            events.extend(recorded);
        }
        let block = self.live.get_mut(&offset).expect("the caller looked");
        block.state = BlockState::Pending(events);
    }

    fn unfinished(&mut self, events: Vec<Event>, wait: bool) -> Vec<Event> {
        let mut left = Vec::new();
        for event in events {
            let done = if wait {
                self.backing.synchronize(event).is_ok()
            } else {
                // A query that fails says nothing about the work: keep the bytes.
                self.backing.is_done(event).unwrap_or(false)
            };
            if !done {
                left.push(event);
            }
        }
        left
    }

    fn exhausted(&self, asked: Bytes, label: &str) -> Exhausted {
        let pending = |state: &BlockState| matches!(state, BlockState::Pending(_));
        let mut live: Vec<(String, u64)> = self
            .live
            .values()
            .filter(|block| !pending(&block.state))
            .map(|block| (self.labels.text(block.label).to_owned(), block.size))
            .collect();
        live.sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
        live.truncate(LISTED);
        let mut planned: Vec<(String, u64)> = self
            .keys
            .iter()
            .filter_map(|(key, state)| {
                Some((String::from_utf8_lossy(key).into_owned(), state.script.as_ref()?.makespan))
            })
            .collect();
        planned.sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
        planned.truncate(LISTED);
        Exhausted {
            asked: asked.get(),
            label: label.to_owned(),
            reservation: self.space.total(),
            free: self.space.free(),
            largest_free: self.space.largest(),
            claimed: self.claimed,
            outside: self.stats.outside,
            overflow: self.stats.overflow,
            pinned: self.pools.values().map(crate::pool::Pool::bytes).sum(),
            pending: self.live.values().filter(|block| pending(&block.state)).map(|block| block.size).sum(),
            planned,
            live,
        }
    }
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory: {} asked for {} bytes, but of the reservation's {} bytes {} are free (the largest piece {}), {} are \
             kept for the open step's plan, {} are in use outside plans, {} are pinned by graphs and {} wait for events; raise \
             the budget, or set aside required_bytes() before sizing anything else",
            self.label,
            self.asked,
            self.reservation,
            self.free,
            self.largest_free,
            self.claimed,
            self.outside,
            self.pinned,
            self.pending,
        )
    }
}

impl Exhausted {
    /// The report in lines: the sentence, then the largest plans and the largest live buffers.
    pub fn details(&self) -> String {
        let mut text = format!("{self}\n");
        for (title, rows) in [("planned peak by key", &self.planned), ("largest live buffers", &self.live)] {
            text += &format!("{title}:\n");
            for (name, bytes) in rows {
                text += &format!("  {bytes:>16}  {name}\n");
            }
        }
        text
    }
}
