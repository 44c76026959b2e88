//! What a device tells about itself: that the bytes add up in every state, that what is said of features and leaks is so, and
//! that the live map shows what lives, in each of its forms.

use terrace_allocator::backing::Stream;
use terrace_allocator::fake::{Access, FakeDevice};
use terrace_allocator::{Allocator, Config, Device, LiveState};
use terrace_profiles::import;
use terrace_profiles::units::{Bytes, DeviceSpan};

const MAIN: Stream = Stream(0);
const SIDE: Stream = Stream(7);
const KIB: u64 = 1024;

fn bytes(bytes: u64) -> Bytes {
    Bytes::new(bytes).unwrap()
}

fn config() -> Config {
    Config::new(bytes(256 * KIB))
}

fn open(config: Config) -> (Device, FakeDevice) {
    let fake = FakeDevice::new(bytes(1 << 30));
    (Device::new(Box::new(fake.clone()), config).unwrap(), fake)
}

fn alloc(device: &mut Device, size: u64, label: &str) -> DeviceSpan {
    device.alloc(bytes(size), MAIN, label).unwrap()
}

/// A step of two buffers that come and go; `inside` is called while both live.
fn forward(device: &mut Device, key: &str, inside: impl FnOnce(&mut Device)) {
    device.begin_step(key.as_bytes(), MAIN).unwrap();
    let a = alloc(device, 4 * KIB, "net.py:1:a");
    let b = alloc(device, 2 * KIB, "net.py:2:b");
    inside(device);
    device.free(a.address);
    device.free(b.address);
    device.end_step().unwrap();
}

/// The rows add up, and the map shows the same bytes without an overlap.
fn holds_together(device: &Device, when: &str) {
    let (summary, map) = (device.boot_summary(), device.live_map());
    let sum: u64 = summary.memory.iter().map(|row| row.bytes).sum();
    assert_eq!(sum, summary.reservation, "{when}\n{summary}");
    let mut end = 0;
    for buffer in &map.buffers {
        assert!(buffer.offset >= end && buffer.bytes > 0, "{when}: {buffer:?} begins before {end}");
        end = buffer.offset + buffer.bytes;
    }
    assert!(end <= map.reservation, "{when}");
    let shown = |state: &dyn Fn(LiveState) -> bool| -> u64 {
        map.buffers.iter().filter(|buffer| state(buffer.state)).map(|buffer| buffer.bytes).sum()
    };
    assert_eq!(Some(shown(&|state| state == LiveState::Outside)), summary.bytes("outside"), "{when}");
    assert_eq!(Some(shown(&|state| state == LiveState::Outlived)), summary.bytes("outlived"), "{when}");
    assert_eq!(Some(shown(&|state| state == LiveState::Pending)), summary.bytes("pending"), "{when}");
    assert!(Some(shown(&|state| state == LiveState::Planned)) <= summary.bytes("arena"), "{when}");
    let pinned: u64 = map.pools.iter().map(|(_, range)| range.end - range.start).sum();
    assert_eq!(Some(pinned), summary.bytes("pinned"), "{when}");
    assert!(shown(&|state| matches!(state, LiveState::Pool(_))) <= pinned, "{when}");
}

#[test]
fn the_rows_add_up_from_boot_to_the_last_free() {
    let (mut device, fake) = open(config());
    holds_together(&device, "at boot");
    let kept = alloc(&mut device, 8 * KIB, "weights");
    holds_together(&device, "with weights");
    for turn in 0..4 {
        forward(&mut device, "k", |device| holds_together(device, &format!("inside step {turn}")));
        holds_together(&device, &format!("after step {turn}"));
    }
    assert_eq!(device.stats().steps_on_script, 3);
    let mut late = Vec::new();
    forward(&mut device, "k", |device| {
        late.push(alloc(device, 16 * KIB, "extra"));
        holds_together(device, "off script");
    });
    holds_together(&device, "with what outlived its step");
    device.begin_step(b"k", MAIN).unwrap();
    let planned = alloc(&mut device, 4 * KIB, "net.py:1:a");
    device.end_step().unwrap();
    assert_eq!(device.boot_summary().bytes("outlived"), Some(4 * KIB));
    holds_together(&device, "with a slot that outlived its step");
    device.record_stream(kept.address, SIDE);
    fake.launch(SIDE, "copy", &[Access::Read(kept)]);
    device.free(kept.address);
    assert_eq!(device.boot_summary().bytes("pending"), Some(8 * KIB));
    holds_together(&device, "with bytes that wait for an event");
    device.begin_pool((1, 2), &[]);
    let first = alloc(&mut device, 4 * KIB, "graph");
    let second = alloc(&mut device, 4 * KIB, "graph");
    holds_together(&device, "while a graph is captured");
    device.free(first.address);
    device.end_pool((1, 2)).unwrap();
    forward(&mut device, "k", |device| holds_together(device, "beside a graph"));
    device.release_pool((1, 2)).unwrap();
    holds_together(&device, "with a released pool in use");
    device.free(second.address);
    device.free(planned.address);
    late.iter().for_each(|span| device.free(span.address));
    fake.synchronize_all();
    device.drain(true);
    holds_together(&device, "at the end");
    let summary = device.boot_summary();
    assert_eq!(summary.bytes("arena").unwrap() + summary.bytes("free").unwrap(), summary.reservation);
}

