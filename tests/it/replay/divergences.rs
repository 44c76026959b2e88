//! Each way in which a step can differ: what is told, that the rest of the step is served in plan, and what is learnt.

use std::sync::Arc;

use terrace_allocator::host::HostBacking;
use terrace_allocator::{Allocator, Config, Stream};

use super::kit::{MAIN, Rig, UNIT, bytes, told};

/// Runs `planned` twice, then `differs`: what is told, how many of its requests are served in plan, and that the same again is
/// planned for.
#[track_caller]
fn check(planned: &str, differs: &str, tells: &[&str], in_plan: u64) {
    let mut rig = Rig::host(1 << 20);
    rig.step("k", planned);
    let second = rig.change(|rig| rig.step("k", planned));
    assert_eq!((second.told, second.on_script), (vec![], 1), "the second step runs as planned");
    let third = rig.change(|rig| rig.step("k", differs));
    assert_eq!(third.told, tells, "{planned} -> {differs}");
    assert_eq!(third.hits, in_plan, "{planned} -> {differs}");
    rig.free_all();
    let fourth = rig.change(|rig| rig.step("k", differs));
    assert_eq!(fourth.told, Vec::<String>::new(), "what happened once is planned for: {differs}");
    rig.free_all();
    rig.assert_empty();
}

#[test]
fn a_smaller_request_is_served_in_its_slot() {
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=4 b=8 -a c=2 -b -c");
    let change = rig.change(|rig| rig.step("k", "a=3 b=8 -a c=2 -b -c"));
    assert_eq!(change.told, ["Shrink { slot: 0, expected: 2048, actual: 1536 }"]);
    assert_eq!((change.hits, change.inside, change.plans), (3, 3, 0), "the plan still holds it, so it stays");
    let change = rig.change(|rig| rig.step("k", "a=4 b=8 -a c=2 -b -c"));
    assert_eq!((change.told.len(), change.on_script), (0, 1));
}

#[test]
fn a_larger_request_goes_outside_and_its_slot_grows() {
    let grew = "Grew { slot: 1, expected: 4096, actual: 4608 }";
    check("a=4 b=8 c=2 -a -b -c", "a=4 b=9 c=2 -a -b -c", &[grew], 2);
    // At the end of a step too, where nothing follows that would show whose it was.
    check("a=4 b=8 -a -b", "a=4 b=9 -a -b", &[grew], 1);
}

#[test]
fn a_plan_keeps_the_largest_size_seen() {
    let mut rig = Rig::host(1 << 20);
    for line in ["a=4 b=8 c=2 -a -b -c", "a=4 b=9 c=2 -a -b -c", "a=5 b=8 c=2 -a -b -c"] {
        rig.step("k", line);
    }
    let change = rig.change(|rig| rig.step("k", "a=5 b=9 c=2 -a -b -c"));
    assert_eq!((change.told.len(), change.hits, change.on_script), (0, 3, 1));
    assert_eq!(rig.device.arena_bytes(), bytes(16 * UNIT));
}

#[test]
fn an_extra_request_goes_outside_and_the_rest_keeps_its_slots() {
    check("a=4 b=8 c=2 -a -b -c", "a=4 x=100 b=8 c=2 -a -b -c -x", &["Extra { actual: 51200 }"], 3);
}

/// Such as the buffer that a tuner flushes caches with before each of its runs: were it taken for the slot that it fits into, all slots
/// would be taken before the step's own requests come.
#[test]
fn what_comes_and_goes_where_a_slot_would_stay_was_extra() {
    let mut rig = Rig::host(1 << 20);
    let own = "a=6 b=6 c=6 -a -b -c";
    rig.step("k", own);
    for _round in 0..3 {
        let change = rig.change(|rig| rig.step("k", &format!("x=4 -x y=4 -y z=4 -z {own}")));
        assert_eq!(change.told, ["Extra { actual: 2048 }"; 3]);
        assert_eq!((change.hits, change.inside, change.plans), (6, 6, 0), "all lay in the plan, so it stays");
    }
    rig.assert_empty();
    // Not so where the slot's own request goes at once too: it may as well have shrunk.
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=6 -a b=6 -b");
    let change = rig.change(|rig| rig.step("k", "a=4 -a b=6 -b"));
    assert_eq!(change.told, ["Shrink { slot: 0, expected: 3072, actual: 2048 }"]);
    // Nor at the end of a step, where it is gone as a slot that is freed last would be.
    let change = rig.change(|rig| rig.step("k", "a=6 -a b=4 -b"));
    assert_eq!(change.told, ["Shrink { slot: 1, expected: 3072, actual: 2048 }"]);
}

