//! The layer on a GPU: against transformers' in fp32 and the CPU's, in windows, with redzones around every buffer.

use terrace_kernels::block::{Part, Source};
use terrace_kernels::{Device, Dtype, cuda};
use terrace_profiles::model::Model;
use terrace_profiles::synth::{Engine, Part as Synthesised, Workload, synthesise};
use terrace_profiles::{Limits, Profile};
use terrace_tests::gpu;

use super::goldens::Golden;
use super::{Stack, model, rms_error, stream};

/// In 16 bits, against fp32.
const MOST: f64 = 1e-2;
const ELEMENTS: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// Layers on the GPU, or `None` after a line that says why not; and the device.
fn stack(element: Dtype, model: &Model, source: &Source<'_>, first: u64, count: u64) -> Option<(Stack, cuda::Device)> {
    let backing = gpu::require()?;
    let device = cuda::Device::open(0).unwrap();
    let on = Device::Cuda(device.clone());
    let stack = Stack::on(on, Box::new(backing), element, (model, Part::Layer), source, first..first + count);
    Some((stack, device))
}

#[test]
fn a_layer_is_that_of_transformers_in_16_bits() {
    let _turn = gpu::turn();
    for name in ["qwen3.5", "qwen3-next"] {
        let golden = Golden::read(name);
        let source = Source::Checkpoint(&golden.checkpoint);
        for element in ELEMENTS {
            for window in [None, Some(64), Some(128)] {
                let Some((mut stack, _)) = stack(element, &golden.model, &source, golden.layer, 1) else { return };
                golden.check(&mut stack, window, MOST);
            }
        }
    }
}

#[test]
fn windows_have_the_same_bits_or_say_that_cublaslt_would_not_be_pinned() {
    let _turn = gpu::turn();
    // Wide enough that a projection has many tiles.
    let model = wide();
    let source = Source::Random { seed: 7 };
    for element in ELEMENTS {
        for tokens in [65, 1000, 2500] {
            let stream = stream(tokens, 1024);
            let Some((mut all, _)) = stack(element, &model, &source, 0, 2) else { return };
            let (expected, _) = all.step(&stream, None, false);
            assert!(expected.iter().all(|x| x.is_finite()));
            let (host, _) = Stack::new(&model, Part::Layer, &source, 0, 2).step(&stream[..65 * 1024], None, false);
            let error = rms_error(&expected[..65 * 1024], &host);
            assert!(error <= MOST, "{element}, against the host: {error:e}");
            for window in [64, 320, 640, 1024, 4096] {
                let (mut stack, device) = stack(element, &model, &source, 0, 2).unwrap();
                let (given, _) = stack.step(&stream, Some(window), false);
                let unpinned = device.unpinned_projections();
                let off = rms_error(&given, &expected);
                println!("{element}, {tokens} tokens in windows of {window}: {unpinned} unpinned, off by {off:.1e}");
                assert!(off <= 1e-3, "{tokens} tokens in windows of {window}: {off:e}");
                if unpinned == 0 {
                    assert!(given == expected && stack.state() == all.state(), "{tokens} tokens, window {window}");
                }
            }
        }
    }
}

fn wide() -> Model {
    let mut wide = model(r#""linear_num_key_heads": 4, "linear_num_value_heads": 12"#);
    wide.whole.hidden = 1024;
    wide.whole.mlp = terrace_profiles::shape::layer::Mlp::Dense { intermediate: 3072 };
    wide
}

#[test]
fn what_a_run_on_a_gpu_asks_for_is_what_plan_model_predicts() {
    let _turn = gpu::turn();
    let model = wide();
    let same = |run: &Profile, workload: &Workload| {
        let predicted = synthesise(&model, workload, Limits::default()).unwrap();
        assert_eq!((&run.events, &run.labels), (&predicted.events, &predicted.labels));
    };
    for window in [None, Some(64), Some(1024)] {
        let source = Source::Random { seed: 3 };
        let Some((mut stack, _)) = stack(Dtype::Bf16, &model, &source, 0, 2) else { return };
        let workload =
            |tokens| Workload { layers: Some(2), ..Workload::new(Engine::Terrace, Synthesised::Layer, tokens) };
        let (_, run) = stack.step(&stream(1300, 1024), window, false);
        same(&run, &Workload { window, ..workload(1300) });
        let (_, run) = stack.step(&stream(1, 1024), None, true);
        same(&run, &Workload { decode: true, ..workload(1) });
    }
}

#[test]
fn decode_steps_of_every_length_go_on_where_a_prefill_ended() {
    let _turn = gpu::turn();
    let (model, source) = (wide(), Source::Random { seed: 5 });
    let stream = stream(136, 1024);
    let (expected, _) = Stack::new(&model, Part::Layer, &source, 0, 2).step(&stream, None, false);
    for element in ELEMENTS {
        let Some((mut stack, _)) = stack(element, &model, &source, 0, 2) else { return };
        let mut given = stack.step(&stream[..100 * 1024], Some(64), false).0;
        let mut at = 100;
        for tokens in 1..=8 {
            given.extend(stack.step(&stream[at * 1024..(at + tokens) * 1024], None, true).0);
            at += tokens;
        }
        let error = rms_error(&given, &expected);
        assert!(at == 136 && error <= MOST, "{element}: {error:e}");
    }
}
