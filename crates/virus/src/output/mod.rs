//! Parts that the result files of all methods share: tables, sorted files, notes, counts, records called virus, reports, and the
//! commit of all files of a run. Invariants: no file gets its name before the run has ended, and `run.json` gets its name
//! last, so results next to a `run.json` are complete; every window and record is written exactly once, in order, otherwise
//! writing fails with an error that names the record.
//!
//! | file | one row per | columns |
//! |---|---|---|
//! | `notes.tsv` | note on the input or a failed sequence | `seq_name kind detail action` |
//! | `virus.fna` | record called virus | see [`HitsFormat`] |
//! | `plimsoll_mqc.tsv`, `plimsoll_calls_mqc.tsv`, `versions.yml` | run | see `reports.rs` |
//! | `run.json` | run | the run record |
//!
//! The other files are those of a method: `methods/virnucpro/results.rs`, `methods/caller/results.rs`. `reader.rs` reads the
//! results back, for pictures and reports.

mod hits;
pub mod reader;
pub(crate) mod reports;
pub(crate) mod sorted;
pub(crate) mod table;

use crate::folder::written_by_runs;
pub use crate::methods::FILES;
pub use crate::methods::caller::regions_table::{REGIONS, RegionFacts, RegionReader, RegionRow, is_row_of};
pub use crate::methods::caller::results::{CallsSummary, VIRUSES, VirusRow};
pub use crate::methods::virnucpro::embeddings::EmbeddingFormat;
pub use crate::methods::virnucpro::results::OrfScore;
pub use crate::methods::virnucpro::verdict;
use crate::pipeline::mates::Mate;
use crate::pipeline::record::RunRecord;
pub(crate) use hits::{Hit, Hits};
pub use hits::{HitsFormat, RecordText};
use plimsoll_data::atomic::{AtomicFile, sync_folder};
use plimsoll_data::outputs::WrittenFiles;
use plimsoll_data::window::RecordWindow;
pub use plimsoll_runtime::OutputError;
use plimsoll_runtime::report::to_json;
use serde::Serialize;
use serde_json::{Value, json};
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
pub(crate) use table::Field;
use table::TableWriter;
pub use verdict::Call;

/// Name of the table of records.
pub const PREDICTIONS: &str = "predictions.tsv";
pub(crate) const WINDOWS: &str = "windows.tsv";
pub(crate) const NOTES: &str = "notes.tsv";

/// Name of the run record; it is written last, so results next to it are complete.
pub const RUN_RECORD: &str = "run.json";

/// Name of the list of the files that a run writes, while it gives them their names. If it is killed then, the next run
/// knows from the list which files runs wrote.
pub(crate) const COMMIT: &str = ".commit.json";

/// The end of a record, after all of its windows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordEnd<'a> {
    /// Id of the record.
    pub(crate) id: &'a str,
    /// Length of the record in bases.
    pub(crate) length: usize,
    /// Description, letters and qualities; required if the record is called virus.
    pub(crate) text: Option<&'a RecordText>,
    /// The pair of the record, if records are mates.
    pub(crate) mate: Option<&'a Mate>,
}

/// A note on an irregularity of the input or a failed computation: a row of `notes.tsv`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Id of the record.
    pub seq_name: String,
    /// Kind of note, one word such as `empty` or `failed`.
    pub kind: &'static str,
    /// Details, such as the position in the input.
    pub detail: String,
    /// How the program treats the record or the frame.
    pub action: &'static str,
}

/// Counts of the results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ResultCounts {
    /// Number of records: the sum of `virus`, `other`, `no_call`, `skipped` and `untrained`.
    pub records: u64,
    /// Number of windows.
    pub windows: u64,
    /// Number of windows with a scored open reading frame.
    pub scored_windows: u64,
    /// Number of scored open reading frames.
    pub orfs: u64,
    /// Number of records called virus.
    pub virus: u64,
    /// Number of records called other.
    pub other: u64,
    /// Number of records with letters but without a scored window.
    pub no_call: u64,
    /// Number of records without letters.
    pub skipped: u64,
    /// Number of records scored by untrained weights.
    pub untrained: u64,
    /// Number of rows of `notes.tsv`.
    pub notes: u64,
}