#[test]
fn a_missing_request_leaves_its_slot_unused() {
    let missing = ["Missing { slot: 1, expected: 4096 }"];
    for (planned, differs) in [("a=4 b=8 c=2 -a -b -c", "a=4 c=2 -a -c"), ("a=4 b=8 -a -b", "a=4 -a")] {
        let mut rig = Rig::host(64);
        rig.step("k", planned);
        rig.step("k", planned);
        for _round in 0..3 {
            let change = rig.change(|rig| rig.step("k", differs));
            assert_eq!((&*change.told, change.hits, change.plans), (&missing.map(String::from)[..], change.inside, 0));
        }
        let change = rig.change(|rig| rig.step("k", planned));
        assert_eq!((change.told.len(), change.on_script), (0, 1), "its place was kept");
    }
}

/// The first call of a shape compiles and tunes: what only it asked for is not planned for ever.
#[test]
fn the_second_step_of_a_key_corrects_the_first() {
    let mut rig = Rig::host(64);
    rig.step("k", "a=4 tune=30 b=8 -tune -a -b");
    let change = rig.change(|rig| rig.step("k", "a=4 b=8 -a -b"));
    assert_eq!((change.told, change.hits), (vec!["Missing { slot: 1, expected: 15360 }".to_owned()], 2));
    let change = rig.change(|rig| rig.step("k", "a=4 b=8 -a -b"));
    assert_eq!((change.told.len(), change.on_script), (0, 1));
}

#[test]
fn reordered_requests_find_their_slots() {
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=4 b=8 c=2 d=1 -a -b -c -d");
    let change = rig.change(|rig| rig.step("k", "a=4 c=2 b=8 d=1 -a -b -c -d"));
    assert_eq!(change.told, ["Reordered { slot: 1, turn: 3 }"]);
    assert_eq!((change.hits, change.inside), (4, 4));
    // Far from where it was: outside of the plan once, and then in the new one.
    rig.step("far", "a=4 b=8 c=2 d=1 e=3 f=5 -a -b -c -d -e -f");
    let change = rig.change(|rig| rig.step("far", "b=8 c=2 d=1 e=3 f=5 a=4 -a -b -c -d -e -f"));
    assert_eq!(change.told, ["Reordered { slot: 0, turn: 6 }"]);
    assert_eq!((change.hits, change.inside, change.plans), (5, 6, 1));
    let change = rig.change(|rig| rig.step("far", "b=8 c=2 d=1 e=3 f=5 a=4 -a -b -c -d -e -f"));
    assert_eq!((change.told.len(), change.hits, change.on_script), (0, 6, 1));
}

/// As long as sizes differ, what requests are stays open, however many come.
#[test]
fn many_that_would_do_are_extra_once_the_slots_own_requests_come() {
    let names = |prefix: char, count: usize, kib: usize| -> String {
        (0..count).map(|at| format!("{prefix}{at}={kib} ")).collect()
    };
    let frees = |prefix: char, count: usize| -> String { (0..count).map(|at| format!("-{prefix}{at} ")).collect() };
    let mut rig = Rig::host(1 << 20);
    rig.step("k", &(names('a', 20, 4) + &frees('a', 20)));
    let more = names('x', 13, 3) + &names('a', 20, 4) + &frees('x', 13) + &frees('a', 20);
    let change = rig.change(|rig| rig.step("k", &more));
    let told = |kind: &str| change.told.iter().filter(|told| told.starts_with(kind)).count();
    assert_eq!((told("Extra"), told("Shrink"), told("Missing"), change.inside), (13, 0, 0, 33), "{:?}", change.told);
}

