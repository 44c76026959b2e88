//! Rows of a CSV file by column name: the only file that names the csv crate.
//!
//! The first row names the columns, in any order and any case. Blank lines and both line ends are fine; a row with more or
//! fewer fields than the header is not.

use std::io::{BufReader, Read};

use csv::{ByteRecord, ErrorKind, Reader, ReaderBuilder, Trim};

use super::source::{Guarded, Held, Source};
use crate::error::{At, Error, quoted};
use crate::limits::Meter;

/// An open table.
pub(super) struct Table<'a> {
    name: &'a str,
    reader: Reader<BufReader<Guarded<Box<dyn Read + 'a>>>>,
    held: Held,
    columns: Vec<String>,
    row: ByteRecord,
}

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column(usize);

/// One row, and the line it stands on.
pub(super) struct Row<'t> {
    name: &'t str,
    columns: &'t [String],
    record: &'t ByteRecord,
    /// For errors.
    pub at: At,
}

impl<'a> Table<'a> {
    /// Reads the header.
    pub fn open(source: Source<'a>, meter: &Meter) -> Result<Self, Error> {
        let (guarded, held) = Guarded::new(source.input, meter);
        let reader = ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .trim(Trim::All)
            .from_reader(BufReader::with_capacity(1 << 16, guarded));
        let mut table = Self { name: source.name, reader, held, columns: Vec::new(), row: ByteRecord::new() };
        let header = match table.next()? {
            Some(row) => row.record.iter().map(|field| column(&String::from_utf8_lossy(field))).collect::<Vec<_>>(),
            None => return Err(Error::malformed(table.name, At::File, "the file is empty")),
        };
        for (at, name) in header.iter().enumerate() {
            if header[..at].contains(name) {
                let reason = format!("the header names the column {} twice", quoted(name));
                return Err(Error::malformed(table.name, At::Line(1), reason));
            }
        }
        meter.charge(header.iter().map(|name| 64 + name.len() as u64).sum(), At::Line(1))?;
        table.columns = header;
        Ok(table)
    }

    /// The column with one of these names, if there is one.
    pub fn find(&self, names: &[&str]) -> Option<Column> {
        self.columns.iter().position(|column| names.contains(&column.as_str())).map(Column)
    }

    /// The column with one of these names.
    pub fn require(&self, names: &[&str]) -> Result<Column, Error> {
        self.find(names).ok_or_else(|| {
            let reason = format!("the header has no column '{}'", names.join("' or '"));
            Error::malformed(self.name, At::Line(1), reason)
        })
    }

    /// The next row.
    pub fn next(&mut self) -> Result<Option<Row<'_>>, Error> {
        let before = self.reader.position().line();
        self.held.settle();
        let more = self.reader.read_byte_record(&mut self.row).map_err(|error| match error.into_kind() {
            ErrorKind::Io(error) => Error::from_read(self.name, error),
            other => Error::malformed(self.name, At::Line(before), format!("the CSV cannot be read: {other:?}")),
        })?;
        if !more {
            return Ok(None);
        }
        let at = At::Line(self.row.position().map_or(before, csv::Position::line));
        let (found, expected) = (self.row.len(), self.columns.len());
        if expected > 0 && found != expected {
            let reason = format!("the row has {found} fields where the header has {expected}");
            return Err(Error::malformed(self.name, at, reason));
        }
        Ok(Some(Row { name: self.name, columns: &self.columns, record: &self.row, at }))
    }
}

/// A column's name as it is compared.
pub(super) fn column(name: &str) -> String {
    name.trim().trim_matches('"').to_ascii_lowercase()
}

impl<'t> Row<'t> {
    /// The text of a field, without blanks around it.
    pub fn text(&self, column: Column) -> Result<&'t str, Error> {
        let field = self.record.get(column.0).unwrap_or_default();
        std::str::from_utf8(field).map_err(|_| self.wrong(format!("the {} is not UTF-8", self.columns[column.0])))
    }

    /// A whole number.
    pub fn number(&self, column: Column) -> Result<i64, Error> {
        let text = self.text(column)?;
        text.parse().map_err(|_| {
            let what = if text.is_empty() { "is missing".to_owned() } else { format!("{} is not", quoted(text)) };
            let name = &self.columns[column.0];
            self.wrong(match text {
                "" => format!("the {name} {what}"),
                _ => format!("the {name} {what} a whole number between -2^63 and 2^63 - 1"),
            })
        })
    }

    /// A whole number, or `None` where the field is empty.
    pub fn number_if_any(&self, column: Option<Column>) -> Result<Option<i64>, Error> {
        match column {
            Some(column) if !self.text(column)?.is_empty() => self.number(column).map(Some),
            _ => Ok(None),
        }
    }

    /// An error of this row.
    pub fn wrong(&self, reason: impl Into<String>) -> Error {
        Error::malformed(self.name, self.at, reason)
    }
}
