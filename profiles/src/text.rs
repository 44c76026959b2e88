//! The text form of a profile, for git: one line for each table entry and each event, so that a diff shows what changed.
//!
//! ```text
//! terrace-profile 1
//! name toy
//! note gpu NVIDIA H200
//! lane stream 0
//! label model.py:12:forward
//! s prefill/128            a step begins
//! a 0 4096 0               buffer 0 begins: 4096 bytes, label 0, lane 0
//! a 1 512 0 align=512
//! f 0                      buffer 0 ends
//! e                        the step ends
//! ```
//!
//! The spec is in the README of this crate. Reading streams line by line; every error names its line. What is written is
//! read back equal, with one exception: hints that hint at nothing are read as no hints.

use std::borrow::Cow;
use std::io::{self, BufRead, Read, Write};

use crate::error::{At, Error, quoted};
use crate::event::{Action, BufferId, Event, Hints, LabelId, LaneId};
use crate::limits::{BUFFER_COST, EVENT_COST, Limits, Meter, TEXT_COST};
use crate::profile::Profile;
use crate::units::{Align, Bytes, Offset, Tick};

/// The first line, without its version.
pub const HEADER: &str = "terrace-profile";

/// The version this build writes, and the only one it reads.
pub const VERSION: u32 = 1;

/// Writes the text form.
pub fn write_text(profile: &Profile, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{HEADER} {VERSION}")?;
    line(out, "name", &profile.name)?;
    for (key, value) in &profile.notes {
        line(out, &format!("note {}", escape_key(key)), value)?;
    }
    for lane in &profile.lanes {
        line(out, "lane", lane)?;
    }
    for label in &profile.labels {
        line(out, "label", label)?;
    }
    let mut shared: Option<Tick> = None;
    for (index, event) in profile.events.iter().enumerate() {
        if event.tick != shared.unwrap_or(Tick(index as u64)) {
            writeln!(out, "t {}", event.tick)?;
            shared = Some(event.tick);
        }
        write_action(&event.action, out)?;
    }
    Ok(())
}

fn write_action(action: &Action, out: &mut impl Write) -> io::Result<()> {
    let on = |lane: &LaneId| if lane.0 == 0 { String::new() } else { format!(" lane={}", lane.0) };
    match action {
        Action::Alloc { id, bytes, label, lane, hints } => {
            write!(out, "a {id} {} {}{}", bytes.get(), label.0, on(lane))?;
            let hints = hints.as_deref().cloned().unwrap_or_default();
            if let Some(align) = hints.align {
                write!(out, " align={align}")?;
            }
            if let Some(fixed) = hints.fixed {
                write!(out, " at={fixed}")?;
            }
            if let Some(alias) = hints.alias {
                write!(out, " alias={alias}")?;
            }
            writeln!(out)
        }
        Action::FreeRequested { id } => writeln!(out, "r {id}"),
        Action::Free { id } => writeln!(out, "f {id}"),
        Action::Keep { id, from, to } => writeln!(out, "k {id} {} {}", from.get(), to.get()),
        Action::StepBegin { key } => line(out, "s", key),
        Action::StepEnd => writeln!(out, "e"),
        Action::Op { label, lane } => writeln!(out, "o {}{}", label.0, on(lane)),
        Action::Wait { lane, on } => writeln!(out, "w {} {}", lane.0, on.0),
    }
}

fn line(out: &mut impl Write, word: &str, text: &str) -> io::Result<()> {
    if text.is_empty() { writeln!(out, "{word}") } else { writeln!(out, "{word} {}", escape(text)) }
}

/// Readers trim blanks and editors strip them, so those at either end are escaped, with what would end the line.
fn escape(text: &str) -> Cow<'_, str> {
    let edge = text.starts_with(' ') || text.ends_with(' ');
    if !edge && !text.contains(['\\', '\n', '\r', '\t']) {
        return Cow::Borrowed(text);
    }
    let last = text.len() - 1;
    text.char_indices()
        .fold(String::new(), |mut escaped, (at, c)| {
            match c {
                '\\' => escaped.push_str("\\\\"),
                '\n' => escaped.push_str("\\n"),
                '\r' => escaped.push_str("\\r"),
                '\t' => escaped.push_str("\\t"),
                ' ' if at == 0 || at == last => escaped.push_str("\\s"),
                _ => escaped.push(c),
            }
            escaped
        })
        .into()
}