/// T07 is the longer form.
#[test]
fn a_late_free_blocks_the_slot_that_reuses_its_bytes() {
    check("a=4 -a b=4 -b c=1 -c", "a=4 b=4 -a -b c=1 -c", &["LateFree { slot: 1, by: 0 }"], 2);
}

#[test]
fn what_outlived_its_step_blocks_the_slots_over_it() {
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=4 -a b=2 -b");
    rig.step("other", "x=4 -x y=3 -y z=2 -z");
    rig.step("k", "a=4 b=2 -b");
    let change = rig.change(|rig| rig.step("other", "x=4 -x y=3 -y z=2 -z"));
    let blocked = |slot| format!("Blocked {{ slot: {slot}, by_offset: 0 }}");
    assert_eq!(change.told, [blocked(0), blocked(1), blocked(2)]);
    assert_eq!((change.hits, change.inside), (0, 3));
    rig.free("a");
    let change = rig.change(|rig| rig.step("other", "x=4 -x y=3 -y z=2 -z"));
    assert_eq!((change.told.len(), change.hits, change.on_script), (0, 3, 1), "as planned again");
    rig.assert_empty();
}

#[test]
fn what_outlives_its_step_leaves_the_plan() {
    check("a=4 b=2 -b -a", "a=4 b=2 -b", &["Outlived { slot: 0, expected: 2048 }"], 1);
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=4 b=2 -b");
    assert_eq!(rig.device.arena_bytes(), bytes(2 * UNIT), "a is not planned");
    rig.free("a");
    let change = rig.change(|rig| rig.step("k", "a=4 b=2 -b"));
    assert_eq!((change.told.len(), change.hits, change.inside, change.on_script), (0, 1, 1, 1));
    assert!(rig.offset("a") >= 2 * UNIT, "a lies where no plan does");
}

#[test]
fn an_output_may_grow_and_stays_on_script() {
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=4 b=2 -b");
    rig.go("-a");
    let change = rig.change(|rig| rig.step("k", "a=6 b=2 -b"));
    assert_eq!(change.told, ["Grew { slot: 0, expected: 2048, actual: 3072 }"]);
    assert_eq!((change.hits, change.on_script), (1, 1));
    rig.go("-a");
    rig.assert_empty();
}

#[test]
fn a_stream_that_the_plan_does_not_know_is_served_outside() {
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=4 -a b=2 -b c=1 -c");
    let change = rig.change(|rig| rig.step("k", "a=4 -a b=2@2 -b c=1 -c"));
    let missing = "Missing { slot: 1, expected: 1024 }";
    assert_eq!(change.told, ["OtherLane { lane: 1, actual: 1024 }", missing]);
    assert_eq!((change.hits, change.inside), (2, 3));
    let change = rig.change(|rig| rig.step("k", "a=4 -a b=2@2 -b c=1 -c"));
    assert_eq!((change.told.len(), change.hits, change.on_script), (0, 3, 1), "the new stream is planned for");
    // Handles differ from run to run; only the order in which they appear counts.
    let change = rig.change(|rig| rig.step_on(Stream(7), "k", "a=4@7 -a b=2@9 -b c=1@7 -c"));
    assert_eq!((change.told.len(), change.hits, change.on_script), (0, 3, 1));
}

#[test]
fn a_free_after_the_step_is_told() {
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=4 -a");
    rig.step("k", "a=4");
    let change = rig.change(|rig| rig.go("-a"));
    assert_eq!(change.told, ["FreeAfterStep { offset: 0 }"]);
    rig.assert_empty();
}

