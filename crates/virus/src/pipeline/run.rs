//! Runs a prediction from the plan to the results: in one stage or two, as a shard, or by merging shards. Invariant:
//! however the run ends, finished windows are in the journal, and no result file gets its name before all of them are
//! complete.

use crate::VirusError;
use crate::methods::caller::results::CallerOutputOptions;
use crate::methods::caller::score::Rules;
use crate::output::{self, CallerOutputs, Counts, Outputs, ResultFiles};
use crate::pipeline::compute::Compute;
use crate::pipeline::engine::{Engine, Parts, Totals};
use crate::pipeline::journal::{JournalReader, JournalWriter, changed};
use crate::pipeline::queues::QueueSizes;
use crate::pipeline::record::{self, RunRecordInputs};
use crate::pipeline::records::{self, Event, InputPipeline, Units};
use crate::pipeline::resume::{self, Keys, OpenedJournal};
use crate::pipeline::shape::{DNA, PROTEIN, Shape};
use crate::pipeline::stage::PredictStage;
use crate::planned;
use crate::{Opened, OpenedModels, Options, PredictReport, Warm};
use plimsoll_data::pack::{Fill, Order};
use plimsoll_data::sequence::{Extent, Input, NoteKind};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Remedy, Staging};
use plimsoll_runtime::health::PlannedMemory;
use plimsoll_runtime::machine::{Reading, resident};
use plimsoll_runtime::observer::stopped;
use plimsoll_runtime::session::bounds::tokens;
use plimsoll_runtime::session::{Planned, Session, Start, WeightSource, say_given_back};
use plimsoll_runtime::watch::{StageRecorder, Watch};
use plimsoll_runtime::{Budget, Level, Observer, Progress, RuntimeError, price};
use serde_json::{Value, json};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

/// A prediction whose output folder has been checked.
pub(crate) struct Run<'a> {
    pub(crate) options: &'a Options,
    pub(crate) opened: &'a Opened,
    pub(crate) shape: &'a Shape,
    pub(crate) budget: Budget,
    /// Maximum number of CPU replicas.
    pub(crate) replicas: usize,
    /// Keys of the journals; `None` if the input can be read only once, so that the run cannot be resumed.
    pub(crate) keys: Option<Keys>,
    /// Digests of the inputs; `None` if they can be read only once.
    pub(crate) inputs: Option<Vec<Input>>,
    /// Candidate queue sizes, largest first, each with the memory lines of the process.
    pub(crate) hosts: Vec<(QueueSizes, Vec<Staging>)>,
    /// Index of the candidate in use; set when the plan is made.
    pub(crate) chosen: Cell<usize>,
}

/// Components and statistics of a stage after its last window.
struct Done<'a> {
    parts: Parts<'a>,
    totals: Totals,
    fill: [Fill; 2],
    inputs: Vec<Input>,
}

