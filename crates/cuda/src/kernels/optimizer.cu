// Updates of one parameter: AdamW, AdamW with 8-bit moments, Adafactor, SGD; its average; and the scale of all gradients.
//
// The gradient g has the element type TYPE; parameters and moments are f32. `scale` (2) is (factor, ok): the gradient
// is factor g, and where ok is 0 every output equals its input. `scale` and `hyper` are read from device memory, so a
// step needs no value of the host.
//
// Invariant: a new state depends on the old states and the gradient at its own element only, except for Adafactor's
// means. Sums (of squares, of means) are f64: partial sums of fixed ranges, added in a fixed order. A thread reads its
// elements before it writes them, so outputs may be inputs.

#include "common.cuh"
#include "elementwise.cuh"

// Elements of a vector access of the f32 states.
#define MANY 4

__device__ __forceinline__ bool is_ok(const float *scale) { return scale[1] != 0.0f; }

// Sums x over the block, in a fixed order; the result is valid in thread 0. All threads must call it.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double sums[THREADS / 32];
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, lane);
  __syncthreads(); // A previous call's sums have been read.
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0.0;
  if (threadIdx.x == 0)
    for (int w = 0; w < THREADS / 32; w++) total += sums[w];
  return total;
}

// AdamW's factors of a step, computed in f64 as on the CPU: 1 - lr decay, lr / (1 - b1^t), 1 / sqrt(1 - b2^t).
struct Factors {
  float left, rate, root;
};

// Computes the factors once for the block; all threads must call it.
__device__ __forceinline__ Factors factors(const float *hyper, float decay) {
  __shared__ Factors all;
  if (threadIdx.x == 0) {
    const double lr = hyper[0];
    all.left = (float)(1.0 - lr * (double)decay);
    all.rate = (float)(lr / (double)hyper[1]);
    all.root = (float)(1.0 / sqrt((double)hyper[2]));
  }
  __syncthreads();
  return all;
}

// One element of AdamW (Loshchilov and Hutter 2019); g is the scaled gradient.
__device__ __forceinline__ void adamw_element(float g, float &p, float &m, float &v, const Factors &f, float b1, float b2,
                                              float eps) {
  m = fmaf(b1, m, (1.0f - b1) * g);
  v = fmaf(b2, v, (1.0f - b2) * g * g);
  p = fmaf(f.left, p, -f.rate * m / fmaf(sqrtf(v), f.root, eps));
}

// AdamW: p, m, v (n) to p_new, m_new, v_new. hyper (3): lr, 1 - b1^t, 1 - b2^t.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw(const float *p, const T *__restrict__ g, const float *m, const float *v, const float *__restrict__ scale,
          const float *__restrict__ hyper, float *p_new, float *m_new, float *v_new, long long n, float b1, float b2,
          float eps, float decay) {
  after_predecessors();
  const bool ok = is_ok(scale);
  if (!ok && p == p_new && m == m_new && v == v_new) return;
  const Factors f = factors(hyper, decay);
  const long long first = first_element<MANY>();
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const long long at = first + s * THREADS * MANY;
    if (at >= n) break;
    float gs[MANY], ps[MANY], ms[MANY], vs[MANY];
    load_some<TYPE, MANY>(g, at, n, gs);
    load_some<0, MANY>(p, at, n, ps);
    load_some<0, MANY>(m, at, n, ms);
    load_some<0, MANY>(v, at, n, vs);
#pragma unroll
    for (int i = 0; i < MANY; i++)
      if (ok) adamw_element(scale[0] * gs[i], ps[i], ms[i], vs[i], f, b1, b2, eps);
    store_some<0, MANY>(p_new, at, n, ps);
    store_some<0, MANY>(m_new, at, n, ms);
    store_some<0, MANY>(v_new, at, n, vs);
  }
}
PARAMETERS(adamw, 96, 92);

