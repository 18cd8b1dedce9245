//! The output projection with its softmax cross-entropy, and their gradients. Invariant: rows with a negative target
//! contribute nothing, whatever values they hold.

use super::operands::Matrix;
use super::{Operands, ReferenceError, Tensor, dot, linear_grad::add_scaled};
use plimsoll_graph::ops::{LinearCrossEntropy, LinearCrossEntropyGrad};

/// Inputs shared by forward and backward.
struct OutputHead<'a> {
    x: Matrix<'a>,
    w: Matrix<'a>,
    bias: Option<&'a [f64]>,
    /// Target of each row; `None` for ignored rows.
    targets: Vec<Option<usize>>,
}

pub(super) fn eval(op: &LinearCrossEntropy, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let head = OutputHead::take(op, ins)?;
    let mut cross_entropy = 0.0;
    let mut z = 0.0;
    let mut lses = vec![0.0; head.x.rows];
    for (r, target) in head.counting() {
        let logits = head.logits(r);
        let lse = log_sum_exp(&logits);
        cross_entropy += lse - logits[target];
        z += f64::from(op.z_loss) * lse * lse;
        lses[r] = lse;
    }
    let mut outs = vec![Tensor::f64(&[1], vec![cross_entropy + z]), Tensor::f64(&[head.x.rows], lses)];
    if op.z_loss != 0.0 {
        outs.extend([cross_entropy, z].map(|x| Tensor::f64(&[1], vec![x])));
    }
    Ok(outs)
}

pub(super) fn eval_grad(
    op: &LinearCrossEntropyGrad,
    ins: &mut Operands<'_>,
) -> Result<Vec<Tensor>, ReferenceError> {
    let dloss = ins.shaped("dloss", &[1])?[0];
    let head = OutputHead::take(&op.forward, ins)?;
    let lses = ins.shaped("lse", &[head.x.rows])?;
    let rows = head.x.rows;
    let k = head.x.columns;
    let v = head.w.rows;
    let mut dx = vec![0.0; rows * k];
    let mut dw = vec![0.0; v * k];
    let mut db = vec![0.0; v];
    for (r, target) in head.counting() {
        let factor = dloss * (1.0 + 2.0 * f64::from(op.forward.z_loss) * lses[r]);
        for (j, logit) in head.logits(r).into_iter().enumerate() {
            let hit = if j == target { dloss } else { 0.0 };
            let g = factor * libm::exp(logit - lses[r]) - hit;
            add_scaled(&mut dx[r * k..][..k], g, head.w.row(j));
            add_scaled(&mut dw[j * k..][..k], g, head.x.row(r));
            db[j] += g;
        }
    }
    let mut outs = vec![Tensor::f64(&[rows, k], dx), Tensor::f64(&[v, k], dw)];
    if op.forward.bias {
        outs.push(Tensor::f64(&[v], db));
    }
    Ok(outs)
}

impl<'a> OutputHead<'a> {
    fn take(op: &LinearCrossEntropy, ins: &mut Operands<'a>) -> Result<Self, ReferenceError> {
        let x = ins.matrix("x")?;
        let w = ins.columns("w", x.columns)?;
        let bias = if op.bias { Some(ins.shaped("b", &[w.rows])?) } else { None };
        let targets = ins.integers("targets")?;
        if targets.len() != x.rows {
            let wanted = vec![x.rows];
            let found = vec![targets.len()];
            return Err(ReferenceError::Shape { what: "targets", wanted, found });
        }
        let limit = w.rows;
        let mut classes = Vec::with_capacity(targets.len());
        for (position, &index) in targets.iter().enumerate() {
            // A negative target means that the row is ignored.
            let class = usize::try_from(index).ok();
            if class.is_some_and(|class| class >= limit) {
                return Err(ReferenceError::Index { what: "targets", position, index, limit });
            }
            classes.push(class);
        }
        Ok(Self { x, w, bias, targets: classes })
    }

