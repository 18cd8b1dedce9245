//! Writers of the result files of a caller. Invariants: as for all results (`output/mod.rs`). The false discovery rate of a record
//! depends on the scores of all records, so rows of `predictions.tsv` and the texts of records that may be called wait in
//! temporary files until the end; memory does not grow with the number of records.
//!
//! | file | one row per | columns |
//! |---|---|---|
//! | `predictions.tsv` | record, or pair of mates | `seq_name length n_windows virus_score low high fdr threshold prediction reason class p_<class>...` |
//! | `windows.tsv` | window | `seq_name start end margin virus_score class` |
//! | `regions.tsv` | region | `seq_name start end length score n_windows reaches` |
//! | `viruses.tsv` | virus or provirus | `seq_name source_seq kind start end length reaches virus_score fdr n_windows` |
//! | `regions.bed` | region | chrom, start, end, name, score, strand |
//! | `notes.tsv` | note on the input or a failed window | `seq_name kind detail action` |
//! | `virus.fna` | row of `viruses.tsv` | see [`HitsFormat`] |
//! | `regions.fna` | region | FASTA |
//!
//! - In the tables `start` and `end` count bases from 1, both inclusive. In `regions.bed` bases count from 0 and the end is
//!   exclusive, as BED defines; the score is 1000 times the probability that belongs to the mean log odds of the region's
//!   windows, and the strand is `.`.
//! - `virus_score` is the calibrated probability of virus at the prevalence of the run, `low` and `high` are the bounds of its
//!   interval, `threshold` is the least score of a record of its length that is called virus. `fdr`, of a record called virus, is
//!   the mean of 1 - `virus_score` over this record and the called records with the same or a higher score.
//! - A *provirus* is a region of a record that is not called virus, named `RECORD:START-END` as in `regions.fna`; its
//!   `virus_score` is the probability that belongs to the mean log odds of its windows at equal priors.
//! - `reaches` says which ends of its record a region reaches: `none`, `start`, `end` or `both`.
//! - `prediction` is `virus`, `other` or `no_call`; `reason` says why there is no call, see [`NoCallReason`].
//! - `margin` is the window's logit of virus minus its logit of other.
//! - Missing values are `NA`.

use crate::methods::caller::fdr::FdrRanking;
use crate::methods::caller::regions::{Edges, RegionFinder, ViralRegion};
use crate::methods::caller::score::{
    CallRules, LengthThreshold, NoCallReason, PreliminaryCall, RecordSums, Threshold, largest,
};
use crate::methods::caller::sigmoid;
use crate::methods::{FinishedResults, FinishedWindow, ResultsWriter};
use crate::output::sorted::unlinked;
use crate::output::table::{Field, PlainField, TableWriter};
use crate::output::{
    CommonResults, Hit, Hits, HitsFormat, Note, OpenRecord, OutputError, PREDICTIONS, REGIONS, RecordEnd,
    RecordText, WINDOWS, commit,
};
use crate::pipeline::mates::Mate;
use crate::pipeline::queue::SequenceState;
use crate::pipeline::record::RunRecord;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::intermediate::write_lines;
use plimsoll_data::{DataError, DataErrorKind};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Name of the BED file of regions.
pub(crate) const REGIONS_BED: &str = "regions.bed";
/// Name of the file with the sequences of regions.
pub(crate) const REGIONS_FASTA: &str = "regions.fna";
/// Name of the table of viruses and proviruses.
pub const VIRUSES: &str = "viruses.tsv";

/// Positions of the tasks in a window's row of logits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogitLayout {
    /// Logit of `other`.
    pub(crate) other: usize,
    /// Logit of `virus`.
    pub(crate) virus: usize,
    /// Logits of the task `class`; empty without that task.
    pub(crate) classes: Range<usize>,
    /// Names of the classes.
    pub(crate) names: Vec<String>,
}

impl LogitLayout {
    /// The margin of a row of logits.
    fn margin(&self, logits: &[f32]) -> f64 {
        f64::from(logits[self.virus]) - f64::from(logits[self.other])
    }
}

