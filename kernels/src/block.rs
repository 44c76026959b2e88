//! A whole Gated DeltaNet layer in windows: norm, projections, convolution, Gated DeltaNet, gated norm, output projection, and the
//! feed-forward, from the residual stream back into it.
//!
//! ```text
//! residual  [tokens, hidden]   read and added to in place; all that is as long as the prompt
//!   mixer   window by window   x -> qkvzba -> conv_out, g, beta -> o --(adds)--> residual
//!   mlp     window by window   x -> gate_up ---------------------------(adds)--> residual
//! state     recurrent fp32, and the convolution's last inputs: from one window, call or token to the next
//! ```
//!
//! Everything else is as large as a window and comes from a [`Memory`], in the order and sizes of `shape::terrace`, which is also
//! what `plan model --engine terrace` predicts. A window changes no bit of what a CPU computes; on CUDA that holds as far as the
//! projections keep their order of summation, see `block/lt`. Weights and states lie in spans of the caller; nothing is allocated.
//!
//! Experts are not served: their models run [`Part::Mixer`]. Nor is full attention.

mod buffers;
mod checkpoint;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod geometry;
#[cfg(feature = "cuda")]
mod lt;
mod op;
mod weights;

use terrace_profiles::Memory;
use terrace_profiles::shape::terrace::{self, Run, kernel_window};
use terrace_profiles::shape::{CHUNK, Layout, Window};
use terrace_profiles::synth::MAX_DECODE;
use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::device::Device;
use crate::error::Error;
use buffers::Buffers;
use op::{Op, Piece};

#[cfg(feature = "cuda")]
pub(crate) use cuda::BLOCK_BYTES;
#[cfg(feature = "cuda")]
pub(crate) use lt::Lt;

pub use checkpoint::Checkpoint;
pub use error::BlockError;
pub use geometry::{Geometry, Part};
pub use weights::{Source, fill};

/// The state of one sequence in one layer. It says whose turn it is, so it is not to be copied.
#[derive(Debug)]
pub struct State {
    span: DeviceSpan,
    /// No token has passed: the recurrence and the convolution start from zeros, whatever the span holds.
    fresh: bool,
    /// Which of the two conv states was written last.
    turn: bool,
}

impl State {
    /// A sequence that begins, in a span of [`Geometry::state`].
    ///
    /// # Safety
    /// The span is memory of the device for as long as calls are given the state, and nobody else uses it.
    pub unsafe fn new(span: DeviceSpan) -> Self {
        Self { span, fresh: true, turn: false }
    }

    /// The sequence ends and another begins in its place.
    pub fn reset(&mut self) {
        self.fresh = true;
    }

    /// The recurrent states `[value heads, 128 (V), 128 (K)]` in fp32, and the convolution's inputs at the last three tokens,
    /// `[3, q k v]` in activations. They hold nothing before the first token.
    pub fn parts(&self, geometry: &Geometry) -> [DeviceSpan; 2] {
        let conv = if self.turn { "conv.b" } else { "conv.a" };
        let layout = geometry.state();
        [part(self.span, &layout, "recurrent"), part(self.span, &layout, conv)]
    }
}

/// A layer whose weights are in place.
#[derive(Debug)]
pub struct Layer {
    device: Device,
    geometry: Geometry,
    weights: DeviceSpan,
}

impl Layer {
    /// Puts the weights of layer `index` into a span of [`Geometry::weights`].
    ///
    /// # Errors
    /// A span that is too small, numbers that the device does not run in, weights that are missing or of another shape.
    ///
    /// # Safety
    /// The span is memory of the device for as long as the layer is used, and nobody else writes it.
    pub unsafe fn load(
        device: &Device,
        geometry: Geometry,
        weights: DeviceSpan,
        source: &Source<'_>,
        index: u64,
    ) -> Result<Self, Error> {
        geometry.check_element(device)?;
        check_span("the weights", weights, geometry.weights().total())?;
        let layer = Self { device: device.clone(), geometry, weights };
        // SAFETY: the caller's promise.
        unsafe { weights::load(&layer, source, index) }?;
        Ok(layer)
    }

    /// What it is like.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Runs the next `tokens` of a sequence through the layer, `window` of them at a time, or all where there is none. The
    /// residual stream is updated in place, and so is the state. On CUDA the work is queued on the device's stream, and the
    /// spans of a window are given back when it was queued: a memory hands them on to work of the same stream.
    ///
    /// # Errors
    /// Before anything is written: a window that is no multiple of 64, a span too small, too many tokens. Later: a memory that
    /// has no room, or what the device says; the residual stream and the state are then no longer of use.
    ///
    /// # Safety
    /// The residual stream is memory of the device with `tokens` rows, whose bytes nobody else uses until the work is done. The
    /// memory's spans are memory of the device, of their size and aligned to 256 bytes.
    pub unsafe fn prefill(
        &self,
        memory: &mut dyn Memory,
        residual: DeviceSpan,
        tokens: u64,
        state: &mut State,
        window: Option<u64>,
    ) -> Result<(), Error> {
        let walk = Walk::prefill(&self.geometry, &self.device, tokens, window)?;
        // SAFETY: the caller's promise.
        unsafe { self.forward(&walk, memory, residual, state) }
    }

    /// The same for one to eight tokens by the recurrent step, which is what decoding takes. Its bits are not those of a prefill.
    ///
    /// # Errors
    /// As [`Self::prefill`].
    ///
    /// # Safety
    /// As [`Self::prefill`].
    pub unsafe fn decode(
        &self,
        memory: &mut dyn Memory,
        residual: DeviceSpan,
        tokens: u64,
        state: &mut State,
    ) -> Result<(), Error> {
        if state.fresh {
            return Err(BlockError::Fresh.into());
        }
        let walk = Walk::decode(&self.geometry, &self.device, tokens)?;
        // SAFETY: the caller's promise.
        unsafe { self.forward(&walk, memory, residual, state) }
    }

