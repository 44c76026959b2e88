//! The binary form: one envelope for everything this workspace stores, and the fingerprints that tie files together.
//!
//! ```text
//!   byte  0  magic         8  54 45 52 52 41 43 45 1a, "TERRACE" and a character that ends a text file
//!         8  kind          4  "PROF", "PLAN" or "ARNA"
//!        12  version       2  of the payload's layout; each kind counts its own
//!        14  flags         2  0
//!        16  fingerprint  16  of the content
//!        32  length        8  of the payload
//!        40  crc32         4  of bytes 0 to 39 and of the payload
//!        44  payload          bincode 2 with its standard configuration
//! ```
//!
//! Numbers are little-endian. Reading verifies from the outside in, so the payload of a damaged or foreign file is never
//! interpreted: magic, kind, version, flags, length, checksum, payload, fingerprint, rules of the content.
//!
//! This is the only file that names bincode, crc32fast and sha2; another codec can replace it here.

use std::fmt;
use std::io::{self, Read, Write};

use bincode::error::DecodeError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{At, Error, quoted};
use crate::limits::{Limits, Meter};
use crate::profile::Profile;

/// The first bytes of every file.
pub const MAGIC: [u8; 8] = *b"TERRACE\x1a";

/// Version of the layout of a profile's payload.
pub const PROFILE_VERSION: u16 = 1;

/// What stands before the payload.
const HEADER_BYTES: usize = 44;
const CRC_AT: usize = 40;
const _: () = assert!(HEADER_BYTES == MAGIC.len() + 4 + 2 + 2 + 16 + 8 + 4);

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A memory profile.
    Profile,
    /// A plan made from one.
    Plan,
    /// The plans of a running device, by key.
    Arena,
}

/// The first 16 bytes of a SHA-256, written as 32 lowercase hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; 16]);

/// A text that is not a [`Fingerprint`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} is not a fingerprint of 32 lowercase hexadecimal digits", quoted(.0))]
pub struct NotAFingerprint(String);

