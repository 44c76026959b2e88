//! The rows of the peers' own test grids: those with heads of 128 and no more key heads than value heads against the oracle, at
//! the limits or tighter, and the others as refusals that say what is served.

use half::bf16;
use terrace_kernels::{
    Block, Cpu, Design, Device, Dtype, Prefill, Sequences, States, Tensor, TensorMut, Window, Workspace, prefill,
};
use terrace_tests::gdn::cases::{Gates, Keys, Recipe};
use terrace_tests::gdn::machine::{Host, Machine};
use terrace_tests::gdn::{Case, How, Pools, check};

use super::small::on_cuda;

fn everywhere(cases: &[(Case, How)]) {
    let mut host = Host::new(2);
    let run = |machine: &mut dyn Machine| {
        for (case, how) in cases {
            check(machine, case, how);
        }
    };
    run(&mut host);
    on_cuda(run);
}

fn packed(lengths: &[i64]) -> Vec<i64> {
    std::iter::once(0).chain(lengths.iter().scan(0, |sum, x| Some((*sum += x, *sum).1))).collect()
}

/// FLA's `test_chunk`: B equal sequences, fp16, correlated keys, gates `logsigmoid / norm`, a part of them masked.
#[test]
fn flash_linear_attention_equal_sequences() {
    let rows = [
        // B, T, H, HV, scale, gate norm, masked gates, l2norm in the kernel.
        (4, 1024, 4, 4, 0.1, 1.0, 1.0, false),
        (4, 1024, 4, 4, 0.1, 1.0, 0.0, true),
        (2, 1500, 4, 4, 0.1, 10.0, 0.0, false),
        (2, 1024, 4, 8, 0.1, 1.0, 0.0, true),
        (2, 320, 2, 8, 1.0, 0.1, 0.5, false),
    ];
    let cases: Vec<_> = rows
        .into_iter()
        .enumerate()
        .map(|(row, (batch, tokens, keys, values, scale, norm, masked, l2norm))| {
            let recipe = Recipe {
                keys: if l2norm { Keys::Raw } else { Keys::Positive },
                gates: Gates::LogSigmoid(norm),
                dtype: Dtype::F16,
                h0: row % 2 == 1,
                ..Recipe::new(&format!("FLA row {row}"), (keys, values), &packed(&vec![tokens; batch]))
            };
            let mut case = recipe.draw(40 + row as u64);
            let count = case.g.len();
            case.g[..(count as f32 * masked) as usize].fill(0.0);
            (Case { scale: Some(scale), l2norm, state_limit: 1.5e-2, ..case }, How::default())
        })
        .collect();
    everywhere(&cases);
}

/// FLA's varlen bounds, with random initial states, and its `solve_tril`'s.
#[test]
fn flash_linear_attention_packed_sequences() {
    let bounds: [&[i64]; 4] =
        [&[0, 15], &[0, 256, 500, 1000], &[0, 15, 100, 300, 1200, 2000], &[0, 1, 100, 300, 1200, 2048]];
    let cases = bounds.map(|cu| {
        let recipe = Recipe {
            keys: Keys::Positive,
            gates: Gates::LogSigmoid(1.0),
            dtype: Dtype::F16,
            ..Recipe::new(&format!("FLA varlen {cu:?}"), (2, 2), cu)
        };
        (recipe.draw(50), How { metadata: true, ..How::default() })
    });
    everywhere(&cases);
}

