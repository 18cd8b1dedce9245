//! Executor: runs the plans of a compiled program on one device. Invariant: `run` allocates nothing; every address
//! was computed by the plan before the arena was allocated.
//!
//! A *step* is one run of all instructions of a plan. An *instruction* ([`Instruction`]) is one kernel launch, or the start
//! of a move or the wait for it. Steps are run one at a time ([`Executor::run`]), or several are in flight on a
//! device with asynchronous copies (`submit` and `collect` in `submit.rs`).

use crate::device::{Device, DeviceError, GraphCapture, Launch, Operand};
use crate::load::{Buffers, Copies, ReadParam, ReadShared, Weight, load_weights};
use crate::progress::OnStart;
use crate::submit::InFlightSteps;
use crate::transfer::{Allocation, Transfer, TransferOrder};
use plimsoll_graph::{Bytes, Counts, Op, OutputRole, Space, TensorSpec, ValueId};
use plimsoll_plan::{InputId, Instr, KernelId, Kernels, Location, OutputId, Program, Queue, moved};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Byte that gives NaN in every float format.
pub(crate) const POISON: u8 = 0xFF;

/// Runs the plans of one program on one device. It may have further programs of the same models for smaller steps
/// ([`Executor::start_sizes`]), of which it runs one at a time.
pub struct Executor {
    device: Box<dyn Device>,
    programs: Prepared,
    /// Maximum number of in-flight steps of the device.
    device_depth: usize,
    /// Index of the program that runs.
    current: usize,
    /// State of in-flight steps.
    pub(crate) open: InFlightSteps,
    /// Number of launches that the last step has issued.
    pub(crate) launched: usize,
    /// Bytes that the device gave back since `given_back` was last called.
    given_back: Bytes,
}

/// Programs of the same models for steps of one or several sizes, the largest first, with their instructions. Executors of
/// equal devices share them.
#[derive(Clone)]
pub struct Prepared {
    programs: Arc<[LoadedProgram]>,
    /// Folder for the scratch file.
    scratch: PathBuf,
}

/// A program with the instructions of each of its plans, in the order of the plan's schedule, with addresses.
struct LoadedProgram {
    program: Program,
    instructions: Vec<Vec<Instruction>>,
    /// Number of moves of all plans. Transfers of in-flight steps have the numbers from here on.
    moves: usize,
}

/// One instruction of a plan, with its addresses.
enum Instruction {
    Launch {
        op: Op,
        kernel: KernelId,
        ins: Vec<Operand>,
        outs: Vec<Option<Operand>>,
        workspace: Option<(u64, Bytes)>,
    },
    Start(PlannedMove),
    Wait(PlannedMove),
}

/// A move of a plan.
#[derive(Clone)]
struct PlannedMove {
    /// Number among the moves of all plans.
    id: usize,
    from: Location,
    to: Location,
    spec: TensorSpec,
}

impl PlannedMove {
    /// The transfer of the move in a step with `counts`.
    fn transfer(&self, counts: Counts) -> Transfer {
        let Self { id, from, to, spec } = self;
        Transfer {
            id: *id,
            from: *from,
            to: *to,
            bytes: spec.bytes_at(counts),
            order: TransferOrder::AfterLaunches,
        }
    }
}

