//! Times the CPU kernels: f32 GEMM against the peak rates of FMA and of AMX, against the `gemm` crate and
//! against our own kernel without AMX; attention against the peak rate of FMA; and the bandwidth of layer norm
//! and GELU. All sides of a ratio take turns in one process; prints medians.
//!
//! `cargo run --release -p plimsoll-cpu --example kernels [-- threads [avx512|avx2|portable|bf16|int8]]`.
//! `bf16` times bf16 GEMMs only, against the peak rate of AMX tiles, of dot products or of FMA, whichever this
//! CPU has first; `int8` times int8 GEMMs against bf16 GEMMs.

use plimsoll_cpu::attention::{self, AttentionConfig, AttentionOperands, RotaryTables, attention};
use plimsoll_cpu::matmul::linear_int8::QuantizedLinearCall;
use plimsoll_cpu::matmul::{Act, LinearCall, MatmulEpilogue, linear_f32};
use plimsoll_cpu::rows::norm::{LayerNormOutputs, LayerNormParams};
use plimsoll_cpu::{
    Bf16, Cpu, Element, Isa, QuantizedRows, QuantizedTiles, Rows, RowsMut, matmul::linear_bf16,
    matmul::linear_int8, peak, rows::elementwise, rows::norm, rows::rope,
};
use plimsoll_exec::tiles;
use plimsoll_graph::ops::Mask;
use std::time::Instant;

#[path = "../src/tests/peer.rs"]
mod peer;

const TURNS: usize = 15;

fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(2);
    if std::env::args().nth(2).is_some_and(|a| a == "bf16") {
        return products_of_bf16(&Cpu::new(threads));
    }
    if std::env::args().nth(2).is_some_and(|a| a == "int8") {
        return products_of_int8(&Cpu::new(threads));
    }
    // The name of the portable instruction set is `portable+fma` where the compiler may use FMA.
    let named = |name: String| {
        let like = |isa: &Isa| isa.name() == name || name == "portable" && isa.name().starts_with("portable");
        Isa::available().find(like).expect("this machine has it")
    };
    let isa = std::env::args().nth(2).map_or_else(Isa::detect, named);
    let cpu = Cpu::with_isa(threads, isa);
    println!("{} x {threads}; medians of {TURNS} turns; rates in GFLOP/s", cpu.isa().name());
    println!(
        "{:>22} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} | ours/: raw  gemm plain amx/6",
        "linear M,N,K", "raw", "raw amx", "gemm", "plain", "ours", "+gelu"
    );
    let plain = Isa::available().find(|isa| !isa.has_tiles()).expect("portable is there");
    let plain = Cpu::with_isa(threads, plain);
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
        linear(&cpu, &plain, 2048, n, k);
    }
    linear(&cpu, &plain, 168, 480, 480);
    linear(&cpu, &plain, 16, 1920, 480);
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

/// Calls the sides in turn and returns the median of the seconds of each.
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
    seconds.map(median)
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Measures the peak rate of FMA in GFLOP/s, for `seconds(cpu, flops)`.
fn raw(cpu: &Cpu, flops: f64) -> f64 {
    peak::fma_gflops(cpu, seconds(cpu, flops))
}

/// Measures the peak rate of bf16 on AMX tiles in GFLOP/s, for as long as `raw`; zero without AMX.
fn raw_amx(cpu: &Cpu, flops: f64) -> f64 {
    peak::amx_gflops(cpu, peak::FactorType::Bf16, seconds(cpu, flops)).unwrap_or_default()
}

/// Duration of a measurement of the peak rate that is compared with a kernel of `flops` operations.
fn seconds(cpu: &Cpu, flops: f64) -> f64 {
    /// A rate between those of AVX2 and of AVX-512 on one core.
    const GFLOPS_OF_A_THREAD: f64 = 100.0;
    flops / 1e9 / (GFLOPS_OF_A_THREAD * cpu.threads() as f64)
}

