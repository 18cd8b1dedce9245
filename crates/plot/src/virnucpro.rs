//! Reads results of VirNucPro itself, or of virnucpro-broad: `NAME_merged/prediction_results.txt`,
//! `prediction_results_highestscore.csv` and, beside the folder, `NAME_chunkedLENGTH.fa` with the sequences of
//! all windows. Invariant: the tables omit windows without an open reading frame and give no positions, so
//! windows come from the file of windows, and positions are computed from their bases; tables that contradict
//! the file are an error.

use super::results::About;
use super::survey::{OverviewStatistics, PredictionRow};
use super::track::{RecordTrack, TrackWindow};
use crate::PlotError;
use plimsoll_data::sequence::Reader;
use plimsoll_data::table::TableReader;
use plimsoll_data::translate::Frame;
use plimsoll_data::window::{RecordWindow, record_windows};
use plimsoll_runtime::RuntimeError;
use plimsoll_virus::output::verdict::{Consensus, RecordScore};
use plimsoll_virus::output::{Call, OrfScore};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

const FRAMES: &str = "prediction_results.txt";
const CONSENSUS: &str = "prediction_results_highestscore.csv";

/// Suffix of VirNucPro's result folders.
const MERGED: &str = "_merged";

/// Threshold of a record's call, the mean score of its windows: the default of `predict`, because VirNucPro
/// does not call records.
const THRESHOLD: f32 = 0.5;

/// The results of VirNucPro, entirely in memory.
pub struct VirNucProFolder {
    pub about: About,
    tracks: Vec<RecordTrack>,
}

/// The folder of tables: `folder` or a subfolder; `None` if there is none. `Err` if there are several
/// subfolders.
pub(crate) fn tables_in(folder: &Path) -> Result<Option<PathBuf>, PlotError> {
    if folder.join(FRAMES).is_file() {
        return Ok(Some(folder.to_owned()));
    }
    let Ok(entries) = fs::read_dir(folder) else { return Ok(None) };
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    found.retain(|path| path.to_string_lossy().ends_with(MERGED) && path.join(FRAMES).is_file());
    found.sort();
    match &found[..] {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        [one, other, ..] => {
            let folder = folder.to_owned();
            let one = one.clone();
            let other = other.clone();
            Err(PlotError::SeveralRuns { folder, one, other })
        }
    }
}

impl VirNucProFolder {
    /// Reads the tables of a folder and the file of windows. `Err` if they contradict each other.
    pub fn open(tables: &Path) -> Result<Self, PlotError> {
        let (path, length) = windows_file(tables)?;
        let mut orfs = frames(&tables.join(FRAMES))?;
        let calls = consensus(&tables.join(CONSENSUS))?;
        let mut records =
            TrackBuilder { length, orfs: &mut orfs, calls: &calls, path: &path, tables, tracks: vec![] };
        let mut gathered = GatheredRecord::default();
        let mut reader = Reader::open([&path])?;
        reader.keep_bytes();
        for record in reader.records() {
            let record = record?;
            let (id, number) = numbered(&record.id).ok_or_else(|| {
                let path = path.clone();
                let name = record.id.clone();
                PlotError::NotAWindow { path, name }
            })?;
            if number == 1 {
                records.end(std::mem::take(&mut gathered))?;
                gathered.id = id.to_owned();
            }
            if id != gathered.id || number != gathered.windows.len() as u64 + 1 {
                let number = gathered.windows.len();
                let record_before = gathered.id;
                let name = record.id;
                return Err(PlotError::WindowOutOfOrder { path, name, number, record: record_before });
            }
            gathered.windows.push(record.seq);
        }
        records.end(gathered)?;
        let tracks = records.tracks;
        if let Some(id) = orfs.keys().min() {
            let table = tables.join(FRAMES);
            let window = id.clone();
            return Err(PlotError::UnknownWindow { table, window, windows: path });
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.rsplit_once("_chunked").map_or(&*name, |(name, _)| name).to_owned();
        let about = About {
            made_by: "VirNucPro".to_owned(),
            inputs: vec![name],
            trained: true,
            threshold: Some(THRESHOLD),
            by_strand: true,
            length: length as u64,
        };
        Ok(Self { about, tracks })
    }

    /// Calls `see` for every record, in the order of the file of windows.
    pub fn records(&self, see: impl FnMut(&PredictionRow)) {
        self.tracks.iter().map(|track| &track.entry).for_each(see);
    }

    /// Returns the tracks of the `chosen` records, and adds the scores of all windows to `survey`.
    pub fn tracks(&self, chosen: &[PredictionRow], survey: &mut OverviewStatistics) -> Vec<RecordTrack> {
        for window in self.tracks.iter().flat_map(|track| &track.windows) {
            if let Some(score) = window.score {
                survey.window_scores.add(score, window.call);
            }
        }
        let tracks = self.tracks.iter();
        tracks
            .filter(|track| chosen.iter().any(|entry| entry.ordinal == track.entry.ordinal))
            .cloned()
            .collect()
    }
}

/// Finds `NAME_chunkedLENGTH.fa` beside or in the folder of tables; returns its path and the window length.
fn windows_file(tables: &Path) -> Result<(PathBuf, usize), PlotError> {
    let full = tables.canonicalize().map_err(RuntimeError::io(tables))?;
    let folder = full.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = folder.strip_suffix(MERGED);
    let above = full.parent().filter(|_| name.is_some()).map(Path::to_owned);
    let mut found: Vec<(PathBuf, usize)> = vec![];
    for place in above.iter().chain([&full]) {
        for entry in fs::read_dir(place).map_err(RuntimeError::io(place))?.flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            let Some((of, length)) = file.strip_suffix(".fa").and_then(|stem| stem.rsplit_once("_chunked"))
            else {
                continue;
            };
            let length = length.parse().ok().filter(|&length| length > 0);
            if let Some(length) = length.filter(|_| name.is_none_or(|name| name == of)) {
                found.push((entry.path(), length));
            }
        }
    }
    found.sort();
    let wanted = format!("{}_chunkedLENGTH.fa", name.unwrap_or("NAME"));
    match &found[..] {
        [one] => Ok(one.clone()),
        [] => Err(PlotError::NoWindows { tables: tables.to_owned(), wanted }),
        [(one, _), (other, _), ..] => {
            let tables = tables.to_owned();
            let one = one.clone();
            let other = other.clone();
            Err(PlotError::SeveralWindows { tables, wanted, one, other })
        }
    }
}

