//! Draws records: level by level by the values of columns, then in proportion to bases. Invariant: at a level, the
//! probability of a value is proportional to a power of the number of bases under it, within the values drawn before.

use super::super::random::RandomKey;

/// A tree of values with records as its leaves.
#[derive(Debug)]
pub(super) struct Sampler {
    root: SamplerNode,
}

#[derive(Debug)]
enum SamplerNode {
    /// The values of a level: sums of their weights up to and including each value, and what is under them.
    Values { sums: Vec<f64>, children: Vec<SamplerNode> },
    /// Records: sums of their bases up to and including each record.
    Records { sums: Vec<u64>, records: Vec<u32> },
}

impl Sampler {
    /// Builds the tree of `records`. `bases` and `value` give the number of bases of a record and its value at a level;
    /// `powers` has the power of each level. `None` if the records have no bases.
    pub(super) fn new(
        mut records: Vec<u32>,
        powers: &[f64],
        bases: &dyn Fn(u32) -> u64,
        value: &dyn Fn(u32, usize) -> u32,
    ) -> Option<Self> {
        records.retain(|&record| bases(record) > 0);
        (!records.is_empty())
            .then(|| Sampler { root: SamplerNode::new(&mut records, 0, powers, bases, value).0 })
    }

    /// Draws a record.
    pub(super) fn draw(&self, key: RandomKey) -> u32 {
        let mut node = &self.root;
        let mut level = 0;
        loop {
            match node {
                SamplerNode::Values { sums, children } => {
                    let total = sums.last().copied().unwrap_or_default();
                    let drawn = key.with(level).unit() * total;
                    // Rounding of the product could reach the total, so the index is limited.
                    let at = sums.partition_point(|&sum| sum <= drawn).min(children.len() - 1);
                    node = &children[at];
                    level += 1;
                }
                SamplerNode::Records { sums, records } => {
                    let total = sums.last().copied().unwrap_or_default();
                    let drawn = key.with(level).below(total as usize) as u64;
                    return records[sums.partition_point(|&sum| sum <= drawn)];
                }
            }
        }
    }

    /// Heap bytes, with an allowance for the allocator's headers.
    pub(super) fn bytes(&self) -> usize {
        self.root.bytes()
    }
}

impl SamplerNode {
    /// Builds the node of `records` at a level; returns it with its number of bases.
    fn new(
        records: &mut [u32],
        level: usize,
        powers: &[f64],
        bases: &dyn Fn(u32) -> u64,
        value: &dyn Fn(u32, usize) -> u32,
    ) -> (Self, u64) {
        let Some(&power) = powers.get(level) else {
            let mut total = 0;
            let sums = records
                .iter()
                .map(|&record| {
                    total += bases(record);
                    total
                })
                .collect();
            return (SamplerNode::Records { sums, records: records.to_vec() }, total);
        };
        // Stable, so that the records of a value keep the order of the files.
        records.sort_by_key(|&record| value(record, level));
        let parts = records.chunk_by(|&a, &b| value(a, level) == value(b, level));
        let lengths: Vec<usize> = parts.map(<[u32]>::len).collect();
        let mut children = Vec::with_capacity(lengths.len());
        let mut sizes = Vec::with_capacity(lengths.len());
        let mut rest = records;
        for length in lengths {
            let (part, after) = rest.split_at_mut(length);
            let (node, size) = SamplerNode::new(part, level + 1, powers, bases, value);
            children.push(node);
            sizes.push(size);
            rest = after;
        }
        // Relative to the largest value, so that no power overflows.
        let largest = sizes.iter().copied().max().unwrap_or(1) as f64;
        let mut total = 0.0;
        let sums = sizes
            .iter()
            .map(|&size| {
                total += libm::pow(size as f64 / largest, power);
                total
            })
            .collect();
        (SamplerNode::Values { sums, children }, sizes.iter().sum())
    }

    fn bytes(&self) -> usize {
        32 + match self {
            SamplerNode::Values { sums, children } => {
                sums.len() * size_of::<f64>()
                    + children.len() * size_of::<SamplerNode>()
                    + children.iter().map(SamplerNode::bytes).sum::<usize>()
            }
            SamplerNode::Records { sums, records } => {
                sums.len() * size_of::<u64>() + records.len() * size_of::<u32>()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_follow_the_powers() {
        // Two levels: (value at level 0, value at level 1, bases) of seven records.
        let records: [(u32, u32, u64); 7] =
            [(0, 0, 900), (1, 1, 50), (0, 2, 400), (1, 3, 50), (0, 0, 100), (1, 1, 300), (2, 4, 1)];
        let powers = [0.5, 0.25];
        let sampler = Sampler::new((0..7).collect(), &powers, &|r| records[r as usize].2, &|r, level| {
            [records[r as usize].0, records[r as usize].1][level]
        })
        .unwrap();
        // Probabilities by the definition.
        let under = |is: &dyn Fn(&(u32, u32, u64)) -> bool| {
            records.iter().filter(|r| is(r)).map(|r| r.2).sum::<u64>() as f64
        };
        let first = |v: u32| under(&|r| r.0 == v).powf(powers[0]);
        let second = |v: u32| under(&|r| r.1 == v).powf(powers[1]);
        let probability = |&(a, b, bases): &(u32, u32, u64)| {
            let mut values: Vec<u32> = records.iter().filter(|r| r.0 == a).map(|r| r.1).collect();
            values.sort_unstable();
            values.dedup();
            first(a) / (0..3).map(first).sum::<f64>() * second(b) / values.into_iter().map(second).sum::<f64>()
                * bases as f64
                / under(&|r| r.1 == b)
        };
        let expected: Vec<f64> = records.iter().map(probability).collect();
        assert!((expected.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let draws = 200_000;
        let mut counts = [0_u32; 7];
        for i in 0..draws {
            counts[sampler.draw(RandomKey::new(5).with(i)) as usize] += 1;
        }
        let chi_square: f64 = counts
            .iter()
            .zip(&expected)
            .map(|(&n, p)| (f64::from(n) - p * draws as f64).powi(2) / (p * draws as f64))
            .sum();
        // The 99.9 % quantile for six degrees of freedom.
        assert!(chi_square < 22.46, "{chi_square}: {counts:?}, {expected:?}");
    }

    #[test]
    fn extreme_powers_and_no_records() {
        let build = |power: f64, count| {
            Sampler::new((0..count).collect(), &[power], &|r| 1 + 1000 * u64::from(r), &|r, _| r)
        };
        assert!(build(1.0, 0).is_none());
        let even = build(0.0, 4).unwrap();
        let mut counts = [0; 4];
        (0..4000).for_each(|i| counts[even.draw(RandomKey::new(1).with(i)) as usize] += 1);
        assert!(counts.iter().all(|n| (900..1100).contains(n)), "{counts:?}");
        let largest = build(1e6, 4).unwrap();
        assert!((0..1000).all(|i| largest.draw(RandomKey::new(1).with(i)) == 3));
    }
}
