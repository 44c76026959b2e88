//! Random runs against an oracle of everything that must not be handed out: what lives, what is pinned by graphs, and, through
//! the fake device's queues, what a kernel may still touch.
//!
//! An episode is one device with a budget that is sometimes too small, a handful of keys with a trace each, and some thousand
//! requests. Each step runs its key's trace with requests left out, added, grown, shrunk and swapped; frees come late, after
//! the step, from another thread, twice or of pointers that were never given out; steps nest, overlap with those of another
//! thread and forget their end; streams change, other streams use a buffer, and graphs are captured and released. At the end
//! all is freed, waited for and released, and every byte has to be free.
//!
//! By hand, with `TERRACE_FUZZ_ALLOCS=10000000 cargo nextest run --release -p terrace-tests --run-ignored only -E
//! 'test(millions_of_random_requests)'`. A failure names its seed; `TERRACE_FUZZ_SEED` runs that episode alone.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use terrace_allocator::fake::{Access, FakeDevice};
use terrace_allocator::{Allocator, Config, Counts, Error, Load, PoolId, Stream, Usage};
use terrace_profiles::units::DeviceSpan;
use terrace_tests::generate::Random;

use super::kit::{Oracle, UNIT, bytes, order};

#[test]
fn random_requests_never_overlap_and_every_byte_comes_back() {
    run(env("TERRACE_FUZZ_SEED").unwrap_or(1), 200_000);
}

#[test]
#[ignore = "minutes; by hand, see above"]
fn millions_of_random_requests() {
    run(env("TERRACE_FUZZ_SEED").unwrap_or(1_000_000), env("TERRACE_FUZZ_ALLOCS").unwrap_or(10_000_000));
}

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn run(first_seed: u64, allocs: u64) {
    let begun = Instant::now();
    let mut done = Totals::default();
    let mut seed = first_seed;
    while done.allocs < allocs {
        let worker = Worker::new();
        let episode = catch_unwind(AssertUnwindSafe(|| Episode::new(seed, &worker).run()));
        match episode {
            Ok(totals) => done.add(&totals),
            Err(panic) => {
                println!("the episode with seed {seed} failed; TERRACE_FUZZ_SEED={seed} runs it alone");
                resume_unwind(panic);
            }
        }
        seed += 1;
    }
    println!("{} episodes, {done:?}, {:.1} s", seed - first_seed, begun.elapsed().as_secs_f64());
    if allocs >= 100_000 {
        for (name, count) in &done.divergences {
            assert!(*count > 0, "{name} never happened");
        }
        let parts = [done.hits, done.on_script, done.refused, done.graphs, done.shared, done.elsewhere, done.resizes];
        assert!(parts.iter().all(|count| *count > 0), "{done:?}");
    }
}

#[derive(Debug, Default)]
struct Totals {
    allocs: u64,
    refused: u64,
    steps: u64,
    on_script: u64,
    hits: u64,
    inside: u64,
    graphs: u64,
    shared: u64,
    elsewhere: u64,
    resizes: u64,
    divergences: Vec<(&'static str, u64)>,
}

impl Totals {
    fn add(&mut self, other: &Self) {
        self.allocs += other.allocs;
        self.refused += other.refused;
        self.steps += other.steps;
        self.on_script += other.on_script;
        self.hits += other.hits;
        self.inside += other.inside;
        self.graphs += other.graphs;
        self.shared += other.shared;
        self.elsewhere += other.elsewhere;
        self.resizes += other.resizes;
        self.divergences.resize(other.divergences.len(), ("", 0));
        for (mine, theirs) in self.divergences.iter_mut().zip(&other.divergences) {
            *mine = (theirs.0, mine.1 + theirs.1);
        }
    }
}

/// Another thread that does one thing after the other, so that a run is the same each time.
struct Worker {
    jobs: Sender<Job>,
    done: Receiver<()>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Worker {
    fn new() -> Self {
        let (jobs, wait) = channel::<Job>();
        let (tell, done) = channel();
        std::thread::spawn(move || {
            for job in wait {
                job();
                if tell.send(()).is_err() {
                    return;
                }
            }
        });
        Self { jobs, done }
    }

    fn call(&self, job: impl FnOnce() + Send + 'static) {
        self.jobs.send(Box::new(job)).unwrap();
        self.done.recv().unwrap();
    }
}

/// A request or a free of a key's trace, by the number of the request.
#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc { name: usize, units: u64, lane: u64 },
    Free { name: usize },
}

/// Something that lives, and where it may be freed.
#[derive(Clone, Copy, Debug)]
struct Live {
    span: DeviceSpan,
    stream: Stream,
    pool: Option<PoolId>,
}

struct Episode<'a> {
    random: Random,
    worker: &'a Worker,
    allocator: Arc<Allocator>,
    fake: FakeDevice,
    oracle: Oracle,
    /// What came, went and lived, but for `now` and failures.
    expected: Usage,
    /// What lives and belongs to no open step's trace.
    strays: Vec<Live>,
    /// Freed before, and perhaps handed out again since.
    freed: Vec<u64>,
    /// Pools, and all that ever lay in them.
    pools: Vec<(PoolId, Vec<DeviceSpan>)>,
    capturing: Option<PoolId>,
    elsewhere: u64,
    totals: Totals,
    budget: u64,
}

