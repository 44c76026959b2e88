//! One device: its reservation, what lives in it, and the two calls that everything else is about.
//!
//! ```text
//!   0 ............ claimed ........................................ total
//!   |  the plan of  |  whatever is served outside a plan: what lives  |
//!   |  the open step|  between steps, outlives them or differs        |
//! ```
//!
//! A step that runs exactly as planned is *on script*: each call is compared with the next expected event and answered from
//! it, with no search, no map and no driver. The first call that differs leaves the script for the rest of the step: the
//! state at that point is rebuilt from the events passed, and from then on every span is checked against what lives before
//! it is handed out. The plan is never trusted for safety: a step begins on script only if nothing at all lives in the
//! claimed range, and only the plan's own, already checked placement hands out bytes while it stays on script.
//!
//! Steps are in `step.rs`, graph pools in `pool.rs`, running out of memory in `exhausted.rs`.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use terrace_profiles::units::{Align, Bytes, DeviceSpan};

use crate::backing::{Backing, Event, Stream};
use crate::debug::{Damage, REDZONE};
use crate::divergence::Divergence;
use crate::error::Error;
use crate::key::Keys;
use crate::pool::{Pool, PoolId};
use crate::record::Request;
use crate::replay::Match;
use crate::script::{Kind, Script};
use crate::space::Space;
use crate::stats::Stats;
use crate::step::{Mode, Open};

/// What a device is opened with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes of the one reservation: a hard limit on everything served from it. Rounded down to the alignment.
    pub budget: Bytes,
    /// Every request is rounded up to it.
    pub align: Align,
    /// Most keys with a plan; the one unused for longest makes room.
    pub most_keys: usize,
    /// A key is given up after so many steps in a row of which less than half was served in plan.
    pub patience: u32,
    /// Loaded plans are compared event by event against what lives for so many steps before they are replayed on script.
    pub verify_steps: u32,
    /// Redzones around every span and poison on free, verified at each free and at the end of each step.
    pub debug: bool,
}

impl Config {
    /// The defaults, with that budget.
    pub fn new(budget: Bytes) -> Self {
        Self { budget, align: Align::DEFAULT, most_keys: 256, patience: 4, verify_steps: 3, debug: false }
    }
}

/// One device with a single owner; [`crate::Allocator`] is the same behind a lock.
pub struct Device {
    pub(crate) backing: Box<dyn Backing>,
    pub(crate) config: Config,
    pub(crate) span: DeviceSpan,
    /// The state of a step on script; on the hot path, so it comes first.
    pub(crate) script: Option<OnScript>,
    pub(crate) space: Space,
    /// Everything below belongs to the plan of the open step.
    pub(crate) claimed: u64,
    /// What lives, by offset; but for what is on script.
    pub(crate) live: BTreeMap<u64, Block>,
    pub(crate) keys: Keys,
    pub(crate) open: Option<Open>,
    /// Threads whose own step is served outside the plan, with their depth.
    pub(crate) outside: HashMap<u64, u32>,
    pub(crate) pools: BTreeMap<PoolId, Pool>,
    pub(crate) labels: Labels,
    pub(crate) stats: Stats,
    pub(crate) last_end: Option<(Stream, Event)>,
    /// Steps begun so far.
    pub(crate) steps: u64,
    /// Damaged redzones that nobody has asked about yet.
    pub(crate) damages: Vec<Damage>,
}

/// A step that has run exactly as planned so far.
pub(crate) struct OnScript {
    pub script: Arc<Script>,
    pub cursor: usize,
    /// The streams by order of first appearance.
    pub streams: Vec<Stream>,
    /// Requests that outlive the step, served outside: slot, and offset or [`FREED`].
    pub outside: Vec<(u32, u64)>,
}

/// No offset: freed after all.
pub(crate) const FREED: u64 = u64::MAX;

/// Something that lives outside the script.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Bytes taken, from its offset.
    pub size: u64,
    /// Bytes asked for.
    pub asked: u64,
    pub label: u32,
    pub stream: Stream,
    /// The step it was asked for in; 0 outside steps.
    pub step: u64,
    /// Its request in the record of that step.
    pub request: Option<u32>,
    pub state: BlockState,
    /// Other streams that use it.
    pub streams: Vec<Stream>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// In a slot of a plan.
    Slot(u32),
    /// Served outside a plan. `missed`: a planned step asked and its plan could not serve it.
    Outside { missed: bool },
    /// Freed, but these events must be done before its bytes are given out again.
    Pending(Vec<Event>),
    /// Belongs to a graph pool: never given out, whatever inside it is free.
    Pinned(PoolId),
}

