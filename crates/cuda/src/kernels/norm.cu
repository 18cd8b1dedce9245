// Norms and softmax. Invariant: the order of a row's sums depends on the number of its columns only; a row is
// read whole before it is written, so y may be x.

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  // A butterfly: every lane adds the same pairs, so all end with the same bits.
  for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, lane);
  return x;
}

#if defined(COLUMNS)

// GROUP threads have a row in registers, VECTORS accesses of WIDTH elements each; a block is as many whole
// groups as 128 threads hold, or one.
constexpr int BLOCK = GROUP < 128 ? 128 / GROUP * GROUP : GROUP;
constexpr int WIDTH = COLUMNS * (int)sizeof(T) % 16 == 0 ? 16 / (int)sizeof(T) : 1;
constexpr int ACCESSES = COLUMNS / WIDTH;
constexpr int VECTORS = (ACCESSES + GROUP - 1) / GROUP;
// Whether gamma and beta stay in registers for all rows of a group, beside the next row.
constexpr bool KEPT = GROUP <= 512 && VECTORS * WIDTH <= 24;

template <int W> struct Chunk { typedef uint4 type; };
template <> struct Chunk<1> { typedef T type; };
typedef Chunk<WIDTH>::type Raw;
typedef typename Element<PARAM>::type P;

__device__ __forceinline__ void widen_raw(const Raw &raw, float (&x)[WIDTH]) {
  load_many<TYPE, WIDTH>((const T *)&raw, x);
}

// The sum of x over the group; `buffer` alternates, so that one barrier is enough.
__device__ __forceinline__ float group_sum(float x, int buffer) {
  x = warp_sum(x);
  if constexpr (GROUP > 32) {
    __shared__ float sums[2][BLOCK / 32];
    if (threadIdx.x % 32 == 0) sums[buffer][threadIdx.x / 32] = x;
    __syncthreads();
    const float *mine = sums[buffer] + threadIdx.x / GROUP * (GROUP / 32);
    x = 0.0f;
#pragma unroll
    for (int w = 0; w < GROUP / 32; w++) x += mine[w];
  }
  return x;
}

__device__ __forceinline__ void load_raw(const T *x, long long row, long long rows, int lane,
                                         Raw (&raw)[VECTORS]) {
  const T *from = x + row * COLUMNS;
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = v * GROUP + lane;
    if (row < rows && at < ACCESSES) raw[v] = *(const Raw *)(from + at * WIDTH);
  }
}

// Per row (Ba, Kiros and Hinton 2016): mean = sum x / D; rstd = 1 / sqrt(sum (x - mean)^2 / D + eps); y = (x -
// mean) rstd gamma + beta. x, y: (R, COLUMNS), gamma, beta: (COLUMNS) of type PARAM, means, rstds: (R) or null.
// A group does `each` neighbouring rows.
extern "C" __global__ void __launch_bounds__(BLOCK)
    layer_norm(const T *x, const P *__restrict__ gamma, const P *__restrict__ beta, T *y, float *means,
               float *rstds, long long rows, int each, float eps) {
  const int lane = threadIdx.x % GROUP;
  const long long first = ((long long)blockIdx.x * (BLOCK / GROUP) + threadIdx.x / GROUP) * each;
  Raw raw[VECTORS], next[VECTORS];
  if constexpr (KEPT) load_raw(x, first, rows, lane, next);
  float g[KEPT ? VECTORS : 1][WIDTH], b[KEPT ? VECTORS : 1][WIDTH];
  if constexpr (KEPT) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = v * GROUP + lane;
      if (at >= ACCESSES) continue;
      load_many<PARAM, WIDTH>(gamma + at * WIDTH, g[v]);
      load_many<PARAM, WIDTH>(beta + at * WIDTH, b[v]);
    }
  }
  // The number of rounds is the same for all groups of a block: they meet at barriers.
  for (int i = 0; i < each; i++) {
    const long long row = first + i;
    if constexpr (KEPT) {
#pragma unroll
      for (int v = 0; v < VECTORS; v++) raw[v] = next[v];
      if (i + 1 < each) load_raw(x, row + 1, rows, lane, next);
    } else {
      load_raw(x, row, rows, lane, raw);
    }
    float sum = 0.0f, squares = 0.0f, f[VECTORS][WIDTH];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (v * GROUP + lane >= ACCESSES) continue;
      widen_raw(raw[v], f[v]);
#pragma unroll
      for (int k = 0; k < WIDTH; k++) sum += f[v][k];
    }
    const float mean = group_sum(sum, 0) / (float)COLUMNS;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (v * GROUP + lane >= ACCESSES) continue;
#pragma unroll
      for (int k = 0; k < WIDTH; k++) {
        f[v][k] -= mean;
        squares = fmaf(f[v][k], f[v][k], squares);
      }
    }
    const float rstd = 1.0f / sqrtf(group_sum(squares, 1) / (float)COLUMNS + eps);
    if (row < rows) {
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const int at = v * GROUP + lane;
        if (at >= ACCESSES) continue;
        if constexpr (!KEPT) {
          load_many<PARAM, WIDTH>(gamma + at * WIDTH, g[0]);
          load_many<PARAM, WIDTH>(beta + at * WIDTH, b[0]);
        }
#pragma unroll
        for (int k = 0; k < WIDTH; k++) f[v][k] = fmaf(f[v][k] * rstd, g[KEPT ? v : 0][k], b[KEPT ? v : 0][k]);
        store_many<TYPE, WIDTH>(y + row * COLUMNS + at * WIDTH, f[v]);
      }
      if (lane == 0 && means) means[row] = mean;
      if (lane == 0 && rstds) rstds[row] = rstd;
    }
  }
}

#elif defined(PARAM)

typedef Element<PARAM>::type P;

// y = (x - mean) / sqrt(var + eps) gamma + beta (Ioffe and Szegedy 2015, at inference). x, y: (R, C), the
// others: (C) of type PARAM. One block a row.
extern "C" __global__ void __launch_bounds__(256)
    batch_norm(const T *x, const P *__restrict__ gamma, const P *__restrict__ beta, const P *__restrict__ mean,
               const P *__restrict__ var, T *y, int columns, float eps) {
  const u64 row = (u64)blockIdx.x * columns;
  for (int c = threadIdx.x; c < columns; c += 256) {
    const float centred = load(x[row + c]) - widen<PARAM>(mean[c]);
    const float scaled = centred / sqrtf(widen<PARAM>(var[c]) + eps);
    y[row + c] = store(fmaf(scaled, widen<PARAM>(gamma[c]), widen<PARAM>(beta[c])));
  }
}

#else

// y[r, c] = exp(x[r, c] - max) / sum exp(x[r, c] - max). x, y: (R, C). One warp a row, four rows a block; a
// lane has every 32nd column.
extern "C" __global__ void __launch_bounds__(128) softmax(const T *x, T *y, long long rows, int columns) {
  const int lane = threadIdx.x % 32;
  const long long row = (long long)blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= rows) return;
  const T *from = x + row * columns;
  T *to = y + row * columns;
  float most = __int_as_float(0xFF800000), sum = 0.0f;
  for (int c = lane; c < columns; c += 32) most = fmaxf(most, load(from[c]));
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, other));
  for (int c = lane; c < columns; c += 32) sum += expf(load(from[c]) - most);
  sum = warp_sum(sum);
  for (int c = lane; c < columns; c += 32) to[c] = store(expf(load(from[c]) - most) / sum);
}

#endif
