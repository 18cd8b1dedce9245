//! Sums of products of integers of 8 bits on sixteen lanes: what `gemm_int8` is written in where there are no tiles.
//!
//! Invariant: sums are exact, so they are the same on every instruction set. Codes are from -127 to 127: the product of a
//! pair of pairs fits 16 bits.

use super::simd::{LANES, Portable};
#[cfg(target_arch = "x86_64")]
use super::simd_x86::{Avx2, Avx512};
#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::*;

/// Codes of a row that one lane takes at once.
pub(super) const QUAD: usize = 4;

/// Sixteen sums. A value of an implementing type is the proof that this CPU has the instructions.
pub(super) trait Dot: Copy {
    /// Sixteen i32.
    type I: Copy;
    /// A line of a tile, made ready for many rows.
    type W: Copy;
    /// Rows of the tallest register tile, which is two vectors wide.
    const HEIGHT: usize;

    /// What sums with this row of x begin with.
    /// # Safety
    /// `quads` times four codes must be readable at `x`.
    unsafe fn begin(self, x: *const u8, quads: usize) -> Self::I;
    /// Four codes of each of sixteen rows of W.
    /// # Safety
    /// 64 codes must be readable at `w`.
    unsafe fn line(self, w: *const u8) -> Self::W;
    /// sum + the products of four codes of x with each row's.
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I;
    /// The sums as f32, rounded to nearest even.
    /// # Safety
    /// Sixteen f32 must be writable at `to`.
    unsafe fn numbers(self, sum: Self::I, to: *mut f32);
}

impl Dot for Portable {
    type I = [i32; LANES];
    type W = [[i8; QUAD]; LANES];
    const HEIGHT: usize = 4;

    #[inline(always)]
    unsafe fn begin(self, _: *const u8, _: usize) -> Self::I {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn line(self, w: *const u8) -> Self::W {
        // SAFETY: as the caller promises.
        unsafe { w.cast::<Self::W>().read_unaligned() }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I {
        let x = x.to_le_bytes().map(|x| i32::from(x as i8));
        core::array::from_fn(|i| {
            let w = w[i].map(i32::from);
            sum[i] + ((x[0] * w[0] + x[1] * w[1]) + (x[2] * w[2] + x[3] * w[3]))
        })
    }
    #[inline(always)]
    unsafe fn numbers(self, sum: Self::I, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(sum.map(|sum| sum as f32)) }
    }
}

/// Products of |w|, as unsigned numbers, and x with w's sign.
#[cfg(target_arch = "x86_64")]
impl Dot for Avx2 {
    type I = [__m256i; 2];
    type W = [__m256i; 2];
    const HEIGHT: usize = 2;

    #[inline(always)]
    unsafe fn begin(self, _: *const u8, _: usize) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_setzero_si256(); 2] }
    }
    #[inline(always)]
    unsafe fn line(self, w: *const u8) -> Self::W {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { [_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(32).cast())] }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let (x, ones) = (_mm256_set1_epi32(x), _mm256_set1_epi16(1));
            let low = _mm256_maddubs_epi16(_mm256_abs_epi8(w[0]), _mm256_sign_epi8(x, w[0]));
            let high = _mm256_maddubs_epi16(_mm256_abs_epi8(w[1]), _mm256_sign_epi8(x, w[1]));
            [
                _mm256_add_epi32(sum[0], _mm256_madd_epi16(low, ones)),
                _mm256_add_epi32(sum[1], _mm256_madd_epi16(high, ones)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn numbers(self, sum: Self::I, to: *mut f32) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            _mm256_storeu_ps(to, _mm256_cvtepi32_ps(sum[0]));
            _mm256_storeu_ps(to.add(8), _mm256_cvtepi32_ps(sum[1]));
        }
    }
}

/// As on AVX2; w's signs are a mask.
#[cfg(target_arch = "x86_64")]
impl Dot for Avx512 {
    type I = __m512i;
    type W = (__m512i, __mmask64);
    const HEIGHT: usize = 8;

    #[inline(always)]
    unsafe fn begin(self, _: *const u8, _: usize) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn line(self, w: *const u8) -> Self::W {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let w = _mm512_loadu_si512(w.cast());
            (_mm512_abs_epi8(w), _mm512_movepi8_mask(w))
        }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, x: i32, (w, negative): Self::W) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let x = _mm512_set1_epi32(x);
            let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
            let pairs = _mm512_maddubs_epi16(w, x);
            _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn numbers(self, sum: Self::I, to: *mut f32) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_ps(to, _mm512_cvtepi32_ps(sum)) }
    }
}

/// AVX-512 with VNNI, whose products are of unsigned numbers and signed ones: w is w + 128, and a row's sums begin with 128
/// times the sum of its x less.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Vnni(());

#[cfg(target_arch = "x86_64")]
impl Vnni {
    /// # Safety
    /// The CPU must have AVX-512 F, BW, DQ, VL and VNNI.
    #[inline(always)]
    pub(super) unsafe fn assume() -> Vnni {
        Vnni(())
    }
}

#[cfg(target_arch = "x86_64")]
impl Dot for Vnni {
    type I = __m512i;
    type W = __m512i;
    const HEIGHT: usize = 12;

    #[inline(always)]
    unsafe fn begin(self, x: *const u8, quads: usize) -> Self::I {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let ones = _mm512_set1_epi8(1);
            let mut sum = _mm512_setzero_si512();
            for quad in (0..quads).step_by(LANES) {
                let left = (quads - quad).min(LANES);
                let there = ((1_u32 << left) - 1) as __mmask16;
                sum =
                    _mm512_dpbusd_epi32(sum, ones, _mm512_maskz_loadu_epi32(there, x.add(quad * QUAD).cast()));
            }
            _mm512_set1_epi32(-128 * _mm512_reduce_add_epi32(sum))
        }
    }
    #[inline(always)]
    unsafe fn line(self, w: *const u8) -> Self::W {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_xor_si512(_mm512_loadu_si512(w.cast()), _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn numbers(self, sum: Self::I, to: *mut f32) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_ps(to, _mm512_cvtepi32_ps(sum)) }
    }
}
