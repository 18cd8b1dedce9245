// Softmax cross-entropy of rows of logits, its gradient, and the sum of the losses (graph/src/ops/cross_entropy.rs). The
// logits (R, V) are f32 products without bias; a row's target is its class, or negative if the row does not count.
//
// Work: GROUP threads compute a row, in one pass over its logits.
//
// Invariant: rows that do not count are never read, so whatever they hold contributes nothing. The order of a row's sums
// depends on V and GROUP only, that of the losses on the number of rows only. No atomics but those of the status word.
//
// Constants: for rows of logits TYPE, the element type of g; BIAS, the element type of the bias; GROUP, 32 or 256
// threads; WIDTH, the logits of an access: 4 if V is a multiple of 4, else 1. For copies of rows TYPE and WIDTH, the
// elements of an access. For the sum none.

#include "common.cuh"

#define INFINITE __int_as_float(0x7F800000)

#if defined(GROUP)

#define BLOCK (GROUP < 128 ? 128 : GROUP)
static_assert(GROUP == 32 || GROUP == BLOCK, "a row is for one warp, or for the whole block, which may then leave early");
typedef Element<BIAS>::type B;

// The logits of `columns..columns + WIDTH` of a row.
__device__ __forceinline__ void logits_at(const float *__restrict__ row, const B *__restrict__ bias, int column,
                                          float (&x)[WIDTH]) {
  load_many<0, WIDTH>(row + column, x);
  if (bias) {
    float b[WIDTH];
    load_many<BIAS, WIDTH>(bias + column, b);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) x[k] += b[k];
  }
}

// Adds the pair (b, t) to (a, s), where s is a sum of exponentials relative to their maximum a.
__device__ __forceinline__ void merge(float &a, float &s, float b, float t) {
  const float top = fmaxf(a, b);
  // Where the maximum is -inf, nothing was summed, and the difference would be NaN.
  s = s * (a == top ? 1.0f : expf(a - top)) + t * (b == top ? 1.0f : expf(b - top));
  a = top;
}

// lses (R): log-sum-exp of each row that counts, else 0. terms (R): its lse minus the logit of its target, else 0.
// Grid: R rows by BLOCK / GROUP.
extern "C" __global__ void __launch_bounds__(BLOCK)
cross_entropy(const float *__restrict__ logits, const B *__restrict__ bias, const int *__restrict__ targets, float *lses,
              float *terms, long long rows, int classes, u32 *status) {
  after_predecessors();
  const int lane = threadIdx.x % GROUP;
  const long long row = (long long)blockIdx.x * (BLOCK / GROUP) + threadIdx.x / GROUP;
  const int target = row < rows ? targets[row] : -1;
  if (target < 0 || target >= classes) { // equal for all threads of the row
    if (lane == 0 && row < rows) {
      if (target >= classes) refuse(status, BAD_TARGET);
      lses[row] = terms[row] = 0.0f;
    }
    return;
  }
  const float *from = logits + row * classes;
  float maximum = -INFINITE, sum = 0.0f;
#pragma unroll 4
  for (int c = lane * WIDTH; c < classes; c += GROUP * WIDTH) {
    float x[WIDTH];
    logits_at(from, bias, c, x);
    float top = x[0];
#pragma unroll
    for (int k = 1; k < WIDTH; k++) top = fmaxf(top, x[k]);
    if (top > maximum) {
      sum *= expf(maximum - top);
      maximum = top;
    }
    // Classes before the first finite logit have the maximum -inf, relative to which they would be NaN.
    const float base = maximum == -INFINITE ? 0.0f : maximum;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) sum += expf(x[k] - base);
  }
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) {
    const float b = __shfl_xor_sync(0xFFFFFFFFu, maximum, other), t = __shfl_xor_sync(0xFFFFFFFFu, sum, other);
    merge(maximum, sum, b, t);
  }
  if constexpr (GROUP > 32) {
    __shared__ float maxima[GROUP / 32], sums[GROUP / 32];
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = maximum, sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int w = 1; w < GROUP / 32; w++) merge(maximum, sum, maxima[w], sums[w]);
  }
  if (lane == 0) {
    const float lse = maximum + logf(sum);
    lses[row] = lse;
    terms[row] = lse - (from[target] + (bias ? widen<BIAS>(bias[target]) : 0.0f));
  }
}
PARAMETERS(cross_entropy, 64, 56);

