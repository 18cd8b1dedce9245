//! Expert routing and the gradient of its gates. Invariant: of equal logits the lower expert wins, the rows of one expert
//! are in token order, and which rows are dropped depends on the pack alone.

use super::operands::{PackRange, rows_of, slots_of};
use super::{Operands, ReferenceError, Tensor, softmax::normalise};
use plimsoll_graph::ops::{Route, RouteGrad};
use plimsoll_graph::packs::TOKENS;

pub(super) fn eval(op: &Route, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let experts = op.experts as usize;
    let k = op.top_k as usize;
    let logits = ins.columns("logits", experts)?;
    if k == 0 || k > experts {
        return Err(ReferenceError::Attribute { why: "top_k must be between 1 and the number of experts" });
    }
    let chosen: Vec<usize> = logits.iter_rows().flat_map(|row| largest(row, k)).collect();
    let mut gates = Vec::with_capacity(chosen.len());
    for (row, chosen) in logits.iter_rows().zip(chosen.chunks(k)) {
        gates.extend(weights(row, chosen, op.renormalise));
    }
    let kept = if op.capacity > 0 {
        within_capacity(op, &chosen, &ins.packs()?.of(TOKENS, logits.rows)?)
    } else {
        vec![true; chosen.len()]
    };
    let rows = RowsByExpert::sort(&chosen, &kept, experts);
    for (gate, place) in gates.iter_mut().zip(&rows.places) {
        if *place < 0 {
            *gate = 0.0;
        }
    }
    let choices = [logits.rows, k];
    Ok(vec![
        Tensor::f64(&choices, gates),
        Tensor::i32(&choices, chosen.iter().map(|&e| e as i32).collect()),
        Tensor::i32(&[chosen.len()], rows.order),
        Tensor::i32(&[chosen.len()], rows.places),
        Tensor::i32(&[experts + 1], rows.offsets),
        Tensor::i32(&[1], vec![rows.dropped]),
    ])
}

pub(super) fn eval_grad(op: &RouteGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dgates = ins.matrix("dgates")?;
    let rows = dgates.rows;
    let k = dgates.columns;
    let logits = ins.matrix("logits")?;
    let experts = rows_of("experts", ins.shaped_integers("experts", &[rows, k])?, logits.columns)?;
    let places = slots_of("places", ins.shaped_integers("places", &[rows * k])?, rows * k)?;
    if logits.rows != rows {
        let wanted = vec![rows, logits.columns];
        let found = vec![logits.rows, logits.columns];
        return Err(ReferenceError::Shape { what: "logits", wanted, found });
    }
    let mut dlogits = Vec::with_capacity(logits.data.len());
    for t in 0..rows {
        let choices = t * k..(t + 1) * k;
        let logits = logits.row(t);
        let mut grads = vec![0.0; logits.len()];
        for ((&e, place), dgate) in
            experts[choices.clone()].iter().zip(&places[choices.clone()]).zip(dgates.row(t))
        {
            grads[e] = if place.is_some() { *dgate } else { 0.0 };
        }
        let all: Vec<usize> = (0..logits.len()).collect();
        let among = if op.renormalise { &experts[choices] } else { &all[..] };
        let p = weights(logits, among, true);
        let mean: f64 = among.iter().zip(&p).map(|(&e, p)| p * grads[e]).sum();
        let mut row = vec![0.0; logits.len()];
        for (&e, p) in among.iter().zip(&p) {
            row[e] = p * (grads[e] - mean);
        }
        dlogits.extend(row);
    }
    Ok(vec![Tensor::f64(&[rows, logits.columns], dlogits)])
}

/// Indices of the `k` largest of `row`, largest first. It compares with `>` only, so NaN does not change the number
/// of results.
fn largest(row: &[f64], k: usize) -> Vec<usize> {
    let mut chosen = Vec::with_capacity(k);
    for _ in 0..k {
        let left: Vec<usize> = (0..row.len()).filter(|e| !chosen.contains(e)).collect();
        chosen.extend(left.into_iter().reduce(|best, e| if row[e] > row[best] { e } else { best }));
    }
    chosen
}

