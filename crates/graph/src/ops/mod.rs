//! Rules of the ops: one file per op with its attributes, its formula and its source. Invariant: rules are pure
//! and total; every op implements all methods of [`OpRules`], which have no default implementations.

mod add;
mod attention;
mod attention_grad;
mod attention_mask;
mod batch_norm;
mod batch_norm_train;
mod cast;
mod concat;
mod cross_entropy;
mod dispatch;
mod dropout;
mod embed;
mod embed_grad;
mod gelu;
mod glu;
mod grouped_linear;
mod kl_divergence;
mod layer_norm;
mod layer_norm_grad;
mod linear;
mod linear_grad;
mod movement;
mod optimizer;
mod quantize;
mod relu;
mod rms_norm;
mod rotary_table;
mod route;
mod scale;
mod segment_mean;
mod select_rows;
mod softmax;
mod terminal;
mod view;

pub use add::Add;
pub use attention::{Attention, Bias, Qkv, alibi_slopes};
pub use attention_grad::AttentionGrad;
pub use attention_mask::Mask;
pub use batch_norm::BatchNorm;
pub use batch_norm_train::{BatchNormGrad, BatchNormTrain, BatchNormTrainGrad};
pub use cast::Cast;
pub use concat::{Concat, ConcatGrad};
pub use cross_entropy::{LinearCrossEntropy, LinearCrossEntropyGrad};
pub use dispatch::{Combine, CombineGrad, Dispatch, DispatchGrad};
pub use dropout::Dropout;
pub use embed::{Embed, TokenDropout};
pub use embed_grad::EmbedGrad;
pub use gelu::{Gelu, GeluGrad};
pub use glu::{Activation, Glu, GluGrad};
pub use grouped_linear::{GroupedLinear, GroupedLinearInputGrad, GroupedLinearWeightGrad};
pub use kl_divergence::{KlDivergence, KlDivergenceGrad};
pub use layer_norm::LayerNorm;
pub use layer_norm_grad::LayerNormGrad;
pub use linear::{Epilogue, Linear, OperandFormat, Prologue};
pub use linear_grad::{LinearInputGrad, LinearWeightGrad};
pub use movement::Move;
pub use optimizer::{Accumulate, Adafactor, AdamW, AdamW8bit, BLOCK, CountSteps, Ema, GradScale, Sgd};
pub use quantize::{Quantize, Quantized};
pub use relu::{Relu, ReluGrad};
pub use rms_norm::{RmsNorm, RmsNormGrad};
pub use rotary_table::RotaryTable;
pub use route::{Route, RouteGrad, RouterLoss, RouterLossGrad};
pub use scale::Scale;
pub use segment_mean::{SegmentMean, SegmentMeanGrad};
pub use select_rows::{SelectRows, SelectRowsGrad};
pub use softmax::{Softmax, SoftmaxGrad};
pub use view::{Join, Part};

use crate::{Bounds, Builder, Counts, DType, Dim, Node, Space, TensorSpec, ValueId};
use std::fmt;

/// Static properties of an op: everything that is known without executing it.
pub trait OpRules {
    /// Infers the types of the outputs, or explains why the inputs are invalid.
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError>;

    /// Adds the backward nodes of the node in `cx`. The forward values that these nodes read are the values
    /// saved for the backward pass.
    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable>;

    /// Work and memory traffic of a step of size `counts` whose sequences have up to `bounds.longest` tokens.
    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], bounds: &Bounds, counts: Counts) -> Cost;

    /// Indices of the inputs whose storage may be reused for output `output`. Required: an element of the
    /// output is written only after everything that depends on the same element of the input has been computed.
    fn alias(&self, output: usize) -> &'static [usize];

    /// Class of the op in the precision pass.
    fn precision(&self) -> PrecisionClass;
}

/// Error: the inputs of an op are invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError(pub String);

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RuleError {}

/// Error: the op has no gradient. Automatic differentiation reports it with the name of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotDifferentiable;

/// Work and memory traffic of one launch, from which its time is predicted. The numbers are floating-point, because products of
/// three sizes may exceed 64 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: f64,
    /// Bytes read and written if every operand crosses the memory bus once.
    pub bytes: f64,
}

/// Class of an op in the precision pass: in which element type it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrecisionClass {
    /// Matmul with f32 accumulation: runs in the low precision of the policy.
    Matmul,
    /// Uses the precision of its inputs.
    Elementwise,
    /// Norms, softmax, pooling and positions: computed in f32 under every policy.
    Sensitive,
}

/// Context of [`OpRules::vjp`] (vector-Jacobian product): the differentiation of one node.
pub struct Vjp<'a> {
    /// Receives the backward nodes.
    pub builder: &'a mut Builder,
    /// The node to differentiate.
    pub node: &'a Node,
    /// Gradients of the outputs of `node`; `None` for an output that does not affect the loss.
    pub output_grads: &'a [Option<ValueId>],
    /// Gradients of the inputs of `node`, filled in by the rule; `None` for an input without a gradient.
    pub input_grads: &'a mut [Option<ValueId>],
}

