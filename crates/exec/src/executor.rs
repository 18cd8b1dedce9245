//! Executor: runs the plans of a compiled program on one device. Invariant: `run` allocates nothing; every address
//! was computed by the plan before the arena was allocated.
//!
//! A *step* is one run of all instructions of a plan. An *instruction* ([`Instruction`]) is one kernel launch, one load
//! of a streamed parameter, or one copy. Steps are run one at a time ([`Executor::run`]), or several are in flight on a
//! device with asynchronous copies (`submit` and `collect` in `submit.rs`).

use crate::device::{Device, DeviceError, GraphCapture, Launch, Operand};
use crate::load::{Buffers, Copies, ParamSource, ReadParam, ReadShared, Source, Weight, load_weights};
use crate::progress::OnStart;
use crate::submit::InFlightSteps;
use plimsoll_graph::{Bytes, Counts, Op, TensorSpec, ValueId};
use plimsoll_plan::{InputId, Instr, KernelId, Kernels, OutputId, Program};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Byte that gives NaN in every float format.
const POISON: u8 = 0xFF;

/// Runs the plans of one program on one device. It may have further programs of the same models for smaller steps
/// ([`Executor::start_sizes`]), of which it runs one at a time.
pub struct Executor {
    device: Box<dyn Device>,
    programs: Prepared,
    /// Index of the program that runs.
    current: usize,
    /// Sources of the parameters that each plan's instructions load in every step, indexed by plan; `None` until
    /// attached.
    sources: Vec<Option<Source>>,
    /// State of in-flight steps.
    pub(crate) open: InFlightSteps,
    /// Number of instructions that the last step has issued.
    pub(crate) issued: usize,
    /// Steps since the device last trimmed its memory.
    since: u64,
    /// Bytes trimmed since `given_back` was last called.
    given_back: Bytes,
}

/// Programs of the same models for steps of one or several sizes, the largest first, with their instructions. Executors of
/// equal devices share them.
#[derive(Clone)]
pub struct Prepared(Arc<[Loaded]>);

/// A program with the instructions of each of its plans, in the order of the plan's schedule, with addresses.
struct Loaded {
    program: Program,
    instructions: Vec<Vec<Instruction>>,
}

/// One instruction of a plan, with its addresses in the arena: the load of a streamed parameter, a kernel launch, or a
/// copy within the arena.
enum Instruction {
    Load(Weight),
    Launch {
        op: Op,
        kernel: KernelId,
        ins: Vec<Operand>,
        outs: Vec<Option<Operand>>,
        workspace: Option<(u64, Bytes)>,
    },
    Copy {
        from: u64,
        to: u64,
        spec: TensorSpec,
    },
}

impl Executor {
    /// Checks that the device has the kernels of the plan, allocates the arena and fills it with NaN. The fill maps
    /// every page, and makes a read of memory that was never written give NaN. Weights are loaded by
    /// [`Executor::load`] or [`Executor::attach`].
    pub fn new(device: Box<dyn Device>, program: Program) -> Result<Self, DeviceError> {
        Self::start(device, program, &mut |_| {})
    }

    /// As [`Executor::new`]; also reports the progress of preparing the launches.
    pub fn start(device: Box<dyn Device>, program: Program, report: OnStart<'_>) -> Result<Self, DeviceError> {
        Self::start_sizes(device, Prepared::new(vec![program])?, report)
    }

    /// As [`Executor::start`], with programs for steps of one or several sizes. The arena has the size of the largest, which
    /// is in use until [`Executor::use_size`].
    pub fn start_sizes(
        mut device: Box<dyn Device>,
        programs: Prepared,
        report: OnStart<'_>,
    ) -> Result<Self, DeviceError> {
        made(device.as_mut(), &programs, report)?;
        let sources = programs.0[0].instructions.iter().map(|_| None).collect();
        Ok(Self {
            device,
            programs,
            current: 0,
            sources,
            open: InFlightSteps::default(),
            issued: 0,
            since: 0,
            given_back: Bytes::ZERO,
        })
    }

