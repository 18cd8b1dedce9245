//! Errors of writing results. Invariant: every message names the file or the sequence.

use plimsoll_data::DataError;
use plimsoll_setting::Setting;
use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Error of writing results.
#[derive(Debug)]
#[non_exhaustive]
pub enum OutputError {
    /// A result file cannot be written.
    File(DataError),
    /// The output folder cannot be created, or a file of an earlier run cannot be removed from it.
    Folder {
        /// The folder or file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The scores of an open reading frame are not probabilities.
    Score {
        /// Name of the open reading frame.
        orf: String,
        /// The scores: P(other), P(virus).
        scores: [f32; 2],
    },
    /// An embedding has a value that is not finite.
    Embedding {
        /// Name of the embedding's open reading frame.
        orf: String,
    },
    /// A result is missing, duplicated or out of order: a bug of this program.
    Mismatch {
        /// Id of the result.
        id: String,
        /// Description of the mismatch.
        what: String,
    },
}

impl OutputError {
    /// The error of an id with a missing, duplicated or out-of-order result, as described by `what`.
    pub fn mismatch(id: &str, what: impl Into<String>) -> Self {
        Self::Mismatch { id: id.to_owned(), what: what.into() }
    }
}

impl fmt::Display for OutputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(e) => e.fmt(f),
            Self::Folder { path, .. } => {
                write!(
                    f,
                    "{}: cannot be created or changed; choose another folder with {}",
                    path.display(),
                    Setting::Output
                )
            }
            Self::Score { orf, scores: [other, virus] } => {
                write!(f, "'{orf}': the scores are {other} and {virus}, not probabilities; check the weights")
            }
            Self::Embedding { orf } => {
                write!(f, "'{orf}': its embedding contains a NaN or infinite value; check the weights")
            }
            Self::Mismatch { id, what } => {
                write!(f, "'{id}': {what}; this is a bug in plimsoll, please report it")
            }
        }
    }
}

impl Error for OutputError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::File(e) => e.source(),
            Self::Folder { source, .. } => Some(source),
            Self::Score { .. } | Self::Embedding { .. } | Self::Mismatch { .. } => None,
        }
    }
}

impl From<DataError> for OutputError {
    fn from(e: DataError) -> Self {
        Self::File(e)
    }
}
