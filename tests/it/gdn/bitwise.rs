//! What must not change a bit: windows, reruns, threads, other sequences of the batch, cuts at multiples of 64, what the
//! workspace held, where states and tensors lie.

use terrace_kernels::Dtype;
use terrace_tests::gdn::cases::{Gates, Keys, Recipe, case};
use terrace_tests::gdn::machine::{Host, Machine};
use terrace_tests::gdn::{Case, DIM, How, Outcome, Pools, STATE, check, run, same_bits};

use super::small::on_cuda;

fn ragged() -> Case {
    let cu = [0, 100, 100, 165, 166, 1300, 1364];
    Recipe { padding: 5, keys: Keys::Raw, ..Recipe::new("ragged", (2, 6), &cu) }.draw(30)
}

fn everywhere(test: impl Fn(&mut dyn Machine, &Case)) {
    let case = Case { l2norm: true, ..ragged() };
    test(&mut Host::new(2), &case);
    on_cuda(|cuda| test(cuda, &case));
}

fn same(a: &Outcome, b: &Outcome, what: &str) {
    assert!(same_bits(&a.o, &b.o), "o differs: {what}");
    assert!(same_bits(&a.ht, &b.ht), "ht differs: {what}");
}

#[test]
fn any_window_gives_the_same_bits() {
    everywhere(|machine, case| {
        let first = check(machine, case, &How::default());
        for window in [64, 128, 192, 256, 512, 1024, 4096] {
            same(&run(machine, case, &How { window, ..How::default() }).unwrap(), &first, &format!("window {window}"));
        }
    });
}

#[test]
fn twenty_reruns_give_the_same_bits() {
    everywhere(|machine, case| {
        let how = How { window: 128, ..How::default() };
        let first = run(machine, case, &how).unwrap();
        for rerun in 0..20 {
            same(&run(machine, case, &how).unwrap(), &first, &format!("rerun {rerun}"));
        }
    });
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let case = Case { l2norm: true, ..ragged() };
    let first = run(&mut Host::new(1), &case, &How::default()).unwrap();
    for threads in [2, 3, 7, 64] {
        let outcome = run(&mut Host::new(threads), &case, &How { window: 256, ..How::default() }).unwrap();
        same(&outcome, &first, &format!("{threads} threads"));
    }
}

#[test]
fn what_the_workspace_held_changes_no_bit() {
    everywhere(|machine, case| {
        let how = How { window: 256, every: 2, ..How::default() };
        let first = run(machine, case, &How { poison: 0, ..how }).unwrap();
        // 0xFF is a NaN in every type; 0x7F a huge number or a NaN.
        for poison in [0xFF, 0x7F, 0x42] {
            let outcome = run(machine, case, &How { poison, ..how }).unwrap();
            same(&outcome, &first, &format!("poison {poison:#x}"));
            assert!(same_bits(&outcome.checkpoints, &first.checkpoints));
        }
    });
}

#[test]
fn slices_of_wider_buffers_give_the_same_bits() {
    everywhere(|machine, case| {
        let first = run(machine, case, &How::default()).unwrap();
        same(&run(machine, case, &How { strided: true, ..How::default() }).unwrap(), &first, "strided");
    });
}

#[test]
fn pools_in_place_or_shuffled_give_the_same_bits() {
    everywhere(|machine, case| {
        let first = run(machine, case, &How::default()).unwrap();
        for pools in [Pools::InPlace(Dtype::F32), Pools::Shuffled(Dtype::F32)] {
            let how = How { pools, window: 128, ..How::default() };
            same(&run(machine, case, &how).unwrap(), &first, &format!("{pools:?}"));
        }
        let dropped =
            run(machine, &Case { h0: None, ..case.clone() }, &How { pools: Pools::Dropped, ..How::default() });
        let kept = run(machine, &Case { h0: None, ..case.clone() }, &How::default()).unwrap();
        assert!(same_bits(&dropped.unwrap().o, &kept.o));
    });
}

#[test]
fn passing_metadata_changes_nothing() {
    everywhere(|machine, case| {
        let how = How { window: 128, ..How::default() };
        let (without, with) = (run(machine, case, &how), run(machine, case, &How { metadata: true, ..how }));
        let (without, with) = (without.unwrap(), with.unwrap());
        same(&with, &without, "metadata");
        assert_eq!(with.path, without.path, "a call with metadata streams like any other");
        assert!(with.path.windows > 5);
    });
}

