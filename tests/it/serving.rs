//! Will it fit: numbers that servers logged and that FLA was measured at, reproduced from the geometry alone.
//!
//! `profiles/serving/club3090.toml` holds them: goldens of the KV pool and of single allocations, and real configurations
//! with what became of them ([`recorded`]).

use terrace_planner::solve::Control;
use terrace_planner::{Options, plan};
use terrace_profiles::kv::Format;
use terrace_profiles::model::Model;
use terrace_profiles::serving::{Ask, Fit, Held, fit};
use terrace_profiles::synth::{Engine, Lifetimes, Part, Workload, synthesise};
use terrace_profiles::units::{Bytes, Tick};
use terrace_profiles::{Limits, Profile};
use terrace_tests::corpus::{self, root};

mod goldens;
mod recorded;

fn model(name: &str) -> Model {
    Model::named(name).unwrap()
}

fn synth(model: &Model, workload: &Workload) -> Profile {
    synthesise(model, workload, Limits::default()).unwrap()
}

/// The most bytes of a profile alive at once.
fn load(profile: &Profile) -> u64 {
    let mut changes: Vec<(Tick, i64)> = Vec::new();
    for life in profile.lives().unwrap() {
        let bytes = i64::try_from(life.bytes.get()).unwrap();
        changes.extend([(life.birth, bytes), (life.death, -bytes)]);
    }
    changes.sort_unstable();
    let running = changes.iter().scan(0, |live, (_, change)| {
        *live += change;
        Some(*live)
    });
    u64::try_from(running.max().unwrap()).unwrap()
}

/// Bytes of the plan of a workload.
fn planned(model: &Model, workload: &Workload) -> Bytes {
    let verdict = plan(&synth(model, workload), &Options::default(), &Control::default()).unwrap();
    verdict.best().makespan()
}

