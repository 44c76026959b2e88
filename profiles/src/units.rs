//! Bytes, offsets, ticks and intervals: the quantities every other file speaks in.
//!
//! Each is a newtype, so that a size cannot be passed where a position or a time is meant. Arithmetic is checked: what
//! leaves the range is an [`Overflow`], never a wrapped number. Rounding says its direction in its name.
//!
//! Every interval is half-open, `[start, end)`: a buffer that dies at a tick and one that is born at it may share bytes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The largest size or position: 2^63 - 1. What a 64-bit signed reader cannot hold is refused where it comes in.
pub const MAX_BYTES: u64 = i64::MAX as u64;

/// A size in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Bytes(u64);

/// A position: bytes from the base of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Offset(u64);

/// Logical time. Only its order matters. A profile holds ticks up to [`Tick::MAX`], so that the tick after the last one
/// exists too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tick(pub u64);

/// An alignment in bytes: a power of two, at most 2^40.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Align(u64);

/// A half-open interval `[start, end)` that is never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Interval<T> {
    /// First point inside.
    pub start: T,
    /// First point after it.
    pub end: T,
}

/// When a buffer lives: from the tick of its allocation to the tick of its free.
pub type Lifetime = Interval<Tick>;

/// Where a buffer lies in an arena.
pub type Span = Interval<Offset>;

/// A piece of device memory, as plain data: what the arena gives and a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceSpan {
    /// Device address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub bytes: Bytes,
}

/// A sum or a rounding that left the range of [`MAX_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the result is more than 2^63 - 1 bytes")]
pub struct Overflow;

/// Why a text is not a quantity; prints as what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// Not of the form digits, optional fraction, optional unit.
    #[error("'{0}' is not a size: write bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB, such as 24GiB")]
    NotASize(String),
    /// Beyond [`MAX_BYTES`].
    #[error("'{0}' is more than 2^63 - 1 bytes")]
    TooLarge(String),
    /// Not a power of two, or beyond 2^40.
    #[error("alignment {0} is not a power of two between 1 and 2^40")]
    NotAnAlignment(u64),
}

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// A size; `None` above [`MAX_BYTES`].
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes <= MAX_BYTES { Some(Self(bytes)) } else { None }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whether there is nothing.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// `self + other`.
    pub fn checked_add(self, other: Self) -> Result<Self, Overflow> {
        self.0.checked_add(other.0).and_then(Self::new).ok_or(Overflow)
    }

    /// `self - other`, or `None` if that is negative.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }

    /// `self * count`.
    pub fn checked_mul(self, count: u64) -> Result<Self, Overflow> {
        self.0.checked_mul(count).and_then(Self::new).ok_or(Overflow)
    }

    /// The smallest multiple of `align` that is not below `self`.
    pub fn align_up(self, align: Align) -> Result<Self, Overflow> {
        align.round_up(self.0).and_then(Self::new).ok_or(Overflow)
    }

    /// The largest multiple of `align` that is not above `self`.
    pub fn align_down(self, align: Align) -> Self {
        Self(self.0 & !(align.0 - 1))
    }
}

impl Offset {
    /// The base of the arena.
    pub const ZERO: Self = Self(0);