/// A key is one word, so that the first blank ends it.
fn escape_key(key: &str) -> String {
    if key.is_empty() { "\\e".to_owned() } else { escape(key).replace(' ', "\\s") }
}

/// Reads and checks the text form; `name` is what errors call the input, and the profile's name if it has no `name` line.
pub fn read_text(input: &mut (impl BufRead + ?Sized), name: &str, limits: &Limits) -> Result<Profile, Error> {
    read_metered(input, name, name, &Meter::new(name, *limits))
}

/// As [`read_text`], with what the profile is called if it does not say so itself.
pub(crate) fn read_metered(
    input: &mut (impl BufRead + ?Sized),
    name: &str,
    unnamed: &str,
    meter: &Meter,
) -> Result<Profile, Error> {
    let mut reader = Reader { name, meter, profile: Profile::default(), named: false, shared: None };
    let mut buffer = Vec::new();
    let mut number = 0;
    let mut headed = false;
    loop {
        let at = At::Line(number + 1);
        buffer.clear();
        // One line may hold what is left of the memory and not a byte more.
        let mut bounded = (&mut *input).take(meter.left().saturating_add(1));
        let read = bounded.read_until(b'\n', &mut buffer).map_err(|e| Error::from_read(name, e))?;
        if read == 0 {
            break;
        }
        number += 1;
        if read as u64 > meter.left() {
            return Err(meter.too_large(at));
        }
        let wrong = |reason: String| Error::malformed(name, at, reason);
        let text = std::str::from_utf8(&buffer).map_err(|_| wrong("the text is not UTF-8".to_owned()))?;
        let text = text.trim_matches([' ', '\t', '\r', '\n']);
        if !headed {
            check_header(text).map_err(wrong)?;
            headed = true;
        } else if !text.is_empty() && !text.starts_with('#') {
            reader.line(text, at)?;
        }
    }
    if !headed {
        return Err(Error::malformed(name, At::File, "the file is empty; a profile begins with 'terrace-profile 1'"));
    }
    let mut profile = reader.profile;
    if !reader.named {
        unnamed.clone_into(&mut profile.name);
    }
    profile.check().map_err(|error| error.in_file(name))?;
    Ok(profile)
}

fn check_header(text: &str) -> Result<(), String> {
    let Some(version) = text.strip_prefix(HEADER).and_then(|rest| rest.strip_prefix(' ')) else {
        return Err(format!("a profile begins with '{HEADER} {VERSION}', not with {}", quoted(text)));
    };
    match version.parse::<u32>() {
        Ok(VERSION) => Ok(()),
        Ok(other) => {
            Err(format!("the file has version {other} and this build reads version {VERSION}; use a newer build"))
        }
        Err(_) => Err(format!("{} is not a version", quoted(version))),
    }
}

struct Reader<'a> {
    name: &'a str,
    meter: &'a Meter,
    profile: Profile,
    named: bool,
    /// The tick of the last `t` line.
    shared: Option<Tick>,
}

