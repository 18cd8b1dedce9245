//! Times steps of the built-in caller by kernel, with random weights. Prints the median and the fastest step, the bases
//! per second of both, and the time of each kernel.
//!
//! `cargo run --release -p plimsoll-cpu --example caller [-- threads [precision [set [bases [tokens]]]]]`: bf16, int8 or
//! f32; amx, avx512 or avx2 (default: the best); bases of a window (500); tokens of a step (4096).

use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_exec::Executor;
use plimsoll_graph::{Bounds, Counts, Graph};
use plimsoll_models::{CallerConfig, FRAMES};
use plimsoll_plan::{Instr, InstructionSet, Plan, Policy, Precision, Program, compile};
use std::collections::BTreeMap;
use std::time::Duration;

const CONFIG: &str = include_str!("../../runtime/bundle/caller/config.json");
const STEPS: usize = 41;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, or: &str| args.get(i).map_or(or, |text| text.as_str()).to_owned();
    let threads = arg(0, "2").parse().expect("a number of threads");
    let precision = match &*arg(1, "bf16") {
        "bf16" => Precision::Bf16,
        "int8" => Precision::Int8,
        "f32" => Precision::F32,
        other => panic!("precision {other}: bf16, int8 or f32"),
    };
    let set = arg(2, "");
    let isa = Isa::available().find(|isa| set.is_empty() || isa.set().name() == set);
    let isa = isa.expect("this machine has the instruction set");
    assert!(isa.set() > InstructionSet::Portable, "vector instructions");
    let bases: u64 = arg(3, "500").parse().expect("a number of bases");
    let codons = bases / 3;
    let tokens: u64 = arg(4, "4096").parse().expect("a number of tokens");
    let windows = tokens / (FRAMES * codons);
    let bounds = Bounds { tokens: windows * FRAMES * codons, sequences: windows, longest: codons, packs: 1 };
    let graph = CallerConfig::from_json(CONFIG).expect("the built-in caller").graph(bounds).expect("a graph");
    let target = CpuDevice::target(threads, isa).expect("a target");
    let plan = compile(&graph, &Policy { precision, ..Policy::default() }, &target).expect("a plan");
    let instructions = plan.schedule.instrs.len();
    let names: Vec<String> = plan.schedule.instrs.iter().map(|i| name(&plan, i)).collect();
    let program = Program::new(target, vec![("caller".to_owned(), plan)], vec![]);
    let device = Box::new(CpuDevice::with_isa(threads, isa));
    let mut executor = Executor::new(device, program).expect("an executor");
    let mut at = 0_u64;
    let mut random = |_: &_, _, out: &mut [f32]| {
        for x in out {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *x = ((at >> 40) as f32 / (1 << 23) as f32 - 1.0) / 8.0;
        }
        Ok(())
    };
    executor.load(0, &mut random).expect("weights");
    let mut steps = vec![];
    for _ in 0..STEPS {
        // Before every step, because later values of a step may occupy the memory of its inputs.
        let counts = inputs(&mut executor, windows, codons);
        let mut times = vec![Duration::ZERO; instructions];
        executor.run_timed(0, counts, &mut times).expect("a step");
        steps.push(times);
    }
    // The first step writes to memory that the process has not touched yet.
    steps.remove(0);
    let total = |step: &Vec<Duration>| step.iter().sum::<Duration>();
    steps.sort_by_key(total);
    let bases = (windows * bases) as f64;
    for (what, step) in [("fastest", &steps[0]), ("median", &steps[steps.len() / 2])] {
        let seconds = total(step).as_secs_f64();
        println!("{what}: {:.2} ms, {:.1} kb/s", 1e3 * seconds, bases / seconds / 1e3);
    }
    // Each kernel by its own fastest time: on a shared machine the time that is least disturbed.
    let mut kernels: BTreeMap<&str, (u32, Duration)> = BTreeMap::new();
    for (i, name) in names.iter().enumerate() {
        let fastest = steps.iter().map(|step| step[i]).min().unwrap_or_default();
        let (count, time) = kernels.entry(name).or_default();
        *count += 1;
        *time += fastest;
    }
    let sum: Duration = kernels.values().map(|(_, time)| *time).sum();
    println!(
        "sum of the fastest: {:.2} ms, {:.1} kb/s",
        1e3 * sum.as_secs_f64(),
        bases / sum.as_secs_f64() / 1e3
    );
    let mut kernels: Vec<_> = kernels.into_iter().collect();
    kernels.sort_by_key(|(_, (_, time))| std::cmp::Reverse(*time));
    for (name, (count, time)) in kernels {
        let share = 100.0 * time.as_secs_f64() / sum.as_secs_f64();
        println!("{share:5.1} %  {count:3} x {:8.1} us  {name}", 1e6 * time.as_secs_f64() / f64::from(count));
    }
}

/// Writes the inputs of a step of `windows` windows; returns its counts.
fn inputs(executor: &mut Executor, windows: u64, codons: u64) -> Counts {
    let tokens = windows * FRAMES * codons;
    let ids: Vec<i32> = (0..tokens).map(|i| (i * 7919 % 64) as i32).collect();
    let spans = |length: u64| -> Vec<i32> {
        (0..tokens / length).flat_map(|i| [(i * length) as i32, ((i + 1) * length) as i32]).collect()
    };
    let input = |executor: &Executor, name| executor.input(0, name).expect("an input of the caller");
    executor.write_i32(input(executor, "ids"), &ids).expect("ids");
    executor.write_i32(input(executor, "spans"), &spans(FRAMES * codons)).expect("spans");
    executor.write_i32(input(executor, "frames"), &spans(codons)).expect("frames");
    Counts { tokens, sequences: windows, packs: 1 }
}

/// Kernel, operands and parameters of an instruction, layers together.
fn name(plan: &Plan, instruction: &Instr) -> String {
    let Instr::Launch(id) = *instruction else { return "load or copy".to_owned() };
    let (graph, node): (&Graph, _) = (&plan.graph, plan.graph.node(id));
    let shape = |v: &plimsoll_graph::ValueId| graph.spec(*v).to_string();
    let outs: Vec<String> = node.outputs.iter().flatten().map(shape).collect();
    let ins: Vec<String> = node.inputs.iter().map(shape).collect();
    format!("{} {} -> {}", plan.kernels[id.index()].name(), ins.join(" "), outs.join(" "))
}
