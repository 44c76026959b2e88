//! The block arithmetic of vLLM's pool for hybrid models, and of llama.cpp's stretches.
//!
//! ```text
//! state  = (conv - 1 + K) x (2 hk dk + hv dv) x 2 B + hv x dv x dk x 4 B              of one layer, on one card
//! block  = 16 x ceil(state / (16 x slot x kv heads))                                  tokens: a page of attention holds a state
//! page   = block x slot x kv heads                                                    a state is padded to it
//! group  = the smaller count of layers of a kind, or the larger if below 1.5 times    the multi-token head is one more
//!          the smaller                                                                layer of attention
//! pool block = group x page
//! a request  = attention groups x ceil(len / block) + state groups x slots
//! slots      = 1 + K (none), 2 + K (align), ceil(len / block) + K (all)
//! ```
//!
//! Block 0 is vLLM's null block; as its logs do, no formula here subtracts it. What it does not count either: in align mode
//! each boundary of a block also keeps a state in the pool, for prefixes that come again.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, quoted};
use crate::kv::Format;
use crate::model::{Mixer, Model};
use crate::serving::Ask;
use crate::shape::layer::{ACTIVATION, FP32, product};
use crate::units::{Bytes, Overflow};

/// Which recurrent states a server keeps of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MambaMode {
    /// The running one, and one for each guessed token.
    None,
    /// One more, so that prefixes can be shared at the boundaries of blocks. The default here: it is what servers with a
    /// prefix cache run, and never needs less than `None`.
    #[default]
    Align,
    /// One for each block.
    All,
}

/// The longest request that is computed.
pub const MAX_LEN: u64 = 1 << 40;
/// Tokens that llama.cpp rounds a context up to.
const CELLS: u64 = 256;

/// The pool of one card, without its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Tokens of a block.
    pub block_size: u64,
    /// Bytes of one layer's block.
    pub page: Bytes,
    /// Bytes of a block of the pool: one page for each layer of a group.
    pub block_bytes: Bytes,
    /// Layers of a group.
    pub group: u64,
    /// Groups of attention layers.
    pub attention_groups: u64,
    /// Groups of recurrent layers.
    pub state_groups: u64,
    /// Bytes of one layer's recurrent state.
    pub state: Bytes,
    /// Bytes of a request's states that lie outside the blocks; only where blocks are not shared (llama.cpp).
    pub apart: Bytes,
    /// Key and value heads of one card.
    pub kv_heads: u64,
    mode: MambaMode,
    mtp: u64,
}

/// A pool in tokens, as servers print it. The names are those of vLLM's formulas by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// `blocks x block`.
    pub old: u64,
    /// `floor(blocks / groups) x block`.
    pub mid: u64,
    /// `floor(blocks / blocks of a request x max_model_len)`.
    pub new: u64,
}

impl Pool {
    /// The pool of a model, its KV format, and `mtp` guessed tokens on each of `tp` cards.
    ///
    /// # Errors
    /// What `tp` does not divide; guesses of a model that has no layer for them; sizes beyond 2^63 bytes.
    pub fn new(model: &Model, kv: &Format, tp: u64, mtp: u64, mode: MambaMode) -> Result<Self, Error> {
        let rank = model.rank(tp)?;
        if mtp > 0 && model.mtp_layers == 0 {
            let reason = "it has no multi-token head (mtp_num_hidden_layers is 0); leave --mtp out".to_owned();
            return Err(Error::Selection { name: model.id.clone(), reason });
        }
        if mtp > 64 {
            let reason = format!("{mtp} guessed tokens are not served; give --mtp from 0 to 64");
            return Err(Error::Selection { name: model.id.clone(), reason });
        }
        let (gdn, attention) = (model.count(Mixer::Gdn), model.count(Mixer::Attention) + u64::from(mtp > 0));
        let sizes = || -> Result<Self, Overflow> {
            let conv_width = if kv.contiguous { FP32 } else { ACTIVATION };
            let kept = model.conv_kernel - 1 + if kv.contiguous { 0 } else { mtp };
            let conv = product(&[kept, rank.qkv(), conv_width])?;
            let state = conv.checked_add(product(&[rank.state()])?)?;
            let token = product(&[kv.slot(rank.head_dim), rank.kv_heads])?;
            let (group, block_size) = if kv.contiguous {
                (attention, CELLS)
            } else {
                (group(gdn, attention), 16 * state.get().div_ceil(16 * token.get()).max(1))
            };
            let page = product(&[block_size, token.get()])?;
            Ok(Self {
                block_size,
                page,
                block_bytes: product(&[group, page.get()])?,
                group,
                attention_groups: attention.div_ceil(group),
                state_groups: if kv.contiguous { 0 } else { gdn.div_ceil(group) },
                state,
                apart: if kv.contiguous { product(&[gdn, state.get()])? } else { Bytes::ZERO },
                kv_heads: rank.kv_heads,
                mode,
                mtp,
            })
        };
        if attention == 0 {
            let reason = "it has no full-attention layer, so there is no KV pool to size".to_owned();
            return Err(Error::Selection { name: model.id.clone(), reason });
        }
        sizes().map_err(|_| too_large(&model.id))
    }

