//! Linear (affine) map, with the operations that can be fused before and after it.

use super::gelu::TRANSCENDENTAL;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Linear map `y = f(p(x) W^T + b)`, with the weight W stored as (N, K), as in weight files.
///
/// Inputs: x: (R, K), w: (N, K), with `bias` b: (N), with `Epilogue::Residual` r: (R, N), with
/// `Prologue::LayerNorm` gamma, beta: (K). Output y: (R, N), with a gate (R, N / 2). The order of
/// summation over K is fixed by (N, K, dtype), so the bits of a row do not depend on the other rows.
///
/// If `operands` is a quantized format, x and w have its element type, with scales sx and sw per row, and
/// `y = f(sx sw (quantized x)(quantized w)^T + b)` is bf16, as are b and r.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Linear {
    /// Whether the op has the bias input b.
    pub bias: bool,
    /// p, the operation fused before the matmul. Models build `None`; the fusion pass sets it.
    pub prologue: Prologue,
    /// f, the operation applied to the sums while they are in registers. Models build `None`; the fusion pass
    /// sets it.
    pub epilogue: Epilogue,
    /// Number format in which x and w are multiplied. Models build `Stored`; the pass `operands` sets it. Omitted
    /// from the text of `Stored` linears, so that their plans keep their digests.
    #[serde(default, skip_serializing_if = "OperandFormat::is_stored")]
    pub operands: OperandFormat,
}

/// Number format in which a linear, or a gradient of a linear, multiplies its first two inputs. Sums are f32, and
/// exact for 8-bit integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OperandFormat {
    /// The floating-point type in which the operands are stored.
    #[default]
    Stored,
    /// TF32: f32 operands may be rounded to 10 bits of mantissa while they are read, where the device has a TF32
    /// kernel for this shape.
    Tf32,
    /// e4m3 values ([`DType::F8`]) with one scale per row.
    E4m3,
    /// 8-bit integers ([`DType::I8`]) with one scale per row.
    Int8,
}

impl OperandFormat {
    /// Element type that both operands must have; `None` if any floating-point type is accepted.
    pub const fn element(self) -> Option<DType> {
        match self {
            Self::Stored => None,
            Self::Tf32 => Some(DType::F32),
            Self::E4m3 => Some(DType::F8),
            Self::Int8 => Some(DType::I8),
        }
    }

    /// Element type of quantized operands; `None` for the other formats.
    pub fn quantized(self) -> Option<DType> {
        self.element().filter(|dtype| dtype.is_scaled())
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
    pub(super) fn is_stored(&self) -> bool {
        *self == Self::Stored
    }

    /// Checks the element types of the first two inputs, which have these names. Returns the element type of the
    /// result.
    pub(super) fn infer(self, names: [&str; 2], ins: &[&TensorSpec]) -> Result<DType, RuleError> {
        let Some(wanted) = self.element() else {
            float(names[0], ins[0])?;
            float(names[1], ins[1])?;
            return Ok(ins[0].dtype);
        };
        for (name, spec) in names.into_iter().zip(ins) {
            if spec.dtype != wanted {
                let why = format!("{name} must be {} for {self:?} operands, not {spec}", wanted.name());
                return Err(RuleError(why));
            }
        }
        Ok(if wanted.is_scaled() { DType::Bf16 } else { wanted })
    }
}

/// Operation on the rows of x that is fused before the matmul.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prologue {
    /// No operation.
    None,
    /// Layer normalisation, rounded to the element type of x.
    LayerNorm(LayerNorm),
}

/// Operation on `s = p(x) W^T + b` that is fused after the matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Epilogue {
    /// No operation: `s`.
    None,
    /// Exact GELU: `gelu_erf(s)`.
    Gelu,
    /// Residual connection: `r + s`.
    Residual,
    /// Gated linear unit: `gelu_erf(s[:, j]) * s[:, N / 2 + j]`, equal to a [`Glu`] after the linear.
    Gate,
    /// Gated linear unit with SiLU: `silu(s[:, j]) * s[:, N / 2 + j]`.
    SiluGate,
}

impl Epilogue {
    /// The epilogue that computes a gated linear unit.
    pub const fn of_gate(activation: Activation) -> Self {
        match activation {
            Activation::Gelu => Self::Gate,
            Activation::Silu => Self::SiluGate,
        }
    }

    /// Activation of the gated linear unit that the epilogue computes; `None` for other epilogues.
    pub const fn gate(self) -> Option<Activation> {
        match self {
            Self::Gate => Some(Activation::Gelu),
            Self::SiluGate => Some(Activation::Silu),
            Self::None | Self::Gelu | Self::Residual => None,
        }
    }
}

