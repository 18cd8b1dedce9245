//! The journal writer: appends windows to the journal as they are finished. Invariant: after `commit` has
//! returned, all entries appended before are on disk; windows are appended in ascending order of their numbers;
//! nothing read from an input after it changed is committed, because the journal's key identifies the original
//! input.

use super::{END_BLOCK, JournalEntry};
use crate::VirusError;
use plimsoll_data::journal::Journal;
pub(crate) use plimsoll_runtime::identity::InputStamps;
use std::time::{Duration, Instant};

/// Returns the error for an input that changed while it was read.
pub(crate) fn changed(path: &std::path::Path) -> VirusError {
    VirusError::InputChanged { path: path.to_owned() }
}

/// When a journal commits the entries of a block.
#[derive(Clone, Copy)]
pub(crate) struct CommitLimits {
    /// Size in bytes at which a block is committed without waiting for the next regular commit.
    pub(crate) block_bytes: usize,
    /// Time between two regular commits.
    pub(crate) interval: Duration,
}

/// Writes windows to the journal in blocks.
pub(crate) struct JournalWriter {
    journal: Journal,
    watch: InputStamps,
    /// Encoded entries that are not on disk yet.
    block: Vec<u8>,
    /// Record of the last entry in the block.
    record: String,
    limits: CommitLimits,
    /// Time of the last commit.
    last_commit: Instant,
    /// Number of entries on disk.
    pub(crate) committed: u64,
    /// Number of entries in the block.
    waiting: u64,
}

impl JournalWriter {
    /// Creates a writer that appends to a journal with `committed` entries.
    pub(crate) fn new(journal: Journal, watch: InputStamps, limits: CommitLimits, committed: u64) -> Self {
        Self {
            journal,
            watch,
            block: vec![],
            record: String::new(),
            limits,
            last_commit: Instant::now(),
            committed,
            waiting: 0,
        }
    }

    /// Appends the results of a window.
    pub(crate) fn append(&mut self, entry: &JournalEntry) -> Result<(), VirusError> {
        let before = (self.waiting > 0).then_some(self.record.as_str());
        entry.encode(before, &mut self.block);
        self.record.clone_from(&entry.record);
        self.waiting += 1;
        if self.block.len() >= self.limits.block_bytes { self.commit() } else { Ok(()) }
    }

    /// Commits the pending entries if the interval has passed.
    pub(crate) fn commit_if_due(&mut self) -> Result<(), VirusError> {
        if self.last_commit.elapsed() >= self.limits.interval { self.commit() } else { Ok(()) }
    }

    /// Commits the pending entries.
    pub(crate) fn commit(&mut self) -> Result<(), VirusError> {
        self.last_commit = Instant::now();
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
        Ok(self.journal.append(END_BLOCK)?)
    }
}
