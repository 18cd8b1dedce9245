//! From a request to an executor: target, bounds, program, arena. Invariant: a program is only started when
//! its peak is within the budget; what was chosen is reported.

use crate::lanes::{HOST, enough, planned};
use crate::{Device, EncoderModel, Level, RuntimeError, machine};
use cpu::CpuMachine;
use data::limits;
use exec::{Executor, Machine, Param};
use graph::{Bounds, Bytes, Op};
use plan::{Build, PlanError, Policy, Precision, Program, Search, Staging, Stream, Target};
use serde_json::{Value, json};
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// What a caller decides about the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where to run.
    pub device: Device,
    /// The element type of encoders' weights and activations; `None` is what the device does best.
    pub precision: Option<Precision>,
    /// Compute threads.
    pub threads: usize,
    /// Steps that the CPU's threads compute beside each other, each by its share of them, where a command can; of 1 it takes
    /// as many as its input is worth.
    pub lanes: usize,
    /// The line: `None` is 80 % of what is free now.
    pub budget: Option<Bytes>,
    /// The line of the process on the host: on the CPU that of plans too, where it is the smaller one.
    pub host_memory: Option<Bytes>,
    /// What the process itself takes of the host's line, beside plans: a line of the bill for each.
    pub process: Vec<Staging>,
    /// Tokens of a step: `None` is the most that fits, up to where more brings no speed.
    pub tokens: Option<u64>,
    /// Whether weights may stay in their files and be read in every step.
    pub stream: Stream,
    /// Flags that were given and have no effect on this device, for run.json.
    pub unused_flags: Vec<&'static str>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            precision: None,
            threads: machine::cores(),
            lanes: 1,
            budget: None,
            host_memory: None,
            process: vec![],
            tokens: None,
            stream: Stream::Auto,
            unused_flags: vec![],
        }
    }
}

/// Tokens for each sequence that a step can hold: with sequences shorter than this on average, a step is
/// bounded by its sequences.
const TOKENS_PER_SEQUENCE: u64 = 8;

/// Letters of input for which another lane is worth its memory.
pub const LETTERS_OF_LANE: u64 = 8192;

/// Threads that tokenize for each GPU.
const TOKENIZERS: usize = 8;

impl Settings {
    /// The machine that plans are made for.
    pub fn target(&self) -> Result<Target, RuntimeError> {
        Ok(self.machine().target()?)
    }

    /// The machines of the run, which are of one kind: the CPU with its threads in lanes, or those of the device.
    pub fn machines(&self) -> Vec<Arc<dyn Machine>> {
        match &self.device {
            Device::Cpu => vec![Arc::new(CpuMachine::new(self.lanes, self.threads_of_lane()))],
            Device::Machines(machines) => machines.clone(),
        }
    }

    /// One of them.
    pub fn machine(&self) -> Arc<dyn Machine> {
        self.machines().swap_remove(0)
    }

    /// Whether its memory is the host's.
    pub fn is_on_host(&self) -> bool {
        self.device == Device::Cpu
    }

    /// The element type of encoders' weights and activations.
    pub fn precision(&self) -> Result<Precision, RuntimeError> {
        match (self.is_on_host(), self.precision) {
            (true, asked) => on_cpu(asked),
            // What its kernels lack is said when it is planned.
            (false, Some(asked)) => Ok(asked),
            (false, None) => Ok(self.machine().precisions()[0]),
        }
    }

    /// How encoders are compiled.
    pub fn policy(&self) -> Result<Policy, RuntimeError> {
        Ok(Policy { precision: self.precision()?, ..Policy::default() })
    }

    /// What the bits of a result depend on beside its input and weights.
    pub fn arithmetic(&self) -> Result<Value, RuntimeError> {
        let precision = self.precision()?.name();
        // Not how many there are, nor which: a run goes on with others.
        let (kind, instructions) = (self.machine().kind().to_string(), self.machine().arithmetic());
        Ok(json!({"device": kind, "instructions": instructions, "precision": precision}))
    }

