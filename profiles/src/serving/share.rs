//! The part of a card that a server may take.

use std::fmt;
use std::str::FromStr;

use crate::error::quoted;
use crate::units::Bytes;

/// A part of a whole, in millionths, read from a decimal fraction such as `0.93`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share(u32);

impl Share {
    /// Nine tenths, what servers take where nothing is said.
    pub const DEFAULT: Self = Self(900_000);
    /// All of it.
    pub const WHOLE: Self = Self(1_000_000);

    /// That part of `whole`, rounded down.
    pub fn of(self, whole: Bytes) -> Bytes {
        let part = u128::from(whole.get()) * u128::from(self.0) / 1_000_000;
        u64::try_from(part).ok().and_then(Bytes::new).unwrap_or(whole)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{} is no share of a card; give a fraction from 0.01 to 1, such as 0.93", quoted(text));
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
        if whole.len() > 1
            || fraction.len() > 6
            || !digits(whole)
            || !digits(fraction)
            || text.len() == 1 && whole.is_empty()
        {
            return Err(wrong());
        }
        let whole: u32 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| wrong())? };
        let fraction: u32 = format!("{fraction:0<6}").parse().map_err(|_| wrong())?;
        match whole * 1_000_000 + fraction {
            millionths @ 10_000..=1_000_000 => Ok(Self(millionths)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000);
        let short = text.trim_end_matches('0');
        f.pad(short.strip_suffix('.').unwrap_or(short))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MAX_BYTES;

    #[test]
    fn a_share_is_exact_to_the_millionth() {
        for (text, millionths) in
            [("0.93", 930_000), (".5", 500_000), ("1", 1_000_000), ("1.0", 1_000_000), ("0.01", 10_000)]
        {
            assert_eq!(text.parse(), Ok(Share(millionths)), "{text}");
        }
        for text in ["", ".", "0", "1.1", "2", "-0.5", "0.0000001", "93%", "0.9.3", "nan"] {
            let error = text.parse::<Share>().unwrap_err();
            assert!(error.ends_with("is no share of a card; give a fraction from 0.01 to 1, such as 0.93"), "{error}");
        }
        assert_eq!(["0.93", "1", "0.5"].map(|text| text.parse::<Share>().unwrap().to_string()), ["0.93", "1", "0.5"]);
        assert_eq!(Share(930_000).of(Bytes::new(1001).unwrap()).get(), 930);
        assert_eq!(Share::WHOLE.of(Bytes::new(MAX_BYTES).unwrap()).get(), MAX_BYTES);
    }
}
