//! Tests of the executor's guarantees: no allocation in a step, refusals, and states that persist.

use crate::rig::{ByName, FROM_FILE, On, bare, in_own_process, load, load_as, output, run};
use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_exec::half::f32_to_bf16;
use plimsoll_exec::reference::ReferenceDevice;
use plimsoll_exec::{
    Data, DeviceError, Executor, Param, PersistentTensor, StartProgress, StartStage, load_all,
};
use plimsoll_graph::ops::{Add, Epilogue, Linear};
use plimsoll_graph::{Bounds, Builder, Bytes, Counts, DType, Dim, Op, Space, VerifyError};
use plimsoll_models::{Encoder, Output, known};
use plimsoll_plan::{Location, Policy, Precision, Program, Staging, Target, Weights, compile};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::alloc::System;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[global_allocator]
pub static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const BOUNDS: Bounds = Bounds { tokens: 64, sequences: 4, longest: 40, packs: 1 };

fn small(model: &str) -> Result<plimsoll_graph::Graph, VerifyError> {
    let config = match model {
        "esm2" => include_str!("../../../../fixtures/goldens/esm2/config.json"),
        _ => include_str!("../../../../fixtures/goldens/dnabert_s/config.json"),
    };
    Encoder::from_json(config).expect("known").graph(BOUNDS, &[Output::Mean, Output::Hidden])
}

#[derive(Clone, Copy, Debug)]
enum How {
    Run,
    Timed,
    Submitted,
}

/// Loading with one thread or several, into one arena or two, gives the same parameters, or the same error.
#[test]
fn weights_are_loaded_by_any_number_of_threads() {
    let value = |param: &Param, at: u64| ((param.name.len() as u64 * 31 + at) % 101) as f32 / 500.0 - 0.1;
    let read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        range.zip(out).for_each(|(at, x)| *x = value(param, at));
        Ok(())
    };
    let broken = |param: &Param, range: Range<u64>, out: &mut [f32]| match param.name.contains("layer.1.") {
        true => Err("torn".into()),
        false => read(param, range, out),
    };
    let graph = small("esm2").expect("verified");
    let on = On::Cpu(Isa::detect(), 2);
    let ids: Vec<i32> = (0..20).map(|i| 4 + i * 7 % 20).collect();
    let mut found = [(1, 1), (1, 3), (2, 1), (2, 4)].into_iter().flat_map(|(count, readers)| {
        let new = |_| bare(on, &graph, true, Weights::Resident).expect("planned");
        let mut executors: Vec<Executor> = (0..count).map(new).collect();
        let error = load_all(&mut executors, 0, readers, &broken).expect_err("unreadable").to_string();
        assert!(error.contains("layer.1."), "{error}");
        load_all(&mut executors, 0, readers, &read).expect("loaded");
        let ids = &ids;
        executors.into_iter().map(move |mut executor| {
            let give = |e: &mut Executor| {
                e.input_i32(0, "ids", ids).expect("ids");
                e.input_i32(0, "spans", &[0, 20]).expect("spans");
            };
            run(&mut executor, give, Counts { tokens: 20, sequences: 1, packs: 1 });
            output(&mut executor, "hidden", 20 * 40)
        })
    });
    let first = found.next().expect("one");
    assert!(first.iter().all(|x| x.is_finite()) && found.all(|other| other == first));
}