/// Options of the writers.
#[derive(Clone, Debug)]
pub(crate) struct CallerResultOptions {
    pub(crate) rules: CallRules,
    /// Largest false discovery rate of a record that is called virus.
    pub(crate) max_fdr: Option<f64>,
    /// Format of the file of records called virus.
    pub(crate) hits_format: HitsFormat,
    /// Whether tables have a last column `source` with the input file of the row.
    pub(crate) source: bool,
    pub(crate) layout: LogitLayout,
    /// Bytes of lines that each sort holds in memory.
    pub(crate) sort_bytes: usize,
}

/// Calls of a run and their expected errors.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CallsSummary {
    /// Records whose score can lead to a call; the expected rates are means over them.
    #[serde(rename = "records_ranked")]
    pub ranked: u64,
    /// Least and largest expected true positive rate at the lengths of the records.
    #[serde(rename = "expected_tpr")]
    pub tpr: [f64; 2],
    /// Least and largest expected false positive rate at the lengths of the records.
    #[serde(rename = "expected_fpr")]
    pub fpr: [f64; 2],
    /// Mean of 1 - p over the records called virus: their expected share of false calls. `None` without such records.
    #[serde(rename = "expected_false_calls")]
    pub false_calls: Option<f64>,
    /// Number of records without a call, by reason.
    #[serde(rename = "no_call_reasons")]
    pub reasons: BTreeMap<&'static str, u64>,
    /// Number of regions.
    pub regions: u64,
    /// Number of proviruses: regions of records that are not called virus.
    pub proviruses: u64,
    /// Preset of the threshold; `None` for a threshold that was given as a score.
    pub preset: Option<&'static str>,
    /// Prevalence of the run.
    pub prevalence: f64,
    /// Thresholds over the lengths of the ranked records, by ascending length. Empty without such records.
    pub thresholds: Vec<LengthThreshold>,
    /// The first rows of `viruses.tsv`, which are not in run.json.
    #[serde(skip)]
    pub viruses: Vec<VirusRow>,
}

/// Maximum number of viruses and proviruses that a summary lists.
const LISTED: usize = 20;

/// A row of `viruses.tsv`.
#[derive(Clone, Debug, PartialEq)]
pub struct VirusRow {
    /// Name: that of the record, or of the region.
    pub name: String,
    /// `virus` or `provirus`.
    pub kind: &'static str,
    /// Length in bases.
    pub length: u64,
    /// Ends of the record that a provirus reaches; `NA` for a virus.
    pub reaches: &'static str,
    /// The score.
    pub score: f64,
    /// False discovery rate; `None` for a provirus.
    pub fdr: Option<f64>,
}

/// Writer of all result files of a caller. If it is dropped without [`ResultsWriter::finish`], it leaves no files.
pub(crate) struct CallerWriter {
    folder: PathBuf,
    options: CallerResultOptions,
    common: CommonResults,
    summary: CallsSummary,
    record: OpenRecord,
    sums: RecordSums,
    finder: RegionFinder,
    /// Number of regions of the current record or pair.
    regions_found: u64,
    /// Least and largest number of known letters of the ranked records.
    lengths: Option<[u64; 2]>,
    /// The first mate of the current pair, after its end.
    first_mate: Option<FirstMate>,
    windows: TableWriter,
    regions: TableWriter,
    bed: TableWriter,
    regions_fasta: AtomicFile,
    /// Rows of `predictions.tsv` without `fdr`, `prediction` and `reason`.
    rows: RowSpool,
    /// Texts of the records that may be called virus, and of regions.
    texts: TextSpool,
    ranking: FdrRanking,
}

/// A record, or a pair of mates, that gets a row in `predictions.tsv`.
struct RankedRecord<'a> {
    name: &'a str,
    /// Number of letters.
    length: usize,
    /// Number of known letters, of a pair that of the mate with the most.
    known: u64,
    /// The column `source`.
    source: &'a str,
    /// The sequence of the record, or of each mate.
    sequences: &'a [RankedSequence<'a>],
}

/// A sequence of a [`RankedRecord`].
struct RankedSequence<'a> {
    id: &'a str,
    length: usize,
    /// `None` for an empty sequence.
    text: Option<&'a RecordText>,
}

/// The first mate of a pair.
struct FirstMate {
    id: String,
    length: usize,
    /// Number of its letters.
    letters: u64,
    /// Number of its known letters.
    known: u64,
    text: RecordText,
    /// The column `source` of the pair.
    source: String,
}

