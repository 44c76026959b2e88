//! A layer in windows: the same bits in every window, the same events as predicted, the same sequence in pieces.

use terrace_kernels::block::{Geometry, Part, Source, dry_prefill};
use terrace_kernels::{Cpu, Device, Dtype};
use terrace_profiles::synth::{Engine, Part as Synthesised, Workload, synthesise};
use terrace_profiles::{Limits, Memory, Profile, Recorder};

use super::{Stack, THREADS, model, rms_error, small, stream};

const RANDOM: Source<'_> = Source::Random { seed: 7 };

#[test]
fn no_window_changes_a_bit_of_the_stream_or_the_state() {
    let model = small();
    for tokens in [1, 63, 64, 65, 333] {
        let stream = stream(tokens, 64);
        let mut all = Stack::new(&model, Part::Layer, &RANDOM, 0, 2);
        let (expected, _) = all.step(&stream, None, false);
        assert!(expected.iter().all(|x| x.is_finite()));
        assert!(rms_error(&expected, &stream) > 0.1, "the layers do something");
        for window in [64, 128, 192, 320, 1024] {
            let mut stack = Stack::new(&model, Part::Layer, &RANDOM, 0, 2);
            let (given, _) = stack.step(&stream, Some(window), false);
            assert!(given == expected, "{tokens} tokens in windows of {window}");
            assert!(stack.state() == all.state(), "{tokens} tokens in windows of {window}: the state");
            // And again, in the second step of its key and over a state that holds another sequence.
            stack.reset();
            assert!(stack.step(&stream, Some(window), false).0 == expected, "{tokens} tokens, once more");
        }
    }
}

#[test]
fn a_prompt_in_chunks_is_the_same_prompt() {
    let model = small();
    let stream = stream(300, 64);
    let (expected, _) = Stack::new(&model, Part::Layer, &RANDOM, 0, 2).step(&stream, Some(64), false);
    // At multiples of 64 tokens the chunks of Gated DeltaNet are the same, and so are the bits.
    for (cuts, exact) in [(&[64, 256][..], true), (&[1, 2, 100, 299], false)] {
        let mut stack = Stack::new(&model, Part::Layer, &RANDOM, 0, 2);
        let mut given = Vec::new();
        let bounds: Vec<usize> = [0].iter().chain(cuts).chain(&[300]).copied().collect();
        for pair in bounds.windows(2) {
            given.extend(stack.step(&stream[pair[0] * 64..pair[1] * 64], Some(128), false).0);
        }
        let error = rms_error(&given, &expected);
        assert!(if exact { given == expected } else { error < 1e-5 }, "cuts at {cuts:?}: {error:e}");
    }
}

#[test]
fn decode_steps_go_on_where_a_prefill_ended() {
    let model = model(r#""linear_num_key_heads": 2, "linear_num_value_heads": 6"#);
    let stream = stream(90, 64);
    let (expected, _) = Stack::new(&model, Part::Layer, &RANDOM, 0, 2).step(&stream, None, false);
    let mut stack = Stack::new(&model, Part::Layer, &RANDOM, 0, 2);
    let (mut given, _) = stack.step(&stream[..75 * 64], Some(64), false);
    let mut at = 75;
    for tokens in [1, 1, 3, 8, 1, 1] {
        given.extend(stack.step(&stream[at * 64..(at + tokens) * 64], None, true).0);
        at += tokens;
    }
    let error = rms_error(&given, &expected);
    assert!(at == 90 && error < 1e-5, "{error:e}");
}

fn predicted(model: &terrace_profiles::model::Model, workload: &Workload) -> Profile {
    synthesise(model, workload, Limits::default()).unwrap()
}

#[track_caller]
fn same_events(run: &Profile, predicted: &Profile) {
    for (at, (run, predicted)) in run.events.iter().zip(&predicted.events).enumerate() {
        assert_eq!(run, predicted, "event {at}");
    }
    assert_eq!((run.events.len(), &run.labels), (predicted.events.len(), &predicted.labels));
}

#[test]
fn what_a_run_asks_for_is_what_is_predicted_event_by_event() {
    let models = [small(), model(r#""linear_num_key_heads": 2, "linear_num_value_heads": 6"#)];
    for model in &models {
        for (part, synthesised) in [(Part::Layer, Synthesised::Layer), (Part::Mixer, Synthesised::Mixer)] {
            let layers = if part == Part::Layer { 2 } else { 1 };
            let base = |tokens| Workload {
                layers: (part == Part::Layer).then_some(layers),
                cpu_threads: Some(THREADS),
                ..Workload::new(Engine::Terrace, synthesised, tokens)
            };
            for tokens in [1_usize, 64, 200] {
                for window in [None, Some(64), Some(128), Some(1024)] {
                    let workload = Workload { window, ..base(tokens as u64) };
                    let mut stack = Stack::new(model, part, &RANDOM, 0, layers);
                    let (_, run) = stack.step(&stream(tokens, 64), window, false);
                    same_events(&run, &predicted(model, &workload));
                    let (_, decode) = stack.step(&stream(3, 64), None, true);
                    same_events(&decode, &predicted(model, &Workload { decode: true, ..base(3) }));
                }
            }
        }
    }
}

#[test]
fn a_dry_run_asks_for_the_same_and_computes_nothing() {
    let model = small();
    let device = Device::Cpu(Cpu::new(THREADS));
    let geometry = Geometry::new(&model, Part::Layer, Dtype::F32).unwrap();
    let mut memory = Recorder::dry();
    // The residual stream is its caller's.
    let residual = memory.alloc(geometry.residual(200).unwrap(), "residual").unwrap();
    dry_prefill(&geometry, &device, &mut memory, 200, Some(64)).unwrap();
    memory.free(residual);
    let workload = Workload {
        window: Some(64),
        cpu_threads: Some(THREADS),
        ..Workload::new(Engine::Terrace, Synthesised::Layer, 200)
    };
    same_events(&memory.into_profile("dry"), &predicted(&model, &workload));
}
