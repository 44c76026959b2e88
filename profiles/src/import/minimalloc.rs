//! The CSV of minimalloc: one row for each buffer, with the time it begins and the time it ends.
//!
//! ```text
//!   id,lower,upper,size,gaps                 tick 0   3   5   8
//!   b1,0,8,100,3-5@0:40           b1, 100 B:   [######....######)    only bytes 0 to 40 between 3 and 5
//!   b2,3,5,60                     b2,  60 B:       [####)            may lie in the rest
//! ```
//!
//! Times become ticks; only if one is negative, all are shifted so that the first is 0. At one tick, buffers end before
//! others change and those before new ones begin, as half-open lives ask. Buffers are numbered by the time they begin, then
//! by row; the label of a buffer is its id in the file. The column `hint` is for minimalloc's own search and not kept.

use std::collections::HashMap;

use super::builder::Builder;
use super::source::Source;
use super::table::{Column, Row, Table};
use crate::error::{At, Error, quoted};
use crate::event::{Action, BufferId, Hints};
use crate::limits::Meter;
use crate::profile::Profile;
use crate::units::{Align, Bytes, Offset, Tick};

const ID: &[&str] = &["id", "buffer", "buffer_id"];
/// The first tick of a buffer; by this and the next a file is known.
pub(super) const LOWER: &[&str] = &["lower", "start", "begin"];
/// Its bytes.
pub(super) const SIZE: &[&str] = &["size"];

/// What a row keeps in memory until all are read: itself, its place in three sorted lists, and its id in a map.
const ROW_COST: u64 = 2 * size_of::<Buffer>() as u64 + 4 * size_of::<Change>() as u64 + 128;

struct Buffer {
    id: String,
    lower: i64,
    upper: i64,
    bytes: Bytes,
    hints: Option<Box<Hints>>,
    gaps: Vec<Gap>,
    at: At,
}

/// From `from` until `to` only the bytes `keep` are in use.
struct Gap {
    from: i64,
    to: i64,
    keep: (Bytes, Bytes),
}

/// Something that happens at a time; sorted by time, then kind, then buffer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Change {
    time: i64,
    kind: Happening,
    buffer: u32,
    /// Which gap, for [`Happening::Keep`].
    gap: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    End,
    Widen,
    Narrow,
    Begin,
    /// A gap from the first tick on: the buffer must exist before it shrinks.
    NarrowAtBirth,
}

/// Reads a problem.
pub(super) fn read(source: Source<'_>, meter: &Meter) -> Result<Profile, Error> {
    let mut builder = Builder::new(source.name, meter);
    let name = source.name;
    let mut table = Table::open(source, meter)?;
    let columns = Columns::find(&table)?;
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut seen: HashMap<String, At> = HashMap::new();
    while let Some(row) = table.next()? {
        let buffer = columns.buffer(&row)?;
        let cost = ROW_COST + 2 * buffer.id.len() as u64 + 128 * buffer.gaps.len() as u64;
        meter.charge(cost, row.at)?;
        if let Some(before) = seen.insert(buffer.id.clone(), row.at) {
            let before = before.to_string();
            let reason = format!("id {} was already used on {}", quoted(&buffer.id), before.trim_end_matches(": "));
            return Err(row.wrong(reason));
        }
        buffers.push(buffer);
    }
    drop(seen);
    let lane = builder.lane("stream 0", At::File)?;
    if buffers.is_empty() {
        return builder.finish();
    }
    // Stable: rows that begin together keep their order.
    buffers.sort_by_key(|buffer| buffer.lower);
    let shift = buffers[0].lower.min(0);
    let tick = |time: i64| Tick(time.abs_diff(shift));
    for change in changes(&buffers) {
        let buffer = &mut buffers[change.buffer as usize];
        let (id, at, now) = (BufferId(change.buffer), buffer.at, tick(change.time));
        if now > Tick::MAX {
            return Err(Error::malformed(name, at, "the times span more than 2^63 ticks"));
        }
        match change.kind {
            Happening::End => builder.push(now, Action::Free { id }, at)?,
            Happening::Widen => builder.push(now, Action::Keep { id, from: Bytes::ZERO, to: buffer.bytes }, at)?,
            Happening::Narrow | Happening::NarrowAtBirth => {
                let (from, to) = buffer.gaps[change.gap as usize].keep;
                builder.push(now, Action::Keep { id, from, to }, at)?;
            }
            Happening::Begin => {
                let label = builder.push_label(std::mem::take(&mut buffer.id), at)?;
                builder.alloc(now, buffer.bytes, label, lane, buffer.hints.take(), at)?;
            }
        }
    }
    builder.finish()
}

