//! The middle of a transformer layer as one op: what a plan fuses where a target never writes the hidden layer.

use super::terminal::f32_is;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// `y = r + (f(n(x) W1^T + b1) W2^T + b2)`, n a layer norm or the identity. n(x) and the hidden layer are rounded to the
/// type of x, as they are where they are values of their own.
///
/// Inputs x: (R, K), with `norm` gamma, beta: (K) in f32, w1: (F, K), with a gate (2F, K), with `bias[0]` b1 of its rows,
/// w2: (N, F), with `bias[1]` b2: (N), with `residual` r: (R, N). Output y: (R, N). All but gamma and beta are of one type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mlp {
    /// n.
    pub norm: Option<LayerNorm>,
    /// f.
    pub hidden: Hidden,
    /// Whether b1 and b2 are there.
    pub bias: [bool; 2],
    /// Whether r is there.
    pub residual: bool,
}

/// The hidden layer of an [`Mlp`], of `s = n(x) W1^T + b1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hidden {
    /// `gelu_erf(s)`.
    Gelu,
    /// `gelu_erf(s[:, j]) * s[:, F + j]`, s rounded first; F is a multiple of 32, so that halves are whole panels of
    /// any layout.
    Gate,
}

impl Mlp {
    /// Where w1 and w2 stand among the inputs.
    pub fn weights(&self) -> &'static [usize; 2] {
        match (self.norm.is_some(), self.bias[0]) {
            (false, false) => &[1, 2],
            (false, true) => &[1, 3],
            (true, false) => &[3, 4],
            (true, true) => &[3, 5],
        }
    }

    /// Where r stands among the inputs, if it is there.
    pub fn residual(&self) -> Option<usize> {
        self.residual.then(|| self.weights()[1] + 1 + usize::from(self.bias[1]))
    }

    /// How many inputs there are.
    fn inputs(&self) -> usize {
        self.weights()[1] + 1 + usize::from(self.bias[1]) + usize::from(self.residual)
    }

    /// Rows of w1 for each column of the hidden layer.
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
        // Fusion comes after autodiff.
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
        // A block's rows of x are laid out before any of y is written; r is read where y is written. They may be one
        // value, or x alone may not be of y's shape: then it is never asked for.
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
    /// Which inputs are weights of products, whose layout a kernel may choose.
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
