//! Deterministic pseudo-random numbers. Invariant: a case depends only on the seed, the format and its number,
//! so every case can be reproduced.

/// The generator SplitMix64 (Steele, Lea and Flood 2014).
pub struct Random(u64);

impl Random {
    /// The generator of one case.
    pub fn of(seed: u64, format: &str, number: u64) -> Self {
        let mut random = Random(seed);
        for part in format.bytes().map(u64::from).chain([number]) {
            random.0 ^= part.wrapping_mul(0x2545_f491_4f6c_dd1d);
            random.next();
        }
        random
    }

    /// A uniform 64-bit number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // The finalizer mixes all bits of the state, because consecutive states differ by a constant.
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// A random element of `items`. Panics if `items` is empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// True with probability `1 / times`.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}
