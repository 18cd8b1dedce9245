//! Writer of the result files of VirNucPro's method. Invariants: as for all results (`output/mod.rs`), and scores are finite;
//! memory does not grow with the number of results (except for the names in a safetensors file).
//!
//! | file | one row per | columns |
//! |---|---|---|
//! | `predictions.tsv` | record | `seq_name length n_windows n_scored n_virus virus_score prediction` |
//! | `windows.tsv` | window | `seq_name window start end n_orfs best_frame score_other score_virus prediction` |
//! | `windows.bed` | scored window | chrom, start, end, `seq_name\|window`, score, strand |
//! | `prediction_results.txt` | open reading frame | `Sequence_ID Prediction score1 score2`, as VirNucPro |
//! | `prediction_results_highestscore.csv` | scored window | `Modified_ID Is_Virus`, as VirNucPro, sorted by id |
//! | `embeddings.*` | open reading frame | see [`EmbeddingFormat`] |
//! | `chunked.fa`, `nucleotide.fa`, `protein.faa` | window, frame, frame | FASTA, as between VirNucPro's stages |
//!
//! - With [`ResultOptions::source`], `predictions.tsv` and `windows.tsv` end with a column `source`, the input file.
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

use super::embeddings::{EmbeddingFiles, EmbeddingFormat};
use super::intermediate::IntermediateFiles;
use super::tables::VirNucProTables;
use super::verdict::{Call, Consensus, RecordScore};
use crate::methods::{FinishedResults, FinishedWindow, ResultsWriter};
use crate::output::table::{Field, PlainField, TableWriter};
use crate::output::{
    CommonResults, Hit, Hits, HitsFormat, Note, OpenRecord, OutputError, PREDICTIONS, RecordEnd, ResultCounts,
    WINDOWS, commit,
};
use crate::pipeline::queue::{SequenceResult, SequenceState};
use crate::pipeline::record::RunRecord;
use crate::pipeline::records::TEXTS;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::intermediate::{orf_name, window_name};
use plimsoll_data::number::NumpyF32;
use plimsoll_data::translate::Frame;
use plimsoll_setting::Setting;
use std::path::{Path, PathBuf};

/// Name of the BED file of windows.
pub(crate) const BED: &str = "windows.bed";

