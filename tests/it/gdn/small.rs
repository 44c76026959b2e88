//! The small cases of `shared/design/GDN.md` 6.4, each against the oracle.

use terrace_kernels::{Dtype, Error, Place};
use terrace_tests::gdn::cases::{self, Gates, Keys, Recipe, case};
use terrace_tests::gdn::machine::{Cuda, Host, Machine};
use terrace_tests::gdn::{Case, DIM, How, Pools, STATE, check, error, rounded, run, same_bits};
use terrace_tests::gpu;

/// On CUDA, if there is a device.
pub fn on_cuda(test: impl FnOnce(&mut dyn Machine)) {
    let _turn = gpu::turn();
    if gpu::require().is_some() {
        test(&mut Cuda::open());
    }
}

#[test]
fn small_cases_on_the_cpu() {
    let mut host = Host::new(2);
    for (case, how) in cases::small() {
        check(&mut host, &case, &how);
    }
}

#[test]
fn small_and_large_cases_on_cuda() {
    on_cuda(|cuda| {
        for (case, how) in cases::small().into_iter().chain(cases::large()) {
            check(cuda, &case, &how);
        }
    });
}

/// A property of one call, on every machine.
fn everywhere(test: impl Fn(&mut dyn Machine)) {
    test(&mut Host::new(2));
    on_cuda(|cuda| test(cuda));
}

#[test]
fn one_token_is_its_closed_form() {
    everywhere(|machine| {
        let case =
            Case { scale: Some(0.25), ..case("3 closed form", (1, 2), &[0, 1], Keys::Unit, Gates::Softplus(0.5), 3) };
        let outcome = run(machine, &case, &How::default()).unwrap();
        let h0 = case.h0.as_ref().unwrap();
        // On a device the state is an operand of 16 bits.
        let tolerance = if machine.place() == Place::Device { 1.5e-2 } else { 4e-3 };
        for head in 0..2 {
            for row in 0..DIM {
                let state = &h0[head * STATE + row * DIM..][..DIM];
                let dot =
                    |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
                let decay = f64::from(case.g[head]).exp();
                let d =
                    f64::from(case.beta[head]) * (f64::from(case.v[head * DIM + row]) - decay * dot(state, &case.k));
                let o = 0.25 * (decay * dot(state, &case.q) + d * dot(&case.k, &case.q));
                let given = f64::from(outcome.o[head * DIM + row]);
                assert!((given - o).abs() <= tolerance * (o.abs() + 0.05), "head {head}, row {row}: {given}, not {o}");
            }
        }
    });
}

#[test]
fn an_empty_sequence_keeps_its_state_bit_by_bit() {
    everywhere(|machine| {
        let mut case = case("4", (1, 3), &[0, 0, 64, 64, 65, 65], Keys::Unit, Gates::Softplus(0.02), 4);
        case.has_initial = Some(vec![true, true, false, true, true]);
        let h0 = case.h0.clone().unwrap();
        for (dtype, pools) in [
            (Dtype::F32, Pools::Separate),
            (Dtype::F32, Pools::InPlace(Dtype::F32)),
            (Dtype::Bf16, Pools::InPlace(Dtype::Bf16)),
            (Dtype::Bf16, Pools::Shuffled(Dtype::Bf16)),
        ] {
            for window in [64, 768] {
                let outcome = run(machine, &case, &How { pools, window, ..How::default() }).unwrap();
                for n in [0, 2, 4] {
                    let range = n * 3 * STATE..(n + 1) * 3 * STATE;
                    let expected: Vec<f32> = h0[range.clone()].iter().map(|x| rounded(*x, dtype)).collect();
                    let expected = if n == 2 { vec![0.0; 3 * STATE] } else { expected };
                    assert!(same_bits(&outcome.ht[range], &expected), "sequence {n}, {pools:?}, window {window}");
                }
            }
        }
    });
}

