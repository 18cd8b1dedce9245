//! Models on disk: configuration, weights, tokenizer, under one name. Invariant: every tensor that a graph
//! reads was found with its shape before the first byte is allocated.

use crate::hub::{self, CONFIG, Need, TOKENIZER};
use crate::{ModelError, Observer, RuntimeError, adapter, bundle};
use data::bounded;
use data::hex::hex;
use data::printable::Name;
use data::tokenize::{bpe, bpe::Bpe, esm};
use data::weights::{HubEnv, Weights};
use exec::ParamSource;
use graph::{Bounds, Graph, Param, Piece};
use models::{Encoder, HeadConfig, Output, candidates, derived, mlp_head, twins};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An encoder with its weights.
pub struct EncoderModel {
    /// As it was asked for.
    pub name: String,
    /// What it computes.
    pub encoder: Encoder,
    /// What it knows; an executor that streams it holds it too.
    pub weights: Arc<Weights>,
    /// How it reads sequences.
    pub tokenizer: Tokenizer,
    /// Where its files are; `None` where it is compiled in.
    pub folder: Option<PathBuf>,
    /// The files beside the weights that results depend on: name and SHA-256 in hexadecimal.
    pub described_by: Vec<(&'static str, String)>,
}

/// The names of a model's tokens, a line each.
pub(crate) const VOCABULARY: &str = "vocab.txt";

/// Bytes of a config.json; those of the hub have one thousand.
const LARGEST_CONFIG: u64 = 1 << 20;

/// How a model reads sequences.
#[derive(Clone)]
pub enum Tokenizer {
    /// ESM-2's alphabet.
    Esm,
    /// A tokenizer.json.
    Bpe(Arc<Bpe>),
}

impl Tokenizer {
    /// Appends the tokens of a sequence; how many of its characters were unknown.
    pub fn encode(&self, sequence: &[u8], tokens: &mut Vec<i32>) -> Result<usize, RuntimeError> {
        match self {
            Self::Esm => Ok(esm::encode(sequence, tokens)),
            Self::Bpe(bpe) => Ok(bpe.encode(sequence, tokens)?),
        }
    }
}

impl EncoderModel {
    /// Opens a folder, a weight file, or a model of the hub, which is fetched where the cache has not all of it.
    pub fn open(name: &str, env: &HubEnv, observer: &mut dyn Observer) -> Result<Self, RuntimeError> {
        let place = hub::local(name, Need::Model, env, observer)?;
        adapter::refuse(place.config().parent().unwrap_or(Path::new(".")))?;
        let (config, text) = hub::config_text(&place)?;
        let encoder = Encoder::from_json(&text)
            .map_err(|source| RuntimeError::Config { path: config.clone(), source })?;
        let Some(weights) = place.weights() else {
            return Err(ModelError::WithoutWeights { name: name.to_owned() }.into());
        };
        let weights = Weights::open(weights)?;
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
        // A fair-esm checkpoint is its own configuration: nothing beside it belongs to the model.
        let folder = config.ends_with(CONFIG).then(|| folder.to_owned());
        Ok(Self { folder, ..model })
    }

    /// The nucleotide encoder that is compiled in.
    pub fn builtin_dna() -> Result<Self, RuntimeError> {
        let tokenizer = Bpe::from_bytes(bundle::TOKENIZER, Path::new("built-in tokenizer.json"))?;
        let tokenizer = Tokenizer::Bpe(Arc::new(tokenizer));
        let mut model = Self::builtin("built-in DNABERT-S", bundle::DNA_CONFIG, bundle::DNA, tokenizer)?;
        model.described_by.push((TOKENIZER, sha256(bundle::TOKENIZER)));
        Ok(model)
    }

    /// The protein encoder that is compiled in.
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
        let vocabulary = match &tokenizer {
            Tokenizer::Esm => esm::VOCAB,
            Tokenizer::Bpe(bpe) => bpe.vocab_size(),
        };
        if vocabulary as u64 > encoder.vocab_size() {
            let (name, rows) = (name.to_owned(), encoder.vocab_size());
            return Err(ModelError::Tokenizer { name, tokens: vocabulary, rows }.into());
        }
        let weights = Arc::new(weights);
        let model = Self { name: name.to_owned(), encoder, weights, tokenizer, folder: None, described_by };
        model.check()?;
        Ok(model)
    }

