// Persistent attention over packed sequences of 16-bit elements on compute capability 9.0, for sequences that are not
// short; bitwise equal to attention_hopper.cu. The Q K^T of a step is issued together with the P V of the previous
// step, which runs while softmax processes the scores (FlashAttention-3, Shah et al. 2024).
//
// A block is resident on its multiprocessor and loops over items: a head and up to ROWS queries of one sequence. Warps
// are specialised: one producer warp loads the tiles of all items in order by TMA into one circular buffer of slots; helper warps
// apply rotary positions to queries and keys in place; GROUPS consumer warpgroups have 64 queries each. So the next
// item is loaded while this one is computed, whatever the lengths, and no barrier spans the whole block.
//
// Invariant: a row of o is a function of its own sequence: keys are visited in steps of STEP from the sequence's
// start, in order, every row has its own running maximum, and masked keys add zeros. Only rows of sequences are
// written.
//
// Constants: HEAD_DIM (d), ROTARY, TABLE (element type of cos and sin), ALIBI, CAUSAL; for speed alone GROUPS, LOAD_GROUPS
// (the number of warpgroups that hold the producer and the helper warps) and SLOTS.

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "warpgroup.cuh"
#include "attention_wgmma.cuh"
#include "copies.cuh"
#include "attention_persistent_loads.cuh"

// Barrier of one warpgroup.
__device__ __forceinline__ void warpgroup_barrier() {
  asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / 128 + 1) : "memory");
}

// State of a warp's 16 queries. A thread has rows lane / 4 and lane / 4 + 8.
struct Rows : RowSums {
#if QUERIES_IN_SHARED
  u32 q; // descriptor of the warpgroup's queries in shared memory
#else
  u32 q[HEAD_DIM / 16][4];
#endif
};

// Descriptors of the tiles of a slot (tile_of), of which only the low half differs.
struct Tile {
  u32 low;
  __device__ __forceinline__ u64 at(int bytes) const {
    u64 r;
    asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "r"(low + bytes / 16), "r"(64u | 1u << 30));
    return r;
  }
};

// Issues q k^T of the warpgroup's rows and the keys of a step. (64, d) (STEP, d) -> (64, STEP)
__device__ __forceinline__ void scores(float (&s)[32], const Rows &rows, u32 k) {
  Tile tile = {k >> 4 | 64u << 16};
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; c++) {
    int at = c / 4 * TILE + c % 4 * 32;
#if QUERIES_IN_SHARED
    wgmma_shared(s, Tile{rows.q}.at(at), tile.at(at), c > 0);
#else
    wgmma<0>(s, rows.q[c], tile.at(at), c > 0);
#endif
  }
  wgmma_commit();
}

// Issues o += p v for the first 16 N keys of a step. (64, STEP) (STEP, d) -> (64, d)
template <int N> __device__ __forceinline__ void values(Rows &rows, const u32 (&p)[STEP / 16][4], u32 v) {
  Tile tile = {v >> 4 | 64u << 16};
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int c = 0; c < PANELS; c++) wgmma<1>(rows.o[c], p[n], tile.at(c * TILE + n * 2048), 1);
  wgmma_commit();
}

// Sets the scores of invisible keys to -inf: `left` keys exist from the thread's first key on, and key `before` from
// there is the last that its first row sees under a causal mask.
__device__ __forceinline__ void mask(float (&s)[32], int left, int before) {
#pragma unroll
  for (int n = 0; n < STEP / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int j = n * 8 + e % 2;
      if (j >= left || (CAUSAL && j > before + e / 2 * 8)) s[n * 4 + e] = -INFINITY;
    }
}

// Turns scores into exp2(score - row_max), with the running maxima of attention.cu; returns whether o must be rescaled for
// some row of the warp. `row` and `key` are this thread's first; `factor` and `slope` are in units of log2.
__device__ __forceinline__ bool softmax(float (&s)[32], Rows &rows, int row, int key, float factor, float slope) {
  float maximum[4]; // of this thread's keys; two for each row, as one would wait for itself
#pragma unroll
  for (int n = 0; n < STEP / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float &x = s[n * 4 + e];
#if ALIBI
      x = fmaf(x, factor, __fmul_rn(fabsf((float)(row + e / 2 * 8 - key) - (float)(n * 8 + e % 2)), -slope));
#endif
      maximum[e] = n ? fmaxf(maximum[e], x) : x;
    }
  maximum[0] = fmaxf(maximum[0], maximum[1]), maximum[1] = fmaxf(maximum[2], maximum[3]);
#if !ALIBI
  maximum[0] = __fmul_rn(maximum[0], factor), maximum[1] = __fmul_rn(maximum[1], factor);
#endif
  // Needs no exchange between the lanes of a row: the row's maximum exceeds the threshold if and only if that of one of
  // its lanes does, and the factor is positive. attention_hopper.cu exchanges first and gets the same bits.
  bool max_grew = __any_sync(~0u, maximum[0] > rows.row_max[0] + 8.0f || maximum[1] > rows.row_max[1] + 8.0f);
  if (max_grew) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float x = maximum[h];
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      bool up = x > rows.row_max[h] + 8.0f;
      float row_max = up ? x : rows.row_max[h];
      rows.correction[h] = up ? exp2_fast(rows.row_max[h] - row_max) : 1.0f;
      rows.row_max[h] = row_max;
      rows.sum[h] = __fmul_rn(rows.sum[h], rows.correction[h]);
    }
  }
