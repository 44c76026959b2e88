//! Snapshots of torch's caching allocator.

use std::collections::BTreeMap;

use proptest::prelude::*;
use terrace_profiles::import::{Options, read};
use terrace_profiles::units::{Bytes, Tick};
use terrace_profiles::{Action, BufferId, Event, LabelId, LaneId, Profile};

use super::pickler::{Py, dict, dumps, list};
use super::{fails, load, note, one, parse, peak};

#[test]
fn a_snapshot_and_the_json_of_the_same_run_agree() {
    let run = "traces/qwen27b_L4_chunked_T12384_C4128_dec4";
    let (snapshot, json) = (load(&format!("{run}.snapshot.pickle.gz")), load(&format!("{run}.events.json.gz")));
    let (ours, theirs) = (snapshot.lives().unwrap(), json.lives().unwrap());
    assert_eq!(ours.len(), 2_050);
    assert_eq!(peak(&ours), 949_531_136);
    assert_eq!(peak(&theirs), 949_531_136);

    // Ticks differ, since the JSON has no requests; the order of what remains may not.
    let order = |profile: &Profile| -> Vec<(bool, u32)> {
        let kept = profile.events.iter().filter_map(|event| match event.action {
            Action::Alloc { id, .. } => Some((true, id.0)),
            Action::Free { id } => Some((false, id.0)),
            _ => None,
        });
        kept.collect()
    };
    assert_eq!(order(&snapshot), order(&json));

    // The script that made the JSON skipped two more files of transformers and left the line of its own out.
    let mut differ: BTreeMap<&str, u32> = BTreeMap::new();
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert_eq!(ours.bytes, theirs.bytes);
        let (ours, theirs) = (&snapshot.labels[ours.label.0 as usize], &json.labels[theirs.label.0 as usize]);
        if ours != theirs {
            *differ.entry(ours.split(':').next().unwrap()).or_default() += 1;
        }
    }
    assert_eq!(differ, BTreeMap::from([("activations.py", 70), ("masking_utils.py", 14), ("run.py", 7)]));
    assert_eq!(snapshot.lanes, ["stream 0"]);
    assert_eq!(note(&snapshot, "resident"), Some("59 blocks, 8163308096 bytes"));
    assert_eq!(note(&snapshot, "reserved"), Some("9946791936 bytes"));
}

fn entry(action: &str, address: i128, size: i128) -> Py {
    dict([("action", action.into()), ("addr", address.into()), ("size", size.into()), ("stream", 0.into())])
}

fn frame(file: &str, line: i128, name: &str) -> Py {
    dict([("name", name.into()), ("filename", file.into()), ("line", line.into())])
}

fn framed(action: &str, address: i128, size: i128, frames: &Py) -> Py {
    dict([("action", action.into()), ("addr", address.into()), ("size", size.into()), ("frames", frames.clone())])
}

fn snapshot(traces: Vec<Py>) -> Py {
    dict([("segments", list(vec![])), ("device_traces", list(traces))])
}

/// The pickle of a snapshot of one device.
fn trace(entries: Vec<Py>) -> Vec<u8> {
    dumps(&snapshot(vec![list(entries)]), 4)
}

/// Events in one line: what, which buffer, when.
fn events(bytes: &[u8]) -> String {
    text(&one(bytes))
}

fn text(profile: &Profile) -> String {
    let events = profile.events.iter().map(|event| {
        let what = match &event.action {
            Action::Alloc { id, bytes, .. } => format!("a{id}:{}", bytes.get()),
            Action::FreeRequested { id } => format!("r{id}"),
            Action::Free { id } => format!("f{id}"),
            Action::StepBegin { key } => format!("s({key})"),
            Action::StepEnd => "e".to_owned(),
            other => format!("{other:?}"),
        };
        format!("{what}@{}", event.tick)
    });
    events.collect::<Vec<_>>().join(" ")
}