impl Reader<'_> {
    fn line(&mut self, text: &str, at: At) -> Result<(), Error> {
        let (word, rest) = text.split_once([' ', '\t']).unwrap_or((text, ""));
        let rest = rest.trim_start_matches([' ', '\t']);
        let name = self.name;
        let wrong = |reason: String| Error::malformed(name, at, reason);
        match word {
            "name" | "note" | "lane" | "label" => {
                if !self.profile.events.is_empty() || self.shared.is_some() {
                    return Err(wrong(format!("'{word}' stands after the first event; the tables come first")));
                }
                self.meter.charge(TEXT_COST + rest.len() as u64, at)?;
                self.table(word, rest).map_err(wrong)
            }
            "t" => {
                let [tick] = numbers(rest).map_err(wrong)?;
                self.shared = Some(Tick(tick));
                Ok(())
            }
            _ => {
                let cost = match word {
                    "a" => EVENT_COST + BUFFER_COST,
                    "s" => EVENT_COST + TEXT_COST + rest.len() as u64,
                    _ => EVENT_COST,
                };
                self.meter.charge(cost, at)?;
                let action = action(word, rest).map_err(wrong)?;
                let tick = self.shared.unwrap_or(Tick(self.profile.events.len() as u64));
                self.profile.events.push(Event { tick, action });
                Ok(())
            }
        }
    }

    fn table(&mut self, word: &str, rest: &str) -> Result<(), String> {
        match word {
            "name" if self.named => return Err("the name is given twice; leave one".to_owned()),
            "name" => {
                self.profile.name = unescape(rest)?;
                self.named = true;
            }
            "note" => {
                let (key, value) = rest.split_once(' ').unwrap_or((rest, ""));
                if key.is_empty() {
                    return Err("a note has a key and a value".to_owned());
                }
                self.profile.notes.push((unescape(key)?, unescape(value.trim_start_matches([' ', '\t']))?));
            }
            "lane" => self.profile.lanes.push(unescape(rest)?),
            _ => self.profile.labels.push(unescape(rest)?),
        }
        Ok(())
    }
}

fn action(word: &str, rest: &str) -> Result<Action, String> {
    Ok(match word {
        "a" => return alloc(rest),
        "r" => Action::FreeRequested { id: buffer(numbers::<1>(rest)?[0])? },
        "f" => Action::Free { id: buffer(numbers::<1>(rest)?[0])? },
        "k" => {
            let [id, from, to] = numbers(rest)?;
            Action::Keep { id: buffer(id)?, from: size(from)?, to: size(to)? }
        }
        "s" => Action::StepBegin { key: unescape(rest)?.into() },
        "e" if rest.is_empty() => Action::StepEnd,
        "e" => return Err(format!("'e' stands alone, but {} follows", quoted(rest))),
        "o" => {
            let (label, options) = rest.split_once(' ').unwrap_or((rest, ""));
            let label = LabelId(index(number(label)?)?);
            let mut lane = LaneId(0);
            for option in options.split_ascii_whitespace() {
                match option.split_once('=') {
                    Some(("lane", value)) => lane = LaneId(index(number(value)?)?),
                    _ => return Err(format!("{} is not an option of 'o'; lane=N is", quoted(option))),
                }
            }
            Action::Op { label, lane }
        }
        "w" => {
            let [lane, on] = numbers(rest)?;
            Action::Wait { lane: LaneId(index(lane)?), on: LaneId(index(on)?) }
        }
        _ => {
            let known = "name, note, lane, label, a, r, f, k, s, e, o, w, t";
            return Err(format!("{} begins no line of a profile; the words are {known}", quoted(word)));
        }
    })
}

fn alloc(rest: &str) -> Result<Action, String> {
    let mut words = rest.split_ascii_whitespace();
    let mut next = |what| words.next().ok_or_else(|| format!("'a' needs an id, bytes and a label; {what} is missing"));
    let id = buffer(number(next("the id")?)?)?;
    let bytes = size(number(next("the number of bytes")?)?)?;
    let label = LabelId(index(number(next("the label")?)?)?);
    let mut lane = LaneId(0);
    let mut hints = Hints::default();
    for option in words {
        match option.split_once('=') {
            Some(("lane", value)) => lane = LaneId(index(number(value)?)?),
            Some(("align", value)) => hints.align = Some(Align::new(number(value)?).map_err(|e| e.to_string())?),
            Some(("at", value)) => hints.fixed = Some(Offset::new(number(value)?).ok_or_else(|| too_large(value))?),
            Some(("alias", value)) => hints.alias = Some(buffer(number(value)?)?),
            _ => return Err(format!("{} is not an option of 'a'; lane, align, at and alias are", quoted(option))),
        }
    }
    let hints = (hints != Hints::default()).then(|| Box::new(hints));
    Ok(Action::Alloc { id, bytes, label, lane, hints })
}

