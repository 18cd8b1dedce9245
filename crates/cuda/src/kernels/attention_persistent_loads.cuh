// Loads of attention_persistent.cu, whose constants apply here: the circular buffer of shared-memory slots for tiles of queries, keys
// and values, the producer warp that fills it by TMA, and the helper warps that apply rotary positions in place.
//
// Invariant: slots are filled, rotated, read and released in order of their numbers, synchronised by barriers alone;
// the rotation of a slot is a function of its rows and their positions.

#pragma once

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "warpgroup.cuh"
#include "attention_wgmma.cuh"
#include "copies.cuh"

#define ROWS (GROUPS * 64)
#define HELPERS (LOAD_GROUPS * 4 - 1)
#define THREADS ((GROUPS + LOAD_GROUPS) * 128)
// Registers per thread after setmaxnreg, LOAD_REGISTERS for the warpgroups of producer and helpers,
// CONSUMER_REGISTERS for the consumers: a multiprocessor has 64 Ki. With four consumer warpgroups the queries stay in shared memory
// (QUERIES_IN_SHARED) instead of registers, and the helper warps have too few registers to rotate.
#define LOAD_REGISTERS (GROUPS == 4 ? 32 : GROUPS == 3 ? 48 : 56)
#define CONSUMER_REGISTERS (GROUPS == 4 ? 112 : GROUPS == 3 ? 128 : 200)
#define QUERIES_IN_SHARED (GROUPS == 4)
#define SLOT (PANELS * TILE)
static_assert(!QUERIES_IN_SHARED || (PANELS == 1 && LOAD_GROUPS == 1 && !ROTARY && !ALIBI && !CAUSAL), "no registers for more");

__device__ __forceinline__ uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Reads 16 bytes by lane 0 and broadcasts them to the warp. A thread that has waited for a barrier sees the
// writes of each arriving thread before its arrival and also, through __syncwarp, those of the other lanes of
// its warp; compute-sanitizer's racecheck models only the former. So data that many lanes access is arrived for
// by all lanes, and data that one lane arrives for is read by one lane.
__device__ __forceinline__ uint4 load_for_all(u32 at) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (threadIdx.x % 32 == 0) v = load_shared(at);
  return make_uint4(__shfl_sync(~0u, v.x, 0), __shfl_sync(~0u, v.y, 0), __shfl_sync(~0u, v.z, 0), __shfl_sync(~0u, v.w, 0));
}

// A unit of work: one head of up to ROWS queries, from number `first` on, of the sequence that starts at row
// `start`. An item of length 0 marks the end.
struct Item {
  int start, length, first, head;
  __device__ __forceinline__ int tiles() const { return min(GROUPS, (length - first + 63) / 64); }
  // Number of steps of keys that any row of the item sees.
  __device__ __forceinline__ int steps() const {
    return ((CAUSAL ? min(length, first + ROWS) : length) + STEP - 1) / STEP;
  }
};

// Work of a helper warp on a slot: NOTHING, ROTATE applies rotary embedding (row 0 has number `position`
// in the sequence), CLEAR writes zeros to the rows from `rows` on, END makes the helper return.
enum HelperAction { NOTHING, ROTATE, CLEAR, END };
struct HelperTask {
  int kind, position, rows;
};