    /// Replaces the program on the same device, which keeps its compiled and selected kernels. The arena is resized
    /// in place if the device can. Weights must be loaded again. After an error the executor cannot run any program.
    /// Reports the progress of preparing the launches.
    pub fn switch(&mut self, program: Program, report: OnStart<'_>) -> Result<(), DeviceError> {
        self.switch_sizes(Prepared::new(vec![program])?, report)
    }

    /// As [`Executor::switch`], with the programs of [`Executor::start_sizes`].
    pub fn switch_sizes(&mut self, programs: Prepared, report: OnStart<'_>) -> Result<(), DeviceError> {
        self.open.none("switch")?;
        self.device.wait()?;
        made(self.device.as_mut(), &programs, report)?;
        self.current = 0;
        self.sources = programs.0[0].instructions.iter().map(|_| None).collect();
        self.programs = programs;
        Ok(())
    }

    /// Runs program number `size` of [`Executor::start_sizes`] from the next step on (0 is the largest), after shrinking or
    /// growing the arena in place. The weights stay.
    ///
    /// # Errors
    /// A step is in flight, errors of the device, or [`DeviceError::OutOfMemory`], after which nothing has changed.
    pub fn use_size(&mut self, size: usize) -> Result<(), DeviceError> {
        self.open.none("use_size")?;
        self.device.wait()?;
        self.device.set_mapped(self.programs.0[size].program.arena_bytes())?;
        self.current = size;
        Ok(())
    }

    /// Shrinks or grows the arena in place to the size that the alternative plans of the program from number `k` on need
    /// ([`Program::arena_bytes_from`]; 0 is the largest plan). The larger plans must not run until it has grown again.
    ///
    /// # Errors
    /// A step is in flight, errors of the device, or [`DeviceError::OutOfMemory`], after which nothing has changed.
    pub fn use_alternatives_from(&mut self, k: usize) -> Result<(), DeviceError> {
        self.open.none("use_alternatives_from")?;
        self.device.wait()?;
        self.device.set_mapped(self.program().arena_bytes_from(k))
    }

    /// Bytes that the device returned to the system between steps since the last call.
    pub fn given_back(&mut self) -> Bytes {
        std::mem::take(&mut self.given_back)
    }

    /// Number of instructions that the last step has issued; after an error, those before the instruction that failed.
    pub fn issued(&self) -> usize {
        self.issued
    }

    /// A message for the user about unusual events on the device since the last call, if any.
    pub fn note(&mut self) -> Option<String> {
        self.device.recorder()?.note()
    }

    /// The program that runs.
    pub fn program(&self) -> &Program {
        &self.loaded().program
    }

    /// The program that runs, with its instructions.
    fn loaded(&self) -> &Loaded {
        &self.programs.0[self.current]
    }

    /// Number of the program that runs, among those of [`Executor::start_sizes`].
    pub fn size(&self) -> usize {
        self.current
    }

    /// The programs of [`Executor::start_sizes`].
    pub fn prepared(&self) -> &Prepared {
        &self.programs
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        self.device.as_ref()
    }

    /// The device, mutably.
    pub(crate) fn device_mut(&mut self) -> &mut dyn Device {
        self.device.as_mut()
    }

    /// Loads the resident parameters of a plan into the arena, in the layout that its kernels read.
    pub fn load(&mut self, plan: usize, read: ReadParam<'_>) -> Result<(), DeviceError> {
        let Self { device, programs, current, .. } = self;
        let program = &programs.0[*current].program;
        for weight in Weight::resident(program, plan) {
            let upload = &mut |at, part: &[u8]| device.upload(at, part);
            weight.load(upload, &mut Buffers::of(std::iter::once(&weight)), read)?;
        }
        Ok(())
    }

