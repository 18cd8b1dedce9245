//! Reads `regions.tsv`. Invariant: rows are checked against the record that they belong to, and an error has the line.

use plimsoll_data::DataError;
use plimsoll_data::printable::Name;
use plimsoll_data::table::{TableReader, finite, whole};
use serde_json::Value;
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
    /// Score of the region: the sum over its windows of their log odds, each less the background of the record and the offset of
    /// the calibration. It has no upper limit.
    pub score: f64,
    /// Whether it is in the second mate of a pair.
    pub in_second_mate: bool,
}

/// Facts of `run.json` about the regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionFacts {
    /// Whether records are pairs of mates.
    pub paired: bool,
    /// Number of rows of `regions.tsv`; `None` for results of VirNucPro's models, which have none.
    pub rows: Option<u64>,
}

impl RegionFacts {
    /// Reads the run record.
    pub fn of_run(run: &Value) -> Self {
        Self { paired: run["calling"]["paired"] == true, rows: run["calls"]["regions"].as_u64() }
    }
}

/// Reader of `regions.tsv`, whose rows are in the order of the records.
pub struct RegionReader {
    table: TableReader,
    facts: RegionFacts,
    /// Number of rows so far.
    count: u64,
    /// The next row, with the name of its record or mate.
    next: Option<(String, RegionRow)>,
}

impl RegionReader {
    /// Opens the table in a folder of results; `None` if the folder has none and needs none.
    pub fn open(folder: &Path, facts: RegionFacts) -> Result<Option<Self>, DataError> {
        let path = folder.join(REGIONS);
        if !path.exists() && facts.rows.is_none_or(|rows| rows == 0) {
            return Ok(None);
        }
        let table = TableReader::open(&path, &["seq_name", "start", "end", "score"])?;
        let mut reader = Self { table, facts, count: 0, next: None };
        reader.advance()?;
        Ok(Some(reader))
    }

    fn advance(&mut self) -> Result<(), DataError> {
        let paired = self.facts.paired;
        self.next = self.table.next(|[name, start, end, score]| {
            let region = RegionRow {
                start: whole("start", start)?,
                end: whole("end", end)?,
                score: finite("score", score)?,
                in_second_mate: paired && name.ends_with("/2"),
            };
            Ok((name.to_owned(), region))
        })?;
        self.count += u64::from(self.next.is_some());
        Ok(())
    }

    /// Replaces `found` by the regions of the next record, which is named `name` and has `length` bases.
    pub fn take(&mut self, name: &str, length: u64, found: &mut Vec<RegionRow>) -> Result<(), DataError> {
        found.clear();
        while let Some((_, region)) = self.next.take_if(|(cell, _)| is_row_of(cell, name, self.facts.paired)) {
            if region.start == 0 || region.end < region.start || region.end > length {
                let text = format!("bases {} to {} are not in a record of {length}", region.start, region.end);
                return Err(self.table.error(text));
            }
            found.push(region);
            self.advance()?;
        }
        Ok(())
    }

    /// Moves the regions of the second mate of a pair behind the first mate, which has `before` bases; the pair has `length`.
    pub fn place_second_mate(
        &self,
        before: u64,
        length: u64,
        found: &mut [RegionRow],
    ) -> Result<(), DataError> {
        for region in found.iter_mut().filter(|region| region.in_second_mate) {
            let Some(end) = region.end.checked_add(before).filter(|&end| end <= length) else {
                let text =
                    format!("bases {} to {} are not in a mate of a pair of {length}", region.start, region.end);
                return Err(self.table.error(text));
            };
            region.start += before;
            region.end = end;
        }
        Ok(())
    }

    /// `Err` if regions are left after the last record, or their number is not that of the run record.
    pub fn expect_end(&self) -> Result<(), DataError> {
        match &self.next {
            None => match self.facts.rows {
                Some(rows) if rows != self.count => Err(self.table.error(format!(
                    "{} rows, {} says {rows}; the table is incomplete or belongs to another run",
                    self.count,
                    crate::output::RUN_RECORD
                ))),
                _ => Ok(()),
            },
            Some((name, _)) => {
                let text = format!(
                    "a region of '{}', which is not in {} or not in its order there; the tables belong to different runs",
                    Name(name),
                    crate::output::PREDICTIONS
                );
                Err(self.table.error(text))
            }
        }
    }
}

/// Whether a row belongs to the record `name`: it has its name, or that of one of its mates where the record is a pair.
pub fn is_row_of(cell: &str, name: &str, paired: bool) -> bool {
    cell.strip_prefix(name).is_some_and(|rest| rest.is_empty() || paired && matches!(rest, "/1" | "/2"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;

    #[test]
    fn regions_of_the_second_mate_lie_behind_the_first() {
        let folder = Folder::new("regions");
        folder.write("regions.tsv", "seq_name\tstart\tend\tscore\na/1\t1\t150\t9.5\na/2\t11\t100\t9.5\n");
        let facts = RegionFacts { paired: true, rows: Some(2) };
        let mut reader = RegionReader::open(&folder.0, facts).expect("read").expect("a table");
        let mut found = vec![];
        reader.take("a", 250, &mut found).expect("regions of the pair");
        reader.place_second_mate(150, 250, &mut found).expect("inside");
        let places: Vec<_> = found.iter().map(|region| (region.start, region.end)).collect();
        assert_eq!(places, [(1, 150), (161, 250)]);
        reader.expect_end().expect("two rows");
        let error = reader.place_second_mate(1, 250, &mut found).expect_err("behind the pair").to_string();
        assert!(error.contains("bases 161 to 250 are not in a mate of a pair of 250"), "{error}");
    }
}
