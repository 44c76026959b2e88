//! What the benchmarks share: a recorded forward as a plain list of calls, and the peers that are measured beside us.
//!
//! Each workload returns a sum over the addresses it saw, so that no call can be optimised away and two runs can be compared.
//! The smoke tests below run every workload once, so that benchmarks do not rot.

pub mod block;
pub mod c_abi;
pub mod gpu;
pub mod instance;
pub mod method;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use parking_lot::Mutex;
use terrace_allocator::host::HostBacking;
use terrace_allocator::{Allocator, Config, Device, Stream};
use terrace_profiles::units::Bytes;
use terrace_profiles::{Action, Profile};

/// A call of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A request of so many bytes.
    Alloc(u64),
    /// The free of the request with that number.
    Free(u32),
}

/// The calls of a forward: the buffers of a profile that are freed in it.
#[derive(Clone, Debug)]
pub struct Forward {
    /// The calls, in order.
    pub calls: Vec<Call>,
    /// How many requests.
    pub requests: usize,
    /// Rounded bytes alive at the peak.
    pub peak: u64,
}

impl Forward {
    /// The forward that a profile recorded.
    pub fn of(profile: &Profile) -> Self {
        let lives = profile.lives().expect("a recorded profile is consistent");
        let mut calls = Vec::new();
        let mut number = vec![0_u32; lives.len()];
        let (mut requests, mut load, mut peak) = (0, 0_u64, 0);
        for event in &profile.events {
            match event.action {
                Action::Alloc { id, bytes, .. } if lives[id.0 as usize].freed && !bytes.is_zero() => {
                    number[id.0 as usize] = requests;
                    requests += 1;
                    calls.push(Call::Alloc(bytes.get()));
                    load += rounded(bytes.get());
                    peak = peak.max(load);
                }
                Action::Free { id } if !lives[id.0 as usize].bytes.is_zero() => {
                    calls.push(Call::Free(number[id.0 as usize]));
                    load -= rounded(lives[id.0 as usize].bytes.get());
                }
                _ => {}
            }
        }
        Self { calls, requests: requests as usize, peak }
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(512)
}

/// Something that serves the calls of a forward.
pub trait Peer {
    /// An address.
    fn alloc(&mut self, bytes: u64) -> u64;
    /// Frees it.
    fn free(&mut self, address: u64);
    /// A forward begins.
    fn begin(&mut self) {}
    /// It ends.
    fn end(&mut self) {}
}

/// Runs the forward once, as a step; `addresses` is scratch. Returns the sum of the addresses.
pub fn run<P: Peer + ?Sized>(peer: &mut P, forward: &Forward, addresses: &mut Vec<u64>) -> u64 {
    peer.begin();
    let sum = calls(peer, forward, addresses);
    peer.end();
    sum
}

/// The calls of the forward alone, without the step around them.
pub fn calls<P: Peer + ?Sized>(peer: &mut P, forward: &Forward, addresses: &mut Vec<u64>) -> u64 {
    addresses.clear();
    let mut sum = 0_u64;
    for call in &forward.calls {
        match *call {
            Call::Alloc(bytes) => {
                let address = peer.alloc(bytes);
                sum = sum.wrapping_add(address);
                addresses.push(address);
            }
            Call::Free(request) => peer.free(addresses[request as usize]),
        }
    }
    sum
}

/// Our device with a single owner, replaying.
pub struct Single(pub Device);

/// Our allocator behind its lock, replaying.
pub struct Locked(pub Allocator);

impl Single {
    /// A device that has recorded the forward and stands ready to replay it.
    pub fn ready(forward: &Forward) -> Self {
        let mut own =
            Self(Device::new(Box::new(HostBacking::new()), config(forward)).expect("host memory is reserved"));
        for _ in 0..2 {
            run(&mut own, forward, &mut Vec::new());
        }
        assert_eq!(own.0.stats().steps_on_script, 1, "the second forward ran on script");
        own
    }

