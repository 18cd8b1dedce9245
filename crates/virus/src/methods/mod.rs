//! Methods of finding viral sequences. A method says how a record is cut into windows, which sequences of a window its models
//! compute, and what becomes of the rows that they give: record -> windows -> sequences -> rows -> results. The pipeline
//! (`pipeline/`) does the rest for every method: reading, planning, computing, journals, order, files that appear whole.
//! Invariant: which method runs is decided here ([`open`], [`plan`]) and by its options ([`MethodOptions`]) alone.
//!
//! To add a method: implement [`Method`], [`WindowSource`] with its [`WindowTokenizer`], and [`ResultsWriter`] in a module of its
//! own, describe its models in a [`MethodShape`], and add it to [`MethodOptions`], [`open`], [`plan`] and [`FILES`]. `gc.rs`, a test, is
//! the smallest one.

pub mod caller;
#[cfg(test)]
pub(crate) mod gc;
pub(crate) mod virnucpro;

use crate::VirusError;
use crate::options::{MethodOptions, PredictOptions};
use crate::output::{self, CallsSummary, CommonResults, HitsFormat, OutputError, RecordEnd, ResultCounts};
use crate::pipeline::letters::{LetterCounts, WindowLetters};
use crate::pipeline::queue::SequenceResult;
use crate::pipeline::record::{MethodRecord, RunRecord};
use crate::pipeline::records::{TEXTS, WindowBatch};
use crate::pipeline::shape::MethodShape;
use plimsoll_data::window::RecordWindow;
use plimsoll_runtime::session::WeightSource;
use plimsoll_runtime::{Observer, RuntimeError};
use serde_json::Value;
use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Names of all result files of runs with any method.
pub const FILES: [&str; 25] = [
    output::RUN_RECORD,
    output::PREDICTIONS,
    output::WINDOWS,
    virnucpro::results::BED,
    output::NOTES,
    HitsFormat::Fasta.file(),
    HitsFormat::Fastq.file(),
    HitsFormat::FastaGz.file(),
    HitsFormat::FastqGz.file(),
    virnucpro::tables::ROWS,
    virnucpro::tables::CONSENSUS,
    virnucpro::embeddings::NPY,
    virnucpro::embeddings::NPY_IDS,
    virnucpro::embeddings::SAFETENSORS,
    virnucpro::embeddings::PARQUET,
    virnucpro::intermediate::CHUNKED,
    virnucpro::intermediate::NUCLEOTIDE,
    virnucpro::intermediate::PROTEIN,
    output::reports::MULTIQC,
    output::reports::MULTIQC_CALLS,
    output::reports::VERSIONS,
    caller::regions_table::REGIONS,
    caller::results::REGIONS_BED,
    caller::results::REGIONS_FASTA,
    caller::results::VIRUSES,
];

/// SHA-256 of the files of each model, by the role of the model and the name of the file.
pub(crate) type MethodDigests = BTreeMap<&'static str, BTreeMap<String, String>>;

/// A method with its opened models.
pub(crate) trait Method {
    /// The models as data, and what plans need to know of the method.
    fn shape(&self) -> &MethodShape;

    /// The models' weights.
    fn weights(&self) -> MethodWeights<'_>;

    /// Digests of the model files. Computed once, because the files can have many gigabytes.
    fn digests(&self) -> &MethodDigests;

    /// Whether the models were trained; scores of untrained models are meaningless.
    fn is_trained(&self) -> bool;

    /// Settings that can change results, as JSON, without the settings of the machine.
    fn parameters(&self, options: &PredictOptions) -> Value;

    /// The entries of run.json that depend on the method.
    fn record(&self) -> MethodRecord;

    /// Whether rows of encoders are kept until their window is written, beside the scores of the head.
    fn saves_rows(&self) -> bool {
        false
    }

    /// The part of the method in the front end. `writes_results` is false in a stage or shard that writes only a journal.
    fn window_source(&self, options: &PredictOptions, writes_results: bool) -> Arc<dyn WindowSource>;

    /// Creates the result files of a run.
    fn results(&self, run: &ResultsOptions<'_>) -> Result<Box<dyn ResultsWriter>, OutputError>;
}

/// Weights of the models of a method.
pub(crate) struct MethodWeights<'a> {
    /// Weights of the encoders, in the order of the shape.
    pub(crate) encoders: Vec<&'a dyn WeightSource>,
    pub(crate) head: Option<&'a dyn WeightSource>,
}

/// Options of the result files of a run, of any method.
pub(crate) struct ResultsOptions<'a> {
    pub(crate) options: &'a PredictOptions,
    /// Folder of the results.
    pub(crate) folder: &'a Path,
    /// Description of the arithmetic that computes or computed the results.
    pub(crate) arithmetic: &'a Value,
    /// Bytes of lines that each sort holds in memory.
    pub(crate) sort_bytes: usize,
}

/// Cuts records into windows, on the reader's thread, and tokenizes the windows, on worker threads.
pub(crate) trait WindowSource: Send + Sync {
    /// Cuts a record into windows.
    fn cut<'a>(&self, record: &'a [u8]) -> Box<dyn Iterator<Item = CutWindow> + 'a>;

    /// Creates the tokenizer of a worker thread.
    fn tokenizer(&self) -> Box<dyn WindowTokenizer>;

    /// Texts of notes on the input.
    fn notes(&self) -> &'static WindowNotes;

    /// Whether the letter U is kept; otherwise it is read as T.
    fn keeps_uracil(&self) -> bool {
        false
    }

    /// Whether records are mates of pairs, which get one result.
    fn is_paired(&self) -> bool {
        false
    }
}

