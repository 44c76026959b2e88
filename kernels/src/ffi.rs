//! The C face: `include/terrace_gdn.h`, function by function. The header says what a caller needs to know; here is what each
//! function makes of it: views of raw pointers, then the same two calls as in Rust, with the same checks.
//!
//! No panic crosses: each function runs inside `guarded`. Pointers to structs are checked for null and alignment; whether they,
//! and the pointers in them, point at what they say is the caller's promise.

mod failure;

use std::ffi::{c_char, c_int, c_void};

use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::args::{Checkpoints, Decode, Initial, Last, Prefill, States};
use crate::cpu::Cpu;
use crate::device::{self, Device};
use crate::metadata::Sequences;
use crate::path::Path;
use crate::view::{Dtype, Indices, Place, Pool, PoolMut, Tensor, TensorMut, Workspace};
use crate::{Design, Gdn, Window};

pub use failure::Status;
use failure::{Failure, guarded, last, pointer};

/// `TERRACE_GDN_CPU`.
pub const CPU: u32 = 1;
/// `TERRACE_GDN_CUDA`.
pub const CUDA: u32 = 2;
/// `TERRACE_GDN_BF16`.
pub const BF16: u32 = 1;
/// `TERRACE_GDN_FP16`.
pub const FP16: u32 = 2;
/// `TERRACE_GDN_FP32`.
pub const FP32: u32 = 3;
/// `TERRACE_GDN_FUSED`.
pub const FUSED: u32 = 0;
/// `TERRACE_GDN_STAGED`.
pub const STAGED: u32 = 1;

/// `terrace_gdn_device`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CDevice {
    /// [`CPU`] or [`CUDA`].
    pub kind: u32,
    /// Which CUDA device.
    pub ordinal: u32,
    /// Its stream.
    pub stream: *mut c_void,
    /// Most threads on the CPU.
    pub threads: u32,
    /// 0.
    pub reserved: u32,
}

/// `terrace_gdn_tensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CTensor {
    /// The first element.
    pub data: *mut c_void,
    /// In elements; 0 is contiguous.
    pub token_stride: i64,
    /// In elements; 0 is contiguous.
    pub head_stride: i64,
    /// [`BF16`], [`FP16`] or [`FP32`].
    pub dtype: u32,
    /// 0.
    pub reserved: u32,
}

/// `terrace_gdn_pool`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CPool {
    /// The first element; null is no pool.
    pub data: *mut c_void,
    /// States of all value heads there are.
    pub slots: i64,
    /// In elements; 0 is contiguous.
    pub slot_stride: i64,
    /// [`BF16`] or [`FP32`].
    pub dtype: u32,
    /// 0.
    pub reserved: u32,
}

/// `terrace_gdn_prefill_args`. It only ever grows at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each field is that of the header, and described there")]
pub struct PrefillArgs {
    pub size: u64,
    pub device: CDevice,
    pub tokens: i64,
    pub key_heads: u32,
    pub value_heads: u32,
    pub q: CTensor,
    pub k: CTensor,
    pub v: CTensor,
    pub g: CTensor,
    pub beta: CTensor,
    pub o: CTensor,
    pub host_cu_seqlens: *const i64,
    pub sequences: i64,
    pub host_chunk_indices: *const [i64; 2],
    pub chunks: i64,
    pub host_chunk_offsets: *const i64,
    pub initial: CPool,
    pub host_initial_slots: *const i32,
    pub host_has_initial: *const u8,
    pub last: CPool,
    pub host_last_slots: *const i32,
    pub in_place: u32,
    pub checkpoint_every: u32,
    pub checkpoints: CPool,
    pub scale: f32,
    pub l2norm: u32,
    pub window: u32,
    pub design: u32,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
}

/// `terrace_gdn_decode_args`. It only ever grows at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each field is that of the header, and described there")]
pub struct DecodeArgs {
    pub size: u64,
    pub device: CDevice,
    pub tokens: i64,
    pub key_heads: u32,
    pub value_heads: u32,
    pub q: CTensor,
    pub k: CTensor,
    pub v: CTensor,
    pub g: CTensor,
    pub beta: CTensor,
    pub o: CTensor,
    pub cu_seqlens: *const i32,
    pub slots: *const i32,
    pub sequences: i64,
    pub pool: CPool,
    pub scale: f32,
    pub l2norm: u32,
}

