//! AdamW with block-wise quantized 8-bit moments (Dettmers et al. 2022).
//!
//! Invariant: a block's new states depend on that block alone. A task holds the f32 moments of one block at a time.

use crate::Cpu;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::training::optimizer::{AdamWRule, ScaledGradient, UpdateRule};
use crate::training::optimizer_state::{Gradient, OptimizerState};
use crate::training::total::GRAIN;
use plimsoll_exec::dynamic_codes::{DynamicCodes, SIGNED, UNSIGNED};
use plimsoll_graph::ops::AdamW;

/// Elements per quantization block.
const BLOCK: usize = plimsoll_graph::ops::BLOCK as usize;

/// An optimizer moment, quantized to 8 bits with the largest magnitude of each block as its scale.
pub struct QuantizedMoment<'a> {
    /// Quantized values, one per element.
    pub values: OptimizerState<'a, u8>,
    /// Largest magnitude of each block.
    pub absmax: OptimizerState<'a, f32>,
}

impl QuantizedMoment<'_> {
    /// Whether this is a moment of `n` elements.
    fn fits(&self, n: usize) -> bool {
        self.values.len() == n && self.absmax.len() == n.div_ceil(BLOCK)
    }

    /// Makes the new values equal to the old ones.
    fn keep(self) {
        self.values.keep();
        self.absmax.keep();
    }
}

/// States of AdamW with quantized moments.
pub struct QuantizedAdamWStates<'a> {
    /// Parameter.
    pub p: OptimizerState<'a, f32>,
    /// First moment.
    pub m: QuantizedMoment<'a>,
    /// Second moment.
    pub v: QuantizedMoment<'a>,
}

/// One step of AdamW with quantized moments; hyper = (lr, 1 - b1^t, 1 - b2^t). Panics if the lengths do not match.
pub fn adamw_8bit(
    cpu: &Cpu,
    op: &AdamW,
    gradient: ScaledGradient<'_>,
    states: QuantizedAdamWStates<'_>,
    hyper: [f32; 3],
) {
    let ScaledGradient { g, scale } = gradient;
    let QuantizedAdamWStates { p, m, v } = states;
    let n = g.len();
    let blocks = n.div_ceil(BLOCK);
    assert!(p.len() == n && m.fits(n) && v.fits(n), "states for {n} elements");
    if !scale.ok {
        p.keep();
        m.keep();
        return v.keep();
    }
    const BLOCKS_PER_TASK: usize = GRAIN / BLOCK;
    let rule = AdamWRule::new(op, hyper);
    cpu.pool().run(blocks.div_ceil(BLOCKS_PER_TASK), &|task, _| {
        for block in task * BLOCKS_PER_TASK..blocks.min((task + 1) * BLOCKS_PER_TASK) {
            cpu.isa().run(BlockUpdate { rule, g, factor: scale.factor, p: &p, m: &m, v: &v, block });
        }
    });
}

/// One optimizer step on one block, for `Isa::run`.
struct BlockUpdate<'a> {
    rule: AdamWRule,
    g: Gradient<'a>,
    factor: f32,
    p: &'a OptimizerState<'a, f32>,
    m: &'a QuantizedMoment<'a>,
    v: &'a QuantizedMoment<'a>,
    block: usize,
}

impl SimdKernel for BlockUpdate<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let first = self.block * BLOCK;
        let len = BLOCK.min(self.p.len() - first);
        let mut m = [0.0; BLOCK];
        let mut v = [0.0; BLOCK];
        let first_moment = MomentBlock { codes: &SIGNED, moment: self.m, block: self.block };
        let second_moment = MomentBlock { codes: &UNSIGNED, moment: self.v, block: self.block };
        first_moment.decode(&mut m[..len]);
        second_moment.decode(&mut v[..len]);
        for j in (0..len).step_by(LANES) {
            let i = first + j;
            let n = LANES.min(len - j);
            let m = &mut m[j..j + LANES];
            let v = &mut v[j..j + LANES];
            // SAFETY: elements i..i + n of p and g, which only this task uses; sixteen elements of m and v.
            unsafe {
                let g = s.mul(s.splat(self.factor), self.g.load(s, i, n));
                let old = [s.load_n(self.p.read(i), n), s.load(m.as_ptr()), s.load(v.as_ptr())];
                let new = self.rule.step(s, g, old);
                s.store_n(self.p.write(i), new[0], n);
                s.store(m.as_mut_ptr(), new[1]);
                s.store(v.as_mut_ptr(), new[2]);
            }
        }
        first_moment.encode(s, &mut m, len);
        second_moment.encode(s, &mut v, len);
    }
}

/// One block of a moment.
struct MomentBlock<'a> {
    /// The numbers that quantized values stand for.
    codes: &'a DynamicCodes,
    moment: &'a QuantizedMoment<'a>,
    block: usize,
}

impl MomentBlock<'_> {
    /// Dequantizes the block.
    #[inline(always)]
    fn decode(&self, to: &mut [f32]) {
        // SAFETY: a block of this task, not yet overwritten, with as many elements as `to`.
        let (absmax, values) = unsafe {
            let values = core::slice::from_raw_parts(self.moment.values.read(self.block * BLOCK), to.len());
            (*self.moment.absmax.read(self.block), values)
        };
        for (to, &value) in to.iter_mut().zip(values) {
            *to = absmax * self.codes.value(value);
        }
    }

    /// Quantizes the first `len` elements of `x`; the other elements must be zero. Overwrites `x`.
    #[inline(always)]
    fn encode<S: Simd>(&self, s: S, x: &mut [f32; BLOCK], len: usize) {
        let mut largest = s.splat(0.0);
        for lanes in x.chunks_exact(LANES) {
            // SAFETY: sixteen floats.
            largest = s.max(s.abs(unsafe { s.load(lanes.as_ptr()) }), largest);
        }
        let absmax = s.max_lane(largest);
        // A block of zeros stays zero for any divisor; dividing by absmax = 0 would give NaN.
        let divisor = s.splat(if absmax == 0.0 { 1.0 } else { absmax });
        for lanes in x.chunks_exact_mut(LANES) {
            // SAFETY: sixteen floats.
            unsafe { s.store(lanes.as_mut_ptr(), s.div(s.load(lanes.as_ptr()), divisor)) };
        }
        // SAFETY: a block of this task with `len` elements, which was read before.
        let values = unsafe {
            *self.moment.absmax.write(self.block) = absmax;
            core::slice::from_raw_parts_mut(self.moment.values.write(self.block * BLOCK), len)
        };
        for (value, &x) in values.iter_mut().zip(x.iter()) {
            *value = self.codes.nearest(x);
        }
    }
}
