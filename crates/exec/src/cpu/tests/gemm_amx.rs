//! f32 products on tiles of integers: against f64 and the plain chain of multiply-adds, and what three digits make of
//! extreme numbers. Where there are no tiles their double multiplies; where there are, the bits are the double's.

use super::double::Double;
use super::{numbers, same_bits, workspace};
use crate::cpu::amx::{ThreeDigits, Tiles};
use crate::cpu::gemm::*;
use crate::cpu::{Cpu, Isa, Rows, RowsMut, gemm_amx};

/// (m, k, n) of x (m, k) w (n, k)^T.
type Size = (usize, usize, usize);

fn pack((_, k, n): Size, w: &[f32]) -> Vec<f32> {
    let mut packed = vec![0.0; packed_len(n, k)];
    let panels = packed.chunks_exact_mut(PANEL * k);
    w.chunks(PANEL * k).zip(panels).for_each(|(rows, out)| pack_panel(rows, k, out));
    packed
}

/// # Safety
/// The CPU has AVX-512 and the registers of `U`.
unsafe fn on<U: ThreeDigits>(
    threads: usize,
    size @ (m, k, n): Size,
    x: &[f32],
    w: &[f32],
    e: Epilogue<'_>,
) -> Vec<f32> {
    let cpu = Cpu::new(threads);
    let mut scratch = workspace(&cpu, WORKSPACE.per_unit.0 as usize);
    let mut y = vec![f32::NAN; m * n];
    let (rows, out, w) = (Rows::new(x, m, k, k), RowsMut::new(&mut y, m, n, n), pack(size, w));
    // SAFETY: as the caller promises; the workspace is that of all threads.
    unsafe {
        let job = Job::new(rows, &w, e, &out);
        gemm_amx::linear::<U>(&cpu, job, scratch.as_mut_ptr(), WORKSPACE.per_unit.0 as usize);
    }
    y
}

/// The product by the double, and by the tiles where there are any.
fn with_epilogue(threads: usize, size: Size, x: &[f32], w: &[f32], e: Epilogue<'_>) -> Vec<f32> {
    // SAFETY: the double is plain code, and every test asks for AVX-512 first.
    let y = unsafe { on::<Double<true>>(threads, size, x, w, e) };
    if Isa::detect().has_tiles() {
        // SAFETY: there are tiles.
        same_bits(&unsafe { on::<Tiles<true>>(threads, size, x, w, e) }, &y, "tiles and their double");
    }
    y
}

fn product(size: Size, x: &[f32], w: &[f32]) -> Vec<f32> {
    with_epilogue(1, size, x, w, Epilogue::default())
}

fn vectors() -> bool {
    let has = Isa::detect().name().starts_with("avx512");
    if !has {
        println!("skipped: no AVX-512 here");
    }
    has
}

/// One chain of multiply-adds for each element.
fn chain((m, k, n): Size, x: &[f32], w: &[f32]) -> Vec<f32> {
    let element = |i: usize, j: usize| (0..k).fold(0.0f32, |sum, at| x[i * k + at].mul_add(w[j * k + at], sum));
    (0..m * n).map(|at| element(at / n, at % n)).collect()
}

/// Relative L2 error against f64, and the largest one of an element over |x| |w|.
fn errors((m, k, n): Size, x: &[f32], w: &[f32], y: &[f32]) -> [f64; 2] {
    let row = |x: &[f32], i: usize| x[i * k..][..k].iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (mut lost, mut all, mut worst) = (0.0, 0.0, 0.0f64);
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    for i in 0..m {
        for j in 0..n {
            let (x, w) = (row(x, i), row(w, j));
            let exact: f64 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
            let error = (f64::from(y[i * n + j]) - exact).abs();
            (lost, all) = (lost + error * error, all + exact * exact);
            worst = worst.max(error / (norm(&x) * norm(&w)).max(f64::MIN_POSITIVE));
        }
    }
    [(lost / all).sqrt(), worst]
}

/// About normal: sums of twelve.
fn normal(seed: u64, n: usize) -> Vec<f32> {
    numbers(seed, 12 * n).chunks(12).map(|x| x.iter().sum::<f32>() / 2.0).collect()
}

