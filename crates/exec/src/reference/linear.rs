//! Linear layer, `y = f(p(x) W^T + b)`. Invariant: the bias is added before the epilogue.

use super::{Operands, ReferenceError, Tensor, dot, gelu::gelu, glu, layer_norm};
use plimsoll_graph::ops::{Epilogue, Linear, OperandFormat, Prologue};

pub(super) fn eval(op: &Linear, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let w = ins.columns("w", x.columns)?;
    let bias = if op.bias { Some(ins.shaped("b", &[w.rows])?) } else { None };
    let residual = match op.epilogue {
        Epilogue::Residual => Some(ins.shaped("r", &[x.rows, w.rows])?),
        Epilogue::None | Epilogue::Gelu | Epilogue::Gate | Epilogue::SiluGate => None,
    };
    let normed = match op.prologue {
        Prologue::None => None,
        Prologue::LayerNorm(norm) => Some(layer_norm::eval_of(&norm, &x, ins)?[0].clone()),
    };
    let x_rows = normed.as_deref().unwrap_or(x.data).chunks(x.columns.max(1));
    let mut y = Vec::with_capacity(x.rows * w.rows);
    let product = if op.operands == OperandFormat::Tf32 { dot_of_cut } else { dot };
    for x in x_rows {
        for (n, w) in w.iter_rows().enumerate() {
            let s = product(x, w) + bias.map_or(0.0, |b| b[n]);
            let s = match op.epilogue {
                Epilogue::None => s,
                Epilogue::Gelu => gelu(s),
                Epilogue::Residual => residual.map_or(0.0, |r| r[y.len()]) + s,
                Epilogue::Gate | Epilogue::SiluGate => s,
            };
            y.push(s);
        }
    }
    if let Some(activation) = op.epilogue.gate() {
        let half = w.rows / 2;
        let gated = y
            .chunks(w.rows)
            .flat_map(|s| (0..half).map(move |j| glu::activation(activation, s[j]) * s[half + j]));
        return Ok(vec![Tensor::f64(&[x.rows, half], gated.collect())]);
    }
    Ok(vec![Tensor::f64(&[x.rows, w.rows], y)])
}

/// Dot product of operands rounded to TF32.
fn dot_of_cut(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| cut_to_tf32(a) * cut_to_tf32(b)).sum()
}

/// The nearest TF32 number: 8 bits of exponent and 10 of mantissa, halves away from zero (PTX ISA,
/// `cvt.rna.tf32.f32`). Infinity and NaN are unchanged.
fn cut_to_tf32(x: f64) -> f64 {
    const DROPPED: u32 = 13;
    if !x.is_finite() {
        return x;
    }
    let bits = (x as f32).to_bits() + (1 << (DROPPED - 1));
    f64::from(f32::from_bits(bits >> DROPPED << DROPPED))
}

#[cfg(test)]
mod tests {
    use super::super::testing::check;
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::LayerNorm;

    #[test]
    fn every_form() {
        let x = Tensor::f32(&[2, 3], vec![1.0, 2.0, 3.0, -1.0, 0.0, 1.0]);
        let w = Tensor::f32(&[2, 3], vec![1.0, 0.0, -1.0, 0.5, 0.5, 0.5]);
        let b = Tensor::f32(&[2], vec![3.0, -1.0]);
        let r = Tensor::f32(&[2, 2], vec![10.0, 20.0, 30.0, 40.0]);
        // x W^T = [-2 3; -2 0]; + b = [1 2; 1 -1]; gelu of 1, 2 and -1 as in gelu.rs.
        let cases: [(bool, Epilogue, Vec<Tensor>, [f32; 4]); 6] = [
            (false, Epilogue::None, vec![], [-2.0, 3.0, -2.0, 0.0]),
            (true, Epilogue::None, vec![b.clone()], [1.0, 2.0, 1.0, -1.0]),
            (false, Epilogue::Gelu, vec![], [-0.045500264, 2.9959502, -0.045500264, 0.0]),
            (true, Epilogue::Gelu, vec![b.clone()], [0.8413447, 1.9544997, 0.8413447, -0.15865525]),
            (false, Epilogue::Residual, vec![r.clone()], [8.0, 23.0, 28.0, 40.0]),
            (true, Epilogue::Residual, vec![b.clone(), r], [11.0, 22.0, 31.0, 39.0]),
        ];
        for (bias, epilogue, rest, y) in cases {
            let ins = [vec![x.clone(), w.clone()], rest].concat();
            check(Op::Linear(Linear::new(bias, epilogue)), &ins, &[Tensor::f32(&[2, 2], y.to_vec())], 2e-7);
        }
        // f(1) 2 and f(1) (-1).
        for (epilogue, f) in [(Epilogue::Gate, 0.8413447), (Epilogue::SiluGate, 0.7310586)] {
            let gate = Op::Linear(Linear::new(true, epilogue));
            let y = Tensor::f32(&[2, 1], vec![2.0 * f, -f]);
            check(gate, &[x.clone(), w.clone(), b.clone()], &[y], 2e-7);
        }
    }