#[test]
fn a_free_by_another_thread_is_told_and_served() {
    let allocator = Arc::new(allocator());
    for round in 0..3 {
        let step = allocator.step(b"k", MAIN).unwrap();
        let a = allocator.alloc(bytes(2048), MAIN, "a").unwrap();
        let b = allocator.alloc(bytes(1024), MAIN, "b").unwrap();
        let there = Arc::clone(&allocator);
        let lines = std::thread::spawn(move || told(|| there.free(a.address))).join().unwrap();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].starts_with("FreeByOtherThread { offset: "), "{lines:?}");
        allocator.free(b.address);
        drop(step);
        assert_eq!(allocator.stats().divergences.free_by_other_thread, round + 1);
    }
    assert_eq!(allocator.stats().steps_on_script, 2, "who frees does not matter to the plan");
    assert_eq!(allocator.stats().divergences.total(), 3);
}

#[test]
fn what_lives_between_steps_may_be_freed_by_any_thread() {
    let allocator = allocator();
    let weights = allocator.alloc(bytes(4096), MAIN, "weights").unwrap();
    let step = allocator.step(b"k", MAIN).unwrap();
    std::thread::scope(|scope| drop(scope.spawn(|| allocator.free(weights.address))));
    drop(step);
    assert_eq!(allocator.stats().divergences.total(), 0);
}

#[test]
fn a_double_free_and_an_unknown_pointer_are_told() {
    let mut rig = Rig::host(1 << 20);
    for key in ["k", "k", "k"] {
        rig.device.begin_step(key.as_bytes(), MAIN).unwrap();
        rig.go("a=4 b=2");
        let a = rig.free("a");
        let change = rig.change(|rig| rig.device.free(a.address));
        assert_eq!(change.told, [format!("FreedTwice {{ address: {} }}", a.address)]);
        for address in [8, a.address - (1 << 40), u64::MAX] {
            let change = rig.change(|rig| rig.device.free(address));
            assert_eq!(change.told, [format!("UnknownFree {{ address: {address} }}")]);
        }
        let inside = rig.named["b"].address + 512;
        let change = rig.change(|rig| rig.device.free(inside));
        assert_eq!(change.told, [format!("FreedTwice {{ address: {inside} }}")], "not the start of anything");
        let change = rig.change(|rig| rig.device.record_stream(inside, Stream(4)));
        assert_eq!(change.told, [format!("FreedTwice {{ address: {inside} }}")]);
        let change = rig.change(|rig| rig.device.free(0));
        assert_eq!(change.told, [""; 0], "a null pointer is nothing");
        rig.go("c=1 -b -c");
        rig.device.end_step().unwrap();
    }
    assert_eq!(rig.device.stats().hits, 6, "two steps of three requests, all in plan");
    rig.assert_empty();
}

#[test]
fn a_step_of_another_thread_is_served_outside_and_never_mixed() {
    let allocator = allocator();
    let ask = |units| allocator.alloc(bytes(units * UNIT), MAIN, "x").unwrap().address;
    for round in 0..4 {
        let step = allocator.step(b"k", MAIN).unwrap();
        let a = ask(4);
        let lines = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                told(|| {
                    let outer = allocator.step(b"k", MAIN).unwrap();
                    let inner = allocator.step(b"other", MAIN).unwrap();
                    // The very request that the plan expects next.
                    let x = ask(2);
                    drop(inner);
                    let y = ask(2);
                    allocator.free(x);
                    allocator.free(y);
                    drop(outer);
                })
            });
            other.join().unwrap()
        });
        assert_eq!(lines, ["ConcurrentStep { open: 1 }"]);
        let b = ask(2);
        allocator.free(a);
        allocator.free(b);
        drop(step);
        let stats = allocator.stats();
        assert_eq!((stats.divergences.concurrent_step, stats.divergences.total()), (round + 1, round + 1));
        assert_eq!((stats.hits, stats.replay_allocs), (2 * round, 2 * round), "each got its own slots");
    }
    // Alone again, the step is on script.
    let before = allocator.stats().steps_on_script;
    let step = allocator.step(b"k", MAIN).unwrap();
    let (a, b) = (ask(4), ask(2));
    allocator.free(a);
    allocator.free(b);
    drop(step);
    assert_eq!(allocator.stats().steps_on_script, before + 1);
}

