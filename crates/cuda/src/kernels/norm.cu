// Layer norm, batch norm at inference, and softmax over rows; one of them per compilation (COLUMNS, PARAM,
// neither). Layer norm holds a row in the registers of GROUP threads (rows.cuh).
//
// Invariant: a thread reads its elements of a row before it writes them, so that y may be x.

#include "common.cuh"
#include "rows.cuh"

#if defined(COLUMNS)

typedef typename Element<PARAM>::type P;
// Whether gamma and beta stay in registers for all rows of a group, together with the next row, which is loaded
// ahead. Wide rows have too few registers for it.
constexpr bool PARAMS_IN_REGISTERS = GROUP <= 512 && VECTORS * WIDTH <= 24;

// Layer norm (Ba, Kiros and Hinton 2016): mean = sum x / D; rstd = 1 / sqrt(sum (x - mean)^2 / D + eps); y = (x
// - mean) rstd gamma + beta. x, y: (R, COLUMNS), gamma, beta: (COLUMNS) of type PARAM, means, rstds: (R) or
// null. A group processes `rows_per_group` adjacent rows. With QUANTIZED, y is also quantized from f32 to `quantized` (R, STRIDE)
// and scales (R), and y may be null.
extern "C" __global__ void __launch_bounds__(BLOCK)
    layer_norm(const T *x, const P *__restrict__ gamma, const P *__restrict__ beta, T *y, float *means,
               float *rstds, long long rows, int rows_per_group, float eps, u8 *quantized, float *scales) {
  after_predecessors();
  const int lane = threadIdx.x % GROUP;
  const long long first = ((long long)blockIdx.x * (BLOCK / GROUP) + threadIdx.x / GROUP) * rows_per_group;
  Raw raw[1][VECTORS], next[VECTORS];
  if constexpr (PARAMS_IN_REGISTERS) load_raw(x, first, rows, lane, next);
  float g[PARAMS_IN_REGISTERS ? VECTORS : 1][WIDTH], b[PARAMS_IN_REGISTERS ? VECTORS : 1][WIDTH];
  if constexpr (PARAMS_IN_REGISTERS) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = v * GROUP + lane;
      if (at >= ACCESSES) continue;
      load_many<PARAM, WIDTH>(gamma + at * WIDTH, g[v]);
      load_many<PARAM, WIDTH>(beta + at * WIDTH, b[v]);
    }
  }
  // All groups of a block run `rows_per_group` rounds, even behind the last row: the sums contain barriers.
  for (int i = 0; i < rows_per_group; i++) {
    const long long row = first + i;
    if constexpr (PARAMS_IN_REGISTERS) {
#pragma unroll
      for (int v = 0; v < VECTORS; v++) raw[0][v] = next[v];
      if (i + 1 < rows_per_group) load_raw(x, row + 1, rows, lane, next);
    } else {
      load_raw(x, row, rows, lane, raw[0]);
    }
    float f[VECTORS][WIDTH], mean[1], rstd[1];
    statistics(raw, lane, eps, mean, rstd);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = v * GROUP + lane;
      if (at >= ACCESSES) continue;
      if constexpr (!PARAMS_IN_REGISTERS) {
        load_many<PARAM, WIDTH>(gamma + at * WIDTH, g[0]);
        load_many<PARAM, WIDTH>(beta + at * WIDTH, b[0]);
      }
      widen_raw(raw[0][v], f[v]);
#pragma unroll
      for (int k = 0; k < WIDTH; k++)
        f[v][k] = fmaf((f[v][k] - mean[0]) * rstd[0], g[PARAMS_IN_REGISTERS ? v : 0][k], b[PARAMS_IN_REGISTERS ? v : 0][k]);
      if (row < rows && y) store_many<TYPE, WIDTH>(y + row * COLUMNS + at * WIDTH, f[v]);
    }
    if (row < rows && lane == 0 && means) means[row] = mean[0];
    if (row < rows && lane == 0 && rstds) rstds[row] = rstd[0];
#if defined(QUANTIZED)
    write_quantized(f, row, rows, lane, quantized, scales);
#endif
  }
}
PARAMETERS(layer_norm, 80, 72);

#elif defined(PARAM)

typedef Element<PARAM>::type P;

// Batch norm at inference (Ioffe and Szegedy 2015): y = (x - mean) / sqrt(var + eps) gamma + beta. x, y: (R,
// C); gamma, beta, mean, var: (C) of type PARAM. One block per row.
extern "C" __global__ void __launch_bounds__(256)
    batch_norm(const T *x, const P *__restrict__ gamma, const P *__restrict__ beta, const P *__restrict__ mean,
               const P *__restrict__ var, T *y, int columns, float eps) {
  after_predecessors();
  const u64 row = (u64)blockIdx.x * columns;
  for (int c = threadIdx.x; c < columns; c += 256) {
    const float centred = load(x[row + c]) - widen<PARAM>(mean[c]);
    const float scaled = centred / sqrtf(widen<PARAM>(var[c]) + eps);
    y[row + c] = store(fmaf(scaled, widen<PARAM>(gamma[c]), widen<PARAM>(beta[c])));
  }
}
PARAMETERS(batch_norm, 56, 52);

#else

// Softmax: y[r, c] = exp(x[r, c] - max) / sum exp(x[r, c] - max). x, y: (R, C). One warp per row, four rows per
// block; a lane has every 32nd column, adds them in order, and the lanes' sums are added by a butterfly.
extern "C" __global__ void __launch_bounds__(128) softmax(const T *x, T *y, long long rows, int columns) {
  after_predecessors();
  const int lane = threadIdx.x % 32;
  const long long row = (long long)blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= rows) return;
  const T *from = x + row * columns;
  T *to = y + row * columns;
  float maximum = __int_as_float(0xFF800000), sum = 0.0f;
  for (int c = lane; c < columns; c += 32) maximum = fmaxf(maximum, load(from[c]));
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(0xFFFFFFFFu, maximum, other));
  for (int c = lane; c < columns; c += 32) sum += expf(load(from[c]) - maximum);
  sum = warp_sum(sum);
  for (int c = lane; c < columns; c += 32) to[c] = store(expf(load(from[c]) - maximum) / sum);
}

#endif
