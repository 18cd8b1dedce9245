//! What a prediction is asked for. Invariant: `result_key` holds every setting that can change a result and
//! nothing else; two runs with equal keys, inputs and weights give the same bytes.

use crate::Settings;
use crate::predict::output::EmbeddingFormat;
use serde_json::{Value, json};
use std::path::PathBuf;

/// What a prediction is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sequence files; `-` is standard input.
    pub inputs: Vec<PathBuf>,
    /// Where results go.
    pub output_dir: PathBuf,
    /// Whether the results of another run there may be replaced.
    pub force: bool,
    /// Which models.
    pub models: Models,
    /// Bases of a chunk.
    pub length: usize,
    /// A record is called virus from this score on.
    pub threshold: f32,
    /// Whether to write the files between VirNucPro's stages.
    pub keep_intermediate: bool,
    /// Whether and how to write the embeddings.
    pub save_embeddings: Option<EmbeddingFormat>,
    /// Whether what is odd in the input is an error.
    pub strict: bool,
    /// Threads that read, translate and tokenize.
    pub workers: usize,
    /// Work units that each of them may be ahead.
    pub prefetch: usize,
    /// The machine.
    pub settings: Settings,
}

/// Which models.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Models {
    /// Nucleotide encoder: a path or a hub id; `None` is the built-in one.
    pub dna: Option<String>,
    /// Protein encoder: a path or a hub id; `None` is the built-in one.
    pub protein: Option<String>,
    /// The head; `None` is the built-in one.
    pub head: Option<PathBuf>,
}

impl Options {
    /// The settings that can change results.
    pub fn result_key(&self) -> Value {
        json!({
            "length": self.length,
            "threshold": self.threshold,
            "keep_intermediate": self.keep_intermediate,
            "save_embeddings": self.save_embeddings.map(EmbeddingFormat::name),
            "precision": "f32",
        })
    }
}
