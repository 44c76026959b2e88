//! Will it fit? What a server takes of a card, line by line, in bytes; pure functions of the model and of what is asked.
//!
//! ```text
//! usable memory x util = budget
//!   - weights - activation arena - unpacking - logits - graphs and libraries = available
//!   need = blocks of one request of max_len tokens x bytes of a block         fits: need <= available
//! ```
//!
//! The arena's bytes come from a plan, which is the planner's business: [`Ask::workload`] says of what, [`fit`] takes the
//! answer. [`Pool`] holds the block arithmetic, [`changes`] what to change when it does not fit.

use crate::error::Error;
use crate::kv::Format;
use crate::model::Model;
use crate::synth::{Engine, Lifetimes, Part, Workload};
use crate::units::{Bytes, Overflow};

mod ledger;
mod options;
mod pool;
mod share;

pub use ledger::{Held, Kind, Line};
pub use options::{changes, difference};
pub use pool::{MAX_LEN, MambaMode, Pool, Printed, Tokens, available};
pub use share::Share;

/// What is asked of one server. All sizes are those of one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// What a framework sees of the card.
    pub usable: Bytes,
    /// The part of it that the server may take.
    pub util: Share,
    /// How keys and values are kept.
    pub kv: Format,
    /// What one card holds of the weights.
    pub weights: Held,
    /// The longest request, prompt and answer together.
    pub max_len: u64,
    /// Requests at once.
    pub max_seqs: u64,
    /// Tokens of a prefill step; `None` for all of `max_len` at once.
    pub chunk: Option<u64>,
    /// Further tokens guessed at once; 0 for none.
    pub mtp: u64,
    /// Cards that share the model.
    pub tp: u64,
    /// Which recurrent states the server keeps.
    pub mode: MambaMode,
    /// Who runs the prefill.
    pub engine: Engine,
    /// When its buffers end.
    pub lifetimes: Lifetimes,
    /// Tokens resident at once; for Terrace alone.
    pub window: Option<u64>,
    /// What graphs and libraries take, if it is known; `None` for the assumptions here.
    pub overhead: Option<Bytes>,
    /// What the KV pool has, if that is known.
    pub pool: Given,
}

/// What is known of the KV pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Given {
    /// Nothing: it has what the ledger leaves.
    #[default]
    Nothing,
    /// Its bytes, as a log reports them: see [`available`].
    Available(Bytes),
    /// Its blocks, as a log reports.
    Blocks(u64),
}

/// The answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// Whether one request of `max_len` has its blocks and nothing is refused.
    pub fits: bool,
    /// Whether the server's own admission would let it boot: as `fits`, but without what grows later and no server counts
    /// (unpacking), so it may start and die on a long prompt.
    pub boots: bool,
    /// What a server refuses whatever the memory, as sentences.
    pub refused: Vec<String>,
    /// What it runs with, but not as one might think, as sentences.
    pub notes: Vec<String>,
    /// The block arithmetic.
    pub pool: Pool,
    /// Blocks of one request of `max_len`.
    pub blocks_per_request: u64,
    /// Their bytes.
    pub need: Bytes,
    /// What the KV pool has.
    pub available: Bytes,
    /// Its whole blocks.
    pub blocks: u64,
    /// The longest request that `available` holds; what the rest of the ledger takes is not changed.
    pub max_model_len_estimate: u64,
    /// The longest request that fits when the ledger is made anew for it, at most the model's own limit or
    /// `max_len`.
    pub largest_context: u64,
    /// The pool in tokens, under each formula that servers print.
    pub tokens: Tokens,
    /// Requests of `max_len` that the pool holds at once.
    pub concurrency: f64,
    /// Bytes that the ledger's lines may take together.
    pub budget: Bytes,
    /// The peak of the planned arena.
    pub arena: Bytes,
    /// Every line, the pool's two first.
    pub ledger: Vec<Line>,
}

impl Ask {
    /// A request in the usual way: one sequence, one card, aligned states, vLLM's engine as its frames hold it, and nine
    /// tenths of the card.
    pub fn new(usable: Bytes, kv: Format, weights: Held, max_len: u64) -> Self {
        Self {
            usable,
            util: Share::DEFAULT,
            kv,
            weights,
            max_len,
            max_seqs: 1,
            chunk: None,
            mtp: 0,
            tp: 1,
            mode: MambaMode::default(),
            engine: Engine::FlaVllm,
            lifetimes: Lifetimes::Frame,
            window: None,
            overhead: None,
            pool: Given::Nothing,
        }
    }

