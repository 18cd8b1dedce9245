//! Test cases of attention and its gradient: every head dimension of the model families, every form of inputs,
//! every mask, and sequences below, at and above a kernel's block sizes. Invariant: rotary tables have f32
//! angles, as in `RotaryTable`.

use super::{BATCHES, Case, Noise, Tolerance, UNIT};
use plimsoll_exec::reference::{Data, Tensor};
use plimsoll_graph::ops::*;
use plimsoll_graph::{Dim, Op};

/// (heads, head dim); 24 is no power of two, 3 heads have slopes of two ALiBi sets.
const HEADS: [(u32, u32); 6] = [(4, 8), (3, 16), (2, 24), (2, 32), (3, 64), (1, 128)];

/// (qkv, bias, rotary).
type Form = (Qkv, Bias, bool);

const FORMS: [Form; 8] = [
    (Qkv::Separate, Bias::None, true),
    (Qkv::Fused, Bias::Alibi, false),
    (Qkv::Separate, Bias::None, false),
    (Qkv::Fused, Bias::None, true),
    (Qkv::Separate, Bias::Alibi, false),
    (Qkv::Fused, Bias::None, false),
    (Qkv::Separate, Bias::Alibi, true),
    (Qkv::Fused, Bias::Alibi, true),
];

/// Windows below, at and above a vector of lanes and a block of keys; blocks that are whole vectors and blocks that
/// are not.
const MASKS: [Mask; 8] = [
    Mask::Causal,
    Mask::Window(1),
    Mask::Window(17),
    Mask::Window(192),
    Mask::Window(200),
    Mask::BlockSparse { block: 16, local: 2, global: 1 },
    Mask::BlockSparse { block: 50, local: 1, global: 2 },
    Mask::BlockSparse { block: 7, local: 3, global: 0 },
];

/// (heads, heads of keys and values, head dim).
const SHARED: [(u32, u32, u32); 6] = [(2, 2, 8), (4, 2, 16), (2, 1, 24), (2, 2, 40), (3, 1, 64), (2, 1, 128)];

/// Heads wider than the CPU's limit, which GPUs support: (shape, mask, index of the form). 250 columns are no multiple of
/// 4, so that rows are copied 4 bytes at a time.
const WIDE: [((u32, u32, u32), Mask, usize); 9] = [
    ((2, 1, 136), Mask::Causal, 0),
    ((3, 3, 160), Mask::Window(17), 7),
    ((4, 2, 192), Mask::Full, 3),
    ((4, 2, 192), Mask::BlockSparse { block: 16, local: 2, global: 1 }, 6),
    ((2, 2, 250), Mask::Causal, 1),
    ((2, 1, 256), Mask::Full, 0),
    ((2, 1, 256), Mask::Causal, 7),
    ((3, 1, 256), Mask::Window(40), 2),
    ((2, 2, 256), Mask::BlockSparse { block: 50, local: 1, global: 1 }, 6),
];

/// (shape, mask, index of the form, lengths)
type GradCase = ((u32, u32, u32), Mask, usize, &'static [u64]);

/// Gradients for kernels with rows and steps of 64 tokens: heads of 64 and 128 columns without ALiBi, one to three tiles of rows,
/// lengths at and about multiples of a tile, and empty sequences.
const TILES: [GradCase; 12] = [
    ((2, 1, 64), Mask::Full, 0, &[64, 65, 1, 130]),
    ((3, 3, 64), Mask::Full, 5, &[200, 0, 63]),
    ((4, 2, 64), Mask::Causal, 3, &[129, 0, 0, 128, 1]),
    ((2, 2, 64), Mask::Causal, 2, &[193, 64]),
    ((1, 1, 64), Mask::Window(17), 2, &[200, 3]),
    ((2, 1, 64), Mask::Window(100), 3, &[257]),
    ((2, 1, 128), Mask::Full, 0, &[128, 1, 129]),
    ((1, 1, 128), Mask::Full, 5, &[0, 191, 64]),
    ((2, 1, 128), Mask::Causal, 0, &[130, 64, 0, 65]),
    ((2, 2, 128), Mask::Causal, 5, &[257]),
    ((2, 1, 128), Mask::Window(70), 3, &[200, 2]),
    ((1, 1, 128), Mask::Window(1), 2, &[190, 64]),
];

/// All test cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (heads, head_dim)) in HEADS.into_iter().enumerate() {
        for (j, lengths) in BATCHES.into_iter().enumerate() {
            cases.push(attention(op((heads, heads, head_dim), FORMS[(i + j) % 8]), lengths, 1.0));
        }
    }
    // Every form on one batch.
    for form in FORMS {
        cases.push(attention(op((2, 2, 40), form), &[17, 64, 65, 1], 1.0));
    }
    // The widths of ESM-2 8M and 35M and of DNABERT-S.
    for (shape, form) in [((20, 20, 16), 0), ((20, 20, 24), 0), ((12, 12, 64), 1)] {
        cases.push(attention(op(shape, FORMS[form]), &[50, 33], 1.0));
    }
    // Peaked rows, and scores whose exponentials overflow f32 unless the maximum is subtracted first.
    for amplitude in [3.0, 30.0] {
        cases.push(attention(op((2, 2, 32), FORMS[0]), &[170, 2], amplitude));
        cases.push(attention(op((3, 3, 16), FORMS[1]), &[50, 170], amplitude));
        cases.push(attention(masked(Mask::Window(20), (4, 2, 16), FORMS[0]), &[50, 170], amplitude));
    }
    cases.extend(masks());
    cases.extend(gradients());
    cases.extend(several_spans());
    cases.extend(wide());
    cases.extend(tiles());
    cases
}

