//! The decode step on the host: token by token, straight on the state as it lies in the pool, `[V, K]`.

use std::ops::Range;
use std::sync::Mutex;

use rayon::prelude::*;
use terrace_profiles::shape::HEAD_DIM;

use super::isa::{Isa, Kernel};
use super::norm::normalise;
use super::real::Real;
use crate::args::CheckedDecode;
use crate::view::{Part, STATE, Tensor};

const DIM: usize = HEAD_DIM as usize;
/// Sums of a dot product that run beside each other.
const LANES: usize = 16;

/// One sequence and some of its heads.
struct Task<'a> {
    tokens: Range<u64>,
    slot: u64,
    heads: Range<u64>,
    o: Part<'a>,
    pool: Part<'a>,
}

pub(crate) fn run(args: CheckedDecode<'_>, threads: u32) {
    let cu = args.cu_seqlens.values().unwrap_or_default();
    let slots = args.slots.values().unwrap_or_default();
    let tokens = |sequence: usize| i64::from(cu[sequence]).cast_unsigned()..i64::from(cu[sequence + 1]).cast_unsigned();
    // Padding has no slot.
    let live: Vec<(Range<u64>, u64)> = slots
        .iter()
        .enumerate()
        .filter_map(|(sequence, slot)| Some((tokens(sequence), u64::try_from(*slot).ok()?)))
        .filter(|(tokens, _)| !tokens.is_empty())
        .collect();
    let heads: Vec<Range<u64>> = (0..u64::from(args.shape.value_heads())).map(|head| head..head + 1).collect();
    let token_ranges: Vec<_> = live.iter().map(|(tokens, _)| tokens.clone()).collect();
    let slot_ranges: Vec<_> = live.iter().map(|(_, slot)| *slot..slot + 1).collect();
    let (mut o, mut pool) = (args.o, args.pool);
    let parts = o.split(&token_ranges, &heads).into_iter().zip(pool.split(&slot_ranges, &heads));
    let places = live.iter().flat_map(|live| heads.iter().map(move |heads| (live, heads)));
    let tasks: Vec<Task<'_>> = places
        .zip(parts)
        .map(|(((tokens, slot), heads), (o, pool))| Task {
            tokens: tokens.clone(),
            slot: *slot,
            heads: heads.clone(),
            o,
            pool,
        })
        .collect();
    let inputs = Inputs {
        tensors: [args.q, args.k, args.v, args.g, args.beta],
        group: u64::from(args.shape.group()),
        scale: args.scale,
        l2norm: args.l2norm,
    };
    let queue = Mutex::new(tasks.into_iter());
    (0..threads).into_par_iter().for_each(|_| {
        let mut state = vec![0.0; STATE as usize];
        while let Some(task) = super::next(&queue) {
            Isa::best().run(Run { inputs: &inputs, task, state: &mut state });
        }
    });
}

struct Inputs<'a> {
    tensors: [Tensor<'a>; 5],
    group: u64,
    scale: f32,
    l2norm: bool,
}

struct Run<'a, 'b> {
    inputs: &'b Inputs<'b>,
    task: Task<'a>,
    state: &'b mut [f32],
}

impl Kernel for Run<'_, '_> {
    #[inline(always)]
    fn run<const FMA: bool, const MR: usize, const NR: usize>(self) {
        let Self { inputs, mut task, state } = self;
        let [q, k, v, g, beta] = &inputs.tensors;
        for head in task.heads.clone() {
            task.pool.load(task.slot, head, state);
            for token in task.tokens.clone() {
                let [mut query, mut key, mut value, mut out] = [[0.0; DIM]; 4];
                q.load(token, head / inputs.group, &mut query);
                k.load(token, head / inputs.group, &mut key);
                v.load(token, head, &mut value);
                if inputs.l2norm {
                    normalise(&mut query, q.dtype());
                    normalise(&mut key, q.dtype());
                }
                let gate = g.gate(token, head);
                let decay = Real::exp::<FMA>(if gate < super::LEAST_GATE { super::LEAST_GATE } else { gate });
                let beta = beta.gate(token, head);
                for ((row, value), out) in state.chunks_exact_mut(DIM).zip(&value).zip(&mut out) {
                    row.iter_mut().for_each(|s| *s *= decay);
                    let error = beta * (value - dot::<FMA>(row, &key));
                    for (s, key) in row.iter_mut().zip(&key) {
                        *s = Real::multiply_add::<FMA>(error, *key, *s);
                    }
                    *out = inputs.scale * dot::<FMA>(row, &query);
                }
                task.o.store(token, head, &out);
            }
            task.pool.store(task.slot, head, state);
        }
    }
}

#[inline(always)]
fn dot<const FMA: bool>(a: &[f32], b: &[f32; DIM]) -> f32 {
    let mut sums = [0.0; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for lane in 0..LANES {
            sums[lane] = Real::multiply_add::<FMA>(a[lane], b[lane], sums[lane]);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}
