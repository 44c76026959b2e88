//! From checked arguments to launches: one struct of parameters for each, passed by value, and nothing else. No copy, no wait, no
//! memory of its own; so a graph may capture it, and an error is the first launch that the driver refused.
//!
//! ```text
//! streamed one launch whose blocks stay: recur 0, 1, ... | intra 0, 1, ...     both halves one ring of slots (Hopper)
//! fused    launch 0        launch 1            ...   launch n
//!                 intra 0  recur 0 | intra 1         recur n-1         window i in half i mod 2 of the workspace
//! staged   intra 0, recur 0, output 0, intra 1, ...                    one half
//! ```
//!
//! Window `i` starts from carry `i mod 2` and leaves the state of an open sequence in the other. Streamed, states stay in registers, and
//! the second carry is where the ring's progress is kept. Streamed and fused calls give the same bits.

use std::borrow::Cow;

use terrace_profiles::shape::{Design, Gdn, Layout, Window, gdn_workspace};

use crate::args::{CheckedDecode, Decode, Prefill, Target};
use crate::cuda::{CudaError, Device, Launches, Parameters};
use crate::error::Error;
use crate::path::{Path, Route};
use crate::source::Unit;
use crate::tile::{
    Arch, Element, Entry, STREAM_CHUNKS, decode_blocks, decode_rows, has_room_to_stream, progress_words, slices,
    stream_blocks,
};
use crate::view::{Dtype, PoolMut, Tensor, TensorMut, Workspace};
use crate::window::{MAX_SEGMENTS, Segment, Step};

const L2NORM: i32 = 1;
const BETA_ELEMENT: i32 = 2;
const GATE_ELEMENT: i32 = 4;
const INITIAL_BF16: i32 = 8;
const LAST_BF16: i32 = 16;

/// `Side` in `gdn_prefill.cu`: addresses of one half of the workspace.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Side {
    q: u64,
    k: u64,
    w: u64,
    u: u64,
    p: u64,
    gate: u64,
}

/// From a token to the next, and from a head to the next, in elements.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Strides {
    token: i64,
    head: i64,
}

/// `Params` in `gdn_prefill.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct PrefillParams {
    q: u64,
    k: u64,
    v: u64,
    g: u64,
    beta: u64,
    o: u64,
    initial: u64,
    last: u64,
    carry_in: u64,
    carry_out: u64,
    checkpoints: u64,
    h: u64,
    progress: u64,
    strides: [Strides; 6],
    initial_slot: i64,
    last_slot: i64,
    recur: Side,
    intra: Side,
    scale: f32,
    key_heads: i32,
    value_heads: i32,
    flags: i32,
    every: i32,
    recur_segments: i32,
    intra_segments: i32,
    intra_slots: i32,
    half_slots: i32,
    recur_segment: [Segment; MAX_SEGMENTS],
    intra_segment: [Segment; MAX_SEGMENTS],
}

/// `decode::Params` in `gdn_decode.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct DecodeParams {
    q: u64,
    k: u64,
    v: u64,
    g: u64,
    beta: u64,
    o: u64,
    pool: u64,
    cu_seqlens: u64,
    slots: u64,
    strides: [Strides; 6],
    pool_slot: i64,
    tokens: i64,
    pool_slots: i64,
    scale: f32,
    sequences: i32,
    key_heads: i32,
    value_heads: i32,
    flags: i32,
    reserved: i32,
}

/// What the kernels' structs have to measure.
pub(crate) const PREFILL_BYTES: usize = size_of::<PrefillParams>();
pub(crate) const DECODE_BYTES: usize = size_of::<DecodeParams>();

// Kernel parameters may take 32,764 bytes since CUDA 12.1.
const _: () = assert!(PREFILL_BYTES == 4448 && PREFILL_BYTES <= 32_764);
const _: () = assert!(DECODE_BYTES == 216);

// SAFETY: `source` has the compiler hold each of these sizes against the kernel's own, and a test below the fields.
unsafe impl Parameters for PrefillParams {
    const UNIT: Unit = Unit::Prefill;
}

// SAFETY: as above.
unsafe impl Parameters for DecodeParams {
    const UNIT: Unit = Unit::Decode;
}