/// `terrace_gdn_path`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CPath {
    /// Windows of a prefill.
    pub windows: u64,
    /// Chunks of a prefill.
    pub chunks: u64,
    /// Kernel launches.
    pub launches: u64,
    /// Bytes of the host's tables at a time.
    pub table_bytes: u64,
    /// As [`crate::Route::name`].
    pub route: [c_char; 32],
    /// What the kernels were compiled for.
    pub arch: [c_char; 32],
    /// In words.
    pub why: [c_char; 192],
}

/// The version: major, minor and patch, a byte each.
pub const VERSION: u32 = part(env!("CARGO_PKG_VERSION_MAJOR")) << 16
    | part(env!("CARGO_PKG_VERSION_MINOR")) << 8
    | part(env!("CARGO_PKG_VERSION_PATCH"));

const fn part(text: &str) -> u32 {
    match u32::from_str_radix(text, 10) {
        Ok(number) if number < 256 => number,
        _ => panic!("a part of the version does not fit a byte"),
    }
}

/// The version of the library, to hold against the header's `TERRACE_GDN_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_gdn_version() -> u32 {
    VERSION
}

/// The name of a status: `TERRACE_GDN_OK`. A number that is none is `TERRACE_GDN_OTHER`.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_gdn_status_name(status: c_int) -> *const c_char {
    let known = usize::try_from(status).ok().and_then(|status| Status::ALL.get(status));
    known.unwrap_or(&Status::Other).name().as_ptr()
}

/// The text of this thread's last failure; empty before the first.
#[unsafe(no_mangle)]
pub extern "C" fn terrace_gdn_last_error() -> *const c_char {
    last()
}

/// Bytes that a prefill's workspace needs.
///
/// # Safety
/// `device` is null or points at a `terrace_gdn_device`; `bytes` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_workspace_bytes(
    device: *const CDevice,
    key_heads: u32,
    value_heads: u32,
    window: u32,
    design: u32,
    bytes: *mut u64,
) -> Status {
    guarded(|| {
        let (device, out) = (pointer(device, "device")?, pointer(bytes, "bytes")?);
        // SAFETY: checked for null and alignment; the rest is the caller's promise.
        let host = unsafe { device.read() };
        let (shape, window, design) = (heads(key_heads, value_heads)?, read_window(window)?, read_design(design)?);
        let total = match host.kind {
            CPU => crate::workspace(&Device::Cpu(cpu(host)), shape, window, design).total(),
            CUDA => terrace_profiles::shape::gdn_workspace(shape, window, design).total(),
            other => return Err(no_such_kind(other)),
        };
        // SAFETY: as above; the caller lets it be written.
        unsafe { out.write(total.get()) };
        Ok(())
    })
}

/// The largest window whose workspace fits.
///
/// # Safety
/// `device` is null or points at a `terrace_gdn_device`; `window` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_choose_window(
    device: *const CDevice,
    key_heads: u32,
    value_heads: u32,
    budget: u64,
    design: u32,
    window: *mut u32,
) -> Status {
    guarded(|| {
        let (device, out) = (pointer(device, "device")?, pointer(window, "window")?);
        // SAFETY: checked for null and alignment; the rest is the caller's promise.
        let device = unsafe { read_device(device.read()) }?;
        let chosen = crate::choose_window(
            &device,
            bytes(budget, "budget")?,
            heads(key_heads, value_heads)?,
            read_design(design)?,
        )?;
        // SAFETY: as above; the caller lets it be written.
        unsafe { out.write(chosen.tokens()) };
        Ok(())
    })
}

/// Compiles and loads the kernels for one type.
///
/// # Safety
/// `device` is null or points at a `terrace_gdn_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_prepare(device: *const CDevice, dtype: u32) -> Status {
    guarded(|| {
        // SAFETY: checked for null and alignment; the rest is the caller's promise.
        let device = unsafe { read_device(pointer(device, "device")?.read()) }?;
        let dtype = read_dtype(dtype, "dtype")?;
        match device {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => match dtype {
                Dtype::Bf16 => Ok(device.prepare(crate::tile::Element::Bf16)?),
                Dtype::F16 => Ok(device.prepare(crate::tile::Element::Fp16)?),
                Dtype::F32 => Err(Failure::argument("dtype", "is fp32; expected bf16 or fp16 on CUDA")),
            },
        }
        .inspect(|()| tracing::debug!(target: "terrace::gdn", %dtype, "prepared"))
    })
}

