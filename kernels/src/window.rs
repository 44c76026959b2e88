//! The walk through all chunks, a window of them at a time.
//!
//! A window is a number of chunk *slots*, filled with chunks of the sequences in order, so that many tiny sequences fill one
//! as well as a piece of a long one does:
//!
//! ```text
//! sequences      A A A A A B C C C            (chunks)
//! windows of 4   [A A A A][A B C C][C]
//! segments        A         A B C   C         one for each sequence in a window
//! carry           ---> A --->  C --->         at most one sequence is open where a window ends
//! ```
//!
//! Empty sequences have no chunk, but their final state is asked for too: windows without slots, after the last, copy them.
//! A walk holds one window's table at a time, however many tokens there are.

use terrace_profiles::shape::{CHUNK, Window};

use crate::error::Error;
use crate::metadata::{Bounds, Sequences, expect_length};

/// Most segments of a window: as many as the largest window has slots.
pub const MAX_SEGMENTS: usize = Window::MAX.slots() as usize;

/// [`Segment::initial`]: the segment starts from zeros.
pub const ZEROS: i32 = -1;
/// [`Segment::last`]: nobody wants the state.
pub const NOWHERE: i32 = -1;
/// [`Segment::initial`] and [`Segment::last`]: the state of the window before, or for the window after.
pub const CARRY: i32 = -2;

/// What one window does of one sequence. Kernels take it as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Its first token, in the packed buffer.
    pub tok0: i64,
    /// Its tokens; 0 for an empty sequence.
    pub len: i32,
    /// Its first slot of the window; its chunks lie in consecutive ones.
    pub slot0: i32,
    /// The slot of the pool to start from, or [`ZEROS`], or [`CARRY`].
    pub initial: i32,
    /// The slot of the pool to leave the state in, or [`NOWHERE`], or [`CARRY`].
    pub last: i32,
    /// Its first chunk, counted from the sequence's first.
    pub chunk0: i32,
    /// The row of the sequence's first checkpoint, or -1 where it has none.
    pub checkpoint: i32,
}

const _: () = assert!(size_of::<Segment>() == 32);

impl Segment {
    /// Its chunks, the last of which may have fewer tokens.
    pub fn chunks(&self) -> u32 {
        self.len.unsigned_abs().div_ceil(CHUNK as u32)
    }
}

/// One window's table.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Counted from the first window.
    pub index: u64,
    /// Slots with chunks in them: all but in the last window, and none where only empty sequences are left.
    pub slots: u32,
    count: u32,
    segments: [Segment; MAX_SEGMENTS],
}

impl Step {
    /// Bytes of a table: what the host holds at a time.
    pub const TABLE_BYTES: u64 = size_of::<Self>() as u64;

    fn new(index: u64) -> Self {
        Self { index, slots: 0, count: 0, segments: [Segment::default(); MAX_SEGMENTS] }
    }

    /// What it does, in the order of the sequences; at most as many as a window has slots.
    pub fn segments(&self) -> &[Segment] {
        &self.segments[..self.count as usize]
    }

    /// All segments, the unused ones zero: the table of a kernel.
    pub fn table(&self) -> &[Segment; MAX_SEGMENTS] {
        &self.segments
    }

    /// Whether a state goes on to the next window.
    pub fn carries_out(&self) -> bool {
        self.segments().last().is_some_and(|segment| segment.last == CARRY)
    }

    fn push(&mut self, segment: Segment) {
        self.segments[self.count as usize] = segment;
        self.count += 1;
    }
}

/// Where sequences begin and end, as slots of pools; checked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ends<'a> {
    /// Whether sequences start from a pool.
    pub from_pool: bool,
    /// The slot of each sequence; its own number where there is no list.
    pub initial: Option<&'a [i32]>,
    pub has_initial: Option<&'a [bool]>,
    /// Whether final states are wanted.
    pub into_pool: bool,
    pub last: Option<&'a [i32]>,
    /// Both pools are one, and the slots are too.
    pub in_place: bool,
    /// Chunks from one checkpoint to the next; 0 for none.
    pub every: u32,
}

impl Ends<'_> {
    fn initial(&self, sequence: usize) -> i32 {
        if !self.from_pool || self.has_initial.is_some_and(|has| !has[sequence]) {
            return ZEROS;
        }
        self.initial.map_or(sequence as i32, |slots| slots[sequence])
    }

    fn last(&self, sequence: usize) -> i32 {
        if self.into_pool { self.last.map_or(sequence as i32, |slots| slots[sequence]) } else { NOWHERE }
    }

    /// Whole intervals in a sequence of so many tokens.
    pub fn checkpoints(&self, tokens: i64) -> i64 {
        if self.every == 0 { 0 } else { tokens / (CHUNK as i64 * i64::from(self.every)) }
    }
}