impl Run<'_> {
    /// Computes the prediction, in as many stages as the memory budget requires.
    pub(crate) fn stages(
        &self,
        start: Instant,
        watch: &mut Watch,
        warm: &mut Warm,
        observer: &mut dyn Observer,
    ) -> Result<PredictReport, VirusError> {
        if self.keys.is_none() && self.options.shard.is_some() {
            return Err(VirusError::ShardOfPipe);
        }
        if self.keys.is_none() {
            let text = "the input can be read only once, so an interrupted run starts over";
            observer.say(Level::Info, text);
        }
        let (mut before, mut earlier, mut held) = (None, Totals::default(), Bytes::ZERO);
        let planned = self.plan(observer)?;
        watch.end_stage("planned", None);
        self.start_over()?;
        let stages = planned::stages(&planned, self.shape);
        let last = *stages.last().ok_or_else(|| RuntimeError::bug("there is no stage"))?;
        for (number, program) in planned.programs().iter().enumerate().take(stages.len() - 1) {
            before = Some(price::to_json(program)?);
            held = held.max(program.arena_bytes());
            earlier = self.embed((&planned, number), warm, watch, observer)?;
            watch.end_stage("nucleotide embeddings", None);
        }
        let embeddings = self.options.save_embeddings.is_some();
        let width = self.shape.kept_width(last, embeddings);
        let OpenedJournal { reader: results, writer } = self.journal(last, width, observer)?;
        // Without a writer the journal of the shard is already complete, and the journal is the result.
        if self.options.shard.is_some() && writer.is_none() {
            return Ok(self.shard(&Totals::default(), start, true));
        }
        let nucleotides = match (last, &self.keys) {
            (PredictStage::Protein, Some(keys)) => Some(keys.embeddings(self.shape.widths()[DNA])?),
            (
                PredictStage::Whole | PredictStage::Nucleotide | PredictStage::Protein | PredictStage::Caller,
                _,
            ) => None,
        };
        let memory_line = planned.memory_line(stages.len() - 1, self.kept_name());
        let compute = Some(self.compute((&planned, stages.len() - 1), warm, watch, observer)?);
        watch.end_stage("loaded", None);
        let outputs = match self.options.shard {
            Some(_) => None,
            None => Some(self.outputs(&self.options.settings.arithmetic()?)?),
        };
        let stage = if nucleotides.is_some() { (1, 2) } else { (0, 1) };
        let strict = self.options.strict;
        let parts = Parts { compute, results, embeddings: nucleotides, writer, outputs, strict, stage };
        let mut done = self.stream(parts, watch, observer)?;
        watch.end_stage("computed", None);
        if watch.wants_advice() {
            watch.advise(self.remedies(&planned), observer);
        }
        if let Some(compute) = &done.parts.compute {
            planned.site().compare(compute.program_in_use(), held, "at the end", observer);
        }
        done.totals.add_stage(&earlier);
        if self.options.shard.is_some() {
            if let Some(writer) = done.parts.writer {
                writer.finish()?;
            }
            return Ok(self.shard(&done.totals, start, false));
        }
        let arithmetic = self.options.settings.arithmetic()?;
        self.finish(done, (before.as_ref(), warm), start, watch, (memory_line, arithmetic))
    }

    /// Computes the nucleotide embeddings of all open reading frames into their journal, unless it is already
    /// complete.
    fn embed(
        &self,
        (planned, number): (&Planned<'_>, usize),
        warm: &mut Warm,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<Totals, VirusError> {
        let stage = planned::stages(planned, self.shape)[number];
        let width = self.shape.kept_width(stage, false);
        let OpenedJournal { reader: results, writer } = self.journal(stage, width, observer)?;
        let Some(writer) = writer else { return Ok(Totals::default()) };
        let compute = Some(self.compute((planned, number), warm, watch, observer)?);
        let strict = self.options.strict;
        let stage = (0, 2);
        let parts =
            Parts { compute, results, embeddings: None, writer: Some(writer), outputs: None, strict, stage };
        let Done { parts, totals, .. } = self.stream(parts, watch, observer)?;
        parts.writer.map_or(Ok(()), JournalWriter::finish)?;
        // The next stage runs on the same devices.
        *warm = parts.compute.map(Compute::into_executors);
        Ok(totals)
    }

    /// Merges the results of shards.
    pub(crate) fn merge(
        &self,
        start: Instant,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<PredictReport, VirusError> {
        let Some(keys) = &self.keys else {
            return Err(VirusError::MergeOfPipe);
        };
        self.chosen.set(planned::choose_alone(&self.hosts, &self.budget)?);
        let width = self.shape.kept_width(self.shape.single_stage(), self.options.save_embeddings.is_some());
        let (results, arithmetic) = keys.merge(&self.options.merge, width)?;
        self.start_over()?;
        let (outputs, strict) = (Some(self.outputs(&arithmetic)?), self.options.strict);
        let stage = (0, 1);
        let parts = Parts { compute: None, results, embeddings: None, writer: None, outputs, strict, stage };
        let done = self.stream(parts, watch, observer)?;
        watch.end_stage("merged", None);
        self.finish(done, (None, &mut None), start, watch, (String::new(), arithmetic))
    }

    /// With `--force`, removes the journals of an earlier run. Called only after the run is known to be able to start;
    /// the journals of shards that are to be merged are kept.
    fn start_over(&self) -> Result<(), VirusError> {
        let Options { force, output_dir, merge, .. } = self.options;
        if *force && !crate::among(output_dir, merge) { resume::remove(output_dir) } else { Ok(()) }
    }

    /// Opens the journal of a stage; empty if the input can be read only once.
    fn journal(
        &self,
        stage: PredictStage,
        width: usize,
        observer: &mut dyn Observer,
    ) -> Result<OpenedJournal, VirusError> {
        match &self.keys {
            Some(keys) => keys.open(stage, (width, self.queues().block), observer),
            None => Ok(OpenedJournal { reader: JournalReader::default(), writer: None }),
        }
    }

    /// Creates the result files of a run that computes, or whose shards were computed, with `arithmetic`.
    fn outputs(&self, arithmetic: &Value) -> Result<ResultFiles, VirusError> {
        let folder = &self.options.output_dir;
        match (&self.opened.models, &self.options.caller) {
            (OpenedModels::Caller(caller), Some(options)) => {
                let rules = Rules::new(
                    caller.calibration.clone(),
                    options.threshold,
                    options.prevalence,
                    options.limits,
                );
                let options = CallerOutputOptions {
                    rules,
                    max_fdr: options.max_fdr,
                    hits_format: self.options.hits_format,
                    source: self.options.source,
                    layout: caller.layout.clone(),
                    sort_bytes: self.queues().sort,
                };
                Ok(ResultFiles::Caller(Box::new(CallerOutputs::create(folder, options)?)))
            }
            (OpenedModels::Caller(_) | OpenedModels::VirNucPro(_), _) => {
                let options = output_options(self.options, self.opened, self.shape, arithmetic);
                let mut outputs = Outputs::create(folder, options)?;
                outputs.set_sort_bytes(self.queues().sort);
                Ok(ResultFiles::VirNucPro(Box::new(outputs)))
            }
        }
    }

    /// Name of the data that the host holds for steps in flight, for messages.
    fn kept_name(&self) -> &'static str {
        match &self.opened.models {
            OpenedModels::VirNucPro(_) => "embeddings",
            OpenedModels::Caller(_) => "logits",
        }
    }

    /// Plans the stages: one stage for all models, or the nucleotide encoder first if they do not fit together.
    fn plan(&self, observer: &mut dyn Observer) -> Result<Planned<'_>, VirusError> {
        let (settings, reread) = (&self.options.settings, self.keys.is_some());
        let planned = planned::choose(&self.hosts, settings, &self.budget, self.shape, self.replicas, reread)?;
        self.chosen.set(planned.budget());
        if planned.programs().len() > 1 {
            let bytes = Bytes(self.shape.widths()[DNA] as u64 * 4);
            let text = format!(
                "both encoders do not fit under {} together: the DNA encoder runs first, and its embeddings \
                    wait on disk ({bytes} for each open reading frame, in {})",
                self.budget.bytes,
                self.options.output_dir.join(resume::EMBEDDINGS).display()
            );
            observer.say(Level::Info, &text);
        }
        Ok(planned)
    }

    /// Returns the setting with which the run would need less memory.
    fn remedies(&self, planned: &Planned<'_>) -> Vec<Remedy> {
        let (settings, reread) = (&self.options.settings, self.keys.is_some());
        planned.remedies(|budget| {
            planned::choose(&self.hosts, settings, budget, self.shape, self.replicas, reread)
        })
    }

    /// Starts the models of a stage. Warm executors of the same stage with the same program are reused with
    /// their weights; the devices of other warm executors are reused for this stage's program, and weights are
    /// loaded.
    fn compute<'a>(
        &'a self,
        (planned, number): (&'a Planned<'a>, usize),
        warm: &mut Warm,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<Compute<'a>, RuntimeError> {
        watch.set_planned(PlannedMemory::of(&planned.programs()[number], planned.site().budget()));
        let stage = planned::stages(planned, self.shape)[number];
        let order = if self.options.sort_by_length { Order::ByLength } else { Order::Input };
        let mut weights: Vec<&dyn WeightSource> = vec![];
        match &self.opened.models {
            OpenedModels::VirNucPro(models) => {
                if stage.runs(DNA) {
                    weights.push(&models.dna);
                }
                if stage.runs(PROTEIN) {
                    weights.push(&models.protein);
                }
                if stage.scores() {
                    weights.push(&models.head);
                }
            }
            OpenedModels::Caller(caller) => weights.push(&caller.model),
        }
        let kept = self.kept_name();
        if let Some((_, running)) =
            warm.take_if(|(s, executors)| *s == stage && planned.is_on(number, executors))
        {
            let session = planned.resume(number, Start { order, weights, running, kept })?;
            begin_sizes(&session, watch);
            return Compute::new(session, stage, self.shape, self.options);
        }
        let running = warm.take().map(|(_, executors)| executors).unwrap_or_default();
        let record = &mut |name: &str, reading: &Reading, _: &mut dyn Observer| {
            watch.record_stage(name, None, reading.clone());
        };
        let observer = &mut StageRecorder { inner: observer, record };
        let session = planned.start(number, Start { order, weights, running, kept }, observer)?;
        begin_sizes(&session, watch);
        Compute::new(session, stage, self.shape, self.options)
    }

    /// Queue sizes in use.
    fn queues(&self) -> QueueSizes {
        self.hosts.get(self.chosen.get()).map_or(QueueSizes::USUAL, |(queues, _)| *queues)
    }

    /// Memory lines of the process with these queue sizes.
    fn process(&self) -> &[Staging] {
        self.hosts.get(self.chosen.get()).map_or(&[], |(_, process)| process)
    }

    /// Reads and computes until the input ends. If the run ends early, finished windows are committed to the journal.
    fn stream<'a>(
        &self,
        parts: Parts<'a>,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<Done<'a>, VirusError> {
        let front = self.front(&parts);
        let mut engine = Engine::new(parts, self.queues());
        let start = Instant::now();
        let poured = self.pump(front, &mut engine, watch, observer);
        engine.totals.seconds.streaming = start.elapsed().as_secs_f64();
        match poured {
            Ok(inputs) => {
                let fill = engine.fill();
                let (parts, totals) = engine.into_parts();
                say_given_back(parts.compute.as_ref().map_or(&[], Compute::usage), observer);
                self.say_silent(parts.outputs.as_ref(), observer);
                Ok(Done { parts, totals, fill, inputs })
            }
            Err(VirusError::Runtime(RuntimeError::Interrupted { signal, .. })) => {
                let kept = self.kept_windows(engine.commit()?);
                Err(RuntimeError::Interrupted { signal, kept }.into())
            }
            Err(error) => {
                // The first error is the one to report.
                if let Ok(count @ 1..) = engine.commit() {
                    let kept = self.kept_windows(count);
                    let text = "if the input was changed, give --force or another folder with -o";
                    observer.say(Level::Info, &format!("{kept}; {text}"));
                }
                Err(error)
            }
        }
    }

    /// Describes how many windows are in the journal and how to resume the run.
    fn kept_windows(&self, count: u64) -> String {
        let dir = self.options.output_dir.display();
        match self.keys {
            Some(_) if !self.options.merge.is_empty() => {
                "the shards are unchanged; the same command merges them".to_owned()
            }
            Some(_) if self.options.force => {
                format!("{count} windows are kept in {dir}; the same command without --force resumes the run")
            }
            Some(_) => format!("{count} windows are kept in {dir}; the same command resumes the run"),
            None => "the input can be read only once: the next run starts over".to_owned(),
        }
    }

    /// Warns if the input has windows and none of them could be scored.
    fn say_silent(&self, outputs: Option<&ResultFiles>, observer: &mut dyn Observer) {
        let Some(ResultFiles::VirNucPro(outputs)) = outputs else { return };
        let counts = outputs.counts();
        if counts.windows > 0 && counts.scored_windows == 0 {
            let text = format!(
                "none of the {} windows of at most {} bases has an open reading frame (a frame without a stop \
                    codon over \
                 the whole window), so nothing was scored; use a smaller --length, with a head trained for it",
                counts.windows, self.options.length
            );
            observer.say(Level::Warning, &text);
        }
    }

    /// Returns the settings of the front end. Intermediate texts and record texts are produced only if outputs
    /// are written.
    fn front(&self, parts: &Parts<'_>) -> InputPipeline {
        InputPipeline {
            length: self.options.length,
            units: match (&self.opened.models, &self.options.caller) {
                (OpenedModels::VirNucPro(models), _) => Units::Frames {
                    dna: models.dna.tokenizer.clone(),
                    protein: models.protein.tokenizer.clone(),
                },
                (OpenedModels::Caller(_), options) => {
                    Units::Windows { paired: options.as_ref().is_some_and(|options| options.paired) }
                }
            },
            original_alphabet: self.options.original_alphabet,
            intermediate: self.options.keep_intermediate && parts.outputs.is_some(),
            hits: (self.opened.is_trained() && parts.outputs.is_some()).then_some(self.options.hits_format),
            workers: self.options.workers,
            prefetch: self.options.prefetch,
            queues: self.queues(),
            kept: Arc::clone(&parts.results.coverage),
            shard: self.options.shard,
            most: self.most(),
        }
    }

    /// Upper bounds on the records of a pipe, if host memory has a budget. Files need none, because they were
    /// measured.
    fn most(&self) -> Option<Extent> {
        let billed = self.hosts.iter().any(|(_, process)| !process.is_empty());
        self.budget.of_pipe().filter(|_| billed && self.keys.is_none())
    }

    /// Feeds the engine with the batches of the front end until the input ends, and then drains the engine.
    /// Returns the inputs with their digests.
    ///
    /// # Errors
    /// An interruption, an error of the input or of the devices, or inputs that differ from those at the start
    /// of the run.
    fn pump(
        &self,
        front: InputPipeline,
        engine: &mut Engine<'_>,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Input>, VirusError> {
        watch.begin("computing", observer);
        let stream = records::start(front, &self.options.inputs)?;
        loop {
            let wait = Instant::now();
            let batch = stream.next(&mut || stopped(observer, ""));
            engine.totals.seconds.waiting += wait.elapsed().as_secs_f64();
            let Some(batch) = batch? else { break };
            say_notes(&batch.events, observer);
            let taken = engine.take(batch, &|| stopped(observer, ""));
            warn(engine, watch, observer);
            taken?;
            report(&engine.progress(None, stream.bytes_total), watch, observer);
        }
        loop {
            let more = engine.drain(&|| stopped(observer, ""));
            warn(engine, watch, observer);
            if !more? {
                break;
            }
            report(&engine.progress(None, stream.bytes_total), watch, observer);
        }
        let total = stream.bytes_total;
        let inputs = stream.finish()?;
        self.same_inputs(&inputs)?;
        let bytes = inputs.iter().map(|i| i.bytes).sum();
        report(&engine.progress(Some(bytes), total), watch, observer);
        observer.say(Level::Detail, &format!("peak resident memory {}", resident().1));
        Ok(inputs)
    }

    /// Checks that the inputs are the same as at the start of the run.
    fn same_inputs(&self, read: &[Input]) -> Result<(), VirusError> {
        let Some(before) = &self.inputs else { return Ok(()) };
        match before.iter().zip(read).find(|(a, b)| a != b) {
            None => Ok(()),
            Some((input, _)) => Err(changed(&input.path)),
        }
    }

    /// Writes the results and run.json, then removes the journals.
    fn finish(
        &self,
        done: Done<'_>,
        (before, warm): (Option<&Value>, &mut Warm),
        start: Instant,
        watch: &Watch,
        (memory_line, arithmetic): (String, Value),
    ) -> Result<PredictReport, VirusError> {
        let Done { parts, totals, fill, inputs } = done;
        let seconds = start.elapsed().as_secs_f64();
        let story = RunRecordInputs {
            options: self.options,
            opened: self.opened,
            program: parts.compute.as_ref().map(Compute::program),
            devices: parts.compute.as_ref().map_or(&[], Compute::usage),
            before,
            budget: self.budget.bytes,
            process: self.process(),
            totals: &totals,
            fill,
            seconds,
            watch,
            inputs: &inputs,
            identity: record::identity(self.options, self.opened, &inputs, arithmetic),
        };
        let mut run_record = story.record()?;
        let (counts, calls) = match parts.outputs {
            Some(outputs) => outputs.finish(&mut run_record)?,
            None => (Counts::default(), None),
        };
        // Only after run.json is on disk: until then the journals are needed to resume.
        if let Some(keys) = &self.keys {
            keys.done()?;
        }
        *warm = parts.compute.map(Compute::into_executors);
        let mut report = self.report(&totals, seconds);
        (report.run_record, report.counts, report.notes) = (run_record, counts, counts.notes);
        report.calls = calls;
        (report.fill, report.memory_line) = (fill.map(|f| (f.packs > 1).then(|| f.but_last())), memory_line);
        Ok(report)
    }

    /// Builds the report of a shard, whose result is its journal.
    fn shard(&self, totals: &Totals, start: Instant, already_complete: bool) -> PredictReport {
        let mut report = self.report(totals, start.elapsed().as_secs_f64());
        report.already_complete = already_complete;
        report.shard = self.options.shard;
        let shard = self.options.shard.map(|s| format!("{}/{}", s.number, s.of));
        let journal = self.options.output_dir.join(resume::RESULTS);
        report.run_record = json!({
            "plimsoll": env!("CARGO_PKG_VERSION"),
            "shard": shard,
            "journal": journal.display().to_string(),
            "windows_from_journal": totals.kept,
            "tokens": {"nucleotide": totals.tokens[0], "protein": totals.tokens[1]},
            "seconds": {"total": report.seconds},
        });
        // Failed frames are listed and counted when the shards are merged.
        report.failed = 0;
        report
    }

    /// Builds a report with the fields that runs and shards have in common.
    fn report(&self, totals: &Totals, seconds: f64) -> PredictReport {
        let tokens: u64 = totals.tokens.iter().sum();
        PredictReport {
            already_complete: false,
            shard: None,
            failed: totals.failed,
            notes: 0,
            run_record: Value::Null,
            counts: Counts::default(),
            output_dir: self.options.output_dir.clone(),
            trained: self.opened.is_trained(),
            calls: None,
            seconds,
            tokens_per_second: tokens as f64 / seconds.max(1e-9),
            fill: [None; 2],
            memory_line: String::new(),
        }
    }
}

