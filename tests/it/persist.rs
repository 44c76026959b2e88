//! Saved plans: a restart gives the same addresses, and no file, however damaged, foreign or forged, gives anything but a valid
//! device.

use std::path::Path;

use serde::ser::{Serialize, SerializeTuple, Serializer};
use terrace_allocator::backing::Stream;
use terrace_allocator::fake::FakeDevice;
use terrace_allocator::{ARENA_VERSION, Config, Device, Existing, Identity};
use terrace_profiles::codec::{Fingerprint, Kind, encode, fingerprint_of};
use terrace_profiles::units::{Align, Bytes};

const MAIN: Stream = Stream(3);
const SIDE: Stream = Stream(9);

fn bytes(bytes: u64) -> Bytes {
    Bytes::new(bytes).unwrap()
}

fn config() -> Config {
    Config { verify_steps: 2, ..Config::new(bytes(1 << 20)) }
}

fn open(config: Config) -> Device {
    Device::new(Box::new(FakeDevice::new(bytes(1 << 30))), config).unwrap()
}

fn here() -> Identity {
    Identity { rank: 1, tag: "27b fp8".to_owned() }
}

/// Sizes, and the index of the request after which each is freed; on two streams. The last request outlives the step.
fn forward(device: &mut Device, key: &str, scale: u64) -> Vec<u64> {
    let requests = [(4, 2), (1, 1), (6, 4), (3, 3), (2, 5), (5, 5), (1, 99)];
    device.begin_step(key.as_bytes(), MAIN).unwrap();
    let mut spans = Vec::new();
    for (index, (size, _)) in requests.iter().enumerate() {
        let stream = if index % 3 == 2 { SIDE } else { MAIN };
        spans.push(device.alloc(bytes(size * scale * 512), stream, &format!("net.py:{index}:f")).unwrap());
        for (other, span) in spans.iter().enumerate() {
            if requests[other].1 == index {
                device.free(span.address);
            }
        }
    }
    device.end_step().unwrap();
    let addresses = spans.iter().map(|span| span.address).collect();
    device.free(spans.last().unwrap().address);
    addresses
}

fn trained() -> Device {
    let mut device = open(config());
    for _ in 0..4 {
        forward(&mut device, "prefill", 7);
        forward(&mut device, "decode", 1);
    }
    device
}

fn load(device: &mut Device, file: &[u8]) -> Result<String, String> {
    let loaded = device.load("run.terrace", file, &here(), Existing::Keep);
    loaded.map(|loaded| loaded.to_string()).map_err(|error| error.to_string())
}

#[test]
fn a_restart_gives_the_same_plans_and_addresses() {
    let mut before = trained();
    let file = before.save(&here()).unwrap();
    let mut after = open(config());
    let loaded = after.load("run.terrace", &file, &here(), Existing::Keep).unwrap();
    assert_eq!((loaded.keys, loaded.kept, loaded.no_room, loaded.too_large.len()), (2, 0, 0, 0));
    assert_eq!((loaded.arena, after.arena_bytes()), (before.arena_bytes().get(), before.arena_bytes()));
    assert_eq!(after.required_bytes(), before.required_bytes());
    for key in ["prefill", "decode"] {
        let plans = [&before, &after].map(|device| device.plan_of(key.as_bytes()).unwrap().unwrap());
        assert_eq!(plans[0].placement(), plans[1].placement());
        let named = |plan: &terrace_planner::Plan| -> Vec<String> {
            plan.slots().iter().map(|slot| plan.label(slot).to_owned()).collect()
        };
        assert_eq!(named(&plans[0]), named(&plans[1]));
    }
    for step in 0..5 {
        for (key, scale) in [("decode", 1), ("prefill", 7)] {
            assert_eq!(forward(&mut before, key, scale), forward(&mut after, key, scale), "step {step} of {key}");
        }
    }
    // Two steps of each key were checked call by call, the rest ran on script; nothing was planned.
    assert_eq!((after.stats().steps_on_script, after.stats().plans), (6, 0));
    assert_eq!(after.stats().divergences.total(), 0);
    assert_eq!(after.save(&here()).unwrap().len(), file.len());
}

