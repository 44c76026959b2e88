//! From a file to checked profiles: the front of the importers.
//!
//! ```text
//!   path or stream -> source (gzip, first bytes) -> format -> one importer -> builder -> Profile::check
//! ```
//!
//! The format is taken from the content and never from the file's name. Each importer streams its input, charges what it
//! keeps to [`Limits`], and gives every error the position its users can find: a line, a byte or an event.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use crate::codec;
use crate::error::{At, Error, quoted};
use crate::limits::{Limits, Meter};
use crate::profile::Profile;
use crate::text;

use source::Source;

mod builder;
mod minimalloc;
mod pickle;
mod rmm;
mod snapshot;
mod source;
mod steps;
mod table;
mod torch;

/// What an input is written in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Whatever the first bytes say.
    #[default]
    Auto,
    /// The pickle of `torch.cuda.memory._snapshot()`.
    TorchSnapshot,
    /// The JSON of events and steps that `profiles/README.md` describes.
    Steps,
    /// The CSV log of RAPIDS Memory Manager's logging adaptor.
    Rmm,
    /// A problem of minimalloc as CSV.
    Minimalloc,
    /// A profile of ours, as text or binary.
    Profile,
}

/// How to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The format, if it should not be guessed.
    pub format: Format,
    /// The one device wanted from a snapshot.
    pub device: Option<u32>,
    /// What reading may cost.
    pub limits: Limits,
}

/// Reads the profiles in a file: one for each device that did something where the format knows devices, else one.
pub fn read_file(path: &Path, options: &Options) -> Result<Vec<Profile>, Error> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|e| Error::io(&name, e))?;
    read(file, &name, options)
}

/// Reads the profiles in a stream; `name` is what errors call it, and what the profiles are named after.
pub fn read(reader: impl Read, name: &str, options: &Options) -> Result<Vec<Profile>, Error> {
    let meter = Meter::new(name, options.limits);
    let source = Source::new(reader, name)?;
    let format = match options.format {
        Format::Auto => detect(&source)?,
        given => given,
    };
    if let (Some(device), false) = (options.device, format == Format::TorchSnapshot) {
        let reason = format!("device {device} is asked for, but only snapshots of torch know devices; leave it out");
        return Err(Error::Selection { name: name.to_owned(), reason });
    }
    if source.head.is_empty() {
        return Err(Error::malformed(name, At::File, "the file is empty"));
    }
    let one = |profile: Profile| vec![profile];
    let profiles = match format {
        Format::TorchSnapshot => torch::read(source, options.device, &meter)?,
        Format::Steps => steps::read(source, &meter).map(one)?,
        Format::Rmm => rmm::read(source, &meter).map(one)?,
        Format::Minimalloc => minimalloc::read(source, &meter).map(one)?,
        Format::Profile | Format::Auto => read_own(source, &meter).map(one)?,
    };
    debug_assert!(profiles.iter().all(|profile| profile.check().is_ok()));
    Ok(profiles)
}

/// The same file may hold text or binary; the magic says which.
fn read_own(source: Source<'_>, meter: &Meter) -> Result<Profile, Error> {
    let name = source.name;
    if source.head.starts_with(&codec::MAGIC) {
        codec::read_profile(source.input, name, meter)
    } else {
        text::read_metered(&mut BufReader::new(source.input), name, &stem(name), meter)
    }
}

fn detect(source: &Source<'_>) -> Result<Format, Error> {
    let head = &source.head;
    let unknown = |what: &str| {
        let known = "torch-snapshot, steps, rmm, minimalloc, profile";
        Err(Error::malformed(source.name, At::File, format!("{what}; the formats are {known}, name one with --format")))
    };
    if head.is_empty() {
        return Err(Error::malformed(source.name, At::File, "the file is empty"));
    }
    if head.starts_with(&codec::MAGIC) {
        return Ok(Format::Profile);
    }
    if head[0] == pickle::PROTO {
        return Ok(Format::TorchSnapshot);
    }
    let text = String::from_utf8_lossy(head);
    let text = text.trim_start();
    if text.starts_with(text::HEADER) {
        return Ok(Format::Profile);
    }
    match text.chars().next() {
        None => return Err(Error::malformed(source.name, At::File, "the file holds only blanks")),
        Some('{') => return Ok(Format::Steps),
        Some('[') => return unknown("a JSON list is none of the formats"),
        Some(_) => {}
    }
    let first = text.lines().next().unwrap_or_default();
    let columns: Vec<String> = first.split(',').map(table::column).collect();
    let has = |names: &[&str]| columns.iter().any(|column| names.contains(&column.as_str()));
    if rmm::REQUIRED.iter().all(|name| has(&[name])) {
        Ok(Format::Rmm)
    } else if has(minimalloc::LOWER) && has(minimalloc::SIZE) {
        Ok(Format::Minimalloc)
    } else if text.contains(char::is_control) && !text.starts_with(|c: char| c.is_ascii_graphic()) {
        unknown("the content is binary and none of the formats")
    } else {
        unknown(&format!("the content begins with {} and is none of the formats", quoted(first.trim_end())))
    }
}

/// The last part of a path, without the endings that say what is inside.
fn stem(name: &str) -> String {
    const KNOWN: [&str; 8] = [".gz", ".json", ".pickle", ".csv", ".profile", ".events", ".steps", ".snapshot"];
    let mut stem = file_name(name);
    while let Some(shorter) = KNOWN.iter().find_map(|known| stem.strip_suffix(known)).filter(|rest| !rest.is_empty()) {
        stem = shorter;
    }
    stem.to_owned()
}

/// The last part of a path; what else the path says is no business of a profile.
fn file_name(name: &str) -> &str {
    name.rsplit(['/', '\\']).next().unwrap_or(name)
}

impl std::str::FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match Self::ALL.iter().find(|format| format.name() == text) {
            Some(format) => Ok(*format),
            None => {
                let known = Self::ALL.map(Self::name).join(", ");
                let reason = format!("{} is not a format; the formats are {known}", quoted(text));
                Err(Error::Selection { name: "--format".to_owned(), reason })
            }
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl Format {
    /// Each format, in the order of the help text.
    pub const ALL: [Self; 6] =
        [Self::Auto, Self::TorchSnapshot, Self::Steps, Self::Rmm, Self::Minimalloc, Self::Profile];

    /// How the command line calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::TorchSnapshot => "torch-snapshot",
            Self::Steps => "steps",
            Self::Rmm => "rmm",
            Self::Minimalloc => "minimalloc",
            Self::Profile => "profile",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_named_after_its_file_without_known_endings() {
        for (name, expect) in [
            ("/a/b/moe8_mixed.steps.json.gz", "moe8_mixed"),
            ("run.snapshot.pickle", "run"),
            ("A.1048576.csv", "A.1048576"),
            ("-", "-"),
            (".profile", ".profile"),
            ("c:\\traces\\x.events.json", "x"),
        ] {
            assert_eq!(stem(name), expect);
        }
    }

    #[test]
    fn formats_are_known_by_name() {
        for format in Format::ALL {
            assert_eq!(format.to_string().parse::<Format>().unwrap(), format);
        }
        assert_eq!(
            "onnx".parse::<Format>().unwrap_err().to_string(),
            "--format: 'onnx' is not a format; the formats are auto, torch-snapshot, steps, rmm, minimalloc, profile"
        );
    }
}