// The circular buffer in shared memory: SLOTS slots of (STEP, d), each with a note (the helper's task, and the
// item that begins in this slot) and three barriers: `full`, TMA has filled the slot; `ready`, its helper has
// processed it; `empty`, all readers have released it. An item occupies consecutive slots: its tiles of
// queries, then keys and values of each step, alternating.
struct RingBuffer {
  u32 base;
  __device__ __forceinline__ u32 slot(int i) const { return base + i * SLOT; }
  __device__ __forceinline__ u32 staging() const { return base + SLOTS * SLOT; }
  __device__ __forceinline__ u32 full(int i) const { return base + (SLOTS + GROUPS) * SLOT + i * 8; }
  __device__ __forceinline__ u32 ready(int i) const { return full(i) + SLOTS * 8; }
  __device__ __forceinline__ u32 empty(int i) const { return full(i) + 2 * SLOTS * 8; }
  // Behind an even number of words of 8 bytes, because notes are read and written 16 bytes at a time.
  __device__ __forceinline__ u32 note(int i) const { return full(0) + (3 * SLOTS + SLOTS % 2) * 8 + i * 32; }
  __device__ __forceinline__ Item item(int i) const {
    uint4 x = load_for_all(note(i));
    return {(int)x.x, (int)x.y, (int)x.z, (int)x.w};
  }
  __device__ __forceinline__ HelperTask task(int i) const {
    uint4 x = load_for_all(note(i) + 16);
    return {(int)x.x, (int)x.y, (int)x.z};
  }
  __device__ __forceinline__ void write_note(int i, const Item &x) const {
    store_shared(note(i), make_uint4(x.start, x.length, x.first, x.head));
  }
  __device__ __forceinline__ void write_note(int i, const HelperTask &x) const {
    store_shared(note(i) + 16, make_uint4(x.kind, x.position, x.rows, 0));
  }
};
// A warp's position in the circular buffer: the slot and the parity of its current round.
struct SlotCursor {
  int slot;
  u32 parity;
  __device__ __forceinline__ void skip(int slots) {
    slot += slots;
    if (slot >= SLOTS) slot -= SLOTS, parity ^= 1;
  }
  __device__ __forceinline__ void next() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};

// Rotates 8 adjacent columns and their partners in place in shared memory.
__device__ __forceinline__ void rotate_words(u32 low, u32 high, const float (&cosine)[8], const float (&sine)[8]) {
  uint4 x = load_shared(low), y = load_shared(high);
  rotate_pairs(x, y, cosine, sine);
  store_shared(low, x), store_shared(high, y);
}

// In each of its rows a lane rotates one pair of 16-byte words that are half a head apart; eight neighbouring
// lanes access different banks.
#define PAIRS (HALF / 8)   // pairs of words per row
#define LINES (32 / PAIRS) // rows that a warp rotates at a time
#define CYCLE (8 / LINES)  // passes until the swizzle, of period 8 rows, repeats
static_assert(PAIRS == 4 || PAIRS == 8, "the swizzle comes again");

// Rotates LINES rows of a slot, one pair of words per lane; nothing in lanes without `there`, whose row is
// behind the sequence. For d = 64 the partner word is 4 words further in the same swizzled row (xor 64 bytes),
// else in the next tile.
__device__ __forceinline__ void rotate_lines(u32 low, const Angle *c, const Angle *s, bool there) {
  if (!there) return;
  float cosine[8], sine[8];
  load_many<TABLE, 8>(c, cosine), load_many<TABLE, 8>(s, sine);
  rotate_words(low, PAIRS == 4 ? low ^ 64 : low + TILE, cosine, sine);
}

__device__ __forceinline__ void rotate(u32 slot, const Angle *cosines, const Angle *sines, const HelperTask &task) {
  int lane = threadIdx.x % 32, line = lane / PAIRS, word = lane % PAIRS;
  // With 4 pairs per row, a permutation of the 8 rows keeps eight neighbouring lanes in different banks.
  int row = PAIRS == 4 ? line % 2 * 4 + line / 2 : line, rows = min(task.rows, STEP), i = 0;
  long long entry = (task.position + row) * HALF + word * 8;
  const Angle *c = cosines + entry, *s = sines + entry;
#pragma unroll 1
  for (; i + CYCLE * LINES <= rows; i += CYCLE * LINES)
#pragma unroll
    for (int j = 0; j < CYCLE; j++)
      rotate_lines(slot + i * 128 + tile_at(row + j * LINES, word), c + (i + j * LINES) * HALF, s + (i + j * LINES) * HALF, true);
#pragma unroll 1
  for (; i < rows; i += LINES)
    rotate_lines(slot + tile_at(row + i, word), c + i * HALF, s + i * HALF, row + i < rows);
}

// Writes zeros to the rows of values behind the sequence. TMA loads rows of the next sequence there; their
// weights are zero, but zero times an infinity or NaN of the other sequence would be NaN.
__device__ __forceinline__ void clear(u32 slot, int rows) {
  for (int at = threadIdx.x % 32; at < (STEP - rows) * PANELS * 8; at += 32) {
    int r = rows + at / (PANELS * 8), word = at % (PANELS * 8);
    store_shared(slot + word / 8 * TILE + tile_at(r, word % 8), make_uint4(0, 0, 0, 0));
  }
}

