// Gradient of attention over packed sequences of 16-bit elements on compute capability 9.0, for heads of 64 and 128 columns:
// the arithmetic of attention_grad.cu by wgmma. With s = scale q k^T and p = exp(s - lse), per sequence and head, dv =
// p^T do, ds = p (do v^T - delta), dq = scale ds k and dk = scale ds^T q. TYPE is 1 (bf16) or 2 (f16).
//
// Work: `prepare` (attention_grad.cuh) computes delta and the rotated q and k. Then two kernels of this one source
// recompute the scores, so that every sum has one owner and a fixed order, without atomics. An item is a head and up to
// ROWS rows of a sequence; it visits the columns that the mask pairs with its rows, in steps of STEP.
//   KEYS = 1: rows are keys of a head of k and v, columns the queries of all query heads that share it: dk and dv.
//   KEYS = 0: rows are queries of one head, columns its keys: dq.
// x1, x2 are the rows (k and v, or q and do), y1, y2 the columns (q and do, or k and v): both kernels compute s = x1 y1^T
// and dp = x2 y2^T and add ds y1 to the first sum, and with KEYS p y2 to the second. The accumulator layout of s is that of
// operand a, so that p and ds need no exchange between threads.
//
// A block is resident on its multiprocessor and consists of UNITS independent units: a producer warp, which loads rows and
// columns by TMA into a ring buffer of STAGES stages, and GROUPS warpgroups with 64 rows each, which read the same columns. All
// producer warps are in the last warpgroup of the block. A unit begins with the item of its own number and then takes the next
// item that no unit has taken, by an integer counter in memory: items differ in their numbers of steps, and with a fixed
// share for each unit some units would take twice the mean time.
//
// Invariant: a gradient row is a function of its own sequence, bit by bit, whichever unit computes it: columns are added in
// steps of STEP, by head and then from the sequence's start. Masked pairs add zeros, and so do the columns of a step behind the
// sequence's end, which are cleared in shared memory. Only rows of sequences are written.
//
// Constants: HEAD_DIM (d), ROTARY, TABLE (element type of cos and sin), MASK (0 to 2 of attention_mask.cuh), KEYS; for speed alone
// UNITS, GROUPS and STAGES.

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "warpgroup.cuh"
#include "attention_wgmma.cuh"
#include "copies.cuh"
#include "attention_mask.cuh"

#define ROWS (GROUPS * 64)
#define CONSUMERS (UNITS * GROUPS) // warpgroups
#define THREADS ((CONSUMERS + 1) * 128)
#define PART (PANELS * TILE) // bytes of 64 rows of a head
#define STAGE (2 * PART)     // y1, then y2
#define STATS (STEP * 8)     // bytes of lse and delta of a step's queries
#define SUMS (KEYS ? 2 : 1)
// Registers per thread after setmaxnreg. All must fit into those that the block gets at its launch, or the threads that
// ask for more wait forever.
#define LOAD_REGISTERS (CONSUMERS == 3 ? 32 : KEYS ? 24 : 40)
#define CONSUMER_REGISTERS (CONSUMERS == 3 ? 160 : KEYS ? 240 : 232)
// Whether x1 and x2 are held in registers: neither the two sums of keys nor three warpgroups leave enough of them.
#define HELD (!KEYS && CONSUMERS == 2)
// Whether p y2 is issued before dp has been computed. Heads of 64 columns are 5 % faster without (measured).
#define EARLY (KEYS && PANELS == 2)
static_assert(PANELS <= 2, "products over the columns are one instruction wide");
static_assert(CONSUMERS == 2 || CONSUMERS == 3, "registers are divided for two or three warpgroups");
static_assert(LOAD_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 65536 / THREADS / 8 * 8 * (CONSUMERS + 1), "registers of a block");
static_assert(UNITS <= 4 && STAGES >= 2, "a warp loads for each unit");
struct __align__(sizeof(Angle) * 2) Angles { Angle x, y; };

