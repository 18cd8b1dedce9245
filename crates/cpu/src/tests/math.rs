//! Tests of exp, GELU, SiLU and their derivatives on dense grids, and of the agreement of lanes.

use super::{machines, numbers, same_bits};
use crate::rows::elementwise::{Gate, gelu, gelu_grad, glu, glu_grad};
use crate::simd::isa::SimdKernel;
use crate::simd::math::{exp, gelu_bf16, silu_bf16};
use crate::simd::{LANES, Simd};
use crate::{Cpu, Isa, Rows, RowsMut};
use plimsoll_exec::half::bf16_to_f32;

struct Exp<'a>(&'a [f32], &'a mut [f32]);

impl SimdKernel for Exp<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        each(s, self.0, self.1, |v| exp(s, v));
    }
}

struct ActivationBf16<'a>(Gate, &'a [f32], &'a mut [f32]);

impl SimdKernel for ActivationBf16<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        each(s, self.1, self.2, |v| match self.0 {
            Gate::Gelu => gelu_bf16(s, v),
            Gate::Silu => silu_bf16(s, v),
        });
    }
}

/// The activation for bf16 results, before rounding.
pub(super) fn for_bf16(isa: Isa, activation: Gate, x: &[f32]) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len()];
    isa.run(ActivationBf16(activation, x, &mut y));
    y
}

/// Sets `y[i] = f(x[i])`, a vector at a time.
#[inline(always)]
fn each<S: Simd>(s: S, x: &[f32], y: &mut [f32], f: impl Fn(S::V) -> S::V) {
    for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
        // SAFETY: both chunks hold x.len() f32.
        unsafe { s.store_n(y.as_mut_ptr(), f(s.load_n(x.as_ptr(), x.len())), y.len()) };
    }
}

/// One ulp of a value: the spacing of f32 at that value.
fn ulp(x: f64) -> f64 {
    let x = (x.abs() as f32).max(f32::MIN_POSITIVE);
    f64::from(f32::from_bits(x.to_bits() + 1) - x)
}

#[test]
fn exp_is_right_to_about_an_ulp() {
    let mut x: Vec<f32> = (0..400_001).map(|i| -88.0 + i as f32 * 2.2e-4).collect();
    x.extend([0.0, -0.0, 1.0, 20.0, 88.0, -1e-30, -1000.0, f32::NEG_INFINITY, f32::NAN]);
    for isa in Isa::available() {
        let mut y = vec![0.0; x.len()];
        isa.run(Exp(&x, &mut y));
        let worst = x.iter().zip(&y).filter(|(x, _)| **x >= -87.33).map(|(&x, &y)| {
            let want = libm::exp(f64::from(x));
            (f64::from(y) - want).abs() / ulp(want)
        });
        // Without FMA the reduction and the polynomial round twice as often.
        let most = if isa.has_fma() { 1.1 } else { 2.0 };
        let worst = worst.fold(0.0, f64::max);
        assert!(worst <= most, "{}: {worst} ulp", isa.name());
        assert!(x.iter().zip(&y).all(|(&x, &y)| x >= -87.33 || x.is_nan() || y == 0.0));
        assert!(y[x.len() - 1].is_nan(), "NaN stays NaN");
    }
}

/// GELU of a row of numbers.
fn gelu_of(cpu: &Cpu, x: &[f32]) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len()];
    gelu(cpu, Rows::new(x, 1, x.len(), x.len()), RowsMut::new(&mut y, 1, x.len(), x.len()));
    y
}