/// A prefill.
///
/// # Safety
/// `args` is null or points at as many readable bytes as its `size` says, and what is in it is as the header says; `path` is
/// null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_prefill(args: *const PrefillArgs, path: *mut CPath) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let args = unsafe { read_args(args, "args") }?;
        // SAFETY: as above.
        let device = unsafe { read_device(args.device) }?;
        let place = place(&device);
        let Bounds { tokens, key_heads, value_heads } = bounds(args.tokens, args.key_heads, args.value_heads)?;
        let keys = [tokens, key_heads, 128];
        let values = [tokens, value_heads, 128];
        let gates = [tokens, value_heads, 1];
        // SAFETY: as above; so are the pointers in it, which the calls of `view` below rely on.
        let sequences = unsafe { read_sequences(&args) }?;
        let count = match sequences.cu_seqlens {
            Some(cu) => cu.len() - 1,
            None => 1,
        };
        // SAFETY: as above.
        let (initial_slots, last_slots, has_initial) = unsafe {
            (
                optional(args.host_initial_slots, count, "host_initial_slots")?,
                optional(args.host_last_slots, count, "host_last_slots")?,
                optional(args.host_has_initial, count, "host_has_initial")?,
            )
        };
        let has_initial: Option<Vec<bool>> = has_initial.map(|has| has.iter().map(|has| *has != 0).collect());
        let has_initial = has_initial.as_deref();
        let initial = pool(&args.initial, "initial", value_heads)?;
        let last = pool(&args.last, "last", value_heads)?;
        let checkpoints = pool(&args.checkpoints, "checkpoints", value_heads)?;
        if args.in_place != 0 && (initial.is_some() || !args.host_initial_slots.is_null()) {
            return Err(Failure::argument("initial", "is set, but in place states come from last; expected none"));
        }
        // SAFETY: as above, for each of these views.
        let call = unsafe {
            let states = match (args.in_place != 0, last) {
                (true, None) => return Err(Failure::argument("last.data", "is null; in place it is the pool")),
                (true, Some(last)) => States::InPlace { pool: last.writable(place), slots: last_slots, has_initial },
                (false, last) => States::Separate {
                    initial: initial.map(|it| Initial { pool: it.readable(place), slots: initial_slots, has_initial }),
                    last: last.map(|it| Last { pool: it.writable(place), slots: last_slots }),
                },
            };
            let checkpoints = match (args.checkpoint_every, checkpoints) {
                (0, _) => None,
                (_, None) => {
                    return Err(Failure::argument("checkpoints.data", "is null, but checkpoint_every is not 0"));
                }
                (every, Some(it)) => Some(Checkpoints { every, states: it.writable(place) }),
            };
            Prefill {
                q: view(&args.q, "q", place, keys)?.readable(),
                k: view(&args.k, "k", place, keys)?.readable(),
                v: view(&args.v, "v", place, values)?.readable(),
                g: view(&args.g, "g", place, gates)?.readable(),
                beta: view(&args.beta, "beta", place, gates)?.readable(),
                o: view(&args.o, "o", place, values)?.writable(),
                sequences,
                states,
                checkpoints,
                scale: scale(args.scale),
                l2norm: args.l2norm != 0,
                window: read_window(args.window)?,
                design: read_design(args.design)?,
            }
        };
        let span = DeviceSpan {
            address: args.workspace.expose_provenance() as u64,
            bytes: bytes(args.workspace_bytes, "workspace_bytes")?,
        };
        // SAFETY: as above.
        let workspace = unsafe { Workspace::from_raw(place, span) };
        let taken = device::prefill(&device, call, workspace)?;
        // SAFETY: as above.
        unsafe { tell(path, &taken) }
    })
}

