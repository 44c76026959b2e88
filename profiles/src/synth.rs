//! Profiles of forwards that nobody has to run: a model and a workload in, every buffer in order out.
//!
//! ```text
//! residual  [------------------------------------------------------)
//! fla       norm in_proj ... fwd_h fwd_o ... add | norm ... add | ...       all tokens at once
//! terrace   norm ... out norm ... out norm ... out | norm ... down ...      one window of tokens after the other
//! ```
//!
//! Sizes and lives come from `shape` alone. Weights, the KV pool and the pool of recurrent states are not part of a forward's
//! arena and are left out. With windows everything but the residual stream is as large as a window, so the peak of a layer
//! is the residual stream plus a constant.

use crate::error::Error;
use crate::event::Action;
use crate::limits::Limits;
use crate::model::{Mixer, Model};
use crate::profile::Profile;
use crate::shape::layer::{self, ACTIVATION, FP32, Mlp, Rank, Table, product};
use crate::shape::terrace::{self, Run, kernel_window};
use crate::shape::{CHUNK, Gdn, Window, fla};
use crate::units::{Bytes, Overflow};

mod workload;
mod writer;

pub use workload::{Engine, Lifetimes, MAX_DECODE, MAX_TOKENS, Part, Workload};
use writer::Writer;

/// The profile of a workload. Equal arguments give equal profiles.
///
/// # Errors
/// A workload that contradicts itself or the model; sizes beyond 2^63 bytes; a profile beyond the limits.
pub fn synthesise(model: &Model, workload: &Workload, limits: Limits) -> Result<Profile, Error> {
    let plan = Layers::new(model, workload)?;
    let name = format!("{}-{}-{}-{}", model.id, workload.part, workload.tokens, workload.engine);
    let mut writer = Writer::new(name, notes(model, workload), limits);
    plan.write(&mut writer)?;
    Ok(writer.finish())
}

fn notes(model: &Model, w: &Workload) -> Vec<(String, String)> {
    let mut notes: Vec<(&str, String)> = vec![
        ("model", model.id.clone()),
        ("part", w.part.to_string()),
        ("engine", w.engine.to_string()),
        ("lifetimes", w.lifetimes.to_string()),
        ("tokens", w.tokens.to_string()),
    ];
    notes.extend(w.window.map(|window| ("window", window.to_string())));
    notes.extend(
        [("context", w.context), ("sequences", w.sequences), ("tp", w.tp)].map(|(key, n)| (key, n.to_string())),
    );
    if w.decode {
        notes.push(("phase", "decode".to_owned()));
    }
    notes.extend(w.cpu_threads.map(|threads| ("cpu-threads", threads.to_string())));
    if w.part == Part::Layer {
        notes.extend(w.layers.map(|layers| ("layers", layers.to_string())));
    }
    if w.part == Part::Forward {
        notes.push(("layers", w.layers.unwrap_or(model.layers.len() as u64).to_string()));
        notes.push(("logits-rows", w.logits_rows.to_string()));
    }
    notes.push(("origin", "synthesised from the geometry; weights, KV pool and state pool are left out".to_owned()));
    notes.into_iter().map(|(key, text)| (key.to_owned(), text)).collect()
}

/// A checked workload on a model's rank.
struct Layers<'a> {
    model: &'a Model,
    workload: &'a Workload,
    rank: Rank,
    heads: Gdn,
    /// Tokens that the kernels hold at once.
    kernel_window: Window,
    /// How Terrace runs a layer.
    run: Run,
}