    /// The same, run by Terrace in windows.
    #[must_use]
    pub fn in_windows(mut self, window: u64) -> Self {
        self.engine = Engine::Terrace;
        self.lifetimes = Lifetimes::of(Engine::Terrace);
        self.window = Some(window);
        self
    }

    /// Tokens of a prefill step.
    pub fn step(&self) -> u64 {
        self.chunk.unwrap_or(self.max_len)
    }

    /// The forward whose plan is the activation arena: a prefill step at the end of the longest request. Layers repeat, so
    /// the first few of them need as much as all.
    pub fn workload(&self, model: &Model) -> Workload {
        let tokens = self.step().min(self.max_len.max(1)).max(1);
        Workload {
            lifetimes: self.lifetimes,
            context: self.max_len.max(tokens),
            sequences: 1,
            window: self.window,
            layers: Some(model.period().max(1)),
            tp: self.tp,
            logits_rows: 0,
            ..Workload::new(self.engine, Part::Forward, tokens)
        }
    }
}

/// The whole ledger and the verdict; `arena` is the peak of a plan of [`Ask::workload`].
///
/// # Errors
/// An ask that contradicts itself or the model; sizes beyond 2^63 bytes.
pub fn fit(model: &Model, ask: &Ask, arena: Bytes) -> Result<Fit, Error> {
    let pool = Pool::new(model, &ask.kv, ask.tp, ask.mtp, ask.mode)?;
    if ask.max_len == 0 || ask.max_seqs == 0 || ask.chunk == Some(0) {
        let reason = "--max-model-len, --max-num-seqs and --prefill-chunk must be at least 1".to_owned();
        return Err(Error::Selection { name: model.id.clone(), reason });
    }
    let sized = |size: Result<Bytes, Overflow>| size.map_err(|_| pool::too_large(&model.id));
    let budget = ask.util.of(ask.usable);
    let fixed = ledger::lines(model, ask, arena).map_err(|_| pool::too_large(&model.id))?;
    let unpacking = |len: u64| ask.kv.unpacking(len, pool.kv_heads, model.whole.head_dim);
    let scratch = sized(unpacking(ask.max_len))?;
    let need = sized(pool.bytes(ask.max_len))?;

    let taken = sized(ledger::total(&fixed))?;
    let left = |scratch: Bytes| {
        let used = taken.get().saturating_add(scratch.get());
        Bytes::new(budget.get().saturating_sub(used)).unwrap_or(Bytes::ZERO)
    };
    let over = taken.get().saturating_add(scratch.get()).saturating_sub(budget.get());
    let (pool_bytes, blocks) = match ask.pool {
        Given::Nothing => (left(scratch), pool.blocks_in(left(scratch))),
        Given::Available(bytes) => (bytes, pool.blocks_in(bytes)),
        Given::Blocks(blocks) => (sized(pool.bytes_of(blocks))?, blocks),
    };
    // A pool of which a log speaks is there whatever the ledger leaves for it.
    let crowd = match ask.pool {
        Given::Nothing => 0,
        _ => sized(taken.checked_add(scratch).and_then(|lines| lines.checked_add(pool_bytes)))?
            .get()
            .saturating_sub(ask.usable.get()),
    };
    let blocks_per_request = pool.per_request(ask.max_len);
    let enough = |blocks: u64| blocks >= blocks_per_request;
    let refused: Vec<String> = refusal(ask, &pool).into_iter().collect();
    let boots = match ask.pool {
        Given::Nothing => enough(pool.blocks_in(left(Bytes::ZERO))),
        _ => enough(blocks),
    };
    let holds = |len: u64| {
        let pool_has = match ask.pool {
            Given::Nothing => unpacking(len).map_or(0, |scratch| pool.blocks_in(left(scratch))),
            _ => blocks,
        };
        pool.per_request(len) <= pool_has
    };
    let most = model.max_context.unwrap_or(MAX_LEN).max(ask.max_len);
    Ok(Fit {
        fits: enough(blocks) && refused.is_empty(),
        boots: boots && refused.is_empty(),
        refused,
        notes: notes(model, ask, [over, crowd], [blocks, blocks_per_request]),
        blocks_per_request,
        need,
        available: pool_bytes,
        blocks,
        max_model_len_estimate: pool.longest(blocks),
        largest_context: largest(most, holds),
        tokens: pool.tokens(blocks, ask.max_len),
        concurrency: blocks as f64 / blocks_per_request.max(1) as f64,
        budget,
        arena,
        ledger: ledger::ledger(ask, &pool, fixed, scratch).map_err(|_| pool::too_large(&model.id))?,
        pool,
    })
}

