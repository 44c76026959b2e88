//! The JSON of events and steps that our recording scripts write:
//!
//! ```text
//! {"info": {"gpu": "NVIDIA H200"}, "labels": ["model.py:12:forward"],
//!  "events": [["s", "prefill/128"], ["a", 0, 4096, 0], ["f", 0, 4096, 0], ["e"]]}
//! ```
//!
//! The keys come in any order and the events are never held as a tree: a visitor turns each into an event of the profile as
//! it is parsed. Ids may be any integers, each allocated once. A label that is -1 or left out is `unknown`. What follows an
//! event's own parts is skipped, as are unknown keys. Scalars of `info` become notes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::io::BufReader;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::builder::{Builder, UNKNOWN};
use super::source::{Guarded, Held, Source};
use crate::error::{At, Error, quoted};
use crate::event::{Action, BufferId, LabelId, LaneId};
use crate::limits::Meter;
use crate::profile::Profile;
use crate::units::Bytes;

use token::{Integer, Letter, Scalar};

mod token;

/// A label that the file does not give, until the table is complete.
const NO_LABEL: LabelId = LabelId(u32::MAX);

/// Reads a record.
pub(super) fn read(source: Source<'_>, meter: &Meter) -> Result<Profile, Error> {
    let name = source.name;
    let mut builder = Builder::new(name, meter);
    let lane = builder.lane("stream 0", At::File)?;
    let (guarded, held) = Guarded::new(source.input, meter);
    let mut file = File {
        name,
        builder,
        lane,
        held,
        ids: HashMap::new(),
        seen: Vec::new(),
        event: 0,
        inside_events: false,
        snapshot: false,
        failure: None,
    };
    // serde_json reads byte by byte, which only a concrete buffer makes cheap.
    let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 16, guarded));
    let parsed = Part::Root.of(&mut file).deserialize(&mut json).and_then(|()| json.end());
    if let Some(failure) = file.failure.take() {
        return Err(failure);
    }
    parsed.map_err(|error| file.syntax(error))?;
    file.finish()
}

/// What is known between two tokens.
struct File<'a> {
    name: &'a str,
    builder: Builder,
    lane: LaneId,
    held: Held,
    ids: HashMap<i128, Known>,
    /// Which keys of the root were there.
    seen: Vec<Part>,
    /// Number of the event being read.
    event: u64,
    inside_events: bool,
    /// Whether a key was there that only snapshots of torch have.
    snapshot: bool,
    /// An error of ours, while the parser carries a stand-in for it out.
    failure: Option<Error>,
}

struct Known {
    id: BufferId,
    freed: Option<u64>,
}

impl File<'_> {
    fn at(&self) -> At {
        if self.inside_events { At::Event(self.event) } else { At::File }
    }

    /// Keeps an error of ours and gives the parser something to stop for.
    fn fail<E: serde::de::Error>(&mut self, error: Error) -> E {
        self.failure = Some(error);
        E::custom("")
    }

    fn wrong<E: serde::de::Error>(&mut self, reason: impl Into<String>) -> E {
        let error = Error::malformed(self.name, self.at(), reason);
        self.fail(error)
    }

    /// What the parser itself found.
    fn syntax(&self, error: serde_json::Error) -> Error {
        let (line, column) = (error.line(), error.column());
        let reason = match error.classify() {
            serde_json::error::Category::Io => return Error::from_read(self.name, error.into()),
            serde_json::error::Category::Eof => {
                format!("the JSON ends early, at line {line}, column {column}; the file is truncated")
            }
            _ => {
                let text = error.to_string();
                let suffix = format!(" at line {line} column {column}");
                let what = text.strip_suffix(&suffix).unwrap_or(&text);
                format!("{what}, at line {line}, column {column} of the JSON")
            }
        };
        Error::malformed(self.name, self.at(), reason)
    }

    fn alloc(&mut self, id: i128, bytes: Bytes, label: LabelId) -> Result<(), Error> {
        let (tick, at, name) = (self.builder.next_tick(), self.at(), self.name);
        match self.ids.entry(id) {
            Entry::Occupied(_) => Err(Error::malformed(name, at, format!("id {id} is allocated twice"))),
            Entry::Vacant(entry) => {
                let buffer = self.builder.alloc(tick, bytes, label, self.lane, None, at)?;
                entry.insert(Known { id: buffer, freed: None });
                Ok(())
            }
        }
    }

    fn free(&mut self, id: i128) -> Result<(), Error> {
        let wrong = |reason| Err(Error::malformed(self.name, At::Event(self.event), reason));
        match self.ids.get_mut(&id) {
            None => wrong(format!("id {id} is freed but not allocated")),
            Some(Known { freed: Some(before), .. }) => {
                wrong(format!("id {id} is freed but was already freed at event {before}"))
            }
            Some(known) => {
                known.freed = Some(self.event);
                let id = known.id;
                self.builder.push(self.builder.next_tick(), Action::Free { id }, At::Event(self.event))
            }
        }
    }

    /// Now that the labels are known, gives each allocation one that exists.
    fn finish(mut self) -> Result<Profile, Error> {
        if !self.seen.contains(&Part::Events) {
            let reason = if self.snapshot {
                "this is a snapshot of torch as JSON; store it with pickle.dump instead"
            } else {
                "the JSON has no \"events\"; a record has \"info\", \"labels\" and \"events\""
            };
            return Err(Error::malformed(self.name, At::File, reason));
        }
        let labels = self.builder.label_count();
        let mut missing = false;
        for (number, event) in (0_u64..).zip(self.builder.events_mut()) {
            let Action::Alloc { label, .. } = &mut event.action else { continue };
            if *label == NO_LABEL {
                *label = LabelId(labels as u32);
                missing = true;
            } else if label.0 as usize >= labels {
                let reason = format!("label {} is not among the {labels} labels of the file", label.0);
                return Err(Error::malformed(self.name, At::Event(number), reason));
            }
        }
        if missing {
            self.builder.push_label(UNKNOWN.to_owned(), At::File)?;
        }
        self.builder.finish()
    }
}

