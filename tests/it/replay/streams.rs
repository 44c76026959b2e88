//! Streams, events, graph pools and the reservation itself: bytes that something may still use are never handed out.

use terrace_allocator::fake::Access;
use terrace_allocator::{Config, Error, Stream};
use terrace_tests::generate::Random;

use super::kit::{MAIN, Rig, UNIT, bytes};

const CAPTURE: Stream = Stream(9);

#[test]
fn reuse_on_the_same_stream_needs_no_event() {
    let mut rig = Rig::fake(16);
    rig.go("a=12 -a b=13 -b c=14 -c");
    let calls = rig.calls();
    assert_eq!((calls.records, calls.waits, calls.queries, calls.synchronizes), (0, 0, 0, 0));
    rig.assert_empty();
}

#[test]
fn a_stream_takes_what_needs_no_wait_where_it_can() {
    let mut rig = Rig::fake(64);
    rig.go("a=10@1 -a b=10@2 -b c=10@1 -c");
    assert_eq!(rig.calls().waits, 0);
    // Only now is what stream 1 freed needed by stream 2: one wait, on the device.
    rig.go("d=64@2 -d");
    let calls = rig.calls();
    assert_eq!((calls.waits, calls.synchronizes), (1, 0));
    rig.assert_empty();
}

#[test]
fn a_step_on_another_stream_waits_for_the_last_one_once() {
    let mut rig = Rig::fake(64);
    rig.step_on(Stream(1), "k", "a=4@1 -a");
    rig.step_on(Stream(1), "k", "a=4@1 -a");
    assert_eq!((rig.calls().records, rig.calls().waits), (2, 0));
    rig.step_on(Stream(2), "k", "a=4@2 -a b=1@2 -b c=2@2 -c");
    assert_eq!((rig.calls().records, rig.calls().waits), (3, 1));
    rig.step_on(Stream(2), "k", "a=4@2 -a b=1@2 -b c=2@2 -c");
    assert_eq!((rig.calls().records, rig.calls().waits), (4, 1));
    rig.assert_empty();
}

#[test]
fn streams_of_a_step_never_share_bytes_of_a_plan() {
    let mut rig = Rig::fake(256);
    let line = "a=8@1 -a b=8@2 -b c=8@1 -c d=8@2 -d";
    rig.step("k", line);
    assert_eq!(rig.device.arena_bytes(), bytes(16 * UNIT), "8 for each stream");
    let records = rig.calls().records;
    let change = rig.change(|rig| rig.step("k", line));
    assert_eq!((change.hits, change.on_script), (4, 1));
    assert_eq!(rig.calls().records, records + 2, "an event for each stream that the step used");
    rig.assert_empty();
}

#[test]
fn bytes_wait_for_the_streams_that_use_them() {
    let mut rig = Rig::fake(32);
    rig.go("a=20");
    rig.use_on("a", Stream(2));
    rig.use_on("a", Stream(3));
    rig.use_on("a", Stream(2));
    rig.use_on("a", MAIN);
    rig.go("-a");
    assert_eq!(rig.calls().records, 2, "one event for each other stream");
    assert_eq!(rig.device.accounting().pending, 20 * UNIT);
    while rig.fake_device().run_one(MAIN) || rig.fake_device().run_one(Stream(2)) {}
    rig.device.drain(false);
    assert_eq!(rig.device.accounting().pending, 20 * UNIT, "stream 3 is not done");
    rig.fake_device().run_all();
    rig.device.drain(false);
    assert_eq!(rig.device.accounting().pending, 0);
    rig.go("b=32 -b");
    rig.assert_empty();
}

#[test]
fn a_slot_that_another_stream_still_uses_is_not_served() {
    let mut rig = Rig::fake(64);
    let line = "a=4 -a b=4 -b";
    rig.step("k", line);
    rig.step("k", line);
    let change = rig.change(|rig| rig.step("k", "a=4 a~2 -a b=4 -b"));
    assert_eq!(change.told, ["Blocked { slot: 1, by_offset: 0 }"]);
    assert_eq!((change.hits, change.inside), (1, 2));
    // The next step begins with the bytes still waiting, and gets others.
    let change = rig.change(|rig| rig.step("k", line));
    assert!(change.told[0].starts_with("Blocked"), "{change:?}");
    rig.fake_device().synchronize_all();
    rig.step("k", line);
    let change = rig.change(|rig| rig.step("k", line));
    assert_eq!((change.told.len(), change.hits, change.on_script), (0, 2, 1));
    rig.assert_empty();
}

