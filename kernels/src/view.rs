//! Memory with a shape: what a caller passes in, on the host or on a device.
//!
//! Everything is a grid of rows, `[rows, heads]`, each row a run of elements:
//!
//! ```text
//! Tensor   rows = tokens, a row = one head of q, k, v or o (128) or one gate (1)
//! Pool     rows = slots,  a row = one head's state, 128 x 128, V-first: [V, K]
//! ```
//!
//! Views made from slices are safe and know how long the slice is; views of raw addresses are what their maker vouches for.
//! Nothing is checked when a view is made: the call that takes it knows the argument's name, and checks it there.
//! All reads and writes of host memory go through this file and `view/grid.rs`.

mod grid;

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};
use terrace_profiles::shape::{HEAD_DIM, WORKSPACE_ALIGN};
use terrace_profiles::units::{Bytes, DeviceSpan};

use grid::{Base, slice_at_mut, split};
pub(crate) use grid::{Grid, Part, from_bytes, rounded, to_bytes};

/// Elements of one head's state.
pub(crate) const STATE: u64 = HEAD_DIM * HEAD_DIM;

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Bytes of an element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// As people write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
            Self::F32 => "fp32",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// This process's memory.
    Host,
    /// A CUDA device's memory.
    Device,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Host => "host",
            Self::Device => "device",
        })
    }
}

/// A host slice to read from; made by `into()` from `&[bf16]`, `&[f16]` or `&[f32]`.
#[derive(Clone, Copy, Debug)]
pub struct Elements<'a>(Base, PhantomData<&'a [u8]>);

/// A host slice to write to; made by `into()` from `&mut [bf16]`, `&mut [f16]` or `&mut [f32]`.
#[derive(Debug)]
pub struct ElementsMut<'a>(Base, PhantomData<&'a mut [u8]>);

macro_rules! elements {
    ($($element:ty, $dtype:expr;)*) => {$(
        impl<'a> From<&'a [$element]> for Elements<'a> {
            fn from(slice: &'a [$element]) -> Self {
                Self(Base::of_slice(slice.as_ptr().expose_provenance(), slice.len(), $dtype), PhantomData)
            }
        }
        impl<'a> From<&'a mut [$element]> for ElementsMut<'a> {
            fn from(slice: &'a mut [$element]) -> Self {
                Self(Base::of_slice(slice.as_mut_ptr().expose_provenance(), slice.len(), $dtype), PhantomData)
            }
        }
    )*};
}

elements! {
    bf16, Dtype::Bf16;
    f16, Dtype::F16;
    f32, Dtype::F32;
}

/// q, k, v or a gate, to read: `[tokens, heads, dim]`, or `[tokens, heads]` with a `dim` of 1.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub(crate) grid: Grid,
    memory: PhantomData<&'a [u8]>,
}

/// o, to write: `[tokens, heads, dim]`.
#[derive(Debug)]
pub struct TensorMut<'a> {
    pub(crate) grid: Grid,
    memory: PhantomData<&'a mut [u8]>,
}

/// States to start from: `[slots, value heads, 128 (V), 128 (K)]`.
#[derive(Clone, Copy, Debug)]
pub struct Pool<'a> {
    pub(crate) grid: Grid,
    memory: PhantomData<&'a [u8]>,
}

/// States to write, or to update in place: `[slots, value heads, 128 (V), 128 (K)]`.
#[derive(Debug)]
pub struct PoolMut<'a> {
    pub(crate) grid: Grid,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Tensor<'a> {
    /// A contiguous `[tokens, heads, dim]` at the beginning of a host slice; [`Self::strides`] makes it a strided one.
    pub fn new(elements: impl Into<Elements<'a>>, shape: [u64; 3]) -> Self {
        Self { grid: Grid::new(elements.into().0, shape), memory: PhantomData }
    }

    /// A contiguous `[tokens, heads]` of gates at the beginning of a host slice.
    pub fn gates(elements: impl Into<Elements<'a>>, [tokens, heads]: [u64; 2]) -> Self {
        Self::new(elements, [tokens, heads, 1])
    }

    /// A contiguous `[tokens, heads, dim]` at an address.
    ///
    /// # Safety
    /// Every row of the view, with the strides it is given afterwards, is readable memory at that place, aligned to its
    /// element, that holds initialised elements and that nobody writes while a call that was given the view runs (on a
    /// device: until the work it queued is done).
    pub unsafe fn from_raw(place: Place, address: u64, dtype: Dtype, shape: [u64; 3]) -> Self {
        Self { grid: Grid::new(Base { place, address, dtype, len: None }, shape), memory: PhantomData }
    }
}