__device__ __forceinline__ float4 load_stats(u32 at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(u32 at, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// c += a b of all columns of a head, with rows of b in shared memory (`wgmma<1>`): (64, 16) (16, d) -> (64, d)
#if PANELS == 1
__device__ __forceinline__ void wgmma_wide(float (&c)[32], const u32 (&a)[4], u64 b) { wgmma<1>(c, a, b, 1); }
#else
#define UP_TO_63                                                                                                        \
  UP_TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
           "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
__device__ __forceinline__ void wgmma_wide(float (&c)[64], const u32 (&a)[4], u64 b) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES " {" UP_TO_63 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
               : C8(0), C8(8), C8(16), C8(24), C8(32), C8(40), C8(48), C8(56)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
__device__ __forceinline__ void pin_accumulators(float (&c)[64]) {
#pragma unroll
  for (int i = 0; i < 64; i++) asm volatile("" : "+f"(c[i])::"memory");
}
#endif

// Descriptors of parts of a tile; only the low half differs. `by_column`: an operand whose rows are contiguous in k, as in
// `tile_of`. `by_row`: its rows are of k; the leading dimension offset is that from 64 columns to the next 64.
struct Tile {
  u32 low;
  static __device__ __forceinline__ Tile by_column(u32 at) { return {at >> 4 | 64u << 16}; }
  static __device__ __forceinline__ Tile by_row(u32 at) { return {at >> 4 | (u32)(TILE >> 4) << 16}; }
  __device__ __forceinline__ u64 at(int bytes) const {
    u64 r;
    asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "r"(low + bytes / 16), "r"(64u | 1u << 30));
    return r;
  }
};

// Rows of a sequence of `length` tokens that starts at row `start`: one head of ROWS rows from number `first` on. An item
// of length 0 marks the end.
struct Item {
  int start, length, first, head;
};

// Shared memory of a unit: for each warpgroup its rows of x1, then of x2; STAGES stages; for each warpgroup 64 rows of
// results. Behind the tiles of all units, for each unit: STAGES times the stats of a step, the item, and the barriers: `full`,
// a stage has been loaded; `empty`, all warps have read it; the same for the item with its rows.
#define UNIT_TILES (GROUPS * 2 * PART + STAGES * STAGE + GROUPS * PART)
#define UNIT_TAIL (STAGES * STATS + 16 + (2 * STAGES + 2) * 8)
struct Unit {
  u32 tiles, tail;
  int number;
  __device__ __forceinline__ u32 rows(int group) const { return tiles + group * 2 * PART; }
  __device__ __forceinline__ u32 stage(int i) const { return tiles + GROUPS * 2 * PART + i * STAGE; }
  __device__ __forceinline__ u32 results(int group) const { return tiles + GROUPS * 2 * PART + STAGES * STAGE + group * PART; }
  __device__ __forceinline__ u32 stats(int i) const { return tail + i * STATS; }
  __device__ __forceinline__ u32 note() const { return tail + STAGES * STATS; }
  __device__ __forceinline__ u32 item_full() const { return note() + 16; }
  __device__ __forceinline__ u32 item_empty() const { return note() + 24; }
  __device__ __forceinline__ u32 full(int i) const { return note() + 32 + i * 8; }
  __device__ __forceinline__ u32 empty(int i) const { return note() + 32 + (STAGES + i) * 8; }
  // Reads the item, by one lane, as the producer overwrites it when one lane of each warp has released it.
  __device__ __forceinline__ Item item() const {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (thread_now() % 32 == 0) x = load_shared(note());
    return {(int)__shfl_sync(~0u, x.x, 0), (int)__shfl_sync(~0u, x.y, 0), (int)__shfl_sync(~0u, x.z, 0), (int)__shfl_sync(~0u, x.w, 0)};
  }
};

// A position in the ring buffer: the stage and the parity of its current round.
struct Cursor {
  int stage;
  u32 parity;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Inputs of the producers: tensor maps, first columns of k and v in their matrices, spans, mask and numbers of heads.
struct Operands {
  const Map &q, &k, &v, &dy;
  int k_column, v_column;
  const float2 *stats;
  const int *spans;
  int sequences, tokens, longest, heads, kv_heads;
  Extent mask;
};

// The producer warp of a unit: loads the rows and columns of item `i` and of the items that it takes after it, then sends the
// end. `counter` is the number of items that have been taken beside the first ones of all `units` units. The note must be written
// before `expect`, the arrival that publishes it.
__device__ __forceinline__ void produce(const Unit &unit, const Operands &of, int i, int units, int *counter, u32 *status) {
  const int lane = threadIdx.x % 32, group = of.heads / of.kv_heads, block_heads = KEYS ? of.kv_heads : of.heads;
  const int numbers = of.tokens / ROWS + of.sequences;
  Cursor cursor = {0, 0};
  u32 parity = 1; // of `item_empty`
  auto take = [&] { return units + __shfl_sync(~0u, lane == 0 ? atomicAdd(counter, 1) : 0, 0); };
  for (; i < numbers * block_heads; i = take()) {
    int number = i / block_heads, head = i % block_heads;
    // Long items first: with a causal mask the last queries have the most keys.
    if (!KEYS && MASK == 1) number = numbers - 1 - number;
    if (head == 0 && lane == 0) check_span(of.spans, of.sequences, of.tokens, ROTARY ? of.longest : of.tokens, number, status);
    Block block = block_of<ROWS>(of.spans, of.sequences, number);
    int length = block.end - block.start;
    if (block.first >= length || block.first < 0 || block.start < 0 || block.end > of.tokens) continue;
    if (ROTARY && length > of.longest) continue;
    Tiles tiles = tiles_of<KEYS != 0, ROWS, STEP>(block.first, length, of.mask);
    // The item's query heads are adjacent, from `query_head` on.
    const int query_head = KEYS ? head * group : head, key_head = KEYS ? head : head / group;
    const int query_column = query_head * HEAD_DIM, key_column = of.k_column + key_head * HEAD_DIM,
              value_column = of.v_column + key_head * HEAD_DIM;
    const int count = KEYS ? tiles.count * group : tiles.count;
    int tile = tiles.near, query = 0; // the next tile, and its query head after the first
    for (int j = 0; j < count; j++, cursor.next()) {
      const u32 to = unit.stage(cursor.stage), full = unit.full(cursor.stage);
      const int at = tile * STEP;
      // Read before the wait, which hides the latency.
      float2 stats[STEP / 32];
      if (KEYS) {
#pragma unroll
        for (int r = 0; r < STEP / 32; r++) {
          const int row = at + lane + r * 32;
          const bool there = row < length;
          stats[r] = there ? of.stats[(long long)(block.start + row) * of.heads + query_head + query] : make_float2(0.0f, 0.0f);
        }
      }
      wait(unit.empty(cursor.stage), cursor.parity ^ 1);
      if (KEYS) {
#pragma unroll
        for (int r = 0; r < STEP / 32; r++) store_shared(unit.stats(cursor.stage) + (lane + r * 32) * 8, stats[r]);
        arrive(full);
      }
      if (lane == 0) {
        expect(full, STAGE);
        const int column1 = KEYS ? query_column + query * HEAD_DIM : key_column,
                  column2 = KEYS ? query_column + query * HEAD_DIM : value_column;
#pragma unroll
        for (int c = 0; c < PANELS; c++) {
          fetch(to + c * TILE, KEYS ? of.q : of.k, full, column1 + c * 64, block.start + at);
          fetch(to + PART + c * TILE, KEYS ? of.dy : of.v, full, column2 + c * 64, block.start + at);
        }
      }
      if (++tile == tiles.near + tiles.count) tile = tiles.near, query++;
      // The first columns are loaded while the consumers still read the rows of the item before.
      // No more than two stages come first: the consumers release none before they have the item, so with STAGES = 2 a
      // wait for a third would never end.
      if (j == min(1, count - 1)) {
        wait(unit.item_empty(), parity);
        parity ^= 1;
        if (lane == 0) {
          store_shared(unit.note(), make_uint4(block.start, length, block.first, head));
          expect(unit.item_full(), GROUPS * 2 * PART);
#pragma unroll
          for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int c = 0; c < PANELS; c++) {
              const int row = block.start + block.first + g * 64;
              fetch(unit.rows(g) + c * TILE, KEYS ? of.k : of.q, unit.item_full(), (KEYS ? key_column : query_column) + c * 64, row);
              fetch(unit.rows(g) + PART + c * TILE, KEYS ? of.v : of.dy, unit.item_full(),
                    (KEYS ? value_column : query_column) + c * 64, row);
            }
        }
      }
      __syncwarp();
    }
  }
  wait(unit.item_empty(), parity);
  if (lane == 0) {
    store_shared(unit.note(), make_uint4(0, 0, 0, 0));
    arrive(unit.item_full());
  }
}

// Arrives at a barrier once for the warp, when all lanes have read what it protects. Only for what the copy engine writes: the
// stats of a stage are written by threads, and racecheck does not follow an order by __syncwarp and one lane's arrival, so all
// lanes arrive at `empty`.
__device__ __forceinline__ void release(u32 barrier) {
  __syncwarp();
  if (thread_now() % 32 == 0) arrive(barrier);
}

// A warpgroup's 64 rows. A thread has rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Rows {
  u32 x[2][HELD ? HEAD_DIM / 16 : 1][4]; // x1 and x2 if they are held
  float sums[SUMS][PANELS * 32];         // of dk and dv, or of dq
  float2 stats[KEYS ? 1 : 2];
};

