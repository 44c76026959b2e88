//! The pickle of `torch.cuda.memory._snapshot()`: what each device's caching allocator did, and what it holds now.
//!
//! ```text
//!   device_traces[0]:   alloc A   alloc B   free_requested A   free_completed A   alloc C ...
//!   profile of device 0:  a 0       a 1           r 0                f 0            a 2
//! ```
//!
//! A trace is a ring buffer and may begin in the middle: an address that is freed without having been allocated was alive
//! before, and its buffer begins at tick 0 with the label `before the record`. Blocks that are active at the end and that
//! the trace never allocated, such as weights, are no part of the profile; a note counts them.
//!
//! As the pickle is read, `snapshot.rs` digests it into small tables; what a trace means is worked out here, at the end,
//! device by device.

use std::collections::{HashMap, HashSet};

use super::builder::Builder;
use super::pickle::{self, Heap, Value};
use super::snapshot::{Block, Entry, Fact, Snapshot, StepMark, Verb};
use super::source::Source;
use crate::error::{At, Error};
use crate::event::{Action, BufferId, LabelId};
use crate::limits::Meter;
use crate::profile::Profile;
use crate::units::{Bytes, Tick};

/// What a buffer is called that was alive when the record began.
const BEFORE: &str = "before the record";

/// Reads the profiles of the devices that did something, or of the one that is wanted.
pub(super) fn read(source: Source<'_>, device: Option<u32>, meter: &Meter) -> Result<Vec<Profile>, Error> {
    let name = source.name;
    let mut snapshot = Snapshot::new(meter);
    let (heap, root) = pickle::load(source, meter, &mut snapshot)?;
    let wrong = |reason: &str| Error::malformed(name, At::File, reason);
    if heap.dict(root).is_none() {
        return Err(wrong("the pickle is no dictionary; store torch.cuda.memory._snapshot() itself"));
    }
    let traces = heap.get(root, "device_traces").ok_or_else(|| {
        wrong(
            "the pickle has no 'device_traces'; call torch.cuda.memory._record_memory_history before what is recorded",
        )
    })?;
    let traces = heap.list(traces).ok_or_else(|| wrong("'device_traces' is no list"))?;
    let mut lists = HashSet::new();
    let mut busy: Vec<(usize, &[Value])> = Vec::new();
    for (device, trace) in traces.iter().enumerate() {
        let entries = heap.list(*trace).ok_or_else(|| wrong("a trace in 'device_traces' is no list"))?;
        let Value::Node(node) = *trace else { continue };
        if entries.is_empty() {
            continue;
        }
        // Reading one list a million times would cost what its length does not show.
        if !lists.insert(node) {
            return Err(wrong("two devices in 'device_traces' share one list"));
        }
        busy.push((device, entries));
    }
    let all: Vec<usize> = busy.iter().map(|(device, _)| *device).collect();
    if let Some(wanted) = device {
        busy.retain(|(device, _)| *device == wanted as usize);
        if busy.is_empty() {
            let reason = match all.as_slice() {
                [] => "no device has events in this snapshot".to_owned(),
                all => format!("device {wanted} has no events; those with events are {}", list(all)),
            };
            return Err(Error::Selection { name: name.to_owned(), reason });
        }
    }
    if busy.is_empty() {
        return Err(wrong(
            "no device has events; call torch.cuda.memory._record_memory_history before what is recorded",
        ));
    }
    let mut profiles = Vec::with_capacity(busy.len());
    for (device, entries) in busy {
        let mut builder = Builder::new(name, meter);
        if all.len() > 1 {
            builder.suffix(&format!(".device{device}"));
        }
        let (steps, left_out) = snapshot.steps(&heap, root, device, entries);
        let mut trace = Trace { name, device, heap: &heap, snapshot: &snapshot, builder, live: HashMap::new() };
        trace.builder.note("device", device.to_string())?;
        if let Some(settings) = heap.get(root, "allocator_settings") {
            let conf = heap.get(settings, "PYTORCH_CUDA_ALLOC_CONF").and_then(|conf| heap.text(conf));
            if let Some(conf) = conf.filter(|conf| !conf.is_empty()) {
                trace.builder.note("PYTORCH_CUDA_ALLOC_CONF", conf)?;
            }
        }
        if left_out {
            trace.builder.note("steps", "left out, since their annotations do not alternate")?;
        }
        trace.before(entries)?;
        trace.follow(entries, &steps)?;
        profiles.push(trace.finish()?);
    }
    Ok(profiles)
}

