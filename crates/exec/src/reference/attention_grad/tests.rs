//! Tests of the attention gradient against finite differences, for every mask and form of inputs, and of the
//! definitions of masks and shared heads: dense attention without the hidden keys, and with repeated keys and values.

use super::super::testing::{check_gradient, floats, random, run};
use super::*;
use plimsoll_graph::Op;
use plimsoll_graph::ops::{Bias, Mask};

const MASKS: [Mask; 5] = [
    Mask::Full,
    Mask::Causal,
    Mask::Window(3),
    Mask::BlockSparse { block: 2, local: 1, global: 1 },
    Mask::BlockSparse { block: 3, local: 2, global: 0 },
];

const PLAIN: Attention = Attention {
    heads: 2,
    kv_heads: 2,
    head_dim: 4,
    scale: 0.7,
    mask: Mask::Full,
    bias: Bias::None,
    rotary: false,
    qkv: Qkv::Separate,
};

/// Seven tokens: a sequence of five, a row outside of all sequences, a sequence of one.
const TOKENS: usize = 7;
const SPANS: [i32; 4] = [0, 5, 6, 7];

/// The inputs of `op`, from noise.
fn inputs(op: &Attention) -> Vec<Tensor> {
    let columns = op.columns().into_iter().enumerate();
    let mut ins: Vec<Tensor> = columns.map(|(i, c)| random(i as u64 + 1, &[TOKENS, c as usize])).collect();
    ins.push(Tensor::i32(&[2, 2], SPANS.to_vec()));
    if op.rotary {
        let half = op.head_dim as usize / 2;
        let angle = |i: usize| (i / half) as f64 * 0.3f64.powi((i % half) as i32);
        for of in [f64::cos, f64::sin] {
            ins.push(Tensor::f64(&[5, half], (0..5 * half).map(|i| of(angle(i))).collect()));
        }
    }
    ins
}

/// o and lse, followed by do and the gradients.
fn both(op: &Attention, ins: &[Tensor]) -> (Vec<Tensor>, Tensor, Vec<Tensor>) {
    let width = op.width() as usize;
    let heads = op.heads as usize;
    let outs = run(Op::Attention(*op), ins, &[&[TOKENS, width], &[TOKENS, heads]]);
    let dy = random(9, &[TOKENS, width]);
    let all: Vec<Tensor> = [std::slice::from_ref(&dy), ins, &outs].concat();
    let shapes: Vec<&[usize]> = ins[..op.operands()].iter().map(|t| &t.shape[..]).collect();
    let grads = run(Op::AttentionGrad(AttentionGrad { forward: *op }), &all, &shapes);
    (outs, dy, grads)
}

#[test]
fn gradients_equal_finite_differences() {
    for mask in MASKS {
        for (heads, kv_heads) in [(1, 1), (2, 2), (4, 2)] {
            for (bias, rotary) in [(Bias::None, false), (Bias::Alibi, false), (Bias::None, true)] {
                for qkv in [Qkv::Separate, Qkv::Fused] {
                    let op = Attention { heads, kv_heads, mask, bias, rotary, qkv, ..PLAIN };
                    let ins = inputs(&op);
                    let (outs, dy, grads) = both(&op, &ins);
                    let shapes: Vec<&[usize]> = outs.iter().map(|t| &t.shape[..]).collect();
                    for (i, grad) in grads.iter().enumerate() {
                        check_gradient(Op::Attention(op), &ins, i, &dy, grad, &shapes);
                    }
                }
            }
        }
    }
}

/// Softmax over all keys of a sequence, with -inf for masked keys: the dense form.
fn dense(op: &Attention, ins: &[Tensor], start: usize, n: usize) -> Vec<f64> {
    let d = op.head_dim as usize;
    let h = op.heads as usize;
    let per = (op.heads / op.kv_heads) as usize;
    let row = |x: usize, t: usize, head: usize| {
        let columns = ins[x].shape[1];
        &floats(&ins[x])[t * columns + head * d..][..d]
    };
    let mut o = vec![0.0; n * h * d];
    for head in 0..h {
        for i in 0..n {
            let score = |j: usize| {
                let seen = op.mask.keys(i, n).iter().any(|run| run.contains(&j));
                let hidden = if seen { 0.0 } else { f64::NEG_INFINITY };
                hidden + f64::from(op.scale) * dot(row(0, start + i, head), row(1, start + j, head / per))
            };
            let weights: Vec<f64> = (0..n).map(|j| score(j).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (j, w) in weights.iter().enumerate() {
                let at = &mut o[(i * h + head) * d..][..d];
                add(at, w / total, row(2, start + j, head / per));
            }
        }
    }
    o
}

#[test]
fn every_mask_is_dense_attention_with_keys_taken_out() {
    for mask in MASKS {
        for (heads, kv_heads) in [(2, 2), (4, 2), (3, 1)] {
            let op = Attention { heads, kv_heads, mask, ..PLAIN };
            let ins = inputs(&op);
            let (outs, ..) = both(&op, &ins);
            let width = op.width() as usize;
            for (start, n) in [(0, 5), (6, 1)] {
                let got = &floats(&outs[0])[start * width..(start + n) * width];
                for (g, w) in got.iter().zip(dense(&op, &ins, start, n)) {
                    assert!((g - w).abs() < 1e-14, "{op:?}: {g}, not {w}");
                }
            }
        }
    }
}

/// A mask that hides nothing gives the same bits as no mask.
#[test]
fn a_mask_as_wide_as_the_sequence_is_causal() {
    let of = |mask| {
        let op = Attention { mask, rotary: true, ..PLAIN };
        both(&op, &inputs(&op))
    };
    let causal = of(Mask::Causal);
    for mask in [Mask::Window(5), Mask::BlockSparse { block: 5, local: 1, global: 0 }] {
        assert_eq!(of(mask), causal, "{mask:?}");
    }
    assert_ne!(of(Mask::Full), causal);
}

/// If keys and values are repeated for every query head, the sums of their gradients equal the gradients of shared
/// heads.
#[test]
fn shared_heads_are_repeated_ones() {
    let shared = Attention { heads: 4, kv_heads: 2, mask: Mask::Causal, rotary: true, ..PLAIN };
    let ins = inputs(&shared);
    let d = shared.head_dim as usize;
    let mut repeated = ins.clone();
    for x in &mut repeated[1..3] {
        let heads = floats(x).chunks(d).flat_map(|head| [head, head]).flatten();
        *x = Tensor::f64(&[TOKENS, 4 * d], heads.copied().collect());
    }
    let (outs, _, grads) = both(&shared, &ins);
    let (all_outs, _, all) = both(&Attention { kv_heads: 4, ..shared }, &repeated);
    assert_eq!((outs, &grads[0]), (all_outs, &all[0]));
    for (grad, all) in grads[1..].iter().zip(&all[1..]) {
        let pairs = floats(all).chunks(2 * d);
        let sums = pairs.flat_map(|pair| (0..d).map(|c| pair[c] + pair[d + c]));
        for (g, w) in floats(grad).iter().zip(sums) {
            assert!((g - w).abs() < 1e-14, "{g}, not {w}");
        }
    }
}

#[test]
fn rows_of_nobody_get_zeros() {
    for qkv in [Qkv::Separate, Qkv::Fused] {
        let op = Attention { qkv, ..PLAIN };
        for grad in both(&op, &inputs(&op)).2 {
            let columns = grad.shape[1];
            assert!(floats(&grad)[5 * columns..6 * columns].iter().all(|&x| x == 0.0));
            assert!(floats(&grad)[..5 * columns].iter().any(|&x| x != 0.0));
        }
    }
}
