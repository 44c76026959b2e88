//! Budgets: configurations and the most bytes that each may peak at, in a TOML file that is read, checked and rewritten.
//!
//! ```toml
//! schema = 1
//!
//! [[budget]]
//! name = "27B layer in windows of 640"
//! model = "qwen3.6-27b"          # an id, or the path of a config.json, seen from this file
//! engine = "terrace"
//! part = "layer"
//! tokens = 60000
//! window = 640                   # also: layers, lifetimes, tp, context, sequences, logits_rows
//! most_bytes = 733214720
//! at_peak = [                    # what is alive at the peak, written by --update
//!   ["residual", 614400000],
//! ]
//! ```
//!
//! A rewrite changes `most_bytes` and `at_peak` where they stand; comments and all else stay as they are.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{At, Error};
use crate::model::Model;
use crate::synth::{Engine, Lifetimes, Part, Workload};
use crate::toml_file::{self, Placed};
use crate::units::Bytes;

/// One configuration and what it may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// What it is called in the report; no other of the file has it.
    pub name: String,
    /// The model: an id, or a path that was made whole with the file's folder.
    pub model: String,
    /// What is planned.
    pub workload: Workload,
    /// The most bytes that the plan's peak may have.
    pub most: Bytes,
    /// What was alive at the peak when `most` was written: label and bytes. Empty if nobody wrote it.
    pub at_peak: Vec<(String, Bytes)>,
}

/// A read file: its budgets and the text they stand in.
#[derive(Clone, Debug)]
pub struct Budgets {
    /// The file, for errors and reports.
    pub name: String,
    /// In the order of the file.
    pub budgets: Vec<Budget>,
    text: String,
    places: Vec<Places>,
}

/// What a plan measured, for a rewrite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// The peak.
    pub peak: Bytes,
    /// What is alive at it: label and bytes, the largest first.
    pub at_peak: Vec<(String, Bytes)>,
}

/// Where the two values of a budget stand in the text, in bytes.
#[derive(Clone, Debug)]
struct Places {
    most: std::ops::Range<usize>,
    at_peak: Option<std::ops::Range<usize>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: u64,
    #[serde(default)]
    budget: Vec<Placed<Entry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    model: String,
    engine: String,
    part: String,
    lifetimes: Option<String>,
    tokens: u64,
    context: Option<u64>,
    sequences: Option<u64>,
    window: Option<u64>,
    layers: Option<u64>,
    tp: Option<u64>,
    logits_rows: Option<u64>,
    most_bytes: Placed<u64>,
    at_peak: Option<Placed<Vec<(String, u64)>>>,
}

impl Budgets {
    /// Reads a file.
    ///
    /// # Errors
    /// A file that cannot be read, and all that [`Budgets::parse`] refuses.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|source| Error::io(&name, source))?;
        Self::parse(&name, path.parent(), text)
    }

    /// Reads a text; `folder` is what paths of models are seen from.
    ///
    /// # Errors
    /// No TOML, an unknown key or word, no budget, or two of one name; the line is named.
    pub fn parse(name: &str, folder: Option<&Path>, text: String) -> Result<Self, Error> {
        let file: File = toml_file::parse(name, &text)?;
        if file.schema != 1 {
            let reason = format!("schema {} is not read by this build, which reads 1", file.schema);
            return Err(Error::malformed(name, At::File, reason));
        }
        let mut read = Self { name: name.to_owned(), budgets: Vec::new(), text, places: Vec::new() };
        for entry in file.budget {
            let at = At::Line(toml_file::line_of(&read.text, entry.span().start));
            let (budget, places) =
                entry.into_inner().budget(folder).map_err(|reason| Error::malformed(name, at, reason))?;
            if read.budgets.iter().any(|other| other.name == budget.name) {
                let reason = format!("there are two budgets '{}'; give one another name", budget.name);
                return Err(Error::malformed(name, at, reason));
            }
            read.budgets.push(budget);
            read.places.push(places);
        }
        if read.budgets.is_empty() {
            return Err(Error::malformed(name, At::File, "there is no [[budget]] in it"));
        }
        Ok(read)
    }

    /// The text as it was read.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The text with what was measured, one for each budget in order, in place of what it says.
    ///
    /// # Panics
    /// If there is not one for each budget.
    pub fn rewritten(&self, measured: &[Measured]) -> String {
        assert_eq!(measured.len(), self.budgets.len(), "one measurement for each budget");
        let mut text = String::with_capacity(self.text.len());
        let mut edits: Vec<(std::ops::Range<usize>, String)> = Vec::new();
        for (places, measured) in self.places.iter().zip(measured) {
            let list = list(&measured.at_peak);
            let peak = measured.peak.get();
            match &places.at_peak {
                Some(at_peak) => edits.extend([(places.most.clone(), peak.to_string()), (at_peak.clone(), list)]),
                None => edits.push((places.most.clone(), format!("{peak}\nat_peak = {list}"))),
            }
        }
        edits.sort_by_key(|(place, _)| place.start);
        let mut from = 0;
        for (place, new) in edits {
            text.push_str(&self.text[from..place.start]);
            text.push_str(&new);
            from = place.end;
        }
        text.push_str(&self.text[from..]);
        text
    }
}

impl Budget {
    /// Its model.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_model(&self) -> Result<Model, Error> {
        Model::open(&self.model)
    }
}

