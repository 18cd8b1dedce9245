//! Models as functions from a configuration to a graph, and the tables that go with them: known
//! configurations and the names of weights.
//!
//! Invariant of the crate: it depends on `graph` alone. A model is defined once, here, for every device,
//! for inference, training and pricing.
#![forbid(unsafe_code)]

mod config;
mod dnabert_s;
mod esm2;
mod known;
mod layers;
mod mlp_head;
mod names;

pub use config::{ConfigError, Encoder, Output};
pub use dnabert_s::{DnabertConfig, dnabert_s};
pub use esm2::{Esm2Config, esm2};
pub use known::{KNOWN, known};
pub use mlp_head::{HeadConfig, mlp_head};
pub use names::{candidates, derived, twins};
