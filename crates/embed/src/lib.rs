//! `plimsoll embed`: from sequences to embeddings. The story: open the model, find the longest sequence, plan
//! under the budget, load, stream the input through the encoder, write in input order. Invariant: a value
//! depends on its sequence, the model and the pool, and on nothing else; every sequence is written once,
//! with finite values, or the command fails and names it.
//!
//! Outside of the ledger wait the rows that are computed before those in front of them: at most
//! [`data::pack::MOST_PACKS`] packs of them, in practice about [`data::pack::POOL`].

#![forbid(unsafe_code)]

pub mod classify;
mod engine;
mod error;
mod front;
mod in_memory;
mod output;
mod states;

use data::pack::{MOST_PACKS, Order};
use data::sequence::{Extent, Reader};
use data::weights::HubEnv;
pub use error::EmbedError;
pub use in_memory::embed_sequences;

use engine::{ENCODER, Engine, FileRows, Reading, Rows};
use front::{BATCH_LETTERS, BATCH_NAMES, Front, Limits, Renamed, Skipped, Unit};
use graph::{Bounds, Bytes, Graph, VerifyError};
use models::Encoder;
use output::{Kind, Results, Targets};
use plan::Staging;
use runtime::observer::stopped;
use runtime::process::{NAME, Process};
use runtime::session::bounds::{bounds, copies, output_bytes, with_outputs};
use runtime::session::{Part, Request, Stage, Start, Stop, Usage, say_given_back};
use runtime::{
    Budget, EncoderModel, Level, Observer, Progress, RuntimeError, Settings, Tokenizer, replicas_for_input,
};
use serde_json::{Value, json};
use states::States;
use std::path::PathBuf;
use std::time::Instant;

/// What an embedding is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The encoder: a folder, a weight file or a hub id.
    pub model: String,
    /// Sequence files; `-` is standard input.
    pub inputs: Vec<PathBuf>,
    /// Where the result goes.
    pub output: Destination,
    /// Whether a result that is there may be replaced.
    pub force: bool,
    /// What is written of a sequence.
    pub pool: Pool,
    /// The layers whose hidden states are written, as [`models::Output::HiddenOf`] counts them, and from -1
    /// down from the last; results then have a dimension for them. `None` is the last, without it.
    pub layers: Option<Vec<i64>>,
    /// Whether sequences are computed out of turn, by their lengths, so that steps are full. Results are the
    /// same.
    pub sort_by_length: bool,
    /// Letters (residues or bases) of the longest sequence; `None` is [`ESM_LENGTH`] for ESM-2 and no limit
    /// for DNABERT-S.
    pub max_length: Option<usize>,
    /// Whether longer sequences are cut; otherwise they are errors.
    pub truncate: bool,
    /// Batches of tokens that reading may be ahead of computing.
    pub prefetch: usize,
    /// The machine.
    pub settings: Settings,
}

/// Where results go. Tables are described in [`data::rows::ParquetWriter`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// One file for all inputs; what its name ends with is its format.
    File(PathBuf),
    /// A file for each input, in a folder that is made if it is not there. The file is named as its input,
    /// without what says the input's format.
    PerInput {
        /// The folder.
        folder: PathBuf,
        /// What its files are.
        format: Format,
    },
}

/// What a result is written as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// `OUT.npy`, an array of a row for each sequence, and `OUT.ids.txt`.
    #[default]
    Npy,
    /// `OUT.safetensors`: the same array with the ids in the metadata, or a tensor for each id.
    Safetensors,
    /// `OUT.parquet`: a table of id, length and embedding.
    Parquet,
}

/// Residues that ESM-2 was trained on: 1024 tokens without BOS and EOS (Lin et al. 2023).
pub const ESM_LENGTH: usize = 1022;

/// What is written of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pool {
    /// One row, the mean: over residues for ESM-2, over all tokens for DNABERT-S.
    #[default]
    Mean,
    /// One row, the first token's (CLS, BOS).
    Cls,
    /// A row for each residue for ESM-2 (BOS and EOS left out), for each token for DNABERT-S (CLS and SEP
    /// included).
    Tokens,
}

impl Pool {
    /// Its name on the command line and in metadata.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Cls => "cls",
            Self::Tokens => "tokens",
        }
    }
}

