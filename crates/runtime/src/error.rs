//! Why a story ended badly, and with which exit code. Invariant: every message names the file, the sequence
//! or the flag that it is about.

use crate::output_error::OutputError;
use data::limits::{self, Limit};
use data::printable::Place;
use data::weights::WeightsError;
use data::{DataError, DataErrorKind};
use exec::DeviceError;
use graph::{Bytes, VerifyError};
use models::ConfigError;
use plan::PlanError;
use std::fmt;
use std::path::{Path, PathBuf};

/// An error that can end a command: it knows the command's exit code, and the limit of the system that caused it.
///
/// Every application has an error enum of its own, with its refusals as variants and [`RuntimeError`] as one of them.
pub trait Failure: std::error::Error {
    /// The error of the runtime that this error wraps: exit code and limit are its.
    fn of_runtime(&self) -> Option<&RuntimeError>;

    /// The exit code where no error of the runtime is wrapped: 1 failure or bad input, 3 the output folder is unusable.
    fn own_exit_code(&self) -> u8 {
        1
    }

    /// The exit code: that of the runtime's error (4 it does not fit in memory, 128 plus the signal's number after a
    /// signal), or [`Failure::own_exit_code`].
    fn exit_code(&self) -> u8 {
        self.of_runtime().map_or_else(|| self.own_exit_code(), Failure::exit_code)
    }

    /// The system limit behind the error, such as a limit on address space.
    fn limit(&self) -> Option<Limit> {
        self.of_runtime().and_then(Failure::limit)
    }
}

/// Why a model cannot be opened, or is not the model that is wanted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A configuration was named, and weights are needed.
    #[error("{name} is a configuration without weights; name its folder")]
    WithoutWeights {
        /// The model.
        name: String,
    },
    /// The file of a model is not there.
    #[error("{}: there is no such file; a model is a folder with its config.json beside its weights", path.display())]
    NoSuchFile {
        /// The file.
        path: PathBuf,
    },
    /// A tokenizer with more tokens than the embedding has rows.
    #[error(
        "{name}: its tokenizer has {tokens} tokens, its embedding only {rows} rows; they are not of one model"
    )]
    Tokenizer {
        /// The model.
        name: String,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Rows of the embedding.
        rows: u64,
    },
    /// A vocabulary that is not the alphabet of ESM-2.
    #[error(
        "{}, line {line}: expected {expected}, found {found}; ESM-2 models are run with ESM-2's own alphabet of {} \
         tokens, so restore the model's own {}",
        Place(path),
        data::tokenize::esm::VOCAB,
        crate::model::VOCABULARY
    )]
    Vocabulary {
        /// The vocabulary's file.
        path: PathBuf,
        /// The first line that differs, from 1.
        line: usize,
        /// The token that belongs there.
        expected: String,
        /// The token that stands there.
        found: String,
    },
    /// Two tensors that the family ties differ.
    #[error("{name}: `{a}` and `{b}` must be equal in this family, and are not")]
    Untied {
        /// The model.
        name: String,
        /// A tensor.
        a: String,
        /// The tensor that should equal it.
        b: String,
    },
    /// A head whose first layer is no matrix over two embeddings.
    #[error(
        "{}: `hidden_layer.weight` has the shape {shape:?}, which is no matrix over two embeddings",
        Place(path)
    )]
    HeadShape {
        /// The head's file.
        path: PathBuf,
        /// The shape of `hidden_layer.weight`.
        shape: Vec<u64>,
    },
    /// A head of other than two classes.
    #[error("{name}: the head has {classes} classes; 2 are wanted")]
    HeadClasses {
        /// The head.
        name: String,
        /// How many classes it has.
        classes: u64,
    },
    /// An adapter was named, and a model is needed.
    #[error(
        "{0} is an adapter of {1}, and no model; `plimsoll merge {0} -o FOLDER` makes one of both",
        Place(folder),
        Place(Path::new(base))
    )]
    Adapter {
        /// The adapter's folder.
        folder: PathBuf,
        /// The model that it was trained over.
        base: String,
    },
    /// The configuration of an adapter that cannot be used.
    #[error("{}: {why}", Place(path))]
    AdapterConfig {
        /// The adapter_config.json.
        path: PathBuf,
        /// The key and what it must be.
        why: String,
    },
    /// A folder with several checkpoints of fair-esm.
    #[error(
        "{} holds several ESM-2 checkpoints, such as {} and {}; name one of them",
        Place(folder),
        Place(one),
        Place(other)
    )]
    SeveralCheckpoints {
        /// The folder.
        folder: PathBuf,
        /// A checkpoint.
        one: PathBuf,
        /// Another.
        other: PathBuf,
    },
    /// A checkpoint of fair-esm that is no ESM-2.
    #[error("{}: {why}", Place(path))]
    Checkpoint {
        /// The checkpoint.
        path: PathBuf,
        /// What it lacks.
        why: String,
    },
}