    /// Loads the resident parameters of every plan with `readers` threads. A parameter that several plans share is read
    /// and uploaded once. `copies` maps the address of a parameter to the addresses of further copies, row-major in f32,
    /// which receive the same values. Reports the number of elements that were read.
    pub fn load_all_plans(
        &mut self,
        copies: &BTreeMap<u64, Copies>,
        readers: usize,
        read: ReadShared<'_>,
        report: OnStart<'_>,
    ) -> Result<(), DeviceError> {
        let (program, mut loaded) = (self.program(), BTreeSet::new());
        let all = (0..program.plans().len()).flat_map(|plan| Weight::resident(program, plan));
        let once = all.filter(|weight| loaded.insert(weight.at));
        let weights = once.map(|weight| {
            let copies = copies.get(&weight.at).copied();
            weight.with_copies(copies.unwrap_or_default())
        });
        let weights = weights.collect();
        load_weights(&mut [self], weights, readers, read, report)
    }

    /// Loads the resident parameters as [`Executor::load`] does, and keeps `source` for the streamed parameters, which
    /// every step of the plan reads. Allocates the only memory that a step needs outside of the arena: a buffer for
    /// the largest streamed parameter.
    pub fn attach(&mut self, plan: usize, mut source: ParamSource) -> Result<(), DeviceError> {
        self.load(plan, &mut *source)?;
        self.attach_loaded(plan, source);
        Ok(())
    }

    /// Keeps `source` for the streamed parameters, which every step of the plan reads. The resident parameters must
    /// have been loaded.
    pub fn attach_loaded(&mut self, plan: usize, source: ParamSource) {
        let streamed = self.loaded().instructions[plan].iter().filter_map(Instruction::weight);
        let buffers = Buffers::of(streamed);
        self.sources[plan] = Some(Source { read: source, buffers });
    }

    /// The input `name` of a plan, for [`Executor::write_i32`] and [`Executor::submit`].
    ///
    /// # Errors
    /// The plan's graph has no input of this name.
    pub fn input(&self, plan: usize, name: &str) -> Result<InputId, DeviceError> {
        self.program().input(plan, name).ok_or_else(|| unnamed(name))
    }

    /// The output `name` of a plan, for [`Executor::read_f32`] and [`Executor::submit`].
    ///
    /// # Errors
    /// The plan's graph has no output of this name.
    pub fn output(&self, plan: usize, name: &str) -> Result<OutputId, DeviceError> {
        self.program().output(plan, name).ok_or_else(|| unnamed(name))
    }

    /// Writes an i32 input for the next run of its plan.
    pub fn write_i32(&mut self, input: InputId, data: &[i32]) -> Result<(), DeviceError> {
        self.write_u8(input, bytemuck::cast_slice(data))
    }

    /// Writes an f32 input for the next run of its plan.
    pub fn write_f32(&mut self, input: InputId, data: &[f32]) -> Result<(), DeviceError> {
        self.write_u8(input, bytemuck::cast_slice(data))
    }

    /// Writes the bytes of an input for the next run of its plan.
    pub fn write_u8(&mut self, input: InputId, data: &[u8]) -> Result<(), DeviceError> {
        let at = self.input_address(input)?;
        self.device.upload(at, data)
    }

    /// Runs one step of a plan on inputs that were written for `counts`. An error if other steps are in flight.
    pub fn run(&mut self, plan: usize, counts: Counts) -> Result<(), DeviceError> {
        self.open.none("run")?;
        self.follow(plan, counts)
    }