/// How an embedding ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The files that were written.
    pub files: Vec<PathBuf>,
    /// Sequences in them.
    pub sequences: u64,
    /// Values of a row.
    pub width: u64,
    /// Records without letters, which were skipped.
    pub empty: u64,
    /// Later records of an id, which results name `id#FILE` or `id#FILE.RECORD`.
    pub renamed: u64,
    /// Sequences that were cut.
    pub truncated: u64,
    /// Tokens through the encoder.
    pub tokens: u64,
    /// Seconds of the whole command.
    pub seconds: f64,
    /// Tokens by seconds since the weights were loaded.
    pub tokens_per_second: f64,
    /// Packing fill without the last pack; `None` where the last was the only one.
    pub fill: Option<f64>,
    /// The plan against the budget, in one line.
    pub memory_line: String,
    /// What the process itself was planned to take of the host's memory.
    pub process: Vec<Staging>,
    /// What each device did.
    pub devices: Vec<Usage>,
}

impl Report {
    /// The same as JSON.
    pub fn to_json(&self) -> Value {
        let files: Vec<String> = self.files.iter().map(|p| p.display().to_string()).collect();
        json!({
            "plimsoll": env!("CARGO_PKG_VERSION"),
            "files": files,
            "sequences": self.sequences,
            "width": self.width,
            "skipped": {"empty": self.empty},
            "renamed": self.renamed,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "packing_fill_but_last": self.fill,
            "memory": self.memory_line,
            "process": runtime::process::to_json(&self.process),
            "devices": self.devices.iter().map(|device| device.to_json(self.seconds)).collect::<Vec<_>>(),
        })
    }
}

/// Embeds.
pub fn embed(options: &Options, observer: &mut dyn Observer) -> Result<Report, EmbedError> {
    let start = Instant::now();
    let targets = Targets::new(&options.output, &options.inputs, options.pool, options.force)?;
    // Missing files are found before anything else happens.
    Reader::open(&options.inputs)?;
    let model = EncoderModel::open(&options.model, &HubEnv::from_process(), observer)?;
    let states = States::new(options.pool, options.layers.as_deref(), &model.encoder)?;
    let (metadata, outputs) = (metadata(options, &states), states.outputs());
    let kind = Kind { states, width: model.encoder.hidden_size() as usize, metadata };
    let results = Results::create(targets, kind)?;
    let reading = Reading {
        pool: options.pool,
        outputs: outputs.iter().map(|output| output.name()).collect(),
        width: model.encoder.hidden_size() as usize,
        order: if options.sort_by_length { Order::ByLength } else { Order::Input },
    };
    let graph = &|bounds| model.encoder.graph(bounds, &outputs);
    run(options, start, &model, reading, results, graph, observer)
}

/// Builds the graph of a step within bounds.
type GraphOf<'a> = &'a dyn Fn(Bounds) -> Result<Graph, VerifyError>;

