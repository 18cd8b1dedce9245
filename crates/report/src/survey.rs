//! Statistics of all records, and the records that a page lists or draws. Invariant: memory does not grow with the
//! number of records: at most [`MOST_LISTED`] + [`MOST_SAMPLED`] rows are kept, with names of at most 200 characters.

use crate::columns::{CALLS, SERIES, series_of};
use crate::results::{ColumnPositions, RecordValues};
use plimsoll_data::printable::Name;
use plimsoll_virus::output::RegionRow;
use std::collections::BinaryHeap;

/// Maximum number of rows in the table of a page.
pub const MOST_ROWS: usize = 25_000;
/// Maximum number of listed records: those called virus and those with regions, by score.
pub const MOST_LISTED: usize = 20_000;
/// Maximum number of sampled records among the others.
const MOST_SAMPLED: usize = MOST_ROWS;
/// Number of records with tracks.
pub const TRACKS: usize = 12;
/// Maximum number of regions that a track draws.
pub const MOST_REGIONS: usize = 200;
/// Number of bins of the score; even, so that 0.5 is the boundary between two bins.
pub const SCORE_BINS: usize = 40;
/// Number of bins for a factor of 10 in length.
pub const DECADE: usize = 8;
/// Number of bins of the length, from 1 base to 10^9 bases.
pub const LENGTH_BINS: usize = 9 * DECADE;
/// Number of bins of the score in the grid of scores and lengths.
pub const GRID_SCORES: usize = 25;
/// Maximum number of records that are drawn as points.
pub const MOST_POINTS: usize = 1_500;

/// Number of records by series (see [`SERIES`]).
pub type SeriesCounts = [u64; SERIES.len()];

/// A row of the table of a page.
#[derive(Clone, Debug)]
pub struct KeptRow {
    /// Rows with small keys are kept; keys are compared element by element.
    key: [u64; 3],
    /// Row number in `predictions.tsv`, from 0.
    pub ordinal: u64,
    /// Name of the record, escaped and cut after 200 characters.
    pub name: String,
    /// Values of its columns.
    pub values: Box<[f64]>,
}

impl PartialEq for KeptRow {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for KeptRow {}

impl PartialOrd for KeptRow {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for KeptRow {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

/// The rows with the smallest keys.
#[derive(Clone, Debug)]
struct SmallestRows {
    capacity: usize,
    rows: BinaryHeap<KeptRow>,
    /// Number of rows that were offered.
    offered: u64,
}

impl SmallestRows {
    fn new(capacity: usize) -> Self {
        SmallestRows { capacity, rows: BinaryHeap::new(), offered: 0 }
    }

