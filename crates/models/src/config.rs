//! Reads the config.json of encoders on the Hugging Face Hub. Invariant: a key that changes the computation is
//! either implemented, or an error names it.

use crate::decoder::DECODERS;
use crate::{DnabertConfig, Esm2Config, ModelConfig, dnabert_s, esm2};
use plimsoll_graph::{Bounds, Graph, VerifyError};
use serde_json::{Map, Value, json};
use std::fmt;

/// Maximum columns of an attention head of a model. Devices may support fewer; a plan for such a device is refused.
pub(crate) const WIDEST_HEAD: u64 = 256;

/// A configuration cannot be read, or describes a model that is not supported.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not JSON.
    Json(serde_json::Error),
    /// A key is missing or its value is not supported.
    Key {
        /// Name of the key.
        key: &'static str,
        /// Description of supported values.
        wanted: String,
        /// The value in the file.
        found: String,
    },
    /// The `model_type` is not supported.
    Kind(String),
    /// A model of a family that the command does not take.
    Family {
        /// The family of the model, with its article.
        found: &'static str,
        /// The families that are wanted, with their articles.
        wanted: &'static str,
    },
    /// A key that the model family does not have.
    UnknownKey {
        /// Name of the key.
        key: String,
        /// The keys of the family.
        known: String,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(_) => write!(f, "the configuration is not JSON"),
            Self::Key { key, wanted, found } => write!(f, "`{key}` must be {wanted}, found {found}"),
            Self::UnknownKey { key, known } => {
                write!(f, "`{key}` is not a key of this model; its keys are {known}")
            }
            Self::Kind(found) => write!(
                f,
                "model_type {found} is not known; known are `esm` (ESM-2), `bert` of DNABERT-S (with \
                 `alibi_starting_size`, with DNABERT's code in `auto_map`, or with its vocabulary of 4096 tokens), \
                 and the decoders `{}`",
                DECODERS.join("`, `")
            ),
            Self::Family { found, wanted } => write!(f, "it is {found}, and {wanted} is wanted"),
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Json(error) => Some(error),
            Self::Key { .. } | Self::Kind(_) | Self::Family { .. } | Self::UnknownKey { .. } => None,
        }
    }
}

/// An output of an encoder's graph; its name is in brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// The last hidden state of every token (`hidden`: (T, D)).
    Hidden,
    /// The mean of the last hidden states of a sequence (`mean`: (S, D)): over residues for ESM-2, over all
    /// tokens for other models.
    Mean,
    /// The last hidden state of the first token of every sequence (`cls`: (S, D)). The graph has an additional
    /// input `rows`: i32 (S), the positions of these tokens.
    Cls,
    /// The last hidden state of the last token of every sequence (`last`: (S, D)). The graph has an additional input
    /// `lasts`: i32 (S), the positions of these tokens.
    Last,
    /// Logits of every token (`logits`: (T, V)): those of the masked language model for ESM-2, of the next token for
    /// decoders; other models have none.
    Logits,
    /// [`Output::Hidden`] of a layer (`hidden.3`: (T, D)). Layers are numbered as `hidden_states` in
    /// transformers: 0 is the input of the first block, i is the output of block i, and the last is the last
    /// hidden state, which in ESM-2 is after the final layer norm. Layers that the model does not have are
    /// ignored.
    HiddenOf(u32),
    /// [`Output::Mean`] of a layer (`mean.3`: (S, D)).
    MeanOf(u32),
    /// [`Output::Cls`] of a layer (`cls.3`: (S, D)).
    ClsOf(u32),
    /// [`Output::Last`] of a layer (`last.3`: (S, D)).
    LastOf(u32),
}

impl Output {
    /// Name of the graph's output.
    pub fn name(self) -> String {
        match self {
            Self::Hidden => "hidden".to_owned(),
            Self::Mean => "mean".to_owned(),
            Self::Cls => "cls".to_owned(),
            Self::Last => "last".to_owned(),
            Self::Logits => "logits".to_owned(),
            Self::HiddenOf(layer) => format!("hidden.{layer}"),
            Self::MeanOf(layer) => format!("mean.{layer}"),
            Self::ClsOf(layer) => format!("cls.{layer}"),
            Self::LastOf(layer) => format!("last.{layer}"),
        }
    }
}

