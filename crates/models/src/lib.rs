//! Model definitions: functions that build a [`plimsoll_graph::Graph`] from a configuration, the configurations of published
//! models, and the tensor names of weight files.
//!
//! Invariant of the crate: of the workspace it depends on `graph` alone. Each model has one definition, which
//! inference, training and memory planning share on every device.
#![forbid(unsafe_code)]

mod caller;
mod config;
mod decoder;
mod dnabert_s;
mod esm2;
mod hub;
mod init;
mod known;
mod layers;
mod lora;
mod mlm;
mod mlp_head;
mod model_config;
mod names;
mod sequence_model;
mod training;
mod tuning;

pub use caller::{
    CallerConfig, CallerObjective, CallerTask, Distillation, FRAMES, LM_HEAD as CALLER_LM_HEAD, MAX_TASKS,
    tensor_of_teacher,
};
pub use config::{ConfigError, Encoder, Output};
pub use decoder::{
    Biases, DecoderConfig, Experts, MAX_EXPERTS, Mlp, Norm, Positions, RopeScaling, active_parameters,
    reads_bytes,
};
pub use dnabert_s::{DnabertConfig, dnabert_s};
pub use esm2::{Esm2Config, esm2};
pub use hub::CarriedTensor;
pub use init::{Init, init, init_param};
pub use known::{KNOWN, known, moe};
pub use lora::{Lora, TrainingError};
pub use mlm::TrainingTask;
pub use mlp_head::{HeadConfig, mlp_head};
pub use model_config::ModelConfig;
pub use names::{candidates, decoder_candidates, derived, from_fair_esm, tied_tensors};
pub use sequence_model::SequenceModel;
pub use training::Training;
pub use tuning::{Group, TunedPart, Tuning, group, trains};
