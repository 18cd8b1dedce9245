//! Multi-head attention over packed sequences, directly by its formula: all scores of a query, their softmax, the
//! weighted sum. Invariant: a sequence attends to itself only.

use super::operands::Matrix;
use super::{Operands, ReferenceError, Tensor, softmax::normalise};
use plimsoll_graph::ops::{Attention, Bias, Mask, Qkv, alibi_slopes};
use std::ops::Range;

pub(super) fn eval(op: &Attention, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let heads = op.heads as usize;
    let d = op.head_dim as usize;
    let inputs = AttentionInputs::take(op, ins)?;
    let tokens = inputs.tokens();
    let slopes = slopes(op);
    let mut o = vec![0.0; tokens * heads * d];
    let mut lse = vec![0.0; tokens * heads];
    for span in &inputs.spans {
        for (h, &slope) in slopes.iter().enumerate() {
            let [q, k, v] = inputs.head(op, span, h);
            for (i, q) in q.iter().enumerate() {
                let (keys, scores): (Vec<usize>, Vec<f64>) = scores(op.mask, i, q, &k, slope).unzip();
                let (weights, total) = normalise(&scores);
                let row = span.start + i;
                for c in 0..d {
                    let sum: f64 = weights.iter().zip(&keys).map(|(w, &j)| w * v[j][c]).sum();
                    o[(row * heads + h) * d + c] = sum;
                }
                lse[row * heads + h] = total;
            }
        }
    }
    Ok(vec![Tensor::f64(&[tokens, heads * d], o), Tensor::f64(&[tokens, heads], lse)])
}

/// The ALiBi slope of every query head; 0 without ALiBi.
pub(super) fn slopes(op: &Attention) -> Vec<f64> {
    match op.bias {
        Bias::None => vec![0.0; op.heads as usize],
        Bias::Alibi => alibi_slopes(op.heads).map(f64::from).collect(),
    }
}

/// Inputs of attention: q, k and v as (matrix, first column), the spans of the sequences, and the cos and sin tables.
pub(super) struct AttentionInputs<'a> {
    pub qkv: [(Matrix<'a>, usize); 3],
    pub spans: Vec<Range<usize>>,
    tables: Option<(Matrix<'a>, &'a [f64])>,
}

impl<'a> AttentionInputs<'a> {
    pub fn take(op: &Attention, ins: &mut Operands<'a>) -> Result<Self, ReferenceError> {
        check(op)?;
        let width = op.width() as usize;
        let kv = op.kv_width() as usize;
        let qkv = match op.qkv {
            Qkv::Fused => {
                let x = ins.columns("qkv", width + 2 * kv)?;
                [(x, 0), (x, width), (x, width + kv)]
            }
            Qkv::Separate => {
                let q = ins.columns("q", width)?;
                let k = Matrix { rows: q.rows, columns: kv, data: ins.shaped("k", &[q.rows, kv])? };
                let v = Matrix { rows: q.rows, columns: kv, data: ins.shaped("v", &[q.rows, kv])? };
                [(q, 0), (k, 0), (v, 0)]
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
        Ok(Self { qkv, spans, tables })
    }

    pub fn tokens(&self) -> usize {
        self.qkv[0].0.rows
    }

    /// q, k and v of one query head of one sequence; q is scaled, then q and k are rotated.
    pub fn head(&self, op: &Attention, span: &Range<usize>, head: usize) -> [Vec<Vec<f64>>; 3] {
        let d = op.head_dim as usize;
        let [(q, first_q), (k, first_k), (v, first_v)] = self.qkv;
        // Several query heads read the same head of keys and values.
        let shared = head / (op.heads / op.kv_heads) as usize;
        let mut q = columns_of(q, span, first_q + head * d..first_q + (head + 1) * d);
        q.iter_mut().flatten().for_each(|q| *q *= f64::from(op.scale));
        let mut k = columns_of(k, span, first_k + shared * d..first_k + (shared + 1) * d);
        let v = columns_of(v, span, first_v + shared * d..first_v + (shared + 1) * d);
        for x in [&mut q, &mut k] {
            for (position, x) in x.iter_mut().enumerate() {
                self.rotate(position, x, false);
            }
        }
        [q, k, v]
    }

    /// Half-split rotary embedding: `(a, b) -> (a cos - b sin, b cos + a sin)` for the two halves; `back` selects the
    /// transposed map.
    pub fn rotate(&self, position: usize, x: &mut [f64], back: bool) {
        let Some((cos, sin)) = &self.tables else { return };
        let half = cos.columns;
        let (a, b) = x.split_at_mut(half);
        for j in 0..half {
            let cos = cos.row(position)[j];
            let sin = sin[position * half + j];
            let sin = if back { -sin } else { sin };
            (a[j], b[j]) = (a[j] * cos - b[j] * sin, b[j] * cos + a[j] * sin);
        }
    }
}

/// Some columns of the rows of a sequence.
fn columns_of(x: Matrix<'_>, rows: &Range<usize>, columns: Range<usize>) -> Vec<Vec<f64>> {
    rows.clone().map(|r| x.row(r)[columns.clone()].to_vec()).collect()
}

/// The keys that query `i` attends to, with their scores.
pub(super) fn scores<'a>(
    mask: Mask,
    i: usize,
    q: &'a [f64],
    k: &'a [Vec<f64>],
    slope: f64,
) -> impl Iterator<Item = (usize, f64)> + 'a {
    let score = move |j: usize| {
        let product: f64 = q.iter().zip(&k[j]).map(|(q, k)| q * k).sum();
        (j, product - slope * i.abs_diff(j) as f64)
    };
    mask.keys(i, k.len()).into_iter().flatten().map(score)
}

fn check(op: &Attention) -> Result<(), ReferenceError> {
    let why = if op.heads == 0 || op.head_dim == 0 || (op.rotary && !op.head_dim.is_multiple_of(2)) {
        "heads must be some, and even where they are rotated"
    } else if op.kv_heads == 0 || !op.heads.is_multiple_of(op.kv_heads) {
        "heads of keys and values must divide those of queries"
    } else if op.mask.check().is_err() {
        "a mask must show every query to itself"
    } else {
        return Ok(());
    };
    Err(ReferenceError::Attribute { why })
}

#[cfg(test)]
mod tests;
