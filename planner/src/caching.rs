//! What PyTorch's caching allocator would take from the driver for the requests of a profile: a simulation of its rules, so that
//! a plan can be held against what people run today.
//!
//! Requests are rounded up to 512 bytes and served from the best fitting free block of their stream and pool (small: up to 1 MiB). Where
//! none fits, the allocator asks the driver; what it took it keeps:
//!
//! ```text
//! segments     2 MiB for a small request, 20 MiB below 10 MiB, else the request rounded up to 2 MiB; blocks never span two segments
//! expandable   one range per stream and pool, whose end is mapped further by 2 MiB (small) or 20 MiB at a time
//! ```
//!
//! Not modelled: what is given back when memory runs out, `max_split_size_mb`, `garbage_collection_threshold`, and free bytes left in
//! segments from before the profile began, such as those of weights. The rules are those of PyTorch 2.11; the tests hold the result against
//! what was reserved when the shipped profiles were recorded.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use terrace_profiles::units::{Bytes, Overflow};
use terrace_profiles::{Action, BufferId, LaneId, Profile};

/// What every request is rounded up to.
const BLOCK: u64 = 512;
/// The largest request of the small pool.
const SMALL: u64 = 1 << 20;
/// What the small pool asks the driver for, and what large requests are rounded up to.
const SMALL_SEGMENT: u64 = 2 << 20;
/// What large requests below [`LARGE`] ask the driver for.
const LARGE_SEGMENT: u64 = 20 << 20;
/// Requests from here on have a segment of their own size.
const LARGE: u64 = 10 << 20;

/// How the driver is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// The default: segments of fixed size.
    Segments,
    /// `expandable_segments:True`.
    Expandable,
}

/// The most bytes that the allocator holds from the driver while the profile runs.
///
/// # Errors
/// Sizes that add up to more than 2^63 - 1 bytes.
pub fn reserved(profile: &Profile, policy: Policy) -> Result<Bytes, Overflow> {
    let mut pools: HashMap<(LaneId, bool), Pool> = HashMap::new();
    let mut places: HashMap<BufferId, ((LaneId, bool), Place)> = HashMap::new();
    let mut reserved = Bytes::ZERO;
    for event in &profile.events {
        match &event.action {
            Action::Alloc { id, bytes, lane, .. } if !bytes.is_zero() => {
                let size = bytes.get().checked_next_multiple_of(BLOCK).ok_or(Overflow)?;
                let key = (*lane, size <= SMALL);
                let pool = pools.entry(key).or_insert_with(|| Pool::new(policy, size <= SMALL));
                let (place, grown) = pool.take(size)?;
                reserved = reserved.checked_add(Bytes::new(grown).ok_or(Overflow)?)?;
                places.insert(*id, (key, place));
            }
            Action::Free { id } => {
                if let Some((key, place)) = places.remove(id) {
                    pools.entry(key).and_modify(|pool| pool.give(place));
                }
            }
            _ => {}
        }
    }
    // Nothing is given back, so the end is the most.
    Ok(reserved)
}

/// Where a block begins: segment, and offset in it.
type Place = (u32, u64);

/// The blocks of one stream, small or large.
struct Pool {
    policy: Policy,
    small: bool,
    /// Size of each block, and whether it is in use. Blocks of a segment touch each other.
    blocks: BTreeMap<Place, (u64, bool)>,
    /// Free blocks by size.
    free: BTreeSet<(u64, Place)>,
    /// Segments so far; an expandable pool has one.
    segments: u32,
    /// Bytes mapped of an expandable range.
    mapped: u64,
}

impl Pool {
    fn new(policy: Policy, small: bool) -> Self {
        Self { policy, small, blocks: BTreeMap::new(), free: BTreeSet::new(), segments: 0, mapped: 0 }
    }

    /// A block for a request, and what the driver was asked for.
    fn take(&mut self, size: u64) -> Result<(Place, u64), Overflow> {
        let (place, grown) = match self.best_fit(size) {
            Some(place) => (place, 0),
            None => match self.policy {
                Policy::Segments => self.new_segment(size)?,
                Policy::Expandable => self.map_further(size)?,
            },
        };
        let (held, _) = self.blocks[&place];
        self.free.remove(&(held, place));
        let rest = held - size;
        let splits = match self.policy {
            Policy::Segments if !self.small => rest > SMALL,
            _ => rest >= BLOCK,
        };
        if splits {
            self.blocks.insert(place, (size, true));
            self.add_free((place.0, place.1 + size), rest);
        } else {
            self.blocks.insert(place, (held, true));
        }
        Ok((place, grown))
    }

    /// The smallest free block that is large enough. One at the mapped end of an expandable range counts as large as the range could
    /// grow, so it is the last resort.
    fn best_fit(&self, size: u64) -> Option<Place> {
        let mut fitting = self.free.range((size, (0, 0))..).map(|(held, place)| (*held, *place));
        let (held, first) = fitting.next()?;
        let at_end = self.policy == Policy::Expandable && first.1 + held == self.mapped;
        Some(if at_end { fitting.next().map_or(first, |(_, next)| next) } else { first })
    }

    fn new_segment(&mut self, size: u64) -> Result<(Place, u64), Overflow> {
        let bytes = match size {
            _ if self.small => SMALL_SEGMENT,
            0..LARGE => LARGE_SEGMENT,
            _ => size.checked_next_multiple_of(SMALL_SEGMENT).ok_or(Overflow)?,
        };
        let place = (self.segments, 0);
        self.segments += 1;
        self.add_free(place, bytes);
        Ok((place, bytes))
    }

    fn map_further(&mut self, size: u64) -> Result<(Place, u64), Overflow> {
        let last = self.blocks.last_key_value().map(|(place, block)| (*place, *block));
        let (place, held) = match last {
            Some((place, (held, false))) => (place, held),
            _ => ((0, self.mapped), 0),
        };
        let unit = if self.small { SMALL_SEGMENT } else { LARGE_SEGMENT };
        let grown = (size - held).checked_next_multiple_of(unit).ok_or(Overflow)?;
        self.free.remove(&(held, place));
        self.mapped = self.mapped.checked_add(grown).ok_or(Overflow)?;
        self.add_free(place, held + grown);
        Ok((place, grown))
    }

    /// Frees a block and joins it with free neighbours.
    fn give(&mut self, place: Place) {
        let (mut start, (mut size, _)) = (place, self.blocks[&place]);
        let after = (place.0, place.1 + size);
        if let Some((held, false)) = self.blocks.get(&after).copied() {
            self.blocks.remove(&after);
            self.free.remove(&(held, after));
            size += held;
        }
        let before = self.blocks.range(..place).next_back().map(|(before, block)| (*before, *block));
        if let Some((before, (held, false))) = before
            && before.0 == place.0
        {
            self.blocks.remove(&place);
            self.free.remove(&(held, before));
            (start, size) = (before, size + held);
        }
        self.add_free(start, size);
    }

    fn add_free(&mut self, place: Place, size: u64) {
        self.blocks.insert(place, (size, false));
        self.free.insert((size, place));
    }
}
