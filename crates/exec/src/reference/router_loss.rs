//! Auxiliary losses of the router and their gradient. Invariant: the experts' shares are counts, so no gradient
//! passes through them; without tokens both losses are 0.

use super::operands::{Matrix, rows_of};
use super::{Operands, ReferenceError, Tensor, softmax::normalise};
use plimsoll_graph::ops::{RouterLoss, RouterLossGrad};

pub(super) fn eval(op: &RouterLoss, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let logits = ins.matrix("logits")?;
    let shares = shares(ins, logits)?;
    let (mut balance, mut z) = (0.0, 0.0);
    for row in logits.iter_rows() {
        let (p, lse) = normalise(row);
        balance += super::dot(&shares, &p);
        z += lse * lse;
    }
    let tokens = logits.rows.max(1) as f64;
    let experts = logits.columns as f64;
    let balance = f64::from(op.balance) * experts * balance / tokens;
    let z = f64::from(op.z) * z / tokens;
    Ok([balance + z, balance, z].map(|x| Tensor::f64(&[1], vec![x])).to_vec())
}

pub(super) fn eval_grad(op: &RouterLossGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dloss = ins.shaped("dloss", &[1])?[0];
    let logits = ins.matrix("logits")?;
    let shares = shares(ins, logits)?;
    let each = dloss / logits.rows.max(1) as f64;
    let balance = f64::from(op.balance) * logits.columns as f64 * each;
    let z = 2.0 * f64::from(op.z) * each;
    let mut dlogits = Vec::with_capacity(logits.data.len());
    for row in logits.iter_rows() {
        let (p, lse) = normalise(row);
        let mean = super::dot(&shares, &p);
        dlogits.extend(p.iter().zip(&shares).map(|(p, share)| p * (balance * (share - mean) + z * lse)));
    }
    Ok(vec![Tensor::f64(&[logits.rows, logits.columns], dlogits)])
}

/// Share of all choices that went to each expert.
fn shares(ins: &mut Operands<'_>, logits: Matrix<'_>) -> Result<Vec<f64>, ReferenceError> {
    let experts = ins.integer_rows("experts", logits.rows)?;
    let experts = rows_of("experts", experts, logits.columns)?;
    let mut shares = vec![0.0; logits.columns];
    for &e in &experts {
        shares[e] += 1.0;
    }
    let choices = experts.len().max(1) as f64;
    Ok(shares.into_iter().map(|count| count / choices).collect())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, random, run};
    use super::*;
    use plimsoll_graph::Op;

    /// Equal logits: every probability is 1/4 and lse = ln 4, so the balance loss is 1 for any choices.
    #[test]
    fn alike_experts_cost_the_weight() {
        let op = Op::RouterLoss(RouterLoss { balance: 0.5, z: 2.0 });
        let logits = Tensor::f64(&[3, 4], vec![0.0; 12]);
        let z = 2.0 * libm::log(4.0) * libm::log(4.0);
        let wanted = [0.5 + z, 0.5, z].map(|x| Tensor::f64(&[1], vec![x]));
        for experts in [[0, 1, 2], [3, 3, 3]] {
            let experts = Tensor::i32(&[3, 1], experts.to_vec());
            check(op, &[logits.clone(), experts], &wanted, 1e-6);
        }
    }

    #[test]
    fn one_expert_for_all_costs_most() {
        let op = Op::RouterLoss(RouterLoss { balance: 1.0, z: 0.0 });
        let logits = Tensor::f64(&[2, 2], vec![100.0, 0.0, 100.0, 0.0]);
        let experts = Tensor::i32(&[2, 1], vec![0, 0]);
        let wanted = [2.0, 2.0, 0.0].map(|x| Tensor::f64(&[1], vec![x]));
        check(op, &[logits, experts], &wanted, 1e-6);
    }

    #[test]
    fn gradients() {
        for (balance, z) in [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)] {
            let logits = random(1, &[5, 4]);
            let experts = Tensor::i32(&[5, 2], vec![0, 1, 0, 2, 3, 0, 1, 0, 2, 0]);
            let dloss = Tensor::f64(&[1], vec![1.5]);
            let ins = [dloss.clone(), logits.clone(), experts.clone()];
            let grad = run(Op::RouterLossGrad(RouterLossGrad { balance, z }), &ins, &[&[5, 4]]);
            let op = Op::RouterLoss(RouterLoss { balance, z });
            check_gradient(op, &[logits, experts], 0, &dloss, &grad[0], &[&[1][..]; 3]);
        }
    }
}
