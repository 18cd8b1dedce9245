//! Codon tokens in six reading frames, the input of a caller. Invariant: all six frames of a sequence have
//! the same number of tokens, and the tokens of a reverse complement are those of the sequence with the frames +k and
//! -k exchanged.
//!
//! A sequence of n bases has frames of (n - 2) / 3 codons (integer division). The frames follow one another in the
//! order +1, +2, +3, -1, -2, -3. Frame +k begins k - 1 bases after the first base; frame -k is frame +k of the reverse
//! complement. A codon b0 b1 b2 has the id 16 b0 + 4 b1 + b2 with A, C, G, T = 0, 1, 2, 3; U is read as T, and case is
//! ignored.

use crate::bases;

/// Id of a codon with a letter other than A, C, G, T and U.
pub const UNKNOWN: i32 = 64;

/// Id of the mask token. [`encode`] never returns it.
pub const MASK: i32 = 65;

/// Number of ids: 64 codons, [`UNKNOWN`] and [`MASK`].
pub const VOCABULARY: usize = 66;

/// Number of reading frames.
pub const FRAMES: usize = 6;

/// Code of a letter that is no base. Shifted by 0, 2 or 4 bits it exceeds every codon, so one comparison of the sum
/// finds a codon with such a letter.
const OTHER: u16 = 64;

/// Code of each letter on the forward strand, and of its complement.
const CODES: [[u16; 2]; 256] = {
    let mut table = [[OTHER; 2]; 256];
    let mut letter = 0;
    while letter < table.len() {
        let code = bases::CODES[letter];
        if code != bases::OTHER {
            table[letter] = [code as u16, 3 - code as u16];
        }
        letter += 1;
    }
    table
};

/// Number of tokens of a sequence of `bases` bases; 0 for fewer than five bases.
pub fn tokens_of(bases: usize) -> usize {
    FRAMES * frame_of(bases)
}

/// Number of tokens of each of the six frames of a sequence of `bases` bases.
pub fn frame_of(bases: usize) -> usize {
    bases.saturating_sub(2) / 3
}

/// Appends the tokens of a sequence to `out`: [`tokens_of`]`(bases.len())` ids. Allocates only if `out` lacks the
/// capacity.
pub fn encode(bases: &[u8], out: &mut Vec<i32>) {
    let length = frame_of(bases.len());
    let start = out.len();
    out.resize(start + FRAMES * length, UNKNOWN);
    let (forward, reverse) = out[start..].split_at_mut(3 * length);
    strand(bases.iter().map(|&letter| CODES[usize::from(letter)][0]), forward);
    strand(bases.iter().rev().map(|&letter| CODES[usize::from(letter)][1]), reverse);
}

/// Appends the tokens of a sequence without its unknown codons, so that a model that attends to all codons of a frame, and
/// averages over them, gets no evidence from unknown letters. All frames have as many tokens as the frame with the fewest known
/// codons; further ones at the ends of the others are left out. Of a sequence of known letters these are the tokens of
/// [`encode`]. Returns the number of tokens of a frame.
pub fn encode_known(bases: &[u8], out: &mut Vec<i32>) -> usize {
    let start = out.len();
    encode(bases, out);
    let length = frame_of(bases.len());
    let tokens = &mut out[start..];
    // `max(1)`: chunks of 0 tokens are a panic, and a sequence without codons has no chunks.
    let fewest = tokens
        .chunks(length.max(1))
        .map(|frame| frame.iter().filter(|&&token| token != UNKNOWN).count())
        .min()
        .unwrap_or(0);
    if fewest == length {
        return length;
    }
    let mut to = 0;
    for frame in 0..FRAMES {
        let mut left = fewest;
        for from in frame * length..(frame + 1) * length {
            if left > 0 && tokens[from] != UNKNOWN {
                tokens[to] = tokens[from];
                to += 1;
                left -= 1;
            }
        }
    }
    out.truncate(start + to);
    fewest
}

/// Writes the three frames of a strand, given the codes of its bases in order.
fn strand(mut codes: impl Iterator<Item = u16>, out: &mut [i32]) {
    let (first, rest) = out.split_at_mut(out.len() / 3);
    let (second, third) = rest.split_at_mut(first.len());
    let mut next = || codes.next().unwrap_or(OTHER);
    let mut a = next();
    let mut b = next();
    for ((first, second), third) in first.iter_mut().zip(second).zip(third) {
        let c = next();
        let d = next();
        let e = next();
        *first = codon(a, b, c);
        *second = codon(b, c, d);
        *third = codon(c, d, e);
        (a, b) = (d, e);
    }
}

