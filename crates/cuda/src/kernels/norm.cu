// Norms and softmax. Invariant: a row is read whole before it is written, so y may be x. rows.cuh has what several
// files share.

#if defined(COLUMNS)

typedef typename Element<PARAM>::type P;
// Whether gamma and beta stay in registers for all rows of a group, beside the next row.
constexpr bool KEPT = GROUP <= 512 && VECTORS * WIDTH <= 24;

// Per row (Ba, Kiros and Hinton 2016): mean = sum x / D; rstd = 1 / sqrt(sum (x - mean)^2 / D + eps); y = (x -
// mean) rstd gamma + beta. x, y: (R, COLUMNS), gamma, beta: (COLUMNS) of type PARAM, means, rstds: (R) or null.
// A group does `each` neighbouring rows. With CODES y goes to codes (R, STRIDE) and scales (R) too, and y may be null.
extern "C" __global__ void __launch_bounds__(BLOCK)
    layer_norm(const T *x, const P *__restrict__ gamma, const P *__restrict__ beta, T *y, float *means,
               float *rstds, long long rows, int each, float eps
#if defined(CODES)
               , u8 *codes, float *scales
#endif
    ) {
  after_predecessors();
  const int lane = threadIdx.x % GROUP;
  const long long first = ((long long)blockIdx.x * (BLOCK / GROUP) + threadIdx.x / GROUP) * each;
  Raw raw[1][VECTORS], next[VECTORS];
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
      for (int v = 0; v < VECTORS; v++) raw[0][v] = next[v];
      if (i + 1 < each) load_raw(x, row + 1, rows, lane, next);
    } else {
      load_raw(x, row, rows, lane, raw[0]);
    }
    float f[VECTORS][WIDTH], mean[1], rstd[1];
    statistics(raw, lane, eps, mean, rstd);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = v * GROUP + lane;
      if (at >= ACCESSES) continue;
      if constexpr (!KEPT) {
        load_many<PARAM, WIDTH>(gamma + at * WIDTH, g[0]);
        load_many<PARAM, WIDTH>(beta + at * WIDTH, b[0]);
      }
      widen_raw(raw[0][v], f[v]);
#pragma unroll
      for (int k = 0; k < WIDTH; k++)
        f[v][k] = fmaf((f[v][k] - mean[0]) * rstd[0], g[KEPT ? v : 0][k], b[KEPT ? v : 0][k]);
      if (row < rows && y) store_many<TYPE, WIDTH>(y + row * COLUMNS + at * WIDTH, f[v]);
    }
    if (row < rows && lane == 0 && means) means[row] = mean[0];
    if (row < rows && lane == 0 && rstds) rstds[row] = rstd[0];
#if defined(CODES)
    write_codes(f, row, rows, lane, codes, scales);
#endif
  }
}

#elif defined(PARAM)

typedef Element<PARAM>::type P;

// y = (x - mean) / sqrt(var + eps) gamma + beta (Ioffe and Szegedy 2015, at inference). x, y: (R, C), the
// others: (C) of type PARAM. One block a row.
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

#else

// y[r, c] = exp(x[r, c] - max) / sum exp(x[r, c] - max). x, y: (R, C). One warp a row, four rows a block; a
// lane has every 32nd column.
extern "C" __global__ void __launch_bounds__(128) softmax(const T *x, T *y, long long rows, int columns) {
  after_predecessors();
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
