//! Writers of the result files of `predict`, which receive the results in input order. Invariants: no file gets
//! its name before the run has ended, and `run.json` gets its name last, so results next to a `run.json` are
//! complete; every window and record is written exactly once, in order, with finite scores, otherwise writing
//! fails with an error that names the record; memory does not grow with the number of results (except for the
//! names in a safetensors file).
//!
//! | file | one row per | columns |
//! |---|---|---|
//! | `predictions.tsv` | record | `seq_name length n_windows n_scored n_virus virus_score prediction` |
//! | `windows.tsv` | window | `seq_name window start end n_orfs best_frame score_other score_virus prediction` |
//! | `windows.bed` | scored window | chrom, start, end, `seq_name\|window`, score, strand |
//! | `notes.tsv` | note on the input or a failed frame | `seq_name kind detail action` |
//! | `virus.fna` | record called virus | see [`HitsFormat`] |
//! | `prediction_results.txt` | open reading frame | `Sequence_ID Prediction score1 score2`, as VirNucPro |
//! | `prediction_results_highestscore.csv` | scored window | `Modified_ID Is_Virus`, as VirNucPro, sorted by id |
//! | `embeddings.*` | open reading frame | see [`EmbeddingFormat`] |
//! | `chunked.fa`, `nucleotide.fa`, `protein.faa` | window, frame, frame | FASTA, as between VirNucPro's stages |
//! | `plimsoll_mqc.tsv`, `plimsoll_calls_mqc.tsv`, `versions.yml` | run | see `reports.rs` |
//! | `run.json` | run | the run record |
//!
//! A caller writes other files, see `caller.rs`.
//!
//! - With [`Options::source`], `predictions.tsv` and `windows.tsv` end with a column `source`, the input file.
//! - `window` counts from 1; `start` and `end` count bases from 1, both inclusive. In `windows.bed` bases count
//!   from 0 and the end is exclusive, as BED defines.
//! - `score_other` and `score_virus` are the maxima of P(others) and P(virus) over the window's frames;
//!   `best_frame` is the frame with the largest P(virus), the first one on a tie. Scores in `windows.bed` are
//!   integers from 0 to 1000.
//! - `virus_score` is the mean of max P(virus) / (max P(others) + max P(virus)) over the scored windows.
//! - A window without a scored frame has the scores `NA` and the prediction `no_call`, and so has a record that
//!   consists of such windows only. A record without letters has no windows and the prediction `skipped`.
//! - With untrained weights, the prediction of every scored window and record is `untrained`, scores and
//!   `n_virus` are `NA`, and `virus.fna` and the two `prediction_results*` files are not written. `no_call` and
//!   `skipped` remain.

mod hits;
mod reports;
pub(crate) mod sorted;
pub(crate) mod table;
#[cfg(test)]
pub(crate) mod tests;

use crate::folder::written_by_runs;
pub use crate::methods::caller::regions_table::{REGIONS, RegionFacts, RegionReader, RegionRow, is_of};
use crate::methods::caller::results as caller;
pub(crate) use crate::methods::caller::results::{CallerOutputs, CallerWindow};
pub use crate::methods::caller::results::{CallsSummary, VIRUSES, VirusRow};
use crate::methods::virnucpro::embeddings::Embeddings;
use crate::methods::virnucpro::intermediate::Intermediate;
pub use crate::methods::virnucpro::verdict;
use crate::methods::virnucpro::{embeddings, intermediate, tables as virnucpro};
use plimsoll_data::atomic::{AtomicFile, sync_folder};
use plimsoll_data::intermediate::{chunk_name, orf_name};
use plimsoll_data::number::NumpyF32;
use plimsoll_data::outputs::WrittenFiles;
use plimsoll_data::translate::Frame;
use serde_json::{Value, json};
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use table::Table;
use verdict::{Consensus, RecordScore};
use virnucpro::VirNucPro;

pub use embeddings::EmbeddingFormat;
pub(crate) use hits::Hits;
pub use hits::{HitsFormat, RecordText};
pub use plimsoll_runtime::OutputError;
pub(crate) use table::Field;
use table::PlainField;
pub use verdict::Call;

pub(crate) const PREDICTIONS: &str = "predictions.tsv";
pub(crate) const WINDOWS: &str = "windows.tsv";
const BED: &str = "windows.bed";
pub(crate) const NOTES: &str = "notes.tsv";

/// Name of the run record; it is written last, so results next to it are complete.
pub const RUN_RECORD: &str = "run.json";

