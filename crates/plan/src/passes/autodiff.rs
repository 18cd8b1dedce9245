//! Reverse-mode automatic differentiation: appends the backward nodes to the forward graph. Invariant: the gradient
//! of a value is the sum over all of its readers, which makes tied weights correct; an op without a gradient is an
//! error that names the node.

use crate::{AutodiffPolicy, PlanError};
use plimsoll_graph::{Builder, Graph, NodeId, OutputRole, Param, Phase, Role, ValueId, Vjp, node_label};

/// Callback `(builder, parameter, gradient)`, called for each trained parameter as soon as its gradient is complete.
pub(crate) type OnGradient<'a> = &'a mut dyn FnMut(&mut Builder, ValueId, ValueId);

/// Name of the input that is the cotangent of an output: the gradient with respect to it.
pub fn cotangent(output: &OutputRole) -> String {
    format!("d {output}")
}

/// Returns the graph with its backward nodes. The inputs and outputs that this adds are named in [`AutodiffPolicy`].
pub fn autodiff(graph: &Graph, policy: &AutodiffPolicy) -> Result<Graph, PlanError> {
    let mut gradients = vec![];
    let mut builder =
        differentiate(graph, &policy.outputs, &|_| true, &mut |_, p, grad| gradients.push((p, grad)))?;
    // Gradients are complete in the reverse order of use; outputs are declared in the order of the parameters.
    for (v, _, param) in graph.param_values() {
        if let Some(&(_, grad)) = gradients.iter().find(|(p, _)| *p == v) {
            builder.output(OutputRole::Gradient { param: param.name.clone() }, grad);
        }
    }
    builder.finish().map_err(|source| PlanError::of_graph("autodiff", source))
}

/// Returns a builder of the graph with the backward nodes of `outputs`, for the parameters for which `trained` is
/// true. `on_gradient` is called immediately after the node that completes a gradient, so that the nodes it appends can
/// consume the gradient there and its memory is free for later ones.
pub(crate) fn differentiate(
    graph: &Graph,
    outputs: &[OutputRole],
    trained: &dyn Fn(&Param) -> bool,
    on_gradient: OnGradient<'_>,
) -> Result<Builder, PlanError> {
    let wanted = depends_on_params(graph, trained);
    let mut grads: Vec<Option<ValueId>> = vec![None; graph.values.len()];
    let mut builder = Builder::from_graph(graph.clone(), Phase::Backward);
    for role in outputs {
        let Some(y) = graph.output(role) else {
            return Err(PlanError::BadPolicy {
                field: "autodiff",
                why: format!("there is no output `{role}`"),
            });
        };
        let spec = graph.spec(y);
        let dy = builder.input(&cotangent(role), &spec.shape, spec.dtype);
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
            // Nodes are visited in reverse, so the first reader comes last. A parameter that the node reads
            // twice is passed on once, or it would be updated twice.
            let is_complete = first_reader[v.index()] == Some(id) && !node.inputs[..k].contains(v);
            if let (true, Role::Param(_), Some(grad)) = (is_complete, graph.spec(*v).role, grads[v.index()]) {
                on_gradient(&mut builder, *v, grad);
            }
        }
    }
    Ok(builder)
}

/// Appends the vector-Jacobian product of a node and returns the gradient of each of its inputs; `None` for an input
/// that has no gradient.
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

/// Adds `grad` to the sum of the gradients of a value.
fn accumulate(builder: &mut Builder, sum: &mut Option<ValueId>, grad: ValueId) {
    *sum = Some(match *sum {
        None => grad,
        Some(old) => builder.add(old, grad),
    });
}

/// Whether each value depends on a trained parameter, and therefore needs a gradient. Indexed by value.
fn depends_on_params(graph: &Graph, trained: &dyn Fn(&Param) -> bool) -> Vec<bool> {
    let mut depends = vec![];
    for value in &graph.values {
        depends.push(match value.spec.role {
            Role::Param(p) => trained(&graph.params[p.index()]),
            Role::Input | Role::Activation | Role::Grad | Role::State(_) => false,
        });
    }
    for node in &graph.nodes {
        if node.inputs.iter().any(|v| depends[v.index()]) {
            for v in node.outputs.iter().flatten() {
                depends[v.index()] = true;
            }
        }
    }
    depends
}

/// First node that reads each value, indexed by value. Backward nodes are appended in the reverse order of the
/// forward nodes, so the gradient of a value is complete after the backward nodes of its first reader.
fn first_readers(graph: &Graph) -> Vec<Option<NodeId>> {
    let mut first = vec![None; graph.values.len()];
    for (id, node) in graph.nodes() {
        for v in &node.inputs {
            first[v.index()].get_or_insert(id);
        }
    }
    first
}