fn list(devices: &[usize]) -> String {
    let mut text: Vec<String> = devices.iter().take(16).map(usize::to_string).collect();
    if devices.len() > text.len() {
        text.push(format!("{} more", devices.len() - text.len()));
    }
    text.join(", ")
}

/// One device's trace on its way to a profile.
struct Trace<'a> {
    name: &'a str,
    device: usize,
    heap: &'a Heap<Fact>,
    snapshot: &'a Snapshot,
    builder: Builder,
    /// What happened to each address so far.
    live: HashMap<i64, Buffer>,
}

struct Buffer {
    id: BufferId,
    /// Index of the entry that allocated it; `None` for one from before the record.
    since: Option<usize>,
    requested: bool,
    /// Index of the entry that freed it.
    freed: Option<usize>,
}

impl<'a> Trace<'a> {
    /// Begins the buffers that the trace frees without having allocated them.
    fn before(&mut self, entries: &[Value]) -> Result<(), Error> {
        let mut seen = HashSet::new();
        let mut label = None;
        for (index, value) in entries.iter().enumerate() {
            let entry = self.entry(index, *value)?;
            let (Verb::Alloc | Verb::FreeRequested | Verb::Free) = entry.action else { continue };
            let address = self.address(index, entry)?;
            self.snapshot.meter.charge(32, At::Event(index as u64))?;
            if !seen.insert(address) || entry.action == Verb::Alloc {
                continue;
            }
            let at = At::Event(index as u64);
            let bytes = self.size(index, entry)?;
            let label = match label {
                Some(label) => label,
                None => *label.insert(self.builder.label(BEFORE, at)?),
            };
            let id = self.alloc(index, entry, Tick(0), bytes, label)?;
            self.live.insert(address, Buffer { id, since: None, requested: false, freed: None });
        }
        self.snapshot.meter.release(32 * seen.len() as u64);
        Ok(())
    }

    /// Turns entries into events, each at a tick of its own.
    fn follow(&mut self, entries: &[Value], steps: &[StepMark]) -> Result<(), Error> {
        let mut tick = Tick(u64::from(!self.live.is_empty()));
        let mut steps = steps.iter().peekable();
        for (index, value) in entries.iter().enumerate() {
            while let Some(mark) = steps.next_if(|mark| mark.entry <= index) {
                self.mark(mark, &mut tick, index)?;
            }
            let entry = self.entry(index, *value)?;
            match entry.action {
                Verb::Alloc => self.begin(index, entry, tick)?,
                Verb::FreeRequested => self.request(index, entry, tick)?,
                Verb::Free => self.free(index, entry, tick)?,
                Verb::Other => continue,
            }
            tick.0 += 1;
        }
        for mark in steps {
            self.mark(mark, &mut tick, entries.len())?;
        }
        Ok(())
    }

    fn mark(&mut self, mark: &StepMark, tick: &mut Tick, index: usize) -> Result<(), Error> {
        let at = At::Event(index as u64);
        match mark.key.and_then(|key| self.heap.text(key)) {
            Some(key) => self.builder.begin_step(*tick, key, at)?,
            None => self.builder.push(*tick, Action::StepEnd, at)?,
        }
        tick.0 += 1;
        Ok(())
    }

    fn begin(&mut self, index: usize, entry: &Entry, tick: Tick) -> Result<(), Error> {
        let address = self.address(index, entry)?;
        let bytes = self.size(index, entry)?;
        if let Some(buffer) = self.live.get(&address).filter(|buffer| buffer.freed.is_none()) {
            let since = match buffer.since {
                Some(since) => format!("since entry {since}"),
                None => "since before the record".to_owned(),
            };
            return Err(
                self.wrong(index, format!("address {address:#x} is allocated while it is still live ({since})"))
            );
        }
        let label = self.builder.label(&self.snapshot.labels[entry.label as usize], At::Event(index as u64))?;
        let id = self.alloc(index, entry, tick, bytes, label)?;
        self.live.insert(address, Buffer { id, since: Some(index), requested: false, freed: None });
        Ok(())
    }

