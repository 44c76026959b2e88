//! Where a forward's buffers come from, seen from the forward: the arena's step implements it, and so does a recorder that
//! writes down what was asked, on the way to another memory or instead of one.

use std::collections::HashMap;
use std::error::Error;

use crate::event::{Action, BufferId, Event, LaneId};
use crate::profile::Profile;
use crate::units::{Bytes, DeviceSpan, Tick};

/// Labelled requests for spans, in the order of a forward. A forward takes `&mut dyn Memory`.
pub trait Memory {
    /// A span of at least `bytes`. `label` says who asks, for reports.
    ///
    /// # Errors
    /// There is no room, said by whoever has none; nothing was taken.
    fn alloc(&mut self, bytes: Bytes, label: &str) -> Result<DeviceSpan, Box<dyn Error + Send + Sync>>;

    /// Gives a span back.
    fn free(&mut self, span: DeviceSpan);
}

/// Writes down each request and each free as the events of a profile, one tick each.
pub struct Recorder<'m> {
    memory: Option<&'m mut dyn Memory>,
    profile: Profile,
    live: HashMap<u64, BufferId>,
    buffers: u32,
}

/// Bytes between the addresses that a dry recorder makes up. Nothing lies there.
const DRY_STRIDE: u64 = 1 << 20;

impl<'m> Recorder<'m> {
    /// Passes everything on to a memory.
    pub fn over(memory: &'m mut dyn Memory) -> Self {
        Self { memory: Some(memory), ..Self::dry() }
    }

    /// Hands out made-up addresses, each once, for a forward that is walked through and computes nothing.
    pub fn dry() -> Self {
        let lanes = vec!["stream 0".to_owned()];
        let profile = Profile { lanes, ..Profile::default() };
        Self { memory: None, profile, live: HashMap::new(), buffers: 0 }
    }

    /// What happened, under that name.
    pub fn into_profile(self, name: &str) -> Profile {
        Profile { name: name.to_owned(), ..self.profile }
    }

    fn push(&mut self, action: Action) {
        let tick = Tick(self.profile.events.len() as u64);
        self.profile.events.push(Event { tick, action });
    }
}

impl Memory for Recorder<'_> {
    fn alloc(&mut self, bytes: Bytes, label: &str) -> Result<DeviceSpan, Box<dyn Error + Send + Sync>> {
        let id = BufferId(self.buffers);
        let span = match &mut self.memory {
            Some(memory) => memory.alloc(bytes, label)?,
            None => DeviceSpan { address: (u64::from(id.0) + 1) * DRY_STRIDE, bytes },
        };
        self.buffers += 1;
        self.live.insert(span.address, id);
        let label = self.profile.label_of(label);
        self.push(Action::Alloc { id, bytes, label, lane: LaneId(0), hints: None });
        Ok(span)
    }

    /// # Panics
    /// Nothing that was handed out lives there: a forward frees its own buffers, each once.
    fn free(&mut self, span: DeviceSpan) {
        let id = self.live.remove(&span.address);
        let id = id.unwrap_or_else(|| panic!("nothing that this memory handed out lives at {:#x}", span.address));
        if let Some(memory) = &mut self.memory {
            memory.free(span);
        }
        self.push(Action::Free { id });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorder_over_another_writes_down_the_same() {
        let run = |memory: &mut dyn Memory| {
            let size = |bytes| Bytes::new(bytes).unwrap();
            let residual = memory.alloc(size(100), "residual").unwrap();
            for _ in 0..2 {
                let x = memory.alloc(size(7), "x").unwrap();
                memory.free(x);
            }
            memory.free(residual);
        };
        let mut inner = Recorder::dry();
        let mut outer = Recorder::over(&mut inner);
        run(&mut outer);
        let outer = outer.into_profile("run");
        assert_eq!(outer, inner.into_profile("run"));
        assert_eq!((outer.events.len(), outer.labels.len()), (6, 2));
        let lives = outer.lives().unwrap();
        assert!(lives.iter().all(|life| life.freed));
        assert_eq!(lives[2].birth, Tick(3));
    }
}
