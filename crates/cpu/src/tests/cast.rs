//! Tests of the 16-bit format conversions against the reference, for every number and around every rounding boundary.

use super::{machines, numbers};
use crate::rows::cast::{Float16, exchange, narrow, widen};
use plimsoll_exec::reference::half::{self, BF16, F16};

const FORMATS: [(Float16, half::HalfFormat); 2] = [(Float16::Bf16, BF16), (Float16::F16, F16)];

#[test]
fn every_number_is_widened_exactly() {
    let x: Vec<u16> = (0..=u16::MAX).collect();
    for cpu in machines() {
        for (format, reference) in FORMATS {
            let mut y = vec![0.0; x.len()];
            widen(&cpu, format, &x, &mut y);
            for (&x, y) in x.iter().zip(y) {
                let wanted = reference.widen(x) as f32;
                let same = y.to_bits() == wanted.to_bits() || (y.is_nan() && wanted.is_nan());
                assert!(same, "{format:?} {x:#x}: {y}, not {wanted}");
            }
        }
    }
}

/// Every 16-bit number, the midpoints between neighbours, and the f32 on either side of each; and numbers of any
/// size.
#[test]
fn narrowing_rounds_to_nearest_even() {
    for (format, reference) in FORMATS {
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
            let mut y = vec![0; x.len()];
            narrow(&cpu, format, &x, &mut y);
            for (&x, y) in x.iter().zip(y) {
                let wanted = reference.round(f64::from(x));
                let nan = reference.widen(y).is_nan() && x.is_nan();
                assert!(y == wanted || nan, "{format:?} {x:e}: {y:#x}, not {wanted:#x}");
            }
        }
    }
}

#[test]
fn formats_are_exchanged_with_one_rounding() {
    let x: Vec<u16> = (0..=u16::MAX).collect();
    for cpu in machines() {
        for (from, (wide, narrow)) in [(Float16::Bf16, (BF16, F16)), (Float16::F16, (F16, BF16))] {
            let mut y = vec![0; x.len()];
            exchange(&cpu, from, &x, &mut y);
            for (&x, y) in x.iter().zip(y) {
                let value = wide.widen(x);
                let wanted = narrow.round(wide.widen(x));
                let nan = value.is_nan() && narrow.widen(y).is_nan();
                assert!(y == wanted || nan, "{from:?} {x:#x}: {y:#x}, not {wanted:#x}");
            }
        }
    }
}