// Issues s = x y^T of the rows and the columns of a step. (64, d) (STEP, d) -> (64, STEP)
template <int WHICH> __device__ __forceinline__ void product(float (&s)[32], const Rows &rows, u32 x, u32 y) {
  Tile b = Tile::by_column(y + WHICH * PART);
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; c++) {
    const int at = c / 4 * TILE + c % 4 * 32;
#if !HELD
    wgmma_shared(s, Tile::by_column(x + WHICH * PART).at(at), b.at(at), c > 0);
#else
    wgmma<0>(s, rows.x[WHICH][c], b.at(at), c > 0);
#endif
  }
  wgmma_commit();
}

// Issues sums += p y for the columns of a step. (64, STEP) (STEP, d) -> (64, d)
__device__ __forceinline__ void add(float (&sums)[PANELS * 32], const u32 (&p)[STEP / 16][4], u32 y) {
  Tile b = Tile::by_row(y);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < STEP / 16; n++) wgmma_wide(sums, p[n], b.at(n * 2048));
  wgmma_commit();
}

// Rounds to 16 bits as operand a of wgmma, whose register layout is that of the accumulators.
__device__ __forceinline__ void pack_operand(u32 (&p)[STEP / 16][4], const float (&s)[32]) {
#pragma unroll
  for (int n = 0; n < STEP / 16; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) p[n][e] = pack<TYPE>(s[n * 8 + e * 2], s[n * 8 + e * 2 + 1]);
}

