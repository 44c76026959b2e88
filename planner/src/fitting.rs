//! Will a server fit: the ledger of `terrace_profiles::serving` with an arena that was really planned.
//!
//! ```text
//!   Ask --workload--> Profile --plan--> Planned --serving::fit--> Fit      answer: and if not, what to change
//!    ^                                             |
//!    '------------- another length ----------------'                     the largest context; sweep: by format and chunk
//! ```
//!
//! Equal workloads are planned once. Nothing here depends on the number of threads.

use std::collections::{BTreeMap, HashMap};

use terrace_profiles::Limits;
use terrace_profiles::kv::Format;
use terrace_profiles::model::Model;
use terrace_profiles::serving::{self, Ask, Fit, Given, MAX_LEN, Pool, Share};
use terrace_profiles::synth::{Workload, synthesise};
use terrace_profiles::units::Bytes;

use crate::error::Error;
use crate::options::Options;
use crate::plan::Plan;
use crate::planning::plan;
use crate::report::Summary;
use crate::solve::Control;

/// What a plan says of the activations of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The bytes of the arena.
    pub bytes: Bytes,
    /// What is alive at its peak: label and bytes, the largest first.
    pub at_peak: Vec<(String, Bytes)>,
    /// The largest buffer of each label, as it is asked for, the largest first.
    pub requests: Vec<(String, Bytes)>,
}

/// Answers about one model; each workload is planned once.
#[derive(Debug)]
pub struct Fitter<'a> {
    model: &'a Model,
    threads: usize,
    known: HashMap<Workload, Planned>,
}

/// The answer to an ask.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The ledger and the verdict.
    pub fit: Fit,
    /// The arena in it.
    pub arena: Planned,
    /// What to change, each computed; empty where it fits.
    pub choices: Vec<Choice>,
}

/// One change and what comes of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// What changes, as it is written on the command line.
    pub what: String,
    /// The answer with it.
    pub fit: Fit,
}

/// The largest context, by KV format and prefill chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// The context that the scale ends at: the largest that is asked for.
    pub most: u64,
    /// The chunks of each row, in order; the first may be [`None`]: one block of the format, the least that align mode takes.
    pub chunks: Vec<Option<u64>>,
    /// One for each format, the widest first.
    pub rows: Vec<SweepRow>,
}

/// The contexts of one KV format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SweepRow {
    /// The format.
    pub kv: String,
    /// Bytes of one token of one KV head.
    pub slot: u64,
    /// Tokens of a block.
    pub block_size: u64,
    /// One for each of the chunks.
    pub cells: Vec<SweepCell>,
}

/// What one KV format and one chunk allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SweepCell {
    /// Tokens of a prefill step.
    pub chunk: u64,
    /// Whether a server takes that chunk.
    pub allowed: bool,
    /// The largest context that fits; 0 if none does.
    pub largest: u64,
}

/// Windows of all layers of a workload, the most that is planned: some seconds.
const MOST_WINDOWS: u64 = 1 << 17;
/// Chunks of a sweep.
const CHUNKS: [u64; 5] = [1024, 2048, 4096, 8192, 16384];
/// Changes that are put together.
const MOST_CHANGES: usize = 4;
/// The highest share of a card that is proposed, in hundredths: beyond it little is left for whatever else the card runs.
const MOST_UTIL: u128 = 95;

impl Planned {
    fn new(plan: &Plan) -> Self {
        let mut at_peak: BTreeMap<String, Bytes> = BTreeMap::new();
        for row in Summary::of(plan).peak {
            let bytes = at_peak.entry(row.label).or_insert(Bytes::ZERO);
            *bytes = bytes.checked_add(row.bytes).unwrap_or(*bytes);
        }
        let mut requests: BTreeMap<String, Bytes> = BTreeMap::new();
        for slot in plan.slots() {
            let bytes = requests.entry(plan.label(slot).to_owned()).or_insert(Bytes::ZERO);
            *bytes = slot.bytes.max(*bytes);
        }
        let sorted = |rows: BTreeMap<String, Bytes>| {
            let mut rows: Vec<(String, Bytes)> = rows.into_iter().collect();
            // Stable, so that equal sizes stay in the order of their labels.
            rows.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            rows
        };
        Self { bytes: plan.makespan(), at_peak: sorted(at_peak), requests: sorted(requests) }
    }
}

