//! Inference in 16 bits: which values are of them, what stays f32, and what that saves.

use crate::cases::{bounds, encoder, target};
use graph::{DType, Def, Graph, Op, Role};
use models::{KNOWN, Output};
use plimsoll_plan::{Policy, Precision, compile, passes};

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
                // A norm's own parameters and positions are f32 whatever they meet.
                let params = node.inputs.iter().filter(|&&v| matches!(g.spec(v).role, Role::Param(_)));
                for &v in params {
                    let products = matches!(node.op, Op::Linear(_) | Op::Embed(_));
                    assert_eq!(
                        g.spec(v).dtype,
                        if products { dtype } else { DType::F32 },
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

/// Hidden states of inner layers leave in f32, but go on in 16 bits.
#[test]
fn inner_layers_are_cast_on_their_way_out() {
    let id = "facebook/esm2_t6_8M_UR50D";
    let g = typed(id, Precision::Bf16, &[Output::Mean, Output::HiddenOf(2), Output::Logits]);
    for (name, v) in &g.outputs {
        assert_eq!(g.spec(*v).dtype, DType::F32, "{name}");
        let Def::Node(id, _) = g.value(*v).def else { panic!("{name} is given") };
        let cast = matches!(g.node(id).op, Op::Cast(_));
        assert_eq!(cast, name != "mean", "{name}");
    }
}

#[test]
fn sixteen_bits_take_half_of_the_bytes() {
    let graph = encoder("facebook/esm2_t33_650M_UR50D").graph(bounds(4096), &[Output::Mean]).expect("verified");
    let target = target("h200");
    let of = |precision| {
        let plan = compile(&graph, &Policy { precision, ..Policy::default() }, &target).expect("planned");
        (plan.memory.persistent.0 as f64, plan.memory.transient.0 as f64)
    };
    let (wide, narrow) = (of(Precision::F32), of(Precision::Bf16));
    assert!(narrow.0 < 0.501 * wide.0 && narrow.1 < 0.75 * wide.1, "{narrow:?} of {wide:?}");
}
