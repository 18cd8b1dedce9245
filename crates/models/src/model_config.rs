//! Decides which models are known: the only code that reads the family of a model from its config.json. Invariant: all
//! commands read a config.json through [`ModelConfig::from_json`], so that a model that one of them knows is known to all.

use crate::config::{ConfigError, ConfigKeys, shown};
use crate::decoder::DECODERS;
use crate::{CallerConfig, DecoderConfig, DnabertConfig, Encoder, Esm2Config};
use serde_json::{Map, Value};

/// Configuration of a model of any supported family.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// An encoder of biological sequences.
    Encoder(Encoder),
    /// A decoder language model.
    Decoder(DecoderConfig),
    /// A classifier of DNA windows.
    Caller(CallerConfig),
}

impl ModelConfig {
    /// Reads a config.json. The key `model_type` names the family.
    ///
    /// # Errors
    /// Text that is not JSON; a `model_type` that is not supported; weights that are quantized; keys that the family cannot
    /// have, by name.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_str(text).map_err(ConfigError::Json)?;
        let empty = Map::new();
        let keys = ConfigKeys(value.as_object().unwrap_or(&empty));
        if CallerConfig::is_caller(text) {
            return CallerConfig::from_json(text).map(Self::Caller);
        }
        let model = match keys.0.get("model_type").and_then(Value::as_str) {
            Some("esm") => Self::Encoder(Encoder::Esm2(Esm2Config::from_keys(&keys)?)),
            Some("bert") if keys.is_dnabert() => {
                Self::Encoder(Encoder::DnabertS(DnabertConfig::from_keys(&keys)?))
            }
            Some(kind) if DECODERS.contains(&kind) => Self::Decoder(DecoderConfig::from_keys(&keys)?),
            other => {
                let found = other.map_or("(none)".to_owned(), |kind| format!("`{}`", shown(kind)));
                return Err(ConfigError::Kind(found));
            }
        };
        if keys.has("quantization_config") {
            return Err(keys.bad("quantization_config", UNQUANTIZED));
        }
        Ok(model)
    }

    /// The family with its article, for messages.
    pub fn family(&self) -> &'static str {
        match self {
            Self::Encoder(Encoder::Esm2(_)) => "an ESM-2 encoder",
            Self::Encoder(Encoder::DnabertS(_)) => "a DNABERT-S encoder",
            Self::Decoder(_) => "a decoder",
            Self::Caller(_) => "a caller",
        }
    }
}

/// Message for quantized weights: the configurations that are accepted.
const UNQUANTIZED: &str = "left out: quantized checkpoints (GPTQ, AWQ, bitsandbytes, FP8 and others) are not read; take the \
                           checkpoint in bf16 or f32";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SequenceModel;
    use serde_json::json;

    /// A small Llama with `more` keys.
    fn llama(more: Value) -> String {
        let mut config = json!({
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
        });
        config.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        config.to_string()
    }

    /// Every form that is refused is refused by the name of its key, whichever command reads it.
    #[test]
    fn what_would_compute_something_else_is_refused_by_name() {
        let rope = |kind: &str| json!({"rope_scaling": {"rope_type": kind, "factor": 2.0}});
        for (more, wanted) in [
            (json!({"model_type": "gpt2"}), "model_type `gpt2` is not known"),
            (json!({"model_type": "gemma2"}), "model_type `gemma2` is not known"),
            (json!({"model_type": "qwen3_moe"}), "model_type `qwen3_moe` is not known"),
            (json!({"model_type": null}), "model_type (none) is not known"),
            (
                json!({"quantization_config": {"quant_method": "gptq"}}),
                "`quantization_config` must be left out",
            ),
            (json!({"quantization_config": {"quant_method": "awq"}}), "`quantization_config` must be left out"),
            (rope("dynamic"), "`rope_type` must be `default`, `linear`, `llama3` or `yarn`"),
            (rope("longrope"), "`rope_type` must be"),
            (json!({"rope_scaling": {"type": "su", "factor": 2.0}}), "`type` must be `default`"),
            (json!({"rope_scaling": {"factor": 2.0}}), "`rope_type` must be"),
            (json!({"rope_scaling": {"type": "linear"}}), "`factor` must be a number from 1 on"),
            (json!({"rope_scaling": 8}), "`rope_scaling` must be an object or null"),
            (json!({"rope_parameters": {"rope_type": "mrope", "factor": 1.0}}), "`rope_type` must be"),
            (
                json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}),
                "`rope_scaling` must be left out beside `rope_parameters`",
            ),
            (json!({"partial_rotary_factor": 0.5}), "`partial_rotary_factor` must be 1"),
            (json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), "`partial_rotary_factor` must be 1"),
            (json!({"layer_types": ["sliding_attention"]}), "`layer_types` must be"),
            (json!({"model_type": "qwen2", "use_sliding_window": true}), "`use_sliding_window` must be false"),
            (json!({"model_type": "qwen3", "use_sliding_window": true}), "`use_sliding_window` must be false"),
            (json!({"model_type": "mistral", "attention_bias": true}), "`attention_bias` must be false"),
            (json!({"model_type": "qwen3", "mlp_bias": true}), "`mlp_bias` must be false"),
            (json!({"is_causal": false}), "`is_causal` must be true"),
            (json!({"use_bidirectional_attention": true}), "`use_bidirectional_attention` must be false"),
            (json!({"auto_map": {"AutoModel": "modeling.Model"}}), "`auto_map` must be"),
            (json!({"hidden_act": "gelu"}), "`hidden_act` must be `silu`"),
        ] {
            let text = llama(more.clone());
            for error in [
                ModelConfig::from_json(&text).expect_err("refused"),
                SequenceModel::from_json(&text).expect_err("refused"),
                DecoderConfig::from_json(&text).expect_err("refused"),
            ] {
                assert!(error.to_string().starts_with(wanted), "{more}: {error}");
            }
        }
    }

    #[test]
    fn a_model_of_another_family_is_refused_as_what_it_is() {
        let error = Encoder::from_json(&llama(json!({}))).expect_err("refused").to_string();
        assert!(error.starts_with("it is a decoder, and an encoder (ESM-2 or DNABERT-S) is wanted"), "{error}");
        let caller = crate::CallerConfig { tasks: vec![], ..caller() }.to_json();
        let error = SequenceModel::from_json(&caller).expect_err("refused").to_string();
        assert!(error.starts_with("it is a caller, and an encoder or a decoder is wanted"), "{error}");
    }

    fn caller() -> CallerConfig {
        CallerConfig {
            vocab_size: 66,
            hidden_size: 16,
            layers: 1,
            heads: 2,
            intermediate_size: 8,
            eps: 1e-5,
            rope_theta: 1e4,
            tasks: vec![],
        }
    }
}
