//! Tests of an executor that switches between programs on its device.

use crate::rig::{ByName, On};
use plimsoll_cpu::Isa;
use plimsoll_exec::{Data, Executor, Prepared, ReadError};
use plimsoll_graph::{Bounds, Counts, Param};
use plimsoll_models::{Encoder, Output};
use plimsoll_plan::{Precision, Program, Weights};
use std::ops::Range;

const LENGTH: u64 = 16;

fn program(on: On, tokens: u64) -> Program {
    let config = include_str!("../../../../fixtures/goldens/esm2/config.json");
    let bounds = Bounds { tokens, sequences: tokens / LENGTH, longest: LENGTH, packs: 1 };
    let graph = Encoder::from_json(config).expect("known").graph(bounds, &[Output::Mean]).expect("verified");
    let (target, plan) = on.plan(&graph, true, Weights::Resident).expect("planned");
    Program::new(target, vec![("encoder".to_owned(), plan)], vec![])
}

fn read(_: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), ReadError> {
    out.iter_mut().zip(range).for_each(|(x, i)| *x = (i * 7919 % 101) as f32 / 500.0 - 0.1);
    Ok(())
}

/// Means of a full step.
fn step(executor: &mut Executor, tokens: u64) -> Vec<f32> {
    let counts = Counts { tokens, sequences: tokens / LENGTH, packs: 1 };
    let ids: Vec<i32> = (0..tokens as i32).map(|i| 4 + i * 7 % 20).collect();
    let borders = |s| [s * LENGTH, (s + 1) * LENGTH].map(|at| at as i32);
    let spans: Vec<i32> = (0..counts.sequences).flat_map(borders).collect();
    let inputs = [("ids", Data::I32(&ids)), ("spans", Data::I32(&spans))];
    let wanted = 40 * counts.sequences as usize;
    let open = executor.submit_named(&inputs, counts, &[("mean", wanted)]).expect("submitted");
    let mut found = [vec![]];
    executor.collect(open, &mut found).expect("collected");
    found.into_iter().flatten().collect()
}

#[test]
fn another_program_computes_as_on_a_device_of_its_own() {
    let cuda = [Precision::F32, Precision::Bf16].into_iter().filter_map(On::cuda);
    for on in [On::Reference, On::Cpu(Isa::detect(), 2)].into_iter().chain(cuda) {
        let mut executor = on.executor(program(on, 4 * LENGTH));
        executor.load(0, &mut read).expect("loaded");
        // The arena grows, shrinks, and grows beyond its previous maximum.
        for tokens in [64, 16, 2, 256].map(|sequences| sequences * LENGTH) {
            let next = program(on, tokens);
            executor.switch(next.clone(), &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", on.name()));
            assert_eq!(executor.program(), &next);
            let unloaded = step(&mut executor, tokens);
            assert!(unloaded.iter().all(|x| x.is_nan()), "{}: weights are loaded again", on.name());
            executor.load(0, &mut read).expect("loaded");
            let found = step(&mut executor, tokens);
            let mut alone = on.executor(next);
            alone.load(0, &mut read).expect("loaded");
            assert_eq!(found, step(&mut alone, tokens), "{} with {tokens} tokens", on.name());
            assert!(found.iter().all(|x| x.is_finite()));
        }
    }
}

/// Programs of several sizes share the weights, which stay while the arena shrinks and grows.
#[test]
fn another_size_computes_with_the_same_weights() {
    let cuda = [Precision::F32, Precision::Bf16].into_iter().filter_map(On::cuda);
    for on in [On::Reference, On::Cpu(Isa::detect(), 2)].into_iter().chain(cuda) {
        let sizes = [256, 64, 2].map(|sequences| sequences * LENGTH);
        let programs = sizes.map(|tokens| program(on, tokens)).to_vec();
        let prepared = Prepared::new(programs).expect("equal weights");
        let mut executor = on.executor_of(prepared);
        executor.load(0, &mut read).expect("loaded");
        for size in [0, 2, 1, 0, 1, 2] {
            executor.use_size(size).unwrap_or_else(|e| panic!("{}: {e}", on.name()));
            let found = step(&mut executor, sizes[size]);
            let mut alone = on.executor(program(on, sizes[size]));
            alone.load(0, &mut read).expect("loaded");
            assert_eq!(found, step(&mut alone, sizes[size]), "{} with size {size}", on.name());
            assert!(found.iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn programs_with_weights_at_other_places_are_no_sizes() {
    let on = On::Cpu(Isa::detect(), 1);
    let [large, small] = [8, 2].map(|sequences| program(on, sequences * LENGTH));
    let twice = Program::new(small.target().clone(), [small.plans(), small.plans()].concat(), vec![]);
    for (what, programs) in [
        ("none", vec![]),
        ("ascending", vec![small.clone(), large.clone()]),
        ("other plans", vec![large.clone(), twice]),
        ("other replicas", vec![large.clone(), small.clone().with_replicas(2)]),
    ] {
        let error = Prepared::new(programs).err().unwrap_or_else(|| panic!("{what}"));
        assert!(error.to_string().starts_with("`start`: "), "{what}: {error}");
    }
    assert_eq!(Prepared::new(vec![large, small]).expect("two sizes").programs().len(), 2);
}

#[test]
fn open_steps_are_collected_first() {
    let on = On::Cpu(Isa::detect(), 1);
    let mut executor = on.executor(program(on, LENGTH));
    executor.load(0, &mut read).expect("loaded");
    let ids = vec![5; LENGTH as usize];
    let spans = [0, LENGTH as i32];
    let inputs = [("ids", Data::I32(&ids)), ("spans", Data::I32(&spans))];
    let counts = Counts { tokens: LENGTH, sequences: 1, packs: 1 };
    let open = executor.submit_named(&inputs, counts, &[("mean", 40)]).expect("submitted");
    let error = executor.switch(program(on, 2 * LENGTH), &mut |_| {}).expect_err("a step is open").to_string();
    assert!(error.contains("1 steps are open"), "{error}");
    executor.collect(open, &mut [vec![]]).expect("collected");
    executor.switch(program(on, 2 * LENGTH), &mut |_| {}).expect("nothing is open");
}
