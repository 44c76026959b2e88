//! The record of a forward, or of several, and the one pass that checks it.
//!
//! ```text
//!   events:  a0 ---- a1 ---- f0 -- s key -- a2 -- f2 -- e ---- f1
//!   lives:   0 [-----------------)
//!            1         [---------------------------------------)
//!            2                               [----)
//! ```
//!
//! [`Profile::lives`] turns events into one [`Life`] a buffer and is where every rule is checked, so nobody can read lives
//! out of a record that contradicts itself.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Inconsistency};
use crate::event::{Action, BufferId, Event, Hints, LabelId, LaneId};
use crate::units::{Bytes, Tick};

/// What device memory was asked for, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Short name, for reports.
    pub name: String,
    /// Where the record comes from: pairs of key and text, such as `gpu`, `NVIDIA H200`.
    pub notes: Vec<(String, String)>,
    /// Who allocates: one text for each [`LabelId`].
    pub labels: Vec<String>,
    /// The streams by first appearance: one text for each [`LaneId`].
    pub lanes: Vec<String>,
    /// What happened, in order.
    pub events: Vec<Event>,
}

/// One buffer of a checked profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Life {
    /// Bytes asked for, not rounded.
    pub bytes: Bytes,
    /// Who asked.
    pub label: LabelId,
    /// On which stream.
    pub lane: LaneId,
    /// Tick of the allocation.
    pub birth: Tick,
    /// Tick at which the program let go of it: [`Life::death`] where no other was recorded.
    pub requested: Tick,
    /// Tick of the free; for a buffer that is never freed, the tick after the last event.
    pub death: Tick,
    /// Whether a free was recorded.
    pub freed: bool,
    /// What its placement must respect.
    pub hints: Option<Box<Hints>>,
    /// Changes of the range in use, in order; empty for nearly all buffers.
    pub keeps: Vec<(Tick, Range<u64>)>,
}

/// One forward inside a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step<'a> {
    /// What the runtime calls this kind of forward.
    pub key: &'a str,
    /// Its events, without the markers.
    pub events: Range<usize>,
}

/// Which steps of a profile are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepSelector {
    /// Each step.
    All,
    /// The step with that number, from 0.
    Number(usize),
    /// Each step with that key.
    Key(String),
}

impl std::str::FromStr for StepSelector {
    type Err = std::convert::Infallible;

    /// `all`, a number (from 0), else a key.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "all" => Self::All,
            _ => text.parse().map_or_else(|_| Self::Key(text.to_owned()), Self::Number),
        })
    }
}

impl Profile {
    /// The label of this text, which is added if there is none. For a few dozen labels: it is searched for.
    pub(crate) fn label_of(&mut self, text: &str) -> LabelId {
        let at = self.labels.iter().position(|label| label == text).unwrap_or_else(|| {
            self.labels.push(text.to_owned());
            self.labels.len() - 1
        });
        LabelId(at as u32)
    }

    /// Checks every rule; the error names the event and the rule it breaks.
    pub fn check(&self) -> Result<(), Error> {
        self.lives().map(drop)
    }

    /// The tick after the last event: where buffers that are never freed end.
    pub fn end(&self) -> Tick {
        Tick(self.events.last().map_or(0, |event| event.tick.0.saturating_add(1)))
    }

    /// One [`Life`] for each buffer, in order of allocation, if the record keeps every rule.
    pub fn lives(&self) -> Result<Vec<Life>, Error> {
        let mut pass = Pass { profile: self, lives: Vec::new(), freed_at: Vec::new(), open_step: None };
        let mut now = Tick(0);
        for (index, event) in self.events.iter().enumerate() {
            let step = if event.tick < now {
                Err(Inconsistency::TickGoesBack { before: now, after: event.tick })
            } else if event.tick > Tick::MAX {
                Err(Inconsistency::TickTooLate(event.tick))
            } else {
                now = event.tick;
                pass.take(index, event)
            };
            step.map_err(|reason| Error::Inconsistent { profile: self.name.clone(), event: index, reason })?;
        }
        let end = self.end();
        for life in pass.lives.iter_mut().filter(|life| !life.freed) {
            life.death = end;
            life.requested = life.requested.min(end);
        }
        Ok(pass.lives)
    }

