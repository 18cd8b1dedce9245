//! The result files of `predict`, written as results arrive, in input order. Invariants: no file
//! appears before the run has ended, and `run.json` last, so where it is the results are complete;
//! every window and record is there once, in order, with finite scores, or writing fails and names
//! it; memory does not grow with the number of results (except for the names of safetensors).
//!
//! | file | a row for each | columns |
//! |---|---|---|
//! | `predictions.tsv` | record | `seq_name length n_windows n_scored n_virus virus_score prediction` |
//! | `windows.tsv` | window | `seq_name window start end n_orfs best_frame score_other score_virus prediction` |
//! | `windows.bed` | scored window | chrom, start, end, `seq_name\|window`, score, strand |
//! | `notes.tsv` | oddity of the input | `seq_name kind detail action` |
//! | `virus.fna` | record called virus | see [`HitsFormat`]: the whole title, score and call, letters as in the input |
//! | `prediction_results.txt` | open reading frame | `Sequence_ID Prediction score1 score2`, as VirNucPro |
//! | `prediction_results_highestscore.csv` | scored window | `Modified_ID Is_Virus`, as VirNucPro, sorted |
//! | `embeddings.*` | open reading frame | see [`EmbeddingFormat`] |
//! | `chunked.fa`, `nucleotide.fa`, `protein.faa` | chunk, open reading frame | FASTA, as VirNucPro's stages hand over |
//! | `plimsoll_mqc.tsv`, `plimsoll_calls_mqc.tsv`, `versions.yml` | run | see the module `reports` |
//! | `run.json` | run | the run record |
//!
//! - With [`Options::source`], `predictions.tsv` and `windows.tsv` end with a column `source`, the input file.
//! - `window` counts from 1; `start` and `end` count bases from 1, both inclusive. `windows.bed` counts
//!   from 0 and excludes the end, as BED does.
//! - `score_other` and `score_virus` are the maxima over the window's frames; `best_frame` is the frame
//!   of the largest P(virus), the first of equal ones. `windows.bed` scores 0..1000.
//! - `virus_score` is the mean of the scored windows' max P(virus) / (max P(others) + max P(virus)).
//! - A window without a scored frame has `NA` and `no_call`, and so has a record of only such windows. A record without
//!   letters has no windows and reads `skipped`.
//! - Untrained weights: every call reads `untrained`, `n_virus` is `NA`, and `virus.fna` and the two
//!   `prediction_results*` are not written. A `no_call` is not a call and stays.

mod embeddings;
mod hits;
mod intermediate;
mod reports;
mod sorted;
mod table;
#[cfg(test)]
mod tests;
pub mod verdict;
mod virnucpro;

use data::atomic::AtomicFile;
use data::intermediate::{chunk_name, orf_name};
use data::number::NumpyF32;
use data::translate::Frame;
use embeddings::Embeddings;
use intermediate::Intermediate;
use serde_json::Value;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use table::Table;
use verdict::{Consensus, RecordScore};
use virnucpro::VirNucPro;

pub use embeddings::EmbeddingFormat;
use hits::Hits;
pub use hits::{HitsFormat, RecordText};
pub use runtime::OutputError;
pub(crate) use table::Field;
pub use verdict::Call;

const PREDICTIONS: &str = "predictions.tsv";
const WINDOWS: &str = "windows.tsv";
const BED: &str = "windows.bed";
const NOTES: &str = "notes.tsv";

/// The run record: where it is, the results beside it are complete.
pub const RUN_RECORD: &str = "run.json";

/// Everything a run may leave in its folder. The run record first: it goes first when results are
/// replaced, and comes last.
pub const FILES: [&str; 21] = [
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
];

/// What is written.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether the weights were trained, so that a score means something.
    pub trained: bool,
    /// A record is called virus from this score on.
    pub threshold: f32,
    /// Whether to write `chunked.fa`, `nucleotide.fa` and `protein.faa`.
    pub keep_intermediate: bool,
    /// Whether and how to write embeddings.
    pub save_embeddings: Option<EmbeddingFormat>,
    /// The format of the file of records called virus.
    pub hits_format: HitsFormat,
    /// Values of an embedding's row: both encoders' together.
    pub width: usize,
    /// Whether `predictions.tsv` and `windows.tsv` have a last column `source`, the input of the row.
    pub source: bool,
}

/// A scored open reading frame.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OrfScore {
    /// Strand and offset.
    pub frame: Frame,
    /// P(others), P(virus).
    pub scores: [f32; 2],
}

/// A chunk of a record and the scores of its open reading frames.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    /// The record's id.
    pub record: &'a str,
    /// Its index in the record, from 0.
    pub index: usize,
    /// The record's base it starts at, from 0.
    pub start: usize,
    /// One past its last base.
    pub end: usize,
    /// In the order of [`Frame::ALL`]; empty if no frame is open.
    pub orfs: &'a [OrfScore],
}

