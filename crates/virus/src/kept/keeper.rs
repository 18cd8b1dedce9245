//! Writes windows to the journal as they are finished. Invariant: what `commit` has returned for is on disk;
//! windows are given in the order of their numbers; nothing is committed that was read from an input after it
//! changed, for the journal's key names the input as it was.

use super::{END, Entry};
use crate::VirusError;
use data::journal::Journal;
use runtime::RuntimeError;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// Input files as they were when the run began.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch(Vec<(PathBuf, Option<(u64, SystemTime)>)>);

impl Watch {
    pub(crate) fn over(inputs: &[PathBuf]) -> Self {
        Self(inputs.iter().map(|path| (path.clone(), stamp(path).ok().flatten())).collect())
    }

    /// The inputs are still what they were. One that is gone is: what was read of it was read before.
    fn unchanged(&self) -> Result<(), VirusError> {
        for (path, before) in &self.0 {
            let now = stamp(path).map_err(RuntimeError::io(path))?;
            if now.is_some() && now != *before {
                return Err(changed(path));
            }
        }
        Ok(())
    }
}

/// An input whose results would be of no file that there ever was.
pub(crate) fn changed(path: &std::path::Path) -> VirusError {
    VirusError::InputChanged { path: path.to_owned() }
}

/// Size and time of the last change; `None` where the file is not there.
fn stamp(path: &PathBuf) -> std::io::Result<Option<(u64, SystemTime)>> {
    match fs::metadata(path) {
        Ok(facts) => Ok(Some((facts.len(), facts.modified()?))),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Writes windows to the journal.
pub(crate) struct Keeper {
    journal: Journal,
    watch: Watch,
    /// Entries that are not on disk yet.
    block: Vec<u8>,
    /// The record of the last of them.
    record: String,
    /// A block is not kept waiting once it is this large.
    most: usize,
    /// Seconds between two commits.
    every: Duration,
    last: Instant,
    /// Entries on disk.
    pub(crate) committed: u64,
    waiting: u64,
}

impl Keeper {
    pub(crate) fn new(journal: Journal, watch: Watch, every: Duration, committed: u64, most: usize) -> Self {
        let (block, record, last) = (vec![], String::new(), Instant::now());
        Self { journal, watch, block, record, most, every, last, committed, waiting: 0 }
    }

    /// Takes a window.
    pub(crate) fn keep(&mut self, entry: &Entry) -> Result<(), VirusError> {
        let before = (self.waiting > 0).then_some(self.record.as_str());
        entry.encode(before, &mut self.block);
        self.record.clone_from(&entry.record);
        self.waiting += 1;
        if self.block.len() >= self.most { self.commit() } else { Ok(()) }
    }

    /// Commits what waits, if it has waited long enough.
    pub(crate) fn commit_if_due(&mut self) -> Result<(), VirusError> {
        if self.last.elapsed() >= self.every { self.commit() } else { Ok(()) }
    }

    /// Commits what waits.
    pub(crate) fn commit(&mut self) -> Result<(), VirusError> {
        self.last = Instant::now();
        if self.waiting == 0 {
            return Ok(());
        }
        self.watch.unchanged()?;
        self.journal.append(&self.block)?;
        self.block.clear();
        self.committed += std::mem::take(&mut self.waiting);
        Ok(())
    }

    /// Commits what waits, and says that this is all.
    pub(crate) fn finish(mut self) -> Result<(), VirusError> {
        self.commit()?;
        Ok(self.journal.append(END)?)
    }
}