#[test]
fn a_step_that_outlasts_the_one_it_was_concurrent_with_stays_outside() {
    let allocator = allocator();
    let ask = |units| allocator.alloc(bytes(units * UNIT), MAIN, "x").unwrap().address;
    let round = || {
        let (a, b) = (ask(4), ask(2));
        allocator.free(a);
        allocator.free(b);
    };
    allocator.device().begin_step(b"k", MAIN).unwrap();
    round();
    allocator.device().end_step().unwrap();
    std::thread::scope(|scope| {
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let (went, waited) = std::sync::mpsc::channel();
        let allocator = &allocator;
        allocator.device().begin_step(b"k", MAIN).unwrap();
        scope.spawn(move || {
            let step = allocator.step(b"k", MAIN).unwrap();
            went.send(()).unwrap();
            wait.recv().unwrap();
            // The other's step is over and a new one of its is open, which expects just this: not ours.
            let inner = allocator.step(b"k", MAIN).unwrap();
            let x = ask(2);
            went.send(()).unwrap();
            wait.recv().unwrap();
            allocator.free(x);
            drop(inner);
            drop(step);
        });
        waited.recv().unwrap();
        round();
        allocator.device().end_step().unwrap();
        allocator.device().begin_step(b"k", MAIN).unwrap();
        let a = ask(4);
        go.send(()).unwrap();
        waited.recv().unwrap();
        let b = ask(2);
        allocator.free(a);
        allocator.free(b);
        allocator.device().end_step().unwrap();
        go.send(()).unwrap();
    });
    let stats = allocator.stats();
    assert_eq!((stats.divergences.concurrent_step, stats.divergences.total()), (1, 1), "{:?}", stats.divergences);
    assert_eq!((stats.hits, stats.replay_allocs), (4, 4));
}

#[test]
fn the_step_of_a_thread_that_died_is_closed() {
    let allocator = allocator();
    // Joined, and not only left by the scope: it has to be gone.
    let begin_and_die = || {
        let begin = || allocator.device().begin_step(b"k", MAIN).unwrap();
        std::thread::scope(|scope| scope.spawn(begin).join().unwrap());
    };
    begin_and_die();
    for _round in 0..3 {
        let step = allocator.step(b"k", MAIN).unwrap();
        let a = allocator.alloc(bytes(4096), MAIN, "a").unwrap();
        // Somebody else's begin that will never end: it is forgotten with its thread.
        begin_and_die();
        allocator.free(a.address);
        drop(step);
    }
    let stats = allocator.stats();
    assert_eq!((stats.divergences.unbalanced, stats.divergences.concurrent_step), (1, 3));
    assert_eq!((stats.steps, stats.hits), (4, 2), "the empty step of the dead thread was the first of the key");
}

#[test]
fn an_end_without_a_begin_is_told() {
    let mut rig = Rig::host(64);
    let change = rig.change(|rig| rig.device.end_step().unwrap());
    assert_eq!(change.told, ["Unbalanced { ends: true }"]);
    rig.step("k", "a=4 -a");
    let change = rig.change(|rig| rig.device.end_step().unwrap());
    assert_eq!(change.told, ["Unbalanced { ends: true }"]);
    let change = rig.change(|rig| rig.step("k", "a=4 -a"));
    assert_eq!((change.told.len(), change.on_script), (0, 1));
}

#[test]
fn a_step_whose_end_was_forgotten_is_closed_by_the_next() {
    let mut rig = Rig::host(64);
    for expected in [0, 1, 2, 3] {
        // Recorded, then on script; with the same key and with another.
        rig.device.begin_step(b"k", MAIN).unwrap();
        assert_eq!(rig.device.stats().divergences.unbalanced, expected);
        rig.go("a=4 b=1 -a -b");
    }
    rig.device.begin_step(b"other", MAIN).unwrap();
    rig.device.end_step().unwrap();
    let stats = rig.device.stats();
    assert_eq!((stats.divergences.unbalanced, stats.divergences.total()), (4, 4));
    assert_eq!((stats.steps, stats.steps_on_script, stats.hits), (5, 3, 6));
    rig.assert_empty();
}