/// What a server refuses whatever the memory.
fn refusal(ask: &Ask, pool: &Pool) -> Option<String> {
    let (floor, chunk) = (pool.chunk_floor()?, ask.chunk?);
    (chunk < floor).then(|| {
        format!(
            "in align mode a prefill step must hold a block, here of {floor} tokens, so a chunk of {chunk} is refused; a wider KV \
             format has smaller blocks, and --mamba-mode none has no such floor"
        )
    })
}

/// What a reader of the verdict should know beside it.
fn notes(model: &Model, ask: &Ask, [over, crowd]: [u64; 2], [blocks, blocks_per_request]: [u64; 2]) -> Vec<String> {
    let mut notes = Vec::new();
    if over > 0 && ask.pool == Given::Nothing {
        notes.push(format!(
            "the lines beside the pool take {over} B more than the card's share, so the pool has nothing"
        ));
    }
    if let Some(most) = model.max_context
        && ask.max_len > most
    {
        notes.push(format!("the model was made for {most} tokens, and --max-model-len is {}", ask.max_len));
    }
    let together = blocks_per_request.saturating_mul(ask.max_seqs);
    if ask.max_seqs > 1 && (blocks_per_request..together).contains(&blocks) {
        notes.push(format!(
            "{} requests of --max-model-len at once need {together} blocks, and the pool has {blocks}: some will wait",
            ask.max_seqs
        ));
    }
    if crowd > 0 {
        notes.push(format!(
            "this pool and the lines beside it take {crowd} B more than the card has: a request that long runs out of memory"
        ));
    }
    notes
}

