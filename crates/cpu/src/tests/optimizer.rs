//! Tests of optimizers: the same bits in place and out of place and on any number of threads, with gradients of every
//! element type. Their values are compared with the reference in the op cases.

use super::{machines, numbers, same_bits};
use crate::rows::cast::{Float16, narrow, widen};
use crate::training::accumulate::{Accumulator, accumulate};
use crate::training::adafactor::{Factored, adafactor};
use crate::training::optimizer::{GradientScale, ScaledGradient, adamw, grad_scale, sgd, sgd_momentum};
use crate::training::optimizer_8bit::{QuantizedAdamWStates, QuantizedMoment, adamw_8bit};
use crate::training::optimizer_state::{Gradient, OptimizerState};
use crate::{Cpu, Isa};
use plimsoll_graph::ops::{Adafactor, AdamW, BLOCK, GradScale, Sgd};

const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
const SGD: Sgd = Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: true };
const ADAFACTOR: Adafactor = Adafactor { eps1: 1e-30, clip: 1.0, weight_decay: 0.1 };
const SCALE: GradientScale = GradientScale { factor: 0.5, ok: true };

/// (r, c) of a parameter: several tasks, and a tail.
const SHAPE: (usize, usize) = (70, 513);

/// All states that one step of every optimizer changes.
#[derive(Clone)]
struct States {
    floats: Vec<Vec<f32>>,
    codes: Vec<Vec<u8>>,
}

impl States {
    fn new() -> Self {
        let (r, c) = SHAPE;
        let n = r * c;
        let blocks = n.div_ceil(BLOCK as usize);
        let floats = [n, n, n, n, n, n, n, r, c, n, blocks, blocks];
        let positive = |(seed, n): (usize, &usize)| {
            numbers(seed as u64, *n).into_iter().map(|x| x.abs() + 0.01).collect::<Vec<f32>>()
        };
        let codes = |seed| numbers(seed, n).iter().map(|x| (x * 127.0) as i8 as u8).collect();
        Self { floats: floats.iter().enumerate().map(positive).collect(), codes: vec![codes(20), codes(21)] }
    }
}

/// Pairs old and new states: in place (`within`), with `new` as a copy of `old`, or as separate memory.
fn places<'a, T: Copy, const N: usize>(
    old: &'a [Vec<T>],
    new: &'a mut [Vec<T>],
    within: bool,
) -> [OptimizerState<'a, T>; N] {
    let mut places = old.iter().zip(new).map(|(old, new)| match within {
        true => {
            new.copy_from_slice(old);
            OptimizerState::in_place(new)
        }
        false => OptimizerState::out_of_place(old, new),
    });
    std::array::from_fn(|_| places.next().expect("a state"))
}

/// One step of each optimizer, in place (`within`) or from old states to new ones.
fn steps(cpu: &Cpu, g: Gradient<'_>, within: bool, scale: GradientScale) -> States {
    let old = States::new();
    let mut new = States {
        floats: old.floats.iter().map(|x| vec![f32::NAN; x.len()]).collect(),
        codes: old.codes.iter().map(|x| vec![99; x.len()]).collect(),
    };
    let [p, m, v, p1, p2, b, p3, row, column, p4, m_absmax, v_absmax] =
        places(&old.floats, &mut new.floats, within);
    let [m_codes, v_codes] = places(&old.codes, &mut new.codes, within);
    let hyper = [0.01, 0.1, 0.05];
    let gradient = ScaledGradient { g, scale };
    adamw(cpu, &ADAMW, gradient, [p, m, v], hyper);
    sgd(cpu, &Sgd { momentum: 0.0, ..SGD }, gradient, p1, 0.1);
    sgd_momentum(cpu, &SGD, gradient, [p2, b], 0.1);
    adafactor(cpu, &ADAFACTOR, gradient, Factored { p: p3, row: Some(row), column }, [0.1, 0.8]);
    let states = QuantizedAdamWStates {
        p: p4,
        m: QuantizedMoment { values: m_codes, absmax: m_absmax },
        v: QuantizedMoment { values: v_codes, absmax: v_absmax },
    };
    adamw_8bit(cpu, &ADAMW, gradient, states, hyper);
    new
}

fn same(a: &States, b: &States, what: &str) {
    for (i, (a, b)) in a.floats.iter().zip(&b.floats).enumerate() {
        same_bits(a, b, &format!("{what}: state {i}"));
    }
    assert!(a.codes == b.codes, "{what}: codes");
}

