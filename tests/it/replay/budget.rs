//! When the budget is spent: the callback, what is waited for, the report, and that everything still works.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use terrace_allocator::fake::FakeDevice;
use terrace_allocator::host::HostBacking;
use terrace_allocator::{Allocator, Config, Error, Exhausted, Stream};

use super::kit::{MAIN, Rig, UNIT, bytes};

#[test]
fn the_report_says_where_every_byte_is() {
    let mut rig = Rig::fake(100);
    rig.step("k", "a=30 b=4 -a -b");
    rig.step("k", "a=30 b=4 -b");
    rig.go("weights=20 shared=5 shared~2 -shared");
    rig.device.begin_pool((3, 4), &[Stream(9)]);
    rig.go("graph=6@9");
    rig.device.end_pool((3, 4)).unwrap();
    // Between steps.
    let report = spent(&mut rig, 60);
    assert_eq!((report.asked, report.label.as_str(), report.reservation), (60 * UNIT, "x", 100 * UNIT));
    assert_eq!((report.claimed, report.pending), (0, 0), "what waited for stream 2 was waited for");
    assert_eq!((report.outside, report.pinned, report.free), (50 * UNIT, 6 * UNIT, 44 * UNIT));
    assert_eq!(report.live[0], ("a".to_owned(), 30 * UNIT));
    assert_eq!(report.planned, [("k".to_owned(), 4 * UNIT)]);
    let text = report.details();
    for part in ["x asked for 30720 bytes", "(the largest piece ", "planned peak by key", "weights", "required_bytes()"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    // Inside one.
    rig.free("a");
    for _round in 0..2 {
        rig.step("k", "a=30 b=4 -a -b");
    }
    assert_eq!(rig.device.arena_bytes(), bytes(34 * UNIT), "what no longer outlives its step is planned again");
    rig.device.begin_step(b"k", MAIN).unwrap();
    rig.go("a=30");
    let report = spent(&mut rig, 60);
    assert_eq!((report.claimed, report.outside, report.pinned), (34 * UNIT, 20 * UNIT, 6 * UNIT));
    rig.go("b=4 -a -b");
    rig.device.end_step().unwrap();
    rig.free("weights");
    rig.free("graph");
    rig.device.release_pool((3, 4)).unwrap();
    rig.assert_empty();
}

/// The report of a request that finds no room; its parts add up.
fn spent(rig: &mut Rig, units: u64) -> Box<Exhausted> {
    let Err(Error::OutOfMemory(report)) = rig.alloc("x", units * UNIT, MAIN) else { panic!("{units} units fitted") };
    let sum = report.free + report.claimed + report.outside + report.pinned + report.pending;
    assert_eq!(sum, report.reservation, "{report:?}");
    assert!(report.largest_free < units * UNIT);
    report
}

#[test]
fn a_request_that_is_refused_never_happened() {
    let mut rig = Rig::host(100);
    let line = "a=30 b=10 -a c=20 -b -c";
    // While it is recorded.
    rig.device.begin_step(b"k", MAIN).unwrap();
    rig.go("a=30");
    spent(&mut rig, 90);
    rig.go("b=10 -a c=20 -b -c");
    rig.device.end_step().unwrap();
    assert_eq!(rig.change(|rig| rig.step("k", line)).on_script, 1, "the plan knows nothing of it");
    // On script, where it was not expected.
    rig.device.begin_step(b"k", MAIN).unwrap();
    rig.go("a=30");
    spent(&mut rig, 90);
    rig.go("b=10 -a c=20 -b -c");
    let change = rig.change(|rig| rig.device.end_step().unwrap());
    assert_eq!((change.told.len(), change.hits, change.inside), (0, 3, 3), "{change:?}");
    // And off it, where a slot was found and could not be served.
    rig.go("w=55");
    rig.device.begin_step(b"k", MAIN).unwrap();
    rig.go("a=30 b=10");
    // c's bytes are still used, and outside there is no room.
    assert!(matches!(rig.alloc("c", 20 * UNIT, MAIN), Err(Error::OutOfMemory(_))));
    rig.go("-a c=20 -b -c");
    let change = rig.change(|rig| rig.device.end_step().unwrap());
    assert_eq!((change.hits, change.inside), (3, 3), "{change:?}");
    rig.free("w");
    rig.assert_empty();
}

#[test]
fn an_output_that_is_refused_is_still_expected() {
    let mut rig = Rig::host(40);
    rig.step("k", "a=4 out=30 -a");
    rig.go("-out w=10");
    rig.device.begin_step(b"k", MAIN).unwrap();
    rig.go("a=4");
    assert!(matches!(rig.alloc("out", 30 * UNIT, MAIN), Err(Error::OutOfMemory(_))));
    rig.go("-w out=30 -a");
    let change = rig.change(|rig| rig.device.end_step().unwrap());
    assert_eq!((change.told.len(), change.hits, change.on_script), (0, 1, 1));
    rig.go("-out");
    rig.assert_empty();
}

#[test]
fn the_callback_frees_and_the_request_is_served() {
    let fake = FakeDevice::new(bytes(1 << 30));
    let allocator = Arc::new(Allocator::new(Box::new(fake.clone()), Config::new(bytes(100 * UNIT))).unwrap());
    let cache = Arc::new(Mutex::new(Vec::new()));
    for _block in 0..4 {
        cache.lock().unwrap().push(allocator.alloc(bytes(20 * UNIT), MAIN, "cache").unwrap());
    }
    let asked = Arc::new(AtomicU64::new(0));
    let (inside, kept, heard) = (Arc::downgrade(&allocator), Arc::clone(&cache), Arc::clone(&asked));
    allocator.on_exhausted(Box::new(move |missing| {
        heard.store(missing.get(), Ordering::Relaxed);
        let allocator = inside.upgrade().unwrap();
        // The lock is not held: everything works from here, and what finds no room here does not call again.
        assert!(allocator.stats().outside > 0);
        assert!(matches!(allocator.alloc(bytes(1 << 20), MAIN, "inner"), Err(Error::OutOfMemory(_))));
        if let Some(span) = kept.lock().unwrap().pop() {
            allocator.free(span.address);
        }
    }));
    let span = allocator.alloc(bytes(30 * UNIT), MAIN, "x").unwrap();
    assert_eq!((asked.load(Ordering::Relaxed), cache.lock().unwrap().len()), (30 * UNIT, 3));
    allocator.free(span.address);
    // It is called before anything is waited for.
    let shared = allocator.alloc(bytes(35 * UNIT), MAIN, "shared").unwrap();
    allocator.device().record_stream(shared.address, Stream(2));
    fake.launch(Stream(2), "reads", &[]);
    allocator.free(shared.address);
    let before = fake.calls().synchronizes;
    let span = allocator.alloc(bytes(20 * UNIT), MAIN, "y").unwrap();
    assert_eq!((fake.calls().synchronizes, cache.lock().unwrap().len()), (before, 2), "what it freed was enough");
    // If what it freed is not enough, the rest is waited for; and then it is an error.
    let more = allocator.alloc(bytes(38 * UNIT), MAIN, "z").unwrap();
    assert_eq!((fake.calls().synchronizes, cache.lock().unwrap().len()), (before + 1, 1));
    let Err(Error::OutOfMemory(report)) = allocator.alloc(bytes(90 * UNIT), MAIN, "too much") else { panic!() };
    assert_eq!(report.outside, 58 * UNIT);
    for span in [span, more] {
        allocator.free(span.address);
    }
    assert_eq!(allocator.device().accounting().free, 100 * UNIT);
}

#[test]
fn many_threads_run_out_at_once() {
    let config = Config { improve: false, ..Config::new(bytes(64 * UNIT)) };
    let allocator = Arc::new(Allocator::new(Box::new(HostBacking::new()), config).unwrap());
    let calls = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&calls);
    allocator.on_exhausted(Box::new(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    }));
    let refused = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let (allocator, refused) = (&allocator, &refused);
            scope.spawn(move || {
                for round in 0..500 {
                    let step = (round % 3 == 0).then(|| allocator.step(&[thread as u8], Stream(thread)).unwrap());
                    let spans: Vec<_> = (0..6)
                        .filter_map(|i| {
                            match allocator.alloc(bytes((1 + (round + i) % 7) * UNIT), Stream(thread), "x") {
                                Ok(span) => Some(span),
                                Err(Error::OutOfMemory(_)) => {
                                    refused.fetch_add(1, Ordering::Relaxed);
                                    None
                                }
                                Err(other) => panic!("{other}"),
                            }
                        })
                        .collect();
                    std::thread::yield_now();
                    spans.iter().for_each(|span| allocator.free(span.address));
                    drop(step);
                }
            });
        }
    });
    assert!(calls.load(Ordering::Relaxed) >= refused.load(Ordering::Relaxed));
    allocator.device().drain(true);
    let sums = allocator.device().accounting();
    assert_eq!((sums.free, allocator.stats().outside), (sums.reservation, 0), "{sums:?}");
    assert_eq!(allocator.stats().divergences.freed_twice, 0);
}