#[test]
fn a_slot_waits_for_the_stream_whose_bytes_it_gets() {
    let mut rig = Rig::fake(64);
    for _round in 0..2 {
        rig.step("k", "a=4@2 -a");
        rig.step("other", "x=8@1 -x");
    }
    rig.step("k", "a=4@2");
    let a = rig.named["a"];
    rig.device.begin_step(b"other", MAIN).unwrap();
    // Queued after the end of the step that a was asked for in.
    rig.fake_device().launch(Stream(2), "late", &[Access::Read(a)]);
    rig.go("-a");
    let waits = rig.calls().waits;
    let change = rig.change(|rig| rig.go("x=8@1 -x"));
    assert_eq!((change.told.len(), rig.calls().waits), (0, waits + 1));
    rig.device.end_step().unwrap();
    assert_eq!(rig.device.stats().divergences.blocked, 0, "served in its slot");
    rig.assert_empty();
}

#[test]
fn a_free_on_a_stream_that_is_captured_waits_until_the_capture_is_over() {
    let mut rig = Rig::fake(16);
    rig.go("a=16@1");
    rig.use_on("a", CAPTURE);
    rig.fake_device().set_capturing(CAPTURE, true);
    rig.go("-a");
    for wait in [false, true] {
        rig.device.drain(wait);
        assert_eq!(rig.device.accounting().pending, 16 * UNIT, "no event says yet when stream 9 is done");
    }
    assert!(matches!(rig.alloc("b", UNIT, MAIN), Err(Error::OutOfMemory(_))));
    rig.fake_device().set_capturing(CAPTURE, false);
    rig.device.drain(false);
    assert_eq!(rig.device.accounting().pending, 16 * UNIT, "now there is one, and it is not done");
    rig.go("b=16 -b");
    rig.assert_empty();
}

#[test]
fn what_a_captured_stream_owns_is_freed_after_the_capture() {
    let mut rig = Rig::fake(64);
    rig.go("eager=16@9");
    rig.device.begin_pool((1, 0), &[CAPTURE]);
    rig.fake_device().set_capturing(CAPTURE, true);
    rig.go("g=4@9 -eager");
    assert_eq!((rig.device.accounting().pending, rig.device.accounting().pinned), (16 * UNIT, 4 * UNIT));
    rig.go("-g");
    rig.fake_device().set_capturing(CAPTURE, false);
    rig.device.end_pool((1, 0)).unwrap();
    rig.device.release_pool((1, 0)).unwrap();
    rig.assert_empty();
}

#[test]
fn a_pool_is_made_of_bytes_that_nothing_queued_uses() {
    let mut rig = Rig::fake(16);
    rig.go("a=8@1 b=8@2 -a -b");
    rig.device.begin_pool((1, 0), &[CAPTURE]);
    rig.fake_device().set_capturing(CAPTURE, true);
    rig.go("g=16@9");
    let graph = rig.named["g"];
    rig.fake_device().set_capturing(CAPTURE, false);
    rig.device.end_pool((1, 0)).unwrap();
    // The graph runs on a stream that the allocator never heard of.
    rig.fake_device().launch(Stream(77), "graph", &[Access::Write(graph, 3)]);
    rig.fake_device().synchronize_all();
    rig.go("-g");
    rig.device.release_pool((1, 0)).unwrap();
    rig.assert_empty();
}

#[test]
fn streams_of_one_capture_do_not_share_and_the_next_capture_may() {
    let mut rig = Rig::fake(256);
    let mut capture = |line: &str| {
        rig.device.begin_pool((1, 0), &[]);
        rig.go(line);
        rig.device.end_pool((1, 0)).unwrap();
        rig.device.pool_reports()[0].pinned / UNIT
    };
    assert_eq!(capture("a=8@1 -a b=8@2 -b c=8@1 -c"), 16);
    assert_eq!(capture("a=8@2 -a b=8@1 -b"), 16);
    assert_eq!(capture("a=16@3 -a"), 16);
}

