//! Reads a folder of results of VirNucPro's models or of a caller. Invariant: every row is checked, and tables that
//! contradict each other or their run record are an error with path and line; predictions are not recomputed.

use super::survey::{CALLS, OverviewStatistics, PredictionRow};
use super::track::{RecordTrack, TrackWindow};
use super::virnucpro::{self, VirNucProFolder};
use crate::PlotError;
use plimsoll_data::DataError;
use plimsoll_data::table::{TableReader, share, whole};
use plimsoll_data::translate::Frame;
use plimsoll_virus::caller::Threshold;
use plimsoll_virus::output::reader::{
    RecordTables, ResultFolder, ResultFolderError, share_or_missing, window_bases,
};
use plimsoll_virus::output::{Call, PREDICTIONS, is_row_of};
use serde_json::Value;
use std::path::{Path, PathBuf};

const FRAMES: &str = "prediction_results.txt";

const RECORD_COLUMNS: [&str; 7] =
    ["seq_name", "length", "n_windows", "n_scored", "n_virus", "virus_score", "prediction"];
const WINDOW_COLUMNS: [&str; 9] =
    ["seq_name", "window", "start", "end", "n_orfs", "best_frame", "score_other", "score_virus", "prediction"];
const CALLED_RECORD_COLUMNS: [&str; 5] = ["seq_name", "length", "n_windows", "virus_score", "prediction"];
const CALLED_WINDOW_COLUMNS: [&str; 4] = ["seq_name", "start", "end", "virus_score"];
const FRAME_COLUMNS: [&str; 3] = ["Sequence_ID", "score1", "score2"];

/// Properties of the run that pictures show.
#[derive(Clone, Debug, PartialEq)]
pub struct About {
    /// The program that predicted, with its version where the results state it.
    pub made_by: String,
    /// Names of the input files, without their folders.
    pub inputs: Vec<String>,
    /// Whether the weights were trained; scores of untrained weights are not drawn.
    pub trained: bool,
    /// Minimum score of a record for the call "virus"; `None` for a preset of a caller, whose threshold depends on the
    /// length of the record.
    pub threshold: Option<f32>,
    /// Whether windows have a score for each strand. A caller scores both strands together.
    pub by_strand: bool,
    /// Length of a window in bases.
    pub length: u64,
}

/// A folder of results.
pub struct ResultsFolder {
    /// Path of the folder.
    pub folder: PathBuf,
    /// Properties of the run.
    pub about: About,
    source: ResultsSource,
}

/// Program that wrote the results.
enum ResultsSource {
    /// `predict`.
    Ours(ResultFolder),
    /// VirNucPro or virnucpro-broad.
    Original(VirNucProFolder),
}

impl ResultsFolder {
    /// Opens the folder by its run record, which means that the results are complete.
    pub fn open(folder: &Path) -> Result<Self, PlotError> {
        let path = ResultFolder::run_record(folder);
        if !path.is_file() {
            // `predict` writes its run record last: tables without a run record belong to an interrupted
            // run.
            if !folder.join(PREDICTIONS).exists()
                && let Some(tables) = virnucpro::tables_in(folder)?
            {
                let original = VirNucProFolder::open(&tables)?;
                let about = original.about.clone();
                let source = ResultsSource::Original(original);
                return Ok(ResultsFolder { folder: folder.to_owned(), about, source });
            }
            let is_missing = !folder.exists();
            let folder = folder.to_owned();
            return Err(if is_missing {
                PlotError::NoFolder { folder }
            } else {
                PlotError::NoResult { folder }
            });
        }
        let results = ResultFolder::open(folder).map_err(|error| match error {
            ResultFolderError::NoFolder => PlotError::NoFolder { folder: folder.to_owned() },
            ResultFolderError::NoRunRecord => PlotError::NoResult { folder: folder.to_owned() },
            ResultFolderError::NotJson => PlotError::NotARunRecord { path: path.clone(), missing: "JSON" },
            ResultFolderError::Unreadable(error) => error.into(),
        })?;
        let about = about(&results.run).map_err(|missing| PlotError::NotARunRecord { path, missing })?;
        Ok(ResultsFolder { folder: folder.to_owned(), about, source: ResultsSource::Ours(results) })
    }

    /// Calls `see` for every record, in order.
    pub fn records(&self, mut see: impl FnMut(&PredictionRow)) -> Result<(), DataError> {
        let folder = match &self.source {
            ResultsSource::Ours(folder) => folder,
            ResultsSource::Original(original) => {
                original.records(see);
                return Ok(());
            }
        };
        let mut rows = RecordRows::open(folder, self.about.by_strand)?;
        let mut count = 0;
        while let Some(entry) = rows.next(count)? {
            see(&entry);
            count += 1;
        }
        rows.tables.finish(count, folder)
    }

