//! The lifetime graph: which buffers share one storage, and which lanes are ordered by waits. The only file that names
//! petgraph.
//!
//! ```text
//!   lane 0  --[seg 0]--wait on lane 1--[seg 1]-->      A wait splits the lanes it joins into segments; an edge from the
//!                         ^                            waited-for segment says: what is freed there may be reused here.
//!   lane 1  --[seg 0]-----'--[seg 1]------------->     Within a lane, segments follow each other.
//! ```
//!
//! Interference between buffers is a property of their lifetimes and is drawn ([`dot`]) only for small problems: listing it
//! for large ones would take quadratic memory, and the solvers work on sections instead.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Range;

use petgraph::graph::{DiGraph, NodeIndex, UnGraph};
use petgraph::unionfind::UnionFind;
use petgraph::visit::{Dfs, EdgeRef, VisitMap};
use terrace_profiles::units::{Align, Bytes, Interval, Lifetime, Offset, Tick};
use terrace_profiles::{Action, Life, Profile};

use crate::error::Error;
use crate::options::{FreeRule, LaneRule};
use crate::plan::Plan;
use crate::problem::Problem;

/// Buffers by the storage they share, and what keeps storages apart beside time.
#[derive(Debug)]
pub struct Graph {
    /// One for each set of aliases; most hold one buffer.
    pub storages: Vec<Storage>,
    /// For each buffer of the profile its storage.
    pub storage_of: Vec<u32>,
    /// Pairs of storages on unordered lanes.
    pub apart: Vec<(u32, u32)>,
}

/// Bytes that one or several buffers share.
#[derive(Debug, Default)]
pub struct Storage {
    /// The members, in order of allocation, as indices into the lives.
    pub members: Vec<u32>,
    /// The lane whose arena it belongs to; 0 for all where lanes may share.
    pub lane: u32,
    /// The strictest alignment asked for.
    pub align: Option<Align>,
    /// The offset asked for.
    pub fixed: Option<Offset>,
}

/// Most pairs on unordered lanes, and most comparisons made to find them.
const MOST_APART: usize = 4 << 20;
const MOST_COMPARISONS: usize = 1 << 28;

impl Graph {
    /// The graph of a checked profile.
    pub fn new(profile: &Profile, lives: &[Life], lanes: LaneRule, free: FreeRule) -> Result<Self, Error> {
        let (mut storages, storage_of) = share(lives)?;
        for storage in &mut storages {
            storage.lane = match lanes {
                LaneRule::Separate => lives[storage.members[0] as usize].lane.0,
                LaneRule::Ordered | LaneRule::Shared => 0,
            };
        }
        let apart = match lanes {
            LaneRule::Ordered if profile.lanes.len() > 1 => Order::new(profile).apart(lives, &storages, free)?,
            _ => Vec::new(),
        };
        Ok(Self { storages, storage_of, apart })
    }
}

/// When a life ends under a rule.
pub fn end(life: &Life, free: FreeRule) -> Tick {
    match free {
        FreeRule::Completed => life.death,
        FreeRule::Requested => life.requested,
    }
}

/// Aliases joined into storages, in order of their first allocation.
fn share(lives: &[Life]) -> Result<(Vec<Storage>, Vec<u32>), Error> {
    let mut sets = UnionFind::<u32>::new(lives.len());
    for (index, life) in (0_u32..).zip(lives) {
        if let Some(of) = life.hints.as_ref().and_then(|hints| hints.alias) {
            sets.union(index, of.0);
        }
    }
    let (mut storages, mut storage_of): (Vec<Storage>, Vec<u32>) = (Vec::new(), Vec::with_capacity(lives.len()));
    let mut storage_of_root: HashMap<u32, u32> = HashMap::new();
    for (index, life) in (0_u32..).zip(lives) {
        let storage = *storage_of_root.entry(sets.find_mut(index)).or_insert_with(|| {
            storages.push(Storage::default());
            storages.len() as u32 - 1
        });
        storage_of.push(storage);
        let storage = &mut storages[storage as usize];
        storage.members.push(index);
        let Some(hints) = &life.hints else { continue };
        storage.align = storage.align.max(hints.align);
        match (storage.fixed, hints.fixed) {
            (Some(known), Some(fixed)) if known != fixed => {
                let first =
                    storage.members.iter().copied().find(|m| lives[*m as usize].hints.is_some()).unwrap_or(index);
                return Err(Error::AliasFixedTwice { first, second: index });
            }
            (known, fixed) => storage.fixed = known.or(fixed),
        }
    }
    Ok((storages, storage_of))
}

