//! The training engine: implements [`Trainable`] on a device with compiled plans, an arena and a data feed. Invariant:
//! every step executes the plans; memory allocated outside the arena is limited to the batch and a few scalars.

mod evaluation;
mod largest;
mod program;
mod remedies;
mod store;
mod trained_model;

pub use evaluation::{EvaluationReport, EvaluationRequest, evaluate};
pub use largest::{Largest, Size, largest};

use super::config::{ModelKind, OptimizerKind, TrainConfig};
use super::feed::{self, Feed};
use super::priced;
use super::trainable::{
    AVERAGE, Applied, Auxiliary, Evaluated, InstructionTime, MicroStepResult, StatePart, Stored, Taken,
    Trainable,
};
use crate::TrainError;
use crate::config::PROCESS;
use plimsoll_data::train::HostMemory;
use plimsoll_data::train::crops::CropBatch;
use plimsoll_data::weights::HubEnv;
use plimsoll_graph::{Bounds, Bytes};
use plimsoll_plan::{Instr, KernelId, PlanError, Program, Staging, Target, node_seconds};
use plimsoll_runtime::hub::{Need, trainable};
use plimsoll_runtime::machine::{available, parse_budget};
use plimsoll_runtime::process::Process;
use plimsoll_runtime::session::{Batch, Losses, MicroStep, Site, StepResult, TrainSession};
use plimsoll_runtime::{Budget, Device, Level, Observer, RuntimeError, Settings, price};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;
use store::Store;
use trained_model::TrainedModel;

/// Plans the training of a configuration on a target within a memory budget. Reads no weights and no training data
/// except a tokenizer, the row widths of a head's embeddings, and the `config.json` of the initial model.
pub fn plan_of(
    config: &TrainConfig,
    target: &Target,
    budget: Bytes,
    observer: &mut dyn Observer,
) -> Result<plimsoll_plan::TrainingChoice, TrainError> {
    program::search(config, &subject(config, observer)?, target, budget, observer)
}

/// Opens the model of a configuration together with its data on `device`, ready for the first step.
pub fn open(
    config: &TrainConfig,
    device: Device,
    observer: &mut dyn Observer,
) -> Result<Box<dyn Trainable>, TrainError> {
    let evaluates = config.run.evaluate_every.is_some();
    let prepared = Prepared::open(config, device, program::largest(config), evaluates, observer)?;
    let found = program::search(config, &prepared.subject, &prepared.target, prepared.for_plans(), observer);
    let found = found.map_err(|error| prepared.bill(error))?;
    let Prepared { settings, budget, subject, mut feed, held, .. } = prepared;
    let (on_host, budget_bytes) = (budget.on_host, budget.bytes);
    let bounds = program::bounds(config, found.candidate.tokens);
    feed.bound(of_data(bounds))?;
    let plimsoll_plan::TrainingChoice { program, candidate, .. } = found;
    let site = Site::new(&settings, 1, None, budget);
    if let Some(text) = settings.first_use() {
        observer.say(Level::Info, &text);
    }
    let session = TrainSession::start(&site, program, &subject.source(config.run.seed), observer)?;
    site.budget().admits_held(session.program(), Bytes::ZERO)?;
    site.compare(session.program(), Bytes::ZERO, "at the start", observer);
    let store = Store::of(&session, &subject, config.run.seed);
    let asked = |auto: bool, key: &str, value: Value| auto.then(|| (key.to_owned(), value));
    let kind = program::kind_of(&candidate.optimizer);
    // The name of a machine begins with the device, such as `cuda:0`.
    let name = settings.machine().name();
    let device = if on_host { "cpu" } else { name.split(' ').next().unwrap_or_default() };
    let choices = [
        asked(config.batch.micro_tokens.0.is_none(), "batch.micro_tokens", json!(candidate.tokens)),
        asked(config.batch.sequences.0.is_none(), "batch.sequences", json!(bounds.sequences)),
        asked(config.memory.loss_chunk.0.is_none(), "memory.loss_chunk", json!(candidate.chunk)),
        asked(config.optimizer.kind == OptimizerKind::Auto, "optimizer.kind", json!(kind)),
        asked(config.run.device == "auto", "run.device", json!(device)),
        asked(config.run.threads.0.is_none() && on_host, "run.threads", json!(settings.threads)),
    ];
    let device = match (on_host, config.run.threads.0) {
        (true, Some(n)) => format!("the CPU, {n} threads"),
        (true, None) => "the CPU".to_owned(),
        (false, _) => name,
    };
    Ok(Box::new(Engine {
        choices: choices.into_iter().flatten().collect(),
        seed: config.run.seed,
        device,
        on_host,
        budget: budget_bytes,
        held,
        kind,
        bounds,
        taken: None,
        teachers: subject.teachers()?,
        micro_steps: 0,
        targets: VecDeque::new(),
        hyper: vec![],
        subject,
        store,
        feed,
        session,
    }))
}