#[test]
fn nothing_to_save_is_a_file_too() {
    let file = open(config()).save(&here()).unwrap();
    assert_eq!(&file[..16], b"TERRACE\x1aARNA\x01\0\0\0");
    let mut device = open(config());
    assert_eq!(load(&mut device, &file).unwrap(), "0 loaded, the largest plan 0 bytes");
}

#[test]
fn what_does_not_agree_is_named_with_both_values() {
    let file = trained().save(&here()).unwrap();
    let refused = |config: Config, identity: Identity| {
        let error = open(config).load("run.terrace", &file, &identity, Existing::Keep).unwrap_err();
        assert!(matches!(error, terrace_allocator::Error::SavedFor { .. }), "{error:?}");
        error.to_string()
    };
    let advice = "; load the file that was saved here, or record anew";
    let aligned = Config { align: Align::new(256).unwrap(), ..config() };
    for (error, middle) in [
        (refused(aligned, here()), "alignment 512, and this is alignment 256"),
        (refused(config(), Identity { rank: 2, ..here() }), "rank 1, and this is rank 2"),
        (refused(config(), Identity { tag: "a\n".to_owned(), ..here() }), "tag '27b fp8', and this is tag 'a\\n'"),
    ] {
        assert_eq!(error, format!("run.terrace: it was saved for {middle}{advice}"));
    }
    let mut host = Device::new(Box::new(terrace_allocator::host::HostBacking::new()), config()).unwrap();
    let error = load(&mut host, &file).unwrap_err();
    assert_eq!(error, format!("run.terrace: it was saved for device 'fake', and this is device 'host'{advice}"));
    let why = host.boot_summary().features.into_iter().find(|feature| feature.name == "loaded plans").unwrap();
    assert_eq!((why.active, why.why), (false, error));
}

#[test]
fn a_foreign_or_newer_file_is_refused_in_one_sentence() {
    let mut device = open(config());
    let print = Fingerprint::new([0; 16]);
    let newer = encode(Kind::Arena, ARENA_VERSION + 1, print, &0_u8).unwrap();
    let plan = encode(Kind::Plan, 1, print, &0_u8).unwrap();
    for (file, message) in [
        (newer, "byte 12: the plan set has version 2 and this build reads version 1; use a newer build"),
        (plan, "byte 8: the file holds a plan, not a plan set"),
        (b"#!/bin/sh\n".repeat(10), "byte 0: this is not a file of terrace: its first bytes differ"),
        (Vec::new(), "byte 0: the file ends within its header of 44 bytes; the file is truncated"),
    ] {
        assert_eq!(load(&mut device, &file).unwrap_err(), format!("run.terrace: {message}"));
    }
}

/// A small file: one key, three slots.
fn small() -> Vec<u8> {
    let mut device = open(config());
    for _ in 0..2 {
        device.begin_step(b"k", MAIN).unwrap();
        let spans = [512, 1024, 512].map(|size| device.alloc(bytes(size), MAIN, "f").unwrap());
        device.free(spans[0].address);
        device.free(spans[1].address);
        device.end_step().unwrap();
        device.free(spans[2].address);
    }
    device.save(&here()).unwrap()
}

/// Bytes without a length before them: the payload of a file as it stands.
struct Raw<'a>(&'a [u8]);

impl Serialize for Raw<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(self.0.len())?;
        self.0.iter().try_for_each(|byte| tuple.serialize_element(byte))?;
        tuple.end()
    }
}

