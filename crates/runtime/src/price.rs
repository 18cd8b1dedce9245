//! What a model would take: the plan of `plimsoll plan`, from the configuration alone.

use crate::hub::{self, Need};
use crate::session::bounds::{bounds, copies, with_outputs};
use crate::session::{Part, Space, Stage, search, threads};
use crate::settings::{LETTERS_OF_REPLICA, most_replicas, on_cpu, threads_of_each};
use crate::{Budget, RequestError, RuntimeError, Settings, Silent, machine, process};
use cpu::{CpuDevice, Isa};
use data::bounded;
use data::pack::MOST_PACKS;
use data::printable::Place;
use data::weights::HubEnv;
use graph::Bytes;
use models::{Encoder, Output, known};
use plan::{Dump, HOST, OPEN_STEPS, Policy, Precision, Program, Staging, Stream, Target};
use serde_json::{Value, json};
use std::path::Path;

/// What is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Tokens of a step; `None` is the most that fits the budget.
    pub tokens: Option<u64>,
    /// The line; `None` is the target's memory, or what is free here where the target has none of its own.
    pub budget: Option<Bytes>,
    /// Whether weights may stay in their files and be read in every step.
    pub stream: Stream,
    /// The element type of weights and activations; `None` is what the machine does best.
    pub precision: Option<Precision>,
    /// The machine; of a CPU its units are the threads of the run.
    pub target: Target,
}

impl Request {
    /// The replicas of a run whose input may be long.
    fn most_replicas(&self) -> usize {
        match self.target.space == HOST {
            true => most_replicas(self.threads(), self.threads(), self.stream),
            false => 1,
        }
    }

    fn threads(&self) -> usize {
        usize::try_from(self.target.units).unwrap_or(usize::MAX)
    }

    /// The element type of weights and activations, as a run on the target would choose it.
    fn precision(&self) -> Result<Precision, RuntimeError> {
        let Target { name, space, rates, .. } = &self.target;
        match self.precision {
            asked if space != HOST => Ok(asked.unwrap_or(Precision::Bf16)),
            // Another CPU than this one: where it has tiles, its rates show it.
            None if name != CPU && rates.bf16 < TILES * rates.f32 => Ok(Precision::F32),
            None if name != CPU => Ok(Precision::Bf16),
            asked => on_cpu(asked),
        }
    }
}

/// A budget on `target` as a person writes it; a percentage is of the target's memory, or of what is free here
/// where the target has none of its own.
///
/// # Errors
/// A text that is no size, and one above the target's memory.
pub fn parse_budget(text: &str, target: &Target) -> Result<Bytes, RuntimeError> {
    let whole = match target.memory {
        Bytes::ZERO => return machine::parse_budget(text, machine::available().free),
        memory => memory,
    };
    let budget = machine::parse_budget(text, whole)?;
    if budget > whole {
        return Err(
            RequestError::BudgetAboveTarget { budget, target: target.name.clone(), memory: whole }.into()
        );
    }
    Ok(budget)
}

/// The target of the CPU in place.
const CPU: &str = "cpu";

/// How much faster products of bf16 are than those of f32 at least where they run on tiles.
const TILES: f64 = 2.0;

/// Tokens of the longest sequence of an ESM-2 batch: 1022 residues, BOS and EOS.
const LONGEST: u64 = 1024;

/// Bytes of a target file; ours have three thousand.
const LARGEST_TARGET: u64 = 1 << 18;

/// The machine of a name, of which the CPU in place has the threads that a run would have, or of a target file: a path that
/// ends in `.toml`.
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

/// The encoder of a hub id, a config.json, or a model folder. Reads no weights, and fetches at most a config.json.
pub fn encoder(model: &str) -> Result<Encoder, RuntimeError> {
    if let Some(encoder) = known(model).filter(|_| !Path::new(model).exists()) {
        return Ok(encoder);
    }
    let place = hub::local(model, Need::Config, &HubEnv::from_process(), &mut Silent)?;
    let (path, text) = hub::config_text(&place)?;
    Encoder::from_json(&text).map_err(|source| RuntimeError::Config { path, source })
}

/// The same CPU with another number of threads; a GPU has none to choose.
pub fn with_threads(target: Target, threads: usize) -> Result<Target, RuntimeError> {
    match target.space == HOST {
        true => Ok(target.with_units(threads as u64)),
        false => Err(RequestError::ThreadsOfGpu { threads, target: target.name }.into()),
    }
}

/// The program that embeds sequences (mean) with `model`, as a run has it that does not know how long its input is.
pub fn program(model: &str, request: &Request) -> Result<Program, RuntimeError> {
    program_with(model, request, &mut |_, _| {})
}

