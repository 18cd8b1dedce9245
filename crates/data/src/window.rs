//! VirNucPro's rule for windows (which it calls chunks): a record of L bases becomes n = ceil(L / C) overlapping
//! windows of C bases. Invariant: the windows of a record, in order, cover every base of it, without a gap.
//!
//! Source: the original's `split_sequence`; described in the specification of the pipeline. With R = n C - L,
//! lo = floor(R / n) and need = R - lo (n - 1), windows i and i + 1 overlap by lo + 1 bases for the first `need` pairs
//! and by lo for the others. When need > n - 1 all pairs overlap by lo + 1 and the **last window is shorter than C**:
//! the original cuts this way, and the models were trained on it.

use std::iter::FusedIterator;

/// Location of a window in its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordWindow {
    /// Index of the window in the record, from 0. Names in files count from 1.
    pub index: usize,
    /// First base in the record, from 0.
    pub start: usize,
    /// Length in bases: at most the window size.
    pub len: usize,
}

impl RecordWindow {
    /// Returns the index one past the last base.
    pub fn end(&self) -> usize {
        self.start + self.len
    }

    /// Returns the bases of the window in the record's sequence.
    pub fn of<'a>(&self, sequence: &'a [u8]) -> &'a [u8] {
        &sequence[self.start..self.end()]
    }
}

/// Returns the windows of a record of `length` bases at window size `size`, in O(1) memory. None for an empty record.
///
/// # Panics
/// If `size` is 0.
pub fn record_windows(length: usize, size: usize) -> RecordWindows {
    assert!(size > 0, "a chunk has at least one base");
    let count = length.div_ceil(size);
    if count == 0 {
        return RecordWindows { length, size, count, lo: 0, up_pairs: 0, next: 0 };
    }
    // R < size, so this cannot overflow for any length that a slice can have.
    let surplus = (size - length % size) % size;
    let lo = surplus / count;
    let need = surplus - lo * (count - 1);
    RecordWindows { length, size, count, lo, up_pairs: need.min(count - 1), next: 0 }
}

/// The iterator that [`record_windows`] returns.
#[derive(Clone, Debug)]
pub struct RecordWindows {
    length: usize,
    size: usize,
    count: usize,
    /// The smaller of the two overlaps, in bases.
    lo: usize,
    /// Number of first pairs of neighbouring windows that overlap by `lo + 1`.
    up_pairs: usize,
    next: usize,
}

impl RecordWindows {
    /// Returns window `index`, in O(1).
    fn get(&self, index: usize) -> RecordWindow {
        let overlaps = index * self.lo + index.min(self.up_pairs);
        let start = index * self.size - overlaps;
        RecordWindow { index, start, len: self.size.min(self.length - start) }
    }
}

impl Iterator for RecordWindows {
    type Item = RecordWindow;

    fn next(&mut self) -> Option<RecordWindow> {
        if self.next == self.count {
            return None;
        }
        self.next += 1;
        Some(self.get(self.next - 1))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.count - self.next, Some(self.count - self.next))
    }
}

impl ExactSizeIterator for RecordWindows {}
impl FusedIterator for RecordWindows {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the windows against `expected`: "start:len" of every window.
    fn check(length: usize, size: usize, expected: &str) {
        let found: Vec<String> =
            record_windows(length, size).map(|c| format!("{}:{}", c.start, c.len)).collect();
        assert_eq!(found.join(" "), expected, "L = {length}, C = {size}");
    }

    #[test]
    fn the_vectors_of_the_specification() {
        check(0, 500, "");
        check(1, 500, "0:1");
        check(499, 500, "0:499");
        check(500, 500, "0:500");
        check(501, 500, "0:500 250:251");
        check(502, 500, "0:500 250:252");
        check(503, 500, "0:500 251:252");
        check(750, 500, "0:500 374:376");
        check(999, 500, "0:500 499:500");
        check(1000, 500, "0:500 500:500");
        check(1001, 500, "0:500 333:500 666:335");
        check(1200, 500, "0:500 399:500 798:402");
        check(1499, 500, "0:500 499:500 999:500");
        check(1501, 500, "0:500 375:500 750:500 1125:376");
        check(301, 300, "0:300 150:151");
    }

    /// Checks long records: the count, the starts of the first and the last windows, the last length.
    fn check_long(length: usize, count: usize, starts: ([usize; 3], [usize; 2]), last: usize) {
        let all: Vec<RecordWindow> = record_windows(length, 500).collect();
        assert_eq!(all.len(), count);
        assert!(all[..count - 1].iter().all(|c| c.len == 500), "L = {length}");
        assert_eq!([0, 1, 2].map(|i| all[i].start), starts.0);
        assert_eq!([count - 2, count - 1].map(|i| all[i].start), starts.1);
        assert_eq!(all[count - 1].len, last);
    }

    #[test]
    fn the_long_vectors_of_the_specification() {
        check_long(5001, 11, ([0, 454, 908], [4086, 4540]), 461);
        check_long(12345, 25, ([0, 493, 986], [11351, 11845]), 500);
        check_long(30001, 61, ([0, 491, 982], [29009, 29501]), 500);
    }

    /// The recurrence as the original writes it, step by step.
    fn by_the_letter(length: usize, size: usize) -> Vec<(usize, usize)> {
        let n = length.div_ceil(size);
        let surplus = n * size - length;
        let lo = surplus / n;
        let need = surplus - lo * (n - 1);
        let mut steps = vec![lo + 1; need];
        steps.extend(std::iter::repeat_n(lo, (n - 1).saturating_sub(need)));
        steps.push(0);
        let mut start = 0;
        let mut out = Vec::new();
        for step in &steps[..n] {
            out.push((start, (start + size).min(length) - start));
            start = start + size - step;
        }
        out
    }

    #[test]
    fn windows_cover_every_base_for_every_length() {
        for size in [300, 500] {
            for length in 1..=60_000 {
                let mut covered = 0;
                for c in record_windows(length, size) {
                    assert!(c.start <= covered && c.len > 0 && c.len <= size, "{length} {c:?}");
                    covered = c.end();
                }
                assert_eq!(covered, length);
            }
        }
    }

    #[test]
    fn the_closed_form_is_the_recurrence() {
        for size in [1, 2, 3, 7, 300, 500] {
            for length in (1..3000).chain(59_990..60_000) {
                let found: Vec<_> = record_windows(length, size).map(|c| (c.start, c.len)).collect();
                assert_eq!(found, by_the_letter(length, size), "L = {length}, C = {size}");
            }
        }
    }

    #[test]
    fn the_longest_slices_do_not_overflow() {
        let c = record_windows(isize::MAX as usize, 500);
        assert_eq!(c.get(c.len() - 1).end(), isize::MAX as usize);
    }
}
