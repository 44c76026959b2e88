//! What every source of device memory promises, asked of each of them: host memory, the fake device, and a GPU where there is
//! one. Below that, what only one of them can promise.

use terrace_allocator::backing::{Backing, BackingError, Event, Stream};
use terrace_allocator::cuda::CudaBacking;
use terrace_allocator::fake::{Access, FakeDevice, Hazard};
use terrace_allocator::host::HostBacking;
use terrace_profiles::units::{Bytes, DeviceSpan};
use terrace_tests::gpu;

/// The default stream, and the one that CUDA has for each thread: handles that are valid on every backing.
const DEFAULT: Stream = Stream(0);
const OTHER: Stream = Stream(2);

#[test]
fn host_memory_conforms() {
    conforms(|| Some(Box::new(HostBacking::new())));
}

#[test]
fn the_fake_device_conforms() {
    conforms(|| Some(Box::new(FakeDevice::new(bytes(1 << 40)))));
}

#[test]
fn a_cuda_device_conforms() {
    let _turn = gpu::turn();
    conforms(|| gpu::require().map(|backing| Box::new(backing) as Box<dyn Backing>));
}

/// Runs every check on a backing of its own; `None` is a skip that `make` has reported.
fn conforms(make: impl Fn() -> Option<Box<dyn Backing>>) {
    let checks = [
        a_reservation_is_aligned_and_holds_what_is_written,
        a_second_reservation_needs_a_release,
        a_reservation_of_nothing_is_refused,
        a_reservation_that_is_too_large_is_refused_with_its_size,
        reservations_are_counted_and_nothing_else_is_one,
        a_release_is_for_what_is_held_and_once,
        nothing_outside_the_reservation_is_touched,
        events_follow_their_stream,
        an_event_can_be_asked_again_and_forgotten,
        many_events_at_once_are_kept_apart,
        an_event_that_nobody_recorded_is_an_error,
        no_stream_is_captured_until_someone_does,
        it_has_a_name_and_its_memory_adds_up,
        it_goes_to_another_thread,
    ];
    for check in checks {
        let Some(backing) = make() else { return };
        check(backing);
    }
}

fn a_reservation_is_aligned_and_holds_what_is_written(mut backing: Box<dyn Backing>) {
    for size in [1, 511, 512, 4097, (2 << 20) + 1, 64 << 20] {
        let span = backing.reserve(bytes(size)).unwrap();
        assert_eq!(span.bytes, bytes(size));
        assert_eq!(span.address % 512, 0, "{size} at {:#x}", span.address);
        backing.fill(span, 0xab, DEFAULT).unwrap();
        let last = part(span, size - 1, 1);
        backing.fill(last, 0xcd, DEFAULT).unwrap();
        let mut all = vec![0; size as usize];
        backing.read(span, &mut all, DEFAULT).unwrap();
        let (end, rest) = all.split_last().unwrap();
        assert_eq!(*end, 0xcd, "{size}");
        assert!(rest.iter().all(|byte| *byte == 0xab), "{size}");
        let mut one = [0];
        backing.read(span, &mut one, DEFAULT).unwrap();
        assert_eq!(one[0], all[0], "a short buffer takes the head of the span");
        backing.release(span).unwrap();
    }
}

fn a_second_reservation_needs_a_release(mut backing: Box<dyn Backing>) {
    let first = backing.reserve(bytes(4096)).unwrap();
    let refused = backing.reserve(bytes(512)).unwrap_err();
    assert!(matches!(refused, BackingError::Reserve { asked, .. } if asked == bytes(512)), "{refused}");
    backing.fill(first, 1, DEFAULT).unwrap();
    backing.release(first).unwrap();
    let second = backing.reserve(bytes(512)).unwrap();
    backing.release(second).unwrap();
}

fn a_reservation_of_nothing_is_refused(mut backing: Box<dyn Backing>) {
    let refused = backing.reserve(Bytes::ZERO).unwrap_err();
    assert!(matches!(refused, BackingError::Reserve { .. }), "{refused}");
}

fn a_reservation_that_is_too_large_is_refused_with_its_size(mut backing: Box<dyn Backing>) {
    for size in [1 << 50, 1 << 62, (1 << 63) - 1] {
        let refused = backing.reserve(bytes(size)).unwrap_err();
        assert!(matches!(refused, BackingError::Reserve { asked, .. } if asked == bytes(size)), "{refused}");
        assert!(refused.to_string().contains(&format!("{size} bytes")), "{refused}");
    }
    let span = backing.reserve(bytes(4096)).unwrap();
    backing.release(span).unwrap();
}

