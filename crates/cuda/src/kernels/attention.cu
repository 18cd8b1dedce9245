// Attention over packed sequences of 16-bit elements by mma.sync m16n8k16 (compute capability 8.0 and newer),
// after FlashAttention-2 (Dao 2023): o = softmax(scale q k^T + ALiBi) v per sequence and head, with optional
// rotary embedding and causal mask. Scores, softmax and sums are f32; the matrix of scores is never stored.
// TYPE is 1 (bf16) or 2 (f16).
//
// Shapes: q (T, H d), k, v (T, G d) with G = H / group heads (grouped-query attention), spans (S, 2), o (T, H d), and
// optionally lse (T, H), the natural logarithm of each row's sum of exponentials.
//
// Work: a block computes ROWS queries of one head of one sequence and loops over all keys that these queries
// see; a warp has MT tiles of 16 queries, and no warp shares a row with another. The queries are fragments in
// registers during the loop (of heads wider than 128 columns they stay in shared memory), as are o, the running maximum
// and the running sum of every row.
//
// Shared memory: (ROWS, LD) of q, reused for o at the end, and STAGES buffers, each for (TILE, LD) of k and of
// v. Rows are LD elements apart, an odd number of 16-byte words, so that the eight rows of an ldmatrix lie in
// different banks; columns d .. DP are zeros.
//
// Copies: cp.async, one commit group per tile (k and v), STAGES - 1 groups in flight. Rotary embedding is
// applied in shared memory by the thread that copied the elements, which therefore waits only for its own
// copies; one __syncthreads per tile makes the tile visible to all warps and frees the buffer of the previous
// tile.
//
// Invariant: a row of o is a function of its own sequence, bit by bit, in every variant. The bits depend on
// STEP alone: keys are visited in steps of STEP from the sequence's start, in order, and every row has its own
// running maximum. The variant (WARPS, MT, TILE, STAGES) decides which warp has a row and when keys are loaded;
// TILE is a multiple of STEP, so that the steps do not change. It is chosen for speed alone. Only rows of
// sequences are written.
//
// Constants: HEAD_DIM (d, of any size), ROTARY (then d is even), TABLE (element type of cos and sin), ALIBI,
// CAUSAL, for a sliding window or a block-sparse mask also MASK (attention_mask.cuh; CAUSAL is 1), and the variant, from which the host computes the size of shared memory: WARPS, MT, TILE keys of a
// stage, STAGES.

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "attention_mma.cuh"
#include "attention_mask.cuh"

#define STEP 32                        // keys between two updates of the running maximum
#define ROWS (WARPS * MT * 16)
#define THREADS (WARPS * 32)
#ifndef BLOCKS
// Blocks per multiprocessor for __launch_bounds__: the largest number whose registers do not spill.
#define BLOCKS (DP < 64 || (DP == 64 && !ALIBI && __CUDA_ARCH__ >= 900) ? 12 / WARPS : WARPS < 8 ? 8 / WARPS : 1)
#endif
static_assert(TILE % STEP == 0 && STAGES >= 2, "a tile is whole steps");
// Whether the queries stay in registers during the loop. Beside the sums of a wider head they would spill: they are read
// from shared memory in every step.
#define HELD (DP <= 128)
// Unrolling of the copies: whole, but beside the sums of a wide head the addresses of all copies would spill.
#define COPIES (HELD ? 4096 : 4)
static_assert(HELD || MT == 1, "a warp has registers for the sums of 16 rows of a wide head");

// Copies N rows of one head to shared memory, zeros for rows from `rows` on. (N, d) -> (N, LD)
template <int N> __device__ __forceinline__ void fetch(u16 *to, const u16 *from, long long stride, int rows) {
  constexpr int per = HEAD_DIM / CHUNK;
  int thread = thread_now();
#pragma unroll COPIES
  for (int at = 0; at < N * per; at += THREADS) {
    int i = at + thread, r = i / per, c = i % per * CHUNK;
    if (N * per % THREADS == 0 || i < N * per) {
      bool valid = r < rows;
      copy<CHUNK>(to + r * LD + c, from + (valid ? r * stride : 0) + c, valid);
    }
  }
}

