//! The decode step: one to eight tokens of each request, the state updated in place.

use terrace_kernels::{Dtype, Error, Route};
use terrace_tests::gdn::cases::{Gates, Keys, Recipe};
use terrace_tests::gdn::machine::{Host, Machine};
use terrace_tests::gdn::{Case, DIM, How, Pools, STATE, error, rounded, run, same_bits, step};

use super::small::on_cuda;

fn everywhere(test: impl Fn(&mut dyn Machine)) {
    test(&mut Host::new(2));
    on_cuda(|cuda| test(cuda));
}

fn requests(lengths: &[i64]) -> Vec<i64> {
    std::iter::once(0).chain(lengths.iter().scan(0, |sum, x| Some((*sum += x, *sum).1))).collect()
}

#[test]
fn a_step_is_the_recurrence() {
    everywhere(|machine| {
        for (row, (lengths, heads, dtype)) in [
            (&[1][..], (1, 1), Dtype::Bf16),
            (&[1; 64], (2, 4), Dtype::Bf16),
            (&[8, 1, 0, 3, 2, 8], (1, 3), Dtype::F16),
            (&[2, 2, 2, 2], (16, 48), Dtype::Bf16),
            (&[5, 4, 7, 6], (4, 4), Dtype::F16),
        ]
        .into_iter()
        .enumerate()
        {
            let keys = if row % 2 == 0 { Keys::Raw } else { Keys::Unit };
            let recipe =
                Recipe { keys, dtype, ..Recipe::new(&format!("decode {lengths:?}"), heads, &requests(lengths)) };
            let case = Case { l2norm: row % 2 == 0, ..recipe.draw(90 + row as u64) };
            let outcome = step::run(machine, &case, Dtype::F32, &[]).unwrap();
            let expected = case.expected();
            let (limit, state_limit) = machine.limits(&case);
            let (o, ht) = (error(&outcome.o, &expected.o), error(&outcome.ht, &expected.ht));
            assert!(o <= limit, "{}: o is off by {o:.1e}", case.name);
            assert!(ht <= state_limit, "{}: ht is off by {ht:.1e}", case.name);
            assert!(matches!(outcome.path.route, Route::CpuDecode | Route::CudaDecode));
        }
    });
}

#[test]
fn a_bf16_pool_is_rounded_once() {
    everywhere(|machine| {
        let mut case = Recipe::new("decode, bf16 pool", (2, 4), &requests(&[1, 3, 8])).draw(95);
        case.h0.as_mut().unwrap().iter_mut().for_each(|x| *x = rounded(*x, Dtype::Bf16));
        let expected = case.expected();
        let outcome = step::run(machine, &case, Dtype::Bf16, &[]).unwrap();
        let (o, ht) = (error(&outcome.o, &expected.o), error(&outcome.ht, &expected.ht));
        assert!(o <= machine.limits(&case).0.max(2e-3) && ht <= 2e-3, "{o:.1e}, {ht:.1e}");
    });
}

#[test]
fn padding_is_skipped_and_left_alone() {
    everywhere(|machine| {
        let recipe = Recipe { padding: 3, ..Recipe::new("decode, padding", (1, 3), &requests(&[1, 2, 1, 4])) };
        let case = recipe.draw(96);
        let all = step::run(machine, &case, Dtype::F32, &[]).unwrap();
        let some = step::run(machine, &case, Dtype::F32, &[0, 2]).unwrap();
        let tokens = |n: usize| case.cu[n] as usize * 3 * DIM..case.cu[n + 1] as usize * 3 * DIM;
        for n in [1, 3] {
            assert!(same_bits(&all.o[tokens(n)], &some.o[tokens(n)]), "request {n} is the same beside padding");
            let states = n * 3 * STATE..(n + 1) * 3 * STATE;
            assert!(same_bits(&all.ht[states.clone()], &some.ht[states]), "request {n}");
        }
    });
}

#[test]
fn a_prefill_goes_on_as_decode_steps() {
    everywhere(|machine| {
        let case =
            Recipe { gates: Gates::Softplus(0.02), ..Recipe::new("prefill, then decode", (2, 4), &[0, 140]) }.draw(97);
        let whole = case.expected();
        let first = run(machine, &case.slice(0, 0, 130), &How { pools: Pools::Separate, ..How::default() }).unwrap();
        let (mut o, mut states) = (first.o, first.ht);
        for (start, end) in [(130, 131), (131, 139), (139, 140)] {
            let mut next = case.slice(0, start, end);
            next.h0 = Some(states);
            let outcome = step::run(machine, &next, Dtype::F32, &[]).unwrap();
            o.extend(outcome.o);
            states = outcome.ht;
        }
        let (limit, state_limit) = machine.limits(&case);
        assert!(error(&o, &whole.o) <= limit);
        assert!(error(&states, &whole.ht) <= state_limit);
    });
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let case = Recipe::new("decode, threads", (2, 6), &requests(&[1, 8, 3])).draw(98);
    let first = step::run(&mut Host::new(1), &case, Dtype::F32, &[]).unwrap();
    for threads in [2, 5] {
        let outcome = step::run(&mut Host::new(threads), &case, Dtype::F32, &[]).unwrap();
        assert!(same_bits(&outcome.o, &first.o) && same_bits(&outcome.ht, &first.ht));
    }
}

#[test]
fn nine_tokens_of_a_request_are_a_prefill() {
    let case = Recipe::new("decode, too long", (1, 1), &requests(&[1, 9])).draw(99);
    let error = step::run(&mut Host::new(1), &case, Dtype::F32, &[]).unwrap_err();
    assert_eq!(error, Error::DecodeLength { sequence: 1, most: 8, given: 9 });
}
