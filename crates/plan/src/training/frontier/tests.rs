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
    Block { nodes: (0..n).map(NodeId::at).collect(), values, reads, seconds, free, copies: None }
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
        let ways: Vec<Vec<LayerChoice>> = blocks.iter().map(Block::ways).collect();
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

/// A random block whose values may be offloaded.
fn block_with_copies(seed: u64, n: usize) -> Block {
    let block = block(seed, n);
    let copy = |v: &(usize, u64, bool)| [1e-6 * v.1 as f64, 2e-6 * v.1 as f64];
    let copies = Copies {
        of_value: block.values.iter().map(copy).collect(),
        kernels: [(seed % 7) as f64 * 1e-6, 1e-5],
        layers: 6,
    };
    Block { copies: Some(copies), ..block }
}

/// Stored bytes and additional seconds of a choice for each node (0: store, 1: recompute, 2: offload), from the definition.
fn by_definition_of_three(b: &Block, choice: &[u32]) -> (u64, f64) {
    let nodes = |of: u32| -> Vec<usize> { (0..choice.len()).filter(|&i| choice[i] == of).collect() };
    let (dropped, moved) = (nodes(1), nodes(2));
    let (_, again) = by_definition(b, &dropped);
    // Without the moved nodes' values nothing is stored of them; what is needed is the same.
    let needed = |k: usize| {
        let (with, _) = by_definition(b, &dropped);
        let mut less = Block { values: b.values.clone(), copies: None, ..block(0, 0) };
        less.nodes.clone_from(&b.nodes);
        less.reads.clone_from(&b.reads);
        less.seconds.clone_from(&b.seconds);
        less.values[k].1 = 0;
        by_definition(&less, &dropped).0 < with
    };
    let copied: Vec<usize> =
        (0..b.values.len()).filter(|&k| moved.contains(&b.values[k].0) && needed(k)).collect();
    let bytes: u64 = copied.iter().map(|&k| b.values[k].1).sum();
    let copies = b.copies.as_ref().expect("a block with copies");
    let [out, back] = [0, 1].map(|way| copied.iter().map(|&k| copies.of_value[k][way]).sum::<f64>());
    let waits = (out - copies.kernels[0]).max(0.0) + (back - copies.kernels[1] - again).max(0.0);
    let on_the_way = (2 * bytes).div_ceil(6);
    (by_definition(b, &dropped).0 - bytes + on_the_way, again + waits + HIDDEN_COPY * (out + back))
}

#[test]
fn the_choices_of_a_layer_are_those_of_all_combinations() {
    let mut offloading = 0;
    for seed in 0..20 {
        let block = block_with_copies(seed, 5);
        let found = block.ways();
        offloading += found.iter().filter(|way| !way.moved.is_empty()).count();
        let choices = (0..3u32.pow(5)).map(|n| (0..5).map(|i| n / 3u32.pow(i) % 3).collect::<Vec<_>>());
        let allowed = choices.filter(|choice| (0..5).all(|i| choice[i] != 1 || block.free[i]));
        let wanted =
            undominated(allowed.map(|choice| by_definition_of_three(&block, &choice)).collect(), |&c| c);
        assert_eq!(found.len(), wanted.len(), "{seed}: {found:?}, not {wanted:?}");
        for (f, w) in found.iter().zip(&wanted) {
            assert!(f.held == w.0 && (f.seconds - w.1).abs() < 1e-12, "{seed}: {f:?}, not {w:?}");
        }
        assert!(found.last().is_some_and(|way| way.moved.is_empty() && way.dropped.is_empty()), "{seed}");
    }
    assert!(offloading > 20, "{offloading}");
}