/// The median; of an even number of values, the upper of the middle two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Times one f32 GEMM. `plain` has the best instruction set without tiles.
fn linear(cpu: &Cpu, plain: &Cpu, m: usize, n: usize, k: usize) {
    let x = numbers(m * k);
    let w = numbers(n * k);
    let bias = numbers(n);
    let mut packed = vec![0.0; linear_f32::packed_len(n, k)];
    for (rows, out) in w.chunks(linear_f32::PANEL * k).zip(packed.chunks_exact_mut(linear_f32::PANEL * k)) {
        linear_f32::pack_panel(rows, k, out);
    }
    let [mut product, mut y, mut z, mut gelu] = [(); 4].map(|()| vec![0.0; m * n]);
    let scratch = vec![0.0; linear_f32::workspace_bytes(cpu.isa()) / 4 * cpu.threads()];
    let [mut y_space, mut z_space, mut gelu_space] = [(); 3].map(|()| scratch.clone());
    let ours = |cpu: &Cpu, act, y: &mut [f32], scratch: &mut [f32]| {
        let e = MatmulEpilogue { bias: Some(&bias), act, residual: None };
        let call =
            LinearCall { x: Rows::new(&x, m, k, k), w: &packed, epilogue: e, y: RowsMut::new(y, m, n, n) };
        linear_f32::linear(cpu, call, scratch);
    };
    let flops = 2.0 * (m * n * k) as f64;
    let mut raws = Vec::new();
    let mut amxs = Vec::new();
    let [_, _, seconds @ ..] = by_turns([
        &mut || raws.push(raw(cpu, flops)),
        &mut || amxs.push(raw_amx(cpu, flops)),
        &mut || peer::linear(cpu.threads(), (m, n, k), &x, &w, &mut product),
        &mut || ours(plain, Act::None, &mut z, &mut z_space),
        &mut || ours(cpu, Act::None, &mut y, &mut y_space),
        &mut || ours(cpu, Act::Gelu, &mut gelu, &mut gelu_space),
    ]);
    let [peer, plain, ours, gelu] = seconds.map(|s: f64| flops / s / 1e9);
    let raw = median(raws);
    let amx = median(amxs);
    print!("{m:>8},{n:>6},{k:>6}");
    [raw, amx, peer, plain, ours, gelu].iter().for_each(|r| print!(" {r:>7.1}"));
    println!(" | {:>9.2} {:>5.2} {:>5.2} {:>5.2}", ours / raw, ours / peer, ours / plain, 6.0 * ours / amx);
}

/// Times bf16 GEMMs, each with the epilogue of the model's linear layer of that shape, between two measurements
/// of the peak rate.
fn products_of_bf16(cpu: &Cpu) {
    println!("{} x {}; medians of {TURNS} turns; GFLOP/s", cpu.isa().name(), cpu.threads());
    println!("{:>22} {:>8} {:>8} | ours/raw by turns", "bf16 M,N,K", "raw", "ours");
    for (m, width, hidden) in [(10_752, 320, 1280), (2048, 480, 1920), (2048, 640, 2560), (2048, 1280, 5120)] {
        product_of_bf16(cpu, (m, 3 * width, width), Act::None, false);
        product_of_bf16(cpu, (m, width, width), Act::None, true);
        product_of_bf16(cpu, (m, hidden, width), Act::Gelu, false);
        product_of_bf16(cpu, (m, width, hidden), Act::None, true);
    }
}

fn product_of_bf16(cpu: &Cpu, (m, n, k): (usize, usize, usize), act: Act, residual: bool) {
    let halves = |n| numbers(n).into_iter().map(|x| Bf16((x.to_bits() >> 16) as u16)).collect::<Vec<_>>();
    let x = halves(m * k);
    let bias = halves(n);
    let r = halves(m * n);
    let w = linear_bf16::packed(&numbers(n * k), k);
    let mut y = vec![Bf16::default(); m * n];
    let mut scratch = vec![0.0; linear_bf16::WORKSPACE_BYTES / 4 * cpu.threads()];
    let raw = || raw_of(cpu, peak::FactorType::Bf16).unwrap_or_else(|| peak::fma_gflops(cpu, 1e-3));
    let mut raws = Vec::new();
    let mut rates = Vec::new();
    let mut shares = Vec::new();
    let mut before = raw();
    for turn in 0..TURNS + 1 {
        let residual = residual.then(|| Rows::new(&r, m, n, n));
        let e = MatmulEpilogue { bias: Some(&bias[..]), act, residual };
        let start = Instant::now();
        let y = RowsMut::new(&mut y, m, n, n);
        linear_bf16::linear(cpu, LinearCall { x: Rows::new(&x, m, k, k), w: &w, epilogue: e, y }, &mut scratch);
        let rate = 2e-9 * (m * n * k) as f64 / start.elapsed().as_secs_f64();
        let after = raw();
        if turn > 0 {
            raws.push(after);
            rates.push(rate);
            shares.push(2.0 * rate / (before + after));
        }
        before = after;
    }
    let [raw, ours, share] = [raws, rates, shares].map(median);
    println!("{m:>8},{n:>6},{k:>6} {raw:>8.1} {ours:>8.1} | {share:>9.2}");
}