/// Sequences through an encoder's graph into results.
fn run(
    options: &Options,
    start: Instant,
    model: &EncoderModel,
    reading: Reading,
    results: impl FileRows,
    graph: GraphOf<'_>,
    observer: &mut dyn Observer,
) -> Result<Report, EmbedError> {
    let settings = &options.settings;
    let limits = limits(options, &model.encoder)?;
    let width = reading.width as u64;
    observer.say(Level::Detail, "reading the input once to find the longest sequence");
    let mut measured = measure(options, model, limits, Unit::Letters, observer)?;
    // A longer bound would make steps longer than they need be.
    let is_exact = match &model.tokenizer {
        Tokenizer::Esm => true,
        Tokenizer::Bpe(_) => measured.longest.is_none() || measured.sequences.is_none(),
    };
    let saturation = settings.target()?.saturation;
    if !is_exact && measured.longest.is_some_and(|longest| longest > saturation) {
        measured = measure(options, model, limits, Unit::Tokens, observer)?;
    }
    let budget = settings.read_budget()?;
    let billed = Process::of(settings).is_some();
    let pipe = budget.of_pipe().filter(|_| billed && measured.sequences.is_none());
    let most = pipe.map(|most| {
        // What results hold of a record is held beside its name.
        let held = |records| results.held(Some(records), most.longest_name);
        let records = most.records * NAME / (NAME + held(1) - held(0));
        // Whole records wait in the queues where nothing limits their letters: together they have eight times the share of the
        // one that is being read.
        let waiting = 8 * most.longest / (batches(options) * LETTER);
        let longest = if limits.letters.is_some() { most.longest } else { most.longest.min(waiting) };
        Extent { records, longest, ..most }
    });
    if let Some(most) = &most {
        (measured.letters, measured.name) = (most.longest, most.longest_name);
        measured.most = Some(most.clone());
    }
    let records = most.as_ref().map_or(measured.sequences, |most| Some(most.records));
    let process = process(options, &measured, limits, results.held(records, measured.name));
    let worthwhile = replicas_for_input(&options.inputs);
    let plan = |measured: &Measured| {
        settings.plan(request(
            settings,
            measured,
            reading.order,
            worthwhile,
            graph,
            budget.with(process.clone()),
        )?)
    };
    let planned = match plan(&measured) {
        // Fewer tokens than letters may fit.
        Err(_) if !is_exact => plan(&measure(options, model, limits, Unit::Tokens, observer)?)?,
        planned => planned?,
    };
    let session = planned.start(0, start_of(model, reading.order), observer)?;

    let front = open(options, model, limits, most)?;
    let mut engine = Engine::new(session, &model.encoder, reading, results)?;
    let loaded = Instant::now();
    let counts = stream(options, front, &mut engine, observer)?;
    let (fill, tokens, sequences) = (engine.fill(), engine.tokens(), engine.sequences());
    let devices = engine.usage().to_vec();
    say_given_back(&devices, observer);
    planned.site().compare(engine.program(), Bytes::ZERO, "at the end", observer);
    let written = engine.finish()?;
    for result in written.iter().filter(|result| result.sequences == 0) {
        let text = format!("the input contains no sequence: {} has no row", result.files[0].display());
        observer.say(Level::Warning, &text);
    }
    Ok(Report {
        files: written.into_iter().flat_map(|result| result.files).collect(),
        sequences,
        width,
        empty: counts.empty,
        renamed: counts.renamed,
        truncated: counts.truncated,
        tokens,
        seconds: start.elapsed().as_secs_f64(),
        tokens_per_second: tokens as f64 / loaded.elapsed().as_secs_f64().max(1e-9),
        fill: (fill.packs > 1).then(|| fill.but_last()),
        memory_line: planned.memory_line(0, "outputs"),
        process: planned.site().budget().process.clone(),
        devices,
    })
}

/// Request for a plan of the encoder alone, in one stage. Where the length of the longest sequence is not known, a step may be
/// one sequence. `worthwhile` is the number of replicas that the input justifies, `None` without a limit.
fn request<'a>(
    settings: &Settings,
    measured: &Measured,
    order: Order,
    worthwhile: Option<u64>,
    graph: GraphOf<'a>,
    budget: Budget,
) -> Result<Request<'a>, RuntimeError> {
    let (known, sequences) = (measured.longest, measured.sequences);
    let turns = match order {
        Order::ByLength => MOST_PACKS as u64,
        Order::Input => 0,
    };
    let longest = known.unwrap_or(SHORTEST).max(SHORTEST);
    let part = Part {
        name: ENCODER,
        graph: Box::new(move |tokens| graph(bounds(tokens, known.map_or(tokens, |l| l.max(SHORTEST))))),
        policy: settings.policy()?,
        streams: true,
    };
    let stage = Stage {
        parts: vec![part],
        longest,
        finish: Box::new(move |program, replicas| with_outputs(program, copies(replicas), turns, sequences)),
        kept: Box::new(move |program, steps| Bytes(output_bytes(program).0 * (steps as u64 + turns))),
    };
    let replicas = settings.most_replicas(worthwhile);
    Ok(Request { alternatives: vec![vec![stage]], replicas, tokens: settings.tokens, budgets: vec![budget] })
}

/// Start of the session that [`request`] plans.
fn start_of(model: &EncoderModel, order: Order) -> Start<'_> {
    Start { order, weights: vec![model], running: vec![], kept: "outputs" }
}

/// What results say of themselves.
fn metadata(options: &Options, states: &States) -> Vec<(&'static str, String)> {
    let pairs = [("model", options.model.clone()), ("pool", options.pool.name().to_owned())];
    pairs.into_iter().chain(states.text().map(|layers| ("layers", layers))).collect()
}

