//! What a CUDA device alone promises: an error that names what is missing, calls that a graph can capture, one compilation of each
//! kernel, and numbers in its own memory that are not trusted.

use std::fs;

use cudarc::driver::{result, sys};
use terrace_kernels::cache::Cache;
use terrace_kernels::cuda::{self, CudaError};
use terrace_kernels::tile::Element;
use terrace_kernels::{Decode, Design, Device, Dtype, Error, Indices, Place, PoolMut, Route, Tensor, TensorMut};
use terrace_tests::gdn::cases::{self, Keys, Recipe};
use terrace_tests::gdn::machine::{Cuda, Machine};
use terrace_tests::gdn::{Case, DIM, How, Pools, STATE, check, encode, error, run, same_bits, step};
use terrace_tests::gpu;

use super::small::on_cuda;

#[test]
fn without_a_driver_the_error_names_what_is_missing() {
    match cuda::Device::count() {
        Ok(count) => match cuda::Device::open(count) {
            Err(CudaError::NoDevice { ordinal, count: named }) => assert_eq!((ordinal, named), (count, count)),
            other => panic!("there is no device {count}, but: {other:?}"),
        },
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with("there is no CUDA driver: "), "{text}");
            assert!(text.contains("libcuda.so.1") || text.contains("does not start"), "{text}");
            assert_eq!(text.lines().count(), 1, "{text}");
            assert_eq!(cuda::Device::open(0).unwrap_err(), error);
            assert_eq!(cuda::Device::shared(0).unwrap_err(), error);
            assert_eq!(Error::from(error).to_string(), text);
        }
    }
}

#[test]
fn a_call_is_one_launch_or_one_more_than_windows_or_three_for_each() {
    on_cuda(|cuda| {
        let short = Recipe::new("short", (2, 4), &[0, 64, 128, 200]).draw(40);
        let fused = run(cuda, &short, &How { window: 128, ..How::default() }).unwrap().path;
        assert_eq!((fused.route, fused.chunks, fused.windows, fused.launches), (Route::CudaFused, 4, 2, 3));

        let case = Recipe::new("launches", (2, 4), &[0, 1000, 1000, 1600]).draw(40);
        let how = How { window: 128, ..How::default() };
        let fused = run(cuda, &case, &how).unwrap().path;
        // 26 chunks in windows of two, and one more that copies the state of the empty sequence.
        assert_eq!((fused.chunks, fused.windows), (26, 14));
        let (route, launches) = match fused.arch.as_deref() {
            // All chunks, then the copy.
            Some("sm_90a") => (Route::CudaStreamed, 2),
            _ => (Route::CudaFused, fused.windows + 1),
        };
        assert_eq!((fused.route, fused.launches), (route, launches));
        let staged = run(cuda, &case, &How { design: Design::Staged, ..how }).unwrap().path;
        assert_eq!((staged.route, staged.windows), (Route::CudaStaged, 14));
        // The last has no chunk: only the recurrence copies.
        assert_eq!(staged.launches, 3 * 13 + 1);
        assert!(fused.arch.is_some() && !fused.why.is_empty());
    });
}

/// A machine whose calls are captured into a graph, which is then launched.
struct Captured {
    cuda: Cuda,
    stream: sys::CUstream,
}

impl Captured {
    fn open() -> Self {
        let cuda = Cuda::open();
        // Makes the context current.
        let mut captured = Self { cuda, stream: std::ptr::null_mut() };
        captured.cuda.upload(&[0]);
        captured.cuda.clear();
        captured.stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        captured
    }
}

impl Machine for Captured {
    /// The capture begins where the call gets its device.
    fn device(&self) -> Device {
        let Device::Cuda(device) = self.cuda.device() else { panic!("it is a CUDA device") };
        // Memory is allocated and copied between here and the call, on another stream: relaxed mode allows it.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is this machine's, of the current context.
        unsafe { result::stream::begin_capture(self.stream, mode) }.unwrap();
        // SAFETY: the stream is of the device's primary context, and lives until the process ends.
        Device::Cuda(unsafe { device.on(self.stream.expose_provenance() as u64) })
    }

