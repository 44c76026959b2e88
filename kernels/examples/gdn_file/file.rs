//! From arguments to the written file; errors are one sentence each, and leave no file.

use std::collections::HashMap;
use std::time::Instant;

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use terrace_kernels::{
    Block, Cpu, Design, Device, Gdn, Initial, Last, Path, Pool, PoolMut, Prefill, Sequences, States, Tensor, TensorMut,
    Window, Workspace, prefill, workspace,
};

const USE: &str = "use: gdn_file in.safetensors out.safetensors [--device cpu|cuda] [--window N]";

/// What a file holds.
pub struct Input {
    tokens: usize,
    shape: Gdn,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    g: Vec<f32>,
    beta: Vec<f32>,
    cu_seqlens: Vec<i64>,
    h0: Option<Vec<f32>>,
    has_initial: Option<Vec<bool>>,
    scale: Option<f32>,
    l2norm: bool,
}

/// What is written.
pub struct Output {
    o: Vec<bf16>,
    ht: Vec<f32>,
    path: Path,
    seconds: f64,
    workspace: u64,
}

/// Does what the arguments say; returns a line for people.
pub fn run(args: &[String]) -> Result<String, String> {
    let (mut files, mut device, mut window) = (Vec::new(), "cpu", Window::DEFAULT);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--device" => device = args.next().ok_or(USE)?,
            "--window" => {
                let given = args.next().ok_or(USE)?;
                let tokens = given.parse().map_err(|_| format!("--window {given} is not a number of tokens"))?;
                window = Window::new(tokens).map_err(|error| error.to_string())?;
            }
            flag if flag.starts_with('-') => return Err(format!("there is no option {flag}; {USE}")),
            _ => files.push(arg),
        }
    }
    let [from, to] = files[..] else { return Err(USE.to_owned()) };
    if !["cpu", "cuda"].contains(&device) {
        return Err(format!("--device {device} is not one of cpu and cuda"));
    }
    let bytes = std::fs::read(from).map_err(|error| format!("{from} cannot be read: {error}"))?;
    let input = Input::read(&bytes).map_err(|sentence| format!("{from}: {sentence}"))?;
    let output = match device {
        "cpu" => on_cpu(&input, window),
        #[cfg(feature = "cuda")]
        "cuda" => device::on_cuda(&input, window),
        other => Err(format!("--device {other} needs a build with feature `cuda`")),
    }
    .map_err(|sentence| format!("{from}: {sentence}"))?;
    output.write(&input, to)?;
    let Output { path, seconds, workspace, .. } = &output;
    Ok(format!(
        "{} tokens on {} in {:.3} s ({:.0} tokens/s): {} windows of {} tokens, workspace {workspace} bytes",
        input.tokens,
        path.route.name(),
        seconds,
        input.tokens as f64 / seconds,
        path.windows,
        window.tokens(),
    ))
}

impl Input {
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| format!("not a safetensors file: {error}"))?;
        let metadata = SafeTensors::read_metadata(bytes).ok().and_then(|(_, metadata)| metadata.metadata().clone());
        let text = |name: &str| metadata.as_ref().and_then(|strings| strings.get(name).cloned());
        let needed = |name: &str| file.tensor(name).map_err(|_| format!("there is no tensor '{name}'"));
        let (q, k, v) = (needed("q")?, needed("k")?, needed("v")?);
        let (&[tokens, keys, _], &[_, values, _]) = (q.shape(), v.shape()) else {
            return Err("'q' and 'v' must have three dimensions: [T, Hk, 128] and [T, Hv, 128]".to_owned());
        };
        let narrow = |heads: usize| u32::try_from(heads).unwrap_or(u32::MAX);
        let shape = Gdn::new(narrow(keys), narrow(values)).map_err(|error| error.to_string())?;
        let (g, beta, cu) = (needed("g")?, needed("beta")?, needed("cu_seqlens")?);
        for (name, view, dtype, expected) in [
            ("q", &q, Dtype::BF16, &[tokens, keys, 128][..]),
            ("k", &k, Dtype::BF16, &[tokens, keys, 128]),
            ("v", &v, Dtype::BF16, &[tokens, values, 128]),
            ("g", &g, Dtype::F32, &[tokens, values]),
            ("beta", &beta, Dtype::F32, &[tokens, values]),
            ("cu_seqlens", &cu, Dtype::I64, &cu.shape()[..1.min(cu.shape().len())]),
        ] {
            expect(name, view, dtype, expected)?;
        }
        let cu_seqlens: Vec<i64> = numbers(&cu, i64::from_le_bytes);
        let sequences =
            cu_seqlens.len().checked_sub(1).ok_or("'cu_seqlens' is empty; expected [N + 1] with a 0 first")?;
        let h0 = file.tensor("h0").ok();
        if let Some(view) = &h0 {
            expect("h0", view, Dtype::F32, &[sequences, values, 128, 128])?;
        }
        let has_initial = file.tensor("has_initial").ok();
        if let Some(view) = &has_initial {
            expect("has_initial", view, Dtype::U8, &[sequences])?;
            if h0.is_none() {
                return Err("'has_initial' is there without 'h0', the states that it speaks of".to_owned());
            }
        }
        let scale = text("scale").map(|given| {
            given.trim().parse::<f32>().map_err(|_| format!("metadata 'scale' is '{given}'; expected a number"))
        });
        let l2norm = match text("l2norm").as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(given) => return Err(format!("metadata 'l2norm' is '{given}'; expected 0 or 1")),
        };
        Ok(Self {
            tokens,
            shape,
            q: numbers(&q, bf16::from_le_bytes),
            k: numbers(&k, bf16::from_le_bytes),
            v: numbers(&v, bf16::from_le_bytes),
            g: numbers(&g, f32::from_le_bytes),
            beta: numbers(&beta, f32::from_le_bytes),
            cu_seqlens,
            h0: h0.map(|view| numbers(&view, f32::from_le_bytes)),
            has_initial: has_initial.map(|view| view.data().iter().map(|byte| *byte != 0).collect()),
            scale: scale.transpose()?,
            l2norm,
        })
    }

    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    fn heads(&self) -> (u64, u64) {
        (self.shape.key_heads().into(), self.shape.value_heads().into())
    }
}

