//! The bytes of sequence lines. Invariant: a byte of a sequence line is a letter of the record, or is dropped and counted,
//! or is an error that names record, line and byte; none becomes a base or a residue silently.
//!
//! Letters are kept as they are, in their case, also those that are in no alphabet: models and callers count them as unknown.
//! White space and digits are dropped (the sequences of GenBank files have both), and so are `-` and `.`, the gaps of aligned
//! sequences. In a protein file `*`, `?` and `#` (a stop codon, an unknown residue, a frame shift) keep their place.

use crate::alphabet::Alphabet;
use plimsoll_setting::Command;

/// Class of a byte of a sequence line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ByteClass {
    Letter,
    /// ASCII white space, in the sense of Python's `str.split()`.
    Blank,
    Digit,
    /// `-` or `.`.
    Gap,
    /// `*`, `?` or `#`, which occur in protein files.
    Mark,
    /// Any other byte, which no sequence has.
    Other,
}

/// The class of each byte.
const CLASSES: [ByteClass; 256] = {
    let mut table = [ByteClass::Other; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = match byte as u8 {
            b'a'..=b'z' | b'A'..=b'Z' => ByteClass::Letter,
            b'\t'..=b'\r' | 0x1c..=0x1f | b' ' => ByteClass::Blank,
            b'0'..=b'9' => ByteClass::Digit,
            b'-' | b'.' => ByteClass::Gap,
            b'*' | b'?' | b'#' => ByteClass::Mark,
            _ => ByteClass::Other,
        };
        byte += 1;
    }
    table
};

impl ByteClass {
    #[inline]
    pub(super) fn of(byte: u8) -> Self {
        CLASSES[usize::from(byte)]
    }

    /// Whether a record keeps the byte.
    pub(super) fn is_kept(self, alphabet: Alphabet) -> bool {
        match self {
            Self::Letter => true,
            Self::Mark => alphabet == Alphabet::AminoAcids,
            Self::Blank | Self::Digit | Self::Gap | Self::Other => false,
        }
    }
}

/// Number of bytes of a kind in the sequence lines of a record, and the line of the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dropped {
    pub(super) bytes: u64,
    pub(super) line: u64,
}

impl Dropped {
    pub(super) fn add(&mut self, bytes: u64, line: u64) {
        if self.bytes == 0 {
            self.line = line;
        }
        self.bytes += bytes;
    }
}

/// A byte that no sequence has, with its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct BadByte {
    byte: u8,
    /// Number of the byte in its line, from 1.
    column: u64,
    /// Whether only white space is before it in the line.
    begins_line: bool,
}

/// Cleans the sequence lines of one record.
pub(super) struct LineCleaner {
    alphabet: Alphabet,
    /// Whether every byte but white space is kept.
    keeps_all: bool,
    /// Whether digits and gaps stay until the qualities are read, which have a character for each.
    is_fastq: bool,
    pub(super) blanks: Dropped,
    pub(super) digits: Dropped,
    pub(super) gaps: Dropped,
    /// Bytes of the line before the current piece.
    column: u64,
    /// Whether all bytes of the line before the current piece are white space.
    is_blank: bool,
    bad: Option<BadByte>,
}

impl LineCleaner {
    pub(super) fn new(alphabet: Alphabet, is_fastq: bool) -> Self {
        let none = Dropped::default();
        Self {
            alphabet,
            keeps_all: false,
            is_fastq,
            blanks: none,
            digits: none,
            gaps: none,
            column: 0,
            is_blank: true,
            bad: None,
        }
    }

    /// Keeps every byte but white space, without notes and errors.
    pub(super) fn keep_all(&mut self) {
        self.keeps_all = true;
    }

    /// Prepares for the next line.
    pub(super) fn begin_line(&mut self) {
        self.column = 0;
        self.is_blank = true;
    }

    /// Appends the letters of a piece of the line with number `line` to `seq`.
    pub(super) fn push(&mut self, piece: &[u8], line: u64, seq: &mut Vec<u8>) {
        // Almost every piece has letters alone. The fold has no branch, so that it is vectorized.
        // `b | 0x20` is the lower case of a letter; the subtraction moves all other bytes to 26 or more.
        if piece.iter().fold(0, |any, &b| any | u8::from((b | 0x20).wrapping_sub(b'a') >= 26)) == 0 {
            seq.extend_from_slice(piece);
            self.is_blank &= piece.is_empty();
            self.column += piece.len() as u64;
            return;
        }
        if self.keeps_all {
            seq.extend(piece.iter().filter(|&&byte| ByteClass::of(byte) != ByteClass::Blank));
            return;
        }
        for &byte in piece {
            self.column += 1;
            let class = ByteClass::of(byte);
            match class {
                ByteClass::Letter => seq.push(byte),
                ByteClass::Blank => {
                    self.blanks.add(1, line);
                    continue;
                }
                ByteClass::Digit | ByteClass::Gap => {
                    let dropped = if class == ByteClass::Gap { &mut self.gaps } else { &mut self.digits };
                    dropped.add(1, line);
                    if self.is_fastq {
                        seq.push(byte);
                    }
                }
                ByteClass::Mark if self.alphabet == Alphabet::AminoAcids => seq.push(byte),
                ByteClass::Mark | ByteClass::Other => {
                    let column = self.column;
                    let begins_line = self.is_blank;
                    self.bad.get_or_insert(BadByte { byte, column, begins_line });
                }
            }
            self.is_blank = false;
        }
    }

