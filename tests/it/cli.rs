//! The `plan` command, in process: what people see, byte for byte, and what scripts rely on.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use terrace_planner::cli::{BAD_INPUT, Console, DONE, FINDING, run};
use terrace_tests::corpus::root;

mod serving;

/// What one call gave.
struct Ran {
    status: u8,
    out: Vec<u8>,
    err: String,
}

impl Ran {
    fn text(&self) -> String {
        String::from_utf8(self.out.clone()).expect("reports are UTF-8")
    }

    /// Status, output and errors as a person would see them, without this machine's paths.
    fn seen(&self, hide: &Path) -> String {
        let mut seen = format!("status {}\n", self.status);
        for (name, text) in [("out", self.text()), ("err", self.err.clone())] {
            if !text.is_empty() {
                seen += &format!("--- {name}\n{text}");
            }
        }
        seen.replace(&*hide.to_string_lossy(), "[dir]")
    }

    fn json(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).expect("each line is an object")).collect()
    }
}

fn plan<S: Into<OsString> + Clone>(args: &[S]) -> Ran {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut console = Console { out: &mut out, err: &mut err, out_is_terminal: false, err_is_terminal: false };
    let args = [OsString::from("plan")].into_iter().chain(args.iter().cloned().map(Into::into));
    let status = run(args, &mut console);
    Ran { status, out, err: String::from_utf8(err).expect("errors are UTF-8") }
}

/// A folder with a small profile of two steps, `small.profile`.
fn workbench() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let small = folder.path().join("small.profile");
    fs::write(&small, SMALL).unwrap();
    (folder, small)
}

const SMALL: &str = "\
terrace-profile 1
name small
note gpu none
lane stream 0
label net.py:1:embed
label net.py:2:attend
label net.py:3:logits
a 0 1000 0
s prefill/8
a 1 4096 1
a 2 3000 1
f 1
a 3 600 2
f 2
e
s decode/1
a 4 2048 1
f 3
f 4
e
f 0
";

