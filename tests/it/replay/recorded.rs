//! Recorded runs of real models, replayed through the allocator: what share of the repeated requests is served in plan, how
//! large the arena is, and that two runs are equal.

use std::path::Path;

use terrace_allocator::host::HostBacking;
use terrace_allocator::{Config, Device, Error, Existing, Identity, Stats, Stream};
use terrace_profiles::units::{Align, Bytes};
use terrace_profiles::{Action, Profile};
use terrace_tests::corpus;

use super::kit::{Oracle, bytes};

const RUNS: [&str; 4] = ["dense8-mixed", "dense8-multiturn", "moe8-mixed", "moe8-multiturn"];

struct Run {
    stats: Stats,
    arena: u64,
    offsets: Vec<u64>,
    damages: usize,
}

#[test]
fn repeated_requests_are_served_in_plan() {
    for name in RUNS {
        let run = replay(name, false);
        let stats = &run.stats;
        let share = |part: u64, all: u64| part as f64 / all as f64;
        assert!(stats.replay_allocs > 4000, "{name}: {}", stats.replay_allocs);
        let (hits, warm) = (share(stats.hits, stats.replay_allocs), share(stats.hits_warm, stats.replay_allocs_warm));
        println!("{name}: hits {hits:.4}, warm {warm:.4}, {} divergences", stats.divergences.total());
        assert!(hits >= 0.99, "{name}: {hits}");
        assert!(warm >= 0.995, "{name}: {warm}");
        assert!(run.arena as f64 <= 1.02 * stats.lower_bound as f64, "{name}: {} of {}", run.arena, stats.lower_bound);
        if name.ends_with("multiturn") {
            assert!(stats.divergences.grew > 0, "{name}: a chat's cache grows");
        }
    }
}

#[test]
fn a_recorded_run_gives_the_same_addresses_each_time() {
    for name in ["dense8-multiturn", "moe8-multiturn"] {
        let (first, second) = (replay(name, false), replay(name, false));
        assert!(first.offsets == second.offsets, "{name}");
        let timeless = |stats: &Stats| Stats { plan_ns: 0, ..stats.clone() };
        assert_eq!(timeless(&first.stats), timeless(&second.stats));
    }
}

/// Redzones are real memory here, so a page of each buffer is touched: the smallest run is enough.
#[test]
fn debug_mode_raises_no_alarm_on_a_recorded_run() {
    let run = replay("moe8-multiturn", true);
    assert_eq!((run.damages, run.stats.redzones_damaged), (0, 0));
    assert!(run.stats.hits as f64 >= 0.95 * run.stats.replay_allocs as f64);
}

/// What a warm run reaches is what a start with its plans needs, and much less is too little.
#[test]
fn a_start_with_plans_fits_what_the_run_before_says_it_needs() {
    for name in RUNS {
        let profile = read(name);
        let mut warm = device(2 * peak(&profile) + (64 << 20), false);
        pass(&mut warm, &profile).unwrap();
        let recording = warm.suggested_budget().get();
        let outside = warm.stats().outside_peak;
        warm.reset_peak();
        pass(&mut warm, &profile).unwrap();
        let (budget, live) = (warm.suggested_budget().get(), warm.usage().peak.bytes);
        println!("{name}: {budget} for {live} alive, {recording} with the recording");
        assert!((live..recording).contains(&budget), "{name}: {budget} for {live} alive, {recording} recording");
        let settled = warm.stats().outside_peak;
        assert!(settled <= outside, "{name}: {settled} outside of plans once settled, {outside} with the recording");
        assert!(warm.arena_bytes().get() + settled <= budget, "{name}: {settled} outside of plans");
        let plans = warm.save(&Identity::default()).unwrap();
        let start = |budget| {
            let mut device = device(budget, false);
            device.load("plans", &plans, &Identity::default(), Existing::Keep).unwrap();
            pass(&mut device, &profile)
        };
        start(budget + budget / 50).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(matches!(start(live * 9 / 10), Err(Error::OutOfMemory(_))), "{name}: in less than what lives");
    }
}

/// Replays one file; each span is held against all that live. With `debug`, sizes are 1/1024, since all of it is written.
fn replay(name: &str, debug: bool) -> Run {
    let mut profile = read(name);
    if debug {
        scale(&mut profile);
    }
    // Twice the whole peak: room for the plans and for everything outside them.
    let mut device = device(2 * peak(&profile) + (64 << 20), debug);
    let offsets = pass(&mut device, &profile).unwrap();
    assert_eq!(device.backing().reservations(), 1, "{name}: one driver allocation, however long the run");
    let sums = device.accounting();
    assert_eq!(sums.free + sums.outside, sums.reservation);
    let damages = device.take_damages().len();
    Run { stats: device.stats().clone(), arena: device.arena_bytes().get(), offsets, damages }
}

fn read(name: &str) -> Profile {
    let path = corpus::root().join("profiles/recorded").join(name).with_extension("profile");
    corpus::read(Path::new(&path))
}

fn device(budget: u64, debug: bool) -> Device {
    let config = Config { debug, ..Config::new(bytes(budget)) };
    Device::new(Box::new(HostBacking::new()), config).unwrap()
}

/// All events of a file once, and the offset of each request.
fn pass(device: &mut Device, profile: &Profile) -> Result<Vec<u64>, Error> {
    let base = device.reservation().address;
    let mut oracle = Oracle::default();
    let mut addresses = vec![0; profile.lives().unwrap().len()];
    let mut offsets = Vec::new();
    for event in &profile.events {
        match &event.action {
            Action::StepBegin { key } => device.begin_step(key.as_bytes(), Stream(0))?,
            Action::StepEnd => device.end_step()?,
            Action::Alloc { id, bytes, label, lane, .. } => {
                let label = &profile.labels[label.0 as usize];
                let span = device.alloc(*bytes, Stream(u64::from(lane.0)), label)?;
                oracle.alloc(span);
                addresses[id.0 as usize] = span.address;
                offsets.push(span.address - base);
            }
            Action::Free { id } => {
                oracle.free(addresses[id.0 as usize]);
                device.free(addresses[id.0 as usize]);
            }
            _ => {}
        }
    }
    Ok(offsets)
}

fn scale(profile: &mut Profile) {
    for event in &mut profile.events {
        if let Action::Alloc { bytes: size, .. } = &mut event.action {
            *size = bytes(size.get().div_ceil(1024));
        }
    }
}

/// The most that lives at once, each rounded up and with the room that redzones take.
fn peak(profile: &Profile) -> u64 {
    let mut sizes = Vec::new();
    let (mut load, mut most) = (0, 0);
    for event in &profile.events {
        match event.action {
            Action::Alloc { id, bytes: size, .. } => {
                let index = id.0 as usize;
                sizes.resize(sizes.len().max(index + 1), 0);
                sizes[index] = size.align_up(Align::DEFAULT).map_or(0, Bytes::get) + 1024;
                load += sizes[index];
            }
            Action::Free { id } => load -= sizes[id.0 as usize],
            _ => {}
        }
        most = most.max(load);
    }
    most
}
