//! A plan, shown: each format is a function from a [`Verdict`] to text or bytes.
//!
//! ```text
//!              +-- summary: the figures and the peak ---- text, json, diff, the head of html and svg
//!   Verdict ---+
//!              +-- picture: the rectangles and colours -- html, svg, torch, the map of text
//! ```
//!
//! Where nothing fits, the best plan that does not is shown, and by how much it is too large.
//!
//! Nothing here reads a clock or the environment: equal plans give equal reports, byte for byte. Names and labels come from
//! whoever wrote the profile, so each format makes them harmless in its own way before it prints them.

mod budgets;
mod caching;
mod diff;
mod html;
mod json;
mod ledger;
mod picture;
pub mod snapshot;
mod summary;
mod svg;
mod sweep;
mod text;
mod tflite;
mod torch;

use std::fmt;
use std::io::{self, Write};

use crate::planning::Verdict;

pub use budgets::Checked;
pub use caching::Beside;
pub use diff::{Change, Diff, LabelChange, diff};
pub use ledger::Server;
pub(crate) use summary::Summary;
pub use sweep::Picture;
pub use tflite::tflite;

/// How a plan can be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReportFormat {
    /// The arena report for a terminal.
    Text,
    /// The figures and the peak as one JSON object on one line.
    Json,
    /// A page with a memory map to zoom into; needs nothing but itself.
    Html,
    /// The memory map as a still picture.
    Svg,
    /// The lifetime graph in the language of Graphviz.
    Dot,
    /// A snapshot that PyTorch's tools and pytorch.org/memory_viz open.
    TorchSnapshot,
    /// The metadata from which TensorFlow Lite Micro takes a plan made offline.
    TfLite,
}

/// A text that names no [`ReportFormat`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a report format: choose text, json, html, svg, dot, torch-snapshot or tflite")]
pub struct UnknownFormat(String);

impl ReportFormat {
    /// Every format.
    pub const ALL: [Self; 7] =
        [Self::Text, Self::Json, Self::Html, Self::Svg, Self::Dot, Self::TorchSnapshot, Self::TfLite];

    /// What [`FromStr`](std::str::FromStr) reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
            Self::Html => "html",
            Self::Svg => "svg",
            Self::Dot => "dot",
            Self::TorchSnapshot => "torch-snapshot",
            Self::TfLite => "tflite",
        }
    }
}

impl fmt::Display for ReportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for ReportFormat {
    type Err = UnknownFormat;
    fn from_str(text: &str) -> Result<Self, UnknownFormat> {
        let named = Self::ALL.into_iter().find(|format| format.name() == text);
        named.ok_or_else(|| UnknownFormat(text.to_owned()))
    }
}

/// Writes what came of planning as `format`; `colour` matters to [`ReportFormat::Text`] alone.
///
/// # Errors
///
/// What `out` reports, and [`io::ErrorKind::InvalidData`] where [`tflite()`] cannot say the plan. [`ReportFormat::Dot`] is not drawn from a placement but from the lifetimes, by
/// [`graph::dot`](crate::graph::dot), and is [`io::ErrorKind::Unsupported`] here.
pub fn write(verdict: &Verdict, format: ReportFormat, colour: bool, out: &mut dyn Write) -> io::Result<()> {
    let (plan, summary) = (verdict.best(), Summary::of_verdict(verdict));
    match format {
        ReportFormat::Text => text::write(plan, &summary, colour, out),
        ReportFormat::Json => json::write_line(&summary, out),
        ReportFormat::Html => html::write(plan, &summary, out),
        ReportFormat::Svg => svg::write(plan, &summary, out),
        ReportFormat::TorchSnapshot => torch::write(plan, out),
        ReportFormat::TfLite => {
            out.write_all(&tflite(plan).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?)
        }
        ReportFormat::Dot => Err(io::Error::new(io::ErrorKind::Unsupported, "the graph is not drawn from a placement")),
    }
}

