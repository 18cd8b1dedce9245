//! Tests of the gradients of a two-layer network against finite differences, through autodiff, plan, executor and
//! reference kernels.

use crate::rig::{ByName, On, gradient};
use plimsoll_exec::Executor;
use plimsoll_graph::{Bounds, Builder, Counts, DType, Dim, Graph, Param};
use plimsoll_plan::{AutodiffPolicy, Policy, Program, Target, compile};
use std::ops::Range;

const BOUNDS: Bounds = Bounds { tokens: 6, sequences: 2, longest: 3, packs: 1 };
const COUNTS: Counts = Counts { tokens: 5, sequences: 2, packs: 1 };

/// y = x + fc2(gelu(fc1(norm(x)))) with an embedding of width 4; then a second layer of this form.
fn network() -> Graph {
    let mut g = Builder::new(BOUNDS);
    let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(4)], DType::F32);
    let mut h = g.linear(x, "in", 4, true);
    for layer in 0..2 {
        g.scope(format!("{layer}."), Some(layer));
        let n = g.layer_norm(h, "norm", 1e-5);
        let n = g.linear(n, "fc1", 7, true);
        let n = g.gelu(n);
        let n = g.linear(n, "fc2", 4, layer == 0);
        h = g.add(h, n);
    }
    g.output("y", h);
    g.finish().expect("verified")
}

/// A fixed number for the `i`-th element of a tensor.
fn number(name: &str, i: u64) -> f32 {
    let seed =
        name.bytes().fold(i.wrapping_mul(0x9E37_79B9), |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0193));
    let unit = ((seed >> 7) % 1000) as f32 / 500.0 - 1.0;
    if name.ends_with("norm.weight") { 1.0 + 0.1 * unit } else { 0.6 * unit }
}

/// Runs a graph with one element of one parameter changed, and returns the executor.
fn step(policy: &Policy, moved: Option<(&str, u64, f32)>) -> Executor {
    let target = Target::named("null").expect("a target");
    let plan = compile(&network(), policy, &target).expect("planned");
    let mut executor = On::Reference.executor(Program::new(target, vec![("net".to_owned(), plan)], vec![]));
    let mut read = |p: &Param, range: Range<u64>, out: &mut [f32]| {
        for (x, i) in out.iter_mut().zip(range) {
            let by = moved.filter(|&(name, at, _)| name == p.name && at == i).map_or(0.0, |(.., by)| by);
            *x = number(&p.name, i) + by;
        }
        Ok(())
    };
    executor.load(0, &mut read).expect("loaded");
    executor.poison().expect("poisoned");
    let x: Vec<f32> = (0..20).map(|i| number("x", i)).collect();
    executor.input_f32(0, "x", &x).expect("x");
    if policy.autodiff.is_some() {
        executor.input_f32(0, "d y", &cotangent()).expect("dy");
    }
    executor.run(0, COUNTS).expect("a run");
    executor
}

fn cotangent() -> Vec<f32> {
    (0..20).map(|i| number("cotangent", i)).collect()
}

/// sum(y * cotangent), in f64.
fn loss(executor: &mut Executor) -> f64 {
    let mut y = vec![0.0; 20];
    executor.output_f32(0, "y", &mut y).expect("y");
    y.iter().zip(cotangent()).map(|(&y, c)| f64::from(y) * f64::from(c)).sum()
}

#[test]
fn gradients_equal_finite_differences() {
    let train = Policy { autodiff: Some(AutodiffPolicy { outputs: vec!["y".into()] }), ..Policy::default() };
    let mut backward = step(&train, None);
    let params: Vec<(String, u64)> = {
        let graph = network();
        let size = |v| graph.spec(v).elements_at(COUNTS);
        graph.param_values().map(|(v, _, p)| (p.name.clone(), size(v))).collect()
    };
    assert_eq!(params.len(), 2 + 2 * 6 - 1);
    for (name, elements) in params {
        let mut grad = vec![0.0; elements as usize];
        backward.output_f32(0, gradient(&name), &mut grad).expect("a gradient");
        for i in 0..elements {
            // f32 outputs of order 1 carry errors of 1e-7: over 2h = 0.02 they become 1e-5.
            const H: f32 = 1e-2;
            let up = loss(&mut step(&Policy::default(), Some((&name, i, H))));
            let down = loss(&mut step(&Policy::default(), Some((&name, i, -H))));
            let wanted = (up - down) / (2.0 * f64::from(H));
            let found = f64::from(grad[i as usize]);
            let limit = 2e-3 * (1.0 + wanted.abs());
            assert!((found - wanted).abs() < limit, "{name}[{i}]: {found}, by differences {wanted}");
        }
    }
}
