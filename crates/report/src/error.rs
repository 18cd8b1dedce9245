//! Errors of reports. Invariant: every message names the file that is wrong, and what the user can do.

use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::{Failure, RuntimeError};
use std::path::PathBuf;

/// Error of [`report`](crate::report()).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// Reading results or writing the page failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// The output file exists and `force` is not set.
    #[error("{} already exists; use --force to replace it, or choose another file with -o", EscapedPath(path))]
    Exists {
        /// Path of the file.
        path: PathBuf,
    },
    /// The folder contains no complete results.
    #[error(
        "{}: there is no run.json in it, so it is not a complete result; give an output folder of plimsoll \
         predict (for shards, the folder of --merge)",
        EscapedPath(folder)
    )]
    NoResult {
        /// The folder.
        folder: PathBuf,
    },
    /// The run.json does not belong to a prediction.
    #[error(
        "{} is not the run record of a prediction (no {missing} in it); run plimsoll predict again",
        EscapedPath(path)
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
         --memory-viz or --trace",
        EscapedPath(path)
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
            _ => None,
        }
    }
}
