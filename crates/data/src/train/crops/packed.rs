//! Sequences in two bits a base. Invariant: unpacking gives the packed letters in upper case with T for U and N for every
//! letter that is no base.

use crate::bases::code;
use std::ops::Range;

/// Letters of the four codes.
const LETTERS: [u8; 4] = *b"ACGT";

/// The four letters of each byte of codes; the first base has the lowest bits.
const UNPACKED: [[u8; 4]; 256] = {
    let mut table = [[0; 4]; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut base = 0;
        while base < 4 {
            table[byte][base] = LETTERS[byte >> (2 * base) & 3];
            base += 1;
        }
        byte += 1;
    }
    table
};

/// The base with a code below 4.
pub(super) fn letter(code: u8) -> u8 {
    LETTERS[usize::from(code & 3)]
}

/// Replaces unpacked letters by their reverse complement; N stays N.
pub(super) fn reverse_complement(letters: &mut [u8]) {
    const COMPLEMENTS: [u8; 5] = *b"TGCAN";
    letters.reverse();
    for letter in letters {
        *letter = COMPLEMENTS[usize::from(code(*letter))];
    }
}

/// A packed sequence.
#[derive(Debug)]
pub(super) struct Packed {
    /// Four codes a byte.
    codes: Box<[u8]>,
    len: usize,
    /// Runs of letters that are no base, ascending and disjoint; their codes are 0.
    unknown: Box<[Range<usize>]>,
}

impl Packed {
    pub(super) fn new(letters: &[u8]) -> Self {
        let mut codes = vec![0; letters.len().div_ceil(4)].into_boxed_slice();
        // Counted first, so that the list is allocated once with its final size.
        let starts = (0..letters.len())
            .filter(|&at| code(letters[at]) == 4 && (at == 0 || code(letters[at - 1]) != 4))
            .count();
        let mut unknown: Vec<Range<usize>> = Vec::with_capacity(starts);
        for (at, &letter) in letters.iter().enumerate() {
            match (code(letter), unknown.last_mut()) {
                (4, Some(run)) if run.end == at => run.end = at + 1,
                (4, _) => unknown.push(at..at + 1),
                (base, _) => codes[at / 4] |= base << (2 * (at % 4)),
            }
        }
        Packed { codes, len: letters.len(), unknown: unknown.into_boxed_slice() }
    }

    /// Number of letters.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Number of letters that are no base.
    pub(super) fn unknown(&self) -> usize {
        self.unknown.iter().map(ExactSizeIterator::len).sum()
    }

    /// Heap bytes, with an allowance for the allocator's headers of two allocations.
    pub(super) fn bytes(&self) -> usize {
        self.codes.len() + self.unknown.len() * size_of::<Range<usize>>() + 32
    }

    /// Passes everything that defines the sequence to a hash.
    pub(super) fn hash(&self, mut update: impl FnMut(&[u8])) {
        update(&(self.len as u64).to_le_bytes());
        update(&self.codes);
        for run in &self.unknown {
            update(&(run.start as u64).to_le_bytes());
            update(&(run.end as u64).to_le_bytes());
        }
    }

    /// Replaces `out` by the letters of a range, which must lie within the sequence. `out` needs a capacity of six more
    /// letters than the range.
    pub(super) fn unpack(&self, range: Range<usize>, out: &mut Vec<u8>) {
        out.clear();
        // Whole bytes are unpacked, with up to three letters before the range and three after it: hence the six letters
        // of capacity, without which a buffer of the exact size would be reallocated.
        let codes = &self.codes[range.start / 4..range.end.div_ceil(4)];
        out.resize(4 * codes.len(), 0);
        for (letters, &byte) in out.as_chunks_mut().0.iter_mut().zip(codes) {
            *letters = UNPACKED[usize::from(byte)];
        }
        out.drain(..range.start % 4);
        out.truncate(range.len());
        let first = self.unknown.partition_point(|run| run.end <= range.start);
        for run in self.unknown[first..].iter().take_while(|run| run.start < range.end) {
            let start = run.start.max(range.start);
            let end = run.end.min(range.end);
            out[start - range.start..end - range.start].fill(b'N');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..Default::default() })]

        #[test]
        fn every_range_is_unpacked_as_packed(
            letters in prop::collection::vec(prop::sample::select(b"ACGTacgtUuNNNnRy-".to_vec()), 0..50),
        ) {
            let packed = Packed::new(&letters);
            let expected: Vec<u8> = letters
                .iter()
                .map(|letter| match letter.to_ascii_uppercase() {
                    b'U' => b'T',
                    base @ (b'A' | b'C' | b'G' | b'T') => base,
                    _ => b'N',
                })
                .collect();
            prop_assert_eq!(packed.len(), letters.len());
            prop_assert_eq!(packed.unknown(), expected.iter().filter(|&&letter| letter == b'N').count());
            let mut out = Vec::new();
            for start in 0..=letters.len() {
                for end in start..=letters.len() {
                    packed.unpack(start..end, &mut out);
                    prop_assert_eq!(&out, &expected[start..end]);
                }
            }
        }
    }

    #[test]
    fn two_bits_a_base() {
        let packed = Packed::new(&b"ACGT".repeat(1000));
        assert_eq!(packed.bytes(), 1000 + 32);
        let mut letters = b"AACGTN".to_vec();
        reverse_complement(&mut letters);
        assert_eq!(letters, b"NACGTT");
    }
}
