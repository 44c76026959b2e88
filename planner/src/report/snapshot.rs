//! What PyTorch's caching allocator dumps, as plain data and as its file, for pytorch.org/memory_viz and
//! `torch.cuda._memory_viz`: what exists now, as segments of blocks, and how it came to be, as a trace.
//!
//! The file is a pickle of protocol 4 with plain dicts, lists, tuples, texts and numbers: it asks for no code. A label of the
//! form `file:line:name` becomes the one frame of a stack, any other the name in it.

mod pickle;

use std::io::{self, Write};

use self::pickle::Pickle;

/// A dump: of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot<'a> {
    /// What the driver gave.
    pub segments: Vec<Segment<'a>>,
    /// What happened, in order.
    pub events: Vec<TraceEvent<'a>>,
}

/// A stretch of memory that came from the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// The stream it belongs to.
    pub stream: u64,
    /// The graph pool it belongs to; zeroes for none.
    pub pool: (u64, u64),
    /// Side by side, from its first byte to its last.
    pub blocks: Vec<Block<'a>>,
}

/// A piece of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block<'a> {
    /// Where it begins.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// What was asked for; 0 for what is free.
    pub asked: u64,
    /// Whether it is in use.
    pub state: BlockState,
    /// Who asked.
    pub label: Option<&'a str>,
}

/// Whether a block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// In use.
    Allocated,
    /// Freed, but a stream may still use it.
    PendingFree,
    /// Free.
    Inactive,
}

/// An entry of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEvent<'a> {
    /// What happened.
    pub action: Action,
    /// To what.
    pub address: u64,
    /// Its size: for a buffer, what was asked for.
    pub bytes: u64,
    /// On which stream.
    pub stream: u64,
    /// When; only the order matters.
    pub time_us: u64,
    /// Who did it.
    pub label: Option<&'a str>,
}

/// What happens to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The driver gave a segment.
    SegmentAlloc,
    /// A buffer began to live.
    Alloc,
    /// The program let go of it.
    FreeRequested,
    /// No stream uses it any more.
    FreeCompleted,
}

impl<'a> Segment<'a> {
    /// A segment with these blocks, and what is between them free.
    pub fn around(address: u64, bytes: u64, stream: u64, pool: (u64, u64), mut used: Vec<Block<'a>>) -> Self {
        used.sort_by_key(|block| block.address);
        let free = |address, bytes| Block { address, bytes, asked: 0, state: BlockState::Inactive, label: None };
        let mut blocks = Vec::with_capacity(2 * used.len() + 1);
        let mut at = address;
        for block in used {
            if at < block.address {
                blocks.push(free(at, block.address - at));
            }
            at = block.address + block.bytes;
            blocks.push(block);
        }
        if at < address + bytes {
            blocks.push(free(at, address + bytes - at));
        }
        Self { address, bytes, stream, pool, blocks }
    }

    fn sum(&self, of: impl Fn(&Block<'_>) -> u64, states: &[BlockState]) -> u64 {
        self.blocks.iter().filter(|block| states.contains(&block.state)).map(of).sum()
    }
}

impl BlockState {
    const fn name(self) -> &'static str {
        match self {
            Self::Allocated => "active_allocated",
            Self::PendingFree => "active_pending_free",
            Self::Inactive => "inactive",
        }
    }
}

impl Action {
    const fn name(self) -> &'static str {
        match self {
            Self::SegmentAlloc => "segment_alloc",
            Self::Alloc => "alloc",
            Self::FreeRequested => "free_requested",
            Self::FreeCompleted => "free_completed",
        }
    }
}