// SGD (torch.optim.SGD), with momentum if `buffer` is not null. hyper (1): lr.
extern "C" __global__ void __launch_bounds__(THREADS)
    sgd(const float *p, const T *__restrict__ g, const float *buffer, const float *__restrict__ scale,
        const float *__restrict__ hyper, float *p_new, float *buffer_new, long long n, float momentum, float decay,
        int nesterov) {
  after_predecessors();
  const bool ok = is_ok(scale);
  if (!ok && p == p_new && buffer == buffer_new) return;
  const float lr = hyper[0];
  const long long first = first_element<MANY>();
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const long long at = first + s * THREADS * MANY;
    if (at >= n) break;
    float gs[MANY], ps[MANY], bs[MANY] = {};
    load_some<TYPE, MANY>(g, at, n, gs);
    load_some<0, MANY>(p, at, n, ps);
    if (buffer) load_some<0, MANY>(buffer, at, n, bs);
#pragma unroll
    for (int i = 0; i < MANY; i++) {
      if (!ok) continue;
      float step = fmaf(decay, ps[i], scale[0] * gs[i]);
      if (buffer) {
        bs[i] = fmaf(momentum, bs[i], step);
        step = nesterov ? fmaf(momentum, bs[i], step) : bs[i];
      }
      ps[i] = fmaf(-lr, step, ps[i]);
    }
    store_some<0, MANY>(p_new, at, n, ps);
    if (buffer) store_some<0, MANY>(buffer_new, at, n, bs);
  }
}
PARAMETERS(sgd, 80, 72);

// Average of a parameter (tf.train.ExponentialMovingAverage): mean (n) to mean_new after the update of p (n). steps (1) is
// the number of earlier steps. The weight of p is computed in f64 as on the CPU.
extern "C" __global__ void __launch_bounds__(THREADS)
    ema(const float *mean, const float *__restrict__ p, const float *__restrict__ scale,
        const float *__restrict__ steps, float *mean_new, long long n, float decay) {
  after_predecessors();
  const bool ok = is_ok(scale);
  if (!ok && mean == mean_new) return;
  __shared__ float shared_weight;
  if (threadIdx.x == 0) {
    const double t = (double)steps[0] + 1.0;
    shared_weight = (float)(1.0 - fmin((double)decay, (1.0 + t) / (10.0 + t)));
  }
  __syncthreads();
  const float weight = shared_weight;
  const long long first = first_element<MANY>();
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const long long at = first + s * THREADS * MANY;
    if (at >= n) break;
    float es[MANY], ps[MANY];
    load_some<0, MANY>(mean, at, n, es);
    load_some<0, MANY>(p, at, n, ps);
#pragma unroll
    for (int i = 0; i < MANY; i++)
      if (ok) es[i] = fmaf(weight, ps[i] - es[i], es[i]);
    store_some<0, MANY>(mean_new, at, n, es);
  }
}
PARAMETERS(ema, 56, 48);

// Counter of the steps that are not skipped, at most 2^24, where f32 can no longer add 1. One thread.
extern "C" __global__ void __launch_bounds__(THREADS)
    count_steps(const float *steps, const float *__restrict__ scale, float *steps_new) {
  after_predecessors();
  if (threadIdx.x == 0) steps_new[0] = is_ok(scale) ? fminf(steps[0] + 1.0f, 16777216.0f) : steps[0];
}