/// Name of the list of the files that a run writes, while it gives them their names. If it is killed then, the next run
/// knows from the list which files runs wrote.
pub(crate) const COMMIT: &str = ".commit.json";

/// Names of all result files of a run.
pub const FILES: [&str; 25] = [
    RUN_RECORD,
    PREDICTIONS,
    WINDOWS,
    BED,
    NOTES,
    HitsFormat::Fasta.file(),
    HitsFormat::Fastq.file(),
    HitsFormat::FastaGz.file(),
    HitsFormat::FastqGz.file(),
    virnucpro::ROWS,
    virnucpro::CONSENSUS,
    embeddings::NPY,
    embeddings::NPY_IDS,
    embeddings::SAFETENSORS,
    embeddings::PARQUET,
    intermediate::CHUNKED,
    intermediate::NUCLEOTIDE,
    intermediate::PROTEIN,
    reports::MULTIQC,
    reports::MULTIQC_CALLS,
    reports::VERSIONS,
    REGIONS,
    caller::REGIONS_BED,
    caller::REGIONS_FASTA,
    caller::VIRUSES,
];

/// Options of the writers.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether the weights were trained; scores of untrained weights are meaningless and not written.
    pub trained: bool,
    /// Minimum score of a record that is called virus.
    pub threshold: f32,
    /// Whether to write `chunked.fa`, `nucleotide.fa` and `protein.faa`.
    pub keep_intermediate: bool,
    /// Format of the embedding files; `None` to not write embeddings.
    pub save_embeddings: Option<EmbeddingFormat>,
    /// Format of the file of records called virus.
    pub hits_format: HitsFormat,
    /// Number of values of an embedding: the sum of both encoders' hidden sizes.
    pub width: usize,
    /// Whether `predictions.tsv` and `windows.tsv` have a last column `source` with the input file of the row.
    pub source: bool,
    /// Metadata of the embedding files: name and value.
    pub metadata: Vec<(&'static str, String)>,
}

/// Scores of an open reading frame.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OrfScore {
    /// Strand and offset.
    pub frame: Frame,
    /// P(others) and P(virus).
    pub scores: [f32; 2],
}

/// A window of a record and the scores of its open reading frames.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    /// Id of the record.
    pub record: &'a str,
    /// Index of the window in the record, from 0.
    pub index: usize,
    /// Position of the first base in the record, from 0.
    pub start: usize,
    /// Position one past the last base.
    pub end: usize,
    /// Scored open reading frames, in the order of [`Frame::ALL`].
    pub orfs: &'a [OrfScore],
}

/// The end of a record, after all of its windows.
#[derive(Clone, Copy, Debug)]
pub struct RecordEnd<'a> {
    /// Id of the record.
    pub id: &'a str,
    /// Length of the record in bases.
    pub length: usize,
    /// Description, letters and qualities; required if the record is called virus (see [`Outputs::call`]).
    pub text: Option<&'a RecordText>,
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
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

impl Counts {
    /// Returns the counts in a run record; 0 for missing ones.
    pub(crate) fn from_record(record: &Value) -> Self {
        let mut counts = Counts::default();
        for (name, count) in counts.by_name() {
            *count = record["counts"][name].as_u64().unwrap_or(0);
        }
        counts
    }

    /// Returns the counts as a JSON object by name, for the run record.
    fn to_record(mut self) -> Value {
        self.by_name().map(|(name, count)| (name, *count)).into_iter().collect()
    }