/// A loop that begins once and never ends must not be written down for ever.
#[test]
fn a_step_that_never_ends_is_not_remembered_for_ever() {
    let mut rig = Rig::host(64);
    rig.device.begin_step(b"k", MAIN).unwrap();
    let kept = rig.device.alloc(bytes(512), MAIN, "kept").unwrap();
    for _request in 0..(1 << 20) + 1000 {
        let span = rig.device.alloc(bytes(512), MAIN, "x").unwrap();
        rig.device.free(span.address);
    }
    rig.device.free(kept.address);
    rig.device.end_step().unwrap();
    let stats = rig.device.stats();
    assert_eq!((stats.allocs, stats.plans), (1 << 20, 0), "no plan is made of it");
    rig.assert_empty();
    // Nor does it stand in the way of the next.
    rig.step("k", "a=4 -a");
    assert_eq!(rig.change(|rig| rig.step("k", "a=4 -a")).on_script, 1);
}

#[test]
fn a_key_that_differs_too_often_is_given_up() {
    let mut rig = Rig::host(1 << 20);
    rig.step("calm", "a=4 -a");
    let wild = |rig: &mut Rig, round: u64| rig.step("k", &format!("a={0} b={0} -a -b", 100 * 3_u64.pow(round as u32)));
    wild(&mut rig, 0);
    for round in 1..4 {
        let change = rig.change(|rig| wild(rig, round));
        assert_eq!((change.hits, change.inside), (0, 2));
        assert!(!change.told.iter().any(|line| line.starts_with("GivenUp")), "{change:?}");
    }
    let change = rig.change(|rig| wild(rig, 4));
    assert_eq!(change.told.last().unwrap(), "GivenUp { steps: 4 }");
    let change = rig.change(|rig| wild(rig, 5));
    assert_eq!((change.told.len(), change.hits, change.inside, change.plans), (0, 0, 2, 0), "served, without a plan");
    let change = rig.change(|rig| rig.step("calm", "a=4 -a"));
    assert_eq!((change.hits, change.on_script), (1, 1), "others keep theirs");
    rig.assert_empty();
}

#[test]
fn patience_counts_steps_in_a_row() {
    let mut rig = Rig::host(1 << 20);
    for round in 0..20 {
        // Every third step is as its plan says.
        let size = 100 + 50 * (round / 3 * 2 + u64::from(round % 3 == 0));
        rig.step("k", &format!("a={size} -a"));
    }
    assert_eq!(rig.device.stats().divergences.given_up, 0);
}

#[test]
fn a_nested_step_belongs_to_the_one_it_is_in() {
    let mut rig = Rig::host(64);
    for _round in 0..3 {
        rig.device.begin_step(b"outer", MAIN).unwrap();
        rig.go("a=4");
        rig.device.begin_step(b"inner", MAIN).unwrap();
        rig.go("b=2 -b");
        rig.device.begin_step(b"outer", MAIN).unwrap();
        rig.go("c=2 -c");
        rig.device.end_step().unwrap();
        rig.device.end_step().unwrap();
        rig.go("d=1 -a -d");
        rig.device.end_step().unwrap();
    }
    let stats = rig.device.stats();
    assert_eq!((stats.steps, stats.steps_on_script, stats.divergences.total()), (3, 2, 0));
    rig.assert_empty();
}

#[test]
fn a_divergence_counts_under_its_own_name() {
    let mut rig = Rig::host(1 << 20);
    rig.step("k", "a=4 b=8 c=2 -a -b -c");
    rig.step("k", "a=3 b=8 x=64 c=2 -a -b -c -x");
    let counts = rig.device.stats().divergences;
    let named: Vec<_> = counts.each().into_iter().filter(|(_, count)| *count > 0).collect();
    assert_eq!(named, [("shrink", 1), ("extra", 1)]);
    assert_eq!(counts.total(), 2);
}

fn allocator() -> Allocator {
    let config = Config { improve: false, ..Config::new(bytes(1 << 30)) };
    Allocator::new(Box::new(HostBacking::new()), config).unwrap()
}
