//! What the planners are measured on, by name.
//!
//! A name is a file of `tests/corpus/instances` (`G_1`), a recorded forward (`recorded/qwen3.6-27b-prefill-4128`), or a member
//! of a synthetic family with its number of buffers and its seed (`synth-100000-2`, `dense-10000-4`). After an `@` comes a
//! capacity in bytes: `A@1048576`.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use terrace_planner::Options;
use terrace_planner::problem::Problem;
use terrace_profiles::units::{Align, Bytes};
use terrace_tests::{corpus, generate};

/// A problem and what is asked of its plan.
pub struct Instance {
    /// What to place.
    pub problem: Problem,
    /// Alignment and capacity; the rest is for the method to say.
    pub options: Options,
}

/// The instances of a run, small ones first: corpus, recorded forwards, the large synthetic ones.
pub fn names() -> Vec<String> {
    let public = corpus::instances();
    let with_capacity = public.iter().map(|path| stem(path)).filter_map(|name| {
        let (short, capacity) = capacity_in(&name)?;
        Some(format!("{short}@{capacity}"))
    });
    let recorded = corpus::recorded();
    let recorded = recorded.iter().map(|path| format!("recorded/{}", stem(path)));
    let plain = public.iter().map(|path| short(path));
    let large = ["synth-100000-2", "synth-1000000-3"].map(str::to_owned);
    with_capacity.chain(plain).chain(recorded).chain(large).collect()
}

/// The instance of that name.
///
/// # Errors
/// A name that is none, as a sentence.
pub fn load(name: &str) -> Result<Instance, String> {
    let (name, capacity) = match name.split_once('@') {
        Some((name, capacity)) => {
            let bytes = capacity.parse().ok().and_then(Bytes::new);
            (name, Some(bytes.ok_or_else(|| format!("{capacity} is no capacity; give bytes"))?))
        }
        None => (name, None),
    };
    let options = Options { align: Align::ONE, capacity, ..Options::default() };
    if let Some(problem) = family(name) {
        return Ok(Instance { problem, options });
    }
    let (path, options) = match name.strip_prefix("recorded/") {
        Some(own) => (find(corpus::recorded(), |path| stem(path) == own), Options { align: Align::DEFAULT, ..options }),
        None => (find(corpus::instances(), |path| short(path) == name), options),
    };
    let path = path.ok_or_else(|| format!("{name} is no instance; --list shows their names"))?;
    let problem = terrace_planner::problem_of(&corpus::read(&path), &options).map_err(|error| error.to_string())?;
    Ok(Instance { problem, options })
}

/// `synth-COUNT-SEED` or `dense-COUNT-SEED`.
fn family(name: &str) -> Option<Problem> {
    let (kind, rest) = name.split_once('-')?;
    let (count, seed) = rest.split_once('-')?;
    let (count, seed) = (count.parse().ok()?, seed.parse().ok()?);
    match kind {
        "synth" => Some(generate::synth(count, seed)),
        "dense" => Some(generate::dense(count, seed)),
        _ => None,
    }
}

/// Writes the problem in minimalloc's form: `id,lower,upper,size`, half-open.
///
/// # Errors
/// Those of the file.
pub fn write_csv(problem: &Problem, path: &Path) -> std::io::Result<()> {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
    writeln!(file, "id,lower,upper,size")?;
    for (index, buffer) in problem.buffers.iter().enumerate() {
        writeln!(file, "{index},{},{},{}", buffer.lifetime.start.0, buffer.lifetime.end.0, buffer.size.get())?;
    }
    file.flush()
}

fn find(paths: Vec<PathBuf>, wanted: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    paths.into_iter().find(|path| wanted(path))
}

/// The file's name without what says its form.
fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.trim_end_matches(".gz").trim_end_matches(".csv").trim_end_matches(".profile");
    name.to_owned()
}

/// The stem without minimalloc's capacity.
fn short(path: &Path) -> String {
    let stem = stem(path);
    capacity_in(&stem).map_or(stem.as_str(), |(short, _)| short).to_owned()
}

/// Name and capacity, as minimalloc's files have them.
fn capacity_in(stem: &str) -> Option<(&str, &str)> {
    stem.rsplit_once('.').filter(|(_, capacity)| capacity.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_instances() {
        assert!(names().len() > 40);
        for name in names().iter().filter(|name| !name.starts_with("synth-1")) {
            let instance = load(name).unwrap();
            assert!(!instance.problem.buffers.is_empty(), "{name}");
        }
        assert_eq!(load("A@1048576").unwrap().options.capacity, Bytes::new(1 << 20));
        assert_eq!(load("dense-100-4").unwrap().problem.buffers.len(), 100);
        assert_eq!(load("nobody").err().unwrap(), "nobody is no instance; --list shows their names");
    }
}
