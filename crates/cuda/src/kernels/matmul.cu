// Reference matmul without tensor cores, the generators of operands for timing and for comparing algorithms,
// and the digest by which results are compared.
//
// Matmul: a block computes a tile of 64 x 64 of y, a thread 4 x 4 of it, with 16 columns of k at a time in
// shared memory, loaded synchronously.
//
// Invariant: one thread sums an element with fused multiply-adds over k in order, then adds the residual, then
// the bias.

#include "common.cuh"
#include "activation.cuh"

#define TILE 64   // rows of x and rows of w per block
#define DEPTH 16  // columns of k per iteration
#define PER_THREAD 4    // rows and columns of y per thread
#define THREADS 256

#if defined(QUANTIZED)
typedef u8 X;

__device__ __forceinline__ float widen_operand(u8 x) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)x));
  return f16_to_float((u16)pair);
}
#else
typedef T X;

__device__ __forceinline__ float widen_operand(T x) { return load(x); }
#endif

// y (R, N) = x (R, K) w (N, K)^T + b (N) + r (R, N); b and r may be null, r may be y. With QUANTIZED, x and w are
// e4m3 with scales `x_scales` (R) and `w_scales` (N), and b, r and y have type TYPE. With GATE, w has 2 N rows
// (below). Grid: (tiles of R, tiles of N). Threads: 256, 16 along rows by 16 along columns.
extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const X *__restrict__ x, const X *__restrict__ w, const float *__restrict__ x_scales,
        const float *__restrict__ w_scales, const T *__restrict__ b, const T *r, T *y, long long rows, int n, int k) {
  after_predecessors();
  // Rows have four elements of padding: float4 reads stay aligned, and writes are spread over banks.
  __shared__ __align__(16) float xs[DEPTH][TILE + 4];
  __shared__ __align__(16) float ws[DEPTH][TILE + 4];
  const long long row0 = (long long)blockIdx.x * TILE;
  const int column0 = blockIdx.y * TILE;
  const int lane_row = threadIdx.x / 16 * PER_THREAD, lane_column = threadIdx.x % 16 * PER_THREAD;
  float sums[PER_THREAD][PER_THREAD] = {};
#if defined(GATE)
  // w (2 N, K), b (2 N): y = gelu(x w[..N]^T + b[..N]) (x w[N..]^T + b[N..]).
  __shared__ __align__(16) float vs[DEPTH][TILE + 4];
  float values[PER_THREAD][PER_THREAD] = {};
#endif
  for (int k0 = 0; k0 < k; k0 += DEPTH) {
    // Elements outside of the matrices are zeros, which change no sum.
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
      const int at = i * THREADS + threadIdx.x, line = at / DEPTH, depth = at % DEPTH;
      const bool inside = k0 + depth < k;
      const long long row = row0 + line;
      const int column = column0 + line;
      xs[depth][line] = inside && row < rows ? widen_operand(x[row * k + k0 + depth]) : 0.0f;
      ws[depth][line] = inside && column < n ? widen_operand(w[(long long)column * k + k0 + depth]) : 0.0f;
#if defined(GATE)
      vs[depth][line] = inside && column < n ? widen_operand(w[(long long)(n + column) * k + k0 + depth]) : 0.0f;
#endif
    }
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth++) {
      const float4 a = *(const float4 *)&xs[depth][lane_row];
      const float4 c = *(const float4 *)&ws[depth][lane_column];
      const float as[PER_THREAD] = {a.x, a.y, a.z, a.w}, cs[PER_THREAD] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
          sums[i][j] = fmaf(as[i], cs[j], sums[i][j]);
#if defined(GATE)
          values[i][j] = fmaf(as[i], vs[depth][lane_column + j], values[i][j]);
#endif
        }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
      const long long row = row0 + lane_row + i;
      const int column = column0 + lane_column + j;
      if (row < rows && column < n) {
        float s = sums[i][j];
#if defined(QUANTIZED)
        s *= x_scales[row] * w_scales[column];
#endif
        if (r) s += load(r[row * n + column]); // before the bias, the order of cuBLASLt
        if (b) s += load(b[column]);
#if defined(GATE)
        s = x_phi(s) * (b ? values[i][j] + load(b[n + column]) : values[i][j]);
#endif
        y[row * n + column] = store(s);
      }
    }
}
PARAMETERS(matmul, 72, 68);