impl Entry {
    fn budget(self, folder: Option<&Path>) -> Result<(Budget, Places), String> {
        let engine: Engine = self.engine.parse()?;
        let part: Part = self.part.parse()?;
        let usual = Workload::new(engine, part, self.tokens);
        let workload = Workload {
            lifetimes: self.lifetimes.map_or(Ok(usual.lifetimes), |text| text.parse::<Lifetimes>())?,
            context: self.context.unwrap_or(usual.context),
            sequences: self.sequences.unwrap_or(usual.sequences),
            window: self.window,
            layers: self.layers,
            tp: self.tp.unwrap_or(usual.tp),
            logits_rows: self.logits_rows.unwrap_or(usual.logits_rows),
            ..usual
        };
        let size = |bytes: u64| Bytes::new(bytes).ok_or_else(|| format!("{bytes} is more than 2^63 - 1 bytes"));
        let at_peak = self.at_peak.as_ref().map_or(&[][..], |list| list.get_ref());
        let budget = Budget {
            name: self.name,
            model: seen_from(folder, &self.model),
            workload,
            most: size(*self.most_bytes.get_ref())?,
            at_peak: at_peak
                .iter()
                .map(|(label, bytes)| Ok((label.clone(), size(*bytes)?)))
                .collect::<Result<_, String>>()?,
        };
        Ok((budget, Places { most: self.most_bytes.span(), at_peak: self.at_peak.map(|list| list.span()) }))
    }
}

/// A model's path, if it is one, from the folder of the file that names it.
fn seen_from(folder: Option<&Path>, model: &str) -> String {
    let is_path = model.contains('/') || model.to_ascii_lowercase().ends_with(".json");
    match folder {
        Some(folder) if is_path && !folder.as_os_str().is_empty() => {
            let joined: PathBuf = folder.join(model);
            joined.display().to_string()
        }
        _ => model.to_owned(),
    }
}

/// The list as TOML, one line for each label.
fn list(at_peak: &[(String, Bytes)]) -> String {
    let mut text = "[\n".to_owned();
    for (label, bytes) in at_peak {
        text.push_str("  [\"");
        for c in label.chars() {
            // Writing to a String cannot fail.
            let _ = match c {
                '"' | '\\' => write!(text, "\\{c}"),
                c if c.is_control() => write!(text, "\\u{:04X}", u32::from(c)),
                c => write!(text, "{c}"),
            };
        }
        let _ = writeln!(text, "\", {}],", bytes.get());
    }
    text.push(']');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# Ours.
schema = 1

[[budget]]
name = "layer"
model = "qwen3.6-27b" # dense
engine = "terrace"
part = "layer"
tokens = 60000
window = 640
most_bytes = 700_000_000 # a guess
at_peak = [["residual", 614400000]]

[[budget]]
name = "other"
model = "models/config.json"
engine = "fla-vllm"
part = "mixer"
lifetimes = "last-use"
tokens = 4128
most_bytes = 1
"#;

    fn parse(text: &str) -> Result<Budgets, String> {
        Budgets::parse("b.toml", Some(Path::new("there")), text.to_owned()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_budget_is_a_workload_and_its_most() {
        let budgets = parse(TEXT).unwrap().budgets;
        let expected = Workload { window: Some(640), ..Workload::new(Engine::Terrace, Part::Layer, 60_000) };
        assert_eq!((&budgets[0].workload, budgets[0].most.get()), (&expected, 700_000_000));
        assert_eq!(budgets[0].at_peak, [("residual".to_owned(), Bytes::new(614_400_000).unwrap())]);
        assert_eq!(budgets[0].open_model().unwrap().id, "qwen3.6-27b");
        assert_eq!(
            (budgets[1].model.as_str(), budgets[1].workload.lifetimes),
            ("there/models/config.json", Lifetimes::LastUse)
        );
    }

    #[test]
    fn a_rewrite_touches_the_numbers_alone() {
        let read = parse(TEXT).unwrap();
        let size = |bytes| Bytes::new(bytes).unwrap();
        let at_peak = vec![("residual".to_owned(), size(7)), ("a \"b\" \\c\n".to_owned(), size(5))];
        let measured = Measured { peak: size(12), at_peak: at_peak.clone() };
        let text = read.rewritten(&[measured.clone(), measured.clone()]);
        let expected =
            TEXT.replace("700_000_000", "12").replace("most_bytes = 1\n", "most_bytes = 12\nat_peak = LIST\n");
        let list = "[\n  [\"residual\", 7],\n  [\"a \\\"b\\\" \\\\c\\u000A\", 5],\n]";
        assert_eq!(text, expected.replace("[[\"residual\", 614400000]]", list).replace("LIST", list));
        let again = parse(&text).unwrap();
        assert_eq!(again.budgets[1].at_peak, at_peak);
        assert_eq!(again.rewritten(&[measured.clone(), measured]), text);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let check = |from: &str, to: &str, expected: &str| {
            assert!(TEXT.contains(from));
            let error = parse(&TEXT.replacen(from, to, 1)).unwrap_err();
            assert!(error.starts_with("b.toml: ") && error.contains(expected), "{error}");
        };
        check("schema = 1", "schema = 2", "schema 2 is not read by this build, which reads 1");
        check("\"terrace\"", "\"torch\"", "line 4: 'torch' is no engine; give one of fla, fla-vllm, terrace");
        check("\"other\"", "\"layer\"", "line 14: there are two budgets 'layer'; give one another name");
        check("tokens = 60000", "token = 60000", "line 9: unknown field `token`");
        check("most_bytes = 1\n", "", "line 14: missing field `most_bytes`");
        check("700_000_000", "9223372036854775808", "line 4: 9223372036854775808 is more than 2^63 - 1 bytes");
        assert!(parse("schema = 1").unwrap_err().contains("there is no [[budget]] in it"));
        assert!(parse("schema =").unwrap_err().contains("line 1: "));
    }
}
