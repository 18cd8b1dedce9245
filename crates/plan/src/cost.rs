//! Expected time by roofline: every launch takes the longer of its arithmetic and its traffic.
//! Invariant: no size is computed here.

use crate::Target;
use graph::{Counts, DType, Graph, Node, Op, PrecisionClass, TensorSpec};

/// Expected seconds of a step of `counts` on `target`.
pub fn step_seconds(graph: &Graph, target: &Target, counts: Counts) -> f64 {
    graph.nodes.iter().map(|node| node_seconds(graph, node, target, counts)).sum()
}

/// Expected seconds of one node in a step of `counts`.
pub(crate) fn node_seconds(graph: &Graph, node: &Node, target: &Target, counts: Counts) -> f64 {
    let ins: Vec<&TensorSpec> = node.inputs.iter().map(|&v| graph.spec(v)).collect();
    let outs: Vec<&TensorSpec> = node.outputs.iter().flatten().map(|&v| graph.spec(v)).collect();
    if outs.is_empty() {
        return 0.0;
    }
    let rules = node.op.rules();
    let cost = rules.cost(&ins, &outs, &graph.bounds, counts);
    let any = |dtypes: &[DType]| ins.iter().any(|spec| dtypes.contains(&spec.dtype));
    let tf32 = matches!(node.op, Op::Linear(linear) if linear.tf32);
    let rate = match rules.precision() {
        PrecisionClass::Matmul if tf32 => target.rates.tf32.unwrap_or(target.rates.f32),
        PrecisionClass::Matmul if any(&[DType::F8]) => target.rates.fp8.unwrap_or(target.rates.bf16),
        PrecisionClass::Matmul if any(&[DType::I8]) => target.rates.int8.unwrap_or(target.rates.bf16),
        // A product of training has operands of 16 bits beside sums in f32.
        PrecisionClass::Matmul if any(&[DType::Bf16, DType::F16]) => target.rates.bf16,
        PrecisionClass::Matmul | PrecisionClass::Elementwise | PrecisionClass::Sensitive => target.rates.f32,
    };
    let arithmetic = cost.flops as f64 / rate;
    let traffic = cost.bytes as f64 / target.rates.memory;
    arithmetic.max(traffic) + target.rates.launch
}
