//! What the executor promises: no allocation in a step, refusals, states that survive.

use crate::rig::{On, load, output, run};
use graph::ops::{Add, Epilogue, Linear};
use graph::{Bounds, Builder, Counts, DType, Dim, Op, VerifyError};
use models::{Encoder, Output, known};
use plan::{Policy, Program, Target, compile};
use plimsoll_exec::cpu::{CpuDevice, Isa};
use plimsoll_exec::reference::ReferenceDevice;
use plimsoll_exec::{DeviceError, Executor};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::alloc::System;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const BOUNDS: Bounds = Bounds { tokens: 64, sequences: 4, longest: 40 };

fn small(model: &str) -> Result<graph::Graph, VerifyError> {
    let config = match model {
        "esm2" => include_str!("../../../../fixtures/goldens/esm2/config.json"),
        _ => include_str!("../../../../fixtures/goldens/dnabert_s/config.json"),
    };
    Encoder::from_json(config).expect("known").graph(BOUNDS, &[Output::Mean, Output::Hidden])
}

/// The counter sees all threads of the process, also those of tests beside this one: a run in which it stands
/// still proves the claim, and it is tried until one does.
#[test]
fn a_step_allocates_nothing() {
    for (model, timed) in [("esm2", false), ("esm2", true), ("dnabert_s", false)] {
        let graph = small(model).expect("verified");
        let mut executor =
            load(On::Cpu(Isa::detect(), 2), &graph, true, |_, _, out| out.fill(0.01)).expect("planned");
        let counts = Counts { tokens: 60, sequences: 2 };
        let mut times = vec![Duration::ZERO; executor.program().plans()[0].1.schedule.instrs.len()];
        let mut least = usize::MAX;
        for _ in 0..200 {
            executor.input_i32(0, "ids", &[5; 60]).expect("ids");
            executor.input_i32(0, "spans", &[0, 20, 20, 60]).expect("spans");
            let region = Region::new(ALLOCATOR);
            match timed {
                false => executor.run(0, counts).expect("a run"),
                true => executor.run_timed(0, counts, &mut times).expect("a timed run"),
            }
            least = least.min(region.change().allocations);
            if least == 0 {
                break;
            }
        }
        assert_eq!(least, 0, "{model}: allocations in a step");
    }
}

#[test]
fn the_arena_is_what_was_planned() {
    for (id, _) in models::KNOWN.iter().take(2) {
        let encoder = known(id).expect("known");
        let graph = encoder.graph(BOUNDS, &[Output::Mean]).expect("verified");
        let target = Target::named("cpu").expect("a target").with_units(2);
        let plan = compile(&graph, &Policy::default(), &target).expect("planned");
        let program = Program::new(target, vec![("encoder".to_owned(), plan)], vec![]);
        let (arena, ledger) = (program.arena_bytes(), program.ledger().total());
        let region = Region::new(ALLOCATOR);
        let executor = Executor::new(Box::new(CpuDevice::new(2)), program).expect("started");
        assert!(region.change().bytes_allocated as u64 >= arena.0);
        assert_eq!(ledger, executor.program().peak());
    }
}

#[test]
fn more_than_the_bounds_is_refused() {
    let graph = small("esm2").expect("verified");
    let mut executor = load(On::Reference, &graph, true, |_, _, out| out.fill(0.0)).expect("planned");
    let error = executor.run(0, Counts { tokens: 65, sequences: 1 }).expect_err("refused");
    assert!(matches!(error, DeviceError::OverBounds { .. }), "{error}");
}

#[test]
fn a_timed_run_is_a_run() {
    let graph = small("esm2").expect("verified");
    let mut executor =
        load(On::Cpu(Isa::detect(), 2), &graph, true, |_, _, out| out.fill(0.01)).expect("planned");
    let counts = Counts { tokens: 3, sequences: 1 };
    let mut times = vec![Duration::ZERO; executor.program().plans()[0].1.schedule.instrs.len()];
    let mut mean = |times: Option<&mut [Duration]>| {
        executor.input_i32(0, "ids", &[5, 6, 7]).expect("ids");
        executor.input_i32(0, "spans", &[0, 3]).expect("spans");
        match times {
            None => executor.run(0, counts).expect("a run"),
            Some(times) => executor.run_timed(0, counts, times).expect("a timed run"),
        }
        output(&mut executor, "mean", 40)
    };
    assert_eq!(mean(None), mean(Some(&mut times)));
    assert!(times.iter().any(|&t| t > Duration::ZERO));
    let error = executor.run_timed(0, counts, &mut times[1..]).expect_err("refused");
    assert!(error.to_string().contains("instructions"), "{error}");
}

