//! Tests of attention: values against an f64 reference, and equal bits for every way to pack sequences.

#[cfg(target_arch = "x86_64")]
mod registers;
#[cfg(target_arch = "x86_64")]
mod tiles;

use super::{close, machines, numbers, same_bits, workspace};
use crate::attention::*;
use crate::{Bf16, Cpu, Element, Rows, RowsMut, rows::rope};
use plimsoll_exec::half::{bf16_to_f32, f32_to_bf16};
use plimsoll_graph::ops::Mask;

/// An attention problem: configuration, fused q, k and v (T, 3D), and the tables of rotary embeddings and ALiBi
/// slopes.
struct Case {
    heads: usize,
    hd: usize,
    scale: f32,
    mask: Mask,
    rope: bool,
    alibi: bool,
    qkv: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    slopes: Vec<f32>,
}

/// Positions in the rotary tables.
const LONGEST: usize = 1000;

impl Case {
    fn new(heads: usize, hd: usize, tokens: usize, rope: bool, alibi: bool) -> Case {
        let half = hd / 2;
        let freq: Vec<f32> = (0..half).map(|j| 1e4f32.powf(-(j as f32) / half as f32)).collect();
        let mut cos = vec![0.0; LONGEST * half];
        let mut sin = vec![0.0; LONGEST * half];
        rope::table(&freq, LONGEST, &mut cos, &mut sin);
        let qkv = numbers(11, tokens * 3 * heads * hd).iter().map(|v| v * 2.0).collect();
        let slopes = (1..=heads).map(|h| 0.5f32.powi(h as i32)).collect();
        Case {
            heads,
            hd,
            scale: 1.0 / (hd as f32).sqrt(),
            mask: Mask::Full,
            rope,
            alibi,
            qkv,
            cos,
            sin,
            slopes,
        }
    }

    fn config(&self) -> AttentionConfig<'_> {
        AttentionConfig {
            heads: self.heads,
            kv_heads: self.heads,
            mask: self.mask,
            head_dim: self.hd,
            scale: self.scale,
            rope: self.rope.then_some(RotaryTables { cos: &self.cos, sin: &self.sin }),
            slopes: self.alibi.then_some(&self.slopes[..]),
        }
    }

    /// Returns o and lse of `tokens` rows of the case's data from row `from` on. Rows outside of `spans` stay 5.
    fn run(&self, cpu: &Cpu, from: usize, tokens: usize, spans: &[[u32; 2]]) -> (Vec<f32>, Vec<f32>) {
        let d = self.heads * self.hd;
        let x = Rows::new(&self.qkv[from * 3 * d..], tokens, 3 * d, 3 * d);
        let mut o = vec![5.0; tokens * d];
        let mut lse = vec![5.0; tokens * self.heads];
        let mut scratch = workspace(cpu, workspace_bytes(self.hd));
        let operands = AttentionOperands {
            q: x.columns(0, d),
            k: x.columns(d, d),
            v: x.columns(2 * d, d),
            spans,
            o: RowsMut::new(&mut o, tokens, d, d),
            lse: Some(RowsMut::new(&mut lse, tokens, self.heads, self.heads)),
        };
        attention(cpu, self.config(), operands, &mut scratch);
        (o, lse)
    }

    /// Returns the gradient of the fused rows (T, 3D), for a gradient of o that is uniform noise.
    fn gradient(&self, cpu: &Cpu, from: usize, tokens: usize, spans: &[[u32; 2]]) -> Vec<f32> {
        let h = self.heads;
        let d = self.heads * self.hd;
        let x = Rows::new(&self.qkv[from * 3 * d..], tokens, 3 * d, 3 * d);
        let (o, lse) = self.run(cpu, from, tokens, spans);
        let noise = numbers(12, (from + tokens) * d);
        let saved = SavedForward {
            q: x.columns(0, d),
            k: x.columns(d, d),
            v: x.columns(2 * d, d),
            o: Rows::new(&o, tokens, d, d),
            lse: Rows::new(&lse, tokens, h, h),
            gradient: Rows::new(&noise[from * d..], tokens, d, d),
            spans,
        };
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![5.0; tokens * d]);
        let [q, k, v] = [&mut dq, &mut dk, &mut dv].map(|x| Some(RowsMut::new(x, tokens, d, d)));
        let mut scratch = workspace(cpu, grad_workspace_bytes(self.hd));
        attention_grad(cpu, self.config(), saved, AttentionGradients { q, k, v }, &mut scratch);
        let row = |t: usize| [&dq, &dk, &dv].map(|x| &x[t * d..(t + 1) * d]).concat();
        (0..tokens).flat_map(row).collect()
    }

    /// One head of q, k or v (`which` 0, 1 or 2) of row `t`, scaled, with rotary embedding for position `pos`
    /// where the case has it, in f64. Values are not rotated.
    fn rotated(&self, which: usize, t: usize, pos: usize, head: usize, scale: f32) -> Vec<f64> {
        let at = (t * 3 + which) * self.heads * self.hd + head * self.hd;
        let x: Vec<f64> = self.qkv[at..][..self.hd].iter().map(|&v| f64::from(v * scale)).collect();
        if !self.rope || which == 2 {
            return x;
        }
        let half = self.hd / 2;
        let angle = |j: usize| (f64::from(self.cos[pos * half + j]), f64::from(self.sin[pos * half + j]));
        let low = (0..half).map(|j| x[j] * angle(j).0 - x[j + half] * angle(j).1);
        low.chain((0..half).map(|j| x[j + half] * angle(j).0 + x[j] * angle(j).1)).collect()
    }

    /// o and lse in f64, by the definition of attention with full masks. Rows outside of `spans` are 5.
    fn reference(&self, from: usize, tokens: usize, spans: &[[u32; 2]]) -> (Vec<f64>, Vec<f64>) {
        let h = self.heads;
        let hd = self.hd;
        let mut o = vec![5.0; tokens * h * hd];
        let mut lse = vec![5.0; tokens * h];
        for &[start, end] in spans {
            let (start, n) = (start as usize, (end - start) as usize);
            for head in 0..h {
                let all = |which, scale| -> Vec<Vec<f64>> {
                    (0..n).map(|i| self.rotated(which, from + start + i, i, head, scale)).collect()
                };
                let q = all(0, self.scale);
                let k = all(1, 1.0);
                let v = all(2, 1.0);
                for i in 0..n {
                    let slope = if self.alibi { f64::from(self.slopes[head]) } else { 0.0 };
                    let score = |j: usize| {
                        let dot: f64 = q[i].iter().zip(&k[j]).map(|(a, b)| a * b).sum();
                        dot - slope * (i as f64 - j as f64).abs()
                    };
                    let scores: Vec<f64> = (0..n).map(score).collect();
                    let top = scores.iter().copied().fold(f64::MIN, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                    lse[(start + i) * h + head] = top + sum.ln();
                    for d in 0..hd {
                        let mean = (0..n).map(|j| (scores[j] - top).exp() * v[j][d]).sum::<f64>();
                        o[((start + i) * h + head) * hd + d] = mean / sum;
                    }
                }
            }
        }
        (o, lse)
    }
}

