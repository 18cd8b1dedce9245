//! Reverse-mode differentiation: backward nodes behind the forward ones. Invariant: a gradient is the sum
//! over all readers, so tied weights come out right; what has no gradient is an error that names the node.

use crate::{AutodiffPolicy, PlanError};
use graph::{Builder, Graph, NodeId, Phase, Role, ValueId, Vjp, node_label};

/// The graph and its gradients, as [`AutodiffPolicy`] names them.
pub fn autodiff(graph: &Graph, policy: &AutodiffPolicy) -> Result<Graph, PlanError> {
    let wanted = depends_on_params(graph);
    let mut grads: Vec<Option<ValueId>> = vec![None; graph.values.len()];
    let mut builder = Builder::from_graph(graph.clone(), Phase::Backward);
    for name in &policy.outputs {
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
    for (id, node) in graph.nodes().collect::<Vec<_>>().into_iter().rev() {
        let out_grads: Vec<Option<ValueId>> =
            node.outputs.iter().map(|o| o.and_then(|v| grads[v.index()])).collect();
        let differentiate =
            out_grads.iter().any(Option::is_some) && node.inputs.iter().any(|v| wanted[v.index()]);
        if !differentiate {
            continue;
        }
        let in_grads = node_vjp(&mut builder, graph, id, &out_grads)?;
        for (v, grad) in node.inputs.iter().zip(in_grads) {
            if let Some(grad) = grad.filter(|_| wanted[v.index()]) {
                accumulate(&mut builder, &mut grads[v.index()], grad);
            }
        }
    }
    for (v, _, param) in graph.param_values() {
        if let Some(grad) = grads[v.index()] {
            builder.output(&format!("grad {}", param.name), grad);
        }
    }
    builder.finish().map_err(|source| PlanError::Verify { after: "autodiff", source })
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
fn depends_on_params(graph: &Graph) -> Vec<bool> {
    let mut depends: Vec<bool> = graph.values.iter().map(|v| matches!(v.spec.role, Role::Param(_))).collect();
    for node in &graph.nodes {
        if node.inputs.iter().any(|v| depends[v.index()]) {
            for v in node.outputs.iter().flatten() {
                depends[v.index()] = true;
            }
        }
    }
    depends
}