fn expect(name: &str, view: &TensorView<'_>, dtype: Dtype, shape: &[usize]) -> Result<(), String> {
    if view.dtype() != dtype || view.shape() != shape {
        let given = (view.dtype(), view.shape());
        return Err(format!("'{name}' is {:?} {:?}; expected {dtype:?} {shape:?}", given.0, given.1));
    }
    Ok(())
}

/// A tensor's bytes may lie at any address, so they are taken one number at a time.
fn numbers<T, const SIZE: usize>(view: &TensorView<'_>, number: impl Fn([u8; SIZE]) -> T) -> Vec<T> {
    let one = |bytes: &[u8]| number(bytes.try_into().expect("chunks of that size"));
    view.data().chunks_exact(SIZE).map(one).collect()
}

fn on_cpu(input: &Input, window: Window) -> Result<Output, String> {
    let device = Device::Cpu(Cpu::default());
    let (tokens, n, (keys, values)) = (input.tokens as u64, input.sequences() as u64, input.heads());
    let total = workspace(&device, input.shape, window, Design::Fused).total();
    let mut memory = Block::zeroed(total);
    let mut o = vec![bf16::ZERO; input.v.len()];
    let mut ht = vec![0.0_f32; (n * values) as usize * 128 * 128];
    let args = Prefill {
        q: Tensor::new(&input.q[..], [tokens, keys, 128]),
        k: Tensor::new(&input.k[..], [tokens, keys, 128]),
        v: Tensor::new(&input.v[..], [tokens, values, 128]),
        g: Tensor::gates(&input.g[..], [tokens, values]),
        beta: Tensor::gates(&input.beta[..], [tokens, values]),
        o: TensorMut::new(&mut o[..], [tokens, values, 128]),
        sequences: Sequences::packed(&input.cu_seqlens),
        states: States::Separate {
            initial: input.h0.as_ref().map(|h0| Initial {
                pool: Pool::new(&h0[..], [n, values]),
                slots: None,
                has_initial: input.has_initial.as_deref(),
            }),
            last: Some(Last { pool: PoolMut::new(&mut ht[..], [n, values]), slots: None }),
        },
        checkpoints: None,
        scale: input.scale,
        l2norm: input.l2norm,
        window,
        design: Design::Fused,
    };
    let start = Instant::now();
    let path = prefill(&device, args, Workspace::blocks(&mut memory)).map_err(|error| error.to_string())?;
    Ok(Output { o, ht, path, seconds: start.elapsed().as_secs_f64(), workspace: total.get() })
}

impl Output {
    fn write(&self, input: &Input, to: &str) -> Result<(), String> {
        let (_, values) = input.heads();
        let o: Vec<u8> = self.o.iter().flat_map(|x| x.to_le_bytes()).collect();
        let ht: Vec<u8> = self.ht.iter().flat_map(|x| x.to_le_bytes()).collect();
        let shapes = (vec![input.tokens, values as usize, 128], vec![input.sequences(), values as usize, 128, 128]);
        let view = |dtype, shape, bytes| TensorView::new(dtype, shape, bytes).map_err(|error| error.to_string());
        let tensors = [("o", view(Dtype::BF16, shapes.0, &o)?), ("ht", view(Dtype::F32, shapes.1, &ht)?)];
        let about = HashMap::from([
            ("route".to_owned(), self.path.route.name().to_owned()),
            ("workspace_bytes".to_owned(), self.workspace.to_string()),
        ]);
        let bytes = safetensors::serialize(tensors, Some(about)).map_err(|error| error.to_string())?;
        std::fs::write(to, bytes).map_err(|error| format!("{to} cannot be written: {error}"))
    }
}

#[cfg(feature = "cuda")]
mod device {
    //! The same with everything copied to device 0 and back.