/// Reads `prediction_results.txt`: the scored open reading frames of each window.
fn frames(path: &Path) -> Result<HashMap<String, Vec<OrfScore>>, PlotError> {
    let mut rows = TableReader::open(path, &["Sequence_ID", "score1", "score2"])?;
    let mut orfs: HashMap<String, Vec<OrfScore>> = HashMap::new();
    while let Some((window, orf)) = rows.next(|[id, other, virus]| {
        let frame = Frame::ALL.into_iter().find(|frame| id.ends_with(frame.name()));
        let frame = frame
            .ok_or_else(|| format!("`{id}` is not an open reading frame's name, such as read_chunk_1F1"))?;
        let scores = [score("score1", other)?, score("score2", virus)?];
        // A window's score is a quotient whose denominator would be 0.
        if scores == [0.0, 0.0] {
            return Err(format!("both scores of `{id}` are 0, but they are the probabilities of two classes"));
        }
        Ok((id[..id.len() - frame.name().len()].to_owned(), OrfScore { frame, scores }))
    })? {
        let of_window = orfs.entry(window).or_default();
        if of_window.iter().any(|other| other.frame == orf.frame) {
            let text = format!("frame {} of this window occurs twice; ids must be unique", orf.frame.name());
            return Err(rows.error(text).into());
        }
        of_window.push(orf);
    }
    Ok(orfs)
}

/// Reads VirNucPro's consensus of each window. Without any window, virnucpro-broad writes a file with only a
/// line end.
fn consensus(path: &Path) -> Result<HashMap<String, bool>, PlotError> {
    let mut calls = HashMap::new();
    if fs::metadata(path).map_err(RuntimeError::io(path))?.len() <= 1 {
        return Ok(calls);
    }
    let mut rows = TableReader::open(path, &["Modified_ID", "Is_Virus"])?;
    while let Some((id, is_virus)) = rows.next(|[id, is_virus]| match is_virus {
        "True" => Ok((id.to_owned(), true)),
        "False" => Ok((id.to_owned(), false)),
        _ => Err(format!("Is_Virus is `{is_virus}`, expected True or False")),
    })? {
        calls.insert(id, is_virus);
    }
    Ok(calls)
}

/// Parses a score from 0 to 1.
fn score(column: &str, cell: &str) -> Result<f32, String> {
    let number = cell.parse::<f32>().ok().filter(|n| (0.0..=1.0).contains(n));
    number.ok_or_else(|| format!("{column} is `{cell}`, expected a number from 0 to 1"))
}

/// Splits the name of a window into the id of its record and its number from 1.
fn numbered(id: &str) -> Option<(&str, u64)> {
    let (record, number) = id.rsplit_once("_chunk_")?;
    Some((record, number.parse().ok().filter(|&number| number > 0)?))
}

/// Sequences of the windows of a record, in the order of the file.
#[derive(Default)]
struct GatheredRecord {
    id: String,
    windows: Vec<Vec<u8>>,
}

/// Builds a track for each record whose windows have been read.
struct TrackBuilder<'a> {
    /// Window length in bases.
    length: usize,
    orfs: &'a mut HashMap<String, Vec<OrfScore>>,
    calls: &'a HashMap<String, bool>,
    path: &'a Path,
    tables: &'a Path,
    tracks: Vec<RecordTrack>,
}

