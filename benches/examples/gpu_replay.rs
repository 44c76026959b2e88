//! Replays recorded forwards on a GPU: what the driver is asked for, and the time of one call beside `cuMemAllocAsync`.
//!
//! `cargo run --release -p terrace-benches --example gpu_replay -- [ROUNDS]` prints a Markdown table. Each figure is the median
//! over the rounds of (time of a forward / its calls). The numbers of calls served on script and the addresses are held
//! against a run on host memory.

use std::process::ExitCode;
use std::time::Instant;

use terrace_allocator::cuda::CudaBacking;
use terrace_allocator::host::HostBacking;
use terrace_allocator::{Backing, Config, Device};
use terrace_benches::gpu::AsyncPool;
use terrace_benches::{Forward, Peer, Single, run};
use terrace_profiles::units::Bytes;
use terrace_tests::corpus;

const FORWARDS: [&str; 4] =
    ["qwen3.6-27b-prefill-4128", "qwen3.6-27b-prefill-16384", "qwen3.6-27b-prefill-60000", "qwen3.6-27b-chunked-12384"];

fn main() -> ExitCode {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(50);
    match CudaBacking::new(0).map_err(|error| error.to_string()).and_then(|backing| measure(&backing.name(), rounds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) if std::env::var("REQUIRE_GPU").is_ok_and(|value| value == "1") => {
            eprintln!("error: REQUIRE_GPU=1, but {reason}");
            ExitCode::FAILURE
        }
        Err(reason) => {
            eprintln!("SKIP gpu_replay: {reason}");
            ExitCode::SUCCESS
        }
    }
}

fn measure(gpu: &str, rounds: usize) -> Result<(), String> {
    println!("GPU: {gpu}. Median of {rounds} forwards, ns per alloc or free.\n");
    println!(
        "| forward | calls | ours | cuMemAllocAsync | ratio | driver allocations | free bytes lost after warm-up | on script |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|");
    for name in FORWARDS {
        let path = corpus::root().join(format!("profiles/recorded/{name}.profile"));
        let forward = Forward::of(&corpus::read(&path));
        let (ours, figures) = ours(&forward, rounds)?;
        let mut pool = AsyncPool::new()?;
        let theirs = median(&mut pool, &forward, rounds);
        println!(
            "| {name} | {} | {ours:.1} | {theirs:.1} | {:.4} | {} | {} | {} of {} |",
            forward.calls.len(),
            ours / theirs,
            figures.reservations,
            figures.lost,
            figures.on_script,
            figures.steps,
        );
    }
    Ok(())
}

struct Figures {
    reservations: u64,
    lost: i64,
    on_script: u64,
    steps: u64,
}

fn ours(forward: &Forward, rounds: usize) -> Result<(f64, Figures), String> {
    let budget = Bytes::new(2 * forward.peak + (64 << 20)).ok_or("the forward is too large")?;
    let open = |backing: Box<dyn Backing>| Device::new(backing, Config::new(budget)).map_err(|error| error.to_string());
    let mut device = Single(open(Box::new(CudaBacking::new(0).map_err(|error| error.to_string())?))?);
    let mut host = Single(open(Box::new(HostBacking::new()))?);
    let bases = (device.0.reservation().address, host.0.reservation().address);
    let (mut on_device, mut on_host) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        run(&mut device, forward, &mut on_device);
        run(&mut host, forward, &mut on_host);
        let offsets = |addresses: &[u64], base: u64| addresses.iter().map(|address| address - base).collect::<Vec<_>>();
        if offsets(&on_device, bases.0) != offsets(&on_host, bases.1) {
            return Err("the GPU and the host hand out different offsets".to_owned());
        }
    }
    let free = |device: &Single| device.0.backing().memory().map_or(0, |(_, free)| free.get().cast_signed());
    let before = free(&device);
    let time = median(&mut device, forward, rounds);
    let stats = device.0.stats();
    let (on_script, steps) = (stats.steps_on_script, stats.steps);
    let reservations = device.0.backing().reservations();
    Ok((time, Figures { reservations, lost: before - free(&device), on_script, steps }))
}

fn median(peer: &mut dyn Peer, forward: &Forward, rounds: usize) -> f64 {
    let mut addresses = Vec::with_capacity(forward.requests);
    // A pool needs some forwards to grow to its size.
    for _ in 0..3 {
        run(peer, forward, &mut addresses);
    }
    let mut times: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            let begun = Instant::now();
            run(peer, forward, &mut addresses);
            begun.elapsed().as_nanos() as f64 / forward.calls.len() as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
