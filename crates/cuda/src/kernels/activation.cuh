// Activation functions of one f32 value: GELU (`x_phi`) and SiLU (`silu`), for the epilogues of matmuls, the
// elementwise kernels and quantization.
//
// Invariant: the error is smaller than the rounding of the result to the element type TYPE.

#pragma once

#include "common.cuh"

// GELU in its exact form, x Phi(x), with Phi the cumulative normal distribution (Hendrycks and Gimpel 2016).
//
// f32: CUDA's normcdff, which keeps its relative precision in the left tail. 16-bit types: max(x, 0) - |x|
// Q(|x|), where Q(t) = 1 - Phi(t) and log2 Q is a polynomial on 0 .. 10, fitted by weighted minimax (Lawson's
// iteration). This takes half the instructions of erf, which matters after a matmul: there, one instruction per
// element takes 1/40 of the matmul's time (H200, ESM-2 8M).
//
// FINE, degree 8: relative error of Q below 9e-6 up to t = 4 and below 2e-5 up to t = 6, where f16 ends; the
// result errs by 0.01 to 0.1 of half a unit in the last place of f16. Otherwise degree 7: relative error below
// 1.4e-4 up to t = 10, 0.07 of half a unit in the last place of bf16.

template <bool FINE> __device__ __forceinline__ float x_phi_as(float x) {
#if TYPE == 0
  return x * normcdff(x);
#else
  // The fit ends at 10, where t Q(t) is below 1e-22.
  float t = fminf(fabsf(x), 10.0f), positive, q, log2q;
  if constexpr (FINE) {
    log2q = 6.639395878e-08f;
    log2q = fmaf(log2q, t, -3.404787094e-06f);
    log2q = fmaf(log2q, t, 7.643782737e-05f);
    log2q = fmaf(log2q, t, -1.002188656e-03f);
    log2q = fmaf(log2q, t, 8.695435710e-03f);
    log2q = fmaf(log2q, t, -5.421991646e-02f);
    log2q = fmaf(log2q, t, -4.582926929e-01f);
    log2q = fmaf(log2q, t, -1.151292801e+00f);
    log2q = fmaf(log2q, t, -9.999936819e-01f);
  } else {
    log2q = -7.486569001e-07f;
    log2q = fmaf(log2q, t, 3.341163500e-05f);
    log2q = fmaf(log2q, t, -6.404644049e-04f);
    log2q = fmaf(log2q, t, 7.015941903e-03f);
    log2q = fmaf(log2q, t, -4.999557703e-02f);
    log2q = fmaf(log2q, t, -4.635065739e-01f);
    log2q = fmaf(log2q, t, -1.148832122e+00f);
    log2q = fmaf(log2q, t, -1.000188061e+00f);
  }
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(log2q));
  // max.NaN propagates a NaN of x; fmaxf would replace it by 0.
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  return fmaf(-t, q, positive);
#endif
}
// GELU for a result that is rounded to the element type TYPE: bf16 takes the shorter polynomial.
__device__ __forceinline__ float x_phi(float x) { return x_phi_as<TYPE != 1>(x); }
// GELU for a result that is quantized from f32 without rounding to TYPE. The finer polynomial keeps the error small
// relative to the scale, which follows from the row's largest magnitude.
__device__ __forceinline__ float x_phi_fine(float x) { return x_phi_as<true>(x); }

// SiLU: x sigmoid(x) = x / (1 + exp(-x)).
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
