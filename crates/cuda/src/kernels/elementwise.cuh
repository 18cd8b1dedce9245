// Flat loops over elements, shared by the elementwise kernels and their gradients: a thread has STEPS accesses of up to
// 16 bytes, a block's width apart, and loads all of them before the first use. Matrices are row-major and start at
// multiples of 256 bytes. Nothing behind the last element is touched.

#pragma once

#include "common.cuh"

#define THREADS 256

// Loads and stores elements at .. at + MANY of n: by one access, or one by one at the end of the array.
template <int DTYPE, int MANY>
__device__ __forceinline__ void load_some(const typename Element<DTYPE>::type *x, long long at, long long n,
                                          float (&v)[MANY]) {
  if (at + MANY <= n) {
    load_many<DTYPE, MANY>(x + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < MANY; i++) v[i] = at + i < n ? widen<DTYPE>(x[at + i]) : 0.0f;
  }
}

template <int DTYPE, int MANY>
__device__ __forceinline__ void store_some(typename Element<DTYPE>::type *y, long long at, long long n,
                                           const float (&v)[MANY]) {
  if (at + MANY <= n) {
    store_many<DTYPE, MANY>(y + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < MANY; i++)
      if (at + i < n) y[at + i] = narrow<DTYPE>(v[i]);
  }
}

// The first element of a thread, which then continues in strides of THREADS accesses: adjacent threads access
// adjacent memory, and STEPS loads are in flight per thread.
#define STEPS 4
template <int MANY> __device__ __forceinline__ long long first_element() {
  return ((long long)blockIdx.x * (STEPS * THREADS) + threadIdx.x) * MANY;
}

// y[i] = f(x[i]) for i below n, with f evaluated in f32.
template <int IN, int OUT, int MANY, class F>
__device__ __forceinline__ void map(const void *x, void *y, long long n, F f) {
  const auto *from = (const typename Element<IN>::type *)x;
  auto *to = (typename Element<OUT>::type *)y;
  const long long first = first_element<MANY>();
  float v[STEPS][MANY];
#pragma unroll
  for (int s = 0; s < STEPS; s++) load_some<IN, MANY>(from, first + s * THREADS * MANY, n, v[s]);
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
#pragma unroll
    for (int i = 0; i < MANY; i++) v[s][i] = f(v[s][i]);
    store_some<OUT, MANY>(to, first + s * THREADS * MANY, n, v[s]);
  }
}

// Number of elements in 16 bytes.
#define WIDE (TYPE == 0 ? 4 : 8)

// y[i] = f(a[i], b[i]) for i below n, with f evaluated in f32; y may be a or b.
template <class F> __device__ __forceinline__ void map_two(const T *a, const T *b, T *y, long long n, F f) {
  const long long first = first_element<WIDE>();
  float u[STEPS][WIDE], v[STEPS][WIDE];
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    load_some<TYPE, WIDE>(a, first + s * THREADS * WIDE, n, u[s]);
    load_some<TYPE, WIDE>(b, first + s * THREADS * WIDE, n, v[s]);
  }
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
#pragma unroll
    for (int i = 0; i < WIDE; i++) u[s][i] = f(u[s][i], v[s][i]);
    store_some<TYPE, WIDE>(y, first + s * THREADS * WIDE, n, u[s]);
  }
}
