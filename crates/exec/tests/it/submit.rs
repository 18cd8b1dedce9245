//! Tests of asynchronous steps: the same bits as `run`, results in order, and refused steps leave nothing in
//! flight.

use crate::faulty::Faults;
use crate::rig::{ByName, On, load, output, run};
use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_cuda::{CudaDevice, Options};
use plimsoll_exec::{Allocation, Data, Device, DeviceError, Executor, OutputValues, Span, Submitted};
use plimsoll_graph::ops::Route;
use plimsoll_graph::{Bounds, Builder, Bytes, Counts, DType, Dim, Op, OutputRole, Space};
use plimsoll_models::{Encoder, Output};
use plimsoll_plan::{ArenaMemory, Precision, Program, Target, Weights};
use plimsoll_testing::HookedDevice;
use std::ops::Range;

const BOUNDS: Bounds = Bounds { tokens: 64, sequences: 4, longest: 40, packs: 1 };

/// Token ids, spans and counts of a step of `n` sequences.
fn step(n: i32) -> (Vec<i32>, Vec<i32>, Counts) {
    let length = 7 + n;
    let ids = (0..n * length).map(|i| 4 + i * 7 % 20).collect();
    let spans = (0..n).flat_map(|s| [s * length, (s + 1) * length]).collect();
    (ids, spans, Counts { tokens: (n * length) as u64, sequences: n as u64, packs: 1 })
}

fn graph() -> plimsoll_graph::Graph {
    let config = include_str!("../../../../fixtures/goldens/esm2/config.json");
    let graph = Encoder::from_json(config).expect("known").graph(BOUNDS, &[Output::Mean, Output::Hidden]);
    graph.expect("verified")
}

fn weights(_: &plimsoll_graph::Param, range: Range<u64>, out: &mut [f32]) {
    out.iter_mut().zip(range).for_each(|(x, i)| *x = (i * 7919 % 101) as f32 / 500.0 - 0.1);
}

fn encoder(on: On) -> Executor {
    load(on, &graph(), true, weights).expect("planned")
}

/// An executor of `graph` on the first GPU with the given options, with resident or streamed weights.
fn on_gpu(graph: &plimsoll_graph::Graph, options: Options, placed: Weights) -> Executor {
    let (target, plan) = On::Cuda(Precision::F32).plan(graph, true, placed).expect("planned");
    let program =
        Program::new(target, vec![("test".to_owned(), plan)], vec![]).with_pipeline_depth(options.depth);
    let device = CudaDevice::with(0, options).expect("there");
    let mut executor = Executor::new(Box::new(device), program).expect("started");
    let mut read = |param: &plimsoll_graph::Param, range: Range<u64>, out: &mut [f32]| {
        weights(param, range, out);
        Ok(())
    };
    executor.load(0, &mut read).expect("loaded");
    executor
}

/// Every combination of the options of a CUDA device.
fn every_use() -> impl Iterator<Item = Options> {
    let flags = [(true, true), (true, false), (false, true), (false, false)];
    flags.into_iter().flat_map(|(streams, pinned)| {
        (1..=4).map(move |depth| Options { streams, pinned: Some(pinned), depth, ..Options::default() })
    })
}

fn submit(executor: &mut Executor, n: i32) -> Result<Submitted, DeviceError> {
    let (ids, spans, counts) = step(n);
    let inputs = [("ids", Data::I32(&ids)), ("spans", Data::I32(&spans))];
    executor.submit_named(
        &inputs,
        counts,
        &[("mean", 40 * n as usize), ("hidden", 40 * counts.tokens as usize)],
    )
}

/// Runs steps with `submit` and `collect`, with the maximum number in flight.
fn pipelined(executor: &mut Executor, steps: &[i32]) -> Vec<[Vec<f32>; 2]> {
    let mut open = std::collections::VecDeque::new();
    let mut results = vec![];
    let mut collect = |executor: &mut Executor, step| {
        let mut found = [vec![], vec![]];
        executor.collect(step, &mut found).expect("collected");
        results.push(found);
    };
    for &n in steps {
        if open.len() == executor.depth() {
            collect(executor, open.pop_front().expect("full"));
        }
        open.push_back(submit(executor, n).expect("submitted"));
    }
    open.into_iter().for_each(|step| collect(executor, step));
    results
}

