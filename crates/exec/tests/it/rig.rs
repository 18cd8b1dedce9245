//! Executors for tests. Invariant: a graph runs exactly as in production: compiled, checked and loaded, on an arena
//! filled with NaN.

use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_cuda::{CudaDevice, CudaError};
use plimsoll_exec::reference::{Moves, ReferenceDevice};
use plimsoll_exec::{Data, Device, DeviceError, Executor, Prepared, Submitted};
use plimsoll_graph::{Counts, Graph, OutputRole, Param, Space, packs};
use plimsoll_plan::{
    Capability, Fuse, Kernels, Plan, PlanError, Policy, Precision, Program, Target, Weights, compile,
};
use std::ops::Range;
use std::sync::{LazyLock, Mutex, PoisonError};

/// The device that a test runs on.
#[derive(Clone, Copy)]
pub enum On {
    /// The reference kernels, target `null`.
    Reference,
    /// The reference kernels, with plans in this precision.
    Narrow(Precision),
    /// The CPU's kernels, target `cpu`.
    Cpu(Isa, usize),
    /// The CPU's kernels, with plans in this precision.
    CpuNarrow(Isa, usize, Precision),
    /// The first GPU's kernels, in this element type.
    Cuda(Precision),
}

impl On {
    /// Every instruction set of this machine, on one and on three threads.
    pub fn every_cpu() -> Vec<Self> {
        Isa::available().flat_map(|isa| [Self::Cpu(isa, 1), Self::Cpu(isa, 3)]).collect()
    }

    /// As `every_cpu`, in a given precision.
    pub fn every_cpu_in(precision: Precision) -> Vec<Self> {
        let on = |isa| [1, 3].map(|threads| Self::CpuNarrow(isa, threads, precision));
        Isa::available().flat_map(on).collect()
    }

