//! Changes of element type.
//!
//! Invariant: widening is exact; narrowing rounds once, to nearest, ties to even (IEEE 754), by integer
//! operations on each lane, so all instruction sets agree; NaN stays NaN.

use super::Cpu;
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use core::ops::Range;

/// A floating-point number in memory.
pub trait Element: Copy + Send + Sync {
    /// Its value, which every f32 can hold.
    fn widen(self) -> f32;
    /// The nearest one.
    fn round(x: f32) -> Self;
}

/// The bits of a bfloat16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// The bits of an IEEE binary16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// y = x, rounded to nearest even where y is narrower.
pub fn cast<A: Element, B: Element>(cpu: &Cpu, x: &[A], y: &mut [B]) {
    /// Elements of a task: some microseconds of streaming.
    const GRAIN: usize = 16 * 1024;
    assert_eq!(x.len(), y.len(), "x and y of one length");
    let (n, to) = (x.len(), y.as_mut_ptr() as usize);
    cpu.pool().run(n.div_ceil(GRAIN), &|task, _| {
        let Range { start, end } = task * GRAIN..n.min((task + 1) * GRAIN);
        // SAFETY: tasks have ranges of y apart from each other, inside of it.
        let y = unsafe { core::slice::from_raw_parts_mut((to as *mut B).add(start), end - start) };
        cpu.isa().run(Cast { x: &x[start..end], y });
    });
}

struct Cast<'a, A, B> {
    x: &'a [A],
    y: &'a mut [B],
}

impl<A: Element, B: Element> Kernel for Cast<'_, A, B> {
    /// Sixteen elements at a time, which the compiler turns into vectors.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (whole, rest) = self.x.as_chunks::<LANES>();
        let (to, to_rest) = self.y.as_chunks_mut::<LANES>();
        for (x, y) in whole.iter().zip(to) {
            for i in 0..LANES {
                y[i] = B::round(x[i].widen());
            }
        }
        for (x, y) in rest.iter().zip(to_rest) {
            *y = B::round(x.widen());
        }
    }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn round(x: f32) -> Self {
        x
    }
}

impl Element for Bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    /// Half of the unit in the last place less one bit, and one more where that unit is odd, carry into it.
    #[inline(always)]
    fn round(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16;
        Self(if bits & 0x7FFF_FFFF > 0x7F80_0000 { (bits >> 16) as u16 | 0x40 } else { rounded })
    }
}

impl Element for F16 {
    /// The exponent moves by a product with 2^112, which also makes subnormal numbers normal.
    #[inline(always)]
    fn widen(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7FFF) << 13;
        let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
        // Infinity and NaN have all bits of the exponent in either format.
        let bits = if magnitude >= 0x7C00 << 13 { magnitude | 0x7F80_0000 } else { finite };
        f32::from_bits(bits | (u32::from(self.0 & 0x8000) << 16))
    }
    /// As for bf16 where the result is normal; below, adding 1/2 lets the hardware round to units of 2^-24, which
    /// are the last bits of 1/2.
    #[inline(always)]
    fn round(x: f32) -> Self {
        let (bits, sign) = (x.to_bits() & 0x7FFF_FFFF, ((x.to_bits() >> 16) & 0x8000) as u16);
        let normal = (bits.wrapping_sub(112 << 23).wrapping_add(0xFFF + ((bits >> 13) & 1)) >> 13) as u16;
        let small = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits()) as u16;
        let finite = if bits < (127 - 14) << 23 { small } else { normal };
        // 65520 is the middle between the largest number and 2^16: it rounds to infinity.
        let large = if bits > 0x7F80_0000 { 0x7E00 } else { 0x7C00 };
        Self(sign | if bits >= 65_520.0_f32.to_bits() { large } else { finite })
    }
}
