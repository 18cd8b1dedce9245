//! The training engine: opens a configuration as an [`OpenedModel`], with compiled plans and an arena on a device, and a data
//! feed. Invariant: every step executes the plans; memory allocated outside the arena is limited to the batch and a few scalars.

mod evaluation;
mod explain;
mod joined;
mod largest;
mod program;
mod remedies;
mod store;
mod trained_model;

pub use evaluation::{EvaluationReport, EvaluationRequest, evaluate};
pub use explain::explain;
pub use largest::{LargestDimension, LargestRun, RunMemory, largest};

use super::config::{ModelKind, OptimizerKind, TrainConfig};
use super::feed::{self, TrainFeed};
use super::opened_model::{
    AVERAGE, Applied, Auxiliary, Batches, ExpertRows, InstructionTime, MemoryReport, MicroBatch,
    MicroStepResult, MicroStepScalars, MicroStepSize, OpenedModel, StatePart, Stepper, StoredTensor, Tensors,
    TrainFacts,
};
use super::priced;
use crate::config::{Auto, PROCESS};
use crate::error::{TrainError, TrainPhase};
use joined::{BatchLimit, JoinedBatch};
use plimsoll_data::train::{DataMemory, Split};
use plimsoll_data::weights::HubEnv;
use plimsoll_graph::{Bounds, Bytes, Counts, Graph, NodeId};
use plimsoll_plan::{
    Candidate, Instr, KernelId, Ledger, ParameterGroup, PlanError, Program, Remedy, Room, Staging, Target,
    TrainingChoice, node_seconds,
};
use plimsoll_runtime::dynamic::RETRIES;
use plimsoll_runtime::hub::{Need, trainable};
use plimsoll_runtime::machine::{available, free_on_disk, holders, parse_budget};
use plimsoll_runtime::price::PlanReport;
use plimsoll_runtime::process::ProcessMemory;
use plimsoll_runtime::session::{MicroStepInputs, MicroStepLosses, Site, StepResult, TrainSession};
use plimsoll_runtime::timeline::{MeasuredStep, MeasuredTimeline, sampled};
use plimsoll_runtime::{Budget, Device, Level, Machine, Observer, RuntimeError, Settings, price};
use program::PlanLimits;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{CheckpointTensors, TensorSlice};
use trained_model::TrainedModel;

/// Plans the training of a configuration on a target within a memory budget. Reads no weights and no training data
/// except a tokenizer, the row widths of a head's embeddings, and the `config.json` of the initial model.
pub fn plan_of(
    config: &TrainConfig,
    target: &Target,
    budget: Bytes,
    observer: &mut dyn Observer,
) -> Result<plimsoll_plan::TrainingChoice, TrainError> {
    program::search(config, &open_trained_model(config, observer)?, target, PlanLimits::of(budget), observer)
}

