// Matmul by mma.sync, for compute capability 8.0 and newer: y (R, N) = f(x (R, K) w (N, K)^T + b (N)) + r (R,
// N), row-major, with 16-bit elements (m16n8k16) or f32 rounded to TF32 (m16n8k8), of any width and alignment.
// It computes the forms that `wgmma.cu` does not support.
//
// Work: one block per tile of BM rows and BN rows of w; its ROW_WARPS x COLUMN_WARPS warps divide the tile.
// Sums are in registers, x and w in STAGES stages of shared memory, each with rows of 128 bytes of k.
//
// Copies: cp.async with one commit group per stage and STAGES - 1 groups in flight; rows of an odd number of 16-bit
// elements are copied synchronously. One __syncthreads per stage makes the stage visible to all warps and frees the
// previous one.
//
// Invariant: an element is summed over k in order, one instruction after another into one f32 accumulator, from
// whole stages that are zero-filled at the end of k; the bias is added in f32. With a residual, the sum is
// rounded to the element type before the residual is added, and the result is rounded again. The tile shape
// does not change the bits.
//
// With a gate, w has 2 N rows, and y = gelu(x w[..N]^T + b[..N]) (x w[N..]^T + b[N..]): the rows of w in a tile are
// ordered so that one thread has both factors.
//
// Constants: TYPE (0: f32 as TF32, 1: bf16, 2: f16), EPILOGUE (0: none, 1: GELU, 2: residual, 3: gate), BM rows
// and BN rows of w of a tile, ROW_WARPS, COLUMN_WARPS, STAGES, ALIGN: bytes to which every row of x and w is
// aligned (16, 4, 2), WIDE: if set, y and r are f32, and a residual is added to the unrounded sum.

#include "common.cuh"
#include "activation.cuh"

#if defined(WIDE)
typedef float Y;
__device__ __forceinline__ Y store_sum(float x) { return x; }
__device__ __forceinline__ float with_residual(float s, Y r) { return s + r; }
#else
typedef T Y;
__device__ __forceinline__ Y store_sum(float x) { return store(x); }
__device__ __forceinline__ float with_residual(float s, Y r) { return load(store(s)) + load(r); } // as in wgmma.cu
#endif

#define THREADS (32 * ROW_WARPS * COLUMN_WARPS)
#define WIDTH (TYPE == 0 ? 4 : 8)             // elements in 16 bytes
#define DEPTH (8 * WIDTH)                     // columns of k per stage: 128 bytes
#define WARP_ROWS (BM / ROW_WARPS)
#define WARP_COLUMNS (BN / COLUMN_WARPS)
#define MA (WARP_ROWS / 16)
#define NA (WARP_COLUMNS / 8)
#define YN (EPILOGUE == 3 ? BN / 2 : BN)      // columns of y of a tile
#define STAGE_BYTES ((BM + BN) * 128)
#define GROUP 8                               // rows of tiles computed over all columns before the next rows, to hit L2
static_assert(NA % 2 == 0, "two pieces of w are loaded at a time");

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
template <int BYTES> __device__ __forceinline__ void copy(u32 to, const void *from, bool valid) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void ldmatrix(u32 &a, u32 &b, u32 &c, u32 &d, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
}

#if TYPE == 0
#define MMA "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#elif TYPE == 1
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
__device__ __forceinline__ void mma_sync(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Rounds f32 to TF32 (10 bits of mantissa), to nearest, ties away from zero.
__device__ __forceinline__ u32 to_tf32(u32 x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(x)));
  return r;
}

// Returns the row of w for row `line` of a tile whose first column of y is `column`; n (with a gate 2 n) if it
// lies outside.
__device__ __forceinline__ int row_of_w(int column, int line, int n) {
  if (EPILOGUE != 3) return min(column + line, n);
  // The first half of a warp's rows are gates, the second half the values that they multiply, in equal order.
  const int in = line % WARP_COLUMNS, half = WARP_COLUMNS / 2, at = column + line / WARP_COLUMNS * half + in % half;
  return at < n ? at + (in < half ? 0 : n) : 2 * n;
}

// Copies LINES rows of DEPTH columns from k0 on to `to`; rows outside of the matrix and columns from k on
// become zeros. A row takes 128 bytes; its 16-byte words are swizzled by the row, so that the eight rows of an
// ldmatrix lie in different banks. `row` maps a line to the index of its first element, or to -1.
template <int LINES, typename Row>
__device__ __forceinline__ void fetch(unsigned char *to, const T *from, int k0, int k, Row row) {
  constexpr int BYTES = ALIGN < 4 ? 4 : ALIGN, MANY = BYTES / (int)sizeof(T), PER_ROW = 128 / BYTES;
  // Narrow copies are many; unrolled further, the addresses of their rows would take all registers.
#pragma unroll(ALIGN == 16 ? 8 : 4)
  for (int i = 0; i < (LINES * PER_ROW + THREADS - 1) / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, line = at / PER_ROW, word = at % PER_ROW;
    if (LINES * PER_ROW % THREADS != 0 && line >= LINES) break;
    const int column = k0 + word * MANY;
    const long long begin = row(line); // -1: outside of the matrix
    const bool valid = begin >= 0 && column < k;
    const int byte = word * BYTES;
    unsigned char *const address = to + line * 128 + ((byte / 16 ^ line % 8) * 16 + byte % 16);
    const T *const source = from + (valid ? begin + column : 0);
    if constexpr (ALIGN >= 4) {
      copy<BYTES>(shared_address(address), source, valid);
    } else {
      // Rows of an odd number of 16-bit elements: cp.async cannot copy 2 bytes, so that two elements are loaded
      // and stored.
      const u32 low = valid ? (u32)source[0] : 0, high = valid && column + 1 < k ? (u32)source[1] : 0;
      *(u32 *)address = low | high << 16;
    }
  }
}

