//! Token masking for masked language modelling: selects the tokens to predict and their replacements. Invariant: the
//! random draw for a token depends only on the key of its document and its index in it, not on packing; special
//! tokens are never selected, and at least one token is selected in every piece that has an ordinary token.
//!
//! Source: Devlin et al. 2019, section 3.1: 15 % of the tokens are selected; of these 80 % become the mask token, 10 %
//! a random token and 10 % stay unchanged. ESM-2 uses these rates too. Random tokens are drawn from the ordinary ones.

use super::pieces::IGNORED;
use super::random::RandomKey;
use super::settings::MaskRates;

/// Parameters of masking.
pub(super) struct TokenMasking<'a> {
    pub rates: MaskRates,
    /// The mask token.
    pub mask: i32,
    /// Ids of the ordinary (not special) tokens, ascending: the tokens that may be selected, and from which random
    /// replacements are drawn.
    pub ordinary: &'a [i32],
}

impl TokenMasking<'_> {
    /// Masks `tokens`, the part of a document that starts at its token `from`: appends the masked ids to `ids` and
    /// the targets (-100 where nothing is predicted) to `targets`. Returns the number of selected tokens, which is 0
    /// if and only if all of `tokens` are special.
    pub(super) fn push(
        &self,
        tokens: &[i32],
        from: usize,
        document: RandomKey,
        ids: &mut Vec<i32>,
        targets: &mut Vec<i32>,
    ) -> u64 {
        let key = |at: usize| document.with((from + at) as u64);
        let drawn = |at: usize| key(at).unit() < self.rates.select && self.is_ordinary(tokens[at]);
        // A short piece may draw no token; the ordinary token with the smallest draw is then selected instead.
        let stands_in = if (0..tokens.len()).any(drawn) {
            None
        } else {
            (0..tokens.len())
                .filter(|&at| self.is_ordinary(tokens[at]))
                .min_by(|&a, &b| key(a).unit().total_cmp(&key(b).unit()))
        };
        let mut chosen = 0;
        // The replacement has a key of its own (`with(1)`), since `key(at)` is already conditioned on the selection.
        for (at, &token) in tokens.iter().enumerate() {
            let chooses = drawn(at) || stands_in == Some(at);
            chosen += u64::from(chooses);
            ids.push(if chooses { self.replacement(token, key(at).with(1)) } else { token });
            targets.push(if chooses { token } else { IGNORED });
        }
        chosen
    }

    /// Whether a token may be selected.
    fn is_ordinary(&self, token: i32) -> bool {
        self.ordinary.binary_search(&token).is_ok()
    }

    /// The id that the model sees at a selected token: the mask token, a random ordinary token, or the token itself.
    fn replacement(&self, token: i32, key: RandomKey) -> i32 {
        let MaskRates { mask, random, .. } = self.rates;
        match key.unit() {
            x if x < mask => self.mask,
            x if x < mask + random => self.ordinary[key.with(1).below(self.ordinary.len())],
            _ => token,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASK: i32 = 99;

    fn masked(tokens: &[i32], from: usize, key: RandomKey) -> (Vec<i32>, Vec<i32>) {
        let ordinary: Vec<i32> = (10..MASK).chain(100..200).collect();
        let masking = TokenMasking { rates: MaskRates::BERT, mask: MASK, ordinary: &ordinary };
        let mut ids = Vec::new();
        let mut targets = Vec::new();
        let chosen = masking.push(tokens, from, key, &mut ids, &mut targets);
        assert_eq!(chosen as usize, targets.iter().filter(|&&t| t != IGNORED).count());
        (ids, targets)
    }

    #[test]
    fn the_rates_are_berts() {
        let tokens = vec![50; 100_000];
        let (ids, targets) = masked(&tokens, 0, RandomKey::new(1));
        let count = |wanted: fn(i32) -> bool| {
            ids.iter().zip(&targets).filter(|&(&id, &target)| target == 50 && wanted(id)).count()
        };
        let mask = count(|id| id == MASK);
        let random = count(|id| id != MASK && id != 50);
        let same = count(|id| id == 50);
        assert!((11_600..12_400).contains(&mask), "{mask}");
        assert!((1_350..1_650).contains(&random), "{random}");
        assert!((1_350..1_650).contains(&same), "{same}");
        assert!(ids.iter().zip(&targets).all(|(&id, &target)| target == 50 || id == 50));
    }

    #[test]
    fn pieces_are_masked_as_the_whole() {
        let tokens: Vec<i32> = (100..200).collect();
        let (ids, targets) = masked(&tokens, 0, RandomKey::new(5));
        let first = masked(&tokens[..40], 0, RandomKey::new(5));
        let second = masked(&tokens[40..], 40, RandomKey::new(5));
        assert_eq!(ids, [first.0, second.0].concat());
        assert_eq!(targets, [first.1, second.1].concat());
        assert_ne!(ids, masked(&tokens, 0, RandomKey::new(6)).0);
    }

    #[test]
    fn every_piece_has_a_target() {
        for seed in 0..100 {
            let (_, targets) = masked(&[3, 17, 4], 3, RandomKey::new(seed));
            assert_eq!(targets, [IGNORED, 17, IGNORED]);
        }
        // Nothing but special tokens.
        assert_eq!(masked(&[3, 4], 0, RandomKey::new(1)), (vec![3, 4], vec![IGNORED; 2]));
    }
}
