//! Attention masks: which keys each query attends to. Invariant: this file is the only definition; the op
//! rules, the cost model, the reference and every kernel use it. Every query attends to itself, so no softmax
//! row is empty.

use super::RuleError;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Which keys a query attends to. Positions count from the start of the query's own sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Every key of the sequence.
    Full,
    /// All keys up to and including the query's own position.
    Causal,
    /// The last `n` keys up to and including the query's own position (sliding window; Jiang et al. 2023).
    Window(u32),
    /// Block-sparse causal mask: a query in block b attends to its own block and the blocks before it, `local`
    /// in total, and to the first `global` blocks (Child et al. 2019, "fixed").
    BlockSparse {
        /// Number of positions in a block.
        block: u32,
        /// Number of consecutive blocks that end with the query's own block.
        local: u32,
        /// Number of blocks at the start of the sequence that every later query attends to.
        global: u32,
    },
}

impl Mask {
    /// Returns the keys that query `i` of a sequence of `n` tokens attends to, as two ranges: global keys at
    /// the start of the sequence, and keys near the query. The first range is empty where the two would touch
    /// or overlap. Both ends of both ranges are non-decreasing in `i`.
    pub fn keys(&self, i: usize, n: usize) -> [Range<usize>; 2] {
        match *self {
            Self::Full => [0..0, 0..n],
            Self::Causal => [0..0, 0..i + 1],
            Self::Window(width) => [0..0, (i + 1).saturating_sub(width as usize)..i + 1],
            Self::BlockSparse { block, local, global } => {
                let block = block as usize;
                // The last `local` blocks up to the query's own. Saturating: `local` blocks may exceed the sequence, and the sizes
                // any integer.
                let start = (i / block + 1).saturating_sub(local as usize).saturating_mul(block);
                let global = block.saturating_mul(global as usize);
                if global < start { [0..global, start..i + 1] } else { [0..0, 0..i + 1] }
            }
        }
    }

    /// Returns the queries of a sequence of `n` tokens that attend to key `j`; always a single range.
    pub fn queries(&self, j: usize, n: usize) -> Range<usize> {
        match *self {
            Self::Full => 0..n,
            Self::Causal => j..n,
            Self::Window(width) => j..n.min(j.saturating_add(width as usize)),
            Self::BlockSparse { block, local, global } => {
                let b = j / block as usize;
                let end = b.saturating_add(local as usize).saturating_mul(block as usize);
                if b < global as usize { j..n } else { j..n.min(end) }
            }
        }
    }

    /// Number of (query, key) pairs that the mask admits in a sequence of `n` tokens.
    pub fn pairs(&self, n: u64) -> u128 {
        // In u128: the square of a number of tokens may exceed 64 bits.
        let n = u128::from(n);
        match *self {
            Self::Full => n * n,
            Self::Causal => causal_pairs(n),
            Self::Window(width) => n + ramp(n, u128::from(width) - 1),
            Self::BlockSparse { block, local, global } => {
                let block = u128::from(block);
                let global = u128::from(global);
                // Number of local blocks before a query's own block.
                let previous = u128::from(local) - 1;
                let blocks = n / block;
                let rest = n % block;
                // Pairs within the query's own block, which is causal.
                let own = blocks * causal_pairs(block) + causal_pairs(rest);
                // Block b attends in full to `min(b, previous)` local blocks and `min(b - previous, global)` global ones.
                // These are their sums over the whole blocks, and their number for the last, shorter block.
                let of_whole_blocks = ramp(blocks, previous) + ramp(blocks.saturating_sub(previous), global);
                let of_last_block = blocks.min(previous) + blocks.saturating_sub(previous).min(global);
                own + block * (block * of_whole_blocks + rest * of_last_block)
            }
        }
    }

    /// Rejects masks under which a query would not attend to itself.
    pub fn check(&self) -> Result<(), RuleError> {
        match *self {
            Self::Full | Self::Causal => Ok(()),
            Self::Window(0) => Err(RuleError("cannot have a window of no keys".to_owned())),
            Self::Window(_) => Ok(()),
            Self::BlockSparse { block, local, .. } if block == 0 || local == 0 => {
                Err(RuleError(format!("cannot have {local} local blocks of {block} positions")))
            }
            Self::BlockSparse { .. } => Ok(()),
        }
    }
}

/// Pairs of `n` queries that attend to all keys up to and including their own.
fn causal_pairs(n: u128) -> u128 {
    n + ramp(n, n)
}

/// `sum over i in 0..n of min(i, limit)`.
fn ramp(n: u128, limit: u128) -> u128 {
    // 0 + 1 + ... below the limit, then the limit for every other i.
    let rising = n.min(limit);
    rising * rising.saturating_sub(1) / 2 + (n - rising) * limit
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of the mask, evaluated for one pair.
    fn sees(mask: Mask, i: usize, j: usize) -> bool {
        match mask {
            Mask::Full => true,
            Mask::Causal => j <= i,
            Mask::Window(width) => j <= i && i - j < width as usize,
            Mask::BlockSparse { block, local, global } => {
                let (b, c) = (i / block as usize, j / block as usize);
                j <= i && (b - c < local as usize || c < global as usize)
            }
        }
    }

    #[test]
    fn runs_and_counts_are_those_of_the_rule() {
        let sparse = |block, local, global| Mask::BlockSparse { block, local, global };
        let masks = [
            Mask::Full,
            Mask::Causal,
            Mask::Window(1),
            Mask::Window(5),
            Mask::Window(100),
            Mask::Window(u32::MAX),
            sparse(1, 1, 0),
            sparse(4, 1, 0),
            sparse(4, 2, 1),
            sparse(3, 1, 2),
            sparse(3, 4, 3),
            sparse(16, 2, 9),
            sparse(u32::MAX, u32::MAX, u32::MAX),
        ];
        for mask in masks {
            for n in 0..40 {
                let mut pairs = 0;
                for i in 0..n {
                    let [far, near] = mask.keys(i, n);
                    assert!(far.end == 0 || far.end < near.start, "{mask:?} {i} of {n}: {far:?} {near:?}");
                    for j in 0..n {
                        let seen = sees(mask, i, j);
                        pairs += u128::from(seen);
                        assert_eq!(far.contains(&j) || near.contains(&j), seen, "{mask:?}: {i} and {j} of {n}");
                        assert_eq!(mask.queries(j, n).contains(&i), seen, "{mask:?}: {j} for {i} of {n}");
                    }
                }
                assert_eq!(mask.pairs(n as u64), pairs, "{mask:?} of {n}");
            }
        }
    }

    #[test]
    fn nobody_is_hidden_from_himself() {
        let sparse = |block, local| Mask::BlockSparse { block, local, global: 1 };
        for mask in [Mask::Window(0), sparse(0, 1), sparse(4, 0)] {
            assert!(mask.check().is_err(), "{mask:?}");
        }
        assert!(sparse(4, 1).check().is_ok());
    }
}
