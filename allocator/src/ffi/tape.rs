//! A record of what a device was asked for while it ran: every step, request and free in the device's order, as a profile that
//! `plan solve` reads. For those whose memory is not PyTorch's own, which records by itself.
//!
//! Buffers that lived before the tape began are not on it, and neither are their frees. Nested steps, and steps of several threads at
//! once, are one step of the tape: the outermost.

use std::collections::HashMap;

use terrace_profiles::units::{Bytes, Tick};
use terrace_profiles::{Action, BufferId, Event, LabelId, LaneId, Profile};

use crate::backing::Stream;

/// What was asked for so far.
#[derive(Default)]
pub(super) struct Tape {
    events: Vec<Event>,
    buffers: u32,
    /// What lives, by address.
    live: HashMap<u64, BufferId>,
    labels: Vec<String>,
    label_of: HashMap<String, LabelId>,
    lanes: Vec<Stream>,
    /// Steps begun and not ended.
    depth: u32,
}

impl Tape {
    pub fn alloc(&mut self, address: u64, bytes: Bytes, stream: Stream, label: &str) {
        if bytes.is_zero() || self.buffers == u32::MAX {
            return;
        }
        let id = BufferId(self.buffers);
        self.buffers += 1;
        self.live.insert(address, id);
        let (label, lane) = (self.label(label), self.lane(stream));
        self.push(Action::Alloc { id, bytes, label, lane, hints: None });
    }

    pub fn free(&mut self, address: u64) {
        if let Some(id) = self.live.remove(&address) {
            self.push(Action::Free { id });
        }
    }

    pub fn begin_step(&mut self, key: &[u8]) {
        if self.depth == 0 {
            self.push(Action::StepBegin { key: String::from_utf8_lossy(key).into() });
        }
        self.depth += 1;
    }

    /// A step that began before the tape has no end on it.
    pub fn end_step(&mut self) {
        if self.depth == 1 {
            self.push(Action::StepEnd);
        }
        self.depth = self.depth.saturating_sub(1);
    }

    pub fn into_profile(self, name: &str) -> Profile {
        let lanes = self.lanes.iter().enumerate().map(|(number, _)| format!("stream {number}")).collect();
        let notes = vec![("recorded by".to_owned(), format!("terrace-allocator {}", env!("CARGO_PKG_VERSION")))];
        Profile { name: name.to_owned(), notes, labels: self.labels, lanes, events: self.events }
    }

    fn push(&mut self, action: Action) {
        self.events.push(Event { tick: Tick(self.events.len() as u64), action });
    }

    fn label(&mut self, text: &str) -> LabelId {
        if let Some(known) = self.label_of.get(text) {
            return *known;
        }
        let label = LabelId(self.labels.len() as u32);
        self.labels.push(text.to_owned());
        self.label_of.insert(text.to_owned(), label);
        label
    }

    fn lane(&mut self, stream: Stream) -> LaneId {
        let known = self.lanes.iter().position(|lane| *lane == stream);
        LaneId(known.unwrap_or_else(|| {
            self.lanes.push(stream);
            self.lanes.len() - 1
        }) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_is_a_profile() {
        let bytes = |bytes| Bytes::new(bytes).unwrap();
        let mut tape = Tape::default();
        tape.end_step();
        tape.free(0x9000);
        tape.alloc(0x1000, bytes(700), Stream(7), "torch");
        tape.begin_step(b"prefill");
        tape.begin_step(b"nested");
        tape.alloc(0x2000, bytes(100), Stream(9), "torch");
        tape.alloc(0, bytes(0), Stream(9), "torch");
        tape.free(0x2000);
        tape.end_step();
        tape.end_step();
        tape.free(0x1000);
        // The same address again is another buffer.
        tape.alloc(0x1000, bytes(5), Stream(7), "workspace");
        let profile = tape.into_profile("run");
        profile.check().unwrap();
        assert_eq!(profile.steps().iter().map(|step| step.key).collect::<Vec<_>>(), ["prefill"]);
        let lives = profile.lives().unwrap();
        assert_eq!(
            lives.iter().map(|life| (life.bytes.get(), life.lane.0, life.freed)).collect::<Vec<_>>(),
            [(700, 0, true), (100, 1, true), (5, 0, false)]
        );
        assert_eq!(profile.labels, ["torch", "workspace"]);
    }
}
