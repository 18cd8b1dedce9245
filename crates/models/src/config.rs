//! Reads the hub's config.json. Invariant: a key that would change what is computed is either honoured or
//! refused by name.

use crate::{DnabertConfig, Esm2Config, dnabert_s, esm2};
use graph::{Bounds, Graph, VerifyError};
use serde_json::{Map, Value, json};
use std::fmt;

/// A config.json that this house cannot run.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not JSON.
    Json(serde_json::Error),
    /// A key is missing or has the wrong type.
    Key {
        /// The key.
        key: &'static str,
        /// What it must be.
        wanted: String,
        /// What is there.
        found: String,
    },
    /// The model is of a kind that is not known here.
    Kind(String),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(_) => write!(f, "the configuration is not JSON"),
            Self::Key { key, wanted, found } => write!(f, "`{key}` must be {wanted}, found {found}"),
            Self::Kind(found) => write!(
                f,
                "model_type {found} is not known; known are `esm` (ESM-2) and `bert` of DNABERT-S (with \
                 `alibi_starting_size`, with DNABERT's code in `auto_map`, or with its vocabulary of 4096 tokens)"
            ),
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Json(error) => Some(error),
            Self::Key { .. } | Self::Kind(_) => None,
        }
    }
}

/// What a graph is asked for; the name of the output is in brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// The last hidden state of every token (`hidden`: (T, D)).
    Hidden,
    /// The embedding of a sequence as its family defines it (`mean`: (S, D)): over residues for ESM-2, over
    /// all tokens for DNABERT-S.
    Mean,
    /// The hidden state of the first token of every sequence (`cls`: (S, D)); the graph takes the rows of
    /// these tokens as input `rows`: i32 (S).
    Cls,
    /// Masked-language-model logits of every token (`logits`: (T, V)); ESM-2 only.
    Logits,
    /// [`Output::Hidden`] of a layer (`hidden.3`: (T, D)). Layers count as transformers' `hidden_states`
    /// do: 0 is what the embedding gives to the first block, i is what block i gives to the next, and the
    /// last is the last hidden state itself, which in ESM-2 is behind the final layer norm. A graph has
    /// no output for a layer that its model has not.
    HiddenOf(u32),
    /// [`Output::Mean`] of a layer (`mean.3`: (S, D)).
    MeanOf(u32),
    /// [`Output::Cls`] of a layer (`cls.3`: (S, D)).
    ClsOf(u32),
}

impl Output {
    /// The name of the output.
    pub fn name(self) -> String {
        match self {
            Self::Hidden => "hidden".to_owned(),
            Self::Mean => "mean".to_owned(),
            Self::Cls => "cls".to_owned(),
            Self::Logits => "logits".to_owned(),
            Self::HiddenOf(layer) => format!("hidden.{layer}"),
            Self::MeanOf(layer) => format!("mean.{layer}"),
            Self::ClsOf(layer) => format!("cls.{layer}"),
        }
    }
}

/// An encoder of sequences.
#[derive(Clone, Debug, PartialEq)]
pub enum Encoder {
    /// ESM-2: proteins.
    Esm2(Esm2Config),
    /// DNABERT-S: nucleotides.
    DnabertS(DnabertConfig),
}

