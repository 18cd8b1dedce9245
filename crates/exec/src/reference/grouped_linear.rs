//! Expert matmuls, `y = x W_e^T + b_e` over the rows of each expert, and their gradients. Invariant: sums go over the
//! rows of an expert in order; rows past the last offset are not read and give zeros.

use super::operands::Matrix;
use super::{Operands, ReferenceError, Tensor, dot, linear_grad::add_scaled};
use plimsoll_graph::ops::{GroupedLinear, GroupedLinearInputGrad, GroupedLinearWeightGrad};
use std::ops::Range;

pub(super) fn eval(op: &GroupedLinear, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let w = ins.columns("w", x.columns)?;
    let n = rows_of_one(w, op.experts)?;
    let bias = if op.bias { Some(ins.shaped("b", &[w.rows])?) } else { None };
    let groups = groups(ins, op.experts, x.rows)?;
    let mut y = vec![0.0; x.rows * n];
    for (e, group) in groups.into_iter().enumerate() {
        for r in group {
            for (j, y) in y[r * n..][..n].iter_mut().enumerate() {
                *y = dot(x.row(r), w.row(e * n + j)) + bias.map_or(0.0, |b| b[e * n + j]);
            }
        }
    }
    Ok(vec![Tensor::f64(&[x.rows, n], y)])
}

pub(super) fn eval_input_grad(
    op: &GroupedLinearInputGrad,
    ins: &mut Operands<'_>,
) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let w = ins.matrix("w")?;
    let n = rows_of_one(w, op.experts)?;
    if n != dy.columns {
        let wanted = vec![dy.rows, n];
        let found = vec![dy.rows, dy.columns];
        return Err(ReferenceError::Shape { what: "dy", wanted, found });
    }
    let groups = groups(ins, op.experts, dy.rows)?;
    let k = w.columns;
    let mut dx = vec![0.0; dy.rows * k];
    for (e, group) in groups.into_iter().enumerate() {
        for r in group {
            for (j, &dy) in dy.row(r).iter().enumerate() {
                add_scaled(&mut dx[r * k..][..k], dy, w.row(e * n + j));
            }
        }
    }
    Ok(vec![Tensor::f64(&[dy.rows, k], dx)])
}

pub(super) fn eval_weight_grad(
    op: &GroupedLinearWeightGrad,
    ins: &mut Operands<'_>,
) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let x = ins.matrix("x")?;
    if x.rows != dy.rows {
        let wanted = vec![dy.rows, x.columns];
        let found = vec![x.rows, x.columns];
        return Err(ReferenceError::Shape { what: "x", wanted, found });
    }
    let groups = groups(ins, op.experts, dy.rows)?;
    let n = dy.columns;
    let k = x.columns;
    let stacked = op.experts as usize * n;
    let mut dw = vec![0.0; stacked * k];
    let mut db = vec![0.0; stacked];
    for (e, group) in groups.into_iter().enumerate() {
        for r in group {
            for (j, &dy) in dy.row(r).iter().enumerate() {
                add_scaled(&mut dw[(e * n + j) * k..][..k], dy, x.row(r));
                db[e * n + j] += dy;
            }
        }
    }
    let mut outs = vec![Tensor::f64(&[stacked, k], dw)];
    if op.bias {
        outs.push(Tensor::f64(&[stacked], db));
    }
    Ok(outs)
}

/// N, the rows of one expert's weight, from stacked weights (E N, K).
fn rows_of_one(w: Matrix<'_>, experts: u32) -> Result<usize, ReferenceError> {
    match experts as usize {
        experts if experts > 0 && w.rows.is_multiple_of(experts) => Ok(w.rows / experts),
        _ => Err(ReferenceError::Attribute { why: "w must hold as many matrices as there are experts" }),
    }
}

/// The range of rows of each expert.
fn groups(ins: &mut Operands<'_>, experts: u32, rows: usize) -> Result<Vec<Range<usize>>, ReferenceError> {
    let offsets = ins.integers("offsets")?;
    if offsets.len() != experts as usize + 1 {
        let wanted = vec![experts as usize + 1];
        let found = vec![offsets.len()];
        return Err(ReferenceError::Shape { what: "offsets", wanted, found });
    }
    let end = offsets[experts as usize];
    if offsets[0] != 0 || !offsets.is_sorted() || end as usize > rows {
        return Err(ReferenceError::Attribute { why: "offsets must ascend from 0 to at most the rows" });
    }
    Ok(offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
}

#[cfg(test)]
mod tests {
    use super::super::eval;
    use super::super::testing::{check, check_gradient, random, run};
    use super::*;
    use plimsoll_graph::Op;

    #[test]
    fn each_expert_has_its_rows() {
        let x = Tensor::f32(&[4, 1], vec![1.0, 2.0, 3.0, f32::NAN]);
        let w = Tensor::f32(&[3, 1], vec![10.0, 20.0, 30.0]);
        let b = Tensor::f32(&[3], vec![0.5, 0.0, -1.0]);
        let offsets = Tensor::i32(&[4], vec![0, 1, 1, 3]);
        let op = Op::GroupedLinear(GroupedLinear { experts: 3, bias: true });
        let y = Tensor::f32(&[4, 1], vec![10.5, 59.0, 89.0, 0.0]);
        check(op, &[x, w, b, offsets], &[y], 0.0);
    }

    #[test]
    fn offsets_that_do_not_fit_are_refused() {
        let x = random(1, &[4, 2]);
        let w = random(2, &[6, 2]);
        let op = Op::GroupedLinear(GroupedLinear { experts: 2, bias: false });
        for offsets in [vec![0, 3], vec![1, 2, 3], vec![0, 3, 2], vec![0, 2, 5], vec![0, -1, 2]] {
            let offsets = Tensor::i32(&[offsets.len()], offsets);
            let outs = [Some(vec![4, 3])];
            assert!(eval(&op, &[&x, &w, &offsets], &outs).is_err(), "{offsets:?}");
        }
    }

    #[test]
    fn gradients() {
        // Two rows belong to no expert, and one expert has no rows.
        let r = 7;
        let n = 2;
        let k = 3;
        let experts = 3;
        let offsets = Tensor::i32(&[4], vec![0, 3, 3, 5]);
        let op = Op::GroupedLinear(GroupedLinear { experts, bias: true });
        let x = random(1, &[r, k]);
        let w = random(2, &[6, k]);
        let b = random(3, &[6]);
        let dy = random(4, &[r, n]);
        let ins = [x.clone(), w.clone(), b, offsets.clone()];
        let input = Op::GroupedLinearInputGrad(GroupedLinearInputGrad { experts });
        let dx = run(input, &[dy.clone(), w, offsets.clone()], &[&[r, k]]);
        let weight = Op::GroupedLinearWeightGrad(GroupedLinearWeightGrad { experts, bias: true });
        let grads = run(weight, &[dy.clone(), x, offsets], &[&[6, k], &[6]]);
        for (input, grad) in [&dx[0], &grads[0], &grads[1]].into_iter().enumerate() {
            check_gradient(op, &ins, input, &dy, grad, &[&[r, n]]);
        }
    }
}
