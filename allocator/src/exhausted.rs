//! When the budget is spent: what can still be freed, and a report that says where the bytes are.

use std::fmt;

use serde::Serialize;
use terrace_profiles::units::Bytes;

use crate::backing::{Event, Stream};
use crate::device::{BlockState, Device, Waits};
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
    /// In use beyond that: outside plans, or by what outlived the plan it was in.
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

/// Where the bytes of a reservation are: `free`, `claimed`, `outside`, `pinned` and `pending` add up to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Accounting {
    /// The reservation.
    pub reservation: u64,
    /// Free bytes, in whatever pieces.
    pub free: u64,
    /// Kept for the plan of the open step, with what lives there. Nothing between steps. The rest counts what lies beyond.
    pub claimed: u64,
    /// In use outside plans, or by what outlived the plan it was in.
    pub outside: u64,
    /// Pinned by graph pools.
    pub pinned: u64,
    /// Freed, but another stream may still use it.
    pub pending: u64,
}

/// How many plans and buffers a report lists.
const LISTED: usize = 10;

impl Device {
    /// Frees what can be freed and tries once more.
    #[cold]
    pub(crate) fn take_when_exhausted(
        &mut self,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
    ) -> Result<u64, Error> {
        self.when_exhausted(bytes, label, |device| device.take(size, stream))
    }

    /// Frees what can be freed, as patiently as is allowed, and tries after each; then it is out of memory.
    pub(crate) fn when_exhausted(
        &mut self,
        bytes: Bytes,
        label: &str,
        mut attempt: impl FnMut(&mut Self) -> Option<u64>,
    ) -> Result<u64, Error> {
        for wait in self.patience() {
            self.drain(*wait);
            if let Some(offset) = attempt(self) {
                return Ok(offset);
            }
        }
        self.usage.exhausted += 1;
        Err(Error::OutOfMemory(Box::new(self.exhausted(bytes, label))))
    }

    /// Whether to wait for events at each try; not before the callback had its turn.
    fn patience(&self) -> &'static [bool] {
        if self.call_first { &[false] } else { &[false, true] }
    }

    /// Gives back what was freed on several streams and is done; with `wait`, waits for all of it.
    pub fn drain(&mut self, wait: bool) {
        for offset in std::mem::take(&mut self.pending) {
            let block = self.live.get_mut(&offset).expect("what is pending is live");
            let BlockState::Pending(waits) = &mut block.state else { unreachable!("it was freed") };
            let mut waits = std::mem::take(waits);
            self.record_captured(&mut waits);
            self.finish(&mut waits.events, wait);
            if waits.events.is_empty() && waits.captured.is_empty() {
                let block = self.live.remove(&offset).expect("as above");
                self.poison(offset, &block);
                self.give(offset, block.size, block.stream);
            } else {
                self.live.get_mut(&offset).expect("as above").state = BlockState::Pending(waits);
                self.pending.push(offset);
            }
        }
    }

    /// Keeps freed bytes until what the given streams have queued so far is done.
    pub(crate) fn free_after(&mut self, offset: u64, streams: Vec<Stream>) {
        let mut waits = Waits { events: Vec::new(), captured: streams };
        self.record_captured(&mut waits);
        let block = self.live.get_mut(&offset).expect("the caller looked");
        block.state = BlockState::Pending(waits);
        self.pending.push(offset);
    }

    /// No event can be recorded on a stream that is being captured: there it is made up for once the capture is over.
    fn record_captured(&mut self, waits: &mut Waits) {
        let backing = &mut self.backing;
        waits.captured.retain(|stream| {
            let event = if backing.is_capturing(*stream) { None } else { backing.record(*stream).ok() };
            waits.events.extend(event);
            event.is_none()
        });
    }

    /// Drops the events that are done.
    fn finish(&mut self, events: &mut Vec<Event>, wait: bool) {
        events.retain(|event| {
            let done = if wait {
                self.backing.synchronize(*event).is_ok()
            } else {
                // A query that fails says nothing about the work: keep the bytes.
                self.backing.is_done(*event).unwrap_or(false)
            };
            !done
        });
    }

    /// Where the bytes of the reservation are.
    pub fn accounting(&self) -> Accounting {
        let mut sums = Accounting {
            reservation: self.space.total(),
            free: self.space.free(),
            claimed: self.claimed,
            ..Accounting::default()
        };
        for (offset, block) in &self.live {
            let beyond = (offset + block.size).saturating_sub(self.claimed.max(*offset));
            let sum = match block.state {
                BlockState::Slot(_) | BlockState::Outside { .. } => &mut sums.outside,
                BlockState::Pinned(_) => &mut sums.pinned,
                BlockState::Pending(_) => &mut sums.pending,
            };
            *sum += beyond;
        }
        sums
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
        let Accounting { reservation, free, claimed, outside, pinned, pending } = self.accounting();
        let (label, largest_free, overflow) = (label.to_owned(), self.space.largest(), self.stats.overflow);
        let asked = asked.get();
        Exhausted {
            asked,
            label,
            reservation,
            free,
            largest_free,
            claimed,
            outside,
            overflow,
            pinned,
            pending,
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
