//! Writes windows to the journal as they are finished. Invariant: what `commit` has returned for is on disk;
//! windows are given in the order of their numbers.

use super::{END, Entry};
use data::DataError;
use data::journal::Journal;
use std::time::{Duration, Instant};

/// A block is not kept waiting once it is this large.
const MOST: usize = 8 << 20;

/// Writes windows to the journal.
pub(crate) struct Keeper {
    journal: Journal,
    /// Entries that are not on disk yet.
    block: Vec<u8>,
    /// The record of the last of them.
    record: String,
    /// Seconds between two commits.
    every: Duration,
    last: Instant,
    /// Entries on disk.
    pub(crate) committed: u64,
    waiting: u64,
}

impl Keeper {
    pub(crate) fn new(journal: Journal, every: Duration, committed: u64) -> Self {
        let (block, record, last) = (vec![], String::new(), Instant::now());
        Self { journal, block, record, every, last, committed, waiting: 0 }
    }

    /// Takes a window.
    pub(crate) fn keep(&mut self, entry: &Entry) -> Result<(), DataError> {
        let before = (self.waiting > 0).then_some(self.record.as_str());
        entry.encode(before, &mut self.block);
        self.record.clone_from(&entry.record);
        self.waiting += 1;
        if self.block.len() >= MOST { self.commit() } else { Ok(()) }
    }

    /// Commits what waits, if it has waited long enough.
    pub(crate) fn commit_if_due(&mut self) -> Result<(), DataError> {
        if self.last.elapsed() >= self.every { self.commit() } else { Ok(()) }
    }

    /// Commits what waits.
    pub(crate) fn commit(&mut self) -> Result<(), DataError> {
        self.last = Instant::now();
        if self.waiting == 0 {
            return Ok(());
        }
        self.journal.append(&self.block)?;
        self.block.clear();
        self.committed += std::mem::take(&mut self.waiting);
        Ok(())
    }

    /// Commits what waits, and says that this is all.
    pub(crate) fn finish(mut self) -> Result<(), DataError> {
        self.commit()?;
        self.journal.append(END)
    }
}