/// Every mask with shared heads, in turn with every form, on batches up to more blocks than one.
fn masks() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, mask) in MASKS.into_iter().enumerate() {
        for (j, lengths) in [&[1, 50, 2][..], &[170, 1], &[451]].into_iter().enumerate() {
            cases.push(attention(masked(mask, SHARED[(i + j) % 6], FORMS[(i + 3 * j) % 8]), lengths, 1.0));
        }
    }
    for (i, shape) in SHARED.into_iter().enumerate() {
        cases.push(attention(masked(Mask::Full, shape, FORMS[i]), &[50, 33], 1.0));
    }
    cases
}

/// Attention and its gradient with two and with six spans in each sequence, as the frames of a caller are.
fn several_spans() -> Vec<Case> {
    let of = |each: u64, lengths: &[u64], i: usize| {
        let forward = op((3, 3, 64), FORMS[i]);
        let narrow = op((2, 2, 16), FORMS[i]);
        [
            attention_of(forward, lengths, 1.0, each),
            attention_of(narrow, lengths, 1.0, each),
            gradient_of(forward, lengths, each),
        ]
    };
    let six = [166, 166, 166, 166, 166, 166, 33, 33, 33, 33, 33, 33];
    [of(2, &[17, 64, 1, 30], 0), of(6, &six, 0), of(6, &[32; 18], 7)].concat()
}

/// Wide heads and their gradients, on batches below and above a block's queries and a tile's keys.
pub fn wide() -> Vec<Case> {
    let cases = |(shape, mask, form): ((u32, u32, u32), Mask, usize)| {
        let op = masked(mask, shape, FORMS[form]);
        let of = |lengths: &[u64]| [attention(op, lengths, 1.0), gradient(op, lengths)];
        [of(&[1, 30, 2]), of(&[97, 1, 33])].concat()
    };
    WIDE.into_iter().flat_map(cases).collect()
}

/// The gradients of [`TILES`].
pub fn tiles() -> Vec<Case> {
    let of = |(shape, mask, form, lengths): GradCase| gradient(masked(mask, shape, FORMS[form]), lengths);
    TILES.into_iter().map(of).collect()
}

/// Every mask, form and head dim; batches about a kernel's blocks of queries and keys.
fn gradients() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, mask) in MASKS.into_iter().chain([Mask::Full]).enumerate() {
        for (j, lengths) in [&[1, 50, 2][..], &[129, 1, 33], &[385]].into_iter().enumerate() {
            cases.push(gradient(masked(mask, SHARED[(i + 2 * j) % 6], FORMS[(i + 3 * j) % 8]), lengths));
        }
    }
    for form in FORMS {
        cases.push(gradient(masked(Mask::Causal, (2, 1, 40), form), &[17, 64, 65, 1]));
        cases.push(gradient(op((2, 2, 24), form), &[31, 1, 128, 192]));
    }
    for (i, (heads, head_dim)) in HEADS.into_iter().enumerate() {
        cases.push(gradient(op((heads, heads, head_dim), FORMS[i]), &[50, 170]));
    }
    cases
}

