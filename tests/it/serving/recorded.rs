//! Every recorded configuration through the ledger, beside what became of it. A disagreement is written down with its
//! reason, and so is an input that the record lacks: a new one, or one that went away, fails the test.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Deserialize;
use terrace_profiles::cards::Card;
use terrace_profiles::kv::Format;
use terrace_profiles::model::Model;
use terrace_profiles::serving::{Ask, Fit, Held, MambaMode, Pool};
use terrace_profiles::units::Bytes;
use terrace_tests::corpus::root;

use super::{fitted, mib};

/// The prompt, in tokens, at which a record that starts ran out of memory, out of its `oom` text. A soak is five sessions of
/// five turns up to some 25,000.
const DIED_AT: &[(&str, u64)] = &[
    ("long-text-v7.72.2", 60_000),
    ("long-text-v7.72.2-gc085", 60_000),
    ("long-text-v7.69-0.93", 90_000),
    ("long-text-v7.69-0.95", 60_000),
    ("long-vision", 50_000),
    ("bounded-thinking", 25_000),
    ("tools-text", 25_000),
    ("dual-turbo-2x3080-20GB", 90_000),
];

/// Why a single card died on a prompt that the ledger holds.
const POOL_TOOK_IT: &str = "it starts and does not hold --max-model-len, as here, but died on less than the largest context: \
     that server gave its pool all that its profile left, not what one request needs, and PyTorch held fragments (414 MiB in \
     the field report); a plan has neither";
/// Why a soak of many turns died.
const SOAK: &str = "it dies in a soak of many turns: the caching allocator's fragments, 810 MiB a turn on such cards, which a \
     plan has none of";

/// Why the ledger and the record disagree, or agree and still differ in a number.
const WHY: &[(&str, &str)] = &[
    ("long-text-v7.72.2", POOL_TOOK_IT),
    ("long-text-v7.72.2-gc085", POOL_TOOK_IT),
    ("long-text-v7.69-0.93", POOL_TOOK_IT),
    ("long-text-v7.69-0.95", POOL_TOOK_IT),
    ("long-vision", POOL_TOOK_IT),
    ("bounded-thinking", SOAK),
    ("tools-text", SOAK),
    (
        "long-text-util085",
        "need is the log's 1.6 GiB; it had 0.29 GiB, since that boot held more outside the pool than the ledger's lines: the \
         same card logged 2.17 GiB and 4.09 GiB at 0.93",
    ),
    (
        "long-text-v7.69-0.92",
        "it misses by 13 MiB at 180,000 tokens with the 1 GiB of graphs and libraries that is assumed; the log says 21,980 MiB \
         resident, not what of them",
    ),
    (
        "dual-turbo-2x3080-20GB",
        "not explained: the record names no request and no bytes free; unpacking 90K tokens is 352 MiB on each card and \
         counted here, while the server's pool had filled the budget without it",
    ),
    (
        "dual-nvfp4-5090",
        "the request is h at 8192 tokens as computed here (96 MiB); its compose header measured 2,860 MiB a card beyond the \
         budget, which no profile there saw and no record divides up, and 0.92 left 2,609 MiB for it",
    ),
];

/// Pools that servers logged in tokens: the mode of states and the blocks that give the number, and its formula.
const POOLS: &[(&str, MambaMode, u64, &str)] = &[
    ("long-text-v7.72.2-gc085", MambaMode::Align, 79, "new"),
    ("long-text-205K-override50", MambaMode::Align, 50, "old"),
    ("dual-nvfp4-5090", MambaMode::None, 650, "new"),
    ("dual-nvfp4-5090-util085", MambaMode::None, 565, "new"),
    ("genesis-35b-prod", MambaMode::None, 161, "new"),
];

#[derive(Deserialize)]
struct File {
    config: Vec<toml::Table>,
}

