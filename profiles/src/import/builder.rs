//! Puts a profile together: dense ids, interned labels and lanes, and the memory each event costs.
//!
//! An importer speaks of what it read (texts, sizes, the id it was given back) and never sees a table index it did not get
//! from here, so what is built can only break a rule that the input breaks.

use std::collections::HashMap;

use super::{file_name, stem};
use crate::error::{At, Error};
use crate::event::{Action, BufferId, Event, Hints, LabelId, LaneId};
use crate::limits::{BUFFER_COST, EVENT_COST, Meter, TEXT_COST};
use crate::profile::Profile;
use crate::units::{Bytes, Tick};

/// What an allocation is called of which the input says nothing.
pub(super) const UNKNOWN: &str = "unknown";

/// A profile under construction.
pub(super) struct Builder {
    profile: Profile,
    meter: Meter,
    buffers: u32,
    labels: HashMap<Box<str>, LabelId>,
    lanes: HashMap<Box<str>, LaneId>,
}

impl Builder {
    /// An empty profile, named after the file, whose first note says which file that was.
    pub fn new(file: &str, meter: &Meter) -> Self {
        let notes = vec![("source".to_owned(), file_name(file).to_owned())];
        let profile = Profile { name: stem(file), notes, ..Profile::default() };
        let (labels, lanes) = (HashMap::new(), HashMap::new());
        Self { profile, meter: meter.clone(), buffers: 0, labels, lanes }
    }

    /// Tells the profile from others of the same file.
    pub fn suffix(&mut self, suffix: &str) {
        self.profile.name.push_str(suffix);
    }

    /// Notes where the record comes from.
    pub fn note(&mut self, key: &str, value: impl Into<String>) -> Result<(), Error> {
        let value = value.into();
        self.meter.charge(2 * TEXT_COST + (key.len() + value.len()) as u64, At::File)?;
        self.profile.notes.push((key.to_owned(), value));
        Ok(())
    }

    /// The id of a label, new if the text is.
    pub fn label(&mut self, text: &str, at: At) -> Result<LabelId, Error> {
        if let Some(id) = self.labels.get(text) {
            return Ok(*id);
        }
        let id = self.push_label(text.to_owned(), at)?;
        self.meter.charge(text.len() as u64, at)?;
        self.labels.insert(text.into(), id);
        Ok(id)
    }

    /// A label of its own, even if another has the same text.
    pub fn push_label(&mut self, text: String, at: At) -> Result<LabelId, Error> {
        self.meter.charge(TEXT_COST + text.len() as u64, at)?;
        let id = index(self.profile.labels.len()).map(LabelId).ok_or_else(|| self.meter.too_large(at))?;
        self.profile.labels.push(text);
        Ok(id)
    }

    /// How many labels there are.
    pub fn label_count(&self) -> usize {
        self.profile.labels.len()
    }

    /// The id of a lane, new if the text is.
    pub fn lane(&mut self, text: &str, at: At) -> Result<LaneId, Error> {
        if let Some(id) = self.lanes.get(text) {
            return Ok(*id);
        }
        self.meter.charge(TEXT_COST + 2 * text.len() as u64, at)?;
        let id = index(self.profile.lanes.len()).map(LaneId).ok_or_else(|| self.meter.too_large(at))?;
        self.profile.lanes.push(text.to_owned());
        self.lanes.insert(text.into(), id);
        Ok(id)
    }

    /// A buffer begins to live.
    pub fn alloc(
        &mut self,
        tick: Tick,
        bytes: Bytes,
        label: LabelId,
        lane: LaneId,
        hints: Option<Box<Hints>>,
        at: At,
    ) -> Result<BufferId, Error> {
        let hint_cost = if hints.is_some() { 3 * size_of::<Hints>() as u64 } else { 0 };
        self.meter.charge(BUFFER_COST + hint_cost, at)?;
        let id = BufferId(self.buffers);
        self.buffers = self.buffers.checked_add(1).ok_or_else(|| self.meter.too_large(at))?;
        self.push(tick, Action::Alloc { id, bytes, label, lane, hints }, at)?;
        Ok(id)
    }

    /// A forward begins.
    pub fn begin_step(&mut self, tick: Tick, key: &str, at: At) -> Result<(), Error> {
        self.meter.charge(key.len() as u64 + 16, at)?;
        self.push(tick, Action::StepBegin { key: key.into() }, at)
    }

    /// Anything else happens.
    pub fn push(&mut self, tick: Tick, action: Action, at: At) -> Result<(), Error> {
        self.meter.charge(EVENT_COST, at)?;
        self.profile.events.push(Event { tick, action });
        Ok(())
    }

    /// The tick of the next event where every event has its own.
    pub fn next_tick(&self) -> Tick {
        Tick(self.profile.events.len() as u64)
    }

    /// The events so far, for an importer that learns the labels last.
    pub fn events_mut(&mut self) -> &mut [Event] {
        &mut self.profile.events
    }

    /// The checked profile.
    pub fn finish(self) -> Result<Profile, Error> {
        self.profile.check()?;
        Ok(self.profile)
    }
}

fn index(length: usize) -> Option<u32> {
    u32::try_from(length).ok()
}
