// RMS norm, and the gradients of layer norm and RMS norm. A row is held in the registers of GROUP threads (rows.cuh);
// rows that are too wide for registers are read twice by one block (WIDE_ROWS).
//
// Constants: COLUMNS, GROUP as in rows.cuh; PARAM, the element type of gamma; STAT, the element type of mean and rstd;
// CENTRED, whether the norm subtracts the mean (layer norm); SUM_ROWS, the rows of a partial sum.
//
// Invariant: all accesses to a row's elements of dy and x come before the row's elements of dx are written by the same
// threads, so that dx may be dy or x. The order of all sums depends on COLUMNS, GROUP and row numbers only.

#include "common.cuh"
#include "rows.cuh"

typedef Element<PARAM>::type P;

#if defined(STAT)

typedef Element<STAT>::type S;
#define SUMS (CENTRED ? 2 : 1)

#if !defined(WIDE_ROWS)

// Rows whose loads are in flight together, to hide the latency of memory and of the sums. The largest block has
// 64 registers per thread, which hold one row.
constexpr int ROWS = GROUP <= 512 && VECTORS * WIDTH <= 8 ? (TYPE == 0 || WIDTH == 1 ? 2 : 4) : 1;

// Sums of 2 ROWS numbers over the group with one barrier, with equal bits in all its threads. Callers alternate
// `buffer`: a thread can then not overwrite sums that others still read.
__device__ __forceinline__ void group_sums(float (&x)[2 * ROWS], int buffer) {
#pragma unroll
  for (int i = 0; i < 2 * ROWS; i++) x[i] = warp_sum(x[i]);
  if constexpr (GROUP > 32) {
    __shared__ float sums[2][BLOCK / 32][2 * ROWS];
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < 2 * ROWS; i++) sums[buffer][threadIdx.x / 32][i] = x[i];
    }
    __syncthreads();
    const int first = threadIdx.x / GROUP * (GROUP / 32);
#pragma unroll
    for (int i = 0; i < 2 * ROWS; i++) x[i] = 0.0f;
#pragma unroll 4
    for (int w = 0; w < GROUP / 32; w++) {
#pragma unroll
      for (int i = 0; i < 2 * ROWS; i++) x[i] += sums[buffer][first + w][i];
    }
  }
}

