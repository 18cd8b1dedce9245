//! Tests of inference in 16 bits, TF32 and 8 bits: element types of values, ops that stay f32, and memory use.

use crate::cases::{bounds, encoder, target};
use plimsoll_graph::ops::{Linear, OperandFormat, Quantized, Relu};
use plimsoll_graph::{Builder, DType, Def, Dim, Graph, Layout, Op, Role};
use plimsoll_models::{CallerConfig, CallerTask, KNOWN, Output};
use plimsoll_plan::{Fuse, Plan, Policy, Precision, Weights, compile, passes, step_seconds};

fn typed(id: &str, precision: Precision, outputs: &[Output]) -> Graph {
    let graph = encoder(id).graph(bounds(512), outputs).expect("verified");
    let typed = passes::inference(&graph, precision).unwrap_or_else(|e| panic!("{id}: {e}"));
    typed.verify().unwrap_or_else(|e| panic!("{id}: {e}\n{typed}"));
    assert_eq!(typed.inputs, graph.inputs);
    typed
}

fn casts(graph: &Graph) -> usize {
    graph.nodes.iter().filter(|node| matches!(node.op, Op::Cast(_))).count()
}

#[test]
fn outputs_and_the_last_norm_are_f32_and_the_rest_is_narrow() {
    let all: &[Output] = &[Output::Mean, Output::Hidden];
    for (id, _) in KNOWN {
        for (precision, dtype) in [(Precision::Bf16, DType::Bf16), (Precision::Fp16, DType::F16)] {
            let g = typed(id, precision, all);
            assert!(g.outputs.iter().all(|(_, v)| g.spec(*v).dtype == DType::F32), "{id}");
            assert_eq!(casts(&g), 1, "{id}: {g}");
            let last = g.nodes.iter().rev().find(|node| matches!(node.op, Op::LayerNorm(_))).expect("a norm");
            assert_eq!(g.spec(last.inputs[0]).dtype, DType::F32, "{id}");
            for node in &g.nodes {
                let narrow =
                    matches!(node.op, Op::Linear(_) | Op::Embed(_) | Op::Add(_) | Op::Gelu(_) | Op::Glu(_));
                let out = node.outputs[0].expect("an output");
                assert!(!narrow || g.spec(out).dtype == dtype, "{id}: {}", node.op.name());
                // Parameters of norms stay f32 for operands of any type.
                let params = node.inputs.iter().filter(|&&v| matches!(g.spec(v).role, Role::Param(_)));
                for &v in params {
                    let is_matmul = matches!(node.op, Op::Linear(_) | Op::Embed(_));
                    assert_eq!(
                        g.spec(v).dtype,
                        if is_matmul { dtype } else { DType::F32 },
                        "{id}: {}",
                        node.op.name()
                    );
                }
            }
        }
    }
}

#[test]
fn f32_changes_nothing() {
    let graph = encoder(KNOWN[0].0).graph(bounds(512), &[Output::Mean]).expect("verified");
    assert_eq!(passes::inference(&graph, Precision::F32).expect("the same"), graph);
}

/// Hidden states of inner layers are output as f32, while the next layer reads them in 16 bits.
#[test]
fn inner_layers_are_cast_on_their_way_out() {
    let id = "facebook/esm2_t6_8M_UR50D";
    let g = typed(id, Precision::Bf16, &[Output::Mean, Output::HiddenOf(2), Output::Logits]);
    for (role, v) in &g.outputs {
        assert_eq!(g.spec(*v).dtype, DType::F32, "{role}");
        let Def::Node(id, _) = g.value(*v).def else { panic!("{role} is given") };
        let cast = matches!(g.node(id).op, Op::Cast(_));
        assert_eq!(cast, *role != "mean".into(), "{role}");
    }
}

/// A mean over a sequence is f32 whatever it is given, and so is what follows it: the weights there stay f32.
#[test]
fn factors_of_a_matmul_have_one_type_also_after_a_mean() {
    let task = CallerTask { name: "virus".to_owned(), classes: vec!["other".to_owned(), "virus".to_owned()] };
    let caller = CallerConfig {
        vocab_size: 66,
        hidden_size: 64,
        layers: 2,
        heads: 1,
        intermediate_size: 128,
        eps: 1e-5,
        rope_theta: 1e4,
        tasks: vec![task],
    };
    let classifier = encoder(KNOWN[0].0).classifier_graph(bounds(512), 3).expect("verified");
    for graph in [caller.graph(bounds(512)).expect("verified"), classifier] {
        for (precision, on) in [
            (Precision::Bf16, "h200"),
            (Precision::Fp16, "4090"),
            (Precision::Fp8, "h200"),
            (Precision::Bf16, "cpu"),
            (Precision::Int8, "cpu"),
        ] {
            let policy = Policy { precision, ..Policy::default() };
            let plan = compile(&graph, &policy, &target(on)).unwrap_or_else(|e| panic!("{on}: {e}"));
            for node in plan.graph.nodes.iter().filter(|node| matches!(node.op, Op::Linear(_))) {
                let [x, w] = [0, 1].map(|i| plan.graph.spec(node.inputs[i]).dtype);
                assert_eq!(x, w, "{precision:?} on {on}");
            }
        }
    }
}

