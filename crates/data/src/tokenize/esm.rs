//! ESM-2's tokenizer: `<cls> residues <eos>`, one token per residue. Invariant: a protein of n characters, without one
//! final `*`, becomes n + 2 tokens; each character outside the alphabet becomes one `<unk>`.
//!
//! Source: the models' `vocab.txt` (fair-esm calls the alphabet "ESM-1b"). The reference implementations disagree on
//! unknown characters: fair-esm raises an error, the slow reference tokenizer merges a run of them into one `<unk>`.
//! Here each becomes its own `<unk>`, so that token positions still correspond to residue positions.

/// Token id of `<cls>`, which precedes the first residue.
pub const CLS: i32 = 0;
/// Token id of `<pad>`. The alphabet contains it, but packs contain no padding.
pub const PAD: i32 = 1;
/// Token id of `<eos>`, which follows the last residue.
pub const EOS: i32 = 2;
/// Token id of `<unk>`: any character outside the alphabet.
pub const UNK: i32 = 3;
/// Token id of `<mask>`, a masked residue. No character is encoded to it.
pub const MASK: i32 = 32;
/// Number of tokens in the alphabet, which is the number of rows of the embedding table.
pub const VOCAB: usize = 33;

/// Characters of the tokens with ids 4 to 30, in the order of the ids.
const LETTERS: &[u8; 27] = b"LAGVSERTIDPKQNFYMHWCXBUZO.-";

/// Token id of each byte; a lower-case letter has the id of its upper-case letter.
const TOKEN: [u8; 256] = {
    let mut table = [UNK as u8; 256];
    let mut i = 0;
    while i < LETTERS.len() {
        let letter = LETTERS[i];
        table[letter as usize] = 4 + i as u8;
        table[letter.to_ascii_lowercase() as usize] = 4 + i as u8;
        i += 1;
    }
    table
};

/// Returns the character of a token id; `None` for special tokens.
pub fn letter(token: i32) -> Option<u8> {
    let place = usize::try_from(token).ok()?.checked_sub(4)?;
    LETTERS.get(place).copied()
}

/// Returns the content of the models' `vocab.txt`: the names of all tokens in the order of their ids, one per line.
pub fn vocabulary() -> String {
    let letters = LETTERS.iter().map(|&letter| char::from(letter).to_string());
    let starts = ["<cls>", "<pad>", "<eos>", "<unk>"].map(str::to_owned);
    let ends = ["<null_1>", "<mask>"].map(str::to_owned);
    starts.into_iter().chain(letters).chain(ends).map(|name| name + "\n").collect()
}

/// A line of a `vocab.txt` that differs from [`vocabulary`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabularyDifference {
    /// Line number, counted from 1.
    pub line: usize,
    /// Token of [`vocabulary`] on this line; `None` after its last line.
    pub expected: Option<String>,
    /// Token of the file on this line; `None` after its last line.
    pub found: Option<String>,
}

/// Returns the first line in which `text`, the content of a `vocab.txt`, differs from [`vocabulary`]; `None` if they
/// agree. Leading and trailing whitespace of each line and empty lines at the end are ignored, as in the reference
/// tokenizer.
pub fn vocabulary_difference(text: &str) -> Option<VocabularyDifference> {
    let known = vocabulary();
    let mut expected = known.lines();
    let mut found = text.trim_end().lines().map(str::trim);
    for line in 1.. {
        match (expected.next(), found.next()) {
            (None, None) => break,
            (expected, found) if expected == found => {}
            (expected, found) => {
                let expected = expected.map(str::to_owned);
                let found = found.map(str::to_owned);
                return Some(VocabularyDifference { line, expected, found });
            }
        }
    }
    None
}

/// Returns `protein` without one `*` at its end, which in protein files marks the stop codon.
pub fn residues(protein: &[u8]) -> &[u8] {
    protein.strip_suffix(b"*").unwrap_or(protein)
}