/// A parameter of several windows and its second copy have the same bytes with any number of readers, and the reported
/// progress ends with all elements.
#[test]
fn a_large_parameter_and_its_copy_are_loaded_by_any_number_of_threads() {
    const COLUMNS: u64 = 16;
    // More elements than two windows of a reader, and not a multiple of one.
    const ROWS: u64 = 524_288 + 3;
    let value = |at: u64| ((at * 7919) % 1_000_003) as f32 / 1e6 - 0.5;
    let read = |_: &Param, range: Range<u64>, out: &mut [f32]| {
        range.zip(out).for_each(|(at, x)| *x = value(at));
        Ok(())
    };
    let mut g = Builder::new(Bounds { tokens: 1, sequences: 1, longest: 1, packs: 1 });
    let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
    let table = g.param("table", &[ROWS, COLUMNS]);
    let y = g.one(Op::Embed(plimsoll_graph::ops::Embed { token_dropout: None, row: false }), &[ids, table]);
    g.output("y", y);
    let target = Target::named("null").expect("read");
    let policy = Policy { precision: Precision::Bf16, ..Policy::default() };
    let plan = compile(&g.finish().expect("verified"), &policy, &target).expect("planned");
    let copies = ["master copy", "average"]
        .map(|label| Staging { label: label.to_owned(), bytes: Bytes(4 * ROWS * COLUMNS) });
    let program = Program::new(target, vec![("embed".to_owned(), plan)], copies.to_vec());
    let bytes_of = |readers: usize| {
        let mut executor = Executor::new(Box::new(ReferenceDevice::new()), program.clone()).expect("started");
        let tensors = executor.persistent_tensors();
        let [PersistentTensor { at, spec, .. }] = tensors.as_slice() else { panic!("{tensors:?}") };
        assert_eq!(spec.dtype, DType::Bf16);
        let [copy, second] = [0, 1].map(|k| Location::in_arena(program.staging_address(k)));
        let mut reported = vec![];
        let copies = BTreeMap::from([(*at, [Some(copy), Some(second)])]);
        executor
            .load_all_plans(&copies, readers, &read, &mut |progress| reported.push(progress))
            .expect("loaded");
        assert!(reported.len() > 2 && reported.is_sorted_by_key(|progress| progress.done), "{reported:?}");
        let all = StartProgress { stage: StartStage::Load, done: ROWS * COLUMNS, total: ROWS * COLUMNS };
        assert_eq!(reported.last(), Some(&all));
        let mut narrow = vec![0; (2 * ROWS * COLUMNS) as usize];
        let mut whole = vec![0; (4 * ROWS * COLUMNS) as usize];
        executor.download(*at, &mut narrow).expect("in the arena");
        executor.download(second, &mut whole).expect("in the arena");
        let average = whole.clone();
        executor.download(copy, &mut whole).expect("in the arena");
        assert!(average == whole, "both copies have the same bytes");
        (narrow, whole)
    };
    let (narrow, whole) = bytes_of(1);
    for (at, (narrow, whole)) in (0..).zip(narrow.chunks_exact(2).zip(whole.chunks_exact(4))) {
        assert_eq!(whole, value(at).to_le_bytes(), "{at}");
        assert_eq!(narrow, f32_to_bf16(value(at)).to_le_bytes(), "{at}");
    }
    for readers in [2, 5] {
        assert!(bytes_of(readers) == (narrow.clone(), whole.clone()), "{readers} readers");
    }
}

/// A launch never has fewer operands than its op.
#[test]
fn an_operand_without_a_place_is_refused() {
    let graph = small("esm2").expect("verified");
    let target = Target::named("null").expect("read");
    let plan = compile(&graph, &Policy::default(), &target).expect("planned");
    let whole = || vec![("encoder".to_owned(), plan.clone())];
    let start = |plans| {
        Executor::new(Box::new(ReferenceDevice::new()), Program::new(target.clone(), plans, vec![])).map(drop)
    };
    start(whole()).expect("every operand has a place");
    let first = &plan.graph.nodes[0];
    let last = plan.graph.nodes.last().expect("a node");
    for (value, op) in [(first.inputs[0], first.op), (last.inputs[0], last.op)] {
        let mut plans = whole();
        plans[0].1.memory.slices[value.index()] = None;
        let error = start(plans).expect_err("refused");
        let DeviceError::NotPlaced { plan, value: found, .. } = &error else { panic!("{error}") };
        assert_eq!((plan.as_str(), *found), ("encoder", value.index()), "{}", op.name());
    }
}