// Fills out (count) with pseudo-random numbers in [-1, 1), with QUANTIZED times 448 as e4m3, which depend only on
// their index and the seed. Grid: any number of blocks (grid-stride loop).
extern "C" __global__ void __launch_bounds__(THREADS) noise(X *out, long long count, int seed) {
  after_predecessors();
  const long long stride = (long long)gridDim.x * THREADS;
  for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += stride) {
    // The finaliser of MurmurHash3 (Appleby 2011).
    u32 h = (u32)i * 2654435761u ^ (u32)(i >> 32) ^ (u32)seed * 0x9e3779b9u;
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
    const float number = (float)(h >> 8) * 0x1p-23f - 1.0f;
#if defined(QUANTIZED)
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(pair) : "f"(448.0f * number));
    out[i] = (u8)pair;
#else
    out[i] = store(number);
#endif
  }
}

// Fills out (count), with rows of `columns`, with operands that reveal a different order of sums. They depend
// only on their index, the seed and the role (0: x, 1: w, 2: bias and residual, 3: w stored as (K, N), the transpose of
// role 1). seed mod 4 selects the distribution:
// - 0: numbers in [-1, 1).
// - 1: numbers with exponents from -8 to 3; some rows of x are zeros.
// - 2, 3: as 1, with x and w in pairs along k whose products cancel exactly, so that a sum consists of
//   rounding errors only, which rounding to the element type of y cannot hide. The second half of k mirrors the
//   first (2) or repeats it (3). Bias and residual are then of the magnitude of these errors.
//
// Grid: any number of blocks (grid-stride loop).
extern "C" __global__ void __launch_bounds__(THREADS) order_probe(X *out, long long count, int columns, int seed, int role) {
  after_predecessors();
  const long long stride = (long long)gridDim.x * THREADS;
  const bool by_k = role == 3;
  // Columns of the matrix as if it were stored by rows.
  const int length = by_k ? (int)(count / columns) : columns;
  if (by_k) role = 1;
  const int mode = seed & 3, half = length / 2;
  for (long long out_at = (long long)blockIdx.x * THREADS + threadIdx.x; out_at < count; out_at += stride) {
    const long long i = by_k ? out_at % columns * length + out_at / columns : out_at;
    const int column = (int)(i % length);
    bool negative = false;
    long long at = i;
    if (role < 2 && mode >= 2 && column >= length - half) {
      at = i - column + (mode == 2 ? length - 1 - column : column - (length - half));
      negative = role == 1;
    }
    // The finaliser of MurmurHash3's 64-bit form (Appleby 2011).
    u64 h = (u64)at * 0x9e3779b97f4a7c15ull + (u64)(seed * 3 + role) * 0xd1342543de82ef95ull;
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdull;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ull;
    h ^= h >> 33;
    float number = (float)(u32)(h >> 41) * 0x1p-22f - 1.0f;
    if (mode > 0) {
      const int exponent = (int)((h >> 8) % 12) - 8 - (role == 2 && mode >= 2 ? 6 + 4 * mode : 0);
      // All 23 bits of the mantissa are random; the sign is a bit of the hash that is used nowhere else.
      number = __uint_as_float((u32)(exponent + 127) << 23 | (u32)(h >> 41));
      if (h & 1) number = -number;
    }
    if (negative) number = -number;
    // Some rows of x are zeros, which tests the sign of a sum of zeros.
    if (mode == 1 && role == 0 && i / length % 64 == 5) number = 0.0f;
#if defined(QUANTIZED)
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(pair) : "f"(mode == 0 ? 448.0f * number : 8.0f * number));
    out[out_at] = (u8)pair;
#else
    out[out_at] = store(number);
#endif
  }
}

// Adds to *sum a 64-bit hash of the bits and the index of each of y's `count` elements. Equal matrices have
// equal sums, whatever the order of the additions; different matrices have equal sums with a probability of
// about 2^-64. Grid: any number of blocks (grid-stride loop).
extern "C" __global__ void __launch_bounds__(THREADS) digest(const T *y, long long count, u64 *sum) {
  after_predecessors();
  const long long stride = (long long)gridDim.x * THREADS;
  u64 partial = 0;
  for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += stride) {
#if TYPE == 0
    const u64 bits = __float_as_uint(y[i]);
#else
    const u64 bits = y[i];
#endif
    u64 h = (bits + 1) * 0x9e3779b97f4a7c15ull ^ (u64)i * 0xd1342543de82ef95ull;
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdull;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ull;
    partial += h ^ h >> 33;
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) partial += __shfl_xor_sync(~0u, partial, lane);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, partial);
}
