//! Windows of a caller. A run of more than [`LONGEST_GAP`] unknown letters, such as the join of two scaffolds, ends a window;
//! the *pieces* between such runs are cut into windows, which have the same length in a long piece. Invariant: every letter of
//! a record is in a window or counted as left out beside one, and none is counted twice.

use crate::methods::CutWindow;
use crate::pipeline::letters::LetterCounts;
use plimsoll_data::bases;
use plimsoll_data::window::RecordWindow;
use std::ops::Range;

/// Shortest window in bases that a caller computes: the number of its codons is the least that every frame needs.
pub const SHORTEST_WINDOW: usize = 100;

/// Longest run of unknown letters inside a window.
pub const LONGEST_GAP: usize = 100;

/// Iterator over the windows of a record.
#[derive(Debug)]
pub(crate) struct CallerWindows<'a> {
    sequence: &'a [u8],
    size: usize,
    /// Number of windows so far.
    count: usize,
    /// End of the last window: the letters before it have been counted.
    counted: usize,
    /// The piece that is being cut.
    piece: Option<Range<usize>>,
    /// Number of windows of the piece so far.
    windows_of_piece: usize,
}

/// Returns the windows of a record, of at most `size` bases each. The windows of a piece follow one another, and the last one
/// ends with the piece, so it overlaps the window before it. A piece of at most `size` bases is one window; a piece with fewer
/// than [`SHORTEST_WINDOW`] known letters is in no window. A record without another piece is one window, which ends with the
/// record or has `size` bases; an empty record has none.
pub(crate) fn windows(sequence: &[u8], size: usize) -> CallerWindows<'_> {
    let size = size.max(1);
    let fallback = 0..sequence.len().min(size);
    let piece = next_piece(sequence, 0).or((!sequence.is_empty()).then_some(fallback));
    CallerWindows { sequence, size, count: 0, counted: 0, piece, windows_of_piece: 0 }
}

/// Returns the lengths of the windows of a record of `length` known letters.
pub(crate) fn window_lengths(length: usize, size: usize) -> impl Iterator<Item = usize> {
    let size = size.max(1);
    (0..length.div_ceil(size)).map(move |_| size.min(length))
}

impl Iterator for CallerWindows<'_> {
    type Item = CutWindow;

    fn next(&mut self) -> Option<CutWindow> {
        let Self { sequence, size, .. } = *self;
        let piece = self.piece.clone()?;
        let length = piece.len().min(size);
        // The last window ends with the piece and overlaps the window before it, so that it has the full length too.
        let start = (piece.start + self.windows_of_piece * size).min(piece.end - length);
        let location = RecordWindow { index: self.count, start, len: length };
        let is_last = location.end() == piece.end;
        self.windows_of_piece += 1;
        if is_last {
            self.piece = next_piece(sequence, piece.end);
            self.windows_of_piece = 0;
        }
        let next = match &self.piece {
            Some(piece) if is_last => piece.start,
            Some(_) => location.end(),
            None => sequence.len(),
        };
        let before = if self.count == 0 { 0..start } else { 0..0 };
        let left_out = [before, location.end()..next].into_iter().map(|range| unknown_of(&sequence[range]));
        let left_out = left_out.fold(LetterCounts::default(), LetterCounts::plus);
        let overlap = self.counted.saturating_sub(start);
        self.counted = location.end();
        self.count += 1;
        Some(CutWindow { location, overlap, left_out })
    }
}

/// Counts of letters that are in no window.
fn unknown_of(sequence: &[u8]) -> LetterCounts {
    let unknown = sequence.iter().filter(|&&letter| is_unknown(letter)).count();
    // A gap of more than 4 Gb is counted as one of 4 Gb; the writer then refuses the record.
    let [letters, unknown] = [sequence.len(), unknown].map(|count| u32::try_from(count).unwrap_or(u32::MAX));
    LetterCounts { letters, unknown, ..LetterCounts::default() }
}

fn is_unknown(letter: u8) -> bool {
    bases::code(letter) == bases::OTHER
}