    #[test]
    fn a_norm_comes_first_and_its_operands_last() {
        // Mean 2, variance 1, rstd 1 / sqrt(1 + 3) = 1/2: the normalised row is [-1/2 1/2]; with gamma and beta [-1/2
        // 3/2].
        let [x, gamma, beta] =
            [[1.0, 3.0], [1.0, 2.0], [0.0, 0.5]].map(|v: [f32; 2]| Tensor::f32(&[2], v.to_vec()));
        let x = Tensor { shape: vec![1, 2], ..x };
        let w = Tensor::f32(&[1, 2], vec![2.0, 4.0]);
        let [b, r] = [[0.5], [10.0]].map(|v: [f32; 1]| Tensor::f32(&[1], v.to_vec()));
        let r = Tensor { shape: vec![1, 1], ..r };
        let norm = LayerNorm { eps: 3.0 };
        let op = Linear { prologue: Prologue::LayerNorm(norm), ..Linear::new(true, Epilogue::Residual) };
        check(Op::Linear(op), &[x, w, b, r, gamma, beta], &[Tensor::f32(&[1, 1], vec![15.5])], 0.0);
    }

    #[test]
    fn factors_are_cut_to_tf32_and_sums_are_not() {
        // 1 + 2^-11 is a tie and rounds up to 1 + 2^-10; 1 + 2^-12 rounds to 1, and -(1 + 2^-12) to -1.
        let half = 1.0 + 2f32.powi(-11);
        let quarter = 1.0 + 2f32.powi(-12);
        let x = Tensor::f32(&[3, 1], vec![half, quarter, -quarter]);
        let w = Tensor::f32(&[1, 1], vec![1.0]);
        let b = Tensor::f32(&[1], vec![2f32.powi(-20)]);
        let op = Linear { operands: OperandFormat::Tf32, ..Linear::new(true, Epilogue::None) };
        let y = [1.0 + 2f32.powi(-10), 1.0, -1.0].map(|s| s + 2f32.powi(-20));
        check(Op::Linear(op), &[x, w, b], &[Tensor::f32(&[3, 1], y.to_vec())], 0.0);
    }

    #[test]
    fn sums_are_in_f64() {
        // 2^30 + 1 - 2^30: f32 sums would give 0.
        let x = Tensor::f32(&[1, 3], vec![32768.0, 1.0, -32768.0]);
        let w = Tensor::f32(&[1, 3], vec![32768.0, 1.0, 32768.0]);
        let op = Op::Linear(Linear::new(false, Epilogue::None));
        check(op, &[x, w], &[Tensor::f32(&[1, 1], vec![1.0])], 0.0);
    }

    #[test]
    fn what_is_not_finite_is_not_cut() {
        // The arena's NaN fill, the extremes of the other NaNs, and infinities.
        for bits in [u32::MAX, 0x7fff_ffff, 0x7f80_0001, 0xff80_0001] {
            assert!(cut_to_tf32(f64::from(f32::from_bits(bits))).is_nan(), "{bits:x}");
        }
        for x in [f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(cut_to_tf32(x), x);
        }
        assert_eq!(
            [1.0 + 2f64.powi(-11), -1.0 - 2f64.powi(-12)].map(cut_to_tf32),
            [1.0 + 2f64.powi(-10), -1.0]
        );
    }
}
