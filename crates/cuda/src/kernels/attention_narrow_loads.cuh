// Loads of attention_narrow.cu, whose constants apply here: loader warps copy queries, keys and values to
// shared memory by cp.async and apply rotary embedding in place, while the other warps compute. Blocks are
// persistent: each loops over items, an item being one head of up to ROWS queries of one sequence with all its
// keys, TILE at a time. The loader warps walk through the sequence spans and load the next item while the current
// one is computed.
//
// Invariant: slots are filled, read and released in the order of their numbers, synchronised by barriers alone;
// the rotation of a row is a function of the row and its position.

#pragma once

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "copies.cuh"

#define THREADS ((WARPS + LOAD_WARPS) * 32)
#define ROWS (WARPS * MT * 16)        // queries of an item
#define HALF (HEAD_DIM / 2)
#define CHUNKS (HEAD_DIM / 8)         // 16-byte words of a row
#define ROW (HEAD_DIM * 2)            // bytes of a row
#define PAIRS (HALF % 8 == 0 ? 8 : 4) // columns of a half that a thread rotates at once
#define PASSES (TYPE == 1 ? 1 : 2)    // passes over an item's keys: f16 finds the maxima first
static_assert(HEAD_DIM == 16 || HEAD_DIM == 24 || HEAD_DIM == 32, "a narrow head");
static_assert(TILE % 16 == 0, "blocks of 16 keys");

// The thread's lane in its warp. The asm is volatile so that the compiler reads it again at each use: addresses
// derived from it are then recomputed and do not occupy registers between their uses.
__device__ __forceinline__ u32 lane_now() { u32 x; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x)); return x % 32; }

// Byte offset of a row's 16-byte word in shared memory, swizzled so that an equal word of eight rows, as
// ldmatrix reads them, falls into different banks. Rows of 48 bytes need no swizzle.
__device__ __forceinline__ u32 swizzled_offset(u32 row, u32 word) {
  const u32 turned = HEAD_DIM == 16 ? word ^ row / 4 % 2 : HEAD_DIM == 32 ? word ^ row / 2 % 4 : word;
  return row * ROW + turned * 16;
}

// A unit of work: one head of up to ROWS queries, from number `first` on, of the sequence that starts at row
// `start`. An item of length 0 marks the end.
struct __align__(16) Item { int start, length, first, head; };

// Shared memory: STAGES slots with a tile of keys and of values each, and two buffers for an item and its
// queries, used alternately. Barriers: `full`, the loader warps have filled the slot (and the buffer of queries, if
// an item begins there); `empty`, all computing warps have released the slot; `item_released`, they have released
// the item and its queries.
struct Memory {
  u16 queries[2][ROWS * HEAD_DIM];
  u16 keys[STAGES][TILE * HEAD_DIM], values[STAGES][TILE * HEAD_DIM];
  Item items[2];
  u64 full[STAGES], empty[STAGES], item_released[2];
};
__device__ __forceinline__ void wait_for(const u64 &barrier, u32 parity) { wait(shared_address(&barrier), parity); }
// Arrives, by every lane. One lane behind a __syncwarp would suffice in PTX's memory model, but compute-sanitizer's
// racecheck does not follow that order.
__device__ __forceinline__ void signal(const u64 &barrier) { arrive(shared_address(&barrier)); }

// A warp's position: the slot and the buffer of queries, each with the parity of its current round.
struct SlotCursor {
  int slot, queries;
  u32 parity, item_parity;
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  __device__ __forceinline__ void next_item() {
    if (++queries == 2) queries = 0, item_parity ^= 1;
  }
};

// Rotary embedding of two adjacent columns a and their partners b in the other half (Su et al. 2021), by two angles:
// (a, b) -> (a cos - b sin, b cos + a sin), then multiplied by `factor` if SCALED, before the rounding to 16 bits.
template <bool SCALED>
__device__ __forceinline__ void rotate(u32 &a, u32 &b, const Angle *cosines, const Angle *sines, float factor) {
  float u[2], v[2], x[2], y[2];
  unpack<TYPE>(a, u[0], u[1]);
  unpack<TYPE>(b, v[0], v[1]);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float cos = widen<TABLE>(cosines[e]), sin = widen<TABLE>(sines[e]);
    x[e] = fmaf(u[e], cos, -__fmul_rn(v[e], sin)), y[e] = fmaf(v[e], cos, __fmul_rn(u[e], sin));
    if (SCALED) x[e] = __fmul_rn(factor, x[e]), y[e] = __fmul_rn(factor, y[e]);
  }
  a = pack<TYPE>(x[0], x[1]);
  b = pack<TYPE>(y[0], y[1]);
}

