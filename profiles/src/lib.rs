#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod budget;
pub mod cards;
pub mod codec;
mod error;
mod event;
pub mod import;
pub mod kv;
mod limits;
mod memory;
pub mod model;
mod profile;
pub mod serving;
pub mod shape;
pub mod synth;
pub mod text;
mod toml_file;
pub mod units;

pub use codec::Fingerprint;
pub use error::{At, Error, Inconsistency};
pub use event::{Action, BufferId, Event, Hints, LabelId, LaneId};
pub use limits::Limits;
pub use memory::{Memory, Recorder};
pub use profile::{Life, Profile, Step, StepSelector};
