//! A checked placement with everything a reader needs: what lies where and when, how good it is and what proves that.
//!
//! A [`Plan`] exists only through [`check`]: its fields are private, [`Plan::new`] runs the check, and a
//! plan read from a file is checked again before anyone sees it.

use serde::{Deserialize, Serialize};
use terrace_profiles::codec::{self, Fingerprint, Kind};
use terrace_profiles::units::{Align, Bytes, Offset, Tick};

use crate::bound::{LowerBound, lower_bound};
use crate::check::check;
use crate::error::Error;
use crate::options::Options;
use crate::problem::{Placement, Problem};

/// Version of the plan file; see the policy in the README of `terrace-profiles`.
pub const PLAN_VERSION: u16 = 2;

/// A placement that the check accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    body: Body,
    fingerprint: Fingerprint,
    lower_bound: LowerBound,
    makespan: Bytes,
}

/// What a plan file holds; the rest is derived from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Body {
    pub name: String,
    pub notes: Vec<(String, String)>,
    pub profile: Fingerprint,
    pub options: Options,
    pub labels: Vec<String>,
    pub lanes: Vec<String>,
    pub slots: Vec<Slot>,
    pub problem: Problem,
    pub placement: Placement,
    pub proof: Proof,
}

/// One buffer of the profile, in order of allocation: request `k` of a forward gets slot `k`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// Bytes asked for, not rounded.
    pub bytes: Bytes,
    /// Index into [`Plan::labels`].
    pub label: u32,
    /// Index into [`Plan::lanes`].
    pub lane: u32,
    /// Tick of the allocation.
    pub birth: Tick,
    /// Tick of the free; for a buffer that is never freed, the tick after the last event.
    pub death: Tick,
    /// Whether a free was recorded.
    pub freed: bool,
    /// Index into the problem's buffers; aliases share one.
    pub storage: u32,
}

/// How the placement was found and what is known about its quality.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// Whether no smaller makespan exists, proven by the lower bound or by an exhausted search.
    pub optimal: bool,
    /// Which strategy found it.
    pub strategy: String,
    /// Search nodes counted up to the winner; the same on every machine and thread count.
    pub nodes: u64,
    /// Whether a wall-clock limit cut the search short; only then can two runs differ.
    pub interrupted: bool,
}

impl Plan {
    /// The plan, if the check accepts the placement within the capacity of the options.
    pub(crate) fn new(body: Body) -> Result<Self, Error> {
        body.problem.validate()?;
        check(&body.problem, &body.placement, body.options.capacity)?;
        let lower_bound = lower_bound(&body.problem);
        let makespan = body.placement.makespan(&body.problem);
        let fingerprint = codec::fingerprint_of("terrace-plan", &(body.profile, &body.options));
        Ok(Self { body, fingerprint, lower_bound, makespan })
    }

