//! The element types of matrices that kernels read and write as they lie in memory.
//!
//! Invariant: arithmetic is f32 on all of them. Loading bf16 is exact; storing rounds once, to nearest, ties to
//! even, NaN stays NaN, with the same bits on every instruction set.

use super::math;
use super::simd::{LANES, Simd};
use bytemuck::{Pod, Zeroable};
use plimsoll_exec::half::bf16_to_f32;

/// What lanes are loaded from and stored to.
pub trait Element: Pod + Send + Sync {
    /// The same number.
    fn wide(self) -> f32;
    /// Sixteen elements as lanes.
    /// # Safety
    /// Sixteen elements must be readable at `p`.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;
    /// The first `n` (at most 16) lanes from memory, zeros after them.
    /// # Safety
    /// `n` elements must be readable at `p`.
    unsafe fn load_n<S: Simd>(s: S, p: *const Self, n: usize) -> S::V;
    /// Writes all lanes.
    /// # Safety
    /// Sixteen elements must be writable at `p`.
    unsafe fn store<S: Simd>(s: S, p: *mut Self, v: S::V);
    /// Writes the first `n` (at most 16) lanes.
    /// # Safety
    /// `n` elements must be writable at `p`.
    unsafe fn store_n<S: Simd>(s: S, p: *mut Self, v: S::V, n: usize);
    /// GELU, as exact as what is then rounded to this type needs it.
    fn gelu<S: Simd>(s: S, x: S::V) -> S::V;
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
}

/// bfloat16, by its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

// SAFETY: a u16 and nothing else, of which every pattern of bits is a value.
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
        // SAFETY: the caller promises n <= 16 elements; `whole` holds sixteen.
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
        // SAFETY: `whole` holds sixteen; the caller promises n <= 16 elements.
        unsafe {
            s.narrow(whole.as_mut_ptr(), v);
            copy(whole.as_ptr(), p.cast(), n);
        }
    }
    #[inline(always)]
    fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
        math::gelu_bf16(s, x)
    }
}

/// The end of a ragged row, apart from the kernels that are to be small.
///
/// # Safety
/// `n` numbers must be readable at `from` and writable at `to`, apart from each other.
#[inline(never)]
unsafe fn copy(from: *const u16, to: *mut u16, n: usize) {
    // SAFETY: as the caller promises.
    unsafe { core::ptr::copy_nonoverlapping(from, to, n) };
}
