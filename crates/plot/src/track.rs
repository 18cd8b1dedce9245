//! Windows of one record, and their summaries. Invariant: a window stands for exactly the bases `start..end`,
//! counted from 0 (VirNucPro's own figure draws windows one window too far to the right); the summary of an
//! interval contains the minimum and the maximum of its scores.

use super::survey::PredictionRow;
use plimsoll_virus::output::Call;

/// A row of `windows.tsv`.
#[derive(Clone, Debug, PartialEq)]
pub struct TrackWindow {
    /// First base in the record, counted from 0.
    pub start: u64,
    /// One past its last base.
    pub end: u64,
    /// Score; `None` without an open reading frame or with untrained weights.
    pub score: Option<f64>,
    /// Consensus call of the window.
    pub call: Call,
    /// Scores of the + and the - strand; `None` for a strand without a score.
    pub strands: [Option<f64>; 2],
}

/// A record and its windows.
#[derive(Clone, Debug)]
pub struct RecordTrack {
    /// The record.
    pub entry: PredictionRow,
    /// Windows in order of position.
    pub windows: Vec<TrackWindow>,
    /// Whether strand scores include every open reading frame, and not only the best frame.
    pub every_frame: bool,
}

/// Count, mean, minimum and maximum of a series of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScoreSummary {
    /// Number of values.
    pub count: u64,
    sum: f64,
    /// Minimum.
    pub low: f64,
    /// Maximum.
    pub high: f64,
}

impl ScoreSummary {
    fn add(&mut self, number: f64) {
        let first = self.count == 0;
        self.low = if first { number } else { self.low.min(number) };
        self.high = if first { number } else { self.high.max(number) };
        self.count += 1;
        self.sum += number;
    }

    /// Mean; `None` without values.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// Summary of the windows that overlap one interval of a record, which is drawn as one column.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrackColumn {
    /// Number of windows.
    pub windows: u64,
    /// Number of windows without an open reading frame.
    pub silent: u64,
    /// Scores of the windows.
    pub scores: ScoreSummary,
    /// The scores of the strands, + and -.
    pub strands: [ScoreSummary; 2],
}

/// Summarizes the windows of a record of `length` bases in `count` intervals of equal width.
pub fn columns(windows: &[TrackWindow], length: u64, count: usize) -> Vec<TrackColumn> {
    let mut columns = vec![TrackColumn::default(); count];
    for window in windows {
        // `end` is one past the last base.
        let [first, last] = [window.start, window.end.max(1) - 1]
            // The length comes from a file and may be any u64, so the product needs 128 bits.
            .map(|base| (u128::from(base) * count as u128 / u128::from(length.max(1))) as usize);
        let last = last.min(count.saturating_sub(1));
        for column in columns.get_mut(first..=last).unwrap_or_default() {
            column.windows += 1;
            column.silent += u64::from(window.call == Call::NoCall);
            window.score.into_iter().for_each(|score| column.scores.add(score));
            for (range, score) in column.strands.iter_mut().zip(window.strands) {
                score.into_iter().for_each(|score| range.add(score));
            }
        }
    }
    columns
}

/// Intervals of a record, as bases from 0, that no window with an open reading frame covers; adjacent intervals
/// are merged. Starts and ends of consecutive windows must both increase.
pub fn uncalled_intervals(windows: &[TrackWindow]) -> Vec<(u64, u64)> {
    let mut intervals: Vec<(u64, u64)> = vec![];
    // End of the last window with an open reading frame so far.
    let mut called_end = 0;
    for (index, window) in windows.iter().enumerate() {
        if window.call != Call::NoCall {
            called_end = window.end;
            continue;
        }
        // Windows overlap: a silent interval ends where the next window with an open reading frame starts.
        let next = windows.get(index + 1).filter(|next| next.call != Call::NoCall);
        let start = window.start.max(called_end);
        let end = next.map_or(window.end, |next| next.start.min(window.end));
        match intervals.last_mut() {
            Some(last) if last.1 >= start && last.1 > called_end => last.1 = last.1.max(end),
            _ if end > start => intervals.push((start, end)),
            _ => {}
        }
    }
    intervals
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(start: u64, end: u64, score: Option<f64>) -> TrackWindow {
        let call = if score.is_some() { Call::Other } else { Call::NoCall };
        TrackWindow { start, end, score, call, strands: [score, None] }
    }

    /// Compares the number of windows, the minimum and the maximum score of each column.
    fn check(windows: &[TrackWindow], length: u64, wanted: &[(u64, f64, f64)]) {
        let found: Vec<(u64, f64, f64)> = columns(windows, length, wanted.len())
            .iter()
            .map(|c| (c.windows, c.scores.low, c.scores.high))
            .collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_window_is_in_the_columns_that_it_touches() {
        check(&[window(0, 10, Some(0.5))], 40, &[(1, 0.5, 0.5), (0, 0.0, 0.0), (0, 0.0, 0.0), (0, 0.0, 0.0)]);
        check(&[window(9, 11, Some(0.5))], 20, &[(1, 0.5, 0.5), (1, 0.5, 0.5)]);
        check(&[window(10, 20, None)], 20, &[(0, 0.0, 0.0), (1, 0.0, 0.0)]);
        check(&[window(0, 1, Some(0.2))], 1, &[(1, 0.2, 0.2)]);
    }

    #[test]
    fn what_no_window_with_a_frame_covers() {
        let check = |windows: &[(u64, u64, bool)], wanted: &[(u64, u64)]| {
            let windows: Vec<TrackWindow> =
                windows.iter().map(|&(start, end, scored)| window(start, end, scored.then_some(0.5))).collect();
            assert_eq!(uncalled_intervals(&windows), wanted);
        };
        check(&[], &[]);
        check(&[(0, 500, true)], &[]);
        check(&[(0, 500, false)], &[(0, 500)]);
        check(&[(0, 500, false), (490, 990, false), (980, 1480, true)], &[(0, 980)]);
        check(&[(0, 500, true), (490, 990, false), (980, 1480, true)], &[(500, 980)]);
        check(&[(0, 500, false), (250, 501, true)], &[(0, 250)]);
        check(&[(0, 500, true), (250, 750, false), (500, 1000, true)], &[]);
        check(&[(0, 5, false), (5, 10, true), (10, 15, false)], &[(0, 5), (10, 15)]);
    }

    #[test]
    fn columns_keep_the_extremes_of_a_long_record() {
        let score = |i: u64| if i == 70_001 { 0.999 } else { 0.1 + 0.3 * (i % 7) as f64 / 7.0 };
        let windows: Vec<TrackWindow> =
            (0..100_000).map(|i| window(i * 500, (i + 1) * 500, Some(score(i)))).collect();
        let all = columns(&windows, 50_000_000, 300);
        let high = |c: &TrackColumn| c.scores.high;
        assert_eq!(all.iter().map(high).fold(0.0, f64::max), 0.999);
        assert_eq!(all.iter().position(|c| high(c) == 0.999), Some(210));
        assert!(all.iter().all(|c| c.scores.low == 0.1 && c.windows >= 333));
        let mean = all[0].scores.mean().unwrap();
        assert!((0.22..0.24).contains(&mean), "{mean}");
    }
}
