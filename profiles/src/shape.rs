//! How large each buffer of a layer is and in which order it lies: the single source of bytes. What asks for memory and what
//! predicts it both read it here.
//!
//! Gated DeltaNet works through the prompt in windows, so its workspace depends on the heads and the window, never on the
//! number of tokens:
//!
//! ```text
//! fused   | q k w u p gate (half a) | q k w u p gate (half b) | carry.a | carry.b |
//! staged  | q k w u p gate h        (one half)                | carry.a | carry.b |
//! cpu     | scratch, one per thread                           | carry.a | carry.b |
//! ```
//!
//! While one kernel runs the recurrence of window `i - 1` out of one half, it fills the other half for window `i`.

use std::fmt;

use crate::units::Bytes;

pub mod fla;
pub mod layer;
pub mod terrace;

/// Tokens of a chunk.
pub const CHUNK: u64 = 64;
/// The largest window, in tokens.
pub const MAX_WINDOW: u64 = 4096;
/// Elements of a query, key or value of one head. Other sizes are not served.
pub const HEAD_DIM: u64 = 128;
/// The most value heads of a layer.
pub const MAX_HEADS: u32 = 1024;
/// Bytes that every buffer of a workspace begins at a multiple of.
pub const WORKSPACE_ALIGN: u64 = 256;

/// Bytes of the fp32 state of one value head.
const STATE: u64 = HEAD_DIM * HEAD_DIM * 4;
/// Bytes of a 16-bit tile of one chunk and head: 64 rows of 128.
const TILE: u64 = CHUNK * HEAD_DIM * 2;
/// Bytes of a 16-bit square of one chunk: 64 rows of 64.
const SQUARE: u64 = CHUNK * CHUNK * 2;
/// Bytes of the decay factors of one chunk and head: `e^G` and `e^(G_last - G)` of 64 rows in fp32.
const GATE: u64 = CHUNK * 2 * 4;

/// Value heads that one CPU task works on at a time, at most, since they share the products of their key head.
pub const CPU_HEADS_AT_ONCE: u64 = 4;
/// fp32 values from a row to the next of what is 128 wide in the scratch of a CPU thread. A power of two would lay all rows over
/// a few sets of the cache.
pub const CPU_TILE_STRIDE: u64 = HEAD_DIM + 16;
/// The same of what is 64 wide.
pub const CPU_SQUARE_STRIDE: u64 = CHUNK + 16;
/// fp32 values of the scratch of one CPU thread: q, k, v and o; k transposed; k k^T, q k^T, and both with their decay; four
/// numbers for each token; one state as it lies in a pool; and the states it works on.
const CPU_SCRATCH: u64 = 4 * CHUNK * CPU_TILE_STRIDE
    + HEAD_DIM * CPU_SQUARE_STRIDE
    + 4 * CHUNK * CPU_SQUARE_STRIDE
    + 4 * CHUNK
    + HEAD_DIM * HEAD_DIM
    + CPU_HEADS_AT_ONCE * HEAD_DIM * CPU_TILE_STRIDE;

/// Why a shape is not served; prints as what was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// Value heads must share key heads evenly.
    #[error(
        "{key_heads} key heads and {value_heads} value heads are not served: value heads must be a multiple of key heads, \
         from 1 to 1024"
    )]
    Heads {
        /// As given.
        key_heads: u64,
        /// As given.
        value_heads: u64,
    },
    /// Not a run of whole chunks, or out of range.
    #[error("a window of {0} tokens is not served: it must be a multiple of 64 from 64 to 4096")]
    Window(u64),
}

/// The heads of a Gated DeltaNet layer. Value head `h` uses key head `h / (value_heads / key_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gdn {
    key_heads: u32,
    value_heads: u32,
}

impl Gdn {
    /// A layer with so many heads.
    ///
    /// # Errors
    /// [`ShapeError::Heads`] unless `value_heads` is a positive multiple of `key_heads`, at most [`MAX_HEADS`].
    pub const fn new(key_heads: u32, value_heads: u32) -> Result<Self, ShapeError> {
        if key_heads == 0 || value_heads == 0 || value_heads > MAX_HEADS || !value_heads.is_multiple_of(key_heads) {
            return Err(ShapeError::Heads { key_heads: key_heads as u64, value_heads: value_heads as u64 });
        }
        Ok(Self { key_heads, value_heads })
    }

