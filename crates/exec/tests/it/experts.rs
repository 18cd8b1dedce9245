//! Tests of a mixture-of-experts layer against a loop over tokens and experts: results, and all gradients by
//! central differences of the loop. Invariant: the loop shares no code with the ops.

use crate::evaluate::evaluate;
use crate::rig::{ByName, On, gradient, output, run};
use plimsoll_cpu::Isa;
use plimsoll_exec::Executor;
use plimsoll_exec::reference::Tensor;
use plimsoll_graph::ops::*;
use plimsoll_graph::{Bounds, Builder, Counts, DType, Dim, Graph, Op, OutputRole, Param, packs};
use plimsoll_plan::passes::autodiff;
use plimsoll_plan::{AutodiffPolicy, Policy, Program, compile};
use std::collections::BTreeMap;
use std::ops::Range;

const TOKENS: usize = 9;
const D: usize = 6;
const F: usize = 5;
const LOSS: RouterLoss = RouterLoss { balance: 0.5, z: 0.25 };
const BOUNDS: Bounds = Bounds { tokens: TOKENS as u64 + 3, sequences: 1, longest: TOKENS as u64 + 3, packs: 5 };

/// Words of packs of the tokens.
type Packing = &'static [[i32; packs::WORDS]];

/// One pack; and one with a token, one without, one without targets, and one with more targets than tokens.
const PACKINGS: [Packing; 2] =
    [&[[0, 9, 0, 1, 1, 0]], &[[0, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1], [1, 4, 0, 0, 0, 2], [4, 9, 0, 1, 7, 3]]];

fn counts(packing: Packing) -> Counts {
    Counts { tokens: TOKENS as u64, sequences: 1, packs: packing.len() as u64 }
}

/// Every parameter by name.
type Weights = BTreeMap<&'static str, Vec<f64>>;

/// One expert for all tokens; two, one and all experts per token; a capacity that drops rows.
const ROUTES: [Route; 5] = [
    Route { experts: 1, top_k: 1, renormalise: true, capacity: 0 },
    Route { experts: 4, top_k: 2, renormalise: true, capacity: 0 },
    Route { experts: 4, top_k: 1, renormalise: false, capacity: 0 },
    Route { experts: 3, top_k: 3, renormalise: true, capacity: 0 },
    Route { experts: 4, top_k: 2, renormalise: true, capacity: 700 },
];

/// A graph of the layer with outputs y and aux. Its input rows come from an embedding, so that the gradient of
/// the embedding is the gradient of the layer's input.
fn layer(op: Route) -> Graph {
    let experts = u64::from(op.experts);
    let k = op.top_k;
    let d = D as u64;
    let f = F as u64;
    let mut g = Builder::new(BOUNDS);
    let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
    let table = g.param("table", &[TOKENS as u64, d]);
    let x = g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[ids, table]);
    let logits = g.linear(x, "gate", experts, false);
    let packs = g.input("packs", &[Dim::Packs(1), Dim::Fixed(packs::WORDS as u64)], DType::I32);
    let inputs = if op.capacity > 0 { vec![logits, packs] } else { vec![logits] };
    let route = g.node(Op::Route(op), &inputs);
    let [gates, chosen, order, places, offsets, _] = route[..] else { panic!("six outputs") };
    let rows = g.one(Op::Dispatch(Dispatch { top_k: k }), &[x, order, places]);
    let grouped = |bias| Op::GroupedLinear(GroupedLinear { experts: op.experts, bias });
    let up = [g.param("up.weight", &[experts * 2 * f, d]), g.param("up.bias", &[experts * 2 * f])];
    let h = g.one(grouped(true), &[rows, up[0], up[1], offsets]);
    let h = g.one(Op::Glu(Glu { activation: Activation::Silu }), &[h]);
    let down = g.param("down.weight", &[experts * d, f]);
    let rows = g.one(grouped(false), &[h, down, offsets]);
    let y = g.one(Op::Combine(Combine { top_k: k }), &[rows, gates, order, places]);
    let aux = g.one(Op::RouterLoss(LOSS), &[logits, chosen, packs]);
    g.output("y", y);
    g.output(OutputRole::Auxiliary, aux);
    g.finish().expect("verified")
}

