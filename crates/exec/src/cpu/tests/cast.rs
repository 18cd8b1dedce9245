//! 16-bit formats against those of the reference, on every number and around every rounding.

use super::{machines, numbers};
use crate::cpu::cast::{Bf16, Element, F16, cast};
use crate::reference::half::{self, Half};

fn widens_exactly<E: Element>(of: fn(u16) -> E, reference: Half) {
    let x: Vec<E> = (0..=u16::MAX).map(of).collect();
    for cpu in machines() {
        let mut y = vec![0.0_f32; x.len()];
        cast(&cpu, &x, &mut y);
        for (bits, y) in (0..=u16::MAX).zip(y) {
            let wanted = reference.widen(bits) as f32;
            let same = y.to_bits() == wanted.to_bits() || (y.is_nan() && wanted.is_nan());
            assert!(same, "{bits:#x}: {y}, not {wanted}");
        }
    }
}

#[test]
fn every_number_is_widened_exactly() {
    widens_exactly(Bf16, half::BF16);
    widens_exactly(F16, half::F16);
}

/// Every number, the middles between neighbours, and what is one f32 beside either; and numbers of any size.
fn rounds_to_nearest_even<E: Element>(bits_of: fn(E) -> u16, of: fn(u16) -> E, reference: Half) {
    let mut x = vec![f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, 65_519.996, 65_520.0, f32::NAN];
    for bits in 0..=u16::MAX {
        let here = reference.widen(bits) as f32;
        let middle = (0.5 * (reference.widen(bits) + reference.widen(bits.wrapping_add(1)))) as f32;
        for y in [here, middle].into_iter().filter(|y| y.is_finite()) {
            x.extend([y, y.next_up(), y.next_down()]);
        }
    }
    let any = numbers(1, 20_000);
    x.extend(any.iter().zip(&any[7..]).map(|(a, b)| a * libm::exp2f(90.0 * b)));
    for cpu in machines() {
        let mut y = vec![of(0); x.len()];
        cast(&cpu, &x, &mut y);
        for (&x, y) in x.iter().zip(y.into_iter().map(bits_of)) {
            let wanted = reference.round(f64::from(x));
            let nan = reference.widen(y).is_nan() && x.is_nan();
            assert!(y == wanted || nan, "{x:e}: {y:#x}, not {wanted:#x}");
        }
    }
}

#[test]
fn narrowing_rounds_to_nearest_even() {
    rounds_to_nearest_even(|x: Bf16| x.0, Bf16, half::BF16);
    rounds_to_nearest_even(|x: F16| x.0, F16, half::F16);
}
