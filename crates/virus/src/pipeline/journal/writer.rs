//! The journal writer: appends windows to the journal as they are finished. Invariant: after `commit` has
//! returned, all entries appended before are on disk; windows are appended in ascending order of their numbers;
//! nothing read from an input after it changed is committed, because the journal's key identifies the original
//! input.

use super::{END, JournalEntry};
use crate::VirusError;
use plimsoll_data::journal::Journal;
pub(crate) use plimsoll_runtime::identity::InputStamps;
use std::time::{Duration, Instant};

/// Returns the error for an input that changed while it was read.
pub(crate) fn changed(path: &std::path::Path) -> VirusError {
    VirusError::InputChanged { path: path.to_owned() }
}

/// Writes windows to the journal in blocks.
pub(crate) struct JournalWriter {
    journal: Journal,
    watch: InputStamps,
    /// Encoded entries that are not on disk yet.
    block: Vec<u8>,
    /// Record of the last entry in the block.
    record: String,
    /// Size in bytes at which a block is committed without waiting for the next regular commit.
    most: usize,
    /// Time between two commits.
    every: Duration,
    /// Time of the last commit.
    last: Instant,
    /// Number of entries on disk.
    pub(crate) committed: u64,
    /// Number of entries in the block.
    waiting: u64,
}

impl JournalWriter {
    pub(crate) fn new(
        journal: Journal,
        watch: InputStamps,
        every: Duration,
        committed: u64,
        most: usize,
    ) -> Self {
        let (block, record, last) = (vec![], String::new(), Instant::now());
        Self { journal, watch, block, record, most, every, last, committed, waiting: 0 }
    }

    /// Appends the results of a window.
    pub(crate) fn append(&mut self, entry: &JournalEntry) -> Result<(), VirusError> {
        let before = (self.waiting > 0).then_some(self.record.as_str());
        entry.encode(before, &mut self.block);
        self.record.clone_from(&entry.record);
        self.waiting += 1;
        if self.block.len() >= self.most { self.commit() } else { Ok(()) }
    }

    /// Commits the pending entries if the interval has passed.
    pub(crate) fn commit_if_due(&mut self) -> Result<(), VirusError> {
        if self.last.elapsed() >= self.every { self.commit() } else { Ok(()) }
    }

    /// Commits the pending entries.
    pub(crate) fn commit(&mut self) -> Result<(), VirusError> {
        self.last = Instant::now();
        if self.waiting == 0 {
            return Ok(());
        }
        // Before the append: results of a changed input must not be stored under the key of the original input.
        if let Some(path) = self.watch.changed()? {
            return Err(changed(path));
        }
        self.journal.append(&self.block)?;
        self.block.clear();
        self.committed += std::mem::take(&mut self.waiting);
        Ok(())
    }

    /// Commits the pending entries and marks the journal as complete.
    pub(crate) fn finish(mut self) -> Result<(), VirusError> {
        self.commit()?;
        Ok(self.journal.append(END)?)
    }
}
