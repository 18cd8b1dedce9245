//! Dot-product instructions on sixteen lanes, of int8 quads and of bf16 pairs: the operations that `linear_dots` is
//! written in.
//!
//! Invariant: integer sums are exact, so they are equal on every instruction set. int8 values are from -127 to
//! 127, so the sum of two products fits in 16 bits: 2 * 127 * 127 = 32258. For the order of additions of a bf16
//! dot product see `Bf16Pairs`.

#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};
use crate::simd::{LANES, Portable};
#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::*;

/// Bytes of a row that one lane multiplies at once: four int8 values or two bf16 values.
pub(crate) const QUAD: usize = 4;

/// Operations on sixteen sums of dot products, of int8 quads or bf16 pairs. A value of an implementing type
/// proves that this CPU has the instructions.
pub(crate) trait Dot: Copy {
    /// Sixteen sums: i32 for int8, f32 for bf16.
    type I: Copy;
    /// One line of a weight tile, prepared once for the dot products with many rows of x.
    type W: Copy;
    /// Rows of the tallest register tile, which is two vectors wide.
    const HEIGHT: usize;

    /// Initial value of all sums with the row `x` of `quads` quads. It compensates for an offset that `line` adds
    /// to the weights; zero if there is none.
    /// # Safety
    /// `quads` times four bytes must be readable at `x`.
    #[inline(always)]
    unsafe fn offset(self, _x: *const u8, _quads: usize) -> i32 {
        0
    }
    /// Sixteen sums with the initial value `offset`.
    fn begin(self, offset: i32) -> Self::I;
    /// Loads sums that `suspend` stored.
    /// # Safety
    /// Sixteen words must be readable at `from`.
    unsafe fn resume(self, from: *const f32) -> Self::I;
    /// Stores the bits of the sums, for `resume`.
    /// # Safety
    /// Sixteen words must be writable at `to`.
    unsafe fn suspend(self, to: *mut f32, sum: Self::I);
    /// Stores the sums as f32, rounded to nearest with ties to even.
    /// # Safety
    /// Sixteen f32 must be writable at `to`.
    unsafe fn store_f32(self, to: *mut f32, sum: Self::I);
    /// Loads one line of a tile: four bytes of each of sixteen rows of W.
    /// # Safety
    /// 64 bytes must be readable at `w`.
    unsafe fn line(self, w: *const u8) -> Self::W;
    /// Adds to each sum the dot product of the four bytes `x` with the four bytes of that lane's row of W.
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
    unsafe fn suspend(self, to: *mut f32, sum: Self::I) {
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
    unsafe fn store_f32(self, to: *mut f32, sum: Self::I) {
        // SAFETY: as the caller promises.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(sum.map(|sum| sum as f32)) }
    }
}

/// int8 dot products with `maddubs`, which multiplies unsigned by signed bytes: the product w x is computed as
/// |w| times x with the sign of w. Its 16-bit sums of two products saturate, but never have to (see the module's
/// invariant).
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
    unsafe fn suspend(self, to: *mut f32, sum: Self::I) {
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
            let x = _mm256_set1_epi32(x);
            let ones = _mm256_set1_epi16(1);
            let low = _mm256_maddubs_epi16(_mm256_abs_epi8(w[0]), _mm256_sign_epi8(x, w[0]));
            let high = _mm256_maddubs_epi16(_mm256_abs_epi8(w[1]), _mm256_sign_epi8(x, w[1]));
            [
                _mm256_add_epi32(sum[0], _mm256_madd_epi16(low, ones)),
                _mm256_add_epi32(sum[1], _mm256_madd_epi16(high, ones)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32, sum: Self::I) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            _mm256_storeu_ps(to, _mm256_cvtepi32_ps(sum[0]));
            _mm256_storeu_ps(to.add(8), _mm256_cvtepi32_ps(sum[1]));
        }
    }
}

/// A line of weights for `maddubs`: magnitudes, and the mask of the negative weights.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct SignedLine {
    magnitudes: __m512i,
    negative: __mmask64,
}

/// int8 dot products as on AVX2. AVX-512 has no `sign` instruction, so the signs of w are a mask of lanes in
/// which x is negated.
#[cfg(target_arch = "x86_64")]
impl Dot for Avx512 {
    type I = __m512i;
    type W = SignedLine;
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
    unsafe fn suspend(self, to: *mut f32, sum: Self::I) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_si512(to.cast(), sum) }
    }
    #[inline(always)]
    unsafe fn line(self, w: *const u8) -> Self::W {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let w = _mm512_loadu_si512(w.cast());
            SignedLine { magnitudes: _mm512_abs_epi8(w), negative: _mm512_movepi8_mask(w) }
        }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let x = _mm512_set1_epi32(x);
            let x = _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
            let pairs = _mm512_maddubs_epi16(w.magnitudes, x);
            _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32, sum: Self::I) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_ps(to, _mm512_cvtepi32_ps(sum)) }
    }
}

/// int8 dot products with AVX-512 VNNI, which multiplies unsigned by signed bytes: `line` computes w + 128, which is
/// unsigned, and the sums of a row start at -128 times the sum of the row's x, which cancels the 128.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Vnni(Avx512);

#[cfg(target_arch = "x86_64")]
impl Vnni {
    /// Returns the proof that the CPU has the instructions.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F, BW, DQ, VL and VNNI, AVX2 and FMA.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Vnni {
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
                // The row may end inside this vector: the mask keeps the load inside the row.
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
    unsafe fn suspend(self, to: *mut f32, sum: Self::I) {
        // SAFETY: as the caller promises.
        unsafe { self.0.suspend(to, sum) }
    }
    #[inline(always)]
    unsafe fn line(self, w: *const u8) -> Self::W {
        // Flipping the top bit of a signed byte adds 128 to it, as an unsigned byte.
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_xor_si512(_mm512_loadu_si512(w.cast()), _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32, sum: Self::I) {
        // SAFETY: as the caller promises.
        unsafe { self.0.store_f32(to, sum) }
    }
}

/// bf16 dot products with AVX512-BF16, with f32 sums. The instruction adds first the product of the pair's second
/// elements to the sum, then the product of the first elements, each with one rounding to nearest (Intel 64 and
/// IA-32 Software Developer's Manual, volume 2; equal on Zen 5, see the test of `linear_bf16`). It treats denormal
/// inputs and results as zero, which f32 lanes do not, so the bits may differ where numbers are below 2^-126.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Bf16Pairs(());

#[cfg(target_arch = "x86_64")]
impl Bf16Pairs {
    /// Returns the proof that the CPU has the instructions.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F and BF16.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Bf16Pairs {
        Bf16Pairs(())
    }
}

#[cfg(target_arch = "x86_64")]
impl Dot for Bf16Pairs {
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
    unsafe fn suspend(self, to: *mut f32, sum: Self::I) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_ps(to, sum) }
    }
    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32, sum: Self::I) {
        // SAFETY: as the caller promises.
        unsafe { self.suspend(to, sum) }
    }
    #[inline(always)]
    unsafe fn line(self, w: *const u8) -> Self::W {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_loadu_si512(w.cast()) }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, x: i32, w: Self::W) -> Self::I {
        // SAFETY: `self` proves the instructions; both types are 64 bytes, and every bit pattern is 32 bf16 values.
        unsafe {
            let w = core::mem::transmute::<__m512i, __m512bh>(w);
            let x = core::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(x));
            _mm512_dpbf16_ps(sum, w, x)
        }
    }
}
