//! Reads `regions.tsv`. Invariant: rows are checked against the record that they belong to, and an error has the line.

use plimsoll_data::DataError;
use plimsoll_data::printable::Name;
use plimsoll_data::table::{TableReader, finite, whole};
use std::path::Path;

/// Name of the table of regions.
pub const REGIONS: &str = "regions.tsv";

/// A row of `regions.tsv`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RegionRow {
    /// First base, counted from 1. The positions of a region of a pair are those in the mate.
    pub start: u64,
    /// Last base, included.
    pub end: u64,
    /// Sum of the scores of its windows: log odds, so not limited to 1.
    pub score: f64,
    /// Whether it is in the second mate of a pair.
    pub in_second_mate: bool,
}

/// Reader of `regions.tsv`, whose rows are in the order of the records.
pub struct RegionReader {
    table: TableReader,
    /// The next row, with the name of its record or mate.
    next: Option<(String, RegionRow)>,
    /// Whether records are pairs of mates.
    paired: bool,
}

impl RegionReader {
    /// Opens the table in a folder of results; `None` if the folder has none.
    pub fn open(folder: &Path, paired: bool) -> Result<Option<Self>, DataError> {
        let path = folder.join(REGIONS);
        if !path.exists() {
            return Ok(None);
        }
        let table = TableReader::open(&path, &["seq_name", "start", "end", "score"])?;
        let mut reader = Self { table, next: None, paired };
        reader.advance()?;
        Ok(Some(reader))
    }

    fn advance(&mut self) -> Result<(), DataError> {
        let paired = self.paired;
        self.next = self.table.next(|[name, start, end, score]| {
            let (start, end) = (whole("start", start)?, whole("end", end)?);
            let in_second_mate = paired && name.ends_with("/2");
            Ok((name.to_owned(), RegionRow { start, end, score: finite("score", score)?, in_second_mate }))
        })?;
        Ok(())
    }

    /// Replaces `found` by the regions of the next record, which is named `name` and has `length` bases.
    pub fn take(&mut self, name: &str, length: u64, found: &mut Vec<RegionRow>) -> Result<(), DataError> {
        found.clear();
        while let Some((_, region)) = self.next.take_if(|(of, _)| is_of(of, name, self.paired)) {
            if region.start == 0 || region.end < region.start || region.end > length {
                let text = format!("bases {} to {} are not in a record of {length}", region.start, region.end);
                return Err(self.table.error(text));
            }
            found.push(region);
            self.advance()?;
        }
        Ok(())
    }

    /// `Err` if regions are left after the last record.
    pub fn expect_end(&self) -> Result<(), DataError> {
        match &self.next {
            None => Ok(()),
            Some((name, _)) => {
                let text = format!(
                    "a region of '{}', which is not in {} or not in its order there; the tables belong to different runs",
                    Name(name),
                    super::PREDICTIONS
                );
                Err(self.table.error(text))
            }
        }
    }
}

/// Whether a row belongs to the record `name`: it has its name, or that of one of its mates where the record is a pair.
pub fn is_of(cell: &str, name: &str, paired: bool) -> bool {
    cell.strip_prefix(name).is_some_and(|rest| rest.is_empty() || paired && matches!(rest, "/1" | "/2"))
}