    fn alloc(
        &mut self,
        index: usize,
        entry: &Entry,
        tick: Tick,
        bytes: Bytes,
        label: LabelId,
    ) -> Result<BufferId, Error> {
        let at = At::Event(index as u64);
        let stream = match entry.stream {
            Value::Int(stream) => stream,
            Value::None => 0,
            _ => return Err(self.wrong(index, "the stream is not a whole number below 2^63")),
        };
        let lane = self.builder.lane(&format!("stream {stream}"), at)?;
        self.builder.alloc(tick, bytes, label, lane, None, at)
    }

    fn request(&mut self, index: usize, entry: &Entry, tick: Tick) -> Result<(), Error> {
        let address = self.address(index, entry)?;
        let buffer = self.alive(index, address)?;
        if buffer.requested {
            return Err(self.wrong(index, format!("the free of address {address:#x} was already requested")));
        }
        buffer.requested = true;
        let id = buffer.id;
        self.builder.push(tick, Action::FreeRequested { id }, At::Event(index as u64))
    }

    fn free(&mut self, index: usize, entry: &Entry, tick: Tick) -> Result<(), Error> {
        let address = self.address(index, entry)?;
        let buffer = self.alive(index, address)?;
        buffer.freed = Some(index);
        let id = buffer.id;
        self.builder.push(tick, Action::Free { id }, At::Event(index as u64))
    }

    fn alive(&mut self, index: usize, address: i64) -> Result<&mut Buffer, Error> {
        let freed = match self.live.get(&address) {
            None => Some("it was never allocated".to_owned()),
            Some(buffer) => buffer.freed.map(|entry| format!("it was already freed at entry {entry}")),
        };
        match freed {
            Some(why) => Err(self.wrong(index, format!("address {address:#x} is freed, but {why}"))),
            None => Ok(self.live.get_mut(&address).expect("just found")),
        }
    }

    /// Notes what the device holds beside the profile.
    fn finish(mut self) -> Result<Profile, Error> {
        if let Some(device) = self.snapshot.devices.get(&(self.device as i64)) {
            let ours = |block: &&Block| self.live.get(&block.address).is_none_or(|buffer| buffer.freed.is_some());
            let (mut count, mut bytes) = (0_u64, 0_u64);
            for block in device.active.iter().filter(ours) {
                count += 1;
                bytes = bytes.saturating_add(u64::try_from(block.bytes).unwrap_or(0));
            }
            self.builder.note("resident", format!("{count} blocks, {bytes} bytes"))?;
            self.builder.note("reserved", format!("{} bytes", device.reserved))?;
        }
        self.builder.finish()
    }

    fn entry(&self, index: usize, value: Value) -> Result<&'a Entry, Error> {
        match self.heap.fact(value) {
            Some(Fact::Entry(entry)) => Ok(&self.snapshot.entries[entry as usize]),
            _ => Err(self.wrong(index, "the entry is no dictionary with an 'action'")),
        }
    }

    fn address(&self, index: usize, entry: &Entry) -> Result<i64, Error> {
        match entry.address {
            Value::Int(address) if address >= 0 => Ok(address),
            Value::None => Err(self.wrong(index, "the entry has no 'addr'")),
            _ => Err(self.wrong(index, "'addr' is not an address below 2^63")),
        }
    }

    fn size(&self, index: usize, entry: &Entry) -> Result<Bytes, Error> {
        let found = match entry.size {
            Value::Int(size) => match u64::try_from(size).ok().and_then(Bytes::new) {
                Some(bytes) => return Ok(bytes),
                None => size.to_string(),
            },
            Value::Wide(false) => "2^63 or more".to_owned(),
            Value::Wide(true) => "less than -2^63".to_owned(),
            Value::None => return Err(self.wrong(index, "the entry has no 'size'")),
            _ => "not a whole number".to_owned(),
        };
        let address = self.address(index, entry)?;
        Err(self.wrong(index, format!("the size of address {address:#x} is {found}; a size is between 0 and 2^63 - 1")))
    }

    fn wrong(&self, index: usize, reason: impl Into<String>) -> Error {
        let device = if self.device == 0 { String::new() } else { format!("device {}: ", self.device) };
        Error::malformed(self.name, At::Event(index as u64), device + &reason.into())
    }
}
