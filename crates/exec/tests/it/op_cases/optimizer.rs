//! Test cases of optimizer ops: gradients accumulated, scaled and applied. Invariant: second moments are not
//! negative, and no new quantized value is so near to a tie that f32 and f64 could differ.

use super::{Case, Noise, Tolerance, UNIT};
use plimsoll_exec::reference::Data;
use plimsoll_graph::ops::*;
use plimsoll_graph::{Dim, Op};

/// Numbers of elements around the length of a vector, of a block of 8-bit moments, and of the share of a task.
const SIZES: [u64; 9] = [1, 5, 16, 33, 255, 256, 257, 700, 40_001];

/// Shapes around the number of columns of a task, with many rows, and with one row and column.
const MATRICES: [(u64, u64); 7] = [(1, 1), (7, 3), (12, 128), (5, 129), (300, 70), (1, 40), (70, 1)];

const POSITIVE: Noise = Noise { offset: 0.6, amplitude: 0.5 };
const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-6, weight_decay: 0.1 };

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for n in SIZES {
        let shape = if n % 5 == 0 { vec![5, n / 5] } else { vec![n] };
        for ok in [true, false] {
            cases.push(adamw(&shape, ok));
            for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
                cases.push(sgd(&shape, momentum, nesterov, ok));
            }
            // Warm-up after 0 and 8 steps, and the decay itself.
            cases.extend([0.0, 8.0, 16_777_216.0].map(|steps| ema(&shape, steps, ok)));
            if n <= 700 {
                cases.push(adamw_8bit(&shape, ok));
                cases.push(adafactor(&[n], ok));
            }
        }
        cases.extend([true, false].map(|keep| accumulate(&shape, keep)));
        for max_norm in [0.0, 0.5, 1e6] {
            cases.push(grad_scale(n, max_norm));
        }
    }
    for steps in [0.0, 7.0, 16_777_215.0, 16_777_216.0] {
        cases.extend([true, false].map(|ok| count_steps(steps, ok)));
    }
    for (r, c) in MATRICES {
        cases.extend([true, false].map(|ok| adafactor(&[r, c], ok)));
    }
    cases
}

/// Tolerance: c = 4 for a square root and a quotient; k = 1.
fn adamw(shape: &[u64], ok: bool) -> Case {
    let case = case(format!("adamw {shape:?}, ok {ok}"), Op::AdamW(ADAMW), Tolerance::sum(4.0, 1));
    let case = noise(noise(noise(noise(case, shape, UNIT), shape, UNIT), shape, UNIT), shape, POSITIVE);
    numbers(scale(case, ok), &[0.01, 0.1, 0.05])
}

fn sgd(shape: &[u64], momentum: f32, nesterov: bool, ok: bool) -> Case {
    let op = Op::Sgd(Sgd { momentum, weight_decay: 0.1, nesterov });
    let name = format!("sgd {shape:?}, momentum {momentum}, nesterov {nesterov}, ok {ok}");
    let mut case = noise(noise(case(name, op, Tolerance::sum(4.0, 1)), shape, UNIT), shape, UNIT);
    if momentum != 0.0 {
        case = noise(case, shape, UNIT);
    }
    numbers(scale(case, ok), &[0.1])
}

/// Tolerance: c = 4 for two products and a difference whose weight is rounded to f32; k = 1.
fn ema(shape: &[u64], steps: f64, ok: bool) -> Case {
    let name = format!("ema {shape:?}, after {steps} steps, ok {ok}");
    let case = case(name, Op::Ema(Ema { decay: 0.9 }), Tolerance::sum(4.0, 1));
    numbers(scale(noise(noise(case, shape, UNIT), shape, UNIT), ok), &[steps])
}

/// Tolerance: c = 1, k = 1 for one addition.
fn count_steps(steps: f64, ok: bool) -> Case {
    let name = format!("count_steps {steps}, ok {ok}");
    scale(numbers(case(name, Op::CountSteps(CountSteps {}), Tolerance::sum(1.0, 1)), &[steps]), ok)
}

fn adamw_8bit(shape: &[u64], ok: bool) -> Case {
    let op = Op::AdamW8bit(AdamW8bit { adamw: ADAMW });
    let case = case(format!("adamw_8bit {shape:?}, ok {ok}"), op, Tolerance::sum(4.0, 1));
    let mut case = noise(noise(case, shape, UNIT), shape, UNIT);
    let n: u64 = shape.iter().product();
    for _ in ["m", "v"] {
        let codes = case.random(n).map(|bits| (bits >> 20) as u8).collect();
        case = case.operand(&dims(shape), Data::U8(codes), false);
        case = noise(case, &[n.div_ceil(BLOCK)], POSITIVE);
    }
    numbers(scale(case, ok), &[0.01, 0.1, 0.05])
}

/// Tolerance: c = 8 for two square roots, two products and a quotient; k = 1, because sums are computed in f64.
fn adafactor(shape: &[u64], ok: bool) -> Case {
    let op = Op::Adafactor(Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.1 });
    let mut case = case(format!("adafactor {shape:?}, ok {ok}"), op, Tolerance::sum(8.0, 1));
    case = noise(noise(case, shape, UNIT), shape, UNIT);
    for &n in shape {
        case = noise(case, &[n], POSITIVE);
    }
    numbers(scale(case, ok), &[0.1, 0.8])
}

/// Tolerance: c = 1, k = 1 for one addition.
fn accumulate(shape: &[u64], keep: bool) -> Case {
    let name = format!("accumulate {shape:?}, keep {keep}");
    let case = case(name, Op::Accumulate(Accumulate {}), Tolerance::sum(1.0, 1));
    numbers(noise(noise(case, shape, UNIT), shape, UNIT), &[f64::from(u8::from(keep))])
}

/// Tolerance: c = 1, k = 1, because the norm is computed in f64 and rounded once.
fn grad_scale(n: u64, max_norm: f32) -> Case {
    let name = format!("grad_scale {n}, at most {max_norm}");
    let case = case(name, Op::GradScale(GradScale { max_norm }), Tolerance::sum(1.0, 1));
    let case = noise(noise(noise(case, &[n], UNIT), &[3, 5], UNIT), &[20_000], UNIT);
    numbers(case, &[-0.25])
}

fn case(name: String, op: Op, tolerance: Tolerance) -> Case {
    Case::new(name, op, &[1], 0, tolerance)
}

fn dims(shape: &[u64]) -> Vec<Dim> {
    shape.iter().copied().map(Dim::Fixed).collect()
}

fn noise(case: Case, shape: &[u64], noise: Noise) -> Case {
    case.noise(&dims(shape), noise)
}

fn numbers(case: Case, numbers: &[f64]) -> Case {
    let data = numbers.iter().map(|&x| f64::from(x as f32)).collect();
    case.operand(&[Dim::Fixed(numbers.len() as u64)], Data::Float(data), false)
}

/// If the step is skipped, the factor may have any value.
fn scale(case: Case, ok: bool) -> Case {
    numbers(case, &if ok { [0.75, 1.0] } else { [f64::INFINITY, 0.0] })
}
