//! Graphs and plans shared by several tests. Invariant: equal arguments give equal graphs.

use plimsoll_graph::ops::{Attention, Bias, Mask, Qkv};
use plimsoll_graph::{Bounds, Builder, DType, Dim, Graph, Op, Space, StateDef, StateRole, ValueId};
use plimsoll_models::{Encoder, Output};
use plimsoll_plan::{
    AutodiffPolicy, Bill, MemoryPlan, Plan, PlanError, Policy, Program, Target, Weights, compile,
};

pub const MEAN: &[Output] = &[Output::Mean];

/// Bounds with `tokens` tokens, one sequence per 64 tokens, and sequences of at most 1024 tokens.
pub fn bounds(tokens: u64) -> Bounds {
    Bounds { tokens, sequences: (tokens / 64).max(1), longest: tokens.min(1024), packs: 1 }
}

/// Returns the bill of a refused program; panics on any other result.
pub fn bill(result: Result<Program, PlanError>) -> Bill {
    match result {
        Err(PlanError::OverBudget(bill)) => *bill,
        Err(error) => panic!("{error}"),
        Ok(program) => panic!("it fits with {}", program.peak()),
    }
}

pub fn encoder(id: &str) -> Encoder {
    plimsoll_models::known(id).unwrap_or_else(|| panic!("{id} is not known"))
}

pub fn target(name: &str) -> Target {
    Target::named(name).unwrap_or_else(|e| panic!("{e}"))
}

pub fn plan(graph: &Graph, target: &Target) -> Plan {
    compile(graph, &Policy::default(), target).unwrap_or_else(|e| panic!("{e:?}"))
}

/// Weights that are streamed from a file and copied ahead.
pub const FROM_FILE: Weights = Weights::Streamed { from: Space::File, prefetch: true };

/// Every way to stream weights on a target.
pub fn streamed(target: &Target) -> Vec<Weights> {
    let spaces: &[Space] = if target.arena_in_host() { &[Space::File] } else { &[Space::Host, Space::File] };
    let of = |&from: &Space| [true, false].map(|prefetch| Weights::Streamed { from, prefetch });
    spaces.iter().flat_map(of).collect()
}

/// Plan with streamed weights.
pub fn streamed_plan(graph: &Graph, target: &Target) -> Plan {
    let policy = Policy { weights: FROM_FILE, ..Policy::default() };
    compile(graph, &policy, target).unwrap_or_else(|e| panic!("{e:?}"))
}

pub fn model(id: &str, tokens: u64, outputs: &[Output], target_name: &str) -> Plan {
    let graph = encoder(id).graph(bounds(tokens), outputs).expect("verified");
    plan(&graph, &target(target_name))
}

/// Tiny model of a family: the released configuration with fewer layers and narrower matrices.
pub fn narrow(id: &str, layers: u64) -> Encoder {
    match encoder(id) {
        Encoder::Esm2(c) => Encoder::Esm2(plimsoll_models::Esm2Config {
            hidden_size: 8,
            layers,
            heads: 2,
            intermediate_size: 16,
            ..c
        }),
        Encoder::DnabertS(c) => Encoder::DnabertS(plimsoll_models::DnabertConfig {
            vocab_size: 16,
            hidden_size: 8,
            layers,
            heads: 2,
            intermediate_size: 16,
            ..c
        }),
    }
}

/// Graph x -> linear -> gelu -> linear -> + x -> layer norm -> y.
pub fn mlp(b: Bounds) -> Graph {
    let mut g = Builder::new(b);
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let h = g.linear(x, "fc1", 32, true);
    let h = g.gelu(h);
    let h = g.linear(h, "fc2", 8, true);
    let h = g.add(x, h);
    let y = g.layer_norm(h, "norm", 1e-5);
    g.output("y", y);
    g.finish().expect("verified")
}

/// Default policy with gradients of the output `y`.
pub fn gradients() -> Policy {
    Policy { autodiff: Some(AutodiffPolicy { outputs: vec!["y".into()] }), ..Policy::default() }
}

/// Graph with two states of equal shape that are read and updated with the result of a linear. StateDef `s2` is read
/// after its new value is computed, `s1` is not.
pub fn with_updates() -> Graph {
    let mut g = Builder::new(bounds(64));
    let shape = [Dim::Fixed(4), Dim::Fixed(8)];
    let (a, b) = (state(&mut g, "s1", &shape), state(&mut g, "s2", &shape));
    let x = g.input("x", &shape, DType::F32);
    let h = g.linear(x, "fc", 8, false);
    let (new_a, new_b) = (g.add(a, h), g.add(b, h));
    let y = g.add(new_a, b);
    g.output("y", y);
    g.update(a, new_a);
    g.update(b, new_b);
    g.finish().expect("verified")
}

/// Attention op with full mask and without positional encoding.
pub fn attention(heads: u32, head_dim: u32) -> Op {
    let (mask, bias, qkv) = (Mask::Full, Bias::None, Qkv::Separate);
    Op::Attention(Attention { heads, kv_heads: heads, head_dim, scale: 0.5, mask, bias, rotary: false, qkv })
}

/// Graph x -> q, k and v linears -> attention -> linear -> y.
pub fn attention_block() -> Builder {
    let mut g = Builder::new(bounds(64));
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(8)], DType::F32);
    let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
    let [q, k, v] = ["q", "k", "v"].map(|n| g.linear(x, n, 8, true));
    let o = g.one(attention(2, 4), &[q, k, v, spans]);
    let y = g.linear(o, "out", 8, true);
    g.output("y", y);
    g
}

/// Transient bytes above the lower bound, in thousandths of the lower bound, rounded up.
pub fn waste_permille(memory: &MemoryPlan) -> u64 {
    let waste = memory.device.transient.saturating_sub(memory.lower_bound).0;
    (waste * 1000).div_ceil(memory.lower_bound.0.max(1))
}

/// Number of nodes with the op named `op`.
pub fn count(graph: &Graph, op: &str) -> usize {
    graph.nodes.iter().filter(|n| n.op.name() == op).count()
}

/// Returns the node that defines a value; panics if it is a source.
pub fn defined_by(graph: &Graph, v: ValueId) -> &plimsoll_graph::Node {
    match graph.value(v).def {
        plimsoll_graph::Def::Node(id, _) => graph.node(id),
        plimsoll_graph::Def::Source => panic!("{v} is a source"),
    }
}

/// Adds an f32 state that is initialised to zero.
pub fn state(g: &mut Builder, name: &str, shape: &[Dim]) -> ValueId {
    let role = StateRole::Buffer { name: name.to_owned() };
    g.state(StateDef::zeros(role), shape, DType::F32)
}