/// Rows of x by what they are like.
fn rows((m, k, _): Size) -> Vec<(&'static str, Vec<f32>)> {
    let x = normal(1, m * k);
    let map = |f: &dyn Fn(usize, f32) -> f32| x.iter().enumerate().map(|(at, &x)| f(at, x)).collect::<Vec<_>>();
    let gelu = |x: f64| x * 0.5 * libm::erfc(-x / std::f64::consts::SQRT_2);
    let one = |by: f32| map(&|at, x| if at % k == at / k * 37 % k { x.signum() * by } else { x });
    vec![
        ("normal", x.clone()),
        ("gelu", map(&|_, x| gelu(1.5 * f64::from(x)) as f32)),
        ("one 8x", one(8.0)),
        ("one 100x", one(100.0)),
        ("one 1000x", one(1000.0)),
        ("two columns 100x", map(&|at, x| if [3, k / 2].contains(&(at % k)) { 100.0 * x } else { x })),
        ("span 2^20", map(&|at, x| x * 2f32.powi((at * 7919 % 21) as i32 - 10))),
        ("scaled columns", map(&|at, x| x * 10f32.powi((at % k * 7 % 13) as i32 - 6))),
    ]
}

/// The table of the module's doc: `cargo test -p plimsoll-exec --lib no_worse_than_plain_f32 -- --nocapture`.
#[test]
fn no_worse_than_plain_f32() {
    if !vectors() {
        return;
    }
    for k in [1, 16, 33, 320, 480, 640, 1280, 2560, 5120] {
        let size @ (_, _, n) = (33, k, 33);
        let w = normal(2, n * k);
        for (what, x) in rows(size) {
            let [ours, theirs] = [product(size, &x, &w), chain(size, &x, &w)].map(|y| errors(size, &x, &w, &y));
            println!(
                "{k} {what}: {:.1e} {:.1e} in digits, {:.1e} {:.1e} by the chain",
                ours[0], ours[1], theirs[0], theirs[1]
            );
            assert!(ours[1] <= 2f64.powi(-22), "{k} {what}: {ours:?}");
            // A chain of few steps rounds less often than there are digits.
            assert!(k < 320 || ours[0] <= 1.5 * theirs[0], "{k} {what}: {ours:?} for {theirs:?}");
        }
    }
}

/// The chain is as close to a sum of small products of large and small numbers as to any; digits to |x| |w|.
#[test]
fn numbers_far_below_the_largest_lose_digits() {
    if !vectors() {
        return;
    }
    let size @ (m, k, n) = (20, 640, 33);
    let power = |at: usize| 2f32.powi((at % k * 7919 % 21) as i32 - 10);
    let x: Vec<f32> = normal(1, m * k).iter().enumerate().map(|(at, x)| x * power(at)).collect();
    let w: Vec<f32> = normal(2, n * k).iter().enumerate().map(|(at, w)| w / power(at)).collect();
    let [lost, of_norms] = errors(size, &x, &w, &product(size, &x, &w));
    println!("balanced columns: {lost:.1e}, over |x| |w| {of_norms:.1e}");
    assert!(of_norms <= 2f64.powi(-22));
}

#[test]
fn the_identity_gives_back_what_is_not_far_below_the_largest() {
    if !vectors() {
        return;
    }
    let (m, k) = (37, 40);
    let power = |at: usize| 2f32.powi(at as i32 % 200 - 90);
    let x: Vec<f32> = numbers(3, m * k).iter().enumerate().map(|(at, x)| x * power(at)).collect();
    let identity: Vec<f32> = (0..k * k).map(|at| f32::from(u8::from(at / k == at % k))).collect();
    let largest = |row: usize| x[row * k..][..k].iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let rows = product((m, k, k), &x, &identity);
    let columns = product((k, k, m), &identity, &x);
    for (at, &x) in x.iter().enumerate() {
        let most = 2f32.powi(-21) * largest(at / k);
        for y in [rows[at], columns[at % k * m + at / k]] {
            assert!((y - x).abs() <= most, "{y:e} for {x:e}");
        }
    }
}