impl<'a> TensorMut<'a> {
    /// A contiguous `[tokens, heads, dim]` at the beginning of a host slice; [`Self::strides`] makes it a strided one.
    pub fn new(elements: impl Into<ElementsMut<'a>>, shape: [u64; 3]) -> Self {
        Self { grid: Grid::new(elements.into().0, shape), memory: PhantomData }
    }

    /// A contiguous `[tokens, heads, dim]` at an address.
    ///
    /// # Safety
    /// As [`Tensor::from_raw`], and writable, and nobody else reads it either.
    pub unsafe fn from_raw(place: Place, address: u64, dtype: Dtype, shape: [u64; 3]) -> Self {
        Self { grid: Grid::new(Base { place, address, dtype, len: None }, shape), memory: PhantomData }
    }

    pub(crate) fn split(&mut self, tokens: &[Range<u64>], heads: &[Range<u64>]) -> Vec<Part<'_>> {
        split(self.grid, tokens, heads)
    }
}

impl<'a> Pool<'a> {
    /// Contiguous states of so many slots and value heads at the beginning of a host slice.
    pub fn new(elements: impl Into<Elements<'a>>, [slots, value_heads]: [u64; 2]) -> Self {
        Self { grid: Grid::new(elements.into().0, [slots, value_heads, STATE]), memory: PhantomData }
    }

    /// Contiguous states of so many slots and value heads at an address.
    ///
    /// # Safety
    /// As [`Tensor::from_raw`].
    pub unsafe fn from_raw(place: Place, address: u64, dtype: Dtype, [slots, value_heads]: [u64; 2]) -> Self {
        let base = Base { place, address, dtype, len: None };
        Self { grid: Grid::new(base, [slots, value_heads, STATE]), memory: PhantomData }
    }
}

impl<'a> PoolMut<'a> {
    /// Contiguous states of so many slots and value heads at the beginning of a host slice.
    pub fn new(elements: impl Into<ElementsMut<'a>>, [slots, value_heads]: [u64; 2]) -> Self {
        Self { grid: Grid::new(elements.into().0, [slots, value_heads, STATE]), memory: PhantomData }
    }

    /// Contiguous states of so many slots and value heads at an address.
    ///
    /// # Safety
    /// As [`TensorMut::from_raw`].
    pub unsafe fn from_raw(place: Place, address: u64, dtype: Dtype, [slots, value_heads]: [u64; 2]) -> Self {
        let base = Base { place, address, dtype, len: None };
        Self { grid: Grid::new(base, [slots, value_heads, STATE]), memory: PhantomData }
    }

    pub(crate) fn split(&mut self, slots: &[Range<u64>], heads: &[Range<u64>]) -> Vec<Part<'_>> {
        split(self.grid, slots, heads)
    }
}

macro_rules! views {
    ($($view:ident, $row:literal;)*) => {$(
        impl $view<'_> {
            /// Address of the first element, on the host or on the device.
            pub fn address(&self) -> u64 {
                self.grid.address()
            }

            /// Where it is.
            pub fn place(&self) -> Place {
                self.grid.place()
            }

            /// The type of its elements.
            pub fn dtype(&self) -> Dtype {
                self.grid.dtype()
            }

            #[doc = concat!("Its ", $row, "s.")]
            pub fn rows(&self) -> u64 {
                self.grid.rows
            }

            /// Its heads.
            pub fn heads(&self) -> u64 {
                self.grid.heads
            }

            #[doc = concat!("Elements from one ", $row, " to the next.")]
            pub fn row_stride(&self) -> u64 {
                self.grid.row_stride
            }

            /// Elements from one head to the next.
            pub fn head_stride(&self) -> u64 {
                self.grid.head_stride
            }
        }
    )*};
}

views! {
    Tensor, "token";
    TensorMut, "token";
    Pool, "slot";
    PoolMut, "slot";
}

macro_rules! tensors {
    ($($view:ident)*) => {$(
        impl $view<'_> {
            /// The same with other strides, in elements: from a token to the next, and from a head to the next. The elements
            /// of a head always lie side by side.
            #[must_use]
            pub fn strides(mut self, token: u64, head: u64) -> Self {
                (self.grid.row_stride, self.grid.head_stride) = (token, head);
                self
            }

            /// Elements of a head; 1 for gates.
            pub fn dim(&self) -> u64 {
                self.grid.width
            }
        }
    )*};
}

tensors! { Tensor TensorMut }