/// Exactly `N` numbers.
fn numbers<const N: usize>(text: &str) -> Result<[u64; N], String> {
    let mut found = [0; N];
    let mut words = text.split_ascii_whitespace();
    for slot in &mut found {
        let word = words.next().ok_or_else(|| format!("expected {}, found {}", count::<N>(), quoted(text)))?;
        *slot = number(word)?;
    }
    match words.next() {
        None => Ok(found),
        Some(extra) => Err(format!("expected {}, but {} follows", count::<N>(), quoted(extra))),
    }
}

fn count<const N: usize>() -> String {
    if N == 1 { "a number".to_owned() } else { format!("{N} numbers") }
}

fn number(word: &str) -> Result<u64, String> {
    // `parse` would take a plus sign.
    let digits = word.bytes().all(|b| b.is_ascii_digit());
    word.parse().ok().filter(|_| digits).ok_or_else(|| format!("{} is not a number below 2^64", quoted(word)))
}

fn index(number: u64) -> Result<u32, String> {
    u32::try_from(number).map_err(|_| format!("{number} is not an index below 2^32"))
}

fn buffer(number: u64) -> Result<BufferId, String> {
    index(number).map(BufferId)
}

fn size(number: u64) -> Result<Bytes, String> {
    Bytes::new(number).ok_or_else(|| too_large(&number.to_string()))
}

fn too_large(number: &str) -> String {
    format!("{number} is more than 2^63 - 1 bytes")
}

