//! Test cases of expert matmuls and the fused cross-entropy, with their gradients. Invariant: weights are scaled so
//! that outputs are of order 1; every batch has rows without an expert, or ignored rows.

use super::{Case, Noise, ROWS, Tolerance, UNIT};
use plimsoll_graph::ops::*;
use plimsoll_graph::{Dim, Op};

/// (experts, N, K): one expert, ragged columns, more experts than some batches have rows.
const EXPERTS: [(u32, u64, u64); 4] = [(1, 8, 8), (3, 33, 17), (5, 40, 64), (9, 3, 40)];

/// Tokens and (experts, N, K) with more than one tile of a GPU's kernels, of 128 rows and columns, or more than three
/// stages of 64 terms; small enough for the cases with 16-bit operands.
const TILES: [(u64, (u32, u64, u64)); 4] =
    [(70, (2, 136, 8)), (5, (1, 8, 200)), (5, (1, 200, 8)), (115, (1, 8, 8))];

/// (V, K, rows of a chunk): two classes, an amino alphabet, several blocks of logits, whole vectors of classes and
/// columns, ragged ones; one row at a time, ragged chunks, all rows at once.
const HEADS: [(u64, u64, u32); 8] = [
    (2, 8, 1),
    (33, 24, 7),
    (33, 64, 32),
    (1100, 17, 64),
    (70, 400, 4096),
    (40, 24, 16),
    (5, 9, 4),
    (1027, 16, 48),
];

/// Factor `c` of the tolerance of sums.
const C: f32 = 2.0;
/// Factor `c` of the tolerance of the cross-entropy: errors of logits become relative errors of exponentials.
const EXPONENT: f32 = 8.0;

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, &rows) in ROWS.iter().enumerate() {
        for (j, &sizes) in EXPERTS.iter().enumerate() {
            let bias = (i + j) % 2 == 0;
            cases.extend([grouped(rows, sizes, bias), input_grad(rows, sizes), weight_grad(rows, sizes, bias)]);
        }
        for (j, &sizes) in HEADS.iter().enumerate() {
            let bias = (i + j) % 2 == 0;
            let z_loss = if (i + j) % 3 == 0 { 1e-3 } else { 0.0 };
            cases.push(loss(rows, Dim::Tokens(1), sizes, bias, z_loss));
            cases.push(loss_grad(rows, sizes, bias, z_loss));
        }
    }
    for (rows, sizes) in TILES {
        cases.extend([grouped(rows, sizes, true), input_grad(rows, sizes), weight_grad(rows, sizes, true)]);
    }
    cases.push(loss(5, Dim::Sequences(1), (3, 24, 2), true, 0.0));
    cases
}

/// Noise for weights: sums of `k` products with unit noise have variance 1.
fn scaled(k: u64) -> Noise {
    Noise { offset: 0.0, amplitude: 3.0 / (k as f32).sqrt() }
}

/// Two rows for each token.
const PAIRS: Dim = Dim::Tokens(2);

fn case(name: String, op: Op, rows: u64, tolerance: Tolerance) -> Case {
    Case::new(name, op, &[rows], rows % 2 * 3, tolerance)
}

/// Ascending offsets of `experts` over two rows per token, with some rows left over.
fn offsets(case: Case, experts: u32) -> Case {
    let rows = 2 * case.counts.tokens;
    let mut ends: Vec<i32> = case.random(u64::from(experts)).map(|x| (x % rows) as i32).collect();
    ends.sort_unstable();
    ends.insert(0, 0);
    case.integers(&[Dim::Fixed(u64::from(experts) + 1)], ends)
}

