//! The training loop: micro-steps, updates, evaluations, checkpoints, and the end of the run. Invariant: the result of
//! a step depends on the configuration, the state and the data alone; clocks, signals and the free memory act only through a
//! [`Decision`], and change only when checkpoints are written and how many packs a micro-step has. On a GPU, except in fp16,
//! the result of a step is read while the next one runs, so that the GPU need not wait for the host.

use super::checkpoint::{CheckpointRecord, Checkpoints, VerifiedCheckpoint};
use super::config::TrainConfig;
use super::config::schema::{leaves, schema};
use super::decision::{Decision, Ended, LoopMoment, NewSize, Save, Situation, StopReason, decide};
use super::dynamic::DynamicBatch;
use super::feed::DataSummary;
use super::folder::{self, write_text};
use super::metrics::{self, EvaluationLine, Metrics, SIZE_EVENT, SizeLine, StepLine, number};
use super::opened_model::{Applied, Auxiliary, MicroStepResult, MicroStepScalars, OpenedModel, Taken, Tensors};
use super::resume::{self, Resume};
use super::run_record::{TrainRecord, UnfinishedRecord};
use super::schedule::{Rate, hyper};
use super::state::{RunState, SKIPS_IN_A_ROW};
use super::watch::TrainWatch;
use crate::error::{TrainError, TrainPhase};
use plimsoll_data::atomic::remove_leftovers;
use plimsoll_data::outputs::WrittenFiles;
use plimsoll_data::printable::EscapedPath;
use plimsoll_exec::disk;
use plimsoll_exec::memory::Memory;
use plimsoll_graph::Bytes;
use plimsoll_runtime::dynamic::Reason;
use plimsoll_runtime::live;
use plimsoll_runtime::lock;
use plimsoll_runtime::machine::Reading;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::timeline::MeasuredTimeline;
use plimsoll_runtime::watch::{StageRecorder, Watch};
use plimsoll_runtime::{Level, Observer, RuntimeError, Trained};
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A request to train.
#[derive(Clone, Debug)]
pub struct TrainRequest {
    /// The configuration, with every key.
    pub config: TrainConfig,
    /// The run's folder.
    pub output: PathBuf,
    /// Checkpoint or fresh start of the run.
    pub resume: Resume,
}

/// Opens the model of a configuration, with its data at the beginning.
pub type OpenModel<'a> = &'a mut dyn FnMut(&TrainConfig, &mut dyn Observer) -> Result<OpenedModel, TrainError>;

/// Summary of a finished run.
#[derive(Clone, Debug)]
pub struct TrainReport {
    /// The run's folder.
    pub output: PathBuf,
    /// Path of the newest checkpoint; `None` if the run wrote none.
    pub checkpoint: Option<PathBuf>,
    /// Final state of the run.
    pub state: RunState,
    /// Steps done by this process.
    pub steps: u64,
    /// Mean cross-entropy per target of the last step, in nats; `None` if this process did no step.
    pub loss: Option<f64>,
    /// The limit that ended the run.
    pub ended: Ended,
    /// Seconds from the start of the training loop in this process to its end.
    pub seconds: f64,
    /// Tokens trained on in these seconds, per second.
    pub tokens_per_second: f64,
    /// Contents of run.json.
    pub run_record: TrainRecord,
    /// Memory budget.
    pub budget: Bytes,
    /// The timeline of the plans with a measured micro-step, if it was requested.
    pub timeline: Option<MeasuredTimeline>,
}

/// Trains the model opened by `open`, from a checkpoint or from scratch, until a limit of the configuration is reached.
pub fn train_with(
    request: &TrainRequest,
    open: OpenModel<'_>,
    observer: &mut dyn Observer,
) -> Result<TrainReport, TrainError> {
    train(request, false, open, observer)
}

/// Trains as [`train_with`] does, then measures a micro-step more, for [`TrainReport::timeline`].
pub fn train_with_timeline(
    request: &TrainRequest,
    open: OpenModel<'_>,
    observer: &mut dyn Observer,
) -> Result<TrainReport, TrainError> {
    train(request, true, open, observer)
}

fn train(
    request: &TrainRequest,
    timeline: bool,
    open: OpenModel<'_>,
    observer: &mut dyn Observer,
) -> Result<TrainReport, TrainError> {
    let output = &request.output;
    let mut watch = TrainWatch::start(output);
    // Held until the run ends: two runs in one folder would overwrite each other's files.
    let lock = lock::take(output, &[])?;
    if !lock.is_held() {
        let text = format!(
            "{} is on a file system without file locks; make sure that no other run writes to it",
            EscapedPath(output)
        );
        observer.say(Level::Warning, &text);
    }
    folder::check_folder(output, &request.config.input_files())?;
    remove_leftovers(&output.join(live::FILE));
    let checkpoints = Checkpoints::open(output)?;
    let found = resume::choose(&request.resume, &checkpoints, &request.config, observer)?;
    // From here on the folder belongs to this run, so run.json must tell the truth about it even if the run fails.
    let asked = match &found {
        Some(checkpoint) => resume::asked(&checkpoint.record, &request.config)?,
        None => serde_json::to_value(&request.config).map_err(|e| RuntimeError::bug(e.to_string()))?,
    };
    let mut record = RunningRecord { output, asked: &asked, written: folder::written(output) };
    record.write("running", None, &watch)?;
    let run = LockedRun {
        request,
        measures_timeline: timeline,
        checkpoints,
        start: found,
        record: &mut record,
        watch: &mut watch,
    };
    let done = train_from(run, open, observer);
    done.inspect_err(|error| {
        let status = if matches!(error, TrainError::Runtime(RuntimeError::Interrupted { .. })) {
            "interrupted"
        } else {
            "failed"
        };
        if let Err(why) = record.write(status, Some(error), &watch) {
            observer.say(
                Level::Warning,
                &format!(
                    "run.json could not be updated and still says that the run is \
                running: {why}"
                ),
            );
        }
    })
}

