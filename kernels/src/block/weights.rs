//! Where a layer's weights come from and how they are laid down: in the order and types of `shape::terrace::weights`, whatever the
//! checkpoint's own order is.
//!
//! ```text
//! Qwen3.5     in_proj_qkv  in_proj_z  in_proj_b  in_proj_a           one under the other
//! Qwen3-Next  in_proj_qkvz, in_proj_ba: for each key head its q, k, v, z and b, a  -> the same rows, gathered
//! in_proj     | q of all heads | k | v | z | b | a | zeros to a whole tile |
//! ```
//!
//! Norms of the residual stream are kept as `1 + weight`, the decay as `-e^A_log`: each in fp32, as it is used.

use terrace_profiles::shape::HEAD_DIM;
use terrace_profiles::shape::layer::Mlp;
use terrace_profiles::shape::terrace::{CONV_TAPS, projected};
use terrace_profiles::units::DeviceSpan;

use super::checkpoint::{Checkpoint, Weight};
use super::error::BlockError;
use super::{Layer, Part, op, part};
use crate::device::Device;
use crate::error::Error;
use crate::view::{Dtype, from_bytes, to_bytes};

/// Where weights come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A checkpoint, under the names that Hugging Face's classes give them.
    Checkpoint(&'a Checkpoint),
    /// Made up: the same for every device, so large that a layer changes its stream without blowing it up.
    Random {
        /// Another seed, other weights.
        seed: u64,
    },
}

/// Puts everything in its place.
///
/// # Safety
/// The layer's span is memory of its device that nobody else uses.
pub(super) unsafe fn load(layer: &Layer, source: &Source<'_>, index: u64) -> Result<(), Error> {
    let whole = layer.geometry.part == Part::Layer;
    let numbers = op::index().map(i32::to_le_bytes).concat();
    // SAFETY: the caller's promise, here and below.
    unsafe { put(layer, "index", 0, &numbers) }?;
    match source {
        Source::Checkpoint(checkpoint) => {
            let from = From { layer, checkpoint, index };
            // SAFETY: as above.
            unsafe { from.mixer() }?;
            if whole {
                // SAFETY: as above.
                unsafe { from.mlp() }?;
            }
        }
        Source::Random { seed } => {
            let seed = mix(seed.wrapping_add(mix(index)));
            // SAFETY: as above.
            unsafe { random(layer, seed, whole) }?;
        }
    }
    Ok(())
}

/// Copies bytes into a part of the weights, `skip` bytes from its beginning.
///
/// # Safety
/// As [`load`].
unsafe fn put(layer: &Layer, name: &'static str, skip: u64, bytes: &[u8]) -> Result<(), Error> {
    let to = part(layer.weights, &layer.geometry.weights(), name);
    assert!(skip + bytes.len() as u64 <= to.bytes.get(), "{name} has room for what is put there");
    // SAFETY: the caller's promise, and the part has room.
    unsafe { copy_in(&layer.device, to.address + skip, bytes) }
}

/// Copies bytes to memory of a device, and waits.
///
/// # Safety
/// There is room, and nobody else uses it.
unsafe fn copy_in(device: &Device, address: u64, bytes: &[u8]) -> Result<(), Error> {
    match device {
        Device::Cpu(_) => {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        }
        #[cfg(feature = "cuda")]
        // SAFETY: as above.
        Device::Cuda(device) => unsafe { device.upload(address, bytes) }?,
    }
    Ok(())
}

/// A layer of a checkpoint.
struct From<'a> {
    layer: &'a Layer,
    checkpoint: &'a Checkpoint,
    index: u64,
}