/// Runs steps on whatever came out of a file and sees that no two live spans share a byte and none leaves the reservation.
fn still_works(device: &mut Device, what: &str) {
    let reservation = device.reservation();
    for sizes in [[512, 1024, 512], [512, 1024, 512], [1024, 512, 4096], [512, 1024, 512], [512, 1024, 512]] {
        device.begin_step(b"k", MAIN).unwrap();
        let spans = sizes.map(|size| device.alloc(bytes(size), MAIN, "f").unwrap());
        for (index, a) in spans.iter().enumerate() {
            assert!(a.address >= reservation.address, "{what}");
            assert!(a.address + a.bytes.get() <= reservation.address + reservation.bytes.get(), "{what}");
            for b in &spans[..index] {
                let apart = a.address + a.bytes.get() <= b.address || b.address + b.bytes.get() <= a.address;
                assert!(apart, "{what}: {a:?} and {b:?}");
            }
        }
        device.free(spans[0].address);
        device.free(spans[1].address);
        device.end_step().unwrap();
        device.free(spans[2].address);
    }
    let summary = device.boot_summary();
    assert_eq!(summary.memory.iter().map(|row| row.bytes).sum::<u64>(), summary.reservation, "{what}");
}

#[test]
fn a_damaged_file_is_refused_wherever_the_damage_is() {
    let file = small();
    let mut device = open(config());
    for length in 0..file.len() {
        assert!(load(&mut device, &file[..length]).is_err(), "cut after {length}");
    }
    for at in 0..file.len() {
        for bit in 0..8 {
            let mut bad = file.clone();
            bad[at] ^= 1 << bit;
            let error = load(&mut device, &bad).unwrap_err();
            assert!(!error.contains(char::is_control), "{error}");
        }
    }
    assert!(load(&mut device, &[&file[..], b"x"].concat()).is_err());
    assert!(device.plan_of(b"k").unwrap().is_none());
    assert_eq!(device.arena_bytes(), Bytes::ZERO);
    load(&mut device, &file).unwrap();
    still_works(&mut device, "the file itself");
}

#[test]
fn a_forged_file_with_a_right_checksum_gives_nothing_or_a_valid_plan() {
    let file = small();
    let (mut print, mut taken) = ([0; 16], 0);
    print.copy_from_slice(&file[16..32]);
    let payload = &file[44..];
    let again = encode(Kind::Arena, ARENA_VERSION, Fingerprint::new(print), &Raw(payload)).unwrap();
    assert_eq!(again, file, "the forger's tool works");
    for at in 0..payload.len() {
        for value in (0..8).map(|bit| payload[at] ^ (1 << bit)).chain([0, 1, 2, 250, 251, 252, 253, 255]) {
            let mut forged = payload.to_vec();
            forged[at] = value;
            let what = format!("byte {at} of the payload is {value}");
            let forged = encode(Kind::Arena, ARENA_VERSION, Fingerprint::new(print), &Raw(&forged)).unwrap();
            let mut device = open(config());
            match load(&mut device, &forged) {
                Ok(_) => taken += 1,
                Err(error) => assert!(!error.contains(char::is_control), "{what}: {error}"),
            }
            still_works(&mut device, &what);
        }
    }
    assert!(taken > 0, "some bytes are free to differ, such as those of the key");
}

// The shapes of a file, with nothing that keeps their values in range.
type Slot = (u64, u64, u32, u32, bool, u32);
type Key = (Vec<u8>, u64, u64, bool, (Vec<Slot>, Vec<(u32, u32)>), Vec<u64>);

/// Breaks one thing.
type Change = fn(&mut Key);

/// A file of these keys for this device.
fn forged(keys: &[Key]) -> Vec<u8> {
    let scope = ("fake", 512_u64, 1_u32, "27b fp8");
    let print = fingerprint_of("terrace-arena", &scope);
    encode(Kind::Arena, ARENA_VERSION, print, &(scope, vec!["f"], keys)).unwrap()
}

/// Two buffers side by side, the first freed, the second too.
fn two() -> Key {
    let slot = (512, 512, 0, 0, false, 0);
    (b"k".to_vec(), 1, 0, true, (vec![slot, slot], vec![(0, 0), (0, 1), (1, 0), (1, 1)]), vec![0, 512])
}