const STREAMS: u64 = 4;
/// The stream that graphs are captured on.
const CAPTURE: Stream = Stream(20);
/// The stream that graphs run on, which the allocator never hears of.
const GRAPH: Stream = Stream(21);

impl<'a> Episode<'a> {
    fn new(seed: u64, worker: &'a Worker) -> Self {
        let mut random = Random::new(seed);
        let budget = UNIT * (200 + random.below(3) * random.below(3000));
        let fake = FakeDevice::new(bytes(1 << 40));
        let config = Config {
            most_keys: 2 + random.below(6) as usize,
            patience: 2 + random.below(3) as u32,
            improve: false,
            ..Config::new(bytes(budget))
        };
        let allocator = Arc::new(Allocator::new(Box::new(fake.clone()), config).unwrap());
        let (oracle, totals) = (Oracle::default(), Totals::default());
        let (strays, freed, pools) = (Vec::new(), Vec::new(), Vec::new());
        let (capturing, elsewhere) = (None, 0);
        let expected = Usage::default();
        Self {
            random,
            worker,
            allocator,
            fake,
            oracle,
            expected,
            strays,
            freed,
            pools,
            capturing,
            elsewhere,
            totals,
            budget,
        }
    }

    fn run(mut self) -> Totals {
        let lanes = 1 + self.random.below(2) * self.random.below(3);
        let traces: Vec<Vec<Op>> = (0..2 + self.random.below(6)).map(|_| self.trace(lanes)).collect();
        // How wild the episode is: some run as planned nearly always.
        let wildness = [0, 5, 20, 60][self.random.below(4) as usize];
        while self.totals.allocs < 2_000 && self.totals.steps < 600 {
            self.between_steps(wildness);
            let key = self.random.below(traces.len() as u64) as usize;
            self.step(key, &traces[key], wildness);
            self.check();
        }
        self.end()
    }

    fn chance(&mut self, per_mille: u64) -> bool {
        self.random.below(1000) < per_mille
    }

    /// A consistent trace: some requests are never freed in it.
    fn trace(&mut self, lanes: u64) -> Vec<Op> {
        let count = 2 + self.random.below(40) as usize;
        let (mut ops, mut live) = (Vec::new(), Vec::new());
        for name in 0..count {
            while !live.is_empty() && self.chance(450) {
                let dead = live.swap_remove(self.random.below(live.len() as u64) as usize);
                ops.push(Op::Free { name: dead });
            }
            ops.push(Op::Alloc { name, units: self.random.log_uniform(5), lane: self.random.below(lanes) });
            live.push(name);
        }
        for name in live {
            if !self.chance(60) {
                ops.push(Op::Free { name });
            }
        }
        ops
    }

    /// The trace as it comes this time.
    fn mutated(&mut self, trace: &[Op], wildness: u64) -> Vec<Op> {
        let mut ops = Vec::with_capacity(trace.len());
        let mut next = 1000;
        for op in trace {
            let mut op = *op;
            if let Op::Alloc { units, lane, .. } = &mut op {
                match self.random.below(5000 / (wildness + 1)) {
                    0 => *units += 1 + self.random.below(*units + 2),
                    1 => *units -= self.random.below(*units),
                    2 => *lane = self.random.below(STREAMS),
                    3 => continue,
                    4 => {
                        ops.push(Op::Alloc { name: next, units: self.random.log_uniform(6), lane: *lane });
                        next += 1;
                    }
                    _ => {}
                }
            } else {
                match self.random.below(5000 / (wildness + 1)) {
                    // Freed after the step.
                    0 => continue,
                    // Freed late.
                    1 => {
                        let Op::Free { name } = op else { unreachable!() };
                        ops.push(Op::Free { name: name + 10_000 });
                        continue;
                    }
                    _ => {}
                }
            }
            ops.push(op);
            if ops.len() > 1 && self.random.below(5000 / (wildness + 1)) == 0 {
                let last = ops.len() - 1;
                ops.swap(last, last - 1);
            }
        }
        // Late frees come some way further on.
        for index in (0..ops.len()).rev() {
            if let Op::Free { name } = ops[index]
                && name >= 10_000
            {
                ops.remove(index);
                let to = index + self.random.below((ops.len() - index) as u64 + 1) as usize;
                ops.insert(to, Op::Free { name: name - 10_000 });
            }
        }
        ops
    }

