//! Timelines of programs: their bytes are those of the plan, at every instruction and at the peak.

use crate::cases::FROM_FILE;
use crate::cases::{bounds, encoder, gradients, mlp, target, with_updates};
use crate::training::{optimizers, program, small, training};
use plimsoll_graph::{Bytes, Phase};
use plimsoll_models::Output;
use plimsoll_plan::{
    PIPELINE_DEPTH, Policy, Program, RecomputePolicy, Staging, Timeline, TimelineTensor, compile,
};

/// Programs of different kinds, with their names.
fn programs() -> Vec<(String, Program)> {
    let staging = |label: &str, bytes| Staging { label: label.to_owned(), bytes: Bytes(bytes) };
    let one = |graph, policy: Policy, name: &str| {
        let target = target(name);
        let plan = compile(&graph, &policy, &target).expect("planned");
        Program::new(target, vec![("one".to_owned(), plan)], vec![staging("rows", 1000)])
    };
    let esm2 = || encoder("facebook/esm2_t6_8M_UR50D").graph(bounds(1000), &[Output::Mean]).expect("verified");
    let streamed = Policy { weights: FROM_FILE, ..Policy::default() };
    let mut all = vec![
        ("mlp".to_owned(), one(mlp(bounds(64)), Policy::default(), "null")),
        ("gradients".to_owned(), one(mlp(bounds(64)), gradients(), "cpu")),
        ("updates".to_owned(), one(with_updates(), Policy::default(), "null")),
        ("resident".to_owned(), one(esm2(), Policy::default(), "cpu").with_replicas(3)),
        ("streamed".to_owned(), one(esm2(), streamed, "cpu").host_extra(vec![staging("rows", 77)])),
        ("card".to_owned(), one(esm2(), Policy::default(), "h200").with_pipeline_depth(PIPELINE_DEPTH)),
    ];
    let target = target("cpu");
    let of = |tokens| {
        let graph = encoder("facebook/esm2_t6_8M_UR50D").graph(bounds(tokens), &[Output::Mean]);
        compile(&graph.expect("verified"), &Policy::default(), &target).expect("planned")
    };
    let plans = [("small", 100), ("large", 2000), ("again", 2000)].map(|(name, t)| (name.to_owned(), of(t)));
    all.push(("several".to_owned(), Program::new(target.clone(), plans.to_vec(), vec![])));
    for optimizer in optimizers() {
        let name = format!("{optimizer:?}");
        all.push((name, program(&training(optimizer), &small()).expect("planned")));
    }
    all
}

fn live(timeline: &Timeline, i: usize) -> impl Iterator<Item = &TimelineTensor> {
    timeline.tensors.iter().filter(move |t| (t.birth..=t.death).contains(&i))
}

#[test]
fn the_most_bytes_of_a_timeline_are_the_peak_of_the_plan() {
    for (name, program) in programs() {
        let timeline = program.timeline();
        let outside: Bytes = timeline.outside.iter().map(|s| s.bytes).sum();
        assert_eq!((timeline.arena, timeline.peak), (program.arena_bytes(), program.peak()), "{name}");
        assert_eq!(timeline.arena + outside, timeline.peak, "{name}");
        // From the tensors alone: the highest address in use, and the sum of live bytes.
        let top = |t: &TimelineTensor| t.address + t.bytes.0;
        let highest = timeline.tensors.iter().map(top).max().expect("tensors");
        assert_eq!(Bytes(highest).align_up(timeline.alignment), program.arena_bytes(), "{name}");
        let sum = |i| live(&timeline, i).map(|t| t.bytes).sum::<Bytes>();
        let count = timeline.instructions.len();
        let most = (0..count).map(sum).max().expect("instructions");
        let padding = program.ledger().get("padding and packing");
        assert_eq!(most + padding, timeline.arena, "{name}");
        assert_eq!(sum(timeline.peak_instruction), most, "{name}");
        // By lines.
        let lines = timeline.lines();
        assert_eq!((0..count).map(|i| lines.total(i)).max(), Some(program.peak()), "{name}");
        for (line, bytes) in lines.lines.iter().zip(&lines.bytes).rev().skip(1) {
            assert_eq!(Bytes(bytes[timeline.peak_instruction]), program.ledger().get(line), "{name}: {line}");
        }
        for entry in &program.ledger().entries {
            assert!(lines.lines.contains(&entry.label), "{name}: {}", entry.label);
        }
    }
}

#[test]
fn tensors_that_live_at_the_same_instruction_share_no_byte() {
    for (name, program) in programs() {
        let timeline = program.timeline();
        for i in 0..timeline.instructions.len() {
            let mut ranges: Vec<_> = live(&timeline, i).map(|t| (t.address, t.bytes.0, &t.name)).collect();
            ranges.sort_unstable();
            for pair in ranges.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{name}, instruction {i}: {pair:?}");
            }
        }
    }
}

#[test]
fn every_instruction_has_its_plan_phase_and_time() {
    for (name, program) in programs() {
        let timeline = program.timeline();
        let counts: Vec<usize> = program.plans().iter().map(|(_, p)| p.schedule.instrs.len()).collect();
        assert_eq!(timeline.plans.iter().map(|p| p.count).collect::<Vec<_>>(), counts, "{name}");
        assert_eq!(timeline.instructions.len(), counts.iter().sum::<usize>(), "{name}");
        let seconds: f64 = timeline.instructions.iter().map(|i| i.seconds).sum();
        assert!((seconds / program.seconds() - 1.0).abs() < 1e-9, "{name}: {seconds} {}", program.seconds());
        for tensor in &timeline.tensors {
            let plan = tensor.plan.map(|plan| &timeline.plans[plan]);
            let (first, count) = plan.map_or((0, timeline.instructions.len()), |p| (p.first, p.count));
            assert!(first <= tensor.birth && tensor.birth <= tensor.death, "{name}: {tensor:?}");
            assert!(tensor.death < first + count, "{name}: {tensor:?}");
        }
    }
    let recomputing =
        plimsoll_plan::Training { remat: RecomputePolicy::Full, ..training(optimizers().remove(0)) };
    let timeline = program(&recomputing, &small()).expect("planned").timeline();
    for phase in [Phase::Forward, Phase::Backward, Phase::Recompute, Phase::Update] {
        assert!(timeline.instructions.iter().any(|i| i.phase == phase), "{phase:?}");
        assert!(timeline.tensors.iter().any(|t| t.phase == Some(phase)), "{phase:?}");
    }
    let weight = timeline.tensors.iter().find(|t| t.line == "params" && t.layer == Some(1));
    assert!(weight.is_some_and(|t| t.plan.is_none() && t.death + 1 == timeline.instructions.len()));
    for line in ["gradients", "optimizer"] {
        assert!(timeline.tensors.iter().any(|t| t.line == line && t.layer == Some(1)), "{line}");
    }
}