/// Queues a prefill on the device's stream.
pub(crate) fn prefill(device: &Device, args: Prefill<'_>, workspace: &Workspace<'_>) -> Result<Path, Error> {
    let needed = |shape, window, design| gdn_workspace(shape, window, design).total();
    let args = args.check(Target::Cuda, workspace, needed)?;
    let layout = gdn_workspace(args.shape, args.window, args.design);
    let at = Places { base: workspace.span().address, layout: &layout };

    // In place, the pool that is written is the one that is read.
    let initial = args.initial.as_ref().map(|pool| (pool.address(), pool.row_stride(), pool.dtype()));
    let last = args.last.as_ref().map(|pool| (pool.address(), pool.row_stride(), pool.dtype()));
    let initial = if args.in_place() { last } else { initial };
    let (initial, initial_slot, initial_type) = initial.unwrap_or((0, 0, Dtype::F32));
    let (last, last_slot, last_type) = last.unwrap_or((0, 0, Dtype::F32));
    let element = element(args.q.dtype());
    let flags = [
        (L2NORM, args.l2norm),
        (BETA_ELEMENT, args.beta.dtype() != Dtype::F32),
        (GATE_ELEMENT, args.g.dtype() != Dtype::F32),
        (INITIAL_BF16, initial_type == Dtype::Bf16),
        (LAST_BF16, last_type == Dtype::Bf16),
    ];
    let mut params = PrefillParams {
        q: args.q.address(),
        k: args.k.address(),
        v: args.v.address(),
        g: args.g.address(),
        beta: args.beta.address(),
        o: args.o.address(),
        initial,
        last,
        carry_in: 0,
        carry_out: 0,
        checkpoints: args.checkpoints.as_ref().map_or(0, PoolMut::address),
        h: if args.design == Design::Staged { at.of("h.a") } else { 0 },
        progress: at.of("carry.b"),
        strides: all_strides([&args.q, &args.k, &args.v], &args.o, [&args.g, &args.beta]),
        initial_slot: initial_slot.cast_signed(),
        last_slot: last_slot.cast_signed(),
        recur: Side::default(),
        intra: Side::default(),
        scale: args.scale,
        key_heads: args.shape.key_heads().cast_signed(),
        value_heads: args.shape.value_heads().cast_signed(),
        flags: union(flags),
        every: args.every().max(1).cast_signed(),
        recur_segments: 0,
        intra_segments: 0,
        intra_slots: 0,
        half_slots: args.window.slots().cast_signed(),
        recur_segment: [Segment::default(); MAX_SEGMENTS],
        intra_segment: [Segment::default(); MAX_SEGMENTS],
    };
    let mut launches = device.begin(Unit::Prefill, element)?;
    let walk = Walk { shape: args.shape, at };
    let long = args.chunks() >= STREAMED_CHUNKS * args.sequences() as u64;
    let room = has_room_to_stream(args.shape.value_heads(), launches.resident());
    // Two tables are held at a time where one window's recurrence runs beside the next one's chunks.
    let (route, design, tables) = match args.design {
        Design::Fused if long && room => (Route::CudaStreamed, "the fused design, all windows in one launch", 1),
        Design::Fused if long => (Route::CudaFused, "the fused design, a launch for each window", 2),
        Design::Fused => (Route::CudaFused, "the fused design, a launch for each window since sequences are short", 2),
        Design::Staged => (Route::CudaStaged, "the staged design, as asked", 1),
    };
    let windows = match route {
        Route::CudaStreamed => walk.streamed(&mut launches, &mut params, args.stretches(STREAM_CHUNKS), args.window)?,
        Route::CudaStaged => walk.staged(&mut launches, &mut params, args.windows())?,
        _ => walk.fused(&mut launches, &mut params, args.windows())?,
    };
    Ok(Path {
        chunks: args.chunks(),
        windows,
        table_bytes: tables * Step::TABLE_BYTES,
        ..path(route, design, device, &launches)
    })
}

/// Queues a decode step on the device's stream.
pub(crate) fn decode(device: &Device, args: Decode<'_>) -> Result<Path, Error> {
    let args = args.check(Target::Cuda)?;
    let sequences = args.slots.len();
    let value_heads = u64::from(args.shape.value_heads());
    let rows = decode_rows(args.q.rows(), sequences, value_heads);
    let blocks = decode_blocks(sequences, value_heads, rows).ok_or(CudaError::Grid { sequences, value_heads })?;
    let entry = Entry::Decode { bf16: args.pool.dtype() == Dtype::Bf16, rows };
    let mut launches = device.begin(Unit::Decode, element(args.q.dtype()))?;
    let params = decode_params(&args);
    // SAFETY: the arguments were checked, and their makers vouched for what they point at; the device's numbers, which nobody
    // could check, are checked by the kernel.
    unsafe { launches.launch(entry, blocks, &params) }?;
    Ok(path(Route::CudaDecode, "the recurrent step", device, &launches))
}

