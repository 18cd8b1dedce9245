//! Reader of the results that the writers of this crate leave in a folder: the run record and the tables. Invariant: rows are
//! read one at a time, so memory does not grow with their number; an error about a table has its path and line.
//!
//! `plot` and `report` interpret the rows; the reader has what both need: the names of the files, the checks of a table against
//! the run record, and the parsing of cells.

use super::{NOTES, PREDICTIONS, RUN_RECORD, RegionFacts, RegionReader, VIRUSES, WINDOWS};
use plimsoll_data::table::{TableReader, share, whole};
use plimsoll_data::{DataError, bounded};
use plimsoll_runtime::RuntimeError;
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Maximum size of a run record in bytes; run.json has about 10 kB.
const LONGEST_RECORD: u64 = 16 << 20;

/// Cell of a missing value.
const MISSING: &str = "NA";

/// A folder with the complete results of a prediction.
#[derive(Clone, Debug)]
pub struct ResultFolder {
    /// Path of the folder.
    pub path: PathBuf,
    /// The run record.
    pub run: Value,
}

/// Reason why a folder cannot be opened as results.
#[derive(Debug)]
pub enum ResultFolderError {
    /// The folder does not exist.
    NoFolder,
    /// The folder has no run record, which is written last, so its results are not complete.
    NoRunRecord,
    /// The run record is not JSON.
    NotJson,
    /// The run record cannot be read.
    Unreadable(RuntimeError),
}

/// Readers of `predictions.tsv`, and of `regions.tsv` if the folder has it.
pub struct RecordTables {
    /// The rows of `predictions.tsv`.
    pub records: TableReader,
    /// The regions of the records, in the same order.
    pub regions: Option<RegionReader>,
}

impl RecordTables {
    /// Checks after the last record that no region is left, and that the run record states `count` records.
    pub fn finish(&self, count: u64, folder: &ResultFolder) -> Result<(), DataError> {
        if let Some(regions) = &self.regions {
            regions.expect_end()?;
        }
        check_row_count(&self.records, count, folder.run["counts"]["records"].as_u64())
    }
}

impl ResultFolder {
    /// Path of the run record in a folder.
    pub fn run_record(folder: &Path) -> PathBuf {
        folder.join(RUN_RECORD)
    }

    /// Opens a folder by its run record. Which keys the record must have is left to the caller.
    ///
    /// # Errors
    /// A folder without a run record, or with one that is not JSON.
    pub fn open(folder: &Path) -> Result<Self, ResultFolderError> {
        let path = Self::run_record(folder);
        let text = bounded::read_text(&path, LONGEST_RECORD).map_err(|error| match error.kind() {
            ErrorKind::NotFound if !folder.exists() => ResultFolderError::NoFolder,
            ErrorKind::NotFound | ErrorKind::NotADirectory => ResultFolderError::NoRunRecord,
            _ => ResultFolderError::Unreadable(RuntimeError::io(&path)(error)),
        })?;
        let run = serde_json::from_str(&text).map_err(|_| ResultFolderError::NotJson)?;
        Ok(Self { path: folder.to_owned(), run })
    }

    /// Whether records are pairs of mates, whose windows and regions have the names of the mates.
    pub fn is_paired(&self) -> bool {
        RegionFacts::of_run(&self.run).paired
    }

    /// Opens `predictions.tsv` with all its columns.
    pub fn all_record_columns(&self) -> Result<TableReader, DataError> {
        TableReader::open_all(&self.path.join(PREDICTIONS))
    }

    /// Opens `predictions.tsv` with the columns `wanted`.
    pub fn record_columns(&self, wanted: &[&str]) -> Result<TableReader, DataError> {
        TableReader::open(&self.path.join(PREDICTIONS), wanted)
    }

    /// Opens `predictions.tsv` with the columns `wanted`, and `regions.tsv` if there is one.
    pub fn records(&self, wanted: &[&str]) -> Result<RecordTables, DataError> {
        let records = self.record_columns(wanted)?;
        let regions = RegionReader::open(&self.path, RegionFacts::of_run(&self.run))?;
        Ok(RecordTables { records, regions })
    }

    /// Whether the folder has `windows.tsv`.
    pub fn has_windows(&self) -> bool {
        self.path.join(WINDOWS).exists()
    }

    /// Opens `windows.tsv` with the columns `wanted`.
    pub fn windows(&self, wanted: &[&str]) -> Result<TableReader, DataError> {
        TableReader::open(&self.path.join(WINDOWS), wanted)
    }

