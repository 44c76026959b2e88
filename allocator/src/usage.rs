//! How much lives now, what the most was, and what came and went: the figures that a runtime shows of its memory.
//!
//! A step on script changes nothing in here while it runs, or each of its calls would cost more than the call. The script knows what
//! lives of it before each event, so the sum is looked up when somebody asks, and the peak when something changes beside the
//! script, or the step ends:
//!
//! ```text
//!   script      loads[0] .......... loads[cursor]
//!   Usage       now, off the script                  lives now = now + loads[cursor]
//!   peak        looked for in [looked, cursor] only if now + the script's most could raise it
//! ```
//!
//! What waits for an event after its free does not live any more: [`crate::Accounting::pending`] has it.

use serde::Serialize;
use terrace_profiles::units::Bytes;

use crate::device::{BlockState, Device};

/// So much lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Bytes, rounded.
    pub bytes: u64,
    /// Buffers.
    pub buffers: u64,
}

impl Load {
    pub(crate) fn add(&mut self, bytes: u64) {
        *self = self.plus(Self { bytes, buffers: 1 });
    }

    pub(crate) fn take(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.buffers -= 1;
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, buffers: self.buffers + other.buffers }
    }

    /// The most of each: of bytes and of buffers, which may be at different times.
    pub(crate) fn max_of(self, other: Self) -> Self {
        Self { bytes: self.bytes.max(other.bytes), buffers: self.buffers.max(other.buffers) }
    }
}

/// What lives, in all kinds of memory of a device together. Sizes are rounded to the alignment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Lives now.
    pub now: Load,
    /// The most that lived at once since the device was opened or [`Device::reset_peak`].
    pub peak: Load,
    /// Everything that was ever served, or since [`Device::reset_accumulated`].
    pub served: Load,
    /// Everything that was ever freed, or since then.
    pub freed: Load,
    /// Requests that failed because the budget was spent.
    pub exhausted: u64,
    /// The most bytes from anything that no plan placed to the end of the reservation, since the device was opened or
    /// [`Device::reset_peak`]: what lived there and the gaps between.
    pub reach: u64,
}

impl Usage {
    /// One JSON object.
    pub fn to_json(&self) -> String {
        crate::report::json(self)
    }
}

impl Device {
    /// What lives now, the most that did, and what came and went.
    pub fn usage(&mut self) -> Usage {
        self.look_for_peak();
        let mut usage = self.usage;
        if let Some(on) = &self.script {
            let load = on.script.loads[on.cursor];
            usage.now = usage.now.plus(load);
            let served = on.script.served_before(on.cursor);
            usage.served = usage.served.plus(served);
            let freed = Load { bytes: served.bytes - load.bytes, buffers: served.buffers - load.buffers };
            usage.freed = usage.freed.plus(freed);
        }
        usage
    }

    /// From here on the peak, the reach and [`Stats::outside_peak`](crate::Stats::outside_peak) are counted anew: they begin with what lives.
    pub fn reset_peak(&mut self) {
        let now = self.usage().now;
        self.usage.peak = now;
        self.stats.outside_peak = self.stats.outside;
        self.usage.reach = 0;
        let lowest = self.live.iter().find(|(_, block)| !matches!(block.state, BlockState::Slot(_)));
        if let Some((&offset, _)) = lowest {
            self.usage_reaches(offset);
        }
    }

    /// A reservation in which the same can lie again where it lay, once its plans are loaded: the largest plan, and all that lay
    /// outside of plans since the device was opened or [`Device::reset_peak`], gaps included. After a recording, reset the peak and
    /// run what was recorded once more: a step that is recorded lies outside. It is what to begin with, and no promise: in less
    /// room a best fit chooses other gaps, so less may do, down to [`Device::arena_bytes`] and [`Stats::outside_peak`](crate::Stats::outside_peak).
    pub fn suggested_budget(&self) -> Bytes {
        Bytes::new(self.keys.arena() + self.usage.reach).unwrap_or_default()
    }

    /// Something outside of plans was placed there.
    pub(crate) fn usage_reaches(&mut self, offset: u64) {
        self.usage.reach = self.usage.reach.max(self.space.total() - offset);
    }

    /// From here on what is served and freed, and failures, are counted anew.
    pub fn reset_accumulated(&mut self) {
        // What of the open script has passed is part of the past.
        self.leave_script();
        (self.usage.served, self.usage.freed) = (Load::default(), Load::default());
        self.usage.exhausted = 0;
    }

    /// Something was served outside the script.
    pub(crate) fn usage_taken(&mut self, bytes: u64) {
        self.look_for_peak();
        self.usage.now.add(bytes);
        self.usage.served.add(bytes);
        let script = self.script.as_ref().map_or(Load::default(), |on| on.script.loads[on.cursor]);
        self.usage.peak = self.usage.peak.max_of(self.usage.now.plus(script));
    }

    /// And freed.
    pub(crate) fn usage_given(&mut self, bytes: u64) {
        self.look_for_peak();
        self.usage.now.take(bytes);
        self.usage.freed.add(bytes);
    }

    /// What lives of the script is about to live outside of it.
    pub(crate) fn usage_leaves_script(&mut self) {
        self.look_for_peak();
        let Some(on) = &self.script else { return };
        let (served, lives) = (on.script.served_before(on.cursor), on.script.loads[on.cursor]);
        let usage = &mut self.usage;
        usage.now = usage.now.plus(lives);
        usage.served = usage.served.plus(served);
        usage.freed.bytes += served.bytes - lives.bytes;
        usage.freed.buffers += served.buffers - lives.buffers;
    }

    /// The script has run to its end, where nothing of it lives.
    pub(crate) fn usage_ends_script(&mut self) {
        self.look_for_peak();
        let Some(on) = &self.script else { return };
        let served = on.script.served;
        self.usage.served = self.usage.served.plus(served);
        self.usage.freed = self.usage.freed.plus(served);
    }

    /// Brings the peak up to date with what has happened on script.
    fn look_for_peak(&mut self) {
        let Some(on) = &self.script else { return };
        let from = std::mem::replace(&mut self.looked, on.cursor);
        let usage = &mut self.usage;
        let at_most = usage.now.plus(on.script.most);
        if usage.peak.max_of(at_most) == usage.peak {
            return;
        }
        let passed = on.script.loads[from..=on.cursor].iter();
        let most = passed.fold(Load::default(), |most, load| most.max_of(*load));
        usage.peak = usage.peak.max_of(usage.now.plus(most));
    }
}
