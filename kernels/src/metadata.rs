//! Which tokens form which sequences, and which chunks those make.
//!
//! ```text
//! cu_seqlens     0         100 100                300      sequences of 100, 0 and 200 tokens
//! chunks         [0 64)[64 100)[100 164)[164 228)[228 292)[292 300)
//! chunk_indices  (0,0) (0,1)   (2,0)    (2,1)    (2,2)    (2,3)
//! chunk_offsets  0             2 2                        6
//! ```
//!
//! Chunks are 64 tokens counted from their sequence's first, so they never hold tokens of two, and an empty sequence has none.
//! The tables are computed from `cu_seqlens` alone. A caller who has `chunk_indices` and `chunk_offsets` may pass them: they
//! are compared, never used, since those of some servers count an empty sequence's neighbours wrongly.

use terrace_profiles::shape::CHUNK;

use crate::error::Error;

/// Which packed tokens belong together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sequences<'a> {
    /// Token bounds `[N + 1]`: the first is 0, none decreases, the last is at most the tokens of q. Tokens after the last
    /// are padding: not read, and their outputs not written. `None`: all tokens are one sequence.
    pub cu_seqlens: Option<&'a [i64]>,
    /// (sequence, chunk inside it) of every chunk, to be compared with what `cu_seqlens` gives.
    pub chunk_indices: Option<&'a [[i64; 2]]>,
    /// Chunks before each sequence, and all of them last, `[N + 1]`, to be compared as well.
    pub chunk_offsets: Option<&'a [i64]>,
}

/// Bounds that were checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds<'a> {
    cu_seqlens: Option<&'a [i64]>,
    /// Tokens where all are one sequence.
    tokens: i64,
}

impl<'a> Sequences<'a> {
    /// Sequences with these bounds.
    pub fn packed(cu_seqlens: &'a [i64]) -> Self {
        Self { cu_seqlens: Some(cu_seqlens), ..Self::default() }
    }

    /// Checks everything against so many tokens of q.
    pub(crate) fn check(&self, tokens: u64) -> Result<Bounds<'a>, Error> {
        if let Some(cu) = self.cu_seqlens {
            check_bounds(cu, tokens)?;
        }
        let bounds = Bounds { cu_seqlens: self.cu_seqlens, tokens: tokens.cast_signed() };
        if let Some(given) = self.chunk_offsets {
            bounds.compare_offsets(given)?;
        }
        if let Some(given) = self.chunk_indices {
            bounds.compare_indices(given)?;
        }
        Ok(bounds)
    }
}

fn check_bounds(cu: &[i64], tokens: u64) -> Result<(), Error> {
    let first = *cu.first().ok_or(Error::NoBounds)?;
    if first != 0 {
        return Err(Error::FirstBound { given: first });
    }
    for (row, pair) in cu.windows(2).enumerate().map(|(before, pair)| (before + 1, pair)) {
        if pair[1] < pair[0] {
            return Err(Error::Decreasing { row, before: pair[0], given: pair[1] });
        }
        if pair[1].cast_unsigned() > tokens {
            return Err(Error::PastEnd { row, tokens, given: pair[1] });
        }
    }
    Ok(())
}

impl Bounds<'_> {
    /// Sequences, the empty ones too.
    pub fn len(&self) -> usize {
        self.cu_seqlens.map_or(1, |cu| cu.len() - 1)
    }

    /// First token of a sequence and the one after its last.
    pub fn tokens(&self, sequence: usize) -> (i64, i64) {
        self.cu_seqlens.map_or((0, self.tokens), |cu| (cu[sequence], cu[sequence + 1]))
    }

    /// Tokens of a sequence.
    pub fn length(&self, sequence: usize) -> i64 {
        let (start, end) = self.tokens(sequence);
        end - start
    }

    /// Chunks of a sequence.
    pub fn chunks(&self, sequence: usize) -> i64 {
        self.length(sequence).cast_unsigned().div_ceil(CHUNK).cast_signed()
    }

    /// Chunks of all sequences.
    pub fn all_chunks(&self) -> i64 {
        (0..self.len()).map(|sequence| self.chunks(sequence)).sum()
    }

    fn compare_offsets(&self, given: &[i64]) -> Result<(), Error> {
        expect_length("chunk_offsets", self.len() as u64 + 1, given.len())?;
        let mut expected = 0;
        for (row, &given) in given.iter().enumerate() {
            if given != expected {
                return Err(Error::ChunkOffsets { row: row as u64, expected, given });
            }
            expected += if row < self.len() { self.chunks(row) } else { 0 };
        }
        Ok(())
    }

    fn compare_indices(&self, given: &[[i64; 2]]) -> Result<(), Error> {
        let mut rows = given.iter().enumerate();
        for sequence in 0..self.len() {
            for chunk in 0..self.chunks(sequence) {
                let expected = [sequence as i64, chunk];
                match rows.next() {
                    Some((_, given)) if *given == expected => {}
                    Some((row, &given)) => return Err(Error::ChunkIndices { row: row as u64, expected, given }),
                    None => return expect_length("chunk_indices", self.all_chunks().cast_unsigned(), given.len()),
                }
            }
        }
        expect_length("chunk_indices", self.all_chunks().cast_unsigned(), given.len())
    }
}

pub(crate) fn expect_length(name: &'static str, expected: u64, given: usize) -> Result<(), Error> {
    if given as u64 == expected { Ok(()) } else { Err(Error::Length { name, expected, given: given as u64 }) }
}

/// The chunks of sequences with these bounds: (sequence, chunk inside it), in order. For whoever must pass
/// `chunk_indices` to somebody else; this crate never builds the table.
///
/// # Errors
/// Bounds that are not those of packed sequences.
pub fn chunk_indices(cu_seqlens: &[i64]) -> Result<impl Iterator<Item = [i64; 2]>, Error> {
    let bounds = Sequences::packed(cu_seqlens).check(i64::MAX as u64)?;
    Ok((0..bounds.len())
        .flat_map(move |sequence| (0..bounds.chunks(sequence)).map(move |chunk| [sequence as i64, chunk])))
}

/// Chunks before each sequence with these bounds, and all of them last.
///
/// # Errors
/// Bounds that are not those of packed sequences.
pub fn chunk_offsets(cu_seqlens: &[i64]) -> Result<impl Iterator<Item = i64>, Error> {
    let bounds = Sequences::packed(cu_seqlens).check(i64::MAX as u64)?;
    let sums = (0..bounds.len()).scan(0, move |sum, sequence| {
        *sum += bounds.chunks(sequence);
        Some(*sum)
    });
    Ok([0].into_iter().chain(sums))
}
