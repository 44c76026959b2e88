//! Replays a recorded run against the allocator on the host and prints what the plans served.
//!
//! `cargo run --release --example replay -- FILE [--json]`
//!
//! FILE is anything that `plan import` reads: the steps of it become steps of the allocator. No byte is touched; each span
//! that is handed out is held against all that live, by an oracle that knows nothing of the allocator.

use std::collections::BTreeMap;
use std::process::ExitCode;

use serde::Serialize;
use terrace_allocator::host::HostBacking;
use terrace_allocator::{Config, Counts, Device, Stream};
use terrace_profiles::units::{Align, Bytes, DeviceSpan};
use terrace_profiles::{Action, Life, Profile, import};

/// What one file gave.
#[derive(Serialize)]
struct Figures {
    name: String,
    steps: u64,
    allocs: u64,
    replay_allocs: u64,
    hits: u64,
    replay_allocs_warm: u64,
    hits_warm: u64,
    divergences: Counts,
    overflow_peak: u64,
    arena_bytes: u64,
    lower_bound: u64,
    peak_planned: u64,
    peak_persistent: u64,
    overlaps: u64,
}

fn main() -> ExitCode {
    let (flags, files): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|arg| arg.starts_with("--"));
    if files.is_empty() || flags.iter().any(|flag| flag != "--json") {
        eprintln!("use: replay FILE... [--json]");
        return ExitCode::from(2);
    }
    for file in &files {
        let figures = match import::read_file(file.as_ref(), &import::Options::default()) {
            Ok(profiles) => profiles.iter().map(replay).collect::<Result<Vec<_>, _>>(),
            Err(error) => Err(error.to_string()),
        };
        match figures {
            Ok(figures) => figures.iter().for_each(|figures| print(figures, !flags.is_empty())),
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::from(2);
            }
        }
    }
    ExitCode::SUCCESS
}

fn replay(profile: &Profile) -> Result<Figures, String> {
    let lives = profile.lives().map_err(|error| error.to_string())?;
    let in_step = allocated_and_freed_in_one_step(profile, &lives);
    // Twice the whole peak: room for the plans and for everything outside them.
    let peak = Load::of(profile, &lives, |_| true);
    let budget = Bytes::new(2 * peak + (64 << 20)).ok_or("the run is too large")?;
    let mut device =
        Device::new(Box::new(HostBacking::new()), Config::new(budget)).map_err(|error| error.to_string())?;
    let mut oracle = Oracle::default();
    let mut address = vec![0; lives.len()];
    for event in &profile.events {
        match &event.action {
            Action::StepBegin { key } => device.begin_step(key.as_bytes(), Stream(0)),
            Action::StepEnd => device.end_step(),
            Action::Alloc { id, bytes, label, lane, .. } => {
                let label = &profile.labels[label.0 as usize];
                let span = device.alloc(*bytes, Stream(u64::from(lane.0)), label).map_err(|error| error.to_string())?;
                oracle.alloc(span);
                address[id.0 as usize] = span.address;
                Ok(())
            }
            Action::Free { id } => {
                oracle.free(address[id.0 as usize]);
                device.free(address[id.0 as usize]);
                Ok(())
            }
            Action::FreeRequested { .. } | Action::Keep { .. } | Action::Op { .. } | Action::Wait { .. } => Ok(()),
        }
        .map_err(|error| error.to_string())?;
    }
    let stats = device.stats();
    Ok(Figures {
        name: profile.name.clone(),
        steps: stats.steps,
        allocs: lives.len() as u64,
        replay_allocs: stats.replay_allocs,
        hits: stats.hits,
        replay_allocs_warm: stats.replay_allocs_warm,
        hits_warm: stats.hits_warm,
        divergences: stats.divergences,
        overflow_peak: stats.overflow_peak,
        arena_bytes: device.arena_bytes().get(),
        lower_bound: stats.lower_bound,
        peak_planned: Load::of(profile, &lives, |id| in_step[id]),
        peak_persistent: Load::of(profile, &lives, |id| !in_step[id]),
        overlaps: oracle.overlaps,
    })
}

/// For each buffer whether it lived inside one step.
fn allocated_and_freed_in_one_step(profile: &Profile, lives: &[Life]) -> Vec<bool> {
    let mut inside = vec![false; lives.len()];
    let mut born_in = vec![usize::MAX; lives.len()];
    for (number, step) in profile.steps().iter().enumerate() {
        for event in &profile.events[step.events.clone()] {
            match event.action {
                Action::Alloc { id, .. } => born_in[id.0 as usize] = number,
                Action::Free { id } => inside[id.0 as usize] = born_in[id.0 as usize] == number,
                _ => {}
            }
        }
    }
    inside
}

/// The most bytes, rounded as the allocator does, that the chosen buffers have alive at once.
struct Load;

impl Load {
    fn of(profile: &Profile, lives: &[Life], chosen: impl Fn(usize) -> bool) -> u64 {
        let size = |id: usize| lives[id].bytes.align_up(Align::DEFAULT).map_or(0, Bytes::get);
        let (mut load, mut most) = (0, 0);
        for event in &profile.events {
            match event.action {
                Action::Alloc { id, .. } if chosen(id.0 as usize) => load += size(id.0 as usize),
                Action::Free { id } if chosen(id.0 as usize) => load -= size(id.0 as usize),
                _ => {}
            }
            most = most.max(load);
        }
        most
    }
}

/// Counts spans handed out over others that live.
#[derive(Default)]
struct Oracle {
    live: BTreeMap<u64, u64>,
    overlaps: u64,
}

impl Oracle {
    fn alloc(&mut self, span: DeviceSpan) {
        if span.bytes.is_zero() {
            return;
        }
        let end = span.address + span.bytes.get();
        let below = self.live.range(..end).next_back();
        self.overlaps += u64::from(below.is_some_and(|(_, other)| *other > span.address));
        self.live.insert(span.address, end);
    }

    fn free(&mut self, address: u64) {
        self.live.remove(&address);
    }
}

fn print(figures: &Figures, json: bool) {
    if json {
        println!("{}", serde_json::to_string(figures).expect("figures are plain numbers"));
        return;
    }
    let share = |part: u64, all: u64| if all == 0 { 1.0 } else { part as f64 / all as f64 };
    println!("{}", figures.name);
    println!("  steps {}, allocs {}", figures.steps, figures.allocs);
    println!(
        "  in plan {} of {} ({:.4}); of keys seen twice before {} of {} ({:.4})",
        figures.hits,
        figures.replay_allocs,
        share(figures.hits, figures.replay_allocs),
        figures.hits_warm,
        figures.replay_allocs_warm,
        share(figures.hits_warm, figures.replay_allocs_warm),
    );
    for (name, count) in figures.divergences.each().iter().filter(|(_, count)| *count > 0) {
        println!("  {name} {count}");
    }
    println!("  arena {} bytes, lower bound {}", figures.arena_bytes, figures.lower_bound);
    println!("  overflow peak {} bytes", figures.overflow_peak);
    println!("  peak of plan-managed buffers {}, of persistent {}", figures.peak_planned, figures.peak_persistent);
    println!("  overlaps {}", figures.overlaps);
}
