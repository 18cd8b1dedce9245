//! Plans a model from its configuration alone, without weights: the plan of `plimsoll plan`.

use crate::explain::{self, Effect};
use crate::hub::{self, Need};
use crate::largest::{ConfirmationReport, LargestReport, StepTrial};
use crate::report::{ledger_by_label, staging_by_label};
use crate::session::bounds::bounds;
use crate::session::{PlanPart, SearchPoint, SearchSpace, SearchStage, search, sequence_stage, threads};
use crate::settings::{LETTERS_OF_REPLICA, most_replicas, on_cpu, threads_of_each};
use crate::{Budget, RequestError, RuntimeError, Settings, Silent, machine, process};
use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_data::bounded;
use plimsoll_data::pack::MAX_PACKS;
use plimsoll_data::printable::EscapedPath;
use plimsoll_data::weights::HubEnv;
use plimsoll_graph::{Bytes, Space};
use plimsoll_models::{Encoder, Output, SequenceModel, known};
use plimsoll_plan::{
    Dump, KernelId, LedgerEntry, PIPELINE_DEPTH, Policy, Precision, Program, Room, Staging, Streaming, Target,
    Weights,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A request for a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PriceRequest {
    /// Tokens of a step; `None` chooses the most that fit the budget.
    pub tokens: Option<u64>,
    /// Memory budget; `None` takes the target's memory, or this machine's free memory where the target has no memory
    /// size.
    pub budget: Option<Bytes>,
    /// Whether weights may be streamed: left in their files and read in every step.
    pub stream: Streaming,
    /// Room for weights that are streamed.
    pub room: Room,
    /// Element type of weights and activations; `None` takes the best type of the target.
    pub precision: Option<Precision>,
    /// The machine to plan for; a CPU's workers are the threads of the run.
    pub target: Target,
}

impl PriceRequest {
    /// The most replicas of a run with a long input; always 1 on a GPU.
    fn most_replicas(&self) -> usize {
        if self.target.arena_in_host() { most_replicas(self.threads(), self.threads(), self.stream) } else { 1 }
    }

    /// The target of one of `replicas` replicas.
    fn target_of(&self, replicas: usize) -> Target {
        self.target.clone().with_workers(threads_of_each(self.threads(), replicas) as u64)
    }

    /// Threads of the run: the target's workers.
    fn threads(&self) -> usize {
        usize::try_from(self.target.workers).unwrap_or(usize::MAX)
    }

    /// Element type of weights and activations, chosen as a run on the target would choose it.
    fn precision(&self) -> Result<Precision, RuntimeError> {
        let Target { name, rates, .. } = &self.target;
        match self.precision {
            asked if !self.target.arena_in_host() => Ok(asked.unwrap_or(Precision::Bf16)),
            // A CPU other than this machine's: bf16 tiles are not recorded as such, but visible in its rates.
            None if name != CPU && rates.bf16 < TILES * rates.f32 => Ok(Precision::F32),
            None if name != CPU => Ok(Precision::Bf16),
            asked => on_cpu(asked),
        }
    }
}

/// Parses a memory budget for `target`; a percentage refers to the target's memory, or to this machine's free memory
/// where the target has no memory size.
///
/// # Errors
/// The text is not a size, or the budget is above the target's memory.
pub fn parse_budget(text: &str, target: &Target) -> Result<Bytes, RuntimeError> {
    let memory_of_target = match target.memory {
        Bytes::ZERO => return machine::parse_budget(text, machine::available().free),
        memory => memory,
    };
    let budget = machine::parse_budget(text, memory_of_target)?;
    if budget > memory_of_target {
        return Err(RequestError::BudgetAboveTarget {
            budget,
            target: target.name.clone(),
            memory: memory_of_target,
        }
        .into());
    }
    Ok(budget)
}

/// Name of the target for the CPU of this machine.
const CPU: &str = "cpu";

/// Smallest ratio of bf16 to f32 GEMM rates from which a CPU is taken to have matrix tiles.
const TILES: f64 = 2.0;

/// Tokens of the longest sequence of an ESM-2 batch: 1022 residues, BOS and EOS.
pub(crate) const LONGEST: u64 = 1024;

/// Name of the model's plan.
pub(crate) const PLAN: &str = "encoder";

/// Largest accepted target file, in bytes; the built-in files have about three thousand.
const LARGEST_TARGET: u64 = 1 << 18;

/// Returns a target by name, or reads it from a target file: a path that ends in `.toml`. The target `cpu` is this
/// machine's CPU, with the number of threads a run would use.
pub fn target(word: &str) -> Result<Target, RuntimeError> {
    if word == CPU {
        return Ok(CpuDevice::target(machine::cores(), Isa::detect())?);
    }
    if !word.ends_with(".toml") {
        return Ok(Target::named(word)?);
    }
    let text = bounded::read_text(Path::new(word), LARGEST_TARGET).map_err(RuntimeError::io(word))?;
    Ok(Target::parse(word, &text)?)
}

/// Returns the encoder of a hub id, a config.json, or a model folder. Reads no weights; at most a config.json is
/// downloaded.
pub fn encoder(model: &str) -> Result<Encoder, RuntimeError> {
    if let Some(encoder) = known(model).filter(|_| !Path::new(model).exists()) {
        return Ok(encoder);
    }
    let place = hub::local(model, Need::Config, &HubEnv::from_process(), &mut Silent)?;
    let (path, text) = hub::config_text(&place)?;
    Encoder::from_json(&text).map_err(|source| RuntimeError::Config { path, source })
}

/// Returns the encoder or decoder of a hub id, a config.json, or a model folder, like [`encoder`].
pub fn sequence_model(model: &str) -> Result<SequenceModel, RuntimeError> {
    if let Some(encoder) = known(model).filter(|_| !Path::new(model).exists()) {
        return Ok(SequenceModel::Encoder(encoder));
    }
    let place = hub::sequence_model(model, Need::Config, &HubEnv::from_process(), &mut Silent)?;
    let (path, text) = hub::config_text(&place)?;
    SequenceModel::from_json(&text).map_err(|source| RuntimeError::Config { path, source })
}

/// Returns the CPU target with another number of threads.
///
/// # Errors
/// The target is a GPU, which has no number of threads to choose.
pub fn with_threads(target: Target, threads: usize) -> Result<Target, RuntimeError> {
    if target.arena_in_host() {
        Ok(target.with_workers(threads as u64))
    } else {
        Err(RequestError::ThreadsOfGpu { threads, target: target.name }.into())
    }
}

/// Plans the program that computes mean embeddings with `model`, for an input of unknown length.
pub fn program(model: &str, request: &PriceRequest) -> Result<Program, RuntimeError> {
    program_with(model, request, &mut |_, _| {})
}

/// Plans like [`program`] and calls `dump` with the graph after each pass.
pub fn program_with(model: &str, request: &PriceRequest, dump: Dump<'_>) -> Result<Program, RuntimeError> {
    let bytes = budget(request)?;
    // On this machine's CPU the process itself is charged to the budget, as in a run.
    let process = process(request).lines;
    let budget = Budget { room: request.room, ..Budget::unlimited(bytes) }.with(process);
    let space = SearchSpace {
        target: &|replicas| Ok(request.target_of(replicas)),
        depth: PIPELINE_DEPTH,
        threads: request.threads(),
        replicas: request.most_replicas(),
        tokens: request.tokens,
        stream: request.stream,
        budgets: &[budget],
    };
    let policy = Policy { precision: request.precision()?, ..Policy::default() };
    let mut found = search(&space, &[vec![stage(sequence_model(model)?, request, policy)]], dump)?;
    found.programs.pop().ok_or_else(|| RuntimeError::bug("a search chose no program"))
}

/// The program of one replica for the requested number of tokens, which must be given; streamed weights only where the request
/// demands them.
///
/// # Errors
/// `PlanError::OverBudget` without remedies where it does not fit the budget.
pub(crate) fn alone(model: &str, request: &PriceRequest) -> Result<Program, RuntimeError> {
    let policy = Policy { precision: request.precision()?, ..Policy::default() };
    let budget = Budget::unlimited(budget(request)?).with(process(request).lines);
    let target = request.target_of(1);
    let tokens = request.tokens.unwrap_or(LONGEST);
    let from = if target.arena_in_host() { Space::File } else { Space::Host };
    let weights = match request.stream {
        // Without prefetch, because that takes less memory: a step that fits so is run.
        Streaming::Always => Weights::Streamed { from, prefetch: false },
        Streaming::Auto | Streaming::Never => Weights::Resident,
    };
    let point = SearchPoint { target: &target, depth: PIPELINE_DEPTH, replicas: 1 };
    let stage = stage(sequence_model(model)?, request, policy);
    let program = stage.program(&point, tokens, weights, &mut |_, _| {})?;
    Ok(program.within(budget.for_plans()).map_err(|error| budget.with_process(error))?)
}

/// The stage of a run that computes mean embeddings.
pub(crate) fn stage(model: SequenceModel, request: &PriceRequest, policy: Policy) -> SearchStage<'static> {
    let longest = request.tokens.map_or(LONGEST, |t| t.min(LONGEST));
    let part = PlanPart {
        name: PLAN.to_owned(),
        graph: Box::new(move |tokens| model.graph(bounds(tokens, longest), &[Output::Mean])),
        policy,
        streams: true,
    };
    sequence_stage(vec![part], longest, MAX_PACKS as u64, None)
}