/// Opens the model of a configuration together with its data on `device`, ready for the first step.
pub fn open(
    config: &TrainConfig,
    device: Device,
    observer: &mut dyn Observer,
) -> Result<OpenedModel, TrainError> {
    let unnamed = config.model.class_names.is_empty();
    let config = &feed::named(config)?;
    let evaluates = config.run.evaluate_every.is_some();
    let prepared = PreparedTraining::open(config, device, evaluates, observer)?;
    let StartedSession { session, candidate, site, tokens_per_second } = start(config, &prepared, observer)?;
    let outside_plans = prepared.budget.bytes.saturating_sub(prepared.for_plans());
    let PreparedTraining { settings, budget, model, mut feed, data_memory, .. } = prepared;
    let on_host = budget.on_host;
    let budget_bytes = budget.bytes;
    let room = budget.room;
    let dynamic = config.memory.dynamic.as_ref();
    let pack = program::pack_bounds(config);
    let joined = JoinedBatch::new(program::bounds(config, candidate.tokens), &feed);
    let counted = count_steps(config, &mut feed, observer)?;
    if dynamic.is_some() && session.micro_steps().len() == 1 {
        let text = format!(
            "memory.dynamic: only micro-steps of {} tokens fit the budget, so their size cannot change",
            candidate.tokens
        );
        observer.say(Level::Warning, &text);
    }
    site.budget().admits_held(session.program(), Bytes::ZERO)?;
    site.compare(session.program(), Bytes::ZERO, "at the start", observer);
    let store = CheckpointTensors::of(&session, &model, config.run.seed);
    let kind = program::kind_of(&candidate.optimizer);
    // The name of a machine begins with the device, such as `cuda:0`.
    let name = settings.machine().name();
    let device = if on_host { "cpu" } else { name.split(' ').next().unwrap_or_default() };
    // A micro-step of a head is a pack.
    let is_head = config.model.kind == ModelKind::Head;
    let choices = [
        choice(config.batch.pack_tokens.0.is_none(), "batch.pack_tokens", json!(pack.tokens)),
        choice(
            dynamic.is_none() && config.batch.micro_tokens.0.is_none() && !is_head,
            "batch.micro_tokens",
            json!(candidate.tokens),
        ),
        choice(
            dynamic.is_some_and(|d| d.min_batch.0.is_none()),
            "memory.dynamic.min_batch",
            json!(config.dynamic_sizes().last()),
        ),
        choice(
            dynamic.is_some_and(|d| d.max_batch.0.is_none()),
            "memory.dynamic.max_batch",
            json!(candidate.tokens),
        ),
        // Each row of a head is a sequence of its own, so the key has no effect on it.
        choice(config.batch.sequences.0.is_none() && !is_head, "batch.sequences", json!(pack.sequences)),
        counted.map(|steps| ("schedule.steps".to_owned(), json!(steps))),
        choice(
            unnamed && !config.model.class_names.is_empty(),
            "model.class_names",
            json!(config.model.class_names),
        ),
        // Micro-steps of several sizes have a number of rows each.
        choice(
            dynamic.is_none() && config.memory.loss_chunk.0.is_none(),
            "memory.loss_chunk",
            json!(candidate.chunk),
        ),
        choice(config.optimizer.kind == OptimizerKind::Auto, "optimizer.kind", json!(kind)),
        choice(config.run.device == "auto", "run.device", json!(device)),
        choice(config.run.threads.0.is_none() && on_host, "run.threads", json!(settings.threads)),
    ];
    let device = match (on_host, config.run.threads.0) {
        (true, Some(n)) => format!("the CPU, {n} threads"),
        (true, None) => "the CPU".to_owned(),
        (false, _) => name,
    };
    let program = session.program();
    let graph = &session.micro_plan().graph;
    let trained_parameters =
        priced::elements(graph, |param| model.group(config, param) != ParameterGroup::Frozen);
    // On a GPU the data are not in the memory that the budget is of.
    let data_bytes = if on_host { total_bytes(&data_memory) } else { Bytes::ZERO };
    // The sizes of the session are in descending order.
    let sizes = session.micro_steps().into_iter().rev();
    let facts = TrainFacts {
        optimizer: kind,
        choices: choices.into_iter().flatten().collect(),
        parameters: Some(priced::parameters(graph)),
        trained_parameters: Some(trained_parameters),
        data: Some(feed.summary()),
        counted_steps: counted,
        plan: Some(RunPlanReport::of(program, &data_memory, pack)?),
        device,
        machines: settings.machines(1),
        on_host,
        is_asynchronous: session.depth() > 1,
        budget: budget_bytes,
        peak: program.peak() + data_bytes,
        fragmentation: program.packing_waste(),
        largest_tensors: largest_tensors(program),
        sizes: sizes.map(|(tokens, bytes)| MicroStepSize { tokens, bytes }).collect(),
    };
    let evaluation_packs = session.evaluation_bounds().packs;
    let batches = EngineBatches { feed, joined, evaluation_packs, teachers: model.teachers()? };
    let seed = config.run.seed;
    let stepper = TrainEngine {
        seed: [seed as u32 as i32, (seed >> 32) as u32 as i32],
        machine: settings.machine(),
        config: config.clone(),
        outside_plans,
        room,
        tokens_per_second,
        targets: VecDeque::new(),
        expert_rows: vec![0; session.expert_layers().iter().map(|layer| layer.experts).sum()],
        model,
        store,
        session,
    };
    Ok(OpenedModel { facts, batches: Box::new(batches), stepper: Box::new(stepper) })
}

