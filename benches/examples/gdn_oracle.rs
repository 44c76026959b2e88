//! Tokens per second of the fp64 oracle, on one thread: what the CPU path's speed is told against.
//!
//! `cargo run --release -p terrace-benches --example gdn_oracle -- [TOKENS [KEY_HEADS [VALUE_HEADS]]]` prints one number, the
//! median of three. `gdn/cpu.py` calls it.

use std::process::ExitCode;
use std::time::Instant;

use terrace_kernels::Gdn;
use terrace_kernels::reference::{Tokens, recurrence};

const DIM: usize = 128;

fn main() -> ExitCode {
    let arg = |index: usize, default: usize| {
        std::env::args()
            .nth(index)
            .map_or(Ok(default), |text| text.parse().map_err(|_| format!("{text} is not a number")))
    };
    match arg(1, 128).and_then(|tokens| Ok((tokens, arg(2, 16)?, arg(3, 32)?))).and_then(measure) {
        Ok(rate) => {
            println!("{rate:.1}");
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn measure((tokens, key_heads, value_heads): (usize, usize, usize)) -> Result<f64, String> {
    let narrow = |heads: usize| u32::try_from(heads).map_err(|error| error.to_string());
    let shape = Gdn::new(narrow(key_heads)?, narrow(value_heads)?).map_err(|error| error.to_string())?;
    let mut seed = 1_u64;
    let mut random = |count: usize, scale: f64| -> Vec<f64> {
        let next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            scale * ((seed >> 11) as f64 / (1_u64 << 52) as f64 - 1.0)
        };
        std::iter::repeat_with(next).take(count).collect()
    };
    // Keys of about unit length, so that states stay finite.
    let unit = (3.0 / DIM as f64).sqrt();
    let (q, k) = (random(tokens * key_heads * DIM, unit), random(tokens * key_heads * DIM, unit));
    let v = random(tokens * value_heads * DIM, 1.0);
    let g = vec![-0.02; tokens * value_heads];
    let beta = vec![0.5; tokens * value_heads];
    let mut states = vec![0.0; value_heads * DIM * DIM];
    let mut seconds: Vec<f64> = (0..3)
        .map(|_| {
            let begin = Instant::now();
            let input = Tokens { q: &q, k: &k, v: &v, g: &g, beta: &beta };
            std::hint::black_box(recurrence(shape, &input, (DIM as f64).powf(-0.5), &mut states));
            begin.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    Ok(tokens as f64 / seconds[1])
}