    /// Runs one step, enqueued after the in-flight steps.
    pub(crate) fn follow(&mut self, plan: usize, counts: Counts) -> Result<(), DeviceError> {
        self.admits(plan, counts)?;
        let Self { device, programs, current, sources, issued, .. } = self;
        let instructions = &programs.0[*current].instructions;
        *issued = 0;
        let mut run = |device: &mut dyn Device, issued: &mut usize| {
            instructions[plan].iter().try_for_each(|one| {
                one.run(device, counts, sources[plan].as_mut())?;
                *issued += 1;
                Ok(())
            })
        };
        // A step that streams parameters cannot be captured, because the host reads the weight file between launches.
        let reads = instructions[plan].iter().any(|one| one.weight().is_some());
        // A device with a recorder (CUDA graphs) says how this step runs: already replayed from a capture, issued and
        // captured now, or issued without a capture. The captured launches do not run while they are captured: `end`
        // runs them, or returns `Plain` if the capture failed for lack of memory.
        let repeat = match device.recorder().filter(|_| !reads) {
            Some(recorder) => recorder.begin(plan, counts)?,
            None => GraphCapture::Plain,
        };
        match repeat {
            GraphCapture::Done => *issued = instructions[plan].len(),
            GraphCapture::Plain => run(device.as_mut(), issued)?,
            GraphCapture::Record => {
                // The captured launches have not run yet, so an error leaves the step without an issued instruction.
                let ran = run(device.as_mut(), &mut 0);
                let recorded =
                    device.recorder().map_or(Ok(GraphCapture::Done), |recorder| recorder.end(ran.is_ok()));
                ran?;
                match recorded? {
                    GraphCapture::Plain => run(device.as_mut(), issued)?,
                    GraphCapture::Done | GraphCapture::Record => *issued = instructions[plan].len(),
                }
            }
        }
        self.tidy()
    }

    /// Trims the device's memory every `clear_interval` steps.
    fn tidy(&mut self) -> Result<(), DeviceError> {
        self.since += 1;
        let interval = self.device.clear_interval();
        if interval > 0 && self.since >= interval {
            self.since = 0;
            self.given_back += self.device.trim()?;
        }
        Ok(())
    }

    /// Runs one step and adds the time of instruction `i` of the plan's schedule to `times[i]`, measured with device
    /// timestamps if the device has them, otherwise by waiting after each instruction.
    pub fn run_timed(
        &mut self,
        plan: usize,
        counts: Counts,
        times: &mut [Duration],
    ) -> Result<(), DeviceError> {
        self.open.none("run_timed")?;
        self.admits(plan, counts)?;
        let (entries, instructions) = (times.len(), self.loaded().instructions[plan].len());
        if entries != instructions {
            let why = format!("{entries} entries for the times of {instructions} instructions");
            return Err(DeviceError::Kernel { op: "run_timed", why });
        }
        let marks = self.device.tracer().mark(0)?;
        let all = &self.programs.0[self.current].instructions[plan];
        for (i, (instruction, time)) in all.iter().zip(times.iter_mut()).enumerate() {
            let start = Instant::now();
            instruction.run(self.device.as_mut(), counts, self.sources[plan].as_mut())?;
            if marks {
                self.device.tracer().mark(i + 1)?;
            } else {
                self.device.wait()?;
                *time += start.elapsed();
            }
        }
        if marks { self.device.tracer().marked(times) } else { Ok(()) }
    }

    /// Checks that `counts` are within the plan's bounds.
    pub(crate) fn admits(&self, plan: usize, counts: Counts) -> Result<(), DeviceError> {
        if self.program().plans()[plan].1.graph.bounds.admits(counts) {
            return Ok(());
        }
        Err(DeviceError::OverBounds { counts })
    }

    /// Reads an f32 output. `out` has the output's size for the counts of the last run, or the size of its first
    /// rows.
    pub fn read_f32(&mut self, output: OutputId, out: &mut [f32]) -> Result<(), DeviceError> {
        self.read_u8(output, bytemuck::cast_slice_mut(out))
    }

    /// Reads an i32 output, as [`Executor::read_f32`] does.
    pub fn read_i32(&mut self, output: OutputId, out: &mut [i32]) -> Result<(), DeviceError> {
        self.read_u8(output, bytemuck::cast_slice_mut(out))
    }

    /// Reads the bytes of an output, as [`Executor::read_f32`] does.
    pub fn read_u8(&mut self, output: OutputId, out: &mut [u8]) -> Result<(), DeviceError> {
        let at = self.output_address(output)?;
        self.device.download(at, out)
    }

    /// Address of an input in the arena.
    pub(crate) fn input_address(&self, input: InputId) -> Result<u64, DeviceError> {
        address(self.program(), input.plan, input.value)
    }

