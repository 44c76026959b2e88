//! Rows in memory underneath the views: where each lies, how it is read, and how writing is shared out among tasks.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::{Dtype, Place};

/// Where elements are, of which type, and how many if that is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base {
    pub place: Place,
    pub address: u64,
    pub dtype: Dtype,
    pub len: Option<u64>,
}

impl Base {
    pub fn of_slice(address: usize, len: usize, dtype: Dtype) -> Self {
        Self { place: Place::Host, address: address as u64, dtype, len: Some(len as u64) }
    }
}

/// A grid of rows in memory; what the four views are underneath.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    base: Base,
    pub rows: u64,
    pub heads: u64,
    /// Elements of a row, which lie side by side.
    pub width: u64,
    /// Elements from a row to the same head's next.
    pub row_stride: u64,
    /// Elements from a head to the next.
    pub head_stride: u64,
}

impl Grid {
    pub fn new(base: Base, [rows, heads, width]: [u64; 3]) -> Self {
        Self { base, rows, heads, width, row_stride: heads.saturating_mul(width), head_stride: width }
    }

    pub fn address(&self) -> u64 {
        self.base.address
    }

    pub fn dtype(&self) -> Dtype {
        self.base.dtype
    }

    pub fn place(&self) -> Place {
        self.base.place
    }

    /// Elements that the slice has; `None` for a raw address.
    pub fn len(&self) -> Option<u64> {
        self.base.len
    }

    pub fn is_empty(&self) -> bool {
        self.rows == 0 || self.heads == 0 || self.width == 0
    }

    /// Elements from the first to the one after the last; `None` beyond 2^63 bytes.
    pub fn extent(&self) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        let rows = (self.rows - 1).checked_mul(self.row_stride)?;
        let heads = (self.heads - 1).checked_mul(self.head_stride)?;
        let elements = rows.checked_add(heads)?.checked_add(self.width)?;
        let end = elements.checked_mul(self.dtype().bytes())?.checked_add(self.address())?;
        (end <= i64::MAX as u64).then_some(elements)
    }

    /// Whether no two rows share an element.
    pub fn is_injective(&self) -> bool {
        let nests = |inner: u64, inner_count: u64, outer: u64, outer_count: u64| {
            let span = (inner_count - 1).checked_mul(inner).and_then(|sum| sum.checked_add(self.width));
            (inner_count == 1 || inner >= self.width) && (outer_count == 1 || span.is_some_and(|span| outer >= span))
        };
        self.is_empty()
            || nests(self.head_stride, self.heads, self.row_stride, self.rows)
            || nests(self.row_stride, self.rows, self.head_stride, self.heads)
    }

    /// Whether the two may share a byte. Exact for slices of one buffer with the same row stride, such as o beside v in a
    /// fused buffer; otherwise by the first and the last byte.
    pub fn may_overlap(&self, other: &Self) -> bool {
        if self.is_empty() || other.is_empty() || self.place() != other.place() {
            return false;
        }
        let ((start, end), (other_start, other_end)) = (self.byte_range(), other.byte_range());
        if end <= other_start || other_end <= start {
            return false;
        }
        let period = self.row_stride.saturating_mul(self.dtype().bytes());
        if period == 0 || period != other.row_stride.saturating_mul(other.dtype().bytes()) {
            return true;
        }
        // Both repeat with one period, so it is enough to look at one: do the heads of a row meet, wherever it begins?
        let own = self.row_bytes();
        let theirs = other.row_bytes();
        let shift = (i128::from(other_start) - i128::from(start)).rem_euclid(i128::from(period)) as u64;
        !(own <= shift && shift.saturating_add(theirs) <= period)
    }

    /// The first byte and the one after the last.
    pub fn byte_range(&self) -> (u64, u64) {
        let elements = self.extent().unwrap_or(u64::MAX);
        (self.address(), self.address().saturating_add(elements.saturating_mul(self.dtype().bytes())))
    }

    /// Bytes from the first head of a row to the end of its last.
    fn row_bytes(&self) -> u64 {
        let elements = (self.heads - 1).saturating_mul(self.head_stride).saturating_add(self.width);
        elements.saturating_mul(self.dtype().bytes())
    }

    /// Where a row of host memory begins, once it is sure that it lies in what the view was made of.
    fn row(&self, row: u64, head: u64) -> usize {
        assert!(row < self.rows && head < self.heads, "row {row} of {}, head {head} of {}", self.rows, self.heads);
        assert_eq!(self.place(), Place::Host);
        let first = row * self.row_stride + head * self.head_stride;
        assert!(self.len().is_none_or(|len| first + self.width <= len), "a row lies inside its slice");
        (self.address() + first * self.dtype().bytes()) as usize
    }

    pub fn load(&self, row: u64, head: u64, into: &mut [f32]) {
        assert_eq!(into.len() as u64, self.width);
        let address = self.row(row, head);
        // SAFETY: `row` checked that the row lies in the slice that the view was made of, or its maker vouched for the whole
        // grid; a slice is aligned and holds any bits, and its maker vouched for that too. Nobody writes it meanwhile: the
        // view borrows it, and `Part`s that write share no row.
        unsafe {
            match self.dtype() {
                Dtype::Bf16 => widen(slice_at::<bf16>(address, into.len()), into, bf16::to_f32),
                Dtype::F16 => {
                    half::slice::HalfFloatSliceExt::convert_to_f32_slice(slice_at::<f16>(address, into.len()), into);
                }
                Dtype::F32 => into.copy_from_slice(slice_at::<f32>(address, into.len())),
            }
        }
    }
}