#[test]
fn a_bad_token_or_span_is_refused() {
    let graph = small("esm2").expect("verified");
    for on in [On::Reference, On::Cpu(Isa::detect(), 2)] {
        let mut executor = load(on, &graph, true, |_, _, out| out.fill(0.0)).expect("planned");
        for (ids, spans) in [([5, 33], [0, 2]), ([5, -1], [0, 2]), ([5, 6], [0, 3]), ([5, 6], [-1, 2])] {
            executor.input_i32(0, "ids", &ids).expect("ids");
            executor.input_i32(0, "spans", &spans).expect("spans");
            let error = executor.run(0, Counts { tokens: 2, sequences: 1 }).expect_err("refused");
            assert!(matches!(error, DeviceError::Kernel { .. }), "{error}");
        }
    }
}

#[test]
fn a_device_of_other_kernels_is_refused() {
    let graph = small("esm2").expect("verified");
    let (target, plan) = On::Cpu(Isa::detect(), 2).plan(&graph, true).expect("planned");
    let program = Program::new(target, vec![("test".to_owned(), plan)], vec![]);
    let start = |device| Executor::new(device, program.clone()).map(|_| ()).expect_err("refused");
    let error = start(Box::new(CpuDevice::new(3)));
    assert!(matches!(error, DeviceError::KernelTable { ref op, .. } if op == "units"), "{error}");
    let error = start(Box::new(ReferenceDevice::new()));
    assert!(matches!(error, DeviceError::KernelTable { .. }), "{error}");
}

#[test]
fn a_state_holds_its_update() {
    let mut g = Builder::new(BOUNDS);
    let shape = [Dim::Fixed(2), Dim::Fixed(3)];
    let x = g.input("x", &shape, DType::F32);
    let state = g.param("count", &[2, 3]);
    let new = g.one(Op::Add(Add {}), &[state, x]);
    g.update(state, new);
    g.output("new", new);
    let graph = g.finish().expect("verified");
    for on in [On::Reference, On::Cpu(Isa::detect(), 1)] {
        let mut executor = load(on, &graph, true, |_, _, out| out.fill(10.0)).expect("planned");
        for step in 1..4 {
            run(&mut executor, |e| e.input_f32(0, "x", &[1.0; 6]).expect("x"), BOUNDS.full());
            assert_eq!(output(&mut executor, "new", 6), [10.0 + step as f32; 6], "{}", on.name());
        }
    }
}

#[test]
fn tied_weights_get_a_packed_copy() {
    let mut g = Builder::new(BOUNDS);
    let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
    let table = g.param("table", &[40, 8]);
    let x = g.one(Op::Embed(graph::ops::Embed { token_dropout: None, row: false }), &[ids, table]);
    let y = g.one(Op::Linear(Linear { bias: false, epilogue: Epilogue::None }), &[x, table]);
    g.output("y", y);
    let graph = g.finish().expect("verified");
    let read = |_: &graph::Param, range: std::ops::Range<u64>, out: &mut [f32]| {
        for (x, i) in out.iter_mut().zip(range) {
            *x = ((i * 7) % 11) as f32 - 5.0;
        }
    };
    let results: Vec<Vec<f32>> = [On::Reference, On::Cpu(Isa::detect(), 2)]
        .into_iter()
        .map(|on| {
            let mut executor = load(on, &graph, true, read).expect("planned");
            let give = |e: &mut Executor| e.input_i32(0, "ids", &[0, 39, 7]).expect("ids");
            run(&mut executor, give, Counts { tokens: 3, sequences: 1 });
            output(&mut executor, "y", 3 * 40)
        })
        .collect();
    assert_eq!(results[0], results[1]);
}