// Sums of squares of a gradient: partial[b] is the sum over the elements from b RANGE on, in f64. One block per range.
extern "C" __global__ void __launch_bounds__(THREADS)
    squares(const T *__restrict__ g, double *__restrict__ partial, long long n) {
  after_predecessors();
  const long long first = (long long)blockIdx.x * RANGE, end = min(n, first + RANGE);
  double sum = 0.0;
  for (long long at = first + threadIdx.x * MANY; at < end; at += THREADS * MANY) {
    float x[MANY];
    load_some<TYPE, MANY>(g, at, end, x);
    // The square of an f32 is exact in f64.
#pragma unroll
    for (int i = 0; i < MANY; i++) sum = fma((double)x[i], (double)x[i], sum);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Sum of `count` partial sums by one block, in a fixed order; valid in thread 0.
__device__ __forceinline__ double total(const double *partial, long long count) {
  double sum = 0.0;
  for (long long i = threadIdx.x; i < count; i += THREADS) sum += partial[i];
  return block_sum(sum);
}

// Scale of a step (torch.nn.utils.clip_grad_norm_): norm = |unscale| sqrt(sum of squares), scale = (unscale min(1,
// max_norm / (norm + 1e-6)), whether norm is a finite f32). scale (2) and norm (1) may be null. One block.
extern "C" __global__ void __launch_bounds__(THREADS)
    grad_scale(const double *__restrict__ partial, long long count, const float *__restrict__ unscale, float *scale,
               float *norm, float max_norm) {
  after_predecessors();
  const double sum = total(partial, count);
  if (threadIdx.x > 0) return;
  const double all = fabs((double)unscale[0]) * sqrt(sum);
  const double clip = max_norm == 0.0f ? 1.0 : fmin((double)max_norm / (all + 1e-6), 1.0);
  const float rounded = (float)all;
  if (scale) {
    scale[0] = (float)((double)unscale[0] * clip);
    scale[1] = isfinite(rounded) ? 1.0f : 0.0f;
  }
  if (norm) norm[0] = rounded;
}
PARAMETERS(grad_scale, 48, 40);

// Adafactor without first moment (Shazeer and Stern 2018), in five passes, since the root mean square of the whole
// update is needed before the first element is updated. hyper (2): lr, b2. A vector is one row without row means.

// partial[chunk][c]: sum of the squares of column c over the ROWS rows of a chunk. Grid: (tiles of columns, chunks).
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_columns(const T *__restrict__ g, const float *__restrict__ scale, double *__restrict__ partial,
                      long long rows, int columns) {
  after_predecessors();
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= columns) return;
  const long long first = (long long)blockIdx.y * ROWS, end = min(rows, first + ROWS);
  double sum = 0.0;
  for (long long r = first; r < end; r++) {
    const float x = scale[0] * load(g[r * columns + column]);
    sum = fma((double)x, (double)x, sum);
  }
  partial[(long long)blockIdx.y * columns + column] = sum;
}

// Moves an average towards a mean of squares of `count` elements.
__device__ __forceinline__ float moved(float old, double sum, long long count, double b2, double eps1) {
  return (float)(b2 * (double)old + (1.0 - b2) * (sum / (double)count + eps1));
}

// The column means C (columns), from the partial sums of all chunks in order.
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_column_means(const double *__restrict__ partial, const float *old, float *means,
                           const float *__restrict__ scale, const float *__restrict__ hyper, long long rows, int columns,
                           float eps1) {
  after_predecessors();
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= columns) return;
  if (!is_ok(scale)) {
    means[column] = old[column];
    return;
  }
  const long long chunks = (rows + ROWS - 1) / ROWS;
  double sum = 0.0;
  for (long long c = 0; c < chunks; c++) sum += partial[c * columns + column];
  means[column] = moved(old[column], sum, rows, hyper[1], eps1);
}
PARAMETERS(adafactor_column_means, 56, 52);

// The row means R (rows); one block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_row_means(const T *__restrict__ g, const float *old, float *means, const float *__restrict__ scale,
                        const float *__restrict__ hyper, int columns, float eps1) {
  after_predecessors();
  const long long row = blockIdx.x;
  double sum = 0.0;
  for (int c = threadIdx.x; c < columns; c += THREADS) {
    const float x = scale[0] * load(g[row * columns + c]);
    sum = fma((double)x, (double)x, sum);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) means[row] = is_ok(scale) ? moved(old[row], sum, columns, hyper[1], eps1) : old[row];
}
PARAMETERS(adafactor_row_means, 48, 44);

// The mean of the row means, mean(R), to numbers[0]; one block.
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_row_average(const float *__restrict__ means, double *numbers, long long rows) {
  after_predecessors();
  double sum = 0.0;
  for (long long r = threadIdx.x; r < rows; r += THREADS) sum += (double)means[r];
  sum = block_sum(sum);
  if (threadIdx.x == 0) numbers[0] = sum / (double)rows;
}

// An element of the update before clipping: u = g / sqrt(R C / mean(R)); `row` is null for a vector.
__device__ __forceinline__ float direction(const T *g, const float *row, const float *column, float average, float factor,
                                           long long i, int columns) {
  const long long r = i / columns;
  const float share = row ? sqrtf(average / row[r]) : 1.0f;
  return share * (factor * load(g[i]) / sqrtf(column[i - r * columns]));
}