#[test]
fn a_double_free_of_a_graphs_buffer_leaves_it_pinned() {
    let mut rig = Rig::fake(64);
    rig.device.begin_pool((1, 0), &[CAPTURE]);
    rig.go("g=8@9");
    let span = rig.free("g");
    let change = rig.change(|rig| {
        rig.device.free(span.address);
        rig.device.free(span.address + UNIT);
        rig.device.record_stream(span.address, Stream(4));
    });
    let twice = |address: u64| format!("FreedTwice {{ address: {address} }}");
    assert_eq!(change.told, [twice(span.address), twice(span.address + UNIT)]);
    rig.device.end_pool((1, 0)).unwrap();
    assert_eq!(rig.device.accounting().pinned, 8 * UNIT);
    assert!(matches!(rig.alloc("x", 60 * UNIT, MAIN), Err(Error::OutOfMemory(_))));
    rig.device.release_pool((1, 0)).unwrap();
    rig.assert_empty();
}

#[test]
fn a_capture_inside_a_step_is_served_from_its_pool() {
    let mut rig = Rig::fake(256);
    let plain = "a=8 -a b=8 -b";
    rig.step("k", plain);
    rig.step("k", plain);
    for _round in 0..2 {
        rig.device.begin_step(b"k", MAIN).unwrap();
        rig.go("a=8");
        rig.device.begin_pool((1, 0), &[CAPTURE]);
        rig.fake_device().set_capturing(CAPTURE, true);
        rig.go("g=8@9 -g");
        rig.fake_device().set_capturing(CAPTURE, false);
        rig.device.end_pool((1, 0)).unwrap();
        rig.go("-a b=8 -b");
        rig.device.end_step().unwrap();
    }
    // A step that begins while a pool is captured: the request that the plan expects first belongs to the graph.
    rig.device.begin_pool((1, 0), &[MAIN]);
    rig.fake_device().set_capturing(MAIN, true);
    rig.device.begin_step(b"k", MAIN).unwrap();
    rig.go("g=8");
    let arena = rig.device.arena_bytes().get();
    assert!(rig.offset("g") >= arena);
    rig.go("-g");
    rig.device.end_step().unwrap();
    rig.fake_device().set_capturing(MAIN, false);
    rig.device.end_pool((1, 0)).unwrap();
    assert_eq!(rig.device.accounting().pinned, 8 * UNIT);
    rig.device.release_pool((1, 0)).unwrap();
    rig.assert_empty();
}

#[test]
fn the_reservation_is_resized_only_when_nothing_is_in_it() {
    let mut rig = Rig::fake(64);
    rig.step("k", "a=4 b=2 -a -b");
    rig.device.begin_step(b"k", MAIN).unwrap();
    rig.go("a=4 b=2 -a -b");
    let refused = rig.device.resize(bytes(1 << 20)).unwrap_err();
    assert!(refused.to_string().contains("resize is possible between steps only, and step 'k' is open"), "{refused}");
    rig.device.end_step().unwrap();
    rig.go("w=4");
    rig.use_on("w", Stream(2));
    let refused = rig.device.resize(bytes(1 << 20)).unwrap_err();
    assert!(matches!(refused, Error::NotEmpty { live: 1, bytes: 2048, pinned: 0 }), "{refused}");
    // What waits for an event is waited for.
    rig.go("-w");
    rig.device.resize(bytes(1 << 20)).unwrap();
    assert_eq!((rig.device.reservation().bytes, rig.device.backing().reservations()), (bytes(1 << 20), 2));
    assert_eq!(rig.device.accounting().free, 1 << 20);
    let change = rig.change(|rig| rig.step("k", "a=4 b=2 -a -b"));
    assert_eq!((change.told.len(), change.hits, change.on_script), (0, 2, 1), "plans stay");
    rig.assert_empty();
}

