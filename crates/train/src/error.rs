//! Errors of training runs. Invariant: every message names the key, the file or the step, and a remedy if there
//! is one.

use crate::config::TrainConfigError;
use crate::opened_model::MemoryReport;
use plimsoll_data::printable::{EscapedPath, Name};
use plimsoll_graph::Bytes;
use plimsoll_runtime::{Failure, RuntimeError};
use plimsoll_setting::{Assignment, Command, Setting};
use serde_json::Value;
use std::path::PathBuf;
use std::{fmt, io};

/// Error of a training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Opening models, planning, reading, computing or writing failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] TrainConfigError),
    /// The model has more layers than the planner accepts.
    #[error(
        "model.layers is {layers}; at most {most} are planned, which bounds the time and memory that a plan takes"
    )]
    TooManyLayers {
        /// Requested number of layers.
        layers: u64,
        /// Maximum number of layers.
        most: u64,
    },
    /// `--largest` names a dimension that this kind of model does not take from the configuration.
    #[error(
        "{given}: the shape of a {kind} is not chosen by its configuration",
        given = Setting::Largest.to(size)
    )]
    LargestOfKind {
        /// The dimension to maximize.
        size: &'static str,
        /// The kind of model.
        kind: &'static str,
    },
    /// A trial of the answer of `--largest` did not confirm it.
    #[error("{confirm}: {what} is not confirmed: {why}", confirm = Setting::Confirm)]
    NotConfirmed {
        /// The answer.
        what: String,
        /// Outcome of the trial.
        why: String,
    },
    /// `--largest` names a dimension although `model.from` determines the shape of the model.
    #[error("{given}: model.from fixes the shape of the model; remove it", given = Setting::Largest.to(size))]
    LargestOfModel {
        /// The dimension to maximize.
        size: &'static str,
    },
    /// The device had too little memory for a step, and smaller micro-steps were not possible or did not help.
    #[error(
        "step {step}: the device ran out of memory in the {phase}{tried}; the largest tensors are {largest}{holders}. \
            {remedy}"
    )]
    OutOfMemory {
        /// The step.
        step: u64,
        /// Phase of the run in which the memory ran out.
        phase: TrainPhase,
        /// The smaller sizes that were tried before.
        tried: String,
        /// The largest tensors of the plan.
        largest: String,
        /// Other processes that hold memory, with a separator before; empty if unknown.
        holders: String,
        /// Suggested remedy.
        remedy: &'static str,
        /// The error of the device, boxed to keep errors small.
        source: Box<RuntimeError>,
    },
    /// A request that `plan` has for plans with one size of micro-steps only.
    #[error("{request}: memory.dynamic has micro-steps of several sizes; remove it")]
    PlanOfDynamic {
        /// The setting of the request.
        request: Assignment,
    },
    /// `model.from` names a configuration file without weights.
    #[error("model.from {from} is a config.json without weights; give the folder of the model")]
    WithoutWeights {
        /// Value of `model.from`.
        from: String,
    },
    /// A task has other classes in the initial model.
    #[error(
        "model.tasks: the task {task} of {from}, the model of model.from, has the classes {classes}; give the same classes in the \
            same order, or another name to train a new head"
    )]
    OtherClasses {
        /// Value of `model.from`.
        from: String,
        /// Name of the task.
        task: String,
        /// Classes of the initial model's task.
        classes: String,
    },
    /// A teacher does not have a task of the model, or has other classes in it.
    #[error(
        "distillation.teacher: {} does not have the task {task} with the classes {classes}, in this order; {found}. Give a \
            teacher that was trained with the same model.tasks",
        EscapedPath(teacher)
    )]
    TeacherTask {
        /// Folder of the teacher.
        teacher: PathBuf,
        /// Name of the task.
        task: String,
        /// Classes of the task.
        classes: String,
        /// Classes or tasks of the teacher.
        found: String,
    },
    /// A teacher has another number of tokens than the model.
    #[error(
        "distillation.teacher: {} has an embedding table of {found} entries, the model one of {wanted}; give a teacher that \
            reads the same tokens",
        EscapedPath(teacher)
    )]
    TeacherVocabulary {
        /// Folder of the teacher.
        teacher: PathBuf,
        /// Entries of the teacher's embedding table.
        found: u64,
        /// Entries of the model's embedding table.
        wanted: u64,
    },
    /// The files of the teachers are not those with which the checkpoint was made.
    #[error(
        "distillation.teacher: the files of the teachers are not those of the run that wrote the checkpoint; restore them, or \
            start over in another folder"
    )]
    OtherTeachers,
    /// The kind of model needs `model.from`, which is not set.
    #[error("model.from is required; name the {kind} whose sizes or weights the run starts from")]
    NoModel {
        /// The kind of model.
        kind: &'static str,
    },
    /// The model of `model.from` is of another family than `model.kind`.
    #[error("model.kind {kind}, but model.from is a model of the family {family}")]
    OtherFamily {
        /// The kind of model.
        kind: &'static str,
        /// The family of the model of `model.from`.
        family: &'static str,
    },
    /// LoRA adapters are requested for a model whose weights lack the language-model head, which adapters would
    /// leave untrained.
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
    /// The number of embeddings that a head would read is not two.
    #[error("a head needs two embeddings, of the DNA and of the protein, but {given} were given")]
    HeadParts {
        /// Number of given embeddings.
        given: usize,
    },
    /// The tokenizer has more tokens than the model's vocabulary has entries.
    #[error("model.vocabulary {entries}: the tokenizer has {tokens} tokens; give at least as many")]
    Vocabulary {
        /// Number of entries of the model's vocabulary.
        entries: u64,
        /// Number of tokens of the tokenizer.
        tokens: u64,
    },
    /// The words in the table of labels are not as many as the classes.
    #[error(
        "{}: its classes are {}, {} in all, and model.classes is {classes}; correct one of them, or give the names of all classes \
         with model.class_names",
        EscapedPath(table),
        listed(words),
        words.len()
    )]
    ClassWords {
        /// The table of labels.
        table: PathBuf,
        /// The words in the table.
        words: Vec<String>,
        /// The number of classes.
        classes: u64,
    },
    /// The sequences of a protein model are nucleotides.
    #[error(
        "the data has {records} sequences whose letters are those of DNA or RNA, and {kind} reads proteins; translate them, or \
         set data.allow_dna=true to train on them as they are"
    )]
    Nucleotides {
        /// Number of sequences.
        records: u64,
        /// The kind of model.
        kind: &'static str,
    },
    /// The data format is `embeddings`, but the model is not a head.
    #[error("data.format embeddings applies only to model.kind head")]
    EmbeddingsWithoutHead,
    /// A folder of training data has files of several formats.
    #[error(
        "data.train: the folder {} has files of several formats; give data.format txt, jsonl, bin or fasta",
        EscapedPath(folder)
    )]
    SeveralFormats {
        /// The folder.
        folder: PathBuf,
    },
    /// The format of a data file cannot be determined from its name.
    #[error(
        "data.train: the name `{name}` does not tell its format; give data.format txt, jsonl, bin or fasta"
    )]
    UnknownFormat {
        /// The file name.
        name: String,
    },
    /// The data consists of token ids, and `model.vocabulary` is not set.
    #[error("data.format bin contains token ids without a tokenizer; give model.vocabulary")]
    IdsWithoutVocabulary,
    /// The weights of `model.from` have no output projection, as those that `AutoModel` saves.
    #[error(
        "model.from: the weights of {from} have no lm_head.weight, without which a language model cannot be trained; save \
         the whole model (transformers: AutoModelForCausalLM)"
    )]
    WithoutOutputProjection {
        /// Value of `model.from`.
        from: String,
    },
    /// A DNA model has no `tokenizer.json`, and `data.tokenizer` is not set.
    #[error("data.tokenizer: the model folder contains no tokenizer.json; give the path of a tokenizer.json")]
    NoTokenizer,
    /// `data.validation` is set for a head, which supports only `data.validation_fraction`.
    #[error("data.validation is not supported for embeddings; give data.validation_fraction")]
    ValidationOfEmbeddings,
    /// An epoch of the training data has no targets.
    #[error("data.train: an epoch contained no training targets; every document may be too short")]
    EmptyEpoch,
    /// The validation data has no targets.
    #[error(
        "the data of the evaluation contains no targets; give more data.validation, or for a caller records with the split \
            validation"
    )]
    NothingToEvaluate,
    /// The folder to evaluate is no checkpoint in the folder of a run.
    #[error(
        "{} is not a checkpoint in the folder of a run, which has a config.yaml, and not the folder of a model, which has a \
         config.json; give a folder such as RUN/best or RUN/checkpoints/step-00000100, or a model and DATA",
        EscapedPath(path)
    )]
    NoRunOfCheckpoint {
        /// Path that was given.
        path: PathBuf,
    },
    /// A model that no run wrote has no data of its own.
    #[error(
        "no run wrote the model {model}, so that it has no data of its own; give DATA, the files to evaluate it on"
    )]
    EvaluationWithoutData {
        /// Path or hub id of the model.
        model: String,
    },
    /// The checkpoint to evaluate has adapters without the model that they adapt.
    #[error(
        "{} has adapters alone; merge them with `{merge}` into a folder inside the folder of the run, such as \
         RUN/merged, and evaluate that folder",
        EscapedPath(path),
        merge = Command::Merge
    )]
    EvaluationOfAdapters {
        /// Path that was given.
        path: PathBuf,
    },
    /// The path of the checkpoint is not UTF-8, so that no configuration can hold it.
    #[error("{}: rename this folder; its path must be in UTF-8", EscapedPath(path))]
    CheckpointName {
        /// Path that was given.
        path: PathBuf,
    },
    /// Data files were given to evaluate a head.
    #[error(
        "the data of a head are embeddings; give them with {train}, data.proteins and data.labels, and \
         {validation_fraction} to evaluate all of them",
        train = Setting::key("data.train"),
        validation_fraction = Setting::key("data.validation_fraction").to(0)
    )]
    DataOfHead,
    /// The scores of the examples do not fit the memory budget.
    #[error(
        "the scores of {targets} examples and the plan exceed the memory budget of {budget}; give more \
         {memory_budget}, or evaluate fewer examples with {evaluate_tokens}",
        evaluate_tokens = Setting::key("run.evaluate_tokens"),
        memory_budget = Setting::MemoryBudget
    )]
    TooManyScores {
        /// Number of examples.
        targets: u64,
        /// The memory budget.
        budget: Bytes,
    },
    /// A loss or a score of an evaluation is not a number.
    #[error(
        "the loss or a score is not finite; the weights or the number format may be unfit; try {precision_f32}",
        precision_f32 = Setting::Precision.to("f32")
    )]
    ScoresNotFinite,
    /// The training loss is not finite.
    #[error(
        "step {step}: the loss is not finite; use a lower optimizer.lr or a longer schedule.warmup; the last \
            checkpoint was written before this step"
    )]
    LossNotFinite {
        /// Number of the optimizer step.
        step: u64,
    },
    /// Gradients are not finite in fp16 although the loss scale has been lowered to 1.
    #[error(
        "step {step}: the gradients are not finite, even without a loss scale; use precision.kind bf16, or a \
         lower optimizer.lr; the weights were not changed, and the last checkpoint was written before this step"
    )]
    GradientsNotFinite {
        /// Number of the optimizer step.
        step: u64,
    },
    /// Too many consecutive steps were skipped because their gradients were not finite.
    #[error(
        "step {step}: a gradient was not finite in {steps} steps in a row, which were skipped; use a lower optimizer.lr or \
         a longer schedule.warmup, or look at the data of these steps"
    )]
    StepsSkipped {
        /// Number of the last skipped step.
        step: u64,
        /// Number of consecutive skipped steps.
        steps: u64,
    },
    /// All steps of a run were skipped because their gradients were not finite.
    #[error(
        "all {steps} steps of the run were skipped because a gradient was not finite, so the weights are those of the start; use \
         precision.kind bf16 or f32, a lower precision.initial_scale or optimizer.lr, or more steps"
    )]
    EveryStepSkipped {
        /// Number of steps.
        steps: u64,
    },
    /// A checkpoint of a run that held no data out is to be evaluated without data.
    #[error(
        "{}: its run has no run.evaluate_every, so it held no data out; give the data to evaluate as DATA, or \
         {validation_fraction} to evaluate all that it trained on",
        EscapedPath(checkpoint),
        validation_fraction = Setting::key("data.validation_fraction").to(0)
    )]
    NothingHeldOut {
        /// Folder of the checkpoint.
        checkpoint: PathBuf,
    },
    /// The data position of a checkpoint has no number of a pack.
    #[error(
        "the checkpoint was written by a version before packs, which cut documents where a micro-step ended, so its place in \
         the data means another one here; start a new run, with model.from and the folder of the checkpoint if its weights \
         are wanted"
    )]
    PositionBeforePacks,
    /// The data position of a checkpoint cannot be parsed.
    #[error("the place in the data")]
    DataPosition {
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// The folder of the run holds the results of a prediction.
    #[error(
        "{} contains the results of a prediction; choose another folder with {output}",
        EscapedPath(folder),
        output = Setting::Output
    )]
    PredictionFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder of the run holds files of somebody else.
    #[error(
        "{} contains `{}` and no run.json of a training run, so it does not belong to one; choose a new or empty \
         folder with {output}",
        EscapedPath(folder),
        Name(name),
        output = Setting::Output
    )]
    ForeignFolder {
        /// The folder.
        folder: PathBuf,
        /// Name of a file or folder in it.
        name: String,
    },
    /// The run was to start at step 0, but its folder has a checkpoint or metrics of a run.
    #[error(
        "{resume_never}: {} already exists; resume it with {resume_auto}, give {force} to delete the checkpoints \
         and metrics of that run, or choose another folder with {output}",
        EscapedPath(path),
        resume_auto = Setting::Resume.to("auto"),
        resume_never = Setting::Resume.to("never"),
        force = Setting::Force,
        output = Setting::Output
    )]
    CheckpointExists {
        /// Path of the checkpoint or of the metrics.
        path: PathBuf,
    },
    /// The file system of the run's folder has no room for a checkpoint.
    #[error(
        "{}: a checkpoint of this run takes {needed}, and {free} are free there; free disk space, or choose \
         another folder with {output}",
        EscapedPath(folder),
        output = Setting::Output
    )]
    NoRoomForCheckpoint {
        /// The run's folder.
        folder: PathBuf,
        /// Bytes of a checkpoint.
        needed: Bytes,
        /// Free bytes of the file system.
        free: Bytes,
    },
    /// The checkpoint was written with a configuration that gives other results.
    #[error(
        "{} was written with another configuration: {difference}; choose another folder with {output}",
        EscapedPath(path),
        output = Setting::Output
    )]
    OtherConfiguration {
        /// Path of the checkpoint.
        path: PathBuf,
        /// The first difference.
        difference: ConfigDifference,
    },
    /// The run has checkpoints, none of which is usable.
    #[error(
        "no checkpoint can be used ({}: {why}); remove the folder to start over, or choose another folder with \
         {output}",
        EscapedPath(path),
        output = Setting::Output
    )]
    NoUsableCheckpoint {
        /// Path of the oldest checkpoint.
        path: PathBuf,
        /// Error of the oldest checkpoint.
        why: CheckpointError,
    },
    /// The run folder given to `--resume` has no checkpoints.
    #[error("{}: the folder contains no checkpoint", Setting::Resume.to(EscapedPath(folder)))]
    NoCheckpoint {
        /// Path of the run folder.
        folder: PathBuf,
    },
    /// The checkpoint given to `--resume` is not usable.
    #[error(
        "{}: {why}; give a checkpoint, or the folder of a run, whose newest checkpoint is used",
        Setting::Resume.to(EscapedPath(path))
    )]
    BadCheckpoint {
        /// Path of the checkpoint.
        path: PathBuf,
        /// Error of the checkpoint.
        why: CheckpointError,
    },
    /// The checkpoint given to `--resume` is older than another checkpoint in the run's own folder.
    #[error(
        "{}: {} is newer; resume from it with {resume_auto}, remove it, or choose another folder with \
         {output}",
        Setting::Resume.to(EscapedPath(path)),
        EscapedPath(newer),
        resume_auto = Setting::Resume.to("auto"),
        output = Setting::Output
    )]
    OlderCheckpoint {
        /// Path of the given checkpoint.
        path: PathBuf,
        /// Path of the newest checkpoint of the run.
        newer: PathBuf,
    },
    /// The configuration in a checkpoint cannot be parsed.
    #[error("the configuration of a checkpoint")]
    CheckpointConfig {
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// More training runs than colours.
    #[error("{count} training runs; at most {most} can be told apart, so give fewer folders")]
    TooManyRuns {
        /// Number of runs.
        count: usize,
        /// Maximum number of runs.
        most: usize,
    },
    /// The folder is no folder of a training run, or the run ended before its first step.
    #[error(
        "{}: there is no metrics.jsonl in it; give the output folder of a {train} that has begun to train",
        EscapedPath(folder),
        train = Command::Train
    )]
    NoMetrics {
        /// The folder.
        folder: PathBuf,
    },
    /// A checkpoint has other tensors (names, shapes or element types) than the model.
    #[error("{} was written for another model: {difference}", EscapedPath(path))]
    OtherModel {
        /// Path of the checkpoint.
        path: PathBuf,
        /// The first difference.
        difference: ModelDifference,
    },
}

