//! Token embedding. Invariant: ESM's scale is computed in f32, as the reference implementation does; rows
//! of `<mask>` are zero, whatever the scale.

use super::{Operands, ReferenceError, Tensor, operands::rows_of};
use graph::ops::{Embed, TokenDropout};

pub(super) fn eval(op: &Embed, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let ids = ins.integers("ids")?;
    let table = ins.matrix("table")?;
    let rows = rows_of("ids", ids, table.rows)?;
    let row = if op.row { Some(ins.shaped("row", &[1, table.columns])?) } else { None };
    let scales = match op.token_dropout {
        Some(dropout) => scales(&dropout, ids, ins)?,
        None => vec![1.0; ids.len()],
    };
    let mut x = Vec::with_capacity(ids.len() * table.columns);
    for (&r, &scale) in rows.iter().zip(&scales) {
        for (c, &e) in table.row(r).iter().enumerate() {
            let e = row.map_or(e, |row| e + row[c]);
            // Zero, not a product with zero: a scale may be infinite, where every token is masked.
            x.push(if scale == 0.0 { 0.0 } else { e * scale });
        }
    }
    Ok(vec![Tensor::f64(&[ids.len(), table.columns], x)])
}

/// The factor of every token: 0 for `<mask>` and for rows of no sequence.
fn scales(dropout: &TokenDropout, ids: &[i32], ins: &mut Operands<'_>) -> Result<Vec<f64>, ReferenceError> {
    let mut scales = vec![0.0; ids.len()];
    for span in ins.spans(ids.len())? {
        let masked = ids[span.clone()].iter().filter(|&&id| id == dropout.mask_id).count();
        let scale = dropout.keep / (1.0 - masked as f32 / span.len() as f32);
        for t in span {
            if ids[t] != dropout.mask_id {
                scales[t] = f64::from(scale);
            }
        }
    }
    Ok(scales)
}

#[cfg(test)]
mod tests {
    use super::super::{eval, testing::check};
    use super::*;
    use graph::Op;

    const ESM: TokenDropout = TokenDropout { mask_id: 3, keep: 0.88 };

    fn table() -> Tensor {
        Tensor::f32(&[4, 2], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    }

    fn embed(token_dropout: Option<TokenDropout>, row: bool) -> Op {
        Op::Embed(Embed { token_dropout, row })
    }

    #[test]
    fn rows_and_the_added_row() {
        let ids = Tensor::i32(&[3], vec![2, 0, 3]);
        let x = Tensor::f32(&[3, 2], vec![5.0, 6.0, 1.0, 2.0, 7.0, 8.0]);
        check(embed(None, false), &[ids.clone(), table()], &[x], 0.0);
        let row = Tensor::f32(&[1, 2], vec![0.5, -1.0]);
        let x = Tensor::f32(&[3, 2], vec![5.5, 5.0, 1.5, 1.0, 7.5, 7.0]);
        check(embed(None, true), &[ids, table(), row], &[x], 0.0);
    }

    #[test]
    fn token_dropout() {
        // No mask: 0.88; one of four masked: 0.88 / 0.75; all masked: zero; the last row is in no sequence.
        let ids = Tensor::i32(&[8], vec![0, 1, 0, 3, 2, 1, 3, 0]);
        let spans = Tensor::i32(&[3, 2], vec![0, 2, 2, 6, 6, 7]);
        let s = 0.88_f32 / 0.75;
        let x = [
            [0.88, 1.76],
            [3.0 * 0.88, 4.0 * 0.88],
            [s, 2.0 * s],
            [0.0, 0.0],
            [5.0 * s, 6.0 * s],
            [3.0 * s, 4.0 * s],
            [0.0, 0.0],
            [0.0, 0.0],
        ];
        let x = Tensor::f32(&[8, 2], x.concat());
        check(embed(Some(ESM), false), &[ids.clone(), table(), spans.clone()], &[x], 0.0);
        // The added row is part of what is scaled.
        let row = Tensor::f32(&[1, 2], vec![1.0, 0.0]);
        let x = Tensor::f32(&[2, 2], vec![2.0 * 0.88, 1.76, 4.0 * 0.88, 4.0 * 0.88]);
        let (ids, spans) = (Tensor::i32(&[2], vec![0, 1]), Tensor::i32(&[1, 2], vec![0, 2]));
        check(embed(Some(ESM), true), &[ids, table(), row, spans], &[x], 0.0);
    }

    #[test]
    fn ids_outside_the_vocabulary_are_refused() {
        for index in [4, -1] {
            let ids = Tensor::i32(&[2], vec![1, index]);
            let wanted = ReferenceError::Index { what: "ids", position: 1, index, limit: 4 };
            assert_eq!(wanted.to_string(), format!("ids[1] is {index}, outside 0..4"));
            assert_eq!(eval(&embed(None, false), &[&ids, &table()], &[Some(vec![2, 2])]), Err(wanted));
        }
    }
}
