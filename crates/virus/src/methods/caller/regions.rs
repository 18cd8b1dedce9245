//! Regions: neighbouring windows of a record that together look more viral than the rest of the record. A region is a maximal
//! scoring subsequence of the windows' scores (Ruzzo and Tompa 1999, "A linear time algorithm for finding all maximal scoring
//! subsequences"): neighbouring windows whose sum is larger than that of any part of them, and which cannot be extended
//! without losing this property. A region ends where the sum of the scores has dropped by more than a limit below the highest sum
//! before (X-drop, as in the extensions of BLAST, Altschul et al. 1990): otherwise two viruses that outweigh everything between
//! them would be one region. Invariant: regions are disjoint and in the order of the record, and none is shorter or scores lower
//! than the parameters allow.
//!
//! The score of a window is its log odds less an offset and less the background of the record, a share of the median over its
//! windows: the genomes of some groups score high throughout, and those of other groups so low that even a phage in them stays
//! below the offset. A record whose median is above a limit is itself a virus, for the most part, and has no background.

use super::calibration::RegionParameters;

/// A region of a record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ViralRegion {
    /// First base, from 0.
    pub start: u64,
    /// Base after the last.
    pub end: u64,
    /// Sum of the scores of its windows.
    pub score: f64,
    /// Number of windows.
    pub windows: u64,
    /// Mean log odds of its windows at equal priors.
    pub log_odds: f64,
    /// Ends of the record that it reaches: no window of the record lies beyond it.
    pub edges: Edges,
}

/// Ends of a record that a region reaches: the virus can go on beyond them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edges {
    /// The start of the record.
    pub start: bool,
    /// The end of the record.
    pub end: bool,
}

impl Edges {
    /// Name in tables.
    pub fn name(self) -> &'static str {
        match (self.start, self.end) {
            (false, false) => "none",
            (true, false) => "start",
            (false, true) => "end",
            (true, true) => "both",
        }
    }
}

/// A window of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionWindow {
    /// First base, from 0.
    pub(crate) start: u64,
    /// Base after the last.
    pub(crate) end: u64,
    /// Number of its known letters that are not in the window before it; the score counts by their share of a window.
    pub(crate) known: f64,
    /// Log odds at equal priors.
    pub(crate) log_odds: f64,
    /// Whether it can have a call. Otherwise it can be inside a region and adds nothing to it.
    pub(crate) is_callable: bool,
    /// Number of windows: more than one where short neighbours were joined.
    pub(crate) windows: u64,
}

/// Finds the regions of one record from its windows.
#[derive(Debug, Default)]
pub(crate) struct RegionFinder {
    windows: Vec<RegionWindow>,
}

/// Neighbouring windows, as in the algorithm: from number `first` to number `last`, with the cumulative score before the first
/// (`left`) and after the last (`right`).
#[derive(Clone, Copy, Debug)]
struct RegionCandidate {
    first: usize,
    last: usize,
    left: f64,
    right: f64,
    /// Index of the last candidate before this one with a smaller `left`; usize::MAX without one. The search follows these
    /// links, so it takes linear time over all windows together.
    smaller_left: usize,
}

/// Bytes of memory for each window of a record: the window, its log odds for the median, and half a candidate (neighbours with
/// a score above zero are one), each in a vector that grows by doubling and holds the old and the new memory meanwhile.
pub(crate) const BYTES_PER_WINDOW: u64 =
    3 * (size_of::<RegionWindow>() + size_of::<f64>() + size_of::<RegionCandidate>() / 2) as u64;

impl RegionFinder {
    /// Adds the next window of a record whose windows have at most `size` bases. Short neighbours, which runs of unknown
    /// letters have cut, become one window of at most this size: thus a record has no more than two windows for `size` bases.
    pub(crate) fn add(&mut self, window: RegionWindow, size: u64) {
        if let Some(last) = self.windows.last_mut()
            && window.end - last.start <= size
            && window.is_callable == last.is_callable
        {
            let known = last.known + window.known;
            last.log_odds = (last.known * last.log_odds + window.known * window.log_odds) / known;
            last.known = known;
            last.end = window.end;
            last.windows += window.windows;
            return;
        }
        self.windows.push(window);
    }