/// Error of opening a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file of the checkpoint cannot be read.
    #[error("{file}: {source}")]
    Unreadable {
        /// Name of the file.
        file: String,
        /// Error of the system.
        source: io::Error,
    },
    /// The record is not valid JSON, or its fields differ from a record's.
    #[error("{file} is damaged: {source}")]
    NotARecord {
        /// Name of the file.
        file: &'static str,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// The size or hash of a file differs from the recorded one.
    #[error("{file} is damaged")]
    Damaged {
        /// Name of the file.
        file: String,
    },
}

/// A difference between the configuration of a run and that of its checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ConfigDifference {
    /// A key that changes results has another value.
    Key {
        /// The key, with dots between section and name.
        key: String,
        /// Value in the checkpoint's configuration.
        was: Value,
        /// Value in the run's configuration.
        is: Value,
    },
    /// Only one of the two runs evaluates, so one trains on data that the other holds out.
    HeldOut {
        /// Whether the run of the checkpoint evaluated, for which it held data out.
        evaluated: bool,
    },
    /// The learning-rate schedule ends at another step.
    ScheduleEnd {
        /// Last step of the schedule in the checkpoint's configuration; `None` without an end.
        was: Option<u64>,
        /// Last step of the schedule in the run's configuration; `None` without an end.
        is: Option<u64>,
    },
    /// The learning-rate schedule ends after another number of epochs.
    ScheduleEpochs {
        /// Number of epochs in the checkpoint's configuration; `None` if it ended by steps.
        was: Option<u64>,
        /// Number of epochs in the run's configuration; `None` if it ends by steps.
        is: Option<u64>,
    },
}

