//! SIMD implementations of exp, GELU, SiLU and the derivatives of GELU and SiLU, from additions, multiplications,
//! divisions and one shift.
//!
//! Invariant: a lane's result depends on that lane alone. There is no table and no branch, so a value gives the same
//! bits at every position.

use crate::simd::Simd;

/// log(sum_i exp(x_i)), from the largest x_i and `sum`, the sum of exp(x_i - largest).
///
/// The logarithm is that of `libm`, whose bits are the same on every platform; those of the standard library are the
/// platform's.
pub(crate) fn log_sum_exp(largest: f32, sum: f64) -> f64 {
    f64::from(largest) + libm::log(sum)
}

/// 1.5 * 2^23 + 127. Adding this constant rounds to an integer n (ties to even) and leaves n + 127, the exponent
/// field of 2^n, in the low bits.
const ROUND: f32 = 12_583_039.0;

/// e^x for x <= 88, to within 1.1 ulp. Zero below -87.33, the smallest x with a normal result. NaN gives NaN.
///
/// x = n ln 2 + r with |r| <= 0.347. ln 2 is split in two constants (Cody and Waite), of which the first is short
/// enough that its product with n is exact. Then e^r = 1 + r + r^2 p(r), p of degree 4 fitted at Chebyshev nodes
/// (relative error of e^r below 1e-8).
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let low = s.splat(-87.33);
    // `max` returns its second operand if either is NaN: with x in this place, a NaN reaches the result.
    let clamped = s.max(low, x);
    let t = s.fma(clamped, s.splat(core::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(t, s.splat(ROUND));
    let r = s.fma(n, s.splat(-0.693_359_4), clamped);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(0.001_392_691_8);
    for c in [0.008_363_767, 0.041_666_55, 0.166_665_73, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    s.zero_below(s.mul(p, s.shl23(t)), x, low)
}

/// End of the range of the polynomial for log2 Phi(-a); 9 Phi(-9) = 1e-18.
const FAR: f32 = 9.0;

/// Coefficients of log2 Phi(-a) on [0, 9], lowest power first. Fitted so that a Phi(-a) has an error of at most 7e-9
/// (Lawson's iteration for the minimax fit; weight a Phi(-a) + 3e-4).
const LOG2_TAIL: [f32; 12] = [
    -0.999_999,
    -1.151_119_8,
    -0.459_141_88,
    -0.052_625_902,
    0.007_178_356,
    -1.675_631_7e-4,
    -2.074_755e-4,
    5.815_752_6e-5,
    -8.453_578e-6,
    7.283_552e-7,
    -3.504_815e-8,
    7.262_278e-10,
];

/// Coefficients of 2^r on [-1/2, 1/2], lowest power first; relative error 2e-9.
const EXP2: [f32; 7] =
    [1.0, core::f32::consts::LN_2, 0.240_226_5, 0.055_503_27, 0.009_618_057, 0.001_340_042_9, 1.546_144_5e-4];

/// GELU, x Phi(x) with the normal distribution Phi(x) = (1 + erf(x / sqrt 2)) / 2 (Hendrycks and Gimpel, 2016).
///
/// Computed as max(x, 0) - a Phi(-a), a = |x|, which has no cancellation in either tail. The error is at most 3e-8 +
/// 1 ulp. NaN gives NaN, +inf gives +inf, -inf gives about -0.
#[inline(always)]
pub(crate) fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    // `min` returns its second operand for NaN, so the tail term is finite and `max` below propagates the NaN.
    let a = s.min(s.abs(x), s.splat(FAR));
    let mut log = s.splat(LOG2_TAIL[11]);
    for &c in LOG2_TAIL[..11].iter().rev() {
        log = s.fma(log, a, s.splat(c));
    }
    let t = s.add(log, s.splat(ROUND));
    let r = s.sub(log, s.sub(t, s.splat(ROUND)));
    let mut p = s.splat(EXP2[6]);
    for &c in EXP2[..6].iter().rev() {
        p = s.fma(p, r, s.splat(c));
    }
    let tail = s.mul(a, s.mul(p, s.shl23(t)));
    s.sub(s.max(s.splat(0.0), x), tail)
}

/// Lower end of the range of the polynomial for the eighth root; 5.75 Phi(-5.75) = 3e-8.
const NEAR: f32 = -5.75;

/// Coefficients of Phi(x)^(1/8) on [-5.75, 0], lowest power first (Lawson's iteration for the minimax fit of x
/// Phi(x), weighted by the error bound of `gelu_bf16`). The eighth root varies slowly where Phi falls through eight
/// orders of magnitude, so a low degree is enough.
const ROOT: [f32; 6] =
    [0.917_003_3, 0.091_477_13, -0.031_760_34, 0.001_072_535_6, 0.001_926_552_5, 1.892_913_3e-4];

/// GELU for results that are rounded to bf16, in eleven operations where `gelu` takes twenty-six. It runs beside AMX
/// tile matmuls, which leave the vector units about that many free slots.
///
/// The error of the tail a Phi(-a), a = |x|, is at most 2^-16 of the tail + 2^-19 min(a, 1); rounding to bf16 alone
/// may cost 2^-9 of the result. Below `NEAR` the tail keeps its value at `NEAR`, which is within the bound. So +inf
/// gives +inf, -inf gives -3e-8 and NaN gives NaN.
#[inline(always)]
pub(crate) fn gelu_bf16<S: Simd>(s: S, x: S::V) -> S::V {
    let left = s.neg_abs(x, s.splat(NEAR));
    let mut p = s.splat(ROOT[5]);
    for &c in ROOT[..5].iter().rev() {
        p = s.fma(p, left, s.splat(c));
    }
    let p2 = s.mul(p, p);
    let p4 = s.mul(p2, p2);
    s.fma(left, s.mul(p4, p4), s.max(s.splat(0.0), x))
}

/// (2 pi)^(-1/2), the density of the standard normal distribution at 0.
const DENSITY: f32 = 0.398_942_3;

/// Upper bound of a, up to which e^(-a^2 / 2) is a normal number; 13 phi(13) = 1e-36.
const FARTHEST: f32 = 13.0;

/// Coefficients of the Mills ratio e^(a^2 / 2) Phi(-a) on [0, 13] in powers of z = (1 - 0.35 a) / (1 + 0.35 a),
/// lowest power first. Fitted so that Phi(-a) has an error of at most 2e-9 (Lawson's iteration for the minimax fit;
/// weight e^(-a^2 / 2) + 1e-5).
const MILLS: [f32; 8] = [
    0.126_622_04,
    0.212_371_17,
    0.121_299_49,
    0.040_604_252,
    0.002_857_166_6,
    -0.004_077_612,
    1.702_309_4e-4,
    1.532_729_8e-4,
];

/// Derivative of GELU, Phi(x) + x phi(x), with an error of at most 2e-7. With a = |x| and t = Phi(-a) - a phi(a), the
/// result is t for negative x and 1 - t otherwise, which avoids cancellation in the left tail. NaN gives NaN.
#[inline(always)]
pub(crate) fn gelu_slope<S: Simd>(s: S, x: S::V) -> S::V {
    // `min` returns its second operand for NaN.
    let a = s.min(s.splat(FARTHEST), s.abs(x));
    let one = s.splat(1.0);
    let step = s.mul(a, s.splat(0.35));
    let z = s.div(s.sub(one, step), s.add(one, step));
    let mut p = s.splat(MILLS[7]);
    for &c in MILLS[..7].iter().rev() {
        p = s.fma(p, z, s.splat(c));
    }
    let e = exp(s, s.mul(s.mul(a, a), s.splat(-0.5)));
    let t = s.mul(e, s.fma(a, s.splat(-DENSITY), p));
    s.add(t, s.zero_below(s.fma(t, s.splat(-2.0), one), x, s.splat(0.0)))
}

/// The logistic function of x and of -x, l = 1 / (1 + e^-x) and 1 - l = e^-x l, each to about 2 ulp of its own value.
/// l is at least 6e-39. NaN gives NaN.
#[inline(always)]
fn logistic<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let one = s.splat(1.0);
    let e = exp(s, s.min(s.splat(88.0), s.sub(s.splat(0.0), x)));
    let l = s.div(one, s.add(one, e));
    (l, s.mul(e, l))
}