    fn offer(&mut self, key: [u64; 3], row: &RecordValues) {
        self.offered += 1;
        if self.rows.len() == self.capacity {
            if self.rows.peek().is_none_or(|largest| largest.key <= key) {
                return;
            }
            self.rows.pop();
        }
        let name = Name(row.name).to_string();
        self.rows.push(KeptRow { key, ordinal: row.ordinal, name, values: row.values.into() });
    }
}

/// A record that is drawn with its windows.
#[derive(Clone, Debug)]
pub struct TrackRecord {
    rank: (bool, bool, u64, u64),
    /// Row number in `predictions.tsv`, from 0.
    pub ordinal: u64,
    /// Name of the record, escaped and cut after 200 characters.
    pub name: String,
    /// Length in bases.
    pub length: u64,
    /// Score; NaN for `NA`.
    pub score: f64,
    /// Index of the call in [`CALLS`].
    pub call: usize,
    /// The first [`MOST_REGIONS`] regions.
    pub regions: Vec<RegionRow>,
    /// Number of all regions.
    pub region_count: usize,
}

/// Records and bases of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallCount {
    /// Number of records.
    pub records: u64,
    /// Number of their bases.
    pub bases: u64,
}

/// Length, score and series of a record.
#[derive(Clone, Copy, Debug)]
pub struct LengthScore {
    /// Length in bases.
    pub length: u64,
    /// Score.
    pub score: f64,
    /// Index in [`SERIES`].
    pub series: usize,
}

/// Statistics of all records.
pub struct PageStatistics {
    at: ColumnPositions,
    /// Lengths of the calibration, ascending.
    measured: Vec<u64>,
    /// Number of records whose length is nearest to each length of the calibration, as a ratio.
    pub nearest: Vec<u64>,
    /// Number of records.
    pub records: u64,
    /// Number of bases.
    pub bases: u64,
    /// Number of windows.
    pub windows: u64,
    /// Counts for each call of [`CALLS`].
    pub calls: [CallCount; CALLS.len()],
    /// Number of records in each bin of the score.
    pub scores: [SeriesCounts; SCORE_BINS],
    /// Number of records in each bin of the length.
    pub lengths: [SeriesCounts; LENGTH_BINS],
    /// Number of records in each bin of length and score.
    pub grid: Vec<[SeriesCounts; GRID_SCORES]>,
    /// Each record with a score, while there are at most [`MOST_POINTS`].
    pub points: Vec<LengthScore>,
    /// Number of records with a score.
    pub scored: u64,
    /// Number of records of each class, by series.
    pub classes: Vec<SeriesCounts>,
    /// Sum of 1 - score over the records called virus.
    pub expected_false: f64,
    /// Shortest and longest record.
    pub length_range: Option<(u64, u64)>,
    /// Number of regions.
    pub regions: u64,
    /// Number of their bases.
    pub region_bases: u64,
    listed: SmallestRows,
    sampled: SmallestRows,
    /// The records with tracks, in the order of their ranks.
    pub tracks: Vec<TrackRecord>,
}

/// Rows of the table of a page, and which rows they are.
pub struct Selection {
    /// The rows; the first of them are the most important ones.
    pub rows: Vec<KeptRow>,
    /// Number of records that are called virus or have regions.
    pub listable: u64,
    /// Number of rows at the start of `rows` that are called virus or have regions.
    pub listed: usize,
    /// Number of all other records.
    pub others: u64,
}

impl PageStatistics {
    /// Statistics of no records. `measured` are the lengths of the calibration, ascending.
    pub fn new(at: ColumnPositions, measured: Vec<u64>) -> Self {
        PageStatistics {
            at,
            nearest: vec![0; measured.len()],
            measured,
            records: 0,
            bases: 0,
            windows: 0,
            calls: Default::default(),
            scores: [SeriesCounts::default(); SCORE_BINS],
            lengths: [SeriesCounts::default(); LENGTH_BINS],
            grid: vec![[SeriesCounts::default(); GRID_SCORES]; LENGTH_BINS],
            points: vec![],
            scored: 0,
            classes: vec![],
            expected_false: 0.0,
            length_range: None,
            regions: 0,
            region_bases: 0,
            listed: SmallestRows::new(MOST_LISTED),
            sampled: SmallestRows::new(MOST_SAMPLED),
            tracks: vec![],
        }
    }

