//! Element types of matrices that kernels read and write without a widened copy: f32 and bf16.
//!
//! Invariant: arithmetic is f32 for both types. Loading bf16 is exact; storing rounds once, to nearest with ties to
//! even. NaN stays NaN. The bits are the same on every instruction set.

use crate::simd::math;
use crate::simd::{LANES, Simd};
use bytemuck::{Pod, Zeroable};
use plimsoll_exec::half::bf16_to_f32;

/// An element type in memory that SIMD vectors of f32 are loaded from and stored to.
pub trait Element: Pod + Send + Sync {
    /// The value as f32.
    fn wide(self) -> f32;
    /// Loads sixteen elements.
    /// # Safety
    /// Sixteen elements must be readable at `p`.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;
    /// Loads `n` (at most 16) elements into the first lanes; the others are zero.
    /// # Safety
    /// `n` elements must be readable at `p`.
    unsafe fn load_n<S: Simd>(s: S, p: *const Self, n: usize) -> S::V;
    /// Stores all lanes.
    /// # Safety
    /// Sixteen elements must be writable at `p`.
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V);
    /// Stores the first `n` (at most 16) lanes.
    /// # Safety
    /// `n` elements must be writable at `p`.
    unsafe fn store_n<S: Simd>(s: S, p: *mut Self, v: S::V, n: usize);
    /// GELU, with an accuracy that suffices for results that are rounded to this type.
    fn gelu<S: Simd>(s: S, x: S::V) -> S::V;
    /// SiLU, with an accuracy that suffices for results that are rounded to this type.
    fn silu<S: Simd>(s: S, x: S::V) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { s.load(p) }
    }
    #[inline(always)]
    unsafe fn load_n<S: Simd>(s: S, p: *const f32, n: usize) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { s.load_n(p, n) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut f32, v: S::V) {
        // SAFETY: as the caller promises.
        unsafe { s.store(p, v) }
    }
    #[inline(always)]
    unsafe fn store_n<S: Simd>(s: S, p: *mut f32, v: S::V, n: usize) {
        // SAFETY: as the caller promises.
        unsafe { s.store_n(p, v, n) }
    }
    #[inline(always)]
    fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
        math::gelu(s, x)
    }
    #[inline(always)]
    fn silu<S: Simd>(s: S, x: S::V) -> S::V {
        math::silu(s, x)
    }
}

/// A bfloat16 number, represented by its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

// SAFETY: a transparent wrapper of u16, for which every bit pattern is valid.
unsafe impl Zeroable for Bf16 {}
// SAFETY: as above.
unsafe impl Pod for Bf16 {}

impl Element for Bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        bf16_to_f32(self.0)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Bf16) -> S::V {
        // SAFETY: as the caller promises.
        unsafe { s.widen(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_n<S: Simd>(s: S, p: *const Bf16, n: usize) -> S::V {
        if n == LANES {
            // SAFETY: as the caller promises.
            return unsafe { s.widen(p.cast()) };
        }
        let mut whole = [0_u16; LANES];
        // SAFETY: the caller promises n <= 16 readable elements; `whole` holds sixteen.
        unsafe {
            copy(p.cast(), whole.as_mut_ptr(), n);
            s.widen(whole.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Bf16, v: S::V) {
        // SAFETY: as the caller promises.
        unsafe { s.narrow(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn store_n<S: Simd>(s: S, p: *mut Bf16, v: S::V, n: usize) {
        if n == LANES {
            // SAFETY: as the caller promises.
            return unsafe { s.narrow(p.cast(), v) };
        }
        let mut whole = [0_u16; LANES];
        // SAFETY: `whole` holds sixteen elements; the caller promises n <= 16 writable elements.
        unsafe {
            s.narrow(whole.as_mut_ptr(), v);
            copy(whole.as_ptr(), p.cast(), n);
        }
    }
    #[inline(always)]
    fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
        math::gelu_bf16(s, x)
    }
    #[inline(always)]
    fn silu<S: Simd>(s: S, x: S::V) -> S::V {
        math::silu_bf16(s, x)
    }
}

/// Copies the `n` elements of a partial vector. Not inlined, to keep the code of the kernels small.
///
/// # Safety
/// `n` numbers must be readable at `from` and writable at `to`, and the two ranges must not overlap.
#[inline(never)]
unsafe fn copy(from: *const u16, to: *mut u16, n: usize) {
    // SAFETY: as the caller promises.
    unsafe { core::ptr::copy_nonoverlapping(from, to, n) };
}