// A helper warp: processes the slots with numbers helper, helper + HELPERS, ..., counted through all rounds.
__device__ __forceinline__ void run_helper(const RingBuffer &ring, int helper, const Angle *cosines, const Angle *sines) {
  SlotCursor cursor = {helper, 0};
  while (true) {
    // First wait until the previous round of this slot has been released. Copies may complete out of order, and
    // without this wait a helper could be two rounds ahead of the `full` barrier, whose parity then looks like that
    // of the completed phase.
    wait(ring.empty(cursor.slot), cursor.parity ^ 1);
    wait(ring.full(cursor.slot), cursor.parity);
    HelperTask task = ring.task(cursor.slot);
    u32 slot = ring.slot(cursor.slot);
#if ROTARY
    if (task.kind == ROTATE) rotate(slot, cosines, sines, task);
#endif
    if (task.kind == CLEAR) clear(slot, task.rows);
    fence_async();
    arrive(ring.ready(cursor.slot));
    if (task.kind == END) return;
    cursor.skip(HELPERS);
  }
}

// Tensor maps of q, k and v, the first columns of k and v in their matrices, and the query heads per key head.
struct Operands {
  const Map &q, &k, &v;
  int k_column, v_column, group;
};

// Loads an item's tiles into the next slots by TMA, by one thread. The note must be written before `expect`,
// the arrival that publishes it. (STEP, d) for each slot
__device__ __forceinline__ void fetch_item(const RingBuffer &ring, SlotCursor &cursor, const Operands &operands, const Item &item) {
  int tiles = item.tiles(), slots = tiles + 2 * item.steps();
  for (int i = 0; i < slots; i++, cursor.next()) {
    u32 to = ring.slot(cursor.slot), full = ring.full(cursor.slot);
    bool queries = i < tiles, values = !queries && (i - tiles) % 2;
    int at = queries ? item.first + i * 64 : (i - tiles) / 2 * STEP, left = item.length - at;
    wait(ring.empty(cursor.slot), cursor.parity ^ 1);
    if (i == 0) ring.write_note(cursor.slot, item);
    ring.write_note(cursor.slot, HelperTask{values ? (left < STEP ? CLEAR : NOTHING) : ROTARY ? ROTATE : NOTHING, at, left});
    expect(full, SLOT);
    const Map &map = queries ? operands.q : values ? operands.v : operands.k;
    int column = queries ? 0 : values ? operands.v_column : operands.k_column;
    column += (queries ? item.head : item.head / operands.group) * HEAD_DIM;
#pragma unroll
    for (int c = 0; c < PANELS; c++) fetch(to + c * TILE, map, full, column + c * 64, item.start + at);
  }
}

// The producer warp: loads every gridDim.x-th item from the block's own number on, then sends END to every
// helper and an empty item to the consumers.
__device__ __forceinline__ void produce(const RingBuffer &ring, const Operands &operands, const int *spans, int sequences, int tokens,
                                     int longest, int heads, u32 *status) {
  SlotCursor cursor = {0, 0};
  int lane = threadIdx.x % 32, items = (tokens / ROWS + sequences) * heads;
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    int number = i / heads, head = i % heads;
    if (head == 0 && lane == 0) check_span(spans, sequences, tokens, ROTARY ? longest : tokens, number, status);
    Block block = block_of<ROWS>(spans, sequences, number);
    Item item = {block.start, block.end - block.start, block.first, head};
    if (item.first >= item.length || item.first < 0 || item.start < 0 || block.end > tokens) continue;
    if (ROTARY && item.length > longest) continue;
    if (lane == 0) fetch_item(ring, cursor, operands, item);
    __syncwarp();
  }
  for (int i = 0; i < HELPERS && lane == 0; i++, cursor.next()) { // consecutive slots belong to different helpers
    wait(ring.empty(cursor.slot), cursor.parity ^ 1);
    ring.write_note(cursor.slot, Item{0, 0, 0, 0});
    ring.write_note(cursor.slot, HelperTask{END, 0, 0});
    arrive(ring.full(cursor.slot));
  }
}
