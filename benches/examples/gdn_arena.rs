//! Gated DeltaNet prefills whose every buffer comes from the arena: recorded once, planned, replayed on a GPU.
//!
//! `cargo run --release -p terrace-benches --example gdn_arena -- [ROUNDS]`
//!
//! A step is one prefill of one layer (16 key heads, 48 value heads, bf16): q, k, v, gates, output, workspace. The steps have
//! 4,128 and 60,000 tokens by turns. Held: the arena is what `profiles::shape` says of a call, the driver is asked once, free memory does not
//! change after the first round, every later step is on script, and each output has the same bits every time.

use std::process::ExitCode;

use terrace_allocator::cuda::CudaBacking;
use terrace_allocator::{Allocator, Backing, Config, Stream};
use terrace_benches::gpu::{download, enter, upload};
use terrace_kernels::{
    Design, Device, Dtype, Gdn, Place, PoolMut, Prefill, Sequences, States, Tensor, TensorMut, Window, Workspace, cuda,
    prefill,
};
use terrace_profiles::Memory;
use terrace_profiles::shape::gdn_workspace;
use terrace_profiles::shape::layer::{Row, gdn_call};
use terrace_profiles::units::{Bytes, DeviceSpan};
use terrace_tests::generate::Random;

const TOKENS: [u64; 2] = [4128, 60_000];
const KEYS: u64 = 16;
const VALUES: u64 = 48;
const DIM: u64 = 128;

fn main() -> ExitCode {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(20);
    match measure(rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::NoGpu(reason)) if std::env::var("REQUIRE_GPU").is_ok_and(|value| value == "1") => {
            eprintln!("error: REQUIRE_GPU=1, but {reason}");
            ExitCode::FAILURE
        }
        Err(Failure::NoGpu(reason)) => {
            eprintln!("SKIP gdn_arena: {reason}");
            ExitCode::SUCCESS
        }
        Err(Failure::Wrong(reason)) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

enum Failure {
    NoGpu(String),
    Wrong(String),
}

/// Anything that goes wrong once there is a GPU.
#[allow(clippy::needless_pass_by_value, reason = "it takes what `map_err` gives")]
fn wrong(error: impl ToString) -> Failure {
    Failure::Wrong(error.to_string())
}

fn measure(rounds: u32) -> Result<(), Failure> {
    let backing = CudaBacking::new(0).map_err(|error| Failure::NoGpu(error.to_string()))?;
    let gpu = backing.name();
    enter().map_err(wrong)?;
    let device = Device::Cuda(cuda::Device::open(0).map_err(wrong)?);
    let layer = Layer::new(&device)?;
    let predicted = [layer.predicted(TOKENS[0])?, layer.predicted(TOKENS[1])?];
    let state = layer.gdn.state_bytes();
    let largest = predicted.iter().max().copied().unwrap_or_default();
    let budget = Bytes::new(2 * largest + state.get() + (64 << 20)).ok_or_else(|| wrong("the budget is too large"))?;
    let arena = Allocator::new(Box::new(backing), Config::new(budget)).map_err(wrong)?;

    // The state outlives the steps.
    let pool = arena.alloc(state, Stream(0), "state pool").map_err(wrong)?;
    let inputs = TOKENS.map(Inputs::new);
    let free = || arena.device().backing().memory().map_or(0, |(_, free)| free.get());
    let (mut first, mut free_after_first) = (Vec::new(), 0);
    for round in 0..rounds.max(3) {
        for (turn, inputs) in inputs.iter().enumerate() {
            let hash = layer.forward(&arena, inputs, pool)?;
            match first.get(turn) {
                None => first.push(hash),
                Some(expected) if *expected == hash => {}
                Some(_) => {
                    return Err(wrong(format!(
                        "round {round} at {} tokens gave other bits than the first",
                        inputs.tokens
                    )));
                }
            }
        }
        if round == 0 {
            free_after_first = free();
        }
    }
    let stats = arena.stats();
    let lost = free_after_first.cast_signed() - free().cast_signed();
    let reservations = arena.device().backing().reservations();
    println!("GPU: {gpu}. {rounds} rounds; workspace {} B at every length.\n", layer.workspace.get());
    println!("| tokens | predicted bytes of a step |\n|---:|---:|");
    for (tokens, bytes) in TOKENS.iter().zip(predicted) {
        println!("| {tokens} | {bytes} |");
    }
    println!(
        "\narena {} B, lower bound {} B, driver allocations {reservations}, free bytes lost after the first round {lost}, on script {} of {} steps",
        stats.arena, stats.lower_bound, stats.steps_on_script, stats.steps
    );
    let held = [
        (stats.arena == largest, "the arena is not the predicted bytes of the larger step"),
        (stats.lower_bound == largest, "the load is not the predicted bytes of the larger step"),
        (reservations == 1, "the driver was asked more than once"),
        (lost == 0, "free memory changed after the first round"),
        (
            stats.steps_on_script + TOKENS.len() as u64 == stats.steps,
            "a step after the first of its key left its script",
        ),
    ];
    held.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, broken)| Err(wrong(broken)))
}

/// One layer on one device.
struct Layer<'a> {
    device: &'a Device,
    gdn: Gdn,
    workspace: Bytes,
}

