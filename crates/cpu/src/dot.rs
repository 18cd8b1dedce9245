//! Sums of dot products on sixteen lanes, of integers of 8 bits and of pairs of bf16: what `gemm_dots` is written in.
//!
//! Invariant: sums of integers are exact, so they are the same on every instruction set. Codes are from -127 to 127: the
//! product of a pair of pairs fits 16 bits. What a dot product of bf16 adds, and in which order, `Pairs` says.

use super::simd::{LANES, Portable};
#[cfg(target_arch = "x86_64")]
use super::simd_x86::{Avx2, Avx512};
#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::*;

/// Bytes of a row that one lane takes at once: four codes, or a pair of bf16.
pub(super) const QUAD: usize = 4;

/// Sixteen sums of dot products: of quads of codes, or of pairs of bf16. A value of an implementing type is the proof that
/// this CPU has the instructions.
pub(super) trait Dot: Copy {
    /// Sixteen sums: i32 of codes, f32 of bf16.
    type I: Copy;
    /// A line of a tile, made ready for many rows.
    type W: Copy;
    /// Rows of the tallest register tile, which is two vectors wide.
    const HEIGHT: usize;

    /// What sums with this row of x begin with.
    /// # Safety
    /// `quads` times four bytes must be readable at `x`.
    #[inline(always)]
    unsafe fn offset(self, _x: *const u8, _quads: usize) -> i32 {
        0
    }
    /// Sums that begin with that.
    fn begin(self, offset: i32) -> Self::I;
    /// Sums that were stored.
    /// # Safety
    /// Sixteen words must be readable at `from`.
    unsafe fn resume(self, from: *const f32) -> Self::I;
    /// Their bits.
    /// # Safety
    /// Sixteen words must be writable at `to`.
    unsafe fn keep(self, to: *mut f32, sum: Self::I);
    /// The sums as f32, rounded to nearest even.
    /// # Safety
    /// Sixteen f32 must be writable at `to`.
    unsafe fn numbers(self, to: *mut f32, sum: Self::I);
    /// Four bytes of each of sixteen rows of W.
    /// # Safety
    /// 64 bytes must be readable at `w`.
    unsafe fn line(self, w: *const u8) -> Self::W;
    /// sum + the products of four bytes of x with each row's.
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I;
}

impl Dot for Portable {
    type I = [i32; LANES];
    type W = [[i8; QUAD]; LANES];
    const HEIGHT: usize = 4;

    #[inline(always)]
    fn begin(self, offset: i32) -> Self::I {
        [offset; LANES]
    }
    #[inline(always)]
    unsafe fn resume(self, from: *const f32) -> Self::I {
        // SAFETY: as the caller promises.
        unsafe { from.cast::<Self::I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn keep(self, to: *mut f32, sum: Self::I) {
        // SAFETY: as the caller promises.
        unsafe { to.cast::<Self::I>().write_unaligned(sum) }
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
    unsafe fn numbers(self, to: *mut f32, sum: Self::I) {
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
    fn begin(self, offset: i32) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe { [_mm256_set1_epi32(offset); 2] }
    }
    #[inline(always)]
    unsafe fn resume(self, from: *const f32) -> Self::I {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())] }
    }
    #[inline(always)]
    unsafe fn keep(self, to: *mut f32, sum: Self::I) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            _mm256_storeu_si256(to.cast(), sum[0]);
            _mm256_storeu_si256(to.add(8).cast(), sum[1]);
        }
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
    unsafe fn numbers(self, to: *mut f32, sum: Self::I) {
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
    fn begin(self, offset: i32) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_set1_epi32(offset) }
    }
    #[inline(always)]
    unsafe fn resume(self, from: *const f32) -> Self::I {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn keep(self, to: *mut f32, sum: Self::I) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_si512(to.cast(), sum) }
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
    unsafe fn numbers(self, to: *mut f32, sum: Self::I) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_ps(to, _mm512_cvtepi32_ps(sum)) }
    }
}

/// AVX-512 with VNNI, whose products are of unsigned numbers and signed ones: w is w + 128, and a row's sums begin with 128
/// times the sum of its x less.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Vnni(Avx512);

#[cfg(target_arch = "x86_64")]
impl Vnni {
    /// # Safety
    /// The CPU must have AVX-512 F, BW, DQ, VL and VNNI, AVX2 and FMA.
    #[inline(always)]
    pub(super) unsafe fn assume() -> Vnni {
        // SAFETY: as the caller promises.
        Vnni(unsafe { Avx512::assume() })
    }
}

#[cfg(target_arch = "x86_64")]
impl Dot for Vnni {
    type I = <Avx512 as Dot>::I;
    type W = __m512i;
    const HEIGHT: usize = 14;

    #[inline(always)]
    unsafe fn offset(self, x: *const u8, quads: usize) -> i32 {
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
            -128 * _mm512_reduce_add_epi32(sum)
        }
    }
    #[inline(always)]
    fn begin(self, offset: i32) -> Self::I {
        self.0.begin(offset)
    }
    #[inline(always)]
    unsafe fn resume(self, from: *const f32) -> Self::I {
        // SAFETY: as the caller promises.
        unsafe { self.0.resume(from) }
    }
    #[inline(always)]
    unsafe fn keep(self, to: *mut f32, sum: Self::I) {
        // SAFETY: as the caller promises.
        unsafe { self.0.keep(to, sum) }
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
    unsafe fn numbers(self, to: *mut f32, sum: Self::I) {
        // SAFETY: as the caller promises.
        unsafe { self.0.numbers(to, sum) }
    }
}

/// AVX512-BF16, whose sums are of f32: such an instruction adds the product of a pair's second elements to the sum, then that
/// of its first ones, each with one rounding to nearest (Intel 64 and IA-32 Software Developer's Manual, volume 2; the same
/// on Zen 5, see `gemm_bf16`'s test). It takes denormals, in and out, as zero, where lanes keep them: of numbers below 2^-126
/// the bits may differ.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Pairs(());

#[cfg(target_arch = "x86_64")]
impl Pairs {
    /// # Safety
    /// The CPU must have AVX-512 F and BF16.
    #[inline(always)]
    pub(super) unsafe fn assume() -> Pairs {
        Pairs(())
    }
}

#[cfg(target_arch = "x86_64")]
impl Dot for Pairs {
    type I = __m512;
    type W = __m512i;
    const HEIGHT: usize = 14;

    #[inline(always)]
    fn begin(self, _: i32) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn resume(self, from: *const f32) -> Self::I {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn keep(self, to: *mut f32, sum: Self::I) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_ps(to, sum) }
    }
    #[inline(always)]
    unsafe fn numbers(self, to: *mut f32, sum: Self::I) {
        // SAFETY: as the caller promises.
        unsafe { self.keep(to, sum) }
    }
    #[inline(always)]
    unsafe fn line(self, w: *const u8) -> Self::W {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_loadu_si512(w.cast()) }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I {
        // SAFETY: `self` proves the instructions; 64 bytes, any of which are 32 bf16.
        unsafe {
            let bits = |v: __m512i| -> __m512bh { core::mem::transmute(v) };
            _mm512_dpbf16_ps(sum, bits(w), bits(_mm512_set1_epi32(x)))
        }
    }
}
