//! A small inference runtime around the block: layers whose every byte comes from one arena that was planned before it was
//! reserved. `examples/block_prefill` is its command.
//!
//! ```text
//! boot   model, budget -> window -> workloads -> synthesised profiles -> plans -> one reservation -> weights, states, preplans
//! run    chunk by chunk a step: residual, layers, free; then decode steps; and so on, for as long as was asked
//! hold   each step asks for what was predicted, event by event; none leaves its plan; the driver is asked once
//! ```
//!
//! The first pass of each kind of step is compared with the prediction it was planned from; the others are replayed.

mod fit;
mod host;
mod run;

use std::fmt;
use std::path::PathBuf;

use terrace_allocator::host::HostBacking;
use terrace_allocator::{Allocator, Backing, Config, Stream};
use terrace_kernels::block::{Checkpoint, Geometry, Layer, Part, Source, State};
use terrace_kernels::{Cpu, Device, Dtype};
use terrace_profiles::Profile;
use terrace_profiles::model::{Mixer, Model};
use terrace_profiles::units::{Align, Bytes};

use fit::Fit;
pub use fit::{Choice, Refusal};
pub use run::Report;

/// Where a runtime runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This process's processors, in fp32.
    Cpu,
    /// CUDA device 0, in bf16 or fp16.
    Cuda(Dtype),
}

/// Tokens resident at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// As many as fit the budget.
    Auto,
    /// All of a chunk.
    All,
    /// So many.
    Tokens(u64),
}

/// What is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// A model's id, or the path of its config.json.
    pub model: String,
    /// How much of each layer.
    pub part: Part,
    /// Gated DeltaNet layers, the model's first.
    pub layers: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Tokens resident at once.
    pub window: Window,
    /// Tokens of a step of the scheduler; `None` for all.
    pub chunk: Option<u64>,
    /// Tokens that are decoded after the prompt.
    pub decode: u64,
    /// Bytes for activations and states; `None` for what is needed.
    pub budget: Option<Bytes>,
    /// Where.
    pub device: Kind,
    /// Safetensors files; made up where there are none.
    pub weights: Option<PathBuf>,
    /// The stream that goes in, raw `[tokens, hidden]` in the device's numbers; made up where there is none.
    pub input: Option<PathBuf>,
    /// Where the stream that comes out of the first round goes.
    pub output: Option<PathBuf>,
    /// Prompts, one after the other, each from an empty state.
    pub rounds: u64,
    /// And on until so many seconds are over.
    pub seconds: u64,
}

impl Options {
    /// A layer on the host in windows of 640.
    pub fn new(model: &str, tokens: u64) -> Self {
        Self {
            model: model.to_owned(),
            part: Part::Layer,
            layers: 1,
            tokens,
            window: Window::Tokens(640),
            chunk: None,
            decode: 0,
            budget: None,
            device: Kind::Cpu,
            weights: None,
            input: None,
            output: None,
            rounds: 1,
            seconds: 0,
        }
    }
}

/// Why there was no run.
#[derive(Debug)]
pub enum Failure {
    /// The budget is too small: said before the first kernel, and before anything is reserved.
    Refused(Refusal),
    /// There is no such device here.
    NoDevice(String),
    /// Anything else, as a sentence.
    Wrong(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::NoDevice(reason) | Self::Wrong(reason) => f.write_str(reason),
        }
    }
}

/// Anything that goes wrong, as a sentence.
#[allow(clippy::needless_pass_by_value, reason = "it takes what `map_err` gives")]
fn wrong(error: impl ToString) -> Failure {
    Failure::Wrong(error.to_string())
}

/// A runtime that stands ready: memory reserved and planned, weights in place.
pub struct Runtime {
    options: Options,
    device: Device,
    geometry: Geometry,
    choice: Choice,
    steps: Vec<Planned>,
    arena: Allocator,
    layers: Vec<(Layer, State)>,
    weights: Bytes,
    states: Bytes,
    boot: String,
}

/// A kind of step and what was predicted for it.
struct Planned {
    tokens: u64,
    decode: bool,
    predicted: Profile,
    /// No step of it has run yet.
    new: bool,
}

