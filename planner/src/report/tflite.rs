//! A plan as TensorFlow Lite Micro reads one from a model: the buffer of its metadata entry `OfflineMemoryAllocation`.
//!
//! ```text
//!   word (little-endian, 32 bits)   0  version, 1       2  number of tensors n
//!                                   1  subgraph, 0      3..3+n  offset of tensor 0, 1, …, or -1: placed at run time
//! ```
//!
//! (TFLM's page "Memory Management", section "Offline planned tensor allocations".) A buffer is the tensor whose number its
//! label is or ends with: `17`, `tensor 17`, `conv_2d:17`. Tensors that no label names, such as constants, get -1. TFLM wants
//! buffers at multiples of 16, so plan with that alignment.

use std::collections::BTreeMap;

use terrace_profiles::units::Offset;

use crate::error::Error;
use crate::plan::Plan;

/// The version that TFLM writes in its own tests, and the only one it knows.
const VERSION: i32 = 1;
/// The subgraph that the plan is for: the main one.
const SUBGRAPH: i32 = 0;
/// Where a tensor is to be placed at run time.
const AT_RUN_TIME: i32 = -1;
/// A label that ends in a larger number names no tensor.
const MOST_TENSORS: u32 = 1 << 20;

/// The bytes of the metadata buffer.
///
/// # Errors
/// A label that names no tensor, a tensor that two labels name, an offset beyond 2^31 - 1.
pub fn tflite(plan: &Plan) -> Result<Vec<u8>, Error> {
    let mut offsets: BTreeMap<u32, i32> = BTreeMap::new();
    for slot in plan.slots() {
        let label = plan.label(slot);
        let unnamed = || Error::NamesNoTensor { label: label.to_owned() };
        let tensor = tensor_of(label).ok_or_else(unnamed)?;
        let offset: Offset = plan.offset(slot);
        let word = i32::try_from(offset.get()).map_err(|_| Error::BeyondTflite { label: label.to_owned(), offset })?;
        if offsets.insert(tensor, word).is_some_and(|other| other != word) {
            return Err(Error::TensorTwice { tensor });
        }
    }
    let count = offsets.last_key_value().map_or(0, |(last, _)| last + 1);
    let words = [VERSION, SUBGRAPH, count as i32].into_iter();
    let words = words.chain((0..count).map(|tensor| offsets.get(&tensor).copied().unwrap_or(AT_RUN_TIME)));
    Ok(words.flat_map(i32::to_le_bytes).collect())
}

/// The number that the label is or ends with.
fn tensor_of(label: &str) -> Option<u32> {
    let digits = label.len() - label.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let number = label[label.len() - digits..].parse().ok()?;
    (number < MOST_TENSORS).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Row, plan};
    use super::*;

    fn words(plan: &Plan) -> Result<Vec<i32>, String> {
        let bytes = tflite(plan).map_err(|error| error.to_string())?;
        Ok(bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect())
    }

    const ROWS: &[Row] = &[(512, "conv:1", 0, 4, 512), (512, "4", 2, 6, 0), (900, "tensor 0", 4, 9, 512)];

    #[test]
    fn each_tensor_has_its_offset_and_the_rest_is_left_to_the_run_time() {
        assert_eq!(words(&plan(ROWS)), Ok(vec![1, 0, 5, 512, 512, -1, -1, 0]));
        assert_eq!(words(&plan(&[])), Ok(vec![1, 0, 0]));
    }

    #[test]
    fn what_the_format_cannot_say_is_one_sentence() {
        let cases: [(&[Row], &str); 4] = [
            (&[(1, "weights", 0, 1, 0)], "label 'weights' does not end in the number of a tensor"),
            (&[(1, "t9999999999", 0, 1, 0)], "label 't9999999999' does not end in"),
            (&[(1, "a1", 0, 2, 0), (1, "b1", 0, 2, 512)], "two buffers at different offsets are named tensor 1"),
            (
                &[(1, "conv:1", 0, 1, 1 << 31)],
                "'conv:1' lies at offset 2147483648, and offsets of TensorFlow Lite Micro end at 2147483647",
            ),
        ];
        for (rows, wanted) in cases {
            let error = words(&plan(rows)).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
