//! The named ways in which a step differs from its plan.
//!
//! A divergence is never silent: each is counted in [`crate::Stats`], traced (target `terrace::divergence`) with what was expected and what
//! came, and served safely. None of them is an error.

use serde::Serialize;

/// One way in which a step, or a free, differed from what was planned. Sizes in bytes, rounded; slots count the plan's requests from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named as the sentence of their variant says")]
pub enum Divergence {
    /// A request smaller than its slot; served in place, or from the overflow where one before it grew.
    Shrink { slot: u32, expected: u64, actual: u64 },
    /// A request larger than its slot ever was; served in place where the slot has room, else from the overflow.
    Grew { slot: u32, expected: u64, actual: u64 },
    /// A request that no slot expects; served from the overflow.
    Extra { actual: u64 },
    /// A slot that no request came for.
    Missing { slot: u32, expected: u64 },
    /// A request that came before or after its turn; served in its slot.
    Reordered { slot: u32, turn: u32 },
    /// The slot's bytes are still used by a buffer of this step that should be dead; served from the overflow.
    LateFree { slot: u32, by: u32 },
    /// The slot's bytes are used by what outlived an earlier step, is pinned or waits for an event; served from the overflow.
    Blocked { slot: u32, by_offset: u64 },
    /// A planned buffer lived beyond the end of its step.
    Outlived { slot: u32, expected: u64 },
    /// A stream appeared that the plan does not know, or a request came on another stream than planned; served from the overflow.
    OtherLane { lane: u32, actual: u64 },
    /// A planned buffer was freed after its step had ended.
    FreeAfterStep { offset: u64 },
    /// A buffer was freed by another thread than the one that opened the step.
    FreeByOtherThread { offset: u64 },
    /// A pointer was freed that lies in the reservation but is not live: freed twice, or never the start of a buffer.
    FreedTwice { address: u64 },
    /// A pointer was freed that never came from here.
    UnknownFree { address: u64 },
    /// A step began while another was open; its requests are served outside the plan.
    ConcurrentStep { open: u32 },
    /// A step began although the one before it never ended, or one ended that never began.
    Unbalanced { ends: bool },
    /// The key differed too much, too often: it is served without a plan from now on.
    GivenUp { steps: u32 },
}

/// How often each [`Divergence`] happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "one counter for each variant")]
pub struct Counts {
    pub shrink: u64,
    pub grew: u64,
    pub extra: u64,
    pub missing: u64,
    pub reordered: u64,
    pub late_free: u64,
    pub blocked: u64,
    pub outlived: u64,
    pub other_lane: u64,
    pub free_after_step: u64,
    pub free_by_other_thread: u64,
    pub freed_twice: u64,
    pub unknown_free: u64,
    pub concurrent_step: u64,
    pub unbalanced: u64,
    pub given_up: u64,
}

impl Counts {
    /// Counts and traces one.
    pub fn note(&mut self, what: Divergence) {
        let counter = match what {
            Divergence::Shrink { .. } => &mut self.shrink,
            Divergence::Grew { .. } => &mut self.grew,
            Divergence::Extra { .. } => &mut self.extra,
            Divergence::Missing { .. } => &mut self.missing,
            Divergence::Reordered { .. } => &mut self.reordered,
            Divergence::LateFree { .. } => &mut self.late_free,
            Divergence::Blocked { .. } => &mut self.blocked,
            Divergence::Outlived { .. } => &mut self.outlived,
            Divergence::OtherLane { .. } => &mut self.other_lane,
            Divergence::FreeAfterStep { .. } => &mut self.free_after_step,
            Divergence::FreeByOtherThread { .. } => &mut self.free_by_other_thread,
            Divergence::FreedTwice { .. } => &mut self.freed_twice,
            Divergence::UnknownFree { .. } => &mut self.unknown_free,
            Divergence::ConcurrentStep { .. } => &mut self.concurrent_step,
            Divergence::Unbalanced { .. } => &mut self.unbalanced,
            Divergence::GivenUp { .. } => &mut self.given_up,
        };
        *counter += 1;
        tracing::info!(target: "terrace::divergence", ?what);
    }

    /// All of them together.
    pub fn total(&self) -> u64 {
        self.each().iter().map(|(_, count)| count).sum()
    }

    /// Name and count of each, in the order of the variants.
    pub fn each(&self) -> [(&'static str, u64); 16] {
        [
            ("shrink", self.shrink),
            ("grew", self.grew),
            ("extra", self.extra),
            ("missing", self.missing),
            ("reordered", self.reordered),
            ("late_free", self.late_free),
            ("blocked", self.blocked),
            ("outlived", self.outlived),
            ("other_lane", self.other_lane),
            ("free_after_step", self.free_after_step),
            ("free_by_other_thread", self.free_by_other_thread),
            ("freed_twice", self.freed_twice),
            ("unknown_free", self.unknown_free),
            ("concurrent_step", self.concurrent_step),
            ("unbalanced", self.unbalanced),
            ("given_up", self.given_up),
        ]
    }
}