/// The value that was chosen for a key; `None` if the configuration states the value.
fn choice(is_auto: bool, key: &str, value: Value) -> Option<(String, Value)> {
    is_auto.then(|| (key.to_owned(), value))
}

/// The plan of a training run in run.json.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunPlanReport {
    /// The plan of the program.
    #[serde(flatten)]
    pub plan: PlanReport,
    /// Host memory of the data in bytes, by purpose.
    #[serde(rename = "host")]
    pub data: BTreeMap<&'static str, u64>,
    /// Bounds of a pack.
    pub pack: PackBounds,
}

/// Bounds of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PackBounds {
    /// Maximum number of tokens.
    pub tokens: u64,
    /// Maximum number of sequences.
    pub sequences: u64,
}

impl RunPlanReport {
    fn of(program: &Program, data_memory: &[DataMemory], pack: Bounds) -> Result<Self, TrainError> {
        let pack = PackBounds { tokens: pack.tokens, sequences: pack.sequences };
        let data = data_memory.iter().map(|part| (part.what, part.bytes)).collect();
        Ok(Self { plan: price::report(program)?, data, pack })
    }
}

/// Counts the steps of the epochs of a run, if its learning rates depend on their number: packs all of the data as the run will
/// do.
fn count_steps(
    config: &TrainConfig,
    feed: &mut TrainFeed,
    observer: &mut dyn Observer,
) -> Result<Option<u64>, TrainError> {
    let Some(epochs) = config.epochs_to_count() else { return Ok(None) };
    // Other limits of the run may come first.
    let max_steps = config.horizon().unwrap_or(u64::MAX);
    let mut steps = 0;
    for _ in 0..epochs {
        if steps >= max_steps {
            break;
        }
        let epoch = feed.count_epoch(&mut || {
            let kept = "nothing was trained yet".to_owned();
            let signal = observer.stop();
            signal.map_or(Ok(()), |signal| Err(RuntimeError::Interrupted { signal, kept }.into()))
        })?;
        steps += epoch.packs.div_ceil(config.packs_of_step());
    }
    feed.restart();
    let steps = steps.min(max_steps);
    config.check_warmup(steps)?;
    Ok(Some(steps))
}

/// A session that was started, with its choices.
struct StartedSession {
    session: TrainSession,
    candidate: Candidate,
    site: Site,
    /// Expected rate of the plan.
    tokens_per_second: f64,
}

