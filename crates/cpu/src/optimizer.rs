//! AdamW and SGD, and the scale of all gradients.
//!
//! Invariant: a new state depends on old ones at its own element only. The norm is a sum of squares in f64, chunk by
//! chunk in their order; the square of an f32 is exact there, so no instruction set changes it.

use super::Cpu;
use super::isa::Kernel;
use super::place::{Gradient, Place};
use super::simd::{LANES, Simd};
use super::total::{GRAIN, squares, total};
use core::ops::Range;
use graph::ops::{AdamW, GradScale, Sgd};

/// What [`grad_scale`] gives, and every optimizer takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// The gradient is `factor g`.
    pub factor: f32,
    /// Whether anything is updated.
    pub ok: bool,
}

/// One step of AdamW on p, m, v; hyper = (lr, 1 - b1^t, 1 - b2^t).
pub fn adamw(
    cpu: &Cpu,
    op: &AdamW,
    g: Gradient<'_>,
    states: [Place<'_, f32>; 3],
    scale: Scale,
    hyper: [f32; 3],
) {
    update(cpu, AdamWStep::new(op, hyper), g, states, scale);
}

/// One step of SGD without momentum on p.
pub fn sgd(cpu: &Cpu, op: &Sgd, g: Gradient<'_>, p: Place<'_, f32>, scale: Scale, lr: f32) {
    update(cpu, SgdStep { op: *op, lr }, g, [p], scale);
}

/// One step of SGD with momentum on p and its buffer.
pub fn sgd_momentum(cpu: &Cpu, op: &Sgd, g: Gradient<'_>, states: [Place<'_, f32>; 2], scale: Scale, lr: f32) {
    update(cpu, SgdStep { op: *op, lr }, g, states, scale);
}

/// The scale of `grads` and their norm, both unscaled (torch.nn.utils.clip_grad_norm_).
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

/// What becomes of an element of K states.
pub(super) trait Step<const K: usize>: Copy + Sync {
    /// New values for old ones.
    fn step<S: Simd>(&self, s: S, g: S::V, old: [S::V; K]) -> [S::V; K];
}

#[derive(Clone, Copy)]
pub(super) struct AdamWStep {
    op: AdamW,
    /// What is left of p.
    left: f32,
    /// lr / c1
    rate: f32,
    /// 1 / sqrt(c2)
    root: f32,
}

impl AdamWStep {
    pub(super) fn new(op: &AdamW, hyper: [f32; 3]) -> Self {
        let [lr, c1, c2] = hyper.map(f64::from);
        let left = 1.0 - lr * f64::from(op.weight_decay);
        Self { op: *op, left: left as f32, rate: (lr / c1) as f32, root: (1.0 / c2.sqrt()) as f32 }
    }
}

impl Step<3> for AdamWStep {
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

#[derive(Clone, Copy)]
struct SgdStep {
    op: Sgd,
    lr: f32,
}

impl SgdStep {
    #[inline(always)]
    fn decayed<S: Simd>(&self, s: S, g: S::V, p: S::V) -> S::V {
        s.fma(s.splat(self.op.weight_decay), p, g)
    }

    #[inline(always)]
    fn down<S: Simd>(&self, s: S, p: S::V, by: S::V) -> S::V {
        s.fma(s.splat(-self.lr), by, p)
    }
}

impl Step<1> for SgdStep {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, g: S::V, [p]: [S::V; 1]) -> [S::V; 1] {
        [self.down(s, p, self.decayed(s, g, p))]
    }
}

impl Step<2> for SgdStep {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, g: S::V, [p, b]: [S::V; 2]) -> [S::V; 2] {
        let (g, momentum) = (self.decayed(s, g, p), s.splat(self.op.momentum));
        let b = s.fma(momentum, b, g);
        let by = if self.op.nesterov { s.fma(momentum, b, g) } else { b };
        [self.down(s, p, by), b]
    }
}

fn update<const K: usize>(
    cpu: &Cpu,
    step: impl Step<K>,
    g: Gradient<'_>,
    states: [Place<'_, f32>; K],
    scale: Scale,
) {
    assert!(states.iter().all(|state| state.len() == g.len()), "states and gradient of one length");
    if !scale.ok {
        return states.into_iter().for_each(Place::keep);
    }
    let (n, factor) = (g.len(), scale.factor);
    cpu.pool().run(n.div_ceil(GRAIN), &|task, _| {
        let range = task * GRAIN..n.min((task + 1) * GRAIN);
        cpu.isa().run(Update { step, g, states: &states, factor, range });
    });
}

struct Update<'a, T, const K: usize> {
    step: T,
    g: Gradient<'a>,
    states: &'a [Place<'a, f32>; K],
    factor: f32,
    range: Range<usize>,
}

impl<T: Step<K>, const K: usize> Kernel for Update<'_, T, K> {
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
                // SAFETY: as above; this task alone has them, and they were read.
                unsafe { s.store_n(state.write(i), new, n) };
            }
        }
    }
}

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
