//! Tests of `linear_f32::linear` against f64, and of its bits against itself.

use super::{close, machines, numbers, peer, same_bits, workspace};
use crate::matmul::linear_f32::*;
use crate::matmul::{Act, LinearCall, MatmulEpilogue};
use crate::{Cpu, Isa, Rows, RowsMut};

fn pack(w: &[f32], n: usize, k: usize) -> Vec<f32> {
    let mut packed = vec![f32::NAN; packed_len(n, k)];
    if k > 0 {
        let panels = packed.chunks_exact_mut(PANEL * k);
        w.chunks(PANEL * k).zip(panels).for_each(|(rows, out)| pack_panel(rows, k, out));
    }
    packed
}

/// Runs into y with a stride of n + 3; elements between the rows must not change.
fn run(cpu: &Cpu, m: usize, k: usize, n: usize, x: &[f32], w: &[f32], e: MatmulEpilogue<'_>) -> Vec<f32> {
    let ldx = k + 5;
    let ldy = n + 3;
    let mut strided = vec![f32::NAN; m * ldx];
    for r in 0..m {
        strided[r * ldx..][..k].copy_from_slice(&x[r * k..][..k]);
    }
    let mut y = vec![7.0; m * ldy];
    let mut scratch = workspace(cpu, workspace_bytes(cpu.isa()));
    let rows = Rows::new(&strided, m, k, ldx);
    let out = RowsMut::new(&mut y, m, n, ldy);
    let w = pack(w, n, k);
    linear(cpu, LinearCall { x: rows, w: &w, epilogue: e, y: out }, &mut scratch);
    assert!(y.chunks(ldy).all(|row| row[n..].iter().all(|&v| v == 7.0)), "wrote past the row");
    y.chunks(ldy).flat_map(|row| row[..n].to_vec()).collect()
}

fn reference(
    m: usize,
    k: usize,
    n: usize,
    x: &[f32],
    w: &[f32],
    e: &MatmulEpilogue<'_>,
    r: &[f32],
) -> Vec<f64> {
    let mut y = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let pairs = x[i * k..][..k].iter().zip(&w[j * k..][..k]);
            let mut v: f64 = pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            v += e.bias.map_or(0.0, |b| f64::from(b[j]));
            v = match e.act {
                Act::None => v,
                Act::Gelu => v * 0.5 * libm::erfc(-v / std::f64::consts::SQRT_2),
            };
            y.push(v + e.residual.map_or(0.0, |_| f64::from(r[i * n + j])));
        }
    }
    y
}

/// Tolerance of a dot product over K elements: `2 eps sqrt(K) (sqrt(K) / 3 + 1)`. Rounding errors of a sum grow as
/// sqrt(K), relative to the size of the sum, which is about sqrt(K) / 3 here; `+ 1` is a floor for small sums.
/// The worst case would be `eps K / 4`, since the mean of |x w| is 1/4.
fn tolerance(k: usize) -> f64 {
    2.0 * f64::from(f32::EPSILON) * (k as f64).sqrt() * ((k as f64).sqrt() / 3.0 + 1.0)
}

#[test]
fn linear_is_the_product_with_its_epilogue() {
    let sizes = [
        (1, 1, 1),
        (2, 3, 5),
        (13, 480, 96),
        (33, 31, 33),
        (15, 513, 64),
        (170, 1030, 40),
        (5, 0, 7),
        (0, 4, 4),
        (5, 7, 0),
        (40, 1700, 0),
    ];
    for cpu in machines() {
        for (m, k, n) in sizes {
            let x = numbers(1, m * k);
            let w = numbers(2, n * k);
            let b = numbers(3, n);
            let r = numbers(4, m * n);
            for act in [Act::None, Act::Gelu] {
                for with in 0..4 {
                    let e = MatmulEpilogue {
                        bias: (with & 1 > 0).then_some(&b),
                        act,
                        residual: (with & 2 > 0).then(|| Rows::new(&r, m, n, n)),
                    };
                    let y = run(&cpu, m, k, n, &x, &w, e);
                    let want = reference(m, k, n, &x, &w, &e, &r);
                    let what = format!("{} {m}x{k}x{n} {act:?} {with}", cpu.isa().name());
                    close(&y, &want, tolerance(k.max(1)), &what);
                }
            }
        }
    }
}

#[test]
fn the_residual_may_be_the_output() {
    let m = 31;
    let k = 1100;
    let n = 70;
    let x = numbers(1, m * k);
    let w = numbers(2, n * k);
    let r = numbers(3, m * n);
    for cpu in machines() {
        let apart = MatmulEpilogue { residual: Some(Rows::new(&r, m, n, n)), ..Default::default() };
        let want = run(&cpu, m, k, n, &x, &w, apart);
        let mut y = r.clone();
        let at = y.as_mut_ptr();
        let mut scratch = workspace(&cpu, workspace_bytes(cpu.isa()));
        // SAFETY: the residual is exactly y, which `linear` allows.
        let (residual, out) = unsafe { (Rows::from_raw(at, m, n, n), RowsMut::from_raw(at, m, n, n)) };
        let e = MatmulEpilogue { residual: Some(residual), ..Default::default() };
        let packed = pack(&w, n, k);
        let call = LinearCall { x: Rows::new(&x, m, k, k), w: &packed, epilogue: e, y: out };
        linear(&cpu, call, &mut scratch);
        same_bits(&y, &want, "in place");
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let k = 1050;
    let n = 97;
    let most = 400;
    let x = numbers(5, most * k);
    let w = numbers(6, n * k);
    let b = numbers(7, n);
    let e = MatmulEpilogue { bias: Some(&b), act: Act::Gelu, residual: None };
    let plain = |isa: Isa| isa.has_fma() && !isa.has_tiles();
    let fused = Isa::available().find(|&isa| plain(isa)).unwrap_or(Isa::detect());
    let fused = run(&Cpu::with_isa(1, fused), most, k, n, &x, &w, e);
    for cpu in machines() {
        let all = if plain(cpu.isa()) { fused.clone() } else { run(&cpu, most, k, n, &x, &w, e) };
        for m in [1, 2, 13, 14, 15, 16, 17, 31, 32, 33, 200] {
            for start in [0, 1, 5, 150, most - m] {
                let y = run(&cpu, m, k, n, &x[start * k..][..m * k], &w, e);
                let what = format!("{} {m} rows from {start}", cpu.isa().name());
                same_bits(&y, &all[start * n..][..m * n], &what);
            }
        }
    }
}

#[test]
fn it_agrees_with_the_gemm_crate() {
    let m = 61;
    let k = 333;
    let n = 129;
    let x = numbers(8, m * k);
    let w = numbers(9, n * k);
    let mut product = vec![0.0f32; m * n];
    peer::linear(1, (m, n, k), &x, &w, &mut product);
    let want: Vec<f64> = product.iter().map(|&v| f64::from(v)).collect();
    for isa in Isa::available() {
        let y = run(&Cpu::with_isa(2, isa), m, k, n, &x, &w, MatmulEpilogue::default());
        close(&y, &want, 2.0 * tolerance(k), "against gemm");
    }
}

#[test]
fn a_panel_is_32_columns_by_k_padded() {
    let n = 35;
    let k = 3;
    let w: Vec<f32> = (0..n * k).map(|i| i as f32).collect();
    let p = pack(&w, n, k);
    for column in 0..64 {
        for kk in 0..k {
            let want = if column < n { w[column * k + kk] } else { 0.0 };
            assert_eq!(p[column / 32 * 32 * k + kk * 32 + column % 32], want);
        }
    }
}
