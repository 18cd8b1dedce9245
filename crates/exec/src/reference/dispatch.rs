//! Dispatch of tokens' rows to their experts, and their combination. Invariant: a token's sum is in the order of its
//! choices, and dropped choices are left out.

use super::operands::slots_of;
use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::{Combine, CombineGrad, Dispatch, DispatchGrad};

pub(super) fn eval(op: &Dispatch, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let k = choices(op.top_k)?;
    let order = slots(ins, "order", k * x.rows)?;
    slots(ins, "places", k * x.rows)?;
    let mut rows = Vec::with_capacity(order.len() * x.columns);
    for choice in &order {
        match choice {
            Some(choice) => rows.extend(x.row(choice / k)),
            None => rows.resize(rows.len() + x.columns, 0.0),
        }
    }
    Ok(vec![Tensor::f64(&[order.len(), x.columns], rows)])
}

pub(super) fn eval_grad(op: &DispatchGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let k = choices(op.top_k)?;
    let drows = ins.matrix("drows")?;
    let places = slots(ins, "places", drows.rows)?;
    let mut dx = Vec::new();
    for of_token in places.chunks(k) {
        let mut sum = vec![0.0; drows.columns];
        for &place in of_token.iter().flatten() {
            sum.iter_mut().zip(drows.row(place)).for_each(|(sum, d)| *sum += d);
        }
        dx.extend(sum);
    }
    Ok(vec![Tensor::f64(&[places.len() / k, drows.columns], dx)])
}

pub(super) fn eval_combine(op: &Combine, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let rows = ins.matrix("rows")?;
    let k = choices(op.top_k)?;
    let tokens = rows.rows / k;
    let gates = ins.shaped("gates", &[tokens, k])?;
    slots(ins, "order", rows.rows)?;
    let places = slots(ins, "places", rows.rows)?;
    let mut y = Vec::with_capacity(tokens * rows.columns);
    for (gates, places) in gates.chunks(k).zip(places.chunks(k)) {
        let mut sum = vec![0.0; rows.columns];
        for (gate, place) in gates.iter().zip(places) {
            let Some(place) = *place else { continue };
            sum.iter_mut().zip(rows.row(place)).for_each(|(sum, row)| *sum += gate * row);
        }
        y.extend(sum);
    }
    Ok(vec![Tensor::f64(&[tokens, rows.columns], y)])
}

pub(super) fn eval_combine_grad(
    op: &CombineGrad,
    ins: &mut Operands<'_>,
) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let k = choices(op.top_k)?;
    let rows = ins.shaped("rows", &[k * dy.rows, dy.columns])?;
    let gates = ins.shaped("gates", &[dy.rows, k])?;
    let order = slots(ins, "order", k * dy.rows)?;
    let places = slots(ins, "places", k * dy.rows)?;
    let mut drows = Vec::with_capacity(rows.len());
    for choice in &order {
        match choice {
            Some(choice) => drows.extend(dy.row(choice / k).iter().map(|dy| gates[*choice] * dy)),
            None => drows.resize(drows.len() + dy.columns, 0.0),
        }
    }
    let mut dgates = Vec::with_capacity(places.len());
    for (choice, place) in places.iter().enumerate() {
        // A choice beyond the capacity of its expert has no row, and its gate no gradient.
        let dgate =
            place.map_or(0.0, |r| super::dot(dy.row(choice / k), &rows[r * dy.columns..(r + 1) * dy.columns]));
        dgates.push(dgate);
    }
    Ok(vec![Tensor::f64(&[k * dy.rows, dy.columns], drows), Tensor::f64(&[dy.rows, k], dgates)])
}

/// Number of choices per token, at least one.
fn choices(top_k: u32) -> Result<usize, ReferenceError> {
    match top_k {
        0 => Err(ReferenceError::Attribute { why: "top_k must be at least 1" }),
        k => Ok(k as usize),
    }
}

/// Input of `choices` indices, each below `choices`; -1 means none.
fn slots(
    ins: &mut Operands<'_>,
    what: &'static str,
    choices: usize,
) -> Result<Vec<Option<usize>>, ReferenceError> {
    slots_of(what, ins.shaped_integers(what, &[choices])?, choices)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, random, run};
    use super::super::{eval as eval_op, tensor::Data};
    use super::*;
    use plimsoll_graph::Op;

    /// Three tokens with two choices each; the second choice of token 1 is dropped.
    fn order() -> [Tensor; 2] {
        [Tensor::i32(&[6], vec![1, 2, 0, 5, 4, -1]), Tensor::i32(&[6], vec![2, 0, 1, -1, 4, 3])]
    }

    #[test]
    fn rows_go_there_and_back() {
        let [order, places] = order();
        let x = Tensor::f32(&[3, 1], vec![1.0, 2.0, 3.0]);
        let rows = Tensor::f32(&[6, 1], vec![1.0, 2.0, 1.0, 3.0, 3.0, 0.0]);
        let ins = [x, order.clone(), places.clone()];
        check(Op::Dispatch(Dispatch { top_k: 2 }), &ins, std::slice::from_ref(&rows), 0.0);
        let gates = Tensor::f32(&[3, 2], vec![0.5, 0.25, 1.0, 0.0, 2.0, 4.0]);
        let y = Tensor::f32(&[3, 1], vec![0.75, 2.0, 18.0]);
        check(Op::Combine(Combine { top_k: 2 }), &[rows, gates, order, places], &[y], 0.0);
    }

    #[test]
    fn gradients() {
        let [order, places] = order();
        let x = random(1, &[3, 4]);
        let drows = random(2, &[6, 4]);
        let dx = run(Op::DispatchGrad(DispatchGrad { top_k: 2 }), &[drows.clone(), places.clone()], &[&[3, 4]]);
        let ins = [x, order.clone(), places.clone()];
        check_gradient(Op::Dispatch(Dispatch { top_k: 2 }), &ins, 0, &drows, &dx[0], &[&[6, 4]]);

        let ins = [random(3, &[6, 4]), random(4, &[3, 2]), order.clone(), places.clone()];
        let dy = random(5, &[3, 4]);
        let backward = [std::slice::from_ref(&dy), &ins[..]].concat();
        let grads = run(Op::CombineGrad(CombineGrad { top_k: 2 }), &backward, &[&[6, 4], &[3, 2]]);
        for (input, grad) in grads.iter().enumerate() {
            check_gradient(Op::Combine(Combine { top_k: 2 }), &ins, input, &dy, grad, &[&[3, 4]]);
        }
    }

    #[test]
    fn places_outside_are_refused() {
        for index in [6, -2, i32::MAX, i32::MIN] {
            let [order, mut places] = order();
            let Data::I32(data) = &mut places.data else { panic!("integers") };
            data[1] = index;
            let wanted = ReferenceError::Index { what: "places", position: 1, index, limit: 6 };
            let ins = [&random(1, &[3, 4]), &order, &places];
            let got = eval_op(&Op::Dispatch(Dispatch { top_k: 2 }), &ins, &[Some(vec![6, 4])]);
            assert_eq!(got, Err(wanted));
        }
    }
}
