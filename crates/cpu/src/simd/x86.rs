//! SIMD implementations for x86-64: AVX-512 (one register per vector) and AVX2 with FMA (two registers).
//!
//! Invariant: each operation equals, bit by bit, the portable operation on arrays (with `mul_add`). The value `self`
//! proves that the instructions in every unsafe block below exist, since only `Isa::run` makes one, after detection.

use crate::simd::{LANES, Simd};
use core::arch::x86_64::*;

/// Vectors of one register, with AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// Vectors of two registers, with AVX2 and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx512 {
    /// Makes the proof without detection.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F, BW, DQ, VL, AVX2 and FMA.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx512 {
        Avx512(())
    }
}

impl Avx2 {
    /// Makes the proof without detection.
    ///
    /// # Safety
    /// The CPU must have AVX2 and FMA.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Avx2 {
        Avx2(())
    }
}

/// The mask of the first `n <= 16` lanes.
#[inline(always)]
fn mask16(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

/// Sum of 8 lanes: pairs (i, i+4), (i, i+2), (i, i+1).
#[inline]
#[target_feature(enable = "avx2")]
fn sum8(v: __m256) -> f32 {
    let c = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps::<1>(d, d)))
}

/// Largest of 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn max8(v: __m256) -> f32 {
    let c = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps::<1>(d, d)))
}

/// A mask with all bits set in the first `n` of 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn mask8(n: usize) -> __m256i {
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lane)
}

/// Transposes 16 x 16 f32: first within the 128-bit quarters of the registers, then the quarters among the registers.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose16(rows: &mut [__m512; 16]) {
    let mut quads = *rows;
    for g in (0..16).step_by(4) {
        let [a, b, c, d] = [rows[g], rows[g + 1], rows[g + 2], rows[g + 3]];
        let ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        let cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
        let ef = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        let gh = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        quads[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        quads[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        quads[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ef, gh));
        quads[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ef, gh));
    }
    // Quarter q of quads[4 g + c] is now column 4 q + c of rows 4 g .. 4 g + 4.
    for c in 0..4 {
        let [a, b, d, e] = [quads[c], quads[4 + c], quads[8 + c], quads[12 + c]];
        let even = _mm512_shuffle_f32x4::<0x88>(a, b);
        let odd = _mm512_shuffle_f32x4::<0xdd>(a, b);
        let even2 = _mm512_shuffle_f32x4::<0x88>(d, e);
        let odd2 = _mm512_shuffle_f32x4::<0xdd>(d, e);
        rows[c] = _mm512_shuffle_f32x4::<0x88>(even, even2);
        rows[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd, odd2);
        rows[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even, even2);
        rows[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd, odd2);
    }
}

/// The lower 16 bits of 8 lanes as the upper 16 bits of f32: bf16 as f32.
#[inline]
#[target_feature(enable = "avx2")]
fn upper_half(x: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))
}

/// All lanes rounded to bf16; same results as `half::f32_to_bf16`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn bf16_bits(v: __m512) -> __m256i {
    let bits = _mm512_castps_si512(v);
    // Adding 0x7FFF plus the lowest kept bit rounds to nearest, ties to even, by carry into the upper half. A NaN
    // could carry into infinity, so NaNs are truncated and made quiet instead.
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let carried = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
    let rounded = _mm512_mask_or_epi32(carried, nan, bits, _mm512_set1_epi32(0x40_0000));
    // The upper halves in one instruction, where a shift and a conversion take three.
    const UPPER: [u16; 32] = {
        let mut upper = [0; 32];
        let mut i = 0;
        while i < 16 {
            upper[i] = 2 * i as u16 + 1;
            i += 1;
        }
        upper
    };
    // SAFETY: 64 readable bytes.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, rounded))
}

/// As `bf16_bits`, for 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn bf16_bits8(v: __m256) -> __m256i {
    let bits = _mm256_castps_si256(v);
    let top = _mm256_srli_epi32::<16>(bits);
    let odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    let carried = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    let quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
    _mm256_blendv_epi8(_mm256_srli_epi32::<16>(carried), quiet, nan)
}