    /// Address of an output in the arena; its content is valid until the next run.
    pub(crate) fn output_address(&self, output: OutputId) -> Result<u64, DeviceError> {
        address(self.program(), output.plan, output.value)
    }

    /// Copies within the arena: rows from an output to staging, or from staging to an input.
    pub fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.device.copy(from, to, bytes)
    }

    /// Waits until all enqueued work is complete.
    pub fn wait(&mut self) -> Result<(), DeviceError> {
        self.device.wait()
    }

    /// Sets everything except weights to NaN. A run after this gives right results only if it reads nothing that it
    /// has not written.
    pub fn poison(&mut self) -> Result<(), DeviceError> {
        let weights = self.program().persistent().0;
        let rest = self.program().arena_bytes() - Bytes(weights);
        self.device.fill(weights, rest, POISON)
    }
}

impl Instruction {
    /// The launch of a step with `counts`; `None` if the instruction is no launch.
    fn launch(&self, counts: Counts) -> Option<Launch<'_>> {
        match self {
            Self::Launch { op, kernel, ins, outs, workspace } => {
                Some(Launch { op, kernel: *kernel, ins, outs, workspace: *workspace, counts })
            }
            Self::Load(_) | Self::Copy { .. } => None,
        }
    }

    /// Issues the instruction for a step with `counts`.
    fn run(
        &self,
        device: &mut dyn Device,
        counts: Counts,
        source: Option<&mut Source>,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Load(weight) => {
                let Source { read, buffers } = source.ok_or_else(|| weight.unattached())?;
                weight.load(&mut |at, part| device.upload(at, part), buffers, read)
            }
            Self::Launch { op, kernel, ins, outs, workspace } => {
                device.launch(&Launch { op, kernel: *kernel, ins, outs, workspace: *workspace, counts })
            }
            Self::Copy { from, to, spec } => device.copy(*from, *to, spec.bytes_at(counts)),
        }
    }

    /// The streamed parameter, if this is a load.
    fn weight(&self) -> Option<&Weight> {
        match self {
            Self::Load(weight) => Some(weight),
            Self::Launch { .. } | Self::Copy { .. } => None,
        }
    }
}

/// Address of a value of a plan. `Err` if the value has no storage.
fn address(program: &Program, plan: usize, v: ValueId) -> Result<u64, DeviceError> {
    let slice = program.plans()[plan].1.memory.slice(v);
    let none = || DeviceError::Kernel { op: "address", why: format!("{v} has no storage") };
    let slice = slice.ok_or_else(none)?;
    Ok(program.address(plan, slice))
}

/// The error for an input or output name that the plan's graph does not have.
fn unnamed(name: &str) -> DeviceError {
    DeviceError::Kernel { op: "address", why: format!("there is no `{name}`") }
}

/// Checks that the device has the kernels and workers that the program was planned with.
fn same_kernels(program: &Program, device: &dyn Device) -> Result<(), DeviceError> {
    let of = |kernels: Kernels, units: u64| format!("{kernels:?} with {units} workers");
    let target = program.target();
    match (target.kernels, target.workers) == (device.kernels(), device.workers()) {
        true => Ok(()),
        false => Err(DeviceError::Kernels {
            planned: of(target.kernels, target.workers),
            found: of(device.kernels(), device.workers()),
        }),
    }
}

/// Allocates the arena of the largest program, fills it with NaN, and prepares the launches of all programs.
fn made(device: &mut dyn Device, programs: &Prepared, report: OnStart<'_>) -> Result<(), DeviceError> {
    let all = &programs.0;
    let program = &all[0].program;
    same_kernels(program, device)?;
    let bytes = program.arena_bytes();
    device.set_borders(&borders(all))?;
    device.persistent(program.persistent());
    device.alloc_arena(bytes)?;
    device.stage(program.host_staging())?;
    device.fill(0, bytes, POISON)?;
    let mut launches = vec![];
    for Loaded { program, instructions } in all.iter() {
        for (instructions, (_, plan)) in instructions.iter().zip(program.plans()) {
            launches.extend(instructions.iter().filter_map(|one| one.launch(plan.graph.bounds.full())));
        }
    }
    device.prepare_all(&launches, report)?;
    device.wait()
}