#[test]
fn states_are_updated_in_place_as_elsewhere_on_any_threads() {
    let g = numbers(30, SHAPE.0 * SHAPE.1);
    for isa in Isa::available() {
        let one = steps(&Cpu::with_isa(1, isa), Gradient::F32(&g), false, SCALE);
        assert!(one.floats.iter().flatten().all(|x| x.is_finite()));
        for (threads, within) in [(1, true), (3, true), (3, false)] {
            let other = steps(&Cpu::with_isa(threads, isa), Gradient::F32(&g), within, SCALE);
            same(&one, &other, &format!("{} x {threads}, in place {within}", isa.name()));
        }
    }
}

#[test]
fn where_nothing_is_done_no_bit_changes() {
    let g = vec![f32::NAN; SHAPE.0 * SHAPE.1];
    for (cpu, within) in machines().flat_map(|cpu| [(Cpu::with_isa(1, cpu.isa()), true), (cpu, false)]) {
        let kept = steps(&cpu, Gradient::F32(&g), within, GradientScale { factor: f32::NAN, ok: false });
        same(&States::new(), &kept, cpu.isa().name());
    }
}

#[test]
fn gradients_of_16_bits_are_widened() {
    let n = SHAPE.0 * SHAPE.1;
    for (cpu, half) in
        machines().flat_map(|cpu| [(Cpu::with_isa(1, cpu.isa()), Float16::Bf16), (cpu, Float16::F16)])
    {
        let mut bits = vec![0; n];
        let mut g = vec![0.0; n];
        narrow(&cpu, half, &numbers(31, n), &mut bits);
        widen(&cpu, half, &bits, &mut g);
        let wanted = steps(&cpu, Gradient::F32(&g), true, SCALE);
        same(&wanted, &steps(&cpu, Gradient::Float16(half, &bits), true, SCALE), &format!("{half:?}"));
        let norm = |g| grad_scale(&cpu, &GradScale { max_norm: 0.0 }, [g].into_iter(), 1.0);
        assert_eq!(norm(Gradient::F32(&g)), norm(Gradient::Float16(half, &bits)));

        let other = numbers(32, n);
        let mut sum = g.clone();
        accumulate(&cpu, Accumulator::F32(OptimizerState::in_place(&mut sum)), Gradient::F32(&other), true);
        let mut rounded = vec![0; n];
        narrow(&cpu, half, &sum, &mut rounded);
        let mut kept = bits.clone();
        accumulate(
            &cpu,
            Accumulator::Float16(half, OptimizerState::in_place(&mut kept)),
            Gradient::F32(&other),
            true,
        );
        assert!(kept == rounded, "{half:?}");
        accumulate(
            &cpu,
            Accumulator::Float16(half, OptimizerState::in_place(&mut kept)),
            Gradient::Float16(half, &bits),
            false,
        );
        assert!(kept == bits, "{half:?}");
    }
}

/// Sums of exact squares in one order: neither threads, instruction sets nor other gradients change them.
#[test]
fn the_norm_has_the_same_bits_everywhere() {
    let g = numbers(33, 10_000_007);
    let norm = |cpu: &Cpu| {
        let grads = [Gradient::F32(&g), Gradient::F32(&g[..77])].into_iter();
        grad_scale(cpu, &GradScale { max_norm: 1.0 }, grads, 0.125)
    };
    let wanted = g.iter().chain(&g[..77]).map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt() / 8.0;
    for cpu in machines() {
        let (scale, found) = norm(&cpu);
        assert_eq!((scale, found), norm(&Cpu::with_isa(1, Isa::detect())), "{}", cpu.isa().name());
        assert!((f64::from(found) - wanted).abs() <= f64::from(f32::EPSILON) * wanted);
        assert!(scale.ok);
    }
}

/// The first micro-batch overwrites any previous content of the accumulator.
#[test]
fn the_first_gradient_replaces_the_sum() {
    let g = numbers(34, 100);
    let mut acc = vec![f32::NAN; 100];
    for (keep, times) in [(false, 1.0), (true, 2.0), (false, 1.0)] {
        accumulate(&Cpu::new(2), Accumulator::F32(OptimizerState::in_place(&mut acc)), Gradient::F32(&g), keep);
        assert!(acc.iter().zip(&g).all(|(acc, g)| *acc == times * g));
    }
}
