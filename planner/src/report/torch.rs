//! A plan as the snapshot that PyTorch's allocator would have dumped, for pytorch.org/memory_viz and `torch.cuda._memory_viz`.
//!
//! The trace takes one segment for each lane's part of the arena, then allocates and frees in tick order at
//! `base + offset`. Each stretch in use is one allocation: a plain buffer is one from birth to death, aliases are one
//! together, a life with gaps is several, since a viewer keyed by address cannot show two at one place. What the
//! profile never freed stays allocated.
//!
//! The file is a pickle of protocol 4 with plain dicts, lists, tuples, texts and numbers: it asks for no code.

mod pickle;

use std::io::{self, Write};

use self::pickle::Pickle;
use super::picture::{Arena, Rect, arenas, rects, ticks};
use crate::plan::Plan;

/// Where the arena lies in the snapshot: its zeroes leave the offset readable in the lower digits of each address.
const BASE: u64 = 0x7f00_0000_0000;
/// Larger arenas begin at 0: the viewer keeps addresses as doubles, exact up to 2^53.
const MOST_ABOVE_BASE: u64 = 1 << 46;

/// Writes the snapshot; see the module's page.
pub(super) fn write(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    let base = if plan.makespan().get() <= MOST_ABOVE_BASE { BASE } else { 0 };
    let trace = Trace { plan, base, rects: rects(plan), arenas: arenas(plan), kept: kept(plan) };
    let mut pickle = Pickle::new(out)?;
    trace.snapshot(&mut pickle)?;
    pickle.stop()
}

struct Trace<'a> {
    plan: &'a Plan,
    base: u64,
    rects: Vec<Rect>,
    arenas: Vec<Arena>,
    /// For each storage whether it is never freed.
    kept: Vec<bool>,
}

fn kept(plan: &Plan) -> Vec<bool> {
    let mut kept = vec![false; plan.problem().buffers.len()];
    for slot in plan.slots().iter().filter(|slot| !slot.freed) {
        kept[slot.storage as usize] = true;
    }
    kept
}