#[test]
fn the_rows_add_up_whatever_happens() {
    for seed in 0..60_u64 {
        let (mut device, fake) = open(Config { debug: seed % 5 == 4, most_keys: 3, ..config() });
        let (mut random, mut live, mut depth) = (seed * 2 + 1, Vec::new(), 0);
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for event in 0..400 {
            match next(16) {
                0..=5 => {
                    let (size, stream) = (1 + next(6) * 700, if next(5) == 0 { SIDE } else { MAIN });
                    live.extend(device.alloc(bytes(size), stream, ["a", "b", "c"][next(3) as usize]));
                }
                6..=10 if !live.is_empty() => {
                    let span = live.swap_remove(next(live.len() as u64) as usize);
                    if next(6) == 0 {
                        device.record_stream(span.address, SIDE);
                        fake.launch(SIDE, "late", &[]);
                    }
                    device.free(span.address);
                }
                11 | 12 if depth == 0 => {
                    device.begin_step(&[next(5) as u8], MAIN).unwrap();
                    depth = 1;
                }
                13 if depth == 1 => {
                    device.end_step().unwrap();
                    depth = 0;
                }
                14 => match next(3) {
                    0 => device.begin_pool((next(2), 0), &[SIDE]),
                    1 => drop(device.end_pool((next(2), 0))),
                    _ => drop(device.release_pool((next(2), 0))),
                },
                15 => {
                    fake.run_all();
                    device.drain(false);
                }
                _ => {}
            }
            holds_together(&device, &format!("seed {seed}, event {event}"));
        }
        device.live_map_html().unwrap();
        device.live_snapshot(&mut Vec::new()).unwrap();
        device.leak_report();
    }
}

#[test]
fn the_summary_prints_as_a_table() {
    let (mut device, _fake) = open(config());
    forward(&mut device, "prefill/4128\n", |_| {});
    alloc(&mut device, 1000, "kv");
    let expected = "\
fake: 256.0 KiB reserved at 0xfa000000000000, aligned to 512
  arena       6144   2.3%  the largest of 1 plan: 'prefill/4128\\n'
  outside     1024   0.4%  1 buffer outside plans
  outlived       0   0.0%  0 slots beyond the end of their step
  pinned         0   0.0%  0 graph pools
  pending        0   0.0%  0 buffers that wait for events
  free      254976  97.3%  the largest piece 261120, the arena's included
  total     262144 100.0%
  replay                active    1 of 1 key planned, 0 given up
  debug redzones        inactive  Config::debug is not set
  cross-lane sharing    inactive  streams never share planned bytes: each has a part of the arena of its own
  background planning   inactive  every plan is proven optimal
  loaded plans          inactive  nothing was loaded
  CUDA backing          inactive  the device is one for tests
  graph pools           inactive  no graph was captured
";
    assert_eq!(device.boot_summary().to_string(), expected);
    let json: serde_json::Value = serde_json::from_str(&device.boot_summary().to_json()).unwrap();
    assert_eq!((&json["memory"][0]["name"], &json["memory"][0]["bytes"]), (&"arena".into(), &(6 * KIB).into()));
    assert_eq!(json["features"][0]["active"], true);
}

#[test]
fn a_feature_says_why_it_is_not_active() {
    let why = |device: &Device, name: &str| {
        let summary = device.boot_summary();
        let feature = summary.features.iter().find(|feature| feature.name == name).unwrap();
        (feature.active, feature.why.clone())
    };
    let (mut device, _fake) = open(config());
    assert_eq!(why(&device, "replay"), (false, "no step has begun, and no plan was loaded".to_owned()));
    device.begin_step(b"k", MAIN).unwrap();
    assert_eq!(why(&device, "replay"), (false, "no step has ended yet".to_owned()));
    device.begin_pool((0, 1), &[SIDE]);
    assert_eq!(why(&device, "graph pools"), (true, "1 pool, 1 being captured".to_owned()));
    let (mut device, _fake) = open(Config { debug: true, ..config() });
    forward(&mut device, "k", |_| {});
    assert_eq!(why(&device, "replay"), (true, "1 of 1 key planned; debug checks each call".to_owned()));
    assert_eq!(why(&device, "debug redzones").1, "Config::debug is set; none was found damaged");
}

