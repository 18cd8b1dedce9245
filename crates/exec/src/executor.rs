//! Follows a program. Invariant: `run` allocates nothing; every address was computed by the plan before the
//! arena was allocated.

use crate::device::{Device, DeviceError, Launch, Operand};
use graph::{Bytes, Counts, DType, Layout, Op, Param, TensorSpec, ValueId};
use plan::{Instr, KernelRow, Program};
use std::ops::Range;
use std::time::{Duration, Instant};

/// A NaN in every float format.
const POISON: u8 = 0xFF;

/// Elements of a weight that are read at once: the only copy beside the arena.
const CHUNK: usize = 1 << 18;

/// Reads `elements` of a parameter, C order over its pieces put under each other, as f32.
pub type ReadParam<'a> =
    &'a mut dyn FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// A program on a device.
pub struct Executor {
    device: Box<dyn Device>,
    program: Program,
    steps: Vec<Vec<Step>>,
}

enum Step {
    Launch { op: Op, ins: Vec<Operand>, outs: Vec<Option<Operand>>, workspace: Option<(u64, Bytes)> },
    Copy { from: u64, to: u64, spec: TensorSpec },
}

impl Executor {
    /// Compares the kernels of plan and device, makes the arena and poisons it, so that every page is there
    /// and a read of what was never written is a NaN.
    pub fn new(mut device: Box<dyn Device>, program: Program) -> Result<Self, DeviceError> {
        same_kernels(&program, device.as_ref())?;
        let steps = (0..program.plans().len()).map(|i| steps(&program, i)).collect();
        let bytes = program.arena_bytes();
        device.alloc_arena(bytes)?;
        device.fill(0, bytes, POISON)?;
        Ok(Self { device, program, steps })
    }

    /// What it follows.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What it runs on.
    pub fn device(&self) -> &dyn Device {
        self.device.as_ref()
    }

    /// Reads every parameter of a plan into the arena, in the layout that its kernels stream.
    pub fn load(&mut self, plan: usize, read: ReadParam<'_>) -> Result<(), DeviceError> {
        let Self { device, program, .. } = self;
        let p = &program.plans()[plan].1;
        let full = p.graph.bounds.full();
        for (v, _, param) in p.graph.param_values() {
            let at = address(program, plan, v)?;
            let spec = p.graph.spec(v);
            let fail = |source| DeviceError::Load { param: param.name.clone(), source };
            let mut read = |range: Range<u64>, out: &mut [f32]| read(param, range, out).map_err(fail);
            match spec.layout {
                Layout::RowMajor => load_rows(device.as_mut(), at, spec.elements_at(full), &mut read)?,
                Layout::Panels { width } => {
                    let panels = Panels { width: u64::from(width), n: spec.rows(full), k: spec.row_elements() };
                    load_panels(device.as_mut(), at, panels, &mut read)?;
                }
            }
        }
        Ok(())
    }

    /// Gives an i32 input of a plan for the next run.
    pub fn input_i32(&mut self, plan: usize, name: &str, data: &[i32]) -> Result<(), DeviceError> {
        let at = self.input_address(plan, name)?;
        self.device.upload(at, bytemuck::cast_slice(data))
    }

    /// Gives an f32 input of a plan for the next run.
    pub fn input_f32(&mut self, plan: usize, name: &str, data: &[f32]) -> Result<(), DeviceError> {
        let at = self.input_address(plan, name)?;
        self.device.upload(at, bytemuck::cast_slice(data))
    }

    /// Runs one step of a plan on inputs that were given for `counts`.
    pub fn run(&mut self, plan: usize, counts: Counts) -> Result<(), DeviceError> {
        self.admits(plan, counts)?;
        self.steps[plan].iter().try_for_each(|step| step.run(self.device.as_mut(), counts))
    }

    /// The same, and adds the time of every instruction of the plan's schedule to its entry of `times`.
    pub fn run_timed(
        &mut self,
        plan: usize,
        counts: Counts,
        times: &mut [Duration],
    ) -> Result<(), DeviceError> {
        self.admits(plan, counts)?;
        let (entries, instructions) = (times.len(), self.steps[plan].len());
        if entries != instructions {
            let why = format!("{entries} entries for the times of {instructions} instructions");
            return Err(DeviceError::Kernel { op: "run_timed", why });
        }
        for (step, time) in self.steps[plan].iter().zip(times) {
            let start = Instant::now();
            step.run(self.device.as_mut(), counts)?;
            *time += start.elapsed();
        }
        Ok(())
    }

    fn admits(&self, plan: usize, counts: Counts) -> Result<(), DeviceError> {
        if self.program.plans()[plan].1.graph.bounds.admits(counts) {
            return Ok(());
        }
        Err(DeviceError::OverBounds { counts })
    }

    /// Reads an output; `out` has the size of a step of the last run's counts, or of its first rows.
    pub fn output_f32(&mut self, plan: usize, name: &str, out: &mut [f32]) -> Result<(), DeviceError> {
        let at = self.output_address(plan, name)?;
        self.device.download(at, bytemuck::cast_slice_mut(out))
    }

    /// Where an input lies in the arena.
    pub fn input_address(&self, plan: usize, name: &str) -> Result<u64, DeviceError> {
        let value = self.program.plans()[plan].1.graph.input(name);
        address(&self.program, plan, named(value, name)?)
    }

    /// Where an output lies in the arena until the next run.
    pub fn output_address(&self, plan: usize, name: &str) -> Result<u64, DeviceError> {
        let value = self.program.plans()[plan].1.graph.output(name);
        address(&self.program, plan, named(value, name)?)
    }

