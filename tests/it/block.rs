//! A whole layer: against transformers' own, against itself in other windows, and against what is predicted of it.

mod goldens;
mod refusals;
mod windows;

use std::path::Path;

use terrace_allocator::host::HostBacking;
use terrace_allocator::{Allocator, Config, Stream};
use terrace_kernels::block::{Geometry, Layer, Part, Source, State};
use terrace_kernels::{Cpu, Device, Dtype};
use terrace_profiles::model::Model;
use terrace_profiles::units::{Bytes, DeviceSpan};
use terrace_profiles::{Memory, Profile, Recorder};

/// Threads whose scratch a run asks for; the pool may have fewer.
pub const THREADS: u32 = 2;

/// A model of small widths: 1 key head, 2 value heads, a stream 64 wide, a feed-forward 96 wide.
pub fn small() -> Model {
    model(r#""linear_num_key_heads": 1, "linear_num_value_heads": 2"#)
}

pub fn model(heads: &str) -> Model {
    let config = format!(
        r#"{{"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, {heads}, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "intermediate_size": 96, "vocab_size": 32, "num_hidden_layers": 4, "full_attention_interval": 4}}"#
    );
    Model::from_config("small.json", &config).unwrap()
}

/// Layers on the host whose every byte comes from one arena, and what one step of them asked for.
pub struct Stack {
    arena: Allocator,
    layers: Vec<(Layer, State)>,
    geometry: Geometry,
}

impl Stack {
    /// So many layers of random weights, or those of a checkpoint from layer `first` on.
    pub fn new(model: &Model, part: Part, source: &Source<'_>, first: u64, count: u64) -> Self {
        let device = Device::Cpu(Cpu::new(THREADS));
        let geometry = Geometry::new(model, part, Dtype::F32).unwrap();
        // Redzones and poison: a byte that is read before it is written, or written outside its buffer, is found.
        let config = Config { debug: true, ..Config::new(Bytes::new(256 << 20).unwrap()) };
        let arena = Allocator::new(Box::new(HostBacking::new()), config).unwrap();
        let layers = (first..first + count).map(|index| {
            let span = |bytes, label| arena.alloc(bytes, Stream(0), label).unwrap();
            let weights = span(geometry.weights().total(), "weights");
            let state = span(geometry.state().total(), "state");
            // SAFETY: the arena gave both for as long as it lives, which is as long as the stack.
            unsafe { (Layer::load(&device, geometry, weights, source, index).unwrap(), State::new(state)) }
        });
        let layers = layers.collect();
        Self { arena, layers, geometry }
    }

    /// Runs rows of a stream through all layers as one step, by decode steps' way if `decode`; gives what comes out, and the
    /// events of the step.
    pub fn step(&mut self, stream: &[f32], window: Option<u64>, decode: bool) -> (Vec<f32>, Profile) {
        let width = self.geometry.rank().hidden as usize;
        let tokens = (stream.len() / width) as u64;
        let mut step = self.arena.step(format!("{tokens} {window:?} {decode}").as_bytes(), Stream(0)).unwrap();
        let mut memory = Recorder::over(&mut step);
        let residual = memory.alloc(self.geometry.residual(tokens).unwrap(), "residual").unwrap();
        let rows = rows(residual, stream.len());
        rows.copy_from_slice(stream);
        for (layer, state) in &mut self.layers {
            // SAFETY: the arena's spans are host memory of their size.
            let ran = unsafe {
                if decode {
                    layer.decode(&mut memory, residual, tokens, state)
                } else {
                    layer.prefill(&mut memory, residual, tokens, state, window)
                }
            };
            ran.unwrap();
        }
        let out = rows.to_vec();
        memory.free(residual);
        (out, memory.into_profile("run"))
    }

    /// The sequence ends; the next begins.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(|(_, state)| state.reset());
    }

    /// Both parts of the first layer's state, as bytes.
    pub fn state(&self) -> Vec<u8> {
        let (_, state) = &self.layers[0];
        let parts = state.parts(&self.geometry);
        parts
            .iter()
            .flat_map(|part| rows(*part, part.bytes.get() as usize / 4).iter().flat_map(|x| x.to_le_bytes()))
            .collect()
    }
}

/// A span of the host as numbers.
fn rows<'a>(span: DeviceSpan, len: usize) -> &'a mut [f32] {
    assert!(len as u64 * 4 <= span.bytes.get());
    let address = std::ptr::with_exposed_provenance_mut(span.address as usize);
    // SAFETY: spans of a stack's arena, which outlive the calls that use the slice.
    unsafe { std::slice::from_raw_parts_mut(address, len) }
}

/// A stream of numbers as large as those inside a model.
pub fn stream(tokens: usize, width: usize) -> Vec<f32> {
    let mut random = terrace_tests::generate::Random::new(tokens as u64);
    (0..tokens * width).map(|_| (random.draw() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Root of the mean square difference, as a part of the expected one's.
pub fn rms_error(given: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(given.len(), expected.len());
    let square = |x: f64| x * x;
    let sum = |each: &dyn Fn(usize) -> f64| (0..given.len()).map(each).sum::<f64>();
    let off = sum(&|at| square(f64::from(given[at]) - f64::from(expected[at])));
    (off / sum(&|at| square(f64::from(expected[at])))).sqrt()
}

pub fn golden_path(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("goldens/block-{name}.safetensors"))
}
