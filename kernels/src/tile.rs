//! How each kernel is launched: threads, dynamic shared memory and blocks, as pure functions of architecture and shape. No GPU and
//! no compiler is needed to ask, so a test holds every launch against the limits of its architecture.
//!
//! ```text
//! kernel                blocks                                   threads   what a block does
//! gdn_stream            Hv slices, then all that fit beside       256       values of a head through all windows; chunks of key heads
//! gdn_window            segments Hv slices, then slots Hk        256       values of a head through a window; a chunk of a key head
//! gdn_intra             slots Hk                                 256       a chunk of a key head
//! gdn_recur             segments Hv                              256       a head through a window
//! gdn_output            slots Hv                                 256       a chunk of a head
//! gdn_decode_{s}_{r}    sequences Hv 128 / 16 r                  128       16 r rows of a state, of type s
//! block_*               `block/cuda.rs`                          256       a row, or a run of tokens, of a layer
//! ```

/// What a cubin is compiled for. The `a` variants are not forward compatible: each runs on its own architecture alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arch {
    /// A100.
    Sm80,
    /// RTX 30, A10, A40.
    Sm86,
    /// RTX 40, L4, L40.
    Sm89,
    /// H100, H200.
    Sm90a,
    /// B200.
    Sm100a,
    /// RTX 50.
    Sm120a,
    /// Not a cubin but PTX for `compute_80`, which the driver compiles for any newer architecture.
    Ptx80,
}

impl Arch {
    /// All of them, oldest first.
    pub const ALL: [Self; 7] =
        [Self::Sm80, Self::Sm86, Self::Sm89, Self::Sm90a, Self::Sm100a, Self::Sm120a, Self::Ptx80];

    /// What to compile for a device of this compute capability: its own cubin where we have one, and PTX for what is newer or
    /// rarer. `None` below 8.0, which has no bf16 matrix instructions.
    pub const fn of(major: u32, minor: u32) -> Option<Self> {
        match (major, minor) {
            (8, 0) => Some(Self::Sm80),
            (8, 6) => Some(Self::Sm86),
            (8, 9) => Some(Self::Sm89),
            (9, 0) => Some(Self::Sm90a),
            (10, 0) => Some(Self::Sm100a),
            (12, 0) => Some(Self::Sm120a),
            (8.., _) => Some(Self::Ptx80),
            _ => None,
        }
    }

    /// Its name for the compiler.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm86 => "sm_86",
            Self::Sm89 => "sm_89",
            Self::Sm90a => "sm_90a",
            Self::Sm100a => "sm_100a",
            Self::Sm120a => "sm_120a",
            Self::Ptx80 => "compute_80",
        }
    }

    /// Major times ten plus minor, as NVRTC lists what it supports.
    pub(crate) const fn number(self) -> i32 {
        match self {
            Self::Sm80 | Self::Ptx80 => 80,
            Self::Sm86 => 86,
            Self::Sm89 => 89,
            Self::Sm90a => 90,
            Self::Sm100a => 100,
            Self::Sm120a => 120,
        }
    }

    /// The most shared memory of one block, static and dynamic together, in bytes.
    pub const fn shared_limit(self) -> u32 {
        match self {
            Self::Sm80 => 163 << 10,
            Self::Sm90a | Self::Sm100a => 227 << 10,
            // PTX may meet any of them, so it gets what the smallest has.
            Self::Sm86 | Self::Sm89 | Self::Sm120a | Self::Ptx80 => 99 << 10,
        }
    }
}

impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The type of q, k, v and o.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    Fp16,
}

impl Element {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::Fp16];
}

/// One entry point: what is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Entry {
    /// All windows in one launch whose blocks stay. Hopper's alone.
    Stream,
    /// The recurrence of one window and the intra-chunk work of the next, in one launch.
    Window,
    /// The intra-chunk work alone.
    Intra,
    /// The recurrence alone; stores the state at each chunk's start.
    Recur,
    /// The output from stored states.
    Output,
    /// The recurrent step on a pool of fp32 or bf16 states.
    Decode {
        /// The pool is bf16.
        bf16: bool,
        /// Rows of the state that eight lanes hold: 1, 2 or 4.
        rows: Rows,
    },
    /// The norm of a residual stream.
    BlockNorm,
    /// The convolution over time, and the gates.
    BlockConv,
    /// The norm and gate of a mixer's output.
    BlockGatedNorm,
    /// The gate of a feed-forward.
    BlockSilu,
    /// Made-up numbers.
    BlockFill,
}

/// Rows of a state that each group of eight lanes holds in a decode kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rows {
    /// The least latency: for one sequence or two.
    One,
    /// Between.
    Two,
    /// The fewest repeated loads: for large batches.
    Four,
}

impl Rows {
    const ALL: [Self; 3] = [Self::One, Self::Two, Self::Four];

    /// As a number.
    pub const fn get(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
        }
    }
}

