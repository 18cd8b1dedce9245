//! `plimsoll embed`: computes embeddings of sequences with an encoder. A run opens the model, measures the
//! longest sequence, plans under the memory budget, loads the weights, streams the input through the encoder
//! and writes the rows in input order. Invariant: an embedding depends on its sequence, the model and the
//! pooling, and on nothing else; every sequence is written exactly once, with finite values, or the command
//! fails with an error that names the sequence.
//!
//! Steps may complete sequences out of input order. A finished row waits in memory until all rows before it are
//! written; at most the rows of [`plimsoll_data::pack::MAX_PACKS`] packs wait, typically those of about
//! [`plimsoll_data::pack::POOL`] packs. In plans for host memory they are in the ledger.

#![forbid(unsafe_code)]

pub mod classify;
mod engine;
mod error;
mod in_memory;
mod input;
mod journaled;
mod output;
mod resume;
mod states;

pub use error::EmbedError;
pub use in_memory::{InMemoryOptions, embed_sequences};
use plimsoll_data::outputs::{InputFiles, OutputGuard};
use plimsoll_data::pack::Order;
pub use plimsoll_data::rows::ValueType;
use plimsoll_data::sequence::{Input, InputExtent, Listing, Reader};
use plimsoll_data::weights::{HubEnv, Weights, WeightsError};

use engine::{EmbedEngine, RowWriter};
use input::{
    BATCH_LETTERS, BATCH_NAMES, InputOptions, InputSummary, LengthUnit, Naming, RecordRename, RecordUnknowns,
    SequenceBatch, SequenceLimits, SequencePipeline, SkippedRecord,
};
use journaled::{FileRows, Journaled, NameSizes, ResultFacts};
use output::{EmbeddingFiles, ResultSchema};
use plimsoll_data::DataError;
use plimsoll_data::ids::IdSet;
use plimsoll_data::limits::spawn;
use plimsoll_data::printable::{EscapedPath, Name};
use plimsoll_graph::Bytes;
use plimsoll_models::{Encoder, Output, SequenceModel};
use plimsoll_plan::Staging;
use plimsoll_runtime::dynamic::StepSizeChange;
use plimsoll_runtime::health::HealthRecord;
use plimsoll_runtime::identity::{self, InputStamps};
use plimsoll_runtime::machine::MemoryStage;
use plimsoll_runtime::observer::stopped;
use plimsoll_runtime::process::{NAME, ProcessMemory};
use plimsoll_runtime::report::{DeviceReport, path_texts, staging_by_label};
use plimsoll_runtime::run::{BatchSource, RunHarness, SessionEnd, StreamEngine};
use plimsoll_runtime::session::{Session, SessionModel, SessionRequest, StopCheck};
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{
    Budget, FinishedBytes, Level, Model, Observer, Progress, RuntimeError, Settings, Tokenizer, hub, price,
    replicas_for_input,
};
use resume::JournalPlan;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use states::LayerSelection;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Options of [`embed`].
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedOptions {
    /// The model, an encoder or a decoder: a folder, a weight file or a Hugging Face Hub id.
    pub model: String,
    /// Sequence files, and folders of them; `-` is standard input.
    pub inputs: Vec<PathBuf>,
    /// Output file, or output folder with a file per input.
    pub output: EmbedDestination,
    /// Whether existing output files are overwritten; otherwise they are errors.
    pub force: bool,
    /// Whether anomalies of the input are errors: empty records, repeated ids, dropped characters, unknown tokens, files without
    /// a record.
    pub strict: bool,
    /// Pooling of the hidden states of a sequence.
    pub pool: Pooling,
    /// Layers to write, numbered as in [`plimsoll_models::Output::HiddenOf`]; negative numbers count from the last
    /// layer, which is -1. The results then have an additional layer dimension. `None` writes the last layer,
    /// without that dimension.
    pub layers: Option<Vec<i64>>,
    /// Element type of the values in the files.
    pub values: ValueType,
    /// Whether sequences are reordered by length when they are packed into steps, which fills the steps better. The
    /// results are identical and in input order.
    pub sort_by_length: bool,
    /// Maximum sequence length in letters (residues or bases; bytes of text); `None` is [`ESM_LENGTH`] for ESM-2 and
    /// no limit for other models.
    pub max_length: Option<usize>,
    /// Whether longer sequences are truncated to `max_length`; otherwise they are errors.
    pub truncate: bool,
    /// Whether a protein model computes embeddings of sequences whose letters are those of DNA; otherwise they are errors.
    pub allow_dna: bool,
    /// Number of batches, per tokenizer thread, that tokenization may run ahead of the encoder.
    pub prefetch: usize,
    /// Whether finished rows are kept in a journal beside the output, from which an interrupted run resumes. It takes as
    /// much disk space as the results in f32.
    pub journal: bool,
    /// Time between two commits of finished rows to the journal.
    pub commit_every: Duration,
    /// Device, threads, memory budget and precision.
    pub settings: Settings,
}

