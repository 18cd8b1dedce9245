//! Planning of predictions, for `predict` and for `plimsoll plan --predict`, which loads no weights. Invariant:
//! both choose stages, steps and queue sizes with `StageSearch` and `hosts`.

use crate::VirusError;
use crate::methods::{self, PlannedMethod, PlannedModel};
use crate::options::PredictOptions;
pub use crate::pipeline::queues::QueueSizes;
use crate::pipeline::queues::{HostWork, QueueCandidate};
use crate::pipeline::shape::{HEAD_ROWS, MethodShape};
use crate::pipeline::stage::PredictStage;
use plimsoll_data::sequence::{InputExtent, extent};
use plimsoll_exec::{DeviceError, DeviceKind, Machine};
use plimsoll_graph::{Bytes, Counts};
use plimsoll_plan::{Precision, Program, Staging, Target, plan_seconds};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::explain::{self, Effect};
use plimsoll_runtime::price::{PlanReport, streamed_from};
use plimsoll_runtime::process::ProcessMemory;
use plimsoll_runtime::report::staging_by_label;
use plimsoll_runtime::session;
use plimsoll_runtime::{Budget, Device, Settings, price, replicas_for_input};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

/// Number of records that is assumed if no input is given.
const ASSUMED_RECORDS: u64 = 1_000_000;
/// Length in bytes of the longest name and title that is assumed if no input is given.
const ASSUMED_NAME: u64 = 64;

/// A request to plan a prediction.
#[derive(Clone, Debug)]
pub struct PredictPlanRequest {
    /// Options of the prediction; inputs may be empty, and models that are not on this machine are not opened.
    pub options: PredictOptions,
    /// Length of a read in bases, for the expected speed.
    pub read_length: u64,
    /// Average number of open reading frames per window, for the expected speed.
    pub orfs: f64,
    /// Whether the optimisations in effect are found, by planning with and without each.
    pub explain: bool,
}

/// The plan of a prediction.
#[derive(Debug)]
pub struct PlannedPrediction {
    target: Target,
    budget: Bytes,
    models: Vec<PlannedModel>,
    length: u64,
    stages: Vec<StagePlan>,
    process: Vec<Staging>,
    queues: QueueSizes,
    reads: ReadThroughput,
    /// The optimisations in effect in each stage, if they were requested.
    effects: Option<Vec<Vec<Effect>>>,
}

/// A stage of a plan.
#[derive(Debug)]
struct StagePlan {
    stage: PredictStage,
    /// The models of the stage in words.
    about: &'static str,
    program: Program,
}

/// Expected throughput for reads of one length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ReadThroughput {
    /// Length of a read in bases.
    #[serde(rename = "bases")]
    pub length: u64,
    /// Number of windows of a read.
    pub windows: u64,
    /// Average number of open reading frames per window.
    #[serde(rename = "orfs_of_a_window")]
    pub orfs: f64,
    /// Name of the sequences whose number in a window is `orfs`; `None` for a method that fixes this number itself.
    #[serde(skip)]
    pub sequence: Option<&'static str>,
    /// Expected reads per second.
    pub per_second: f64,
}

/// The plan of a prediction for reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictPlanReport {
    /// Name of the target.
    pub target: String,
    /// Memory budget.
    pub budget_bytes: Bytes,
    /// Name of each model by its role.
    pub models: BTreeMap<&'static str, String>,
    /// Length of a window in bases.
    pub window_bases: u64,
    /// The stages in order.
    pub stages: Vec<StagePlanReport>,
    /// Planned host memory of the process beside the arena.
    #[serde(serialize_with = "staging_by_label")]
    pub process: Vec<Staging>,
    /// Sizes of queues.
    pub queues: QueueSizes,
    /// Peak memory over the stages, including the process if it counts against the same memory.
    pub peak_bytes: Bytes,
    /// Expected speed.
    pub reads: ReadThroughput,
}

/// The plan of a stage of a prediction for reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StagePlanReport {
    /// The models of the stage, in words.
    pub stage: &'static str,
    /// The plan.
    #[serde(flatten)]
    pub plan: PlanReport,
    /// The optimisations in effect, if they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explain: Option<Vec<Effect>>,
}

/// A machine that is planned for and need not be present.
#[derive(Debug)]
struct PlannedMachine {
    target: Target,
    depth: usize,
}

impl Machine for PlannedMachine {
    fn kind(&self) -> DeviceKind {
        DeviceKind { family: "planned", model: self.target.name.clone() }
    }