    /// What takes time before the first step on a machine that was never used.
    pub fn first_use(&self) -> Option<String> {
        self.machine().first_use()
    }

    /// How loudly the device and its kernels are told: f32 on the CPU is the reference, and takes nobody by surprise.
    pub fn computing_level(&self) -> Level {
        match (self.is_on_host(), self.precision()) {
            (true, Ok(Precision::F32)) => Level::Detail,
            (true | false, _) => Level::Info,
        }
    }

    /// What the arena's memory could still give; of several devices, the one that could give least.
    pub fn free(&self) -> Result<Bytes, RuntimeError> {
        let free = self
            .machines()
            .iter()
            .map(|machine| Ok(machine.free()?))
            .collect::<Result<Vec<_>, RuntimeError>>()?;
        Ok(free.into_iter().min().unwrap_or(Bytes::ZERO))
    }

    /// Steps that are on their way at a time.
    pub fn ahead(&self) -> usize {
        match self.is_on_host() {
            true => enough(self.lanes),
            false => self.machines().len() * (self.depth() + 1),
        }
    }

    /// Threads that tokenize: several keep up with a GPU.
    pub fn tokenizers(&self) -> usize {
        match self.is_on_host() {
            true => 1,
            false => machine::cores().min(TOKENIZERS * self.machines().len()),
        }
    }

    /// Plans with as many lanes as the work is worth and the line has room for. Threads of one lane meet behind every op,
    /// lanes never; but a lane takes memory, and what little input there is is done sooner by all threads together. Streamed
    /// weights would be read by each lane, so they have one.
    pub fn in_lanes<T>(
        &self,
        worth: usize,
        mut plan: impl FnMut(&Self) -> Result<T, RuntimeError>,
    ) -> Result<T, RuntimeError> {
        planned::fitting(self.threads, self.most_lanes(worth), |lanes| {
            let stream = planned::stream(lanes, self.stream);
            plan(&Self { lanes, stream, ..self.clone() })
        })
    }

    /// Lanes for what is worth so many.
    pub fn most_lanes(&self, worth: usize) -> usize {
        if self.is_on_host() { planned::most(self.threads, worth, self.stream) } else { 1 }
    }

    /// Lanes that are asked for, or else that the work is worth, of which nobody may know how much it is.
    pub fn worth(&self, work: Option<u64>) -> usize {
        match (self.lanes, work) {
            (1, Some(lanes)) => usize::try_from(lanes).unwrap_or(usize::MAX),
            (1, None) => self.threads,
            (asked, _) => asked,
        }
    }

    /// Threads of a lane.
    fn threads_of_lane(&self) -> usize {
        planned::of_lane(self.threads, self.lanes)
    }

    /// The line in bytes.
    pub fn line(&self) -> Result<Bytes, RuntimeError> {
        let line = match self.budget {
            Some(budget) => budget,
            None => machine::parse_budget("80%", self.free()?)?,
        };
        Ok(match (self.is_on_host(), self.host_memory) {
            (true, Some(host)) => host.min(line),
            (true, None) | (false, _) => line,
        })
    }

    /// The program that `build` makes for the most tokens that fit, or for those that were asked for.
    /// A step holds at least `longest` tokens. For those whose weights can only be resident.
    pub fn fit(
        &self,
        longest: u64,
        build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
    ) -> Result<Program, RuntimeError> {
        if self.stream == Stream::Always {
            let text = "--stream-weights always: this command keeps its weights in memory";
            return Err(RuntimeError::Refused(text.to_owned()));
        }
        let search = self.search(longest)?;
        let build = &mut |tokens| Ok(self.placed(build(tokens)?));
        match self.tokens {
            None => Program::largest_bounds(search, build),
            Some(tokens) => Program::exactly(tokens, search, build),
        }
        .map_err(|error| self.with_process(error).into())
    }

    /// The same for those who can attach a source of weights: where no step fits with resident weights, the
    /// program streams them, with the most tokens that fit. See [`plan::fit`].
    pub fn fit_streaming(&self, longest: u64, build: Build<'_>) -> Result<Program, RuntimeError> {
        let mut build = |tokens, weights| Ok(self.placed(build(tokens, weights)?));
        plan::fit(self.tokens, self.search(longest)?, self.stream, &mut build)
            .map_err(|error| self.with_process(error).into())
    }

