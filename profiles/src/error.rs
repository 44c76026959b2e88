//! The one error of this crate. Each prints as one sentence that names the culprit, where it stands and what to do.

use std::borrow::Cow;
use std::fmt;

use crate::event::BufferId;
use crate::units::{Bytes, Tick};

/// Where in an input something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// Line of a text file, from 1.
    Line(u64),
    /// Byte of a binary file (after decompression), from 0.
    Byte(u64),
    /// Event of a record, from 0.
    Event(u64),
    /// The file as a whole.
    File,
}

/// What can go wrong between a file and a checked profile.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{}: {source}", one_line(name))]
    Io {
        /// The file.
        name: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The input breaks its own format.
    #[error("{}: {at}{}", one_line(name), one_line(reason))]
    Malformed {
        /// The file.
        name: String,
        /// Where.
        at: At,
        /// What is wrong, as the end of a sentence.
        reason: String,
    },
    /// The input would need more memory than the caller allows.
    #[error(
        "{}: {at}the profile needs more than the {limit} of memory allowed; raise --max-memory or cut the input",
        one_line(name)
    )]
    TooLarge {
        /// The file.
        name: String,
        /// Where the limit was passed.
        at: At,
        /// The limit.
        limit: Bytes,
    },
    /// The record contradicts itself.
    #[error("profile '{}': event {event}: {reason}", one_line(profile))]
    Inconsistent {
        /// Name of the profile.
        profile: String,
        /// Index of the event, from 0.
        event: usize,
        /// Which rule it breaks.
        reason: Inconsistency,
    },
    /// What was asked for is not in the input.
    #[error("{}: {}", one_line(name), one_line(reason))]
    Selection {
        /// The file or profile.
        name: String,
        /// What is missing and what there is.
        reason: String,
    },
}

/// The rules of a profile, each with the event's own numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the sentence of each variant is its doc")]
pub enum Inconsistency {
    #[error("the tick goes back from {before} to {after}; ticks may not decrease")]
    TickGoesBack { before: Tick, after: Tick },
    #[error("tick {0} is beyond 2^63 - 1")]
    TickTooLate(Tick),
    #[error("buffer {found} is allocated where buffer {expected} is next; ids count allocations from 0")]
    IdOutOfOrder { found: BufferId, expected: BufferId },
    #[error("label {0} is not in the label table")]
    UnknownLabel(u32),
    #[error("lane {0} is not in the lane table")]
    UnknownLane(u32),
    #[error("buffer {0} is named before it is allocated")]
    NotAllocated(BufferId),
    #[error("buffer {id} was already freed at event {event}")]
    AlreadyFreed { id: BufferId, event: usize },
    #[error("the free of buffer {0} was already requested")]
    AlreadyRequested(BufferId),
    #[error("buffer {id} is freed at tick {tick}, the tick of its allocation; a life lasts at least one tick")]
    EmptyLife { id: BufferId, tick: Tick },
    #[error("buffer {id} keeps bytes {from} to {to}, outside its {bytes} bytes")]
    KeepOutside { id: BufferId, from: u64, to: u64, bytes: u64 },
    #[error("buffer {id} is an alias of buffer {of}, which does not live at that time")]
    AliasOfDead { id: BufferId, of: BufferId },
    #[error("buffer {id} at its fixed offset {offset} ends beyond 2^63 - 1 bytes")]
    FixedTooFar { id: BufferId, offset: u64 },
    #[error("a step begins while step '{}' is open", one_line(.0))]
    StepInsideStep(String),
    #[error("a step ends where none is open")]
    NoOpenStep,
}

impl Error {
    /// A [`Error::Malformed`]; `reason` is the end of a sentence.
    pub fn malformed(name: impl Into<String>, at: At, reason: impl Into<String>) -> Self {
        Self::Malformed { name: name.into(), at, reason: reason.into() }
    }

    /// The same error, naming the file the profile came from instead of the profile.
    pub(crate) fn in_file(self, name: &str) -> Self {
        match self {
            Self::Inconsistent { event, reason, .. } => {
                Self::malformed(name, At::Event(event as u64), reason.to_string())
            }
            other => other,
        }
    }

    /// A [`Error::Io`].
    pub fn io(name: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io { name: name.into(), source }
    }

    /// What a failed read means: an error of our own that came up through [`std::io`], else a refusal of the system.
    pub(crate) fn from_read(name: &str, source: std::io::Error) -> Self {
        source.downcast().unwrap_or_else(|source| Self::io(name, source))
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(n) => write!(f, "line {n}: "),
            Self::Byte(n) => write!(f, "byte {n}: "),
            Self::Event(n) => write!(f, "event {n}: "),
            Self::File => Ok(()),
        }
    }
}

/// `text` without what would break a line or a terminal: names and keys come from files that others wrote.
pub(crate) fn one_line(text: &str) -> Cow<'_, str> {
    let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    if !text.contains(breaks) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().fold(String::with_capacity(text.len() + 8), |mut line, c| {
        if breaks(c) {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
        line
    }))
}

/// The beginning of a text from a file, in quotes, for a message.
pub(crate) fn quoted(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("'{}...'", one_line(&text[..end])),
        None => format!("'{}'", one_line(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_whatever_the_file_says() {
        let error = Error::malformed("a\nb", At::Line(3), "no \r\u{2028} such");
        assert_eq!(error.to_string(), "a\\nb: line 3: no \\r\\u{2028} such");
        let error = Inconsistency::StepInsideStep("x\ty".to_owned());
        assert_eq!(error.to_string(), "a step begins while step 'x\\ty' is open");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(quoted(&"é".repeat(61)), format!("'{}...'", "é".repeat(60)));
        assert_eq!(quoted("it's"), "'it's'");
    }
}
