//! Why an embedding or a classification fails. Invariant: every message names the file, the sequence or the flag that it is
//! about, and the next step.

use data::printable::Place;
use runtime::{Failure, RuntimeError};
use std::path::PathBuf;

/// Why an embedding or a classification fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// Opening the model, planning, reading, computing or writing failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// The name of a result does not say a format.
    #[error("{}: the name of the output file must end in .npy, .safetensors or .parquet", path.display())]
    UnknownFormat {
        /// The result.
        path: PathBuf,
    },
    /// A row for each token, in a format that has no place for them.
    #[error(
        "--pool tokens writes a matrix for each sequence, which only the safetensors format supports; give an \
            output that ends in .safetensors, or with --per-input give --format safetensors"
    )]
    TokensNeedSafetensors,
    /// The result is there, and may not be replaced.
    #[error("{}: the file already exists; use --force to replace it, or another name with -o", Place(path))]
    Exists {
        /// The result.
        path: PathBuf,
    },
    /// Two inputs whose results would have one name.
    #[error(
        "--per-input: {} and {} would both be written to {}; rename one, or embed them in two runs",
        one.display(),
        other.display(),
        result.display()
    )]
    SameResult {
        /// An input.
        one: PathBuf,
        /// A later input.
        other: PathBuf,
        /// The result of both.
        result: PathBuf,
    },
    /// Sequences should be cut, and nothing says where.
    #[error("{family} has no maximum length; give the length to truncate to with --max-length")]
    NoLimit {
        /// The model's family.
        family: &'static str,
    },
    /// A layer that the model does not have.
    #[error(
        "--layers {layer}: the model has layers 0 (the embedding) to {last} (the last), or -{} to -1",
        last + 1
    )]
    NoSuchLayer {
        /// The layer that was asked for.
        layer: i64,
        /// The model's last layer.
        last: u64,
    },
    /// A layer that was asked for twice.
    #[error("--layers: layer {layer} is listed twice")]
    LayerTwice {
        /// The layer, counted from the embedding.
        layer: i64,
    },
    /// A sequence that is longer than a step.
    #[error("'{id}' has {tokens} tokens, but a step has at most {most}; give --tokens {tokens} or more")]
    LongerThanStep {
        /// The sequence.
        id: String,
        /// Its tokens.
        tokens: usize,
        /// Tokens of a step.
        most: usize,
    },
    /// A sequence in memory that is empty or of another alphabet.
    #[error("{id}: {reason}")]
    Refused {
        /// The sequence: its position.
        id: String,
        /// Why it is refused.
        reason: String,
    },
    /// An embedding with a value that is not finite.
    #[error("'{id}': its embedding contains a NaN or infinite value; check the weights")]
    NotFinite {
        /// The sequence.
        id: String,
    },
    /// A model without a classifier.
    #[error(
        "{model}: not a classifier of sequences; give a checkpoint that `plimsoll train` wrote with \
        model.classes"
    )]
    NoClassifier {
        /// The model.
        model: String,
    },
}

impl<E: Into<RuntimeError>> From<E> for EmbedError {
    fn from(error: E) -> Self {
        Self::Runtime(error.into())
    }
}

impl Failure for EmbedError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        match self {
            Self::Runtime(error) => Some(error),
            _ => None,
        }
    }
}