impl EmbedOptions {
    /// The mean embeddings of the sequences of a file with the usual settings: the last layer, in f32, no file replaced.
    pub fn usual(model: impl Into<String>, input: impl Into<PathBuf>, output: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            inputs: vec![input.into()],
            output: EmbedDestination::File(output.into()),
            force: false,
            strict: false,
            pool: Pooling::Mean,
            layers: None,
            values: ValueType::F32,
            sort_by_length: true,
            max_length: None,
            truncate: false,
            allow_dna: false,
            prefetch: 2,
            journal: true,
            commit_every: Duration::from_secs(5),
            settings: Settings::default(),
        }
    }

    /// The files that a run with these options reads.
    pub fn input_files(&self) -> InputFiles {
        let mut files = InputFiles::default();
        self.inputs.iter().for_each(|path| files.add_file_or_folder(path));
        hub::add_model_files(&self.model, &mut files);
        files
    }
}

/// Destination of the results. The columns of parquet tables are described in [`plimsoll_data::rows::ParquetWriter`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EmbedDestination {
    /// One file for all inputs; its extension selects the format.
    File(PathBuf),
    /// One file per input, in a folder that is created if it does not exist. The file is named after its input,
    /// without the extensions of sequence and compression formats.
    PerInput {
        /// The folder.
        folder: PathBuf,
        /// Format of the files.
        format: EmbedFormat,
    },
}

/// File format of the results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbedFormat {
    /// `OUT.npy`, an array with one row per sequence, `OUT.ids.txt` with the ids, and `OUT.json` with metadata and ids.
    #[default]
    Npy,
    /// `OUT.npz`: the arrays `embeddings`, `ids`, `lengths` and `metadata` (JSON); with [`Pooling::Tokens`] the rows of all
    /// tokens, sequence after sequence, and `offsets`, the first row of each sequence.
    Npz,
    /// `OUT.safetensors`: the same array with the ids in the metadata, or, with [`Pooling::Tokens`], one tensor
    /// per id.
    Safetensors,
    /// `OUT.parquet`: a table with the columns id, length and embedding (one embedding column for each
    /// requested layer); with [`Pooling::Tokens`] a row for each token, with the column token.
    Parquet,
}

/// Maximum number of residues per sequence in the training of ESM-2: 1024 tokens less BOS and EOS (Lin et al.
/// 2023).
pub const ESM_LENGTH: usize = 1022;

/// Pooling: how the hidden states `(T, D)` of a sequence become its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The mean, `(D)`: over residues for ESM-2, over all tokens for other models.
    #[default]
    Mean,
    /// The hidden state of the first token (BOS of ESM-2, CLS of DNABERT-S), `(D)`. The first token of a decoder has seen
    /// no other token.
    Cls,
    /// The hidden state of the last token of a decoder, `(D)`, which has seen all other tokens. Refused for encoders,
    /// whose last token is a special token.
    Last,
    /// The hidden state of every token, `(tokens, D)`: without BOS and EOS for ESM-2, with CLS and SEP for
    /// DNABERT-S; decoders have no start and end tokens.
    Tokens,
}

impl Pooling {
    /// Name of the pooling on the command line and in metadata.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Cls => "cls",
            Self::Last => "last",
            Self::Tokens => "tokens",
        }
    }
}

/// Summary of a completed run of [`embed`] or [`classify`](classify::classify).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EmbedReport {
    /// Version of Plimsoll.
    #[serde(rename = "plimsoll")]
    pub version: &'static str,
    /// The files that were written.
    #[serde(serialize_with = "path_texts")]
    pub files: Vec<PathBuf>,
    /// Number of sequences in the files.
    pub sequences: u64,
    /// Number of values of a row, D (for a classifier, the number of classes).
    pub width: u64,
    /// Number of records without letters, which were skipped.
    #[serde(rename = "skipped", serialize_with = "skipped")]
    pub empty: u64,
    /// Number of records whose name in the results is not their id (see [`plimsoll_data::names`]).
    pub renamed: u64,
    /// Number of sequences that were truncated.
    pub truncated: u64,
    /// Number of unknown tokens in the sequences.
    #[serde(rename = "unknown_tokens")]
    pub unknown: u64,
    /// Number of tokens that the encoder computed.
    pub tokens: u64,
    /// Duration of the command in seconds.
    pub seconds: f64,
    /// `tokens` divided by the seconds since the weights were loaded.
    pub tokens_per_second: f64,
    /// Used fraction of the token capacity of all packs but the last; `None` if there was only one pack.
    #[serde(rename = "packing_fill_but_last")]
    pub fill: Option<f64>,
    /// The plan against the memory budget, in one line.
    #[serde(rename = "memory")]
    pub memory_line: String,
    /// The planned host memory of the process outside of the arena, per line of the ledger.
    #[serde(serialize_with = "staging_by_label")]
    pub process: Vec<Staging>,
    /// Work of each device.
    pub devices: Vec<DeviceReport>,
    /// Changes of the size of the steps.
    pub size_changes: Vec<StepSizeChange>,
    /// Memory at the end of each stage.
    pub stages: Vec<MemoryStage>,
    /// Health of the whole run.
    pub health: Option<HealthRecord>,
}

