//! The journal reader: reads windows back in ascending order. Invariant: one block of each journal is in memory at a
//! time; a window's results are returned only for the record and index they were written for.

use super::{END_BLOCK, JournalEntry, UnreadBytes, inconsistent};
use crate::VirusError;
use plimsoll_data::journal::{Blocks, Journal};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The set of windows in a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Coverage {
    /// Ascending, disjoint, non-adjacent ranges of window numbers.
    ranges: Vec<Range<u64>>,
}

impl Coverage {
    /// Whether window `number` is in the set.
    pub(crate) fn contains(&self, number: u64) -> bool {
        let after = self.ranges.partition_point(|r| r.start <= number);
        after > 0 && number < self.ranges[after - 1].end
    }

    /// Number of windows in the set.
    pub(crate) fn count(&self) -> u64 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }

    /// Adds a window with a larger number than all windows in the set.
    fn push(&mut self, number: u64) {
        match self.ranges.last_mut() {
            Some(last) if last.end == number => last.end += 1,
            _ => self.ranges.push(number..number + 1),
        }
    }

    fn union(mut self, other: Self) -> Self {
        // Shards have interleaved ranges; `contains` searches for the last range that starts at or before a number.
        self.ranges.extend(other.ranges);
        self.ranges.sort_by_key(|r| r.start);
        let mut ranges: Vec<Range<u64>> = vec![];
        for range in self.ranges {
            match ranges.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => ranges.push(range),
            }
        }
        Self { ranges }
    }
}

/// Reads several journals window by window.
#[derive(Default)]
pub(crate) struct JournalReader {
    cursors: Vec<JournalCursor>,
    /// Windows that at least one of the journals has.
    pub(crate) coverage: Arc<Coverage>,
}

/// A journal that has been scanned: the windows it covers and whether it is complete.
pub(crate) struct ScannedJournal {
    pub(crate) path: PathBuf,
    pub(crate) coverage: Coverage,
    /// Whether the journal ends with the block [`END_BLOCK`].
    pub(crate) complete: bool,
    /// The reader, after the last block.
    blocks: Blocks,
}

impl ScannedJournal {
    /// Scans a journal whose rows have `width` values; the caller has checked its key.
    pub(crate) fn through(path: &Path, mut blocks: Blocks, width: usize) -> Result<Self, VirusError> {
        let mut coverage = Coverage::default();
        let mut complete = false;
        let mut block = vec![];
        let mut entry = JournalEntry::default();
        let mut next = 0;
        while blocks.next_into(&mut block)? {
            if block == END_BLOCK {
                complete = true;
                continue;
            }
            let mut bytes = UnreadBytes(&block);
            while entry.decode(&mut bytes, width).ok_or_else(|| inconsistent(path, "it holds no results"))? {
                if entry.number < next {
                    return Err(inconsistent(path, "its windows are out of order"));
                }
                next = entry.number + 1;
                coverage.push(entry.number);
            }
        }
        Ok(Self { path: path.to_owned(), coverage, complete, blocks })
    }

    /// Opens the journal for reading, and for appending if it is incomplete. An incomplete frame at its end is
    /// cut off.
    pub(crate) fn open(self, width: usize) -> Result<(JournalReader, Option<Journal>), VirusError> {
        let Self { path, coverage, complete, blocks } = self;
        let journal = (!complete).then(|| blocks.into_journal()).transpose()?;
        Ok((JournalReader::of([(path.as_path(), coverage)], width)?, journal))
    }
}

impl JournalReader {
    /// Opens several journals as one reader.
    pub(crate) fn of<'a>(
        journals: impl IntoIterator<Item = (&'a Path, Coverage)>,
        width: usize,
    ) -> Result<Self, VirusError> {
        let mut reader = Self::default();
        let mut all = Coverage::default();
        for (path, coverage) in journals {
            all = all.union(coverage);
            reader.cursors.extend(JournalCursor::open(path, width)?);
        }
        reader.coverage = Arc::new(all);
        Ok(reader)
    }

