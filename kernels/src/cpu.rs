//! The CPU path: the embedded default where there is no GPU.
//!
//! Window by window, the work is cut into tasks, each some value heads of one key head over the chunks of one segment:
//!
//! ```text
//!              segment 0            segment 1
//! heads 0..3   chunk chunk chunk    chunk        a task: its chunks in order, its states in the thread's scratch
//! heads 3..6   chunk chunk chunk    chunk
//! ```
//!
//! Threads take tasks as they come. How the heads are cut and which thread takes what changes no bit: a task computes each of its
//! numbers in an order of its own. All scratch is the caller's workspace; the heap holds one window's list of tasks.

mod chunk;
mod decode;
mod isa;
mod norm;
mod real;
mod task;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use terrace_profiles::shape::{CPU_HEADS_AT_ONCE, Gdn, gdn_cpu_scratch, gdn_cpu_workspace};

use crate::args::{Checked, Decode, Prefill, Target};
use crate::error::Error;
use crate::path::{Path, Route};
use crate::view::{Part, Workspace};
use crate::window::{CARRY, Segment, Step};
use isa::Isa;
use task::{Inputs, Run, Task};

#[cfg(feature = "mutants")]
#[doc(hidden)]
pub use chunk::Mutant;
#[cfg(not(feature = "mutants"))]
use chunk::Mutant;

/// The decay below which nothing is told apart: `e^-64` is 1.6e-28.
const LEAST_GATE: f32 = -64.0;

/// The processors of this process.
#[derive(Clone, Debug)]
pub struct Cpu {
    threads: u32,
    mutant: Mutant,
}

impl Cpu {
    /// At most so many threads at a time, at least one, of the rayon pool that a call is made in. The workspace grows with
    /// them; the results do not change.
    pub fn new(threads: u32) -> Self {
        Self { threads: threads.max(1), mutant: Mutant::None }
    }

    /// Threads that work at a time, at most.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// The same, but wrong.
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    #[must_use]
    pub fn with_mutant(self, mutant: Mutant) -> Self {
        Self { mutant, ..self }
    }
}

impl Default for Cpu {
    /// As many threads as the rayon pool has.
    fn default() -> Self {
        Self::new(u32::try_from(rayon::current_num_threads()).unwrap_or(u32::MAX))
    }
}

/// Runs each task once in the current pool, in no order: for code beside this path that shares its work out the same way.
pub(crate) fn each_task<T: Send>(tasks: Vec<T>, run: impl Fn(T) + Send + Sync) {
    tasks.into_par_iter().for_each(run);
}

pub(crate) fn prefill(cpu: &Cpu, args: Prefill<'_>, mut workspace: Workspace<'_>) -> Result<Path, Error> {
    let needed = |shape: Gdn, _, _| gdn_cpu_workspace(shape, cpu.threads).total();
    let mut args = args.check(Target::Cpu, &workspace, needed)?;
    let mut path = Path {
        route: Route::CpuPrefill,
        why: "the device is the CPU, which has one path".into(),
        arch: None,
        windows: 0,
        chunks: args.chunks(),
        launches: 0,
        table_bytes: Step::TABLE_BYTES,
    };
    let states = (args.shape.state_bytes().get() / 4) as usize;
    let memory = workspace.floats();
    let lane = (gdn_cpu_scratch().get() / 4) as usize;
    let (scratch, carries) = memory.split_at_mut(lane * cpu.threads as usize);
    let (mut carry_in, carries) = carries.split_at_mut(states);
    let mut carry_out = &mut carries[..states];
    for step in args.windows() {
        window(cpu, &mut args, &step, scratch, carry_in, carry_out);
        std::mem::swap(&mut carry_in, &mut carry_out);
        path.windows += 1;
    }
    Ok(path)
}

pub(crate) fn decode(cpu: &Cpu, args: Decode<'_>) -> Result<Path, Error> {
    let args = args.check(Target::Cpu)?;
    decode::run(args, cpu.threads);
    Ok(Path {
        route: Route::CpuDecode,
        why: "the device is the CPU, which has one path".into(),
        arch: None,
        windows: 0,
        chunks: 0,
        launches: 0,
        table_bytes: 0,
    })
}