/// Configuration of a supported encoder.
#[derive(Clone, Debug, PartialEq)]
pub enum Encoder {
    /// ESM-2, for proteins.
    Esm2(Esm2Config),
    /// DNABERT-S and DNABERT-2, for nucleotide sequences.
    DnabertS(DnabertConfig),
}

impl Encoder {
    /// Reads a config.json.
    ///
    /// # Errors
    /// As [`ModelConfig::from_json`]; a model of another family.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        match ModelConfig::from_json(text)? {
            ModelConfig::Encoder(encoder) => Ok(encoder),
            other => {
                Err(ConfigError::Family { found: other.family(), wanted: "an encoder (ESM-2 or DNABERT-S)" })
            }
        }
    }

    /// Builds the inference graph for steps within `bounds`. Inputs: `ids`: i32 (T), `spans`: i32 (S, 2).
    pub fn graph(&self, bounds: Bounds, outputs: &[Output]) -> Result<Graph, VerifyError> {
        match self {
            Self::Esm2(config) => esm2(config, bounds, outputs),
            Self::DnabertS(config) => dnabert_s(config, bounds, outputs),
        }
    }

    /// Hidden size D.
    pub fn hidden_size(&self) -> u64 {
        match self {
            Self::Esm2(c) => c.hidden_size,
            Self::DnabertS(c) => c.hidden_size,
        }
    }

    /// Returns the configuration with another number of layers.
    pub fn with_layers(self, layers: u64) -> Self {
        match self {
            Self::Esm2(c) => Self::Esm2(Esm2Config { layers, ..c }),
            Self::DnabertS(c) => Self::DnabertS(DnabertConfig { layers, ..c }),
        }
    }

    /// Number of transformer layers L; [`Output::HiddenOf`] numbers the hidden states from 0 to L.
    pub fn layers(&self) -> u64 {
        match self {
            Self::Esm2(c) => c.layers,
            Self::DnabertS(c) => c.layers,
        }
    }

    /// Vocabulary size V: rows of the embedding table.
    pub fn vocab_size(&self) -> u64 {
        match self {
            Self::Esm2(c) => c.vocab_size,
            Self::DnabertS(c) => c.vocab_size,
        }
    }

    /// Name of the model family.
    pub fn family(&self) -> &'static str {
        match self {
            Self::Esm2(_) => "ESM-2",
            Self::DnabertS(_) => "DNABERT-S",
        }
    }
}

/// JSON number with the shortest decimal that rounds to this f32: `1e-5`, not `9.999999747378752e-6`.
pub(crate) fn decimal(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, |x| json!(x))
}

/// Text of a file for messages: at most 80 characters, with control characters replaced.
pub(crate) fn shown(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Whether a class belongs to DNABERT's remote code; transformers names such classes `repository--module.class` or
/// `module.class`.
fn is_dnabert_class(class: &Value) -> bool {
    let module = class.as_str().and_then(|c| c.rsplit("--").next()).and_then(|c| c.split('.').next());
    matches!(module, Some("bert_layers" | "configuration_bert"))
}

/// Keys of a configuration. Its readers return errors that name the key.
pub(crate) struct ConfigKeys<'a>(pub(crate) &'a Map<String, Value>);

