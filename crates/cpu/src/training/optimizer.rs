//! AdamW and SGD updates, averages of weights, and the common scale of all gradients (unscaling and clipping).
//!
//! Invariant: a new state depends on the old states and the gradient at its own element only. The gradient norm is a
//! sum of squares in f64, added block by block in a fixed order. The square of an f32 is exact in f64, so the
//! instruction set does not change the sum.

use crate::Cpu;
use crate::simd::isa::Kernel;
use crate::simd::{LANES, Simd};
use crate::training::optimizer_state::{Gradient, OptimizerState};
use crate::training::total::{GRAIN, squares, total};
use core::ops::Range;
use plimsoll_graph::ops::{AdamW, Ema, GradScale, Sgd};

/// Factor on all gradients: computed by [`grad_scale`], applied by every optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Multiplier: the optimizer uses `factor * g`.
    pub factor: f32,
    /// Whether the gradient norm is finite. If not, no state is updated.
    pub ok: bool,
}

/// One step of AdamW on the states p, m and v; hyper = (lr, 1 - b1^t, 1 - b2^t).
pub fn adamw(
    cpu: &Cpu,
    op: &AdamW,
    g: Gradient<'_>,
    states: [OptimizerState<'_, f32>; 3],
    scale: Scale,
    hyper: [f32; 3],
) {
    update(cpu, AdamWStep::new(op, hyper), g, states, scale);
}

/// One step of SGD without momentum on the parameter p.
pub fn sgd(cpu: &Cpu, op: &Sgd, g: Gradient<'_>, p: OptimizerState<'_, f32>, scale: Scale, lr: f32) {
    update(cpu, SgdStep { op: *op, lr }, g, [p], scale);
}

/// One step of SGD with momentum on the parameter p and its momentum buffer.
pub fn sgd_momentum(
    cpu: &Cpu,
    op: &Sgd,
    g: Gradient<'_>,
    states: [OptimizerState<'_, f32>; 2],
    scale: Scale,
    lr: f32,
) {
    update(cpu, SgdStep { op: *op, lr }, g, states, scale);
}

/// One step of the average `ema` of the parameter p, after `steps` earlier steps.
pub fn ema(cpu: &Cpu, op: &Ema, p: Gradient<'_>, ema: OptimizerState<'_, f32>, scale: Scale, steps: f32) {
    // The rule gets the parameter in place of the gradient, which the factor of the gradients must not change.
    update(cpu, EmaStep { weight: op.weight(steps) }, p, [ema], Scale { factor: 1.0, ..scale });
}

/// Returns the scale for `grads`, and their norm after multiplication with `unscale` and before clipping
/// (torch.nn.utils.clip_grad_norm_).
pub fn grad_scale<'a>(
    cpu: &Cpu,
    op: &GradScale,
    grads: impl Iterator<Item = Gradient<'a>>,
    unscale: f32,
) -> (Scale, f32) {
    let sum: f64 = grads.map(|g| sum_of_squares(cpu, g)).sum();
    let norm = f64::from(unscale).abs() * sum.sqrt();
    let clip = match f64::from(op.max_norm) {
        0.0 => 1.0,
        max_norm => (max_norm / (norm + 1e-6)).min(1.0),
    };
    let factor = (f64::from(unscale) * clip) as f32;
    (Scale { factor, ok: (norm as f32).is_finite() }, norm as f32)
}

fn sum_of_squares(cpu: &Cpu, g: Gradient<'_>) -> f64 {
    total(cpu, g.len().div_ceil(GRAIN), &|chunk| {
        let mut sum = 0.0;
        let range = chunk * GRAIN..g.len().min((chunk + 1) * GRAIN);
        cpu.isa().run(Squares { g, range, sum: &mut sum });
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
pub(crate) struct AdamWStep {
    op: AdamW,
    /// Weight decay's factor on p: 1 - lr * weight_decay.
    left: f32,
    /// lr / (1 - b1^t), the learning rate with the first moment's bias correction.
    rate: f32,
    /// 1 / sqrt(1 - b2^t), the second moment's bias correction.
    root: f32,
}

impl AdamWStep {
    pub(crate) fn new(op: &AdamW, hyper: [f32; 3]) -> Self {
        let [lr, c1, c2] = hyper.map(f64::from);
        let left = 1.0 - lr * f64::from(op.weight_decay);
        Self { op: *op, left: left as f32, rate: (lr / c1) as f32, root: (1.0 / c2.sqrt()) as f32 }
    }
}

impl UpdateRule<3> for AdamWStep {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, g: S::V, [p, m, v]: [S::V; 3]) -> [S::V; 3] {
        let AdamW { beta1, beta2, eps, .. } = self.op;
        let m = s.fma(s.splat(beta1), m, s.mul(s.splat(1.0 - beta1), g));
        let v = s.fma(s.splat(beta2), v, s.mul(s.mul(s.splat(1.0 - beta2), g), g));
        let below = s.fma(s.sqrt(v), s.splat(self.root), s.splat(eps));
        let by = s.div(s.mul(s.splat(-self.rate), m), below);
        [s.fma(s.splat(self.left), p, by), m, v]
    }
}

/// SGD's update rule, without (K = 1) or with (K = 2) a momentum buffer.
#[derive(Clone, Copy)]
struct SgdStep {
    op: Sgd,
    lr: f32,
}

impl SgdStep {
    /// The gradient with weight decay, g + weight_decay * p.
    #[inline(always)]
    fn decayed<S: Simd>(&self, s: S, g: S::V, p: S::V) -> S::V {
        s.fma(s.splat(self.op.weight_decay), p, g)
    }

    /// The parameter after a step against `by`, p - lr * by.
    #[inline(always)]
    fn down<S: Simd>(&self, s: S, p: S::V, by: S::V) -> S::V {
        s.fma(s.splat(-self.lr), by, p)
    }
}

impl UpdateRule<1> for SgdStep {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, g: S::V, [p]: [S::V; 1]) -> [S::V; 1] {
        [self.down(s, p, self.decayed(s, g, p))]
    }
}

impl UpdateRule<2> for SgdStep {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, g: S::V, [p, b]: [S::V; 2]) -> [S::V; 2] {
        let g = self.decayed(s, g, p);
        let momentum = s.splat(self.op.momentum);
        let b = s.fma(momentum, b, g);
        let by = if self.op.nesterov { s.fma(momentum, b, g) } else { b };
        [self.down(s, p, by), b]
    }
}

/// Rule of an average of parameters, of which the parameter has this weight.
#[derive(Clone, Copy)]
struct EmaStep {
    weight: f32,
}

impl UpdateRule<1> for EmaStep {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, p: S::V, [ema]: [S::V; 1]) -> [S::V; 1] {
        let by = s.fma(s.splat(-1.0), ema, p);
        [s.fma(s.splat(self.weight), by, ema)]
    }
}

