//! The one error of this crate. Each prints as one sentence that names the culprit and what to do.

use terrace_profiles::units::Bytes;

use crate::backing::BackingError;
use crate::exhausted::Exhausted;

/// What can go wrong between a request and a span.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The budget is spent; the report says by what.
    #[error("{0}")]
    OutOfMemory(Box<Exhausted>),
    /// The driver refused.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// Nothing can be served from so little.
    #[error("a budget of {} bytes holds not one span of {align} bytes; give more", budget.get())]
    BudgetTooSmall {
        /// What was asked for.
        budget: Bytes,
        /// The alignment.
        align: u64,
    },
    /// A call that is only possible between steps came inside one.
    #[error("{what} is possible between steps only, and step '{step}' is open; end it first")]
    StepOpen {
        /// The call.
        what: &'static str,
        /// The key of the open step.
        step: String,
    },
    /// The reservation cannot be replaced while something is in it.
    #[error(
        "the reservation cannot be resized while {live} buffers ({bytes} bytes) live in it and {pinned} bytes are pinned"
    )]
    NotEmpty {
        /// Live buffers.
        live: usize,
        /// Their bytes.
        bytes: u64,
        /// Bytes of graph pools.
        pinned: u64,
    },
    /// A resize released the old reservation and then got neither the new size nor the old one back.
    #[error(
        "the reservation of {held} was released for one of {wanted}, and now neither is to be had ({reason}); resize to less"
    )]
    ReservationLost {
        /// What there was.
        held: Bytes,
        /// What was asked for.
        wanted: Bytes,
        /// What the driver said.
        reason: BackingError,
    },
    /// A graph pool that is not there.
    #[error("graph pool ({}, {}) is not open; begin it first", .0.0, .0.1)]
    NoSuchPool((u64, u64)),
    /// A profile or plan that does not belong to a step.
    #[error(transparent)]
    Planner(#[from] terrace_planner::Error),
    /// A file of saved plans.
    #[error(transparent)]
    Profile(#[from] terrace_profiles::Error),
    /// A file of saved plans that contradicts itself.
    #[error("{name}: {reason}")]
    Saved {
        /// The file.
        name: String,
        /// Why, as the end of a sentence.
        reason: String,
    },
    /// A file of saved plans that was made for something else.
    #[error(
        "{name}: it was saved for {field} {saved}, and this is {field} {here}; load the file that was saved here, or record anew"
    )]
    SavedFor {
        /// The file.
        name: String,
        /// What differs.
        field: &'static str,
        /// What the file says.
        saved: String,
        /// What this device says.
        here: String,
    },
}