#[test]
fn a_step_that_leaves_nothing_is_not_in_the_leak_report() {
    let (mut device, _fake) = open(config());
    for _ in 0..5 {
        forward(&mut device, "k", |_| {});
    }
    assert_eq!(device.leak_report().keys, []);
    assert_eq!(device.leak_report().to_string(), "no step left anything behind\n");
}

#[test]
fn what_a_step_leaves_is_named_by_label_and_compared_with_the_step_before() {
    let (mut device, _fake) = open(config());
    let mut logits = Vec::new();
    for step in 0..4 {
        let old = logits.pop();
        forward(&mut device, "decode", |device| {
            if let Some(old) = old {
                device.free(old);
            }
            logits.push(alloc(device, 512, "logits").address);
            alloc(device, KIB, if step < 2 { "kv" } else { "kv\x1b[0m" });
        });
    }
    let report = device.leak_report();
    let key = &report.keys[0];
    assert_eq!((key.key.as_str(), key.live.bytes, key.live.buffers), ("decode", 512 + 4 * KIB, 5));
    assert_eq!((key.last.buffers, key.before.buffers), (2, 2));
    let labels: Vec<_> = key
        .labels
        .iter()
        .map(|row| (row.label.as_str(), row.live.buffers, row.of_last.buffers, row.of_before.buffers))
        .collect();
    // On script a slot keeps the label that it was recorded with, so that the order of labels is the only difference.
    assert_eq!(labels.iter().map(|row| row.1).sum::<u64>(), 5);
    assert!(labels.contains(&("logits", 1, 1, 0)), "{labels:?}");
    assert!(!report.to_string().contains('\x1b'), "{report}");
    assert!(!key.alarm, "four steps are no alarm");
}

