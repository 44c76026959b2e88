//! A writer of pickles, as far as a snapshot needs one: protocol 4, no code, the opcodes that the viewer's reader knows.
//!
//! Python's own writer makes a memo entry for nearly everything; here only texts and frames have one, since only they come
//! again.

use std::collections::HashMap;
use std::io::{self, Write};

/// What Python's own writer puts into one batch; the viewer passes a batch as arguments, of which there is a limit.
const BATCH: usize = 1000;

/// The file so far. Texts and frames are written once and then referred to.
pub(super) struct Pickle<'a> {
    out: &'a mut dyn Write,
    texts: HashMap<String, u32>,
    frames: HashMap<String, u32>,
    memo: u32,
}

impl<'a> Pickle<'a> {
    pub(super) fn new(out: &'a mut dyn Write) -> io::Result<Self> {
        out.write_all(&[0x80, 4])?;
        Ok(Self { out, texts: HashMap::new(), frames: HashMap::new(), memo: 0 })
    }

    pub(super) fn stop(self) -> io::Result<()> {
        self.out.write_all(b".")
    }

    pub(super) fn dict(&mut self, entries: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        self.out.write_all(b"}(")?;
        entries(self)?;
        self.out.write_all(b"u")
    }

    pub(super) fn entry(&mut self, key: &str, value: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        self.text(key)?;
        value(self)
    }

    pub(super) fn list<T>(
        &mut self,
        items: &[T],
        mut each: impl FnMut(&mut Self, &T) -> io::Result<()>,
    ) -> io::Result<()> {
        self.out.write_all(b"]")?;
        for batch in items.chunks(BATCH) {
            self.out.write_all(b"(")?;
            batch.iter().try_for_each(|item| each(self, item))?;
            self.out.write_all(b"e")?;
        }
        Ok(())
    }

    pub(super) fn pair(&mut self, (first, second): (u64, u64)) -> io::Result<()> {
        self.uint(first)?;
        self.uint(second)?;
        self.out.write_all(&[0x86])
    }

    pub(super) fn bool(&mut self, value: bool) -> io::Result<()> {
        self.out.write_all(&[if value { 0x88 } else { 0x89 }])
    }

    pub(super) fn float(&mut self, value: f64) -> io::Result<()> {
        self.out.write_all(b"G")?;
        self.out.write_all(&value.to_be_bytes())
    }

    pub(super) fn uint(&mut self, value: u64) -> io::Result<()> {
        self.int(i128::from(value))
    }

    /// The shortest form the viewer reads: one, two or four bytes, else as many as two's complement needs.
    pub(super) fn int(&mut self, value: i128) -> io::Result<()> {
        if let Ok(byte) = u8::try_from(value) {
            return self.out.write_all(&[b'K', byte]);
        }
        if let Ok(short) = u16::try_from(value) {
            self.out.write_all(b"M")?;
            return self.out.write_all(&short.to_le_bytes());
        }
        if let Ok(int) = i32::try_from(value) {
            self.out.write_all(b"J")?;
            return self.out.write_all(&int.to_le_bytes());
        }
        let bytes = value.to_le_bytes();
        let bits = 128 - if value < 0 { (!value).leading_zeros() } else { value.leading_zeros() };
        let count = bits as usize / 8 + 1;
        self.out.write_all(&[0x8a, count as u8])?;
        self.out.write_all(&bytes[..count])
    }

    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(&known) = self.texts.get(text) {
            return self.recall(known);
        }
        match u8::try_from(text.len()) {
            Ok(count) => self.out.write_all(&[0x8c, count])?,
            Err(_) => {
                let count = u32::try_from(text.len()).map_err(|_| io::Error::other("a label of 4 GiB or more"))?;
                self.out.write_all(b"X")?;
                self.out.write_all(&count.to_le_bytes())?;
            }
        }
        self.out.write_all(text.as_bytes())?;
        let place = self.remember()?;
        self.texts.insert(text.to_owned(), place);
        Ok(())
    }

    /// The stack of an allocation: the one frame its label names, or none.
    pub(super) fn frames(&mut self, label: Option<&str>) -> io::Result<()> {
        let Some(label) = label else {
            return self.out.write_all(b"]");
        };
        if let Some(&known) = self.frames.get(label) {
            return self.recall(known);
        }
        let (filename, line, name) = frame(label);
        self.list(&[()], |p, ()| {
            p.dict(|p| {
                p.entry("filename", |p| p.text(filename))?;
                p.entry("line", |p| p.uint(u64::from(line)))?;
                p.entry("name", |p| p.text(name))
            })
        })?;
        let place = self.remember()?;
        self.frames.insert(label.to_owned(), place);
        Ok(())
    }

    fn remember(&mut self) -> io::Result<u32> {
        self.out.write_all(&[0x94])?;
        self.memo += 1;
        Ok(self.memo - 1)
    }

    fn recall(&mut self, place: u32) -> io::Result<()> {
        match u8::try_from(place) {
            Ok(place) => self.out.write_all(&[b'h', place]),
            Err(_) => {
                self.out.write_all(b"j")?;
                self.out.write_all(&place.to_le_bytes())
            }
        }
    }
}

/// `file:line:name` taken apart; a label of another form is a name without a place.
fn frame(label: &str) -> (&str, u32, &str) {
    let colons = label.match_indices(':').map(|(at, _)| at);
    let found = colons.zip(label.match_indices(':').map(|(at, _)| at).skip(1)).find_map(|(first, second)| {
        let line = label[first + 1..second].parse().ok()?;
        Some((&label[..first], line, &label[second + 1..]))
    });
    found.unwrap_or(("", 0, label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_taken_apart_at_its_line() {
        assert_eq!(frame("a.py:12:f"), ("a.py", 12, "f"));
        assert_eq!(frame("C:\\a.cpp:7:at::empty"), ("C:\\a.cpp", 7, "at::empty"));
        assert_eq!(frame("layer 3: scores"), ("", 0, "layer 3: scores"));
        assert_eq!(frame(""), ("", 0, ""));
    }
}
