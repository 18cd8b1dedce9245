//! Format of the journal: each window with the results of its sequences, in input order. Invariant: an entry
//! identifies its window (number, record, index in the record), so a result can never be assigned to another window.

mod reader;
mod writer;

pub(crate) use reader::{Coverage, JournalReader, ScannedJournal};
pub(crate) use writer::{CommitLimits, InputStamps, JournalWriter, changed};

use crate::VirusError;
use crate::pipeline::queue::{SequenceResult, SequenceState};
use crate::pipeline::shape::{HEAD_CLASSES, SEQUENCES};

/// Journaled results of a window.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct JournalEntry {
    /// Number of the window among all windows of the input, from 0.
    pub(crate) number: u64,
    /// Id of the record.
    pub(crate) record: String,
    /// Index of the window in the record, from 0.
    pub(crate) index: u64,
    /// Sequences in the order of labels.
    pub(crate) sequences: Vec<SequenceResult>,
    /// Concatenated rows of the sequences that did not fail; empty if rows are not journaled.
    pub(crate) rows: Vec<f32>,
}

impl JournalEntry {
    /// Number of sequences with rows.
    fn with_rows(&self) -> usize {
        self.sequences.iter().filter(|sequence| sequence.state != SequenceState::Failed).count()
    }

    /// Returns a row of `width` values for every sequence; NaN for failed sequences.
    pub(crate) fn rows_of_all(&self, width: usize) -> Vec<f32> {
        let mut rows = self.rows.chunks_exact(width.max(1));
        let mut all = Vec::with_capacity(self.sequences.len() * width);
        for sequence in &self.sequences {
            match sequence.state {
                SequenceState::Failed => all.extend(std::iter::repeat_n(f32::NAN, width)),
                SequenceState::Waiting | SequenceState::Scored(_) | SequenceState::Encoded => {
                    all.extend_from_slice(rows.next().unwrap_or_default());
                }
            }
        }
        all
    }

    /// Appends the encoded entry to a block. The record's id is omitted if it equals `before`, the id of the preceding
    /// entry in the block.
    fn encode(&self, before: Option<&str>, block: &mut Vec<u8>) {
        block.extend_from_slice(&self.number.to_le_bytes());
        block.extend_from_slice(&self.index.to_le_bytes());
        if before == Some(&self.record) {
            block.extend_from_slice(&SAME_RECORD.to_le_bytes());
        } else {
            block.extend_from_slice(&(self.record.len() as u32).to_le_bytes());
            block.extend_from_slice(self.record.as_bytes());
        }
        block.push(self.sequences.len() as u8);
        for SequenceResult { label, bases, state } in &self.sequences {
            let (code, scores) = match state {
                // Does not occur: only complete windows are journaled. `decode` refuses the code.
                SequenceState::Waiting => (0, [0.0; HEAD_CLASSES]),
                SequenceState::Scored(scores) => (1, *scores),
                SequenceState::Failed => (2, [0.0; HEAD_CLASSES]),
                SequenceState::Encoded => (3, [0.0; HEAD_CLASSES]),
            };
            block.extend_from_slice(&[*label, code]);
            block.extend_from_slice(&bases.to_le_bytes());
            scores.iter().for_each(|s: &f32| block.extend_from_slice(&s.to_le_bytes()));
        }
        self.rows.iter().for_each(|x| block.extend_from_slice(&x.to_le_bytes()));
    }

    /// Decodes the next entry of a block into `self`, which must hold the preceding entry. Returns false at the end of
    /// the block and `None` if the bytes are not a valid entry. Rows have `width` values.
    fn decode(&mut self, bytes: &mut UnreadBytes<'_>, width: usize) -> Option<bool> {
        if bytes.0.is_empty() {
            return Some(false);
        }
        self.number = bytes.u64()?;
        self.index = bytes.u64()?;
        match bytes.u32()? {
            SAME_RECORD => {}
            length => self.record = String::from_utf8(bytes.take(length as usize)?.to_vec()).ok()?,
        }
        self.sequences.clear();
        for _ in 0..bytes.take(1)?[0] {
            let &[label, code] = bytes.take(2)? else { return None };
            let bases = bytes.u32()?;
            let scores = [bytes.f32()?, bytes.f32()?];
            let state = match code {
                1 => SequenceState::Scored(scores),
                2 => SequenceState::Failed,
                3 => SequenceState::Encoded,
                _ => return None,
            };
            if usize::from(label) >= SEQUENCES {
                return None;
            }
            self.sequences.push(SequenceResult { label, bases, state });
        }
        self.rows.clear();
        // The number of rows is not stored, because it follows from the states decoded above; their width follows from the
        // models, which the journal's key identifies.
        let values = bytes.take(self.with_rows() * width * 4)?;
        self.rows.extend(values.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        Some(true)
    }
}

/// Value of the length field that stands for the record of the preceding entry.
const SAME_RECORD: u32 = u32::MAX;

/// Block that marks a complete journal. It cannot be mistaken for a block of entries, because an entry is longer.
const END_BLOCK: &[u8] = b"end";

/// The unread bytes of a block.
struct UnreadBytes<'a>(&'a [u8]);

impl<'a> UnreadBytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn f32(&mut self) -> Option<f32> {
        Some(f32::from_bits(self.u32()?))
    }
}

/// Returns the error for a journal whose blocks are undamaged and whose entries are inconsistent.
fn inconsistent(path: &std::path::Path, what: &str) -> VirusError {
    VirusError::JournalEntry { path: path.to_owned(), what: what.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<JournalEntry> {
        let entry = |number, record: &str, index, sequences: Vec<(u8, SequenceState)>| {
            let result = |(i, (label, state))| SequenceResult { label, bases: 301 + i as u32, state };
            let sequences = sequences.into_iter().enumerate().map(result).collect();
            let mut entry = JournalEntry { number, record: record.to_owned(), index, sequences, rows: vec![] };
            entry.rows = (0..2 * entry.with_rows()).map(|i| i as f32 + number as f32).collect();
            entry
        };
        vec![
            entry(0, "a", 0, vec![(0, SequenceState::Scored([0.25, 0.75])), (5, SequenceState::Failed)]),
            entry(1, "a", 1, vec![]),
            entry(7, "b|c é", 0, vec![(1, SequenceState::Encoded), (3, SequenceState::Scored([1.0, 0.0]))]),
        ]
    }

    fn block() -> Vec<u8> {
        let mut block = vec![];
        let mut before: Option<String> = None;
        for entry in entries() {
            entry.encode(before.as_deref(), &mut block);
            before = Some(entry.record);
        }
        block
    }

    #[test]
    fn entries_come_back() {
        let block = block();
        let (mut bytes, mut entry) = (UnreadBytes(&block), JournalEntry::default());
        for wanted in entries() {
            assert_eq!(entry.decode(&mut bytes, 2), Some(true));
            assert_eq!(entry, wanted);
        }
        assert_eq!(entry.decode(&mut bytes, 2), Some(false));
    }

    #[test]
    fn half_an_entry_is_none() {
        let block = block();
        for cut in 1..block.len() {
            let (mut bytes, mut entry) = (UnreadBytes(&block[..cut]), JournalEntry::default());
            let mut read = 0;
            let last = loop {
                match entry.decode(&mut bytes, 2) {
                    Some(true) => read += 1,
                    other => break other,
                }
            };
            assert!(read < entries().len() && (last.is_none() || bytes.0.is_empty()), "{cut}");
        }
    }
}