#pragma unroll
  for (int n = 0; n < STEP / 8; n++) {
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
  return max_grew;
}

// Releases a slot: `release` by one lane for the whole warp, `release_by_lane` by each lane for itself.
__device__ __forceinline__ void release(const RingBuffer &ring, SlotCursor &cursor) {
  if (threadIdx.x % 32 == 0) arrive(ring.empty(cursor.slot), 32);
}
__device__ __forceinline__ void release_by_lane(const RingBuffer &ring, SlotCursor &cursor) {
  arrive(ring.empty(cursor.slot));
}
__device__ __forceinline__ void wait_ready(const RingBuffer &ring, const SlotCursor &cursor) {
  wait(ring.ready(cursor.slot), cursor.parity);
}
// Waits for and releases slots that this warpgroup does not use.
// Without the wait, a warpgroup far ahead could arrive twice in one round of `empty`, which counts arrivals only, and
// the slot would be filled again while others read it.
__device__ __forceinline__ void skip_slots(const RingBuffer &ring, SlotCursor &cursor, int slots) {
  for (int i = 0; i < slots; i++, cursor.next()) {
    wait_ready(ring, cursor);
    __syncwarp();
    release(ring, cursor);
  }
}

// A tile of queries and its progress through its keys.
struct KeyLoop {
  const RingBuffer &ring;
  SlotCursor cursor;
  Rows rows;
  u32 p[STEP / 16][4];
  int row, keys;
  float factor, slope;

  // Applies mask and softmax to the scores of step t; LAST: some keys of the step are masked. (64, STEP)
  template <bool LAST> __device__ __forceinline__ bool mask_and_softmax(float (&s)[32], int t) {
    int key = t * STEP + threadIdx.x % 4 * 2;
    if (LAST) mask(s, keys - key, row - key);
    return softmax(s, rows, row, key, factor, slope);
  }

  template <bool LAST> __device__ __forceinline__ void first() {
    float s[32];
    wait_ready(ring, cursor);
    scores(s, rows, ring.slot(cursor.slot));
    wgmma_wait<0>();
    pin_accumulators(s);
    release(ring, cursor);
    cursor.next();
    mask_and_softmax<LAST>(s, 0);
    pack_weights(p, s);
  }

  // Scores of step t and values of step t - 1. No branches while wgmma runs: ptxas would serialise them.
  template <bool LAST> __device__ __forceinline__ void step(int t) {
    float s[32];
    SlotCursor before = cursor; // of the values
    cursor.next();
    wait_ready(ring, before);
    wait_ready(ring, cursor);
    scores(s, rows, ring.slot(cursor.slot));
    values<STEP / 16>(rows, p, ring.slot(before.slot));
    wgmma_wait<1>();
    pin_accumulators(s);
    bool max_grew = mask_and_softmax<LAST>(s, t);
    // The condition is always true. It depends on the sums, so the release stays behind the exponentials, and it must
    // precede the wait, which the assembler would otherwise move in front of them.
    if (!(rows.sum[0] + rows.sum[1] < 0.0f)) release(ring, cursor);
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < PANELS; c++) pin_accumulators(rows.o[c]);
    release(ring, before);
    cursor.next();
    if (max_grew) rescale(rows);
    pack_weights(p, s);
  }

  __device__ __forceinline__ void last(int left) {
    wait_ready(ring, cursor);
    u32 v = ring.slot(cursor.slot);
    if (left > 48) values<4>(rows, p, v);
    else if (left > 32) values<3>(rows, p, v);
    else if (left > 16) values<2>(rows, p, v);
    else values<1>(rows, p, v);
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < PANELS; c++) pin_accumulators(rows.o[c]);
    release(ring, cursor);
    cursor.next();
  }
};

// The warp's staging rows: its queries, later its output. Reads the thread id again to save a register.
__device__ __forceinline__ u32 staging_rows(const RingBuffer &ring) {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return ring.staging() + (thread / 32 - LOAD_GROUPS * 4) * (2048 * PANELS);
}

