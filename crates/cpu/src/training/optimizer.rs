//! AdamW and SGD updates, averages of weights, and the common scale of all gradients (unscaling and clipping).
//!
//! Invariant: a new state depends on the old states and the gradient at its own element only. The gradient norm is a
//! sum of squares in f64, added block by block in a fixed order. The square of an f32 is exact in f64, so the
//! instruction set does not change the sum.

use crate::Cpu;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::training::optimizer_state::{Gradient, OptimizerState};
use crate::training::total::{GRAIN, squares, total};
use core::ops::Range;
use plimsoll_graph::ops::{AdamW, GradScale, Sgd};

/// Factor on all gradients: computed by [`grad_scale`], applied by every optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientScale {
    /// Multiplier: the optimizer uses `factor * g`.
    pub factor: f32,
    /// Whether the gradient norm is finite. If not, no state is updated.
    pub ok: bool,
}

/// The gradient of an optimizer step, and its scale.
#[derive(Clone, Copy, Debug)]
pub struct ScaledGradient<'a> {
    /// The gradient g.
    pub g: Gradient<'a>,
    /// Factor on g.
    pub scale: GradientScale,
}

/// One step of AdamW on the states p, m and v; hyper = (lr, 1 - b1^t, 1 - b2^t).
pub fn adamw(
    cpu: &Cpu,
    op: &AdamW,
    gradient: ScaledGradient<'_>,
    states: [OptimizerState<'_, f32>; 3],
    hyper: [f32; 3],
) {
    update(cpu, AdamWRule::new(op, hyper), gradient, states);
}

/// One step of SGD without momentum on the parameter p.
pub fn sgd(cpu: &Cpu, op: &Sgd, gradient: ScaledGradient<'_>, p: OptimizerState<'_, f32>, lr: f32) {
    update(cpu, SgdRule { op: *op, lr }, gradient, [p]);
}

/// One step of SGD with momentum on the parameter p and its momentum buffer.
pub fn sgd_momentum(
    cpu: &Cpu,
    op: &Sgd,
    gradient: ScaledGradient<'_>,
    states: [OptimizerState<'_, f32>; 2],
    lr: f32,
) {
    update(cpu, SgdRule { op: *op, lr }, gradient, states);
}

/// One step of the moving average `ema` of the parameter p, which has this weight in the new average. If `ok` is false,
/// the average keeps its values.
pub fn ema(cpu: &Cpu, weight: f32, p: Gradient<'_>, ema: OptimizerState<'_, f32>, ok: bool) {
    // The rule gets the parameter in place of the gradient, which the factor of the gradients must not change.
    let parameter = ScaledGradient { g: p, scale: GradientScale { factor: 1.0, ok } };
    update(cpu, EmaRule { weight }, parameter, [ema]);
}

/// Returns the scale for `grads`, and their norm after multiplication with `unscale` and before clipping
/// (torch.nn.utils.clip_grad_norm_).
pub fn grad_scale<'a>(
    cpu: &Cpu,
    op: &GradScale,
    grads: impl Iterator<Item = Gradient<'a>>,
    unscale: f32,
) -> (GradientScale, f32) {
    let sum: f64 = grads.map(|g| sum_of_squares(cpu, g)).sum();
    let norm = f64::from(unscale).abs() * sum.sqrt();
    let clip = match f64::from(op.max_norm) {
        0.0 => 1.0,
        max_norm => (max_norm / (norm + 1e-6)).min(1.0),
    };
    let factor = (f64::from(unscale) * clip) as f32;
    (GradientScale { factor, ok: (norm as f32).is_finite() }, norm as f32)
}

fn sum_of_squares(cpu: &Cpu, g: Gradient<'_>) -> f64 {
    total(cpu, g.len().div_ceil(GRAIN), &|chunk| {
        let mut sum = 0.0;
        let range = chunk * GRAIN..g.len().min((chunk + 1) * GRAIN);
        cpu.isa().run(GradientSquares { g, range, sum: &mut sum });
        sum
    })
}

/// Element-wise update rule of an optimizer with K states; state 0 is the parameter.
pub(crate) trait UpdateRule<const K: usize>: Copy + Sync {
    /// Returns the new values of the states, given the scaled gradient and the old values.
    fn step<S: Simd>(&self, s: S, g: S::V, old: [S::V; K]) -> [S::V; K];
}

/// AdamW's update rule, with the step's factors computed once in f64.
#[derive(Clone, Copy)]
pub(crate) struct AdamWRule {
    op: AdamW,
    /// Weight decay's factor on p: 1 - lr * weight_decay.
    decay: f32,
    /// lr / (1 - b1^t), the learning rate with the first moment's bias correction.
    rate: f32,
    /// 1 / sqrt(1 - b2^t), the second moment's bias correction.
    root: f32,
}

impl AdamWRule {
    pub(crate) fn new(op: &AdamW, hyper: [f32; 3]) -> Self {
        let [lr, c1, c2] = hyper.map(f64::from);
        let decay = 1.0 - lr * f64::from(op.weight_decay);
        Self { op: *op, decay: decay as f32, rate: (lr / c1) as f32, root: (1.0 / c2.sqrt()) as f32 }
    }
}

impl UpdateRule<3> for AdamWRule {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, g: S::V, [p, m, v]: [S::V; 3]) -> [S::V; 3] {
        let AdamW { beta1, beta2, eps, .. } = self.op;
        let m = s.fma(s.splat(beta1), m, s.mul(s.splat(1.0 - beta1), g));
        let v = s.fma(s.splat(beta2), v, s.mul(s.mul(s.splat(1.0 - beta2), g), g));
        let denominator = s.fma(s.sqrt(v), s.splat(self.root), s.splat(eps));
        let change = s.div(s.mul(s.splat(-self.rate), m), denominator);
        [s.fma(s.splat(self.decay), p, change), m, v]
    }
}

