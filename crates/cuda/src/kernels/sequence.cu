// Operations on tokens, positions and sequences: embedding lookup, ESM's token dropout, row selection, means over
// sequences, and tables of rotary angles. One group of them per compilation (WIDTH with ROW, WIDTH, neither).
//
// Invariant: the bits of a row depend on its own token or sequence only; a sum over a sequence has an order
// that is counted from the sequence's first row. Ids, row numbers and spans are checked before they are used as
// indices; invalid ones set `status`, and their rows of the output are not written.

#include "common.cuh"
#include "sequence.cuh"

#if defined(WIDTH)

// Rows have `columns` elements, a multiple of WIDTH (the elements of one access); a warp processes one row.

#if defined(ROW)

typedef Element<ROW>::type R;

// x[t] = (table[id] + row) scale, by one warp; `row` may be null. Sets BAD_TOKEN if id is outside of the table.
__device__ __forceinline__ void embed_row(int id, const T *table, const R *row, T *x, u64 t, int vocabulary,
                                          int columns, float scale, u32 *status) {
  const int lane = threadIdx.x % 32;
  if (id < 0 || id >= vocabulary) {
    if (lane == 0) refuse(status, BAD_TOKEN);
    return;
  }
  const T *from = table + (u64)id * columns;
  T *to = x + t * columns;
#pragma unroll 4
  for (int c = lane * WIDTH; c < columns; c += 32 * WIDTH) {
    float e[WIDTH];
    load_many<TYPE, WIDTH>(from + c, e);
    if (row) {
      float r[WIDTH];
      load_many<ROW, WIDTH>(row + c, r);
#pragma unroll
      for (int i = 0; i < WIDTH; i++) e[i] += r[i];
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) e[i] *= scale;
    store_many<TYPE, WIDTH>(to + c, e);
  }
}

__device__ __forceinline__ void zero_row(T *x, u64 t, int columns) {
  float zero[WIDTH] = {};
  T *to = x + t * columns;
  for (int c = threadIdx.x % 32 * WIDTH; c < columns; c += 32 * WIDTH) store_many<TYPE, WIDTH>(to + c, zero);
}

// Embedding lookup: x[t] = table[ids[t]] + row. ids: (T), table: (V, columns), row: (1, columns) or null, x:
// (T, columns).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    embed(const int *__restrict__ ids, const T *__restrict__ table, const R *__restrict__ row, T *__restrict__ x,
          u32 *status, long long tokens, int vocabulary, int columns) {
  after_predecessors();
  const u64 t = (u64)blockIdx.x * WARPS + threadIdx.x / 32;
  if (t < tokens) embed_row(ids[t], table, row, x, t, vocabulary, columns, 1.0f, status);
}
PARAMETERS(embed, 56, 52);

// Embedding lookup with ESM's token dropout (fair-esm 2.0.0, esm2.py): rows of the token `mask` are zero, all
// other rows of a sequence are multiplied by keep / (1 - masked / length), in f32. Rows outside of all
// sequences are zero. spans: (S, 2), ascending. Grid: (S + 1, any); block (s, .) has sequence s and the rows
// between it and sequence s - 1, block (S, .) the rows behind the last sequence.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    embed_dropout(const int *__restrict__ ids, const T *__restrict__ table, const R *__restrict__ row,
                  const int *__restrict__ spans, T *__restrict__ x, u32 *status, long long tokens, int sequences,
                  int vocabulary, int columns, int mask, float keep) {
  after_predecessors();
  Span span;
  if (!read_span(spans, blockIdx.x, sequences, tokens, status, span)) return;
  // Every block of a sequence counts its masked tokens again, which needs no second kernel.
  const float scale = dropout_scale(ids, span, mask, keep);
  const u32 stride = gridDim.y * WARPS;
  for (u64 t = span.before + blockIdx.y * WARPS + threadIdx.x / 32; t < span.end; t += stride) {
    if (t < span.start || ids[t] == mask) zero_row(x, t, columns);
    else embed_row(ids[t], table, row, x, t, vocabulary, columns, scale, status);
  }
}
PARAMETERS(embed_dropout, 80, 72);

#else

