//! Tests of every op's gradient against central differences of the op itself, in f64, on the op test cases.
//! Invariant: every op is either compared here or listed with a reason.

use crate::evaluate::{Values, evaluate};
use crate::op_cases::{Case, cases};
use plimsoll_exec::reference::{Data, Tensor, eval};
use plimsoll_graph::{Builder, Graph, Op, Phase, ValueId, Vjp};
use std::collections::BTreeSet;

/// Ops without gradients: tables of positions, updates of parameters and states, and gradients, which are not
/// differentiated again.
const NOT_DIFFERENTIATED: [&str; 10] = [
    "rotary_table",
    "accumulate",
    "adafactor",
    "adamw",
    "adamw_8bit",
    "count_steps",
    "ema",
    "grad_scale",
    "quantize",
    "sgd",
];

/// Maximum elements of a compared case: larger cases take seconds in f64 and test nothing more.
const MAX_ELEMENTS: usize = 12_000;

/// An op, its inputs, the cotangent of output 0, and its backward nodes.
struct Backward {
    graph: Graph,
    inputs: Vec<ValueId>,
    dy: ValueId,
    grads: Vec<Option<ValueId>>,
}

/// Builds the gradient of a case; `None` if the op is not differentiable.
fn backward(case: &Case) -> Option<Backward> {
    let mut forward = Builder::new(case.bounds);
    let input = |(i, o): (usize, &crate::op_cases::Operand)| {
        forward.input(&format!("in{i}"), &o.spec.shape, o.spec.dtype)
    };
    let inputs: Vec<ValueId> = case.ins.iter().enumerate().map(input).collect();
    let outs = forward.node(case.op, &inputs);
    let mut builder = Builder::from_graph(forward.finish().expect("verified"), Phase::Backward);
    let y = builder.graph().spec(outs[0]).clone();
    let dy = builder.input("dy", &y.shape, y.dtype);
    let node = builder.graph().nodes[0].clone();
    let mut output_grads = vec![None; outs.len()];
    output_grads[0] = Some(dy);
    let mut grads = vec![None; inputs.len()];
    let mut cx =
        Vjp { builder: &mut builder, node: &node, output_grads: &output_grads, input_grads: &mut grads };
    case.op.rules().vjp(&mut cx).ok()?;
    let graph = builder.finish().unwrap_or_else(|e| panic!("{}: {e}", case.name));
    Some(Backward { graph, inputs, dy, grads })
}

/// Whether a floating-point input is constant for the op and has no gradient: running statistics, tables of positions, and
/// the target of a divergence.
fn constant(case: &Case, input: usize) -> bool {
    let first = if let Op::Attention(op) = case.op {
        op.operands() + 1
    } else if matches!(case.op, Op::BatchNorm(_) | Op::BatchNormTrain(_)) {
        3
    } else if matches!(case.op, Op::KlDivergence(_)) {
        1
    } else if matches!(case.op, Op::RotaryTable(_)) {
        0
    } else {
        return false;
    };
    input >= first
}

/// `sum dy . y` of output 0.
fn loss(case: &Case, ins: &[Tensor], dy: &[f64]) -> f64 {
    let mut outs = vec![None; case.out_shapes().len()];
    outs[0] = Some(case.out_shapes()[0].clone());
    let results = eval(&case.op, &ins.iter().collect::<Vec<_>>(), &outs);
    let results = results.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let y = results.into_iter().flatten().next().expect("output 0 was asked for");
    y.floats().expect("output 0 is floats").iter().zip(dy).map(|(y, dy)| y * dy).sum()
}

/// `n` numbers in -1..1 that differ for every `seed`.
fn noise(case: &Case, seed: usize, n: usize) -> Vec<f64> {
    let bits = case.random((seed + n) as u64).skip(seed);
    bits.map(|bits| (bits >> 11) as f64 / (1_u64 << 52) as f64 - 1.0).collect()
}

/// The derivative along a direction u: `sum grad . u` against central differences `D(h) = (f(x + h u) -
/// f(x - h u)) / 2h`, whose error of order h^2 is extrapolated away: `(4 D(h/2) - D(h)) / 3` (Richardson). The
/// rest is rounding, 1e-16 / h for each element; errors of elements add up as the root of a sum of squares.
fn compare(case: &Case, input: usize, grad: &[f64], ins: &[Tensor], dy: &[f64]) {
    const H: f64 = 2e-5;
    for direction in 0..2 {
        let u = noise(case, 7919 * (direction + 3 * input + 1), grad.len());
        let moved = |h: f64| {
            let mut ins = ins.to_vec();
            let Data::Float(x) = &mut ins[input].data else { panic!("{}: no floats", case.name) };
            x.iter_mut().zip(&u).for_each(|(x, u)| *x += h * u);
            loss(case, &ins, dy)
        };
        let difference = |h: f64| (moved(h) - moved(-h)) / (2.0 * h);
        let wanted = (4.0 * difference(0.5 * H) - difference(H)) / 3.0;
        let found: f64 = grad.iter().zip(&u).map(|(g, u)| g * u).sum();
        let size = grad.iter().zip(&u).map(|(g, u)| (g * u).powi(2)).sum::<f64>().sqrt();
        let limit = 1e-7 * (1.0 + size);
        assert!(
            (found - wanted).abs() <= limit,
            "{}, input {input}: {found}, by differences {wanted} (limit {limit})",
            case.name
        );
    }
}

/// Compares all gradients of a case, if its op has any.
fn check(case: &Case) {
    let Some(Backward { graph, inputs, dy, grads }) = backward(case) else { return };
    let ins = case.tensors();
    let cotangent = Tensor::f64(&case.out_shapes()[0], {
        let n = case.out_shapes()[0].iter().product();
        noise(case, 104_729, n)
    });
    let values: Values = evaluate(&graph, case.counts, |v| match inputs.iter().position(|&i| i == v) {
        Some(i) => ins[i].clone(),
        None if v == dy => cotangent.clone(),
        None => panic!("{}: nobody gives {v:?}", case.name),
    });
    let dy = cotangent.floats().expect("floats");
    for (i, grad) in grads.iter().enumerate() {
        let Some(grad) = grad else {
            let silent = ins[i].floats().is_none() || constant(case, i);
            assert!(silent, "{}: input {i} has no gradient", case.name);
            continue;
        };
        assert_eq!(values.of(*grad).shape, ins[i].shape, "{}: gradient of input {i}", case.name);
        compare(case, i, values.of(*grad).floats().expect("floats"), &ins, dy);
    }
}

fn small(case: &Case) -> bool {
    case.ins.iter().map(|o| o.data.len()).sum::<usize>() <= MAX_ELEMENTS
}

#[test]
fn gradients_equal_central_differences() {
    for case in cases().iter().filter(|case| small(case)) {
        check(case);
    }
}

/// Every differentiable op is among the compared cases. Another test asserts that every op has a case.
#[test]
fn every_differentiable_op_is_compared() {
    let differentiable = |case: &Case| backward(case).is_some_and(|b| b.grads.iter().any(Option::is_some));
    let cases = cases();
    let compared: BTreeSet<&str> =
        cases.iter().filter(|c| small(c) && differentiable(c)).map(|c| c.op.name()).collect();
    for name in cases.iter().map(|case| case.op.name()) {
        let terminal = name.ends_with("_grad") || NOT_DIFFERENTIATED.contains(&name);
        assert!(compared.contains(name) != terminal, "{name}: compared {}", compared.contains(name));
    }
}
