//! Reads a folder of results of `predict`, row by row. Invariant: every row is checked, and tables that contradict each
//! other or their run record are an error with path and line; memory does not grow with the number of rows.

use crate::ReportError;
use crate::columns::{CALLS, ColumnKind, ResultColumn, TableForm, column};
use plimsoll_data::DataError;
use plimsoll_data::printable::Name;
use plimsoll_data::table::{TableReader, whole};
use plimsoll_setting::Command;
use plimsoll_virus::output::reader::{ResultFolder, ResultFolderError, share_or_missing, window_bases};
use plimsoll_virus::output::{PREDICTIONS, REGIONS, RegionRow, is_row_of};
use serde_json::Value;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Maximum number of different words in a column of words.
const MOST_WORDS: usize = 256;

/// Maximum number of columns with probabilities of classes.
const MOST_CLASSES: usize = 32;

/// Key of the column that the report adds: the number of a record's regions.
pub const REGION_COUNT: &str = "n_regions";

/// A folder of results.
pub struct PredictionResults {
    /// The folder with its run record.
    pub folder: ResultFolder,
    /// Time of the last change of `run.json`, in seconds since 1970.
    pub changed: Option<u64>,
    /// Form of the tables.
    pub form: TableForm,
    /// Columns of `predictions.tsv` that the report shows, in their order there.
    pub columns: Vec<ResultColumn>,
    /// Columns of `predictions.tsv` that the report does not know.
    pub unknown: Vec<String>,
    /// Different words of each column of words, in order of appearance.
    pub words: Vec<Vec<String>>,
    /// Positions of the columns that every table has.
    pub at: ColumnPositions,
    /// Whether the folder has a table of regions.
    pub has_regions: bool,
}

/// Indices in [`PredictionResults::columns`].
#[derive(Clone, Copy, Debug)]
pub struct ColumnPositions {
    name: usize,
    /// Length in bases.
    pub length: usize,
    /// Number of windows.
    pub windows: usize,
    /// Score of the record.
    pub score: usize,
    /// Call of the record: its values are indices in [`CALLS`].
    pub call: usize,
    /// Class of the record.
    pub class: Option<usize>,
    /// Number of regions.
    pub regions: Option<usize>,
}

/// A row of `predictions.tsv`.
pub struct RecordValues<'a> {
    /// Row number from 0.
    pub ordinal: u64,
    /// Name of the record.
    pub name: &'a str,
    /// Value of each column: a number, or the index of a word; NaN for `NA`, and for the name.
    pub values: &'a [f64],
    /// Regions of the record.
    pub regions: &'a [RegionRow],
}

/// A row of `windows.tsv`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowScore {
    /// First base, counted from 1.
    pub start: u64,
    /// Last base, included.
    pub end: u64,
    /// Score; NaN for `NA`.
    pub score: f64,
    /// Whether the record is a pair of mates: the positions are those in a mate.
    pub of_a_mate: bool,
}

impl PredictionResults {
    /// Opens the folder by its run record, and reads the header of `predictions.tsv`.
    pub fn open(folder: &Path) -> Result<Self, ReportError> {
        let results = ResultFolder::open(folder).map_err(|error| open_error(folder, error))?;
        check_run_record(&results.run).map_err(|missing| not_a_run_record(folder, missing))?;
        let changed = ResultFolder::run_record(folder).metadata().and_then(|facts| facts.modified()).ok();
        let changed = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map(|time| time.as_secs());

        let table = results.all_record_columns()?;
        let form = if table.names().iter().any(|name| name == "n_scored") {
            TableForm::VirNucPro
        } else {
            TableForm::Caller
        };
        let mut columns = vec![];
        let mut unknown = vec![];
        for name in table.names() {
            match column(name, form) {
                Some(column) => columns.push(column),
                None => unknown.push(Name(name).to_string()),
            }
        }
        if columns.iter().filter(|column| column.key.starts_with("p_")).count() > MOST_CLASSES {
            return Err(table
                .error(format!("more than {MOST_CLASSES} columns with probabilities of classes"))
                .into());
        }
        let has_regions = folder.join(REGIONS).exists();
        let at = ColumnPositions {
            name: required_column(&columns, "seq_name", &table)?,
            length: required_column(&columns, "length", &table)?,
            windows: required_column(&columns, "n_windows", &table)?,
            score: required_column(&columns, "virus_score", &table)?,
            call: required_column(&columns, "prediction", &table)?,
            class: column_position(&columns, "class"),
            regions: has_regions.then_some(columns.len()),
        };
        let mut words = vec![vec![]; columns.len()];
        words[at.call] = CALLS.iter().map(|(word, _)| (*word).to_owned()).collect();
        if has_regions {
            let help =
                "Number of regions of the record that are viral as a whole: runs of neighbouring windows.";
            columns.push(ResultColumn::new(REGION_COUNT, "Regions", ColumnKind::Count, help));
            words.push(vec![]);
        }
        Ok(PredictionResults { folder: results, changed, form, columns, unknown, words, at, has_regions })
    }

