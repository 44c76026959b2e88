//! One chunk of one head: the whole of the arithmetic, on plain slices.
//!
//! With `G` the sum of the gates up to a row, `D_ij = e^(G_i - G_j)` for `i >= j`, and `S` the state at the chunk's start:
//!
//! ```text
//! L  = beta_i <k_i, k_j> D_ij, strictly below the diagonal       P = scale <q_i, k_j> D_ij, on and below it
//! v' = (I + L)^-1 beta (v - e^G (k S))                            by forward substitution, 8 rows at a time
//! o  = scale e^G (q S) + P v'
//! S  <- e^(G_last) S + k^T (v' e^(G_last - G))
//! ```
//!
//! This is the form of FlashInfer and FlashQLA. The kernels form `w = (I + L)^-1 beta e^G k` first, so that chunks wait less
//! for each other; where chunks of a head follow each other anyway, that is only more work, and more rounding.
//!
//! Rows beyond the chunk's tokens are zero, up to a multiple of 8, and `G_last` is the last token's: never row 63's. Each
//! number is summed in one fixed order, so its bits depend on nothing but its chunk and the state before it.

use terrace_profiles::shape::{CHUNK, CPU_SQUARE_STRIDE, CPU_TILE_STRIDE, HEAD_DIM};

use super::real::Real;

/// Rows of a chunk.
pub(crate) const ROWS: usize = CHUNK as usize;
/// Elements of a head.
pub(crate) const DIM: usize = HEAD_DIM as usize;
/// Elements from a row to the next of what is 128 wide.
pub(crate) const TILE: usize = CPU_TILE_STRIDE as usize;
/// Elements from a row to the next of what is 64 wide.
pub(crate) const SQUARE: usize = CPU_SQUARE_STRIDE as usize;
/// Rows that are solved at a time; tokens of a chunk are rounded up to it.
pub(crate) const BLOCK: usize = 8;

/// What the value heads of one key head share of a chunk.
pub(crate) struct Keys<'a, R> {
    /// `[64, 128]`, normalised where that was asked for.
    pub q: &'a mut [R],
    /// `[64, 128]`, likewise.
    pub k: &'a mut [R],
    /// `[128, 64]`.
    pub k_transposed: &'a mut [R],
    /// `k k^T` and `q k^T` `[64, 64]`, valid on and below the diagonal.
    pub kk: &'a mut [R],
    pub qk: &'a mut [R],
}

/// What one value head of a chunk works with.
pub(crate) struct Values<'a, R> {
    /// v, then v' `[64, 128]`.
    pub v: &'a mut [R],
    /// o `[64, 128]`.
    pub o: &'a mut [R],
    /// -L and P `[64, 64]`.
    pub l: &'a mut [R],
    pub p: &'a mut [R],
    /// Gates, then their sums `[64]`.
    pub g: &'a mut [R],
    pub beta: &'a mut [R],
    /// `e^G` and `e^(G_last - G)` `[64]`.
    pub decay: &'a mut [R],
    pub rest: &'a mut [R],
}

/// Wrong on purpose, so that tests can show that they would notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutant {
    /// Right.
    #[default]
    None,
    /// `G_last` is read from row 63, which beyond the chunk's tokens is zero.
    LastOfRow63,
    /// A window hands on the state at the start of its last chunk.
    StaleCarry,
}

impl<R: Real> Keys<'_, R> {
    /// Transposes k and multiplies it with itself and with q. Rows from `rows` up to a whole block are zero.
    #[inline(always)]
    pub fn multiply<const FMA: bool, const MR: usize, const NR: usize>(&mut self, rows: usize) {
        let rows = rows.next_multiple_of(BLOCK);
        let columns = rows.next_multiple_of(NR);
        transpose(rows, DIM, self.k, TILE, self.k_transposed, SQUARE);
        // Tiles reach beyond the last row.
        self.k_transposed.chunks_exact_mut(SQUARE).for_each(|row| row[rows..columns].fill(R::ZERO));
        let shape = Shape { rows, columns, depth: DIM, part: Part::Lower };
        for (a, c) in [(&*self.k, &mut *self.kk), (&*self.q, &mut *self.qk)] {
            product::<R, FMA, MR, NR>(shape, (a, TILE), (self.k_transposed, SQUARE), (c, SQUARE), Into::Set);
        }
    }
}

