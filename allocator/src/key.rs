//! The keys of steps and what is known about each. Keys are compared in full: the map hashes them, and a collision costs
//! time, never a mix-up.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use crate::script::Script;

/// What a runtime calls a kind of forward, such as the bytes of `prefill/4128`.
pub type Key = Box<[u8]>;

/// What is known about a key.
#[derive(Default)]
pub(crate) struct KeyState {
    /// Steps begun with it.
    pub seen: u64,
    /// Its plan, once there is one.
    pub script: Option<Arc<Script>>,
    /// A better plan, being searched for.
    pub better: Option<Receiver<Script>>,
    /// Steps in a row of which less than half was served in plan.
    pub failures: u32,
    /// Steps in a row that freed what their plan leaves out because it outlived an earlier one.
    pub early: u32,
    /// Whether it is served without a plan from now on.
    pub given_up: bool,
    /// Steps still to be checked event by event before it runs on script.
    pub verify: u32,
    /// How often it was planned.
    pub plans: u64,
    /// Bytes that lived beyond its last step and were asked for in it.
    pub outlived: u64,
    /// The step it was last used in.
    pub last_used: u64,
}

/// All keys. The one unused for longest makes room for a new one.
pub(crate) struct Keys {
    states: HashMap<Key, KeyState, Hashing>,
    most: usize,
    /// The largest makespan of all plans so far, kept or not.
    pub largest: u64,
    /// The bytes of keys that made room.
    pub evicted: u64,
}

/// How keys are hashed; a test makes all of them collide.
#[derive(Clone, Default)]
pub(crate) struct Hashing {
    random: RandomState,
    pub(crate) collide: bool,
}

impl Keys {
    pub fn new(most: usize) -> Self {
        Self { states: HashMap::default(), most: most.max(1), largest: 0, evicted: 0 }
    }

    /// From now on all keys hash alike; for the test that they are still told apart.
    pub fn collide(&mut self) {
        let states = std::mem::take(&mut self.states);
        self.states = HashMap::with_hasher(Hashing { random: RandomState::new(), collide: true });
        self.states.extend(states);
    }

    pub fn get_mut(&mut self, key: &[u8]) -> Option<&mut KeyState> {
        self.states.get_mut(key)
    }

    /// The state of a key, new if need be.
    pub fn entry(&mut self, key: &[u8]) -> &mut KeyState {
        if !self.states.contains_key(key) {
            if self.states.len() >= self.most {
                self.evict();
            }
            self.states.insert(key.into(), KeyState::default());
        }
        self.states.get_mut(key).expect("just inserted")
    }

    pub fn len(&self) -> usize {
        self.states.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Key, &KeyState)> {
        self.states.iter()
    }

    /// Whether the key is known, or can be without another making room for it.
    pub fn has_room_for(&self, key: &[u8]) -> bool {
        self.states.len() < self.most || self.states.contains_key(key)
    }

    /// The largest makespan of the plans there are.
    pub fn arena(&self) -> u64 {
        self.states.values().filter_map(|state| state.script.as_ref()).map(|script| script.makespan).max().unwrap_or(0)
    }

    fn evict(&mut self) {
        let oldest = self.states.iter().min_by(|a, b| (a.1.last_used, a.0).cmp(&(b.1.last_used, b.0)));
        if let Some(key) = oldest.map(|(key, _)| key.clone()) {
            self.states.remove(&key);
            self.evicted += 1;
        }
    }
}

impl BuildHasher for Hashing {
    type Hasher = Hasher;

    fn build_hasher(&self) -> Hasher {
        Hasher { inner: self.random.build_hasher(), collide: self.collide }
    }
}

pub(crate) struct Hasher {
    inner: std::hash::DefaultHasher,
    collide: bool,
}

impl std::hash::Hasher for Hasher {
    fn finish(&self) -> u64 {
        if self.collide { 0 } else { self.inner.finish() }
    }

    fn write(&mut self, bytes: &[u8]) {
        self.inner.write(bytes);
    }
}
