//! The journal of finished rows, from which an interrupted run resumes. Invariant: a row is taken from the journal only
//! for the record and the run that it was written for; rows are in the order of the input, so that a journal has those
//! of the first sequences.
//!
//! A block is a byte that says what it is, then a part of the entries or a number. An entry is the number of bytes of the
//! name, the name, the number of values (u32, u32 and u64, little-endian for all), and the values. Entries follow one
//! another without regard to blocks; after a restart the first block starts a new entry, and an incomplete one before it
//! is ignored.

use crate::EmbedError;
use crate::input::SequenceRecord;
use plimsoll_data::DataErrorKind;
use plimsoll_data::journal::{Blocks, Journal};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::identity::{InputStamps, difference};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// First byte of a block that starts with an entry.
const START: u8 = 0;
/// First byte of a block that continues the entry of the block before it.
const MORE: u8 = 1;
/// First byte of a block with the number of a result whose files are about to be committed.
const RESULT: u8 = 2;

/// The journal of a run.
pub(crate) struct JournalPlan {
    /// The file.
    pub(crate) path: PathBuf,
    /// Version, command and identity of the run.
    pub(crate) key: Value,
    /// Bytes of a block.
    pub(crate) block: usize,
    /// Time between two commits.
    pub(crate) every: Duration,
    /// The inputs as they were before the first pass over them.
    pub(crate) stamps: InputStamps,
}

/// An opened journal.
pub(crate) struct OpenedRowJournal {
    pub(crate) writer: RowJournal,
    /// The rows of an interrupted run; `None` for a new journal.
    pub(crate) replay: Option<RowReplay>,
    /// Number of results whose files the interrupted run may have committed.
    pub(crate) committed: usize,
}

impl JournalPlan {
    /// Opens the journal of an interrupted run, or creates one. A journal of another run is replaced only with `force`, or
    /// if it has no row.
    pub(crate) fn open(self, force: bool) -> Result<OpenedRowJournal, EmbedError> {
        let Some(blocks) = Blocks::open(&self.path).map_err(|e| self.unusable(e))? else {
            return self.create();
        };
        let found: Option<Value> = serde_json::from_slice(blocks.key()).ok();
        let other = match &found {
            Some(found) => self.other_run(found),
            None => Some("it is no journal of embeddings".to_owned()),
        };
        if let Some(what) = other {
            let mut blocks = blocks;
            let has_rows = blocks.next_into(&mut vec![]).unwrap_or(true);
            if force || !has_rows {
                return self.create();
            }
            return Err(EmbedError::OtherRun { path: self.path, what });
        }
        let mut scanned = JournalEntries::new(&self.path, blocks);
        let mut rows = 0;
        let mut values = vec![];
        while scanned.next(&mut values).map_err(|e| self.unusable_row(e))?.is_some() {
            rows += 1;
        }
        let committed = scanned.committed;
        let journal = scanned.blocks.into_journal()?;
        let reopened = Blocks::open(&self.path)?
            .ok_or_else(|| RuntimeError::bug("the journal of the run has disappeared"))?;
        let replay = RowReplay { entries: JournalEntries::new(&self.path, reopened), rows, values };
        let mut writer = self.writer(journal);
        writer.is_unused = rows == 0 && committed == 0;
        Ok(OpenedRowJournal { writer, replay: Some(replay), committed })
    }

    fn create(self) -> Result<OpenedRowJournal, EmbedError> {
        let journal = Journal::create(&self.path, self.key.to_string().as_bytes())?;
        Ok(OpenedRowJournal { writer: self.writer(journal), replay: None, committed: 0 })
    }

    fn writer(self, journal: Journal) -> RowJournal {
        let Self { path, block, every, stamps, .. } = self;
        RowJournal {
            journal,
            path,
            stamps,
            block: vec![],
            most: block,
            every,
            last: Instant::now(),
            is_entry_open: false,
            is_unused: true,
        }
    }