impl Snapshot<'_> {
    /// Writes the file.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut pickle = Pickle::new(out)?;
        self.dict(&mut pickle)?;
        pickle.stop()
    }

    fn dict(&self, p: &mut Pickle<'_>) -> io::Result<()> {
        p.dict(|p| {
            p.text("segments")?;
            p.list(&self.segments, segment)?;
            p.text("device_traces")?;
            p.list(&[()], |p, ()| p.list(&self.events, event))?;
            p.text("allocator_settings")?;
            p.dict(|p| {
                p.entry("PYTORCH_CUDA_ALLOC_CONF", |p| p.text(""))?;
                p.entry("max_split_size", |p| p.int(-1))?;
                p.entry("garbage_collection_threshold", |p| p.float(0.0))?;
                p.entry("expandable_segments", |p| p.bool(false))?;
                p.entry("pinned_num_register_threads", |p| p.int(1))?;
                p.entry("release_lock_on_cudamalloc", |p| p.bool(false))?;
                p.entry("pinned_use_cuda_host_register", |p| p.bool(false))?;
                p.entry("roundup_power2_divisions", |p| p.dict(|_| Ok(())))
            })?;
            p.text("external_annotations")?;
            p.list(&[(); 0], |_, ()| Ok(()))
        })
    }
}

fn segment(p: &mut Pickle<'_>, segment: &Segment<'_>) -> io::Result<()> {
    const ACTIVE: [BlockState; 2] = [BlockState::Allocated, BlockState::PendingFree];
    p.dict(|p| {
        p.entry("device", |p| p.int(0))?;
        p.entry("address", |p| p.uint(segment.address))?;
        p.entry("total_size", |p| p.uint(segment.bytes))?;
        p.entry("allocated_size", |p| p.uint(segment.sum(|block| block.bytes, &ACTIVE[..1])))?;
        p.entry("active_size", |p| p.uint(segment.sum(|block| block.bytes, &ACTIVE)))?;
        p.entry("requested_size", |p| p.uint(segment.sum(|block| block.asked, &ACTIVE)))?;
        p.entry("stream", |p| p.uint(segment.stream))?;
        p.entry("segment_type", |p| p.text("large"))?;
        p.entry("segment_pool_id", |p| p.pair(segment.pool))?;
        p.entry("is_expandable", |p| p.bool(false))?;
        p.entry("frames", |p| p.frames(None))?;
        p.text("blocks")?;
        p.list(&segment.blocks, |p, block| {
            p.dict(|p| {
                p.entry("address", |p| p.uint(block.address))?;
                p.entry("size", |p| p.uint(block.bytes))?;
                p.entry("requested_size", |p| p.uint(block.asked))?;
                p.entry("state", |p| p.text(block.state.name()))?;
                p.entry("frames", |p| p.frames(block.label))
            })
        })
    })
}

