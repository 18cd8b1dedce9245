// Rows held in registers by a group of threads: loads, sums, the statistics of layer norm, and quantization to
// e4m3. Shared by the kernels of norms and quantization.
//
// Constants: COLUMNS, the columns of a row; GROUP, the threads of a row (a multiple of 32); QUANTIZED, if rows are
// quantized.
//
// Invariant: the order of a row's sums depends on COLUMNS and GROUP only, not on the number of rows or the
// row's position.

#pragma once

#include "common.cuh"

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  // A butterfly: every lane adds the same pairs, so all end with the same bits.
  for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, lane);
  return x;
}

#if defined(COLUMNS)

// A thread has VECTORS accesses of WIDTH elements of its row: access v * GROUP + lane. WIDTH is 16 bytes if
// rows are aligned to them, else one element. A block is as many whole groups as fit into 128 threads, at least
// one.
constexpr int BLOCK = GROUP < 128 ? 128 / GROUP * GROUP : GROUP;
constexpr int WIDTH = COLUMNS * (int)sizeof(T) % 16 == 0 ? 16 / (int)sizeof(T) : 1;
constexpr int ACCESSES = COLUMNS / WIDTH;
constexpr int VECTORS = (ACCESSES + GROUP - 1) / GROUP;

template <int W> struct Access { typedef uint4 type; };
template <> struct Access<1> { typedef T type; };
typedef Access<WIDTH>::type Raw;

__device__ __forceinline__ void widen_raw(const Raw &raw, float (&x)[WIDTH]) {
  load_many<TYPE, WIDTH>((const T *)&raw, x);
}

// Returns the sum of x over the group, with equal bits in all its threads; all threads of the block must call
// it. Successive calls alternate `buffer`: a thread can then not overwrite sums that others still read, with
// one barrier per call.
__device__ __forceinline__ float group_sum(float x, int buffer) {
  x = warp_sum(x);
  if constexpr (GROUP > 32) {
    __shared__ float sums[2][BLOCK / 32];
    if (threadIdx.x % 32 == 0) sums[buffer][threadIdx.x / 32] = x;
    __syncthreads();
    const float *mine = sums[buffer] + threadIdx.x / GROUP * (GROUP / 32);
    x = 0.0f;
#pragma unroll
    for (int w = 0; w < GROUP / 32; w++) x += mine[w];
  }
  return x;
}

// Mean and reciprocal standard deviation of ROWS rows: mean = sum x / D, rstd = 1 / sqrt(sum (x - mean)^2 / D +
// eps), in two passes over the registers, which loses no digits to cancellation. Several rows at a time hide
// the latency of the sums.
template <int ROWS>
__device__ __forceinline__ void statistics(const Raw (&raw)[ROWS][VECTORS], int lane, float eps, float (&mean)[ROWS],
                                           float (&rstd)[ROWS]) {
#pragma unroll
  for (int pass = 0; pass < 2; pass++) {
    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      sums[r] = 0.0f;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        if (v * GROUP + lane >= ACCESSES) continue;
        float f[WIDTH];
        widen_raw(raw[r][v], f);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
          const float d = f[k] - mean[r];
          sums[r] = pass == 0 ? sums[r] + f[k] : fmaf(d, d, sums[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = group_sum(sums[r], pass);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      sums[r] /= (float)COLUMNS;
      if (pass == 0) mean[r] = sums[r];
      else rstd[r] = 1.0f / sqrtf(sums[r] + eps);
    }
  }
}

// Loads the thread's accesses of a row; leaves `raw` as it is for rows from `rows` on.
__device__ __forceinline__ void load_raw(const T *x, long long row, long long rows, int lane,
                                         Raw (&raw)[VECTORS]) {
  const T *from = x + row * COLUMNS;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = v * GROUP + lane;
    if (row < rows && at < ACCESSES) raw[v] = *(const Raw *)(from + at * WIDTH);
  }
}

#if defined(QUANTIZED)

// The largest magnitude of e4m3, and the lower bound of a row's largest magnitude, 2^-100, which keeps the
// scale of a row of zeros positive.
#define E4M3_MAX 448.0f
#define MIN_ROW_MAX __uint_as_float(27u << 23)
// Bytes of a row of quantized values, padded to 16.
constexpr int STRIDE = (COLUMNS + 15) / 16 * 16;

// Converts two numbers to e4m3, the first in the low byte; rounds to nearest even and saturates at E4M3_MAX.
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Returns the maximum of x over the group; all threads of the block must call it. Values must not be negative
// or NaN: their bits as integers then have the order of the numbers.
__device__ __forceinline__ float group_max(float x) {
  u32 maximum = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(x));
  if constexpr (GROUP > 32) {
    __shared__ u32 maxima[BLOCK / 32];
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = maximum;
    __syncthreads();
    const u32 *mine = maxima + threadIdx.x / GROUP * (GROUP / 32);
#pragma unroll
    for (int w = 0; w < GROUP / 32; w++) maximum = max(maximum, mine[w]);
  }
  return __uint_as_float(maximum);
}

// Quantizes a row: writes its e4m3 values to `quantized` (R, STRIDE), with zeros as padding, and its scale to scales
// (R), as graph/src/ops/quantize.rs defines them. All threads of a block must call it; nothing is written for
// rows from `rows` on.
__device__ __forceinline__ void write_quantized(const float (&f)[VECTORS][WIDTH], long long row, long long rows, int lane,
                                            u8 *quantized, float *scales) {
  float maximum = MIN_ROW_MAX;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    if (v * GROUP + lane >= ACCESSES) continue;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) maximum = fmaxf(maximum, fabsf(f[v][k]));
  }
  maximum = group_max(maximum);
  if (row >= rows) return;
  const float inverse = E4M3_MAX / maximum;
  u8 *to = quantized + row * STRIDE;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = v * GROUP + lane;
    if (at >= ACCESSES) continue;
    if constexpr (WIDTH == 1) {
      to[at] = (u8)e4m3_pair(f[v][0] * inverse, 0.0f);
    } else {
      u32 words[(WIDTH + 3) / 4];
#pragma unroll
      for (int k = 0; k < WIDTH / 4; k++) {
        const float *x = f[v] + 4 * k;
        words[k] = e4m3_pair(x[0] * inverse, x[1] * inverse) |
                   (u32)e4m3_pair(x[2] * inverse, x[3] * inverse) << 16;
      }
      if constexpr (WIDTH == 4) *(u32 *)(to + at * 4) = words[0];
      else *(uint2 *)(to + at * 8) = make_uint2(words[0], words[(WIDTH - 1) / 4]);
    }
  }
  if (COLUMNS + lane < STRIDE) to[COLUMNS + lane] = 0;
  if (lane == 0) scales[row] = maximum / E4M3_MAX;
}

#endif
#endif
