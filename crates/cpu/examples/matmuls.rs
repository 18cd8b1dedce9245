//! Times the matmuls of training, where both operands change in every step, against the matmuls of inference, where
//! weights are packed once: forward, gradient of the input and gradient of the weight; then the chunked cross-entropy.
//! All sides take turns in one process; prints medians.
//!
//! `cargo run --release -p plimsoll-cpu --example matmuls [-- threads [rows]]`

use plimsoll_cpu::matmul::row_major::{self, Factor, MatmulCall, matmul};
use plimsoll_cpu::matmul::{LinearCall, MatmulEpilogue, linear_f32};
use plimsoll_cpu::training::cross_entropy::{CrossEntropyHead, HeadGradients, SavedLoss, gradients, loss};
use plimsoll_cpu::{Cpu, Rows, RowsMut};
use std::time::Instant;

const TURNS: usize = 15;

fn main() {
    let arg = |i| std::env::args().nth(i).and_then(|a| a.parse().ok());
    let cpu = Cpu::new(arg(1).unwrap_or(2));
    let m = arg(2).unwrap_or(2048);
    println!("{} x {}; {m} rows; medians of {TURNS} turns, GFLOP/s", cpu.isa().name(), cpu.threads());
    println!("{:>12} {:>8} {:>8} {:>8} {:>8} | of packed", "N,K", "packed", "y=xW'", "dx=dyW", "dW=dy'x");
    for (n, k) in [(640, 640), (1920, 640), (2560, 640), (640, 2560), (256, 256), (1024, 256)] {
        shape(&cpu, m, n, k);
    }
    println!("{:>12} {:>8} {:>8} ms of a linear and its cross-entropy", "V,K", "forward", "backward");
    for (v, k) in [(33, 640), (256, 256), (8192, 256)] {
        cross_entropy(&cpu, m, v, k);
    }
}

/// Times a linear layer of `v` outputs with its cross-entropy, forward and backward, in chunks of 512 rows. No
/// target is ignored.
fn cross_entropy(cpu: &Cpu, m: usize, v: usize, k: usize) {
    let x = numbers(m * k);
    let w = numbers(v * k);
    let targets: Vec<i32> = (0..m).map(|r| (r * 7919 % v) as i32).collect();
    let xs = Rows::new(&x, m, k, k);
    let ws = Rows::new(&w, v, k, k);
    let head = CrossEntropyHead { x: xs, w: ws, bias: None, targets: &targets, chunk: 512, z_loss: 0.0 };
    let units = row_major::WORKSPACE_BYTES / 4 * cpu.threads();
    let mut scratch = vec![0.0; units + 512 * (v + k + 2)];
    let mut lse = vec![0.0; m];
    let mut dx = vec![0.0; m * k];
    let mut dw = vec![0.0; v * k];
    let mut seconds = [const { Vec::new() }; 2];
    for _ in 0..TURNS {
        let start = Instant::now();
        loss(cpu, head, Some(&mut lse), &mut scratch);
        seconds[0].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let dx = RowsMut::new(&mut dx, m, k, k);
        let dw = RowsMut::new(&mut dw, v, k, k);
        let to = HeadGradients { dx: Some(dx), dw: Some(dw), db: None };
        gradients(cpu, head, SavedLoss { dloss: 1.0, lse: &lse }, to, &mut scratch);
        seconds[1].push(start.elapsed().as_secs_f64());
    }
    let [forward, backward] = seconds.map(|s| 1e3 * median(s));
    println!("{:>12} {forward:>8.2} {backward:>8.2}", format!("{v},{k}"));
}

/// The median; of an even number of values, the upper of the middle two.
fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect()
}

fn shape(cpu: &Cpu, m: usize, n: usize, k: usize) {
    let x = numbers(m * k);
    let w = numbers(n * k);
    let dy = numbers(m * n);
    let mut packed = vec![0.0; linear_f32::packed_len(n, k)];
    for (rows, out) in w.chunks(linear_f32::PANEL * k).zip(packed.chunks_exact_mut(linear_f32::PANEL * k)) {
        linear_f32::pack_panel(rows, k, out);
    }
    let most = linear_f32::workspace_bytes(cpu.isa()).max(row_major::WORKSPACE_BYTES);
    let mut scratch = vec![0.0; most / 4 * cpu.threads()];
    let mut y = vec![0.0; m * n];
    let mut dx = vec![0.0; m * k];
    let mut dw = vec![0.0; n * k];
    let xs = Rows::new(&x, m, k, k);
    let ws = Rows::new(&w, n, k, k);
    let dys = Rows::new(&dy, m, n, n);
    let e = MatmulEpilogue::default();
    let mut seconds = [const { Vec::new() }; 4];
    for turn in 0..TURNS + 1 {
        for (side, seconds) in seconds.iter_mut().enumerate() {
            let start = Instant::now();
            match side {
                0 => {
                    let y = RowsMut::new(&mut y, m, n, n);
                    linear_f32::linear(cpu, LinearCall { x: xs, w: &packed, epilogue: e, y }, &mut scratch);
                }
                1 => {
                    let a = Factor::Stored(xs);
                    let b = Factor::Transposed(ws);
                    let y = RowsMut::new(&mut y, m, n, n);
                    matmul(cpu, MatmulCall { a, b, epilogue: e, y }, &mut scratch);
                }
                2 => {
                    let a = Factor::Stored(dys);
                    let b = Factor::Stored(ws);
                    let y = RowsMut::new(&mut dx, m, k, k);
                    matmul(cpu, MatmulCall { a, b, epilogue: e, y }, &mut scratch);
                }
                _ => {
                    let a = Factor::Transposed(dys);
                    let b = Factor::Stored(xs);
                    let y = RowsMut::new(&mut dw, n, k, k);
                    matmul(cpu, MatmulCall { a, b, epilogue: e, y }, &mut scratch);
                }
            }
            if turn > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let rates = seconds.map(|s| 2e-9 * (m * n * k) as f64 / median(s));
    print!("{:>12}", format!("{n},{k}"));
    rates.iter().for_each(|r| print!(" {r:>8.1}"));
    print!(" |");
    rates[1..].iter().for_each(|r| print!(" {:.2}", r / rates[0]));
    println!();
}
