//! `y[i] = x[rows[i]]`. Invariant: numbers are copied.

use super::{Operands, ReferenceError, Tensor, operands::rows_of};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let rows = rows_of("rows", ins.integers("rows")?, x.rows)?;
    let y = rows.iter().flat_map(|&r| x.row(r)).copied().collect();
    Ok(vec![Tensor::f64(&[rows.len(), x.columns], y)])
}

#[cfg(test)]
mod tests {
    use super::super::{eval, testing::check};
    use super::*;
    use graph::{Op, ops::SelectRows};

    #[test]
    fn selects() {
        let x = Tensor::f32(&[3, 2], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let rows = Tensor::i32(&[4], vec![2, 0, 2, 1]);
        let y = Tensor::f32(&[4, 2], vec![5.0, 6.0, 1.0, 2.0, 5.0, 6.0, 3.0, 4.0]);
        check(Op::SelectRows(SelectRows {}), &[x, rows], &[y], 0.0);
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
