//! Statistics of letters, which tell nucleotides from proteins. Invariant: the verdict depends on the counts of letters
//! alone, and short sequences have none.

/// Least number of letters of a verdict: a shorter text may be a peptide.
const LEAST: u64 = 30;

/// Share of nucleotide letters from which a sequence is taken for nucleotides, in percent. The letters A, C, G, T, U and N are
/// about a quarter of the residues of proteins, so a protein of [`LEAST`] residues with this share is as good as impossible.
const PERCENT: u64 = 90;

/// Counts of the letters of sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LetterCounts {
    /// Number of letters.
    pub letters: u64,
    /// Number of these that are A, C, G, T, U or N.
    pub nucleotides: u64,
}

impl LetterCounts {
    /// Counts the letters of a sequence; other bytes are not counted.
    pub fn of(sequence: &[u8]) -> Self {
        let letters = sequence.iter().filter(|byte| byte.is_ascii_alphabetic()).count() as u64;
        let is_nucleotide =
            |byte: &&u8| matches!(byte.to_ascii_uppercase(), b'A' | b'C' | b'G' | b'T' | b'U' | b'N');
        Self { letters, nucleotides: sequence.iter().filter(is_nucleotide).count() as u64 }
    }

    /// Adds other counts.
    pub fn add(&mut self, other: Self) {
        self.letters += other.letters;
        self.nucleotides += other.nucleotides;
    }

    /// Whether the letters are those of DNA or RNA.
    pub fn are_nucleotides(self) -> bool {
        self.letters >= LEAST && self.nucleotides.saturating_mul(100) >= self.letters.saturating_mul(PERCENT)
    }

    /// The share of letters that are A, C, G, T, U or N, in percent.
    pub fn percent(self) -> f64 {
        100.0 * self.nucleotides as f64 / self.letters.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nucleotides_and_proteins() {
        let dna = "ACGTACGTTAGACCATGACCAGTAGGATCA";
        let protein = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVK";
        for (sequence, wanted) in [
            (dna.to_owned(), true),
            (dna.to_lowercase(), true),
            (dna.replace('T', "U"), true),
            (format!("{dna}\n--..*"), true),
            // Ambiguity codes of an assembly.
            (format!("{dna}RYK"), true),
            (protein.to_owned(), false),
            // A peptide of five residues, and one that is too short for a verdict.
            ("GATTA".to_owned(), false),
            (dna[..29].to_owned(), false),
            // Poly-alanine with other residues.
            ("AAAAAALAAAAAAKAAAAAALAAAAAKAAAAAAK".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(LetterCounts::of(sequence.as_bytes()).are_nucleotides(), wanted, "{sequence}");
        }
        // Counts of several sequences are taken together.
        let mut all = LetterCounts::default();
        for _ in 0..4 {
            all.add(LetterCounts::of(b"GATTACAG"));
        }
        assert!(all.are_nucleotides() && all.percent() == 100.0);
    }
}
