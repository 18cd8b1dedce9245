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

/// The table of the module's doc: `cargo test -p plimsoll-exec no_worse_than_plain_f32 -- --nocapture`.
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
        }
    }
}
