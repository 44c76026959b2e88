//! Importers as a contract: what each file becomes, and the exact sentence for each file that cannot become anything.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use terrace_profiles::import::{Format, Options, read, read_file};
use terrace_profiles::units::Bytes;
use terrace_profiles::{Life, Limits, Profile};

mod csv;
mod fuzz;
mod pickler;
mod steps;
mod torch;

fn corpus(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/corpus")).join(path)
}

fn recorded() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../profiles/recorded")).to_owned()
}

/// The one profile of a file in the corpus.
fn load(path: &str) -> Profile {
    let mut profiles = read_file(&corpus(path), &Options::default()).unwrap();
    assert_eq!(profiles.len(), 1);
    profiles.remove(0)
}

fn parse(bytes: &[u8]) -> Result<Vec<Profile>, String> {
    read(bytes, "x", &Options::default()).map_err(|error| error.to_string())
}

/// The one profile of an input.
fn one(bytes: &[u8]) -> Profile {
    let mut profiles = parse(bytes).unwrap();
    assert_eq!(profiles.len(), 1);
    profiles.remove(0)
}

/// Asserts the message of an input, without the name in front.
#[track_caller]
fn fails(bytes: &[u8], message: &str) {
    assert_eq!(parse(bytes).unwrap_err(), format!("x: {message}"));
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// The most bytes alive at once, the slow way round.
fn peak(lives: &[Life]) -> u64 {
    let mut changes: Vec<_> = lives
        .iter()
        .flat_map(|life| {
            let bytes = i128::from(life.bytes.get());
            [(life.birth, bytes), (life.death, -bytes)]
        })
        .collect();
    // Ends come before beginnings of the same tick.
    changes.sort();
    let mut now = 0;
    let peak = changes
        .iter()
        .map(|(_, change)| {
            now += change;
            now
        })
        .max()
        .unwrap_or(0);
    u64::try_from(peak).unwrap()
}

fn note<'a>(profile: &'a Profile, key: &str) -> Option<&'a str> {
    profile.notes.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
}

#[test]
fn instances_have_the_published_size_and_bound() {
    for (path, buffers, bound) in [
        ("minimalloc/A.1048576.csv", 154, 1_048_576),
        ("minimalloc/B.1048576.csv", 170, 1_048_576),
        ("minimalloc/C.1048576.csv", 203, 1_039_360),
        ("minimalloc/D.1048576.csv", 213, 986_112),
        ("minimalloc/E.1048576.csv", 215, 1_048_576),
        ("minimalloc/F.1048576.csv", 296, 1_048_576),
        ("minimalloc/G.1048576.csv", 308, 1_048_576),
        ("minimalloc/H.1048576.csv", 316, 1_048_576),
        ("minimalloc/I.1048576.csv", 374, 1_048_576),
        ("minimalloc/J.1048576.csv", 409, 989_184),
        ("minimalloc/K.1048576.csv", 454, 1_048_576),
        ("minimalloc/input.12.csv", 5, 12),
        ("idealloc/G_1.csv.gz", 816, 3_030_937_746),
        ("idealloc/S_1.csv.gz", 28_526, 1_498_635_932),
        ("idealloc/Y_1.csv.gz", 62_185, 497_261_190_115),
        ("idealloc/resnet50.csv.gz", 1_042, 1_515_472_556),
        ("idealloc/pangu_2.6B.csv.gz", 18_692, 5_530_099_775),
        ("iopddl/iopddl-A-max.csv.gz", 30_011, 13_735_016_300),
        ("iopddl/iopddl-B-max.csv.gz", 665, 418_691_216),
        ("iopddl/iopddl-P-max.csv.gz", 59_063, 2_607_551_487_230),
        ("synthetic/synth-10k.csv.gz", 10_000, 515_414_016),
        ("synthetic/dense-10k.csv.gz", 10_000, 7_165_135_872),
        ("synthetic/xfmr-train-64l.csv.gz", 3_203, 37_855_690_752),
        ("synthetic/xfmr-infer-64l.csv.gz", 3_200, 604_351_488),
    ] {
        let lives = load(&format!("instances/{path}")).lives().unwrap();
        assert_eq!((lives.len(), peak(&lives)), (buffers, bound), "{path}");
    }
}

