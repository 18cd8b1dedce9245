//! Reports the plans of a training run as text and as structs. Invariant: every number comes from the plans.

use super::config::TrainConfig;
pub use super::config::training_on;
use super::{LargestRun, RunMemory, plan_of};
use crate::TrainError;
use crate::confirm::TrainTrial;
use plimsoll_graph::{Bytes, Def, Graph, Op, Param, Phase};
use plimsoll_models::tensor_of_teacher;
use plimsoll_plan::{
    Candidate, Optimizer, Precision, Program, RejectedCandidate, Staging, Target, TrainingChoice,
};
use plimsoll_runtime::explain::Effect;
use plimsoll_runtime::largest::{ConfirmationReport, LargestReport};
use plimsoll_runtime::price::PlanReport;
use plimsoll_runtime::report::staging_by_label;
use plimsoll_runtime::{Device, Observer, price, process};
use serde::Serialize;
use std::collections::BTreeMap;

/// Resolves a target name or target file; `cpu` is this machine with the number of threads that the run would use.
pub fn target(config: &TrainConfig, word: &str) -> Result<Target, TrainError> {
    match word {
        "cpu" => config.run.target(Device::Cpu),
        _ => Ok(training_on(price::target(word)?)),
    }
}

/// Returns the plans of [`planned`].
pub fn found(
    config: &TrainConfig,
    target: &Target,
    observer: &mut dyn Observer,
) -> Result<TrainingChoice, TrainError> {
    Ok(planned(config, target, observer)?.found)
}

/// Plans of a training run, and the memory that the run takes besides.
#[derive(Debug)]
pub struct PlannedRun {
    /// The plans.
    pub found: TrainingChoice,
    /// Host memory of the process and of the data, on the CPU of this machine.
    pub process: RunMemory,
}

/// Searches the fastest plans of a configuration on a target within the budget `memory.budget`, of which the process and the
/// data take a part on the CPU of this machine, as they do in the run.
pub fn planned(
    config: &TrainConfig,
    target: &Target,
    observer: &mut dyn Observer,
) -> Result<PlannedRun, TrainError> {
    let process = RunMemory::of(config, target, budget(config, target)?, observer)?;
    let found = plan_of(config, target, process.for_plans(), observer).map_err(|error| process.bill(error))?;
    Ok(PlannedRun { found, process })
}

impl PlannedRun {
    /// The plans and the memory besides as text.
    pub fn to_text(&self, config: &TrainConfig) -> Result<String, TrainError> {
        Ok(format!("{}\n{}", to_text(config, &self.found)?, besides(&self.process)))
    }

    /// The plans and the memory besides for reports.
    pub fn report(&self, config: &TrainConfig) -> Result<TrainPlanReport, TrainError> {
        report(config, &self.found, self.process.lines())
    }
}

/// The memory of a run besides its plans as text.
fn besides(memory: &RunMemory) -> String {
    let note = if memory.lacks_data() {
        "the files of data.train are not here, so the memory of the data is not counted\n"
    } else {
        ""
    };
    format!("{}{note}", process::to_text("of the budget a run takes, besides its plans", &memory.lines()))
}

/// Returns the memory budget of a configuration on a target, in bytes.
pub fn budget(config: &TrainConfig, target: &Target) -> Result<Bytes, TrainError> {
    Ok(price::parse_budget(&config.memory.budget, target)?)
}

/// The plans of a training run for reports: of the program, the chosen settings, and what was asked for besides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainPlanReport {
    /// The plan of the program.
    #[serde(flatten)]
    pub plan: PlanReport,
    /// Floating-point format of weights and activations.
    pub precision: Precision,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Number of parameters of its teachers.
    pub parameters_of_teachers: u64,
    /// The settings that were chosen.
    pub chosen: ChosenReport,
    /// The recomputed ops of each range of layers, in words.
    pub recomputed: Vec<String>,
    /// Expected seconds of an optimizer step.
    pub seconds_per_step: f64,
    /// Expected tokens per second.
    pub tokens_per_second: f64,
    /// Settings that were not chosen.
    pub rejected: Vec<RejectedReport>,
    /// Host memory of the process and of the data.
    #[serde(serialize_with = "staging_by_label")]
    pub process: Vec<Staging>,
    /// The largest value of a dimension, if it was searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest: Option<LargestReport>,
    /// The trial of the largest value, if it was run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirmed: Option<ConfirmationReport<TrainTrial>>,
    /// The optimisations in effect, if they were planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explain: Option<Vec<Effect>>,
}

