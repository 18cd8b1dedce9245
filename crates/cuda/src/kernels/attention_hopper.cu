// Attention over packed sequences of 16-bit elements for heads of 64 and 128 columns on compute capability 9.0: the
// arithmetic of attention.cu by wgmma, in the order of FlashAttention-3 (Shah et al. 2024): Q K^T of a step is issued
// together with P V of the previous step, which runs while softmax processes the scores.
//
// Invariant: a row of o is a function of its own sequence, with the same bits in every variant: keys are
// visited in steps of STEP from the sequence's start, in order, every row has its own running maximum, and
// masked keys add zeros. The variant (GROUPS, MT, STAGES) decides which warpgroup has a row and when keys are
// loaded, which affects speed only. Only rows of sequences are written.
//
// Constants: HEAD_DIM (d), ROTARY, TABLE (element type of cos and sin), ALIBI, CAUSAL, BLOCKS per multiprocessor, and
// the variant.
//
// Work: a block computes ROWS queries of one head of one sequence (with one warpgroup, of several heads one after
// another): GROUPS warpgroups with MT tiles of 64 queries each. A warpgroup's queries, sums and weights are in
// registers; keys and values are read by wgmma from shared memory.
//
// Shared memory: (ROWS, d) of q, reused for o, and STAGES stages of (STEP, d) of k and of v, in tiles of 64 columns
// with the 128-byte swizzle of wgmma (`tile_at`). A sequence of at most STAGES steps is loaded once, as a whole
// ("resident"); longer sequences cycle through the stages.
//
// Copies: cp.async. Each thread rotates the elements that it has copied itself. A proxy fence, then a barrier, order
// these writes before the reads of wgmma. While step t is multiplied, the values of step t - 1 are still read, so
// that copies are issued into the stage of step t - 2.

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "warpgroup.cuh"
#include "attention_wgmma.cuh"

