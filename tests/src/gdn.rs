//! Gated DeltaNet as data: a [`Case`] is what a call is given, a [`How`] is everything that must not change the result, and
//! [`run`] is the one way from both to an [`Outcome`], on the host and on a device alike.
//!
//! ```text
//! case, how --upload, guarded--> memory of a machine --prefill--> memory --download, guards checked--> outcome
//! case ------------------------- oracle (fp64, token by token) --------------------------------------> expected
//! ```

pub mod cases;
pub mod machine;
pub mod step;

use half::{bf16, f16};
use rayon::prelude::*;
use terrace_kernels::reference::{Tokens, recurrence};
use terrace_kernels::{
    Checkpoints, Design, Dtype, Error, Gdn, Initial, Last, Path, Pool, PoolMut, Prefill, Sequences, States, Tensor,
    TensorMut, Window, Workspace, metadata,
};
use terrace_profiles::units::{Bytes, DeviceSpan};

use machine::Machine;

/// Elements of a head.
pub const DIM: usize = 128;
/// Elements of a head's state.
pub const STATE: usize = DIM * DIM;

/// What a call computes: numbers, not layouts. Every number is one that its type can hold.
#[derive(Clone, Debug)]
pub struct Case {
    /// Of messages.
    pub name: String,
    /// Key heads and value heads.
    pub heads: (usize, usize),
    /// Of q, k, v and o.
    pub dtype: Dtype,
    /// Of g and beta.
    pub gates: Dtype,
    /// Token bounds.
    pub cu: Vec<i64>,
    /// Tokens, with padding after the last sequence.
    pub tokens: usize,
    /// `[tokens, key heads, 128]`.
    pub q: Vec<f32>,
    /// `[tokens, key heads, 128]`.
    pub k: Vec<f32>,
    /// `[tokens, value heads, 128]`.
    pub v: Vec<f32>,
    /// `[tokens, value heads]`.
    pub g: Vec<f32>,
    /// `[tokens, value heads]`.
    pub beta: Vec<f32>,
    /// `[sequences, value heads, 128 (V), 128 (K)]`.
    pub h0: Option<Vec<f32>>,
    /// For each sequence.
    pub has_initial: Option<Vec<bool>>,
    /// 128^-0.5 if none.
    pub scale: Option<f32>,
    /// Normalise q and k in the call.
    pub l2norm: bool,
    /// What the issue allows of the error of final states: 6e-3, or 1.5e-2 for correlated keys.
    pub state_limit: f64,
}

/// Where states are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pools {
    /// None: zeros to start from, nothing kept.
    Dropped,
    /// fp32, one for initial and one for final states, in the order of the sequences.
    Separate,
    /// One pool with shuffled slots and more of them than sequences, in place.
    InPlace(Dtype),
    /// Two pools with shuffled slots.
    Shuffled(Dtype),
}

/// How a call is made: what must not change a bit.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Tokens of a window.
    pub window: u64,
    /// What every byte of the workspace holds before.
    pub poison: u8,
    /// q, k and v are slices of one fused buffer, and o of a wider one.
    pub strided: bool,
    /// Where states are.
    pub pools: Pools,
    /// Chunks from a checkpoint to the next; 0 for none.
    pub every: u32,
    /// `chunk_indices` and `chunk_offsets` are passed.
    pub metadata: bool,
    /// On CUDA.
    pub design: Design,
}

impl Default for How {
    fn default() -> Self {
        Self {
            window: 768,
            poison: 0xFF,
            strided: false,
            pools: Pools::Separate,
            every: 0,
            metadata: false,
            design: Design::Fused,
        }
    }
}

/// What came of a call.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// `[tokens, value heads, 128]` of the sequences' tokens.
    pub o: Vec<f32>,
    /// `[sequences, value heads, 128, 128]`; empty where they are dropped.
    pub ht: Vec<f32>,
    /// `[rows, value heads, 128, 128]`.
    pub checkpoints: Vec<f32>,
    /// What the call said.
    pub path: Path,
}