/// The largest length that holds, if shorter ones do as well; 0 if none does.
fn largest(most: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if holds(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(max_len: u64) -> (Model, Ask) {
        let model = Model::named("qwen3.6-27b").unwrap();
        let weights = Held::weights(&model, "autoround-int4", 1).unwrap();
        let mut ask = Ask::new("23.56GiB".parse().unwrap(), Format::named("tq3").unwrap(), weights, max_len);
        ask.util = "0.95".parse().unwrap();
        ask.chunk = Some(4128);
        ask.mtp = 3;
        (model, ask)
    }

    #[test]
    fn the_lines_the_budget_and_the_pool_add_up() {
        let (model, ask) = ask(92_000);
        let arena = Bytes::new(520 << 20).unwrap();
        let fit = fit(&model, &ask, arena).unwrap();
        let line = |name: &str| fit.ledger.iter().find(|line| line.name == name).unwrap().bytes.get();
        assert_eq!(line("KV blocks") + line("recurrent states"), fit.need.get());
        assert_eq!(line("activation arena"), arena.get());
        assert_eq!(line("unpacked KV"), 2 * 92_000 * 4096);
        assert_eq!(line("logits"), 4 * 248_320 * 6);
        let others: u64 = fit.ledger[2..].iter().map(|line| line.bytes.get()).sum();
        assert_eq!(others + fit.available.get(), fit.budget.get());
        assert!(fit.fits && fit.boots && fit.refused.is_empty() && fit.notes.is_empty());
        assert!(fit.largest_context >= 92_000 && fit.largest_context <= 262_144);
    }

    #[test]
    fn the_largest_context_fits_and_one_token_more_does_not() {
        let (model, mut ask) = ask(50_000);
        let arena = Bytes::new(780 << 20).unwrap();
        let largest = fit(&model, &ask, arena).unwrap().largest_context;
        ask.max_len = largest;
        assert!(fit(&model, &ask, arena).unwrap().fits);
        ask.max_len = largest + 1;
        let over = fit(&model, &ask, arena).unwrap();
        assert!(!over.fits);
        // It would start all the same: no server counts the unpacking.
        assert!(over.boots);
        ask.weights = Held::given(ask.usable);
        let nothing = fit(&model, &ask, arena).unwrap();
        assert_eq!((nothing.available, nothing.largest_context), (Bytes::ZERO, 0));
        assert!(!nothing.fits && !nothing.boots);
        assert!(
            nothing.notes[0].ends_with("B more than the card's share, so the pool has nothing"),
            "{:?}",
            nothing.notes
        );
    }

    #[test]
    fn a_pool_that_a_log_reports_takes_the_place_of_the_ledgers() {
        let (model, mut ask) = ask(180_000);
        ask.pool = Given::Blocks(79);
        let fit_of = |ask: &Ask| fit(&model, ask, Bytes::ZERO).unwrap();
        let blocks = fit_of(&ask);
        assert_eq!((blocks.blocks, blocks.tokens.mid, blocks.tokens.new), (79, 78_432, 241_016));
        assert!(blocks.fits);
        ask.pool = Given::Available(available("2.17GiB").unwrap());
        let bytes = fit_of(&ask);
        assert_eq!((bytes.blocks, bytes.max_model_len_estimate, bytes.fits), (42, 111_456, false));
    }

    #[test]
    fn refusals_and_notes_name_their_numbers() {
        let (model, mut ask) = ask(92_000);
        ask.chunk = Some(2048);
        let refused = fit(&model, &ask, Bytes::ZERO).unwrap();
        assert!(!refused.fits && !refused.boots);
        assert!(refused.refused[0].contains("a block, here of 4128 tokens, so a chunk of 2048 is refused"));
        ask.mode = MambaMode::None;
        assert!(fit(&model, &ask, Bytes::ZERO).unwrap().fits);
        (ask.max_len, ask.max_seqs) = (262_145, 3);
        ask.pool = Given::Blocks(100);
        let notes = fit(&model, &ask, Bytes::ZERO).unwrap().notes;
        assert_eq!(notes[0], "the model was made for 262144 tokens, and --max-model-len is 262145");
        assert!(notes[1].starts_with("3 requests of --max-model-len at once need 228 blocks, and the pool has 100"));
        ask.max_seqs = 0;
        assert!(fit(&model, &ask, Bytes::ZERO).unwrap_err().to_string().contains("must be at least 1"));
        (ask.max_seqs, ask.max_len) = (u64::MAX, u64::MAX);
        let error = fit(&model, &ask, Bytes::ZERO).unwrap_err().to_string();
        assert!(error.contains("is more than 2^63 - 1 bytes"), "{error}");
    }

    #[test]
    fn each_change_is_an_ask_of_its_own() {
        let (model, ask) = ask(180_000);
        let what = |ask: &Ask| -> Vec<String> {
            changes(&model, ask).iter().map(|changed| difference(ask, changed)).collect()
        };
        assert_eq!(
            what(&ask),
            [
                "--window 640",
                "--lifetimes last-use",
                "--prefill-chunk 4096",
                "--prefill-chunk 2048",
                "--prefill-chunk 1024",
                "--mamba-mode none",
                "--mtp 0",
            ]
        );
        let fp8 = Ask { kv: Format::named("fp8").unwrap(), ..ask.clone() };
        let fp8s = what(&fp8);
        assert!(
            fp8s.contains(&"--kv turboquant_3bit_nc".to_owned()) && fp8s.contains(&"--prefill-chunk 1600".to_owned())
        );
        let below = what(&Ask { chunk: Some(2048), ..ask.clone() });
        assert_eq!(below[..2], ["--prefill-chunk 4128", "--kv fp8"]);
        let together = Ask { mtp: 0, chunk: Some(1), util: Share::WHOLE, ..fp8.clone().in_windows(64) };
        assert_eq!(difference(&fp8, &together), "--util 1 --window 64 --prefill-chunk 1 --mtp 0");
        assert_eq!(difference(&fp8, &fp8), "");
    }

    #[test]
    fn llama_cpps_pool_is_a_stretch_for_each_sequence() {
        let (model, mut ask) = ask(200_000);
        ask.kv = Format::named("q4_0").unwrap();
        ask.mtp = 0;
        let fit = fit(&model, &ask, Bytes::ZERO).unwrap();
        let line = |name: &str| fit.ledger.iter().find(|line| line.name == name).unwrap().bytes.get();
        // Its log says S = 144 MiB and R = 5.6 MiB.
        assert_eq!(line("recurrent states"), 48 * (3 << 20) + 48 * 3 * 10_240 * 4);
        assert_eq!(line("KV blocks"), 200_000_u64.next_multiple_of(256) * 288 * 4 * 16);
        assert!(fit.refused.is_empty());
    }
}
