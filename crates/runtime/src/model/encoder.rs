//! Opens encoders: configuration, weights and tokenizer under one name. Invariant: every tensor that a graph reads was
//! found with the expected shape before the first byte is allocated.

use super::hub::{self, CONFIG, Need, TOKENIZER};
use super::tensors::{TensorSource, check_twin, pieces, read_pieces, weights_of};
use super::{Tokenizer, adapter, bundle, check_vocabulary, leftovers, sha256};
use crate::session::{SessionModel, WeightSource};
use crate::{Observer, RuntimeError};
use plimsoll_data::bounded;
use plimsoll_data::tokenize::{bpe, bpe::Bpe};
use plimsoll_data::weights::{HubEnv, ModelPath, Weights};
use plimsoll_graph::{Bounds, Param};
use plimsoll_models::{Encoder, Output, SequenceModel, candidates, derived, tied_tensors};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An encoder with its weights.
pub struct EncoderModel {
    /// The name under which the model was requested: a path, a hub id, or the name of a built-in model.
    pub name: String,
    /// The architecture, which builds the graph.
    pub encoder: Encoder,
    /// The weights, shared with the thread that computes their digests.
    pub weights: Arc<Weights>,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The model's folder; `None` for a built-in model and for a checkpoint without a config.json.
    pub folder: Option<PathBuf>,
    /// The files other than the weights that results depend on: name and SHA-256 in hexadecimal.
    pub described_by: Vec<(&'static str, String)>,
}

impl SessionModel for EncoderModel {
    fn architecture(&self) -> SequenceModel {
        SequenceModel::Encoder(self.encoder.clone())
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn weights(&self) -> &dyn WeightSource {
        self
    }
}

impl EncoderModel {
    /// Opens a model folder, a weight file, or a hub model; files missing from the cache are downloaded.
    pub fn open(name: &str, env: &HubEnv, observer: &mut dyn Observer) -> Result<Self, RuntimeError> {
        let place = hub::local(name, Need::Model, env, observer)?;
        adapter::refuse(place.config().parent().unwrap_or(Path::new(".")))?;
        let (config, text) = hub::config_text(&place)?;
        let encoder = Encoder::from_json(&text)
            .map_err(|source| RuntimeError::Config { path: config.clone(), source })?;
        let model = Self::at(name, &place, &config, &text, encoder)?;
        leftovers::note(name, &SequenceModel::Encoder(model.encoder.clone()), &model.weights, observer)?;
        Ok(model)
    }

    /// Opens the files of a model whose configuration, with the text `text` of the file `config`, was read.
    pub(super) fn at(
        name: &str,
        place: &ModelPath,
        config: &Path,
        text: &str,
        encoder: Encoder,
    ) -> Result<Self, RuntimeError> {
        let weights = weights_of(name, place)?;
        let folder = config.parent().unwrap_or(Path::new("."));
        let mut described_by = vec![(CONFIG, sha256(text.as_bytes()))];
        let tokenizer = match &encoder {
            Encoder::Esm2(_) => {
                check_vocabulary(folder)?;
                Tokenizer::Esm
            }
            Encoder::DnabertS(_) => {
                let path = folder.join(TOKENIZER);
                let bytes = bounded::read(&path, bpe::LARGEST).map_err(RuntimeError::io(&path))?;
                described_by.push((TOKENIZER, sha256(&bytes)));
                Tokenizer::Bpe(Arc::new(Bpe::from_bytes(&bytes, &path)?))
            }
        };
        let model = Self::new(name, encoder, weights, tokenizer, described_by)?;
        // A fair-esm checkpoint carries its own configuration: files beside it do not belong to the model.
        let folder = config.ends_with(CONFIG).then(|| folder.to_owned());
        Ok(Self { folder, ..model })
    }

    /// Opens the nucleotide encoder compiled into the program.
    pub fn builtin_dna() -> Result<Self, RuntimeError> {
        let tokenizer = Bpe::from_bytes(bundle::TOKENIZER, Path::new("built-in tokenizer.json"))?;
        let tokenizer = Tokenizer::Bpe(Arc::new(tokenizer));
        let mut model = Self::builtin("built-in DNABERT-S", bundle::DNA_CONFIG, bundle::DNA, tokenizer)?;
        model.described_by.push((TOKENIZER, sha256(bundle::TOKENIZER)));
        Ok(model)
    }

    /// Opens the protein encoder compiled into the program.
    pub fn builtin_protein() -> Result<Self, RuntimeError> {
        Self::builtin("built-in ESM-2", bundle::PROTEIN_CONFIG, bundle::PROTEIN, Tokenizer::Esm)
    }

    fn builtin(
        name: &str,
        config: &str,
        weights: &'static [u8],
        tokenizer: Tokenizer,
    ) -> Result<Self, RuntimeError> {
        let encoder = Encoder::from_json(config)
            .map_err(|source| RuntimeError::Config { path: format!("{name} config.json").into(), source })?;
        let described_by = vec![(CONFIG, sha256(config.as_bytes()))];
        Self::new(name, encoder, Weights::from_bytes(name, weights)?, tokenizer, described_by)
    }

    fn new(
        name: &str,
        encoder: Encoder,
        weights: Weights,
        tokenizer: Tokenizer,
        described_by: Vec<(&'static str, String)>,
    ) -> Result<Self, RuntimeError> {
        tokenizer.fits(name, encoder.vocab_size())?;
        let weights = Arc::new(weights);
        let model = Self { name: name.to_owned(), encoder, weights, tokenizer, folder: None, described_by };
        model.check()?;
        Ok(model)
    }

    /// Checks that every tensor of the encoder exists with its expected shape, and that tied tensors have equal values.
    fn check(&self) -> Result<(), RuntimeError> {
        // Parameter shapes do not depend on the bounds, so the smallest graph is enough.
        let graph =
            self.encoder.graph(Bounds { tokens: 4, sequences: 1, longest: 4, packs: 1 }, &[Output::Mean])?;
        for piece in pieces(&graph) {
            match self.find(&piece.tensor) {
                Some(name) => {
                    self.weights.expect(&name, &piece.shape)?;
                }
                None if derived(&self.encoder, &piece.tensor).is_some() => {}
                None => {
                    let wanted = candidates(&self.encoder, &piece.tensor);
                    self.weights.expect(wanted.first().unwrap_or(&piece.tensor), &piece.shape)?;
                }
            }
        }
        for (twin, tensor) in tied_tensors(&self.encoder) {
            if let (Some(twin), Some(tensor)) = (self.find(&twin), self.find(&tensor)) {
                check_twin(&self.name, &self.weights, &twin, &tensor)?;
            }
        }
        Ok(())
    }

    /// Returns the file's name for a canonical tensor name, or `None` if the file has no such tensor.
    pub fn find(&self, tensor: &str) -> Option<String> {
        candidates(&self.encoder, tensor).into_iter().find(|n| self.weights.get(n).is_some())
    }

    /// Reads a range of a parameter's elements into `out`; the callback for [`plimsoll_exec::Executor::load`].
    pub fn read(&self, param: &Param, elements: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        read_pieces(param, elements, out, &mut |piece, range, out| {
            self.place(&piece.tensor).read(&self.weights, range, out)
        })
    }

    /// Source of the values of a tensor. `check` has made sure that every tensor has one.
    fn place(&self, tensor: &str) -> TensorSource {
        match self.find(tensor) {
            Some(name) => TensorSource::File(name),
            None => TensorSource::Memory(derived(&self.encoder, tensor).unwrap_or_default()),
        }
    }
}