/// A decode step.
///
/// # Safety
/// As [`terrace_gdn_prefill`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_gdn_decode(args: *const DecodeArgs, path: *mut CPath) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let args = unsafe { read_args(args, "args") }?;
        // SAFETY: as above.
        let device = unsafe { read_device(args.device) }?;
        let place = place(&device);
        let Bounds { tokens, key_heads, value_heads } = bounds(args.tokens, args.key_heads, args.value_heads)?;
        let keys = [tokens, key_heads, 128];
        let values = [tokens, value_heads, 128];
        let gates = [tokens, value_heads, 1];
        let sequences = length(args.sequences, "sequences")?;
        let states = pool(&args.pool, "pool", value_heads)?;
        let states = states.ok_or_else(|| Failure::argument("pool.data", "is null"))?;
        // SAFETY: as above, for each of these views.
        let call = unsafe {
            Decode {
                q: view(&args.q, "q", place, keys)?.readable(),
                k: view(&args.k, "k", place, keys)?.readable(),
                v: view(&args.v, "v", place, values)?.readable(),
                g: view(&args.g, "g", place, gates)?.readable(),
                beta: view(&args.beta, "beta", place, gates)?.readable(),
                o: view(&args.o, "o", place, values)?.writable(),
                cu_seqlens: indices(args.cu_seqlens, sequences.saturating_add(1), "cu_seqlens", place)?,
                slots: indices(args.slots, sequences, "slots", place)?,
                pool: states.writable(place),
                scale: scale(args.scale),
                l2norm: args.l2norm != 0,
            }
        };
        let taken = device::decode(&device, call)?;
        // SAFETY: as above.
        unsafe { tell(path, &taken) }
    })
}

/// The arguments of a caller whose header may be newer: what it knows and this library does not must be 0.
///
/// # Safety
/// Null, or as many readable bytes as the size says, which is the first field of every `T` here.
unsafe fn read_args<T: Copy>(args: *const T, name: &str) -> Result<T, Failure> {
    let known = size_of::<T>();
    let args = pointer(args, name)?;
    // SAFETY: the caller's promise; the size is the first field.
    let size = unsafe { args.cast::<u64>().read() };
    let size = usize::try_from(size).ok().filter(|size| (known..=65_536).contains(size)).ok_or_else(|| {
        Failure::argument(&format!("{name}.size"), &format!("is {size}; set it to the sizeof, which is {known} here"))
    })?;
    // SAFETY: the caller's promise; `size` is at least `known`.
    let newer = unsafe { std::slice::from_raw_parts(args.cast::<u8>().as_ptr().add(known), size - known) };
    if let Some(at) = newer.iter().position(|byte| *byte != 0) {
        let why =
            format!("asks at byte {} for what this library, {}, does not know", known + at, env!("CARGO_PKG_VERSION"));
        return Err(Failure::argument(name, &why));
    }
    // SAFETY: the caller's promise; every field takes any bits.
    Ok(unsafe { args.read() })
}

/// # Safety
/// The stream is one of that device's primary context.
unsafe fn read_device(device: CDevice) -> Result<Device, Failure> {
    match device.kind {
        CPU => Ok(Device::Cpu(cpu(device))),
        // SAFETY: the caller's promise.
        CUDA => unsafe { cuda(device) },
        other => Err(no_such_kind(other)),
    }
}

fn no_such_kind(kind: u32) -> Failure {
    Failure::argument("device.kind", &format!("is {kind}; expected TERRACE_GDN_CPU or TERRACE_GDN_CUDA"))
}

fn cpu(device: CDevice) -> Cpu {
    Cpu::new(device.threads)
}

/// # Safety
/// As [`read_device`].
#[cfg(feature = "cuda")]
unsafe fn cuda(device: CDevice) -> Result<Device, Failure> {
    let opened = crate::cuda::Device::shared(device.ordinal)?;
    // SAFETY: the caller's promise.
    Ok(Device::Cuda(unsafe { opened.on(device.stream.addr() as u64) }))
}

/// # Safety
/// None.
#[cfg(not(feature = "cuda"))]
unsafe fn cuda(_device: CDevice) -> Result<Device, Failure> {
    let text = "this library was built without CUDA: build it with its feature `cuda`".to_owned();
    Err(Failure { status: Status::NotBuilt, text })
}

fn place(device: &Device) -> Place {
    match device {
        Device::Cpu(_) => Place::Host,
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Place::Device,
    }
}

