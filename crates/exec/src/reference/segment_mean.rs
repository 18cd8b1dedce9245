//! Mean of the rows of every sequence, and its gradient. Invariant: a sequence without counted rows has mean zero and
//! no gradient.

use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::{SegmentMean, SegmentMeanGrad};

pub(super) fn eval(op: &SegmentMean, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let spans = ins.spans(x.rows)?;
    let mut y = Vec::with_capacity(spans.len() * x.columns);
    for span in &spans {
        let first = span.start.saturating_add(op.skip_first as usize);
        let end = span.end.saturating_sub(op.skip_last as usize);
        let mut sums = vec![0.0_f64; x.columns];
        for r in first..end {
            for (sum, &x) in sums.iter_mut().zip(x.row(r)) {
                *sum += x;
            }
        }
        let rows = end.saturating_sub(first).max(1) as f64;
        y.extend(sums.iter().map(|s| s / rows));
    }
    Ok(vec![Tensor::f64(&[spans.len(), x.columns], y)])
}

/// `tokens` is the number of rows of x, which no input determines.
pub(super) fn eval_grad(
    op: &SegmentMeanGrad,
    ins: &mut Operands<'_>,
    tokens: usize,
) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let spans = ins.spans(tokens)?;
    if spans.len() != dy.rows {
        return Err(ReferenceError::Shape {
            what: "spans",
            wanted: vec![dy.rows, 2],
            found: vec![spans.len(), 2],
        });
    }
    let mut dx = vec![0.0; tokens * dy.columns];
    for (span, dy) in spans.iter().zip(dy.iter_rows()) {
        let first = span.start.saturating_add(op.skip_first as usize);
        let end = span.end.saturating_sub(op.skip_last as usize);
        for r in first..end {
            let to = &mut dx[r * dy.len()..(r + 1) * dy.len()];
            to.iter_mut().zip(dy).for_each(|(dx, dy)| *dx = dy / (end - first) as f64);
        }
    }
    Ok(vec![Tensor::f64(&[tokens, dy.columns], dx)])
}

#[cfg(test)]
mod tests {
    use super::super::{eval, testing::check};
    use super::*;
    use plimsoll_graph::{DType, Op};

    fn mean(skip_first: u32, skip_last: u32) -> Op {
        Op::SegmentMean(SegmentMean { skip_first, skip_last })
    }

    #[test]
    fn means() {
        let x = Tensor::f32(&[6, 2], (0..12_u8).map(f32::from).collect());
        // Spans of 1, 4, 0 and 1 rows, not in order.
        let spans = Tensor::i32(&[4, 2], vec![0, 1, 2, 6, 2, 2, 1, 2]);
        let cases = [
            (0, 0, [0.0, 1.0, 7.0, 8.0, 0.0, 0.0, 2.0, 3.0]),
            (1, 1, [0.0, 0.0, 7.0, 8.0, 0.0, 0.0, 0.0, 0.0]),
            (1, 0, [0.0, 0.0, 8.0, 9.0, 0.0, 0.0, 0.0, 0.0]),
            (u32::MAX, u32::MAX, [0.0; 8]),
        ];
        for (first, last, y) in cases {
            let y = Tensor::f32(&[4, 2], y.to_vec());
            check(mean(first, last), &[x.clone(), spans.clone()], &[y], 0.0);
        }
    }

    #[test]
    fn every_row_that_counts_has_its_share() {
        let dy = Tensor::f32(&[4, 1], vec![1.0, 6.0, 5.0, 3.0]);
        let spans = Tensor::i32(&[4, 2], vec![0, 1, 2, 6, 2, 2, 1, 2]);
        let cases = [
            (0, 0, [1.0, 3.0, 1.5, 1.5, 1.5, 1.5]),
            (1, 1, [0.0, 0.0, 0.0, 3.0, 3.0, 0.0]),
            (1, 0, [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]),
            (u32::MAX, u32::MAX, [0.0; 6]),
        ];
        for (skip_first, skip_last, dx) in cases {
            let op = SegmentMeanGrad { skip_first, skip_last, dtype: DType::F32 };
            let dx = Tensor::f32(&[6, 1], dx.to_vec());
            check(Op::SegmentMeanGrad(op), &[dy.clone(), spans.clone()], &[dx], 0.0);
        }
    }

    #[test]
    fn bad_spans_are_refused() {
        let x = Tensor::f32(&[4, 1], vec![0.0; 4]);
        let outside = |sequence, start, end| ReferenceError::Span { sequence, start, end, rows: 4 };
        let cases = [
            ([0, 2, 2, 5], outside(1, 2, 5)),
            ([-1, 2, 2, 4], outside(0, -1, 2)),
            ([0, 2, 4, 3], outside(1, 4, 3)),
            ([i32::MIN, i32::MAX, 0, 0], outside(0, i32::MIN, i32::MAX)),
            ([0, 3, 2, 4], ReferenceError::Overlap { sequence: 1, row: 2 }),
        ];
        for (spans, error) in cases {
            let spans = Tensor::i32(&[2, 2], spans.to_vec());
            assert_eq!(eval(&mean(0, 0), &[&x, &spans], &[Some(vec![2, 1])]), Err(error));
        }
        let spans = Tensor::i32(&[4], vec![0, 2, 2, 4]);
        let error = eval(&mean(0, 0), &[&x, &spans], &[Some(vec![2, 1])]).unwrap_err();
        assert_eq!(error.to_string(), "spans must be [4, 2], not [4]");
    }
}