#[test]
fn gelu_is_exact_to_1e_7() {
    let mut x: Vec<f32> = (0..600_001).map(|i| -15.0 + i as f32 * 5e-5).collect();
    x.extend([-1e30, -1e4, -50.0, 50.0, 1e4, 1e30, 1e-30, -1e-30, 0.0]);
    for isa in Isa::available() {
        let y = gelu_of(&Cpu::with_isa(1, isa), &x);
        for (&x, &y) in x.iter().zip(&y) {
            let x = f64::from(x);
            let want = x * 0.5 * libm::erfc(-x / std::f64::consts::SQRT_2);
            let off = (f64::from(y) - want).abs();
            let most = 4e-8 + ulp(want);
            assert!(off <= most, "{}: gelu({x}) = {y}, want {want}, off {off:e}", isa.name());
        }
        let odd = gelu_of(&Cpu::with_isa(1, isa), &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        assert!(odd[0].is_nan() && odd[1] == f32::INFINITY && odd[2].abs() < 1e-15, "{odd:?}");
    }
}

/// All bf16 numbers, and a grid of step 5e-5 from -15 to 15.
#[test]
fn gelu_for_bf16_is_exact_to_a_hundredth_of_its_rounding() {
    let mut x: Vec<f32> = (0..=u16::MAX).map(bf16_to_f32).filter(|x| x.is_finite()).collect();
    x.extend((0..600_001).map(|i| -15.0 + i as f32 * 5e-5));
    for isa in Isa::available() {
        for (&x, y) in x.iter().zip(for_bf16(isa, Gate::Gelu, &x)) {
            let a = f64::from(x.abs());
            let tail = a * 0.5 * libm::erfc(a / std::f64::consts::SQRT_2);
            let want = f64::from(x.max(0.0)) - tail;
            let most = tail / 65536.0 + a.min(1.0) / 524_288.0 + ulp(want);
            let off = (f64::from(y) - want).abs();
            assert!(off <= most, "{}: {x}: {y} for {want}, off {off:e}", isa.name());
        }
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
        let y = for_bf16(isa, Gate::Gelu, &odd);
        assert!(y[0].is_nan() && y[1] == f32::INFINITY && y[2].abs() < 1e-9, "{y:?}");
        same_bits(&y[3..], &odd[3..], "zeros keep their signs");
    }
}

/// All bf16 numbers, and a grid of step 1e-4 from -90 to 30.
#[test]
fn silu_for_bf16_is_exact_to_a_fiftieth_of_its_rounding() {
    let mut x: Vec<f32> = (0..=u16::MAX).map(bf16_to_f32).filter(|x| x.is_finite()).collect();
    x.extend((0..1_200_001).map(|i| -90.0 + i as f32 * 1e-4));
    for isa in Isa::available() {
        for (&x, y) in x.iter().zip(for_bf16(isa, Gate::Silu, &x)) {
            let a = f64::from(x.abs());
            let tail = a / (1.0 + libm::exp(a));
            let want = f64::from(x.max(0.0)) - tail;
            let most = tail / 16384.0 + 2e-33 + ulp(want);
            let off = (f64::from(y) - want).abs();
            assert!(off <= most, "{}: {x}: {y} for {want}, off {off:e}", isa.name());
        }
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
        let y = for_bf16(isa, Gate::Silu, &odd);
        assert!(y[0].is_nan() && y[1] == f32::INFINITY && y[2].abs() < 1e-32, "{y:?}");
        same_bits(&y[3..], &odd[3..], "zeros keep their signs");
    }
}

#[test]
fn all_instruction_sets_have_one_gelu_and_one_silu_for_bf16() {
    let x: Vec<f32> = (0..=u16::MAX).map(bf16_to_f32).filter(|x| !x.is_nan()).collect();
    for (name, activation) in [("gelu", Gate::Gelu), ("silu", Gate::Silu)] {
        let mut all = Isa::available().filter(|isa| isa.has_fma()).map(|isa| for_bf16(isa, activation, &x));
        let Some(first) = all.next() else { return };
        all.for_each(|y| same_bits(&y, &first, name));
    }
}

/// f and f' of `gate` at x, from its gradients for dy = 1 and a value of 1.
fn gate_of(cpu: &Cpu, gate: Gate, x: &[f32]) -> [Vec<f32>; 2] {
    let both: Vec<f32> = x.iter().flat_map(|&x| [x, 1.0]).collect();
    let rows = x.len();
    let ones = vec![1.0; x.len()];
    let mut y = vec![f32::NAN; rows];
    let mut dx = vec![f32::NAN; 2 * rows];
    let wide = Rows::new(&both, rows, 2, 2);
    glu(cpu, gate, wide, RowsMut::new(&mut y, rows, 1, 1));
    glu_grad(cpu, gate, Rows::new(&ones, rows, 1, 1), wide, RowsMut::new(&mut dx, rows, 2, 2));
    let slopes = dx.iter().step_by(2).copied().collect();
    same_bits(&y, &dx.iter().skip(1).step_by(2).copied().collect::<Vec<_>>(), "the gradient of the value");
    [y, slopes]
}

#[test]
fn gates_and_slopes_are_exact_to_two_ulp_of_1() {
    let mut x: Vec<f32> = (0..300_001).map(|i| -15.0 + i as f32 * 1e-4).collect();
    x.extend([-1e30, -1e4, -87.0, -50.0, 50.0, 90.0, 1e4, 1e30, 1e-30, -1e-30, 0.0]);
    for isa in Isa::available() {
        for gate in [Gate::Gelu, Gate::Silu] {
            let [y, slopes] = gate_of(&Cpu::with_isa(1, isa), gate, &x);
            for ((&x, y), slope) in x.iter().zip(y).zip(slopes) {
                let x = f64::from(x);
                let (f, d) = match gate {
                    Gate::Gelu => {
                        let phi = 0.5 * libm::erfc(-x / std::f64::consts::SQRT_2);
                        (x * phi, phi + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt())
                    }
                    Gate::Silu => {
                        let s = 1.0 / (1.0 + (-x).exp());
                        (x * s, s * (1.0 + x * (1.0 - s)))
                    }
                };
                let off = (f64::from(y) - f).abs();
                let most = 4e-8 + 3.0 * ulp(f);
                assert!(off <= most, "{}: {gate:?}({x}) = {y}, want {f}, off {off:e}", isa.name());
                let off = (f64::from(slope) - d).abs();
                assert!(
                    off <= 2.0 * f64::from(f32::EPSILON),
                    "{}: {gate:?}'({x}) = {slope}, want {d}, off {off:e}",
                    isa.name()
                );
            }
        }
        let x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let ones = [1.0; 3];
        let mut dx = [9.0; 3];
        let of = |x| Rows::new(x, 1, 3, 3);
        gelu_grad(&Cpu::with_isa(1, isa), of(&ones), of(&x), RowsMut::new(&mut dx, 1, 3, 3));
        assert!(dx[0].is_nan() && dx[1] == 1.0 && dx[2].abs() < 1e-15, "{dx:?}");
    }
}

#[test]
fn a_value_has_the_same_bits_at_every_place() {
    let x: Vec<f32> = numbers(3, 97).iter().map(|v| v * 6.0).collect();
    let first = gelu_of(&Cpu::new(1), &x);
    for cpu in machines().filter(|cpu| cpu.isa().has_fma()) {
        for shift in 0..33 {
            same_bits(&gelu_of(&cpu, &x[shift..]), &first[shift..], "gelu");
        }
    }
}

struct Reduce<'a>(&'a [f32; LANES], &'a mut [f32; 2]);

impl SimdKernel for Reduce<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: sixteen f32.
        let v = unsafe { s.load(self.0.as_ptr()) };
        *self.1 = [s.sum(v), s.max_lane(v)];
    }
}

#[test]
fn all_instruction_sets_reduce_in_one_order() {
    for seed in 0..50 {
        let x: [f32; LANES] = numbers(seed, LANES).try_into().unwrap();
        let mut all = Isa::available().map(|isa| {
            let mut y = [0.0; 2];
            isa.run(Reduce(&x, &mut y));
            y
        });
        let first = all.next().unwrap();
        all.for_each(|y| same_bits(&y, &first, "sum and max"));
        assert_eq!(first[1], x.iter().copied().fold(f32::MIN, f32::max));
    }
}
