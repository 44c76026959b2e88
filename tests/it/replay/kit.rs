//! What the tests of the allocator share: a device whose every span is held against an oracle, and steps written as a line.
//!
//! ```text
//!   a=4 b=8@2 -a b~3 -b     ask for a, 4 units on stream 1; for b, 8 units on stream 2; free a; stream 3 uses b; free b
//! ```
//!
//! A unit is 512 bytes, the alignment, so that every size is exact. Names stay until they are freed, also across steps.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use terrace_allocator::fake::{Access, Calls, FakeDevice};
use terrace_allocator::host::HostBacking;
use terrace_allocator::{Backing, Config, Device, Error, Stats, Stream};
use terrace_profiles::units::{Bytes, DeviceSpan};

/// Bytes of a unit.
pub const UNIT: u64 = 512;

/// The stream of whatever names none.
pub const MAIN: Stream = Stream(1);

pub fn bytes(bytes: u64) -> Bytes {
    Bytes::new(bytes).unwrap()
}

/// What lives, and that nothing is handed out over it. Knows nothing of the allocator.
#[derive(Debug, Default)]
pub struct Oracle {
    /// Start to end.
    live: BTreeMap<u64, u64>,
}

impl Oracle {
    /// What was already living where `span` was handed out.
    pub fn overlapped(&self, span: DeviceSpan) -> Option<(u64, u64)> {
        let end = span.address + span.bytes.get();
        let (from, to) = self.live.range(..end).next_back()?;
        (*to > span.address).then_some((*from, *to))
    }

    pub fn alloc(&mut self, span: DeviceSpan) {
        if span.bytes.is_zero() {
            return;
        }
        let below = self.overlapped(span);
        assert_eq!(below, None, "{span:?} was handed out over what lives");
        self.live.insert(span.address, span.address + span.bytes.get());
    }

    pub fn free(&mut self, address: u64) {
        self.live.remove(&address);
    }

    pub fn is_live(&self, address: u64) -> bool {
        self.live.contains_key(&address)
    }

    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }
}

/// A device under test.
pub struct Rig {
    pub device: Device,
    pub fake: Option<FakeDevice>,
    pub oracle: Oracle,
    pub named: HashMap<String, DeviceSpan>,
    streams: HashMap<String, Stream>,
    /// What the test itself asked of the fake device: records and waits.
    own: u64,
}

impl Rig {
    /// On host memory.
    pub fn host(budget_units: u64) -> Self {
        Self::with(Config::new(bytes(budget_units * UNIT)))
    }

    /// On host memory, with that configuration; no searches in the background.
    pub fn with(config: Config) -> Self {
        Self::on(Box::new(HostBacking::new()), None, config)
    }

    /// On a fake device with queues.
    pub fn fake(budget_units: u64) -> Self {
        let fake = FakeDevice::new(bytes(1 << 40));
        Self::on(Box::new(fake.clone()), Some(fake), Config::new(bytes(budget_units * UNIT)))
    }

    pub fn on(backing: Box<dyn Backing>, fake: Option<FakeDevice>, mut config: Config) -> Self {
        config.improve = false;
        let device = Device::new(backing, config).unwrap();
        Self { device, fake, oracle: Oracle::default(), named: HashMap::new(), streams: HashMap::new(), own: 0 }
    }

    pub fn fake_device(&self) -> &FakeDevice {
        self.fake.as_ref().expect("this test runs on the fake device")
    }

    /// What the allocator asked of the fake device.
    pub fn calls(&self) -> Calls {
        let calls = self.fake_device().calls();
        Calls { records: calls.records - self.own, waits: calls.waits - self.own, ..calls }
    }

    /// A step of that key, on stream 1.
    pub fn step(&mut self, key: &str, line: &str) {
        self.step_on(MAIN, key, line);
    }

    pub fn step_on(&mut self, stream: Stream, key: &str, line: &str) {
        self.device.begin_step(key.as_bytes(), stream).unwrap();
        self.go(line);
        self.device.end_step().unwrap();
    }