/// SiLU, x / (1 + e^-x) (Hendrycks and Gimpel, 2016).
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.mul(x, logistic(s, x).0)
}

/// Lower end of the range of `silu_bf16`'s exponential, where e^x is still a normal number; 80 e^-80 = 1e-33.
const FARTHEST_LEFT: f32 = -80.0;

/// Coefficients of 2^r on [-1/2, 1/2], lowest power first; relative error 3e-6.
const EXP2_BF16: [f32; 5] = [0.999_999_3, 0.693_121_8, 0.240_247_44, 0.055_917_863, 0.009_570_102];

/// Coefficients of 1 / (1 + e) on [0, 1], lowest power first; relative error 5e-5 (as those of `EXP2_BF16` by Lawson's
/// iteration for the minimax fit).
const RECIPROCAL: [f32; 6] = [0.999_949, -0.996_275_7, 0.953_420_8, -0.770_573_1, 0.417_937_97, -0.104_484_49];

/// SiLU for results that are rounded to bf16, in half of the operations of `silu` and without a division.
///
/// As `gelu_bf16`: max(x, 0) - a / (1 + e^a), a = |x|. The error of the tail a / (1 + e^a) is at most 2^-14 of the tail;
/// rounding to bf16 alone may cost 2^-9 of the result. +inf gives +inf, -inf gives -1e-33 and NaN gives NaN.
#[inline(always)]
pub(crate) fn silu_bf16<S: Simd>(s: S, x: S::V) -> S::V {
    let left = s.neg_abs(x, s.splat(FARTHEST_LEFT));
    let t = s.fma(left, s.splat(core::f32::consts::LOG2_E), s.splat(ROUND));
    let r = s.fma(left, s.splat(core::f32::consts::LOG2_E), s.sub(s.splat(ROUND), t));
    let mut e = s.splat(EXP2_BF16[4]);
    for &c in EXP2_BF16[..4].iter().rev() {
        e = s.fma(e, r, s.splat(c));
    }
    let e = s.mul(e, s.shl23(t));
    let mut p = s.splat(RECIPROCAL[5]);
    for &c in RECIPROCAL[..5].iter().rev() {
        p = s.fma(p, e, s.splat(c));
    }
    s.fma(s.mul(left, e), p, s.max(s.splat(0.0), x))
}

/// Derivative of SiLU: l (1 + x (1 - l)) with the logistic function l. The error is at most 2e-7.
#[inline(always)]
pub(crate) fn silu_slope<S: Simd>(s: S, x: S::V) -> S::V {
    let (l, rest) = logistic(s, x);
    s.mul(l, s.fma(x, rest, s.splat(1.0)))
}
