//! The text of the kernels, as the compiler gets it: the unit's files in order, then what the host takes for granted about them.
//! All of it is in the binary, so that nothing is looked for on the machine where it runs; `#line` keeps the compiler's messages
//! about the files they are in.
//!
//! Sizes that both sides must agree on end up as `static_assert`s: a kernel whose parameters or shared memory differ in size from
//! what the host passes does not compile, on any machine, GPU or not. (NVRTC knows no `offsetof`; a test in `launch` compares the
//! fields.)

use std::fmt::Write as _;

use crate::launch::{DECODE_BYTES, PREFILL_BYTES};
use crate::tile::{self, Arch, Entry};

/// One module of kernels: what is compiled, cached and loaded as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unit {
    /// `gdn_prefill.cu`: windows, and the three stages apart.
    Prefill,
    /// `gdn_decode.cu`: the recurrent step.
    Decode,
}

/// A file and its text.
macro_rules! file {
    ($name:literal) => {
        ($name, include_str!(concat!("../cuda/", $name)))
    };
}

const PREFILL: &[(&str, &str)] = &[
    file!("common.cuh"),
    file!("gdn_layout.cuh"),
    file!("gdn_intra.cuh"),
    file!("gdn_recur.cuh"),
    file!("gdn_stream.cuh"),
    file!("gdn_recur_sm90.cuh"),
    file!("gdn_prefill.cu"),
];

const DECODE: &[(&str, &str)] = &[file!("common.cuh"), file!("gdn_decode.cu")];

impl Unit {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];

    /// The file that it is written in.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "gdn_prefill.cu",
            Self::Decode => "gdn_decode.cu",
        }
    }

    /// The whole text for one architecture.
    pub fn text(self, arch: Arch) -> String {
        let mut text = String::new();
        let files = match self {
            Self::Prefill => PREFILL,
            Self::Decode => DECODE,
        };
        for (name, file) in files {
            let _ = write!(text, "#line 1 \"{name}\"\n{file}\n");
        }
        text += "#line 1 \"launch.rs\"\n";
        let hold = |text: &mut String, what: &str, value: u64| {
            let _ = writeln!(text, "static_assert({what} == {value}, \"tile.rs and launch.rs think otherwise\");");
        };
        match self {
            Self::Prefill => {
                hold(&mut text, "sizeof(Params)", PREFILL_BYTES as u64);
                hold(&mut text, "sizeof(IntraShared)", tile::intra_shared(arch).into());
                hold(&mut text, "sizeof(RecurShared)", tile::RECUR_SHARED.into());
                hold(&mut text, "sizeof(OutputShared)", tile::OUTPUT_SHARED.into());
                hold(&mut text, "THREADS", tile::PREFILL_THREADS.into());
                hold(&mut text, "SLICES", tile::slices(arch).into());
                if arch == Arch::Sm90a {
                    hold(&mut text, "sizeof(HopperShared)", tile::HOPPER_SHARED.into());
                }
            }
            Self::Decode => hold(&mut text, "sizeof(decode::Params)", DECODE_BYTES as u64),
        }
        text
    }

    /// The kernels in it for one architecture.
    pub fn entries(self, arch: Arch) -> Vec<Entry> {
        match self {
            Self::Prefill => Entry::prefill(arch).collect(),
            Self::Decode => Entry::decode().collect(),
        }
    }
}
