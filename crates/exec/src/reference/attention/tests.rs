//! Tests of attention against hand-computed sequences, and against the relative form of rotary embedding in complex
//! numbers, which uses neither tables nor absolute positions.

use super::super::testing::{check, floats, random, run};
use super::super::{eval, tensor::Tensor};
use super::*;
use plimsoll_graph::Op;

const PLAIN: Attention = Attention {
    heads: 1,
    kv_heads: 1,
    head_dim: 2,
    scale: 1.0,
    mask: Mask::Full,
    bias: Bias::None,
    rotary: false,
    qkv: Qkv::Separate,
};

fn spans(pairs: &[i32]) -> Tensor {
    Tensor::i32(&[pairs.len() / 2, 2], pairs.to_vec())
}

/// cos and sin of angle `p f` for every frequency.
fn tables(longest: usize, frequencies: &[f64]) -> [Tensor; 2] {
    [f64::cos, f64::sin].map(|of| {
        let angles = (0..longest).flat_map(|p| frequencies.iter().map(move |f| p as f64 * f));
        Tensor::f32(&[longest, frequencies.len()], angles.map(|a| of(a) as f32).collect())
    })
}

#[test]
fn a_single_token_gets_its_value() {
    let [q, k] = [[1.0, 2.0], [3.0, -1.0]].map(|x| Tensor::f32(&[1, 2], x.to_vec()));
    let v = Tensor::f32(&[1, 2], vec![7.0, 8.0]);
    // Position 0 is not rotated and has no ALiBi penalty: lse is the score, 0.5 (1*3 - 2*1).
    for (bias, rotary) in [(Bias::None, false), (Bias::Alibi, false), (Bias::None, true)] {
        let mut ins = vec![q.clone(), k.clone(), v.clone(), spans(&[0, 1])];
        if rotary {
            ins.extend(tables(4, &[1.0]));
        }
        let op = Attention { scale: 0.5, bias, rotary, ..PLAIN };
        check(Op::Attention(op), &ins, &[v.clone(), Tensor::f32(&[1, 1], vec![0.5])], 0.0);
    }
}

#[test]
fn two_tokens_by_hand() {
    let ln3 = 3.0_f32.ln();
    let q = Tensor::f32(&[2, 2], vec![1.0, 0.0, 0.0, 1.0]);
    let k = Tensor::f32(&[2, 2], vec![0.0, ln3, ln3, 0.0]);
    let v = Tensor::f32(&[2, 2], vec![4.0, 0.0, 0.0, 8.0]);
    let ins = [q, k, v, spans(&[0, 2])];
    // Scores: token 0: (0, ln 3), weights 1/4, 3/4; token 1: (ln 3, 0), weights 3/4, 1/4.
    let o = Tensor::f32(&[2, 2], vec![1.0, 6.0, 3.0, 2.0]);
    let lse = Tensor::f32(&[2, 1], vec![4.0_f32.ln(); 2]);
    check(Op::Attention(PLAIN), &ins, &[o, lse], 1e-6);
    // One head's slope is 2^-8: the far key of either token loses 2^-8.
    let far = 3.0 * (-1.0_f32 / 256.0).exp();
    let near = 1.0 / (1.0 + far);
    let o = Tensor::f32(&[2, 2], vec![4.0 * near, 8.0 * far * near, 4.0 * far * near, 8.0 * near]);
    let lse = Tensor::f32(&[2, 1], vec![(1.0 + far).ln(); 2]);
    check(Op::Attention(Attention { bias: Bias::Alibi, ..PLAIN }), &ins, &[o, lse], 1e-6);
}

/// Scores by `Re sum_j q_j conj(k_j) e^(i (p - p') f_j)`, q_j = q[j] + i q[half + j]; softmax without a maximum.
fn relative(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    d: usize,
    scale: f64,
    frequencies: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let n = q.len() / d;
    let half = d / 2;
    let mut o = vec![];
    let mut lse = vec![];
    for i in 0..n {
        let weight = |j: usize| -> f64 {
            let part = |c: usize| {
                let at = |x: &[f64], r: usize| (x[r * d + c], x[r * d + half + c]);
                let (a, b) = at(q, i);
                let (e, f) = at(k, j);
                let re = a * e + b * f;
                let im = b * e - a * f;
                let angle = (i as f64 - j as f64) * frequencies[c];
                re * angle.cos() - im * angle.sin()
            };
            (scale * (0..half).map(part).sum::<f64>()).exp()
        };
        let total: f64 = (0..n).map(weight).sum();
        for c in 0..d {
            o.push((0..n).map(|j| weight(j) * v[j * d + c]).sum::<f64>() / total);
        }
        lse.push(total.ln());
    }
    (o, lse)
}

