//! Gradient of attention by recomputation (Dao et al. 2022; Dao 2023): the forward pass stores o and lse, from
//! which each attention weight can be recomputed independently, so no S x S matrix is ever stored.

use super::*;
use serde::{Deserialize, Serialize};

/// Gradient of [`Attention`] with respect to q, k and v. With the scores of the forward op and `p(i,j) =
/// exp(score(i,j) - lse[i,h])`, per sequence and head, over the pairs that the mask admits: `ds(i,j) = p(i,j)
/// (do[i,h] . v[j,g] - do[i,h] . o[i,h])`, `dq[i,h] = scale rot'(sum_j ds(i,j) rot(k[j,g], j-a), i-a)`,
/// `dk[j,g] = rot'(sum over h of g, i of ds(i,j) rot(scale q[i,h], i-a), j-a)`, `dv[j,g] = sum over h of g, i
/// of p(i,j) do[i,h]`, where rot' is the inverse rotation. Rows that belong to no sequence get zeros.
///
/// Inputs: do: (T, H*d), all inputs of the forward op, and its outputs o and lse. Outputs: dq, dk, dv, or one
/// dqkv, with the shapes of q, k, v or qkv.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionGrad {
    /// The forward op.
    pub forward: Attention,
}

impl OpRules for AttentionGrad {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let forward = self.forward.inputs();
        arity(ins, forward + 3)?;
        let outs = self.forward.infer(&ins[1..=forward], bounds)?;
        float("do", ins[0])?;
        shape_is("do", ins[0], &outs[0].shape)?;
        float("o", ins[forward + 1])?;
        shape_is("o", ins[forward + 1], &outs[0].shape)?;
        shape_is("lse", ins[forward + 2], &outs[1].shape)?;
        if ins[forward + 2].dtype != DType::F32 {
            return Err(RuleError(format!("lse must be f32, not {}", ins[forward + 2])));
        }
        let operands = ins[1..=self.forward.operands()].iter();
        Ok(operands.map(|x| TensorSpec::activation(x.shape.clone(), x.dtype)).collect())
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], bounds: &Bounds, counts: Counts) -> Cost {
        // Five matmuls (scores, do v, dv, dk, dq), two operations per multiply-add.
        streaming(10.0 * self.forward.matmul_flops(bounds, counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}