impl From<'_> {
    /// # Safety
    /// As [`load`].
    unsafe fn mixer(&self) -> Result<(), Error> {
        let rank = &self.layer.geometry.rank;
        // SAFETY: the caller's promise, here and below.
        unsafe {
            self.vector("in_norm", "input_layernorm.weight", rank.hidden, |x| 1.0 + x)?;
            self.in_proj()?;
            self.conv()?;
            self.vector("decay", "linear_attn.A_log", rank.value_heads, |x| -x.exp())?;
            self.vector("dt_bias", "linear_attn.dt_bias", rank.value_heads, |x| x)?;
            self.vector("gated_norm", "linear_attn.norm.weight", HEAD_DIM, |x| x)?;
            self.matrix("out_proj", 0, "linear_attn.out_proj.weight", rank.hidden, rank.values())
        }
    }

    /// # Safety
    /// As [`load`].
    unsafe fn mlp(&self) -> Result<(), Error> {
        let rank = &self.layer.geometry.rank;
        let Mlp::Dense { intermediate } = rank.mlp else { return Ok(()) };
        // SAFETY: the caller's promise, here and below.
        unsafe {
            self.vector("mlp_norm", "post_attention_layernorm.weight", rank.hidden, |x| 1.0 + x)?;
            self.matrix("gate_up", 0, "mlp.gate_proj.weight", intermediate, rank.hidden)?;
            self.matrix("gate_up", intermediate, "mlp.up_proj.weight", intermediate, rank.hidden)?;
            self.matrix("down", 0, "mlp.down_proj.weight", rank.hidden, intermediate)
        }
    }

    /// The four projections of the input, in either order.
    ///
    /// # Safety
    /// As [`load`].
    unsafe fn in_proj(&self) -> Result<(), Error> {
        let rank = &self.layer.geometry.rank;
        let (hidden, heads, group) = (rank.hidden, rank.key_heads, rank.value_heads / rank.key_heads);
        let keys = heads * HEAD_DIM;
        let (z, b) = (rank.qkv(), rank.qkv() + rank.values());
        let a = b + rank.value_heads;
        // SAFETY: the caller's promise, here and below.
        unsafe {
            self.zeros(a + rank.value_heads)?;
            if !self.checkpoint.has(self.index, "linear_attn.in_proj_qkvz.weight") {
                self.matrix("in_proj", 0, "linear_attn.in_proj_qkv.weight", rank.qkv(), hidden)?;
                self.matrix("in_proj", z, "linear_attn.in_proj_z.weight", rank.values(), hidden)?;
                self.matrix("in_proj", b, "linear_attn.in_proj_b.weight", rank.value_heads, hidden)?;
                return self.matrix("in_proj", a, "linear_attn.in_proj_a.weight", rank.value_heads, hidden);
            }
            let qkvz = self.read("linear_attn.in_proj_qkvz.weight", &[rank.qkv() + rank.values(), hidden])?;
            let values = group * HEAD_DIM;
            let mut from = 0;
            for head in 0..heads {
                let pieces = [
                    (head * HEAD_DIM, HEAD_DIM),
                    (keys + head * HEAD_DIM, HEAD_DIM),
                    (2 * keys + head * values, values),
                    (z + head * values, values),
                ];
                for (to, rows) in pieces {
                    self.rows("in_proj", to, &qkvz, from, rows, hidden)?;
                    from += rows;
                }
            }
            let ba = self.read("linear_attn.in_proj_ba.weight", &[2 * rank.value_heads, hidden])?;
            for head in 0..heads {
                self.rows("in_proj", b + head * group, &ba, 2 * head * group, group, hidden)?;
                self.rows("in_proj", a + head * group, &ba, (2 * head + 1) * group, group, hidden)?;
            }
        }
        Ok(())
    }

    /// The rows of the input projection that only fill its last tile.
    ///
    /// # Safety
    /// As [`load`].
    unsafe fn zeros(&self, used: u64) -> Result<(), Error> {
        let geometry = &self.layer.geometry;
        let row = geometry.rank.hidden * geometry.element.bytes();
        let zeros = vec![0; ((projected(&geometry.rank) - used) * row) as usize];
        // SAFETY: the caller's promise.
        unsafe { put(self.layer, "in_proj", used * row, &zeros) }
    }

    /// `[channels, 1, taps]`, laid down one tap after the other.
    ///
    /// # Safety
    /// As [`load`].
    unsafe fn conv(&self) -> Result<(), Error> {
        let channels = self.layer.geometry.rank.qkv();
        let weight = self.read("linear_attn.conv1d.weight", &[channels, 1, CONV_TAPS])?;
        let weight = from_bytes(&weight.bytes, weight.dtype);
        let taps = CONV_TAPS as usize;
        let by_tap = |tap: usize| weight.iter().skip(tap).step_by(taps);
        let laid: Vec<f32> = (0..taps).flat_map(by_tap).copied().collect();
        // SAFETY: the caller's promise.
        unsafe { put(self.layer, "conv", 0, &to_bytes(&laid, Dtype::F32)) }
    }

    /// # Safety
    /// As [`load`].
    unsafe fn vector(&self, to: &'static str, name: &str, len: u64, change: impl Fn(f32) -> f32) -> Result<(), Error> {
        let weight = self.read(name, &[len])?;
        let changed: Vec<f32> = from_bytes(&weight.bytes, weight.dtype).into_iter().map(change).collect();
        // SAFETY: the caller's promise.
        unsafe { put(self.layer, to, 0, &to_bytes(&changed, Dtype::F32)) }
    }

    /// `[outputs, inputs]`, from row `first` of the part on.
    ///
    /// # Safety
    /// As [`load`].
    unsafe fn matrix(&self, to: &'static str, first: u64, name: &str, outputs: u64, inputs: u64) -> Result<(), Error> {
        let weight = self.read(name, &[outputs, inputs])?;
        // SAFETY: the caller's promise.
        unsafe { self.rows(to, first, &weight, 0, outputs, inputs) }
    }

    /// Rows of a read matrix, in the layer's type.
    ///
    /// # Safety
    /// As [`load`].
    unsafe fn rows(
        &self,
        to: &'static str,
        first: u64,
        from: &Weight,
        from_row: u64,
        rows: u64,
        inputs: u64,
    ) -> Result<(), Error> {
        let element = self.layer.geometry.element;
        let row = inputs * from.dtype.bytes();
        let bytes = &from.bytes[(from_row * row) as usize..((from_row + rows) * row) as usize];
        let skip = first * inputs * element.bytes();
        // SAFETY: the caller's promise, both times.
        unsafe {
            if from.dtype == element {
                return put(self.layer, to, skip, bytes);
            }
            put(self.layer, to, skip, &to_bytes(&from_bytes(bytes, from.dtype), element))
        }
    }

    fn read(&self, name: &str, shape: &[u64]) -> Result<Weight, BlockError> {
        let weight = self.checkpoint.read(self.index, name, shape)?;
        tracing::debug!(target: "terrace::kernels", name = weight.name, "weight read");
        Ok(weight)
    }
}