fn op((heads, kv_heads, head_dim): (u32, u32, u32), (qkv, bias, rotary): Form) -> Attention {
    let scale = (head_dim as f32).sqrt().recip();
    Attention { heads, kv_heads, head_dim, scale, mask: Mask::Full, bias, rotary, qkv }
}

fn masked(mask: Mask, shape: (u32, u32, u32), form: Form) -> Attention {
    Attention { mask, ..op(shape, form) }
}

/// A case of attention. Tolerance: c = 4; `k` counts the terms of a score and of an output row. An error in a
/// score is a relative error of its softmax weight, so the scale grows with the scores, which are of the order
/// of the amplitude squared.
fn attention(op: Attention, lengths: &[u64], amplitude: f32) -> Case {
    attention_of(op, lengths, amplitude, 1)
}

/// As [`attention`], with `each` of the spans in every sequence.
fn attention_of(op: Attention, lengths: &[u64], amplitude: f32, each: u64) -> Case {
    let name = format!("{op:?}, {lengths:?} by {each}, amplitude {amplitude}");
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let k = u64::from(op.head_dim) + longest;
    let tolerance = Tolerance { c: 4.0, k, scale: amplitude * amplitude };
    let case = Case::new(name, Op::Attention(op), lengths, slack(&op), tolerance);
    let case = case.with_spans_of_a_sequence(each);
    inputs(case, &op, lengths, Noise { amplitude, ..UNIT })
}

fn slack(op: &Attention) -> u64 {
    u64::from(op.head_dim / 8 % 2) * 5
}

/// Adds the operands q, k, v, spans and rotary tables.
fn inputs(mut case: Case, op: &Attention, lengths: &[u64], noise: Noise) -> Case {
    for (i, columns) in op.columns().into_iter().enumerate() {
        let noise = if i == 2 { UNIT } else { noise };
        case = case.noise(&[Dim::Tokens(1), Dim::Fixed(columns)], noise);
    }
    case = case.spans(lengths);
    if op.rotary {
        for of in [f64::cos, f64::sin] {
            case = with_table(case, op.head_dim, of);
        }
    }
    case
}

/// A case of the gradient of attention, with noise as `do`, and the outputs of the reference's forward pass
/// rounded to f32.
///
/// Tolerance: c = 8; `k` counts the terms of a score, a row and a column. An error in a score or in `do . v`,
/// which are sums over the head dimension, affects every term of the outer sum; shared key and value heads add
/// the terms of their query heads.
fn gradient(op: Attention, lengths: &[u64]) -> Case {
    gradient_of(op, lengths, 1)
}

/// As [`gradient`], with `each` of the spans in every sequence.
fn gradient_of(op: Attention, lengths: &[u64], each: u64) -> Case {
    let name = format!("gradient of {op:?}, {lengths:?} by {each}");
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let k = u64::from(op.head_dim) + longest * u64::from(op.heads / op.kv_heads);
    let grad = AttentionGrad { forward: op };
    let case = Case::new(name, Op::AttentionGrad(grad), lengths, slack(&op), Tolerance::sum(8.0, k));
    let case = case.with_spans_of_a_sequence(each);
    let width = [Dim::Tokens(1), Dim::Fixed(op.width())];
    let case = inputs(case.noise(&width, UNIT), &op, lengths, UNIT);
    let forward = Case { op: Op::Attention(op), ins: case.ins[1..].to_vec(), ..case.clone() };
    let rounded = |t: &Tensor| t.rounded().expect("floats").into_iter().map(f64::from).collect();
    let [o, lse] = [0, 1].map(|i| Data::Float(rounded(&forward.reference()[i])));
    let heads = [Dim::Tokens(1), Dim::Fixed(op.heads.into())];
    case.operand(&width, o, false).operand(&heads, lse, false)
}

/// Adds a rotary table with the values `of(p f_j)` for position p, f_j = 10000^(-2j/d) (Su et al. 2021,
/// arXiv:2104.09864).
fn with_table(case: Case, head_dim: u32, of: fn(f64) -> f64) -> Case {
    let longest = case.bounds.longest;
    let half = head_dim / 2;
    let frequency = |j: u32| 10_000_f64.powf(-f64::from(j) / f64::from(half)) as f32;
    let row = |p: u64| (0..half).map(move |j| f64::from(of(f64::from(p as f32 * frequency(j))) as f32));
    let data = (0..longest).flat_map(row).collect();
    case.operand(&[Dim::Fixed(longest), Dim::Fixed(u64::from(half))], Data::Float(data), false)
}
