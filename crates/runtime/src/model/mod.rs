//! Opens models: configuration, weights and tokenizer under one name. Invariant: every tensor that a graph reads was
//! found with the expected shape before the first byte is allocated.

pub mod adapter;
mod bundle;
mod caller;
pub mod fair_esm;
pub mod hub;
pub mod identity;
pub mod leftovers;
mod sequence_model;

pub use caller::CallerModel;
pub use sequence_model::{DecoderModel, Model, OwnTokenizer, check_decoder, find_in_decoder};

use crate::session::{SessionModel, WeightSource};
use crate::{ModelError, Observer, RuntimeError, SequenceError};
use hub::{CONFIG, Need, TOKENIZER};
use plimsoll_data::alphabet::{Alphabet, Normalized, unknown_refusal};
use plimsoll_data::bounded;
use plimsoll_data::hex::hex;
use plimsoll_data::printable::Name;
use plimsoll_data::tokenize::{bpe, bpe::Bpe, esm};
use plimsoll_data::train::Vocabulary;
use plimsoll_data::weights::{HubEnv, ModelPath, Weights};
use plimsoll_graph::{Bounds, Graph, Param, ParamPiece};
use plimsoll_models::{
    Encoder, HeadConfig, Output, SequenceModel, candidates, derived, mlp_head, tied_tensors,
};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::ErrorKind;
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

/// File with the model's vocabulary, one token a line.
pub(crate) const VOCABULARY: &str = "vocab.txt";

/// Largest accepted config.json, in bytes; files on the hub have about one thousand.
const LARGEST_CONFIG: u64 = 1 << 20;

/// The tokenizer of a model.
#[derive(Clone)]
pub enum Tokenizer {
    /// One token per residue, with ESM-2's alphabet.
    Esm,
    /// Byte-pair encoding, read from a tokenizer.json.
    Bpe(Arc<Bpe>),
    /// The tokenizer of a language model: bytes, or a tokenizer.json.
    Text(Arc<Vocabulary>),
}

impl Tokenizer {
    /// Alphabet of the sequences that the tokenizer encodes; `None` for any text.
    pub fn alphabet(&self) -> Option<Alphabet> {
        match self {
            Self::Esm => Some(Alphabet::AminoAcids),
            Self::Bpe(_) => Some(Alphabet::Nucleotides),
            Self::Text(_) => None,
        }
    }