impl Device {
    /// Makes the one reservation.
    ///
    /// # Errors
    /// What the backing says, or a budget smaller than one aligned span.
    pub fn new(mut backing: Box<dyn Backing>, config: Config) -> Result<Self, Error> {
        let budget = config.budget.align_down(config.align);
        if budget.is_zero() {
            return Err(Error::BudgetTooSmall { budget: config.budget, align: config.align.get() });
        }
        let span = backing.reserve(budget)?;
        let stats = Stats { reservation: budget.get(), ..Stats::default() };
        Ok(Self {
            script: None,
            space: Space::new(budget.get()),
            claimed: 0,
            live: BTreeMap::new(),
            keys: Keys::new(config.most_keys),
            open: None,
            outside: HashMap::new(),
            pools: BTreeMap::new(),
            labels: Labels::default(),
            stats,
            last_end: None,
            steps: 0,
            damages: Vec::new(),
            backing,
            config,
            span,
        })
    }

    /// Where the reservation lies.
    pub fn reservation(&self) -> DeviceSpan {
        self.span
    }

    /// Serves a request of `bytes` on `stream`. `label` says who asks, for reports. No bytes: a span of nothing at 0.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the budget is spent even after everything that could be freed was; the state stays valid.
    #[inline]
    pub fn alloc(&mut self, bytes: Bytes, stream: Stream, label: &str) -> Result<DeviceSpan, Error> {
        if let Some(on) = &mut self.script
            && let Some(op) = on.script.ops.get(on.cursor)
            && op.kind == Kind::Alloc
            && op.seen == round(bytes.get(), self.config.align)
            && on.streams.get(op.lane as usize) == Some(&stream)
        {
            on.cursor += 1;
            return Ok(DeviceSpan { address: self.span.address + op.offset, bytes });
        }
        self.alloc_off_script(bytes, stream, label)
    }

    /// Frees what begins at `address`. Never fails and never panics: a pointer that is not live is counted and named.
    #[inline]
    pub fn free(&mut self, address: u64) {
        if let Some(on) = &mut self.script
            && let Some(op) = on.script.ops.get(on.cursor)
            && op.kind == Kind::Free
            && self.span.address + op.offset == address
        {
            on.cursor += 1;
            return;
        }
        self.free_off_script(address);
    }

    /// Says that `stream` uses what begins at `address`: after its free, the bytes are given out again only once all work
    /// queued on that stream by then is done.
    pub fn record_stream(&mut self, address: u64, stream: Stream) {
        let Some(offset) = self.block_of(address) else {
            self.stats.divergences.note(Divergence::UnknownFree { address });
            return;
        };
        if offset < self.claimed {
            // The script cannot carry extra streams.
            self.leave_script();
        }
        match self.live.get_mut(&offset) {
            Some(block) if block.stream != stream && !block.streams.contains(&stream) => block.streams.push(stream),
            Some(_) => {}
            None => self.stats.divergences.note(Divergence::FreedTwice { address }),
        }
    }

    #[cold]
    fn alloc_off_script(&mut self, bytes: Bytes, stream: Stream, label: &str) -> Result<DeviceSpan, Error> {
        if bytes.is_zero() {
            return Ok(DeviceSpan { address: 0, bytes });
        }
        self.stats.slow_allocs += 1;
        if let Some(id) = self.capturing_pool(stream) {
            return self.alloc_in_pool(id, bytes, round(bytes.get(), self.config.align), stream, label);
        }
        if self.config.debug {
            let outer = self.serve(Self::padded(bytes), stream, label)?;
            return Ok(self.guard(outer, bytes, stream));
        }
        self.serve(bytes, stream, label)
    }

    fn serve(&mut self, bytes: Bytes, stream: Stream, label: &str) -> Result<DeviceSpan, Error> {
        let size = round(bytes.get(), self.config.align);
        if self.open.is_none() || self.is_outside() {
            return self.alloc_outside(bytes, size, stream, label, None, false);
        }
        if let Some(served) = self.next_on_script(bytes, size, stream, label) {
            return served;
        }
        self.leave_script();
        self.alloc_in_open_step(bytes, size, stream, label)
    }

