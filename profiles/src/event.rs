//! What a record is made of: one [`Event`] for each thing that happened to device memory, in order.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units::{Align, Bytes, Offset, Tick};

/// A buffer: the index of its allocation among all allocations of the profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BufferId(pub u32);

/// A label: an index into [`Profile::labels`](crate::Profile::labels).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LabelId(pub u32);

/// A lane: an index into [`Profile::lanes`](crate::Profile::lanes). A lane is a stream, numbered by first appearance,
/// since stream handles differ from run to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LaneId(pub u32);

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When. Ticks never decrease along a profile; events may share one.
    pub tick: Tick,
    /// What.
    pub action: Action,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// A buffer begins to live.
    Alloc {
        /// The next id: ids count allocations from 0.
        id: BufferId,
        /// Bytes asked for, not rounded.
        bytes: Bytes,
        /// Who asked.
        label: LabelId,
        /// The stream it was asked on.
        lane: LaneId,
        /// What the placement must respect beside size and life; most buffers have none.
        hints: Option<Box<Hints>>,
    },
    /// The program let go of a buffer whose bytes another stream may still use; [`Action::Free`] follows when they may
    /// be given out again. A plan for one stream may already reuse them here.
    FreeRequested {
        /// The buffer.
        id: BufferId,
    },
    /// A buffer ceases to live.
    Free {
        /// The buffer.
        id: BufferId,
    },
    /// From here on only the bytes `[from, to)` of a buffer are in use; `from == to` opens a gap in its life, the whole
    /// range closes it. The offset of the buffer stays the same throughout.
    Keep {
        /// The buffer.
        id: BufferId,
        /// First byte in use.
        from: Bytes,
        /// First byte after it.
        to: Bytes,
    },
    /// A forward begins.
    StepBegin {
        /// What the runtime calls this kind of forward, such as `prefill/4128`.
        key: Box<str>,
    },
    /// The open forward ends.
    StepEnd,
    /// Work was queued; for people who read the record.
    Op {
        /// What work.
        label: LabelId,
        /// On which stream.
        lane: LaneId,
    },
    /// `lane` waits for everything queued on `on` so far: what `on` freed before, `lane` may reuse after.
    Wait {
        /// The lane that waits.
        lane: LaneId,
        /// The lane waited for.
        on: LaneId,
    },
}

/// What a placement must respect beside size and life.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hints {
    /// The offset must be a multiple of this.
    pub align: Option<Align>,
    /// The offset must be this.
    pub fixed: Option<Offset>,
    /// The buffer uses the bytes of this earlier one, which must be alive: both lie at the same offset, and the bytes
    /// stay taken until both are freed (a view, or a result written in place).
    pub alias: Option<BufferId>,
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