/// The softmax of `row` at `chosen`, or of the chosen values alone with `renormalise`.
fn weights(row: &[f64], chosen: &[usize], renormalise: bool) -> Vec<f64> {
    if renormalise {
        let logits: Vec<f64> = chosen.iter().map(|&e| row[e]).collect();
        return normalise(&logits).0;
    }
    let weights = normalise(row).0;
    chosen.iter().map(|&e| weights[e]).collect()
}

/// Whether each choice is among the first of its pack and expert, as many as the capacity of the expert.
fn within_capacity(op: &Route, chosen: &[usize], packs: &[PackRange]) -> Vec<bool> {
    let k = op.top_k as usize;
    let mut kept = Vec::with_capacity(chosen.len());
    for pack in packs {
        let limit = op.limit(pack.rows.len() as u64).unwrap_or(u64::MAX);
        let mut rows = vec![0; op.experts as usize];
        for &expert in &chosen[pack.rows.start * k..pack.rows.end * k] {
            kept.push(rows[expert] < limit);
            rows[expert] += 1;
        }
    }
    kept
}

/// Rows sorted by expert, as [`Route`] documents them.
struct RowsByExpert {
    order: Vec<i32>,
    places: Vec<i32>,
    offsets: Vec<i32>,
    dropped: i32,
}