impl fmt::Display for ConfigDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key { key, was, is } => write!(f, "`{key}` was {was}, is {is}"),
            Self::HeldOut { evaluated: true } => {
                write!(f, "the run held data out for run.evaluate_every, and does not without it")
            }
            Self::HeldOut { evaluated: false } => {
                write!(f, "the run held no data out, and does with run.evaluate_every")
            }
            Self::ScheduleEnd { was, is } => {
                let [was, is] = [was, is].map(|end| match end {
                    Some(step) => format!("at step {step}"),
                    None => "never".to_owned(),
                });
                write!(f, "the schedule ended {was}, ends {is}; schedule.steps says where")
            }
            Self::ScheduleEpochs { was, is } => {
                let [was, is] = [was, is].map(|epochs| match epochs {
                    Some(n) => format!("after {n} epochs"),
                    None => "by steps".to_owned(),
                });
                write!(f, "the schedule ended {was}, ends {is}; schedule.steps says where")
            }
        }
    }
}

/// A difference between the model of a run and that of its checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelDifference {
    /// A file of the checkpoint has another number of tensors than the model.
    #[error("{file} holds {found} tensors, the model has {wanted}")]
    Count {
        /// Name of the file.
        file: String,
        /// Number of tensors in the file.
        found: usize,
        /// Number of tensors of the model.
        wanted: usize,
    },
    /// A tensor has another element type.
    #[error("{tensor} was {was}, is {is}")]
    ElementType {
        /// Name of the tensor.
        tensor: String,
        /// Element type in the checkpoint.
        was: &'static str,
        /// Element type in the model.
        is: &'static str,
    },
}