    /// The steps in order. A step that never ends reaches to the end of the record.
    pub fn steps(&self) -> Vec<Step<'_>> {
        let mut steps = Vec::new();
        let mut open: Option<(&str, usize)> = None;
        for (index, event) in self.events.iter().enumerate() {
            match &event.action {
                Action::StepBegin { key } => open = Some((key, index + 1)),
                Action::StepEnd => {
                    if let Some((key, begin)) = open.take() {
                        steps.push(Step { key, events: begin..index });
                    }
                }
                _ => {}
            }
        }
        if let Some((key, begin)) = open {
            steps.push(Step { key, events: begin..self.events.len() });
        }
        steps
    }

    /// One profile for each selected step: the buffers allocated inside it. What was alive when the step began is not
    /// part of its plan (it is served outside), and what outlives the step lives to its end.
    pub fn select(&self, selector: &StepSelector) -> Result<Vec<Profile>, Error> {
        self.check()?;
        let steps = self.steps();
        let wanted = |number: usize, step: &Step<'_>| match selector {
            StepSelector::All => true,
            StepSelector::Number(n) => *n == number,
            StepSelector::Key(key) => key == step.key,
        };
        let selected: Vec<_> =
            steps.iter().enumerate().filter(|(n, s)| wanted(*n, s)).map(|(n, s)| self.cut(n, s)).collect();
        if selected.is_empty() {
            return Err(Error::Selection { name: self.name.clone(), reason: self.no_such_step(selector, &steps) });
        }
        Ok(selected)
    }

    fn no_such_step(&self, selector: &StepSelector, steps: &[Step<'_>]) -> String {
        if steps.is_empty() {
            return "there are no steps in this profile; leave --step out".to_owned();
        }
        let mut keys: Vec<&str> = Vec::new();
        for step in steps {
            if !keys.contains(&step.key) && keys.len() < 8 {
                keys.push(step.key);
            }
        }
        let wanted = match selector {
            StepSelector::All => "all".to_owned(),
            StepSelector::Number(n) => n.to_string(),
            StepSelector::Key(key) => format!("'{key}'"),
        };
        let last = steps.len() - 1;
        format!("there is no step {wanted}; steps are numbered 0 to {last}, with keys such as {}", keys.join(", "))
    }

    fn cut(&self, number: usize, step: &Step<'_>) -> Profile {
        let events = &self.events[step.events.clone()];
        let first = events.iter().find_map(|event| match event.action {
            Action::Alloc { id, .. } => Some(id.0),
            _ => None,
        });
        let inside = |id: BufferId| first.is_some_and(|first| id.0 >= first);
        let local = |id: BufferId| BufferId(id.0 - first.unwrap_or(0));
        let cut = events.iter().filter_map(|event| {
            let mut event = event.clone();
            match &mut event.action {
                Action::Alloc { id, hints, .. } => {
                    *id = local(*id);
                    if let Some(hints) = hints {
                        hints.alias = hints.alias.filter(|of| inside(*of)).map(local);
                    }
                }
                Action::Free { id } | Action::FreeRequested { id } | Action::Keep { id, .. } => {
                    if !inside(*id) {
                        return None;
                    }
                    *id = local(*id);
                }
                Action::Op { .. } | Action::Wait { .. } => {}
                Action::StepBegin { .. } | Action::StepEnd => return None,
            }
            Some(event)
        });
        Profile {
            name: format!("{}#{number}:{}", self.name, step.key),
            notes: self.notes.clone(),
            labels: self.labels.clone(),
            lanes: self.lanes.clone(),
            events: cut.collect(),
        }
    }
}

/// The state of [`Profile::lives`] between two events.
struct Pass<'a> {
    profile: &'a Profile,
    lives: Vec<Life>,
    /// For each buffer the event that freed it.
    freed_at: Vec<Option<usize>>,
    open_step: Option<&'a str>,
}

/// What [`Life::requested`] holds until a request is seen.
const NOT_REQUESTED: Tick = Tick(u64::MAX);

