//! The oracle: the recurrence in fp64, token by token, as it is written in the papers. Slow and obvious on purpose; it shares
//! no code with what it judges.

use terrace_profiles::shape::{Gdn, HEAD_DIM};

/// The tokens of one sequence, contiguous. q and k are taken as they are: normalised beforehand, and rounded to their type.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// `[tokens, key heads, 128]`.
    pub q: &'a [f64],
    /// `[tokens, key heads, 128]`.
    pub k: &'a [f64],
    /// `[tokens, value heads, 128]`.
    pub v: &'a [f64],
    /// Natural logarithm of the decay `[tokens, value heads]`.
    pub g: &'a [f64],
    /// `[tokens, value heads]`.
    pub beta: &'a [f64],
}

/// Advances the states `[value heads, 128 (V), 128 (K)]` over the tokens and returns the outputs
/// `[tokens, value heads, 128]`:
///
/// ```text
/// S <- e^g S;  d = beta (v - S k);  S <- S + d k^T;  o = scale S q
/// ```
///
/// Decay comes first, then the error (flash-linear-attention#885); an output is of the state after its own token.
///
/// # Panics
/// A slice does not have the length that its shape says.
pub fn recurrence(shape: Gdn, tokens: &Tokens<'_>, scale: f64, states: &mut [f64]) -> Vec<f64> {
    let dim = HEAD_DIM as usize;
    let (key_heads, value_heads) = (shape.key_heads() as usize, shape.value_heads() as usize);
    let count = tokens.g.len() / value_heads;
    assert_eq!(states.len(), value_heads * dim * dim);
    assert_eq!(tokens.q.len(), count * key_heads * dim);
    assert_eq!(tokens.k.len(), count * key_heads * dim);
    assert_eq!(tokens.v.len(), count * value_heads * dim);
    assert_eq!(tokens.beta.len(), count * value_heads);
    let mut outputs = vec![0.0; count * value_heads * dim];
    for token in 0..count {
        for head in 0..value_heads {
            let gate = token * value_heads + head;
            let key = (token * key_heads + head / shape.group() as usize) * dim;
            let (q, k) = (&tokens.q[key..key + dim], &tokens.k[key..key + dim]);
            let v = &tokens.v[gate * dim..(gate + 1) * dim];
            let state = &mut states[head * dim * dim..(head + 1) * dim * dim];
            for (row, v) in v.iter().enumerate() {
                // One row of S: what the keys have written about one element of the values.
                let s = &mut state[row * dim..(row + 1) * dim];
                let decay = tokens.g[gate].exp();
                s.iter_mut().for_each(|s| *s *= decay);
                let known: f64 = s.iter().zip(k).map(|(s, k)| s * k).sum();
                let error = tokens.beta[gate] * (v - known);
                s.iter_mut().zip(k).for_each(|(s, k)| *s += error * k);
                outputs[gate * dim + row] = scale * s.iter().zip(q).map(|(s, q)| s * q).sum::<f64>();
            }
        }
    }
    outputs
}
