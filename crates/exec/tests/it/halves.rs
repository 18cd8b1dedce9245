//! Op test cases with 16-bit operands, cast from f32 and back inside the graph. Invariant: the CPU, which computes in
//! f32, differs from the reference device, which computes in f64, by at most one rounding beside the case's
//! tolerance.

use crate::devices::{
    compare_codes, every_op, give, has_cuda, has_wide_heads, not_on_cpu, rows_of_codes, same_alone, shard,
};
use crate::op_cases::{Case, Operand, attention, cases};
use crate::rig::{On, bare, output, output_i32, run};
use plimsoll_cpu::Isa;
use plimsoll_exec::reference::Data;
use plimsoll_graph::ops::Cast;
use plimsoll_graph::{Builder, DType, Graph, Op, OutputRole, PrecisionClass, TensorSpec, ValueId};
use plimsoll_plan::{CpuKernel, KernelId, Precision, Weights};
use std::collections::BTreeSet;

/// Maximum elements of a case: larger cases test nothing more.
const MAX_ELEMENTS: usize = 4_000;

/// Which operands of a case are converted to `dtype`: the largest set of float operands that the op accepts in that
/// type; statistics remain f32.
fn narrowed(case: &Case, dtype: DType) -> Vec<bool> {
    let fits = |narrow: &Vec<bool>| {
        let spec = |(o, &narrow): (&Operand, &bool)| TensorSpec {
            dtype: if narrow { dtype } else { o.spec.dtype },
            ..o.spec.clone()
        };
        let specs: Vec<TensorSpec> = case.ins.iter().zip(narrow).map(spec).collect();
        case.op.rules().infer(&specs.iter().collect::<Vec<_>>(), &case.bounds).is_ok()
    };
    let subset = |mask: u32| -> Vec<bool> {
        case.ins.iter().enumerate().map(|(i, o)| (mask >> i) & 1 == 1 && o.spec.dtype.is_float()).collect()
    };
    let subsets = (0..1 << case.ins.len()).map(subset).filter(fits);
    subsets.max_by_key(|s| s.iter().filter(|&&narrow| narrow).count()).unwrap_or_default()
}

