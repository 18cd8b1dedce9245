//! Plans of all known models on several targets: ledgers, packing, offsets, planning time.

use crate::cases::{MEAN, bounds, encoder, model, plan, target, waste_permille};
use crate::oracle;
use plimsoll_graph::{Bounds, Bytes, Role};
use plimsoll_models::{HeadConfig, KNOWN, Output, mlp_head};
use plimsoll_plan::{MemoryPlan, Plan, Program, Staging, check};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const TARGETS: [&str; 4] = ["cpu", "null", "h200", "4090"];
const TOKENS: [u64; 3] = [512, 4096, 16384];

fn aligned(bytes: Bytes, alignment: u64) -> Bytes {
    Bytes(bytes.0.next_multiple_of(alignment))
}

/// Asserts the invariants of a program, computed from its plans independently of its own methods.
fn sound(program: &Program) {
    let alignment = program.target().alignment;
    let persistent: Bytes = program.plans().iter().map(|(_, p)| p.memory.device.persistent).sum();
    let staging: Bytes = program.staging().iter().map(|s| aligned(s.bytes, alignment)).sum();
    let transient = program.plans().iter().map(|(_, p)| p.memory.device.transient).max().expect("a plan");
    let reserved: Bytes = program.target().reserved.iter().map(|r| r.bytes).sum();
    assert_eq!(program.arena_bytes(), persistent + staging + transient);
    assert_eq!(program.peak(), program.arena_bytes() + reserved);

    let ledger = program.ledger();
    assert_eq!(ledger.total(), program.peak(), "{ledger}");
    assert!(ledger.entries.iter().all(|e| e.bytes > Bytes::ZERO), "{ledger}");
    let param = |r: &Role| matches!(r, Role::Param(_));
    let params = |p: &Plan| -> Bytes {
        let values = p.graph.values.iter().filter(|v| param(&v.spec.role));
        values.map(|v| v.spec.bytes(&p.graph.bounds)).sum()
    };
    assert_eq!(ledger.get("params"), program.plans().iter().map(|(_, p)| params(p)).sum());
    assert!(program.lower_bound() <= program.peak());
    for (_, p) in program.plans() {
        check(&p.graph, &p.schedule, &p.memory).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(oracle::fault(p), None);
        assert!(p.memory.slices.iter().flatten().all(|s| s.offset % alignment == 0));
        assert!(p.memory.workspaces.iter().flatten().all(|s| s.offset % alignment == 0));
    }
    addresses(program);
}

/// Asserts that the weights of all plans, the staging buffers and the transient region do not overlap in the arena.
fn addresses(program: &Program) {
    let mut ranges = vec![];
    let mut transient = u64::MAX;
    for (i, (_, p)) in program.plans().iter().enumerate() {
        for (v, value) in p.graph.values() {
            let Some(slice) = p.memory.slice(v) else { continue };
            let start = program.location(i, slice).at;
            assert!(start + slice.bytes.0 <= program.arena_bytes().0);
            match value.spec.role {
                Role::Param(_) | Role::State(_) => ranges.push((start, start + slice.bytes.0)),
                Role::Input | Role::Activation | Role::Grad => transient = transient.min(start),
            }
        }
    }
    for (k, s) in program.staging().iter().enumerate() {
        ranges.push((program.staging_address(k), program.staging_address(k) + s.bytes.0));
    }
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|w| w[0].1 <= w[1].0));
    assert!(ranges.last().is_none_or(|last| last.1 <= transient));
}

fn alone(name: &str, plan: Plan, target_name: &str) -> Program {
    Program::new(target(target_name), vec![(name.to_owned(), plan)], vec![])
}

#[test]
fn ledgers_sum_and_packing_wastes_under_two_percent() {
    println!("{:<30} {:<6} {:>6} {:>16} {:>16} waste", "model", "target", "T", "transient", "lower bound");
    for (id, _) in KNOWN {
        for target_name in TARGETS {
            for tokens in TOKENS {
                let plan = model(id, tokens, MEAN, target_name);
                let MemoryPlan { device, lower_bound, .. } = plan.memory;
                let transient = device.transient;
                println!(
                    "{id:<30} {target_name:<6} {tokens:>6} {:>16} {:>16} {:>4} permille",
                    transient.0,
                    lower_bound.0,
                    waste_permille(&plan.memory)
                );
                assert!(transient >= lower_bound);
                assert!(waste_permille(&plan.memory) < 20, "{id} on {target_name} at {tokens}");
                sound(&alone(id, plan, target_name));
            }
        }
    }
}

#[test]
fn every_output_has_its_plan() {
    for id in ["facebook/esm2_t6_8M_UR50D", "facebook/esm2_t33_650M_UR50D"] {
        let all = [Output::Hidden, Output::Mean, Output::Cls, Output::Logits];
        for target_name in TARGETS {
            let plan = model(id, 4096, &all, target_name);
            assert_eq!(plan.graph.outputs.len(), 4);
            assert!(waste_permille(&plan.memory) < 20, "{id} on {target_name}");
            sound(&alone(id, plan, target_name));
        }
    }
}

/// VirNucPro: two encoders and the classifier head in one arena.
fn trio(tokens: u64, sequences: u64, target_name: &str) -> Program {
    let t = target(target_name);
    let of = |id: &str| plan(&encoder(id).graph(bounds(tokens), MEAN).expect("verified"), &t);
    let (dna, protein) = (of("zhihan1996/DNABERT-S"), of("facebook/esm2_t36_3B_UR50D"));
    let rows = Bounds { tokens: 1, sequences, longest: 1, packs: 1 };
    let head = mlp_head(&HeadConfig { dna: 768, protein: 2560, hidden: 512, classes: 2 }, rows);
    let head = plan(&head.expect("verified"), &t);
    let stage = |label: &str, bytes| Staging { label: label.to_owned(), bytes: Bytes(bytes) };
    let staging = vec![stage("dna", sequences * 768 * 4 + 4), stage("protein", sequences * 2560 * 4 + 12)];
    let named = |name: &str, plan| (name.to_owned(), plan);
    Program::new(t, vec![named("dna", dna), named("protein", protein), named("head", head)], staging)
}