/// The optimisations in effect in `program`, which was planned for `request`. Sizes of a step are held: a plan without an
/// optimisation has as many tokens, but may exceed the budget.
pub fn explain(model: &str, request: &PriceRequest, program: &Program) -> Result<Vec<Effect>, RuntimeError> {
    let model = sequence_model(model)?;
    explain::of_stage(
        &|precision| stage(model.clone(), request, Policy { precision, ..Policy::default() }),
        request.precision()?,
        &|replicas| Ok(request.target_of(replicas)),
        program,
    )
}

/// The budget of a request: the given one, the target's memory, or the default of a run on this machine.
pub fn budget(request: &PriceRequest) -> Result<Bytes, RuntimeError> {
    match (request.budget, request.target.memory) {
        (Some(budget), _) => Ok(budget),
        (None, Bytes::ZERO) => Ok(Settings::default().read_budget()?.bytes),
        (None, memory) => Ok(memory),
    }
}

/// Host memory of the process outside the plan, on this machine's CPU: the entries that do not depend on the input.
/// Empty for any other target, because that plan does not describe this host's memory.
pub fn process(request: &PriceRequest) -> ProcessBill {
    if request.target.name != CPU {
        return ProcessBill::default();
    }
    let settings = Settings { threads: request.threads(), ..Settings::default() };
    ProcessBill { lines: process::before_input(&settings) }
}