/// Puts `value` into an envelope.
pub fn encode<T: Serialize>(kind: Kind, version: u16, fingerprint: Fingerprint, value: &T) -> Result<Vec<u8>, Error> {
    let mut out = Vec::with_capacity(HEADER_BYTES);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(kind.tag());
    out.extend_from_slice(&version.to_le_bytes());
    out.extend_from_slice(&0_u16.to_le_bytes());
    out.extend_from_slice(&fingerprint.0);
    out.extend_from_slice(&[0; 8 + 4]);
    bincode::serde::encode_into_std_write(value, &mut out, bincode::config::standard())
        .map_err(|e| Error::malformed(kind.noun(), At::File, format!("the {} cannot be encoded: {e}", kind.noun())))?;
    let length = (out.len() - HEADER_BYTES) as u64;
    out[32..CRC_AT].copy_from_slice(&length.to_le_bytes());
    let crc = checksum(&out[..CRC_AT], &out[HEADER_BYTES..]);
    out[CRC_AT..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    Ok(out)
}

/// Opens an envelope of `kind` whose payload has the layout `version`; `name` is what errors call the input.
///
/// The fingerprint is the one the file claims. Whether it is that of the value, only the caller can say.
pub fn decode<T: DeserializeOwned>(
    kind: Kind,
    version: u16,
    name: &str,
    bytes: &[u8],
) -> Result<(Fingerprint, T), Error> {
    let (header, payload) = bytes.split_at_checked(HEADER_BYTES).ok_or_else(|| short(name, bytes))?;
    let header = Header::parse(header.try_into().expect("split at its length"), kind, version, name)?;
    if (payload.len() as u64) < header.length {
        return Err(header.truncated(name, payload.len()));
    }
    if payload.len() as u64 > header.length {
        let at = At::Byte(HEADER_BYTES as u64 + header.length);
        return Err(Error::malformed(name, at, "bytes follow the end of the file's content; the file is damaged"));
    }
    let value = header.open(payload, name)?;
    Ok((header.fingerprint, value))
}

/// A profile as a file.
pub fn encode_profile(profile: &Profile) -> Result<Vec<u8>, Error> {
    encode(Kind::Profile, PROFILE_VERSION, profile.fingerprint(), profile)
}

/// The checked profile in such a file.
pub fn decode_profile(name: &str, bytes: &[u8]) -> Result<Profile, Error> {
    read_profile(bytes, name, &Meter::new(name, Limits::default()))
}

/// Reads a profile as a stream, so that no more is taken in than the meter allows.
pub(crate) fn read_profile(mut input: impl Read, name: &str, meter: &Meter) -> Result<Profile, Error> {
    let failed = |e: io::Error| Error::from_read(name, e);
    let mut header = Vec::with_capacity(HEADER_BYTES);
    input.by_ref().take(HEADER_BYTES as u64).read_to_end(&mut header).map_err(failed)?;
    let bytes = header.as_slice().try_into().map_err(|_| short(name, &header))?;
    let header = Header::parse(bytes, Kind::Profile, PROFILE_VERSION, name)?;
    // Three bytes can hold an event of forty, and a life beside it: what decodes from a payload is at most this much larger.
    const GROWTH: u64 = 64;
    meter.charge(0, At::File)?;
    let allowed = meter.left() / GROWTH;
    let mut payload = Vec::new();
    input.by_ref().take(header.length.min(allowed)).read_to_end(&mut payload).map_err(failed)?;
    if (payload.len() as u64) < header.length {
        let more = payload.len() as u64 == allowed && input.read(&mut [0]).map_err(failed)? > 0;
        return Err(if more { meter.too_large(At::File) } else { header.truncated(name, payload.len()) });
    }
    if input.read(&mut [0]).map_err(failed)? > 0 {
        let at = At::Byte(HEADER_BYTES as u64 + header.length);
        return Err(Error::malformed(name, at, "bytes follow the end of the file's content; the file is damaged"));
    }
    let profile: Profile = header.open(&payload, name)?;
    let found = profile.fingerprint();
    if found != header.fingerprint {
        let reason = format!("the content has the fingerprint {found}, but the file says {}", header.fingerprint);
        return Err(Error::malformed(name, At::Byte(16), reason));
    }
    profile.check().map_err(|error| error.in_file(name))?;
    Ok(profile)
}

/// The first 16 bytes of SHA-256 over `domain`, a zero byte and the bincode encoding of `value`, which is streamed.
///
/// # Panics
///
/// If `value` cannot be encoded at all, such as a sequence that does not know its length. Plain data always can.
pub fn fingerprint_of<T: Serialize>(domain: &str, value: &T) -> Fingerprint {
    let mut hasher = Hasher(Sha256::new());
    hasher.0.update(domain.as_bytes());
    hasher.0.update([0]);
    bincode::serde::encode_into_std_write(value, &mut hasher, bincode::config::standard())
        .expect("plain data encodes, and a hasher takes every byte");
    let digest: [u8; 32] = hasher.0.finalize().into();
    let mut first = [0; 16];
    first.copy_from_slice(&digest[..16]);
    Fingerprint(first)
}

impl Profile {
    /// Identifies what happened: labels, lanes and events, but neither the name nor the notes, so that one record read
    /// from two files has one fingerprint.
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of("terrace profile", &(&self.labels, &self.lanes, &self.events))
    }
}

/// The envelope, once it is known to be ours.
struct Header {
    fingerprint: Fingerprint,
    length: u64,
    crc: u32,
    head: [u8; CRC_AT],
    kind: Kind,
}