// Position of a warpgroup's rows in its item, read again where it is needed.
struct Place {
  int first, length; // the warpgroup's first row, and the length of the sequence
};
#define GROUP (thread_now() / 128 % GROUPS)

// Processes the step in a stage; `column` is its first column. `factor` includes log2(e). Where nothing is masked, both forms
// give equal bits.
template <bool MASKED>
__device__ __forceinline__ void step(Rows &rows, const Unit &unit, int stage, int column, const Place &place, const Extent &mask,
                                     float factor) {
  const u32 y = unit.stage(stage), stats = unit.stats(stage) + thread_now() % 4 * 16;
  float s[32], dp[32];
  u32 p[STEP / 16][4], ds[STEP / 16][4];
  wgmma_fence();
  product<0>(s, rows, unit.rows(GROUP), y);
  product<1>(dp, rows, unit.rows(GROUP), y);
  wgmma_wait<1>();
  pin_accumulators(s);
  const int thread = thread_now(), mine = column + thread % 4 * 2;
  Pairs pairs[2];
#pragma unroll
  for (int h = 0; h < (MASKED ? 2 : 0); h++)
    pairs[h] = pairs_of<KEYS != 0>(place.first + thread % 128 / 32 * 16 + thread % 32 / 4 + h * 8, place.length, mask);
#pragma unroll
  for (int n = 0; n < STEP / 8; n++) {
    float4 of_columns; // lse log2(e) and delta of the thread's two columns
    if constexpr (KEYS != 0) of_columns = load_stats(stats + n * 64);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float lse;
      if constexpr (KEYS != 0) lse = e % 2 ? of_columns.z : of_columns.x;
      else lse = rows.stats[e / 2].x;
      float x = exp2_fast(fmaf(s[n * 4 + e], factor, -lse));
      if (MASKED && !pairs[e / 2].admits(mine + n * 8 + e % 2)) x = 0.0f;
      s[n * 4 + e] = x;
    }
  }