// As `fetch`, for rows that `rotate` will process: a thread copies exactly the elements that it will rotate, so
// that it needs to wait for its own copies only. Both functions must map i to (r, c) alike.
template <int N> __device__ __forceinline__ void fetch_pairs(u16 *to, const u16 *from, long long stride, int rows) {
#if ROTARY
  constexpr int per = HALF / PAIR;
  int thread = thread_now();
#pragma unroll COPIES
  for (int at = 0; at < N * per; at += THREADS) {
    int i = at + thread, r = i / per, c = i % per * PAIR;
    if (N * per % THREADS == 0 || i < N * per) {
      bool valid = r < rows;
      const u16 *row = from + (valid ? r * stride : 0) + c;
      copy<PAIR>(to + r * LD + c, row, valid);
      copy<PAIR>(to + r * LD + c + HALF, row + HALF, valid);
    }
  }
#else
  fetch<N>(to, from, stride, rows);
#endif
}

// Applies rotary embedding (Su et al. 2021, half-split) in place to rows in shared memory; row 0 is number
// `position` of its sequence. (a, b) -> (a cos - b sin, b cos + a sin), where b is d/2 columns behind a. cos,
// sin: (longest, d/2). One product is rounded before the fused multiply-add, in every attention kernel alike, so
// that their bits agree.
template <int N>
__device__ __forceinline__ void rotate(u16 *x, const Angle *cosines, const Angle *sines, int position, int rows) {
#if ROTARY
  constexpr int per = HALF / PAIR;
  int thread = thread_now();
  constexpr int bytes = PAIR * sizeof(Angle);
  struct __align__(bytes < 16 ? bytes : 16) Angles { Angle x[PAIR]; };
#pragma unroll COPIES
  for (int at = 0; at < N * per; at += THREADS) {
    int i = at + thread, r = i / per, c = i % per * PAIR;
    if ((N * per % THREADS == 0 || i < N * per) && r < rows) {
      long long entry = (long long)(position + r) * HALF + c;
      Angles cosine = *(const Angles *)(cosines + entry), sine = *(const Angles *)(sines + entry);
      Vector<PAIR> *low = (Vector<PAIR> *)(x + r * LD + c), *high = (Vector<PAIR> *)(x + r * LD + c + HALF);
      Vector<PAIR> a = *low, b = *high;
#pragma unroll
      for (int j = 0; j < PAIR; j++) {
        float u = load(a.x[j]), v = load(b.x[j]), cos = widen<TABLE>(cosine.x[j]), sin = widen<TABLE>(sine.x[j]);
        a.x[j] = store(fmaf(u, cos, -__fmul_rn(v, sin)));
        b.x[j] = store(fmaf(v, cos, __fmul_rn(u, sin)));
      }
      *low = a, *high = b;
    }
  }
#endif
}

// State of a warp's MT * 16 queries. A thread has rows lane / 4 and lane / 4 + 8 of each 16 (accumulator layout
// of mma).
struct Rows {
#if HELD
  u32 q[MT][DP / 16][4];
#else
  u32 q_at; // this lane's address of the warp's queries for ldmatrix
#endif
  float o[MT][DP / 8][4]; // sums of exp2(score - row_max) v
  float row_max[MT][2];       // reference maximum, in units of log2: at most 8 below the row's true maximum so far
  float sum[MT][2];       // of the weights of this thread's keys; the four threads of a row are added at the end
#if MASK >= 2
  Pairs pairs[MT][2];
#endif
};

// s = q k^T of the warp's rows and the next STEP keys. (MT * 16, d) (STEP, d) -> (MT * 16, STEP)
// MASKED skips blocks of 16 keys behind the last key; their scores stay zero here and `softmax` masks them.
template <bool MASKED>
__device__ __forceinline__ void scores(float (&s)[MT][STEP / 8][4], const Rows &rows, u32 k, int keys) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
  for (int n = 0; n < STEP / 16; n++) {
    if (MASKED && n * 16 >= keys) break;
#pragma unroll
    for (int c = 0; c < DP / 16; c++) {
      u32 b[4];
      ldmatrix(b, k + (n * 16 * LD + c * 16) * 2);
#pragma unroll
      for (int m = 0; m < MT; m++) {
#if HELD
        mma(s[m][2 * n], rows.q[m][c], b[0], b[1]);
        mma(s[m][2 * n + 1], rows.q[m][c], b[2], b[3]);
#else
        u32 a[4];
        ldmatrix(a, rows.q_at + c * 16 * 2);
        mma(s[m][2 * n], a, b[0], b[1]);
        mma(s[m][2 * n + 1], a, b[2], b[3]);
#endif
      }
    }
  }
}

