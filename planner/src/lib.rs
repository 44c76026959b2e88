#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod bound;
pub mod caching;
pub mod check;
#[cfg(feature = "cli")]
pub mod cli;
mod error;
pub mod fitting;
pub mod graph;
mod lifetime;
mod options;
mod plan;
mod planning;
pub mod problem;
pub mod report;
pub mod solve;
pub mod spaces;
mod sweep;

pub use error::Error;
pub use options::{DEFAULT_BUDGET_NODES, Effort, FreeRule, LaneRule, Options};
pub use plan::{PLAN_VERSION, Plan, Proof, Slot};
pub use planning::{ArenaSize, Refusal, Verdict, arena_size, placed, plan, problem as problem_of, replan};
