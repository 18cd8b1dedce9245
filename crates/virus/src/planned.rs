//! Planning of predictions, for `predict` and for `plimsoll plan --predict`, which loads no weights. Invariant:
//! both choose stages, steps and queue sizes with `choose` and `hosts`.

use crate::VirusError;
use crate::methods::{self, PlannedMethod, PlannedModel};
use crate::options::Options;
use crate::pipeline::queues::HostWork;
pub use crate::pipeline::queues::QueueSizes;
use crate::pipeline::shape::{HEAD_ROWS, Shape};
use crate::pipeline::stage::PredictStage;
use plimsoll_data::sequence::{InputExtent, extent};
use plimsoll_exec::{DeviceError, DeviceKind, Machine};
use plimsoll_graph::{Bytes, Counts};
use plimsoll_plan::{Precision, Program, Staging, Target, plan_seconds};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::explain::{self, Effect};
use plimsoll_runtime::price::{PlanReport, streamed_from};
use plimsoll_runtime::process::Process;
use plimsoll_runtime::report::staging_by_label;
use plimsoll_runtime::session;
use plimsoll_runtime::{Budget, Device, Settings, price, replicas_for_input};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

/// Number of records that is assumed if no input is given.
const RECORDS: u64 = 1_000_000;
/// Length in bytes of the longest name and title that is assumed if no input is given.
const NAME: u64 = 64;

/// A request to plan a prediction.
#[derive(Clone, Debug)]
pub struct Request {
    /// Options of the prediction; inputs may be empty, and models that are not on this machine are not opened.
    pub options: Options,
    /// Length of a read in bases, for the expected speed.
    pub read_length: u64,
    /// Average number of open reading frames per window, for the expected speed.
    pub orfs: f64,
    /// Whether the optimisations in effect are found, by planning with and without each.
    pub explain: bool,
}

/// The plan of a prediction.
#[derive(Debug)]
pub struct Planned {
    target: Target,
    budget: Bytes,
    models: Vec<PlannedModel>,
    length: u64,
    stages: Vec<StagePlan>,
    process: Vec<Staging>,
    queues: QueueSizes,
    reads: Reads,
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
pub struct Reads {
    /// Length of a read in bases.
    #[serde(rename = "bases")]
    pub length: u64,
    /// Number of windows of a read.
    pub windows: u64,
    /// Average number of open reading frames per window.
    #[serde(rename = "orfs_of_a_window")]
    pub orfs: f64,
    /// Whether the time depends on `orfs`.
    #[serde(skip)]
    pub has_orfs: bool,
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
    pub reads: Reads,
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
pub fn plan(request: &Request) -> Result<Planned, VirusError> {
    let Request { options, .. } = request;
    let settings = &options.settings;
    // Measuring stops where an input cannot be read, because a run reports that when it gets there. A plan never does.
    crate::look_at_inputs(options)?;
    let PlannedMethod { models, shape, opened } = methods::plan(options)?;
    let budget = settings.read_budget()?;
    let process = || Process::of(settings);
    let measure = || {
        let assumed = InputExtent {
            records: RECORDS,
            longest: request.read_length,
            longest_name: NAME,
            longest_title: NAME,
            name: String::new(),
        };
        if options.inputs.is_empty() {
            return Ok(assumed);
        }
        extent(&options.inputs, &|| Ok(()))
    };
    let work = HostWork { options, costs: shape.host, is_trained: true };
    let hosts = hosts(work, &budget, process, measure)?;
    let work = if options.inputs.is_empty() { None } else { replicas_for_input(&options.inputs) };
    let planned = choose(&hosts, settings, &budget, &shape, settings.most_replicas(work), true)?;
    let stages = stages(&planned, &shape).iter().zip(planned.programs());
    let stages: Vec<StagePlan> = stages
        .map(|(&stage, program)| StagePlan { stage, about: shape.about(stage), program: program.clone() })
        .collect();
    let chosen = planned.budget();
    // Held until here, so that the measurements of the process in `hosts` included the opened models.
    drop(opened);
    let (queues, process) = hosts.into_iter().nth(chosen).unwrap_or((QueueSizes::USUAL, vec![]));
    let reads = reads(request, &shape, &stages)?;
    let (target, length) = (settings.target()?, shape.length);
    let budget = budget.bytes;
    let effects = match request.explain {
        true => Some(effects(&shape, settings, &stages)?),
        false => None,
    };
    Ok(Planned { target, budget, models, length, stages, process, queues, reads, effects })
}

/// The optimisations in effect in each stage.
fn effects(shape: &Shape, settings: &Settings, stages: &[StagePlan]) -> Result<Vec<Vec<Effect>>, VirusError> {
    let target = |replicas| Ok(settings.machines(replicas)[0].target()?);
    let of_stage = |StagePlan { stage, program, .. }: &StagePlan| {
        let of_precision = |precision| shape.planned(*stage, precision);
        Ok(explain::of_stage(&of_precision, settings.precision()?, &target, program)?)
    };
    stages.iter().map(of_stage).collect()
}

/// Returns the candidate queue sizes, largest first, each with the memory lines of the process; a single candidate if
/// host memory has no budget. `measure` is called only with a budget, and `process` is called again after it, since
/// measuring allocates memory.
pub(crate) fn hosts(
    work: HostWork<'_>,
    budget: &Budget,
    process: impl Fn() -> Option<Process>,
    measure: impl FnOnce() -> Result<InputExtent, RuntimeError>,
) -> Result<Vec<(QueueSizes, Vec<Staging>)>, RuntimeError> {
    if process().is_none() {
        return Ok(vec![(QueueSizes::USUAL, vec![])]);
    }
    let extent = measure()?;
    let Some(process) = process() else { return Ok(vec![(QueueSizes::USUAL, vec![])]) };
    let line = budget.of_host();
    let billed = |queues: QueueSizes| {
        let mut process = process.clone();
        queues.bill(work, &extent, &mut process);
        (queues, process.lines)
    };
    Ok(QueueSizes::within(line, work, &extent).map(billed).collect())
}

/// Plans the stages with the largest queues that leave enough memory: one stage for all models, or the first
/// encoder before the others if that does not fit. `reread` says whether the input can be read a second time.
pub(crate) fn choose<'a>(
    hosts: &[(QueueSizes, Vec<Staging>)],
    settings: &Settings,
    budget: &Budget,
    shape: &'a Shape,
    replicas: usize,
    reread: bool,
) -> Result<session::PlannedStages<'a>, RuntimeError> {
    let precision = settings.precision()?;
    let stages =
        |stages: &[PredictStage]| stages.iter().map(|stage| shape.planned(*stage, precision)).collect();
    // An input that can be read only once has no second pass.
    let alternatives = shape.alternatives();
    let alternatives = if reread { alternatives } else { &alternatives[..1] };
    settings.plan_stages(session::StagesRequest {
        alternatives: alternatives.iter().copied().map(stages).collect(),
        replicas,
        tokens: settings.tokens,
        budgets: hosts.iter().map(|(_, process)| budget.with(process.clone())).collect(),
    })
}