impl Planned {
    fn key(&self) -> String {
        format!("{}/{}", if self.decode { "decode" } else { "prefill" }, self.tokens)
    }
}

impl Runtime {
    /// Chooses a window, plans every step, reserves once and loads the weights.
    ///
    /// # Errors
    /// [`Failure::Refused`] before anything is reserved; a model, a file or a device that is not there.
    pub fn boot(options: Options) -> Result<Self, Failure> {
        let model = Model::open(&options.model).map_err(wrong)?;
        let (device, dtype) = open(options.device)?;
        let geometry = Geometry::new(&model, options.part, dtype).map_err(wrong)?;
        let indices: Vec<u64> =
            (0..).zip(&model.layers).filter(|(_, mixer)| **mixer == Mixer::Gdn).map(|(at, _)| at).collect();
        let layers = usize::try_from(options.layers).unwrap_or(usize::MAX);
        if layers == 0 || layers > indices.len() {
            return Err(wrong(format!("{} has Gated DeltaNet layers 1 to {}", model.id, indices.len())));
        }
        let each = |bytes: Bytes| {
            bytes.align_up(Align::DEFAULT).and_then(|bytes| bytes.checked_mul(options.layers)).map_err(wrong)
        };
        let (weights, states) = (each(geometry.weights().total())?, each(geometry.state().total())?);
        let fit = Fit { model: &model, options: &options, device: &device, states };
        let (choice, plans) = fit.choose()?;

        let total = weights.checked_add(choice.budget).map_err(wrong)?;
        let backing: Box<dyn Backing> = match options.device {
            Kind::Cpu => Box::new(HostBacking::new()),
            Kind::Cuda(_) => {
                Box::new(terrace_allocator::cuda::CudaBacking::new(0).map_err(|e| Failure::NoDevice(e.to_string()))?)
            }
        };
        // The plans are those of the prediction, which each first step is compared with here.
        let config = Config { improve: false, verify_steps: 0, ..Config::new(total) };
        let arena = Allocator::new(backing, config).map_err(wrong)?;
        let checkpoint = options.weights.as_deref().map(Checkpoint::open).transpose().map_err(wrong)?;
        let source = checkpoint.as_ref().map_or(Source::Random { seed: 1 }, Source::Checkpoint);
        let mut loaded = Vec::new();
        for index in indices.into_iter().take(layers) {
            let span = |bytes, label| arena.alloc(bytes, Stream(0), label).map_err(wrong);
            let weights = span(geometry.weights().total(), "weights")?;
            let state = span(geometry.state().total(), "state")?;
            // SAFETY: the arena gave both for as long as it lives, which is as long as the runtime, for these alone.
            unsafe {
                let layer = Layer::load(&device, geometry, weights, &source, index).map_err(wrong)?;
                loaded.push((layer, State::new(state)));
            }
        }
        let mut steps = Vec::new();
        for (step, plan) in plans {
            arena.device().preplan(step.key().as_bytes(), &plan).map_err(wrong)?;
            steps.push(step);
        }
        let boot = arena.boot_summary().to_string();
        Ok(Self { device, geometry, choice, steps, arena, layers: loaded, weights, states, boot, options })
    }

    /// Which window, why, and what it needs.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Where the bytes are.
    pub fn boot_summary(&self) -> &str {
        &self.boot
    }
}

/// Opens a device, its kernels compiled.
fn open(kind: Kind) -> Result<(Device, Dtype), Failure> {
    match kind {
        Kind::Cpu => Ok((Device::Cpu(Cpu::default()), Dtype::F32)),
        Kind::Cuda(dtype) => {
            let device =
                terrace_kernels::cuda::Device::open(0).map_err(|error| Failure::NoDevice(error.to_string()))?;
            let element = match dtype {
                Dtype::F16 => terrace_kernels::tile::Element::Fp16,
                _ => terrace_kernels::tile::Element::Bf16,
            };
            device.prepare(element).map_err(wrong)?;
            Ok((Device::Cuda(device), dtype))
        }
    }
}

#[cfg(test)]
mod tests;