    /// Letters of a sequence that are encoded: a protein's `*` at the end, which marks the stop codon, is left out.
    pub fn letters<'a>(&self, sequence: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Esm => esm::residues(sequence),
            Self::Bpe(_) | Self::Text(_) => sequence,
        }
    }

    /// Brings a sequence into the form in which the model reads it (see [`Alphabet::normalize`]); text stays as it is.
    pub fn normalize(&self, sequence: &mut Vec<u8>) -> Normalized {
        self.alphabet().map(|alphabet| alphabet.normalize(sequence)).unwrap_or_default()
    }

    /// Number of special tokens that [`Tokenizer::encode`] adds to every sequence.
    pub fn special_tokens(&self) -> usize {
        match self {
            Self::Esm | Self::Bpe(_) => 2,
            Self::Text(vocabulary) => vocabulary.frame().iter().flatten().count(),
        }
    }

    /// Appends the tokens of a sequence to `tokens` and returns the number of unknown tokens among them.
    pub fn encode(&self, sequence: &[u8], tokens: &mut Vec<i32>) -> Result<usize, RuntimeError> {
        match self {
            Self::Esm => Ok(esm::encode(sequence, tokens)),
            Self::Bpe(bpe) => Ok(bpe.encode(sequence, tokens)?),
            Self::Text(vocabulary) => Ok(vocabulary.encode(sequence, tokens)?),
        }
    }

    /// Normalizes a sequence, appends its tokens to `tokens`, and returns the number of unknown tokens among them. White space,
    /// digits and gaps between letters are dropped. Errors name the sequence by its `position`.
    ///
    /// # Errors
    /// [`SequenceError`]: no letters, letters of another alphabet, or more than half of the tokens unknown.
    pub fn encode_sequence(
        &self,
        position: u64,
        letters: &[u8],
        tokens: &mut Vec<i32>,
    ) -> Result<usize, RuntimeError> {
        let refused = |source| RuntimeError::Sequence { position, source };
        let mut letters = letters.to_vec();
        self.normalize(&mut letters);
        if self.letters(&letters).is_empty() {
            return Err(refused(SequenceError::Empty));
        }
        if let Some(reason) = self.alphabet().and_then(|alphabet| alphabet.refusal(&letters)) {
            return Err(refused(SequenceError::Unsuitable { reason }));
        }
        let before = tokens.len();
        let unknown = self.encode(&letters, tokens)?;
        let letter_tokens = (tokens.len() - before).saturating_sub(self.special_tokens());
        match unknown_refusal(unknown, letter_tokens) {
            Some(reason) => Err(refused(SequenceError::Unsuitable { reason })),
            None => Ok(unknown),
        }
    }

    /// Maximum number of tokens of a sequence of `letters` bytes, start and end token included.
    pub fn most_tokens(&self, letters: u64) -> u64 {
        match self {
            Self::Esm | Self::Bpe(_) => letters + 2,
            Self::Text(vocabulary) => vocabulary.most_tokens(letters as usize) as u64,
        }
    }

    /// Number of tokens that the tokenizer knows; all ids are below it.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Esm => esm::VOCAB,
            Self::Bpe(bpe) => bpe.vocab_size(),
            Self::Text(vocabulary) => vocabulary.size(),
        }
    }

    /// Checks that a model with `rows` rows in its embedding table has a row for every token.
    pub(crate) fn fits(&self, name: &str, rows: u64) -> Result<(), RuntimeError> {
        let name = name.to_owned();
        let tokens = self.vocab_size();
        if tokens as u64 > rows { Err(ModelError::Tokenizer { name, tokens, rows }.into()) } else { Ok(()) }
    }
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
    pub(crate) fn at(
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

/// Checks that two tied tensors of the model `name` have equal shapes and values; reads a bounded number of elements at a
/// time.
pub(crate) fn check_twin(name: &str, weights: &Weights, a: &str, b: &str) -> Result<(), RuntimeError> {
    let n = weights.tensor(b)?.elements();
    let same_shape = weights.tensor(a)?.shape() == weights.tensor(b)?.shape();
    const PART: u64 = 1 << 14;
    let mut x = vec![0f32; PART as usize];
    let mut y = vec![0f32; PART as usize];
    let mut equal = same_shape;
    for start in (0..n).step_by(PART as usize).take_while(|_| same_shape) {
        let len = (n - start).min(PART) as usize;
        weights.read_f32(a, start..start + len as u64, &mut x[..len])?;
        weights.read_f32(b, start..start + len as u64, &mut y[..len])?;
        equal &= x[..len] == y[..len];
    }
    if equal {
        return Ok(());
    }
    Err(ModelError::Untied { name: name.to_owned(), a: a.to_owned(), b: b.to_owned() }.into())
}

/// Opens the weights of a model.
pub(crate) fn weights_of(name: &str, place: &ModelPath) -> Result<Weights, RuntimeError> {
    match place.weights() {
        Some(weights) => Ok(Weights::open(weights)?),
        None => Err(ModelError::WithoutWeights { name: name.to_owned() }.into()),
    }
}

/// Source of a tensor's values.
pub(crate) enum TensorSource {
    /// In the weight file, under this name.
    File(String),
    /// In memory: values derived from the configuration.
    Memory(Vec<f32>),
}

impl TensorSource {
    pub(crate) fn read(
        &self,
        weights: &Weights,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), RuntimeError> {
        match self {
            Self::File(name) => weights.read_f32(name, range, out)?,
            Self::Memory(values) => out.copy_from_slice(&values[range.start as usize..range.end as usize]),
        }
        Ok(())
    }
}

/// The VirNucPro classification head with its weights.
pub struct HeadModel {
    /// The name under which the head was requested: a path, or the name of the built-in head.
    pub name: String,
    /// Layer sizes.
    pub config: HeadConfig,
    /// The weights.
    pub weights: Weights,
    /// Whether the head was trained; `predict` makes no calls with an untrained head.
    pub trained: bool,
}

impl HeadModel {
    /// Opens a head for nucleotide embeddings of `dna` columns and protein embeddings of `protein` columns.
    pub fn open(path: &Path, dna: u64, protein: u64) -> Result<Self, RuntimeError> {
        Self::new(&path.display().to_string(), Weights::open(path)?, true, dna, protein)
    }

    /// Opens a head without its encoders. The head reads both embeddings concatenated, so the column where one ends and
    /// the other begins changes no result; DNABERT-S's width is assumed if the rows are wider, else half the columns.
    pub fn open_alone(path: &Path) -> Result<Self, RuntimeError> {
        let weights = Weights::open(path)?;
        let name = path.display().to_string();
        let shape = weights.tensor("hidden_layer.weight")?.shape().to_vec();
        let columns = match shape[..] {
            [_, columns] if columns >= 2 => columns,
            _ => {
                return Err(ModelError::HeadShape { path: path.to_owned(), shape }.into());
            }
        };
        let dna = if columns > DNABERT_S { DNABERT_S } else { columns / 2 };
        Self::new(&name, weights, true, dna, columns - dna)
    }

    /// Lists the heads in a folder of weights: `head.safetensors` or else `head.pth`, or else files named by their
    /// window length as VirNucPro names them (`300_model.pth`), sorted by window length.
    pub fn in_folder(folder: &Path) -> Vec<PathBuf> {
        if let Some(head) = HEADS.iter().map(|name| folder.join(name)).find(|path| path.exists()) {
            return vec![head];
        }
        let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut heads: Vec<(usize, PathBuf)> =
            entries.filter_map(|path| Some((Self::length_in_name(&path)?, path))).collect();
        heads.sort();
        heads.into_iter().map(|(_, path)| path).collect()
    }

    /// Opens the head compiled into the program.
    pub fn builtin(dna: u64, protein: u64) -> Result<Self, RuntimeError> {
        let name = "built-in head";
        let weights = Weights::from_bytes(name, bundle::HEAD)?;
        let trained = weights.metadata().get("trained").is_some_and(|t| t == "true");
        Self::new(name, weights, trained, dna, protein)
    }

    fn new(name: &str, weights: Weights, trained: bool, dna: u64, protein: u64) -> Result<Self, RuntimeError> {
        let hidden = rows(&weights, "hidden_layer.weight")?;
        let classes = rows(&weights, "output_layer.weight")?;
        let config = HeadConfig { dna, protein, hidden, classes };
        if classes != 2 {
            return Err(ModelError::HeadClasses { name: name.to_owned(), classes }.into());
        }
        let graph = mlp_head(&config, Bounds { tokens: 1, sequences: 1, longest: 1, packs: 1 })?;
        for piece in pieces(&graph) {
            weights.expect(&piece.tensor, &piece.shape)?;
        }
        Ok(Self { name: name.to_owned(), config, weights, trained })
    }

    /// Reads a range of a parameter's elements into `out`; the callback for [`plimsoll_exec::Executor::load`].
    pub fn read(&self, param: &Param, elements: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        read_pieces(param, elements, out, &mut |piece, range, out| {
            Ok(self.weights.read_f32(&piece.tensor, range, out)?)
        })
    }

    /// The window length stated in the head's file name: 300 for `300_model.pth`.
    pub fn named_length(&self) -> Option<usize> {
        Self::length_in_name(Path::new(&self.name))
    }

    /// The window length stated in a head's file name: 300 for `300_model.pth`; `None` for any other name.
    pub fn length_in_name(path: &Path) -> Option<usize> {
        let file = path.file_name()?.to_str()?;
        let digits = file.find(|c: char| !c.is_ascii_digit())?;
        file[digits..].starts_with("_model").then(|| file[..digits].parse().ok())?
    }
}

/// Number of rows of a tensor; 0 for a scalar.
fn rows(weights: &Weights, tensor: &str) -> Result<u64, RuntimeError> {
    Ok(weights.tensor(tensor)?.shape().first().copied().unwrap_or(0))
}

/// File names of heads without a window length, in order of preference: safetensors before pickle.
const HEADS: [&str; 2] = ["head.safetensors", "head.pth"];

/// Accepted file names of heads in a folder of weights, for messages.
pub const HEAD_NAMES: &str = "head.safetensors, head.pth, 500_model.pth or 300_model.pth";

/// Columns of DNABERT-S's embedding.
const DNABERT_S: u64 = 768;

/// Reads the text of a model's configuration.
///
/// # Errors
/// The file is missing, unreadable, or larger than 1 MiB.
pub fn read_config(path: &Path) -> Result<String, RuntimeError> {
    bounded::read_text(path, LARGEST_CONFIG).map_err(|source| match source.kind() {
        ErrorKind::NotFound => ModelError::NoSuchFile { path: path.to_owned() }.into(),
        _ => RuntimeError::io(path)(source),
    })
}

/// Refuses the folder of an ESM-2 model whose `vocab.txt` differs from ESM-2's alphabet, because token ids would then
/// stand for other residues. A missing file is accepted.
pub(crate) fn check_vocabulary(folder: &Path) -> Result<(), RuntimeError> {
    let path = folder.join(VOCABULARY);
    if !path.exists() {
        return Ok(());
    }
    let text = bounded::read_text(&path, LARGEST_CONFIG).map_err(RuntimeError::io(&path))?;
    let Some(difference) = esm::vocabulary_difference(&text) else { return Ok(()) };
    let expected = printed_token(difference.expected);
    let found = printed_token(difference.found);
    Err(ModelError::Vocabulary { path, line: difference.line, expected, found }.into())
}

/// A token of a vocabulary in a message; `None` is the end of the file.
fn printed_token(token: Option<String>) -> String {
    match token {
        Some(token) => format!("`{}`", Name(&token)),
        None => "the end of the file".to_owned(),
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The pieces of all parameters of a graph; each piece is a range of rows of one tensor in the file.
pub(crate) fn pieces(graph: &Graph) -> impl Iterator<Item = &ParamPiece> {
    graph.params.iter().flat_map(|p| &p.pieces)
}

/// Reads a range of one piece's tensor into a slice.
pub(crate) type ReadPiece<'a> =
    &'a mut dyn FnMut(&ParamPiece, Range<u64>, &mut [f32]) -> Result<(), RuntimeError>;

/// Reads `elements` of a parameter by splitting the range into ranges of the tensors of which the parameter is
/// concatenated.
pub(crate) fn read_pieces(
    param: &Param,
    elements: Range<u64>,
    out: &mut [f32],
    read: ReadPiece<'_>,
) -> Result<(), RuntimeError> {
    // `start..end` are the parameter's elements covered by the piece; `first` is the piece's first element in its
    // tensor. Element `start + n` of the parameter is therefore element `first + n` of the tensor.
    let mut start = 0;
    for piece in &param.pieces {
        let row: u64 = piece.shape.iter().skip(1).product();
        let first = piece.rows.0 * row;
        let end = start + (piece.rows.1 - piece.rows.0) * row;
        let from = elements.start.max(start);
        let to = elements.end.min(end);
        if from < to {
            let part = (from - elements.start) as usize..(to - elements.start) as usize;
            read(piece, first + from - start..first + to - start, &mut out[part])?;
        }
        start = end;
    }
    Ok(())
}