#if EARLY
  pack_operand(p, s);
  add(rows.sums[SUMS - 1], p, y + PART);
  wgmma_wait<1>();
#else
  wgmma_wait<0>();
#endif
  pin_accumulators(dp);
#pragma unroll
  for (int n = 0; n < STEP / 8; n++) {
    float4 of_columns;
    if constexpr (KEYS != 0) of_columns = load_stats(stats + n * 64);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float delta;
      if constexpr (KEYS != 0) delta = e % 2 ? of_columns.w : of_columns.y;
      else delta = rows.stats[e / 2].y;
      dp[n * 4 + e] = __fmul_rn(s[n * 4 + e], dp[n * 4 + e] - delta);
    }
  }
#if KEYS && !EARLY
  pack_operand(p, s);
  add(rows.sums[SUMS - 1], p, y + PART);
#endif
  pack_operand(ds, dp);
  add(rows.sums[0], ds, y);
  // With products in flight from step to step, their operands would need more registers than there are, and the assembler
  // would serialise all products.
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < SUMS; i++) pin_accumulators(rows.sums[i]);
  arrive(unit.empty(stage));
}

// Waits for the columns of a step, and writes zeros to those behind the sequence. TMA loads rows of the next sequence
// there; their weights are zero, but zero times an infinity or NaN of the other sequence would be NaN.
__device__ __forceinline__ void wait_full(const Unit &unit, const Cursor &cursor, int left) {
  wait(unit.full(cursor.stage), cursor.parity);
  if (left >= STEP) return;
  const int threads = GROUPS * 128, thread = thread_now() % threads;
  for (int at = thread; at < (STEP - left) * PANELS * 16; at += threads) {
    int r = left + at / (PANELS * 16), word = at % (PANELS * 16);
    store_shared(unit.stage(cursor.stage) + word / 8 * TILE + tile_at(r, word % 8), make_uint4(0, 0, 0, 0));
  }
  fence_async();
  asm volatile("bar.sync %0, %1;" ::"r"(unit.number + 1), "n"(GROUPS * 128) : "memory");
}

// Tiles of columns at which the phases of `visit` begin and end.
struct Steps {
  int start, first, whole, masked, last, end;
};

// Returns the phases of the rows from number `first` on: steps that none of them needs, up to `first`; masked ones, up to
// `whole`; steps without masked pairs, up to `masked`; masked ones, up to `last`; steps that none needs, up to `end`.
__device__ __forceinline__ Steps steps_of(const Item &item, int first, Extent mask) {
  const Tiles tiles = tiles_of<KEYS != 0, ROWS, STEP>(item.first, item.length, mask);
  const int end = tiles.near + tiles.count;
  if (first >= item.length) return {tiles.near, end, end, end, end, end};
  Pairs a = pairs_of<KEYS != 0>(first, item.length, mask), b = pairs_of<KEYS != 0>(min(first + 64, item.length) - 1, item.length, mask);
  Steps steps;
  steps.start = tiles.near;
  steps.first = max(tiles.near, a.low / STEP);
  steps.last = min(end, (max(a.high, b.high) + STEP - 1) / STEP);
  steps.whole = min((b.low + STEP - 1) / STEP, steps.last);
  steps.masked = max(min(a.high, b.high) / STEP, steps.whole);
  steps.end = end;
  return steps;
}