#[test]
fn a_resize_that_is_refused_leaves_the_old_reservation() {
    let mut rig = Rig::fake(64);
    rig.step("k", "a=40 -a");
    let refused = rig.device.resize(bytes(1 << 50)).unwrap_err();
    assert!(matches!(refused, Error::Backing(_)), "{refused}");
    assert_eq!(rig.device.reservation().bytes, bytes(64 * UNIT));
    assert_eq!(rig.change(|rig| rig.step("k", "a=40 -a")).on_script, 1);
    assert!(matches!(rig.device.resize(bytes(100)), Err(Error::BudgetTooSmall { .. })));
    // A plan that is larger than the reservation is kept and not used.
    rig.device.resize(bytes(20 * UNIT)).unwrap();
    let change = rig.change(|rig| rig.step("k", "a=20 -a"));
    assert_eq!((change.hits, change.plans, change.told.len()), (0, 0, 0));
    rig.device.resize(bytes(50 * UNIT)).unwrap();
    assert_eq!(rig.change(|rig| rig.step("k", "a=40 -a")).on_script, 1);
    // Neither the new size nor the old one is to be had any more.
    rig.fake_device().refuse_reservations(2);
    let lost = rig.device.resize(bytes(1 << 20)).unwrap_err();
    assert!(matches!(lost, Error::ReservationLost { .. }), "{lost}");
    assert!(matches!(rig.alloc("x", UNIT, MAIN), Err(Error::OutOfMemory(_))));
    rig.device.free(4096);
    rig.device.resize(bytes(50 * UNIT)).unwrap();
    rig.go("a=50 -a");
    rig.assert_empty();
}

#[test]
fn streams_that_come_and_go_leave_every_byte_accounted_for() {
    let mut rig = Rig::fake(400);
    let mut random = Random::new(5);
    for round in 0..3000 {
        let name = random.below(40).to_string();
        if rig.named.contains_key(&name) {
            if random.below(3) == 0 {
                rig.use_on(&name, Stream(1 + random.below(4)));
            }
            rig.free(&name);
        } else {
            // Now and then it does not fit; that is an answer too.
            let _ = rig.alloc(&name, UNIT * (1 + random.below(30)), Stream(1 + random.below(4)));
        }
        let sums = rig.device.accounting();
        assert_eq!(sums.free + sums.outside + sums.pending, sums.reservation, "round {round}: {sums:?}");
        assert_eq!(rig.fake_device().hazards(), [], "round {round}");
    }
    rig.free_all();
    rig.assert_empty();
}

#[test]
fn a_step_whose_stream_is_captured_waits_for_nothing() {
    let mut rig = Rig::fake(64);
    rig.step_on(Stream(1), "k", "a=4@1 -a");
    rig.device.begin_pool((1, 0), &[CAPTURE]);
    rig.fake_device().set_capturing(CAPTURE, true);
    rig.step_on(CAPTURE, "k", "a=4@9 -a");
    rig.fake_device().set_capturing(CAPTURE, false);
    rig.device.end_pool((1, 0)).unwrap();
    rig.step_on(Stream(2), "k", "a=4@2 -a");
    rig.step_on(Stream(3), "k", "a=4@3 -a");
    rig.device.release_pool((1, 0)).unwrap();
    rig.assert_empty();
}

#[test]
fn an_offline_plan_counts_its_streams_as_steps_do() {
    use terrace_planner::solve::Control;
    use terrace_planner::{Options, Verdict, plan};
    use terrace_profiles::units::Tick;
    use terrace_profiles::{Action, BufferId, Event, LabelId, LaneId, Profile};

    // The plan numbers its streams the other way round: lane 1 comes first.
    let alloc = |id, lane| {
        let (bytes, label) = (bytes(2048), LabelId(0));
        Action::Alloc { id: BufferId(id), bytes, label, lane: LaneId(lane), hints: None }
    };
    let actions = [alloc(0, 1), alloc(1, 0), Action::Free { id: BufferId(0) }, Action::Free { id: BufferId(1) }];
    let events = actions.into_iter().enumerate().map(|(tick, action)| Event { tick: Tick(tick as u64), action });
    let profile = Profile {
        name: "k".to_owned(),
        labels: vec!["x".to_owned()],
        lanes: vec!["stream 0".to_owned(), "stream 1".to_owned()],
        events: events.collect(),
        ..Profile::default()
    };
    let Verdict::Fits(plan) = plan(&profile, &Options::default(), &Control::default()).unwrap() else { panic!() };
    let mut rig = Rig::with(Config { verify_steps: 1, ..Config::new(bytes(1 << 20)) });
    rig.device.preplan(b"k", &plan).unwrap();
    for on_script in [0, 1, 1] {
        let change = rig.change(|rig| rig.step("k", "a=4@1 b=4@2 -a -b"));
        assert_eq!((change.told.len(), change.hits, change.on_script), (0, 2, on_script), "{change:?}");
    }
}