#define ROWS (GROUPS * MT * 64)
#define THREADS (GROUPS * 128)
#define PAIRS (HALF / 8) // pairs of words of 16 bytes that are rotated together, of a row
#define STAGE (2 * PANELS * TILE)
static_assert(STAGES >= 3, "a stage is read, one is next, one is fetched");

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes to shared memory asynchronously; stores zeros unless `valid`.
__device__ __forceinline__ void copy(u32 to, const u16 *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// The 16-byte words of a step that this thread copies and rotates: in row `row` and the rows at multiples of
// ROW_STEP from it, the word at offset `low` and its rotary partner, half a head further, at `high`. The rows are assigned so
// that eight neighbouring lanes access different banks; ROW_STEP is a multiple of 8, so that the swizzle does not
// change.
#define ROW_STEP (THREADS / PAIRS)
#define ROWS_PER_THREAD (STEP / ROW_STEP)
static_assert(ROW_STEP % 8 == 0 && STEP % ROW_STEP == 0, "the swizzle is the same in all of a thread's rows");
struct Pairs { int row, column; u32 low, high; };
__device__ __forceinline__ Pairs pairs_now() {
  int thread = thread_now(), line = thread / PAIRS, word = thread % PAIRS;
  int row = PAIRS == 4 ? line / 8 * 8 + line % 2 * 4 + line / 2 % 4 : line;
  u32 low = tile_at(row, word);
  return {row, word * 8, low, PAIRS == 4 ? low ^ 64 : low + TILE};
}

// Copies a step's rows of one head to shared memory, zeros for rows from `rows` on. A thread copies exactly the words
// that it will rotate, so that it needs to wait for its own copies only. (STEP, d)
__device__ __forceinline__ void fetch_pairs(u32 to, const u16 *from, long long stride, int rows) {
  Pairs pairs = pairs_now();
  const u16 *x = from + pairs.row * stride + pairs.column;
#pragma unroll
  for (int i = 0; i < ROWS_PER_THREAD; i++) {
    bool valid = pairs.row + i * ROW_STEP < rows;
    const u16 *low = valid ? x + i * ROW_STEP * stride : from;
    copy(to + pairs.low + i * ROW_STEP * 128, low, valid);
    copy(to + pairs.high + i * ROW_STEP * 128, low + HALF, valid);
  }
}

// As `fetch_pairs`, for rows that are not rotated: neighbouring threads copy neighbouring words.
__device__ __forceinline__ void fetch(u32 to, const u16 *from, long long stride, int rows) {
  constexpr int per = PANELS * 8, next = THREADS / per;
  int thread = thread_now(), row = thread / per, word = thread % per;
  u32 at = to + word / 8 * TILE + tile_at(row, word % 8);
  const u16 *x = from + row * stride + word * 8;
#pragma unroll
  for (int i = 0; i < STEP / next; i++) {
    bool valid = row + i * next < rows;
    copy(at + i * next * 128, valid ? x + i * next * stride : from, valid);
  }
}

// Rotates 8 adjacent columns and their partners in place in shared memory.
__device__ __forceinline__ void rotate_words(u32 low, u32 high, const float (&cosine)[8], const float (&sine)[8]) {
  uint4 x = load_shared(low), y = load_shared(high);
  rotate_pairs(x, y, cosine, sine);
  store_shared(low, x), store_shared(high, y);
}

// Applies rotary embedding to a step's rows in shared memory; row 0 has number `position` in the sequence. With
// TWO, also to a second tile with equal positions (queries and keys), so that the angles are read once. cos,
// sin: (longest, d/2)
template <bool TWO>
__device__ __forceinline__ void rotate(u32 one, u32 two, const Angle *cosines, const Angle *sines, int position, int rows) {
#if ROTARY
  Pairs pairs = pairs_now();
#pragma unroll 1
  for (int i = 0; i < ROWS_PER_THREAD; i++) {
    int row = pairs.row + i * ROW_STEP;
    if (row >= rows) break; // rows behind the sequence are zeros and need no rotation
    float cosine[8], sine[8];
    int entry = (position + row) * HALF + pairs.column;
    load_many<TABLE, 8>(cosines + entry, cosine), load_many<TABLE, 8>(sines + entry, sine);
    rotate_words(one + pairs.low, one + pairs.high, cosine, sine);
    if (TWO) rotate_words(two + pairs.low, two + pairs.high, cosine, sine);
    pairs.low += ROW_STEP * 128, pairs.high += ROW_STEP * 128;
  }
#endif
}

// Keys and values of one head of the sequence, and the stages in shared memory that they are copied to.
struct Keys {
  const u16 *k, *v;
  long long stride;
  const Angle *cosines, *sines;
  int length, steps;
  u32 stages;

  __device__ __forceinline__ u32 stage(int t) const { return stages + t % STAGES * STAGE; }
  __device__ __forceinline__ u32 values(int t) const { return stage(t) + STAGE / 2; }
  __device__ __forceinline__ void copy_keys(int t) const {
    fetch_pairs(stage(t), k + (long long)t * STEP * stride, stride, length - t * STEP);
  }
  __device__ __forceinline__ void copy_values(int t) const {
    fetch(values(t), v + (long long)t * STEP * stride, stride, length - t * STEP);
  }
  // Starts the copies of step t. Behind the last step the group is empty, but is committed, so that `wait`
  // counts right.
  __device__ __forceinline__ void start_copies(int t) const {
    if (t < steps) copy_keys(t), copy_values(t);
    commit();
  }
  __device__ __forceinline__ void rotate_keys(int t) const {
    rotate<false>(stage(t), 0, cosines, sines, t * STEP, length - t * STEP);
  }
  // Makes step t visible to all warps: waits for this thread's copies, rotates the keys, and passes the barrier. All
  // warps have then finished with step t - 2, whose stage receives step t + STAGES - 2. The fence comes before the
  // barrier, since it orders the writes of its own thread only.
  __device__ __forceinline__ void make_visible(int t) const {
    // The groups up to step t + STAGES - 3 have been committed: the newest STAGES - 3 are those behind step t. (At step
    // 0 there is one more, from `begin`, which is why step 0 starts no copies.)
    wait<STAGES - 3>();
    rotate_keys(t);
    fence_async();
    __syncthreads();
    if (t > 0) start_copies(t + STAGES - 2);
  }
};

// State of a warp's 16 queries. A thread has rows lane / 4 and lane / 4 + 8.
struct Rows : RowSums {
  u32 q[HEAD_DIM / 16][4];
};

// Issues s = q k^T of the warpgroup's rows and the keys of a step, asynchronously. (64, d) (STEP, d) -> (64, STEP)
__device__ __forceinline__ void scores(float (&s)[32], const Rows &rows, u32 k) {
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; c++) wgmma<0>(s, rows.q[c], tile_of(k + c / 4 * TILE + c % 4 * 32), c > 0);
  wgmma_commit();
}

