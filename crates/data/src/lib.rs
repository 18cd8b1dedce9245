//! The data layer of Plimsoll (floor 0). It reads sequence and weight files, splits records into windows, finds open
//! reading frames, tokenizes, packs token sequences into steps, makes packs of training data and writes result files.
//! Invariant: all data streams in input order within bounded memory, results are deterministic, and nothing that is
//! read is ever executed.

#![forbid(unsafe_code)]

pub mod alphabet;
pub mod atomic;
pub mod bases;
pub mod bounded;
pub mod codons;
pub mod destination;
pub mod error;
pub mod foreign;
pub mod hex;
pub mod ids;
pub mod intermediate;
pub mod journal;
pub mod limits;
pub mod names;
pub mod number;
pub mod outputs;
pub mod pack;
pub mod printable;
pub mod rows;
pub mod sequence;
pub mod table;
pub mod tokenize;
pub mod train;
pub mod translate;
pub mod weights;
pub mod window;

pub use error::{DataError, DataErrorKind};
