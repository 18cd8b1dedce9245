//! Memory of attention in plans with gradients. Invariant: bytes grow linearly with the number of tokens, never
//! quadratically.

use crate::cases::{gradients, target};
use plimsoll_graph::ops::{Attention, Bias, Mask, Qkv};
use plimsoll_graph::{Bounds, Builder, DType, Dim, Op};
use plimsoll_plan::{Plan, Slice, compile};

/// Plan of q, k and v linears, attention and an output linear over one sequence of `tokens` tokens, with all
/// gradients.
fn plan(mask: Mask, kv_heads: u32, tokens: u64) -> Plan {
    let mut g = Builder::new(Bounds { tokens, sequences: 1, longest: tokens, packs: 1 });
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(32)], DType::F32);
    let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
    let op = Attention {
        heads: 4,
        kv_heads,
        head_dim: 8,
        scale: 0.5,
        mask,
        bias: Bias::Alibi,
        rotary: false,
        qkv: Qkv::Separate,
    };
    let [q, k, v] =
        [("q", op.width()), ("k", op.kv_width()), ("v", op.kv_width())].map(|(n, c)| g.linear(x, n, c, true));
    let o = g.one(Op::Attention(op), &[q, k, v, spans]);
    let y = g.linear(o, "out", 8, true);
    g.output("y", y);
    compile(&g.finish().expect("verified"), &gradients(), &target("cpu")).expect("planned")
}

#[test]
fn no_slice_grows_with_the_square_of_a_sequence() {
    let sparse = Mask::BlockSparse { block: 64, local: 2, global: 1 };
    for mask in [Mask::Full, Mask::Causal, Mask::Window(128), sparse] {
        for kv_heads in [4, 1] {
            let [short, long] = [4096, 8192].map(|tokens| plan(mask, kv_heads, tokens));
            let bytes = |slices: &[Option<Slice>]| -> Vec<u64> {
                slices.iter().map(|slice| slice.map_or(0, |slice| slice.bytes.0)).collect()
            };
            let [values, more] = [&short, &long].map(|plan| bytes(&plan.memory.slices));
            assert!(values.iter().zip(&more).all(|(a, b)| *b <= 2 * a), "{mask:?}: {values:?}, {more:?}");
            let kernels = |plan: &Plan| -> Vec<u64> {
                let nodes = plan.graph.nodes.iter().zip(bytes(&plan.memory.workspaces));
                nodes.filter(|(node, _)| node.op.name().starts_with("attention")).map(|(_, b)| b).collect()
            };
            assert_eq!(kernels(&short).len(), 2);
            assert_eq!(kernels(&short), kernels(&long), "{mask:?}");
        }
    }
}
