//! Products of encoder layers on codes of 8 bits: weights with a scale for each output, activations with one for each
//! token. Invariant: rows are quantised once for all linears that read them, by what makes them where that has a whole
//! row at once; everything else stays as it was.

use super::{dce, push_node};
use crate::{PlanError, Precision};
use plimsoll_graph::ops::{Epilogue, Gelu, Linear, Quantize, Quantized};
use plimsoll_graph::{DType, Def, Graph, Node, Op, Role, TensorSpec, Value, ValueId};

/// The graph with the linears of its layers on the codes of `precision`; itself where that has none.
///
/// # Errors
/// [`PlanError::BadPolicy`] where it has no such linears.
pub fn codes(graph: &Graph, precision: Precision) -> Result<Graph, PlanError> {
    let Some(dtype) = precision.codes() else { return Ok(graph.clone()) };
    let chosen: Vec<bool> = graph.nodes.iter().map(|node| in_codes(graph, node)).collect();
    if !chosen.contains(&true) {
        let why = format!("{} is for the linear layers of encoders, and the model has none", precision.name());
        return Err(PlanError::BadPolicy { field: "precision", why });
    }
    let mut wanted = vec![false; graph.values.len()];
    for (node, _) in graph.nodes.iter().zip(&chosen).filter(|(_, chosen)| **chosen) {
        wanted[node.inputs[0].index()] = true;
    }
    let codes = vec![None; graph.values.len()];
    let mut pass = Pass { g: Graph { nodes: vec![], ..graph.clone() }, codes, dtype };
    for (node, &chosen) in graph.nodes.iter().zip(&chosen) {
        let mut node = node.clone();
        if chosen {
            node.inputs[0] = pass.codes[node.inputs[0].index()].expect("quantised where it was made");
            node.inputs[1] = pass.codes_of_weight(node.inputs[1]);
        }
        match node.outputs[0].filter(|v| wanted[v.index()]) {
            Some(v) => pass.quantise(node, v),
            None => push_node(&mut pass.g, node),
        }
    }
    Ok(dce(&pass.g))
}

/// Whether a node is a linear of a layer, on rows of 16 bits that another node makes and with a weight from the file.
fn in_codes(graph: &Graph, node: &Node) -> bool {
    let Op::Linear(_) = node.op else { return false };
    let [x, w] = [node.inputs[0], node.inputs[1]].map(|v| graph.value(v));
    let given = matches!((x.def, w.spec.role), (Def::Node(..), Role::Param(_)));
    given && node.layer.is_some() && (x.spec.dtype, w.spec.dtype) == (DType::Bf16, DType::Bf16)
}

/// A graph whose nodes are made anew.
struct Pass {
    g: Graph,
    /// By value of the old graph: its codes.
    codes: Vec<Option<ValueId>>,
    /// Their type.
    dtype: DType,
}

impl Pass {
    /// A node whose first output `v` is wanted as codes: by the node itself, or else by one behind it.
    fn quantise(&mut self, node: Node, v: ValueId) {
        let Node { layer, phase, .. } = node;
        let (of, inputs) = if let (Op::LayerNorm(op), [_, None, None]) = (node.op, &node.outputs[..]) {
            (Quantized::LayerNorm(op), node.inputs)
        } else if let Op::Gelu(op) = node.op {
            (Quantized::Gelu(op), node.inputs)
        } else if let Op::Glu(op) = node.op {
            (Quantized::Glu(op), node.inputs)
        } else if let Op::Linear(Linear { bias, epilogue: Epilogue::Gelu, .. }) = node.op {
            let sum = self.value(self.g.spec(v).clone());
            let op = Op::Linear(Linear::new(bias, Epilogue::None));
            push_node(&mut self.g, Node { op, outputs: vec![Some(sum)], ..node });
            (Quantized::Gelu(Gelu {}), vec![sum])
        } else {
            push_node(&mut self.g, node);
            (Quantized::Rows, vec![v])
        };
        let codes = self.value(TensorSpec::activation(self.g.spec(v).shape.clone(), self.dtype));
        self.codes[v.index()] = Some(codes);
        let y = (of != Quantized::Rows).then_some(Some(v));
        let outputs = [Some(codes)].into_iter().chain(y).collect();
        push_node(
            &mut self.g,
            Node { op: Op::Quantize(Quantize { of, to: self.dtype }), inputs, outputs, layer, phase },
        );
    }

    /// The codes of a parameter. Who else reads it keeps it as it is.
    fn codes_of_weight(&mut self, w: ValueId) -> ValueId {
        let role = self.g.spec(w).role;
        let spec = TensorSpec::activation(self.g.spec(w).shape.clone(), self.dtype).with_role(role);
        let codes = self.codes[w.index()].unwrap_or_else(|| self.value(spec));
        self.codes[w.index()] = Some(codes);
        codes
    }

    fn value(&mut self, spec: TensorSpec) -> ValueId {
        self.g.values.push(Value { spec, def: Def::Source });
        ValueId::at(self.g.values.len() - 1)
    }
}