fn reservations_are_counted_and_nothing_else_is_one(mut backing: Box<dyn Backing>) {
    assert_eq!(backing.reservations(), 0);
    backing.reserve(bytes(1 << 62)).unwrap_err();
    assert_eq!(backing.reservations(), 0, "a refused one is none");
    let span = backing.reserve(bytes(1 << 20)).unwrap();
    assert_eq!(backing.reservations(), 1);
    backing.fill(span, 3, DEFAULT).unwrap();
    let event = backing.record(DEFAULT).unwrap();
    backing.wait(OTHER, event).unwrap();
    backing.synchronize(event).unwrap();
    backing.read(span, &mut [0; 16], DEFAULT).unwrap();
    backing.release(span).unwrap();
    assert_eq!(backing.reservations(), 1);
    let span = backing.reserve(bytes(1 << 20)).unwrap();
    assert_eq!(backing.reservations(), 2);
    backing.release(span).unwrap();
}

fn a_release_is_for_what_is_held_and_once(mut backing: Box<dyn Backing>) {
    let unknown = DeviceSpan { address: 512, bytes: bytes(512) };
    is_call(backing.release(unknown), "release");
    let span = backing.reserve(bytes(4096)).unwrap();
    is_call(backing.release(part(span, 0, 512)), "release");
    backing.release(span).unwrap();
    is_call(backing.release(span), "release");
    is_call(backing.fill(span, 0, DEFAULT), "fill");
    is_call(backing.read(span, &mut [0], DEFAULT), "read");
}

fn nothing_outside_the_reservation_is_touched(mut backing: Box<dyn Backing>) {
    let span = backing.reserve(bytes(4096)).unwrap();
    for (address, size) in [
        (span.address + 4096, 1),
        (span.address + 4095, 2),
        (span.address - 1, 2),
        (span.address, 4097),
        (0, 1),
        (u64::MAX, 1),
        (span.address, (1 << 63) - 1),
    ] {
        let outside = DeviceSpan { address, bytes: bytes(size) };
        is_call(backing.fill(outside, 0, DEFAULT), "fill");
        // A short buffer reads the head of a span, so the buffer is as long as the span where it can be.
        if size <= 4097 {
            is_call(backing.read(outside, &mut vec![0; size as usize], DEFAULT), "read");
        }
    }
    is_call(backing.read(part(span, 0, 8), &mut [0; 16], DEFAULT), "read");
    backing.release(span).unwrap();
}

fn events_follow_their_stream(mut backing: Box<dyn Backing>) {
    let span = backing.reserve(bytes(1 << 20)).unwrap();
    backing.fill(span, 1, DEFAULT).unwrap();
    let first = backing.record(DEFAULT).unwrap();
    backing.wait(OTHER, first).unwrap();
    backing.fill(span, 2, OTHER).unwrap();
    let second = backing.record(OTHER).unwrap();
    backing.synchronize(second).unwrap();
    // The second waited for the first, so both are over.
    assert_eq!(backing.is_done(first), Ok(true));
    assert_eq!(backing.is_done(second), Ok(true));
    let mut byte = [0];
    backing.read(span, &mut byte, OTHER).unwrap();
    assert_eq!(byte, [2]);
    backing.release(span).unwrap();
}

fn an_event_can_be_asked_again_and_forgotten(mut backing: Box<dyn Backing>) {
    let event = backing.record(DEFAULT).unwrap();
    backing.synchronize(event).unwrap();
    backing.synchronize(event).unwrap();
    assert_eq!(backing.is_done(event), Ok(true));
    assert_eq!(backing.is_done(event), Ok(true));
    backing.wait(OTHER, event).unwrap();
    backing.forget(event);
    let dropped = backing.record(DEFAULT).unwrap();
    backing.forget(dropped);
    backing.forget(dropped);
    backing.forget(Event(u64::MAX));
}

fn many_events_at_once_are_kept_apart(mut backing: Box<dyn Backing>) {
    for _round in 0..3 {
        let events: Vec<Event> = (0..100).map(|i| backing.record([DEFAULT, OTHER][i % 2]).unwrap()).collect();
        let distinct: std::collections::HashSet<_> = events.iter().collect();
        assert_eq!(distinct.len(), events.len());
        for event in events.iter().rev() {
            backing.synchronize(*event).unwrap();
        }
        assert!(events.iter().all(|event| backing.is_done(*event) == Ok(true)));
    }
}