/// Plans the training and starts its session. With `memory.dynamic`, the largest micro-step is halved if the device has too
/// little memory for it, at most [`RETRIES`] times.
fn start(
    config: &TrainConfig,
    prepared: &PreparedTraining,
    observer: &mut dyn Observer,
) -> Result<StartedSession, TrainError> {
    let PreparedTraining { settings, target, budget, model, .. } = prepared;
    let mut smaller = vec![];
    let mut config = config.clone();
    // The smallest size stays the same if fewer sizes are planned.
    let smallest = config.dynamic_sizes().last().copied();
    if let Some(dynamic) = &mut config.memory.dynamic {
        dynamic.min_batch = Auto(smallest);
    }
    if let Some(text) = settings.first_use() {
        observer.say(Level::Info, &text);
    }
    loop {
        let found = program::search(&config, model, target, prepared.limits(), observer);
        let TrainingChoice { program, candidate, tokens_per_second, .. } =
            found.map_err(|error| prepared.bill(error))?;
        let largest = largest_tensors(&program);
        let site = Site::new(settings, 1, None, budget.clone());
        observer.stage("planned", &site.reading());
        let error = match TrainSession::start(&site, program, &model.source(config.run.seed), observer) {
            Ok(session) => return Ok(StartedSession { session, candidate, site, tokens_per_second }),
            Err(error) => TrainError::from(error),
        };
        let next = config.dynamic_sizes().into_iter().find(|&tokens| tokens < candidate.tokens);
        let is_bill = matches!(error, TrainError::Runtime(RuntimeError::Plan(PlanError::OverBudget(_))));
        let lacks_memory = is_bill || error.is_out_of_memory();
        let next = next.filter(|_| lacks_memory && smaller.len() < RETRIES);
        let (Some(next), Some(dynamic)) = (next, &mut config.memory.dynamic) else {
            let report = MemoryReport { largest, holders: holders(&settings.machine(), settings.is_on_host()) };
            return Err(error.in_phase(
                0,
                TrainPhase::Start,
                report,
                config.memory.dynamic.is_some(),
                &smaller,
            ));
        };
        let text = format!(
            "the device has too little memory to start with micro-steps of {} tokens; at most {next} are planned",
            candidate.tokens
        );
        observer.say(Level::Warning, &text);
        dynamic.max_batch = Auto(Some(next));
        smaller.push(next);
    }
}

/// Folder for the scratch file of `memory.offload_to: disk`: the output folder of the run. A run has made it; for a plan the
/// nearest folder above it that exists is on the same disk.
fn scratch_folder(config: &TrainConfig) -> PathBuf {
    let output = Path::new(config.run.output.as_deref().unwrap_or("."));
    output.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new(".")).to_owned()
}

/// Host memory that the data holds; `evaluates` tells whether training and validation data are read at the same time.
fn data_memory_of(config: &TrainConfig, feed: &TrainFeed, evaluates: bool) -> Vec<DataMemory> {
    let mut data_memory = feed.host_bytes(evaluates);
    let bytes = JoinedBatch::host_bytes(program::largest(config), feed);
    data_memory.push(DataMemory { what: "joined packs", bytes });
    data_memory
}

/// Sum of the sizes of host memory.
fn total_bytes(data_memory: &[DataMemory]) -> Bytes {
    data_memory.iter().map(|h| Bytes(h.bytes)).sum()
}

/// The opened parts of a run that has no plan yet: the machine with its budget, the model, and the data.
struct PreparedTraining {
    settings: Settings,
    target: Target,
    /// The budget of the whole process, or of the GPU.
    budget: Budget,
    model: TrainedModel,
    feed: TrainFeed,
    /// Host memory held by the data.
    data_memory: Vec<DataMemory>,
}

impl PreparedTraining {
    /// Opens the model and the data; `evaluates` tells whether training and validation data are read at the same time.
    fn open(
        config: &TrainConfig,
        device: Device,
        evaluates: bool,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let settings = config.run.settings(device.clone());
        let target = config.run.target(device)?;
        let on_host = settings.is_on_host();
        // A share of the free memory is resolved before anything is opened and takes some.
        let free = if on_host { available().free } else { settings.free()? };
        let bytes = parse_budget(&config.memory.budget, free)?;
        let model = open_trained_model(config, observer)?;
        let pack = data_bounds(program::pack_bounds(config));
        let feed = TrainFeed::open(config, pack, tokenizer(config, observer)?.as_deref())?;
        feed.notes().iter().for_each(|note| observer.say(Level::Warning, note));
        let data_memory = data_memory_of(config, &feed, evaluates);
        let process = if on_host { beyond_reserved(config, &settings) } else { vec![] };
        let scratch = scratch_folder(config);
        let room = Room {
            host: available().free.saturating_sub(total_bytes(&data_memory)),
            file: free_on_disk(&scratch),
        };
        let budget = Budget { bytes, on_host, host_memory: None, room, scratch, process };
        Ok(Self { settings, target, budget, model, feed, data_memory })
    }

