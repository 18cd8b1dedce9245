// Matmuls of all experts in one launch, over rows sorted by expert, and their gradients (graph/src/ops/grouped_linear.rs).
// Expert e has the rows offsets[e] .. offsets[e + 1]; the offsets are in device memory, and the host never reads them.
//
// FORM 0: y (R, N) = x (R, K) W_e^T + b_e, with w: (E N, K).
// FORM 1: dx (R, K) = dy (R, N) W_e.
// FORM 2: dW (E N, K): dW_e = dy_e^T x_e, the sum over the rows of expert e.
// `column_sums`: db (E N): db_e = sum of dy over the rows of expert e.
//
// Work: one block per tile of the output. In forms 0 and 1 a tile has rows of one expert only; a block finds expert and
// rows from its number and the offsets (`group_of`). The rows behind the last offset are a group of their own, of which
// nothing is read and zeros are written. In form 2 a block has a tile of dW_e and all rows of the expert.
//
// Invariant: one accumulator sums an element over all its terms in order, counted from the expert's first row in form 2,
// so the bits of a row of y and dx depend on this row and its expert only. Rows and columns outside of an expert's
// operands are zero-filled in shared memory, never multiplied.
//
// Three groups of constants, one per compilation. `grouped_mma` (BM, BN, ROW_WARPS, COLUMN_WARPS, STAGES): 16-bit
// elements, N and K multiples of 8. `grouped` (FORM only): any type and width, by fused multiply-adds. `column_sums`
// (WIDTH: elements of an access).

#include "common.cuh"

#if defined(WIDTH)

#define WARPS 8

// db[e N + c] = sum of dy[r, c] over the rows r of expert e. dy: (R, N), offsets: (E + 1), db: (E N). Block (e, j) has the
// columns from 32 WIDTH j on; warp w sums rows w, w + 8, ... of the expert in order, then the warps are added in order.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    column_sums(const T *__restrict__ dy, const int *__restrict__ offsets, T *__restrict__ db, u32 *status, int rows, int n) {
  after_predecessors();
  __shared__ float sums[WARPS][32 * WIDTH];
  const int e = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int start = offsets[e], end = offsets[e + 1], first = blockIdx.y * 32 * WIDTH, column = first + lane * WIDTH;
  if (start < 0 || start > end || end > rows) {
    if (threadIdx.x == 0) refuse(status, BAD_ROW);
    return;
  }
  float sum[WIDTH] = {};
  if (column < n) {
#pragma unroll 4
    for (int r = start + warp; r < end; r += WARPS) {
      float d[WIDTH];
      load_many<TYPE, WIDTH>(dy + (long long)r * n + column, d);
#pragma unroll
      for (int i = 0; i < WIDTH; i++) sum[i] += d[i];
    }
  }
#pragma unroll
  for (int i = 0; i < WIDTH; i++) sums[warp][lane * WIDTH + i] = sum[i];
  __syncthreads();
  const int c = threadIdx.x;
  if (c >= 32 * WIDTH || first + c >= n) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) total += sums[w][c];
  db[(long long)e * n + first + c] = store(total);
}

#else

// A group of rows: those of an expert, or with expert = E those behind the last offset; and the first row of a tile.
struct Group {
  int expert, start, end, first;
};

// Returns the tile of `height` rows with a given number, as `block_of` of attention.cuh finds a sequence: group g owns
// the numbers from start(g) / height + g on, so that the host launches rows / height + E + 1 numbers without reading
// the offsets. Tiles of unused numbers begin at or behind the end of their group, or before its start; callers skip
// both. All 32 lanes of a warp must call it. Offsets of any value are searched without reading outside of them.
__device__ __forceinline__ Group group_of(const int *offsets, int experts, int rows, int height, int number) {
  int low = 0, count = experts + 1, lane = threadIdx.x % 32;
  while (count > 1) {
    const int part = (count + 31) / 32, at = lane * part;
    const bool below = at < count && offsets[low + at] / height + low + at <= number;
    const int last = __popc(__ballot_sync(~0u, below)) - 1;
    if (last < 0) return {experts, 0, 0, 0};
    low += last * part;
    count = min(part, count - last * part);
  }
  const int start = offsets[low], end = low < experts ? offsets[low + 1] : rows;
  return {low, start, end, start + (number - start / height - low) * height};
}