/// A record, all windows of which have been given.
#[derive(Clone, Copy, Debug)]
pub struct RecordEnd<'a> {
    /// Its id.
    pub id: &'a str,
    /// Its bases.
    pub length: usize,
    /// Its title, letters and qualities; needed where the record is called virus (see [`Outputs::call`]).
    pub text: Option<&'a RecordText>,
}

/// Something odd in the input, and what was done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The record's id.
    pub seq_name: String,
    /// What sort of oddity, in one word.
    pub kind: &'static str,
    /// What exactly.
    pub detail: String,
    /// What was done.
    pub action: &'static str,
}

/// What was written so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Records: the sum of the four calls and those skipped.
    pub records: u64,
    /// Windows.
    pub windows: u64,
    /// Windows with a scored open reading frame.
    pub scored_windows: u64,
    /// Scored open reading frames.
    pub orfs: u64,
    /// Records called virus.
    pub virus: u64,
    /// Records called other.
    pub other: u64,
    /// Records without a scored window.
    pub no_call: u64,
    /// Records without letters.
    pub skipped: u64,
    /// Records scored by untrained weights.
    pub untrained: u64,
    /// Notes.
    pub notes: u64,
}

impl Counts {
    /// Those of a run record; 0 for what it does not say.
    pub fn from_record(record: &Value) -> Self {
        let mut counts = Counts::default();
        for (name, count) in counts.by_name() {
            *count = record["counts"][name].as_u64().unwrap_or(0);
        }
        counts
    }

    /// As they stand in the run record.
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

/// All result files of a run. Dropped without [`Outputs::finish`], it leaves none of them.
pub struct Outputs {
    folder: PathBuf,
    options: Options,
    counts: Counts,
    embedded: u64,
    record: OpenRecord,
    name: String,
    /// Where tables have it: a tab and the input that is being read.
    source: String,
    predictions: Table,
    windows: Table,
    bed: Table,
    notes: Table,
    /// Not with untrained weights.
    virus: Option<Hits>,
    /// Not with untrained weights.
    virnucpro: Option<VirNucPro>,
    intermediate: Option<Intermediate>,
    embeddings: Option<Embeddings>,
}

/// The record whose windows are being given.
#[derive(Default)]
struct OpenRecord {
    /// Meaningless before its first window.
    id: String,
    windows: usize,
    /// Its bases up to here are in a window.
    covered: usize,
    score: RecordScore,
}

impl Outputs {
    /// Sorts with so many bytes of lines in memory.
    pub fn hold(&mut self, bytes: usize) {
        if let Some(files) = &mut self.virnucpro {
            files.hold(bytes);
        }
    }

    /// Starts the files in `folder`, which is made if it is not there. Results of an earlier run in
    /// it stay as they are until [`Outputs::finish`], which replaces them.
    pub fn create(folder: &Path, options: Options) -> Result<Self, OutputError> {
        fs::create_dir_all(folder).map_err(|source| OutputError::Folder { path: folder.to_owned(), source })?;
        let source = if options.source { " source" } else { "" };
        let table =
            |name, header: &str| Table::create(folder, name, &format!("{header}{source}").replace(' ', "\t"));
        let embeddings =
            options.save_embeddings.map(|format| Embeddings::create(folder, format, options.width));
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

    /// What follows comes from this input.
    pub fn source(&mut self, name: &str) -> Result<(), OutputError> {
        if self.options.source {
            self.source = format!("\t{}", Field(name));
        }
        Ok(())
    }

    /// Writes the next window of the current record, or the first of the next one.
    ///
    /// # Errors
    /// A window that is out of place, frames that are doubled or out of order, scores that are no
    /// probabilities: before anything of the window is written. A file that cannot be written.
    pub fn window(&mut self, window: &Window<'_>) -> Result<(), OutputError> {
        check_scores(window)?;
        self.record.accept(window)?;
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
            return self.bed.row(format_args!("{name}\t{start}\t{end}\t{name}|{number}\t.\t."));
        }
        let ([other, virus], call) = (said.maxima.map(NumpyF32), Call::of(said.is_virus()).name());
        let (best, source) = (said.best.name(), &self.source);
        self.windows.row(format_args!("{place}\t{best}\t{other}\t{virus}\t{call}{source}"))?;
        // 0 to 1000, so the cast is exact.
        let (score, strand) = ((1000.0 * said.virus_score()).round() as u32, said.best.strand());
        self.bed.row(format_args!("{name}\t{start}\t{end}\t{name}|{number}\t{score}\t{strand}"))?;
        if let Some(files) = &mut self.virnucpro {
            chunk_name(record, index, &mut self.name);
            files.chunk(&self.name, orfs, &said)?;
        }
        Ok(())
    }

    /// The call of the record whose windows are being given, from those given so far: whether
    /// [`Outputs::record`] will need its sequence.
    pub fn call(&self) -> Call {
        match self.record.score.call(self.options.threshold) {
            Call::Virus | Call::Other if !self.options.trained => Call::Untrained,
            call => call,
        }
    }

    /// Writes the current record, all windows of which have been given; one of no bases has none.
    ///
    /// # Errors
    /// Windows that are of another record or do not cover it; a record called virus without its
    /// sequence; a file that cannot be written.
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

