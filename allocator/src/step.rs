//! Steps: from `begin_step` to `end_step`, and what is learnt from one.
//!
//! ```text
//!   begin_step(key)   unseen -> Record        every request from the dynamic space, written down
//!                     seen   -> on script     if nothing lives where the plan lies
//!                            -> Replay        otherwise, or once a call differs: matched and checked one by one
//!                     given up -> Passthrough
//!   end_step          Record: plan it.  Replay: count, and plan again if the plan missed anything.
//! ```
//!
//! A nested begin on the same thread is ignored but counted in depth; a begin on another thread is served outside the plan.
//! A begin where the open step has used up its script, or has the same key, and left nothing alive means that the end was
//! forgotten: the old step is closed first. So it is when the thread that began it is gone.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Arc, Weak};

use terrace_planner::{Effort, Plan};
use terrace_profiles::units::{Align, Bytes};

use crate::backing::Stream;
use crate::device::{Block, BlockState, Device, FREED, OnScript};
use crate::divergence::Divergence;
use crate::error::Error;
use crate::key::Key;
use crate::order::{After, Intruders};
use crate::record::{Happened, Record, Request, SlotInfo, Template};
use crate::replay::Matcher;
use crate::report::Left;
use crate::script::{Kind, Script};

/// The open step.
pub(crate) struct Open {
    pub key: Key,
    pub mode: Mode,
    pub record: Record,
    /// The streams by order of first appearance.
    pub streams: Vec<Stream>,
    /// The stream the step was begun on.
    pub stream: Stream,
    pub thread: u64,
    /// Dies with that thread.
    pub alive: Weak<()>,
    pub depth: u32,
    /// Other streams' work in the claimed range.
    pub intruders: Intruders,
    /// Requests without a record that were freed inside the step: they came and went while on script.
    pub freed_outside: u64,
    /// How often the key had been seen before.
    pub seen_before: u64,
}

/// How the open step is served.
pub(crate) enum Mode {
    /// For the first time: from the dynamic space, written down.
    Record,
    /// By its plan, each request matched and checked.
    Replay { script: Arc<Script>, matcher: Matcher },
    /// Without a plan.
    Passthrough,
}

impl Open {
    /// The lane of a stream in this step.
    pub fn lane(&mut self, stream: Stream) -> u32 {
        let known = self.streams.iter().position(|other| *other == stream);
        known.unwrap_or_else(|| {
            self.streams.push(stream);
            self.streams.len() - 1
        }) as u32
    }
}

impl Device {
    /// Begins a step: a forward of the kind that `key` names, on `stream`. If the last step ended on another stream, this
    /// one waits for it.
    ///
    /// # Errors
    /// What the backing says about the wait; the step is then not begun.
    pub fn begin_step(&mut self, key: &[u8], stream: Stream) -> Result<(), Error> {
        let thread = this_thread();
        if let Some((depth, _)) = self.outside.get_mut(&thread) {
            *depth += 1;
            return Ok(());
        }
        if let Some(open) = &mut self.open {
            if open.thread != thread && open.alive.strong_count() > 0 {
                // The script cannot tell whose requests are whose.
                self.leave_script();
                let steps = u32::try_from(self.outside.len()).unwrap_or(u32::MAX);
                self.outside.insert(thread, (1, life_of_this_thread()));
                self.stats.divergences.note(Divergence::ConcurrentStep { open: steps + 1 });
                return Ok(());
            }
            if open.thread == thread && !self.end_was_forgotten(key) {
                self.open.as_mut().expect("it is open").depth += 1;
                return Ok(());
            }
            self.stats.divergences.note(Divergence::Unbalanced { ends: false });
            self.close_step()?;
        }
        // On a stream that is being captured nothing can wait; what it asks for comes from its graph's pool.
        let ordered = self.wait_for_ends(stream)?;
        self.outside.retain(|_, (_, alive)| alive.strong_count() > 0);
        self.drain(false);
        self.steps += 1;
        self.stats.steps += 1;
        let state = self.keys.entry(key);
        state.last_used = self.steps;
        let seen_before = state.seen;
        state.seen += 1;
        adopt_better(state);
        let planned = state.script.is_some();
        // A plan that is larger than the reservation waits for a resize.
        let script = state.script.clone().filter(|script| script.makespan <= self.space.total() && ordered);
        let verify = state.verify > 0;
        state.verify = state.verify.saturating_sub(1);
        let mode = match &script {
            Some(script) => Mode::Replay { script: Arc::clone(script), matcher: Matcher::new(script) },
            None if state.given_up || planned => Mode::Passthrough,
            None => Mode::Record,
        };
        self.open = Some(Open {
            key: key.into(),
            mode,
            record: Record::default(),
            streams: Vec::new(),
            stream,
            thread,
            alive: life_of_this_thread(),
            depth: 1,
            intruders: Intruders::default(),
            freed_outside: 0,
            seen_before,
        });
        if let Some(script) = script {
            self.note_arena(script.makespan);
            self.claim(script.makespan);
            let clear = self.live.range(..self.claimed).next().is_none();
            // Requests of other threads' steps and of captures have to be told apart one by one.
            let alone = self.outside.is_empty() && !self.is_capturing();
            if clear && alone && !verify && !self.config.debug && self.order_in_claimed(stream) {
                let (cursor, streams, outside) = (0, Vec::new(), Vec::new());
                self.looked = 0;
                self.script = Some(OnScript { script, cursor, streams, outside });
            }
        }
        Ok(())
    }