/// SGD's update rule, without (K = 1) or with (K = 2) a momentum buffer.
#[derive(Clone, Copy)]
struct SgdRule {
    op: Sgd,
    lr: f32,
}

impl SgdRule {
    /// The gradient with weight decay, g + weight_decay * p.
    #[inline(always)]
    fn decayed<S: Simd>(&self, s: S, g: S::V, p: S::V) -> S::V {
        s.fma(s.splat(self.op.weight_decay), p, g)
    }

    /// The parameter after a step against `direction`, p - lr * direction.
    #[inline(always)]
    fn descend<S: Simd>(&self, s: S, p: S::V, direction: S::V) -> S::V {
        s.fma(s.splat(-self.lr), direction, p)
    }
}

impl UpdateRule<1> for SgdRule {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, g: S::V, [p]: [S::V; 1]) -> [S::V; 1] {
        [self.descend(s, p, self.decayed(s, g, p))]
    }
}

impl UpdateRule<2> for SgdRule {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, g: S::V, [p, b]: [S::V; 2]) -> [S::V; 2] {
        let g = self.decayed(s, g, p);
        let momentum = s.splat(self.op.momentum);
        let b = s.fma(momentum, b, g);
        let direction = if self.op.nesterov { s.fma(momentum, b, g) } else { b };
        [self.descend(s, p, direction), b]
    }
}

/// Rule of an average of parameters, of which the parameter has this weight.
#[derive(Clone, Copy)]
struct EmaRule {
    weight: f32,
}

impl UpdateRule<1> for EmaRule {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, p: S::V, [ema]: [S::V; 1]) -> [S::V; 1] {
        let difference = s.fma(s.splat(-1.0), ema, p);
        [s.fma(s.splat(self.weight), difference, ema)]
    }
}

/// Applies `rule` to all elements in parallel. If the scale is not ok, the states keep their values.
fn update<const K: usize>(
    cpu: &Cpu,
    rule: impl UpdateRule<K>,
    gradient: ScaledGradient<'_>,
    states: [OptimizerState<'_, f32>; K],
) {
    let ScaledGradient { g, scale } = gradient;
    assert!(states.iter().all(|state| state.len() == g.len()), "states and gradient of one length");
    if !scale.ok {
        return states.into_iter().for_each(OptimizerState::keep);
    }
    let n = g.len();
    let factor = scale.factor;
    cpu.pool().run(n.div_ceil(GRAIN), &|task, _| {
        let range = task * GRAIN..n.min((task + 1) * GRAIN);
        cpu.isa().run(ElementUpdates { rule, g, states: &states, factor, range });
    });
}

/// One optimizer step on the elements `range`, for `Isa::run`.
struct ElementUpdates<'a, T, const K: usize> {
    rule: T,
    g: Gradient<'a>,
    states: &'a [OptimizerState<'a, f32>; K],
    factor: f32,
    range: Range<usize>,
}

impl<T: UpdateRule<K>, const K: usize> SimdKernel for ElementUpdates<'_, T, K> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in self.range.clone().step_by(LANES) {
            let n = LANES.min(self.range.end - i);
            // SAFETY: elements i..i + n of the gradient.
            let g = unsafe { self.g.load(s, i, n) };
            // SAFETY: elements i..i + n of each state.
            let old = core::array::from_fn(|k| unsafe { s.load_n(self.states[k].read(i), n) });
            let new = self.rule.step(s, s.mul(s.splat(self.factor), g), old);
            for (state, new) in self.states.iter().zip(new) {
                // SAFETY: as above; only this task writes these elements, and it has read them already.
                unsafe { s.store_n(state.write(i), new, n) };
            }
        }
    }
}

/// Sum of squares of the gradient's elements `range`, for `Isa::run`.
struct GradientSquares<'a> {
    g: Gradient<'a>,
    range: Range<usize>,
    sum: &'a mut f64,
}

impl SimdKernel for GradientSquares<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: elements of the gradient.
        *self.sum = squares(s, self.range, |i, n| unsafe { self.g.load(s, i, n) });
    }
}
