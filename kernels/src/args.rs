//! What a call is given, and the one place where it is checked: everything, before anything is written.
//!
//! The checks go from the shapes inward: heads and tokens, then element types, strides and lengths of each view, then the
//! sequences, the slots, and last whether something that is written lies over something else.

mod check;

use terrace_profiles::shape::{CHUNK, Design, Gdn, Window};
use terrace_profiles::units::Bytes;

use crate::error::Error;
use crate::metadata::{Bounds, Sequences, expect_length};
use crate::view::{Indices, Pool, PoolMut, Tensor, TensorMut, Workspace};
use crate::window::{Ends, Windows};
use check::{
    STATE_TYPES, check_overlap, check_place, check_pool, check_scale, check_slots, check_tensors, check_workspace,
    check_written, checkpoint_rows, grid, heads, most,
};

pub(crate) use check::Target;

/// Most tokens of one sequence in a decode step.
pub const MAX_DECODE: u64 = 8;

/// A prefill: all tokens of all sequences, in chunks.
///
/// With `G` the sum of `g` over a chunk up to a token, and `S` a head's state, token by token it is
/// `S <- exp(g) S; S <- S + beta (v - S k) k^T; o = scale S q`.
#[derive(Debug)]
pub struct Prefill<'a> {
    /// Queries `[tokens, key heads, 128]`: bf16 or fp16, on the CPU also fp32.
    pub q: Tensor<'a>,
    /// Keys `[tokens, key heads, 128]`, of the type of q. Of unit length, or see [`Self::l2norm`].
    pub k: Tensor<'a>,
    /// Values `[tokens, value heads, 128]`, of the type of q.
    pub v: Tensor<'a>,
    /// Natural logarithm of the decay `[tokens, value heads]`, at most 0; fp32 or the type of q. Below -64 it counts as -64.
    pub g: Tensor<'a>,
    /// How much of the error is written, `[tokens, value heads]`, from 0 to 1; fp32 or the type of q.
    pub beta: Tensor<'a>,
    /// Outputs `[tokens, value heads, 128]`, of the type of q.
    pub o: TensorMut<'a>,
    /// Which tokens belong together.
    pub sequences: Sequences<'a>,
    /// Where states come from and go to.
    pub states: States<'a>,
    /// States inside the sequences, to be kept.
    pub checkpoints: Option<Checkpoints<'a>>,
    /// What outputs are multiplied by; 128^-0.5 unless given.
    pub scale: Option<f32>,
    /// Normalise q and k here: `x / sqrt(sum x^2 + 1e-6)`, rounded to their type.
    pub l2norm: bool,
    /// Tokens that are resident at once. It never changes a bit of any result.
    pub window: Window,
    /// How the CUDA kernels share a window's work; the CPU has its own way.
    pub design: Design,
}

/// Where the state of each sequence comes from and goes to.
#[derive(Debug, Default)]
pub enum States<'a> {
    /// Every sequence starts from zeros, and its final state is dropped.
    #[default]
    Dropped,
    /// From one pool into another, which share no memory.
    Separate {
        /// States to start from; zeros where there are none.
        initial: Option<Initial<'a>>,
        /// Where final states go.
        last: Option<Last<'a>>,
    },
    /// From a slot of a pool back into it.
    InPlace {
        /// The pool, fp32 or bf16.
        pool: PoolMut<'a>,
        /// A slot for each sequence; none twice. `None`: slot `n` for sequence `n`.
        slots: Option<&'a [i32]>,
        /// Sequences that start from zeros whatever the slot holds are `false`. `None`: none does.
        has_initial: Option<&'a [bool]>,
    },
}

/// States to start from.
#[derive(Clone, Copy, Debug)]
pub struct Initial<'a> {
    /// The pool, fp32 or bf16.
    pub pool: Pool<'a>,
    /// A slot for each sequence. `None`: slot `n` for sequence `n`.
    pub slots: Option<&'a [i32]>,
    /// Sequences that start from zeros whatever the slot holds are `false`. `None`: none does.
    pub has_initial: Option<&'a [bool]>,
}