fn event(p: &mut Pickle<'_>, event: &TraceEvent<'_>) -> io::Result<()> {
    p.dict(|p| {
        p.entry("action", |p| p.text(event.action.name()))?;
        p.entry("addr", |p| p.uint(event.address))?;
        p.entry("size", |p| p.uint(event.bytes))?;
        p.entry("stream", |p| p.uint(event.stream))?;
        p.entry("time_us", |p| p.uint(event.time_us))?;
        p.entry("frames", |p| p.frames(event.label))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    pub(in super::super) enum Value {
        Int(i128),
        Text(String),
        List(Vec<Value>),
        Dict(BTreeMap<String, Value>),
        Other,
    }

    impl Value {
        pub(in super::super) fn at(&self, key: &str) -> &Value {
            let Self::Dict(dict) = self else { panic!("{self:?} is no dict") };
            &dict[key]
        }
        pub(in super::super) fn list(&self) -> &[Value] {
            let Self::List(list) = self else { panic!("{self:?} is no list") };
            list
        }
        pub(in super::super) fn int(&self, key: &str) -> i128 {
            let Self::Int(int) = self.at(key) else { panic!("{self:?} is no number") };
            *int
        }
        pub(in super::super) fn text(&self, key: &str) -> &str {
            let Self::Text(text) = self.at(key) else { panic!("{self:?} is no text") };
            text
        }
    }

    /// Reads what a pickle of ours holds, in the dumb way.
    pub(in super::super) fn read(bytes: &[u8]) -> Value {
        let (mut stack, mut marks, mut memo): (Vec<Value>, Vec<usize>, Vec<Value>) = Default::default();
        let mut rest = bytes;
        let mut take = |count: usize| {
            let (head, tail) = rest.split_at(count);
            rest = tail;
            head
        };
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0_i128, |sum, byte| (sum << 8) | i128::from(*byte));
        let signed = |bytes: &[u8]| {
            let unused = 128 - 8 * bytes.len() as u32;
            (number(bytes) << unused) >> unused
        };
        assert_eq!(take(2), [0x80, 4]);
        loop {
            match take(1)[0] {
                b'}' => stack.push(Value::Dict(BTreeMap::new())),
                b']' => stack.push(Value::List(Vec::new())),
                b'(' => marks.push(stack.len()),
                b'u' => {
                    let items = stack.split_off(marks.pop().unwrap());
                    let Some(Value::Dict(dict)) = stack.last_mut() else { panic!("no dict") };
                    for pair in items.chunks(2) {
                        let [Value::Text(key), value] = pair else { panic!("no pair: {pair:?}") };
                        assert_eq!(dict.insert(key.clone(), value.clone()), None, "a key twice");
                    }
                }
                b'e' => {
                    let items = stack.split_off(marks.pop().unwrap());
                    let Some(Value::List(list)) = stack.last_mut() else { panic!("no list") };
                    list.extend(items);
                }
                b'K' => stack.push(Value::Int(number(take(1)))),
                b'M' => stack.push(Value::Int(number(take(2)))),
                b'J' => stack.push(Value::Int(signed(take(4)))),
                0x8a => {
                    let count = take(1)[0] as usize;
                    stack.push(Value::Int(signed(take(count))));
                }
                b'G' => {
                    take(8);
                    stack.push(Value::Other);
                }
                0x88 | 0x89 => stack.push(Value::Other),
                0x86 => {
                    let pair = stack.split_off(stack.len() - 2);
                    stack.push(Value::List(pair));
                }
                0x8c => {
                    let count = take(1)[0] as usize;
                    stack.push(Value::Text(String::from_utf8(take(count).to_vec()).unwrap()));
                }
                b'X' => {
                    let count = number(take(4)) as usize;
                    stack.push(Value::Text(String::from_utf8(take(count).to_vec()).unwrap()));
                }
                0x94 => memo.push(stack.last().unwrap().clone()),
                b'h' => stack.push(memo[take(1)[0] as usize].clone()),
                b'j' => stack.push(memo[number(take(4)) as usize].clone()),
                b'.' => break,
                other => panic!("opcode {other:#x}"),
            }
        }
        assert_eq!((stack.len(), marks.len(), rest.len()), (1, 0, 0));
        stack.pop().unwrap()
    }

    #[test]
    fn numbers_of_every_length_read_back() {
        for value in
            [0, 255, 256, 65535, 65536, i128::from(i32::MAX), 1 << 31, 1 << 39, 1 << 40, -1, -129, i128::from(u64::MAX)]
        {
            let mut out = Vec::new();
            let mut pickle = Pickle::new(&mut out).unwrap();
            pickle.int(value).unwrap();
            pickle.stop().unwrap();
            assert_eq!(read(&out), Value::Int(value));
        }
    }

    #[test]
    fn a_segment_is_filled_between_its_blocks_and_sums_by_state() {
        let block = |address, bytes, state| Block { address, bytes, asked: bytes - 1, state, label: Some("x") };
        let used = vec![block(1536, 512, BlockState::PendingFree), block(1024, 512, BlockState::Allocated)];
        let segments = vec![Segment::around(512, 2048, 3, (0, 9), used)];
        let mut out = Vec::new();
        Snapshot { segments, events: Vec::new() }.write(&mut out).unwrap();
        let read = read(&out);
        let segment = &read.at("segments").list()[0];
        let sizes = ["total_size", "allocated_size", "active_size", "requested_size"].map(|key| segment.int(key));
        assert_eq!(sizes, [2048, 512, 1024, 1022]);
        assert_eq!(segment.at("segment_pool_id"), &Value::List(vec![Value::Int(0), Value::Int(9)]));
        let blocks: Vec<_> = segment.at("blocks").list().iter().map(|b| (b.int("address"), b.text("state"))).collect();
        let expected =
            [(512, "inactive"), (1024, "active_allocated"), (1536, "active_pending_free"), (2048, "inactive")];
        assert_eq!(blocks, expected);
    }
}
