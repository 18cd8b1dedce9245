// Sums over the rows of a matrix, for gradients of parameters and for the statistics of a batch: `column_sums` adds
// SUM_ROWS adjacent rows to partial sums, `add_partials` and `moments` add the partial sums of a column.
//
// Constants: SUM_ROWS; OF, the terms that are added; INTO, the element type of finished sums.
//
// Invariant: the order of a column's additions depends on the number of rows only: warp w of a block adds rows w, w +
// 8, ... of its SUM_ROWS rows in order, then the sums of the warps are added in order of w; partial sums are added in
// the same way by 32 warps.

#include "common.cuh"

#if defined(OF)

#define WARPS 8

// Terms of the sums, for row r and column c.
#define PLAIN 0      // x
#define SQUARES 1    // (x - mean[c])^2
#define BATCH_NORM 2 // dy (x - mean[c]) rstd[c], and dy
#define RUNNING 3    // the same with rstd = 1 / sqrt(var[c] + eps), and var in place of rstd
#define ROW_NORM 4   // dy (x - mean[r]) rstd[r], and dy; mean may be null and counts as zero
#define SCALED 5     // scale[r] x for scales other than zero; scale may be null and counts as one
#define SUMS (OF == BATCH_NORM || OF == RUNNING || OF == ROW_NORM ? 2 : 1)

typedef Element<STAT>::type S;

// partials[i, j, c] = sum of term j of rows SUM_ROWS i .. SUM_ROWS (i + 1). dy, x: (R, columns), a, b: the vectors of
// type STAT that the terms name, in order; partials: (R / SUM_ROWS, SUMS, columns). Block (i, j) has columns 32 WIDTH j
// and following; `columns` is a multiple of WIDTH.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    column_sums(const T *__restrict__ dy, const T *__restrict__ x, const S *__restrict__ a, const S *__restrict__ b,
                float *__restrict__ partials, long long rows, int columns, float eps) {
  after_predecessors();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block = blockIdx.y * 32 * WIDTH, column = block + lane * WIDTH;
  const long long first = (long long)blockIdx.x * SUM_ROWS;
  float sums[SUMS][WIDTH] = {};
  if (column < columns) {
    float mean[WIDTH] = {}, rstd[WIDTH] = {};
    if constexpr (OF == SQUARES || OF == BATCH_NORM || OF == RUNNING) load_many<STAT, WIDTH>(a + column, mean);
    if constexpr (OF == BATCH_NORM || OF == RUNNING) load_many<STAT, WIDTH>(b + column, rstd);
    if constexpr (OF == RUNNING) {
#pragma unroll
      for (int k = 0; k < WIDTH; k++) rstd[k] = 1.0f / sqrtf(rstd[k] + eps);
    }
#pragma unroll 4
    for (int i = warp; i < SUM_ROWS; i += WARPS) {
      const long long row = first + i;
      if (row >= rows) continue;
      float f[WIDTH], d[WIDTH] = {}, scale = 1.0f;
      if constexpr (OF == SCALED) {
        if (a) scale = widen<STAT>(a[row]);
        if (scale == 0.0f) continue;
      }
      load_many<TYPE, WIDTH>(x + row * columns + column, f);
      if constexpr (SUMS == 2) load_many<TYPE, WIDTH>(dy + row * columns + column, d);
      float m = 0.0f, s = 0.0f;
      if constexpr (OF == ROW_NORM) m = a ? widen<STAT>(a[row]) : 0.0f, s = widen<STAT>(b[row]);
#pragma unroll
      for (int k = 0; k < WIDTH; k++) {
        if constexpr (OF == PLAIN) {
          sums[0][k] += f[k];
        } else if constexpr (OF == SQUARES) {
          const float centred = f[k] - mean[k];
          sums[0][k] = fmaf(centred, centred, sums[0][k]);
        } else if constexpr (OF == SCALED) {
          sums[0][k] = fmaf(scale, f[k], sums[0][k]);
        } else {
          const float h = OF == ROW_NORM ? (f[k] - m) * s : (f[k] - mean[k]) * rstd[k];
          sums[0][k] = fmaf(d[k], h, sums[0][k]);
          sums[SUMS - 1][k] += d[k];
        }
      }
    }
  }
  __shared__ float of_warps[WARPS][32 * WIDTH];
#pragma unroll
  for (int j = 0; j < SUMS; j++) {
    // The first sums have been read before they are overwritten.
    if (j > 0) __syncthreads();
#pragma unroll
    for (int k = 0; k < WIDTH; k++) of_warps[warp][lane * WIDTH + k] = sums[j][k];
    __syncthreads();
    const int c = threadIdx.x;
    if (c < 32 * WIDTH && block + c < columns) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) total += of_warps[w][c];
      partials[((long long)blockIdx.x * SUMS + j) * columns + block + c] = total;
    }
  }
}
PARAMETERS(column_sums, 56, 52);

