//! Runs a prediction from the plan to the results: in one pass over the input or two, as a shard, or by merging shards.
//! Invariant: however the run ends, finished windows are in the journal, and no result file gets its name before all of them
//! are complete.

use crate::methods::{FinishedResults, Method, ResultsOptions, ResultsWriter};
use crate::output::ResultCounts;
use crate::pipeline::compute::ModelRunner;
use crate::pipeline::engine::{EngineParts, InputPass, PredictEngine, StageTotals};
use crate::pipeline::journal::{JournalReader, JournalWriter, changed};
use crate::pipeline::queues::{QueueCandidate, QueueSizes};
use crate::pipeline::record::{self, PredictRecord, RunRecordInputs, ShardRecord, ShardSeconds};
use crate::pipeline::records::{self, InputPipelineSettings};
use crate::pipeline::resume::{self, JournalForm, JournalKeys, StageJournal};
use crate::pipeline::shape::ENCODERS;
use crate::pipeline::stage::PredictStage;
use crate::planned::{self, StageSearch};
use crate::{PredictOptions, PredictReport, VirusError, WarmExecutors};
use plimsoll_data::pack::{Fill, Order};
use plimsoll_data::sequence::{Input, InputExtent};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Remedy, Staging};
use plimsoll_runtime::machine::resident;
use plimsoll_runtime::price::{self, PlanReport};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::run::{RunHarness, SessionEnd};
use plimsoll_runtime::session::{PlannedStages, StageStart, WeightSource};
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{Budget, Level, Observer, RuntimeError};
use plimsoll_setting::Setting;
use serde_json::Value;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

/// A prediction whose output folder has been checked.
pub(crate) struct PredictRun<'a> {
    pub(crate) options: &'a PredictOptions,
    pub(crate) method: &'a dyn Method,
    pub(crate) budget: Budget,
    /// Maximum number of CPU replicas.
    pub(crate) replicas: usize,
    /// Keys of the journals; `None` if the input can be read only once, so that the run cannot be resumed.
    pub(crate) keys: Option<JournalKeys>,
    /// Digests of the inputs; `None` if they can be read only once.
    pub(crate) inputs: Option<Vec<Input>>,
    /// Candidate queue sizes, largest first.
    pub(crate) hosts: Vec<QueueCandidate>,
    /// Index of the candidate in use; set when the plan is made.
    pub(crate) chosen: Cell<usize>,
}

/// Components and statistics of a stage after its last window.
struct FinishedStage<'a> {
    parts: EngineParts<'a>,
    totals: StageTotals,
    fill: [Fill; ENCODERS],
    inputs: Vec<Input>,
}

/// A stage of a plan.
#[derive(Clone, Copy)]
struct PlannedStage<'a> {
    planned: &'a PlannedStages<'a>,
    /// Number of the stage in the plan.
    number: usize,
    stage: PredictStage,
}

/// Facts for the run record and the report, at the end of a run.
struct RunEnding {
    start: Instant,
    /// Plan of the preceding stage, if there was one.
    before: Option<PlanReport>,
    /// One line that compares the plan with the budget.
    memory_line: String,
    /// Description of the arithmetic that computed the results.
    arithmetic: Value,
}

