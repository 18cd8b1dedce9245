//! Reads the documents of a split in the epoch's order, one shuffle window at a time. Invariant: the order is a
//! function of the seed, the epoch and the data; every document of the split occurs once per epoch; the size of a
//! window is bounded.

use std::sync::Arc;

use super::dataset::{SharedDataset, SplitSize};
use super::position::{DataPosition, ShuffleWindow};
use super::random::RandomKey;
use super::settings::Shuffle;
use super::source::{Documents, RawDocument};
use super::split::Split;
use crate::{DataError, DataErrorKind};

/// Window size if shuffling is disabled. It determines how many documents are buffered, and how many are packed together:
/// a few hundred proteins would fill few packs of 16384 tokens, and the last pack of a window is partly empty.
const UNMOVED: Shuffle = Shuffle { documents: 4096, bytes: 1 << 20 };

/// Use of a random number; part of its key, so that different uses draw independent numbers.
#[derive(Clone, Copy)]
enum Purpose {
    /// Permutation of the files.
    Files,
    /// Size of the first window.
    First,
    /// Permutation of the documents of a window.
    ShuffleWindow,
}

/// Reads consecutive shuffle windows of a split, over all epochs.
pub(super) struct WindowReader {
    inner: Arc<SharedDataset>,
    split: Split,
    epoch: u64,
    /// Indices of the files in the epoch's order.
    order: Vec<usize>,
    /// Index in `order` of the file being read.
    file: usize,
    /// Number of documents read from that file, both splits and empty documents included.
    read: u64,
    open: Option<Documents>,
    document: RawDocument,
    /// The window that was read last.
    pub window: ShuffleWindow,
    /// Concatenated documents of the window, in file order.
    text: Vec<u8>,
    /// Documents of the window in shuffled order, as ranges of `text`.
    entries: Vec<ShuffledDocument>,
}

/// A document of a window.
#[derive(Clone, Copy)]
pub(super) struct ShuffledDocument {
    start: usize,
    end: usize,
    /// Class label; 0 if the task has none.
    pub class: i32,
    /// Index of its file.
    pub file: usize,
    /// Its number in the file, from 1.
    pub number: u64,
}

impl WindowReader {
    /// Opens the window sequence at a position; the first call of [`WindowReader::fill`] reads the position's window.
    pub(super) fn new(inner: Arc<SharedDataset>, split: Split, from: &DataPosition) -> Result<Self, DataError> {
        let (bytes, documents) =
            window_capacity(&inner.settings.shuffle, inner.census.longest, inner.side(split));
        let mut new = WindowReader {
            split,
            epoch: from.epoch,
            order: Vec::new(),
            file: from.window.file as usize,
            read: 0,
            open: None,
            document: RawDocument { bytes: Vec::with_capacity(inner.reader[1]), class: 0 },
            // `fill` increments the number; wrapping turns window 0 into `u64::MAX` here and back to 0 there.
            window: ShuffleWindow { number: from.window.number.wrapping_sub(1), ..from.window },
            text: Vec::with_capacity(bytes),
            entries: Vec::with_capacity(documents),
            inner,
        };
        new.order_files();
        new.skip(from.window.skip)?;
        Ok(new)
    }

    /// The current epoch.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Starts the next epoch, with its own file order.
    pub(super) fn next_epoch(&mut self) {
        (self.epoch, self.file, self.read, self.open) = (self.epoch + 1, 0, 0, None);
        self.window = ShuffleWindow { number: u64::MAX, ..ShuffleWindow::default() };
        self.order_files();
    }

    /// Number of documents of the window.
    pub(super) fn count(&self) -> usize {
        self.entries.len()
    }

    /// The documents of the window in shuffled order, with their text.
    pub(super) fn documents(&self) -> impl Iterator<Item = (ShuffledDocument, &[u8])> {
        self.entries.iter().map(|entry| (*entry, &self.text[entry.start..entry.end]))
    }

    /// Reads the next window; false at the end of the epoch.
    pub(super) fn fill(&mut self) -> Result<bool, DataError> {
        let number = self.window.number.wrapping_add(1);
        self.window = ShuffleWindow { number, file: self.file as u32, skip: self.read };
        self.text.clear();
        self.entries.clear();
        let (bytes, documents) = self.size();
        while self.text.len() < bytes && self.entries.len() < documents && self.advance()? {
            if self.document.bytes.is_empty() || !self.inner.is_on(self.split, &self.document.bytes) {
                continue;
            }
            let start = self.text.len();
            self.text.extend_from_slice(&self.document.bytes);
            let class = self.document.class;
            let file = self.order[self.file];
            self.entries.push(ShuffledDocument { start, end: self.text.len(), class, file, number: self.read });
        }
        if self.moves() {
            self.key(Purpose::ShuffleWindow).with(number).shuffle(&mut self.entries);
        }
        Ok(!self.entries.is_empty())
    }

