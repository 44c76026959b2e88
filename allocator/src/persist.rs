//! Plans over a restart: a device saves the templates and offsets of its keys, and another of the same kind loads them before
//! its first step.
//!
//! ```text
//!   save:  keys with a plan  -> scope, labels, keys -> envelope of kind ARNA -> file beside the target -> renamed over it
//!   load:  envelope (magic, kind, version, checksum) -> scope agrees? -> every field in range? -> the planner's check
//!          -> only then anything is put into the device
//! ```
//!
//! A file is foreign input: whatever it holds, loading gives a device with valid plans or one sentence and the device as it was. The
//! offsets are saved too, not only what they were planned from: a restart then gives the very same addresses, also of a plan
//! that was searched for a long time. They are not trusted: each plan passes the planner's check again, and its first
//! [`Config::verify_steps`](crate::Config::verify_steps) steps are compared with what lives, event by event.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use terrace_profiles::codec::{self, Kind};
use terrace_profiles::units::{Align, MAX_BYTES};

use crate::device::Device;
use crate::error::Error;
use crate::record::{Happened, SlotInfo, Template};
use crate::report::quoted;
use crate::script::Script;

/// Version of the layout of a file's payload.
pub const ARENA_VERSION: u16 = 1;

/// No larger file is read or written.
const MOST_FILE_BYTES: u64 = 256 << 20;
/// No step uses more streams.
const MOST_LANES: u32 = 4096;
/// No slot can have grown more often; far below the counter's end.
const MOST_GROWTHS: u32 = 1 << 30;
/// No key was seen more often; far below the counter's end.
const MOST_SEEN: u64 = 1 << 48;

/// What only the application knows about a file of saved plans, and what must be the same when it is loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Which of several processes this is.
    pub rank: u32,
    /// What the plans are for: model, build, parallelism, whatever changes what a step asks for.
    pub tag: String,
}

/// What loading does with a key that the device already knows a plan for, or has given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// Its plan stays.
    #[default]
    Keep,
    /// The file's takes its place.
    Replace,
}

/// What came out of a file. Prints as the end of a sentence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Loaded {
    /// Keys that have their plan from the file.
    pub keys: usize,
    /// The largest of these plans.
    pub arena: u64,
    /// Keys that had a plan, which stayed.
    pub kept: usize,
    /// Keys whose plan is larger than this reservation; they are recorded anew.
    pub too_large: Vec<String>,
    /// Keys beyond [`Config::most_keys`](crate::Config::most_keys).
    pub no_room: usize,
}

/// What a file holds.
#[derive(Serialize, Deserialize)]
struct Contents {
    scope: Scope,
    /// Texts of [`SlotInfo::label`].
    labels: Vec<String>,
    /// The key used last comes first.
    keys: Vec<SavedKey>,
}

/// What must agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Scope {
    device: String,
    align: u64,
    rank: u32,
    tag: String,
}

#[derive(Serialize, Deserialize)]
struct SavedKey {
    key: Vec<u8>,
    seen: u64,
    outlived: u64,
    optimal: bool,
    template: Template,
    /// One for each slot; 0 for what outlives the step.
    offsets: Vec<u64>,
}

impl Identity {
    /// The file of this process in `folder`: a name that no other rank or tag has.
    pub fn file_in(&self, folder: &Path) -> PathBuf {
        let safe = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '-' };
        let tag: String = self.tag.chars().take(48).map(safe).collect();
        // Tags that read alike once they are safe still differ here.
        let print = codec::fingerprint_of("terrace-tag", &self.tag).to_string();
        folder.join(format!("arena-{tag}-{}-rank-{}.terrace", &print[..8], self.rank))
    }
}

