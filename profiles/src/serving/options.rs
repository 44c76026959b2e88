//! What to change when it does not fit. Each change is an ask of its own, to be planned and computed like the first; where a
//! server would refuse it, [`fit`](super::fit) says so.

use crate::kv::Format;
use crate::model::Model;
use crate::serving::{Ask, MambaMode, Pool};
use crate::shape::Window;
use crate::synth::{Engine, Lifetimes};

/// Every change worth computing, the mildest first: a step that the server takes, a window, other lives, smaller steps,
/// narrower KV formats, fewer kept states, no guessing.
pub fn changes(model: &Model, ask: &Ask) -> Vec<Ask> {
    let mut changes = Vec::new();
    let mut change = |edit: &dyn Fn(&mut Ask)| {
        let mut ask = ask.clone();
        edit(&mut ask);
        changes.push(ask);
    };
    let slot = |format: &Format| format.slot(model.whole.head_dim);
    let mut formats = Format::all();
    formats.retain(|format| format.contiguous == ask.kv.contiguous);
    formats.sort_by_key(|format| std::cmp::Reverse(slot(format)));
    let (narrower, wider): (Vec<Format>, Vec<Format>) = formats
        .into_iter()
        .filter(|format| slot(format) != slot(&ask.kv))
        .partition(|format| slot(format) < slot(&ask.kv));
    if let (Some(least), Some(chunk)) = (floor(model, ask), ask.chunk)
        && chunk < least
    {
        change(&|ask| ask.chunk = Some(least));
        // The narrowest format whose block the step holds.
        let holds = |kv: &Format| floor(model, &Ask { kv: kv.clone(), ..ask.clone() }) <= Some(chunk);
        if let Some(format) = wider.into_iter().rev().find(holds) {
            change(&|ask| ask.kv = format.clone());
        }
    }
    let default = u64::from(Window::DEFAULT.tokens());
    if ask.window.is_none() {
        change(&|ask| *ask = ask.clone().in_windows(default));
    }
    if ask.engine != Engine::Terrace && ask.lifetimes == Lifetimes::Frame {
        change(&|ask| ask.lifetimes = Lifetimes::LastUse);
    }
    for chunk in smaller_chunks(model, ask) {
        change(&|ask| ask.chunk = Some(chunk));
    }
    for format in narrower {
        change(&|ask| ask.kv = format.clone());
    }
    if ask.mode != MambaMode::None && !ask.kv.contiguous {
        change(&|ask| ask.mode = MambaMode::None);
    }
    if ask.mtp > 0 {
        change(&|ask| ask.mtp = 0);
    }
    changes
}

/// What differs between two asks of one server, as a person would write it on the command line.
pub fn difference(from: &Ask, to: &Ask) -> String {
    let mut words = Vec::new();
    if to.util != from.util {
        words.push(format!("--util {}", to.util));
    }
    match to.window {
        Some(window) if to.window != from.window => words.push(format!("--window {window}")),
        _ if to.lifetimes != from.lifetimes => words.push(format!("--lifetimes {}", to.lifetimes)),
        _ => {}
    }
    if to.kv != from.kv {
        words.push(format!("--kv {}", to.kv.id));
    }
    match to.chunk {
        Some(chunk) if to.chunk != from.chunk => words.push(format!("--prefill-chunk {chunk}")),
        _ => {}
    }
    if to.mode != from.mode {
        words.push(format!("--mamba-mode {}", to.mode));
    }
    if to.mtp != from.mtp {
        words.push(format!("--mtp {}", to.mtp));
    }
    words.join(" ")
}

/// The smallest step that align mode allows, then halves of the step down to 1024 tokens.
fn smaller_chunks(model: &Model, ask: &Ask) -> Vec<u64> {
    let step = ask.step().min(ask.max_len);
    let halves = [8192, 4096, 2048, 1024].into_iter();
    let mut chunks: Vec<u64> = floor(model, ask).into_iter().chain(halves).filter(|chunk| *chunk < step).collect();
    chunks.sort_unstable_by(|a, b| b.cmp(a));
    chunks.dedup();
    chunks
}

/// The smallest step that align mode allows.
fn floor(model: &Model, ask: &Ask) -> Option<u64> {
    Pool::new(model, &ask.kv, ask.tp, ask.mtp, ask.mode).ok().and_then(|pool| pool.chunk_floor())
}
