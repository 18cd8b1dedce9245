//! Errors of the runtime and their exit codes. Invariant: every message names the file, the sequence or the flag that
//! caused it.

use crate::output_error::OutputError;
use plimsoll_data::limits::{self, Limit};
use plimsoll_data::printable::EscapedPath;
use plimsoll_data::weights::WeightsError;
use plimsoll_data::{DataError, DataErrorKind};
use plimsoll_exec::DeviceError;
use plimsoll_graph::{Bytes, VerifyError};
use plimsoll_models::ConfigError;
use plimsoll_plan::PlanError;
use plimsoll_setting::{Command, Setting};
use std::fmt;
use std::path::{Path, PathBuf};

/// An error that can end a command; it provides the command's exit code and the system limit that caused the error.
///
/// Every application has its own error enum, with its refusals as variants and one variant that wraps [`RuntimeError`].
pub trait Failure: std::error::Error {
    /// The wrapped runtime error, if any, which then determines exit code and limit.
    fn of_runtime(&self) -> Option<&RuntimeError>;

    /// The exit code if no runtime error is wrapped: 1 for failure or bad input, 3 for an unusable output folder.
    fn own_exit_code(&self) -> u8 {
        1
    }

    /// The exit code: the runtime error's code (4 if something does not fit in memory, 128 plus the signal's number
    /// after a signal), or else [`Failure::own_exit_code`].
    fn exit_code(&self) -> u8 {
        self.of_runtime().map_or_else(|| self.own_exit_code(), Failure::exit_code)
    }

    /// The system limit that caused the error, such as a limit on address space.
    fn limit(&self) -> Option<Limit> {
        self.of_runtime().and_then(Failure::limit)
    }
}

/// Error of a model that cannot be opened, or is unsuitable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A configuration was given where weights are needed.
    #[error("{name} is a config.json without weights; give the folder of the model")]
    WithoutWeights {
        /// Name of the model.
        name: String,
    },
    /// A file of the model does not exist.
    #[error("{}: there is no such file; a model folder must contain config.json and the weights", path.display())]
    NoSuchFile {
        /// The file.
        path: PathBuf,
    },
    /// The configuration of an adapter does not exist.
    #[error(
        "{}: there is no such file; give the folder of an adapter, such as a checkpoint that `{train}` wrote with \
         model.lora",
        path.display(),
        train = Command::Train
    )]
    NoAdapter {
        /// The file.
        path: PathBuf,
    },
    /// The tokenizer has more tokens than the embedding has rows.
    #[error(
        "{name}: its tokenizer has {tokens} tokens, its embedding only {rows} rows; they belong to different models"
    )]
    Tokenizer {
        /// Name of the model.
        name: String,
        /// Number of tokens of the tokenizer.
        tokens: usize,
        /// Number of rows of the embedding.
        rows: u64,
    },
    /// A language model without its tokenizer: token ids of another one would be other tokens.
    #[error(
        "{name} has no tokenizer.json{instead}; a language model is read with its own tokenizer only: put its tokenizer.json \
         (transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)) into its folder, or, if its tokens are \
         bytes, `\"plimsoll_tokenizer\": \"bytes\"` into its config.json"
    )]
    NoTokenizer {
        /// Name of the model.
        name: String,
        /// The tokenizer files in other formats that were found: ` (but tokenizer.model)`; empty without any.
        instead: String,
    },
    /// The bytes of a text are more tokens than the model has.
    #[error(
        "{name}: config.json says that its tokens are bytes, and its embedding has {rows} rows, not 256 or more"
    )]
    TooFewForBytes {
        /// Name of the model.
        name: String,
        /// Number of rows of the embedding.
        rows: u64,
    },
    /// The vocabulary differs from the alphabet of ESM-2.
    #[error(
        "{}, line {line}: expected {expected}, found {found}; ESM-2 models are run with ESM-2's own alphabet of {} \
         tokens, so restore the model's own {}",
        EscapedPath(path),
        plimsoll_data::tokenize::esm::VOCAB,
        crate::model::VOCABULARY
    )]
    Vocabulary {
        /// The vocabulary's file.
        path: PathBuf,
        /// First line that differs, counted from 1.
        line: usize,
        /// The expected token.
        expected: String,
        /// The token found.
        found: String,
    },
    /// A caller that was only pre-trained.
    #[error(
        "{name}: its config.json lists no tasks, so it classifies nothing; train it with model.kind caller, model.tasks and \
         model.from"
    )]
    CallerWithoutTasks {
        /// Name of the model.
        name: String,
    },
    /// Two tensors that the family ties have different values.
    #[error("{name}: `{a}` and `{b}` must be equal in this model family, but differ")]
    Untied {
        /// Name of the model.
        name: String,
        /// Name of the first tensor.
        a: String,
        /// Name of the second tensor.
        b: String,
    },
    /// The first layer of a head is not a matrix over two concatenated embeddings.
    #[error(
        "{}: `hidden_layer.weight` has the shape {shape:?}, which is not a matrix over two embeddings",
        EscapedPath(path)
    )]
    HeadShape {
        /// The head's file.
        path: PathBuf,
        /// The shape of `hidden_layer.weight`.
        shape: Vec<u64>,
    },
    /// A head does not have two classes.
    #[error("{name}: the head has {classes} classes; 2 are required")]
    HeadClasses {
        /// Name of the head.
        name: String,
        /// Number of classes.
        classes: u64,
    },
    /// An adapter was given where a model is needed.
    #[error(
        "{0} is an adapter of {1}, not a model; `{merge} {0} {output_folder}` merges them into a model",
        EscapedPath(folder),
        EscapedPath(Path::new(base)),
        output_folder = Setting::Output.to("FOLDER"),
        merge = Command::Merge
    )]
    Adapter {
        /// The adapter's folder.
        folder: PathBuf,
        /// Name or path of the adapter's base model.
        base: String,
    },
    /// The configuration of an adapter is not supported.
    #[error("{}: {why}", EscapedPath(path))]
    AdapterConfig {
        /// Path of the adapter_config.json.
        path: PathBuf,
        /// The unsupported key and its accepted values.
        why: String,
    },
    /// A folder holds several fair-esm checkpoints.
    #[error(
        "{} holds several ESM-2 checkpoints, such as {} and {}; name one of them",
        EscapedPath(folder),
        EscapedPath(one),
        EscapedPath(other)
    )]
    SeveralCheckpoints {
        /// The folder.
        folder: PathBuf,
        /// A checkpoint in the folder.
        one: PathBuf,
        /// Another checkpoint in the folder.
        other: PathBuf,
    },
    /// A fair-esm checkpoint is not a usable ESM-2 model.
    #[error("{}: {why}", EscapedPath(path))]
    Checkpoint {
        /// The checkpoint.
        path: PathBuf,
        /// Reason for the refusal.
        why: String,
    },
}