#[test]
fn sixteen_bits_take_half_of_the_bytes() {
    let graph = encoder("facebook/esm2_t33_650M_UR50D").graph(bounds(4096), &[Output::Mean]).expect("verified");
    let target = target("h200");
    let of = |precision| {
        let plan = compile(&graph, &Policy { precision, ..Policy::default() }, &target).expect("planned");
        (plan.memory.device.persistent.0 as f64, plan.memory.device.transient.0 as f64)
    };
    let (wide, narrow) = (of(Precision::F32), of(Precision::Bf16));
    assert!(narrow.0 < 0.501 * wide.0 && narrow.1 < 0.75 * wide.1, "{narrow:?} of {wide:?}");
}

/// (precision, a target that supports it, type of quantized values, layout of quantized weights)
const CODES: [(Precision, &str, DType, Layout); 2] = [
    (Precision::Fp8, "h200", DType::F8, Layout::Scaled),
    (Precision::Int8, "cpu", DType::I8, Layout::Packed { rows: 32, columns: 64 }),
];

fn codes(precision: Precision, on: &str, id: &str, outputs: &[Output], fuse: bool) -> Graph {
    let graph = encoder(id).graph(bounds(512), outputs).expect("verified");
    let fuse = if fuse { Fuse::Kernels } else { Fuse::Nothing };
    let policy = Policy { precision, fuse, ..Policy::default() };
    compile(&graph, &policy, &target(on)).unwrap_or_else(|e| panic!("{id}: {e}")).graph
}

fn count(graph: &Graph, which: impl Fn(&Op) -> bool) -> usize {
    graph.nodes.iter().filter(|node| which(&node.op)).count()
}

/// Each layer has four activations that linears read. Each is quantized once, also if several linears read it, and
/// inside the op that computes it if that op is a norm, GELU or GLU.
#[test]
fn layers_read_values_that_are_quantized_once() {
    let models = [("facebook/esm2_t6_8M_UR50D", 6), ("zhihan1996/DNABERT-S", 12)];
    for ((id, layers), fuse) in models.into_iter().flat_map(|model| [(model, true), (model, false)]) {
        for (precision, on, dtype, layout) in CODES {
            let g = codes(precision, on, id, &[Output::Mean, Output::HiddenOf(2)], fuse);
            let dna = id.contains("DNA");
            let made = |of: fn(&Quantized) -> bool| count(&g, |op| matches!(op, Op::Quantize(q) if of(&q.of)));
            assert_eq!(made(|of| matches!(of, Quantized::Rows)), layers, "{id}: attention's rows\n{g}");
            // Two norms per layer in both models: the embedding norm of DNABERT-S feeds the first layer, and the norm
            // after its last layer feeds no linear.
            assert_eq!(made(|of| matches!(of, Quantized::LayerNorm(_))), 2 * layers, "{id}");
            assert_eq!(made(|of| matches!(of, Quantized::Gelu(_))), if dna { 0 } else { layers }, "{id}");
            assert_eq!(made(|of| matches!(of, Quantized::Glu(_))), if dna { layers } else { 0 }, "{id}");
            for node in g.nodes.iter().filter(|node| matches!(node.op, Op::Linear(_))) {
                let types: Vec<DType> = node.inputs.iter().map(|&v| g.spec(v).dtype).collect();
                assert_eq!(types[..2], [dtype; 2], "{id}");
                assert_eq!(
                    node.inputs[..2].iter().map(|&v| g.spec(v).layout).collect::<Vec<_>>(),
                    [Layout::Scaled, layout]
                );
                assert!(types[2..].iter().all(|&dtype| dtype == DType::Bf16), "{id}");
            }
            // In a post-LN encoder the residual add reads the unquantized norm output; in a pre-LN encoder nothing
            // does.
            let kept = g
                .nodes
                .iter()
                .filter(|n| matches!(n.op, Op::Quantize(_)) && n.outputs.get(1).is_some_and(Option::is_some));
            assert_eq!(kept.count(), if dna { 2 * layers } else { 0 }, "{id}");
            assert!(g.outputs.iter().all(|(_, v)| g.spec(*v).dtype == DType::F32), "{id}");
        }
    }
}