/// Options of the writers.
#[derive(Clone, Debug)]
pub(crate) struct ResultOptions {
    /// Whether the weights were trained; scores of untrained weights are meaningless and not written.
    pub(crate) trained: bool,
    /// Minimum score of a record that is called virus.
    pub(crate) threshold: f32,
    /// Whether to write `chunked.fa`, `nucleotide.fa` and `protein.faa`.
    pub(crate) keep_intermediate: bool,
    /// Format of the embedding files; `None` to not write embeddings.
    pub(crate) save_embeddings: Option<EmbeddingFormat>,
    /// Maximum length of a window in bases, for a warning.
    pub(crate) length: usize,
    /// Bytes of lines that are held in memory while `prediction_results_highestscore.csv` is sorted.
    pub(crate) sort_bytes: usize,
    /// Format of the file of records called virus.
    pub(crate) hits_format: HitsFormat,
    /// Number of values of an embedding: the sum of both encoders' hidden sizes.
    pub(crate) width: usize,
    /// Whether `predictions.tsv` and `windows.tsv` have a last column `source` with the input file of the row.
    pub(crate) source: bool,
    /// Metadata of the embedding files: name and value.
    pub(crate) metadata: Vec<(&'static str, String)>,
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
pub(crate) struct ScoredWindow<'a> {
    /// Id of the record.
    pub(crate) record: &'a str,
    /// Index of the window in the record, from 0.
    pub(crate) index: usize,
    /// Position of the first base in the record, from 0.
    pub(crate) start: usize,
    /// Position one past the last base.
    pub(crate) end: usize,
    /// Scored open reading frames, in the order of [`Frame::ALL`].
    pub(crate) orfs: &'a [OrfScore],
}

/// Writer of all result files of a run.
pub(crate) struct VirNucProWriter {
    folder: PathBuf,
    options: ResultOptions,
    common: CommonResults,
    /// Number of embeddings written.
    embedded: u64,
    record: OpenRecord,
    /// Scores of the windows of that record.
    score: RecordScore,
    /// Reused buffer for the name of a window.
    name: String,
    predictions: TableWriter,
    windows: TableWriter,
    bed: TableWriter,
    /// `None` with untrained weights.
    virus: Option<Hits>,
    /// `None` with untrained weights.
    virnucpro: Option<VirNucProTables>,
    intermediate: Option<IntermediateFiles>,
    embeddings: Option<EmbeddingFiles>,
}

impl VirNucProWriter {
    /// Creates the files in `folder`, and the folder if it does not exist. Results of an earlier run in the
    /// folder remain unchanged until [`ResultsWriter::finish`] replaces them.
    ///
    /// # Errors
    /// A folder or file that cannot be created.
    pub(crate) fn create(folder: &Path, options: ResultOptions) -> Result<Self, OutputError> {
        let common = CommonResults::create(folder, options.source)?;
        let embeddings = options
            .save_embeddings
            .map(|format| EmbeddingFiles::create(folder, format, options.width, &options.metadata));
        Ok(Self {
            predictions: common.table(
                folder,
                PREDICTIONS,
                "seq_name length n_windows n_scored n_virus virus_score prediction",
            )?,
            windows: common.table(
                folder,
                WINDOWS,
                "seq_name window start end n_orfs best_frame score_other score_virus prediction",
            )?,
            bed: TableWriter::bare(folder, BED)?,
            virus: options.trained.then(|| Hits::create(folder, options.hits_format)).transpose()?,
            virnucpro: options
                .trained
                .then(|| VirNucProTables::create(folder, options.sort_bytes))
                .transpose()?,
            intermediate: options.keep_intermediate.then(|| IntermediateFiles::create(folder)).transpose()?,
            embeddings: embeddings.transpose()?,
            folder: folder.to_owned(),
            options,
            common,
            embedded: 0,
            record: OpenRecord::default(),
            score: RecordScore::default(),
            name: String::new(),
        })
    }

    /// Writes the next window of the current record, or the first window of the next record.
    ///
    /// # Errors
    /// A window out of order, duplicate frames or frames out of order, scores that are not probabilities:
    /// nothing of the window is written then. A file that cannot be written.
    fn add_window(&mut self, window: &ScoredWindow<'_>) -> Result<(), OutputError> {
        check_scores(window)?;
        self.record.accept(window.record, window.index, window.start, window.end)?;
        let consensus = Consensus::of(window.orfs);
        self.score.add(consensus.as_ref());
        self.common.counts.windows += 1;
        self.common.counts.orfs += window.orfs.len() as u64;
        let ScoredWindow { record, index, start, end, orfs } = *window;
        let number = index + 1;
        let place = format_args!("{}\t{number}\t{}\t{end}\t{}", Field(record), start + 1, orfs.len());
        let Some(consensus) = consensus else {
            let call = Call::NoCall.name();
            let source = self.common.source();
            return self.windows.row(format_args!("{place}\tNA\tNA\tNA\t{call}{source}"));
        };
        self.common.counts.scored_windows += 1;
        let source = self.common.source();
        let chrom = PlainField(record);
        if !self.options.trained {
            let call = Call::Untrained.name();
            self.windows.row(format_args!("{place}\tNA\tNA\tNA\t{call}{source}"))?;
            return self.bed.row(format_args!("{chrom}\t{start}\t{end}\t{chrom}|{number}\t.\t."));
        }
        let [other, virus] = consensus.maxima.map(NumpyF32);
        let call = Call::of(consensus.is_virus()).name();
        let best = consensus.best.name();
        self.windows.row(format_args!("{place}\t{best}\t{other}\t{virus}\t{call}{source}"))?;
        // The value is an integer from 0 to 1000 after rounding, so the cast is exact.
        let score = (1000.0 * consensus.virus_score()).round() as u32;
        let strand = consensus.best.strand();
        self.bed.row(format_args!("{chrom}\t{start}\t{end}\t{chrom}|{number}\t{score}\t{strand}"))?;
        if let Some(files) = &mut self.virnucpro {
            window_name(record, index, &mut self.name);
            files.window(&self.name, orfs, &consensus)?;
        }
        Ok(())
    }

