//! The same numbers as transformers' own layer gives, from the same weights under the names of a checkpoint. `tests/goldens/block.py`
//! makes the files.

use safetensors::SafeTensors;
use terrace_kernels::block::{Checkpoint, Part, Source};
use terrace_profiles::model::Model;

use super::{Stack, golden_path, rms_error};

/// Both in fp32: what is left is the order of summation.
const MOST: f64 = 1e-4;

fn check(name: &str) {
    let path = golden_path(name);
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let about = metadata.metadata().as_ref().unwrap();
    let number = |name: &str| about[name].parse::<usize>().unwrap();
    let floats = |name: &str| -> Vec<f32> {
        let tensor = file.tensor(name).unwrap();
        tensor.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
    };
    let (input, expected) = (floats("golden.input"), floats("golden.output"));
    let model = Model::from_config(name, &about["config"]).unwrap();
    let width = model.whole.hidden as usize;
    let checkpoint = Checkpoint::open(&path).unwrap();
    let source = Source::Checkpoint(&checkpoint);
    let cut = number("prefill") * width;
    for window in [None, Some(64), Some(128)] {
        let mut stack = Stack::new(&model, Part::Layer, &source, number("layer") as u64, 1);
        let (given, _) = stack.step(&input[..cut], window, false);
        let error = rms_error(&given, &expected[..cut]);
        assert!(error <= MOST, "{name}, prefill, window {window:?}: {error:e}");
        println!("{name}, prefill, window {window:?}: {error:.1e}");
        for token in number("prefill")..input.len() / width {
            let row = token * width..(token + 1) * width;
            let (given, _) = stack.step(&input[row.clone()], None, true);
            let error = rms_error(&given, &expected[row]);
            assert!(error <= MOST, "{name}, token {token}: {error:e}");
            println!("{name}, token {token}: {error:.1e}");
        }
    }
}

#[test]
fn a_layer_of_qwen3_5_is_that_of_transformers() {
    check("qwen3.5");
}

#[test]
fn a_layer_of_qwen3_next_with_its_interleaved_projections_is_that_of_transformers() {
    check("qwen3-next");
}

#[test]
fn a_folder_of_files_is_a_checkpoint_too() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden_path("qwen3.5"), folder.path().join("model-00001-of-00002.safetensors")).unwrap();
    let empty = safetensors::serialize(Vec::<(&str, safetensors::tensor::TensorView<'_>)>::new(), None).unwrap();
    std::fs::write(folder.path().join("model-00002-of-00002.safetensors"), empty).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let one = Checkpoint::open(&golden_path("qwen3.5")).unwrap();
    let stream = super::stream(70, 64);
    let model = super::small();
    let [a, b] = [&checkpoint, &one]
        .map(|from| Stack::new(&model, Part::Layer, &Source::Checkpoint(from), 2, 1).step(&stream, Some(64), false).0);
    assert_eq!(a, b);
}
