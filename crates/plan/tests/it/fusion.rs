//! Tests of fusion in whole models: which ops are fused for which target, and that the computed function does not
//! change. What must not be fused stands in `tests/filetests/{fuse,gates,norms,mlp}`.

use crate::cases::{MEAN, bounds, count, encoder, target};
use crate::symbolic::meaning;
use plimsoll_graph::ops::{Epilogue, Prologue};
use plimsoll_graph::{Graph, Node, Op};
use plimsoll_models::{KNOWN, Output};
use plimsoll_plan::{InstructionSet, Kernels, Policy, Precision, Target, Weights, compile, passes};

fn epilogues(graph: &Graph, wanted: Epilogue) -> usize {
    graph.nodes.iter().filter(|n| matches!(n.op, Op::Linear(l) if l.epilogue == wanted)).count()
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
fn gates_are_fused_where_matmuls_compute_them() {
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
    // On AMX too, but not where matmuls in 16 bits have other kernels.
    let on_cpu = |set| {
        let cpu = Target { kernels: Kernels::Cpu(set), ..target("cpu") };
        let graph = encoder("zhihan1996/DNABERT-S").graph(bounds(512), MEAN).expect("verified");
        compile(&graph, &Policy { precision: Precision::Bf16, ..Policy::default() }, &cpu)
            .expect("planned")
            .graph
    };
    let [with, without] = [InstructionSet::Amx, InstructionSet::Avx512].map(on_cpu);
    assert_eq!((epilogues(&with, Epilogue::Gate), count(&with, "glu")), (12, 0));
    assert_eq!((epilogues(&without, Epilogue::Gate), count(&without, "glu")), (0, 12));
    assert_eq!(meaning(&with), meaning(&without));
    // With fp8 the gate is part of the quantization, which needs the maximum of a whole row.
    assert_eq!(epilogues(&plan("h200", Precision::Fp8), Epilogue::Gate), 0);
    assert_eq!(epilogues(&plan("h200", Precision::F32), Epilogue::Gate), 0);
}

#[test]
fn norms_are_fused_where_matmuls_hold_whole_rows() {
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