/// The order that waits put between lanes.
struct Order {
    segments: DiGraph<(), ()>,
    /// For each buffer the segments of its lane in which it was allocated and freed.
    born_in: Vec<NodeIndex>,
    freed_in: Vec<Option<NodeIndex>>,
}

impl Order {
    fn new(profile: &Profile) -> Self {
        let mut segments = DiGraph::new();
        let mut now: Vec<NodeIndex> = profile.lanes.iter().map(|_| segments.add_node(())).collect();
        let (mut born_in, mut freed_in, mut lane_of) = (Vec::new(), Vec::new(), Vec::new());
        for event in &profile.events {
            match event.action {
                Action::Alloc { lane, .. } => {
                    born_in.push(now[lane.0 as usize]);
                    freed_in.push(None);
                    lane_of.push(lane);
                }
                Action::FreeRequested { id } | Action::Free { id } => {
                    let lane = lane_of[id.0 as usize];
                    // The first of the two counts: the free is queued on the lane where the program let go.
                    freed_in[id.0 as usize].get_or_insert(now[lane.0 as usize]);
                }
                Action::Wait { lane, on } => {
                    let (lane, on) = (lane.0 as usize, on.0 as usize);
                    let (waiting, waited) = (segments.add_node(()), segments.add_node(()));
                    segments.add_edge(now[lane], waiting, ());
                    segments.add_edge(now[on], waiting, ());
                    segments.add_edge(now[on], waited, ());
                    now[on] = waited;
                    now[lane] = waiting;
                }
                Action::Keep { .. } | Action::StepBegin { .. } | Action::StepEnd | Action::Op { .. } => {}
            }
        }
        Self { segments, born_in, freed_in }
    }

    /// Pairs of storages whose lifetimes would let them share bytes but whose lanes no wait orders.
    fn apart(&self, lives: &[Life], storages: &[Storage], free: FreeRule) -> Result<Vec<(u32, u32)>, Error> {
        let mut reached: HashMap<NodeIndex, <DiGraph<(), ()> as petgraph::visit::Visitable>::Map> = HashMap::new();
        let mut ordered = |from: NodeIndex, to: NodeIndex| {
            let seen = reached.entry(from).or_insert_with(|| {
                let mut walk = Dfs::new(&self.segments, from);
                while walk.next(&self.segments).is_some() {}
                walk.discovered
            });
            seen.is_visited(&to)
        };
        let (mut apart, mut comparisons) = (Vec::new(), 0);
        for (later, storage) in (0_u32..).zip(storages) {
            for (earlier, other) in (0..later).zip(storages) {
                comparisons += 1;
                if comparisons > MOST_COMPARISONS || apart.len() > MOST_APART {
                    return Err(Error::TooManyPairs { limit: MOST_APART });
                }
                let mut unordered = false;
                for (&a, &b) in other.members.iter().flat_map(|a| storage.members.iter().map(move |b| (a, b))) {
                    let (before, after) = (&lives[a as usize], &lives[b as usize]);
                    let (a, b, before, after) =
                        if before.birth <= after.birth { (a, b, before, after) } else { (b, a, after, before) };
                    if before.lane != after.lane && end(before, free) <= after.birth {
                        unordered |=
                            !self.freed_in[a as usize].is_some_and(|free| ordered(free, self.born_in[b as usize]));
                    }
                }
                if unordered {
                    apart.push((earlier, later));
                }
            }
        }
        Ok(apart)
    }
}

