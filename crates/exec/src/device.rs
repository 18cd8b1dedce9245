//! What runs a plan. Invariant: a device only follows addresses that the plan gave; it decides nothing.

use graph::{Bytes, Counts, Op, TensorSpec};
use plan::{KernelId, Kernels, Precision, Target};
use std::fmt;
use std::time::Duration;

/// A machine with one arena. All positions are bytes from its start.
pub trait Device: Send {
    /// What it is, for the run record.
    fn name(&self) -> String;

    /// Whose kernels it has: those that the program was planned with, or an executor refuses it.
    fn kernels(&self) -> Kernels;

    /// Workers with a workspace of their own.
    fn units(&self) -> u64;

    /// Makes the one allocation. A second call grows or shrinks it, in place where the device can; what it held is lost. If
    /// that fails, the arena is as it was, or there is none.
    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError>;

    /// Told before an arena is made: so many bytes of its beginning are weights, which lanes of one machine have in common.
    fn persistent(&mut self, bytes: Bytes);

    /// Whether weights have to be put into its arena: of lanes that share them, into the first one's.
    fn takes_weights(&self) -> bool;

    /// Is shown every launch of a program in its full size, before the first step and with the arena in place: what a
    /// device compiles or chooses for an op, it does here.
    fn prepare(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// Host to arena.
    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Arena to host.
    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Sets a range to one byte: 0xFF is a NaN in every float format.
    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError>;

    /// Arena to arena; the ranges do not overlap.
    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError>;

    /// Runs one op, or puts it behind those that run.
    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// Waits until everything is done that was asked for.
    fn wait(&mut self) -> Result<(), DeviceError>;

    /// Makes the host's memory through which inputs and outputs of open steps travel; a second call replaces it. Those
    /// that do everything at once need none.
    fn stage(&mut self, ways: [Bytes; 2]) -> Result<(), DeviceError>;

    /// Host to arena, beside what runs: nothing that was asked for so far touches the range; what is asked for later
    /// finds it written.
    fn feed(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Starts to read a range, behind everything that was asked for so far. Open tickets are collected in their order,
    /// and nothing writes to the range before.
    fn fetch(&mut self, at: u64, bytes: Bytes) -> Result<Ticket, DeviceError>;

    /// The bytes of the oldest open ticket, waited for.
    fn collect(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Steps that may be open at a time: 1 where everything is done at once.
    fn depth(&self) -> usize;

    /// What records steps; none where launches cost nothing by themselves.
    fn recorder(&mut self) -> Option<&mut dyn Recorder>;

    /// What tells when launches and copies ran.
    fn tracer(&mut self) -> &mut dyn Tracer;

    /// What the bits depend on beside the plan: versions, the table of chosen products. For the run record.
    fn arithmetic(&self) -> String;

    /// What computes products, and how many forms of them each, where the device chose among several.
    fn products_by(&self) -> Option<String>;

    /// Steps between two calls of [`Device::trim`]; 0 is never.
    fn clear_interval(&self) -> u64;

    /// Gives back what was mapped for a larger arena than the present one: how many bytes.
    fn trim(&mut self) -> Result<Bytes, DeviceError>;
}

/// Records the launches of a step and runs them again as one.
pub trait Recorder {
    /// What to do about a step of a plan of `prepare`d launches.
    fn begin(&mut self, plan: usize, counts: Counts) -> Result<Repeat, DeviceError>;

    /// Ends what [`Repeat::Record`] began, and runs it unless it broke off; [`Repeat::Plain`] where there was no room for the
    /// record: nothing of the step has run.
    fn end(&mut self, whole: bool) -> Result<Repeat, DeviceError>;

    /// What it did otherwise than usual since the last call, as a line for people.
    fn note(&mut self) -> Option<String>;
}

/// Tells when launches and copies ran.
pub trait Tracer {
    /// From now on (or no longer) notes spans.
    fn set(&mut self, on: bool) -> Result<(), DeviceError>;

    /// What was noted since, and forgets it; waits for what runs.
    fn spans(&mut self) -> Result<Vec<Span>, DeviceError>;

    /// Notes, as number `n`, when all is done that was asked for so far. False where the host's clock tells.
    fn mark(&mut self, n: usize) -> Result<bool, DeviceError>;

    /// Adds the time between each of the marks and the next; waits for what runs.
    fn marked(&mut self, times: &mut [Duration]) -> Result<(), DeviceError>;
}

/// How a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// It does, by a record of one with the same counts.
    Done,
    /// By its launches, which are recorded until [`Recorder::end`].
    Record,
    /// By its launches.
    Plain,
}

/// A range that is on its way to the host; numbers count a device's fetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The error of a ticket whose turn it is not, or of a buffer that is not as long as the range.
    pub fn refused(self, oldest: u64) -> DeviceError {
        let why = format!("range {} with another length, or out of turn: the oldest is {oldest}", self.0);
        DeviceError::Kernel { op: "collect", why }
    }
}

/// When something ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// `in`, `compute` or `out`.
    pub track: &'static str,
    /// What ran: an op, with its kernel where that has a name, or a copy.
    pub name: String,
    /// Seconds since tracing began.
    pub start: f64,
    /// How long.
    pub seconds: f64,
}