    /// Checks that the run record states `count` rows of `windows.tsv`.
    pub fn check_window_count(&self, windows: &TableReader, count: u64) -> Result<(), DataError> {
        check_row_count(windows, count, self.run["counts"]["windows"].as_u64())
    }

    /// Calls `on_row` for every row of `viruses.tsv`, in order, with its name, kind, start, end, length, ends of the record that
    /// it reaches, score and false discovery rate. Results without the table have no rows.
    pub fn viruses(&self, on_row: impl FnMut([&str; 8])) -> Result<(), DataError> {
        let columns = ["seq_name", "kind", "start", "end", "length", "reaches", "virus_score", "fdr"];
        rows(&self.path.join(VIRUSES), columns, on_row)
    }

    /// Calls `on_row` for every row of `notes.tsv`, in order, with its cells: record, kind, detail, action.
    pub fn notes(&self, on_row: impl FnMut([&str; 4])) -> Result<(), DataError> {
        rows(&self.path.join(NOTES), ["seq_name", "kind", "detail", "action"], on_row)
    }
}

/// Calls `on_row` for every row of a table; a missing table has no rows.
fn rows<const N: usize>(
    path: &Path,
    columns: [&str; N],
    mut on_row: impl FnMut([&str; N]),
) -> Result<(), DataError> {
    if !path.exists() {
        return Ok(());
    }
    let mut table = TableReader::open(path, &columns)?;
    loop {
        let row = table.next(|cells: [&str; N]| {
            on_row(cells);
            Ok(())
        })?;
        if row.is_none() {
            return Ok(());
        }
    }
}

/// Checks the number of rows of a table, which detects truncation between two rows; `stated` is the number in the run record.
fn check_row_count(table: &TableReader, count: u64, stated: Option<u64>) -> Result<(), DataError> {
    match stated {
        Some(stated) if stated != count => Err(table.error(format!(
            "{count} rows, {RUN_RECORD} says {stated}; the table is incomplete or belongs to another run"
        ))),
        Some(_) | None => Ok(()),
    }
}

/// Parses a number from 0 to 1 in a cell of `column`; `None` for `NA`.
pub fn share_or_missing(column: &str, cell: &str) -> Result<Option<f64>, String> {
    if cell == MISSING { Ok(None) } else { share(column, cell).map(Some) }
}

/// Parses the first and the last base of a window, both counted from 1, of a record of `length` bases.
pub fn window_bases(start: &str, end: &str, length: u64) -> Result<[u64; 2], String> {
    let start = whole("start", start)?;
    let end = whole("end", end)?;
    if start == 0 || end < start || end > length {
        return Err(format!("bases {start} to {end} are not in a record of {length}"));
    }
    Ok([start, end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;

    fn opened(folder: &Folder) -> Result<ResultFolder, ResultFolderError> {
        ResultFolder::open(&folder.0)
    }

    #[test]
    fn a_folder_is_opened_by_its_run_record() {
        let folder = Folder::new("reader");
        assert!(matches!(ResultFolder::open(&folder.path("none")), Err(ResultFolderError::NoFolder)));
        assert!(matches!(opened(&folder), Err(ResultFolderError::NoRunRecord)));
        folder.write(RUN_RECORD, "{");
        assert!(matches!(opened(&folder), Err(ResultFolderError::NotJson)));
        folder.write(RUN_RECORD, r#"{"counts": {"records": 1}, "calling": {"paired": true}}"#);
        let results = opened(&folder).expect("opened");
        assert!(results.is_paired() && !results.has_windows());
    }

    #[test]
    fn a_truncated_table_is_refused() {
        let folder = Folder::new("reader");
        folder.write(RUN_RECORD, r#"{"counts": {"records": 2}}"#);
        folder.write(PREDICTIONS, "seq_name\tlength\na\t5\n");
        let results = opened(&folder).expect("opened");
        let mut tables = results.records(&["length"]).expect("a table");
        let length = tables.records.next(|[length]| whole("length", length)).expect("a row");
        assert_eq!(length, Some(5));
        let error = tables.finish(1, &results).expect_err("one of two rows").to_string();
        assert!(error.contains("1 rows, run.json says 2; the table is incomplete"), "{error}");
    }

    #[test]
    fn cells_are_checked() {
        assert_eq!(share_or_missing("score", "NA"), Ok(None));
        assert_eq!(share_or_missing("score", "0.5"), Ok(Some(0.5)));
        assert!(share_or_missing("score", "2").is_err());
        assert_eq!(window_bases("1", "5", 5), Ok([1, 5]));
        for (start, end) in [("0", "5"), ("4", "3"), ("1", "6"), ("x", "1")] {
            assert!(window_bases(start, end, 5).is_err(), "{start} {end}");
        }
    }
}
