//! The same numbers as transformers' own layer gives, from the same weights under the names of a checkpoint. `tests/goldens/block.py`
//! makes the files.

use safetensors::SafeTensors;
use terrace_kernels::block::{Checkpoint, Part, Source};
use terrace_profiles::model::Model;

use super::{Stack, golden_path, rms_error};

/// Both in fp32: what is left is the order of summation.
const MOST: f64 = 1e-4;

/// A file, read.
pub struct Golden {
    pub model: Model,
    pub checkpoint: Checkpoint,
    pub layer: u64,
    /// Tokens of the prefill; the others are decoded.
    pub prefill: usize,
    pub input: Vec<f32>,
    pub expected: Vec<f32>,
}

impl Golden {
    pub fn read(name: &str) -> Self {
        let path = golden_path(name);
        let bytes = std::fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let about = metadata.metadata().as_ref().unwrap();
        let floats = |name: &str| -> Vec<f32> {
            let tensor = file.tensor(name).unwrap();
            tensor.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
        };
        Self {
            model: Model::from_config(name, &about["config"]).unwrap(),
            checkpoint: Checkpoint::open(&path).unwrap(),
            layer: about["layer"].parse().unwrap(),
            prefill: about["prefill"].parse().unwrap(),
            input: floats("golden.input"),
            expected: floats("golden.output"),
        }
    }

    /// Holds the prefill and each decoded token of a stack of this layer against the file.
    pub fn check(&self, stack: &mut Stack, window: Option<u64>, most: f64) {
        let width = self.model.whole.hidden as usize;
        let cut = self.prefill * width;
        let (given, _) = stack.step(&self.input[..cut], window, false);
        let hold = |what: &str, given: &[f32], expected: &[f32]| {
            let error = rms_error(given, expected);
            println!("{}, {what}, window {window:?}: {error:.1e}", self.model.id);
            assert!(error <= most, "{}, {what}, window {window:?}: {error:e}", self.model.id);
        };
        hold("prefill", &given, &self.expected[..cut]);
        for token in self.prefill..self.input.len() / width {
            let row = token * width..(token + 1) * width;
            let (given, _) = stack.step(&self.input[row.clone()], None, true);
            hold(&format!("token {token}"), &given, &self.expected[row]);
        }
    }
}

fn check(name: &str) {
    let golden = Golden::read(name);
    for window in [None, Some(64), Some(128)] {
        let source = Source::Checkpoint(&golden.checkpoint);
        let mut stack = Stack::new(&golden.model, Part::Layer, &source, golden.layer, 1);
        golden.check(&mut stack, window, MOST);
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
