//! What can be asked for: who runs which part of a forward over how many tokens.

use std::fmt;
use std::str::FromStr;

use crate::error::quoted;

/// Who runs the forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// fla-core 0.6.
    Fla,
    /// vLLM with its copy of FLA's kernels.
    FlaVllm,
    /// Terrace: Gated DeltaNet in windows.
    Terrace,
}

/// Which part of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// All of it: embedding, layers, logits.
    Forward,
    /// One Gated DeltaNet layer: mixer and feed-forward, with the residual stream.
    Layer,
    /// The mixer of a Gated DeltaNet layer, with the residual stream.
    Mixer,
    /// The Gated DeltaNet operation alone: what it takes beyond its inputs, its output and its final state.
    GdnOp,
    /// A feed-forward, with the residual stream.
    Mlp,
    /// The mixer of a full-attention layer, with the residual stream.
    Attention,
}

/// When a buffer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lifetimes {
    /// After its last reader: what a plan can reach.
    LastUse,
    /// When Python's frames let go of it: what PyTorch holds.
    Frame,
}

/// What runs, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Workload {
    /// Who runs it.
    pub engine: Engine,
    /// Which part.
    pub part: Part,
    /// When buffers end.
    pub lifetimes: Lifetimes,
    /// Tokens of the prompt, or of one chunk of it.
    pub tokens: u64,
    /// Tokens that attention looks at, cached ones included; no fewer than `tokens`.
    pub context: u64,
    /// Sequences that the tokens come from.
    pub sequences: u64,
    /// Tokens that are resident at once, a multiple of 64; for Terrace alone. `None` takes all tokens at once, and only the
    /// kernels work in windows, of [`Window::DEFAULT`](crate::shape::Window::DEFAULT).
    pub window: Option<u64>,
    /// The first layers of a forward, `None` for all; or so many Gated DeltaNet layers one after the other, `None` for one.
    pub layers: Option<u64>,
    /// The tokens are the next ones of a sequence that is decoded, from 1 to [`MAX_DECODE`]; for Terrace's layers alone.
    pub decode: bool,
    /// Threads of the host that run it in fp32, instead of a GPU in 16 bits; for Terrace's layers alone.
    pub cpu_threads: Option<u32>,
    /// Cards that heads and feed-forward are split over.
    pub tp: u64,
    /// Rows of logits at the end of a forward; 0 leaves its end out.
    pub logits_rows: u64,
}

impl Workload {
    /// So many tokens of one sequence on one card, in the lifetimes that are usual for the engine.
    pub fn new(engine: Engine, part: Part, tokens: u64) -> Self {
        let lifetimes = Lifetimes::of(engine);
        let (sequences, tp, logits_rows) = (1, 1, 1);
        Self {
            engine,
            part,
            lifetimes,
            tokens,
            context: tokens,
            sequences,
            window: None,
            layers: None,
            decode: false,
            cpu_threads: None,
            tp,
            logits_rows,
        }
    }
}

impl Lifetimes {
    /// What holds where nobody plans: PyTorch's frames for FLA, the last reader for Terrace.
    pub fn of(engine: Engine) -> Self {
        match engine {
            Engine::Fla | Engine::FlaVllm => Self::Frame,
            Engine::Terrace => Self::LastUse,
        }
    }
}

/// The most tokens of a sequence in a decode step.
pub const MAX_DECODE: u64 = 8;

/// The most tokens of a workload.
pub const MAX_TOKENS: u64 = 1 << 40;

/// Names of the variants, both ways: as they are printed and read.
macro_rules! names {
    ($type:ident, $what:literal, $($variant:ident $name:literal),+) => {
        impl $type {
            /// Every one, in order.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// As it is printed and read.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::ALL.iter().copied().find(|one| one.name() == text).ok_or_else(|| {
                    let known: Vec<&str> = Self::ALL.iter().map(|one| one.name()).collect();
                    format!("{} is no {}; give one of {}", quoted(text), $what, known.join(", "))
                })
            }
        }
    };
}

names!(Engine, "engine", Fla "fla", FlaVllm "fla-vllm", Terrace "terrace");
names!(Part, "part", Forward "forward", Layer "layer", Mixer "mixer", GdnOp "gdn-op", Mlp "mlp", Attention "attention");
names!(Lifetimes, "lifetimes", LastUse "last-use", Frame "frame");
