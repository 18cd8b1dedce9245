//! AdamW with block-wise quantized 8-bit moments (Dettmers et al. 2022).
//!
//! Invariant: a block's new states depend on that block alone. A task holds the f32 moments of one block at a time.

use crate::Cpu;
use crate::simd::isa::Kernel;
use crate::simd::{LANES, Simd};
use crate::training::optimizer::{AdamWStep, Scale, UpdateRule};
use crate::training::optimizer_state::{Gradient, OptimizerState};
use crate::training::total::GRAIN;
use plimsoll_exec::dynamic_codes::{DynamicCodes, SIGNED, UNSIGNED};
use plimsoll_graph::ops::AdamW;

/// Elements per quantization block.
const BLOCK: usize = plimsoll_graph::ops::BLOCK as usize;

/// An optimizer moment, quantized to 8 bits with the largest magnitude of each block as its scale.
pub struct Moment<'a> {
    /// Quantized values, one per element.
    pub codes: OptimizerState<'a, u8>,
    /// Largest magnitude of each block.
    pub absmax: OptimizerState<'a, f32>,
}

impl Moment<'_> {
    /// Makes the new values equal to the old ones.
    fn keep(self) {
        self.codes.keep();
        self.absmax.keep();
    }
}

/// One step of AdamW on p and the quantized moments m and v; hyper = (lr, 1 - b1^t, 1 - b2^t). Panics if the lengths
/// do not match.
pub fn adamw_8bit(
    cpu: &Cpu,
    op: &AdamW,
    g: Gradient<'_>,
    p: OptimizerState<'_, f32>,
    [m, v]: [Moment<'_>; 2],
    scale: Scale,
    hyper: [f32; 3],
) {
    let n = g.len();
    let blocks = g.len().div_ceil(BLOCK);
    let fits = |x: &Moment<'_>| x.codes.len() == n && x.absmax.len() == blocks;
    assert!(p.len() == n && fits(&m) && fits(&v), "states for {n} elements");
    if !scale.ok {
        p.keep();
        m.keep();
        return v.keep();
    }
    const EACH: usize = GRAIN / BLOCK;
    let step = AdamWStep::new(op, hyper);
    cpu.pool().run(blocks.div_ceil(EACH), &|task, _| {
        for block in task * EACH..blocks.min((task + 1) * EACH) {
            cpu.isa().run(QuantBlock { step, g, factor: scale.factor, p: &p, m: &m, v: &v, block });
        }
    });
}

/// One optimizer step on one block, for `Isa::run`.
struct QuantBlock<'a> {
    step: AdamWStep,
    g: Gradient<'a>,
    factor: f32,
    p: &'a OptimizerState<'a, f32>,
    m: &'a Moment<'a>,
    v: &'a Moment<'a>,
    block: usize,
}

impl Kernel for QuantBlock<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let first = self.block * BLOCK;
        let len = BLOCK.min(self.p.len() - first);
        let mut m = [0.0; BLOCK];
        let mut v = [0.0; BLOCK];
        decode(&SIGNED, self.m, self.block, &mut m[..len]);
        decode(&UNSIGNED, self.v, self.block, &mut v[..len]);
        for j in (0..len).step_by(LANES) {
            let i = first + j;
            let n = LANES.min(len - j);
            let m = &mut m[j..j + LANES];
            let v = &mut v[j..j + LANES];
            // SAFETY: elements i..i + n of p and g, which only this task uses; sixteen elements of m and v.
            unsafe {
                let g = s.mul(s.splat(self.factor), self.g.load(s, i, n));
                let old = [s.load_n(self.p.read(i), n), s.load(m.as_ptr()), s.load(v.as_ptr())];
                let new = self.step.step(s, g, old);
                s.store_n(self.p.write(i), new[0], n);
                s.store(m.as_mut_ptr(), new[1]);
                s.store(v.as_mut_ptr(), new[2]);
            }
        }
        encode(s, &SIGNED, &mut m, len, self.m, self.block);
        encode(s, &UNSIGNED, &mut v, len, self.v, self.block);
    }
}

/// Dequantizes one block of a moment.
#[inline(always)]
fn decode(codes: &DynamicCodes, moment: &Moment<'_>, block: usize, to: &mut [f32]) {
    // SAFETY: a block of this task, not yet overwritten, with as many elements as `to`.
    let (absmax, code) = unsafe {
        let code = core::slice::from_raw_parts(moment.codes.read(block * BLOCK), to.len());
        (*moment.absmax.read(block), code)
    };
    for (to, &code) in to.iter_mut().zip(code) {
        *to = absmax * codes.value(code);
    }
}

/// Quantizes the first `len` elements of `x` as one block; the other elements must be zero. Overwrites `x`.
#[inline(always)]
fn encode<S: Simd>(
    s: S,
    codes: &DynamicCodes,
    x: &mut [f32; BLOCK],
    len: usize,
    moment: &Moment<'_>,
    block: usize,
) {
    let mut largest = s.splat(0.0);
    for lanes in x.chunks_exact(LANES) {
        // SAFETY: sixteen floats.
        largest = s.max(s.abs(unsafe { s.load(lanes.as_ptr()) }), largest);
    }
    let absmax = s.max_lane(largest);
    // A block of zeros stays zero for any divisor; dividing by absmax = 0 would give NaN.
    let below = s.splat(if absmax == 0.0 { 1.0 } else { absmax });
    for lanes in x.chunks_exact_mut(LANES) {
        // SAFETY: sixteen floats.
        unsafe { s.store(lanes.as_mut_ptr(), s.div(s.load(lanes.as_ptr()), below)) };
    }
    // SAFETY: a block of this task with `len` elements, which was read before.
    let code = unsafe {
        *moment.absmax.write(block) = absmax;
        core::slice::from_raw_parts_mut(moment.codes.write(block * BLOCK), len)
    };
    for (code, &x) in code.iter_mut().zip(x.iter()) {
        *code = codes.nearest(x);
    }
}