/// Number of words that an error lists.
const LISTED: usize = 8;

/// The first words of a list, printable.
fn listed(words: &[String]) -> String {
    let first: Vec<String> = words.iter().take(LISTED).map(|word| Name(word).to_string()).collect();
    if words.len() > LISTED { format!("{} and others", first.join(", ")) } else { first.join(", ") }
}

/// Phase of a training run in which a device ran out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainPhase {
    /// The allocation of the arena and the load of the weights.
    Start,
    /// The forward and backward pass of a micro-batch.
    MicroStep,
    /// The update of the weights.
    Update,
    /// An evaluation.
    Evaluation,
    /// The transfer of tensors to a checkpoint.
    Checkpoint,
}

impl fmt::Display for TrainPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "allocation of the arena",
            Self::MicroStep => "micro-step",
            Self::Update => "update of the weights",
            Self::Evaluation => "evaluation",
            Self::Checkpoint => "checkpoint",
        })
    }
}

impl TrainError {
    /// Whether a device had too little memory for what was asked.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Runtime(error) if is_out_of_memory(error))
    }

    /// Converts an error of a lack of memory to one with the phase, what holds the memory and what to try; returns other
    /// errors unchanged. `dynamic`: whether the run changes the size of its micro-steps. `smaller`: the numbers of tokens of
    /// the smaller micro-steps that were tried.
    pub(crate) fn in_phase(
        self,
        step: u64,
        phase: TrainPhase,
        report: MemoryReport,
        dynamic: bool,
        smaller: &[u64],
    ) -> Self {
        let source = match self {
            Self::Runtime(error) if is_out_of_memory(&error) => error,
            other => return other,
        };
        let tokens = smaller.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        Self::OutOfMemory {
            step,
            phase,
            tried: if smaller.is_empty() {
                String::new()
            } else {
                format!(", also with micro-steps of {tokens} tokens")
            },
            largest: report.largest,
            holders: if report.holders.is_empty() { String::new() } else { format!("; {}", report.holders) },
            remedy: if dynamic {
                "End other processes, or lower memory.budget or memory.dynamic.min_batch; the same command resumes \
                 from the last checkpoint, if there is one"
            } else {
                "End other processes, lower memory.budget, or give memory.dynamic, with which micro-steps shrink; \
                 the same command resumes from the last checkpoint, if there is one"
            },
            source: Box::new(source),
        }
    }
}

