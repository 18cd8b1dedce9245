//! `plimsoll predict`: from reads to calls. The story: look at the output folder, open the models, plan
//! under the budget, load, stream the input through both encoders and the head, write results in input
//! order. Invariant: results depend on inputs, weights and `Options::result_key`, and on nothing else.

mod engine;
mod folder;
mod options;
pub mod output;
mod produce;
mod program;
mod queue;
mod record;

pub use options::{Models, Options};

use crate::machine::{Tracker, resident};
use crate::session::{load, memory_line};
use crate::{EncoderModel, HeadModel, Level, Observer, RunError, Settings};
use data::sequence::{Input, Reader, Record};
use data::weights::HubEnv;
use engine::{Engine, Manner};
use exec::Executor;
use folder::Found;
use graph::Bytes;
use models::Encoder;
use output::{Counts, Outputs};
use produce::{Event, Front};
use program::{DNA, HEAD, PROTEIN, Shape};
use record::Story;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How a prediction ended.
#[derive(Debug)]
pub struct Report {
    /// It was all there already; nothing was computed.
    pub already_complete: bool,
    /// Open reading frames that could not be computed.
    pub failed: u64,
    /// Rows of notes.tsv.
    pub notes: u64,
    /// run.json.
    pub run_record: Value,
    /// Records, windows, calls.
    pub counts: Counts,
    /// Where the results are.
    pub output_dir: PathBuf,
    /// Whether the head was trained.
    pub trained: bool,
    /// Seconds of the whole run.
    pub seconds: f64,
    /// Tokens through both encoders by seconds of the whole run.
    pub tokens_per_second: f64,
    /// Packing fill of the nucleotide and the protein encoder without their last packs; `None` where there
    /// was no other.
    pub fill: [Option<f64>; 2],
    /// The plan against the budget, in one line.
    pub memory_line: String,
}

/// The models of a prediction.
pub(crate) struct Opened {
    pub(crate) dna: EncoderModel,
    pub(crate) protein: EncoderModel,
    pub(crate) head: HeadModel,
}

/// Predicts.
pub fn predict(options: &Options, observer: &mut dyn Observer) -> Result<Report, RunError> {
    let start = Instant::now();
    let mut tracker = Tracker::new();
    look_at_inputs(options)?;
    let opened = open(options, observer)?;
    // Held to the end: two runs into one folder would take each other's files.
    let _lock = folder::take(&options.output_dir)?;
    if let Some(report) = already_there(options, &opened)? {
        return Ok(report);
    }
    tracker.track("opened");
    let shape = shape(&opened, options);
    let budget = options.settings.line()?;
    let mut executor = plan(options, budget, &shape)?;
    let memory_line = memory_line(executor.program(), budget);
    observer.say(Level::Info, &memory_line);
    observer.say(Level::Detail, &executor.device().name());
    load(&mut executor, DNA, |p, range, out| opened.dna.read(p, range, out))?;
    load(&mut executor, PROTEIN, |p, range, out| opened.protein.read(p, range, out))?;
    load(&mut executor, HEAD, |p, range, out| opened.head.read(p, range, out))?;
    tracker.track("loaded");

    let outputs = Outputs::create(&options.output_dir, output_options(options, &opened, &shape))?;
    let manner = Manner { strict: options.strict, embeddings: options.save_embeddings.is_some() };
    let mut engine = Engine::new(executor, &shape, outputs, manner);
    let inputs = stream(options, &opened, &mut engine, observer)?;
    tracker.track("computed");

    let fill = engine.fill();
    let (executor, outputs, totals) = engine.into_parts();
    let seconds = start.elapsed().as_secs_f64();
    let identity = record::identity(options, &opened, &inputs)?;
    let (totals, tracker, inputs) = (&totals, &tracker, &inputs[..]);
    let story = Story {
        options,
        opened: &opened,
        executor: &executor,
        budget,
        totals,
        fill,
        seconds,
        tracker,
        inputs,
        identity,
    };
    let mut run_record = story.record()?;
    let counts = outputs.finish(&mut run_record)?;
    let tokens: u64 = totals.tokens.iter().sum();
    Ok(Report {
        already_complete: false,
        failed: totals.failed,
        notes: counts.notes,
        run_record,
        counts,
        output_dir: options.output_dir.clone(),
        trained: opened.head.trained,
        seconds,
        tokens_per_second: tokens as f64 / seconds.max(1e-9),
        fill: fill.map(|f| (f.packs > 1).then(|| f.but_last())),
        memory_line,
    })
}

/// Files that are missing or no sequence files are found before anything else happens.
fn look_at_inputs(options: &Options) -> Result<(), RunError> {
    Reader::open(&options.inputs)?;
    for path in options.inputs.iter().filter(|p| p.is_file()) {
        Reader::open([path])?.read_into(&mut Record::default())?;
    }
    Ok(())
}