/// Describes the sizes of the data.
fn sizes_of(data: &DataSummary) -> String {
    let DataSummary { unit, training, validation, dropped, tokens_of_epoch } = data;
    let dropped = match dropped {
        0 => String::new(),
        n => format!(" ({n} more are trained on too, and left out)"),
    };
    let tokens = tokens_of_epoch.map_or_else(String::new, |n| format!("; about {n} tokens an epoch"));
    format!("{training} {unit} to train on, {validation} held out{dropped}{tokens}")
}

/// Writer of run.json for a run that has not finished.
struct RunningRecord<'a> {
    output: &'a Path,
    asked: &'a Value,
    /// Files that this run, or the run that it continues, wrote.
    written: WrittenFiles,
}

impl RunningRecord<'_> {
    fn write(&self, status: &str, error: Option<&TrainError>, watch: &Watch) -> Result<(), TrainError> {
        let record = UnfinishedRecord {
            version: env!("CARGO_PKG_VERSION"),
            status,
            config: self.asked,
            stages: watch.stages(),
            health: watch.record(),
            outputs: &self.written,
            error: error.map(ToString::to_string),
        };
        write_text(&self.output.join(folder::RECORD), &format!("{:#}\n", to_json(&record)))
    }
}

/// A run whose folder is locked and checked, and whose model is not open yet.
struct LockedRun<'a, 'r> {
    request: &'a TrainRequest,
    /// Whether a micro-step is measured after the run, for [`TrainReport::timeline`].
    measures_timeline: bool,
    checkpoints: Checkpoints,
    /// The checkpoint that the run starts from; `None` from scratch.
    start: Option<VerifiedCheckpoint>,
    record: &'a mut RunningRecord<'r>,
    watch: &'a mut TrainWatch,
}

/// Opens the model of a run and trains it to its end.
fn train_from(
    run: LockedRun<'_, '_>,
    open: OpenModel<'_>,
    observer: &mut dyn Observer,
) -> Result<TrainReport, TrainError> {
    let LockedRun { request, measures_timeline, checkpoints, start, record: run_record, watch } = run;
    let output = &request.output;
    let asked = run_record.asked;
    let kept = match &start {
        Some(checkpoint) => kept_choices(&checkpoint.record.choices, &request.config)?,
        None => BTreeMap::new(),
    };
    // Values chosen for the completed steps must hold for the following steps too.
    let config = request.config.with(&kept)?;
    let record = &mut |name: &str, reading: &Reading, observer: &mut dyn Observer| {
        watch.starting(name, reading, observer);
    };
    // A run does not record its folder as a key, but what it keeps on disk lies there.
    let mut placed = config.clone();
    placed.run.output = Some(output.to_string_lossy().into_owned());
    let mut model = open(&placed, &mut StageRecorder { inner: observer, record })?;
    let choices: BTreeMap<String, Value> = kept.into_iter().chain(model.facts.choices.clone()).collect();
    let config = request.config.with(&choices)?;
    let state = match &start {
        None => RunState::new(&config.precision, model.batches.position()?),
        Some(checkpoint) => {
            checkpoint.restore(model.stepper.as_mut())?;
            model.batches.seek(&checkpoint.record.state.position)?;
            let step = checkpoint.record.state.step;
            let path = EscapedPath(&checkpoint.path);
            observer.say(Level::Info, &format!("resuming after step {step} of {path}"));
            checkpoint.record.state.clone()
        }
    };
    if config.run.writes_checkpoints() {
        check_disk(output, model.stepper.as_ref())?;
    }
    folder::write_config(output, &config, &mut run_record.written, observer)?;
    // The record lists the configuration from now on, also if the process is killed.
    run_record.write("running", None, watch)?;
    // Read before the metrics are cut to the steps of the checkpoint.
    let replay = metrics::changes_after(output, state.step)?;
    let dynamic = DynamicBatch::of(&config, model.facts.sizes.clone(), replay);
    let mut metrics = Metrics::open(output, state.step, config.run.tensorboard)?;
    watch.opened(&model.facts, state.step, &mut metrics)?;
    let newest = start.map(|checkpoint| (checkpoint.record.state.step, checkpoint.path));
    let mut trainer = TrainingLoop {
        asked: asked.clone(),
        written: run_record.written.clone(),
        rate: Rate::new(&config),
        config,
        choices,
        model,
        checkpoints,
        metrics,
        newest,
        timers: RunTimers::start(state.step, state.tokens),
        saved: Instant::now(),
        state,
        loss: None,
        started: VecDeque::new(),
        watch,
        dynamic,
        phase: TrainPhase::Start,
        empty_epochs: 0,
    };
    trainer.start_sizes()?;
    trainer.stage("opened", observer)?;
    // A kill between a checkpoint and its link, and a resume from an older checkpoint, leave another link.
    trainer.checkpoints.link_best(trainer.best())?;
    for line in trainer.introduction(output) {
        observer.say(Level::Info, &line);
    }
    trainer.watch.begin("training", observer);
    let ended = match trainer.run(observer) {
        Ok(ended) => ended,
        Err(error) => return Err(trainer.with_phase(error, &[])),
    };
    trainer.stage("trained", observer)?;
    trainer.report(output, ended, measures_timeline, observer)
}