/// What is open before anything is planned: the machine with its budget, the model, and the data.
struct Prepared {
    settings: Settings,
    target: Target,
    /// The budget of the whole process, or of the GPU.
    budget: Budget,
    subject: TrainedModel,
    feed: Feed,
    /// Host memory held by the data.
    held: Vec<HostMemory>,
}

impl Prepared {
    /// Opens the model and the data, of which batches have at most the bounds `largest`; `evaluates` tells whether
    /// training and validation data are read at the same time.
    fn open(
        config: &TrainConfig,
        device: Device,
        largest: Bounds,
        evaluates: bool,
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let settings = config.run.settings(device.clone());
        let (target, on_host) = (config.run.target(device)?, settings.is_on_host());
        // A share of the free memory is resolved before anything is opened and takes some.
        let free = if on_host { available().free } else { settings.free()? };
        let bytes = parse_budget(&config.memory.budget, free)?;
        let subject = subject(config, observer)?;
        let feed = Feed::open(config, of_data(largest), tokenizer(config, observer)?.as_deref())?;
        let held = feed.host_bytes(evaluates);
        let process = if on_host { beyond_reserved(config, &settings) } else { vec![] };
        let budget = Budget { bytes, on_host, host_memory: None, process };
        Ok(Self { settings, target, budget, subject, feed, held })
    }

    /// Host memory held by the data.
    fn data(&self) -> Bytes {
        self.held.iter().map(|h| Bytes(h.bytes)).sum()
    }

    /// The budget of the plans. On a GPU the data and the process are not in the memory that the budget is of.
    fn for_plans(&self) -> Bytes {
        match self.budget.on_host {
            true => self.budget.for_plans().saturating_sub(self.data()),
            false => self.budget.bytes,
        }
    }