/// A graph of the op between casts.
fn graph(case: &Case, dtype: DType) -> Graph {
    let narrow = narrowed(case, dtype);
    let mut b = Builder::new(case.bounds);
    let cast = |b: &mut Builder, v: ValueId, to: DType| b.one(Op::Cast(Cast { to }), &[v]);
    let mut inputs = Vec::new();
    for (i, o) in case.ins.iter().enumerate() {
        let v = b.input(&format!("in{i}"), &o.spec.shape, o.spec.dtype);
        inputs.push(if narrow[i] { cast(&mut b, v, dtype) } else { v });
    }
    for (i, out) in b.node(case.op, &inputs).into_iter().enumerate() {
        let wide = match b.graph().spec(out).dtype {
            DType::Bf16 | DType::F16 => cast(&mut b, out, DType::F32),
            DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => out,
        };
        b.output(format!("out{i}"), wide);
    }
    b.finish().unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

fn results(on: On, case: &Case, graph: &Graph) -> Vec<Data> {
    let mut executor =
        bare(on, graph, false, Weights::Trained).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let all =
        Case { ins: case.ins.iter().map(|o| Operand { weight: false, ..o.clone() }).collect(), ..case.clone() };
    run(&mut executor, |e| give(e, &all), case.counts);
    let out = |(role, v): &(OutputRole, ValueId)| {
        let spec = graph.spec(*v);
        let elements = spec.elements_at(case.counts) as usize;
        match spec.dtype {
            DType::F32 => {
                let out = output(&mut executor, role, elements);
                Data::Float(out.into_iter().map(f64::from).collect())
            }
            DType::I32 => Data::I32(output_i32(&mut executor, role, elements)),
            DType::F8 | DType::I8 => rows_of_codes(&mut executor, &role.to_string(), spec, case.counts),
            DType::Bf16 | DType::F16 | DType::U8 => panic!("{}: {role} is {spec}", case.name),
        }
    };
    graph.outputs.iter().map(out).collect()
}

fn compare(on: On, case: &Case, dtype: DType) {
    let graph = graph(case, dtype);
    let epsilon = match dtype {
        DType::Bf16 => 2.0_f32.powi(-7),
        DType::F16 => 2.0_f32.powi(-10),
        DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => unreachable!("16 bits"),
    };
    let found = results(on, case, &graph);
    let wanted = results(On::Reference, case, &graph);
    for (i, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        let at = format!("{} in {} on {}: output {i}", case.name, dtype.name(), on.name());
        let (Data::Float(found), Data::Float(wanted)) = (found, wanted) else {
            assert_eq!(found, wanted, "{at}");
            continue;
        };
        if graph.spec(graph.outputs[i].1).dtype.is_scaled() {
            compare_codes(&at, &case.op, found, wanted);
            continue;
        }
        let limit = case.tolerance.limit(&wanted.iter().map(|&w| w as f32).collect::<Vec<_>>());
        for (j, (&f, &w)) in found.iter().zip(wanted).enumerate() {
            let close = (f - w).abs() <= f64::from(limit + epsilon * w.abs() as f32);
            assert!(close, "{at}[{j}] is {f}, not {w}");
        }
    }
}

/// Quantized states are covered by the optimizers' own tests.
#[test]
fn the_cpu_runs_cases_in_16_bits() {
    let small = |case: &&Case| case.ins.iter().map(|o| o.data.len()).sum::<usize>() <= MAX_ELEMENTS;
    let codes = |case: &Case| case.ins.iter().any(|o| o.spec.dtype == DType::U8);
    for case in cases().iter().filter(small).filter(|case| !codes(case) && !not_on_cpu(&case.op)) {
        for dtype in [DType::Bf16, DType::F16] {
            compare(On::Cpu(Isa::detect(), 2), case, dtype);
        }
    }
}

/// Whether an op has a kernel that reads bf16 directly, beside the widened one.
fn reads_bf16(op: &Op) -> bool {
    CpuKernel::ALL.iter().any(|&kernel| {
        let id = KernelId::Cpu(kernel);
        kernel.op() == op.kind() && id.dtypes() == [DType::Bf16, DType::F32] && !id.widens()
    })
}

/// Row-wise ops only: matmuls on tiles and attention have tests beside their kernels.
#[test]
fn rows_of_bf16_have_the_same_bits_on_any_cpu() {
    let rows = |case: &&Case| {
        let product = case.op.rules().precision() == PrecisionClass::Matmul;
        reads_bf16(&case.op)
            && !product
            && !not_on_cpu(&case.op)
            && case.ins.iter().map(|o| o.data.len()).sum::<usize>() <= MAX_ELEMENTS
    };
    let mut ops = BTreeSet::new();
    for case in cases().iter().filter(rows) {
        let graph = graph(case, DType::Bf16);
        let wanted = results(On::Cpu(Isa::detect(), 1), case, &graph);
        for isa in Isa::available().filter(|isa| isa.has_fma()) {
            for threads in [1, 3] {
                let found = results(On::Cpu(isa, threads), case, &graph);
                assert!(found == wanted, "{} on {} x {threads}", case.name, isa.name());
            }
        }
        compare(On::Cpu(Isa::available().last().expect("portable"), 1), case, DType::Bf16);
        ops.insert(case.op.name());
    }
    assert!(ops.len() >= 11, "only {ops:?}");
}

/// Matmuls round intermediate results to 16 bits for the tensor cores (attention its probabilities, gradients of losses
/// those of the logits), so they are compared by relative L2 error.
#[test]
fn cuda_runs_cases_in_16_bits() {
    let Some(on) = On::cuda(Precision::F32) else { return };
    let small = |case: &Case| case.ins.iter().map(|o| o.data.len()).sum::<usize>() <= MAX_ELEMENTS;
    // Quantized states are covered by the optimizers' cases in f32.
    let quantized = |case: &Case| case.ins.iter().any(|o| o.spec.dtype == DType::U8);
    // Gradients of attention have a test of their own.
    let gradient = |case: &Case| matches!(case.op, Op::AttentionGrad(_));
    // The smallest cases of wide heads are larger.
    let chosen = |case: &Case| {
        (small(case) || has_wide_heads(&case.op)) && has_cuda(&case.op) && !quantized(case) && !gradient(case)
    };
    every_op(&shard(cases().into_iter().filter(chosen).collect()), |case| {
        for dtype in [DType::Bf16, DType::F16] {
            if case.op.rules().precision() == PrecisionClass::Matmul {
                near(on, case, dtype);
            } else {
                compare(on, case, dtype);
            }
        }
    });
}

/// Gradients over many rows: other algorithms than for few rows, and several chunks of rows.
#[test]
fn cuda_sums_many_rows_in_16_bits() {
    let Some(on) = On::cuda(Precision::F32) else { return };
    let many = |case: &&Case| matches!(case.op, Op::LinearWeightGrad(_)) && case.counts.tokens > 1000;
    let cases = cases();
    assert!(cases.iter().filter(many).count() >= 2);
    for case in cases.iter().filter(many) {
        for dtype in [DType::Bf16, DType::F16] {
            near(on, case, dtype);
        }
    }
}

/// Asserts that the relative L2 error of every output is within twice the rounding of one operand. The error of a
/// logarithm is the relative error of the sum under it, so logarithms near 0 are compared with 1.
fn near(on: On, case: &Case, dtype: DType) {
    let graph = graph(case, dtype);
    let found = results(on, case, &graph);
    let wanted = results(On::Reference, case, &graph);
    let limit = if dtype == DType::Bf16 { 2f64.powi(-7) } else { 2f64.powi(-10) };
    for (i, pair) in found.iter().zip(&wanted).enumerate() {
        let (Data::Float(found), Data::Float(wanted)) = pair else { panic!("{}: output {i}", case.name) };
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let error = norm(&mut found.iter().zip(wanted).map(|(f, w)| f - w));
        let logarithm = matches!(case.op, Op::Attention(_)) && i == 1;
        let least = if logarithm { (wanted.len() as f64).sqrt() } else { 1e-3 };
        let all = norm(&mut wanted.iter().copied()).max(least);
        assert!(
            error <= limit * all,
            "{} in {}: output {i} is off by {}",
            case.name,
            dtype.name(),
            error / all
        );
    }
}

/// The gradient of attention also rounds the gradients of the scores. Its limit is that of [`near`] plus the tolerance of
/// the f32 case, since under some masks a gradient is zero but for the rounding of f32.
#[test]
fn cuda_runs_gradients_of_attention_in_16_bits() {
    let Some(on) = On::cuda(Precision::F32) else { return };
    let gradients = cases().into_iter().filter(|case| matches!(case.op, Op::AttentionGrad(_))).collect();
    for case in &shard(gradients) {
        for (dtype, rounding) in [(DType::Bf16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))] {
            let graph = graph(case, dtype);
            let found = results(on, case, &graph);
            let wanted = results(On::Reference, case, &graph);
            for (i, pair) in found.iter().zip(&wanted).enumerate() {
                let (Data::Float(found), Data::Float(wanted)) = pair else { panic!("{}", case.name) };
                let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                let error = norm(&mut found.iter().zip(wanted).map(|(f, w)| f - w));
                let exact = case.tolerance.limit(&wanted.iter().map(|&w| w as f32).collect::<Vec<_>>());
                let limit = rounding * norm(&mut wanted.iter().copied())
                    + f64::from(exact) * (wanted.len() as f64).sqrt();
                let of = format!("{} in {}: output {i}", case.name, dtype.name());
                assert!(error <= limit, "{of} is off by {error}, not {limit}");
            }
            assert!(results(on, case, &graph) == found, "{} in {}: bits differ", case.name, dtype.name());
        }
    }
}

#[test]
fn cuda_computes_attention_in_16_bits_alone_as_in_a_batch() {
    let Some(on) = On::cuda(Precision::F32) else { return };
    for case in shard(attention::wide().into_iter().chain(attention::tiles()).collect()) {
        for dtype in [DType::Bf16, DType::F16] {
            let graph = graph(&case, dtype);
            same_alone(&case, |case| results(on, case, &graph));
        }
    }
}

#[test]
fn every_op_of_floats_takes_16_bits() {
    for case in cases() {
        let floats = case.ins.iter().any(|o| o.spec.dtype.is_float());
        // Averages are f32 states of f32 values: of the master copies where parameters are 16-bit.
        let states_alone = matches!(case.op, Op::Ema(_) | Op::CountSteps(_));
        let narrows = narrowed(&case, DType::Bf16).contains(&true);
        assert!(if states_alone { !narrows } else { narrows || !floats }, "{}", case.name);
    }
}
