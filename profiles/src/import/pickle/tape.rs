//! What a pickle is read with: the input with its position, and the memo.

use std::collections::HashMap;
use std::io::{BufRead, ErrorKind};

use super::heap::Value;
use crate::error::{At, Error};

/// The memo: dense as every pickler numbers it, and a map for those that do not.
#[derive(Default)]
pub(super) struct Memo {
    dense: Vec<Value>,
    sparse: HashMap<u64, Value>,
}

impl Memo {
    pub fn len(&self) -> u64 {
        (self.dense.len() + self.sparse.len()) as u64
    }

    pub fn put(&mut self, index: u64, value: Value) {
        let next = self.dense.len() as u64;
        if index < next {
            self.dense[index as usize] = value;
        } else if index == next && !self.sparse.contains_key(&index) {
            self.dense.push(value);
        } else {
            self.sparse.insert(index, value);
        }
    }

    pub fn get(&self, index: u64) -> Option<Value> {
        self.dense.get(usize::try_from(index).ok()?).or_else(|| self.sparse.get(&index)).copied()
    }
}

/// The input and how far it was read.
pub(super) struct Tape<R> {
    pub name: String,
    pub input: R,
    pub position: u64,
}

impl<R: BufRead> Tape<R> {
    pub fn byte(&mut self) -> Result<u8, Error> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => self.truncated(),
            _ => Error::from_read(&self.name, error),
        })?;
        self.position += N as u64;
        Ok(bytes)
    }

    pub fn skip(&mut self, length: u64) -> Result<(), Error> {
        let mut left = length;
        while left > 0 {
            let ready = self.input.fill_buf().map_err(|e| Error::from_read(&self.name, e))?.len();
            if ready == 0 {
                return Err(self.truncated());
            }
            let taken = left.min(ready as u64);
            self.input.consume(taken as usize);
            self.position += taken;
            left -= taken;
        }
        Ok(())
    }

    /// Reads up to the end, so that gzip has checked everything.
    pub fn end(&mut self) -> Result<(), Error> {
        let more = self.input.fill_buf().map_err(|e| Error::from_read(&self.name, e))?;
        if more.is_empty() { Ok(()) } else { Err(self.wrong(self.position, "bytes follow the end of the pickle")) }
    }

    pub fn truncated(&self) -> Error {
        self.wrong(self.position, "the pickle ends early; the file is truncated")
    }

    pub fn wrong(&self, position: u64, reason: impl Into<String>) -> Error {
        Error::malformed(&self.name, At::Byte(position), reason)
    }
}
