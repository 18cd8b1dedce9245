//! Windows of a caller: every window of a long record has the same length. Invariant: the windows of a record, in order,
//! cover every base of it.

use plimsoll_data::chunk::Chunk;

/// Shortest window in bases that a caller computes.
pub const SHORTEST_WINDOW: usize = 100;

/// Returns the windows of a record of `length` bases, each of `size` bases: one after another, and the last one ends with
/// the record, so it overlaps the window before it. A record of at most `size` bases is one window; an empty record has
/// none.
pub(crate) fn windows(length: usize, size: usize) -> impl Iterator<Item = Chunk> {
    let count = length.div_ceil(size.max(1));
    (0..count).map(move |index| {
        let start = (index * size).min(length.saturating_sub(size));
        Chunk { index, start, len: size.min(length) }
    })
}

/// Number of the first bases of a window that are in the window before it.
pub(crate) fn overlap(window: &Chunk, size: usize) -> usize {
    (window.index * size).saturating_sub(window.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(length: usize, size: usize, expected: &str) {
        let found: Vec<String> = windows(length, size).map(|w| format!("{}:{}", w.start, w.len)).collect();
        assert_eq!(found.join(" "), expected, "{length} in windows of {size}");
    }

    #[test]
    fn windows_have_one_length() {
        check(0, 1000, "");
        check(1, 1000, "0:1");
        check(999, 1000, "0:999");
        check(1000, 1000, "0:1000");
        check(1001, 1000, "0:1000 1:1000");
        check(2000, 1000, "0:1000 1000:1000");
        check(2500, 1000, "0:1000 1000:1000 1500:1000");
    }

    #[test]
    fn every_base_is_covered_and_counted_once() {
        for size in [1, 7, 100, 1000] {
            for length in 0..3 * size + 2 {
                let (mut covered, mut counted) = (0, 0);
                for window in windows(length, size) {
                    assert!(window.start <= covered && window.end() > covered);
                    assert_eq!(overlap(&window, size), covered - window.start);
                    counted += window.len - overlap(&window, size);
                    covered = window.end();
                }
                assert_eq!((covered, counted), (length, length));
            }
        }
    }
}
