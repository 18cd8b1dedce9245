// Activations of single numbers. Invariant: they err by less than the rounding of an element of type TYPE.

// x Phi(x), Phi the normal distribution (Hendrycks and Gimpel 2016, the exact form). f32: CUDA's normcdff,
// which keeps its digits in the left tail. 16 bits: max(x, 0) - |x| Q(|x|), with log2 Q as a polynomial on 0..10, fitted by
// weighted minimax (Lawson's iteration), which takes half the instructions of erf. FINE, degree 8: relative error of Q below
// 9e-6 to 4, below 2e-5 to 6, where f16 ends; 0.01 to 0.1 of a half unit of f16. Otherwise, degree 7: below 1.4e-4 to 10,
// 0.07 of a half unit of bf16. Behind a product an instruction of each element takes a fortieth of its time (H200, ESM-2 8M).
template <bool FINE> __device__ __forceinline__ float x_phi_as(float x) {
#if TYPE == 0
  return x * normcdff(x);
#else
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
  // NaN stays NaN.
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  return fmaf(-t, q, positive);
#endif
}
// For an element of type TYPE.
__device__ __forceinline__ float x_phi(float x) { return x_phi_as<TYPE != 1>(x); }
// For what is not rounded to TYPE, but quantised: a row's scale is that of its largest number.
__device__ __forceinline__ float x_phi_fine(float x) { return x_phi_as<true>(x); }

// x / (1 + exp(-x)).
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