    /// Host memory held by the data.
    fn data(&self) -> Bytes {
        total_bytes(&self.data_memory)
    }

    /// The budget of the plans. On a GPU the data and the process are not in the memory that the budget is of.
    fn for_plans(&self) -> Bytes {
        if self.budget.on_host {
            self.budget.for_plans().saturating_sub(self.data())
        } else {
            self.budget.bytes
        }
    }

    /// The limits of the plans.
    fn limits(&self) -> PlanLimits {
        PlanLimits { budget: self.for_plans(), room: self.budget.room }
    }

    /// Adds the memory of the process and of the data to the bill of an over-budget error of a plan in host memory.
    fn bill(&self, error: TrainError) -> TrainError {
        match error {
            TrainError::Runtime(RuntimeError::Plan(error)) if self.budget.on_host => {
                bill_with_data(self.budget.with_process(error).into(), self.budget.bytes, &self.data_memory)
                    .into()
            }
            other => other,
        }
    }
}

/// Returns ledger lines for the memory of the process beyond the bytes that every training plan reserves for it
/// ([`PROCESS`]). Memory that the data already holds is counted twice: here, as part of the process, and in the lines
/// of the data.
fn beyond_reserved(config: &TrainConfig, settings: &Settings) -> Vec<Staging> {
    let workers = config.data.workers.0.unwrap_or(8) as usize;
    let Some(mut process) = ProcessMemory::now(settings) else { return vec![] };
    process.add_threads(settings, workers + 2);
    process.add_queues(settings, CHECKPOINT);
    process.beyond(PROCESS)
}

/// Bytes that are buffered in host memory while a checkpoint is written or read.
const CHECKPOINT: u64 = 4 << 20;

/// Converts bounds of a graph to bounds of the data pipeline.
fn data_bounds(bounds: Bounds) -> plimsoll_data::train::PackLimits {
    let Bounds { tokens, sequences, longest, .. } = bounds;
    plimsoll_data::train::PackLimits {
        tokens: tokens as usize,
        sequences: sequences as usize,
        longest: longest as usize,
    }
}

/// Adds the memory held by the data to the bill of an over-budget error, so that the bill covers the whole process.
fn bill_with_data(error: RuntimeError, budget: Bytes, data_memory: &[DataMemory]) -> RuntimeError {
    let RuntimeError::Plan(PlanError::OverBudget(mut bill)) = error else { return error };
    bill.budget = budget;
    data_memory.iter().for_each(|h| bill.ledger.add(&format!("data: {}", h.what), Bytes(h.bytes)));
    RuntimeError::Plan(PlanError::OverBudget(bill))
}

/// Builds the model description of a configuration. For a head, opens the embeddings to read their widths.
fn open_trained_model(config: &TrainConfig, observer: &mut dyn Observer) -> Result<TrainedModel, TrainError> {
    if config.model.kind != ModelKind::Head {
        return TrainedModel::open(
            config,
            feed::vocabulary(config, tokenizer(config, observer)?.as_deref())?,
            &[],
            observer,
        );
    }
    let rows = plimsoll_data::train::rows::RowSet::open(feed::row_settings(&feed::named(config)?, 2)?)?;
    let widths: Vec<u64> = rows.widths().iter().map(|&w| w as u64).collect();
    TrainedModel::open(config, 0, &widths, observer)
}