impl CallerWriter {
    /// Creates the files in `folder`, and the folder if it does not exist. Results of an earlier run in the
    /// folder remain unchanged until [`ResultsWriter::finish`] replaces them.
    pub(crate) fn create(folder: &Path, options: CallerResultOptions) -> Result<Self, OutputError> {
        let common = CommonResults::create(folder, options.source)?;
        let regions = "seq_name start end length score n_windows reaches".replace(' ', "\t");
        Ok(Self {
            windows: common.table(folder, WINDOWS, "seq_name start end margin virus_score class")?,
            regions: TableWriter::create(folder, REGIONS, &regions)?,
            bed: TableWriter::bare(folder, REGIONS_BED)?,
            regions_fasta: AtomicFile::create(folder.join(REGIONS_FASTA))?,
            rows: RowSpool::create(folder)?,
            texts: TextSpool::create(folder)?,
            ranking: FdrRanking::new(folder, options.sort_bytes),
            folder: folder.to_owned(),
            options,
            common,
            summary: CallsSummary::default(),
            record: OpenRecord { has_gaps: true, ..OpenRecord::default() },
            sums: RecordSums::default(),
            finder: RegionFinder::default(),
            regions_found: 0,
            lengths: None,
            first_mate: None,
        })
    }

    /// Ends the current record after its last window. A pair of mates has one row, which is written with the second mate.
    ///
    /// # Errors
    /// Windows of another record, or windows that do not cover the record; a record without its text; a file that cannot be
    /// written.
    fn end_record(&mut self, record: &RecordEnd<'_>) -> Result<(), OutputError> {
        self.record.end(record)?;
        // The sums of a pair go on from the first mate to the second.
        let of_first_mate = self.first_mate.as_ref().map_or(0, |first| first.letters);
        let counted = self.sums.letters.letters() - of_first_mate;
        if counted != record.length as u64 {
            let what = format!("its windows count {counted} letters of {}", record.length);
            return Err(OutputError::mismatch(record.id, what));
        }
        let calibration = self.options.rules.calibration();
        let size = calibration.window.min(record.length as u64);
        for region in self.finder.finish(&calibration.regions, size) {
            self.write_region(record, &region)?;
        }
        self.record.clear();
        // A copy, since ranking a record changes these results.
        let source = self.common.source().to_owned();
        match record.mate {
            None => self.rank(&RankedRecord {
                name: record.id,
                length: record.length,
                known: self.sums.letters.known(),
                source: &source,
                sequences: &[RankedSequence { id: record.id, length: record.length, text: record.text }],
            }),
            Some(mate) if !mate.is_second => {
                self.first_mate = Some(FirstMate {
                    id: record.id.to_owned(),
                    length: record.length,
                    letters: self.sums.letters.letters(),
                    known: self.sums.letters.known(),
                    text: record.text.cloned().unwrap_or_default(),
                    source: self.common.source().to_owned(),
                });
                Ok(())
            }
            Some(Mate { pair, .. }) => {
                let Some(first) = self.first_mate.take() else {
                    return Err(OutputError::mismatch(record.id, "its mate was not written before it"));
                };
                self.rank(&RankedRecord {
                    name: pair,
                    length: first.length + record.length,
                    // The margin of a pair is a mean over windows of the mates' lengths, which is what the calibration was
                    // measured for; that of a record of their total length would be more certain than it is.
                    known: first.known.max(self.sums.letters.known() - first.known),
                    source: &first.source,
                    sequences: &[
                        RankedSequence { id: &first.id, length: first.length, text: Some(&first.text) },
                        RankedSequence { id: record.id, length: record.length, text: record.text },
                    ],
                })
            }
        }
    }

