//! Times bf16 encoders with MLPs fused into one op against the encoders with separate ops. Both run through
//! their plans, taking turns in one process. Prints medians, the time of the ops of a step, and the peak memory
//! of both plans.
//!
//! `cargo run --release -p plimsoll-cpu --example encoders [-- threads [turns [model]]]`

use plimsoll_cpu::{Cpu, CpuDevice, Isa, peak};
use plimsoll_exec::Executor;
use plimsoll_graph::{Bounds, Counts};
use plimsoll_models::Output;
use plimsoll_plan::{Fuse, Instr, Policy, Precision, Program, Target, compile};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default| args.next().and_then(|a| a.parse().ok()).unwrap_or(default);
    let (threads, turns) = (number(2), number(9));
    let only = std::env::args().nth(3).unwrap_or_default();
    for (id, sequences, length) in [
        ("facebook/esm2_t6_8M_UR50D", 24, 168),
        ("facebook/esm2_t12_35M_UR50D", 24, 168),
        ("facebook/esm2_t30_150M_UR50D", 24, 168),
        ("facebook/esm2_t33_650M_UR50D", 8, 512),
        ("zhihan1996/DNABERT-S", 32, 126),
    ] {
        if id.contains(&only) {
            compare(id, (sequences, length), threads, turns);
        }
    }
}

/// Times steps of `sequences` sequences of `length` tokens.
fn compare(id: &str, (sequences, length): (u64, u64), threads: usize, turns: usize) {
    let bounds = Bounds { tokens: sequences * length, sequences, longest: length };
    let counts = Counts { tokens: bounds.tokens, sequences };
    let target = CpuDevice::target(threads, Isa::detect()).expect("read");
    let mut sides = [Fuse::Ops, Fuse::Kernels].map(|fuse| executor(id, bounds, fuse, &target, threads));
    let peaks = [0, 1].map(|i: usize| sides[i].program().peak());
    let [mut seconds, mut ratios] = [vec![], vec![]];
    let mut times =
        sides.each_ref().map(|e| vec![Duration::ZERO; e.program().plans()[0].1.schedule.instrs.len()]);
    let raw = Cpu::new(threads);
    let mut rates = vec![];
    for turn in 0..turns + 1 {
        rates.push(peak::amx_gflops(&raw, peak::Factors::Bf16, 0.01).unwrap_or_default());
        let took = [0, 1].map(|i| {
            give(&mut sides[i], bounds);
            let start = Instant::now();
            sides[i].run(0, counts).expect("run");
            start.elapsed().as_secs_f64()
        });
        if turn > 0 {
            seconds.push(took[1]);
            ratios.push(took[0] / took[1]);
            for (side, times) in sides.iter_mut().zip(&mut times) {
                give(side, bounds);
                side.run_timed(0, counts, times).expect("timed");
            }
        }
    }
    let (ours, ratio) = (median(seconds), median(ratios));
    println!(
        "{id}: {:.0} tokens/s with MLPs as one op, {ratio:.3} times those in parts (raw {:.0} GFLOP/s); peak {} for {}",
        bounds.tokens as f64 / ours,
        median(rates),
        peaks[1],
        peaks[0]
    );
    for (side, times) in sides.iter().zip(&times) {
        println!("  {}", by_op(side, times, turns));
    }
}

fn executor(id: &str, bounds: Bounds, fuse: Fuse, target: &Target, threads: usize) -> Executor {
    let graph = plimsoll_models::known(id).expect("known").graph(bounds, &[Output::Mean]).expect("verified");
    let policy = Policy { precision: Precision::Bf16, fuse, ..Policy::default() };
    let plan = compile(&graph, &policy, target).expect("planned");
    let program = Program::new(target.clone(), vec![("encoder".to_owned(), plan)], vec![]);
    let mut executor = Executor::new(Box::new(CpuDevice::new(threads)), program).expect("opened");
    let mut read = |_: &plimsoll_graph::Param, range: std::ops::Range<u64>, out: &mut [f32]| {
        for (i, x) in range.zip(out) {
            *x = ((i * 7919 + 13) % 2003) as f32 / 40_060.0 - 0.025;
        }
        Ok(())
    };
    executor.load(0, &mut read).expect("loaded");
    executor
}

/// Writes the inputs. Needed before every run, because inputs share their memory with values that are computed
/// later in the step.
fn give(executor: &mut Executor, bounds: Bounds) {
    let (tokens, length) = (bounds.tokens as i32, bounds.longest as i32);
    let ids: Vec<i32> = (0..tokens).map(|i| 4 + i * 7 % 20).collect();
    let spans: Vec<i32> = (0..bounds.sequences as i32).flat_map(|s| [s * length, (s + 1) * length]).collect();
    executor.write_i32(executor.input(0, "ids").expect("an input"), &ids).expect("ids");
    executor.write_i32(executor.input(0, "spans").expect("an input"), &spans).expect("spans");
}

/// Milliseconds per step for each kind of op, the seven longest first.
fn by_op(executor: &Executor, times: &[Duration], turns: usize) -> String {
    let plan = &executor.program().plans()[0].1;
    let mut sums: BTreeMap<String, (f64, u64)> = BTreeMap::new();
    for (instr, time) in plan.schedule.instrs.iter().zip(times) {
        let Instr::Launch(id) = *instr else { continue };
        let node = plan.graph.node(id);
        let [from, to] =
            [node.inputs[0], node.outputs.iter().flatten().next().copied().unwrap_or(node.inputs[0])]
                .map(|v| plan.graph.spec(v).row_elements());
        let sum = sums.entry(format!("{} {from} -> {to}", node.op.name())).or_default();
        *sum = (sum.0 + time.as_secs_f64() * 1e3 / turns as f64, sum.1 + 1);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    let lines = sums.iter().take(7).map(|(op, (ms, n))| format!("{op}: {ms:.1} ms ({n})"));
    lines.collect::<Vec<_>>().join(", ")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