    /// Every tensor of the encoder is there, in its shape; tensors that must be equal are.
    fn check(&self) -> Result<(), RuntimeError> {
        let graph = self.encoder.graph(Bounds { tokens: 4, sequences: 1, longest: 4 }, &[Output::Mean])?;
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
        for (twin, tensor) in twins(&self.encoder) {
            self.check_twin(&twin, &tensor)?;
        }
        Ok(())
    }

    fn check_twin(&self, twin: &str, tensor: &str) -> Result<(), RuntimeError> {
        let (Some(a), Some(b)) = (self.find(twin), self.find(tensor)) else { return Ok(()) };
        let n = self.weights.tensor(&b)?.elements();
        let same_shape = self.weights.tensor(&a)?.shape() == self.weights.tensor(&b)?.shape();
        const PART: u64 = 1 << 14;
        let (mut x, mut y) = (vec![0f32; PART as usize], vec![0f32; PART as usize]);
        let mut equal = same_shape;
        for start in (0..n).step_by(PART as usize).take_while(|_| same_shape) {
            let len = (n - start).min(PART) as usize;
            self.weights.read_f32(&a, start..start + len as u64, &mut x[..len])?;
            self.weights.read_f32(&b, start..start + len as u64, &mut y[..len])?;
            equal &= x[..len] == y[..len];
        }
        if equal {
            return Ok(());
        }
        Err(ModelError::Untied { name: self.name.clone(), a, b }.into())
    }

    /// The name that the file has for a canonical tensor, if it has it.
    pub fn find(&self, tensor: &str) -> Option<String> {
        candidates(&self.encoder, tensor).into_iter().find(|n| self.weights.get(n).is_some())
    }

    /// Reads elements of a parameter: what [`exec::Executor::load`] asks for.
    pub fn read(&self, param: &Param, elements: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        read_pieces(param, elements, out, &mut |piece, range, out| {
            self.place(&piece.tensor).read(&self.weights, range, out)
        })
    }

    /// The same for as long as an executor runs `graph`: what [`exec::Executor::attach`] keeps. Tensors are
    /// looked up here, so that reading one allocates nothing.
    pub fn source(&self, graph: &Graph) -> ParamSource {
        let weights = self.weights.clone();
        let found = pieces(graph).map(|piece| (piece.tensor.clone(), self.place(&piece.tensor)));
        let places: BTreeMap<String, Slice> = found.collect();
        Box::new(move |param, elements, out| {
            let done = read_pieces(param, elements, out, &mut |piece, range, out| {
                let place = places.get(&piece.tensor);
                let unknown = || RuntimeError::bug(format!("{} is not of this model", piece.tensor));
                place.ok_or_else(unknown)?.read(&weights, range, out)
            });
            Ok(done?)
        })
    }

    /// Where the values of a tensor are. `check` made sure that there is such a place.
    fn place(&self, tensor: &str) -> Slice {
        match self.find(tensor) {
            Some(name) => Slice::File(name),
            None => Slice::Memory(derived(&self.encoder, tensor).unwrap_or_default()),
        }
    }
}

/// Where the values of a tensor are.
enum Slice {
    /// In the weight file, under this name.
    File(String),
    /// Here: they follow from the configuration.
    Memory(Vec<f32>),
}

impl Slice {
    fn read(&self, weights: &Weights, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        match self {
            Self::File(name) => weights.read_f32(name, range, out)?,
            Self::Memory(values) => out.copy_from_slice(&values[range.start as usize..range.end as usize]),
        }
        Ok(())
    }
}

/// The VirNucPro head with its weights.
pub struct HeadModel {
    /// As it was asked for.
    pub name: String,
    /// Its sizes.
    pub config: HeadConfig,
    /// What it knows.
    pub weights: Weights,
    /// Whether it was trained: a `predict` with an untrained one calls nothing.
    pub trained: bool,
}

impl HeadModel {
    /// Opens a head for embeddings of `dna` and `protein` columns.
    pub fn open(path: &Path, dna: u64, protein: u64) -> Result<Self, RuntimeError> {
        Self::new(&path.display().to_string(), Weights::open(path)?, true, dna, protein)
    }

    /// Opens a head whose encoders are not known. Both embeddings are taken side by side, so where the one ends and the
    /// other begins changes no number: it is DNABERT-S's width where the rows are wider than that, else the middle.
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

    /// The heads in a folder of weights: `head.safetensors` or else `head.pth`, or else those that are named by their window
    /// length as VirNucPro's are (`300_model.pth`), by that length.
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

