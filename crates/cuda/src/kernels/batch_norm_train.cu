// The row-wise parts of batch norm in training: the normalised rows, and the gradient of x. The sums over rows are in
// column_sums.cu. A block has SUM_ROWS rows of 32 WIDTH columns, whose parameters stay in registers; warp w has rows w,
// w + 8, ...

#include "common.cuh"

#define WARPS 8

typedef Element<PARAM>::type P;
typedef Element<STAT>::type S;

// Calls f(element offset) for the thread's accesses.
template <class F> __device__ __forceinline__ void for_rows(int column, long long rows, int columns, F f) {
  const long long first = (long long)blockIdx.x * SUM_ROWS;
#pragma unroll 4
  for (int i = threadIdx.x / 32; i < SUM_ROWS; i += WARPS)
    if (first + i < rows) f((first + i) * columns + column);
}

__device__ __forceinline__ int first_column() { return (blockIdx.y * 32 + threadIdx.x % 32) * WIDTH; }

#if defined(RUNNING)

// dx of batch norm: with RUNNING 1 (running statistics) dx = dy gamma / sqrt(b + eps), with a, b = mean, var. With
// RUNNING 0 (statistics of the batch), dx = gamma b (dy - sum dy / R - h sum (dy h) / R), with a, b = mean, rstd and
// h = (x - mean) rstd; sums: (2, columns) has sum (dy h) and sum dy.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    batch_norm_input_grad(const T *__restrict__ dy, const T *__restrict__ x, const S *__restrict__ a,
                          const S *__restrict__ b, const P *__restrict__ gamma, const float *__restrict__ sums,
                          T *__restrict__ dx, long long rows, int columns, float eps) {
  after_predecessors();
  const int column = first_column();
  if (column >= columns) return;
  float mean[WIDTH] = {}, rstd[WIDTH], factor[WIDTH], mean_dyh[WIDTH] = {}, mean_dy[WIDTH] = {};
  load_many<STAT, WIDTH>(b + column, rstd);
  load_many<PARAM, WIDTH>(gamma + column, factor);
  if constexpr (!RUNNING) {
    load_many<STAT, WIDTH>(a + column, mean);
    load_many<0, WIDTH>(sums + column, mean_dyh);
    load_many<0, WIDTH>(sums + columns + column, mean_dy);
  }
#pragma unroll
  for (int k = 0; k < WIDTH; k++) {
    if constexpr (RUNNING) rstd[k] = 1.0f / sqrtf(rstd[k] + eps);
    factor[k] *= rstd[k];
    mean_dyh[k] /= (float)rows, mean_dy[k] /= (float)rows;
  }
  for_rows(column, rows, columns, [&](long long at) {
    float d[WIDTH], h[WIDTH];
    load_many<TYPE, WIDTH>(dy + at, d);
    if constexpr (!RUNNING) load_many<TYPE, WIDTH>(x + at, h);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
      if constexpr (!RUNNING) d[k] = d[k] - mean_dy[k] - (h[k] - mean[k]) * rstd[k] * mean_dyh[k];
      d[k] *= factor[k];
    }
    store_many<TYPE, WIDTH>(dx + at, d);
  });
}
PARAMETERS(batch_norm_input_grad, 72, 68);

#else

// y = (x - mean) rstd gamma + beta. x, y: (R, columns), mean, rstd: (columns) of type STAT, gamma, beta: (columns) of
// type PARAM.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    batch_norm_rows(const T *__restrict__ x, const S *__restrict__ means, const S *__restrict__ rstds,
                    const P *__restrict__ gamma, const P *__restrict__ beta, T *__restrict__ y, long long rows,
                    int columns) {
  after_predecessors();
  const int column = first_column();
  if (column >= columns) return;
  float mean[WIDTH], rstd[WIDTH], g[WIDTH], b[WIDTH];
  load_many<STAT, WIDTH>(means + column, mean);
  load_many<STAT, WIDTH>(rstds + column, rstd);
  load_many<PARAM, WIDTH>(gamma + column, g);
  load_many<PARAM, WIDTH>(beta + column, b);
  for_rows(column, rows, columns, [&](long long at) {
    float f[WIDTH];
    load_many<TYPE, WIDTH>(x + at, f);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) f[k] = fmaf((f[k] - mean[k]) * rstd[k], g[k], b[k]);
    store_many<TYPE, WIDTH>(y + at, f);
  });
}
PARAMETERS(batch_norm_rows, 64, 56);

#endif