    /// Returns the results of window `number`, which must be window `index` of `record`; `None` if no journal has it.
    /// Numbers must ascend.
    pub(crate) fn take(
        &mut self,
        number: u64,
        record: &str,
        index: usize,
    ) -> Result<Option<JournalEntry>, VirusError> {
        if !self.coverage.contains(number) {
            return Ok(None);
        }
        // Several journals can have the window. Each cursor is advanced past smaller numbers, because numbers
        // ascend.
        for cursor in &mut self.cursors {
            while cursor.head.as_ref().is_some_and(|e| e.number < number) {
                cursor.advance()?;
            }
            let Some(entry) = cursor.head.take_if(|e| e.number == number) else { continue };
            if entry.record != record || entry.index != index as u64 {
                let what = format!(
                    "window {number} belongs to '{}' in the journal, but to '{record}' in the \
                    input",
                    entry.record
                );
                return Err(inconsistent(&cursor.path, &what));
            }
            cursor.advance()?;
            return Ok(Some(entry));
        }
        let path = self.cursors.first().map_or(Path::new("journal"), |s| s.path.as_path());
        Err(inconsistent(path, &format!("window {number} is not in it any more")))
    }
}

/// Read position in a journal, with the next entry decoded.
struct JournalCursor {
    path: PathBuf,
    blocks: Blocks,
    /// Number of values of a row.
    width: usize,
    /// The current block.
    block: Vec<u8>,
    /// Number of bytes of the block that were decoded.
    decoded: usize,
    /// Record id of the entry decoded last: an entry of the same record does not repeat it.
    record: String,
    /// The next entry; `None` at the end of the journal, and after it was taken.
    head: Option<JournalEntry>,
}

impl JournalCursor {
    /// Opens a journal and decodes its first entry; `None` if the file does not exist or has no complete key.
    fn open(path: &Path, width: usize) -> Result<Option<Self>, VirusError> {
        let Some(blocks) = Blocks::open(path)? else { return Ok(None) };
        let mut cursor = Self {
            path: path.to_owned(),
            blocks,
            width,
            block: vec![],
            decoded: 0,
            record: String::new(),
            head: None,
        };
        cursor.advance()?;
        Ok(Some(cursor))
    }

    /// Decodes the next entry into `head`, which is `None` at the end of the journal.
    fn advance(&mut self) -> Result<(), VirusError> {
        self.head = None;
        while self.decoded == self.block.len() || self.block == END_BLOCK {
            self.decoded = 0;
            if !self.blocks.next_into(&mut self.block)? {
                return Ok(());
            }
        }
        let mut bytes = UnreadBytes(&self.block[self.decoded..]);
        let mut entry = JournalEntry { record: std::mem::take(&mut self.record), ..JournalEntry::default() };
        match entry.decode(&mut bytes, self.width) {
            Some(true) => {}
            Some(false) | None => return Err(inconsistent(&self.path, "it changed while it was read")),
        }
        self.decoded = self.block.len() - bytes.0.len();
        self.record.clone_from(&entry.record);
        self.head = Some(entry);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covered(numbers: impl IntoIterator<Item = u64>) -> Coverage {
        let mut coverage = Coverage::default();
        numbers.into_iter().for_each(|n| coverage.push(n));
        coverage
    }

    #[test]
    fn coverages_are_sets() {
        let (a, b) = (covered([0, 1, 2, 6, 7]), covered([3, 4, 7, 8, 20]));
        let all = a.clone().union(b.clone());
        assert_eq!(all.ranges, [0..5, 6..9, 20..21]);
        assert_eq!(all.count(), 9);
        for number in 0..25 {
            assert_eq!(all.contains(number), a.contains(number) || b.contains(number), "{number}");
        }
        assert!(!Coverage::default().contains(0));
    }
}
