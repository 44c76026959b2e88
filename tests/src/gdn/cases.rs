//! Cases by number: `shared/design/GDN.md` 6.4 lists what each is there to catch.

use terrace_kernels::Dtype;

use super::{Case, DIM, How, Pools, STATE, rounded};
use crate::generate::Random;

/// Draws the numbers of a case.
#[derive(Clone, Debug)]
pub struct Draw(Random);

impl Draw {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f32 {
        (self.0.draw() >> 40) as f32 / (1 << 24) as f32
    }

    /// About normal: the sum of twelve uniform numbers, less 6.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }
}

/// How q and k are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Normal, of unit length.
    Unit,
    /// 0.3 of it beside a part that all share, of unit length.
    Correlated,
    /// Uniform from 0 to 1, of unit length.
    Positive,
    /// Normal, as they come; for calls that normalise.
    Raw,
}

/// How the logarithm of the decay is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gates {
    /// The same for every token.
    Constant(f32),
    /// `-A softplus(0.5 normal + 1)`, about -1.3 A.
    Softplus(f32),
    /// `ln(sigmoid(normal)) / norm`, as FLA's tests have it.
    LogSigmoid(f32),
    /// `ln` of a uniform number, as FlashInfer's tests have alpha.
    LogUniform,
    /// `-A softplus(0.5 normal + 1)`, A from 0 in the first head to 16 in the last, as FlashQLA's tests have it.
    PerHead,
}

/// A case to be changed further.
pub fn case(name: &str, heads: (usize, usize), cu: &[i64], keys: Keys, gates: Gates, seed: u64) -> Case {
    Recipe { keys, gates, ..Recipe::new(name, heads, cu) }.draw(seed)
}

/// What a case is drawn from.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Its name.
    pub name: String,
    /// Key heads and value heads.
    pub heads: (usize, usize),
    /// Token bounds.
    pub cu: Vec<i64>,
    /// Tokens after the last sequence.
    pub padding: usize,
    /// q and k.
    pub keys: Keys,
    /// g.
    pub gates: Gates,
    /// Of q, k, v and o.
    pub dtype: Dtype,
    /// Random initial states.
    pub h0: bool,
}

impl Recipe {
    /// bf16, unit keys, weak gates, random initial states.
    pub fn new(name: &str, heads: (usize, usize), cu: &[i64]) -> Self {
        Self {
            name: name.to_owned(),
            heads,
            cu: cu.to_vec(),
            padding: 0,
            keys: Keys::Unit,
            gates: Gates::Softplus(0.02),
            dtype: Dtype::Bf16,
            h0: true,
        }
    }

    /// Draws every number.
    pub fn draw(&self, seed: u64) -> Case {
        let mut draw = Draw::new(seed);
        let (keys, values) = self.heads;
        let sequences = self.cu.len() - 1;
        let tokens = self.cu[sequences] as usize + self.padding;
        let dtype = self.dtype;
        let common: Vec<f32> = (0..DIM).map(|_| draw.normal()).collect();
        let mut rows = |count: usize| {
            let mut all = Vec::with_capacity(count * DIM);
            for _ in 0..count {
                let row: Vec<f32> = match self.keys {
                    Keys::Unit | Keys::Raw => (0..DIM).map(|_| draw.normal()).collect(),
                    Keys::Correlated => common.iter().map(|common| common + 0.3 * draw.normal()).collect(),
                    Keys::Positive => (0..DIM).map(|_| draw.uniform()).collect(),
                };
                let norm = match self.keys {
                    Keys::Raw => 1.0,
                    _ => row.iter().map(|x| x * x).sum::<f32>().sqrt(),
                };
                all.extend(row.iter().map(|x| rounded(x / norm, dtype)));
            }
            all
        };
        let (q, k) = (rows(tokens * keys), rows(tokens * keys));
        let v = (0..tokens * values * DIM).map(|_| rounded(draw.normal(), dtype)).collect();
        let softplus = |x: f32| x.exp().ln_1p();
        let g = (0..tokens * values)
            .map(|index| match self.gates {
                Gates::Constant(g) => g,
                Gates::Softplus(a) => -a * softplus(0.5 * draw.normal() + 1.0),
                Gates::LogSigmoid(norm) => -softplus(-draw.normal()) / norm,
                Gates::LogUniform => draw.uniform().max(1e-6).ln(),
                Gates::PerHead => {
                    let a = 16.0 * (index % values) as f32 / (values.max(2) - 1) as f32;
                    -a * softplus(0.5 * draw.normal() + 1.0)
                }
            })
            .collect();
        let beta = (0..tokens * values).map(|_| draw.uniform()).collect();
        let h0 = self.h0.then(|| (0..sequences * values * STATE).map(|_| draw.normal()).collect());
        Case {
            name: self.name.clone(),
            heads: self.heads,
            dtype,
            gates: Dtype::F32,
            cu: self.cu.clone(),
            tokens,
            q,
            k,
            v,
            g,
            beta,
            h0,
            has_initial: None,
            scale: None,
            l2norm: false,
            state_limit: if matches!(self.keys, Keys::Correlated | Keys::Positive) { 1.5e-2 } else { 6e-3 },
        }
    }
}