    /// Size in bytes and number of documents at which the current window ends. The first window of an epoch has a
    /// random fraction of the full size, so that window boundaries differ between epochs.
    fn size(&self) -> (usize, usize) {
        let (bytes, documents) = nominal_size(&self.inner.settings.shuffle);
        if self.moves() && self.window.number == 0 {
            // At least one byte and one document (`+ 1`): `fill` takes a window without documents for the end of the
            // epoch.
            let part = self.key(Purpose::First).unit();
            return ((bytes as f64 * part) as usize + 1, (documents as f64 * part) as usize + 1);
        }
        (bytes, documents)
    }

    /// Whether documents are shuffled; validation documents never are.
    fn moves(&self) -> bool {
        self.split == Split::Train && self.inner.settings.shuffle.is_enabled()
    }

    /// Computes the file order of the epoch.
    fn order_files(&mut self) {
        self.order = (0..self.inner.files(self.split).paths.len()).collect();
        if self.moves() {
            self.key(Purpose::Files).shuffle(&mut self.order);
        }
    }

    /// Key of the random numbers for one use in the current epoch.
    fn key(&self, purpose: Purpose) -> RandomKey {
        RandomKey::new(self.inner.settings.seed).with(self.epoch).with(purpose as u64)
    }

    /// Skips forward until `documents` documents of the current file are read.
    ///
    /// # Errors
    /// A file with fewer documents, which means that the position is damaged.
    fn skip(&mut self, documents: u64) -> Result<(), DataError> {
        let file = self.file;
        while self.read < documents {
            if !self.advance()? || self.file != file {
                let what = "the saved position is after the end of a file, so it is damaged".to_owned();
                return Err(DataError::new(DataErrorKind::Malformed(what)));
            }
        }
        Ok(())
    }

    /// Reads the next document, of any split, into `self.document`. Returns `false` after the last file.
    ///
    /// # Errors
    /// A file with another number of documents, or a longer document, than when the data set was opened.
    fn advance(&mut self) -> Result<bool, DataError> {
        loop {
            let Some(&file) = self.order.get(self.file) else { return Ok(false) };
            let files = self.inner.files(self.split);
            if self.open.is_none() {
                let path = &files.paths[file];
                self.open = Some(Documents::open(path, &self.inner.settings, &self.inner.labels)?);
            }
            if let Some(open) = &mut self.open
                && open.read(&mut self.document)?
            {
                self.read += 1;
                // Buffers are sized for the longest document seen when the data set was opened.
                if self.document.bytes.len() > self.inner.census.longest {
                    return Err(changed(files.paths[file].as_path()));
                }
                return Ok(true);
            }
            if self.read != files.documents[file] {
                return Err(changed(files.paths[file].as_path()));
            }
            (self.file, self.read, self.open) = (self.file + 1, 0, None);
        }
    }
}

/// Nominal size in bytes and maximum number of documents of a window; its last document may exceed the size.
fn nominal_size(shuffle: &Shuffle) -> (usize, usize) {
    let Shuffle { documents, bytes } = if shuffle.is_enabled() { *shuffle } else { UNMOVED };
    (bytes, documents)
}

/// Buffer capacity of a window, in bytes and documents, including an overhanging last document of `longest` bytes; at
/// most the size of the split.
pub(super) fn window_capacity(shuffle: &Shuffle, longest: usize, side: &SplitSize) -> (usize, usize) {
    let (bytes, documents) = nominal_size(shuffle);
    (at_most(bytes.saturating_add(longest), side.bytes), at_most(documents, side.documents))
}

/// The smaller of a capacity and of what there is.
fn at_most(capacity: usize, available: u64) -> usize {
    usize::try_from(available).map_or(capacity, |available| capacity.min(available))
}

/// Error for a file that changed after the data set was opened.
fn changed(path: &std::path::Path) -> DataError {
    let what = "it changed while the run read it; start the run again".to_owned();
    DataError::at(path, DataErrorKind::Malformed(what))
}