    /// Returns the windows of the `chosen` records, which must be sorted by ordinal, and adds the scores of all
    /// windows to `survey`.
    pub fn tracks(
        &self,
        chosen: &[PredictionRow],
        survey: &mut OverviewStatistics,
    ) -> Result<Vec<RecordTrack>, DataError> {
        let folder = match &self.source {
            ResultsSource::Ours(folder) => folder,
            ResultsSource::Original(original) => return Ok(original.tracks(chosen, survey)),
        };
        let mut records = RecordRows::open(folder, self.about.by_strand)?;
        let mut windows = WindowRows::open(folder, self.about.by_strand)?;
        let mut tracks: Vec<RecordTrack> = vec![];
        let mut ordinal = 0;
        let mut count = 0;
        while let Some(mut record) = records.next(ordinal)? {
            let wanted = chosen.get(tracks.len()).is_some_and(|next| next.ordinal == ordinal);
            let mut drawn = vec![];
            let mut cursor = RecordCursor::default();
            for number in 1..=record.windows {
                let window = windows.next(&record, number, &mut cursor, wanted)?;
                if let Some(score) = window.score {
                    survey.window_scores.add(score, window.call);
                }
                if wanted {
                    drawn.push(window);
                }
            }
            count += record.windows;
            ordinal += 1;
            if wanted {
                if !self.about.by_strand {
                    record.scored = drawn.iter().filter(|window| window.score.is_some()).count() as u64;
                }
                if let Some(regions) = &records.tables.regions {
                    regions.place_second_mate(cursor.before, record.length, &mut record.regions)?;
                }
                tracks.push(RecordTrack {
                    entry: record,
                    windows: drawn,
                    every_frame: windows.has_every_frame(),
                });
            }
        }
        folder.check_window_count(windows.finish()?, count)?;
        Ok(tracks)
    }
}

/// Readers of the table of records, and of that of regions if there is one.
struct RecordRows {
    tables: RecordTables,
    by_strand: bool,
}

impl RecordRows {
    fn open(folder: &ResultFolder, by_strand: bool) -> Result<Self, DataError> {
        let columns = if by_strand { &RECORD_COLUMNS[..] } else { &CALLED_RECORD_COLUMNS[..] };
        Ok(Self { tables: folder.records(columns)?, by_strand })
    }

    /// Reads the next record, which is row `ordinal`, and its regions.
    fn next(&mut self, ordinal: u64) -> Result<Option<PredictionRow>, DataError> {
        let row = if self.by_strand {
            self.tables.records.next(|cells| entry(ordinal, cells))?
        } else {
            self.tables.records.next(|cells| called_entry(ordinal, cells))?
        };
        let Some(mut row) = row else { return Ok(None) };
        if let Some(regions) = &mut self.tables.regions {
            regions.take(&row.id, row.length, &mut row.regions)?;
        }
        Ok(Some(row))
    }
}

/// Readers of the tables of windows.
enum WindowRows {
    /// Of VirNucPro's models: `windows.tsv`, and the scores of all open reading frames if they were written.
    ByStrand { windows: TableReader, frames: Option<TableReader> },
    /// Of a caller: `windows.tsv`.
    Called(TableReader),
}

impl WindowRows {
    fn open(folder: &ResultFolder, by_strand: bool) -> Result<Self, DataError> {
        if !by_strand {
            return Ok(Self::Called(folder.windows(&CALLED_WINDOW_COLUMNS)?));
        }
        let windows = folder.windows(&WINDOW_COLUMNS)?;
        let frames = folder.path.join(FRAMES);
        let frames = frames.exists().then(|| TableReader::open(&frames, &FRAME_COLUMNS)).transpose()?;
        Ok(Self::ByStrand { windows, frames })
    }

    /// Reads window `number` of a record, with the scores of its strands if it is `wanted`. `cursor` is at the end
    /// of the record's window before it.
    fn next(
        &mut self,
        record: &PredictionRow,
        number: u64,
        cursor: &mut RecordCursor,
        wanted: bool,
    ) -> Result<TrackWindow, DataError> {
        match self {
            Self::ByStrand { windows, frames } => {
                let row = windows.next(|cells| window(record, number, cells))?;
                let (mut window, orfs) = row.ok_or_else(|| windows.ends_early())?;
                match frames {
                    Some(frames) if wanted => window.strands = strands(frames, &record.id, number, orfs)?,
                    Some(frames) => frames.skip(orfs)?,
                    None => {}
                }
                Ok(window)
            }
            Self::Called(windows) => {
                let row = windows.next(|cells| called_window(record, cursor, cells))?;
                row.ok_or_else(|| windows.ends_early())
            }
        }
    }

