//! Reading TOML: the only file that names the toml crate. An error names the file and the line.

use serde::de::DeserializeOwned;

use crate::error::{At, Error};

/// A value with the place where it stands in its text, so that it can be written anew without touching its neighbours.
pub(crate) type Placed<T> = toml::Spanned<T>;

/// The value that a TOML text holds; `name` is the file, for errors.
pub(crate) fn parse<T: DeserializeOwned>(name: &str, text: &str) -> Result<T, Error> {
    toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(At::File, |span| At::Line(line_of(text, span.start)));
        Error::malformed(name, at, error.message())
    })
}

/// A file that is part of this crate; the tests read each.
pub(crate) fn embedded<T: DeserializeOwned>(name: &str, text: &str) -> T {
    parse(name, text).unwrap_or_else(|error| panic!("the tests read every embedded file: {error}"))
}

/// The line, from 1, of a byte.
pub(crate) fn line_of(text: &str, byte: usize) -> u64 {
    1 + text.as_bytes().iter().take(byte).filter(|b| **b == b'\n').count() as u64
}
