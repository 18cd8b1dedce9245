// Activation functions together with their derivatives, of one f32 value: GELU and SiLU.
//
// Invariant: the absolute errors are below 4e-7, so that a gradient near a zero of the derivative is as exact as f32.

#pragma once

#include "common.cuh"

// GELU: f = x Phi(x), slope = Phi(x) + x phi(x), with phi the normal density. f32: normcdff and expf. 16-bit types: for t
// = |x| and Q(t) = 1 - Phi(t), both follow from G(t) = Q(t) / phi(t) - t: slope = phi(t) G(t) for x < 0, else 1 - phi(t)
// G(t); Q = phi(t) (G(t) + t). G is a polynomial of degree 11 on 0 .. 8, fitted by minimax weighted with phi (Lawson's
// iteration); the error of phi(t) G(t) is below 1e-7. It needs one exponential and no division.
__device__ __forceinline__ void gelu_and_slope(float x, float &f, float &slope) {
#if TYPE == 0
  const float cumulative = normcdff(x);
  f = x * cumulative;
  slope = fmaf(x, 0.3989422804f * expf(-0.5f * x * x), cumulative);
#else
  float t, phi;
  // min.NaN propagates a NaN of x. The fit ends at 8, where Q is below 1e-15.
  asm("min.NaN.f32 %0, %1, 0f41000000;" : "=f"(t) : "f"(fabsf(x)));
  float g = -7.909511055e-07f;
  g = fmaf(g, t, 1.932308442e-05f);
  g = fmaf(g, t, -2.124897292e-04f);
  g = fmaf(g, t, 1.412869664e-03f);
  g = fmaf(g, t, -6.492399145e-03f);
  g = fmaf(g, t, 2.256930806e-02f);
  g = fmaf(g, t, -6.384839118e-02f);
  g = fmaf(g, t, 1.552202851e-01f);
  g = fmaf(g, t, -3.328947425e-01f);
  g = fmaf(g, t, 6.265883446e-01f);
  g = fmaf(g, t, -1.999995828e+00f);
  g = fmaf(g, t, 1.253314137e+00f);
  // phi(t) = 2^(-t^2 log2(e) / 2 - log2(2 pi) / 2)
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(phi) : "f"(fmaf(t * -0.7213475204f, t, -1.325748064f)));
  const float tail = phi * g;
  slope = x < 0.0f ? tail : 1.0f - tail;
  f = fmaf(-t, phi * (g + t), x < 0.0f ? 0.0f : x);
#endif
}

// SiLU: f = x s, slope = s (1 + x (1 - s)), with s = 1 / (1 + exp(-x)).
__device__ __forceinline__ void silu_and_slope(float x, float &f, float &slope) {
#if TYPE == 0
  const float s = 1.0f / (1.0f + expf(-x));
#else
  const float s = __fdividef(1.0f, 1.0f + __expf(-x));
#endif
  f = x * s;
  slope = s * fmaf(x, 1.0f - s, 1.0f);
}