    /// Adds a record.
    pub fn add(&mut self, row: &RecordValues) {
        let at = self.at;
        let length = row.values[at.length] as u64;
        let windows = row.values[at.windows] as u64;
        let score = row.values[at.score];
        let call = row.values[at.call] as usize;
        let series = series_of(call);
        self.records += 1;
        // Sums of lengths come from a file and may be any numbers.
        self.bases = self.bases.saturating_add(length);
        self.windows = self.windows.saturating_add(windows);
        self.calls[call].records += 1;
        self.calls[call].bases = self.calls[call].bases.saturating_add(length);
        self.length_range = match self.length_range {
            None => Some((length, length)),
            Some((low, high)) => Some((low.min(length), high.max(length))),
        };
        // Two lengths are equally near to their geometric mean, which is compared by squares to stay exact.
        let square = u128::from(length).pow(2);
        let pairs = self.measured.windows(2);
        let nearest = pairs.take_while(|pair| square > u128::from(pair[0]) * u128::from(pair[1])).count();
        if let Some(count) = self.nearest.get_mut(nearest) {
            *count += 1;
        }
        let length_bin = length_bin(length);
        self.lengths[length_bin][series] += 1;
        if !score.is_nan() {
            self.scored += 1;
            self.scores[bin(score, SCORE_BINS)][series] += 1;
            self.grid[length_bin][bin(score, GRID_SCORES)][series] += 1;
            if self.scored <= MOST_POINTS as u64 {
                self.points.push(LengthScore { length, score, series });
            } else {
                self.points = vec![];
            }
            if call == 0 {
                self.expected_false += 1.0 - score;
            }
        }
        if let Some(class) = at.class.map(|place| row.values[place]).filter(|class| !class.is_nan()) {
            let class = class as usize;
            if self.classes.len() <= class {
                self.classes.resize(class + 1, SeriesCounts::default());
            }
            self.classes[class][series] += 1;
        }
        self.regions += row.regions.len() as u64;
        for region in row.regions {
            self.region_bases = self.region_bases.saturating_add(region.end - region.start + 1);
        }
        if call == 0 || !row.regions.is_empty() {
            // The bits of numbers that are not negative are in the order of the numbers. High scores and long records come
            // first, so both are inverted.
            let rank = if score.is_nan() { 0 } else { score.abs().to_bits() };
            self.listed.offer([!rank, !length, row.ordinal], row);
        } else {
            self.sampled.offer([mixed(row.ordinal), row.ordinal, 0], row);
        }
        self.offer_track(row, length, windows);
    }

    /// Keeps the record if it is among the [`TRACKS`] most interesting ones: those with regions, those called virus,
    /// then by number of windows and length.
    fn offer_track(&mut self, row: &RecordValues, length: u64, windows: u64) {
        let score = row.values[self.at.score];
        let call = row.values[self.at.call] as usize;
        // A single window has no course along the record.
        if windows < 2 || score.is_nan() {
            return;
        }
        let rank = (!row.regions.is_empty(), call == 0, windows, length);
        let place = self.tracks.partition_point(|track| track.rank >= rank);
        if place == TRACKS {
            return;
        }
        self.tracks.truncate(TRACKS - 1);
        let regions = row.regions.iter().take(MOST_REGIONS).copied().collect();
        let ordinal = row.ordinal;
        let name = Name(row.name).to_string();
        let region_count = row.regions.len();
        self.tracks
            .insert(place, TrackRecord { rank, ordinal, name, length, score, call, regions, region_count });
    }

    /// Chooses the rows of the table: the listed records, then sampled ones up to [`MOST_ROWS`] in all.
    pub fn select(&mut self) -> Selection {
        let listed = std::mem::replace(&mut self.listed, SmallestRows::new(0));
        let sampled = std::mem::replace(&mut self.sampled, SmallestRows::new(0));
        let mut rows = listed.rows.into_sorted_vec();
        let count = rows.len();
        rows.extend(sampled.rows.into_sorted_vec().into_iter().take(MOST_ROWS - count));
        Selection { rows, listable: listed.offered, listed: count, others: sampled.offered }
    }
}

/// The bin of a score; the last bin includes 1.
fn bin(score: f64, bins: usize) -> usize {
    ((score * bins as f64) as usize).min(bins - 1)
}

/// The bin of a length.
pub fn length_bin(length: u64) -> usize {
    (length_position(length) as usize).min(LENGTH_BINS - 1)
}

/// Position of a length on a logarithmic axis, in bins.
pub fn length_position(length: u64) -> f64 {
    (length.max(1) as f64).log10() * DECADE as f64
}

/// A pseudo-random number of a row, so that the sample is even and the same in every run: splitmix64, Steele et al.
/// 2014, <https://doi.org/10.1145/2714064.2660195>.
fn mixed(ordinal: u64) -> u64 {
    let mut z = ordinal.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