// Reports offsets that do not ascend from 0 to at most `rows`. Called by one block of a launch.
__device__ __forceinline__ void check_offsets(const int *offsets, int experts, int rows, u32 *status) {
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
    const int before = e > 0 ? offsets[e - 1] : 0, offset = offsets[e];
    if (offset < before || offset > rows || (e == 0 && offset != 0)) refuse(status, BAD_ROW);
  }
}

// The work of a block: its expert, the rows of its group, and the first row and column of its tile; in form 2 the first
// row is one of dW_e. `valid` is false for blocks without work.
struct Tile {
  int expert, start, end, row, column;
  bool valid;
};

#define GROUP 8 // rows of tiles computed over all columns before the next rows, to hit L2

template <int HEIGHT, int BREADTH>
__device__ __forceinline__ Tile tile_of(const int *offsets, int experts, int rows, int n, int k) {
  const int columns = FORM == 0 ? n : k, across = (columns + BREADTH - 1) / BREADTH;
  const int down = FORM == 2 ? (n + HEIGHT - 1) / HEIGHT : rows / HEIGHT + experts + 1;
  int number = blockIdx.x, expert = 0;
  if (FORM == 2) expert = number / (down * across), number -= expert * down * across;
  const int group = number / (GROUP * across), first = group * GROUP, height = min(GROUP, down - first);
  const int inside = number - group * GROUP * across, row = first + inside % height, column = inside / height * BREADTH;
  if (FORM == 2) {
    const int start = offsets[expert], end = offsets[expert + 1];
    return {expert, start, end, row * HEIGHT, column, 0 <= start && start <= end && end <= rows};
  }
  const Group of = group_of(offsets, experts, rows, HEIGHT, row);
  const bool valid = 0 <= of.start && of.start <= of.first && of.first < of.end && of.end <= rows;
  return {of.expert, of.start, of.end, of.first, column, valid};
}

#if defined(BM)

// The tile is divided among ROW_WARPS x COLUMN_WARPS warps; sums are in registers. A stage of shared memory has DEPTH
// terms of both operands, loaded by cp.async with one commit group per stage, as in mma.cu.
//
// Operands whose terms are adjacent in memory (x and W_e in form 0, dy in form 1) lie in shared memory as rows of 128
// bytes of terms, one per row of the tile. The others (W_e in form 1, both operands in form 2) lie there as they are in
// memory, a row per term, in panels of 64 columns (128 bytes), and are transposed by ldmatrix.trans on their way to the
// registers. In both, the 16-byte words of a row are swizzled by the row, so that the eight rows of an ldmatrix lie in
// different banks.

#define THREADS (32 * ROW_WARPS * COLUMN_WARPS)
#define DEPTH 64 // terms per stage
#define WARP_ROWS (BM / ROW_WARPS)
#define WARP_COLUMNS (BN / COLUMN_WARPS)
#define MA (WARP_ROWS / 16)
#define NA (WARP_COLUMNS / 8)
#define PANEL (DEPTH * 128) // bytes of 64 columns of a transposed operand
#define STAGE_BYTES ((BM + BN) * 128)
static_assert(TYPE != 0, "16-bit elements");
static_assert(NA % 2 == 0, "two pieces of the second operand are loaded at a time");
static_assert(BM % 64 == 0 && BN % 64 == 0, "whole panels");

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy(u32 to, const void *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
template <bool TRANSPOSED> __device__ __forceinline__ void ldmatrix(u32 &a, u32 &b, u32 &c, u32 &d, u32 at) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
}