/// Selects the choices of an earlier process that a resumed run keeps: those that affect results, and those that affect
/// rounding, such as the size of micro-steps, unless `config` states other values.
fn kept_choices(
    choices: &BTreeMap<String, Value>,
    config: &TrainConfig,
) -> Result<BTreeMap<String, Value>, RuntimeError> {
    let asked = serde_json::to_value(config).map_err(|e| RuntimeError::bug(e.to_string()))?;
    let mut kept = BTreeMap::new();
    for leaf in leaves(&schema()) {
        let is_kept = match leaf.changes.as_str() {
            "results" => true,
            // It follows from the size of micro-steps and the kind of device.
            "rounding" if leaf.path == "memory.loss_chunk" => false,
            // With memory.dynamic the size of micro-steps has other keys.
            "rounding" if leaf.path == "batch.micro_tokens" && config.memory.dynamic.is_some() => false,
            "rounding" => resume::at_path(&asked, &leaf.path) == "auto",
            _ => false,
        };
        if is_kept && let Some(value) = choices.get(&leaf.path) {
            kept.insert(leaf.path, value.clone());
        }
    }
    Ok(kept)
}

/// Checks that the file system of the run's folder has room for a checkpoint, so that the first one does not fail after hours.
fn check_disk(output: &Path, model: &dyn Tensors) -> Result<(), TrainError> {
    let needed = Checkpoints::bytes(model)?;
    match disk::free(output) {
        Some(free) if free < needed => {
            Err(TrainError::NoRoomForCheckpoint { folder: output.to_owned(), needed, free })
        }
        Some(_) | None => Ok(()),
    }
}

/// The configuration's word for an enum value.
fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| Some(value.as_str()?.to_owned())).unwrap_or_default()
}

/// A run in progress.
struct TrainingLoop<'a> {
    /// The configuration before choices were made; a resumed run is compared with it.
    asked: Value,
    /// Files that the run record lists as written by this run.
    written: WrittenFiles,
    /// The configuration with the chosen values filled in.
    config: TrainConfig,
    choices: BTreeMap<String, Value>,
    rate: Rate,
    model: OpenedModel,
    checkpoints: Checkpoints,
    metrics: Metrics,
    state: RunState,
    /// Step and path of the newest intact checkpoint.
    newest: Option<(u64, PathBuf)>,
    /// When the newest checkpoint was written, or when the run began.
    saved: Instant,
    timers: RunTimers,
    /// Mean cross-entropy per target of the last step.
    loss: Option<f64>,
    /// Steps that were started and whose results were not read yet, the oldest first. Empty whenever something else than
    /// the next step follows: an evaluation, a checkpoint, the end of the run.
    started: VecDeque<StartedStep>,
    watch: &'a mut TrainWatch,
    /// Sizes of micro-steps; `None` without `memory.dynamic`.
    dynamic: Option<DynamicBatch>,
    /// Present phase of the run, for an error.
    phase: TrainPhase,
    /// Epochs that have ended since the last micro-step.
    empty_epochs: u64,
}

/// A step that was started and whose results were not read yet.
struct StartedStep {
    step: u64,
    accumulated: Accumulated,
    lr: f64,
    /// Loss scale of fp16.
    scale: f64,
    /// Tokens trained on so far, with this step.
    tokens: u64,
}

/// Sums over the micro-steps that one update accumulates.
#[derive(Default)]
struct Accumulated {
    micro_steps: u64,
    /// Packs of the data in the micro-steps.
    packs: u64,
    /// Epoch in which the update began.
    epoch: u64,
    /// Hyperparameters of the update.
    hyper: Vec<f32>,
    tokens: u64,
    targets: u64,
}

impl Accumulated {
    fn add(&mut self, taken: Taken) {
        self.micro_steps += 1;
        self.packs += taken.packs;
        self.tokens += taken.tokens;
        self.targets += taken.targets;
    }
}

/// Sums of the results of the micro-steps of one update.
#[derive(Default)]
struct AccumulatedResult {
    loss: f64,
    /// Auxiliary losses, weighted by the targets of their micro-steps.
    auxiliary: Auxiliary,
    dropped: u64,
}

impl AccumulatedResult {
    fn add(&mut self, found: &MicroStepResult) {
        self.loss += found.loss;
        self.dropped += found.dropped;
        self.auxiliary.add(&found.auxiliary, found.targets as f64);
    }
}

/// Timers of this process.
struct RunTimers {
    began: Instant,
    first_step: u64,
    first_tokens: u64,
    logged: Instant,
    logged_tokens: u64,
    /// Time spent waiting for training data since the last call of [`RunTimers::lap`].
    waited: Duration,
    /// Time of evaluations, which is not counted in rates: in all, and since the last call of [`RunTimers::lap`].
    evaluated: [Duration; 2],
}

impl RunTimers {
    fn start(step: u64, tokens: u64) -> Self {
        let now = Instant::now();
        Self {
            began: now,
            first_step: step,
            first_tokens: tokens,
            logged: now,
            logged_tokens: tokens,
            waited: Duration::ZERO,
            evaluated: [Duration::ZERO; 2],
        }
    }