/// Works through one window and leaves the open sequence's states in `carry_out`.
fn window(
    cpu: &Cpu,
    args: &mut Checked<'_>,
    step: &Step,
    scratch: &mut [f32],
    carry_in: &[f32],
    carry_out: &mut [f32],
) {
    let segments = step.segments();
    let heads = head_ranges(args.shape, segments.len(), cpu.threads);
    // Taken out while tasks write them, so that they can read everything else.
    let written = args.take_written();
    let (mut o, mut last, mut checkpoints) = written;
    {
        let inputs = Inputs { args, mutant: cpu.mutant, carry: carry_in };
        let tokens: Vec<_> = segments.iter().map(token_range).collect();
        let mut outputs = o.split(&tokens, &heads).into_iter();
        let mut pools = parts(last.as_mut().map(|pool| {
            let slots: Vec<_> = segments.iter().map(|segment| slot_range(segment, args.in_place())).collect();
            pool.split(&slots, &heads)
        }));
        let mut kept = parts(checkpoints.as_mut().map(|pool| {
            let rows: Vec<_> = segments.iter().map(|segment| checkpoint_range(segment, args.every())).collect();
            pool.split(&rows, &heads)
        }));
        let mut carries = carry_out;
        let mut tasks = Vec::with_capacity(segments.len() * heads.len());
        for segment in segments {
            for heads in &heads {
                let carry = (segment.last == CARRY).then(|| {
                    let size = (heads.end - heads.start) as usize * chunk::DIM * chunk::DIM;
                    carries.split_off_mut(..size).expect("one segment is carried, and it has all heads")
                });
                tasks.push(Task {
                    segment: *segment,
                    heads: heads.clone(),
                    o: outputs.next().expect("a part for each segment and range of heads"),
                    pool: pools.next(),
                    checkpoints: kept.next(),
                    carry,
                });
            }
        }
        let queue = Mutex::new(tasks.into_iter());
        let lane = (gdn_cpu_scratch().get() / 4) as usize;
        scratch.par_chunks_exact_mut(lane).for_each(|scratch| {
            while let Some(task) = next(&queue) {
                Isa::best().run(Run { inputs: &inputs, task, scratch: &mut *scratch });
            }
        });
    }
    args.put_written((o, last, checkpoints));
}

fn parts(parts: Option<Vec<Part<'_>>>) -> impl Iterator<Item = Part<'_>> {
    parts.into_iter().flatten()
}

/// The next task. A thread that panicked has taken its own task with it; the panic goes on to the caller.
fn next<T>(queue: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).next()
}

/// The value heads of each task: as many at once as leave work for all threads, since they share the products of their key
/// head, and never of two key heads.
fn head_ranges(shape: Gdn, segments: usize, threads: u32) -> Vec<Range<u64>> {
    let (key_heads, group) = (u64::from(shape.key_heads()), u64::from(shape.group()));
    let tasks = |at_once: u64| segments as u64 * key_heads * group.div_ceil(at_once);
    let at_once = (1..=CPU_HEADS_AT_ONCE).rev().find(|at_once| tasks(*at_once) >= 2 * u64::from(threads)).unwrap_or(1);
    (0..key_heads)
        .flat_map(|key| {
            let end = (key + 1) * group;
            (key * group..end).step_by(at_once as usize).map(move |head| head..end.min(head + at_once))
        })
        .collect()
}

fn token_range(segment: &Segment) -> Range<u64> {
    let start = segment.tok0.cast_unsigned();
    start..start + u64::from(segment.len.cast_unsigned())
}

/// The slot that the segment writes, or in place also reads.
fn slot_range(segment: &Segment, in_place: bool) -> Range<u64> {
    let slot = if in_place { segment.initial.max(segment.last) } else { segment.last };
    u64::try_from(slot).map_or(0..0, |slot| slot..slot + 1)
}

fn checkpoint_range(segment: &Segment, every: u32) -> Range<u64> {
    let rows_before = |chunks: u32| u64::from(chunks / every);
    match u64::try_from(segment.checkpoint) {
        Ok(first) if every > 0 => {
            let start = segment.chunk0.cast_unsigned();
            // A tail of fewer than 64 tokens completes no chunk.
            let whole = segment.len.cast_unsigned() / chunk::ROWS as u32;
            first + rows_before(start)..first + rows_before(start + whole)
        }
        _ => 0..0,
    }
}
