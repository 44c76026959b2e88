//! The small values of a record: an event's letter, an integer, a scalar of `info`. Each takes whatever stands in its place,
//! so that the error is ours and names the event.

use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::quoted;

/// What an event is.
pub(super) enum Letter {
    Alloc,
    Free,
    StepBegin,
    StepEnd,
    Other(String),
}

/// Any integer, or what stands in its place.
pub(super) enum Integer {
    Is(i128),
    Fraction(f64),
    Null,
    Other,
}

/// A value of `info` as text, or `None` for a list or an object.
pub(super) struct Scalar(pub Option<String>);

impl fmt::Display for Integer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Is(number) => number.fmt(f),
            Self::Fraction(number) => number.fmt(f),
            Self::Null => f.write_str("null"),
            Self::Other => f.write_str("something else"),
        }
    }
}

/// Writes the `Deserialize` of a type whose visitor takes whatever comes.
macro_rules! visited {
    ($type:ty, $visitor:ident, { $($methods:tt)* }) => {
        struct $visitor;

        impl<'de> Visitor<'de> for $visitor {
            type Value = $type;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            $($methods)*
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any($visitor)
            }
        }
    };
}

visited!(Letter, LetterVisitor, {
    fn visit_str<E>(self, text: &str) -> Result<Letter, E> {
        Ok(match text {
            "a" => Letter::Alloc,
            "f" => Letter::Free,
            "s" => Letter::StepBegin,
            "e" => Letter::StepEnd,
            other => Letter::Other(quoted(other)),
        })
    }
});

visited!(Integer, IntegerVisitor, {
    fn visit_u64<E>(self, number: u64) -> Result<Integer, E> {
        Ok(Integer::Is(number.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Integer, E> {
        Ok(Integer::Is(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Integer, E> {
        Ok(Integer::Fraction(number))
    }

    fn visit_unit<E>(self) -> Result<Integer, E> {
        Ok(Integer::Null)
    }

    fn visit_str<E>(self, _: &str) -> Result<Integer, E> {
        Ok(Integer::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Integer, E> {
        Ok(Integer::Other)
    }
});

visited!(Scalar, ScalarVisitor, {
    fn visit_u64<E>(self, number: u64) -> Result<Scalar, E> {
        Ok(Scalar(Some(number.to_string())))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Scalar, E> {
        Ok(Scalar(Some(number.to_string())))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Scalar, E> {
        Ok(Scalar(Some(number.to_string())))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
        Ok(Scalar(Some(value.to_string())))
    }

    fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
        Ok(Scalar(Some(text.to_owned())))
    }

    fn visit_unit<E>(self) -> Result<Scalar, E> {
        Ok(Scalar(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Scalar, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar(None))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar(None))
    }
});
