//! Tools for models and machines: `verify` checks and `bench` times a model; `convert` and `merge` rewrite weights;
//! `list` and `doctor` describe the caches and the machine; `monitor` shows a run. Invariant: every tool reports its failures as a
//! [`ToolError`].
#![forbid(unsafe_code)]

pub mod bench;
pub mod convert;
pub mod doctor;
mod error;
pub mod list;
pub mod merge;
pub mod monitor;
mod text;
pub mod verify;

pub use error::ToolError;
pub use text::write_text;
