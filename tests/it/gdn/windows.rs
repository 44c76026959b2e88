//! Metadata and windows against a naive construction: every chunk of every sequence, one by one.

use proptest::prelude::*;
use terrace_kernels::window::{CARRY, NOWHERE, Segment, Step, ZEROS, steps};
use terrace_kernels::{Checkpoints, Error, Sequences, Window, metadata};

/// A chunk, as a naive loop over the sequences finds it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Chunk {
    sequence: usize,
    index: i64,
    tok0: i64,
    rows: i64,
}

fn chunks(cu: &[i64]) -> Vec<Chunk> {
    let mut all = Vec::new();
    for sequence in 0..cu.len() - 1 {
        let mut tok0 = cu[sequence];
        let mut index = 0;
        while tok0 < cu[sequence + 1] {
            let rows = (cu[sequence + 1] - tok0).min(64);
            all.push(Chunk { sequence, index, tok0, rows });
            tok0 += rows;
            index += 1;
        }
    }
    all
}

/// What the segments of a window say about its chunks, slot by slot.
fn unfold(segment: &Segment, sequence: usize) -> Vec<Chunk> {
    (0..i64::from(segment.chunks()))
        .map(|at| Chunk {
            sequence,
            index: i64::from(segment.chunk0) + at,
            tok0: segment.tok0 + at * 64,
            rows: (i64::from(segment.len) - at * 64).min(64),
        })
        .collect()
}

fn lengths() -> impl Strategy<Value = Vec<i64>> {
    let length = prop_oneof![
        3 => Just(0_i64),
        3 => Just(1),
        2 => 1..64_i64,
        2 => (1..6_i64).prop_map(|chunks| chunks * 64),
        2 => 60..900_i64,
    ];
    proptest::collection::vec(length, 0..30)
}