    /// The first difference from the run of the key `found`; `None` for this run.
    fn other_run(&self, found: &Value) -> Option<String> {
        for (field, name) in [("plimsoll", "version"), ("command", "command")] {
            if found[field] != self.key[field] {
                return Some(format!("{name}: was {}, is {}", found[field], self.key[field]));
            }
        }
        difference(&found["identity"], &self.key["identity"])
    }

    fn unusable(&self, error: plimsoll_data::DataError) -> EmbedError {
        match error.kind {
            DataErrorKind::Damaged(what) => EmbedError::Journal { path: self.path.clone(), what },
            _ => error.into(),
        }
    }

    fn unusable_row(&self, error: EmbedError) -> EmbedError {
        match error {
            EmbedError::Runtime(RuntimeError::Data(error)) => self.unusable(error),
            other => other,
        }
    }
}

/// Writer of the journal.
pub(crate) struct RowJournal {
    journal: Journal,
    path: PathBuf,
    stamps: InputStamps,
    /// The block that is not on disk yet; empty, or a first byte and its content.
    block: Vec<u8>,
    /// Bytes at which a block is committed.
    most: usize,
    every: Duration,
    last: Instant,
    /// Whether the last entry is incomplete.
    is_entry_open: bool,
    /// Whether the journal has no block.
    is_unused: bool,
}