#[test]
fn recorded_profiles_have_the_sizes_of_their_origin() {
    for (name, buffers, expect, steps, reserved) in [
        ("qwen3.6-27b-prefill-4128", 4_649, 1_260_234_240, 0, "1528823808 bytes"),
        ("qwen3.6-27b-prefill-16384", 4_649, 4_538_761_216, 0, "5685379072 bytes"),
        ("qwen3.6-27b-prefill-60000", 4_649, 16_209_793_536, 0, "20759707648 bytes"),
        ("qwen3.6-27b-chunked-12384", 29_965, 1_855_648_256, 0, "2306867200 bytes"),
        ("qwen3.6-27b-L4-chunked-12384", 2_050, 949_531_136, 0, "1780482048 bytes"),
        ("dense8-mixed", 7_336, 6_326_479_104, 12, "14340325376 bytes"),
        ("dense8-multiturn", 25_816, 1_441_279_504, 48, "3185573888 bytes"),
        ("moe8-mixed", 7_256, 1_423_818_176, 8, "3028287488 bytes"),
        ("moe8-multiturn", 18_385, 660_083_456, 22, "1096810496 bytes"),
    ] {
        let path = recorded().join(format!("{name}.profile"));
        let profiles = read_file(&path, &Options::default()).unwrap();
        let [profile] = profiles.as_slice() else { panic!("{name} is one profile") };
        let lives = profile.lives().unwrap();
        assert_eq!(profile.name, name);
        assert_eq!((lives.len(), peak(&lives), profile.steps().len()), (buffers, expect, steps), "{name}");
        assert_eq!(note(profile, "gpu"), Some("NVIDIA H200"), "{name}");
        assert_eq!(note(profile, "reserved"), Some(reserved), "{name}");
    }
}

#[test]
fn a_recorded_profile_holds_the_events_of_its_original() {
    for (name, original) in [
        ("qwen3.6-27b-L4-chunked-12384", "qwen27b_L4_chunked_T12384_C4128_dec4.events.json.gz"),
        ("moe8-mixed", "moe8_mixed.steps.json.gz"),
    ] {
        let path = recorded().join(format!("{name}.profile"));
        let profile = read_file(&path, &Options::default()).unwrap().remove(0);
        assert_eq!(profile.fingerprint(), load(&format!("traces/{original}")).fingerprint(), "{name}");
    }
}

#[test]
fn the_format_is_told_from_the_content() {
    let json = br#"  {"labels": [], "events": []}"#;
    let log = b"Thread,Time,Action,Pointer,Size,Stream\n";
    let csv = b"\r\n size , begin , upper , buffer_id \r\n";
    let text = b"terrace-profile 1\n";
    let utf8_mark = [b"\xef\xbb\xbf".as_slice(), text].concat();
    for input in [json.as_slice(), log, csv, text, &utf8_mark] {
        assert_eq!(one(input).events, []);
        assert_eq!(one(&gzip(input)).events, []);
    }
}

#[test]
fn what_is_no_format_is_said_to_be_none() {
    let known = "the formats are torch-snapshot, steps, rmm, minimalloc, profile, name one with --format";
    fails(b"", "the file is empty");
    fails(&gzip(b""), "the file is empty");
    fails(b" \n ", "the file holds only blanks");
    fails(b"[1, 2]", &format!("a JSON list is none of the formats; {known}"));
    fails(
        b"hello, world\nagain",
        &format!("the content begins with 'hello, world' and is none of the formats; {known}"),
    );
    fails(b"\x01\x02\x03", &format!("the content is binary and none of the formats; {known}"));
    fails(&gzip(b"terrace-profile 1\n")[..12], "the gzip data ends early; the file is truncated");
}

#[test]
fn a_given_format_is_not_guessed() {
    let with = |format, bytes: &[u8]| {
        let options = Options { format, ..Options::default() };
        read(bytes, "x", &options).map_err(|error| error.to_string())
    };
    assert_eq!(with(Format::Minimalloc, b"").unwrap_err(), "x: the file is empty");
    assert_eq!(
        with(Format::TorchSnapshot, b"(dp0\n.").unwrap_err(),
        "x: byte 0: the file does not begin as a pickle; pickles of protocol 2 to 5 are read"
    );
    assert_eq!(with(Format::Rmm, b"a,b\n1,2\n").unwrap_err(), "x: line 1: the header has no column 'action'");
    assert_eq!(
        with(Format::Profile, b"{}").unwrap_err(),
        "x: line 1: a profile begins with 'terrace-profile 1', not with '{}'"
    );
    assert!(with(Format::Steps, b"a,b").unwrap_err().starts_with("x: expected value, at line 1, column 1"));
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = read_file(Path::new("/nowhere/to.be"), &Options::default()).unwrap_err().to_string();
    assert!(error.starts_with("/nowhere/to.be: No such file"), "{error}");
}