/// Replicas share one copy of the weights, which is loaded once; their concurrent steps are independent.
#[test]
fn lanes_share_their_weights() {
    const REPLICAS: usize = 3;
    let value = |param: &Param, at: u64| ((param.name.len() as u64 * 31 + at) % 101) as f32 / 500.0 - 0.1;
    let reads = AtomicU64::new(0);
    let read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        reads.fetch_add(1, Ordering::Relaxed);
        range.zip(out).for_each(|(at, x)| *x = value(param, at));
        Ok(())
    };
    let graph = small("esm2").expect("verified");
    let on = On::Cpu(Isa::detect(), 1);
    let (target, plan) = on.plan(&graph, true, Weights::Resident).expect("planned");
    let program = Program::new(target, vec![("encoder".to_owned(), plan)], vec![]).with_replicas(REPLICAS);
    let step = |executor: &mut Executor, first: i32| {
        let ids: Vec<i32> = (0..20).map(|i| 4 + (first + i * 7) % 20).collect();
        let give = |e: &mut Executor| {
            e.input_i32(0, "ids", &ids).expect("ids");
            e.input_i32(0, "spans", &[0, 20]).expect("spans");
        };
        run(executor, give, Counts { tokens: 20, sequences: 1, packs: 1 });
        output(executor, "hidden", 20 * 40)
    };
    let mut one = [on.executor(program.clone())];
    load_all(&mut one, 0, 1, &read).expect("loaded");
    let once = reads.swap(0, Ordering::Relaxed);
    let region = Region::new(ALLOCATOR);
    let devices = CpuDevice::replicas(REPLICAS, 1).expect("threads").into_iter();
    let mut replicas: Vec<Executor> =
        devices.map(|device| Executor::new(Box::new(device), program.clone()).expect("started")).collect();
    let held = region.change().bytes_allocated as u64;
    assert!(held >= program.peak().0, "{held} for {}", program.peak());
    load_all(&mut replicas, 0, 1, &read).expect("loaded");
    assert_eq!(reads.into_inner(), once, "one replica takes the weights");
    let wanted: Vec<_> = (0..REPLICAS as i32).map(|replica| step(&mut one[0], replica)).collect();
    std::thread::scope(|scope| {
        for (replica, (executor, wanted)) in replicas.iter_mut().zip(&wanted).enumerate() {
            let step = &step;
            scope.spawn(move || {
                (0..20).for_each(|_| assert!(&step(executor, replica as i32) == wanted, "{replica}"))
            });
        }
    });
    let name = replicas[1].device().info().name;
    assert!(name.starts_with("cpu (replica 2 of 3, "), "{name}");
}

