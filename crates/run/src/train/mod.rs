//! `plimsoll train`: from a configuration to a trained model. Invariant: a run that was broken and goes on has the bits
//! of one that was not.

pub mod config;
pub mod schedule;