    fn name(&self) -> String {
        self.kind().to_string()
    }

    fn precisions(&self) -> Vec<Precision> {
        vec![Precision::Bf16, Precision::Fp16, Precision::F32, Precision::Tf32, Precision::Fp8]
    }

    fn target(&self) -> Result<Target, DeviceError> {
        Ok(self.target.clone())
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        Ok(self.target.memory)
    }

    fn arithmetic(&self) -> String {
        self.target.name.clone()
    }

    fn open(&self) -> Result<Vec<Box<dyn plimsoll_exec::Device>>, DeviceError> {
        let text = format!("{} is planned for, and not opened", self.target.name);
        Err(DeviceError::Machine { source: text.into() })
    }
}

/// Returns the device of a target: the local CPU, or a machine that need not be present and keeps `depth` steps in
/// flight.
///
/// # Errors
/// `VirusError::TargetOfOtherCpu` for a CPU other than the local one, whose use (threads, replicas) is unknown.
pub fn device(target: Target, depth: usize) -> Result<Device, VirusError> {
    if target.name == "cpu" {
        return Ok(Device::Cpu);
    }
    if target.arena_in_host() {
        return Err(VirusError::TargetOfOtherCpu { target: target.name });
    }
    Ok(Device::machines(vec![Arc::new(PlannedMachine { target, depth })])?)
}

/// Plans a prediction.
///
/// # Errors
/// Models of the wrong family, a head that cannot be read, inputs that cannot be read, or a plan that does not
/// fit the budget.
pub fn plan(request: &PredictPlanRequest) -> Result<PlannedPrediction, VirusError> {
    let PredictPlanRequest { options, .. } = request;
    let settings = &options.settings;
    // Measuring stops where an input cannot be read, because a run reports that when it gets there. A plan never does.
    crate::check_sequence_files(options)?;
    let PlannedMethod { models, shape, opened } = methods::plan(options)?;
    let budget = settings.read_budget()?;
    let work = HostWork { options, costs: shape.host, is_trained: true };
    let hosts = hosts(
        work,
        &budget,
        || ProcessMemory::of(settings),
        || {
            if !options.inputs.is_empty() {
                return extent(&options.inputs, &|| Ok(()));
            }
            Ok(InputExtent {
                records: ASSUMED_RECORDS,
                longest: request.read_length,
                longest_name: ASSUMED_NAME,
                longest_title: ASSUMED_NAME,
                name: String::new(),
            })
        },
    )?;
    let replicas = if options.inputs.is_empty() { None } else { replicas_for_input(&options.inputs) };
    let search = StageSearch {
        hosts: &hosts,
        settings,
        shape: &shape,
        replicas: settings.most_replicas(replicas),
        reread: true,
    };
    let planned = search.plan(&budget)?;
    let mut stages = vec![];
    for (&stage, program) in stages_of(&planned, &shape).iter().zip(planned.programs()) {
        stages.push(StagePlan { stage, about: shape.about(stage), program: program.clone() });
    }
    let chosen = planned.budget();
    // Held until here, so that the measurements of the process in `hosts` included the opened models.
    drop(opened);
    let QueueCandidate { queues, process } = hosts.into_iter().nth(chosen).unwrap_or(QueueCandidate::UNLIMITED);
    let reads = read_throughput(request, &shape, &stages)?;
    let target = settings.target()?;
    let effects = if request.explain { Some(effects(&shape, settings, &stages)?) } else { None };
    Ok(PlannedPrediction {
        target,
        budget: budget.bytes,
        models,
        length: shape.length,
        stages,
        process,
        queues,
        reads,
        effects,
    })
}

/// The optimisations in effect in each stage.
fn effects(
    shape: &MethodShape,
    settings: &Settings,
    stages: &[StagePlan],
) -> Result<Vec<Vec<Effect>>, VirusError> {
    let mut effects = vec![];
    for StagePlan { stage, program, .. } in stages {
        effects.push(explain::of_stage(
            &|precision| shape.planned(*stage, precision),
            settings.precision()?,
            &|replicas| Ok(settings.machines(replicas)[0].target()?),
            program,
        )?);
    }
    Ok(effects)
}