    fn by_name(&mut self) -> [(&'static str, &mut u64); 10] {
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

/// Writer of all result files of a run. If it is dropped without [`Outputs::finish`], it leaves no files.
pub struct Outputs {
    folder: PathBuf,
    options: Options,
    counts: Counts,
    /// Number of embeddings written.
    embedded: u64,
    record: OpenRecord,
    /// Reused buffer for the name of a chunk.
    name: String,
    /// A tab and the current input, if tables have the column `source`; otherwise empty.
    source: String,
    predictions: Table,
    windows: Table,
    bed: Table,
    notes: Table,
    /// `None` with untrained weights.
    virus: Option<Hits>,
    /// `None` with untrained weights.
    virnucpro: Option<VirNucPro>,
    intermediate: Option<Intermediate>,
    embeddings: Option<Embeddings>,
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
    pub(crate) score: RecordScore,
}

impl Outputs {
    /// Sets how many bytes of lines are held in memory while `prediction_results_highestscore.csv` is sorted.
    pub fn set_sort_bytes(&mut self, bytes: usize) {
        if let Some(files) = &mut self.virnucpro {
            files.set_sort_bytes(bytes);
        }
    }

    /// Creates the files in `folder`, and the folder if it does not exist. Results of an earlier run in the
    /// folder remain unchanged until [`Outputs::finish`] replaces them.
    ///
    /// # Errors
    /// A folder or file that cannot be created.
    pub fn create(folder: &Path, options: Options) -> Result<Self, OutputError> {
        fs::create_dir_all(folder).map_err(|source| OutputError::Folder { path: folder.to_owned(), source })?;
        let source = if options.source { " source" } else { "" };
        let table =
            |name, header: &str| Table::create(folder, name, &format!("{header}{source}").replace(' ', "\t"));
        let embeddings = options
            .save_embeddings
            .map(|format| Embeddings::create(folder, format, options.width, &options.metadata));
        Ok(Outputs {
            predictions: table(
                PREDICTIONS,
                "seq_name length n_windows n_scored n_virus virus_score prediction",
            )?,
            windows: table(
                WINDOWS,
                "seq_name window start end n_orfs best_frame score_other score_virus prediction",
            )?,
            bed: Table::bare(folder, BED)?,
            notes: Table::create(folder, NOTES, "seq_name\tkind\tdetail\taction")?,
            virus: options.trained.then(|| Hits::create(folder, options.hits_format)).transpose()?,
            virnucpro: options.trained.then(|| VirNucPro::create(folder)).transpose()?,
            intermediate: options.keep_intermediate.then(|| Intermediate::create(folder)).transpose()?,
            embeddings: embeddings.transpose()?,
            folder: folder.to_owned(),
            options,
            counts: Counts::default(),
            embedded: 0,
            record: OpenRecord::default(),
            name: String::new(),
            source: String::new(),
        })
    }

    /// Sets the input file of the following windows and records.
    pub fn source(&mut self, name: &str) -> Result<(), OutputError> {
        if self.options.source {
            self.source = format!("\t{}", Field(name));
        }
        Ok(())
    }

    /// Writes the next window of the current record, or the first window of the next record.
    ///
    /// # Errors
    /// A window out of order, duplicate frames or frames out of order, scores that are not probabilities:
    /// nothing of the window is written then. A file that cannot be written.
    pub fn window(&mut self, window: &Window<'_>) -> Result<(), OutputError> {
        check_scores(window)?;
        self.record.accept(window.record, window.index, window.start, window.end)?;
        let consensus = Consensus::of(window.orfs);
        self.record.score.add(consensus.as_ref());
        self.counts.windows += 1;
        self.counts.orfs += window.orfs.len() as u64;
        let Window { record, index, start, end, orfs } = *window;
        let (name, number) = (Field(record), index + 1);
        let place = format_args!("{name}\t{number}\t{}\t{end}\t{}", start + 1, orfs.len());
        let Some(said) = consensus else {
            let (call, source) = (Call::NoCall.name(), &self.source);
            return self.windows.row(format_args!("{place}\tNA\tNA\tNA\t{call}{source}"));
        };
        self.counts.scored_windows += 1;
        if !self.options.trained {
            let (call, source) = (Call::Untrained.name(), &self.source);
            self.windows.row(format_args!("{place}\tNA\tNA\tNA\t{call}{source}"))?;
            let name = PlainField(record);
            return self.bed.row(format_args!("{name}\t{start}\t{end}\t{name}|{number}\t.\t."));
        }
        let ([other, virus], call) = (said.maxima.map(NumpyF32), Call::of(said.is_virus()).name());
        let (best, source) = (said.best.name(), &self.source);
        self.windows.row(format_args!("{place}\t{best}\t{other}\t{virus}\t{call}{source}"))?;
        // The value is an integer from 0 to 1000 after rounding, so the cast is exact.
        let (score, strand) = ((1000.0 * said.virus_score()).round() as u32, said.best.strand());
        let chrom = PlainField(record);
        self.bed.row(format_args!("{chrom}\t{start}\t{end}\t{chrom}|{number}\t{score}\t{strand}"))?;
        if let Some(files) = &mut self.virnucpro {
            chunk_name(record, index, &mut self.name);
            files.chunk(&self.name, orfs, &said)?;
        }
        Ok(())
    }

    /// Returns the call of the current record from its windows so far. After its last window this is the call
    /// of the record: for [`Call::Virus`], [`Outputs::record`] needs the record's text.
    pub fn call(&self) -> Call {
        match self.record.score.call(self.options.threshold) {
            Call::Virus | Call::Other if !self.options.trained => Call::Untrained,
            call => call,
        }
    }

    /// Ends the current record after its last window, writes its row and returns its call. A record without
    /// bases has no windows.
    ///
    /// # Errors
    /// Windows of another record, or windows that do not cover the record; a record called virus without its
    /// text; a file that cannot be written.
    pub fn record(&mut self, record: &RecordEnd<'_>) -> Result<Call, OutputError> {
        self.record.end(record)?;
        let score = self.record.score;
        let call = if record.length == 0 { Call::Skipped } else { self.call() };
        let mean = score.virus_score().filter(|_| self.options.trained);
        let mean = mean.map_or("NA".to_owned(), |mean| format!("{mean:.6}"));
        if let Some(hits) = &mut self.virus
            && call == Call::Virus
        {
            let Some(text) = record.text else {
                return Err(OutputError::mismatch(record.id, "called virus, and its sequence is not there"));
            };
            hits.write(record.id, text, &mean, call.name())?;
        }
        let RecordScore { windows, scored, virus, .. } = score;
        let virus = if self.options.trained { virus.to_string() } else { "NA".to_owned() };
        let (name, length, prediction) = (Field(record.id), record.length, call.name());
        let source = &self.source;
        self.predictions.row(format_args!(
            "{name}\t{length}\t{windows}\t{scored}\t{virus}\t{mean}\t{prediction}{source}"
        ))?;
        self.counts.records += 1;
        *match call {
            Call::Virus => &mut self.counts.virus,
            Call::Other => &mut self.counts.other,
            Call::NoCall => &mut self.counts.no_call,
            Call::Skipped => &mut self.counts.skipped,
            Call::Untrained => &mut self.counts.untrained,
        } += 1;
        self.record.clear();
        Ok(call)
    }

    /// Writes a note to `notes.tsv`.
    pub fn note(&mut self, note: &Note) -> Result<(), OutputError> {
        write_note(&mut self.notes, note)?;
        self.counts.notes += 1;
        Ok(())
    }

    /// Writes the embedding of the open reading frame named `orf`, which has `bases` bases. Frames must be
    /// given in output order, and every scored frame of a window needs an embedding by the end of the run. Does
    /// nothing if embeddings are not saved.
    ///
    /// # Errors
    /// A value that is not finite, a row of a different width, a file that cannot be written.
    pub fn embedding(&mut self, orf: &str, bases: u64, values: &[f32]) -> Result<(), OutputError> {
        let Some(embeddings) = &mut self.embeddings else { return Ok(()) };
        embeddings.row(orf, bases, values)?;
        self.embedded += 1;
        Ok(())
    }

    /// Appends text to `chunked.fa`, `nucleotide.fa` and `protein.faa`: FASTA records formatted by
    /// `plimsoll_data::intermediate`. Does nothing if these files are not written.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn intermediate(&mut self, texts: &[Vec<u8>; 3]) -> Result<(), OutputError> {
        self.intermediate.as_mut().map_or(Ok(()), |files| files.append(texts))
    }

    /// Returns the counts of the results written so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Completes the files and replaces the results of an earlier run: removes its `run.json` and those of its files
    /// that this run does not write, commits the files of this run, and finally writes `run_record` as
    /// `run.json`. `run_record` must be a JSON object; the counts are added to it as `counts`.
    ///
    /// # Errors
    /// A last record that was not ended, a frame without embedding, two results for one window, a file that
    /// cannot be written. The results of an earlier run are then either unchanged or without their `run.json`.
    pub fn finish(mut self, run_record: &mut Value) -> Result<Counts, OutputError> {
        self.check_complete()?;
        let tables = [self.predictions, self.windows, self.bed, self.notes];
        let mut files: Vec<AtomicFile> = tables.into_iter().map(Table::into_file).collect();
        files.extend(self.virus.take().map(Hits::into_file).transpose()?);
        if let Some(virnucpro) = self.virnucpro {
            files.extend(virnucpro.finish()?);
        }
        files.extend(self.intermediate.into_iter().flat_map(Intermediate::into_files));
        files.extend(self.embeddings.map_or(Ok(vec![]), Embeddings::into_files)?);
        commit(&self.folder, files, run_record, self.counts)?;
        Ok(self.counts)
    }

    fn check_complete(&self) -> Result<(), OutputError> {
        if self.record.windows > 0 {
            return Err(OutputError::mismatch(&self.record.id, "its windows were given, it was not"));
        }
        if self.embeddings.is_some() && self.embedded != self.counts.orfs {
            let what = format!("{} rows for {} open reading frames", self.embedded, self.counts.orfs);
            return Err(OutputError::mismatch("embeddings", what));
        }
        Ok(())
    }
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
        self.score = RecordScore::default();
    }
}

/// Checks that every frame occurs at most once, in order, with finite, non-negative scores. Two zeros are
/// refused too: [`Consensus::virus_score`] divides by the sum of the maxima.
fn check_scores(window: &Window<'_>) -> Result<(), OutputError> {
    if !window.orfs.is_sorted_by(|a, b| a.frame < b.frame) {
        let what = format!("frames of window {} are doubled or out of order", window.index + 1);
        return Err(OutputError::mismatch(window.record, what));
    }
    let is_good = |x: f32| x.is_finite() && x >= 0.0;
    for &OrfScore { frame, scores } in window.orfs {
        if !scores.into_iter().all(is_good) || scores == [0.0, 0.0] {
            let mut orf = String::new();
            orf_name(window.record, window.index, frame, &mut orf);
            return Err(OutputError::Score { orf, scores });
        }
    }
    Ok(())
}

/// Replaces the results of an earlier run by `files` and the reports, as [`Outputs::finish`] describes.
pub(crate) fn commit(
    folder: &Path,
    mut files: Vec<AtomicFile>,
    run_record: &mut Value,
    counts: Counts,
) -> Result<(), OutputError> {
    let Some(record) = run_record.as_object_mut() else {
        return Err(OutputError::mismatch(RUN_RECORD, "the run record is not an object"));
    };
    record.insert("counts".to_owned(), counts.to_record());
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
    let refuse = |source| OutputError::Folder { path: folder.to_owned(), source };
    sync_folder(&folder.join(RUN_RECORD)).map_err(refuse)?;
    // Files of an earlier run that this run does not write. A file that no run wrote stays, whatever its name is.
    let is_replaced = |name: &str| files.iter().any(|file| file.target() == folder.join(name));
    for list in &before {
        for name in list.names().filter(|name| FILES.contains(name) && !is_replaced(name)) {
            if list.has(folder, name) {
                remove(folder.join(name))?;
            }
        }
    }
    files.into_iter().try_for_each(AtomicFile::commit)?;
    run_record[WrittenFiles::KEY] = json!(written);
    write_json(folder, RUN_RECORD, run_record)?;
    remove(folder.join(COMMIT))
}

/// The result files of a run: those of VirNucPro's pipeline, or those of a caller.
pub(crate) enum ResultFiles {
    /// VirNucPro's pipeline.
    VirNucPro(Box<Outputs>),
    /// A caller.
    Caller(Box<CallerOutputs>),
}

impl ResultFiles {
    /// Writes a note to `notes.tsv`.
    pub(crate) fn note(&mut self, note: &Note) -> Result<(), OutputError> {
        match self {
            Self::VirNucPro(outputs) => outputs.note(note),
            Self::Caller(outputs) => outputs.note(note),
        }
    }