struct Bounds {
    tokens: u64,
    key_heads: u64,
    value_heads: u64,
}

fn bounds(tokens: i64, key_heads: u32, value_heads: u32) -> Result<Bounds, Failure> {
    let tokens = length(tokens, "tokens")?;
    Ok(Bounds { tokens, key_heads: key_heads.into(), value_heads: value_heads.into() })
}

fn heads(key_heads: u32, value_heads: u32) -> Result<Gdn, Failure> {
    Ok(Gdn::new(key_heads, value_heads).map_err(crate::Error::from)?)
}

fn read_window(tokens: u32) -> Result<Window, Failure> {
    if tokens == 0 { Ok(Window::DEFAULT) } else { Ok(Window::new(tokens.into()).map_err(crate::Error::from)?) }
}

fn read_design(design: u32) -> Result<Design, Failure> {
    match design {
        FUSED => Ok(Design::Fused),
        STAGED => Ok(Design::Staged),
        other => {
            let why = format!("is {other}; expected TERRACE_GDN_FUSED or TERRACE_GDN_STAGED");
            Err(Failure::argument("design", &why))
        }
    }
}

fn read_dtype(dtype: u32, name: &str) -> Result<Dtype, Failure> {
    match dtype {
        BF16 => Ok(Dtype::Bf16),
        FP16 => Ok(Dtype::F16),
        FP32 => Ok(Dtype::F32),
        other => {
            let why = format!("is {other}; expected TERRACE_GDN_BF16, TERRACE_GDN_FP16 or TERRACE_GDN_FP32");
            Err(Failure::argument(name, &why))
        }
    }
}

fn bytes(bytes: u64, name: &str) -> Result<Bytes, Failure> {
    Bytes::new(bytes).ok_or_else(|| Failure::argument(name, &format!("is {bytes}; expected less than 2^63")))
}

fn length(value: i64, name: &str) -> Result<u64, Failure> {
    u64::try_from(value).map_err(|_| Failure::argument(name, &format!("is {value}; expected 0 or more")))
}

fn scale(scale: f32) -> Option<f32> {
    (scale != 0.0).then_some(scale)
}

/// A tensor whose numbers were read, and whose pointer is still the caller's promise.
struct View {
    place: Place,
    address: u64,
    dtype: Dtype,
    shape: [u64; 3],
    strides: [u64; 2],
}

fn view(tensor: &CTensor, name: &str, place: Place, shape: [u64; 3]) -> Result<View, Failure> {
    let dtype = read_dtype(tensor.dtype, &format!("{name}.dtype"))?;
    let head = length(tensor.head_stride, &format!("{name}.head_stride"))?;
    let token = length(tensor.token_stride, &format!("{name}.token_stride"))?;
    let head = if head == 0 { shape[2] } else { head };
    let token = if token == 0 { shape[1].saturating_mul(head) } else { token };
    let address = tensor.data.expose_provenance() as u64;
    Ok(View { place, address, dtype, shape, strides: [token, head] })
}

impl View {
    /// # Safety
    /// As [`Tensor::from_raw`].
    unsafe fn readable<'a>(self) -> Tensor<'a> {
        let [token, head] = self.strides;
        // SAFETY: the caller's promise.
        unsafe { Tensor::from_raw(self.place, self.address, self.dtype, self.shape) }.strides(token, head)
    }

    /// # Safety
    /// As [`TensorMut::from_raw`].
    unsafe fn writable<'a>(self) -> TensorMut<'a> {
        let [token, head] = self.strides;
        // SAFETY: the caller's promise.
        unsafe { TensorMut::from_raw(self.place, self.address, self.dtype, self.shape) }.strides(token, head)
    }
}

/// The same for a pool.
#[derive(Clone, Copy)]
struct Slots {
    address: u64,
    dtype: Dtype,
    shape: [u64; 2],
    stride: u64,
}

/// `None` where there is no pool.
fn pool(pool: &CPool, name: &str, value_heads: u64) -> Result<Option<Slots>, Failure> {
    if pool.data.is_null() {
        return Ok(None);
    }
    let dtype = read_dtype(pool.dtype, &format!("{name}.dtype"))?;
    let slots = length(pool.slots, &format!("{name}.slots"))?;
    let stride = length(pool.slot_stride, &format!("{name}.slot_stride"))?;
    let stride = if stride == 0 { value_heads.saturating_mul(128 * 128) } else { stride };
    let address = pool.data.expose_provenance() as u64;
    Ok(Some(Slots { address, dtype, shape: [slots, value_heads], stride }))
}

