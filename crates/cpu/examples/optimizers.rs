//! Times the optimizers against the addition of two vectors, which is limited by memory bandwidth. All take turns in
//! one process; prints medians. `bench/optimizers.py` times the optimizers of PyTorch.
//!
//! `cargo run --release -p plimsoll-cpu --example optimizers [-- threads [millions of elements]]`

use plimsoll_cpu::training::adafactor::{Factored, adafactor};
use plimsoll_cpu::training::optimizer::{GradientScale, ScaledGradient, adamw, grad_scale, sgd_momentum};
use plimsoll_cpu::training::optimizer_8bit::{QuantizedAdamWStates, QuantizedMoment, adamw_8bit};
use plimsoll_cpu::training::optimizer_state::{Gradient, OptimizerState};
use plimsoll_cpu::{Cpu, Rows, RowsMut, rows::elementwise};
use plimsoll_graph::ops::{Adafactor, AdamW, BLOCK, GradScale, Sgd};
use std::time::Instant;

const TURNS: usize = 15;
const COLUMNS: usize = 4096;
const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
const SGD: Sgd = Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: false };
const ADAFACTOR: Adafactor = Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.1 };
const HYPER: [f32; 3] = [1e-3, 0.1, 0.05];
const SCALE: GradientScale = GradientScale { factor: 1.0, ok: true };

/// Parameters, gradients and states that all optimizers share.
struct Tensors {
    g: Vec<f32>,
    p: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
    quantized: [Vec<u8>; 2],
    absmax: [Vec<f32>; 2],
    row: Vec<f32>,
    column: Vec<f32>,
}

/// Name, bytes read and written per element, and a function that runs one step.
type Side = (&'static str, usize, fn(&Cpu, &mut Tensors));

const SIDES: [Side; 6] = [
    ("p = v + g", 12, |cpu, t| {
        let rows = t.p.len() / COLUMNS;
        let view = |x| Rows::new(x, t.p.len() / COLUMNS, COLUMNS, COLUMNS);
        let v = view(&t.v);
        let g = view(&t.g);
        elementwise::add(cpu, v, g, RowsMut::new(&mut t.p, rows, COLUMNS, COLUMNS));
    }),
    ("grad_scale", 4, |cpu, t| {
        grad_scale(cpu, &GradScale { max_norm: 1.0 }, [Gradient::F32(&t.g)].into_iter(), 1.0);
    }),
    ("sgd, momentum", 20, |cpu, t| {
        sgd_momentum(
            cpu,
            &SGD,
            scaled(&t.g),
            [OptimizerState::in_place(&mut t.p), OptimizerState::in_place(&mut t.m)],
            1e-3,
        );
    }),
    ("adamw", 28, |cpu, t| {
        let states = [
            OptimizerState::in_place(&mut t.p),
            OptimizerState::in_place(&mut t.m),
            OptimizerState::in_place(&mut t.v),
        ];
        adamw(cpu, &ADAMW, scaled(&t.g), states, HYPER);
    }),
    ("adamw_8bit", 16, |cpu, t| {
        let [m, v] = &mut t.quantized;
        let [m_absmax, v_absmax] = &mut t.absmax;
        let [m, v] = [(m, m_absmax), (v, v_absmax)].map(|(values, absmax)| QuantizedMoment {
            values: OptimizerState::in_place(values),
            absmax: OptimizerState::in_place(absmax),
        });
        let states = QuantizedAdamWStates { p: OptimizerState::in_place(&mut t.p), m, v };
        adamw_8bit(cpu, &ADAMW, scaled(&t.g), states, HYPER);
    }),
    ("adafactor", 24, |cpu, t| {
        let row = Some(OptimizerState::in_place(&mut t.row));
        let column = OptimizerState::in_place(&mut t.column);
        let states = Factored { p: OptimizerState::in_place(&mut t.p), row, column };
        adafactor(cpu, &ADAFACTOR, scaled(&t.g), states, [1e-3, 0.9]);
    }),
];

fn scaled(g: &[f32]) -> ScaledGradient<'_> {
    ScaledGradient { g: Gradient::F32(g), scale: SCALE }
}

fn main() {
    let number = |i| std::env::args().nth(i).and_then(|a| a.parse().ok());
    let threads = number(1).unwrap_or(2);
    let millions = number(2).unwrap_or(32);
    let rows = millions * 1_000_000 / COLUMNS;
    let n = rows * COLUMNS;
    let numbers = |n: usize| (0..n).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect::<Vec<_>>();
    let positive = |n: usize| numbers(n).into_iter().map(|x| x * x + 0.01).collect::<Vec<_>>();
    let blocks = n.div_ceil(BLOCK as usize);
    let mut t = Tensors {
        g: numbers(n),
        p: numbers(n),
        m: numbers(n),
        v: positive(n),
        quantized: [vec![130; n], vec![100; n]],
        absmax: [positive(blocks), positive(blocks)],
        row: positive(rows),
        column: positive(COLUMNS),
    };
    let cpu = Cpu::new(threads);
    println!("{} x {threads}; {n} elements; medians of {TURNS} turns", cpu.isa().name());
    let mut seconds = SIDES.map(|_| vec![]);
    for turn in 0..=TURNS {
        for ((.., step), seconds) in SIDES.iter().zip(&mut seconds) {
            let start = Instant::now();
            step(&cpu, &mut t);
            if turn > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let rates = seconds.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        seconds[TURNS / 2]
    });
    for ((name, bytes, _), seconds) in SIDES.iter().zip(rates) {
        let rate = (bytes * n) as f64 / seconds / 1e9;
        let stream = (SIDES[0].1 * n) as f64 / rates[0] / 1e9;
        println!("{name:>14} {:8.2} ms {rate:7.1} GB/s {:6.2} of the stream", 1e3 * seconds, rate / stream);
    }
}
