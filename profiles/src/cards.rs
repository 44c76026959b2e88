//! Cards as data (`profiles/serving/cards.toml`): name, usable bytes, and who says so.

use serde::Deserialize;

use crate::error::Error;
use crate::toml_file;
use crate::units::Bytes;

/// A card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// What it is called here, or the bytes that were given.
    pub id: String,
    /// What a framework sees in total.
    pub usable: Bytes,
    /// Who says so.
    pub source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    card: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    id: String,
    #[serde(default)]
    aliases: Vec<String>,
    usable: String,
    source: String,
}

impl Card {
    /// A card by its name, or by its bytes, such as `24GiB`.
    ///
    /// # Errors
    /// Neither a name nor a size, with the names there are.
    pub fn open(name: &str) -> Result<Self, Error> {
        let file = file();
        let is = |other: &String| plain(other) == plain(name);
        if let Some(entry) = file.card.iter().find(|entry| is(&entry.id) || entry.aliases.iter().any(is)) {
            return Ok(entry.card());
        }
        if let Ok(usable) = name.parse() {
            return Ok(Self { id: name.to_owned(), usable, source: "given".to_owned() });
        }
        let ids: Vec<&str> = file.card.iter().map(|entry| entry.id.as_str()).collect();
        let reason = format!("there is no such card; give its memory, such as 24GiB, or one of {}", ids.join(", "));
        Err(Error::Selection { name: name.to_owned(), reason })
    }

    /// Every card, in the order of the file.
    pub fn all() -> Vec<Self> {
        file().card.iter().map(Entry::card).collect()
    }
}

impl Entry {
    fn card(&self) -> Card {
        let usable = self.usable.parse().unwrap_or_else(|error| panic!("the tests read every embedded size: {error}"));
        Card { id: self.id.clone(), usable, source: self.source.clone() }
    }
}

fn file() -> File {
    toml_file::embedded("cards.toml", include_str!("../serving/cards.toml"))
}

/// A name without what people leave out.
fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_found_by_name_or_given_in_bytes() {
        for name in ["rtx3090", "RTX 3090", "RTX 3090 24GB", "3090", "RTX-3090"] {
            assert_eq!(Card::open(name).unwrap().id, "rtx3090", "{name}");
        }
        assert_eq!(Card::open("24GiB").unwrap().usable.get(), 24 << 30);
        assert!(Card::all().iter().all(|card| card.usable > Bytes::ZERO && !card.source.is_empty()));
        let error = Card::open("tpu").unwrap_err().to_string();
        assert!(
            error.starts_with("tpu: there is no such card; give its memory, such as 24GiB, or one of rtx3090,"),
            "{error}"
        );
    }
}