fn bounds(lengths: &[i64]) -> Vec<i64> {
    std::iter::once(0).chain(lengths.iter().scan(0, |sum, x| Some((*sum += x, *sum).1))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_tables_are_those_of_a_naive_loop(lengths in lengths()) {
        let cu = bounds(&lengths);
        let expected: Vec<[i64; 2]> = chunks(&cu).iter().map(|chunk| [chunk.sequence as i64, chunk.index]).collect();
        let indices: Vec<[i64; 2]> = metadata::chunk_indices(&cu).unwrap().collect();
        prop_assert_eq!(&indices, &expected);
        let offsets: Vec<i64> = metadata::chunk_offsets(&cu).unwrap().collect();
        prop_assert_eq!(offsets.len(), cu.len());
        for (sequence, offset) in offsets.iter().enumerate() {
            let before = expected.iter().filter(|[other, _]| (*other as usize) < sequence).count();
            prop_assert_eq!(*offset, before as i64);
        }
    }

    #[test]
    fn windows_hold_every_chunk_once_and_in_order(
        lengths in lengths(), slots in 1..9_u64, has in proptest::collection::vec(any::<bool>(), 30), every in 1..4_u32,
    ) {
        let cu = bounds(&lengths);
        let window = Window::new(slots * 64).unwrap();
        let has = &has[..lengths.len()];
        let all: Vec<Step> = steps(&Sequences::packed(&cu), cu[lengths.len()] as u64, Some(has), every, window).unwrap().collect();
        let expected = chunks(&cu);
        let (mut seen, mut copied, mut carried) = (Vec::new(), Vec::new(), None);
        for (index, step) in all.iter().enumerate() {
            prop_assert_eq!(step.index, index as u64);
            prop_assert!(!step.segments().is_empty() && step.segments().len() as u64 <= slots);
            prop_assert!(u64::from(step.slots) <= slots);
            let is_followed = all.get(index + 1).is_some_and(|next| next.slots > 0);
            prop_assert!(!is_followed || u64::from(step.slots) == slots, "all but the last are full");
            let mut slot = 0;
            for (at, segment) in step.segments().iter().enumerate() {
                prop_assert_eq!(segment.initial == CARRY, carried.is_some() && at == 0);
                if segment.len == 0 {
                    prop_assert_eq!(step.slots, 0);
                    let sequence = segment.last as usize;
                    prop_assert_eq!(segment.initial, if has[sequence] { segment.last } else { ZEROS });
                    copied.push(sequence);
                    continue;
                }
                let sequence = expected[seen.len()].sequence;
                prop_assert_eq!(i64::from(segment.slot0), slot);
                slot += i64::from(segment.chunks());
                if segment.chunk0 == 0 {
                    prop_assert_eq!(segment.initial, if has[sequence] { sequence as i32 } else { ZEROS });
                }
                let rows = |n: usize| lengths[n] / (64 * i64::from(every));
                let first: i64 = (0..sequence).map(rows).sum();
                prop_assert_eq!(i64::from(segment.checkpoint), if rows(sequence) > 0 { first } else { -1 });
                seen.extend(unfold(segment, sequence));
                let ends = segment.tok0 + i64::from(segment.len) == cu[sequence + 1];
                prop_assert_eq!(segment.last, if ends { sequence as i32 } else { CARRY });
                carried = (!ends).then_some(sequence);
                prop_assert!(ends || at + 1 == step.segments().len(), "only the last is open");
            }
            prop_assert_eq!(slot, i64::from(step.slots));
            prop_assert_eq!(step.carries_out(), carried.is_some());
        }
        prop_assert_eq!(seen, expected);
        let empty: Vec<usize> = (0..lengths.len()).filter(|n| lengths[*n] == 0).collect();
        prop_assert_eq!(copied, empty);
        let rows: i64 = lengths.iter().map(|length| length / (64 * i64::from(every))).sum();
        prop_assert_eq!(Checkpoints::rows(&cu, every).unwrap(), rows as u64);
    }

    #[test]
    fn one_wrong_row_of_the_metadata_is_named(lengths in lengths(), row in any::<prop::sample::Index>(), by in 1..3_i64) {
        let cu = bounds(&lengths);
        let mut indices: Vec<[i64; 2]> = metadata::chunk_indices(&cu).unwrap().collect();
        let mut offsets: Vec<i64> = metadata::chunk_offsets(&cu).unwrap().collect();
        let check = |indices: &[[i64; 2]], offsets: &[i64]| {
            let sequences = Sequences { cu_seqlens: Some(&cu), chunk_indices: Some(indices), chunk_offsets: Some(offsets) };
            steps(&sequences, cu[lengths.len()] as u64, None, 0, Window::DEFAULT).map(|_| ())
        };
        prop_assert_eq!(check(&indices, &offsets), Ok(()));
        let at = row.index(offsets.len());
        let right = offsets[at];
        offsets[at] += by;
        let wrong = Error::ChunkOffsets { row: at as u64, expected: right, given: right + by };
        prop_assert_eq!(check(&indices, &offsets), Err(wrong));
        offsets[at] = right;
        if !indices.is_empty() {
            let at = row.index(indices.len());
            let right = indices[at];
            indices[at][(by - 1) as usize] += by;
            let wrong = Error::ChunkIndices { row: at as u64, expected: right, given: indices[at] };
            prop_assert_eq!(check(&indices, &offsets), Err(wrong));
            indices[at] = right;
            indices.pop();
            let expected = indices.len() as u64 + 1;
            let wrong = Error::Length { name: "chunk_indices", expected, given: expected - 1 };
            prop_assert_eq!(check(&indices, &offsets), Err(wrong));
        }
    }
}

#[test]
fn a_million_tokens_are_walked_without_a_table() {
    let count = steps(&Sequences::packed(&[0, 1_000_000]), 1_000_000, None, 0, Window::DEFAULT).unwrap().count();
    assert_eq!(count, 1_000_000_usize.div_ceil(Window::DEFAULT.tokens() as usize));
    const { assert!(Step::TABLE_BYTES < 4096) };
    let nothing = steps(&Sequences::default(), 0, None, 0, Window::DEFAULT).unwrap().next().unwrap();
    assert_eq!((nothing.slots, nothing.segments()[0].last), (0, 0), "one empty sequence is copied");
    assert_ne!(NOWHERE, CARRY);
}

/// The trap of older FLA, vLLM and FlashQLA: `(chunk_id == 0).cumsum() - 1` shifts every sequence after an empty one.
#[test]
fn metadata_with_shifted_ids_after_an_empty_sequence_is_refused() {
    let cu = [0, 64, 64, 200];
    let shifted = [[0, 0], [1, 0], [1, 1], [1, 2]];
    let sequences = Sequences { chunk_indices: Some(&shifted), ..Sequences::packed(&cu) };
    let error = steps(&sequences, 200, None, 0, Window::DEFAULT).map(|_| ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "chunk_indices[1] is [1, 0]; expected [2, 0] from cu_seqlens (sequence, chunk inside it)"
    );
}