/// The small cases of 6.4 that one call is enough for, with how each is run. The others need two calls or bits, and are in
/// `tests/it/gdn`.
pub fn small() -> Vec<(Case, How)> {
    let heads = (1, 3);
    let window = |window| How { window, ..How::default() };
    let mut all = Vec::new();
    for (name, gates) in [("1 without decay", Gates::Constant(0.0)), ("1 weak decay", Gates::Softplus(0.02))] {
        all.push((case(name, heads, &[0, 192], Keys::Unit, gates, 1), window(64)));
    }
    for tokens in [65, 127, 2000] {
        let name = format!("2 ragged end, {tokens} tokens");
        all.push((case(&name, heads, &[0, tokens], Keys::Unit, Gates::Softplus(0.002), 2), window(768)));
    }
    for tokens in [1, 15, 63, 64] {
        let name = format!("3 one chunk, {tokens} tokens");
        all.push((case(&name, heads, &[0, tokens], Keys::Unit, Gates::Softplus(0.02), 3), window(64)));
    }
    let empty = case("4 empty sequences", heads, &[0, 0, 64, 64, 65, 193, 193], Keys::Unit, Gates::Softplus(0.02), 4);
    all.push((empty, window(64)));
    let ones: Vec<i64> = (0..=300).collect();
    all.push((case("5 sequences of one token", heads, &ones, Keys::Unit, Gates::Softplus(0.02), 5), window(512)));
    for tokens in [64, 128, 512] {
        let name = format!("6 borders inside a sequence, window {tokens}");
        all.push((case(&name, heads, &[0, 100, 1300], Keys::Unit, Gates::Softplus(0.02), 6), window(tokens)));
    }
    all.push((case("7 strong decay", heads, &[0, 200], Keys::Unit, Gates::Constant(-30.0), 7), window(64)));
    for (name, gate) in [("7 one token of -1e4", -1e4), ("7 one token of -inf", f32::NEG_INFINITY)] {
        let mut case = case(name, heads, &[0, 200], Keys::Unit, Gates::Constant(-1e-3), 7);
        case.g[100 * 3..101 * 3].fill(gate);
        all.push((case, window(64)));
    }
    all.push((case("8 alpha 1e-12", heads, &[0, 200], Keys::Unit, Gates::Constant(-27.6), 8), window(64)));
    all.extend(degenerate().into_iter().map(|case| (case, window(64))));
    let still = carry_only();
    all.push((still, window(64)));
    let correlated = case("11 correlated keys", heads, &[0, 300], Keys::Correlated, Gates::Softplus(0.02), 11);
    all.push((correlated, window(128)));
    for values in [32, 48, 64] {
        all.push((one_value_per_head(values), window(64)));
    }
    let sliced = Recipe { padding: 13, ..Recipe::new("13 slices of wider buffers", (2, 4), &[0, 70, 200]) }.draw(13);
    all.push((sliced, How { strided: true, ..window(64) }));
    all.push((garbage_slots(), How { pools: Pools::InPlace(Dtype::F32), ..window(128) }));
    let ragged = [1238, 1199, 1240, 1216, 1187, 1203, 519];
    let cu: Vec<i64> = std::iter::once(0).chain(ragged.iter().scan(0, |sum, x| Some((*sum += x, *sum).1))).collect();
    all.push((case("16 seven ragged sequences", (1, 2), &cu, Keys::Unit, Gates::Softplus(0.02), 16), window(512)));
    let raw = case("19 normalised in the call", heads, &[0, 130], Keys::Raw, Gates::Softplus(0.02), 19);
    all.push((Case { l2norm: true, ..raw }, window(64)));
    let mixed = Recipe { gates: Gates::PerHead, ..Recipe::new("20 decay from none to strong", (2, 4), &[0, 1000]) };
    all.push((mixed.draw(20), window(256)));
    all
}

