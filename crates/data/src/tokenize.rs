//! Sequences to token ids: ESM-2's alphabet by hand, DNABERT-S's BPE by own tables or by the library
//! its authors used. Invariant: the ids are those that the model was trained with, special tokens
//! included, and what the vocabulary does not know is counted, never dropped.

pub mod bpe;
pub mod esm;

pub use bpe::{Bpe, BpeKind};