impl Linear {
    /// Creates a linear without prologue that multiplies its operands as they are stored.
    pub const fn new(bias: bool, epilogue: Epilogue) -> Self {
        Self { bias, prologue: Prologue::None, epilogue, operands: OperandFormat::Stored }
    }

    /// Index of gamma among the inputs; beta follows it.
    pub fn norm_at(&self) -> usize {
        2 + usize::from(self.bias) + usize::from(self.residual())
    }

    fn residual(&self) -> bool {
        match self.epilogue {
            Epilogue::Residual => true,
            Epilogue::None | Epilogue::Gelu | Epilogue::Gate | Epilogue::SiluGate => false,
        }
    }
}

impl Op {
    /// Indices of the inputs that are matmul weights, whose layout may be chosen by the kernel.
    pub fn weights(&self) -> &'static [usize] {
        if let Op::Linear(_) = self { &[1] } else { &[] }
    }

    /// Number format in which the op multiplies; `Stored` for all ops but linears and their gradients.
    pub fn operands(&self) -> OperandFormat {
        if let Op::Linear(op) = self {
            op.operands
        } else if let Op::LinearInputGrad(op) = self {
            op.operands
        } else if let Op::LinearWeightGrad(op) = self {
            op.operands
        } else {
            OperandFormat::Stored
        }
    }
}

impl OpRules for Linear {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        match self.prologue {
            Prologue::None => arity(ins, self.norm_at())?,
            Prologue::LayerNorm(norm) => {
                arity(ins, self.norm_at() + 2)?;
                norm.infer(&[ins[0], ins[self.norm_at()], ins[self.norm_at() + 1]], bounds)?;
            }
        }
        let dtype = self.operands.infer(["x", "w"], ins)?;
        let (rows, k) = matrix("x", ins[0])?;
        let (n, _) = matrix("w", ins[1])?;
        shape_is("w", ins[1], &[n, Dim::Fixed(k)])?;
        if self.bias {
            shape_is("b", ins[2], &[n])?;
        }
        if self.residual() {
            shape_is("r", ins[2 + usize::from(self.bias)], &[rows, n])?;
        }
        let columns = match (self.epilogue.gate(), n) {
            (None, _) => n,
            (Some(_), Dim::Fixed(n)) if n.is_multiple_of(2) => Dim::Fixed(n / 2),
            (Some(_), _) => return Err(RuleError(format!("w must have an even number of rows, not {n}"))),
        };
        Ok(vec![TensorSpec::activation([rows, columns], dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let bias = self.bias;
        // Fusion and the choice of operands run after differentiation, so only the plain form needs a gradient.
        if *self != Self::new(bias, Epilogue::None) {
            return Err(NotDifferentiable);
        }
        let dy = cx.dy()?;
        let x = cx.input(0);
        let w = cx.input(1);
        let operands = OperandFormat::Stored;
        let dx = cx.builder.node(Op::LinearInputGrad(LinearInputGrad { operands }), &[dy, w]);
        let dw = cx.builder.node(Op::LinearWeightGrad(LinearWeightGrad { bias, operands }), &[dy, x]);
        cx.input_grads[0] = Some(dx[0]);
        for (grad, &d) in cx.input_grads[1..].iter_mut().zip(&dw) {
            *grad = Some(d);
        }
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        let per_output = 2.0 * columns(ins[0])
            + match self.epilogue {
                Epilogue::None => 1.0,
                Epilogue::Residual => 2.0,
                Epilogue::Gelu => 1.0 + TRANSCENDENTAL,
                // Each output needs a second dot product, the one that it gates.
                Epilogue::Gate | Epilogue::SiluGate => 2.0 * columns(ins[0]) + 2.0 + TRANSCENDENTAL,
            };
        let norm = match self.prologue {
            Prologue::None => 0.0,
            Prologue::LayerNorm(_) => 8.0 * elements(ins[0], counts),
        };
        streaming(norm + per_output * elements(outs[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        // Element (i, j) of the residual is read when y(i, j) is written. The residual's index depends on
        // whether there is a bias.
        match (self.epilogue, self.bias) {
            (Epilogue::Residual, true) => &[3],
            (Epilogue::Residual, false) => &[2],
            (Epilogue::None | Epilogue::Gelu | Epilogue::Gate | Epilogue::SiluGate, _) => &[],
        }
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}