impl<'a> Fitter<'a> {
    /// None yet; plans will use so many threads.
    pub fn new(model: &'a Model, threads: usize) -> Self {
        Self { model, threads, known: HashMap::new() }
    }

    /// The planned arena of a workload.
    ///
    /// # Errors
    /// As [`synthesise`] and [`plan()`], and a workload of too many windows.
    pub fn planned(&mut self, workload: &Workload) -> Result<Planned, Error> {
        if let Some(known) = self.known.get(workload) {
            return Ok(known.clone());
        }
        let layers = workload.layers.unwrap_or(self.model.layers.len() as u64);
        let windows = workload.window.map_or(1, |window| workload.tokens.div_ceil(window.max(1)));
        if windows.saturating_mul(layers) > MOST_WINDOWS {
            let reason = format!(
                "{windows} windows in each of {layers} layers are more than {MOST_WINDOWS} in all; choose a larger --window, \
                 smaller steps (--prefill-chunk), or fewer layers"
            );
            return Err(terrace_profiles::Error::Selection { name: self.model.id.clone(), reason }.into());
        }
        let profile = synthesise(self.model, workload, Limits::default())?;
        let control = Control { threads: self.threads, ..Control::default() };
        let arena = Planned::new(plan(&profile, &Options::default(), &control)?.best());
        self.known.insert(workload.clone(), arena.clone());
        Ok(arena)
    }

    /// The ledger and verdict of an ask, with the largest context that a ledger made anew for it allows.
    ///
    /// # Errors
    /// As [`Fitter::planned`] and [`serving::fit`].
    pub fn fit(&mut self, ask: &Ask) -> Result<Fit, Error> {
        let arena = self.planned(&ask.workload(self.model))?;
        let mut fit = serving::fit(self.model, ask, arena.bytes)?;
        fit.largest_context = self.largest(ask, &fit);
        Ok(fit)
    }

    /// The whole answer: ledger, verdict, arena, and what to change where it does not fit.
    ///
    /// # Errors
    /// As [`Fitter::fit`].
    pub fn answer(&mut self, ask: &Ask) -> Result<Answer, Error> {
        let fit = self.fit(ask)?;
        let arena = self.planned(&ask.workload(self.model))?;
        // What the pool of a log would be after a change, no log says.
        if fit.fits || ask.pool != Given::Nothing {
            return Ok(Answer { fit, arena, choices: Vec::new() });
        }
        let mut choices: Vec<Choice> = Vec::new();
        for changed in changes(self.model, ask, &fit) {
            // A change that contradicts the model is none, and one refused chunk says it for all below it.
            let Ok(better) = self.fit(&changed) else { continue };
            let first = fit.refused.is_empty() && choices.iter().all(|choice| choice.fit.refused.is_empty());
            if better.refused.is_empty() || first {
                choices.push(Choice { what: serving::difference(ask, &changed), fit: better });
            }
        }
        if choices.iter().all(|choice| !choice.fit.fits) {
            choices.extend(self.together(ask, &fit));
        }
        Ok(Answer { fit, arena, choices })
    }

    /// Several changes together: one after the other the first that is enough, or else the one that allows the largest
    /// context. `None` if fewer than two help.
    fn together(&mut self, ask: &Ask, fit: &Fit) -> Option<Choice> {
        let (mut now, mut fit) = (ask.clone(), fit.clone());
        let mut count = 0;
        while !fit.fits && count < MOST_CHANGES {
            let mut best: Option<(Ask, Fit)> = None;
            for ask in changes(self.model, &now, &fit) {
                let Ok(changed) = self.fit(&ask) else { continue };
                let best_yet = best.as_ref().map_or(&fit, |(_, best)| best);
                let better = changed.fits || changed.largest_context > best_yet.largest_context;
                if !best_yet.fits && better && changed.refused.is_empty() {
                    best = Some((ask, changed));
                }
            }
            let Some(better) = best else { break };
            (now, fit) = better;
            count += 1;
        }
        (count > 1).then(|| Choice { what: serving::difference(ask, &now), fit })
    }

