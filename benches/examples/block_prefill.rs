//! A prompt through the Gated DeltaNet layers of a model, in windows that fit a budget, then tokens after it: every byte from one
//! arena, planned before it is reserved.
//!
//! `cargo run --release -p terrace-benches --example block_prefill -- --model qwen3.6-27b --layers 1 --tokens 60000 --window 1024
//!  [--prefill-chunk C] [--decode D] [--budget BYTES] [--device cpu|cuda] [--json]`
//!
//! `--window auto` takes the largest window that fits the budget, and says why. A budget that is too small is refused before the
//! first kernel, with what is missing and the window that would fit. Held, or the command fails: each step asks for what was
//! predicted, none leaves its plan, the driver is asked once, and free device memory does not change after the first prompt.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use terrace_benches::block::{Failure, Kind, Options, Report, Runtime, Window};
use terrace_kernels::Dtype;
use terrace_kernels::block::Part;
use terrace_profiles::units::Bytes;

#[derive(Parser)]
#[command(about = "Runs Gated DeltaNet layers over a prompt in windows that fit a budget")]
struct Args {
    /// A model's id, or the path of its config.json
    #[arg(long)]
    model: String,
    /// Gated DeltaNet layers: the model's first
    #[arg(long, value_name = "N", default_value_t = 1)]
    layers: u64,
    /// Mixer and feed-forward, or the mixer alone
    #[arg(long, value_enum, default_value = "layer")]
    part: PartArg,
    /// Tokens of the prompt
    #[arg(long, value_name = "T")]
    tokens: u64,
    /// Tokens resident at once, a multiple of 64; or auto, as many as fit the budget; or all
    #[arg(long, value_name = "W", default_value = "2048")]
    window: WindowArg,
    /// Tokens of a step [default: all]
    #[arg(long, value_name = "C")]
    prefill_chunk: Option<u64>,
    /// Tokens to decode after the prompt
    #[arg(long, value_name = "D", default_value_t = 0)]
    decode: u64,
    /// What activations and states may take, such as 512MiB [default: what they need]
    #[arg(long, value_name = "BYTES")]
    budget: Option<Bytes>,
    /// Where it runs
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceArg,
    /// Activations on CUDA; the CPU computes in fp32
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeArg,
    /// A safetensors file, or a folder of them, with the layers' weights [default: made up]
    #[arg(long, value_name = "PATH")]
    weights: Option<PathBuf>,
    /// The stream that goes in: raw numbers [tokens, hidden] [default: made up]
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Where the stream that comes out of the first prompt goes
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Prompts one after the other; the first warms up and is not timed where there are more [default: 1, on CUDA 4]
    #[arg(long, value_name = "N")]
    rounds: Option<u64>,
    /// And on until so many seconds are over
    #[arg(long, value_name = "S", default_value_t = 0)]
    seconds: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum PartArg {
    Layer,
    Mixer,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DeviceArg {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    Bf16,
    Fp16,
}

#[derive(Clone, Copy)]
struct WindowArg(Window);

impl FromStr for WindowArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let window = match text {
            "auto" => Window::Auto,
            "all" => Window::All,
            number => {
                Window::Tokens(number.parse().map_err(|_| "expected a number of tokens, auto or all".to_owned())?)
            }
        };
        Ok(Self(window))
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let json = args.json;
    match run(args) {
        Ok(report) => {
            let text = if json { serde_json::to_string_pretty(&report).unwrap_or_default() } else { table(&report) };
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(refused @ Failure::Refused(_)) => {
            eprintln!("refused: {refused}");
            ExitCode::from(2)
        }
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<Report, Failure> {
    let device = match (args.device, args.dtype) {
        (DeviceArg::Cpu, _) => Kind::Cpu,
        (DeviceArg::Cuda, DtypeArg::Bf16) => Kind::Cuda(Dtype::Bf16),
        (DeviceArg::Cuda, DtypeArg::Fp16) => Kind::Cuda(Dtype::F16),
    };
    let json = args.json;
    let options = Options {
        model: args.model,
        part: match args.part {
            PartArg::Layer => Part::Layer,
            PartArg::Mixer => Part::Mixer,
        },
        layers: args.layers,
        tokens: args.tokens,
        window: args.window.0,
        chunk: args.prefill_chunk,
        decode: args.decode,
        budget: args.budget,
        device,
        weights: args.weights,
        input: args.input,
        output: args.output,
        rounds: args.rounds.unwrap_or(if args.device == DeviceArg::Cuda { 4 } else { 1 }),
        seconds: args.seconds,
    };
    let mut runtime = Runtime::boot(options)?;
    if !json {
        let choice = runtime.choice();
        let window = choice.window.map_or("all tokens at once".to_owned(), |window| format!("{window} tokens"));
        println!("window {window}: {}\n\n{}\n", choice.why, runtime.boot_summary());
    }
    // Drawn on standard error, and only where that is a terminal.
    let bar = ProgressBar::new(args.tokens);
    let style = ProgressStyle::with_template("{bar:40} {human_pos} of {human_len} tokens, {per_sec}, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let report = runtime.run(&mut |done, all| {
        if done < bar.position() {
            bar.reset();
        }
        bar.set_length(all);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    report
}

fn table(r: &Report) -> String {
    let mib = |bytes: u64| format!("{bytes} B ({:.1} MiB)", bytes as f64 / f64::from(1 << 20));
    let mut rows = vec![
        ("device", format!("{}, {}", r.device, r.element)),
        ("predicted peak of activations", mib(r.predicted_peak)),
        ("measured peak of activations", mib(r.measured_peak)),
        ("of it the residual stream", mib(r.residual)),
        ("states of all layers", mib(r.states)),
        ("budget for both", mib(r.budget)),
        ("weights", mib(r.weights)),
        ("driver allocations at boot, after", format!("{}, {}", r.driver_allocations[0], r.driver_allocations[1])),
        ("free device memory lost", r.free_lost.map_or("of a GPU alone".to_owned(), |bytes| format!("{bytes} B"))),
        ("steps, on script", format!("{}, {}", r.steps, r.steps_on_script)),
        ("kinds of steps as predicted, event by event", r.kinds_as_predicted.to_string()),
        ("prompts", r.rounds.to_string()),
        ("prefill", format!("{:.4} s, {:.0} tokens/s", r.prefill_seconds, r.prefill_tokens_per_second)),
    ];
    if let Some(seconds) = r.decode_seconds_per_token {
        rows.push(("decode", format!("{:.3} ms a token, {:.1} tokens/s", seconds * 1e3, seconds.recip())));
    }
    rows.push(("hash of stream and state", r.hash.clone()));
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:width$}  {value}")).collect::<Vec<_>>().join("\n")
}