    /// Returns the regions of the record and starts the next record; `size` is the length of its windows, or of the record if it
    /// is shorter. Subsequences below the least score are dropped, because many of them, each of a window or two, would add up
    /// to long regions without a virus. Neighbours are merged if they are near each other and the region of both, with the
    /// windows between them, still has the least score.
    pub(crate) fn finish(&mut self, parameters: &RegionParameters, size: u64) -> Vec<ViralRegion> {
        let RegionParameters { min_score, min_length, merge_gap, x_drop, .. } = *parameters;
        let level = parameters.offset + background(&self.windows, parameters);
        let mut merged: Vec<RegionCandidate> = vec![];
        let scores = self.windows.iter().map(|window| window.score(level, size));
        for next in maximal(scores, x_drop).into_iter().filter(|c| c.right - c.left >= min_score) {
            match merged.last_mut() {
                Some(last)
                    if self.windows[next.first].start <= self.windows[last.last].end + merge_gap
                        && next.right - last.left >= min_score =>
                {
                    last.last = next.last;
                    last.right = next.right;
                }
                _ => merged.push(next),
            }
        }
        let mut regions: Vec<ViralRegion> = merged.iter().map(|candidate| self.region(candidate)).collect();
        regions.retain(|region| region.end - region.start >= min_length);
        self.windows.clear();
        regions
    }

    /// The region of a candidate.
    fn region(&self, candidate: &RegionCandidate) -> ViralRegion {
        let RegionCandidate { first, last, left, right, .. } = *candidate;
        let windows = &self.windows[first..=last];
        ViralRegion {
            start: self.windows[first].start,
            end: self.windows[last].end,
            score: right - left,
            windows: windows.iter().map(|w| w.windows).sum(),
            log_odds: windows.iter().map(|w| w.log_odds).sum::<f64>() / windows.len() as f64,
            edges: Edges { start: first == 0, end: last + 1 == self.windows.len() },
        }
    }
}

impl RegionWindow {
    /// Score of the window: its log odds less `level`, by its share of a window of `size` bases.
    fn score(&self, level: f64, size: u64) -> f64 {
        let score = self.known / size.max(1) as f64 * (self.log_odds - level);
        if self.is_callable { score } else { score.min(0.0) }
    }
}

/// The background of a record: a share of the median log odds of the windows that can have a call; 0 without any, and for a
/// median above the limit.
fn background(windows: &[RegionWindow], parameters: &RegionParameters) -> f64 {
    let mut odds: Vec<f64> = windows.iter().filter(|w| w.is_callable).map(|w| w.log_odds).collect();
    odds.sort_unstable_by(f64::total_cmp);
    let upper = odds.len() / 2;
    let lower = odds.len().saturating_sub(1) / 2;
    match (odds.get(lower), odds.get(upper)) {
        (Some(a), Some(b)) if (a + b) / 2.0 <= parameters.background_limit => {
            parameters.background * (a + b) / 2.0
        }
        _ => 0.0,
    }
}