    /// Ends the step that this thread began.
    ///
    /// # Errors
    /// What the backing says about the event that marks the end.
    pub fn end_step(&mut self) -> Result<(), Error> {
        let thread = this_thread();
        if let Some((depth, _)) = self.outside.get_mut(&thread) {
            *depth -= 1;
            if *depth == 0 {
                self.outside.remove(&thread);
            }
            return Ok(());
        }
        let Some(open) = &mut self.open else {
            self.stats.divergences.note(Divergence::Unbalanced { ends: true });
            return Ok(());
        };
        if open.thread != thread {
            self.stats.divergences.note(Divergence::Unbalanced { ends: true });
            return Ok(());
        }
        open.depth -= 1;
        if open.depth > 0 {
            return Ok(());
        }
        self.close_step()
    }

    /// Bytes to set aside for steps before anything else is sized: the largest plan, what its steps leave behind, and what
    /// is pinned by graph pools.
    pub fn required_bytes(&self) -> Bytes {
        let outlived = self.keys.iter().map(|(_, state)| state.outlived).max().unwrap_or(0);
        let pinned: u64 = self.pools.values().map(crate::pool::Pool::bytes).sum();
        Bytes::new(self.keys.arena() + outlived + pinned).unwrap_or_default()
    }

    /// The plans' part of the reservation: the most that any plan so far needed.
    pub fn arena_bytes(&self) -> Bytes {
        Bytes::new(self.keys.largest).unwrap_or_default()
    }

    /// Gives a key its plan before it ever ran: made offline by `plan solve`.
    ///
    /// # Errors
    /// A step is open.
    pub fn preplan(&mut self, key: &[u8], plan: &Plan) -> Result<(), Error> {
        self.between_steps("preplan")?;
        let template = template_of(plan, &mut self.labels, self.config.align.get());
        let script = Script::new(template, self.config.align, Effort::Quick);
        self.note_arena(script.makespan);
        let verify = self.config.verify_steps;
        let steps = self.steps;
        let state = self.keys.entry(key);
        state.last_used = steps;
        state.script = Some(Arc::new(script));
        state.plans += 1;
        state.verify = verify;
        // The plan stands for the step that would have been recorded.
        state.seen = state.seen.max(1);
        Ok(())
    }

    /// How much the host remembers, so that a test can see that it stays bounded.
    #[doc(hidden)]
    pub fn table_sizes(&self) -> TableSizes {
        TableSizes {
            keys: self.keys.len(),
            labels: self.labels.texts().len(),
            live: self.live.len(),
            pending: self.pending.len(),
            damages: self.damages.len(),
            threads: self.outside.len(),
        }
    }

    /// Makes all keys hash alike, so that a test can see that they are still told apart.
    #[doc(hidden)]
    pub fn collide_keys_for_test(&mut self) {
        self.keys.collide();
    }

    /// A plan of so many bytes is in use.
    pub(crate) fn note_arena(&mut self, makespan: u64) {
        self.keys.largest = self.keys.largest.max(makespan);
        self.stats.arena = self.keys.largest;
    }

    pub(crate) fn between_steps(&self, what: &'static str) -> Result<(), Error> {
        match &self.open {
            None => Ok(()),
            Some(open) => Err(Error::StepOpen { what, step: String::from_utf8_lossy(&open.key).into_owned() }),
        }
    }

