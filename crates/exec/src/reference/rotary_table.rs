//! Cosine and sine tables of rotary embedding. Invariant: the angle is one f32 product, as in the reference
//! implementations; cosine and sine are computed from that f32.

use super::{Operands, ReferenceError, Tensor};

/// `rows` is the number of positions, which no input determines.
pub(super) fn eval(ins: &mut Operands<'_>, rows: usize) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, inv_freq) = ins.floats("inv_freq")?;
    let [half] = *shape else {
        return Err(ReferenceError::Rank { what: "inv_freq", wanted: 1, found: shape.to_vec() });
    };
    let mut cos = Vec::with_capacity(rows * half);
    let mut sin = Vec::with_capacity(rows * half);
    for position in 0..rows {
        for &frequency in inv_freq {
            let angle = f64::from(position as f32 * frequency as f32);
            cos.push(libm::cos(angle));
            sin.push(libm::sin(angle));
        }
    }
    Ok([cos, sin].map(|table| Tensor::f64(&[rows, half], table)).into())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, floats, run};
    use super::*;
    use plimsoll_graph::{Op, ops::RotaryTable};

    #[test]
    fn known_angles() {
        let inv_freq = Tensor::f32(&[2], vec![1.0, 0.5]);
        let of = |f: fn(f64) -> f64| {
            let angles = [0.0, 0.0, 1.0, 0.5, 2.0, 1.0];
            Tensor::f32(&[3, 2], angles.map(|a| f(a) as f32).to_vec())
        };
        check(Op::RotaryTable(RotaryTable {}), &[inv_freq], &[of(f64::cos), of(f64::sin)], 6e-8);
    }

    #[test]
    fn the_angle_is_rounded_to_f32() {
        let f = 0.1_f32;
        let got =
            run(Op::RotaryTable(RotaryTable {}), &[Tensor::f32(&[1], vec![f])], &[&[1001, 1], &[1001, 1]]);
        let rounded = f64::from(1000.0_f32 * f);
        assert!((floats(&got[0])[1000] - rounded.cos()).abs() < 1e-15);
        assert!((rounded.cos() - (1000.0 * f64::from(f)).cos()).abs() > 5e-7, "else this shows nothing");
    }
}