/// Serializes the number of skipped records by the reason to skip them.
fn skipped<S: Serializer>(empty: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map([("empty", empty)])
}

/// Computes the embeddings of all sequences of `options.inputs` and writes them to `options.output`.
pub fn embed(options: &EmbedOptions, observer: &mut dyn Observer) -> Result<EmbedReport, EmbedError> {
    let start = Instant::now();
    let guard = OutputGuard::new(options.input_files(), options.force);
    let listing = Listing::of(&options.inputs, None)?;
    // Of a folder with files of both alphabets the model decides which are read.
    let early = if listing.is_mixed() {
        None
    } else {
        Some(output::lock(&options.output, &listing.paths(), options.pool, guard.clone())?)
    };
    // Open the inputs first, so that a missing file is an error before the model is downloaded or loaded.
    Reader::open(listing.paths())?;
    let model = Model::open_with(&options.model, &HubEnv::from_process(), observer)?;
    let digests = BackgroundDigests::start(model.weight_file(), model.described_by())?;
    let options =
        &EmbedOptions { inputs: listed(&options.inputs, model.tokenizer(), observer)?, ..options.clone() };
    let (format, targets) = match early {
        Some(locked) => locked,
        None => output::lock(&options.output, &options.inputs, options.pool, guard)?,
    };
    let architecture = model.architecture();
    if let (Pooling::Last, SequenceModel::Encoder(_)) = (options.pool, &architecture) {
        return Err(EmbedError::LastOfEncoder { family: architecture.family() });
    }
    let states = LayerSelection::new(options.pool, options.layers.as_deref(), architecture.layers())?;
    let outputs = states.outputs();
    let width = architecture.hidden_size() as usize;
    let results = EmbeddingFiles::new(targets, ResultSchema { states, width, values: options.values, format });
    run(
        options,
        EmbedJob { command: "embed", start, model: &model, digests, outputs, width, results },
        observer,
    )
}

/// Job of [`run`]: the model, its outputs, and the writer of the results.
struct EmbedJob<'a, R> {
    /// Name of the command.
    command: &'static str,
    start: Instant,
    model: &'a dyn SessionModel,
    digests: BackgroundDigests,
    /// Outputs that are concatenated to the values of a sequence, see [`SessionRequest::outputs`].
    outputs: Vec<Output>,
    /// Number of values of a row.
    width: usize,
    results: R,
}

/// Digests of the files of a model, computed by a thread, because large files take minutes.
struct BackgroundDigests(Receiver<Result<BTreeMap<String, String>, WeightsError>>);