// partial[b]: sum of the squares of u over the elements from b RANGE on.
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_squares(const T *__restrict__ g, const float *__restrict__ row, const float *__restrict__ column,
                      const double *__restrict__ numbers, const float *__restrict__ scale, double *__restrict__ partial,
                      long long n, int columns) {
  after_predecessors();
  const long long first = (long long)blockIdx.x * RANGE, end = min(n, first + RANGE);
  const float average = row ? (float)numbers[0] : 1.0f, factor = scale[0];
  double sum = 0.0;
  for (long long i = first + threadIdx.x; i < end; i += THREADS) {
    const double u = direction(g, row, column, average, factor, i, columns);
    sum = fma(u, u, sum);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
PARAMETERS(adafactor_squares, 64, 56);

// numbers[1], numbers[2]: the factor of u, lr / max(1, rms(u) / clip), and of p, 1 - lr decay; one block.
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_rate(const double *__restrict__ partial, double *numbers, const float *__restrict__ hyper, long long count,
                   long long n, float clip, float decay) {
  after_predecessors();
  const double sum = total(partial, count);
  if (threadIdx.x > 0) return;
  const double lr = hyper[0], rms = sqrt(sum / (double)n);
  numbers[1] = lr / fmax(rms / (double)clip, 1.0);
  numbers[2] = 1.0 - lr * (double)decay;
}
PARAMETERS(adafactor_rate, 48, 44);

// p_new = left p - rate u.
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor(const float *p, const T *__restrict__ g, const float *__restrict__ row, const float *__restrict__ column,
              const double *__restrict__ numbers, const float *__restrict__ scale, float *p_new, long long n,
              int columns) {
  after_predecessors();
  const bool ok = is_ok(scale);
  if (!ok && p == p_new) return;
  const float average = row ? (float)numbers[0] : 1.0f, factor = scale[0];
  const float rate = (float)numbers[1], left = (float)numbers[2];
  const long long first = first_element<1>();
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const long long i = first + s * THREADS;
    if (i >= n) break;
    const float old = p[i];
    p_new[i] = ok ? fmaf(left, old, -rate * direction(g, row, column, average, factor, i, columns)) : old;
  }
}
PARAMETERS(adafactor, 72, 64);

// AdamW with 8-bit moments in blocks of 256 elements (Dettmers et al. 2022). A moment is one of 256 values of a table,
// times the largest magnitude of its block.

// A quantization table (exec/src/dynamic_codes.rs, bit for bit): zero, one, and in each of seven decades the midpoints
// of equal parts of 0.1 .. 1. The lowest decade has one part, two if the table is unsigned, and every following decade
// twice as many. `last[i]` is the largest number that is quantized to index i.
struct Table {
  float values[256], last[256];
};

// The operations are spelled out, since a contraction to fused multiply-adds would change the last bit of a value.
__device__ __forceinline__ double edge(int i, int parts) {
  return i == parts ? 1.0 : __dadd_rn(__dmul_rn((double)i, __ddiv_rn(1.0 - 0.1, (double)parts)), 0.1);
}

// Builds a table; every thread of the block computes the value at its own index.
template <bool SIGNED> __device__ __forceinline__ void build(Table &table) {
  constexpr int ZERO = SIGNED ? 127 : 0;
  const double powers[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  const int index = threadIdx.x, place = index < ZERO ? ZERO - index : index - ZERO; // from the zero, 1 .. 127 or 255
  float value = 0.0f;
  int first = 1; // place of the first part of the decade
#pragma unroll
  for (int decade = 0; decade < 7; decade++) {
    const int parts = SIGNED ? 1 << decade : 2 << decade;
    if (place >= first && place < first + parts) {
      const double sum = __dadd_rn(edge(place - first, parts), edge(place - first + 1, parts));
      value = (float)__dmul_rn(__ddiv_rn(sum, 2.0), powers[decade]);
    }
    first += parts;
  }
  if (index == 255) value = 1.0f;
  table.values[index] = index < ZERO ? -value : value;
  __syncthreads();
  // Index 0 of the unsigned table has the value zero, and only zero itself is quantized to it.
  const bool end = index == 0 && table.values[0] == 0.0f;
  const double middle = index < 255 ? ((double)table.values[index] + (double)table.values[index + 1]) / 2.0 : 0.0;
  // Rounded down, because the midpoint may lie between two f32: `x > last` then is `x > middle` for every f32 x, and a
  // number in the middle gets the lower index, as on the CPU.
  table.last[index] = index == 255 ? __int_as_float(0x7F800000) : end ? 0.0f : __double2float_rd(middle);
  __syncthreads();
}

// The index of the value nearest to x in -1 .. 1: the first whose `last` is at least x.
__device__ __forceinline__ u32 nearest(const Table &table, float x) {
  u32 index = 0;
#pragma unroll
  for (u32 step = 128; step > 0; step >>= 1)
    if (x > table.last[index + step - 1]) index += step;
  return index;
}

#define BLOCK 256 // elements of a block of moments; a warp has one, a lane EACH adjacent elements of it
#define EACH 8
#define BLOCKS_PER_WARP 4

// Loads and stores the EACH indices of a lane.
__device__ __forceinline__ void load_codes(const u8 *from, long long at, long long n, u32 (&codes)[EACH]) {
  if (at + EACH <= n) {
    const uint2 both = *(const uint2 *)(from + at);
#pragma unroll
    for (int i = 0; i < EACH; i++) codes[i] = (i < 4 ? both.x >> 8 * i : both.y >> 8 * (i - 4)) & 0xFF;
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i++) codes[i] = at + i < n ? from[at + i] : 0;
  }
}

__device__ __forceinline__ void store_codes(u8 *to, long long at, long long n, const u32 (&codes)[EACH]) {
  if (at + EACH <= n) {
    uint2 both = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < EACH; i++) (i < 4 ? both.x : both.y) |= codes[i] << 8 * (i % 4);
    *(uint2 *)(to + at) = both;
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (at + i < n) to[at + i] = (u8)codes[i];
  }
}

