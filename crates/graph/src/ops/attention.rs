//! Multi-head attention over packed sequences (Vaswani et al. 2017), computed without an S x S buffer
//! (Dao et al. 2022): keys and values are visited in blocks with a running maximum and sum.

use super::terminal::f32_is;
use super::*;
use crate::Op;
use crate::limits::MAX_DIM;
use serde::{Deserialize, Serialize};

/// Multi-head attention with grouped keys and values. For every sequence with rows a..b, every head h and every
/// row i in a..b: `o[i,h] = sum_j softmax_j(score(i,j)) v[j,g]` and `lse[i,h] = ln sum_j exp(score(i,j))`,
/// where j runs over the keys in a..b that the mask admits for i, and `score(i,j) = rot(scale q[i,h], i-a) .
/// rot(k[j,g], j-a) - slope[h] |i-j|`.
///
/// The G heads of k and v are shared by the H heads of q in order: g = h / (H / G) (Ainslie et al. 2023). `rot`
/// is rotary embedding in its half-split form (Su et al. 2021; ESM-2 scales q before rotating it). The slopes
/// are those of ALiBi (Press et al. 2022), applied on both sides of the query as in MosaicBERT; under a causal
/// mask this equals the form of the paper.
///
/// Inputs: q: (T, H*d), k, v: (T, G*d), or one fused qkv: (T, (H + 2 G) * d); spans: (S, 2), or (n S, 2) where a
/// sequence has n spans that do not attend to each other; with `rotary` cos and sin: (longest, d/2) each, in f32 as
/// computed by [`RotaryTable`]. Outputs: o: (T, H*d), lse: (T, H) in
/// f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// H, the number of query heads.
    pub heads: u32,
    /// G, the number of key and value heads; a divisor of H.
    pub kv_heads: u32,
    /// d, the columns of one head.
    pub head_dim: u32,
    /// Factor applied to q.
    pub scale: f32,
    /// Which keys each query attends to.
    pub mask: Mask,
    /// Bias added to the scores.
    pub bias: Bias,
    /// Whether rotary embedding is applied to q and k.
    pub rotary: bool,
    /// Storage of q, k and v.
    pub qkv: Qkv,
}

/// Bias added to attention scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    /// No bias.
    None,
    /// ALiBi: `-slope[h] |i-j|`, with the slopes of [`alibi_slopes`].
    Alibi,
}

/// Storage of q, k and v.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Qkv {
    /// Three matrices.
    Separate,
    /// One matrix with q, k and v concatenated along the columns.
    Fused,
}

/// ALiBi slopes of `heads` heads: `2^(-8 i / n)` for a power of two n; otherwise the slopes of the largest
/// power of two below `heads`, followed by every second slope of twice that power (Press et al. 2022, reference
/// code).
pub fn alibi_slopes(heads: u32) -> impl Iterator<Item = f32> {
    let power = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let first = (1..=power).map(move |i| alibi_slope(i, power));
    // The slopes with odd numbers of twice the power lie between those of the first heads, so no slope occurs twice.
    let rest = (0..heads - power).map(move |i| alibi_slope(2 * i + 1, 2 * power));
    first.chain(rest)
}

/// Slope `i` of `n` heads, where n is a power of two.
fn alibi_slope(i: u32, n: u32) -> f32 {
    (-8.0 * f64::from(i) / f64::from(n)).exp2() as f32
}

