//! Tools for models and machines: `verify` and `bench` run a model and check or time it; `convert` and `merge` rewrite
//! weights; `list` and `doctor` describe the caches and the machine.
#![forbid(unsafe_code)]

pub mod bench;
pub mod convert;
pub mod doctor;
mod error;
pub mod list;
pub mod merge;
pub mod verify;

pub use error::ToolError;