    /// The head that is compiled in.
    pub fn builtin(dna: u64, protein: u64) -> Result<Self, RuntimeError> {
        let name = "built-in head";
        let weights = Weights::from_bytes(name, bundle::HEAD)?;
        let trained = weights.metadata().get("trained").is_some_and(|t| t == "true");
        Self::new(name, weights, trained, dna, protein)
    }

    fn new(name: &str, weights: Weights, trained: bool, dna: u64, protein: u64) -> Result<Self, RuntimeError> {
        let rows = |tensor: &str| weights.tensor(tensor).map(|t| t.shape().first().copied().unwrap_or(0));
        let (hidden, classes) = (rows("hidden_layer.weight")?, rows("output_layer.weight")?);
        let config = HeadConfig { dna, protein, hidden, classes };
        if classes != 2 {
            return Err(ModelError::HeadClasses { name: name.to_owned(), classes }.into());
        }
        let graph = mlp_head(&config, Bounds { tokens: 1, sequences: 1, longest: 1 })?;
        for piece in pieces(&graph) {
            weights.expect(&piece.tensor, &piece.shape)?;
        }
        Ok(Self { name: name.to_owned(), config, weights, trained })
    }

    /// Reads elements of a parameter: what [`exec::Executor::load`] asks for.
    pub fn read(&self, param: &Param, elements: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        read_pieces(param, elements, out, &mut |piece, range, out| {
            Ok(self.weights.read_f32(&piece.tensor, range, out)?)
        })
    }

    /// The chunk length that the head's file name speaks of: `300_model.pth`.
    pub fn named_length(&self) -> Option<usize> {
        Self::length_in_name(Path::new(&self.name))
    }

    /// The window length that the name of a head's file states: 300 of `300_model.pth`.
    pub fn length_in_name(path: &Path) -> Option<usize> {
        let file = path.file_name()?.to_str()?;
        let digits = file.find(|c: char| !c.is_ascii_digit())?;
        file[digits..].starts_with("_model").then(|| file[..digits].parse().ok())?
    }
}

/// Heads without a length in their names: safetensors before a pickle.
const HEADS: [&str; 2] = ["head.safetensors", "head.pth"];

/// What a head's file is called in a folder of weights.
pub const HEAD_NAMES: &str = "head.safetensors, head.pth, 500_model.pth or 300_model.pth";

/// Columns of DNABERT-S's embedding.
const DNABERT_S: u64 = 768;

/// The text of a model's configuration.
pub fn read_config(path: &Path) -> Result<String, RuntimeError> {
    bounded::read_text(path, LARGEST_CONFIG).map_err(|source| match source.kind() {
        ErrorKind::NotFound => ModelError::NoSuchFile { path: path.to_owned() }.into(),
        _ => RuntimeError::io(path)(source),
    })
}

/// Refuses the folder of an ESM-2 model whose `vocab.txt` is not ESM-2's alphabet: token numbers would stand for other
/// residues. The file may be absent.
fn check_vocabulary(folder: &Path) -> Result<(), RuntimeError> {
    let path = folder.join(VOCABULARY);
    if !path.exists() {
        return Ok(());
    }
    let text = bounded::read_text(&path, LARGEST_CONFIG).map_err(RuntimeError::io(&path))?;
    let Some(difference) = esm::vocabulary_difference(&text) else { return Ok(()) };
    let shown = |token: Option<String>| match token {
        Some(token) => format!("`{}`", Name(&token)),
        None => "the end of the file".to_owned(),
    };
    let (expected, found) = (shown(difference.expected), shown(difference.found));
    Err(ModelError::Vocabulary { path, line: difference.line, expected, found }.into())
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn pieces(graph: &Graph) -> impl Iterator<Item = &Piece> {
    graph.params.iter().flat_map(|p| &p.pieces)
}

type ReadPiece<'a> = &'a mut dyn FnMut(&Piece, Range<u64>, &mut [f32]) -> Result<(), RuntimeError>;

/// Cuts a range of a parameter into ranges of the tensors that it is made of.
fn read_pieces(
    param: &Param,
    elements: Range<u64>,
    out: &mut [f32],
    read: ReadPiece<'_>,
) -> Result<(), RuntimeError> {
    let mut start = 0;
    for piece in &param.pieces {
        let row: u64 = piece.shape.iter().skip(1).product();
        let (first, end) = (piece.rows.0 * row, start + (piece.rows.1 - piece.rows.0) * row);
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