#[test]
fn every_action_has_its_meaning() {
    let bytes = trace(vec![
        entry("segment_alloc", 0x1000, 4096),
        entry("alloc", 0x1000, 100),
        entry("alloc", 0x1200, 50),
        entry("free_requested", 0x1000, 100),
        entry("snapshot", 0, 0),
        dict([("action", "oom".into()), ("device_free", 5.into()), ("size", 7.into()), ("stream", 0.into())]),
        entry("free_completed", 0x1000, 100),
        entry("segment_map", 0x9000, 4096),
        entry("segment_unmap", 0x9000, 4096),
        entry("annotate", 0, 0),
        entry("from the future", 0, -1),
        entry("free", 0x1200, 50),
        entry("segment_free", 0x1000, 4096),
        entry("alloc", 0x1000, 7),
    ]);
    assert_eq!(events(&bytes), "a0:100@0 a1:50@1 r0@2 f0@3 f1@4 a2:7@5");
    assert_eq!(one(&bytes).labels, ["unknown"]);
}

#[test]
fn a_trace_that_begins_in_the_middle_begins_with_what_was_alive() {
    let bytes = trace(vec![
        entry("alloc", 0x1000, 10),
        entry("free_completed", 0x2000, 20),
        entry("free_requested", 0x3000, 30),
        entry("alloc", 0x2000, 40),
        entry("free_completed", 0x2000, 40),
        entry("free_completed", 0x3000, 30),
    ]);
    let profile = one(&bytes);
    assert_eq!(text(&profile), "a0:20@0 a1:30@0 a2:10@1 f0@2 r1@3 a3:40@4 f3@5 f1@6");
    assert_eq!(profile.labels, ["before the record", "unknown"]);
}

#[test]
fn the_label_is_the_innermost_frame_that_is_not_torchs() {
    for (files, label) in [
        (&["site-packages/torch/nn/functional.py", "lib/site-packages/fla/ops/chunk.py", "run.py"][..], "chunk.py:2:f"),
        (
            &["??", "/build/c10/core.cpp", "libtorch.so", "<frozen runpy>", "contextlib.py", "a\\b\\run.py"],
            "run.py:6:f",
        ),
        (&["torch/csrc/x.py", "usr/dist-packages/torch/nn/modules/module.py"], "x.py:1:f"),
        (&["/home/me/torch/mine.py"], "mine.py:1:f"),
        (&[], "unknown"),
    ] {
        let frames = (1..).zip(files).map(|(line, file)| frame(file, line, "f")).collect();
        assert_eq!(one(&trace(vec![framed("alloc", 1, 1, &list(frames))])).labels, [label], "{files:?}");
    }
}

#[test]
fn stacks_shared_through_the_memo_are_read_once_and_used_often() {
    let frames = list(vec![frame("a.py", 1, "f"), frame("b.py", 2, "g")]);
    let entries = (0..3000).map(|n| framed("alloc", n, 1, &frames)).collect();
    let snapshot = snapshot(vec![list(entries)]);
    for protocol in 2..=5 {
        let profile = one(&dumps(&snapshot, protocol));
        assert_eq!((profile.events.len(), profile.labels), (3000, vec!["a.py:1:f".to_owned()]));
    }
}

#[test]
fn lanes_are_streams_by_first_appearance() {
    let on = |address: i128, stream: i128| {
        dict([("action", "alloc".into()), ("addr", address.into()), ("size", 1.into()), ("stream", stream.into())])
    };
    let profile = one(&trace(vec![on(1, 94_218_441_600_784), on(2, 0), on(3, 94_218_441_600_784)]));
    assert_eq!(profile.lanes, ["stream 94218441600784", "stream 0"]);
}

#[test]
fn each_device_that_did_something_is_a_profile() {
    let one_alloc = || list(vec![entry("alloc", 1, 1)]);
    let bytes = dumps(&snapshot(vec![list(vec![]), one_alloc(), list(vec![]), one_alloc()]), 4);
    let names: Vec<String> = parse(&bytes).unwrap().into_iter().map(|profile| profile.name).collect();
    assert_eq!(names, ["x.device1", "x.device3"]);
    let with = |device| read(bytes.as_slice(), "x", &Options { device: Some(device), ..Options::default() });
    let chosen = with(3).unwrap();
    assert_eq!((chosen.len(), note(&chosen[0], "device")), (1, Some("3")));
    assert_eq!(with(0).unwrap_err().to_string(), "x: device 0 has no events; those with events are 1, 3");
    fails(
        &dumps(&snapshot(vec![list(vec![])]), 4),
        "no device has events; call torch.cuda.memory._record_memory_history before what is recorded",
    );
    let shared = one_alloc();
    fails(&dumps(&snapshot(vec![shared.clone(), shared]), 4), "two devices in 'device_traces' share one list");
}

