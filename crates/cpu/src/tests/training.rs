//! Tests of expert matmuls and the chunked cross-entropy: the same bits for any number of threads, and rows that
//! must be ignored. Their values are compared with the reference in the op cases.

use super::{numbers, same_bits, workspace};
use crate::matmul::grouped::{self, ExpertInputGrad, ExpertLinear, ExpertWeightGrad};
use crate::matmul::{MatmulEpilogue, row_major};
use crate::training::cross_entropy::{CrossEntropyHead, HeadGradients, SavedLoss, gradients, loss};
use crate::{Cpu, Isa, Rows, RowsMut};

const ROWS: usize = 130;
const CLASSES: usize = 700;
const WIDTH: usize = 40;

/// Runs the loss and its gradients. Returns (sum and its two terms), lse, dx, dw and db; memory that the kernels must
/// write is NaN before.
fn head(cpu: &Cpu, x: &[f32], targets: &[i32], chunk: usize) -> [Vec<f32>; 5] {
    let w = numbers(2, CLASSES * WIDTH);
    let b = numbers(3, CLASSES);
    let x = Rows::new(x, ROWS, WIDTH, WIDTH);
    let w = Rows::new(&w, CLASSES, WIDTH, WIDTH);
    let head = CrossEntropyHead { x, w, bias: Some(&b), targets, chunk, z_loss: 1e-2 };
    let mut scratch = workspace(cpu, row_major::WORKSPACE_BYTES);
    scratch.resize(scratch.len() + chunk.min(ROWS) * (CLASSES + WIDTH + 2), f32::NAN);
    let [mut lse, mut dx, mut dw, mut db] =
        [ROWS, ROWS * WIDTH, CLASSES * WIDTH, CLASSES].map(|n| vec![f32::NAN; n]);
    let sum = loss(cpu, head, Some(&mut lse), &mut scratch);
    scratch.fill(f32::NAN);
    let to = HeadGradients {
        dx: Some(RowsMut::new(&mut dx, ROWS, WIDTH, WIDTH)),
        dw: Some(RowsMut::new(&mut dw, CLASSES, WIDTH, WIDTH)),
        db: Some(&mut db),
    };
    gradients(cpu, head, SavedLoss { dloss: 0.5, lse: &lse }, to, &mut scratch);
    [vec![sum.sum, sum.cross_entropy, sum.z], lse, dx, dw, db]
}

/// A target for each row; every fourth row is ignored.
fn targets() -> Vec<i32> {
    (0..ROWS).map(|r| if r % 4 == 1 { -1 } else { (r * 7919 % CLASSES) as i32 }).collect()
}

#[test]
fn a_loss_has_the_same_bits_on_any_threads() {
    let x = numbers(1, ROWS * WIDTH);
    let targets = targets();
    for isa in Isa::available() {
        for chunk in [1, 32, 4096] {
            let one = head(&Cpu::with_isa(1, isa), &x, &targets, chunk);
            let three = head(&Cpu::with_isa(3, isa), &x, &targets, chunk);
            one.iter().zip(&three).for_each(|(a, b)| same_bits(a, b, "threads"));
            let whole = head(&Cpu::with_isa(1, isa), &x, &targets, ROWS);
            // The loss is added row by row, dx is computed row by row; only dw and db, sums over rows, depend on
            // the chunk size.
            one.iter().zip(&whole).take(3).for_each(|(a, b)| same_bits(a, b, "chunks"));
        }
    }
}

#[test]
fn rows_that_do_not_count_are_not_read() {
    let mut x = numbers(1, ROWS * WIDTH);
    let targets = targets();
    let cpu = Cpu::new(2);
    let before = head(&cpu, &x, &targets, 16);
    for (row, _) in x.chunks_mut(WIDTH).zip(&targets).filter(|(_, target)| **target < 0) {
        row.fill(f32::NAN);
    }
    let after = head(&cpu, &x, &targets, 16);
    before.iter().zip(&after).for_each(|(a, b)| same_bits(a, b, "ignored rows"));
    assert!(after.iter().flatten().all(|v| v.is_finite()));
    let none = head(&cpu, &x, &[-1; ROWS], 16);
    assert!(none.iter().flatten().all(|&v| v == 0.0), "nothing counts");
}

#[test]
fn an_expert_has_the_bits_of_its_product_alone() {
    let experts = 4;
    let n = 70;
    let k = 90;
    let rows = 400;
    let offsets = [0, 3, 3, 290, 380];
    let x = numbers(1, rows * k);
    let w = numbers(2, experts * n * k);
    let dy = numbers(3, rows * n);
    let xs = Rows::new(&x, rows, k, k);
    let ws = Rows::new(&w, experts * n, k, k);
    let dys = Rows::new(&dy, rows, n, n);
    let run = |cpu: &Cpu| {
        let [mut y, mut dx, mut dw, mut db] =
            [rows * n, rows * k, experts * n * k, experts * n].map(|len| vec![f32::NAN; len]);
        let mut scratch = workspace(cpu, row_major::WORKSPACE_BYTES);
        let offsets = &offsets[..];
        let y_rows = RowsMut::new(&mut y, rows, n, n);
        grouped::linear(cpu, ExpertLinear { x: xs, w: ws, bias: None, offsets, y: y_rows }, &mut scratch);
        let dx_rows = RowsMut::new(&mut dx, rows, k, k);
        grouped::input_grad(cpu, ExpertInputGrad { dy: dys, w: ws, offsets, dx: dx_rows }, &mut scratch);
        let dw_rows = Some(RowsMut::new(&mut dw, experts * n, k, k));
        let grad = ExpertWeightGrad { dy: dys, x: xs, offsets, dw: dw_rows, db: Some(&mut db) };
        grouped::weight_grad(cpu, grad, &mut scratch);
        [y, dx, dw, db]
    };
    let one = run(&Cpu::new(1));
    one.iter().zip(&run(&Cpu::new(3))).for_each(|(a, b)| same_bits(a, b, "threads"));
    let cpu = Cpu::new(2);
    let mut scratch = workspace(&cpu, row_major::WORKSPACE_BYTES);
    let mut y = vec![0.0; 287 * n];
    let a = row_major::Factor::Stored(xs.part(3, 287));
    let b = row_major::Factor::Transposed(ws.part(2 * n, n));
    let y_rows = RowsMut::new(&mut y, 287, n, n);
    let call = row_major::MatmulCall { a, b, epilogue: MatmulEpilogue::default(), y: y_rows };
    row_major::matmul(&cpu, call, &mut scratch);
    same_bits(&one[0][3 * n..290 * n], &y, "the third expert");
    assert!(one[0][380 * n..].iter().all(|&v| v == 0.0) && one[2][n * k..2 * n * k].iter().all(|&v| v == 0.0));
}