impl TrackBuilder<'_> {
    /// Completes a record: computes the positions of its windows, takes their scores from the tables and adds
    /// its track. `Err` if the windows overlap inconsistently or the tables contradict each other.
    fn end(&mut self, gathered: GatheredRecord) -> Result<(), PlotError> {
        let GatheredRecord { id, windows } = gathered;
        if windows.is_empty() {
            return Ok(());
        }
        let bases = bases_of(&windows, self.length).ok_or_else(|| {
            let path = self.path.to_owned();
            let record = id.clone();
            PlotError::TornWindows { path, record, length: self.length }
        })?;
        let mut record = RecordScore::default();
        let mut found = vec![];
        for window in record_windows(bases, self.length) {
            let name = format!("{id}_chunk_{}", window.index + 1);
            let orfs = self.orfs.remove(&name).unwrap_or_default();
            let consensus = Consensus::of(&orfs);
            record.add(consensus.as_ref());
            if consensus.map(|consensus| consensus.is_virus()) != self.calls.get(&name).copied() {
                let table = self.tables.join(CONSENSUS);
                return Err(PlotError::Contradiction { table, window: name, scores: FRAMES });
            }
            found.push(TrackWindow {
                start: window.start as u64,
                end: window.end() as u64,
                score: consensus.map(|consensus| consensus.virus_score()),
                call: match consensus {
                    Some(consensus) if consensus.is_virus() => Call::Virus,
                    Some(_) => Call::Other,
                    None => Call::NoCall,
                },
                strands: ['+', '-'].map(|sign| strand_score(&orfs, sign)),
            });
        }
        let entry = PredictionRow {
            ordinal: self.tracks.len() as u64,
            id,
            length: bases as u64,
            windows: record.windows,
            scored: record.scored,
            virus: Some(record.virus),
            score: record.virus_score(),
            call: record.call(THRESHOLD),
            regions: vec![],
        };
        self.tracks.push(RecordTrack { entry, windows: found, every_frame: true });
        Ok(())
    }
}

/// Score of the open reading frames of one strand, `+` or `-`, of a window; `None` without any.
fn strand_score(orfs: &[OrfScore], sign: char) -> Option<f64> {
    let strand: Vec<OrfScore> = orfs.iter().filter(|orf| orf.frame.strand() == sign).cloned().collect();
    Consensus::of(&strand).map(|consensus| consensus.virus_score())
}

/// Number of bases of the record with these windows: the smallest length for which `record_windows` gives windows of
/// these lengths whose overlaps have equal bases; `None` if no length fits. The smallest length has the longest
/// overlaps. Bases agree by chance with probability 1/4, so a record whose windows overlap by one base or not
/// at all can be found a few bases too short.
fn bases_of(windows: &[Vec<u8>], length: usize) -> Option<usize> {
    if let [only] = windows {
        return Some(only.len()).filter(|&bases| (1..=length).contains(&bases));
    }
    // `record_windows` makes `windows.len()` windows exactly for the lengths in this range.
    let longest = windows.len() * length;
    (longest - length + 1..=longest).find(|&bases| {
        let placed: Vec<_> = record_windows(bases, length).zip(windows).collect();
        placed.iter().all(|(place, window)| place.len == window.len()) && placed.windows(2).all(overlap_agrees)
    })
}

/// Whether two consecutive windows have equal bases where they overlap.
fn overlap_agrees(pair: &[(RecordWindow, &Vec<u8>)]) -> bool {
    let [(first, a), (second, b)] = pair else { return true };
    let shared = first.end() - second.start;
    a[a.len() - shared..] == b[..shared.min(b.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudo-random bases.
    fn sequence(bases: usize) -> Vec<u8> {
        let mut state = 1u64;
        let mut base = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            b"ACGT"[(state >> 62) as usize]
        };
        (0..bases).map(|_| base()).collect()
    }

    #[test]
    fn a_records_bases_follow_from_its_windows() {
        for bases in [1, 2, 250, 499, 500, 501, 750, 960, 1001, 1301, 5001, 12_345] {
            let whole = sequence(bases);
            let mut cut: Vec<Vec<u8>> =
                record_windows(bases, 500).map(|window| window.of(&whole).to_vec()).collect();
            assert_eq!(bases_of(&cut, 500), Some(bases));
            if let [_, second, ..] = &mut cut[..] {
                second.reverse();
                assert_ne!(bases_of(&cut, 500), Some(bases));
            }
        }
        for bases in [999, 1000, 1500] {
            let whole = sequence(bases);
            let cut: Vec<Vec<u8>> =
                record_windows(bases, 500).map(|window| window.of(&whole).to_vec()).collect();
            let found = bases_of(&cut, 500).expect("a length");
            assert!((bases - 5..=bases).contains(&found), "{found} of {bases}");
        }
        assert_eq!(bases_of(&[sequence(501)], 500), None);
    }

    #[test]
    fn names_of_windows() {
        assert_eq!(numbered("a_chunk_1_chunk_12"), Some(("a_chunk_1", 12)));
        for id in ["a", "a_chunk_", "a_chunk_0", "a_chunk_x"] {
            assert_eq!(numbered(id), None, "{id}");
        }
    }
}
