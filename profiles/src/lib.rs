#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod codec;
mod error;
mod event;
pub mod import;
mod limits;
mod profile;
pub mod text;
pub mod units;

pub use codec::Fingerprint;
pub use error::{At, Error, Inconsistency};
pub use event::{Action, BufferId, Event, Hints, LabelId, LaneId};
pub use limits::Limits;
pub use profile::{Life, Profile, Step, StepSelector};