// Issues o += p v for the first 16 N keys of a step, asynchronously. (64, STEP) (STEP, d) -> (64, d)
template <int N> __device__ __forceinline__ void values(Rows &rows, const u32 (&p)[STEP / 16][4], u32 v) {
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int c = 0; c < PANELS; c++) wgmma<1>(rows.o[c], p[n], tile_of(v + c * TILE + n * 2048), 1);
  wgmma_commit();
}

// Online softmax of one step as in attention.cu: replaces scores by exp2(score - row_max), updates `row_max` and `sum`,
// and sets `correction`. Returns whether o must be rescaled for any row of the warp; the caller does it, because P
// V of the previous step may still be writing o. `row` and `key` are this thread's first row and key; `factor`
// and `slope` include log2(e).
template <bool MASKED>
__device__ __forceinline__ bool softmax(float (&s)[32], Rows &rows, int row, int key, int keys, float factor, float slope) {
  int left = MASKED ? keys - thread_now() % 4 * 2 : 0; // from the thread's own first key on
  bool max_grew = false;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int i = row + h * 8;
    float maximum = -INFINITY;
#pragma unroll
    for (int n = 0; n < STEP / 8; n++) {
      if (MASKED && n % 2 == 0 && n * 8 >= keys) break;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float &x = s[n * 4 + h * 2 + e];
        int j = n * 8 + e; // after `key`
#if ALIBI
        x = fmaf(x, factor, __fmul_rn(fabsf((float)(i - key) - (float)j), -slope));
#endif
        if (MASKED && (j >= left || (CAUSAL && key + j > i))) x = -INFINITY;
        maximum = fmaxf(maximum, x);
      }
    }
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
#if !ALIBI
    maximum = __fmul_rn(maximum, factor);
#endif
    rows.correction[h] = 1.0f;
    if (maximum > rows.row_max[h] + 8.0f) {
      rows.correction[h] = exp2_fast(rows.row_max[h] - maximum);
      rows.row_max[h] = maximum;
      max_grew = true;
    }
    rows.sum[h] = __fmul_rn(rows.sum[h], rows.correction[h]);
  }
#pragma unroll
  for (int n = 0; n < STEP / 8; n++) {
    if (MASKED && n % 2 == 0 && n * 8 >= keys) break;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float &x = s[n * 4 + e];
#if ALIBI
      x = exp2_fast(x - rows.row_max[e / 2]);
#else
      x = exp2_fast(fmaf(x, factor, -rows.row_max[e / 2]));
#endif
      rows.sum[e / 2] += x;
    }
  }
  return __any_sync(~0u, max_grew);
}