// g (R, stride), with zeros behind the V classes: g = dloss (softmax (1 + 2 z lse) - onehot(target)) of the rows that
// count, zeros of the others. Grid: R rows by BLOCK / GROUP.
extern "C" __global__ void __launch_bounds__(BLOCK)
cross_entropy_grad(const float *__restrict__ logits, const B *__restrict__ bias, const int *__restrict__ targets,
                   const float *__restrict__ lses, const float *__restrict__ dloss, T *__restrict__ g, long long rows,
                   int classes, int stride, float z, u32 *status) {
  after_predecessors();
  const int lane = threadIdx.x % GROUP;
  const long long row = (long long)blockIdx.x * (BLOCK / GROUP) + threadIdx.x / GROUP;
  if (row >= rows) return;
  const int target = targets[row];
  const bool counts = target >= 0 && target < classes;
  if (target >= classes && lane == 0) refuse(status, BAD_TARGET);
  const float d = *dloss, lse = counts ? lses[row] : 0.0f, factor = d * fmaf(2.0f * z, lse, 1.0f);
  const float *from = logits + row * classes;
  T *to = g + row * stride;
#pragma unroll 4
  for (int c = lane * WIDTH; c < stride; c += GROUP * WIDTH) {
    float x[WIDTH] = {};
    if (counts && c < classes) {
      logits_at(from, bias, c, x);
#pragma unroll
      for (int k = 0; k < WIDTH; k++) x[k] = factor * expf(x[k] - lse) - (c + k == target ? d : 0.0f);
    }
    store_many<TYPE, WIDTH>(to + c, x);
  }
}
PARAMETERS(cross_entropy_grad, 80, 72);

#elif defined(WIDTH)

template <int W> struct Access { typedef uint4 type; };
template <> struct Access<1> { typedef T type; };
typedef Access<WIDTH>::type Raw;

#define STEPS 4 // accesses of a thread

// y (R, K) = x (R, K), with zeros in rows that do not count: a product of zero with NaN or infinity would be NaN. A row
// has `accesses` accesses. Grid: R * accesses by 256 * STEPS.
extern "C" __global__ void __launch_bounds__(256)
counted_rows(const T *__restrict__ x, const int *__restrict__ targets, T *__restrict__ y, long long rows, int classes,
             int accesses) {
  after_predecessors();
  const long long first = (long long)blockIdx.x * (256 * STEPS) + threadIdx.x, all = rows * accesses;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const long long at = first + i * 256;
    if (at >= all) continue;
    const int target = targets[at / accesses];
    Raw raw = {};
    if (target >= 0 && target < classes) raw = ((const Raw *)x)[at];
    ((Raw *)y)[at] = raw;
  }
}
PARAMETERS(counted_rows, 40, 36);

#else

#define THREADS 1024

// The sums of all rows: cross_entropy (1) = sum terms; z_term (1) = z sum lses^2; loss (1) = their sum. Each may be null.
// Sums are f64: a thread adds every 1024th row, and the threads' sums are added in a binary tree. Grid: one block.
extern "C" __global__ void __launch_bounds__(THREADS)
loss_total(const float *__restrict__ lses, const float *__restrict__ terms, float *loss, float *cross_entropy,
           float *z_term, long long rows, float z) {
  after_predecessors();
  __shared__ double sums[2][THREADS];
  double entropy = 0.0, squares = 0.0;
#pragma unroll 4
  for (long long row = threadIdx.x; row < rows; row += THREADS) {
    entropy += (double)terms[row];
    squares += (double)lses[row] * (double)lses[row];
  }
  sums[0][threadIdx.x] = entropy, sums[1][threadIdx.x] = squares;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[0][threadIdx.x] += sums[0][threadIdx.x + half];
      sums[1][threadIdx.x] += sums[1][threadIdx.x + half];
    }
  }
  if (threadIdx.x == 0) {
    const double term = z != 0.0f ? (double)z * sums[1][0] : 0.0;
    if (loss) *loss = (float)(sums[0][0] + term);
    if (cross_entropy) *cross_entropy = (float)sums[0][0];
    if (z_term) *z_term = (float)term;
  }
}
PARAMETERS(loss_total, 56, 48);

#endif
