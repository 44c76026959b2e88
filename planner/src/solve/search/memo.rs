//! Refuted sub-problems, remembered: what has failed once is not searched again.
//!
//! After a split the same group of items often comes back in the same state while something else differs elsewhere. Its
//! state is who is unplaced, the lowest offset of each, and which of them were passed over at that offset (see
//! [`super`]); nothing else decides whether the group can be placed. 128 bits stand for it: a sum and an exclusive or of
//! one well mixed word for each item, so that two of 2^32 states agree by chance with probability 2^-65.

/// Entries for each item, and the most: 512 KiB.
const ENTRIES_PER_ITEM: usize = 64;
const MOST_ENTRIES: usize = 1 << 15;

/// The state of a group of items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Key {
    sum: u64,
    parity: u64,
}

impl Key {
    /// Adds an unplaced item.
    pub fn add(&mut self, item: u32, low: i64, passed: bool) {
        let word = mix(mix(low as u64 ^ 0x9E37_79B9_7F4A_7C15).wrapping_add(u64::from(item) << 1 | u64::from(passed)));
        self.sum = self.sum.wrapping_add(word);
        self.parity ^= word;
    }
}

/// The finaliser of SplitMix64 (G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A table of fixed size; a newer state drives out an older one.
pub struct Memo {
    refuted: Vec<Key>,
    entries: usize,
}

impl Memo {
    /// An empty table for a problem of so many items; it takes memory once something is remembered.
    pub fn new(items: usize) -> Self {
        let entries = (ENTRIES_PER_ITEM * items.max(1)).next_power_of_two().min(MOST_ENTRIES);
        Self { refuted: Vec::new(), entries }
    }

    /// Whether the state is known to fail.
    pub fn knows(&self, key: Key) -> bool {
        // No state has the key of the empty one: a group has items.
        self.refuted.get(self.slot(key)).is_some_and(|known| *known == key)
    }

    /// Remembers that the state fails.
    pub fn refute(&mut self, key: Key) {
        if self.refuted.is_empty() {
            self.refuted = vec![Key::default(); self.entries];
        }
        let slot = self.slot(key);
        self.refuted[slot] = key;
    }

    fn slot(&self, key: Key) -> usize {
        key.sum as usize & (self.entries - 1)
    }
}
