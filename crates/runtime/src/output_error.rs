//! Why results cannot be written. Invariant: every message names the file or the sequence.

use data::DataError;
use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why results cannot be written.
#[derive(Debug)]
#[non_exhaustive]
pub enum OutputError {
    /// A result file cannot be written.
    File(DataError),
    /// The output folder cannot be made, or a file of an earlier run cannot be removed from it.
    Folder {
        /// Folder or file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The scores of an open reading frame are no probabilities.
    Score {
        /// Its name.
        orf: String,
        /// P(others), P(virus).
        scores: [f32; 2],
    },
    /// An embedding has a value that is no finite number.
    Embedding {
        /// The name of its open reading frame.
        orf: String,
    },
    /// A result is missing, doubled or out of order.
    Mismatch {
        /// The id it is about.
        id: String,
        /// What is wrong.
        what: String,
    },
}

impl OutputError {
    /// The error of an id whose result is missing, doubled or out of order; `what` says which.
    pub fn mismatch(id: &str, what: impl Into<String>) -> Self {
        Self::Mismatch { id: id.to_owned(), what: what.into() }
    }
}

impl fmt::Display for OutputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(e) => e.fmt(f),
            Self::Folder { path, .. } => {
                write!(f, "{}: cannot be made or changed; choose another --output-dir", path.display())
            }
            Self::Score { orf, scores: [other, virus] } => {
                write!(f, "'{orf}': the scores are {other} and {virus}, not probabilities; check the weights")
            }
            Self::Embedding { orf } => {
                write!(f, "'{orf}': its embedding has a value that is no finite number; check the weights")
            }
            Self::Mismatch { id, what } => {
                write!(f, "'{id}': {what}; this is a fault of the program, please report it")
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