/// Error of a request that contradicts itself or the machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A text that is not a size in bytes.
    #[error("`{text}` is not a size; write it like 2GiB, 500MB, 80% or a number of bytes")]
    BadSize {
        /// The text.
        text: String,
    },
    /// A budget above the target's memory.
    #[error(
        "a budget of {budget} is more than `{target}` has: {memory}; give at most that, or give {setting} and \
         memory.budget as a share like 90%",
        setting = Setting::Budget
    )]
    BudgetAboveTarget {
        /// The budget.
        budget: Bytes,
        /// Name of the target.
        target: String,
        /// The target's memory.
        memory: Bytes,
    },
    /// A number of threads was given for a GPU.
    #[error(
        "{given}: `{target}` is not a CPU, and its plan does not depend on threads; omit {setting}",
        given = Setting::Threads.to(threads),
        setting = Setting::Threads
    )]
    ThreadsOfGpu {
        /// The given number of threads.
        threads: usize,
        /// Name of the target.
        target: String,
    },
    /// Streaming was requested from a command that keeps its weights in memory.
    #[error(
        "{}: this command keeps its weights in memory",
        Setting::StreamWeights.to("always")
    )]
    NotStreamed,
    /// The requested tokens of a step are fewer than the tokens of the longest sequence.
    #[error(
        "{given} is less than the {longest} tokens that the longest sequence may have; give {longer} or more",
        given = Setting::Tokens.to(tokens),
        longer = Setting::Tokens.to(longest)
    )]
    TokensTooFew {
        /// Requested number of tokens.
        tokens: u64,
        /// Number of tokens of the longest sequence.
        longest: u64,
    },
    /// An element type that the CPU's kernels do not support.
    #[error(
        "{given}: the CPU computes in bf16, f32 or int8; give one of these or auto, or {device_cuda}",
        given = Setting::Precision.to(asked),
        device_cuda = Setting::Device.to("cuda")
    )]
    PrecisionOfCpu {
        /// The requested element type.
        asked: &'static str,
    },
    /// A trial of the answer of `plan --largest` did not confirm it.
    #[error("{confirm}: {what} is not confirmed: {why}", confirm = Setting::Confirm)]
    NotConfirmed {
        /// The answer.
        what: String,
        /// Reason for the refusal.
        why: String,
    },
    /// Several devices were given to a command that computes on one.
    #[error(
        "this command uses a single device; give one, such as {device_cuda_0}",
        device_cuda_0 = Setting::Device.to("cuda:0")
    )]
    SeveralDevices,
    /// Devices of different kinds were given for one run.
    #[error(
        "{first} and {other} are of different kinds, but all GPUs of a run must be of the same kind; select such \
         GPUs, for example with {}",
        Setting::Device.to(first.split(' ').next().unwrap_or_default())
    )]
    MixedDevices {
        /// Name of the first device.
        first: String,
        /// Name of a device of another kind.
        other: String,
    },
    /// A device was given twice.
    #[error("{name} is listed twice; list every device once")]
    DeviceTwice {
        /// Name of the device.
        name: String,
    },
    /// Another run holds the lock of the output folder.
    #[error(
        "another run is writing to {}; wait until it ends, or choose another folder with {output}",
        folder.display(),
        output = Setting::Output
    )]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
    /// Another run holds the lock of the output file.
    #[error(
        "another run is writing to {}; wait until it ends, or choose another name with {output}",
        path.display(),
        output = Setting::Output
    )]
    FileLocked {
        /// The file.
        path: PathBuf,
    },
}