    /// Tokens per second of training since the start.
    fn rate(&self, tokens: u64) -> f64 {
        // A step can end within the resolution of the clock; the rate stays finite.
        let trained = self.began.elapsed().saturating_sub(self.evaluated[0]);
        (tokens - self.first_tokens) as f64 / trained.as_secs_f64().max(1e-9)
    }

    /// Leaves the time of an evaluation out of the rates.
    fn leave_out(&mut self, time: Duration) {
        self.evaluated.iter_mut().for_each(|sum| *sum += time);
    }

    /// Tokens per second since the previous call, and the seconds of that time in which the loop waited for data.
    fn lap(&mut self, tokens: u64) -> (f64, f64) {
        let trained = self.logged.elapsed().saturating_sub(std::mem::take(&mut self.evaluated[1]));
        let seconds = trained.as_secs_f64().max(1e-9);
        let rate = (tokens - self.logged_tokens) as f64 / seconds;
        (self.logged, self.logged_tokens) = (Instant::now(), tokens);
        (rate, std::mem::take(&mut self.waited).as_secs_f64())
    }
}

impl TrainingLoop<'_> {
    /// Describes the run in five lines: model, files, sizes of the data, memory, and output.
    fn introduction(&self, output: &Path) -> Vec<String> {
        let TrainConfig { model, data, batch, memory, run, precision, distillation, .. } = &self.config;
        let facts = &self.model.facts;
        let parameters = match (facts.parameters, facts.trained_parameters) {
            // Without adapters all parameters are trained but those that hold angles of the positions.
            (Some(all), Some(trained)) if model.lora.is_some() || model.freeze_encoder => {
                format!(" of {all} parameters, of which {trained} are trained,")
            }
            (Some(all), _) => format!(" of {all} parameters"),
            (None, _) => String::new(),
        };
        let from = model.from.as_ref().map_or("random weights".to_owned(), |from| from.clone());
        let teachers = match distillation.teacher.as_slice() {
            [] => String::new(),
            [only] => format!(", with the teacher {}", EscapedPath(Path::new(only))),
            all => format!(", with {} teachers", all.len()),
        };
        let end = [
            run.steps.map(|n| format!("{n} steps")),
            run.epochs.map(|n| format!("{n} epochs")),
            run.max_tokens.map(|n| format!("{n} targets")),
        ];
        let mut end = end.into_iter().flatten().collect::<Vec<_>>().join(" or ");
        if let Some(steps) = facts.counted_steps {
            end += &format!(" ({steps} steps in all)");
        }
        let files = match data.train.as_slice() {
            [only] => EscapedPath(Path::new(only)).to_string(),
            [first, rest @ ..] => format!("{} and {} more", EscapedPath(Path::new(first)), rest.len()),
            [] => "nothing".to_owned(),
        };
        let checkpoints = match &run.save_every {
            Some(every) if every.is_never() => "no checkpoint".to_owned(),
            Some(every) => format!("a checkpoint every {every} and at the end"),
            None => "a checkpoint at the end".to_owned(),
        };
        let micro = match self.dynamic.as_ref().map(DynamicBatch::range) {
            Some([smallest, largest]) => format!("{smallest} to {largest}, by the free memory"),
            // A micro-step of a head is a pack.
            None => batch.micro_tokens.0.unwrap_or_else(|| self.config.pack_tokens()).to_string(),
        };
        let first = [
            format!(
                "trains a {}{parameters} from {from}{teachers}, in {}, with {}, for {end}",
                model.kind.name(),
                word(&precision.kind),
                word(&facts.optimizer),
            ),
            format!(
                "on {files}, {} tokens a step in packs of {} and micro-steps of {micro}; computed by {}",
                batch.tokens,
                self.config.pack_tokens(),
                facts.device
            ),
        ];
        let rest = [
            format!(
                "memory: {} planned of a budget of {} ({})",
                facts.peak.rounded(),
                facts.budget.rounded(),
                memory.budget
            ),
            format!(
                "writes to {}: metrics.jsonl, config.yaml, run.json, and {checkpoints}",
                EscapedPath(output)
            ),
        ];
        first.into_iter().chain(facts.data.as_ref().map(sizes_of)).chain(rest).collect()
    }

    /// Trains until a limit is reached.
    fn run(&mut self, observer: &mut dyn Observer) -> Result<Ended, TrainError> {
        // The signal that arrived by the end of the last step.
        let mut signal = None;
        // Whether the data of an epoch ended where a step would have begun.
        let mut is_between_epochs = false;
        loop {
            let memory = if is_between_epochs { None } else { self.read_memory()? };
            let decision = self.decide(LoopMoment::BeforeStep { signal, memory });
            self.carry_out(&decision, observer)?;
            if let Some(stop) = decision.stop {
                return self.end(stop, observer);
            }
            let epoch = self.state.epoch;
            let has_stepped = self.step_with_retries(observer)?;
            let ends_epoch = self.state.epoch > epoch;
            let since_save = self.saved.elapsed();
            let decision = self.decide(LoopMoment::AfterStep { has_stepped, ends_epoch, since_save });
            self.carry_out(&decision, observer)?;
            is_between_epochs = !has_stepped;
            // Signals are heeded after a step, an evaluation or a checkpoint; at the end of an epoch without one of them the
            // next step, or the end of the run, comes first.
            let is_idle = is_between_epochs && decision == Decision::default();
            signal = if is_idle { None } else { observer.stop() };
        }
    }

    /// Returns the decision at a moment of the loop. The loop has no other call of [`decide`], so this is where ranks can
    /// exchange the value.
    fn decide(&self, moment: LoopMoment) -> Decision {
        let Self { config, state, dynamic, .. } = self;
        decide(&Situation { run: &config.run, state, dynamic: dynamic.as_ref(), moment })
    }

    /// Carries out a decision. Reads the results of started steps first: of all, or of all but the newest if the next step may
    /// start before its results are known.
    fn carry_out(&mut self, decision: &Decision, observer: &mut dyn Observer) -> Result<(), TrainError> {
        // The loss scale of the next step depends on whether this one overflowed.
        let scales = self.config.precision.scales_loss();
        let waits = scales || !self.model.facts.is_asynchronous || *decision != Decision::default();
        self.finish_steps(if waits { 0 } else { 1 }, observer)?;
        let is_best = decision.evaluate && self.evaluate(observer)?;
        let saves = match decision.save {
            Save::No => false,
            Save::IfBest => is_best,
            Save::Yes => true,
        };
        if saves {
            self.save(observer)?;
        }
        match decision.size {
            Some(size) => self.resize(size, observer),
            None => Ok(()),
        }
    }

    /// Ends the run, after the decision to do so was carried out.
    fn end(&self, stop: StopReason, observer: &mut dyn Observer) -> Result<Ended, TrainError> {
        let step = self.state.step;
        match stop {
            StopReason::Limit(ended) => {
                if ended == Ended::Patience {
                    observer.say(Level::Info, &self.stopped_early());
                }
                if step > 0 && self.state.updates == 0 {
                    return Err(TrainError::EveryStepSkipped { steps: step });
                }
                Ok(ended)
            }
            StopReason::Signal(signal) => {
                let kept = match self.newest.as_ref().filter(|(there, _)| *there == step) {
                    Some((_, path)) => {
                        let path = EscapedPath(path);
                        format!("step {step} is kept in {path}; the same command resumes from it")
                    }
                    None => format!("step {step} is lost, because run.save_every is never"),
                };
                Err(RuntimeError::Interrupted { signal, kept }.into())
            }
            // Where the memory was lacking, `with_retries` returns its error.
            StopReason::OutOfMemory => Err(RuntimeError::bug("a lack of memory between two steps").into()),
        }
    }

    /// Says why `run.patience` ended the run.
    fn stopped_early(&self) -> String {
        let RunState { step, stale, improved, .. } = self.state;
        let by = match self.config.run.min_delta {
            0.0 => String::new(),
            min_delta => format!(" by more than {min_delta}"),
        };
        let from = improved.map_or_else(String::new, |loss| format!(" {loss:.4}"));
        format!(
            "stopped early after step {step}: {stale} evaluations without a validation loss below{from}{by} \
             (run.patience)"
        )
    }

    /// Uses the size of micro-steps that the checkpoint has, or the largest.
    fn start_sizes(&mut self) -> Result<(), TrainError> {
        let Some(dynamic) = &mut self.dynamic else { return Ok(()) };
        if let Some(last) = self.state.size {
            let size = dynamic.size_of(last.tokens);
            self.model.stepper.set_size(size)?;
            dynamic.set(size);
        }
        let tokens = dynamic.tokens();
        if self.state.size.is_none_or(|last| last.tokens != tokens) {
            self.state.resized(self.state.step + 1, tokens);
        }
        self.watch.resized(tokens, self.model.facts.planned_memory(dynamic.now()));
        Ok(())
    }

    /// Reads the memory in use before the next step, if the size of micro-steps follows it there.
    fn read_memory(&mut self) -> Result<Option<Memory>, TrainError> {
        let step = self.state.step + 1;
        let Some(dynamic) = self.dynamic.as_mut().filter(|dynamic| dynamic.follows_memory(step)) else {
            return Ok(None);
        };
        let memory = self.model.facts.usage()?;
        dynamic.record_reading(step);
        Ok(Some(memory))
    }

    /// Changes the size of micro-steps from the next step on, or of those of the step that is repeated, and records it. All
    /// results must have been read.
    fn resize(&mut self, size: NewSize, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(dynamic) = &mut self.dynamic else { return Ok(()) };
        let NewSize { to, reason, utilisation } = size;
        let step = self.state.step + 1;
        let from = dynamic.tokens();
        if reason == Reason::OutOfMemory {
            dynamic.lacks_memory(step);
            // Earlier steps are complete on the device; what remains after their results is of the step that failed.
            self.model.stepper.abandon();
        }
        match self.model.stepper.set_size(to) {
            // The reading was overtaken: the run continues with its size.
            Err(error) if error.is_out_of_memory() && reason != Reason::OutOfMemory => {
                dynamic.lacks_memory(step);
                let to = dynamic.tokens_of(to);
                let text =
                    format!("step {step}: there is no memory for micro-steps of {to} tokens; {from} are kept");
                observer.say(Level::Warning, &text);
                return Ok(());
            }
            other => other?,
        }
        dynamic.set(to);
        let tokens = dynamic.tokens();
        self.watch.resized(tokens, self.model.facts.planned_memory(to));
        self.state.resized(step, tokens);
        let cause = dynamic.cause(reason, utilisation);
        let text = format!("step {step}: micro-steps of {tokens} tokens instead of {from} ({cause})");
        observer.say(Level::Info, &text);
        self.metrics.put(&SizeLine {
            event: SIZE_EVENT,
            step,
            from,
            to: tokens,
            reason: reason.name(),
            utilisation: utilisation.and_then(number),
        })
    }

    /// Starts one update as [`TrainingLoop::start_step`] does; repeats the step with smaller micro-steps if the device has too little
    /// memory.
    fn step_with_retries(&mut self, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        let before = match &self.dynamic {
            Some(_) => Some((self.model.batches.position()?, self.state.epoch)),
            None => None,
        };
        self.with_retries(observer, &mut |this, is_repeated| {
            if is_repeated && let Some((position, epoch)) = &before {
                this.model.batches.seek(position)?;
                this.state.epoch = *epoch;
            }
            this.start_step()
        })
    }

    /// Runs `act`. If the device has too little memory for it, carries out the decision on that: changes to smaller micro-steps,
    /// which gives memory back, and runs it again, or fails.
    fn with_retries<T>(
        &mut self,
        observer: &mut dyn Observer,
        act: &mut dyn FnMut(&mut Self, bool) -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        let mut smaller = vec![];
        loop {
            let error = match act(self, !smaller.is_empty()) {
                Err(error) if error.is_out_of_memory() => error,
                other => return other,
            };
            let is_repeatable = self.phase != TrainPhase::Update || !self.model.stepper.has_begun_update();
            let decision = self.decide(LoopMoment::OutOfMemory { retries: smaller.len(), is_repeatable });
            if decision.stop.is_some() {
                return Err(self.with_phase(error, &smaller));
            }
            self.carry_out(&decision, observer)?;
            smaller.extend(self.dynamic.as_ref().map(DynamicBatch::tokens));
        }
    }

    /// Adds the phase, what holds the memory and what to try to an error of a lack of memory; returns other errors unchanged.
    /// `smaller` are the sizes that were tried.
    fn with_phase(&self, error: TrainError, smaller: &[u64]) -> TrainError {
        if !error.is_out_of_memory() {
            return error;
        }
        error.in_phase(
            self.state.step + 1,
            self.phase,
            self.model.facts.memory_report(),
            self.dynamic.is_some(),
            smaller,
        )
    }

    /// Starts one update; returns false if the data ended first.
    fn start_step(&mut self) -> Result<bool, TrainError> {
        let accumulated = self.accumulate()?;
        if accumulated.micro_steps == 0 {
            return Ok(false);
        }
        if accumulated.targets == 0 {
            return Err(RuntimeError::bug("the micro-batches of a step have no targets").into());
        }
        let step = self.state.step + 1;
        let lr = self.rate.at(self.schedule_step(), accumulated.epoch);
        // Gradients are those of the scaled sum over targets; the update divides both out, which makes them those of the mean.
        let unscale = (1.0 / (f64::from(self.loss_scale()) * accumulated.targets as f64)) as f32;
        self.phase = TrainPhase::Update;
        self.model.stepper.apply(&accumulated.hyper, unscale)?;
        self.state.step = step;
        self.state.tokens += accumulated.tokens;
        self.state.targets += accumulated.targets;
        // Read now: both change before the results of this step are logged.
        let scale = self.state.scale.factor;
        let tokens = self.state.tokens;
        self.started.push_back(StartedStep { step, accumulated, lr, scale, tokens });
        Ok(true)
    }

    /// Reads the results of started steps until at most `max_left` are left.
    fn finish_steps(&mut self, max_left: usize, observer: &mut dyn Observer) -> Result<(), TrainError> {
        while self.started.len() > max_left
            && let Some(started) = self.started.pop_front()
        {
            self.read_result(&started, observer)?;
        }
        Ok(())
    }

    /// An error if the results of a step were not read: the state would not be that of the weights.
    fn check_all_finished(&self) -> Result<(), TrainError> {
        if self.started.is_empty() {
            Ok(())
        } else {
            Err(RuntimeError::bug("the results of a step were not read").into())
        }
    }

    /// Reads the result of the oldest started step.
    fn read_result(&mut self, started: &StartedStep, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let &StartedStep { step, ref accumulated, tokens, .. } = started;
        let mut found = AccumulatedResult::default();
        let applied =
            self.model.stepper.finish_step(accumulated.micro_steps, &mut |result| found.add(&result))?;
        // The run ends without a checkpoint, so it does not matter whether this step or the one after it changed weights.
        if !found.loss.is_finite() && !self.config.precision.scales_loss() {
            return Err(TrainError::LossNotFinite { step });
        }
        self.state.after(applied.ok, &self.config.precision, step)?;
        if !applied.ok {
            if self.config.precision.scales_loss() {
                let scale = self.state.scale.factor;
                let text = format!("step {step} skipped: gradient not finite; the loss scale is now {scale}");
                observer.say(Level::Info, &text);
            } else {
                let row = self.state.skipped_in_a_row;
                let text = format!(
                    "step {step} skipped: gradient not finite, {row} in a row; the run ends at {SKIPS_IN_A_ROW}"
                );
                observer.say(Level::Warning, &text);
            }
        }
        self.loss = Some(found.loss / accumulated.targets as f64);
        self.watch.step(step, observer);
        if step.is_multiple_of(self.config.run.log_every) {
            self.log(started, &found, applied)?;
        }
        let trained = Trained {
            step,
            steps: self.steps(),
            loss: self.loss.unwrap_or_default(),
            tokens_per_second: self.timers.rate(tokens),
            memory: self.watch.reading().process,
            line: self.model.facts.budget,
        };
        observer.trained(&trained);
        self.watch.trained(&trained, observer);
        if step == self.timers.first_step + 1 {
            let stepper = self.model.stepper.as_ref();
            self.watch.stage("first step", step, stepper, &mut self.metrics, observer)?;
        }
        Ok(())
    }

    /// The number of steps of the run, if it is known.
    fn steps(&self) -> Option<u64> {
        [self.config.run.steps, self.model.facts.counted_steps].into_iter().flatten().min()
    }

    /// The factor of a micro-batch's summed cross-entropy.
    fn loss_scale(&self) -> f32 {
        self.state.scale.of_micro_batch(&self.config.precision, self.config.batch.tokens)
    }

    /// Maximum number of packs of a micro-step. Without `memory.dynamic` there is one size of micro-steps, which
    /// [`Batches::take`](super::opened_model::Batches::take) keeps to.
    fn packs_of_micro_step(&self) -> u64 {
        self.dynamic.as_ref().map_or(u64::MAX, |dynamic| dynamic.tokens() / self.config.pack_tokens())
    }

    /// Hyperparameters of the next update, which begins in `epoch`.
    fn hyper(&self, epoch: u64) -> Vec<f32> {
        let earlier = self.schedule_step();
        hyper(self.model.facts.optimizer, &self.config.optimizer, self.rate.at(earlier, epoch), earlier + 1)
    }

    /// Number of earlier steps, as the schedule and the bias corrections of the optimizer count them. In fp16 skipped steps are
    /// part of the method, do not count, and it is known whether the last step was skipped. In other formats that is read only
    /// after the next step has begun, so skipped steps count, as they do in PyTorch, which skips none.
    fn schedule_step(&self) -> u64 {
        if self.config.precision.scales_loss() { self.state.updates } else { self.state.step }
    }

    /// Runs the micro-steps of the next update: fewer at the end of an epoch, none if the run ends there.
    fn accumulate(&mut self) -> Result<Accumulated, TrainError> {
        self.phase = TrainPhase::MicroStep;
        let packs_of_step = self.config.packs_of_step();
        let mut accumulated = Accumulated::default();
        let run = &self.config.run;
        // What is done between two epochs comes before the first step of the next one.
        let mut intervals = [&run.evaluate_every, &run.save_every].into_iter().flatten();
        let pauses = intervals.any(|every| every.epochs().is_some());
        let packs = self.packs_of_micro_step();
        let loss_scale = self.loss_scale();
        while accumulated.packs < packs_of_step {
            // In the loop: where `take` ends an epoch, the update has the rate of the next one, in which its first
            // micro-step lies. Before the micro-steps: one that updates the weights itself reads the hyperparameters.
            if accumulated.micro_steps == 0 {
                accumulated.epoch = self.state.epoch;
                accumulated.hyper = self.hyper(accumulated.epoch);
            }
            let requested = Instant::now();
            let batch = self.model.batches.take(packs.min(packs_of_step - accumulated.packs))?;
            self.timers.waited += requested.elapsed();
            let Some(batch) = batch else {
                self.state.epoch += 1;
                self.empty_epochs += 1;
                if self.empty_epochs > 1 {
                    return Err(TrainError::EmptyEpoch);
                }
                if accumulated.micro_steps > 0 || pauses || Ended::of(run, &self.state).is_some() {
                    break;
                }
                continue;
            };
            self.empty_epochs = 0;
            let scalars =
                MicroStepScalars { keep: accumulated.micro_steps > 0, loss_scale, hyper: &accumulated.hyper };
            self.model.stepper.micro_step(&batch, scalars)?;
            accumulated.add(batch.taken);
        }
        Ok(accumulated)
    }

    fn log(
        &mut self,
        started: &StartedStep,
        found: &AccumulatedResult,
        applied: Applied,
    ) -> Result<(), TrainError> {
        let &StartedStep { step, ref accumulated, lr, scale, tokens } = started;
        let scales = self.config.precision.scales_loss();
        let targets = accumulated.targets as f64;
        let mut auxiliary = Auxiliary::default();
        auxiliary.add(&found.auxiliary, 1.0 / targets);
        let (tokens_per_second, data_wait_seconds) = self.timers.lap(tokens);
        let line = StepLine {
            step,
            loss: number(found.loss / targets),
            auxiliary,
            lr: number(lr),
            grad_norm: number(applied.norm),
            tokens,
            epoch: accumulated.epoch,
            micro_steps: accumulated.micro_steps,
            tokens_per_second: number(tokens_per_second),
            data_wait_seconds: number(data_wait_seconds),
            seconds: number(self.timers.began.elapsed().as_secs_f64()),
            dropped: found.dropped,
            expert_load: self.model.stepper.expert_rows(),
            loss_scale: number(scale).filter(|_| scales),
            skipped: self.state.skipped,
            ..StepLine::default()
        };
        self.metrics.put(&line.with_memory(self.watch.reading(), self.watch.health()))
    }

    /// Records the memory at the end of a stage.
    fn stage(&mut self, name: &str, observer: &mut dyn Observer) -> Result<(), TrainError> {
        self.watch.stage(name, self.state.step, self.model.stepper.as_ref(), &mut self.metrics, observer)
    }

    /// Evaluates the mean loss on the validation data, without auxiliary losses. Returns whether it is the lowest so
    /// far.
    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        self.check_all_finished()?;
        self.watch.begin("evaluating", observer);
        let began = Instant::now();
        let (loss, targets) = self.with_retries(observer, &mut |this, _| this.validation_loss())?;
        self.timers.leave_out(began.elapsed());
        if targets == 0 {
            return Err(TrainError::NothingToEvaluate);
        }
        let step = self.state.step;
        let loss = loss / targets as f64;
        let best = self.state.evaluated(loss, self.config.run.min_delta);
        let validation_loss = number(loss);
        let validation_targets = targets;
        self.metrics.put(&EvaluationLine { step, validation_loss, validation_targets, best })?;
        let mark = if best { ", the lowest so far" } else { "" };
        observer
            .say(Level::Info, &format!("step {step}: validation loss {loss:.4} over {targets} targets{mark}"));
        self.stage("evaluation", observer)?;
        self.watch.evaluated(loss);
        self.watch.begin("training", observer);
        Ok(best)
    }

    /// Sum of the losses of the validation data, and the number of their targets.
    fn validation_loss(&mut self) -> Result<(f64, u64), TrainError> {
        self.phase = TrainPhase::Evaluation;
        let max_targets = self.config.run.evaluate_tokens.unwrap_or(u64::MAX);
        let mut loss = 0.0;
        let mut targets = 0;
        let OpenedModel { batches, stepper, .. } = &mut self.model;
        batches.rewind()?;
        while targets < max_targets
            && let Some(batch) = batches.take_validation(max_targets - targets)?
        {
            loss += stepper.evaluate(&batch)?;
            targets += batch.taken.targets;
        }
        Ok((loss, targets))
    }

    /// Saves a checkpoint of the current step unless it exists or the run writes none, and removes older ones.
    fn save(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        self.check_all_finished()?;
        if !self.config.run.writes_checkpoints() {
            return Ok(());
        }
        let step = self.state.step;
        if self.newest.as_ref().is_none_or(|(there, _)| *there != step) {
            self.watch.begin("writing a checkpoint", observer);
            // The position is after the packs of all started steps, and the weights include these steps too. The number
            // of updates and the loss scale change only when results are read, hence the check at the beginning.
            self.state.position = self.model.batches.position()?;
            let path = self.with_retries(observer, &mut |this, _| {
                this.phase = TrainPhase::Checkpoint;
                let record = CheckpointRecord {
                    plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
                    state: this.state.clone(),
                    config: this.asked.clone(),
                    choices: this.choices.clone(),
                };
                this.checkpoints.save(&record, this.model.stepper.as_mut())
            })?;
            self.newest = Some((step, path));
            self.saved = Instant::now();
            // The link leaves an older checkpoint before that is removed.
            self.checkpoints.link_best(self.best())?;
            self.checkpoints.rotate(self.config.run.keep_last, self.best())?;
            self.stage("checkpoint", observer)?;
            self.watch.begin("training", observer);
        }
        Ok(())
    }

    /// Step of the checkpoint that is kept because it is the best.
    fn best(&self) -> Option<u64> {
        self.state.best.filter(|_| self.config.run.keep_best).map(|best| best.step)
    }

    /// Measures a micro-step after the last checkpoint: it changes weights and gradients that nothing reads any more.
    fn measured_timeline(&mut self) -> Result<Option<MeasuredTimeline>, TrainError> {
        let packs = self.packs_of_micro_step();
        let hyper = self.hyper(self.state.epoch);
        let OpenedModel { batches, stepper, .. } = &mut self.model;
        // The data may be at the end of an epoch, after which the next call begins another one.
        for _ in 0..2 {
            if let Some(batch) = batches.take(packs)? {
                return stepper.measured_timeline(&batch, &hyper);
            }
        }
        Err(TrainError::EmptyEpoch)
    }

    fn report(
        mut self,
        output: &Path,
        ended: Ended,
        measures_timeline: bool,
        observer: &mut dyn Observer,
    ) -> Result<TrainReport, TrainError> {
        // Without `run.save_every: never` the run saved its last step before it ended.
        let checkpoint = self.newest.take().map(|(_, path)| path);
        let seconds = self.timers.began.elapsed().as_secs_f64();
        let tokens_per_second = self.timers.rate(self.state.tokens);
        let facts = &self.model.facts;
        let run_record = TrainRecord {
            version: env!("CARGO_PKG_VERSION"),
            status: "finished",
            config: self.asked.clone(),
            choices: self.choices.clone(),
            ended: ended.key(),
            stopped_early: ended == Ended::Patience,
            state: self.state.clone(),
            loss: self.loss,
            checkpoint: checkpoint.as_ref().map(|path| path.display().to_string()),
            seconds,
            tokens_per_second,
            device: facts.device.clone(),
            budget_bytes: facts.budget,
            peak_bytes: facts.peak,
            plan: facts.plan.clone(),
            stages: self.watch.stages().to_vec(),
            health: self.watch.record().cloned(),
            outputs: self.written.clone(),
        };
        write_text(&output.join(folder::RECORD), &format!("{:#}\n", to_json(&run_record)))?;
        self.watch.finish();
        // The run is complete, so a failure here must not turn its record into that of a failed run.
        let timeline = match measures_timeline.then(|| self.measured_timeline()) {
            None => None,
            Some(Ok(timeline)) => timeline,
            Some(Err(error)) => {
                let text = format!("a step could not be measured, so no timeline is written: {error}");
                observer.say(Level::Warning, &text);
                None
            }
        };
        Ok(TrainReport {
            budget: self.model.facts.budget,
            timeline,
            output: output.to_owned(),
            checkpoint,
            steps: self.state.step - self.timers.first_step,
            state: self.state,
            loss: self.loss,
            ended,
            seconds,
            tokens_per_second,
            run_record,
        })
    }
}