    /// The first GPU; without one, prints a message and returns `None`.
    pub fn cuda(precision: Precision) -> Option<Self> {
        // One device stays open, so that the context is created once.
        static OPEN: LazyLock<Mutex<Result<CudaDevice, CudaError>>> =
            LazyLock::new(|| Mutex::new(CudaDevice::new(0)));
        match &*OPEN.lock().unwrap_or_else(PoisonError::into_inner) {
            Ok(_) => Some(Self::Cuda(precision)),
            Err(error) if error.is_absent() => {
                println!("skipped: no CUDA device");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Name for messages.
    pub fn name(self) -> String {
        match self {
            Self::Reference => "reference".to_owned(),
            Self::Narrow(precision) => format!("reference in {}", precision.name()),
            Self::Cpu(isa, threads) => format!("{} x {threads}", isa.name()),
            Self::CpuNarrow(isa, threads, precision) => {
                format!("{} x {threads} in {}", isa.name(), precision.name())
            }
            Self::Cuda(precision) => format!("cuda in {}", precision.name()),
        }
    }

    /// The planning target.
    pub fn target(self) -> Result<Target, PlanError> {
        match self {
            Self::Reference | Self::Narrow(_) => Target::named("null"),
            Self::Cpu(isa, threads) | Self::CpuNarrow(isa, threads, _) => CpuDevice::target(threads, isa),
            Self::Cuda(_) => {
                let first =
                    plimsoll_cuda::cards().ok().and_then(|cards| cards.first().map(|card| card.capability));
                let kernels =
                    Kernels::Cuda(first.map_or(Capability::MIN, |(major, minor)| Capability(major, minor)));
                Ok(Target { kernels, ..Target::named("cuda")? })
            }
        }
    }

    /// The plan of a graph.
    pub fn plan(self, graph: &Graph, fuse: bool, weights: Weights) -> Result<(Target, Plan), PlanError> {
        let target = self.target()?;
        let precision = match self {
            Self::Reference | Self::Cpu(..) => Precision::F32,
            Self::Narrow(precision) | Self::CpuNarrow(.., precision) | Self::Cuda(precision) => precision,
        };
        let fuse = if fuse { Fuse::Kernels } else { Fuse::Nothing };
        let policy = Policy { precision, fuse, weights, ..Policy::default() };
        let plan = compile(graph, &policy, &target)?;
        Ok((target, plan))
    }

    /// An executor of a program.
    pub fn executor(self, program: Program) -> Executor {
        self.executor_of(Prepared::new(vec![program]).unwrap_or_else(|e| panic!("{}: {e}", self.name())))
    }

    /// An executor of programs for steps of several sizes.
    pub fn executor_of(self, programs: Prepared) -> Executor {
        let device: Box<dyn Device> = match self {
            // Of the two ways to move, the one that shows a read before its wait.
            Self::Reference | Self::Narrow(_) => Box::new(ReferenceDevice::moving(Moves::AtWait)),
            Self::Cpu(isa, threads) | Self::CpuNarrow(isa, threads, _) => {
                Box::new(CpuDevice::with_isa(threads, isa))
            }
            Self::Cuda(_) => Box::new(CudaDevice::new(0).unwrap_or_else(|e| panic!("{e}"))),
        };
        Executor::start_sizes(device, programs, &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", self.name()))
    }
}

/// A loaded executor of one graph.
pub fn load(
    on: On,
    graph: &Graph,
    fuse: bool,
    read: impl FnMut(&Param, Range<u64>, &mut [f32]),
) -> Result<Executor, PlanError> {
    load_as(on, graph, fuse, Weights::Resident, read)
}

/// A loaded executor of one graph.
pub fn load_as(
    on: On,
    graph: &Graph,
    fuse: bool,
    weights: Weights,
    mut read: impl FnMut(&Param, Range<u64>, &mut [f32]),
) -> Result<Executor, PlanError> {
    let mut executor = bare(on, graph, fuse, weights)?;
    let mut read = |p: &Param, range: Range<u64>, out: &mut [f32]| {
        read(p, range, out);
        Ok(())
    };
    executor.load(0, &mut read).unwrap_or_else(|e| panic!("{e}"));
    Ok(executor)
}

/// Weights that are streamed from a file, which every device has.
pub const FROM_FILE: Weights = Weights::Streamed { from: Space::File, prefetch: true };

/// An executor of one graph that streams its parameters in every step.
pub fn stream(
    on: On,
    graph: &Graph,
    fuse: bool,
    read: impl FnMut(&Param, Range<u64>, &mut [f32]),
) -> Result<Executor, PlanError> {
    load_as(on, graph, fuse, FROM_FILE, read)
}

/// The role of the gradient of a parameter.
pub fn gradient(param: &str) -> OutputRole {
    OutputRole::Gradient { param: param.to_owned() }
}

/// An executor of one graph without parameters.
pub fn bare(on: On, graph: &Graph, fuse: bool, weights: Weights) -> Result<Executor, PlanError> {
    let (target, plan) = on.plan(graph, fuse, weights)?;
    Ok(on.executor(Program::new(target, vec![("test".to_owned(), plan)], vec![])))
}

/// Runs a step on an arena freshly filled with NaN.
pub fn run(executor: &mut Executor, inputs: impl FnOnce(&mut Executor), counts: Counts) {
    executor.poison().expect("inside the arena");
    inputs(executor);
    executor.run(0, counts).unwrap_or_else(|e| panic!("{e}"));
}

/// The input `packs` of a step of one pack, number 0, with `targets` targets.
pub fn one_pack(counts: Counts, targets: usize) -> [i32; packs::WORDS] {
    [0, counts.tokens as i32, 0, counts.sequences as i32, targets as i32, 0]
}

/// Access to inputs and outputs by name.
pub trait ByName {
    fn input_i32(&mut self, plan: usize, name: &str, data: &[i32]) -> Result<(), DeviceError>;
    fn input_f32(&mut self, plan: usize, name: &str, data: &[f32]) -> Result<(), DeviceError>;
    fn input_u8(&mut self, plan: usize, name: &str, data: &[u8]) -> Result<(), DeviceError>;
    fn output_f32(
        &mut self,
        plan: usize,
        role: impl Into<OutputRole>,
        out: &mut [f32],
    ) -> Result<(), DeviceError>;
    fn submit_named(
        &mut self,
        inputs: &[(&str, Data<'_>)],
        counts: Counts,
        outputs: &[(&str, usize)],
    ) -> Result<Submitted, DeviceError>;
}

impl ByName for Executor {
    fn input_i32(&mut self, plan: usize, name: &str, data: &[i32]) -> Result<(), DeviceError> {
        self.write_i32(self.input(plan, name)?, data)
    }

    fn input_f32(&mut self, plan: usize, name: &str, data: &[f32]) -> Result<(), DeviceError> {
        self.write_f32(self.input(plan, name)?, data)
    }

    fn input_u8(&mut self, plan: usize, name: &str, data: &[u8]) -> Result<(), DeviceError> {
        self.write_u8(self.input(plan, name)?, data)
    }

    fn output_f32(
        &mut self,
        plan: usize,
        role: impl Into<OutputRole>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        self.read_f32(self.output(plan, role)?, out)
    }

    fn submit_named(
        &mut self,
        inputs: &[(&str, Data<'_>)],
        counts: Counts,
        outputs: &[(&str, usize)],
    ) -> Result<Submitted, DeviceError> {
        let inputs = inputs.iter().map(|&(name, data)| Ok((self.input(0, name)?, data)));
        let inputs = inputs.collect::<Result<Vec<_>, DeviceError>>()?;
        let outputs = outputs.iter().map(|&(name, n)| Ok((self.output(0, name)?, n)));
        let outputs = outputs.collect::<Result<Vec<_>, DeviceError>>()?;
        self.submit(0, &inputs, counts, &outputs)
    }
}

/// An f32 output of `elements` elements.
pub fn output(executor: &mut Executor, role: impl Into<OutputRole>, elements: usize) -> Vec<f32> {
    let mut out = vec![0.0; elements];
    executor.output_f32(0, role, &mut out).unwrap_or_else(|e| panic!("{e}"));
    out
}

/// An i32 output of `elements` elements.
pub fn output_i32(executor: &mut Executor, role: impl Into<OutputRole>, elements: usize) -> Vec<i32> {
    let mut out = vec![0; elements];
    executor.output(0, role).and_then(|id| executor.read_i32(id, &mut out)).unwrap_or_else(|e| panic!("{e}"));
    out
}

/// A u8 output of `elements` elements.
pub fn output_u8(executor: &mut Executor, name: &str, elements: usize) -> Vec<u8> {
    let mut out = vec![0; elements];
    executor.output(0, name).and_then(|id| executor.read_u8(id, &mut out)).unwrap_or_else(|e| panic!("{e}"));
    out
}

/// Returns whether this process runs the test `name` alone. In a process of other tests, runs the test in a new process,
/// asserts that it passes there, and returns `false`.
pub fn in_own_process(name: &str) -> bool {
    const ALONE: &str = "PLIMSOLL_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut alone = std::process::Command::new(std::env::current_exe().expect("a test binary"));
    let output = alone.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}