/// Sizes to which the arena may shrink: of each program, or of the alternative plans of the only program. Empty if there is
/// one size.
fn borders(all: &[Loaded]) -> Vec<Bytes> {
    let borders: Vec<Bytes> = match all {
        [Loaded { program, .. }] => {
            (0..program.alternatives().len()).map(|k| program.arena_bytes_from(k)).collect()
        }
        several => several.iter().map(|loaded| loaded.program.arena_bytes()).collect(),
    };
    if borders.len() > 1 { borders } else { vec![] }
}

impl Prepared {
    /// Computes the instructions of programs, of which the first is the largest.
    ///
    /// # Errors
    /// No program, a value without an address, or a program whose weights have other addresses or layouts than those of the
    /// first.
    pub fn new(programs: Vec<Program>) -> Result<Self, DeviceError> {
        let refused = |why: &str| DeviceError::Kernel { op: "start", why: why.to_owned() };
        let first = programs.first().ok_or_else(|| refused("there is no program"))?;
        let fits = |other: &Program| {
            other.arena_bytes() <= first.arena_bytes()
                && other.target() == first.target()
                && other.has_weights_of(first)
        };
        if !programs.iter().all(fits) {
            return Err(refused("the programs of several sizes have weights at other places"));
        }
        Ok(Self(programs.into_iter().map(Loaded::of).collect::<Result<_, _>>()?))
    }

    /// The programs, the largest first.
    pub fn programs(&self) -> impl ExactSizeIterator<Item = &Program> + DoubleEndedIterator {
        self.0.iter().map(|loaded| &loaded.program)
    }

    /// Program number `size`; 0 is the largest.
    pub fn program(&self, size: usize) -> &Program {
        &self.0[size].program
    }
}

impl Loaded {
    fn of(program: Program) -> Result<Self, DeviceError> {
        let all = (0..program.plans().len()).map(|plan| instructions(&program, plan));
        Ok(Self { instructions: all.collect::<Result<_, _>>()?, program })
    }
}

/// The instructions of a plan with addresses. An operand without an address is an error: if it were skipped, the kernel
/// would read the later operands in the wrong places.
fn instructions(program: &Program, plan: usize) -> Result<Vec<Instruction>, DeviceError> {
    let (name, p) = &program.plans()[plan];
    let missing =
        |op: &'static str, v: ValueId| DeviceError::NotPlaced { plan: name.clone(), op, value: v.index() };
    let at = |op: &'static str, v: ValueId| {
        p.memory.slice(v).map(|s| program.address(plan, s)).ok_or_else(|| missing(op, v))
    };
    let step = |(i, instr): (usize, &Instr)| match *instr {
        Instr::Launch(id) => {
            let node = p.graph.node(id);
            let operand =
                |v: ValueId| Ok(Operand { at: at(node.op.name(), v)?, spec: p.graph.spec(v).clone() });
            Ok(Instruction::Launch {
                op: node.op,
                kernel: p.kernels[id.index()],
                ins: node.inputs.iter().map(|&v| operand(v)).collect::<Result<_, DeviceError>>()?,
                outs: node.outputs.iter().map(|o| o.map(operand).transpose()).collect::<Result<_, _>>()?,
                workspace: p.memory.workspaces[i].map(|s| (program.address(plan, s), s.bytes)),
            })
        }
        Instr::Load(v) => Weight::of(program, plan, v).map(Instruction::Load).ok_or_else(|| missing("load", v)),
        Instr::Copy { from, to } => Ok(Instruction::Copy {
            from: at("copy", from)?,
            to: at("copy", to)?,
            spec: p.graph.spec(to).clone(),
        }),
    };
    p.schedule.instrs.iter().enumerate().map(step).collect()
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Executor on {} with {}", self.device.name(), self.program().arena_bytes())
    }
}
