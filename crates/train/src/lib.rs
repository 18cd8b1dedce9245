//! The trainer behind `plimsoll train`: reads a configuration, plans the training step within a memory budget and runs
//! it. Invariant: a run that was interrupted and resumed ends with bit-identical weights to an uninterrupted run.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod classification;
pub mod config;
mod engine;
mod error;
pub mod feed;
mod metrics;
pub mod priced;
mod resume;
pub mod schedule;
mod state;
mod tensorboard;
mod tokenizer;
mod trainable;
mod trainer;

pub use config::ConfigError;
pub use engine::{EvaluationReport, EvaluationRequest, Largest, Size, evaluate, largest, open, plan_of};
pub use error::{CheckpointError, ConfigDifference, ModelDifference, TrainError};
pub use plimsoll_plan::TRAINING_DEPTH;
pub use resume::Resume;
pub use state::{Best, LossScale, RunState};
pub use trainable::{
    Applied, Auxiliary, Evaluated, InstructionTime, MicroStepResult, StatePart, Stored, Taken, Trainable,
};
pub use trainer::{Ended, Open, Request, TrainReport, train_with};
