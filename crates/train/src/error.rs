//! Why a training run fails. Invariant: every message names the key, the file or the step that it is about, and the next
//! step.

use crate::config::ConfigError;
use data::printable::Place;
use runtime::{Failure, RuntimeError};
use serde_json::Value;
use std::path::PathBuf;
use std::{fmt, io};

/// Why a training run fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Opening models, planning, reading, computing or writing failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// More layers than a plan is made for.
    #[error(
        "model.layers is {layers}; at most {most} are planned, which bounds the time and memory that a plan takes"
    )]
    TooManyLayers {
        /// The layers that were asked for.
        layers: u64,
        /// The most that are planned.
        most: u64,
    },
    /// A dimension to maximize that the configuration does not choose.
    #[error("--largest {size}: the shape of a {kind} is not chosen by its configuration")]
    LargestOfKind {
        /// The dimension.
        size: &'static str,
        /// The kind of model.
        kind: &'static str,
    },
    /// A dimension to maximize that `model.from` fixes.
    #[error("--largest {size}: model.from fixes the shape of the model; remove it")]
    LargestOfModel {
        /// The dimension.
        size: &'static str,
    },
    /// A model to start from without weights.
    #[error("model.from {from} is a config.json without weights; give the folder of the model")]
    WithoutWeights {
        /// The model.
        from: String,
    },
    /// An encoder without a model to start from.
    #[error("model.from is required; name the {kind} whose sizes or weights the run starts from")]
    NoModel {
        /// The kind of model.
        kind: &'static str,
    },
    /// A model to start from of another family.
    #[error("model.kind {kind}, but model.from is a model of the family {family}")]
    OtherFamily {
        /// The kind of model.
        kind: &'static str,
        /// The family of the model to start from.
        family: &'static str,
    },
    /// Adapters over a model that lacks the head that they would leave untrained.
    #[error(
        "model.lora: {model} has no `{tensor}`, and adapters would leave it untrained; give a model with its \
         language-model head, or model.classes"
    )]
    LoraWithoutHead {
        /// The model.
        model: String,
        /// The tensor.
        tensor: String,
    },
    /// A head over other than two embeddings.
    #[error("a head needs two embeddings, of the DNA and of the protein, but {given} were given")]
    HeadParts {
        /// How many are given.
        given: usize,
    },
    /// A tokenizer with more tokens than the model's vocabulary.
    #[error("model.vocabulary {entries}: the tokenizer has {tokens} tokens; give at least as many")]
    Vocabulary {
        /// Entries of the model's vocabulary.
        entries: u64,
        /// Tokens of the tokenizer.
        tokens: u64,
    },
    /// Embeddings as data of a model that is no head.
    #[error("data.format embeddings applies only to model.kind head")]
    EmbeddingsWithoutHead,
    /// A file name that does not say a format.
    #[error(
        "data.train: the name `{name}` does not tell its format; give data.format txt, jsonl, bin or fasta"
    )]
    UnknownFormat {
        /// The name.
        name: String,
    },
    /// Token ids without the size of their vocabulary.
    #[error("data.format bin contains token ids without a tokenizer; give model.vocabulary")]
    IdsWithoutVocabulary,
    /// A DNA model without a tokenizer.
    #[error("data.tokenizer: the model folder contains no tokenizer.json; give the path of a tokenizer.json")]
    NoTokenizer,
    /// Files to validate a head on.
    #[error("data.validation is not supported for embeddings; give data.validation_fraction")]
    ValidationOfEmbeddings,
    /// An epoch without a target.
    #[error("data.train: an epoch contained no training targets; every document may be too short")]
    EmptyEpoch,
    /// Validation data without a target.
    #[error("run.evaluate_every: the validation data contains no targets; give more data.validation")]
    NothingToEvaluate,
    /// A loss that is not finite.
    #[error(
        "step {step}: the loss is not finite; use a lower optimizer.lr or a longer schedule.warmup; the last \
            checkpoint was written before this step"
    )]
    LossNotFinite {
        /// The step.
        step: u64,
    },
    /// Gradients that are not finite without a loss scale.
    #[error(
        "step {step}: the gradients are not finite, even without a loss scale; use precision.kind bf16, or a \
         lower optimizer.lr; the weights were not changed, and the last checkpoint was written before this step"
    )]
    GradientsNotFinite {
        /// The step.
        step: u64,
    },
    /// Gradients that were not finite in several steps in a row.
    #[error(
        "step {step}: a gradient was not finite in {steps} steps in a row, which were skipped; use a lower optimizer.lr or \
         a longer schedule.warmup, or look at the data of these steps"
    )]
    StepsSkipped {
        /// The last of these steps.
        step: u64,
        /// How many there were.
        steps: u64,
    },
    /// A position in a checkpoint without its micro-steps.
    #[error("the checkpoint's `position.micro_steps` is {found}, not a whole number: it is damaged")]
    MicroSteps {
        /// What stands there.
        found: Value,
    },
    /// A position in the data that cannot be read.
    #[error("the place in the data")]
    DataPosition {
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A checkpoint that is there, of a run that should begin anew.
    #[error(
        "--resume never: {} already exists; resume it with --resume auto, or choose another folder with -o",
        Place(path)
    )]
    CheckpointExists {
        /// The checkpoint.
        path: PathBuf,
    },
    /// A checkpoint of another configuration.
    #[error(
        "{} was written with another configuration: {difference}; choose another folder with -o",
        Place(path)
    )]
    OtherConfiguration {
        /// The checkpoint.
        path: PathBuf,
        /// The key that differs.
        difference: ConfigDifference,
    },
    /// A run without a usable checkpoint.
    #[error(
        "no checkpoint can be used ({}: {why}); remove the folder to start over, or choose another folder with -o",
        Place(path)
    )]
    NoUsableCheckpoint {
        /// The oldest checkpoint.
        path: PathBuf,
        /// Why the oldest one cannot be used.
        why: CheckpointError,
    },
    /// A folder of a run without a checkpoint.
    #[error("--resume {}: the folder contains no checkpoint", Place(folder))]
    NoCheckpoint {
        /// The folder.
        folder: PathBuf,
    },
    /// A checkpoint that cannot be used.
    #[error("--resume {}: {why}", Place(path))]
    BadCheckpoint {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong with it.
        why: CheckpointError,
    },
    /// A checkpoint that is older than another of the run.
    #[error(
        "--resume {}: {} is newer; resume from it with --resume auto, remove it, or choose another folder with -o",
        Place(path),
        Place(newer)
    )]
    OlderCheckpoint {
        /// The checkpoint that was named.
        path: PathBuf,
        /// A newer one.
        newer: PathBuf,
    },
    /// A configuration in a checkpoint that cannot be read.
    #[error("the configuration of a checkpoint")]
    CheckpointConfig {
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A checkpoint of another model.
    #[error("{} was written for another model: {difference}", Place(path))]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// How the models differ.
        difference: ModelDifference,
    },
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file of the checkpoint that cannot be read.
    #[error("{file}: {source}")]
    Unreadable {
        /// The file's name.
        file: String,
        /// The error of the read.
        source: io::Error,
    },
    /// A record that is not the JSON of a record.
    #[error("{file} is damaged: {source}")]
    NotARecord {
        /// The record's name.
        file: &'static str,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A file whose bytes are not those that were written.
    #[error("{file} is damaged")]
    Damaged {
        /// The file's name.
        file: String,
    },
}

