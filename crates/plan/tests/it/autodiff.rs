//! Tests of differentiation: an op without a gradient is an error that names the node, and gradients of all readers
//! are summed.

use crate::cases::{attention_block, bounds, count, defined_by, gradients, mlp, target};
use plimsoll_graph::ops::GeluGrad;
use plimsoll_graph::{Builder, DType, Dim, Graph, Op, OutputRole};
use plimsoll_plan::{AutodiffPolicy, PlanError, Policy, compile, passes};

fn differentiate(graph: &Graph) -> Result<Graph, PlanError> {
    passes::autodiff(graph, &AutodiffPolicy { outputs: vec!["y".into()] })
}

fn gradient(param: &str) -> OutputRole {
    OutputRole::Gradient { param: param.to_owned() }
}

/// Gradient ops are not differentiable: there are no second derivatives.
#[test]
fn what_has_no_gradient_is_named() {
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let y = g.linear(x, "fc", 8, true);
    let y = g.one(Op::GeluGrad(GeluGrad {}), &[y, x]);
    g.output("y", y);
    let error = differentiate(&g.finish().expect("verified")).expect_err("it has no gradient");
    assert!(matches!(error, PlanError::NotDifferentiable { .. }), "{error}");
    assert_eq!(error.to_string(), "node n1 (gelu_grad) has no gradient; freeze what lies before it");
}

/// q, k and v get gradients from one gradient op of attention.
#[test]
fn attention_has_a_gradient() {
    let graph = differentiate(&attention_block().finish().expect("verified")).expect("differentiable");
    assert_eq!((count(&graph, "attention"), count(&graph, "attention_grad")), (1, 1));
    for name in ["q", "k", "v"] {
        let grad = graph.output(gradient(&format!("{name}.weight"))).expect("a gradient");
        let dy = defined_by(&graph, grad).inputs[0];
        assert_eq!(defined_by(&graph, dy).op.name(), "attention_grad", "{name}");
    }
}

#[test]
fn unknown_outputs_are_refused() {
    let policy =
        Policy { autodiff: Some(AutodiffPolicy { outputs: vec![OutputRole::Loss] }), ..Policy::default() };
    let error = compile(&mlp(bounds(64)), &policy, &target("null")).expect_err("there is no loss");
    assert!(matches!(error, PlanError::BadPolicy { field: "autodiff", .. }), "{error}");
    assert_eq!(error.to_string(), "policy `autodiff`: there is no output `loss`");
}

#[test]
fn every_parameter_has_a_gradient_of_its_shape() {
    let graph = differentiate(&mlp(bounds(64))).expect("differentiable");
    for (v, _, param) in graph.param_values() {
        let grad = graph.output(gradient(&param.name)).unwrap_or_else(|| panic!("{}", param.name));
        assert_eq!(graph.spec(grad).shape, graph.spec(v).shape, "{}", param.name);
    }
    assert_eq!(
        graph.input("d y").map(|d| &graph.spec(d).shape),
        graph.output("y").map(|y| &graph.spec(y).shape)
    );
}

#[test]
fn tied_weights_accumulate() {
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let h = g.linear(x, "tied", 8, true);
    let h = g.gelu(h);
    let y = g.linear(h, "tied", 8, true);
    g.output("y", y);
    let graph = differentiate(&g.finish().expect("verified")).expect("differentiable");
    let grads = graph.outputs.iter().filter(|(role, _)| *role == gradient("tied.weight")).count();
    assert_eq!((grads, count(&graph, "linear_weight_grad")), (1, 2), "{graph}");
    for name in ["tied.weight", "tied.bias"] {
        let sum = defined_by(&graph, graph.output(gradient(name)).expect("a gradient"));
        assert!(matches!(sum.op, Op::Add(_)), "{graph}");
        let parts: Vec<&str> = sum.inputs.iter().map(|&v| defined_by(&graph, v).op.name()).collect();
        assert_eq!(parts, ["linear_weight_grad"; 2], "{graph}");
        assert_ne!(sum.inputs[0], sum.inputs[1]);
    }
}

/// y = h + h: each operand contributes dy, so the gradient of h is dy + dy.
#[test]
fn a_value_that_is_added_to_itself_has_twice_the_gradient() {
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let h = g.linear(x, "fc", 8, false);
    let y = g.add(h, h);
    g.output("y", y);
    let graph = differentiate(&g.finish().expect("verified")).expect("differentiable");
    let weight_grad = defined_by(&graph, graph.output(gradient("fc.weight")).expect("a gradient"));
    let sum = defined_by(&graph, weight_grad.inputs[0]);
    assert_eq!(sum.inputs, [graph.input("d y").expect("an input"); 2]);
}

#[test]
fn gradients_are_planned() {
    for name in ["null", "cpu"] {
        let plan = compile(&mlp(bounds(64)), &gradients(), &target(name)).expect("planned");
        assert_eq!(plan.graph.outputs.len(), 1 + 6, "{name}");
    }
}