    /// A program with room for the steps that are open, and for those of all lanes.
    pub fn placed(&self, program: Program) -> Program {
        program.with_ring(self.depth()).with_lanes(self.lanes)
    }

    /// Steps that are open at a time.
    pub fn depth(&self) -> usize {
        self.machine().depth()
    }

    fn search(&self, longest: u64) -> Result<Search, RuntimeError> {
        if let Some(tokens) = self.tokens.filter(|&tokens| tokens < longest) {
            return Err(RuntimeError::Refused(format!(
                "--tokens {tokens} is less than the {longest} tokens that the longest sequence may have; \
                 give --tokens {longest} or more"
            )));
        }
        Ok(planned::search(&self.target()?, self.lanes, longest, self.tokens, self.for_plans(self.line()?)))
    }

    /// Every device, without an arena.
    pub fn open(&self) -> Result<Vec<Box<dyn exec::Device>>, RuntimeError> {
        limits::room_for_threads(self.threads).map_err(RuntimeError::thread("compute"))?;
        let opened = self.machines().iter().map(|machine| machine.open()).collect::<Result<Vec<_>, _>>()?;
        Ok(opened.into_iter().flatten().collect())
    }

    /// As [`Settings::start`] for those who compute on one device, as one lane.
    pub fn start_one(&self, program: Program) -> Result<Executor, RuntimeError> {
        Self { lanes: 1, ..self.clone() }.start_alone(program)?.pop().ok_or_else(several)
    }

    /// The same in all lanes of a program.
    pub fn start_alone(&self, program: Program) -> Result<Vec<Executor>, RuntimeError> {
        if self.device.count() > 1 { Err(several()) } else { self.start(program) }
    }
}

fn several() -> RuntimeError {
    let text = "this command computes on one device; name one, such as --device cuda:0";
    RuntimeError::Refused(text.to_owned())
}

/// The element type of models on this CPU, of what was asked for.
pub fn on_cpu(asked: Option<Precision>) -> Result<Precision, RuntimeError> {
    let formats = CpuMachine::formats();
    match asked {
        None => Ok(formats[0]),
        Some(asked) if formats.contains(&asked) => Ok(asked),
        Some(asked) => Err(RuntimeError::Refused(format!(
            "--precision {}: the CPU computes in bf16, f32 or int8; give one of these or auto, or --device cuda",
            asked.name()
        ))),
    }
}

/// How each device computes, for a line each; lanes of the CPU are alike.
pub fn computing_lines(executors: &[Executor], precision: Precision) -> Vec<String> {
    let alike = executors.first().map_or(1, |executor| executor.program().lanes());
    executors.iter().step_by(alike).map(|executor| computing_line(executor, precision)).collect()
}

/// The device of an executor, or the CPU of which it is one of several lanes.
pub fn name(executor: &Executor) -> String {
    let device = executor.device();
    match executor.program().lanes() {
        1 => device.name(),
        lanes => format!("cpu ({}, {lanes} lanes of {})", device.arithmetic(), threads(device.units())),
    }
}

/// So many threads, in words.
pub fn threads(count: u64) -> String {
    if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") }
}

/// How a program is computed, as a run prints it when it begins: attention, products, precision, and what bits depend on.
pub fn computing_line(executor: &Executor, precision: Precision) -> String {
    let program = executor.program();
    let nodes = || program.plans().iter().flat_map(|(_, p)| p.graph.nodes.iter().zip(&p.kernels));
    let kernel = |is: fn(&Op) -> bool| Some(nodes().find(|(node, _)| is(&node.op))?.1.name());
    let attention = kernel(|op| matches!(op, Op::Attention(_))).unwrap_or("none");
    let linear = kernel(|op| matches!(op, Op::Linear(_))).unwrap_or("none");
    let (device, with) = (name(executor), executor.device().arithmetic());
    let by = executor.device().products_by().map_or_else(String::new, |by| format!(" by {by}"));
    format!("{device}: precision {}, attention: {attention}, products: {linear}{by} ({with})", precision.name())
}

