//! How much memory reading may take, and the meter that is charged as events and strings are stored.
//!
//! No reader of this crate trusts a length or the size of a file: it charges the meter for what it is about to keep, and
//! the first charge over the limit is [`Error::TooLarge`]. A gzip bomb therefore ends where its profile would no longer fit.

use std::cell::Cell;
use std::rc::Rc;

use crate::error::{At, Error};
use crate::event::Event;
use crate::profile::Life;
use crate::units::Bytes;

/// What reading an input may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory for the profile and for what stands beside it while it is read and checked.
    pub memory: Bytes,
}

impl Default for Limits {
    /// 8 GiB: some twenty million buffers.
    fn default() -> Self {
        const DEFAULT: Bytes = Bytes::new(8 << 30).expect("8 GiB is a size");
        Self { memory: DEFAULT }
    }
}

/// One event in a vector that doubles.
pub(crate) const EVENT_COST: u64 = 2 * size_of::<Event>() as u64;
/// What an allocation takes beside its event: a life in the checking pass, and an entry in the map of live addresses.
pub(crate) const BUFFER_COST: u64 = 2 * (size_of::<Life>() as u64 + 16) + 64;
/// What a text takes beside its bytes: its place in a vector that doubles, and in a map.
pub(crate) const TEXT_COST: u64 = 128;

/// Memory used so far against the limit; clones share one count.
#[derive(Clone, Debug)]
pub(crate) struct Meter {
    name: Rc<str>,
    limit: Bytes,
    used: Rc<Cell<u64>>,
}

impl Meter {
    /// Nothing used yet; `name` is the input that errors name.
    pub(crate) fn new(name: &str, limits: Limits) -> Self {
        Self { name: name.into(), limit: limits.memory, used: Rc::default() }
    }

    /// Notes that `bytes` more are about to be kept.
    pub(crate) fn charge(&self, bytes: u64, at: At) -> Result<(), Error> {
        let used = self.used.get().saturating_add(bytes);
        self.used.set(used);
        if used > self.limit.get() { Err(self.too_large(at)) } else { Ok(()) }
    }

    /// Notes that `bytes` are no longer kept.
    pub(crate) fn release(&self, bytes: u64) {
        self.used.set(self.used.get().saturating_sub(bytes));
    }

    /// What may still be charged.
    pub(crate) fn left(&self) -> u64 {
        self.limit.get().saturating_sub(self.used.get())
    }

    /// The error of a charge over the limit.
    pub(crate) fn too_large(&self, at: At) -> Error {
        Error::TooLarge { name: self.name.to_string(), at, limit: self.limit }
    }
}
