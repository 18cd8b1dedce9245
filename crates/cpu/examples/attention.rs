//! Times attention, forward and backward, against our own f32 GEMM, taking turns in one process; prints medians.
//! Operations are counted for the pairs of query and key that the mask allows: 4 for each pair and column in the
//! forward pass, 10 in the backward pass.
//!
//! `cargo run --release -p plimsoll-cpu --example attention [-- threads]`; `bench/cpu_attention.py` runs these
//! shapes in PyTorch, taking turns with this program.

use plimsoll_cpu::attention::{
    AttentionConfig, AttentionGradients, AttentionOperands, SavedForward, attention, attention_grad,
    grad_workspace_bytes, workspace_bytes,
};
use plimsoll_cpu::matmul::{Act, LinearCall, MatmulEpilogue, linear_f32};
use plimsoll_cpu::{Cpu, Rows, RowsMut};
use plimsoll_graph::ops::Mask;
use std::time::Instant;

const TURNS: usize = 7;

/// (query heads, key/value heads, head dimension, length, sequences, mask).
const SHAPES: [(usize, usize, usize, usize, usize, Mask); 9] = [
    (8, 8, 64, 512, 4, Mask::Full),
    (8, 8, 64, 512, 4, Mask::Causal),
    (8, 2, 64, 512, 4, Mask::Causal),
    (20, 20, 24, 512, 4, Mask::Full),
    (8, 8, 32, 128, 16, Mask::Causal),
    (8, 8, 128, 512, 4, Mask::Causal),
    (8, 8, 64, 2048, 1, Mask::Causal),
    (8, 8, 64, 2048, 1, Mask::Window(256)),
    (8, 8, 64, 2048, 1, Mask::BlockSparse { block: 64, local: 4, global: 1 }),
];

fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(2);
    let cpu = Cpu::new(threads);
    println!("{} x {threads}; medians of {TURNS} turns; rates in GFLOP/s", cpu.isa().name());
    println!("{:>60} {:>7} {:>8} {:>8} {:>7} {:>7} | over gemm", "", "gemm", "forward", "backward", "ms", "ms");
    for shape in SHAPES {
        time(&cpu, shape);
    }
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect()
}

fn time(cpu: &Cpu, (heads, kv_heads, hd, len, sequences, mask): (usize, usize, usize, usize, usize, Mask)) {
    let t = len * sequences;
    let d = heads * hd;
    let kv = kv_heads * hd;
    let config = AttentionConfig {
        heads,
        kv_heads,
        head_dim: hd,
        scale: (hd as f32).sqrt().recip(),
        mask,
        rope: None,
        slopes: None,
    };
    let spans: Vec<[u32; 2]> = (0..sequences).map(|s| [(s * len) as u32, ((s + 1) * len) as u32]).collect();
    let [q, gradient] = [t * d; 2].map(numbers);
    let [k, v] = [t * kv; 2].map(numbers);
    let mut o = vec![0.0; t * d];
    let mut lse = vec![0.0; t * heads];
    let [q, gradient] = [&q, &gradient].map(|x| Rows::new(x, t, d, d));
    let [k, v] = [&k, &v].map(|x| Rows::new(x, t, kv, kv));
    let mut scratch = vec![0.0; workspace_bytes(hd) / 4 * cpu.threads()];
    let mut grad_space = vec![0.0; grad_workspace_bytes(hd) / 4 * cpu.threads()];
    let mut dq = vec![0.0; t * d];
    let mut dk = vec![0.0; t * kv];
    let mut dv = vec![0.0; t * kv];
    let mut product = Product::new();
    let mut seconds = [const { Vec::new() }; 3];
    for turn in 0..TURNS + 1 {
        let start = Instant::now();
        let flops = product.run(cpu);
        let gemm = start.elapsed().as_secs_f64() / flops;
        let start = Instant::now();
        let out = RowsMut::new(&mut o, t, d, d);
        let sums = RowsMut::new(&mut lse, t, heads, heads);
        let operands = AttentionOperands { q, k, v, spans: &spans, o: out, lse: Some(sums) };
        attention(cpu, config, operands, &mut scratch);
        let forward = start.elapsed().as_secs_f64();
        let saved = SavedForward {
            q,
            k,
            v,
            o: Rows::new(&o, t, d, d),
            lse: Rows::new(&lse, t, heads, heads),
            gradient,
            spans: &spans,
        };
        let gradients = AttentionGradients {
            q: Some(RowsMut::new(&mut dq, t, d, d)),
            k: Some(RowsMut::new(&mut dk, t, kv, kv)),
            v: Some(RowsMut::new(&mut dv, t, kv, kv)),
        };
        let start = Instant::now();
        attention_grad(cpu, config, saved, gradients, &mut grad_space);
        let backward = start.elapsed().as_secs_f64();
        if turn > 0 {
            for (all, one) in seconds.iter_mut().zip([gemm, forward, backward]) {
                all.push(one);
            }
        }
    }
    let [gemm, forward, backward] = seconds.map(median);
    let pairs = (mask.pairs(len as u64) * (sequences * d) as u128) as f64;
    let rates = [1e-9 / gemm, 4e-9 * pairs / forward, 10e-9 * pairs / backward];
    let what = format!("{heads}/{kv_heads} heads x {hd}, {sequences} x {len}, {mask:?}");
    print!("{what:>60} {:>7.1} {:>8.1} {:>8.1}", rates[0], rates[1], rates[2]);
    print!(" {:>7.2} {:>7.2}", 1e3 * forward, 1e3 * backward);
    println!(" | {:.2} {:.2}", rates[1] / rates[0], rates[2] / rates[0]);
}

/// A GEMM of 1024 x 512 with 512 x 512, the reference for the rates.
struct Product {
    x: Vec<f32>,
    w: Vec<f32>,
    y: Vec<f32>,
}

impl Product {
    const SHAPE: (usize, usize, usize) = (1024, 512, 512);

    fn new() -> Self {
        let (m, n, k) = Self::SHAPE;
        Self { x: numbers(m * k), w: numbers(linear_f32::packed_len(n, k)), y: vec![0.0; m * n] }
    }

    /// Runs it four times and returns the number of operations.
    fn run(&mut self, cpu: &Cpu) -> f64 {
        let (m, n, k) = Self::SHAPE;
        let mut scratch = vec![0.0; linear_f32::workspace_bytes(cpu.isa()) / 4 * cpu.threads()];
        let e = MatmulEpilogue { bias: None, act: Act::None, residual: None };
        for _ in 0..4 {
            let x = Rows::new(&self.x, m, k, k);
            let y = RowsMut::new(&mut self.y, m, n, n);
            linear_f32::linear(cpu, LinearCall { x, w: &self.w, epilogue: e, y }, &mut scratch);
        }
        8.0 * (m * n * k) as f64
    }
}

/// The median; of an even number of values, the upper of the middle two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