#[test]
fn quantized_values_take_half_of_the_bytes_again() {
    let graph = encoder("facebook/esm2_t36_3B_UR50D").graph(bounds(4096), &[Output::Mean]).expect("verified");
    for (precision, on, ..) in CODES {
        let of = |precision| {
            let policy = Policy { precision, ..Policy::default() };
            compile(&graph, &policy, &target(on)).expect("planned").memory.device.persistent.0
        };
        let (bf16, codes) = (of(Precision::Bf16), of(precision));
        assert!((codes as f64) < 0.502 * bf16 as f64, "{codes} of {bf16}");
    }
}

#[test]
fn tf32_changes_the_matmuls_and_nothing_else() {
    let graph = encoder("facebook/esm2_t6_8M_UR50D").graph(bounds(512), &[Output::Mean]).expect("verified");
    let of = |precision, name: &str| {
        compile(&graph, &Policy { precision, ..Policy::default() }, &target(name)).expect("planned")
    };
    for name in ["h200", "a100-40", "4090", "cuda", "null"] {
        let (wide, cut) = (of(Precision::F32, name), of(Precision::Tf32, name));
        assert_eq!((wide.matmul_dtype(), cut.matmul_dtype()), ("f32", "tf32"));
        assert_eq!(wide.memory, cut.memory);
        let [wide, cut] = [&wide.graph, &cut.graph];
        assert_eq!(wide.values, cut.values);
        for (before, after) in wide.nodes.iter().zip(&cut.nodes) {
            let linear = if let Op::Linear(linear) = before.op { Some(linear) } else { None };
            let cut = linear.map(|linear| Op::Linear(Linear { operands: OperandFormat::Tf32, ..linear }));
            assert_eq!(after.op, cut.unwrap_or(before.op));
        }
        // Operands appear only in the text of plans in which they are not as stored.
        assert!(cut.to_string().contains("tf32") && !wide.to_string().contains("tf32"));
    }
    let h200 = target("h200");
    let seconds = |plan: &Plan| step_seconds(&plan.graph, &h200, graph.bounds.full());
    assert!(seconds(&of(Precision::Tf32, "h200")) < seconds(&of(Precision::F32, "h200")));
}

#[test]
fn tf32_is_refused_where_it_cannot_be() {
    let graph = encoder("facebook/esm2_t6_8M_UR50D").graph(bounds(512), &[Output::Mean]).expect("verified");
    let policy = Policy { precision: Precision::Tf32, ..Policy::default() };
    let error = compile(&graph, &policy, &target("cpu")).expect_err("cpu").to_string();
    assert!(error.contains("tf32 needs TF32 matmuls, which `cpu` does not have: an NVIDIA GPU"), "{error}");
    let trained = Policy { weights: Weights::Trained, ..policy.clone() };
    compile(&graph, &trained, &target("h200")).expect("TF32 is for training, too");
    let mut g = Builder::new(bounds(4));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let y = g.one(Op::Relu(Relu {}), &[x]);
    g.output("y", y);
    let error =
        compile(&g.finish().expect("verified"), &policy, &target("h200")).expect_err("none").to_string();
    assert!(error.contains("tf32 is for linear layers, and the model has none"), "{error}");
}

#[test]
fn quantization_is_refused_where_it_cannot_be() {
    let graph = encoder("facebook/esm2_t6_8M_UR50D").graph(bounds(512), &[Output::Mean]).expect("verified");
    let policy = Policy { precision: Precision::Fp8, ..Policy::default() };
    for name in ["cpu", "a100-80", "3090"] {
        let error = compile(&graph, &policy, &target(name)).expect_err(name).to_string();
        assert!(error.contains("8.9 or later") && error.contains(name), "{error}");
    }
    let policy = Policy { precision: Precision::Int8, ..Policy::default() };
    for name in ["cuda", "h200", "3090"] {
        let error = compile(&graph, &policy, &target(name)).expect_err(name).to_string();
        assert!(error.contains("int8 needs int8 matmuls") && error.contains(name), "{error}");
    }
    for (precision, on, ..) in CODES {
        let trained = Policy { precision, weights: Weights::Trained, ..Policy::default() };
        let error = compile(&graph, &trained, &target(on)).expect_err("training").to_string();
        assert!(error.contains(&format!("{} is for inference", precision.name())), "{error}");
    }
}