/// `&`, `<`, `>` and quotes as references, so that text stays text in HTML and SVG; what XML cannot hold becomes U+FFFD.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\t' | '\n' => safe.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// The first `most` characters; an ellipsis stands for the rest.
fn elide(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some(_) => text.chars().take(most.saturating_sub(1)).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use terrace_profiles::codec::fingerprint_of;
    use terrace_profiles::units::{Align, Bytes, Interval, Offset, Tick};

    use super::*;
    use crate::options::Options;
    use crate::plan::{Body, Plan, Proof, Slot};
    use crate::planning::Refusal;
    use crate::problem::{Buffer, Piece, Placement, Problem};
    use crate::solve::Culprits;

    /// Bytes asked for, label, birth, death, offset.
    pub(super) type Row = (u64, &'static str, u64, u64, u64);

    /// A plan of one lane with alignment 512, one storage a row.
    pub(super) fn plan(rows: &[Row]) -> Plan {
        Plan::new(body(rows)).expect("the rows of a test are a valid plan")
    }

    /// The body of [`plan`], for tests that change it.
    pub(super) fn body(rows: &[Row]) -> Body {
        let options = Options::default();
        let mut body = Body {
            name: "small".to_owned(),
            notes: vec![("gpu".to_owned(), "none".to_owned())],
            profile: fingerprint_of("test", &0_u8),
            options,
            labels: Vec::new(),
            lanes: vec!["main".to_owned()],
            slots: Vec::new(),
            problem: Problem::default(),
            placement: Placement::default(),
            proof: Proof { optimal: true, strategy: "by hand".to_owned(), nodes: 7, interrupted: false },
        };
        for (index, &(bytes, label, birth, death, offset)) in rows.iter().enumerate() {
            let known = body.labels.iter().position(|text| text == label);
            let label = known.unwrap_or_else(|| {
                body.labels.push(label.to_owned());
                body.labels.len() - 1
            });
            let (birth, death) = (Tick(birth), Tick(death));
            let bytes = Bytes::new(bytes).unwrap();
            let life = Interval::new(birth, death).unwrap();
            body.slots.push(Slot {
                bytes,
                label: label as u32,
                lane: 0,
                birth,
                death,
                freed: true,
                storage: index as u32,
            });
            body.problem.buffers.push(Buffer::new(bytes.align_up(Align::DEFAULT).unwrap(), Align::DEFAULT, life));
            body.placement.offsets.push(Offset::new(offset).unwrap());
        }
        body
    }

    /// Three buffers: `a` and `b` meet at tick 4, where the load is 3,072; `c` lies where `a` was.
    pub(super) const SMALL: &[Row] =
        &[(1000, "net.py:1:a", 0, 6, 0), (2048, "net.py:2:b", 4, 12, 1024), (900, "net.py:3:c", 6, 10, 0)];

    /// [`SMALL`] with an alias of `b` (slot 3), a gap in the life of `a`, and `c` on a lane of its own on top.
    pub(super) fn odd_plan() -> Plan {
        let mut body = body(SMALL);
        let bytes = |b| Bytes::new(b).unwrap();
        body.lanes.push("copy".to_owned());
        body.labels.push("net.py:4:view".to_owned());
        let view =
            Slot { bytes: bytes(512), label: 3, lane: 0, birth: Tick(5), death: Tick(12), freed: false, storage: 1 };
        body.slots.push(view);
        let piece = |start, end, from, to| Piece {
            lifetime: Interval::new(Tick(start), Tick(end)).unwrap(),
            from: bytes(from),
            to: bytes(to),
        };
        body.problem.buffers[0].pieces = Box::new([piece(0, 2, 0, 1024), piece(4, 6, 512, 1024)]);
        body.slots[2].lane = 1;
        body.problem.buffers[2].lane = 1;
        body.placement.offsets[2] = Offset::new(3072).unwrap();
        Plan::new(body).unwrap()
    }

    /// [`SMALL`], refused.
    pub(super) fn refusal(capacity: u64, proven: bool) -> Verdict {
        let capacity = Bytes::new(capacity).unwrap();
        Verdict::DoesNotFit(Box::new(Refusal {
            capacity,
            best: plan(SMALL),
            proven,
            culprits: proven.then(|| Culprits { buffers: vec![0, 1], minimal: true }),
        }))
    }

    pub(super) fn show(plan: &Plan, format: ReportFormat) -> String {
        String::from_utf8(bytes(plan, format)).unwrap()
    }

    pub(super) fn bytes(plan: &Plan, format: ReportFormat) -> Vec<u8> {
        verdict_bytes(&Verdict::Fits(Box::new(plan.clone())), format)
    }

    pub(super) fn verdict_bytes(verdict: &Verdict, format: ReportFormat) -> Vec<u8> {
        let mut out = Vec::new();
        write(verdict, format, false, &mut out).unwrap();
        out
    }

    pub(super) fn show_verdict(verdict: &Verdict, format: ReportFormat) -> String {
        String::from_utf8(verdict_bytes(verdict, format)).unwrap()
    }

    #[test]
    fn a_format_reads_back_as_it_prints() {
        for format in ReportFormat::ALL {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        let error = "pdf".parse::<ReportFormat>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "'pdf' is not a report format: choose text, json, html, svg, dot, torch-snapshot or tflite"
        );
    }

    #[test]
    fn every_format_takes_the_empty_plan_and_says_the_same_twice() {
        for plan in [plan(&[]), plan(SMALL), odd_plan()] {
            // The graph is drawn elsewhere, and these labels name no tensors.
            let elsewhere = [ReportFormat::Dot, ReportFormat::TfLite];
            for format in ReportFormat::ALL.into_iter().filter(|format| !elsewhere.contains(format)) {
                let first = bytes(&plan, format);
                assert!(!first.is_empty());
                assert_eq!(first, bytes(&plan, format), "{format}");
            }
        }
    }

    #[test]
    fn escaped_text_has_no_markup_left() {
        assert_eq!(escape("a<b> & \"c\" 'd'\n\u{1}"), "a&lt;b&gt; &amp; &quot;c&quot; &#39;d&#39; \u{fffd}");
    }

    #[test]
    fn long_text_ends_in_an_ellipsis() {
        assert_eq!(elide("grüße", 5), "grüße");
        assert_eq!(elide("grüßen", 5), "grüß…");
    }
}