#[test]
fn what_stays_resident_is_a_note() {
    let block = |address: i128, size: i128, state: &str| {
        dict([
            ("address", address.into()),
            ("size", 512.into()),
            ("requested_size", size.into()),
            ("state", state.into()),
        ])
    };
    let blocks = list(vec![
        block(0x1000, 100, "active_allocated"),
        block(0x2000, 30, "active_pending_free"),
        block(0x3000, 7, "active_awaiting_free"),
        block(0x4000, 9, "inactive"),
    ]);
    let segment =
        |device: i128, blocks: Py| dict([("device", device.into()), ("total_size", 4096.into()), ("blocks", blocks)]);
    let conf = dict([("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True".into()), ("new", Py::Float(0.5))]);
    let root = dict([
        ("segments", list(vec![segment(0, blocks), segment(0, list(vec![])), segment(1, list(vec![]))])),
        ("device_traces", list(vec![list(vec![entry("alloc", 0x1000, 100)])])),
        ("allocator_settings", conf),
    ]);
    let profile = one(&dumps(&root, 2));
    assert_eq!(note(&profile, "resident"), Some("2 blocks, 37 bytes"));
    assert_eq!(note(&profile, "reserved"), Some("8192 bytes"));
    assert_eq!(note(&profile, "PYTORCH_CUDA_ALLOC_CONF"), Some("expandable_segments:True"));
}

#[test]
fn annotations_of_the_profiler_are_steps() {
    let at = |address: i128, time: i128| {
        dict([("action", "alloc".into()), ("addr", address.into()), ("size", 1.into()), ("time_us", time.into())])
    };
    let mark = |stage: &str, name: &str, time: i128| {
        dict([("stage", stage.into()), ("name", name.into()), ("device", 0.into()), ("time_us", time.into())])
    };
    let with = |marks: Vec<Py>| {
        let trace = list(vec![at(1, 10), at(2, 20), at(3, 30)]);
        let root = dict([("device_traces", list(vec![trace])), ("external_annotations", list(marks))]);
        one(&dumps(&root, 4))
    };
    let steps = with(vec![
        mark("START", "ProfilerStep#1", 15),
        mark("START", "other", 16),
        mark("END", "ProfilerStep#1", 25),
        mark("START", "ProfilerStep#2", 26),
        mark("END", "ProfilerStep#2", 99),
    ]);
    assert_eq!(text(&steps), "a0:1@0 s(ProfilerStep#1)@1 a1:1@2 e@3 s(ProfilerStep#2)@4 a2:1@5 e@6");
    let crossed = with(vec![mark("START", "ProfilerStep#1", 15), mark("START", "ProfilerStep#2", 16)]);
    assert_eq!(text(&crossed), "a0:1@0 a1:1@1 a2:1@2");
    assert_eq!(note(&crossed, "steps"), Some("left out, since their annotations do not alternate"));
}

#[test]
fn a_bad_entry_is_named_by_number_and_address() {
    let size = |size: Py| dict([("action", "alloc".into()), ("addr", 0x2000.into()), ("size", size)]);
    let bounds = "a size is between 0 and 2^63 - 1";
    for (bad, message) in [
        (entry("alloc", 0x1000, 8), "address 0x1000 is allocated while it is still live (since entry 0)".to_owned()),
        (size((-5).into()), format!("the size of address 0x2000 is -5; {bounds}")),
        (size((1_i128 << 63).into()), format!("the size of address 0x2000 is 2^63 or more; {bounds}")),
        (size((1_i128 << 100).into()), format!("the size of address 0x2000 is 2^63 or more; {bounds}")),
        (size((-1_i128 << 63).into()), format!("the size of address 0x2000 is -9223372036854775808; {bounds}")),
        (size((-1_i128 << 64).into()), format!("the size of address 0x2000 is less than -2^63; {bounds}")),
        (size("8".into()), format!("the size of address 0x2000 is not a whole number; {bounds}")),
        (dict([("action", "alloc".into()), ("addr", 1.into())]), "the entry has no 'size'".to_owned()),
        (dict([("action", "alloc".into()), ("size", 1.into())]), "the entry has no 'addr'".to_owned()),
        (entry("alloc", -1, 8), "'addr' is not an address below 2^63".to_owned()),
        (list(vec![]), "the entry is no dictionary with an 'action'".to_owned()),
        (7.into(), "the entry is no dictionary with an 'action'".to_owned()),
    ] {
        fails(&trace(vec![entry("alloc", 0x1000, 8), bad]), &format!("event 1: {message}"));
    }
    let twice = vec![entry("alloc", 16, 8), entry("free_requested", 16, 8), entry("free_requested", 16, 8)];
    fails(&trace(twice), "event 2: the free of address 0x10 was already requested");
    let twice = vec![entry("alloc", 16, 8), entry("free", 16, 8), entry("free_completed", 16, 8)];
    fails(&trace(twice), "event 2: address 0x10 is freed, but it was already freed at entry 1");
    let before = vec![entry("free_requested", 16, 8), entry("alloc", 16, 8)];
    fails(&trace(before), "event 1: address 0x10 is allocated while it is still live (since before the record)");
    let on = dumps(&snapshot(vec![list(vec![]), list(vec![entry("alloc", 16, -8)])]), 4);
    fails(&on, &format!("event 0: device 1: the size of address 0x10 is -8; {bounds}"));
}