    fn step(&mut self, key: usize, trace: &[Op], wildness: u64) {
        let ops = self.mutated(trace, wildness);
        // The streams by lane; now and then others than last time.
        let shift = if self.chance(wildness * 5) { self.random.below(STREAMS) } else { 0 };
        let stream_of = |lane: u64| Stream(1 + (lane + shift) % STREAMS);
        let key = [key as u8];
        self.allocator.device().begin_step(&key, stream_of(0)).unwrap();
        self.totals.steps += 1;
        let mut live: Vec<Option<Live>> = vec![None; 2000];
        for op in ops {
            match op {
                Op::Alloc { name, units, lane } => live[name] = self.alloc(units, stream_of(lane)),
                Op::Free { name } => {
                    if let Some(block) = live[name].take() {
                        self.free(block);
                    }
                }
            }
            if self.chance(wildness) {
                let victim = live.iter().flatten().next().copied();
                self.disturb(victim);
            }
            self.pass_time();
        }
        self.strays.extend(live.into_iter().flatten());
        self.end_capture();
        // An end that is forgotten is made up for by whoever begins next, or nests until the end of the episode.
        if !self.chance(wildness / 6) {
            self.allocator.device().end_step().unwrap();
        }
    }

    fn alloc(&mut self, units: u64, stream: Stream) -> Option<Live> {
        let size = UNIT * units - self.random.below(UNIT);
        self.totals.allocs += 1;
        if self.chance(10) {
            self.check_usage();
        }
        let pool = self.capturing.filter(|_| stream == CAPTURE);
        match self.allocator.alloc(bytes(size), stream, "fuzz") {
            Ok(span) => {
                self.handed_out(span, stream, pool);
                Some(Live { span, stream, pool })
            }
            Err(Error::OutOfMemory(report)) => {
                self.totals.refused += 1;
                let sum = report.free + report.claimed + report.outside + report.pinned + report.pending;
                assert_eq!((sum, report.asked), (report.reservation, size), "{report:?}");
                None
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn handed_out(&mut self, span: DeviceSpan, stream: Stream, pool: Option<PoolId>) {
        let all = self.allocator.device().reservation();
        assert!(span.address >= all.address, "{span:?}");
        assert!(span.address.is_multiple_of(UNIT), "{span:?}");
        assert!(span.address + span.bytes.get() <= all.address + all.bytes.get());
        self.oracle.alloc(span);
        self.expected.served.bytes += span.bytes.get().next_multiple_of(UNIT);
        self.expected.served.buffers += 1;
        let now = self.lives();
        self.expected.peak.bytes = self.expected.peak.bytes.max(now.bytes);
        self.expected.peak.buffers = self.expected.peak.buffers.max(now.buffers);
        for (id, spans) in &mut self.pools {
            if pool == Some(*id) {
                spans.push(span);
            } else {
                let end = span.address + span.bytes.get();
                let clash = spans.iter().find(|old| old.address < end && span.address < old.address + old.bytes.get());
                assert_eq!(clash, None, "{span:?} lies in graph pool {id:?}");
            }
        }
        if pool.is_some() {
            // The graph may run at any time from here on, on any stream.
            self.fake.hand_out(GRAPH, span);
        } else {
            self.fake.launch(stream, "first use", &[Access::Write(span, 1)]);
        }
    }

    fn free(&mut self, block: Live) {
        // What it is used for last may still be queued when it is freed.
        if block.pool.is_none() && self.chance(300) {
            self.fake.launch(block.stream, "last use", &[Access::Read(block.span)]);
        }
        self.oracle.free(block.span.address);
        self.expected.freed.bytes += block.span.bytes.get().next_multiple_of(UNIT);
        self.expected.freed.buffers += 1;
        let address = block.span.address;
        if self.chance(5) {
            self.on_worker(move |allocator| allocator.free(address));
        } else {
            self.allocator.free(address);
        }
        if self.freed.len() < 50 {
            self.freed.push(address);
        } else {
            let index = self.random.below(50) as usize;
            self.freed[index] = address;
        }
    }

    /// Lets the other thread do something and waits for it.
    fn on_worker(&mut self, job: impl FnOnce(&Allocator) + Send + 'static) {
        self.totals.elsewhere += 1;
        let allocator = Arc::clone(&self.allocator);
        self.worker.call(move || job(&allocator));
    }

    fn disturb(&mut self, victim: Option<Live>) {
        match self.random.below(11) {
            0 | 1 => self.share(victim),
            2 => {
                self.share(victim);
                self.share(victim);
            }
            3 => self.wrong_free(),
            4 => self.nest(),
            5 => self.elsewhere(),
            6 => self.free_a_stray(),
            7 => {
                let stream = Stream(1 + self.random.below(STREAMS));
                let units = self.random.log_uniform(4);
                let stray = self.alloc(units, stream);
                self.strays.extend(stray);
            }
            8 => self.begin_capture(),
            9 => self.in_capture(),
            _ => self.end_capture(),
        }
    }

    /// Another stream uses a buffer.
    fn share(&mut self, victim: Option<Live>) {
        let Some(block) = victim else { return };
        let stream = Stream(1 + self.random.below(STREAMS));
        self.allocator.device().record_stream(block.span.address, stream);
        if block.pool.is_none() {
            order(&self.fake, block.stream, stream);
            self.fake.launch(stream, "shared use", &[Access::Read(block.span)]);
            self.totals.shared += 1;
        }
    }

    /// Frees what is not live: twice, inside a buffer, or of somebody else.
    fn wrong_free(&mut self) {
        let mut address = match self.random.below(3) {
            0 => 4096 + self.random.below(1 << 30),
            _ if self.freed.is_empty() => return,
            _ => self.freed[self.random.below(self.freed.len() as u64) as usize],
        };
        if self.random.below(4) == 0 {
            address += UNIT;
        }
        if !self.oracle.is_live(address) {
            let before = self.allocator.stats().divergences;
            self.allocator.free(address);
            if address % 3 == 0 {
                self.allocator.device().record_stream(address, Stream(1));
            }
            let after = self.allocator.stats().divergences;
            let told = |counts: &Counts| counts.freed_twice + counts.unknown_free;
            // A record of a stream on a graph's memory is nothing, so one at least.
            assert!(told(&after) > told(&before), "{address:#x}");
        }
    }

    fn nest(&mut self) {
        self.allocator.device().begin_step(b"nested", Stream(1)).unwrap();
        let stray = self.alloc(3, Stream(1));
        self.strays.extend(stray);
        self.allocator.device().end_step().unwrap();
    }

    /// The other thread begins, works in or ends a step of its own.
    fn elsewhere(&mut self) {
        match self.random.below(3) {
            0 if self.elsewhere < 3 => {
                self.elsewhere += 1;
                let key = [self.random.below(4) as u8];
                self.on_worker(move |allocator| allocator.device().begin_step(&key, Stream(3)).unwrap());
            }
            1 if self.elsewhere > 0 => {
                self.elsewhere -= 1;
                self.on_worker(|allocator| allocator.device().end_step().unwrap());
            }
            _ => {
                let (tell, told) = channel();
                let size = UNIT * self.random.log_uniform(4);
                let stream = Stream(1 + self.random.below(STREAMS));
                self.totals.allocs += 1;
                self.on_worker(move |allocator| tell.send(allocator.alloc(bytes(size), stream, "elsewhere")).unwrap());
                if let Ok(span) = told.recv().unwrap() {
                    self.handed_out(span, stream, None);
                    self.strays.push(Live { span, stream, pool: None });
                }
            }
        }
    }

    fn free_a_stray(&mut self) {
        if !self.strays.is_empty() {
            let index = self.random.below(self.strays.len() as u64) as usize;
            let block = self.strays.swap_remove(index);
            self.free(block);
        }
    }

    fn begin_capture(&mut self) {
        if self.capturing.is_none() {
            let id = (1 + self.random.below(3), 0);
            self.allocator.device().begin_pool(id, &[CAPTURE]);
            self.fake.set_capturing(CAPTURE, true);
            if !self.pools.iter().any(|(other, _)| *other == id) {
                self.pools.push((id, Vec::new()));
            }
            self.capturing = Some(id);
            self.totals.graphs += 1;
            self.in_capture();
        }
    }

    /// Requests and frees that belong to the graph.
    fn in_capture(&mut self) {
        if self.capturing.is_some() {
            for _request in 0..self.random.below(6) {
                let units = self.random.log_uniform(4);
                if let Some(block) = self.alloc(units, CAPTURE) {
                    if self.chance(700) { self.free(block) } else { self.strays.push(block) }
                }
            }
        }
    }

    fn end_capture(&mut self) {
        if let Some(id) = self.capturing.take() {
            self.fake.set_capturing(CAPTURE, false);
            self.allocator.device().end_pool(id).unwrap();
        }
    }

    /// The last replay of a pool's graphs is over, and it is given up.
    fn release_pool(&mut self, index: usize) {
        let (id, _) = self.pools[index];
        for at in (0..self.strays.len()).rev() {
            if self.strays[at].pool == Some(id) {
                let block = self.strays.swap_remove(at);
                self.free(block);
            }
        }
        self.fake.synchronize_all();
        self.allocator.device().release_pool(id).unwrap();
        self.pools.swap_remove(index);
    }

    fn between_steps(&mut self, wildness: u64) {
        for _stray in 0..self.random.below(4) {
            self.free_a_stray();
        }
        if self.chance(wildness) {
            self.disturb(None);
            self.end_capture();
        }
        if !self.pools.is_empty() && self.chance(30) {
            let index = self.random.below(self.pools.len() as u64) as usize;
            self.release_pool(index);
        }
        if self.strays.is_empty() && self.pools.is_empty() && self.chance(100) {
            let budget = bytes(self.budget + UNIT * self.random.below(100));
            let resized = self.allocator.device().resize(budget);
            match resized {
                Ok(()) => {
                    self.totals.resizes += 1;
                    self.freed.clear();
                }
                Err(Error::StepOpen { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        self.pass_time();
    }

    /// The device runs a little, far behind the host.
    fn pass_time(&mut self) {
        match self.random.below(300) {
            0 => self.fake.synchronize_all(),
            1 => self.fake.run_all(),
            2..40 => drop(self.fake.run_one(Stream(1 + self.random.below(STREAMS)))),
            _ => {}
        }
    }

    fn lives(&self) -> Load {
        let Usage { served, freed, .. } = self.expected;
        Load { bytes: served.bytes - freed.bytes, buffers: served.buffers - freed.buffers }
    }

    /// Now and then only, in steps and between them, since asking brings the peak up to date.
    fn check_usage(&mut self) {
        let expected = Usage { now: self.lives(), ..self.expected };
        let found = self.allocator.device().usage();
        assert_eq!(Usage { exhausted: 0, reach: 0, ..found }, expected);
        if self.chance(200) {
            self.allocator.device().reset_peak();
            self.expected.peak = expected.now;
        }
    }

    fn check(&mut self) {
        assert_eq!(self.fake.hazards(), []);
        if self.chance(300) {
            self.check_usage();
        }
        let sums = self.allocator.device().accounting();
        assert_eq!(sums.free + sums.claimed + sums.outside + sums.pinned + sums.pending, sums.reservation, "{sums:?}");
    }

    /// Frees all, and nothing is left.
    fn end(mut self) -> Totals {
        self.end_capture();
        while self.elsewhere > 0 {
            self.elsewhere -= 1;
            self.on_worker(|allocator| allocator.device().end_step().unwrap());
        }
        while let Some(block) = self.strays.pop() {
            self.free(block);
        }
        // Ends that were forgotten.
        for _end in 0..self.totals.steps {
            let unbalanced = self.allocator.stats().divergences.unbalanced;
            self.allocator.device().end_step().unwrap();
            if self.allocator.stats().divergences.unbalanced > unbalanced {
                break;
            }
        }
        while !self.pools.is_empty() {
            self.release_pool(0);
        }
        assert!(self.oracle.is_empty());
        self.allocator.device().drain(true);
        self.check();
        let sums = self.allocator.device().accounting();
        assert_eq!(sums.free, sums.reservation, "{sums:?}");
        let tables = self.allocator.device().table_sizes();
        assert_eq!((tables.live, tables.pending), (0, 0), "{tables:?}");
        let stats = self.allocator.stats();
        assert_eq!((stats.outside, stats.overflow), (0, 0));
        self.totals.on_script = stats.steps_on_script;
        self.totals.hits = stats.hits;
        self.totals.inside = stats.replay_allocs;
        self.totals.divergences = stats.divergences.each().to_vec();
        self.totals
    }
}
