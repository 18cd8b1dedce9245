//! Token embedding and its gradient. Invariant: ESM's token-dropout scale is computed in f32, as in the reference
//! implementation; rows of `<mask>` are zero, whatever the scale.

use super::{Operands, ReferenceError, Tensor, operands::rows_of};
use plimsoll_graph::ops::{Embed, EmbedGrad, TokenDropout};

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
            // Exactly zero, not a product with zero: the scale is infinite if every token is masked.
            x.push(if scale == 0.0 { 0.0 } else { e * scale });
        }
    }
    Ok(vec![Tensor::f64(&[ids.len(), table.columns], x)])
}

pub(super) fn eval_grad(op: &EmbedGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dx = ins.matrix("dx")?;
    let ids = ins.integers("ids")?;
    let vocabulary = op.vocab as usize;
    let rows = rows_of("ids", ids, vocabulary)?;
    if rows.len() != dx.rows {
        return Err(ReferenceError::Shape { what: "ids", wanted: vec![dx.rows], found: vec![rows.len()] });
    }
    let scales = match op.token_dropout {
        Some(dropout) => scales(&dropout, ids, ins)?,
        None => vec![1.0; ids.len()],
    };
    let mut dtable = vec![0.0; vocabulary * dx.columns];
    let mut drow = vec![0.0; dx.columns];
    for (t, from) in dx.iter_rows().enumerate().filter(|&(t, _)| scales[t] != 0.0) {
        let to = &mut dtable[rows[t] * dx.columns..(rows[t] + 1) * dx.columns];
        for (c, dx) in from.iter().enumerate() {
            to[c] += scales[t] * dx;
            drow[c] += scales[t] * dx;
        }
    }
    let mut outs = vec![Tensor::f64(&[vocabulary, dx.columns], dtable)];
    if op.row {
        outs.push(Tensor::f64(&[1, dx.columns], drow));
    }
    Ok(outs)
}

/// The scale of every token: 0 for `<mask>` and for rows outside of all sequences.
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
    use plimsoll_graph::{DType, Op};

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
        // No mask: 0.88; one of four masked: 0.88 / 0.75; all masked: zero; the last row is outside of all sequences.
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
        // The added row is scaled as well.
        let row = Tensor::f32(&[1, 2], vec![1.0, 0.0]);
        let x = Tensor::f32(&[2, 2], vec![2.0 * 0.88, 1.76, 4.0 * 0.88, 4.0 * 0.88]);
        let ids = Tensor::i32(&[2], vec![0, 1]);
        let spans = Tensor::i32(&[1, 2], vec![0, 2]);
        check(embed(Some(ESM), true), &[ids, table(), row, spans], &[x], 0.0);
    }

    #[test]
    fn gradients_add_up_by_token() {
        let dx = Tensor::f32(&[4, 2], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let ids = Tensor::i32(&[4], vec![1, 3, 1, 0]);
        let grad =
            |token_dropout, row| Op::EmbedGrad(EmbedGrad { token_dropout, row, vocab: 4, dtype: DType::F32 });
        let dtable = Tensor::f32(&[4, 2], vec![7.0, 8.0, 6.0, 8.0, 0.0, 0.0, 3.0, 4.0]);
        let drow = Tensor::f32(&[1, 2], vec![16.0, 20.0]);
        check(grad(None, true), &[dx.clone(), ids.clone()], &[dtable.clone(), drow], 0.0);
        check(grad(None, false), &[dx.clone(), ids.clone()], &[dtable], 0.0);
        // Token 1 of the only sequence, of three tokens, is masked; the last row is outside of all sequences.
        let spans = Tensor::i32(&[1, 2], vec![0, 3]);
        let s = 0.88_f32 / (1.0 - 1.0_f32 / 3.0);
        let dtable = Tensor::f32(&[4, 2], vec![0.0, 0.0, 6.0 * s, 8.0 * s, 0.0, 0.0, 0.0, 0.0]);
        let drow = Tensor::f32(&[1, 2], vec![6.0 * s, 8.0 * s]);
        check(grad(Some(ESM), true), &[dx, ids, spans], &[dtable, drow], 1e-6);
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