impl<'a> Pass<'a> {
    fn take(&mut self, index: usize, event: &'a Event) -> Result<(), Inconsistency> {
        let now = event.tick;
        match &event.action {
            Action::Alloc { id, bytes, label, lane, hints } => {
                self.alloc(now, *id, *bytes, *label, *lane, hints.as_deref())
            }
            Action::FreeRequested { id } => {
                let life = self.alive(*id)?;
                if life.requested != NOT_REQUESTED {
                    return Err(Inconsistency::AlreadyRequested(*id));
                }
                if life.birth == now {
                    return Err(Inconsistency::EmptyLife { id: *id, tick: now });
                }
                life.requested = now;
                Ok(())
            }
            Action::Free { id } => {
                let life = self.alive(*id)?;
                if life.birth == now {
                    return Err(Inconsistency::EmptyLife { id: *id, tick: now });
                }
                life.death = now;
                life.requested = life.requested.min(now);
                life.freed = true;
                self.freed_at[id.0 as usize] = Some(index);
                Ok(())
            }
            Action::Keep { id, from, to } => {
                let life = self.alive(*id)?;
                if from > to || *to > life.bytes {
                    let (from, to, bytes) = (from.get(), to.get(), life.bytes.get());
                    return Err(Inconsistency::KeepOutside { id: *id, from, to, bytes });
                }
                life.keeps.push((now, from.get()..to.get()));
                Ok(())
            }
            Action::StepBegin { key } => match self.open_step.replace(key) {
                Some(open) => Err(Inconsistency::StepInsideStep(open.to_owned())),
                None => Ok(()),
            },
            Action::StepEnd => self.open_step.take().map(drop).ok_or(Inconsistency::NoOpenStep),
            Action::Op { label, lane } => self.known(*label, *lane),
            Action::Wait { lane, on } => self.known_lane(*lane).and_then(|()| self.known_lane(*on)),
        }
    }

    fn alloc(
        &mut self,
        now: Tick,
        id: BufferId,
        bytes: Bytes,
        label: LabelId,
        lane: LaneId,
        hints: Option<&Hints>,
    ) -> Result<(), Inconsistency> {
        let expected = BufferId(u32::try_from(self.lives.len()).expect("more than 2^32 buffers never fit in memory"));
        if id != expected {
            return Err(Inconsistency::IdOutOfOrder { found: id, expected });
        }
        self.known(label, lane)?;
        if let Some(offset) = hints.and_then(|hints| hints.fixed)
            && offset.checked_add(bytes).is_err()
        {
            return Err(Inconsistency::FixedTooFar { id, offset: offset.get() });
        }
        if let Some(of) = hints.and_then(|hints| hints.alias)
            && self.alive(of).is_err()
        {
            return Err(Inconsistency::AliasOfDead { id, of });
        }
        let hints = hints.map(|hints| Box::new(hints.clone()));
        let (requested, death, keeps) = (NOT_REQUESTED, now, Vec::new());
        self.lives.push(Life { bytes, label, lane, birth: now, requested, death, freed: false, hints, keeps });
        self.freed_at.push(None);
        Ok(())
    }

    fn alive(&mut self, id: BufferId) -> Result<&mut Life, Inconsistency> {
        let index = id.0 as usize;
        match self.freed_at.get(index) {
            None => Err(Inconsistency::NotAllocated(id)),
            Some(Some(event)) => Err(Inconsistency::AlreadyFreed { id, event: *event }),
            Some(None) => Ok(&mut self.lives[index]),
        }
    }

    fn known(&self, label: LabelId, lane: LaneId) -> Result<(), Inconsistency> {
        if label.0 as usize >= self.profile.labels.len() {
            return Err(Inconsistency::UnknownLabel(label.0));
        }
        self.known_lane(lane)
    }

    fn known_lane(&self, lane: LaneId) -> Result<(), Inconsistency> {
        if lane.0 as usize >= self.profile.lanes.len() {
            return Err(Inconsistency::UnknownLane(lane.0));
        }
        Ok(())
    }
}
