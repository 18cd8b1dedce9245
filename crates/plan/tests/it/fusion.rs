//! Tests of fusion: inputs and outputs, the computed function, and values with other readers do not change.

use crate::cases::{MEAN, attention_block, bounds, count, encoder, state, target};
use crate::symbolic::meaning;
use plimsoll_graph::ops::{Epilogue, Prologue};
use plimsoll_graph::{Builder, DType, Dim, Graph, Node, Op, ValueId};
use plimsoll_models::{KNOWN, Output};
use plimsoll_plan::{Policy, Precision, Weights, compile, passes};

fn epilogues(graph: &Graph, wanted: Epilogue) -> usize {
    graph.nodes.iter().filter(|n| matches!(n.op, Op::Linear(l) if l.epilogue == wanted)).count()
}

fn fused(build: impl FnOnce(&mut Builder, ValueId)) -> Graph {
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    build(&mut g, x);
    let before = g.finish().expect("verified");
    let after = passes::fuse(before.clone(), Weights::Resident);
    after.verify().unwrap_or_else(|e| panic!("{e}\n{after}"));
    assert_eq!(meaning(&before), meaning(&after), "{before}{after}");
    after
}

#[test]
fn models_keep_their_interface_and_meaning() {
    for (id, _) in KNOWN.iter().filter(|(id, _)| !id.contains("15B")) {
        let graph = encoder(id).graph(bounds(512), &[Output::Mean, Output::Hidden, Output::Logits]);
        let graph = graph.expect("verified");
        for target_name in ["cpu", "null"] {
            let plan = compile(&graph, &Policy::default(), &target(target_name)).expect("planned");
            assert_eq!(meaning(&graph), meaning(&plan.graph), "{id} on {target_name}");
        }
    }
}

#[test]
fn layers_of_models_are_fused_whole() {
    let count_ops = |id: &str| {
        let graph = passes::fuse(encoder(id).graph(bounds(512), MEAN).expect("verified"), Weights::Resident);
        let linears = [Epilogue::None, Epilogue::Gelu, Epilogue::Residual].map(|e| epilogues(&graph, e));
        (linears, count(&graph, "add"), count(&graph, "gelu"), count(&graph, "attention"))
    };
    assert_eq!(count_ops("facebook/esm2_t33_650M_UR50D"), ([33, 33, 66], 0, 0, 33));
    assert_eq!(count_ops("zhihan1996/DNABERT-S"), ([24, 0, 24], 0, 0, 12));
}

#[test]
fn gates_are_fused_where_products_compute_them() {
    let plan = |target_name, precision| {
        let graph = encoder("zhihan1996/DNABERT-S").graph(bounds(512), MEAN).expect("verified");
        compile(&graph, &Policy { precision, ..Policy::default() }, &target(target_name))
            .expect("planned")
            .graph
    };
    let [with, without] = ["h200", "a100-80"].map(|name| plan(name, Precision::Bf16));
    assert_eq!((epilogues(&with, Epilogue::Gate), count(&with, "glu")), (12, 0));
    assert_eq!((epilogues(&without, Epilogue::Gate), count(&without, "glu")), (0, 12));
    assert_eq!(meaning(&with), meaning(&without));
    // With fp8 the gate is part of the quantization, which needs the maximum of a whole row.
    assert_eq!(epilogues(&plan("h200", Precision::Fp8), Epilogue::Gate), 0);
    assert_eq!(epilogues(&plan("h200", Precision::F32), Epilogue::Gate), 0);
}

#[test]
fn norms_are_fused_where_products_hold_whole_rows() {
    let fused_norms = |id: &str, name: &str, precision| {
        let graph = encoder(id).graph(bounds(512), MEAN).expect("verified");
        let target = target(name);
        let policy = Policy { precision, ..Policy::default() };
        let plan = compile(&graph, &policy, &target).expect("planned").graph;
        let with = |n: &&Node| matches!(n.op, Op::Linear(l) if l.prologue != Prologue::None);
        let apart = compile(&graph, &policy, &self::target("a100-80")).expect("planned").graph;
        assert_eq!(meaning(&plan), meaning(&apart), "{id}");
        (plan.nodes.iter().filter(with).count(), count(&plan, "layer_norm"))
    };
    let (small, large) = ("facebook/esm2_t12_35M_UR50D", "facebook/esm2_t30_150M_UR50D");
    // Both norms of each layer are fused, but not the final norm, which no linear reads.
    assert_eq!(fused_norms(small, "h200", Precision::Bf16), (24, 1));
    assert_eq!(fused_norms(small, "4090", Precision::Bf16), (0, 25));
    assert_eq!(fused_norms(small, "h200", Precision::F32), (0, 25));
    assert_eq!(fused_norms(large, "h200", Precision::Bf16), (0, 61));
}

