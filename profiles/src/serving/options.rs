//! What to change when it does not fit. Each change is an ask of its own, to be planned and computed like the first; where a
//! server would refuse it, [`fit`](super::fit) says so.

use crate::kv::Format;
use crate::model::Model;
use crate::serving::{Ask, MambaMode, Pool};
use crate::shape::Window;
use crate::synth::{Engine, Lifetimes};

/// One change of an ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What changes, as a person would write it on the command line.
    pub what: String,
    /// The ask with it.
    pub ask: Ask,
}

/// Every change worth computing, the mildest first: other lives, a window, smaller steps, narrower KV formats, fewer kept
/// states, no guessing.
pub fn changes(model: &Model, ask: &Ask) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut change = |what: String, edit: &dyn Fn(&mut Ask)| {
        let mut ask = ask.clone();
        edit(&mut ask);
        changes.push(Change { what, ask });
    };
    let default = u64::from(Window::DEFAULT.tokens());
    if ask.window.is_none() {
        change(format!("--window {default}"), &|ask| *ask = ask.clone().in_windows(default));
    }
    if ask.engine != Engine::Terrace && ask.lifetimes == Lifetimes::Frame {
        change("--lifetimes last-use (a planned arena)".to_owned(), &|ask| ask.lifetimes = Lifetimes::LastUse);
    }
    for chunk in smaller_chunks(model, ask) {
        change(format!("--prefill-chunk {chunk}"), &|ask| ask.chunk = Some(chunk));
    }
    let slot = |format: &Format| format.slot(model.whole.head_dim);
    let mut formats = Format::all();
    formats.retain(|format| slot(format) < slot(&ask.kv) && format.contiguous == ask.kv.contiguous);
    formats.sort_by_key(|format| std::cmp::Reverse(slot(format)));
    for format in formats {
        change(format!("--kv {}", format.id), &|ask| ask.kv = format.clone());
    }
    if ask.mode != MambaMode::None && !ask.kv.contiguous {
        change("--mamba-mode none (no prefix cache)".to_owned(), &|ask| ask.mode = MambaMode::None);
    }
    if ask.mtp > 0 {
        change("--mtp 0".to_owned(), &|ask| ask.mtp = 0);
    }
    changes
}

/// The smallest step that align mode allows, then halves of the step down to 1024 tokens.
fn smaller_chunks(model: &Model, ask: &Ask) -> Vec<u64> {
    let step = ask.step().min(ask.max_len);
    let floor = Pool::new(model, &ask.kv, ask.tp, ask.mtp, ask.mode).ok().and_then(|pool| pool.chunk_floor());
    let halves = [8192, 4096, 2048, 1024].into_iter();
    let mut chunks: Vec<u64> = floor.into_iter().chain(halves).filter(|chunk| *chunk < step).collect();
    chunks.sort_unstable_by(|a, b| b.cmp(a));
    chunks.dedup();
    chunks
}
