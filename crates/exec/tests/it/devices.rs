//! Runs every op test case on every device. Invariant: a device either computes an op within its tolerance, or its
//! target reports `Unsupported`.

use crate::op_cases::{Case, attention, cases, experts, linear, optimizer};
use crate::rig::{ByName, On, load_as, output, output_i32, output_u8, run};
use plimsoll_cpu::Isa;
use plimsoll_exec::Executor;
use plimsoll_exec::reference::Data;
use plimsoll_exec::scaled::QuantizedFormat;
use plimsoll_graph::ops::{Attention, AttentionGrad, Quantize, Quantized};
use plimsoll_graph::{Counts, DType, Op, Role, TensorSpec};
use plimsoll_plan::{PlanError, Precision, WIDEST_CPU_HEAD, Weights};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{self, AssertUnwindSafe};

/// The outputs of a case, floats rounded to f32; `None` where the target has no kernel.
pub fn results(on: On, case: &Case, weights: Weights) -> Option<Vec<Data>> {
    let weight = |name: &str| match &case.ins[name[2..].parse::<usize>().expect("in{i}")].data {
        Data::Float(data) => rounded(data),
        Data::I32(_) | Data::U8(_) => panic!("{}: weights are floats", case.name),
    };
    if matches!(on, On::Cpu(..) | On::CpuNarrow(..)) && not_on_cpu(&case.op) {
        return None;
    }
    let executor = load_as(on, &case.graph(), false, weights, |param, range, out| {
        out.copy_from_slice(&weight(&param.name)[range.start as usize..range.end as usize]);
    });
    let mut executor = match executor {
        Ok(executor) => executor,
        Err(PlanError::Unsupported { .. }) => return None,
        Err(error) => panic!("{}: {error}", case.name),
    };
    run(&mut executor, |e| give(e, case), case.counts);
    let outs = case.outs();
    let out = |(i, spec): (usize, &TensorSpec)| {
        let name = format!("out{i}");
        let elements = spec.elements_at(case.counts) as usize;
        match spec.dtype {
            DType::F32 => {
                let out = output(&mut executor, &name, elements);
                Data::Float(out.into_iter().map(f64::from).collect())
            }
            DType::I32 => Data::I32(output_i32(&mut executor, &name, elements)),
            DType::F8 | DType::I8 => rows_of_codes(&mut executor, &name, spec, case.counts),
            DType::U8 => Data::U8(output_u8(&mut executor, &name, elements)),
            DType::Bf16 | DType::F16 => panic!("{}: output {i} is {spec}", case.name),
        }
    };
    Some(outs.iter().enumerate().map(out).collect())
}

/// Quantization format of an element type.
fn codes(dtype: DType) -> QuantizedFormat {
    if dtype == DType::I8 { QuantizedFormat::Int8 } else { QuantizedFormat::E4m3 }
}

/// Dequantizes an output.
pub fn rows_of_codes(executor: &mut Executor, name: &str, spec: &TensorSpec, counts: Counts) -> Data {
    let bytes = output_u8(executor, name, spec.bytes_at(counts).0 as usize);
    Data::Float(codes(spec.dtype).decode(&bytes, spec.rows(counts) as usize, spec.row_elements() as usize))
}

/// Compares quantized values. They must be equal if the numbers before quantization are exact; behind
/// arithmetic, one in a few hundred may be the next representable value.
pub fn compare_codes(at: &str, op: &Op, found: &[f64], wanted: &[f64]) {
    let Op::Quantize(Quantize { of, to }) = *op else { panic!("{at} is of {}", op.name()) };
    let exact = of == Quantized::Rows;
    // The distance of adjacent e4m3 values is at most an eighth of the value, or the smallest step of the row,
    // whose values are of order 1; adjacent int8 values have a constant distance.
    let most = wanted.iter().fold(0.0, |most: f64, w| most.max(w.abs()));
    let near = |f: f64, w: f64| match codes(to) {
        QuantizedFormat::E4m3 => 0.126 * w.abs().max(f.abs()) + 1e-4,
        QuantizedFormat::Int8 => most / 126.0,
    };
    let mut apart = 0;
    for (j, (f, w)) in found.iter().zip(wanted).enumerate() {
        let differ = (f - w).abs() > if exact { 0.0 } else { 3e-5 * w.abs() };
        assert!((f - w).abs() <= near(*f, *w), "{at}[{j}] is {f}, not {w}");
        apart += usize::from(differ);
    }
    assert!(
        found.len() == wanted.len() && apart <= if exact { 0 } else { 1 + wanted.len() / 200 },
        "{at}: {apart}"
    );
}

fn rounded(data: &[f64]) -> Vec<f32> {
    data.iter().map(|&x| x as f32).collect()
}