    /// The alphabet of the records.
    pub(super) fn alphabet(&self) -> Alphabet {
        self.alphabet
    }

    /// The first byte so far that no sequence has.
    pub(super) fn bad(&self) -> Option<BadByte> {
        self.bad
    }

    /// Whether bytes stay in `seq` that [`LineCleaner::drop_from_fastq`] removes.
    pub(super) fn keeps_dropped(&self) -> bool {
        self.is_fastq && self.digits.bytes + self.gaps.bytes > 0
    }

    /// Removes digits and gaps from a FASTQ record, each with its quality. `quality` is empty if qualities are not kept.
    pub(super) fn drop_from_fastq(seq: &mut Vec<u8>, quality: &mut Vec<u8>) {
        if quality.len() == seq.len() {
            let mut letters = seq.iter();
            quality.retain(|_| letters.next().is_some_and(|&letter| !is_digit_or_gap(letter)));
        }
        seq.retain(|&letter| !is_digit_or_gap(letter));
    }

    /// Returns the reason why a record is no sequence, or `None`: with more digits than letters it has qualities, positions or
    /// the colours of a colour-space read.
    pub(super) fn refusal(&self, seq: &[u8]) -> Option<String> {
        let digits = self.digits.bytes;
        (digits > seq.len() as u64).then(|| {
            format!(
                "no sequence: {digits} digits and {} letters; give letters instead of qualities, numbers or the colours of \
                 colour-space reads",
                seq.len()
            )
        })
    }
}

/// Whether a FASTQ record keeps the byte only until its qualities are read.
fn is_digit_or_gap(byte: u8) -> bool {
    matches!(ByteClass::of(byte), ByteClass::Digit | ByteClass::Gap)
}

impl BadByte {
    /// Describes the byte, the probable cause and the remedy.
    pub(super) fn complaint(self, is_fastq: bool, alphabet: Alphabet) -> String {
        let Self { byte, column, begins_line } = self;
        let shown = match byte {
            b' '..=b'~' => format!("'{}'", char::from(byte)),
            _ => format!("0x{byte:02x}"),
        };
        let place = format!("byte {column} of the line is {shown}");
        let cause = match byte {
            b'>' if begins_line && !is_fastq => {
                "a title with white space before it; remove the white space, so that '>' begins the line"
            }
            b'@' if begins_line && !is_fastq => {
                "FASTQ records behind FASTA records; give the two in files of their own"
            }
            b'>' if begins_line => "FASTA records behind FASTQ records; give the two in files of their own",
            b'>' | b'@' => {
                "the start of a record inside of a sequence line, as in files that were joined without a line end between \
                 them; put a line end before it"
            }
            b'+' if begins_line => {
                "a line of FASTQ in a FASTA file; give FASTA and FASTQ in files of their own"
            }
            b';' => "a comment, which programs read in different ways; remove comments",
            b'<' => "markup, such as of a web page, or a special token such as <mask>; give letters alone",
            0 => "no text; the file is damaged, binary, or in UTF-16 (iconv -f utf-16 -t utf-8)",
            b'*' if alphabet == Alphabet::Nucleotides => {
                return format!(
                    "{place}: the mark of a stop codon, which no nucleotide sequence has; give proteins to a protein model \
                     ({}), or remove it",
                    Command::Embed
                );
            }
            0x80.. => "no ASCII letter; write the sequence in plain letters",
            _ => "no letter of a sequence; remove it, or repair the file",
        };
        format!("{place}: {cause}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_class() {
        use ByteClass as C;
        let expected = |byte: u8| match byte {
            b if b.is_ascii_alphabetic() => C::Letter,
            b if super::super::is_blank(b) => C::Blank,
            b if b.is_ascii_digit() => C::Digit,
            b'-' | b'.' => C::Gap,
            b'*' | b'?' | b'#' => C::Mark,
            _ => C::Other,
        };
        assert!((0..=255).all(|byte| ByteClass::of(byte) == expected(byte)));
    }
}