// Computes o of a warpgroup's 64 queries, from number `first` of the sequence on; `mine` is the address of this
// warp's 16 queries in shared memory and `visible_keys` the number of keys that the block's queries see. In the loop, Q
// K^T of step t and P V of step t - 1 are in flight together; the softmax of step t runs while P V finishes.
__device__ __forceinline__ void attend(Rows &rows, const Keys &keys, bool resident, int visible_keys, int first, u32 mine,
                                       float factor, float slope) {
  int lane = threadIdx.x % 32, row = first + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; c++)
    ldmatrix(rows.q[c], mine + c / 4 * TILE + tile_at(lane % 16, c % 4 * 2 + lane / 16));
  rows.clear();
  float s[32];
  u32 p[STEP / 16][4];
  auto mask_and_softmax = [&](int t) {
    int key = t * STEP, left = visible_keys - key, mine = key + lane % 4 * 2;
    bool whole = left >= STEP && (!CAUSAL || key + STEP <= first + 1);
    return whole ? softmax<false>(s, rows, row, mine, STEP, factor, slope)
                 : softmax<true>(s, rows, row, mine, left, factor, slope);
  };
  if (!resident) keys.make_visible(0);
  scores(s, rows, keys.stage(0));
  wgmma_wait<0>();
  pin_accumulators(s);
  mask_and_softmax(0);
  pack_weights(p, s);
  for (int t = 1; t < keys.steps; t++) {
    if (!resident) keys.make_visible(t);
    scores(s, rows, keys.stage(t));
    values<STEP / 16>(rows, p, keys.values(t - 1));
    wgmma_wait<1>(); // groups finish in order: the scores have arrived, P V may still run
    pin_accumulators(s);
    bool max_grew = mask_and_softmax(t);
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < PANELS; c++) pin_accumulators(rows.o[c]);
    if (max_grew) rescale(rows);
    pack_weights(p, s);
  }
  // The last step has 1 to 64 keys; weights behind the last block of 16 keys were not computed and are not used.
  int left = visible_keys - (keys.steps - 1) * STEP;
  u32 last = keys.values(keys.steps - 1);
  if (left > 48) values<4>(rows, p, last);
  else if (left > 32) values<3>(rows, p, last);
  else if (left > 16) values<2>(rows, p, last);
  else values<1>(rows, p, last);
  wgmma_wait<0>();
#pragma unroll
  for (int c = 0; c < PANELS; c++) pin_accumulators(rows.o[c]);
}

// Loads and rotates the block's `remaining` queries, and starts the copies of keys and values: all of them if
// `resident`, else the first STAGES - 1 steps. `together`: queries and keys have equal positions and are
// rotated in one pass.
__device__ __forceinline__ void begin(const Keys &keys, bool resident, bool together, u32 queries, const u16 *q,
                                      long long q_stride, int first, int remaining) {
  int tiles = min(GROUPS * MT, (remaining + STEP - 1) / STEP);
#pragma unroll 1
  for (int m = 0; m < tiles; m++)
    fetch_pairs(queries + m * PANELS * TILE, q + (long long)m * STEP * q_stride, q_stride, remaining - m * STEP);
  if (resident) {
#pragma unroll 1
    for (int t = 0; t < keys.steps; t++) keys.copy_keys(t);
    commit();
#pragma unroll 1
    for (int t = 0; t < keys.steps; t++) keys.copy_values(t);
    commit();
    wait<1>(); // q and k have arrived; the copies of v continue while k is rotated
  } else {
    commit();
    for (int t = 0; t < STAGES - 1; t++) keys.start_copies(t);
    wait<STAGES - 1>();
  }
#pragma unroll 1
  for (int m = 0; m < tiles; m++) {
    u32 at = queries + m * PANELS * TILE;
    if (together) rotate<true>(at, keys.stage(m), keys.cosines, keys.sines, m * STEP, remaining - m * STEP);
    else rotate<false>(at, 0, keys.cosines, keys.sines, first + m * STEP, remaining - m * STEP);
  }
  if (resident) {
#pragma unroll 1
    for (int t = together ? tiles : 0; t < keys.steps; t++) keys.rotate_keys(t);
    wait<0>();
    fence_async();
  }
  __syncthreads();
}

