//! The interface between plans and hardware: `Machine`, `Device` and their errors. Invariant: a device follows the
//! addresses of the plan and decides nothing itself.

use crate::memory::{self, Memory};
use crate::progress::OnStart;
use crate::transfer::{Allocation, Transfer};
use plimsoll_graph::{Bytes, Counts, Op, TensorSpec};
use plimsoll_plan::{KernelId, Kernels, Location, Precision, Target};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// An opened compute device with the memory of one program: an arena in which its kernels compute, and, if the program
/// needs them, pinned host memory and a scratch file.
pub trait Device: Send {
    /// Returns the properties of the device.
    fn info(&self) -> DeviceInfo;

    /// Allocates the memory of a program. A second call resizes the arena, in place if the device can; all content is
    /// lost. On failure the arena is unchanged, or there is none.
    fn allocate(&mut self, memory: &Allocation<'_>) -> Result<(), DeviceError>;

    /// Gives back the memory behind the first `bytes` bytes of the arena, or takes memory for them again; `bytes` is one of
    /// the borders of the allocation. Addresses and the first `bytes` bytes do not change, apart from those that were given
    /// back before, which are undefined. No enqueued work may use the memory that is given back. If there is no memory to
    /// take, the error is [`DeviceError::OutOfMemory`], and the arena is unchanged.
    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError>;

    /// Prepares the launches of a program at its maximum counts, before the first step and with the arena in place, and
    /// reports the progress. A device compiles or selects kernels here.
    fn prepare(&mut self, launches: &[Launch<'_>], report: OnStart<'_>) -> Result<(), DeviceError>;

    /// Copies `bytes` from the caller's memory, which the caller may then change: to the arena after all enqueued work, to
    /// another space at once, where no transfer that was started and not completed may touch the range.
    fn upload(&mut self, to: Location, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies to the caller's memory: from the arena after all enqueued work, from another space at once, where no transfer
    /// that was started and not completed may write the range.
    fn download(&mut self, from: Location, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Sets all bytes of a range to `byte`, as [`Device::upload`] writes them. 0xFF gives NaN in every float format.
    fn fill(&mut self, at: Location, bytes: Bytes, byte: u8) -> Result<(), DeviceError>;

    /// Called before the first instruction of each step. Returns the bytes of memory that a larger arena had used and that
    /// the device gives back here from time to time.
    fn begin_step(&mut self) -> Result<Bytes, DeviceError>;

    /// Runs one op, or enqueues it after the ops already enqueued.
    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// Starts a copy. Its destination holds nothing until the copy was waited for, and its operand must not change until
    /// then.
    fn start(&mut self, transfer: &Transfer) -> Result<(), DeviceError>;

    /// Orders all launches and transfers from here on after a transfer that was started. The caller's thread need not
    /// wait.
    fn wait_for(&mut self, transfer: &Transfer) -> Result<(), DeviceError>;

    /// Blocks the caller until a transfer, and the step that it belongs to, are complete.
    ///
    /// # Errors
    /// Errors of that step, such as input data that a kernel refused.
    fn complete(&mut self, transfer: &Transfer) -> Result<(), DeviceError>;

    /// Blocks the caller until all enqueued work is complete.
    fn synchronize(&mut self) -> Result<(), DeviceError>;

    /// Graph capture and replay of steps; `None` on devices whose launches have no overhead of their own.
    fn recorder(&mut self) -> Option<&mut dyn Recorder>;

    /// Timing of launches and copies.
    fn tracer(&mut self) -> &mut dyn Tracer;
}

/// Properties of a device: its kernels, its limits and its arithmetic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name, for the run record.
    pub name: String,
    /// Kernel table. The executor refuses a program that was planned with another table.
    pub kernels: Kernels,
    /// Number of workers with a workspace of their own.
    pub workers: u64,
    /// Maximum number of in-flight steps; 1 for synchronous devices.
    pub depth: usize,
    /// Whether weights must be uploaded to this device's arena. Of replicas that share weights, true for the first
    /// replica only.
    pub takes_weights: bool,
    /// Text for the run record: everything except the plan that the bits of the results depend on, such as versions
    /// of libraries and the chosen GEMM kernels.
    pub arithmetic: String,
    /// Names of the implementations that compute the GEMMs, each with its number of GEMM shapes; `None` if the device
    /// has only one implementation.
    pub matmul_provider: Option<String>,
}

/// Captures the launches of a step and replays them as one unit (CUDA graphs).
pub trait Recorder {
    /// Decides how to run a step of a plan whose launches have been prepared.
    fn begin(&mut self, plan: usize, counts: Counts) -> Result<GraphCapture, DeviceError>;

    /// Ends the capture that [`GraphCapture::Record`] began, and runs the captured step if `whole`, i.e. if all its
    /// launches were captured. Returns [`GraphCapture::Plain`] if there was no memory for the capture; the step has
    /// then not run.
    fn end(&mut self, whole: bool) -> Result<GraphCapture, DeviceError>;

    /// A message for the user about unusual events since the last call, if any.
    fn note(&mut self) -> Option<String>;
}

/// Records when launches and copies ran.
pub trait Tracer {
    /// Turns the recording of spans on or off.
    fn set(&mut self, on: bool) -> Result<(), DeviceError>;

    /// Waits for enqueued work, then returns and clears the spans recorded so far.
    fn spans(&mut self) -> Result<Vec<Span>, DeviceError>;

    /// Enqueues timestamp `n`, which is taken when all work enqueued so far is complete. Returns false if the device
    /// has no clock of its own and the caller must use the host's.
    fn mark(&mut self, n: usize) -> Result<bool, DeviceError>;

    /// Waits for enqueued work and adds the time between timestamps `i` and `i + 1` to `times[i]`.
    fn marked(&mut self, times: &mut [Duration]) -> Result<(), DeviceError>;
}

/// How a step runs: by replay of a captured graph or by its launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphCapture {
    /// The device has enqueued the step by replaying a captured step with equal counts.
    Done,
    /// The caller issues the launches of the step, which are captured until [`Recorder::end`].
    Record,
    /// The caller issues the launches of the step, without a capture.
    Plain,
}

/// The time span of one launch or copy.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Name of the queue ([`plimsoll_plan::Queue::name`]).
    pub track: &'static str,
    /// The op, with its kernel if the kernel has a name, or the copy.
    pub name: String,
    /// Start in seconds since tracing began.
    pub start: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// A class of machines. Machines of one kind compute the same bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceKind {
    /// `cpu` or `cuda`.
    pub family: &'static str,
    /// The model, such as `NVIDIA H200`; empty if the bits depend on the family's instruction set alone.
    pub model: String,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.model {
            "" => f.write_str(self.family),
            model => write!(f, "{} ({model})", self.family),
        }
    }
}