    /// Scores a record, or a pair of mates, and adds it to the ranking, its row and its texts to the temporary files.
    fn rank(&mut self, record: &RankedRecord<'_>) -> Result<(), OutputError> {
        let RankedRecord { name, length, known, source, sequences } = *record;
        let CallerResultOptions { rules, layout, .. } = &self.options;
        let score = rules.score(known, &self.sums);
        let call = rules.call(known, &self.sums, score.as_ref());
        if score.is_some() && call.is_ranked() {
            let [shortest, longest] = self.lengths.unwrap_or([known; 2]);
            self.lengths = Some([shortest.min(known), longest.max(known)]);
            let errors = rules.errors(known);
            self.summary.ranked += 1;
            for bound in 0..2 {
                self.summary.tpr[bound] += errors.tpr[bound];
                self.summary.fpr[bound] += errors.fpr[bound];
            }
        }
        self.ranking.add(score.map(|score| score.probability), call == PreliminaryCall::Virus)?;
        let mut start = format!("{}\t{length}\t{}\t", Field(name), self.sums.windows);
        // Writing to a String cannot fail.
        let _ = match score {
            Some(score) => {
                let [low, high] = score.interval.map(sigmoid);
                write!(start, "{:.6}\t{low:.6}\t{high:.6}", score.probability)
            }
            None => write!(start, "NA\tNA\tNA"),
        };
        let classes = self.sums.classes(rules.calibration().class_temperature);
        let threshold = score.map_or("NA".to_owned(), |score| format!("{:.6}", sigmoid(score.threshold)));
        let mut rest = largest(&classes).map_or("NA", |class| &layout.names[class]).to_owned();
        for class in 0..layout.names.len() {
            let _ = match classes.get(class) {
                Some(p) => write!(rest, "\t{p:.4}"),
                None => write!(rest, "\tNA"),
            };
        }
        rest += source;
        let has_texts = call == PreliminaryCall::Virus || self.regions_found > 0;
        let probability = score.map_or(0.0, |score| score.probability);
        self.rows.push(&SpooledRow { call, probability, has_texts, start, threshold, rest })?;
        if call == PreliminaryCall::Virus {
            for RankedSequence { id, text, .. } in sequences.iter().filter(|sequence| sequence.length > 0) {
                let Some(text) = text else {
                    return Err(OutputError::mismatch(
                        id,
                        "may be called virus, and its sequence is not there",
                    ));
                };
                self.texts.push_record(id, text)?;
            }
        }
        if has_texts {
            self.texts.end_row()?;
        }
        self.common.counts.records += 1;
        self.regions_found = 0;
        self.sums.clear();
        Ok(())
    }

    /// Writes a region of the current record, and keeps its text in case the record is not called virus.
    fn write_region(&mut self, record: &RecordEnd<'_>, region: &ViralRegion) -> Result<(), OutputError> {
        let ViralRegion { start, end, score, windows, log_odds, edges } = *region;
        let name = Field(record.id);
        let first = start + 1;
        let length = end - start;
        let reaches = edges.name();
        self.regions.row(format_args!("{name}\t{first}\t{end}\t{length}\t{score:.4}\t{windows}\t{reaches}"))?;
        // An integer from 0 to 1000 after rounding, so the cast is exact.
        let mean = (1000.0 * sigmoid(log_odds)).round() as u32;
        let chrom = PlainField(record.id);
        self.bed.row(format_args!("{chrom}\t{start}\t{end}\t{chrom}:{first}-{end}\t{mean}\t."))?;
        let place = start as usize..end as usize;
        let text = record.text.and_then(|text| Some((text, text.sequence.get(place.clone())?)));
        let Some((text, bases)) = text else {
            return Err(OutputError::mismatch(record.id, "has a region, and its sequence is not there"));
        };
        let out = &mut self.regions_fasta;
        let written = writeln!(out, ">{}:{first}-{end} score={score:.4} n_windows={windows}", record.id)
            .and_then(|()| write_lines(out, bases));
        written.map_err(|e| self.regions_fasta.error(e))?;
        self.texts.push_region(record.id, region, text, place)?;
        self.regions_found += 1;
        self.summary.regions += 1;
        Ok(())
    }