#[test]
fn a_stream_that_breaks_is_an_error_of_the_system() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::new(std::io::ErrorKind::BrokenPipe, "the cable is out"))
        }
    }
    let inputs: [(&[u8], &[u8]); 6] = [
        (b"", b""),
        (b"{\"events\":[", b"[\"s\",\"\"],[\"e\"],"),
        (b"id,lower,upper,size\n", b"\n"),
        (b"terrace-profile 1\n", b"#\n"),
        (b"\x80\x02]", b"N0"),
        (b"TERRACE\x1aPROF\x01\0\0\0", b"\xff"),
    ];
    for (head, filler) in inputs {
        let long = [head, &filler.repeat(5000)].concat();
        for start in [head, &long] {
            let error = read(start.chain(Broken), "x", &Options::default()).unwrap_err();
            assert_eq!(error.to_string(), "x: the cable is out");
        }
    }
}

#[test]
fn only_snapshots_have_devices() {
    let options = Options { device: Some(1), ..Options::default() };
    assert_eq!(
        read(b"id,lower,upper,size\n".as_slice(), "x", &options).unwrap_err().to_string(),
        "x: device 1 is asked for, but only snapshots of torch know devices; leave it out"
    );
}

#[test]
fn a_profile_is_named_after_its_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run7.steps.json.gz");
    std::fs::write(&path, gzip(br#"{"labels":[],"events":[]}"#)).unwrap();
    let profile = read_file(&path, &Options::default()).unwrap().remove(0);
    assert_eq!(profile.name, "run7");
    assert_eq!(note(&profile, "source"), Some("run7.steps.json.gz"));
    std::fs::write(&path, "terrace-profile 1\n").unwrap();
    assert_eq!(read_file(&path, &Options::default()).unwrap()[0].name, "run7");
    std::fs::write(&path, "terrace-profile 1\nname other\n").unwrap();
    assert_eq!(read_file(&path, &Options::default()).unwrap()[0].name, "other");
}

#[test]
fn a_bomb_ends_at_the_memory_allowed() {
    let tiny = Options { limits: Limits { memory: Bytes::new(1 << 20).unwrap() }, ..Options::default() };
    let needs = "the profile needs more than the 1.0 MiB of memory allowed; raise --max-memory or cut the input";
    let many = |head: &str, item: &str, tail: &str| [head, &item.repeat(1 << 17), tail].concat().into_bytes();
    let bombs = [
        many("terrace-profile 1\nlabel ", "xxxxxxxxxxxxxxxx", "\n"),
        many("terrace-profile 1\n", "label\n", ""),
        many("terrace-profile 1\n", "e\n", ""),
        many("{\"events\":[", "[\"e\"],", "[\"e\"]]}"),
        many("{\"labels\":[\"", "xxxxxxxxxxxxxxxx", "\"]}"),
        many("{\"x", "xxxxxxxxxxxxxxxx", "\":0}"),
        many("{\"events\":[[\"s\",\"", "xxxxxxxxxxxxxxxx", "\"]]}"),
        many("{\"info\":{\"a\":\"", "xxxxxxxxxxxxxxxx", "\"}}"),
        many("id,lower,upper,size,", "column,", "\n"),
        many("id,lower,upper,size\n\"", "xxxxxxxxxxxxxxxx\n", "\",0,1,1\n"),
        many("action,pointer,size\n\"", "xxxxxxxxxxxxxxxx\n", "\",0,1\n"),
        [&b"\x80\x02"[..], &b"]".repeat(1 << 17)].concat(),
        [&b"\x80\x02"[..], &b"(".repeat(1 << 17)].concat(),
        [&b"\x80\x02N"[..], &b"\x94".repeat(1 << 17)].concat(),
        [&b"\x80\x02]"[..], &b"Na".repeat(1 << 17)].concat(),
        [&b"\x80\x02}"[..], &b"NNs".repeat(1 << 17)].concat(),
        [&b"\x80\x02X\xff\xff\xff\x7f"[..], &b"x".repeat(1 << 21)].concat(),
        [&b"TERRACE\x1aPROF\x01\0\0\0"[..], &[0; 16], &[0xff; 8], &[0; 4], &b"x".repeat(1 << 21)].concat(),
    ];
    for bomb in &bombs {
        for bytes in [bomb, &gzip(bomb)] {
            let message = read(bytes.as_slice(), "x", &tiny).unwrap_err().to_string();
            assert!(message.starts_with("x: ") && message.ends_with(needs), "{message}");
        }
    }
    let rows: String = (0..1 << 15).map(|row| format!("{row},0,1,1\n")).collect();
    let message = read(format!("id,lower,upper,size\n{rows}").as_bytes(), "x", &tiny).unwrap_err().to_string();
    assert!(message.contains("line ") && message.ends_with(needs), "{message}");
}