impl Encoder {
    /// Reads a config.json.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_str(text).map_err(ConfigError::Json)?;
        let empty = Map::new();
        let keys = Keys(value.as_object().unwrap_or(&empty));
        match keys.0.get("model_type").and_then(Value::as_str) {
            Some("esm") => Ok(Self::Esm2(Esm2Config::from_keys(&keys)?)),
            Some("bert") if keys.is_dnabert() => Ok(Self::DnabertS(DnabertConfig::from_keys(&keys)?)),
            other => Err(ConfigError::Kind(other.map_or("(none)".to_owned(), |k| format!("`{}`", shown(k))))),
        }
    }

    /// The graph for at most `bounds`. Inputs: `ids`: i32 (T), `spans`: i32 (S, 2).
    pub fn graph(&self, bounds: Bounds, outputs: &[Output]) -> Result<Graph, VerifyError> {
        match self {
            Self::Esm2(config) => esm2(config, bounds, outputs),
            Self::DnabertS(config) => dnabert_s(config, bounds, outputs),
        }
    }

    /// D: columns of hidden states and embeddings.
    pub fn hidden_size(&self) -> u64 {
        match self {
            Self::Esm2(c) => c.hidden_size,
            Self::DnabertS(c) => c.hidden_size,
        }
    }

    /// The same with another number of blocks.
    pub fn with_layers(self, layers: u64) -> Self {
        match self {
            Self::Esm2(c) => Self::Esm2(Esm2Config { layers, ..c }),
            Self::DnabertS(c) => Self::DnabertS(DnabertConfig { layers, ..c }),
        }
    }

    /// Blocks. Hidden states are one more: [`Output::HiddenOf`] counts them.
    pub fn layers(&self) -> u64 {
        match self {
            Self::Esm2(c) => c.layers,
            Self::DnabertS(c) => c.layers,
        }
    }

    /// Rows of the embedding table.
    pub fn vocab_size(&self) -> u64 {
        match self {
            Self::Esm2(c) => c.vocab_size,
            Self::DnabertS(c) => c.vocab_size,
        }
    }

    /// The family's name.
    pub fn family(&self) -> &'static str {
        match self {
            Self::Esm2(_) => "ESM-2",
            Self::DnabertS(_) => "DNABERT-S",
        }
    }
}

/// The shortest decimal that is this f32: `1e-5`, not `9.999999747378752e-6`.
pub(crate) fn decimal(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, |x| json!(x))
}

/// A text of the file in a message: printable, and not longer than a line.
fn shown(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The keys of a configuration, read with errors that name them.
pub(crate) struct Keys<'a>(pub(crate) &'a Map<String, Value>);