/// The maximal scoring subsequences of scores, in order, none of which contains a drop of the sum by more than `x_drop`.
fn maximal(scores: impl Iterator<Item = f64>, x_drop: f64) -> Vec<RegionCandidate> {
    let mut candidates: Vec<RegionCandidate> = vec![];
    // No candidate from here on may be extended to one before this index: the sum has dropped too far between them.
    let mut first_extendable = 0;
    let mut sum = 0.0;
    let mut lowest = 0.0;
    let mut highest = 0.0;
    for (number, score) in scores.enumerate() {
        let left = sum;
        sum += score;
        if sum <= lowest {
            // No subsequence extends across a new lowest sum, because the part of it before would have a sum below zero.
            lowest = sum;
            highest = sum;
        }
        highest = sum.max(highest);
        if highest - sum > x_drop {
            first_extendable = candidates.len();
            lowest = sum;
            highest = sum;
        }
        if score <= 0.0 {
            continue;
        }
        let mut new =
            RegionCandidate { first: number, last: number, left, right: sum, smaller_left: usize::MAX };
        loop {
            new.smaller_left = candidates.len().wrapping_sub(1);
            // Candidates between `smaller_left` and this one have no smaller `left` than it, so none smaller than `new.left`.
            while let Some(candidate) = candidates.get(new.smaller_left).filter(|c| c.left >= new.left) {
                new.smaller_left = candidate.smaller_left;
            }
            match candidates.get(new.smaller_left) {
                // Joined, both score more than each alone: they have the smaller `left`, of j, and the larger `right`,
                // of `new`. Where j has the larger `right` too, it alone scores more than both, and they stay apart.
                Some(j) if j.right < new.right && new.smaller_left >= first_extendable => {
                    new = RegionCandidate { first: j.first, left: j.left, ..new };
                }
                Some(_) | None => break,
            }
            // The joined candidate replaces candidate j and all after it, and may itself be joined with one before.
            candidates.truncate(new.smaller_left);
        }
        candidates.push(new);
    }
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: RegionParameters = RegionParameters {
        background: 0.0,
        background_limit: 0.0,
        offset: 0.0,
        min_score: 0.0,
        min_length: 0,
        merge_gap: 0,
        x_drop: f64::INFINITY,
    };

    /// A window of 100 known letters.
    fn window(start: u64, end: u64, log_odds: f64) -> RegionWindow {
        RegionWindow { start, end, known: 100.0, log_odds, is_callable: true, windows: 1 }
    }

    fn found(scores: &[f64], parameters: &RegionParameters) -> Vec<ViralRegion> {
        let mut finder = RegionFinder::default();
        for (i, &score) in scores.iter().enumerate() {
            // A base between windows, so that windows that are neighbours are not merged by their ends.
            finder.add(window(101 * i as u64, 101 * i as u64 + 100, score), 100);
        }
        finder.finish(parameters, 100)
    }

    fn windows(regions: &[ViralRegion]) -> Vec<(u64, u64, f64)> {
        regions.iter().map(|r| (r.start / 101, r.windows, r.score)).collect()
    }

    /// The example of the paper: 4 -5 3 -3 1 2 -2 2 -2 1 5 has the subsequences [4], [3] and [1 2 -2 2 -2 1 5].
    #[test]
    fn the_example_of_the_paper() {
        let scores = [4.0, -5.0, 3.0, -3.0, 1.0, 2.0, -2.0, 2.0, -2.0, 1.0, 5.0];
        assert_eq!(windows(&found(&scores, &ALL)), [(0, 1, 4.0), (2, 1, 3.0), (4, 7, 7.0)]);
    }

    /// All maximal subsequences by the definition of the paper (proposition 1): the best run, shortest on a tie, then the
    /// same on both sides of it.
    fn by_definition(scores: &[f64], from: usize, out: &mut Vec<(u64, u64, f64)>) {
        let mut best: Option<(usize, usize, f64)> = None;
        for a in 0..scores.len() {
            for b in a + 1..=scores.len() {
                let sum: f64 = scores[a..b].iter().sum();
                let better = |(x, y, s): (usize, usize, f64)| sum > s || (sum == s && b - a < y - x);
                if sum > 0.0 && best.is_none_or(better) {
                    best = Some((a, b, sum));
                }
            }
        }
        let Some((a, b, sum)) = best else { return };
        by_definition(&scores[..a], from, out);
        out.push(((from + a) as u64, (b - a) as u64, sum));
        by_definition(&scores[b..], from + b, out);
    }

    #[test]
    fn regions_are_those_of_the_definition() {
        let mut state = 1u64;
        for length in 0..60 {
            for _ in 0..8 {
                let scores: Vec<f64> = (0..length)
                    .map(|_| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        // Odd multiples of a power of two with many digits: sums are exact and ties are rare.
                        f64::from((state >> 33) as i32 as u32 % 20_011) / 16.0 - 620.0
                    })
                    .collect();
                let mut wanted = vec![];
                by_definition(&scores, 0, &mut wanted);
                assert_eq!(windows(&found(&scores, &ALL)), wanted, "{scores:?}");
            }
        }
    }

    #[test]
    fn short_and_weak_regions_are_dropped_and_near_ones_are_merged() {
        let scores = [5.0, 5.0, -20.0, 4.0, -20.0, 1.0];
        assert_eq!(windows(&found(&scores, &ALL)), [(0, 2, 10.0), (3, 1, 4.0), (5, 1, 1.0)]);
        let strong = RegionParameters { min_score: 4.0, ..ALL };
        assert_eq!(windows(&found(&scores, &strong)), [(0, 2, 10.0), (3, 1, 4.0)]);
        let long = RegionParameters { min_length: 201, ..ALL };
        assert_eq!(windows(&found(&scores, &long)), [(0, 2, 10.0)]);
        // The first two with the windows between them have a sum of 9; with the third it would be -10.
        let scores = [5.0, 5.0, -3.0, -2.0, 4.0, -20.0, 1.0];
        let near = RegionParameters { merge_gap: 203, ..ALL };
        assert_eq!(windows(&found(&scores, &near)), [(0, 5, 9.0), (6, 1, 1.0)]);
        let nearer = RegionParameters { merge_gap: 202, ..ALL };
        assert_eq!(windows(&found(&scores, &nearer)), [(0, 2, 10.0), (4, 1, 4.0), (6, 1, 1.0)]);
        // A weak subsequence is dropped before it could be merged.
        let strong = RegionParameters { min_score: 4.5, ..near };
        assert_eq!(windows(&found(&scores, &strong)), [(0, 2, 10.0)]);
        let nothing = found(&[-1.0, -2.0], &ALL);
        assert!(nothing.is_empty());
    }

    /// A share of the median of the windows that can have a call is subtracted, if the median is not above the limit; a window
    /// without a call adds nothing. The log odds of a region are those of its windows, whatever was subtracted.
    #[test]
    fn the_background_of_a_record_is_subtracted() {
        let half = RegionParameters { background: 0.5, background_limit: 1.0, offset: 0.25, ..ALL };
        for (log_odds, wanted) in [
            // Medians -2, -3 (of -4 and -2), 1, and 1.5, which is above the limit.
            (vec![-2.0, -2.0, 1.0, -2.0], vec![(2, 1, 1.75)]),
            (vec![-4.0, 1.0, -4.0, -2.0], vec![(1, 1, 2.25)]),
            (vec![1.0, 1.0, 1.0], vec![(0, 3, 0.75)]),
            (vec![1.5, 1.5, 1.5], vec![(0, 3, 3.75)]),
        ] {
            assert_eq!(windows(&found(&log_odds, &half)), wanted, "{log_odds:?}");
            let region = found(&log_odds, &half)[0];
            let inside = &log_odds[(region.start / 101) as usize..][..region.windows as usize];
            assert_eq!(region.log_odds, inside.iter().sum::<f64>() / region.windows as f64);
        }
        let mut finder = RegionFinder::default();
        finder.add(RegionWindow { is_callable: false, ..window(0, 100, 9.0) }, 100);
        for (i, log_odds) in [(1, -2.0), (2, 1.0), (3, -2.0)] {
            finder.add(window(100 * i, 100 * i + 100, log_odds), 100);
        }
        let edges = Edges::default();
        let region = ViralRegion { start: 200, end: 300, score: 1.75, windows: 1, log_odds: 1.0, edges };
        assert_eq!(finder.finish(&half, 100), [region]);
    }

    /// (scores, X-drop, regions as first window, windows and score)
    type Drop<'a> = (&'a [f64], f64, &'a [(u64, u64, f64)]);

    const DROPS: [Drop<'_>; 7] = [
        // Without a limit, two strong runs and everything between them are one region.
        (&[9.0, 9.0, -4.0, -4.0, -4.0, 9.0, 9.0], f64::INFINITY, &[(0, 7, 24.0)]),
        (&[9.0, 9.0, -4.0, -4.0, -4.0, 9.0, 9.0], 12.0, &[(0, 7, 24.0)]),
        (&[9.0, 9.0, -4.0, -4.0, -4.0, 9.0, 9.0], 11.0, &[(0, 2, 18.0), (5, 2, 18.0)]),
        // A rise within the drop does not hide it, and a higher sum starts the measure anew.
        (&[9.0, -4.0, 1.0, -4.0, -4.0, 20.0], 10.0, &[(0, 1, 9.0), (2, 1, 1.0), (5, 1, 20.0)]),
        (&[9.0, -6.0, 9.0, -6.0, 9.0, -6.0, 9.0], 6.0, &[(0, 7, 18.0)]),
        // What was lost before a region does not count as a drop within it.
        (&[-8.0, -8.0, 5.0, -4.0, 5.0, -30.0, 4.0], 6.0, &[(2, 3, 6.0), (6, 1, 4.0)]),
        (&[2.0, -9.0, 5.0, -4.0, 5.0], 6.0, &[(0, 1, 2.0), (2, 3, 6.0)]),
    ];

    #[test]
    fn a_region_ends_where_the_score_has_dropped() {
        for (scores, x_drop, wanted) in DROPS {
            assert_eq!(windows(&found(scores, &RegionParameters { x_drop, ..ALL })), wanted, "{scores:?}");
        }
    }

    /// No region has a drop above the limit, and with a limit above all drops they are those without one.
    #[test]
    fn regions_have_no_larger_drop() {
        let mut state = 3u64;
        for _ in 0..300 {
            let scores: Vec<f64> = (0..40)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    f64::from((state >> 40) as u32 % 2001) / 8.0 - 125.0
                })
                .collect();
            for x_drop in [10.0, 100.0, 300.0] {
                for (first, count, _) in windows(&found(&scores, &RegionParameters { x_drop, ..ALL })) {
                    let (mut total, mut high) = (0.0, f64::NEG_INFINITY);
                    for score in &scores[first as usize..(first + count) as usize] {
                        total += score;
                        high = total.max(high);
                        assert!(high - total <= x_drop, "{scores:?} {x_drop}");
                    }
                }
            }
            let limited = windows(&found(&scores, &RegionParameters { x_drop: 1e5, ..ALL }));
            assert_eq!(limited, windows(&found(&scores, &ALL)));
        }
    }

    #[test]
    fn a_region_says_which_ends_of_the_record_it_reaches() {
        for (scores, wanted) in [
            (&[1.0, 1.0][..], "both"),
            (&[1.0, -1.0], "start"),
            (&[-1.0, 1.0], "end"),
            (&[-1.0, 1.0, -1.0], "none"),
        ] {
            assert_eq!(found(scores, &ALL)[0].edges.name(), wanted, "{scores:?}");
        }
    }

    /// Pieces of 30 and 40 letters within one window of 100 count as a window of 70 known letters.
    #[test]
    fn short_neighbours_are_joined() {
        let mut finder = RegionFinder::default();
        for (start, end, log_odds) in [(0, 100, -1.0), (150, 180, 2.0), (210, 250, 9.0), (251, 351, -1.0)] {
            let known = (end - start) as f64;
            finder.add(RegionWindow { known, ..window(start, end, log_odds) }, 100);
        }
        let region = finder.finish(&ALL, 100)[0];
        let mean = (30.0 * 2.0 + 40.0 * 9.0) / 70.0;
        let place = (region.start, region.end, region.windows, region.log_odds);
        assert_eq!(place, (150, 250, 2, mean));
        assert!((region.score - 0.7 * mean).abs() < 1e-12);
    }

    #[test]
    fn a_finder_starts_over() {
        let mut finder = RegionFinder::default();
        finder.add(window(0, 100, 3.0), 100);
        assert_eq!(finder.finish(&ALL, 100).len(), 1);
        finder.add(RegionWindow { known: 50.0, ..window(0, 50, 2.0) }, 100);
        let edges = Edges { start: true, end: true };
        let region = ViralRegion { start: 0, end: 50, score: 2.0, windows: 1, log_odds: 2.0, edges };
        assert_eq!(finder.finish(&ALL, 50), [region]);
    }
}