/// Returns the options of the writers.
fn output_options(options: &Options, opened: &Opened, shape: &Shape, arithmetic: &Value) -> output::Options {
    let fact = |name: &'static str| (name, arithmetic[name].as_str().unwrap_or_default().to_owned());
    output::Options {
        metadata: vec![
            ("plimsoll", env!("CARGO_PKG_VERSION").to_owned()),
            ("model_sha256", opened.digests.to_string()),
            fact("precision"),
            fact("device"),
            fact("instructions"),
        ],
        trained: opened.is_trained(),
        threshold: options.threshold,
        keep_intermediate: options.keep_intermediate,
        save_embeddings: options.save_embeddings,
        hits_format: options.hits_format,
        width: shape.widths().iter().sum(),
        source: options.source,
    }
}

/// Enters the size of the steps in the state that is shown, if it changes during the run.
fn begin_sizes(session: &Session<'_>, watch: &mut Watch) {
    if session.is_dynamic() {
        watch.set_step_tokens(tokens(session.program_in_use()));
    }
}

/// Reports the progress to the observer, and to monitors.
fn report(progress: &Progress, watch: &mut Watch, observer: &mut dyn Observer) {
    observer.progress(progress);
    watch.show(observer, |state| state.set_progress(progress));
}

/// Reports the engine's warnings, for example about failed devices, and changes of the size of the steps.
fn warn(engine: &mut Engine<'_>, watch: &mut Watch, observer: &mut dyn Observer) {
    engine.report_sizes(watch, observer);
    engine.warnings().iter().for_each(|text| observer.say(Level::Warning, text));
}

/// Reports notes on the input when they are read, those on single records at detail level; they are written to notes.tsv later.
fn say_notes(events: &[Event], observer: &mut dyn Observer) {
    let of_files =
        [NoteKind::Spacing, NoteKind::Gaps, NoteKind::Unknown, NoteKind::NoRecords].map(NoteKind::name);
    for event in events {
        if let Event::Note(output::Note { seq_name, kind, detail, action }) = event {
            match of_files.contains(kind) {
                true => observer.say(Level::Warning, &format!("{detail}: {action}")),
                false => observer.say(Level::Detail, &format!("'{seq_name}': {kind}: {detail}: {action}")),
            }
        }
    }
}