#[test]
fn no_sequences_and_no_tokens_are_served() {
    everywhere(|machine| {
        let nothing = case("nothing", (1, 2), &[0], Keys::Unit, Gates::Constant(0.0), 0);
        assert_eq!(run(machine, &nothing, &How::default()).unwrap().path.windows, 0);
        let empty = case("empty", (1, 2), &[0, 0, 0], Keys::Unit, Gates::Constant(0.0), 0);
        let outcome = run(machine, &empty, &How::default()).unwrap();
        assert!(same_bits(&outcome.ht, empty.h0.as_ref().unwrap()));
        let outcome = run(machine, &empty, &How { pools: Pools::InPlace(Dtype::F32), ..How::default() }).unwrap();
        assert!(same_bits(&outcome.ht, empty.h0.as_ref().unwrap()));
        assert_eq!(outcome.path.windows, 0, "everything is where it should be");
    });
}

#[test]
fn with_nothing_written_the_state_stays_bit_by_bit() {
    everywhere(|machine| {
        let case = cases::carry_only();
        for window in [64, 192] {
            let outcome = run(machine, &case, &How { window, ..How::default() }).unwrap();
            assert!(same_bits(&outcome.ht, case.h0.as_ref().unwrap()), "window {window}");
        }
    });
}

#[test]
fn norm_in_the_call_and_before_it_give_equal_bits() {
    everywhere(|machine| {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let recipe = Recipe { keys: Keys::Raw, dtype, ..Recipe::new("19", (2, 4), &[0, 130, 200]) };
            let mut raw = Case { l2norm: true, ..recipe.draw(19) };
            raw.k[..DIM].fill(0.0);
            let (inside, before) =
                (run(machine, &raw, &How::default()), run(machine, &raw.normalised(), &How::default()));
            let (inside, before) = (inside.unwrap(), before.unwrap());
            assert!(same_bits(&inside.o, &before.o) && same_bits(&inside.ht, &before.ht), "{dtype}");
        }
    });
}

#[test]
fn gates_may_be_of_the_type_of_q() {
    everywhere(|machine| {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut case = Recipe { dtype, ..Recipe::new("16-bit gates", (1, 3), &[0, 100, 330]) }.draw(22);
            for values in [&mut case.g, &mut case.beta] {
                values.iter_mut().for_each(|x| *x = rounded(*x, dtype));
            }
            let wide = check(machine, &case, &How::default());
            let narrow = check(machine, &Case { gates: dtype, ..case }, &How::default());
            assert!(same_bits(&wide.o, &narrow.o) && same_bits(&wide.ht, &narrow.ht), "{dtype}");
        }
    });
}

#[test]
fn fp32_is_served_on_the_cpu() {
    let recipe = Recipe { dtype: Dtype::F32, ..Recipe::new("fp32", (2, 6), &[0, 1, 100, 1300]) };
    let case = recipe.draw(23);
    check(&mut Host::new(2), &case, &How { window: 128, ..How::default() });
    on_cuda(|cuda| {
        let refused = run(cuda, &case, &How::default()).unwrap_err();
        assert_eq!(refused, Error::Dtype { name: "q", expected: "bf16 or fp16", given: Dtype::F32 });
    });
}

#[test]
fn checkpoints_are_the_states_on_the_way() {
    everywhere(|machine| {
        let case = case("checkpoints", (1, 3), &[0, 63, 63, 320, 700, 764], Keys::Unit, Gates::Softplus(0.02), 24);
        for every in [1, 2, 3] {
            let bits: Vec<_> = [64, 128, 768]
                .map(|window| check(machine, &case, &How { every, window, ..How::default() }).checkpoints)
                .into();
            let mut at = 0;
            for n in 0..case.sequences() {
                let (start, end) = (case.cu[n] as usize, case.cu[n + 1] as usize);
                for row in 1..=(end - start) / (64 * every as usize) {
                    let expected = case.slice(n, start, start + row * 64 * every as usize).expected();
                    let limit = machine.limits(&case).1;
                    let off = error(&bits[0][at..at + 3 * STATE], &expected.ht);
                    assert!(off <= limit, "every {every}, sequence {n}, row {row}: {off:.1e}");
                    at += 3 * STATE;
                }
            }
            assert_eq!(at, bits[0].len());
            assert!(bits.iter().all(|other| same_bits(other, &bits[0])), "every {every}");
        }
    });
}