// Computes o of the block's queries for one head. `o` and `lse` point to the first query's row.
__device__ __forceinline__ void attend_block(const Keys &keys, bool resident, int visible_keys, u32 queries, int first, int remaining,
                                             u16 *o, float *lse, int heads, float factor, float slope) {
#pragma unroll 1
  for (int i = 0; i < MT; i++) {
    int m = i * GROUPS + threadIdx.x / 128, warp = threadIdx.x / 32 % 4, mine = m * STEP + warp * 16;
    // Without resident keys all warpgroups take part in the barriers of `make_visible`, so that they must leave together.
    if ((resident ? m : i * GROUPS) * STEP >= remaining) break;
    if (i > 0 && !resident) {
      __syncthreads(); // all warps have read the stages for the last time in the round before
      for (int t = 0; t < STAGES - 1; t++) keys.start_copies(t);
    }
    Rows rows;
    u32 staging = queries + m * PANELS * TILE + warp * 2048;
    attend(rows, keys, resident, visible_keys, first + m * STEP, staging, factor, slope);
    if (mine >= remaining) continue;
    write_rows<TILE, false>(rows, staging, o + (long long)mine * heads * HEAD_DIM, lse ? lse + (long long)mine * heads : lse, heads,
               remaining - mine);
  }
}

// q: (T, H d), k, v: (T, G d), each with the stride of its rows; spans: (S, 2); cos, sin: (longest, d/2); o:
// (T, H d); lse: (T, H) or null. Grid: a block for every `heads_per_block` heads (1 if GROUPS > 1) and each number
// below T / ROWS + S (`block_of`).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention(ATTENTION_PARAMETERS) {
  after_predecessors();
  extern __shared__ __align__(1024) u16 memory[]; // (ROWS, d) of q, later o; STAGES times k and v: (STEP, d) each
  int head_groups = (heads + heads_per_block - 1) / heads_per_block;
  int number = blockIdx.x / head_groups, head = blockIdx.x % head_groups * heads_per_block;
  if (head == 0 && threadIdx.x == 0) check_span(spans, sequences, tokens, ROTARY ? longest : tokens, number, status);
  Block block = block_of<ROWS>(spans, sequences, number);
  int length = block.end - block.start, remaining = length - block.first;
  if (block.first >= length || block.first < 0 || block.start < 0 || block.end > tokens) return;
  if (ROTARY && length > longest) return;

  u32 queries = shared_address(memory);
  int visible_keys = CAUSAL ? min(length, block.first + ROWS) : length; // keys that any row of the block sees
  Keys keys = {k, v, kv_stride, cosines, sines, length, (visible_keys + STEP - 1) / STEP, queries + ROWS * PANELS * 128};
  bool resident = keys.steps <= STAGES;
  float factor = __fmul_rn(scale, LOG2E);
  long long row = block.start + block.first;
  int last = GROUPS > 1 ? head + 1 : min(heads, head + heads_per_block);
#pragma unroll 1
  while (true) {
    long long at = (long long)block.start * kv_stride + head / group * HEAD_DIM;
    keys.k = k + at, keys.v = v + at;
    begin(keys, resident, resident && block.first == 0 && !CAUSAL, queries, q + row * q_stride + head * HEAD_DIM, q_stride,
          block.first, remaining);
    float slope = ALIBI ? __fmul_rn(alibi_slope(head, heads), LOG2E) : 0.0f;
    attend_block(keys, resident, visible_keys, queries, block.first, remaining, o + (row * heads + head) * HEAD_DIM,
                 lse ? lse + row * heads + head : lse, heads, factor, slope);
    if (GROUPS > 1 || ++head >= last) return;
    __syncthreads(); // all warps have read this head's keys before the next head's are copied over them
  }
}
PARAMETERS(attention, 136, 132);