    /// Whether the calling thread has a step of its own, served outside the plan of the open one.
    pub(crate) fn is_outside(&self) -> bool {
        !self.outside.is_empty() && self.outside.contains_key(&this_thread())
    }

    /// Leaves the script: the state that it stood for is written out, and from here on each call is matched and checked.
    #[cold]
    pub(crate) fn leave_script(&mut self) {
        self.usage_leaves_script();
        let Some(on) = self.script.take() else { return };
        let open = self.open.as_mut().expect("a script belongs to an open step");
        let Mode::Replay { matcher, .. } = &mut open.mode else { unreachable!("only a replayed step is on script") };
        open.streams.clone_from(&on.streams);
        let mut request_of = vec![None; on.script.template.slots.len()];
        let mut beyond = on.outside.iter();
        for op in &on.script.ops[..on.cursor] {
            let info = &on.script.template.slots[op.slot as usize];
            match op.kind {
                Kind::Alloc | Kind::Outside => {
                    matcher.take_next(&on.script, op.slot);
                    let (slot, in_plan) = (Some(op.slot), op.kind == Kind::Alloc);
                    let size = if in_plan { op.seen } else { beyond.next().map_or(op.seen, |beyond| beyond.size) };
                    let (lane, label) = (op.lane, info.label);
                    let request = open.record.alloc(Request { size, lane, label, slot, in_plan, freed: false });
                    request_of[op.slot as usize] = Some(request);
                    if in_plan {
                        let stream = on.streams[op.lane as usize];
                        let (asked, step, request) = (op.seen, self.steps, Some(request));
                        let (state, streams) = (BlockState::Slot(op.slot), Vec::new());
                        let block = Block { size: op.seen, asked, label, stream, step, request, state, streams };
                        self.live.insert(op.offset, block);
                    }
                }
                Kind::Free => {
                    self.live.remove(&op.offset);
                    if let Some(request) = request_of[op.slot as usize] {
                        open.record.free(request);
                    }
                }
            }
        }
        for beyond in on.outside {
            let Some(request) = request_of[beyond.slot as usize] else { continue };
            if beyond.offset == FREED {
                // It did not outlive the step this time. When exactly it was freed is not known any more.
                open.record.free(request);
                open.freed_outside -= 1;
            } else if let Some(block) = self.live.get_mut(&beyond.offset) {
                block.request = Some(request);
            }
        }
    }

    /// Whether the open step has nothing left to do, so that a begin on its thread is not nested in it: all of its script
    /// has happened, or the same key begins again and nothing that was asked for still lives.
    fn end_was_forgotten(&self, key: &[u8]) -> bool {
        match (&self.script, &self.open) {
            (Some(on), _) => on.cursor == on.script.ops.len() && !on.script.ops.is_empty(),
            (None, Some(open)) => {
                let requests = &open.record.requests;
                *open.key == *key && !requests.is_empty() && requests.iter().all(|request| request.freed)
            }
            (None, None) => false,
        }
    }

    /// Nothing in `[0, bytes)` is given out any more but by the plan. What other streams freed there may still be in use.
    fn claim(&mut self, bytes: u64) {
        self.claimed = bytes;
        for (_, after) in self.space.take_range(0..bytes) {
            if let After::Work(stream) = after {
                self.open.as_mut().expect("a plan belongs to an open step").intruders.push(stream);
            }
        }
    }

    /// What is claimed and not alive becomes free again; the end of the step that is about to be marked comes after its uses.
    fn unclaim(&mut self) {
        let end = std::mem::take(&mut self.claimed);
        let mut from = 0;
        let mut free = Vec::new();
        for (&offset, block) in self.live.range(..end) {
            free.push(from..offset);
            from = offset + block.size;
        }
        free.push(from..end);
        for range in free.into_iter().filter(|range| range.start < range.end) {
            self.space.give(range, After::Ends);
        }
    }

    fn close_step(&mut self) -> Result<(), Error> {
        if self.script.as_ref().is_some_and(|on| on.cursor < on.script.ops.len()) || self.stays_no_longer() {
            self.leave_script();
        }
        let mut open = self.open.take().expect("the caller looked");
        let (stream, intruders) = (open.stream, std::mem::take(&mut open.intruders));
        self.usage_ends_script();
        let streams = match self.script.take() {
            Some(on) => {
                self.close_on_script(&open, &on);
                on.streams
            }
            None => {
                let streams = std::mem::take(&mut open.streams);
                self.close_off_script(open);
                streams
            }
        };
        self.unclaim();
        self.verify_redzones();
        Ok(self.mark_ends(stream, &streams, &intruders)?)
    }

