//! Nucleotide and protein alphabets: brings sequences into the form in which models read them, counts what models do not
//! know, and rejects input of the wrong kind. Invariant: only a sequence that cannot plausibly belong to the alphabet is
//! rejected; ambiguity codes, N and gaps are always accepted; every path to a model normalizes sequences here.

use crate::sequence::{InputNote, NoteKind, Reader, Record, is_letter_or_unknown};
use crate::tokenize::esm;
use crate::{DataError, DataErrorKind, bases};
use plimsoll_setting::{Command, Setting};
use std::path::Path;

/// The alphabet that the sequences of a file are read in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alphabet {
    /// DNA or RNA.
    Nucleotides,
    /// Proteins, one letter for each residue.
    AminoAcids,
}

/// Minimum length of a sequence to be rejected as DNA in a protein file: a shorter peptide may consist of A, C, G and
/// T.
const JUDGED: usize = 40;

/// Share of nucleotide letters from which a sequence is taken for DNA or RNA, in percent; the others are ambiguity codes. About
/// a quarter of the residues of proteins are these letters, so a protein of [`JUDGED`] residues with this share is as good as
/// impossible.
const PERCENT: usize = 90;

/// Whether the letters of a sequence are those of DNA or RNA: of 40 letters or more, at least 90 % are A, C, G, T, U, N or gaps,
/// and all four bases occur. The commands with a protein model refuse such sequences.
pub fn is_nucleotides(seq: &[u8]) -> bool {
    let mut counts = [0_usize; 256];
    seq.iter().for_each(|letter| counts[usize::from(letter.to_ascii_uppercase())] += 1);
    let bases = [sum_of(&counts, b"A"), sum_of(&counts, b"C"), sum_of(&counts, b"G"), sum_of(&counts, b"TU")];
    seq.len() >= JUDGED
        && bases.iter().all(|&count| count > 0)
        && 100 * (bases.iter().sum::<usize>() + sum_of(&counts, b"N-")) >= PERCENT * seq.len()
}

/// Sum of the counts of `letters`.
fn sum_of(counts: &[usize; 256], letters: &[u8]) -> usize {
    letters.iter().map(|&letter| counts[usize::from(letter)]).sum()
}

/// Number of letters of `seq` that are among `letters` in upper case.
fn count_letters(seq: &[u8], letters: &[u8]) -> usize {
    seq.iter().map(u8::to_ascii_uppercase).filter(|letter| letters.contains(letter)).count()
}

/// Returns the number of letters that are U or u.
pub fn count_uracil(seq: &[u8]) -> usize {
    seq.iter().filter(|&&letter| letter | 0x20 == b'u').count()
}

/// Replaces U by T and u by t; returns the number of replaced letters.
pub fn uracil_to_thymine(seq: &mut [u8]) -> usize {
    let mut replaced = 0;
    for letter in seq {
        // T is the predecessor of U in ASCII, in both cases.
        let is_uracil = *letter | 0x20 == b'u';
        *letter -= u8::from(is_uracil);
        replaced += usize::from(is_uracil);
    }
    replaced
}

/// Changes that [`Alphabet::normalize`] made to a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Normalized {
    /// Number of letters U that were replaced by T.
    pub uracil: usize,
    /// Number of bytes that were dropped: white space, digits and gaps.
    pub dropped: usize,
}

impl Alphabet {
    /// Brings a sequence into the form in which models read it: in upper case, without white space, digits and gaps, and, for
    /// nucleotides, with T in place of U.
    pub fn normalize(self, seq: &mut Vec<u8>) -> Normalized {
        let letters = seq.len();
        if !seq.iter().all(u8::is_ascii_uppercase) {
            seq.retain(|&byte| is_letter_or_unknown(byte));
            seq.make_ascii_uppercase();
        }
        let uracil = match self {
            Self::Nucleotides => uracil_to_thymine(seq),
            Self::AminoAcids => 0,
        };
        Normalized { uracil, dropped: letters - seq.len() }
    }

