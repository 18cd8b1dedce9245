//! Test cases of linear layers and their gradients. Invariant: weights are scaled so that outputs are of order 1.

use super::{Case, Noise, ROWS, Tolerance, UNIT};
use plimsoll_exec::reference::Data;
use plimsoll_graph::ops::*;
use plimsoll_graph::{Dim, Op};

/// (N, K): whole panels, ragged panels, one class, the widest K of the suite.
const SIZES: [(u64, u64); 9] =
    [(8, 8), (24, 40), (33, 24), (40, 33), (160, 160), (1, 8), (2, 512), (64, 320), (320, 1)];

/// Factor `c` of the tolerances of linear layers and their two gradients; `k` is the number of terms of a sum.
const C: f32 = 2.0;

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, &rows) in ROWS.iter().enumerate() {
        for (j, &(n, k)) in SIZES.iter().enumerate() {
            cases.push(linear(rows, Dim::Tokens(1), n, k, form(i + j)));
            cases.push(input_grad(rows, n, k));
            cases.push(weight_grad(rows, n, k, (i + j) % 2 == 0));
        }
    }
    // Every form at one ragged size, and the pipeline's output head, whose rows are sequences.
    for i in 0..6 {
        cases.push(linear(37, Dim::Tokens(1), 41, 39, form(i)));
        cases.push(linear(5, Dim::Sequences(1), 24, 33, form(i)));
        cases.push(linear(3, Dim::Fixed(3), 40, 24, form(i)));
    }
    // Weight gradients over several chunks of rows, of partial sums and of transposes, and with many rows.
    for (rows, n, k) in [(150, 16, 8), (150, 9, 7), (1030, 8, 16), (4100, 3, 5)] {
        cases.push(weight_grad(rows, n, k, true));
    }
    // Gates of ragged sizes, and of sizes that a matmul tile has.
    for (n, k, bias) in [(2, 3, false), (66, 33, true), (64, 40, false), (272, 72, false)] {
        for rows in [1, 37] {
            cases.push(linear(rows, Dim::Tokens(1), n, k, Linear::new(bias, Epilogue::Gate)));
        }
    }
    cases
}

/// The cases of linears and their gradients in TF32, with operands that TF32 represents exactly, so that rounding of
/// operands adds no error. The tolerance is wider than in f32, because tensor cores truncate the last bits of sums.
pub fn tf32() -> Vec<Case> {
    let operands = OperandFormat::Tf32;
    let in_tf32 = |op| {
        if let Op::Linear(op) = op {
            Some(Op::Linear(Linear { operands, ..op }))
        } else if let Op::LinearInputGrad(_) = op {
            Some(Op::LinearInputGrad(LinearInputGrad { operands }))
        } else if let Op::LinearWeightGrad(op) = op {
            Some(Op::LinearWeightGrad(LinearWeightGrad { operands, ..op }))
        } else {
            None
        }
    };
    let products = cases().into_iter().filter_map(|case| Some((in_tf32(case.op)?, case)));
    // TF32 has 10 of the 23 bits of an f32 mantissa: the lower 13 bits are cleared.
    let cut = |x: &mut f64| *x = f64::from(f32::from_bits((*x as f32).to_bits() & !0x1fff));
    products
        .map(|(op, mut case)| {
            for operand in &mut case.ins[..2] {
                let Data::Float(data) = &mut operand.data else { panic!("{}: factors are floats", case.name) };
                data.iter_mut().for_each(cut);
            }
            let tolerance = Tolerance { c: 4.0 * C, ..case.tolerance };
            Case { name: format!("{} in tf32", case.name), op, tolerance, ..case }
        })
        .collect()
}

/// Form `i` modulo 6 of bias (with, without) and epilogue (none, GELU, residual).
fn form(i: usize) -> Linear {
    let epilogue = [Epilogue::None, Epilogue::Gelu, Epilogue::Residual][i % 3];
    Linear::new(i % 6 < 3, epilogue)
}

/// Noise for weights: sums of `k` products with unit noise have variance 1.
fn scaled(k: u64) -> Noise {
    // Uniform noise of amplitude a has variance a^2 / 3, so the sum has variance k (a^2 / 3) (1 / 3).
    Noise { offset: 0.0, amplitude: 3.0 / (k as f32).sqrt() }
}

fn linear(rows: u64, dim: Dim, n: u64, k: u64, op: Linear) -> Case {
    let name = format!("linear {rows} rows of {dim}, {n} x {k}, bias {}, {:?}", op.bias, op.epilogue);
    let lengths: &[u64] = match dim {
        Dim::Sequences(_) => &vec![2; rows as usize],
        Dim::Tokens(_) | Dim::Packs(_) | Dim::Fixed(_) => &[rows],
    };
    let case = Case::new(name, Op::Linear(op), lengths, rows % 2 * 3, Tolerance::sum(C, k));
    let mut case = case.noise(&[dim, Dim::Fixed(k)], UNIT).weight(&[n, k], scaled(k));
    if op.bias {
        case = case.weight(&[n], UNIT);
    }
    match op.epilogue {
        Epilogue::Residual => case.noise(&[dim, Dim::Fixed(n)], UNIT),
        Epilogue::None | Epilogue::Gelu | Epilogue::Gate | Epilogue::SiluGate => case,
    }
}

fn input_grad(rows: u64, n: u64, k: u64) -> Case {
    let name = format!("linear_input_grad {rows} rows, {n} x {k}");
    let op = Op::LinearInputGrad(LinearInputGrad { operands: OperandFormat::Stored });
    let case = Case::new(name, op, &[rows], rows % 2 * 3, Tolerance::sum(C, n));
    case.noise(&[Dim::Tokens(1), Dim::Fixed(n)], UNIT).weight(&[n, k], scaled(n))
}

fn weight_grad(rows: u64, n: u64, k: u64, bias: bool) -> Case {
    let name = format!("linear_weight_grad {rows} rows, {n} x {k}, bias {bias}");
    let op = Op::LinearWeightGrad(LinearWeightGrad { bias, operands: OperandFormat::Stored });
    let case = Case::new(name, op, &[rows], rows % 2 * 3, Tolerance::sum(C, rows));
    case.noise(&[Dim::Tokens(1), Dim::Fixed(n)], UNIT).noise(&[Dim::Tokens(1), Dim::Fixed(k)], UNIT)
}