    /// Whether something that the plan leaves out, because it outlives its step, was freed inside for the second time in a
    /// row: it is worth a place in the plan again.
    fn stays_no_longer(&mut self) -> bool {
        let (Some(on), Some(open)) = (&self.script, &self.open) else { return false };
        let freed = on.outside.iter().any(|beyond| beyond.offset == FREED);
        let Some(state) = self.keys.get_mut(&open.key) else { return false };
        state.early = if freed { state.early + 1 } else { 0 };
        state.early >= 2
    }

    fn close_on_script(&mut self, open: &Open, on: &OnScript) {
        let (hits, others) = (on.script.planned() as u64, open.freed_outside);
        self.stats.served(open.seen_before, hits, hits + others);
        self.stats.allocs += on.script.template.slots.len() as u64;
        self.stats.events += on.script.ops.len() as u64 + open.freed_outside;
        self.stats.steps_on_script += 1;
        self.stats.lower_bound = self.stats.lower_bound.max(on.script.lower_bound);
        if let Some(state) = self.keys.get_mut(&open.key) {
            state.failures = 0;
        }
        let left = on.outside.iter().filter_map(|beyond| self.live.get(&beyond.offset));
        self.leaks.step_ended(self.steps, &open.key, left.map(|block| block.size).collect());
    }

    fn close_off_script(&mut self, mut open: Open) {
        let mut missing = 0;
        if let Mode::Replay { script, matcher } = &mut open.mode {
            let (stats, record) = (&mut self.stats, &mut open.record);
            let mut linked = Vec::new();
            let mut tell = |divergence| {
                missing += u64::from(matches!(divergence, Divergence::Missing { .. }));
                stats.divergences.note(divergence);
            };
            matcher.finish(script, &record.requests, &mut tell, &mut |request, slot| linked.push((request, slot)));
            for (request, slot) in linked {
                record.requests[request as usize].slot = slot;
            }
            for request in record.requests.iter().filter(|request| request.in_plan && !request.freed) {
                let slot = request.slot.unwrap_or(u32::MAX);
                stats.divergences.note(Divergence::Outlived { slot, expected: request.size });
            }
        }
        self.learn(&open, missing);
    }

    /// Counts what a step that was written down did, and plans its key again if that is worth it.
    fn learn(&mut self, open: &Open, missing: u64) {
        let record = &open.record;
        let inside = record.requests.iter().filter(|request| request.freed);
        let (hits, inside) = (inside.clone().filter(|request| request.in_plan).count() as u64, inside.count() as u64);
        self.stats.allocs += record.requests.len() as u64;
        self.stats.events += record.order.len() as u64 + open.freed_outside;
        self.stats.lower_bound = self.stats.lower_bound.max(load(record));
        self.stats.served(open.seen_before, hits, inside + open.freed_outside);
        let outlived: u64 = record.requests.iter().filter(|request| !request.freed).map(|request| request.size).sum();
        self.leaks.step_ended(
            self.steps,
            &open.key,
            if outlived == 0 { Left::default() } else { self.left_by(self.steps) },
        );
        let patience = self.config.patience;
        let state = self.keys.entry(&open.key);
        state.outlived = outlived;
        state.early = 0;
        let template = match &open.mode {
            Mode::Passthrough => return,
            Mode::Record => Some(Template::first(record)),
            Mode::Replay { script, .. } => {
                state.failures = if 2 * hits < inside { state.failures + 1 } else { 0 };
                if state.failures >= patience {
                    state.given_up = true;
                    state.script = None;
                    self.stats.divergences.note(Divergence::GivenUp { steps: patience });
                    return;
                }
                // The second step of a key corrects the first, which often does extra work.
                let correct = open.seen_before == 1 && missing > 0;
                let differs = hits < inside || record.requests.iter().any(|request| request.in_plan && !request.freed);
                (differs || correct).then(|| script.template.after(record, self.config.align.get()))
            }
        };
        if let Some(template) = template {
            self.plan(&open.key, template);
        }
    }

    fn plan(&mut self, key: &[u8], template: Template) {
        let begun = std::time::Instant::now();
        let script = Script::new(template, self.config.align, Effort::Quick);
        self.stats.plan_ns += u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.stats.plans += 1;
        self.note_arena(script.makespan);
        let improve = self.config.improve && !script.optimal;
        let better = if improve { search_in_background(&script, self.config.align) } else { None };
        let state = self.keys.entry(key);
        state.plans += 1;
        state.better = better;
        state.script = Some(Arc::new(script));
    }
}

