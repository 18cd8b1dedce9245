//! Streams of packs of a split. Invariant: the packs depend only on the data set and the start position, and a stream
//! started at the position after a pack continues with the next pack.

use std::sync::Arc;

use super::block::PackedBlock;
use super::dataset::SharedDataset;
use super::packer::PackerThread;
use super::pieces::{PieceCutter, TrainingPack};
use super::position::{DataPosition, ShuffleWindow};
use super::random::RandomKey;
use super::split::Split;
use crate::{DataError, DataErrorKind};

/// Key word of the random numbers for masking ("mask" in ASCII); separates them from the keys of shuffling.
const MASKED: u64 = 0x6d61_736b;

/// Stream of the packs of a split. Its own threads read, tokenize and pack ahead.
pub struct DatasetStream {
    inner: Arc<SharedDataset>,
    split: Split,
    packer: PackerThread,
    cutter: PieceCutter,
    /// The block that is partly consumed.
    block: Option<PackedBlock>,
    /// Number of its packs that are consumed.
    next: usize,
    /// Number of packs of the first block that lie before the start position, and are skipped.
    skips: u32,
    /// Position after the last pack.
    at: DataPosition,
    counts: StreamCounts,
    /// Whether the current epoch has produced a pack, or started before this stream.
    gave: bool,
    /// Whether the stream is finished, after an error or at the end of the validation pass.
    ended: bool,
}

/// Counters of a stream since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Number of packs.
    pub packs: u64,
    /// Number of documents. Documents whose pieces are packed together are counted with the last of their packs.
    pub documents: u64,
    /// Number of sequences.
    pub sequences: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of targets that contribute to the loss.
    pub targets: u64,
    /// Number of unknown tokens in the counted documents.
    pub unknown: u64,
}

impl DatasetStream {
    pub(super) fn new(inner: Arc<SharedDataset>, split: Split, from: DataPosition) -> Result<Self, DataError> {
        let packer = PackerThread::start(&inner, split, from.clone())?;
        let cutter = PieceCutter::new(&inner.settings.task, &inner.settings.bounds, &inner.vocabulary);
        Ok(DatasetStream {
            inner,
            split,
            packer,
            cutter,
            block: None,
            next: 0,
            skips: from.packed,
            gave: from.place > 0 || from.packed > 0 || from.window != ShuffleWindow::default(),
            at: from,
            counts: StreamCounts::default(),
            ended: false,
        })
    }

    /// Fills `pack` with the next pack, reusing its buffers. Returns `false` and an empty pack at the end of an epoch;
    /// on a training stream the next call starts the next epoch.
    ///
    /// # Errors
    /// A document that cannot be read, tokenized or packed; an epoch without a target; a damaged start position. After
    /// an error the stream has ended and returns `false`.
    pub fn fill(&mut self, pack: &mut TrainingPack) -> Result<bool, DataError> {
        pack.clear();
        pack.number = self.at.pack;
        let filled = if self.ended { Ok(false) } else { self.fill_from_blocks(pack) };
        self.ended |= filled.is_err();
        match &mut pack.position_after {
            Some(position) => position.copy_from(&self.at),
            none => *none = Some(self.at.clone()),
        }
        filled
    }

    /// The position of the next pack.
    pub fn position(&self) -> &DataPosition {
        &self.at
    }

    /// The counters since the stream was opened.
    pub fn counts(&self) -> StreamCounts {
        self.counts
    }

    fn fill_from_blocks(&mut self, pack: &mut TrainingPack) -> Result<bool, DataError> {
        loop {
            let block = match self.block.take() {
                Some(block) => block,
                None => self.next_block()?,
            };
            if self.next < block.count() {
                self.take(block, pack);
                return Ok(true);
            }
            // A block whose documents have no targets has no packs.
            let ends_epoch = block.ends_epoch;
            self.give_back(block);
            if ends_epoch {
                return self.end_epoch();
            }
        }
    }

    /// Waits for the next block, and skips the packs of the first block that are before the start position.
    fn next_block(&mut self) -> Result<PackedBlock, DataError> {
        let mut block = self.packer.next().ok_or_else(lost)?;
        if let Some(error) = block.error.take() {
            return Err(error);
        }
        let skips = std::mem::take(&mut self.skips);
        if skips == 0 {
            return Ok(block);
        }
        let DataPosition { epoch, window, place, .. } = self.at;
        let is_here = block.epoch == epoch && block.window == window && block.place == place;
        if !is_here || skips as usize >= block.count() {
            let what =
                "the saved position is after the last pack of its documents, so it is damaged".to_owned();
            return Err(DataError::new(DataErrorKind::Malformed(what)));
        }
        self.next = skips as usize;
        Ok(block)
    }

    /// Moves the next pack of a block into `pack`.
    fn take(&mut self, block: PackedBlock, pack: &mut TrainingPack) {
        let seed = self.inner.settings.seed;
        let key = RandomKey::new(seed).with(MASKED).with(block.epoch).with(block.window.number);
        self.cutter.join(&block, self.next, &self.inner.vocabulary, key, pack);
        self.next += 1;
        self.gave = true;
        self.counts.packs += 1;
        self.counts.sequences += pack.spans.len() as u64;
        self.counts.tokens += pack.ids.len() as u64;
        self.counts.targets += pack.target_tokens;
        self.at.pack += 1;
        self.at.epoch = block.epoch;
        self.at.window = block.window;
        if self.next < block.count() {
            self.at.place = block.place;
            self.at.packed = self.next as u32;
            self.block = Some(block);
            return;
        }
        self.at.place = block.place + block.documents;
        self.at.packed = 0;
        // Returned at once, so that the packer can fill it while the next block is consumed.
        self.give_back(block);
    }

    /// Counts the documents of a consumed block, and returns it to the packer.
    fn give_back(&mut self, block: PackedBlock) {
        self.next = 0;
        self.counts.documents += u64::from(block.documents);
        self.counts.unknown += block.unknown;
        self.packer.give_back(block);
    }

    /// Ends the epoch: moves the position to the start of the next epoch and returns `false`.
    ///
    /// # Errors
    /// An epoch without a pack; without this error a training loop over such data would never end.
    fn end_epoch(&mut self) -> Result<bool, DataError> {
        if !self.gave {
            let what = "no document contains a target: each has fewer than two tokens, or only special tokens";
            let path = &self.inner.files(self.split).paths[0];
            return Err(DataError::at(path, DataErrorKind::NoData(what.to_owned())));
        }
        self.gave = false;
        self.ended = self.split == Split::Validation;
        self.at.epoch += 1;
        self.at.window = ShuffleWindow::default();
        self.at.place = 0;
        self.at.packed = 0;
        Ok(false)
    }
}

/// Error for a thread of a stream that ended without sending an error, which means that it panicked.
pub(super) fn lost() -> DataError {
    DataError::new(DataErrorKind::Malformed(
        "a thread that makes packs has stopped; this is a bug in plimsoll, please report it".to_owned(),
    ))
}
