//! Tests of targets: each plans a graph or names the missing kernel.

use crate::cases::{MEAN, attention, bounds, count, encoder, gradients, state, target, with_updates};
use plimsoll_graph::ops::{Quantize, Quantized};
use plimsoll_graph::{Builder, Bytes, DType, Dim, Layout};
use plimsoll_plan::{
    Plan, PlanError, Policy, Precision, Target, WIDEST_CPU_HEAD, WIDEST_CUDA_HEAD, Weights, compile,
};

#[test]
fn every_target_plans_or_refuses() {
    let graph = encoder("facebook/esm2_t33_650M_UR50D").graph(bounds(4096), MEAN).expect("verified");
    let mut planned = 0;
    for name in Target::names() {
        let target = Target::named(name).unwrap_or_else(|e| panic!("{e}"));
        match compile(&graph, &Policy::default(), &target) {
            Ok(plan) => {
                planned += 1;
                assert!(plan.memory.device.persistent > Bytes(2_590_000_000), "{name}");
                assert!(
                    plan.memory.slices.iter().flatten().all(|s| s.offset % target.alignment == 0),
                    "{name}"
                );
            }
            Err(PlanError::Unsupported { target, .. }) => assert_eq!(target, name),
            Err(error) => panic!("{name}: {error}"),
        }
    }
    assert!(planned >= 2, "cpu and null at least");
}

#[test]
fn an_unknown_target_lists_the_known_ones() {
    let error = Target::named("tpu").expect_err("not known").to_string();
    assert!(error.starts_with("target `tpu`: not known; known are "), "{error}");
    for name in Target::names() {
        assert!(error.contains(name), "{error} lacks {name}");
    }
}

#[test]
fn a_missing_kernel_is_named() {
    let target = Target::named("h200").expect("read");
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let y = g.one(plimsoll_graph::Op::Quantize(Quantize { of: Quantized::Rows, to: DType::I8 }), &[x]);
    g.output("y", y);
    let error = compile(&g.finish().expect("verified"), &Policy::default(), &target).expect_err("no kernel");
    assert_eq!(error.to_string(), "target `h200` has no kernel for `quantize` in f32");
    let PlanError::Unsupported { ops, target } = error else { panic!("{error}") };
    assert_eq!((ops, target.as_str()), (vec![("quantize", DType::F32)], "h200"));
}

/// Plan of attention with two heads of `head_dim` columns for a target.
fn wide_heads(head_dim: u32, policy: &Policy, target: &Target) -> Result<Plan, PlanError> {
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
    let width = u64::from(2 * head_dim);
    let [q, k, v] = ["q", "k", "v"].map(|n| g.linear(x, n, width, true));
    let o = g.one(attention(2, head_dim), &[q, k, v, spans]);
    let y = g.linear(o, "out", 8, true);
    g.output("y", y);
    compile(&g.finish().expect("verified"), policy, target)
}