impl Entry {
    /// Those of `gdn_prefill.cu` for an architecture.
    pub fn prefill(arch: Arch) -> impl Iterator<Item = Self> {
        let all = [Self::Stream, Self::Window, Self::Intra, Self::Recur, Self::Output];
        all.into_iter().filter(move |entry| *entry != Self::Stream || arch == Arch::Sm90a)
    }

    /// Those of `gdn_decode.cu`.
    pub fn decode() -> impl Iterator<Item = Self> {
        [false, true].into_iter().flat_map(|bf16| Rows::ALL.into_iter().map(move |rows| Self::Decode { bf16, rows }))
    }

    /// Those of `block.cu`.
    pub const BLOCK: [Self; 5] =
        [Self::BlockNorm, Self::BlockConv, Self::BlockGatedNorm, Self::BlockSilu, Self::BlockFill];

    /// Its name in the module.
    pub const fn name(self) -> &'static std::ffi::CStr {
        match self {
            Self::Stream => c"gdn_stream",
            Self::Window => c"gdn_window",
            Self::Intra => c"gdn_intra",
            Self::Recur => c"gdn_recur",
            Self::Output => c"gdn_output",
            Self::Decode { bf16: false, rows: Rows::One } => c"gdn_decode_f32_1",
            Self::Decode { bf16: false, rows: Rows::Two } => c"gdn_decode_f32_2",
            Self::Decode { bf16: false, rows: Rows::Four } => c"gdn_decode_f32_4",
            Self::Decode { bf16: true, rows: Rows::One } => c"gdn_decode_bf16_1",
            Self::Decode { bf16: true, rows: Rows::Two } => c"gdn_decode_bf16_2",
            Self::Decode { bf16: true, rows: Rows::Four } => c"gdn_decode_bf16_4",
            Self::BlockNorm => c"block_norm",
            Self::BlockConv => c"block_conv",
            Self::BlockGatedNorm => c"block_gated_norm",
            Self::BlockSilu => c"block_silu",
            Self::BlockFill => c"block_fill",
        }
    }

    /// Threads of a block.
    pub const fn threads(self) -> u32 {
        match self {
            Self::Decode { .. } => 128,
            Self::Stream | Self::Window | Self::Intra | Self::Recur | Self::Output => PREFILL_THREADS,
            Self::BlockNorm | Self::BlockConv | Self::BlockGatedNorm | Self::BlockSilu | Self::BlockFill => {
                BLOCK_THREADS
            }
        }
    }

    /// Dynamic shared memory of a block, in bytes. The sizes are those of the kernels' structs, which the compiler holds against
    /// these numbers whenever it compiles them.
    pub const fn dynamic_shared(self, arch: Arch) -> u32 {
        match self {
            // A block does either, so the launch gives each what the larger needs.
            Self::Stream => larger(intra_shared(arch), HOPPER_SHARED),
            Self::Window if matches!(arch, Arch::Sm90a) => larger(intra_shared(arch), HOPPER_SHARED),
            Self::Window => larger(intra_shared(arch), RECUR_SHARED),
            Self::Intra => intra_shared(arch),
            Self::Recur => RECUR_SHARED,
            Self::Output => OUTPUT_SHARED,
            Self::Decode { .. } => 0,
            Self::BlockNorm | Self::BlockConv | Self::BlockGatedNorm | Self::BlockSilu | Self::BlockFill => 0,
        }
    }
}

pub(crate) const PREFILL_THREADS: u32 = 256;
pub(crate) const BLOCK_THREADS: u32 = 256;

/// Blocks that share the values of a head in the walk of [`Entry::Window`].
pub const fn slices(arch: Arch) -> u32 {
    if matches!(arch, Arch::Sm90a) { 2 } else { 1 }
}

/// A tile of a chunk: 64 rows of 128 16-bit elements.
const TILE: u32 = 64 * 128 * 2;
/// A square of a chunk: 64 rows of 64.
const SQUARE: u32 = 64 * 64 * 2;
/// Two decay factors for each token, in fp32.
const GATE: u32 = 64 * 2 * 4;

/// 64 rows of a warp's 16 values.
const WARP_OUT: u32 = 64 * 16 * 2;

/// k, v, what is staged; a square in fp32, its rows 72 apart; three in 16 bits; three numbers for each token of four heads. On
/// Hopper the scores in fp32 too, since registers are short there, shared memory elsewhere; and which item a block is at.
pub(crate) const fn intra_shared(arch: Arch) -> u32 {
    let scores = if matches!(arch, Arch::Sm90a) { 64 * 64 * 4 + 16 } else { 0 };
    3 * TILE + 64 * 72 * 4 + 3 * SQUARE + scores + 3 * 4 * 64 * 4
}

/// w, q and the factors of this chunk and the next; k and the scores of this one; eight warps' outputs, half of them at a time.
pub(crate) const RECUR_SHARED: u32 = 2 * (2 * TILE + GATE) + TILE + SQUARE + 8 * WARP_OUT / 2;
/// A ring of five tiles; the scores and factors of two chunks; four warps' outputs; twelve barriers.
pub(crate) const HOPPER_SHARED: u32 = 5 * TILE + 2 * SQUARE + 2 * GATE + 4 * WARP_OUT + 12 * 8;
/// q, the scores and the factors of one chunk; eight warps' outputs, half of them at a time.
pub(crate) const OUTPUT_SHARED: u32 = TILE + SQUARE + GATE + 8 * WARP_OUT / 2;

