//! Opens VirNucPro's classification head. Invariant: every tensor of the head was found with the expected shape before the
//! first byte is allocated.

use super::bundle;
use super::tensors::{pieces, read_pieces, rows};
use crate::{ModelError, RuntimeError};
use plimsoll_data::weights::Weights;
use plimsoll_graph::{Bounds, Param};
use plimsoll_models::{HeadConfig, mlp_head};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

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

/// File names of heads without a window length, in order of preference: safetensors before pickle.
const HEADS: [&str; 2] = ["head.safetensors", "head.pth"];

/// Accepted file names of heads in a folder of weights, for messages.
pub const HEAD_NAMES: &str = "head.safetensors, head.pth, 500_model.pth or 300_model.pth";

/// Columns of DNABERT-S's embedding.
const DNABERT_S: u64 = 768;
