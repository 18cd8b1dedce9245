//! Masking of spans of bases: selects the codons to predict and what the model sees of them. Invariant: a base that is masked
//! or replaced is so in every codon of all six frames that contains it; what is drawn depends on the key of the crop alone;
//! a codon is selected if and only if it is known and contains a base of a span, and at least one is selected in every crop
//! with a known codon.
//!
//! The bases of a span are masked, replaced by random bases, or left as they are, with the rates of masked tokens (Devlin et al.
//! 2019, section 3.1; spans as in Joshi et al. 2020). The targets are codons, as with masked tokens: the model has one
//! prediction for a token, and a codon with a masked base can be predicted only from its neighbours in its frame.

use super::super::pieces::IGNORED;
use std::ops::Range;

use super::super::random::RandomKey;
use super::super::settings::MaskRates;
use super::packed::letter;
use super::settings::CropTokenizer;
use crate::bases;

/// Masks crops in reusable buffers.
#[derive(Debug)]
pub(super) struct BaseMasker {
    /// Probability that a span begins at a base.
    start: f64,
    rates: MaskRates,
    /// Bases of a span.
    span: usize,
    /// Letters that the model sees, with [`HIDDEN`] for masked bases.
    seen: Vec<u8>,
    /// Letters with [`HIDDEN`] for all bases of spans.
    outside: Vec<u8>,
    /// Tokens of `outside`.
    tokens: Vec<i32>,
}

/// A letter that is no base, so that its codons are unknown.
const HIDDEN: u8 = b'N';

/// Bases of a codon.
const CODON: usize = 3;

impl BaseMasker {
    /// Buffers for crops of at most `longest` bases.
    pub(super) fn new(tokens: CropTokenizer, rates: MaskRates, span: usize, longest: usize) -> Self {
        // A codon is selected unless no span begins at one of the span + 2 positions from which a span reaches it.
        let positions = (span + CODON - 1) as f64;
        Self {
            start: 1.0 - (1.0 - rates.select).powf(1.0 / positions),
            rates,
            span,
            seen: Vec::with_capacity(longest),
            outside: Vec::with_capacity(longest),
            tokens: Vec::with_capacity(tokens.tokens_of(longest)),
        }
    }

    /// Bytes of the buffers for crops of at most `longest` bases.
    pub(super) fn bytes(tokens: CropTokenizer, longest: usize) -> usize {
        2 * longest + tokens.tokens_of(longest) * size_of::<i32>()
    }

    /// Range of the bases that a span covers. Starts count from the first span that reaches base 0, which begins `span - 1`
    /// bases before it.
    fn reached(&self, start: usize, bases: usize) -> Range<usize> {
        (start + 1).saturating_sub(self.span)..(start + 1).min(bases)
    }

    /// Whether a span touches a codon without unknown letters.
    fn selects(&self, start: usize, letters: &[u8]) -> bool {
        let span = self.reached(start, letters.len());
        let first = span.start.saturating_sub(CODON - 1);
        letters[first..(span.end + CODON - 1).min(letters.len())]
            .windows(CODON)
            .any(|codon| codon.iter().all(|&letter| bases::code(letter) != bases::OTHER))
    }

