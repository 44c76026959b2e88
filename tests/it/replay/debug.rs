//! Debug mode: overruns are caught with the buffer's name, and what is freed is poisoned. On host memory a write through the
//! address is a real one.

use terrace_allocator::fake::Access;
use terrace_allocator::{Config, Stream};
use terrace_profiles::units::DeviceSpan;

use super::kit::{MAIN, Rig, bytes};

fn rig() -> Rig {
    Rig::with(Config { debug: true, ..Config::new(bytes(1 << 20)) })
}

/// Writes one byte, `at` bytes from the start of the span.
fn write(span: DeviceSpan, at: i64) {
    let address = span.address.checked_add_signed(at).unwrap();
    // SAFETY: the tests write at most a redzone's 512 bytes beyond a span, which lie inside the reservation, and host memory
    // exposed its address.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address as usize).write_volatile(0x11) };
}

fn read(span: DeviceSpan, at: i64) -> u8 {
    let address = span.address.checked_add_signed(at).unwrap();
    // SAFETY: as above.
    unsafe { std::ptr::with_exposed_provenance::<u8>(address as usize).read_volatile() }
}

#[test]
fn a_write_past_the_end_is_caught_at_the_free() {
    let mut rig = rig();
    let span = rig.alloc("scores", 1000, MAIN).unwrap();
    (0..1000).for_each(|at| write(span, at));
    rig.device.free(span.address);
    assert_eq!(rig.device.take_damages(), [], "all of it is the caller's");
    for at in [1000, 1023, 1024, 1511] {
        let span = rig.device.alloc(bytes(1000), MAIN, "scores").unwrap();
        write(span, at);
        rig.device.free(span.address);
        let damages = rig.device.take_damages();
        assert_eq!(damages.len(), 1, "at {at}");
        assert_eq!((damages[0].label.as_str(), damages[0].bytes, damages[0].at), ("scores", 1000, at));
        assert_eq!(damages[0].address, span.address);
    }
    assert_eq!(rig.device.stats().redzones_damaged, 4);
}

#[test]
fn a_write_before_the_start_is_caught_at_the_end_of_the_step() {
    let mut rig = rig();
    for round in 0..3 {
        rig.device.begin_step(b"k", MAIN).unwrap();
        rig.go("a=4 b=2 -a");
        let span = rig.named["b"];
        write(span, -1);
        assert_eq!(rig.device.take_damages(), []);
        rig.device.end_step().unwrap();
        let damages = rig.device.take_damages();
        assert_eq!((damages.len(), damages[0].label.as_str(), damages[0].at), (1, "b", -1), "round {round}");
        // It is told once.
        rig.go("-b");
        assert_eq!(rig.device.take_damages(), []);
    }
    rig.assert_empty();
}

#[test]
fn both_ends_of_one_buffer_are_told() {
    let mut rig = rig();
    let span = rig.alloc("x", 100, MAIN).unwrap();
    write(span, -512);
    write(span, 100);
    rig.free("x");
    let at: Vec<i64> = rig.device.take_damages().iter().map(|damage| damage.at).collect();
    assert_eq!(at, [-512, 100]);
}

#[test]
fn what_is_freed_is_poisoned() {
    let mut rig = rig();
    let span = rig.alloc("x", 777, MAIN).unwrap();
    (0..777).for_each(|at| write(span, at));
    rig.free("x");
    assert!((0..777).all(|at| read(span, at) == 0xfb));
}

#[test]
fn what_another_stream_still_uses_is_poisoned_only_when_it_is_done() {
    let fake = terrace_allocator::fake::FakeDevice::new(bytes(1 << 30));
    let config = Config { debug: true, ..Config::new(bytes(1 << 20)) };
    let mut rig = Rig::on(Box::new(fake.clone()), Some(fake), config);
    rig.go("x=4");
    rig.use_on("x", Stream(2));
    let span = rig.free("x");
    let fills = rig.fake_device().calls().fills;
    rig.device.drain(false);
    assert_eq!(rig.fake_device().calls().fills, fills);
    rig.fake_device().run_all();
    rig.device.drain(false);
    assert_eq!(rig.fake_device().calls().fills, fills + 1);
    rig.fake_device().launch(MAIN, "next", &[Access::Write(span, 4)]);
    rig.assert_empty();
}

#[test]
fn debug_mode_serves_the_same_plans() {
    let mut rig = rig();
    let line = "a=4 b=8 -a c=4 -b out=2 -c";
    for round in 0..4 {
        let change = rig.change(|rig| rig.step("k", line));
        assert_eq!((change.told.len(), change.hits), (0, if round == 0 { 0 } else { 3 }));
        rig.go("-out");
    }
    assert_eq!(rig.device.take_damages(), []);
    rig.assert_empty();
}

#[test]
fn graphs_have_no_redzones_and_raise_no_alarm() {
    let mut rig = rig();
    rig.device.begin_pool((1, 1), &[Stream(9)]);
    rig.go("a=4@9 b=3@9 -a c=2@9 eager=5@1");
    write(rig.named["c"], -1);
    rig.device.end_pool((1, 1)).unwrap();
    rig.go("-b -c -eager");
    rig.device.release_pool((1, 1)).unwrap();
    assert_eq!(rig.device.take_damages(), []);
    rig.assert_empty();
}
