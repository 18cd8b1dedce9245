//! Exact GELU and its gradient. Invariant: the left tail keeps full relative precision.

use super::{Operands, ReferenceError, Tensor};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, x) = ins.floats("x")?;
    Ok(vec![Tensor::f64(shape, x.iter().map(|&x| gelu(x)).collect())])
}

pub(super) fn eval_grad(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, dy) = ins.floats("dy")?;
    let x = ins.shaped("x", shape)?;
    let dx = dy.iter().zip(x).map(|(&dy, &x)| dy * slope(x));
    Ok(vec![Tensor::f64(shape, dx.collect())])
}

/// GELU, `x Phi(x)`.
pub(super) fn gelu(x: f64) -> f64 {
    x * phi_below(x)
}

/// Derivative of GELU, `Phi(x) + x phi(x)`.
pub(super) fn slope(x: f64) -> f64 {
    phi_below(x) + x * libm::exp(-0.5 * x * x) / (2.0 * PI).sqrt()
}

/// `Phi(x) = (1 + erf(x / sqrt 2)) / 2`, computed as the equal erfc(-x / sqrt 2) / 2, which keeps its precision where
/// erf is close to -1.
fn phi_below(x: f64) -> f64 {
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, random, run};
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::{Gelu, GeluGrad};

    /// `Phi(x)` by Simpson's rule over the density from 0, independent of any erf.
    fn phi_by_quadrature(x: f64) -> f64 {
        let n = 2000;
        let density = |t: f64| (-0.5 * t * t).exp() / (2.0 * PI).sqrt();
        let weight = |i: i32| {
            if i == 0 || i == n {
                1.0
            } else if i % 2 == 1 {
                4.0
            } else {
                2.0
            }
        };
        let sum: f64 = (0..=n).map(|i| weight(i) * density(x * f64::from(i) / f64::from(n))).sum();
        0.5 + sum * x / f64::from(n) / 3.0
    }

    #[test]
    fn known_values() {
        // torch.nn.functional.gelu(torch.tensor([-1, 0, 1, 2, 3.])), approximate='none'.
        let x = Tensor::f32(&[5], vec![-1.0, 0.0, 1.0, 2.0, 3.0]);
        let y = Tensor::f32(&[5], vec![-0.15865525, 0.0, 0.8413447, 1.9544997, 2.9959502]);
        check(Op::Gelu(Gelu {}), &[x], &[y], 1e-7);
    }

    #[test]
    fn is_the_integral_of_the_density() {
        for i in -50..=50 {
            let x = f64::from(i) / 10.0;
            assert!((gelu(x) - x * phi_by_quadrature(x)).abs() < 1e-11, "{x}");
        }
    }

    #[test]
    fn the_left_tail_keeps_its_digits() {
        // -8 Phi(-8), Phi(-8) = 6.220960574271785e-16 (tables of the normal distribution).
        assert!((gelu(-8.0) / (-8.0 * 6.220960574271785e-16) - 1.0).abs() < 1e-13);
    }

    #[test]
    fn gradient() {
        let x = Tensor::f64(&[3, 5], random(1, &[15]).floats().unwrap().iter().map(|x| 4.0 * x).collect());
        let dy = random(2, &[3, 5]);
        let grad = run(Op::GeluGrad(GeluGrad {}), &[dy.clone(), x.clone()], &[&[3, 5]]);
        check_gradient(Op::Gelu(Gelu {}), &[x], 0, &dy, &grad[0], &[&[3, 5]]);
    }
}