/// Why a request cannot be carried out: it contradicts itself or the machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A text that is no size in bytes.
    #[error("`{text}` is no size; write it like 2GiB, 500MB, 80% or a number of bytes")]
    BadSize {
        /// The text.
        text: String,
    },
    /// A budget that is more than the target has.
    #[error(
        "a budget of {budget} is more than `{target}` has: {memory}; give at most that, or leave --budget and \
         memory.budget to a share like 90%"
    )]
    BudgetAboveTarget {
        /// The budget.
        budget: Bytes,
        /// The target.
        target: String,
        /// Its memory.
        memory: Bytes,
    },
    /// Threads were given for a GPU.
    #[error("--threads {threads}: `{target}` is no CPU, and its plan depends on none")]
    ThreadsOfGpu {
        /// The threads.
        threads: usize,
        /// The target.
        target: String,
    },
    /// Weights should be streamed by a command that keeps them in memory.
    #[error("--stream-weights always: this command keeps its weights in memory")]
    NotStreamed,
    /// Fewer tokens a step than the longest sequence has.
    #[error(
        "--tokens {tokens} is less than the {longest} tokens that the longest sequence may have; give --tokens {longest} \
         or more"
    )]
    TokensTooFew {
        /// The tokens that were asked for.
        tokens: u64,
        /// Those of the longest sequence.
        longest: u64,
    },
    /// An element type that the CPU's kernels lack.
    #[error(
        "--precision {asked}: the CPU computes in bf16, f32 or int8; give one of these or auto, or --device cuda"
    )]
    PrecisionOfCpu {
        /// The element type.
        asked: &'static str,
    },
    /// Several devices for a command that computes on one.
    #[error("this command computes on one device; name one, such as --device cuda:0")]
    SeveralDevices,
    /// Devices of different kinds for one run.
    #[error(
        "{first} and {other} are of different kinds, and a run computes on cards of one kind; name some of one kind, such \
         as --device {}",
        first.split(' ').next().unwrap_or_default()
    )]
    MixedDevices {
        /// The first device.
        first: String,
        /// A device of another kind.
        other: String,
    },
    /// A device that is named twice.
    #[error("{name} is named twice; name every device once")]
    DeviceTwice {
        /// The device.
        name: String,
    },
    /// A folder that another run writes to.
    #[error("another run is writing to {}; wait for its end, or choose another folder with -o", folder.display())]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
}

/// Why planning, starting or running a session failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum RuntimeError {
    /// Bad input.
    Data(DataError),
    /// Bad or missing weights.
    Weights(WeightsError),
    /// A model configuration that cannot be run.
    Config {
        /// The file or model.
        path: PathBuf,
        /// Why.
        source: ConfigError,
    },
    /// It cannot be planned, or does not fit.
    Plan(PlanError),
    /// The device failed.
    Device(DeviceError),
    /// A model that does not verify: our bug.
    Verify(VerifyError),
    /// Results could not be written.
    Output(OutputError),
    /// A file could not be read or written.
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The system refused a thread.
    Thread {
        /// What the thread is for.
        name: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// A model that cannot be opened, or is not the model that is wanted.
    Model(ModelError),
    /// A request that contradicts itself or the machine.
    Request(RequestError),
    /// A fault of this program.
    Bug {
        /// What should not have happened.
        what: String,
    },
    /// A signal came; what was finished is kept.
    Interrupted {
        /// Its number.
        signal: u8,
        /// What is kept and how to go on.
        kept: String,
    },
}