macro_rules! pools {
    ($($view:ident)*) => {$(
        impl $view<'_> {
            /// The same with another distance from a slot to the next, in elements, such as in a pool that keeps other things
            /// of a slot beside the state.
            #[must_use]
            pub fn slot_stride(mut self, stride: u64) -> Self {
                self.grid.row_stride = stride;
                self
            }
        }
    )*};
}

pools! { Pool PoolMut }

impl Tensor<'_> {
    pub(crate) fn load(&self, token: u64, head: u64, into: &mut [f32]) {
        self.grid.load(token, head, into);
    }

    pub(crate) fn gate(&self, token: u64, head: u64) -> f32 {
        let mut gate = [0.0];
        self.grid.load(token, head, &mut gate);
        gate[0]
    }
}

impl Pool<'_> {
    pub(crate) fn load(&self, slot: u64, head: u64, into: &mut [f32]) {
        self.grid.load(slot, head, into);
    }
}

/// 32-bit numbers of a decode step, on the host or on the device: token offsets or slots.
#[derive(Clone, Copy, Debug)]
pub struct Indices<'a> {
    place: Place,
    address: u64,
    len: u64,
    host: Option<&'a [i32]>,
}

impl<'a> Indices<'a> {
    /// Numbers on the host, which are checked before anything runs.
    pub fn host(values: &'a [i32]) -> Self {
        let address = values.as_ptr().expose_provenance() as u64;
        Self { place: Place::Host, address, len: values.len() as u64, host: Some(values) }
    }

    /// Numbers on the device, which no one waits for and no one can check.
    ///
    /// # Safety
    /// `len` aligned 32-bit numbers are readable there until the work that was queued with them is done, and they obey what
    /// the call that takes them says about them.
    pub unsafe fn device(address: u64, len: u64) -> Self {
        Self { place: Place::Device, address, len, host: None }
    }

    /// Where they are.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Address of the first.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn values(&self) -> Option<&'a [i32]> {
        self.host
    }
}

/// 256 aligned bytes of a host workspace.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(256))]
pub struct Block([u8; 256]);

const _: () = assert!(size_of::<Block>() as u64 == WORKSPACE_ALIGN);

impl Block {
    /// All zeros.
    pub const ZERO: Self = Self([0; 256]);

    /// Blocks for a workspace of so many bytes.
    pub fn zeroed(bytes: Bytes) -> Vec<Self> {
        vec![Self::ZERO; bytes.get().div_ceil(WORKSPACE_ALIGN) as usize]
    }

    /// Its bytes.
    pub fn bytes(&mut self) -> &mut [u8; 256] {
        &mut self.0
    }
}

/// Memory that a call may write anything to, from the caller. Its contents are never read before they are written.
#[derive(Debug)]
pub struct Workspace<'a> {
    place: Place,
    span: DeviceSpan,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Workspace<'a> {
    /// Host memory.
    pub fn blocks(blocks: &'a mut [Block]) -> Self {
        let address = blocks.as_mut_ptr().expose_provenance() as u64;
        let span = DeviceSpan { address, bytes: Bytes::new(size_of_val(blocks) as u64).unwrap_or_default() };
        Self { place: Place::Host, span, memory: PhantomData }
    }

    /// Host memory of any alignment; a call wants it aligned to 256 bytes.
    pub fn bytes(bytes: &'a mut [u8]) -> Self {
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        let span = DeviceSpan { address, bytes: Bytes::new(bytes.len() as u64).unwrap_or_default() };
        Self { place: Place::Host, span, memory: PhantomData }
    }

    /// A span, such as the arena gives.
    ///
    /// # Safety
    /// The span is memory at that place that nobody else reads or writes while a call that was given it runs; on a device,
    /// until the work it queued is done. On the host its bytes are initialised, whatever to.
    pub unsafe fn from_raw(place: Place, span: DeviceSpan) -> Self {
        Self { place, span, memory: PhantomData }
    }

    /// Where it is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Its address and size.
    pub fn span(&self) -> DeviceSpan {
        self.span
    }

    /// As fp32 values, on the host.
    pub(crate) fn floats(&mut self) -> &mut [f32] {
        assert_eq!(self.place, Place::Host);
        assert!(self.span.address.is_multiple_of(WORKSPACE_ALIGN), "checked with the arguments");
        let len = (self.span.bytes.get() / 4) as usize;
        // SAFETY: the bytes are borrowed or vouched for by whoever made the workspace, initialised, and aligned: any bits are
        // an f32. `&mut self` keeps them to one borrower.
        unsafe { slice_at_mut(self.span.address as usize, len) }
    }
}