    /// And it ends where the call has returned and its guards are looked at.
    fn check_guards(&mut self, name: &str) {
        // SAFETY: the capture was begun by `device`; the graph is destroyed once it has run.
        unsafe {
            let graph = result::stream::end_capture(self.stream).expect("no call broke the capture");
            let mut exec = std::ptr::null_mut();
            sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0).result().unwrap();
            sys::cuGraphLaunch(exec, self.stream).result().unwrap();
            result::stream::synchronize(self.stream).unwrap();
            sys::cuGraphExecDestroy(exec).result().unwrap();
            sys::cuGraphDestroy(graph).result().unwrap();
        }
        self.cuda.check_guards(name);
    }

    fn place(&self) -> Place {
        self.cuda.place()
    }

    fn upload(&mut self, bytes: &[u8]) -> u64 {
        self.cuda.upload(bytes)
    }

    fn download(&mut self, address: u64, bytes: usize) -> Vec<u8> {
        self.cuda.download(address, bytes)
    }

    fn spans(&self) -> Vec<(u64, usize)> {
        self.cuda.spans()
    }

    fn clear(&mut self) {
        self.cuda.clear();
    }

    fn limits(&self, case: &Case) -> (f64, f64) {
        self.cuda.limits(case)
    }
}

#[test]
fn a_graph_captures_a_call_and_gives_the_same_bits() {
    on_cuda(|cuda| {
        let mut captured = Captured::open();
        let case = Recipe::new("captured", (2, 6), &[0, 100, 100, 165, 1300]).draw(41);
        for design in [Design::Fused, Design::Staged] {
            let how = How { window: 256, pools: Pools::InPlace(Dtype::F32), design, ..How::default() };
            let (direct, graph) = (run(cuda, &case, &how).unwrap(), check(&mut captured, &case, &how));
            assert!(same_bits(&direct.o, &graph.o) && same_bits(&direct.ht, &graph.ht), "{design:?}");
        }
        let case = Recipe::new("captured decode", (2, 6), &[0, 1, 4, 12]).draw(42);
        let direct = step::run(cuda, &case, Dtype::F32, &[1]).unwrap();
        let graph = step::run(&mut captured, &case, Dtype::F32, &[1]).unwrap();
        assert!(same_bits(&direct.ht, &graph.ht));
    });
}

#[test]
fn a_decode_step_gives_the_same_bits_in_any_batch() {
    on_cuda(|cuda| {
        // Batches on both sides of where another kernel takes over, with four value heads: 128 and 1024 states.
        let cu: Vec<i64> = (0..=300).map(|n| 2 * n).collect();
        for (keys, pool) in [(Keys::Raw, Dtype::F32), (Keys::Unit, Dtype::Bf16)] {
            let recipe = Recipe { keys, ..Recipe::new("decode, batches", (2, 4), &cu) };
            let case = Case { l2norm: matches!(keys, Keys::Raw), ..recipe.draw(43) };
            let whole = step::run(cuda, &case, pool, &[]).unwrap();
            let expected = case.expected();
            let (limit, _) = cuda.limits(&case);
            assert!(error(&whole.o, &expected.o) <= limit, "{:.1e}", error(&whole.o, &expected.o));
            for first in [0, 150, 299] {
                let alone = step::run(cuda, &case.alone(first), pool, &[]).unwrap();
                let (o, ht) = (2 * 4 * DIM, 4 * STATE);
                assert!(same_bits(&alone.o, &whole.o[first * o..(first + 1) * o]), "request {first}, {pool}");
                assert!(same_bits(&alone.ht, &whole.ht[first * ht..(first + 1) * ht]), "request {first}, {pool}");
            }
        }
    });
}