    /// Calls `see` for every record, in order.
    pub fn records(&mut self, mut see: impl FnMut(&RecordValues)) -> Result<(), DataError> {
        let keys: Vec<&str> = self.columns.iter().map(|column| column.key.as_str()).collect();
        // The table does not have the column that the report adds.
        let mut tables = self.folder.records(keys.strip_suffix(&[REGION_COUNT]).unwrap_or(&keys))?;
        let mut values = vec![f64::NAN; self.columns.len()];
        let mut found = vec![];
        let mut ordinal = 0;
        loop {
            let columns = &self.columns;
            let words = &mut self.words;
            let at = self.at;
            let name = tables.records.next_row(|cells| {
                for (place, (cell, column)) in cells.iter().zip(columns).enumerate() {
                    values[place] = value(column, cell, &mut words[place], place == at.call)?;
                }
                for (place, key) in [(at.length, "length"), (at.windows, "n_windows"), (at.call, "prediction")]
                {
                    if values[place].is_nan() {
                        return Err(format!("{key} is `NA`"));
                    }
                }
                Ok(cells[at.name].to_owned())
            })?;
            let Some(name) = name else { break };
            if let Some(regions) = &mut tables.regions {
                regions.take(&name, values[at.length] as u64, &mut found)?;
            }
            if let Some(place) = at.regions {
                values[place] = found.len() as f64;
            }
            see(&RecordValues { ordinal, name: &name, values: &values, regions: &found });
            ordinal += 1;
        }
        tables.finish(ordinal, &self.folder)
    }

    /// Calls `see` for every window, in order, with the row number of its record and the number of windows of the
    /// record. Returns false if there is no table of windows.
    pub fn windows(&self, mut see: impl FnMut(u64, u64, WindowScore)) -> Result<bool, DataError> {
        if !self.folder.has_windows() {
            return Ok(false);
        }
        let mut records = self.folder.record_columns(&["seq_name", "length", "n_windows"])?;
        let scores: &[&str] = match self.form {
            TableForm::VirNucPro => &["seq_name", "start", "end", "score_other", "score_virus"],
            TableForm::Caller => &["seq_name", "start", "end", "virus_score"],
        };
        let mut windows = self.folder.windows(scores)?;
        let mut ordinal = 0;
        let mut count = 0;
        let paired = self.folder.is_paired();
        while let Some((name, length, number)) = records.next(|[name, length, windows]| {
            Ok((name.to_owned(), whole("length", length)?, whole("n_windows", windows)?))
        })? {
            for _ in 0..number {
                let row = windows.next_row(|cells| window(&name, length, paired, cells))?;
                see(ordinal, number, row.ok_or_else(|| windows.ends_early())?);
            }
            count += number;
            ordinal += 1;
        }
        windows.expect_end()?;
        self.folder.check_window_count(&windows, count)?;
        Ok(true)
    }
}