/// Settings among which the search for the fastest plan chooses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CandidateReport {
    /// Tokens of a micro-step.
    pub micro_tokens: u64,
    /// Micro-steps of an optimizer step.
    pub accumulation: u64,
    /// Rows of logits computed at a time.
    pub loss_chunk: u32,
    /// The value of `optimizer.kind`.
    pub optimizer: &'static str,
}

/// The settings that were chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChosenReport {
    /// The settings.
    #[serde(flatten)]
    pub candidate: CandidateReport,
    /// Maximum number of tokens of a pack.
    pub pack_tokens: u64,
}

/// Settings that were not chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RejectedReport {
    /// The settings.
    #[serde(flatten)]
    pub candidate: CandidateReport,
    /// Number of recomputed nodes.
    pub recomputed_nodes: usize,
    /// Predicted memory use of the process.
    pub peak_bytes: Bytes,
    /// Predicted tokens per second.
    pub tokens_per_second: f64,
    /// Whether the settings fit into the budget.
    pub fits: bool,
    /// Why settings that fit were not chosen although they are faster; `None` for others.
    pub why: Option<String>,
}

/// Reports the plans of a training run, which takes the memory `process` besides.
pub fn report(
    config: &TrainConfig,
    found: &TrainingChoice,
    process: Vec<Staging>,
) -> Result<TrainPlanReport, TrainError> {
    let graph = &found.program.plans()[0].1.graph;
    let rejected = found.rejected.iter().map(|r| RejectedReport {
        candidate: candidate(&r.candidate),
        recomputed_nodes: r.recomputed,
        peak_bytes: r.peak,
        tokens_per_second: r.tokens_per_second,
        fits: r.fits,
        why: why_not(found, r),
    });
    Ok(TrainPlanReport {
        plan: price::report(&found.program)?,
        precision: config.precision.kind,
        parameters: parameters(graph),
        parameters_of_teachers: parameters_of_teachers(graph),
        chosen: ChosenReport { candidate: candidate(&found.candidate), pack_tokens: config.pack_tokens() },
        recomputed: recomputed(graph),
        seconds_per_step: found.seconds,
        tokens_per_second: found.tokens_per_second,
        rejected: rejected.collect(),
        process,
        largest: None,
        confirmed: None,
        explain: None,
    })
}

/// Reports the result of a search for the largest dimension: its plans, and the value found.
pub fn largest_report(largest: &LargestRun) -> Result<TrainPlanReport, TrainError> {
    let LargestRun { size, value, refused, .. } = *largest;
    let plan = report(&largest.config, &largest.found, largest.process.lines())?;
    Ok(TrainPlanReport { largest: Some(LargestReport { of: size.name(), value, refused }), ..plan })
}

/// Formats the plans as text.
pub fn to_text(config: &TrainConfig, found: &TrainingChoice) -> Result<String, TrainError> {
    let TrainingChoice { program, candidate, .. } = found;
    let target = program.target();
    let graph = &program.plans()[0].1.graph;
    let mut text = format!(
        "{} of {} parameters on {} ({})\n",
        config.model.kind.name(),
        parameters(graph),
        target.name,
        target.about
    );
    let teachers = parameters_of_teachers(graph);
    if teachers > 0 {
        text += &format!("teachers of {teachers} parameters, which are not trained\n");
    }
    let times = match candidate.accumulation {
        1 => "one micro-step".to_owned(),
        n => format!("{n} micro-steps"),
    };
    let packs = match graph.bounds.packs {
        1 => "one pack".to_owned(),
        n => format!("{n} packs"),
    };
    text += &format!(
        "a step is {times} of {packs} of up to {} tokens and {} sequences, the longest {} tokens; precision {}\n",
        config.pack_tokens(),
        graph.bounds.sequences / graph.bounds.packs,
        graph.bounds.longest,
        config.precision.kind.name()
    );
    text += &dynamic_sizes(program);
    text +=
        &format!("optimizer {}; {} rows of logits at a time\n", name(&candidate.optimizer), candidate.chunk);
    text += &match recomputed(graph).as_slice() {
        [] => "nothing is recomputed\n".to_owned(),
        lines => format!("recomputed: {}\n", lines.join("; ")),
    };
    let offloaded = offloaded(graph);
    if !offloaded.is_empty() {
        text += &format!("offloaded until the backward pass, results of: {}\n", offloaded.join("; "));
    }
    let bound = program.lower_bound();
    let waste = program.packing_waste();
    text += &format!("{}\n{}", program.ledger(), price::outside_the_arena(program));
    text += &format!("peak at {}\n", program.peak_at().1);
    text += &format!("lower bound {bound}; packing wastes {:.2} %\n", 100.0 * waste);
    text += &format!("expected {:.3} s a step, {:.0} tokens/s\n", found.seconds, found.tokens_per_second);
    text += &rejected(found);
    text += &format!("digest {}", program.digest()?);
    Ok(text)
}