/// Made-up weights. The decays spread from slow to fast over the heads, as those of trained layers do.
///
/// # Safety
/// As [`load`].
unsafe fn random(layer: &Layer, seed: u64, whole: bool) -> Result<(), Error> {
    let (rank, element) = (&layer.geometry.rank, layer.geometry.element);
    let layout = layer.geometry.weights();
    let fp32 = |values: Vec<f32>| to_bytes(&values, Dtype::F32);
    let heads = rank.value_heads as usize;
    let decay = (0..heads).map(|head| -16.0_f32.powf(head as f32 / heads as f32) / 4.0).collect();
    let conv = (0..CONV_TAPS * rank.qkv()).map(|at| uniform(seed ^ 0xc, at) * 0.5).collect();
    // The norms do nothing but norm.
    let ones = |len: u64| fp32(vec![1.0; len as usize]);
    let used = rank.qkv() + rank.values() + 2 * rank.value_heads;
    let unit = |inputs: u64| (3.0 / inputs as f32).sqrt();
    let mut matrices = vec![
        ("in_proj", used * rank.hidden, unit(rank.hidden)),
        ("out_proj", rank.hidden * rank.values(), 0.25 * unit(rank.values())),
    ];
    // SAFETY: the caller's promise, here and below.
    unsafe {
        put(layer, "in_norm", 0, &ones(rank.hidden))?;
        put(layer, "conv", 0, &fp32(conv))?;
        put(layer, "decay", 0, &fp32(decay))?;
        put(layer, "dt_bias", 0, &fp32(vec![-2.0; heads]))?;
        put(layer, "gated_norm", 0, &ones(HEAD_DIM))?;
        if let (true, Mlp::Dense { intermediate }) = (whole, rank.mlp) {
            put(layer, "mlp_norm", 0, &ones(rank.hidden))?;
            matrices.push(("gate_up", 2 * intermediate * rank.hidden, unit(rank.hidden)));
            matrices.push(("down", rank.hidden * intermediate, unit(intermediate)));
        }
        let rest = (projected(rank) - used) * rank.hidden * element.bytes();
        put(layer, "in_proj", used * rank.hidden * element.bytes(), &vec![0; rest as usize])?;
        for (salt, (name, count, scale)) in matrices.into_iter().enumerate() {
            let to = part(layer.weights, &layout, name);
            fill(&layer.device, to, element, count, seed ^ salt as u64, scale)?;
        }
    }
    Ok(())
}

/// Fills a span with `count` numbers spread evenly from `-scale` to `scale`: number `i` is a function of seed and `i`, the same
/// on every device but for its rounding to `element`. On CUDA it is queued on the device's stream.
///
/// # Errors
/// A span that is too small, or what the device says.
///
/// # Safety
/// The span is memory of the device, and nobody else uses it until the work is done.
pub unsafe fn fill(
    device: &Device,
    span: DeviceSpan,
    element: Dtype,
    count: u64,
    seed: u64,
    scale: f32,
) -> Result<(), Error> {
    let needed = count.checked_mul(element.bytes()).and_then(terrace_profiles::units::Bytes::new);
    let needed = needed.ok_or(BlockError::Tokens { given: count, most: u64::MAX >> 3 })?;
    super::check_span("the numbers to be filled in", span, needed)?;
    match device {
        Device::Cpu(_) => {
            // A piece at a time, so that the heap holds little.
            const PIECE: u64 = 1 << 16;
            for first in (0..count).step_by(PIECE as usize) {
                let piece: Vec<f32> = (first..count.min(first + PIECE)).map(|at| uniform(seed, at) * scale).collect();
                // SAFETY: the caller's promise, and the span was checked.
                unsafe { copy_in(device, span.address + first * element.bytes(), &to_bytes(&piece, element)) }?;
            }
        }
        #[cfg(feature = "cuda")]
        // SAFETY: as above.
        Device::Cuda(device) => unsafe { super::cuda::fill(device, span.address, element, count, seed, scale) }?,
    }
    Ok(())
}

/// From -1 to 1, in steps of 2^-23. `uniform` in `block.cu` is the same.
fn uniform(seed: u64, at: u64) -> f32 {
    (mix(seed ^ mix(at)) >> 40) as f32 * (1.0 / (1 << 23) as f32) - 1.0
}

/// SplitMix64's finaliser.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