impl<'a> Layers<'a> {
    fn new(model: &'a Model, workload: &'a Workload) -> Result<Self, Error> {
        let w = workload;
        let refuse = |reason: String| Error::Selection { name: model.id.clone(), reason };
        let rank = model.rank(w.tp)?;
        if w.tokens == 0 || w.tokens > MAX_TOKENS {
            return Err(refuse(format!("{} tokens cannot be run; give --tokens from 1 to {MAX_TOKENS}", w.tokens)));
        }
        if w.context < w.tokens || w.context > MAX_TOKENS {
            return Err(refuse(format!(
                "a context of {} does not hold the {} tokens of the workload, or is beyond {MAX_TOKENS}",
                w.context, w.tokens
            )));
        }
        if w.sequences == 0 || w.sequences > w.tokens {
            return Err(refuse(format!("{} tokens cannot come from {} sequences", w.tokens, w.sequences)));
        }
        if let Some(layers) = w.layers {
            let there = match w.part {
                Part::Forward => model.layers.len() as u64,
                Part::Layer => model.count(Mixer::Gdn),
                other => return Err(refuse(format!("--layers is for a forward or a layer, not for --part {other}"))),
            };
            if layers == 0 || layers > there {
                return Err(refuse(format!("it has layers 1 to {there}, and {layers} were asked for")));
            }
        }
        let needed = match w.part {
            Part::Forward | Part::Mlp => None,
            Part::Layer | Part::Mixer | Part::GdnOp => Some((Mixer::Gdn, "Gated DeltaNet")),
            Part::Attention => Some((Mixer::Attention, "full-attention")),
        };
        if let Some((mixer, what)) = needed
            && model.count(mixer) == 0
        {
            return Err(refuse(format!("it has no {what} layer; choose another --part")));
        }
        let kernel_window = Self::kernel_window(w).map_err(refuse)?;
        let serves = |heads: u64| u32::try_from(heads).unwrap_or(u32::MAX);
        let heads = Gdn::new(serves(rank.key_heads), serves(rank.value_heads));
        if w.engine == Engine::Terrace && !layer::served_widths(&rank) {
            let (key, value) = (rank.key_dim, rank.value_dim);
            return Err(refuse(format!("heads {key} and {value} wide are not served by --engine terrace, only 128")));
        }
        let heads = heads.map_err(|error| refuse(error.to_string()))?;
        let run = Self::run(w, &rank, heads, kernel_window).map_err(refuse)?;
        Ok(Self { model, workload, rank, heads, kernel_window, run })
    }

    /// The operation alone runs in the window that is asked for. In a layer, whose window may be larger, the kernels need no
    /// more than the one that is fastest.
    fn kernel_window(w: &Workload) -> Result<Window, String> {
        let Some(tokens) = w.window else { return Ok(Window::DEFAULT) };
        if w.engine != Engine::Terrace {
            return Err(format!("--window is for --engine terrace; {} takes all tokens at once", w.engine));
        }
        if w.part == Part::GdnOp {
            return Window::new(tokens).map_err(|error| error.to_string());
        }
        kernel_window(Some(tokens))
            .map_err(|tokens| format!("a window of {tokens} tokens is not served: it must be a multiple of {CHUNK}"))
    }

    /// How a layer runs: decode steps and the host are Terrace's own, and are sized where it runs whole layers.
    fn run(w: &Workload, rank: &Rank, heads: Gdn, window: Window) -> Result<Run, String> {
        let dense = matches!(rank.mlp, Mlp::Dense { .. });
        let whole = w.engine == Engine::Terrace && (w.part == Part::Mixer || (w.part == Part::Layer && dense));
        for (option, given) in [("--decode", w.decode), ("--cpu-threads", w.cpu_threads.is_some())] {
            if given && !whole {
                return Err(format!("{option} is for --engine terrace and its --part mixer, or layer without experts"));
            }
        }
        if w.decode && w.tokens > MAX_DECODE {
            return Err(format!("a decode step takes at most {MAX_DECODE} tokens, and {} were asked for", w.tokens));
        }
        let run = w.cpu_threads.map_or_else(|| Run::cuda(heads, window), |threads| Run::cpu(heads, threads));
        Ok(if w.decode { run.decode() } else { run })
    }

