//! Cases of attention: every head dim of the model families, every form of its inputs, sequences below, at
//! and above the blocks of a kernel. Invariant: rotary tables are of f32 angles, as `RotaryTable` has them.

use super::{BATCHES, Case, Noise, Tolerance, UNIT};
use graph::ops::*;
use graph::{Dim, Op};
use plimsoll_exec::reference::Data;

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

/// All cases of this file.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, heads) in HEADS.into_iter().enumerate() {
        for (j, lengths) in BATCHES.into_iter().enumerate() {
            cases.push(attention(heads, lengths, FORMS[(i + j) % 8], 1.0));
        }
    }
    // Every form on one batch.
    for form in FORMS {
        cases.push(attention((2, 40), &[17, 64, 65, 1], form, 1.0));
    }
    // The widths of ESM-2 8M and 35M and of DNABERT-S.
    cases.push(attention((20, 16), &[50, 33], FORMS[0], 1.0));
    cases.push(attention((20, 24), &[50, 33], FORMS[0], 1.0));
    cases.push(attention((12, 64), &[50, 33], FORMS[1], 1.0));
    // Peaked rows, and scores whose exponentials overflow f32 unless the maximum is subtracted.
    for amplitude in [3.0, 30.0] {
        cases.push(attention((2, 32), &[170, 2], FORMS[0], amplitude));
        cases.push(attention((3, 16), &[50, 170], FORMS[1], amplitude));
    }
    cases
}

/// c = 4, K: the terms of a score and of a row; an error in a score is a relative error of its weight, hence
/// the scale: scores are about as large as the amplitude squared.
fn attention((heads, head_dim): (u32, u32), lengths: &[u64], form: Form, amplitude: f32) -> Case {
    let (qkv, bias, rotary) = form;
    let name = format!("attention {heads} x {head_dim}, {lengths:?}, {form:?}, amplitude {amplitude}");
    let scale = (head_dim as f32).sqrt().recip();
    let op = Attention { heads, head_dim, scale, mask: Mask::Full, bias, rotary, qkv };
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let k = u64::from(head_dim) + longest;
    let tolerance = Tolerance { c: 4.0, k, scale: amplitude * amplitude };
    let slack = u64::from(head_dim / 8 % 2) * 5;
    let mut case = Case::new(name, Op::Attention(op), lengths, slack, tolerance);
    let noise = Noise { amplitude, ..UNIT };
    let columns = |n: u64| [Dim::Tokens(1), Dim::Fixed(n * op.width())];
    case = match qkv {
        Qkv::Separate => case.noise(&columns(1), noise).noise(&columns(1), noise).noise(&columns(1), UNIT),
        Qkv::Fused => case.noise(&columns(3), noise),
    };
    case = case.spans(lengths);
    if rotary {
        for of in [f64::cos, f64::sin] {
            case = with_table(case, head_dim, of);
        }
    }
    case
}

/// With `of(p f_j)`, f_j = 10000^(-2j/d) (Su et al. 2021).
fn with_table(case: Case, head_dim: u32, of: fn(f64) -> f64) -> Case {
    let (longest, half) = (case.bounds.longest, head_dim / 2);
    let frequency = |j: u32| 10_000_f64.powf(-f64::from(j) / f64::from(half)) as f32;
    let row = |p: u64| (0..half).map(move |j| f64::from(of(f64::from(p as f32 * frequency(j))) as f32));
    let data = (0..longest).flat_map(row).collect();
    case.operand(&[Dim::Fixed(longest), Dim::Fixed(u64::from(half))], Data::Float(data), false)
}
