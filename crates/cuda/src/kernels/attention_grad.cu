// Gradient of attention over packed sequences of 16-bit elements by mma.sync m16n8k16 (compute capability 8.0 and newer),
// after FlashAttention-2 (Dao 2023): with s = scale q k^T + ALiBi and p = exp(s - lse), per sequence and head, dv = p^T
// do, ds = p (do v^T - delta), dq = scale ds k and dk = scale ds^T q, where delta is the row sum of do times o. Scores
// and sums are f32; p and ds are rounded to 16 bits for the second products; no S x S matrix is stored. TYPE is 1 (bf16)
// or 2 (f16).
//
// Work: `prepare` (attention_grad.cuh) computes delta and the rotated q and k. Then two kernels of this one source
// recompute the scores, so that every sum has one owner and a fixed order, without atomics:
//   KEYS = 1: a block owns ROWS keys of one head of k and v, its rows, and loops over the queries, its columns, of all
//             query heads that share the head: dk and dv.
//   KEYS = 0: a block owns ROWS queries of one head, its rows, and loops over the keys, its columns: dq.
// x1, x2 are the block's rows (k and v, or q and do), y1, y2 its columns (q and do, or k and v): both kernels compute
// s = x1 y1^T and dp = x2 y2^T and add ds y1 to the first sum, and with KEYS p y2 to the second. A warp owns MT tiles of
// 16 rows. The accumulator layout of s is that of operand a, so that p and ds need no exchange between lanes.
//
// Wide heads: two sums of 16 rows and 256 columns would need all 255 registers of a thread, so that KEYS = 1 is compiled as
// two kernels, each of which recomputes s: KEYS = 2 for dk and KEYS = 3 for dv, which does not need dp. The order of
// every sum is that of KEYS = 1.
//
// Shared memory: the block's rows, for each warp its rows of x1, then of x2, (MT * 16, LD) each, reused at the end for
// MT * 16 rows of LD sums in f32; STAGES buffers, each (TILE, LD) of y1 and of y2; STAGES buffers of TILE stats.
//
// Copies: cp.async, one commit group per tile, STAGES - 1 groups in flight. One __syncthreads per tile makes it visible
// to all warps and frees the buffer of the previous tile. Tiles that the mask hides are not visited.
//
// Invariant: a gradient row is a function of its own sequence, bit by bit: columns are added 16 at a time in order, by
// head and then from the sequence's start, in every variant. Only rows of sequences are written.
//
// Constants: HEAD_DIM (d, of any size), ROTARY (then d is even), TABLE, ALIBI, MASK (attention_grad.cuh), KEYS (0 to 3), and
// the variant: WARPS, MT, TILE columns of a stage, STEP columns processed at a time, STAGES.

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "attention_mma.cuh"
#include "attention_mask.cuh"
#include "attention_grad.cuh"

#define ROWS (WARPS * MT * 16)
#define THREADS (WARPS * 32)
// Whether the fragments of x1 and x2 stay in registers during the loop; where they would spill they are read from shared
// memory in every step.
#define HELD (MT * DP <= (KEYS ? 64 : 128))
#ifndef BLOCKS
// Blocks per multiprocessor for __launch_bounds__: the largest number whose registers do not spill, for WARPS * MT = 4.
#define BLOCKS (DP > 128 ? 1 : KEYS ? DP > 32 ? 2 : DP > 16 || MASK == 3 || ALIBI ? 3 : 4 : DP > 64 ? 2 : DP > 32 ? 3 : 4)
#endif
// The sums of a warp: the first is dq or dk, with KEYS = 1 the second is dv, and with KEYS = 3 dv is the only sum.
#define SUMS (KEYS == 1 ? 2 : 1)
#define HAS_DS (KEYS != 3)
#define HAS_P (KEYS == 1 || KEYS == 3)
static_assert(TILE % STEP == 0 && STEP % 16 == 0 && STAGES >= 2, "a tile is whole steps");

// Copies N rows of one head to shared memory, zeros for rows from `rows` on. Row r goes to row r + r / GAP * GAP.
template <int N, int GAP>
__device__ __forceinline__ void fetch(u16 *to, const u16 *from, long long stride, int rows) {
  constexpr int per = HEAD_DIM / CHUNK;
  int thread = thread_now();
#pragma unroll
  for (int at = 0; at < N * per; at += THREADS) {
    int i = at + thread, r = i / per, c = i % per * CHUNK;
    if (N * per % THREADS == 0 || i < N * per) {
      bool valid = r < rows;
      copy<CHUNK>(to + (r + r / GAP * GAP) * LD + c, from + (valid ? r * stride : 0) + c, valid);
    }
  }
}

