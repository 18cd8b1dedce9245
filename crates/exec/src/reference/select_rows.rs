//! Row selection, `y[i] = x[rows[i]]`, and its gradient, a scatter-add. Invariant: values are copied unchanged; sums
//! are in the order of i.

use super::{Operands, ReferenceError, Tensor, operands::rows_of};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let rows = rows_of("rows", ins.integers("rows")?, x.rows)?;
    let y = rows.iter().flat_map(|&r| x.row(r)).copied().collect();
    Ok(vec![Tensor::f64(&[rows.len(), x.columns], y)])
}

/// Adds row i of dy to row `rows[i]` of dx. `tokens` is the number of rows of dx, which the inputs do not determine.
pub(super) fn eval_grad(ins: &mut Operands<'_>, tokens: usize) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let rows = rows_of("rows", ins.integers("rows")?, tokens)?;
    if rows.len() != dy.rows {
        return Err(ReferenceError::Shape { what: "rows", wanted: vec![dy.rows], found: vec![rows.len()] });
    }
    let mut dx = vec![0.0; tokens * dy.columns];
    for (&row, from) in rows.iter().zip(dy.iter_rows()) {
        let to = &mut dx[row * dy.columns..(row + 1) * dy.columns];
        to.iter_mut().zip(from).for_each(|(sum, dy)| *sum += dy);
    }
    Ok(vec![Tensor::f64(&[tokens, dy.columns], dx)])
}

#[cfg(test)]
mod tests {
    use super::super::{eval, testing::check};
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::{SelectRows, SelectRowsGrad};

    #[test]
    fn selects() {
        let x = Tensor::f32(&[3, 2], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let rows = Tensor::i32(&[4], vec![2, 0, 2, 1]);
        let y = Tensor::f32(&[4, 2], vec![5.0, 6.0, 1.0, 2.0, 5.0, 6.0, 3.0, 4.0]);
        check(Op::SelectRows(SelectRows {}), &[x, rows], &[y], 0.0);
    }

    #[test]
    fn adds_up_what_was_selected_twice() {
        let dy = Tensor::f32(&[3, 2], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let rows = Tensor::i32(&[3], vec![2, 0, 2]);
        let dx = Tensor::f32(&[4, 2], vec![3.0, 4.0, 0.0, 0.0, 6.0, 8.0, 0.0, 0.0]);
        check(Op::SelectRowsGrad(SelectRowsGrad {}), &[dy, rows], &[dx], 0.0);
    }

    #[test]
    fn rows_outside_are_refused() {
        let x = Tensor::f32(&[3, 1], vec![0.0; 3]);
        for index in [3, -1, i32::MAX, i32::MIN] {
            let rows = Tensor::i32(&[2], vec![0, index]);
            let wanted = ReferenceError::Index { what: "rows", position: 1, index, limit: 3 };
            let got = eval(&Op::SelectRows(SelectRows {}), &[&x, &rows], &[Some(vec![2, 1])]);
            assert_eq!(got, Err(wanted));
        }
    }
}