/// Phase of a session in which a device ran out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomPhase {
    /// The weights were read and copied to the arena.
    Load,
    /// A step was computed, or its inputs or outputs were copied.
    Step,
}

impl fmt::Display for OomPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Load => "load of the weights",
            Self::Step => "computation of a step",
        })
    }
}

/// A lack of memory that the OOM fallback to smaller steps could not resolve.
#[derive(Debug)]
pub struct OutOfMemory {
    /// Phase of the session.
    pub phase: OomPhase,
    /// Tokens of the smaller steps that were tried.
    pub tried: Vec<u64>,
    /// The largest tensors of the plan.
    pub largest: String,
    /// Other processes that hold memory; empty if unknown.
    pub holders: String,
    /// Suggested remedy.
    pub remedy: String,
    /// Error of the device.
    pub source: DeviceError,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { phase, tried, largest, holders, remedy, .. } = self;
        write!(f, "the device ran out of memory in the {phase}")?;
        if !tried.is_empty() {
            let tried = tried.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
            write!(f, ", also with steps of {tried} tokens")?;
        }
        write!(f, "; the largest tensors are {largest}")?;
        if !holders.is_empty() {
            write!(f, "; {holders}")?;
        }
        write!(f, ". {remedy}")
    }
}

/// Why a session cannot compute a sequence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SequenceError {
    /// The sequence has no letters.
    #[error("it has no letters")]
    Empty,
    /// The letters are not those of the model's alphabet, or most of them are unknown.
    #[error("{reason}")]
    Unsuitable {
        /// Why the letters are refused.
        reason: String,
    },
    /// The sequence has more tokens than a step.
    #[error("it has {tokens} tokens, but a step has at most {most}")]
    LongerThanStep {
        /// Tokens of the sequence.
        tokens: usize,
        /// Tokens of a step.
        most: usize,
    },
    /// An output of the sequence has a value that is not finite.
    #[error("its outputs contain a NaN or infinite value; check the weights")]
    NotFinite,
}