/// Returns the number of characters of `protein` that [`encode`] encodes as [`UNK`].
pub fn count_unknown(protein: &[u8]) -> usize {
    // Continuation bytes of UTF-8 belong to the character before them.
    let heads = residues(protein).iter().filter(|&&b| b & 0xc0 != 0x80);
    heads.filter(|&&b| i32::from(TOKEN[usize::from(b)]) == UNK).count()
}

/// Appends the token ids of `protein` to `tokens`, including [`CLS`] and [`EOS`], and returns the number of [`UNK`]
/// among them. One `*` at the end is removed first (see [`residues`]); a `*` elsewhere is unknown, and so is each
/// multibyte UTF-8 character, as one token.
pub fn encode(protein: &[u8], tokens: &mut Vec<i32>) -> usize {
    let protein = residues(protein);
    tokens.reserve(protein.len() + 2);
    tokens.push(CLS);
    let before = tokens.len();
    if protein.is_ascii() {
        tokens.extend(protein.iter().map(|&b| i32::from(TOKEN[usize::from(b)])));
    } else {
        // Continuation bytes of UTF-8 have the form 10xxxxxx; every other byte starts a character.
        let heads = protein.iter().filter(|&&b| b & 0xc0 != 0x80);
        tokens.extend(heads.map(|&b| i32::from(TOKEN[usize::from(b)])));
    }
    let unknown = tokens[before..].iter().filter(|&&t| t == UNK).count();
    tokens.push(EOS);
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(protein: &str, expected: &[i32], unknown: usize) {
        let mut tokens = vec![99];
        assert_eq!(encode(protein.as_bytes(), &mut tokens), unknown, "{protein}");
        assert_eq!(tokens[1..], *expected, "{protein}");
        assert_eq!(count_unknown(protein.as_bytes()), unknown, "{protein}");
    }

    #[test]
    fn proteins() {
        check("", &[0, 2], 0);
        check("RGSYQVN", &[0, 10, 6, 8, 19, 16, 7, 17, 2], 0);
        check("LAGVSERTIDPKQNFYMHWCXBUZO.-", &with_ends(4..31), 0);
        check("lagv", &[0, 4, 5, 6, 7, 2], 0);
    }

    #[test]
    fn unknown_characters_are_one_token_each() {
        check("AJJA", &[0, 5, 3, 3, 5, 2], 2);
        check("A*A", &[0, 5, 3, 5, 2], 1);
        check("A\u{e9}A", &[0, 5, 3, 5, 2], 1);
        check("<mask>", &[0, 3, 20, 5, 8, 15, 3, 2], 2);
    }

    #[test]
    fn a_final_stop_is_no_residue() {
        check("MA*", &[0, 20, 5, 2], 0);
        check("MA**", &[0, 20, 5, 3, 2], 1);
        check("*", &[0, 2], 0);
    }

    fn with_ends(letters: std::ops::Range<i32>) -> Vec<i32> {
        std::iter::once(CLS).chain(letters).chain([EOS]).collect()
    }

    #[test]
    fn a_vocabulary_that_differs_is_told_by_line() {
        let known = vocabulary();
        assert_eq!(vocabulary_difference(&known), None);
        assert_eq!(vocabulary_difference(&known.replace('\n', "\r\n")), None);
        assert_eq!(vocabulary_difference(known.trim_end()), None);
        let check = |text: &str, line, expected: Option<&str>, found: Option<&str>| {
            let wanted = VocabularyDifference {
                line,
                expected: expected.map(str::to_owned),
                found: found.map(str::to_owned),
            };
            assert_eq!(vocabulary_difference(text), Some(wanted), "{text:?}");
        };
        check(&known.replace("L\nA\n", "A\nL\n"), 5, Some("L"), Some("A"));
        check(&known.replace("<mask>\n", ""), 33, Some("<mask>"), None);
        check(&format!("{known}<more>\n"), 34, None, Some("<more>"));
        check("", 1, Some("<cls>"), None);
    }
}
