//! Opens the models that compute hidden states: encoders, and decoders as `plimsoll train` writes them or as the Hugging
//! Face Hub has them. Invariant: as for encoders, every tensor that a graph reads was found with the expected shape
//! before the first byte is allocated.

use crate::hub::{self, CONFIG, Need, TOKENIZER};
use crate::model::{VOCABULARY, check_vocabulary, pieces, read_pieces, sha256, weights_of};
use crate::session::WeightSource;
use crate::{EncoderModel, ModelError, Observer, RuntimeError, Tokenizer, adapter};
use plimsoll_data::bounded;
use plimsoll_data::tokenize::bpe;
use plimsoll_data::train::{IdWidth, TokenizerKind, Vocabulary};
use plimsoll_data::weights::{HubEnv, ModelPath, Weights};
use plimsoll_exec::ParamSource;
use plimsoll_graph::{Bounds, Graph, Param};
use plimsoll_models::{DecoderConfig, Output, SequenceModel};
use std::ops::{Range, RangeInclusive};
use std::path::Path;
use std::sync::Arc;

/// A model that computes hidden states, with its weights.
pub enum OpenedModel {
    /// An encoder.
    Encoder(EncoderModel),
    /// A decoder language model.
    Decoder(DecoderModel),
}

/// What a run needs of an opened model: its architecture, its tokenizer and its weights.
#[derive(Clone)]
pub struct ModelParts<'a> {
    /// The architecture, which builds the graph.
    pub architecture: SequenceModel,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The weights.
    pub weights: &'a dyn WeightSource,
}

impl<'a> From<&'a EncoderModel> for ModelParts<'a> {
    fn from(model: &'a EncoderModel) -> Self {
        Self {
            architecture: SequenceModel::Encoder(model.encoder.clone()),
            tokenizer: &model.tokenizer,
            weights: model,
        }
    }
}

impl<'a> From<&'a DecoderModel> for ModelParts<'a> {
    fn from(model: &'a DecoderModel) -> Self {
        Self {
            architecture: SequenceModel::Decoder(model.config.clone()),
            tokenizer: &model.tokenizer,
            weights: model,
        }
    }
}

/// A decoder with its weights.
pub struct DecoderModel {
    /// The name under which the model was requested: a path or a hub id.
    pub name: String,
    /// The architecture, which builds the graph.
    pub config: DecoderConfig,
    /// The weights, shared with executors that stream them.
    pub weights: Arc<Weights>,
    /// The tokenizer, which adds no start and end tokens.
    pub tokenizer: Tokenizer,
    /// The files other than the weights that results depend on: name and SHA-256 in hexadecimal.
    pub described_by: Vec<(&'static str, String)>,
}

impl OpenedModel {
    /// Opens a model folder, a weight file, or a hub model; files missing from the cache are downloaded.
    ///
    /// # Errors
    /// A model that is neither an encoder nor a decoder; files that cannot be read; tensors that are missing or have other
    /// shapes; a decoder without a tokenizer.
    pub fn open(name: &str, env: &HubEnv, observer: &mut dyn Observer) -> Result<Self, RuntimeError> {
        let place = hub::sequence_model(name, Need::Model, env, observer)?;
        adapter::refuse(place.config().parent().unwrap_or(Path::new(".")))?;
        let (config, text) = hub::config_text(&place)?;
        let model = SequenceModel::from_json(&text)
            .map_err(|source| RuntimeError::Config { path: config.clone(), source })?;
        match model {
            SequenceModel::Encoder(encoder) => {
                EncoderModel::at(name, &place, &config, &text, encoder).map(Self::Encoder)
            }
            SequenceModel::Decoder(decoder) => {
                DecoderModel::at(name, &place, &config, &text, decoder).map(Self::Decoder)
            }
        }
    }

