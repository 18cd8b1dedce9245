//! Evaluates a graph with the reference kernels, node by node, in f64. Invariant: nothing is rounded or fused, and
//! every value is kept, so gradients can be compared with central differences of the graph's outputs.

use plimsoll_exec::reference::{Tensor, eval};
use plimsoll_graph::{Counts, Def, Graph, TensorSpec, ValueId};

/// All values of a graph in one step.
pub struct Values(Vec<Option<Tensor>>);

/// Evaluates `graph` for `counts`; `source` gives the values that exist before the step: inputs, parameters and
/// states.
pub fn evaluate(graph: &Graph, counts: Counts, mut source: impl FnMut(ValueId) -> Tensor) -> Values {
    let mut values = Values(vec![None; graph.values.len()]);
    for (id, value) in graph.values() {
        if value.def == Def::Source {
            let tensor = source(id);
            assert_eq!(tensor.shape, shape(&value.spec, counts), "source {id:?}");
            values.0[id.index()] = Some(tensor);
        }
    }
    for (id, node) in graph.nodes() {
        let ins: Vec<&Tensor> = node.inputs.iter().map(|&v| values.of(v)).collect();
        let outs: Vec<_> = node.outputs.iter().map(|o| o.map(|v| shape(graph.spec(v), counts))).collect();
        let results = eval(&node.op, &ins, &outs).unwrap_or_else(|e| panic!("{id:?} {}: {e}", node.op.name()));
        for (out, result) in node.outputs.iter().zip(results) {
            if let Some(v) = out {
                values.0[v.index()] = result;
            }
        }
    }
    values
}

impl Values {
    /// A value that has storage.
    pub fn of(&self, id: ValueId) -> &Tensor {
        self.0[id.index()].as_ref().unwrap_or_else(|| panic!("{id:?} has no value"))
    }
}

/// The shape of a tensor in a step of `counts`.
pub fn shape(spec: &TensorSpec, counts: Counts) -> Vec<usize> {
    spec.shape.iter().map(|d| d.at(counts) as usize).collect()
}