/// Formats the result of a search for the largest dimension: its plans, preceded by a line with the value found.
pub fn largest_to_text(largest: &LargestRun) -> Result<String, TrainError> {
    let model = &largest.config.model;
    let what = match largest.size {
        super::LargestDimension::Tokens => format!("a micro-batch of {} tokens", largest.value),
        super::LargestDimension::Layers => format!("{} layers", largest.value),
        super::LargestDimension::Hidden => {
            format!("hidden {}, intermediate {}, {} heads", model.hidden, model.intermediate, model.heads)
        }
    };
    let plan = to_text(&largest.config, &largest.found)?;
    let process = besides(&largest.process);
    let next = match largest.refused {
        Some(refused) => format!("{refused} does not"),
        None => "a run cannot have more".to_owned(),
    };
    Ok(format!("the largest that fits: {what}; {next}\n{plan}\n{process}"))
}

/// The smaller micro-steps of `memory.dynamic` with the memory that each gives back; empty without them.
fn dynamic_sizes(program: &Program) -> String {
    let sizes = program.alternatives();
    if sizes.len() < 2 {
        return String::new();
    }
    let smaller = (1..sizes.len()).map(|k| {
        let tokens = program.plans()[sizes[k]].1.graph.bounds.tokens;
        let given_back = program.arena_bytes().saturating_sub(program.arena_bytes_from(k));
        format!("{tokens} tokens, {given_back} less")
    });
    format!("smaller micro-steps, by the free memory: {}\n", smaller.collect::<Vec<_>>().join("; "))
}

fn candidate(c: &Candidate) -> CandidateReport {
    CandidateReport {
        micro_tokens: c.tokens,
        accumulation: c.accumulation,
        loss_chunk: c.chunk,
        optimizer: name(&c.optimizer),
    }
}

/// The value of `optimizer.kind` for a planned optimizer.
fn name(optimizer: &Optimizer) -> &'static str {
    match optimizer {
        Optimizer::AdamW(_) => "adamw",
        Optimizer::AdamW8bit(_) => "adamw8bit",
        Optimizer::Adafactor(_) => "adafactor",
        Optimizer::Sgd(_) => "sgd",
    }
}

/// Returns the number of parameters of the model of a training graph, without those of teachers.
pub(super) fn parameters(graph: &Graph) -> u64 {
    elements(graph, |param| tensor_of_teacher(&param.name).is_none())
}

/// Returns the number of parameters of the teachers in a training graph.
fn parameters_of_teachers(graph: &Graph) -> u64 {
    elements(graph, |param| tensor_of_teacher(&param.name).is_some())
}

/// Number of elements of the parameters that `counts`.
pub(super) fn elements(graph: &Graph, counts: impl Fn(&Param) -> bool) -> u64 {
    let params = graph.param_values().filter(|(.., param)| counts(param));
    params.map(|(v, ..)| graph.spec(v).shape.iter().filter_map(|d| d.fixed()).product::<u64>()).sum()
}

/// Number of nodes of each op, by op name.
type Ops<'a> = BTreeMap<&'a str, usize>;

/// Describes the recomputed nodes, with one line for each range of adjacent layers with the same ops.
fn recomputed(graph: &Graph) -> Vec<String> {
    let mut layers: BTreeMap<Option<u32>, Ops<'_>> = BTreeMap::new();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Recompute) {
        if matches!(node.op, Op::Move(_)) {
            continue;
        }
        *layers.entry(node.layer).or_default().entry(node.op.name()).or_default() += 1;
    }
    ranges(layers)
}