/// Memory entries of the process outside the plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessBill {
    lines: Vec<Staging>,
}

impl ProcessBill {
    /// The entries.
    pub fn lines(&self) -> &[Staging] {
        &self.lines
    }

    /// Sum of the entries.
    pub fn total(&self) -> Bytes {
        self.lines.iter().map(|line| line.bytes).sum()
    }

    /// The entries as text, one a line.
    pub fn to_text(&self) -> String {
        let heading = "of the budget the process takes, besides what depends on the input";
        process::to_text(heading, &self.lines)
    }
}

/// Names of the kernels of each op, by the name of the op. An op has several kernels if its nodes differ, for instance in
/// element type.
pub type KernelNames = BTreeMap<&'static str, BTreeSet<&'static str>>;

/// Returns the kernels that a program uses.
pub fn kernels(program: &Program) -> KernelNames {
    let mut kernels = KernelNames::new();
    for (node, kernel) in program.plans().iter().flat_map(|(_, p)| p.graph.nodes.iter().zip(&p.kernels)) {
        if !matches!(kernel, KernelId::Move | KernelId::View) {
            kernels.entry(node.op.name()).or_default().insert(kernel.name());
        }
    }
    kernels
}

/// The plan of a program in reports. The entries of `ledger` sum to `peak_bytes`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanReport {
    /// Name of the target.
    pub target: String,
    /// Number of replicas.
    pub replicas: usize,
    /// Bounds of a step of the first plan; `None` for a program without plans.
    pub bounds: Option<StepBounds>,
    /// Breakdown of the arena at the peak.
    #[serde(serialize_with = "ledger_by_label")]
    pub ledger: Vec<LedgerEntry>,
    /// Size of the arena.
    pub peak_bytes: Bytes,
    /// Pinned host memory.
    pub host_staging_bytes: Bytes,
    /// Size of the scratch file.
    pub disk_bytes: Bytes,
    /// Bytes of weights that are streamed in each step.
    pub streamed_bytes_per_step: Bytes,
    /// Lower bound of `peak_bytes` for any packing of the same instructions.
    pub lower_bound_bytes: Bytes,
    /// Instruction at which the memory in use is the peak.
    pub peak_instruction: String,
    /// SHA-256 of the program in hexadecimal digits.
    pub digest: String,
}

/// Bounds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepBounds {
    /// Maximum number of tokens.
    pub tokens: u64,
    /// Maximum number of sequences.
    pub sequences: u64,
    /// Maximum number of tokens of a sequence.
    pub longest: u64,
}

/// The plan of a model for a request, with the memory of the process and what was asked for besides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelPlanReport {
    /// The plan.
    #[serde(flatten)]
    pub plan: PlanReport,
    /// Memory entries of the process outside the plan.
    #[serde(serialize_with = "staging_by_label")]
    pub process: Vec<Staging>,
    /// The largest step, if it was searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest: Option<LargestReport>,
    /// The trial of the largest step, if it was run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirmed: Option<ConfirmationReport<StepTrial>>,
    /// The optimisations in effect, if they were planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explain: Option<Vec<Effect>>,
}