    /// Returns the number of letters of a sequence that models of this alphabet do not know: letters other than A, C, G, T
    /// and U; or letters without a token of ESM-2, apart from a `*` at the end.
    pub fn count_unknown(self, seq: &[u8]) -> usize {
        match self {
            Self::Nucleotides => seq.iter().filter(|&&letter| bases::code(letter) == bases::OTHER).count(),
            Self::AminoAcids => esm::count_unknown(seq),
        }
    }

    /// Returns the reason why a sequence cannot belong to this alphabet; `None` if it can. A nucleotide sequence is
    /// rejected if at most half of its letters are A, C, G, T, U, N or gaps and at least one letter is no IUPAC
    /// nucleotide code. A protein is rejected if at most half of its letters are amino acids, or if [`is_nucleotides`].
    pub fn refusal(self, seq: &[u8]) -> Option<String> {
        match self {
            Self::Nucleotides => {
                let bases = count_letters(seq, b"ACGTUN-");
                let codes = b"ACGTURYSWKMBDHVN-";
                let other = seq.iter().map(u8::to_ascii_uppercase).find(|letter| !codes.contains(letter));
                let other = other.filter(|_| 2 * bases <= seq.len())?;
                Some(format!(
                    "no nucleotide sequence: {bases} of {} letters are A, C, G, T, U or N, and {:?} is not a \
                     nucleotide code; give DNA or RNA to this command, and proteins to `{}` with a protein model",
                    seq.len(),
                    char::from(other),
                    Command::Embed,
                ))
            }
            Self::AminoAcids => {
                // The letters of the ESM-2 alphabet, a terminal stop, and gaps.
                let residues = count_letters(seq, b"LAGVSERTIDPKQNFYMHWCXBUZO.-*");
                if 2 * residues <= seq.len() && !seq.is_empty() {
                    return Some(format!(
                        "no protein: {residues} of {} letters are amino acids; give protein sequences to this model",
                        seq.len()
                    ));
                }
                is_nucleotides(seq).then(|| {
                    let bases = count_letters(seq, b"ACGTUN-");
                    format!(
                        "no protein: {bases} of its {} letters are A, C, G, T, U or N; translate it first, give it to a DNA model, \
                         or insist with {}",
                        seq.len(),
                        Setting::AllowDna
                    )
                })
            }
        }
    }

    /// Returns an error with file, line and record if `record`, read by `reader`, cannot belong to this alphabet.
    ///
    /// # Errors
    /// [`DataErrorKind::Malformed`] with the reason from [`Alphabet::refusal`].
    pub fn check(self, record: &Record, reader: &Reader) -> Result<(), DataError> {
        let Some(why) = self.refusal(&record.seq) else { return Ok(()) };
        Err(reader.error_at(record, DataError::new(DataErrorKind::Malformed(why))))
    }
}

/// Counts the letters of the records of a file that models do not know.
#[derive(Clone, Debug, Default)]
pub struct UnknownLetters {
    letters: u64,
    records: u64,
    /// Id of the first record that has unknown letters.
    first: String,
}

impl UnknownLetters {
    /// Counts the unknown letters of a sequence; `id` names it.
    ///
    /// # Errors
    /// More than half of its letters are unknown.
    pub fn add(
        &mut self,
        alphabet: Alphabet,
        seq: &[u8],
        id: impl FnOnce() -> String,
    ) -> Result<(), DataError> {
        let unknown = alphabet.count_unknown(seq);
        self.count(unknown, id);
        match unknown_refusal(unknown, seq.len()) {
            Some(why) => Err(DataError::new(DataErrorKind::Malformed(why))),
            None => Ok(()),
        }
    }

    /// Adds the number of unknown letters of a record; `id` names it.
    pub fn count(&mut self, unknown: usize, id: impl FnOnce() -> String) {
        if unknown == 0 {
            return;
        }
        if self.records == 0 {
            self.first = id();
        }
        self.letters += unknown as u64;
        self.records += 1;
    }

    /// The note on the file at `path`; `None` if all letters are known.
    pub fn note(self, path: &Path) -> Option<InputNote> {
        let Self { letters: count, records, first: id } = self;
        let path = path.to_owned();
        let kind = NoteKind::Unknown;
        (count > 0).then_some(InputNote { path, kind, count, records, id, line: 0 })
    }
}

