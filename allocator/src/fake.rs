//! A device for tests: address space, one queue of work per stream, and a checker that knows what orders what.
//!
//! A real GPU hides an early reuse behind luck: the old kernel has usually run by then. Here nothing runs until the test says
//! so, and the checker does not look at when things ran but at what makes them run in that order, so that it finds the race in
//! every interleaving, not only in the unlucky one:
//!
//! ```text
//! stream 1   [ attention reads X ]                       X is freed here, its kernel still queued
//! stream 2                          [ mlp writes Y ]     Y got X's bytes: nothing orders the two -> a Hazard
//! ```
//!
//! Order comes from a stream's own queue, from an event that a stream waits for, and from the host, once it has seen an event
//! done (`is_done`, `synchronize`) and launches afterwards. Nothing else: the default stream is a stream like the others, and
//! `run_one` and `run_all` let time pass without telling the host.
//!
//! A [`FakeDevice`] is a handle. A test keeps one clone, and the allocator owns another as its backing:
//!
//! ```
//! use terrace_allocator::backing::{Backing, Stream};
//! use terrace_allocator::fake::{Access, FakeDevice};
//! use terrace_profiles::units::Bytes;
//!
//! let fake = FakeDevice::new(Bytes::new(1 << 40).unwrap());
//! let mut backing: Box<dyn Backing> = Box::new(fake.clone());
//! let span = backing.reserve(Bytes::new(20 << 30).unwrap()).unwrap();
//! fake.launch(Stream(1), "attention", &[Access::Read(span)]);
//! fake.launch(Stream(2), "mlp", &[Access::Write(span, 7)]);
//! assert_eq!(fake.hazards().len(), 1);
//! ```

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::backing::{Backing, BackingError, Event, Stream, head, known, may_release, may_reserve, offset_in};

/// Where a reservation begins: a number that no pointer of this process has, aligned to 2 MiB.
const BASE: u64 = 0xfa_0000_0000_0000;

/// A handle of a device for tests; clones are the same device.
#[derive(Clone, Debug)]
pub struct FakeDevice(Arc<Mutex<State>>);

/// What a kernel does to a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads it.
    Read(DeviceSpan),
    /// Fills it with this byte.
    Write(DeviceSpan, u8),
}

/// Something that would corrupt data, or fault, on a real device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hazard {
    /// Two uses share bytes, at least one writes, and nothing orders them.
    Unordered {
        /// The earlier call.
        first: (String, Stream),
        /// The later call.
        second: (String, Stream),
        /// The bytes that they share.
        shared: DeviceSpan,
    },
    /// A kernel left the reservation.
    Outside {
        /// The kernel.
        kernel: (String, Stream),
        /// What it touches.
        span: DeviceSpan,
    },
}

/// How often the allocator called its backing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// `reserve`, refused ones included.
    pub reserves: u64,
    /// `release`.
    pub releases: u64,
    /// `record`.
    pub records: u64,
    /// `is_done`.
    pub queries: u64,
    /// `wait`.
    pub waits: u64,
    /// `synchronize`.
    pub synchronizes: u64,
    /// `fill`.
    pub fills: u64,
    /// `read`.
    pub reads: u64,
}

/// How far each stream has come: what lies at or below is known to be over.
type Clock = BTreeMap<Stream, u64>;

#[derive(Debug, Default)]
struct State {
    total: Bytes,
    held: Option<DeviceSpan>,
    reservations: u64,
    refuse: u64,
    lost: bool,
    queues: BTreeMap<Stream, Queue>,
    events: HashMap<u64, Recorded>,
    newest_event: u64,
    /// What the host has seen done.
    host: Clock,
    /// The uses that a later one could still collide with.
    uses: Vec<Use>,
    hazards: Vec<Hazard>,
    calls: Calls,
    /// What was written: start -> (end, byte). The rest is zero. Runs of one byte need no memory however long they are.
    contents: BTreeMap<u64, (u64, u8)>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Items queued and items run so far.
    queued: u64,
    run: u64,
    work: VecDeque<Work>,
    /// What its newest item comes after.
    clock: Clock,
    capturing: bool,
}

#[derive(Clone, Debug)]
enum Work {
    Kernel(Vec<Access>),
    Wait(Stream, u64),
}

#[derive(Clone, Debug)]
struct Recorded {
    stream: Stream,
    position: u64,
    clock: Clock,
}

#[derive(Debug)]
struct Use {
    name: String,
    stream: Stream,
    position: u64,
    start: u64,
    end: u64,
    writes: bool,
}