    /// Blocks of a request of `len` tokens: those of keys and values, and those of states.
    pub fn parts(&self, len: u64) -> (u64, u64) {
        let long = len.div_ceil(self.block_size);
        (self.attention_groups.saturating_mul(long), self.state_groups.saturating_mul(self.slots(long)))
    }

    /// Blocks of a request of `len` tokens.
    pub fn per_request(&self, len: u64) -> u64 {
        let (kv, states) = self.parts(len);
        kv.saturating_add(states)
    }

    /// Bytes of so many blocks.
    ///
    /// # Errors
    /// A size that is no size.
    pub fn bytes_of(&self, blocks: u64) -> Result<Bytes, Overflow> {
        self.block_bytes.checked_mul(blocks)
    }

    /// Bytes of a request of `len` tokens.
    ///
    /// # Errors
    /// A size that is no size.
    pub fn bytes(&self, len: u64) -> Result<Bytes, Overflow> {
        self.bytes_of(self.per_request(len))?.checked_add(self.apart)
    }

    /// Whole blocks in so many bytes.
    pub fn blocks_in(&self, bytes: Bytes) -> u64 {
        bytes.get().saturating_sub(self.apart.get()) / self.block_bytes.get()
    }

    /// The longest request that so many blocks hold, in whole blocks; 0 if they do not hold its states.
    pub fn longest(&self, blocks: u64) -> u64 {
        let (fixed, each) = match self.mode {
            MambaMode::All => (self.state_groups * self.mtp, self.attention_groups + self.state_groups),
            _ => (self.state_groups * self.slots(0), self.attention_groups),
        };
        (blocks.saturating_sub(fixed) / each).saturating_mul(self.block_size)
    }

    /// So many blocks in tokens, for requests of `max_len`.
    pub fn tokens(&self, blocks: u64, max_len: u64) -> Tokens {
        let groups = self.attention_groups + self.state_groups;
        let new = u128::from(blocks) * u128::from(max_len) / u128::from(self.per_request(max_len).max(1));
        Tokens {
            old: blocks.saturating_mul(self.block_size),
            mid: (blocks / groups).saturating_mul(self.block_size),
            new: u64::try_from(new).unwrap_or(u64::MAX),
        }
    }

    /// The fewest tokens of a prefill step: in align mode a step must reach the end of a block.
    pub fn chunk_floor(&self) -> Option<u64> {
        (self.mode == MambaMode::Align && self.state_groups > 0).then_some(self.block_size)
    }

    /// Slots of each group for a request of `long` blocks.
    fn slots(&self, long: u64) -> u64 {
        match self.mode {
            MambaMode::None => 1 + self.mtp,
            MambaMode::Align => 2 + self.mtp,
            MambaMode::All => long.saturating_add(self.mtp),
        }
    }