fn grouped(rows: u64, (experts, n, k): (u32, u64, u64), bias: bool) -> Case {
    let name = format!("grouped_linear {rows} pairs, {experts} x {n} x {k}, bias {bias}");
    let op = Op::GroupedLinear(GroupedLinear { experts, bias });
    let stacked = u64::from(experts) * n;
    let case = case(name, op, rows, Tolerance::sum(C, k));
    let mut case = case.noise(&[PAIRS, Dim::Fixed(k)], UNIT).weight(&[stacked, k], scaled(k));
    if bias {
        case = case.weight(&[stacked], UNIT);
    }
    offsets(case, experts)
}

fn input_grad(rows: u64, (experts, n, k): (u32, u64, u64)) -> Case {
    let name = format!("grouped_linear_input_grad {rows} pairs, {experts} x {n} x {k}");
    let op = Op::GroupedLinearInputGrad(GroupedLinearInputGrad { experts });
    let case = case(name, op, rows, Tolerance::sum(C, n));
    let case = case.noise(&[PAIRS, Dim::Fixed(n)], UNIT).weight(&[u64::from(experts) * n, k], scaled(n));
    offsets(case, experts)
}

fn weight_grad(rows: u64, (experts, n, k): (u32, u64, u64), bias: bool) -> Case {
    let name = format!("grouped_linear_weight_grad {rows} pairs, {experts} x {n} x {k}, bias {bias}");
    let op = Op::GroupedLinearWeightGrad(GroupedLinearWeightGrad { experts, bias });
    let case = case(name, op, rows, Tolerance::sum(C, 2 * rows));
    offsets(case.noise(&[PAIRS, Dim::Fixed(n)], UNIT).noise(&[PAIRS, Dim::Fixed(k)], UNIT), experts)
}

/// Targets; every third row is ignored.
fn targets(case: Case, rows: Dim, v: u64) -> Case {
    let count = rows.at(case.counts);
    let target = |x: u64| if x.is_multiple_of(3) { -100 } else { (x / 3 % v) as i32 };
    let targets = case.random(count).map(target).collect();
    case.integers(&[rows], targets)
}

fn loss(rows: u64, dim: Dim, (v, k, chunk): (u64, u64, u32), bias: bool, z_loss: f32) -> Case {
    let name =
        format!("linear_cross_entropy {rows} of {dim}, {v} x {k}, chunk {chunk}, bias {bias}, z {z_loss}");
    let op = Op::LinearCrossEntropy(LinearCrossEntropy { bias, chunk, z_loss });
    let lengths = match dim {
        Dim::Sequences(_) => vec![2; rows as usize],
        Dim::Tokens(_) | Dim::Packs(_) | Dim::Fixed(_) => vec![rows],
    };
    let case = Case::new(name, op, &lengths, rows % 2 * 3, Tolerance::sum(C, k));
    let mut case = case.noise(&[dim, Dim::Fixed(k)], UNIT).weight(&[v, k], scaled(k));
    if bias {
        case = case.weight(&[v], UNIT);
    }
    targets(case, dim, v)
}

fn loss_grad(rows: u64, (v, k, chunk): (u64, u64, u32), bias: bool, z_loss: f32) -> Case {
    let name =
        format!("linear_cross_entropy_grad {rows} rows, {v} x {k}, chunk {chunk}, bias {bias}, z {z_loss}");
    let forward = LinearCrossEntropy { bias, chunk, z_loss };
    let op = Op::LinearCrossEntropyGrad(LinearCrossEntropyGrad { forward });
    let case = case(name, op, rows, Tolerance::sum(EXPONENT, v.max(k).max(rows)));
    let case = case.noise(&[Dim::Fixed(1)], UNIT).noise(&[Dim::Tokens(1), Dim::Fixed(k)], UNIT);
    let mut case = case.weight(&[v, k], scaled(k));
    if bias {
        case = case.weight(&[v], UNIT);
    }
    // Near the log-sum-exp of logits with these weights and biases.
    let lse = Noise { offset: (v as f32).ln() + 1.0, amplitude: 0.1 };
    targets(case, Dim::Tokens(1), v).noise(&[Dim::Tokens(1)], lse)
}
