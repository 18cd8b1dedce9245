//! How far training data was consumed. Invariant: a position is small, whatever the data, and the batches that
//! follow it are those that followed it before, bit for bit.
//!
//! The price of beginning there again: the file in which the window starts is read from its start (without
//! making tokens of it), and the window itself.

use serde::{Deserialize, Serialize};

/// A place in the training data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// What it is a place in: of the documents, the seed, the order and the tokenizer. Batches of another size
    /// may follow.
    pub data: String,
    /// From 0.
    pub epoch: u64,
    /// The window of the epoch, and where it starts.
    pub window: Window,
    /// Documents of the window, in its order, that are consumed.
    pub place: u32,
    /// Tokens of the next document that are consumed.
    pub token: u32,
}

/// The documents that change places with each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// From 0.
    pub number: u64,
    /// The file it starts in, in the epoch's order.
    pub file: u32,
    /// Documents of that file before it, of either side.
    pub skip: u64,
}
