//! `plan model`: the profile of a forward that nobody has to run, as text.

use std::path::Path;

use terrace_profiles::model;
use terrace_profiles::synth::{Engine, Lifetimes, Workload, synthesise};
use terrace_profiles::{Limits, text};

use super::args::Model;
use super::output::Output;
use super::{Console, DONE, Failure, failed_write};

pub fn run(args: &Model, console: &mut Console<'_>) -> Result<u8, Failure> {
    let model = model::Model::open(&args.model)?;
    let profile = synthesise(&model, &workload(args), Limits::default())?;
    let mut bytes = Vec::new();
    text::write_text(&profile, &mut bytes).map_err(|source| failed_write(Path::new("-"), source))?;
    Output::to(&args.output, console.out).write(&bytes)?;
    Ok(DONE)
}

fn workload(args: &Model) -> Workload {
    let engine = args.engine.unwrap_or_else(|| engine_of(args.window));
    Workload {
        lifetimes: args.lifetimes.unwrap_or_else(|| Lifetimes::of(engine)),
        context: args.context.unwrap_or(args.tokens),
        sequences: args.sequences,
        window: args.window,
        layers: args.layers,
        decode: args.decode,
        cpu_threads: args.cpu_threads,
        tp: args.tp,
        ..Workload::new(engine, args.part, args.tokens)
    }
}

/// Who runs a forward where nobody says so: windows are Terrace's, and the rest of the world serves with vLLM.
pub fn engine_of(window: Option<u64>) -> Engine {
    if window.is_some() { Engine::Terrace } else { Engine::FlaVllm }
}
