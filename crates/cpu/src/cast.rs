//! Numbers of 16 bits to f32 and back.
//!
//! Invariant: widening is exact; narrowing rounds once, to nearest, ties to even (IEEE 754), by integer
//! operations on each lane, so all instruction sets agree; NaN stays NaN.

use super::Cpu;
use super::element::{Bf16, Element};
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use core::ops::Range;
use plimsoll_exec::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// A format of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

/// y = x.
pub fn widen(cpu: &Cpu, half: Half, x: &[u16], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "x and y of one length");
    let to = y.as_mut_ptr() as usize;
    by_elements(cpu, x.len(), &|range| {
        // SAFETY: tasks have ranges of y apart from each other, inside of it.
        let y = unsafe { core::slice::from_raw_parts_mut((to as *mut f32).add(range.start), range.len()) };
        cpu.isa().run(Widen { half, x: &x[range], y });
    });
}

/// y = x, rounded.
pub fn narrow(cpu: &Cpu, half: Half, x: &[f32], y: &mut [u16]) {
    assert_eq!(x.len(), y.len(), "x and y of one length");
    let to = y.as_mut_ptr() as usize;
    by_elements(cpu, x.len(), &|range| {
        // SAFETY: tasks have ranges of y apart from each other, inside of it.
        let y = unsafe { core::slice::from_raw_parts_mut((to as *mut u16).add(range.start), range.len()) };
        cpu.isa().run(Narrow { half, x: &x[range], y });
    });
}

/// y = x, from one format of 16 bits to the other.
pub fn exchange(cpu: &Cpu, from: Half, x: &[u16], y: &mut [u16]) {
    assert_eq!(x.len(), y.len(), "x and y of one length");
    let to = y.as_mut_ptr() as usize;
    by_elements(cpu, x.len(), &|range| {
        // SAFETY: tasks have ranges of y apart from each other, inside of it.
        let y = unsafe { core::slice::from_raw_parts_mut((to as *mut u16).add(range.start), range.len()) };
        cpu.isa().run(Exchange { from, x: &x[range], y });
    });
}

fn by_elements(cpu: &Cpu, n: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
    /// Elements of a task: some microseconds of streaming.
    const GRAIN: usize = 16 * 1024;
    cpu.pool().run(n.div_ceil(GRAIN), &|task, _| work(task * GRAIN..n.min((task + 1) * GRAIN)));
}

struct Widen<'a> {
    half: Half,
    x: &'a [u16],
    y: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.half {
            Half::Bf16 => copy(s, bytemuck::cast_slice::<u16, Bf16>(self.x), self.y),
            Half::F16 => map(self.x, self.y, f16_to_f32),
        }
    }
}

struct Narrow<'a> {
    half: Half,
    x: &'a [f32],
    y: &'a mut [u16],
}

impl Kernel for Narrow<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.half {
            Half::Bf16 => copy(s, self.x, bytemuck::cast_slice_mut::<u16, Bf16>(self.y)),
            Half::F16 => map(self.x, self.y, f32_to_f16),
        }
    }
}

struct Exchange<'a> {
    from: Half,
    x: &'a [u16],
    y: &'a mut [u16],
}

impl Kernel for Exchange<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        match self.from {
            Half::Bf16 => map(self.x, self.y, |x| f32_to_f16(bf16_to_f32(x))),
            Half::F16 => map(self.x, self.y, |x| f32_to_bf16(f16_to_f32(x))),
        }
    }
}

/// y = x through lanes of f32.
#[inline(always)]
fn copy<S: Simd, A: Element, B: Element>(s: S, x: &[A], y: &mut [B]) {
    for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
        // SAFETY: both have the elements of this chunk.
        unsafe { B::store_n(s, y.as_mut_ptr(), A::load_n(s, x.as_ptr(), x.len()), y.len()) };
    }
}

/// `of` everywhere, sixteen elements at a time, which the compiler turns into vectors.
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