impl Attention {
    /// Columns of q and o: H*d.
    #[expect(clippy::arithmetic_side_effects, reason = "a product of two 32-bit numbers")]
    pub fn width(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.head_dim)
    }

    /// Columns of k and of v: G*d.
    #[expect(clippy::arithmetic_side_effects, reason = "a product of two 32-bit numbers")]
    pub fn kv_width(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.head_dim)
    }

    /// Columns of the matrices that hold q, k and v.
    pub fn columns(&self) -> Vec<u64> {
        let q = self.width();
        let kv = self.kv_width();
        match self.qkv {
            Qkv::Separate => vec![q, kv, kv],
            // A saturated sum is above the limit of a dimension, which the graph is checked against.
            Qkv::Fused => vec![q.saturating_add(kv.saturating_mul(2))],
        }
    }

    /// Number of inputs that hold q, k and v.
    pub fn operands(&self) -> usize {
        match self.qkv {
            Qkv::Separate => 3,
            Qkv::Fused => 1,
        }
    }

    /// Number of inputs: q, k and v, spans, and the rotary tables.
    pub fn inputs(&self) -> usize {
        self.operands() + 1 + if self.rotary { 2 } else { 0 }
    }

    /// Multiply-adds of one of the two matmuls (scores, or weighted values) over all heads in a step of
    /// `counts`. Every token is assumed to be in a sequence of the longest length, the worst case of a packed
    /// step.
    pub(super) fn matmul_flops(&self, bounds: &Bounds, counts: Counts) -> f64 {
        let longest = bounds.longest.min(counts.tokens).max(1);
        let pairs_of_query = self.mask.pairs(longest) as f64 / longest as f64;
        (counts.tokens as f64 * pairs_of_query).floor() * self.width() as f64
    }

    fn check(&self) -> Result<(), RuleError> {
        if self.width() > MAX_DIM || self.kv_width() > MAX_DIM {
            let Self { heads, kv_heads, head_dim, .. } = self;
            return Err(RuleError(format!("cannot have {heads} and {kv_heads} heads of {head_dim}")));
        }
        if self.heads == 0 || self.head_dim == 0 || (self.rotary && !self.head_dim.is_multiple_of(2)) {
            return Err(RuleError(format!("cannot have {} heads of {}", self.heads, self.head_dim)));
        }
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let Self { heads, kv_heads, .. } = self;
            return Err(RuleError(format!(
                "cannot share {kv_heads} heads of keys and values among {heads} heads"
            )));
        }
        self.mask.check()
    }
}

impl OpRules for Attention {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let operands = self.operands();
        arity(ins, self.inputs())?;
        self.check()?;
        for (x, columns) in ins.iter().zip(self.columns()) {
            float("q, k, v", x)?;
            shape_is("q, k, v", x, &[Dim::Tokens(1), Dim::Fixed(columns)])?;
        }
        spans_of_attention(ins[operands])?;
        for table in &ins[operands + 1..] {
            let half = u64::from(self.head_dim / 2);
            f32_is("a rotary table", table, &[Dim::Fixed(bounds.longest), Dim::Fixed(half)])?;
        }
        let rows = Dim::Tokens(1);
        Ok(vec![
            TensorSpec::activation([rows, Dim::Fixed(self.width())], ins[0].dtype),
            TensorSpec::activation([rows, Dim::Fixed(u64::from(self.heads))], DType::F32),
        ])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        if cx.output_grads[1].is_some() {
            return Err(NotDifferentiable);
        }
        let mut inputs = vec![cx.dy()?];
        inputs.extend(&cx.node.inputs);
        inputs.extend([cx.output(0)?, cx.output(1)?]);
        let grads = cx.builder.node(Op::AttentionGrad(AttentionGrad { forward: *self }), &inputs);
        // The spans and the rotary tables are constants without a gradient.
        for (slot, grad) in cx.input_grads.iter_mut().zip(grads).take(self.operands()) {
            *slot = Some(grad);
        }
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], bounds: &Bounds, counts: Counts) -> Cost {
        // Two matmuls (scores and weighted values), two operations per multiply-add.
        streaming(4.0 * self.matmul_flops(bounds, counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_follow_the_mask() {
        let bounds = Bounds { tokens: 1000, sequences: 10, longest: 100, packs: 1 };
        let full = Attention {
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            scale: 1.0,
            mask: Mask::Full,
            bias: Bias::None,
            rotary: false,
            qkv: Qkv::Separate,
        };
        let of = |mask, tokens| {
            Attention { mask, ..full }.matmul_flops(&bounds, Counts { tokens, sequences: 1, packs: 1 })
        };
        assert_eq!(of(Mask::Full, 1000), (1000 * 100 * 32) as f64);
        assert_eq!(of(Mask::Full, 10), (10 * 10 * 32) as f64);
        assert_eq!(of(Mask::Causal, 1000), (10 * 5050 * 32) as f64);
        assert_eq!(of(Mask::Window(1), 1000), (1000 * 32) as f64);
        assert_eq!(of(Mask::Full, 0), 0.0);
    }

    #[test]
    fn slopes_of_dnabert_s() {
        let powers: Vec<f32> = alibi_slopes(12).map(f32::log2).collect();
        let wanted = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -0.5, -1.5, -2.5, -3.5];
        for (p, w) in powers.iter().zip(wanted) {
            assert!((p - w).abs() < 1e-6, "{powers:?}");
        }
        assert_eq!(alibi_slopes(4).collect::<Vec<_>>(), [0.25, 0.0625, 0.015625, 0.00390625]);
    }
}