#[test]
fn every_field_is_checked() {
    let mut device = open(config());
    assert!(load(&mut device, &forged(&[two()])).is_ok());
    let cases: &[(Change, &str)] = &[
        (|key| key.5[1] = 0, "the plan is not valid: buffers 0 and 1 both use byte 0 at tick 1"),
        (|key| key.5[1] = 100, "slot 1 lies at offset 100"),
        (|key| key.5[1] = u64::MAX - 511, "slot 1 lies at offset 18446744073709551104"),
        (|key| key.5.truncate(1), "1 offsets were given for 2 slots"),
        (|key| key.4.0[0].0 = 0, "slot 0 has sizes 0 and 512, not multiples of the alignment 512"),
        (|key| key.4.0[0].0 = 1024, "slot 0 has the size 512, but 1024 was seen"),
        (|key| key.4.0[0].1 = 513, "slot 0 has sizes 512 and 513, not multiples of the alignment 512"),
        (
            |key| key.4.0[0].1 = 1 << 63,
            "slot 0 has sizes 512 and 9223372036854775808, not multiples of the alignment 512",
        ),
        (|key| key.4.0[0].2 = u32::MAX, "slot 0 has a lane or a count of growths out of range"),
        (|key| key.4.0[0].5 = u32::MAX, "slot 0 has a lane or a count of growths out of range"),
        (|key| key.4.0[1].3 = 1, "slot 1 names label 1 of 1"),
        (|key| key.4.0[1].4 = true, "slot 1 lies at offset 512"),
        (|key| key.4.1.swap(0, 1), "event 0 allocates slot 1, where 0 is next"),
        (|key| key.4.1.swap(0, 2), "event 0 frees slot 0, which does not live or outlives the step"),
        (|key| key.4.1[3] = (1, 0), "event 3 frees slot 0, which does not live or outlives the step"),
        (|key| key.4.1[3] = (1, 7), "event 3 frees slot 7, which does not live or outlives the step"),
        (|key| key.4.1.push((0, 2)), "event 4 allocates slot 2, where 2 is next"),
        (|key| key.4.1.truncate(3), "slot 1 is never freed, but is not said to outlive the step"),
        (|key| key.4.1.truncate(1), "1 of 2 slots are allocated"),
        (|key| key.1 = u64::MAX, "its counters are out of range"),
        (|key| key.2 = u64::MAX, "its counters are out of range"),
    ];
    for (change, message) in cases {
        let mut key = two();
        change(&mut key);
        let mut device = open(config());
        let refused = load(&mut device, &forged(&[two(), key.clone()]));
        assert!(refused.is_err(), "{message}");
        key.0 = b"a\n".to_vec();
        let refused = load(&mut device, &forged(&[two(), key])).unwrap_err();
        assert_eq!(refused, format!("run.terrace: key 'a\\n': {message}"));
        assert!(device.plan_of(b"k").unwrap().is_none(), "the good key was not taken either");
        still_works(&mut device, message);
    }
    let refused = load(&mut device, &forged(&[two(), two()])).unwrap_err();
    assert_eq!(refused, "run.terrace: key 'k' is there twice");
    let wrong = encode(
        Kind::Arena,
        ARENA_VERSION,
        Fingerprint::new([1; 16]),
        &(("fake", 512_u64, 1_u32, "27b fp8"), [0_u8; 2]),
    );
    assert!(load(&mut device, &wrong.unwrap()).is_err());
}

#[test]
fn sizes_that_cannot_be_added_up_are_refused() {
    let mut key = two();
    let huge = (1 << 62, 1 << 62, 0, 0, false, 0);
    key.4.0 = vec![huge; 2];
    key.5[1] = 1 << 62;
    let error = load(&mut open(config()), &forged(&[key])).unwrap_err();
    assert!(error.starts_with("run.terrace: key 'k': the sizes up to buffer 1"), "{error}");
}

#[test]
fn a_plan_larger_than_the_reservation_is_left_out_and_named() {
    let file = trained().save(&here()).unwrap();
    let mut device = open(Config { budget: bytes(16 << 10), ..config() });
    let text = load(&mut device, &file).unwrap();
    assert!(text.starts_with("1 loaded,") && text.ends_with("; larger than the reservation: 'prefill'"), "{text}");
    assert!(device.plan_of(b"prefill").unwrap().is_none());
    forward(&mut device, "decode", 1);
    assert_eq!(device.stats().hits, device.stats().replay_allocs);
}