// Row selection: y[i] = x[rows[i]]. x: (limit, columns), rows: (count), y: (count, columns). One warp per row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    select_rows(const T *__restrict__ x, const int *__restrict__ rows, T *__restrict__ y, u32 *status, long long count,
                long long limit, int columns) {
  after_predecessors();
  const u64 i = (u64)blockIdx.x * WARPS + threadIdx.x / 32;
  if (i >= count) return;
  const int lane = threadIdx.x % 32;
  const long long row = rows[i];
  if (row < 0 || row >= limit) {
    if (lane == 0) refuse(status, BAD_ROW);
    return;
  }
  const T *from = x + row * columns;
  T *to = y + i * columns;
#pragma unroll 4
  for (int c = lane * WIDTH; c < columns; c += 32 * WIDTH) {
    // Copied without conversion, so that the bits of NaNs are preserved.
    if constexpr (WIDTH == 1) to[c] = from[c];
    else *(uint4 *)(to + c) = *(const uint4 *)(from + c);
  }
}

// Mean over the rows of each sequence: y[s] = mean of x[start + skip_first .. end - skip_last], zero if the
// range is empty. x: (T, columns), spans: (S, 2), y: (S, columns) in f32. Block (s, j) has the columns from 32
// WIDTH j on; warp w sums rows w, w + 8, ... of the range in order, then the sums of the warps are added in
// order of w.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    segment_mean(const T *__restrict__ x, const int *__restrict__ spans, float *__restrict__ y, u32 *status,
                 long long tokens, int columns, long long skip_first, long long skip_last) {
  after_predecessors();
  const int s = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long start = spans[2 * s], end = spans[2 * s + 1];
  if (start < 0 || start > end || end > tokens) {
    if (threadIdx.x == 0) refuse(status, BAD_SPAN);
    return;
  }
  const long long first = start + skip_first, behind = end - skip_last;
  const int block = blockIdx.y * 32 * WIDTH, column = block + lane * WIDTH;
  float sum[WIDTH] = {};
  if (column < columns) {
#pragma unroll 4
    for (long long t = first + warp; t < behind; t += WARPS) {
      float v[WIDTH];
      load_many<TYPE, WIDTH>(x + t * columns + column, v);
#pragma unroll
      for (int i = 0; i < WIDTH; i++) sum[i] += v[i];
    }
  }
  __shared__ float sums[WARPS][32 * WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) sums[warp][lane * WIDTH + i] = sum[i];
  __syncthreads();
  const float count = behind > first ? (float)(behind - first) : 1.0f;
  const int c = threadIdx.x;
  if (c < 32 * WIDTH && block + c < columns) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums[w][c];
    y[(u64)s * columns + block + c] = total / count;
  }
}
PARAMETERS(segment_mean, 64, 56);

#endif

#else

// Tables of rotary angles: cos[p, j] = cos(p freq[j]), sin[p, j] = sin(p freq[j]). The angle is rounded to f32;
// its cosine and sine are computed in f64 (reduction by pi/2 in two parts, polynomials of fdlibm's __kernel_sin
// and __kernel_cos), since CUDA's f32 functions need local memory. freq: (half), cos, sin: (rows, half) in f32,
// or null.
extern "C" __global__ void __launch_bounds__(256)
    rotary_table(const T *__restrict__ freq, float *__restrict__ cos, float *__restrict__ sin, int rows, int half) {
  after_predecessors();
  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i >= (u64)rows * half) return;
  const double angle = (float)(i / half) * load(freq[i % half]);
  const double turns = rint(angle * 0.63661977236758134308);
  const double r = fma(-turns, 6.123233995736766e-17, fma(-turns, 1.5707963267948966, angle)), z = r * r;
  double s = 1.58969099521155010221e-10, c = -1.13596475577881948265e-11;
  s = fma(s, z, -2.50507602534068634195e-08), c = fma(c, z, 2.08757232129817482790e-09);
  s = fma(s, z, 2.75573137070700676789e-06), c = fma(c, z, -2.75573143513906633035e-07);
  s = fma(s, z, -1.98412698298579493134e-04), c = fma(c, z, 2.48015872894767294178e-05);
  s = fma(s, z, 8.33333333332248946124e-03), c = fma(c, z, -1.38888888888741095749e-03);
  s = fma(s, z, -1.66666666666666324348e-01), c = fma(c, z, 4.16666666666666019037e-02);
  s = fma(r * z, s, r), c = fma(z * z, c, fma(-0.5, z, 1.0));
  // The quadrant decides which polynomial is the cosine and which the sine, and their signs.
  const int quarter = (int)(long long)turns & 3;
  const double x = quarter & 1 ? s : c, y = quarter & 1 ? c : s;
  if (cos) cos[i] = (float)(quarter == 1 || quarter == 2 ? -x : x);
  if (sin) sin[i] = (float)(quarter >= 2 ? -y : y);
}

#endif