/// Returns the file of the tokenizer next to the initial weights; `None` if the data need none, or are read as bytes.
fn tokenizer(config: &TrainConfig, observer: &mut dyn Observer) -> Result<Option<PathBuf>, TrainError> {
    let Some(from) = &config.model.from else { return Ok(None) };
    if config.model.kind == ModelKind::Head {
        return Ok(None);
    }
    let is_encoder = matches!(config.model.kind, ModelKind::Esm2 | ModelKind::DnabertS);
    let need = if is_encoder || crate::tokenizer::reads_own(config) { Need::Model } else { Need::Weights };
    let path = trainable(from, need, &HubEnv::from_process(), observer)?.config();
    crate::tokenizer::own(config, from, path.parent().unwrap_or(Path::new(".")))
}

/// The data of a run, joined to micro-batches.
struct EngineBatches {
    feed: TrainFeed,
    /// The micro-batch taken last.
    joined: JoinedBatch,
    /// Packs of a batch of an evaluation.
    evaluation_packs: u64,
    /// Digests of the files of each teacher, by name. A resumed run must have the same teachers.
    teachers: Vec<BTreeMap<String, String>>,
}

impl EngineBatches {
    /// Takes the next packs of a split, up to `limit`.
    fn next(&mut self, split: Split, limit: BatchLimit) -> Result<Option<MicroBatch<'_>>, TrainError> {
        let taken = self.joined.fill(&mut self.feed, split, limit)?;
        Ok(taken.map(|taken| MicroBatch { taken, inputs: self.joined.batch() }))
    }
}

impl Batches for EngineBatches {
    fn take(&mut self, max_packs: u64) -> Result<Option<MicroBatch<'_>>, TrainError> {
        self.next(Split::Train, BatchLimit { packs: max_packs, targets: u64::MAX })
    }

    fn take_validation(&mut self, max_targets: u64) -> Result<Option<MicroBatch<'_>>, TrainError> {
        self.next(Split::Validation, BatchLimit { packs: self.evaluation_packs, targets: max_targets })
    }

    fn rewind(&mut self) -> Result<(), TrainError> {
        self.joined.moved(Split::Validation);
        self.feed.rewind()
    }

    fn position(&self) -> Result<Value, TrainError> {
        let mut position = json!({"data": self.feed.position()?});
        if !self.teachers.is_empty() {
            position["teachers"] = json!(self.teachers);
        }
        Ok(position)
    }

    fn seek(&mut self, position: &Value) -> Result<(), TrainError> {
        if !self.teachers.is_empty() && position["teachers"] != json!(self.teachers) {
            return Err(TrainError::OtherTeachers);
        }
        self.joined.moved(Split::Train);
        self.feed.seek(&position["data"])
    }
}

/// A model in training on a device, with its plans.
struct TrainEngine {
    session: TrainSession,
    model: TrainedModel,
    store: CheckpointTensors,
    /// The run's seed, as the graphs read it.
    seed: [i32; 2],
    /// The machine that computes.
    machine: Arc<dyn Machine>,
    /// The configuration, for the prices of other settings.
    config: TrainConfig,
    /// Part of the budget that is not for plans: on a CPU, the process and the data.
    outside_plans: Bytes,
    /// Room for what is kept outside the memory of the device, when the run was planned.
    room: Room,
    /// Rate that the plan expects.
    tokens_per_second: f64,
    /// Numbers of targets of the micro-steps whose results were not read yet, the oldest first.
    targets: VecDeque<u64>,
    /// Rows that each expert received in the step that was finished last, layer by layer.
    expert_rows: Vec<u64>,
}

impl TrainEngine {
    /// The scalar inputs of a micro-step, as the session takes them.
    fn scalars<'a>(&self, batch: &MicroBatch<'_>, scalars: MicroStepScalars<'a>) -> MicroStepInputs<'a> {
        let MicroStepScalars { keep, loss_scale, hyper } = scalars;
        MicroStepInputs { keep, loss_scale, targets: batch.taken.targets, hyper, seed: self.seed }
    }
}