/// Reports the plan of a program.
///
/// # Errors
/// Those of the digest.
pub fn report(program: &Program) -> Result<PlanReport, RuntimeError> {
    let bounds = program.plans().first().map(|(_, plan)| plan.graph.bounds);
    Ok(PlanReport {
        target: program.target().name.clone(),
        replicas: program.replicas(),
        bounds: bounds.map(|b| StepBounds { tokens: b.tokens, sequences: b.sequences, longest: b.longest }),
        ledger: program.ledger().entries,
        peak_bytes: program.peak(),
        host_staging_bytes: program.space_bytes(Space::Host),
        disk_bytes: program.space_bytes(Space::File),
        streamed_bytes_per_step: program.streamed(),
        lower_bound_bytes: program.lower_bound(),
        peak_instruction: program.peak_at().1,
        digest: program.digest()?,
    })
}

/// The plan as text.
pub fn to_text(model: &str, program: &Program) -> Result<String, RuntimeError> {
    let target = program.target();
    let model = EscapedPath(Path::new(model));
    let mut text = format!("{model} on {} ({})\n", target.name, target.about);
    if target.arena_in_host() {
        text += &replicas_line(program);
    }
    if let Some((_, plan)) = program.plans().first() {
        let b = plan.graph.bounds;
        text += &format!(
            "a step holds up to {} tokens of {} sequences, the longest {} tokens; precision {}\n",
            b.tokens,
            b.sequences,
            b.longest,
            plan.matmul_dtype()
        );
        text += &match program.streamed() {
            Bytes::ZERO => "weights are resident\n".to_owned(),
            streamed => format!("weights stream from {}: {streamed} per step\n", streamed_from(program)),
        };
    }
    let bound = program.lower_bound();
    let waste = program.packing_waste();
    text += &format!("{}\n{}", program.ledger(), outside_the_arena(program));
    text += &format!("peak at {}\n", program.peak_at().1);
    text += &format!("lower bound {bound}; packing wastes {:.2} %\n", 100.0 * waste);
    let seconds = program.seconds();
    let where_computed = if program.replicas() > 1 { " in every replica" } else { "" };
    text += &format!("expected {seconds:.3} s a step{where_computed}\ndigest {}", program.digest()?);
    Ok(text)
}

/// Text line that says how a CPU's threads are divided among replicas.
fn replicas_line(program: &Program) -> String {
    let each = threads(program.target().workers);
    match program.replicas() {
        1 => format!("{each} in one replica, which compute a step together\n"),
        replicas => format!(
            "{replicas} replicas of {each}, which compute steps at the same time; fewer if the input of a run has \
                less than {} for each\n",
            Bytes(LETTERS_OF_REPLICA)
        ),
    }
}

/// Lines with the bytes of a program in pinned host memory and on disk.
pub fn outside_the_arena(program: &Program) -> String {
    let ledgers = [Space::Host, Space::File].map(|space| (space, program.space_ledger(space)));
    let taken = ledgers.iter().filter(|(_, ledger)| ledger.total() > Bytes::ZERO);
    taken
        .map(|(space, ledger)| format!("{} {}: {}\n", place_of(*space), ledger.total(), ledger.line()))
        .collect()
}

/// Name of a space other than the arena.
fn place_of(space: Space) -> &'static str {
    match space {
        Space::Device => "arena",
        Space::Host => "pinned host memory",
        Space::File => "on disk",
    }
}

/// Where the streamed weights of a program lie between their uses.
pub fn streamed_from(program: &Program) -> &'static str {
    match program.weights() {
        Weights::Streamed { from: Space::File, .. } => "disk",
        Weights::Streamed { .. } | Weights::Resident | Weights::Trained => "host memory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_at_most_the_targets_memory() {
        let card = Target::named("4090").expect("read");
        assert_eq!(card.memory, Bytes(25_757_220_864));
        let budget = |text| parse_budget(text, &card);
        assert_eq!(budget("22GiB").expect("a 4090 has more"), Bytes(22 << 30));
        assert_eq!(budget("100%").expect("all of it"), card.memory);
        assert_eq!(budget("25757220864").expect("all of it"), card.memory);
        for text in ["24GiB", "106GB", "25757220865"] {
            let error = budget(text).expect_err(text).to_string();
            assert!(error.contains("more than `4090` has: 25 757 220 864 B"), "{error}");
        }
        // The size of another machine's memory is unknown, so any budget is accepted.
        let cpu = Target::named("cpu").expect("read");
        assert_eq!(parse_budget("1TiB", &cpu).expect("a plan for a larger machine"), Bytes(1 << 40));
    }
}
