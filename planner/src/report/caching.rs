//! A plan beside PyTorch's caching allocator: what each takes from the driver for the same requests.

use std::io::{self, Write};

use terrace_profiles::Profile;
use terrace_profiles::units::{Bytes, Overflow};

use crate::caching::{Policy, reserved};
use crate::plan::Plan;

/// What the caching allocator takes under each of its policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beside {
    plan: Bytes,
    segments: Bytes,
    expandable: Bytes,
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
        })
    }

    /// Writes the comparison for a terminal.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "beside PyTorch's caching allocator, simulated")?;
        for (name, taken) in [("default segments", self.segments), ("expandable segments", self.expandable)] {
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