impl<'a> Layer<'a> {
    fn new(device: &'a Device) -> Result<Self, Failure> {
        let gdn = Gdn::new(KEYS as u32, VALUES as u32).map_err(wrong)?;
        let workspace = gdn_workspace(gdn, Window::DEFAULT, Design::Fused).total();
        Ok(Self { device, gdn, workspace })
    }

    /// What a step asks for, in order: `profiles::shape` says it.
    fn buffers(&self, tokens: u64) -> Result<Vec<Row>, Failure> {
        gdn_call(self.gdn, tokens, Window::DEFAULT).map(|table| table.rows).map_err(wrong)
    }

    /// What a step needs when each buffer begins at a multiple of 512, as the arena hands them out.
    fn predicted(&self, tokens: u64) -> Result<u64, Failure> {
        Ok(self.buffers(tokens)?.iter().map(|row| row.bytes.get().next_multiple_of(512)).sum())
    }

    /// One step: every buffer from the arena, the prefill, a hash of its output.
    fn forward(&self, arena: &Allocator, inputs: &Inputs, pool: DeviceSpan) -> Result<u64, Failure> {
        let mut step = arena.step(format!("prefill {}", inputs.tokens).as_bytes(), Stream(0)).map_err(wrong)?;
        let memory: &mut dyn Memory = &mut step;
        let mut spans = Vec::new();
        for Row { name, bytes, .. } in self.buffers(inputs.tokens)? {
            spans.push(memory.alloc(bytes, name).map_err(wrong)?);
        }
        let [q, k, v, g, beta, o, space] = *spans.as_slice() else { return Err(wrong("seven buffers were asked for")) };
        for (span, bytes) in [q, k, v, g, beta].iter().zip(inputs.all()) {
            // SAFETY: the span has as many bytes, and the stream is idle: `download` waited for the step before.
            unsafe { upload(span.address, bytes) }.map_err(wrong)?;
        }
        let tokens = inputs.tokens;
        let bounds = [0, tokens.cast_signed()];
        let tensor = |span: DeviceSpan, heads, dim, dtype| {
            // SAFETY: the arena gave the span for this shape, until the step ends.
            unsafe { Tensor::from_raw(Place::Device, span.address, dtype, [tokens, heads, dim]) }
        };
        let path = prefill(
            self.device,
            Prefill {
                q: tensor(q, KEYS, DIM, Dtype::Bf16),
                k: tensor(k, KEYS, DIM, Dtype::Bf16),
                v: tensor(v, VALUES, DIM, Dtype::Bf16),
                g: tensor(g, VALUES, 1, Dtype::F32),
                beta: tensor(beta, VALUES, 1, Dtype::F32),
                // SAFETY: as above, and nothing else uses it.
                o: unsafe { TensorMut::from_raw(Place::Device, o.address, Dtype::Bf16, [tokens, VALUES, DIM]) },
                sequences: Sequences::packed(&bounds),
                states: States::InPlace {
                    // SAFETY: the pool holds one slot, and outlives the step.
                    pool: unsafe { PoolMut::from_raw(Place::Device, pool.address, Dtype::F32, [1, VALUES]) },
                    slots: None,
                    has_initial: Some(&[false]),
                },
                checkpoints: None,
                scale: None,
                l2norm: true,
                window: Window::DEFAULT,
                design: Design::Fused,
            },
            // SAFETY: as for the tensors.
            unsafe { Workspace::from_raw(Place::Device, space) },
        )
        .map_err(wrong)?;
        if path.windows != tokens.div_ceil(u64::from(Window::DEFAULT.tokens())) {
            return Err(wrong(format!("{tokens} tokens were worked through in {} windows", path.windows)));
        }
        let mut output = vec![0; (tokens * VALUES * DIM * 2) as usize];
        // SAFETY: o has so many bytes.
        unsafe { download(o.address, &mut output) }.map_err(wrong)?;
        for span in spans {
            memory.free(span);
        }
        Ok(hash(&output))
    }
}

/// What a prefill reads, the same for every round.
struct Inputs {
    tokens: u64,
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    g: Vec<u8>,
    beta: Vec<u8>,
}

impl Inputs {
    fn new(tokens: u64) -> Self {
        let mut random = Random::new(tokens);
        // bf16 numbers from -1 to 1: the upper half of the floats.
        let mut elements = |count: u64| -> Vec<u8> {
            (0..count)
                .flat_map(|_| ((unit(&mut random) * 2.0 - 1.0).to_bits() >> 16).to_le_bytes()[..2].to_vec())
                .collect()
        };
        let (keys, values) = (tokens * KEYS * DIM, tokens * VALUES * DIM);
        let (q, k, v) = (elements(keys), elements(keys), elements(values));
        let mut floats = |scale: f32| -> Vec<u8> {
            (0..tokens * VALUES).flat_map(|_| (scale * unit(&mut random)).to_le_bytes()).collect()
        };
        Self { tokens, q, k, v, g: floats(-0.1), beta: floats(1.0) }
    }

    fn all(&self) -> [&[u8]; 5] {
        [&self.q, &self.k, &self.v, &self.g, &self.beta]
    }
}

/// From 0 to 1.
fn unit(random: &mut Random) -> f32 {
    (random.draw() >> 40) as f32 / (1 << 24) as f32
}

/// FNV-1a over words.
fn hash(bytes: &[u8]) -> u64 {
    bytes.chunks_exact(8).fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
