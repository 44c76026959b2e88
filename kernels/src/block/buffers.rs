//! A table of a layer, asked of a memory: each buffer at the operation that makes it, given back after its last reader.
//!
//! The order is that of the profiles that `synth` writes: buffers by birth, and the dead ones after each operation in the order
//! in which they were born. A test compares the two event by event.

use terrace_profiles::Memory;
use terrace_profiles::shape::layer::{Row, Table};
use terrace_profiles::units::DeviceSpan;

use super::error::BlockError;
use crate::error::Error;

/// The buffers that live at an operation.
pub(super) struct Buffers<'t> {
    live: Vec<(&'t Row, DeviceSpan)>,
}

impl Buffers<'_> {
    /// The buffer of that name.
    ///
    /// # Panics
    /// The table has none that lives here; tables and operations are both of this crate's making.
    pub fn at(&self, name: &str) -> DeviceSpan {
        self.find(name).unwrap_or_else(|| panic!("{name} lives at this operation"))
    }

    /// The same where a table may have none: a workspace of no bytes.
    pub fn find(&self, name: &str) -> Option<DeviceSpan> {
        self.live.iter().find(|(row, _)| row.name == name).map(|(_, span)| *span)
    }
}

/// Walks a table once. Whatever happens, all that was asked for is given back.
pub(super) fn walk(
    memory: &mut dyn Memory,
    name: &str,
    table: &Table,
    mut each: impl FnMut(&'static str, &Buffers<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut buffers = Buffers { live: Vec::new() };
    let mut rows = table.rows.iter().peekable();
    let mut done = Ok(());
    for op in table.ops {
        while let Some(row) = rows.next_if(|row| row.born == *op) {
            let label = format!("{name}.{}", row.name);
            match memory.alloc(row.bytes, &label) {
                Ok(span) => buffers.live.push((row, span)),
                Err(why) => {
                    let reason = why.to_string();
                    done = Err(BlockError::Memory { label, bytes: row.bytes, reason }.into());
                    break;
                }
            }
        }
        if done.is_ok() {
            done = each(op, &buffers);
        }
        let over = done.is_err();
        buffers.live.retain(|(row, span)| {
            let dead = over || row.last_reader == *op;
            if dead {
                memory.free(*span);
            }
            !dead
        });
        if over {
            return done;
        }
    }
    debug_assert!(buffers.live.is_empty(), "every row of {name} ends at an operation of its table");
    done
}