impl<R: Real> Values<'_, R> {
    /// Turns v into o, and the state `[128 (K), 128 (V)]` at the chunk's start into the one at its end.
    #[inline(always)]
    pub fn advance<const FMA: bool, const MR: usize, const NR: usize>(
        &mut self,
        keys: &Keys<'_, R>,
        state: &mut [R],
        scale: R,
        tokens: usize,
        mutant: Mutant,
    ) {
        let rows = tokens.next_multiple_of(BLOCK);
        let last = self.decays::<FMA>(tokens, mutant);
        self.triangles::<FMA>(keys, scale, rows);
        let wide = |rows, depth, part| Shape { rows, columns: DIM, depth, part };
        // beta (v - e^G (k S)): v is scaled, and -beta e^G scales the sums.
        scale_rows(self.v, self.beta, rows);
        let factors: [R; ROWS] = std::array::from_fn(|row| -(self.beta[row] * self.decay[row]));
        let v = (&mut *self.v, TILE);
        let from_state = wide(rows, DIM, Part::Whole);
        product::<R, FMA, MR, NR>(from_state, (keys.k, TILE), (state, TILE), v, Into::AddScaled(&factors));
        self.solve::<FMA, MR, NR>(rows);
        let factors: [R; ROWS] = std::array::from_fn(|row| scale * self.decay[row]);
        let o = (&mut *self.o, TILE);
        product::<R, FMA, MR, NR>(from_state, (keys.q, TILE), (state, TILE), o, Into::SetScaled(&factors));
        let (o, p) = ((&mut *self.o, TILE), (&*self.p, SQUARE));
        product::<R, FMA, MR, NR>(wide(rows, rows, Part::LowerDepth), p, (self.v, TILE), o, Into::Add);
        scale_rows(self.v, self.rest, rows);
        let (k, v) = ((&*keys.k_transposed, SQUARE), (&*self.v, TILE));
        product::<R, FMA, MR, NR>(wide(DIM, rows, Part::Whole), k, v, (state, TILE), Into::AddTo(last));
    }

    /// Sums the gates and returns `e^(G_last)`.
    #[inline(always)]
    fn decays<const FMA: bool>(&mut self, tokens: usize, mutant: Mutant) -> R {
        let mut sum = R::ZERO;
        for gate in &mut self.g[..tokens] {
            sum += *gate;
            *gate = sum;
        }
        if mutant == Mutant::LastOfRow63 {
            sum = self.g[ROWS - 1];
        }
        self.g[tokens..].fill(sum);
        for ((gate, decay), rest) in self.g.iter().zip(&mut *self.decay).zip(&mut *self.rest) {
            *decay = gate.exp::<FMA>();
            *rest = (sum - *gate).exp::<FMA>();
        }
        sum.exp::<FMA>()
    }

    /// -L and P, with zeros above their diagonals.
    #[inline(always)]
    fn triangles<const FMA: bool>(&mut self, keys: &Keys<'_, R>, scale: R, rows: usize) {
        const LANES: usize = 16;
        for row in 0..rows {
            let (sum, beta) = (self.g[row], -self.beta[row]);
            for first in (0..=row).step_by(LANES) {
                let at = row * SQUARE + first;
                let lanes = |values: &[R]| -> [R; LANES] { values[..LANES].try_into().expect("all its lanes") };
                let (kk, qk, g) = (lanes(&keys.kk[at..]), lanes(&keys.qk[at..]), lanes(&self.g[first..]));
                let (mut l, mut p) = ([R::ZERO; LANES], [R::ZERO; LANES]);
                for lane in 0..LANES {
                    // Above the diagonal the difference may overflow; what it gives there is not kept.
                    let decay = (sum - g[lane]).exp::<FMA>();
                    l[lane] = if first + lane < row { beta * kk[lane] * decay } else { R::ZERO };
                    p[lane] = if first + lane <= row { scale * qk[lane] * decay } else { R::ZERO };
                }
                self.l[at..][..LANES].copy_from_slice(&l);
                self.p[at..][..LANES].copy_from_slice(&p);
            }
        }
    }

    /// `(I + L)^-1` of what is in place of v, 8 rows at a time.
    #[inline(always)]
    fn solve<const FMA: bool, const MR: usize, const NR: usize>(&mut self, rows: usize) {
        for block in (0..rows).step_by(BLOCK) {
            let (above, here) = self.v.split_at_mut(block * TILE);
            if block > 0 {
                let l = (&self.l[block * SQUARE..], SQUARE);
                let shape = Shape { rows: BLOCK, columns: DIM, depth: block, part: Part::Whole };
                product::<R, FMA, MR, NR>(shape, l, (above, TILE), (&mut *here, TILE), Into::Add);
            }
            for row in 1..BLOCK {
                let (above, here) = here.split_at_mut(row * TILE);
                for (column, above) in above.chunks_exact(TILE).enumerate() {
                    let factor = self.l[(block + row) * SQUARE + block + column];
                    for (value, above) in here[..DIM].iter_mut().zip(above) {
                        *value = R::multiply_add::<FMA>(factor, *above, *value);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn scale_rows<R: Real>(tile: &mut [R], factors: &[R], rows: usize) {
    for (row, factor) in tile.chunks_exact_mut(TILE).zip(factors).take(rows) {
        row[..DIM].iter_mut().for_each(|value| *value = *value * *factor);
    }
}

#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    columns: usize,
    depth: usize,
    part: Part,
}

/// Which part of a product is wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Whole,
    /// On and below the diagonal of the result.
    Lower,
    /// The first factor is zero above its diagonal.
    LowerDepth,
}

/// What becomes of a product.
#[derive(Clone, Copy)]
enum Into<'a, R> {
    /// `c = a b`, whatever c held.
    Set,
    /// The same, each row with its factor.
    SetScaled(&'a [R; ROWS]),
    /// `c = c + a b`.
    Add,
    /// The same, each row of the product with its factor.
    AddScaled(&'a [R; ROWS]),
    /// `c = factor c + a b`.
    AddTo(R),
}

/// The product of a and b, into c; each with its stride.
#[inline(always)]
fn product<R: Real, const FMA: bool, const MR: usize, const NR: usize>(
    shape: Shape,
    (a, a_stride): (&[R], usize),
    (b, b_stride): (&[R], usize),
    (c, c_stride): (&mut [R], usize),
    into: Into<'_, R>,
) {
    for column in (0..shape.columns).step_by(NR) {
        for row in (0..shape.rows).step_by(MR) {
            if shape.part == Part::Lower && column >= row + MR {
                continue;
            }
            let depth = if shape.part == Part::LowerDepth { row + MR } else { shape.depth };
            let sums = tile::<R, FMA, MR, NR>(&a[row * a_stride..], a_stride, &b[column..], b_stride, depth);
            for (index, sums) in sums.iter().enumerate() {
                let c: &mut [R; NR] =
                    (&mut c[(row + index) * c_stride + column..][..NR]).try_into().expect("a row of the tile");
                let row = row + index;
                for (c, sum) in c.iter_mut().zip(sums) {
                    *c = match into {
                        Into::Set => *sum,
                        Into::SetScaled(factors) => factors[row] * *sum,
                        Into::Add => *c + *sum,
                        Into::AddScaled(factors) => R::multiply_add::<FMA>(factors[row], *sum, *c),
                        Into::AddTo(factor) => R::multiply_add::<FMA>(factor, *c, *sum),
                    };
                }
            }
        }
    }
}

/// `MR` rows and `NR` columns of a product, in registers.
#[inline(always)]
fn tile<R: Real, const FMA: bool, const MR: usize, const NR: usize>(
    a: &[R],
    a_stride: usize,
    b: &[R],
    b_stride: usize,
    depth: usize,
) -> [[R; NR]; MR] {
    let mut sums = [[R::ZERO; NR]; MR];
    // A slice for each row: were they one, the compiler would gather a column of it into a vector.
    let rows: [&[R]; MR] = std::array::from_fn(|row| &a[row * a_stride..][..depth]);
    for at in 0..depth {
        let b: &[R; NR] = b[at * b_stride..][..NR].try_into().expect("a row of the tile");
        for row in 0..MR {
            for column in 0..NR {
                sums[row][column] = R::multiply_add::<FMA>(rows[row][at], b[column], sums[row][column]);
            }
        }
    }
    sums
}

/// `to[column][row] = from[row][column]`.
#[inline(always)]
pub(crate) fn transpose<R: Real>(
    rows: usize,
    columns: usize,
    from: &[R],
    from_stride: usize,
    to: &mut [R],
    to_stride: usize,
) {
    for column in 0..columns {
        let to = &mut to[column * to_stride..][..rows];
        for (row, to) in to.iter_mut().enumerate() {
            *to = from[row * from_stride + column];
        }
    }
}

#[cfg(test)]
mod tests {
    use terrace_profiles::shape::Gdn;

    use super::*;
    use crate::reference::{Tokens, recurrence};

    /// A uniform number from -1 to 1.
    fn random(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    fn unit_rows(rows: usize, common: f64, seed: &mut u64) -> Vec<f64> {
        let mut values: Vec<f64> = (0..rows * DIM).map(|_| random(seed) + common).collect();
        for row in values.chunks_exact_mut(DIM) {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            row.iter_mut().for_each(|x| *x /= norm);
        }
        values
    }

    /// The chunk form, one head, in fp64.
    fn chunked<const MR: usize, const NR: usize>(tokens: &Tokens<'_>, scale: f64, state: &mut [f64]) -> Vec<f64> {
        let count = tokens.g.len();
        let mut outputs = vec![0.0; count * DIM];
        // Whatever is read before it is written shows.
        let tile = || vec![f64::NAN; ROWS * TILE];
        let square = || vec![f64::NAN; ROWS * SQUARE];
        let row = || vec![f64::NAN; ROWS];
        let (mut q, mut k) = (tile(), tile());
        let mut k_transposed = vec![f64::NAN; DIM * SQUARE];
        let (mut kk, mut qk, mut l, mut p) = (square(), square(), square(), square());
        let (mut v, mut o, mut g, mut beta, mut decay, mut rest) = (tile(), tile(), row(), row(), row(), row());
        let mut padded = vec![f64::NAN; DIM * TILE];
        transpose(DIM, DIM, state, DIM, &mut padded, TILE);
        for start in (0..count).step_by(ROWS) {
            let rows = (count - start).min(ROWS);
            for (from, into) in [(tokens.q, &mut q), (tokens.k, &mut k), (tokens.v, &mut v)] {
                for (row, into) in into.chunks_exact_mut(TILE).take(rows.next_multiple_of(BLOCK)).enumerate() {
                    let from = from[start * DIM..].get(row * DIM..(row + 1) * DIM).filter(|_| row < rows);
                    into[..DIM].copy_from_slice(from.unwrap_or(&[0.0; DIM]));
                }
            }
            for (from, into) in [(tokens.g, &mut g), (tokens.beta, &mut beta)] {
                into.fill(0.0);
                into[..rows].copy_from_slice(&from[start..start + rows]);
            }
            let mut keys = Keys { q: &mut q, k: &mut k, k_transposed: &mut k_transposed, kk: &mut kk, qk: &mut qk };
            keys.multiply::<false, MR, NR>(rows);
            let mut values = Values {
                v: &mut v,
                o: &mut o,
                l: &mut l,
                p: &mut p,
                g: &mut g,
                beta: &mut beta,
                decay: &mut decay,
                rest: &mut rest,
            };
            values.advance::<false, MR, NR>(&keys, &mut padded, scale, rows, Mutant::None);
            for (row, o) in o.chunks_exact(TILE).take(rows).enumerate() {
                outputs[(start + row) * DIM..][..DIM].copy_from_slice(&o[..DIM]);
            }
        }
        transpose(DIM, DIM, &padded, TILE, state, DIM);
        outputs
    }

    fn furthest(a: &[f64], b: &[f64]) -> f64 {
        let largest = b.iter().fold(1e-300, |most: f64, x| most.max(x.abs()));
        a.iter().zip(b).fold(0.0, |most: f64, (a, b)| if (a - b).abs() <= most { most } else { (a - b).abs() })
            / largest
    }

    #[test]
    fn in_fp64_the_chunk_form_is_the_recurrence() {
        let shape = Gdn::new(1, 1).unwrap();
        for (count, gate, common) in
            [(1, 0.1, 0.0), (63, 0.003, 1.0), (64, 0.0, 0.0), (65, 30.0, 0.0), (200, 0.02, 3.0)]
        {
            let mut seed = count as u64;
            let q = unit_rows(count, 0.0, &mut seed);
            let k = unit_rows(count, common, &mut seed);
            let v: Vec<f64> = (0..count * DIM).map(|_| random(&mut seed)).collect();
            let g: Vec<f64> = (0..count).map(|_| -gate * (1.0 + random(&mut seed))).collect();
            let beta: Vec<f64> = (0..count).map(|_| 0.5 + 0.5 * random(&mut seed)).collect();
            let state: Vec<f64> = (0..DIM * DIM).map(|_| random(&mut seed)).collect();
            let tokens = Tokens { q: &q, k: &k, v: &v, g: &g, beta: &beta };
            let (mut expected_state, mut small, mut large) = (state.clone(), state.clone(), state);
            let expected = recurrence(shape, &tokens, 0.3, &mut expected_state);
            let outputs = [chunked::<4, 8>(&tokens, 0.3, &mut small), chunked::<8, 32>(&tokens, 0.3, &mut large)];
            for (output, state) in outputs.iter().zip([small, large]) {
                let (o, ht) = (furthest(output, &expected), furthest(&state, &expected_state));
                assert!(o < 1e-12, "{count} tokens, o: {o}");
                assert!(ht < 1e-12, "{count} tokens, state: {ht}");
            }
        }
    }
}
