//! Times the products of training, whose factors change every step, against those of inference, whose weights
//! are packed beforehand: forward, gradient of the input, gradient of the weight. By turns in one process; medians.
//!
//! `cargo run --release -p plimsoll-exec --example products [-- threads [rows]]`

use plimsoll_exec::cpu::gemm::{self, Epilogue};
use plimsoll_exec::cpu::product::{self, Factor, product};
use plimsoll_exec::cpu::{Cpu, Rows, RowsMut};
use std::time::Instant;

const TURNS: usize = 15;

fn main() {
    let arg = |i| std::env::args().nth(i).and_then(|a| a.parse().ok());
    let (cpu, m) = (Cpu::new(arg(1).unwrap_or(2)), arg(2).unwrap_or(2048));
    println!("{} x {}; {m} rows; medians of {TURNS} turns, GFLOP/s", cpu.isa().name(), cpu.threads());
    println!("{:>12} {:>8} {:>8} {:>8} {:>8} | of packed", "N,K", "packed", "y=xW'", "dx=dyW", "dW=dy'x");
    for (n, k) in [(640, 640), (1920, 640), (2560, 640), (640, 2560), (256, 256), (1024, 256)] {
        shape(&cpu, m, n, k);
    }
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect()
}

fn shape(cpu: &Cpu, m: usize, n: usize, k: usize) {
    let (x, w, dy) = (numbers(m * k), numbers(n * k), numbers(m * n));
    let mut packed = vec![0.0; gemm::packed_len(n, k)];
    for (rows, out) in w.chunks(gemm::PANEL * k).zip(packed.chunks_exact_mut(gemm::PANEL * k)) {
        gemm::pack_panel(rows, k, out);
    }
    let most = gemm::WORKSPACE.per_unit.0.max(product::WORKSPACE.per_unit.0) as usize;
    let mut space = vec![0.0; most / 4 * cpu.threads()];
    let (mut y, mut dx, mut dw) = (vec![0.0; m * n], vec![0.0; m * k], vec![0.0; n * k]);
    let (xs, ws, dys) = (Rows::new(&x, m, k, k), Rows::new(&w, n, k, k), Rows::new(&dy, m, n, n));
    let e = Epilogue::default();
    let mut seconds = [const { Vec::new() }; 4];
    for turn in 0..TURNS + 1 {
        for (side, seconds) in seconds.iter_mut().enumerate() {
            let start = Instant::now();
            match side {
                0 => gemm::linear(cpu, xs, &packed, e, RowsMut::new(&mut y, m, n, n), &mut space),
                1 => {
                    let (a, b) = (Factor::Stored(xs), Factor::Transposed(ws));
                    product(cpu, a, b, e, RowsMut::new(&mut y, m, n, n), &mut space);
                }
                2 => {
                    let (a, b) = (Factor::Stored(dys), Factor::Stored(ws));
                    product(cpu, a, b, e, RowsMut::new(&mut dx, m, k, k), &mut space);
                }
                _ => {
                    let (a, b) = (Factor::Transposed(dys), Factor::Stored(xs));
                    product(cpu, a, b, e, RowsMut::new(&mut dw, n, k, k), &mut space);
                }
            }
            if turn > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let rates = seconds.map(|mut s| {
        s.sort_by(f64::total_cmp);
        2e-9 * (m * n * k) as f64 / s[s.len() / 2]
    });
    print!("{:>12}", format!("{n},{k}"));
    rates.iter().for_each(|r| print!(" {r:>8.1}"));
    print!(" |");
    rates[1..].iter().for_each(|r| print!(" {:.2}", r / rates[0]));
    println!();
}
