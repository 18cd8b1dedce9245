//! Position in the training data, stored in checkpoints. Invariant: a position has constant size apart from its
//! digest string, and a stream resumed at a position yields bit for bit the packs of an uninterrupted stream.
//!
//! Cost of resuming: the file in which the shuffle window starts is read again from its beginning (without
//! tokenizing it) up to the window, then the window itself, and the documents of one block are tokenized and packed
//! again.

use serde::{Deserialize, Serialize};

/// Largest global pack number of a valid position; low enough that counting on from it does not overflow.
pub(super) const LARGEST_PACK: u64 = 1 << 62;

/// Position in the training data: the first pack that has not been consumed. Documents are packed together in blocks of
/// consecutive documents of a shuffle window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename = "Position")]
pub struct DataPosition {
    /// Digest of the data set: of its documents, seed, shuffling, tokenizer and bounds of a pack.
    pub data: String,
    /// Global pack number of the next pack: the number of packs of the run before it, over all epochs.
    pub pack: u64,
    /// Epoch, counted from 0.
    pub epoch: u64,
    /// Shuffle window of the epoch, and where it starts.
    pub window: ShuffleWindow,
    /// Index in the window, in shuffled order, of the first document of the next pack's block.
    pub place: u32,
    /// Number of packs of the block that are consumed.
    pub packed: u32,
}

impl DataPosition {
    /// Copies a position of the same data without an allocation, which `clone_from` would make for the digest.
    pub(super) fn copy_from(&mut self, from: &DataPosition) {
        self.data.clone_from(&from.data);
        self.pack = from.pack;
        self.epoch = from.epoch;
        self.window = from.window;
        self.place = from.place;
        self.packed = from.packed;
    }
}

/// Shuffle window: a run of consecutive documents that are permuted among themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename = "Window")]
pub struct ShuffleWindow {
    /// Number of the window in its epoch, from 0.
    pub number: u64,
    /// Index of the file in which the window starts, in the epoch's file order.
    pub file: u32,
    /// Number of documents of that file before the window, training and validation together.
    pub skip: u64,
}