impl Keys<'_> {
    /// Whether a configuration of model_type `bert` describes DNABERT-S or DNABERT-2, and not a BERT with position
    /// embeddings. `alibi_starting_size` is optional: DNABERT's own configuration class has a default for it, and
    /// ALiBi's slopes do not depend on it.
    fn is_dnabert(&self) -> bool {
        // The classes of DNABERT's remote code, which transformers names `repository--module.class` or `module.class`.
        let is_own_code = |class: &Value| {
            let module = class.as_str().and_then(|c| c.rsplit("--").next()).and_then(|c| c.split('.').next());
            matches!(module, Some("bert_layers" | "configuration_bert"))
        };
        let auto_map = self.0.get("auto_map").and_then(Value::as_object);
        self.0.contains_key("alibi_starting_size")
            || auto_map.is_some_and(|map| map.values().any(is_own_code))
            || self.0.get("vocab_size").and_then(Value::as_u64) == Some(4096)
    }

    pub(crate) fn bad(&self, key: &'static str, wanted: impl Into<String>) -> ConfigError {
        let found = self.0.get(key).map_or("nothing".to_owned(), |value| shown(&value.to_string()));
        ConfigError::Key { key, wanted: wanted.into(), found }
    }

    /// A size between 1 and 2^24: beyond that no model of these families lies.
    pub(crate) fn size(&self, key: &'static str) -> Result<u64, ConfigError> {
        let fits = |n: &u64| (1..=1 << 24).contains(n);
        let found = self.0.get(key).and_then(Value::as_u64).filter(fits);
        found.ok_or_else(|| self.bad(key, "a whole number between 1 and 16777216"))
    }

    /// A size that may be left out.
    pub(crate) fn or(&self, key: &'static str, default: u64) -> Result<u64, ConfigError> {
        if self.has(key) { self.size(key) } else { Ok(default) }
    }

    /// Whether the key is there and not null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.get(key).is_some_and(|v| !v.is_null())
    }

    /// A key that must not be there: what it asks for is not implemented.
    pub(crate) fn absent(&self, key: &'static str) -> Result<(), ConfigError> {
        if self.has(key) { Err(self.bad(key, "left out")) } else { Ok(()) }
    }

    /// A number from 0 on.
    pub(crate) fn number(&self, key: &'static str, default: f32) -> Result<f32, ConfigError> {
        if !self.has(key) {
            return Ok(default);
        }
        let found = self.0.get(key).and_then(Value::as_f64).map(|x| x as f32);
        found.filter(|x| x.is_finite() && *x >= 0.0).ok_or_else(|| self.bad(key, "a number from 0 on"))
    }

    /// Which of two texts; the first one where the key is missing.
    pub(crate) fn choice(&self, key: &'static str, known: [&str; 2]) -> Result<usize, ConfigError> {
        self.one_of(key, &[None, Some(known[0]), Some(known[1])])?;
        Ok(usize::from(self.0.get(key).and_then(Value::as_str) == Some(known[1])))
    }

    /// A token of a vocabulary.
    pub(crate) fn id(&self, key: &'static str, vocab_size: u64) -> Result<u64, ConfigError> {
        let id = self.0.get(key).and_then(Value::as_u64).filter(|&id| id < vocab_size);
        id.ok_or_else(|| self.bad(key, format!("a whole number below vocab_size {vocab_size}")))
    }

    /// Layers between 1 and 1024: a graph holds every one of them.
    pub(crate) fn layers(&self) -> Result<u64, ConfigError> {
        let key = "num_hidden_layers";
        let layers = self.size(key)?;
        if layers <= 1024 { Ok(layers) } else { Err(self.bad(key, "a whole number between 1 and 1024")) }
    }

    /// What is added to a variance: more than 0 and less than 1, in f32 too.
    pub(crate) fn eps(&self, key: &'static str, default: f32) -> Result<f32, ConfigError> {
        let Some(value) = self.0.get(key) else { return Ok(default) };
        let eps = value.as_f64().map(|eps| eps as f32).filter(|&eps| eps > 0.0 && eps < 1.0);
        eps.ok_or_else(|| self.bad(key, "a number between 0 and 1"))
    }

    /// A switch with a default.
    pub(crate) fn flag(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| self.bad(key, "true or false")),
        }
    }

    /// A text that must be one of those that are implemented; `None` stands for a missing key.
    pub(crate) fn one_of(&self, key: &'static str, known: &[Option<&str>]) -> Result<(), ConfigError> {
        let value = self.0.get(key).filter(|v| !v.is_null());
        let ok = match value {
            None => known.contains(&None),
            Some(v) => v.as_str().is_some_and(|s| known.contains(&Some(s))),
        };
        let names: Vec<&str> = known.iter().flatten().copied().collect();
        if ok { Ok(()) } else { Err(self.bad(key, format!("`{}`", names.join("` or `")))) }
    }

    /// Heads that divide the width into even parts of at most 128.
    pub(crate) fn heads(&self, hidden_size: u64) -> Result<u64, ConfigError> {
        let heads = self.size("num_attention_heads")?;
        let dim = hidden_size / heads;
        let fits = hidden_size.is_multiple_of(heads) && dim.is_multiple_of(2) && dim <= 128 && heads <= 128;
        if fits {
            return Ok(heads);
        }
        let wanted =
            format!("at most 128 heads that divide hidden_size {hidden_size} into even parts of at most 128");
        Err(self.bad("num_attention_heads", wanted))
    }

    /// A switch that only has one implemented position.
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
        // BERT with position embeddings is another model.
        for more in [json!({}), auto_map("other.BertModel")] {
            assert!(matches!(bert(30_522, more.clone()), Err(ConfigError::Kind(_))), "{more}");
        }
    }
}