#[test]
fn growth_over_many_steps_raises_the_alarm_on_script_too() {
    let (mut device, _fake) = open(config());
    for _ in 0..12 {
        forward(&mut device, "leaky", |device| {
            alloc(device, 512, "cache.py:9:grow");
        });
        forward(&mut device, "clean", |_| {});
    }
    assert!(device.stats().steps_on_script >= 20, "{:?}", device.stats());
    let report = device.leak_report();
    let alarms: Vec<_> = report.alarms().map(|key| (key.key.as_str(), key.live.bytes, key.growing_for)).collect();
    assert_eq!(alarms, [("leaky", 12 * 512, 12)]);
    assert_eq!(report.keys.len(), 1, "a key that leaves nothing is not listed");
    let text = report.to_string();
    assert!(text.starts_with("ALARM 'leaky': 6144 bytes in 12 live; the last step left 512 bytes in 1,"), "{text}");
    assert!(text.contains("  cache.py:9:grow: 6144 bytes in 12; 512 bytes in 1 of the last step,"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
    assert_eq!(json["keys"][0]["labels"][0]["live"]["bytes"], 6144);
}

#[test]
fn what_is_freed_later_is_no_longer_left() {
    let (mut device, _fake) = open(config());
    let mut kept = Vec::new();
    for _ in 0..12 {
        forward(&mut device, "chat", |device| kept.push(alloc(device, 512, "kv").address));
    }
    kept.drain(..).for_each(|address| device.free(address));
    let report = device.leak_report();
    assert_eq!((report.keys[0].live.bytes, report.keys[0].labels.len()), (0, 0));
    forward(&mut device, "chat", |_| {});
    assert_eq!(device.leak_report().alarms().count(), 0);
}

#[test]
fn the_live_map_shows_a_step_on_script() {
    let (mut device, _fake) = open(config());
    forward(&mut device, "k", |_| {});
    forward(&mut device, "k", |device| {
        let map = device.live_map();
        let shown: Vec<_> =
            map.buffers.iter().map(|buffer| (buffer.label.as_str(), buffer.bytes, buffer.state, buffer.step)).collect();
        let planned = LiveState::Planned;
        assert_eq!(shown.len(), 2);
        assert!(shown.contains(&("net.py:1:a", 4 * KIB, planned, 2)), "{shown:?}");
        assert!(shown.contains(&("net.py:2:b", 2 * KIB, planned, 2)), "{shown:?}");
        assert_eq!(map.open.as_deref(), Some("k"));
    });
    assert_eq!((device.stats().steps_on_script, device.live_map().buffers.len()), (1, 0));
}

#[test]
fn markup_in_labels_keys_and_names_is_inert_in_both_pages() {
    let (mut device, _fake) = open(config());
    let evil = "</script><img src=x onerror=alert(1)>";
    for _ in 0..2 {
        device.begin_step(evil.as_bytes(), MAIN).unwrap();
        let span = alloc(&mut device, KIB, evil);
        let page = device.live_map_html().unwrap();
        assert!(page.starts_with("<!doctype html>") || page.starts_with("<!DOCTYPE html>"), "{}", &page[..40]);
        assert!(page.contains("onerror") && !page.contains("<img"));
        device.free(span.address);
        device.end_step().unwrap();
    }
    let page = device.plan_html(evil.as_bytes()).unwrap().unwrap();
    assert!(page.contains("onerror") && !page.contains("<img"));
    assert_eq!(device.plan_html(b"unknown").unwrap(), None);
}

#[test]
fn the_plan_of_a_key_is_the_one_that_is_replayed() {
    let (mut device, _fake) = open(config());
    let mut offsets = Vec::new();
    for _ in 0..2 {
        device.begin_step(b"k", MAIN).unwrap();
        let spans = [KIB, 3 * KIB].map(|size| device.alloc(bytes(size), MAIN, "a").unwrap());
        let side = device.alloc(bytes(2 * KIB), SIDE, "b").unwrap();
        offsets = spans.iter().chain([&side]).map(|span| span.address - device.reservation().address).collect();
        offsets.iter().for_each(|offset| device.free(device.reservation().address + offset));
        device.end_step().unwrap();
    }
    assert_eq!(device.stats().steps_on_script, 1);
    let plan = device.plan_of(b"k").unwrap().unwrap();
    let planned: Vec<u64> = plan.slots().iter().map(|slot| plan.offset(slot).get()).collect();
    assert_eq!((planned, plan.makespan()), (offsets, device.arena_bytes()));
    assert_eq!((plan.name(), plan.lanes().len(), plan.proof().optimal), ("k", 2, true));
    let again = terrace_planner::Plan::decode("k", &plan.encode().unwrap()).unwrap();
    assert_eq!(again, plan);
}

#[test]
fn the_snapshot_reads_back_as_what_lives() {
    let (mut device, fake) = open(config());
    let weights = alloc(&mut device, 5000, "load.py:3:weights");
    device.begin_pool((4, 2), &[SIDE]);
    device.alloc(bytes(3 * KIB), SIDE, "graph").unwrap();
    device.end_pool((4, 2)).unwrap();
    forward(&mut device, "k", |device| {
        alloc(device, 700, "out");
    });
    device.record_stream(weights.address, SIDE);
    fake.launch(SIDE, "copy", &[]);
    device.free(weights.address);
    let mut file = Vec::new();
    device.live_snapshot(&mut file).unwrap();
    let profile = import::read(file.as_slice(), "live", &import::Options::default()).unwrap().remove(0);
    let lives = profile.lives().unwrap();
    let mut sizes: Vec<_> = lives
        .iter()
        .map(|life| (life.bytes.get(), profile.labels[life.label.0 as usize].clone(), life.freed))
        .collect();
    sizes.sort();
    assert_eq!(sizes.len(), 3, "{sizes:?}");
    assert_eq!((sizes[0].0, sizes[1].0, sizes[2].0), (700, 3 * KIB, 5000));
    assert!(sizes[2].1.contains("weights"), "{sizes:?}");
    let texts = String::from_utf8_lossy(&file);
    for text in ["active_pending_free", "active_allocated", "inactive", "free_requested", "segment_pool_id"] {
        assert!(texts.contains(text), "{text}");
    }
    let json: serde_json::Value = serde_json::from_str(&device.live_map().to_json()).unwrap();
    assert_eq!(json["buffers"].as_array().unwrap().len(), 3);
    assert_eq!(json["pools"][0][0], serde_json::json!([4, 2]));
}

#[test]
fn an_allocator_gives_the_same_reports() {
    let allocator = Allocator::new(Box::new(FakeDevice::new(bytes(1 << 30))), config()).unwrap();
    for _ in 0..3 {
        let _step = allocator.step(b"k", MAIN).unwrap();
        let span = allocator.alloc(bytes(KIB), MAIN, "a").unwrap();
        allocator.free(span.address);
    }
    let stats = allocator.stats();
    assert_eq!((stats.steps, stats.steps_on_script, stats.events(), stats.allocs), (3, 2, 6, 3));
    assert_eq!((stats.arena, stats.lower_bound, stats.waste()), (KIB, KIB, 0));
    let text = stats.to_prometheus(&[("device", "0")]);
    assert!(text.contains("\nterrace_events_total{device=\"0\"} 6\n"), "{text}");
    assert_eq!(allocator.boot_summary().bytes("arena"), Some(KIB));
    assert!(allocator.live_map().buffers.is_empty() && allocator.leak_report().keys.is_empty());
}
