//! Our planner beside the planners that others ship, on every instance, in one run: time, makespan, lower bound, peak memory.
//!
//! `cargo bench -p terrace-benches --bench solve -- [--minimalloc PATH] [--limit SECONDS] [--method NAME]... [INSTANCE]...`
//!
//! Prints a Markdown table. Each measurement is a process of its own, so that memory is its own too; runs below a second are
//! made three times and their median time is told. Times are those of planning alone: reading and checking are not counted.
//! minimalloc is given the capacity of the instance or, where that has none, the lower bound, at which it prunes best; it is
//! built by whoever runs this, from <https://github.com/google/minimalloc>, and left out if no path is given.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use terrace_benches::instance::{self, load};
use terrace_benches::method::{self, Outcome, peak_kib};
use terrace_planner::bound;

const MINIMALLOC: &str = "minimalloc";

/// Runs shorter than this are repeated.
const REPEATED_BELOW: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    match asked(std::env::args().skip(1)).and_then(|asked| asked.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// What the command line asks for.
enum Asked {
    /// One measurement, in this process.
    One {
        method: String,
        instance: String,
    },
    List,
    Table(Table),
}

struct Table {
    methods: Vec<String>,
    instances: Vec<String>,
    minimalloc: Option<PathBuf>,
    limit: Duration,
}

fn asked(arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
    // Cargo adds `--bench`.
    let mut arguments = arguments.filter(|argument| argument != "--bench");
    let (mut methods, mut instances, mut minimalloc) = (Vec::new(), Vec::new(), None);
    let mut limit = Duration::from_secs(60);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--measure" => return Ok(Asked::One { method: value()?, instance: value()? }),
            "--list" => return Ok(Asked::List),
            "--minimalloc" => minimalloc = Some(PathBuf::from(value()?)),
            "--method" => methods.push(value()?),
            "--limit" => {
                let text = value()?;
                let seconds = text.parse().map_err(|_| format!("{text} is no number of seconds"))?;
                limit = Duration::from_secs(seconds);
            }
            option if option.starts_with('-') => return Err(format!("{option} is no option")),
            _ => instances.push(argument),
        }
    }
    if methods.is_empty() {
        methods.extend(method::NAMES.map(str::to_owned));
        methods.extend(minimalloc.is_some().then(|| MINIMALLOC.to_owned()));
    }
    if instances.is_empty() {
        instances = instance::names();
    }
    Ok(Asked::Table(Table { methods, instances, minimalloc, limit }))
}

impl Asked {
    fn run(&self) -> Result<(), String> {
        match self {
            Self::One { method, instance } => {
                println!("{}", method::run(method, &load(instance)?)?.line());
                Ok(())
            }
            Self::List => {
                instance::names().iter().for_each(|name| println!("{name}"));
                Ok(())
            }
            Self::Table(table) => table.run(),
        }
    }
}

impl Table {
    fn run(&self) -> Result<(), String> {
        println!(
            "| instance | method | makespan | lower bound | ratio | proven | seconds | peak MiB | nodes | strategy |"
        );
        println!("|---|---|---:|---:|---:|---|---:|---:|---:|---|");
        for instance in &self.instances {
            for method in &self.methods {
                let row = match self.measured(method, instance)? {
                    Some(outcome) => cells(&outcome),
                    None => format!("- | - | - | - | > {} | - | - | no answer", self.limit.as_secs()),
                };
                println!("| {instance} | {method} | {row} |");
            }
        }
        Ok(())
    }

    /// The run of median time; `None` if there is no answer within the limit.
    fn measured(&self, method: &str, instance: &str) -> Result<Option<Outcome>, String> {
        let mut outcomes = Vec::new();
        for _ in 0..3 {
            let outcome = if method == MINIMALLOC { self.minimalloc(instance)? } else { self.child(method, instance)? };
            let Some(outcome) = outcome else { return Ok(None) };
            let short = outcome.time < REPEATED_BELOW;
            outcomes.push(outcome);
            if !short {
                break;
            }
        }
        let mut peaks = outcomes.iter().map(|outcome| outcome.makespan);
        let first = peaks.next();
        if peaks.any(|makespan| Some(makespan) != first) {
            return Err(format!("{method} gives {instance} a different makespan in each run"));
        }
        outcomes.sort_by_key(|outcome| outcome.time);
        let median = outcomes.len() / 2;
        Ok(Some(outcomes.swap_remove(median)))
    }