    /// Heads of q and k.
    pub const fn key_heads(self) -> u32 {
        self.key_heads
    }

    /// Heads of v, the gates, the output and the state.
    pub const fn value_heads(self) -> u32 {
        self.value_heads
    }

    /// Value heads that share one key head.
    pub const fn group(self) -> u32 {
        self.value_heads / self.key_heads
    }

    /// Bytes of the fp32 states of all value heads of one sequence.
    pub const fn state_bytes(self) -> Bytes {
        bytes(self.value_heads as u64 * STATE)
    }
}

/// Tokens that are resident at once: a run of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Window(u32);

impl Window {
    /// The smallest.
    pub const MIN: Self = Self(CHUNK as u32);
    /// The largest.
    pub const MAX: Self = Self(MAX_WINDOW as u32);
    /// The fastest measured (H200) whose fused workspace, with 16 key and 48 value heads, is below 64 MiB: the intra-chunk blocks of
    /// ten chunks and the recurrence of 48 heads fill the multiprocessors once.
    pub const DEFAULT: Self = Self(640);

    /// A window of so many tokens.
    ///
    /// # Errors
    /// [`ShapeError::Window`] unless it is a multiple of [`CHUNK`] from [`CHUNK`] to [`MAX_WINDOW`].
    pub const fn new(tokens: u64) -> Result<Self, ShapeError> {
        if tokens == 0 || !tokens.is_multiple_of(CHUNK) || tokens > MAX_WINDOW {
            return Err(ShapeError::Window(tokens));
        }
        Ok(Self(tokens as u32))
    }

    /// Its tokens.
    pub const fn tokens(self) -> u32 {
        self.0
    }

    /// Its chunks.
    pub const fn slots(self) -> u32 {
        self.0 / CHUNK as u32
    }

    /// Every window, the largest first.
    pub fn descending() -> impl Iterator<Item = Self> {
        (1..=Self::MAX.slots()).rev().map(|slots| Self(slots * CHUNK as u32))
    }
}

impl Default for Window {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// How the CUDA kernels share the work of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Design {
    /// One kernel: the recurrence and output of one window beside the intra-chunk work of the next. States at chunk starts
    /// never reach memory.
    #[default]
    Fused,
    /// Three kernels, one window at a time, with the 16-bit state at each chunk's start in memory.
    Staged,
}

/// One named part of a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// What it holds, with the half after a dot.
    pub name: &'static str,
    /// Bytes from the workspace's beginning; a multiple of [`WORKSPACE_ALIGN`].
    pub offset: Bytes,
    /// Its size.
    pub bytes: Bytes,
}

/// A workspace: its parts in the order in which they lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    buffers: Vec<Buffer>,
    total: Bytes,
}

impl Layout {
    fn new(parts: impl IntoIterator<Item = (&'static str, u64)>) -> Self {
        let mut end = 0;
        let buffers = parts.into_iter().map(|(name, size)| {
            let offset = end;
            end += size.next_multiple_of(WORKSPACE_ALIGN);
            Buffer { name, offset: bytes(offset), bytes: bytes(size) }
        });
        let buffers = buffers.collect();
        Self { buffers, total: bytes(end) }
    }

    /// The parts.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Bytes of the whole.
    pub fn total(&self) -> Bytes {
        self.total
    }

    /// The part of that name.
    pub fn get(&self, name: &str) -> Option<Buffer> {
        self.buffers.iter().copied().find(|buffer| buffer.name == name)
    }
}

/// One line for each part, and the total.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Buffer { name, offset, bytes } in &self.buffers {
            writeln!(f, "{:>12} {:>12}  {name}", offset.get(), bytes.get())?;
        }
        write!(f, "{:>25}  total", self.total.get())
    }
}