    /// Whether windows have the scores of every open reading frame, or need none.
    fn has_every_frame(&self) -> bool {
        match self {
            Self::ByStrand { frames, .. } => frames.is_some(),
            Self::Called(_) => true,
        }
    }

    /// Checks that all rows were read; returns the table of windows.
    fn finish(&mut self) -> Result<&TableReader, DataError> {
        match self {
            Self::ByStrand { windows, frames } => {
                windows.expect_end()?;
                frames.as_mut().map_or(Ok(()), TableReader::expect_end)?;
                Ok(windows)
            }
            Self::Called(windows) => windows.expect_end().map(|()| &*windows),
        }
    }
}

/// Reads a run record. `Err` names a missing key.
pub(super) fn about(record: &Value) -> Result<About, &'static str> {
    let parameters = &record["identity"]["parameters"];
    let counts = &record["counts"];
    let made_by = format!("plimsoll {}", record["plimsoll"].as_str().ok_or("`plimsoll`")?);
    let by_strand = !record["models"]["caller"].is_string();
    let threshold = if by_strand {
        Some(parameters["threshold"].as_f64().ok_or("`threshold`")? as f32)
    } else {
        let named = parameters["calling"]["threshold"].as_str().and_then(Threshold::of_name);
        match named.ok_or("`calling.threshold`")? {
            Threshold::Preset(_) => None,
            Threshold::Score(score) => Some(score as f32),
        }
    };
    let about = About {
        made_by,
        inputs: record["inputs"].as_array().ok_or("`inputs`")?.iter().filter_map(file_name).collect(),
        trained: record["models"]["trained"].as_bool().ok_or("`models.trained`")?,
        threshold,
        by_strand,
        length: parameters["length"].as_u64().ok_or("`length`")?,
    };
    // The numbers of rows of the tables are checked against these counts.
    counts["records"].as_u64().ok_or("`counts.records`")?;
    counts["windows"].as_u64().ok_or("`counts.windows`")?;
    Ok(about)
}

/// The last part of a path in the run record.
fn file_name(path: &Value) -> Option<String> {
    let path = Path::new(path.as_str()?);
    Some(path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned())
}

/// Parses a record and checks that its columns are consistent.
fn entry(ordinal: u64, cells: [&str; 7]) -> Result<PredictionRow, String> {
    let [id, length, windows, scored, virus, score, call] = cells;
    let entry = PredictionRow {
        ordinal,
        id: id.to_owned(),
        length: whole("length", length)?,
        windows: whole("n_windows", windows)?,
        scored: whole("n_scored", scored)?,
        virus: known(virus).map(|text| whole("n_virus", text)).transpose()?,
        score: share_or_missing("virus_score", score)?,
        call: called(call)?,
        regions: vec![],
    };
    let scored = entry.scored > 0;
    if entry.scored > entry.windows
        || entry.score.is_some() != (scored && entry.call != Call::Untrained)
        || scored == matches!(entry.call, Call::NoCall | Call::Skipped)
    {
        let text = "the columns contradict each other: n_windows, n_scored, virus_score, prediction";
        return Err(text.to_owned());
    }
    Ok(entry)
}

/// Parses a row of a caller's `predictions.tsv`. It does not say how many windows have a score: [`ResultsFolder::tracks`] counts
/// them where they are drawn.
fn called_entry(ordinal: u64, cells: [&str; 5]) -> Result<PredictionRow, String> {
    let [id, length, windows, score, call] = cells;
    let windows = whole("n_windows", windows)?;
    let score = share_or_missing("virus_score", score)?;
    let call = called(call)?;
    if score.is_none() && matches!(call, Call::Virus | Call::Other) {
        return Err("the columns contradict each other: virus_score, prediction".to_owned());
    }
    Ok(PredictionRow {
        ordinal,
        id: id.to_owned(),
        length: whole("length", length)?,
        windows,
        scored: if score.is_some() { windows } else { 0 },
        virus: None,
        score,
        call,
        regions: vec![],
    })
}

/// End of the last window of a record that was read. The mates of a pair are drawn one after the other, so the positions of
/// the second continue those of the first.
#[derive(Default)]
struct RecordCursor {
    /// Sequence of the last window.
    sequence: String,
    /// Bases of the sequences before it.
    before: u64,
    /// End of the last window, counted from the first base of the record or pair.
    end: u64,
}