/// Returns the reason why a sequence of `letters` letters (or tokens), of which a model does not know `unknown`, is refused:
/// they are more than half. `None` if it is not refused.
pub fn unknown_refusal(unknown: usize, letters: usize) -> Option<String> {
    (2 * unknown > letters).then(|| {
        format!(
            "{unknown} of {letters} letters or tokens are unknown to the model, more than half; check that the sequences are \
             of the kind that the model reads, and remove this record"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uracil_is_read_as_thymine_in_both_cases() {
        let mut seq = b"AUGuacNTt-".to_vec();
        assert_eq!(count_uracil(&seq), 2);
        assert_eq!(uracil_to_thymine(&mut seq), 2);
        assert_eq!(seq, b"ATGtacNTt-");
    }

    #[test]
    fn sequences_have_one_form() {
        for (alphabet, seq, wanted, uracil, unknown) in [
            (Alphabet::Nucleotides, "acgtNnUu", "ACGTNNTT", 2, 2),
            (Alphabet::Nucleotides, "AC-g.t\tR 12\n", "ACGTR", 0, 1),
            (Alphabet::Nucleotides, "ACGT", "ACGT", 0, 0),
            (Alphabet::AminoAcids, "mkU-v.J*l*", "MKUVJ*L*", 0, 2),
            (Alphabet::AminoAcids, "MK?#", "MK?#", 0, 2),
            (Alphabet::AminoAcids, "", "", 0, 0),
        ] {
            let mut found = seq.as_bytes().to_vec();
            let changed = alphabet.normalize(&mut found);
            assert_eq!(String::from_utf8_lossy(&found), wanted, "{seq}");
            assert_eq!(changed, Normalized { uracil, dropped: seq.len() - wanted.len() }, "{seq}");
            assert_eq!(alphabet.count_unknown(&found), unknown, "{seq}");
        }
    }

    #[test]
    fn alphabets_refuse_the_other_kind_and_nothing_odd() {
        const PROTEIN: &[u8] = b"MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV";
        let dna = b"ATGACCATGATTACGGATTCACTGGCCGTCGTTTTACAACGTCGTGACTGGGAAAACCCTGGC";
        let half = [&dna[..30], b"EFILPQ"].concat();
        for (alphabet, seq, refused) in [
            (Alphabet::Nucleotides, PROTEIN, true),
            (Alphabet::Nucleotides, &PROTEIN.to_ascii_lowercase()[..], true),
            (Alphabet::Nucleotides, dna, false),
            (Alphabet::Nucleotides, &half, false),
            (Alphabet::Nucleotides, b"NNNNNNNNNN", false),
            (Alphabet::Nucleotides, b"RYSWKMRYSWKM", false),
            (Alphabet::Nucleotides, b"AUGGCC--NN", false),
            (Alphabet::Nucleotides, b"", false),
            (Alphabet::AminoAcids, PROTEIN, false),
            (Alphabet::AminoAcids, dna, true),
            (Alphabet::AminoAcids, &dna[..20], false),
            (Alphabet::AminoAcids, &dna.to_ascii_lowercase()[..], true),
            // RNA, ambiguity codes of an assembly, gaps of an alignment.
            (Alphabet::AminoAcids, b"AUGACCAUGAUUACGGAUUCACUGGCCGUCGUUUUACAACGUCGUGACUGG", true),
            (Alphabet::AminoAcids, &[&dna[..], b"RYK"].concat()[..], true),
            (Alphabet::AminoAcids, &[&dna[..], b"----------"].concat()[..], true),
            // Poly-alanine, as in antifreeze proteins and silk.
            (Alphabet::AminoAcids, b"DTASDAAAAAALTAANAKAAAELTAANAAAAAAATARGAGAGSGAGAGS", false),
            (Alphabet::AminoAcids, &[b'G'; 60], false),
            (Alphabet::AminoAcids, b"0123456789ACD", true),
            (Alphabet::AminoAcids, b"XXXXXXXXXX", false),
            (Alphabet::AminoAcids, b"", false),
        ] {
            let why = alphabet.refusal(seq);
            assert_eq!(why.is_some(), refused, "{alphabet:?} {}: {why:?}", String::from_utf8_lossy(seq));
        }
    }
}
