//! Where the bytes of the reservation are, and which features are active: for the log at boot, and whenever someone asks
//! where the memory went.
//!
//! ```text
//!   0 ......... arena ................................... reservation
//!   |  plans    |  outside  |  outlived  | pinned | pending |  free  |
//! ```
//!
//! The arena is the range that the largest usable plan needs, less what lives in it on other business. Each byte is in one
//! row, so the rows add up to the reservation; they are counted from the allocator's own tables and not made to fit.

use std::fmt;

use serde::Serialize;
use terrace_profiles::units::Bytes;

use super::{count, quoted};
use crate::device::{BlockState, Device};

/// Where the bytes are and what is active. Prints as a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BootSummary {
    /// What the memory belongs to.
    pub device: String,
    /// Where the reservation begins.
    pub address: u64,
    /// Its bytes: the sum of all rows.
    pub reservation: u64,
    /// Every request is rounded up to it.
    pub align: u64,
    /// The reservation by use.
    pub memory: Vec<MemoryRow>,
    /// What the allocator can do, and whether it does.
    pub features: Vec<Feature>,
}

/// A part of the reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryRow {
    /// Whose it is.
    pub name: &'static str,
    /// How much.
    pub bytes: u64,
    /// What is in it.
    pub what: String,
}

/// Something that is active or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// Whether it is.
    pub active: bool,
    /// Why, or why not.
    pub why: String,
}

impl Device {
    /// Where the bytes of the reservation are, and which features are active and why.
    pub fn boot_summary(&self) -> BootSummary {
        BootSummary {
            device: self.backing.name(),
            address: self.span.address,
            reservation: self.space.total(),
            align: self.config.align.get(),
            memory: self.memory_rows(),
            features: vec![
                self.replay(),
                self.redzones(),
                sharing(),
                self.searching(),
                self.loaded_plans(),
                self.cuda(),
                self.graph_pools(),
            ],
        }
    }

    fn memory_rows(&self) -> Vec<MemoryRow> {
        let plans = self.usable_plans();
        let largest = plans.iter().map(|(makespan, _)| *makespan).max().unwrap_or(0);
        let arena = largest.max(self.claimed);
        let (mut outside, mut outlived, mut pinned, mut pending) = <[Uses; 4]>::default().into();
        let mut inside = 0;
        for (&offset, block) in &self.live {
            let uses = match block.state {
                // The plan's own; on script it would not even be listed.
                BlockState::Slot(_) if self.open.is_some() && block.step == self.steps => continue,
                BlockState::Slot(_) => &mut outlived,
                BlockState::Outside { .. } => &mut outside,
                BlockState::Pending(_) => &mut pending,
                BlockState::Pinned(_) => &mut pinned,
            };
            uses.blocks += 1;
            uses.bytes += block.size;
            inside += (offset + block.size).min(arena).saturating_sub(offset);
        }
        let planned = match plans.iter().max() {
            None if arena == 0 => "no plan yet".to_owned(),
            None => "the open step's plan".to_owned(),
            Some((_, key)) => format!("the largest of {}: {}", count(plans.len(), "plan"), quoted(key)),
        };
        let row = |name, bytes, what| MemoryRow { name, bytes, what };
        vec![
            row("arena", arena - inside, planned),
            row("outside", outside.bytes, format!("{} outside plans", count(outside.blocks, "buffer"))),
            row("outlived", outlived.bytes, format!("{} beyond the end of their step", count(outlived.blocks, "slot"))),
            row("pinned", pinned.bytes, count(self.pools.len(), "graph pool")),
            row("pending", pending.bytes, format!("{} that wait for events", count(pending.blocks, "buffer"))),
            row(
                "free",
                self.space.free() - self.space.free_below(arena),
                format!("the largest piece {}, the arena's included", self.space.largest()),
            ),
        ]
    }

    /// Bytes and key of each plan that the reservation can hold.
    fn usable_plans(&self) -> Vec<(u64, &[u8])> {
        let plan = |(key, state): (_, &crate::key::KeyState)| {
            let makespan = state.script.as_ref().filter(|_| !state.given_up)?.makespan;
            (makespan <= self.space.total()).then_some((makespan, key))
        };
        self.keys.iter().map(|(key, state)| (key.as_ref(), state)).filter_map(plan).collect()
    }

