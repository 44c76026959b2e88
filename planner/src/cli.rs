//! The `plan` command: what its arguments mean and what its exit status says.
//!
//! [`run`] is the whole command as a function from arguments to bytes and a status, so tests call it in process. Status 0:
//! done, or it fits; 1: a finding (does not fit, grew); 2: bad usage or bad input. Files appear whole or not at all
//! (`cli/output.rs`).

mod args;
mod check;
mod fit;
mod model;
mod output;
mod watch;

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::Path;

use clap::{CommandFactory, Parser};
use terrace_profiles::{Profile, StepSelector, codec, import, text};

use crate::plan::Plan;
use crate::planning::{Verdict, plan, replan};
use crate::report::{self, ReportFormat};
use crate::solve::Control;
use crate::{Error, graph};
use args::{Args, Command, Diff, Import, Input, Show, Solve};
use output::Output;

/// Where the command writes, and whether a person watches.
pub struct Console<'a> {
    /// Standard output: what was asked for.
    pub out: &'a mut dyn Write,
    /// Standard error: what went wrong.
    pub err: &'a mut dyn Write,
    /// Whether `out` is a terminal: decides about colour where `--color auto`.
    pub out_is_terminal: bool,
    /// Whether standard error is a terminal: a long solve then shows progress there.
    pub err_is_terminal: bool,
}

/// Done, or it fits.
pub const DONE: u8 = 0;
/// A finding: does not fit, or grew.
pub const FINDING: u8 = 1;
/// Bad usage or bad input.
pub const BAD_INPUT: u8 = 2;

/// Why the command cannot go on.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Plan(#[from] Error),
    #[error(transparent)]
    Profile(#[from] terrace_profiles::Error),
    #[error("{0}")]
    Usage(String),
    #[error("{name}: {source}")]
    Write { name: String, source: io::Error },
    /// Whoever read our output went away; there is nobody to tell.
    #[error("the reader of the output went away")]
    Closed,
}

/// Runs the command; `args` begins with the program's name. Returns the exit status.
pub fn run(args: impl IntoIterator<Item = OsString>, console: &mut Console<'_>) -> u8 {
    let args = match Args::try_parse_from(args) {
        Ok(args) => args,
        Err(refused) => return usage(&refused, console),
    };
    let done = match &args.command {
        Command::Import(import) => run_import(import, console),
        Command::Solve(solve) => run_solve(solve, args.color.wanted(console.out_is_terminal), console),
        Command::Show(show) => run_show(show, args.color.wanted(console.out_is_terminal), console),
        Command::Diff(diff) => run_diff(diff, console),
        Command::Model(model) => model::run(model, console),
        Command::Fit(fit) => fit::run(fit, args.color.wanted(console.out_is_terminal), console),
        Command::Check(check) => check::run(check, args.color.wanted(console.out_is_terminal), console),
        Command::Completions { shell } => {
            clap_complete::generate(*shell, &mut Args::command(), "plan", console.out);
            Ok(DONE)
        }
    };
    done.unwrap_or_else(|failure| complain(&failure, console))
}

/// Help and version are what was asked for; anything else is a usage error.
fn usage(refused: &clap::Error, console: &mut Console<'_>) -> u8 {
    let (to, status): (&mut dyn Write, u8) =
        if refused.use_stderr() { (console.err, BAD_INPUT) } else { (console.out, DONE) };
    // If even that cannot be written there is nowhere left to say so.
    let _ = write!(to, "{}", refused.render());
    status
}

fn complain(failure: &Failure, console: &mut Console<'_>) -> u8 {
    if matches!(failure, Failure::Closed) {
        return DONE;
    }
    let _ = writeln!(console.err, "error: {failure}");
    BAD_INPUT
}

fn run_import(args: &Import, console: &mut Console<'_>) -> Result<u8, Failure> {
    // One file holds one profile, so all steps of it stay together.
    let step = args.input.step.as_ref().filter(|step| **step != StepSelector::All);
    let profiles = selected(&args.input, step, args.format, &args.source)?;
    let [profile] = &profiles[..] else {
        return Err(Failure::Usage(several(&args.source, &profiles, "an imported file holds one profile")));
    };
    let mut bytes = Vec::new();
    if args.binary {
        bytes = codec::encode_profile(profile)?;
    } else {
        text::write_text(profile, &mut bytes).map_err(|source| failed_write(&args.output, source))?;
    }
    Output::to(&args.output, console.out).write(&bytes)?;
    Ok(DONE)
}