impl Executor {
    /// Checks that the device has the kernels of the plan, allocates the arena and fills it with NaN. The fill maps
    /// every page, and makes a read of memory that was never written give NaN. Weights are loaded by
    /// [`Executor::load`].
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
        prepare_device(device.as_mut(), &programs, report)?;
        Ok(Self {
            device_depth: device.info().depth,
            device,
            programs,
            current: 0,
            open: InFlightSteps::default(),
            launched: 0,
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
        // Enqueued work may still read the arena, which is resized or replaced here.
        self.device.synchronize()?;
        prepare_device(self.device.as_mut(), &programs, report)?;
        self.current = 0;
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
        self.device.synchronize()?;
        // In this order: if the arena cannot grow, the program that fits the present arena stays the current one.
        self.device.set_mapped(self.programs.program(size).arena_bytes())?;
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
        self.device.synchronize()?;
        self.device.set_mapped(self.program().arena_bytes_from(k))
    }

    /// Bytes that the device returned to the system between steps since the last call.
    pub fn given_back(&mut self) -> Bytes {
        std::mem::take(&mut self.given_back)
    }

    /// Number of launches that the last step has issued; after an error, those before the instruction that failed.
    pub fn launched(&self) -> usize {
        self.launched
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
    fn loaded(&self) -> &LoadedProgram {
        &self.programs.programs[self.current]
    }

    /// Number of the program that runs, among those of [`Executor::start_sizes`].
    pub fn size(&self) -> usize {
        self.current
    }

    /// Number of moves of all plans of the program that runs.
    pub(crate) fn moves(&self) -> usize {
        self.loaded().moves
    }

    /// The programs of [`Executor::start_sizes`].
    pub fn prepared(&self) -> &Prepared {
        &self.programs
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        self.device.as_ref()
    }

    /// Maximum number of in-flight steps.
    pub fn depth(&self) -> usize {
        self.program().depth().min(self.device_depth)
    }

    /// The device, mutably.
    pub(crate) fn device_mut(&mut self) -> &mut dyn Device {
        self.device.as_mut()
    }

    /// Loads the parameters of a plan to where they lie between their uses, in the layout that its kernels read.
    pub fn load(&mut self, plan: usize, read: ReadParam<'_>) -> Result<(), DeviceError> {
        let Self { device, programs, current, .. } = self;
        let program = programs.program(*current);
        for weight in Weight::resident(program, plan) {
            let upload = &mut |at, part: &[u8]| device.upload(at, part);
            weight.load(upload, &mut Buffers::of(std::iter::once(&weight)), read)?;
        }
        Ok(())
    }

    /// Loads the parameters of every plan with `readers` threads. A parameter that several plans share is read and
    /// uploaded once. `copies` maps the position of a parameter to those of further copies, row-major in f32, which receive
    /// the same values. Reports the number of elements that were read.
    pub fn load_all_plans(
        &mut self,
        copies: &BTreeMap<Location, Copies>,
        readers: usize,
        read: ReadShared<'_>,
        report: OnStart<'_>,
    ) -> Result<(), DeviceError> {
        let program = self.program();
        let mut loaded = BTreeSet::new();
        let all = (0..program.plans().len()).flat_map(|plan| Weight::resident(program, plan));
        let once = all.filter(|weight| loaded.insert(weight.at));
        let weights = once.map(|weight| {
            let copies = copies.get(&weight.at).copied();
            weight.with_copies(copies.unwrap_or_default())
        });
        let weights = weights.collect();
        load_weights(&mut [self], weights, readers, read, report)
    }

    /// The input `name` of a plan, for [`Executor::write_i32`] and [`Executor::submit`].
    ///
    /// # Errors
    /// The plan's graph has no input of this name.
    pub fn input(&self, plan: usize, name: &str) -> Result<InputId, DeviceError> {
        self.program().input(plan, name).ok_or_else(|| unnamed(name))
    }

    /// The output of a plan with a role, for [`Executor::read_f32`] and [`Executor::submit`]; see
    /// [`Graph::output`](plimsoll_graph::Graph::output).
    ///
    /// # Errors
    /// The plan's graph has no output of this role.
    pub fn output(&self, plan: usize, role: impl Into<OutputRole>) -> Result<OutputId, DeviceError> {
        let role = role.into();
        self.program().output(plan, &role).ok_or_else(|| unnamed(&role.to_string()))
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
        let at = self.input_location(input)?;
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
        self.launched = 0;
        self.given_back += self.device.begin_step()?;
        let Self { device, programs, current, launched, .. } = self;
        let instructions = &programs.programs[*current].instructions[plan];
        let launches = instructions.iter().filter(|one| one.is_launch()).count();
        let run = |device: &mut dyn Device, launched: &mut usize| {
            instructions.iter().try_for_each(|one| {
                one.run(device, counts)?;
                *launched += usize::from(one.is_launch());
                Ok(())
            })
        };
        // A step with moves to or from other spaces is not captured: they run in several queues.
        let moves = instructions.iter().any(Instruction::leaves_arena);
        // A device with a recorder (CUDA graphs) says how this step runs: already replayed from a capture, issued and
        // captured now, or issued without a capture. The captured launches do not run while they are captured: `end`
        // runs them, or returns `Plain` if the capture failed for lack of memory.
        let capture = match device.recorder().filter(|_| !moves) {
            Some(recorder) => recorder.begin(plan, counts)?,
            None => GraphCapture::Plain,
        };
        match capture {
            GraphCapture::Done => *launched = launches,
            GraphCapture::Plain => run(device.as_mut(), launched)?,
            GraphCapture::Record => {
                // The captured launches have not run yet, so an error leaves the step without a launch.
                let ran = run(device.as_mut(), &mut 0);
                let recorded =
                    device.recorder().map_or(Ok(GraphCapture::Done), |recorder| recorder.end(ran.is_ok()));
                ran?;
                match recorded? {
                    GraphCapture::Plain => run(device.as_mut(), launched)?,
                    GraphCapture::Done | GraphCapture::Record => *launched = launches,
                }
            }
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
        let entries = times.len();
        let instructions = self.loaded().instructions[plan].len();
        if entries != instructions {
            let why = format!("{entries} entries for the times of {instructions} instructions");
            return Err(DeviceError::Kernel { op: "run_timed", why });
        }
        self.given_back += self.device.begin_step()?;
        let marks = self.device.tracer().mark(0)?;
        let all = &self.programs.programs[self.current].instructions[plan];
        for (i, (instruction, time)) in all.iter().zip(times.iter_mut()).enumerate() {
            let start = Instant::now();
            instruction.run(self.device.as_mut(), counts)?;
            if marks {
                self.device.tracer().mark(i + 1)?;
            } else {
                self.device.synchronize()?;
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
        let at = self.output_location(output)?;
        self.device.download(at, out)
    }

    /// Position of an input in the arena.
    pub(crate) fn input_location(&self, input: InputId) -> Result<Location, DeviceError> {
        location(self.program(), input.plan, input.value)
    }

    /// Position of an output in the arena; its content is valid until the next run.
    pub(crate) fn output_location(&self, output: OutputId) -> Result<Location, DeviceError> {
        location(self.program(), output.plan, output.value)
    }

    /// Copies within the arena: rows from an output to staging, or from staging to an input.
    pub fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.device.start(&Transfer::in_arena(from, to, bytes))
    }

    /// Waits until all enqueued work is complete.
    pub fn wait(&mut self) -> Result<(), DeviceError> {
        self.device.synchronize()
    }

    /// Sets everything except weights to NaN. A run after this gives right results only if it reads nothing that it
    /// has not written.
    pub fn poison(&mut self) -> Result<(), DeviceError> {
        let weights = self.program().persistent().0;
        let rest = self.program().arena_bytes() - Bytes(weights);
        self.device.fill(Location::in_arena(weights), rest, POISON)?;
        // The inputs of the next step may be copied without waiting for enqueued work.
        self.device.synchronize()
    }
}

impl Instruction {
    /// The launch of a step with `counts`; `None` if the instruction is no launch.
    fn launch(&self, counts: Counts) -> Option<Launch<'_>> {
        match self {
            Self::Launch { op, kernel, ins, outs, workspace } => {
                Some(Launch { op, kernel: *kernel, ins, outs, workspace: *workspace, counts })
            }
            Self::Start(_) | Self::Wait(_) => None,
        }
    }

    /// Issues the instruction for a step with `counts`.
    fn run(&self, device: &mut dyn Device, counts: Counts) -> Result<(), DeviceError> {
        match self {
            Self::Launch { op, kernel, ins, outs, workspace } => {
                device.launch(&Launch { op, kernel: *kernel, ins, outs, workspace: *workspace, counts })
            }
            Self::Start(a_move) => device.start(&a_move.transfer(counts)),
            Self::Wait(a_move) => device.wait_for(&a_move.transfer(counts)),
        }
    }

    fn is_launch(&self) -> bool {
        matches!(self, Self::Launch { .. })
    }

    /// Whether this is an instruction of a move to or from another space than the arena.
    fn leaves_arena(&self) -> bool {
        match self {
            Self::Launch { .. } => false,
            Self::Start(a_move) | Self::Wait(a_move) => {
                Queue::of(a_move.from.space, a_move.to.space) != Queue::Compute
            }
        }
    }
}

/// Position of a value of a plan. `Err` if the value has no storage.
fn location(program: &Program, plan: usize, v: ValueId) -> Result<Location, DeviceError> {
    let slice = program.plans()[plan].1.memory.slice(v);
    let Some(slice) = slice else {
        return Err(DeviceError::Kernel { op: "address", why: format!("{v} has no storage") });
    };
    Ok(program.location(plan, slice))
}

/// The error for an input or output name that the plan's graph does not have.
fn unnamed(name: &str) -> DeviceError {
    DeviceError::Kernel { op: "address", why: format!("there is no `{name}`") }
}

/// Checks that the device has the kernels and workers that the program was planned with.
fn same_kernels(program: &Program, device: &dyn Device) -> Result<(), DeviceError> {
    let target = program.target();
    let info = device.info();
    if (target.kernels, target.workers) == (info.kernels, info.workers) {
        return Ok(());
    }
    Err(DeviceError::Kernels {
        planned: with_workers(target.kernels, target.workers),
        found: with_workers(info.kernels, info.workers),
    })
}

/// Kernels and workers in a message.
fn with_workers(kernels: Kernels, workers: u64) -> String {
    format!("{kernels:?} with {workers} workers")
}

/// Allocates the memory of the largest program, fills the arena with NaN, and prepares the launches of all programs.
fn prepare_device(
    device: &mut dyn Device,
    prepared: &Prepared,
    report: OnStart<'_>,
) -> Result<(), DeviceError> {
    let all = &prepared.programs;
    let program = &all[0].program;
    same_kernels(program, device)?;
    let [host, file] = [Space::Host, Space::File]
        .map(|space| prepared.programs().map(|program| program.space_bytes(space)).max().unwrap_or_default());
    device.allocate(&Allocation {
        arena: program.arena_bytes(),
        weights: program.persistent(),
        borders: &borders(all),
        host,
        file,
        folder: &prepared.scratch,
        transfers: all.iter().map(|loaded| loaded.moves).max().unwrap_or(0) + 2 * program.depth(),
    })?;
    device.fill(Location::in_arena(0), program.arena_bytes(), POISON)?;
    let mut launches = vec![];
    for LoadedProgram { program, instructions, .. } in all.iter() {
        for (instructions, (_, plan)) in instructions.iter().zip(program.plans()) {
            launches.extend(instructions.iter().filter_map(|one| one.launch(plan.graph.bounds.full())));
        }
    }
    device.prepare(&launches, report)?;
    device.synchronize()
}

/// Sizes to which the arena may shrink: of each program, or of the alternative plans of the only program. Empty if there is
/// one size.
fn borders(all: &[LoadedProgram]) -> Vec<Bytes> {
    let borders: Vec<Bytes> = match all {
        [LoadedProgram { program, .. }] => {
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
        let Some(first) = programs.first() else {
            return Err(DeviceError::Kernel { op: "start", why: "there is no program".to_owned() });
        };
        for other in &programs {
            // The weights stay where they are when the size of a run changes.
            let fits = other.arena_bytes() <= first.arena_bytes()
                && other.target() == first.target()
                && other.has_weights_of(first);
            if !fits {
                let why = "the programs of several sizes have weights at other places".to_owned();
                return Err(DeviceError::Kernel { op: "start", why });
            }
        }
        let programs = programs.into_iter().map(LoadedProgram::of).collect::<Result<_, _>>()?;
        Ok(Self { programs, scratch: std::env::temp_dir() })
    }

    /// Sets the folder for the scratch file of programs that keep anything on disk; otherwise it is the system's folder
    /// for temporary files.
    pub fn with_scratch(self, folder: &Path) -> Self {
        Self { scratch: folder.to_owned(), ..self }
    }

    /// The programs, the largest first.
    pub fn programs(&self) -> impl ExactSizeIterator<Item = &Program> + DoubleEndedIterator {
        self.programs.iter().map(|loaded| &loaded.program)
    }

    /// Program number `size`; 0 is the largest.
    pub fn program(&self, size: usize) -> &Program {
        &self.programs[size].program
    }
}

impl LoadedProgram {
    fn of(program: Program) -> Result<Self, DeviceError> {
        let mut moves = 0;
        let all = (0..program.plans().len()).map(|plan| instructions(&program, plan, &mut moves));
        let instructions = all.collect::<Result<_, _>>()?;
        Ok(Self { instructions, program, moves })
    }
}

/// The instructions of a plan with addresses; adds the number of its moves to `moves`. An operand without an address is an
/// error: if it were skipped, the kernel would read the later operands in the wrong places.
fn instructions(program: &Program, plan: usize, moves: &mut usize) -> Result<Vec<Instruction>, DeviceError> {
    let p = &program.plans()[plan].1;
    // The start and the wait of a move are two instructions of the same node, and must name the same transfer.
    let mut of_node: BTreeMap<usize, PlannedMove> = BTreeMap::new();
    for (id, _) in p.graph.nodes() {
        let Some((from, to)) = moved(&p.graph, id) else { continue };
        let spec = p.graph.spec(from).clone();
        let from = placed(program, plan, "move", from)?;
        let to = placed(program, plan, "move", to)?;
        of_node.insert(id.index(), PlannedMove { id: *moves, from, to, spec });
        *moves += 1;
    }
    let mut instructions = Vec::with_capacity(p.schedule.instrs.len());
    for (i, instr) in p.schedule.instrs.iter().enumerate() {
        let (Instr::Launch(id) | Instr::Start(id) | Instr::Wait(id)) = *instr;
        let node = p.graph.node(id);
        let planned = of_node.get(&id.index()).cloned();
        instructions.push(match *instr {
            Instr::Launch(_) => {
                let mut ins = Vec::with_capacity(node.inputs.len());
                for &v in &node.inputs {
                    ins.push(operand(program, plan, node.op.name(), v)?);
                }
                let mut outs = Vec::with_capacity(node.outputs.len());
                for v in &node.outputs {
                    outs.push(v.map(|v| operand(program, plan, node.op.name(), v)).transpose()?);
                }
                let workspace = p.memory.workspaces[i].map(|s| (program.location(plan, s).at, s.bytes));
                Instruction::Launch { op: node.op, kernel: p.kernels[id.index()], ins, outs, workspace }
            }
            Instr::Start(_) => Instruction::Start(planned.ok_or_else(|| no_move(node.op.name()))?),
            Instr::Wait(_) => Instruction::Wait(planned.ok_or_else(|| no_move(node.op.name()))?),
        });
    }
    Ok(instructions)
}

/// Position of a value that `op` reads or writes.
fn placed(program: &Program, plan: usize, op: &'static str, v: ValueId) -> Result<Location, DeviceError> {
    let (name, p) = &program.plans()[plan];
    match p.memory.slice(v) {
        Some(slice) => Ok(program.location(plan, slice)),
        None => Err(DeviceError::NotPlaced { plan: name.clone(), op, value: v.index() }),
    }
}

/// A value as an operand of `op`.
fn operand(program: &Program, plan: usize, op: &'static str, v: ValueId) -> Result<Operand, DeviceError> {
    let at = placed(program, plan, op, v)?.at;
    Ok(Operand { at, spec: program.plans()[plan].1.graph.spec(v).clone() })
}

/// The error for an instruction of a move whose node is none.
fn no_move(op: &'static str) -> DeviceError {
    DeviceError::Kernel { op, why: "it is started as a move".to_owned() }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Executor on {} with {}", self.device.info().name, self.program().arena_bytes())
    }
}