/// Parses a window of the results of a caller.
fn called_window(
    record: &PredictionRow,
    cursor: &mut RecordCursor,
    cells: [&str; 4],
) -> Result<TrackWindow, String> {
    let [id, start, end, score] = cells;
    if id != cursor.sequence {
        if !is_row_of(id, &record.id, true) {
            return Err(other_run("a window", record));
        }
        *cursor = RecordCursor { sequence: id.to_owned(), before: cursor.end, end: cursor.end };
    }
    let start = whole("start", start)?;
    let end = whole("end", end)?;
    let in_record = cursor.before.checked_add(end).filter(|&end| end <= record.length);
    let Some(last) = in_record.filter(|_| start > 0 && end >= start) else {
        return Err(format!("bases {start} to {end} are not in a record of {}", record.length));
    };
    cursor.end = last;
    let score = share_or_missing("virus_score", score)?;
    let call = match score {
        Some(score) if score >= 0.5 => Call::Virus,
        Some(_) => Call::Other,
        None => Call::NoCall,
    };
    Ok(TrackWindow { start: cursor.before + start - 1, end: last, score, call, strands: [None; 2] })
}

/// The error for a row of `windows.tsv` that is not `what` of the record.
fn other_run(what: &str, record: &PredictionRow) -> String {
    format!(
        "expected {what} of '{}' as in {PREDICTIONS}; the tables are incomplete or belong to different runs",
        record.id
    )
}

/// Parses a window and its number of open reading frames.
fn window(record: &PredictionRow, number: u64, cells: [&str; 9]) -> Result<(TrackWindow, u64), String> {
    let [id, window, start, end, orfs, frame, other, virus, call] = cells;
    if id != record.id || whole("window", window)? != number {
        return Err(other_run(&format!("window {number}"), record));
    }
    let [start, end] = window_bases(start, end, record.length)?;
    let score = match (known(other), known(virus)) {
        (Some(other), Some(virus)) => {
            Some(virus_score(share("score_other", other)?, share("score_virus", virus)?)?)
        }
        (None, None) => None,
        (Some(_), None) | (None, Some(_)) => return Err("one score without the other".to_owned()),
    };
    let call = called(call)?;
    let orfs = whole("n_orfs", orfs)?;
    let is_scored = orfs > 0 && call != Call::Untrained;
    if score.is_some() != is_scored || (orfs == 0) != (call == Call::NoCall) {
        return Err("the columns contradict each other: n_orfs, scores, prediction".to_owned());
    }
    let mut strands = [None; 2];
    if score.is_some() {
        strands[strand(frame).ok_or_else(|| format!("best_frame is `{frame}`, expected F1 to R3"))?] = score;
    }
    Ok((TrackWindow { start: start - 1, end, score, call, strands }, orfs))
}

/// Score of each strand of a window, computed from the open reading frames of the strand as the score of the
/// window is computed from all of them.
fn strands(
    frames: &mut TableReader,
    record: &str,
    number: u64,
    orfs: u64,
) -> Result<[Option<f64>; 2], DataError> {
    let mut maxima: [Option<[f64; 2]>; 2] = [None; 2];
    for _ in 0..orfs {
        let row = frames.next(|[id, other, virus]| {
            let frame = id.strip_prefix(record).and_then(|rest| rest.strip_prefix("_chunk_"));
            let frame = frame.and_then(|rest| rest.strip_prefix(&number.to_string())).and_then(strand);
            let wanted = format!("expected an open reading frame of '{record}_chunk_{number}', found '{id}'");
            Ok((frame.ok_or(wanted)?, [share("score1", other)?, share("score2", virus)?]))
        })?;
        let (strand, scores) = row.ok_or_else(|| frames.ends_early())?;
        let so_far = maxima[strand].unwrap_or(scores);
        maxima[strand] = Some([so_far[0].max(scores[0]), so_far[1].max(scores[1])]);
    }
    let mut scores = [None; 2];
    for (score, maxima) in scores.iter_mut().zip(maxima) {
        let of_strand = maxima.map(|[other, virus]| virus_score(other, virus)).transpose();
        *score = of_strand.map_err(|what| frames.error(what))?;
    }
    Ok(scores)
}

/// Strand of a reading frame: 0 for forward, 1 for reverse.
fn strand(frame: &str) -> Option<usize> {
    let frame = Frame::ALL.into_iter().find(|f| f.name() == frame)?;
    Some(usize::from(frame.strand() == '-'))
}

/// Score of a window as `predict` defines it: max P(virus) / (max P(others) + max P(virus)). `Err` if both are
/// 0.
fn virus_score(other: f64, virus: f64) -> Result<f64, String> {
    let sum = other + virus;
    if sum > 0.0 { Ok(virus / sum) } else { Err("both scores are 0".to_owned()) }
}

/// The cell, or `None` for `NA`.
fn known(cell: &str) -> Option<&str> {
    (cell != "NA").then_some(cell)
}

/// Parses a call.
fn called(cell: &str) -> Result<Call, String> {
    let call = CALLS.into_iter().find(|call| call.name() == cell);
    call.ok_or_else(|| format!("prediction is `{cell}`, expected virus, other, no_call, skipped or untrained"))
}