/// The error for a folder that cannot be opened as results.
fn open_error(folder: &Path, error: ResultFolderError) -> ReportError {
    match error {
        ResultFolderError::NoFolder => ReportError::NoFolder { folder: folder.to_owned() },
        ResultFolderError::NoRunRecord => ReportError::NoResult { folder: folder.to_owned() },
        ResultFolderError::NotJson => not_a_run_record(folder, "JSON"),
        ResultFolderError::Unreadable(error) => error.into(),
    }
}

/// The error for a `run.json` without `missing`, which every run record of a prediction has.
fn not_a_run_record(folder: &Path, missing: &'static str) -> ReportError {
    ReportError::NotARunRecord { path: ResultFolder::run_record(folder), missing }
}

/// Checks that a run record has the keys of a prediction; `Err` names the missing key.
fn check_run_record(run: &Value) -> Result<(), &'static str> {
    run["plimsoll"].as_str().ok_or("`plimsoll`")?;
    run["inputs"].as_array().ok_or("`inputs`")?;
    run["counts"]["records"].as_u64().ok_or("`counts.records`")?;
    Ok(())
}

/// Index of the column named `key`.
fn column_position(columns: &[ResultColumn], key: &str) -> Option<usize> {
    columns.iter().position(|column| column.key == key)
}

/// Index of a column that every table has.
fn required_column(columns: &[ResultColumn], key: &str, table: &TableReader) -> Result<usize, DataError> {
    let text = format!("there is no column `{key}`: this is not a table of {}", Command::Predict);
    column_position(columns, key).ok_or_else(|| table.error(text))
}

/// Parses the cell of a record.
fn value(column: &ResultColumn, cell: &str, words: &mut Vec<String>, is_call: bool) -> Result<f64, String> {
    match column.kind {
        ColumnKind::Name => Ok(f64::NAN),
        ColumnKind::Count if cell == "NA" => Ok(f64::NAN),
        ColumnKind::Count => Ok(whole(&column.key, cell)? as f64),
        ColumnKind::Share => share_or_nan(&column.key, cell),
        // An empty reason is no reason.
        ColumnKind::Word if cell == "NA" || cell.is_empty() => Ok(f64::NAN),
        ColumnKind::Word => match words.iter().position(|word| word == cell) {
            Some(place) => Ok(place as f64),
            None if is_call => Err(format!(
                "{} is `{}`, expected virus, other, no_call, skipped or untrained",
                column.key,
                Name(cell)
            )),
            None if words.len() == MOST_WORDS => {
                Err(format!("more than {MOST_WORDS} different words in column {}", column.key))
            }
            None => {
                words.push(cell.to_owned());
                Ok((words.len() - 1) as f64)
            }
        },
    }
}

/// Parses a window of the record `name` of `length` bases: name, first and last base, and either its score, or its
/// scores of "other" and "virus".
fn window(name: &str, length: u64, paired: bool, cells: &[&str]) -> Result<WindowScore, String> {
    if !is_row_of(cells[0], name, paired) {
        let text = format!("expected a window of '{}' as in {PREDICTIONS}", Name(name));
        return Err(format!("{text}; the tables are incomplete or belong to different runs"));
    }
    let [start, end] = window_bases(cells[1], cells[2], length)?;
    let score = match cells[3..] {
        [other, virus] => {
            let other = share_or_nan("score_other", other)?;
            let virus = share_or_nan("score_virus", virus)?;
            if other.is_nan() != virus.is_nan() || other + virus == 0.0 {
                return Err("score_other and score_virus must both be NA, or one of them above 0".to_owned());
            }
            // The score of a window as `predict` defines it.
            virus / (other + virus)
        }
        _ => share_or_nan("virus_score", cells[3])?,
    };
    Ok(WindowScore { start, end, score, of_a_mate: cells[0] != name })
}

/// Parses a number from 0 to 1; NaN for `NA`.
fn share_or_nan(column: &str, cell: &str) -> Result<f64, String> {
    Ok(share_or_missing(column, cell)?.unwrap_or(f64::NAN))
}