/// Error of planning, starting or running a session.
#[derive(Debug)]
#[non_exhaustive]
pub enum RuntimeError {
    /// Invalid input.
    Data(DataError),
    /// Invalid or missing weights.
    Weights(WeightsError),
    /// An unsupported model configuration.
    Config {
        /// The configuration's file, or the model's name.
        path: PathBuf,
        /// Reason for the refusal.
        source: ConfigError,
    },
    /// The model cannot be planned, or does not fit the budget.
    Plan(PlanError),
    /// A device failed.
    Device(DeviceError),
    /// A device ran out of memory after the arena was allocated.
    OutOfMemory(Box<OutOfMemory>),
    /// A sequence cannot be computed.
    Sequence {
        /// Position of the sequence among all that were pushed to the session, from 0.
        position: u64,
        /// Reason for the refusal.
        source: SequenceError,
    },
    /// A model's graph failed verification: a bug of this program.
    Verify(VerifyError),
    /// Results cannot be written.
    Output(OutputError),
    /// A file cannot be read or written.
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The system refused to start a thread.
    Thread {
        /// Purpose of the thread.
        name: &'static str,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A model that cannot be opened, or is unsuitable.
    Model(ModelError),
    /// A request that contradicts itself or the machine.
    Request(RequestError),
    /// A bug of this program.
    Bug {
        /// The violated expectation.
        what: String,
    },
    /// A signal ended the run; finished results are kept.
    Interrupted {
        /// Number of the signal.
        signal: u8,
        /// The results that are kept, and how to resume the run.
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
            Self::Plan(PlanError::OverBudget(_) | PlanError::TooLarge { .. }) => 4,
            Self::Request(RequestError::BudgetAboveTarget { .. }) => 4,
            Self::Device(error) if error.is_out_of_memory() => 4,
            Self::OutOfMemory(_) => 4,
            Self::Data(error) => error.exit_code(),
            other if other.limit().is_some_and(|limit| limit.memory) => 4,
            Self::Interrupted { signal, .. } => 128 + signal,
            Self::Weights(_)
            | Self::Config { .. }
            | Self::Plan(_)
            | Self::Device(_)
            | Self::Sequence { .. }
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
            // `Display` includes the cause, so `source` omits it and `behind(self)` would not find it.
            Self::Io { source, .. } => limits::behind(source),
            Self::OutOfMemory(_) => Some(limits::memory()),
            Self::Device(error) if error.is_out_of_memory() => Some(limits::memory()),
            Self::Plan(PlanError::OverBudget(_)) => limits::free_address_space().map(|_| limits::memory()),
            other => limits::behind(other),
        }
    }
}

impl RuntimeError {
    /// The error for a bug of this program; `what` describes the violated expectation.
    pub fn bug(what: impl Into<String>) -> Self {
        Self::Bug { what: what.into() }
    }

    /// Returns a converter from a system error to the error of a thread that cannot be started.
    pub fn thread(name: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Thread { name, source }
    }

    /// Returns a converter from a system error to the error of a file or folder.
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
            Self::Config { path, .. } => write!(f, "{}: the model cannot be run", EscapedPath(path)),
            Self::Plan(e @ (PlanError::OverBudget(_) | PlanError::TooLarge { .. })) => {
                write!(f, "refused: {e}")
            }
            Self::Plan(e) => e.fmt(f),
            Self::Device(e) => e.fmt(f),
            Self::OutOfMemory(e) => e.fmt(f),
            Self::Sequence { position, source } => write!(f, "sequence {position}: {source}"),
            Self::Verify(e) => write!(f, "the graph of the model is invalid: {e}"),
            Self::Output(e) => e.fmt(f),
            Self::Io { path, source } => write!(f, "{}: {source}", EscapedPath(path)),
            Self::Thread { name, .. } => write!(f, "the {name} thread cannot be started"),
            Self::Model(e) => e.fmt(f),
            Self::Request(e) => e.fmt(f),
            Self::Bug { what } => write!(f, "{what}; this is a bug in plimsoll, please report it"),
            Self::Interrupted { kept, .. } => write!(f, "interrupted; {kept}"),
        }
    }
}

impl std::error::Error for RuntimeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Transparent variants display the inner error themselves, so the chain continues with the inner error's
        // source.
        match self {
            Self::Data(e) => e.source(),
            Self::Weights(e) => e.source(),
            Self::Config { source, .. } => Some(source),
            Self::Plan(e) => e.source(),
            Self::Device(e) => e.source(),
            Self::OutOfMemory(e) => Some(&e.source),
            Self::Output(e) => e.source(),
            Self::Thread { source, .. } => Some(source),
            Self::Model(e) => e.source(),
            Self::Request(e) => e.source(),
            Self::Sequence { .. }
            | Self::Verify(_)
            | Self::Io { .. }
            | Self::Bug { .. }
            | Self::Interrupted { .. } => None,
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