/// Returns the candidate queue sizes, largest first; a single candidate if host memory has no budget. `measure` is called only
/// with a budget, and `process` is called again after it, since measuring allocates memory.
pub(crate) fn hosts(
    work: HostWork<'_>,
    budget: &Budget,
    process: impl Fn() -> Option<ProcessMemory>,
    measure: impl FnOnce() -> Result<InputExtent, RuntimeError>,
) -> Result<Vec<QueueCandidate>, RuntimeError> {
    if process().is_none() {
        return Ok(vec![QueueCandidate::UNLIMITED]);
    }
    let extent = measure()?;
    let Some(process) = process() else { return Ok(vec![QueueCandidate::UNLIMITED]) };
    let mut candidates = vec![];
    for queues in QueueSizes::within(budget.of_host(), work, &extent) {
        let mut process = process.clone();
        queues.bill(work, &extent, &mut process);
        candidates.push(QueueCandidate { queues, process: process.lines });
    }
    Ok(candidates)
}

/// Search for the stages and the queue sizes of a prediction.
#[derive(Clone, Copy)]
pub(crate) struct StageSearch<'s, 'a> {
    pub(crate) shape: &'s MethodShape,
    /// Candidate queue sizes, largest first.
    pub(crate) hosts: &'a [QueueCandidate],
    pub(crate) settings: &'a Settings,
    /// Maximum number of CPU replicas.
    pub(crate) replicas: usize,
    /// Whether the input can be read a second time.
    pub(crate) reread: bool,
}

impl<'s> StageSearch<'s, '_> {
    /// Plans the stages with the largest queues that leave enough memory: one stage for all models, or the first
    /// encoder before the others if that does not fit.
    pub(crate) fn plan(&self, budget: &Budget) -> Result<session::PlannedStages<'s>, RuntimeError> {
        let Self { shape, hosts, settings, replicas, reread } = *self;
        let precision = settings.precision()?;
        let divisions = shape.alternatives();
        // An input that can be read only once has no second pass.
        let divisions = if reread { divisions } else { &divisions[..1] };
        let mut alternatives = vec![];
        for stages in divisions {
            alternatives.push(stages.iter().map(|stage| shape.planned(*stage, precision)).collect());
        }
        settings.plan_stages(session::StagesRequest {
            alternatives,
            replicas,
            tokens: settings.tokens,
            budgets: hosts.iter().map(|host| budget.with(host.process.clone())).collect(),
        })
    }
}