impl Note {
    /// A note on a sequence with a value that is not finite. `sequence` names it in its window, with a blank before it, or is
    /// empty if the window has one sequence.
    pub(crate) fn failed(record: &str, location: RecordWindow, sequence: &str) -> Self {
        Self {
            seq_name: record.to_owned(),
            kind: "failed",
            detail: format!("window {}{sequence}: a value is not a number", location.index + 1),
            action: "not scored",
        }
    }
}

impl ResultCounts {
    /// Returns the counts in a run record; 0 for missing ones.
    pub(crate) fn from_record(record: &Value) -> Self {
        let mut counts = ResultCounts::default();
        for (name, count) in counts.fields_mut() {
            *count = record["counts"][name].as_u64().unwrap_or(0);
        }
        counts
    }

    /// Every count with its name in run.json.
    fn fields_mut(&mut self) -> [(&'static str, &mut u64); 10] {
        [
            ("records", &mut self.records),
            ("windows", &mut self.windows),
            ("scored_windows", &mut self.scored_windows),
            ("orfs", &mut self.orfs),
            ("virus", &mut self.virus),
            ("other", &mut self.other),
            ("no_call", &mut self.no_call),
            ("skipped", &mut self.skipped),
            ("untrained", &mut self.untrained),
            ("notes", &mut self.notes),
        ]
    }
}

/// The record whose windows are being written.
#[derive(Default)]
pub(crate) struct OpenRecord {
    /// Id of the record; stale while `windows` is 0.
    pub(crate) id: String,
    /// Number of windows so far.
    pub(crate) windows: usize,
    /// Number of leading bases of the record that are in a window.
    pub(crate) covered: usize,
    /// Whether bases between windows may be in no window, as with a caller, which counts them.
    pub(crate) has_gaps: bool,
}

impl OpenRecord {
    /// Adds a window to the record, or starts a record with it.
    ///
    /// # Errors
    /// A window that is not the next of its record, leaves a gap, or belongs to another record before this one
    /// has ended.
    pub(crate) fn accept(
        &mut self,
        record: &str,
        index: usize,
        start: usize,
        end: usize,
    ) -> Result<(), OutputError> {
        if self.windows == 0 {
            self.id.clear();
            self.id.push_str(record);
        } else if record != self.id {
            let what = format!("its window comes before '{}' has ended", self.id);
            return Err(OutputError::mismatch(record, what));
        }
        let is_apart = start > self.covered && !self.has_gaps;
        if index != self.windows || is_apart || end <= start || end < self.covered {
            let what = format!(
                "window {} of bases {start}..{end} follows {} windows up to base {}",
                index + 1,
                self.windows,
                self.covered
            );
            return Err(OutputError::mismatch(record, what));
        }
        self.windows += 1;
        self.covered = end;
        Ok(())
    }

    /// Checks that `record` is the current record and that its windows cover all of its bases.
    pub(crate) fn end(&self, record: &RecordEnd<'_>) -> Result<(), OutputError> {
        if self.windows > 0 && record.id != self.id {
            let what = format!("it ends after windows of '{}'", self.id);
            return Err(OutputError::mismatch(record.id, what));
        }
        if self.covered > record.length || (self.covered < record.length && !self.has_gaps) {
            let what = format!("its windows end at base {} of {}", self.covered, record.length);
            return Err(OutputError::mismatch(record.id, what));
        }
        Ok(())
    }