    /// Copies inside of the arena: rows from an output to staging, from staging to an input.
    pub fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.device.copy(from, to, bytes)
    }

    /// Reads f32 from anywhere in the arena.
    pub fn download_f32(&mut self, at: u64, out: &mut [f32]) -> Result<(), DeviceError> {
        self.device.download(at, bytemuck::cast_slice_mut(out))
    }

    /// Writes f32 anywhere in the arena.
    pub fn upload_f32(&mut self, at: u64, values: &[f32]) -> Result<(), DeviceError> {
        self.device.upload(at, bytemuck::cast_slice(values))
    }

    /// Sets everything but weights to NaN: a run after it can only be right if it reads what it wrote.
    pub fn poison(&mut self) -> Result<(), DeviceError> {
        let weights: u64 = self.program.plans().iter().map(|(_, p)| p.memory.persistent.0).sum();
        let rest = self.program.arena_bytes() - Bytes(weights);
        self.device.fill(weights, rest, POISON)
    }
}

impl Step {
    fn run(&self, device: &mut dyn Device, counts: Counts) -> Result<(), DeviceError> {
        match self {
            Self::Launch { op, ins, outs, workspace } => {
                device.launch(&Launch { op, ins, outs, workspace: *workspace, counts })
            }
            Self::Copy { from, to, spec } => device.copy(*from, *to, spec.bytes_at(counts)),
        }
    }
}

fn address(program: &Program, plan: usize, v: ValueId) -> Result<u64, DeviceError> {
    let slice = program.plans()[plan].1.memory.slice(v);
    let slice = slice.ok_or(DeviceError::Kernel { op: "address", why: format!("{v} has no storage") })?;
    Ok(program.address(plan, slice))
}

fn named(value: Option<ValueId>, name: &str) -> Result<ValueId, DeviceError> {
    value.ok_or_else(|| DeviceError::Kernel { op: "address", why: format!("there is no `{name}`") })
}

/// The plan's kernel rows and the device's must agree for every op that the program runs.
fn same_kernels(program: &Program, device: &dyn Device) -> Result<(), DeviceError> {
    let target = program.target();
    if target.units != device.units() {
        return Err(DeviceError::KernelTable {
            op: "units".to_owned(),
            planned: target.units.to_string(),
            reported: device.units().to_string(),
        });
    }
    let reported = device.kernels();
    for node in program.plans().iter().flat_map(|(_, p)| &p.graph.nodes) {
        let has = |rows: &[KernelRow]| rows.iter().find(|r| r.op == node.op.name()).cloned();
        let (planned, found) = (has(&target.kernels), has(&reported));
        if planned != found || planned.is_none() {
            return Err(DeviceError::KernelTable {
                op: node.op.name().to_owned(),
                planned: format!("{planned:?}"),
                reported: format!("{found:?}"),
            });
        }
    }
    Ok(())
}

fn steps(program: &Program, plan: usize) -> Vec<Step> {
    let p = &program.plans()[plan].1;
    let at = |v: ValueId| p.memory.slice(v).map(|s| program.address(plan, s));
    let operand = |v: ValueId| at(v).map(|at| Operand { at, spec: p.graph.spec(v).clone() });
    let step = |(i, instr): (usize, &Instr)| match *instr {
        Instr::Launch(id) => {
            let node = p.graph.node(id);
            Some(Step::Launch {
                op: node.op,
                ins: node.inputs.iter().filter_map(|&v| operand(v)).collect(),
                outs: node.outputs.iter().map(|o| o.and_then(operand)).collect(),
                workspace: p.memory.workspaces[i].map(|s| (program.address(plan, s), s.bytes)),
            })
        }
        Instr::Copy { from, to } => {
            Some(Step::Copy { from: at(from)?, to: at(to)?, spec: p.graph.spec(to).clone() })
        }
    };
    p.schedule.instrs.iter().enumerate().filter_map(step).collect()
}

type ReadElements<'a> = &'a mut dyn FnMut(Range<u64>, &mut [f32]) -> Result<(), DeviceError>;

fn load_rows(
    device: &mut dyn Device,
    at: u64,
    elements: u64,
    read: ReadElements<'_>,
) -> Result<(), DeviceError> {
    let mut chunk = vec![0f32; CHUNK.min(elements as usize)];
    let mut done = 0;
    while done < elements {
        let n = (elements - done).min(CHUNK as u64);
        let part = &mut chunk[..n as usize];
        read(done..done + n, part)?;
        device.upload(at + done * DType::F32.size(), bytemuck::cast_slice(part))?;
        done += n;
    }
    Ok(())
}

/// A weight (n, k) in panels of `width` rows.
struct Panels {
    width: u64,
    n: u64,
    k: u64,
}

/// One panel at a time: `width` rows are read, transposed to k x width and padded with zeros.
fn load_panels(device: &mut dyn Device, at: u64, p: Panels, read: ReadElements<'_>) -> Result<(), DeviceError> {
    let (width, k) = (p.width as usize, p.k as usize);
    let mut rows = vec![0f32; width * k];
    let mut panel = vec![0f32; width * k];
    for first in (0..p.n).step_by(width) {
        let count = (p.n - first).min(p.width) as usize;
        read(first * p.k..(first + count as u64) * p.k, &mut rows[..count * k])?;
        rows[count * k..].fill(0.0);
        for (j, column) in panel.chunks_exact_mut(width).enumerate() {
            for (r, x) in column.iter_mut().enumerate() {
                *x = rows[r * k + j];
            }
        }
        device.upload(at + first * p.k * DType::F32.size(), bytemuck::cast_slice(&panel))?;
    }
    Ok(())
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Executor on {} with {}", self.device.name(), self.program.arena_bytes())
    }
}
