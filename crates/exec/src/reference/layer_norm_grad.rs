//! Gradient of layer norm. Invariant: sums over rows are in row order.

use super::{Operands, ReferenceError, Tensor};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let x = ins.shaped("x", &[dy.rows, dy.columns])?;
    let mean = ins.shaped("mean", &[dy.rows])?;
    let rstd = ins.shaped("rstd", &[dy.rows])?;
    let gamma = ins.shaped("gamma", &[dy.columns])?;
    let columns = dy.columns as f64;
    let mut dx = Vec::with_capacity(x.len());
    let mut dgamma = vec![0.0_f64; dy.columns];
    let mut dbeta = vec![0.0_f64; dy.columns];
    for (r, dy) in dy.iter_rows().enumerate() {
        let x = &x[r * dy.len()..(r + 1) * dy.len()];
        let mean = mean[r];
        let rstd = rstd[r];
        let h: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
        let g: Vec<f64> = dy.iter().zip(gamma).map(|(dy, w)| dy * w).collect();
        let sum_g: f64 = g.iter().sum();
        let sum_gh: f64 = g.iter().zip(&h).map(|(g, h)| g * h).sum();
        for c in 0..dy.len() {
            dx.push(rstd * (g[c] - sum_g / columns - h[c] * sum_gh / columns));
            dgamma[c] += dy[c] * h[c];
            dbeta[c] += dy[c];
        }
    }
    let [dgamma, dbeta] = [dgamma, dbeta].map(|sums| Tensor::f64(&[dy.columns], sums));
    Ok(vec![Tensor::f64(&[dy.rows, dy.columns], dx), dgamma, dbeta])
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check_gradient, random, run};
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::{LayerNorm, LayerNormGrad};

    #[test]
    fn gradients() {
        for (rows, columns) in [(1, 8), (3, 5), (4, 2)] {
            let op = Op::LayerNorm(LayerNorm { eps: 1e-2 });
            let ins = [random(1, &[rows, columns]), random(2, &[columns]), random(3, &[columns])];
            let shapes: [&[usize]; 3] = [&[rows, columns], &[rows], &[rows]];
            let forward = run(op, &ins, &shapes);
            let dy = random(4, &[rows, columns]);
            let [x, gamma, _] = ins.clone();
            let backward = [dy.clone(), x, forward[1].clone(), forward[2].clone(), gamma];
            let outs: [&[usize]; 3] = [&[rows, columns], &[columns], &[columns]];
            let grads = run(Op::LayerNormGrad(LayerNormGrad {}), &backward, &outs);
            for (input, grad) in grads.iter().enumerate() {
                check_gradient(op, &ins, input, &dy, grad, &shapes);
            }
        }
    }
}
