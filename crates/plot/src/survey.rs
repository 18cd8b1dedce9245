//! Statistics for the overview picture: records by call, histograms of scores, and the top records. Invariant:
//! memory does not grow with the number of records.

use plimsoll_virus::output::{Call, RegionRow};
use std::cmp::Ordering;

/// Number of histogram bins; even, so that 0.5 is the boundary between two bins.
pub const BINS: usize = 20;

/// Calls in drawing order.
pub const CALLS: [Call; 5] = [Call::Virus, Call::Other, Call::NoCall, Call::Skipped, Call::Untrained];

/// Counts by call, in the order of [`CALLS`].
pub type CallCounts = [u64; CALLS.len()];

/// Index of a call in [`CALLS`].
pub fn call_index(call: Call) -> usize {
    match call {
        Call::Virus => 0,
        Call::Other => 1,
        Call::NoCall => 2,
        Call::Skipped => 3,
        Call::Untrained => 4,
    }
}

/// A row of `predictions.tsv`.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictionRow {
    /// Row number from 0. Rows are identified by it, because an id may occur in several rows.
    pub ordinal: u64,
    /// Id of the record, as in the table.
    pub id: String,
    /// Length in bases.
    pub length: u64,
    /// Number of windows.
    pub windows: u64,
    /// Number of windows with a score.
    pub scored: u64,
    /// Number of windows with consensus "virus"; `None` with untrained weights.
    pub virus: Option<u64>,
    /// Mean score of the scored windows.
    pub score: Option<f64>,
    /// Call of the record.
    pub call: Call,
    /// Regions of the record, which only callers find.
    pub regions: Vec<RegionRow>,
}

impl PredictionRow {
    /// Whether the record or a region of it is called virus.
    pub fn is_virus_or_has_regions(&self) -> bool {
        self.call == Call::Virus || !self.regions.is_empty()
    }
}

/// Histogram of scores from 0 to 1 in [`BINS`] bins, by call.
#[derive(Clone, Debug, Default)]
pub struct ScoreHistogram {
    /// Counts by call for each bin.
    pub bins: [CallCounts; BINS],
}

impl ScoreHistogram {
    /// Adds a score. The last bin includes 1.0.
    pub fn add(&mut self, score: f64, call: Call) {
        let bin = ((score * BINS as f64) as usize).min(BINS - 1);
        self.bins[bin][call_index(call)] += 1;
    }

    /// Count of the largest bin.
    pub fn highest(&self) -> u64 {
        self.bins.iter().map(|bin| bin.iter().sum()).max().unwrap_or(0)
    }

    /// Number of scores.
    pub fn total(&self) -> u64 {
        self.bins.iter().flatten().sum()
    }
}

/// Streaming selection of the first records by an order.
#[derive(Clone, Debug)]
pub struct TopEntries {
    capacity: usize,
    order: fn(&PredictionRow, &PredictionRow) -> Ordering,
    /// Selected entries, in order.
    pub entries: Vec<PredictionRow>,
}

impl TopEntries {
    /// Selects the first `capacity` entries by `order`.
    pub fn new(capacity: usize, order: fn(&PredictionRow, &PredictionRow) -> Ordering) -> Self {
        TopEntries { capacity, order, entries: vec![] }
    }

    /// Selects the entry if it is among the first so far; among equal entries, earlier ones come first.
    pub fn offer(&mut self, entry: &PredictionRow) {
        let place = self.entries.partition_point(|better| (self.order)(better, entry) != Ordering::Greater);
        if place < self.capacity {
            self.entries.truncate(self.capacity - 1);
            self.entries.insert(place, entry.clone());
        }
    }
}

/// Orders by descending score, then by descending length; entries without a score come last.
pub(crate) fn by_score(a: &PredictionRow, b: &PredictionRow) -> Ordering {
    let [a_score, b_score] = [a, b].map(|row| row.score.unwrap_or(-1.0));
    b_score.total_cmp(&a_score).then(b.length.cmp(&a.length))
}

