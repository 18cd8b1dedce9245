//! Concatenation of columns, `y[r] = x0[r] ++ x1[r] ++ ...`, and its gradient, the columns of one operand. Invariant:
//! values are copied unchanged.

use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::ConcatGrad;

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let mut parts = vec![ins.matrix("every input")?];
    let rows = parts[0].rows;
    while !ins.is_empty() {
        let part = ins.matrix("every input")?;
        if part.rows != rows {
            let wanted = vec![rows, part.columns];
            let found = vec![part.rows, part.columns];
            return Err(ReferenceError::Shape { what: "every input", wanted, found });
        }
        parts.push(part);
    }
    let columns = parts.iter().map(|p| p.columns).sum();
    let y = (0..rows).flat_map(|r| parts.iter().flat_map(move |p| p.row(r))).copied().collect();
    Ok(vec![Tensor::f64(&[rows, columns], y)])
}

pub(super) fn eval_grad(op: &ConcatGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let end = op.first.saturating_add(op.count);
    if end > dy.columns as u64 {
        return Err(ReferenceError::Attribute { why: "dy has fewer columns" });
    }
    let dx = dy.iter_rows().flat_map(|dy| &dy[op.first as usize..end as usize]).copied().collect();
    Ok(vec![Tensor::f64(&[dy.rows, op.count as usize], dx)])
}

#[cfg(test)]
mod tests {
    use super::super::{eval, testing::check};
    use super::*;
    use plimsoll_graph::{Op, ops::Concat};

    #[test]
    fn puts_rows_side_by_side() {
        let ins = [
            Tensor::f32(&[2, 2], vec![1.0, 2.0, 3.0, 4.0]),
            Tensor::f32(&[2, 1], vec![5.0, 6.0]),
            Tensor::f32(&[2, 0], vec![]),
        ];
        let y = Tensor::f32(&[2, 3], vec![1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
        check(Op::Concat(Concat {}), &ins, &[y], 0.0);
        check(Op::Concat(Concat {}), &ins[1..2], &ins[1..2], 0.0);
    }

    #[test]
    fn takes_columns_apart() {
        let dy = Tensor::f32(&[2, 3], vec![1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
        let part = |first, count| Op::ConcatGrad(ConcatGrad { first, count });
        check(part(0, 2), std::slice::from_ref(&dy), &[Tensor::f32(&[2, 2], vec![1.0, 2.0, 3.0, 4.0])], 0.0);
        check(part(2, 1), std::slice::from_ref(&dy), &[Tensor::f32(&[2, 1], vec![5.0, 6.0])], 0.0);
        for op in [part(2, 2), part(u64::MAX, 2)] {
            let error = eval(&op, &[&dy], &[Some(vec![2, 2])]).unwrap_err();
            assert_eq!(error.to_string(), "dy has fewer columns");
        }
    }

    #[test]
    fn ragged_rows_and_nothing_are_refused() {
        let a = Tensor::f32(&[2, 1], vec![0.0; 2]);
        let b = Tensor::f32(&[1, 2], vec![0.0; 2]);
        let outs = [Some(vec![2, 3])];
        let error = eval(&Op::Concat(Concat {}), &[&a, &b], &outs).unwrap_err();
        assert_eq!(error.to_string(), "every input must be [2, 2], not [1, 2]");
        let error = eval(&Op::Concat(Concat {}), &[], &outs).unwrap_err();
        assert_eq!(error, ReferenceError::Inputs { wanted: 1, found: 0 });
    }
}
