//! What a device tells about itself while it runs. Each report is plain data, taken in one pass over what lives; it prints
//! as text where a person reads it, and every one has `to_json`.
//!
//! ```text
//!   boot_summary   where the bytes of the reservation are, and which features are active, and why     boot.rs
//!   leak_report    what steps left behind, by key and label, and what keeps growing                   leaks.rs
//!   live_map       every live buffer at its place: JSON, a page, a snapshot that memory_viz opens     live.rs
//!   plan_of        the plan of a key as the planner's own type, with all of its reports               below
//! ```
//!
//! Nothing here is on the path of a request. A step on script pays for one look whether anything was left behind.
//!
//! Keys and labels come from outside: pages are escaped by the planner's report, lines by [`quoted`].

mod boot;
mod leaks;
mod live;

use serde::Serialize;
use terrace_planner::report::{ReportFormat, write};
use terrace_planner::{Plan, Verdict};

use crate::device::Device;
use crate::error::Error;

pub use boot::{BootSummary, Feature, MemoryRow};
pub(crate) use leaks::Leaks;
pub use leaks::{KeyLeft, LabelLeft, LeakReport, Left};
pub use live::{LiveBuffer, LiveMap, LiveState};

impl Device {
    /// The plan of a key as the planner knows it: to save with `encode`, or to report on. `None` while the key has none.
    ///
    /// # Errors
    /// What the planner's check says, which is a bug in this crate.
    pub fn plan_of(&self, key: &[u8]) -> Result<Option<Plan>, Error> {
        Ok(self.verdict_of(key)?.map(|verdict| verdict.best().clone()))
    }

    /// The plan of a key as a page with a memory map to zoom into. `None` while the key has none.
    ///
    /// # Errors
    /// As [`Device::plan_of`].
    pub fn plan_html(&self, key: &[u8]) -> Result<Option<String>, Error> {
        Ok(self.verdict_of(key)?.map(|verdict| page(&verdict)))
    }

    fn verdict_of(&self, key: &[u8]) -> Result<Option<Verdict>, Error> {
        let script =
            self.keys.iter().find(|(known, _)| known.as_ref() == key).and_then(|(_, state)| state.script.as_ref());
        let Some(script) = script else { return Ok(None) };
        let name = String::from_utf8_lossy(key);
        Ok(Some(script.verdict(&name, self.labels.texts(), self.config.align)?))
    }
}

/// The page of a plan.
fn page(verdict: &Verdict) -> String {
    let mut out = Vec::new();
    write(verdict, ReportFormat::Html, false, &mut out).expect("a Vec takes every byte");
    String::from_utf8(out).expect("a page is text")
}

/// One object on one line. The only place of this crate that names serde_json.
pub(crate) fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("reports are plain data with texts as keys")
}

/// A key as text in a line: in quotes, with whatever would break the line or the terminal written out. Quotes inside stay as they are:
/// a key may be a tuple of Python's.
pub(crate) fn quoted(key: &[u8]) -> String {
    let text = String::from_utf8_lossy(key);
    let plain = |text: &str| text.escape_debug().to_string().replace("\\'", "'").replace("\\\"", "\"");
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("'{}...'", plain(&text[..end])),
        None => format!("'{}'", plain(&text)),
    }
}

/// `1 plan`, `2 plans`.
fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stays_on_its_line() {
        assert_eq!(quoted(b"a\n\x1b[31m\xff"), "'a\\n\\u{1b}[31m\u{fffd}'");
        assert_eq!(quoted(b"('prefill', 4128)"), "'('prefill', 4128)'");
        assert_eq!(quoted(&[b'x'; 100]), format!("'{}...'", "x".repeat(80)));
        assert_eq!((count(1, "plan"), count(0, "plan")), ("1 plan".to_owned(), "0 plans".to_owned()));
    }
}