/// Numbers in -1..1 that f32 holds exactly (splitmix64, Steele et al. 2014).
fn numbers(seed: u64, n: usize) -> Vec<f64> {
    let number = |i: u64| {
        let z = (seed << 32).wrapping_add(i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        f64::from(((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..n as u64).map(number).collect()
}

fn weights(op: Route) -> Weights {
    let e = op.experts as usize;
    let sizes = [
        ("down.weight", e * D * F),
        ("gate.weight", e * D),
        ("table", TOKENS * D),
        ("up.bias", e * 2 * F),
        ("up.weight", e * 2 * F * D),
    ];
    sizes.iter().enumerate().map(|(i, &(name, n))| (name, numbers(i as u64 + 1, n))).collect()
}

/// The cotangents (dy, daux) of the loss `sum dy . y + daux aux`.
fn cotangents() -> (Vec<f64>, f64) {
    (numbers(99, TOKENS * D), 1.5)
}

/// `w x` for a row-major w.
fn times(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

/// Output of one expert for one token.
fn expert(w: &Weights, e: usize, x: &[f64]) -> Vec<f64> {
    let part = |name: &str, n: usize| w[name][e * n..(e + 1) * n].to_vec();
    let mut h = times(&part("up.weight", 2 * F * D), x);
    h.iter_mut().zip(part("up.bias", 2 * F)).for_each(|(h, b)| *h += b);
    let gated: Vec<f64> = (0..F).map(|j| h[j] / (1.0 + (-h[j]).exp()) * h[F + j]).collect();
    times(&part("down.weight", D * F), &gated)
}

/// y and aux, token by token and expert by expert.
fn dense(op: Route, packing: Packing, w: &Weights) -> (Vec<f64>, f64) {
    let mut y = Vec::new();
    let mut aux = 0.0;
    for &[first, end, .., targets, _] in packing {
        let tokens = &w["table"][first as usize * D..end as usize * D];
        let (rows, loss) = dense_pack(op, tokens, w);
        y.extend(rows);
        aux += f64::from(targets) * loss;
    }
    (y, aux)
}

/// y and the router loss for each target, of the `tokens` (T, D) of one pack.
fn dense_pack(op: Route, tokens: &[f64], w: &Weights) -> (Vec<f64>, f64) {
    let experts = op.experts as usize;
    let k = op.top_k as usize;
    let count = tokens.len() / D;
    let limit = match op.capacity {
        0 => usize::MAX,
        c => (f64::from(c) / 1000.0 * (count * k) as f64 / experts as f64).ceil() as usize,
    };
    let mut y = Vec::new();
    let mut z = 0.0;
    let mut rows = vec![0; experts];
    let mut wishes = vec![0.0; experts];
    let mut mass = vec![0.0; experts];
    for x in tokens.chunks(D) {
        let logits = times(&w["gate.weight"], x);
        let total: f64 = logits.iter().map(|l| l.exp()).sum();
        let p: Vec<f64> = logits.iter().map(|l| l.exp() / total).collect();
        let mut ranked: Vec<usize> = (0..experts).collect();
        ranked.sort_by(|&a, &b| p[b].partial_cmp(&p[a]).expect("numbers"));
        let chosen = &ranked[..k];
        let sum: f64 = if op.renormalise { chosen.iter().map(|&e| p[e]).sum() } else { 1.0 };
        let mut out = vec![0.0; D];
        for &e in chosen {
            wishes[e] += 1.0;
            rows[e] += 1;
            if rows[e] <= limit {
                let of = expert(w, e, x);
                out.iter_mut().zip(of).for_each(|(out, v)| *out += p[e] / sum * v);
            }
        }
        y.extend(out);
        z += total.ln() * total.ln();
        mass.iter_mut().zip(&p).for_each(|(mass, p)| *mass += p);
    }
    if count == 0 {
        return (y, 0.0);
    }
    let count = count as f64;
    let share = |e: usize| wishes[e] / (count * k as f64) * mass[e] / count;
    let balance = experts as f64 * (0..experts).map(share).sum::<f64>();
    (y, f64::from(LOSS.balance) * balance + f64::from(LOSS.z) * z / count)
}

/// All outputs of the loop: y, aux and, by central differences, the gradient of every weight.
fn wanted(op: Route, packing: Packing) -> BTreeMap<OutputRole, Vec<f64>> {
    let w = weights(op);
    let (dy, daux) = cotangents();
    let loss = |w: &Weights| {
        let (y, aux) = dense(op, packing, w);
        y.iter().zip(&dy).map(|(y, d)| y * d).sum::<f64>() + daux * aux
    };
    let (y, aux) = dense(op, packing, &w);
    let mut wanted = BTreeMap::from([("y".into(), y), (OutputRole::Auxiliary, vec![aux])]);
    for (name, values) in &w {
        let slope = |i: usize| {
            let moved = |by: f64| {
                let mut w = w.clone();
                w.get_mut(name).expect("known")[i] += by;
                loss(&w)
            };
            (moved(1e-5) - moved(-1e-5)) / 2e-5
        };
        wanted.insert(gradient(name), (0..values.len()).map(slope).collect());
    }
    wanted
}

fn outputs() -> AutodiffPolicy {
    AutodiffPolicy { outputs: vec!["y".into(), OutputRole::Auxiliary] }
}

fn close(op: Route, role: &OutputRole, found: &[f64], wanted: &[f64], tolerance: f64) {
    assert_eq!(found.len(), wanted.len(), "{role}");
    for (i, (f, w)) in found.iter().zip(wanted).enumerate() {
        assert!((f - w).abs() <= tolerance * w.abs().max(1.0), "{op:?}: {role}[{i}] is {f}, not {w}");
    }
}

/// Every route with every packing.
fn layers() -> impl Iterator<Item = (Route, Packing)> {
    ROUTES.into_iter().flat_map(|op| PACKINGS.map(|packing| (op, packing)))
}

/// Differences of h = 1e-5 carry 1e-10 of truncation and as much of rounding.
#[test]
fn a_layer_of_experts_is_a_loop_over_tokens_and_experts() {
    for (op, packing) in layers() {
        let graph = autodiff(&layer(op), &outputs()).expect("differentiable");
        let w = weights(op);
        let (dy, daux) = cotangents();
        let counts = counts(packing);
        let values = evaluate(&graph, counts, |v| {
            let param = graph.param_values().find(|(p, ..)| *p == v).map(|(.., p)| p.name.clone());
            let input = graph.inputs.iter().find(|(_, i)| *i == v).map(|(name, _)| name.clone());
            match &param.or(input).expect("named")[..] {
                "ids" => Tensor::i32(&[TOKENS], (0..TOKENS as i32).collect()),
                "packs" => Tensor::i32(&[packing.len(), packs::WORDS], packing.as_flattened().to_vec()),
                "d y" => Tensor::f64(&[TOKENS, D], dy.clone()),
                "d aux" => Tensor::f64(&[1], vec![daux]),
                name => {
                    let shape: Vec<usize> = graph.spec(v).shape.iter().map(|d| d.at(counts) as usize).collect();
                    Tensor::f64(&shape, w[name].clone())
                }
            }
        });
        let wanted = wanted(op, packing);
        assert_eq!(graph.outputs.len(), wanted.len());
        for (role, v) in &graph.outputs {
            close(op, role, values.of(*v).floats().expect("floats"), &wanted[role], 1e-8);
        }
    }
}

/// Results of the layer and its gradients on the CPU.
fn on_cpu(
    op: Route,
    packing: Packing,
    isa: Isa,
    threads: usize,
    wanted: &BTreeMap<OutputRole, Vec<f64>>,
) -> Vec<Vec<f32>> {
    let target = On::Cpu(isa, threads).target().expect("a target");
    let policy = Policy { autodiff: Some(outputs()), ..Policy::default() };
    let plan = compile(&layer(op), &policy, &target).expect("planned");
    let program = Program::new(target, vec![("layer".to_owned(), plan)], vec![]);
    let mut executor = On::Cpu(isa, threads).executor(program);
    let w = weights(op);
    let mut read = |p: &Param, range: Range<u64>, out: &mut [f32]| {
        let values = &w[&p.name[..]][range.start as usize..range.end as usize];
        out.iter_mut().zip(values).for_each(|(out, v)| *out = *v as f32);
        Ok(())
    };
    executor.load(0, &mut read).expect("loaded");
    let (dy, daux) = cotangents();
    let give = |e: &mut Executor| {
        e.input_i32(0, "ids", &(0..TOKENS as i32).collect::<Vec<_>>()).expect("ids");
        e.input_i32(0, "packs", packing.as_flattened()).expect("packs");
        e.input_f32(0, "d y", &dy.iter().map(|&d| d as f32).collect::<Vec<_>>()).expect("d y");
        e.input_f32(0, "d aux", &[daux as f32]).expect("d aux");
    };
    run(&mut executor, give, counts(packing));
    wanted.iter().map(|(role, values)| output(&mut executor, role, values.len())).collect()
}

/// f32 sums of up to 54 terms of order 1: 2e-5 is a few roundings of each.
#[test]
fn a_layer_of_experts_on_the_cpu() {
    for (op, packing) in layers() {
        let wanted = wanted(op, packing);
        for isa in Isa::available() {
            let [one, three] = [1, 3].map(|threads| on_cpu(op, packing, isa, threads, &wanted));
            assert_eq!(one, three, "{op:?} on {}: bits differ with the threads", isa.name());
            for (found, (role, wanted)) in one.iter().zip(&wanted) {
                let found: Vec<f64> = found.iter().map(|&x| f64::from(x)).collect();
                close(op, role, &found, wanted, 2e-5);
            }
        }
    }
}

/// The CPU kernels validate routing data that they read from the arena.
#[test]
fn places_outside_are_refused() {
    let mut g = Builder::new(BOUNDS);
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(3)], DType::F32);
    let [order, places] = ["order", "places"].map(|n| g.input(n, &[Dim::Tokens(2)], DType::I32));
    let rows = g.one(Op::Dispatch(Dispatch { top_k: 2 }), &[x, order, places]);
    g.output("rows", rows);
    let graph = g.finish().expect("verified");
    let counts = Counts { tokens: 2, sequences: 1, packs: 1 };
    for (index, fine) in [(3, true), (-1, true), (4, false), (-2, false), (i32::MAX, false), (i32::MIN, false)]
    {
        for on in [On::Reference, On::Cpu(Isa::detect(), 1)] {
            let mut executor =
                crate::rig::bare(on, &graph, true, plimsoll_plan::Weights::Resident).expect("planned");
            executor.input_f32(0, "x", &[1.0; 6]).expect("x");
            executor.input_i32(0, "order", &[0, 1, 2, index]).expect("order");
            executor.input_i32(0, "places", &[0, 1, 2, 3]).expect("places");
            let ran = executor.run(0, counts);
            assert_eq!(ran.is_ok(), fine, "{index} on {}: {ran:?}", on.name());
        }
    }
}