#[test]
fn a_plan_that_is_there_stays_unless_asked() {
    let file = trained().save(&here()).unwrap();
    let mut device = open(config());
    forward(&mut device, "decode", 2);
    let own = device.plan_of(b"decode").unwrap().unwrap();
    assert!(load(&mut device, &file).unwrap().ends_with("; 1 had a plan already"));
    assert_eq!(device.plan_of(b"decode").unwrap().unwrap(), own);
    let loaded = device.load("run.terrace", &file, &here(), Existing::Replace).unwrap();
    assert_eq!((loaded.keys, loaded.kept), (2, 0));
    assert_ne!(device.plan_of(b"decode").unwrap().unwrap(), own);
    forward(&mut device, "decode", 1);
    assert_eq!(device.stats().divergences.total(), 0);
}

#[test]
fn loading_makes_no_known_key_give_way() {
    let file = trained().save(&here()).unwrap();
    let mut device = open(Config { most_keys: 2, ..config() });
    forward(&mut device, "mine", 1);
    let loaded = device.load("run.terrace", &file, &here(), Existing::Keep).unwrap();
    assert_eq!((loaded.keys, loaded.no_room), (1, 1));
    assert!(device.plan_of(b"mine").unwrap().is_some());
    assert!(device.plan_of(b"decode").unwrap().is_some(), "the key used last comes first");
}

#[test]
fn loading_inside_a_step_is_refused() {
    let file = trained().save(&here()).unwrap();
    let mut device = open(config());
    device.begin_step(b"k", MAIN).unwrap();
    let error = load(&mut device, &file).unwrap_err();
    assert_eq!(error, "load is possible between steps only, and step 'k' is open; end it first");
}

#[test]
fn a_file_is_replaced_whole_and_leaves_nothing_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = here().file_in(folder.path());
    let device = trained();
    std::fs::write(&path, b"old").unwrap();
    device.save_to(&path, &here()).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), device.save(&here()).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    let mut after = open(config());
    assert_eq!(after.load_from(&path, &here(), Existing::Keep).unwrap().keys, 2);
    let nowhere = folder.path().join("no/such/folder.terrace");
    let error = device.save_to(&nowhere, &here()).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: No such file", nowhere.display())), "{error}");
    assert!(after.load_from(&nowhere, &here(), Existing::Keep).is_err());
    assert!(device.save_to(folder.path(), &here()).is_err());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left of what failed");
}

#[test]
fn a_file_that_is_too_large_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.terrace");
    std::fs::File::create(&path).unwrap().set_len((256 << 20) + 1).unwrap();
    let error = open(config()).load_from(&path, &here(), Existing::Keep).unwrap_err().to_string();
    assert!(error.ends_with("it has 268435457 bytes, and a file of saved plans has at most 268435456"), "{error}");
}

#[test]
fn each_rank_and_tag_has_a_file_of_its_own() {
    let name = |rank, tag: &str| {
        let path = Identity { rank, tag: tag.to_owned() }.file_in(Path::new("plans"));
        assert_eq!(path.parent(), Some(Path::new("plans")), "{}", path.display());
        path.file_name().unwrap().to_str().unwrap().to_owned()
    };
    assert_eq!(name(3, "27b fp8").len(), "arena-27b-fp8-00000000-rank-3.terrace".len());
    assert!(name(3, "27b fp8").starts_with("arena-27b-fp8-") && name(3, "27b fp8").ends_with("-rank-3.terrace"));
    let names =
        [name(0, "a/b"), name(0, "a b"), name(1, "a b"), name(0, "../../etc"), name(0, ""), name(0, &"x".repeat(500))];
    let different: std::collections::HashSet<_> = names.iter().collect();
    assert_eq!(different.len(), names.len());
    assert!(names.iter().all(|name| name.len() < 100), "{names:?}");
}
