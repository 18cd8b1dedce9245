//! Opens the models that compute hidden states: encoders, and decoders as `plimsoll train` writes them or as the Hugging
//! Face Hub has them. Invariant: as for encoders, every tensor that a graph reads was found with the expected shape
//! before the first byte is allocated.

use super::hub::{self, CONFIG, Need, TOKENIZER};
use super::tensors::{TensorSource, check_twin, pieces, read_pieces, weights_of};
use super::{EncoderModel, Tokenizer, VOCABULARY, adapter, check_vocabulary, leftovers, sha256};
use crate::session::{SessionModel, WeightSource};
use crate::{ModelError, Observer, RuntimeError, Silent};
use plimsoll_data::bounded;
use plimsoll_data::tokenize::bpe;
use plimsoll_data::train::{IdWidth, TokenizerKind, Vocabulary};
use plimsoll_data::weights::{HubEnv, ModelPath, Weights};
use plimsoll_graph::{Bounds, Param};
use plimsoll_models::{DecoderConfig, Output, SequenceModel, decoder_candidates, reads_bytes};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model that computes hidden states, with its weights.
pub enum Model {
    /// An encoder.
    Encoder(EncoderModel),
    /// A decoder language model.
    Decoder(DecoderModel),
}

/// A decoder with its weights.
pub struct DecoderModel {
    /// The name under which the model was requested: a path or a hub id.
    pub name: String,
    /// The architecture, which builds the graph.
    pub config: DecoderConfig,
    /// The weights, shared with the thread that computes their digests.
    pub weights: Arc<Weights>,
    /// The tokenizer, with the tokens that it puts before and after a text.
    pub tokenizer: Tokenizer,
    /// The files other than the weights that results depend on: name and SHA-256 in hexadecimal.
    pub described_by: Vec<(&'static str, String)>,
}

impl Model {
    /// Opens a model folder, a weight file, or a hub model; files missing from the cache are downloaded.
    ///
    /// # Errors
    /// A model that is neither an encoder nor a decoder; files that cannot be read; tensors that are missing or have other
    /// shapes; a decoder without a tokenizer.
    pub fn open(name: &str) -> Result<Self, RuntimeError> {
        Self::open_with(name, &HubEnv::from_process(), &mut Silent)
    }

    /// As [`Model::open`], with the folders and addresses of the hub in `env`; messages and the progress of downloads go to
    /// `observer`.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_with(name: &str, env: &HubEnv, observer: &mut dyn Observer) -> Result<Self, RuntimeError> {
        let place = hub::sequence_model(name, Need::Model, env, observer)?;
        adapter::refuse(place.config().parent().unwrap_or(Path::new(".")))?;
        let (config, text) = hub::config_text(&place)?;
        let model = SequenceModel::from_json(&text)
            .map_err(|source| RuntimeError::Config { path: config.clone(), source })?;
        let opened = match model {
            SequenceModel::Encoder(encoder) => {
                EncoderModel::at(name, &place, &config, &text, encoder).map(Self::Encoder)?
            }
            SequenceModel::Decoder(decoder) => {
                DecoderModel::at(name, &place, &config, &text, decoder).map(Self::Decoder)?
            }
        };
        leftovers::note(name, &opened.architecture(), opened.weight_file(), observer)?;
        Ok(opened)
    }

    /// The tensors of the model's files.
    pub fn weight_file(&self) -> &Arc<Weights> {
        match self {
            Self::Encoder(model) => &model.weights,
            Self::Decoder(model) => &model.weights,
        }
    }

    /// The files other than the weights that results depend on: name and SHA-256 in hexadecimal.
    pub fn described_by(&self) -> &[(&'static str, String)] {
        match self {
            Self::Encoder(model) => &model.described_by,
            Self::Decoder(model) => &model.described_by,
        }
    }

    /// The encoder or the decoder.
    fn inner(&self) -> &dyn SessionModel {
        match self {
            Self::Encoder(model) => model,
            Self::Decoder(model) => model,
        }
    }
}

impl SessionModel for Model {
    fn architecture(&self) -> SequenceModel {
        self.inner().architecture()
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.inner().tokenizer()
    }