// Adds the columns of one head. Loops are separate, so that no branch depends on the mask while wgmma runs. The item is read
// again for each, as there are no registers to hold it.
__device__ __forceinline__ void visit(Rows &rows, const Unit &unit, Cursor &cursor, const Extent &mask, float factor) {
  int tile = -1;
#pragma unroll 1
  for (int phase = 0; phase < 4; phase++) {
    Item item = unit.item();
    const Place place = {item.first + GROUP * 64, item.length};
    const Steps steps = steps_of(item, place.first, mask);
    if (tile < 0) tile = steps.start;
    if (phase == 0 || phase == 3) { // columns that other warpgroups of the unit need
      const int to = phase ? steps.end : steps.first;
      for (; tile < to; tile++, cursor.next()) {
        wait_full(unit, cursor, place.length - tile * STEP);
        arrive(unit.empty(cursor.stage));
      }
    }
    if (phase == 1) {
#pragma unroll 1
      for (; tile < steps.masked; tile++, cursor.next()) {
        wait(unit.full(cursor.stage), cursor.parity);
        step<false>(rows, unit, cursor.stage, tile * STEP, place, mask, factor);
      }
    } else if (phase < 3) {
      const int to = phase ? steps.last : steps.whole;
#pragma unroll 1
      for (; tile < to; tile++, cursor.next()) {
        wait_full(unit, cursor, place.length - tile * STEP);
        step<true>(rows, unit, cursor.stage, tile * STEP, place, mask, factor);
      }
    }
  }
}

