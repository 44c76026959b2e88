//! Where bytes come from: a stream, gunzipped if it is gzip, with its first bytes at hand for detection.
//!
//! This is the only file that names flate2. Several members one after another are one stream, as gzip has it. A damaged
//! or short one is reported as such and not as whatever the importer makes of half a file.

use std::cell::Cell;
use std::io::{self, BufReader, Cursor, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;

use crate::error::{At, Error};
use crate::limits::Meter;

/// How much is looked at to tell the format.
const HEAD_BYTES: u64 = 4096;

/// An input that an importer can read.
pub(super) struct Source<'a> {
    /// What errors call it.
    pub name: &'a str,
    /// The first bytes, also still in `input`; without a byte order mark.
    pub head: Vec<u8>,
    /// Everything.
    pub input: Box<dyn Read + 'a>,
}

impl<'a> Source<'a> {
    /// Looks at the first bytes and undoes gzip.
    pub fn new(mut reader: impl Read + 'a, name: &'a str) -> Result<Self, Error> {
        let failed = |e| Error::from_read(name, e);
        let magic = first(&mut reader, 2).map_err(failed)?;
        let zipped = magic == [0x1f, 0x8b];
        let raw = BufReader::with_capacity(1 << 16, Cursor::new(magic).chain(reader));
        let mut plain: Box<dyn Read + 'a> =
            if zipped { Box::new(Unzip { inner: MultiGzDecoder::new(raw), name }) } else { Box::new(raw) };
        let mut head = first(&mut plain, HEAD_BYTES).map_err(failed)?;
        if head.starts_with(b"\xef\xbb\xbf") {
            head.drain(..3);
        }
        let input = Box::new(Cursor::new(head.clone()).chain(plain));
        Ok(Self { name, head, input })
    }
}

fn first(reader: &mut impl Read, bytes: u64) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    reader.take(bytes).read_to_end(&mut head)?;
    Ok(head)
}

/// Tells damage in gzip data from what the system refuses.
struct Unzip<'a, R> {
    inner: R,
    name: &'a str,
}

impl<R: Read> Read for Unzip<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.inner.read(buffer).map_err(|error| {
            let reason = match error.kind() {
                io::ErrorKind::UnexpectedEof => "the gzip data ends early; the file is truncated".to_owned(),
                io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
                    format!("the gzip data is damaged: {error}")
                }
                _ => return error,
            };
            io::Error::other(Error::malformed(self.name, At::File, reason))
        })
    }
}

/// A reader for parsers that hold a token in memory until it ends, which this file's author may never let happen.
///
/// What was read since the last [`Held::settle`] counts as held, twice over for a vector that doubles.
pub(super) struct Guarded<R> {
    inner: R,
    held: Held,
    meter: Meter,
}

/// The other end of a [`Guarded`]: how the importer says that it has charged for what was read.
#[derive(Clone, Default)]
pub(super) struct Held(Rc<Cell<u64>>);

impl Held {
    /// Nothing that was read so far is held by the parser.
    pub fn settle(&self) {
        self.0.set(0);
    }
}

impl<R: Read> Guarded<R> {
    /// Guards `inner` with the memory that `meter` has left.
    pub fn new(inner: R, meter: &Meter) -> (Self, Held) {
        let held = Held::default();
        (Self { inner, held: held.clone(), meter: meter.clone() }, held)
    }
}

impl<R: Read> Read for Guarded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        let held = self.held.0.get().saturating_add(read as u64);
        self.held.0.set(held);
        if held.saturating_mul(2) > self.meter.left() {
            return Err(io::Error::other(self.meter.too_large(At::File)));
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<Vec<u8>, String> {
        let text = |e: Error| e.to_string();
        let mut all = Vec::new();
        let mut source = Source::new(bytes, "x.gz").map_err(text)?;
        source.input.read_to_end(&mut all).map_err(|e| text(Error::from_read("x.gz", e)))?;
        Ok(all)
    }

    #[test]
    fn plain_zipped_and_joined_read_alike() {
        let long = vec![b'x'; 100_000];
        assert_eq!(read(&long), Ok(long.clone()));
        assert_eq!(read(&gzip(&long)), Ok(long.clone()));
        let (a, b) = long.split_at(5);
        assert_eq!(read(&[gzip(a), gzip(b)].concat()), Ok(long));
        assert_eq!(read(&gzip(b"")), Ok(vec![]));
        assert_eq!(read(b"\xef\xbb\xbf{}"), Ok(b"{}".to_vec()));
        assert_eq!(read(b"\x1f"), Ok(b"\x1f".to_vec()));
    }

    #[test]
    fn gzip_that_ends_early_is_called_truncated() {
        let whole = gzip(&(0..100_000_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
        for end in [2, 9, 10, 50, whole.len() - 1] {
            assert_eq!(read(&whole[..end]).unwrap_err(), "x.gz: the gzip data ends early; the file is truncated");
        }
    }

    #[test]
    fn damaged_gzip_is_called_damaged() {
        let mut bad = gzip(b"hello, hello, hello");
        let end = bad.len();
        bad[end - 6] ^= 1;
        let message = read(&bad).unwrap_err();
        assert!(message.starts_with("x.gz: the gzip data is damaged: "), "{message}");
        let message = read(&[gzip(b"a"), b"tail".to_vec()].concat()).unwrap_err();
        assert!(message.starts_with("x.gz: the gzip data"), "{message}");
    }
}