    /// How the slots of a request come about, for people.
    pub(super) fn slots_of(&self, ask: &Ask) -> String {
        match self.mode {
            MambaMode::None => format!("(1 + {})", self.mtp),
            MambaMode::Align => format!("(2 + {})", self.mtp),
            MambaMode::All => format!("({} + {})", ask.max_len.div_ceil(self.block_size), self.mtp),
        }
    }
}

/// Layers of a group where there are so many of each kind.
fn group(gdn: u64, attention: u64) -> u64 {
    let (least, most) = (gdn.min(attention), gdn.max(attention));
    if least == 0 || 2 * most < 3 * least { most } else { least }
}

pub(super) fn too_large(model: &str) -> Error {
    let reason = "a size of this ledger is more than 2^63 - 1 bytes; give smaller numbers".to_owned();
    Error::Selection { name: model.to_owned(), reason }
}

/// A number of GiB as a log prints it, such as `2.17`: it stands for every size that rounds to it. Logs print two decimals, so
/// `2.4` is read as `2.40`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Printed {
    /// The smallest size that prints so.
    pub least: Bytes,
    /// The largest.
    pub most: Bytes,
}

impl Printed {
    /// Whether a size prints so.
    pub fn stands_for(&self, bytes: Bytes) -> bool {
        self.least <= bytes && bytes <= self.most
    }
}

impl FromStr for Printed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{} is no number of GiB as a log prints it, such as 2.17", quoted(text));
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let fraction = format!("{fraction:0<2}");
        let digits = format!("{whole}{fraction}");
        if whole.is_empty() || fraction.len() > 9 || whole.len() > 9 || !digits.chars().all(|c| c.is_ascii_digit()) {
            return Err(wrong());
        }
        // Twice the number in units of its last digit, so that half a unit to each side is a whole number.
        let units = 2 * digits.parse::<u128>().map_err(|_| wrong())?;
        let scale = 2 * 10_u128.pow(fraction.len() as u32);
        let size = |bytes: u128| u64::try_from(bytes).ok().and_then(Bytes::new).ok_or_else(wrong);
        let least = (units.saturating_sub(1) << 30).div_ceil(scale);
        let end = ((units + 1) << 30).div_ceil(scale);
        Ok(Self { least: size(least)?, most: size(end.saturating_sub(1))? })
    }
}

/// The bytes of a pool as a person copies them from a log. A decimal fraction of GiB is what the log rounded, and the largest
/// size that prints so is meant: the log's own estimates of the longest request follow from it. Anything else is exact.
///
/// # Errors
/// No size.
pub fn available(text: &str) -> Result<Bytes, String> {
    let number = text.trim().to_ascii_lowercase();
    let number = ["gib", "g"].iter().find_map(|unit| number.strip_suffix(unit)).map(str::trim);
    match number {
        Some(number) if number.contains('.') => number.parse().map(|printed: Printed| printed.most),
        _ => text.parse::<Bytes>().map_err(|error| error.to_string()),
    }
}

impl MambaMode {
    /// Every one, in order.
    pub const ALL: &[Self] = &[Self::None, Self::Align, Self::All];

    /// As it is printed and read.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Align => "align",
            Self::All => "all",
        }
    }
}

