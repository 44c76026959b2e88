//! A planned template, laid out for replay: what is expected to happen next, and where each request goes.

use terrace_planner::solve::Control;
use terrace_planner::{Effort, LaneRule, Options, Proof, Verdict, placed, plan};
use terrace_profiles::units::{Align, Bytes, Offset, Tick};
use terrace_profiles::{Action, BufferId, Event, LabelId, LaneId, Profile};

use crate::record::{Happened, Template};
use crate::usage::Load;

/// Room for growth may make a plan larger by one part in so many.
const ROOM_DIVISOR: u64 = 100;

/// What is expected next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request that the plan serves.
    Alloc,
    /// Its free.
    Free,
    /// A request that outlives the step: served outside the plan.
    Outside,
}

/// One expected event; 32 bytes, read in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Bytes from the base of the arena.
    pub offset: u64,
    /// The size that is expected: the largest seen.
    pub seen: u64,
    /// Index of the request in the template.
    pub slot: u32,
    /// Its lane.
    pub lane: u32,
    /// What it is.
    pub kind: Kind,
}

/// A plan ready for replay.
#[derive(Clone, Debug)]
pub struct Script {
    /// What it was planned from.
    pub template: Template,
    /// Offset of each slot; meaningless for those that outlive the step.
    pub offsets: Vec<u64>,
    /// The expected events.
    pub ops: Vec<Op>,
    /// What lives of the plan before each event, and after the last.
    pub loads: Vec<Load>,
    /// The most that does.
    pub most: Load,
    /// All that the plan serves.
    pub served: Load,
    /// For each lane its slots, in order.
    pub lanes: Vec<Vec<u32>>,
    /// For each slot its place in its lane.
    pub turn: Vec<u32>,
    /// For each slot the place in its lane of the first request after its free; beyond all of them if it outlives the step.
    pub until: Vec<u32>,
    /// Bytes the plan needs.
    pub makespan: u64,
    /// No plan needs less.
    pub lower_bound: u64,
    /// Whether no better plan exists.
    pub optimal: bool,
}

impl Script {
    /// Plans a template. Lanes never share bytes. Room for growth is planned only where it costs next to nothing.
    pub fn new(mut template: Template, align: Align, effort: Effort) -> Self {
        let roomy = Self::planned_as_is(template.clone(), align, effort);
        if template.slots.iter().all(|slot| slot.size == slot.seen) {
            return roomy;
        }
        for slot in &mut template.slots {
            slot.size = slot.seen;
        }
        let tight = Self::planned_as_is(template, align, effort);
        if roomy.makespan <= tight.makespan + tight.makespan / ROOM_DIVISOR { roomy } else { tight }
    }

    fn planned_as_is(template: Template, align: Align, effort: Effort) -> Self {
        // Nobody reads this profile's labels, and copying all of a device's would take longer than to plan.
        let (profile, planned) = profile(&template, None);
        let verdict =
            plan(&profile, &options(align, effort), &Control::default()).expect("a template is a consistent profile");
        let Verdict::Fits(plan) = verdict else { unreachable!("no capacity was asked for") };
        let mut offsets = vec![0; template.slots.len()];
        for (slot, &request) in plan.slots().iter().zip(&planned) {
            offsets[request as usize] = plan.offset(slot).get();
        }
        let (makespan, lower_bound) = (plan.makespan().get(), plan.lower_bound().bytes.get());
        Self::laid_out(template, offsets, makespan, lower_bound, plan.proof().optimal)
    }

    /// A script whose offsets come from outside, if the planner's check accepts them. The template is consistent.
    pub fn with_offsets(
        template: Template,
        offsets: Vec<u64>,
        labels: &[String],
        align: Align,
        optimal: bool,
    ) -> Result<Self, terrace_planner::Error> {
        let mut script = Self::laid_out(template, offsets, 0, 0, optimal);
        let verdict = script.verdict("saved", labels, align)?;
        script.makespan = verdict.best().makespan().get();
        script.lower_bound = verdict.best().lower_bound().bytes.get();
        script.optimal |= script.makespan == script.lower_bound;
        Ok(script)
    }

    /// The script as what the planner reports on. Nothing is searched: the offsets are checked and stay.
    pub fn verdict(&self, name: &str, labels: &[String], align: Align) -> Result<Verdict, terrace_planner::Error> {
        let (mut profile, planned) = profile(&self.template, Some(labels));
        name.clone_into(&mut profile.name);
        let offset = |request: &u32| Offset::new(self.offsets[*request as usize]).unwrap_or_default();
        let offsets: Vec<Offset> = planned.iter().map(offset).collect();
        let (optimal, strategy) = (self.optimal, "as replayed".to_owned());
        let proof = Proof { optimal, strategy, nodes: 0, interrupted: false };
        placed(&profile, &options(align, Effort::Quick), &offsets, proof)
    }

