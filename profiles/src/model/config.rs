//! The fields of a Hugging Face `config.json` that sizes follow from, and the checks that make a [`Model`] of them.
//!
//! Multimodal configs keep the language model under `text_config`. Which layers attend fully is said by `layer_types`, or by
//! `full_attention_interval`. The recurrent state counts as fp32 whatever `mamba_ssm_dtype` says below it: the kernels keep
//! it so, and it never understates. This is the only file beside `import/steps.rs` that names serde_json.

use serde::Deserialize;

use super::{Mixer, Model, wrong};
use crate::error::{At, Error, quoted};
use crate::shape::layer::{Mlp, Rank};

/// What is read of a config; other fields do not matter.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Config {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    text_config: Option<Box<Config>>,
    hidden_size: Option<u64>,
    num_hidden_layers: Option<u64>,
    layer_types: Option<Vec<String>>,
    full_attention_interval: Option<u64>,
    num_attention_heads: Option<u64>,
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
    attn_output_gate: Option<bool>,
    linear_num_key_heads: Option<u64>,
    linear_num_value_heads: Option<u64>,
    linear_key_head_dim: Option<u64>,
    linear_value_head_dim: Option<u64>,
    linear_conv_kernel_dim: Option<u64>,
    rms_norm_eps: Option<f64>,
    intermediate_size: Option<u64>,
    num_experts: Option<u64>,
    num_experts_per_tok: Option<u64>,
    moe_intermediate_size: Option<u64>,
    shared_expert_intermediate_size: Option<u64>,
    decoder_sparse_step: Option<u64>,
    mlp_only_layers: Option<Vec<u64>>,
    vocab_size: Option<u64>,
    tie_word_embeddings: Option<bool>,
    mtp_num_hidden_layers: Option<u64>,
    max_position_embeddings: Option<u64>,
}

/// Class, its model types, and whether its projections come interleaved by key head.
const SERVED: &[(&str, &[&str], bool)] = &[
    ("Qwen3NextForCausalLM", &["qwen3_next"], true),
    ("Qwen3_5ForConditionalGeneration", &["qwen3_5", "qwen3_5_text"], false),
    ("Qwen3_5ForCausalLM", &["qwen3_5_text"], false),
    ("Qwen3_5MoeForConditionalGeneration", &["qwen3_5_moe", "qwen3_5_moe_text"], false),
    ("Qwen3_5MoeForCausalLM", &["qwen3_5_moe_text"], false),
];

/// The largest value of a field: products of the few that make a buffer then stay below 2^63.
const MOST_HEADS: u64 = 1 << 12;
const MOST_HEAD_DIM: u64 = 1 << 13;
const MOST_WIDTH: u64 = 1 << 22;
const MOST_LAYERS: u64 = 1 << 12;
const MOST_EXPERTS: u64 = 1 << 14;
const MOST_VOCABULARY: u64 = 1 << 26;
const MOST_TOKENS: u64 = 1 << 40;
/// `rms_norm_eps` where a config leaves it out, as the classes have it.
const USUAL_NORM_EPS: f64 = 1e-6;

/// Reads fields and remembers those that are missing or out of range.
struct Fields<'a> {
    name: &'a str,
    missing: Vec<&'static str>,
    wrong: Option<Error>,
}

impl Fields<'_> {
    /// The field, which must be there, at least 1 and at most `most`.
    fn need(&mut self, field: &'static str, value: Option<u64>, most: u64) -> u64 {
        match value {
            None => self.missing.push(field),
            Some(value) if value == 0 || value > most => {
                self.refuse(format!("{field} is {value}; it must be from 1 to {most}"));
            }
            Some(value) => return value,
        }
        1
    }

    /// Notes what is wrong; the first is what the error says.
    fn refuse(&mut self, reason: impl Into<String>) {
        self.wrong.get_or_insert_with(|| wrong(self.name, reason));
    }
}

