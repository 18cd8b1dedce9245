//! RMS norm and its gradient. Invariant: sums over rows are in row order.

use super::{Operands, ReferenceError, Tensor, dot};
use plimsoll_graph::ops::{RmsNorm, RmsNormGrad};

pub(super) fn eval(op: &RmsNorm, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let (heads, columns) = by_heads(x.rows, x.columns, op.heads);
    let gamma = ins.shaped("gamma", &[columns])?;
    let mut y = Vec::with_capacity(x.data.len());
    let mut rstds = vec![];
    for row in x.data.chunks_exact(columns) {
        let rstd = 1.0 / (dot(row, row) / columns as f64 + f64::from(op.eps)).sqrt();
        y.extend(row.iter().zip(gamma).map(|(x, g)| x * rstd * g));
        rstds.push(rstd);
    }
    Ok(vec![Tensor::f64(&[x.rows, x.columns], y), Tensor::f64(&[heads], rstds)])
}

/// The number of heads of all rows, and the columns of a head.
fn by_heads(rows: usize, columns: usize, heads: u32) -> (usize, usize) {
    (rows * heads as usize, columns / heads as usize)
}

pub(super) fn eval_grad(op: &RmsNormGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let x = ins.same("x", dy)?;
    let (heads, columns) = by_heads(dy.rows, dy.columns, op.heads);
    let rstd = ins.shaped("rstd", &[heads])?;
    let gamma = ins.shaped("gamma", &[columns])?;
    let mut dx = Vec::with_capacity(x.data.len());
    let mut dgamma = vec![0.0; columns];
    for (r, (dy, x)) in dy.data.chunks_exact(columns).zip(x.data.chunks_exact(columns)).enumerate() {
        let h: Vec<f64> = x.iter().map(|x| x * rstd[r]).collect();
        let g: Vec<f64> = dy.iter().zip(gamma).map(|(dy, w)| dy * w).collect();
        let mean_gh = dot(&g, &h) / dy.len() as f64;
        dx.extend(g.iter().zip(&h).map(|(g, h)| rstd[r] * (g - h * mean_gh)));
        for (c, sum) in dgamma.iter_mut().enumerate() {
            *sum += dy[c] * h[c];
        }
    }
    Ok(vec![Tensor::f64(&[dy.rows, dy.columns], dx), Tensor::f64(&[columns], dgamma)])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, floats, random, run};
    use super::*;
    use plimsoll_graph::Op;

    #[test]
    fn known_rows() {
        let x = Tensor::f32(&[2, 4], vec![1.0, -1.0, 1.0, 1.0, 0.0, 4.0, 0.0, 0.0]);
        let gamma = Tensor::f32(&[4], vec![1.0, 2.0, 3.0, 0.5]);
        // Row 0: mean square 1, rstd 1 / sqrt(1 + 3) = 1/2; row 1: 4, 1 / sqrt 7.
        let seventh = 1.0 / 7.0_f32.sqrt();
        let y = Tensor::f32(&[2, 4], vec![0.5, -1.0, 1.5, 0.25, 0.0, 8.0 * seventh, 0.0, 0.0]);
        let rstd = Tensor::f32(&[2], vec![0.5, seventh]);
        check(Op::RmsNorm(RmsNorm { eps: 3.0, heads: 1 }), &[x, gamma], &[y, rstd], 3e-7);
    }

    #[test]
    fn heads_are_rows_of_their_own() {
        let [x, gamma] = [random(1, &[6, 4]), random(2, &[4])];
        let whole =
            run(Op::RmsNorm(RmsNorm { eps: 0.1, heads: 1 }), &[x.clone(), gamma.clone()], &[&[6, 4], &[6]]);
        let halves = Tensor::f64(&[2, 12], floats(&x).to_vec());
        check(
            Op::RmsNorm(RmsNorm { eps: 0.1, heads: 3 }),
            &[halves, gamma],
            &[Tensor::f64(&[2, 12], floats(&whole[0]).to_vec()), whole[1].clone()],
            0.0,
        );
    }

    #[test]
    fn gradients() {
        for (rows, columns, heads) in [(1, 8, 1), (3, 5, 1), (4, 1, 1), (3, 10, 2), (2, 12, 4)] {
            let op = Op::RmsNorm(RmsNorm { eps: 1e-2, heads });
            let (all, of_head) = by_heads(rows, columns, heads);
            let ins = [random(1, &[rows, columns]), random(2, &[of_head])];
            let shapes: [&[usize]; 2] = [&[rows, columns], &[all]];
            let dy = random(4, &[rows, columns]);
            let [x, gamma] = ins.clone();
            let backward = [dy.clone(), x, run(op, &ins, &shapes)[1].clone(), gamma];
            let grads = run(Op::RmsNormGrad(RmsNormGrad { heads }), &backward, &[&[rows, columns], &[of_head]]);
            for (input, grad) in grads.iter().enumerate() {
                check_gradient(op, &ins, input, &dy, grad, &shapes);
            }
        }
    }
}
