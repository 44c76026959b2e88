//! What a caller passes, checked as far as it can be and turned into this crate's views. Each error names the argument.

use terrace_profiles::units::Bytes;

use super::failure::{Failure, pointer};
use super::layout::*;
use crate::cpu::Cpu;
use crate::device::Device;
use crate::metadata::Sequences;
use crate::view::{Dtype, Indices, Place, Pool, PoolMut, Tensor, TensorMut};
use crate::{Design, Gdn, Window};

/// The arguments of a caller whose header may be newer: what it knows and this library does not must be 0.
///
/// # Safety
/// Null, or as many readable bytes as the size says, which is the first field of every `T` here.
pub(super) unsafe fn read_args<T: Copy>(args: *const T, name: &str) -> Result<T, Failure> {
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
pub(super) unsafe fn read_device(device: CDevice) -> Result<Device, Failure> {
    match device.kind {
        CPU => Ok(Device::Cpu(cpu(device))),
        // SAFETY: the caller's promise.
        CUDA => unsafe { cuda(device) },
        other => Err(no_such_kind(other)),
    }
}

pub(super) fn no_such_kind(kind: u32) -> Failure {
    Failure::argument("device.kind", &format!("is {kind}; expected TERRACE_GDN_CPU or TERRACE_GDN_CUDA"))
}

pub(super) fn cpu(device: CDevice) -> Cpu {
    Cpu::new(device.threads)
}

/// # Safety
/// As [`read_device`].
#[cfg(feature = "cuda")]
pub(super) unsafe fn cuda(device: CDevice) -> Result<Device, Failure> {
    let opened = crate::cuda::Device::shared(device.ordinal)?;
    // SAFETY: the caller's promise.
    Ok(Device::Cuda(unsafe { opened.on(device.stream.addr() as u64) }))
}

/// # Safety
/// None.
#[cfg(not(feature = "cuda"))]
pub(super) unsafe fn cuda(_device: CDevice) -> Result<Device, Failure> {
    let text = "this library was built without CUDA: build it with its feature `cuda`".to_owned();
    Err(Failure { status: super::Status::NotBuilt, text })
}

pub(super) fn place(device: &Device) -> Place {
    match device {
        Device::Cpu(_) => Place::Host,
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Place::Device,
    }
}

pub(super) struct Bounds {
    pub(super) tokens: u64,
    pub(super) key_heads: u64,
    pub(super) value_heads: u64,
}

pub(super) fn bounds(tokens: i64, key_heads: u32, value_heads: u32) -> Result<Bounds, Failure> {
    let tokens = length(tokens, "tokens")?;
    Ok(Bounds { tokens, key_heads: key_heads.into(), value_heads: value_heads.into() })
}

pub(super) fn heads(key_heads: u32, value_heads: u32) -> Result<Gdn, Failure> {
    Ok(Gdn::new(key_heads, value_heads).map_err(crate::Error::from)?)
}

pub(super) fn read_window(tokens: u32) -> Result<Window, Failure> {
    if tokens == 0 { Ok(Window::DEFAULT) } else { Ok(Window::new(tokens.into()).map_err(crate::Error::from)?) }
}

pub(super) fn read_design(design: u32) -> Result<Design, Failure> {
    match design {
        FUSED => Ok(Design::Fused),
        STAGED => Ok(Design::Staged),
        other => {
            let why = format!("is {other}; expected TERRACE_GDN_FUSED or TERRACE_GDN_STAGED");
            Err(Failure::argument("design", &why))
        }
    }
}

pub(super) fn read_dtype(dtype: u32, name: &str) -> Result<Dtype, Failure> {
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

pub(super) fn bytes(bytes: u64, name: &str) -> Result<Bytes, Failure> {
    Bytes::new(bytes).ok_or_else(|| Failure::argument(name, &format!("is {bytes}; expected less than 2^63")))
}

pub(super) fn length(value: i64, name: &str) -> Result<u64, Failure> {
    u64::try_from(value).map_err(|_| Failure::argument(name, &format!("is {value}; expected 0 or more")))
}

pub(super) fn scale(scale: f32) -> Option<f32> {
    (scale != 0.0).then_some(scale)
}

/// A tensor whose numbers were read, and whose pointer is still the caller's promise.
pub(super) struct View {
    pub(super) place: Place,
    pub(super) address: u64,
    pub(super) dtype: Dtype,
    pub(super) shape: [u64; 3],
    pub(super) strides: [u64; 2],
}

pub(super) fn view(tensor: &CTensor, name: &str, place: Place, shape: [u64; 3]) -> Result<View, Failure> {
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
    pub(super) unsafe fn readable<'a>(self) -> Tensor<'a> {
        let [token, head] = self.strides;
        // SAFETY: the caller's promise.
        unsafe { Tensor::from_raw(self.place, self.address, self.dtype, self.shape) }.strides(token, head)
    }

    /// # Safety
    /// As [`TensorMut::from_raw`].
    pub(super) unsafe fn writable<'a>(self) -> TensorMut<'a> {
        let [token, head] = self.strides;
        // SAFETY: the caller's promise.
        unsafe { TensorMut::from_raw(self.place, self.address, self.dtype, self.shape) }.strides(token, head)
    }
}

/// The same for a pool.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    pub(super) address: u64,
    pub(super) dtype: Dtype,
    pub(super) shape: [u64; 2],
    pub(super) stride: u64,
}

/// `None` where there is no pool.
pub(super) fn pool(pool: &CPool, name: &str, value_heads: u64) -> Result<Option<Slots>, Failure> {
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
    pub(super) unsafe fn readable<'a>(self, place: Place) -> Pool<'a> {
        // SAFETY: the caller's promise.
        unsafe { Pool::from_raw(place, self.address, self.dtype, self.shape) }.slot_stride(self.stride)
    }

    /// # Safety
    /// As [`PoolMut::from_raw`].
    pub(super) unsafe fn writable<'a>(self, place: Place) -> PoolMut<'a> {
        // SAFETY: the caller's promise.
        unsafe { PoolMut::from_raw(place, self.address, self.dtype, self.shape) }.slot_stride(self.stride)
    }
}

/// # Safety
/// The pointers in it are null, or point at as many readable values as the header says.
pub(super) unsafe fn read_sequences<'a>(args: &PrefillArgs) -> Result<Sequences<'a>, Failure> {
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
pub(super) unsafe fn optional<'a, T>(at: *const T, count: usize, name: &str) -> Result<Option<&'a [T]>, Failure> {
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
pub(super) unsafe fn indices<'a>(at: *const i32, count: u64, name: &str, place: Place) -> Result<Indices<'a>, Failure> {
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
