//! Tests of the packer: known optima, lifetimes of real models, random problems, deliberate errors.
//!
//! Invariant: every packing is checked by `validate`, never by code of the solver.

mod lifetimes;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::*;
use lifetimes::{Shape, bert_forward, esm2_forward, esm2_training};

/// (size, birth, death) of each item.
type Row = (u64, u32, u32);

fn problem(rows: &[Row], align: u64) -> Problem {
    let items = rows.iter().map(|&(size, birth, death)| PackItem { size, birth, death }).collect();
    Problem { items, align }
}

/// Solves a problem, validates the packing and returns it.
fn solved(problem: &Problem) -> Packing {
    let packing = solve(problem).expect("within 64 bits");
    assert_eq!(validate(problem, &packing), Ok(()), "{problem:?}");
    assert!(packing.height >= problem.lower_bound().bytes, "below the bound: {problem:?}");
    packing
}

#[test]
fn sizes_beyond_64_bits_have_no_packing() {
    for (rows, align, packed) in [
        (&[(u64::MAX, 0, 0)][..], 1, true),
        (&[(u64::MAX, 0, 0)], 2, false),
        (&[(1 << 63, 0, 0), (1 << 63, 1, 1)], 64, false),
        (&[(1 << 63, 0, 0), ((1 << 63) - 64, 0, 1)], 64, true),
    ] {
        assert_eq!(solve(&problem(rows, align)).is_some(), packed, "{rows:?}");
    }
}

#[test]
fn known_optima() {
    let check = |rows: &[Row], align, bound, optimum| {
        let problem = problem(rows, align);
        assert_eq!(problem.lower_bound().bytes, bound, "{rows:?}");
        assert_eq!(solved(&problem).height, optimum, "{rows:?}");
    };
    check(&[], 64, 0, 0);
    check(&[(0, 3, 3)], 64, 0, 0);
    check(&[(1, 3, 3)], 64, 64, 64);
    // Lifetimes that share one instant overlap; lifetimes in adjacent instants do not.
    check(&[(8, 0, 1), (8, 1, 2)], 8, 16, 16);
    check(&[(8, 0, 1), (8, 2, 3)], 8, 8, 8);
    check(&[(65, 0, 1), (1, 1, 2), (0, 0, 9)], 64, 192, 192);
    // A chain: each item overlaps in time with the next item only.
    check(&[(4, 0, 1), (2, 1, 2), (4, 2, 3), (2, 3, 4)], 1, 6, 6);
    // Nested lifetimes.
    check(&[(1, 0, 9), (2, 1, 8), (3, 2, 7), (4, 3, 6)], 1, 10, 10);
    // An item that is live throughout is at the bottom; the items above it decompose into independent pieces.
    check(&[(7, 0, 9), (3, 0, 2), (2, 1, 3), (3, 6, 8), (2, 7, 9)], 1, 12, 12);
    // The two short items must leave the middle free for the long item, which is born later.
    check(&[(2, 0, 1), (1, 0, 3), (3, 3, 5), (3, 2, 2), (1, 5, 6), (3, 6, 7)], 1, 4, 4);
}

#[test]
fn peak_and_live_items() {
    let p = problem(&[(10, 0, 4), (20, 2, 3), (0, 3, 3), (5, 3, 6), (30, 7, 7)], 1);
    assert_eq!(p.lower_bound(), Peak { bytes: 35, instant: 3 });
    assert_eq!(p.live_at(3), [0, 1, 3]);
    assert_eq!(p.live_at(8), [0; 0]);
    let tie = problem(&[(10, 5, 5), (10, 9, 9)], 4);
    assert_eq!(tie.lower_bound(), Peak { bytes: 12, instant: 5 });
}

/// Sizes of the published ESM-2 models: name, width, heads, layers.
const SIZES: [(&str, u64, u64, usize); 6] = [
    ("8M", 320, 20, 6),
    ("35M", 480, 20, 12),
    ("150M", 640, 20, 30),
    ("650M", 1280, 20, 33),
    ("3B", 2560, 40, 36),
    ("15B", 5120, 40, 48),
];