    fn replay(&self) -> Feature {
        let (known, usable) = (self.keys.iter().count(), self.usable_plans().len());
        let given_up = self.keys.iter().filter(|(_, state)| state.given_up).count();
        let planned = self.keys.iter().filter(|(_, state)| state.script.is_some()).count();
        let why = match (known, usable) {
            (0, _) => "no step has begun, and no plan was loaded".to_owned(),
            (_, 0) if given_up == known => format!("{} differed too often and were given up", count(known, "key")),
            (_, 0) if planned > 0 => "no plan fits the reservation".to_owned(),
            (_, 0) => "no step has ended yet".to_owned(),
            _ if self.config.debug => format!("{usable} of {} planned; debug checks each call", count(known, "key")),
            _ => format!("{usable} of {} planned, {given_up} given up", count(known, "key")),
        };
        Feature { name: "replay", active: usable > 0, why }
    }

    fn redzones(&self) -> Feature {
        let why = match (self.config.debug, self.stats.redzones_damaged) {
            (false, _) => "Config::debug is not set".to_owned(),
            (true, 0) => "Config::debug is set; none was found damaged".to_owned(),
            (true, damaged) => format!("Config::debug is set; {damaged} were found damaged"),
        };
        Feature { name: "debug redzones", active: self.config.debug, why }
    }

    fn searching(&self) -> Feature {
        let searches = self.keys.iter().filter(|(_, state)| state.better.is_some()).count();
        let scripts = || self.keys.iter().filter_map(|(_, state)| state.script.as_ref());
        let open = scripts().filter(|script| !script.optimal).count();
        let why = match (searches, scripts().count(), open) {
            (0, ..) if !self.config.improve => "Config::improve is not set".to_owned(),
            (0, 0, _) => "there is no plan to improve".to_owned(),
            (0, _, 0) => "every plan is proven optimal".to_owned(),
            (0, _, open) => format!("{} not proven optimal, and searched already or loaded", count(open, "plan")),
            (searches, ..) => format!("better plans are searched for {}", count(searches, "key")),
        };
        Feature { name: "background planning", active: searches > 0, why }
    }

    fn loaded_plans(&self) -> Feature {
        let (active, why) = match &self.last_load {
            None => (false, "nothing was loaded".to_owned()),
            Some(Ok(loaded)) => (loaded.keys > 0, loaded.to_string()),
            Some(Err(refusal)) => (false, refusal.clone()),
        };
        Feature { name: "loaded plans", active, why }
    }

    fn cuda(&self) -> Feature {
        let name = self.backing.name();
        let (active, why) = match name.as_str() {
            _ if !cfg!(feature = "cuda") => (false, "built without the feature 'cuda'".to_owned()),
            "host" => (false, "the reservation is memory of this process".to_owned()),
            "fake" => (false, "the device is one for tests".to_owned()),
            _ => (true, format!("the reservation is memory of {name}")),
        };
        Feature { name: "CUDA backing", active, why }
    }

    fn graph_pools(&self) -> Feature {
        let capturing = self.pools.values().filter(|pool| pool.capturing.is_some()).count();
        let why = match self.pools.len() {
            0 => "no graph was captured".to_owned(),
            pools => format!("{}, {capturing} being captured", count(pools, "pool")),
        };
        Feature { name: "graph pools", active: !self.pools.is_empty(), why }
    }
}

fn sharing() -> Feature {
    let why = "streams never share planned bytes: each has a part of the arena of its own".to_owned();
    Feature { name: "cross-lane sharing", active: false, why }
}

#[derive(Clone, Copy, Default)]
struct Uses {
    blocks: usize,
    bytes: u64,
}

impl BootSummary {
    /// One JSON object.
    pub fn to_json(&self) -> String {
        super::json(self)
    }

    /// The bytes of the row with that name.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        self.memory.iter().find(|row| row.name == name).map(|row| row.bytes)
    }
}

impl fmt::Display for BootSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes| Bytes::new(bytes).map_or_else(|| bytes.to_string(), |bytes| bytes.to_string());
        let Self { address, align, reservation, .. } = self;
        let (device, size_of_all) = (self.device.escape_debug(), size(*reservation));
        writeln!(f, "{device}: {size_of_all} reserved at {address:#x}, aligned to {align}")?;
        let width = reservation.to_string().len();
        let total: u64 = self.memory.iter().map(|row| row.bytes).sum();
        let all = MemoryRow { name: "total", bytes: total, what: String::new() };
        for row in self.memory.iter().chain([&all]) {
            let share = row.bytes as f64 / (*reservation).max(1) as f64 * 100.0;
            let line = format!("  {:<9} {:>width$} {share:>5.1}%  {}", row.name, row.bytes, row.what);
            writeln!(f, "{}", line.trim_end())?;
        }
        for Feature { name, active, why } in &self.features {
            writeln!(f, "  {name:<20}  {:<8}  {}", if *active { "active" } else { "inactive" }, why.escape_debug())?;
        }
        Ok(())
    }
}
