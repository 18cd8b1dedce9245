//! Auxiliary losses of the router and their gradient. Invariant: the loss of a pack depends on its own tokens only; the
//! shares of its experts are counts, so no gradient passes through them; a pack without tokens or targets adds nothing.

use super::operands::{Matrix, PackRange, rows_of};
use super::{Operands, ReferenceError, Tensor, softmax::normalise};
use plimsoll_graph::ops::{RouterLoss, RouterLossGrad};
use plimsoll_graph::packs::TOKENS;

pub(super) fn eval(op: &RouterLoss, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let logits = ins.matrix("logits")?;
    let experts = chosen(ins, logits)?;
    let mut balance = 0.0;
    let mut z = 0.0;
    for pack in ins.packs()?.of(TOKENS, logits.rows)? {
        // Not multiplied by 0, because its logits may be infinite.
        if pack.targets == 0 {
            continue;
        }
        let shares = shares(&pack, &experts, logits);
        let mut balance_sum = 0.0;
        let mut z_sum = 0.0;
        for t in pack.rows.clone() {
            let (p, lse) = normalise(logits.row(t));
            balance_sum += super::dot(&shares, &p);
            z_sum += lse * lse;
        }
        let each = weight(&pack);
        balance += each * f64::from(op.balance) * logits.columns as f64 * balance_sum;
        z += each * f64::from(op.z) * z_sum;
    }
    Ok([balance + z, balance, z].map(|x| Tensor::f64(&[1], vec![x])).to_vec())
}

pub(super) fn eval_grad(op: &RouterLossGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dloss = ins.shaped("dloss", &[1])?[0];
    let logits = ins.matrix("logits")?;
    let experts = chosen(ins, logits)?;
    let mut dlogits = Vec::with_capacity(logits.data.len());
    for pack in ins.packs()?.of(TOKENS, logits.rows)? {
        if pack.targets == 0 {
            dlogits.extend(std::iter::repeat_n(0.0, pack.rows.len() * logits.columns));
            continue;
        }
        let shares = shares(&pack, &experts, logits);
        let each = dloss * weight(&pack);
        let balance = f64::from(op.balance) * logits.columns as f64 * each;
        let z = 2.0 * f64::from(op.z) * each;
        for t in pack.rows {
            let (p, lse) = normalise(logits.row(t));
            let mean = super::dot(&shares, &p);
            dlogits.extend(p.iter().zip(&shares).map(|(p, share)| p * (balance * (share - mean) + z * lse)));
        }
    }
    Ok(vec![Tensor::f64(&[logits.rows, logits.columns], dlogits)])
}

/// Weight of a token in the loss: the targets of its pack for each token of the pack.
fn weight(pack: &PackRange) -> f64 {
    f64::from(pack.targets) / pack.rows.len().max(1) as f64
}

/// Takes the experts of all tokens, each below the number of experts.
fn chosen(ins: &mut Operands<'_>, logits: Matrix<'_>) -> Result<Vec<usize>, ReferenceError> {
    rows_of("experts", ins.integer_rows("experts", logits.rows)?, logits.columns)
}

/// Share of the choices of a pack that went to each expert, of the choices of all tokens.
fn shares(pack: &PackRange, chosen: &[usize], logits: Matrix<'_>) -> Vec<f64> {
    let k = chosen.len() / logits.rows.max(1);
    let mut counts = vec![0.0; logits.columns];
    for &expert in &chosen[pack.rows.start * k..pack.rows.end * k] {
        counts[expert] += 1.0;
    }
    let choices = (pack.rows.len() * k).max(1) as f64;
    counts.into_iter().map(|count| count / choices).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, packs, random, run};
    use super::*;
    use plimsoll_graph::Op;

    /// Equal logits: every probability is 1/4 and lse = ln 4, so the balance loss is 1 for any choices, times the
    /// targets of the packs: 2 in the first row, 2 + 0 + 5 in the second.
    #[test]
    fn alike_experts_cost_the_weight_of_each_target() {
        let op = Op::RouterLoss(RouterLoss { balance: 0.5, z: 2.0 });
        let logits = Tensor::f64(&[3, 4], vec![0.0; 12]);
        let z = 2.0 * libm::log(4.0) * libm::log(4.0);
        let cases: [(&[[i32; 6]], f64); 2] = [
            (&[[0, 3, 0, 1, 2, 9]], 2.0),
            (&[[0, 1, 0, 1, 2, 0], [1, 2, 1, 2, 0, 1], [2, 2, 2, 2, 7, 2], [2, 3, 2, 3, 5, 3]], 7.0),
        ];
        for (rows, targets) in cases {
            let wanted = [0.5 + z, 0.5, z].map(|x| Tensor::f64(&[1], vec![targets * x]));
            for experts in [[0, 1, 2], [3, 3, 3]] {
                let experts = Tensor::i32(&[3, 1], experts.to_vec());
                check(op, &[logits.clone(), experts, packs(rows)], &wanted, 1e-5);
            }
        }
    }

    /// One expert for a whole pack costs most: the mean over both packs together would cost 1.
    #[test]
    fn one_expert_for_a_pack_costs_most() {
        let op = Op::RouterLoss(RouterLoss { balance: 1.0, z: 0.0 });
        let logits = Tensor::f64(&[2, 2], vec![100.0, 0.0, 0.0, 100.0]);
        let experts = Tensor::i32(&[2, 1], vec![0, 1]);
        let cases: [(&[[i32; 6]], f64); 2] =
            [(&[[0, 1, 0, 1, 1, 0], [1, 2, 1, 2, 2, 1]], 6.0), (&[[0, 2, 0, 2, 3, 0]], 3.0)];
        for (rows, cost) in cases {
            let wanted = [cost, cost, 0.0].map(|x| Tensor::f64(&[1], vec![x]));
            check(op, &[logits.clone(), experts.clone(), packs(rows)], &wanted, 1e-6);
        }
    }

    #[test]
    fn gradients() {
        let packings: [&[[i32; 6]]; 3] = [
            &[[0, 5, 0, 2, 4, 0]],
            &[[0, 2, 0, 1, 2, 3], [2, 5, 1, 2, 1, 4]],
            &[[0, 0, 0, 0, 3, 0], [0, 1, 0, 1, 0, 1], [1, 4, 1, 2, 7, 2], [4, 5, 2, 3, 1, 3]],
        ];
        for (balance, z) in [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)] {
            for rows in packings {
                let logits = random(1, &[5, 4]);
                let experts = Tensor::i32(&[5, 2], vec![0, 1, 0, 2, 3, 0, 1, 0, 2, 0]);
                let dloss = Tensor::f64(&[1], vec![1.5]);
                let ins = [dloss.clone(), logits.clone(), experts.clone(), packs(rows)];
                let grad = run(Op::RouterLossGrad(RouterLossGrad { balance, z }), &ins, &[&[5, 4]]);
                let op = Op::RouterLoss(RouterLoss { balance, z });
                check_gradient(op, &[logits, experts, packs(rows)], 0, &dloss, &grad[0], &[&[1][..]; 3]);
            }
        }
    }
}