impl Simd for Avx512 {
    type V = __m512;
    const ROWS: usize = 14;
    const VECS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn iota(self) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_maskz_loadu_ps(mask16(n), p) }
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, v: Self::V, n: usize) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm512_mask_storeu_ps(p, mask16(n), v) }
    }
    #[inline(always)]
    unsafe fn widen(self, p: *const u16) -> Self::V {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn widen_pairs(self, p: *const u16) -> [Self::V; 2] {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            let top = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            [_mm512_slli_epi32::<16>(pairs), _mm512_and_si512(pairs, top)].map(|x| _mm512_castsi512_ps(x))
        }
    }
    #[inline(always)]
    unsafe fn narrow(self, p: *mut u16, v: Self::V) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm256_storeu_si256(p.cast(), bf16_bits(v)) }
    }
    #[inline(always)]
    unsafe fn store_low(self, p: *mut u8, v: Self::V) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(v))) }
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    fn prefetch_far(self, p: *const f32) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    fn neg_abs(self, a: Self::V, least: Self::V) -> Self::V {
        // One instruction: the value with the smaller magnitude (0b10), with its sign bit set (0b11).
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_range_ps::<0b11_10>(a, least) }
    }
    #[inline(always)]
    fn sqrt(self, a: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_sqrt_ps(a) }
    }
    #[inline(always)]
    fn shl23(self, a: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(a))) }
    }
    #[inline(always)]
    fn zero_below(self, a: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), a) }
    }
    #[inline(always)]
    fn first(self, a: Self::V, b: Self::V, n: usize) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_mask_blend_ps(mask16(n), b, a) }
    }
    #[inline(always)]
    fn sum(self, a: Self::V) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe { sum8(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))) }
    }
    #[inline(always)]
    fn max_lane(self, a: Self::V) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe { max8(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))) }
    }
    #[inline(always)]
    fn transpose(self, rows: &mut [Self::V; 16]) {
        // SAFETY: `self` proves the instructions.
        unsafe { transpose16(rows) }
    }
}

impl Simd for Avx2 {
    type V = (__m256, __m256);
    const ROWS: usize = 6;
    const VECS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    fn iota(self) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let low = _mm256_setr_ps(0., 1., 2., 3., 4., 5., 6., 7.);
            (low, _mm256_add_ps(low, _mm256_set1_ps(8.)))
        }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe { (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let low = _mm256_maskload_ps(p, mask8(n));
            (low, _mm256_maskload_ps(p.wrapping_add(8), mask8(n.saturating_sub(8))))
        }
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, v: Self::V, n: usize) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            _mm256_maskstore_ps(p, mask8(n), v.0);
            _mm256_maskstore_ps(p.wrapping_add(8), mask8(n.saturating_sub(8)), v.1);
        }
    }
    #[inline(always)]
    unsafe fn widen(self, p: *const u16) -> Self::V {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            (upper_half(low), upper_half(high))
        }
    }
    #[inline(always)]
    unsafe fn widen_pairs(self, p: *const u16) -> [Self::V; 2] {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let low = _mm256_loadu_si256(p.cast());
            let high = _mm256_loadu_si256(p.add(LANES).cast());
            let top = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let second_low = _mm256_castsi256_ps(_mm256_and_si256(low, top));
            let second_high = _mm256_castsi256_ps(_mm256_and_si256(high, top));
            [(upper_half(low), upper_half(high)), (second_low, second_high)]
        }
    }
    #[inline(always)]
    unsafe fn narrow(self, p: *mut u16, v: Self::V) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            // The pack instruction works within each 128-bit half, so the middle quarters must be exchanged.
            let packed = _mm256_packus_epi32(bf16_bits8(v.0), bf16_bits8(v.1));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
    #[inline(always)]
    unsafe fn store_low(self, p: *mut u8, v: Self::V) {
        // SAFETY: `self` proves the instructions; the caller promises the memory.
        unsafe {
            let mask = _mm256_set1_epi32(0xff);
            let low = _mm256_and_si256(_mm256_castps_si256(v.0), mask);
            let high = _mm256_and_si256(_mm256_castps_si256(v.1), mask);
            // The pack instruction works within each 128-bit half, so the middle quarters must be exchanged.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), bytes);
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const f32) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    fn prefetch_far(self, p: *const f32) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            (_mm256_andnot_ps(sign, a.0), _mm256_andnot_ps(sign, a.1))
        }
    }
    #[inline(always)]
    fn neg_abs(self, a: Self::V, least: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            self.max((_mm256_or_ps(sign, a.0), _mm256_or_ps(sign, a.1)), least)
        }
    }
    #[inline(always)]
    fn sqrt(self, a: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe { (_mm256_sqrt_ps(a.0), _mm256_sqrt_ps(a.1)) }
    }
    #[inline(always)]
    fn shl23(self, a: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let low = _mm256_slli_epi32::<23>(_mm256_castps_si256(a.0));
            let high = _mm256_slli_epi32::<23>(_mm256_castps_si256(a.1));
            (_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    fn zero_below(self, a: Self::V, x: Self::V, limit: Self::V) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_NLT_UQ>(x.0, limit.0);
            let high = _mm256_cmp_ps::<_CMP_NLT_UQ>(x.1, limit.1);
            (_mm256_and_ps(low, a.0), _mm256_and_ps(high, a.1))
        }
    }
    #[inline(always)]
    fn first(self, a: Self::V, b: Self::V, n: usize) -> Self::V {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let low = _mm256_castsi256_ps(mask8(n));
            let high = _mm256_castsi256_ps(mask8(n.saturating_sub(8)));
            (_mm256_blendv_ps(b.0, a.0, low), _mm256_blendv_ps(b.1, a.1, high))
        }
    }
    #[inline(always)]
    fn sum(self, a: Self::V) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe { sum8(_mm256_add_ps(a.0, a.1)) }
    }
    #[inline(always)]
    fn max_lane(self, a: Self::V) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe { max8(_mm256_max_ps(a.0, a.1)) }
    }
}