// Gradient of a norm: with h = (x - mean) rstd and g = dy gamma, dx = rstd (g - sum g / D - h sum (g h) / D), dgamma =
// sum_r dy h, dbeta = sum_r dy; without CENTRED, mean and sum g are absent. dy, x, dx: (R, COLUMNS), mean, rstd: (R),
// gamma: (COLUMNS). A group processes SUM_ROWS adjacent rows and keeps their sums for dgamma and dbeta in registers;
// group i writes them to partials[i] (R / SUM_ROWS, SUMS, COLUMNS). dx may be null. (One
// block per multiprocessor as the minimum: else the compiler spills registers to fit more blocks.)
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    norm_grad(const T *dy, const T *x, const S *__restrict__ means, const S *__restrict__ rstds,
              const P *__restrict__ gamma, T *dx, float *__restrict__ partials, long long rows) {
  after_predecessors();
  const int lane = threadIdx.x % GROUP;
  const long long group = (long long)blockIdx.x * (BLOCK / GROUP) + threadIdx.x / GROUP, first = group * SUM_ROWS;
  float weight[VECTORS][WIDTH], dgamma[VECTORS][WIDTH] = {}, dbeta[VECTORS][WIDTH] = {};
#pragma unroll
  for (int v = 0; v < VECTORS; v++)
    if (v * GROUP + lane < ACCESSES) load_many<PARAM, WIDTH>(gamma + (v * GROUP + lane) * WIDTH, weight[v]);
  // All groups of a block run all rounds, even behind the last row: the sums contain barriers. Not
  // unrolled: rounds have enough loads in flight, and more would need more registers than the largest block has.
#pragma unroll 1
  for (int i = 0; i < SUM_ROWS; i += ROWS) {
    Raw raw_dy[ROWS][VECTORS], raw_x[ROWS][VECTORS];
    float mean[ROWS], rstd[ROWS], sums[2 * ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const long long row = first + i + r;
      // Rows behind the last one count as zeros.
#pragma unroll
      for (int v = 0; v < VECTORS; v++) raw_dy[r][v] = Raw(), raw_x[r][v] = Raw();
      load_raw(dy, row, rows, lane, raw_dy[r]);
      load_raw(x, row, rows, lane, raw_x[r]);
      mean[r] = CENTRED && row < rows ? widen<STAT>(means[row]) : 0.0f;
      rstd[r] = row < rows ? widen<STAT>(rstds[row]) : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float g = 0.0f, gh = 0.0f;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        if (v * GROUP + lane >= ACCESSES) continue;
        float d[WIDTH], h[WIDTH];
        widen_raw(raw_dy[r][v], d);
        widen_raw(raw_x[r][v], h);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
          h[k] = (h[k] - mean[r]) * rstd[r];
          dgamma[v][k] = fmaf(d[k], h[k], dgamma[v][k]);
          if (CENTRED) dbeta[v][k] += d[k];
          const float w = d[k] * weight[v][k];
          g += w;
          gh = fmaf(w, h[k], gh);
        }
      }
      sums[2 * r] = CENTRED ? g : 0.0f, sums[2 * r + 1] = gh;
    }
    group_sums(sums, i / ROWS & 1);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const long long row = first + i + r;
      if (row >= rows || !dx) continue;
      const float g = sums[2 * r] / (float)COLUMNS, gh = sums[2 * r + 1] / (float)COLUMNS;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const int at = v * GROUP + lane;
        if (at >= ACCESSES) continue;
        float d[WIDTH], h[WIDTH];
        widen_raw(raw_dy[r][v], d);
        widen_raw(raw_x[r][v], h);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
          h[k] = (h[k] - mean[r]) * rstd[r];
          d[k] = rstd[r] * (fmaf(d[k], weight[v][k], -g) - h[k] * gh);
        }
        store_many<TYPE, WIDTH>(dx + row * COLUMNS + at * WIDTH, d);
      }
    }
  }
  if (first >= rows) return;
  float *to = partials + group * SUMS * COLUMNS;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = v * GROUP + lane;
    if (at >= ACCESSES) continue;
    store_many<0, WIDTH>(to + at * WIDTH, dgamma[v]);
    if (CENTRED) store_many<0, WIDTH>(to + COLUMNS + at * WIDTH, dbeta[v]);
  }
}
PARAMETERS(norm_grad, 64, 56);

#else

#define BLOCK 512

// dx of a norm, as above, for rows of any width: a block has one row and reads it twice. dgamma and dbeta are sums of
// `column_sums`. COLUMNS is a multiple of WIDTH, the elements of one access.
extern "C" __global__ void __launch_bounds__(BLOCK)
    norm_grad_wide(const T *dy, const T *x, const S *__restrict__ means, const S *__restrict__ rstds,
                   const P *__restrict__ gamma, T *dx, int columns) {
  after_predecessors();
  const long long row = blockIdx.x;
  dy += row * columns, x += row * columns, dx += row * columns;
  const float mean = CENTRED ? widen<STAT>(means[row]) : 0.0f, rstd = widen<STAT>(rstds[row]);
  float g = 0.0f, gh = 0.0f;
  for (int c = threadIdx.x * WIDTH; c < columns; c += BLOCK * WIDTH) {
    float d[WIDTH], h[WIDTH], w[WIDTH];
    load_many<TYPE, WIDTH>(dy + c, d);
    load_many<TYPE, WIDTH>(x + c, h);
    load_many<PARAM, WIDTH>(gamma + c, w);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
      w[k] *= d[k];
      g += w[k];
      gh = fmaf(w[k], (h[k] - mean) * rstd, gh);
    }
  }
  g = warp_sum(g), gh = warp_sum(gh);
  __shared__ float sums[2][BLOCK / 32];
  if (threadIdx.x % 32 == 0) sums[0][threadIdx.x / 32] = g, sums[1][threadIdx.x / 32] = gh;
  __syncthreads();
  g = 0.0f, gh = 0.0f;
