//! MLP block of a transformer layer as one op: the fused form for targets whose kernel never writes the hidden
//! layer to memory.

use super::terminal::f32_is;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// MLP block `y = r + (f(n(x) W1^T + b1) W2^T + b2)`, where n is a layer norm or the identity. n(x) and the
/// hidden layer are rounded to the element type of x, exactly as they are in the unfused graph, where they are
/// values.
///
/// Inputs: x: (R, K), with `norm` gamma, beta: (K) in f32, w1: (F, K) or, with a gate, (2F, K), with `bias[0]`
/// b1: (rows of w1), w2: (N, F), with `bias[1]` b2: (N), with `residual` r: (R, N). Output y: (R, N). All
/// inputs except gamma and beta have the same element type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mlp {
    /// n, the layer norm, if there is one.
    pub norm: Option<LayerNorm>,
    /// f, the function of the hidden layer.
    pub hidden: Hidden,
    /// Whether the op has the bias inputs b1 and b2.
    pub bias: [bool; 2],
    /// Whether the op has the residual input r.
    pub residual: bool,
}

/// Function of the hidden layer of an [`Mlp`], applied to `s = n(x) W1^T + b1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hidden {
    /// Exact GELU: `gelu_erf(s)`.
    Gelu,
    /// Gated linear unit: `gelu_erf(s[:, j]) * s[:, F + j]`, with s rounded first. F is a multiple of 32, so
    /// that each half consists of whole panels in any layout.
    Gate,
}

impl Mlp {
    /// Indices of w1 and w2 among the inputs.
    pub fn weights(&self) -> &'static [usize; 2] {
        match (self.norm.is_some(), self.bias[0]) {
            (false, false) => &[1, 2],
            (false, true) => &[1, 3],
            (true, false) => &[3, 4],
            (true, true) => &[3, 5],
        }
    }

    /// Index of r among the inputs, if there is a residual.
    pub fn residual(&self) -> Option<usize> {
        self.residual.then(|| self.weights()[1] + 1 + usize::from(self.bias[1]))
    }

    /// Number of inputs.
    fn inputs(&self) -> usize {
        self.weights()[1] + 1 + usize::from(self.bias[1]) + usize::from(self.residual)
    }

    /// Number of rows of w1 per column of the hidden layer.
    fn rows_each(&self) -> u64 {
        match self.hidden {
            Hidden::Gelu => 1,
            Hidden::Gate => 2,
        }
    }
}

impl OpRules for Mlp {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, self.inputs())?;
        float("x", ins[0])?;
        let (rows, k) = matrix("x", ins[0])?;
        if self.norm.is_some() {
            f32_is("gamma", ins[1], &[Dim::Fixed(k)])?;
            f32_is("beta", ins[2], &[Dim::Fixed(k)])?;
        }
        let [first, second] = *self.weights();
        let (n, f) = matrix("w2", ins[second])?;
        if self.hidden == Hidden::Gate && !f.is_multiple_of(32) {
            return Err(RuleError(format!("w2 must have a multiple of 32 columns behind a gate, not {f}")));
        }
        let is = |what, i: usize, shape: &[Dim]| {
            alike(what, ins[i], &TensorSpec::activation(shape.to_vec(), ins[0].dtype))
        };
        let hidden = Dim::Fixed(self.rows_each() * f);
        is("w1", first, &[hidden, Dim::Fixed(k)])?;
        is("w2", second, &[n, Dim::Fixed(f)])?;
        if self.bias[0] {
            is("b1", first + 1, &[hidden])?;
        }
        if self.bias[1] {
            is("b2", second + 1, &[n])?;
        }
        if let Some(r) = self.residual() {
            is("r", r, &[rows, n])?;
        }
        Ok(vec![TensorSpec::activation([rows, n], ins[0].dtype)])
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        // The fusion pass runs after differentiation.
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        let [first, second] = self.weights().map(|i| ins[i]);
        let (k, f) = (first.row_elements(), second.row_elements());
        let norm = if self.norm.is_some() { 8 * k } else { 0 };
        let hidden = f * (self.rows_each() * (2 * k + 1) + gelu::TRANSCENDENTAL);
        let row = norm + hidden + (2 * f + 2) * outs[0].row_elements();
        streaming(row * outs[0].rows(counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        // The kernel copies a block's rows of x before it writes any row of y, and reads r(i, j) when it writes
        // y(i, j), so y may overwrite either. x and r may be the same value. Where x has another shape than y,
        // the planner never requests this alias.
        match self.residual() {
            None => &[0],
            Some(3) => &[0, 3],
            Some(4) => &[0, 4],
            Some(5) => &[0, 5],
            Some(6) => &[0, 6],
            Some(_) => &[0, 7],
        }
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        let rows = [Some(0), self.residual()];
        let (activations, weights): (Vec<_>, Vec<_>) =
            ins.iter().copied().enumerate().partition(|(i, _)| rows.contains(&Some(*i)));
        let placements = |of: Vec<(usize, Placement)>| of.into_iter().map(|(_, p)| p).collect::<Vec<_>>();
        Ok(vec![row_parallel(&placements(activations), &placements(weights))?])
    }
}

impl Op {
    /// Indices of the inputs that are matmul weights, whose layout may be chosen by the kernel.
    pub fn weights(&self) -> &'static [usize] {
        if let Op::Linear(_) = self {
            &[1]
        } else if let Op::Mlp(mlp) = self {
            mlp.weights()
        } else {
            &[]
        }
    }
}