impl Config {
    pub(super) fn from_json(name: &str, text: &str) -> Result<Self, Error> {
        serde_json::from_str(text).map_err(|error| {
            let reason = error.to_string();
            // The line is said once, at the front.
            let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(reason, _)| reason).to_owned();
            Error::malformed(name, At::Line(error.line() as u64), reason)
        })
    }

    /// The checked model; `name` is the file, for errors.
    pub(super) fn model(mut self, id: String, name: &str) -> Result<Model, Error> {
        let text = self.text_config.take();
        let text = text.as_deref().unwrap_or(&self);
        let class = [&self, text].iter().find_map(|config| config.architectures.as_ref()?.first().cloned());
        let kind = [&self, text].iter().find_map(|config| config.model_type.clone());
        let served = SERVED.iter().find(|(served, kinds, _)| match (&class, &kind) {
            (Some(class), _) => class == served,
            (None, Some(kind)) => kinds.contains(&kind.as_str()),
            (None, None) => false,
        });

        let mut fields = Fields { name, missing: Vec::new(), wrong: None };
        if class.is_none() && kind.is_none() {
            fields.missing.push("architectures");
        }
        let layers = text.layers(&mut fields);
        let whole = text.whole(served.is_some_and(|(_, _, interleaved)| *interleaved), &mut fields);
        let conv_kernel = fields.need("linear_conv_kernel_dim", text.linear_conv_kernel_dim, 64);
        let norm_eps = text.rms_norm_eps.unwrap_or(USUAL_NORM_EPS);
        if !(norm_eps > 0.0 && norm_eps < 1.0) {
            fields.refuse(format!("rms_norm_eps is {norm_eps}; it must be between 0 and 1"));
        }
        let vocab = fields.need("vocab_size", text.vocab_size, MOST_VOCABULARY);
        let mtp_layers = text.mtp_num_hidden_layers.unwrap_or(1).min(MOST_LAYERS);
        let max_context = text.max_position_embeddings.map(|most| most.min(MOST_TOKENS));
        let missing = fields.missing.join(", ");
        let Some((architecture, ..)) = served else {
            let Some(found) = class.or(kind) else {
                return Err(wrong(name, format!("its geometry is not known: {missing} missing; give its config.json")));
            };
            let lacks = if missing.is_empty() { missing } else { format!("; it lacks {missing}") };
            let reason = format!(
                "architecture {} is not served: those of Qwen3-Next and Qwen3.5, dense and with experts, are{lacks}",
                quoted(&found)
            );
            return Err(wrong(name, reason));
        };
        if !missing.is_empty() {
            return Err(wrong(
                name,
                format!("its geometry is not known: {missing} missing; give its whole config.json"),
            ));
        }
        if let Some(error) = fields.wrong {
            return Err(error);
        }
        let tied = text.tie_word_embeddings.or(self.tie_word_embeddings).unwrap_or(false);
        let architecture = (*architecture).to_owned();
        let weights = Vec::new();
        Ok(Model {
            id,
            architecture,
            layers,
            whole,
            conv_kernel,
            norm_eps,
            vocab,
            tied,
            mtp_layers,
            max_context,
            weights,
        })
    }

    /// How each layer mixes tokens.
    fn layers(&self, fields: &mut Fields<'_>) -> Vec<Mixer> {
        let count = fields.need("num_hidden_layers", self.num_hidden_layers, MOST_LAYERS);
        let Some(types) = &self.layer_types else {
            let Some(interval) = self.full_attention_interval else {
                fields.missing.push("layer_types");
                return Vec::new();
            };
            let interval = fields.need("full_attention_interval", Some(interval), MOST_LAYERS);
            let full = |layer: &u64| layer.is_multiple_of(interval);
            return (1..=count).map(|layer| if full(&layer) { Mixer::Attention } else { Mixer::Gdn }).collect();
        };
        if types.len() as u64 != count && fields.missing.is_empty() {
            fields.refuse(format!("layer_types names {} layers and num_hidden_layers is {count}", types.len()));
        }
        let mixer = |(layer, name): (usize, &String)| match name.as_str() {
            "linear_attention" => Mixer::Gdn,
            "full_attention" => Mixer::Attention,
            other => {
                let reason = "linear_attention and full_attention are served";
                fields.refuse(format!("layer_types has {} for layer {layer}; {reason}", quoted(other)));
                Mixer::Attention
            }
        };
        types.iter().enumerate().map(mixer).collect()
    }

    /// What a layer has where nothing is split.
    fn whole(&self, interleaved: bool, fields: &mut Fields<'_>) -> Rank {
        let rank = Rank {
            hidden: fields.need("hidden_size", self.hidden_size, MOST_WIDTH),
            key_heads: fields.need("linear_num_key_heads", self.linear_num_key_heads, MOST_HEADS),
            value_heads: fields.need("linear_num_value_heads", self.linear_num_value_heads, MOST_HEADS),
            key_dim: fields.need("linear_key_head_dim", self.linear_key_head_dim, MOST_HEAD_DIM),
            value_dim: fields.need("linear_value_head_dim", self.linear_value_head_dim, MOST_HEAD_DIM),
            interleaved,
            heads: fields.need("num_attention_heads", self.num_attention_heads, MOST_HEADS),
            kv_heads: fields.need("num_key_value_heads", self.num_key_value_heads, MOST_HEADS),
            head_dim: fields.need("head_dim", self.head_dim, MOST_HEAD_DIM),
            gated: self.attn_output_gate.unwrap_or(true),
            mlp: self.mlp(fields),
        };
        if !rank.value_heads.is_multiple_of(rank.key_heads) && fields.missing.is_empty() {
            let (keys, values) = (rank.key_heads, rank.value_heads);
            fields.refuse(format!("linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"));
        }
        rank
    }

    fn mlp(&self, fields: &mut Fields<'_>) -> Mlp {
        let Some(experts) = self.num_experts.filter(|experts| *experts > 0) else {
            return Mlp::Dense { intermediate: fields.need("intermediate_size", self.intermediate_size, MOST_WIDTH) };
        };
        if self.decoder_sparse_step.is_some_and(|step| step != 1) {
            fields.refuse("decoder_sparse_step is not 1; experts in every layer are served");
        }
        if self.mlp_only_layers.as_ref().is_some_and(|layers| !layers.is_empty()) {
            fields.refuse("mlp_only_layers names layers; experts in every layer are served");
        }
        Mlp::Moe {
            experts: fields.need("num_experts", Some(experts), MOST_EXPERTS),
            per_token: fields.need("num_experts_per_tok", self.num_experts_per_tok, MOST_EXPERTS),
            intermediate: fields.need("moe_intermediate_size", self.moe_intermediate_size, MOST_WIDTH),
            shared: fields.need("shared_expert_intermediate_size", self.shared_expert_intermediate_size, MOST_WIDTH),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEXT: &str = r#"{"architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 4,
        "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 5120,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 262144}"#;

    fn read(text: &str) -> Result<Model, String> {
        Model::from_config("config.json", text).map_err(|error| error.to_string())
    }

    /// Reads [`NEXT`] with one text replaced by another; the error must say `expected`.
    fn refused(from: &str, to: &str, expected: &str) {
        assert!(NEXT.contains(from), "{from}");
        let error = read(&NEXT.replace(from, to)).unwrap_err();
        assert_eq!(error, format!("config.json: {expected}"));
    }

    #[test]
    fn a_flat_config_and_a_nested_one_read_alike() {
        let flat = read(NEXT).unwrap();
        assert_eq!(flat.layers, [Mixer::Gdn, Mixer::Gdn, Mixer::Gdn, Mixer::Attention]);
        assert!(flat.whole.interleaved);
        let types = r#""layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],"#;
        let inner = NEXT.replace("\"full_attention_interval\": 4,", types).replace("Qwen3NextForCausalLM", "Inner");
        let nested = format!(
            r#"{{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "tie_word_embeddings": true,
                "vision_config": {{"depth": 27}}, "text_config": {inner}}}"#
        );
        let nested = read(&nested).unwrap();
        assert_eq!(nested.layers, flat.layers);
        assert_eq!(Rank { interleaved: true, ..nested.whole }, flat.whole);
        assert!(nested.tied && !nested.whole.interleaved);
        let by_type = NEXT.replace(r#""architectures": ["Qwen3NextForCausalLM"]"#, r#""model_type": "qwen3_next""#);
        assert_eq!(read(&by_type).unwrap(), flat);
        // The largest values that are let through overflow nowhere.
        let whole = Model { mtp_layers: u64::MAX, ..flat };
        let most =
            Mlp::Moe { experts: MOST_EXPERTS, per_token: MOST_EXPERTS, intermediate: MOST_WIDTH, shared: MOST_WIDTH };
        let (heads, dim) = (MOST_HEADS, MOST_HEAD_DIM);
        let rank = Rank {
            hidden: MOST_WIDTH,
            key_heads: heads,
            value_heads: heads,
            key_dim: dim,
            value_dim: dim,
            interleaved: true,
            heads,
            kv_heads: heads,
            head_dim: dim,
            gated: true,
            mlp: most,
        };
        let largest = Model { whole: rank, vocab: MOST_VOCABULARY, conv_kernel: 64, ..whole };
        assert!(largest.parameters() > 0);
        let tokens = crate::synth::MAX_TOKENS;
        for part in crate::synth::Part::ALL {
            let w = crate::synth::Workload::new(crate::synth::Engine::Fla, *part, tokens);
            // Beyond the heads of a kernel, or beyond 2^63 bytes: either is said, and nothing panics.
            assert!(crate::synth::synthesise(&largest, &w, crate::Limits::default()).is_err());
        }
    }

    #[test]
    fn an_unknown_architecture_is_refused_with_the_fields_it_lacks() {
        refused(
            "Qwen3NextForCausalLM",
            "LlamaForCausalLM",
            "architecture 'LlamaForCausalLM' is not served: those of Qwen3-Next and Qwen3.5, dense and with experts, are",
        );
        let llama = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32}"#;
        let error = read(llama).unwrap_err();
        assert!(error.contains("are; it lacks layer_types, linear_num_key_heads, linear_num_value_heads,"), "{error}");
        assert!(read("{}").unwrap_err().contains("not known: architectures, num_hidden_layers"));
    }

    #[test]
    fn each_bad_field_is_named() {
        let missing = |field: &str| format!("its geometry is not known: {field} missing; give its whole config.json");
        refused(r#""hidden_size": 2048,"#, "", &missing("hidden_size"));
        refused(r#""full_attention_interval": 4,"#, "", &missing("layer_types"));
        refused(r#""shared_expert_intermediate_size": 512,"#, "", &missing("shared_expert_intermediate_size"));
        refused(r#""head_dim": 256"#, r#""head_dim": 0"#, "head_dim is 0; it must be from 1 to 8192");
        refused(
            r#""vocab_size": 151936"#,
            r#""vocab_size": "many""#,
            "line 6: invalid type: string \"many\", expected u64",
        );
        refused("151936", "18446744073709551615", "vocab_size is 18446744073709551615; it must be from 1 to 67108864");
        refused(
            r#""full_attention_interval": 4"#,
            r#""layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]"#,
            "layer_types has 'sliding_attention' for layer 1; linear_attention and full_attention are served",
        );
        refused(
            r#""full_attention_interval": 4"#,
            r#""layer_types": ["full_attention"]"#,
            "layer_types names 1 layers and num_hidden_layers is 4",
        );
        refused(
            r#""linear_num_key_heads": 16"#,
            r#""linear_num_key_heads": 5"#,
            "linear_num_value_heads 32 is not a multiple of linear_num_key_heads 5",
        );
        refused(
            r#""mlp_only_layers": []"#,
            r#""mlp_only_layers": [0]"#,
            "mlp_only_layers names layers; experts in every layer are served",
        );
        assert!(read("[").unwrap_err().starts_with("config.json: line 1: "));
    }
}