/// The records of all inputs.
fn open(
    options: &Options,
    model: &EncoderModel,
    limits: Limits,
    most: Option<Extent>,
) -> Result<Front, RuntimeError> {
    let per_input = match options.output {
        Destination::File(_) => false,
        Destination::PerInput { .. } => true,
    };
    Front::open(&options.inputs, per_input, model.tokenizer.clone(), limits, most)
}

/// The letters that a sequence may have, and what happens beyond them.
fn limits(options: &Options, encoder: &Encoder) -> Result<Limits, EmbedError> {
    let letters = match encoder {
        Encoder::Esm2(_) => options.max_length.or(Some(ESM_LENGTH)),
        Encoder::DnabertS(_) => options.max_length,
    };
    if options.truncate && letters.is_none() {
        return Err(EmbedError::NoLimit { family: encoder.family() });
    }
    Ok(Limits { letters, truncate: options.truncate })
}

/// What a run knows of its input before it plans.
#[derive(Clone, Debug, Default)]
struct Measured {
    /// Tokens of the longest sequence; `None` with a pipe, where nothing limits it.
    longest: Option<u64>,
    /// Letters of the longest record as it stands in the input.
    letters: u64,
    /// Sequences; `None` with a pipe.
    sequences: Option<u64>,
    /// Bytes of the longest name.
    name: u64,
    /// The most that the records of a pipe may take.
    most: Option<Extent>,
}

/// Batches of records on their way from the reader to the steps, at most.
fn batches(options: &Options) -> u64 {
    let workers = options.settings.tokenizers().max(1);
    (workers * options.prefetch.max(1) + 2 * workers + 2) as u64
}

/// Bytes of a letter and its token in a batch; vectors grow by doubling.
const LETTER: u64 = 2 * (1 + 4);

/// The lines of the process, where the line is about the host's memory. Its heap is what it held while the input was
/// measured, which is read by the same threads and queues again.
fn process(options: &Options, measured: &Measured, limits: Limits, written: u64) -> Vec<Staging> {
    let settings = &options.settings;
    let Some(mut process) = Process::of(settings) else { return vec![] };
    process.add_threads(settings, settings.tokenizers().max(1) + 1);
    let batches = batches(options);
    let letters = limits.letters.map_or(measured.letters, |limit| measured.letters.min(limit as u64));
    let each = (BATCH_LETTERS as u64 + letters) * LETTER;
    let most = batches * BATCH_LETTERS as u64;
    let sequences = measured.sequences.unwrap_or(most).min(most);
    // A batch is full with so many bytes of names, and holds the one with which it was.
    let names = (sequences * measured.name).min(batches * (BATCH_NAMES as u64 + measured.name));
    let heads = 96 * sequences + 2 * names;
    process.add_queues(settings, batches * each + heads);
    let records = measured.most.as_ref().map_or(measured.sequences.unwrap_or_default(), |most| most.records);
    process.add("names of records", records * NAME + (64 << 10));
    if let Some(most) = &measured.most {
        // What the heap does not hold yet, as it does of files that were measured. A buffer grows by an eighth.
        process.add("the longest record", most.longest + most.longest / 8 + 2 * most.longest_title);
    }
    process.add("writers", written);
    process.lines
}

/// Reads files once for their longest sequence, as `unit` counts it; a sequence over the limit is an error here. Both
/// alphabets have at most one token for a letter, and one at each end, so letters give an upper bound of the tokens, which is
/// exact for proteins. With a pipe: what the limit allows.
fn measure(
    options: &Options,
    model: &EncoderModel,
    limits: Limits,
    unit: Unit,
    observer: &dyn Observer,
) -> Result<Measured, EmbedError> {
    const ENDS: u64 = 2;
    let front = open(options, model, limits, None)?;
    if front.bytes_total().is_none() {
        let longest = limits.letters.map(|letters| letters as u64 + ENDS);
        return Ok(Measured { longest, ..Measured::default() });
    }
    let (mut longest, mut measured) = (0, Measured::default());
    let mut sequences = 0;
    let mut stream = front.start(options.settings.tokenizers(), options.prefetch.max(1), unit)?;
    while let Some(batch) = stream.next(&mut || stopped(observer, STOPPED))? {
        stopped(observer, STOPPED)?;
        for (sequence, length) in batch.heads.iter().zip(batch.lengths()) {
            let ends = match unit {
                Unit::Letters => ENDS,
                Unit::Tokens => 0,
            };
            longest = longest.max(length as u64 + ends);
            measured.letters = measured.letters.max(sequence.length);
            measured.name = measured.name.max(sequence.id.len() as u64);
            sequences += 1;
        }
    }
    Ok(Measured { longest: Some(longest), sequences: Some(sequences), ..measured })
}