#[test]
fn a_pickle_that_is_no_snapshot_is_told_what_it_lacks() {
    fails(&dumps(&list(vec![]), 4), "the pickle is no dictionary; store torch.cuda.memory._snapshot() itself");
    fails(
        &dumps(&dict([("segments", list(vec![]))]), 4),
        "the pickle has no 'device_traces'; call torch.cuda.memory._record_memory_history before what is recorded",
    );
    fails(&dumps(&dict([("device_traces", Py::None)]), 4), "'device_traces' is no list");
    fails(&dumps(&snapshot(vec![Py::Tuple(vec![])]), 4), "a trace in 'device_traces' is no list");
}

#[test]
fn a_pickle_that_asks_to_run_code_is_refused_by_name() {
    for (code, name) in [
        (b'c', "GLOBAL"),
        (0x93, "STACK_GLOBAL"),
        (b'R', "REDUCE"),
        (b'b', "BUILD"),
        (b'i', "INST"),
        (b'o', "OBJ"),
        (0x81, "NEWOBJ"),
        (0x92, "NEWOBJ_EX"),
        (0x82, "EXT1"),
        (0x83, "EXT2"),
        (0x84, "EXT4"),
        (b'P', "PERSID"),
        (b'Q', "BINPERSID"),
    ] {
        fails(
            &[0x80, 4, b'N', code, b'.'],
            &format!("byte 3: this pickle asks to run code ({name}), which a snapshot never does; it is refused"),
        );
    }
    // What `pickle.dumps(os.system)` begins with.
    fails(
        b"\x80\x02cposix\nsystem\n.",
        "byte 2: this pickle asks to run code (GLOBAL), which a snapshot never does; it is refused",
    );
}

#[test]
fn a_damaged_pickle_is_named_by_byte() {
    let protocols = "pickles of protocol 2 to 5 are read";
    for (bytes, message) in [
        (&b"\x80\x01N."[..], &*format!("byte 0: the pickle has protocol 1; {protocols}")),
        (b"\x80\x06N.", &format!("byte 0: the pickle has protocol 6; {protocols}")),
        (b"\x80", "byte 1: the pickle ends early; the file is truncated"),
        (b"\x80\x02", "byte 2: the pickle ends early; the file is truncated"),
        (b"\x80\x02X\x05\0\0\0ab", "byte 9: the pickle ends early; the file is truncated"),
        (b"\x80\x02B\x05\0\0\0ab", "byte 9: the pickle ends early; the file is truncated"),
        (b"\x80\x02J\x05", "byte 3: the pickle ends early; the file is truncated"),
        (b"\x80\x02.", "byte 2: the operation needs more values than the stack has"),
        (b"\x80\x02(.", "byte 3: the operation needs more values than the stack has"),
        (b"\x80\x02N(a", "byte 4: the operation needs more values than the stack has"),
        (b"\x80\x02e", "byte 2: there is no mark on the stack"),
        (b"\x80\x02N(e", "byte 4: what is appended to is no list"),
        (b"\x80\x02}Na", "byte 4: what is appended to is no list"),
        (b"\x80\x02]NNs", "byte 5: what gets a key is no dictionary"),
        (b"\x80\x02}(Nu", "byte 5: a key has no value"),
        (b"\x80\x02h\x05.", "byte 2: the memo has no entry 5"),
        (b"\x80\x02gx\n.", "byte 2: an index of the memo is not a number"),
        (b"\x80\x02X\x01\0\0\0\xff.", "byte 2: the text is not UTF-8"),
        (b"\x80\x02\x8f.", "byte 2: operation 0x8f does not occur in a snapshot; the file is damaged or no snapshot"),
        (b"\x80\x02}.x", "byte 4: bytes follow the end of the pickle"),
    ] {
        fails(bytes, message);
    }
    let whole = trace(vec![entry("alloc", 16, 8)]);
    for end in 2..whole.len() {
        fails(&whole[..end], &format!("byte {end}: the pickle ends early; the file is truncated"));
    }
}

