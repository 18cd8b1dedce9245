//! Shuffling that keeps dinucleotides. Invariant: a shuffled sequence has the first letter, the last letter and the
//! exact count of every pair of neighbours of the original.
//!
//! Source: Altschul and Erickson 1985: the pairs are the edges of a multigraph of letters, and a sequence with the same
//! pairs is an Eulerian path. The last edge out of each letter must form a tree towards the last letter; the order of the
//! other edges is free. The tree is drawn uniformly by Wilson's algorithm (1996), which, unlike redrawing until a tree
//! is found, is fast for repetitive sequences.

use super::super::random::RandomKey;
use super::packed;
use crate::bases;

/// Letters: the four bases and N.
const LETTERS: usize = 5;

/// Buffer of the shuffling, reused for all sequences.
#[derive(Debug, Default)]
pub(super) struct Shuffler {
    /// Code of the second letter of each pair, grouped by the first letter.
    edges: Vec<u8>,
}

impl Shuffler {
    /// A buffer that is large enough for sequences of `longest` letters.
    pub(super) fn with_capacity(longest: usize) -> Self {
        Shuffler { edges: Vec::with_capacity(longest) }
    }

    /// Shuffles a sequence of the letters A, C, G, T and N.
    pub(super) fn shuffle(&mut self, letters: &mut [u8], key: RandomKey) {
        let (Some(&first), Some(&last)) = (letters.first(), letters.last()) else { return };
        let mut counts = [0; LETTERS];
        letters[..letters.len() - 1].iter().for_each(|&letter| counts[letter_index(letter)] += 1);
        let mut starts = [0; LETTERS];
        (1..LETTERS).for_each(|at| starts[at] = starts[at - 1] + counts[at - 1]);
        self.edges.clear();
        self.edges.resize(letters.len() - 1, 0);
        let mut next = starts;
        for pair in letters.windows(2) {
            let from = &mut next[letter_index(pair[0])];
            self.edges[*from] = bases::code(pair[1]);
            *from += 1;
        }
        let exits = self.exits(letter_index(last), &starts, &counts, key);
        for at in 0..LETTERS {
            let edges = &mut self.edges[starts[at]..starts[at] + counts[at]];
            // The edges are shuffled up to the exit, which comes last. The last letter of the sequence has no exit.
            let free = match exits[at] {
                Some(exit) => {
                    edges.swap(exit, counts[at] - 1);
                    counts[at] - 1
                }
                None => counts[at],
            };
            key.with(at as u64).shuffle(&mut edges[..free]);
        }
        let mut next = starts;
        let mut at = letter_index(first);
        for letter in &mut letters[1..] {
            let to = self.edges[next[at]];
            next[at] += 1;
            *letter = if to < 4 { packed::letter(to) } else { b'N' };
            at = usize::from(to);
        }
    }

    /// The last edge out of each letter, as an index into its edges: a uniform random tree towards `root`. `None` for the
    /// root and for letters without edges.
    fn exits(
        &self,
        root: usize,
        starts: &[usize; LETTERS],
        counts: &[usize; LETTERS],
        key: RandomKey,
    ) -> [Option<usize>; LETTERS] {
        let mut exits = [0; LETTERS];
        let mut draws = 0;
        let mut in_tree = [false; LETTERS];
        in_tree[root] = true;
        for from in (0..LETTERS).filter(|&at| counts[at] > 0) {
            // A random walk to the tree. Overwriting the exit of a letter at every visit erases the loops of the walk.
            let mut at = from;
            while !in_tree[at] {
                exits[at] = key.with(LETTERS as u64).with(draws).below(counts[at]);
                draws += 1;
                at = usize::from(self.edges[starts[at] + exits[at]]);
            }
            at = from;
            while !in_tree[at] {
                in_tree[at] = true;
                at = usize::from(self.edges[starts[at] + exits[at]]);
            }
        }
        std::array::from_fn(|at| (at != root && counts[at] > 0).then_some(exits[at]))
    }
}

/// Index of a letter in arrays of [`LETTERS`] elements.
fn letter_index(letter: u8) -> usize {
    usize::from(bases::code(letter))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn shuffled(letters: &[u8], key: RandomKey) -> Vec<u8> {
        let mut letters = letters.to_vec();
        Shuffler::default().shuffle(&mut letters, key);
        letters
    }

    fn pairs(letters: &[u8]) -> HashMap<[u8; 2], usize> {
        let mut pairs = HashMap::new();
        letters.windows(2).for_each(|pair| *pairs.entry([pair[0], pair[1]]).or_default() += 1);
        pairs
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

        #[test]
        fn pairs_are_kept(
            letters in prop::collection::vec(prop::sample::select(b"ACGTNAAAA".to_vec()), 0..300),
            seed in 0_u64..1000,
        ) {
            let other = shuffled(&letters, RandomKey::new(seed));
            prop_assert_eq!(pairs(&other), pairs(&letters));
            prop_assert_eq!((other.first(), other.last()), (letters.first(), letters.last()));
        }
    }

    /// Every sequence with the pairs of a short sequence is drawn equally often.
    #[test]
    fn all_sequences_are_equally_frequent() {
        let letters = b"ACAGATCAGTA";
        let mut all: Vec<Vec<u8>> = vec![vec![letters[0]]];
        for _ in 1..letters.len() {
            let longer = |s: &Vec<u8>| b"ACGT".map(|letter| [s.as_slice(), &[letter]].concat());
            all = all.iter().flat_map(longer).collect();
            let allowed = pairs(letters);
            all.retain(|s| pairs(s).iter().all(|(pair, n)| allowed.get(pair).is_some_and(|most| n <= most)));
        }
        assert!(all.len() > 10, "{}", all.len());
        // Sequences with repeated pairs come from several orders of equal edges, equally many for each sequence.
        let draws = 2000 * all.len();
        let mut counts: HashMap<Vec<u8>, u32> = HashMap::new();
        (0..draws)
            .for_each(|i| *counts.entry(shuffled(letters, RandomKey::new(9).with(i as u64))).or_default() += 1);
        assert_eq!(counts.len(), all.len());
        let chi_square: f64 = counts.values().map(|&n| (f64::from(n) - 2000.0).powi(2) / 2000.0).sum();
        // Mean and four standard deviations of the chi-square distribution.
        let freedom = all.len() as f64 - 1.0;
        assert!(chi_square < freedom + 4.0 * (2.0 * freedom).sqrt(), "{chi_square} for {freedom}");
    }

    #[test]
    fn repetitive_sequences_are_quick() {
        let letters = [vec![b'A'; 20_000], b"C".to_vec()].concat();
        assert_eq!(shuffled(&letters, RandomKey::new(1)), letters);
    }
}