fn run_solve(args: &Solve, colour: bool, console: &mut Console<'_>) -> Result<u8, Failure> {
    args.check().map_err(Failure::Usage)?;
    let mut problems = Vec::new();
    let mut status = DONE;
    for source in &args.inputs {
        match selected(&args.input, args.input.step.as_ref(), import::Format::Auto, source) {
            Ok(profiles) => problems.extend(profiles),
            // The other inputs are still worth solving; the status remembers.
            Err(failure) => status = complain(&failure, console),
        }
    }
    if args.one_problem().is_some_and(|_| problems.len() > 1) {
        let what = args.one_problem().unwrap_or_default();
        return Err(Failure::Usage(several(&args.inputs[0], &problems, &format!("{what} takes one problem"))));
    }
    let old = args.keep.as_deref().map(read_plan).transpose()?;
    // To a terminal or a pipe each report goes out when it is there; to a file all go at once, if none failed.
    let to_file = args.output.as_deref().filter(|path| path.as_os_str() != "-");
    let mut reports = Vec::new();
    for profile in &problems {
        let solved = watch::watched(args.time_limit, console.err_is_terminal, &profile.name, |cancel, progress| {
            let control = Control { threads: args.threads(), cancel: Some(cancel), progress: Some(progress) };
            match &old {
                None => plan(profile, &args.options(), &control),
                Some(old) => replan(profile, old, &args.options(), &control),
            }
        });
        let verdict = match solved {
            Ok(verdict) => verdict,
            Err(error) => {
                status = complain(&Failure::Plan(error), console);
                continue;
            }
        };
        let beside = match &verdict {
            Verdict::Fits(plan) if args.caching => {
                let beside = report::Beside::of(profile, plan);
                Some(beside.map_err(|error| Failure::Usage(format!("{}: {error}", profile.name)))?)
            }
            _ => None,
        };
        let written = match (&beside, args.format) {
            (Some(beside), ReportFormat::Json) => beside.write_json(&verdict, &mut reports),
            (beside, format) => {
                report_on(&verdict, format, colour && to_file.is_none(), &mut reports)?;
                beside.map_or(Ok(()), |beside| beside.write_text(&mut reports))
            }
        };
        written.map_err(|source| failed_write(Path::new("-"), source))?;
        if let (Some(path), Verdict::Fits(plan)) = (&args.plan, &verdict) {
            Output::to(path, console.out).write(&plan.encode()?)?;
        }
        if !verdict.fits() && status == DONE {
            status = FINDING;
        }
        if to_file.is_none() {
            Output::to(Path::new("-"), console.out).write(&reports)?;
            reports.clear();
        }
    }
    match to_file {
        Some(path) if status != BAD_INPUT => Output::to(path, console.out).write(&reports)?,
        _ => {}
    }
    Ok(status)
}

fn run_show(args: &Show, colour: bool, console: &mut Console<'_>) -> Result<u8, Failure> {
    let plan = read_plan(&args.plan)?;
    let path = args.output.as_deref().unwrap_or(Path::new("-"));
    let mut bytes = Vec::new();
    let colour = colour && path.as_os_str() == "-";
    report_on(&Verdict::Fits(Box::new(plan)), args.format, colour, &mut bytes)?;
    Output::to(path, console.out).write(&bytes)?;
    Ok(DONE)
}

fn run_diff(args: &Diff, console: &mut Console<'_>) -> Result<u8, Failure> {
    let diff = report::diff(&read_plan(&args.old)?, &read_plan(&args.new)?);
    let mut bytes = Vec::new();
    let written = if args.json { diff.write_json(&mut bytes) } else { diff.write_text(&mut bytes) };
    written.map_err(|source| failed_write(Path::new("-"), source))?;
    Output::to(Path::new("-"), console.out).write(&bytes)?;
    Ok(DONE)
}

fn report_on(verdict: &Verdict, format: ReportFormat, colour: bool, out: &mut Vec<u8>) -> Result<(), Failure> {
    let written = match format {
        ReportFormat::Dot => out.write_all(graph::dot(verdict.best())?.as_bytes()),
        ReportFormat::TfLite => out.write_all(&report::tflite(verdict.best())?),
        _ => report::write(verdict, format, colour, out),
    };
    written.map_err(|source| failed_write(Path::new("-"), source))
}

/// The profiles in a source, or in the steps of it that are asked for.
fn selected(
    input: &Input,
    step: Option<&StepSelector>,
    format: import::Format,
    source: &Path,
) -> Result<Vec<Profile>, Failure> {
    let options = input.options(format);
    let profiles = if source.as_os_str() == "-" {
        import::read(io::stdin().lock(), "standard input", &options)?
    } else {
        import::read_file(source, &options)?
    };
    let Some(step) = step else { return Ok(profiles) };
    let mut steps = Vec::new();
    for profile in profiles {
        steps.extend(profile.select(step)?);
    }
    Ok(steps)
}

fn read_plan(path: &Path) -> Result<Plan, Failure> {
    let name = path.display().to_string();
    let mut bytes = Vec::new();
    let read = if path.as_os_str() == "-" {
        io::stdin().lock().read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut bytes))
    };
    read.map_err(|source| terrace_profiles::Error::io(&name, source))?;
    Ok(Plan::decode(&name, &bytes)?)
}

/// The sentence that says that there are several problems where one is needed, and how to choose.
fn several(source: &Path, profiles: &[Profile], need: &str) -> String {
    let names: Vec<&str> = profiles.iter().take(4).map(|profile| profile.name.as_str()).collect();
    let more = if profiles.len() > names.len() { ", …" } else { "" };
    let (count, names, source) = (profiles.len(), names.join(", "), source.display());
    format!("{need}, but {source} gives {count} ({names}{more}); choose with --step or --device")
}

fn failed_write(path: &Path, source: io::Error) -> Failure {
    Failure::Write { name: path.display().to_string(), source }
}