/// The ops of each range of layers whose results are offloaded until the backward pass.
fn offloaded(graph: &Graph) -> Vec<String> {
    let mut layers: BTreeMap<Option<u32>, Ops<'_>> = BTreeMap::new();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
        if let (Op::Move(_), Def::Node(id, _)) = (&node.op, graph.value(node.inputs[0]).def)
            && !matches!(graph.node(id).op, Op::Move(_))
        {
            *layers.entry(node.layer).or_default().entry(graph.node(id).op.name()).or_default() += 1;
        }
    }
    ranges(layers)
}

/// Formats the ops of layers, of consecutive layers with the same ops together.
fn ranges(layers: BTreeMap<Option<u32>, Ops<'_>>) -> Vec<String> {
    let mut ranges: Vec<(Option<u32>, Option<u32>, Ops<'_>)> = vec![];
    for (layer, ops) in layers {
        match ranges.last_mut() {
            Some((_, last, same)) if *same == ops && layer == last.map(|n| n + 1) => *last = layer,
            Some(_) | None => ranges.push((layer, layer, ops)),
        }
    }
    ranges.into_iter().map(|(first, last, ops)| format!("{} {}", place(first, last), counted(&ops))).collect()
}

fn place(first: Option<u32>, last: Option<u32>) -> String {
    match (first, last) {
        (Some(a), Some(b)) if a == b => format!("layer {a}"),
        (Some(a), Some(b)) => format!("layers {a} to {b}"),
        (None, _) | (_, None) => "outside of layers".to_owned(),
    }
}

fn counted(ops: &Ops<'_>) -> String {
    let counts = ops.iter().map(|(op, n)| if *n == 1 { (*op).to_owned() } else { format!("{n} {op}") });
    counts.collect::<Vec<_>>().join(", ")
}

/// Maximum number of rejected candidates of each kind in the text; the JSON has all of them.
const SHOWN: usize = 6;

/// Formats a table of rejected candidates: those that fit, then those that would be faster and do not fit.
fn rejected(found: &TrainingChoice) -> String {
    let rejected = &found.rejected;
    if rejected.is_empty() {
        return String::new();
    }
    let mut text = "not taken, the fastest first:\n".to_owned();
    text += &row(["tokens", "rows", "optimizer", "recomputed", "bytes", "tokens/s"].map(str::to_owned), "");
    for fits in [true, false] {
        let all: Vec<&RejectedCandidate> = rejected.iter().filter(|r| r.fits == fits).collect();
        let verdict = if fits { "fits" } else { "does not fit" };
        all.iter().take(SHOWN).for_each(|r| {
            let verdict = why_not(found, r).unwrap_or_else(|| verdict.to_owned());
            text += &row(cells(r), &verdict);
        });
        if all.len() > SHOWN {
            text += &format!("  and {} more of which each {verdict}\n", all.len() - SHOWN);
        }
    }
    text
}

/// Why a candidate that fits was not taken although it would be faster: an optimizer that is preferred fits. `None` for other
/// candidates.
fn why_not(found: &TrainingChoice, r: &RejectedCandidate) -> Option<String> {
    let [taken, other] = [name(&found.candidate.optimizer), name(&r.candidate.optimizer)];
    (r.fits && taken != other)
        .then(|| format!("fits; optimizer.kind auto prefers {taken}, set {other} to take it"))
}

fn cells(r: &RejectedCandidate) -> [String; 6] {
    let c = &r.candidate;
    [
        format!("{} x {}", c.accumulation, c.tokens),
        c.chunk.to_string(),
        name(&c.optimizer).to_owned(),
        format!("{} ops", r.recomputed),
        r.peak.to_string(),
        format!("{:.0}", r.tokens_per_second),
    ]
}

fn row(cells: [String; 6], fits: &str) -> String {
    let [tokens, rows, optimizer, recomputed, bytes, rate] = cells;
    let line =
        format!("  {tokens:<12} {rows:>6}  {optimizer:<10} {recomputed:>10}  {bytes:>20}  {rate:>10}  {fits}");
    format!("{}\n", line.trim_end())
}