/// Writes every operand that is not a parameter to the input `in{i}`.
pub fn give(executor: &mut Executor, case: &Case) {
    for (i, operand) in case.ins.iter().enumerate().filter(|(_, o)| !o.weight) {
        let name = format!("in{i}");
        let given = match &operand.data {
            Data::Float(data) => executor.input_f32(0, &name, &rounded(data)),
            Data::I32(data) => executor.input_i32(0, &name, data),
            Data::U8(data) => executor.input_u8(0, &name, data),
        };
        given.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    }
}

/// Asserts that a device's results equal the reference's, and returns its outputs.
fn compare(on: On, case: &Case, weights: Weights) -> Option<Vec<Data>> {
    let Some(outs) = results(on, case, weights) else {
        assert!(not_on_cpu(&case.op), "{}: {} is unsupported", on.name(), case.name);
        return None;
    };
    for (i, (found, wanted)) in outs.iter().zip(case.reference()).enumerate() {
        let at = format!("{} on {}: output {i}", case.name, on.name());
        if let Some(of) = Some(case.outs()[i].dtype).filter(|dtype| dtype.is_scaled()).map(codes) {
            let (Data::Float(found), Data::Float(numbers)) = (found, &wanted.data) else { panic!("{at}") };
            let bytes = of.encode(numbers, wanted.shape[1]);
            compare_codes(&at, &case.op, found, &of.decode(&bytes, wanted.shape[0], wanted.shape[1]));
            continue;
        }
        let Some(wanted) = wanted.rounded() else {
            assert_eq!(*found, wanted.data, "{at}");
            continue;
        };
        let Data::Float(found) = found else { panic!("{at} is no float") };
        let limit = case.tolerance.limit(&wanted);
        for (j, (&f, &w)) in found.iter().zip(&wanted).enumerate() {
            let close = (f as f32 - w).abs() <= limit;
            assert!(close, "{at}[{j}] is {f}, not {w} (limit {limit})");
        }
    }
    Some(outs)
}

/// Whether the CPU has no kernel for the op in f32: there is no quantization to e4m3, no matmul with a gate, and no
/// attention with heads wider than the CPU's limit.
pub fn not_on_cpu(op: &Op) -> bool {
    matches!(op, Op::Quantize(quantize) if quantize.to == DType::F8) || is_gate(op) || has_wide_heads(op)
}

/// Whether the op is attention, or its gradient, with heads wider than the CPU's limit.
pub fn has_wide_heads(op: &Op) -> bool {
    matches!(op, Op::Attention(Attention { head_dim, .. })
        | Op::AttentionGrad(AttentionGrad { forward: Attention { head_dim, .. } }) if *head_dim > WIDEST_CPU_HEAD)
}

fn is_gate(op: &Op) -> bool {
    matches!(op, Op::Linear(linear) if linear.epilogue.gate().is_some())
}

#[test]
fn the_reference_device_runs_every_case() {
    for case in cases() {
        compare(On::Reference, &case, Weights::Resident);
    }
}

/// Trained weights stay in row-major order instead of packed panels, and have a separate matmul kernel.
#[test]
fn the_cpu_runs_every_linear_with_weights_in_rows() {
    for on in On::every_cpu() {
        for case in cases().iter().filter(|case| matches!(case.op, Op::Linear(_))) {
            compare(on, case, Weights::Trained);
        }
    }
}

/// Runs the cases with every instruction set on one thread and on three, and checks that the bits are equal.
fn on_every_cpu(cases: &[Case]) {
    for isa in Isa::available() {
        for case in cases {
            let one = compare(On::Cpu(isa, 1), case, Weights::Resident);
            let three = results(On::Cpu(isa, 3), case, Weights::Resident);
            assert!(one == three, "{} on {}: bits differ with the threads", case.name, isa.name());
        }
    }
}

#[test]
fn the_cpu_runs_every_case_on_every_instruction_set() {
    let apart = [experts::cases(), attention::cases(), optimizer::cases()].concat();
    let others: Vec<Case> =
        cases().into_iter().filter(|case| apart.iter().all(|e| e.name != case.name)).collect();
    on_every_cpu(&others);
}

#[test]
fn the_cpu_runs_attention_on_every_instruction_set() {
    on_every_cpu(&attention::cases());
}

#[test]
fn the_cpu_runs_experts_on_every_instruction_set() {
    on_every_cpu(&experts::cases());
}

#[test]
fn the_cpu_runs_optimizers_on_every_instruction_set() {
    on_every_cpu(&optimizer::cases());
}

