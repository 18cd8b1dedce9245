//! Tests of f32 matmuls on tiles: as close to f64 as plain f32, and the results of the bf16x3 split for extreme
//! numbers. CPUs without tiles use the emulation; on others, the bits must equal the emulation's.

use super::double::Double;
use super::{numbers, same_bits, workspace};
use crate::matmul::linear::LinearOperands;
use crate::matmul::linear_f32::*;
use crate::matmul::{Act, LinearCall, MatmulEpilogue};
use crate::simd::amx::{TileUnit, Tiles};
use crate::{Cpu, Isa, Rows, RowsMut, matmul::linear_f32_amx};

/// (m, k, n) of x (m, k) w (n, k)^T.
type Size = (usize, usize, usize);

fn pack((_, k, n): Size, w: &[f32]) -> Vec<f32> {
    let mut packed = vec![0.0; packed_len(n, k)];
    let panels = packed.chunks_exact_mut(PANEL * k);
    w.chunks(PANEL * k).zip(panels).for_each(|(rows, out)| pack_panel(rows, k, out));
    packed
}

/// Matmul with the tile unit `U`.
///
/// # Safety
/// The CPU has AVX-512 and the registers of `U`.
unsafe fn by<U: TileUnit>(
    threads: usize,
    size @ (m, k, n): Size,
    x: &[f32],
    w: &[f32],
    e: MatmulEpilogue<'_>,
) -> Vec<f32> {
    let cpu = Cpu::new(threads);
    let each = plimsoll_plan::InstructionSet::Amx.gemm_f32() as usize;
    let mut scratch = workspace(&cpu, each);
    let w = pack(size, w);
    let mut y = vec![f32::NAN; m * n];
    let rows = Rows::new(x, m, k, k);
    let out = RowsMut::new(&mut y, m, n, n);
    let operands = LinearOperands::new(rows, &w, e, &out);
    // SAFETY: as the caller promises; `scratch` holds the workspace of all threads.
    unsafe { linear_f32_amx::linear::<U>(&cpu, operands, scratch.as_mut_ptr(), each) };
    y
}

fn with_epilogue(threads: usize, size: Size, x: &[f32], w: &[f32], e: MatmulEpilogue<'_>) -> Vec<f32> {
    // SAFETY: the double is plain code, and every test asks for AVX-512 first.
    let y = unsafe { by::<Double>(threads, size, x, w, e) };
    if Isa::detect().has_tiles() {
        // SAFETY: there are tiles.
        same_bits(&unsafe { by::<Tiles>(threads, size, x, w, e) }, &y, "tiles and their double");
    }
    y
}

fn on_tiles(size: Size, x: &[f32], w: &[f32]) -> Vec<f32> {
    with_epilogue(1, size, x, w, MatmulEpilogue::default())
}

/// Matmul in plain f32: one chain of multiply-adds for each element.
fn plainly(size @ (m, k, n): Size, x: &[f32], w: &[f32]) -> Vec<f32> {
    let isa = Isa::available().find(|isa| !isa.has_tiles()).expect("AVX-512 is there");
    let cpu = Cpu::with_isa(1, isa);
    let mut scratch = workspace(&cpu, plimsoll_plan::InstructionSet::Amx.gemm_f32() as usize);
    let mut y = vec![f32::NAN; m * n];
    let rows = Rows::new(x, m, k, k);
    let out = RowsMut::new(&mut y, m, n, n);
    let w = pack(size, w);
    let call = LinearCall { x: rows, w: &w, epilogue: MatmulEpilogue::default(), y: out };
    linear(&cpu, call, &mut scratch);
    y
}

fn has_vectors() -> bool {
    let has = Isa::detect().has_avx512();
    if !has {
        println!("skipped: no AVX-512 here");
    }
    has
}

