// Rows of tokens to their experts and back (graph/src/ops/dispatch.rs): gathers and weighted sums.
//
// A warp has a row: every lane has WIDTH adjacent elements of each 32 WIDTH, by accesses of 16 bytes where rows are
// aligned to them (else WIDTH is 1). Nothing is scattered but the gradient of a gate, which one warp owns.
//
// Invariant: a sum over a token's choices is in their order, in f32, and dropped choices are not read. A dot product
// adds a lane's elements in order, then the lanes by a butterfly. Indices are checked before use.
//
// Constants: WIDTH, elements of an access, of which `columns` is a multiple; TOP_K, the choices of a token.

#include "common.cuh"
#include "rows.cuh"

#define WARPS 8

__device__ __forceinline__ u64 own_row() { return (u64)blockIdx.x * WARPS + threadIdx.x / 32; }

// Whether an index is below `choices`; reports it otherwise. Negative indices mean a dropped row.
__device__ __forceinline__ bool inside(int index, long long choices, u32 *status) {
  if (index < choices) return true;
  if (threadIdx.x % 32 == 0) refuse(status, BAD_ROW);
  return false;
}

__device__ __forceinline__ void zero_row(T *to, int columns) {
  const float zeros[WIDTH] = {};
  for (int c = threadIdx.x % 32 * WIDTH; c < columns; c += 32 * WIDTH) store_many<TYPE, WIDTH>(to + c, zeros);
}

// rows[r] = x[order[r] / k], zeros where order is negative. x: (T, columns), order: (choices), rows: (choices, columns).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dispatch(const T *__restrict__ x, const int *__restrict__ order, T *__restrict__ rows, u32 *status,
             long long choices, int columns) {
  after_predecessors();
  const u64 r = own_row();
  if (r >= choices) return;
  const int choice = order[r];
  if (!inside(choice, choices, status)) return;
  T *const to = rows + r * columns;
  if (choice < 0) return zero_row(to, columns);
  const T *const from = x + (long long)(choice / TOP_K) * columns;
#pragma unroll 4
  for (int c = threadIdx.x % 32 * WIDTH; c < columns; c += 32 * WIDTH) {
    // Copied without conversion, so that the bits of NaNs are preserved.
    if constexpr (WIDTH == 1) to[c] = from[c];
    else *(uint4 *)(to + c) = *(const uint4 *)(from + c);
  }
}

// y[t] = sum_j rows[places[t k + j]], each term times its gate if there are gates.
template <bool GATED>
__device__ __forceinline__ void collect(const T *rows, const float *gates, const int *places, T *y, u32 *status,
                                        long long tokens, int columns) {
  const u64 t = own_row();
  if (t >= tokens) return;
  const int *const mine = places + t * TOP_K;
  bool valid = true;
  for (int j = threadIdx.x % 32; j < TOP_K; j += 32) valid = valid && mine[j] < tokens * TOP_K;
  if (!__all_sync(~0u, valid)) {
    if (threadIdx.x % 32 == 0) refuse(status, BAD_ROW);
    return;
  }
  for (int c = threadIdx.x % 32 * WIDTH; c < columns; c += 32 * WIDTH) {
    float sum[WIDTH] = {};
    // The loads of several choices are in flight together; the sum stays in order.
#pragma unroll(TOP_K < 8 ? TOP_K : 8)
    for (int j = 0; j < TOP_K; j++) {
      const int place = mine[j];
      if (place < 0) continue;
      float term[WIDTH];
      load_many<TYPE, WIDTH>(rows + (long long)place * columns + c, term);
#pragma unroll
      for (int i = 0; i < WIDTH; i++) sum[i] = GATED ? fmaf(gates[t * TOP_K + j], term[i], sum[i]) : sum[i] + term[i];
    }
    store_many<TYPE, WIDTH>(y + t * columns + c, sum);
  }
}

// Gradient of dispatch. drows: (k T, columns), places: (k T), dx: (T, columns).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dispatch_grad(const T *__restrict__ drows, const int *__restrict__ places, T *__restrict__ dx, u32 *status,
                  long long tokens, int columns) {
  after_predecessors();
  collect<false>(drows, nullptr, places, dx, status, tokens, columns);
}

// Weighted sum of the experts' rows: (k T, columns). gates: (T, k), places: (k T), y: (T, columns).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    combine(const T *__restrict__ rows, const float *__restrict__ gates, const int *__restrict__ places,
            T *__restrict__ y, u32 *status, long long tokens, int columns) {
  after_predecessors();
  collect<true>(rows, gates, places, y, status, tokens, columns);
}
PARAMETERS(combine, 56, 48);

// Gradient of combine: drows[r] = gates[order[r]] dy[order[r] / k], dgates[order[r]] = dy[order[r] / k] . rows[r]; zeros
// where order is negative and where places is negative. dy: (T, columns), rows, drows: (choices, columns), gates,
// dgates, order, places: (choices); drows, dgates or null. drows may be rows: a lane reads its elements of a row before
// it writes them, and no other warp reads this row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    combine_grad(const T *__restrict__ dy, const T *rows, const float *__restrict__ gates,
                 const int *__restrict__ order, const int *__restrict__ places, T *drows, float *dgates, u32 *status,
                 long long choices, int columns) {
  after_predecessors();
  const u64 r = own_row();
  if (r >= choices) return;
  const int lane = threadIdx.x % 32, choice = order[r];
  // The gradient of a kept gate is written by the warp of its row, that of a dropped one by the warp of its choice.
  if (dgates && lane == 0 && places[r] < 0) dgates[r] = 0.0f;
  if (!inside(choice, choices, status)) return;
  T *const to = drows ? drows + r * columns : nullptr;
  if (choice < 0) {
    if (to) zero_row(to, columns);
    return;
  }
  const T *const from = dy + (long long)(choice / TOP_K) * columns, *const row = rows + r * columns;
  const float gate = gates[choice];
  float dot = 0.0f;
#pragma unroll 2
  for (int c = lane * WIDTH; c < columns; c += 32 * WIDTH) {
    float d[WIDTH], v[WIDTH];
    load_many<TYPE, WIDTH>(from + c, d);
    if (dgates) {
      load_many<TYPE, WIDTH>(row + c, v);
#pragma unroll
      for (int i = 0; i < WIDTH; i++) dot = fmaf(d[i], v[i], dot);
    }
    if (to) {
#pragma unroll
      for (int i = 0; i < WIDTH; i++) d[i] *= gate;
      store_many<TYPE, WIDTH>(to + c, d);
    }
  }
  dot = warp_sum(dot);
  if (dgates && lane == 0) dgates[choice] = dot;
}
PARAMETERS(combine_grad, 80, 72);