fn string(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[test]
fn a_plan_is_held_against_pytorchs_caching_allocator() {
    let profile = string(&root().join("profiles/recorded/dense8-mixed.profile"));
    let text = plan(&["solve", "--caching", &profile]).text();
    assert!(text.ends_with(
        "beside PyTorch's caching allocator, simulated\n  default segments          14342422528 B  2.267 of the plan, the plan saves 8015943168 B\n  \
         expandable segments        6612320256 B  1.045 of the plan, the plan saves 285840896 B\n  \
         recorded, reserved        14340325376 B  2.267 of the plan, the plan saves 8013846016 B\n"
    ), "{text}");
    let json: Value =
        serde_json::from_str(&plan(&["solve", "--caching", "--format", "json", &profile]).text()).unwrap();
    assert_eq!((&json["makespan"], &json["peak_bytes"]), (&6_326_479_360_u64.into(), &6_326_479_360_u64.into()));
    let expect = serde_json::json!({
        "recorded": 14_340_325_376_u64, "segments": 14_342_422_528_u64, "expandable": 6_612_320_256_u64,
        "saved_of_recorded": 8_013_846_016_u64, "saved_of_segments": 8_015_943_168_u64, "saved_of_expandable": 285_840_896,
    });
    assert_eq!(json["caching"], expect);
    let refused = plan(&["solve", "--caching", "--format", "html", &profile]);
    assert_eq!(refused.status, BAD_INPUT);
    // A file that says nothing of what was reserved.
    let folder = tempfile::tempdir().unwrap();
    let silent = folder.path().join("silent.profile");
    fs::write(&silent, SMALL).unwrap();
    let json = plan(&["solve", "--caching", "--format", "json", &string(&silent)]).text();
    assert!(json.contains("\"caching\":{\"recorded\":null,"), "{json}");
}

#[test]
fn help_of_every_command() {
    for command in ["", "import", "solve", "show", "diff", "model", "fit", "check", "completions"] {
        let args: Vec<&str> = [command, "--help"].into_iter().filter(|arg| !arg.is_empty()).collect();
        let ran = plan(&args);
        assert_eq!((ran.status, ran.err.as_str()), (DONE, ""));
        insta::assert_snapshot!(format!("help_{}", if command.is_empty() { "plan" } else { command }), ran.text());
    }
}

#[test]
fn the_report_of_a_small_profile() {
    let (folder, small) = workbench();
    insta::assert_snapshot!(plan(&["solve", &string(&small)]).seen(folder.path()));
}

#[test]
fn the_report_of_a_small_profile_that_does_not_fit() {
    let (folder, small) = workbench();
    let ran = plan(&["solve", "--capacity", "6KiB", &string(&small)]);
    assert_eq!(ran.status, FINDING);
    insta::assert_snapshot!(ran.seen(folder.path()));
}

#[test]
fn a_plan_made_again_keeps_its_offsets() {
    let (folder, small) = workbench();
    let saved = string(&folder.path().join("small.plan"));
    assert_eq!(plan(&["solve", &string(&small), "-o", &saved]).status, DONE);
    let ran = plan(&["solve", "--keep", &saved, &string(&small)]);
    assert_eq!((ran.status, ran.err.as_str()), (DONE, ""));
    let kept = ran.text().lines().find(|line| line.contains("offsets kept")).unwrap().to_owned();
    let counts: Vec<&str> = kept.split(' ').collect();
    let at = counts.iter().position(|word| *word == "offsets").unwrap();
    assert_eq!(counts[at - 3], counts[at - 1], "all of them: {kept}");
    let ran = plan(&["solve", "--keep", &saved, &string(&small), &string(&small)]);
    assert_eq!(ran.status, BAD_INPUT);
}

#[test]
fn reserved_bytes_and_cuts_between_segments_stay_free() {
    let (folder, _) = workbench();
    let csv = folder.path().join("four.csv");
    fs::write(&csv, "id,lower,upper,size\na,0,2,600\nb,0,2,600\nc,0,2,300\nd,0,2,120\n").unwrap();
    let solve =
        |more: &[&str]| plan(&[&["solve", "--align", "1", "--format", "json"], more, &[&string(&csv)]].concat());
    let makespan = |more: &[&str]| solve(more).json()[0]["makespan"].as_u64().unwrap();
    assert_eq!(makespan(&[]), 1620);
    assert_eq!(makespan(&["--reserve", "0..1KiB"]), 1024 + 1620);
    assert_eq!(makespan(&["--segment", "1000"]), 1000 + 600 + 120);
    assert_eq!(makespan(&["--segment", "1000", "--reserve", "500..600"]), 2000 + 600);
    let refused = |more: &[&str], sentence: &str| {
        let ran = solve(more);
        assert_eq!(ran.status, BAD_INPUT);
        assert!(ran.err.contains(sentence), "{}", ran.err);
    };
    refused(&["--segment", "500"], "buffer 0 takes 600 B, rounded up, more than the largest segment of 500 B");
    refused(&["--reserve", "9..3"], "'9..3' is not a range of bytes");
}

#[test]
fn several_memories_are_filled_in_order_and_the_report_says_how() {
    let (folder, _) = workbench();
    let csv = folder.path().join("four.csv");
    fs::write(&csv, "id,lower,upper,size\na,0,2,600\nb,0,2,600\nc,0,2,300\nd,0,2,120\n").unwrap();
    let solve =
        |more: &[&str]| plan(&[&["solve", "--align", "1", "--format", "json"], more, &[&string(&csv)]].concat());
    let ran = solve(&["--space", "800", "--space", "1400/700"]);
    assert_eq!(ran.status, DONE);
    let spaces = ran.json()[0]["spaces"].clone();
    let bytes = |space: usize| spaces[space]["bytes"].as_u64().unwrap();
    assert_eq!((&spaces[0]["capacity"], &spaces[1]["offset"]), (&800.into(), &800.into()));
    assert!(bytes(0) <= 800 && bytes(1) <= 1400 && bytes(0) + bytes(1) >= 1620, "{spaces}");
    // 600, 600 and 300 need a piece each.
    let ran = solve(&["--space", "800", "--space", "800"]);
    assert_eq!((ran.status, ran.json()[0]["proven_not_to_fit"].as_bool()), (FINDING, Some(true)));
    let ran = solve(&["--space", "500", "--space", "2000/500"]);
    assert_eq!(ran.status, BAD_INPUT);
    assert!(ran.err.contains("buffer 0 takes 600 B"), "{}", ran.err);
    let text = plan(&["solve", "--align", "1", "--space", "1KiB", "--space", "1KiB", &string(&csv)]);
    assert!(text.text().contains("2 spaces, filled in this order"), "{}", text.text());
}

#[test]
fn the_offline_plan_of_tflite_holds_the_offset_of_each_tensor() {
    let (folder, small) = workbench();
    let csv = folder.path().join("model.csv");
    fs::write(&csv, "id,lower,upper,size\n0,0,2,64\n3,1,4,32\n1,2,5,48\n").unwrap();
    let metadata = string(&folder.path().join("plan.bin"));
    let ran = plan(&["solve", "--align", "16", "--format", "tflite", "--output", &metadata, &string(&csv)]);
    assert_eq!((ran.status, ran.err.as_str()), (DONE, ""));
    let bytes = fs::read(&metadata).unwrap();
    let words: Vec<i32> = bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect();
    assert_eq!(
        (&words[..3], words.len(), words[5]),
        (&[1, 0, 4][..], 7, -1),
        "version, subgraph, tensors; no tensor 2"
    );
    let (zero, one, three) = (words[3], words[4], words[6]);
    assert!([zero, one, three].iter().all(|offset| offset % 16 == 0 && (0..96).contains(offset)), "{words:?}");
    assert!(three >= zero + 64 || zero >= three + 32, "tensors 0 and 3 meet: {words:?}");
    assert!(three >= one + 48 || one >= three + 32, "tensors 1 and 3 meet: {words:?}");
    let ran = plan(&["solve", "--format", "tflite", &string(&small)]);
    assert_eq!(ran.status, BAD_INPUT);
    assert!(ran.err.contains("does not end in the number of a tensor"), "{}", ran.err);
}

#[test]
fn json_says_what_scripts_need() {
    let (_folder, small) = workbench();
    let ran = plan(&["solve", "--format", "json", &string(&small), &string(&small)]);
    assert_eq!(ran.status, DONE);
    let lines = ran.json();
    assert_eq!(lines.len(), 2, "one object per input");
    let first = &lines[0];
    // 1000, 4096, 3000, 600 and 2048 rounded up to 512.
    assert_eq!(first["total_bytes"], 1024 + 4096 + 3072 + 1024 + 2048);
    assert_eq!(first["lower_bound"], 1024 + 4096 + 3072);
    assert_eq!(first["makespan"], 8192);
    assert_eq!(first["ratio"], 1.0);
    assert_eq!((&first["optimal"], &first["buffers"], &first["alignment"]), (&true.into(), &5.into(), &512.into()));
    assert_eq!(first["peak_tick"], 3);
    let peak: u64 = first["peak"].as_array().unwrap().iter().map(|entry| entry["bytes"].as_u64().unwrap()).sum();
    assert_eq!(peak, 8192, "the buffers at the peak add up to the bound");
    for key in ["label", "bytes", "offset", "birth", "death"] {
        assert!(first["peak"][0].get(key).is_some(), "{key}");
    }
    assert_eq!(first["fingerprint"].as_str().unwrap().len(), 32);
    assert_eq!(first["fits"], true);
}

#[test]
fn json_of_an_empty_profile_has_ratio_one() {
    let (folder, _) = workbench();
    let empty = folder.path().join("empty.profile");
    fs::write(&empty, "terrace-profile 1\nname empty\n").unwrap();
    let line = &plan(&["solve", "--format", "json", &string(&empty)]).json()[0];
    assert_eq!((&line["ratio"], &line["makespan"], &line["optimal"]), (&1.0.into(), &0.into(), &true.into()));
}

#[test]
fn steps_are_chosen_by_number_key_or_all() {
    let (_folder, small) = workbench();
    let makespans = |step: &str| -> Vec<u64> {
        let ran = plan(&["solve", "--format", "json", "--step", step, &string(&small)]);
        assert_eq!(ran.status, DONE, "{}", ran.err);
        ran.json().iter().map(|line| line["makespan"].as_u64().unwrap()).collect()
    };
    // The logits are allocated in the first step and outlive it; the embedding before it is served outside.
    assert_eq!(makespans("all"), [7168, 2048]);
    assert_eq!(makespans("0"), [7168]);
    assert_eq!(makespans("decode/1"), [2048]);
}

#[test]
fn import_keeps_all_steps_or_cuts_one_out() {
    let (folder, small) = workbench();
    let imported = string(&folder.path().join("cut.profile"));
    let buffers = |step: &[&str]| {
        let (small, mut args) = (string(&small), vec!["import", "-o", &imported]);
        args.extend(step);
        args.push(&small);
        assert_eq!(plan(&args).status, DONE);
        plan(&["solve", "--format", "json", &imported]).json()[0]["buffers"].as_u64().unwrap()
    };
    assert_eq!((buffers(&[]), buffers(&["--step", "all"])), (5, 5));
    assert_eq!((buffers(&["--step", "0"]), buffers(&["--step", "decode/1"])), (3, 1));
}

#[test]
fn an_imported_profile_gives_the_plan_of_its_source() {
    let (folder, _) = workbench();
    let source = root().join("tests/corpus/traces/qwen27b_L4_chunked_T12384_C4128_dec4.events.json.gz");
    let snapshot = root().join("tests/corpus/traces/qwen27b_L4_chunked_T12384_C4128_dec4.snapshot.pickle.gz");
    let makespan = |path: &Path| {
        let ran = plan(&["solve", "--format", "json", &string(path)]);
        assert_eq!(ran.status, DONE, "{}", ran.err);
        let line = ran.json().remove(0);
        (line["makespan"].as_u64().unwrap(), line["lower_bound"].as_u64().unwrap(), line["optimal"].as_bool().unwrap())
    };
    let expected = (949_531_648, 949_531_648, true);
    assert_eq!(makespan(&source), expected);
    assert_eq!(makespan(&snapshot), expected);
    for (name, extra) in [("text.profile", None), ("binary.profile", Some("--binary"))] {
        let imported = folder.path().join(name);
        let (source, out) = (string(&source), string(&imported));
        let args: Vec<&str> = ["import", &source, "-o", &out].into_iter().chain(extra).collect();
        let ran = plan(&args);
        assert_eq!((ran.status, ran.err.as_str()), (DONE, ""));
        assert_eq!(makespan(&imported), expected, "{name}");
    }
}

#[test]
fn a_saved_plan_is_shown_and_compared() {
    let (folder, small) = workbench();
    let grown = folder.path().join("grown.profile");
    fs::write(&grown, SMALL.replace("a 2 3000 1", "a 2 5000 1")).unwrap();
    let (old, new) = (folder.path().join("old.plan"), folder.path().join("new.plan"));
    for (profile, saved) in [(&small, &old), (&grown, &new)] {
        assert_eq!(plan(&["solve", &string(profile), "-o", &string(saved)]).status, DONE);
    }
    assert_eq!(plan(&["show", &string(&old)]).text(), plan(&["solve", &string(&small)]).text());
    insta::assert_snapshot!(plan(&["diff", &string(&old), &string(&new)]).seen(folder.path()));
    let diff = plan(&["diff", "--json", &string(&old), &string(&new)]);
    insta::assert_snapshot!("diff_json", diff.seen(folder.path()));
}

#[test]
fn every_format_of_a_report_begins_as_it_should() {
    let (folder, small) = workbench();
    for (format, beginning) in
        [("html", "<!doctype html>"), ("svg", "<?xml"), ("dot", "graph "), ("json", "{\"name\""), ("text", "small\n")]
    {
        let file = folder.path().join(format);
        let ran = plan(&["solve", "--format", format, "--output", &string(&file), &string(&small)]);
        assert_eq!((ran.status, ran.out.len(), ran.err.as_str()), (DONE, 0, ""), "{format}");
        let text = fs::read_to_string(&file).unwrap();
        let start: String = text.chars().take(beginning.len()).collect();
        assert!(start.eq_ignore_ascii_case(beginning) || start.starts_with("<svg"), "{format} begins with {start}");
    }
    let ran = plan(&["solve", "--format", "torch-snapshot", &string(&small)]);
    assert_eq!((ran.out[0], *ran.out.last().unwrap()), (0x80, b'.'), "a pickle begins with PROTO and ends with STOP");
}

#[test]
fn what_torch_snapshot_writes_import_reads_with_the_same_plan() {
    let (folder, small) = workbench();
    let pickle = folder.path().join("plan.pickle");
    plan(&["solve", "--format", "torch-snapshot", "--output", &string(&pickle), &string(&small)]);
    let again = plan(&["solve", "--format", "json", &string(&pickle)]);
    assert_eq!(again.status, DONE, "{}", again.err);
    assert_eq!(again.json()[0]["lower_bound"], 8192);
    assert_eq!(again.json()[0]["buffers"], 5);
}

#[test]
fn completions_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let ran = plan(&["completions", shell]);
        assert_eq!(ran.status, DONE);
        for command in ["import", "solve", "show", "diff", "model", "fit", "check"] {
            assert!(ran.text().contains(command), "{shell} knows {command}");
        }
    }
}