/// Where final states go.
#[derive(Debug)]
pub struct Last<'a> {
    /// The pool, fp32 or bf16. Only in fp32 does a prompt cut at a multiple of 64 tokens give the same bits.
    pub pool: PoolMut<'a>,
    /// A slot for each sequence; none twice. `None`: slot `n` for sequence `n`.
    pub slots: Option<&'a [i32]>,
}

/// States to keep on the way, for prefix caches.
#[derive(Debug)]
pub struct Checkpoints<'a> {
    /// A checkpoint after so many chunks of a sequence, and again after as many.
    pub every: u32,
    /// fp32 `[rows, value heads, 128, 128]`: for each sequence, in order, `tokens / (64 every)` rows, rounded down; row `c` is
    /// the state after `(c + 1) 64 every` of its tokens. [`Checkpoints::rows`] counts them.
    pub states: PoolMut<'a>,
}

impl Checkpoints<'_> {
    /// Rows that sequences with these bounds need.
    ///
    /// # Errors
    /// No interval, or bounds that are not those of packed sequences.
    pub fn rows(cu_seqlens: &[i64], every: u32) -> Result<u64, Error> {
        if every == 0 {
            return Err(Error::NoInterval);
        }
        let bounds = Sequences::packed(cu_seqlens).check(i64::MAX as u64)?;
        Ok(checkpoint_rows(&bounds, &Ends { every, ..Ends::default() }))
    }
}

/// A decode step: one to eight tokens of each sequence, its state updated in place.
#[derive(Debug)]
pub struct Decode<'a> {
    /// Queries `[tokens, key heads, 128]`: bf16 or fp16, on the CPU also fp32.
    pub q: Tensor<'a>,
    /// Keys `[tokens, key heads, 128]`, of the type of q.
    pub k: Tensor<'a>,
    /// Values `[tokens, value heads, 128]`, of the type of q.
    pub v: Tensor<'a>,
    /// As in [`Prefill::g`].
    pub g: Tensor<'a>,
    /// As in [`Prefill::beta`].
    pub beta: Tensor<'a>,
    /// Outputs `[tokens, value heads, 128]`, of the type of q.
    pub o: TensorMut<'a>,
    /// Token bounds `[N + 1]`, as in [`Sequences::cu_seqlens`], at most [`MAX_DECODE`] tokens apart. On a device they are read
    /// by the kernel: nobody waits for them, and nobody checks them.
    pub cu_seqlens: Indices<'a>,
    /// The slot of each sequence `[N]`, none twice. -1 is padding: its tokens are skipped.
    pub slots: Indices<'a>,
    /// The states, fp32 or bf16.
    pub pool: PoolMut<'a>,
    /// What outputs are multiplied by; 128^-0.5 unless given.
    pub scale: Option<f32>,
    /// As in [`Prefill::l2norm`].
    pub l2norm: bool,
}

/// A prefill that may run.
#[derive(Debug)]
pub(crate) struct Checked<'a> {
    pub shape: Gdn,
    pub q: Tensor<'a>,
    pub k: Tensor<'a>,
    pub v: Tensor<'a>,
    pub g: Tensor<'a>,
    pub beta: Tensor<'a>,
    pub o: TensorMut<'a>,
    bounds: Bounds<'a>,
    ends: Ends<'a>,
    /// States to start from, where they are not in `last`.
    pub initial: Option<Pool<'a>>,
    /// Where final states go, and in place also where they come from.
    pub last: Option<PoolMut<'a>>,
    pub checkpoints: Option<PoolMut<'a>>,
    pub scale: f32,
    pub l2norm: bool,
    pub window: Window,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub design: Design,
}