/// Returns the stages of a plan, in the order of its programs.
pub(crate) fn stages_of(planned: &session::PlannedStages<'_>, shape: &MethodShape) -> &'static [PredictStage] {
    shape.alternatives()[planned.alternative()]
}

/// Returns the index of the queue sizes for a run without models, which only needs the memory of the process. `work` names the
/// run in the refusal.
pub(crate) fn queues_without_models(
    hosts: &[QueueCandidate],
    budget: &Budget,
    work: &str,
) -> Result<usize, RuntimeError> {
    let mut refusal = Ok(0);
    for (number, host) in hosts.iter().enumerate() {
        refusal = budget.with(host.process.clone()).admits_process(work).map(|()| number);
        if refusal.is_ok() {
            break;
        }
    }
    refusal
}

/// Computes the expected throughput in reads per second, assuming that all steps are full and that a sequence takes the share
/// of a step that corresponds to its tokens (encoders) or its row (head).
fn read_throughput(
    request: &PredictPlanRequest,
    shape: &MethodShape,
    stages: &[StagePlan],
) -> Result<ReadThroughput, RuntimeError> {
    let PredictPlanRequest { options, read_length, orfs, .. } = request;
    let lengths = (shape.window_lengths)(*read_length as usize, options.length);
    let sequences_of_window = shape.sequences_of_window.map_or(*orfs, |count| count as f64);
    let mut seconds = 0.0;
    for &length in &lengths {
        for StagePlan { program, .. } in stages {
            for (name, plan) in program.plans() {
                let bounds = plan.graph.bounds;
                let (counts, share) = match shape.encoders.iter().find(|encoder| encoder.plan == name) {
                    Some(encoder) => {
                        let tokens = (encoder.expected_tokens)(length);
                        let sequences = (bounds.tokens as f64 / tokens) as u64;
                        let counts = Counts {
                            tokens: bounds.tokens,
                            sequences: sequences.clamp(1, bounds.sequences),
                            packs: 1,
                        };
                        (counts, tokens / bounds.tokens as f64)
                    }
                    // The plan of the head: a sequence has one of the HEAD_ROWS rows of its step.
                    None => (bounds.full(), 1.0 / HEAD_ROWS as f64),
                };
                let step = plan_seconds(plan, program.target(), counts);
                seconds += sequences_of_window * share * step / program.replicas() as f64;
            }
        }
    }
    let windows = lengths.len();
    Ok(ReadThroughput {
        length: *read_length,
        windows: windows as u64,
        orfs: *orfs,
        sequence: shape.sequences_of_window.is_none().then_some(shape.names.sequence),
        per_second: 1.0 / seconds,
    })
}

impl PlannedPrediction {
    /// Peak memory over the stages in bytes, including the process if it counts against the same memory.
    pub fn peak(&self) -> Bytes {
        let plans = self.stages.iter().map(|stage| stage.program.peak()).max().unwrap_or_default();
        plans + self.process()
    }

    /// The stages in order, each with its description and program.
    pub fn stages(&self) -> impl Iterator<Item = (&'static str, &Program)> {
        self.stages.iter().map(|stage| (stage.about, &stage.program))
    }

    /// Memory budget.
    pub fn budget(&self) -> Bytes {
        self.budget
    }

    /// Memory of the process that counts against the budget beside a stage.
    pub fn process(&self) -> Bytes {
        self.process.iter().map(|line| line.bytes).sum()
    }

    /// The plan for reports.
    pub fn report(&self) -> Result<PredictPlanReport, RuntimeError> {
        let mut stages = vec![];
        for (number, stage) in self.stages.iter().enumerate() {
            stages.push(StagePlanReport {
                stage: stage.about,
                plan: price::report(&stage.program)?,
                explain: self.effects.as_ref().map(|effects| effects[number].clone()),
            });
        }
        Ok(PredictPlanReport {
            target: self.target.name.clone(),
            budget_bytes: self.budget,
            models: self.models.iter().map(|model| (model.key, model.name.clone())).collect(),
            window_bases: self.length,
            stages,
            process: self.process.clone(),
            queues: self.queues,
            peak_bytes: self.peak(),
            reads: self.reads,
        })
    }

    /// Formats the plan as text.
    pub fn to_text(&self) -> Result<String, RuntimeError> {
        let Target { name, about, .. } = &self.target;
        let mut text = format!("a prediction on {name} ({about}), windows of {} bases\n", self.length);
        for PlannedModel { what, name, .. } in &self.models {
            let _ = writeln!(text, "  {what:<13}  {name}");
        }
        for (number, StagePlan { about, program, .. }) in self.stages.iter().enumerate() {
            let replicas = match program.replicas() {
                1 => String::new(),
                replicas => format!(" in each of {replicas} replicas"),
            };
            let tokens = program.plans().iter().map(|(_, plan)| plan.graph.bounds.tokens).max().unwrap_or(0);
            let precision =
                program.plans().first().map_or_else(String::new, |(_, plan)| plan.matmul_dtype().to_string());
            let weights = match program.streamed() {
                Bytes::ZERO => "weights are resident".to_owned(),
                streamed => format!("weights stream from {}: {streamed} per step", streamed_from(program)),
            };
            let count = self.stages.len();
            let _ = writeln!(text, "stage {} of {count}: {about}", number + 1);
            let _ =
                writeln!(text, "  steps of up to {tokens} tokens{replicas}, precision {precision}, {weights}");
            for line in program.ledger().to_string().lines() {
                let _ = writeln!(text, "{line}");
            }
        }
        text += &plimsoll_runtime::process::to_text("of the budget the process takes", &self.process);
        let ReadThroughput { length, windows, orfs, sequence, per_second } = self.reads;
        let _ = writeln!(text, "peak {}, the budget is {}", self.peak(), self.budget);
        let windows = if windows == 1 { "1 window".to_owned() } else { format!("{windows} windows") };
        let sequences = match sequence {
            None => String::new(),
            Some(sequence) if orfs == 1.0 => format!(" and 1 {sequence} a window"),
            Some(sequence) => format!(" and {orfs} {sequence}s a window"),
        };
        let digits = if per_second < 10.0 { 2 } else { 0 };
        let _ = write!(
            text,
            "expected {per_second:.digits$} reads/s of {length} bases, at {windows} a read{sequences}"
        );
        let of_stages = self.stages.iter().zip(self.effects.iter().flatten());
        for (number, (StagePlan { about, .. }, effects)) in of_stages.enumerate() {
            let count = self.stages.len();
            let _ = write!(text, "\nstage {} of {count}: {about}\n{}", number + 1, explain::to_text(effects));
        }
        Ok(text)
    }
}
