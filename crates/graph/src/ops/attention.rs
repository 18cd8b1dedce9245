//! Multi-head attention over packed sequences (Vaswani et al. 2017), computed without an S x S buffer
//! (Dao et al. 2022): keys and values are visited in blocks with a running maximum and sum.

use super::*;
use serde::{Deserialize, Serialize};

/// For every sequence s with rows a..b, every head h and row i in a..b:
/// `o[i,h] = sum_j softmax_j(score(i,j)) v[j,h]`, `lse[i,h] = ln sum_j exp(score(i,j))`, j in a..b, with
/// `score(i,j) = rot(scale q[i,h], i-a) . rot(k[j,h], j-a) - slope[h] |i-j|`.
///
/// `rot` is rotary embedding in its half-split form (Su et al. 2021; ESM-2 scales q before rotating it),
/// the slopes are ALiBi's (Press et al. 2022) on both sides, as MosaicBERT has them.
///
/// Inputs: q, k, v: (T, H*d) each, or one qkv: (T, 3*H*d); spans: (S, 2); with `rotary` cos and sin:
/// (longest, d/2) each. Outputs: o (T, H*d), lse (T, H) in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// H.
    pub heads: u32,
    /// d.
    pub head_dim: u32,
    /// Factor of q.
    pub scale: f32,
    /// Which keys a query sees.
    pub mask: Mask,
    /// What is added to the scores.
    pub bias: Bias,
    /// Whether q and k are rotated.
    pub rotary: bool,
    /// How q, k and v come.
    pub qkv: Qkv,
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// All of its own sequence.
    Full,
}

/// What is added to the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    /// Nothing.
    None,
    /// `-slope[h] |i-j|`, slopes by [`alibi_slopes`].
    Alibi,
}

/// How q, k and v come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Qkv {
    /// As three matrices.
    Separate,
    /// Side by side in the rows of one matrix.
    Fused,
}

/// ALiBi slopes of `heads` heads: `2^(-8 i / n)` for a power of two n, else those of the power of two
/// below, followed by every second one of twice as many (Press et al. 2022, reference code).
pub fn alibi_slopes(heads: u32) -> impl Iterator<Item = f32> {
    let whole = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let slope = |i: u32, n: u32| (-8.0 * f64::from(i) / f64::from(n)).exp2() as f32;
    let first = (1..=whole).map(move |i| slope(i, whole));
    let rest = (0..heads - whole).map(move |i| slope(2 * i + 1, 2 * whole));
    first.chain(rest)
}

impl Attention {
    /// Columns of q, k, v and o: H*d.
    pub fn width(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.head_dim)
    }

    /// How many of the inputs hold q, k and v.
    pub fn operands(&self) -> usize {
        match self.qkv {
            Qkv::Separate => 3,
            Qkv::Fused => 1,
        }
    }
}

impl OpRules for Attention {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let operands = self.operands();
        arity(ins, operands + 1 + if self.rotary { 2 } else { 0 })?;
        if self.heads == 0 || self.head_dim == 0 || (self.rotary && !self.head_dim.is_multiple_of(2)) {
            return Err(RuleError(format!("cannot have {} heads of {}", self.heads, self.head_dim)));
        }
        let columns = self.width() * if operands == 1 { 3 } else { 1 };
        for x in &ins[..operands] {
            float("q, k, v", x)?;
            shape_is("q, k, v", x, &[Dim::Tokens(1), Dim::Fixed(columns)])?;
        }
        spans(ins[operands])?;
        for table in &ins[operands + 1..] {
            let half = u64::from(self.head_dim / 2);
            shape_is("a rotary table", table, &[Dim::Fixed(bounds.longest), Dim::Fixed(half)])?;
        }
        let rows = Dim::Tokens(1);
        Ok(vec![
            TensorSpec::activation([rows, Dim::Fixed(self.width())], ins[0].dtype),
            TensorSpec::activation([rows, Dim::Fixed(u64::from(self.heads))], DType::F32),
        ])
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], bounds: &Bounds, counts: Counts) -> Cost {
        // Every token against the longest sequence: the worst case of a packed step.
        let pairs = counts.tokens * bounds.longest.min(counts.tokens);
        streaming(4 * pairs * self.width(), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        // Heads are independent, so q, k and v may be cut by columns; a fused qkv may not.
        let qkv = &ins[..self.operands()];
        if qkv.iter().any(|&p| p != qkv[0]) {
            return Err(ShardError("q, k and v must be placed alike"));
        }
        match (qkv[0], self.qkv) {
            (Placement::Replicate, _) | (Placement::Shard(1), Qkv::Separate) => Ok(vec![qkv[0]; 2]),
            (Placement::Shard(_) | Placement::Partial, _) => Err(ShardError("it needs whole sequences")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
