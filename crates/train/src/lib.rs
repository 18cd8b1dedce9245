//! The trainer behind `plimsoll train`: reads a configuration, plans the training step within a memory budget and runs
//! it. Invariant: a run that was interrupted and resumed ends with bit-identical weights to an uninterrupted run.
#![forbid(unsafe_code)]

pub mod charts;
pub mod checkpoint;
pub mod classification;
pub mod config;
pub mod confirm;
mod decision;
mod dynamic;
mod engine;
mod error;
pub mod feed;
mod folder;
pub mod history;
mod metrics;
mod opened_model;
pub mod priced;
mod resume;
mod run_record;
pub mod schedule;
mod state;
mod tensorboard;
mod tokenizer;
mod trainer;
mod watch;

pub use config::TrainConfigError;
pub use decision::Ended;
pub use dynamic::MicroStepSizeChange;
pub use engine::{
    EvaluationReport, EvaluationRequest, LargestDimension, LargestRun, PackBounds, RunMemory, RunPlanReport,
    evaluate, explain, largest, open, plan_of,
};
pub use error::{CheckpointError, ConfigDifference, ModelDifference, TrainError, TrainPhase};
pub use folder::{add_written, check_folder, has_written};
pub use opened_model::{
    Applied, Auxiliary, Batches, ExpertRows, InstructionTime, MemoryReport, MicroBatch, MicroStepResult,
    MicroStepScalars, MicroStepSize, OpenedModel, StatePart, Stepper, StoredTensor, Taken, Tensors, TrainFacts,
};
pub use plimsoll_plan::{TRAINING_DEPTH, TrainingChoice};
pub use resume::Resume;
pub use run_record::TrainRecord;
pub use state::{Best, LossScale, RunState};
pub use trainer::{OpenModel, TrainReport, TrainRequest, train_with, train_with_timeline};
