// Gradients of elementwise operations and gated linear units, accumulation of gradients, scaling, dropout, the gradient
// of a concatenation, and the gradient of softmax. One group of them per compilation (GRADIENT, COLUMNS, WIDTH,
// WHOLE_GROUPS, none of them).
//
// Invariant: a thread reads an element before it writes it, and a warp reads a row before it writes it, so that an
// output may be an input of the same shape.

#include "common.cuh"
#include "activation_grad.cuh"
#include "elementwise.cuh"
#include "packs.cuh"

#if defined(GRADIENT)

// Gradient accumulation: y = keep == 0 ? g : acc + g, in f32, rounded to TYPE, the element type of acc. g has the
// element type GRADIENT, y may be acc. With keep == 0 acc is not read: nobody has written it yet.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    accumulate(const T *acc, const void *__restrict__ g, const float *__restrict__ keep, T *y, long long n) {
  after_predecessors();
  constexpr int MANY = TYPE == 0 || GRADIENT == 0 ? 4 : 8;
  const auto *from = (const typename Element<GRADIENT>::type *)g;
  const long long first = first_element<MANY>();
  const bool kept = *keep != 0.0f;
  float u[STEPS][MANY], v[STEPS][MANY] = {};
#pragma unroll
  for (int s = 0; s < STEPS; s++) load_some<GRADIENT, MANY>(from, first + s * THREADS * MANY, n, u[s]);
  if (kept) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) load_some<TYPE, MANY>(acc, first + s * THREADS * MANY, n, v[s]);
  }
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    if (kept) {
#pragma unroll
      for (int i = 0; i < MANY; i++) u[s][i] += v[s][i];
    }
    store_some<TYPE, MANY>(y, first + s * THREADS * MANY, n, u[s]);
  }
}

#elif defined(COLUMNS)

// Gradient of a gated linear unit: dx[r, j] = dy f'(x[r, j]) x[r, COLUMNS + j], dx[r, COLUMNS + j] = dy f(x[r, j]),
// where f is SiLU with the constant SILU, else GELU. dy: (R, COLUMNS), x, dx: (R, 2 COLUMNS); dx may be x. A thread
// computes GLU_STEPS accesses of both halves; `accesses` is their number in all rows of dy.
#define GLU_STEPS 2
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    glu_grad(const T *__restrict__ dy, const T *x, T *dx, long long accesses) {
  after_predecessors();
  constexpr int WIDTH = COLUMNS % WIDE == 0 ? WIDE : 1;
  constexpr u32 PER_ROW = COLUMNS / WIDTH;
  const long long first = (long long)blockIdx.x * (GLU_STEPS * THREADS) + threadIdx.x;
  float gate[GLU_STEPS][WIDTH], value[GLU_STEPS][WIDTH], d[GLU_STEPS][WIDTH];
#pragma unroll
  for (int s = 0; s < GLU_STEPS; s++) {
    const u64 at = first + s * THREADS;
    if (at >= accesses) break;
    const T *from = x + (at / PER_ROW * (2ull * COLUMNS) + at % PER_ROW * WIDTH);
    load_many<TYPE, WIDTH>(from, gate[s]);
    load_many<TYPE, WIDTH>(from + COLUMNS, value[s]);
    load_many<TYPE, WIDTH>(dy + at * WIDTH, d[s]);
  }
#pragma unroll
  for (int s = 0; s < GLU_STEPS; s++) {
    const u64 at = first + s * THREADS;
    if (at >= accesses) break;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      float f, slope;
      if constexpr (SILU) silu_and_slope(gate[s][i], f, slope);
      else gelu_and_slope(gate[s][i], f, slope);
      gate[s][i] = d[s][i] * slope * value[s][i];
      value[s][i] = d[s][i] * f;
    }
    T *to = dx + (at / PER_ROW * (2ull * COLUMNS) + at % PER_ROW * WIDTH);
    store_many<TYPE, WIDTH>(to, gate[s]);
    store_many<TYPE, WIDTH>(to + COLUMNS, value[s]);
  }
}

#elif defined(WIDTH)

// Gradient of one input of a concatenation: dx (R, columns) = columns first .. first + columns of dy (R, total). One
// warp per row. `columns`, `first` and `total` are multiples of WIDTH, the elements of one access.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    concat_grad(const T *__restrict__ dy, T *__restrict__ dx, long long rows, int columns, int first, int total) {
  after_predecessors();
  const long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const T *from = dy + (row * total + first);
  T *to = dx + row * columns;
#pragma unroll 4
  for (int c = threadIdx.x % 32 * WIDTH; c < columns; c += 32 * WIDTH) {
    // Copied without conversion, so that the bits of NaNs are preserved.
    if constexpr (WIDTH == 1) to[c] = from[c];
    else *(uint4 *)(to + c) = *(const uint4 *)(from + c);
  }
}

#elif defined(WHOLE_GROUPS)

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3") of the counter (a, b,
// c, d) and the key (low, high).
__device__ __forceinline__ uint4 philox(u32 a, u32 b, u32 c, u32 d, u32 low, u32 high) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 x = (u64)a * 0xD2511F53u, y = (u64)c * 0xCD9E8D57u;
    a = (u32)(y >> 32) ^ b ^ low, b = (u32)y;
    c = (u32)(x >> 32) ^ d ^ high, d = (u32)x;
    low += 0x9E3779B9u, high += 0xBB67AE85u;
  }
  return make_uint4(a, b, c, d);
}

