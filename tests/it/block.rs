//! A whole layer: against transformers' own, against itself in other windows, and against what is predicted of it.

mod cuda;
mod goldens;
mod refusals;
mod windows;

use std::ops::Range;
use std::path::PathBuf;

use terrace_allocator::host::HostBacking;
use terrace_allocator::{Allocator, Backing, Config, Stream};
use terrace_kernels::block::{Geometry, Layer, Part, Source, State};
use terrace_kernels::{Cpu, Device, Dtype};
use terrace_profiles::model::Model;
use terrace_profiles::units::{Bytes, DeviceSpan};
use terrace_profiles::{Memory, Profile, Recorder};
use terrace_tests::corpus::root;
use terrace_tests::gdn::{decode as decoded, encode};

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

/// Layers on a device whose every byte comes from one arena, and what one step of them asked for.
pub struct Stack {
    arena: Allocator,
    device: Device,
    layers: Vec<(Layer, State)>,
    geometry: Geometry,
}

impl Stack {
    /// So many layers on the host, of random weights or those of a checkpoint from layer `first` on.
    pub fn new(model: &Model, part: Part, source: &Source<'_>, first: u64, count: u64) -> Self {
        let device = Device::Cpu(Cpu::new(THREADS));
        Self::on(device, Box::new(HostBacking::new()), Dtype::F32, (model, part), source, first..first + count)
    }

    /// The same on any device.
    pub fn on(
        device: Device,
        backing: Box<dyn Backing>,
        element: Dtype,
        (model, part): (&Model, Part),
        source: &Source<'_>,
        indices: Range<u64>,
    ) -> Self {
        let geometry = Geometry::new(model, part, element).unwrap();
        // Redzones and poison: a byte that is read before it is written, or written outside its buffer, is found.
        let config = Config { debug: true, ..Config::new(Bytes::new(512 << 20).unwrap()) };
        let arena = Allocator::new(backing, config).unwrap();
        let layers = indices.map(|index| {
            let span = |bytes, label| arena.alloc(bytes, Stream(0), label).unwrap();
            let weights = span(geometry.weights().total(), "weights");
            let state = span(geometry.state().total(), "state");
            // SAFETY: the arena gave both for as long as it lives, which is as long as the stack.
            unsafe { (Layer::load(&device, geometry, weights, source, index).unwrap(), State::new(state)) }
        });
        let layers = layers.collect();
        Self { arena, device, layers, geometry }
    }

    /// Runs rows of a stream through all layers as one step, by decode steps' way if `decode`; gives what comes out, and the
    /// events of the step.
    pub fn step(&mut self, stream: &[f32], window: Option<u64>, decode: bool) -> (Vec<f32>, Profile) {
        let element = self.geometry.element();
        let width = self.geometry.rank().hidden as usize;
        let tokens = (stream.len() / width) as u64;
        let mut step = self.arena.step(format!("{tokens} {window:?} {decode}").as_bytes(), Stream(0)).unwrap();
        let mut memory = Recorder::over(&mut step);
        let residual = memory.alloc(self.geometry.residual(tokens).unwrap(), "residual").unwrap();
        copy_in(&self.device, residual, &encode(stream, element));
        for (layer, state) in &mut self.layers {
            // SAFETY: the arena's spans are memory of the device, of their size.
            let ran = unsafe {
                if decode {
                    layer.decode(&mut memory, residual, tokens, state)
                } else {
                    layer.prefill(&mut memory, residual, tokens, state, window)
                }
            };
            ran.unwrap();
        }
        let out = copy_out(&self.device, residual, tokens * width as u64 * element.bytes());
        memory.free(residual);
        (decoded(&out, element), memory.into_profile("run"))
    }

    /// The sequence ends; the next begins.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(|(_, state)| state.reset());
    }

    /// Both parts of the first layer's state, as bytes.
    pub fn state(&self) -> Vec<u8> {
        let (_, state) = &self.layers[0];
        state.parts(&self.geometry).iter().flat_map(|part| copy_out(&self.device, *part, part.bytes.get())).collect()
    }
}

fn copy_in(device: &Device, to: DeviceSpan, bytes: &[u8]) {
    assert!(bytes.len() as u64 <= to.bytes.get());
    // SAFETY: spans of a stack's arena, each with room for the bytes, which nobody else uses meanwhile.
    unsafe {
        match device {
            Device::Cuda(cuda) => cuda.upload(to.address, bytes).unwrap(),
            _ => {
                let to = std::ptr::with_exposed_provenance_mut(to.address as usize);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            }
        }
    }
}

fn copy_out(device: &Device, from: DeviceSpan, len: u64) -> Vec<u8> {
    assert!(len <= from.bytes.get());
    let mut bytes = vec![0; len as usize];
    // SAFETY: as in `copy_in`.
    unsafe {
        match device {
            Device::Cuda(cuda) => cuda.download(from.address, &mut bytes).unwrap(),
            _ => {
                let from = std::ptr::with_exposed_provenance(from.address as usize);
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
            }
        }
    }
    bytes
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

pub fn golden_path(name: &str) -> PathBuf {
    root().join(format!("tests/goldens/block-{name}.safetensors"))
}
