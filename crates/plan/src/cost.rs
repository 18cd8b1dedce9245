//! Predicted execution time by the roofline model: each launch takes the longer of its arithmetic and its
//! memory traffic, multiplied by a measured slowdown of its kernel, plus a launch overhead. Invariant: no
//! tensor size is computed here.

use crate::kernels::widened;
use crate::{KernelId, Target};
use plimsoll_graph::{Counts, DType, Graph, Node, PrecisionClass, TensorSpec};

/// Predicted seconds of a step of size `counts` on `target`.
pub fn step_seconds(graph: &Graph, target: &Target, counts: Counts) -> f64 {
    graph.nodes.iter().map(|node| node_seconds(graph, node, target, counts)).sum()
}

/// Predicted seconds of one node in a step of size `counts`.
pub fn node_seconds(graph: &Graph, node: &Node, target: &Target, counts: Counts) -> f64 {
    let ins: Vec<&TensorSpec> = node.inputs.iter().map(|&v| graph.spec(v)).collect();
    let outs: Vec<&TensorSpec> = node.outputs.iter().flatten().map(|&v| graph.spec(v)).collect();
    if outs.is_empty() {
        return 0.0;
    }
    let rules = node.op.rules();
    let cost = rules.cost(&ins, &outs, &graph.bounds, counts);
    let any = |dtypes: &[DType]| ins.iter().any(|spec| dtypes.contains(&spec.dtype));
    let kernel = target.kernel_of(graph, node).ok();
    let is_widened = kernel.is_some_and(KernelId::widens);
    let rate = match rules.precision() {
        PrecisionClass::Matmul if is_widened => target.rates.f32,
        PrecisionClass::Matmul if node.op.is_tf32() => target.rates.tf32.unwrap_or(target.rates.f32),
        PrecisionClass::Matmul if any(&[DType::F8]) => target.rates.fp8.unwrap_or(target.rates.bf16),
        PrecisionClass::Matmul if any(&[DType::I8]) => target.rates.int8.unwrap_or(target.rates.bf16),
        // A training matmul may mix 16-bit operands with an f32 accumulator; the 16-bit operands decide the
        // rate.
        PrecisionClass::Matmul if any(&[DType::Bf16, DType::F16]) => target.rates.bf16,
        PrecisionClass::Matmul | PrecisionClass::Elementwise | PrecisionClass::Sensitive => target.rates.f32,
    };
    let arithmetic = cost.flops / rate;
    // Each f32 copy of an operand is written once and read once.
    let copies = if is_widened { 2.0 * widened(graph, node).0 as f64 } else { 0.0 };
    let traffic = (cost.bytes + copies) / target.rates.memory;
    let slower = kernel.and_then(|kernel| target.slower.get(kernel.name())).copied().unwrap_or(1.0);
    arithmetic.max(traffic) * slower + target.rates.launch
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::ops::Epilogue;
    use plimsoll_graph::ops::Linear;
    use plimsoll_graph::{Bounds, Builder, Dim, Op};

    /// Seconds of one linear with operands of type `dtype`.
    fn product(target: &Target, dtype: DType) -> f64 {
        let mut g = Builder::new(Bounds { tokens: 1000, sequences: 1, longest: 1000, packs: 1 });
        let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(512)], dtype);
        let w = g.input("w", &[Dim::Fixed(512), Dim::Fixed(512)], dtype);
        let y = g.one(Op::Linear(Linear::new(false, Epilogue::None)), &[x, w]);
        g.output("y", y);
        let graph = g.finish().unwrap();
        node_seconds(&graph, &graph.nodes[0], target, graph.bounds.full()) - target.rates.launch
    }

    #[test]
    fn what_was_measured_of_a_kernel_counts() {
        let mut target = Target::named("cpu").unwrap();
        let before = product(&target, DType::F32);
        target.slower.insert("product_f32".to_owned(), 2.5);
        let ratio = product(&target, DType::F32) / before;
        assert!((ratio - 2.5).abs() < 1e-9, "{ratio}");
    }

    #[test]
    fn what_a_kernel_widens_is_computed_in_f32() {
        let target = Target::named("cpu").unwrap();
        let (narrow, wide) = (product(&target, DType::Bf16), product(&target, DType::F32));
        assert!(narrow >= wide, "{narrow} {wide}");
    }
}