// Writes the sums of the warp's 16 rows, multiplied by `scale`, to `to`, the address of the first one, of which `count` exist;
// with ROTATED, the inverse rotation is applied first. The first row is number `position` of its sequence. The rows go through
// shared memory (`staging`), to be written to memory in 16-byte accesses.
template <bool ROTATED>
__device__ __forceinline__ void write_rows(float (&sums)[PANELS * 32], u32 staging, u16 *to, long long stride, int count, float scale,
                                           const Angle *cosines, const Angle *sines, int position) {
  const int lane = threadIdx.x % 32;
  if constexpr (ROTATED && ROTARY) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const long long entry = (long long)(position + min(h * 8 + lane / 4, count - 1)) * HALF + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < HALF / 8; n++) {
        const Angles cosine = *(const Angles *)(cosines + entry + n * 8), sine = *(const Angles *)(sines + entry + n * 8);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          // A pair of columns, half a head apart, is of one thread.
          float &a = sums[n * 4 + h * 2 + e], &b = sums[(n + HALF / 8) * 4 + h * 2 + e], u = a, v = b;
          const float cos = widen<TABLE>(e ? cosine.y : cosine.x), sin = widen<TABLE>(e ? sine.y : sine.x);
          a = fmaf(u, cos, __fmul_rn(v, sin));
          b = fmaf(v, cos, -__fmul_rn(u, sin));
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 16; n++) { // 16 columns, as ldmatrix reads them
    u32 r[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float *x = sums + n * 8 + e * 2;
      r[e] = pack<TYPE>(__fmul_rn(x[0], scale), __fmul_rn(x[1], scale));
    }
    u32 at = staging + n / 4 * 2048 + tile_at(lane % 16, n % 4 * 2 + lane / 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
  __syncwarp();
  constexpr int per = PANELS * 8;
#pragma unroll
  for (int i = 0; i < 16 * per / 32; i++) {
    int at = lane + i * 32, r = at / per, word = at % per;
    if (r < count) *(uint4 *)(to + r * stride + word * 8) = load_shared(staging + word / 8 * 2048 + tile_at(r, word % 8));
  }
  __syncwarp(); // other rows come next
}

// q, do: (T, H d) and k, v: (T, G d), k and v from columns of their matrices on, q and k rotated; stats: (T, H); spans:
// (S, 2); cos, sin: (longest, d/2). With KEYS, d1 and d2 are dk and dv, otherwise d1 is dq, with stride `d_stride`; either may be
// null. counters: the items that units of the kernel of dq, and of that of dk and dv, have taken; `prepare` sets them to 0. Grid:
// any number of blocks. Invalid spans set `status` and write nothing.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_grad(const __grid_constant__ Map q, const __grid_constant__ Map k, const __grid_constant__ Map v,
               const __grid_constant__ Map dy, int k_column, int v_column, const float2 *stats, const int *spans, int sequences,
               int tokens, const Angle *cosines, const Angle *sines, int longest, u16 *d1, u16 *d2, long long d_stride, int heads,
               int kv_heads, float scale, int span, int *counters, u32 *status) {
  extern __shared__ __align__(1024) u16 memory[];
  const u32 base = shared_address(memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  auto unit_of = [&](int number) { return Unit{base + number * UNIT_TILES, base + UNITS * UNIT_TILES + number * UNIT_TAIL, number}; };
  if (threadIdx.x == 0) {
    for (int u = 0; u < UNITS; u++) {
      Unit unit = unit_of(u);
      init(unit.item_full(), 1), init(unit.item_empty(), 4 * GROUPS);
      // With KEYS, `full` counts the 32 lanes that have written the stats of the stage, and the `expect` of its tiles.
      for (int i = 0; i < STAGES; i++) init(unit.full(i), KEYS ? 33 : 1), init(unit.empty(i), 128 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  after_predecessors();
  const Extent mask = {span, 0, 0};
  if (warpgroup == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGISTERS));
    const int number = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
    if (number < UNITS) {
      Operands operands = {q, k, v, dy, k_column, v_column, stats, spans, sequences, tokens, longest, heads, kv_heads, mask};
      produce(unit_of(number), operands, blockIdx.x * UNITS + number, gridDim.x * UNITS, counters + KEYS, status);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const Unit unit = unit_of(UNITS > 1 ? warpgroup / GROUPS : 0);
    const float factor = __fmul_rn(scale, LOG2E);
    Cursor cursor = {0, 0};
    for (u32 parity = 0;; parity ^= 1) {
      wait(unit.item_full(), parity);
      Item item = unit.item();
      if (item.length <= 0) break;
      Rows rows;
      if constexpr (!KEYS) {
        const int lane = thread_now() % 32, warp = thread_now() / 32 % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = item.first + GROUP * 64 + warp * 16 + h * 8 + lane / 4;
          rows.stats[h] = r < item.length ? stats[(long long)(item.start + r) * heads + item.head] : make_float2(0.0f, 0.0f);
        }
        const u32 from = unit.rows(GROUP) + warp * 2048;
#pragma unroll
        for (int w = 0; w < 2; w++)
#pragma unroll
          for (int c = 0; c < (HELD ? HEAD_DIM / 16 : 0); c++)
            ldmatrix(rows.x[w][c], from + w * PART + c / 4 * TILE + tile_at(lane % 16, c % 4 * 2 + lane / 16));
      }
#pragma unroll
      for (int i = 0; i < SUMS; i++)
#pragma unroll
        for (int j = 0; j < PANELS * 32; j++) rows.sums[i][j] = 0.0f;
#pragma unroll 1
      for (int i = 0; i < (KEYS ? heads / kv_heads : 1); i++) visit(rows, unit, cursor, mask, factor);
      item = unit.item();
      fence_async(); // reads of the rows come before the loads of the next item's
      release(unit.item_empty());
      const int warp = thread_now() / 32 % 4, own = item.first + GROUP * 64 + warp * 16, count = item.length - own;
      if (count <= 0) continue;
      const u32 staging = unit.results(GROUP) + warp * (PANELS * 2048);
      const long long at = (item.start + own) * d_stride + item.head * HEAD_DIM;
      if (d1) write_rows<true>(rows.sums[0], staging, d1 + at, d_stride, count, scale, cosines, sines, own);
      if (KEYS && d2) write_rows<false>(rows.sums[SUMS - 1], staging, d2 + at, d_stride, count, 1.0f, cosines, sines, own);
    }
  }
}
PARAMETERS(attention_grad, 4 * sizeof(Map) + 112, 4 * sizeof(Map) + 104);
