//! Accumulation of gradients over micro-batches.
//!
//! Invariant: each sum is computed in f32 and rounded once to the element type of the accumulator.

use crate::Cpu;
use crate::rows::cast::Float16;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::training::optimizer_state::{Gradient, OptimizerState, load_half};
use crate::training::total::GRAIN;
use core::ops::Range;
use plimsoll_exec::half::{f32_to_bf16, f32_to_f16};

/// A gradient accumulator and its element type.
pub enum Accumulator<'a> {
    /// f32 elements.
    F32(OptimizerState<'a, f32>),
    /// bf16 or f16 elements.
    Float16(Float16, OptimizerState<'a, u16>),
}

/// Computes `acc = if keep { acc + g } else { g }`. With `keep == false` (the first micro-batch) the accumulator is
/// not read, so uninitialized or NaN contents do no harm. Panics if the lengths differ.
pub fn accumulate(cpu: &Cpu, acc: Accumulator<'_>, g: Gradient<'_>, keep: bool) {
    let n = g.len();
    let len = match &acc {
        Accumulator::F32(acc) => acc.len(),
        Accumulator::Float16(_, acc) => acc.len(),
    };
    assert_eq!(len, n, "sums and gradient of one length");
    cpu.pool().run(n.div_ceil(GRAIN), &|task, _| {
        cpu.isa().run(AccumulateElements {
            acc: &acc,
            g,
            keep,
            range: task * GRAIN..n.min((task + 1) * GRAIN),
        });
    });
}

/// Kernel that accumulates the elements `range` of one task.
struct AccumulateElements<'a> {
    acc: &'a Accumulator<'a>,
    g: Gradient<'a>,
    keep: bool,
    range: Range<usize>,
}

impl SimdKernel for AccumulateElements<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in self.range.clone().step_by(LANES) {
            let n = LANES.min(self.range.end - i);
            // SAFETY: elements i..i + n exist in the gradient and in the accumulator, and only this task accesses
            // this range of the accumulator.
            unsafe {
                let g = self.g.load(s, i, n);
                match self.acc {
                    Accumulator::F32(acc) => {
                        let sum = if self.keep { s.add(s.load_n(acc.read(i), n), g) } else { g };
                        s.store_n(acc.write(i), sum, n);
                    }
                    Accumulator::Float16(half, acc) => {
                        let sum = if self.keep { s.add(load_half(s, *half, acc.read(i), n), g) } else { g };
                        store_half(s, *half, acc.write(i), sum, n);
                    }
                }
            }
        }
    }
}

/// Rounds the first `n` lanes of `x` to 16 bits and stores them at `p`.
///
/// # Safety
/// `n` (at most 16) elements must be writable at `p`.
#[inline(always)]
unsafe fn store_half<S: Simd>(s: S, half: Float16, p: *mut u16, x: S::V, n: usize) {
    let mut floats = [0.0; LANES];
    // SAFETY: the array holds sixteen f32.
    unsafe { s.store(floats.as_mut_ptr(), x) };
    let bits: [u16; LANES] = match half {
        Float16::Bf16 => core::array::from_fn(|i| f32_to_bf16(floats[i])),
        Float16::F16 => core::array::from_fn(|i| f32_to_f16(floats[i])),
    };
    // SAFETY: the caller promises `n` writable elements.
    unsafe { core::ptr::copy_nonoverlapping(bits.as_ptr(), p, n) };
}