/// The next piece at or after `from`: it begins and ends with a known letter, has no run of more than [`LONGEST_GAP`] unknown
/// ones, and at least [`SHORTEST_WINDOW`] known ones.
fn next_piece(sequence: &[u8], from: usize) -> Option<Range<usize>> {
    let mut at = from;
    loop {
        let start = at + sequence[at..].iter().position(|&letter| !is_unknown(letter))?;
        // The piece so far is `start..end`: `end` stays behind its last known letter while `at` runs through unknown ones.
        let mut end = start;
        let mut known = 0;
        at = start;
        while at < sequence.len() && at - end <= LONGEST_GAP {
            if !is_unknown(sequence[at]) {
                end = at + 1;
                known += 1;
            }
            at += 1;
        }
        if known >= SHORTEST_WINDOW {
            return Some(start..end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record from a text such as `A150 N101 A20`: letters with their numbers.
    fn record(text: &str) -> Vec<u8> {
        let mut sequence = vec![];
        for run in text.split_whitespace() {
            let (letter, length) = run.split_at(1);
            sequence.extend(letter.repeat(length.parse().expect("a number")).into_bytes());
        }
        sequence
    }

    /// Windows as `start:length`, with `+letters/unknown` where letters were left out beside it.
    fn shown(sequence: &[u8], size: usize) -> String {
        let show = |w: CutWindow| {
            let LetterCounts { letters, unknown, .. } = w.left_out;
            let left_out = if letters > 0 { format!("+{letters}/{unknown}") } else { String::new() };
            format!("{}:{}{left_out}", w.location.start, w.location.len)
        };
        windows(sequence, size).map(show).collect::<Vec<_>>().join(" ")
    }

    /// (record, windows of 1 000 bases)
    const CASES: [(&str, &str); 17] = [
        ("", ""),
        ("A1", "0:1"),
        ("A999", "0:999"),
        ("A1000", "0:1000"),
        ("A1001", "0:1000 1:1000"),
        ("A2000", "0:1000 1000:1000"),
        ("A2500", "0:1000 1000:1000 1500:1000"),
        // A run of 100 unknown letters stays inside, one of 101 ends the window, any letter that is no base is unknown.
        ("A400 N100 A400", "0:900"),
        ("A400 N101 A400", "0:400+101/101 501:400"),
        ("A400 -300 R300 C400", "0:400+600/600 1000:400"),
        // Unknown letters at the ends are in no window, whatever their number.
        ("N150 A1000", "150:1000+150/150"),
        ("N5 A1000 N7", "5:1000+12/12"),
        ("N500 A1500 N200 A1200", "500:1000+500/500 1000:1000+200/200 2200:1000 2400:1000"),
        // Pieces with fewer than 100 known letters are in no window.
        ("A200 N300 A99 N300 A200", "0:200+699/600 899:200"),
        ("A99 N300 A100", "399:100+399/300"),
        // A record without a piece is one window.
        ("N2000", "0:1000+1000/1000"),
        ("A99", "0:99"),
    ];

    #[test]
    fn windows_end_at_long_runs_of_unknown_letters() {
        for (text, wanted) in CASES {
            assert_eq!(shown(&record(text), 1000), wanted, "{text}");
        }
    }

    #[test]
    fn every_letter_is_counted_once() {
        let gaps =
            ["A1200", "A250 N101 A333 N40 A2000", "N300 A100 N100 A7 N120 A101 N5", "N77", "A99 N101 A99"];
        for text in gaps {
            let sequence = record(text);
            for size in [1, 7, 100, 1000] {
                let mut counted = 0;
                let mut covered = 0;
                for (index, window) in windows(&sequence, size).enumerate() {
                    assert_eq!(window.location.index, index);
                    assert!(window.location.len <= size && window.location.end() > covered);
                    counted += window.location.len - window.overlap + window.left_out.letters as usize;
                    covered = window.location.end();
                }
                assert_eq!(counted, sequence.len(), "{text} in windows of {size}");
            }
        }
    }
}