impl FakeDevice {
    /// A device with that much memory, of which none exists: only addresses do.
    pub fn new(total: Bytes) -> Self {
        Self(Arc::new(Mutex::new(State { total, ..State::default() })))
    }

    /// Queues a kernel. On a capturing stream it goes into the graph and does not run; launch it again where the graph runs.
    pub fn launch(&self, stream: Stream, name: &str, accesses: &[Access]) {
        self.0.lock().launch(stream, name, accesses);
    }

    /// Says that the allocator handed these bytes out for use on `stream`: from here on every older use of them must be over
    /// before what that stream does next.
    pub fn hand_out(&self, stream: Stream, span: DeviceSpan) {
        self.0.lock().touch(stream, "the hand-out", Access::Write(span, 0));
    }

    /// Runs the oldest item of a stream. False when there is none, or when it waits for an event that is not done.
    pub fn run_one(&self, stream: Stream) -> bool {
        self.0.lock().run_one(stream)
    }

    /// Runs everything that is queued. The host does not learn of it.
    pub fn run_all(&self) {
        self.0.lock().run_all();
    }

    /// Runs everything that is queued, and the host knows: cuCtxSynchronize.
    pub fn synchronize_all(&self) {
        self.0.lock().synchronize_all();
    }

    /// Items that are queued on a stream and have not run.
    pub fn pending(&self, stream: Stream) -> u64 {
        self.0.lock().queues.get(&stream).map_or(0, |queue| queue.queued - queue.run)
    }

    /// What went wrong so far, in the order of the launches.
    pub fn hazards(&self) -> Vec<Hazard> {
        self.0.lock().hazards.clone()
    }

    /// The calls of the allocator so far.
    pub fn calls(&self) -> Calls {
        self.0.lock().calls
    }

    /// The next `times` reservations are refused.
    pub fn refuse_reservations(&self, times: u64) {
        self.0.lock().refuse = times;
    }

    /// Begins or ends the capture of a stream into a graph.
    pub fn set_capturing(&self, stream: Stream, capturing: bool) {
        self.0.lock().queues.entry(stream).or_default().capturing = capturing;
    }

    /// The device is gone, as after a reset or at exit: from now on each call fails, but `release`.
    pub fn lose(&self) {
        self.0.lock().lost = true;
    }
}

impl State {
    fn launch(&mut self, stream: Stream, name: &str, accesses: &[Access]) {
        if self.queues.entry(stream).or_default().capturing {
            return;
        }
        self.push(stream, Work::Kernel(accesses.to_vec()), &Clock::new());
        for access in accesses {
            self.touch(stream, name, *access);
        }
    }

    /// Queues an item; it comes after its stream's earlier items, after `also`, and after what the host has seen.
    fn push(&mut self, stream: Stream, work: Work, also: &Clock) {
        let queue = self.queues.entry(stream).or_default();
        queue.queued += 1;
        queue.work.push_back(work);
        join(&mut queue.clock, also);
        join(&mut queue.clock, &self.host);
        queue.clock.insert(stream, queue.queued);
    }

    /// Holds one access of a stream's newest item against every earlier use.
    fn touch(&mut self, stream: Stream, name: &str, access: Access) {
        let (span, writes) = match access {
            Access::Read(span) => (span, false),
            Access::Write(span, _) => (span, true),
        };
        if offset_in(self.held, span, "launch").is_err() {
            self.hazards.push(Hazard::Outside { kernel: (name.to_owned(), stream), span });
            return;
        }
        let queue = self.queues.entry(stream).or_default();
        let mut clock = queue.clock.clone();
        join(&mut clock, &self.host);
        let (start, end) = (span.address, span.address + span.bytes.get());
        let new = Use { name: name.to_owned(), stream, position: queue.queued, start, end, writes };
        let is_after = |old: &Use| is_over(&clock, old.stream, old.position);
        for old in self.uses.iter().filter(|old| old.collides(&new) && !is_after(old)) {
            self.hazards.push(Hazard::Unordered {
                first: (old.name.clone(), old.stream),
                second: (name.to_owned(), stream),
                shared: old.shared(&new),
            });
        }
        // Whatever could collide with a use that this one covers and comes after, collides with this one too; and what the
        // host has seen done comes before everything from now on.
        self.uses.retain(|old| {
            let stands_in = new.start <= old.start && old.end <= new.end && (new.writes || !old.writes);
            let idle = stands_in && is_after(old) || is_over(&self.host, old.stream, old.position);
            !idle
        });
        self.uses.push(new);
    }