impl BackgroundDigests {
    /// Starts to hash the weights; `described_by` has the digests of the other files.
    fn start(weights: &Arc<Weights>, described_by: &[(&'static str, String)]) -> Result<Self, RuntimeError> {
        let (sender, receiver) = channel();
        let weights = Arc::clone(weights);
        let described_by = described_by.to_vec();
        // The receiver is gone if the run has failed meanwhile.
        spawn("digests", move || drop(sender.send(identity::digests(&weights, &described_by))))
            .map_err(RuntimeError::thread("digests"))?;
        Ok(Self(receiver))
    }

    /// Waits for the digests.
    fn finish(self, observer: &dyn Observer) -> Result<BTreeMap<String, String>, RuntimeError> {
        loop {
            match self.0.recv_timeout(Duration::from_millis(50)) {
                Ok(digests) => return Ok(digests?),
                Err(RecvTimeoutError::Timeout) => stopped(observer, STOPPED)?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(RuntimeError::bug("the digests of the model were not computed"));
                }
            }
        }
    }
}

/// Expands folders to the files that the model reads, and reports what is skipped.
fn listed(
    paths: &[PathBuf],
    tokenizer: &Tokenizer,
    observer: &mut dyn Observer,
) -> Result<Vec<PathBuf>, EmbedError> {
    let listing = Listing::of(paths, tokenizer.alphabet())?;
    if let Some(line) = listing.skipped_line() {
        observer.say(Level::Warning, &line);
    }
    Ok(listing.paths())
}

/// Streams the input through the graph of a model into result files; shared by [`embed`] and
/// [`classify`](classify::classify).
fn run<R: FileRows>(
    options: &EmbedOptions,
    job: EmbedJob<'_, R>,
    observer: &mut dyn Observer,
) -> Result<EmbedReport, EmbedError> {
    let EmbedJob { command, start, model, digests, outputs, width, mut results } = job;
    let settings = &options.settings;
    let mut watch = Watch::start(command, None, settings.machines(1));
    watch.end_stage("opened", None);
    let limits = limits(options, &model.architecture())?;
    let source = InputSource { options, model, limits };
    observer.say(Level::Detail, "reading the input once to find the longest sequence");
    let stamps = InputStamps::over(&options.inputs);
    let mut measured = source.measure(LengthUnit::Letters, &results, observer)?;
    // With byte pairs, the number of letters only bounds the number of tokens from above. If that bound is longer than
    // the steps that saturate the device, read the input again and count tokens, because every step must hold
    // the longest sequence.
    let is_exact = match model.tokenizer() {
        Tokenizer::Esm => true,
        Tokenizer::Bpe(_) | Tokenizer::Text(_) => measured.longest.is_none() || measured.sequences.is_none(),
    };
    measured.names.iter().try_for_each(|names| results.check_names(names).map_err(DataError::new))?;
    let saturation = settings.target()?.saturation;
    if !is_exact && measured.longest.is_some_and(|longest| longest > saturation) {
        measured = source.measure(LengthUnit::Tokens, &results, observer)?;
    }
    let budget = settings.read_budget()?;
    let billed = ProcessMemory::of(settings).is_some();
    let pipe = budget.of_pipe().filter(|_| billed && measured.sequences.is_none());
    let pipe_limits = pipe.map(|pipe_limits| {
        // The number of records of a pipe is unknown: the budget for names must also hold the share of each
        // record in the writer, beside its entry in the set of names (`NAME` bytes).
        let of_one_record = results.memory_bytes(Some(1), pipe_limits.longest_name);
        let of_none = results.memory_bytes(Some(0), pipe_limits.longest_name);
        let records = pipe_limits.records * NAME / (NAME + of_one_record - of_none);
        // Without a length limit, each of the `batches` batches in the queues can hold a record of maximum length, at
        // `LETTER` bytes per letter. The queues together get eight times the budget of the record that is being
        // read, which bounds the length of a record.
        let waiting = 8 * pipe_limits.longest / (batches(options) * LETTER);
        let longest =
            if limits.letters.is_some() { pipe_limits.longest } else { pipe_limits.longest.min(waiting) };
        InputExtent { records, longest, ..pipe_limits }
    });
    if let Some(pipe_limits) = &pipe_limits {
        (measured.longest_letters, measured.longest_name) = (pipe_limits.longest, pipe_limits.longest_name);
        measured.pipe_limits = Some(pipe_limits.clone());
    }
    let records = pipe_limits.as_ref().map_or(measured.sequences, |pipe_limits| Some(pipe_limits.records));
    // Before the memory of the process is read, which then has all that hashing needs: otherwise the reading would depend on how
    // far the hashing is, and the least budget that a refusal names might not suffice in the next run.
    let digests = digests.finish(observer)?;
    let process =
        process(options, &measured, limits, results.memory_bytes(records, measured.longest_name), &budget);
    let plan = |measured: &InputMeasurements, budget: &Budget| {
        let request = SessionRequest {
            outputs: outputs.clone(),
            longest: measured.longest,
            sequences: measured.sequences,
            order: if options.sort_by_length { Order::ByLength } else { Order::Input },
            worthwhile_replicas: replicas_for_input(&options.inputs),
            settings: settings.clone(),
        };
        Session::plan_within(&[model], &request, budget.with(process.clone()))
    };
    let planned = match plan(&measured, &budget) {
        // The exact number of tokens is smaller than the bound from letters, and its plan may fit.
        Err(_) if !is_exact => {
            measured = source.measure(LengthUnit::Tokens, &results, observer)?;
            plan(&measured, &budget)?
        }
        planned => planned?,
    };
    watch.end_stage("planned", None);
    let facts = facts(options, &digests, planned.program())?;
    let journal = measured.inputs.as_ref().filter(|_| options.journal).map(|inputs| JournalPlan {
        path: results.journal().to_owned(),
        key: key(options, command, inputs, &digests, &facts),
        block: journal_block(options, &budget),
        every: options.commit_every,
        stamps,
    });
    let results = match journal.map(|plan| plan.open(results.force())).transpose()? {
        Some(opened) => {
            results.begin(&facts, opened.committed)?;
            Journaled { inner: results, journal: Some(opened.writer), replay: opened.replay }
        }
        None => {
            results.begin(&facts, 0)?;
            Journaled { inner: results, journal: None, replay: None }
        }
    };
    say_journal(options, &results, observer);
    let kept = match &results.journal {
        Some(_) => format!(
            "finished rows are kept in {}; the same command continues after them",
            EscapedPath(results.inner.journal())
        ),
        None => STOPPED.to_owned(),
    };
    let mut harness = RunHarness { watch: &mut watch, observer };
    let steps = harness.start_session(planned.stages(), 0, planned.stage_start())?;
    let session = planned.session(steps)?;

    let naming = match measured.inputs {
        Some(_) => Naming::OfFiles(std::mem::take(&mut measured.ids)),
        None => Naming::OfPipe,
    };
    let front = source.open(pipe_limits, naming)?;
    let mut engine = EmbedEngine::new(session, options.pool, model.tokenizer(), results);
    let loaded = Instant::now();
    let streamed = stream(options, front, &mut engine, &kept, &mut harness);
    let counts = match streamed {
        Ok(counts) => counts,
        Err(error) => {
            // The error that ended the run is reported. If the rows cannot be kept, the next run computes them again.
            let _ = engine.save();
            return Err(error);
        }
    };
    same_inputs(measured.inputs.as_deref(), &counts.inputs)?;
    harness.watch.end_stage("computed", None);
    let fill = engine.fill();
    let tokens = engine.tokens();
    let sequences = engine.sequences();
    let end = SessionEnd { program: engine.program_in_use(), usage: engine.usage(), held: Bytes::ZERO };
    harness.end_session(planned.stages(), &end, || {
        planned.stages().remedies(|budget| Ok(plan(&measured, budget)?.into_stages()))
    });
    let usage = engine.usage().to_vec();
    let written = engine.finish()?;
    watch.end_stage("written", None);
    for result in written.iter().filter(|result| result.sequences == 0) {
        let text = format!("the input contains no sequence: {} has no row", result.files[0].display());
        observer.say(Level::Warning, &text);
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(EmbedReport {
        version: env!("CARGO_PKG_VERSION"),
        files: written.into_iter().flat_map(|result| result.files).collect(),
        sequences,
        width: width as u64,
        empty: counts.empty,
        renamed: counts.renamed,
        truncated: counts.truncated,
        unknown: counts.unknown.tokens,
        tokens,
        seconds,
        tokens_per_second: tokens as f64 / loaded.elapsed().as_secs_f64().max(1e-9),
        fill: (fill.packs > 1).then(|| fill.but_last()),
        memory_line: planned.stages().memory_line(0, "outputs"),
        process: planned.stages().site().budget().process.clone(),
        devices: DeviceReport::of(&usage, seconds),
        size_changes: watch.size_changes().to_vec(),
        stages: watch.stages().to_vec(),
        health: watch.record().cloned(),
    })
}

/// Metadata of the result files: version, model, and how its values were computed.
fn facts(
    options: &EmbedOptions,
    digests: &BTreeMap<String, String>,
    program: &plimsoll_plan::Program,
) -> Result<ResultFacts, RuntimeError> {
    Ok(ResultFacts {
        model: options.model.clone(),
        digests: digests.clone(),
        arithmetic: options.settings.arithmetic()?,
        kernels: price::kernels(program),
        max_length: options.max_length,
    })
}

/// Key of the journal: version, command, and everything that the rows and their names depend on.
fn key(
    options: &EmbedOptions,
    command: &str,
    inputs: &[Input],
    digests: &BTreeMap<String, String>,
    facts: &ResultFacts,
) -> Value {
    let per_input = matches!(options.output, EmbedDestination::PerInput { .. });
    let inputs: Vec<Value> =
        inputs.iter().map(|input| json!({"bytes": input.bytes, "sha256": input.sha256_hex()})).collect();
    json!({
        "plimsoll": env!("CARGO_PKG_VERSION"),
        "command": command,
        "identity": {
            "inputs": inputs,
            "models": digests,
            "parameters": {
                "pool": options.pool.name(),
                "layers": options.layers,
                "max_length": options.max_length,
                "truncate": options.truncate,
                "per_input": per_input,
            },
            "arithmetic": facts.arithmetic,
        },
    })
}

/// Bytes of a block of the journal. Rows of tokens are large, and a commit of each would wait for the disk too often.
/// A block takes little of a small host budget.
fn journal_block(options: &EmbedOptions, budget: &Budget) -> usize {
    let block_bytes: u64 = match options.pool {
        Pooling::Mean | Pooling::Cls | Pooling::Last => 1 << 20,
        Pooling::Tokens => 4 << 20,
    };
    // The same for every budget of host memory: the least budget that a refusal names must suffice.
    budget.of_host().map_or(block_bytes, |_| 64 << 10) as usize
}

/// Says how an interruption of the run ends.
fn say_journal<R: FileRows>(options: &EmbedOptions, results: &Journaled<R>, observer: &mut dyn Observer) {
    if let Some(replay) = results.replay.as_ref().filter(|replay| replay.rows > 0) {
        let rows = replay.rows;
        let path = EscapedPath(results.inner.journal());
        observer.say(Level::Info, &format!("{rows} sequences are finished ({path}): resuming after them"));
    }
    if results.journal.is_none() && options.journal {
        observer.say(Level::Info, "the input can be read only once, so an interrupted run starts over");
    }
}

/// Checks that the inputs are the same as in the first pass over them.
fn same_inputs(before: Option<&[Input]>, read: &[Input]) -> Result<(), EmbedError> {
    match before.unwrap_or_default().iter().zip(read).find(|(a, b)| a != b) {
        None => Ok(()),
        Some((input, _)) => Err(EmbedError::InputChanged { path: input.path.clone() }),
    }
}

/// The inputs of a run, and how they are read.
#[derive(Clone, Copy)]
struct InputSource<'a> {
    options: &'a EmbedOptions,
    model: &'a dyn SessionModel,
    limits: SequenceLimits,
}

impl InputSource<'_> {
    /// Opens all inputs for reading. `most` limits the records of a pipe.
    fn open(self, most: Option<InputExtent>, naming: Naming) -> Result<SequencePipeline, RuntimeError> {
        SequencePipeline::open(InputOptions {
            inputs: &self.options.inputs,
            per_input: matches!(self.options.output, EmbedDestination::PerInput { .. }),
            tokenizer: self.model.tokenizer().clone(),
            limits: self.limits,
            most,
            naming,
        })
    }

