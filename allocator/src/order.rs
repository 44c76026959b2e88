//! Which stream's work comes before which: what makes it safe to give one stream the bytes of another.
//!
//! A buffer is freed when the host says so, while kernels that use it may still be queued. On the stream it was asked for on
//! that is harmless: whoever gets the bytes queues behind them. Any other stream has to wait, on the device, never on the
//! host:
//!
//! ```text
//!   stream 1   [ kernel uses X ]          X freed, kernel still queued
//!                              |event
//!   stream 2                   [ waits ][ kernel uses Y at X's bytes ]
//! ```
//!
//! A device with one stream records one event for each step and waits for none. The end of a step is an event on each of its
//! streams, and a step begun elsewhere, or another stream of it, waits for them once. Bytes freed since then are ordered by
//! an event of their own, and only if nothing that needs none is free.
//!
//! Refused: promising an order to or of a stream that is being captured. What it would need is served from elsewhere.

use crate::backing::{BackingError, Event, Stream};
use crate::device::Device;

/// What has to come before the next use of free bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum After {
    /// The end of the last step; at first, nothing.
    Ends,
    /// What this stream has queued so far.
    Work(Stream),
}

/// The end of the last step that has ended, and with it of all before.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Its streams. The event is missing while the stream is being captured, and recorded when it is needed.
    events: Vec<(Stream, Option<Event>)>,
    /// Streams that wait for all of it already.
    waiting: Vec<Stream>,
}

/// What other streams may still do to the bytes that the open step has claimed.
#[derive(Debug, Default)]
pub(crate) struct Intruders {
    streams: Vec<Stream>,
    /// For each stream of the step, how many of them it waits for.
    ordered: Vec<(Stream, usize)>,
}

impl Intruders {
    pub fn push(&mut self, stream: Stream) {
        if self.streams.last() != Some(&stream) || self.ordered.iter().any(|(_, done)| *done == self.streams.len()) {
            self.streams.push(stream);
        }
    }
}

impl Device {
    /// Makes `stream` wait for that. False if it cannot be promised.
    pub(crate) fn order(&mut self, after: After, stream: Stream) -> bool {
        match after {
            After::Work(other) => other == stream || self.wait_for(other, stream),
            After::Ends => self.wait_for_ends(stream).unwrap_or(false),
        }
    }

    fn wait_for(&mut self, other: Stream, stream: Stream) -> bool {
        if self.backing.is_capturing(other) || self.backing.is_capturing(stream) {
            return false;
        }
        let Ok(event) = self.backing.record(other) else { return false };
        let waits = self.backing.wait(stream, event).is_ok();
        self.backing.forget(event);
        waits
    }

    /// Makes `stream` wait for the end of the last step, unless that ran on it alone. False while one of them is captured.
    pub(crate) fn wait_for_ends(&mut self, stream: Stream) -> Result<bool, BackingError> {
        if self.ends.events.iter().all(|(other, _)| *other == stream) || self.ends.waiting.contains(&stream) {
            return Ok(true);
        }
        if self.backing.is_capturing(stream) {
            return Ok(false);
        }
        self.record_ends()?;
        for (other, event) in &self.ends.events {
            match event {
                _ if *other == stream => {}
                Some(event) => self.backing.wait(stream, *event)?,
                None => return Ok(false),
            }
        }
        self.ends.waiting.push(stream);
        Ok(true)
    }

    /// Records the ends that could not be recorded when they came.
    fn record_ends(&mut self) -> Result<(), BackingError> {
        for (stream, event) in &mut self.ends.events {
            if event.is_none() && !self.backing.is_capturing(*stream) {
                *event = Some(self.backing.record(*stream)?);
            }
        }
        Ok(())
    }

