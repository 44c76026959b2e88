//! The lines of the ledger: what takes bytes of one card, how many, and how that is known.

use std::fmt;

use crate::error::Error;
use crate::model::{Basis, Model, Weights};
use crate::serving::{Ask, Pool};
use crate::shape::layer::product;
use crate::units::{Bytes, Overflow};

/// A size and how it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its bytes.
    pub bytes: Bytes,
    /// How that is known.
    pub kind: Kind,
    /// Where the number comes from, for people.
    pub how: String,
}

/// How a line of the ledger is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Follows from the geometry.
    Computed,
    /// The peak of a plan.
    Planned,
    /// Somebody measured it, or gave it.
    Measured,
    /// Nobody knows; the number is a common one.
    Assumed,
}

/// A line of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// What takes the bytes.
    pub name: &'static str,
    /// How many, on one card.
    pub bytes: Bytes,
    /// How that is known.
    pub kind: Kind,
    /// The formula with its numbers, or the source.
    pub how: String,
}

/// Graphs of one batch size; servers that capture many take up to 2 GiB.
const GRAPHS: u64 = 512 << 20;
/// The driver's context and the workspaces of libraries.
const LIBRARIES: u64 = 512 << 20;

impl Held {
    /// One card's part of a model's weights in a format, as [`Model::weights`] knows them.
    ///
    /// # Errors
    /// As [`Model::weights`].
    pub fn weights(model: &Model, format: &str, tp: u64) -> Result<Self, Error> {
        let Weights { format, bytes, basis } = model.weights(format)?;
        let cards = tp.max(1);
        let each = Bytes::new(bytes.get().div_ceil(cards)).unwrap_or(bytes);
        let (kind, source) = match basis {
            Basis::Resident => (Kind::Measured, "a server's log"),
            Basis::Counted => (Kind::Computed, "2 bytes a parameter"),
            Basis::Disk => (Kind::Assumed, "the size on disk"),
        };
        let how = match cards {
            1 => format!("{format}, {source}"),
            _ => format!("{format}, {source}, split evenly over {cards} cards"),
        };
        Ok(Self { bytes: each, kind, how })
    }

    /// A size that somebody gave.
    pub fn given(bytes: Bytes) -> Self {
        Self { bytes, kind: Kind::Measured, how: "given".to_owned() }
    }
}

/// What does not depend on the length of a request.
pub(super) fn lines(model: &Model, ask: &Ask, arena: Bytes) -> Result<Vec<Line>, Overflow> {
    let step = ask.step().min(ask.max_len);
    let planned = match ask.window {
        Some(window) => format!("plan of a prefill step of {step} tokens, {} in windows of {window}", ask.engine),
        None => format!("plan of a prefill step of {step} tokens, {}, lives: {}", ask.engine, ask.lifetimes),
    };
    let rows = ask.max_seqs.checked_mul(1 + ask.mtp).ok_or(Overflow)?;
    let line = |name, bytes, kind, how| Line { name, bytes, kind, how };
    let mut lines = vec![
        line("weights", ask.weights.bytes, ask.weights.kind, ask.weights.how.clone()),
        line("activation arena", arena, Kind::Planned, planned),
        line(
            "logits",
            product(&[rows, model.vocab, 2 + 4])?,
            Kind::Computed,
            format!("{} x (1 + {}) rows x {} x (2 + 4) B", ask.max_seqs, ask.mtp, model.vocab),
        ),
    ];
    match ask.overhead {
        Some(bytes) => lines.push(line("graphs and libraries", bytes, Kind::Measured, "given".to_owned())),
        None => {
            let assumed = |bytes, how: &str| (Bytes::new(bytes).unwrap_or(Bytes::ZERO), how.to_owned());
            let (graphs, how) = assumed(GRAPHS, "few batch sizes; many take up to 2 GiB; --overhead replaces it");
            lines.push(line("CUDA graphs", graphs, Kind::Assumed, how));
            let (libraries, how) = assumed(LIBRARIES, "context and workspaces; --overhead replaces it");
            lines.push(line("context and libraries", libraries, Kind::Assumed, how));
        }
    }
    Ok(lines)
}

/// Every line: the two of the pool, for one request of `max_len`, then the others.
pub(super) fn ledger(ask: &Ask, pool: &Pool, fixed: Vec<Line>, scratch: Bytes) -> Result<Vec<Line>, Overflow> {
    let (kv, states) = pool.parts(ask.max_len);
    let each = pool.block_bytes.get();
    let kv = Line {
        name: "KV blocks",
        bytes: pool.bytes_of(kv)?,
        kind: Kind::Computed,
        how: format!("{kv} blocks of {} tokens x {each} B, for {} tokens", pool.block_size, ask.max_len),
    };
    let how = match pool.apart {
        Bytes::ZERO => format!("{states} blocks x {each} B: {} groups x {}", pool.state_groups, pool.slots_of(ask)),
        apart => format!("{} B in a stretch of their own", apart.get()),
    };
    let bytes = pool.bytes_of(states)?.checked_add(pool.apart)?;
    let states = Line { name: "recurrent states", bytes, kind: Kind::Computed, how };
    let mut ledger = vec![kv, states];
    ledger.extend(fixed);
    if scratch > Bytes::ZERO {
        let how = format!(
            "2 x {} cached tokens x {} B, keys and values at 16 bits",
            ask.max_len,
            scratch.get() / ask.max_len / 2
        );
        ledger.push(Line { name: "unpacked KV", bytes: scratch, kind: Kind::Computed, how });
    }
    Ok(ledger)
}

/// Their bytes together.
pub(super) fn total(lines: &[Line]) -> Result<Bytes, Overflow> {
    lines.iter().try_fold(Bytes::ZERO, |sum, line| sum.checked_add(line.bytes))
}

impl Kind {
    /// As it is printed.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Computed => "computed",
            Self::Planned => "planned",
            Self::Measured => "measured",
            Self::Assumed => "assumed",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