/// FlashInfer's heads, lengths, types and ways of gating; its alpha is our `e^g`.
#[test]
fn flashinfer() {
    let lengths: [&[i64]; 10] = [
        &[64],
        &[128],
        &[256],
        &[256, 256],
        &[64, 128, 512],
        &[31],
        &[61],
        &[121],
        &[511, 501],
        &[31, 63, 93, 123, 150, 500],
    ];
    let heads = [(1, 1), (3, 3), (1, 2), (2, 4)];
    let mut cases = Vec::new();
    for (row, lengths) in lengths.into_iter().enumerate() {
        let dtype = if row % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 };
        let heads = heads[row % heads.len()];
        let gates = if row % 3 == 0 { Gates::Constant(0.0) } else { Gates::LogUniform };
        let recipe =
            Recipe { gates, dtype, ..Recipe::new(&format!("FlashInfer {lengths:?}"), heads, &packed(lengths)) };
        let mut case = Case { scale: (row % 2 == 0).then_some(1.0), ..recipe.draw(60 + row as u64) };
        if row % 4 == 3 {
            case.beta.fill(1.0);
        }
        let pools = if row % 2 == 0 { Pools::InPlace(Dtype::F32) } else { Pools::Shuffled(Dtype::F32) };
        cases.push((case, How { pools, every: 1 + (row % 2) as u32, ..How::default() }));
    }
    for heads in [(16, 32), (16, 64)] {
        cases.push((Recipe::new(&format!("FlashInfer {heads:?}"), heads, &[0, 64, 192]).draw(70), How::default()));
    }
    let context =
        Recipe { gates: Gates::Constant(0.9995_f32.ln()), ..Recipe::new("FlashInfer CP", (1, 1), &[0, 96, 96, 396]) };
    cases.push((context.draw(71), How::default()));
    let mut late = Recipe::new("FlashInfer block-end decay", (1, 2), &packed(&[64, 111, 192])).draw(72);
    let near_one = |x: &mut f32, share: f32| *x = 0.99 + 0.01 * share;
    let shares = late.beta.clone();
    for ((g, beta), share) in late.g.iter_mut().zip(&mut late.beta).zip(shares) {
        near_one(beta, share);
        near_one(g, 1.0 - share);
        *g = g.ln();
    }
    cases.push((late, How::default()));
    everywhere(&cases);
}

/// FlashQLA's bounds and gates: A from 0 in the first head to 16 in the last.
#[test]
fn flashqla() {
    let bounds: [(&[i64], usize, (usize, usize)); 7] = [
        (&[0, 4096], 0, (4, 4)),
        (&[0, 410, 841, 1135], 0, (4, 8)),
        (&[0, 211, 985], 15, (2, 8)),
        (&[0, 47, 128], 0, (4, 16)),
        (&[0, 517, 883, 1010], 0, (2, 4)),
        (&[0, 73, 115, 209], 47, (4, 4)),
        (&[0, 3, 20, 52, 60, 61, 93, 110, 141, 160, 171, 200], 0, (2, 8)),
    ];
    let cases = bounds.map(|(cu, padding, heads)| {
        let recipe = Recipe { gates: Gates::PerHead, padding, ..Recipe::new(&format!("FlashQLA {cu:?}"), heads, cu) };
        (recipe.draw(80), How { window: 256, ..How::default() })
    });
    everywhere(&cases);
}

/// What a call with heads of that many elements says.
fn refusal(keys: u64, values: u64, dim: u64) -> String {
    let rows = |heads: u64| vec![bf16::ONE; (2 * heads * dim) as usize];
    let (q, v, gates) = (rows(keys), rows(values), vec![0.0_f32; 2 * values as usize]);
    let (mut o, canary) = (rows(values), rows(values));
    let mut blocks = [Block::ZERO; 1];
    let args = Prefill {
        q: Tensor::new(&q[..], [2, keys, dim]),
        k: Tensor::new(&q[..], [2, keys, dim]),
        v: Tensor::new(&v[..], [2, values, dim]),
        g: Tensor::gates(&gates[..], [2, values]),
        beta: Tensor::gates(&gates[..], [2, values]),
        o: TensorMut::new(&mut o[..], [2, values, dim]),
        sequences: Sequences::default(),
        states: States::Dropped,
        checkpoints: None,
        scale: None,
        l2norm: false,
        window: Window::DEFAULT,
        design: Design::Fused,
    };
    let error = prefill(&Device::Cpu(Cpu::new(1)), args, Workspace::blocks(&mut blocks)).unwrap_err();
    assert_eq!(o, canary, "nothing is written");
    error.to_string()
}

/// The rows with other head sizes (FLA), and with more query heads than value heads (FlashInfer).
#[test]
fn rows_that_are_not_served_say_what_is() {
    for (keys, values, dim) in [(4, 4, 64), (3, 3, 60), (4, 4, 100), (4, 4, 256), (2, 4, 16)] {
        assert_eq!(refusal(keys, values, dim), format!("q has {dim} elements per head; only 128 are served"));
    }
    for (keys, values) in [(4, 1), (6, 2), (16, 8), (3, 4)] {
        assert_eq!(
            refusal(keys, values, 128),
            format!(
                "{keys} key heads and {values} value heads are not served: value heads must be a multiple of key heads, \
                 from 1 to 1024"
            )
        );
    }
}