/// Applies `step` to all elements in parallel. If the scale is not ok, the states keep their values.
fn update<const K: usize>(
    cpu: &Cpu,
    step: impl UpdateRule<K>,
    g: Gradient<'_>,
    states: [OptimizerState<'_, f32>; K],
    scale: Scale,
) {
    assert!(states.iter().all(|state| state.len() == g.len()), "states and gradient of one length");
    if !scale.ok {
        return states.into_iter().for_each(OptimizerState::keep);
    }
    let n = g.len();
    let factor = scale.factor;
    cpu.pool().run(n.div_ceil(GRAIN), &|task, _| {
        let range = task * GRAIN..n.min((task + 1) * GRAIN);
        cpu.isa().run(Update { step, g, states: &states, factor, range });
    });
}

/// One optimizer step on the elements `range`, for `Isa::run`.
struct Update<'a, T, const K: usize> {
    step: T,
    g: Gradient<'a>,
    states: &'a [OptimizerState<'a, f32>; K],
    factor: f32,
    range: Range<usize>,
}

impl<T: UpdateRule<K>, const K: usize> Kernel for Update<'_, T, K> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in self.range.clone().step_by(LANES) {
            let n = LANES.min(self.range.end - i);
            // SAFETY: elements i..i + n of the gradient.
            let g = unsafe { self.g.load(s, i, n) };
            // SAFETY: elements i..i + n of each state.
            let old = core::array::from_fn(|k| unsafe { s.load_n(self.states[k].read(i), n) });
            let new = self.step.step(s, s.mul(s.splat(self.factor), g), old);
            for (state, new) in self.states.iter().zip(new) {
                // SAFETY: as above; only this task writes these elements, and it has read them already.
                unsafe { s.store_n(state.write(i), new, n) };
            }
        }
    }
}

/// Sum of squares of the gradient's elements `range`, for `Isa::run`.
struct Squares<'a> {
    g: Gradient<'a>,
    range: Range<usize>,
    sum: &'a mut f64,
}

impl Kernel for Squares<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: elements of the gradient.
        let load = |i, n| unsafe { self.g.load(s, i, n) };
        *self.sum = squares(s, self.range, load);
    }
}
