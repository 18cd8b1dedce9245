//! f64 sums that do not depend on the number of threads.
//!
//! Invariant: terms are added within blocks of fixed size, in sixteen lanes that are then added in order; the sums of
//! blocks are added in their order. The partial sums are on the caller's stack.

use crate::Cpu;
use crate::simd::{LANES, Simd};
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Elements per block, and per task of a streaming kernel: some microseconds of work, a fraction of L2.
pub(crate) const GRAIN: usize = 16 * 1024;

/// Blocks per parallel run: enough to keep all threads busy, few enough for their sums to be on the stack.
const WAVE: usize = 512;

/// The sum of `of(chunk)` over `0..chunks`, computed in parallel and added in order.
pub(crate) fn total(cpu: &Cpu, chunks: usize, of: &(dyn Fn(usize) -> f64 + Sync)) -> f64 {
    let partial = [const { AtomicU64::new(0) }; WAVE];
    let mut sum = 0.0;
    for first in (0..chunks).step_by(WAVE) {
        let wave = WAVE.min(chunks - first);
        cpu.pool().run(wave, &|task, _| partial[task].store(of(first + task).to_bits(), Relaxed));
        sum = partial[..wave].iter().fold(sum, |sum, part| sum + f64::from_bits(part.load(Relaxed)));
    }
    sum
}

/// The sum of squares over `range`; `load(i, n)` gives the n elements from i on, zeros after them.
#[inline(always)]
pub(crate) fn squares<S: Simd>(s: S, range: Range<usize>, load: impl Fn(usize, usize) -> S::V) -> f64 {
    let mut lanes = [0.0; LANES];
    for i in range.clone().step_by(LANES) {
        add_squares(s, &mut lanes, load(i, LANES.min(range.end - i)));
    }
    lanes.iter().sum()
}

/// Adds the square of each lane to that lane's sum.
#[inline(always)]
pub(crate) fn add_squares<S: Simd>(s: S, sums: &mut [f64; LANES], x: S::V) {
    let mut lanes = [0.0_f32; LANES];
    // SAFETY: sixteen floats.
    unsafe { s.store(lanes.as_mut_ptr(), x) };
    for (sum, x) in sums.iter_mut().zip(lanes) {
        *sum += f64::from(x) * f64::from(x);
    }
}
