//! What is kept of a snapshot while its pickle is read: tables of a few words for each frame, trace entry, block and segment.
//!
//! A snapshot of a million entries nests a hundred times as many frames, nearly all of them shared. Of a stack only the one
//! label it gives is kept, and of an entry what a trace is made of; [`Digest::item`] does both as soon as a container is
//! complete.

use std::collections::HashMap;

use super::builder::UNKNOWN;
use super::pickle::{Digest, Heap, Node, Value};
use crate::error::{At, Error};
use crate::limits::{Meter, TEXT_COST};

/// What is kept of the containers of a snapshot: indices into the tables of [`Snapshot`].
#[derive(Clone, Copy)]
pub(super) enum Fact {
    Frame(u32),
    /// A stack, of which only the label it gives is of interest.
    Stack(u32),
    Entry(u32),
    Block(u32),
    /// Blocks of a segment, by number; a second use of the list would be a mistake.
    Blocks,
    Segment,
}

/// The tables that are filled while the pickle is read.
pub(super) struct Snapshot {
    pub meter: Meter,
    frames: Vec<Frame>,
    pub entries: Vec<Entry>,
    blocks: Vec<Block>,
    /// What stacks are called.
    pub labels: Vec<Box<str>>,
    label_ids: HashMap<Box<str>, u32>,
    pub devices: HashMap<i64, Device>,
}

/// What the segments of a device hold at the end.
#[derive(Default)]
pub(super) struct Device {
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// Blocks in use.
    pub active: Vec<Block>,
}

#[derive(Clone, Copy)]
pub(super) struct Block {
    pub address: i64,
    pub bytes: i64,
    active: bool,
}

/// A line of a program on a stack.
struct Frame {
    label: u32,
    /// Whether it belongs to torch or to the language and says nothing about who asked.
    inner: bool,
}

/// One line of a trace. What it lacks is [`Value::None`].
pub(super) struct Entry {
    pub action: Verb,
    pub address: Value,
    pub size: Value,
    pub stream: Value,
    pub time: Value,
    pub label: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Alloc,
    FreeRequested,
    Free,
    /// Segments, snapshots, failures, marks: nothing that holds memory of the program.
    Other,
}

impl Snapshot {
    /// Nothing yet.
    pub fn new(meter: &Meter) -> Self {
        let mut snapshot = Self {
            meter: meter.clone(),
            frames: Vec::new(),
            entries: Vec::new(),
            blocks: Vec::new(),
            labels: Vec::new(),
            label_ids: HashMap::new(),
            devices: HashMap::new(),
        };
        snapshot.labels.push(UNKNOWN.into());
        snapshot.label_ids.insert(UNKNOWN.into(), 0);
        snapshot
    }

    fn frame(&mut self, heap: &Heap<Fact>, dict: Value, file: &str, at: At) -> Result<Fact, Error> {
        let function = heap.get(dict, "name").and_then(|name| heap.text(name)).unwrap_or("?");
        let line = match heap.get(dict, "line") {
            Some(Value::Int(line)) => line,
            _ => 0,
        };
        let base = file.rsplit(['/', '\\']).next().unwrap_or(file);
        let label = format!("{base}:{line}:{function}");
        let index = match self.label_ids.get(label.as_str()) {
            Some(index) => *index,
            None => {
                self.meter.charge(TEXT_COST + 2 * label.len() as u64, at)?;
                let index = self.labels.len() as u32;
                self.labels.push(label.as_str().into());
                self.label_ids.insert(label.into(), index);
                index
            }
        };
        self.meter.charge(2 * size_of::<Frame>() as u64, at)?;
        self.frames.push(Frame { label: index, inner: is_inner(file) });
        Ok(Fact::Frame(self.frames.len() as u32 - 1))
    }

    /// The label of a stack: its innermost frame outside torch, else its innermost.
    fn stack(&self, heap: &mut Heap<Fact>, frames: Value) -> u32 {
        match heap.node(frames) {
            Some(Node::Fact(Fact::Stack(label))) => *label,
            Some(Node::List(items)) => {
                let known = |item: &Value| match heap.fact(*item) {
                    Some(Fact::Frame(index)) => Some(&self.frames[index as usize]),
                    _ => None,
                };
                let outer = items.iter().filter_map(known).find(|frame| !frame.inner);
                let label = outer.or_else(|| items.iter().find_map(known)).map_or(0, |frame| frame.label);
                if let Value::Node(node) = frames {
                    heap.replace(node, Fact::Stack(label));
                }
                label
            }
            _ => 0,
        }
    }

    fn entry(&mut self, heap: &mut Heap<Fact>, dict: Value, at: At) -> Result<Fact, Error> {
        let get = |key| heap.get(dict, key).unwrap_or(Value::None);
        let action = match heap.text(get("action")) {
            Some("alloc") => Verb::Alloc,
            Some("free_requested") => Verb::FreeRequested,
            Some("free_completed" | "free") => Verb::Free,
            _ => Verb::Other,
        };
        let [address, size, stream, time] = ["addr", "size", "stream", "time_us"].map(get);
        let frames = get("frames");
        let label = self.stack(heap, frames);
        self.meter.charge(2 * size_of::<Entry>() as u64, at)?;
        self.entries.push(Entry { action, address, size, stream, time, label });
        Ok(Fact::Entry(self.entries.len() as u32 - 1))
    }