impl Slots {
    /// # Safety
    /// As [`Pool::from_raw`].
    unsafe fn readable<'a>(self, place: Place) -> Pool<'a> {
        // SAFETY: the caller's promise.
        unsafe { Pool::from_raw(place, self.address, self.dtype, self.shape) }.slot_stride(self.stride)
    }

    /// # Safety
    /// As [`PoolMut::from_raw`].
    unsafe fn writable<'a>(self, place: Place) -> PoolMut<'a> {
        // SAFETY: the caller's promise.
        unsafe { PoolMut::from_raw(place, self.address, self.dtype, self.shape) }.slot_stride(self.stride)
    }
}

/// # Safety
/// The pointers in it are null, or point at as many readable values as the header says.
unsafe fn read_sequences<'a>(args: &PrefillArgs) -> Result<Sequences<'a>, Failure> {
    let sequences = if args.host_cu_seqlens.is_null() { 1 } else { length(args.sequences, "sequences")? };
    let sequences = usize::try_from(sequences).unwrap_or(usize::MAX).saturating_add(1);
    let chunks = usize::try_from(length(args.chunks, "chunks")?).unwrap_or(usize::MAX);
    // SAFETY: the caller's promise.
    unsafe {
        Ok(Sequences {
            cu_seqlens: optional(args.host_cu_seqlens, sequences, "host_cu_seqlens")?,
            chunk_indices: optional(args.host_chunk_indices, chunks, "host_chunk_indices")?,
            chunk_offsets: optional(args.host_chunk_offsets, sequences, "host_chunk_offsets")?,
        })
    }
}

/// # Safety
/// Null, or `count` readable values that live as long as is taken.
unsafe fn optional<'a, T>(at: *const T, count: usize, name: &str) -> Result<Option<&'a [T]>, Failure> {
    if at.is_null() {
        return Ok(None);
    }
    let at = pointer(at, name)?;
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Failure::argument(name, &format!("has {count} entries; expected what memory can hold")));
    }
    // SAFETY: not null and aligned; the rest is the caller's promise, and its size fits the address space.
    Ok(Some(unsafe { std::slice::from_raw_parts(at.as_ptr(), count) }))
}

/// # Safety
/// Null, or `count` readable numbers at that place until the work is done.
unsafe fn indices<'a>(at: *const i32, count: u64, name: &str, place: Place) -> Result<Indices<'a>, Failure> {
    match place {
        Place::Host => {
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            // SAFETY: the caller's promise.
            let values = unsafe { optional(at, count, name) }?;
            match values {
                Some(values) => Ok(Indices::host(values)),
                None if count == 0 => Ok(Indices::host(&[])),
                None => Err(Failure::argument(name, "is null")),
            }
        }
        // SAFETY: the caller's promise.
        Place::Device => Ok(unsafe { Indices::device(at.addr() as u64, count) }),
    }
}

/// # Safety
/// `to` is null or may be written.
unsafe fn tell(to: *mut CPath, path: &Path) -> Result<(), Failure> {
    if to.is_null() {
        return Ok(());
    }
    let told = CPath {
        windows: path.windows,
        chunks: path.chunks,
        launches: path.launches,
        table_bytes: path.table_bytes,
        route: text(path.route.name()),
        arch: text(path.arch.as_deref().unwrap_or_default()),
        why: text(&path.why),
    };
    // SAFETY: checked for null and alignment; the caller lets it be written.
    unsafe { pointer(to, "path")?.write(told) };
    Ok(())
}

/// As much of a text as fits, at the end of a character, and a null byte.
fn text<const N: usize>(from: &str) -> [c_char; N] {
    let end = (0..=from.len().min(N - 1)).rev().find(|end| from.is_char_boundary(*end)).unwrap_or(0);
    let mut into = [0; N];
    for (to, byte) in into.iter_mut().zip(from[..end].bytes()) {
        *to = byte as c_char;
    }
    into
}