fn an_event_that_nobody_recorded_is_an_error(mut backing: Box<dyn Backing>) {
    for unknown in [Event(0), Event(1), Event(u64::MAX)] {
        is_call(backing.is_done(unknown), "is_done");
        is_call(backing.synchronize(unknown), "synchronize");
        is_call(backing.wait(DEFAULT, unknown), "wait");
    }
}

fn no_stream_is_captured_until_someone_does(mut backing: Box<dyn Backing>) {
    assert!(!backing.is_capturing(DEFAULT));
    assert!(!backing.is_capturing(OTHER));
}

fn it_has_a_name_and_its_memory_adds_up(mut backing: Box<dyn Backing>) {
    assert!(!backing.name().is_empty());
    backing.reserve(bytes(1 << 20)).unwrap();
    if let Some((total, free)) = backing.memory() {
        assert!(free <= total && !total.is_zero(), "{free} of {total}");
    }
}

fn it_goes_to_another_thread(mut backing: Box<dyn Backing>) {
    let span = backing.reserve(bytes(4096)).unwrap();
    let event = backing.record(DEFAULT).unwrap();
    let there = std::thread::spawn(move || {
        backing.fill(span, 9, DEFAULT).unwrap();
        backing.synchronize(event).unwrap();
        let mut byte = [0];
        backing.read(span, &mut byte, DEFAULT).unwrap();
        backing.release(span).unwrap();
        byte
    });
    assert_eq!(there.join().unwrap(), [9]);
}

// What host memory alone promises.

#[test]
#[cfg(target_os = "linux")]
fn host_memory_costs_nothing_until_it_is_touched() {
    let mut host = HostBacking::new();
    let span = host.reserve(bytes(1 << 30)).unwrap();
    host.fill(part(span, (1 << 30) - 512, 512), 1, DEFAULT).unwrap();
    let kib = resident_kib(span.address).expect("the mapping is in smaps");
    assert!(kib < 64 << 10, "{kib} KiB of 1 GiB are resident");
    let mut byte = [1];
    host.read(part(span, 1 << 29, 1), &mut byte, DEFAULT).unwrap();
    assert_eq!(byte, [0], "it comes zeroed");
}

/// How much of the mapping around `address` is resident.
#[cfg(target_os = "linux")]
fn resident_kib(address: u64) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let mut inside = false;
    for line in text.lines() {
        let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
        let ends = range.and_then(|(a, b)| Some(u64::from_str_radix(a, 16).ok()?..u64::from_str_radix(b, 16).ok()?));
        if let Some(ends) = ends {
            inside = ends.contains(&address);
        } else if let Some(rest) = line.strip_prefix("Rss:").filter(|_| inside) {
            return rest.split_whitespace().next()?.parse().ok();
        }
    }
    None
}

// What a CUDA device alone promises.