/// The largest error against f64.
fn worst((m, k, n): Size, x: &[f32], w: &[f32], y: &[f32]) -> f64 {
    let exact = |i: usize, j: usize| -> f64 {
        let pairs = x[i * k..][..k].iter().zip(&w[j * k..][..k]);
        pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    let errors = (0..m * n).map(|at| (f64::from(y[at]) - exact(at / n, at % n)).abs());
    errors.fold(0.0, f64::max)
}

/// A factor from 10^-6 to 10^6, by the column in a matrix of `k` columns.
fn scale(at: usize, k: usize) -> f32 {
    10f32.powi((at % k * 7 % 13) as i32 - 6)
}

#[test]
fn no_worse_than_plain_f32() {
    if !has_vectors() {
        return;
    }
    let sizes = [(40, 1, 33), (40, 16, 33), (40, 33, 33), (33, 480, 70), (33, 1030, 70), (20, 5120, 32)];
    for size in sizes {
        let (m, k, n) = size;
        let x = numbers(1, m * k);
        let w = numbers(2, n * k);
        let scaled: Vec<f32> = x.iter().enumerate().map(|(at, &x)| x * scale(at, k)).collect();
        let against: Vec<f32> = w.iter().enumerate().map(|(at, &w)| w / scale(at, k)).collect();
        for (x, w, what) in [(&x, &w, "even"), (&scaled, &w, "scaled columns"), (&scaled, &against, "balanced")]
        {
            let [ours, theirs] = [on_tiles(size, x, w), plainly(size, x, w)].map(|y| worst(size, x, w, &y));
            println!("{size:?} {what}: {ours:.2e} on tiles, {theirs:.2e} plainly");
            assert!(ours <= 2.0 * theirs, "{size:?} {what}: {ours:e} for {theirs:e}");
        }
    }
}

#[test]
fn a_matmul_without_columns_writes_nothing() {
    if has_vectors() {
        for (m, k) in [(5, 7), (40, 1700)] {
            assert!(on_tiles((m, k, 0), &numbers(1, m * k), &[]).is_empty());
        }
    }
}

/// Multiplication by the identity returns every normal x: hi, mid and lo represent all of it.
#[test]
fn no_bit_of_x_is_lost() {
    if !has_vectors() {
        return;
    }
    let m = 70;
    let k = 40;
    let mut x = numbers(3, m * k);
    for (at, x) in x.iter_mut().enumerate() {
        *x *= 2f32.powi(at as i32 % 200 - 90);
    }
    let ends = [f32::MAX, -f32::MAX, 0.0, 1.0, -1.0, f32::EPSILON, 1.0 + f32::EPSILON, 1.999_999_9, 3.389_5e38];
    x[..ends.len()].copy_from_slice(&ends);
    let identity: Vec<f32> = (0..k * k).map(|at| f32::from(u8::from(at / k == at % k))).collect();
    assert_eq!(on_tiles((m, k, k), &x, &identity), x);
    let columns = on_tiles((k, k, m), &identity, &x);
    let transposed: Vec<f32> = (0..k * m).map(|at| x[at % m * k + at / m]).collect();
    assert_eq!(columns, transposed);
}

/// Denormals may become zero, but nothing else is lost.
#[test]
fn what_is_lost_of_tiny_numbers_is_below_the_normal_ones() {
    if !has_vectors() {
        return;
    }
    let k = 33;
    for exponent in [-149, -140, -127, -126, -125, -115, -110] {
        let x: Vec<f32> = numbers(4, k).iter().map(|x| (x.abs() + 1.0) * 2f32.powi(exponent)).collect();
        let y = on_tiles((1, k, 1), &x, &vec![1.0; k])[0];
        let exact: f64 = x.iter().map(|&x| f64::from(x)).sum();
        let lost = (f64::from(y) - exact).abs();
        assert!(lost <= (2 * k) as f64 * f64::from(f32::MIN_POSITIVE) + 1e-6 * exact, "2^{exponent}: {y:e}");
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    if !has_vectors() {
        return;
    }
    let size @ (m, k, n) = (67, 530, 40);
    let clean = numbers(5, m * k);
    let w = numbers(6, n * k);
    let want = on_tiles(size, &clean, &w);
    let odd_nans = [0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0xffff_ffff].map(f32::from_bits);
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN].into_iter().chain(odd_nans) {
        for (row, column) in [(0, 0), (15, 31), (16, 16), (31, 529), (33, 128), (66, 512)] {
            let mut x = clean.clone();
            x[row * k + column] = bad;
            let y = on_tiles(size, &x, &w);
            for (at, (&y, &want)) in y.iter().zip(&want).enumerate() {
                let good = if at / n == row { !y.is_finite() } else { y.to_bits() == want.to_bits() };
                assert!(good, "{bad} in row {row}: row {} has {y}", at / n);
            }
        }
    }
}

/// Blocks of several strips, groups of panels, and K of one slice, of several, and not of whole steps.
#[test]
fn a_row_has_the_same_bits_in_any_company() {
    if !has_vectors() {
        return;
    }
    let most = 100;
    for (k, n) in [(33, 40), (128, 33), (400, 97), (160, 700)] {
        let x = numbers(5, most * k);
        let w = numbers(6, n * k);
        let b = numbers(7, n);
        let r = numbers(8, most * n);
        let part = |threads, start: usize, m: usize| {
            let residual = Some(Rows::new(&r[start * n..], m, n, n));
            let e = MatmulEpilogue { bias: Some(&b), act: Act::Gelu, residual };
            with_epilogue(threads, (m, k, n), &x[start * k..][..m * k], &w, e)
        };
        let all = part(1, 0, most);
        for (threads, start, m) in [(1, 3, 1), (1, 1, 31), (2, 5, 32), (3, 7, 33), (2, 2, 98)] {
            let what = format!("{m} rows of {k} from {start}, {n} columns");
            same_bits(&part(threads, start, m), &all[start * n..][..m * n], &what);
        }
    }
}