/// What a storage uses when: the hull of what its members use, stretch by stretch; empty if that is all of `size` from
/// birth to death.
pub fn stretches(
    storage: &Storage,
    lives: &[Life],
    free: FreeRule,
    size: Bytes,
) -> (Lifetime, Vec<(Lifetime, Range<u64>)>) {
    let members = storage.members.iter().map(|member| &lives[*member as usize]);
    let birth = members.clone().map(|life| life.birth).min().expect("a storage has members");
    let death = members.clone().map(|life| end(life, free)).max().expect("a storage has members");
    let lifetime = Interval::new(birth, death).expect("lives() refuses empty lives");
    if storage.members.len() == 1 && members.clone().all(|life| life.keeps.is_empty()) {
        return (lifetime, Vec::new());
    }
    let mut borders: Vec<Tick> = members
        .clone()
        .flat_map(|life| [life.birth, end(life, free)].into_iter().chain(life.keeps.iter().map(|(tick, _)| *tick)))
        .filter(|tick| *tick <= death)
        .collect();
    borders.sort_unstable();
    borders.dedup();
    let mut stretches: Vec<(Lifetime, Range<u64>)> = Vec::new();
    for pair in borders.windows(2) {
        let Some(stretch) = Interval::new(pair[0], pair[1]) else { continue };
        let used = members
            .clone()
            .filter(|life| life.birth <= stretch.start && stretch.start < end(life, free))
            .map(|life| in_use_at(life, stretch.start))
            .filter(|range| !range.is_empty())
            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let Some(used) = used else { continue };
        match stretches.last_mut().filter(|(life, range)| life.end == stretch.start && *range == used) {
            Some((life, _)) => life.end = stretch.end,
            None => stretches.push((stretch, used)),
        }
    }
    if stretches.as_slice() == [(lifetime, 0..size.get())] {
        stretches.clear();
    }
    (lifetime, stretches)
}

/// What a buffer uses at a tick of its life.
fn in_use_at(life: &Life, tick: Tick) -> Range<u64> {
    let last = life.keeps.iter().rev().find(|(since, _)| *since <= tick);
    last.map_or(0..life.bytes.get(), |(_, range)| range.clone())
}

/// Most buffers whose interference is drawn; beyond that a drawing shows nothing and its edges are quadratic.
pub const MOST_DRAWN: usize = 2000;

/// The interference graph of a plan in DOT: a node for each storage, an edge where two are ever in use at once or must be
/// kept apart.
pub fn dot(plan: &Plan) -> Result<String, Error> {
    let problem = plan.problem();
    if problem.buffers.len() > MOST_DRAWN {
        return Err(Error::TooLargeToDraw { buffers: problem.buffers.len(), limit: MOST_DRAWN });
    }
    let graph = interference(problem);
    let mut label_of: Vec<&str> = vec![""; problem.buffers.len()];
    for slot in plan.slots().iter().rev() {
        label_of[slot.storage as usize] = plan.label(slot);
    }
    let mut text = format!("graph {} {{\n  node [shape=box];\n", quoted(plan.name()));
    for node in graph.node_indices() {
        let index = graph[node] as usize;
        let (buffer, offset) = (&problem.buffers[index], plan.placement().offsets[index]);
        let (start, end) = (buffer.lifetime.start, buffer.lifetime.end);
        let caption = format!("{index}: {}\n{} B at {offset}\n[{start}, {end})", label_of[index], buffer.size.get());
        let _ = writeln!(text, "  {index} [label={}];", quoted(&caption));
    }
    for edge in graph.edge_references() {
        let _ = writeln!(text, "  {} -- {};", graph[edge.source()], graph[edge.target()]);
    }
    text.push_str("}\n");
    Ok(text)
}

/// Storages as nodes, joined where both are in use at some tick or must be kept apart.
fn interference(problem: &Problem) -> UnGraph<u32, ()> {
    let mut graph = UnGraph::new_undirected();
    let nodes: Vec<NodeIndex> = (0..problem.buffers.len() as u32).map(|index| graph.add_node(index)).collect();
    for (a, first) in problem.buffers.iter().enumerate() {
        for (b, second) in problem.buffers.iter().enumerate().skip(a + 1) {
            let both = first.in_use().any(|(life, _)| second.in_use().any(|(other, _)| life.overlaps(&other)));
            if both || first.lane != second.lane || problem.apart.contains(&(a as u32, b as u32)) {
                graph.add_edge(nodes[a], nodes[b], ());
            }
        }
    }
    graph
}

fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{escaped}\"")
}