impl RowsByExpert {
    /// Sorts the choices that are `kept`.
    fn sort(chosen: &[usize], kept: &[bool], experts: usize) -> Self {
        let mut order = Vec::with_capacity(chosen.len());
        let mut offsets = vec![0];
        let mut places = vec![-1; chosen.len()];
        for expert in 0..experts {
            for choice in (0..chosen.len()).filter(|&i| chosen[i] == expert && kept[i]) {
                places[choice] = order.len() as i32;
                order.push(choice as i32);
            }
            offsets.push(order.len() as i32);
        }
        let dropped = chosen.len() - order.len();
        order.resize(chosen.len(), -1);
        Self { order, places, offsets, dropped: dropped as i32 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check_gradient, packs, random, run};
    use super::*;
    use plimsoll_graph::Op;

    fn route(top_k: u32, renormalise: bool, capacity: u32) -> Route {
        Route { experts: 3, top_k, renormalise, capacity }
    }

    fn shapes(op: &Route, tokens: usize) -> [Vec<usize>; 6] {
        let k = op.top_k as usize;
        [
            vec![tokens, k],
            vec![tokens, k],
            vec![tokens * k],
            vec![tokens * k],
            vec![op.experts as usize + 1],
            vec![1],
        ]
    }

    fn routed(op: Route, logits: &Tensor, rows: &[[i32; 6]]) -> Vec<Tensor> {
        let shapes = shapes(&op, logits.shape[0]);
        let shapes: Vec<&[usize]> = shapes.iter().map(|s| &s[..]).collect();
        run(Op::Route(op), &inputs(op, logits, rows), &shapes)
    }

    /// The inputs of routing: packs only with a capacity.
    fn inputs(op: Route, logits: &Tensor, rows: &[[i32; 6]]) -> Vec<Tensor> {
        let packs = (op.capacity > 0).then(|| packs(rows));
        [logits.clone()].into_iter().chain(packs).collect()
    }

    /// Gates whose logarithms are small integers: probabilities 1/8, 2/8, 5/8.
    #[test]
    fn the_largest_are_chosen_and_sorted_by_expert() {
        let row = |weights: [f64; 3]| weights.map(libm::log);
        let logits = [row([1.0, 2.0, 5.0]), row([5.0, 2.0, 1.0]), row([2.0, 2.0, 4.0])].concat();
        let logits = Tensor::f64(&[3, 3], logits);
        let out = routed(route(2, false, 0), &logits, &[]);
        for (gate, wanted) in out[0].floats().expect("gates").iter().zip([0.625, 0.25, 0.625, 0.25, 0.5, 0.25])
        {
            assert!((gate - wanted).abs() < 1e-15, "{:?}", out[0]);
        }
        let integers: Vec<&[i32]> = out[1..].iter().map(|t| t.integers().expect("integers")).collect();
        // Token 2 has a tie between experts 0 and 1: the lower one wins.
        assert_eq!(integers[0], [2, 1, 0, 1, 2, 0]);
        assert_eq!(integers[1], [2, 5, 1, 3, 0, 4]);
        assert_eq!(integers[2], [4, 2, 0, 3, 5, 1]);
        assert_eq!((integers[3], integers[4]), (&[0, 2, 4, 6][..], &[0][..]));
        let out = routed(route(2, true, 0), &logits, &[]);
        let wanted = [5.0 / 7.0, 2.0 / 7.0, 5.0 / 7.0, 2.0 / 7.0, 2.0 / 3.0, 1.0 / 3.0];
        for (gate, wanted) in out[0].floats().expect("gates").iter().zip(wanted) {
            assert!((gate - wanted).abs() < 1e-15, "{:?}", out[0]);
        }
    }

    /// Packs whose tokens all choose expert 1, and the results.
    struct Capacity {
        packs: &'static [[i32; 6]],
        gates: &'static [f64],
        order: &'static [i32],
        places: &'static [i32],
        offsets: [i32; 4],
    }

    /// A capacity of the mean of a third plus a quarter is one row of a pack of two tokens, and two rows of a pack of
    /// three or four.
    #[test]
    fn rows_above_the_capacity_of_their_pack_are_dropped() {
        let cases = [
            Capacity {
                packs: &[[0, 4, 0, 1, 4, 9]],
                gates: &[1.0, 1.0, 0.0, 0.0],
                order: &[0, 1, -1, -1],
                places: &[0, 1, -1, -1],
                offsets: [0, 0, 2, 2],
            },
            Capacity {
                packs: &[[0, 2, 0, 1, 2, 7], [2, 2, 1, 1, 0, 8], [2, 5, 1, 3, 1, 9]],
                gates: &[1.0, 0.0, 1.0, 1.0, 0.0],
                order: &[0, 2, 3, -1, -1],
                places: &[0, -1, 1, 2, -1],
                offsets: [0, 0, 3, 3],
            },
        ];
        for Capacity { packs, gates, order, places, offsets } in cases {
            let tokens = gates.len();
            let logits = Tensor::f64(&[tokens, 3], [0.0, 1.0, 0.5].repeat(tokens));
            let out = routed(route(1, true, 1250), &logits, packs);
            assert_eq!(out[0].floats(), Some(gates));
            let integers: Vec<&[i32]> = out[1..].iter().map(|t| t.integers().expect("integers")).collect();
            assert_eq!(integers, [&vec![1; tokens][..], order, places, &offsets, &[2]]);
        }
    }

    #[test]
    fn gradients() {
        // Of four tokens two have the same of three experts, and the capacity is one row.
        let rows = [[0, 1, 0, 1, 1, 0], [1, 5, 1, 2, 3, 1]];
        for (renormalise, capacity) in [(false, 0), (true, 0), (false, 500), (true, 500)] {
            for k in 1..=3 {
                let op = route(k, renormalise, capacity);
                let logits = random(3, &[5, 3]);
                let out = routed(op, &logits, &rows);
                let dgates = random(4, &[5, k as usize]);
                let ins = [dgates.clone(), logits.clone(), out[1].clone(), out[3].clone()];
                let grad = run(Op::RouteGrad(RouteGrad { renormalise }), &ins, &[&[5, 3]]);
                let shapes = shapes(&op, 5);
                let shapes: Vec<&[usize]> = shapes.iter().map(|s| &s[..]).collect();
                assert_eq!(capacity > 0, out[5].integers().expect("dropped")[0] > 0);
                check_gradient(Op::Route(op), &inputs(op, &logits, &rows), 0, &dgates, &grad[0], &shapes);
            }
        }
    }
}