    /// Ranks the records, writes `predictions.tsv` and the records called virus, and replaces the results of an earlier run.
    /// The counts and the summary of the calls are added to `run_record`.
    ///
    /// # Errors
    /// A last record that was not ended; a file that cannot be written.
    fn complete(self, run_record: &mut RunRecord) -> Result<FinishedResults, OutputError> {
        let Self { folder, options, common, mut summary, record, first_mate, .. } = self;
        let mut counts = common.counts;
        if record.windows > 0 || first_mate.is_some() {
            return Err(OutputError::mismatch(&record.id, "its windows were given, it or its mate was not"));
        }
        let classes: String = options.layout.names.iter().map(|name| format!(" p_{name}")).collect();
        let columns = format!(
            "seq_name length n_windows virus_score low high fdr threshold prediction reason class{classes}"
        );
        let mut predictions = common.table(&folder, PREDICTIONS, &columns)?;
        let mut viruses = VirusTable::create(&folder, &common)?;
        let mut hits = Hits::create(&folder, options.hits_format)?;
        let mut rows = self.rows.read()?;
        let mut texts = self.texts.read()?;
        // Sum of 1 - p over the records called virus.
        let mut wrong = 0.0;
        self.ranking.finish(|fdr| {
            let row = rows.next()?;
            let call = match (row.call, fdr, options.max_fdr) {
                (PreliminaryCall::Virus, Some(fdr), Some(max_fdr)) if fdr > max_fdr => {
                    PreliminaryCall::None(NoCallReason::Fdr)
                }
                (call, _, _) => call,
            };
            let prediction = match call {
                PreliminaryCall::Virus => {
                    counts.virus += 1;
                    wrong += 1.0 - row.probability;
                    "virus"
                }
                PreliminaryCall::Other => {
                    counts.other += 1;
                    "other"
                }
                PreliminaryCall::None(reason) => {
                    *summary.reasons.entry(reason.name()).or_default() += 1;
                    if reason == NoCallReason::Empty {
                        counts.skipped += 1;
                    } else {
                        counts.no_call += 1;
                    }
                    "no_call"
                }
            };
            let reason = match call {
                PreliminaryCall::None(reason) => reason.name(),
                PreliminaryCall::Virus | PreliminaryCall::Other => "NA",
            };
            let fdr = fdr.filter(|_| call == PreliminaryCall::Virus);
            let shown_fdr = fdr.map_or("NA".to_owned(), |fdr| format!("{fdr:.6}"));
            let SpooledRow { start, threshold, rest, probability, has_texts, .. } = row;
            predictions
                .row(format_args!("{start}\t{shown_fdr}\t{threshold}\t{prediction}\t{reason}\t{rest}"))?;
            // The last column, with the tab before it.
            let source = rest.rfind('\t').filter(|_| options.source).map_or("", |at| &rest[at..]);
            if call == PreliminaryCall::Virus {
                viruses.virus(&start, probability, fdr, source)?;
            }
            while has_texts && texts.next()? {
                match &texts.region {
                    None if call == PreliminaryCall::Virus => {
                        let score = &format!("{probability:.6}");
                        hits.write(&Hit { id: &texts.id, text: &texts.text, score, call: prediction })?;
                    }
                    Some((record, region)) if call != PreliminaryCall::Virus => {
                        let score = &format!("{:.6}", sigmoid(region.log_odds));
                        hits.write(&Hit { id: &texts.id, text: &texts.text, score, call: "provirus" })?;
                        viruses.provirus(&texts.id, record, region, source)?;
                        summary.proviruses += 1;
                    }
                    // A region of a virus, or a record that was not called because of its false discovery rate.
                    None | Some(_) => {}
                }
            }
            Ok::<(), OutputError>(())
        })?;
        summary.viruses = viruses.listed;
        summary.prevalence = options.rules.prevalence();
        summary.preset = match options.rules.call_threshold() {
            Threshold::Preset(preset) => Some(preset.name()),
            Threshold::Score(_) => None,
        };
        if let Some([shortest, longest]) = self.lengths {
            summary.thresholds = options.rules.thresholds(shortest, longest);
        }
        summary.false_calls = (counts.virus > 0).then(|| wrong / counts.virus as f64);
        for rate in summary.tpr.iter_mut().chain(&mut summary.fpr) {
            *rate /= summary.ranked.max(1) as f64;
        }
        run_record.calls = Some(summary.clone());
        let tables = [predictions, viruses.table, self.windows, self.regions, self.bed, common.into_notes()];
        let mut files: Vec<AtomicFile> = tables.into_iter().map(TableWriter::into_file).collect();
        files.push(hits.into_file()?);
        files.push(self.regions_fasta);
        commit(&folder, files, run_record, counts)?;
        Ok(FinishedResults { counts, calls: Some(summary) })
    }
}

impl ResultsWriter for CallerWriter {
    fn common(&mut self) -> &mut CommonResults {
        &mut self.common
    }

