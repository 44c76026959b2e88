//! Debug mode: a redzone on both sides of every span and poison on free, so that a kernel that writes beyond its buffer is
//! caught with the buffer's name.
//!
//! ```text
//!   block   | redzone | bytes asked for | redzone, to the block's end |
//!           0        512                ^ address + bytes
//! ```
//!
//! A block is verified when it is freed and when a step ends. It costs memory and a copy to the host: not for production.

use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::backing::Stream;
use crate::device::{Block, BlockState, Device};

/// Bytes before a span; at least as many follow it.
pub(crate) const REDZONE: u64 = 512;
const CANARY: u8 = 0xC5;
/// Most damages kept until somebody asks; further ones are only counted.
const MOST_DAMAGES: usize = 1024;
/// What freed bytes hold.
const POISON: u8 = 0xFB;

/// A damaged redzone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Who asked for the buffer.
    pub label: String,
    /// Its address, as it was handed out.
    pub address: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// The first damaged byte, from the buffer's start; negative before it.
    pub at: i64,
}

impl Device {
    /// What is asked of the inner allocator for a span with redzones.
    pub(crate) fn padded(bytes: Bytes) -> Bytes {
        Bytes::new(bytes.get().saturating_add(2 * REDZONE)).unwrap_or(bytes)
    }

    /// Writes the redzones of a fresh block and returns the span inside.
    pub(crate) fn guard(&mut self, outer: DeviceSpan, bytes: Bytes, stream: Stream) -> DeviceSpan {
        let address = outer.address + REDZONE;
        let offset = outer.address - self.span.address;
        let size = self.live.get(&offset).map_or(outer.bytes.get(), |block| block.size);
        let end = outer.address + size;
        self.fill(outer.address, address, CANARY, stream);
        self.fill(address + bytes.get(), end, CANARY, stream);
        DeviceSpan { address, bytes }
    }

    /// The redzones of every live block; damaged ones are named.
    pub(crate) fn verify_redzones(&mut self) {
        if !self.config.debug {
            return;
        }
        let guarded: Vec<u64> =
            self.live.iter().filter(|(_, block)| is_guarded(block)).map(|(offset, _)| *offset).collect();
        for offset in guarded {
            self.verify(offset);
        }
    }

    /// Poisons a block that nothing uses any more.
    pub(crate) fn poison(&mut self, offset: u64, block: &Block) {
        if !self.config.debug {
            return;
        }
        let address = self.span.address + offset;
        self.fill(address, address + block.size, POISON, block.stream);
    }

    /// Verifies a block, if there are redzones; before it is freed.
    pub(crate) fn verify(&mut self, offset: u64) {
        if !self.config.debug {
            return;
        }
        let Some(block) = self.live.get(&offset).filter(|block| is_guarded(block)).cloned() else { return };
        let asked = block.asked - 2 * REDZONE;
        for (from, to) in [(0, REDZONE), (REDZONE + asked, block.size)] {
            let mut found = vec![0_u8; (to - from) as usize];
            let span = self.part(offset + from, to - from);
            // A stream that is being captured cannot be read on: the next verification will see it.
            if self.backing.read(span, &mut found, block.stream).is_err() {
                continue;
            }
            let Some(at) = found.iter().position(|byte| *byte != CANARY) else { continue };
            let damage = Damage {
                label: self.labels.text(block.label).to_owned(),
                address: self.span.address + offset + REDZONE,
                bytes: asked,
                at: (from + at as u64) as i64 - REDZONE as i64,
            };
            tracing::error!(target: "terrace::redzone", ?damage);
            self.stats.redzones_damaged += 1;
            if self.damages.len() < MOST_DAMAGES {
                self.damages.push(damage);
            }
            // Once is enough for each damage.
            self.fill(span.address, span.address + span.bytes.get(), CANARY, block.stream);
        }
    }

    /// The damaged redzones found since the last call.
    pub fn take_damages(&mut self) -> Vec<Damage> {
        std::mem::take(&mut self.damages)
    }

    fn part(&self, offset: u64, size: u64) -> DeviceSpan {
        DeviceSpan { address: self.span.address + offset, bytes: Bytes::new(size).unwrap_or_default() }
    }

    fn fill(&mut self, from: u64, to: u64, byte: u8, stream: Stream) {
        let span = self.part(from - self.span.address, to - from);
        if !span.bytes.is_zero()
            && let Err(error) = self.backing.fill(span, byte, stream)
        {
            tracing::warn!(target: "terrace::redzone", %error, "redzones cannot be written");
        }
    }
}

fn is_guarded(block: &Block) -> bool {
    matches!(block.state, BlockState::Slot(_) | BlockState::Outside { .. }) && block.asked >= 2 * REDZONE
}