/// The windows of a call, in order.
#[derive(Clone, Debug)]
pub(crate) struct Windows<'a> {
    bounds: Bounds<'a>,
    ends: Ends<'a>,
    slots: u32,
    /// Windows given so far.
    index: u64,
    /// Where the walk is: the next chunk of this sequence.
    sequence: usize,
    chunk: i64,
    /// Checkpoints of the sequences before it.
    checkpoints: i64,
    /// The next sequence to look at for an empty one.
    empty: usize,
}

impl<'a> Windows<'a> {
    pub fn new(bounds: Bounds<'a>, ends: Ends<'a>, window: Window) -> Self {
        Self::of(bounds, ends, window.slots())
    }

    /// The same with any number of slots a window, of which each has at most [`MAX_SEGMENTS`] segments all the same.
    pub fn of(bounds: Bounds<'a>, ends: Ends<'a>, slots: u32) -> Self {
        Self { bounds, ends, slots, index: 0, sequence: 0, chunk: 0, checkpoints: 0, empty: 0 }
    }

    /// The next piece of the sequence that the walk is at, at most so many chunks of it.
    fn segment(&mut self, slot0: u32) -> Segment {
        let (start, end) = self.bounds.tokens(self.sequence);
        let chunks = self.bounds.chunks(self.sequence);
        let take = (chunks - self.chunk).min(i64::from(self.slots - slot0));
        let tok0 = start + self.chunk * CHUNK as i64;
        let is_last = self.chunk + take == chunks;
        let rows = self.ends.checkpoints(end - start);
        let segment = Segment {
            tok0,
            len: (end - tok0).min(take * CHUNK as i64) as i32,
            slot0: slot0.cast_signed(),
            initial: if self.chunk == 0 { self.ends.initial(self.sequence) } else { CARRY },
            last: if is_last { self.ends.last(self.sequence) } else { CARRY },
            chunk0: self.chunk as i32,
            checkpoint: if rows > 0 { self.checkpoints as i32 } else { -1 },
        };
        if is_last {
            self.checkpoints += rows;
            self.sequence += 1;
            self.chunk = 0;
        } else {
            self.chunk += take;
        }
        segment
    }

    /// The copy of an empty sequence's state, or `None` where it is in place already.
    fn copy(&self, sequence: usize) -> Option<Segment> {
        let (initial, last) = (self.ends.initial(sequence), self.ends.last(sequence));
        let (tok0, _) = self.bounds.tokens(sequence);
        let is_there = self.ends.in_place && initial == last;
        (!is_there).then_some(Segment { tok0, initial, last, checkpoint: -1, ..Segment::default() })
    }
}

impl Iterator for Windows<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let mut step = Step::new(self.index);
        let (slots, most) = (self.slots, self.slots.min(MAX_SEGMENTS as u32));
        let room = |step: &Step| step.slots < slots && step.count < most;
        while room(&step) && self.sequence < self.bounds.len() {
            if self.bounds.chunks(self.sequence) == 0 {
                self.sequence += 1;
                continue;
            }
            let segment = self.segment(step.slots);
            step.slots += segment.chunks();
            step.push(segment);
        }
        while step.slots == 0 && room(&step) && self.ends.into_pool && self.empty < self.bounds.len() {
            let sequence = self.empty;
            self.empty += 1;
            if self.bounds.chunks(sequence) == 0
                && let Some(copy) = self.copy(sequence)
            {
                step.push(copy);
            }
        }
        self.index += 1;
        (step.count > 0).then_some(step)
    }
}

/// The windows of a call whose sequences start from slot `n` of a pool for sequence `n`, where `has_initial` says so, and end
/// there too: what tests, tools and other kernels look at. Calls walk the same way by themselves.
///
/// # Errors
/// What is wrong with the sequences, for so many tokens.
pub fn steps<'a>(
    sequences: &Sequences<'a>,
    tokens: u64,
    has_initial: Option<&'a [bool]>,
    every: u32,
    window: Window,
) -> Result<impl Iterator<Item = Step> + use<'a>, Error> {
    let bounds = sequences.check(tokens)?;
    if let Some(has) = has_initial {
        expect_length("has_initial", bounds.len() as u64, has.len())?;
    }
    let ends = Ends { from_pool: true, has_initial, into_pool: true, every, ..Ends::default() };
    Ok(Windows::new(bounds, ends, window))
}