#[test]
fn a_sequence_gives_the_same_bits_alone_and_in_a_batch() {
    everywhere(|machine, case| {
        let batch = run(machine, case, &How::default()).unwrap();
        let (width, state) = (case.heads.1 * DIM, case.heads.1 * STATE);
        for n in 0..case.sequences() {
            let alone = run(machine, &case.alone(n), &How { window: 192, ..How::default() }).unwrap();
            let tokens = case.cu[n] as usize * width..case.cu[n + 1] as usize * width;
            assert!(same_bits(&alone.o, &batch.o[tokens]), "o of sequence {n}");
            assert!(same_bits(&alone.ht, &batch.ht[n * state..(n + 1) * state]), "ht of sequence {n}");
        }
    });
}

/// Runs the tokens in two calls, cut there, with the state handed over in a pool of that type.
fn in_two(machine: &mut dyn Machine, case: &Case, cut: usize, dtype: Dtype) -> Outcome {
    let pools = if dtype == Dtype::F32 { Pools::Separate } else { Pools::Shuffled(dtype) };
    let first = run(machine, &case.slice(0, 0, cut), &How { pools, ..How::default() }).unwrap();
    let mut rest = case.slice(0, cut, case.tokens);
    rest.h0 = Some(first.ht);
    rest.has_initial = None;
    let second = run(machine, &rest, &How { pools, window: 64, ..How::default() }).unwrap();
    Outcome { o: [first.o, second.o].concat(), ..second }
}

#[test]
fn a_prompt_cut_at_a_multiple_of_64_gives_the_same_bits() {
    everywhere(|machine, _| {
        for (tokens, cut) in [(128, 64), (300, 128), (1000, 960)] {
            let case = case("14 two calls", (2, 6), &[0, tokens], Keys::Unit, Gates::Softplus(0.02), 14);
            let whole = check(machine, &case, &How::default());
            same(&in_two(machine, &case, cut, Dtype::F32), &whole, &format!("cut at {cut} of {tokens}"));
        }
    });
}

#[test]
fn a_prompt_cut_anywhere_is_within_the_limits() {
    everywhere(|machine, _| {
        for (first, second) in [(61, 128), (128, 61), (511, 256), (64, 64)] {
            let name = format!("14 two calls, {first} and {second} tokens");
            let case = case(&name, (1, 3), &[0, first + second], Keys::Unit, Gates::Softplus(0.02), 14);
            let expected = case.expected();
            let off = |outcome: &Outcome| {
                let error = terrace_tests::gdn::error;
                (error(&outcome.o, &expected.o), error(&outcome.ht, &expected.ht))
            };
            let (limit, state_limit) = machine.limits(&case);
            let (o, ht) = off(&in_two(machine, &case, first as usize, Dtype::F32));
            assert!(o <= limit && ht <= state_limit, "{name}: {o:.1e}, {ht:.1e}");
            // A bf16 pool rounds the state twice, before and after.
            let mut rounded = case.clone();
            rounded.h0 = None;
            let expected = rounded.expected();
            let outcome = in_two(machine, &rounded, first as usize, Dtype::Bf16);
            let (o, ht) = (
                terrace_tests::gdn::error(&outcome.o, &expected.o),
                terrace_tests::gdn::error(&outcome.ht, &expected.ht),
            );
            assert!(o <= 8e-3 && ht <= 8e-3, "{name}, bf16 pool: {o:.1e}, {ht:.1e}");
        }
    });
}

#[test]
fn a_nan_stays_in_its_head_and_sequence_and_spares_earlier_chunks() {
    everywhere(|machine, case| {
        let clean = run(machine, case, &How::default()).unwrap();
        let (values, (token, head, sequence)) = (case.heads.1, (800, 4, 4));
        let mut spoilt = case.clone();
        spoilt.v[(token * values + head) * DIM] = f32::NAN;
        let outcome = run(machine, &spoilt, &How::default()).unwrap();
        let chunk = (token - case.cu[sequence] as usize) / 64 * 64 + case.cu[sequence] as usize;
        assert!(outcome.o[(token * values + head) * DIM].is_nan());
        for (row, (now, before)) in outcome.o.chunks_exact(DIM).zip(clean.o.chunks_exact(DIM)).enumerate() {
            let hit = row % values == head && (chunk..case.cu[sequence + 1] as usize).contains(&(row / values));
            assert!(hit || same_bits(now, before), "token {}, head {}", row / values, row % values);
        }
        for (row, (now, before)) in outcome.ht.chunks_exact(STATE).zip(clean.ht.chunks_exact(STATE)).enumerate() {
            let hit = row == sequence * values + head;
            assert!(hit == now.iter().any(|x| x.is_nan()) && (hit || same_bits(now, before)), "state {row}");
        }
    });
}
