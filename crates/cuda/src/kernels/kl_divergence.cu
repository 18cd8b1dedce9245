// Kullback-Leibler divergence between the softmaxes of rows of logits, and its gradient
// (graph/src/ops/kl_divergence.rs). x, y: (R, C).
//
// Work: a warp computes a row. Classifiers have few rows, so the loss is the work of one block.
//
// Invariant: a lane has every 32nd column, adds them in order, and the lanes' sums are added by a butterfly; the order of
// the rows depends on their number only.
//
// Constants: TYPE, the element type of x, y and dx.

#include "common.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define INFINITE __int_as_float(0x7F800000)

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, lane);
  return x;
}

// The largest element of a row, and the sum of the exponentials of all elements relative to it.
__device__ __forceinline__ float sum_exp(const T *row, int columns, float &top) {
  top = -INFINITE;
  for (int c = threadIdx.x % 32; c < columns; c += 32) top = fmaxf(top, load(row[c]));
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, lane));
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < columns; c += 32) sum += expf(load(row[c]) - top);
  return warp_sum(sum);
}

// loss (1) = sum_r sum_c q (ln q - ln p) with p = softmax(x) and q = softmax(y). Warp w has the rows w, w + WARPS and so
// on, adds them in f64, and thread 0 adds the sums of the warps in order. Grid: one block.
extern "C" __global__ void __launch_bounds__(THREADS)
kl_divergence(const T *__restrict__ x, const T *__restrict__ y, float *loss, long long rows, int columns) {
  after_predecessors();
  __shared__ double sums[WARPS];
  double total = 0.0;
  for (long long row = threadIdx.x / 32; row < rows; row += WARPS) {
    const T *of_x = x + row * columns, *of_y = y + row * columns;
    float top_x, top_y, distance = 0.0f;
    const float sum_x = sum_exp(of_x, columns, top_x), sum_y = sum_exp(of_y, columns, top_y);
    for (int c = threadIdx.x % 32; c < columns; c += 32) {
      const float target = load(of_y[c]);
      distance = fmaf(expf(target - top_y), target - load(of_x[c]), distance);
    }
    const double mean = (double)warp_sum(distance) / (double)sum_y;
    total += mean + ((double)top_x + log((double)sum_x)) - ((double)top_y + log((double)sum_y));
  }
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < WARPS; w++) total += sums[w];
  *loss = (float)total;
}

// dx = dloss (softmax(x) - softmax(y)); dx may be x or y. Grid: R rows by WARPS.
extern "C" __global__ void __launch_bounds__(THREADS)
kl_divergence_grad(const float *__restrict__ dloss, const T *x, const T *y, T *dx, long long rows, int columns) {
  after_predecessors();
  const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  x += row * columns, y += row * columns, dx += row * columns;
  float top_x, top_y;
  const float sum_x = sum_exp(x, columns, top_x), sum_y = sum_exp(y, columns, top_y);
  const float of_x = *dloss / sum_x, of_y = *dloss / sum_y;
  for (int c = threadIdx.x % 32; c < columns; c += 32)
    dx[c] = store(expf(load(x[c]) - top_x) * of_x - expf(load(y[c]) - top_y) * of_y);
}
