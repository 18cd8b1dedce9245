//! Text form of a graph, for `--dump-after` and golden tests. Invariant: equal graphs have equal text forms.

use crate::{Graph, NodeId, Role, ValueId};
use std::fmt;

/// Label of a node in ledgers and error messages: the name of the op, with the parameter or the layer that
/// distinguishes it from other nodes of the same op.
pub fn node_label(graph: &Graph, id: NodeId) -> String {
    let node = graph.node(id);
    // A matmul is labelled by its weight even if another parameter (a fused norm's gamma) precedes the weight
    // in its inputs.
    let weights = node.op.weights().iter().map(|&i| &node.inputs[i]);
    let param = weights.chain(&node.inputs).find_map(|&v| match graph.spec(v).role {
        Role::Param(p) => Some(graph.params[p.index()].name.as_str()),
        Role::Input | Role::Activation | Role::Grad | Role::State(_) | Role::Scratch => None,
    });
    match (param, node.layer) {
        (Some(name), _) => format!("{} {}", node.op.name(), name.trim_end_matches(".weight")),
        (None, Some(layer)) => format!("{} layer {layer}", node.op.name()),
        (None, None) => node.op.name().to_owned(),
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.bounds;
        writeln!(f, "graph T <= {}, S <= {}, longest <= {}", b.tokens, b.sequences, b.longest)?;
        for (name, v) in &self.inputs {
            writeln!(f, "  {v}: {} = input {name}", self.spec(*v))?;
        }
        for (v, _, param) in self.param_values() {
            write!(f, "  {v}: {} = param {}", self.spec(v), param.name)?;
            if param.pieces.len() > 1 {
                let names: Vec<&str> = param.pieces.iter().map(|p| p.tensor.as_str()).collect();
                write!(f, " ({})", names.join(", "))?;
            }
            writeln!(f)?;
        }
        for (v, _, state) in self.state_values() {
            writeln!(f, "  {v}: {} = state {}", self.spec(v), state.name)?;
        }
        for (id, _) in self.nodes() {
            writeln!(f, "  {}", node_line(self, id)?)?;
        }
        for (name, v) in &self.outputs {
            writeln!(f, "  output {name} = {v}")?;
        }
        for (state, new) in &self.updates {
            writeln!(f, "  update {state} = {new}")?;
        }
        Ok(())
    }
}

fn node_line(graph: &Graph, id: NodeId) -> Result<String, fmt::Error> {
    let node = graph.node(id);
    let outs: Vec<String> = node
        .outputs
        .iter()
        .map(|o| o.map_or_else(|| "_".to_owned(), |v| format!("{v}: {}", graph.spec(v))))
        .collect();
    let ins: Vec<String> = node.inputs.iter().map(ValueId::to_string).collect();
    // The op serializes as {"gelu":{}}; only the attributes after the name are printed, and only if there are
    // any.
    let json = serde_json::to_string(&node.op).map_err(|_| fmt::Error)?;
    let attributes = json.split_once(':').and_then(|(_, a)| a.strip_suffix('}')).filter(|a| *a != "{}");
    let mut line = format!("{} = {}", outs.join(", "), node.op.name());
    if let Some(attributes) = attributes {
        line = format!("{line} {attributes}");
    }
    line = format!("{line} {}", ins.join(", "));
    if let Some(layer) = node.layer {
        line = format!("{line}  ; layer {layer}");
    }
    Ok(line)
}