/// A kind of machines: those of one kind compute the same bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// `cpu` or `cuda`.
    pub family: &'static str,
    /// The model, such as `NVIDIA H200`; empty where the family's bits depend on the instruction set alone.
    pub model: String,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.model {
            "" => f.write_str(self.family),
            model => write!(f, "{} ({model})", self.family),
        }
    }
}

/// A machine before any arena: what plans are made for, and where devices come from.
pub trait Machine: Send + Sync + fmt::Debug {
    /// What kind it is.
    fn kind(&self) -> Kind;

    /// What it is, for the run record; machines of one name are one machine.
    fn name(&self) -> String;

    /// The element types of encoders' weights and activations, the one that it does best first. A target may have no kernels
    /// for one, which planning says.
    fn precisions(&self) -> Vec<Precision>;

    /// What plans are made for.
    fn target(&self) -> Result<Target, DeviceError>;

    /// Steps that its devices keep open.
    fn depth(&self) -> usize {
        1
    }

    /// What it could still give for an arena, everything outside of it included.
    fn free(&self) -> Result<Bytes, DeviceError>;

    /// What this process has taken of its memory, everything outside of arenas included; `None` where it cannot be told.
    fn taken(&self) -> Result<Option<Bytes>, DeviceError> {
        Ok(None)
    }

    /// How it is used, by the names of flags, for the run record.
    fn options(&self) -> Vec<(&'static str, String)> {
        vec![]
    }

    /// Who else holds its memory, the largest first; none where it cannot be told.
    fn holders(&self) -> Vec<Holder> {
        vec![]
    }

    /// What bits depend on beside the plan: versions, chosen kernels.
    fn arithmetic(&self) -> String;

    /// What takes time when the first device of this kind is opened, and not again: told before it does.
    fn first_use(&self) -> Option<String> {
        None
    }

    /// Its devices, each for the target: one, or several that share its weights.
    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError>;
}

/// Someone who holds memory of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Who, such as `process 4711 (python)`.
    pub who: String,
    /// How much, where that is known.
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

/// An op with its operands' places.
#[derive(Debug)]
pub struct Launch<'a> {
    /// What to compute.
    pub op: &'a Op,
    /// By which kernel.
    pub kernel: KernelId,
    /// Inputs.
    pub ins: &'a [Operand],
    /// Outputs; `None` is not wanted.
    pub outs: &'a [Option<Operand>],
    /// Start and size of the scratch.
    pub workspace: Option<(u64, Bytes)>,
    /// What this step really holds.
    pub counts: Counts,
}