/// A compute device that has not been opened: gives the [`Target`] to plan for, and opens [`Device`]s.
pub trait Machine: Send + Sync + fmt::Debug {
    /// The machine's kind.
    fn kind(&self) -> DeviceKind;

    /// Name of the machine, for the run record. Two machines with one name are the same machine.
    fn name(&self) -> String;

    /// Precisions for an encoder's weights and activations, best first. The target may lack kernels for some of them,
    /// which planning reports.
    fn precisions(&self) -> Vec<Precision>;

    /// The planning target: memory, rates and kernels.
    fn target(&self) -> Result<Target, DeviceError>;

    /// Maximum number of in-flight steps of its devices.
    fn depth(&self) -> usize {
        1
    }

    /// Free memory for an arena and everything outside of it.
    fn free(&self) -> Result<Bytes, DeviceError>;

    /// Free and total memory, counting all processes: of the card; or of the container, or else of the host.
    fn usage(&self) -> Result<Memory, DeviceError> {
        Ok(memory::available())
    }

    /// Memory that was taken on the machine since it was opened, including everything outside of arenas; `None` if unknown. It
    /// also counts what other processes took or gave back since then.
    fn taken(&self) -> Result<Option<Bytes>, DeviceError> {
        Ok(None)
    }

    /// Options that the machine was opened with, by flag name, for the run record.
    fn options(&self) -> Vec<(&'static str, String)> {
        vec![]
    }