    fn window(&mut self, window: &FinishedWindow<'_>) -> Result<(), OutputError> {
        let FinishedWindow { record, location, letters, sequences, .. } = *window;
        let start = location.start;
        let end = location.end();
        // A window is one sequence, or none if it is too short.
        let failed = sequences.iter().any(|sequence| sequence.state == SequenceState::Failed);
        if failed {
            self.common.note(&Note::failed(record, location, ""))?;
        }
        self.record.accept(record, location.index, start, end)?;
        self.common.counts.windows += 1;
        self.sums.letters.add(letters.new.plus(letters.left_out));
        let name = Field(record);
        let Some((_, logits)) = window.rows().next() else {
            self.sums.add_without_score(failed);
            let source = self.common.source();
            return self.windows.row(format_args!("{name}\t{}\t{end}\tNA\tNA\tNA{source}", start + 1));
        };
        self.common.counts.scored_windows += 1;
        let source = self.common.source();
        let CallerResultOptions { rules, layout, .. } = &self.options;
        let margin = layout.margin(logits);
        let classes = &logits[layout.classes.clone()];
        let class = largest(classes).map_or("NA", |class| &layout.names[class]);
        self.sums.add(letters.new.known().into(), margin, classes);
        let size = rules.calibration().window;
        self.finder.add(rules.region_window(start as u64, end as u64, letters, margin), size);
        let score = rules.window(letters.known.into(), margin);
        self.windows.row(format_args!("{name}\t{}\t{end}\t{margin:.4}\t{score:.6}\t{class}{source}", start + 1))
    }

    fn record(&mut self, record: &RecordEnd<'_>) -> Result<(), OutputError> {
        self.end_record(record)
    }

    fn finish(self: Box<Self>, run_record: &mut RunRecord) -> Result<FinishedResults, OutputError> {
        self.complete(run_record)
    }
}

/// Writer of `viruses.tsv`.
struct VirusTable {
    table: TableWriter,
    /// The first [`LISTED`] rows.
    listed: Vec<VirusRow>,
}

impl VirusTable {
    /// Creates the table; `source` is the column `source` with a blank before it, or empty.
    fn create(folder: &Path, common: &CommonResults) -> Result<Self, OutputError> {
        let columns = "seq_name source_seq kind start end length reaches virus_score fdr n_windows";
        Ok(Self { table: common.table(folder, VIRUSES, columns)?, listed: vec![] })
    }

    /// Adds a record called virus, given the first columns of its row in `predictions.tsv`.
    fn virus(&mut self, row: &str, score: f64, fdr: Option<f64>, source: &str) -> Result<(), OutputError> {
        let mut cells = row.split('\t');
        let [name, length, windows] = std::array::from_fn(|_| cells.next().unwrap_or_default());
        let shown = fdr.map_or("NA".to_owned(), |fdr| format!("{fdr:.6}"));
        self.table.row(format_args!(
            "{name}\t{name}\tvirus\t1\t{length}\t{length}\tNA\t{score:.6}\t{shown}\t{windows}{source}"
        ))?;
        let length = length.parse().unwrap_or_default();
        self.list(VirusRow { name: name.to_owned(), kind: "virus", length, reaches: "NA", score, fdr });
        Ok(())
    }

    /// Adds a region of a record that is not called virus.
    fn provirus(
        &mut self,
        name: &str,
        record: &str,
        region: &ViralRegion,
        source: &str,
    ) -> Result<(), OutputError> {
        let ViralRegion { start, end, windows, log_odds, edges, .. } = *region;
        let name = Field(name).to_string();
        let record = Field(record);
        let first = start + 1;
        let length = end - start;
        let reaches = edges.name();
        let score = sigmoid(log_odds);
        self.table.row(format_args!(
            "{name}\t{record}\tprovirus\t{first}\t{end}\t{length}\t{reaches}\t{score:.6}\tNA\t{windows}{source}"
        ))?;
        self.list(VirusRow { name, kind: "provirus", length, reaches, score, fdr: None });
        Ok(())
    }

    fn list(&mut self, row: VirusRow) {
        if self.listed.len() < LISTED {
            self.listed.push(row);
        }
    }
}