// N elements or angles, accessed in words of up to 16 bytes.
template <int BYTES> struct Words { typedef uint4 type; };
template <> struct Words<8> { typedef uint2 type; };
template <typename X, int N> struct __align__(16) Vector {
  static const int BYTES = N * sizeof(X) < 16 ? N * sizeof(X) : 16, MANY = N * sizeof(X) / BYTES;
  typedef typename Words<BYTES>::type Word;
  union {
    X x[N];
    u32 words[N * sizeof(X) / 4];
    Word whole[MANY];
  };
  __device__ __forceinline__ void load(const X *from) {
#pragma unroll
    for (int i = 0; i < MANY; i++) whole[i] = __ldg((const Word *)from + i);
  }
};
typedef Vector<u16, PAIRS> Pairs;
typedef Vector<Angle, PAIRS> Angles;

// Rotates PAIRS adjacent columns of a row from `column` on, and their partners d/2 columns further, in shared memory.
template <bool SCALED>
__device__ __forceinline__ void rotate_row(u16 *tile, u32 row, u32 column, const Angles &cosines, const Angles &sines, float factor) {
  const u32 partner = column + HALF;
  Pairs::Word *low = (Pairs::Word *)((char *)tile + swizzled_offset(row, column / 8) + column % 8 * 2);
  Pairs::Word *high = (Pairs::Word *)((char *)tile + swizzled_offset(row, partner / 8) + partner % 8 * 2);
  Pairs a, b;
  a.whole[0] = *low, b.whole[0] = *high;
#pragma unroll
  for (int e = 0; e < PAIRS / 2; e++) rotate<SCALED>(a.words[e], b.words[e], cosines.x + 2 * e, sines.x + 2 * e, factor);
  *low = a.whole[0], *high = b.whole[0];
}

// Inputs of the kernel; `factor`, scale times log2(e), multiplies the queries.
struct Operands {
  const u16 *q, *k, *v;
  long long q_stride, kv_stride;
  const Angle *cosines, *sines;
  float factor;
};

// Rotates n keys and m queries by one warp, and scales the queries; row 0 of both has number `position` in the
// sequence, so that the angles are read once.
__device__ __forceinline__ void rotate_rows(const Operands &x, u16 *keys, u32 n, u16 *queries, u32 m, u32 position) {
  constexpr u32 PER = HALF / PAIRS; // lanes per row; eight adjacent lanes have different rows, so other banks
  const u32 end = (max(n, m) + 7) / 8 * 8 * PER;
#pragma unroll 1
  for (u32 i = lane_now(); i < end; i += 32) {
    const u32 row = i / (8 * PER) * 8 + i % 8, column = i / 8 % PER * PAIRS;
    if (row >= n && row >= m) continue;
    Angles cosines, sines;
    cosines.load(x.cosines + (position + row) * HALF + column), sines.load(x.sines + (position + row) * HALF + column);
    if (row < n) rotate_row<false>(keys, row, column, cosines, sines, 1.0f);
    if (row < m) rotate_row<true>(queries, row, column, cosines, sines, x.factor);
  }
}

// Starts copies of `rows` rows of a head by one warp, and stores zeros behind the last row up to a multiple of
// 16. (rows, d)
__device__ __forceinline__ void fetch(u16 *to, const u16 *from, long long stride, int rows) {
  constexpr int STEP = CHUNKS == 3 ? 32 : 32 / CHUNKS, MANY = STEP * CHUNKS / 32; // rows at a time, words per lane
  const int padded = (rows + 15) / 16 * 16;
  const u32 lane = lane_now();
  int row[MANY];
  u32 at[MANY];
  const u16 *x[MANY];
#pragma unroll
  for (int j = 0; j < MANY; j++) {
    const u32 i = lane + j * 32;
    row[j] = i / CHUNKS, at[j] = shared_address(to) + swizzled_offset(i / CHUNKS, i % CHUNKS), x[j] = from + row[j] * stride + i % CHUNKS * 8;
  }
#pragma unroll 4
  for (int i = 0; i < padded; i += STEP)
#pragma unroll
    for (int j = 0; j < MANY; j++) {
      if (MANY == 1 || i + row[j] < padded)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     ::"r"(at[j]), "l"(x[j]), "r"(i + row[j] < rows ? 16 : 0) : "memory");
      at[j] += STEP * ROW, x[j] += STEP * stride;
    }
}
__device__ __forceinline__ void fetched() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// Loads an item's queries, and its keys and values tile by tile. Each of the LOAD_WARPS warps has a share of the rows, a
// multiple of 16, and copies and rotates it alone.
__device__ __forceinline__ void load_item(Memory &m, SlotCursor &cursor, const Operands &x, const Item &item, int load_warp) {
  const long long head = item.head * HEAD_DIM, kv = item.start * x.kv_stride + head;
  const u16 *q = x.q + (item.start + item.first) * x.q_stride + head;
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++)
#pragma unroll 1
    for (int from = 0; from < item.length; from += TILE, cursor.next()) {
      const bool begins = from == 0 && pass == 0;
      const int slot = cursor.slot, keys = min(item.length - from, TILE), queries = begins ? min(item.length - item.first, ROWS) : 0;
      const int rows_per_warp = (max(keys, queries) + LOAD_WARPS * 16 - 1) / (LOAD_WARPS * 16) * 16, row = load_warp * rows_per_warp;
      const int n = max(0, min(keys - row, rows_per_warp)), query_rows = max(0, min(queries - row, rows_per_warp));
      u16 *to_q = m.queries[cursor.queries] + row * HEAD_DIM, *to_k = m.keys[slot] + row * HEAD_DIM;
      wait_for(m.empty[slot], cursor.parity ^ 1);
      if (begins) {
        wait_for(m.item_released[cursor.queries], cursor.item_parity ^ 1);
        if (load_warp == 0 && lane_now() == 0) m.items[cursor.queries] = item;
        fetch(to_q, q + row * x.q_stride, x.q_stride, query_rows);
      }
      fetch(to_k, x.k + kv + (from + row) * x.kv_stride, x.kv_stride, n);
      fetch(m.values[slot] + row * HEAD_DIM, x.v + kv + (from + row) * x.kv_stride, x.kv_stride, n);
      fetched();
      // In the first item of a sequence, queries and first keys have equal positions and rows_per_warp the loads of the
      // angles.
      rotate_rows(x, to_k, n, to_q, item.first == 0 ? query_rows : 0, from + row);
      if (item.first > 0) rotate_rows(x, to_k, 0, to_q, query_rows, item.first + row);
      __syncwarp();
      signal(m.full[slot]);
    }
  cursor.next_item();
}

