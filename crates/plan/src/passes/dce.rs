//! Dead-code elimination: removes unread nodes, values, parameters and states. An unread output of a node that is
//! needed for another output becomes `None`. Invariant: all inputs, outputs and updates of the graph remain, in their
//! order, and the order of the remaining nodes does not change.

use plimsoll_graph::{Def, Graph, Node, NodeId, Op, ParamId, Phase, Role, StateId, Value, ValueId};

/// Returns the graph without dead code.
pub fn dce(graph: &Graph) -> Graph {
    let (nodes, values) = needed(graph);
    let mut new = Graph::new(graph.bounds);
    let mut renamed: Vec<Option<ValueId>> = vec![None; graph.values.len()];
    for (id, value) in graph.values().filter(|(id, v)| v.def == Def::Source && values[id.index()]) {
        let mut value: Value = value.clone();
        if let Role::Param(p) = value.spec.role {
            value.spec.role = Role::Param(ParamId::at(new.params.len()));
            new.params.push(graph.params[p.index()].clone());
        }
        if let Role::State(s) = value.spec.role {
            value.spec.role = Role::State(StateId::at(new.states.len()));
            new.states.push(graph.states[s.index()].clone());
        }
        renamed[id.index()] = Some(push(&mut new, value));
    }
    for (_, node) in graph.nodes().filter(|(id, _)| nodes[id.index()]) {
        rebuild(graph, node, &values, &mut renamed, &mut new);
    }
    new.inputs = graph.inputs.iter().map(|(name, v)| (name.clone(), new_id(&renamed, *v))).collect();
    new.outputs = graph.outputs.iter().map(|(role, v)| (role.clone(), new_id(&renamed, *v))).collect();
    new.updates = graph.updates.iter().map(|&(s, n)| (new_id(&renamed, s), new_id(&renamed, n))).collect();
    new
}

/// Id in the new graph of a value that is not removed.
fn new_id(renamed: &[Option<ValueId>], v: ValueId) -> ValueId {
    renamed[v.index()].expect("what is read was kept")
}

/// Marks the needed nodes and values, walking backwards from the inputs, outputs and updates of the graph.
///
/// In a graph with gradients every attention also outputs its lse. Without recomputation the gradient reads it; with
/// recomputation the forward node's is unread. A device may compute attention without lse by a kernel of other bits, as
/// the CPU does in bf16, and recomputation must not change bits.
fn needed(graph: &Graph) -> (Vec<bool>, Vec<bool>) {
    let trains = graph.nodes.iter().any(|node| node.phase == Phase::Backward);
    let mut nodes = vec![false; graph.nodes.len()];
    let mut values = vec![false; graph.values.len()];
    let interface = graph.inputs.iter().map(|(_, v)| *v).chain(graph.outputs.iter().map(|(_, v)| *v));
    let updates = graph.updates.iter().flat_map(|&(s, n)| [s, n]);
    for v in interface.chain(updates) {
        values[v.index()] = true;
    }
    for (i, node) in graph.nodes.iter().enumerate().rev() {
        if node.outputs.iter().flatten().any(|v| values[v.index()]) {
            nodes[i] = true;
            let lse = node.outputs.iter().flatten().filter(|_| trains && matches!(node.op, Op::Attention(_)));
            for v in node.inputs.iter().chain(lse) {
                values[v.index()] = true;
            }
        }
    }
    (nodes, values)
}

/// Appends a needed node to `new`, with its values renamed and its unread outputs set to `None`.
fn rebuild(graph: &Graph, node: &Node, values: &[bool], renamed: &mut [Option<ValueId>], new: &mut Graph) {
    let id = NodeId::at(new.nodes.len());
    let inputs: Vec<ValueId> =
        node.inputs.iter().map(|v| renamed[v.index()].expect("defined before it is read")).collect();
    let mut outputs = vec![];
    for (i, out) in node.outputs.iter().enumerate() {
        outputs.push(out.filter(|v| values[v.index()]).map(|v| {
            let mut spec = graph.spec(v).clone();
            // A copy or part of a parameter or state has the role of its operand, whose number may be another one here.
            if matches!(spec.role, Role::Param(_) | Role::State(_))
                && let Some(&operand) = inputs.first()
            {
                spec.role = new.spec(operand).role;
            }
            let value = Value { spec, def: Def::Node(id, i as u32) };
            let new_v = push(new, value);
            renamed[v.index()] = Some(new_v);
            new_v
        }));
    }
    new.nodes.push(Node { inputs, outputs, ..node.clone() });
}

fn push(graph: &mut Graph, value: Value) -> ValueId {
    let id = ValueId::at(graph.values.len());
    graph.values.push(value);
    id
}
