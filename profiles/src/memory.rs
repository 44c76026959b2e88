//! Where a forward's buffers come from, seen from the forward: the arena's step implements it, and so does a dry recorder
//! that only writes down what was asked.

use std::error::Error;

use crate::units::{Bytes, DeviceSpan};

/// Labelled requests for spans, in the order of a forward. A forward takes `&mut dyn Memory`.
pub trait Memory {
    /// A span of at least `bytes`. `label` says who asks, for reports.
    ///
    /// # Errors
    /// There is no room, said by whoever has none; nothing was taken.
    fn alloc(&mut self, bytes: Bytes, label: &str) -> Result<DeviceSpan, Box<dyn Error + Send + Sync>>;

    /// Gives a span back.
    fn free(&mut self, span: DeviceSpan);
}