    /// Rows that are not ignored, with their targets.
    fn counting(&self) -> impl Iterator<Item = (usize, usize)> {
        self.targets.iter().enumerate().filter_map(|(r, target)| Some((r, (*target)?)))
    }

    fn logits(&self, r: usize) -> Vec<f64> {
        let rows = self.w.iter_rows().enumerate();
        rows.map(|(j, w)| dot(self.x.row(r), w) + self.bias.map_or(0.0, |b| b[j])).collect()
    }
}

/// log sum exp(l), relative to the largest logit so that no exp overflows (Blanchard, Higham and Higham 2021).
fn log_sum_exp(logits: &[f64]) -> f64 {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    top + libm::log(logits.iter().map(|&l| libm::exp(l - top)).sum())
}

#[cfg(test)]
mod tests {
    use super::super::eval;
    use super::super::testing::{check, check_gradient, random, run};
    use super::*;
    use plimsoll_graph::Op;

    fn op(bias: bool, z_loss: f32) -> LinearCrossEntropy {
        LinearCrossEntropy { bias, chunk: 2, z_loss }
    }

    #[test]
    fn known_losses() {
        // Logits (x, 0): ln 2 at x = 0; x = 1000 must not overflow; the third row is ignored.
        let x = Tensor::f32(&[3, 1], vec![0.0, 1000.0, f32::NAN]);
        let w = Tensor::f32(&[2, 1], vec![1.0, 0.0]);
        let targets = Tensor::i32(&[3], vec![0, 1, -1]);
        let ln2 = std::f32::consts::LN_2;
        let lse = Tensor::f32(&[3], vec![ln2, 1000.0, 0.0]);
        let ins = [x.clone(), w.clone(), targets];
        let loss = Tensor::f32(&[1], vec![ln2 + 1000.0]);
        check(Op::LinearCrossEntropy(op(false, 0.0)), &ins, &[loss, lse.clone()], 0.0);
        let squares = 0.5 * (ln2 * ln2 + 1e6);
        let scalar = |x: f32| Tensor::f32(&[1], vec![x]);
        let outs = [scalar(ln2 + 1000.0 + squares), lse, scalar(ln2 + 1000.0), scalar(squares)];
        check(Op::LinearCrossEntropy(op(false, 0.5)), &ins, &outs, 0.0);
        let targets = Tensor::i32(&[3], vec![0, 2, -1]);
        let refused = eval(&Op::LinearCrossEntropy(op(false, 0.0)), &[&x, &w, &targets], &[None, None]);
        let error = ReferenceError::Index { what: "targets", position: 1, index: 2, limit: 2 };
        assert_eq!(refused, Err(error));
    }

    #[test]
    fn gradients() {
        let r = 5;
        let v = 4;
        let k = 3;
        let targets = Tensor::i32(&[r], vec![3, -1, 0, 2, -100]);
        let x = random(1, &[r, k]);
        let w = random(2, &[v, k]);
        let b = random(3, &[v]);
        let dloss = Tensor::f32(&[1], vec![0.75]);
        for (bias, z_loss) in [(false, 0.0), (true, 0.0), (true, 0.125)] {
            let forward = op(bias, z_loss);
            let mut ins = vec![x.clone(), w.clone()];
            ins.extend(bias.then(|| b.clone()));
            ins.push(targets.clone());
            let shapes: [&[usize]; 4] = [&[1], &[r], &[1], &[1]];
            let shapes = &shapes[..if z_loss == 0.0 { 2 } else { 4 }];
            let lse = run(Op::LinearCrossEntropy(forward), &ins, shapes).remove(1);
            let inputs = [std::slice::from_ref(&dloss), &ins, &[lse]].concat();
            let outs: [&[usize]; 3] = [&[r, k], &[v, k], &[v]];
            let grad = Op::LinearCrossEntropyGrad(LinearCrossEntropyGrad { forward });
            let grads = run(grad, &inputs, &outs[..2 + usize::from(bias)]);
            for (input, grad) in grads.iter().enumerate() {
                check_gradient(Op::LinearCrossEntropy(forward), &ins, input, &dloss, grad, shapes);
            }
        }
    }
}