/// With n equal scores a, the lse is a + ln n: the logarithm of `libm`, added in f64 and rounded once. Rounding the
/// logarithm first, or taking the platform's, gives other bits for some n.
#[test]
fn lse_is_rounded_once_from_the_logarithm_of_libm() {
    let a = 0.7_f32;
    for tokens in 1..200 {
        let mut case = Case::new(1, 2, tokens, false, false);
        case.scale = 1.0;
        case.qkv = [a, 0.0, 1.0, 0.0, 0.0, 0.0].repeat(tokens);
        let wanted = (f64::from(a) + libm::log(tokens as f64)) as f32;
        for cpu in machines() {
            let (_, lse) = case.run(&cpu, 0, tokens, &[[0, tokens as u32]]);
            same_bits(&lse, &vec![wanted; tokens], &format!("{tokens} tokens on {}", cpu.isa().name()));
        }
    }
}

#[test]
fn attention_is_softmax_of_scores_times_values() {
    // Lengths just below, at and just above the sizes of strip (14), vector (16), panel (32), tile (192) and
    // block (224).
    let spans = [[0, 1], [1, 15], [17, 49], [49, 82], [82, 274], [274, 467], [467, 467], [467, 927]];
    for (hd, rope, alibi) in
        [(8, true, false), (24, true, false), (64, false, true), (17, false, false), (128, true, true)]
    {
        let case = Case::new(2, hd, 930, rope, alibi);
        let (want, want_lse) = case.reference(0, 930, &spans);
        for cpu in machines() {
            let (o, lse) = case.run(&cpu, 0, 930, &spans);
            let what = format!("{} head dim {hd}", cpu.isa().name());
            // |q k| <= 4 sqrt(hd), so scores have an error of about 4 eps sqrt(hd). The error of o is that error
            // times |v| <= 2; the sums over S keys add a few eps sqrt(S).
            let tolerance = f64::from(f32::EPSILON) * 8.0 * (hd as f64).sqrt();
            close(&o, &want, tolerance, &what);
            close(&lse, &want_lse, 2.0 * tolerance, &format!("{what} lse"));
        }
    }
}

/// bf16 elements are widened exactly and o is rounded once, so attention of bf16 has the bits of f32 attention,
/// rounded, with every mask.
#[test]
fn in_bf16_it_is_that_of_f32_rounded() {
    let spans = [[2, 17], [17, 18], [18, 290]];
    let sparse = Mask::BlockSparse { block: 20, local: 2, global: 3 };
    let forms =
        [(Mask::Full, 16, true), (Mask::Causal, 40, false), (Mask::Window(30), 24, true), (sparse, 17, false)];
    for (mask, hd, rope) in forms {
        let heads = 4;
        let kv_heads = 2;
        let t = 291;
        let case = Case { mask, ..Case::new(heads, hd, t, rope, !rope) };
        let config = AttentionConfig { kv_heads, ..case.config() };
        let columns = [(0, heads * hd), (heads * hd, kv_heads * hd), ((heads + kv_heads) * hd, kv_heads * hd)];
        let ld = 3 * heads * hd;
        let narrow: Vec<Bf16> = case.qkv.iter().map(|&x| Bf16(f32_to_bf16(x))).collect();
        let wide: Vec<f32> = narrow.iter().map(|x| bf16_to_f32(x.0)).collect();
        for cpu in machines() {
            let (o, lse) = fused(&cpu, config, columns, Rows::new(&narrow, t, ld, ld), &spans, Bf16(0x40a0));
            let (want, want_lse) = fused(&cpu, config, columns, Rows::new(&wide, t, ld, ld), &spans, 5.0);
            let want: Vec<Bf16> = want.iter().map(|&x| Bf16(f32_to_bf16(x))).collect();
            assert!(o == want, "{mask:?} {hd} on {}", cpu.isa().name());
            same_bits(&lse, &want_lse, "lse");
        }
    }
}

