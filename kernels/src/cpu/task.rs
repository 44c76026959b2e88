//! One piece of a window's work: some value heads of one key head, over the chunks of one segment.

use std::ops::Range;

use terrace_profiles::shape::CPU_HEADS_AT_ONCE;

use super::LEAST_GATE;
use super::chunk::{BLOCK, DIM, Keys, Mutant, ROWS, SQUARE, TILE, Values, transpose};
use super::isa::Kernel;
use super::norm::normalise;
use crate::args::Checked;
use crate::view::{Dtype, Part, STATE, Tensor};
use crate::window::{CARRY, Segment};

/// What is read, which all tasks share.
pub(crate) struct Inputs<'a> {
    pub args: &'a Checked<'a>,
    pub mutant: Mutant,
    /// States that the window before left, `[value heads, 128 (K), 128 (V)]`.
    pub carry: &'a [f32],
}

/// What one task writes, and where.
pub(crate) struct Task<'a> {
    pub segment: Segment,
    pub heads: Range<u64>,
    pub o: Part<'a>,
    /// Slots that states come from (in place) and go to.
    pub pool: Option<Part<'a>>,
    pub checkpoints: Option<Part<'a>>,
    /// States for the window after, of these heads alone.
    pub carry: Option<&'a mut [f32]>,
}

/// A task with a thread's scratch.
pub(crate) struct Run<'a, 'b> {
    pub inputs: &'a Inputs<'a>,
    pub task: Task<'a>,
    pub scratch: &'b mut [f32],
}

impl Kernel for Run<'_, '_> {
    #[inline(always)]
    fn run<const FMA: bool, const MR: usize, const NR: usize>(self) {
        let Self { inputs, mut task, scratch } = self;
        let mut scratch = Scratch::new(scratch);
        let args = inputs.args;
        task.start(inputs, &mut scratch);
        let segment = task.segment;
        let key_head = task.heads.start / u64::from(args.shape.group());
        for chunk in 0..segment.chunks() {
            let token = (segment.tok0 + i64::from(chunk) * ROWS as i64).cast_unsigned();
            let tokens = (segment.len as usize - chunk as usize * ROWS).min(ROWS);
            load_rows(&args.q, token, key_head, tokens, scratch.keys.q);
            load_rows(&args.k, token, key_head, tokens, scratch.keys.k);
            if args.l2norm {
                let dtype = args.q.dtype();
                normalise_rows(scratch.keys.q, tokens, dtype);
                normalise_rows(scratch.keys.k, tokens, dtype);
            }
            scratch.keys.multiply::<FMA, MR, NR>(tokens);
            if inputs.mutant == Mutant::StaleCarry && chunk + 1 == segment.chunks() {
                task.hand_on(&scratch);
            }
            for (state, head) in scratch.states.chunks_exact_mut(DIM * TILE).zip(task.heads.clone()) {
                let values = &mut scratch.values;
                load_rows(&args.v, token, head, tokens, values.v);
                load_gates(&args.g, token, head, tokens, values.g);
                load_gates(&args.beta, token, head, tokens, values.beta);
                // Not `max`, which would drop a NaN.
                values.g.iter_mut().for_each(|g| *g = if *g < LEAST_GATE { LEAST_GATE } else { *g });
                values.advance::<FMA, MR, NR>(&scratch.keys, state, args.scale, tokens, inputs.mutant);
                for (row, o) in values.o.chunks_exact(TILE).take(tokens).enumerate() {
                    task.o.store(token + row as u64, head, &o[..DIM]);
                }
            }
            task.checkpoint(args.every(), chunk, tokens, &mut scratch);
        }
        if inputs.mutant != Mutant::StaleCarry {
            task.hand_on(&scratch);
        }
        task.finish(&mut scratch);
    }
}