impl Vjp<'_> {
    /// Input `i` of the forward node.
    pub fn input(&self, i: usize) -> ValueId {
        self.node.inputs[i]
    }

    /// Output `i` of the forward node. Every output exists until the pass `dce` has run.
    pub fn output(&self, i: usize) -> Result<ValueId, NotDifferentiable> {
        self.node.outputs[i].ok_or(NotDifferentiable)
    }

    /// Gradient of output 0. Rules are called only for nodes with a gradient.
    pub fn dy(&self) -> Result<ValueId, NotDifferentiable> {
        self.output_grads[0].ok_or(NotDifferentiable)
    }
}

/// Cost of an op with `flops` operations whose operands each cross the memory bus once.
fn streaming(flops: f64, ins: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> Cost {
    let bytes = ins.iter().chain(outs).map(|s| traffic(s, counts)).sum();
    Cost { flops, bytes }
}

/// Cost of an elementwise op with `per_element` operations for each element of output 0.
fn elementwise(per_element: f64, ins: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> Cost {
    streaming(per_element * elements(outs[0], counts), ins, outs, counts)
}

/// Number of elements of a tensor, for costs.
fn elements(spec: &TensorSpec, counts: Counts) -> f64 {
    spec.elements_at(counts) as f64
}

/// Number of elements of a row of a tensor, for costs.
fn columns(spec: &TensorSpec) -> f64 {
    spec.row_elements() as f64
}

/// Bytes of a tensor that cross the memory bus once, for costs.
fn traffic(spec: &TensorSpec, counts: Counts) -> f64 {
    spec.bytes_at(counts).0 as f64
}

fn arity(ins: &[&TensorSpec], wanted: usize) -> Result<(), RuleError> {
    if ins.len() == wanted {
        return Ok(());
    }
    Err(RuleError(format!("takes {wanted} inputs, not {}", ins.len())))
}

fn float(what: &str, spec: &TensorSpec) -> Result<(), RuleError> {
    match spec.dtype {
        DType::F32 | DType::Bf16 | DType::F16 => Ok(()),
        DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
            Err(RuleError(format!("{what} must be floating point, not {spec}")))
        }
    }
}

fn integers(what: &str, spec: &TensorSpec) -> Result<(), RuleError> {
    match spec.dtype {
        DType::I32 => Ok(()),
        DType::F32 | DType::Bf16 | DType::F16 | DType::F8 | DType::I8 | DType::U8 => {
            Err(RuleError(format!("{what} must be i32, not {spec}")))
        }
    }
}

/// The (rows, columns) of a matrix with a fixed number of columns.
fn matrix(what: &str, spec: &TensorSpec) -> Result<(Dim, u64), RuleError> {
    match spec.shape[..] {
        [rows, Dim::Fixed(columns)] => Ok((rows, columns)),
        _ => Err(RuleError(format!("{what} must be a matrix with fixed columns, not {spec}"))),
    }
}

fn shape_is(what: &str, spec: &TensorSpec, wanted: &[Dim]) -> Result<(), RuleError> {
    if spec.shape == wanted {
        return Ok(());
    }
    let wanted = TensorSpec::activation(wanted, spec.dtype);
    Err(RuleError(format!("{what} must be {wanted}, not {spec}")))
}

/// Checks that `spec` has the shape and element type of `other`, as elementwise operands must.
fn alike(what: &str, spec: &TensorSpec, other: &TensorSpec) -> Result<(), RuleError> {
    shape_is(what, spec, &other.shape)?;
    if spec.dtype == other.dtype {
        return Ok(());
    }
    Err(RuleError(format!("{what} must be {} as the other, not {spec}", other.dtype.name())))
}

/// Checks that `spec` holds the row range (start, end) of every sequence: i32 (S, 2).
fn spans(spec: &TensorSpec) -> Result<(), RuleError> {
    integers("spans", spec)?;
    shape_is("spans", spec, &[Dim::Sequences(1), Dim::Fixed(2)])
}

/// Checks that `spec` describes the packs of a step: i32 (P, 6), see [`crate::packs`].
fn packs(spec: &TensorSpec) -> Result<(), RuleError> {
    integers("packs", spec)?;
    shape_is("packs", spec, &[Dim::Packs(1), Dim::Fixed(crate::packs::WORDS as u64)])
}

/// Checks the spans of attention, of which a sequence may have several.
fn spans_of_attention(spec: &TensorSpec) -> Result<(), RuleError> {
    integers("spans", spec)?;
    match spec.shape[..] {
        [Dim::Sequences(k), Dim::Fixed(2)] if k > 0 => Ok(()),
        _ => Err(RuleError(format!("spans must be (S, 2) or a multiple of S by 2, not {spec}"))),
    }
}

#[cfg(test)]
mod tests;
