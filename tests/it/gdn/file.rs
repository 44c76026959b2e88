//! The example `gdn_file`, in process: what it writes, and what it says of bad files.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use terrace_tests::gdn::cases::{Keys, Recipe};
use terrace_tests::gdn::{Case, DIM, decode, encode, error};
use terrace_tests::gpu;

#[path = "../../../kernels/examples/gdn_file/file.rs"]
mod example;

type Tensors = HashMap<&'static str, (Dtype, Vec<usize>, Vec<u8>)>;
type Strings = HashMap<String, String>;

fn case() -> Case {
    let recipe = Recipe { keys: Keys::Raw, padding: 2, ..Recipe::new("file", (2, 4), &[0, 0, 70, 200]) };
    let case = recipe.draw(120);
    Case { l2norm: true, scale: Some(0.125), has_initial: Some(vec![true, false, true]), ..case }
}

fn tensors(case: &Case) -> (Tensors, Strings) {
    let (keys, values) = case.heads;
    let bf16 = |x: &[f32]| encode(x, terrace_kernels::Dtype::Bf16);
    let f32 = |x: &[f32]| encode(x, terrace_kernels::Dtype::F32);
    let cu = case.cu.iter().flat_map(|x| x.to_le_bytes()).collect();
    let has = case.has_initial.as_ref().unwrap().iter().map(|has| u8::from(*has)).collect();
    let (tokens, n) = (case.tokens, case.sequences());
    let tensors = HashMap::from([
        ("q", (Dtype::BF16, vec![tokens, keys, DIM], bf16(&case.q))),
        ("k", (Dtype::BF16, vec![tokens, keys, DIM], bf16(&case.k))),
        ("v", (Dtype::BF16, vec![tokens, values, DIM], bf16(&case.v))),
        ("g", (Dtype::F32, vec![tokens, values], f32(&case.g))),
        ("beta", (Dtype::F32, vec![tokens, values], f32(&case.beta))),
        ("cu_seqlens", (Dtype::I64, vec![n + 1], cu)),
        ("h0", (Dtype::F32, vec![n, values, DIM, DIM], f32(case.h0.as_ref().unwrap()))),
        ("has_initial", (Dtype::U8, vec![n], has)),
    ]);
    let strings = HashMap::from([("scale".to_owned(), "0.125".to_owned()), ("l2norm".to_owned(), "1".to_owned())]);
    (tensors, strings)
}

fn write(path: &Path, tensors: &Tensors, strings: &Strings) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor of that shape"))
    });
    std::fs::write(path, safetensors::serialize(views, Some(strings.clone())).unwrap()).unwrap();
}

fn run(from: &Path, to: &Path, rest: &[&str]) -> Result<String, String> {
    let paths = [from, to].map(|path| path.to_str().unwrap());
    let args: Vec<String> = paths.iter().chain(rest).map(|arg| (*arg).to_owned()).collect();
    example::run(&args)
}

fn check(device: &str, limit: f64) {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let case = case();
    let (tensors, strings) = tensors(&case);
    write(&from, &tensors, &strings);
    let expected = case.expected();
    let mut written = Vec::new();
    for window in ["64", "768"] {
        let line = run(&from, &to, &["--device", device, "--window", window]).unwrap();
        assert!(line.starts_with("202 tokens on c"), "{line}");
        let bytes = std::fs::read(&to).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (o, ht) = (file.tensor("o").unwrap(), file.tensor("ht").unwrap());
        assert_eq!((o.dtype(), o.shape()), (Dtype::BF16, &[202, 4, 128][..]));
        assert_eq!((ht.dtype(), ht.shape()), (Dtype::F32, &[3, 4, 128, 128][..]));
        let values = decode(o.data(), terrace_kernels::Dtype::Bf16);
        let (used, padding) = values.split_at(200 * 4 * DIM);
        assert!(error(used, &expected.o) < limit);
        assert!(error(&decode(ht.data(), terrace_kernels::Dtype::F32), &expected.ht) < limit);
        assert!(padding.iter().all(|x| *x == 0.0));
        written.push((o.data().to_vec(), ht.data().to_vec()));
    }
    assert!(written[0] == written[1], "the window changes no bit");
}

#[test]
fn a_file_becomes_outputs_and_final_states() {
    check("cpu", 2e-3);
    let _turn = gpu::turn();
    if gpu::require().is_some() {
        check("cuda", 6e-3);
    }
}

#[test]
fn each_bad_file_is_one_sentence_and_leaves_no_output() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let (good, strings) = tensors(&case());
    let mut sentences = String::new();
    let mut refused = |what: &str, result: Result<String, String>| {
        let sentence = result.expect_err(what).replace(folder.path().to_str().unwrap(), "[folder]");
        assert!(!to.exists(), "{what}");
        sentences += &format!("{what}\n    {sentence}\n");
    };
    refused("no such file", run(&from, &to, &[]));
    std::fs::write(&from, b"not a header").unwrap();
    refused("another format", run(&from, &to, &[]));
    let spoilt = |spoil: &dyn Fn(&mut Tensors, &mut Strings)| {
        let (mut tensors, mut strings) = (good.clone(), strings.clone());
        spoil(&mut tensors, &mut strings);
        write(&from, &tensors, &strings);
        run(&from, &to, &[])
    };
    refused("no beta", spoilt(&|tensors, _| drop(tensors.remove("beta"))));
    refused("q as F16", spoilt(&|tensors, _| tensors.get_mut("q").unwrap().0 = Dtype::F16));
    refused("k of other heads", spoilt(&|tensors, _| tensors.get_mut("k").unwrap().1 = vec![404, 1, 128]));
    refused(
        "q and k with heads of 64",
        spoilt(&|tensors, _| {
            for name in ["q", "k"] {
                tensors.get_mut(name).unwrap().1 = vec![202, 4, 64];
            }
        }),
    );
    refused("q without heads", spoilt(&|tensors, _| tensors.get_mut("q").unwrap().1 = vec![202, 256]));
    refused(
        "bounds that decrease",
        spoilt(&|tensors, _| {
            tensors.get_mut("cu_seqlens").unwrap().2 =
                [0_i64, 80, 70, 200].iter().flat_map(|x| x.to_le_bytes()).collect();
        }),
    );
    refused(
        "h0 of another number of sequences",
        spoilt(&|tensors, _| {
            tensors.get_mut("h0").unwrap().1 = vec![6, 2, 128, 128];
        }),
    );
    refused("has_initial without h0", spoilt(&|tensors, _| drop(tensors.remove("h0"))));
    refused("a scale in words", spoilt(&|_, strings| drop(strings.insert("scale".into(), "small".into()))));
    refused("another l2norm", spoilt(&|_, strings| drop(strings.insert("l2norm".into(), "yes".into()))));
    write(&from, &good, &strings);
    refused("a window of 100", run(&from, &to, &["--window", "100"]));
    refused("a window in words", run(&from, &to, &["--window", "all"]));
    refused("another device", run(&from, &to, &["--device", "tpu"]));
    refused("another option", run(&from, &to, &["--fast"]));
    refused("one file", example::run(&["in".to_owned()]));
    let nowhere = run(&from, &folder.path().join("no/such/folder"), &[]);
    refused("nowhere to write to", nowhere);
    insta::assert_snapshot!(sentences);
}
