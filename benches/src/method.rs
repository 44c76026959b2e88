//! Ways to plan, by name, measured in the process that calls: time without reading, makespan, lower bound, peak memory.
//!
//! Ours are `terrace-quick` (what the allocator runs between two forwards), `terrace-0` (every heuristic, no search),
//! `terrace` (the default budget) and `terrace-N` (a budget of `N` nodes), each on two threads. The others are the peers of
//! [`terrace_tests::peers`].

use std::time::{Duration, Instant};

use terrace_planner::problem::{Placement, Problem};
use terrace_planner::solve::{Control, solve};
use terrace_planner::{Effort, Options, bound, check};
use terrace_profiles::units::Offset;
use terrace_tests::peers;

use crate::instance::Instance;

/// Hill climbing: the attempts and the seed that its results were published with.
const HILL_CLIMB: (u32, u64) = (500, 7);

/// Threads that ours may use.
const THREADS: usize = 2;

/// What a run gave; the placement was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Time of planning alone.
    pub time: Duration,
    /// Bytes the plan needs.
    pub makespan: u64,
    /// Bytes no plan is below.
    pub lower_bound: u64,
    /// Most memory the process had, in KiB; 0 where the system does not tell.
    pub peak_kib: u64,
    /// Whether it was proven optimal.
    pub optimal: bool,
    /// Search nodes.
    pub nodes: u64,
    /// Which of our strategies won.
    pub strategy: String,
}

/// All methods of a run.
pub const NAMES: [&str; 7] =
    ["terrace-quick", "terrace-0", "terrace", "first-fit", "best-fit", "birth-order", "hill-climb"];

/// Runs the method once.
///
/// # Errors
/// A name that is none, a problem that ours refuses, or a placement that the check refuses; as a sentence.
pub fn run(method: &str, instance: &Instance) -> Result<Outcome, String> {
    let problem = &instance.problem;
    let begun = Instant::now();
    let (offsets, optimal, nodes, strategy) = match method {
        "first-fit" => (peers::first_fit(problem), false, 0, String::new()),
        "best-fit" => (peers::best_fit(problem), false, 0, String::new()),
        "birth-order" => (peers::birth_order(problem), false, 0, String::new()),
        "hill-climb" => (peers::hill_climb(problem, HILL_CLIMB.0, HILL_CLIMB.1), false, 0, String::new()),
        ours => {
            let options = budget(ours, &instance.options)?;
            let control = Control { threads: THREADS, ..Control::default() };
            let solved = solve(problem, &options, &control).map_err(|error| error.to_string())?;
            let offsets = solved.placement.offsets.iter().map(|offset| offset.get()).collect();
            (offsets, solved.proof.optimal, solved.proof.nodes, solved.proof.strategy)
        }
    };
    let time = begun.elapsed();
    let peak_kib = peak_kib("self").unwrap_or(0);
    let makespan = checked(problem, &offsets)?;
    let lower_bound = bound::lower_bound(problem).bytes.get();
    let optimal = optimal || makespan == lower_bound;
    Ok(Outcome { time, makespan, lower_bound, peak_kib, optimal, nodes, strategy })
}

fn budget(method: &str, options: &Options) -> Result<Options, String> {
    let (mut options, rest) = (options.clone(), method.strip_prefix("terrace").unwrap_or("unknown"));
    match rest {
        "" => {}
        "-quick" => options.effort = Effort::Quick,
        nodes => {
            let nodes = nodes.strip_prefix('-').and_then(|nodes| nodes.parse().ok());
            options.budget_nodes = nodes.ok_or_else(|| format!("{method} is no method; known are {NAMES:?}"))?;
        }
    }
    Ok(options)
}

fn checked(problem: &Problem, offsets: &[u64]) -> Result<u64, String> {
    let offsets = offsets.iter().map(|&offset| Offset::new(offset).ok_or("an offset is beyond 2^63 - 1"));
    let placement = Placement { offsets: offsets.collect::<Result<_, _>>()? };
    check::check(problem, &placement, None).map_err(|violation| violation.to_string())?;
    Ok(placement.makespan(problem).get())
}

/// The most memory a process ever had, where Linux tells it.
pub fn peak_kib(process: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").trim().parse().ok()
}

impl Outcome {
    /// One line that [`Outcome::read`] understands.
    pub fn line(&self) -> String {
        format!(
            "{} {} {} {} {} {} {}",
            self.time.as_nanos(),
            self.makespan,
            self.lower_bound,
            self.peak_kib,
            self.optimal,
            self.nodes,
            self.strategy
        )
    }

    /// The outcome in a line; `None` if it is none.
    pub fn read(line: &str) -> Option<Self> {
        let mut words = line.trim_end_matches('\n').splitn(7, ' ');
        Some(Self {
            time: Duration::from_nanos(words.next()?.parse().ok()?),
            makespan: words.next()?.parse().ok()?,
            lower_bound: words.next()?.parse().ok()?,
            peak_kib: words.next()?.parse().ok()?,
            optimal: words.next()?.parse().ok()?,
            nodes: words.next()?.parse().ok()?,
            strategy: words.next()?.to_owned(),
        })
    }

    /// Makespan over lower bound.
    pub fn ratio(&self) -> f64 {
        self.makespan as f64 / self.lower_bound.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance;

    #[test]
    fn every_method_plans_a_small_instance_and_ours_is_never_worse() {
        let instance = instance::load("synth-200-5").unwrap();
        let own = run("terrace-0", &instance).unwrap().makespan;
        for method in NAMES.into_iter().filter(|name| *name != "terrace-quick") {
            let outcome = run(method, &instance).unwrap();
            assert!(outcome.makespan >= outcome.lower_bound, "{method}");
            assert!(method.starts_with("terrace") || own <= outcome.makespan, "{method}");
            assert_eq!(Outcome::read(&outcome.line()).unwrap(), outcome, "{method}");
        }
        assert!(run("terrace-x", &instance).unwrap_err().starts_with("terrace-x is no method"));
    }
}
