//! Damaged inputs of every format: never a panic, always checked profiles or one sentence.
//!
//! A case is a seed. CI runs a few hundred; by hand, `TERRACE_FUZZ_CASES=1000000 cargo test -p terrace-tests --release
//! long_fuzz -- --ignored --nocapture` runs as many as asked for, from `TERRACE_FUZZ_SEED` (0).

use proptest::prelude::*;
use terrace_profiles::import::{Format, Options, read};
use terrace_profiles::units::Bytes;
use terrace_profiles::{Limits, codec, text};
use terrace_tests::generate::Random;

use super::pickler::{Py, dict, dumps, list};
use super::{gzip, one};

/// A place in something of that length.
fn place(random: &mut Random, length: usize) -> usize {
    random.below(length.max(1) as u64) as usize
}

/// A small valid input of each format, with everything in it that the format knows.
fn samples() -> Vec<Vec<u8>> {
    let text = "terrace-profile 1\nname toy\nnote gpu NVIDIA\\s\nlane stream 0\nlane s\nlabel a\nlabel b\ns k\na 0 4096 0\n\
        a 1 512 1 lane=1 align=512 at=1024 alias=0\no 1 lane=1\nw 1 0\nr 0\nk 1 0 256\nf 0\ne\nt 100\n# c\nf 1\n";
    let profile = one(text.as_bytes());
    let json = r#"{"info":{"gpu":"H","x":1.5,"y":null,"z":[1]},"labels":["m.py:1:f","é\n"],"events":
        [["s","p/1"],["a",0,4096,0],["a",9,1,-1],["f",0,4096,0],["e"],["f",9]]}"#;
    let rmm = "Thread,Time,Action,Pointer,Size,Stream\n1,14:21:19.9,allocate,0x30a000000,256,0x2\n\
        1,14:21:20.0,allocate failure,(nil),1024,0x2\n1,14:21:20.1,free,0x30a000000,256,0x2\n";
    let csv = "id,lower,upper,size,alignment,hint,offset,gaps\nb1,0,9,100,64,-1,0,2-4@0:8 5-6\n\"b,2\",-3,5,60,1,2,,\n";
    let snapshot = snapshot();
    let mut samples = vec![text.into(), json.into(), rmm.into(), csv.into(), dumps(&snapshot, 2), dumps(&snapshot, 4)];
    samples.push(codec::encode_profile(&profile).unwrap());
    samples
}

fn snapshot() -> Py {
    let frames = list(vec![dict([("name", "f".into()), ("filename", "a.py".into()), ("line", 3.into())])]);
    let entry = |action: &str, address: i128, size: i128, time: i128| {
        dict([
            ("action", action.into()),
            ("addr", address.into()),
            ("size", size.into()),
            ("stream", 0.into()),
            ("time_us", time.into()),
            ("frames", frames.clone()),
        ])
    };
    let trace = list(vec![
        entry("alloc", 0x7f00_0000_0000, 512, 1),
        entry("free_requested", 0x7f00_0000_0000, 512, 2),
        entry("free_completed", 0x7f00_0000_0000, 512, 3),
        entry("free", 0x7f00_0000_1000, 1 << 40, 4),
    ]);
    let block = dict([("address", 64.into()), ("size", 512.into()), ("state", "active_allocated".into())]);
    let segment = dict([
        ("device", 0.into()),
        ("total_size", 512.into()),
        ("blocks", list(vec![block])),
        ("frames", frames.clone()),
    ]);
    let mark = |stage: &str, time: i128| {
        dict([
            ("stage", stage.into()),
            ("name", "ProfilerStep#1".into()),
            ("device", 0.into()),
            ("time_us", time.into()),
        ])
    };
    dict([
        ("segments", list(vec![segment])),
        ("device_traces", list(vec![trace, list(vec![])])),
        (
            "allocator_settings",
            dict([("PYTORCH_CUDA_ALLOC_CONF", "a:b".into()), ("x", Py::Bool(true)), ("y", Py::None)]),
        ),
        ("external_annotations", list(vec![mark("START", 1), mark("END", 9)])),
        ("t", Py::Tuple(vec![Py::Float(0.5), (1_i128 << 70).into(), (-1).into(), 300.into()])),
    ])
}

/// Texts that parsers stumble over.
const ODD: [&[u8]; 16] = [
    b"-1",
    b"0",
    b"9223372036854775807",
    b"9223372036854775808",
    b"18446744073709551615",
    b"18446744073709551616",
    b"1e309",
    b"\\",
    b"\n",
    b"\"",
    b",",
    b"[",
    b"\xff",
    b"\0",
    b"\xe2\x80\xa8",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
];

fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    // Half the cases are damaged in one place only, to get as far as a parser goes.
    for _ in 0..=place(random, 2) * place(random, 4) {
        let at = place(random, bytes.len());
        match place(random, 8) {
            _ if bytes.is_empty() => bytes.push(random.draw() as u8),
            0 => bytes.truncate(at),
            1 | 2 => bytes[at] ^= 1 << place(random, 8),
            3 => bytes[at] = random.draw() as u8,
            4 => {
                let odd = ODD[place(random, ODD.len())];
                let end = (at + place(random, 8)).min(bytes.len());
                bytes.splice(at..end, odd.iter().copied());
            }
            5 => {
                let end = (at + place(random, 64)).min(bytes.len());
                bytes.drain(at..end);
            }
            6 => {
                let end = (at + place(random, 64)).min(bytes.len());
                let piece = bytes[at..end].to_vec();
                let to = place(random, bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => {
                let to = place(random, bytes.len());
                bytes.swap(at, to);
            }
        }
    }
}

/// Makes a damaged envelope fit its payload again, so that the damage reaches what is behind it.
fn seal(bytes: &mut [u8]) {
    if bytes.len() < 44 {
        return;
    }
    let length = bytes.len() as u64 - 44;
    bytes[32..40].copy_from_slice(&length.to_le_bytes());
    let mut crc = u32::MAX;
    for byte in bytes[..40].iter().chain(&bytes[44..]) {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    bytes[40..44].copy_from_slice(&(!crc).to_le_bytes());
}

/// Runs one case; the input, for a message, if it breaks the contract.
fn case(samples: &[Vec<u8>], seed: u64) -> Result<bool, String> {
    let mut random = Random::new(seed);
    let mut bytes = match place(&mut random, 16) {
        0 => (0..place(&mut random, 200)).map(|_| random.draw() as u8).collect(),
        1 => {
            let mut bytes = vec![0x80, 4];
            // Mostly operations that exist.
            let codes = b"NKMJ(]})tausehjqr0128\x85\x86\x87\x88\x89\x8a\x8c\x94\x95.";
            bytes.extend((0..place(&mut random, 100)).map(|_| codes[place(&mut random, codes.len())]));
            bytes
        }
        _ => {
            let mut bytes = samples[place(&mut random, samples.len())].clone();
            damage(&mut bytes, &mut random);
            bytes
        }
    };
    if bytes.starts_with(&codec::MAGIC) && place(&mut random, 4) > 0 {
        seal(&mut bytes);
    }
    if place(&mut random, 8) == 0 {
        bytes = gzip(&bytes);
        if place(&mut random, 2) == 0 {
            damage(&mut bytes, &mut random);
        }
    }
    let format = if place(&mut random, 4) == 0 { Format::ALL[place(&mut random, 6)] } else { Format::Auto };
    let limits = Limits { memory: Bytes::new(1 << 28).unwrap() };
    match read(bytes.as_slice(), "x", &Options { format, device: None, limits }) {
        Ok(profiles) => {
            for profile in &profiles {
                profile.check().map_err(|error| format!("seed {seed}: unchecked: {error}"))?;
                let mut again = Vec::new();
                text::write_text(profile, &mut again).unwrap();
                let back = text::read_text(&mut again.as_slice(), "y", &limits);
                if back.as_ref().ok() != Some(profile) {
                    return Err(format!("seed {seed}: {profile:?} came back as {back:?}"));
                }
                let bytes = codec::encode_profile(profile).unwrap();
                if codec::decode_profile("y", &bytes).ok().as_ref() != Some(profile) {
                    return Err(format!("seed {seed}: the binary form differs"));
                }
            }
            Ok(true)
        }
        Err(error) => {
            let message = error.to_string();
            let sentence = message.len() > 5 && message.len() < 600 && !message.contains(char::is_control);
            if sentence { Ok(false) } else { Err(format!("seed {seed}: no sentence: {message:?}")) }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn damaged_inputs_give_profiles_or_one_sentence(seed in any::<u64>()) {
        thread_local!(static SAMPLES: Vec<Vec<u8>> = samples());
        prop_assert_eq!(SAMPLES.with(|samples| case(samples, seed)).err(), None);
    }
}

#[test]
fn every_sample_is_valid() {
    for sample in samples() {
        one(&sample);
        one(&gzip(&sample));
    }
}

#[test]
fn every_truncation_gives_a_profile_or_one_sentence() {
    for sample in samples() {
        for end in 0..sample.len() {
            if let Err(message) = super::parse(&sample[..end]) {
                assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
            }
        }
    }
}

#[test]
#[ignore = "by hand: runs as many cases as TERRACE_FUZZ_CASES says"]
fn long_fuzz() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (cases, first): (u64, u64) = (number("TERRACE_FUZZ_CASES", 100_000), number("TERRACE_FUZZ_SEED", 0));
    let samples = samples();
    let mut accepted = 0_u64;
    for seed in first..first + cases {
        accepted += u64::from(case(&samples, seed).unwrap());
    }
    println!("{cases} cases from seed {first}: {accepted} read, the others refused");
}