    /// One of our own methods, by this program.
    fn child(&self, method: &str, instance: &str) -> Result<Option<Outcome>, String> {
        let own = std::env::current_exe().map_err(|error| format!("cannot tell this program's path: {error}"))?;
        let mut command = Command::new(own);
        command.args(["--measure", method, instance]);
        let Some(ended) = within(&mut command, self.limit)? else { return Ok(None) };
        let outcome =
            Outcome::read(&ended.output).ok_or_else(|| format!("{method} on {instance}: {}", ended.errors))?;
        Ok(Some(outcome))
    }

    fn minimalloc(&self, name: &str) -> Result<Option<Outcome>, String> {
        let program = self.minimalloc.as_ref().ok_or("minimalloc is measured with --minimalloc PATH")?;
        let instance = load(name)?;
        let lower_bound = bound::lower_bound(&instance.problem).bytes.get();
        let capacity = instance.options.capacity.map_or(lower_bound, terrace_profiles::units::Bytes::get);
        let input = std::env::temp_dir().join(format!("terrace-solve-{}.csv", std::process::id()));
        instance::write_csv(&instance.problem, &input).map_err(|error| format!("{}: {error}", input.display()))?;
        let mut command = Command::new(program);
        command.arg(format!("--input={}", input.display()));
        command.args([format!("--capacity={capacity}"), "--validate".to_owned(), "--output=/dev/null".to_owned()]);
        let ended = within(&mut command, self.limit);
        remove(&input)?;
        let Some(ended) = ended? else { return Ok(None) };
        let after = |words: &str| {
            let rest = ended.errors.split_once(words)?.1.trim_start();
            rest.split(|c: char| c != '.' && !c.is_ascii_digit()).next()?.parse::<f64>().ok()
        };
        let (Some(seconds), Some(makespan)) = (after("Elapsed time"), after("height")) else { return Ok(None) };
        let makespan = makespan as u64;
        Ok(Some(Outcome {
            time: Duration::from_secs_f64(seconds),
            makespan,
            lower_bound,
            peak_kib: ended.peak_kib,
            optimal: makespan == lower_bound,
            nodes: 0,
            strategy: String::new(),
        }))
    }
}

fn remove(path: &Path) -> Result<(), String> {
    std::fs::remove_file(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn cells(outcome: &Outcome) -> String {
    let mut row = format!("{} | {} | {:.4} | ", outcome.makespan, outcome.lower_bound, outcome.ratio());
    let proven = if outcome.optimal { "yes" } else { "" };
    let (seconds, mebibytes) = (outcome.time.as_secs_f64(), outcome.peak_kib.div_ceil(1024));
    write!(row, "{proven} | {seconds:.4} | {mebibytes} | {} | {}", outcome.nodes, outcome.strategy)
        .expect("a string takes what is written");
    row
}

struct Ended {
    output: String,
    errors: String,
    peak_kib: u64,
}

/// Runs the command; `None` if it was killed at the limit. Its memory is looked at every few milliseconds.
fn within(command: &mut Command, limit: Duration) -> Result<Option<Ended>, String> {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child: Child = child.map_err(|error| format!("{:?} does not start: {error}", command.get_program()))?;
    let (begun, process, mut peak) = (Instant::now(), child.id().to_string(), 0);
    loop {
        peak = peak_kib(&process).unwrap_or(0).max(peak);
        let ended = child.try_wait().map_err(|error| format!("a child is lost: {error}"))?;
        if ended.is_some() {
            let (mut output, mut errors) = (String::new(), String::new());
            // Both are far smaller than a pipe holds, so the child never waited for us.
            child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut output));
            child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut errors));
            return Ok(Some(Ended { output, errors, peak_kib: peak }));
        }
        if begun.elapsed() > limit {
            // It may have ended by itself just now.
            child.kill().ok();
            child.wait().map_err(|error| format!("a child is lost: {error}"))?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}
