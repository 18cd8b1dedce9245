//! Times the CPU kernels: the product against a raw FMA loop and the `gemm` crate, attention against the raw
//! loop. Both sides of each ratio run by turns in one process; medians.
//!
//! `cargo run --release -p plimsoll-exec --example kernels [-- threads [avx512|avx2|portable]]`

use plimsoll_exec::cpu::attention::{self, Attention, Rope, attention};
use plimsoll_exec::cpu::gemm::{self, Act, Epilogue};
use plimsoll_exec::cpu::{Cpu, Isa, Rows, RowsMut, elementwise, norm, rope};
use std::hint::black_box;
use std::time::Instant;

const TURNS: usize = 15;

fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(2);
    let named = |name: String| Isa::available().find(|isa| isa.name() == name).expect("this machine has it");
    let isa = std::env::args().nth(2).map_or_else(Isa::detect, named);
    let cpu = Cpu::with_isa(threads, isa);
    println!("{} x {threads}; medians of {TURNS} turns; rates in GFLOP/s", cpu.isa().name());
    println!(
        "{:>22} {:>8} {:>8} {:>8} {:>8} | ours/raw ours/gemm",
        "linear M,N,K", "raw", "gemm", "ours", "+gelu"
    );
    let shapes = [
        (480, 480),
        (1440, 480),
        (1920, 480),
        (480, 1920),
        (640, 640),
        (1920, 640),
        (2560, 640),
        (640, 2560),
        (768, 768),
        (6144, 768),
        (768, 3072),
        (1280, 1280),
        (5120, 1280),
        (1280, 5120),
    ];
    for (n, k) in shapes {
        linear(&cpu, 2048, n, k);
    }
    linear(&cpu, 168, 480, 480);
    linear(&cpu, 16, 1920, 480);
    println!("{:>34} {:>8} {:>8} | ours/raw", "attention", "raw", "ours");
    for (heads, hd) in [(20, 16), (20, 24), (20, 32), (20, 64), (40, 128)] {
        attend(&cpu, heads, hd, 168, 24, false);
    }
    attend(&cpu, 12, 64, 110, 40, true);
    attend(&cpu, 20, 24, 60, 70, false);
    attend(&cpu, 20, 32, 512, 8, false);
    attend(&cpu, 20, 64, 2000, 2, false);
    stream(&cpu);
}

