//! Mean of the rows of every sequence. Invariant: a sequence without rows that count is zero.

use super::{Operands, ReferenceError, Tensor};
use graph::ops::SegmentMean;

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

#[cfg(test)]
mod tests {
    use super::super::{eval, testing::check};
    use super::*;
    use graph::Op;

    fn mean(skip_first: u32, skip_last: u32) -> Op {
        Op::SegmentMean(SegmentMean { skip_first, skip_last })
    }

    #[test]
    fn means() {
        let x = Tensor::f32(&[6, 2], (0..12_u8).map(f32::from).collect());
        // Spans of 1, 4, no and 1 rows, out of order.
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
