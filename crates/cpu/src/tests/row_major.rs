//! Tests of `row_major::matmul` against f64, against `linear_f32::linear`, and of its bits against itself.

use super::{close, machines, numbers, same_bits, workspace};
use crate::matmul::linear_f32;
use crate::matmul::row_major::*;
use crate::matmul::{Act, LinearCall, MatmulEpilogue};
use crate::{Cpu, Isa, Rows, RowsMut};

/// A matrix (rows, cols) stored with a stride, as is or transposed.
struct Held {
    data: Vec<f32>,
    shape: (usize, usize),
    transposed: bool,
}

impl Held {
    fn new(x: &[f32], (rows, cols): (usize, usize), transposed: bool) -> Self {
        let shape = if transposed { (cols, rows) } else { (rows, cols) };
        let ld = shape.1 + 5;
        let mut data = vec![f32::NAN; shape.0 * ld];
        for r in 0..rows {
            for c in 0..cols {
                data[if transposed { c * ld + r } else { r * ld + c }] = x[r * cols + c];
            }
        }
        Self { data, shape, transposed }
    }

    fn factor(&self) -> Factor<'_> {
        let x = Rows::new(&self.data, self.shape.0, self.shape.1, self.shape.1 + 5);
        if self.transposed { Factor::Transposed(x) } else { Factor::Stored(x) }
    }
}

/// Runs into y with a stride of n + 3; elements between the rows must not change.
fn run(cpu: &Cpu, [a, b]: [&Held; 2], e: MatmulEpilogue<'_>) -> Vec<f32> {
    let (m, _) = a.factor().shape();
    let (_, n) = b.factor().shape();
    let ld = n + 3;
    let mut y = vec![7.0; m * ld];
    let mut scratch = workspace(cpu, WORKSPACE_BYTES);
    let y_rows = RowsMut::new(&mut y, m, n, ld);
    let call = MatmulCall { a: a.factor(), b: b.factor(), epilogue: e, y: y_rows };
    matmul(cpu, call, &mut scratch);
    assert!(y.chunks(ld).all(|row| row[n..].iter().all(|&v| v == 7.0)), "wrote past the row");
    y.chunks(ld).flat_map(|row| row[..n].to_vec()).collect()
}

/// Transposes (rows, cols) to (cols, rows).
fn transpose(x: &[f32], rows: usize) -> Vec<f32> {
    let cols = x.len() / rows;
    (0..x.len()).map(|at| x[at % rows * cols + at / rows]).collect()
}

/// Permitted error for sums of `k` products, as in the tests of `linear_f32`.
fn tolerance(k: usize) -> f64 {
    2.0 * f64::from(f32::EPSILON) * (k as f64).sqrt() * ((k as f64).sqrt() / 3.0 + 1.0)
}

/// Sizes around tiles, panels, slices and blocks; with K = 0, and with no output.
const SIZES: [(usize, usize, usize); 12] = [
    (1, 1, 1),
    (2, 3, 5),
    (15, 385, 64),
    (33, 31, 33),
    (170, 1030, 40),
    (253, 17, 97),
    (520, 100, 16),
    (8, 784, 300),
    (64, 16, 31),
    (5, 0, 7),
    (0, 4, 4),
    (4, 4, 0),
];

#[test]
fn every_orientation_is_the_product() {
    for cpu in machines() {
        for (m, k, n) in SIZES {
            let a = numbers(1, m * k);
            let b = numbers(2, k * n);
            let column = |j: usize| (0..k).map(move |i| i * n + j);
            let want: Vec<f64> = (0..m * n)
                .map(|at| {
                    let pairs = a[at / n * k..][..k].iter().zip(column(at % n));
                    pairs.map(|(&x, i)| f64::from(x) * f64::from(b[i])).sum()
                })
                .collect();
            let held = |x, shape, way| Held::new(x, shape, way);
            let mut first = None;
            for ways in [(false, false), (false, true), (true, false), (true, true)] {
                let a = held(&a, (m, k), ways.0);
                let b = held(&b, (k, n), ways.1);
                let y = run(&cpu, [&a, &b], MatmulEpilogue::default());
                close(&y, &want, tolerance(k.max(1)), &format!("{} {m}x{k}x{n} {ways:?}", cpu.isa().name()));
                same_bits(&y, first.get_or_insert_with(|| y.clone()), "the other orientation");
            }
        }
    }
}