/// # Safety
/// `len` elements at `address` are readable, aligned, initialised and not written for the lifetime that is taken.
unsafe fn slice_at<'a, T>(address: usize, len: usize) -> &'a [T] {
    // SAFETY: what the caller owes.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len) }
}

/// # Safety
/// As [`slice_at`], and nobody else reads or writes them.
pub(super) unsafe fn slice_at_mut<'a, T>(address: usize, len: usize) -> &'a mut [T] {
    // SAFETY: what the caller owes.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), len) }
}

fn widen<T: Copy>(from: &[T], into: &mut [f32], convert: impl Fn(T) -> f32) {
    for (value, from) in into.iter_mut().zip(from) {
        *value = convert(*from);
    }
}

/// The numbers that bytes of that type hold, little-endian; a rest that is no whole number is left out.
pub(crate) fn from_bytes(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let pairs = |of: fn([u8; 2]) -> f32| bytes.chunks_exact(2).map(|pair| of([pair[0], pair[1]])).collect();
    match dtype {
        Dtype::Bf16 => pairs(|pair| bf16::from_le_bytes(pair).to_f32()),
        Dtype::F16 => pairs(|pair| f16::from_le_bytes(pair).to_f32()),
        Dtype::F32 => {
            bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect()
        }
    }
}

/// Numbers as bytes of that type, little-endian, each rounded to the nearest, ties to even.
pub(crate) fn to_bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::Bf16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

/// Rounded to the nearest number of that type, ties to even.
#[inline(always)]
pub(crate) fn rounded(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::F32 => value,
    }
}

/// Rows of a view that one task alone writes: the given rows of the given heads.
#[derive(Debug)]
pub(crate) struct Part<'a> {
    grid: Grid,
    rows: Range<u64>,
    heads: Range<u64>,
    memory: PhantomData<&'a mut [u8]>,
}

impl Part<'_> {
    fn owns(&self, row: u64, head: u64) {
        assert!(self.rows.contains(&row) && self.heads.contains(&head), "row {row}, head {head} of another part");
    }

    pub fn load(&self, row: u64, head: u64, into: &mut [f32]) {
        self.owns(row, head);
        self.grid.load(row, head, into);
    }

    /// Writes a row, rounded to the nearest element, ties to even.
    pub fn store(&mut self, row: u64, head: u64, from: &[f32]) {
        self.owns(row, head);
        assert_eq!(from.len() as u64, self.grid.width);
        let address = self.grid.row(row, head);
        // SAFETY: as in `load`; and the row is this part's, which no other part shares: `split` saw to it.
        unsafe {
            match self.grid.dtype() {
                Dtype::Bf16 => narrow(from, slice_at_mut::<bf16>(address, from.len()), bf16::from_f32),
                Dtype::F16 => {
                    half::slice::HalfFloatSliceExt::convert_from_f32_slice(
                        slice_at_mut::<f16>(address, from.len()),
                        from,
                    );
                }
                Dtype::F32 => slice_at_mut::<f32>(address, from.len()).copy_from_slice(from),
            }
        }
    }
}

fn narrow<T>(from: &[f32], into: &mut [T], convert: impl Fn(f32) -> T) {
    for (value, from) in into.iter_mut().zip(from) {
        *value = convert(*from);
    }
}

/// One part for each pair of a range of rows and a range of heads, rows outermost.
pub(super) fn split<'a>(grid: Grid, rows: &[Range<u64>], heads: &[Range<u64>]) -> Vec<Part<'a>> {
    assert!(grid.is_injective(), "rows of what is written do not share elements");
    assert!(disjoint(rows), "no row is written twice");
    assert!(disjoint(heads), "no head is written twice");
    let part = |rows: &Range<u64>, heads: &Range<u64>| Part {
        grid,
        rows: rows.clone(),
        heads: heads.clone(),
        memory: PhantomData,
    };
    rows.iter().flat_map(|rows| heads.iter().map(move |heads| part(rows, heads))).collect()
}

