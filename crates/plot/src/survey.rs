//! What the overview is made of: how many records have which call, how scores are spread, and which records
//! come first. Invariant: memory does not grow with the number of records.

use std::cmp::Ordering;
use virus::output::Call;

/// Bars of a histogram; an even number, so that 0.5 is between two.
pub const BINS: usize = 20;

/// The calls in the order in which they are drawn.
pub const CALLS: [Call; 5] = [Call::Virus, Call::Other, Call::NoCall, Call::Skipped, Call::Untrained];

/// How many of each of [`CALLS`].
pub type Tally = [u64; CALLS.len()];

/// The place of a call in [`CALLS`].
pub fn place(call: Call) -> usize {
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
pub struct Entry {
    /// Which row, from 0: ids may be there twice.
    pub ordinal: u64,
    /// Its id, as it stands in the table.
    pub id: String,
    /// Its bases.
    pub length: u64,
    /// Windows.
    pub windows: u64,
    /// Windows with a score.
    pub scored: u64,
    /// Windows whose consensus is virus; not with untrained weights.
    pub virus: Option<u64>,
    /// The mean score of the scored windows.
    pub score: Option<f64>,
    /// What is said of it.
    pub call: Call,
}

/// Scores from 0 to 1 in [`BINS`] bars, by call.
#[derive(Clone, Debug, Default)]
pub struct Spread {
    /// How many of each call, for each bar.
    pub bins: [Tally; BINS],
}

impl Spread {
    /// Adds a score. The last bar has 1.0 too.
    pub fn add(&mut self, score: f64, call: Call) {
        let bin = ((score * BINS as f64) as usize).min(BINS - 1);
        self.bins[bin][place(call)] += 1;
    }

    /// The highest bar.
    pub fn highest(&self) -> u64 {
        self.bins.iter().map(|bin| bin.iter().sum()).max().unwrap_or(0)
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.bins.iter().flatten().sum()
    }
}

/// The first few entries by some order, of many that are seen once.
#[derive(Clone, Debug)]
pub struct First {
    room: usize,
    order: fn(&Entry, &Entry) -> Ordering,
    /// In order.
    pub entries: Vec<Entry>,
}

impl First {
    /// Room for so many.
    pub fn new(room: usize, order: fn(&Entry, &Entry) -> Ordering) -> Self {
        First { room, order, entries: vec![] }
    }

    /// Keeps the entry if it is among the first; of equal ones those that came earlier.
    pub fn offer(&mut self, entry: &Entry) {
        let place = self.entries.partition_point(|kept| (self.order)(kept, entry) != Ordering::Greater);
        if place < self.room {
            self.entries.truncate(self.room - 1);
            self.entries.insert(place, entry.clone());
        }
    }
}

/// Highest score first, longer ones among equals; those without a score last.
pub fn by_score(a: &Entry, b: &Entry) -> Ordering {
    let score = |e: &Entry| e.score.unwrap_or(-1.0);
    score(b).total_cmp(&score(a)).then(b.length.cmp(&a.length))
}

/// Viruses first; those with the most scored windows first among them.
pub fn by_call_and_windows(a: &Entry, b: &Entry) -> Ordering {
    let rank = |e: &Entry| (e.call == Call::Virus, e.scored, e.length);
    rank(b).cmp(&rank(a))
}

/// What was seen of all records and windows.
#[derive(Clone, Debug)]
pub struct Survey {
    /// Records.
    pub records: u64,
    /// Windows.
    pub windows: u64,
    /// Records by call.
    pub calls: Tally,
    /// Scores of records.
    pub record_scores: Spread,
    /// Scores of windows.
    pub window_scores: Spread,
    /// The records with the highest scores.
    pub best: First,
    /// The records whose windows are worth a look.
    pub leading: First,
}

impl Survey {
    /// Nothing seen so far; the overview will name so many records and draw so many tracks.
    pub fn new(names: usize, tracks: usize) -> Self {
        Survey {
            records: 0,
            windows: 0,
            calls: Tally::default(),
            record_scores: Spread::default(),
            window_scores: Spread::default(),
            best: First::new(names, by_score),
            leading: First::new(tracks, by_call_and_windows),
        }
    }

    /// Adds a record.
    pub fn add(&mut self, entry: &Entry) {
        self.records += 1;
        self.windows += entry.windows;
        self.calls[place(entry.call)] += 1;
        if let Some(score) = entry.score {
            self.record_scores.add(score, entry.call);
        }
        self.best.offer(entry);
        // One window alone is a score, not a track.
        if entry.scored > 0 && entry.windows > 1 {
            self.leading.offer(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(ordinal: u64, score: Option<f64>, length: u64, call: Call) -> Entry {
        Entry { ordinal, id: String::new(), length, windows: 2, scored: 1, virus: None, score, call }
    }

    #[test]
    fn scores_fall_into_bars() {
        let check = |score: f64, bin: usize| {
            let mut spread = Spread::default();
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
        let check = |order: fn(&Entry, &Entry) -> Ordering, wanted: &[u64]| {
            let mut first = First::new(3, order);
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
        let mut none = First::new(0, by_score);
        none.offer(&entry(0, None, 1, Call::NoCall));
        assert!(none.entries.is_empty());
    }
}
