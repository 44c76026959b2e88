//! The arguments of the `plan` command. Doc comments are its help.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use terrace_profiles::kv;
use terrace_profiles::serving::{self, MambaMode, Share};
use terrace_profiles::synth::{Engine, Lifetimes, Part};
use terrace_profiles::units::{Align, Bytes, Offset};
use terrace_profiles::{Limits, StepSelector, import};

use crate::options::{DEFAULT_BUDGET_NODES, FreeRule, LaneRule, Options};
use crate::problem::Reserved;
use crate::report::ReportFormat;
use crate::spaces::Space;

/// Plan every byte an inference forward needs, before it runs
#[derive(Debug, Parser)]
#[command(name = "plan", version, max_term_width = 100)]
#[command(after_help = "Exit status: 0 done, or it fits; 1 a finding (does not fit, grew); 2 bad usage or bad input.")]
pub struct Args {
    /// Colour in reports for a terminal
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// If standard output is a terminal
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Turn a recorded trace into a profile
    Import(Import),
    /// Plan the arena of a profile or trace, and report it
    Solve(Solve),
    /// Report a saved plan
    Show(Show),
    /// Compare two saved plans: bytes gained and lost, by buffer
    Diff(Diff),
    /// Write the profile of a model's forward that nobody has to run
    Model(Model),
    /// Will it fit: the ledger of a card that serves a model, and what to change if not
    Fit(Fit),
    /// Plan what budget files name, and fail if it grew
    Check(Check),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// What to read of a source.
#[derive(Debug, clap::Args)]
pub struct Input {
    /// Only this device of a snapshot that holds several
    #[arg(long, value_name = "N")]
    pub device: Option<u32>,
    /// Only these steps: a number (from 0), a key such as prefill/4128, or all (solve: each on its own; import: all in one
    /// profile)
    #[arg(long, value_name = "N|KEY|all")]
    pub step: Option<StepSelector>,
    /// Most memory that reading may take
    #[arg(long, value_name = "BYTES", default_value = "8GiB")]
    pub max_memory: Bytes,
}

#[derive(Debug, clap::Args)]
pub struct Import {
    /// The trace, or - for standard input; gzip is seen by itself
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// Where the profile goes; - for standard output
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// What SRC is written in: auto, torch-snapshot, steps, rmm, minimalloc or profile
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub format: import::Format,
    /// Write the binary form instead of text
    #[arg(long)]
    pub binary: bool,
    #[command(flatten)]
    pub input: Input,
}

#[derive(Debug, clap::Args)]
pub struct Solve {
    /// Profiles, or traces of any format that import reads; - for standard input
    #[arg(value_name = "INPUT", required = true)]
    pub inputs: Vec<PathBuf>,
    /// Save the plan
    #[arg(short = 'o', long, value_name = "PLAN")]
    pub plan: Option<PathBuf>,
    /// The plan must fit under this, such as 24GiB; status 1 if it does not
    #[arg(long, value_name = "BYTES")]
    pub capacity: Option<Bytes>,
    /// Round sizes up to this and place at multiples of it
    #[arg(long, value_name = "BYTES", default_value = "512")]
    pub align: Align,
    /// Most nodes that the exact search and the local search may visit, each
    #[arg(long, value_name = "N", default_value_t = DEFAULT_BUDGET_NODES)]
    pub budget_nodes: u64,
    /// Stop after this long with the best plan so far, such as 10s; then two runs may differ
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub time_limit: Option<Duration>,
    /// Threads; the plan is the same for any number [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Keep as many offsets of this older plan as the arena's size allows
    #[arg(long, value_name = "PLAN")]
    pub keep: Option<PathBuf>,
    /// Bytes that no buffer may take, such as 0..4KiB; may be given several times
    #[arg(long, value_name = "FROM..TO", value_parser = reserved)]
    pub reserve: Vec<Reserved>,
    /// The largest piece of memory there is: the arena is cut into such, and no buffer lies across a cut
    #[arg(long, value_name = "BYTES")]
    pub segment: Option<Bytes>,
    /// A memory that the arena is made of, such as 256KiB, or 2MiB/1MiB for 2 MiB in segments of at most 1 MiB; may be given
    /// several times, the one to fill first first
    #[arg(long, value_name = "BYTES[/SEGMENT]", value_parser = space)]
    pub space: Vec<Space>,
    /// When buffers of different streams may share bytes
    #[arg(long, value_name = "RULE", default_value = "separate")]
    pub lanes: Lanes,
    /// Which free ends a buffer's life
    #[arg(long, value_name = "RULE", default_value = "completed")]
    pub free: Free,
    /// The report: text, json, html, svg, dot, torch-snapshot or tflite (offline plan of TensorFlow Lite Micro)
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub format: ReportFormat,
    /// Where the report goes [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// In a text or json report: what PyTorch's caching allocator would take for the same requests
    #[arg(long)]
    pub caching: bool,
    #[command(flatten)]
    pub input: Input,
}

#[derive(Debug, clap::Args)]
pub struct Show {
    /// The plan; - for standard input
    #[arg(value_name = "PLAN")]
    pub plan: PathBuf,
    /// The report: text, json, html, svg, dot, torch-snapshot or tflite (offline plan of TensorFlow Lite Micro)
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub format: ReportFormat,
    /// Where the report goes [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct Diff {
    /// The plan to compare with
    #[arg(value_name = "OLD")]
    pub old: PathBuf,
    /// The plan to compare
    #[arg(value_name = "NEW")]
    pub new: PathBuf,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct Model {
    /// A model's id, or the path of its config.json
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Tokens of the prompt, or of one chunk of it
    #[arg(long, value_name = "T")]
    pub tokens: u64,
    /// Tokens resident at once, a multiple of 64; for --engine terrace
    #[arg(long, value_name = "W")]
    pub window: Option<u64>,
    /// Only the first layers of a forward
    #[arg(long, value_name = "N")]
    pub layers: Option<u64>,
    /// Cards that heads and feed-forward are split over; the profile is that of one
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tp: u64,
    /// Who runs it: fla, fla-vllm or terrace [default: terrace with --window, else fla-vllm]
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<Engine>,
    /// What of it: forward, layer, mixer, gdn-op, mlp or attention
    #[arg(long, value_name = "PART", default_value = "forward")]
    pub part: Part,
    /// When a buffer ends: last-use, or frame, as PyTorch holds it [default: last-use for terrace, else frame]
    #[arg(long, value_name = "RULE")]
    pub lifetimes: Option<Lifetimes>,
    /// Tokens that attention looks at, cached ones included [default: those of --tokens]
    #[arg(long, value_name = "N")]
    pub context: Option<u64>,
    /// Sequences that the tokens come from
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub sequences: u64,
    /// Where the profile goes [default: standard output]
    #[arg(short, long, value_name = "FILE", default_value = "-", hide_default_value = true)]
    pub output: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct Fit {
    /// A model's id, or the path of its config.json
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// A card such as rtx3090, its memory such as 24GiB, or auto: what nvidia-smi says is free
    #[arg(long, value_name = "CARD|BYTES|auto")]
    pub gpu: String,
    /// How keys and values are kept: bf16, fp8, turboquant_3bit_nc, q4_0, ...
    #[arg(long, value_name = "FORMAT", required_unless_present = "sweep", value_parser = kv_format)]
    pub kv: Option<kv::Format>,
    /// The weights' format, or what one card holds of them [default: the model's first recorded format, else bf16]
    #[arg(long, value_name = "FORMAT|BYTES")]
    pub weights: Option<String>,
    /// The longest request, prompt and answer together [default: the longest that the model was made for]
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<u64>,
    /// Requests at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub max_num_seqs: u64,
    /// Tokens of a prefill step [default: the whole prompt at once]
    #[arg(long, value_name = "N")]
    pub prefill_chunk: Option<u64>,
    /// Further tokens that the model's own head guesses at once
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub mtp: u64,
    /// Cards that share the model; the ledger is that of one
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tp: u64,
    /// Which recurrent states the server keeps: none, align (with a prefix cache) or all
    #[arg(long, value_name = "MODE", default_value = "align")]
    pub mamba_mode: MambaMode,
    /// The part of the card that the server may take
    #[arg(long, value_name = "F", default_value = "0.9")]
    pub util: Share,
    /// What graphs and libraries take, in place of the assumptions
    #[arg(long, value_name = "BYTES")]
    pub overhead: Option<Bytes>,
    /// Tokens resident at once, a multiple of 64: the forward is Terrace's
    #[arg(long, value_name = "W")]
    pub window: Option<u64>,
    /// Who runs the prefill: fla, fla-vllm or terrace [default: terrace with --window, else fla-vllm]
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<Engine>,
    /// When a buffer ends: last-use, or frame, as PyTorch holds it [default: last-use for terrace, else frame]
    #[arg(long, value_name = "RULE")]
    pub lifetimes: Option<Lifetimes>,
    /// What a log says that the pool has; 2.17GiB stands for all that is printed so
    #[arg(long, value_name = "BYTES", value_parser = serving::available, conflicts_with_all = ["blocks", "sweep"])]
    pub available: Option<Bytes>,
    /// The blocks that a log says the pool has
    #[arg(long, value_name = "N", conflicts_with = "sweep")]
    pub blocks: Option<u64>,
    /// A request that failed, as an out-of-memory message says (tried to allocate): name the buffer
    #[arg(long, value_name = "BYTES", conflicts_with = "sweep")]
    pub failed: Option<Bytes>,
    /// Tabulate and draw the largest context by KV format (or for the one given) and prefill chunk
    #[arg(long)]
    pub sweep: bool,
    /// The report
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub format: FitFormat,
    /// Also draw the sweep into this file, as SVG
    #[arg(short, long, value_name = "FILE", requires = "sweep")]
    pub output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FitFormat {
    /// For a terminal
    Text,
    /// One object on one line
    Json,
}

#[derive(Debug, clap::Args)]
pub struct Check {
    /// Budget files
    #[arg(value_name = "BUDGETS", required = true)]
    pub budgets: Vec<PathBuf>,
    /// Write what is planned now into the files, and print what changes
    #[arg(long)]
    pub update: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Lanes {
    /// Never: each stream has an arena of its own
    Separate,
    /// Where a recorded wait orders them
    Ordered,
    /// Whenever the ticks allow
    Shared,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Free {
    /// The one that the allocator completed
    Completed,
    /// The one that the program asked for
    Requested,
}

impl Color {
    pub fn wanted(self, terminal: bool) -> bool {
        match self {
            Self::Auto => terminal,
            Self::Always => true,
            Self::Never => false,
        }
    }
}

impl Input {
    pub fn options(&self, format: import::Format) -> import::Options {
        import::Options { format, device: self.device, limits: Limits { memory: self.max_memory } }
    }
}

impl Solve {
    pub fn options(&self) -> Options {
        Options {
            align: self.align,
            capacity: self.capacity,
            reserved: self.reserve.clone(),
            segment: self.segment,
            spaces: self.space.clone(),
            lanes: match self.lanes {
                Lanes::Separate => LaneRule::Separate,
                Lanes::Ordered => LaneRule::Ordered,
                Lanes::Shared => LaneRule::Shared,
            },
            free: match self.free {
                Free::Completed => FreeRule::Completed,
                Free::Requested => FreeRule::Requested,
            },
            budget_nodes: self.budget_nodes,
            ..Options::default()
        }
    }

    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// The argument that takes a single problem, if one is given.
    pub fn one_problem(&self) -> Option<String> {
        match (&self.plan, self.format) {
            (Some(_), _) => Some("-o".to_owned()),
            _ if self.keep.is_some() => Some("--keep".to_owned()),
            (None, ReportFormat::Text | ReportFormat::Json) => None,
            (None, format) => Some(format!("--format {format}")),
        }
    }

    /// Refuses arguments that contradict each other; the error is a sentence.
    pub fn check(&self) -> Result<(), String> {
        let is_dash = |path: &PathBuf| path.as_os_str() == "-";
        if self.plan.as_ref().is_some_and(is_dash) && self.output.as_ref().is_none_or(is_dash) {
            return Err("-o - writes the plan to standard output; say with --output where the report goes".to_owned());
        }
        if self.caching && !matches!(self.format, ReportFormat::Text | ReportFormat::Json) {
            let format = self.format;
            return Err(format!("--caching adds to a text or json report, and --format {format} has no place for it"));
        }
        if self.inputs.iter().chain(&self.keep).filter(|input| is_dash(input)).count() > 1 {
            return Err("standard input can be read once; name - once".to_owned());
        }
        Ok(())
    }
}

fn kv_format(name: &str) -> Result<kv::Format, String> {
    kv::Format::named(name).map_err(|error| error.to_string())
}

/// Reads `256KiB` or `2MiB/1MiB`.
fn space(text: &str) -> Result<Space, String> {
    let bytes = |text: &str| text.parse::<Bytes>().map_err(|error| error.to_string());
    let (capacity, segment) = text.split_once('/').map_or((text, None), |(all, part)| (all, Some(part)));
    Ok(Space { capacity: bytes(capacity)?, segment: segment.map(bytes).transpose()? })
}

/// Reads `0..4KiB`.
fn reserved(text: &str) -> Result<Reserved, String> {
    let wrong = || format!("'{text}' is not a range of bytes: write it as 0..4KiB, the smaller first");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    let offset = |text: &str| text.parse::<Bytes>().ok().and_then(|bytes| Offset::new(bytes.get())).ok_or_else(wrong);
    let reserved = Reserved { from: offset(from)?, to: offset(to)? };
    if reserved.from < reserved.to { Ok(reserved) } else { Err(wrong()) }
}

/// Reads `10s`, `500ms` or `2m`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is not a time: write a number with ms, s or m, such as 10s");
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(split);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let millis = match unit {
        "ms" => Some(number),
        "s" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        _ => None,
    };
    millis.map(Duration::from_millis).ok_or_else(wrong)
}
