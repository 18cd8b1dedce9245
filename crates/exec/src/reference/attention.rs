//! Multi-head attention over packed sequences, as its formula stands: all scores of a query, their softmax,
//! the weighted sum. Invariant: a sequence sees nothing but itself.

use super::operands::Matrix;
use super::{Operands, ReferenceError, Tensor, softmax::normalise};
use graph::ops::{Attention, Bias, Mask, Qkv, alibi_slopes};
use std::ops::Range;

pub(super) fn eval(op: &Attention, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (heads, d) = (op.heads as usize, op.head_dim as usize);
    if heads == 0 || d == 0 || (op.rotary && !d.is_multiple_of(2)) {
        return Err(ReferenceError::Attribute { why: "heads must be some, and even where they are rotated" });
    }
    let operands = take(op, ins)?;
    let tokens = operands.qkv[0].0.rows;
    let slopes: Vec<f64> = match op.bias {
        Bias::None => vec![0.0; heads],
        Bias::Alibi => alibi_slopes(op.heads).map(f64::from).collect(),
    };
    let mut o = vec![0.0; tokens * heads * d];
    let mut lse = vec![0.0; tokens * heads];
    for span in &operands.spans {
        for (h, &slope) in slopes.iter().enumerate() {
            let [q, k, v] = operands.head(op, span, h);
            for (i, q) in q.iter().enumerate() {
                let (weights, total) = normalise(&scores(op.mask, i, q, &k, slope));
                let row = span.start + i;
                for c in 0..d {
                    let sum: f64 = weights.iter().zip(&v).map(|(w, v)| w * v[c]).sum();
                    o[(row * heads + h) * d + c] = sum;
                }
                lse[row * heads + h] = total;
            }
        }
    }
    Ok(vec![Tensor::f64(&[tokens, heads * d], o), Tensor::f64(&[tokens, heads], lse)])
}

/// The inputs: q, k and v as (matrix, first column), the sequences, and cos and sin.
struct Inputs<'a> {
    qkv: [(Matrix<'a>, usize); 3],
    spans: Vec<Range<usize>>,
    tables: Option<(Matrix<'a>, &'a [f64])>,
}

fn take<'a>(op: &Attention, ins: &mut Operands<'a>) -> Result<Inputs<'a>, ReferenceError> {
    let width = op.heads as usize * op.head_dim as usize;
    let qkv = match op.qkv {
        Qkv::Fused => {
            let x = ins.columns("qkv", 3 * width)?;
            [(x, 0), (x, width), (x, 2 * width)]
        }
        Qkv::Separate => {
            let q = ins.columns("q", width)?;
            let mut same = |what| {
                let data = ins.shaped(what, &[q.rows, width])?;
                Ok((Matrix { data, ..q }, 0))
            };
            [(q, 0), same("k")?, same("v")?]
        }
    };
    let spans = ins.spans(qkv[0].0.rows)?;
    let mut tables = None;
    if op.rotary {
        let cos = ins.columns("cos", op.head_dim as usize / 2)?;
        let longest = cos.rows;
        tables = Some((cos, ins.shaped("sin", &[longest, cos.columns])?));
        if let Some(sequence) = spans.iter().position(|s| s.len() > longest) {
            let tokens = spans[sequence].len();
            return Err(ReferenceError::TooLong { sequence, tokens, longest });
        }
    }
    Ok(Inputs { qkv, spans, tables })
}

impl Inputs<'_> {
    /// q, k and v of one head of one sequence; q scaled, then q and k rotated.
    fn head(&self, op: &Attention, span: &Range<usize>, head: usize) -> [Vec<Vec<f64>>; 3] {
        let d = op.head_dim as usize;
        let rows = |(x, first): (Matrix<'_>, usize), factor: f64| -> Vec<Vec<f64>> {
            let columns = first + head * d..first + (head + 1) * d;
            let wide = |r: usize| x.row(r)[columns.clone()].iter().map(|&x| factor * x).collect();
            span.clone().map(wide).collect()
        };
        let [q, k, v] = self.qkv;
        let (mut q, mut k, v) = (rows(q, f64::from(op.scale)), rows(k, 1.0), rows(v, 1.0));
        for x in [&mut q, &mut k] {
            for (position, x) in x.iter_mut().enumerate() {
                self.rotate(position, x);
            }
        }
        [q, k, v]
    }

    /// Half-split rotary embedding: `(a, b) -> (a cos - b sin, b cos + a sin)` for the two halves.
    fn rotate(&self, position: usize, x: &mut [f64]) {
        let Some((cos, sin)) = &self.tables else { return };
        let half = cos.columns;
        let (a, b) = x.split_at_mut(half);
        for j in 0..half {
            let (cos, sin) = (cos.row(position)[j], sin[position * half + j]);
            (a[j], b[j]) = (a[j] * cos - b[j] * sin, b[j] * cos + a[j] * sin);
        }
    }
}

/// The score of query `i` with every key that it sees.
fn scores(mask: Mask, i: usize, q: &[f64], k: &[Vec<f64>], slope: f64) -> Vec<f64> {
    let visible = match mask {
        Mask::Full => k,
    };
    let score = |(j, k): (usize, &Vec<f64>)| {
        let product: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
        product - slope * i.abs_diff(j) as f64
    };
    visible.iter().enumerate().map(score).collect()
}

#[cfg(test)]
mod tests;