/// Id of the codon with these codes of bases.
fn codon(a: u16, b: u16, c: u16) -> i32 {
    // Only a sum with a term of OTHER, 4 * OTHER or 16 * OTHER reaches 64, which is UNKNOWN.
    i32::from(((a << 4) + (b << 2) + c).min(OTHER))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(bases: &[u8]) -> Vec<i32> {
        let mut out = Vec::new();
        encode(bases, &mut out);
        out
    }

    /// Complement by the definition of the IUPAC codes that the tests use.
    fn reverse_complement(bases: &[u8]) -> Vec<u8> {
        let complement = |&letter: &u8| match letter {
            b'A' => b'T',
            b'a' => b't',
            b'C' => b'G',
            b'c' => b'g',
            b'G' => b'C',
            b'g' => b'c',
            b'T' | b'U' => b'A',
            b't' | b'u' => b'a',
            other => other,
        };
        bases.iter().rev().map(complement).collect()
    }

    /// The tokens by definition: every frame of a strand codon by codon.
    fn by_definition(bases: &[u8]) -> Vec<i32> {
        let code = |letter: u8| b"ACGT".iter().position(|&base| base == letter);
        let upper = |bases: &[u8]| {
            let upper = bases.to_ascii_uppercase().into_iter();
            upper.map(|letter| if letter == b'U' { b'T' } else { letter }).collect::<Vec<_>>()
        };
        let strands = [upper(bases), upper(&reverse_complement(bases))];
        let length = if bases.len() < 2 { 0 } else { (bases.len() - 2) / 3 };
        let mut tokens = Vec::new();
        for strand in strands {
            for frame in 0..3 {
                for codon in strand[frame.min(strand.len())..].chunks_exact(3).take(length) {
                    let codes: Option<Vec<usize>> = codon.iter().map(|&letter| code(letter)).collect();
                    tokens.push(codes.map_or(UNKNOWN, |c| (16 * c[0] + 4 * c[1] + c[2]) as i32));
                }
            }
        }
        tokens
    }

    #[test]
    fn frames_follow_one_another() {
        // ACGTA: frames ACG CGT GTA, and TAC ACG CGT of the reverse complement TACGT.
        assert_eq!(encoded(b"ACGTA"), [6, 27, 44, 49, 6, 27]);
        assert_eq!(encoded(b"acgua"), encoded(b"ACGTA"));
        // A letter that is no base makes the three codons on each strand that contain it unknown.
        assert_eq!(encoded(b"ANGTATTT"), [64, 51, 64, 15, 44, 63, 0, 49, 3, 64, 12, 64]);
        for (bases, tokens) in [(0, 0), (2, 0), (4, 0), (5, 6), (7, 6), (8, 12), (500, 996)] {
            assert_eq!(tokens_of(bases), tokens);
            assert_eq!(encoded(&b"A".repeat(bases)).len(), tokens);
        }
    }

    /// (sequence, known codons of its frames): frames +1, +2, +3, -1, -2, -3, cut to the length of the shortest.
    const KNOWN: [(&str, [&str; 6]); 6] = [
        ("ACGTA", ["ACG", "CGT", "GTA", "TAC", "ACG", "CGT"]),
        ("ANGTATTT", ["TAT", "ATT", "GTA TTT", "AAA TAC", "AAT", "ATA"]),
        // Two unknown letters in a row are in one codon of some frames and in two of the others.
        ("ACGTTNNCAGGACT", ["ACG GGA", "CGT CAG GAC", "GTT AGG ACT", "AGT CCT AAC", "GTC CTG ACG", "TCC CGT"]),
        ("ACGNNNTTT", ["ACG", "", "", "", "", ""]),
        ("NANANANA", ["", "", "", "", "", ""]),
        ("AC", ["", "", "", "", "", ""]),
    ];

    #[test]
    fn unknown_codons_are_left_out() {
        for (sequence, frames) in KNOWN {
            let fewest = frames.iter().map(|frame| frame.split_whitespace().count()).min().unwrap_or(0);
            let codons = frames.iter().flat_map(|frame| frame.split_whitespace().take(fewest));
            let wanted: Vec<i32> = codons.map(|codon| encoded(format!("{codon}NN").as_bytes())[0]).collect();
            let mut out = vec![7];
            assert_eq!(encode_known(sequence.as_bytes(), &mut out), fewest, "{sequence}");
            assert_eq!(out, [&[7], &wanted[..]].concat(), "{sequence}");
        }
    }

    #[test]
    fn tokens_are_appended_within_the_capacity() {
        let bases = b"ACG".repeat(100);
        let mut out = Vec::with_capacity(1 + tokens_of(300));
        out.push(7);
        let counted = allocation_counter::measure(|| encode(&bases, &mut out));
        assert_eq!((counted.count_total, out[0], out.len()), (0, 7, 1 + tokens_of(300)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

        #[test]
        fn known_letters_keep_their_tokens_and_unknown_ones_have_none(
            bases in prop::collection::vec(prop::sample::select(b"ACGTUacgtuNnRx-".to_vec()), 0..60),
            known in prop::collection::vec(prop::sample::select(b"ACGTUacgtu".to_vec()), 0..60),
        ) {
            let mut out = Vec::new();
            let fewest = encode_known(&bases, &mut out);
            prop_assert_eq!(out.len(), FRAMES * fewest);
            prop_assert!(out.iter().all(|&token| token < UNKNOWN));
            out.clear();
            prop_assert_eq!(encode_known(&known, &mut out), frame_of(known.len()));
            prop_assert_eq!(out, encoded(&known));
        }

        #[test]
        fn the_reverse_complement_exchanges_the_strands(
            bases in prop::collection::vec(prop::sample::select(b"ACGTUacgtuNnRx-".to_vec()), 0..60),
        ) {
            let tokens = encoded(&bases);
            prop_assert_eq!(&tokens, &by_definition(&bases));
            let (forward, reverse) = tokens.split_at(tokens.len() / 2);
            prop_assert_eq!(encoded(&reverse_complement(&bases)), [reverse, forward].concat());
        }
    }
}