    /// The bytes of a plan file.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        Ok(codec::encode(Kind::Plan, PLAN_VERSION, self.fingerprint, &self.body)?)
    }

    /// The plan in the bytes of a plan file, checked again; `name` is the file, for errors.
    pub fn decode(name: &str, bytes: &[u8]) -> Result<Self, Error> {
        let (fingerprint, body): (Fingerprint, Body) = codec::decode(Kind::Plan, PLAN_VERSION, name, bytes)?;
        body.consistent().map_err(|reason| Error::BadPlan { name: name.to_owned(), reason })?;
        let plan = Self::new(body)?;
        if plan.fingerprint != fingerprint {
            let reason =
                "the fingerprint is not that of the profile and options inside; make the plan again".to_owned();
            return Err(Error::BadPlan { name: name.to_owned(), reason });
        }
        if plan.body.proof.optimal && plan.makespan < plan.lower_bound.bytes {
            let reason = "it claims less than its own lower bound; make the plan again".to_owned();
            return Err(Error::BadPlan { name: name.to_owned(), reason });
        }
        Ok(plan)
    }

    /// Name of the profile.
    pub fn name(&self) -> &str {
        &self.body.name
    }

    /// Where the profile comes from, as pairs of key and text.
    pub fn notes(&self) -> &[(String, String)] {
        &self.body.notes
    }

    /// Identity of the profile and the options.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Identity of the profile alone.
    pub fn profile(&self) -> Fingerprint {
        self.body.profile
    }

    /// What was asked of the planner.
    pub fn options(&self) -> &Options {
        &self.body.options
    }

    /// The alignment that every size was rounded up to.
    pub fn align(&self) -> Align {
        self.body.options.align
    }

    /// Texts of [`Slot::label`].
    pub fn labels(&self) -> &[String] {
        &self.body.labels
    }

    /// Texts of [`Slot::lane`].
    pub fn lanes(&self) -> &[String] {
        &self.body.lanes
    }

    /// One slot for each buffer of the profile, in order of allocation.
    pub fn slots(&self) -> &[Slot] {
        &self.body.slots
    }

    /// The text of a slot's label.
    pub fn label(&self, slot: &Slot) -> &str {
        &self.body.labels[slot.label as usize]
    }

    /// Where a slot lies.
    pub fn offset(&self, slot: &Slot) -> Offset {
        self.body.placement.offsets[slot.storage as usize]
    }

    /// The bytes a slot's storage takes, rounded up.
    pub fn size(&self, slot: &Slot) -> Bytes {
        self.body.problem.buffers[slot.storage as usize].size
    }

    /// The bytes the arena needs.
    pub fn makespan(&self) -> Bytes {
        self.makespan
    }

    /// No arena can be smaller, and why.
    pub fn lower_bound(&self) -> &LowerBound {
        &self.lower_bound
    }

    /// Makespan over lower bound; 1 for an empty problem.
    pub fn ratio(&self) -> f64 {
        match self.lower_bound.bytes.get() {
            0 => 1.0,
            floor => self.makespan.get() as f64 / floor as f64,
        }
    }

    /// The sum of all rounded sizes: what would be needed if nothing were shared.
    pub fn total(&self) -> Bytes {
        self.body.problem.total()
    }

    /// How it was found and whether it is proven optimal.
    pub fn proof(&self) -> &Proof {
        &self.body.proof
    }

    /// What was placed.
    pub fn problem(&self) -> &Problem {
        &self.body.problem
    }

    /// The offsets, in the order of the problem's buffers.
    pub fn placement(&self) -> &Placement {
        &self.body.placement
    }

    /// The tick at which the lane with the greatest load needs the most; 0 for an empty plan.
    pub fn peak_tick(&self) -> Tick {
        let witness = self.lower_bound.witness.iter().max_by_key(|witness| witness.bytes);
        witness.map_or(Tick(0), |witness| witness.tick)
    }

    /// The slots alive at the peak, largest first. Aliases of one storage all appear.
    pub fn peak(&self) -> Vec<&Slot> {
        let in_use: std::collections::HashSet<u32> =
            self.lower_bound.witness.iter().flat_map(|witness| witness.buffers.iter().copied()).collect();
        let tick_of = |lane: u32| {
            self.lower_bound.witness.iter().find(|witness| witness.lane == lane).map_or(Tick(0), |witness| witness.tick)
        };
        let mut slots: Vec<&Slot> = self
            .body
            .slots
            .iter()
            .filter(|slot| {
                let tick = tick_of(self.body.problem.buffers[slot.storage as usize].lane);
                in_use.contains(&slot.storage) && slot.birth <= tick && tick < slot.death
            })
            .collect();
        slots.sort_by_key(|slot| (std::cmp::Reverse(self.size(slot)), self.offset(slot)));
        slots
    }
}

impl Body {
    /// What [`check`] takes for granted and a foreign file may break; the error is the end of a sentence.
    fn consistent(&self) -> Result<(), String> {
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(storage) = self.problem.buffers.get(slot.storage as usize) else {
                return Err(format!("slot {index} names storage {}, which is not there", slot.storage));
            };
            let inside = storage.lifetime.start <= slot.birth && slot.death <= storage.lifetime.end;
            if !inside || slot.birth >= slot.death {
                return Err(format!("slot {index} lives outside its storage"));
            }
            if slot.bytes > storage.size {
                return Err(format!("slot {index} is larger than its storage"));
            }
            if slot.label as usize >= self.labels.len() || slot.lane as usize >= self.lanes.len() {
                return Err(format!("slot {index} names a label or lane that is not there"));
            }
        }
        for (index, buffer) in self.problem.buffers.iter().enumerate() {
            let life = buffer.lifetime;
            let pieces_inside = buffer.pieces.iter().all(|piece| {
                let ordered = piece.lifetime.start < piece.lifetime.end && piece.from <= piece.to;
                let inside = life.start <= piece.lifetime.start && piece.lifetime.end <= life.end;
                ordered && inside && piece.to <= buffer.size
            });
            if life.start >= life.end || !pieces_inside {
                return Err(format!("storage {index} has an impossible life"));
            }
            // A deserialised Bytes or Offset has passed no constructor.
            let fits = Bytes::new(buffer.size.get()).is_some()
                && buffer.fixed.is_none_or(|offset| Offset::new(offset.get()).is_some());
            if !fits {
                return Err(format!("storage {index} has a size or offset of 2^63 bytes or more"));
            }
        }
        let offsets = self.problem.reserved.iter().flat_map(|reserved| [reserved.from, reserved.to]);
        if offsets.into_iter().any(|offset| Offset::new(offset.get()).is_none()) {
            return Err("it reserves bytes beyond 2^63 - 1".to_owned());
        }
        if self.placement.offsets.len() != self.problem.buffers.len() {
            return Err(format!(
                "{} offsets were given for {} storages",
                self.placement.offsets.len(),
                self.problem.buffers.len()
            ));
        }
        Ok(())
    }
}