#[test]
fn a_container_that_changes_after_use_is_refused() {
    // Two lists: an entry is put into one, then gets another key through the memo.
    let bytes = b"\x80\x02]}q\x05X\x06\0\0\0actionX\x01\0\0\0xsah\x05NNs.";
    fails(bytes, "byte 29: a dictionary changes after it was put into a list");
}

#[test]
fn memo_operations_of_every_form_work() {
    // POP, POP_MARK, DUP; a dictionary put as text; its key put far away; both fetched again; a list of one list of None.
    let bytes = [
        b"\x80\x02N0(NN1N200}p7\nX\x0d\0\0\0device_traces".as_slice(),
        b"r\xff\xff\xff\xff0g7\n0j\xff\xff\xff\xff]\x94](NNeas.",
    ]
    .concat();
    fails(&bytes, "event 0: the entry is no dictionary with an 'action'");
}

#[test]
fn nesting_of_any_depth_neither_overflows_nor_leaks() {
    let deep = [b"\x80\x02".to_vec(), b"]".repeat(1_000_000), b"a".repeat(999_999), b".".to_vec()].concat();
    fails(&deep, "the pickle is no dictionary; store torch.cuda.memory._snapshot() itself");
    let tuples = [b"\x80\x02N".to_vec(), b"\x85".repeat(1_000_000), b".".to_vec()].concat();
    fails(&tuples, "the pickle is no dictionary; store torch.cuda.memory._snapshot() itself");
    // A list that holds itself.
    fails(b"\x80\x02]q\0h\0a.", "the pickle is no dictionary; store torch.cuda.memory._snapshot() itself");
}

/// One step of a random but valid run.
#[derive(Clone, Debug)]
enum Op {
    Alloc { bytes: u32, stream: u8, stack: u8 },
    Request(usize),
    Free(usize),
    FreeFromBefore { bytes: u32, request: bool },
    Noise(u8),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (any::<u32>(), 0..3_u8, 0..4_u8).prop_map(|(bytes, stream, stack)| Op::Alloc { bytes, stream, stack }),
        2 => any::<usize>().prop_map(Op::Request),
        4 => any::<usize>().prop_map(Op::Free),
        1 => (any::<u32>(), any::<bool>()).prop_map(|(bytes, request)| Op::FreeFromBefore { bytes, request }),
        1 => any::<u8>().prop_map(Op::Noise),
    ]
}

/// A buffer of the run: where it stands, and which event of the expectation began it.
struct Live {
    address: i128,
    bytes: u32,
    buffer: Owner,
    requested: bool,
}

#[derive(Clone, Copy)]
enum Owner {
    Before(usize),
    Inside(usize),
}

