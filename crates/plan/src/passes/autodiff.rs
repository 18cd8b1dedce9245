//! Reverse-mode differentiation: backward nodes behind the forward ones. Invariant: a gradient is the sum
//! over all readers, so tied weights come out right; what has no gradient is an error that names the node.

use crate::{AutodiffPolicy, PlanError};
use plimsoll_graph::{Builder, Graph, NodeId, Param, Phase, Role, ValueId, Vjp, node_label};

/// Is given every gradient of a parameter as soon as it is whole, (builder, parameter, gradient).
pub(crate) type Sink<'a> = &'a mut dyn FnMut(&mut Builder, ValueId, ValueId);

/// The graph and its gradients, as [`AutodiffPolicy`] names them.
pub fn autodiff(graph: &Graph, policy: &AutodiffPolicy) -> Result<Graph, PlanError> {
    let mut whole = vec![];
    let mut builder =
        differentiate(graph, &policy.outputs, &|_| true, &mut |_, p, grad| whole.push((p, grad)))?;
    // In the order of the parameters, not in that of their gradients.
    for (v, _, param) in graph.param_values() {
        if let Some(&(_, grad)) = whole.iter().find(|(p, _)| *p == v) {
            builder.output(&format!("grad {}", param.name), grad);
        }
    }
    builder.finish().map_err(|source| PlanError::Verify { after: "autodiff", source })
}

/// The graph with the backward nodes of `outputs` for the parameters that are `trained`. Each gradient goes
/// to `sink` right behind the node that completes it, so that whatever uses it up can follow there.
pub(crate) fn differentiate(
    graph: &Graph,
    outputs: &[String],
    trained: &dyn Fn(&Param) -> bool,
    sink: Sink<'_>,
) -> Result<Builder, PlanError> {
    let wanted = depends_on_params(graph, trained);
    let mut grads: Vec<Option<ValueId>> = vec![None; graph.values.len()];
    let mut builder = Builder::from_graph(graph.clone(), Phase::Backward);
    for name in outputs {
        let Some(y) = graph.output(name) else {
            return Err(PlanError::BadPolicy {
                field: "autodiff",
                why: format!("there is no output `{name}`"),
            });
        };
        let spec = graph.spec(y);
        let dy = builder.input(&format!("d {name}"), &spec.shape, spec.dtype);
        accumulate(&mut builder, &mut grads[y.index()], dy);
    }
    let first_reader = first_readers(graph);
    for (id, node) in graph.nodes().collect::<Vec<_>>().into_iter().rev() {
        let out_grads: Vec<Option<ValueId>> =
            node.outputs.iter().map(|o| o.and_then(|v| grads[v.index()])).collect();
        let differentiate =
            out_grads.iter().any(Option::is_some) && node.inputs.iter().any(|v| wanted[v.index()]);
        if differentiate {
            let in_grads = node_vjp(&mut builder, graph, id, &out_grads)?;
            for (v, grad) in node.inputs.iter().zip(in_grads) {
                if let Some(grad) = grad.filter(|_| wanted[v.index()]) {
                    accumulate(&mut builder, &mut grads[v.index()], grad);
                }
            }
        }
        for (k, v) in node.inputs.iter().enumerate() {
            let whole = first_reader[v.index()] == Some(id) && !node.inputs[..k].contains(v);
            if let (true, Role::Param(_), Some(grad)) = (whole, graph.spec(*v).role, grads[v.index()]) {
                sink(&mut builder, *v, grad);
            }
        }
    }
    Ok(builder)
}

fn node_vjp(
    builder: &mut Builder,
    graph: &Graph,
    id: NodeId,
    output_grads: &[Option<ValueId>],
) -> Result<Vec<Option<ValueId>>, PlanError> {
    let node = graph.node(id);
    let mut input_grads = vec![None; node.inputs.len()];
    builder.in_layer(node.layer);
    let mut cx = Vjp { builder, node, output_grads, input_grads: &mut input_grads };
    let result = node.op.rules().vjp(&mut cx);
    result.map_err(|_| PlanError::NotDifferentiable { node: id, label: node_label(graph, id) })?;
    Ok(input_grads)
}

fn accumulate(builder: &mut Builder, sum: &mut Option<ValueId>, grad: ValueId) {
    *sum = Some(match *sum {
        None => grad,
        Some(old) => builder.add(old, grad),
    });
}

/// Values through which a gradient must flow.
fn depends_on_params(graph: &Graph, trained: &dyn Fn(&Param) -> bool) -> Vec<bool> {
    let is_trained = |role: Role| match role {
        Role::Param(p) => trained(&graph.params[p.index()]),
        Role::Input | Role::Activation | Role::Grad | Role::State(_) | Role::Scratch => false,
    };
    let mut depends: Vec<bool> = graph.values.iter().map(|v| is_trained(v.spec.role)).collect();
    for node in &graph.nodes {
        if node.inputs.iter().any(|v| depends[v.index()]) {
            for v in node.outputs.iter().flatten() {
                depends[v.index()] = true;
            }
        }
    }
    depends
}

/// By value: the first node that reads it, behind whose backward nodes its gradient is whole.
fn first_readers(graph: &Graph) -> Vec<Option<NodeId>> {
    let mut first = vec![None; graph.values.len()];
    for (id, node) in graph.nodes() {
        for v in &node.inputs {
            first[v.index()].get_or_insert(id);
        }
    }
    first
}