    /// Resets the state for the next record. `id` is overwritten by its first window.
    pub(crate) fn clear(&mut self) {
        self.windows = 0;
        self.covered = 0;
    }
}

/// Replaces the results of an earlier run by `files` and the reports, as `methods::ResultsWriter::finish` describes.
pub(crate) fn commit(
    folder: &Path,
    mut files: Vec<AtomicFile>,
    run_record: &mut RunRecord,
    counts: ResultCounts,
) -> Result<(), OutputError> {
    run_record.counts = Some(counts);
    files.extend(reports::write(folder, run_record, &counts)?);
    // On disk before the first removal, so that a full disk fails while the earlier results are still complete.
    let mut written = WrittenFiles::default();
    for file in &mut files {
        let name = file.target().file_name().unwrap_or_default().to_string_lossy().into_owned();
        written.insert(&name, file.synced()?);
    }
    let before = written_by_runs(folder);
    // Until the new record is complete, the files of the earlier runs are known as ours too.
    let lists: Vec<&WrittenFiles> = before.iter().chain([&written]).collect();
    write_json(folder, COMMIT, &json!({"plimsoll": env!("CARGO_PKG_VERSION"), "lists": lists}))?;
    remove(folder.join(RUN_RECORD))?;
    // On disk before any file changes: after a power failure, the record must not vouch for other files.
    sync_folder(&folder.join(RUN_RECORD))
        .map_err(|source| OutputError::Folder { path: folder.to_owned(), source })?;
    // Files of an earlier run that this run does not write. A file that no run wrote stays, whatever its name is.
    for list in &before {
        for name in list.names().filter(|name| FILES.contains(name)) {
            let path = folder.join(name);
            let is_replaced = files.iter().any(|file| file.target() == path);
            if !is_replaced && list.has(folder, name) {
                remove(path)?;
            }
        }
    }
    files.into_iter().try_for_each(AtomicFile::commit)?;
    run_record.outputs = Some(written);
    write_json(folder, RUN_RECORD, &to_json(run_record))?;
    remove(folder.join(COMMIT))
}

/// State that the result writers of all methods have: notes.tsv, the counts, and the column `source` of their tables.
pub(crate) struct CommonResults {
    pub(crate) counts: ResultCounts,
    notes: TableWriter,
    /// Whether tables have the column `source`.
    has_source: bool,
    /// A tab and the current input, if tables have the column `source`; otherwise empty.
    source: String,
}

impl CommonResults {
    /// Creates notes.tsv in `folder`, and the folder if it does not exist.
    pub(crate) fn create(folder: &Path, has_source: bool) -> Result<Self, OutputError> {
        fs::create_dir_all(folder).map_err(|source| OutputError::Folder { path: folder.to_owned(), source })?;
        let notes = TableWriter::create(folder, NOTES, "seq_name\tkind\tdetail\taction")?;
        Ok(Self { counts: ResultCounts::default(), notes, has_source, source: String::new() })
    }

    /// Creates a table with these columns, separated by spaces, and the column `source` if tables have it.
    pub(crate) fn table(&self, folder: &Path, name: &str, columns: &str) -> Result<TableWriter, OutputError> {
        let source = if self.has_source { " source" } else { "" };
        TableWriter::create(folder, name, &format!("{columns}{source}").replace(' ', "\t"))
    }

    /// Sets the input file of the following windows and records.
    pub(crate) fn set_source(&mut self, name: &str) {
        if self.has_source {
            self.source = format!("\t{}", Field(name));
        }
    }

    /// The last cell of a row, with a tab before it; empty if tables do not have the column `source`.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// Writes a note to notes.tsv.
    pub(crate) fn note(&mut self, note: &Note) -> Result<(), OutputError> {
        self.counts.notes += 1;
        let [name, kind, detail, action] = [&note.seq_name, note.kind, &note.detail, note.action].map(Field);
        self.notes.row(format_args!("{name}\t{kind}\t{detail}\t{action}"))
    }

    /// The finished table of notes.
    pub(crate) fn into_notes(self) -> TableWriter {
        self.notes
    }
}

fn write_json(folder: &Path, name: &str, record: &Value) -> Result<(), OutputError> {
    let mut file = AtomicFile::create(folder.join(name))?;
    writeln!(file, "{record:#}").map_err(|e| file.error(e))?;
    Ok(file.commit()?)
}

/// Removes a file of an earlier run if it exists.
fn remove(path: PathBuf) -> Result<(), OutputError> {
    match fs::remove_file(&path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(OutputError::Folder { path, source }),
        Ok(()) | Err(_) => Ok(()),
    }
}
