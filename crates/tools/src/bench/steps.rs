//! Splits a batch into the steps of a pass. Invariant: every sequence is in exactly one step, the order of
//! sequences is preserved, and no step exceeds the plan's bounds.

use plimsoll_graph::{Bounds, Counts};

/// A step of a pass.
pub(super) struct PackedStep {
    pub(super) counts: Counts,
    /// Start and end row of each sequence.
    pub(super) spans: Vec<i32>,
    /// Sequence length for the cost of attention: the mean over tokens of the length of their sequence, so that
    /// `tokens * longest` is the number of attention pairs (rounded).
    pub(super) longest: u64,
}

impl PackedStep {
    pub(super) fn of(lengths: &[u64]) -> Self {
        let mut spans = Vec::with_capacity(2 * lengths.len());
        let mut end = 0;
        for length in lengths {
            spans.extend([end as i32, (end + length) as i32]);
            end += length;
        }
        let pairs: u64 = lengths.iter().map(|n| n * n).sum();
        let counts = Counts { tokens: end, sequences: lengths.len() as u64, packs: 1 };
        Self { counts, spans, longest: (pairs + end / 2) / end.max(1) }
    }

    /// A step of one sequence that fills it, without spans.
    pub(super) fn whole(counts: Counts) -> Self {
        Self { counts, spans: vec![], longest: counts.tokens }
    }
}

/// Splits `lengths` into steps within the bounds, preserving their order. One replica gets full steps; several
/// replicas get steps of about equal size, where possible in a number that is a multiple of `replicas`.
pub(super) fn packs<'a>(lengths: &'a [u64], bounds: &Bounds, replicas: usize) -> Vec<&'a [u64]> {
    let full = cut(lengths, bounds, |_| u64::MAX);
    if replicas == 1 {
        return full;
    }
    let tokens = lengths.iter().sum::<u64>();
    let steps = full.len().next_multiple_of(replicas) as u64;
    cut(lengths, bounds, |step| tokens * (step as u64 + 1) / steps)
}

/// Splits `lengths` into steps within the bounds. Step `i` also ends before the first sequence with a midpoint
/// at or beyond token `upto(i)` of the batch, but a step has at least one sequence.
fn cut<'a>(lengths: &'a [u64], bounds: &Bounds, upto: impl Fn(usize) -> u64) -> Vec<&'a [u64]> {
    let mut packs = vec![];
    let mut rest = lengths;
    let mut before = 0;
    while !rest.is_empty() {
        let mut tokens = 0;
        let upto = upto(packs.len());
        let fitting = rest.iter().enumerate().take_while(|&(i, n)| {
            // By the midpoint of the sequence: a step ends at the boundary that is nearest to its share of tokens.
            let is_in_share = i == 0 || before + tokens + n / 2 < upto;
            tokens += n;
            is_in_share && i < bounds.sequences as usize && tokens <= bounds.tokens
        });
        let (pack, later) = rest.split_at(fitting.count().max(1));
        before += pack.iter().sum::<u64>();
        packs.push(pack);
        rest = later;
    }
    packs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_have_equal_steps() {
        let bounds = Bounds { tokens: 1024, sequences: 128, longest: 168, packs: 1 };
        for (replicas, wanted) in
            [(1, vec![6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 4]), (8, vec![4; 16]), (16, vec![4; 16])]
        {
            let sizes: Vec<usize> =
                packs(&[168; 64], &bounds, replicas).iter().map(|step| step.len()).collect();
            assert_eq!(sizes, wanted, "{replicas} replicas");
        }
        let sizes =
            |replicas| packs(&[168; 64], &bounds, replicas).iter().map(|step| step.len()).collect::<Vec<_>>();
        assert!(sizes(4).len() == 12 && sizes(4).iter().all(|n| (5..=6).contains(n)), "{:?}", sizes(4));
        assert!(sizes(3).len() == 12 && sizes(5).len() == 15);
    }

    #[test]
    fn steps_are_inside_of_the_bounds_and_hold_every_sequence() {
        let bounds = Bounds { tokens: 100, sequences: 5, longest: 100, packs: 1 };
        let lengths: Vec<u64> = (0..200)
            .map(|i| [1, 100, 40, 7, 60][i % 5] + (i as u64 * i as u64) % 30)
            .map(|n| n.min(100))
            .collect();
        for replicas in [1, 2, 3, 8, 300] {
            let packs = packs(&lengths, &bounds, replicas);
            assert_eq!(packs.concat(), lengths, "{replicas} replicas");
            for step in packs.into_iter().map(PackedStep::of) {
                assert!(bounds.admits(step.counts), "{:?}", step.counts);
            }
        }
    }
}
