//! Encoders and decoders behind one type, for the commands that compute hidden states. Invariant: the family of a model is
//! that of [`ModelConfig`].

use crate::names::decoder_candidates;
use crate::{ConfigError, DecoderConfig, Encoder, ModelConfig, Output, candidates, derived};
use plimsoll_graph::{Bounds, Graph, VerifyError};

/// A model that computes hidden states of sequences: an encoder or a decoder language model.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceModel {
    /// An encoder of biological sequences.
    Encoder(Encoder),
    /// A decoder language model.
    Decoder(DecoderConfig),
}

impl SequenceModel {
    /// Reads a config.json.
    ///
    /// # Errors
    /// As [`ModelConfig::from_json`]; a model of another family.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        match ModelConfig::from_json(text)? {
            ModelConfig::Encoder(encoder) => Ok(Self::Encoder(encoder)),
            ModelConfig::Decoder(decoder) => Ok(Self::Decoder(decoder)),
            other @ ModelConfig::Caller(_) => {
                Err(ConfigError::Family { found: other.family(), wanted: "an encoder or a decoder" })
            }
        }
    }

    /// Builds the inference graph for steps within `bounds`. Inputs: `ids`: i32 (T), `spans`: i32 (S, 2).
    pub fn graph(&self, bounds: Bounds, outputs: &[Output]) -> Result<Graph, VerifyError> {
        match self {
            Self::Encoder(encoder) => encoder.graph(bounds, outputs),
            Self::Decoder(c) => c.graph(bounds, outputs),
        }
    }

    /// Hidden size D.
    pub fn hidden_size(&self) -> u64 {
        match self {
            Self::Encoder(encoder) => encoder.hidden_size(),
            Self::Decoder(c) => c.hidden_size,
        }
    }

    /// Number of transformer layers L; [`Output::HiddenOf`] numbers the hidden states from 0 to L.
    pub fn layers(&self) -> u64 {
        match self {
            Self::Encoder(encoder) => encoder.layers(),
            Self::Decoder(c) => c.layers,
        }
    }

    /// Vocabulary size V: rows of the embedding table.
    pub fn vocab_size(&self) -> u64 {
        match self {
            Self::Encoder(encoder) => encoder.vocab_size(),
            Self::Decoder(c) => c.vocab_size,
        }
    }

    /// Name of the model family.
    pub fn family(&self) -> &'static str {
        match self {
            Self::Encoder(encoder) => encoder.family(),
            Self::Decoder(c) if c.experts.is_some() => "decoder with experts",
            Self::Decoder(_) => "decoder",
        }
    }

    /// The names that a tensor of the graph may have in a weight file, in the order in which they are tried.
    pub fn candidates(&self, tensor: &str) -> Vec<String> {
        match self {
            Self::Encoder(encoder) => candidates(encoder, tensor),
            Self::Decoder(_) => decoder_candidates(tensor),
        }
    }

    /// Computed value of a tensor that files may omit; `None` for other tensors.
    pub fn derived(&self, tensor: &str) -> Option<Vec<f32>> {
        match self {
            Self::Encoder(encoder) => derived(encoder, tensor),
            Self::Decoder(c) => c.derived(tensor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_type_decides_the_family() {
        let decoder = crate::moe("tiny").expect("known").to_json("{}", false);
        let read = SequenceModel::from_json(&decoder).expect("read");
        assert!(matches!(&read, SequenceModel::Decoder(c) if c.layers == 8), "{read:?}");
        assert_eq!((read.family(), read.hidden_size()), ("decoder with experts", 384));
        let error = SequenceModel::from_json(r#"{"model_type": "gpt2"}"#).expect_err("refused").to_string();
        for word in ["`gpt2`", "`esm`", "`llama`"] {
            assert!(error.contains(word), "{error}");
        }
    }
}