    fn block(&mut self, heap: &Heap<Fact>, dict: Value, at: At) -> Result<Fact, Error> {
        let int = |key| match heap.get(dict, key) {
            Some(Value::Int(number)) => Some(number),
            _ => None,
        };
        let state = heap.get(dict, "state").and_then(|state| heap.text(state));
        // The documentation of torch says "awaiting", its code writes "pending".
        let active = matches!(state, Some("active_allocated" | "active_pending_free" | "active_awaiting_free"));
        let bytes = int("requested_size").or_else(|| int("size")).unwrap_or(0);
        self.meter.charge(4 * size_of::<Block>() as u64, at)?;
        self.blocks.push(Block { address: int("address").unwrap_or(0), bytes, active });
        Ok(Fact::Block(self.blocks.len() as u32 - 1))
    }

    fn segment(&mut self, heap: &mut Heap<Fact>, dict: Value, at: At) -> Result<Fact, Error> {
        let int = |key| match heap.get(dict, key) {
            Some(Value::Int(number)) => number,
            _ => 0,
        };
        let (device, total) = (int("device"), int("total_size"));
        let blocks = heap.get(dict, "blocks").unwrap_or(Value::None);
        let active: Vec<Block> = heap
            .list(blocks)
            .unwrap_or_default()
            .iter()
            .filter_map(|item| match heap.fact(*item) {
                Some(Fact::Block(index)) => Some(self.blocks[index as usize]).filter(|block| block.active),
                _ => None,
            })
            .collect();
        if let Value::Node(node) = blocks {
            heap.replace(node, Fact::Blocks);
        }
        self.meter.charge(TEXT_COST, at)?;
        let device = self.devices.entry(device).or_default();
        device.reserved = device.reserved.saturating_add(u64::try_from(total).unwrap_or(0));
        device.active.extend(active);
        Ok(Fact::Segment)
    }

    /// The steps that annotations named `ProfilerStep` mark on a device, as entries at which each begins and ends; and
    /// whether some were left out, because they do not come one after another.
    pub fn steps(&self, heap: &Heap<Fact>, root: Value, device: usize, entries: &[Value]) -> (Vec<StepMark>, bool) {
        let annotations = heap.get(root, "external_annotations").and_then(|list| heap.list(list)).unwrap_or_default();
        let mut marks: Vec<(i64, bool, Value)> = Vec::new();
        for annotation in annotations {
            let text = |key| heap.get(*annotation, key).and_then(|value| heap.text(value));
            let here = match heap.get(*annotation, "device") {
                Some(Value::Int(on)) => on == device as i64,
                _ => true,
            };
            let (Some(Value::Int(time)), Some(name)) =
                (heap.get(*annotation, "time_us"), heap.get(*annotation, "name"))
            else {
                continue;
            };
            let begins = match text("stage") {
                Some("START") => true,
                Some("END") => false,
                _ => continue,
            };
            if here && heap.text(name).is_some_and(|name| name.starts_with("ProfilerStep")) {
                marks.push((time, begins, name));
            }
        }
        if marks.is_empty() {
            return (Vec::new(), false);
        }
        marks.sort_by_key(|(time, ..)| *time);
        let mut open: Option<Value> = None;
        for (_, begins, name) in &marks {
            match (open.take(), begins) {
                (None, true) => open = Some(*name),
                (Some(before), false) if heap.text(before) == heap.text(*name) => {}
                _ => return (Vec::new(), true),
            }
        }
        // Each mark stands before the first entry that is not earlier.
        let mut steps = Vec::with_capacity(marks.len());
        let mut marks = marks.into_iter().peekable();
        let mut latest = i64::MIN;
        for (index, entry) in entries.iter().enumerate() {
            let time = match heap.fact(*entry) {
                Some(Fact::Entry(entry)) => self.entries[entry as usize].time,
                _ => Value::None,
            };
            let Value::Int(time) = time else { return (Vec::new(), true) };
            if time < latest {
                return (Vec::new(), true);
            }
            latest = time;
            while let Some((_, begins, name)) = marks.next_if(|(at, ..)| *at <= time) {
                steps.push(StepMark { entry: index, key: begins.then_some(name) });
            }
        }
        steps.extend(marks.map(|(_, begins, name)| StepMark { entry: entries.len(), key: begins.then_some(name) }));
        (steps, false)
    }
}

/// A step begins (with its key) or ends before an entry.
pub(super) struct StepMark {
    pub entry: usize,
    pub key: Option<Value>,
}

/// Frames of torch, of its native code and of the language do not say who asked.
fn is_inner(file: &str) -> bool {
    let file = file.replace('\\', "/");
    let base = file.rsplit('/').next().unwrap_or(&file);
    file.starts_with("torch/")
        || file.contains("-packages/torch/")
        || file.starts_with('<')
        || matches!(base, "" | "??" | "contextlib.py" | "threading.py" | "functools.py" | "runpy.py")
        || [".cpp", ".cc", ".cxx", ".c", ".h", ".hpp", ".cu", ".pyx"].iter().any(|end| base.ends_with(end))
        || base.ends_with(".so")
        || base.contains(".so.")
}

impl Digest for Snapshot {
    type Fact = Fact;

    fn item(&mut self, heap: &mut Heap<Fact>, node: u32, at: At) -> Result<Option<Fact>, Error> {
        let dict = Value::Node(node);
        let Some(pairs) = heap.dict(dict) else { return Ok(None) };
        let has = |key: &str| pairs.iter().any(|(k, _)| heap.text(*k) == Some(key));
        if has("action") {
            self.entry(heap, dict, at).map(Some)
        } else if has("filename") {
            let file = heap.get(dict, "filename").and_then(|file| heap.text(file)).unwrap_or_default();
            self.frame(heap, dict, file, at).map(Some)
        } else if has("blocks") {
            self.segment(heap, dict, at).map(Some)
        } else if has("state") {
            self.block(heap, dict, at).map(Some)
        } else {
            Ok(None)
        }
    }
}