/// The places of the file that a visitor stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Root,
    Info,
    Labels,
    Events,
    Event,
}

impl Part {
    fn of<'f, 'a>(self, file: &'f mut File<'a>) -> Seed<'f, 'a> {
        Seed { part: self, file }
    }
}

/// Parses one part of the file into the state.
struct Seed<'f, 'a> {
    part: Part,
    file: &'f mut File<'a>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.part {
            Part::Root | Part::Info => deserializer.deserialize_map(self),
            Part::Labels | Part::Events | Part::Event => deserializer.deserialize_seq(self),
        }
    }
}

impl<'de> Visitor<'de> for Seed<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.part {
            Part::Root => "an object with \"info\", \"labels\" and \"events\"",
            Part::Info => "an object for \"info\"",
            Part::Labels => "a list of texts for \"labels\"",
            Part::Events => "a list of events for \"events\"",
            Part::Event => "a list for an event, such as [\"a\", id, bytes, label]",
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let file = self.file;
        while let Some(key) = map.next_key::<String>()? {
            file.held.settle();
            if self.part == Part::Info {
                if let Scalar(Some(value)) = map.next_value()? {
                    file.builder.note(&key, value).map_err(|e| file.fail(e))?;
                }
                continue;
            }
            let part = match key.as_str() {
                "info" => Part::Info,
                "labels" => Part::Labels,
                "events" => Part::Events,
                _ => {
                    file.snapshot |= key == "device_traces";
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            if file.seen.contains(&part) {
                return Err(file.wrong(format!("{} stands twice in the JSON", quoted(&key))));
            }
            file.seen.push(part);
            map.next_value_seed(part.of(file))?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let file = self.file;
        match self.part {
            Part::Labels => {
                while let Some(label) = seq.next_element::<String>()? {
                    file.held.settle();
                    file.builder.push_label(label, At::File).map_err(|e| file.fail(e))?;
                }
                Ok(())
            }
            Part::Events => {
                file.inside_events = true;
                while seq.next_element_seed(Part::Event.of(file))?.is_some() {
                    file.held.settle();
                    file.event += 1;
                }
                file.inside_events = false;
                Ok(())
            }
            _ => event(file, &mut seq),
        }
    }
}

/// One event: a letter, then its parts.
fn event<'de, A: SeqAccess<'de>>(file: &mut File<'_>, seq: &mut A) -> Result<(), A::Error> {
    let Some(letter) = seq.next_element::<Letter>()? else {
        return Err(file.wrong("the event is an empty list"));
    };
    match letter {
        Letter::Alloc => {
            let id = integer(file, seq, "id")?;
            let size = integer(file, seq, "number of bytes")?;
            let bytes = u64::try_from(size).ok().and_then(Bytes::new);
            let bytes = bytes.ok_or_else(|| file.wrong(format!("{size} is not a size between 0 and 2^63 - 1")))?;
            let label = match seq.next_element::<Integer>()? {
                None | Some(Integer::Null | Integer::Is(-1)) => NO_LABEL,
                Some(Integer::Is(label)) => match u32::try_from(label) {
                    Ok(label) if label != NO_LABEL.0 => LabelId(label),
                    _ => return Err(file.wrong(format!("label {label} is not an index; -1 stands for none"))),
                },
                Some(other) => return Err(file.wrong(format!("label {other} is not an index; -1 stands for none"))),
            };
            file.alloc(id, bytes, label).map_err(|e| file.fail(e))?;
        }
        Letter::Free => {
            let id = integer(file, seq, "id")?;
            file.free(id).map_err(|e| file.fail(e))?;
        }
        Letter::StepBegin => {
            let Some(key) = seq.next_element::<String>()? else {
                return Err(file.wrong("a step begins without a key, such as \"prefill/128\""));
            };
            file.builder.begin_step(file.builder.next_tick(), &key, file.at()).map_err(|e| file.fail(e))?;
        }
        Letter::StepEnd => {
            file.builder.push(file.builder.next_tick(), Action::StepEnd, file.at()).map_err(|e| file.fail(e))?;
        }
        Letter::Other(text) => {
            return Err(file.wrong(format!("{text} begins no event; \"a\", \"f\", \"s\" and \"e\" do")));
        }
    }
    while seq.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

fn integer<'de, A: SeqAccess<'de>>(file: &mut File<'_>, seq: &mut A, what: &str) -> Result<i128, A::Error> {
    match seq.next_element::<Integer>()? {
        Some(Integer::Is(number)) => Ok(number),
        Some(other) => Err(file.wrong(format!("the {what} is {other}, not a whole number below 2^64"))),
        None => Err(file.wrong(format!("the event ends before its {what}"))),
    }
}