fn unescape(text: &str) -> Result<String, String> {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            plain.push(c);
            continue;
        }
        match chars.next() {
            Some('\\') => plain.push('\\'),
            Some('n') => plain.push('\n'),
            Some('r') => plain.push('\r'),
            Some('t') => plain.push('\t'),
            Some('s') => plain.push(' '),
            Some('e') => {}
            Some(other) => return Err(format!("'\\{other}' is no escape; \\\\, \\n, \\r, \\t, \\s and \\e are")),
            None => return Err("the line ends after a backslash; write \\\\ for one".to_owned()),
        }
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Profile, String> {
        read_text(&mut text.as_bytes(), "t.profile", &Limits::default()).map_err(|error| error.to_string())
    }

    fn text(profile: &Profile) -> String {
        let mut out = Vec::new();
        write_text(profile, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    const SAMPLE: &str = "\
terrace-profile 1
name toy
note gpu NVIDIA H200
note empty
lane stream 0
lane stream 7
label a.py:1:f
label
s prefill/128
a 0 4096 0
a 1 512 1 lane=1 align=512 at=1024 alias=0
o 1 lane=1
w 1 0
r 0
k 1 0 256
f 0
e
t 100
f 1
";

    #[test]
    fn what_is_written_is_what_was_read() {
        let profile = read(SAMPLE).unwrap();
        assert_eq!(profile.events[0].tick, Tick(0));
        assert_eq!(profile.events[9].tick, Tick(100));
        assert_eq!(text(&profile), SAMPLE);
    }

    #[test]
    fn comments_blanks_and_crlf_change_nothing() {
        let loose = SAMPLE.replace("s prefill", "# a comment\n\n  s   prefill").replace('\n', "\r\n");
        assert_eq!(read(&loose), read(SAMPLE));
    }

    #[test]
    fn any_text_comes_back() {
        for odd in [
            "",
            " ",
            "  x ",
            "\t",
            "a\nb\r\n",
            "\\",
            "\\n",
            "# no comment",
            "\u{2028}",
            "\0",
            "\u{a0}x\u{a0}",
            "=",
            "  ",
        ] {
            let profile = Profile {
                name: odd.to_owned(),
                notes: vec![(odd.to_owned(), odd.to_owned()), ("k".to_owned(), odd.to_owned())],
                labels: vec![odd.to_owned(), "x".to_owned()],
                lanes: vec![odd.to_owned()],
                events: vec![Event { tick: Tick(0), action: Action::StepBegin { key: odd.into() } }],
            };
            assert_eq!(read(&text(&profile)).as_ref(), Ok(&profile), "{odd:?}");
        }
    }

    #[test]
    fn a_name_line_is_optional() {
        assert_eq!(read("terrace-profile 1\n").unwrap().name, "t.profile");
        assert_eq!(read("terrace-profile 1").unwrap().events, []);
    }

    #[test]
    fn errors_name_the_line() {
        let head = "terrace-profile 1\nlane stream 0\nlabel x\n";
        for (lines, message) in [
            ("a 0 1", "line 4: 'a' needs an id, bytes and a label; the label is missing"),
            ("a 0 -1 0", "line 4: '-1' is not a number below 2^64"),
            ("a 0 +1 0", "line 4: '+1' is not a number below 2^64"),
            ("a 0 9223372036854775808 0", "line 4: 9223372036854775808 is more than 2^63 - 1 bytes"),
            ("a 0 1 0 align=3", "line 4: alignment 3 is not a power of two between 1 and 2^40"),
            ("a 0 1 0 at=9223372036854775808", "line 4: 9223372036854775808 is more than 2^63 - 1 bytes"),
            ("a 0 1 0 color=red", "line 4: 'color=red' is not an option of 'a'; lane, align, at and alias are"),
            ("a 4294967296 1 0", "line 4: 4294967296 is not an index below 2^32"),
            ("o 0 x", "line 4: 'x' is not an option of 'o'; lane=N is"),
            ("f", "line 4: expected a number, found ''"),
            ("f 1 2", "line 4: expected a number, but '2' follows"),
            ("e 1", "line 4: 'e' stands alone, but '1' follows"),
            ("s a\\qb", "line 4: '\\q' is no escape; \\\\, \\n, \\r, \\t, \\s and \\e are"),
            ("s a\\", "line 4: the line ends after a backslash; write \\\\ for one"),
            ("note", "line 4: a note has a key and a value"),
            ("name a\nname b", "line 5: the name is given twice; leave one"),
            ("a 0 1 0\nlabel y", "line 5: 'label' stands after the first event; the tables come first"),
            (
                "alloc 0",
                "line 4: 'alloc' begins no line of a profile; the words are name, note, lane, label, a, r, f, k, s, e, o, w, t",
            ),
        ] {
            assert_eq!(read(&format!("{head}{lines}\n")).unwrap_err(), format!("t.profile: {message}"));
        }
        assert_eq!(read("").unwrap_err(), "t.profile: the file is empty; a profile begins with 'terrace-profile 1'");
        assert_eq!(
            read("hello\n").unwrap_err(),
            "t.profile: line 1: a profile begins with 'terrace-profile 1', not with 'hello'"
        );
        assert_eq!(
            read("terrace-profile 9\n").unwrap_err(),
            "t.profile: line 1: the file has version 9 and this build reads version 1; use a newer build"
        );
        assert_eq!(
            read(&format!("{head}f 0\n")).unwrap_err(),
            "t.profile: event 0: buffer 0 is named before it is allocated"
        );
    }

    #[test]
    fn a_line_without_an_end_stops_at_the_limit() {
        let limits = Limits { memory: Bytes::new(1 << 16).unwrap() };
        let mut endless = b"terrace-profile 1\nlabel ".chain(io::repeat(b'x'));
        let error = read_text(&mut io::BufReader::new(&mut endless), "bomb", &limits).unwrap_err();
        assert_eq!(
            error.to_string(),
            "bomb: line 2: the profile needs more than the 64.0 KiB of memory allowed; raise --max-memory or cut the input"
        );
    }

    #[test]
    fn the_last_tick_leaves_room_for_one_more() {
        let text = |tick: u64| format!("terrace-profile 1\nlane x\nlabel x\nt {tick}\na 0 1 0\n");
        assert!(read(&text(Tick::MAX.0)).is_ok());
        assert_eq!(
            read(&text(u64::MAX)).unwrap_err(),
            "t.profile: event 0: tick 18446744073709551615 is beyond 2^63 - 1"
        );
    }
}