// A warp's rows. A thread has rows lane / 4 and lane / 4 + 8 of each 16 (accumulator layout of mma).
struct Rows {
  u32 at[2]; // this lane's addresses of x1 and x2 for ldmatrix
  u32 x[2][HELD ? MT : 1][HELD ? DP / 16 : 1][4];
  float sums[SUMS][MT][DP / 8][4];
  Pairs pairs[MT][2];
  float2 stats[KEYS ? 1 : MT][2];
};

// s += x y^T of the warp's rows and the next STEP columns. (MT * 16, d) (STEP, d) -> (MT * 16, STEP)
template <int which> __device__ __forceinline__ void product(float (&s)[MT][STEP / 8][4], const Rows &rows, u32 y) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
  for (int c = 0; c < DP / 16; c++) {
    u32 a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      if constexpr (HELD) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[m][i] = rows.x[which][m][c][i];
      } else {
        ldmatrix(a[m], rows.at[which] + (m * 16 * LD + c * 16) * 2);
      }
    }
#pragma unroll
    for (int n = 0; n < STEP / 16; n++) {
      u32 b[4];
      ldmatrix(b, y + (n * 16 * LD + c * 16) * 2);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma(s[m][2 * n], a[m], b[0], b[1]);
        mma(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// sums += p y for STEP columns. (MT * 16, STEP) (STEP, d) -> (MT * 16, d)
__device__ __forceinline__ void add(float (&sums)[MT][DP / 8][4], const float (&p)[MT][STEP / 8][4], u32 y) {
#pragma unroll
  for (int n = 0; n < STEP / 16; n++) {
    u32 a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      a[m][0] = pack<TYPE>(p[m][2 * n][0], p[m][2 * n][1]);
      a[m][1] = pack<TYPE>(p[m][2 * n][2], p[m][2 * n][3]);
      a[m][2] = pack<TYPE>(p[m][2 * n + 1][0], p[m][2 * n + 1][1]);
      a[m][3] = pack<TYPE>(p[m][2 * n + 1][2], p[m][2 * n + 1][3]);
    }
#pragma unroll
    for (int c = 0; c < DP / 16; c++) {
      u32 b[4];
      ldmatrix_transposed(b, y + (n * 16 * LD + c * 16) * 2);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma(sums[m][2 * c], a[m], b[0], b[1]);
        mma(sums[m][2 * c + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Processes STEP columns. `y` is the address of the first one in y1, `stats` are theirs; `row` and `column` are this
// thread's first row and column in the sequence. `factor` and `slope` include log2(e). Without MASKED the code has no
// branches; where nothing is masked both forms give equal bits.
template <bool MASKED>
__device__ __forceinline__ void step(Rows &rows, u32 y, const float2 *stats, int row, int column, float factor, float slope) {
  float p[MT][STEP / 8][4], ds[MT][STEP / 8][4];
  product<0>(p, rows, y + by_key());
  if constexpr (HAS_DS) product<1>(ds, rows, y + TILE * LD * 2 + by_key());
#pragma unroll
  for (int n = 0; n < STEP / 8; n++) {
    float4 of_columns; // lse log2(e) and delta of the thread's two columns
    if constexpr (KEYS != 0) of_columns = *(const float4 *)(stats + n * 8 + thread_now() % 4 * 2);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int h = e / 2, c = column + n * 8 + e % 2;
        float lse, delta;
        if constexpr (KEYS != 0) lse = e % 2 ? of_columns.z : of_columns.x, delta = e % 2 ? of_columns.w : of_columns.y;
        else lse = rows.stats[m][h].x, delta = rows.stats[m][h].y;
        float shift = -lse;
#if ALIBI
        shift = fmaf(fabsf((float)(row + m * 16 + h * 8 - c)), -slope, shift);
#endif
        float x = exp2_fast(fmaf(p[m][n][e], factor, shift));
        if (MASKED && !rows.pairs[m][h].admits(c)) x = 0.0f;
        p[m][n][e] = x;
        if constexpr (HAS_DS) ds[m][n][e] = __fmul_rn(x, ds[m][n][e] - delta);
      }
  }
  if constexpr (HAS_DS) add(rows.sums[0], ds, y + by_row());
  if constexpr (HAS_P) add(rows.sums[SUMS - 1], p, y + TILE * LD * 2 + by_row());
}

// Writes sums of the warp's rows through `mine`, its own rows of shared memory, to `to`, the address of its first row.
template <bool rotated>
__device__ __forceinline__ void write_rows(const float (&sums)[MT][DP / 8][4], float *mine, T *to, long long stride, int rows,
                                           float scale, const Angle *cosines, const Angle *sines, int position) {
  int lane = threadIdx.x % 32;
  __syncwarp(); // all lanes have read what was here
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < DP / 8; n++)
        *(float2 *)(mine + (m * 16 + h * 8 + lane / 4) * LD + n * 8 + lane % 4 * 2) =
            make_float2(sums[m][n][h * 2], sums[m][n][h * 2 + 1]);
  __syncwarp();
  if (to) write_sums<rotated>(mine, LD, to, stride, min(rows, MT * 16), scale, cosines, sines, position, lane, 32);
}

// q, do: (T, H d) and k, v: (T, G d), each with the stride of its rows (that of do is H d), q and k rotated; stats: (T,
// H); spans: (S, 2); cos, sin: (longest, d/2). With KEYS, d1 and d2 are dk and dv, of which KEYS = 2 and 3 write their own
// only, otherwise d1 is dq, with stride `d_stride`; either may be null. Grid: a block for each head (with KEYS, of k) and
// each number below T / ROWS + S (`block_of`). Invalid spans set `status` and write nothing.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_grad(ATTENTION_GRAD_PARAMETERS) {
  after_predecessors();
  extern __shared__ __align__(16) u16 memory[]; // x1 and x2: (2 ROWS, LD); STAGES times y1 and y2: (2 TILE, LD); stats
  __shared__ float slopes[STAGES];
  int block_heads = KEYS ? kv_heads : heads, group = heads / kv_heads;
  int number = blockIdx.x / block_heads, head = blockIdx.x % block_heads;
  if (head == 0 && threadIdx.x == 0) check_span(spans, sequences, tokens, ROTARY ? longest : tokens, number, status);
  Block block = block_of<ROWS>(spans, sequences, number);
  int length = block.end - block.start;
  if (block.first >= length || block.first < 0 || block.start < 0 || block.end > tokens) return;
  if (ROTARY && length > longest) return;

  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if HEAD_DIM % 16
  // Copies never write columns d .. DP, so that zeros written once remain.
  constexpr int padding = DP - HEAD_DIM;
  for (int i = threadIdx.x; i < (2 * ROWS + STAGES * 2 * TILE) * padding; i += THREADS)
    memory[i / padding * LD + HEAD_DIM + i % padding] = 0;
#endif
  u16 *stages = memory + 2 * ROWS * LD;
  float2 *stage_stats = (float2 *)(stages + STAGES * 2 * TILE * LD); // with KEYS only
  Extent mask = {span, local, global};
  Tiles tiles = tiles_of<KEYS != 0, ROWS, TILE>(block.first, length, mask);
  int kv_head = KEYS ? head : head / group, items = KEYS ? tiles.count * group : tiles.count;
  k += (long long)block.start * k_stride + kv_head * HEAD_DIM;
  v += (long long)block.start * v_stride + kv_head * HEAD_DIM;
  // The block's first query head; those of a group are adjacent.
  int first_head = KEYS ? head * group : head;
  long long dy_stride = (long long)heads * HEAD_DIM;
  q += (long long)block.start * q_stride + first_head * HEAD_DIM;
  dy += block.start * dy_stride + first_head * HEAD_DIM;
  stats += (long long)block.start * heads + first_head;

  // Starts the copies of an item's tile. A group is committed even behind the last item, so that waiting for all groups
  // but STAGES - 2 always means that the current tile has arrived.
  auto start_copies = [&](int item) {
    if (item < items) {
      int of = KEYS ? item / tiles.count : 0, at = tiles[KEYS ? item % tiles.count : item] * TILE, stage = item % STAGES;
      u16 *to = stages + stage * 2 * TILE * LD;
      if constexpr (KEYS != 0) {
        fetch<TILE, TILE>(to, q + at * q_stride + of * HEAD_DIM, q_stride, length - at);
        fetch<TILE, TILE>(to + TILE * LD, dy + at * dy_stride + of * HEAD_DIM, dy_stride, length - at);
        int r = thread_now();
        for (; r < TILE; r += THREADS)
          copy<4>((u16 *)(stage_stats + stage * TILE + r),
                  (const u16 *)(stats + (at + r < length ? (long long)(at + r) * heads + of : 0)), at + r < length);
        if (ALIBI && threadIdx.x == 0) slopes[stage] = __fmul_rn(alibi_slope(first_head + of, heads), LOG2E);
      } else {
        fetch<TILE, TILE>(to, k + at * k_stride, k_stride, length - at);
        fetch<TILE, TILE>(to + TILE * LD, v + at * v_stride, v_stride, length - at);
      }
    }
    commit();
  };
  constexpr int own = MT * 16;
  int here = length - block.first;
  if constexpr (KEYS != 0) {
    fetch<ROWS, own>(memory, k + block.first * k_stride, k_stride, here);
    if constexpr (HAS_DS) fetch<ROWS, own>(memory + own * LD, v + block.first * v_stride, v_stride, here);
  } else {
    fetch<ROWS, own>(memory, q + block.first * q_stride, q_stride, here);
    fetch<ROWS, own>(memory + own * LD, dy + block.first * dy_stride, dy_stride, here);
    if (ALIBI && threadIdx.x == 0) slopes[0] = __fmul_rn(alibi_slope(first_head, heads), LOG2E);
  }
#pragma unroll
  for (int item = 0; item < STAGES - 1; item++) start_copies(item);

  Rows rows;
  int first = block.first + warp * own; // the warp's first row in the sequence
  u16 *mine = memory + warp * 2 * own * LD;
#pragma unroll
  for (int x = 0; x < 2; x++) rows.at[x] = shared_address(mine + x * own * LD) + by_row();
  Pairs all = {0x7fffffff, 0, 0}; // of all rows of the warp together
  int most_low = 0, least_high = 0x7fffffff;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int r = first + m * 16 + h * 8 + lane / 4;
      Pairs pairs = rows.pairs[m][h] = pairs_of<KEYS != 0>(r, length, mask);
      all = {min(all.low, pairs.low), max(all.high, pairs.high), max(all.far, pairs.far)};
      most_low = max(most_low, pairs.low), least_high = min(least_high, pairs.high);
      if constexpr (!KEYS) rows.stats[m][h] = r < length ? stats[(long long)r * heads] : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int s = 0; s < SUMS; s++)
#pragma unroll
        for (int n = 0; n < DP / 8; n++) rows.sums[s][m][n][h * 2] = rows.sums[s][m][n][h * 2 + 1] = 0.0f;
    }
  all = {__reduce_min_sync(~0u, all.low), __reduce_max_sync(~0u, all.high), __reduce_max_sync(~0u, all.far)};
  most_low = __reduce_max_sync(~0u, most_low), least_high = __reduce_min_sync(~0u, least_high);
  float factor = __fmul_rn(scale, LOG2E);

  for (int item = 0; item < items; item++) {
    int stage = item % STAGES;
    u16 *y = stages + stage * 2 * TILE * LD;
    wait<STAGES - 2>();
    // All warps see this tile, and none reads the previous tile any longer, whose buffer the next copies overwrite.
    __syncthreads();
    if (HELD && item == 0) {
#pragma unroll
      for (int x = 0; x < 2; x++)
#pragma unroll
        for (int m = 0; m < (HELD ? MT : 0); m++)
#pragma unroll
          for (int c = 0; c < DP / 16; c++) ldmatrix(rows.x[x][m][c], rows.at[x] + (m * 16 * LD + c * 16) * 2);
    }
    start_copies(item + STAGES - 1);
    float slope = ALIBI ? slopes[KEYS ? stage : 0] : 0.0f;
    int tile = tiles[KEYS ? item % tiles.count : item] * TILE;
#pragma unroll 1
    for (int at = 0; at < TILE; at += STEP) {
      int column = tile + at;
      // Columns that none of the warp's rows is paired with.
      if (column >= all.high || (column + STEP <= all.low && column >= all.far)) continue;
      u32 from = shared_address(y + at * LD);
      const float2 *of = stage_stats + stage * TILE + at;
      int row = first + lane / 4, mine_column = column + lane % 4 * 2;
      if (column >= most_low && column + STEP <= least_high)
        step<false>(rows, from, of, row, mine_column, factor, slope);
      else
        step<true>(rows, from, of, row, mine_column, factor, slope);
    }
  }
  if (first >= length) return;
  float *to = (float *)mine; // x1 and x2 of the warp, which no other warp reads
  long long at = (long long)(block.start + first) * d_stride + head * HEAD_DIM;
  if constexpr (HAS_DS)
    write_rows<true>(rows.sums[0], to, d1 ? d1 + at : d1, d_stride, length - first, scale, cosines, sines, first);
  if constexpr (HAS_P)
    write_rows<false>(rows.sums[SUMS - 1], to, d2 ? d2 + at : d2, d_stride, length - first, 1.0f, cosines, sines, first);
}
PARAMETERS(attention_grad, 160, 152);
