//! The texts that say who asked for memory, each once.

use std::collections::HashMap;

/// The texts that say who asked, each once.
#[derive(Debug, Default)]
pub(crate) struct Labels {
    texts: Vec<String>,
    ids: HashMap<String, u32>,
    /// The one asked for last: a request asks twice, and neighbours are often alike.
    last: u32,
}

/// Most different labels; further ones share the last.
const MOST_LABELS: usize = 1 << 16;

impl Labels {
    pub fn id(&mut self, text: &str) -> u32 {
        if self.texts.get(self.last as usize).is_some_and(|last| last == text) {
            return self.last;
        }
        if let Some(&id) = self.ids.get(text) {
            self.last = id;
            return id;
        }
        let text = if self.texts.len() < MOST_LABELS { text } else { "(too many labels)" };
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let id = self.texts.len() as u32;
        self.texts.push(text.to_owned());
        self.ids.insert(text.to_owned(), id);
        id
    }

    pub fn text(&self, id: u32) -> &str {
        &self.texts[id as usize]
    }

    pub fn texts(&self) -> &[String] {
        &self.texts
    }
}
