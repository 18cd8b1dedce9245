//! Plimsoll's data layer (floor 0): bytes -> records -> chunks -> open reading frames -> tokens ->
//! packs, training batches, and result files. Invariant: everything streams in input order with bounded memory, is
//! deterministic, and never executes what it reads.

#![forbid(unsafe_code)]

pub mod alphabet;
pub mod atomic;
pub mod bounded;
pub mod chunk;
pub mod error;
pub mod hex;
pub mod ids;
pub mod intermediate;
pub mod journal;
pub mod limits;
pub mod number;
pub mod pack;
pub mod printable;
pub mod rows;
pub mod sequence;
pub mod tokenize;
pub mod train;
pub mod translate;
pub mod weights;

pub use error::{DataError, DataErrorKind};
