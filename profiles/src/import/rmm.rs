//! The log of RAPIDS Memory Manager's `logging_resource_adaptor`:
//!
//! ```text
//! Thread,Time,Action,Pointer,Size,Stream
//! 1979932,14:21:19.998533,allocate,0x30a000000,256,0x2
//! 1979932,14:21:20.000811,allocate failure,(nil),1099511627776,0x2
//! 1979932,14:21:32.661875,free,0x30a000000,256,0x2
//! ```
//!
//! Rows are taken in the order of the file; the clock is not read. A thread is the label and a stream the lane. Failed
//! requests hold no memory: they are counted in a note. A request for nothing may return no address; it is left out.

use std::collections::HashMap;

use super::builder::Builder;
use super::source::Source;
use super::table::{Row, Table};
use crate::error::{At, Error, quoted};
use crate::event::{Action, BufferId};
use crate::limits::Meter;
use crate::profile::Profile;
use crate::units::Bytes;

/// The columns by which such a log is known.
pub(super) const REQUIRED: [&str; 3] = ["action", "pointer", "size"];

struct Live {
    id: BufferId,
    bytes: Bytes,
    at: At,
}

/// Reads a log.
pub(super) fn read(source: Source<'_>, meter: &Meter) -> Result<Profile, Error> {
    let mut builder = Builder::new(source.name, meter);
    let mut table = Table::open(source, meter)?;
    let [action, pointer, size] = REQUIRED.map(|name| table.require(&[name]));
    let (action, pointer, size) = (action?, pointer?, size?);
    let thread = table.find(&["thread"]);
    let stream = table.find(&["stream"]);
    let mut live: HashMap<u64, Live> = HashMap::new();
    let mut failures = 0_u64;
    while let Some(row) = table.next()? {
        let at = row.at;
        let what = row.text(action)?;
        if what == "allocate failure" {
            failures += 1;
            continue;
        }
        let address = address(&row, row.text(pointer)?)?;
        let bytes = row.number(size)?;
        let bytes = u64::try_from(bytes).ok().and_then(Bytes::new);
        let bytes =
            bytes.ok_or_else(|| row.wrong(format!("the size {} is negative", row.text(size).unwrap_or_default())))?;
        if address == 0 && bytes.is_zero() {
            continue;
        }
        let tick = builder.next_tick();
        match what {
            "allocate" => {
                if let Some(Live { at: before, .. }) = live.get(&address) {
                    return Err(row.wrong(format!(
                        "address {address:#x} is allocated while it is still live (since {})",
                        place(*before)
                    )));
                }
                let label = match thread {
                    Some(column) => builder.label(&format!("thread {}", row.text(column)?), at)?,
                    None => builder.label(super::builder::UNKNOWN, at)?,
                };
                let lane = match stream {
                    Some(column) => builder.lane(&format!("stream {}", row.text(column)?), at)?,
                    None => builder.lane("stream 0", at)?,
                };
                let id = builder.alloc(tick, bytes, label, lane, None, at)?;
                live.insert(address, Live { id, bytes, at });
            }
            "free" | "deallocate" => {
                let Some(buffer) = live.remove(&address) else {
                    return Err(row.wrong(format!("address {address:#x} is freed but not allocated")));
                };
                if buffer.bytes != bytes {
                    return Err(row.wrong(format!(
                        "address {address:#x} is freed with {} bytes but was allocated with {} at {}",
                        bytes.get(),
                        buffer.bytes.get(),
                        place(buffer.at)
                    )));
                }
                builder.push(tick, Action::Free { id: buffer.id }, at)?;
            }
            other => {
                let known = "allocate, free and allocate failure";
                return Err(row.wrong(format!("{} is not an action; {known} are", quoted(other))));
            }
        }
    }
    if failures > 0 {
        builder.note("failed allocations", failures.to_string())?;
    }
    builder.finish()
}

fn place(at: At) -> String {
    at.to_string().trim_end_matches(": ").to_owned()
}

/// `0x30a000000`, or what `printf("%p")` makes of null.
fn address(row: &Row<'_>, text: &str) -> Result<u64, Error> {
    if matches!(text, "(nil)" | "nil" | "(null)" | "0") {
        return Ok(0);
    }
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    // `from_str_radix` would take a sign.
    let hex = digits.bytes().all(|b| b.is_ascii_hexdigit());
    u64::from_str_radix(digits, 16)
        .ok()
        .filter(|_| hex)
        .ok_or_else(|| row.wrong(format!("the pointer {} is not a hexadecimal address", quoted(text))))
}