// Quantizes a block's moment, of which x are the lane's elements, and writes it with its largest magnitude.
__device__ __forceinline__ void quantize(const Table &table, const float (&x)[EACH], u8 *codes, float *absmax,
                                         long long block, long long at, long long n) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (at + i < n) most = fmaxf(most, fabsf(x[i]));
  // Magnitudes as integers have the order of the numbers.
  most = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(most)));
  // A block of zeros stays zero for any divisor; 0 / 0 would be NaN.
  const float below = most == 0.0f ? 1.0f : most;
  u32 out[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) out[i] = nearest(table, x[i] / below);
  store_codes(codes, at, n, out);
  if (threadIdx.x % 32 == 0) absmax[block] = most;
}

// One block of threads per multiprocessor is enough for the compiler's bound of registers: with the default it spills.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    adamw_8bit(const float *p, const T *__restrict__ g, const u8 *m, const float *m_absmax, const u8 *v,
               const float *v_absmax, const float *__restrict__ scale, const float *__restrict__ hyper, float *p_new,
               u8 *m_new, float *m_absmax_new, u8 *v_new, float *v_absmax_new, long long n, float b1, float b2, float eps,
               float decay) {
  after_predecessors();
  const bool ok = is_ok(scale);
  const bool in_place = p == p_new && m == m_new && v == v_new && m_absmax == m_absmax_new && v_absmax == v_absmax_new;
  if (!ok && in_place) return;
  __shared__ Table first, second;
  build<true>(first);
  build<false>(second);
  const Factors f = factors(hyper, decay);
  const long long blocks = (n + BLOCK - 1) / BLOCK;
  const long long warp = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  for (int b = 0; b < BLOCKS_PER_WARP; b++) {
    const long long block = warp * BLOCKS_PER_WARP + b;
    if (block >= blocks) break;
    const long long at = block * BLOCK + threadIdx.x % 32 * EACH;
    u32 m_codes[EACH], v_codes[EACH];
    load_codes(m, at, n, m_codes);
    load_codes(v, at, n, v_codes);
    float ps[EACH], gs[EACH], ms[EACH], vs[EACH];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float p4[MANY], g4[MANY];
      load_some<0, MANY>(p, at + half * MANY, n, p4);
      load_some<TYPE, MANY>(g, at + half * MANY, n, g4);
#pragma unroll
      for (int i = 0; i < MANY; i++) ps[half * MANY + i] = p4[i], gs[half * MANY + i] = g4[i];
    }
    const float m_most = m_absmax[block], v_most = v_absmax[block];
    __syncwarp(); // All lanes have read the block's magnitudes, which lane 0 may overwrite.
    if (!ok) {
      store_codes(m_new, at, n, m_codes);
      store_codes(v_new, at, n, v_codes);
      if (threadIdx.x % 32 == 0) m_absmax_new[block] = m_most, v_absmax_new[block] = v_most;
    } else {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        ms[i] = m_most * first.values[m_codes[i]];
        vs[i] = v_most * second.values[v_codes[i]];
        adamw_element(scale[0] * gs[i], ps[i], ms[i], vs[i], f, b1, b2, eps);
      }
      quantize(first, ms, m_new, m_absmax_new, block, at, n);
      quantize(second, vs, v_new, v_absmax_new, block, at, n);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float p4[MANY];
#pragma unroll
      for (int i = 0; i < MANY; i++) p4[i] = ps[half * MANY + i];
      store_some<0, MANY>(p_new, at + half * MANY, n, p4);
    }
  }
}
PARAMETERS(adamw_8bit, 128, 124);