    /// What still counts as on script: the first request of a stream, and one that outlives the step, of whatever size,
    /// since it is served outside anyway.
    fn next_on_script(
        &mut self,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
    ) -> Option<Result<DeviceSpan, Error>> {
        let on = self.script.as_mut()?;
        let op = *on.script.ops.get(on.cursor)?;
        if op.lane as usize == on.streams.len() && !on.streams.contains(&stream) {
            on.streams.push(stream);
        }
        if on.streams.get(op.lane as usize) != Some(&stream) {
            return None;
        }
        match op.kind {
            Kind::Alloc if op.seen == size => {
                on.cursor += 1;
                Some(Ok(DeviceSpan { address: self.span.address + op.offset, bytes }))
            }
            Kind::Outside => {
                let next = on.script.ops[on.cursor + 1..].iter().find(|op| op.kind == Kind::Alloc);
                if op.seen != size && next.is_some_and(|next| next.seen == size) {
                    // It is the next one's: this one is missing.
                    return None;
                }
                on.cursor += 1;
                let (slot, expected, actual) = (op.slot, op.seen, size);
                if actual > expected {
                    self.stats.divergences.note(Divergence::Grew { slot, expected, actual });
                }
                Some(self.alloc_outside(bytes, size, stream, label, None, false).inspect(|span| {
                    let outside = self.script.as_mut().map(|on| &mut on.outside);
                    outside.expect("still on script").push((slot, span.address - self.span.address));
                }))
            }
            Kind::Alloc | Kind::Free => None,
        }
    }

    fn alloc_in_open_step(
        &mut self,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
    ) -> Result<DeviceSpan, Error> {
        let label_id = self.labels.id(label);
        let open = self.open.as_mut().expect("the caller looked");
        let lane = open.lane(stream);
        let (stats, record) = (&mut self.stats, &mut open.record);
        let request = record.requests.len() as u32;
        let mut found = Match::Undecided;
        let mut script = None;
        if let Mode::Replay { script: planned, matcher } = &mut open.mode {
            let mut linked = Vec::new();
            found = matcher.find(
                planned,
                lane,
                size,
                request,
                &mut |divergence| stats.divergences.note(divergence),
                &mut |earlier, slot| linked.push((earlier, slot)),
            );
            for (earlier, slot) in linked {
                record.requests[earlier as usize].slot = Some(slot);
            }
            script = Some(Arc::clone(planned));
        }
        let slot = match found {
            Match::Slot(slot) => Some(slot),
            Match::Undecided => None,
        };
        record.alloc(Request { size, lane, label: label_id, slot, in_plan: false, freed: false });
        let planned =
            slot.filter(|slot| script.as_ref().is_some_and(|script| !script.template.slots[*slot as usize].outlives));
        if let (Some(script), Some(slot)) = (&script, planned)
            && self.slot_is_free(script, slot, size)
        {
            let offset = script.offsets[slot as usize];
            self.open.as_mut().expect("as above").record.requests[request as usize].in_plan = true;
            let state = BlockState::Slot(slot);
            let (step, request, streams) = (self.steps, Some(request), Vec::new());
            let block = Block { size, asked: bytes.get(), label: label_id, stream, step, request, state, streams };
            self.live.insert(offset, block);
            return Ok(DeviceSpan { address: self.span.address + offset, bytes });
        }
        let missed = script.is_some() && planned.is_some_or_undecided(found);
        self.alloc_outside(bytes, size, stream, label, Some(request), missed)
    }

    /// The safety rule: whether no byte of the slot is used by anything, whatever the plan says. Names what is in the way.
    fn slot_is_free(&mut self, script: &Script, slot: u32, size: u64) -> bool {
        let offset = script.offsets[slot as usize];
        let Some((by_offset, by)) = self.blocker(offset, offset + size) else { return true };
        if let BlockState::Pending(_) = by {
            self.drain(false);
            if self.blocker(offset, offset + size).is_none() {
                return true;
            }
        }
        let current = self.live.get(&by_offset).is_some_and(|block| block.step == self.steps);
        let divergence = match by {
            BlockState::Slot(by) if current => Divergence::LateFree { slot, by },
            _ => Divergence::Blocked { slot, by_offset },
        };
        self.stats.divergences.note(divergence);
        false
    }

    /// What lives in `[from, to)`, if anything. Live blocks never overlap, so the last that begins before `to` decides.
    fn blocker(&self, from: u64, to: u64) -> Option<(u64, BlockState)> {
        let (offset, block) = self.live.range(..to).next_back()?;
        (offset + block.size > from).then(|| (*offset, block.state.clone()))
    }