#[test]
fn three_plans_share_an_arena() {
    for target_name in TARGETS {
        for (tokens, sequences) in [(512, 7), (4096, 64), (16384, 100_000)] {
            let program = trio(tokens, sequences, target_name);
            sound(&program);
            let ledger = program.ledger();
            assert_eq!(ledger.get("staging: dna"), Bytes(sequences * 768 * 4 + 4));
            let (at, label) = program.peak_at();
            assert!(label.starts_with(&program.plans()[at].0), "{label}");
            assert_eq!(program.index("head"), Some(2));
            assert_eq!(
                program.digest().expect("hashed"),
                trio(tokens, sequences, target_name).digest().expect("hashed")
            );
        }
    }
}

#[test]
fn digests_tell_programs_apart() {
    let id = "facebook/esm2_t6_8M_UR50D";
    let digest = |tokens, target_name: &str| {
        alone(id, model(id, tokens, MEAN, target_name), target_name).digest().expect("hashed")
    };
    // h100 and h200 have equal kernels and differ in name and reserved memory only.
    let all =
        [digest(512, "cpu"), digest(513, "cpu"), digest(512, "null"), digest(512, "h100"), digest(512, "h200")];
    for (i, a) in all.iter().enumerate() {
        assert!(a.len() == 64 && !all[i + 1..].contains(a), "{all:?}");
    }
}

#[test]
fn offsets_of_weights_do_not_depend_on_bounds() {
    for id in ["facebook/esm2_t12_35M_UR50D", "zhihan1996/DNABERT-S"] {
        for target_name in TARGETS {
            let weights = |tokens| {
                let p = model(id, tokens, MEAN, target_name);
                let slice = |v| p.memory.slice(v).expect("a weight has an address");
                let of = |(v, _, param): (_, _, &plimsoll_graph::Param)| (param.clone(), slice(v));
                let slices: Vec<_> = p.graph.param_values().map(of).collect();
                (p.memory.device.persistent, slices)
            };
            assert_eq!(weights(128), weights(9999), "{id} on {target_name}");
        }
    }
}

#[test]
fn peaks_grow_with_tokens() {
    for id in ["facebook/esm2_t6_8M_UR50D", "facebook/esm2_t12_35M_UR50D", "zhihan1996/DNABERT-S"] {
        for target_name in ["cpu", "h200"] {
            let peak = |tokens| alone(id, model(id, tokens, MEAN, target_name), target_name).peak();
            let peaks: Vec<Bytes> = (1..=24).map(|k| peak(k * 512)).collect();
            assert!(peaks.windows(2).all(|w| w[0] < w[1]), "{id} on {target_name}: {peaks:?}");
        }
    }
}

/// The ledger classifies buffers by the value that is live at the peak, not by a later value in the same storage.
#[test]
fn the_residual_stream_is_no_output_before_its_time() {
    let id = "facebook/esm2_t6_8M_UR50D";
    let plan = model(id, 4096, &[Output::Hidden], "null");
    let hidden = plan.graph.output("hidden").expect("an output");
    let at_end = plan.memory.peak_instr + 1 == plan.schedule.instrs.len();
    assert!(!at_end && !plan.memory.live_at_peak.contains(&hidden), "{:?}", plan.memory.live_at_peak);
    assert_eq!(alone(id, plan, "null").ledger().get("outputs"), Bytes::ZERO);
}

#[test]
fn the_largest_model_is_planned_within_a_second() {
    let id = "facebook/esm2_t48_15B_UR50D";
    let start = Instant::now();
    let graph = encoder(id).graph(bounds(16384), MEAN).expect("verified");
    let built = start.elapsed();
    let plan = plan(&graph, &target("cpu"));
    let planned = start.elapsed();
    println!("{id}: built in {built:?}, planned after {planned:?}, {} nodes", plan.graph.nodes.len());
    // Twice the limit of a release build, because test builds are hardly optimised.
    assert!(planned < Duration::from_secs(2), "{planned:?}");
}

/// Programs that differ in any buffer, or in whether their plans share parameters, have different digests.
#[test]
fn digests_tell_buffers_apart() {
    let t = target("cpu");
    let plan = model("facebook/esm2_t6_8M_UR50D", 512, MEAN, "cpu");
    let plans = || vec![("a".to_owned(), plan.clone()), ("b".to_owned(), plan.clone())];
    let buffer = |label: &str, bytes: u64| Staging { label: label.to_owned(), bytes: Bytes(bytes) };
    // The bytes of the first buffer, written after its label, read "12345678".
    let bytes = u64::from_le_bytes(*b"12345678");
    let with = |staging, host| Program::new(t.clone(), plans(), staging).host_extra(host);
    let programs = [
        with(vec![], vec![]),
        Program::sharing(t.clone(), plans()),
        with(vec![], vec![]).with_replicas(2),
        with(vec![buffer("x", bytes), buffer("y", 64)], vec![]),
        with(vec![buffer("x", bytes)], vec![buffer("y", 64)]),
        with(vec![], vec![buffer("x", bytes), buffer("y", 64)]),
        with(vec![buffer("x12345678y", 64)], vec![]),
    ];
    let digests: BTreeSet<String> = programs.iter().map(|p| p.digest().expect("hashed")).collect();
    assert_eq!(digests.len(), programs.len());
}