    /// Reads the input once and returns the length of its longest sequence, in tokens, and the number of sequences.
    /// `Err` if a sequence exceeds the limit. With `Unit::Letters` the length is the maximum number of tokens for
    /// the number of letters, which is exact for ESM-2. A pipe can be read only once: it is not read, and the length
    /// limit is returned.
    fn measure(
        self,
        unit: LengthUnit,
        results: &impl FileRows,
        observer: &dyn Observer,
    ) -> Result<InputMeasurements, EmbedError> {
        let Self { options, model, limits } = self;
        let front = self.open(None, Naming::Measured)?;
        if front.bytes_total().is_none() {
            let longest = limits.letters.map(|letters| model.tokenizer().most_tokens(letters as u64));
            return Ok(InputMeasurements { longest, ..InputMeasurements::default() });
        }
        let mut longest = 0;
        let mut measured = InputMeasurements::default();
        let mut sequences = 0;
        let mut stream = front.start(options.settings.tokenizers(), options.prefetch.max(1), unit)?;
        while let Some(batch) = stream.next(&mut || stopped(observer, STOPPED))? {
            stopped(observer, STOPPED)?;
            strict(options, &batch)?;
            for (sequence, length) in batch.heads.iter().zip(batch.lengths()) {
                longest = longest.max(match unit {
                    LengthUnit::Letters => model.tokenizer().most_tokens(length as u64),
                    LengthUnit::Tokens => length as u64,
                });
                measured.longest_letters = measured.longest_letters.max(sequence.length);
                measured.longest_name = measured.longest_name.max(sequence.id.len() as u64);
                sequences += 1;
                if measured.names.len() <= sequence.result {
                    measured.names.resize(sequence.result + 1, NameSizes::default());
                }
                let names = &mut measured.names[sequence.result];
                names.count += 1;
                names.longest = names.longest.max(sequence.id.len() as u64);
                names.bytes += results.name_bytes(&sequence.id);
            }
            if let Some(InputSummary { inputs, ids, renamed }) = batch.summary {
                measured.inputs = Some(inputs);
                measured.ids = ids;
                measured.renamed = renamed;
            }
        }
        Ok(InputMeasurements { longest: Some(longest), sequences: Some(sequences), ..measured })
    }
}

