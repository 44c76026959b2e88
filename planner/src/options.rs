//! What is asked of the planner, as plain data: part of a plan's identity.

use serde::{Deserialize, Serialize};
use terrace_profiles::units::{Align, Bytes};

use crate::problem::Reserved;
use crate::spaces::{self, Space};

/// What is asked of the planner. Two plans with equal profile and options are equal byte for byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Every size is rounded up to it and every offset a multiple of it.
    pub align: Align,
    /// The plan must fit under it. With one, the exact search stops as soon as it fits.
    pub capacity: Option<Bytes>,
    /// Bytes of the arena that no buffer may take, and borders that none may cross.
    pub reserved: Vec<Reserved>,
    /// The arena is made of segments of this many bytes, and each buffer lies in one of them.
    pub segment: Option<Bytes>,
    /// The memories that make up the arena, the one to fill first first; none: one memory without an end.
    pub spaces: Vec<Space>,
    /// When buffers of different lanes may share bytes.
    pub lanes: LaneRule,
    /// Which of a buffer's two ends counts.
    pub free: FreeRule,
    /// Most nodes the exact search and the local search may visit, each.
    pub budget_nodes: u64,
    /// How much is tried before the search.
    pub effort: Effort,
}

/// How much is tried before the search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Effort {
    /// Every heuristic and every search, until one reaches the lower bound.
    #[default]
    Full,
    /// The few that mostly do and never take long, and a moment of local search: for plans that someone waits for.
    Quick,
}

/// When buffers of different lanes may share bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LaneRule {
    /// Never: each lane has an arena of its own. Safe whatever the streams do.
    #[default]
    Separate,
    /// Where a recorded wait orders the free before the allocation.
    Ordered,
    /// Whenever the ticks allow: right if the record's frees are those of a stream-safe allocator.
    Shared,
}

/// Which of a buffer's two ends counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FreeRule {
    /// The free that the recorded allocator completed: safe across streams.
    #[default]
    Completed,
    /// The free that the program asked for: enough where one stream reuses the bytes.
    Requested,
}

/// Nodes of search where nothing is said: a few seconds on one core.
pub const DEFAULT_BUDGET_NODES: u64 = 1_000_000;

impl Options {
    /// The options with the capacity that the spaces leave: all of theirs together, if no less is asked for.
    pub(crate) fn within_spaces(&self) -> Self {
        let spaces = spaces::ranges(&self.spaces, self.align).last().and_then(|(_, end)| Bytes::new(end.get()));
        let capacity = self.capacity.into_iter().chain(spaces).min();
        Self { capacity, ..self.clone() }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            align: Align::DEFAULT,
            capacity: None,
            reserved: Vec::new(),
            segment: None,
            spaces: Vec::new(),
            lanes: LaneRule::default(),
            free: FreeRule::default(),
            budget_nodes: DEFAULT_BUDGET_NODES,
            effort: Effort::default(),
        }
    }
}