/// Denormals may vanish, no more than that.
#[test]
fn what_is_lost_of_tiny_numbers_is_below_the_normal_ones() {
    if !vectors() {
        return;
    }
    let k = 33;
    for exponent in [-149, -140, -127, -126, -125, -115, -110] {
        let x: Vec<f32> = numbers(4, k).iter().map(|x| (x.abs() + 1.0) * 2f32.powi(exponent)).collect();
        let y = product((1, k, 1), &x, &vec![1.0; k])[0];
        let exact: f64 = x.iter().map(|&x| f64::from(x)).sum();
        let lost = (f64::from(y) - exact).abs();
        assert!(lost <= (2 * k) as f64 * f64::from(f32::MIN_POSITIVE) + 1e-6 * exact, "2^{exponent}: {y:e}");
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row_or_column() {
    if !vectors() {
        return;
    }
    let size @ (m, k, n) = (35, 530, 40);
    let (clean, weights) = (numbers(5, m * k), numbers(6, n * k));
    let want = product(size, &clean, &weights);
    let odd_nans = [0x7f80_0001, 0xffff_ffff].map(f32::from_bits);
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN].into_iter().chain(odd_nans) {
        for (row, column) in [(0, 0), (15, 31), (16, 16), (31, 529), (33, 128), (34, 512)] {
            let (mut x, mut w) = (clean.clone(), weights.clone());
            x[row * k + column] = bad;
            w[row * k + column] = bad;
            let [of_rows, of_columns] = [product(size, &x, &weights), product(size, &clean, &w)];
            for (at, &want) in want.iter().enumerate() {
                let right =
                    |y: f32, bad: bool| if bad { !y.is_finite() } else { y.to_bits() == want.to_bits() };
                assert!(right(of_rows[at], at / n == row), "{bad} in row {row}: row {}", at / n);
                assert!(right(of_columns[at], at % n == row), "{bad} in column {row}: column {}", at % n);
            }
        }
    }
}

/// Elements that are taken out among them; K of one slice, of several, and not of whole steps.
#[test]
fn a_row_has_the_same_bits_in_any_company() {
    if !vectors() {
        return;
    }
    let most = 70;
    for (k, n) in [(33, 40), (192, 33), (400, 97)] {
        let (mut x, w) = (normal(5, most * k), numbers(6, n * k));
        x.iter_mut().step_by(97).for_each(|x| *x *= 100.0);
        let (b, r) = (numbers(7, n), numbers(8, most * n));
        let part = |threads, start: usize, m: usize| {
            let residual = Some(Rows::new(&r[start * n..], m, n, n));
            let e = Epilogue { bias: Some(&b), act: Act::Gelu, residual };
            with_epilogue(threads, (m, k, n), &x[start * k..][..m * k], &w, e)
        };
        let all = part(1, 0, most);
        for m in [1, 2, 15, 16, 17, 31, 32, 33] {
            for (threads, start) in [(1, 0), (2, 1), (3, most - m)] {
                same_bits(
                    &part(threads, start, m),
                    &all[start * n..][..m * n],
                    &format!("{m} rows of {k} from {start}"),
                );
            }
        }
    }
}

#[test]
fn bias_activation_and_residual_follow() {
    if !vectors() {
        return;
    }
    for size @ (m, k, n) in [(1, 1, 1), (18, 70, 33), (5, 513, 64)] {
        let (x, w, b, r) = (numbers(1, m * k), numbers(2, n * k), numbers(3, n), numbers(4, m * n));
        for act in [Act::None, Act::Gelu, Act::Relu] {
            let e = Epilogue { bias: Some(&b), act, residual: Some(Rows::new(&r, m, n, n)) };
            let y = with_epilogue(2, size, &x, &w, e);
            for (at, sum) in chain(size, &x, &w).into_iter().enumerate() {
                let v = f64::from(sum) + f64::from(b[at % n]);
                let v = match act {
                    Act::None => v,
                    Act::Gelu => v * 0.5 * libm::erfc(-v / std::f64::consts::SQRT_2),
                    Act::Relu => v.max(0.0),
                };
                let error = (f64::from(y[at]) - v - f64::from(r[at])).abs();
                assert!(error <= 1e-6 * (k as f64).sqrt(), "{size:?} {act:?} [{at}]: {}", y[at]);
            }
        }
    }
}