    /// The largest context of each KV format, or of the one that is asked for, with each prefill chunk.
    ///
    /// # Errors
    /// As [`Fitter::fit`].
    pub fn sweep(&mut self, ask: &Ask, formats: &[Format]) -> Result<Sweep, Error> {
        let model = self.model;
        let mut chunks: Vec<u64> = CHUNKS.into_iter().chain(ask.chunk).collect();
        chunks.sort_unstable();
        chunks.dedup();
        let mut formats = formats.to_vec();
        let slot = |format: &Format| format.slot(model.whole.head_dim);
        formats.sort_by_key(|format| std::cmp::Reverse(slot(format)));
        let mut rows = Vec::new();
        let mut blocks = false;
        for kv in formats {
            let pool = Pool::new(model, &kv, ask.tp, ask.mtp, ask.mode)?;
            blocks |= pool.chunk_floor().is_some();
            let mut cells = Vec::new();
            for chunk in pool.chunk_floor().into_iter().chain(chunks.iter().copied()) {
                let ask = Ask { kv: kv.clone(), chunk: Some(chunk), ..ask.clone() };
                let fit = self.fit(&ask)?;
                cells.push(SweepCell { chunk, allowed: fit.refused.is_empty(), largest: fit.largest_context });
            }
            let slot = slot(&kv);
            rows.push(SweepRow { kv: kv.id, slot, block_size: pool.block_size, cells });
        }
        let chunks = blocks.then_some(None).into_iter().chain(chunks.into_iter().map(Some)).collect();
        Ok(Sweep { most: most(model, ask), chunks, rows })
    }

    /// The largest context, from the one that the ledger gives for an arena of this length: at another, it is another.
    fn largest(&mut self, ask: &Ask, fit: &Fit) -> u64 {
        let model = self.model;
        if !fit.refused.is_empty() {
            return 0;
        }
        if ask.pool != Given::Nothing {
            return fit.largest_context;
        }
        let guess = self.guess(ask, fit);
        let mut holds = |len: u64| {
            let ask = Ask { max_len: len, ..ask.clone() };
            // A length whose sizes are no sizes does not fit.
            let arena = self.planned(&ask.workload(model));
            arena.is_ok_and(|arena| serving::fit(model, &ask, arena.bytes).is_ok_and(|fit| fit.fits))
        };
        let most = most(model, ask);
        // What holds, and what does not: away from the guess in doubled steps, then between the two.
        let (mut low, mut high) = (0, most.saturating_add(1));
        let mut step = 1;
        if guess == 0 || holds(guess) {
            low = guess;
            while low + step < high && holds(low + step) {
                low += step;
                step *= 2;
            }
            high = high.min(low + step);
        } else {
            high = guess;
            while step < high && !holds(high - step) {
                high -= step;
                step *= 2;
            }
            low = low.max(high.saturating_sub(step));
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if holds(middle) { low = middle } else { high = middle }
        }
        low
    }

    /// The largest context if arenas grew evenly with the length, which but for rounding they do.
    fn guess(&mut self, ask: &Ask, fit: &Fit) -> u64 {
        let model = self.model;
        let half = Ask { max_len: (ask.max_len / 2).max(1), ..ask.clone() };
        let Ok(arena) = self.planned(&half.workload(model)) else { return fit.largest_context };
        let wide = |n: u64| i128::from(n);
        let (from, to) = (wide(half.max_len), wide(ask.max_len));
        let slope = wide(fit.arena.get()) - wide(arena.bytes.get());
        last(most(model, ask), |len| {
            let bytes = wide(fit.arena.get()) + slope * (wide(len) - to) / (to - from).max(1);
            let bytes = u64::try_from(bytes.max(0)).ok().and_then(Bytes::new);
            let ask = Ask { max_len: len.max(1), ..ask.clone() };
            bytes.is_some_and(|bytes| serving::fit(model, &ask, bytes).is_ok_and(|fit| fit.fits))
        })
    }
}