// x: (R, K), w: (N, K) or with a gate (2 N, K), b: (N) or (2 N), or null, r, y: (R, N); r may be y. Grid: one
// block per tile. Dynamic shared memory: STAGES stages of x and w.
extern "C" __global__ void __launch_bounds__(THREADS)
mma(const T *__restrict__ x, const T *__restrict__ w, const T *__restrict__ b, const Y *r, Y *y, int rows, int n, int k) {
  after_predecessors();
  extern __shared__ __align__(1024) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_tiles = (rows + BM - 1) / BM, column_tiles = (n + YN - 1) / YN;
  const int group = blockIdx.x / (GROUP * column_tiles), first = group * GROUP, height = min(GROUP, row_tiles - first);
  const int inside = blockIdx.x - group * GROUP * column_tiles;
  const int row0 = (first + inside % height) * BM, column0 = inside / height * YN;
  const int blocks = (k + DEPTH - 1) / DEPTH, all = EPILOGUE == 3 ? 2 * n : n;

  auto fetch_stage = [&](int i) {
    unsigned char *const to = memory + i % STAGES * STAGE_BYTES;
    fetch<BM>(to, x, i * DEPTH, k, [&](int line) { return row0 + line < rows ? (long long)(row0 + line) * k : -1ll; });
    fetch<BN>(to + BM * 128, w, i * DEPTH, k, [&](int line) {
      const int at = row_of_w(column0, line, n);
      return at < all ? (long long)at * k : -1ll;
    });
  };
  float sums[MA][NA][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < blocks) fetch_stage(i);
    commit();
  }
  const int warp_row = warp / COLUMN_WARPS * WARP_ROWS, warp_column = warp % COLUMN_WARPS * WARP_COLUMNS;
  // The row that this lane addresses for ldmatrix.x4: 16 x 16 of x, or two pieces of 8 rows of w.
  const u32 a_line = warp_row + lane % 16, b_line = BM + warp_column + lane / 16 * 8 + lane % 8;
  for (int i = 0; i < blocks; i++) {
    wait<STAGES - 2>();
    __syncthreads(); // All threads see stage i and have read stage i - 1, which is overwritten next.
    if (i + STAGES - 1 < blocks) fetch_stage(i + STAGES - 1);
    commit();
    const u32 stage = shared_address(memory) + i % STAGES * STAGE_BYTES;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 a[MA][4], c[NA][2];
#pragma unroll
      for (int m = 0; m < MA; m++)
        ldmatrix(a[m][0], a[m][1], a[m][2], a[m][3], stage + (a_line + m * 16) * 128 + ((s * 2 + lane / 16) ^ a_line % 8) * 16);
#pragma unroll
      for (int j = 0; j < NA; j += 2)
        ldmatrix(c[j][0], c[j][1], c[j + 1][0], c[j + 1][1],
                 stage + (b_line + j * 8) * 128 + ((s * 2 + lane / 8 % 2) ^ b_line % 8) * 16);
#if TYPE == 0
#pragma unroll
      for (int m = 0; m < MA; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) a[m][e] = to_tf32(a[m][e]);
#pragma unroll
      for (int j = 0; j < NA; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) c[j][e] = to_tf32(c[j][e]);
#endif
#pragma unroll
      for (int m = 0; m < MA; m++)
#pragma unroll
        for (int j = 0; j < NA; j++) mma_sync(sums[m][j], a[m], c[j]);
    }
  }

  constexpr int OUT = EPILOGUE == 3 ? NA / 2 : NA; // pieces of 8 columns of y
  const bool pairs = n % 2 == 0; // two adjacent columns of y are then aligned for one store
#pragma unroll
  for (int j = 0; j < OUT; j++) {
    const int column = column0 + (EPILOGUE == 3 ? warp_column / 2 : warp_column) + j * 8 + lane % 4 * 2;
    float bias[2] = {0.0f, 0.0f}, value_bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (b && column + e < n) {
        bias[e] = load(b[column + e]);
        if (EPILOGUE == 3) value_bias[e] = load(b[n + column + e]);
      }
#pragma unroll
    for (int m = 0; m < MA; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = row0 + warp_row + m * 16 + h * 8 + lane / 4;
        if (row >= rows || column >= n) continue;
        const long long at = (long long)row * n + column;
        const bool second = column + 1 < n;
        float out[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          // With a gate, piece j + OUT has the value that the gate of piece j multiplies.
          float s = sums[m][j][h * 2 + e];
          s += bias[e];
          if (EPILOGUE == 2 && (e == 0 || second)) s = with_residual(s, r[at + e]);
          if (EPILOGUE == 1) s = x_phi(s);
          if (EPILOGUE == 3) s = x_phi(s) * (sums[m][(j + OUT) % NA][h * 2 + e] + value_bias[e]);
          out[e] = s;
        }
        if (pairs) {
#if TYPE == 0 || defined(WIDE)
          *(float2 *)(y + at) = make_float2(out[0], out[1]);
#else
          *(u32 *)(y + at) = pack<TYPE>(out[0], out[1]);
#endif
        } else {
          y[at] = store_sum(out[0]);
          if (second) y[at + 1] = store_sum(out[1]);
        }
      }
  }
}
PARAMETERS(mma, 56, 48);