/// Seconds of each side, medians of turns taken one after the other.
fn by_turns<const N: usize>(mut sides: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut seconds = [const { Vec::new() }; N];
    for turn in 0..TURNS + 1 {
        for (side, seconds) in sides.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            side();
            if turn > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    seconds.map(|mut s| {
        s.sort_by(f64::total_cmp);
        s[TURNS / 2]
    })
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Multiply-adds in registers, at least `flops` on all threads together; returns how many really.
fn raw(cpu: &Cpu, flops: f64) -> f64 {
    let rounds = (flops / (cpu.threads() * RAW_FLOPS) as f64).ceil() as usize;
    cpu.pool().run(cpu.threads(), &|_, _| raw_loop(rounds));
    (rounds * cpu.threads() * RAW_FLOPS) as f64
}

#[cfg(target_arch = "x86_64")]
const RAW_FLOPS: usize = 24 * 32;

#[cfg(target_arch = "x86_64")]
fn raw_loop(rounds: usize) {
    use core::arch::x86_64::*;
    #[target_feature(enable = "avx512f")]
    fn avx512(rounds: usize) {
        let x = black_box(_mm512_set1_ps(0.5));
        let mut acc = [_mm512_set1_ps(1.0); 24];
        for _ in 0..rounds {
            for a in &mut acc {
                *a = _mm512_fmadd_ps(*a, x, x);
            }
        }
        black_box(acc);
    }
    #[target_feature(enable = "avx2,fma")]
    fn avx2(rounds: usize) {
        let x = black_box(_mm256_set1_ps(0.5));
        let mut acc = [_mm256_set1_ps(1.0); 12];
        for _ in 0..4 * rounds {
            for a in &mut acc {
                *a = _mm256_fmadd_ps(*a, x, x);
            }
        }
        black_box(acc);
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: just detected.
        unsafe { avx512(rounds) }
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: just detected.
        unsafe { avx2(rounds) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
const RAW_FLOPS: usize = 16 * 8;

#[cfg(not(target_arch = "x86_64"))]
fn raw_loop(rounds: usize) {
    let x = black_box(0.5f32);
    let mut acc = [1.0f32; 64];
    for _ in 0..rounds {
        for a in &mut acc {
            *a = a.mul_add(x, x);
        }
    }
    black_box(acc);
}

fn linear(cpu: &Cpu, m: usize, n: usize, k: usize) {
    let (x, w, bias) = (numbers(m * k), numbers(n * k), numbers(n));
    let mut packed = vec![0.0; gemm::packed_len(n, k)];
    for (rows, out) in w.chunks(gemm::PANEL * k).zip(packed.chunks_exact_mut(gemm::PANEL * k)) {
        gemm::pack_panel(rows, k, out);
    }
    let (mut y, mut peer) = (vec![0.0; m * n], vec![0.0; m * n]);
    let mut space = vec![0.0; gemm::WORKSPACE.per_unit.0 as usize / 4 * cpu.threads()];
    let mut gelu_y = vec![0.0; m * n];
    let mut gelu_space = space.clone();
    let ours = |act, y: &mut [f32], space: &mut [f32]| {
        let e = Epilogue { bias: Some(&bias), act, residual: None };
        gemm::linear(cpu, Rows::new(&x, m, k, k), &packed, e, RowsMut::new(y, m, n, n), space);
    };
    let flops = 2.0 * (m * n * k) as f64;
    let mut raw_flops = 0.0;
    let [raw_s, gemm_s, ours_s, gelu_s] = by_turns([
        &mut || raw_flops = raw(cpu, flops),
        &mut || peer_linear(cpu.threads(), m, n, k, &x, &w, &mut peer),
        &mut || ours(Act::None, &mut y, &mut space),
        &mut || ours(Act::Gelu, &mut gelu_y, &mut gelu_space),
    ]);
    let rate = [raw_flops / raw_s, flops / gemm_s, flops / ours_s, flops / gelu_s].map(|r| r / 1e9);
    println!(
        "{m:>8},{n:>6},{k:>6} {:>8.1} {:>8.1} {:>8.1} {:>8.1} | {:>8.2} {:>9.2}",
        rate[0],
        rate[1],
        rate[2],
        rate[3],
        rate[2] / rate[0],
        rate[2] / rate[1]
    );
}

/// The same product by the `gemm` crate (its best features; no bias).
fn peer_linear(threads: usize, m: usize, n: usize, k: usize, x: &[f32], w: &[f32], y: &mut [f32]) {
    let threads = if threads == 1 { ::gemm::Parallelism::None } else { ::gemm::Parallelism::Rayon(threads) };
    let (kk, nn) = (k as isize, n as isize);
    // SAFETY: x (m, k), w (n, k) read as (k, n), y (m, n), all row-major and of these sizes.
    unsafe {
        let (y, x, w) = (y.as_mut_ptr(), x.as_ptr(), w.as_ptr());
        ::gemm::gemm(m, n, k, y, 1, nn, false, x, 1, kk, w, kk, 1, 0.0, 1.0, false, false, false, threads);
    }
}

fn attend(cpu: &Cpu, heads: usize, hd: usize, len: usize, sequences: usize, alibi: bool) {
    let (t, d) = (len * sequences, heads * hd);
    let qkv = numbers(t * 3 * d);
    let spans: Vec<[u32; 2]> = (0..sequences).map(|s| [(s * len) as u32, ((s + 1) * len) as u32]).collect();
    let freq: Vec<f32> = (0..hd / 2).map(|j| 1e4f32.powf(-(2.0 * j as f32) / hd as f32)).collect();
    let (mut cos, mut sin) = (vec![0.0; len * hd / 2], vec![0.0; len * hd / 2]);
    rope::table(&freq, len, &mut cos, &mut sin);
    let slopes: Vec<f32> = (1..=heads).map(|h| 0.5f32.powi(h as i32)).collect();
    let config = Attention {
        heads,
        head_dim: hd,
        scale: 0.125,
        rope: (!alibi).then_some(Rope { cos: &cos, sin: &sin }),
        slopes: alibi.then_some(&slopes[..]),
    };
    let mut o = vec![0.0; t * d];
    let mut space = vec![0.0; attention::workspace_bytes(hd) / 4 * cpu.threads()];
    let x = Rows::new(&qkv, t, 3 * d, 3 * d);
    let flops = 4.0 * (t * len * d) as f64;
    let mut raw_flops = 0.0;
    let [raw_s, ours_s] = by_turns([&mut || raw_flops = raw(cpu, flops), &mut || {
        let [q, k, v] = [0, 1, 2].map(|i| x.columns(i * d, d));
        attention(cpu, config, q, k, v, &spans, RowsMut::new(&mut o, t, d, d), None, &mut space);
    }]);
    let (raw, ours) = (raw_flops / raw_s / 1e9, flops / ours_s / 1e9);
    let what = format!("{heads} heads x {hd}, {sequences} x {len}{}", if alibi { " alibi" } else { "" });
    println!("{what:>34} {raw:>8.1} {ours:>8.1} | {:>8.2}", ours / raw);
}

/// Bytes per second of the streaming kernels on (2048, 1920).
fn stream(cpu: &Cpu) {
    let (m, n) = (2048, 1920);
    let (x, g) = (numbers(m * n), numbers(n));
    let (mut y, mut z) = (vec![0.0; m * n], vec![0.0; m * n]);
    let [norm_s, gelu_s] = by_turns([
        &mut || {
            let (x, y) = (Rows::new(&x, m, n, n), RowsMut::new(&mut y, m, n, n));
            norm::layer_norm(cpu, x, &g, &g, 1e-5, y, None, None);
        },
        &mut || elementwise::gelu(cpu, Rows::new(&x, m, n, n), RowsMut::new(&mut z, m, n, n)),
    ]);
    let rate = |s: f64| 8e-9 * (m * n) as f64 / s;
    println!("layer_norm {:.1} GB/s, gelu {:.1} GB/s (read + write)", rate(norm_s), rate(gelu_s));
}