/// Peak rate of AMX tiles in GFLOP/s, or of dot products on a CPU without AMX; `None` without either.
fn raw_of(cpu: &Cpu, of: peak::FactorType) -> Option<f64> {
    peak::amx_gflops(cpu, of, 1e-3).or_else(|| peak::dot_gflops(cpu, of, 1e-3))
}

/// Times int8 GEMMs with bias, and with a residual where the model's linear layer of that shape has one, against
/// their peak rate and against bf16 GEMMs. Takes the fastest turn of each, which on a shared machine is the
/// least disturbed.
fn products_of_int8(cpu: &Cpu) {
    println!("{} x {}; the best of {TURNS} turns; GFLOP/s", cpu.isa().name(), cpu.threads());
    println!("{:>22} {:>8} {:>8} {:>8} | int8/: raw bf16", "M,N,K", "raw", "int8", "bf16");
    for (m, width) in [(2688, 320), (2688, 480), (2688, 640), (1024, 1280)] {
        product_of_int8(cpu, (m, 3 * width, width), false);
        product_of_int8(cpu, (m, width, width), true);
        product_of_int8(cpu, (m, 4 * width, width), false);
        product_of_int8(cpu, (m, width, 4 * width), true);
    }
}

fn product_of_int8(cpu: &Cpu, (m, n, k): (usize, usize, usize), residual: bool) {
    let halves = |n| numbers(n).into_iter().map(|x| Bf16((x.to_bits() >> 16) as u16)).collect::<Vec<_>>();
    let codes = |n| numbers(n).into_iter().map(|x| (127.0 * x) as i8 as u8).collect::<Vec<_>>();
    let panels = n.div_ceil(tiles::STEP);
    let x = halves(m * k);
    let w = linear_bf16::packed(&numbers(n * k), k);
    let bias = halves(n);
    let r = halves(m * n);
    let cx = codes(m * k);
    let cw = codes(panels * tiles::codes_panel(k));
    let sx = vec![0.01; m];
    let sw = vec![0.01; panels * tiles::STEP];
    let cx = QuantizedRows { values: &cx, scales: &sx, columns: k };
    let cw = QuantizedTiles { tiles: &cw, scales: &sw };
    let [mut y, mut z] = [(); 2].map(|()| vec![Bf16::default(); m * n]);
    let mut scratch = vec![0.0; linear_bf16::WORKSPACE_BYTES / 4 * cpu.threads()];
    let residual = residual.then(|| Rows::new(&r, m, n, n));
    let e = MatmulEpilogue { bias: Some(&bias[..]), act: Act::None, residual };
    let mut raw = 0.0_f64;
    let mut int8 = 0.0_f64;
    let mut bf16 = 0.0_f64;
    let rate = |start: Instant| 2e-9 * (m * n * k) as f64 / start.elapsed().as_secs_f64();
    for _ in 0..TURNS {
        raw = raw.max(raw_of(cpu, peak::FactorType::Int8).unwrap_or_default());
        let start = Instant::now();
        let y = RowsMut::new(&mut y, m, n, n);
        linear_int8::linear(cpu, QuantizedLinearCall { x: cx, w: cw, epilogue: e, y }, &mut scratch);
        int8 = int8.max(rate(start));
        let start = Instant::now();
        let y = RowsMut::new(&mut z, m, n, n);
        linear_bf16::linear(cpu, LinearCall { x: Rows::new(&x, m, k, k), w: &w, epilogue: e, y }, &mut scratch);
        bf16 = bf16.max(rate(start));
    }
    println!(
        "{m:>8},{n:>6},{k:>6} {raw:>8.1} {int8:>8.1} {bf16:>8.1} | {:>9.2} {:>4.2}",
        int8 / raw,
        int8 / bf16
    );
}