fn open(options: &Options, observer: &mut dyn Observer) -> Result<Opened, RunError> {
    let env = HubEnv::from_process();
    let models = &options.models;
    let dna = match &models.dna {
        Some(name) => EncoderModel::open(name, &env)?,
        None => EncoderModel::builtin_dna()?,
    };
    let protein = match &models.protein {
        Some(name) => EncoderModel::open(name, &env)?,
        None => EncoderModel::builtin_protein()?,
    };
    for (model, wanted) in [(&dna, "DNABERT-S"), (&protein, "ESM-2")] {
        let fits = match &model.encoder {
            Encoder::DnabertS(_) => wanted == "DNABERT-S",
            Encoder::Esm2(_) => wanted == "ESM-2",
        };
        if !fits {
            let found = model.encoder.family();
            return Err(RunError::Refused(format!("{}: {wanted} is wanted here, this is {found}", model.name)));
        }
    }
    let (d, p) = (dna.encoder.hidden_size(), protein.encoder.hidden_size());
    let head = match &models.head {
        Some(path) => HeadModel::open(path, d, p)?,
        None => HeadModel::builtin(d, p)?,
    };
    if !head.trained {
        let text = "the built-in models are UNTRAINED: scores are meaningless and every call reads `untrained`; \
                    give --weights with trained ones";
        observer.say(Level::Warning, text);
    }
    if let Some(length) = head.named_length().filter(|&l| l != options.length) {
        let text =
            format!("{} is a head for chunks of {length} bases, --length is {}", head.name, options.length);
        observer.say(Level::Warning, &text);
    }
    Ok(Opened { dna, protein, head })
}

/// The report of a run that is already in the output folder; an error where another run's result is.
fn already_there(options: &Options, opened: &Opened) -> Result<Option<Report>, RunError> {
    let Found::Record(old) = folder::look(&options.output_dir, options.force)? else { return Ok(None) };
    let dir = options.output_dir.display();
    let Some(inputs) = digests(options)? else {
        let text = format!(
            "{dir} holds a result, and standard input cannot be compared with its input; \
                            use --force or another folder with -o"
        );
        return Err(RunError::Refused(text));
    };
    let new = serde_json::json!({ "identity": record::identity(options, opened, &inputs)? });
    if let Some(what) = folder::difference(&old, &new) {
        let text =
            format!("{dir} holds the result of another run ({what}); use --force or another folder with -o");
        return Err(RunError::Refused(text));
    }
    let notes = old["counts"]["notes"].as_u64().unwrap_or(0);
    if options.strict && notes > 0 {
        let text = format!("--strict: the result is in {dir}, with {notes} notes; see notes.tsv there");
        return Err(RunError::Refused(text));
    }
    Ok(Some(Report {
        already_complete: true,
        failed: old["sequences"]["failed"].as_u64().unwrap_or(0),
        notes,
        counts: Counts::from_record(&old),
        output_dir: options.output_dir.clone(),
        trained: opened.head.trained,
        seconds: 0.0,
        tokens_per_second: 0.0,
        fill: [None; 2],
        memory_line: String::new(),
        run_record: old,
    }))
}

/// The digests of the inputs; `None` where one is standard input.
fn digests(options: &Options) -> Result<Option<Vec<Input>>, RunError> {
    if options.inputs.iter().any(|p| p.as_os_str() == "-") {
        return Ok(None);
    }
    let mut reader = Reader::open(&options.inputs)?;
    let mut record = Record::default();
    while reader.read_into(&mut record)? {}
    Ok(Some(reader.inputs().to_vec()))
}

fn shape(opened: &Opened, options: &Options) -> Shape {
    Shape {
        dna: opened.dna.encoder.clone(),
        protein: opened.protein.encoder.clone(),
        head: opened.head.config,
        length: options.length as u64,
    }
}

/// The line was read once: what is free changes from moment to moment.
fn plan(options: &Options, budget: Bytes, shape: &Shape) -> Result<Executor, RunError> {
    let settings = Settings { budget: Some(budget), ..options.settings.clone() };
    let target = settings.target()?;
    let longest = shape.longest_dna().max(shape.longest_protein());
    let program = settings.fit(longest, &mut |tokens| shape.program(&target, tokens))?;
    settings.start(program)
}

fn output_options(options: &Options, opened: &Opened, shape: &Shape) -> output::Options {
    output::Options {
        trained: opened.head.trained,
        threshold: options.threshold,
        keep_intermediate: options.keep_intermediate,
        save_embeddings: options.save_embeddings,
        width: (shape.head.dna + shape.head.protein) as usize,
    }
}

/// Reads and computes until the input ends.
fn stream(
    options: &Options,
    opened: &Opened,
    engine: &mut Engine,
    observer: &mut dyn Observer,
) -> Result<Vec<Input>, RunError> {
    let front = Front {
        length: options.length,
        dna: opened.dna.tokenizer.clone(),
        protein: opened.protein.tokenizer.clone(),
        intermediate: options.keep_intermediate,
        sequences: opened.head.trained,
        workers: options.workers,
        prefetch: options.prefetch,
    };
    let stream = produce::start(front, &options.inputs)?;
    loop {
        let wait = Instant::now();
        let batch = stream.next();
        engine.totals.seconds.waiting += wait.elapsed().as_secs_f64();
        let Some(batch) = batch? else { break };
        say_notes(&batch.events, observer);
        engine.take(batch)?;
        let bytes = stream.bytes_read.load(Ordering::Relaxed);
        observer.progress(&engine.progress(bytes, stream.bytes_total));
    }
    engine.drain()?;
    let total = stream.bytes_total;
    let inputs = stream.finish()?;
    let bytes = inputs.iter().map(|i| i.bytes).sum();
    observer.progress(&engine.progress(bytes, total));
    observer.say(Level::Detail, &format!("peak resident memory {}", resident().1));
    Ok(inputs)
}

/// What notes.tsv will say, for those who asked for details.
fn say_notes(events: &[Event], observer: &mut dyn Observer) {
    for event in events {
        if let Event::Note(output::Note { seq_name, kind, detail, action }) = event {
            observer.say(Level::Detail, &format!("'{seq_name}': {kind}: {detail}: {action}"));
        }
    }
}