impl Device {
    /// The plans of all keys, as the bytes of a file. Keys without a plan, or given up, are not in it.
    ///
    /// # Errors
    /// [`Error::Saved`] if they are more than a file may hold.
    pub fn save(&self, identity: &Identity) -> Result<Vec<u8>, Error> {
        let scope = self.scope(identity);
        let mut file = Contents { scope, labels: Vec::new(), keys: Vec::new() };
        let mut place_of = vec![None; self.labels.texts().len()];
        let mut states: Vec<_> = self.keys.iter().filter(|(_, state)| !state.given_up).collect();
        states.sort_by(|a, b| (b.1.last_used, a.0).cmp(&(a.1.last_used, b.0)));
        for (key, state) in states {
            let Some(script) = &state.script else { continue };
            let mut template = script.template.clone();
            for slot in &mut template.slots {
                slot.label = *place_of[slot.label as usize].get_or_insert_with(|| {
                    file.labels.push(self.labels.text(slot.label).to_owned());
                    file.labels.len() as u32 - 1
                });
            }
            let (seen, outlived) = (state.seen.min(MOST_SEEN), state.outlived);
            let (optimal, offsets) = (script.optimal, script.offsets.clone());
            let saved = SavedKey { key: key.to_vec(), seen, outlived, optimal, template, offsets };
            // A plan made offline may break a rule that no recorded one does: never write what is refused later.
            if saved.consistent(file.labels.len(), self.config.align).is_ok() {
                file.keys.push(saved);
            }
        }
        let bytes = codec::encode(Kind::Arena, ARENA_VERSION, file.scope.fingerprint(), &file)?;
        small_enough("the plans", bytes.len() as u64)?;
        Ok(bytes)
    }

    /// Writes [`Device::save`] to a file, which appears whole or not at all.
    ///
    /// # Errors
    /// As [`Device::save`], and what the system says.
    pub fn save_to(&self, path: &Path, identity: &Identity) -> Result<(), Error> {
        let bytes = self.save(identity)?;
        replace(path, &bytes).map_err(|error| terrace_profiles::Error::io(path.display().to_string(), error).into())
    }

    /// Takes over the plans of a file; `name` is what errors call it. Between steps only. A refusal leaves all plans as they
    /// were.
    ///
    /// # Errors
    /// [`Error::SavedFor`] for what does not agree, [`Error::Saved`] and [`Error::Profile`] for what is damaged, foreign or
    /// newer, [`Error::Planner`] for a plan that the check refuses, [`Error::StepOpen`].
    pub fn load(&mut self, name: &str, bytes: &[u8], identity: &Identity, existing: Existing) -> Result<Loaded, Error> {
        self.between_steps("load")?;
        let loaded = self.scripts(name, bytes, identity).map(|file| self.take_over(file, existing));
        self.last_load = Some(loaded.as_ref().map(Clone::clone).map_err(ToString::to_string));
        loaded
    }

    /// As [`Device::load`], from a file.
    ///
    /// # Errors
    /// As [`Device::load`], and what the system says.
    pub fn load_from(&mut self, path: &Path, identity: &Identity, existing: Existing) -> Result<Loaded, Error> {
        let name = path.display().to_string();
        match read(path, &name) {
            Ok(bytes) => self.load(&name, &bytes, identity, existing),
            Err(error) => {
                self.last_load = Some(Err(error.to_string()));
                Err(error)
            }
        }
    }

    fn scope(&self, identity: &Identity) -> Scope {
        let (device, align) = (self.backing.name(), self.config.align.get());
        Scope { device, align, rank: identity.rank, tag: identity.tag.clone() }
    }

    /// Everything in a file, checked; the device is only looked at.
    fn scripts(&self, name: &str, bytes: &[u8], identity: &Identity) -> Result<Checked, Error> {
        small_enough(name, bytes.len() as u64)?;
        let (fingerprint, file): (_, Contents) = codec::decode(Kind::Arena, ARENA_VERSION, name, bytes)?;
        file.scope.agrees(&self.scope(identity), name)?;
        let refuse = |reason: String| Error::Saved { name: name.to_owned(), reason };
        if fingerprint != file.scope.fingerprint() {
            return Err(refuse("the fingerprint is not that of the device and tag inside; save it again".to_owned()));
        }
        let (align, total) = (self.config.align, self.space.total());
        let mut known = HashSet::new();
        let mut checked = Checked { labels: Vec::new(), keys: Vec::new(), too_large: Vec::new() };
        for saved in file.keys {
            let key = quoted(&saved.key);
            saved.consistent(file.labels.len(), align).map_err(|reason| refuse(format!("key {key}: {reason}")))?;
            if !known.insert(saved.key.clone()) {
                return Err(refuse(format!("key {key} is there twice")));
            }
            let SavedKey { key: bytes, seen, outlived, optimal, template, offsets } = saved;
            let script = Script::with_offsets(template, offsets, &file.labels, align, optimal)
                .map_err(|error| refuse(format!("key {key}: {error}")))?;
            let largest = script.template.slots.iter().map(|slot| slot.size).max().unwrap_or(0);
            if script.makespan.max(largest).max(outlived) > total {
                checked.too_large.push(key);
            } else {
                checked.keys.push((bytes, seen, outlived, script));
            }
        }
        checked.labels = file.labels;
        Ok(checked)
    }