    fn write(&self, to: &mut Writer) -> Result<(), Error> {
        let w = self.workload;
        let residual = |to: &mut Writer| to.alloc("residual", self.rows(self.rank.hidden)?);
        match w.part {
            Part::GdnOp => self.gdn_op(to),
            Part::Forward => self.forward(to),
            Part::Layer => {
                let residual = residual(to)?;
                for _ in 0..w.layers.unwrap_or(1) {
                    self.mixer(Mixer::Gdn, to)?;
                    self.mlp(to)?;
                }
                to.free(residual)
            }
            Part::Mixer | Part::Attention | Part::Mlp => {
                let residual = residual(to)?;
                match w.part {
                    Part::Mixer => self.mixer(Mixer::Gdn, to)?,
                    Part::Attention => self.mixer(Mixer::Attention, to)?,
                    _ => self.mlp(to)?,
                }
                to.free(residual)
            }
        }
    }

    fn forward(&self, to: &mut Writer) -> Result<(), Error> {
        let w = self.workload;
        to.push(Action::StepBegin { key: format!("prefill/{}", w.tokens).into() })?;
        let index = |to: &mut Writer, label| to.alloc(label, sized(&self.model.id, product(&[w.tokens, 8]))?);
        let ids = index(to, "token_ids")?;
        let positions = index(to, "positions")?;
        let residual = to.alloc("residual", self.rows(self.rank.hidden)?)?;
        to.free(ids)?;
        let layers = w.layers.unwrap_or(self.model.layers.len() as u64);
        for mixer in self.model.layers.iter().take(usize::try_from(layers).unwrap_or(usize::MAX)) {
            self.mixer(*mixer, to)?;
            self.mlp(to)?;
        }
        to.free(positions)?;
        if w.logits_rows > 0 {
            to.table("head", &sized(&self.model.id, self.head())?, w.lifetimes)?;
        }
        to.free(residual)?;
        to.push(Action::StepEnd)
    }

    /// The last norm and the logits. FLA's engines norm every token; ours only those that need logits.
    fn head(&self) -> Result<Table, Overflow> {
        let w = self.workload;
        let normed = if w.engine == Engine::Terrace { 0 } else { w.tokens };
        let (rows, vocab) = (w.logits_rows, self.model.vocab);
        Table::new(
            &["norm", "select", "logits", "to_fp32", "sample"],
            [
                ("normed", &[normed, self.rank.hidden, ACTIVATION][..], ["norm", "select", "sample"]),
                ("last_hidden", &[rows, self.rank.hidden, ACTIVATION], ["select", "logits", "sample"]),
                ("logits", &[rows, vocab, ACTIVATION], ["logits", "to_fp32", "sample"]),
                ("logits_fp32", &[rows, vocab, FP32], ["to_fp32", "sample", "sample"]),
            ],
        )
    }

    fn gdn_op(&self, to: &mut Writer) -> Result<(), Error> {
        let w = self.workload;
        let table = match w.engine {
            Engine::Fla => fla::gdn_op(&self.rank, fla::Copy::Fla, w.tokens, w.sequences),
            Engine::FlaVllm => fla::gdn_op(&self.rank, fla::Copy::Vllm, w.tokens, w.sequences),
            Engine::Terrace => terrace::gdn_op(self.heads, self.kernel_window),
        };
        to.table("gdn", &sized(&self.model.id, table)?, w.lifetimes)
    }

    fn mixer(&self, mixer: Mixer, to: &mut Writer) -> Result<(), Error> {
        let w = self.workload;
        let name = match mixer {
            Mixer::Gdn => "gdn",
            Mixer::Attention => "attention",
        };
        self.windows(name, to, |tokens| match (mixer, w.engine) {
            (Mixer::Gdn, Engine::Fla) => fla::gdn_mixer(&self.rank, fla::Copy::Fla, tokens, w.sequences),
            (Mixer::Gdn, Engine::FlaVllm) => fla::gdn_mixer(&self.rank, fla::Copy::Vllm, tokens, w.sequences),
            (Mixer::Gdn, Engine::Terrace) => terrace::gdn_mixer(&self.rank, tokens, self.run),
            (Mixer::Attention, Engine::Terrace) => layer::attention(&self.rank, tokens, tokens),
            // Their kernel pads to the longest sequence.
            (Mixer::Attention, _) => layer::attention(&self.rank, tokens, w.context),
        })
    }