#if TYPE == 1
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
__device__ __forceinline__ void mma_sync(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copies LINES rows of `from`, `columns` wide, from row `row0` on, of which rows from `end` on become zeros; of each row
// DEPTH columns from `column0` on, of which columns from `columns` on become zeros.
template <int LINES>
__device__ __forceinline__ void fetch_lines(u32 to, const T *from, long long row0, long long end, int column0, int columns) {
  static_assert(LINES * 8 % THREADS == 0, "the same number of copies for all threads");
#pragma unroll
  for (int i = 0; i < LINES * 8 / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, line = at / 8, word = at % 8, column = column0 + word * 8;
    const bool valid = row0 + line < end && column < columns;
    copy(to + line * 128 + (word ^ line % 8) * 16, from + (valid ? (row0 + line) * columns + column : 0), valid);
  }
}

// Copies DEPTH rows of `from`, `columns` wide, from row `row0` on, of which rows from `end` on become zeros; of each row
// BREADTH columns from `column0` on, in panels of 64, of which columns from `columns` on become zeros.
template <int BREADTH>
__device__ __forceinline__ void fetch_panels(u32 to, const T *from, long long row0, long long end, int column0, int columns) {
  constexpr int WORDS = BREADTH / 8;
  static_assert(DEPTH * WORDS % THREADS == 0, "the same number of copies for all threads");
#pragma unroll
  for (int i = 0; i < DEPTH * WORDS / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, line = at / WORDS, word = at % WORDS, column = column0 + word * 8;
    const bool valid = row0 + line < end && column < columns;
    copy(to + word / 8 * PANEL + line * 128 + (word % 8 ^ line % 8) * 16,
         from + (valid ? (row0 + line) * columns + column : 0), valid);
  }
}

// Form 0: a = x (R, K), b = w (E N, K), y (R, N); bias: (E N) or null. Form 1: a = dy (R, N), b = w, y = dx (R, K). Form
// 2: a = dy (R, N), b = x (R, K), y = dW (E N, K). offsets: (E + 1). Grid: one block per tile (`tile_of`). Dynamic shared
// memory: STAGES stages.
extern "C" __global__ void __launch_bounds__(THREADS)
grouped_mma(const T *__restrict__ a, const T *__restrict__ b, const T *__restrict__ bias, T *__restrict__ y,
            const int *__restrict__ offsets, u32 *status, int rows, int n, int k, int experts) {
  after_predecessors();
  extern __shared__ __align__(1024) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x == 0) check_offsets(offsets, experts, rows, status);
  const Tile tile = tile_of<BM, BN>(offsets, experts, rows, n, k);
  if (!tile.valid) return;
  const bool empty = FORM != 2 && tile.expert == experts; // rows of no expert
  const int depth = empty ? 0 : FORM == 0 ? k : FORM == 1 ? n : tile.end - tile.start;
  const int stages = (depth + DEPTH - 1) / DEPTH;
  const long long w0 = (long long)tile.expert * n; // the expert's first row of w and dW

  const u32 shared = shared_address(memory);
  auto fetch_stage = [&](int i) {
    const u32 to_a = shared + i % STAGES * STAGE_BYTES, to_b = to_a + BM * 128;
    const int d0 = i * DEPTH;
    if constexpr (FORM == 0) {
      fetch_lines<BM>(to_a, a, tile.row, tile.end, d0, k);
      fetch_lines<BN>(to_b, b, w0 + tile.column, w0 + n, d0, k);
    } else if constexpr (FORM == 1) {
      fetch_lines<BM>(to_a, a, tile.row, tile.end, d0, n);
      fetch_panels<BN>(to_b, b, w0 + d0, w0 + n, tile.column, k);
    } else {
      fetch_panels<BM>(to_a, a, (long long)tile.start + d0, tile.end, tile.row, n);
      fetch_panels<BN>(to_b, b, (long long)tile.start + d0, tile.end, tile.column, k);
    }
  };
  float sums[MA][NA][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < stages) fetch_stage(i);
    commit();
  }
  const int warp_row = warp / COLUMN_WARPS * WARP_ROWS, warp_column = warp % COLUMN_WARPS * WARP_COLUMNS;
  for (int i = 0; i < stages; i++) {
    wait<STAGES - 2>();
    __syncthreads(); // All threads see stage i and have read stage i - 1, which is overwritten next.
    if (i + STAGES - 1 < stages) fetch_stage(i + STAGES - 1);
    commit();
    const u32 of_a = shared + i % STAGES * STAGE_BYTES, of_b = of_a + BM * 128;
#pragma unroll
    for (int s = 0; s < DEPTH / 16; s++) {
      u32 u[MA][4], v[NA][2];
      // ldmatrix.x4 loads four pieces of 8 x 8; lanes 8 q .. 8 q + 7 address the rows of piece q. The pieces of the first
      // operand are (rows 0-7, terms 0-7), (rows 8-15, terms 0-7), (rows 0-7, terms 8-15), (rows 8-15, terms 8-15).
#pragma unroll
      for (int m = 0; m < MA; m++) {
        u32 at;
        if constexpr (FORM == 2) {
          const int line = s * 16 + lane / 16 * 8 + lane % 8, column = warp_row + m * 16 + lane / 8 % 2 * 8;
          at = of_a + column / 64 * PANEL + line * 128 + (column / 8 % 8 ^ line % 8) * 16;
        } else {
          const int line = warp_row + m * 16 + lane % 16;
          at = of_a + line * 128 + ((s * 2 + lane / 16) ^ line % 8) * 16;
        }
        ldmatrix<FORM == 2>(u[m][0], u[m][1], u[m][2], u[m][3], at);
      }
      // Those of the second operand: (columns 0-7, terms 0-7), (columns 0-7, terms 8-15), (columns 8-15, terms 0-7),
      // (columns 8-15, terms 8-15).
#pragma unroll
      for (int j = 0; j < NA; j += 2) {
        u32 at;
        if constexpr (FORM == 0) {
          const int line = warp_column + j * 8 + lane / 16 * 8 + lane % 8;
          at = of_b + line * 128 + ((s * 2 + lane / 8 % 2) ^ line % 8) * 16;
        } else {
          const int line = s * 16 + lane % 16, column = warp_column + j * 8 + lane / 16 * 8;
          at = of_b + column / 64 * PANEL + line * 128 + (column / 8 % 8 ^ line % 8) * 16;
        }
        ldmatrix<FORM != 0>(v[j][0], v[j][1], v[j + 1][0], v[j + 1][1], at);
      }
#pragma unroll
      for (int m = 0; m < MA; m++)
#pragma unroll
        for (int j = 0; j < NA; j++) mma_sync(sums[m][j], u[m], v[j]);
    }
  }

  const int columns = FORM == 0 ? n : k, last = FORM == 2 ? n : tile.end;
  const long long y0 = FORM == 2 ? w0 : 0;