fn decode_params(args: &CheckedDecode<'_>) -> DecodeParams {
    let flags = [
        (L2NORM, args.l2norm),
        (BETA_ELEMENT, args.beta.dtype() != Dtype::F32),
        (GATE_ELEMENT, args.g.dtype() != Dtype::F32),
    ];
    DecodeParams {
        q: args.q.address(),
        k: args.k.address(),
        v: args.v.address(),
        g: args.g.address(),
        beta: args.beta.address(),
        o: args.o.address(),
        pool: args.pool.address(),
        cu_seqlens: args.cu_seqlens.address(),
        slots: args.slots.address(),
        strides: all_strides([&args.q, &args.k, &args.v], &args.o, [&args.g, &args.beta]),
        pool_slot: args.pool.row_stride().cast_signed(),
        tokens: args.q.rows().cast_signed(),
        pool_slots: args.pool.rows().cast_signed(),
        scale: args.scale,
        // `check` keeps it below 2^31.
        sequences: args.slots.len() as i32,
        key_heads: args.shape.key_heads().cast_signed(),
        value_heads: args.shape.value_heads().cast_signed(),
        flags: union(flags),
        reserved: 0,
    }
}

/// Where the parts of the workspace are.
struct Places<'a> {
    base: u64,
    layout: &'a Layout,
}

impl Places<'_> {
    fn of(&self, name: &str) -> u64 {
        let buffer = self.layout.get(name);
        self.base + buffer.expect("the layout of this design has it").offset.get()
    }

    fn side(&self, half: u64) -> Side {
        let [q, k, w, u, p, gate] = match half {
            0 => ["q.a", "k.a", "w.a", "u.a", "p.a", "gate.a"],
            _ => ["q.b", "k.b", "w.b", "u.b", "p.b", "gate.b"],
        };
        Side { q: self.of(q), k: self.of(k), w: self.of(w), u: self.of(u), p: self.of(p), gate: self.of(gate) }
    }

    /// The carries that a window reads and writes.
    fn carries(&self, window: u64) -> (u64, u64) {
        let (a, b) = (self.of("carry.a"), self.of("carry.b"));
        if window.is_multiple_of(2) { (a, b) } else { (b, a) }
    }
}

struct Walk<'a> {
    shape: Gdn,
    at: Places<'a>,
}

