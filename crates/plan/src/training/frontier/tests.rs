//! Tests of the frontier against exhaustive search over all recomputation choices of all layers together.

use super::*;

/// Random block of `n` nodes, each of which reads random earlier nodes and has one output.
fn block(seed: u64, n: usize) -> Block {
    let mut state = seed;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let values = (0..n).map(|i| (i, 1 + next(9), next(3) > 0)).collect();
    let reads = (0..n).map(|i| (0..i).filter(|_| next(2) == 0).collect()).collect();
    let seconds = (0..n).map(|_| (1 + next(20)) as f64 * 1e-6).collect();
    let free = (0..n).map(|i| i + 1 < n).collect();
    Block { nodes: (0..n).map(NodeId::at).collect(), values, reads, seconds, free }
}

/// Stored bytes and recomputation seconds of a set of dropped nodes, from the definition: a node is recomputed if it
/// is dropped and its result is needed.
fn by_definition(b: &Block, dropped: &[usize]) -> (u64, f64) {
    let mut needed: BTreeSet<usize> = (0..b.values.len()).filter(|&k| b.values[k].2).collect();
    loop {
        let clones = dropped.iter().filter(|&&i| needed.iter().any(|&k| b.values[k].0 == i));
        let more: BTreeSet<usize> = clones.flat_map(|&i| b.reads[i].iter().copied()).collect();
        if more.is_subset(&needed) {
            break;
        }
        needed.extend(more);
    }
    let kept = needed.iter().filter(|&&k| !dropped.contains(&b.values[k].0)).map(|&k| b.values[k].1).sum();
    let clones = dropped.iter().filter(|&&i| needed.iter().any(|&k| b.values[k].0 == i));
    (kept, clones.map(|&i| b.seconds[i]).sum())
}

#[test]
fn the_frontier_is_that_of_all_combinations() {
    for seed in 0..12 {
        let blocks = [block(seed, 5), block(seed + 100, 4), block(seed, 5)];
        let ways: Vec<Vec<RecomputeChoice>> = blocks.iter().map(Block::ways).collect();
        let sums = Sums::of(&ways.iter().map(Vec::as_slice).collect::<Vec<_>>());
        // All nodes that can be dropped, as (block, node); a subset is a bit mask over this list.
        let free: Vec<(usize, usize)> = (0..3)
            .flat_map(|b| (0..blocks[b].nodes.len()).map(move |i| (b, i)))
            .filter(|&(b, i)| blocks[b].free[i])
            .collect();
        let mut all = vec![];
        for bits in 0..1u32 << free.len() {
            let (mut kept, mut seconds) = (0, 0.0);
            for (b, block) in blocks.iter().enumerate() {
                let dropped: Vec<usize> = free
                    .iter()
                    .enumerate()
                    .filter(|(k, (of, _))| *of == b && bits >> k & 1 == 1)
                    .map(|(_, (_, i))| *i)
                    .collect();
                let (bytes, time) = by_definition(block, &dropped);
                kept += bytes;
                seconds += time;
            }
            all.push((kept, (seconds * 1e12_f64).round() / 1e12));
        }
        let wanted = undominated(all, |&sum| sum);
        let found: Vec<(u64, f64)> = sums.all.iter().map(|s| (s.kept, s.seconds)).collect();
        assert_eq!(found.len(), wanted.len(), "{seed}: {found:?}, not {wanted:?}");
        for (f, w) in found.iter().zip(&wanted) {
            assert!(f.0 == w.0 && (f.1 - w.1).abs() < 1e-11, "{seed}: {f:?}, not {w:?}");
        }
    }
}