// o += p v for STEP keys. (MT * 16, STEP) (STEP, d) -> (MT * 16, d) The accumulator layout of the scores is
// that of operand a, so that weights need no exchange between lanes, but rounding.
template <bool MASKED>
__device__ __forceinline__ void values(Rows &rows, const float (&p)[MT][STEP / 8][4], u32 v, int keys) {
#pragma unroll
  for (int n = 0; n < STEP / 16; n++) {
    if (MASKED && n * 16 >= keys) break;
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
      ldmatrix_transposed(b, v + (n * 16 * LD + c * 16) * 2);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma(rows.o[m][2 * c], a[m], b[0], b[1]);
        mma(rows.o[m][2 * c + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Online softmax of one step: replaces scores by exp2(score - row_max) and updates `row_max` and `sum`. The reference
// maximum is raised only when the maximum has grown by more than 8, so that o is rescaled seldom; the result
// stays exact, because o and sum refer to the same row_max, and weights are at most 2^8 (after Zadouri et al. 2026,
// FlashAttention-4).
//
// `row` and `key` are this thread's first row and key in the sequence, `keys` the number of keys of the step;
// `factor` and `slope` include log2(e), so that scores are in units of log2.
template <bool MASKED>
__device__ __forceinline__ void softmax(float (&s)[MT][STEP / 8][4], Rows &rows, int row, int key, int keys, float factor,
                                        float slope) {
  int left = MASKED ? keys - thread_now() % 4 * 2 : 0; // keys from the thread's first one on
  bool max_grew = false;
  float correction[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int i = row + m * 16 + h * 8;
      float maximum = -INFINITY;
#pragma unroll
      for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float &x = s[m][n][h * 2 + e];
          int j = n * 8 + e; // the thread's key, counted from `key`
#if ALIBI
          x = fmaf(x, factor, __fmul_rn(fabsf((float)(i - key) - (float)j), -slope));
#endif
#if MASK >= 2
          if (MASKED && !rows.pairs[m][h].admits(key + j)) x = -INFINITY;
#else
          if (MASKED && (j >= left || (CAUSAL && key + j > i))) x = -INFINITY;
#endif
          maximum = fmaxf(maximum, x);
        }
      }
      // Four neighbouring lanes share a row.
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
#if !ALIBI
      // Without ALiBi the scores are scaled inside of the exponential's multiply-add, and here only the maximum.
      maximum = __fmul_rn(maximum, factor);
#endif
      correction[m][h] = 1.0f;
      if (maximum > rows.row_max[m][h] + 8.0f) {
        correction[m][h] = exp2_fast(rows.row_max[m][h] - maximum);
        rows.row_max[m][h] = maximum;
        max_grew = true;
      }
    }
  }
  // The branch is uniform in the warp; rows that have not grown are multiplied by 1, which changes no bit.
  if (__any_sync(~0u, max_grew)) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        rows.sum[m][h] = __fmul_rn(rows.sum[m][h], correction[m][h]);
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) rows.o[m][n][h * 2 + e] = __fmul_rn(rows.o[m][n][h * 2 + e], correction[m][h]);
      }
  }
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < STEP / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float &x = s[m][n][e];
        float row_max = rows.row_max[m][e / 2];
#if MASK >= 2
        // A row may see no key of its first steps; -inf - -inf would be NaN.
        if (MASKED && row_max == -INFINITY) row_max = 0.0f;
#endif
#if ALIBI
        x = exp2_fast(x - row_max);
#else
        x = exp2_fast(fmaf(x, factor, -row_max));
#endif
        rows.sum[m][e / 2] += x;
      }
}

