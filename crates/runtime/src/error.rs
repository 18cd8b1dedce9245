//! Why a story ended badly, and with which exit code. Invariant: every message names the file, the sequence
//! or the flag that it is about.

use crate::output_error::OutputError;
use data::limits::{self, Limit};
use data::printable::Place;
use data::weights::WeightsError;
use data::{DataError, DataErrorKind};
use exec::DeviceError;
use graph::VerifyError;
use models::ConfigError;
use plan::PlanError;
use std::fmt;
use std::path::PathBuf;

/// An error that can end a command: it knows the command's exit code, and the limit of the system that caused it.
///
/// Every application has an error enum of its own, with its refusals as variants and [`RuntimeError`] as one of them.
pub trait Failure: std::error::Error {
    /// The exit code: 1 failure or bad input, 3 the output folder is unusable, 4 it does not fit in memory, 128 plus the
    /// signal's number after a signal.
    fn exit_code(&self) -> u8;

    /// The system limit behind the error, such as a limit on address space.
    fn limit(&self) -> Option<Limit>;
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
    /// A fault of this program.
    Bug {
        /// What should not have happened.
        what: String,
    },
    /// A request that contradicts itself, its models or its surroundings, and what to do.
    Refused(String),
    /// What an earlier run left cannot be used: it is of another run, or damaged.
    Unusable(String),
    /// A signal came; what was finished is kept.
    Interrupted {
        /// Its number.
        signal: u8,
        /// What is kept and how to go on.
        kept: String,
    },
}

impl Failure for DataError {
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
    fn exit_code(&self) -> u8 {
        match self {
            Self::Plan(PlanError::OverBudget(_)) | Self::Device(DeviceError::OutOfMemory { .. }) => 4,
            Self::Data(error) => error.exit_code(),
            Self::Unusable(_) => 3,
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
            | Self::Bug { .. }
            | Self::Refused(_) => 1,
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
            Self::Bug { what } => write!(f, "{what}; this is a bug of ours"),
            Self::Refused(why) | Self::Unusable(why) => f.write_str(why),
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
            Self::Verify(_)
            | Self::Io { .. }
            | Self::Bug { .. }
            | Self::Refused(_)
            | Self::Unusable(_)
            | Self::Interrupted { .. } => None,
        }
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
