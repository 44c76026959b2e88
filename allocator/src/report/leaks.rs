//! What steps leave behind: the buffers that were asked for in a step and lived beyond its end.
//!
//! Outputs and caches live on by design, so a number alone says little. What says more is the comparison: with the step before
//! of the same key, and over many. A key whose steps leave an output each, freed during the next, holds steady; one that leaks
//! grows at every step, whatever its size, and raises the alarm after [`ALARM_AFTER`].
//!
//! ```text
//!   step_ended   once a step, with what it left: nothing at all is one look at an empty table
//!   freed        once for each buffer that outlived its step: two look-ups
//!   leak_report  one pass over what lives
//! ```
//!
//! An entry is kept for each step and key of which something lives: never more than there are live buffers, but for
//! [`QUIET_KEYS`] keys whose steps once left something and do so no more.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::quoted;
use crate::device::{Block, BlockState, Device};

/// So many steps of a key in a row that each end with more left behind than the last are an alarm.
pub const ALARM_AFTER: u32 = 8;

/// Most keys remembered of which nothing lives.
const QUIET_KEYS: usize = 256;
/// Most keys in a report, and labels of a key.
const LISTED: usize = 16;

/// What steps left behind; see [`Device::leak_report`]. Prints as lines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeakReport {
    /// The keys, those with the most bytes first.
    pub keys: Vec<KeyLeft>,
    /// Keys that are not listed.
    pub more_keys: usize,
}

/// What the steps of a key left behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyLeft {
    /// The key.
    pub key: String,
    /// What lives now, of all steps of the key.
    pub live: Left,
    /// What the last step left at its end.
    pub last: Left,
    /// What the step before left at its end.
    pub before: Left,
    /// For so many steps in a row, more of the key lived at a step's end than at the end before.
    pub growing_for: u32,
    /// Whether that is suspicious.
    pub alarm: bool,
    /// What lives now by label, the most bytes first.
    pub labels: Vec<LabelLeft>,
    /// Labels that are not listed.
    pub more_labels: usize,
}

/// What lives of a key's steps under one label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LabelLeft {
    /// Who asked.
    pub label: String,
    /// Of all steps of the key.
    pub live: Left,
    /// Of the last one.
    pub of_last: Left,
    /// Of the one before.
    pub of_before: Left,
}

/// So much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Left {
    /// Bytes, rounded.
    pub bytes: u64,
    /// In how many buffers.
    pub buffers: u64,
}

/// The account of what steps left behind.
#[derive(Debug, Default)]
pub(crate) struct Leaks {
    keys: HashMap<Arc<[u8]>, Trail>,
    /// Steps of which something lives.
    steps: HashMap<u64, (Arc<[u8]>, Left)>,
}

#[derive(Debug, Default)]
struct Trail {
    live: Left,
    last: (u64, Left),
    before: (u64, Left),
    /// What lived at the end of the last step.
    at_end: u64,
    growing_for: u32,
}

impl Leaks {
    /// A step of `key` ended and left so much.
    pub fn step_ended(&mut self, step: u64, key: &[u8], left: Left) {
        if left.buffers == 0 && (self.keys.is_empty() || !self.keys.contains_key(key)) {
            return;
        }
        let key = self.key(key);
        let trail = self.keys.get_mut(&key).expect("just made");
        trail.live.add(left);
        trail.growing_for = if trail.live.bytes > trail.at_end { trail.growing_for + 1 } else { 0 };
        trail.at_end = trail.live.bytes;
        trail.before = std::mem::replace(&mut trail.last, (step, left));
        if trail.growing_for == ALARM_AFTER {
            let (key, bytes) = (quoted(&key), trail.live.bytes);
            tracing::warn!(target: "terrace::leak", key, bytes, "more is left behind at the end of each step");
        }
        if left.buffers > 0 {
            self.steps.insert(step, (key, left));
        }
    }

    /// A buffer was freed after the step it was asked for in.
    pub fn freed(&mut self, step: u64, bytes: u64) {
        let Some((key, left)) = self.steps.get_mut(&step) else { return };
        left.take(bytes);
        if let Some(trail) = self.keys.get_mut(key) {
            trail.live.take(bytes);
        }
        if left.buffers == 0 {
            self.steps.remove(&step);
        }
    }

    fn key(&mut self, key: &[u8]) -> Arc<[u8]> {
        if let Some((known, _)) = self.keys.get_key_value(key) {
            return Arc::clone(known);
        }
        if self.keys.len() >= QUIET_KEYS {
            self.keys.retain(|_, trail| trail.live.buffers > 0);
        }
        let key: Arc<[u8]> = key.into();
        self.keys.insert(Arc::clone(&key), Trail::default());
        key
    }
}

