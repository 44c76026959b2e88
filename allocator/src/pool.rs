//! Graph pools: memory whose addresses a captured graph has baked in.
//!
//! Requests that come while a pool is being captured are served from ranges that are pinned for it. A pinned range is never
//! handed out to anybody else, trimmed or moved until the pool is released and nothing in it lives. Graphs that share a pool
//! run one at a time, so a later capture reuses what an earlier one freed: the pool is as large as the largest of them, not
//! as their sum (both are reported). Inside one capture, streams do not share: a graph has no waits but its own.
//!
//! A graph runs on streams that nobody names here, so a pool is only made of bytes that no queued work uses any more.

use std::collections::BTreeMap;

use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::backing::Stream;
use crate::device::{Block, BlockState, Device};
use crate::error::Error;
use crate::order::After;
use crate::space::Space;

/// What CUDA calls a memory pool id.
pub type PoolId = (u64, u64);

/// A pool of one or several graphs.
#[derive(Debug)]
pub(crate) struct Pool {
    /// What is free inside the pinned ranges.
    space: Space,
    /// Pinned ranges: offset and size.
    ranges: Vec<(u64, u64)>,
    /// What lives inside, by offset.
    live: BTreeMap<u64, Graphed>,
    /// The streams being captured into it; `None` outside of captures, empty for all.
    pub capturing: Option<Vec<Stream>>,
    released: bool,
    /// Bytes in use by the open capture, and the most of it.
    now: u64,
    most: u64,
    /// The most of each capture so far.
    captures: Vec<u64>,
}

/// What lives in a pool.
#[derive(Debug)]
struct Graphed {
    size: u64,
    label: u32,
    stream: Stream,
    /// Which capture asked for it.
    capture: usize,
}

/// What a pool holds, for reports.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PoolReport {
    /// Its id.
    pub id: PoolId,
    /// Bytes pinned for it.
    pub pinned: u64,
    /// Bytes that live in it.
    pub live: u64,
    /// What its captures would need one beside the other.
    pub sum_of_captures: u64,
    /// How many captures.
    pub captures: usize,
}

impl Pool {
    fn new(total: u64) -> Self {
        let mut space = Space::new(total);
        space.take_range(0..total);
        let (ranges, live, captures) = (Vec::new(), BTreeMap::new(), Vec::new());
        Self { space, ranges, live, capturing: None, released: false, now: 0, most: 0, captures }
    }

    /// Bytes pinned.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|(_, size)| size).sum()
    }

    /// Pinned ranges: offset and size.
    pub fn ranges(&self) -> &[(u64, u64)] {
        &self.ranges
    }

    /// What lives inside: offset, size, label and stream.
    pub fn live(&self) -> impl Iterator<Item = (u64, u64, u32, Stream)> + '_ {
        self.live.iter().map(|(offset, block)| (*offset, block.size, block.label, block.stream))
    }

    fn live_bytes(&self) -> u64 {
        self.live.values().map(|block| block.size).sum()
    }
}

impl Device {
    /// From here on, requests on `streams` (on all, if none is named) belong to that pool: a capture begins.
    pub fn begin_pool(&mut self, id: PoolId, streams: &[Stream]) {
        // A capture's addresses must not lie where a plan will hand them out.
        self.leave_script();
        self.settle();
        let total = self.space.total();
        let pool = self.pools.entry(id).or_insert_with(|| Pool::new(total));
        pool.capturing = Some(streams.to_vec());
        pool.released = false;
        (pool.now, pool.most) = (0, 0);
        // Another graph, and graphs of a pool run one at a time: streams may take what others had.
        for after in pool.space.waits() {
            pool.space.rename(after, After::Ends);
        }
    }

    /// The capture ends; the pool stays pinned.
    ///
    /// # Errors
    /// The pool is not being captured.
    pub fn end_pool(&mut self, id: PoolId) -> Result<(), Error> {
        let pool = self.pools.get_mut(&id).filter(|pool| pool.capturing.is_some()).ok_or(Error::NoSuchPool(id))?;
        pool.capturing = None;
        pool.captures.push(pool.most);
        Ok(())
    }

    /// No graph uses the pool any more: its bytes are free once nothing in it lives. The last replay must be over, or queued
    /// on the stream that was captured.
    ///
    /// # Errors
    /// There is no such pool.
    pub fn release_pool(&mut self, id: PoolId) -> Result<(), Error> {
        let pool = self.pools.get_mut(&id).ok_or(Error::NoSuchPool(id))?;
        pool.released = true;
        pool.capturing = None;
        self.retire_pool(id);
        Ok(())
    }

    /// What each pool holds.
    pub fn pool_reports(&self) -> Vec<PoolReport> {
        let report = |(id, pool): (&PoolId, &Pool)| PoolReport {
            id: *id,
            pinned: pool.bytes(),
            live: pool.live_bytes(),
            sum_of_captures: pool.captures.iter().sum(),
            captures: pool.captures.len(),
        };
        self.pools.iter().map(report).collect()
    }