    fn mlp(&self, to: &mut Writer) -> Result<(), Error> {
        self.windows("mlp", to, |tokens| match self.workload.engine {
            Engine::Terrace => terrace::mlp(&self.rank, tokens, self.run),
            Engine::Fla | Engine::FlaVllm => layer::mlp(&self.rank, tokens),
        })
    }

    /// Writes a table once for each window of the prompt: for all of it where there are none.
    fn windows(
        &self,
        name: &str,
        to: &mut Writer,
        table: impl Fn(u64) -> Result<Table, Overflow>,
    ) -> Result<(), Error> {
        let w = self.workload;
        let window = w.window.unwrap_or(w.tokens).min(w.tokens);
        let whole = sized(&self.model.id, table(window))?;
        for _ in 0..w.tokens / window {
            to.table(name, &whole, w.lifetimes)?;
        }
        match w.tokens % window {
            0 => Ok(()),
            rest => to.table(name, &sized(&self.model.id, table(rest))?, w.lifetimes),
        }
    }

    /// Bytes of a row of activations for each token.
    fn rows(&self, width: u64) -> Result<Bytes, Error> {
        let activation = if self.workload.engine == Engine::Terrace { self.run.activation } else { ACTIVATION };
        sized(&self.model.id, product(&[self.workload.tokens, width, activation]))
    }
}

