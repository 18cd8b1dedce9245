//! Errors of embedding and classification. Invariant: every message names the file, the sequence or the flag
//! that is wrong, and what the user can do.

use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::{Failure, RuntimeError};
use plimsoll_setting::{Command, Setting};
use std::path::PathBuf;

/// Error of an embedding or a classification.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// Opening the model, planning, reading, computing or writing failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// The extension of the output file is not one of a known format.
    #[error("{}: the name of the output file must end in .npy, .npz, .safetensors or .parquet", path.display())]
    UnknownFormat {
        /// The output file.
        path: PathBuf,
    },
    /// `--pool tokens` with a format that stores one row per sequence.
    #[error(
        "{pool_tokens} writes a row for each token, and a .npy has one for each sequence; give an output that \
         ends in .safetensors, .parquet or .npz, or with {per_input} give {format_safetensors}",
        pool_tokens = Setting::Pool.to("tokens"),
        format_safetensors = Setting::Format.to("safetensors"),
        per_input = Setting::PerInput
    )]
    TokensOfNpy,
    /// `--pool last` with an encoder.
    #[error(
        "{pool_last}: the last token of {family} is a special token that closes the sequence; use mean, cls or \
         tokens, or a decoder",
        pool_last = Setting::Pool.to("last")
    )]
    LastOfEncoder {
        /// The model family.
        family: &'static str,
    },
    /// The journal beside the output has rows of another run.
    #[error(
        "{}: finished rows of an interrupted run that differs from this one ({what}); finish that run with its \
         command, use {force} to discard them, or another name with {output}",
        EscapedPath(path),
        force = Setting::Force,
        output = Setting::Output
    )]
    OtherRun {
        /// The journal.
        path: PathBuf,
        /// The first difference between the runs.
        what: String,
    },
    /// The journal is damaged, or its rows are not those of the input.
    #[error("{}: {what}; delete this file to start over", EscapedPath(path))]
    Journal {
        /// The journal.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// An input changed during the run.
    #[error("{}: the file changed while it was read; run the command again", EscapedPath(path))]
    InputChanged {
        /// The input.
        path: PathBuf,
    },
    /// With `--per-input`, the output folder is a file, or lies in one.
    #[error(
        "{per_input}: {} is not a folder; give another folder with {output}",
        EscapedPath(path),
        per_input = Setting::PerInput,
        output = Setting::Output
    )]
    NotAFolder {
        /// The output folder.
        path: PathBuf,
    },
    /// With `--per-input`, two inputs have the same output file.
    #[error(
        "{per_input}: {} and {} would both be written to {}; rename one, or embed them in two runs",
        one.display(),
        other.display(),
        result.display(),
        per_input = Setting::PerInput
    )]
    SameResult {
        /// An input.
        one: PathBuf,
        /// A later input.
        other: PathBuf,
        /// The output file of both.
        result: PathBuf,
    },
    /// `--truncate` without a limit: the model family has no default length.
    #[error(
        "{family} has no maximum length; give the length to truncate to with {max_length}",
        max_length = Setting::MaxLength
    )]
    NoLimit {
        /// The model family.
        family: &'static str,
    },
    /// The model does not have this layer.
    #[error(
        "{given}: the model has layers 0 (the embedding) to {last} (the last), or -{} to -1",
        last + 1,
        given = Setting::Layers.to(layer)
    )]
    NoSuchLayer {
        /// The requested layer.
        layer: i64,
        /// Number of the model's last layer.
        last: u64,
    },
    /// A layer is listed twice.
    #[error("{layers}: layer {layer} is listed twice", layers = Setting::Layers)]
    LayerTwice {
        /// The layer; 0 is the token embedding.
        layer: i64,
    },
    /// A sequence has more tokens than a step.
    #[error(
        "'{id}' has {tokens} tokens, but a step has at most {most}; give {given} or more",
        given = Setting::Tokens.to(tokens)
    )]
    LongerThanStep {
        /// Id of the sequence.
        id: String,
        /// Tokens of the sequence.
        tokens: usize,
        /// Tokens of a step.
        most: usize,
    },
    /// An anomaly of the input, which `--strict` makes an error.
    #[error("{strict}: {what}; correct it, or omit {strict}", strict = Setting::Strict)]
    Strict {
        /// The anomaly.
        what: String,
    },
    /// An embedding has a value that is not finite.
    #[error("'{id}': its embedding contains a NaN or infinite value; check the weights")]
    NotFinite {
        /// Id of the sequence.
        id: String,
    },
    /// The model has no classifier.
    #[error(
        "{model}: not a classifier of sequences; give a checkpoint that `{train}` wrote with model.classes",
        train = Command::Train
    )]
    NoClassifier {
        /// Path or id of the model.
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