fn fitted(model: &Model, ask: &Ask) -> Fit {
    fit(model, ask, planned(model, &ask.workload(model))).unwrap()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn workload(engine: Engine, part: Part, lifetimes: Lifetimes, tokens: u64) -> Workload {
    Workload { lifetimes, ..Workload::new(engine, part, tokens) }
}

#[test]
fn the_workspace_of_the_operation_is_within_a_percent_of_what_fla_was_measured_at() {
    for (tokens, measured) in [(60_000, 4360.3), (131_072, 9512.0), (16_384, 1189.0), (4_128, 301.7)] {
        let w = Workload::new(Engine::Fla, Part::GdnOp, tokens);
        let predicted = mib(load(&synth(&model("qwen3.6-27b"), &w)));
        let error = (predicted - measured).abs() / measured;
        assert!(error < 0.01, "{tokens} tokens: {predicted:.1} for {measured} MiB");
        // It stays below: the rest is how PyTorch rounds.
        assert!(predicted < measured + 0.05, "{tokens} tokens");
        assert_eq!(planned(&model("qwen3.6-27b"), &w).get(), load(&synth(&model("qwen3.6-27b"), &w)));
    }
}

#[test]
fn the_peaks_of_a_layer_are_those_of_its_buffers() {
    let peak = |part, lifetimes, tokens| {
        let w = workload(Engine::FlaVllm, part, lifetimes, tokens);
        mib(load(&synth(&model("qwen3.6-27b"), &w)))
    };
    let printed = |mib: f64| format!("{mib:.1}");
    assert_eq!(printed(peak(Part::Mixer, Lifetimes::LastUse, 4128)), "499.3");
    assert_eq!(printed(peak(Part::Mixer, Lifetimes::Frame, 4128)), "776.1");
    for lifetimes in Lifetimes::ALL {
        assert_eq!(printed(peak(Part::Mlp, *lifetimes, 4128)), "491.8");
    }
    // Tokens; mixer as frames hold it, mixer to the last reader, MLP: whole MiB.
    for (tokens, frame, last_use, mlp) in [
        (4_128, 776, 499, 492),
        (8_192, 1_533, 984, 976),
        (16_384, 3_060, 1_961, 1_952),
        (60_000, 11_189, 7_166, 7_148),
        (92_000, 17_153, 10_985, 10_961),
        (180_000, 33_554, 21_485, 21_445),
    ] {
        let whole = |mib: f64| mib.round() as u64;
        assert_eq!(whole(peak(Part::Mixer, Lifetimes::Frame, tokens)), frame, "{tokens}");
        assert_eq!(whole(peak(Part::Mixer, Lifetimes::LastUse, tokens)), last_use, "{tokens}");
        assert_eq!(whole(peak(Part::Mlp, Lifetimes::LastUse, tokens)), mlp, "{tokens}");
    }
}

#[test]
fn a_forward_that_ran_peaks_where_its_synthesised_profile_and_its_caches_do() {
    for tokens in [4_128, 16_384, 60_000] {
        let path = root().join(format!("profiles/recorded/qwen3.6-27b-prefill-{tokens}.profile"));
        let ran = load(&corpus::read(&path)) as f64;
        // The record has its caches inside: keys and values of 16 layers, states and convolution windows of 48.
        let caches = tokens * 16 * 4096 + 48 * (48 * 128 * 128 * 4 + 10_240 * 4 * 2);
        let w = Workload::new(Engine::Fla, Part::Forward, tokens);
        let predicted = (load(&synth(&model("qwen3.6-27b"), &w)) + caches) as f64;
        // transformers keeps a few copies that the pipeline itself does not need.
        assert!(predicted <= ran && predicted > 0.97 * ran, "{tokens} tokens: {predicted} for {ran} bytes");
    }
}

#[test]
fn a_plan_needs_hardly_more_than_what_is_alive() {
    for part in [Part::Mixer, Part::Layer, Part::Mlp, Part::Attention] {
        for engine in Engine::ALL {
            for lifetimes in Lifetimes::ALL {
                let w = workload(*engine, part, *lifetimes, 4128);
                let model = model("qwen3.6-27b");
                let (planned, alive) = (planned(&model, &w).get(), load(&synth(&model, &w)));
                assert!(planned * 100 <= alive * 102, "{part} {engine} {lifetimes}: {planned} for {alive}");
            }
        }
    }
}

#[test]
fn in_windows_a_layer_peaks_at_its_residual_stream_plus_a_constant() {
    let small = if cfg!(debug_assertions) { 1 << 14 } else { 0 };
    for name in ["qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3-next-80b-a3b"] {
        let model = model(name);
        for window in [64, 256, 640, 1024, 4096, 8192] {
            let scratch = |part, tokens| {
                let w = Workload { window: Some(window), ..Workload::new(Engine::Terrace, part, tokens) };
                load(&synth(&model, &w)) - tokens * model.whole.hidden * 2
            };
            for part in [Part::Layer, Part::Mixer, Part::Mlp, Part::Attention] {
                let one = scratch(part, window);
                for tokens in [4_128, 16_384, 60_000, 180_000, 1_000_000] {
                    if tokens > window && (window >= 256 || tokens < 100_000 + small) {
                        let bound = one + (1 << 20);
                        assert!(scratch(part, tokens) <= bound, "{name} {part} {tokens} tokens, window {window}");
                    }
                }
            }
        }
    }
    // And the plan is no worse than the load.
    let model = model("qwen3.6-27b");
    let plan_of = |tokens| {
        let w = Workload { window: Some(640), ..Workload::new(Engine::Terrace, Part::Layer, tokens) };
        planned(&model, &w).get() - tokens * 5120 * 2
    };
    assert!(plan_of(60_000) <= plan_of(640) + (1 << 20));
}

#[test]
fn the_same_question_has_the_same_bytes() {
    for engine in Engine::ALL {
        let w = Workload::new(*engine, Part::Forward, 4128);
        let profile = || terrace_profiles::codec::encode_profile(&synth(&model("qwen3.6-27b"), &w)).unwrap();
        assert_eq!(profile(), profile());
    }
    let model = model("qwen3.6-27b");
    let ask = field_report(65_536, "0.85");
    assert_eq!(fitted(&model, &ask), fitted(&model, &ask));
}

/// The card and the server of the field report.
fn field_report(max_len: u64, util: &str) -> Ask {
    let model = model("qwen3.6-27b");
    let card = terrace_profiles::cards::Card::open("rtx3090").unwrap();
    let weights = Held::weights(&model, "autoround-int4", 1).unwrap();
    let kv = Format::named("turboquant_3bit_nc").unwrap();
    let mut ask = Ask::new(card.usable, kv, weights, max_len);
    ask.util = util.parse().unwrap();
    ask.chunk = Some(4128);
    ask.mtp = 3;
    ask
}

#[test]
fn the_field_reports_request_of_276_mib_is_the_feed_forward() {
    let w = Workload::new(Engine::FlaVllm, Part::Layer, 4128);
    let profile = synth(&model("qwen3.6-27b"), &w);
    // PyTorch rounds a large request up to 2 MiB.
    let asked = |life: &terrace_profiles::Life| life.bytes.get().next_multiple_of(2 << 20) == 276 << 20;
    let lives = profile.lives().unwrap();
    let labels: Vec<&str> =
        lives.iter().filter(|life| asked(life)).map(|life| profile.labels[life.label.0 as usize].as_str()).collect();
    assert_eq!(labels, ["mlp.gate_up"]);
}

#[test]
fn the_field_reports_card_holds_92_000_tokens() {
    let model = model("qwen3.6-27b");
    // Test B: 1.6046 GiB for 65,536 tokens are not there at 0.85.
    let b = fitted(&model, &field_report(65_536, "0.85"));
    assert_eq!((b.blocks_per_request, b.pool.block_size), (31, 4128));
    assert_eq!(format!("{:.4}", b.need.get() as f64 / f64::from(1 << 30)), "1.6046");
    assert!(!b.fits && !b.boots);
    // What does fit: Terrace's windows at 0.95.
    let mut ask = field_report(92_000, "0.95").in_windows(640);
    let fits = fitted(&model, &ask);
    assert!(fits.fits && fits.largest_context >= 92_000, "{fits:#?}");
    let used: u64 = fits.ledger.iter().map(|line| line.bytes.get()).sum();
    assert!(used <= fits.budget.get());
    // Align mode cannot take a smaller step than a block of 4128 tokens; a wider slot has smaller blocks.
    ask.chunk = Some(2048);
    let refused = fitted(&model, &ask);
    assert!(!refused.fits && refused.refused[0].contains("a block, here of 4128 tokens"), "{:?}", refused.refused);
    ask.kv = Format::named("fp8").unwrap();
    assert!(fitted(&model, &ask).refused.is_empty());
}