    /// Whether a pool is being captured.
    pub(crate) fn is_capturing(&self) -> bool {
        self.pools.values().any(|pool| pool.capturing.is_some())
    }

    /// The pool that a request on `stream` belongs to.
    pub(crate) fn capturing_pool(&self, stream: Stream) -> Option<PoolId> {
        let takes = |pool: &Pool| {
            pool.capturing.as_ref().is_some_and(|streams| streams.is_empty() || streams.contains(&stream))
        };
        self.pools.iter().find(|(_, pool)| takes(pool)).map(|(id, _)| *id)
    }

    pub(crate) fn alloc_in_pool(
        &mut self,
        id: PoolId,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
    ) -> Result<DeviceSpan, Error> {
        let pool = self.pools.get_mut(&id).expect("it is capturing");
        let offset = match take_in(&mut pool.space, size, stream).or_else(|| self.widen_pool(id, size, stream, label)) {
            Some(offset) => offset,
            None => self.pin_when_exhausted(id, bytes, size, stream, label)?,
        };
        let label = self.labels.id(label);
        let pool = self.pools.get_mut(&id).expect("as above");
        pool.live.insert(offset, Graphed { size, label, stream, capture: pool.captures.len() });
        pool.now += size;
        pool.most = pool.most.max(pool.now);
        self.usage_taken(size);
        Ok(DeviceSpan { address: self.span.address + offset, bytes })
    }

    /// Pins more: first what a free range of the pool misses, right below it, so that graphs of growing size share; else a
    /// range of its own.
    fn widen_pool(&mut self, id: PoolId, size: u64, stream: Stream, label: &str) -> Option<u64> {
        if !self.is_settled() {
            self.settle();
        }
        if !self.is_settled() {
            return None;
        }
        for after in [After::Work(stream), After::Ends] {
            let ranges: Vec<_> = self.pools.get(&id)?.space.ranges(after).collect();
            for range in ranges {
                let Some(from) = range.end.checked_sub(size) else { continue };
                if self.space.take_at(from..range.start, After::Ends) {
                    self.pin(id, from, range.start - from, stream, label);
                    let pool = self.pools.get_mut(&id)?;
                    let taken = pool.space.take_at(range.clone(), after);
                    assert!(taken, "a free range of the pool was just listed");
                    return Some(from);
                }
            }
        }
        let offset = self.space.take(size, After::Ends)?;
        self.pin(id, offset, size, stream, label);
        Some(offset)
    }

    fn pin(&mut self, id: PoolId, offset: u64, size: u64, stream: Stream, label: &str) {
        let (label, state, streams) = (self.labels.id(label), BlockState::Pinned(id), Vec::new());
        let block = Block { size, asked: size, label, stream, step: 0, request: None, state, streams };
        self.live.insert(offset, block);
        self.usage_reaches(offset);
        self.pools.get_mut(&id).expect("the caller looked").ranges.push((offset, size));
    }

    #[cold]
    fn pin_when_exhausted(
        &mut self,
        id: PoolId,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
    ) -> Result<u64, Error> {
        self.when_exhausted(bytes, label, |device| {
            device.settle();
            device.widen_pool(id, size, stream, label)
        })
    }

    /// Whether the offset lies in a pool's pinned range.
    pub(crate) fn in_pool(&self, offset: u64) -> bool {
        if self.pools.is_empty() {
            return false;
        }
        let below = self.live.range(..=offset).next_back();
        below.is_some_and(|(at, block)| matches!(block.state, BlockState::Pinned(_)) && offset < at + block.size)
    }

    /// Frees what begins at `offset` inside a pool; `false` if nothing of a pool does.
    pub(crate) fn free_in_pool(&mut self, offset: u64) -> bool {
        let Some((_, block)) = self.live.range(..=offset).next_back() else { return false };
        let BlockState::Pinned(id) = block.state else { return false };
        let Some(pool) = self.pools.get_mut(&id) else { return false };
        let Some(block) = pool.live.remove(&offset) else { return false };
        pool.space.give(offset..offset + block.size, After::Work(block.stream));
        if block.capture == pool.captures.len() {
            // A capture that was begun again counts anew.
            pool.now = pool.now.saturating_sub(block.size);
        }
        self.usage_given(block.size);
        self.retire_pool(id);
        true
    }

    /// A released pool in which nothing lives gives its ranges back.
    fn retire_pool(&mut self, id: PoolId) {
        if !self.pools.get(&id).is_some_and(|pool| pool.released && pool.live.is_empty()) {
            return;
        }
        let pool = self.pools.remove(&id).expect("just looked");
        for (offset, size) in pool.ranges {
            let block = self.live.remove(&offset).expect("a pinned range is live");
            self.give(offset, size, block.stream);
        }
    }
}

/// What the stream had before, or an earlier capture: the narrower of the two.
fn take_in(space: &mut Space, size: u64, stream: Stream) -> Option<u64> {
    let candidates = [After::Work(stream), After::Ends].into_iter();
    let fits = candidates.filter_map(|after| Some((space.narrowest(size, after)?, after)));
    let (_, after) = fits.min()?;
    space.take(size, after)
}