#[test]
fn rotary_depends_on_distance_alone() {
    let n = 9;
    let d = 6;
    let frequencies = [1.0, 0.3, 0.01];
    let x = [1, 2, 3].map(|seed| random(seed, &[n, d]));
    let [cos, sin] = tables(n, &frequencies);
    let op = Attention { head_dim: d as u32, scale: 1.5, rotary: true, ..PLAIN };
    let [q, k, v] = x.each_ref().map(floats);
    let (o, lse) = relative(q, k, v, d, 1.5, &frequencies);
    let wanted = [(vec![n, d], o), (vec![n, 1], lse)].map(|(shape, data)| Tensor::f64(&shape, data));
    let [q, k, v] = x;
    check(Op::Attention(op), &[q, k, v, spans(&[0, n as i32]), cos, sin], &wanted, 1e-6);
}

/// The rows `rows` of `x`.
fn rows(x: &Tensor, rows: Range<usize>) -> Tensor {
    let columns = x.shape[1];
    Tensor::f64(&[rows.len(), columns], floats(x)[rows.start * columns..rows.end * columns].to_vec())
}

#[test]
fn a_packed_sequence_has_the_bits_it_has_alone() {
    let heads = 3;
    let d = 4;
    let op =
        Attention { heads: 3, kv_heads: 3, head_dim: 4, scale: 0.5, rotary: true, bias: Bias::Alibi, ..PLAIN };
    let x = [1, 2, 3].map(|seed| random(seed, &[7, heads * d]));
    let [cos, sin] = tables(5, &[1.0, 0.1]);
    let run_on = |range: Range<usize>, pairs: &[i32]| {
        let mut ins: Vec<Tensor> = x.iter().map(|x| rows(x, range.clone())).collect();
        ins.extend([spans(pairs), cos.clone(), sin.clone()]);
        run(Op::Attention(op), &ins, &[&[range.len(), heads * d], &[range.len(), heads]])
    };
    // Row 2 is outside of all sequences.
    let packed = run_on(0..7, &[0, 2, 3, 7]);
    for (range, pairs) in [(0..2, [0, 2]), (3..7, [0, 4])] {
        for (packed, alone) in packed.iter().zip(run_on(range.clone(), &pairs)) {
            assert_eq!(rows(packed, range.clone()), alone);
        }
    }
    assert!(packed.iter().all(|t| floats(&rows(t, 2..3)).iter().all(|&x| x == 0.0)));
}

#[test]
fn fused_is_separate_side_by_side() {
    let op = Attention { heads: 2, kv_heads: 2, head_dim: 4, scale: 0.5, bias: Bias::Alibi, ..PLAIN };
    let x = [1, 2, 3].map(|seed| random(seed, &[5, 8]));
    let fused = (0..5).flat_map(|r| x.iter().flat_map(move |x| &floats(x)[r * 8..(r + 1) * 8])).copied();
    let fused = Tensor::f64(&[5, 24], fused.collect());
    let shapes: [&[usize]; 2] = [&[5, 8], &[5, 2]];
    let [q, k, v] = x;
    let separate = run(Op::Attention(op), &[q, k, v, spans(&[0, 5])], &shapes);
    let op = Attention { qkv: Qkv::Fused, ..op };
    assert_eq!(run(Op::Attention(op), &[fused, spans(&[0, 5])], &shapes), separate);
}

#[test]
fn refusals() {
    let x = Tensor::f32(&[3, 2], vec![0.0; 6]);
    let [cos, sin] = tables(2, &[1.0]);
    let outs = [Some(vec![3, 2]), Some(vec![3, 1])];
    let rotary = Attention { rotary: true, ..PLAIN };
    let cases = [
        (rotary, spans(&[0, 3]), ReferenceError::TooLong { sequence: 0, tokens: 3, longest: 2 }),
        (rotary, spans(&[0, 4]), ReferenceError::Span { sequence: 0, start: 0, end: 4, rows: 3 }),
        (rotary, spans(&[0, 2, 1, 3]), ReferenceError::Overlap { sequence: 1, row: 1 }),
        (
            Attention { head_dim: 4, ..rotary },
            spans(&[0, 2]),
            ReferenceError::Shape { what: "q", wanted: vec![3, 4], found: vec![3, 2] },
        ),
        (
            Attention { head_dim: 1, heads: 2, kv_heads: 2, ..rotary },
            spans(&[0, 2]),
            ReferenceError::Attribute { why: "heads must be some, and even where they are rotated" },
        ),
        (
            Attention { heads: 3, kv_heads: 2, ..rotary },
            spans(&[0, 2]),
            ReferenceError::Attribute { why: "heads of keys and values must divide those of queries" },
        ),
        (
            Attention { mask: Mask::Window(0), ..rotary },
            spans(&[0, 2]),
            ReferenceError::Attribute { why: "a mask must show every query to itself" },
        ),
    ];
    for (op, spans, error) in cases {
        let got = eval(&Op::Attention(op), &[&x, &x, &x, &spans, &cos, &sin], &outs);
        assert_eq!(got, Err(error), "{op:?}");
    }
}