/// Orders entries with call "virus" or a region before all others, then by descending number of scored windows and length.
pub fn by_call_and_windows(a: &PredictionRow, b: &PredictionRow) -> Ordering {
    let [a_rank, b_rank] = [a, b].map(|row| (row.is_virus_or_has_regions(), row.scored, row.length));
    b_rank.cmp(&a_rank)
}

/// Statistics of all records and windows.
#[derive(Clone, Debug)]
pub struct OverviewStatistics {
    /// Number of records.
    pub records: u64,
    /// Number of windows.
    pub windows: u64,
    /// Number of records by call.
    pub calls: CallCounts,
    /// Histogram of record scores.
    pub record_scores: ScoreHistogram,
    /// Histogram of window scores.
    pub window_scores: ScoreHistogram,
    /// The records with the highest scores.
    pub best: TopEntries,
    /// The records drawn with their windows, by [`by_call_and_windows`].
    pub leading: TopEntries,
}

impl OverviewStatistics {
    /// Empty statistics that select `names` records by score, and `tracks` records to draw with their windows.
    pub fn new(names: usize, tracks: usize) -> Self {
        OverviewStatistics {
            records: 0,
            windows: 0,
            calls: CallCounts::default(),
            record_scores: ScoreHistogram::default(),
            window_scores: ScoreHistogram::default(),
            best: TopEntries::new(names, by_score),
            leading: TopEntries::new(tracks, by_call_and_windows),
        }
    }

    /// Adds a record.
    pub fn add(&mut self, entry: &PredictionRow) {
        self.records += 1;
        self.windows += entry.windows;
        self.calls[call_index(entry.call)] += 1;
        if let Some(score) = entry.score {
            self.record_scores.add(score, entry.call);
        }
        self.best.offer(entry);
        // A single window has no course along the record that a track could show.
        if entry.scored > 0 && entry.windows > 1 {
            self.leading.offer(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(ordinal: u64, score: Option<f64>, length: u64, call: Call) -> PredictionRow {
        PredictionRow {
            ordinal,
            id: String::new(),
            length,
            windows: 2,
            scored: 1,
            virus: None,
            score,
            call,
            regions: vec![],
        }
    }

    #[test]
    fn scores_fall_into_bars() {
        let check = |score: f64, bin: usize| {
            let mut spread = ScoreHistogram::default();
            spread.add(score, Call::Virus);
            assert_eq!(spread.bins[bin][0], 1, "{score}");
        };
        for (score, bin) in [(0.0, 0), (0.049, 0), (0.05, 1), (0.499_999, 9), (0.5, 10), (0.99, 19), (1.0, 19)]
        {
            check(score, bin);
        }
    }

    #[test]
    fn the_first_are_kept_in_order_and_equals_in_the_order_of_the_input() {
        let check = |order: fn(&PredictionRow, &PredictionRow) -> Ordering, wanted: &[u64]| {
            let mut first = TopEntries::new(3, order);
            for (ordinal, (score, length, call)) in [
                (Some(0.2), 900, Call::Other),
                (Some(0.9), 100, Call::Virus),
                (None, 9000, Call::NoCall),
                (Some(0.9), 100, Call::Virus),
                (Some(0.9), 200, Call::Virus),
            ]
            .into_iter()
            .enumerate()
            {
                first.offer(&entry(ordinal as u64, score, length, call));
            }
            let found: Vec<u64> = first.entries.iter().map(|e| e.ordinal).collect();
            assert_eq!(found, wanted);
        };
        check(by_score, &[4, 1, 3]);
        check(by_call_and_windows, &[4, 1, 3]);
        let mut none = TopEntries::new(0, by_score);
        none.offer(&entry(0, None, 1, Call::NoCall));
        assert!(none.entries.is_empty());
    }
}