    /// A position; `None` above [`MAX_BYTES`].
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes <= MAX_BYTES { Some(Self(bytes)) } else { None }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self + size`.
    pub fn checked_add(self, size: Bytes) -> Result<Self, Overflow> {
        self.0.checked_add(size.0).and_then(Self::new).ok_or(Overflow)
    }

    /// Whether a buffer of that alignment may begin here.
    pub const fn is_aligned(self, align: Align) -> bool {
        self.0 & (align.0 - 1) == 0
    }
}

impl Align {
    /// No alignment.
    pub const ONE: Self = Self(1);
    /// What CUDA allocators round to, and the default of a plan.
    pub const DEFAULT: Self = Self(512);

    /// An alignment; the error names what is wrong with `bytes`.
    pub const fn new(bytes: u64) -> Result<Self, UnitError> {
        if bytes.is_power_of_two() && bytes <= 1 << 40 {
            Ok(Self(bytes))
        } else {
            Err(UnitError::NotAnAlignment(bytes))
        }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    const fn round_up(self, value: u64) -> Option<u64> {
        match value.checked_add(self.0 - 1) {
            Some(sum) => Some(sum & !(self.0 - 1)),
            None => None,
        }
    }
}

impl Default for Align {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl TryFrom<u64> for Align {
    type Error = UnitError;
    fn try_from(bytes: u64) -> Result<Self, UnitError> {
        Self::new(bytes)
    }
}

impl From<Align> for u64 {
    fn from(align: Align) -> Self {
        align.0
    }
}

impl TryFrom<u64> for Bytes {
    type Error = Overflow;
    fn try_from(bytes: u64) -> Result<Self, Overflow> {
        Self::new(bytes).ok_or(Overflow)
    }
}

impl From<Bytes> for u64 {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

impl TryFrom<u64> for Offset {
    type Error = Overflow;
    fn try_from(bytes: u64) -> Result<Self, Overflow> {
        Self::new(bytes).ok_or(Overflow)
    }
}

impl From<Offset> for u64 {
    fn from(offset: Offset) -> Self {
        offset.0
    }
}

impl<T: PartialOrd + Copy> Interval<T> {
    /// The interval, or `None` if it would be empty.
    pub fn new(start: T, end: T) -> Option<Self> {
        (start < end).then_some(Self { start, end })
    }

    /// Whether the two share a point.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// Whether `point` is inside.
    pub fn contains(&self, point: T) -> bool {
        self.start <= point && point < self.end
    }
}

impl Tick {
    /// The latest tick of a profile: 2^63 - 1.
    pub const MAX: Self = Self(i64::MAX as u64);
}

const UNITS: [(&str, u64); 14] = [
    ("", 1),
    ("b", 1),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

impl std::str::FromStr for Bytes {
    type Err = UnitError;

    /// Reads `1048576`, `24GiB`, `1.5 GiB`, `20G` (binary) or `80GB` (decimal); a fraction of a byte is dropped.
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let wrong = || UnitError::NotASize(text.to_owned());
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let unit = unit.trim().to_ascii_lowercase();
        let scale = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?.1;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || number.ends_with('.') || fraction.contains('.') || fraction.len() > 18 {
            return Err(wrong());
        }
        let too_large = || UnitError::TooLarge(text.to_owned());
        let whole: u64 = whole.parse().map_err(|_| too_large())?;
        let part = if fraction.is_empty() {
            0
        } else {
            let digits: u128 = fraction.parse().map_err(|_| wrong())?;
            // At most 18 digits times 2^40 stays far below 2^128.
            u64::try_from(digits * u128::from(scale) / 10_u128.pow(fraction.len() as u32)).map_err(|_| too_large())?
        };
        whole.checked_mul(scale).and_then(|bytes| bytes.checked_add(part)).and_then(Self::new).ok_or_else(too_large)
    }
}

impl std::str::FromStr for Align {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        Self::new(text.parse::<Bytes>()?.get())
    }
}

/// For people: `512 B`, `62.3 KiB`, `15.10 GiB`. Where exact bytes matter, print [`Bytes::get`].
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            b if b < 1 << 10 => format!("{b} B"),
            b if b < 1 << 20 => format!("{:.1} KiB", b as f64 / f64::from(1 << 10)),
            b if b < 1 << 30 => format!("{:.1} MiB", b as f64 / f64::from(1 << 20)),
            b if b < 1 << 40 => format!("{:.2} GiB", b as f64 / f64::from(1 << 30)),
            b => format!("{:.2} TiB", b as f64 / (1_u64 << 40) as f64),
        };
        f.pad(&text)
    }
}

impl fmt::Display for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Align {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Result<u64, UnitError> {
        text.parse::<Bytes>().map(Bytes::get)
    }

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("1048576", 1 << 20),
            ("24GiB", 24 << 30),
            ("24g", 24 << 30),
            ("1.5 GiB", 3 << 29),
            ("80GB", 80_000_000_000),
            ("0.5KiB", 512),
            ("9223372036854775807", MAX_BYTES),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in ["", "GiB", "-1", "1..5", "1.", ".5", "12 parsecs", "1e9", "0x10"] {
            assert_eq!(size(text), Err(UnitError::NotASize(text.to_owned())), "{text}");
        }
        for text in ["9223372036854775808", "8388608TiB", "99999999999999999999"] {
            assert_eq!(size(text), Err(UnitError::TooLarge(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn rounding_says_its_direction_and_overflow_is_an_error() {
        let align = Align::new(512).unwrap();
        let bytes = |b| Bytes::new(b).unwrap();
        assert_eq!(bytes(1).align_up(align), Ok(bytes(512)));
        assert_eq!(bytes(512).align_up(align), Ok(bytes(512)));
        assert_eq!(bytes(513).align_down(align), bytes(512));
        assert_eq!(bytes(MAX_BYTES).align_up(align), Err(Overflow));
        assert_eq!(bytes(MAX_BYTES).checked_add(bytes(1)), Err(Overflow));
        assert_eq!(bytes(MAX_BYTES).checked_mul(2), Err(Overflow));
        assert_eq!(Bytes::new(1 << 63), None);
    }

    #[test]
    fn alignments_are_powers_of_two() {
        for bad in [0, 3, 513, 1 << 41, u64::MAX] {
            assert_eq!(Align::new(bad), Err(UnitError::NotAnAlignment(bad)));
        }
        assert_eq!("64KiB".parse::<Align>().unwrap().get(), 65536);
    }

    #[test]
    fn touching_intervals_do_not_overlap() {
        let a = Interval::new(0, 5).unwrap();
        assert!(!a.overlaps(&Interval::new(5, 6).unwrap()));
        assert!(a.overlaps(&Interval::new(4, 5).unwrap()));
        assert!(a.contains(0) && !a.contains(5));
        assert_eq!(Interval::new(5, 5), None);
    }
}
