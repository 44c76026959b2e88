//! Tables of a layer, written as the events of a profile.

use super::workload::Lifetimes;
use crate::error::{At, Error};
use crate::event::{Action, BufferId, Event, LaneId};
use crate::limits::{BUFFER_COST, EVENT_COST, Limits, Meter};
use crate::profile::Profile;
use crate::shape::layer::{Row, Table};
use crate::units::{Bytes, Tick};

/// Events in order, each at a tick of its own.
pub(super) struct Writer {
    meter: Meter,
    profile: Profile,
    /// Buffers of the open table and the place of the operation that ends them.
    live: Vec<(BufferId, usize)>,
    buffers: u32,
}

impl Writer {
    /// Nothing yet; `name` and `notes` are the profile's.
    pub(super) fn new(name: String, notes: Vec<(String, String)>, limits: Limits) -> Self {
        let meter = Meter::new(&name, limits);
        let lanes = vec!["stream 0".to_owned()];
        Self { meter, profile: Profile { name, notes, lanes, ..Profile::default() }, live: Vec::new(), buffers: 0 }
    }

    /// What was written.
    pub(super) fn finish(self) -> Profile {
        self.profile
    }

    /// A table once: each buffer at its operation, the dead ones after it.
    pub(super) fn table(&mut self, name: &str, table: &Table, lifetimes: Lifetimes) -> Result<(), Error> {
        let end = |row: &Row| {
            let op = match lifetimes {
                Lifetimes::LastUse => row.last_reader,
                Lifetimes::Frame => row.frame,
            };
            table.ops.iter().position(|other| *other == op).unwrap_or(table.ops.len())
        };
        let mut rows = table.rows.iter().peekable();
        for (place, op) in table.ops.iter().enumerate() {
            while let Some(row) = rows.next_if(|row| row.born == *op) {
                let id = self.alloc(&format!("{name}.{}", row.name), row.bytes)?;
                self.live.push((id, end(row)));
            }
            let ended: Vec<BufferId> = self.live.iter().filter(|(_, end)| *end == place).map(|(id, _)| *id).collect();
            self.live.retain(|(_, end)| *end != place);
            for id in ended {
                self.free(id)?;
            }
        }
        debug_assert!(self.live.is_empty(), "every row of {name} ends at an operation of its table");
        Ok(())
    }

    /// A buffer that lives until it is freed.
    pub(super) fn alloc(&mut self, label: &str, bytes: Bytes) -> Result<BufferId, Error> {
        let label = self.profile.label_of(label);
        let id = BufferId(self.buffers);
        self.buffers += 1;
        self.meter.charge(BUFFER_COST, At::File)?;
        self.push(Action::Alloc { id, bytes, label, lane: LaneId(0), hints: None })?;
        Ok(id)
    }

    /// Its end.
    pub(super) fn free(&mut self, id: BufferId) -> Result<(), Error> {
        self.push(Action::Free { id })
    }

    /// An event at the next tick.
    pub(super) fn push(&mut self, action: Action) -> Result<(), Error> {
        self.meter.charge(EVENT_COST, At::File)?;
        let tick = Tick(self.profile.events.len() as u64);
        self.profile.events.push(Event { tick, action });
        Ok(())
    }
}
