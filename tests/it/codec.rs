//! The text and the binary form: what goes in comes out, and damage is named where it is.

use proptest::prelude::*;
use serde_json::json;
use terrace_profiles::codec::{Kind, PROFILE_VERSION, decode, decode_profile, encode, encode_profile, fingerprint_of};
use terrace_profiles::text::{read_text, write_text};
use terrace_profiles::units::{Align, Bytes, Offset, Tick};
use terrace_profiles::{Action, BufferId, Event, Fingerprint, Hints, LabelId, LaneId, Limits, Profile};

/// A profile that keeps every rule, from random choices.
fn profile() -> impl Strategy<Value = Profile> {
    let name = "[ -~\n\t\r\\\\é\u{2028}]{0,12}";
    let texts = || prop::collection::vec(name, 1..4);
    let choice = (0..12_u8, any::<u64>(), any::<u64>());
    (name, prop::collection::vec((name, name), 0..3), texts(), texts(), prop::collection::vec(choice, 0..60), 0..3_u8)
        .prop_map(|(name, notes, labels, lanes, choices, pace)| {
            let mut made = Profile { name, notes, labels, lanes, events: Vec::new() };
            let mut live: Vec<(u32, u64, Tick, bool)> = Vec::new();
            let (mut next, mut tick, mut open) = (0, Tick(0), false);
            for (what, a, b) in choices {
                // The ways a record keeps time: each event its own tick, gaps, or shared ticks.
                match pace {
                    0 => tick = Tick(made.events.len() as u64),
                    1 => tick.0 += a % 1000,
                    _ => tick.0 += a % 2,
                }
                let label = LabelId((a % made.labels.len() as u64) as u32);
                let lane = LaneId((b % made.lanes.len() as u64) as u32);
                let pick = (a % live.len().max(1) as u64) as usize;
                let old = live.get(pick).filter(|(_, _, birth, _)| *birth < tick).copied();
                let action = match (what, old) {
                    (0..=4, _) => {
                        let bytes = a >> (1 + b % 63);
                        let hints = Hints {
                            align: (b % 3 == 0).then(|| Align::new(1 << (a % 41)).unwrap()),
                            fixed: (b % 5 == 0).then(|| Offset::new((i64::MAX as u64 - bytes) >> (b % 7)).unwrap()),
                            alias: live.get(pick).filter(|_| b % 7 == 0).map(|(id, ..)| BufferId(*id)),
                        };
                        let hints = (hints != Hints::default()).then(|| Box::new(hints));
                        let bytes = Bytes::new(bytes).unwrap();
                        let id = BufferId(next);
                        live.push((next, bytes.get(), tick, false));
                        next += 1;
                        Action::Alloc { id, bytes, label, lane, hints }
                    }
                    (5 | 6, Some((id, ..))) => {
                        live.swap_remove(pick);
                        Action::Free { id: BufferId(id) }
                    }
                    (7, Some((id, .., false))) => {
                        live[pick].3 = true;
                        Action::FreeRequested { id: BufferId(id) }
                    }
                    (8, Some((id, bytes, ..))) => {
                        let to = b % (bytes + 1);
                        Action::Keep {
                            id: BufferId(id),
                            from: Bytes::new(to / 2).unwrap(),
                            to: Bytes::new(to).unwrap(),
                        }
                    }
                    (9, _) if open => {
                        open = false;
                        Action::StepEnd
                    }
                    (9, _) => {
                        open = true;
                        Action::StepBegin { key: format!("k\n{a} ").into() }
                    }
                    (10, _) => Action::Wait { lane, on: LaneId(0) },
                    _ => Action::Op { label, lane },
                };
                made.events.push(Event { tick, action });
            }
            made
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn both_forms_give_back_what_they_got(made in profile()) {
        prop_assert!(made.check().is_ok());
        let mut text = Vec::new();
        write_text(&made, &mut text).unwrap();
        prop_assert_eq!(&read_text(&mut text.as_slice(), "x", &Limits::default()).unwrap(), &made);
        let bytes = encode_profile(&made).unwrap();
        prop_assert_eq!(&decode_profile("x", &bytes).unwrap(), &made);
    }

    #[test]
    fn any_flipped_bit_of_a_binary_file_is_noticed(made in profile(), at in any::<usize>(), bit in 0..8_u32) {
        let mut bytes = encode_profile(&made).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1_u8 << bit;
        let error = decode_profile("x", &bytes).unwrap_err().to_string();
        prop_assert!(!error.contains(char::is_control), "{}", error);
    }
}

fn toy() -> Profile {
    let text = "terrace-profile 1\nname toy\nlane stream 0\nlabel f\na 0 4096 0\nf 0\n";
    read_text(&mut text.as_bytes(), "toy", &Limits::default()).unwrap()
}

#[test]
fn the_layout_of_the_file_is_what_the_readme_says() {
    let bytes = encode_profile(&toy()).unwrap();
    assert_eq!(&bytes[..16], b"TERRACE\x1aPROF\x01\0\0\0");
    assert_eq!(bytes[16..32], toy().fingerprint().bytes());
    assert_eq!(bytes[32..40], (bytes.len() as u64 - 44).to_le_bytes());
    // name, no notes, one label, one lane, two events: lengths and numbers below 251 are one byte.
    let payload = b"\x03toy\0\x01\x01f\x01\x08stream 0\x02\0\0\0\xfb\0\x10\0\0\0\x01\x02\0";
    assert_eq!(bytes[44..], *payload);
    // printf 'terrace profile\0<the payload without name and notes>' | sha256sum
    assert_eq!(toy().fingerprint().to_string(), "e11604e91431a1d971c6fbf17e5c9b00");
}

#[test]
fn a_fingerprint_covers_what_happened_and_nothing_else() {
    let toy = toy();
    let with = |change: fn(&mut Profile)| {
        let mut other = toy.clone();
        change(&mut other);
        other.fingerprint()
    };
    assert_eq!(with(|p| p.name = "other".to_owned()), toy.fingerprint());
    assert_eq!(with(|p| p.notes.push(("a".to_owned(), "b".to_owned()))), toy.fingerprint());
    assert_ne!(with(|p| p.labels[0].push('x')), toy.fingerprint());
    assert_ne!(with(|p| p.lanes[0].push('x')), toy.fingerprint());
    assert_ne!(with(|p| p.events[1].tick = Tick(2)), toy.fingerprint());
    assert_ne!(fingerprint_of("a", &1_u8), fingerprint_of("b", &1_u8));
}

#[test]
fn each_kind_of_damage_has_its_sentence() {
    let good = encode_profile(&toy()).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        bad
    };
    let end = good.len() as u64;
    let content = end - 44;
    let plan = encode(Kind::Plan, 1, toy().fingerprint(), &toy()).unwrap();
    let next = encode(Kind::Profile, 2, toy().fingerprint(), &toy()).unwrap();
    let zeroth = encode(Kind::Profile, 0, toy().fingerprint(), &toy()).unwrap();
    let lied = encode(Kind::Profile, PROFILE_VERSION, Fingerprint::new([0xaa; 16]), &toy()).unwrap();
    let number = encode(Kind::Profile, PROFILE_VERSION, toy().fingerprint(), &7_u8).unwrap();
    let trailing = encode(Kind::Profile, PROFILE_VERSION, toy().fingerprint(), &(toy(), 0_u8)).unwrap();
    let huge = encode(Kind::Profile, PROFILE_VERSION, toy().fingerprint(), &(253_u8, u64::MAX, 0_u8)).unwrap();
    let print = toy().fingerprint();
    for (bad, message) in [
        (Vec::new(), "byte 0: the file ends within its header of 44 bytes; the file is truncated".to_owned()),
        (good[..43].to_vec(), "byte 43: the file ends within its header of 44 bytes; the file is truncated".to_owned()),
        (with(0, b"t"), "byte 0: this is not a file of terrace: its first bytes differ".to_owned()),
        (plan, "byte 8: the file holds a plan, not a profile".to_owned()),
        (with(8, b"BLOB"), "byte 8: the file holds 'BLOB', which this build does not know".to_owned()),
        (next, "byte 12: the profile has version 2 and this build reads version 1; use a newer build".to_owned()),
        (
            zeroth,
            "byte 12: the profile has version 0 and this build reads version 1; make the file again, or convert it with the build that wrote it".to_owned(),
        ),
        (with(14, &[1]), "byte 14: the flags are 0x0001, of which this build knows none; use a newer build".to_owned()),
        (
            good[..good.len() - 1].to_vec(),
            format!("byte {}: the file ends after {} of {content} bytes of content; the file is truncated", end - 1, content - 1),
        ),
        (
            with(32, &u64::MAX.to_le_bytes()),
            format!("byte {end}: the file ends after {content} of 18446744073709551615 bytes of content; the file is truncated"),
        ),
        ([good.clone(), vec![0]].concat(), format!("byte {end}: bytes follow the end of the file's content; the file is damaged")),
        (lied, format!("byte 16: the content has the fingerprint {print}, but the file says {}", "aa".repeat(16))),
        (number, "byte 44: the payload is not a profile: it ends early".to_owned()),
        (trailing, format!("byte {end}: the payload goes on after the profile")),
        (huge, "byte 44: the payload is not a profile: a length in it is longer than the payload".to_owned()),
    ] {
        assert_eq!(decode_profile("x", &bad).unwrap_err().to_string(), format!("x: {message}"));
    }
    let message = decode_profile("x", &with(44, &[4])).unwrap_err().to_string();
    assert!(
        message.starts_with("x: byte 40: the checksum is ") && message.ends_with("; the file is damaged"),
        "{message}"
    );
}

#[test]
fn sizes_and_alignments_out_of_range_do_not_come_in_through_the_binary_form() {
    // The same shapes as a profile's, with numbers that its types refuse.
    type Plain = (
        String,
        Vec<(String, String)>,
        Vec<String>,
        Vec<String>,
        Vec<(u64, u32, u32, u64, u32, u32, Option<(Option<u64>, Option<u64>, Option<u32>)>)>,
    );
    let with = |bytes, hints| -> Plain {
        ("x".to_owned(), vec![], vec!["f".to_owned()], vec!["s".to_owned()], vec![(0, 0, 0, bytes, 0, 0, hints)])
    };
    for (value, message) in [
        (with(1 << 63, None), "the result is more than 2^63 - 1 bytes"),
        (with(8, Some((Some(3), None, None))), "alignment 3 is not a power of two between 1 and 2^40"),
        (with(8, Some((None, Some(1 << 63), None))), "the result is more than 2^63 - 1 bytes"),
    ] {
        let bytes = encode(Kind::Profile, PROFILE_VERSION, Fingerprint::new([0; 16]), &value).unwrap();
        assert_eq!(
            decode_profile("x", &bytes).unwrap_err().to_string(),
            format!("x: byte 44: the payload is not a profile: {message}")
        );
    }
}

#[test]
fn a_profile_that_breaks_a_rule_does_not_come_out() {
    let mut bad = toy();
    bad.events.swap(0, 1);
    bad.events[0].tick = Tick(0);
    bad.events[1].tick = Tick(0);
    let bytes = encode_profile(&bad).unwrap();
    assert_eq!(
        decode_profile("x", &bytes).unwrap_err().to_string(),
        "x: event 0: buffer 0 is named before it is allocated"
    );
}

#[test]
fn any_plain_value_has_an_envelope() {
    let value = vec![("a".to_owned(), Some(3_u64)), (String::new(), None)];
    let print = fingerprint_of("test", &value);
    let bytes = encode(Kind::Plan, 3, print, &value).unwrap();
    assert_eq!(decode::<Vec<(String, Option<u64>)>>(Kind::Plan, 3, "x", &bytes).unwrap(), (print, value));
    assert_eq!(json!({ "print": print }).to_string(), format!("{{\"print\":\"{print}\"}}"));
}