/// What the oracle says.
#[derive(Clone, Debug)]
pub struct Expected {
    /// As in [`Outcome`].
    pub o: Vec<f64>,
    /// As in [`Outcome`].
    pub ht: Vec<f64>,
}

impl Case {
    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.cu.len() - 1
    }

    /// The heads.
    pub fn shape(&self) -> Gdn {
        Gdn::new(self.heads.0 as u32, self.heads.1 as u32).expect("a case that is served")
    }

    /// Tokens of the sequences, without padding.
    pub fn used(&self) -> usize {
        self.cu[self.sequences()] as usize
    }

    /// One of the sequences alone, its gates and states with it.
    pub fn alone(&self, sequence: usize) -> Self {
        self.slice(sequence, self.cu[sequence] as usize, self.cu[sequence + 1] as usize)
    }

    /// Tokens `[start, end)` as the only sequence, with the initial state of `sequence`.
    pub fn slice(&self, sequence: usize, start: usize, end: usize) -> Self {
        let cut = |values: &[f32], width: usize| values[start * width..end * width].to_vec();
        let (keys, values) = self.heads;
        let state = values * STATE;
        Self {
            name: format!("{}, sequence {sequence}, tokens {start}..{end}", self.name),
            cu: vec![0, (end - start) as i64],
            tokens: end - start,
            q: cut(&self.q, keys * DIM),
            k: cut(&self.k, keys * DIM),
            v: cut(&self.v, values * DIM),
            g: cut(&self.g, values),
            beta: cut(&self.beta, values),
            h0: self.h0.as_ref().map(|h0| h0[sequence * state..(sequence + 1) * state].to_vec()),
            has_initial: self.has_initial.as_ref().map(|has| vec![has[sequence]]),
            ..self.clone()
        }
    }

    /// q and k as step 0 leaves them, written again from its definition.
    pub fn normalised(&self) -> Self {
        let normalise = |values: &[f32]| {
            let mut values = values.to_vec();
            for row in values.chunks_exact_mut(DIM) {
                let sum = |half: &[f32]| half.iter().fold(0.0_f32, |sum, x| x.mul_add(*x, sum));
                let inverse = 1.0 / (sum(&row[..64]) + sum(&row[64..]) + 1e-6).sqrt();
                row.iter_mut().for_each(|x| *x = rounded(*x * inverse, self.dtype));
            }
            values
        };
        Self { q: normalise(&self.q), k: normalise(&self.k), l2norm: false, ..self.clone() }
    }

    /// The outputs and final states in fp64, each head of each sequence by itself.
    pub fn expected(&self) -> Expected {
        let case = if self.l2norm { self.normalised() } else { self.clone() };
        let (keys, values) = self.heads;
        let group = values / keys;
        let one = Gdn::new(1, 1).expect("one head");
        let scale = self.scale.map_or((DIM as f64).sqrt().recip(), f64::from);
        let column = |from: &[f32], heads: usize, width: usize, head: usize, tokens: std::ops::Range<usize>| {
            let rows = tokens.flat_map(|token| &from[(token * heads + head) * width..][..width]);
            rows.copied().map(f64::from).collect::<Vec<f64>>()
        };
        let pieces: Vec<(usize, usize)> =
            (0..self.sequences()).flat_map(|n| (0..values).map(move |head| (n, head))).collect();
        let done: Vec<(Vec<f64>, Vec<f64>)> = pieces
            .par_iter()
            .map(|&(n, head)| {
                let tokens = case.cu[n] as usize..case.cu[n + 1] as usize;
                let key = head / group;
                let q = column(&case.q, keys, DIM, key, tokens.clone());
                let k = column(&case.k, keys, DIM, key, tokens.clone());
                let v = column(&case.v, values, DIM, head, tokens.clone());
                let g = column(&case.g, values, 1, head, tokens.clone());
                let beta = column(&case.beta, values, 1, head, tokens);
                let mut state: Vec<f64> = match &case.h0 {
                    Some(h0) if case.has_initial.as_ref().is_none_or(|has| has[n]) => {
                        h0[(n * values + head) * STATE..][..STATE].iter().copied().map(f64::from).collect()
                    }
                    _ => vec![0.0; STATE],
                };
                let o = recurrence(one, &Tokens { q: &q, k: &k, v: &v, g: &g, beta: &beta }, scale, &mut state);
                (o, state)
            })
            .collect();
        let mut expected = Expected { o: vec![0.0; self.used() * values * DIM], ht: Vec::new() };
        for (&(n, head), (o, state)) in pieces.iter().zip(done) {
            for (token, row) in o.chunks_exact(DIM).enumerate() {
                expected.o[((self.cu[n] as usize + token) * values + head) * DIM..][..DIM].copy_from_slice(row);
            }
            expected.ht.extend(state);
        }
        expected
    }
}

