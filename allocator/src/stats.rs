//! What happened so far, in numbers: as JSON, and as text for Prometheus.

use serde::Serialize;

use crate::divergence::Counts;

/// Figures of a device since it was opened. Bytes unless the name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Size of the one reservation.
    pub reservation: u64,
    /// Steps begun.
    pub steps: u64,
    /// Steps that ran exactly as planned.
    pub steps_on_script: u64,
    /// Requests inside steps that have ended.
    pub allocs: u64,
    /// Requests that took the long way: not answered from a script.
    pub slow_allocs: u64,
    /// Requests inside steps whose key was seen before, without those that outlived their step.
    pub replay_allocs: u64,
    /// Those of them served in plan.
    pub hits: u64,
    /// The same for keys seen twice before.
    pub replay_allocs_warm: u64,
    /// Those of them served in plan.
    pub hits_warm: u64,
    /// How often each divergence happened.
    pub divergences: Counts,
    /// In use outside plans now.
    pub outside: u64,
    /// The most that ever was.
    pub outside_peak: u64,
    /// Of that, what a plan should have served: now.
    pub overflow: u64,
    /// The most that ever was.
    pub overflow_peak: u64,
    /// The largest load of any step, counting what was freed inside it: no arena could have been smaller.
    pub lower_bound: u64,
    /// Plans made.
    pub plans: u64,
    /// Time spent waiting for them, in nanoseconds.
    pub plan_ns: u64,
    /// Buffers whose redzone was found damaged.
    pub redzones_damaged: u64,
}

impl Stats {
    /// A step of a key seen `before` times ended: of `inside` requests that lived in it, `hits` were served in plan.
    pub(crate) fn served(&mut self, before: u64, hits: u64, inside: u64) {
        if before >= 1 {
            self.replay_allocs += inside;
            self.hits += hits;
        }
        if before >= 2 {
            self.replay_allocs_warm += inside;
            self.hits_warm += hits;
        }
    }

    pub(crate) fn outside_taken(&mut self, size: u64, missed: bool) {
        self.outside += size;
        self.outside_peak = self.outside_peak.max(self.outside);
        if missed {
            self.overflow += size;
            self.overflow_peak = self.overflow_peak.max(self.overflow);
        }
    }

    pub(crate) fn outside_given(&mut self, size: u64, missed: bool) {
        self.outside -= size;
        if missed {
            self.overflow -= size;
        }
    }
}