// Writes o / sum to `to` and, if `lse` is not null, the natural logarithm of the sum of exponentials. `to` and
// `lse` point to the warp's first row, `rows` is the number of rows from there to the sequence's end. The
// fragments go through `mine`, the warp's own rows of q in shared memory (no other warp reads them), to be
// written to memory in wide, coalesced accesses.
__device__ __forceinline__ void write_rows(Rows &w, u16 *mine, u16 *to, long long stride, float *lse, int heads, int rows) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int r = m * 16 + h * 8 + lane / 4;
      float sum = w.sum[m][h];
      // The butterfly adds equal pairs in every lane: all four lanes of a row have the same bits.
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float inverse = 1.0f / sum;
#pragma unroll
      for (int n = 0; n < DP / 8; n++)
        *(u32 *)(mine + r * LD + n * 8 + lane % 4 * 2) =
            pack<TYPE>(__fmul_rn(w.o[m][n][h * 2], inverse), __fmul_rn(w.o[m][n][h * 2 + 1], inverse));
      if (lse && lane % 4 == 0 && r < rows) lse[(long long)r * heads] = (w.row_max[m][h] + log2f(sum)) * 0.6931471805599453f;
    }
  __syncwarp();
  constexpr int per = HEAD_DIM / CHUNK;
#pragma unroll
  for (int at = 0; at < MT * 16 * per; at += 32) {
    int i = at + lane, r = i / per, c = i % per * CHUNK;
    if ((MT * 16 * per % 32 == 0 || i < MT * 16 * per) && r < rows)
      *(Vector<CHUNK> *)(to + r * stride + c) = *(const Vector<CHUNK> *)(mine + r * LD + c);
  }
}

// Processes one step of keys for the warp's rows: scores, softmax, values. MASKED handles the causal mask and
// the end of the sequence; without it the code has no branches. Where nothing is masked both forms give equal
// bits, so that the choice may depend on the tile. `k` and `v` are the lane's addresses in shared memory,
// `keys` is the number of keys of this step.
template <bool MASKED>
__device__ __forceinline__ void step(Rows &rows, u32 k, u32 v, int row, int key, int keys, float factor, float slope) {
  float s[MT][STEP / 8][4];
  scores<MASKED>(s, rows, k, keys);
  softmax<MASKED>(s, rows, row, key, keys, factor, slope);
  values<MASKED>(rows, s, v, keys);
}

// q: (T, H d), k, v: (T, G d), each with the stride of its rows; spans: (S, 2); cos, sin: (longest, d/2); o:
// (T, H d); lse: (T, H) or null. Grid: a block for each head and each number below T / ROWS + S (`block_of`).
// Invalid spans set `status` and write nothing.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention(ATTENTION_PARAMETERS) {
  after_predecessors();
  extern __shared__ __align__(16) u16 memory[]; // q, later o: (ROWS, LD); STAGES times k and v: (TILE, LD) each
  __shared__ float shared_slope;
  int number = blockIdx.x / heads, head = blockIdx.x % heads;
  if (head == 0 && threadIdx.x == 0) check_span(spans, sequences, tokens, ROTARY ? longest : tokens, number, status);
  Block block = block_of<ROWS>(spans, sequences, number);
  int length = block.end - block.start;
  if (block.first >= length || block.first < 0 || block.start < 0 || block.end > tokens) return;
  if (ROTARY && length > longest) return;

  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if HEAD_DIM % 16
  // Copies never write columns d .. DP, so that zeros written once remain.
  constexpr int padding = DP - HEAD_DIM;
  for (int i = threadIdx.x; i < (ROWS + STAGES * 2 * TILE) * padding; i += THREADS)
    memory[i / padding * LD + HEAD_DIM + i % padding] = 0;
#endif
  u16 *stages = memory + ROWS * LD;
  q += (long long)(block.start + block.first) * q_stride + head * HEAD_DIM;
  int keys = CAUSAL ? min(length, block.first + ROWS) : length;
#if MASK >= 2
  Extent mask = {span, local, global};
  Tiles list = tiles_of<false, ROWS, TILE>(block.first, length, mask);
  int tiles = list.count;
#define TILE_AT(i) list[i]
#else
  int tiles = (keys + TILE - 1) / TILE;