/// The counter includes all threads of the process, also those of concurrent tests, so this test runs alone in a
/// process of its own. The test harness may allocate there too; one run without an allocation proves the claim, so
/// the test repeats until one occurs.
#[test]
fn a_step_allocates_nothing() {
    use Weights::Resident;
    if !in_own_process("executor::a_step_allocates_nothing") {
        return;
    }
    let cpu = On::Cpu(Isa::detect(), 2);
    let bf16 = On::CpuNarrow(Isa::detect(), 2, Precision::Bf16);
    let int8 = On::CpuNarrow(Isa::detect(), 2, Precision::Int8);
    let gpu = On::cuda(Precision::Bf16);
    for (on, model, how, weights) in [
        (Some(cpu), "esm2", How::Run, Resident),
        (Some(cpu), "esm2", How::Timed, Resident),
        (Some(cpu), "esm2", How::Submitted, Resident),
        (Some(cpu), "dnabert_s", How::Run, Resident),
        (Some(cpu), "esm2", How::Run, FROM_FILE),
        (Some(cpu), "esm2", How::Timed, FROM_FILE),
        (Some(cpu), "dnabert_s", How::Run, FROM_FILE),
        (Some(bf16), "esm2", How::Run, Resident),
        (Some(bf16), "dnabert_s", How::Run, Resident),
        (Some(bf16), "esm2", How::Run, FROM_FILE),
        (Some(int8), "esm2", How::Run, Resident),
        (Some(int8), "dnabert_s", How::Run, Resident),
        (Some(int8), "esm2", How::Run, FROM_FILE),
        (gpu, "esm2", How::Run, Resident),
        (gpu, "esm2", How::Timed, Resident),
        (gpu, "esm2", How::Submitted, Resident),
        (gpu, "esm2", How::Submitted, FROM_FILE),
    ] {
        let Some(on) = on else { continue };
        let graph = small(model).expect("verified");
        let mut executor = load_as(on, &graph, true, weights, |_, _, out| out.fill(0.01)).expect("planned");
        let counts = Counts { tokens: 60, sequences: 2, packs: 1 };
        let mut times = vec![Duration::ZERO; executor.program().plans()[0].1.schedule.instrs.len()];
        let ids = [5; 60];
        let spans = [0, 20, 20, 60];
        let mut outs = [vec![]];
        let mut least = usize::MAX;
        let [of_ids, of_spans] = ["ids", "spans"].map(|name| executor.input(0, name).expect("an input"));
        let mean = executor.output(0, "mean").expect("an output");
        for _ in 0..200 {
            executor.input_i32(0, "ids", &ids).expect("ids");
            executor.input_i32(0, "spans", &spans).expect("spans");
            let region = Region::new(ALLOCATOR);
            match how {
                How::Run => executor.run(0, counts).expect("a run"),
                How::Timed => executor.run_timed(0, counts, &mut times).expect("a timed run"),
                How::Submitted => {
                    let inputs = [(of_ids, Data::I32(&ids)), (of_spans, Data::I32(&spans))];
                    let step = executor.submit(0, &inputs, counts, &[(mean, 80)]).expect("submitted");
                    executor.collect(step, &mut outs).expect("collected");
                }
            }
            least = least.min(region.change().allocations);
            if least == 0 {
                break;
            }
        }
        assert_eq!(least, 0, "{model} on {}, {how:?}, {weights:?}: allocations in a step", on.name());
    }
}

/// Every parameter is read once, when it is loaded, wherever it lies between its uses; a step reads nothing, and copies the
/// bytes that the plan states for streamed weights.
#[test]
fn a_parameter_is_read_once() {
    let graph = small("esm2").expect("verified");
    for weights in [Weights::Resident, FROM_FILE] {
        let mut executor = bare(On::Reference, &graph, true, weights).expect("planned");
        let mut count = 0;
        let mut read = |_: &Param, range: Range<u64>, out: &mut [f32]| {
            count += 4 * (range.end - range.start);
            out.fill(0.01);
            Ok(())
        };
        executor.load(0, &mut read).expect("loaded");
        let params = 4 * graph_params(&executor);
        assert_eq!(count, params, "{weights:?}");
        let streamed = if weights == FROM_FILE { params } else { 0 };
        assert_eq!(executor.program().streamed().0, streamed, "{weights:?}");
        assert_eq!(executor.program().space_bytes(Space::File).0 >= params, weights == FROM_FILE);
        for _ in 0..2 {
            executor.input_i32(0, "ids", &[5, 6]).expect("ids");
            executor.input_i32(0, "spans", &[0, 2]).expect("spans");
            executor.run(0, Counts { tokens: 2, sequences: 1, packs: 1 }).expect("a run");
        }
    }
}

fn graph_params(executor: &Executor) -> u64 {
    executor.program().plans()[0].1.graph.parameter_count()
}

