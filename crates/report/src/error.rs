//! Errors of reports. Invariant: every message names the file that is wrong, and what the user can do.

use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::{Failure, RuntimeError};
use plimsoll_setting::{Command, Setting};
use plimsoll_train::TrainError;
use plimsoll_train::history::MixedFolders;
use std::path::PathBuf;

/// Error of [`report`](crate::report()).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// Reading results or writing the page failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// A training run cannot be read.
    #[error(transparent)]
    Training(TrainError),
    /// Some of the folders are training runs, and others are not.
    #[error(transparent)]
    Mixture(MixedFolders),
    /// Several folders are given, none of which is a training run.
    #[error("the report of a prediction is of one folder; give one folder, or the folders of training runs")]
    SeveralPredictions,
    /// The folder does not exist.
    #[error("{}: there is no such folder; check the path", EscapedPath(folder))]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder contains no complete results.
    #[error(
        "{}: there is no run.json in it, so it is not a complete result; give an output folder of {predict} (for \
         shards, the folder of {merge})",
        EscapedPath(folder),
        merge = Setting::Merge,
        predict = Command::Predict
    )]
    NoResult {
        /// The folder.
        folder: PathBuf,
    },
    /// The run.json does not belong to a prediction.
    #[error(
        "{} is not the run record of a prediction (no {missing} in it); run {predict} again",
        EscapedPath(path),
        predict = Command::Predict
    )]
    NotARunRecord {
        /// Path of the file.
        path: PathBuf,
        /// The missing key, or `JSON` if the file is not JSON.
        missing: &'static str,
    },
    /// A timeline has too many tensors for a page.
    #[error(
        "{} would have {bytes} bytes for {tensors} tensors, and a page has at most 5 MB; write the timeline with \
         {memory_viz} or {trace}",
        EscapedPath(path),
        memory_viz = Setting::MemoryViz,
        trace = Setting::Trace
    )]
    TooManyTensors {
        /// Path of the page.
        path: PathBuf,
        /// Number of tensors.
        tensors: usize,
        /// Size of the page.
        bytes: usize,
    },
}

impl<E: Into<RuntimeError>> From<E> for ReportError {
    fn from(error: E) -> Self {
        Self::Runtime(error.into())
    }
}

impl Failure for ReportError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        match self {
            Self::Runtime(error) => Some(error),
            Self::Training(error) => error.of_runtime(),
            _ => None,
        }
    }
}
