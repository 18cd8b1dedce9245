//! The documents of a side in the epoch's order. Invariant: the order is a function of the seed, the epoch and
//! the data; every document of the side comes once an epoch; a window's bytes are bounded.

use std::sync::Arc;

use super::dataset::{Inner, Side};
use super::position::{Position, Window};
use super::random::Key;
use super::settings::Shuffle;
use super::source::{Document, Documents};
use super::split::Split;
use crate::{DataError, DataErrorKind};

/// Documents that are read at a time where none moves.
const UNMOVED: Shuffle = Shuffle { documents: 256, bytes: 1 << 20 };

/// Words of a key, so that numbers for different ends differ.
#[derive(Clone, Copy)]
enum Purpose {
    Files,
    First,
    Window,
}

/// Reads windows, one after the other, over all epochs.
pub(super) struct Windows {
    inner: Arc<Inner>,
    split: Split,
    epoch: u64,
    /// The files in the epoch's order.
    order: Vec<usize>,
    /// The place in `order` of the file that is being read, and how many of its documents were.
    file: usize,
    read: u64,
    open: Option<Documents>,
    document: Document,
    /// The window that was read last.
    pub window: Window,
    text: Vec<u8>,
    entries: Vec<Entry>,
}

/// A document of a window.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    start: usize,
    end: usize,
    /// Its class.
    pub class: i32,
    /// Its file, and its number in it from 1.
    pub file: usize,
    pub number: u64,
}

impl Windows {
    /// The windows from the one of a position on.
    pub(super) fn new(inner: Arc<Inner>, split: Split, from: &Position) -> Result<Self, DataError> {
        let (bytes, documents) = room(&inner.settings.shuffle, inner.census.longest, inner.side(split));
        let mut new = Windows {
            split,
            epoch: from.epoch,
            order: Vec::new(),
            file: from.window.file as usize,
            read: 0,
            open: None,
            document: Document { bytes: Vec::with_capacity(inner.reader[1]), class: 0 },
            // The next one is that of the position.
            window: Window { number: from.window.number.wrapping_sub(1), ..from.window },
            text: Vec::with_capacity(bytes),
            entries: Vec::with_capacity(documents),
            inner,
        };
        new.order_files();
        new.skip(from.window.skip)?;
        Ok(new)
    }

    /// The epoch of the window.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Goes on to the next epoch.
    pub(super) fn next_epoch(&mut self) {
        (self.epoch, self.file, self.read, self.open) = (self.epoch + 1, 0, 0, None);
        self.window = Window { number: u64::MAX, ..Window::default() };
        self.order_files();
    }

    /// The documents of the window, in its order.
    pub(super) fn documents(&self) -> impl Iterator<Item = (Entry, &[u8])> {
        self.entries.iter().map(|entry| (*entry, &self.text[entry.start..entry.end]))
    }

    /// Reads the next window; false at the end of the epoch.
    pub(super) fn fill(&mut self) -> Result<bool, DataError> {
        let number = self.window.number.wrapping_add(1);
        self.window = Window { number, file: self.file as u32, skip: self.read };
        self.text.clear();
        self.entries.clear();
        let (bytes, documents) = self.size();
        while self.text.len() < bytes && self.entries.len() < documents && self.advance()? {
            if self.document.bytes.is_empty() || !self.inner.is_on(self.split, &self.document.bytes) {
                continue;
            }
            let start = self.text.len();
            self.text.extend_from_slice(&self.document.bytes);
            let (class, file) = (self.document.class, self.order[self.file]);
            self.entries.push(Entry { start, end: self.text.len(), class, file, number: self.read });
        }
        if self.moves() {
            self.key(Purpose::Window).with(number).shuffle(&mut self.entries);
        }
        Ok(!self.entries.is_empty())
    }

    /// Bytes and documents at which the window ends. The first of an epoch is shorter by chance, so that its
    /// borders lie elsewhere than in the epoch before.
    fn size(&self) -> (usize, usize) {
        let (bytes, documents) = most(&self.inner.settings.shuffle);
        if self.moves() && self.window.number == 0 {
            let part = self.key(Purpose::First).unit();
            return ((bytes as f64 * part) as usize + 1, (documents as f64 * part) as usize + 1);
        }
        (bytes, documents)
    }

    fn moves(&self) -> bool {
        self.split == Split::Train && self.inner.settings.shuffle.moves()
    }

    fn order_files(&mut self) {
        self.order = (0..self.inner.files(self.split).paths.len()).collect();
        if self.moves() {
            self.key(Purpose::Files).shuffle(&mut self.order);
        }
    }

    fn key(&self, purpose: Purpose) -> Key {
        Key::new(self.inner.settings.seed).with(self.epoch).with(purpose as u64)
    }

    /// Reads over documents of the file it stands at.
    fn skip(&mut self, documents: u64) -> Result<(), DataError> {
        let file = self.file;
        while self.read < documents {
            if !self.advance()? || self.file != file {
                let what = "the position is behind the end of a file; it was damaged".to_owned();
                return Err(DataError::new(DataErrorKind::Malformed(what)));
            }
        }
        Ok(())
    }

    /// Reads the next document of the files, of either side; false behind the last file.
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
                // A longer one would go beyond what was planned.
                match self.document.bytes.len() <= self.inner.census.longest {
                    true => return Ok(true),
                    false => return Err(changed(files.paths[file].as_path())),
                }
            }
            if self.read != files.documents[file] {
                return Err(changed(files.paths[file].as_path()));
            }
            (self.file, self.read, self.open) = (self.file + 1, 0, None);
        }
    }
}

/// Bytes and documents of a window, whose last document may go beyond the bytes.
fn most(shuffle: &Shuffle) -> (usize, usize) {
    let Shuffle { documents, bytes } = if shuffle.moves() { *shuffle } else { UNMOVED };
    (bytes, documents)
}

/// Bytes and documents for which a window has room: never more than there are on its side.
pub(super) fn room(shuffle: &Shuffle, longest: usize, side: &Side) -> (usize, usize) {
    let (bytes, documents) = most(shuffle);
    let least = |most: usize, there: u64| usize::try_from(there).map_or(most, |there| most.min(there));
    (least(bytes.saturating_add(longest), side.bytes), least(documents, side.documents))
}

fn changed(path: &std::path::Path) -> DataError {
    let what = "it was changed while it was trained on; start again".to_owned();
    DataError::at(path, DataErrorKind::Malformed(what))
}
