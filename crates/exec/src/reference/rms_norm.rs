//! RMS norm and its gradient. Invariant: sums over rows are in row order.

use super::{Operands, ReferenceError, Tensor, dot};
use plimsoll_graph::ops::RmsNorm;

pub(super) fn eval(op: &RmsNorm, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let gamma = ins.shaped("gamma", &[x.columns])?;
    let (mut y, mut rstds) = (Vec::with_capacity(x.data.len()), vec![]);
    for row in x.iter_rows() {
        let rstd = 1.0 / (dot(row, row) / x.columns as f64 + f64::from(op.eps)).sqrt();
        y.extend(row.iter().zip(gamma).map(|(x, g)| x * rstd * g));
        rstds.push(rstd);
    }
    Ok(vec![Tensor::f64(&[x.rows, x.columns], y), Tensor::f64(&[x.rows], rstds)])
}

pub(super) fn eval_grad(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let x = ins.same("x", dy)?;
    let rstd = ins.shaped("rstd", &[dy.rows])?;
    let gamma = ins.shaped("gamma", &[dy.columns])?;
    let mut dx = Vec::with_capacity(x.data.len());
    let mut dgamma = vec![0.0; dy.columns];
    for (r, (dy, x)) in dy.iter_rows().zip(x.iter_rows()).enumerate() {
        let h: Vec<f64> = x.iter().map(|x| x * rstd[r]).collect();
        let g: Vec<f64> = dy.iter().zip(gamma).map(|(dy, w)| dy * w).collect();
        let mean_gh = dot(&g, &h) / dy.len() as f64;
        dx.extend(g.iter().zip(&h).map(|(g, h)| rstd[r] * (g - h * mean_gh)));
        for (c, sum) in dgamma.iter_mut().enumerate() {
            *sum += dy[c] * h[c];
        }
    }
    Ok(vec![Tensor::f64(&[dy.rows, dy.columns], dx), Tensor::f64(&[dy.columns], dgamma)])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, random, run};
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::RmsNormGrad;

    #[test]
    fn known_rows() {
        let x = Tensor::f32(&[2, 4], vec![1.0, -1.0, 1.0, 1.0, 0.0, 4.0, 0.0, 0.0]);
        let gamma = Tensor::f32(&[4], vec![1.0, 2.0, 3.0, 0.5]);
        // Row 0: mean square 1, rstd 1 / sqrt(1 + 3) = 1/2; row 1: 4, 1 / sqrt 7.
        let seventh = 1.0 / 7.0_f32.sqrt();
        let y = Tensor::f32(&[2, 4], vec![0.5, -1.0, 1.5, 0.25, 0.0, 8.0 * seventh, 0.0, 0.0]);
        let rstd = Tensor::f32(&[2], vec![0.5, seventh]);
        check(Op::RmsNorm(RmsNorm { eps: 3.0 }), &[x, gamma], &[y, rstd], 3e-7);
    }

    #[test]
    fn gradients() {
        for (rows, columns) in [(1, 8), (3, 5), (4, 1)] {
            let op = Op::RmsNorm(RmsNorm { eps: 1e-2 });
            let ins = [random(1, &[rows, columns]), random(2, &[columns])];
            let shapes: [&[usize]; 2] = [&[rows, columns], &[rows]];
            let dy = random(4, &[rows, columns]);
            let [x, gamma] = ins.clone();
            let backward = [dy.clone(), x, run(op, &ins, &shapes)[1].clone(), gamma];
            let grads = run(Op::RmsNormGrad(RmsNormGrad {}), &backward, &[&[rows, columns], &[columns]]);
            for (input, grad) in grads.iter().enumerate() {
                check_gradient(op, &ins, input, &dy, grad, &shapes);
            }
        }
    }
}