    fn take_over(&mut self, file: Checked, existing: Existing) -> Loaded {
        let mut loaded = Loaded { too_large: file.too_large, ..Loaded::default() };
        let labels: Vec<u32> = file.labels.iter().map(|text| self.labels.id(text)).collect();
        for (key, seen, outlived, mut script) in file.keys {
            let known = self.keys.get_mut(&key).is_some_and(|state| state.script.is_some() || state.given_up);
            if known && existing == Existing::Keep {
                loaded.kept += 1;
                continue;
            }
            if !self.keys.has_room_for(&key) {
                loaded.no_room += 1;
                continue;
            }
            for slot in &mut script.template.slots {
                slot.label = labels[slot.label as usize];
            }
            loaded.keys += 1;
            loaded.arena = loaded.arena.max(script.makespan);
            self.note_arena(script.makespan);
            let verify = self.config.verify_steps;
            let state = self.keys.entry(&key);
            state.script = Some(Arc::new(script));
            (state.better, state.failures, state.given_up, state.verify) = (None, 0, false, verify);
            // The plan stands for the steps that made it.
            state.seen = state.seen.max(seen).max(1);
            state.outlived = state.outlived.max(outlived);
        }
        loaded
    }
}

/// A file whose every plan passed the check.
struct Checked {
    labels: Vec<String>,
    /// Key, how often it was seen, what its steps left behind, and its plan.
    keys: Vec<(Vec<u8>, u64, u64, Script)>,
    too_large: Vec<String>,
}

impl Scope {
    fn fingerprint(&self) -> codec::Fingerprint {
        codec::fingerprint_of("terrace-arena", self)
    }

    /// The first field that differs, with both values.
    fn agrees(&self, here: &Self, name: &str) -> Result<(), Error> {
        let text = |text: &str| quoted(text.as_bytes());
        let fields = [
            ("device", text(&self.device), text(&here.device), self.device == here.device),
            ("alignment", self.align.to_string(), here.align.to_string(), self.align == here.align),
            ("rank", self.rank.to_string(), here.rank.to_string(), self.rank == here.rank),
            ("tag", text(&self.tag), text(&here.tag), self.tag == here.tag),
        ];
        match fields.into_iter().find(|(.., equal)| !equal) {
            None => Ok(()),
            Some((field, saved, here, _)) => Err(Error::SavedFor { name: name.to_owned(), field, saved, here }),
        }
    }
}

impl SavedKey {
    /// What everyone who holds a template takes for granted, and a foreign file may break; the error is the end of a sentence.
    /// Whether buffers overlap is for the planner's check.
    fn consistent(&self, labels: usize, align: Align) -> Result<(), String> {
        let Template { slots, order } = &self.template;
        if slots.len() != self.offsets.len() {
            return Err(format!("{} offsets were given for {} slots", self.offsets.len(), slots.len()));
        }
        if self.seen > MOST_SEEN || self.outlived > MAX_BYTES {
            return Err("its counters are out of range".to_owned());
        }
        for (index, (slot, offset)) in slots.iter().zip(&self.offsets).enumerate() {
            slot_is_in_range(slot, *offset, labels, align).map_err(|reason| format!("slot {index} {reason}"))?;
        }
        in_order(slots, order)
    }
}