/// 32-bit words that [`Entry::Stream`] keeps its progress in, zero before a launch: the next item, in a line of its own, and two
/// for each slot and key head of both halves.
pub(crate) const fn progress_words(half_slots: u32, key_heads: u32) -> u32 {
    32 + 2 * 2 * half_slots * key_heads
}

/// The most chunks of one launch of [`Entry::Stream`]: items, chunks times at most 1024 key heads, are counted in 31 bits.
pub(crate) const STREAM_CHUNKS: u32 = 1 << 20;

/// Whether a device that holds so many blocks of [`Entry::Stream`] at once has room for the walks of all heads and enough beside them.
/// Where it has not, windows are launched one by one.
pub(crate) const fn has_room_to_stream(value_heads: u32, resident: u32) -> bool {
    4 * stream_walks(value_heads) <= 3 * resident
}

/// Blocks of a launch of [`Entry::Stream`] over so many chunks, on a device that [has room](has_room_to_stream).
pub(crate) const fn stream_blocks(key_heads: u32, value_heads: u32, chunks: u32, resident: u32) -> u32 {
    let (most, items) = (resident - stream_walks(value_heads), chunks * key_heads);
    stream_walks(value_heads) + if items < most { items } else { most }
}

const fn stream_walks(value_heads: u32) -> u32 {
    value_heads * slices(Arch::Sm90a)
}

const fn larger(one: u32, other: u32) -> u32 {
    if one > other { one } else { other }
}

/// Which decode kernel so many tokens of so many sequences take. The bits of a result do not depend on it.
///
/// With one token each, many small warps keep the most bytes on their way; with several, wide rows share what each token costs, once
/// there are states enough to fill the device (measured on an H200 at 1, 8 and 64 sequences of 48 heads with 1 and 4 tokens).
pub const fn decode_rows(tokens: u64, sequences: u64, value_heads: u64) -> Rows {
    if tokens <= sequences || sequences.saturating_mul(value_heads) <= 128 {
        Rows::One
    } else if tokens <= sequences.saturating_mul(2) {
        Rows::Two
    } else {
        Rows::Four
    }
}

/// Blocks of a decode launch, or `None` past what a grid holds (2^31 - 1).
pub fn decode_blocks(sequences: u64, value_heads: u64, rows: Rows) -> Option<u32> {
    let slices = u64::from(128 / (16 * rows.get()));
    let blocks = sequences.checked_mul(value_heads)?.checked_mul(slices)?;
    u32::try_from(blocks).ok().filter(|blocks| *blocks <= i32::MAX as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_get_their_own_cubin_or_ptx_and_old_ones_nothing() {
        let named = |major, minor| Arch::of(major, minor).map(Arch::name);
        assert_eq!(named(8, 6), Some("sm_86"));
        assert_eq!(named(9, 0), Some("sm_90a"));
        assert_eq!(named(12, 0), Some("sm_120a"));
        for newer in [(8, 7), (9, 1), (10, 3), (11, 0), (12, 1), (13, 0), (20, 9)] {
            assert_eq!(named(newer.0, newer.1), Some("compute_80"), "{newer:?}");
        }
        assert_eq!(named(7, 5), None);
        assert_eq!(named(0, 0), None);
    }

    #[test]
    fn no_launch_asks_for_more_shared_memory_than_a_block_has() {
        for arch in Arch::ALL {
            for entry in Entry::prefill(arch).chain(Entry::decode()).chain(Entry::BLOCK) {
                assert!(entry.dynamic_shared(arch) <= arch.shared_limit(), "{entry:?} on {arch}");
            }
        }
    }

    #[test]
    fn a_stream_has_all_its_walks_and_no_more_blocks_than_fit_or_have_work() {
        // An H200 holds 264 at once.
        assert!(has_room_to_stream(48, 264) && has_room_to_stream(99, 264));
        assert!(!has_room_to_stream(100, 264) && !has_room_to_stream(1, 0));
        assert_eq!(stream_blocks(16, 48, 1000, 264), 264);
        assert_eq!(stream_blocks(16, 48, 2, 264), 96 + 32);
        assert_eq!(stream_blocks(16, 48, 0, 264), 96);
    }

    #[test]
    fn a_decode_grid_covers_each_row_once_and_ends_where_cuda_does() {
        assert_eq!(decode_blocks(1, 48, Rows::One), Some(48 * 8));
        assert_eq!(decode_blocks(64, 48, Rows::Four), Some(64 * 48 * 2));
        assert_eq!(decode_blocks(0, 48, Rows::One), Some(0));
        assert_eq!(decode_blocks(1 << 28, 1, Rows::One), None);
        assert_eq!(decode_blocks(u64::MAX, 48, Rows::Four), None);
    }
}