impl Walk<'_> {
    /// One launch for as many sequences as a table holds; windows slide through both halves.
    fn streamed(
        &self,
        launches: &mut Launches<'_>,
        params: &mut PrefillParams,
        stretches: impl Iterator<Item = Step>,
        window: Window,
    ) -> Result<u64, CudaError> {
        let (key_heads, value_heads) = (self.shape.key_heads(), self.shape.value_heads());
        (params.recur, params.intra) = (self.at.side(0), self.at.side(1));
        // A stretch that ends inside a sequence leaves its state where the next one begins: each thread reads and writes its own part.
        (params.carry_in, params.carry_out) = (self.at.of("carry.a"), self.at.of("carry.a"));
        let mut windows = 0;
        for step in stretches {
            params.recur_segments = step.segments().len() as i32;
            params.recur_segment = *step.table();
            params.intra_slots = step.slots.cast_signed();
            let blocks = stream_blocks(key_heads, value_heads, step.slots, launches.resident());
            // SAFETY: the arguments were checked, and their makers vouched for what they point at. The workspace's parts are as large as
            // the layout says, and the progress of both halves fits into a carry, as is asserted below.
            unsafe {
                launches.zero(params.progress, progress_words(window.slots(), key_heads))?;
                launches.launch(Entry::Stream, blocks, params)?;
            }
            windows += u64::from(step.slots.div_ceil(window.slots()).max(1));
        }
        Ok(windows)
    }

    /// Launch `i` holds the recurrence of window `i - 1` and the intra-chunk work of window `i`.
    fn fused(
        &self,
        launches: &mut Launches<'_>,
        params: &mut PrefillParams,
        windows: impl Iterator<Item = Step>,
    ) -> Result<u64, CudaError> {
        let mut count = 0;
        let mut before: Option<Step> = None;
        let mut windows = windows.fuse();
        loop {
            let now = windows.next();
            if before.is_none() && now.is_none() {
                return Ok(count);
            }
            self.recur(params, before.as_ref(), |window| window % 2);
            self.intra(params, now.as_ref(), |window| window % 2);
            let blocks = self.recur_blocks(params) * slices(launches.arch()) + self.intra_blocks(params);
            // SAFETY: the arguments were checked, and their makers vouched for what they point at. The workspace's parts are as
            // large as the layout says, and a launch writes the half that the one before it does not read.
            unsafe { launches.launch(Entry::Window, blocks, params) }?;
            count += u64::from(now.is_some());
            before = now;
        }
    }

    /// Three launches a window.
    fn staged(
        &self,
        launches: &mut Launches<'_>,
        params: &mut PrefillParams,
        windows: impl Iterator<Item = Step>,
    ) -> Result<u64, CudaError> {
        let mut count = 0;
        for step in windows {
            self.recur(params, Some(&step), |_| 0);
            self.intra(params, Some(&step), |_| 0);
            let outputs = step.slots * self.shape.value_heads();
            let stages = [
                (Entry::Intra, self.intra_blocks(params)),
                (Entry::Recur, self.recur_blocks(params)),
                (Entry::Output, outputs),
            ];
            for (entry, blocks) in stages {
                // SAFETY: as in `fused`; each of the three is ordered after the one before.
                unsafe { launches.launch(entry, blocks, params) }?;
            }
            count += 1;
        }
        Ok(count)
    }

    fn recur(&self, params: &mut PrefillParams, step: Option<&Step>, half: impl Fn(u64) -> u64) {
        params.recur_segments = 0;
        let Some(step) = step else { return };
        params.recur = self.at.side(half(step.index));
        (params.carry_in, params.carry_out) = self.at.carries(step.index);
        params.recur_segments = step.segments().len() as i32;
        params.recur_segment = *step.table();
    }

    fn intra(&self, params: &mut PrefillParams, step: Option<&Step>, half: impl Fn(u64) -> u64) {
        (params.intra_segments, params.intra_slots) = (0, 0);
        let Some(step) = step else { return };
        params.intra = self.at.side(half(step.index));
        params.intra_segments = step.segments().len() as i32;
        params.intra_slots = step.slots.cast_signed();
        params.intra_segment = *step.table();
    }

    fn recur_blocks(&self, params: &PrefillParams) -> u32 {
        params.recur_segments.unsigned_abs() * self.shape.value_heads()
    }

    fn intra_blocks(&self, params: &PrefillParams) -> u32 {
        params.intra_slots.unsigned_abs() * self.shape.key_heads()
    }
}

/// The progress of a ring fits into the states of as many value heads as there are key heads.
const _: () = assert!(4 * progress_words(Window::MAX.slots(), 1) as u64 <= 128 * 128 * 4);

/// From so many chunks a sequence on, on average, one launch for all windows is faster (H200, 48 value heads: 0.79 ms beside 0.85 for 32
/// sequences of 8 chunks, 1.02 beside 0.93 for 64 of 4): it walks sequences in turn, where a window walks
/// those that it holds side by side.
const STREAMED_CHUNKS: u64 = 8;

/// At most 64 segments or slots, a few blocks for each of at most 1024 heads: far from what a grid holds.
const _: () = assert!(terrace_profiles::shape::MAX_HEADS as u64 * MAX_SEGMENTS as u64 * 16 < 1 << 31);

fn path(route: Route, design: &'static str, device: &Device, launches: &Launches<'_>) -> Path {
    let why: Cow<'static, str> = match launches.arch() {
        Arch::Ptx80 => format!("the caller's CUDA device, {}, which PTX stands in for; {design}", device.name()).into(),
        _ => format!("the caller's CUDA device; {design}").into(),
    };
    Path {
        route,
        why,
        arch: Some(Cow::Borrowed(launches.arch().name())),
        windows: 0,
        chunks: 0,
        launches: launches.count(),
        table_bytes: 0,
    }
}

fn element(dtype: Dtype) -> Element {
    // `check` has refused fp32 for CUDA.
    if dtype == Dtype::F16 { Element::Fp16 } else { Element::Bf16 }
}