fn shape(row: usize, tokens: u64, workspace: u64, fused_qkv: bool, in_place: bool) -> Shape {
    let (_, d, heads, layers) = SIZES[row];
    Shape { tokens, d, ffn: 4 * d, heads, layers, vocab: 33, elem: 4, workspace, fused_qkv, in_place }
}

/// Packs the items, prints the waste above the lower bound, and asserts that it is at most `most` thousandths of it.
fn check_waste(name: &str, items: Vec<PackItem>, most: u64) {
    let p = Problem { items, align: 64 };
    let (height, bound) = (solved(&p).height, p.lower_bound().bytes);
    let waste = height - bound;
    println!("{name}: {} items, bound {bound} B, waste {waste} B", p.items.len());
    assert!(waste * 1000 <= bound * most, "{name}: {waste} B over {bound} B");
}

#[test]
fn forward_graphs_are_packed_without_waste() {
    for (row, (name, ..)) in SIZES.into_iter().enumerate() {
        for workspace in [0, 1 << 20, 12_345_678] {
            for (fused, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
                let s = shape(row, 16_384, workspace, fused, in_place);
                let label = format!("esm2 {name} workspace {workspace} fused {fused} in place {in_place}");
                check_waste(&label, esm2_forward(s), 0);
            }
            let s = shape(row, 16_384, workspace, true, false);
            check_waste(&format!("bert {name} workspace {workspace}"), bert_forward(s), 0);
        }
    }
}

#[test]
fn training_graphs_waste_under_half_a_percent() {
    for (row, (name, ..)) in SIZES.into_iter().enumerate() {
        for (tokens, workspace) in [(512, 3_000_000), (1024, 0), (1024, 12_345_678), (16_384, 12_345_678)] {
            for keep in [false, true] {
                let items = esm2_training(shape(row, tokens, workspace, false, false), keep);
                let label = format!("train {name} tokens {tokens} workspace {workspace} keep {keep}");
                check_waste(&label, items, 5);
            }
        }
    }
}

#[test]
fn equal_layers_get_equal_offsets() {
    let s = shape(5, 1024, 0, false, true);
    let p = Problem { items: esm2_forward(s), align: 64 };
    let packing = solved(&p);
    let x = 1; // After the ids: the residual stream, the only item alive in all layers.
    let layer = (p.items.len() - 4) / s.layers;
    let first = &packing.offsets[x + 1..][..layer];
    for l in 1..s.layers {
        assert_eq!(&packing.offsets[x + 1 + l * layer..][..layer], first, "layer {l}");
    }
}