/// The bounds of a step of `tokens`.
pub fn bounds(tokens: u64, longest: u64) -> Bounds {
    Bounds { tokens, sequences: (tokens / TOKENS_PER_SEQUENCE).max(1), longest }
}

/// Lanes that files are worth, compressed or not; `None` where one is a pipe.
pub fn lanes_worth(inputs: &[PathBuf]) -> Option<u64> {
    let bytes = |path: &PathBuf| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|file| file.len());
    inputs.iter().map(bytes).sum::<Option<u64>>().map(|letters| letters / LETTERS_OF_LANE)
}

/// Loads plan `plan` from whatever reads its parameters.
pub fn load(
    executor: &mut Executor,
    plan: usize,
    mut read: impl FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), RuntimeError>,
) -> Result<(), RuntimeError> {
    let mut read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        read(param, range, out).map_err(|e| Box::new(e) as Box<dyn std::error::Error + Send + Sync>)
    };
    Ok(executor.load(plan, &mut read)?)
}

/// Most threads that read weights: beyond, the disk or the bus is what is waited for.
const READERS: usize = 8;

/// The same into every arena: each parameter is read once, by one of several threads.
pub fn load_all(
    executors: &mut [Executor],
    plan: usize,
    read: impl Fn(&Param, Range<u64>, &mut [f32]) -> Result<(), RuntimeError> + Sync,
) -> Result<(), RuntimeError> {
    let read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        read(param, range, out).map_err(|e| Box::new(e) as Box<dyn std::error::Error + Send + Sync>)
    };
    // On the CPU as many as compute; what feeds a GPU has nothing else to do yet.
    let of_host = executors.first().filter(|executor| executor.program().target().space == HOST);
    let of_all = |executor: &Executor| executors.len() * executor.device().units() as usize;
    let readers = of_host.map_or_else(machine::cores, of_all);
    let readers = readers.min(READERS);
    limits::room_for_threads(readers + executors.len()).map_err(RuntimeError::thread("weights"))?;
    Ok(exec::load_all(executors, plan, readers, &read)?)
}

/// Loads what is resident of an encoder's plan `plan` into every arena, and attaches the rest: every step reads it.
pub fn attach_all(executors: &mut [Executor], plan: usize, model: &EncoderModel) -> Result<(), RuntimeError> {
    load_all(executors, plan, |param, range, out| model.read(param, range, out))?;
    for executor in executors {
        let source = model.source(&executor.program().plans()[plan].1.graph);
        executor.attach_loaded(plan, source);
    }
    Ok(())
}

/// The same with what a run keeps in the host's memory, where the line is about another.
pub fn memory_lines(settings: &Settings, program: &Program, budget: Bytes, kept: Bytes, what: &str) -> String {
    let line = memory_line(program, budget);
    if program.target().space == HOST {
        return match settings.process_bytes() {
            Bytes::ZERO => line,
            process => format!("{line}; the process itself up to {process}"),
        };
    }
    format!("{line}; up to {kept} of the host's memory for {what} on their way")
}

/// The plan against the line, as a run prints it.
fn memory_line(program: &Program, budget: Bytes) -> String {
    let tokens = program.plans().iter().map(|(_, p)| p.graph.bounds.tokens).max().unwrap_or(0);
    let (peak, ledger) = (program.peak(), program.ledger().line());
    let lanes = match program.lanes() {
        1 => String::new(),
        lanes => format!(" in {lanes} lanes"),
    };
    let line = format!("memory line {budget}; planned {peak} at {tokens} tokens a step{lanes} ({ledger})");
    let staging: Bytes = program.host_staging().into_iter().sum();
    let line = match staging {
        Bytes::ZERO => line,
        staging => format!("{line}; host staging {staging}"),
    };
    match program.streamed() {
        Bytes::ZERO => line,
        streamed => format!("{line}; weights stream from disk: {streamed} per step"),
    }
}