/// A journal from which nothing can be resumed is not left behind.
impl Drop for RowJournal {
    fn drop(&mut self) {
        if self.is_unused {
            // An error cannot be reported from `drop`, and the next run replaces the file.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl RowJournal {
    /// Appends the values of a sequence. They are on disk after the next commit.
    pub(crate) fn append(&mut self, id: &str, values: &[f32]) -> Result<(), EmbedError> {
        self.bytes(&(id.len() as u32).to_le_bytes())?;
        // After the first bytes: a block that begins with them is a `START`, one that begins later a `MORE`. Without
        // the `START`, a reader would continue an entry that an interruption has cut with the bytes of this one.
        self.is_entry_open = true;
        self.bytes(id.as_bytes())?;
        self.bytes(&(values.len() as u64).to_le_bytes())?;
        for part in values.chunks(1 << 14) {
            let bytes: Vec<u8> = part.iter().flat_map(|x| x.to_le_bytes()).collect();
            self.bytes(&bytes)?;
        }
        self.is_entry_open = false;
        if self.last.elapsed() >= self.every { self.commit() } else { Ok(()) }
    }

    /// Records that the files of result number `result` are about to be committed, after all of its rows.
    pub(crate) fn result(&mut self, result: usize) -> Result<(), EmbedError> {
        self.commit()?;
        let mut block = vec![RESULT];
        block.extend((result as u64).to_le_bytes());
        self.is_unused = false;
        Ok(self.journal.append(&block)?)
    }

    /// Commits what was appended.
    pub(crate) fn commit(&mut self) -> Result<(), EmbedError> {
        self.last = Instant::now();
        if self.block.is_empty() {
            return Ok(());
        }
        // Before the append: rows of a changed input must not be stored under the key of the original one.
        if let Some(path) = self.stamps.changed()? {
            return Err(EmbedError::InputChanged { path: path.to_owned() });
        }
        self.journal.append(&self.block)?;
        self.is_unused = false;
        self.block.clear();
        Ok(())
    }

    /// Removes the journal, after the results are complete and on disk.
    pub(crate) fn remove(self) -> Result<(), EmbedError> {
        Ok(plimsoll_runtime::lock::remove(&self.path)?)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), EmbedError> {
        // The first byte of a block says whether an entry that an earlier block began goes on in it.
        if self.block.is_empty() {
            self.block.push(if self.is_entry_open { MORE } else { START });
        }
        self.block.extend_from_slice(bytes);
        if self.block.len() >= self.most { self.commit() } else { Ok(()) }
    }
}

/// The rows of an interrupted run, in the order of the input.
pub(crate) struct RowReplay {
    entries: JournalEntries,
    /// Number of rows that are left.
    pub(crate) rows: u64,
    values: Vec<f32>,
}

impl RowReplay {
    /// Returns the values of the next sequence; `None` if the journal does not have it.
    pub(crate) fn next(&mut self, sequence: &SequenceRecord) -> Result<Option<&[f32]>, EmbedError> {
        if self.rows == 0 {
            return Ok(None);
        }
        self.rows -= 1;
        let found = self.entries.next(&mut self.values)?;
        if found == Some(&*sequence.id) {
            return Ok(Some(&self.values));
        }
        let found = found.unwrap_or_default();
        let what = format!("the next row is that of '{found}', and the input has '{}'", sequence.id);
        Err(EmbedError::Journal { path: self.entries.path.clone(), what })
    }
}

/// Reader of the entries.
struct JournalEntries {
    path: PathBuf,
    blocks: Blocks,
    block: Vec<u8>,
    /// Bytes of the block that were read.
    at: usize,
    /// Name of the last entry.
    id: String,
    committed: usize,
}

/// Kind of the bytes that follow in a journal.
#[derive(PartialEq, Eq)]
enum Following {
    /// Bytes of the same entry.
    Bytes,
    /// A new entry.
    Entry,
    End,
}

impl JournalEntries {
    fn new(path: &Path, blocks: Blocks) -> Self {
        Self { path: path.to_owned(), blocks, block: vec![], at: 0, id: String::new(), committed: 0 }
    }

    /// Reads the next complete entry: its values into `values`; returns its name. `None` after the last one.
    fn next(&mut self, values: &mut Vec<f32>) -> Result<Option<&str>, EmbedError> {
        let mut bytes = vec![];
        loop {
            if self.at == self.block.len() {
                match self.load()? {
                    Following::Entry => {}
                    Following::End => return Ok(None),
                    Following::Bytes => return Err(self.inconsistent()),
                }
            }
            match self.entry(&mut bytes, values)? {
                Following::Bytes => return Ok(Some(&self.id)),
                // The run was interrupted in this entry, and another has resumed it.
                Following::Entry => {}
                Following::End => return Ok(None),
            }
        }
    }

    /// Reads an entry, unless the journal ends or starts a new entry before its end.
    fn entry(&mut self, bytes: &mut Vec<u8>, values: &mut Vec<f32>) -> Result<Following, EmbedError> {
        let found = self.take(4, bytes)?;
        if found != Following::Bytes {
            return Ok(found);
        }
        let name = number(bytes);
        let found = self.take(name, bytes)?;
        if found != Following::Bytes {
            return Ok(found);
        }
        self.id = String::from_utf8(std::mem::take(bytes)).map_err(|_| self.inconsistent())?;
        let found = self.take(8, bytes)?;
        if found != Following::Bytes {
            return Ok(found);
        }
        let mut left = number(bytes);
        values.clear();
        while left > 0 {
            let some = left.min(1 << 14);
            let found = self.take(4 * some, bytes)?;
            if found != Following::Bytes {
                return Ok(found);
            }
            values.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)));
            left -= some;
        }
        Ok(Following::Bytes)
    }

    /// Reads `count` bytes of an entry into `bytes`.
    fn take(&mut self, count: u64, bytes: &mut Vec<u8>) -> Result<Following, EmbedError> {
        bytes.clear();
        let mut left = count;
        while left > 0 {
            if self.at == self.block.len() {
                let found = self.load()?;
                if found != Following::Bytes {
                    return Ok(found);
                }
            }
            let unread = &self.block[self.at..];
            let some = unread.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            bytes.extend_from_slice(&unread[..some]);
            self.at += some;
            left -= some as u64;
        }
        Ok(Following::Bytes)
    }

    /// Reads the next block with bytes of entries.
    fn load(&mut self) -> Result<Following, EmbedError> {
        loop {
            self.at = 0;
            if !self.blocks.next_into(&mut self.block)? {
                return Ok(Following::End);
            }
            // The first byte is the kind of the block.
            self.at = 1;
            match self.block.first() {
                Some(&START) => return Ok(Following::Entry),
                Some(&MORE) => return Ok(Following::Bytes),
                Some(&RESULT) => {
                    self.committed = number(&self.block[1..]) as usize + 1;
                    // Not a part of the entries.
                    self.at = self.block.len();
                }
                Some(_) | None => return Err(self.inconsistent()),
            }
        }
    }

    fn inconsistent(&self) -> EmbedError {
        EmbedError::Journal { path: self.path.clone(), what: "it holds no rows".to_owned() }
    }
}

