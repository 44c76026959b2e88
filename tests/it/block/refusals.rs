//! What a layer refuses, each as one sentence that names the culprit, and a memory without room.

use std::fmt::Write as _;

use terrace_allocator::host::HostBacking;
use terrace_allocator::{Allocator, Config, Stream};
use terrace_kernels::block::{Checkpoint, Geometry, Layer, Part, Source, State};
use terrace_kernels::{Cpu, Device, Dtype, Error};
use terrace_profiles::model::Model;
use terrace_profiles::units::{Bytes, DeviceSpan};
use terrace_profiles::{Memory, Recorder};

use terrace_tests::corpus::root;

use super::{golden_path, model, small};

/// Has room for so many requests.
struct Short(Recorder<'static>, u32);

impl Memory for Short {
    fn alloc(&mut self, bytes: Bytes, label: &str) -> Result<DeviceSpan, Box<dyn std::error::Error + Send + Sync>> {
        if self.1 == 0 {
            return Err("all of it is taken".into());
        }
        self.1 -= 1;
        self.0.alloc(bytes, label)
    }

    fn free(&mut self, span: DeviceSpan) {
        self.0.free(span);
    }
}

#[test]
fn each_bad_question_is_one_sentence() {
    let device = Device::Cpu(Cpu::new(1));
    let arena = Allocator::new(Box::new(HostBacking::new()), Config::new(Bytes::new(64 << 20).unwrap())).unwrap();
    let span = |bytes: u64| arena.alloc(Bytes::new(bytes).unwrap(), Stream(0), "test").unwrap();
    let mut sentences = String::new();
    let mut refused = |what: &str, error: String| {
        assert!(!error.contains('\n'), "{error}");
        let error = error.replace(&golden_path("").parent().unwrap().display().to_string(), "[goldens]");
        writeln!(sentences, "{what}\n    {error}").unwrap();
    };
    let narrow = Model::from_config(
        "narrow.json",
        r#"{"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 60, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 3, "intermediate_size": 96, "vocab_size": 32,
        "num_hidden_layers": 4, "full_attention_interval": 4}"#,
    )
    .unwrap();
    let mut wide = narrow.clone();
    (wide.whole.key_dim, wide.whole.value_dim) = (128, 128);
    let geometry = |model: &Model, part| Geometry::new(model, part, Dtype::F32);
    refused("heads of 64", geometry(&narrow, Part::Mixer).unwrap_err().to_string());
    refused("a convolution of 3", geometry(&wide, Part::Mixer).unwrap_err().to_string());
    wide.conv_kernel = 4;
    refused("a stream of 60", geometry(&wide, Part::Mixer).unwrap_err().to_string());
    let experts = Model::named("qwen3.6-35b-a3b").unwrap();
    refused("experts", geometry(&experts, Part::Layer).unwrap_err().to_string());
    assert!(geometry(&experts, Part::Mixer).is_ok());

    let good = geometry(&small(), Part::Layer).unwrap();
    let weights = span(good.weights().total().get());
    let load = |geometry, weights, source: &Source<'_>, layer| {
        // SAFETY: the arena's spans are host memory.
        let loaded = unsafe { Layer::load(&device, geometry, weights, source, layer) };
        loaded.map_err(|error: Error| error.to_string())
    };
    let random = Source::Random { seed: 1 };
    let bf16 = Geometry::new(&small(), Part::Layer, Dtype::Bf16).unwrap();
    refused("bf16 on the host", load(bf16, weights, &random, 0).unwrap_err());
    refused("no room for weights", load(good, span(1000), &random, 0).unwrap_err());
    let checkpoint = Checkpoint::open(&golden_path("qwen3.5")).unwrap();
    refused("another layer", load(good, weights, &Source::Checkpoint(&checkpoint), 0).unwrap_err());
    let other = geometry(&model(r#""linear_num_key_heads": 2, "linear_num_value_heads": 4"#), Part::Layer).unwrap();
    let large = span(other.weights().total().get());
    refused("another model", load(other, large, &Source::Checkpoint(&checkpoint), 2).unwrap_err());
    let open = |path: &std::path::Path| Checkpoint::open(path).unwrap_err().to_string();
    refused("a folder without files", open(&root().join("tests/c")).replace(&root().display().to_string(), "[root]"));
    refused("no safetensors file", open(&golden_path("").with_file_name("block.py")));

    let layer = load(good, weights, &random, 0).unwrap();
    let residual = span(100 * 64 * 4);
    // SAFETY: as above.
    let mut state = unsafe { State::new(span(good.state().total().get())) };
    let mut run = |memory: &mut dyn Memory, residual, tokens, window, decode| {
        // SAFETY: as above; what is refused touches nothing, and a dry memory is not reached.
        let ran = unsafe {
            if decode {
                layer.decode(memory, residual, tokens, &mut state)
            } else {
                layer.prefill(memory, residual, tokens, &mut state, window)
            }
        };
        ran.unwrap_err().to_string()
    };
    let mut none = Short(Recorder::dry(), 0);
    refused("no tokens", run(&mut none, residual, 0, None, false));
    refused("a window of 100", run(&mut none, residual, 100, Some(100), false));
    refused("a stream that is too short", run(&mut none, residual, 101, None, false));
    refused("too many tokens", run(&mut none, residual, 1 << 40, None, false));
    refused("a decode step of a sequence that has not begun", run(&mut none, residual, 1, None, true));
    refused("no room", run(&mut none, residual, 100, Some(64), false));
    let asked = none.0.into_profile("short");
    assert!(asked.events.is_empty(), "what was refused asked for nothing");
    insta::assert_snapshot!(sentences);
}

#[test]
fn a_forward_without_room_gives_back_what_it_had() {
    let device = Device::Cpu(Cpu::new(1));
    let geometry = Geometry::new(&small(), Part::Layer, Dtype::F32).unwrap();
    let mut whole = Recorder::dry();
    terrace_kernels::block::dry_prefill(&geometry, &device, &mut whole, 200, Some(64)).unwrap();
    let requests = whole.into_profile("whole").lives().unwrap().len() as u32;
    for room in 0..requests {
        let mut memory = Short(Recorder::dry(), room);
        let error = terrace_kernels::block::dry_prefill(&geometry, &device, &mut memory, 200, Some(64)).unwrap_err();
        assert!(error.to_string().ends_with("finds no room: all of it is taken"), "{error}");
        let lives = memory.0.into_profile("short").lives().unwrap();
        assert!(lives.len() as u32 == room && lives.iter().all(|life| life.freed), "{room} requests");
    }
}