impl Device {
    /// What the steps of each key left behind and still lives, by label, compared with the step before; and which keys leave
    /// more at every step.
    pub fn leak_report(&self) -> LeakReport {
        let mut by_label: HashMap<(&[u8], u32), [Left; 3]> = HashMap::new();
        for block in self.live.values().filter(|block| lives(block)) {
            let Some((key, _)) = self.leaks.steps.get(&block.step) else { continue };
            let Some(trail) = self.leaks.keys.get(key) else { continue };
            let left = Left { bytes: block.size, buffers: 1 };
            let rows = by_label.entry((key.as_ref(), block.label)).or_default();
            rows[0].add(left);
            if block.step == trail.last.0 {
                rows[1].add(left);
            } else if block.step == trail.before.0 {
                rows[2].add(left);
            }
        }
        let mut labels: HashMap<&[u8], Vec<LabelLeft>> = HashMap::new();
        for ((key, label), [live, of_last, of_before]) in by_label {
            let label = self.labels.text(label).to_owned();
            labels.entry(key).or_default().push(LabelLeft { label, live, of_last, of_before });
        }
        let key_left = |(key, trail): (&Arc<[u8]>, &Trail)| {
            let mut labels = labels.remove(key.as_ref()).unwrap_or_default();
            labels.sort_by(|a, b| (b.live, &a.label).cmp(&(a.live, &b.label)));
            let more_labels = labels.len().saturating_sub(LISTED);
            labels.truncate(LISTED);
            KeyLeft {
                key: String::from_utf8_lossy(key).into_owned(),
                live: trail.live,
                last: trail.last.1,
                before: trail.before.1,
                growing_for: trail.growing_for,
                alarm: trail.growing_for >= ALARM_AFTER,
                labels,
                more_labels,
            }
        };
        let mut keys: Vec<KeyLeft> = self.leaks.keys.iter().map(key_left).collect();
        keys.sort_by(|a, b| (b.alarm, b.live, &a.key).cmp(&(a.alarm, a.live, &b.key)));
        let more_keys = keys.len().saturating_sub(LISTED);
        keys.truncate(LISTED);
        LeakReport { keys, more_keys }
    }

    /// What was asked for in that step and lives; for steps off script, which are slow anyway.
    pub(crate) fn left_by(&self, step: u64) -> Left {
        self.live.values().filter(|block| block.step == step && lives(block)).map(|block| block.size).collect()
    }
}

fn lives(block: &Block) -> bool {
    !matches!(block.state, BlockState::Pending(_) | BlockState::Pinned(_))
}

impl Left {
    fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.buffers += other.buffers;
    }

    fn take(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.buffers -= 1;
    }
}

/// From the sizes of buffers.
impl FromIterator<u64> for Left {
    fn from_iter<I: IntoIterator<Item = u64>>(sizes: I) -> Self {
        sizes.into_iter().fold(Self::default(), |mut sum, bytes| {
            sum.add(Self { bytes, buffers: 1 });
            sum
        })
    }
}

impl LeakReport {
    /// One JSON object.
    pub fn to_json(&self) -> String {
        super::json(self)
    }

    /// The keys that leave more behind at every step.
    pub fn alarms(&self) -> impl Iterator<Item = &KeyLeft> {
        self.keys.iter().filter(|key| key.alarm)
    }
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.keys.is_empty() {
            return writeln!(f, "no step left anything behind");
        }
        for key in &self.keys {
            let (alarm, growing) = (if key.alarm { "ALARM " } else { "" }, key.growing_for);
            let KeyLeft { live, last, before, .. } = key;
            writeln!(
                f,
                "{alarm}{}: {live} live; the last step left {last}, the one before {before}; growing for {growing} steps",
                quoted(key.key.as_bytes()),
            )?;
            for LabelLeft { label, live, of_last, of_before } in &key.labels {
                let label = label.escape_debug();
                writeln!(f, "  {label}: {live}; {of_last} of the last step, {of_before} of the one before")?;
            }
            if key.more_labels > 0 {
                writeln!(f, "  and {} more labels", key.more_labels)?;
            }
        }
        if self.more_keys > 0 {
            writeln!(f, "and {} more keys", self.more_keys)?;
        }
        Ok(())
    }
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes in {}", self.bytes, self.buffers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(sizes: &[u64]) -> Left {
        sizes.iter().copied().collect()
    }

    #[test]
    fn steps_that_leave_nothing_leave_no_trace() {
        let mut leaks = Leaks::default();
        for step in 1..100 {
            leaks.step_ended(step, b"k", Left::default());
        }
        assert!(leaks.keys.is_empty() && leaks.steps.is_empty());
    }

    #[test]
    fn an_output_freed_in_the_next_step_is_no_growth_and_a_leak_is() {
        let mut leaks = Leaks::default();
        for step in 1..=20 {
            leaks.step_ended(2 * step - 1, b"output", left(&[512]));
            if step > 1 {
                leaks.freed(2 * step - 3, 512);
            }
            leaks.step_ended(2 * step, b"leak", left(&[512]));
        }
        leaks.freed(39, 512);
        // The output is freed after the next one is made: it grew once, from one to two, and then never again.
        assert_eq!(leaks.keys[&b"output"[..]].growing_for, 0);
        assert_eq!((leaks.keys[&b"leak"[..]].growing_for, leaks.keys[&b"leak"[..]].live.buffers), (20, 20));
        assert_eq!(leaks.steps.len(), 20);
    }

    #[test]
    fn keys_of_which_nothing_lives_are_forgotten_when_they_are_many() {
        let mut leaks = Leaks::default();
        for step in 0..10_000_u64 {
            leaks.step_ended(step, &step.to_le_bytes(), left(&[512]));
            leaks.freed(step, 512);
        }
        assert!(leaks.keys.len() <= QUIET_KEYS && leaks.steps.is_empty());
    }
}