impl PredictRun<'_> {
    /// Computes the prediction, in as many stages as the memory budget requires.
    pub(crate) fn stages(
        &self,
        start: Instant,
        watch: &mut Watch,
        warm: &mut WarmExecutors,
        observer: &mut dyn Observer,
    ) -> Result<PredictReport, VirusError> {
        if self.keys.is_none() && self.options.shard.is_some() {
            return Err(VirusError::ShardOfPipe);
        }
        if self.keys.is_none() {
            let text = "the input can be read only once, so an interrupted run starts over";
            observer.say(Level::Info, text);
        }
        let shape = self.method.shape();
        let planned = if shape.encoders.is_empty() {
            // Of a method without models, only the memory of the process is planned.
            self.chosen.set(planned::queues_without_models(&self.hosts, &self.budget, "the prediction")?);
            None
        } else {
            Some(self.plan(observer)?)
        };
        watch.end_stage("planned", None);
        self.start_over()?;
        let stages = match &planned {
            Some(planned) => planned::stages_of(planned, shape),
            None => &[PredictStage::Whole],
        };
        let last = stages.len() - 1;
        let mut before = None;
        let mut earlier = StageTotals::default();
        let mut held = Bytes::ZERO;
        if let Some(planned) = &planned {
            for (number, program) in planned.programs()[..last].iter().enumerate() {
                before = Some(price::report(program)?);
                held = held.max(program.arena_bytes());
                let stage = PlannedStage { planned, number, stage: stages[number] };
                earlier = self.encode_first(stage, warm, watch, observer)?;
                watch.end_stage(shape.encoders[0].rows, None);
            }
        }
        let stage = stages[last];
        let width = shape.journal_width(stage, self.method.saves_rows());
        let StageJournal { reader, writer } = self.journal(stage, width, observer)?;
        // Without a writer the journal of the shard is already complete, and the journal is the result.
        if self.options.shard.is_some() && writer.is_none() {
            return Ok(self.shard(&StageTotals::default(), start, true));
        }
        let first_rows = match (stage, &self.keys) {
            (PredictStage::Rest, Some(keys)) => Some(keys.first_rows(shape.widths()[0])?),
            (PredictStage::Whole | PredictStage::First | PredictStage::Rest, _) => None,
        };
        let mut memory_line = String::new();
        let mut compute = None;
        if let Some(planned) = &planned {
            memory_line = planned.memory_line(last, shape.names.rows);
            compute =
                Some(self.compute(PlannedStage { planned, number: last, stage }, warm, watch, observer)?);
        }
        watch.end_stage("loaded", None);
        let arithmetic = to_json(&self.options.settings.arithmetic()?);
        let results = match self.options.shard {
            Some(_) => None,
            None => Some(self.results(&arithmetic)?),
        };
        let parts = EngineParts {
            compute,
            only_merges: false,
            journal: reader,
            first_rows,
            writer,
            results,
            strict: self.options.strict,
            pass: InputPass { number: last as u64, count: stages.len() as u64 },
        };
        let mut done = self.stream(parts, watch, observer)?;
        watch.end_stage("computed", None);
        if let (Some(planned), Some(compute)) = (&planned, &done.parts.compute) {
            let end = SessionEnd { program: compute.program_in_use(), usage: compute.usage(), held };
            RunHarness { watch, observer }.end_session(planned, &end, || self.remedies(planned));
        }
        done.totals.add_stage(&earlier);
        if self.options.shard.is_some() {
            if let Some(writer) = done.parts.writer {
                writer.finish()?;
            }
            return Ok(self.shard(&done.totals, start, false));
        }
        self.finish(done, warm, watch, RunEnding { start, before, memory_line, arithmetic })
    }

    /// Computes the rows of the first encoder for all sequences into their journal, unless it is already complete.
    fn encode_first(
        &self,
        stage: PlannedStage<'_>,
        warm: &mut WarmExecutors,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<StageTotals, VirusError> {
        let width = self.method.shape().journal_width(stage.stage, false);
        let StageJournal { reader, writer } = self.journal(stage.stage, width, observer)?;
        let Some(writer) = writer else { return Ok(StageTotals::default()) };
        let parts = EngineParts {
            compute: Some(self.compute(stage, warm, watch, observer)?),
            only_merges: false,
            journal: reader,
            first_rows: None,
            writer: Some(writer),
            results: None,
            strict: self.options.strict,
            pass: InputPass { number: 0, count: 2 },
        };
        let FinishedStage { parts, totals, .. } = self.stream(parts, watch, observer)?;
        parts.writer.map_or(Ok(()), JournalWriter::finish)?;
        // The next stage runs on the same devices.
        *warm = parts.compute.map(ModelRunner::into_executors);
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
        self.chosen.set(planned::queues_without_models(&self.hosts, &self.budget, "the merge")?);
        let width = self.method.shape().journal_width(PredictStage::Whole, self.method.saves_rows());
        let (journal, arithmetic) = keys.merge(&self.options.merge, width)?;
        self.start_over()?;
        let parts = EngineParts {
            compute: None,
            only_merges: true,
            journal,
            first_rows: None,
            writer: None,
            results: Some(self.results(&arithmetic)?),
            strict: self.options.strict,
            pass: InputPass { number: 0, count: 1 },
        };
        let done = self.stream(parts, watch, observer)?;
        watch.end_stage("merged", None);
        let ending = RunEnding { start, before: None, memory_line: String::new(), arithmetic };
        self.finish(done, &mut None, watch, ending)
    }

    /// With `--force`, removes the journals of an earlier run. Called only after the run is known to be able to start;
    /// the journals of shards that are to be merged are kept.
    fn start_over(&self) -> Result<(), VirusError> {
        let PredictOptions { force, output_dir, merge, .. } = self.options;
        if *force && !crate::contains_folder(merge, output_dir) { resume::remove(output_dir) } else { Ok(()) }
    }

    /// Opens the journal of a stage; empty if the input can be read only once.
    fn journal(
        &self,
        stage: PredictStage,
        width: usize,
        observer: &mut dyn Observer,
    ) -> Result<StageJournal, VirusError> {
        match &self.keys {
            Some(keys) => keys.open(stage, JournalForm { width, block: self.queues().block }, observer),
            None => Ok(StageJournal { reader: JournalReader::default(), writer: None }),
        }
    }

    /// Creates the result files of a run that computes, or whose shards were computed, with `arithmetic`.
    fn results(&self, arithmetic: &Value) -> Result<Box<dyn ResultsWriter>, VirusError> {
        let run = ResultsOptions {
            options: self.options,
            folder: &self.options.output_dir,
            arithmetic,
            sort_bytes: self.queues().sort,
        };
        Ok(self.method.results(&run)?)
    }

    /// The search for stages and queue sizes.
    fn search(&self) -> StageSearch<'_, '_> {
        StageSearch {
            shape: self.method.shape(),
            hosts: &self.hosts,
            settings: &self.options.settings,
            replicas: self.replicas,
            reread: self.keys.is_some(),
        }
    }

    /// Plans the stages: one stage for all models, or the first encoder first if they do not fit together.
    fn plan(&self, observer: &mut dyn Observer) -> Result<PlannedStages<'_>, VirusError> {
        let planned = self.search().plan(&self.budget)?;
        self.chosen.set(planned.budget());
        if planned.programs().len() > 1 {
            let first = &self.method.shape().encoders[0];
            let bytes = Bytes(first.width as u64 * 4);
            let text = format!(
                "the models do not fit under {} together: the {} runs first, and its {} wait on disk ({bytes} for each \
                 sequence, in {})",
                self.budget.bytes,
                first.plan,
                first.rows,
                self.options.output_dir.join(resume::EMBEDDINGS_JOURNAL).display()
            );
            observer.say(Level::Info, &text);
        }
        Ok(planned)
    }

    /// Returns the setting with which the run would need less memory.
    fn remedies(&self, planned: &PlannedStages<'_>) -> Vec<Remedy> {
        planned.remedies(|budget| self.search().plan(budget))
    }

    /// Starts the models of a stage. Warm executors with the same program are reused with their weights; the devices of other
    /// warm executors are reused for this stage's program, and weights are loaded.
    fn compute<'a>(
        &'a self,
        stage: PlannedStage<'a>,
        warm: &mut WarmExecutors,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<ModelRunner<'a>, RuntimeError> {
        let PlannedStage { planned, number, stage } = stage;
        let order = if self.options.sort_by_length { Order::ByLength } else { Order::Input };
        let shape = self.method.shape();
        let models = self.method.weights();
        let encoders = models.encoders.into_iter().enumerate().filter(|(i, _)| stage.runs(*i));
        let mut weights: Vec<&dyn WeightSource> = encoders.map(|(_, encoder)| encoder).collect();
        weights.extend(models.head.filter(|_| shape.scores(stage)));
        let saves_rows = self.method.saves_rows();
        let running = warm.take().unwrap_or_default();
        let start = StageStart { order, weights, running, kept: shape.names.rows };
        let session = RunHarness { watch, observer }.start_session(planned, number, start)?;
        ModelRunner::new(session, stage, shape, saves_rows)
    }

    /// Queue sizes in use.
    fn queues(&self) -> QueueSizes {
        self.hosts.get(self.chosen.get()).map_or(QueueSizes::USUAL, |host| host.queues)
    }

    /// Memory lines of the process with these queue sizes.
    fn process(&self) -> &[Staging] {
        self.hosts.get(self.chosen.get()).map_or(&[], |host| &host.process)
    }

    /// Reads and computes until the input ends. If the run ends early, finished windows are committed to the journal.
    fn stream<'a>(
        &self,
        parts: EngineParts<'a>,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<FinishedStage<'a>, VirusError> {
        let input = self.input_settings(&parts);
        let mut engine = PredictEngine::new(parts, self.queues());
        let start = Instant::now();
        let inputs = self.pump(input, &mut engine, watch, observer);
        engine.totals.seconds.streaming = start.elapsed().as_secs_f64();
        match inputs {
            Ok(inputs) => {
                let fill = engine.fill();
                let (parts, totals) = engine.into_parts();
                if let Some(text) = parts.results.as_ref().and_then(|results| results.warning()) {
                    observer.say(Level::Warning, &text);
                }
                Ok(FinishedStage { parts, totals, fill, inputs })
            }
            Err(VirusError::Runtime(RuntimeError::Interrupted { signal, .. })) => {
                let kept = self.resume_hint(engine.commit()?);
                Err(RuntimeError::Interrupted { signal, kept }.into())
            }
            Err(error) => {
                // The first error is the one to report.
                if let Ok(count @ 1..) = engine.commit() {
                    let hint = self.resume_hint(count);
                    let text = format!(
                        "{hint}; if the input was changed, give {} or another folder with {}",
                        Setting::Force,
                        Setting::Output
                    );
                    observer.say(Level::Info, &text);
                }
                Err(error)
            }
        }
    }

    /// Describes how many windows are in the journal and how to resume the run.
    fn resume_hint(&self, count: u64) -> String {
        let dir = self.options.output_dir.display();
        match self.keys {
            Some(_) if !self.options.merge.is_empty() => {
                "the shards are unchanged; the same command merges them".to_owned()
            }
            Some(_) if self.options.force => {
                format!(
                    "{count} windows are kept in {dir}; the same command without {} resumes the run",
                    Setting::Force
                )
            }
            Some(_) => format!("{count} windows are kept in {dir}; the same command resumes the run"),
            None => "the input can be read only once: the next run starts over".to_owned(),
        }
    }

    /// Returns the settings of the front end. Texts of records are kept only if results are written.
    fn input_settings(&self, parts: &EngineParts<'_>) -> InputPipelineSettings {
        let writes_results = parts.results.is_some();
        InputPipelineSettings {
            window_source: self.method.window_source(self.options, writes_results),
            hits: (self.method.is_trained() && writes_results).then_some(self.options.hits_format),
            workers: self.options.workers,
            prefetch: self.options.prefetch,
            queues: self.queues(),
            journaled: Arc::clone(&parts.journal.coverage),
            shard: self.options.shard,
            limits: self.record_limits(),
        }
    }

    /// Upper bounds on the records of a pipe, if host memory has a budget. Files need none, because they were
    /// measured.
    fn record_limits(&self) -> Option<InputExtent> {
        let billed = self.hosts.iter().any(|host| !host.process.is_empty());
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
        input: InputPipelineSettings,
        engine: &mut PredictEngine<'_>,
        watch: &mut Watch,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Input>, VirusError> {
        watch.begin("computing", observer);
        let mut stream = records::start(input, &self.options.inputs)?;
        let mut harness = RunHarness { watch, observer };
        harness.stream(&mut stream, engine, "")?;
        let total = stream.bytes_total;
        let inputs = stream.finish()?;
        self.check_inputs_unchanged(&inputs)?;
        let bytes = inputs.iter().map(|i| i.bytes).sum();
        harness.show(&engine.progress_after(Some(bytes), total));
        observer.say(Level::Detail, &format!("peak resident memory {}", resident().1));
        Ok(inputs)
    }

    /// Checks that the inputs are the same as at the start of the run.
    fn check_inputs_unchanged(&self, read: &[Input]) -> Result<(), VirusError> {
        for (at_start, at_end) in self.inputs.iter().flatten().zip(read) {
            if at_start != at_end {
                return Err(changed(&at_start.path));
            }
        }
        Ok(())
    }

    /// Writes the results and run.json, then removes the journals.
    fn finish(
        &self,
        done: FinishedStage<'_>,
        warm: &mut WarmExecutors,
        watch: &Watch,
        ending: RunEnding,
    ) -> Result<PredictReport, VirusError> {
        let RunEnding { start, before, memory_line, arithmetic } = ending;
        let FinishedStage { parts, totals, fill, inputs } = done;
        let seconds = start.elapsed().as_secs_f64();
        let record_inputs = RunRecordInputs {
            options: self.options,
            method: self.method,
            program: parts.compute.as_ref().map(ModelRunner::program),
            devices: parts.compute.as_ref().map_or(&[], ModelRunner::usage),
            before,
            budget: self.budget.bytes,
            process: self.process(),
            totals: &totals,
            fill,
            seconds,
            watch,
            inputs: &inputs,
            identity: record::identity(self.options, self.method, &inputs, arithmetic),
        };
        let mut run_record = record_inputs.record()?;
        let FinishedResults { counts, calls } = match parts.results {
            Some(results) => results.finish(&mut run_record)?,
            None => FinishedResults { counts: ResultCounts::default(), calls: None },
        };
        // Only after run.json is on disk: until then the journals are needed to resume.
        if let Some(keys) = &self.keys {
            keys.done()?;
        }
        *warm = parts.compute.map(ModelRunner::into_executors);
        let mut report = self.report(&totals, seconds);
        report.run_record = PredictRecord::Run(Box::new(run_record));
        report.counts = counts;
        report.notes = counts.notes;
        report.calls = calls;
        report.fill = fill.map(|f| (f.packs > 1).then(|| f.but_last()));
        report.memory_line = memory_line;
        Ok(report)
    }

    /// Builds the report of a shard, whose result is its journal.
    fn shard(&self, totals: &StageTotals, start: Instant, already_complete: bool) -> PredictReport {
        let mut report = self.report(totals, start.elapsed().as_secs_f64());
        report.already_complete = already_complete;
        report.shard = self.options.shard;
        let shard = self.options.shard.map(|s| format!("{}/{}", s.number, s.of));
        let journal = self.options.output_dir.join(resume::RESULTS_JOURNAL);
        let encoders = self.method.shape().encoders.iter().zip(totals.tokens);
        report.run_record = PredictRecord::Shard(ShardRecord {
            version: env!("CARGO_PKG_VERSION"),
            shard,
            journal: journal.display().to_string(),
            windows_from_journal: totals.windows_from_journal,
            tokens: encoders.map(|(encoder, tokens)| (encoder.key, tokens)).collect(),
            seconds: ShardSeconds { total: report.seconds },
        });
        // Failed frames are listed and counted when the shards are merged.
        report.failed = 0;
        report
    }

    /// Builds a report with the fields that runs and shards have in common.
    fn report(&self, totals: &StageTotals, seconds: f64) -> PredictReport {
        let tokens: u64 = totals.tokens.iter().sum();
        PredictReport {
            already_complete: false,
            shard: None,
            failed: totals.failed,
            notes: 0,
            run_record: PredictRecord::Existing(Value::Null),
            counts: ResultCounts::default(),
            output_dir: self.options.output_dir.clone(),
            trained: self.method.is_trained(),
            calls: None,
            seconds,
            tokens_per_second: tokens as f64 / seconds.max(1e-9),
            fill: [None; 2],
            memory_line: String::new(),
        }
    }
}
