//! Test cases of the fused MLP. Invariant: weights are scaled so that the hidden layer and y are of order 1.

use super::{Case, Noise, Tolerance, UNIT};
use plimsoll_graph::ops::*;
use plimsoll_graph::{Dim, Op};

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = [(1, 8, 32, 8), (33, 24, 64, 24), (37, 40, 96, 17), (70, 33, 160, 33)];
    for (i, (rows, k, f, n)) in sizes.into_iter().enumerate() {
        for hidden in [Hidden::Gelu, Hidden::Gate] {
            for norm in [None, Some(LayerNorm { eps: 1e-5 })] {
                let bias = [i % 2 == 0, i != 2];
                cases.push(mlp(rows, (k, f, n), Mlp { norm, hidden, bias, residual: i > 0 }));
            }
        }
    }
    // Every combination of optional inputs.
    for i in 0..16 {
        let norm = (i & 8 > 0).then_some(LayerNorm { eps: 1e-5 });
        let op = Mlp { norm, hidden: Hidden::Gelu, bias: [i & 1 > 0, i & 2 > 0], residual: i & 4 > 0 };
        cases.push(mlp(5, (12, 20, 9), op));
    }
    cases
}

/// Noise for weights: sums of `k` products with unit noise have variance 1.
fn scaled(k: u64) -> Noise {
    Noise { offset: 0.0, amplitude: 3.0 / (k as f32).sqrt() }
}

fn mlp(rows: u64, (k, f, n): (u64, u64, u64), op: Mlp) -> Case {
    let name = format!("mlp {rows} rows, {k} {f} {n}, {op:?}");
    let case = Case::new(name, Op::Mlp(op), &[rows], rows % 2 * 3, Tolerance::sum(4.0, k + f));
    let mut case = case.noise(&[Dim::Tokens(1), Dim::Fixed(k)], UNIT);
    if op.norm.is_some() {
        case = case.weight(&[k], UNIT).weight(&[k], UNIT);
    }
    let width = if op.hidden == Hidden::Gate { 2 * f } else { f };
    for (i, (n, k)) in [(width, k), (n, f)].into_iter().enumerate() {
        case = case.weight(&[n, k], scaled(k));
        if op.bias[i] {
            case = case.weight(&[n], UNIT);
        }
    }
    if op.residual { case.noise(&[Dim::Tokens(1), Dim::Fixed(n)], UNIT) } else { case }
}
