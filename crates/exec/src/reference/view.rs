//! Views as functions: a range of rows, and rows one behind another. A device launches neither; what they compute is what
//! the addresses of a plan must give. Invariant: values are copied unchanged.

use super::{Data, ReferenceError, Tensor};
use plimsoll_graph::ops::Part;

/// Rows `first..first + rows` of x.
pub(super) fn eval_part(op: &Part, ins: &[&Tensor]) -> Result<Tensor, ReferenceError> {
    let [x] = ins else { return Err(ReferenceError::Inputs { wanted: 1, found: ins.len() }) };
    let outside = ReferenceError::Attribute { why: "x has fewer rows" };
    let [all, ref tail @ ..] = x.shape[..] else { return Err(outside) };
    let end = op.first.saturating_add(op.rows);
    if end > all as u64 {
        return Err(outside);
    }
    let row: usize = tail.iter().product();
    let range = op.first as usize * row..end as usize * row;
    let data = match &x.data {
        Data::Float(data) => Data::Float(data[range].to_vec()),
        Data::I32(data) => Data::I32(data[range].to_vec()),
        Data::U8(data) => Data::U8(data[range].to_vec()),
    };
    Ok(Tensor { shape: [&[op.rows as usize], tail].concat(), data })
}

/// The rows of all operands.
pub(super) fn eval_join(ins: &[&Tensor]) -> Result<Tensor, ReferenceError> {
    let Some((first, others)) = ins.split_first() else {
        return Err(ReferenceError::Inputs { wanted: 1, found: 0 });
    };
    let mut y = (*first).clone();
    for x in others {
        let wanted = first.shape.clone();
        let found = x.shape.clone();
        if wanted.get(1..) != found.get(1..) || found.is_empty() {
            return Err(ReferenceError::Shape { what: "every input", wanted, found });
        }
        y.shape[0] += x.shape[0];
        match (&mut y.data, &x.data) {
            (Data::Float(y), Data::Float(x)) => y.extend(x),
            (Data::I32(y), Data::I32(x)) => y.extend(x),
            (Data::U8(y), Data::U8(x)) => y.extend(x),
            (Data::Float(_) | Data::I32(_) | Data::U8(_), _) => {
                return Err(ReferenceError::DType { what: "every input", wanted: "of one type" });
            }
        }
    }
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::super::eval;
    use super::*;
    use plimsoll_graph::{Op, ops::Join};

    #[test]
    fn a_part_is_rows_and_a_join_puts_rows_together() {
        let floats = Tensor::f32(&[3, 2], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let codes = Tensor::u8(&[3], vec![7, 8, 9]);
        let part = |first, rows| Op::Part(Part { first, rows });
        let last = Tensor::f32(&[2, 2], vec![3.0, 4.0, 5.0, 6.0]);
        let first = Tensor::f32(&[1, 2], vec![1.0, 2.0]);
        let of_codes = Tensor::u8(&[1], vec![8]);
        for (op, ins, wanted) in [
            (part(1, 2), vec![&floats], &last),
            (part(0, 1), vec![&floats], &first),
            (part(1, 1), vec![&codes], &of_codes),
            (Op::Join(Join {}), vec![&first, &last], &floats),
            (Op::Join(Join {}), vec![&codes], &codes),
        ] {
            let found =
                eval(&op, &ins, &[Some(wanted.shape.clone())]).unwrap_or_else(|e| panic!("{op:?}: {e}"));
            assert_eq!(found, [Some(wanted.clone())], "{op:?}");
        }
    }

    #[test]
    fn what_is_no_view_is_refused() {
        let x = Tensor::f32(&[3, 2], vec![0.0; 6]);
        let wide = Tensor::f32(&[3, 3], vec![0.0; 9]);
        let codes = Tensor::u8(&[1, 2], vec![0; 2]);
        let outs = [Some(vec![1, 2])];
        for (op, ins, wanted) in [
            (Op::Part(Part { first: 2, rows: 2 }), vec![&x], "x has fewer rows"),
            (Op::Part(Part { first: u64::MAX, rows: 2 }), vec![&x], "x has fewer rows"),
            (Op::Part(Part { first: 0, rows: 1 }), vec![&x, &x], "takes 1 inputs, not 2"),
            (Op::Join(Join {}), vec![], "takes 1 inputs, not 0"),
            (Op::Join(Join {}), vec![&x, &wide], "every input must be [3, 2], not [3, 3]"),
            (Op::Join(Join {}), vec![&x, &codes], "every input must be of one type"),
        ] {
            let error = eval(&op, &ins, &outs).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{error}, not {wanted}");
        }
    }
}