/// The cases that this process runs: every `N`-th from `I` on if `PLIMSOLL_TEST_SHARD` is `I/N`, else all. A sanitizer
/// makes kernels up to a hundred times slower, so `bench/sanitize.sh` spreads the cases over several processes.
pub fn shard(cases: Vec<Case>) -> Vec<Case> {
    let Ok(text) = std::env::var("PLIMSOLL_TEST_SHARD") else { return cases };
    let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
    let (i, n): (usize, usize) = numbers.filter(|(i, n)| i < n).expect("PLIMSOLL_TEST_SHARD=I/N, I below N");
    cases.into_iter().skip(i).step_by(n).collect()
}

/// Runs `check` on every case, and panics with the first failure of each op, so that one run on a GPU shows them all.
pub fn every_op(cases: &[Case], check: impl Fn(&Case)) {
    let mut failures: BTreeMap<&str, (usize, String)> = BTreeMap::new();
    for case in cases {
        let caught = panic::catch_unwind(AssertUnwindSafe(|| check(case)));
        let Err(why) = caught else { continue };
        let text =
            why.downcast_ref::<String>().cloned().or(why.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        failures.entry(case.op.name()).or_insert_with(|| (0, text.unwrap_or_default())).0 += 1;
    }
    let lines = failures.iter().map(|(op, (n, first))| format!("{op}: {n} cases fail, the first: {first}\n"));
    assert!(failures.is_empty(), "{}", lines.collect::<String>());
}

/// Every case of an op that has a CUDA kernel; bits are the same in a second run.
#[test]
fn cuda_runs_every_case() {
    let Some(on) = On::cuda(Precision::F32) else { return };
    let cases: Vec<Case> = cases().into_iter().filter(|case| has_cuda(&case.op)).collect();
    let ops: BTreeSet<&str> = cases.iter().map(|case| case.op.name()).collect();
    assert!(ops.len() >= 50, "only {ops:?}");
    every_op(&shard(cases), |case| {
        let Some(first) = compare(on, case, Weights::Resident) else { panic!("{} is unsupported", case.name) };
        assert!(results(on, case, Weights::Resident) == Some(first), "{}: bits differ", case.name);
    });
}

/// Compares each sequence's rows of all outputs in a batch with those of the sequence alone, bit by bit.
pub fn same_alone(case: &Case, results: impl Fn(&Case) -> Vec<Data>) {
    let batch = results(case);
    for sequence in 0..case.counts.sequences as usize {
        let rows = case.sequence_rows(sequence);
        let alone = case.alone(sequence);
        for (i, (all, alone)) in batch.iter().zip(results(&alone)).enumerate() {
            let same = case.rows_of(all, &rows) == alone;
            assert!(same, "{}: output {i} of sequence {sequence} has other bits alone", case.name);
        }
    }
}

#[test]
fn the_cpu_computes_attention_alone_as_in_a_batch() {
    let on = On::every_cpu()[0];
    let small = |case: &&Case| case.counts.tokens < 100 && !not_on_cpu(&case.op);
    for case in attention::cases().iter().filter(small) {
        same_alone(case, |case| results(on, case, Weights::Resident).expect("supported"));
    }
}

#[test]
fn cuda_computes_wide_heads_alone_as_in_a_batch() {
    let Some(on) = On::cuda(Precision::F32) else { return };
    for case in attention::wide() {
        same_alone(&case, |case| results(on, case, Weights::Resident).expect("supported"));
    }
}

/// Matmuls in TF32 exist on CUDA devices only: the CPU kernels reject them, and f32 is not rounded to TF32
/// unless requested.
#[test]
fn products_of_tf32_are_those_of_the_reference() {
    let cuda = On::cuda(Precision::F32);
    let cpu = On::every_cpu()[0];
    for case in linear::tf32() {
        compare(On::Reference, &case, Weights::Resident);
        assert!(!ran(load_as(cpu, &case.graph(), false, Weights::Resident, |_, _, _| {})), "{}", case.name);
        if let Some(on) = cuda {
            let first = compare(on, &case, Weights::Resident);
            assert!(results(on, &case, Weights::Resident) == first, "{}: bits differ", case.name);
        }
    }
}

fn ran(executor: Result<Executor, PlanError>) -> bool {
    match executor {
        Ok(_) => true,
        Err(PlanError::Unsupported { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Whether an op has a CUDA kernel; int8 quantization exists on the CPU only.
pub fn has_cuda(op: &Op) -> bool {
    let integers = matches!(op, Op::Quantize(quantize) if quantize.to == DType::I8);
    plimsoll_plan::CudaKernel::ALL.iter().any(|kernel| kernel.op() == op.kind()) && !integers
}

#[test]
fn weights_are_parameters() {
    for case in cases() {
        let graph = case.graph();
        let params = graph.values().filter(|(_, v)| matches!(v.spec.role, Role::Param(_))).count();
        assert_eq!(params, case.ins.iter().filter(|o| o.weight).count(), "{}", case.name);
    }
}