    fn weights(&self) -> &dyn WeightSource {
        self.inner().weights()
    }
}

impl SessionModel for DecoderModel {
    fn architecture(&self) -> SequenceModel {
        SequenceModel::Decoder(self.config.clone())
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn weights(&self) -> &dyn WeightSource {
        self
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
        let own_tokenizer = OwnTokenizer::find(name, folder, text)?;
        if own_tokenizer == OwnTokenizer::Bytes && decoder.vocab_size < 256 {
            return Err(ModelError::TooFewForBytes { name: name.to_owned(), rows: decoder.vocab_size }.into());
        }
        let tokenizer = own_tokenizer.open(&mut described_by)?;
        tokenizer.fits(name, decoder.vocab_size)?;
        check_decoder(name, &decoder, &weights)?;
        let name = name.to_owned();
        let weights = Arc::new(weights);
        Ok(Self { name, config: decoder, weights, tokenizer, described_by })
    }

    /// Whether the weights have the output projection. Those that `AutoModel` saved do not.
    pub fn has_head(&self) -> bool {
        self.config.tied || find_in_decoder(&self.weights, HEAD).is_some()
    }

    /// Source of the values of a tensor. `check_decoder` has made sure that every tensor has one.
    fn place(&self, tensor: &str) -> TensorSource {
        match self.config.derived(tensor) {
            Some(values) => TensorSource::Memory(values),
            None => {
                TensorSource::File(find_in_decoder(&self.weights, tensor).unwrap_or_else(|| tensor.to_owned()))
            }
        }
    }
}

/// The output projection of a decoder whose embedding is not tied to it.
const HEAD: &str = "lm_head.weight";
/// The embedding table of a decoder.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The name in a weight file of a decoder's tensor; `None` if the file does not have it.
pub fn find_in_decoder(weights: &Weights, tensor: &str) -> Option<String> {
    decoder_candidates(tensor).into_iter().find(|name| weights.get(name).is_some())
}

/// Checks that every tensor of the decoder's hidden states has the expected shape, and so has the output projection where
/// it is stored, which must be the embedding table if the configuration says so.
pub fn check_decoder(name: &str, decoder: &DecoderConfig, weights: &Weights) -> Result<(), RuntimeError> {
    // Shapes of parameters do not depend on the bounds.
    let bounds = Bounds { tokens: 4, sequences: 1, longest: 4, packs: 1 };
    let graph = decoder.graph(bounds, &[Output::Mean, Output::Logits])?;
    for piece in pieces(&graph).filter(|piece| decoder.derived(&piece.tensor).is_none()) {
        let found = find_in_decoder(weights, &piece.tensor);
        if found.is_some() || piece.tensor != HEAD {
            weights.expect(found.as_ref().unwrap_or(&piece.tensor), &piece.shape)?;
        }
    }
    let stored = [find_in_decoder(weights, HEAD), find_in_decoder(weights, EMBEDDING)];
    if let ([Some(head), Some(table)], true) = (stored, decoder.tied) {
        check_twin(name, weights, &head, &table)?;
    }
    Ok(())
}

impl WeightSource for DecoderModel {
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        read_pieces(param, range, out, &mut |piece, range, out| {
            self.place(&piece.tensor).read(&self.weights, range, out)
        })
    }
}

/// The tokenizer that belongs to a language model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnTokenizer {
    /// The tokens are the bytes of a text, as config.json states.
    Bytes,
    /// The alphabet of ESM-2, in the file vocab.txt.
    Esm(PathBuf),
    /// A tokenizer.json.
    File(PathBuf),
}

/// Files of tokenizers in formats that are not read.
const OTHER_FORMATS: [&str; 5] =
    ["tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "tiktoken.model"];

impl OwnTokenizer {
    /// The tokenizer of the language model in `folder`, whose config.json has the text `config`.
    ///
    /// # Errors
    /// [`ModelError::NoTokenizer`]; a vocab.txt that is not the alphabet of ESM-2.
    pub fn find(name: &str, folder: &Path, config: &str) -> Result<Self, RuntimeError> {
        if reads_bytes(config) {
            return Ok(Self::Bytes);
        }
        let file = folder.join(TOKENIZER);
        if file.is_file() {
            return Ok(Self::File(file));
        }
        let file = folder.join(VOCABULARY);
        if file.is_file() {
            check_vocabulary(folder)?;
            return Ok(Self::Esm(file));
        }
        let others: Vec<&str> =
            OTHER_FORMATS.into_iter().filter(|other| folder.join(other).is_file()).collect();
        let instead = if others.is_empty() { String::new() } else { format!(" (only {})", others.join(", ")) };
        Err(ModelError::NoTokenizer { name: name.to_owned(), instead }.into())
    }

    /// The file of the tokenizer; `None` for bytes.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Bytes => None,
            Self::Esm(file) | Self::File(file) => Some(file),
        }
    }

    /// Opens the tokenizer as the model's inputs are made: with the tokens that it puts before and after a text.
    fn open(&self, described_by: &mut Vec<(&'static str, String)>) -> Result<Tokenizer, RuntimeError> {
        let kind = match self {
            Self::Esm(_) => return Ok(Tokenizer::Esm),
            Self::Bytes => TokenizerKind::Bytes { end: false },
            Self::File(file) => {
                let bytes = bounded::read(file, bpe::LARGEST).map_err(RuntimeError::io(file))?;
                described_by.push((TOKENIZER, sha256(&bytes)));
                TokenizerKind::BytePairs { file: file.clone(), end: None }
            }
        };
        // The width is that of stored ids, which this kind does not have.
        let vocabulary = Vocabulary::of(&kind, IdWidth::U16)?;
        Ok(Tokenizer::Text(Arc::new(vocabulary.framed())))
    }
}