#[test]
fn a_parameter_that_cannot_be_read_is_named() {
    let graph = small("esm2").expect("verified");
    for weights in [Weights::Resident, FROM_FILE] {
        let mut executor = bare(On::Cpu(Isa::detect(), 2), &graph, true, weights).expect("planned");
        let mut bad = |param: &Param, _: Range<u64>, out: &mut [f32]| {
            out.fill(0.0);
            match param.name.contains("layer.1.LayerNorm") {
                true => Err("the disk is gone".into()),
                false => Ok(()),
            }
        };
        let error = executor.load(0, &mut bad).expect_err("an unreadable parameter");
        assert_eq!(error.to_string(), "cannot load `encoder.layer.1.LayerNorm.weight`");
    }
}

#[test]
fn the_arena_is_what_was_planned() {
    let precisions = [Precision::F32, Precision::Bf16];
    for ((id, _), precision) in plimsoll_models::KNOWN.iter().take(2).flat_map(|k| precisions.map(|p| (k, p))) {
        let encoder = known(id).expect("known");
        let graph = encoder.graph(BOUNDS, &[Output::Mean]).expect("verified");
        let target = CpuDevice::target(2, Isa::detect()).expect("a target");
        let policy = Policy { precision, ..Policy::default() };
        let plan = compile(&graph, &policy, &target).expect("planned");
        let program = Program::new(target, vec![("encoder".to_owned(), plan)], vec![]);
        let arena = program.arena_bytes();
        let ledger = program.ledger().total();
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
    let error = executor.run(0, Counts { tokens: 65, sequences: 1, packs: 1 }).expect_err("refused");
    assert!(matches!(error, DeviceError::OverBounds { .. }), "{error}");
}

#[test]
fn a_timed_run_is_a_run() {
    let graph = small("esm2").expect("verified");
    let mut executor =
        load(On::Cpu(Isa::detect(), 2), &graph, true, |_, _, out| out.fill(0.01)).expect("planned");
    let counts = Counts { tokens: 3, sequences: 1, packs: 1 };
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
            let error = executor.run(0, Counts { tokens: 2, sequences: 1, packs: 1 }).expect_err("refused");
            assert!(matches!(error, DeviceError::Kernel { .. }), "{error}");
        }
    }
}

#[test]
fn a_device_of_other_kernels_is_refused() {
    let graph = small("esm2").expect("verified");
    let (target, plan) = On::Cpu(Isa::detect(), 2).plan(&graph, true, Weights::Resident).expect("planned");
    let program = Program::new(target, vec![("test".to_owned(), plan)], vec![]);
    let start = |device| Executor::new(device, program.clone()).map(|_| ()).expect_err("refused");
    let error = start(Box::new(CpuDevice::new(3)));
    assert!(error.to_string().contains("with 2 workers, and the device has"), "{error}");
    let error = start(Box::new(ReferenceDevice::new()));
    assert!(matches!(error, DeviceError::Kernels { .. }), "{error}");
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
    let x = g.one(Op::Embed(plimsoll_graph::ops::Embed { token_dropout: None, row: false }), &[ids, table]);
    let y = g.one(Op::Linear(Linear::new(false, Epilogue::None)), &[x, table]);
    g.output("y", y);
    let graph = g.finish().expect("verified");
    let read = |_: &plimsoll_graph::Param, range: std::ops::Range<u64>, out: &mut [f32]| {
        for (x, i) in out.iter_mut().zip(range) {
            *x = ((i * 7) % 11) as f32 - 5.0;
        }
    };
    let results: Vec<Vec<f32>> = [On::Reference, On::Cpu(Isa::detect(), 2)]
        .into_iter()
        .map(|on| {
            let mut executor = load(on, &graph, true, read).expect("planned");
            let give = |e: &mut Executor| e.input_i32(0, "ids", &[0, 39, 7]).expect("ids");
            run(&mut executor, give, Counts { tokens: 3, sequences: 1, packs: 1 });
            output(&mut executor, "y", 3 * 40)
        })
        .collect();
    assert_eq!(results[0], results[1]);
}