/// Returns the stages of a plan, in the order of its programs.
pub(crate) fn stages(planned: &session::PlannedStages<'_>, shape: &Shape) -> &'static [PredictStage] {
    shape.alternatives()[planned.alternative()]
}

/// Returns the index of the queue sizes for a merge, which runs no models and only needs the memory of the process.
pub(crate) fn choose_alone(
    hosts: &[(QueueSizes, Vec<Staging>)],
    budget: &Budget,
) -> Result<usize, RuntimeError> {
    let mut refusal = Ok(0);
    for (number, (_, process)) in hosts.iter().enumerate() {
        refusal = budget.with(process.clone()).admits_process("the merge").map(|()| number);
        if refusal.is_ok() {
            break;
        }
    }
    refusal
}

/// Computes the expected throughput in reads per second, assuming that all steps are full and that a sequence takes the share
/// of a step that corresponds to its tokens (encoders) or its row (head).
fn reads(request: &Request, shape: &Shape, stages: &[StagePlan]) -> Result<Reads, RuntimeError> {
    let Request { options, read_length, orfs, .. } = request;
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
                    // A row of the head is one of HEAD_ROWS.
                    None => (bounds.full(), 1.0 / HEAD_ROWS as f64),
                };
                let step = plan_seconds(plan, program.target(), counts);
                seconds += sequences_of_window * share * step / program.replicas() as f64;
            }
        }
    }
    let windows = lengths.len();
    Ok(Reads {
        length: *read_length,
        windows: windows as u64,
        orfs: *orfs,
        has_orfs: shape.sequences_of_window.is_none(),
        per_second: 1.0 / seconds,
    })
}

impl Planned {
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
        let stage = |(number, stage): (usize, &StagePlan)| {
            Ok(StagePlanReport {
                stage: stage.about,
                plan: price::report(&stage.program)?,
                explain: self.effects.as_ref().map(|effects| effects[number].clone()),
            })
        };
        Ok(PredictPlanReport {
            target: self.target.name.clone(),
            budget_bytes: self.budget,
            models: self.models.iter().map(|model| (model.key, model.name.clone())).collect(),
            window_bases: self.length,
            stages: self.stages.iter().enumerate().map(stage).collect::<Result<_, RuntimeError>>()?,
            process: self.process.clone(),
            queues: self.queues,
            peak_bytes: self.peak(),
            reads: self.reads,
        })
    }

    /// Formats the plan as text.
    pub fn to_text(&self) -> Result<String, RuntimeError> {
        let (target, about, length) = (&self.target.name, &self.target.about, self.length);
        let mut text = format!("a prediction on {target} ({about}), windows of {length} bases\n");
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
        let Reads { length, windows, orfs, has_orfs, per_second } = self.reads;
        let _ = writeln!(text, "peak {}, the budget is {}", self.peak(), self.budget);
        let windows = if windows == 1 { "1 window".to_owned() } else { format!("{windows} windows") };
        let frames = if !has_orfs {
            String::new()
        } else if orfs == 1.0 {
            " and 1 open reading frame a window".to_owned()
        } else {
            format!(" and {orfs} open reading frames a window")
        };
        let digits = if per_second < 10.0 { 2 } else { 0 };
        let _ = write!(
            text,
            "expected {per_second:.digits$} reads/s of {length} bases, at {windows} a read{frames}"
        );
        let of_stages = self.stages.iter().zip(self.effects.iter().flatten());
        for (number, (StagePlan { about, .. }, effects)) in of_stages.enumerate() {
            let count = self.stages.len();
            let _ = write!(text, "\nstage {} of {count}: {about}\n{}", number + 1, explain::to_text(effects));
        }
        Ok(text)
    }
}