impl Header {
    fn parse(bytes: &[u8; HEADER_BYTES], kind: Kind, version: u16, name: &str) -> Result<Self, Error> {
        let wrong = |at, reason: String| Err(Error::malformed(name, At::Byte(at), reason));
        if bytes[..8] != MAGIC {
            return wrong(0, "this is not a file of terrace: its first bytes differ".to_owned());
        }
        match Kind::from_tag(&bytes[8..12]) {
            Some(found) if found == kind => {}
            Some(found) => return wrong(8, format!("the file holds a {}, not a {}", found.noun(), kind.noun())),
            None => {
                let tag = String::from_utf8_lossy(&bytes[8..12]);
                return wrong(8, format!("the file holds {}, which this build does not know", quoted(&tag)));
            }
        }
        let found = u16::from_le_bytes([bytes[12], bytes[13]]);
        if found != version {
            let advice = if found > version {
                "use a newer build"
            } else {
                "make the file again, or convert it with the build that wrote it"
            };
            let noun = kind.noun();
            return wrong(
                12,
                format!("the {noun} has version {found} and this build reads version {version}; {advice}"),
            );
        }
        let flags = u16::from_le_bytes([bytes[14], bytes[15]]);
        if flags != 0 {
            return wrong(14, format!("the flags are {flags:#06x}, of which this build knows none; use a newer build"));
        }
        let mut fingerprint = [0; 16];
        fingerprint.copy_from_slice(&bytes[16..32]);
        let mut length = [0; 8];
        length.copy_from_slice(&bytes[32..CRC_AT]);
        let mut head = [0; CRC_AT];
        head.copy_from_slice(&bytes[..CRC_AT]);
        let crc = u32::from_le_bytes([bytes[40], bytes[41], bytes[42], bytes[43]]);
        Ok(Self { fingerprint: Fingerprint(fingerprint), length: u64::from_le_bytes(length), crc, head, kind })
    }

    fn open<T: DeserializeOwned>(&self, payload: &[u8], name: &str) -> Result<T, Error> {
        let found = checksum(&self.head, payload);
        if found != self.crc {
            let reason =
                format!("the checksum is {found:08x}, but the file says {:08x}; the file is damaged", self.crc);
            return Err(Error::malformed(name, At::Byte(CRC_AT as u64), reason));
        }
        let wrong = |at: usize, reason| Err(Error::malformed(name, At::Byte((HEADER_BYTES + at) as u64), reason));
        match unpack(payload) {
            Ok((value, read)) if read == payload.len() => Ok(value),
            Ok((_, read)) => wrong(read, format!("the payload goes on after the {}", self.kind.noun())),
            Err(reason) => wrong(0, format!("the payload is not a {}: {reason}", self.kind.noun())),
        }
    }

    fn truncated(&self, name: &str, found: usize) -> Error {
        let reason = format!("the file ends after {found} of {} bytes of content; the file is truncated", self.length);
        Error::malformed(name, At::Byte((HEADER_BYTES + found) as u64), reason)
    }
}

fn short(name: &str, bytes: &[u8]) -> Error {
    let at = At::Byte(bytes.len() as u64);
    let reason = format!("the file ends within its header of {HEADER_BYTES} bytes; the file is truncated");
    Error::malformed(name, at, reason)
}

/// Decodes the payload under a limit on what its lengths may claim, since a text is allocated before it is read.
///
/// The limit is a constant of the type, so there are a few, each far above what an honest payload of that size claims
/// (up to sixteen bytes for one byte read).
fn unpack<T: DeserializeOwned>(payload: &[u8]) -> Result<(T, usize), String> {
    fn with<T: DeserializeOwned, const LIMIT: usize>(payload: &[u8]) -> Result<(T, usize), String> {
        let config = bincode::config::standard().with_limit::<LIMIT>();
        bincode::serde::decode_from_slice(payload, config).map_err(|e| match e {
            DecodeError::UnexpectedEnd { .. } => "it ends early".to_owned(),
            DecodeError::LimitExceeded => "a length in it is longer than the payload".to_owned(),
            DecodeError::OtherString(reason) => reason,
            other => other.to_string(),
        })
    }
    match payload.len() {
        0..=0x10_0000 => with::<T, { 1 << 24 }>(payload),
        0x10_0001..=0x100_0000 => with::<T, { 1 << 28 }>(payload),
        0x100_0001..=0x1000_0000 => with::<T, { 1 << 32 }>(payload),
        0x1000_0001..=0x1_0000_0000 => with::<T, { 1 << 36 }>(payload),
        _ => Err("more than 4 GiB are not read".to_owned()),
    }
}