fn changes(buffers: &[Buffer]) -> Vec<Change> {
    let mut changes = Vec::with_capacity(2 * buffers.len());
    for (index, buffer) in (0_u32..).zip(buffers) {
        let mut push = |time, kind, gap| changes.push(Change { time, kind, buffer: index, gap });
        push(buffer.lower, Happening::Begin, 0);
        push(buffer.upper, Happening::End, 0);
        for (number, gap) in (0_u32..).zip(&buffer.gaps) {
            let kind = if gap.from == buffer.lower { Happening::NarrowAtBirth } else { Happening::Narrow };
            push(gap.from, kind, number);
            let next = buffer.gaps.get(number as usize + 1);
            // Where the buffer ends or the next gap begins, there is nothing to widen.
            if gap.to < buffer.upper && next.is_none_or(|next| next.from > gap.to) {
                push(gap.to, Happening::Widen, number);
            }
        }
    }
    changes.sort_unstable();
    changes
}

/// Where each column stands.
struct Columns {
    id: Column,
    lower: Column,
    upper: Column,
    /// Added to ends: a column called `end` holds the last tick, not the one after.
    addend: i64,
    size: Column,
    alignment: Option<Column>,
    hint: Option<Column>,
    offset: Option<Column>,
    gaps: Option<Column>,
}

impl Columns {
    fn find(table: &Table<'_>) -> Result<Self, Error> {
        Ok(Self {
            id: table.require(ID)?,
            lower: table.require(LOWER)?,
            upper: table.require(&["upper", "end"])?,
            addend: i64::from(table.find(&["end"]).is_some()),
            size: table.require(SIZE)?,
            alignment: table.find(&["alignment"]),
            hint: table.find(&["hint"]),
            offset: table.find(&["offset"]),
            gaps: table.find(&["gaps"]),
        })
    }

    fn buffer(&self, row: &Row<'_>) -> Result<Buffer, Error> {
        let id = row.text(self.id)?.to_owned();
        let lower = row.number(self.lower)?;
        let end =
            |end: i64| end.checked_add(self.addend).ok_or_else(|| row.wrong(format!("the end {end} is too late")));
        let upper = end(row.number(self.upper)?)?;
        if upper <= lower {
            let reason = format!("buffer {} ends at {upper}, not after it begins at {lower}", quoted(&id));
            return Err(row.wrong(reason));
        }
        let size = row.number(self.size)?;
        let bytes = u64::try_from(size).ok().and_then(Bytes::new);
        let bytes = bytes.ok_or_else(|| row.wrong(format!("the size {size} of buffer {} is negative", quoted(&id))))?;
        let align = match row.number_if_any(self.alignment)? {
            None | Some(1) => None,
            Some(align) => {
                let checked = u64::try_from(align).ok().and_then(|align| Align::new(align).ok());
                let wrong = || row.wrong(format!("alignment {align} is not a power of two between 1 and 2^40"));
                Some(checked.ok_or_else(wrong)?)
            }
        };
        row.number_if_any(self.hint)?;
        let fixed = row.number_if_any(self.offset)?.and_then(|offset| u64::try_from(offset).ok()).and_then(Offset::new);
        if fixed.is_some_and(|fixed| fixed.checked_add(bytes).is_err()) {
            return Err(row.wrong(format!("buffer {} at its offset ends beyond 2^63 - 1 bytes", quoted(&id))));
        }
        let hints = Hints { align, fixed, alias: None };
        let hints = (hints != Hints::default()).then(|| Box::new(hints));
        let mut gaps: Vec<Gap> = Vec::new();
        let list = self.gaps.map_or(Ok(""), |column| row.text(column))?;
        for text in list.split_ascii_whitespace() {
            let wrong = |what: &str| row.wrong(format!("gap {} {what}", quoted(text)));
            let mut gap = gap(text, bytes).map_err(|what| wrong(&what))?;
            gap.to = end(gap.to)?;
            if gap.to <= gap.from {
                return Err(wrong("ends before it begins"));
            }
            if gap.from < lower || gap.to > upper {
                return Err(wrong("reaches outside the life of its buffer"));
            }
            if gaps.last().is_some_and(|before| before.to > gap.from) {
                return Err(wrong("begins before the gap before it ends"));
            }
            gaps.push(gap);
        }
        Ok(Buffer { id, lower, upper, bytes, hints, gaps, at: row.at })
    }
}

/// `a-b` or `a-b@lo:hi`, as the file counts ends.
fn gap(text: &str, bytes: Bytes) -> Result<Gap, String> {
    let malformed = || "is not of the form a-b or a-b@lo:hi".to_owned();
    let (times, window) = text.split_once('@').map_or((text, None), |(times, window)| (times, Some(window)));
    // The first character may be a sign.
    let dash = times.bytes().skip(1).position(|b| b == b'-').ok_or_else(malformed)? + 1;
    let from = times[..dash].parse().map_err(|_| malformed())?;
    let to = times[dash + 1..].parse().map_err(|_| malformed())?;
    let keep = match window {
        None => (Bytes::ZERO, Bytes::ZERO),
        Some(window) => {
            let (low, high) = window.split_once(':').ok_or_else(malformed)?;
            let byte = |text: &str| text.parse().ok().and_then(Bytes::new).ok_or_else(malformed);
            (byte(low)?, byte(high)?)
        }
    };
    if keep.0 > keep.1 || keep.1 > bytes {
        return Err(format!("keeps bytes outside the {} of its buffer", bytes.get()));
    }
    Ok(Gap { from, to, keep })
}
