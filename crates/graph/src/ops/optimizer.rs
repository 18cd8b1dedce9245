//! One optimizer step for one parameter, in place. Every optimizer op reads `scale`: f32 (2) = (factor, ok) of
//! [`GradScale`]: the gradient is `factor g`, and where ok is 0 every output equals its input, so that a step
//! with overflowed gradients is skipped entirely. The ops of the averages of weights follow the same rule. `hyper`
//! holds the values that change from step to step. Parameters and moments are f32; g may be 16-bit.

use super::terminal::{GradientOrUpdateOp, f32_is, f32s, like};
use super::*;
use serde::{Deserialize, Serialize};

/// AdamW (Loshchilov and Hutter 2019; torch.optim.AdamW): `p -= lr decay p`, `m = b1 m + (1 - b1) g`,
/// `v = b2 v + (1 - b2) g^2`, `p -= lr (m / c1) / (sqrt(v / c2) + eps)`.
///
/// Inputs p, g, m, v: one shape, scale, hyper: f32 (3) = (lr, c1 = 1 - b1^t, c2 = 1 - b2^t). Outputs p, m, v.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    /// b1, the decay of the first moment m.
    pub beta1: f32,
    /// b2, the decay of the second moment v.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
}

/// [`AdamW`] with 8-bit moments quantized in blocks of [`BLOCK`] elements (Dettmers et al. 2022): one of 256
/// dynamic levels, signed for m and unsigned for v, times the largest magnitude of the block. p is updated with
/// the moments before they are quantized. A nonzero v is never quantized to zero, because v alone limits the
/// step that a remaining m causes.
///
/// Inputs: p, g, m: u8, m_absmax: f32 (n / BLOCK rounded up), v: u8, v_absmax, and scale, hyper as in
/// [`AdamW`]. Outputs: p, m, m_absmax, v, v_absmax.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW8bit {
    /// The update rule.
    pub adamw: AdamW,
}

/// Number of elements in a block of 8-bit moments.
pub const BLOCK: u64 = 256;

/// Adafactor without first moment and relative step size (Shazeer and Stern 2018).
///
/// For a matrix `R = b2 R + (1 - b2) mean_c (g^2 + eps1)`, `C` likewise over rows, and `u = g / sqrt(R C / mean(R))`.
/// For a vector `V = b2 V + (1 - b2) (g^2 + eps1)` and `u = g / sqrt(V)`.
/// Then `u /= max(1, rms(u) / clip)`, `p -= lr decay p`, `p -= lr u`.
///
/// Inputs: p, g: (r, c), row: (r), column: (c), scale, hyper: f32 (2) = (lr, b2 of this step); outputs: p, row,
/// column. For a vector, inputs: p, g, v: (n), scale, hyper; outputs: p, v.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adafactor {
    /// Added to squared gradients.
    pub eps1: f32,
    /// Largest root mean square of an update.
    pub clip: f32,
    /// Weight decay.
    pub weight_decay: f32,
}

/// Stochastic gradient descent (torch.optim.SGD): `g += decay p`; with momentum, `b = momentum b + g`, and g is
/// replaced by b or, with Nesterov momentum, by `g + momentum b`; `p -= lr g`. The buffer starts at zero, so
/// the first step gives `b = g`.
///
/// Inputs: p, g, with momentum b, scale, hyper: f32 (1) = (lr). Outputs: p, with momentum b.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sgd {
    /// Momentum; 0 disables it, and then there is no buffer b.
    pub momentum: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
}

/// Checks the inputs that all optimizers share: p and g, then `states` state tensors, then scale and hyper.
fn around(ins: &[&TensorSpec], states: usize, hyper: u64) -> Result<(), RuleError> {
    arity(ins, 4 + states)?;
    f32_is("p", ins[0], &ins[0].shape)?;
    float("g", ins[1])?;
    shape_is("g", ins[1], &ins[0].shape)?;
    f32_is("scale", ins[2 + states], &[Dim::Fixed(2)])?;
    f32_is("hyper", ins[3 + states], &[Dim::Fixed(hyper)])
}

/// Number of elements of a parameter.
fn parameter_elements(p: &TensorSpec) -> Result<u64, RuleError> {
    let fixed = p.shape.iter().map(|d| d.fixed()).product::<Option<u64>>();
    fixed.ok_or_else(|| RuleError(format!("{p} is not a parameter: its size changes")))
}