#pragma unroll
  for (int w = 0; w < BLOCK / 32; w++) g += sums[0][w], gh += sums[1][w];
  g = CENTRED ? g / (float)columns : 0.0f, gh /= (float)columns;
  for (int c = threadIdx.x * WIDTH; c < columns; c += BLOCK * WIDTH) {
    float d[WIDTH], h[WIDTH], w[WIDTH];
    load_many<TYPE, WIDTH>(dy + c, d);
    load_many<TYPE, WIDTH>(x + c, h);
    load_many<PARAM, WIDTH>(gamma + c, w);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
      h[k] = (h[k] - mean) * rstd;
      d[k] = rstd * (fmaf(d[k], w[k], -g) - h[k] * gh);
    }
    store_many<TYPE, WIDTH>(dx + c, d);
  }
}
PARAMETERS(norm_grad_wide, 56, 48);

#endif

#else

// Whether a group loads its next row ahead; wide rows have too few registers for it.
constexpr bool AHEAD = GROUP <= 512 && VECTORS * WIDTH <= 24;

// RMS norm (Zhang and Sennrich 2019): rstd = 1 / sqrt(sum x^2 / D + eps), y = x rstd gamma. x, y: (R, COLUMNS), gamma:
// (COLUMNS) of type PARAM, rstds: (R); y or rstds may be null, and y may be x. A group processes `rows_per_group` adjacent
// rows.
extern "C" __global__ void __launch_bounds__(BLOCK)
    rms_norm(const T *x, const P *__restrict__ gamma, T *y, float *rstds, long long rows, int rows_per_group, float eps) {
  after_predecessors();
  const int lane = threadIdx.x % GROUP;
  const long long first = ((long long)blockIdx.x * (BLOCK / GROUP) + threadIdx.x / GROUP) * rows_per_group;
  Raw raw[VECTORS], next[VECTORS];
  if constexpr (AHEAD) load_raw(x, first, rows, lane, next);
  // All groups of a block run `rows_per_group` rounds, even behind the last row: the sums contain barriers.
  for (int i = 0; i < rows_per_group; i++) {
    const long long row = first + i;
    if constexpr (AHEAD) {
#pragma unroll
      for (int v = 0; v < VECTORS; v++) raw[v] = next[v];
      if (i + 1 < rows_per_group) load_raw(x, row + 1, rows, lane, next);
    } else {
      load_raw(x, row, rows, lane, raw);
    }
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (v * GROUP + lane >= ACCESSES) continue;
      float f[WIDTH];
      widen_raw(raw[v], f);
#pragma unroll
      for (int k = 0; k < WIDTH; k++) squares = fmaf(f[k], f[k], squares);
    }
    const float rstd = 1.0f / sqrtf(group_sum(squares, i & 1) / (float)COLUMNS + eps);
    if (row >= rows) continue;
    if (lane == 0 && rstds) rstds[row] = rstd;
    if (!y) continue;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = v * GROUP + lane;
      if (at >= ACCESSES) continue;
      float f[WIDTH], w[WIDTH];
      widen_raw(raw[v], f);
      load_many<PARAM, WIDTH>(gamma + at * WIDTH, w);
#pragma unroll
      for (int k = 0; k < WIDTH; k++) f[k] = f[k] * rstd * w[k];
      store_many<TYPE, WIDTH>(y + row * COLUMNS + at * WIDTH, f);
    }
  }
}
PARAMETERS(rms_norm, 48, 44);

#endif
