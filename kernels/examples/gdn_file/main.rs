//! Runs a prefill from one file into another, so that others can compare their implementation with this one:
//!
//! ```text
//! cargo run --release --example gdn_file -- in.safetensors out.safetensors [--device cpu|cuda] [--window N]
//! ```
//!
//! | tensor | shape | type | |
//! |---|---|---|---|
//! | `q`, `k` | `[T, Hk, 128]` | BF16 | |
//! | `v` | `[T, Hv, 128]` | BF16 | |
//! | `g` | `[T, Hv]` | F32 | natural logarithm of the decay |
//! | `beta` | `[T, Hv]` | F32 | |
//! | `cu_seqlens` | `[N + 1]` | I64 | |
//! | `h0` | `[N, Hv, 128, 128]` | F32 | optional; V-first: `[V, K]` |
//! | `has_initial` | `[N]` | U8 | optional; 0: starts from zeros |
//! | `o` (written) | `[T, Hv, 128]` | BF16 | zeros for padding |
//! | `ht` (written) | `[N, Hv, 128, 128]` | F32 | V-first |
//!
//! Metadata strings, both optional: `scale` (128^-0.5 unless given) and `l2norm` (`1`: q and k are normalised in the kernel).

mod file;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match file::run(&args) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(sentence) => {
            eprintln!("gdn_file: {sentence}");
            ExitCode::from(2)
        }
    }
}