/// Entries in each table of a device.
#[doc(hidden)]
#[allow(missing_docs, reason = "named as the tables are")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSizes {
    pub keys: usize,
    pub labels: usize,
    pub live: usize,
    pub pending: usize,
    pub damages: usize,
    pub threads: usize,
}

/// Whether a better plan is being searched for: one at a time, however many devices and keys there are.
static SEARCHING: AtomicBool = AtomicBool::new(false);

/// The search is over when this is dropped, also by a panic.
struct Searching;

impl Drop for Searching {
    fn drop(&mut self) {
        SEARCHING.store(false, Ordering::Release);
    }
}

/// Looks for a better plan on a thread of its own; a later step adopts it. Nothing while another is looked for.
fn search_in_background(script: &Script, align: Align) -> Option<mpsc::Receiver<Script>> {
    if SEARCHING.swap(true, Ordering::Acquire) {
        return None;
    }
    let (found, wait) = mpsc::channel();
    let template = script.template.clone();
    let search = move || {
        let searched = Searching;
        let better = Script::new(template, align, Effort::Full);
        drop(searched);
        // Nobody waits any more if the key was planned again meanwhile.
        let _ = found.send(better);
    };
    let started = std::thread::Builder::new().name("terrace-search".to_owned()).spawn(search);
    if started.is_err() {
        SEARCHING.store(false, Ordering::Release);
        return None;
    }
    Some(wait)
}

fn adopt_better(state: &mut crate::key::KeyState) {
    let Some(wait) = &state.better else { return };
    match wait.try_recv() {
        Ok(better) => {
            if state.script.as_ref().is_some_and(|script| better.makespan < script.makespan) {
                state.script = Some(Arc::new(better));
            }
            state.better = None;
        }
        Err(TryRecvError::Disconnected) => state.better = None,
        Err(TryRecvError::Empty) => {}
    }
}

/// The greatest sum of sizes of what lived at once and was freed inside the step.
fn load(record: &Record) -> u64 {
    let (mut load, mut most) = (0_u64, 0);
    for happened in &record.order {
        let (Happened::Alloc(index) | Happened::Free(index)) = *happened;
        let request = &record.requests[index as usize];
        match happened {
            Happened::Alloc(_) if request.freed => load += request.size,
            Happened::Free(_) => load -= request.size,
            Happened::Alloc(_) => {}
        }
        most = most.max(load);
    }
    most
}

/// The template that a plan made offline stands for.
fn template_of(plan: &Plan, labels: &mut crate::labels::Labels, align: u64) -> Template {
    let mut order: Vec<(u64, bool, u32)> = Vec::new();
    let mut slots = Vec::new();
    for (index, slot) in (0..).zip(plan.slots()) {
        order.push((slot.birth.0, true, index));
        if slot.freed {
            order.push((slot.death.0, false, index));
        }
        let seen = slot.bytes.get().next_multiple_of(align).max(align);
        let (lane, label, outlives) = (slot.lane, labels.id(plan.label(slot)), !slot.freed);
        slots.push(SlotInfo { seen, size: seen, lane, label, outlives, growths: 0 });
    }
    // A step counts its streams by first appearance, whatever numbers they have in the plan.
    let mut lanes = Vec::new();
    for slot in &mut slots {
        let known = lanes.iter().position(|lane| *lane == slot.lane);
        slot.lane = known.unwrap_or_else(|| {
            lanes.push(slot.lane);
            lanes.len() - 1
        }) as u32;
    }
    // Lives are half-open: at one tick, frees come first.
    order.sort_unstable();
    let order =
        order.into_iter().map(|(_, alloc, index)| if alloc { Happened::Alloc(index) } else { Happened::Free(index) });
    Template { slots, order: order.collect() }
}

/// A number for each thread, never used twice.
#[inline]
pub(crate) fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // No destructor, so that it is there even while a thread ends.
    thread_local!(static HERE: Cell<u64> = const { Cell::new(0) });
    HERE.with(|here| {
        if here.get() == 0 {
            here.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        here.get()
    })
}

/// Dies with the calling thread.
fn life_of_this_thread() -> Weak<()> {
    thread_local!(static ALIVE: Arc<()> = Arc::new(()));
    ALIVE.try_with(Arc::downgrade).unwrap_or_default()
}
