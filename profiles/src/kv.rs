//! Formats of the KV cache as data (`profiles/serving/formats.toml`): the bytes of one token, and the names that servers use.

use serde::Deserialize;

use crate::error::Error;
use crate::shape::layer::product;
use crate::toml_file;
use crate::units::{Bytes, Overflow};

/// How keys and values are kept.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Format {
    /// What it is called here.
    pub id: String,
    /// What servers call it.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// One key.
    pub key: Side,
    /// One value.
    pub value: Side,
    /// Whether a slot is rounded up to an even number of bytes.
    #[serde(default)]
    pub even: bool,
    /// Whether a prefill that continues first unpacks everything that is cached.
    #[serde(default)]
    pub unpacked: bool,
    /// Whether a server of it (llama.cpp) keeps one stretch for each sequence instead of blocks.
    #[serde(default)]
    pub contiguous: bool,
}

/// How one key, or one value, of a head is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Side {
    /// Bits of a number.
    pub bits: u64,
    /// Numbers that share a scale; 0 if none do.
    #[serde(default)]
    pub scale_every: u64,
    /// Bytes of that scale.
    #[serde(default)]
    pub scale_bytes: u64,
    /// Further bytes for each head.
    #[serde(default)]
    pub extra_bytes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: Vec<Format>,
}

impl Format {
    /// Every format, in the order of the file.
    pub fn all() -> Vec<Self> {
        let file: File = toml_file::embedded("formats.toml", include_str!("../serving/formats.toml"));
        file.format
    }

    /// The format with that id or alias; upper and lower case are one.
    ///
    /// # Errors
    /// No such format, with those there are.
    pub fn named(name: &str) -> Result<Self, Error> {
        let is = |other: &String| other.eq_ignore_ascii_case(name);
        let all = Self::all();
        let ids: Vec<&str> = all.iter().map(|format| format.id.as_str()).collect();
        let reason = format!("there is no such KV format; there are {}", ids.join(", "));
        all.iter()
            .find(|format| is(&format.id) || format.aliases.iter().any(is))
            .cloned()
            .ok_or_else(|| Error::Selection { name: name.to_owned(), reason })
    }

    /// Bytes of one token of one KV head of that width, key and value together.
    pub fn slot(&self, head_dim: u64) -> u64 {
        let bytes = self.key.bytes(head_dim) + self.value.bytes(head_dim);
        if self.even { bytes.next_multiple_of(2) } else { bytes }
    }

    /// What unpacking `tokens` cached tokens takes: every key and value at 16 bits, and the same once more where they are
    /// joined with the new ones. Nothing for formats that kernels read as they are.
    ///
    /// # Errors
    /// A size that is no size.
    pub fn unpacking(&self, tokens: u64, kv_heads: u64, head_dim: u64) -> Result<Bytes, Overflow> {
        let both = 2 * u64::from(self.unpacked);
        product(&[both, tokens, kv_heads, 2 * head_dim, 2])
    }
}

impl Side {
    fn bytes(&self, head_dim: u64) -> u64 {
        let scales = head_dim.checked_div(self.scale_every).unwrap_or(0) * self.scale_bytes;
        (self.bits * head_dim).div_ceil(8) + scales + self.extra_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_at_width_256_are_those_of_the_servers() {
        for (name, slot) in [
            ("bf16", 1024),
            ("fp16", 1024),
            ("auto", 1024),
            ("fp8", 512),
            ("fp8_e5m2", 512),
            ("int8_per_token_head", 520),
            ("turboquant_k8v4", 388),
            ("turboquant_4bit_nc", 262),
            ("turboquant_k3v4_nc", 230),
            ("turboquant_3bit_nc", 198),
            ("TQ3", 198),
            ("nvfp4", 288),
            ("q4_0", 2 * 256 / 32 * 18),
            ("q8_0", 2 * 256 / 32 * 34),
        ] {
            assert_eq!(Format::named(name).unwrap().slot(256), slot, "{name}");
        }
        // 3 bits of 52 numbers are 19.5 bytes: 20 + 2 + 20 + 4; of 40, an odd 15 twice.
        assert_eq!(Format::named("tq3").unwrap().slot(52), 46);
        assert_eq!(Format::named("k3v4").unwrap().slot(40), 42);
    }

    #[test]
    fn unpacking_counts_each_cached_token_twice_at_16_bits() {
        let tq3 = Format::named("tq3").unwrap();
        assert_eq!(tq3.unpacking(60_000, 4, 256).unwrap().get(), 2 * 60_000 * 4096);
        assert_eq!(Format::named("fp8").unwrap().unpacking(60_000, 4, 256).unwrap(), Bytes::ZERO);
    }

    #[test]
    fn an_unknown_format_is_refused_with_those_there_are() {
        let error = Format::named("fp6").unwrap_err().to_string();
        assert!(error.starts_with("fp6: there is no such KV format; there are bf16, fp8,"), "{error}");
    }
}