    /// Sets the input file of the following windows and records.
    pub(crate) fn source(&mut self, name: &str) -> Result<(), OutputError> {
        match self {
            Self::VirNucPro(outputs) => outputs.source(name),
            Self::Caller(outputs) => outputs.source(name),
        }
    }

    /// Appends text to the intermediate files, which a caller does not write.
    pub(crate) fn intermediate(&mut self, texts: &[Vec<u8>; 3]) -> Result<(), OutputError> {
        match self {
            Self::VirNucPro(outputs) => outputs.intermediate(texts),
            Self::Caller(_) => Ok(()),
        }
    }

    /// Completes the files and replaces the results of an earlier run; see [`Outputs::finish`].
    pub(crate) fn finish(self, run_record: &mut Value) -> Result<(Counts, Option<CallsSummary>), OutputError> {
        match self {
            Self::VirNucPro(outputs) => Ok((outputs.finish(run_record)?, None)),
            Self::Caller(outputs) => outputs.finish(run_record).map(|(counts, calls)| (counts, Some(calls))),
        }
    }
}

/// Writes the row of a note to the table `notes`.
pub(crate) fn write_note(notes: &mut Table, note: &Note) -> Result<(), OutputError> {
    let [name, kind, detail, action] = [&note.seq_name, note.kind, &note.detail, note.action].map(Field);
    notes.row(format_args!("{name}\t{kind}\t{detail}\t{action}"))
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