/// A little-endian number of up to eight bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |n, &byte| n << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;
    use serde_json::json;
    use std::fs;

    fn plan(folder: &Folder, pool: &str) -> JournalPlan {
        JournalPlan {
            path: folder.path("e.npy.journal"),
            key: json!({"plimsoll": "1", "command": "embed", "identity": {"parameters": {"pool": pool}}}),
            // Small, so that entries are cut.
            block: 50,
            every: Duration::MAX,
            stamps: InputStamps::default(),
        }
    }

    fn rows() -> Vec<(String, Vec<f32>)> {
        let row = |i: usize| (format!("record {i}"), (0..7 * i).map(|k| (i * 100 + k) as f32).collect());
        (0..9).map(row).collect()
    }

    fn sequence(id: &str) -> SequenceRecord {
        SequenceRecord { id: id.to_owned(), length: 1, result: 0 }
    }

    /// Opens the journal and checks its rows; returns it and their number.
    fn replayed(folder: &Folder) -> (OpenedRowJournal, usize) {
        let mut opened = plan(folder, "mean").open(false).expect("opened");
        let mut count = 0;
        while let Some(replay) = &mut opened.replay
            && let Some((id, wanted)) = rows().get(count)
            && let Some(values) = replay.next(&sequence(id)).expect("the row")
        {
            assert_eq!(values, wanted, "{id}");
            count += 1;
        }
        (opened, count)
    }

    /// However often a run is interrupted and at whatever byte, the rows come back in order, and the next run goes on.
    #[test]
    fn rows_come_back_after_a_cut_at_any_byte() {
        let folder = Folder::new("row-journal");
        let path = folder.path("e.npy.journal");
        let whole = {
            let mut opened = plan(&folder, "mean").open(false).expect("created");
            assert!(opened.replay.is_none());
            rows().iter().for_each(|(id, values)| opened.writer.append(id, values).expect("appended"));
            opened.writer.commit().expect("committed");
            fs::read(&path).expect("bytes")
        };
        for cut in (0..whole.len()).step_by(37) {
            fs::write(&path, &whole[..cut]).expect("written");
            let (mut opened, count) = replayed(&folder);
            for (id, values) in &rows()[count..] {
                opened.writer.append(id, values).expect("appended");
            }
            opened.writer.result(0).expect("marked");
            let (opened, count) = replayed(&folder);
            assert_eq!((count, opened.committed), (9, 1), "{cut}");
            opened.writer.remove().expect("removed");
        }
    }

    #[test]
    fn a_journal_of_another_run_is_kept() {
        let folder = Folder::new("row-journal-other");
        let opened = plan(&folder, "mean").open(false).expect("created");
        // Without a row nothing is lost, and nothing is left.
        drop(plan(&folder, "cls").open(false).expect("replaced"));
        assert!(!folder.path("e.npy.journal").exists());
        drop(opened);
        let mut opened = plan(&folder, "mean").open(false).expect("created");
        opened.writer.append("a", &[1.0]).expect("appended");
        opened.writer.commit().expect("committed");
        let error = plan(&folder, "cls").open(false).err().expect("refused").to_string();
        assert!(
            error.contains("`pool` was \"mean\", is \"cls\"") && error.contains("use force to discard"),
            "{error}"
        );
        assert!(plan(&folder, "cls").open(true).expect("replaced").replay.is_none());
    }

    #[test]
    fn a_row_of_another_record_is_not_taken() {
        let folder = Folder::new("row-journal-record");
        let mut opened = plan(&folder, "mean").open(false).expect("created");
        opened.writer.append("a", &[1.0]).expect("appended");
        opened.writer.commit().expect("committed");
        let mut replay = plan(&folder, "mean").open(false).expect("opened").replay.expect("a row");
        let error = replay.next(&sequence("b")).expect_err("refused").to_string();
        assert!(error.contains("'a'") && error.contains("'b'"), "{error}");
    }
}
