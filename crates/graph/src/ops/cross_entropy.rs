//! Output projection and softmax cross-entropy in one op (after Wijmans et al. 2024, "Cut your losses", and Hsu
//! et al. 2024, Liger): logits are computed a few rows at a time and never stored as a whole. With a vocabulary
//! of 65 536 they would need more memory than all layers of a small model.

use super::gelu::TRANSCENDENTAL;
use super::terminal::{GradientOrUpdateOp, f32_is, f32s, i32_is, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Linear map followed by softmax cross-entropy: `loss = sum_r (lse_r - logit[r, target_r] + z lse_r^2)` over
/// the rows whose target is not negative, with `logit = x W^T + b` and `lse_r = ln sum_v exp(logit[r, v])`. The
/// result is a sum, not a mean: the caller divides by the number of counted rows of all micro-batches of a
/// step.
///
/// Inputs: x: (R, K), w: (V, K), with `bias` b: (V), targets: i32 (R). Outputs: loss: f32 (1), lse: f32 (R), 0
/// for rows that are not counted; and, if z is not 0, the two terms of the loss, cross_entropy: f32 (1) and
/// z_term: f32 (1). The terms are for reporting: only `loss` has a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearCrossEntropy {
    /// Whether the op has the bias input b.
    pub bias: bool,
    /// Number of rows whose logits are computed at a time.
    pub chunk: u32,
    /// z, the weight of the squared lse.
    pub z_loss: f32,
}

/// Gradient of [`LinearCrossEntropy`]. With `p = softmax(logit)` and `g = dloss (p (1 + 2 z lse) -
/// onehot(target))`, 0 for rows that are not counted: `dx = g W`, `dw = g^T x`, `db = sum_r g`.
///
/// Inputs: dloss: f32 (1), x: (R, K), w: (V, K), with `bias` b: (V), targets: i32 (R), lse: f32 (R). Outputs:
/// dx: (R, K), dw: (V, K), with `bias` db: (V).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearCrossEntropyGrad {
    /// The forward op.
    pub forward: LinearCrossEntropy,
}

impl LinearCrossEntropy {
    fn operands(&self, ins: &[&TensorSpec]) -> Result<Dim, RuleError> {
        float("x", ins[0])?;
        let (rows, k) = matrix("x", ins[0])?;
        float("w", ins[1])?;
        let (v, _) = matrix("w", ins[1])?;
        shape_is("w", ins[1], &[v, Dim::Fixed(k)])?;
        if self.bias {
            shape_is("b", ins[2], &[v])?;
        }
        i32_is("targets", ins[2 + usize::from(self.bias)], &[rows])?;
        match self.chunk {
            0 => Err(RuleError("logits cannot be computed 0 rows at a time".to_owned())),
            _ => Ok(rows),
        }
    }
}

/// Number of logits of all rows.
fn logits(x: &TensorSpec, w: &TensorSpec, counts: Counts) -> f64 {
    x.rows(counts) as f64 * w.rows(counts) as f64
}

impl OpRules for LinearCrossEntropy {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3 + usize::from(self.bias))?;
        let rows = self.operands(ins)?;
        let mut outs = vec![f32s(1), TensorSpec::activation([rows], DType::F32)];
        if self.z_loss != 0.0 {
            outs.extend([f32s(1), f32s(1)]);
        }
        Ok(outs)
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        if cx.output_grads[1..].iter().any(Option::is_some) {
            return Err(NotDifferentiable);
        }
        let mut inputs = vec![cx.dy()?];
        inputs.extend(&cx.node.inputs);
        inputs.push(cx.output(1)?);
        let op = Op::LinearCrossEntropyGrad(LinearCrossEntropyGrad { forward: *self });
        let grads = cx.builder.node(op, &inputs);
        for (grad, &d) in cx.input_grads.iter_mut().zip(&grads) {
            *grad = Some(d);
        }
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        let per_logit = 2.0 * columns(ins[0]) + TRANSCENDENTAL;
        let one_read = streaming(per_logit * logits(ins[0], ins[1], counts), ins, outs, counts);
        // Every chunk of rows reads the whole weight.
        let further_reads = ins[0].rows(counts).div_ceil(u64::from(self.chunk)).saturating_sub(1);
        Cost { bytes: one_read.bytes + further_reads as f64 * traffic(ins[1], counts), ..one_read }
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}

impl GradientOrUpdateOp for LinearCrossEntropyGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let bias = usize::from(self.forward.bias);
        arity(ins, 5 + bias)?;
        f32_is("dloss", ins[0], &[Dim::Fixed(1)])?;
        let rows = self.forward.operands(&ins[1..])?;
        f32_is("lse", ins[4 + bias], &[rows])?;
        Ok(ins[1..3 + bias].iter().map(|spec| like(spec)).collect())
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        // The logits are recomputed, followed by the two matmuls of their gradient.
        (6.0 * columns(ins[1]) + TRANSCENDENTAL) * logits(ins[1], ins[2], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}