impl Failure for DataError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        None
    }

    fn exit_code(&self) -> u8 {
        match self.kind {
            DataErrorKind::NoRoom(_) => 4,
            _ if self.limit().is_some_and(|limit| limit.memory) => 4,
            _ => 1,
        }
    }

    fn limit(&self) -> Option<Limit> {
        limits::behind(self)
    }
}

impl Failure for RuntimeError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        Some(self)
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::Plan(PlanError::OverBudget(_)) | Self::Device(DeviceError::OutOfMemory { .. }) => 4,
            Self::Data(error) => error.exit_code(),
            other if other.limit().is_some_and(|limit| limit.memory) => 4,
            Self::Interrupted { signal, .. } => 128 + signal,
            Self::Weights(_)
            | Self::Config { .. }
            | Self::Plan(_)
            | Self::Device(_)
            | Self::Verify(_)
            | Self::Output(_)
            | Self::Io { .. }
            | Self::Thread { .. }
            | Self::Model(_)
            | Self::Request(_)
            | Self::Bug { .. } => 1,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            // It prints its cause itself, which is therefore not in the chain.
            Self::Io { source, .. } => limits::behind(source),
            Self::Device(DeviceError::OutOfMemory { .. }) => Some(limits::memory()),
            Self::Plan(PlanError::OverBudget(_)) => limits::free_address_space().map(|_| limits::memory()),
            other => limits::behind(other),
        }
    }
}

impl RuntimeError {
    /// A fault of this program, of which `what` says what should not have happened.
    pub fn bug(what: impl Into<String>) -> Self {
        Self::Bug { what: what.into() }
    }

    /// The error of a thread that cannot be started, to map one of the system with.
    pub fn thread(name: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Thread { name, source }
    }

    /// The error of a file or folder, to map one of the system with.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

impl fmt::Display for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Data(e) => e.fmt(f),
            Self::Weights(e) => e.fmt(f),
            Self::Config { path, .. } => write!(f, "{}: the model cannot be run", Place(path)),
            Self::Plan(e @ PlanError::OverBudget(_)) => write!(f, "refused: {e}"),
            Self::Plan(e) => e.fmt(f),
            Self::Device(e) => e.fmt(f),
            Self::Verify(e) => write!(f, "the model's graph is broken: {e}"),
            Self::Output(e) => e.fmt(f),
            Self::Io { path, source } => write!(f, "{}: {source}", Place(path)),
            Self::Thread { name, .. } => write!(f, "the {name} thread cannot be started"),
            Self::Model(e) => e.fmt(f),
            Self::Request(e) => e.fmt(f),
            Self::Bug { what } => write!(f, "{what}; this is a bug of ours"),
            Self::Interrupted { kept, .. } => write!(f, "interrupted; {kept}"),
        }
    }
}

impl std::error::Error for RuntimeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Transparent variants print the inner error themselves, so the chain goes on behind it.
        match self {
            Self::Data(e) => e.source(),
            Self::Weights(e) => e.source(),
            Self::Config { source, .. } => Some(source),
            Self::Plan(e) => e.source(),
            Self::Device(e) => e.source(),
            Self::Output(e) => e.source(),
            Self::Thread { source, .. } => Some(source),
            Self::Model(e) => e.source(),
            Self::Request(e) => e.source(),
            Self::Verify(_) | Self::Io { .. } | Self::Bug { .. } | Self::Interrupted { .. } => None,
        }
    }
}

impl From<ModelError> for RuntimeError {
    fn from(e: ModelError) -> Self {
        Self::Model(e)
    }
}

impl From<RequestError> for RuntimeError {
    fn from(e: RequestError) -> Self {
        Self::Request(e)
    }
}

impl From<DataError> for RuntimeError {
    fn from(e: DataError) -> Self {
        Self::Data(e)
    }
}

impl From<WeightsError> for RuntimeError {
    fn from(e: WeightsError) -> Self {
        Self::Weights(e)
    }
}

impl From<PlanError> for RuntimeError {
    fn from(e: PlanError) -> Self {
        Self::Plan(e)
    }
}

impl From<DeviceError> for RuntimeError {
    fn from(e: DeviceError) -> Self {
        Self::Device(e)
    }
}

impl From<VerifyError> for RuntimeError {
    fn from(e: VerifyError) -> Self {
        Self::Verify(e)
    }
}

impl From<OutputError> for RuntimeError {
    fn from(e: OutputError) -> Self {
        Self::Output(e)
    }
}