/// A difference between the configuration of a run and that of its checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ConfigDifference {
    /// A key with another value.
    Key {
        /// The key.
        key: String,
        /// Its value in the checkpoint.
        was: Value,
        /// Its value now.
        is: Value,
    },
    /// A schedule that ends at another step.
    ScheduleEnd {
        /// The last step in the checkpoint; `None` where there is no end.
        was: Option<u64>,
        /// The last step now.
        is: Option<u64>,
    },
}

impl fmt::Display for ConfigDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |end: &Option<u64>| end.map_or("never".to_owned(), |step| format!("at step {step}"));
        match self {
            Self::Key { key, was, is } => write!(f, "`{key}` was {was}, is {is}"),
            Self::ScheduleEnd { was, is } => {
                write!(f, "the schedule ended {}, ends {}; schedule.steps says where", text(was), text(is))
            }
        }
    }
}

/// A difference between the model of a run and that of its checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelDifference {
    /// Another number of tensors.
    #[error("{file} holds {found} tensors, the model has {wanted}")]
    Count {
        /// The file of the checkpoint.
        file: String,
        /// Tensors in the file.
        found: usize,
        /// Tensors of the model.
        wanted: usize,
    },
    /// A tensor of another element type.
    #[error("{tensor} was {was}, is {is}")]
    ElementType {
        /// The tensor.
        tensor: String,
        /// Its element type in the checkpoint.
        was: &'static str,
        /// Its element type now.
        is: &'static str,
    },
}

impl<E: Into<RuntimeError>> From<E> for TrainError {
    fn from(error: E) -> Self {
        Self::Runtime(error.into())
    }
}

impl Failure for TrainError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        match self {
            Self::Runtime(error) => Some(error),
            _ => None,
        }
    }

    fn own_exit_code(&self) -> u8 {
        match self {
            Self::Runtime(_)
            | Self::Config(_)
            | Self::TooManyLayers { .. }
            | Self::LargestOfKind { .. }
            | Self::LargestOfModel { .. }
            | Self::WithoutWeights { .. }
            | Self::NoModel { .. }
            | Self::OtherFamily { .. }
            | Self::LoraWithoutHead { .. }
            | Self::HeadParts { .. }
            | Self::Vocabulary { .. }
            | Self::EmbeddingsWithoutHead
            | Self::UnknownFormat { .. }
            | Self::IdsWithoutVocabulary
            | Self::NoTokenizer
            | Self::ValidationOfEmbeddings
            | Self::EmptyEpoch
            | Self::NothingToEvaluate
            | Self::LossNotFinite { .. }
            | Self::GradientsNotFinite { .. }
            | Self::StepsSkipped { .. } => 1,
            Self::DataPosition { .. }
            | Self::MicroSteps { .. }
            | Self::CheckpointExists { .. }
            | Self::OtherConfiguration { .. }
            | Self::NoUsableCheckpoint { .. }
            | Self::NoCheckpoint { .. }
            | Self::BadCheckpoint { .. }
            | Self::OlderCheckpoint { .. }
            | Self::CheckpointConfig { .. }
            | Self::OtherModel { .. } => 3,
        }
    }
}