    /// # Safety
    /// As [`Self::prefill`].
    unsafe fn forward(
        &self,
        walk: &Walk<'_>,
        memory: &mut dyn Memory,
        residual: DeviceSpan,
        state: &mut State,
    ) -> Result<(), Error> {
        check_span("the residual stream", residual, self.geometry.residual(walk.tokens)?)?;
        check_span("the state", state.span, self.geometry.state().total())?;
        walk.run(memory, |op, piece, buffers| {
            let row = self.geometry.rank.hidden * self.geometry.element.bytes();
            let residual = DeviceSpan {
                address: residual.address + piece.first * row,
                // Below what `check_span` held against the span.
                bytes: Bytes::new(piece.tokens * row).unwrap_or_default(),
            };
            // SAFETY: the caller's promise; the buffers are as large as the tables say.
            unsafe { self.run(op, piece, residual, state, buffers) }
        })
    }

    /// One operation on one window of the stream.
    ///
    /// # Safety
    /// As [`Self::prefill`], for the window's rows of the residual stream.
    unsafe fn run(
        &self,
        op: Op,
        piece: Piece,
        residual: DeviceSpan,
        state: &mut State,
        buffers: &Buffers<'_>,
    ) -> Result<(), Error> {
        let at = op::Places { layer: self, piece, residual, state, buffers };
        match op {
            // SAFETY: the caller's promise.
            Op::Gdn => unsafe { op::gdn(&at) }?,
            _ => match &self.device {
                // SAFETY: as above.
                Device::Cpu(_) => unsafe { cpu::run(op, &at) },
                #[cfg(feature = "cuda")]
                // SAFETY: as above.
                Device::Cuda(device) => unsafe { cuda::run(device, op, &at) }?,
            },
        }
        match op {
            Op::Conv => state.turn = !state.turn,
            Op::Gdn => state.fresh = false,
            _ => {}
        }
        Ok(())
    }
}

/// Asks a memory for everything that a prefill of one layer does, in its order, and computes nothing.
///
/// # Errors
/// As [`Layer::prefill`].
pub fn dry_prefill(
    geometry: &Geometry,
    device: &Device,
    memory: &mut dyn Memory,
    tokens: u64,
    window: Option<u64>,
) -> Result<(), Error> {
    Walk::prefill(geometry, device, tokens, window)?.run(memory, |_, _, _| Ok(()))
}

/// The windows of a call and how they run.
struct Walk<'a> {
    geometry: &'a Geometry,
    tokens: u64,
    window: u64,
    kernel: Option<Window>,
    run: Run,
}

impl<'a> Walk<'a> {
    fn prefill(geometry: &'a Geometry, device: &Device, tokens: u64, window: Option<u64>) -> Result<Self, BlockError> {
        let kernel = kernel_window(window).map_err(|given| BlockError::Window { given, chunk: CHUNK })?;
        Self::new(
            geometry,
            tokens,
            window.unwrap_or(tokens),
            Some(kernel),
            geometry.run(device, kernel),
            i32::MAX as u64,
        )
    }

    fn decode(geometry: &'a Geometry, device: &Device, tokens: u64) -> Result<Self, BlockError> {
        let run = geometry.run(device, Window::MIN).decode();
        Self::new(geometry, tokens, tokens, None, run, MAX_DECODE)
    }

    fn new(
        geometry: &'a Geometry,
        tokens: u64,
        window: u64,
        kernel: Option<Window>,
        run: Run,
        most: u64,
    ) -> Result<Self, BlockError> {
        if tokens == 0 || tokens > most {
            return Err(BlockError::Tokens { given: tokens, most });
        }
        Ok(Self { geometry, tokens, window: window.min(tokens), kernel, run })
    }

    /// Each operation of each window in order, with the buffers that live at it.
    fn run(
        &self,
        memory: &mut dyn Memory,
        mut each: impl FnMut(Op, Piece, &Buffers<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let rank = &self.geometry.rank;
        let halves = if self.geometry.part == Part::Layer { 2 } else { 1 };
        for (half, name) in [(0, "gdn"), (1, "mlp")].into_iter().take(halves) {
            let mut first = 0;
            while first < self.tokens {
                let tokens = self.window.min(self.tokens - first);
                let table = match half {
                    0 => terrace::gdn_mixer(rank, tokens, self.run),
                    _ => terrace::mlp(rank, tokens, self.run),
                };
                let table = table.map_err(|_| BlockError::Tokens { given: tokens, most: i32::MAX as u64 })?;
                let piece = Piece { first, tokens, kernel: self.kernel };
                buffers::walk(memory, name, &table, |op, buffers| each(Op::of(name, op), piece, buffers))?;
                first += tokens;
            }
        }
        Ok(())
    }
}

fn check_span(what: &'static str, span: DeviceSpan, needed: Bytes) -> Result<(), BlockError> {
    let given = span.bytes;
    if given < needed { Err(BlockError::Span { what, given, needed }) } else { Ok(()) }
}

/// A part of a span, by the layout's name for it.
fn part(span: DeviceSpan, layout: &Layout, name: &'static str) -> DeviceSpan {
    let part = layout.get(name).unwrap_or_else(|| panic!("{name} is a part of the layout"));
    DeviceSpan { address: span.address + part.offset.get(), bytes: part.bytes }
}