fn slot_is_in_range(slot: &SlotInfo, offset: u64, labels: usize, align: Align) -> Result<(), String> {
    let aligned = |bytes: u64| bytes.is_multiple_of(align.get()) && bytes <= MAX_BYTES;
    let SlotInfo { seen, size, lane, label, outlives, growths } = *slot;
    if seen == 0 || !aligned(seen) || !aligned(size) {
        return Err(format!(
            "has sizes {seen} and {size}, not multiples of the alignment {align:?}",
            align = align.get()
        ));
    }
    if size < seen {
        return Err(format!("has the size {size}, but {seen} was seen"));
    }
    if !aligned(offset) || (outlives && offset != 0) {
        return Err(format!("lies at offset {offset}"));
    }
    if label as usize >= labels {
        return Err(format!("names label {label} of {labels}"));
    }
    if lane >= MOST_LANES || growths > MOST_GROWTHS {
        return Err("has a lane or a count of growths out of range".to_owned());
    }
    Ok(())
}

/// Each slot is allocated once, in order, and freed once after that, unless it outlives the step.
fn in_order(slots: &[SlotInfo], order: &[Happened]) -> Result<(), String> {
    let mut allocated = 0_u32;
    let mut freed = vec![false; slots.len()];
    for (event, happened) in order.iter().enumerate() {
        match *happened {
            Happened::Alloc(slot) if slot == allocated && (slot as usize) < slots.len() => allocated += 1,
            Happened::Alloc(slot) => {
                return Err(format!("event {event} allocates slot {slot}, where {allocated} is next"));
            }
            Happened::Free(slot) => {
                let alive = slot < allocated && !slots[slot as usize].outlives && !freed[slot as usize];
                if !alive {
                    return Err(format!("event {event} frees slot {slot}, which does not live or outlives the step"));
                }
                freed[slot as usize] = true;
            }
        }
    }
    if allocated as usize != slots.len() {
        return Err(format!("{allocated} of {} slots are allocated", slots.len()));
    }
    match slots.iter().zip(&freed).position(|(slot, freed)| slot.outlives == *freed) {
        None => Ok(()),
        Some(slot) => Err(format!("slot {slot} is never freed, but is not said to outlive the step")),
    }
}

fn small_enough(name: &str, bytes: u64) -> Result<(), Error> {
    if bytes <= MOST_FILE_BYTES {
        return Ok(());
    }
    let reason = format!("it has {bytes} bytes, and a file of saved plans has at most {MOST_FILE_BYTES}");
    Err(Error::Saved { name: name.to_owned(), reason })
}

fn read(path: &Path, name: &str) -> Result<Vec<u8>, Error> {
    let failed = |error| Error::from(terrace_profiles::Error::io(name, error));
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(MOST_FILE_BYTES + 1).read_to_end(&mut bytes)).map_err(failed)?;
    small_enough(name, bytes.len() as u64)?;
    Ok(bytes)
}

/// Writes to a file beside the target, synced, then renamed over it.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // What is no plain file (/dev/null, a pipe) cannot be replaced, only written to.
    if path.metadata().is_ok_and(|known| !known.is_file()) {
        return fs::OpenOptions::new().write(true).open(path)?.write_all(bytes);
    }
    let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "this names no file"))?;
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Asked first, so that an error is about the folder and not about a temporary name in it.
    folder.metadata()?;
    // Process ids repeat in containers that share a folder; a random number does not.
    let mut beside = std::ffi::OsString::from(".");
    beside.push(name);
    beside.push(format!(".{:016x}", RandomState::new().hash_one(std::process::id())));
    let beside = folder.join(beside);
    let mut file = File::create_new(&beside)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written?;
    // The new name is on disk only with its folder. Where a folder cannot be synced, the rename still holds.
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
    Ok(())
}

impl Loaded {
    /// One JSON object.
    pub fn to_json(&self) -> String {
        crate::report::json(self)
    }
}

impl fmt::Display for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} loaded, the largest plan {} bytes", self.keys, self.arena)?;
        if self.kept > 0 {
            write!(f, "; {} had a plan already", self.kept)?;
        }
        if !self.too_large.is_empty() {
            write!(f, "; larger than the reservation: {}", self.too_large.join(", "))?;
        }
        if self.no_room > 0 {
            write!(f, "; {} beyond the most keys", self.no_room)?;
        }
        Ok(())
    }
}