/// The fields of a record that matter here.
#[derive(Deserialize)]
struct Config {
    name: String,
    gpu: String,
    tp: u64,
    model: String,
    quant: String,
    kv: String,
    max_model_len: u64,
    mem_util: Option<f64>,
    mnbt: Option<u64>,
    max_num_seqs: Option<u64>,
    mtp_k: Option<u64>,
    mamba_mode: Option<String>,
    prefix_caching: Option<bool>,
    #[serde(default)]
    vision: bool,
    draft: Option<String>,
    boots: Option<bool>,
    oom: Option<String>,
    max_single_prompt_oom: Option<u64>,
    max_single_prompt_ok: Option<u64>,
    reject_need_gib: Option<f64>,
    attn_block_size: Option<u64>,
    kv_pool_tokens_reported: Option<u64>,
}

impl Config {
    /// Whether it is on record that it ran out of memory.
    fn dies(&self) -> bool {
        self.oom.is_some() || self.max_single_prompt_oom.is_some()
    }

    fn recorded(&self) -> Option<Outcome> {
        Some(match (self.boots?, self.dies()) {
            (false, _) => Outcome::Refused,
            (true, true) => Outcome::Dies,
            (true, false) => Outcome::Runs,
        })
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Outcome {
    Refused,
    Dies,
    Runs,
}

impl Outcome {
    fn of(fit: &Fit) -> Self {
        match (fit.boots, fit.fits) {
            (false, _) => Self::Refused,
            (true, false) => Self::Dies,
            (true, true) => Self::Runs,
        }
    }

    /// A record of a run that went well does not say that its longest request was ever asked for, so what starts agrees
    /// with it.
    fn agrees_with(self, recorded: Self) -> bool {
        self == recorded || (self == Self::Dies && recorded == Self::Runs)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Dies => "starts, dies",
            Self::Runs => "runs",
        }
    }
}

/// The records in order, each with the fields of its base under its own.
fn configs() -> Vec<Config> {
    let text = std::fs::read_to_string(root().join("profiles/serving/club3090.toml")).unwrap();
    let file: File = toml::from_str(&text).unwrap();
    let mut whole: BTreeMap<String, toml::Table> = BTreeMap::new();
    let merged = file.config.into_iter().map(|config| {
        let mut table = config.get("base").map_or_else(toml::Table::new, |base| {
            // How the base died, and the pool it had, are its own.
            let mut base = whole[base.as_str().unwrap()].clone();
            base.retain(|key, _| {
                let key: &str = key;
                !matches!(key, "oom" | "max_single_prompt_oom" | "max_single_prompt_ok" | "kv_pool_tokens_reported")
            });
            base
        });
        table.extend(config);
        whole.insert(table["name"].as_str().unwrap().to_owned(), table.clone());
        table.try_into().unwrap()
    });
    merged.collect()
}

/// The ask of a record, or what it lacks.
fn ask(config: &Config) -> Result<(Model, Ask), String> {
    let model = Model::named(&config.model).unwrap();
    let weights = Held::weights(&model, &config.quant, config.tp);
    let lacks = [
        config.draft.as_ref().map(|draft| format!("the draft model's geometry ({draft})")),
        weights.is_err().then(|| format!("what {} weights take on the card", config.quant)),
        config.mnbt.is_none().then(|| "the prefill chunk (mnbt)".to_owned()),
        config.mem_util.is_none().then(|| "the share of the card (mem_util)".to_owned()),
    ];
    let lacks: Vec<String> = lacks.into_iter().flatten().collect();
    let (Ok(weights), true) = (weights, lacks.is_empty()) else { return Err(lacks.join(", ")) };
    let usable = Card::open(&config.gpu).unwrap().usable;
    let mut ask = Ask::new(usable, Format::named(&config.kv).unwrap(), weights, config.max_model_len);
    ask.util = config.mem_util.unwrap().to_string().parse().unwrap();
    ask.chunk = config.mnbt;
    ask.max_seqs = config.max_num_seqs.unwrap_or(1);
    ask.mtp = config.mtp_k.unwrap_or(0);
    ask.tp = config.tp;
    let logged = POOLS.iter().find(|(name, ..)| *name == config.name);
    ask.mode = match (&config.mamba_mode, config.prefix_caching, logged) {
        (Some(mode), ..) => mode.parse().unwrap(),
        (None, Some(false), _) => MambaMode::None,
        (None, _, Some((_, mode, ..))) => *mode,
        (None, _, None) => MambaMode::Align,
    };
    if config.vision {
        // A vision tower takes half a GB to one: 0.75 GiB beside the 1 GiB that the ledger assumes.
        ask.overhead = Bytes::new(1792 << 20);
    }
    Ok((model, ask))
}

/// Whether the ledger says what the record says, down to the prompts that it names.
fn agrees(config: &Config, recorded: Outcome, fit: &Fit) -> bool {
    let died_at = DIED_AT.iter().find(|(name, _)| *name == config.name).map(|(_, tokens)| *tokens);
    let held = config.max_single_prompt_ok;
    Outcome::of(fit).agrees_with(recorded)
        && died_at.is_none_or(|tokens| fit.largest_context < tokens)
        && held.is_none_or(|tokens| fit.largest_context >= tokens)
}

#[test]
fn every_recorded_configuration_agrees_or_says_why_not() {
    let configs = configs();
    assert_eq!(configs.len(), 32);
    let mut table = String::new();
    let mut reasons: Vec<&str> = WHY.iter().map(|(name, _)| *name).collect();
    for config in &configs {
        let name = config.name.as_str();
        let why = WHY.iter().find(|(of, _)| *of == name);
        let recorded = config.recorded();
        let said = recorded.map_or("-", Outcome::name);
        let (ledger, verdict) = match ask(config) {
            Err(lacks) => ("-".to_owned(), format!("not computed: the record lacks {lacks}")),
            Ok((model, ask)) => {
                let fit = fitted(&model, &ask);
                assert_eq!(fit, fitted(&model, &ask), "{name}");
                let ours = Outcome::of(&fit);
                let mut verdict = match recorded {
                    None => "no result recorded".to_owned(),
                    Some(recorded) if agrees(config, recorded, &fit) => "agree".to_owned(),
                    Some(_) => {
                        assert!(
                            why.is_some(),
                            "{name} is recorded as {said}, the ledger says {}: {fit:#?}",
                            ours.name()
                        );
                        "disagree".to_owned()
                    }
                };
                if let Some((_, reason)) = why {
                    write!(verdict, ": {reason}").unwrap();
                    reasons.retain(|of| of != &name);
                }
                if let Some(need) = config.reject_need_gib {
                    assert_eq!(format!("{:.1}", mib(fit.need.get()) / 1024.0), need.to_string(), "{name}");
                }
                if let Some(block) = config.attn_block_size {
                    assert_eq!(fit.pool.block_size, block, "{name}");
                }
                for sentence in fit.refused.iter().chain(&fit.notes) {
                    write!(verdict, "; {sentence}").unwrap();
                }
                let numbers = format!(
                    "{}: need {:.0} of {:.0} MiB, arena {:.0}, largest {}",
                    ours.name(),
                    mib(fit.need.get()),
                    mib(fit.available.get()),
                    mib(fit.arena.get()),
                    fit.largest_context
                );
                (numbers, verdict)
            }
        };
        writeln!(table, "{name:32}{said:14}{ledger:68}{verdict}").unwrap();
    }
    assert!(reasons.is_empty(), "these agree now, or are not computed: {reasons:?}");
    insta::assert_snapshot!("recorded_configurations", table);
}

#[test]
fn every_recorded_pool_is_a_whole_number_of_blocks_under_a_named_formula() {
    let mut seen = 0;
    for config in configs() {
        let Some(reported) = config.kv_pool_tokens_reported else { continue };
        let (_, mode, blocks, formula) = POOLS.iter().find(|(name, ..)| *name == config.name).unwrap();
        let kv = Format::named(&config.kv).unwrap();
        let model = Model::named(&config.model).unwrap();
        let pool = Pool::new(&model, &kv, config.tp, config.mtp_k.unwrap(), *mode).unwrap();
        let tokens = pool.tokens(*blocks, config.max_model_len);
        let printed = match *formula {
            "old" => tokens.old,
            _ => tokens.new,
        };
        assert_eq!(printed, reported, "{}", config.name);
        seen += 1;
    }
    assert_eq!(seen, POOLS.len());
}