    pub(crate) fn alloc_outside(
        &mut self,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
        request: Option<u32>,
        missed: bool,
    ) -> Result<DeviceSpan, Error> {
        let offset = match self.space.take(size) {
            Some(offset) => offset,
            None => self.take_when_exhausted(bytes, size, label)?,
        };
        let label = self.labels.id(label);
        let step = if self.open.is_some() && !self.is_outside() { self.steps } else { 0 };
        let (state, streams) = (BlockState::Outside { missed }, Vec::new());
        let block = Block { size, asked: bytes.get(), label, stream, step, request, state, streams };
        self.live.insert(offset, block);
        self.stats.outside_taken(size, missed);
        Ok(DeviceSpan { address: self.span.address + offset, bytes })
    }

    #[cold]
    fn free_off_script(&mut self, address: u64) {
        if address == 0 {
            return;
        }
        let Some(offset) = self.block_of(address) else {
            self.stats.divergences.note(Divergence::UnknownFree { address });
            return;
        };
        if offset < self.claimed && !self.live.contains_key(&offset) {
            self.leave_script();
        }
        if self.free_in_pool(offset) {
            return;
        }
        let Some(block) = self.live.get(&offset).filter(|block| !matches!(block.state, BlockState::Pending(_))) else {
            self.stats.divergences.note(Divergence::FreedTwice { address });
            return;
        };
        let (step, request, missed) =
            (block.step, block.request, matches!(block.state, BlockState::Outside { missed: true }));
        if let BlockState::Slot(_) = block.state
            && (self.open.is_none() || step != self.steps)
        {
            self.stats.divergences.note(Divergence::FreeAfterStep { offset });
        }
        if step == self.steps
            && let Some(open) = &mut self.open
        {
            match request {
                Some(request) => open.record.free(request),
                // Served outside while on script, so it has no record yet: counted when the step ends.
                None if step != 0 => open.freed_outside += 1,
                None => {}
            }
        }
        if let Some(on) = &mut self.script
            && let Some(outside) = on.outside.iter_mut().rev().find(|(_, at)| *at == offset)
        {
            outside.1 = FREED;
        }
        if self.config.debug {
            self.verify_and_poison(offset);
        }
        let block = self.live.get_mut(&offset).expect("it was just there");
        let streams = std::mem::take(&mut block.streams);
        if matches!(block.state, BlockState::Outside { .. }) {
            self.stats.outside_given(block.size, missed);
        }
        if streams.is_empty() {
            let block = self.live.remove(&offset).expect("it was just there");
            self.give(offset, block.size);
        } else {
            self.free_after(offset, &streams);
        }
    }

    /// Gives bytes back to the space, but for what the open step's plan has claimed: that comes back when the step ends.
    pub(crate) fn give(&mut self, offset: u64, size: u64) {
        self.space.give(offset.max(self.claimed)..offset + size);
    }

    /// The offset of an address inside the reservation.
    pub(crate) fn offset_of(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.span.address)?;
        (offset < self.span.bytes.get()).then_some(offset)
    }

    /// The offset at which the block of an address that was handed out begins.
    fn block_of(&self, address: u64) -> Option<u64> {
        let offset = self.offset_of(address)?;
        // In a pool there are no redzones.
        let guarded = self.config.debug && !self.in_pool(offset);
        if guarded { offset.checked_sub(REDZONE) } else { Some(offset) }
    }

    /// The figures so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// A request that the plan should have served: it had a slot, or none was found for it. What outlives the step has a slot
/// that is not planned, and is no miss.
trait MissedBy {
    fn is_some_or_undecided(&self, found: Match) -> bool;
}

impl MissedBy for Option<u32> {
    fn is_some_or_undecided(&self, found: Match) -> bool {
        self.is_some() || found == Match::Undecided
    }
}

/// Rounded up; what overflows is larger than any reservation and will not be found.
#[inline]
pub(crate) fn round(bytes: u64, align: Align) -> u64 {
    bytes.saturating_add(align.get() - 1) & !(align.get() - 1)
}

/// The texts that say who asked, each once.
#[derive(Debug, Default)]
pub(crate) struct Labels {
    texts: Vec<String>,
    ids: HashMap<String, u32>,
}

/// Most different labels; further ones share the last.
const MOST_LABELS: usize = 1 << 16;

impl Labels {
    pub fn id(&mut self, text: &str) -> u32 {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let text = if self.texts.len() < MOST_LABELS { text } else { "(too many labels)" };
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let id = self.texts.len() as u32;
        self.texts.push(text.to_owned());
        self.ids.insert(text.to_owned(), id);
        id
    }

    pub fn text(&self, id: u32) -> &str {
        &self.texts[id as usize]
    }

    pub fn texts(&self) -> &[String] {
        &self.texts
    }
}