    /// Adds the memory of the process and of the data to the bill of an over-budget error of a plan in host memory.
    fn bill(&self, error: TrainError) -> TrainError {
        match error {
            TrainError::Runtime(RuntimeError::Plan(error)) if self.budget.on_host => {
                with_data(self.budget.with_process(error).into(), self.budget.bytes, &self.held).into()
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
    let Some(mut process) = Process::now(settings) else { return vec![] };
    process.add_threads(settings, workers + 2);
    process.add_queues(settings, CHECKPOINT);
    process.beyond(PROCESS)
}

/// Bytes that are buffered in host memory while a checkpoint is written or read.
const CHECKPOINT: u64 = 4 << 20;

/// Converts bounds of a graph to bounds of the data pipeline.
fn of_data(bounds: Bounds) -> plimsoll_data::train::Bounds {
    let Bounds { tokens, sequences, longest } = bounds;
    plimsoll_data::train::Bounds {
        tokens: tokens as usize,
        sequences: sequences as usize,
        longest: longest as usize,
    }
}

/// Adds the memory held by the data to the bill of an over-budget error, so that the bill covers the whole process.
fn with_data(error: RuntimeError, budget: Bytes, held: &[HostMemory]) -> RuntimeError {
    let RuntimeError::Plan(PlanError::OverBudget(mut bill)) = error else { return error };
    bill.budget = budget;
    held.iter().for_each(|h| bill.ledger.add(&format!("data: {}", h.what), Bytes(h.bytes)));
    RuntimeError::Plan(PlanError::OverBudget(bill))
}

/// Builds the model description of a configuration. For a head, opens the embeddings to read their widths.
fn subject(config: &TrainConfig, observer: &mut dyn Observer) -> Result<TrainedModel, TrainError> {
    if config.model.kind != ModelKind::Head {
        return TrainedModel::open(
            config,
            feed::vocabulary(config, tokenizer(config, observer)?.as_deref())?,
            &[],
            observer,
        );
    }
    let rows = plimsoll_data::train::rows::RowSet::open(feed::row_settings(config, 2)?)?;
    let widths: Vec<u64> = rows.widths().iter().map(|&w| w as u64).collect();
    TrainedModel::open(config, 0, &widths, observer)
}

/// Returns the tokenizer.json next to the initial weights, if there is one.
fn tokenizer(config: &TrainConfig, observer: &mut dyn Observer) -> Result<Option<PathBuf>, TrainError> {
    let Some(from) = &config.model.from else { return Ok(None) };
    if config.model.kind == ModelKind::Head {
        return Ok(None);
    }
    let folder = trainable(from, Need::Model, &HubEnv::from_process(), observer)?.config();
    Ok(Some(folder.with_file_name(plimsoll_runtime::hub::TOKENIZER)).filter(|path| path.is_file()))
}

/// Reads the number of micro-steps from a checkpoint's position; it seeds dropout, so a resumed run must continue the
/// count.
fn micro_steps(position: &Value) -> Result<u64, TrainError> {
    let found = &position["micro_steps"];
    found.as_u64().ok_or_else(|| TrainError::MicroSteps { found: found.clone() })
}

/// A model in training on a device, with its plans and its data.
struct Engine {
    session: TrainSession,
    feed: Feed,
    subject: TrainedModel,
    store: Store,
    bounds: Bounds,
    kind: OptimizerKind,
    choices: Vec<(String, Value)>,
    seed: u64,
    /// The device that computes, with its name.
    device: String,
    /// Whether the plans are in host memory.
    on_host: bool,
    /// Memory budget of the process, or of the GPU.
    budget: Bytes,
    /// Host memory held by the data outside the arena.
    held: Vec<HostMemory>,
    taken: Option<Taken>,
    /// Digests of the files of each teacher, by name. A resumed run must have the same teachers.
    teachers: Vec<BTreeMap<String, String>>,
    /// Number of micro-steps of the run so far, part of the dropout seed: every micro-step must draw a different mask.
    micro_steps: u64,
    /// Numbers of targets of the micro-steps whose results were not read yet, the oldest first.
    targets: VecDeque<u64>,
    /// Hyperparameters of the optimizer for the step that is beginning.
    hyper: Vec<f32>,
}

/// Borrows the batch most recently taken from the feed.
fn batch(feed: &Feed) -> Batch<'_> {
    match feed {
        Feed::Tokens(feed) => {
            let batch = &feed.batch;
            Batch::Tokens {
                ids: &batch.ids,
                spans: &batch.spans,
                targets: std::slice::from_ref(&batch.targets),
            }
        }
        Feed::Rows(feed) => Batch::Rows { parts: &feed.batch.parts, targets: &feed.batch.targets },
        Feed::Crops(feed) => {
            let CropBatch { ids, spans, targets, .. } = &feed.batch;
            Batch::Tokens { ids, spans, targets }
        }
    }
}

impl Trainable for Engine {
    fn take(&mut self) -> Result<Option<Taken>, TrainError> {
        self.taken = self.feed.take()?;
        Ok(self.taken)
    }

    fn prepare(&mut self, hyper: &[f32]) {
        hyper.clone_into(&mut self.hyper);
    }

    fn micro_step(&mut self, keep: bool, loss_scale: f32) -> Result<(), TrainError> {
        let (targets, seed) = (self.targets_taken(), self.next_seed());
        let step = MicroStep { keep, loss_scale, targets, hyper: &self.hyper, seed };
        self.session.submit_micro_step(batch(&self.feed), step)?;
        self.targets.push_back(targets);
        Ok(())
    }

    fn timed_micro_step(&mut self) -> Result<Vec<InstructionTime>, TrainError> {
        let (plan, target) = (self.session.micro_plan(), self.program().target());
        let counts = batch(&self.feed).counts();
        let described = |instr: &Instr| match *instr {
            Instr::Launch(id) => {
                let node = plan.graph.node(id);
                let (op, out) = (node.op.name(), node.outputs.iter().flatten().next());
                InstructionTime {
                    instruction: out.map_or(op.to_owned(), |&v| format!("{op} {}", plan.graph.spec(v))),
                    kernel: target.kernel_of(&plan.graph, node).map_or("", KernelId::name),
                    expected: node_seconds(&plan.graph, node, target, counts),
                    measured: Duration::ZERO,
                }
            }
            Instr::Load(_) | Instr::Copy { .. } => InstructionTime {
                instruction: "transfer".to_owned(),
                kernel: "",
                expected: 0.0,
                measured: Duration::ZERO,
            },
        };
        let mut found: Vec<InstructionTime> = plan.schedule.instrs.iter().map(described).collect();
        let mut times = vec![Duration::ZERO; found.len()];
        let (targets, seed) = (self.targets_taken(), self.next_seed());
        let step = MicroStep { keep: false, loss_scale: 1.0, targets, hyper: &self.hyper, seed };
        self.session.timed_micro_step(batch(&self.feed), step, &mut times)?;
        found.iter_mut().zip(times).for_each(|(instruction, time)| instruction.measured = time);
        Ok(found)
    }

    fn apply(&mut self, hyper: &[f32], unscale: f32) -> Result<(), TrainError> {
        self.session.submit_update(hyper, unscale)?;
        Ok(())
    }

    fn is_asynchronous(&self) -> bool {
        self.session.depth() > 1
    }

    fn finish_step(
        &mut self,
        micro_steps: u64,
        found: &mut dyn FnMut(MicroStepResult),
    ) -> Result<Applied, TrainError> {
        let mut moved = None;
        for _ in 0..micro_steps {
            let StepResult::MicroStep(losses) = self.session.result()? else {
                return Err(results_out_of_order());
            };
            let targets = self.targets.pop_front().ok_or_else(results_out_of_order)?;
            let Losses { cross_entropy, z, distillation, balance, router_z, dropped, .. } = losses;
            let [z, distillation] = [z, distillation].map(|sum| sum.map(|sum| sum / f64::from(targets as f32)));
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

    fn evaluate(&mut self) -> Result<Option<Evaluated>, TrainError> {
        let Some(Taken { targets, .. }) = self.feed.take_validation()? else { return Ok(None) };
        let loss = self.session.evaluate(batch(&self.feed))?;
        Ok(Some(Evaluated { loss, targets }))
    }

    fn rewind(&mut self) -> Result<(), TrainError> {
        self.feed.rewind()
    }

    fn position(&self) -> Result<Value, TrainError> {
        let mut position = json!({"data": self.feed.position()?, "micro_steps": self.micro_steps});
        if !self.teachers.is_empty() {
            position["teachers"] = json!(self.teachers);
        }
        Ok(position)
    }

    fn seek(&mut self, position: &Value) -> Result<(), TrainError> {
        if !self.teachers.is_empty() && position["teachers"] != json!(self.teachers) {
            return Err(TrainError::OtherTeachers);
        }
        self.micro_steps = micro_steps(position)?;
        self.feed.seek(&position["data"])
    }

    fn optimizer(&self) -> OptimizerKind {
        self.kind
    }

    fn choices(&self) -> Vec<(String, Value)> {
        self.choices.clone()
    }

    fn parameters(&self) -> Option<u64> {
        Some(priced::parameters(&self.session.micro_plan().graph))
    }

    fn plan(&self) -> Result<Value, TrainError> {
        let mut plan = price::to_json(self.program())?;
        let held = self.held.iter();
        plan["host"] =
            held.map(|h| (h.what.to_owned(), json!(h.bytes))).collect::<serde_json::Map<_, _>>().into();
        plan["sequences"] = json!(self.bounds.sequences);
        Ok(plan)
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn budget(&self) -> Bytes {
        self.budget
    }

    fn peak(&self) -> Bytes {
        let data = if self.on_host { self.held.iter().map(|h| Bytes(h.bytes)).sum() } else { Bytes::ZERO };
        self.program().peak() + data
    }

    fn tensors(&self, part: StatePart) -> Vec<Stored> {
        self.store.tensors(part)
    }

    fn file(&self, part: StatePart) -> &'static str {
        self.subject.file(part)
    }

    fn read(
        &mut self,
        part: StatePart,
        tensor: usize,
        elements: std::ops::Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), TrainError> {
        self.store.read(&mut self.session, &self.subject, part, tensor, elements, out)
    }

    fn write(&mut self, part: StatePart, tensor: usize, start: u64, bytes: &[u8]) -> Result<(), TrainError> {
        self.store.write(&mut self.session, part, tensor, start, bytes)
    }

    fn extra_files(&self) -> Result<Vec<(String, Vec<u8>)>, TrainError> {
        let files = self.subject.extra_files(&self.store.tensors(StatePart::Model));
        // The model with averaged weights is complete by itself, so it has its own copies of the small files.
        let averages = match self.store.tensors(StatePart::Average).is_empty() {
            true => vec![],
            false => files.iter().map(|(name, bytes)| (format!("{AVERAGE}/{name}"), bytes.clone())).collect(),
        };
        Ok([files, averages].concat())
    }
}

/// The results of a step are not those of its micro-steps followed by that of its update.
fn results_out_of_order() -> TrainError {
    RuntimeError::bug("the results of a step are in another order than its micro-steps and its update").into()
}

impl Engine {
    /// Number of targets of the micro-batch taken last.
    fn targets_taken(&self) -> u64 {
        self.taken.map_or(0, |taken| taken.targets)
    }

    /// Counter of dropout's random generator for the next micro-step.
    fn next_seed(&mut self) -> [i32; 2] {
        let word = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) as i32;
        let seed = [word, self.micro_steps as i32];
        self.micro_steps += 1;
        seed
    }

    fn program(&self) -> &Program {
        self.session.program()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_steps_that_cannot_be_read_are_refused() {
        assert_eq!(micro_steps(&json!({"micro_steps": 7})).expect("a number"), 7);
        for position in [json!({}), json!({"micro_steps": -1}), json!({"micro_steps": "7"}), json!(null)] {
            let error = micro_steps(&position).expect_err("refused").to_string();
            assert!(error.contains("position.micro_steps"), "{error}");
        }
    }
}