    /// Other users of its memory, largest first; empty if unknown.
    fn holders(&self) -> Vec<Holder> {
        vec![]
    }

    /// Everything beside the plan that the results' bits depend on, such as versions and chosen kernels.
    fn arithmetic(&self) -> String;

    /// A message about slow one-time work (such as compiling kernels), to show before the first device of this kind
    /// is opened.
    fn first_use(&self) -> Option<String> {
        None
    }

    /// Opens its devices, all with the same target: one, or several replicas that share its weights.
    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError>;
}

/// A process, or other owner, that holds memory of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Description of the owner, such as `process 4711 (python)`.
    pub who: String,
    /// Bytes held, if known.
    pub bytes: Option<Bytes>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes {
            Some(bytes) => write!(f, "{} holds {bytes}", self.who),
            None => write!(f, "{} holds some", self.who),
        }
    }
}

/// One op to run, with the addresses of its operands.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The op and its attributes.
    pub op: &'a Op,
    /// The kernel that the plan chose.
    pub kernel: KernelId,
    /// Input operands.
    pub ins: &'a [Operand],
    /// Output operands; `None` for an output that is not requested.
    pub outs: &'a [Option<Operand>],
    /// Address and size of the workspace.
    pub workspace: Option<(u64, Bytes)>,
    /// Actual numbers of tokens and sequences of this step.
    pub counts: Counts,
}

impl<'a> Launch<'a> {
    /// The op as its concrete type. `Err` if the kernel is for another op.
    pub fn op_as<T>(&self) -> Result<&'a T, DeviceError>
    where
        &'a T: TryFrom<&'a Op>,
    {
        self.op.try_into().map_err(|_| self.wrong_kernel())
    }

    /// The error for a kernel that the device does not have for this op.
    pub fn wrong_kernel(&self) -> DeviceError {
        DeviceError::WrongKernel { op: self.op.name(), kernel: self.kernel }
    }
}

/// A tensor in the arena: address and type.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Address of its first byte.
    pub at: u64,
    /// Its element type and shape.
    pub spec: TensorSpec,
}

impl Operand {
    /// (rows, columns) in a step with `counts`; a vector has one column.
    pub fn matrix(&self, counts: Counts) -> (usize, usize) {
        let columns = if self.spec.shape.len() > 1 { self.spec.row_elements() } else { 1 };
        (self.spec.rows(counts) as usize, columns as usize)
    }

    /// Size in a step with `counts`.
    pub fn bytes(&self, counts: Counts) -> Bytes {
        self.spec.bytes_at(counts)
    }
}

