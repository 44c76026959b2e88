//! Models as data: the geometry that sizes follow from, one file each in `profiles/models`, or any Hugging Face `config.json`
//! of the same architectures.
//!
//! ```text
//! models/*.toml --.
//!                 |--> Config --checked--> Model --rank(tp)--> shape::layer::Rank
//! config.json ----'
//! ```
//!
//! Both are read through one `config`, so a field means the same in both, and what is missing is named.

use std::path::Path;

use serde::Deserialize;

use crate::error::{At, Error};
use crate::shape::layer::{Mlp, Rank};
use crate::toml_file;
use crate::units::Bytes;

mod config;

/// The geometry of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// What it is called here: its id, or the name of the file.
    pub id: String,
    /// The class that runs it.
    pub architecture: String,
    /// One layer after the other.
    pub layers: Vec<Mixer>,
    /// What one card holds of a layer where nothing is split.
    pub whole: Rank,
    /// Width of the convolution over time.
    pub conv_kernel: u64,
    /// What its norms add to a mean square.
    pub norm_eps: f64,
    /// Tokens it has logits for.
    pub vocab: u64,
    /// Whether the logits come out of the embedding's own weights.
    pub tied: bool,
    /// Layers that guess further tokens; a server counts them as one more layer of full attention.
    pub mtp_layers: u64,
    /// The longest context it was made for; `None` if its config does not say.
    pub max_context: Option<u64>,
    /// What its weights take, where somebody wrote it down.
    pub weights: Vec<Weights>,
}

/// How a layer mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Gated DeltaNet: a state of fixed size.
    Gdn,
    /// Full attention: a key and a value for each token.
    Attention,
}

/// What the weights of one format take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Such as `autoround-int4`.
    pub format: String,
    /// All cards together.
    pub bytes: Bytes,
    /// How that is known.
    pub basis: Basis,
}

/// How a size of weights is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// A server's log says what the cards held.
    Resident,
    /// Counted from the geometry.
    Counted,
    /// The size of the files; what a card holds differs by a few percent.
    Disk,
}

