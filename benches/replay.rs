//! Time of one call, replaying a recorded 64-layer prefill on the host: ours beside a best-fit caching allocator and beside
//! the crate `offset-allocator`, in the same run. The figure to read is time per element: one alloc or free.
//!
//! `cargo bench -p terrace-benches --bench replay`. Floor: the loop itself, measured as `nothing`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use terrace_allocator::host::HostBacking;
use terrace_allocator::{Allocator, Config, Stream};
use terrace_benches::c_abi::ThroughC;
use terrace_benches::{Caching, Forward, Locked, OffsetClasses, Peer, Single, calls, run};
use terrace_profiles::units::Bytes;
use terrace_tests::corpus;

/// Hands out the request's number: what the loop costs.
struct Nothing(u64);

impl Peer for Nothing {
    fn alloc(&mut self, _: u64) -> u64 {
        self.0 += 1;
        self.0
    }
    fn free(&mut self, address: u64) {
        black_box(address);
    }
}

fn replay(criterion: &mut Criterion) {
    let profile = corpus::read(&corpus::root().join("profiles/recorded/qwen3.6-27b-prefill-4128.profile"));
    let forward = Forward::of(&profile);
    let mut group = criterion.benchmark_group("prefill-4128");
    group.throughput(Throughput::Elements(forward.calls.len() as u64));
    let mut addresses = Vec::with_capacity(forward.requests);
    let peers: Vec<(&str, Box<dyn Peer>)> = vec![
        ("nothing", Box::new(Nothing(0))),
        ("single-owner", Box::new(Single::ready(&forward))),
        ("locked", Box::new(Locked::ready(&forward))),
        ("c-abi", Box::new(ThroughC::ready(&forward))),
        ("caching-best-fit", Box::new(Caching::default())),
        ("offset-allocator", Box::new(OffsetClasses::new(&forward))),
    ];
    for (name, mut peer) in peers {
        group.bench_function(name, |bencher| bencher.iter(|| run(&mut *peer, &forward, &mut addresses)));
    }
    // A forward seen for the first time: the calls are recorded, and what its end takes is the planning.
    let mut first_time = |name: &str, timed: fn(Duration, Duration) -> Duration| {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| {
                let mut spent = Duration::ZERO;
                for _ in 0..rounds {
                    let mut own = Single::recording(&forward);
                    own.begin();
                    let begun = Instant::now();
                    black_box(calls(&mut own, &forward, &mut addresses));
                    let recorded = begun.elapsed();
                    own.end();
                    spent += timed(recorded, begun.elapsed() - recorded);
                }
                spent
            });
        });
    };
    first_time("recording", |recorded, _| recorded);
    first_time("planning-at-the-end", |_, planned| planned);
    group.finish();
}

/// Eight threads that allocate and free outside steps, all on one lock.
fn threads(criterion: &mut Criterion) {
    const THREADS: u64 = 8;
    const PAIRS: u64 = 2_000;
    let mut group = criterion.benchmark_group("eight-threads");
    group.throughput(Throughput::Elements(2 * THREADS * PAIRS));
    let budget = Bytes::new(1 << 30).expect("a size");
    let allocator = Allocator::new(Box::new(HostBacking::new()), Config::new(budget)).expect("host memory is reserved");
    let bytes = Bytes::new(4096).expect("a size");
    group.bench_function("locked, outside steps", |bencher| {
        bencher.iter(|| {
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        for _ in 0..PAIRS {
                            let span = allocator.alloc(bytes, Stream(0), "bench").expect("there is room");
                            allocator.free(black_box(span.address));
                        }
                    });
                }
            });
        });
    });
    let caching = parking_lot::Mutex::new(Caching::default());
    group.bench_function("caching-best-fit", |bencher| {
        bencher.iter(|| {
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        for _ in 0..PAIRS {
                            let address = caching.lock().alloc(4096);
                            caching.lock().free(black_box(address));
                        }
                    });
                }
            });
        });
    });
    group.finish();
}

criterion_group!(benches, replay, threads);
criterion_main!(benches);