impl ConfigKeys<'_> {
    /// Whether a configuration of model_type `bert` describes DNABERT-S or DNABERT-2, and not a BERT with position
    /// embeddings. `alibi_starting_size` is optional: DNABERT's own configuration class has a default for it, and
    /// ALiBi's slopes do not depend on it.
    pub(crate) fn is_dnabert(&self) -> bool {
        let auto_map = self.0.get("auto_map").and_then(Value::as_object);
        self.0.contains_key("alibi_starting_size")
            || auto_map.is_some_and(|map| map.values().any(is_dnabert_class))
            || self.0.get("vocab_size").and_then(Value::as_u64) == Some(4096)
    }

    /// `Err` unless every layer of a decoder attends causally to whole sequences, by the code of its architecture.
    pub(crate) fn plain_attention(&self) -> Result<(), ConfigError> {
        self.must_be("is_causal", true)?;
        self.must_be("use_bidirectional_attention", false)?;
        let layers = self.0.get("layer_types").filter(|value| !value.is_null());
        if let Some(kinds) = layers {
            let kinds = kinds.as_array();
            if !kinds.is_some_and(|kinds| kinds.iter().all(|kind| kind == "full_attention")) {
                return Err(self.bad("layer_types", "`full_attention` for every layer, or left out"));
            }
        }
        let auto_map = self.0.get("auto_map").and_then(Value::as_object);
        if auto_map.is_some_and(|map| map.keys().any(|class| class.starts_with("AutoModel"))) {
            let wanted = "without a class of its own for AutoModel: such code may compute something else";
            return Err(self.bad("auto_map", wanted));
        }
        Ok(())
    }

    /// The error for a value that is not supported.
    pub(crate) fn bad(&self, key: &'static str, wanted: impl Into<String>) -> ConfigError {
        let found = self.0.get(key).map_or("nothing".to_owned(), |value| shown(&value.to_string()));
        ConfigError::Key { key, wanted: wanted.into(), found }
    }

    /// A required size between 1 and 2^24; no model of the supported families has a larger one.
    pub(crate) fn size(&self, key: &'static str) -> Result<u64, ConfigError> {
        let found = self.0.get(key).and_then(Value::as_u64).filter(|n| (1..=1 << 24).contains(n));
        found.ok_or_else(|| self.bad(key, "a whole number between 1 and 16777216"))
    }

    /// An optional size.
    pub(crate) fn or(&self, key: &'static str, default: u64) -> Result<u64, ConfigError> {
        if self.has(key) { self.size(key) } else { Ok(default) }
    }

    /// Whether the key exists and is not null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.get(key).is_some_and(|v| !v.is_null())
    }

    /// An optional finite number that is not negative.
    pub(crate) fn number(&self, key: &'static str, default: f32) -> Result<f32, ConfigError> {
        if !self.has(key) {
            return Ok(default);
        }
        let found = self.0.get(key).and_then(Value::as_f64).map(|x| x as f32);
        found.filter(|x| x.is_finite() && *x >= 0.0).ok_or_else(|| self.bad(key, "a number from 0 on"))
    }

    /// An optional finite number greater than 0, not so small that its reciprocal is infinite in f32.
    pub(crate) fn above_zero(&self, key: &'static str, default: f32) -> Result<f32, ConfigError> {
        let found = self.number(key, default)?;
        if found.is_normal() { Ok(found) } else { Err(self.bad(key, "a number above 0")) }
    }

    /// An optional number of things: a whole number up to 2^24, 0 if the key is missing.
    pub(crate) fn count(&self, key: &'static str) -> Result<u64, ConfigError> {
        if self.has(key) && self.0.get(key).and_then(Value::as_u64) != Some(0) {
            let size = self.size(key);
            return size.map_err(|_| self.bad(key, "a whole number between 0 and 16777216"));
        }
        Ok(0)
    }

    /// Index of the value among `known`; 0 if the key is missing.
    pub(crate) fn choice(&self, key: &'static str, known: [&str; 2]) -> Result<usize, ConfigError> {
        self.one_of(key, &[None, Some(known[0]), Some(known[1])])?;
        Ok(usize::from(self.0.get(key).and_then(Value::as_str) == Some(known[1])))
    }

    /// A required token id below `vocab_size`.
    pub(crate) fn id(&self, key: &'static str, vocab_size: u64) -> Result<u64, ConfigError> {
        let id = self.0.get(key).and_then(Value::as_u64).filter(|&id| id < vocab_size);
        id.ok_or_else(|| self.bad(key, format!("a whole number below vocab_size {vocab_size}")))
    }

    /// Number of layers, between 1 and 1024, because the graph contains the nodes of every layer.
    pub(crate) fn layers(&self) -> Result<u64, ConfigError> {
        let key = "num_hidden_layers";
        let layers = self.size(key)?;
        if layers <= 1024 { Ok(layers) } else { Err(self.bad(key, "a whole number between 1 and 1024")) }
    }

    /// Epsilon of a norm: greater than 0 and less than 1 after rounding to f32.
    pub(crate) fn eps(&self, key: &'static str, default: f32) -> Result<f32, ConfigError> {
        let Some(value) = self.0.get(key) else { return Ok(default) };
        let eps = value.as_f64().map(|eps| eps as f32).filter(|&eps| eps > 0.0 && eps < 1.0);
        eps.ok_or_else(|| self.bad(key, "a number between 0 and 1"))
    }

    /// An optional boolean.
    pub(crate) fn flag(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| self.bad(key, "true or false")),
        }
    }

    /// `Err` unless the value is one of `known`, in which `None` stands for a missing key.
    pub(crate) fn one_of(&self, key: &'static str, known: &[Option<&str>]) -> Result<(), ConfigError> {
        let value = self.0.get(key).filter(|v| !v.is_null());
        let ok = match value {
            None => known.contains(&None),
            Some(v) => v.as_str().is_some_and(|s| known.contains(&Some(s))),
        };
        let names: Vec<&str> = known.iter().flatten().copied().collect();
        if ok { Ok(()) } else { Err(self.bad(key, format!("`{}`", names.join("` or `")))) }
    }

    /// Number of heads: at most 128, and the head dimension must be even and at most [`WIDEST_HEAD`].
    pub(crate) fn heads(&self, hidden_size: u64) -> Result<u64, ConfigError> {
        let heads = self.size("num_attention_heads")?;
        let dim = hidden_size / heads;
        let fits =
            hidden_size.is_multiple_of(heads) && dim.is_multiple_of(2) && dim <= WIDEST_HEAD && heads <= 128;
        if fits {
            return Ok(heads);
        }
        let wanted = format!(
            "at most 128 heads that divide hidden_size {hidden_size} into even parts of at most {WIDEST_HEAD}"
        );
        Err(self.bad("num_attention_heads", wanted))
    }

    /// `Err` if there is a key that is not one of `known`.
    pub(crate) fn only(&self, known: &[&str]) -> Result<(), ConfigError> {
        match self.0.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => Err(ConfigError::UnknownKey { key: shown(key), known: known.join(", ") }),
        }
    }

    /// `Err` unless the boolean is `wanted` or missing.
    pub(crate) fn must_be(&self, key: &'static str, wanted: bool) -> Result<(), ConfigError> {
        if self.flag(key, wanted)? == wanted { Ok(()) } else { Err(self.bad(key, wanted.to_string())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration of model_type `bert` with `more` keys.
    fn bert(vocab_size: u64, more: Value) -> Result<Encoder, ConfigError> {
        let mut config = json!({
            "model_type": "bert",
            "vocab_size": vocab_size,
            "type_vocab_size": 2,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "max_position_embeddings": 512,
        });
        let keys = config.as_object_mut().expect("an object");
        keys.extend(more.as_object().expect("an object").clone());
        Encoder::from_json(&config.to_string())
    }

    #[test]
    fn dnabert_s_needs_no_alibi_starting_size() {
        let known = crate::known("zhihan1996/DNABERT-S").expect("known");
        let auto_map = |class: &str| json!({"auto_map": {"AutoModel": class}});
        for (vocab_size, more) in [
            (4096, json!({})),
            (4096, json!({"alibi_starting_size": null})),
            (4096, json!({"alibi_starting_size": 512})),
            (4096, auto_map("bert_layers.BertModel")),
            (4096, auto_map("zhihan1996/DNABERT-2-117M--bert_layers.BertModel")),
        ] {
            assert_eq!(bert(vocab_size, more.clone()).ok().as_ref(), Some(&known), "{more}");
        }
        assert!(bert(5000, auto_map("configuration_bert.BertConfig")).is_ok());
        // BERT with learned position embeddings is not supported.
        for more in [json!({}), auto_map("other.BertModel")] {
            assert!(matches!(bert(30_522, more.clone()), Err(ConfigError::Kind(_))), "{more}");
        }
    }
}