    /// Masks a crop: appends the ids that the model sees to `ids` and the targets (-100 where nothing is predicted) to
    /// `targets`. Returns the number of targets.
    pub(super) fn push(
        &mut self,
        tokenizer: CropTokenizer,
        letters: &[u8],
        key: RandomKey,
        ids: &mut Vec<i32>,
        targets: &mut Vec<i32>,
    ) -> u64 {
        for buffer in [&mut self.seen, &mut self.outside] {
            buffer.clear();
            buffer.extend_from_slice(letters);
        }
        // Spans that begin before the first base reach it too; otherwise codons at the ends were selected less often.
        let starts = 0..letters.len() + self.span - 1;
        let drawn = |start: usize| key.with(start as u64).unit() < self.start;
        // A short crop may draw no span, or only spans without a known codon; the span with a known codon and the smallest
        // draw is then added.
        let stands_in = if starts.clone().any(|start| drawn(start) && self.selects(start, letters)) {
            None
        } else {
            starts
                .clone()
                .filter(|&start| self.selects(start, letters))
                .min_by(|&a, &b| key.with(a as u64).unit().total_cmp(&key.with(b as u64).unit()))
        };
        let MaskRates { mask, random, .. } = self.rates;
        for start in starts.filter(|&start| drawn(start) || stands_in == Some(start)) {
            // A key of its own, since that of the start is conditioned on the draw.
            let key = key.with(start as u64).with(1);
            let kind = key.unit();
            for base in self.reached(start, letters.len()) {
                self.outside[base] = HIDDEN;
                if kind < mask {
                    self.seen[base] = HIDDEN;
                } else if kind < mask + random && bases::code(self.seen[base]) != bases::OTHER {
                    // Neither a masked base nor an unknown one becomes known.
                    self.seen[base] = letter(key.with(base as u64).below(4) as u8);
                }
            }
        }
        // `seen`, `letters` and `outside` have the same length, so token i of each stands for the same codon. A codon
        // is selected if it is known in `letters` and unknown in `outside`. If it is unknown in `seen` too, a base of
        // it is masked: the mask token then tells it from the codons with letters that are unknown in the record.
        let first = ids.len();
        tokenizer.encode(&self.seen, ids);
        tokenizer.encode(letters, targets);
        self.tokens.clear();
        tokenizer.encode(&self.outside, &mut self.tokens);
        let unknown = tokenizer.unknown();
        let mask = tokenizer.mask();
        let mut chosen = 0;
        let crop = targets.len() - self.tokens.len();
        for ((id, target), &outside) in ids[first..].iter_mut().zip(&mut targets[crop..]).zip(&self.tokens) {
            if *target == unknown || outside != unknown {
                *target = IGNORED;
                continue;
            }
            chosen += 1;
            if *id == unknown {
                *id = mask;
            }
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codons;
    use proptest::prelude::*;

    const CODONS: CropTokenizer = CropTokenizer::Codons;

    fn masked(letters: &[u8], rates: MaskRates, span: usize, seed: u64) -> (Vec<i32>, Vec<i32>, u64) {
        let mut masker = BaseMasker::new(CODONS, rates, span, letters.len());
        let mut ids = vec![7];
        let mut targets = vec![8];
        let chosen = masker.push(CODONS, letters, RandomKey::new(seed), &mut ids, &mut targets);
        assert_eq!((ids.remove(0), targets.remove(0)), (7, 8));
        (ids, targets, chosen)
    }

    /// First base, on the forward strand, of the codon of each token of a crop of `n` bases.
    fn places(n: usize) -> Vec<usize> {
        let m = codons::frame_of(n);
        let forward = (0..3).flat_map(|k| (0..m).map(move |j| k + 3 * j));
        let reverse = (0..3).flat_map(|k| (0..m).map(move |j| n - 3 - k - 3 * j));
        forward.chain(reverse).collect()
    }

    fn letters(n: usize, seed: u64) -> Vec<u8> {
        (0..n).map(|i| letter(RandomKey::new(seed).with(i as u64).below(4) as u8)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

        /// If spans are only masked, never replaced or kept, a known codon is masked in each of the six frames if and only
        /// if it contains a base that no visible codon of any frame shows.
        #[test]
        fn a_masked_base_is_hidden_in_every_frame(
            letters in prop::collection::vec(prop::sample::select(b"ACGTN".to_vec()), 5..60),
            span in 1_usize..8,
            seed in 0_u64..1000,
        ) {
            let rates = MaskRates { select: 0.2, mask: 1.0, random: 0.0 };
            let (ids, targets, chosen) = masked(&letters, rates, span, seed);
            let mut original = vec![];
            let places = places(letters.len());
            codons::encode(&letters, &mut original);
            let mut shown = vec![false; letters.len()];
            for (&id, &place) in ids.iter().zip(&places) {
                shown[place..place + 3].iter_mut().for_each(|base| *base |= id < codons::UNKNOWN);
            }
            for (at, &place) in places.iter().enumerate() {
                let hidden = shown[place..place + 3].iter().any(|shown| !shown);
                if original[at] == codons::UNKNOWN {
                    prop_assert_eq!((ids[at], targets[at]), (codons::UNKNOWN, IGNORED));
                } else if ids[at] == codons::MASK {
                    prop_assert_eq!(targets[at], original[at]);
                    prop_assert!(hidden);
                } else {
                    prop_assert_eq!((ids[at], targets[at]), (original[at], IGNORED));
                    prop_assert!(!hidden);
                }
            }
            prop_assert_eq!(chosen as usize, targets.iter().filter(|&&target| target != IGNORED).count());
            prop_assert_eq!(chosen > 0, original.iter().any(|&token| token != codons::UNKNOWN));
        }
    }

    /// The share of targets, also of those at the ends, and the shares of what the model sees of them.
    #[test]
    fn the_rates_are_those_of_tokens() {
        let n = 3002;
        let rates = MaskRates { select: 0.15, mask: 0.8, random: 0.1 };
        for span in [1, 3, 10] {
            let mut all = 0;
            let mut selected = 0;
            let mut hidden = 0;
            let mut changed = 0;
            let mut ends = 0;
            let mut of_ends = 0;
            for seed in 0..100 {
                let letters = letters(n, seed);
                let (ids, targets, _) = masked(&letters, rates, span, seed);
                for ((&id, &target), place) in ids.iter().zip(&targets).zip(places(n)) {
                    all += 1;
                    selected += usize::from(target != IGNORED);
                    hidden += usize::from(id == codons::MASK);
                    changed += usize::from(id != codons::MASK && target != IGNORED && id != target);
                    let at_end = place == 0 || place == n - 3;
                    ends += usize::from(at_end);
                    of_ends += usize::from(at_end && target != IGNORED);
                }
            }
            let share = |part: usize, of: usize| part as f64 / of as f64;
            assert!((share(selected, all) - 0.15).abs() < 0.005, "{span}: {}", share(selected, all));
            assert!((share(of_ends, ends) - 0.15).abs() < 0.08, "{span}: {} at the ends", share(of_ends, ends));
            // Where spans overlap, one that masks prevails.
            let hidden = share(hidden, selected);
            let changed = share(changed, selected);
            assert!((0.79..0.83).contains(&hidden), "{span}: {hidden} hidden");
            assert!((0.06..0.11).contains(&changed), "{span}: {changed} changed");
        }
    }

    /// A replaced base is the same in all frames: both strands of what the model sees are one sequence.
    #[test]
    fn random_bases_are_a_sequence() {
        let rates = MaskRates { select: 0.5, mask: 0.0, random: 1.0 };
        let original = letters(62, 3);
        let (ids, _, _) = masked(&original, rates, 2, 5);
        let mut seen = vec![0; 62];
        for (&id, place) in ids[..60].iter().zip(places(62)) {
            for (i, shift) in [4, 2, 0].into_iter().enumerate() {
                seen[place + i] = letter((id >> shift & 3) as u8);
            }
        }
        let mut again = vec![];
        codons::encode(&seen, &mut again);
        assert_eq!(again, ids);
        assert_ne!(seen, original);
    }

    #[test]
    fn every_crop_with_a_known_codon_has_a_target() {
        let rates = MaskRates { select: 1e-9, mask: 0.8, random: 0.1 };
        for seed in 0..100 {
            let (_, targets, chosen) = masked(b"NNACGNN", rates, 1, seed);
            // One codon is known, in a forward and in a reverse frame.
            assert_eq!((chosen, targets.iter().filter(|&&t| t != IGNORED).count()), (2, 2), "{targets:?}");
        }
        assert_eq!(masked(b"ACNACNAC", rates, 4, 1).2, 0);
    }
}
