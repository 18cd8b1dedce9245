//! Errors of a training run. Invariant: every message names the key, file or step concerned, and what the user can do
//! next.

use crate::config::ConfigError;
use data::printable::Place;
use runtime::{Failure, RuntimeError};
use serde_json::Value;
use std::path::PathBuf;

/// Why a training run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// An error of the runtime: opening models, planning, reading, computing or writing.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// The configuration was rejected.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model has more layers than the planner supports.
    #[error(
        "model.layers is {layers}; at most {most} are planned, which bounds the time and memory that a plan takes"
    )]
    TooManyLayers {
        /// Number of layers requested.
        layers: u64,
        /// Maximum number of layers.
        most: u64,
    },
    /// `--largest` names a dimension that this kind of model does not take from its configuration.
    #[error("--largest {size}: the shape of a {kind} is not chosen by its configuration")]
    LargestOfKind {
        /// Name of the dimension.
        size: &'static str,
        /// Value of `model.kind`.
        kind: &'static str,
    },
    /// `--largest` names a dimension that `model.from` determines.
    #[error("--largest {size}: model.from fixes the shape of the model; remove it")]
    LargestOfModel {
        /// Name of the dimension.
        size: &'static str,
    },
    /// `model.from` names a model without weights.
    #[error("model.from {from} is a configuration without weights; name its folder")]
    WithoutWeights {
        /// Value of `model.from`.
        from: String,
    },
    /// An encoder is to be trained, and `model.from` is not set.
    #[error("model.from: name the {kind} whose sizes or weights the run starts from")]
    NoModel {
        /// Value of `model.kind`.
        kind: &'static str,
    },
    /// `model.from` names a model of another family than `model.kind`.
    #[error("model.kind {kind}: model.from holds a model of the family {family}")]
    OtherFamily {
        /// Value of `model.kind`.
        kind: &'static str,
        /// Family of the initial model.
        family: &'static str,
    },
    /// Adapters for a model that lacks its language-model head, which the adapters would leave untrained.
    #[error(
        "model.lora: {model} has no `{tensor}`, and adapters would leave it untrained; give a model with its \
         language-model head, or model.classes"
    )]
    LoraWithoutHead {
        /// Name of the model.
        model: String,
        /// Name of the missing tensor.
        tensor: String,
    },
    /// The number of inputs of a head is not two.
    #[error("a head reads two embeddings, of the nucleotides and of the protein; {given} are given")]
    HeadParts {
        /// Number of inputs given.
        given: usize,
    },
    /// The tokenizer has more tokens than the model's vocabulary has entries.
    #[error("model.vocabulary {entries}: the tokenizer has {tokens} tokens; give at least as many")]
    Vocabulary {
        /// Entries of the model's vocabulary.
        entries: u64,
        /// Number of tokens of the tokenizer.
        tokens: u64,
    },
    /// `data.format` is `embeddings`, and the model is not a head.
    #[error("data.format embeddings: only a head is trained on them")]
    EmbeddingsWithoutHead,
    /// The format of a file cannot be determined from its name.
    #[error(
        "data.train: the name `{name}` does not say what it holds; give data.format txt, jsonl, bin or fasta"
    )]
    UnknownFormat {
        /// Name of the file.
        name: String,
    },
    /// Data of token ids, and no `model.vocabulary`.
    #[error("data.format bin: the ids have no tokenizer; give model.vocabulary")]
    IdsWithoutVocabulary,
    /// A DNA model is to be trained and no tokenizer was found.
    #[error("data.tokenizer: the model has no tokenizer.json beside its weights; name one")]
    NoTokenizer,
    /// Validation files were given for a head.
    #[error("data.validation: of embeddings a share is validated on; give data.validation_fraction")]
    ValidationOfEmbeddings,
    /// An epoch of the training data contains no target.
    #[error("data.train: an epoch gave nothing to train on; is every document too short?")]
    EmptyEpoch,
    /// The validation data contains no target.
    #[error("run.evaluate_every: there is nothing to evaluate on; give more data.validation")]
    NothingToEvaluate,
    /// The training loss is not finite.
    #[error(
        "step {step}: the loss is no number any more; use a lower optimizer.lr or a longer schedule.warmup; the last \
         checkpoint is from before"
    )]
    LossNotFinite {
        /// Step at which it happened.
        step: u64,
    },
    /// Gradients are not finite although the loss scale is at its minimum.
    #[error(
        "step {step}: the gradients are no numbers any more, even without a loss scale; use precision.kind bf16, or a \
         lower optimizer.lr; the weights did not move, and the last checkpoint is from before"
    )]
    GradientsNotFinite {
        /// Step at which it happened.
        step: u64,
    },
    /// Gradients were not finite in several consecutive steps.
    #[error(
        "step {step}: a gradient was not finite in {steps} steps in a row, which were skipped; use a lower optimizer.lr or \
         a longer schedule.warmup, or look at the data of these steps"
    )]
    StepsSkipped {
        /// The last of these steps.
        step: u64,
        /// Number of consecutive skipped steps.
        steps: u64,
    },
    /// The position in a checkpoint has no valid number of micro-steps.
    #[error("the checkpoint's `position.micro_steps` is {found}, not a whole number: it is damaged")]
    MicroSteps {
        /// The value found instead.
        found: Value,
    },
    /// The data position in a checkpoint cannot be parsed.
    #[error("the place in the data: {why}")]
    DataPosition {
        /// The parse error.
        why: String,
    },
    /// `--resume never` was given, and the run's folder already contains a checkpoint.
    #[error(
        "--resume never: {} is there already; go on with --resume auto, or choose another folder with -o",
        Place(path)
    )]
    CheckpointExists {
        /// Path of the checkpoint.
        path: PathBuf,
    },
    /// A checkpoint was written with a different configuration.
    #[error("{} is of another configuration: {what}; choose another folder with -o", Place(path))]
    OtherConfiguration {
        /// Path of the checkpoint.
        path: PathBuf,
        /// The key that differs, with both values.
        what: String,
    },
    /// A run has checkpoints, and all of them are damaged.
    #[error("no checkpoint can be used ({why}); remove the folder to begin anew, or choose another with -o")]
    NoUsableCheckpoint {
        /// Why the checkpoint tried last cannot be used.
        why: String,
    },
    /// `--resume` names a run without a checkpoint.
    #[error("--resume {}: there is no checkpoint in it", Place(folder))]
    NoCheckpoint {
        /// Folder of the run.
        folder: PathBuf,
    },
    /// `--resume` names a checkpoint that cannot be used.
    #[error("--resume {}: {why}", Place(path))]
    BadCheckpoint {
        /// Path of the checkpoint.
        path: PathBuf,
        /// What is wrong with the checkpoint.
        why: String,
    },
    /// `--resume` names a checkpoint that is older than another checkpoint in the run's own folder.
    #[error(
        "--resume {}: {} is newer; go on with --resume auto, remove it, or choose another folder with -o",
        Place(path),
        Place(newer)
    )]
    OlderCheckpoint {
        /// Path of the named checkpoint.
        path: PathBuf,
        /// Path of a newer checkpoint.
        newer: PathBuf,
    },
    /// The configuration stored in a checkpoint cannot be parsed.
    #[error("the configuration of a checkpoint: {why}")]
    CheckpointConfig {
        /// The parse error.
        why: String,
    },
    /// A checkpoint belongs to a different model.
    #[error("{} is of another model: {why}", Place(path))]
    OtherModel {
        /// Path of the checkpoint folder.
        path: PathBuf,
        /// The tensor that differs, and how.
        why: String,
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
            | Self::StepsSkipped { .. }
            | Self::MicroSteps { .. } => 1,
            Self::DataPosition { .. }
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