/// Rounded to a type, ties to even.
pub fn rounded(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::F32 => value,
    }
}

/// RMS of the difference over RMS of what is expected; infinite where anything is not a number.
pub fn error(given: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(given.len(), expected.len());
    let (mut difference, mut size) = (0.0, 0.0);
    for (given, expected) in given.iter().zip(expected) {
        difference += (f64::from(*given) - expected).powi(2);
        size += expected.powi(2);
    }
    let error = (difference / size.max(1e-300)).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Whether two are equal bit by bit.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// A slot for sequence `n`, none twice, never in order.
fn shuffled(sequences: usize) -> (Vec<i32>, usize) {
    let slots = sequences + 3;
    let step =
        (1..).map(|n| n * 2 + 5).find(|step| gcd(*step, slots) == 1).expect("there is a number without common factors");
    ((0..sequences).map(|n| ((n * step + 2) % slots) as i32).collect(), slots)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Elements of a type, as bytes.
pub fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// And back.
pub fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let pair = |bytes: &[u8]| [bytes[0], bytes[1]];
    match dtype {
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes(pair(b)).to_f32()).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes(pair(b)).to_f32()).collect(),
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// What memory that must not be written holds.
const CANARY: u8 = 0xC5;

/// Rows of a wider buffer: every row `width` elements in `stride`, from `offset` on; the rest is canary.
fn spread(values: &[f32], dtype: Dtype, width: usize, stride: usize, offset: usize) -> Vec<u8> {
    let (size, rows) = (dtype.bytes() as usize, values.len() / width);
    let mut bytes = vec![CANARY; rows * stride * size];
    for (row, values) in values.chunks_exact(width).enumerate() {
        let at = (row * stride + offset) * size;
        bytes[at..at + width * size].copy_from_slice(&encode(values, dtype));
    }
    bytes
}

/// Runs a case, and checks that nothing but outputs and final states was written.
///
/// # Panics
/// Something else was written.
pub fn run(machine: &mut dyn Machine, case: &Case, how: &How) -> Result<Outcome, Error> {
    let (keys, values) = case.heads;
    let (tokens, size) = (case.tokens, case.dtype.bytes() as usize);
    let place = machine.place();
    let (key_width, width) = (keys * DIM, values * DIM);
    // q, k and v: beside each other in one buffer with a gap of 8, or each by itself.
    let (stride, input) = if how.strided {
        let stride = 2 * key_width + width + 8;
        let mut fused = spread(&case.q, case.dtype, key_width, stride, 0);
        for (from, width, offset) in [(&case.k, key_width, key_width), (&case.v, width, 2 * key_width)] {
            for (row, values) in from.chunks_exact(width).enumerate() {
                let at = (row * stride + offset) * size;
                fused[at..at + width * size].copy_from_slice(&encode(values, case.dtype));
            }
        }
        let address = machine.upload(&fused);
        (stride, [address, address + (key_width * size) as u64, address + (2 * key_width * size) as u64])
    } else {
        (0, [&case.q, &case.k, &case.v].map(|values| machine.upload(&encode(values, case.dtype))))
    };
    let tensor = |address: u64, heads: usize| {
        let shape = [tokens as u64, heads as u64, DIM as u64];
        // SAFETY: the machine keeps what was uploaded until `clear`; it holds rows of that shape with these strides.
        let view = unsafe { Tensor::from_raw(place, address, case.dtype, shape) };
        if how.strided { view.strides(stride as u64, DIM as u64) } else { view }
    };
    let gate_addresses = [&case.g, &case.beta].map(|values| machine.upload(&encode(values, case.gates)));
    // SAFETY: as above.
    let gate = |address| unsafe { Tensor::from_raw(place, address, case.gates, [tokens as u64, values as u64, 1]) };
    let out_stride = if how.strided { width + 24 } else { width };
    let out_bytes = tokens * out_stride * size;
    let out_address = machine.upload(&vec![CANARY; out_bytes]);
    let out_offset = if how.strided { 8 * size } else { 0 };
    let shape = [tokens as u64, values as u64, DIM as u64];
    // SAFETY: as above, and nothing else refers to it.
    let o = unsafe { TensorMut::from_raw(place, out_address + out_offset as u64, case.dtype, shape) }
        .strides(out_stride as u64, DIM as u64);

    let n = case.sequences();
    let state = values * STATE;
    let (slots, dtype) = match how.pools {
        Pools::InPlace(dtype) | Pools::Shuffled(dtype) => (Some(shuffled(n)), dtype),
        Pools::Separate | Pools::Dropped => (None, Dtype::F32),
    };
    let count = slots.as_ref().map_or(n, |(_, count)| *count);
    let slot_of = |n: usize| slots.as_ref().map_or(n, |(slots, _)| slots[n] as usize);
    let state_bytes = state * dtype.bytes() as usize;
    let mut initial_bytes = vec![CANARY; count * state_bytes];
    for sequence in 0..n {
        let at = slot_of(sequence) * state_bytes;
        let into = &mut initial_bytes[at..at + state_bytes];
        match &case.h0 {
            Some(h0) if case.has_initial.as_ref().is_none_or(|has| has[sequence]) => {
                into.copy_from_slice(&encode(&h0[sequence * state..(sequence + 1) * state], dtype));
            }
            // A NaN in every type.
            _ => into.fill(0xFF),
        }
    }
    let none = vec![false; n];
    let has_initial = if case.h0.is_some() { case.has_initial.as_deref() } else { Some(none.as_slice()) };
    let in_place = matches!(how.pools, Pools::InPlace(_));
    let initial_address = machine.upload(&initial_bytes);
    let last_address = if in_place { initial_address } else { machine.upload(&vec![CANARY; count * state_bytes]) };
    let pool_shape = [count as u64, values as u64];
    // SAFETY: as above; in place only one of the two views is passed on.
    let (initial, last) = unsafe {
        let initial = Pool::from_raw(place, initial_address, dtype, pool_shape);
        (initial, PoolMut::from_raw(place, last_address, dtype, pool_shape))
    };
    let list = slots.as_ref().map(|(slots, _)| slots.as_slice());
    let states = match how.pools {
        Pools::Dropped => States::Dropped,
        Pools::InPlace(_) => States::InPlace { pool: last, slots: list, has_initial },
        Pools::Separate | Pools::Shuffled(_) => States::Separate {
            initial: case.h0.is_some().then_some(Initial { pool: initial, slots: list, has_initial }),
            last: Some(Last { pool: last, slots: list }),
        },
    };
    let rows = if how.every == 0 { 0 } else { Checkpoints::rows(&case.cu, how.every)? };
    let checkpoint_bytes = rows as usize * state * 4;
    let checkpoint_address = machine.upload(&vec![CANARY; checkpoint_bytes]);
    let checkpoints = (how.every > 0).then(|| Checkpoints {
        every: how.every,
        // SAFETY: as above.
        states: unsafe { PoolMut::from_raw(place, checkpoint_address, Dtype::F32, [rows, values as u64]) },
    });

    let indices: Vec<[i64; 2]> = metadata::chunk_indices(&case.cu)?.collect();
    let offsets: Vec<i64> = metadata::chunk_offsets(&case.cu)?.collect();
    let window = Window::new(how.window)?;
    let device = machine.device();
    let total = terrace_kernels::workspace(&device, case.shape(), window, how.design).total();
    let workspace_address = machine.upload(&vec![how.poison; total.get() as usize]);
    let args = Prefill {
        q: tensor(input[0], keys),
        k: tensor(input[1], keys),
        v: tensor(input[2], values),
        g: gate(gate_addresses[0]),
        beta: gate(gate_addresses[1]),
        o,
        sequences: Sequences {
            cu_seqlens: Some(&case.cu),
            chunk_indices: how.metadata.then_some(&indices),
            chunk_offsets: how.metadata.then_some(&offsets),
        },
        states,
        checkpoints,
        scale: case.scale,
        l2norm: case.l2norm,
        window,
        design: how.design,
    };
    // SAFETY: as above, and the guard behind it shows a write beyond it.
    let workspace = unsafe {
        Workspace::from_raw(place, DeviceSpan { address: workspace_address, bytes: Bytes::new(total.get()).unwrap() })
    };
    let result = terrace_kernels::prefill(&device, args, workspace);
    machine.check_guards(&case.name);

    let written = machine.download(out_address, out_bytes);
    let mut o = Vec::with_capacity(case.used() * width);
    for (token, row) in written.chunks_exact((out_stride * size).max(1)).enumerate() {
        let used = if result.is_ok() && token < case.used() { out_offset..out_offset + width * size } else { 0..0 };
        let outside = |at: &usize| !used.contains(at);
        assert!((0..row.len()).filter(outside).all(|at| row[at] == CANARY), "{}: o beside token {token}", case.name);
        o.extend(decode(&row[used], case.dtype));
    }
    let pool = machine.download(last_address, count * state_bytes);
    let mut ht = Vec::new();
    for sequence in 0..n {
        let bytes = &pool[slot_of(sequence) * state_bytes..][..state_bytes];
        if how.pools != Pools::Dropped {
            ht.extend(decode(bytes, dtype));
        }
    }
    let untouched = |slot: usize| result.is_err() || (0..n).all(|sequence| slot_of(sequence) != slot);
    for slot in (0..count).filter(|slot| untouched(*slot)) {
        let before = if in_place { &initial_bytes[slot * state_bytes..][..state_bytes] } else { &[CANARY; 0][..] };
        let now = &pool[slot * state_bytes..][..state_bytes];
        let same = if in_place { now == before } else { now.iter().all(|byte| *byte == CANARY) };
        assert!(same, "{}: slot {slot} of no sequence", case.name);
    }
    let checkpoints = decode(&machine.download(checkpoint_address, checkpoint_bytes), Dtype::F32);
    machine.clear();
    Ok(Outcome { o, ht, checkpoints, path: result? })
}

/// Runs a case and compares it with the oracle. The message names the case.
///
/// # Panics
/// It is further off than the machine's limits, or the issue's, allow.
pub fn check(machine: &mut dyn Machine, case: &Case, how: &How) -> Outcome {
    let outcome = run(machine, case, how).unwrap_or_else(|error| panic!("{}: {error}", case.name));
    let expected = case.expected();
    let (limit, state_limit) = machine.limits(case);
    let o = error(&outcome.o, &expected.o);
    assert!(o <= limit, "{}, {how:?}: o is off by {o:.2e}, limit {limit:.1e}", case.name);
    if how.pools != Pools::Dropped {
        let ht = error(&outcome.ht, &expected.ht);
        assert!(ht <= state_limit, "{}, {how:?}: ht is off by {ht:.2e}, limit {state_limit:.1e}", case.name);
    }
    outcome
}