#[test]
fn it_has_the_bits_of_packed_weights() {
    for cpu in machines().filter(|cpu| !cpu.isa().has_tiles()) {
        for (m, k, n) in [(1, 7, 33), (40, 800, 96), (300, 390, 70)] {
            let x = numbers(1, m * k);
            let w = numbers(2, n * k);
            let b = numbers(3, n);
            let r = numbers(4, m * n);
            let mut packed = vec![0.0; linear_f32::packed_len(n, k)];
            for (rows, out) in
                w.chunks(linear_f32::PANEL * k).zip(packed.chunks_exact_mut(linear_f32::PANEL * k))
            {
                linear_f32::pack_panel(rows, k, out);
            }
            for act in [Act::None, Act::Gelu] {
                let e = MatmulEpilogue { bias: Some(&b), act, residual: Some(Rows::new(&r, m, n, n)) };
                let mut want = vec![0.0; m * n];
                let mut scratch = workspace(&cpu, linear_f32::workspace_bytes(cpu.isa()));
                let y = RowsMut::new(&mut want, m, n, n);
                let call = LinearCall { x: Rows::new(&x, m, k, k), w: &packed, epilogue: e, y };
                linear_f32::linear(&cpu, call, &mut scratch);
                let a = Held::new(&x, (m, k), false);
                let b = Held::new(&transpose(&w, n), (k, n), true);
                same_bits(&run(&cpu, [&a, &b], e), &want, &format!("{m}x{k}x{n} {act:?}"));
            }
        }
    }
}

#[test]
fn it_adds_to_what_stands_in_y() {
    let m = 31;
    let k = 1100;
    let n = 70;
    let x = numbers(1, m * k);
    let w = numbers(2, n * k);
    let r = numbers(3, m * n);
    let a = Held::new(&x, (m, k), false);
    let b = Held::new(&w, (k, n), false);
    for cpu in machines() {
        let want = run(
            &cpu,
            [&a, &b],
            MatmulEpilogue { residual: Some(Rows::new(&r, m, n, n)), ..Default::default() },
        );
        let mut y = r.clone();
        let at = y.as_mut_ptr();
        let mut scratch = workspace(&cpu, WORKSPACE_BYTES);
        // SAFETY: the residual is exactly y, which `matmul` allows.
        let (residual, out) = unsafe { (Rows::from_raw(at, m, n, n), RowsMut::from_raw(at, m, n, n)) };
        let e = MatmulEpilogue { residual: Some(residual), ..Default::default() };
        matmul(&cpu, MatmulCall { a: a.factor(), b: b.factor(), epilogue: e, y: out }, &mut scratch);
        same_bits(&y, &want, "in place");
    }
}

#[test]
fn an_element_has_the_same_bits_on_any_threads_and_in_any_company() {
    let m = 600;
    let k = 500;
    let n = 320;
    let x = numbers(5, m * k);
    let w = numbers(6, n * k);
    let all = |isa: Isa, threads, m: usize| {
        let a = Held::new(&x[..m * k], (m, k), true);
        let b = Held::new(&w, (k, n), false);
        run(&Cpu::with_isa(threads, isa), [&a, &b], MatmulEpilogue::default())
    };
    let best = all(Isa::detect(), 1, m);
    for isa in Isa::available().filter(|isa| isa.has_fma() == Isa::detect().has_fma()) {
        for (threads, rows) in [(2, m), (3, m), (4, 253), (3, 252), (2, 9)] {
            same_bits(&all(isa, threads, rows), &best[..rows * n], &format!("{} x {threads}", isa.name()));
        }
    }
}