/// Tokens of the shortest sequence: one letter between two special tokens.
const SHORTEST: u64 = 3;

/// What happened to records on their way.
#[derive(Default)]
struct Counts {
    empty: u64,
    renamed: u64,
    truncated: u64,
    rna: u64,
}

/// Skipped and renamed records that get a line of their own; the rest is counted.
const MOST_LINES: u64 = 10;

/// Reads and computes until the input ends.
fn stream<R: Rows>(
    options: &Options,
    front: Front,
    engine: &mut Engine<R>,
    observer: &mut dyn Observer,
) -> Result<Counts, EmbedError> {
    let start = Instant::now();
    let mut counts = Counts::default();
    let mut progress = Progress { bytes_total: front.bytes_total(), ..Progress::default() };
    let mut stream = front.start(options.settings.tokenizers(), options.prefetch.max(1), Unit::Tokens)?;
    while let Some(batch) = stream.next(&mut || stopped(observer, STOPPED))? {
        for skipped in &batch.skipped {
            let Skipped::Empty(id) = skipped;
            counts.empty += 1;
            say(&counts, format!("'{id}' is empty: skipped"), observer);
        }
        for Renamed { id, name } in &batch.renamed {
            counts.renamed += 1;
            say(
                &counts,
                format!("'{id}' occurs more than once: in the results this record is named '{name}'"),
                observer,
            );
        }
        counts.truncated += batch.truncated;
        counts.rna += batch.rna;
        let stop: Stop<'_> = &|| stopped(observer, STOPPED);
        let pushed = batch.sequences().try_for_each(|(sequence, tokens)| {
            stop()?;
            engine.push(sequence, tokens, stop)
        });
        progress.bytes = batch.bytes_read;
        progress.records += (batch.heads.len() + batch.skipped.len()) as u64;
        warn(engine, observer);
        pushed?;
        report(engine, &start, &mut progress, observer);
    }
    let drained = engine.drain(&|| stopped(observer, STOPPED));
    warn(engine, observer);
    drained?;
    report(engine, &start, &mut progress, observer);
    if counts.empty + counts.renamed > MOST_LINES {
        let Counts { empty, renamed, .. } = counts;
        let text = format!(
            "in total, {empty} empty records were skipped, and {renamed} records with a repeated id were \
                renamed"
        );
        observer.say(Level::Warning, &text);
    }
    if counts.truncated > 0 {
        observer
            .say(Level::Info, &format!("{} sequences were truncated to the maximum length", counts.truncated));
    }
    if counts.rna > 0 {
        observer
            .say(Level::Info, &format!("{} sequences contain the letter U, which is read as T", counts.rna));
    }
    Ok(counts)
}

/// What a signal leaves of an embedding.
const STOPPED: &str = "nothing was written; the same command starts over";

/// A warning for each of the first skipped and renamed records; the others are told in detail only.
fn say(counts: &Counts, text: String, observer: &mut dyn Observer) {
    let so_far = counts.empty + counts.renamed;
    observer.say(if so_far <= MOST_LINES { Level::Warning } else { Level::Detail }, &text);
}

/// What a device that failed leaves to say.
fn warn<R: Rows>(engine: &mut Engine<R>, observer: &mut dyn Observer) {
    engine.warnings().iter().for_each(|text| observer.say(Level::Warning, text));
}

fn report<R: Rows>(engine: &Engine<R>, start: &Instant, progress: &mut Progress, observer: &mut dyn Observer) {
    progress.sequences = engine.sequences();
    progress.tokens = engine.tokens();
    progress.seconds = start.elapsed().as_secs_f64();
    observer.progress(progress);
}