/// Those whose size is for a GPU: many documents, a long loop, every head of a model.
pub fn large() -> Vec<(Case, How)> {
    let documents: Vec<i64> = (0..=2050).map(|n| n * 16).collect();
    let recipe = Recipe { h0: false, ..Recipe::new("5 2050 documents of 16 tokens", (16, 32), &documents) };
    let mixed = Recipe { gates: Gates::PerHead, ..Recipe::new("20 at full size", (16, 48), &[0, 4096]) };
    vec![
        (recipe.draw(5), How { pools: Pools::Dropped, ..How::default() }),
        (mixed.draw(20), How::default()),
        (Recipe::new("a step of a server", (16, 48), &[0, 1000, 1001, 3000, 4128]).draw(21), How::default()),
    ]
}

/// 9: keys that make L nearly singular, and rows of zeros.
fn degenerate() -> Vec<Case> {
    let base = |name| case(name, (1, 3), &[0, 150], Keys::Unit, Gates::Constant(0.0), 9);
    let mut identical = base("9 identical keys");
    identical.beta.fill(1.0);
    let first = identical.k[..DIM].to_vec();
    identical.k.chunks_exact_mut(DIM).for_each(|row| row.copy_from_slice(&first));
    identical.state_limit = 1.5e-2;
    let mut zero_keys = base("9 some keys are zero");
    for row in zero_keys.k.chunks_exact_mut(DIM).step_by(3) {
        row.fill(0.0);
    }
    let mut normalised = Case { l2norm: true, ..zero_keys.clone() };
    normalised.name = "9 some keys are zero, normalised".to_owned();
    let mut zero_queries = base("9 queries are zero");
    zero_queries.q.fill(0.0);
    vec![identical, zero_keys, normalised, zero_queries]
}

/// 10: nothing is written and nothing decays.
pub fn carry_only() -> Case {
    let mut still = case("10 nothing written, nothing decays", (1, 3), &[0, 200], Keys::Unit, Gates::Constant(0.0), 10);
    still.beta.fill(0.0);
    still
}

/// 12: each value head has a constant value of its own, so that a wrong key head shows.
fn one_value_per_head(values: usize) -> Case {
    let name = format!("12 {values} value heads");
    let mut case = case(&name, (16, values), &[0, 70], Keys::Unit, Gates::Softplus(0.02), 12);
    for (index, row) in case.v.chunks_exact_mut(DIM).enumerate() {
        row.fill((index % values) as f32 + 1.0);
    }
    case
}

/// 15: sequences without an initial state, whose slots hold NaN.
fn garbage_slots() -> Case {
    let cu = [0, 0, 30, 130, 260];
    let mut case = case("15 garbage in slots without a state", (1, 3), &cu, Keys::Unit, Gates::Softplus(0.02), 15);
    case.has_initial = Some(vec![false, false, true, false]);
    case
}
