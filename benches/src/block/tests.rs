//! The runtime on the host, at small widths.

use std::path::Path;

use super::*;

const CONFIG: &str = r#"{"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "intermediate_size": 2048,
    "vocab_size": 32, "num_hidden_layers": 8, "full_attention_interval": 4}"#;

fn options(folder: &Path, tokens: u64) -> Options {
    let config = folder.join("config.json");
    std::fs::write(&config, CONFIG).unwrap();
    Options { layers: 3, ..Options::new(config.to_str().unwrap(), tokens) }
}

fn ran(options: Options) -> Report {
    let mut heard = 0;
    let report = Runtime::boot(options).unwrap().run(&mut |done, _| heard = done).unwrap();
    assert_eq!(heard, report.tokens);
    report
}

fn refused(options: Options) -> Refusal {
    match Runtime::boot(options) {
        Err(Failure::Refused(refusal)) => refusal,
        Err(failure) => panic!("{failure}"),
        Ok(_) => panic!("it booted"),
    }
}

#[test]
fn every_step_is_in_plan_and_as_predicted_in_one_reservation() {
    let folder = tempfile::tempdir().unwrap();
    let report = ran(Options {
        window: Window::Tokens(64),
        chunk: Some(130),
        decode: 5,
        rounds: 3,
        ..options(folder.path(), 300)
    });
    assert_eq!((report.rounds, report.steps, report.steps_on_script), (3, 3 * (3 + 5), 3 * (3 + 5)));
    // Chunks of 130, a rest of 40, and a decoded token.
    assert_eq!((report.kinds_as_predicted, report.driver_allocations), (3, [1, 1]));
    assert_eq!(report.measured_peak, report.predicted_peak);
    assert_eq!(report.predicted_peak, report.lower_bound);
    assert_eq!(report.budget, report.predicted_peak + report.states);
    assert!(report.decode_seconds_per_token.unwrap() > 0.0);
}

#[test]
fn the_window_changes_the_peak_and_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let run = |window| ran(Options { window, ..options(folder.path(), 400) });
    let small = run(Window::Tokens(64));
    let large = run(Window::Tokens(256));
    let all = run(Window::All);
    assert!(small.predicted_peak < large.predicted_peak && large.predicted_peak < all.predicted_peak);
    assert_eq!(small.hash, large.hash);
    assert_eq!(small.hash, all.hash);
}

#[test]
fn a_budget_one_byte_too_small_is_refused_with_what_is_missing_and_what_would_fit() {
    let folder = tempfile::tempdir().unwrap();
    let asked = Options { window: Window::Tokens(256), ..options(folder.path(), 1000) };
    let enough = Bytes::new(ran(asked.clone()).budget).unwrap();
    ran(Options { budget: Some(enough), ..asked.clone() });
    let short = Bytes::new(enough.get() - 1).unwrap();
    let refusal = refused(Options { budget: Some(short), ..asked.clone() });
    let expected = Refusal { window: Some(256), budget: short, needed: enough, fits: Some(192) };
    assert_eq!(refusal, expected);
    assert_eq!(
        refusal.to_string(),
        format!(
            "a window of 256 tokens and the states need {} bytes: 1 byte is missing from the budget of {}; a window of 192 tokens \
             would fit",
            enough.get(),
            short.get()
        )
    );
    // And it does fit; so does what is chosen for that budget.
    ran(Options { budget: Some(short), window: Window::Tokens(192), ..asked.clone() });
    let chosen = ran(Options { budget: Some(short), window: Window::Auto, ..asked.clone() });
    assert_eq!(chosen.window, Some(192));
    assert!(chosen.why.ends_with(&format!("and 256 would need {}", enough.get())), "{}", chosen.why);
    // Nothing fits in less than the stream.
    let none = refused(Options { budget: Bytes::new(1000), window: Window::Auto, ..asked });
    assert_eq!((none.window, none.fits), (Some(64), None));
    assert!(none.to_string().ends_with("give shorter chunks or a larger budget"), "{none}");
}

#[test]
fn weights_and_streams_come_from_files_and_go_to_them() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let stream: Vec<u8> = (0..100 * 64).flat_map(|at| ((at % 17) as f32 / 8.0 - 1.0).to_le_bytes()).collect();
    std::fs::write(&input, &stream).unwrap();
    let run = |chunk| {
        let base = options(folder.path(), 100);
        ran(Options { input: Some(input.clone()), output: Some(output.clone()), chunk, ..base });
        std::fs::read(&output).unwrap()
    };
    let whole = run(None);
    assert_eq!(whole.len(), stream.len());
    assert_ne!(whole, stream);
    assert_eq!(run(Some(64)), whole, "a prompt cut at a multiple of 64 tokens");
    let missing = options(folder.path(), 100);
    let weights = Some(folder.path().join("no.safetensors"));
    let failure = Runtime::boot(Options { weights, ..missing }).err().unwrap().to_string();
    assert!(failure.contains("no.safetensors"), "{failure}");
}