/// A temporary file that was unlinked when it was created.
struct UnlinkedFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl UnlinkedFile {
    fn create(folder: &Path) -> Result<Self, OutputError> {
        let (path, file) = unlinked(folder)?;
        Ok(Self { path, file: BufWriter::with_capacity(64 << 10, file) })
    }

    fn error(&self, source: io::Error) -> OutputError {
        DataError::at(&self.path, DataErrorKind::Write(source)).into()
    }

    /// Returns a reader from the start of the file.
    fn read(self) -> Result<(PathBuf, BufReader<File>), OutputError> {
        let Self { path, file } = self;
        let rewound = file.into_inner().map_err(io::IntoInnerError::into_error).and_then(|mut file| {
            file.seek(SeekFrom::Start(0))?;
            Ok(file)
        });
        match rewound {
            Ok(file) => Ok((path, BufReader::with_capacity(64 << 10, file))),
            Err(source) => Err(DataError::at(path, DataErrorKind::Write(source)).into()),
        }
    }
}

/// Rows of `predictions.tsv` in input order.
struct RowSpool(UnlinkedFile);

/// A row of `predictions.tsv` without the columns that depend on the false discovery rate.
struct SpooledRow {
    call: PreliminaryCall,
    probability: f64,
    /// Whether texts of the row follow in [`TextSpool`].
    has_texts: bool,
    /// The columns before `fdr`.
    start: String,
    threshold: String,
    /// The columns after `reason`.
    rest: String,
}

/// Byte that separates the parts of a row in the temporary file; [`Field`] escapes it in texts.
const SEPARATOR: &str = "\u{1f}";

impl RowSpool {
    fn create(folder: &Path) -> Result<Self, OutputError> {
        Ok(Self(UnlinkedFile::create(folder)?))
    }

    fn push(&mut self, row: &SpooledRow) -> Result<(), OutputError> {
        let call = match row.call {
            PreliminaryCall::Virus => "virus",
            PreliminaryCall::Other => "other",
            PreliminaryCall::None(reason) => reason.name(),
        };
        let numbers = format!("{:016x}{SEPARATOR}{}", row.probability.to_bits(), u8::from(row.has_texts));
        let texts = [call, &numbers, &row.start, &row.threshold, &row.rest].join(SEPARATOR);
        let written = writeln!(self.0.file, "{texts}");
        written.map_err(|e| self.0.error(e))
    }

    fn read(self) -> Result<RowReader, OutputError> {
        let (path, file) = self.0.read()?;
        Ok(RowReader { path, file, line: String::new() })
    }
}

/// Reader of the rows.
struct RowReader {
    path: PathBuf,
    file: BufReader<File>,
    line: String,
}

impl RowReader {
    fn next(&mut self) -> Result<SpooledRow, OutputError> {
        self.line.clear();
        let read = self.file.read_line(&mut self.line);
        read.map_err(|e| DataError::at(&self.path, DataErrorKind::Read(e)))?;
        let row = Self::parse(self.line.trim_end_matches('\n'));
        row.ok_or_else(|| OutputError::mismatch(PREDICTIONS, "a temporary file changed while it was read"))
    }

    fn parse(line: &str) -> Option<SpooledRow> {
        let mut parts = line.split(SEPARATOR);
        let call = match parts.next()? {
            "virus" => PreliminaryCall::Virus,
            "other" => PreliminaryCall::Other,
            name => PreliminaryCall::None(NoCallReason::ALL.into_iter().find(|reason| reason.name() == name)?),
        };
        let probability = f64::from_bits(u64::from_str_radix(parts.next()?, 16).ok()?);
        let has_texts = parts.next()? == "1";
        let start = parts.next()?.to_owned();
        let threshold = parts.next()?.to_owned();
        let rest = parts.next()?.to_owned();
        Some(SpooledRow { call, probability, has_texts, start, threshold, rest })
    }
}

/// Texts of records and regions in input order. Each begins with [`RECORD`] or [`REGION`], each of its parts has its length
/// before it, and a row ends with [`END_OF_ROW`].
struct TextSpool(UnlinkedFile);

const END_OF_ROW: u64 = 0;
const RECORD: u64 = 1;
const REGION: u64 = 2;

impl TextSpool {
    fn create(folder: &Path) -> Result<Self, OutputError> {
        Ok(Self(UnlinkedFile::create(folder)?))
    }