    /// Writes a note.
    pub fn note(&mut self, note: &Note) -> Result<(), OutputError> {
        let [name, kind, detail, action] = [&note.seq_name, note.kind, &note.detail, note.action].map(Field);
        self.notes.row(format_args!("{name}\t{kind}\t{detail}\t{action}"))?;
        self.counts.notes += 1;
        Ok(())
    }

    /// Writes the embedding of an open reading frame of `bases`, in the order of the frames; nothing if none are
    /// saved. Every frame that is given in a window needs one by the end of the run.
    ///
    /// # Errors
    /// A value that is not finite, a row of another width, a file that cannot be written.
    pub fn embedding(&mut self, orf: &str, bases: u64, values: &[f32]) -> Result<(), OutputError> {
        let Some(embeddings) = &mut self.embeddings else { return Ok(()) };
        embeddings.row(orf, bases, values)?;
        self.embedded += 1;
        Ok(())
    }

    /// Appends records to `chunked.fa`, `nucleotide.fa` and `protein.faa`, formatted by
    /// `data::intermediate`; nothing if they are not kept.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn intermediate(&mut self, texts: &[Vec<u8>; 3]) -> Result<(), OutputError> {
        self.intermediate.as_mut().map_or(Ok(()), |files| files.append(texts))
    }

    /// What was written so far.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Completes the files, in the place of those of an earlier run: all of them are on disk, those
    /// that this run does not write are gone, and then `run.json` appears: `run_record`, which must be
    /// an object and gets the counts as `counts`.
    ///
    /// # Errors
    /// Windows after the last record, a frame without its embedding, a chunk that was given twice,
    /// a file that cannot be written. Results of an earlier run are then either as they were or
    /// without their `run.json`.
    pub fn finish(mut self, run_record: &mut Value) -> Result<Counts, OutputError> {
        self.check_complete()?;
        let Some(record) = run_record.as_object_mut() else {
            return Err(OutputError::mismatch(RUN_RECORD, "the run record is not an object"));
        };
        record.insert("counts".to_owned(), self.counts.to_record());
        let tables = [self.predictions, self.windows, self.bed, self.notes];
        let mut files: Vec<AtomicFile> = tables.into_iter().map(Table::into_file).collect();
        files.extend(self.virus.take().map(Hits::into_file).transpose()?);
        if let Some(virnucpro) = self.virnucpro {
            files.extend(virnucpro.finish()?);
        }
        files.extend(self.intermediate.into_iter().flat_map(Intermediate::into_files));
        files.extend(reports::write(&self.folder, run_record, &self.counts)?);
        // A full disk shows here, while nothing has been replaced.
        for file in &mut files {
            file.flush().map_err(|e| file.error(e))?;
        }
        let saved = self.options.save_embeddings.map_or(&[][..], EmbeddingFormat::files);
        let is_ours = |path: &Path| files.iter().any(|file| file.target() == path);
        for name in FILES {
            let path = self.folder.join(name);
            if name == RUN_RECORD || !(saved.contains(&name) || is_ours(&path)) {
                remove(path)?;
            }
        }
        files.into_iter().try_for_each(AtomicFile::commit)?;
        self.embeddings.map_or(Ok(()), Embeddings::commit)?;
        write_run_record(&self.folder, run_record)?;
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
    /// Takes a window, if it is the next one.
    fn accept(&mut self, window: &Window<'_>) -> Result<(), OutputError> {
        let Window { record, index, start, end, .. } = *window;
        if self.windows == 0 {
            self.id.clear();
            self.id.push_str(record);
        } else if record != self.id {
            let what = format!("its window comes before '{}' has ended", self.id);
            return Err(OutputError::mismatch(record, what));
        }
        if index != self.windows || start > self.covered || end <= start || end < self.covered {
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

    /// Checks that `record` is this one, whole.
    fn end(&self, record: &RecordEnd<'_>) -> Result<(), OutputError> {
        if self.windows > 0 && record.id != self.id {
            let what = format!("it ends after windows of '{}'", self.id);
            return Err(OutputError::mismatch(record.id, what));
        }
        if self.covered != record.length {
            let what = format!("its windows end at base {} of {}", self.covered, record.length);
            return Err(OutputError::mismatch(record.id, what));
        }
        Ok(())
    }

    /// Ready for the next record.
    fn clear(&mut self) {
        self.windows = 0;
        self.covered = 0;
        self.score = RecordScore::default();
    }
}

/// Each frame once, in order, with probabilities.
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

fn write_run_record(folder: &Path, record: &Value) -> Result<(), OutputError> {
    let mut file = AtomicFile::create(folder.join(RUN_RECORD))?;
    writeln!(file, "{record:#}").map_err(|e| file.error(e))?;
    Ok(file.commit()?)
}

/// Removes a file of an earlier run, if it is there.
fn remove(path: PathBuf) -> Result<(), OutputError> {
    match fs::remove_file(&path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(OutputError::Folder { path, source }),
        Ok(()) | Err(_) => Ok(()),
    }
}