    /// Does what the line says; every request is served.
    pub fn go(&mut self, line: &str) {
        for word in line.split_whitespace() {
            if let Some(name) = word.strip_prefix('-') {
                self.free(name);
            } else if let Some((name, stream)) = word.split_once('~') {
                self.use_on(name, Stream(stream.parse().unwrap()));
            } else {
                let (name, size) = word.split_once('=').expect("name=units");
                let (units, stream) = size.split_once('@').unwrap_or((size, "1"));
                let stream = Stream(stream.parse().unwrap());
                self.alloc(name, units.parse::<u64>().unwrap() * UNIT, stream).unwrap();
            }
        }
    }

    /// Asks for that many bytes and queues a kernel that writes them.
    pub fn alloc(&mut self, name: &str, size: u64, stream: Stream) -> Result<DeviceSpan, Error> {
        let span = self.device.alloc(bytes(size), stream, name)?;
        let all = self.device.reservation();
        assert!(span.address >= all.address, "{span:?} begins before the reservation");
        assert!(span.address + size <= all.address + all.bytes.get(), "{span:?} ends after the reservation");
        self.oracle.alloc(span);
        if let Some(fake) = &self.fake
            && size > 0
        {
            fake.launch(stream, name, &[Access::Write(span, 1)]);
        }
        assert!(self.named.insert(name.to_owned(), span).is_none(), "{name} lives already");
        self.streams.insert(name.to_owned(), stream);
        Ok(span)
    }

    /// Frees it and says where it was.
    pub fn free(&mut self, name: &str) -> DeviceSpan {
        let span = self.named.remove(name).unwrap_or_else(|| panic!("{name} does not live"));
        self.oracle.free(span.address);
        self.device.free(span.address);
        span
    }

    /// Frees all that lives, in the order of the names.
    pub fn free_all(&mut self) {
        let mut names: Vec<String> = self.named.keys().cloned().collect();
        names.sort();
        for name in names {
            self.free(&name);
        }
    }

    /// A kernel on another stream reads it, ordered after what its own stream has queued.
    pub fn use_on(&mut self, name: &str, stream: Stream) {
        let span = self.named[name];
        self.device.record_stream(span.address, stream);
        if let Some(fake) = &self.fake {
            order(fake, self.streams[name], stream);
            self.own += 1;
            fake.launch(stream, name, &[Access::Read(span)]);
        }
    }

    pub fn offset(&self, name: &str) -> u64 {
        self.named[name].address - self.device.reservation().address
    }

    /// How the figures changed while `run` ran.
    pub fn change(&mut self, run: impl FnOnce(&mut Self)) -> Change {
        let before = self.device.stats().clone();
        let told = told(|| run(self));
        let after = self.device.stats();
        let diff = |get: fn(&Stats) -> u64| get(after) - get(&before);
        Change {
            told,
            hits: diff(|stats| stats.hits),
            inside: diff(|stats| stats.replay_allocs),
            on_script: diff(|stats| stats.steps_on_script),
            plans: diff(|stats| stats.plans),
        }
    }

    /// Nothing is left, and every byte is free.
    pub fn assert_empty(&mut self) {
        assert!(self.oracle.is_empty(), "{:?}", self.named);
        self.device.drain(true);
        let sums = self.device.accounting();
        assert_eq!(sums.free, sums.reservation, "{sums:?}");
        assert_eq!((self.device.stats().outside, self.device.stats().overflow), (0, 0));
        if let Some(fake) = &self.fake {
            assert_eq!(fake.hazards(), []);
        }
    }
}

/// As a program does before it uses a buffer on another stream: an event here, a wait there.
pub fn order(fake: &FakeDevice, from: Stream, to: Stream) {
    let mut fake = fake.clone();
    let event = fake.record(from).unwrap();
    fake.wait(to, event).unwrap();
    fake.forget(event);
}

/// What happened meanwhile.
#[derive(Debug, PartialEq, Eq)]
pub struct Change {
    /// The divergences, as they were traced.
    pub told: Vec<String>,
    pub hits: u64,
    pub inside: u64,
    pub on_script: u64,
    pub plans: u64,
}

/// The divergences that are traced while `run` runs, on this thread.
pub fn told(run: impl FnOnce()) -> Vec<String> {
    let lines = Lines::default();
    tracing::subscriber::with_default(lines.clone(), run);
    std::mem::take(&mut *lines.0.lock().unwrap())
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "terrace::divergence"
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut |field: &tracing::field::Field, value: &dyn Debug| {
            if field.name() == "what" {
                self.0.lock().unwrap().push(format!("{value:?}"));
            }
        });
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}