/// The limit differs between CPUs and GPUs, and wider heads are refused by name.
#[test]
fn heads_are_planned_up_to_the_limit_of_the_target() {
    for (policy, trains) in [(gradients(), true), (Policy::default(), false)] {
        for (name, widest) in [("h200", WIDEST_CUDA_HEAD), ("cpu", WIDEST_CPU_HEAD)] {
            let target = target(name);
            let plan = wide_heads(widest, &policy, &target).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(count(&plan.graph, "attention_grad"), usize::from(trains), "{name}");
            let error = wide_heads(widest + 8, &policy, &target).expect_err("too wide");
            let wanted = format!("attention with heads wider than {widest} columns");
            assert!(matches!(error, PlanError::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains(&wanted), "{error}");
        }
    }
    assert_eq!((WIDEST_CUDA_HEAD, WIDEST_CPU_HEAD), (256, 128));
}

/// CPU kernels read packed weights, and only weights from a file are packed, so computed and updated weights are
/// refused.
#[test]
fn weights_that_change_cannot_be_packed() {
    let cpu = Target::named("cpu").expect("read");
    let fails = |graph: &plimsoll_graph::Graph| {
        let error = compile(graph, &Policy::default(), &cpu).expect_err("refused");
        assert!(matches!(error, PlanError::Unsupported { .. }), "{error}");
        compile(graph, &Policy::default(), &Target::named("null").expect("read")).expect("rows are fine there");
    };
    let shape = [Dim::Fixed(8), Dim::Fixed(8)];
    let linear = |g: &mut Builder, w| {
        let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
        let op = plimsoll_graph::ops::Linear::new(false, plimsoll_graph::ops::Epilogue::None);
        let y = g.one(plimsoll_graph::Op::Linear(op), &[x, w]);
        g.output("y", y);
    };
    let mut g = Builder::new(bounds(64));
    let w = g.param("w", &[8, 8]);
    linear(&mut g, w);
    let new = g.gelu(w);
    g.update(w, new);
    fails(&g.finish().expect("verified"));

    let mut g = Builder::new(bounds(64));
    let w = g.input("w", &shape, DType::F32);
    linear(&mut g, w);
    fails(&g.finish().expect("verified"));

    let mut g = Builder::new(bounds(64));
    let w = state(&mut g, "s9", &shape);
    linear(&mut g, w);
    fails(&g.finish().expect("verified"));

    // A weight that is copied into a state stays row-major, and the linear reads a packed copy.
    let mut g = Builder::new(bounds(64));
    let (w, s) = (g.param("w", &[8, 8]), state(&mut g, "s10", &shape));
    linear(&mut g, w);
    g.update(s, w);
    let plan = compile(&g.finish().expect("verified"), &Policy::default(), &cpu).expect("planned");
    assert_eq!(plan.graph.param_values().count(), 2, "{}", plan.graph);
    compile(&with_updates(), &Policy::default(), &cpu).expect("constant weights are fine beside states");
}

/// bf16 linears read weights in tiles, f32 linears in panels. The tied weight of the logits is also an embedding
/// table and therefore has a packed copy.
#[test]
fn bf16_linears_have_tiles_where_their_kernel_wants_them() {
    let cpu = Target::named("cpu").expect("read");
    let outputs = [plimsoll_models::Output::Mean, plimsoll_models::Output::Logits];
    let graph = encoder("facebook/esm2_t6_8M_UR50D").graph(bounds(64), &outputs).expect("verified");
    for (precision, dtype) in [(Precision::Bf16, DType::Bf16), (Precision::F32, DType::F32)] {
        for weights in [Weights::Resident, crate::cases::FROM_FILE] {
            let policy = Policy { precision, weights, ..Policy::default() };
            let plan = compile(&graph, &policy, &cpu).expect("planned");
            let linears =
                plan.graph.nodes.iter().filter(|node| matches!(node.op, plimsoll_graph::Op::Linear(_)));
            for spec in linears.map(|node| plan.graph.spec(node.inputs[1])) {
                let (n, k) = (spec.rows(plan.graph.bounds.full()), spec.row_elements());
                let tiles = Bytes(n.div_ceil(32) * k.div_ceil(32) * 2048);
                assert_eq!(spec.dtype, dtype);
                assert_eq!(spec.layout == Layout::Packed { rows: 32, columns: 32 }, dtype == DType::Bf16);
                assert!(dtype == DType::F32 || spec.bytes(&plan.graph.bounds) == tiles, "{spec}");
            }
        }
    }
}

/// The peak is at an instruction even if an unread input is the largest value, and the ledger contains that input.
#[test]
fn unread_inputs_are_billed() {
    let target = Target::named("cpu").expect("read");
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F16);
    g.input("unread", &[Dim::Tokens(1), Dim::Fixed(800)], DType::F16);
    let y = g.gelu(x);
    g.output("y", y);
    let plan = compile(&g.finish().expect("verified"), &Policy::default(), &target).expect("planned");
    let program = plimsoll_plan::Program::new(target, vec![("p".to_owned(), plan)], vec![]);
    let ledger = program.ledger();
    assert_eq!(ledger.total(), program.peak(), "{ledger}");
    assert_eq!(ledger.get("inputs"), Bytes(64 * 808 * 2));
    assert_eq!(ledger.get("workspace"), Bytes(2 * 64 * 8 * 4), "f32 copies of both operands");
}