// Moves this warp's queries to where wgmma reads them: registers, or `staging`.
__device__ __forceinline__ void load_queries(const RingBuffer &ring, SlotCursor &cursor, Rows &rows, u32 staging) {
  wait_ready(ring, cursor);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  u32 from = ring.slot(cursor.slot) + warp * 2048;
#if QUERIES_IN_SHARED
#pragma unroll
  for (int i = 0; i < 4; i++) store_shared(staging + (i * 32 + lane) * 16, load_shared(from + (i * 32 + lane) * 16));
  rows.q = (staging - warp * 2048) >> 4 | 64u << 16;
#else
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; c++)
    ldmatrix(rows.q[c], from + c / 4 * TILE + tile_at(lane % 16, c % 4 * 2 + lane / 16));
#endif
  fence_async();
  release_by_lane(ring, cursor);
  cursor.next();
#if QUERIES_IN_SHARED
  warpgroup_barrier(); // wgmma of any warp reads the rows of all four
#endif
}

// Computes the rows of o of tile m of an item, whose queries come next in the circular buffer.
__device__ __forceinline__ void attend_tile(const RingBuffer &ring, SlotCursor &cursor, const Item &item, int m, int tiles,
                                            int steps, u16 *o, float *lse, int heads, float factor, float slope) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, first = item.first + m * 64;
  int visible_steps = CAUSAL ? min(steps, first / STEP + 1) : steps; // steps that some row sees
  int keys = CAUSAL ? min(item.length, visible_steps * STEP) : item.length;
  skip_slots(ring, cursor, m);
  KeyLoop key_loop = {ring, cursor};
  Rows &rows = key_loop.rows;
  key_loop.row = first + warp * 16 + lane / 4, key_loop.keys = keys, key_loop.factor = factor, key_loop.slope = slope;
  load_queries(ring, key_loop.cursor, rows, staging_rows(ring));
  skip_slots(ring, key_loop.cursor, tiles - m - 1);
  rows.clear();
  if (visible_steps == 1) key_loop.first<true>();
  else key_loop.first<false>();
#pragma unroll 1
  for (int t = 1; t < visible_steps - 1; t++) key_loop.step<false>(t);
  if (visible_steps > 1) key_loop.step<true>(visible_steps - 1);
  key_loop.last(keys - (visible_steps - 1) * STEP);
  cursor = key_loop.cursor;
  skip_slots(ring, cursor, 2 * (steps - visible_steps));
#if QUERIES_IN_SHARED
  warpgroup_barrier(); // no warpgroup reads these queries any more
#endif

  int at = first + warp * 16, remaining = item.length - at;
  if (remaining <= 0) return;
  long long to = (long long)(item.start + at) * heads + item.head;
  write_rows<2048, true>(rows, staging_rows(ring), o + to * HEAD_DIM, lse ? lse + to : lse, heads, remaining);
}

// q: (T, H d), k, v: (T, G d) from columns of their matrices on; spans: (S, 2); cos, sin: (longest, d/2); o: (T, H d);
// lse: (T, H).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention(const __grid_constant__ Map q, const __grid_constant__ Map k, const __grid_constant__ Map v, int k_column,
          int v_column, const int *spans, int sequences, int tokens, const Angle *cosines, const Angle *sines, int longest,
          u16 *o, float *lse, int heads, int group, float scale, u32 *status) {
  extern __shared__ __align__(1024) u16 memory[];
  RingBuffer ring = {shared_address(memory)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) init(ring.full(i), 1), init(ring.ready(i), 32), init(ring.empty(i), GROUPS * 128);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  after_predecessors();
  if (threadIdx.x < LOAD_GROUPS * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGISTERS));
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    Operands operands = {q, k, v, k_column, v_column, group};
    if (warp == 0) produce(ring, operands, spans, sequences, tokens, longest, heads, status);
    else run_helper(ring, warp - 1, cosines, sines);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    float factor = __fmul_rn(scale, LOG2E);
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - LOAD_GROUPS, turn = 0;
    SlotCursor cursor = {0, 0};
    while (true) {
      wait_ready(ring, cursor);
      Item item = ring.item(cursor.slot);
      if (item.length <= 0) break;
      // Tiles go to the warpgroups in turn across items. If every item began with the first warpgroup, items of one
      // tile would all be computed by it. Every warpgroup sees every item, so all agree on `turn`.
      int tiles = item.tiles(), steps = item.steps(), m = warpgroup - turn;
      if (m < 0) m += GROUPS;
      turn += tiles;
      if (turn >= GROUPS) turn -= GROUPS;
      if (m >= tiles) {
        skip_slots(ring, cursor, tiles + 2 * steps);
        continue;
      }
      float slope = ALIBI ? __fmul_rn(alibi_slope(item.head, heads), LOG2E) : 0.0f;
      attend_tile(ring, cursor, item, m, tiles, steps, o, lse, heads, factor, slope);
    }
  }
}
PARAMETERS(attention, 3 * sizeof(Map) + 88, 3 * sizeof(Map) + 80);