    fn run_one(&mut self, stream: Stream) -> bool {
        let Some(work) = self.queues.get(&stream).and_then(|queue| queue.work.front()).cloned() else { return false };
        match work {
            Work::Wait(other, position) if !self.has_run(other, position) => return false,
            Work::Wait(..) => {}
            Work::Kernel(accesses) => {
                for access in accesses {
                    if let Access::Write(span, byte) = access {
                        paint(&mut self.contents, span.address, span.address + span.bytes.get(), byte);
                    }
                }
            }
        }
        let queue = self.queues.entry(stream).or_default();
        queue.work.pop_front();
        queue.run += 1;
        true
    }

    fn has_run(&self, stream: Stream, position: u64) -> bool {
        self.queues.get(&stream).map_or(0, |queue| queue.run) >= position
    }

    /// Ends, because an item waits only for items that were queued before it.
    fn run_all(&mut self) {
        let streams: Vec<Stream> = self.queues.keys().copied().collect();
        loop {
            let mut ran = false;
            for stream in &streams {
                while self.run_one(*stream) {
                    ran = true;
                }
            }
            if !ran {
                return;
            }
        }
    }

    fn synchronize_all(&mut self) {
        self.run_all();
        for (stream, queue) in &self.queues {
            self.host.insert(*stream, queue.queued);
        }
    }

    /// Runs what an event stands for, and no more than that.
    fn run_up_to(&mut self, stream: Stream, position: u64) {
        while !self.has_run(stream, position) {
            if self.run_one(stream) {
                continue;
            }
            let front = self.queues.get(&stream).and_then(|queue| queue.work.front());
            let Some(&Work::Wait(other, earlier)) = front else { return };
            self.run_up_to(other, earlier);
        }
    }

    fn alive(&self, call: &'static str) -> Result<(), BackingError> {
        if self.lost { fail(call, "the device is lost") } else { Ok(()) }
    }

    fn not_capturing(&mut self, stream: Stream, call: &'static str) -> Result<(), BackingError> {
        self.alive(call)?;
        let capturing = self.queues.entry(stream).or_default().capturing;
        if capturing { fail(call, "the stream is being captured") } else { Ok(()) }
    }
}

fn fail(call: &'static str, reason: &str) -> Result<(), BackingError> {
    Err(BackingError::Call { call, reason: reason.to_owned() })
}

fn join(clock: &mut Clock, other: &Clock) {
    for (stream, position) in other {
        let at = clock.entry(*stream).or_default();
        *at = (*at).max(*position);
    }
}

fn is_over(clock: &Clock, stream: Stream, position: u64) -> bool {
    clock.get(&stream).copied().unwrap_or(0) >= position
}

/// Sets `[start, end)` to `byte`, and cuts what was there.
fn paint(contents: &mut BTreeMap<u64, (u64, u8)>, start: u64, end: u64, byte: u8) {
    let hit: Vec<_> =
        contents.range(..end).rev().take_while(|(_, (to, _))| *to > start).map(|(f, r)| (*f, *r)).collect();
    for (from, (to, old)) in hit {
        contents.remove(&from);
        if from < start {
            contents.insert(from, (start, old));
        }
        if to > end {
            contents.insert(end, (to, old));
        }
    }
    if start < end {
        contents.insert(start, (end, byte));
    }
}

impl Use {
    fn collides(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end && (self.writes || other.writes)
    }

    fn shared(&self, other: &Self) -> DeviceSpan {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        DeviceSpan { address: start, bytes: Bytes::new(end - start).unwrap_or_default() }
    }
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unordered { first, second, shared } => write!(
                f,
                "{} on stream {} and {} on stream {} share {} at {:#x}, and nothing orders them",
                first.0, first.1.0, second.0, second.1.0, shared.bytes, shared.address
            ),
            Self::Outside { kernel, span } => write!(
                f,
                "{} on stream {} touches {} at {:#x}, outside the reservation",
                kernel.0, kernel.1.0, span.bytes, span.address
            ),
        }
    }
}

impl Backing for FakeDevice {
    fn name(&self) -> String {
        "fake".to_owned()
    }

    fn memory(&self) -> Option<(Bytes, Bytes)> {
        let state = self.0.lock();
        let held = state.held.map_or(Bytes::ZERO, |held| held.bytes);
        Some((state.total, state.total.checked_sub(held)?))
    }

