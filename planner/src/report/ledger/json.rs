//! The answer about a server as a script reads it: one object, its fields in this order.

use serde::Serialize;
use terrace_profiles::serving::{Fit, Line};
use terrace_profiles::units::Bytes;

use super::{Server, as_torch_asks};
use crate::fitting::Choice;

/// See the module's page.
#[derive(Serialize)]
pub(super) struct Json<'a> {
    model: &'a str,
    card: &'a str,
    kv: &'a str,
    max_model_len: u64,
    tp: u64,
    fits: bool,
    boots: bool,
    refused: &'a [String],
    notes: &'a [String],
    largest_context: u64,
    block_size: u64,
    block_bytes: Bytes,
    blocks_per_request: u64,
    blocks: u64,
    need_bytes: Bytes,
    available_bytes: Bytes,
    max_model_len_estimate: u64,
    tokens_by_formula: JsonTokens,
    concurrency: f64,
    usable_bytes: Bytes,
    budget_bytes: Bytes,
    arena_bytes: Bytes,
    ledger: Vec<JsonLine<'a>>,
    arena_at_peak: Vec<JsonLabel<'a>>,
    requests: Vec<JsonRequest<'a>>,
    changes: Vec<JsonChange<'a>>,
}

#[derive(Serialize)]
struct JsonTokens {
    old: u64,
    mid: u64,
    new: u64,
}

#[derive(Serialize)]
struct JsonLine<'a> {
    name: &'a str,
    bytes: Bytes,
    kind: &'a str,
    how: &'a str,
}

#[derive(Serialize)]
struct JsonLabel<'a> {
    label: &'a str,
    bytes: Bytes,
}

#[derive(Serialize)]
struct JsonRequest<'a> {
    label: &'a str,
    bytes: Bytes,
    /// As PyTorch asks the driver for it.
    asked_bytes: Bytes,
}

#[derive(Serialize)]
struct JsonChange<'a> {
    what: &'a str,
    fits: bool,
    boots: bool,
    refused: &'a [String],
    need_bytes: Bytes,
    available_bytes: Bytes,
    arena_bytes: Bytes,
    largest_context: u64,
}

impl<'a> Json<'a> {
    pub(super) fn of(server: &'a Server<'a>) -> Self {
        let (ask, answer) = (server.ask, server.answer);
        let fit = &answer.fit;
        let line = |line: &'a Line| {
            let Line { name, bytes, kind, how } = line;
            JsonLine { name, bytes: *bytes, kind: kind.name(), how }
        };
        let change = |choice: &'a Choice| {
            let fit: &Fit = &choice.fit;
            JsonChange {
                what: &choice.what,
                fits: fit.fits,
                boots: fit.boots,
                refused: &fit.refused,
                need_bytes: fit.need,
                available_bytes: fit.available,
                arena_bytes: fit.arena,
                largest_context: fit.largest_context,
            }
        };
        let request = |(label, bytes): &'a (String, Bytes)| JsonRequest {
            label,
            bytes: *bytes,
            asked_bytes: as_torch_asks(*bytes),
        };
        Self {
            model: &server.model.id,
            card: server.card.0,
            kv: &ask.kv.id,
            max_model_len: ask.max_len,
            tp: ask.tp,
            fits: fit.fits,
            boots: fit.boots,
            refused: &fit.refused,
            notes: &fit.notes,
            largest_context: fit.largest_context,
            block_size: fit.pool.block_size,
            block_bytes: fit.pool.block_bytes,
            blocks_per_request: fit.blocks_per_request,
            blocks: fit.blocks,
            need_bytes: fit.need,
            available_bytes: fit.available,
            max_model_len_estimate: fit.max_model_len_estimate,
            tokens_by_formula: JsonTokens { old: fit.tokens.old, mid: fit.tokens.mid, new: fit.tokens.new },
            concurrency: fit.concurrency,
            usable_bytes: ask.usable,
            budget_bytes: fit.budget,
            arena_bytes: fit.arena,
            ledger: fit.ledger.iter().map(line).collect(),
            arena_at_peak: answer
                .arena
                .at_peak
                .iter()
                .map(|(label, bytes)| JsonLabel { label, bytes: *bytes })
                .collect(),
            requests: answer.arena.requests.iter().map(request).collect(),
            changes: answer.choices.iter().map(change).collect(),
        }
    }
}