    /// The parts of the model that a run needs.
    pub fn parts(&self) -> ModelParts<'_> {
        match self {
            Self::Encoder(model) => model.into(),
            Self::Decoder(model) => model.into(),
        }
    }
}

impl DecoderModel {
    /// Opens the files of a model whose configuration, with the text `text` of the file `config`, was read.
    fn at(
        name: &str,
        place: &ModelPath,
        config: &Path,
        text: &str,
        decoder: DecoderConfig,
    ) -> Result<Self, RuntimeError> {
        let weights = weights_of(name, place)?;
        let mut described_by = vec![(CONFIG, sha256(text.as_bytes()))];
        let folder = config.parent().unwrap_or(Path::new("."));
        let tokenizer = tokenizer(name, folder, decoder.vocab_size, &mut described_by)?;
        tokenizer.fits(name, decoder.vocab_size)?;
        // Shapes of parameters do not depend on the bounds. The output projection is checked although embeddings do not
        // read it, because a file without it is no whole model.
        let bounds = Bounds { tokens: 4, sequences: 1, longest: 4 };
        let graph = decoder.graph(bounds, &[Output::Mean, Output::Logits])?;
        for piece in pieces(&graph) {
            if weights.get(&piece.tensor).is_some() || decoder.derived(&piece.tensor).is_none() {
                weights.expect(&piece.tensor, &piece.shape)?;
            }
        }
        let (name, weights) = (name.to_owned(), Arc::new(weights));
        Ok(Self { name, config: decoder, weights, tokenizer, described_by })
    }
}

impl WeightSource for DecoderModel {
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        read(&self.config, &self.weights, param, range, out)
    }

    fn stream(&self, _: &Graph) -> Option<ParamSource> {
        let (config, weights) = (self.config.clone(), self.weights.clone());
        Some(Box::new(move |param, elements, out| Ok(read(&config, &weights, param, elements, out)?)))
    }
}

/// Reads a range of the elements of a parameter: from the file, or computed where the file does not have the tensor.
fn read(
    config: &DecoderConfig,
    weights: &Weights,
    param: &Param,
    range: Range<u64>,
    out: &mut [f32],
) -> Result<(), RuntimeError> {
    read_pieces(param, range, out, &mut |piece, range, out| {
        let is_stored = weights.get(&piece.tensor).is_some();
        match config.derived(&piece.tensor).filter(|_| !is_stored) {
            Some(values) => out.copy_from_slice(&values[range.start as usize..range.end as usize]),
            None => weights.read_f32(&piece.tensor, range, out)?,
        }
        Ok(())
    })
}

/// Rows of the embedding of a model of bytes: 256, one more for the end of a document, and rows that pad the table.
const BYTES: RangeInclusive<u64> = 256..=512;

/// The tokenizer in the folder of a language model: tokenizer.json, the alphabet of ESM-2, or bytes for a model with as
/// many tokens.
fn tokenizer(
    name: &str,
    folder: &Path,
    rows: u64,
    described_by: &mut Vec<(&'static str, String)>,
) -> Result<Tokenizer, RuntimeError> {
    let file = folder.join(TOKENIZER);
    let kind = if file.is_file() {
        let bytes = bounded::read(&file, bpe::LARGEST).map_err(RuntimeError::io(&file))?;
        described_by.push((TOKENIZER, sha256(&bytes)));
        TokenizerKind::BytePairs { file, end: None }
    } else if folder.join(VOCABULARY).is_file() {
        check_vocabulary(folder)?;
        TokenizerKind::Esm
    } else if BYTES.contains(&rows) {
        TokenizerKind::Bytes { end: false }
    } else {
        return Err(ModelError::NoTokenizer { name: name.to_owned(), rows }.into());
    };
    Ok(match kind {
        TokenizerKind::Esm => Tokenizer::Esm,
        // The width is that of stored ids, which this kind does not have.
        kind => Tokenizer::Text(Arc::new(Vocabulary::of(&kind, IdWidth::U16)?)),
    })
}
