//! Letters of a record that decide whether it can be called: unknown letters and low complexity. Invariant: counts of
//! disjoint pieces of a record add up, so that windows can be counted by different threads.
//!
//! Complexity follows DUST (Morgulis et al. 2006, "A fast and symmetric DUST implementation to mask low-complexity DNA
//! sequences"): a piece of 64 bases with the triplet counts c_t and l triplets has the score
//! `sum of c_t (c_t - 1) / 2, divided by l - 1`, and is of low complexity if the score is above 2, the usual limit. The
//! *complexity* of a record is the share of its pieces that are not of low complexity; pieces do not overlap.

use plimsoll_data::bases;

/// Bases of a piece: the window of DUST.
const PIECE: usize = 64;
/// DUST score above which a piece is of low complexity.
const DUST_LIMIT: f64 = 2.0;
/// Least number of triplets that tell something about a piece.
const MIN_TRIPLETS: u32 = 16;

/// Counts of letters and pieces of a window, which has at most 2^20 letters. Small, because every window that waits for its
/// scores has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LetterCounts {
    /// Letters.
    pub(crate) letters: u32,
    /// Letters other than A, C, G, T and U.
    pub(crate) unknown: u32,
    /// Pieces with enough known triplets.
    pub(crate) pieces: u16,
    /// Pieces of low complexity.
    pub(crate) low: u16,
}

impl LetterCounts {
    /// Counts the letters of a sequence.
    pub(crate) fn of(sequence: &[u8]) -> Self {
        let mut counts = Self { letters: sequence.len() as u32, ..Self::default() };
        for piece in sequence.chunks(PIECE) {
            let mut triplets = [0u8; 64];
            let mut total = 0u32;
            // Length of the run of known letters up to here, and its last three letters with two bits each.
            let mut known = 0u32;
            let mut code = 0usize;
            for letter in piece {
                match bases::code(*letter) {
                    bases::OTHER => {
                        counts.unknown += 1;
                        known = 0;
                    }
                    base => {
                        // The mask drops the letter before the last three, so the code is an index in `triplets`.
                        code = (code << 2 | usize::from(base)) & 63;
                        known += 1;
                    }
                }
                if known >= 3 {
                    triplets[code] += 1;
                    total += 1;
                }
            }
            if total < MIN_TRIPLETS {
                continue;
            }
            let pairs: u32 = triplets.iter().map(|&c| u32::from(c)).map(|c| c * c.saturating_sub(1) / 2).sum();
            counts.pieces += 1;
            counts.low += u16::from(f64::from(pairs) / f64::from(total - 1) > DUST_LIMIT);
        }
        counts
    }

    /// The counts of two disjoint pieces.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            letters: self.letters.saturating_add(other.letters),
            unknown: self.unknown.saturating_add(other.unknown),
            pieces: self.pieces + other.pieces,
            low: self.low + other.low,
        }
    }

    /// Number of letters A, C, G, T and U.
    pub(crate) fn known(self) -> u32 {
        self.letters - self.unknown
    }
}

/// Letters of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowLetters {
    /// Counts of its letters that are not in the window before it.
    pub(crate) new: LetterCounts,
    /// Counts of the letters beside it that are in no window.
    pub(crate) left_out: LetterCounts,
    /// Number of known letters of the whole window.
    pub(crate) known: u32,
}

/// Counts over all pieces of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LetterTotals {
    letters: u64,
    unknown: u64,
    pieces: u64,
    low: u64,
}

impl LetterTotals {
    pub(crate) fn add(&mut self, counts: LetterCounts) {
        self.letters += u64::from(counts.letters);
        self.unknown += u64::from(counts.unknown);
        self.pieces += u64::from(counts.pieces);
        self.low += u64::from(counts.low);
    }

    /// Number of letters.
    pub(crate) fn letters(&self) -> u64 {
        self.letters
    }

    /// Number of letters A, C, G, T and U.
    pub(crate) fn known(&self) -> u64 {
        self.letters - self.unknown
    }

    /// Share of the letters that are unknown.
    pub(crate) fn unknown(&self) -> f64 {
        self.unknown as f64 / self.letters.max(1) as f64
    }

    /// The complexity: 1 for a record without a piece that can be measured.
    pub(crate) fn complexity(&self) -> f64 {
        if self.pieces == 0 { 1.0 } else { 1.0 - self.low as f64 / self.pieces as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(sequence: &[u8]) -> LetterTotals {
        let mut totals = LetterTotals::default();
        totals.add(LetterCounts::of(sequence));
        totals
    }

    fn random(length: usize) -> Vec<u8> {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            b"ACGT"[(state >> 62) as usize]
        };
        (0..length).map(|_| next()).collect()
    }

    #[test]
    fn repeats_are_of_low_complexity_and_random_bases_are_not() {
        assert_eq!(totals(&random(6400)).complexity(), 1.0);
        for repeat in ["A", "AT", "CAG", "TTTA"] {
            assert_eq!(totals(repeat.repeat(200).as_bytes()).complexity(), 0.0, "{repeat}");
        }
        let half = [random(640), b"at".repeat(320)].concat();
        assert_eq!(totals(&half).complexity(), 0.5);
        assert_eq!(totals(b"").complexity(), 1.0);
    }

    /// 62 equal triplets have 62 * 61 / 2 pairs, divided by 61: a score of 31.
    #[test]
    fn the_limit_is_that_of_dust() {
        // 64 bases with every triplet of a de Bruijn sequence once score 0.
        let counts = LetterCounts::of(&[b'A'; 64]);
        assert_eq!(counts, LetterCounts { letters: 64, unknown: 0, pieces: 1, low: 1 });
        // Period 12: 10 triplets occur 5 times and 2 of them 6 times: 130 pairs, 130 / 61 = 2.13.
        assert_eq!(LetterCounts::of(&b"ACGTTGCATCAG".repeat(6)[..64]).low, 1);
        // Period 16: 14 triplets occur 4 times and 2 of them 3 times at most: 90 / 61 = 1.5.
        assert_eq!(LetterCounts::of(&b"ACGTTGCATCAGGACT".repeat(4)).low, 0);
    }

    #[test]
    fn unknown_letters_are_counted_and_break_triplets() {
        let all = totals(b"ACGTUacgtuNNRY-");
        assert_eq!(all.unknown(), 5.0 / 15.0);
        let unknown = totals(&[b'N'; 640]);
        assert_eq!((unknown.unknown(), unknown.complexity()), (1.0, 1.0));
    }
}