/// Runs the operations: the trace torch would have kept, and the profile it stands for.
fn run(ops: &[Op]) -> (Vec<Py>, Profile) {
    let stacks: Vec<Py> = ["a.py", "b.py", "c.py"]
        .iter()
        .map(|file| list(vec![frame("torch/x.py", 1, "t"), frame(file, 5, "f")]))
        .collect();
    let labels = ["a.py:5:f", "b.py:5:f", "c.py:5:f", "unknown"];
    let mut entries = Vec::new();
    let (mut before, mut inside) = (Vec::new(), Vec::new());
    let mut happened: Vec<(char, Owner)> = Vec::new();
    let mut live: Vec<Live> = Vec::new();
    let mut next = 0x7f00_0000_0000_i128;
    for op in ops {
        let mut free = |live: &mut Vec<Live>, entries: &mut Vec<Py>, at: usize| {
            let gone = live.swap_remove(at);
            entries.push(entry("free_completed", gone.address, gone.bytes.into()));
            happened.push(('f', gone.buffer));
        };
        match op {
            Op::Alloc { bytes, stream, stack } => {
                next += 512;
                // Addresses are used again, as an allocator does.
                let address = 0x7f00_0000_0000 + next % 5120;
                if live.iter().any(|buffer| buffer.address == address) {
                    continue;
                }
                let mut pairs = vec![
                    ("action".into(), "alloc".into()),
                    ("addr".into(), address.into()),
                    ("size".into(), i128::from(*bytes).into()),
                    ("stream".into(), i128::from(*stream).into()),
                ];
                if let Some(frames) = stacks.get(usize::from(*stack)) {
                    pairs.push(("frames".into(), frames.clone()));
                }
                entries.push(Py::Dict(pairs.into()));
                let buffer = Owner::Inside(inside.len());
                inside.push((*bytes, labels[usize::from(*stack)], *stream));
                happened.push(('a', buffer));
                live.push(Live { address, bytes: *bytes, buffer, requested: false });
            }
            Op::Request(at) if !live.is_empty() => {
                let count = live.len();
                let buffer = &mut live[at % count];
                if !buffer.requested {
                    buffer.requested = true;
                    entries.push(entry("free_requested", buffer.address, buffer.bytes.into()));
                    happened.push(('r', buffer.buffer));
                }
            }
            Op::Free(at) if !live.is_empty() => {
                let count = live.len();
                free(&mut live, &mut entries, at % count);
            }
            Op::FreeFromBefore { bytes, request } => {
                let address = 0x1000 + 512 * before.len() as i128;
                let buffer = Owner::Before(before.len());
                before.push(*bytes);
                live.push(Live { address, bytes: *bytes, buffer, requested: *request });
                if *request {
                    entries.push(entry("free_requested", address, (*bytes).into()));
                    happened.push(('r', buffer));
                } else {
                    let last = live.len() - 1;
                    let gone = live.swap_remove(last);
                    entries.push(entry("free_completed", gone.address, gone.bytes.into()));
                    happened.push(('f', buffer));
                }
            }
            Op::Noise(kind) => {
                let action = ["segment_alloc", "segment_free", "snapshot", "oom", "segment_map"][usize::from(kind % 5)];
                entries.push(entry(action, 0x1000, 1 << 20));
            }
            Op::Request(_) | Op::Free(_) => {}
        }
    }
    let mut profile = Profile { name: "x".to_owned(), ..Profile::default() };
    let mut intern = |table: &mut Vec<String>, text: &str| {
        let at = table.iter().position(|known| known == text).unwrap_or_else(|| {
            table.push(text.to_owned());
            table.len() - 1
        });
        u32::try_from(at).unwrap()
    };
    let alloc = |profile: &mut Profile,
                 intern: &mut dyn FnMut(&mut Vec<String>, &str) -> u32,
                 id: usize,
                 tick,
                 what: (u32, &str, u8)| {
        let label = LabelId(intern(&mut profile.labels, what.1));
        let lane = LaneId(intern(&mut profile.lanes, &format!("stream {}", what.2)));
        let id = BufferId(u32::try_from(id).unwrap());
        let bytes = Bytes::new(what.0.into()).unwrap();
        profile.events.push(Event { tick, action: Action::Alloc { id, bytes, label, lane, hints: None } });
    };
    for (id, bytes) in before.iter().enumerate() {
        alloc(&mut profile, &mut intern, id, Tick(0), (*bytes, "before the record", 0));
    }
    let first = u64::from(!before.is_empty());
    for (tick, (what, owner)) in (first..).zip(happened) {
        let id = match owner {
            Owner::Before(index) => index,
            Owner::Inside(index) => before.len() + index,
        };
        let buffer = BufferId(u32::try_from(id).unwrap());
        match (what, owner) {
            ('a', Owner::Inside(index)) => alloc(&mut profile, &mut intern, id, Tick(tick), inside[index]),
            ('r', _) => profile.events.push(Event { tick: Tick(tick), action: Action::FreeRequested { id: buffer } }),
            _ => profile.events.push(Event { tick: Tick(tick), action: Action::Free { id: buffer } }),
        }
    }
    (entries, profile)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_random_trace_becomes_the_profile_it_stands_for(ops in prop::collection::vec(op(), 1..200), protocol in 2..=5_u8) {
        let (entries, mut expect) = run(&ops);
        prop_assume!(!entries.is_empty());
        let found = one(&dumps(&snapshot(vec![list(entries)]), protocol));
        expect.notes.clone_from(&found.notes);
        prop_assert_eq!(found, expect);
    }
}