#else

// Returns the sum over `chunks` rows of partials (chunks, stride) of column 32 blockIdx.x + lane, in the first warp; 0
// for columns from `columns` on. All 1024 threads of a block must call it once.
__device__ __forceinline__ float partial_sum(const float *__restrict__ partials, long long chunks, long long stride,
                                             int columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (long long i = warp; i < chunks; i += 32) sum += partials[i * stride + column];
  }
  __shared__ float of_warps[32][32];
  of_warps[warp][lane] = sum;
  __syncthreads();
  sum = 0.0f;
  if (warp == 0) {
    for (int w = 0; w < 32; w++) sum += of_warps[w][lane];
  }
  return sum;
}

#if defined(INTO)

typedef Element<INTO>::type O;

// Adds partials (chunks, sums, columns) to column sums: sum 0 to `first`, sum 1 to `second`, (columns) each, and both
// to `wide` (sums, columns) in f32; any of them may be null. Grid: (columns / 32, sums).
extern "C" __global__ void __launch_bounds__(1024)
    add_partials(const float *__restrict__ partials, O *__restrict__ first, O *__restrict__ second,
                 float *__restrict__ wide, long long chunks, int columns) {
  after_predecessors();
  const float sum =
      partial_sum(partials + (long long)blockIdx.y * columns, chunks, (long long)gridDim.y * columns, columns);
  const int column = blockIdx.x * 32 + threadIdx.x;
  if (threadIdx.x >= 32 || column >= columns) return;
  O *to = blockIdx.y == 0 ? first : second;
  if (to) to[column] = narrow<INTO>(sum);
  if (wide) wide[(long long)blockIdx.y * columns + column] = sum;
}
PARAMETERS(add_partials, 48, 40);

#else

// Statistics of a batch of `rows` rows, from partials (chunks, columns): the mean, or with `of_squares` rstd = 1 /
// sqrt(var + eps) of squared deviations. Writes it to `wide` and, where it is not null, to `statistic`; where `updated`
// is not null, updated = (1 - momentum) running + momentum m, with m the mean or the unbiased variance.
extern "C" __global__ void __launch_bounds__(1024)
    moments(const float *__restrict__ partials, float *__restrict__ wide, float *__restrict__ statistic,
            const float *__restrict__ running, float *__restrict__ updated, long long chunks, long long rows,
            int columns, int of_squares, float eps, float momentum) {
  after_predecessors();
  const float sum = partial_sum(partials, chunks, columns, columns);
  const int column = blockIdx.x * 32 + threadIdx.x;
  if (threadIdx.x >= 32 || column >= columns) return;
  const float mean = sum / (float)rows;
  const float value = of_squares ? 1.0f / sqrtf(mean + eps) : mean;
  wide[column] = value;
  if (statistic) statistic[column] = value;
  const float moved = of_squares ? sum / (float)(rows - 1) : mean;
  if (updated) updated[column] = fmaf(momentum, moved, (1.0f - momentum) * running[column]);
}
PARAMETERS(moments, 72, 68);

#endif
#endif
