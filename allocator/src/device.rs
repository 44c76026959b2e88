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
//! What is not on script is served in `serve.rs`. Steps are in `step.rs`, what orders streams in `order.rs`, graph pools in `pool.rs`, running out of memory in
//! `exhausted.rs`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use terrace_profiles::units::{Align, Bytes, DeviceSpan};

use crate::backing::{Backing, BackingError, Event, Stream};
use crate::debug::{Damage, REDZONE};
use crate::divergence::Divergence;
use crate::error::Error;
use crate::key::Keys;
use crate::labels::Labels;
use crate::order::Ends;
use crate::persist::Loaded;
use crate::pool::{Pool, PoolId};
use crate::report::Leaks;
use crate::script::{Kind, Script};
use crate::space::Space;
use crate::stats::Stats;
use crate::step::{Open, this_thread};
use crate::usage::Usage;

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
    /// Looks for better plans in the background where the quick one is not known to be the best. Without, two equal runs
    /// give equal addresses however busy the machine is.
    pub improve: bool,
    /// Loaded plans are compared event by event against what lives for so many steps before they are replayed on script.
    pub verify_steps: u32,
    /// Redzones around every span and poison on free, verified at each free and at the end of each step.
    pub debug: bool,
}

impl Config {
    /// The defaults, with that budget.
    pub fn new(budget: Bytes) -> Self {
        Self {
            budget,
            align: Align::DEFAULT,
            most_keys: 256,
            patience: 4,
            improve: true,
            verify_steps: 3,
            debug: false,
        }
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
    /// Freed blocks that wait for events, by offset.
    pub(crate) pending: Vec<u64>,
    /// Threads whose own step is served outside the plan, with their depth and what dies with them.
    pub(crate) outside: HashMap<u64, (u32, Weak<()>)>,
    pub(crate) pools: BTreeMap<PoolId, Pool>,
    pub(crate) labels: Labels,
    pub(crate) stats: Stats,
    pub(crate) usage: Usage,
    /// How much of the open script [`Usage::peak`] has seen.
    pub(crate) looked: usize,
    pub(crate) ends: Ends,
    /// Somebody is called when a request finds no room, and has not been yet: nothing is waited for before.
    pub(crate) call_first: bool,
    /// Steps begun so far.
    pub(crate) steps: u64,
    /// Damaged redzones that nobody has asked about yet.
    pub(crate) damages: Vec<Damage>,
    /// What steps left behind.
    pub(crate) leaks: Leaks,
    /// What came of the last file of saved plans.
    pub(crate) last_load: Option<Result<Loaded, String>>,
}

/// A step that has run exactly as planned so far.
pub(crate) struct OnScript {
    pub script: Arc<Script>,
    pub cursor: usize,
    /// The streams by order of first appearance.
    pub streams: Vec<Stream>,
    /// Requests that outlive the step, served outside, in order.
    pub outside: Vec<Beyond>,
}

/// A request that outlives its step.
#[derive(Clone, Copy)]
pub(crate) struct Beyond {
    pub slot: u32,
    /// Where it is, or [`FREED`].
    pub offset: u64,
    pub size: u64,
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
    /// Freed, but these must be done before its bytes are given out again.
    Pending(Waits),
    /// Belongs to a graph pool: never given out, whatever inside it is free.
    Pinned(PoolId),
}

/// What freed bytes wait for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    pub events: Vec<Event>,
    /// Streams that are being captured, so that their event is still to be recorded.
    pub captured: Vec<Stream>,
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
            pending: Vec::new(),
            outside: HashMap::new(),
            pools: BTreeMap::new(),
            labels: Labels::default(),
            stats,
            usage: Usage::default(),
            looked: 0,
            ends: Ends::default(),
            call_first: false,
            steps: 0,
            damages: Vec::new(),
            leaks: Leaks::default(),
            last_load: None,
            backing,
            config,
            span,
        })
    }

    /// Where the reservation lies.
    pub fn reservation(&self) -> DeviceSpan {
        self.span
    }

    /// Replaces the reservation by one of that size, between steps and with nothing in it. Plans stay; those that need more
    /// are not used. Waits for all queued work.
    ///
    /// # Errors
    /// A step is open or something lives or is pinned; or the driver has no such reservation: then the old one is back.
    pub fn resize(&mut self, budget: Bytes) -> Result<(), Error> {
        self.between_steps("resize")?;
        let wanted = budget.align_down(self.config.align);
        if wanted.is_zero() {
            return Err(Error::BudgetTooSmall { budget, align: self.config.align.get() });
        }
        self.drain(true);
        let pinned: u64 = self.pools.values().map(Pool::bytes).sum();
        if !self.live.is_empty() || !self.pools.is_empty() {
            let bytes = self.live.values().map(|block| block.size).sum::<u64>() - pinned;
            let live = self.live.values().filter(|block| !matches!(block.state, BlockState::Pinned(_))).count();
            return Err(Error::NotEmpty { live, bytes, pinned });
        }
        let held = self.span.bytes;
        if !held.is_zero() {
            self.backing.release(self.span)?;
        }
        // Releasing waited for everything, so nothing is queued on the new bytes.
        self.forget_ends();
        let (span, result) = match self.backing.reserve(wanted) {
            Ok(span) => (span, Ok(())),
            Err(refused) => self.restore(held, wanted, refused),
        };
        self.span = span;
        self.space = Space::new(span.bytes.get());
        self.stats.reservation = span.bytes.get();
        if result.is_ok() {
            self.config.budget = budget;
        }
        result
    }

    fn restore(&mut self, held: Bytes, wanted: Bytes, refused: BackingError) -> (DeviceSpan, Result<(), Error>) {
        let nothing = DeviceSpan { address: 0, bytes: Bytes::ZERO };
        if held.is_zero() {
            return (nothing, Err(refused.into()));
        }
        match self.backing.reserve(held) {
            Ok(span) => (span, Err(refused.into())),
            Err(reason) => (nothing, Err(Error::ReservationLost { held, wanted, reason })),
        }
    }

    /// Where the memory comes from: its name, what it has free, how often it was asked.
    pub fn backing(&self) -> &dyn Backing {
        &*self.backing
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

    /// Counts a free that comes from another thread than the one that began the open step, unless it has a step of its own.
    #[inline]
    pub(crate) fn note_thread(&mut self, address: u64) {
        if let Some(open) = &self.open
            && open.thread != this_thread()
        {
            self.note_other_thread(address);
        }
    }

    #[cold]
    fn note_other_thread(&mut self, address: u64) {
        let Some(offset) = self.block_of(address) else { return };
        let on_script = self.script.is_some() && offset < self.claimed;
        if on_script || self.live.get(&offset).is_some_and(|block| block.step == self.steps) {
            self.stats.divergences.note(Divergence::FreeByOtherThread { offset });
        }
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
        if self.in_pool(offset) {
            // Its bytes go to nobody but later captures of the pool.
            return;
        }
        match self.live.get_mut(&offset) {
            Some(Block { state: BlockState::Pending(_), .. }) | None => {
                self.stats.divergences.note(Divergence::FreedTwice { address });
            }
            Some(block) if block.stream != stream && !block.streams.contains(&stream) => block.streams.push(stream),
            Some(_) => {}
        }
    }

    /// The offset of an address inside the reservation.
    pub(crate) fn offset_of(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.span.address)?;
        (offset < self.span.bytes.get()).then_some(offset)
    }

    /// The offset at which the block of an address that was handed out begins.
    pub(crate) fn block_of(&self, address: u64) -> Option<u64> {
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

/// Rounded up; what overflows is larger than any reservation and will not be found.
#[inline]
pub(crate) fn round(bytes: u64, align: Align) -> u64 {
    bytes.saturating_add(align.get() - 1) & !(align.get() - 1)
}