    use cudarc::driver::{result, sys};
    use terrace_kernels::{Dtype, Place, cuda};
    use terrace_profiles::units::DeviceSpan;

    use super::*;

    /// Device memory that is freed at the end.
    struct Memory {
        held: Vec<u64>,
        device: sys::CUdevice,
    }

    impl Memory {
        fn new() -> Result<Self, String> {
            let device = result::device::get(0).map_err(said)?;
            // SAFETY: the device is there; `drop` gives the reference back.
            let context = unsafe { result::primary_ctx::retain(device) }.map_err(said)?;
            let memory = Self { held: Vec::new(), device };
            // SAFETY: the context is retained until `drop`.
            unsafe { result::ctx::set_current(context) }.map_err(said)?;
            Ok(memory)
        }

        fn room(&mut self, bytes: usize) -> Result<u64, String> {
            // SAFETY: plain memory, freed in `drop`; the driver has no allocation of nothing.
            let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(said)?;
            self.held.push(address);
            Ok(address)
        }

        fn upload<T: Copy>(&mut self, values: &[T]) -> Result<u64, String> {
            let address = self.room(size_of_val(values))?;
            // SAFETY: the memory is as large as what is copied.
            unsafe { result::memcpy_htod_sync(address, values) }.map_err(said)?;
            Ok(address)
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            for address in self.held.drain(..) {
                // SAFETY: it came from `malloc_sync`, and the work on it was waited for.
                let _ = unsafe { result::free_sync(address) };
            }
            // SAFETY: gives back the reference that `new` took.
            let _ = unsafe { result::primary_ctx::release(self.device) };
        }
    }

    fn said(error: result::DriverError) -> String {
        format!("the CUDA driver refuses: {error:?}")
    }

    pub fn on_cuda(input: &Input, window: Window) -> Result<Output, String> {
        // Opening looks for the driver first, which the calls of `Memory` need.
        let opened = cuda::Device::open(0).map_err(|error| error.to_string())?;
        let device = Device::Cuda(opened);
        let mut memory = Memory::new()?;
        let (tokens, n, (keys, values)) = (input.tokens as u64, input.sequences() as u64, input.heads());
        let mut o = vec![bf16::ZERO; input.v.len()];
        let mut ht = vec![0.0_f32; (n * values) as usize * 128 * 128];
        let (q, k, v) = (memory.upload(&input.q)?, memory.upload(&input.k)?, memory.upload(&input.v)?);
        let (g, beta) = (memory.upload(&input.g)?, memory.upload(&input.beta)?);
        let (out, last) = (memory.upload(&o)?, memory.upload(&ht)?);
        let h0 = input.h0.as_ref().map(|h0| memory.upload(h0)).transpose()?;
        let total = workspace(&device, input.shape, window, Design::Fused).total();
        let scratch = memory.room(total.get() as usize)?;
        let mut path = None;
        let mut seconds = 0.0;
        // The first call compiles; the second is timed, and gives the same bits.
        for _ in 0..2 {
            let place = Place::Device;
            let shape = |heads| [tokens, heads, 128];
            // SAFETY: `memory` holds all of these with these shapes until the device is done.
            let (args, workspace) = unsafe {
                let args = Prefill {
                    q: Tensor::from_raw(place, q, Dtype::Bf16, shape(keys)),
                    k: Tensor::from_raw(place, k, Dtype::Bf16, shape(keys)),
                    v: Tensor::from_raw(place, v, Dtype::Bf16, shape(values)),
                    g: Tensor::from_raw(place, g, Dtype::F32, [tokens, values, 1]),
                    beta: Tensor::from_raw(place, beta, Dtype::F32, [tokens, values, 1]),
                    o: TensorMut::from_raw(place, out, Dtype::Bf16, shape(values)),
                    sequences: Sequences::packed(&input.cu_seqlens),
                    states: States::Separate {
                        initial: h0.map(|h0| Initial {
                            pool: Pool::from_raw(place, h0, Dtype::F32, [n, values]),
                            slots: None,
                            has_initial: input.has_initial.as_deref(),
                        }),
                        last: Some(Last { pool: PoolMut::from_raw(place, last, Dtype::F32, [n, values]), slots: None }),
                    },
                    checkpoints: None,
                    scale: input.scale,
                    l2norm: input.l2norm,
                    window,
                    design: Design::Fused,
                };
                (args, Workspace::from_raw(place, DeviceSpan { address: scratch, bytes: total }))
            };
            let start = Instant::now();
            path = Some(prefill(&device, args, workspace).map_err(|error| error.to_string())?);
            result::ctx::synchronize().map_err(said)?;
            seconds = start.elapsed().as_secs_f64();
        }
        // SAFETY: both are as large as what they are copied into.
        unsafe { result::memcpy_dtoh_sync(&mut o, out).and_then(|()| result::memcpy_dtoh_sync(&mut ht, last)) }
            .map_err(said)?;
        let path = path.expect("the call ran");
        Ok(Output { o, ht, path, seconds, workspace: total.get() })
    }
}