/// The workspace of a prefill on CUDA: a pure function of heads, window and design, at any number of tokens.
pub fn gdn_workspace(shape: Gdn, window: Window, design: Design) -> Layout {
    let slots = u64::from(window.slots());
    let (keys, values) = (slots * u64::from(shape.key_heads), slots * u64::from(shape.value_heads));
    let half = |[q, k, w, u, p, gate]: [&'static str; 6]| {
        [
            (q, keys * TILE),
            (k, keys * TILE),
            (w, values * TILE),
            (u, values * TILE),
            (p, values * SQUARE),
            (gate, values * GATE),
        ]
    };
    let a = half(["q.a", "k.a", "w.a", "u.a", "p.a", "gate.a"]);
    let rest = match design {
        Design::Fused => half(["q.b", "k.b", "w.b", "u.b", "p.b", "gate.b"]).to_vec(),
        Design::Staged => vec![("h.a", values * HEAD_DIM * HEAD_DIM * 2)],
    };
    Layout::new(a.into_iter().chain(rest).chain(carries(shape)))
}

/// The workspace of a prefill on `threads` threads of the host. The window does not change it: a thread works on one chunk.
pub fn gdn_cpu_workspace(shape: Gdn, threads: u32) -> Layout {
    let scratch = u64::from(threads.max(1)) * gdn_cpu_scratch().get();
    Layout::new([("scratch", scratch)].into_iter().chain(carries(shape)))
}

/// What one thread of [`gdn_cpu_workspace`] has of it.
pub const fn gdn_cpu_scratch() -> Bytes {
    bytes((CPU_SCRATCH * 4).next_multiple_of(WORKSPACE_ALIGN))
}

/// The fp32 states that one window leaves for the next, written by turns.
fn carries(shape: Gdn) -> [(&'static str, u64); 2] {
    let state = shape.state_bytes().get();
    [("carry.a", state), ("carry.b", state)]
}

/// With at most [`MAX_HEADS`] heads and [`MAX_WINDOW`] tokens no sum here comes near 2^63.
const fn bytes(size: u64) -> Bytes {
    match Bytes::new(size) {
        Some(bytes) => bytes,
        None => panic!("a workspace is far below 2^63 bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(key_heads: u32, value_heads: u32, window: u64, design: Design) -> u64 {
        gdn_workspace(Gdn::new(key_heads, value_heads).unwrap(), Window::new(window).unwrap(), design).total().get()
    }

    #[test]
    fn the_default_window_keeps_48_value_heads_below_64_mib() {
        let default = u64::from(Window::DEFAULT.tokens());
        assert_eq!(total(16, 48, 768, Design::Fused), 66_650_112);
        assert!(total(16, 48, default, Design::Fused) <= 64 << 20);
        // One chunk is 64 * (2 * 16 * 128 + 2 * 48 * 128 + 48 * 64) * 2 + 48 * 512 bytes.
        assert_eq!(total(16, 48, 64, Design::Fused), 2 * (64 * 19456 * 2 + 48 * 512) + 2 * 48 * 65536);
        assert_eq!(total(16, 48, 64, Design::Staged), 64 * 19456 * 2 + 48 * 512 + 48 * 32768 + 2 * 48 * 65536);
    }

    #[test]
    fn parts_are_aligned_named_once_and_do_not_overlap() {
        let shape = Gdn::new(3, 9).unwrap();
        for window in Window::descending() {
            for layout in [
                gdn_workspace(shape, window, Design::Fused),
                gdn_workspace(shape, window, Design::Staged),
                gdn_cpu_workspace(shape, window.slots()),
            ] {
                let mut end = 0;
                for part in layout.buffers() {
                    assert_eq!(part.offset.get() % WORKSPACE_ALIGN, 0);
                    assert!(part.offset.get() >= end);
                    end = part.offset.get() + part.bytes.get();
                    assert_eq!(layout.get(part.name), Some(*part));
                }
                assert_eq!(layout.total().get(), end.next_multiple_of(256));
            }
        }
    }

    #[test]
    fn what_is_not_served_says_what_is() {
        for (keys, values) in [(0, 0), (0, 4), (4, 0), (6, 2), (2, 3), (1, 1025)] {
            let error = Gdn::new(keys, values).unwrap_err().to_string();
            assert!(error.contains(&format!("{keys} key heads and {values} value heads")), "{error}");
        }
        for tokens in [0, 1, 63, 65, 4160, u64::MAX] {
            assert_eq!(Window::new(tokens), Err(ShapeError::Window(tokens)));
        }
        assert_eq!(Window::descending().count(), 64);
        assert_eq!(Window::descending().next(), Some(Window::MAX));
    }
}
