//! Position in the training data, stored in checkpoints. Invariant: a position has constant size apart from its
//! digest string, and a stream resumed at a position yields bit for bit the batches of an uninterrupted stream.
//!
//! Cost of resuming: the file in which the shuffle window starts is read again from its beginning (without
//! tokenizing it) up to the window, and then the window itself.

use serde::{Deserialize, Serialize};

/// Position in the training data: the first token that has not been consumed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Digest of the data set: of its documents, seed, shuffling and tokenizer. Batch bounds are not part of it
    /// and may change between runs.
    pub data: String,
    /// Epoch, counted from 0.
    pub epoch: u64,
    /// Shuffle window of the epoch, and where it starts.
    pub window: Window,
    /// Number of documents of the window, in shuffled order, that are consumed.
    pub place: u32,
    /// Number of tokens of the next document that are consumed.
    pub token: u32,
}

/// Shuffle window: a run of consecutive documents that are permuted among themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Number of the window in its epoch, from 0.
    pub number: u64,
    /// Index of the file in which the window starts, in the epoch's file order.
    pub file: u32,
    /// Number of documents of that file before the window, training and validation together.
    pub skip: u64,
}