/// The largest of the numbers up to `most` for which it holds, where it holds for all below; 0 if for none.
fn last(most: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if holds(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

/// Every change of an ask, the mildest first. Where a KV format has larger blocks, the chunk grows with them.
fn changes(model: &Model, ask: &Ask, fit: &Fit) -> Vec<Ask> {
    let util = enough(ask, fit).map(|util| Ask { util, ..ask.clone() });
    let others = serving::changes(model, ask).into_iter().map(|mut changed| {
        let pool = Pool::new(model, &changed.kv, changed.tp, changed.mtp, changed.mode);
        let floor = pool.ok().and_then(|pool| pool.chunk_floor());
        if changed.kv != ask.kv
            && let (Some(floor), Some(chunk)) = (floor, changed.chunk)
        {
            changed.chunk = Some(chunk.max(floor));
        }
        changed
    });
    util.into_iter().chain(others).collect()
}

/// The longest context that is looked at.
fn most(model: &Model, ask: &Ask) -> u64 {
    model.max_context.unwrap_or(MAX_LEN).max(ask.max_len)
}

/// The least share of the card, in hundredths, under which all that is in the ledger fits; `None` if that is too much to
/// propose, or what is asked for anyway.
fn enough(ask: &Ask, fit: &Fit) -> Option<Share> {
    let taken: u128 = fit.ledger.iter().map(|line| u128::from(line.bytes.get())).sum();
    let hundredths = (taken * 100).div_ceil(u128::from(ask.usable.get().max(1)));
    let share: Share = if hundredths <= MOST_UTIL { format!("0.{hundredths:02}").parse().ok()? } else { return None };
    (share > ask.util).then_some(share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_profiles::serving::Held;

    fn ask(max_len: u64) -> (Model, Ask) {
        let model = Model::named("qwen3.6-27b").unwrap();
        let weights = Held::weights(&model, "autoround-int4", 1).unwrap();
        let mut ask = Ask::new("23.56GiB".parse().unwrap(), Format::named("tq3").unwrap(), weights, max_len);
        (ask.chunk, ask.mtp) = (Some(4128), 3);
        (model, ask)
    }

    #[test]
    fn the_largest_context_fits_and_the_next_does_not() {
        // In pieces, and in one piece, where the arena grows with the length.
        for chunk in [Some(4128), None] {
            let (model, ask) = ask(60_000);
            let ask = Ask { chunk, util: "0.93".parse().unwrap(), ..ask };
            let mut fitter = Fitter::new(&model, 1);
            let largest = fitter.fit(&ask).unwrap().largest_context;
            assert!(largest > 0 && largest < 262_144);
            for (len, fits) in [(largest, true), (largest + 1, false)] {
                let fit = fitter.fit(&Ask { max_len: len, ..ask.clone() }).unwrap();
                assert_eq!((fit.fits, fit.largest_context), (fits, largest), "{len}");
            }
        }
    }

    #[test]
    fn the_share_that_is_enough_is_enough_and_a_hundredth_less_is_not() {
        let (model, ask) = ask(92_000);
        let ask = Ask { util: "0.85".parse().unwrap(), ..ask };
        let mut fitter = Fitter::new(&model, 1);
        let answer = fitter.answer(&ask).unwrap();
        assert!(!answer.fit.fits);
        assert_eq!(answer.choices[0].what, "--util 0.91");
        assert!(answer.choices[0].fit.fits);
        let less = Ask { util: "0.9".parse().unwrap(), ..ask };
        assert!(!fitter.fit(&less).unwrap().fits);
    }

    #[test]
    fn a_sweep_knows_the_least_chunk_of_each_format() {
        let (model, ask) = ask(92_000);
        let ask = Ask { util: "0.93".parse().unwrap(), ..ask };
        let formats = [Format::named("tq3").unwrap(), Format::named("fp8").unwrap()];
        let sweep = Fitter::new(&model, 1).sweep(&ask, &formats).unwrap();
        assert_eq!(sweep.chunks[..4], [None, Some(1024), Some(2048), Some(4096)]);
        assert_eq!(sweep.rows.iter().map(|row| row.kv.as_str()).collect::<Vec<_>>(), ["fp8", "turboquant_3bit_nc"]);
        for row in &sweep.rows {
            assert_eq!(row.cells.len(), sweep.chunks.len());
            for cell in &row.cells {
                assert_eq!(cell.allowed, cell.chunk >= row.block_size, "{}", row.kv);
                assert!(cell.allowed || cell.largest == 0);
            }
        }
    }
}