fn attend(cpu: &Cpu, heads: usize, hd: usize, len: usize, sequences: usize, alibi: bool) {
    let t = len * sequences;
    let d = heads * hd;
    let qkv = numbers(t * 3 * d);
    let spans: Vec<[u32; 2]> = (0..sequences).map(|s| [(s * len) as u32, ((s + 1) * len) as u32]).collect();
    let freq: Vec<f32> = (0..hd / 2).map(|j| 1e4f32.powf(-(2.0 * j as f32) / hd as f32)).collect();
    let mut cos = vec![0.0; len * hd / 2];
    let mut sin = vec![0.0; len * hd / 2];
    rope::table(&freq, len, &mut cos, &mut sin);
    let slopes: Vec<f32> = (1..=heads).map(|h| 0.5f32.powi(h as i32)).collect();
    let config = AttentionConfig {
        heads,
        kv_heads: heads,
        mask: Mask::Full,
        head_dim: hd,
        scale: 0.125,
        rope: (!alibi).then_some(RotaryTables { cos: &cos, sin: &sin }),
        slopes: alibi.then_some(&slopes[..]),
    };
    let mut o = vec![0.0; t * d];
    let mut scratch = vec![0.0; attention::workspace_bytes(hd) / 4 * cpu.threads()];
    let x = Rows::new(&qkv, t, 3 * d, 3 * d);
    let flops = 4.0 * (t * len * d) as f64;
    let mut raws = Vec::new();
    let [_, ours_s] = by_turns([&mut || raws.push(raw(cpu, flops)), &mut || {
        let [q, k, v] = [0, 1, 2].map(|i| x.columns(i * d, d));
        let o = RowsMut::new(&mut o, t, d, d);
        let operands = AttentionOperands { q, k, v, spans: &spans, o, lse: None };
        attention(cpu, config, operands, &mut scratch);
    }]);
    let raw = median(raws);
    let ours = flops / ours_s / 1e9;
    let what = format!("{heads} heads x {hd}, {sequences} x {len}{}", if alibi { " alibi" } else { "" });
    println!("{what:>34} {raw:>8.1} {ours:>8.1} | {:>8.2}", ours / raw);
}

/// Measures the GB/s read and written by layer norm and GELU on 2048 rows of 320 to 1920 columns.
fn stream(cpu: &Cpu) {
    for n in [320, 640, 1280, 1920] {
        let m = 2048;
        let g = numbers(n);
        let x = numbers(m * n);
        let [norm_s, gelu_s] = rows(cpu, &x, &g);
        let halves: Vec<Bf16> = x.iter().map(|x| Bf16((x.to_bits() >> 16) as u16)).collect();
        let [norm_16, gelu_16] = rows(cpu, &halves, &g);
        let rate = |bytes: usize, s: f64| (2 * bytes * m * n) as f64 / s / 1e9;
        println!(
            "{m} x {n}, read + written: layer_norm {:.1} GB/s, bf16 {:.1}; gelu {:.1} GB/s, bf16 {:.1}",
            rate(4, norm_s),
            rate(2, norm_16),
            rate(4, gelu_s),
            rate(2, gelu_16)
        );
    }
}

/// Seconds of a layer norm and of a GELU on rows as wide as `g`.
fn rows<E: Element>(cpu: &Cpu, x: &[E], g: &[f32]) -> [f64; 2] {
    let m = x.len() / g.len();
    let n = g.len();
    let mut y = x.to_vec();
    let mut z = x.to_vec();
    by_turns([
        &mut || {
            let x = Rows::new(x, m, n, n);
            let y = RowsMut::new(&mut y, m, n, n);
            let params = LayerNormParams { gamma: g, beta: g, eps: 1e-5 };
            norm::layer_norm(cpu, x, params, LayerNormOutputs { y: Some(y), mean: None, rstd: None });
        },
        &mut || elementwise::gelu(cpu, Rows::new(x, m, n, n), RowsMut::new(&mut z, m, n, n)),
    ])
}
