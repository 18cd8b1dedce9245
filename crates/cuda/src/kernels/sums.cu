// Sums of the columns of a matrix over its rows, in two kernels: partial sums over chunks of ROWS rows, and their total.
//
// Invariant: the order of a column's sum depends on the number of rows only: a warp adds every eighth row of a chunk,
// the eight warps' sums are added in order; then a group of threads adds every eighth chunk, and the eight groups' sums
// are added in order. No atomics.
//
// column_sums.cu sums other terms, of chunks of 32 rows. It loads fewer rows at a time and adds the chunks by 32 warps, so
// as one file either the bits of one of them or the loads in flight would change.
//
// Constants: for the partial sums TYPE, ROWS, and WIDTH: elements of an access, 16 bytes if all rows are multiples of
// them, else 1. For the total OUT, the element type of the result.

#include "common.cuh"

#define THREADS 256
#define GROUPS 8 // warps of a block

#if defined(ROWS)

#define COLUMNS (32 * WIDTH)   // columns of a block
#define IN_FLIGHT 8            // rows that a thread loads before it adds them
static_assert(ROWS % (GROUPS * IN_FLIGHT) == 0, "whole rounds of loads");
template <int W> struct Access { typedef uint4 type; };
template <> struct Access<1> { typedef T type; };
typedef Access<WIDTH>::type Raw;

// partials (chunks, C): sums over chunks of ROWS rows of x (R, C). Grid: (blocks of columns, chunks).
extern "C" __global__ void __launch_bounds__(THREADS)
column_partials(const T *__restrict__ x, float *__restrict__ partials, long long rows, int columns) {
  after_predecessors();
  __shared__ __align__(16) float sums[GROUPS][COLUMNS];
  const int chunk = blockIdx.y, column0 = blockIdx.x * COLUMNS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = column0 + lane * WIDTH;
  const long long first = (long long)chunk * ROWS + warp;
  float sum[WIDTH] = {};
  if (column < columns) {
    for (int base = 0; base < ROWS; base += GROUPS * IN_FLIGHT) {
      Raw raw[IN_FLIGHT] = {};
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++) {
        const long long row = first + base + i * GROUPS;
        if (row < rows) raw[i] = *(const Raw *)(x + row * columns + column);
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++) {
        float f[WIDTH];
        load_many<TYPE, WIDTH>((const T *)&raw[i], f);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) sum[k] += f[k];
      }
    }
  }
  store_many<0, WIDTH>(&sums[warp][lane * WIDTH], sum);
  __syncthreads();
  const int in = threadIdx.x;
  if (in < COLUMNS && column0 + in < columns) {
    float total = sums[0][in];
#pragma unroll
    for (int w = 1; w < GROUPS; w++) total += sums[w][in];
    partials[(long long)chunk * columns + column0 + in] = total;
  }
}

#else

typedef Element<OUT>::type Y;

// y (C) = sums over the `count` rows of partials (count, stride), plus `add` (C) if it is not null; `add` may be y. Grid:
// blocks of 32 columns.
extern "C" __global__ void __launch_bounds__(THREADS)
column_totals(const float *__restrict__ partials, const float *add, Y *y, int count, int columns, int stride) {
  after_predecessors();
  __shared__ float sums[GROUPS][32];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (int i = group; i < count; i += GROUPS) sum += partials[(long long)i * stride + column];
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group == 0 && column < columns) {
    float total = sums[0][lane];
#pragma unroll
    for (int g = 1; g < GROUPS; g++) total += sums[g][lane];
    y[column] = narrow<OUT>(add ? add[column] + total : total);
  }
}

#endif
