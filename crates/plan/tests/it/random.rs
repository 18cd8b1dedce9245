//! Random graphs: any combination of ops compiles, and compiles to an equal plan when repeated.

use crate::cases::{attention, bounds, state, target};
use crate::{oracle, symbolic};
use plimsoll_graph::ops::{
    Activation, BatchNorm, Concat, Embed, Glu, Join, Part, Relu, SegmentMean, SelectRows, Softmax,
};
use plimsoll_graph::{Builder, DType, Dim, Graph, Op, ValueId, VerifyError};
use plimsoll_plan::{
    Fuse, InstructionSet, Kernels, Plan, PlanError, Policy, Precision, Program, Weights, check, compile, passes,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

/// Random choices from which a graph is built: ops as (kind, two operands, variant), outputs and updates.
#[derive(Clone, Debug)]
pub struct Recipe {
    ops: Vec<(u8, u16, u16, u8)>,
    outputs: Vec<u16>,
    updates: Vec<u16>,
}

pub fn recipes() -> impl Strategy<Value = Recipe> {
    let op = (0..16u8, any::<u16>(), any::<u16>(), 0..4u8);
    let (outputs, updates) =
        (prop::collection::vec(any::<u16>(), 1..4), prop::collection::vec(any::<u16>(), 0..3));
    (prop::collection::vec(op, 1..24), outputs, updates).prop_map(|(ops, outputs, updates)| Recipe {
        ops,
        outputs,
        updates,
    })
}

/// Runs `test` on `cases` random values from a fixed seed.
pub fn run<S: Strategy>(cases: u32, strategy: S, test: impl FnMut(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let test = std::cell::RefCell::new(test);
    let result = TestRunner::new_with_rng(config, rng).run(&strategy, |value| (test.borrow_mut())(value));
    result.unwrap_or_else(|e| panic!("{e}"));
}

/// Builds the graph of a recipe; operands are chosen among all matrices so far: inputs, states and results.
/// `Err` if the verifier rejects an update.
pub fn graph_of(recipe: &Recipe) -> Result<Graph, VerifyError> {
    let mut g = Builder::new(bounds(128));
    let tokens =
        |g: &mut Builder, name, columns| g.input(name, &[Dim::Tokens(1), Dim::Fixed(columns)], DType::F32);
    let c = |g: &mut Builder| g.input("c", &FIXED, DType::F32);
    let matrices = vec![tokens(&mut g, "a", 8), tokens(&mut g, "b", 16), c(&mut g)];
    extended(g, matrices, recipe)
}

/// Like [`graph_of`], with embedded tokens in place of floating-point inputs, so that every precision is possible, and
/// all ops in layer 0.
fn embedding_graph(recipe: &Recipe) -> Result<Graph, VerifyError> {
    let mut g = Builder::new(bounds(128));
    g.scope("", Some(0));
    let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
    let mut embed = |name: &str, columns| {
        let table = g.param(name, &[11, columns]);
        g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[ids, table])
    };
    let matrices = vec![embed("a", 8), embed("b", 16)];
    extended(g, matrices, recipe)
}

/// Shape of the states. Half of the rows take a multiple of every target's alignment, in 16 bits too.
const FIXED: [Dim; 2] = [Dim::Fixed(32), Dim::Fixed(8)];

/// Half of the rows of a state.
const HALF: u64 = 16;

/// Adds the ops, outputs and updates of a recipe.
fn extended(mut g: Builder, mut matrices: Vec<ValueId>, recipe: &Recipe) -> Result<Graph, VerifyError> {
    let fixed = FIXED;
    let states = [state(&mut g, "s6", &fixed), state(&mut g, "s7", &fixed), state(&mut g, "s8", &fixed)];
    matrices.extend(states);
    let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
    let rows = g.input("rows", &[Dim::Sequences(2)], DType::I32);
    for &(kind, a, b, variant) in &recipe.ops {
        let pick = |i: u16| matrices[usize::from(i) % matrices.len()];
        let outs = apply(&mut g, kind, pick(a), &matrices, b, variant, [spans, rows]);
        matrices.extend(outs);
    }
    for (k, &i) in recipe.outputs.iter().enumerate() {
        g.output(format!("out{k}"), matrices[usize::from(i) % matrices.len()]);
    }
    for (&i, state) in recipe.updates.iter().zip(states) {
        let alike: Vec<ValueId> =
            matrices.iter().copied().filter(|&v| g.graph().spec(v).shape == fixed).collect();
        g.update(state, alike[usize::from(i) % alike.len()]);
    }
    g.finish()
}

/// Adds a random op on x; `b` selects the other operands.
fn apply(
    g: &mut Builder,
    kind: u8,
    x: ValueId,
    matrices: &[ValueId],
    b: u16,
    variant: u8,
    [spans, rows]: [ValueId; 2],
) -> Vec<ValueId> {
    let shape = g.graph().spec(x).shape.clone();
    let (is_tokens, columns) = (shape[0] == Dim::Tokens(1), g.graph().spec(x).row_elements());
    let choose = |g: &Builder, same: &dyn Fn(&[Dim]) -> bool| {
        let alike: Vec<ValueId> =
            matrices.iter().copied().filter(|&v| same(&g.graph().spec(v).shape)).collect();
        alike[usize::from(b) % alike.len()]
    };
    let twin = choose(g, &|s| *s == shape[..]);
    // Few distinct names, so that many weights are tied.
    let name = format!("{}.{columns}", variant % 2);
    match kind {
        0 | 1 => {
            let n = [8, 16, columns, columns][usize::from(variant)];
            vec![g.linear(x, &format!("fc{n}.{name}"), n, b.is_multiple_of(2))]
        }
        2 => {
            let outs = g.layer_norm(x, &format!("norm.{name}"), 1e-5);
            vec![outs]
        }
        3 | 4 => vec![g.add(x, twin)],
        5 => vec![g.gelu(x)],
        6 => {
            // A residual connection, with the linear as either operand and possibly x as residual.
            let h = g.linear(x, &format!("residual.{name}"), columns, variant < 2);
            let (left, right) = if b.is_multiple_of(3) { (h, twin) } else { (twin, h) };
            vec![g.add(left, right)]
        }
        7 if columns <= 64 => {
            let other = choose(g, &|s| s[0] == shape[0]);
            vec![g.one(Op::Concat(Concat {}), &[x, other])]
        }
        8 => vec![g.one(Op::Softmax(Softmax {}), &[x])],
        9 if is_tokens && variant < 2 => {
            vec![g.one(Op::SegmentMean(SegmentMean { skip_first: 1, skip_last: 0 }), &[x, spans])]
        }
        9 if is_tokens => vec![g.one(Op::SelectRows(SelectRows {}), &[x, rows])],
        10 if is_tokens => {
            // Untied q, k and v weights can be fused, tied ones cannot.
            let unique = g.graph().nodes.len();
            let mut linear = |n: &str, i: usize| g.linear(x, &format!("{n}{}.{columns}", unique * i), 8, true);
            let [q, k, v] = ["q", "k", "v"].map(|n| linear(n, usize::from(variant % 2)));
            let mut outs = g.node(attention(2, 4), &[q, k, v, spans]);
            if variant == 3 {
                outs.push(k);
            }
            outs
        }
        11 if columns.is_multiple_of(2) => vec![g.one(Op::Glu(Glu { activation: Activation::Gelu }), &[x])],
        13 if shape[0] == FIXED[0] => {
            let half = Part { first: u64::from(variant % 2) * HALF, rows: HALF };
            vec![g.one(Op::Part(half), &[x])]
        }
        14 | 15 if shape[0] == FIXED[0] => {
            // An elementwise op by halves, of which one may be read alone, too.
            let halves = [0, HALF].map(|first| g.one(Op::Part(Part { first, rows: HALF }), &[x]));
            let computed = [g.gelu(halves[0]), g.one(Op::Relu(Relu {}), &halves[1..])];
            let whole = g.one(Op::Join(Join {}), &computed);
            if variant == 3 { vec![whole, computed[0]] } else { vec![whole] }
        }
        12 => {
            let p = ["g", "b", "m", "v"].map(|n| g.param(&format!("bn.{n}.{columns}"), &[columns]));
            vec![g.one(Op::BatchNorm(BatchNorm { eps: 1e-5 }), &[x, p[0], p[1], p[2], p[3]])]
        }
        _ => vec![g.one(Op::Relu(Relu {}), &[x])],
    }
}

fn program(plan: Plan, target_name: &str) -> Program {
    Program::new(target(target_name), vec![("random".to_owned(), plan)], vec![])
}

fn holds(graph: &Graph, fuse: bool, weights: Weights, target_name: &str) -> Plan {
    let fuse = if fuse { Fuse::Kernels } else { Fuse::Nothing };
    let policy = Policy { fuse, weights, ..Policy::default() };
    let compiled =
        || compile(graph, &policy, &target(target_name)).unwrap_or_else(|e| panic!("{e:?}\n{graph}"));
    let plan = compiled();
    check(&plan.graph, &plan.schedule, &plan.memory).unwrap_or_else(|e| panic!("{e}\n{}", plan.graph));
    assert_eq!(oracle::fault(&plan), None, "{}", plan.graph);
    assert!(plan.memory.device.transient >= plan.memory.lower_bound);

    let text = serde_json::to_string(&plan).expect("saved");
    assert_eq!(serde_json::from_str::<Plan>(&text).expect("read"), plan);
    let (first, again) = (program(plan.clone(), target_name), program(compiled(), target_name));
    assert_eq!(first.digest().expect("hashed"), again.digest().expect("hashed"));
    let ledger = first.ledger();
    assert_eq!(ledger.total(), first.peak(), "{ledger}\n{}", plan.graph);
    plan
}

#[test]
fn random_graphs_compile() {
    let (mut refused, mut fused) = (0, 0);
    run(250, recipes(), |recipe| {
        let Ok(graph) = graph_of(&recipe) else {
            refused += 1;
            return Ok(());
        };
        for target_name in ["null", "cpu"] {
            let resident = [true, false].map(|fuse| holds(&graph, fuse, Weights::Resident, target_name));
            let mut plans = resident.to_vec();
            for weights in crate::cases::streamed(&target(target_name)) {
                plans.extend([true, false].map(|fuse| holds(&graph, fuse, weights, target_name)));
            }
            fused += usize::from(plans[0].graph.nodes.len() < plans[1].graph.nodes.len());
            for plan in &plans {
                let (before, after) = (symbolic::meaning(&graph), symbolic::meaning(&plan.graph));
                assert_eq!(before, after, "{graph}{}", plan.graph);
            }
        }
        Ok(())
    });
    println!("{refused} of 250 read a state after its update; {fused} of {} were fused", 2 * (250 - refused));
    assert!(refused < 125 && fused > 50);
}

/// A graph that the verifier accepts is planned in every precision for every kind of target, or refused with a reason:
/// no pass panics, and no pass returns a graph that the verifier rejects.
#[test]
fn random_graphs_are_planned_or_refused_in_every_precision() {
    let (mut planned, mut refused) = ([0; 6], [0; 6]);
    run(150, recipes(), |recipe| {
        let Ok(graph) = embedding_graph(&recipe) else { return Ok(()) };
        for (k, precision) in Precision::ALL.into_iter().enumerate() {
            for target_name in ["cpu", "h200"] {
                for weights in [vec![Weights::Resident], crate::cases::streamed(&target(target_name))].concat()
                {
                    let policy = Policy { precision, weights, ..Policy::default() };
                    match compile(&graph, &policy, &target(target_name)) {
                        Ok(_) => planned[k] += 1,
                        Err(PlanError::BadPolicy { .. } | PlanError::Unsupported { .. }) => refused[k] += 1,
                        Err(error) => panic!("{error:?} in {} on {target_name}\n{graph}", precision.name()),
                    }
                }
            }
            // Each pass alone, on a graph that other passes have not prepared.
            let Ok(narrow) = passes::precision(&graph, precision) else { continue };
            let quantized = passes::operands(&narrow, precision);
            let gates = [Kernels::Cpu(InstructionSet::Amx), target("h200").kernels]
                .map(|kernels| kernels.fusions().fuse_gates.expect("gates"));
            let [cpu, hopper] = gates.map(|gates| passes::fuse_gates(&narrow, gates));
            let alone = [cpu, hopper, passes::fuse_norms(&narrow, 64)];
            let normed =
                passes::operands(&passes::fuse_norms(&passes::fuse(narrow, Weights::Resident), 64), precision);
            for after in alone.iter().chain(quantized.iter()).chain(normed.iter()) {
                after.verify().unwrap_or_else(|e| panic!("{e}\n{graph}{after}"));
            }
        }
        Ok(())
    });
    println!("planned {planned:?}, refused {refused:?}");
    assert!(planned.iter().all(|&n| n > 20), "planned {planned:?}, refused {refused:?}");
}