/// The length limit of the options, or the default of the model family. `Err` if sequences should be truncated
/// and neither gives a limit.
fn limits(options: &EmbedOptions, model: &SequenceModel) -> Result<SequenceLimits, EmbedError> {
    let letters = match model {
        SequenceModel::Encoder(Encoder::Esm2(_)) => options.max_length.or(Some(ESM_LENGTH)),
        SequenceModel::Encoder(Encoder::DnabertS(_)) | SequenceModel::Decoder(_) => options.max_length,
    };
    if options.truncate && letters.is_none() {
        return Err(EmbedError::NoLimit { family: model.family() });
    }
    Ok(SequenceLimits { letters, truncate: options.truncate, allow_dna: options.allow_dna })
}

/// Properties of the input that a run must know before it plans.
#[derive(Default)]
struct InputMeasurements {
    /// Tokens of the longest sequence, or an upper bound; `None` for a pipe without a length limit.
    longest: Option<u64>,
    /// Letters of the longest record before truncation.
    longest_letters: u64,
    /// Number of sequences; `None` for a pipe.
    sequences: Option<u64>,
    /// Bytes of the longest name.
    longest_name: u64,
    /// Limits on the records of a pipe, from the memory budget.
    pipe_limits: Option<InputExtent>,
    /// The files with their digests; `None` for a pipe.
    inputs: Option<Vec<Input>>,
    /// Sizes of the names of each result.
    names: Vec<NameSizes>,
    /// Ids of the records of each result that has a record which needs another name than its id.
    ids: Vec<IdSet>,
    /// Number of records that need another name than their id.
    renamed: u64,
}

/// Upper bound of the batches between the reader and the steps: the queues of the tokenizer threads, the
/// batches that the threads hold, and those at both ends.
fn batches(options: &EmbedOptions) -> u64 {
    let workers = options.settings.tokenizers().max(1);
    (workers * options.prefetch.max(1) + 2 * workers + 2) as u64
}

/// Bytes of one letter and its token (`u8` and `i32`) in a batch, doubled because vectors grow by doubling.
const LETTER: u64 = 2 * (1 + 4);

