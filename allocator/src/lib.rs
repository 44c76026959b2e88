#![doc = include_str!("../README.md")]

mod alignment;
mod allocator;
pub mod backing;
#[cfg(feature = "cuda")]
pub mod cuda;
mod debug;
mod device;
mod divergence;
mod error;
mod exhausted;
pub mod fake;
pub mod ffi;
pub mod host;
mod key;
mod labels;
mod order;
mod persist;
mod pool;
mod record;
mod replay;
mod report;
mod script;
mod serve;
mod space;
mod stats;
mod step;
mod usage;

pub use allocator::Allocator;
pub use backing::{Backing, BackingError, Stream};
pub use device::{Config, Device};
pub use divergence::{Counts, Divergence};
pub use error::Error;
pub use exhausted::{Accounting, Exhausted};
pub use persist::{ARENA_VERSION, Existing, Identity, Loaded};
pub use pool::{PoolId, PoolReport};
pub use report::{
    BootSummary, Feature, KeyLeft, LabelLeft, LeakReport, Left, LiveBuffer, LiveMap, LiveState, MemoryRow,
};
pub use stats::Stats;
#[doc(hidden)]
pub use step::TableSizes;
pub use usage::{Load, Usage};
