//! What takes long: offsets beyond 2^31 elements, on a GPU alone for their size; and a hundred calls in a row.

use terrace_tests::gdn::cases::{Recipe, small};
use terrace_tests::gdn::machine::{Host, Machine};
use terrace_tests::gdn::{Case, How, run, same_bits};

use super::small::on_cuda;

/// Tokens of the last part, a multiple of 64.
const TAIL: usize = 4096;

/// 17: flash-linear-attention#1080, #1173.
#[test]
fn the_end_of_400_000_tokens_is_that_of_its_last_4096() {
    on_cuda(|cuda| {
        let (tokens, heads) = (400_000, (1, 48));
        assert!(tokens * heads.1 * 128 > 1 << 31);
        let short = Recipe::new("17", heads, &[0, TAIL as i64]).draw(17);
        let repeat = |values: &[f32]| {
            let width = values.len() / TAIL;
            values.iter().copied().cycle().take(tokens * width).collect::<Vec<f32>>()
        };
        let long = Case {
            cu: vec![0, tokens as i64],
            tokens,
            q: repeat(&short.q),
            k: repeat(&short.k),
            v: repeat(&short.v),
            g: repeat(&short.g),
            beta: repeat(&short.beta),
            ..short
        };
        let cut = tokens - TAIL;
        assert!(cut.is_multiple_of(64));
        // The one checkpoint is the state at the cut.
        let how = How { window: 1024, every: (cut / 64) as u32, ..How::default() };
        let whole = run(cuda, &long, &how).unwrap();
        let mut tail = long.slice(0, cut, tokens);
        drop(long);
        tail.h0 = Some(whole.checkpoints);
        let end = run(cuda, &tail, &How::default()).unwrap();
        assert!(same_bits(&whole.o[cut * heads.1 * 128..], &end.o), "o");
        assert!(same_bits(&whole.ht, &end.ht), "ht");
    });
}

/// 16: flashinfer#3565 hung on these.
#[test]
fn seven_ragged_sequences_again_and_again() {
    let (case, how) = small().into_iter().find(|(case, _)| case.name.starts_with("16")).expect("case 16");
    let again = |machine: &mut dyn Machine, times: usize| {
        let first = run(machine, &case, &how).unwrap();
        for _ in 1..times {
            let next = run(machine, &case, &how).unwrap();
            assert!(same_bits(&next.o, &first.o) && same_bits(&next.ht, &first.ht));
        }
    };
    again(&mut Host::new(2), 5);
    on_cuda(|cuda| again(cuda, 100));
}