#[test]
fn a_linear_that_is_an_output_too_stays() {
    let g = fused(|g, x| {
        let h = g.linear(x, "fc", 8, true);
        let y = g.gelu(h);
        g.output("h", h);
        g.output("y", y);
    });
    assert_eq!((epilogues(&g, Epilogue::None), count(&g, "gelu")), (1, 1), "{g}");
}

#[test]
fn a_linear_with_two_readers_stays() {
    let g = fused(|g, x| {
        let h = g.linear(x, "fc", 8, true);
        let (a, b) = (g.gelu(h), g.add(h, x));
        let twice = g.linear(x, "twice", 8, true);
        let c = g.add(twice, twice);
        for (name, v) in [("a", a), ("b", b), ("c", c)] {
            g.output(name, v);
        }
    });
    assert_eq!((count(&g, "linear"), count(&g, "gelu"), count(&g, "add")), (2, 1, 2), "{g}");
}

#[test]
fn the_new_value_of_an_update_stays() {
    let g = fused(|g, _| {
        let shape = [Dim::Fixed(2), Dim::Fixed(8)];
        let state = state(g, "s3", &shape);
        let h = g.linear(state, "fc", 8, true);
        let y = g.gelu(h);
        g.output("y", y);
        g.update(state, h);
    });
    assert_eq!((epilogues(&g, Epilogue::None), count(&g, "gelu")), (1, 1), "{g}");
}

/// If the residual is x itself, the add is fused, but y must not reuse the storage of x, which the matmul still
/// reads.
#[test]
fn a_residual_that_is_the_input_too_keeps_its_place() {
    let mut g = Builder::new(bounds(64));
    let x = g.input("in", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let x = g.gelu(x);
    let h = g.linear(x, "fc", 8, true);
    let y = g.add(x, h);
    g.output("y", y);
    let plan = compile(&g.finish().expect("verified"), &Policy::default(), &target("cpu")).expect("planned");
    let node = plan.graph.nodes.last().expect("a node");
    assert!(matches!(node.op, Op::Linear(l) if l.epilogue == Epilogue::Residual));
    assert_eq!(node.inputs[0], node.inputs[3]);
    let slice = |v: ValueId| plan.memory.slice(v).expect("a slice");
    assert!(!slice(node.inputs[0]).overlaps(&slice(node.outputs[0].expect("y"))));
}

#[test]
fn of_two_linears_the_later_one_takes_the_sum() {
    let g = fused(|g, x| {
        let (a, b) = (g.linear(x, "a", 8, true), g.linear(x, "b", 8, false));
        let y = g.add(b, a);
        g.output("y", y);
    });
    assert_eq!((epilogues(&g, Epilogue::None), epilogues(&g, Epilogue::Residual)), (1, 1), "{g}");
}

/// Fuses the attention block after `change` and returns whether the q, k and v linears were fused into one.
fn stacked(change: impl FnOnce(&mut Builder)) -> bool {
    let mut g = attention_block();
    change(&mut g);
    let before = g.finish().expect("verified");
    let after = passes::fuse(before.clone(), Weights::Resident);
    after.verify().unwrap_or_else(|e| panic!("{e}\n{after}"));
    assert_eq!(meaning(&before), meaning(&after), "{before}{after}");
    count(&after, "linear") == 2
}

#[test]
fn only_private_weights_are_put_under_each_other() {
    assert!(stacked(|_| {}));
    // Each of these prevents the fusion: another reader of a weight, a result as graph output, a bias as graph
    // output, an updated weight.
    let x = |g: &Builder| g.graph().input("x").expect("an input");
    assert!(!stacked(|g| {
        let x = x(g);
        let other = g.linear(x, "q", 8, true);
        g.output("other", other);
    }));
    assert!(!stacked(|g| {
        let q = g.graph().nodes[0].outputs[0].expect("q");
        g.output("q", q);
    }));
    assert!(!stacked(|g| {
        let bias = g.param("v.bias", &[8]);
        g.output("bias", bias);
    }));
    assert!(!stacked(|g| {
        let (k, new) = (g.param("k.weight", &[8, 8]), g.param("new", &[8, 8]));
        g.update(k, new);
    }));
}
