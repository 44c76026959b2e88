//! Which window fits a budget: by the plan of the synthesised profile, before anything is reserved.

use std::fmt;

use terrace_kernels::Device;
use terrace_kernels::block::Part;
use terrace_planner::solve::Control;
use terrace_planner::{Effort, Plan, plan};
use terrace_profiles::model::Model;
use terrace_profiles::shape::CHUNK;
use terrace_profiles::synth::{Engine, Part as Synthesised, Workload, synthesise};
use terrace_profiles::units::{Align, Bytes};
use terrace_profiles::{Limits, Profile};

use super::{Failure, Options, Planned, Window, wrong};

/// A window, why it was chosen, and what it needs.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Tokens resident at once; `None` for all of a chunk.
    pub window: Option<u64>,
    /// In words.
    pub why: String,
    /// Bytes for activations and states.
    pub budget: Bytes,
    /// What the largest step needs.
    pub arena: Bytes,
    /// No arena for that step is smaller.
    pub lower_bound: Bytes,
}

/// A budget that is too small.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What was asked for; `None` for all of a chunk.
    pub window: Option<u64>,
    /// What there is.
    pub budget: Bytes,
    /// What the window needs, states included.
    pub needed: Bytes,
    /// The largest window that would fit.
    pub fits: Option<u64>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { budget, needed, .. } = self;
        let missing = needed.get() - budget.get();
        match self.window {
            Some(window) => write!(f, "a window of {window} tokens")?,
            None => f.write_str("all tokens at once")?,
        }
        let plural = if missing == 1 { "byte is" } else { "bytes are" };
        write!(
            f,
            " and the states need {} bytes: {missing} {plural} missing from the budget of {}; ",
            needed.get(),
            budget.get()
        )?;
        match self.fits {
            Some(window) => write!(f, "a window of {window} tokens would fit"),
            None => write!(f, "no window fits, the smallest is {CHUNK} tokens: give shorter chunks or a larger budget"),
        }
    }
}

/// A question of what fits.
pub(super) struct Fit<'a> {
    pub model: &'a Model,
    pub options: &'a Options,
    pub device: &'a Device,
    /// Bytes of all layers' states.
    pub states: Bytes,
}

impl Fit<'_> {
    /// The window, and the plan of each kind of step.
    pub fn choose(&self) -> Result<(Choice, Vec<(Planned, Plan)>), Failure> {
        let (window, why) = match (self.options.window, self.options.budget) {
            (Window::All, _) => (None, "as asked: a chunk at once".to_owned()),
            (Window::Tokens(tokens), _) => (Some(tokens), "as asked".to_owned()),
            (Window::Auto, None) => {
                return Err(wrong("--window auto needs a --budget to fit into"));
            }
            (Window::Auto, Some(budget)) => {
                let Some(window) = self.largest(budget)? else {
                    return Err(self.refused(Some(CHUNK), budget, None)?);
                };
                let needed = self.needed(Some(window))?;
                let next = window + CHUNK;
                let beyond = if window >= self.chunk() {
                    "it holds a whole chunk".to_owned()
                } else {
                    format!("{next} would need {}", self.needed(Some(next))?.get())
                };
                let why = format!(
                    "the largest that fits: it needs {} of the {} bytes of the budget, and {beyond}",
                    needed.get(),
                    budget.get()
                );
                (Some(window), why)
            }
        };
        let plans = self.plans(window, self.options.layers)?;
        let largest = plans.iter().map(|(_, plan)| plan).max_by_key(|plan| plan.makespan());
        let largest = largest.ok_or_else(|| wrong("there are no tokens to run"))?;
        let (arena, lower_bound) = (largest.makespan(), largest.lower_bound().bytes);
        let needed = arena.checked_add(self.states).map_err(wrong)?;
        let budget = self.options.budget.unwrap_or(needed);
        if needed > budget {
            return Err(self.refused(window, budget, Some(needed))?);
        }
        Ok((Choice { window, why, budget, arena, lower_bound }, plans))
    }

    fn refused(&self, window: Option<u64>, budget: Bytes, needed: Option<Bytes>) -> Result<Failure, Failure> {
        let needed = needed.map_or_else(|| self.needed(window), Ok)?;
        Ok(Failure::Refused(Refusal { window, budget, needed, fits: self.largest(budget)? }))
    }

    /// The largest window that fits: bytes never fall where a window grows.
    fn largest(&self, budget: Bytes) -> Result<Option<u64>, Failure> {
        let (mut fits, mut beyond) = (0, self.chunk().div_ceil(CHUNK) + 1);
        while beyond - fits > 1 {
            let middle = fits + (beyond - fits) / 2;
            if self.needed(Some(middle * CHUNK))? <= budget { fits = middle } else { beyond = middle }
        }
        Ok((fits > 0).then_some(fits * CHUNK))
    }

    /// Bytes for activations and states. Two layers repeat what all do.
    fn needed(&self, window: Option<u64>) -> Result<Bytes, Failure> {
        let plans = self.plans(window, self.options.layers.min(2))?;
        let arena = plans.iter().map(|(_, plan)| plan.makespan()).max().unwrap_or_default();
        arena.checked_add(self.states).map_err(wrong)
    }

    fn chunk(&self) -> u64 {
        self.options.chunk.unwrap_or(self.options.tokens).clamp(1, self.options.tokens.max(1))
    }

    /// Each kind of step: a chunk, what is left of the prompt, a decoded token.
    fn plans(&self, window: Option<u64>, layers: u64) -> Result<Vec<(Planned, Plan)>, Failure> {
        let (tokens, chunk) = (self.options.tokens, self.chunk());
        let rest = tokens % chunk;
        let mut kinds = vec![(chunk.min(tokens), false), (rest, false), (1, true)];
        kinds.retain(|(tokens, decode)| *tokens > 0 && (!decode || self.options.decode > 0));
        kinds.dedup();
        let options = terrace_planner::Options { align: Align::DEFAULT, effort: Effort::Quick, ..Default::default() };
        let mut plans = Vec::new();
        for (tokens, decode) in kinds {
            let predicted = self.predicted(tokens, decode, window, layers)?;
            let verdict = plan(&predicted, &options, &Control::default()).map_err(wrong)?;
            plans.push((Planned { tokens, decode, predicted, new: true }, verdict.best().clone()));
        }
        Ok(plans)
    }

    fn predicted(&self, tokens: u64, decode: bool, window: Option<u64>, layers: u64) -> Result<Profile, Failure> {
        let part = match self.options.part {
            Part::Layer => Synthesised::Layer,
            Part::Mixer => Synthesised::Mixer,
        };
        let cpu_threads = match self.device {
            Device::Cpu(cpu) => Some(cpu.threads()),
            _ => None,
        };
        let workload = Workload {
            window: window.filter(|_| !decode),
            layers: Some(layers),
            decode,
            cpu_threads,
            ..Workload::new(Engine::Terrace, part, tokens)
        };
        synthesise(self.model, &workload, Limits::default()).map_err(wrong)
    }
}