#[test]
fn colour_comes_only_when_asked_for() {
    let (_folder, small) = workbench();
    let escape = |when: &str| plan(&["--color", when, "solve", &string(&small)]).text().contains('\u{1b}');
    assert_eq!((escape("always"), escape("never"), escape("auto")), (true, false, false));
}

#[test]
fn a_time_limit_of_nothing_still_gives_a_valid_plan_and_says_so() {
    let instance = root().join("tests/corpus/instances/minimalloc/A.1048576.csv");
    let ran = plan(&["solve", "--align", "1", "--time-limit", "0ms", "--format", "json", &string(&instance)]);
    assert_eq!(ran.status, DONE, "{}", ran.err);
    let line = ran.json().remove(0);
    assert_eq!((&line["interrupted"], &line["optimal"]), (&true.into(), &false.into()));
    assert!(line["makespan"].as_u64() >= line["lower_bound"].as_u64());
}

#[test]
fn bad_input_is_one_sentence_with_status_two_and_leaves_no_file() {
    let (folder, small) = workbench();
    let put = |name: &str, bytes: &[u8]| {
        fs::write(folder.path().join(name), bytes).unwrap();
        string(&folder.path().join(name))
    };
    let snapshot =
        fs::read(root().join("tests/corpus/traces/qwen27b_L4_chunked_T12384_C4128_dec4.snapshot.pickle.gz")).unwrap();
    plan(&["solve", &string(&small), "-o", &string(&folder.path().join("good.plan"))]);
    let good = fs::read(folder.path().join("good.plan")).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 4;
    let cases: Vec<(&str, Vec<String>)> = vec![
        ("missing file", vec!["solve".into(), string(&folder.path().join("nowhere"))]),
        ("empty file", vec!["solve".into(), put("empty", b"")]),
        ("unknown content", vec!["solve".into(), put("noise", b"\x00\x01\x02 what is this")]),
        ("truncated gzip", vec!["solve".into(), put("short.gz", &snapshot[..snapshot.len() / 2])]),
        ("pickle that asks for code", vec!["solve".into(), put("evil", b"\x80\x04cposix\nsystem\nq\x00.")]),
        ("truncated pickle", vec!["solve".into(), put("cut", b"\x80\x04}\x8c\x08segments")]),
        ("free without alloc", vec!["solve".into(), put("free", b"{\"labels\":[\"x\"],\"events\":[[\"f\",0]]}")]),
        (
            "negative size",
            vec!["solve".into(), put("neg", b"{\"labels\":[\"x\"],\"events\":[[\"a\",0,-5,0]]}")],
        ),
        (
            "size of 2^63",
            vec!["solve".into(), put("big", b"{\"labels\":[\"x\"],\"events\":[[\"a\",0,9223372036854775808,0]]}")],
        ),
        ("truncated json", vec!["solve".into(), put("json", b"{\"labels\":[\"x\"],\"events\":[[\"a\",0,5,0]")]),
        ("bad csv number", vec!["solve".into(), put("csv", b"id,lower,upper,size\n0,0,5,7\n1,1,x,7\n")]),
        ("csv life of nothing", vec!["solve".into(), put("csv0", b"id,lower,upper,size\n0,5,5,7\n")]),
        (
            "rmm address twice",
            vec![
                "solve".into(),
                put("rmm", b"Thread,Time,Action,Pointer,Size,Stream\n1,00:00:01,allocate,0x10,8,0x0\n1,00:00:02,allocate,0x10,8,0x0\n"),
            ],
        ),
        ("text of tomorrow", vec!["solve".into(), put("tomorrow", b"terrace-profile 2\n")]),
        ("text with a wrong line", vec!["solve".into(), put("wrong", b"terrace-profile 1\nlane s\nlabel l\na 0 12 0\nf 7\n")]),
        ("alignment of three", vec!["solve".into(), "--align".into(), "3".into(), string(&small)]),
        ("no such step", vec!["solve".into(), "--step".into(), "prefill/9".into(), string(&small)]),
        ("step out of range", vec!["solve".into(), "--step".into(), "7".into(), string(&small)]),
        ("no such device", vec!["import".into(), string(&small), "--device".into(), "3".into(), "-o".into(), "-".into()]),
        ("little memory", vec!["solve".into(), "--max-memory".into(), "256".into(), string(&small)]),
        ("truncated plan", vec!["show".into(), put("cut.plan", &good[..good.len() - 3])]),
        ("flipped bit in a plan", vec!["show".into(), put("flipped.plan", &flipped)]),
        ("profile instead of plan", vec!["show".into(), string(&small)]),
        ("bad capacity", vec!["solve".into(), "--capacity".into(), "lots".into(), string(&small)]),
        ("bad time", vec!["solve".into(), "--time-limit".into(), "soon".into(), string(&small)]),
        ("unknown format", vec!["solve".into(), "--format".into(), "pdf".into(), string(&small)]),
        ("no input", vec!["solve".into()]),
        ("html of two", vec!["solve".into(), "--format".into(), "html".into(), string(&small), string(&small)]),
        ("plan and report to standard output", vec!["solve".into(), "-o".into(), "-".into(), string(&small)]),
        (
            "folder that is not there",
            vec!["import".into(), string(&small), "-o".into(), string(&folder.path().join("no/where.profile"))],
        ),
    ];
    let mut seen = String::new();
    for (case, args) in cases {
        let report = folder.path().join("report");
        let with_output = args[0] == "solve";
        let mut all = args.clone();
        if with_output && case != "plan and report to standard output" {
            all.extend(["--output".to_owned(), string(&report)]);
        }
        let ran = plan(&all);
        assert_eq!(ran.status, BAD_INPUT, "{case}: {}", ran.err);
        assert!(ran.out.is_empty(), "{case}: nothing is printed");
        assert!(!report.exists(), "{case}: no report appears");
        seen +=
            &format!("{case}\n  {}", ran.seen(folder.path()).replace("status 2\n--- err\n", "").replace('\n', "\n  "));
        seen = seen.trim_end().to_owned() + "\n";
    }
    insta::assert_snapshot!(seen);
    let left: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| string(Path::new(&entry.unwrap().file_name())))
        .filter(|name| name.starts_with(".plan-"))
        .collect();
    assert!(left.is_empty(), "temporary files are left behind: {left:?}");
}

#[test]
fn a_bad_input_beside_good_ones_is_named_and_the_others_are_solved() {
    let (folder, small) = workbench();
    let missing = string(&folder.path().join("nowhere"));
    let ran = plan(&["solve", "--format", "json", &missing, &string(&small)]);
    assert_eq!(ran.status, BAD_INPUT);
    assert!(ran.err.starts_with("error: ") && ran.err.contains("nowhere"), "{}", ran.err);
    assert_eq!(ran.json().len(), 1);
}

#[test]
fn a_plan_that_does_not_fit_is_not_saved() {
    let (folder, small) = workbench();
    let saved = folder.path().join("small.plan");
    let ran = plan(&["solve", "--capacity", "6KiB", &string(&small), "-o", &string(&saved)]);
    assert_eq!((ran.status, saved.exists()), (FINDING, false));
}