// One of 32 sequences per lane: its rows, its number of items, and the inclusive prefix sum of items over the lanes.
struct Sequences {
  int start, length, items, sum;
};
__device__ __forceinline__ int2 span_of(const int *spans, int sequences, int s) {
  return s < sequences ? ((const int2 *)spans)[s] : make_int2(0, 0);
}

// Checks the lane's span and counts its items. Reports BAD_SPAN, and counts none, unless the span starts at or
// behind the end of its predecessor (for lane 0, `end`), ends within the `tokens` rows and has at most
// `longest` rows. Updates `end`.
__device__ __forceinline__ Sequences sequences_of(int2 span, bool there, int &end, int tokens, int longest, u32 *status) {
  const u32 lane = lane_now();
  int before = __shfl_up_sync(~0u, span.y, 1);
  if (lane == 0) before = end;
  end = __shfl_sync(~0u, span.y, 31);
  const int length = span.y - span.x;
  const bool good = span.x >= before && span.x >= 0 && length >= 0 && length <= longest && span.y <= tokens;
  if (there && !good) refuse(status, BAD_SPAN);
  const int items = there && good ? (length + ROWS - 1) / ROWS : 0;
  Sequences x = {span.x, length, items, items};
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int y = __shfl_up_sync(~0u, x.sum, i);
    if (lane >= i) x.sum += y;
  }
  return x;
}

// A loader warp: loads every gridDim.x-th item from the block's own number on, then an item of length 0. Spans
// are loaded two rounds of 32 sequences ahead to hide their latency. Items are numbered as `number` (over
// queries) times heads + head; adding the grid to this pair needs no division in the loop.
__device__ __forceinline__ void load_items(Memory &m, const Operands &operands, const int *spans, int sequences, int tokens,
                                          int longest, int heads, u32 *status, int load_warp) {
  SlotCursor cursor = {0, 0, 0, 0};
  int number = blockIdx.x / heads, head = blockIdx.x % heads, before = 0, end = 0;
  const int step = gridDim.x / heads, rest = gridDim.x % heads, lane = threadIdx.x % 32;
  int2 next = span_of(spans, sequences, lane), later = span_of(spans, sequences, lane + 32);
#pragma unroll 1
  for (int from = 0; from < sequences; from += 32) {
    const Sequences some = sequences_of(next, from + lane < sequences, end, tokens, longest, status);
    next = later, later = span_of(spans, sequences, from + 64 + lane);
    const int total = before + __shfl_sync(~0u, some.sum, 31);
#pragma unroll 1
    while (number < total) {
      const int at = __popc(__ballot_sync(~0u, before + some.sum <= number)); // lane of its sequence
      const int first = number - before - __shfl_sync(~0u, some.sum - some.items, at);
      const Item item = {__shfl_sync(~0u, some.start, at), __shfl_sync(~0u, some.length, at), first * ROWS, head};
      load_item(m, cursor, operands, item, load_warp);
      number += step, head += rest;
      if (head >= heads) head -= heads, number++;
    }
    before = total;
  }
  wait_for(m.empty[cursor.slot], cursor.parity ^ 1);
  wait_for(m.item_released[cursor.queries], cursor.item_parity ^ 1);
  if (load_warp == 0 && lane == 0) m.items[cursor.queries] = {0, 0, 0, 0};
  signal(m.full[cursor.slot]);
}