fn is_out_of_memory(error: &RuntimeError) -> bool {
    matches!(error, RuntimeError::Device(error) if error.is_out_of_memory())
}

impl<E: Into<RuntimeError>> From<E> for TrainError {
    fn from(error: E) -> Self {
        Self::Runtime(error.into())
    }
}

impl Failure for TrainError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        match self {
            // The error of the device gives the exit code, and the limit of the system that it met.
            Self::Runtime(error) => Some(error),
            Self::OutOfMemory { source, .. } => Some(source),
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
            | Self::PlanOfDynamic { .. }
            | Self::NotConfirmed { .. }
            | Self::WithoutWeights { .. }
            | Self::OtherClasses { .. }
            | Self::TeacherTask { .. }
            | Self::TeacherVocabulary { .. }
            | Self::NoModel { .. }
            | Self::OtherFamily { .. }
            | Self::LoraWithoutHead { .. }
            | Self::HeadParts { .. }
            | Self::Vocabulary { .. }
            | Self::EmbeddingsWithoutHead
            | Self::UnknownFormat { .. }
            | Self::SeveralFormats { .. }
            | Self::IdsWithoutVocabulary
            | Self::NoTokenizer
            | Self::WithoutOutputProjection { .. }
            | Self::ValidationOfEmbeddings
            | Self::EmptyEpoch
            | Self::NothingToEvaluate
            | Self::LossNotFinite { .. }
            | Self::GradientsNotFinite { .. }
            | Self::NoRunOfCheckpoint { .. }
            | Self::EvaluationWithoutData { .. }
            | Self::NothingHeldOut { .. }
            | Self::CheckpointName { .. }
            | Self::PredictionFolder { .. }
            | Self::ForeignFolder { .. }
            | Self::EvaluationOfAdapters { .. }
            | Self::DataOfHead
            | Self::ScoresNotFinite
            | Self::NoMetrics { .. }
            | Self::TooManyRuns { .. }
            | Self::StepsSkipped { .. }
            | Self::EveryStepSkipped { .. }
            | Self::NoRoomForCheckpoint { .. }
            | Self::ClassWords { .. }
            | Self::Nucleotides { .. } => 1,
            Self::OutOfMemory { .. } | Self::TooManyScores { .. } => 4,
            Self::DataPosition { .. }
            | Self::PositionBeforePacks
            | Self::CheckpointExists { .. }
            | Self::OtherConfiguration { .. }
            | Self::NoUsableCheckpoint { .. }
            | Self::NoCheckpoint { .. }
            | Self::BadCheckpoint { .. }
            | Self::OlderCheckpoint { .. }
            | Self::CheckpointConfig { .. }
            | Self::OtherModel { .. }
            | Self::OtherTeachers => 3,
        }
    }
}