impl GradientOrUpdateOp for AdamW {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        around(ins, 2, 3)?;
        f32_is("m", ins[2], &ins[0].shape)?;
        f32_is("v", ins[3], &ins[0].shape)?;
        Ok([0, 2, 3].map(|i| like(ins[i])).to_vec())
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        16.0 * elements(outs[0], counts)
    }

    fn in_place(&self, output: usize) -> &'static [usize] {
        [&[0], &[2], &[3]][output]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for AdamW8bit {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        around(ins, 4, 3)?;
        let blocks = [Dim::Fixed(parameter_elements(ins[0])?.div_ceil(BLOCK))];
        // The quantized values of each moment are followed by their scales.
        for (quantized, absmax) in [(2, 3), (4, 5)] {
            shape_is("codes", ins[quantized], &ins[0].shape)?;
            if ins[quantized].dtype != DType::U8 {
                return Err(RuleError(format!("codes must be u8, not {}", ins[quantized])));
            }
            f32_is("absmax", ins[absmax], &blocks)?;
        }
        Ok([0, 2, 3, 4, 5].map(|i| like(ins[i])).to_vec())
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        48.0 * elements(outs[0], counts)
    }

    fn in_place(&self, output: usize) -> &'static [usize] {
        [&[0], &[2], &[3], &[4], &[5]][output]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for Adafactor {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        match ins.first().map(|p| &p.shape[..]) {
            Some(&[r, c]) => {
                around(ins, 2, 2)?;
                f32_is("row", ins[2], &[r])?;
                f32_is("column", ins[3], &[c])?;
                Ok([0, 2, 3].map(|i| like(ins[i])).to_vec())
            }
            _ => {
                around(ins, 1, 2)?;
                f32_is("v", ins[2], &ins[0].shape)?;
                Ok([0, 2].map(|i| like(ins[i])).to_vec())
            }
        }
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        16.0 * elements(outs[0], counts)
    }

    fn in_place(&self, output: usize) -> &'static [usize] {
        [&[0], &[2], &[3]][output]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for Sgd {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let states = usize::from(self.momentum != 0.0);
        around(ins, states, 1)?;
        if states == 0 {
            return Ok(vec![like(ins[0])]);
        }
        f32_is("b", ins[2], &ins[0].shape)?;
        Ok(vec![like(ins[0]), like(ins[2])])
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        6.0 * elements(outs[0], counts)
    }

    fn in_place(&self, output: usize) -> &'static [usize] {
        [&[0], &[2]][output]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

/// Scale of all gradients of a step: unscaling and global-norm clipping (torch.nn.utils.clip_grad_norm_).
/// `norm = |unscale| sqrt(sum g^2)`, `factor = unscale min(1, max_norm / (norm + 1e-6))`, and `ok` is 1 where norm is a
/// finite f32.
///
/// Inputs: every gradient, unscale: f32 (1). Outputs: scale: f32 (2) = (factor, ok), norm: f32 (1).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradScale {
    /// Largest gradient norm; 0 disables clipping.
    pub max_norm: f32,
}

/// Gradient accumulation over the micro-batches of a step: `keep == 0 ? g : acc + g`.
///
/// Inputs: acc: any shape, g: the same shape, keep: f32 (1). Output: the type of acc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Accumulate {}

/// Exponential moving average of a parameter, after its update: with t = steps + 1, `d = min(decay, (1 + t) / (10 + t))`
/// and `ema += (1 - d) (p - ema)` (tf.train.ExponentialMovingAverage; the second bound is its warm-up).
///
/// Inputs ema, p: one shape, scale as of every optimizer, steps: f32 (1) of [`CountSteps`], the number of earlier
/// steps. Output: ema.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ema {
    /// Largest decay of the average, below 1.
    pub decay: f32,
}

impl Ema {
    /// 1 - d, the weight of the parameter after `steps` earlier steps.
    pub fn weight(&self, steps: f32) -> f32 {
        let t = f64::from(steps) + 1.0;
        (1.0 - f64::from(self.decay).min((1.0 + t) / (10.0 + t))) as f32
    }
}

/// Counter of the optimizer steps that were not skipped: `steps + 1`, at most [`CountSteps::MOST`]. At that count the
/// warm-up of [`Ema`] has reached a decay of 0.9999995.
///
/// Inputs: steps: f32 (1), scale as of every optimizer. Output: steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CountSteps {}

impl CountSteps {
    /// Largest count: 2^24, the largest integer to which f32 can count in steps of 1.
    pub const MOST: f32 = (1u32 << 24) as f32;
}

impl GradientOrUpdateOp for Ema {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 4)?;
        f32_is("ema", ins[0], &ins[0].shape)?;
        f32_is("p", ins[1], &ins[0].shape)?;
        f32_is("scale", ins[2], &[Dim::Fixed(2)])?;
        f32_is("steps", ins[3], &[Dim::Fixed(1)])?;
        Ok(vec![like(ins[0])])
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        3.0 * elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for CountSteps {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        f32_is("steps", ins[0], &[Dim::Fixed(1)])?;
        f32_is("scale", ins[1], &[Dim::Fixed(2)])?;
        Ok(vec![like(ins[0])])
    }

    fn flops(&self, _: &[&TensorSpec], _: &[&TensorSpec], _: Counts) -> f64 {
        1.0
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for GradScale {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let Some((unscale, grads)) = ins.split_last() else {
            return Err(RuleError("takes gradients and a factor".to_owned()));
        };
        grads.iter().try_for_each(|g| float("a gradient", g))?;
        f32_is("unscale", unscale, &[Dim::Fixed(1)])?;
        Ok(vec![f32s(2), f32s(1)])
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        ins.iter().map(|g| 2.0 * elements(g, counts)).sum()
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for Accumulate {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        float("acc", ins[0])?;
        float("g", ins[1])?;
        shape_is("g", ins[1], &ins[0].shape)?;
        f32_is("keep", ins[2], &[Dim::Fixed(1)])?;
        Ok(vec![like(ins[0])])
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