#[test]
fn what_is_submitted_is_what_is_run() {
    for on in [On::Reference, On::Cpu(Isa::detect(), 2)] {
        let mut executor = encoder(on);
        for n in [3, 1, 4, 2] {
            let (ids, spans, counts) = step(n);
            let give = |e: &mut Executor| {
                e.input_i32(0, "ids", &ids).expect("ids");
                e.input_i32(0, "spans", &spans).expect("spans");
            };
            run(&mut executor, give, counts);
            let means = 40 * n as usize;
            let hidden = 40 * counts.tokens as usize;
            let wanted = [output(&mut executor, "hidden", hidden), output(&mut executor, "mean", means)];
            executor.poison().expect("inside");
            let inputs = [("spans", Data::I32(&spans)), ("ids", Data::I32(&ids))];
            let outputs = [("hidden", hidden), ("mean", means)];
            let open = executor.submit_named(&inputs, counts, &outputs).expect("submitted");
            let mut found = [vec![], vec![1.0; 1000]];
            executor.collect(open, &mut found).expect("collected");
            assert_eq!(found, wanted, "{} with {n} sequences", on.name());
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_nothing_open() {
    let mut executor = encoder(On::Cpu(Isa::detect(), 2));
    let (ids, spans, counts) = step(2);
    let i = ("ids", Data::I32(&ids));
    let s = ("spans", Data::I32(&spans));
    let floats = vec![0.0; ids.len()];
    for (inputs, outputs, word) in [
        ([("idz", Data::I32(&ids)), s], ("mean", 80), "no `idz`"),
        ([("ids", Data::I32(&ids[1..])), s], ("mean", 80), "`ids` is"),
        ([("ids", Data::F32(&floats)), s], ("mean", 80), "`ids` is"),
        ([i, s], ("mean", 81), "`mean` is"),
        ([i, s], ("mode", 80), "no `mode`"),
    ] {
        let error = executor.submit_named(&inputs, counts, &[outputs]).expect_err("refused");
        assert!(error.to_string().contains(word), "{error}");
    }
    let open: Vec<_> =
        (0..executor.depth()).map(|_| executor.submit_named(&[i, s], counts, &[("mean", 80)])).collect();
    let error = executor.submit_named(&[i, s], counts, &[]).expect_err("full");
    assert!(error.to_string().contains("are in flight, which is the maximum"), "{error}");
    for step in open {
        executor.collect(step.expect("there was room"), &mut [vec![]]).expect("collected");
    }
}

/// A step whose outputs could not all be requested leaves nothing behind: a data error in the outputs that were requested
/// is not that of a later step, and the steps around it have their values.
#[test]
fn a_failed_request_of_outputs_touches_no_other_step() {
    let graph = graph();
    let (target, plan) = On::Cpu(Isa::detect(), 1).plan(&graph, true, Weights::Resident).expect("planned");
    // The arena of a card, of which several steps may be in flight.
    let target = Target { space: ArenaMemory::Device, ..target };
    let failed = [0, 1, 2, 3];
    let fine = [3, 1, 4, 2];
    let wanted = pipelined(&mut encoder(On::Cpu(Isa::detect(), 1)), &fine);
    // Each step has two outputs: the second one of step `bad` cannot be requested, and the first one has a data error.
    for (depth, bad) in [2, 3, 4].into_iter().flat_map(|depth| failed.map(|bad| (depth, bad))) {
        let plans = vec![("test".to_owned(), plan.clone())];
        let program = Program::new(target.clone(), plans, vec![]).with_pipeline_depth(depth);
        let starts = vec![2 * bad + 1];
        let completions = vec![2 * bad];
        let faults = Faults { depth, starts, completions, started: 0, completed: 0 };
        let device = HookedDevice::new(Box::new(CpuDevice::new(1)), faults);
        let mut executor = Executor::new(Box::new(device), program).expect("started");
        let mut read = |param: &plimsoll_graph::Param, range: Range<u64>, out: &mut [f32]| {
            weights(param, range, out);
            Ok(())
        };
        executor.load(0, &mut read).expect("loaded");
        let mut open = std::collections::VecDeque::new();
        let mut found = vec![];
        let mut collect = |executor: &mut Executor, step| {
            let mut outs = [vec![], vec![]];
            executor.collect(step, &mut outs).expect("not the step that failed");
            found.push(outs);
        };
        let mut errors = 0;
        for n in fine {
            // At first the failed step, then the same step again: as a session does after a lack of memory.
            loop {
                if open.len() == depth {
                    collect(&mut executor, open.pop_front().expect("full"));
                }
                match submit(&mut executor, n) {
                    Ok(step) => break open.push_back(step),
                    Err(error) => {
                        let why = std::error::Error::source(&error).map(ToString::to_string);
                        assert_eq!(why.as_deref(), Some("no copy"), "{error}");
                        errors += 1;
                        // The failed step counts as in flight as long as older steps are.
                        if open.len() + 1 == depth {
                            assert!(submit(&mut executor, n).is_err(), "depth {depth}");
                        }
                        open.drain(..).for_each(|step| collect(&mut executor, step));
                    }
                }
            }
        }
        open.into_iter().for_each(|step| collect(&mut executor, step));
        assert_eq!((errors, &found), (1, &wanted), "depth {depth}, step {bad}");
        // No output is pending: only then may a step run without `submit`.
        let (ids, spans, counts) = step(2);
        executor.input_i32(0, "ids", &ids).expect("ids");
        executor.input_i32(0, "spans", &spans).expect("spans");
        executor.run(0, counts).expect("nothing is in flight");
    }
}

#[test]
fn a_trace_has_every_launch() {
    let mut executor = encoder(On::Cpu(Isa::detect(), 2));
    let (ids, spans, counts) = step(2);
    let inputs = [("ids", Data::I32(&ids[..])), ("spans", Data::I32(&spans[..]))];
    let mut traced = |on| {
        executor.trace(on).expect("possible");
        let step = executor.submit_named(&inputs, counts, &[("mean", 80)]).expect("submitted");
        executor.collect(step, &mut [vec![]]).expect("collected");
        executor.spans().expect("spans")
    };
    let noted = traced(true);
    let none = traced(false);
    assert_eq!(none, []);
    let launches = executor.program().plans()[0].1.schedule.instrs.len();
    let on = |track| noted.iter().filter(|span| span.track == track).count();
    assert_eq!([on("in"), on("compute"), on("out")], [2, launches, 1]);
    assert!(noted.windows(2).all(|two| two[0].start + two[0].seconds <= two[1].start), "one after the other");
}

/// Steps with repeated counts, both in sequence and later, so that some steps replay a captured step, at any number of
/// in-flight steps.
#[test]
fn every_use_of_a_gpu_gives_the_same_bits() {
    if On::cuda(Precision::F32).is_none() {
        return;
    }
    let in_a_row = [(3, 1), (1, 2), (3, 12), (1, 1), (3, 5), (4, 11), (3, 6), (2, 1), (4, 6), (1, 9)];
    let graph = graph();
    let steps = in_a_row.map(|(n, times)| vec![n; times]).concat();
    let mut plain = encoder(On::Cuda(Precision::F32));
    let wanted: Vec<[Vec<f32>; 2]> = steps
        .iter()
        .map(|&n| {
            let (ids, spans, counts) = step(n);
            plain.input_i32(0, "ids", &ids).expect("ids");
            plain.input_i32(0, "spans", &spans).expect("spans");
            plain.run(0, counts).expect("run");
            let hidden = 40 * counts.tokens as usize;
            [output(&mut plain, "mean", 40 * n as usize), output(&mut plain, "hidden", hidden)]
        })
        .collect();
    for options in every_use() {
        let streamed = |from| [true, false].map(|prefetch| Weights::Streamed { from, prefetch });
        let streamed = [Space::Host, Space::File].map(streamed).concat();
        for placed in [vec![Weights::Resident], streamed].concat() {
            let mut executor = on_gpu(&graph, options, placed);
            assert_eq!(executor.depth(), options.depth);
            let found = pipelined(&mut executor, &steps);
            assert!(found == wanted, "{options:?}, {placed:?}");
        }
    }
}

/// Steps whose capture finds no memory are launched kernel by kernel.
#[test]
fn a_full_gpu_gives_the_same_bits() {
    if std::env::var_os("PLIMSOLL_FULL_GPU").is_none() {
        println!("skipped: it takes all memory of the first GPU; set PLIMSOLL_FULL_GPU to run it alone");
        return;
    }
    if On::cuda(Precision::F32).is_none() {
        return;
    }
    let graph = graph();
    let steps = [3; 24];
    let wanted = pipelined(&mut on_gpu(&graph, Options::default(), Weights::Resident), &steps);
    let mut executor = on_gpu(&graph, Options::default(), Weights::Resident);
    // A first step compiles and loads all kernels, which need memory of their own.
    pipelined(&mut executor, &[3]);
    let mut holders: Vec<CudaDevice> = vec![];
    let mut bytes = 1 << 38;
    while bytes >= 1 << 21 {
        let Ok(mut holder) = CudaDevice::new(0) else { break };
        match holder.allocate(&Allocation::arena(Bytes(bytes))) {
            Ok(()) => holders.push(holder),
            Err(_) => bytes /= 2,
        }
    }
    let free = holders.last().and_then(|holder| holder.memory().ok());
    let found = pipelined(&mut executor, &steps);
    let said = executor.note();
    println!("{free:?} free and in all; said: {said:?}");
    assert!(found == wanted);
    assert!(said.is_some(), "there was room for a record");
}

/// The error of a kernel is reported for its own step only.
#[test]
fn a_gpu_names_the_step_that_is_refused() {
    if On::cuda(Precision::F32).is_none() {
        return;
    }
    for options in every_use() {
        let mut executor = on_gpu(&graph(), options, Weights::Resident);
        for bad in [0, 1, 2, 3, 4, 5] {
            let mut refused = vec![];
            let mut open = std::collections::VecDeque::new();
            let mut collect = |executor: &mut Executor, (k, step): (usize, Submitted)| {
                if let Err(error) = executor.collect(step, &mut [vec![]]) {
                    let why = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                    assert!(why.contains("token id"), "{error}: {why}");
                    refused.push(k);
                }
            };
            for k in 0..6 {
                if open.len() == executor.depth() {
                    collect(&mut executor, open.pop_front().expect("full"));
                }
                let (mut ids, spans, counts) = step(2);
                ids[5] = if k == bad { 4000 } else { 5 };
                let inputs = [("ids", Data::I32(&ids)), ("spans", Data::I32(&spans))];
                open.push_back((
                    k,
                    executor.submit_named(&inputs, counts, &[("mean", 80)]).expect("submitted"),
                ));
            }
            open.into_iter().for_each(|step| collect(&mut executor, step));
            assert_eq!(refused, [bad], "{options:?}");
        }
    }
}

/// A graph of matmuls that take some milliseconds, longer than the copy of their input of 1 MB from the host.
fn products() -> plimsoll_graph::Graph {
    let mut g = Builder::new(Bounds { tokens: 4096, sequences: 1, longest: 4096, packs: 1 });
    let mut x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(64)], DType::F32);
    for layer in 0..40 {
        x = g.linear(x, &format!("layer{layer}"), 1024, false);
    }
    g.output("y", x);
    g.finish().expect("verified")
}

/// Rows of experts are integers: they are collected as integers, and a buffer of floats does not take them.
#[test]
fn outputs_are_collected_in_their_element_type() {
    let mut g = Builder::new(Bounds { tokens: 4, sequences: 1, longest: 4, packs: 1 });
    let logits = g.input("logits", &[Dim::Tokens(1), Dim::Fixed(3)], DType::F32);
    let route = Route { experts: 3, top_k: 1, renormalise: false, capacity: 0 };
    let outs = g.node(Op::Route(route), &[logits]);
    let rows = OutputRole::ExpertRows { layer: 0 };
    g.output("gates", outs[0]);
    g.output(&rows, outs[4]);
    // The kernel writes the other three as well.
    for (name, out) in ["chosen", "order", "places"].into_iter().zip(&outs[1..]) {
        g.output(name, *out);
    }
    let graph = g.finish().expect("verified");
    let logits = [0.0, 2.0, 1.0, 0.0, 1.0, 2.0, 0.0, 2.0, 1.0, 0.0, 4.0, 1.0];
    let counts = Counts { tokens: 4, sequences: 1, packs: 1 };
    for on in [On::Reference, On::Cpu(Isa::detect(), 1)].into_iter().chain(On::cuda(Precision::F32)) {
        let mut executor = crate::rig::bare(on, &graph, true, Weights::Resident).expect("planned");
        let inputs = [(executor.input(0, "logits").expect("an input"), Data::F32(&logits))];
        let ids =
            [executor.output(0, &rows).expect("an output"), executor.output(0, "gates").expect("an output")];
        let outputs = [(ids[0], 4), (ids[1], 4)];
        // The memory of the first step is used again.
        let mut found = [OutputValues::default(), OutputValues::zeros(DType::I32, 9)];
        for _ in 0..2 {
            let step = executor.submit(0, &inputs, counts, &outputs).expect("submitted");
            executor.collect(step, &mut found).expect("collected");
            assert_eq!(found[0], OutputValues::I32(vec![0, 0, 3, 4]), "{}", on.name());
            assert_eq!((found[0].as_f32(), found[1].as_i32()), (&[][..], &[][..]));
            assert!(found[1].as_f32().iter().all(|gate| *gate > 0.5) && found[1].as_f32().len() == 4);
        }
        let step = executor.submit(0, &inputs, counts, &outputs).expect("submitted");
        let error = executor.collect(step, &mut [vec![], vec![]]).expect_err("integers").to_string();
        assert!(error.contains("an output is in i32, which its buffer does not take"), "{error}");
    }
}

#[test]
fn a_gpu_copies_beside_its_kernels_only_in_streams_of_their_own() {
    if On::cuda(Precision::F32).is_none() {
        return;
    }
    let graph = products();
    let x = vec![0.5; 4096 * 64];
    for streams in [true, false] {
        let options = Options { streams, pinned: Some(true), ..Options::default() };
        let mut executor = on_gpu(&graph, options, Weights::Resident);
        let mut outs = [vec![]];
        let mut pass = |executor: &mut Executor, steps: usize| {
            let mut open = std::collections::VecDeque::new();
            for _ in 0..steps {
                if open.len() == executor.depth() {
                    executor.collect(open.pop_front().expect("full"), &mut outs).expect("collected");
                }
                let counts = Counts { tokens: 4096, sequences: 1, packs: 1 };
                let x = [("x", Data::F32(&x))];
                let y = [("y", 1 << 18)];
                open.push_back(executor.submit_named(&x, counts, &y).expect("submitted"));
            }
            for step in open {
                executor.collect(step, &mut outs).expect("collected");
            }
        };
        pass(&mut executor, 3);
        executor.trace(true).expect("on");
        pass(&mut executor, 6);
        let spans = executor.spans().expect("spans");
        let of = |track: &str| spans.iter().filter(|s| s.track == track).cloned().collect::<Vec<Span>>();
        let kernels = of("compute");
        let [ins, outs] = ["in", "out"].map(of);
        assert_eq!([ins.len(), outs.len()], [6, 6]);
        let beside = |copies: &[Span]| copies.iter().filter(|copy| overlap(copy, &kernels) > 0.0).count();
        let found = [beside(&ins), beside(&outs)];
        println!("streams {streams}: {found:?} copies in and out beside kernels");
        match streams {
            // The copy in before the first kernel and the copy out behind the last kernel cannot overlap with
            // kernels.
            true => assert!(found[0] >= 4 && found[1] >= 4, "{found:?}: {ins:#?} {outs:#?}"),
            false => assert_eq!(found, [0, 0], "{ins:#?} {outs:#?}"),
        }
    }
}

/// Seconds by which a span overlaps others, minus 2 microseconds, because two clocks with a resolution of half
/// a microsecond can make adjacent spans appear to overlap.
fn overlap(one: &Span, others: &[Span]) -> f64 {
    let end = |span: &Span| span.start + span.seconds;
    let shared = |other: &Span| (end(one).min(end(other)) - one.start.max(other.start)).max(0.0);
    others.iter().map(shared).sum::<f64>() - 2e-6
}