/// Returns o and lse of q, k and v that are `columns` (first, number) of one matrix. Rows of o outside of the
/// spans keep the value `before`.
fn fused<E: Element>(
    cpu: &Cpu,
    config: AttentionConfig<'_>,
    columns: [(usize, usize); 3],
    x: Rows<'_, E>,
    spans: &[[u32; 2]],
    before: E,
) -> (Vec<E>, Vec<f32>) {
    let t = x.rows();
    let h = config.heads;
    let d = config.heads * config.head_dim;
    let mut o = vec![before; t * d];
    let mut lse = vec![5.0; t * h];
    let [q, k, v] = columns.map(|(at, n)| x.columns(at, n));
    let mut scratch = workspace(cpu, workspace_bytes(config.head_dim));
    let out = RowsMut::new(&mut o, t, d, d);
    let sums = RowsMut::new(&mut lse, t, h, h);
    let operands = AttentionOperands { q, k, v, spans, o: out, lse: Some(sums) };
    attention(cpu, config, operands, &mut scratch);
    (o, lse)
}

#[test]
fn a_sequence_has_the_same_bits_in_any_company() {
    for (rope, alibi) in [(true, false), (false, true)] {
        let case = Case::new(3, 24, 1200, rope, alibi);
        let spans = [[3, 60], [60, 250], [250, 251], [251, 760], [760, 930], [933, 1200]];
        let (all, all_lse) = case.run(&Cpu::new(1), 0, 1200, &spans);
        for cpu in machines() {
            let (all, all_lse) = match cpu.isa().has_fma() {
                true => (all.clone(), all_lse.clone()),
                false => case.run(&cpu, 0, 1200, &spans),
            };
            for [start, end] in spans {
                let n = (end - start) as usize;
                let (o, lse) = case.run(&cpu, start as usize, n, &[[0, n as u32]]);
                same_bits(&o, &all[start as usize * 72..end as usize * 72], "o");
                same_bits(&lse, &all_lse[start as usize * 3..end as usize * 3], "lse");
            }
            assert!(all[..3 * 72].iter().chain(&all[930 * 72..933 * 72]).all(|&v| v == 5.0));
        }
    }
}

#[test]
fn a_gradient_has_the_same_bits_in_any_company() {
    let sparse = Mask::BlockSparse { block: 20, local: 2, global: 3 };
    for (mask, rope, alibi) in [
        (Mask::Full, true, false),
        (Mask::Causal, true, false),
        (Mask::Window(150), false, true),
        (sparse, true, true),
    ] {
        let case = Case { mask, ..Case::new(2, 24, 800, rope, alibi) };
        let spans = [[3, 60], [60, 250], [250, 251], [251, 640], [643, 800]];
        let all = case.gradient(&Cpu::new(1), 0, 800, &spans);
        for cpu in machines() {
            let all = match cpu.isa().has_fma() {
                true => all.clone(),
                false => case.gradient(&cpu, 0, 800, &spans),
            };
            for [start, end] in spans {
                let n = (end - start) as usize;
                let alone = case.gradient(&cpu, start as usize, n, &[[0, n as u32]]);
                same_bits(&alone, &all[start as usize * 144..end as usize * 144], &format!("{mask:?}"));
            }
            assert!(all[..3 * 144].iter().chain(&all[640 * 144..643 * 144]).all(|&v| v == 0.0));
            assert!(all.iter().all(|v| v.is_finite()));
        }
    }
}

#[test]
fn what_is_not_finite_shows() {
    let mut case = Case::new(1, 16, 40, false, false);
    case.qkv[20 * 48 + 16] = f32::NAN; // one key
    for cpu in machines() {
        let (o, _) = case.run(&cpu, 0, 40, &[[0, 15], [15, 40]]);
        assert!(o[..15 * 16].iter().all(|v| v.is_finite()), "the neighbour is untouched");
        assert!(o[15 * 16..].iter().all(|v| v.is_nan()), "its own sequence shows it");
        let gradient = case.gradient(&cpu, 0, 40, &[[0, 15], [15, 40]]);
        assert!(gradient[..15 * 48].iter().all(|v| v.is_finite()), "the neighbour is untouched");
        assert!(gradient[15 * 48..].iter().all(|v| v.is_nan()), "its own sequence shows it");
    }
}