impl<'a> Launch<'a> {
    /// The op, as its kernel takes it; an error where the kernel is of another op.
    pub fn op_as<T>(&self) -> Result<&'a T, DeviceError>
    where
        &'a T: TryFrom<&'a Op>,
    {
        self.op.try_into().map_err(|_| self.wrong_kernel())
    }

    /// The error of a kernel that the device does not have for this op.
    pub fn wrong_kernel(&self) -> DeviceError {
        DeviceError::WrongKernel { op: self.op.name(), kernel: self.kernel }
    }
}

/// A tensor in the arena.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Its first byte.
    pub at: u64,
    /// Its type.
    pub spec: TensorSpec,
}

impl Operand {
    /// (rows, columns) in a step of `counts`; a vector has one column.
    pub fn matrix(&self, counts: Counts) -> (usize, usize) {
        let columns = if self.spec.shape.len() > 1 { self.spec.row_elements() } else { 1 };
        (self.spec.rows(counts) as usize, columns as usize)
    }

    /// Bytes in a step of `counts`.
    pub fn bytes(&self, counts: Counts) -> Bytes {
        self.spec.bytes_at(counts)
    }
}

/// What went wrong on a device.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceError {
    /// The arena could not be had.
    OutOfMemory {
        /// Its size.
        bytes: Bytes,
    },
    /// A position outside of the arena: our bug.
    OutsideArena {
        /// The first byte.
        at: u64,
        /// How many.
        bytes: Bytes,
    },
    /// The device's kernels, or its workers, are not those that the plan was made for.
    Kernels {
        /// What the plan says.
        planned: String,
        /// What the device says.
        found: String,
    },
    /// The plan gives an op a kernel that the device does not have: our bug.
    WrongKernel {
        /// The op.
        op: &'static str,
        /// The kernel.
        kernel: KernelId,
    },
    /// The plan gives a value no place in the arena that an instruction needs: our bug.
    NotPlaced {
        /// The plan's name.
        plan: String,
        /// The op, or what the instruction does.
        op: &'static str,
        /// The value's position in the graph.
        value: usize,
    },
    /// More than the plan's bounds.
    OverBounds {
        /// What was asked for.
        counts: Counts,
    },
    /// A kernel refused its data.
    Kernel {
        /// The op.
        op: &'static str,
        /// Why.
        why: String,
    },
    /// A weight could not be read.
    Load {
        /// The parameter.
        param: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The system refused a thread.
    Thread {
        /// Why.
        source: std::io::Error,
    },
    /// The machine failed.
    Machine {
        /// How.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory { bytes } => write!(f, "the arena of {bytes} could not be allocated"),
            Self::OutsideArena { at, bytes } => write!(f, "{bytes} at {at} lie outside of the arena"),
            Self::Kernels { planned, found } => {
                write!(f, "the plan was made for {planned}, and the device has {found}")
            }
            Self::WrongKernel { op, kernel } => {
                write!(
                    f,
                    "`{op}` is planned with {kernel:?}, which the device does not have; this is a bug: report it"
                )
            }
            Self::NotPlaced { plan, op, value } => {
                write!(
                    f,
                    "plan `{plan}` has no place for value {value}, which `{op}` needs; this is a bug: report it"
                )
            }
            Self::OverBounds { counts } => write!(f, "{counts:?} is more than the plan was made for"),
            Self::Kernel { op, why } => write!(f, "`{op}`: {why}"),
            Self::Load { param, .. } => write!(f, "cannot load `{param}`"),
            Self::Thread { .. } => f.write_str("a compute thread cannot be started"),
            Self::Machine { .. } => f.write_str("the device failed"),
        }
    }
}

impl std::error::Error for DeviceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Load { source, .. } | Self::Machine { source } => Some(source.as_ref()),
            Self::Thread { source } => Some(source),
            Self::OutOfMemory { .. }
            | Self::OutsideArena { .. }
            | Self::Kernels { .. }
            | Self::WrongKernel { .. }
            | Self::NotPlaced { .. }
            | Self::OverBounds { .. }
            | Self::Kernel { .. } => None,
        }
    }
}
