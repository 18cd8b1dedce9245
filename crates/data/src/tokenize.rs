//! Tokenizers, from sequences to token ids: ESM-2's one token per residue, and DNABERT-S's byte-pair encoding (BPE)
//! with lookup tables of this crate or with the `tokenizers` crate, which the model's authors used. Invariant: token
//! ids, special tokens included, equal the ids that the model was trained on, and unknown characters are counted, never
//! dropped.

pub mod bpe;
pub mod esm;

pub use bpe::{Bpe, BpeKind};