/// An error of a device.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceError {
    /// The arena could not be allocated.
    OutOfMemory {
        /// Size of the arena.
        bytes: Bytes,
    },
    /// The device has too little memory for a launch or a copy.
    Exhausted {
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An address range outside of the arena: a bug of this program.
    OutsideArena {
        /// First byte of the range.
        at: u64,
        /// Size of the range.
        bytes: Bytes,
    },
    /// The device's kernel table or number of workers differs from the plan's.
    Kernels {
        /// Kernels and workers of the plan.
        planned: String,
        /// Kernels and workers of the device.
        found: String,
    },
    /// The plan gives an op a kernel that the device does not have: a bug of this program.
    WrongKernel {
        /// The op.
        op: &'static str,
        /// The kernel.
        kernel: KernelId,
    },
    /// The plan has no address for a value that an instruction needs: a bug of this program.
    NotPlaced {
        /// The plan's name.
        plan: String,
        /// The op, or the instruction's name.
        op: &'static str,
        /// The value's position in the graph.
        value: usize,
    },
    /// The counts of a step exceed the plan's bounds.
    OverBounds {
        /// The requested counts.
        counts: Counts,
    },
    /// A kernel refused its operands.
    Kernel {
        /// The op.
        op: &'static str,
        /// The reason.
        why: String,
    },
    /// A parameter could not be loaded.
    Load {
        /// The parameter.
        param: String,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The scratch file could not be created, read or written.
    Disk {
        /// Folder of the file.
        folder: PathBuf,
        /// Bytes of the file, or of the copy that failed.
        bytes: Bytes,
        /// The cause.
        source: std::io::Error,
    },
    /// The plan uses a space that the device does not have: a bug of this program.
    NoSpace {
        /// Position in the space.
        at: Location,
    },
    /// The operating system refused to start a thread.
    Thread {
        /// The cause.
        source: std::io::Error,
    },
    /// The machine failed.
    Machine {
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// All devices that shared the work failed.
    NoneLeft {
        /// Names of the devices, in the order in which they failed.
        devices: Vec<String>,
        /// Error of the device that failed first.
        first: Arc<DeviceError>,
    },
}

impl DeviceError {
    /// Whether a device had too little memory.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } | Self::Exhausted { .. } => true,
            Self::NoneLeft { first, .. } => first.is_out_of_memory(),
            Self::OutsideArena { .. }
            | Self::Kernels { .. }
            | Self::WrongKernel { .. }
            | Self::NotPlaced { .. }
            | Self::OverBounds { .. }
            | Self::Kernel { .. }
            | Self::Load { .. }
            | Self::Disk { .. }
            | Self::NoSpace { .. }
            | Self::Thread { .. }
            | Self::Machine { .. } => false,
        }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory { bytes } => write!(f, "the arena of {bytes} could not be allocated"),
            Self::Exhausted { .. } => f.write_str("the device has too little memory for a launch or a copy"),
            Self::OutsideArena { at, bytes } => write!(f, "{bytes} at {at} lie outside of the arena"),
            Self::Kernels { planned, found } => {
                write!(f, "the plan was made for {planned}, and the device has {found}")
            }
            Self::WrongKernel { op, kernel } => {
                write!(
                    f,
                    "`{op}` is planned with {kernel:?}, which the device does not have; this is a bug in \
                        plimsoll, please report it"
                )
            }
            Self::NotPlaced { plan, op, value } => {
                write!(
                    f,
                    "plan `{plan}` has no place for value {value}, which `{op}` needs; this is a bug in \
                        plimsoll, please report it"
                )
            }
            Self::OverBounds { counts } => write!(f, "{counts:?} is more than the plan was made for"),
            Self::Kernel { op, why } => write!(f, "`{op}`: {why}"),
            Self::Load { param, .. } => write!(f, "cannot load `{param}`"),
            Self::Disk { folder, bytes, .. } => {
                write!(f, "the scratch file in {} has no room for {bytes}, or failed", folder.display())
            }
            Self::NoSpace { at } => write!(
                f,
                "the plan uses {at:?}, which this device does not have; this is a bug in plimsoll, please report it"
            ),
            Self::Thread { .. } => f.write_str("a compute thread cannot be started"),
            Self::Machine { .. } => f.write_str("the device failed"),
            Self::NoneLeft { devices, .. } => match &devices[..] {
                [only] => write!(f, "{only} failed, and there is no other device"),
                all => write!(f, "all {} devices failed, in this order: {}", all.len(), all.join(", ")),
            },
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Load { source, .. } | Self::Machine { source } | Self::Exhausted { source } => {
                Some(source.as_ref())
            }
            Self::Thread { source } | Self::Disk { source, .. } => Some(source),
            Self::NoneLeft { first, .. } => Some(first.as_ref()),
            Self::OutOfMemory { .. }
            | Self::OutsideArena { .. }
            | Self::Kernels { .. }
            | Self::WrongKernel { .. }
            | Self::NotPlaced { .. }
            | Self::OverBounds { .. }
            | Self::NoSpace { .. }
            | Self::Kernel { .. } => None,
        }
    }
}