    /// Makes `stream` wait for all that others may still do in the claimed range. False if that cannot be promised.
    pub(crate) fn order_in_claimed(&mut self, stream: Stream) -> bool {
        if !self.wait_for_ends(stream).unwrap_or(false) {
            return false;
        }
        let Some(open) = &self.open else { return true };
        let intruders = &open.intruders;
        let done = intruders.ordered.iter().find(|(other, _)| *other == stream).map_or(0, |(_, done)| *done);
        let all = intruders.streams.len();
        if done == all {
            return true;
        }
        let mut others: Vec<Stream> = intruders.streams[done..].to_vec();
        others.sort_unstable();
        others.dedup();
        if !others.into_iter().all(|other| self.order(After::Work(other), stream)) {
            return false;
        }
        let intruders = &mut self.open.as_mut().expect("as above").intruders;
        intruders.ordered.retain(|(other, _)| *other != stream);
        intruders.ordered.push((stream, all));
        true
    }

    /// A step ended that was begun on `stream` and also used `others`: marks the end on each, and what they freed before it
    /// waits for nothing else any more.
    pub(crate) fn mark_ends(
        &mut self,
        stream: Stream,
        others: &[Stream],
        intruders: &Intruders,
    ) -> Result<(), BackingError> {
        // Where the step could not be ordered after the end before it, that one still counts.
        let unordered = !self.wait_for_ends(stream).unwrap_or(false);
        let before = self.ends.events.iter().map(|(stream, _)| stream).filter(|_| unordered);
        let mut streams = vec![stream];
        for other in others.iter().chain(&intruders.streams).chain(before) {
            if !streams.contains(other) {
                streams.push(*other);
            }
        }
        for (_, event) in std::mem::take(&mut self.ends).events {
            event.into_iter().for_each(|event| self.backing.forget(event));
        }
        for stream in &streams {
            self.space.rename(After::Work(*stream), After::Ends);
        }
        self.ends.events = streams.into_iter().map(|stream| (stream, None)).collect();
        self.record_ends()
    }

    /// Waits on the host until no work is queued any more on free bytes, where that can be known: for bytes that will be used
    /// by nobody knows which stream.
    pub(crate) fn settle(&mut self) {
        for after in self.space.waits() {
            let After::Work(stream) = after else { continue };
            if !self.backing.is_capturing(stream)
                && let Ok(event) = self.backing.record(stream)
                && self.backing.synchronize(event).is_ok()
            {
                self.space.rename(after, After::Ends);
            }
        }
        // An end that cannot be recorded now stays.
        let _ = self.record_ends();
        let backing = &mut self.backing;
        self.ends.events.retain(|(_, event)| event.is_none_or(|event| backing.synchronize(event).is_err()));
    }

    /// Whether the end of the last step is known to be over.
    pub(crate) fn is_settled(&self) -> bool {
        self.ends.events.is_empty()
    }

    /// Nothing was ever queued: the reservation is another.
    pub(crate) fn forget_ends(&mut self) {
        for (_, event) in std::mem::take(&mut self.ends).events {
            event.into_iter().for_each(|event| self.backing.forget(event));
        }
    }

    /// Takes bytes whose earlier uses come before what `stream` queues from now on: where possible such that need no wait.
    pub(crate) fn take(&mut self, size: u64, stream: Stream) -> Option<u64> {
        let (own, ends) = (After::Work(stream), After::Ends);
        let narrower = |space: &crate::space::Space| {
            let (a, b) = (space.narrowest(size, own), space.narrowest(size, ends));
            if a.is_some_and(|a| b.is_none_or(|b| a <= b)) { [own, ends] } else { [ends, own] }
        };
        for after in narrower(&self.space) {
            if self.space.narrowest(size, after).is_some() && self.order(after, stream) {
                return self.space.take(size, after);
            }
        }
        self.take_foreign(size, stream)
    }

    #[cold]
    fn take_foreign(&mut self, size: u64, stream: Stream) -> Option<u64> {
        let waits = self.space.waits();
        for &after in &waits {
            if self.space.narrowest(size, after).is_some() && self.order(after, stream) {
                return self.space.take(size, after);
            }
        }
        // No range alone is wide enough: perhaps several side by side are, once the stream waits for all of them.
        if self.space.largest() < size {
            return None;
        }
        for after in waits {
            if self.order(after, stream) {
                self.space.rename(after, After::Work(stream));
            }
        }
        self.space.take(size, After::Work(stream))
    }
}