/// Of q, k, v, o, g and beta, in the order of both kernels' structs.
fn all_strides([q, k, v]: [&Tensor<'_>; 3], o: &TensorMut<'_>, [g, beta]: [&Tensor<'_>; 2]) -> [Strides; 6] {
    let strides = |token: u64, head: u64| Strides { token: token.cast_signed(), head: head.cast_signed() };
    let read = |tensor: &Tensor<'_>| strides(tensor.row_stride(), tensor.head_stride());
    [read(q), read(k), read(v), strides(o.row_stride(), o.head_stride()), read(g), read(beta)]
}

/// The flags that are set.
fn union<const N: usize>(flags: [(i32, bool); N]) -> i32 {
    flags.into_iter().filter(|(_, set)| *set).map(|(flag, _)| flag).sum()
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// Names and offsets of a struct's fields, by C's rules, out of its text.
    fn fields(text: &str, structure: &str) -> Vec<(String, usize)> {
        let body = text.split_once(&format!("struct {structure} {{")).unwrap().1.split_once('}').unwrap().0;
        let body: String = body.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join(" ");
        let mut fields = Vec::new();
        let mut end = 0_usize;
        for declaration in body.split(';').map(str::trim).filter(|it| !it.is_empty()) {
            let declaration = declaration.strip_prefix("const ").unwrap_or(declaration);
            let (kind, names) = declaration.split_once([' ', '*']).unwrap();
            let is_pointer = declaration[kind.len()..].trim_start().starts_with('*');
            for name in names.split(',') {
                let (name, count) = match name.trim().split_once('[') {
                    Some((name, _)) => (name, MAX_SEGMENTS),
                    None => (name, 1),
                };
                let (size, align) = match kind {
                    _ if is_pointer => (8, 8),
                    "i32" | "float" => (4, 4),
                    "i64" => (8, 8),
                    "Side" => (size_of::<Side>(), 8),
                    "Segment" => (size_of::<Segment>(), 8),
                    other => panic!("{other} in {structure}"),
                };
                end = end.next_multiple_of(align);
                fields.push((name.trim().trim_start_matches('*').trim().to_owned(), end));
                end += size * count;
            }
        }
        fields
    }

    macro_rules! offsets {
        ($structure:ty, $($field:ident)*) => {
            vec![$((stringify!($field).to_owned(), offset_of!($structure, $field))),*]
        };
    }

    /// The twelve strides by name, from where they begin.
    fn strides_at(offset: usize) -> impl Iterator<Item = (String, usize)> {
        let names = ["q", "k", "v", "o", "g", "beta"]
            .into_iter()
            .flat_map(|name| ["token", "head"].map(|of| format!("{name}_{of}")));
        names.enumerate().map(move |(index, name)| (name, offset + 8 * index))
    }

    fn check(structure: &str, unit: Unit, mut expected: Vec<(String, usize)>) {
        expected.sort_by_key(|(_, at)| *at);
        assert_eq!(fields(&unit.text(Arch::Sm80), structure), expected);
    }

    #[test]
    fn the_kernels_fields_are_the_hosts() {
        let mut prefill = offsets!(PrefillParams, q k v g beta o initial last carry_in carry_out checkpoints h progress initial_slot
            last_slot recur intra scale key_heads value_heads flags every recur_segments intra_segments intra_slots half_slots recur_segment intra_segment);
        prefill.extend(strides_at(offset_of!(PrefillParams, strides)));
        check("Params", Unit::Prefill, prefill);
        let mut decode = offsets!(DecodeParams, q k v g beta o pool cu_seqlens slots pool_slot tokens pool_slots scale sequences
            key_heads value_heads flags reserved);
        decode.extend(strides_at(offset_of!(DecodeParams, strides)));
        check("Params", Unit::Decode, decode);
        check("Side", Unit::Prefill, offsets!(Side, q k w u p gate));
        check("Segment", Unit::Prefill, offsets!(Segment, tok0 len slot0 initial last chunk0 checkpoint));
    }

    #[test]
    fn the_kernels_constants_are_the_hosts() {
        let text = Unit::Prefill.text(Arch::Sm80);
        let flags = format!(
            "enum Flags {{ L2NORM = {L2NORM}, BETA_ELEMENT = {BETA_ELEMENT}, GATE_ELEMENT = {GATE_ELEMENT}, \
             INITIAL_BF16 = {INITIAL_BF16}, LAST_BF16 = {LAST_BF16} }};"
        );
        assert!(text.contains(&flags));
        assert!(text.contains(&format!("constexpr int MAX_SLOTS = {MAX_SEGMENTS};")));
        assert!(text.contains(&format!("constexpr i32 CARRY = {};", crate::window::CARRY)));
        let text = Unit::Decode.text(Arch::Sm80);
        assert!(text.contains(&format!(
            "enum Flags {{ L2NORM = {L2NORM}, BETA16 = {BETA_ELEMENT}, GATE16 = {GATE_ELEMENT} }};"
        )));
    }
}