    fn reserve(&mut self, bytes: Bytes) -> Result<DeviceSpan, BackingError> {
        let mut state = self.0.lock();
        state.calls.reserves += 1;
        state.alive("reserve")?;
        may_reserve(state.held, bytes)?;
        let told_to = state.refuse > 0;
        state.refuse = state.refuse.saturating_sub(1);
        if told_to || bytes > state.total {
            let why = if told_to { "the test said so".to_owned() } else { format!("the device has {}", state.total) };
            return Err(BackingError::Reserve { asked: bytes, reason: why });
        }
        let span = DeviceSpan { address: BASE, bytes };
        state.held = Some(span);
        state.reservations += 1;
        Ok(span)
    }

    fn release(&mut self, span: DeviceSpan) -> Result<(), BackingError> {
        let mut state = self.0.lock();
        state.calls.releases += 1;
        may_release(state.held, span)?;
        state.synchronize_all();
        state.held = None;
        state.uses.clear();
        state.contents.clear();
        Ok(())
    }

    fn reservations(&self) -> u64 {
        self.0.lock().reservations
    }

    fn record(&mut self, stream: Stream) -> Result<Event, BackingError> {
        let mut state = self.0.lock();
        state.calls.records += 1;
        state.not_capturing(stream, "record")?;
        let queue = state.queues.entry(stream).or_default();
        let recorded = Recorded { stream, position: queue.queued, clock: queue.clock.clone() };
        state.newest_event += 1;
        let event = state.newest_event;
        state.events.insert(event, recorded);
        Ok(Event(event))
    }

    fn is_done(&mut self, event: Event) -> Result<bool, BackingError> {
        let mut state = self.0.lock();
        state.calls.queries += 1;
        state.alive("is_done")?;
        known(event, state.newest_event, "is_done")?;
        let Some(recorded) = state.events.get(&event.0).cloned() else { return Ok(true) };
        let done = state.has_run(recorded.stream, recorded.position);
        if done {
            state.events.remove(&event.0);
            join(&mut state.host, &recorded.clock);
        }
        Ok(done)
    }

    fn wait(&mut self, stream: Stream, event: Event) -> Result<(), BackingError> {
        let mut state = self.0.lock();
        state.calls.waits += 1;
        state.not_capturing(stream, "wait")?;
        known(event, state.newest_event, "wait")?;
        if let Some(recorded) = state.events.get(&event.0).cloned() {
            state.push(stream, Work::Wait(recorded.stream, recorded.position), &recorded.clock);
        }
        Ok(())
    }

    fn synchronize(&mut self, event: Event) -> Result<(), BackingError> {
        let mut state = self.0.lock();
        state.calls.synchronizes += 1;
        state.alive("synchronize")?;
        known(event, state.newest_event, "synchronize")?;
        if let Some(recorded) = state.events.remove(&event.0) {
            state.run_up_to(recorded.stream, recorded.position);
            join(&mut state.host, &recorded.clock);
        }
        Ok(())
    }

    fn forget(&mut self, event: Event) {
        self.0.lock().events.remove(&event.0);
    }

    fn is_capturing(&mut self, stream: Stream) -> bool {
        self.0.lock().queues.get(&stream).is_some_and(|queue| queue.capturing)
    }

    fn fill(&mut self, span: DeviceSpan, byte: u8, stream: Stream) -> Result<(), BackingError> {
        let mut state = self.0.lock();
        state.calls.fills += 1;
        state.alive("fill")?;
        offset_in(state.held, span, "fill")?;
        state.launch(stream, "a fill", &[Access::Write(span, byte)]);
        Ok(())
    }

    fn read(&mut self, span: DeviceSpan, into: &mut [u8], stream: Stream) -> Result<(), BackingError> {
        let mut state = self.0.lock();
        state.calls.reads += 1;
        state.not_capturing(stream, "read")?;
        let span = head(span, into, "read")?;
        offset_in(state.held, span, "read")?;
        state.launch(stream, "a read", &[Access::Read(span)]);
        let (position, clock) =
            state.queues.get(&stream).map(|queue| (queue.queued, queue.clock.clone())).unwrap_or_default();
        state.run_up_to(stream, position);
        join(&mut state.host, &clock);
        into.fill(0);
        let (start, end) = (span.address, span.address + span.bytes.get());
        for (from, (to, byte)) in state.contents.range(..end).rev().take_while(|(_, (to, _))| *to > start) {
            let (from, to) = ((*from).max(start) - start, (*to).min(end) - start);
            into[from as usize..to as usize].fill(*byte);
        }
        Ok(())
    }
}