impl<'a> Checked<'a> {
    pub fn windows(&self) -> Windows<'a> {
        Windows::new(self.bounds, self.ends, self.window)
    }

    /// The same in as few steps as tables allow, of so many chunks at most.
    #[cfg(feature = "cuda")]
    pub fn stretches(&self, chunks: u32) -> Windows<'a> {
        Windows::of(self.bounds, self.ends, chunks)
    }

    #[cfg(feature = "cuda")]
    pub fn sequences(&self) -> usize {
        self.bounds.len()
    }

    pub fn chunks(&self) -> u64 {
        self.bounds.all_chunks().cast_unsigned()
    }

    /// Chunks from one checkpoint to the next; 0 for none.
    pub fn every(&self) -> u32 {
        self.ends.every
    }

    /// Everything that is written, so that it can be while the rest is read; [`Self::put_written`] puts it back.
    pub fn take_written(&mut self) -> Written<'a> {
        let nothing = TensorMut::new(&mut [0.0_f32; 0][..], [0; 3]);
        (std::mem::replace(&mut self.o, nothing), self.last.take(), self.checkpoints.take())
    }

    pub fn put_written(&mut self, (o, last, checkpoints): Written<'a>) {
        (self.o, self.last, self.checkpoints) = (o, last, checkpoints);
    }

    /// Whether states come from the slots of `last` that they go to.
    pub fn in_place(&self) -> bool {
        self.ends.in_place
    }
}

/// Outputs, final states and checkpoints.
pub(crate) type Written<'a> = (TensorMut<'a>, Option<PoolMut<'a>>, Option<PoolMut<'a>>);

/// A decode step that may run.
#[derive(Debug)]
pub(crate) struct CheckedDecode<'a> {
    pub shape: Gdn,
    pub q: Tensor<'a>,
    pub k: Tensor<'a>,
    pub v: Tensor<'a>,
    pub g: Tensor<'a>,
    pub beta: Tensor<'a>,
    pub o: TensorMut<'a>,
    pub cu_seqlens: Indices<'a>,
    pub slots: Indices<'a>,
    pub pool: PoolMut<'a>,
    pub scale: f32,
    pub l2norm: bool,
}

impl<'a> Prefill<'a> {
    /// The heads, as q and v have them.
    ///
    /// # Errors
    /// Heads that are not served.
    pub fn shape(&self) -> Result<Gdn, Error> {
        heads(&self.q, &self.v)
    }

    /// Checks everything. `needed` is what the workspace must have.
    pub(crate) fn check(
        self,
        target: Target,
        workspace: &Workspace<'_>,
        needed: impl FnOnce(Gdn, Window, Design) -> Bytes,
    ) -> Result<Checked<'a>, Error> {
        let shape = self.shape()?;
        let tensors = [&self.q, &self.k, &self.v, &self.g, &self.beta];
        check_tensors(target, shape, tensors, &self.o)?;
        let scale = check_scale(self.scale)?;
        let bounds = self.sequences.check(self.q.rows())?;
        let (mut ends, initial, last) = match self.states {
            States::Dropped => (Ends::default(), None, None),
            States::Separate { initial, last } => {
                let ends = Ends {
                    from_pool: initial.is_some(),
                    initial: initial.and_then(|initial| initial.slots),
                    has_initial: initial.and_then(|initial| initial.has_initial),
                    into_pool: last.is_some(),
                    last: last.as_ref().and_then(|last| last.slots),
                    ..Ends::default()
                };
                (ends, initial.map(|initial| initial.pool), last.map(|last| last.pool))
            }
            States::InPlace { pool, slots, has_initial } => {
                let (from_pool, into_pool) = (true, true);
                let ends =
                    Ends { from_pool, initial: slots, has_initial, into_pool, last: slots, in_place: true, every: 0 };
                (ends, None, Some(pool))
            }
        };
        let sequences = bounds.len();
        most("sequences", sequences as u64)?;
        most("chunks", self.q.rows() / CHUNK)?;
        if let Some(has) = ends.has_initial {
            expect_length("has_initial", sequences as u64, has.len())?;
        }
        if let Some(pool) = &initial {
            check_pool(target, "initial", shape, &pool.grid, STATE_TYPES)?;
            check_slots("initial slots", ends.initial, ends.has_initial, sequences, pool.rows(), false)?;
        }
        if let Some(pool) = &last {
            let (name, slots) = if ends.in_place { ("pool", "slots") } else { ("last", "last slots") };
            check_pool(target, name, shape, &pool.grid, STATE_TYPES)?;
            check_written(name, &pool.grid)?;
            check_slots(slots, ends.last, None, sequences, pool.rows(), true)?;
        }
        if let Some(Checkpoints { every, states }) = &self.checkpoints {
            if *every == 0 {
                return Err(Error::NoInterval);
            }
            ends.every = *every;
            check_pool(target, "checkpoints", shape, &states.grid, "fp32")?;
            check_written("checkpoints", &states.grid)?;
            let expected = checkpoint_rows(&bounds, &ends);
            most("checkpoints", expected)?;
            if states.rows() < expected {
                return Err(Error::Dimension { name: "checkpoints", what: "rows", expected, given: states.rows() });
            }
        }
        check_workspace(target, workspace, needed(shape, self.window, self.design))?;
        let checkpoints = self.checkpoints.map(|checkpoints| checkpoints.states);
        let last_name = if ends.in_place { "pool" } else { "last" };
        check_overlap(
            &[("o", Some(&self.o.grid)), (last_name, grid(&last)), ("checkpoints", grid(&checkpoints))],
            &[
                ("q", Some(&self.q.grid)),
                ("k", Some(&self.k.grid)),
                ("v", Some(&self.v.grid)),
                ("g", Some(&self.g.grid)),
                ("beta", Some(&self.beta.grid)),
                ("initial", initial.as_ref().map(|pool| &pool.grid)),
            ],
            Some(workspace),
        )?;
        let Self { q, k, v, g, beta, o, l2norm, window, design, .. } = self;
        Ok(Checked {
            shape,
            q,
            k,
            v,
            g,
            beta,
            o,
            bounds,
            ends,
            initial,
            last,
            checkpoints,
            scale,
            l2norm,
            window,
            design,
        })
    }
}

