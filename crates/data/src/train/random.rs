//! Counter-based random numbers: derived from a key instead of from generator state. Invariant: a number depends on
//! the seed and on the words of its key, never on earlier draws, so a stream can start at any position of the data.

/// Increment of SplitMix64: 2^64 divided by the golden ratio, made odd.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Key of a random number: a hash of the seed and of the words added by [`RandomKey::with`].
#[derive(Clone, Copy, Debug)]
pub(super) struct RandomKey(u64);

impl RandomKey {
    /// The key of a seed alone.
    pub(super) fn new(seed: u64) -> Self {
        RandomKey(mix(seed.wrapping_add(STEP)))
    }

    /// Derives a key by adding a word. The order of the words matters.
    pub(super) fn with(self, word: u64) -> Self {
        RandomKey(mix(self.0.wrapping_add(STEP) ^ mix(word.wrapping_add(STEP))))
    }

    /// Uniform number in [0, 1), in steps of 2^-53.
    pub(super) fn unit(self) -> f64 {
        // The upper 53 bits fit the significand of an f64 exactly, so rounding never yields 1.
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform integer in [0, `n`).
    pub(super) fn below(self, n: usize) -> usize {
        // Multiply and shift (Lemire 2019) without rejection: the bias, at most n / 2^64, is negligible here.
        ((u128::from(self.0) * n as u128) >> 64) as usize
    }

    /// Shuffles `items` uniformly (Fisher-Yates).
    pub(super) fn shuffle<T>(self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.with(last as u64).below(last + 1));
        }
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_evenly() {
        let key = RandomKey::new(7).with(3);
        let mut counts = [0_u32; 10];
        let mut sum = 0.0;
        for i in 0..100_000 {
            counts[key.with(i).below(10)] += 1;
            sum += key.with(i).unit();
        }
        assert!(counts.iter().all(|&n| (9_700..10_300).contains(&n)), "{counts:?}");
        assert!((sum / 100_000.0 - 0.5).abs() < 0.005, "{sum}");
    }

    #[test]
    fn an_order_is_a_function_of_its_key() {
        let order = |key: RandomKey| {
            let mut items: Vec<u32> = (0..50).collect();
            key.shuffle(&mut items);
            items
        };
        let mut sorted = order(RandomKey::new(1));
        assert_eq!(sorted, order(RandomKey::new(1)));
        assert_ne!(sorted, order(RandomKey::new(1).with(0)));
        assert_ne!(sorted, order(RandomKey::new(2)));
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<u32>>());
    }
}