#[test]
fn a_decode_step_leaves_alone_what_the_devices_numbers_say_wrongly() {
    on_cuda(|cuda| {
        const HEADS: usize = 2;
        let tokens = 4_u64;
        let halves = |count: usize| encode(&vec![0.25; count], Dtype::Bf16);
        let [q, k] = [(); 2].map(|()| cuda.upload(&halves(4 * DIM)));
        let (v, o) = (cuda.upload(&halves(4 * HEADS * DIM)), cuda.upload(&halves(4 * HEADS * DIM)));
        let gates = cuda.upload(&encode(&[0.5; 4 * HEADS], Dtype::F32));
        let before = encode(&vec![1.0; 3 * HEADS * STATE], Dtype::F32);
        let pool = cuda.upload(&before);
        let numbers = |values: &[i32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        // One request that is right, then: backwards, from before the tensors, past their end, and two slots that are none.
        let cu = cuda.upload(&numbers(&[0, 1, -1, 2, 99, 3, 4]));
        let slots = cuda.upload(&numbers(&[1, 0, 2, 2, 3, i32::MIN]));
        let (place, heads) = (Place::Device, HEADS as u64);
        // SAFETY: the memory is the machine's, of these shapes.
        let args = unsafe {
            Decode {
                q: Tensor::from_raw(place, q, Dtype::Bf16, [tokens, 1, 128]),
                k: Tensor::from_raw(place, k, Dtype::Bf16, [tokens, 1, 128]),
                v: Tensor::from_raw(place, v, Dtype::Bf16, [tokens, heads, 128]),
                g: Tensor::from_raw(place, gates, Dtype::F32, [tokens, heads, 1]),
                beta: Tensor::from_raw(place, gates, Dtype::F32, [tokens, heads, 1]),
                o: TensorMut::from_raw(place, o, Dtype::Bf16, [tokens, heads, 128]),
                cu_seqlens: Indices::device(cu, 7),
                slots: Indices::device(slots, 6),
                pool: PoolMut::from_raw(place, pool, Dtype::F32, [3, heads]),
                scale: None,
                l2norm: false,
            }
        };
        terrace_kernels::decode(&cuda.device(), args).unwrap();
        cuda.check_guards("wrong numbers");
        let after = cuda.download(pool, before.len());
        let slot = HEADS * STATE * 4;
        assert_eq!(after[..slot], before[..slot], "slot 0");
        assert_ne!(after[slot..2 * slot], before[slot..2 * slot], "slot 1 is the request that is right");
        assert_eq!(after[2 * slot..], before[2 * slot..], "slot 2");
        cuda.clear();
    });
}

#[test]
fn kernels_are_compiled_once_and_a_damaged_one_again() {
    let _turn = gpu::turn();
    if gpu::require().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let prepare = || cuda::Device::open_with(0, Cache::new(folder.path(), 1 << 30)).unwrap().prepare(Element::Bf16);
    let entries = || {
        let mut all: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
        all.sort();
        all
    };
    prepare().unwrap();
    let made = entries();
    assert_eq!(made.len(), 2, "{made:?}");
    let whole = fs::read(&made[0]).unwrap();
    fs::write(&made[0], &whole[..whole.len() / 2]).unwrap();
    prepare().unwrap();
    assert_eq!(fs::read(&made[0]).unwrap(), whole, "the compiler makes the same bytes of the same text");
    assert_eq!(entries(), made);
}

/// The two bugs that others shipped, in the kernels: see `mutants.rs`.
#[test]
fn kernels_that_are_wrong_on_purpose_are_noticed() {
    let _turn = gpu::turn();
    if gpu::require().is_none() {
        return;
    }
    let small =
        |name: &str| cases::small().into_iter().filter(|(case, _)| case.name.starts_with(name)).collect::<Vec<_>>();
    for (name, mutant) in [("1 ", "GDN_MUTANT_CHAIN"), ("2 ", "GDN_MUTANT_LAST_ROW")] {
        let mut cuda = Cuda::with(cuda::Device::open_mutant(0, mutant).unwrap());
        let found = small(name);
        assert!(!found.is_empty());
        let noticed = found.iter().filter(|(case, how)| {
            let outcome = run(&mut cuda, case, how).unwrap();
            let expected = case.expected();
            let (limit, state_limit) = cuda.limits(case);
            !(error(&outcome.o, &expected.o) <= limit && error(&outcome.ht, &expected.ht) <= state_limit)
        });
        assert!(noticed.count() > 0, "no case notices {mutant}");
    }
}