impl<'a> Decode<'a> {
    /// The heads, as q and v have them.
    ///
    /// # Errors
    /// Heads that are not served.
    pub fn shape(&self) -> Result<Gdn, Error> {
        heads(&self.q, &self.v)
    }

    /// Checks everything that is on the host.
    pub(crate) fn check(self, target: Target) -> Result<CheckedDecode<'a>, Error> {
        let shape = self.shape()?;
        check_tensors(target, shape, [&self.q, &self.k, &self.v, &self.g, &self.beta], &self.o)?;
        let scale = check_scale(self.scale)?;
        check_pool(target, "pool", shape, &self.pool.grid, STATE_TYPES)?;
        check_written("pool", &self.pool.grid)?;
        let sequences = self.cu_seqlens.len().checked_sub(1).ok_or(Error::NoBounds)?;
        most("sequences", sequences)?;
        expect_length("slots", sequences, self.slots.len() as usize)?;
        for (name, indices) in [("cu_seqlens", &self.cu_seqlens), ("slots", &self.slots)] {
            check_place(target, name, indices.place())?;
            if indices.address() == 0 && !indices.is_empty() {
                return Err(Error::Null { name });
            }
            if !indices.address().is_multiple_of(4) {
                return Err(Error::Misaligned { name, what: "address", align: 4, given: indices.address() });
            }
        }
        if let Some(cu) = self.cu_seqlens.values() {
            let wide: Vec<i64> = cu.iter().copied().map(i64::from).collect();
            let bounds = Sequences::packed(&wide).check(self.q.rows())?;
            for sequence in 0..bounds.len() {
                let given = bounds.length(sequence).cast_unsigned();
                if given > MAX_DECODE {
                    return Err(Error::DecodeLength { sequence, most: MAX_DECODE, given });
                }
            }
        }
        if let Some(slots) = self.slots.values() {
            let padded: Vec<bool> = slots.iter().map(|slot| *slot != -1).collect();
            check_slots("slots", Some(slots), Some(&padded), slots.len(), self.pool.rows(), true)?;
        }
        check_overlap(
            &[("o", Some(&self.o.grid)), ("pool", Some(&self.pool.grid))],
            &[
                ("q", Some(&self.q.grid)),
                ("k", Some(&self.k.grid)),
                ("v", Some(&self.v.grid)),
                ("g", Some(&self.g.grid)),
                ("beta", Some(&self.beta.grid)),
            ],
            None,
        )?;
        let Self { q, k, v, g, beta, o, cu_seqlens, slots, pool, l2norm, .. } = self;
        Ok(CheckedDecode { shape, q, k, v, g, beta, o, cu_seqlens, slots, pool, scale, l2norm })
    }
}