#pragma unroll
  for (int j = 0; j < NA; j++) {
    // Widths are multiples of 8, so that both columns of a pair are inside, and their store is aligned.
    const int column = tile.column + warp_column + j * 8 + lane % 4 * 2;
    if (column >= columns) continue;
    float added[2] = {0.0f, 0.0f};
    if (FORM == 0 && bias && !empty)
      added[0] = load(bias[w0 + column]), added[1] = load(bias[w0 + column + 1]);
#pragma unroll
    for (int m = 0; m < MA; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = tile.row + warp_row + m * 16 + h * 8 + lane / 4;
        if (row >= last) continue;
        *(u32 *)(y + (y0 + row) * columns + column) =
            pack<TYPE>(sums[m][j][h * 2] + added[0], sums[m][j][h * 2 + 1] + added[1]);
      }
  }
}
PARAMETERS(grouped_mma, 64, 60);

#else

// A block computes a tile of 64 x 64, a thread 4 x 4 of it, with 16 terms at a time in shared memory, loaded
// synchronously.

#define TILE 64
#define DEPTH 16
#define PER_THREAD 4
#define THREADS 256

// Operands and grid as those of `grouped_mma`, with tiles of 64 x 64. Threads: 16 along rows by 16 along columns. With two
// blocks per multiprocessor in mind, the compiler has registers enough; left alone, it aims at three and spills one.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
grouped(const T *__restrict__ a, const T *__restrict__ b, const T *__restrict__ bias, T *__restrict__ y,
        const int *__restrict__ offsets, u32 *status, int rows, int n, int k, int experts) {
  after_predecessors();
  // Rows have four elements of padding: float4 reads stay aligned, and writes are spread over banks.
  __shared__ __align__(16) float as[DEPTH][TILE + 4];
  __shared__ __align__(16) float bs[DEPTH][TILE + 4];
  if (blockIdx.x == 0) check_offsets(offsets, experts, rows, status);
  const Tile tile = tile_of<TILE, TILE>(offsets, experts, rows, n, k);
  if (!tile.valid) return;
  const bool empty = FORM != 2 && tile.expert == experts; // rows of no expert
  const int depth = empty ? 0 : FORM == 0 ? k : FORM == 1 ? n : tile.end - tile.start;
  const int columns = FORM == 0 ? n : k, last = FORM == 2 ? n : tile.end;
  const long long w0 = (long long)tile.expert * n;
  const int thread_row = threadIdx.x / 16 * PER_THREAD, thread_column = threadIdx.x % 16 * PER_THREAD;
  float sums[PER_THREAD][PER_THREAD] = {};
  for (int d0 = 0; d0 < depth; d0 += DEPTH) {
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
      // Adjacent threads load adjacent elements: terms where these are adjacent in memory, else rows or columns.
      const int at = i * THREADS + threadIdx.x;
      const int a_line = FORM == 2 ? at % TILE : at / DEPTH, a_term = FORM == 2 ? at / TILE : at % DEPTH;
      const int b_line = FORM == 0 ? at / DEPTH : at % TILE, b_term = FORM == 0 ? at % DEPTH : at / TILE;
      const int row = tile.row + a_line, column = tile.column + b_line, da = d0 + a_term, db = d0 + b_term;
      long long from_a, from_b;
      if (FORM == 2) from_a = (long long)(tile.start + da) * n + row;
      else from_a = (long long)row * depth + da;
      if (FORM == 0) from_b = (w0 + column) * k + db;
      else if (FORM == 1) from_b = (w0 + db) * k + column;
      else from_b = (long long)(tile.start + db) * k + column;
      // Elements outside of the matrices are zeros, which change no sum.
      as[a_term][a_line] = row < last && da < depth ? load(a[from_a]) : 0.0f;
      bs[b_term][b_line] = column < columns && db < depth ? load(b[from_b]) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const float4 u = *(const float4 *)&as[d][thread_row], v = *(const float4 *)&bs[d][thread_column];
      const float us[PER_THREAD] = {u.x, u.y, u.z, u.w}, vs[PER_THREAD] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) sums[i][j] = fmaf(us[i], vs[j], sums[i][j]);
    }
    __syncthreads();
  }
  const long long y0 = FORM == 2 ? w0 : 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
      const int row = tile.row + thread_row + i, column = tile.column + thread_column + j;
      if (row >= last || column >= columns) continue;
      float s = sums[i][j];
      if (FORM == 0 && bias && !empty) s += load(bias[w0 + column]);
      y[(y0 + row) * columns + column] = store(s);
    }
}
PARAMETERS(grouped, 64, 60);

#endif
#endif