impl Trace<'_> {
    fn snapshot(&self, p: &mut Pickle<'_>) -> io::Result<()> {
        p.dict(|p| {
            p.text("segments")?;
            p.list(&self.arenas, |p, arena| self.segment(p, arena))?;
            p.text("device_traces")?;
            p.list(&[()], |p, ()| p.list(&self.events(), |p, event| self.event(p, event)))?;
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

    fn segment(&self, p: &mut Pickle<'_>, arena: &Arena) -> io::Result<()> {
        let mut left: Vec<&Rect> = self
            .rects
            .iter()
            .filter(|rect| self.stays(rect) && arena.from <= rect.from && rect.to <= arena.to)
            .collect();
        left.sort_by_key(|rect| rect.from);
        let mut blocks: Vec<(u64, u64, Option<&Rect>)> = Vec::new();
        let mut at = arena.from;
        for rect in &left {
            if at < rect.from {
                blocks.push((at, rect.from, None));
            }
            blocks.push((rect.from, rect.to, Some(rect)));
            at = rect.to;
        }
        if at < arena.to {
            blocks.push((at, arena.to, None));
        }
        let allocated: u64 = left.iter().map(|rect| rect.to - rect.from).sum();
        let requested: u64 = left.iter().map(|rect| rect.asked).sum();
        p.dict(|p| {
            p.entry("device", |p| p.int(0))?;
            p.entry("address", |p| p.uint(self.base + arena.from))?;
            p.entry("total_size", |p| p.uint(arena.to - arena.from))?;
            p.entry("allocated_size", |p| p.uint(allocated))?;
            p.entry("active_size", |p| p.uint(allocated))?;
            p.entry("requested_size", |p| p.uint(requested))?;
            p.entry("stream", |p| p.uint(self.stream_of(arena)))?;
            p.entry("segment_type", |p| p.text("large"))?;
            p.entry("segment_pool_id", Pickle::pair_of_zeroes)?;
            p.entry("is_expandable", |p| p.bool(false))?;
            p.entry("frames", |p| p.frames(None))?;
            p.text("blocks")?;
            p.list(&blocks, |p, (from, to, rect)| {
                p.dict(|p| {
                    p.entry("address", |p| p.uint(self.base + from))?;
                    p.entry("size", |p| p.uint(to - from))?;
                    p.entry("requested_size", |p| p.uint(rect.map_or(0, |rect| rect.asked)))?;
                    p.entry("state", |p| p.text(if rect.is_some() { "active_allocated" } else { "inactive" }))?;
                    p.entry("frames", |p| p.frames(rect.map(|rect| self.label(rect))))
                })
            })
        })
    }

    /// Segments first; at one tick frees before allocations, since lives are half-open.
    fn events(&self) -> Vec<Event<'_>> {
        let frees = self.rects.iter().filter(|rect| !self.stays(rect));
        let mut events: Vec<Event<'_>> = frees
            .flat_map(|rect| [Event::Free("free_requested", rect), Event::Free("free_completed", rect)])
            .chain(self.rects.iter().map(Event::Alloc))
            .collect();
        events.sort_by_key(|event| match event {
            Event::Segment(_) => (0, 0, 0, 0),
            Event::Free(_, rect) => (rect.death, 0, rect.slot, rect.from),
            Event::Alloc(rect) => (rect.birth, 1, rect.slot, rect.from),
        });
        self.arenas.iter().map(Event::Segment).chain(events).collect()
    }

    fn event(&self, p: &mut Pickle<'_>, event: &Event<'_>) -> io::Result<()> {
        let (action, from, bytes, stream, tick, label) = match event {
            Event::Segment(arena) => {
                ("segment_alloc", arena.from, arena.to - arena.from, self.stream_of(arena), ticks(self.plan).0, None)
            }
            Event::Alloc(rect) => {
                ("alloc", rect.from, rect.asked, self.stream(rect), rect.birth, Some(self.label(rect)))
            }
            Event::Free(action, rect) => {
                (*action, rect.from, rect.asked, self.stream(rect), rect.death, Some(self.label(rect)))
            }
        };
        p.dict(|p| {
            p.entry("action", |p| p.text(action))?;
            p.entry("addr", |p| p.uint(self.base + from))?;
            p.entry("size", |p| p.uint(bytes))?;
            p.entry("stream", |p| p.uint(stream))?;
            p.entry("time_us", |p| p.uint(tick))?;
            p.entry("frames", |p| p.frames(label))
        })
    }

    /// Whether the rectangle is the last stretch of something never freed.
    fn stays(&self, rect: &Rect) -> bool {
        let storage = self.plan.slots()[rect.slot as usize].storage as usize;
        self.kept[storage] && rect.death == self.plan.problem().buffers[storage].lifetime.end.0
    }

    fn label(&self, rect: &Rect) -> &str {
        self.plan.label(&self.plan.slots()[rect.slot as usize])
    }

    fn stream(&self, rect: &Rect) -> u64 {
        u64::from(self.plan.slots()[rect.slot as usize].lane)
    }

    /// The stream of a buffer inside: lanes of the problem are numbered otherwise than streams.
    fn stream_of(&self, arena: &Arena) -> u64 {
        let inside = self.rects.iter().find(|rect| arena.from <= rect.from && rect.to <= arena.to);
        inside.map_or(0, |rect| self.stream(rect))
    }
}

enum Event<'a> {
    Segment(&'a Arena),
    Free(&'static str, &'a Rect),
    Alloc(&'a Rect),
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::ReportFormat;
    use super::super::tests::{SMALL, body, bytes, odd_plan, plan};
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    enum Value {
        Int(i128),
        Text(String),
        List(Vec<Value>),
        Dict(BTreeMap<String, Value>),
        Other,
    }

    impl Value {
        fn at(&self, key: &str) -> &Value {
            let Self::Dict(dict) = self else { panic!("{self:?} is no dict") };
            &dict[key]
        }
        fn list(&self) -> &[Value] {
            let Self::List(list) = self else { panic!("{self:?} is no list") };
            list
        }
        fn int(&self, key: &str) -> i128 {
            let Self::Int(int) = self.at(key) else { panic!("{self:?} is no number") };
            *int
        }
        fn text(&self, key: &str) -> &str {
            let Self::Text(text) = self.at(key) else { panic!("{self:?} is no text") };
            text
        }
    }

    /// Reads what [`Pickle`] writes, in the dumb way.
    fn read(bytes: &[u8]) -> Value {
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

    fn snapshot(plan: &Plan) -> Value {
        read(&bytes(plan, ReportFormat::TorchSnapshot))
    }

    fn trace(snapshot: &Value) -> Vec<(&str, i128, i128, i128, i128)> {
        let events = snapshot.at("device_traces").list()[0].list().iter();
        let base = i128::from(BASE);
        events
            .map(|e| (e.text("action"), e.int("addr") - base, e.int("size"), e.int("stream"), e.int("time_us")))
            .collect()
    }

    #[test]
    fn the_trace_replays_the_plan_in_tick_order() {
        let snapshot = snapshot(&plan(SMALL));
        let expected = [
            ("segment_alloc", 0, 3072, 0, 0),
            ("alloc", 0, 1000, 0, 0),
            ("alloc", 1024, 2048, 0, 4),
            ("free_requested", 0, 1000, 0, 6),
            ("free_completed", 0, 1000, 0, 6),
            ("alloc", 0, 900, 0, 6),
            ("free_requested", 0, 900, 0, 10),
            ("free_completed", 0, 900, 0, 10),
            ("free_requested", 1024, 2048, 0, 12),
            ("free_completed", 1024, 2048, 0, 12),
        ];
        assert_eq!(trace(&snapshot), expected);
        let frames = snapshot.at("device_traces").list()[0].list()[1].at("frames").list();
        let frame = (frames[0].text("filename"), frames[0].int("line"), frames[0].text("name"));
        assert_eq!((frames.len(), frame), (1, ("net.py", 1, "a")));
    }

    #[test]
    fn the_segment_holds_what_is_never_freed_and_free_space() {
        let mut body = body(SMALL);
        body.slots[1].freed = false;
        let snapshot = snapshot(&Plan::new(body).unwrap());
        let segment = &snapshot.at("segments").list()[0];
        assert_eq!((segment.int("total_size"), segment.int("allocated_size")), (3072, 2048));
        let blocks: Vec<_> = segment.at("blocks").list().iter().map(|b| (b.int("size"), b.text("state"))).collect();
        assert_eq!(blocks, [(1024, "inactive"), (2048, "active_allocated")]);
        assert_eq!(segment.at("segment_pool_id"), &Value::List(vec![Value::Int(0), Value::Int(0)]));
        assert_eq!(snapshot.at("external_annotations").list(), []);
        assert_eq!(snapshot.at("allocator_settings").int("max_split_size"), -1);
    }

    #[test]
    fn lanes_are_segments_gaps_are_frees_and_aliases_one_allocation() {
        let snapshot = snapshot(&odd_plan());
        let expected = [
            ("segment_alloc", 0, 3072, 0, 0),
            ("segment_alloc", 3072, 1024, 1, 0),
            ("alloc", 0, 1000, 0, 0),
            ("free_requested", 0, 1000, 0, 2),
            ("free_completed", 0, 1000, 0, 2),
            ("alloc", 512, 488, 0, 4),
            ("alloc", 1024, 2048, 0, 4),
            ("free_requested", 512, 488, 0, 6),
            ("free_completed", 512, 488, 0, 6),
            ("alloc", 3072, 900, 1, 6),
            ("free_requested", 3072, 900, 1, 10),
            ("free_completed", 3072, 900, 1, 10),
        ];
        assert_eq!(trace(&snapshot), expected);
    }

    #[test]
    fn long_lists_go_in_batches_and_many_labels_need_wide_references() {
        let labels: Vec<&'static str> = (0..400).map(|k| &*format!("f{k}.py:{k}:g{k}").leak()).collect();
        let rows: Vec<_> = (0..2000).map(|k| (512, labels[k % 400], k as u64, k as u64 + 1, 0)).collect();
        let snapshot = snapshot(&plan(&rows));
        let trace = snapshot.at("device_traces").list()[0].list();
        assert_eq!(trace.len(), 1 + 3 * 2000);
        assert_eq!(trace.last().unwrap().at("frames").list()[0].text("name"), "g399");
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
    fn an_arena_too_large_for_doubles_begins_at_zero() {
        let snapshot = snapshot(&plan(&[(1 << 60, "x", 0, 1, 0)]));
        assert_eq!(snapshot.at("segments").list()[0].int("address"), 0);
    }
}