    /// Returns the call of the current record from its windows so far. After its last window this is the call
    /// of the record: for [`Call::Virus`], [`Self::end_record`] needs the record's text.
    fn call(&self) -> Call {
        match self.score.call(self.options.threshold) {
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
    fn end_record(&mut self, record: &RecordEnd<'_>) -> Result<Call, OutputError> {
        self.record.end(record)?;
        let call = if record.length == 0 { Call::Skipped } else { self.call() };
        let score = self.score;
        let mean = score.virus_score().filter(|_| self.options.trained);
        let mean = mean.map_or("NA".to_owned(), |mean| format!("{mean:.6}"));
        if let Some(hits) = &mut self.virus
            && call == Call::Virus
        {
            let Some(text) = record.text else {
                return Err(OutputError::mismatch(record.id, "called virus, and its sequence is not there"));
            };
            hits.write(&Hit { id: record.id, text, score: &mean, call: call.name() })?;
        }
        let RecordScore { windows, scored, virus, .. } = score;
        let virus = if self.options.trained { virus.to_string() } else { "NA".to_owned() };
        self.predictions.row(format_args!(
            "{}\t{}\t{windows}\t{scored}\t{virus}\t{mean}\t{}{}",
            Field(record.id),
            record.length,
            call.name(),
            self.common.source()
        ))?;
        self.common.counts.records += 1;
        *match call {
            Call::Virus => &mut self.common.counts.virus,
            Call::Other => &mut self.common.counts.other,
            Call::NoCall => &mut self.common.counts.no_call,
            Call::Skipped => &mut self.common.counts.skipped,
            Call::Untrained => &mut self.common.counts.untrained,
        } += 1;
        self.record.clear();
        self.score = RecordScore::default();
        Ok(call)
    }

    /// Writes the embedding of the open reading frame named `orf`, which has `bases` bases. Frames must be
    /// given in output order, and every scored frame of a window needs an embedding by the end of the run. Does
    /// nothing if embeddings are not saved.
    ///
    /// # Errors
    /// A value that is not finite, a row of a different width, a file that cannot be written.
    fn embedding(&mut self, orf: &str, bases: u64, values: &[f32]) -> Result<(), OutputError> {
        let Some(embeddings) = &mut self.embeddings else { return Ok(()) };
        embeddings.row(orf, bases, values)?;
        self.embedded += 1;
        Ok(())
    }

    /// See [`ResultsWriter::finish`].
    ///
    /// # Errors
    /// A last record that was not ended, a frame without embedding, two results for one window, a file that
    /// cannot be written. The results of an earlier run are then either unchanged or without their `run.json`.
    fn complete(mut self, run_record: &mut RunRecord) -> Result<ResultCounts, OutputError> {
        self.check_complete()?;
        let counts = self.common.counts;
        let tables = [self.predictions, self.windows, self.bed, self.common.into_notes()];
        let mut files: Vec<AtomicFile> = tables.into_iter().map(TableWriter::into_file).collect();
        files.extend(self.virus.take().map(Hits::into_file).transpose()?);
        if let Some(virnucpro) = self.virnucpro {
            files.extend(virnucpro.finish()?);
        }
        files.extend(self.intermediate.into_iter().flat_map(IntermediateFiles::into_files));
        files.extend(self.embeddings.map_or(Ok(vec![]), EmbeddingFiles::into_files)?);
        commit(&self.folder, files, run_record, counts)?;
        Ok(counts)
    }

    fn check_complete(&self) -> Result<(), OutputError> {
        if self.record.windows > 0 {
            return Err(OutputError::mismatch(&self.record.id, "its windows were given, it was not"));
        }
        if self.embeddings.is_some() && self.embedded != self.common.counts.orfs {
            let what = format!("{} rows for {} open reading frames", self.embedded, self.common.counts.orfs);
            return Err(OutputError::mismatch("embeddings", what));
        }
        Ok(())
    }
}

impl ResultsWriter for VirNucProWriter {
    fn common(&mut self) -> &mut CommonResults {
        &mut self.common
    }

    /// Appends the texts to `chunked.fa`, `nucleotide.fa` and `protein.faa`.
    fn texts(&mut self, texts: &[Vec<u8>; TEXTS]) -> Result<(), OutputError> {
        match &mut self.intermediate {
            Some(files) => files.append(texts),
            None => Ok(()),
        }
    }

    fn window(&mut self, window: &FinishedWindow<'_>) -> Result<(), OutputError> {
        let FinishedWindow { record, location, sequences, .. } = *window;
        if self.embeddings.is_some() {
            let mut name = String::new();
            for (orf, row) in window.rows() {
                orf_name(record, location.index, frame_of(orf), &mut name);
                self.embedding(&name, orf.bases.into(), row)?;
            }
        }
        let mut orfs = vec![];
        for orf in sequences {
            match orf.state {
                SequenceState::Scored(scores) => orfs.push(OrfScore { frame: frame_of(orf), scores }),
                SequenceState::Failed => {
                    let name = format!(" frame {}", frame_of(orf).name());
                    self.common.note(&Note::failed(record, location, &name))?;
                }
                SequenceState::Waiting | SequenceState::Encoded => {}
            }
        }
        self.add_window(&ScoredWindow {
            record,
            index: location.index,
            start: location.start,
            end: location.end(),
            orfs: &orfs,
        })
    }

    fn record(&mut self, record: &RecordEnd<'_>) -> Result<(), OutputError> {
        self.end_record(record).map(drop)
    }

    /// Warns if the input has windows and none of them could be scored.
    fn warning(&self) -> Option<String> {
        let ResultCounts { windows, scored_windows, .. } = self.common.counts;
        (windows > 0 && scored_windows == 0).then(|| {
            format!(
                "none of the {windows} windows of at most {} bases has an open reading frame (a frame without a stop codon \
                 over the whole window), so nothing was scored; use a smaller {}, with a head trained for it",
                self.options.length,
                Setting::Length
            )
        })
    }

    fn finish(self: Box<Self>, run_record: &mut RunRecord) -> Result<FinishedResults, OutputError> {
        Ok(FinishedResults { counts: self.complete(run_record)?, calls: None })
    }
}

/// The frame of an open reading frame, whose label is the index of its frame.
fn frame_of(orf: &SequenceResult) -> Frame {
    Frame::ALL[usize::from(orf.label)]
}

/// Checks that every frame occurs at most once, in order, with finite, non-negative scores. Two zeros are
/// refused too: [`Consensus::virus_score`] divides by the sum of the maxima.
fn check_scores(window: &ScoredWindow<'_>) -> Result<(), OutputError> {
    if !window.orfs.is_sorted_by(|a, b| a.frame < b.frame) {
        let what = format!("frames of window {} are doubled or out of order", window.index + 1);
        return Err(OutputError::mismatch(window.record, what));
    }
    for &OrfScore { frame, scores } in window.orfs {
        if scores.iter().any(|x| !x.is_finite() || *x < 0.0) || scores == [0.0, 0.0] {
            let mut orf = String::new();
            orf_name(window.record, window.index, frame, &mut orf);
            return Err(OutputError::Score { orf, scores });
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