    fn laid_out(template: Template, offsets: Vec<u64>, makespan: u64, lower_bound: u64, optimal: bool) -> Self {
        let op = |kind, slot: u32| {
            let info = &template.slots[slot as usize];
            Op { offset: offsets[slot as usize], seen: info.seen, slot, lane: info.lane, kind }
        };
        let ops = template.order.iter().filter_map(|happened| match *happened {
            Happened::Alloc(slot) if template.slots[slot as usize].outlives => Some(op(Kind::Outside, slot)),
            Happened::Alloc(slot) => Some(op(Kind::Alloc, slot)),
            Happened::Free(slot) if template.slots[slot as usize].outlives => None,
            Happened::Free(slot) => Some(op(Kind::Free, slot)),
        });
        let ops: Vec<Op> = ops.collect();
        let (loads, most) = loads(&ops);
        let served = served(&ops);
        let mut lanes: Vec<Vec<u32>> = Vec::new();
        let mut turn = Vec::with_capacity(template.slots.len());
        for (slot, info) in (0..).zip(&template.slots) {
            let lane = info.lane as usize;
            lanes.resize(lanes.len().max(lane + 1), Vec::new());
            turn.push(lanes[lane].len() as u32);
            lanes[lane].push(slot);
        }
        let until = until(&template, lanes.len());
        Self { template, offsets, ops, loads, most, served, lanes, turn, until, makespan, lower_bound, optimal }
    }

    /// What the plan serves before the event with that index.
    pub fn served_before(&self, cursor: usize) -> Load {
        if cursor == self.ops.len() { self.served } else { served(&self.ops[..cursor]) }
    }

    /// How many requests the plan serves.
    pub fn planned(&self) -> usize {
        self.template.slots.iter().filter(|slot| !slot.outlives).count()
    }
}

/// For each slot how many requests of its lane had come when it was freed.
fn until(template: &Template, lanes: usize) -> Vec<u32> {
    let mut come = vec![0; lanes];
    let mut until = vec![u32::MAX; template.slots.len()];
    for happened in &template.order {
        match *happened {
            Happened::Alloc(slot) => come[template.slots[slot as usize].lane as usize] += 1,
            Happened::Free(slot) => until[slot as usize] = come[template.slots[slot as usize].lane as usize],
        }
    }
    until
}

/// What lives before each event and after the last, and the most of it.
fn loads(ops: &[Op]) -> (Vec<Load>, Load) {
    let (mut now, mut most) = (Load::default(), Load::default());
    let mut loads = Vec::with_capacity(ops.len() + 1);
    loads.push(now);
    for op in ops {
        match op.kind {
            Kind::Alloc => now.add(op.seen),
            Kind::Free => now.take(op.seen),
            Kind::Outside => {}
        }
        most = most.max_of(now);
        loads.push(now);
    }
    (loads, most)
}

fn served(ops: &[Op]) -> Load {
    let mut served = Load::default();
    for op in ops.iter().filter(|op| op.kind == Kind::Alloc) {
        served.add(op.seen);
    }
    served
}

fn options(align: Align, effort: Effort) -> Options {
    Options { align, effort, lanes: LaneRule::Separate, ..Options::default() }
}

/// The planned requests as a profile, with these labels or one for all, and for each of its buffers the request.
fn profile(template: &Template, labels: Option<&[String]>) -> (Profile, Vec<u32>) {
    let lanes = template.slots.iter().map(|slot| slot.lane + 1).max().unwrap_or(0);
    let mut profile = Profile {
        name: "step".to_owned(),
        labels: labels.map_or_else(|| vec!["request".to_owned()], <[String]>::to_vec),
        lanes: (0..lanes).map(|lane| format!("stream {lane}")).collect(),
        ..Profile::default()
    };
    let mut planned = Vec::new();
    let mut buffer_of = vec![0_u32; template.slots.len()];
    for happened in &template.order {
        let (Happened::Alloc(slot) | Happened::Free(slot)) = *happened;
        let info = &template.slots[slot as usize];
        if info.outlives {
            continue;
        }
        let action = match happened {
            Happened::Alloc(_) => {
                buffer_of[slot as usize] = planned.len() as u32;
                planned.push(slot);
                let bytes = Bytes::new(info.size).expect("a slot lies inside a reservation");
                let label = LabelId(if labels.is_some() { info.label } else { 0 });
                let lane = LaneId(info.lane);
                Action::Alloc { id: BufferId(buffer_of[slot as usize]), bytes, label, lane, hints: None }
            }
            Happened::Free(_) => Action::Free { id: BufferId(buffer_of[slot as usize]) },
        };
        profile.events.push(Event { tick: Tick(profile.events.len() as u64), action });
    }
    (profile, planned)
}
