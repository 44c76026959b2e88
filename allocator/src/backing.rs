//! Where device memory comes from: one reservation, and the events that say when a stream is done with a piece of it.
//!
//! A [`Backing`] is asked for memory once, when a device is opened; everything after that happens inside the reservation.
//! `HostBacking` (`host.rs`) is real memory of this process, where there is no GPU; `CudaBacking` (`cuda.rs`) is a device's;
//! `FakeDevice` (`fake.rs`) is a device for tests, with queues that run when the test says so. One conformance suite,
//! `tests/it/conformance.rs`, runs over all three.

use terrace_profiles::units::{Bytes, DeviceSpan};

/// A stream, by its raw handle; 0 is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(pub u64);

/// A point in a stream's work, by the number the backing gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// What a backing can fail at; each names what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// The driver library or the device is not there.
    #[error("{0}")]
    NoDevice(String),
    /// The reservation is larger than what is free.
    #[error("reserving {asked} ({} bytes) failed: {reason}", asked.get())]
    Reserve {
        /// Bytes asked for.
        asked: Bytes,
        /// What the driver said.
        reason: String,
    },
    /// The process was forked after the device was opened: a child cannot use its parent's device.
    #[error("{call} refused: process {owner} opened this device and this is a fork of it; open a device after fork()")]
    Forked {
        /// What was called.
        call: &'static str,
        /// The process that opened the device.
        owner: u32,
    },
    /// Any other call.
    #[error("{call} failed: {reason}")]
    Call {
        /// What was called.
        call: &'static str,
        /// What the driver said.
        reason: String,
    },
}

/// A source of device memory and of events on its streams.
pub trait Backing: Send {
    /// What it is, for reports: `host`, or the device's name.
    fn name(&self) -> String;

    /// Total and free bytes of the device, as far as it knows.
    fn memory(&self) -> Option<(Bytes, Bytes)>;

    /// The one allocation: `bytes` of memory, aligned to at least 512. A second call without a release is an error.
    fn reserve(&mut self, bytes: Bytes) -> Result<DeviceSpan, BackingError>;

    /// Gives the reservation back, once everything queued on the device is over. Not while a stream is being captured: waiting
    /// for the device breaks the capture. After the device is gone this succeeds: there is nothing left to give.
    fn release(&mut self, span: DeviceSpan) -> Result<(), BackingError>;

    /// How many reservations were made so far: the driver allocations of this device.
    fn reservations(&self) -> u64;

    /// An event after everything queued on `stream` so far.
    fn record(&mut self, stream: Stream) -> Result<Event, BackingError>;

    /// Whether all work before the event is done. A finished event is forgotten, and stays done for whoever asks again.
    fn is_done(&mut self, event: Event) -> Result<bool, BackingError>;

    /// What is queued on `stream` from now on waits for the event; the host does not.
    fn wait(&mut self, stream: Stream, event: Event) -> Result<(), BackingError>;

    /// Blocks until all work before the event is done, and forgets it.
    fn synchronize(&mut self, event: Event) -> Result<(), BackingError>;

    /// Lets go of an event nobody asks about any more, finished or not. Whoever asks all the same is told that it is done.
    fn forget(&mut self, event: Event);

    /// Whether the stream is being captured into a graph: then no event may be recorded on it.
    fn is_capturing(&mut self, stream: Stream) -> bool;

    /// Sets bytes inside the reservation, in stream order; for poison and redzones.
    fn fill(&mut self, span: DeviceSpan, byte: u8, stream: Stream) -> Result<(), BackingError>;

    /// Copies the first `into.len()` bytes of a span inside the reservation to the host, in stream order, and blocks until they
    /// are there; for redzones. Not on a stream that is being captured. It waits for one stream and not for the device, since
    /// that would break a capture elsewhere.
    fn read(&mut self, span: DeviceSpan, into: &mut [u8], stream: Stream) -> Result<(), BackingError>;
}

/// What every backing checks before it makes a reservation.
pub(crate) fn may_reserve(held: Option<DeviceSpan>, asked: Bytes) -> Result<(), BackingError> {
    let refuse = |reason| Err(BackingError::Reserve { asked, reason });
    match held {
        Some(held) => refuse(format!("a reservation of {} is already held; release it first", held.bytes)),
        None if asked.is_zero() => refuse("a reservation of nothing has no address".to_owned()),
        None => Ok(()),
    }
}

/// The offset of `span` in the reservation, or why it has none.
pub(crate) fn offset_in(held: Option<DeviceSpan>, span: DeviceSpan, call: &'static str) -> Result<u64, BackingError> {
    let held = held.ok_or_else(|| BackingError::Call { call, reason: "nothing is reserved".to_owned() })?;
    let offset = span.address.checked_sub(held.address);
    let fits = |offset: &u64| span.bytes.get() <= held.bytes.get() && *offset <= held.bytes.get() - span.bytes.get();
    offset.filter(fits).ok_or_else(|| BackingError::Call {
        call,
        reason: format!(
            "{} at {:#x} is not inside the reservation of {} at {:#x}",
            span.bytes, span.address, held.bytes, held.address
        ),
    })
}

/// The part of `span` that `into` is to receive.
pub(crate) fn head(span: DeviceSpan, into: &[u8], call: &'static str) -> Result<DeviceSpan, BackingError> {
    let bytes = Bytes::new(into.len() as u64).filter(|bytes| *bytes <= span.bytes);
    let bytes = bytes.ok_or_else(|| BackingError::Call {
        call,
        reason: format!("{} bytes were asked of a span of {}", into.len(), span.bytes.get()),
    })?;
    Ok(DeviceSpan { address: span.address, bytes })
}

/// What every backing checks before it gives a reservation back.
pub(crate) fn may_release(held: Option<DeviceSpan>, span: DeviceSpan) -> Result<(), BackingError> {
    if held == Some(span) {
        return Ok(());
    }
    let what = held.map_or("nothing".to_owned(), |held| format!("{} at {:#x}", held.bytes, held.address));
    Err(BackingError::Call {
        call: "release",
        reason: format!("{} at {:#x} is not what is reserved: {what} is", span.bytes, span.address),
    })
}

/// That the backing gave this event out: it numbers them from 1.
pub(crate) fn known(event: Event, newest: u64, call: &'static str) -> Result<(), BackingError> {
    if (1..=newest).contains(&event.0) {
        return Ok(());
    }
    Err(BackingError::Call { call, reason: format!("event {} was never recorded here", event.0) })
}