impl Task<'_> {
    /// Loads the states that the segment starts from.
    fn start(&self, inputs: &Inputs<'_>, scratch: &mut Scratch<'_>) {
        for (state, head) in scratch.states.chunks_exact_mut(DIM * TILE).zip(self.heads.clone()) {
            match u64::try_from(self.segment.initial) {
                Ok(slot) => {
                    match (&inputs.args.initial, &self.pool) {
                        (Some(pool), _) => pool.load(slot, head, scratch.pooled),
                        (None, Some(part)) => part.load(slot, head, scratch.pooled),
                        (None, None) => unreachable!("a slot to start from has a pool"),
                    }
                    transpose(DIM, DIM, scratch.pooled, DIM, state, TILE);
                }
                Err(_) if self.segment.initial == CARRY => {
                    let carry = &inputs.carry[head as usize * DIM * DIM..][..DIM * DIM];
                    for (row, carry) in state.chunks_exact_mut(TILE).zip(carry.chunks_exact(DIM)) {
                        row[..DIM].copy_from_slice(carry);
                    }
                }
                // Zeros by writing them: what the slot holds may be anything.
                Err(_) => state.fill(0.0),
            }
        }
    }

    /// Leaves the states for the window after.
    fn hand_on(&mut self, scratch: &Scratch<'_>) {
        let Some(carry) = &mut self.carry else { return };
        for (state, carry) in scratch.states.chunks_exact(DIM * TILE).zip(carry.chunks_exact_mut(DIM * DIM)) {
            for (row, carry) in state.chunks_exact(TILE).zip(carry.chunks_exact_mut(DIM)) {
                carry.copy_from_slice(&row[..DIM]);
            }
        }
    }

    /// Keeps the states after a chunk, where a checkpoint is due.
    fn checkpoint(&mut self, every: u32, chunk: u32, tokens: usize, scratch: &mut Scratch<'_>) {
        let Some(part) = &mut self.checkpoints else { return };
        let done = self.segment.chunk0.cast_unsigned() + chunk + 1;
        if tokens == ROWS && done.is_multiple_of(every) {
            let row = u64::from(self.segment.checkpoint.cast_unsigned()) + u64::from(done / every) - 1;
            store_states(part, row, self.heads.clone(), scratch);
        }
    }

    /// Leaves the states in the pool, if this is the sequence's end.
    fn finish(&mut self, scratch: &mut Scratch<'_>) {
        if let (Some(part), Ok(slot)) = (&mut self.pool, u64::try_from(self.segment.last)) {
            store_states(part, slot, self.heads.clone(), scratch);
        }
    }
}

fn store_states(part: &mut Part<'_>, row: u64, heads: Range<u64>, scratch: &mut Scratch<'_>) {
    for (state, head) in scratch.states.chunks_exact(DIM * TILE).zip(heads) {
        transpose(DIM, DIM, state, TILE, scratch.pooled, DIM);
        part.store(row, head, scratch.pooled);
    }
}

/// Rows of a chunk, zeros up to a whole block.
fn load_rows(view: &Tensor<'_>, token: u64, head: u64, tokens: usize, into: &mut [f32]) {
    for (row, into) in into.chunks_exact_mut(TILE).take(tokens.next_multiple_of(BLOCK)).enumerate() {
        if row < tokens {
            view.load(token + row as u64, head, &mut into[..DIM]);
        } else {
            into[..DIM].fill(0.0);
        }
    }
}

/// Gates of a chunk, then zeros.
fn load_gates(view: &Tensor<'_>, token: u64, head: u64, tokens: usize, into: &mut [f32]) {
    for (row, into) in into.iter_mut().enumerate() {
        *into = if row < tokens { view.gate(token + row as u64, head) } else { 0.0 };
    }
}

#[inline(always)]
fn normalise_rows(rows: &mut [f32], tokens: usize, dtype: Dtype) {
    for row in rows.chunks_exact_mut(TILE).take(tokens) {
        normalise(&mut row[..DIM], dtype);
    }
}

/// A thread's part of the workspace. Nothing in it is read before it was written.
struct Scratch<'a> {
    keys: Keys<'a, f32>,
    values: Values<'a, f32>,
    /// `[128 (K), 128 (V)]` for each head of the task.
    states: &'a mut [f32],
    /// One state as it lies in a pool, V-first.
    pooled: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    fn new(mut rest: &'a mut [f32]) -> Self {
        let mut take = |size| rest.split_off_mut(..size).expect("shape::gdn_cpu_scratch counted all of this");
        let (tile, square) = (ROWS * TILE, ROWS * SQUARE);
        Self {
            keys: Keys {
                q: take(tile),
                k: take(tile),
                k_transposed: take(DIM * SQUARE),
                kk: take(square),
                qk: take(square),
            },
            values: Values {
                v: take(tile),
                o: take(tile),
                l: take(square),
                p: take(square),
                g: take(ROWS),
                beta: take(ROWS),
                decay: take(ROWS),
                rest: take(ROWS),
            },
            states: take(CPU_HEADS_AT_ONCE as usize * DIM * TILE),
            pooled: take(STATE as usize),
        }
    }
}