/// The files of `profiles/models`, by name.
const FILES: &[(&str, &str)] = &[
    ("qwen3-next-80b-a3b.toml", include_str!("../models/qwen3-next-80b-a3b.toml")),
    ("qwen3.5-9b.toml", include_str!("../models/qwen3.5-9b.toml")),
    ("qwen3.6-27b.toml", include_str!("../models/qwen3.6-27b.toml")),
    ("qwen3.6-35b-a3b.toml", include_str!("../models/qwen3.6-35b-a3b.toml")),
    ("qwen3.8-flash-next.toml", include_str!("../models/qwen3.8-flash-next.toml")),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    id: String,
    #[serde(default)]
    aliases: Vec<String>,
    config: config::Config,
    #[serde(default)]
    weights: Vec<Recorded>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Recorded {
    format: String,
    resident_gib: Option<String>,
    disk_gb: Option<String>,
}

impl Model {
    /// The ids that [`Model::named`] knows, in order.
    pub fn ids() -> Vec<String> {
        files().map(|(_, file)| file.id).collect()
    }

    /// The model with that id or alias; upper and lower case are one.
    ///
    /// # Errors
    /// No such model, with those there are; or one whose geometry is not known well enough, with what is missing.
    pub fn named(name: &str) -> Result<Self, Error> {
        let is = |other: &String| other.eq_ignore_ascii_case(name);
        let Some((path, file)) = files().find(|(_, file)| is(&file.id) || file.aliases.iter().any(is)) else {
            let reason = format!("there is no such model; give a config.json, or one of {}", Self::ids().join(", "));
            return Err(Error::Selection { name: name.to_owned(), reason });
        };
        let mut model = file.config.model(file.id, path)?;
        model.weights = file.weights.iter().map(Recorded::weights).collect();
        Ok(model)
    }

    /// The model in the text of a `config.json`; `name` is the file, for errors.
    ///
    /// # Errors
    /// No JSON, an architecture that is not served, or a field that is missing or out of range.
    pub fn from_config(name: &str, text: &str) -> Result<Self, Error> {
        config::Config::from_json(name, text)?.model(name.to_owned(), name)
    }

    /// A model by id or alias, or, where the name has a slash or ends in `.json`, by the path of its `config.json` or of the
    /// folder that holds it.
    ///
    /// # Errors
    /// As [`Model::named`] and [`Model::from_config`], and a file that cannot be read.
    pub fn open(name: &str) -> Result<Self, Error> {
        let is_path = name.contains(['/', '\\']) || name.to_ascii_lowercase().ends_with(".json");
        if !is_path {
            return Self::named(name);
        }
        let mut path = Path::new(name).to_path_buf();
        if path.is_dir() {
            path.push("config.json");
        }
        let text = std::fs::read_to_string(&path).map_err(|source| Error::io(path.display().to_string(), source))?;
        Self::from_config(&path.display().to_string(), &text)
    }

    /// How many layers mix that way.
    pub fn count(&self, mixer: Mixer) -> u64 {
        self.layers.iter().filter(|layer| **layer == mixer).count() as u64
    }

    /// The smallest number of first layers that has one of each kind: more repeat the same buffers.
    pub fn period(&self) -> u64 {
        [Mixer::Gdn, Mixer::Attention]
            .iter()
            .filter_map(|kind| self.layers.iter().position(|layer| layer == kind))
            .max()
            .map_or(0, |last| last as u64 + 1)
    }

    /// What each of `tp` cards holds of a layer: heads and feed-forward are split, the residual stream is not.
    ///
    /// # Errors
    /// Something that `tp` does not divide.
    pub fn rank(&self, tp: u64) -> Result<Rank, Error> {
        let w = &self.whole;
        let split = |what: &str, whole: u64| {
            if tp > 0 && whole.is_multiple_of(tp) {
                return Ok(whole / tp);
            }
            let reason = format!("{whole} {what} cannot be split over {tp} cards; choose another --tp");
            Err(Error::Selection { name: self.id.clone(), reason })
        };
        let mlp = match w.mlp {
            Mlp::Dense { intermediate } => {
                Mlp::Dense { intermediate: split("columns of the feed-forward", intermediate)? }
            }
            Mlp::Moe { experts, per_token, intermediate, shared } => Mlp::Moe {
                experts,
                per_token,
                intermediate: split("columns of an expert", intermediate)?,
                shared: split("columns of the shared expert", shared)?,
            },
        };
        Ok(Rank {
            key_heads: split("linear key heads", w.key_heads)?,
            value_heads: split("linear value heads", w.value_heads)?,
            heads: split("attention heads", w.heads)?,
            // With fewer key and value heads than cards, each card has a copy of one.
            kv_heads: if tp > w.kv_heads { 1 } else { split("key and value heads", w.kv_heads)? },
            mlp,
            ..*w
        })
    }

    /// Numbers that its weights hold: embedding, layers, logits. The multi-token head and a vision tower are not counted.
    pub fn parameters(&self) -> u64 {
        let w = &self.whole;
        // In 128 bits, since each field may be as large as it is allowed to.
        let wide = u128::from;
        let hidden = wide(w.hidden);
        let query = wide(w.heads * w.head_dim);
        let kv = wide(w.kv_heads * w.head_dim);
        let gdn = hidden * wide(w.qkv() + w.values() + 2 * w.value_heads)
            + wide(w.qkv() * self.conv_kernel)
            + wide(2 * w.value_heads + w.value_dim)
            + wide(w.values()) * hidden;
        let attention = hidden * (query * (1 + wide(w.gated.into())) + 2 * kv) + query * hidden + wide(2 * w.head_dim);
        let mlp = match w.mlp {
            Mlp::Dense { intermediate } => 3 * hidden * wide(intermediate),
            Mlp::Moe { experts, intermediate, shared, .. } => {
                hidden * wide(experts + u64::from(shared > 0)) + 3 * hidden * wide(experts * intermediate + shared)
            }
        };
        let layers = wide(self.count(Mixer::Gdn)) * gdn + wide(self.count(Mixer::Attention)) * attention;
        let every = self.layers.len() as u128 * (mlp + 2 * hidden);
        let outer = hidden * (1 + wide(self.vocab) * (2 - wide(self.tied.into())));
        u64::try_from(layers + every + outer).unwrap_or(u64::MAX)
    }

    /// What the weights of a format take, all cards together: recorded, or, for `bf16` and `fp16`, counted.
    ///
    /// # Errors
    /// A format nobody recorded for this model, with those there are.
    pub fn weights(&self, format: &str) -> Result<Weights, Error> {
        if let Some(recorded) = self.weights.iter().find(|weights| weights.format.eq_ignore_ascii_case(format)) {
            return Ok(recorded.clone());
        }
        if ["bf16", "fp16", "bfloat16", "float16"].contains(&format) {
            let Some(bytes) = self.parameters().checked_mul(2).and_then(Bytes::new) else {
                let reason = "its weights at 16 bits are more than 2^63 - 1 bytes; give --weights in bytes".to_owned();
                return Err(Error::Selection { name: self.id.clone(), reason });
            };
            return Ok(Weights { format: format.to_owned(), bytes, basis: Basis::Counted });
        }
        let known: Vec<&str> = self.weights.iter().map(|weights| weights.format.as_str()).chain(["bf16"]).collect();
        let reason = format!(
            "what its {format} weights take is not recorded; give --weights in bytes, or one of {}",
            known.join(", ")
        );
        Err(Error::Selection { name: self.id.clone(), reason })
    }
}

impl Recorded {
    fn weights(&self) -> Weights {
        let (text, basis) = match (&self.resident_gib, &self.disk_gb) {
            (Some(gib), _) => (format!("{gib}GiB"), Basis::Resident),
            (None, Some(gb)) => (format!("{gb}GB"), Basis::Disk),
            (None, None) => ("0".to_owned(), Basis::Disk),
        };
        let bytes = text.parse().unwrap_or_else(|error| panic!("the tests read every embedded size: {error}"));
        Weights { format: self.format.clone(), bytes, basis }
    }
}

fn files() -> impl Iterator<Item = (&'static str, File)> {
    FILES.iter().map(|(name, text)| (*name, toml_file::embedded(name, text)))
}

/// A [`Error::Malformed`] about a file as a whole.
fn wrong(name: &str, reason: impl Into<String>) -> Error {
    Error::malformed(name, At::File, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_embedded_model_is_read_or_says_what_is_missing() {
        let whole = ["qwen3-next-80b-a3b", "qwen3.6-27b", "qwen3.6-35b-a3b"];
        for id in Model::ids() {
            match Model::named(&id) {
                Ok(model) => {
                    assert!(whole.contains(&model.id.as_str()), "{id}");
                    assert_eq!(model.layers.len() as u64, 4 * model.count(Mixer::Attention), "{id}");
                    assert!(model.weights.iter().all(|weights| weights.bytes > Bytes::ZERO));
                }
                Err(error) => {
                    assert!(!whole.contains(&id.as_str()), "{id}: {error}");
                    assert!(error.to_string().contains("its geometry is not known: "), "{error}");
                }
            }
        }
        let error = Model::named("qwen3.8-flash-next").unwrap_err().to_string();
        assert_eq!(
            error,
            "qwen3.8-flash-next.toml: its geometry is not known: architectures, shared_expert_intermediate_size missing; \
             give its config.json"
        );
    }

    #[test]
    fn aliases_name_the_same_geometry() {
        let model = Model::named("qwen3.6-27b").unwrap();
        for alias in ["qwen3.5-27b", "qwen3.8-27b", "Qwen3.6-27B"] {
            assert_eq!(Model::open(alias).unwrap(), model);
        }
        assert_eq!((model.count(Mixer::Gdn), model.count(Mixer::Attention)), (48, 16));
        let error = Model::open("llama").unwrap_err().to_string();
        assert!(error.starts_with("llama: there is no such model; give a config.json, or one of qwen3-next-80b-a3b, "));
        assert!(Model::open("no/such/config.json").unwrap_err().to_string().starts_with("no/such/config.json: "));
    }

    #[test]
    fn counted_parameters_are_those_on_the_label() {
        for (name, billions) in [("qwen3.6-27b", 27), ("qwen3.6-35b-a3b", 35), ("qwen3-next-80b-a3b", 80)] {
            let parameters = Model::named(name).unwrap().parameters();
            assert_eq!((parameters + 500_000_000) / 1_000_000_000, billions, "{name}: {parameters}");
        }
        let error = Model::named("qwen3.6-27b").unwrap().weights("gguf-q4_k_m").unwrap_err().to_string();
        assert!(error.contains("give --weights in bytes, or one of autoround-int4, awq-int4,"), "{error}");
    }
}
