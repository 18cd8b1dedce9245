//! Tests of the frontier against exhaustive search over all recomputation choices of all layers together.

use super::*;

/// Random layer of `n` nodes, each of which reads random earlier nodes and has one output.
fn random_layer(seed: u64, n: usize) -> LayerProblem {
    let mut state = seed;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let values =
        (0..n).map(|node| LayerValue { node, bytes: 1 + next(9), read_by_backward: next(3) > 0 }).collect();
    let reads = (0..n).map(|i| (0..i).filter(|_| next(2) == 0).collect()).collect();
    let seconds = (0..n).map(|_| (1 + next(20)) as f64 * 1e-6).collect();
    let recomputable = (0..n).map(|i| i + 1 < n).collect();
    LayerProblem { nodes: (0..n).map(NodeId::at).collect(), values, reads, seconds, recomputable, copies: None }
}

/// Stored bytes and recomputation seconds of a set of dropped nodes, from the definition: a node is recomputed if it
/// is dropped and its result is needed.
fn by_definition(b: &LayerProblem, dropped: &[usize]) -> (u64, f64) {
    let mut needed: BTreeSet<usize> = (0..b.values.len()).filter(|&k| b.values[k].read_by_backward).collect();
    loop {
        let clones = dropped.iter().filter(|&&i| needed.iter().any(|&k| b.values[k].node == i));
        let more: BTreeSet<usize> = clones.flat_map(|&i| b.reads[i].iter().copied()).collect();
        if more.is_subset(&needed) {
            break;
        }
        needed.extend(more);
    }
    let stored = needed.iter().filter(|&&k| !dropped.contains(&b.values[k].node));
    let stored_bytes = stored.map(|&k| b.values[k].bytes).sum();
    let clones = dropped.iter().filter(|&&i| needed.iter().any(|&k| b.values[k].node == i));
    (stored_bytes, clones.map(|&i| b.seconds[i]).sum())
}

#[test]
fn the_frontier_is_that_of_all_combinations() {
    for seed in 0..12 {
        let layers = [random_layer(seed, 5), random_layer(seed + 100, 4), random_layer(seed, 5)];
        let choices: Vec<Vec<LayerChoice>> = layers.iter().map(LayerProblem::choices).collect();
        let combinations = Combinations::of(&choices.iter().map(Vec::as_slice).collect::<Vec<_>>());
        // All nodes that can be dropped, as (layer, node); a subset is a bit mask over this list.
        let droppable: Vec<(usize, usize)> = (0..3)
            .flat_map(|b| (0..layers[b].nodes.len()).map(move |i| (b, i)))
            .filter(|&(b, i)| layers[b].recomputable[i])
            .collect();
        let mut all = vec![];
        for bits in 0..1u32 << droppable.len() {
            let mut stored = 0;
            let mut seconds = 0.0;
            for (b, layer) in layers.iter().enumerate() {
                let dropped: Vec<usize> = droppable
                    .iter()
                    .enumerate()
                    .filter(|(k, (of, _))| *of == b && bits >> k & 1 == 1)
                    .map(|(_, (_, i))| *i)
                    .collect();
                let (bytes, time) = by_definition(layer, &dropped);
                stored += bytes;
                seconds += time;
            }
            all.push((stored, (seconds * 1e12_f64).round() / 1e12));
        }
        let wanted = undominated(all, |&sum| sum);
        let found: Vec<(u64, f64)> = combinations.all.iter().map(|s| (s.stored_bytes, s.seconds)).collect();
        assert_eq!(found.len(), wanted.len(), "{seed}: {found:?}, not {wanted:?}");
        for (f, w) in found.iter().zip(&wanted) {
            assert!(f.0 == w.0 && (f.1 - w.1).abs() < 1e-11, "{seed}: {f:?}, not {w:?}");
        }
    }
}

/// A random layer whose values may be offloaded.
fn random_layer_with_copies(seed: u64, n: usize) -> LayerProblem {
    let layer = random_layer(seed, n);
    let trip = |v: &LayerValue| RoundTrip { out: 1e-6 * v.bytes as f64, back: 2e-6 * v.bytes as f64 };
    let copies = CopyTimes {
        of_value: layer.values.iter().map(trip).collect(),
        forward_kernels: (seed % 7) as f64 * 1e-6,
        backward_kernels: 1e-5,
        layers: 6,
    };
    LayerProblem { copies: Some(copies), ..layer }
}

/// Stored bytes and additional seconds of a choice for each node (0: store, 1: recompute, 2: offload), from the definition.
fn by_definition_of_three(b: &LayerProblem, choice: &[u32]) -> (u64, f64) {
    let nodes = |of: u32| -> Vec<usize> { (0..choice.len()).filter(|&i| choice[i] == of).collect() };
    let dropped = nodes(1);
    let offloaded = nodes(2);
    let (_, again) = by_definition(b, &dropped);
    // Without the offloaded nodes' values nothing is stored of them; what is needed is the same.
    let needed = |k: usize| {
        let (with, _) = by_definition(b, &dropped);
        let mut less = LayerProblem { values: b.values.clone(), copies: None, ..random_layer(0, 0) };
        less.nodes.clone_from(&b.nodes);
        less.reads.clone_from(&b.reads);
        less.seconds.clone_from(&b.seconds);
        less.values[k].bytes = 0;
        by_definition(&less, &dropped).0 < with
    };
    let copied: Vec<usize> =
        (0..b.values.len()).filter(|&k| offloaded.contains(&b.values[k].node) && needed(k)).collect();
    let bytes: u64 = copied.iter().map(|&k| b.values[k].bytes).sum();
    let copies = b.copies.as_ref().expect("a layer with copies");
    let out = copied.iter().map(|&k| copies.of_value[k].out).sum::<f64>();
    let back = copied.iter().map(|&k| copies.of_value[k].back).sum::<f64>();
    let waits = (out - copies.forward_kernels).max(0.0) + (back - copies.backward_kernels - again).max(0.0);
    let in_transit = (2 * bytes).div_ceil(6);
    (by_definition(b, &dropped).0 - bytes + in_transit, again + waits + HIDDEN_COPY_COST * (out + back))
}

#[test]
fn the_choices_of_a_layer_are_those_of_all_combinations() {
    let mut offloading = 0;
    for seed in 0..20 {
        let layer = random_layer_with_copies(seed, 5);
        let found = layer.choices();
        offloading += found.iter().filter(|choice| !choice.offloaded.is_empty()).count();
        let choices = (0..3u32.pow(5)).map(|n| (0..5).map(|i| n / 3u32.pow(i) % 3).collect::<Vec<_>>());
        let allowed = choices.filter(|choice| (0..5).all(|i| choice[i] != 1 || layer.recomputable[i]));
        let wanted =
            undominated(allowed.map(|choice| by_definition_of_three(&layer, &choice)).collect(), |&c| c);
        assert_eq!(found.len(), wanted.len(), "{seed}: {found:?}, not {wanted:?}");
        for (f, w) in found.iter().zip(&wanted) {
            assert!(f.arena_bytes == w.0 && (f.seconds - w.1).abs() < 1e-12, "{seed}: {f:?}, not {w:?}");
        }
        assert!(
            found.last().is_some_and(|choice| choice.offloaded.is_empty() && choice.dropped.is_empty()),
            "{seed}"
        );
    }
    assert!(offloading > 20, "{offloading}");
}