#define TILE_AT(i) (i)
#endif
  // Starts the copies of k and v of a tile. A group is committed even behind the last tile, so that waiting for
  // all groups but STAGES - 2 always means that the current tile has arrived.
  auto start_copies = [&](int tile) {
    if (tile < tiles) {
      u16 *to = stages + tile % STAGES * 2 * TILE * LD;
      int first_key = TILE_AT(tile) * TILE;
      long long at = (long long)(block.start + first_key) * kv_stride + head / group * HEAD_DIM;
      fetch_pairs<TILE>(to, k + at, kv_stride, length - first_key);
      fetch<TILE>(to + TILE * LD, v + at, kv_stride, length - first_key);
    }
    commit();
  };
  fetch_pairs<ROWS>(memory, q, q_stride, length - block.first);
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; tile++) start_copies(tile);
  if (ALIBI && threadIdx.x == 0) shared_slope = alibi_slope(head, heads);

  wait<STAGES - 2>(); // q and the first tile are one group
  rotate<ROWS>(memory, cosines, sines, block.first, length - block.first);
  __syncthreads();
  Rows rows;
  int mine = warp * MT * 16, first = block.first + mine; // the warp's first row, in the block and in the sequence
#pragma unroll
  for (int m = 0; m < MT; m++) {
#if HELD
#pragma unroll
    for (int c = 0; c < DP / 16; c++)
      ldmatrix(rows.q[m][c], shared_address(memory) + ((mine + m * 16) * LD + c * 16) * 2 + by_row());
#else
    rows.q_at = shared_address(memory) + mine * LD * 2 + by_row();
#endif
#pragma unroll
    for (int n = 0; n < DP / 8; n++) rows.o[m][n][0] = rows.o[m][n][1] = rows.o[m][n][2] = rows.o[m][n][3] = 0.0f;
    rows.row_max[m][0] = rows.row_max[m][1] = -INFINITY;
    rows.sum[m][0] = rows.sum[m][1] = 0.0f;
#if MASK >= 2
#pragma unroll
    for (int h = 0; h < 2; h++) rows.pairs[m][h] = pairs_of<false>(first + m * 16 + h * 8 + lane / 4, length, mask);
#endif
  }
#if MASK >= 2
  Pairs of_first = pairs_of<false>(first, length, mask), of_last = pairs_of<false>(min(first + MT * 16, length) - 1, length, mask);
#endif
#if MASK >= 2
#define WHOLE(key) (key >= of_last.low)
#else
#define WHOLE(key) true
#endif
  float factor = __fmul_rn(scale, LOG2E), slope = ALIBI ? __fmul_rn(shared_slope, LOG2E) : 0.0f;

  for (int tile = 0; tile < tiles; tile++) {
    u16 *stage = stages + tile % STAGES * 2 * TILE * LD;
    wait<STAGES - 2>();
    int first_key = TILE_AT(tile) * TILE;
    rotate<TILE>(stage, cosines, sines, first_key, length - first_key);
    // All warps see this tile, and none reads the previous tile any longer, whose buffer the next copies overwrite.
    __syncthreads();
    start_copies(tile + STAGES - 1);
    if (first >= length) continue; // a warp without queries still copies, rotates and takes part in barriers
    int mine_keys = CAUSAL ? min(keys, first + MT * 16) : keys;
#pragma unroll 1
    for (int at = 0; at < TILE; at += STEP) {
      int key = first_key + at;
      if (key >= mine_keys) break;
#if MASK >= 2
      if (key + STEP <= of_first.low && key >= of_last.far) continue; // no row of the warp sees these keys
#endif
      // Computed anew in every step: held over the loop, the addresses would make registers spill.
      int lane = thread_now() % 32;
      u32 k_at = shared_address(stage + at * LD) + by_key(), v_at = shared_address(stage + (TILE + at) * LD) + by_row();
      if (mine_keys - key >= STEP && (!CAUSAL || key + STEP <= first + 1) && WHOLE(key))
        step<false>(rows, k_at, v_at, first + lane / 4, key + lane % 4 * 2, STEP, factor, slope);
      else
        step<true>(rows, k_at, v_at, first + lane / 4, key + lane % 4 * 2, mine_keys - key, factor, slope);
    }
  }
  if (first >= length) return;
  long long row = block.start + first;
  long long stride = (long long)heads * HEAD_DIM;
  write_rows(rows, memory + mine * LD, o + row * stride + head * HEAD_DIM, stride, lse ? lse + row * heads + head : lse, heads,
         length - first);
}
PARAMETERS(attention, 136, 132);
