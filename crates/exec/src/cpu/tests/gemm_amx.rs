//! Products on tiles: as close to f64 as plain f32 is, and what six products make of extreme numbers.

use super::{numbers, workspace};
use crate::cpu::gemm::*;
use crate::cpu::{Cpu, Isa, Rows, RowsMut};

/// x (m, k) w (n, k)^T.
fn product(isa: Isa, (m, k, n): (usize, usize, usize), x: &[f32], w: &[f32]) -> Vec<f32> {
    let mut packed = vec![0.0; packed_len(n, k)];
    let panels = packed.chunks_exact_mut(PANEL * k);
    w.chunks(PANEL * k).zip(panels).for_each(|(rows, out)| pack_panel(rows, k, out));
    let cpu = Cpu::with_isa(1, isa);
    let mut scratch = workspace(&cpu, WORKSPACE.per_unit.0 as usize);
    let mut y = vec![f32::NAN; m * n];
    let (rows, out) = (Rows::new(x, m, k, k), RowsMut::new(&mut y, m, n, n));
    linear(&cpu, rows, &packed, Epilogue::default(), out, &mut scratch);
    y
}

fn with_tiles() -> Option<Isa> {
    let isa = Isa::available().find(|isa| isa.has_tiles());
    if isa.is_none() {
        println!("skipped: no AMX here");
    }
    isa
}

/// The largest error against f64.
fn worst((m, k, n): (usize, usize, usize), x: &[f32], w: &[f32], y: &[f32]) -> f64 {
    let exact = |i: usize, j: usize| -> f64 {
        let pairs = x[i * k..][..k].iter().zip(&w[j * k..][..k]);
        pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    let errors = (0..m * n).map(|at| (f64::from(y[at]) - exact(at / n, at % n)).abs());
    errors.fold(0.0, f64::max)
}

/// 10^-6 to 10^6, by the column of a matrix of `k` columns.
fn scale(at: usize, k: usize) -> f32 {
    10f32.powi((at % k * 7 % 13) as i32 - 6)
}

#[test]
fn no_worse_than_plain_f32() {
    let Some(tiles) = with_tiles() else { return };
    let plain = Isa::available().find(|isa| !isa.has_tiles()).expect("AVX-512 is there");
    let sizes = [(40, 1, 33), (40, 16, 33), (40, 33, 33), (33, 480, 70), (33, 1030, 70), (20, 5120, 32)];
    for size in sizes {
        let (m, k, n) = size;
        let (x, w) = (numbers(1, m * k), numbers(2, n * k));
        let scaled: Vec<f32> = x.iter().enumerate().map(|(at, &x)| x * scale(at, k)).collect();
        let against: Vec<f32> = w.iter().enumerate().map(|(at, &w)| w / scale(at, k)).collect();
        for (x, w, what) in [(&x, &w, "even"), (&scaled, &w, "scaled columns"), (&scaled, &against, "balanced")]
        {
            let [ours, theirs] = [tiles, plain].map(|isa| worst(size, x, w, &product(isa, size, x, w)));
            println!("{size:?} {what}: {ours:.2e} on tiles, {theirs:.2e} plainly");
            assert!(ours <= 2.0 * theirs, "{size:?} {what}: {ours:e} for {theirs:e}");
        }
    }
}

/// The identity gives back every x of normal size: its three parts are all of it.
#[test]
fn no_bit_of_x_is_lost() {
    let Some(tiles) = with_tiles() else { return };
    let (m, k) = (70, 40);
    let mut x = numbers(3, m * k);
    for (at, x) in x.iter_mut().enumerate() {
        *x *= 2f32.powi(at as i32 % 200 - 90);
    }
    let ends = [f32::MAX, -f32::MAX, 0.0, 1.0, -1.0, f32::EPSILON, 1.0 + f32::EPSILON, 1.999_999_9, 3.389_5e38];
    x[..ends.len()].copy_from_slice(&ends);
    let identity: Vec<f32> = (0..k * k).map(|at| f32::from(u8::from(at / k == at % k))).collect();
    assert_eq!(product(tiles, (m, k, k), &x, &identity), x);
    let columns = product(tiles, (k, k, m), &identity, &x);
    let transposed: Vec<f32> = (0..k * m).map(|at| x[at % m * k + at / m]).collect();
    assert_eq!(columns, transposed);
}

/// Denormals may vanish, no more than that.
#[test]
fn what_is_lost_of_tiny_numbers_is_below_the_normal_ones() {
    let Some(tiles) = with_tiles() else { return };
    let k = 33;
    for exponent in [-149, -140, -127, -126, -125, -115, -110] {
        let x: Vec<f32> = numbers(4, k).iter().map(|x| (x.abs() + 1.0) * 2f32.powi(exponent)).collect();
        let y = product(tiles, (1, k, 1), &x, &vec![1.0; k])[0];
        let exact: f64 = x.iter().map(|&x| f64::from(x)).sum();
        let lost = (f64::from(y) - exact).abs();
        assert!(lost <= (2 * k) as f64 * f64::from(f32::MIN_POSITIVE) + 1e-6 * exact, "2^{exponent}: {y:e}");
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let Some(tiles) = with_tiles() else { return };
    let size @ (m, k, n) = (67, 530, 40);
    let (clean, w) = (numbers(5, m * k), numbers(6, n * k));
    let want = product(tiles, size, &clean, &w);
    let odd_nans = [0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0xffff_ffff].map(f32::from_bits);
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN].into_iter().chain(odd_nans) {
        for (row, column) in [(0, 0), (15, 31), (16, 16), (31, 529), (33, 128), (66, 512)] {
            let mut x = clean.clone();
            x[row * k + column] = bad;
            let y = product(tiles, size, &x, &w);
            for (at, (&y, &want)) in y.iter().zip(&want).enumerate() {
                let good = if at / n == row { !y.is_finite() } else { y.to_bits() == want.to_bits() };
                assert!(good, "{bad} in row {row}: row {} has {y}", at / n);
            }
        }
    }
}