fn checksum(head: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(payload);
    hasher.finalize()
}

struct Hasher(Sha256);

impl Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Kind {
    const ALL: [Self; 3] = [Self::Profile, Self::Plan, Self::Arena];

    fn tag(self) -> &'static [u8; 4] {
        match self {
            Self::Profile => b"PROF",
            Self::Plan => b"PLAN",
            Self::Arena => b"ARNA",
        }
    }

    fn noun(self) -> &'static str {
        match self {
            Self::Profile => "profile",
            Self::Plan => "plan",
            Self::Arena => "plan set",
        }
    }

    fn from_tag(tag: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.tag() == tag)
    }
}

impl Fingerprint {
    /// From its bytes.
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = String::with_capacity(32);
        for byte in self.0 {
            for half in [byte >> 4, byte & 15] {
                digits.push(char::from_digit(u32::from(half), 16).expect("four bits are one digit"));
            }
        }
        f.pad(&digits)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl std::str::FromStr for Fingerprint {
    type Err = NotAFingerprint;

    fn from_str(text: &str) -> Result<Self, NotAFingerprint> {
        let wrong = || NotAFingerprint(text.to_owned());
        let digits = text.as_bytes();
        if digits.len() != 32 || digits.iter().any(u8::is_ascii_uppercase) {
            return Err(wrong());
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let half = |digit: u8| char::from(digit).to_digit(16).ok_or_else(wrong);
            *byte = (half(pair[0])? << 4 | half(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

/// As text where the format is for people, else as its 16 bytes.
impl Serialize for Fingerprint {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { serializer.collect_str(self) } else { self.0.serialize(serializer) }
    }
}

impl<'de> Deserialize<'de> for Fingerprint {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return Deserialize::deserialize(deserializer).map(Self);
        }
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_the_beginning_of_a_sha256() {
        // printf 'd\0\x05' | sha256sum
        let found = fingerprint_of("d", &5_u64);
        assert_eq!(found.to_string(), "eb3441b37aa1b919b58b57ee741bc565");
        assert_eq!(found.to_string().parse(), Ok(found));
    }

    #[test]
    fn a_fingerprint_reads_only_as_it_is_written() {
        for text in ["", "00", &"g".repeat(32), &"A".repeat(32), &"0".repeat(33), &"é".repeat(16)] {
            assert_eq!(text.parse::<Fingerprint>(), Err(NotAFingerprint(text.to_owned())));
        }
        assert_eq!(
            "xyz".parse::<Fingerprint>().unwrap_err().to_string(),
            "'xyz' is not a fingerprint of 32 lowercase hexadecimal digits"
        );
    }

    #[test]
    fn a_fingerprint_is_text_in_json_and_bytes_in_bincode() {
        let print = Fingerprint::new([0xab; 16]);
        let json = serde_json::to_string(&print).unwrap();
        assert_eq!(json, format!("\"{}\"", "ab".repeat(16)));
        assert_eq!(serde_json::from_str::<Fingerprint>(&json).unwrap(), print);
        let bytes = encode(Kind::Plan, 7, print, &print).unwrap();
        assert_eq!(bytes.len(), HEADER_BYTES + 16);
        assert_eq!(decode::<Fingerprint>(Kind::Plan, 7, "p", &bytes).unwrap(), (print, print));
    }
}