/// As [`program`]; `dump` is called with the graph after each pass.
pub fn program_with(model: &str, request: &Request, dump: Dump<'_>) -> Result<Program, RuntimeError> {
    let (encoder, precision) = (encoder(model)?, request.precision()?);
    let bytes = match (request.budget, request.target.memory) {
        (Some(budget), _) => budget,
        (None, Bytes::ZERO) => Settings::default().read_budget()?.bytes,
        (None, memory) => memory,
    };
    // Of the budget of the CPU in place the process takes its part, as in a run.
    let process = process(request).lines;
    let budget = Budget { bytes, on_host: true, host_memory: None, process };
    let threads = request.threads();
    let space = Space {
        target: &|replicas| Ok(request.target.clone().with_units(threads_of_each(threads, replicas) as u64)),
        depth: OPEN_STEPS,
        threads,
        replicas: request.most_replicas(),
        tokens: request.tokens,
        stream: request.stream,
        budgets: &[budget],
    };
    let longest = request.tokens.map_or(LONGEST, |t| t.min(LONGEST));
    let part = Part {
        name: "encoder",
        graph: Box::new(move |tokens| encoder.graph(bounds(tokens, longest), &[Output::Mean])),
        policy: Policy { precision, ..Policy::default() },
        streams: true,
    };
    let stage = Stage {
        finish: Box::new(|program, replicas| with_outputs(program, copies(replicas), MOST_PACKS as u64, None)),
        ..Stage::new(vec![part], longest)
    };
    let mut found = search(&space, &[vec![stage]], dump)?;
    found.programs.pop().ok_or_else(|| RuntimeError::bug("a search chose no program"))
}

/// What the process itself would hold on the CPU in place, beside the plan: the lines of a run that do not depend on its input.
/// Nothing for any other target, whose plan is not about this host's memory.
pub fn process(request: &Request) -> Process {
    if request.target.name != CPU {
        return Process::default();
    }
    let settings = Settings { threads: request.threads(), ..Settings::default() };
    Process { lines: process::before_input(&settings) }
}

/// Lines of the process itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Process {
    lines: Vec<Staging>,
}

impl Process {
    /// Bytes by label.
    pub fn to_json(&self) -> Value {
        process::to_json(&self.lines)
    }

    /// A line for each, with its end.
    pub fn to_text(&self) -> String {
        let heading = "of the budget the process takes, besides what depends on the input";
        process::to_text(heading, &self.lines)
    }
}

/// The plan as JSON; the ledger sums to `peak_bytes`.
pub fn to_json(program: &Program) -> Result<Value, RuntimeError> {
    let ledger = program.ledger();
    let entries: serde_json::Map<String, Value> =
        ledger.entries.iter().map(|e| (e.label.clone(), json!(e.bytes.0))).collect();
    let bounds = program.plans().first().map(|(_, p)| p.graph.bounds);
    Ok(json!({
        "target": program.target().name,
        "lanes": program.lanes(),
        "bounds": bounds.map(|b| json!({"tokens": b.tokens, "sequences": b.sequences, "longest": b.longest})),
        "ledger": entries,
        "peak_bytes": program.peak().0,
        "host_staging_bytes": host_staging(program).0,
        "streamed_bytes_per_step": program.streamed().0,
        "lower_bound_bytes": program.lower_bound().0,
        "peak_instruction": program.peak_at().1,
        "digest": program.digest()?,
    }))
}

/// The plan as a person reads it.
pub fn to_text(model: &str, program: &Program) -> Result<String, RuntimeError> {
    let target = program.target();
    let model = Place(Path::new(model));
    let mut text = format!("{model} on {} ({})\n", target.name, target.about);
    if target.space == HOST {
        text += &lanes_line(program);
    }
    if let Some((_, plan)) = program.plans().first() {
        let b = plan.graph.bounds;
        text += &format!(
            "a step holds up to {} tokens of {} sequences, the longest {} tokens; precision {}\n",
            b.tokens,
            b.sequences,
            b.longest,
            plan.products()
        );
        text += &match program.streamed() {
            Bytes::ZERO => "weights are resident\n".to_owned(),
            streamed => format!("weights stream from disk: {streamed} per step\n"),
        };
    }
    let (peak, bound) = (program.peak(), program.lower_bound());
    let waste = peak.saturating_sub(bound).0 as f64 / bound.0.max(1) as f64;
    text += &format!("{}\n", program.ledger());
    if host_staging(program) > Bytes::ZERO {
        text += &format!("host staging {}, which is no memory of the card's\n", host_staging(program));
    }
    text += &format!("peak at {}\n", program.peak_at().1);
    text += &format!("lower bound {bound}; packing wastes {:.2} %\n", 100.0 * waste);
    let seconds = program.seconds();
    let of_lanes = if program.lanes() > 1 { " in every lane" } else { "" };
    text += &format!("expected {seconds:.3} s a step{of_lanes}\ndigest {}", program.digest()?);
    Ok(text)
}

/// How a CPU's threads compute.
fn lanes_line(program: &Program) -> String {
    let each = threads(program.target().units);
    match program.lanes() {
        1 => format!("{each} in one lane: they compute a step together\n"),
        lanes => format!(
            "{lanes} lanes of {each}, which compute steps beside each other; fewer where a run's input has not {} for each\n",
            Bytes(LETTERS_OF_REPLICA)
        ),
    }
}

/// Memory of the host through which steps' inputs and outputs travel.
fn host_staging(program: &Program) -> Bytes {
    program.host_staging().into_iter().sum()
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
        // Of a CPU that is not this one nothing is known.
        let cpu = Target::named("cpu").expect("read");
        assert_eq!(parse_budget("1TiB", &cpu).expect("a plan for a larger machine"), Bytes(1 << 40));
    }
}