fn sized<T>(model: &str, size: Result<T, Overflow>) -> Result<T, Error> {
    size.map_err(|_| {
        let reason = "a buffer of this workload is more than 2^63 - 1 bytes; give fewer --tokens".to_owned();
        Error::Selection { name: model.to_owned(), reason }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Tick;

    fn workload(engine: Engine, part: Part, tokens: u64) -> Workload {
        Workload::new(engine, part, tokens)
    }

    fn profile(model: &str, workload: &Workload) -> Profile {
        synthesise(&Model::named(model).unwrap(), workload, Limits::default()).unwrap()
    }

    /// The most bytes alive at once.
    fn peak(model: &str, workload: &Workload) -> u64 {
        let profile = profile(model, workload);
        let lives = profile.lives().unwrap();
        let mut changes: Vec<(Tick, i64)> = Vec::new();
        for life in &lives {
            assert!(life.freed, "everything a forward allocates ends with it");
            let bytes = i64::try_from(life.bytes.get()).unwrap();
            changes.extend([(life.birth, bytes), (life.death, -bytes)]);
        }
        changes.sort_unstable();
        let mut live = 0;
        let most = changes.iter().map(|(_, change)| {
            live += change;
            live
        });
        u64::try_from(most.max().unwrap()).unwrap()
    }

    /// MiB with one digit, as tables print them.
    fn mib(bytes: u64) -> String {
        format!("{:.1}", bytes as f64 / f64::from(1 << 20))
    }

    #[test]
    fn the_three_engines_differ_where_they_should() {
        let count = |engine, part| profile("qwen3.6-27b", &workload(engine, part, 4128)).lives().unwrap().len();
        // The norms of q and k are kept by one copy, an fp32 A by the other.
        assert_eq!(count(Engine::Fla, Part::GdnOp), 10);
        assert_eq!(count(Engine::FlaVllm, Part::GdnOp), 9);
        assert_eq!(count(Engine::Terrace, Part::GdnOp), 1);
    }

    #[test]
    fn a_rank_has_its_part_of_the_heads() {
        let mut w = Workload { tp: 2, ..workload(Engine::FlaVllm, Part::Mixer, 4128) };
        assert_eq!(mib(peak("qwen3.6-27b", &w)), "428.4");
        w.tokens = 8192;
        w.context = 8192;
        assert_eq!(mib(peak("qwen3.6-27b", &w)), "846.4");
        w.tp = 3;
        let model = Model::named("qwen3.6-27b").unwrap();
        let error = synthesise(&model, &w, Limits::default()).unwrap_err().to_string();
        assert_eq!(
            error,
            "qwen3.6-27b: 17408 columns of the feed-forward cannot be split over 3 cards; choose another --tp"
        );
    }

    #[test]
    fn the_first_layers_need_as_much_as_all() {
        for model in ["qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3-next-80b-a3b"] {
            for engine in Engine::ALL {
                let mut w = workload(*engine, Part::Forward, 1000);
                w.window = (*engine == Engine::Terrace).then_some(256);
                let all = peak(model, &w);
                w.layers = Some(Model::named(model).unwrap().period());
                assert_eq!(w.layers, Some(4));
                assert_eq!(peak(model, &w), all, "{model} {engine}");
            }
        }
    }

    #[test]
    fn every_part_of_every_model_keeps_the_rules_of_a_profile() {
        for model in ["qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3-next-80b-a3b"] {
            for part in Part::ALL {
                for engine in Engine::ALL {
                    for lifetimes in Lifetimes::ALL {
                        for tokens in [1, 63, 64, 65, 641, 1000] {
                            let mut w = Workload { lifetimes: *lifetimes, ..workload(*engine, *part, tokens) };
                            let whole = peak(model, &w);
                            if *engine == Engine::Terrace {
                                w.window = Some(64);
                                assert!(peak(model, &w) <= whole);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn many_short_sequences_have_the_most_chunks() {
        let h = |sequences| {
            let w = Workload { sequences, ..workload(Engine::Fla, Part::GdnOp, 4128) };
            let profile = profile("qwen3.6-27b", &w);
            let label = profile.labels.iter().position(|label| label == "gdn.h").unwrap();
            profile.lives().unwrap().iter().find(|life| life.label.0 as usize == label).unwrap().bytes.get()
        };
        let chunk = 48 * 128 * 128 * 2;
        assert_eq!(h(1), 65 * chunk);
        // 99 sequences of one token, and one of 4029, which is 63 chunks.
        assert_eq!(h(100), (99 + 63) * chunk);
        assert_eq!(h(4128), 4128 * chunk);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let good = workload(Engine::Terrace, Part::Forward, 1000);
        let with = |edit: &dyn Fn(&mut Workload)| {
            let mut w = good.clone();
            edit(&mut w);
            synthesise(&Model::named("qwen3.6-27b").unwrap(), &w, Limits::default()).unwrap_err().to_string()
        };
        let check = |error: String, expected: &str| assert_eq!(error, format!("qwen3.6-27b: {expected}"));
        check(with(&|w| w.tokens = 0), "0 tokens cannot be run; give --tokens from 1 to 1099511627776");
        check(
            with(&|w| w.context = 999),
            "a context of 999 does not hold the 1000 tokens of the workload, or is beyond 1099511627776",
        );
        check(with(&|w| w.sequences = 1001), "1000 tokens cannot come from 1001 sequences");
        check(with(&|w| w.layers = Some(65)), "it has layers 1 to 64, and 65 were asked for");
        check(
            with(&|w| (w.layers, w.part) = (Some(1), Part::Mlp)),
            "--layers is for a forward or a layer, not for --part mlp",
        );
        check(with(&|w| w.window = Some(100)), "a window of 100 tokens is not served: it must be a multiple of 64");
        check(
            with(&|w| (w.window, w.part) = (Some(8192), Part::GdnOp)),
            "a window of 8192 tokens is not served: it must be a multiple of 64 from 64 to 4096",
        );
        check(
            with(&|w| (w.window, w.engine) = (Some(64), Engine::Fla)),
            "--window is for --engine terrace; fla takes all tokens at once",
        );
        let model = Model::named("qwen3.6-27b").unwrap();
        let limits = Limits { memory: Bytes::new(1 << 20).unwrap() };
        let error = synthesise(&model, &Workload { window: Some(64), ..good }, limits).unwrap_err().to_string();
        assert!(error.contains("more than the 1.0 MiB of memory allowed"), "{error}");
        let error = "fla2".parse::<Engine>().unwrap_err();
        assert_eq!(error, "'fla2' is no engine; give one of fla, fla-vllm, terrace");
    }
}
