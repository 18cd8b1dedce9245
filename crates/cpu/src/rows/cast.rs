//! Conversions between f32 and the 16-bit formats bf16 and f16.
//!
//! Invariant: widening is exact; narrowing rounds once, to nearest with ties to even (IEEE 754). NaN stays NaN. The
//! bits are the same on every instruction set.

use crate::Cpu;
use crate::element::{Bf16, Element};
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use core::ops::Range;
use plimsoll_exec::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// A 16-bit floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float16 {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

/// Converts 16-bit numbers to f32: y = x, exact. Panics if the lengths differ.
pub fn widen(cpu: &Cpu, half: Float16, x: &[u16], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "x and y of one length");
    let to = y.as_mut_ptr() as usize;
    by_elements(cpu, x.len(), &|range| {
        // SAFETY: the tasks' ranges are disjoint and inside y.
        let y = unsafe { core::slice::from_raw_parts_mut((to as *mut f32).add(range.start), range.len()) };
        cpu.isa().run(Widen { half, x: &x[range], y });
    });
}

/// Converts f32 to 16-bit numbers: y = x, rounded to nearest with ties to even. Panics if the lengths differ.
pub fn narrow(cpu: &Cpu, half: Float16, x: &[f32], y: &mut [u16]) {
    assert_eq!(x.len(), y.len(), "x and y of one length");
    let to = y.as_mut_ptr() as usize;
    by_elements(cpu, x.len(), &|range| {
        // SAFETY: the tasks' ranges are disjoint and inside y.
        let y = unsafe { core::slice::from_raw_parts_mut((to as *mut u16).add(range.start), range.len()) };
        cpu.isa().run(Narrow { half, x: &x[range], y });
    });
}

/// Converts numbers in the format `from` to the other 16-bit format, rounded once. Panics if the lengths differ.
pub fn exchange(cpu: &Cpu, from: Float16, x: &[u16], y: &mut [u16]) {
    assert_eq!(x.len(), y.len(), "x and y of one length");
    let to = y.as_mut_ptr() as usize;
    by_elements(cpu, x.len(), &|range| {
        // SAFETY: the tasks' ranges are disjoint and inside y.
        let y = unsafe { core::slice::from_raw_parts_mut((to as *mut u16).add(range.start), range.len()) };
        cpu.isa().run(Exchange { from, x: &x[range], y });
    });
}

/// Runs `work` over `0..n` in parallel, in consecutive ranges.
fn by_elements(cpu: &Cpu, n: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
    /// Elements per task: some microseconds of streaming.
    const GRAIN: usize = 16 * 1024;
    cpu.pool().run(n.div_ceil(GRAIN), &|task, _| work(task * GRAIN..n.min((task + 1) * GRAIN)));
}

/// 16 bits to f32, for `Isa::run`.
struct Widen<'a> {
    half: Float16,
    x: &'a [u16],
    y: &'a mut [f32],
}

impl SimdKernel for Widen<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.half {
            Float16::Bf16 => copy(s, bytemuck::cast_slice::<u16, Bf16>(self.x), self.y),
            Float16::F16 => map(self.x, self.y, f16_to_f32),
        }
    }
}

/// f32 to 16 bits, for `Isa::run`.
struct Narrow<'a> {
    half: Float16,
    x: &'a [f32],
    y: &'a mut [u16],
}

impl SimdKernel for Narrow<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.half {
            Float16::Bf16 => copy(s, self.x, bytemuck::cast_slice_mut::<u16, Bf16>(self.y)),
            Float16::F16 => map(self.x, self.y, f32_to_f16),
        }
    }
}

/// One 16-bit format to the other, for `Isa::run`.
struct Exchange<'a> {
    from: Float16,
    x: &'a [u16],
    y: &'a mut [u16],
}

impl SimdKernel for Exchange<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        match self.from {
            Float16::Bf16 => map(self.x, self.y, |x| f32_to_f16(bf16_to_f32(x))),
            Float16::F16 => map(self.x, self.y, |x| f32_to_bf16(f16_to_f32(x))),
        }
    }
}

/// Copies x to y through SIMD vectors of f32, which convert the element types.
#[inline(always)]
fn copy<S: Simd, A: Element, B: Element>(s: S, x: &[A], y: &mut [B]) {
    for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
        // SAFETY: x and y have one length, so both chunks hold x.len() elements.
        unsafe { B::store_n(s, y.as_mut_ptr(), A::load_n(s, x.as_ptr(), x.len()), y.len()) };
    }
}

/// Sets `y[i] = of(x[i])`. The inner loop has a fixed length of sixteen, so that the compiler vectorises it with the
/// target features of the calling kernel.
#[inline(always)]
fn map<A: Copy, B>(x: &[A], y: &mut [B], of: impl Fn(A) -> B) {
    let (whole, rest) = x.as_chunks::<LANES>();
    let (to, to_rest) = y.as_chunks_mut::<LANES>();
    for (x, y) in whole.iter().zip(to) {
        for i in 0..LANES {
            y[i] = of(x[i]);
        }
    }
    for (x, y) in rest.iter().zip(to_rest) {
        *y = of(*x);
    }
}