impl Stepper for TrainEngine {
    fn micro_step(&mut self, batch: &MicroBatch<'_>, scalars: MicroStepScalars<'_>) -> Result<(), TrainError> {
        let step = self.scalars(batch, scalars);
        self.session.submit_micro_step(batch.inputs, step)?;
        self.targets.push_back(step.targets);
        Ok(())
    }

    fn timed_micro_step(
        &mut self,
        batch: &MicroBatch<'_>,
        hyper: &[f32],
    ) -> Result<Vec<InstructionTime>, TrainError> {
        let plan = self.session.micro_plan();
        let target = self.session.program().target();
        let counts = batch.inputs.counts();
        let instrs = plan.schedule.instrs.iter();
        let mut found: Vec<InstructionTime> = instrs
            .map(|instr| match *instr {
                Instr::Launch(id) => expected_launch(&plan.graph, id, target, counts),
                Instr::Start(_) => unpriced_move("start of move"),
                Instr::Wait(_) => unpriced_move("wait for move"),
            })
            .collect();
        let mut times = vec![Duration::ZERO; found.len()];
        let scalars = MicroStepScalars { keep: false, loss_scale: 1.0, hyper };
        let step = self.scalars(batch, scalars);
        self.session.timed_micro_step(batch.inputs, step, &mut times)?;
        found.iter_mut().zip(times).for_each(|(instruction, time)| instruction.measured = time);
        Ok(found)
    }

    fn measured_timeline(
        &mut self,
        batch: &MicroBatch<'_>,
        hyper: &[f32],
    ) -> Result<Option<MeasuredTimeline>, TrainError> {
        let counts = batch.inputs.counts();
        let mut times = vec![Duration::ZERO; self.session.micro_plan().schedule.instrs.len()];
        let scalars = MicroStepScalars { keep: false, loss_scale: 1.0, hyper };
        let step = self.scalars(batch, scalars);
        let session = &mut self.session;
        let start = Instant::now();
        let (done, samples) =
            sampled(self.machine.as_ref(), || session.timed_micro_step(batch.inputs, step, &mut times));
        done?;
        let micro = self.session.micro_plan_index();
        let step = MeasuredStep { plan: micro, counts, times: &times, start, samples: &samples };
        Ok(Some(MeasuredTimeline::new(self.session.program(), &step)))
    }

    fn apply(&mut self, hyper: &[f32], unscale: f32) -> Result<(), TrainError> {
        self.session.submit_update(hyper, unscale)?;
        Ok(())
    }

    fn finish_step(
        &mut self,
        micro_steps: u64,
        found: &mut dyn FnMut(MicroStepResult),
    ) -> Result<Applied, TrainError> {
        let mut moved = None;
        self.expert_rows.fill(0);
        for _ in 0..micro_steps {
            // Results arrive in the order of submission: those of the micro-steps, then that of the update.
            let StepResult::MicroStep(losses) = self.session.result()? else {
                return Err(results_out_of_order());
            };
            let rows = self.session.expert_rows();
            self.expert_rows.iter_mut().zip(rows).for_each(|(sum, &rows)| *sum += u64::from(rows));
            let targets = self.targets.pop_front().ok_or_else(results_out_of_order)?;
            let MicroStepLosses { cross_entropy, z, distillation, balance, router_z, dropped, .. } = losses;
            let [z, distillation, balance, router_z] =
                [z, distillation, balance, router_z].map(|sum| sum.map(|sum| sum / f64::from(targets as f32)));
            let auxiliary = Auxiliary { z, distillation, balance, router_z };
            moved = losses.moved;
            found(MicroStepResult { targets, loss: cross_entropy, auxiliary, dropped });
        }
        match moved {
            // There is no norm of all gradients: each gradient is consumed before the next is computed, so they never exist
            // at the same time.
            Some(ok) => Ok(Applied { norm: f64::NAN, ok }),
            None => {
                let StepResult::Update(update) = self.session.result()? else {
                    return Err(results_out_of_order());
                };
                Ok(Applied { norm: update.norm.unwrap_or(f64::NAN), ok: update.moved })
            }
        }
    }