/// Host memory of the process outside of the arena, as lines of the ledger; empty if no budget bounds host memory.
/// Must be called after the input has been measured: measuring runs the threads and queues of the run, so the
/// heap has the size that it will have in the run.
fn process(
    options: &EmbedOptions,
    measured: &InputMeasurements,
    limits: SequenceLimits,
    written: u64,
    budget: &Budget,
) -> Vec<Staging> {
    let settings = &options.settings;
    let Some(mut process) = ProcessMemory::of(settings) else { return vec![] };
    process.add_threads(settings, settings.tokenizers().max(1) + 1);
    let batches = batches(options);
    let letters =
        limits.letters.map_or(measured.longest_letters, |limit| measured.longest_letters.min(limit as u64));
    let batch_bytes = (BATCH_LETTERS as u64 + letters) * LETTER;
    let max_sequences = batches * BATCH_LETTERS as u64;
    let sequences = measured.sequences.unwrap_or(max_sequences).min(max_sequences);
    // A batch is full when its names reach `BATCH_NAMES`, which the last name may exceed by its length.
    let names = (sequences * measured.longest_name).min(batches * (BATCH_NAMES as u64 + measured.longest_name));
    let heads = 96 * sequences + 2 * names;
    process.add_queues(settings, batches * batch_bytes + heads);
    let records =
        measured.pipe_limits.as_ref().map_or(measured.sequences.unwrap_or_default(), |limits| limits.records);
    // With a record that needs another name, the ids of all records are held beside the names.
    let sets = if measured.renamed > 0 { 2 } else { 1 };
    process.add("names of records", records * NAME * sets + (64 << 10));
    if options.journal && measured.inputs.is_some() {
        // A block, its frame, and a block of the journal from which the run resumes.
        process.add("journal of finished rows", 3 * journal_block(options, budget) as u64);
    }
    if let Some(limits) = &measured.pipe_limits {
        // A pipe is not measured, so the heap does not yet hold a buffer for the longest record. The buffer
        // grows by an eighth at a time.
        process.add("the longest record", limits.longest + limits.longest / 8 + 2 * limits.longest_title);
    }
    process.add("writers", written);
    process.lines
}

/// Counts of skipped, renamed, truncated and RNA records, and of unknown tokens.
#[derive(Default)]
struct InputCounts {
    empty: u64,
    renamed: u64,
    truncated: u64,
    rna: u64,
    unknown: UnknownTokens,
    /// The files that were read, with their digests.
    inputs: Vec<Input>,
}

/// Counts of unknown tokens.
#[derive(Default)]
struct UnknownTokens {
    tokens: u64,
    records: u64,
    /// Id of the first record that has unknown tokens.
    first: String,
}

impl UnknownTokens {
    /// Adds the unknown tokens of a record.
    fn count(&mut self, tokens: usize, id: impl FnOnce() -> String) {
        if self.records == 0 {
            self.first = id();
        }
        self.tokens += tokens as u64;
        self.records += 1;
    }

    /// One line with the counts and the first record; `None` if all tokens are known.
    fn text(&self) -> Option<String> {
        let Self { tokens, records, first } = self;
        let unknown = if *tokens == 1 { "unknown token" } else { "unknown tokens" };
        let of = if *records == 1 { "1 record".to_owned() } else { format!("{records} records") };
        (*records > 0).then(|| {
            format!(
                "{tokens} {unknown} in {of}, the first is '{}': letters that the model does not know",
                Name(first)
            )
        })
    }
}

/// With `--strict`, returns the first anomaly of a batch as an error.
fn strict(options: &EmbedOptions, batch: &SequenceBatch) -> Result<(), EmbedError> {
    if !options.strict {
        return Ok(());
    }
    let SequenceBatch { skipped, renamed, unknown, notes, rna, .. } = batch;
    let anomalies = [
        skipped.first().map(|SkippedRecord::Empty(id)| format!("'{}' is empty", Name(id))),
        renamed.first().map(|RecordRename { id, why, .. }| format!("'{}' {}", Name(id), why.reason())),
        unknown
            .first()
            .map(|RecordUnknowns { id, tokens }| format!("'{}' has {tokens} unknown tokens", Name(id))),
        notes.first().map(ToString::to_string),
        (*rna > 0).then(|| "sequences contain U, which DNA models read as T".to_owned()),
    ];
    match anomalies.into_iter().flatten().next() {
        Some(what) => Err(EmbedError::Strict { what }),
        None => Ok(()),
    }
}

/// Maximum number of warnings about single skipped and renamed records; a last warning gives the totals.
const MAX_LINES: u64 = 10;

/// The engine of a run, with the counts of the records that it has read.
struct EmbedStream<'s, 'a, R> {
    options: &'s EmbedOptions,
    engine: &'s mut EmbedEngine<'a, R>,
    counts: InputCounts,
    start: Instant,
    /// Stored bytes of the input up to the last batch taken.
    read: u64,
    /// Tokens of all batches taken.
    taken: u64,
    /// Records of all batches taken, skipped ones included.
    records: u64,
    finished: FinishedBytes,
}

