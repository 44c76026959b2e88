//! How small an arena can be at best, and what proves it.
//!
//! At every tick the buffers in use need the sum of their bytes; the largest such sum, the maximum load, is a floor under
//! every placement. Lanes share nothing, so their floors add up. A single buffer is a floor too: its size, and its end where
//! its offset is fixed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use terrace_profiles::units::{Bytes, Offset, Tick};

use crate::problem::{Buffer, Problem};

/// A floor under the makespan of every placement of a problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LowerBound {
    /// No placement needs less.
    pub bytes: Bytes,
    /// What proves it: for each lane a tick and the buffers in use there, whose bytes add up to the lane's part.
    pub witness: Vec<Witness>,
    /// The single buffer whose own end is the floor, where that is higher than any load.
    pub buffer: Option<u32>,
}

/// The tick at which a lane needs the most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Witness {
    /// The lane.
    pub lane: u32,
    /// The first tick at which its load is greatest.
    pub tick: Tick,
    /// The load there.
    pub bytes: Bytes,
    /// Indices of the buffers in use there.
    pub buffers: Vec<u32>,
}

/// The best floor known: see the module's page.
pub fn lower_bound(problem: &Problem) -> LowerBound {
    let witness: Vec<Witness> =
        peaks(problem).into_iter().map(|(lane, (load, tick))| at(problem, lane, tick, load)).collect();
    let load: u64 = witness.iter().map(|witness| witness.bytes.get()).sum();
    let own_end = |buffer: &Buffer| buffer.fixed.map_or(0, Offset::get) + buffer.size.get();
    let highest = (0_u32..).zip(&problem.buffers).max_by_key(|(_, buffer)| own_end(buffer));
    let (bytes, buffer) = match highest {
        Some((index, buffer)) if own_end(buffer) > load => (own_end(buffer), Some(index)),
        _ => (load, None),
    };
    LowerBound { bytes: Bytes::new(bytes).expect("validate() bounds every sum"), witness, buffer }
}

/// For each lane its greatest load and the first tick that has it.
fn peaks(problem: &Problem) -> BTreeMap<u32, (u64, Tick)> {
    let mut changes: Vec<(Tick, bool, u32, u64)> = Vec::with_capacity(2 * problem.buffers.len());
    for buffer in &problem.buffers {
        for (life, range) in buffer.in_use() {
            let bytes = range.end - range.start;
            changes.push((life.start, true, buffer.lane, bytes));
            changes.push((life.end, false, buffer.lane, bytes));
        }
    }
    changes.sort_unstable();
    let mut loads: BTreeMap<u32, u64> = BTreeMap::new();
    let mut peaks: BTreeMap<u32, (u64, Tick)> = BTreeMap::new();
    for (tick, born, lane, bytes) in changes {
        let load = loads.entry(lane).or_default();
        if born {
            *load += bytes;
            let peak = peaks.entry(lane).or_insert((0, tick));
            if *load > peak.0 {
                *peak = (*load, tick);
            }
        } else {
            *load -= bytes;
        }
    }
    peaks
}

fn at(problem: &Problem, lane: u32, tick: Tick, load: u64) -> Witness {
    let in_use = |buffer: &Buffer| buffer.in_use().any(|(life, range)| life.contains(tick) && !range.is_empty());
    let here = (0_u32..).zip(&problem.buffers).filter(|(_, buffer)| buffer.lane == lane && in_use(buffer));
    let buffers = here.map(|(index, _)| index).collect();
    Witness { lane, tick, bytes: Bytes::new(load).expect("validate() bounds every sum"), buffers }
}