// Rows first .. end of a pack, and its global number.
struct PackOfRow {
  int first, end;
  u32 number;
};

// Finds the pack of a row by bisection over `count` packs, at least one: the last pack that begins at the row or before
// it, because packs without rows begin where the pack behind them begins.
__device__ __forceinline__ PackOfRow pack_of_row(const int *packs, int count, int word, int row) {
  int at = 0;
  for (int behind = count; behind - at > 1;) {
    const int middle = at + (behind - at) / 2;
    if (pack_at(packs, middle)[word] <= row) at = middle;
    else behind = middle;
  }
  const int *pack = pack_at(packs, at);
  return {pack[word], pack[word + 1], (u32)pack[PACK_NUMBER]};
}

// Dropout: y[r, c] = factor x[r, c] if word c % 4 of Philox4x32-10 (counter (c / 4, r - first row of the pack, stream,
// number of the pack), key `seed`) is at least `threshold`, else 0. x, y: (rows, columns), packs: (count, 6), of which
// `word` is the word of the first row.
//
// A thread has STEPS accesses of WIDE elements of the flat matrix, STRIDE elements apart. Only the row of its first
// element takes a division and a search: an access later it is `rows_on` rows and `columns_on` columns further, and
// mostly in the pack of before. With the constant WHOLE_GROUPS, the columns are a multiple of 4, so four elements from a
// multiple of 4 on share a row and a counter; else a counter is computed wherever c reaches a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    dropout(const T *x, const int *__restrict__ seed, const int *__restrict__ packs, T *y, u32 *status, int rows,
            int columns, int count, int word, u32 threshold, float factor, u32 stream) {
  after_predecessors();
  if (blockIdx.x == 0 && threadIdx.x < 32) check_packs(packs, count, word, rows, status);
  constexpr u32 STRIDE = THREADS * WIDE;
  const long long n = (long long)rows * columns, first = first_element<WIDE>();
  if (count == 0 || first >= n) return;
  const u32 low = seed[0], high = seed[1], width = columns;
  float v[STEPS][WIDE];
#pragma unroll
  for (int s = 0; s < STEPS; s++) load_some<TYPE, WIDE>(x, first + s * STRIDE, n, v[s]);
  const u32 rows_on = STRIDE / width, columns_on = STRIDE % width;
  u32 row = (u32)((u64)first / width), column = (u32)((u64)first % width);
  PackOfRow pack = pack_of_row(packs, count, word, row);
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const long long at = first + s * STRIDE;
    if (at >= n) break;
    u32 r = row, c = column;
    uint4 words;
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      if (WHOLE_GROUPS ? i % 4 == 0 : i == 0 || c % 4 == 0) {
        if ((int)r >= pack.end) pack = pack_of_row(packs, count, word, r);
        words = philox(c / 4, r - pack.first, stream, pack.number, low, high);
      }
      const u32 of = WHOLE_GROUPS ? i % 4 : c % 4;
      const u32 random = of == 0 ? words.x : of == 1 ? words.y : of == 2 ? words.z : words.w;
      v[s][i] = random >= threshold ? v[s][i] * factor : 0.0f;
      if (WHOLE_GROUPS && i % 4 != 3) continue;
      c += WHOLE_GROUPS ? 4 : 1;
      if (c == width) c = 0, r++;
    }
    store_some<TYPE, WIDE>(y, at, n, v[s]);
    row += rows_on, column += columns_on;
    if (column >= width) column -= width, row++;
  }
}
PARAMETERS(dropout, 72, 64);

#else

// dx = dy (Phi(x) + x phi(x)).
extern "C" __global__ void __launch_bounds__(THREADS, 2) gelu_grad(const T *dy, const T *x, T *dx, long long n) {
  after_predecessors();
  map_two(dy, x, dx, n, [](float d, float v) {
    float f, slope;
    gelu_and_slope(v, f, slope);
    return d * slope;
  });
}

// dx = dy where x > 0, else 0; also 0 where x is NaN.
extern "C" __global__ void __launch_bounds__(THREADS, 2) relu_grad(const T *dy, const T *x, T *dx, long long n) {
  after_predecessors();
  map_two(dy, x, dx, n, [](float d, float v) { return v > 0.0f ? d : 0.0f; });
}

// y = factor x.
extern "C" __global__ void __launch_bounds__(THREADS, 2) scale(const void *x, void *y, long long n, float factor) {
  after_predecessors();
  map<TYPE, TYPE, WIDE>(x, y, n, [factor](float v) { return factor * v; });
}

// Gradient of softmax: dx[r, c] = y[r, c] (dy[r, c] - sum_j dy[r, j] y[r, j]). dy, y, dx: (R, C). One warp per row; a
// lane has every 32nd column, adds them in order, and the lanes' sums are added by a butterfly.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    softmax_grad(const T *dy, const T *y, T *dx, long long rows, int columns) {
  after_predecessors();
  const long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  dy += row * columns, y += row * columns, dx += row * columns;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < columns; c += 32) sum = fmaf(load(dy[c]), load(y[c]), sum);
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
  for (int c = threadIdx.x % 32; c < columns; c += 32) dx[c] = store(load(y[c]) * (load(dy[c]) - sum));
}

#endif