    fn expert_rows(&self) -> ExpertRows<'_> {
        ExpertRows { layers: self.session.expert_layers(), rows: &self.expert_rows }
    }

    fn abandon(&mut self) {
        self.session.drop_submitted();
        self.targets.clear();
    }

    fn has_begun_update(&self) -> bool {
        self.session.has_begun_update()
    }

    fn evaluate(&mut self, batch: &MicroBatch<'_>) -> Result<f64, TrainError> {
        Ok(self.session.evaluate(batch.inputs)?)
    }

    fn set_size(&mut self, size: usize) -> Result<(), TrainError> {
        // The sizes of the session are in descending order.
        let from_largest = self.session.micro_steps().len().saturating_sub(size + 1);
        Ok(self.session.set_micro_step(from_largest)?)
    }

    fn remedies(&self, observer: &dyn Observer) -> Vec<Remedy> {
        let running = program::RunningPlan {
            program: self.session.program(),
            tokens_per_second: self.tokens_per_second,
            outside_plans: self.outside_plans,
            room: self.room,
        };
        program::remedies(&self.config, &self.model, running, observer)
    }
}

impl Tensors for TrainEngine {
    fn tensors(&self, part: StatePart) -> Vec<StoredTensor> {
        self.store.tensors(part)
    }

    fn file(&self, part: StatePart) -> &'static str {
        self.model.file(part)
    }

    fn read(
        &mut self,
        part: StatePart,
        tensor: usize,
        elements: std::ops::Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), TrainError> {
        let slice = TensorSlice { part, tensor, elements };
        self.store.read(&mut self.session, &self.model, slice, out)
    }

    fn write(&mut self, part: StatePart, tensor: usize, start: u64, bytes: &[u8]) -> Result<(), TrainError> {
        self.store.write(&mut self.session, part, tensor, start, bytes)
    }

    fn extra_files(&self) -> Result<Vec<(String, Vec<u8>)>, TrainError> {
        let files = self.model.extra_files(&self.store.tensors(StatePart::Model));
        // The model with averaged weights is complete by itself, so it has its own copies of the small files.
        if self.store.tensors(StatePart::Average).is_empty() {
            return Ok(files);
        }
        let averages = files.iter().map(|(name, bytes)| (format!("{AVERAGE}/{name}"), bytes.clone())).collect();
        Ok([files, averages].concat())
    }
}

/// The entry of a kernel launch, which was not measured yet.
fn expected_launch(graph: &Graph, id: NodeId, target: &Target, counts: Counts) -> InstructionTime {
    let node = graph.node(id);
    let op = node.op.name();
    let out = node.outputs.iter().flatten().next();
    InstructionTime {
        instruction: out.map_or(op.to_owned(), |&v| format!("{op} {}", graph.spec(v))),
        kernel: target.kernel_of(graph, node).map_or("", KernelId::name),
        expected: node_seconds(graph, node, target, counts),
        measured: Duration::ZERO,
    }
}

/// The entry of an instruction of a move, which was not measured yet. The plan expects no time of its own for it.
fn unpriced_move(name: &str) -> InstructionTime {
    InstructionTime { instruction: name.to_owned(), kernel: "", expected: 0.0, measured: Duration::ZERO }
}

/// Number of the largest tensors that an error names.
const LARGEST: usize = 4;

/// The largest tensors of a program with their sizes, for an error.
fn largest_tensors(program: &Program) -> String {
    Ledger { entries: program.largest_tensors(LARGEST) }.line()
}

/// The results of a step are not those of its micro-steps followed by that of its update.
fn results_out_of_order() -> TrainError {
    RuntimeError::bug("the results of a step are in another order than its micro-steps and its update").into()
}