#[test]
fn without_a_driver_the_error_names_what_is_missing() {
    match CudaBacking::device_count() {
        Ok(count) => assert!(count > 0),
        Err(BackingError::NoDevice(reason)) => {
            let named = ["libcuda.so.1 cannot be loaded", "the CUDA driver does not start", "shows no device"];
            assert!(named.iter().any(|name| reason.contains(name)), "{reason}");
            assert_eq!(reason.lines().count(), 1, "{reason}");
            assert_eq!(CudaBacking::new(0).unwrap_err(), BackingError::NoDevice(reason));
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn an_ordinal_out_of_range_is_named() {
    let _turn = gpu::turn();
    let Some(_device) = gpu::require() else { return };
    let count = CudaBacking::device_count().unwrap();
    let BackingError::NoDevice(reason) = CudaBacking::new(count).unwrap_err() else { panic!("not a NoDevice") };
    assert_eq!(reason, format!("there is no CUDA device {count}: this machine has {count}, counted from 0"));
}

#[test]
fn a_cuda_reservation_keeps_its_base_and_gives_its_memory_back() {
    let _turn = gpu::turn();
    let Some(mut device) = gpu::require() else { return };
    let span = device.reserve(bytes(8 << 20)).unwrap();
    device.release(span).unwrap();
    let larger = device.reserve(bytes(3 << 30)).unwrap();
    assert_eq!(larger.address, span.address);
    let (_, held) = device.memory().unwrap();
    device.release(larger).unwrap();
    let (_, free) = device.memory().unwrap();
    // Others may use the device too; 1 GiB of slack still tells 3 GiB from nothing.
    assert!(free.get() >= held.get() + (2 << 30), "{held} free while held, {free} after");
}

// What the fake device alone promises: it sees what real devices hide.

#[test]
fn reuse_on_another_stream_without_an_event_is_seen() {
    let (fake, mut backing, span) = fake();
    fake.launch(OTHER, "attention", &[Access::Read(span)]);
    // Even when luck ran the old kernel first.
    fake.run_all();
    fake.launch(DEFAULT, "mlp", &[Access::Write(part(span, 512, 512), 1)]);
    let expected = Hazard::Unordered {
        first: ("attention".to_owned(), OTHER),
        second: ("mlp".to_owned(), DEFAULT),
        shared: part(span, 512, 512),
    };
    assert_eq!(fake.hazards(), [expected]);
    backing.release(span).unwrap();
}

#[test]
fn a_hand_out_before_the_old_kernel_ran_is_seen() {
    let (fake, _backing, span) = fake();
    fake.launch(OTHER, "attention", &[Access::Write(span, 1)]);
    fake.hand_out(OTHER, span);
    assert_eq!(fake.hazards(), [], "on its own stream the order is enough");
    fake.hand_out(DEFAULT, span);
    fake.launch(Stream(5), "sampler", &[Access::Read(span)]);
    let text: Vec<String> = fake.hazards().iter().map(Hazard::to_string).collect();
    let at = format!("4.0 KiB at {:#x}, and nothing orders them", span.address);
    assert_eq!(
        text,
        [
            format!("the hand-out on stream 2 and the hand-out on stream 0 share {at}"),
            format!("the hand-out on stream 2 and sampler on stream 5 share {at}"),
        ]
    );
}

#[test]
fn streams_events_and_the_host_order_work() {
    let (fake, mut backing, span) = fake();
    let read = [Access::Read(span)];
    let write = [Access::Write(span, 1)];
    // One stream.
    fake.launch(Stream(1), "a", &write);
    fake.launch(Stream(1), "b", &write);
    // A stream that waits, and one that waits for that one.
    let event = backing.record(Stream(1)).unwrap();
    backing.wait(Stream(2), event).unwrap();
    fake.launch(Stream(2), "c", &write);
    let event = backing.record(Stream(2)).unwrap();
    backing.wait(Stream(3), event).unwrap();
    fake.launch(Stream(3), "d", &write);
    // The host, once it has seen the event done.
    let event = backing.record(Stream(3)).unwrap();
    assert_eq!(backing.is_done(event), Ok(false));
    fake.run_all();
    assert_eq!(backing.is_done(event), Ok(true));
    fake.launch(Stream(4), "e", &write);
    let event = backing.record(Stream(4)).unwrap();
    backing.synchronize(event).unwrap();
    // Readers need no order among themselves.
    fake.launch(Stream(5), "f", &read);
    fake.launch(Stream(6), "g", &read);
    assert_eq!(fake.hazards(), []);
    // But a writer needs it with each of them.
    fake.launch(Stream(7), "h", &write);
    assert_eq!(fake.hazards().len(), 2);
}

#[test]
fn an_event_orders_only_what_came_before_it() {
    let (fake, mut backing, span) = fake();
    let event = backing.record(Stream(1)).unwrap();
    fake.launch(Stream(1), "late", &[Access::Write(span, 1)]);
    backing.wait(Stream(2), event).unwrap();
    fake.launch(Stream(2), "other", &[Access::Write(span, 2)]);
    assert_eq!(fake.hazards().len(), 1);
}

#[test]
fn a_queue_runs_one_item_at_a_time_and_waits_for_events() {
    let (fake, mut backing, span) = fake();
    fake.launch(Stream(1), "a", &[Access::Write(part(span, 0, 512), 1)]);
    fake.launch(Stream(1), "b", &[Access::Write(part(span, 512, 512), 2)]);
    let event = backing.record(Stream(1)).unwrap();
    backing.wait(Stream(2), event).unwrap();
    fake.launch(Stream(2), "c", &[Access::Write(part(span, 256, 512), 3)]);
    assert!(!fake.run_one(Stream(2)), "it waits");
    assert!(fake.run_one(Stream(1)));
    assert!(!fake.run_one(Stream(2)), "still");
    assert!(fake.run_one(Stream(1)) && fake.run_one(Stream(2)) && fake.run_one(Stream(2)));
    assert!(!fake.run_one(Stream(1)) && !fake.run_one(Stream(2)) && !fake.run_one(Stream(9)));
    let mut all = [9; 1100];
    backing.read(span, &mut all, Stream(2)).unwrap();
    let expected: Vec<u8> = [(256, 1), (512, 3), (256, 2), (76, 0)].iter().flat_map(|(n, b)| vec![*b; *n]).collect();
    assert_eq!(all, expected[..]);
}

#[test]
fn synchronizing_runs_what_is_before_the_event_and_no_more() {
    let (fake, mut backing, span) = fake();
    fake.launch(Stream(1), "a", &[Access::Read(span)]);
    let first = backing.record(Stream(1)).unwrap();
    fake.launch(Stream(1), "b", &[Access::Read(span)]);
    backing.wait(Stream(2), first).unwrap();
    fake.launch(Stream(2), "c", &[Access::Read(span)]);
    let event = backing.record(Stream(2)).unwrap();
    backing.synchronize(event).unwrap();
    assert_eq!((fake.pending(Stream(1)), fake.pending(Stream(2))), (1, 0));
}

#[test]
fn a_kernel_that_leaves_the_reservation_is_seen() {
    let (fake, _backing, span) = fake();
    let outside = DeviceSpan { address: span.address + 4000, bytes: bytes(512) };
    fake.launch(Stream(1), "a", &[Access::Read(outside)]);
    assert_eq!(fake.hazards(), [Hazard::Outside { kernel: ("a".to_owned(), Stream(1)), span: outside }]);
}

#[test]
fn a_capturing_stream_takes_no_events_and_runs_nothing() {
    let (fake, mut backing, span) = fake();
    let event = backing.record(Stream(2)).unwrap();
    fake.set_capturing(Stream(1), true);
    assert!(backing.is_capturing(Stream(1)) && !backing.is_capturing(Stream(2)));
    is_call(backing.record(Stream(1)), "record");
    is_call(backing.wait(Stream(1), event), "wait");
    is_call(backing.read(span, &mut [0], Stream(1)), "read");
    fake.launch(Stream(1), "a", &[Access::Write(span, 1)]);
    fake.set_capturing(Stream(1), false);
    assert_eq!(fake.pending(Stream(1)), 0);
    backing.record(Stream(1)).unwrap();
}

#[test]
fn reservations_fail_on_request_and_calls_are_counted() {
    let fake = FakeDevice::new(bytes(1 << 30));
    let mut backing: Box<dyn Backing> = Box::new(fake.clone());
    fake.refuse_reservations(2);
    for _refused in 0..2 {
        assert!(matches!(backing.reserve(bytes(512)), Err(BackingError::Reserve { .. })));
    }
    let span = backing.reserve(bytes(512)).unwrap();
    let event = backing.record(DEFAULT).unwrap();
    backing.wait(OTHER, event).unwrap();
    backing.is_done(event).unwrap();
    let calls = fake.calls();
    assert_eq!((calls.reserves, calls.records, calls.waits, calls.queries, calls.synchronizes), (3, 1, 1, 1, 0));
    fake.lose();
    is_call(backing.record(DEFAULT), "record");
    is_call(backing.fill(span, 0, DEFAULT), "fill");
    backing.release(span).unwrap();
}

fn fake() -> (FakeDevice, Box<dyn Backing>, DeviceSpan) {
    let fake = FakeDevice::new(bytes(1 << 30));
    let mut backing: Box<dyn Backing> = Box::new(fake.clone());
    let span = backing.reserve(bytes(4096)).unwrap();
    (fake, backing, span)
}

fn bytes(bytes: u64) -> Bytes {
    Bytes::new(bytes).unwrap()
}

fn part(span: DeviceSpan, from: u64, size: u64) -> DeviceSpan {
    DeviceSpan { address: span.address + from, bytes: bytes(size) }
}

#[track_caller]
fn is_call<T: std::fmt::Debug>(result: Result<T, BackingError>, call: &str) {
    match result {
        Err(BackingError::Call { call: named, reason }) => {
            assert_eq!(named, call);
            assert!(!reason.is_empty());
        }
        other => panic!("{call} should have failed, but: {other:?}"),
    }
}