impl fmt::Display for MambaMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for MambaMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{} is no mode of recurrent states; give none, align or all", quoted(text));
        Self::ALL.iter().copied().find(|mode| mode.name() == text).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(model: &str, kv: &str, tp: u64, mtp: u64, mode: MambaMode) -> Pool {
        Pool::new(&Model::named(model).unwrap(), &Format::named(kv).unwrap(), tp, mtp, mode).unwrap()
    }

    fn gib(bytes: Bytes) -> String {
        format!("{:.3}", bytes.get() as f64 / f64::from(1 << 30))
    }

    #[test]
    fn blocks_and_needs_are_those_that_servers_log() {
        for (kv, block) in [
            ("turboquant_3bit_nc", 4128),
            ("turboquant_k3v4_nc", 3568),
            ("turboquant_4bit_nc", 3120),
            ("turboquant_k8v4", 2112),
            ("fp8", 1600),
            ("bf16", 800),
        ] {
            assert_eq!(pool("qwen3.6-27b", kv, 1, 3, MambaMode::Align).block_size, block, "{kv}");
        }
        for (model, kv, tp, mtp, len, need) in [
            ("qwen3.6-27b", "turboquant_3bit_nc", 1, 3, 60_000, "1.553"),
            ("qwen3.6-27b", "turboquant_3bit_nc", 1, 3, 92_000, "1.967"),
            ("qwen3.6-27b", "turboquant_3bit_nc", 1, 3, 180_000, "3.054"),
            ("qwen3.6-27b", "turboquant_k8v4", 1, 3, 92_000, "3.062"),
            ("qwen3.6-27b", "fp8", 1, 3, 92_000, "3.787"),
            ("qwen3.6-27b", "bf16", 1, 3, 92_000, "6.744"),
            ("qwen3.6-27b", "turboquant_3bit_nc", 2, 3, 262_144, "2.045"),
            ("qwen3.6-27b", "turboquant_k8v4", 2, 3, 262_144, "3.633"),
            ("qwen3.6-27b", "fp8", 2, 3, 262_144, "4.643"),
            ("qwen3.6-27b", "bf16", 2, 3, 262_144, "8.897"),
            ("qwen3.6-35b-a3b", "fp8", 2, 0, 262_144, "1.319"),
        ] {
            assert_eq!(gib(pool(model, kv, tp, mtp, MambaMode::Align).bytes(len).unwrap()), need, "{model} {kv} {len}");
        }
    }

    #[test]
    fn the_longest_request_is_the_last_that_has_its_blocks() {
        for mode in MambaMode::ALL {
            for mtp in [0, 1, 3, 5] {
                let pool = pool("qwen3.6-27b", "fp8", 1, mtp, *mode);
                for blocks in 0..400 {
                    let longest = pool.longest(blocks);
                    assert!(longest == 0 || pool.per_request(longest) <= blocks, "{mode} {mtp} {blocks}");
                    assert!(pool.per_request(longest + 1) > blocks, "{mode} {mtp} {blocks}");
                }
            }
        }
    }

    #[test]
    fn a_printed_number_stands_for_all_that_round_to_it() {
        let printed: Printed = "2.17".parse().unwrap();
        let gib = f64::from(1 << 30);
        for (number, is) in [(2.165, true), (2.1740, true), (2.1749, true), (2.1751, false), (2.1649, false)] {
            let bytes = Bytes::new((number * gib) as u64 + 1).unwrap();
            assert_eq!(printed.stands_for(bytes), is, "{number}");
        }
        assert_eq!("2.4".parse::<Printed>(), "2.40".parse());
        for (text, bytes) in
            [("2.17GiB", printed.most.get()), ("2.1740 GiB", 2_334_368_412), ("3GiB", 3 << 30), ("77", 77)]
        {
            assert_eq!(available(text).map(Bytes::get), Ok(bytes), "{text}");
        }
        assert!(available("much").unwrap_err().contains("'much' is not a size"));
        assert_eq!("0".parse::<Printed>().unwrap().least, Bytes::ZERO);
        for text in ["", "2.", "x", "-1", "2.17 GiB", "9999999999"] {
            let read = text.parse::<Printed>();
            assert!(read.is_err() || text == "2.", "{text}");
        }
    }

    #[test]
    fn groups_are_the_smaller_kind_unless_the_kinds_are_near() {
        assert_eq!([group(48, 17), group(30, 10), group(16, 12), group(12, 8), group(0, 5)], [17, 10, 16, 8, 5]);
    }

    #[test]
    fn guesses_need_a_layer_that_makes_them() {
        let mut model = Model::named("qwen3.6-27b").unwrap();
        model.mtp_layers = 0;
        let refused = |mtp| Pool::new(&model, &Format::named("fp8").unwrap(), 1, mtp, MambaMode::None);
        assert!(refused(0).is_ok());
        assert!(refused(1).unwrap_err().to_string().contains("it has no multi-token head"));
    }
}
