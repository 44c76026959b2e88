//! A plan beside PyTorch's caching allocator: what each takes from the driver for the same requests, and what was taken when the profile
//! was recorded, where it says so.

use std::io::{self, Write};

use serde::Serialize;
use terrace_profiles::Profile;
use terrace_profiles::units::{Bytes, Overflow};

use crate::caching::{Policy, reserved};
use crate::plan::Plan;
use crate::planning::Verdict;
use crate::report::json::write_line;
use crate::report::summary::Summary;

/// What the caching allocator takes under each of its policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beside {
    plan: Bytes,
    segments: Bytes,
    expandable: Bytes,
    /// What was reserved when the profile was recorded.
    recorded: Option<Bytes>,
}

/// The comparison as part of a JSON report; bytes. What the plan saves is negative where it takes more.
#[derive(Serialize)]
struct Figures {
    recorded: Option<u64>,
    segments: u64,
    expandable: u64,
    saved_of_recorded: Option<i64>,
    saved_of_segments: i64,
    saved_of_expandable: i64,
}

/// A JSON report with the comparison in it.
#[derive(Serialize)]
struct With<'a> {
    #[serde(flatten)]
    summary: Summary,
    caching: &'a Figures,
}

impl Beside {
    /// Simulates both policies on the profile that was planned.
    ///
    /// # Errors
    /// Sizes that add up to more than 2^63 - 1 bytes.
    pub fn of(profile: &Profile, plan: &Plan) -> Result<Self, Overflow> {
        Ok(Self {
            plan: plan.makespan(),
            segments: reserved(profile, Policy::Segments)?,
            expandable: reserved(profile, Policy::Expandable)?,
            recorded: profile.notes.iter().find(|(name, _)| name == "reserved").and_then(|(_, text)| bytes_of(text)),
        })
    }

    /// Writes the report of the plan and the comparison as one JSON object on one line: the fields of
    /// [`ReportFormat::Json`](super::ReportFormat::Json), and `caching`.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_json(&self, verdict: &Verdict, out: &mut dyn Write) -> io::Result<()> {
        let saved = |taken: Bytes| taken.get().cast_signed() - self.plan.get().cast_signed();
        let figures = Figures {
            recorded: self.recorded.map(Bytes::get),
            segments: self.segments.get(),
            expandable: self.expandable.get(),
            saved_of_recorded: self.recorded.map(saved),
            saved_of_segments: saved(self.segments),
            saved_of_expandable: saved(self.expandable),
        };
        write_line(&With { summary: Summary::of_verdict(verdict), caching: &figures }, out)
    }

    /// Writes the comparison for a terminal.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "beside PyTorch's caching allocator, simulated")?;
        let simulated = [("default segments", self.segments), ("expandable segments", self.expandable)];
        let recorded = self.recorded.map(|taken| ("recorded, reserved", taken));
        for (name, taken) in simulated.into_iter().chain(recorded) {
            let more = taken.get() as f64 / self.plan.get().max(1) as f64;
            let verdict = match taken.get().checked_sub(self.plan.get()) {
                Some(saved) => format!("the plan saves {saved} B"),
                None => format!("the plan takes {} B more", self.plan.get() - taken.get()),
            };
            writeln!(out, "  {name:<20} {:>16} B  {more:.3} of the plan, {verdict}", taken.get())?;
        }
        Ok(())
    }
}

/// The number that a note begins with: `14340325376 bytes`.
fn bytes_of(note: &str) -> Option<Bytes> {
    Bytes::new(note.split(' ').next()?.parse().ok()?)
}