    /// A device that records each forward anew.
    pub fn recording(forward: &Forward) -> Self {
        Self(Device::new(Box::new(HostBacking::new()), config(forward)).expect("host memory is reserved"))
    }
}

impl Locked {
    /// As [`Single::ready`], behind the lock.
    pub fn ready(forward: &Forward) -> Self {
        let allocator = Allocator::new(Box::new(HostBacking::new()), config(forward)).expect("host memory is reserved");
        let mut own = Self(allocator);
        for _ in 0..2 {
            run(&mut own, forward, &mut Vec::new());
        }
        own
    }
}

fn config(forward: &Forward) -> Config {
    Config::new(budget(forward))
}

fn budget(forward: &Forward) -> Bytes {
    Bytes::new(3 * forward.peak).expect("three peaks are a size")
}

const KEY: &[u8] = b"prefill";

impl Peer for Single {
    fn alloc(&mut self, bytes: u64) -> u64 {
        let bytes = Bytes::new(bytes).expect("recorded sizes are sizes");
        self.0.alloc(bytes, Stream(0), "bench").expect("the budget holds the forward").address
    }
    fn free(&mut self, address: u64) {
        self.0.free(address);
    }
    fn begin(&mut self) {
        self.0.begin_step(KEY, Stream(0)).expect("a step begins");
    }
    fn end(&mut self) {
        self.0.end_step().expect("the step ends");
    }
}

impl Peer for Locked {
    fn alloc(&mut self, bytes: u64) -> u64 {
        let bytes = Bytes::new(bytes).expect("recorded sizes are sizes");
        self.0.alloc(bytes, Stream(0), "bench").expect("the budget holds the forward").address
    }
    fn free(&mut self, address: u64) {
        self.0.free(address);
    }
    fn begin(&mut self) {
        self.0.device().begin_step(KEY, Stream(0)).expect("a step begins");
    }
    fn end(&mut self) {
        self.0.device().end_step().expect("the step ends");
    }
}

/// A best-fit caching allocator as frameworks have it: size-ordered free blocks, split and merged, live blocks in a map,
/// everything behind a lock. Simplified: one pool, no small and large segments.
#[derive(Default)]
pub struct Caching(Mutex<CachingState>);

#[derive(Default)]
struct CachingState {
    by_size: BTreeSet<(u64, u64)>,
    by_start: BTreeMap<u64, u64>,
    live: HashMap<u64, u64>,
    top: u64,
}

impl Peer for Caching {
    fn alloc(&mut self, bytes: u64) -> u64 {
        let mut state = self.0.lock();
        let size = rounded(bytes);
        let found = state.by_size.range((size, 0)..).next().copied();
        let start = if let Some((length, start)) = found {
            state.by_size.remove(&(length, start));
            state.by_start.remove(&start);
            if length > size {
                state.by_size.insert((length - size, start + size));
                state.by_start.insert(start + size, length - size);
            }
            start
        } else {
            // A new segment from the driver.
            state.top += size;
            state.top - size
        };
        state.live.insert(start, size);
        start
    }

    fn free(&mut self, address: u64) {
        let mut state = self.0.lock();
        let Some(mut length) = state.live.remove(&address) else { return };
        let mut start = address;
        if let Some((&before, &size)) = state.by_start.range(..start).next_back()
            && before + size == start
        {
            state.by_size.remove(&(size, before));
            state.by_start.remove(&before);
            (start, length) = (before, size + length);
        }
        if let Some(&after) = state.by_start.get(&(start + length)) {
            state.by_size.remove(&(after, start + length));
            state.by_start.remove(&(start + length));
            length += after;
        }
        state.by_size.insert((length, start));
        state.by_start.insert(start, length);
    }
}

/// The crate `offset-allocator`: size classes with bit searches, in units of 512 bytes since it counts in 32 bits.
pub struct OffsetClasses {
    inner: offset_allocator::Allocator<u32>,
    live: HashMap<u64, offset_allocator::Allocation<u32>>,
}

impl OffsetClasses {
    /// With room for the forward.
    pub fn new(forward: &Forward) -> Self {
        let units = u32::try_from(4 * forward.peak / 512).expect("the forward fits in 32 bits of 512 bytes");
        Self { inner: offset_allocator::Allocator::new(units), live: HashMap::new() }
    }
}

impl Peer for OffsetClasses {
    fn alloc(&mut self, bytes: u64) -> u64 {
        let units = u32::try_from(bytes.div_ceil(512)).expect("a buffer fits in 32 bits of 512 bytes");
        let allocation = self.inner.allocate(units).expect("there is room");
        let address = u64::from(allocation.offset) * 512;
        self.live.insert(address, allocation);
        address
    }
    fn free(&mut self, address: u64) {
        if let Some(allocation) = self.live.remove(&address) {
            self.inner.free(allocation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_tests::corpus;

    fn forward() -> Forward {
        Forward::of(&corpus::read(&corpus::root().join("profiles/recorded/qwen3.6-27b-L4-chunked-12384.profile")))
    }

    #[test]
    fn every_peer_serves_the_forward_the_same_way_twice() {
        let forward = forward();
        let peers: Vec<(&str, Box<dyn Peer>)> = vec![
            ("single", Box::new(Single::ready(&forward))),
            ("locked", Box::new(Locked::ready(&forward))),
            ("c-abi", Box::new(c_abi::ThroughC::ready(&forward))),
            ("caching", Box::new(Caching::default())),
            ("offset-allocator", Box::new(OffsetClasses::new(&forward))),
        ];
        for (name, mut peer) in peers {
            let mut addresses = Vec::new();
            // The caching peer needs a forward to grow to its size.
            run(&mut *peer, &forward, &mut addresses);
            run(&mut *peer, &forward, &mut addresses);
            let first = run(&mut *peer, &forward, &mut addresses);
            let second = run(&mut *peer, &forward, &mut addresses);
            assert_eq!(addresses.len(), forward.requests, "{name}");
            if name != "caching" {
                assert_eq!(first, second, "{name} hands out the same addresses");
            }
        }
    }
}
