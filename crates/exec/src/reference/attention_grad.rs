//! Gradient of attention, directly by its formula, from the given o and lse. Invariant: a sequence attends to itself
//! only.

use super::attention::{AttentionInputs, scores, slopes};
use super::{Operands, ReferenceError, Tensor, dot};
use plimsoll_graph::ops::{Attention, AttentionGrad, Qkv};

pub(super) fn eval(op: &AttentionGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let op = &op.forward;
    let gradient = ins.columns("do", op.width() as usize)?;
    let inputs = AttentionInputs::take(op, ins)?;
    let tokens = inputs.tokens();
    let heads = op.heads as usize;
    let d = op.head_dim as usize;
    if gradient.rows != tokens {
        let wanted = vec![tokens, gradient.columns];
        let found = vec![gradient.rows, gradient.columns];
        return Err(ReferenceError::Shape { what: "do", wanted, found });
    }
    let o = ins.shaped("o", &[tokens, heads * d])?;
    let lse = ins.shaped("lse", &[tokens, heads])?;
    let mut sums = AttentionGradSums::new(op, tokens);
    for span in &inputs.spans {
        for (h, slope) in slopes(op).into_iter().enumerate() {
            let [q, k, v] = inputs.head(op, span, h);
            let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![vec![0.0; d]; span.len()]);
            for (i, q) in q.iter().enumerate() {
                let row = span.start + i;
                let at = (row * heads + h) * d;
                let dy = &gradient.data[at..at + d];
                let inner = dot(dy, &o[at..at + d]);
                for (j, score) in scores(op.mask, i, q, &k, slope) {
                    let p = libm::exp(score - lse[row * heads + h]);
                    let ds = p * (dot(dy, &v[j]) - inner);
                    add(&mut dv[j], p, dy);
                    add(&mut dk[j], ds, q);
                    add(&mut dq[i], ds, &k[j]);
                }
            }
            for (i, (dq, dk)) in dq.iter_mut().zip(&mut dk).enumerate() {
                inputs.rotate(i, dq, true);
                inputs.rotate(i, dk, true);
            }
            sums.take(op, span.start, h, [(&dq, f64::from(op.scale)), (&dk, 1.0), (&dv, 1.0)]);
        }
    }
    Ok(sums.tensors(op, tokens))
}

fn add(sum: &mut [f64], factor: f64, x: &[f64]) {
    sum.iter_mut().zip(x).for_each(|(s, x)| *s += factor * x);
}

/// Sums of dq, dk and dv, stored side by side: (T, (H + 2 G) d).
struct AttentionGradSums {
    columns: usize,
    data: Vec<f64>,
}

impl AttentionGradSums {
    fn new(op: &Attention, tokens: usize) -> Self {
        let columns = (op.width() + 2 * op.kv_width()) as usize;
        Self { columns, data: vec![0.0; tokens * columns] }
    }

    /// Adds the gradients of head `head` of a sequence that starts at row `start`: dq, dk and dv, each multiplied by
    /// its factor.
    fn take(&mut self, op: &Attention, start: usize, head: usize, parts: [(&[Vec<f64>], f64); 3]) {
        let shared = op.heads as usize + head / (op.heads / op.kv_heads) as usize;
        let places = [head, shared, shared + op.kv_heads as usize];
        for ((part, factor), place) in parts.into_iter().zip(places) {
            for (i, x) in part.iter().enumerate() {
                let at = (start + i) * self.columns + place * op.head_dim as usize;
                add(&mut self.data[at..][..x.len()], factor, x);
            }
        }
    }

    fn tensors(self, op: &Attention, tokens: usize) -> Vec<Tensor> {
        let q = op.width() as usize;
        let kv = op.kv_width() as usize;
        match op.qkv {
            Qkv::Fused => vec![self.part(0..self.columns, tokens)],
            Qkv::Separate => {
                [0..q, q..q + kv, q + kv..q + 2 * kv].map(|columns| self.part(columns, tokens)).into()
            }
        }
    }

    /// Columns of the first `tokens` rows.
    fn part(&self, columns: std::ops::Range<usize>, tokens: usize) -> Tensor {
        let rows = self.data.chunks(self.columns).take(tokens);
        let data: Vec<f64> = rows.flat_map(|row| &row[columns.clone()]).copied().collect();
        Tensor::f64(&[tokens, columns.len()], data)
    }
}

#[cfg(test)]
mod tests;
