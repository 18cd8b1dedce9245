//! Codons of a window in six reading frames, the tokens of a caller. Invariant: all six frames have equally many codons.
//!
//! Frames +1, +2 and +3 begin with the first, second and third base; frames -1, -2 and -3 are those of the reverse
//! complement. The codon of the bases b0, b1, b2 with A, C, G, T (or U) as 0, 1, 2, 3 has the id 16 b0 + 4 b1 + b2.

/// Token of a codon with an unknown letter.
const UNKNOWN: i32 = 64;

/// Number of tokens of a window of `bases` bases.
pub(crate) fn tokens_of(bases: usize) -> usize {
    6 * (bases.saturating_sub(2) / 3)
}

/// Appends the tokens of a window: the frames +1, +2, +3, -1, -2, -3.
pub(crate) fn encode(window: &[u8], tokens: &mut Vec<i32>) {
    let codons = tokens_of(window.len()) / 6;
    tokens.reserve(6 * codons);
    let last = window.len().saturating_sub(1);
    for frame in 0..3 {
        tokens.extend((0..codons).map(|codon| {
            let at = frame + 3 * codon;
            codon_id([window[at], window[at + 1], window[at + 2]].map(code))
        }));
    }
    for frame in 0..3 {
        tokens.extend((0..codons).map(|codon| {
            let at = last - frame - 3 * codon;
            codon_id(
                [window[at], window[at - 1], window[at - 2]].map(|letter| code(letter).map(|base| 3 - base)),
            )
        }));
    }
}

fn codon_id(bases: [Option<i32>; 3]) -> i32 {
    match bases {
        [Some(a), Some(b), Some(c)] => 16 * a + 4 * b + c,
        _ => UNKNOWN,
    }
}

fn code(letter: u8) -> Option<i32> {
    match letter {
        b'A' | b'a' => Some(0),
        b'C' | b'c' => Some(1),
        b'G' | b'g' => Some(2),
        b'T' | b't' | b'U' | b'u' => Some(3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_read_in_six_frames() {
        let mut tokens = vec![];
        encode(b"ACGTANGu", &mut tokens);
        // ACG TAN | CGT ANG | GTA NGu; reverse complement ACNTACGT: ACN TAC | CNT ACG | NTA CGT.
        assert_eq!(tokens, [6, 64, 27, 64, 44, 64, 64, 49, 64, 6, 64, 27]);
        for bases in 0..40 {
            let mut tokens = vec![];
            encode(&b"ACGTACGTACGTACGTACGTACGTACGTACGTACGTACGTA"[..bases], &mut tokens);
            assert_eq!(tokens.len(), tokens_of(bases), "{bases}");
        }
    }
}