impl<R: RowWriter> StreamEngine for EmbedStream<'_, '_, R> {
    type Batch = SequenceBatch;
    type Error = EmbedError;

    fn announce(&mut self, batch: &SequenceBatch, observer: &mut dyn Observer) -> Result<(), EmbedError> {
        let counts = &mut self.counts;
        for skipped in &batch.skipped {
            let SkippedRecord::Empty(id) = skipped;
            counts.empty += 1;
            say(counts, format!("'{}' is empty: skipped", Name(id)), observer);
        }
        for RecordRename { id, name, why } in &batch.renamed {
            counts.renamed += 1;
            let id = Name(id);
            let why = why.reason();
            say(counts, format!("'{id}' {why}: in the results this record is named '{name}'"), observer);
        }
        strict(self.options, batch)?;
        for note in &batch.notes {
            observer.say(Level::Warning, &note.to_string());
        }
        for RecordUnknowns { id, tokens } in &batch.unknown {
            counts.unknown.count(*tokens, || id.clone());
        }
        counts.truncated += batch.truncated;
        counts.rna += batch.rna;
        Ok(())
    }

    fn take(&mut self, mut batch: SequenceBatch, stop: StopCheck<'_>) -> Result<(), EmbedError> {
        for (sequence, tokens) in batch.sequences() {
            stop()?;
            if self.engine.replay(sequence)? {
                continue;
            }
            self.taken += tokens.len() as u64;
            self.engine.push(sequence, tokens, stop)?;
        }
        self.read = batch.bytes_read;
        self.records += (batch.heads.len() + batch.skipped.len()) as u64;
        if let Some(summary) = batch.summary.take() {
            self.counts.inputs = summary.inputs;
        }
        Ok(())
    }

    fn drain(&mut self, stop: StopCheck<'_>) -> Result<bool, EmbedError> {
        self.engine.drain(stop)
    }

    fn warnings(&mut self) -> Vec<String> {
        self.engine.steps().warnings()
    }

    fn report_sizes(&mut self, watch: &mut Watch, observer: &mut dyn Observer) {
        self.engine.steps().report_sizes(watch, observer);
    }

    fn progress(&mut self, bytes_total: Option<u64>) -> Progress {
        let tokens = self.engine.tokens();
        Progress {
            bytes: self.finished.update(self.read, bytes_total, tokens, self.taken),
            bytes_total,
            records: self.records,
            sequences: self.engine.sequences(),
            tokens,
            seconds: self.start.elapsed().as_secs_f64(),
        }
    }
}

/// Reads, tokenizes and computes until the input ends. `kept` describes what a signal leaves.
fn stream<R: RowWriter>(
    options: &EmbedOptions,
    front: SequencePipeline,
    engine: &mut EmbedEngine<'_, R>,
    kept: &str,
    harness: &mut RunHarness<'_>,
) -> Result<InputCounts, EmbedError> {
    let mut streaming = EmbedStream {
        options,
        engine,
        counts: InputCounts::default(),
        start: Instant::now(),
        read: 0,
        taken: 0,
        records: 0,
        finished: FinishedBytes::default(),
    };
    harness.watch.begin("computing", harness.observer);
    let bytes_total = front.bytes_total();
    let mut input = front.start(options.settings.tokenizers(), options.prefetch.max(1), LengthUnit::Tokens)?;
    harness.stream(&mut input, &mut streaming, kept)?;
    let last = Progress { bytes: streaming.read, ..streaming.progress(bytes_total) };
    harness.show(&last);
    let EmbedStream { counts, .. } = streaming;
    let observer = &mut *harness.observer;
    if counts.empty + counts.renamed > MAX_LINES {
        let InputCounts { empty, renamed, .. } = counts;
        let text = format!(
            "in total, {empty} empty records were skipped, and {renamed} records have another name in the \
                results than in their file"
        );
        observer.say(Level::Warning, &text);
    }
    if counts.truncated > 0 {
        let text = format!("{} sequences were truncated to the maximum length", counts.truncated);
        observer.say(Level::Info, &text);
    }
    if let Some(text) = counts.unknown.text() {
        observer.say(Level::Warning, &text);
    }
    if counts.rna > 0 {
        let text = format!("{} sequences contain the letter U, which is read as T", counts.rna);
        observer.say(Level::Info, &text);
    }
    Ok(counts)
}

/// Hint after a signal: the state of the results.
const STOPPED: &str = "nothing was written; the same command starts over";

/// Reports a skipped or renamed record: the first [`MAX_LINES`] as warnings, all others as details.
fn say(counts: &InputCounts, text: String, observer: &mut dyn Observer) {
    let so_far = counts.empty + counts.renamed;
    observer.say(if so_far <= MAX_LINES { Level::Warning } else { Level::Detail }, &text);
}

/// Forwards the warnings of the engine (failed devices) to the observer.
fn warn<R: RowWriter>(engine: &mut EmbedEngine<'_, R>, observer: &mut dyn Observer) {
    engine.steps().warnings().iter().for_each(|text| observer.say(Level::Warning, text));
}
