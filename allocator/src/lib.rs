#![doc = include_str!("../README.md")]

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
pub mod host;
mod key;
mod pool;
mod record;
mod replay;
mod script;
mod space;
mod stats;
mod step;

pub use allocator::Allocator;
pub use backing::{Backing, BackingError, Stream};
pub use device::{Config, Device};
pub use divergence::{Counts, Divergence};
pub use error::Error;
pub use exhausted::Exhausted;
pub use pool::{PoolId, PoolReport};
pub use stats::Stats;