fn disjoint(ranges: &[Range<u64>]) -> bool {
    let mut sorted: Vec<_> =
        ranges.iter().filter(|range| !range.is_empty()).map(|range| (range.start, range.end)).collect();
    sorted.sort_unstable();
    sorted.is_sorted_by(|a, b| a.1 <= b.0)
}

#[cfg(test)]
mod tests {
    use super::super::{Tensor, TensorMut};
    use super::*;

    #[test]
    fn a_row_is_read_and_written_where_its_strides_say() {
        let mut memory: Vec<f32> = (0..48_u8).map(f32::from).collect();
        let view = Tensor::new(&memory[3..], [3, 2, 4]).strides(15, 5);
        let mut row = [0.0; 4];
        view.load(2, 1, &mut row);
        assert_eq!(row, [38.0, 39.0, 40.0, 41.0]);
        let mut out = TensorMut::new(&mut memory[3..], [3, 2, 4]).strides(15, 5);
        let mut parts = out.split(&[0..1, 1..3], &[0..1, 1..2]);
        parts[3].store(2, 1, &[-1.0; 4]);
        assert_eq!(memory[37..43], [37.0, -1.0, -1.0, -1.0, -1.0, 42.0]);
    }

    #[test]
    fn halves_are_rounded_to_nearest_even() {
        let mut memory = [bf16::ZERO; 2];
        let mut out = TensorMut::new(&mut memory[..], [1, 1, 2]);
        out.split(&[0..1, 1..1], &[0..1, 1..1])[0].store(0, 0, &[1.0 + 3.0 / 256.0, f32::NAN]);
        assert_eq!(memory[0].to_f32(), 1.0 + 2.0 / 128.0);
        assert!(memory[1].is_nan());
        let mut memory = [f16::ZERO; 2];
        let mut out = TensorMut::new(&mut memory[..], [1, 1, 2]);
        out.split(&[0..1, 1..1], &[0..1, 1..1])[0].store(0, 0, &[1.0 + 3.0 / 2048.0, 1e6]);
        assert_eq!(memory.map(f16::to_f32), [1.0 + 2.0 / 1024.0, f32::INFINITY]);
    }

    #[test]
    #[should_panic(expected = "of another part")]
    fn a_part_writes_its_own_rows_only() {
        let mut memory = [0.0_f32; 8];
        let mut out = TensorMut::new(&mut memory[..], [2, 2, 2]);
        out.split(&[0..1, 1..2], &[0..2, 2..2])[0].store(1, 0, &[0.0; 2]);
    }

    #[test]
    #[should_panic(expected = "no row is written twice")]
    fn parts_share_no_row() {
        let mut memory = [0.0_f32; 8];
        TensorMut::new(&mut memory[..], [2, 2, 2]).split(&[0..2, 1..2], &[0..2, 2..2]);
    }

    #[test]
    #[should_panic(expected = "inside its slice")]
    fn a_row_beyond_the_slice_is_not_read() {
        Tensor::new(&[0.0_f32; 8][..], [3, 1, 4]).load(2, 0, &mut [0.0; 4]);
    }

    #[test]
    fn overlap_is_exact_inside_one_fused_buffer() {
        let grid = |address, width, stride| {
            // SAFETY: never read.
            let view = unsafe { Tensor::from_raw(Place::Device, address, Dtype::Bf16, [10, 2, width]) };
            view.strides(stride, width).grid
        };
        // Rows of 32 bytes, of which a takes [0, 16) and b [16, 32).
        let (a, b) = (grid(0, 4, 16), grid(16, 4, 16));
        assert!(!a.may_overlap(&b) && !b.may_overlap(&a));
        assert!(a.may_overlap(&a));
        assert!(a.may_overlap(&grid(14, 4, 16)) && grid(14, 4, 16).may_overlap(&a));
        assert!(a.may_overlap(&grid(18, 4, 16)));
        assert!(a.may_overlap(&grid(16, 4, 20)), "other periods: by their ends");
        assert!(!a.may_overlap(&grid(304, 4, 20)));
    }

    #[test]
    fn rows_that_share_elements_are_seen() {
        let grid = |token, head| Tensor::new(&[0.0_f32; 0][..], [5, 3, 4]).strides(token, head).grid;
        assert!(grid(12, 4).is_injective() && grid(4, 20).is_injective() && grid(100, 5).is_injective());
        assert!(!grid(11, 4).is_injective() && !grid(12, 3).is_injective() && !grid(0, 4).is_injective());
        assert!(!grid(u64::MAX, u64::MAX).is_injective());
    }
}
