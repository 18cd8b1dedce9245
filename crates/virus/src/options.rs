//! What a prediction is asked for. Invariant: `result_key` holds every setting that can change a result and
//! nothing else; two runs with equal keys, inputs, weights and arithmetic give the same bytes.

use crate::output::{EmbeddingFormat, HitsFormat};
use runtime::Settings;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

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
    /// Whether letters are taken as VirNucPro takes them: codons with U are dropped. Otherwise U is read as T.
    pub original_alphabet: bool,
    /// A record is called virus from this score on.
    pub threshold: f32,
    /// Whether to write the files between VirNucPro's stages.
    pub keep_intermediate: bool,
    /// Whether and how to write the embeddings.
    pub save_embeddings: Option<EmbeddingFormat>,
    /// The format of the file of records called virus.
    pub hits_format: HitsFormat,
    /// Whether what is odd in the input is an error.
    pub strict: bool,
    /// Threads that read, translate and tokenize.
    pub workers: usize,
    /// Work units that each of them may be ahead.
    pub prefetch: usize,
    /// Seconds between two commits of the journal; 0 commits whenever something is finished.
    pub commit_every: Duration,
    /// Which shard of the windows to compute, for a later merge; `None` is all of them.
    pub shard: Option<Shard>,
    /// Folders of shards, whose results are put together instead of computing.
    pub merge: Vec<PathBuf>,
    /// Whether tables say from which input a row is.
    pub source: bool,
    /// Whether sequences are computed out of turn, by their lengths, so that steps are full. Results are the
    /// same.
    pub sort_by_length: bool,
    /// The machine.
    pub settings: Settings,
}

/// One of several shares of the windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which one, from 1.
    pub number: u64,
    /// Of how many.
    pub of: u64,
}

impl Shard {
    /// Windows that follow each other and stay together: a share of every long record.
    const RUN: u64 = 256;

    /// Whether window `number` of the input belongs to it.
    pub fn contains(self, number: u64) -> bool {
        number / Self::RUN % self.of == self.number - 1
    }
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
    /// The settings that can change results, but for those of the machine: [`Settings::arithmetic`] has these.
    pub fn result_key(&self) -> Value {
        json!({
            "length": self.length,
            "threshold": self.threshold,
            "original_alphabet": self.original_alphabet,
            "keep_intermediate": self.keep_intermediate,
            "save_embeddings": self.save_embeddings.map(EmbeddingFormat::name),
            "hits_format": self.hits_format.name(),
            "source": self.source,
        })
    }
}