/// Tokenizes windows on one thread.
pub(crate) trait WindowTokenizer: Send {
    /// Appends the sequences of a window to the batch, none if its results are in a journal, and returns the counts of its letters if
    /// the method needs them.
    fn tokenize(
        &mut self,
        window: &WindowBases<'_>,
        batch: &mut WindowBatch,
    ) -> Result<WindowLetters, RuntimeError>;
}

/// A window of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CutWindow {
    pub(crate) location: RecordWindow,
    /// Number of its first bases that are in the window before it.
    pub(crate) overlap: usize,
    /// Counts of the letters that are in no window: those before the first window of a record, and those between this window
    /// and the next one or the end of the record.
    pub(crate) left_out: LetterCounts,
}

/// A window with its bases, for a tokenizer.
pub(crate) struct WindowBases<'a> {
    /// Name of the record.
    pub(crate) record: &'a str,
    pub(crate) cut: &'a CutWindow,
    pub(crate) bases: &'a [u8],
    /// Whether the results are in a journal, so that nothing is computed.
    pub(crate) is_journaled: bool,
}

/// Texts of a method for the column `action` of notes.tsv: how it treats odd letters.
pub(crate) struct WindowNotes {
    /// Treatment of characters that are no IUPAC codes.
    pub(crate) non_iupac: &'static str,
    /// Treatment of a window of only N.
    pub(crate) all_n: &'static str,
    /// Longest run of letters between windows that is not noted.
    pub(crate) longest_gap: usize,
    /// Treatment of longer runs.
    pub(crate) gap: &'static str,
}

/// Writer of the result files of a run. It receives windows and records in input order. If it is dropped without
/// [`ResultsWriter::finish`], it leaves no files.
pub(crate) trait ResultsWriter {
    /// The counts, the notes and the current input file.
    fn common(&mut self) -> &mut CommonResults;

    /// Appends to the method's own files the texts that its tokenizers put into batches.
    fn texts(&mut self, _texts: &[Vec<u8>; TEXTS]) -> Result<(), OutputError> {
        Ok(())
    }

    /// Writes the next window of the current record, or the first window of the next record.
    fn window(&mut self, window: &FinishedWindow<'_>) -> Result<(), OutputError>;

    /// Ends the current record after its last window. A record without letters has no windows.
    fn record(&mut self, record: &RecordEnd<'_>) -> Result<(), OutputError>;

    /// A warning about the results after the last record, if there is reason for one.
    fn warning(&self) -> Option<String> {
        None
    }

    /// Completes the files and replaces the results of an earlier run: removes its `run.json` and its files that
    /// this run does not write, commits the files of this run, and finally writes `run_record` as `run.json`, with the counts
    /// added.
    fn finish(self: Box<Self>, run_record: &mut RunRecord) -> Result<FinishedResults, OutputError>;
}

/// A window whose sequences have all finished.
pub(crate) struct FinishedWindow<'a> {
    /// Name of the record.
    pub(crate) record: &'a str,
    pub(crate) location: RecordWindow,
    pub(crate) letters: WindowLetters,
    /// Sequences in the order of labels.
    pub(crate) sequences: &'a [SequenceResult],
    /// Concatenated rows of the sequences with [`SequenceResult::has_rows`]; empty if the stage keeps no rows.
    pub(crate) rows: &'a [f32],
}

impl FinishedWindow<'_> {
    /// The sequences that have rows, each with its row.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&SequenceResult, &[f32])> {
        let count = self.sequences.iter().filter(|sequence| sequence.has_rows()).count();
        // `max(1)`: without rows `chunks_exact` would panic at a size of 0.
        let width = self.rows.len().checked_div(count).unwrap_or(0).max(1);
        self.sequences.iter().filter(|sequence| sequence.has_rows()).zip(self.rows.chunks_exact(width))
    }
}

/// Summary of the results.
pub(crate) struct FinishedResults {
    pub(crate) counts: ResultCounts,
    /// Calls of a caller.
    pub(crate) calls: Option<CallsSummary>,
}

/// A method whose models need not be on this machine, for plans.
pub(crate) struct PlannedMethod {
    pub(crate) models: Vec<PlannedModel>,
    pub(crate) shape: MethodShape,
    /// Models that are on this machine, opened because the headers of their weights and tokenizers are in the heap of a real
    /// run. For missing models they are covered by the margin of the heap's memory line.
    pub(crate) opened: Box<dyn Any>,
}

/// A model of a method, for plans.
#[derive(Clone, Debug)]
pub(crate) struct PlannedModel {
    /// Key in JSON.
    pub(crate) key: &'static str,
    /// Description of the model, such as `protein model`.
    pub(crate) what: &'static str,
    pub(crate) name: String,
}

/// Opens the models of a method, checks them against the options, and hashes their files.
pub(crate) fn open(
    options: &PredictOptions,
    observer: &mut dyn Observer,
) -> Result<Box<dyn Method>, VirusError> {
    Ok(match &options.method {
        MethodOptions::VirNucPro(method) => Box::new(virnucpro::VirNucPro::open(method, options, observer)?),
        MethodOptions::Caller(method) => Box::new(caller::Caller::open(method, options)?),
    })
}

/// Describes a method for plans.
pub(crate) fn plan(options: &PredictOptions) -> Result<PlannedMethod, VirusError> {
    match &options.method {
        MethodOptions::VirNucPro(method) => virnucpro::plan(method, options.length),
        MethodOptions::Caller(method) => caller::plan(method, options.length),
    }
}