    fn push_record(&mut self, id: &str, text: &RecordText) -> Result<(), OutputError> {
        self.numbers(&[RECORD])?;
        self.parts(&[id.as_bytes(), &text.description, &text.sequence, &text.quality])
    }

    /// Adds a region of the record `id` with the bases `place` of its text.
    fn push_region(
        &mut self,
        id: &str,
        region: &ViralRegion,
        text: &RecordText,
        place: Range<usize>,
    ) -> Result<(), OutputError> {
        let ViralRegion { start, end, score, windows, log_odds, edges: Edges { start: at_start, end: at_end } } =
            *region;
        let [score, log_odds] = [score, log_odds].map(f64::to_bits);
        self.numbers(&[REGION, start, end, score, windows, log_odds, at_start.into(), at_end.into()])?;
        let name = format!("{id}:{}-{end}", start + 1);
        // FASTA has no qualities.
        let quality = text.quality.get(place.clone()).unwrap_or_default();
        self.parts(&[name.as_bytes(), &text.description, &text.sequence[place], quality, id.as_bytes()])
    }

    fn end_row(&mut self) -> Result<(), OutputError> {
        self.numbers(&[END_OF_ROW])
    }

    fn numbers(&mut self, numbers: &[u64]) -> Result<(), OutputError> {
        let written = numbers.iter().try_for_each(|number| self.0.file.write_all(&number.to_le_bytes()));
        written.map_err(|e| self.0.error(e))
    }

    fn parts(&mut self, parts: &[&[u8]]) -> Result<(), OutputError> {
        for part in parts {
            self.numbers(&[part.len() as u64])?;
            self.0.file.write_all(part).map_err(|e| self.0.error(e))?;
        }
        Ok(())
    }

    fn read(self) -> Result<TextReader, OutputError> {
        let (path, file) = self.0.read()?;
        Ok(TextReader { path, file, id: String::new(), text: RecordText::default(), region: None })
    }
}

/// Reader of the texts.
struct TextReader {
    path: PathBuf,
    file: BufReader<File>,
    /// Name of the record, or of the region.
    id: String,
    text: RecordText,
    /// The region, if the text is one, with the id of its record.
    region: Option<(String, ViralRegion)>,
}

impl TextReader {
    /// Reads the next text of the row; false after the last.
    fn next(&mut self) -> Result<bool, OutputError> {
        self.read().map_err(|e| DataError::at(&self.path, DataErrorKind::Read(e)).into())
    }

    fn read(&mut self) -> io::Result<bool> {
        let kind = self.number()?;
        if kind == END_OF_ROW {
            return Ok(false);
        }
        let region = if kind == REGION { Some(self.region()?) } else { None };
        // The buffers of the last text are used again.
        let mut id = std::mem::take(&mut self.id).into_bytes();
        self.part(&mut id)?;
        self.id = utf8(id)?;
        let mut text = std::mem::take(&mut self.text);
        for part in [&mut text.description, &mut text.sequence, &mut text.quality] {
            self.part(part)?;
        }
        self.text = text;
        self.region = match region {
            None => None,
            Some(region) => {
                let mut record = vec![];
                self.part(&mut record)?;
                Some((utf8(record)?, region))
            }
        };
        Ok(true)
    }

    fn region(&mut self) -> io::Result<ViralRegion> {
        let [start, end] = [self.number()?, self.number()?];
        let score = f64::from_bits(self.number()?);
        let windows = self.number()?;
        let log_odds = f64::from_bits(self.number()?);
        let edges = Edges { start: self.number()? == 1, end: self.number()? == 1 };
        Ok(ViralRegion { start, end, score, windows, log_odds, edges })
    }

    fn number(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
    }

    fn part(&mut self, part: &mut Vec<u8>) -> io::Result<()> {
        let length = self.number()?;
        read_part(&mut self.file, length, part)
    }
}

/// The text in a part.
fn utf8(part: Vec<u8>) -> io::Result<String> {
    String::from_utf8(part).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// Reads a part of `length` bytes into `part`.
fn read_part(file: &mut BufReader<File>, length: u64, part: &mut Vec<u8>) -> io::Result<()> {
    part.clear();
    // `take` rather than a vector of `length` zeros: a damaged file must not decide how much memory is allocated.
    let read = file.take(length).read_to_end(part)?;
    if read as u64 == length { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}