/// Tests a property on random cases with a fixed seed.
fn for_all<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value)) {
    let config = Config { cases, rng_seed: RngSeed::Fixed(7), failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&strategy, |value| {
        test(value);
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

/// Random problems of up to `most` items over `instants` instants.
fn problems(
    most: usize,
    largest: u64,
    instants: u32,
    aligns: &'static [u64],
) -> impl Strategy<Value = Problem> {
    let item = (0..=largest, 0..instants, 0..instants);
    let items = prop::collection::vec(item, 0..=most);
    (items, prop::sample::select(aligns)).prop_map(|(rows, align)| {
        let rows: Vec<Row> = rows.into_iter().map(|(size, a, b)| (size, a.min(b), a.max(b))).collect();
        problem(&rows, align)
    })
}

#[test]
fn random_problems_are_packed_validly_and_always_alike() {
    for_all(300, problems(60, 300, 40, &[1, 8, 64, 100]), |p| {
        let packing = solved(&p);
        assert_eq!(Some(packing.clone()), solve(&p));
        let total: u64 = (0..p.items.len()).map(|i| p.footprint(i)).sum();
        assert!(packing.height <= total);
    });
}

/// The least height, by exhaustive search over offsets; for tiny problems with alignment 1.
fn optimum(p: &Problem) -> u64 {
    fn fits(p: &Problem, offsets: &mut Vec<u64>, height: u64) -> bool {
        let Some(item) = p.items.get(offsets.len()) else { return true };
        (0..=height.saturating_sub(item.size)).any(|offset| {
            let clash = p.items.iter().zip(offsets.iter()).any(|(o, &at)| {
                let meet = o.birth <= item.death && item.birth <= o.death;
                meet && at < offset + item.size && offset < at + o.size
            });
            offsets.push(offset);
            let found = !clash && offset + item.size <= height && fits(p, offsets, height);
            offsets.pop();
            found
        })
    }
    (0..).find(|&height| fits(p, &mut Vec::new(), height)).expect("some height fits")
}

#[test]
fn tiny_problems_are_solved_to_the_optimum() {
    for_all(400, problems(6, 4, 7, &[1]), |p| assert_eq!(solved(&p).height, optimum(&p), "{p:?}"));
}

#[test]
fn every_flaw_is_found() {
    let p = problem(&[(10, 0, 2), (6, 1, 3), (8, 3, 4), (0, 0, 4)], 4);
    let check = |offsets: &[u64], height, expected| {
        let packing = Packing { offsets: offsets.to_vec(), height };
        assert_eq!(validate(&p, &packing), expected, "{offsets:?} {height}");
    };
    check(&[0, 12, 0, 0], 20, Ok(()));
    check(&[0, 12, 0], 20, Err(PackingError::Count { items: 4, offsets: 3 }));
    check(&[0, 8, 0, 0], 16, Err(PackingError::Overlap { a: 0, b: 1 }));
    check(&[0, 12, 8, 0], 20, Err(PackingError::Overlap { a: 1, b: 2 }));
    check(&[0, 14, 0, 0], 20, Err(PackingError::Misaligned { item: 1 }));
    check(&[0, 16, 0, 0], 20, Err(PackingError::Outside { item: 1 }));
    check(&[0, 12, u64::MAX - 3, 0], 20, Err(PackingError::Outside { item: 2 }));
    check(&[0, 12, 0, 0], 24, Err(PackingError::Slack { height: 24, top: 18 }));
    check(&[0, 12, 0, 0], 19, Err(PackingError::Slack { height: 19, top: 18 }));
}

#[test]
fn a_planted_overlap_in_a_real_plan_is_found() {
    let p = Problem { items: esm2_forward(shape(1, 1024, 0, false, false)), align: 64 };
    let packing = solved(&p);
    let live = p.live_at(p.lower_bound().instant);
    for (&a, &b) in live.iter().zip(&live[1..]) {
        let mut planted = packing.clone();
        planted.offsets[b] = planted.offsets[a];
        assert_ne!(validate(&p, &planted), Ok(()), "{a} onto {b}");
    }
}

/// Random problems with random offsets.
fn packings() -> impl Strategy<Value = (Problem, Vec<u64>)> {
    let rows = prop::collection::vec(((1u64..5, 0u32..12, 0u32..4), 0u64..24), 1..10);
    rows.prop_map(|rows| {
        let items: Vec<Row> =
            rows.iter().map(|&((size, birth, life), _)| (size, birth, birth + life)).collect();
        (problem(&items, 1), rows.into_iter().map(|(_, offset)| offset).collect())
    })
}

#[test]
fn the_judge_agrees_with_a_comparison_of_all_pairs() {
    for_all(500, packings(), |(p, offsets)| {
        let clash = |a: usize, b: usize| {
            let (x, y) = (p.items[a], p.items[b]);
            let meet = x.birth <= y.death && y.birth <= x.death;
            meet && offsets[a] < offsets[b] + y.size && offsets[b] < offsets[a] + x.size
        };
        let any = (0..offsets.len()).any(|a| (0..a).any(|b| clash(a, b)));
        let height = (0..offsets.len()).map(|i| offsets[i] + p.items[i].size).max().unwrap_or(0);
        match validate(&p, &Packing { offsets: offsets.clone(), height }) {
            Ok(()) => assert!(!any),
            Err(PackingError::Overlap { a, b }) => assert!(clash(a, b)),
            Err(other) => panic!("{other}"),
        }
    });
}
