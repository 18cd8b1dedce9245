// Attention over packed sequences of 16-bit elements for narrow heads of 16, 24 and 32 columns, with rotary
// embedding and without mask, by mma.sync m16n8k16. TYPE is 1 (bf16) or 2 (f16).
//
// Such heads are bound by exponentials, one for every 64 to 128 operations, and by the instructions beside
// them. So the computing warps do nothing else:
// - Loader warps (attention_narrow_loads.cuh) load and rotate the operands, and multiply queries by scale log2(e)
//   before they are rounded.
// - Sums of weights come from an mma with a matrix of ones.
// - bf16 has f32's range of exponents and needs no maximum: weights are exp2(score). Rows with sums outside
//   the range in which this is accurate are computed again, relative to their maximum (`out_of_range`, `recompute`).
// - f16 always subtracts the maximum, which a first pass over the keys finds.
//
// Work: a block is persistent and loops over items (one head, up to ROWS queries of one sequence); WARPS warps
// compute MT tiles of 16 queries each, with queries and sums in registers.
//
// Invariant: a row of o is a function of its own sequence, bit by bit, in every variant: keys are added in
// blocks of 16 from the sequence's start, in order, and rows are computed again in groups of 16 counted from
// the sequence's start, whatever block has them. Only rows of sequences are written.
//
// Constants: HEAD_DIM (d), TABLE (element type of cos and sin); for speed alone WARPS that compute, LOAD_WARPS, MT
// tiles of 16 queries per warp, TILE keys of a slot, STAGES slots, BLOCKS per multiprocessor.

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "copies.cuh"
#include "attention_narrow_loads.cuh"

#define LOG2E 1.4426950408889634f
__device__ __forceinline__ float exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float inverse_fast(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

__device__ __forceinline__ void ldmatrix(u32 &a, u32 &b, u32 &c, u32 &d, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
}
__device__ __forceinline__ void ldmatrix(u32 &a, u32 &b, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 &a, u32 &b, u32 &c, u32 &d, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 &a, u32 &b, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
}

#if TYPE == 1
#define MMA_TYPES ".f32.bf16.bf16.f32"
#else
#define MMA_TYPES ".f32.f16.f16.f32"
#endif
// c += a b: (16, 16) (16, 8) -> (16, 8), with a as two fragments of 8 columns, or (16, 8) (8, 8) -> (16, 8),
// with one, for the last 8 columns of a head of 24.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&low)[2], const u32 (&high)[2], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col" MMA_TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(low[0]), "r"(low[1]), "r"(high[0]), "r"(high[1]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[2], u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col" MMA_TYPES " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}

// State of 16 queries of a warp. A thread has rows lane / 4 and lane / 4 + 8.
struct Rows {
  u32 q[CHUNKS][2];
  float o[CHUNKS][4]; // sums of exp2(score - row_max) v
  float sum[4];       // sums of exp2(score - row_max): 0 and 1 of the first row, 2 and 3 of the second, equal in pairs
  float row_max[2];       // reference maximum; zero where weights are exp2(score)

  // Loads the queries from shared memory to registers.
  __device__ __forceinline__ void load_queries(u32 at, u32 lane) {
#pragma unroll
    for (int c = 0; c + 1 < CHUNKS; c += 2)
      ldmatrix(q[c][0], q[c][1], q[c + 1][0], q[c + 1][1], at + swizzled_offset(lane % 16, c + lane / 16));
    if (CHUNKS % 2) ldmatrix(q[CHUNKS - 1][0], q[CHUNKS - 1][1], at + swizzled_offset(lane % 16, CHUNKS - 1));
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      sum[e] = 0.0f;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) o[c][e] = 0.0f;
    }
  }
  // Takes the maximum over the four threads of each row.
  __device__ __forceinline__ void reduce_max() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      row_max[h] = fmaxf(row_max[h], __shfl_xor_sync(~0u, row_max[h], 1));
      row_max[h] = fmaxf(row_max[h], __shfl_xor_sync(~0u, row_max[h], 2));
    }
  }
  // Whether any of the 16 rows must be computed again relative to its maximum: a sum of weights is outside of
  // 2^-60 .. 2^90, or a sum of values beyond 3e38, or either is NaN (the negated comparisons are true for NaN).
  // Within the range, weights too small for f32's exponents are negligible in the sum.
  __device__ __forceinline__ bool out_of_range() const {
    bool far = false;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      far |= !(sum[e] >= 0x1p-60f && sum[e] <= 0x1p90f);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) far |= !(fabsf(o[c][e]) <= 3e38f);
    }
    return __any_sync(~0u, far);
  }
};

// Source of keys and values: a slot in shared memory. `key_words` and `value_words` load the fragments b of 16
// keys from number `key` on: b[c][n] has columns 8 c .. 8 c + 8; n is the block of 8 keys.
struct SharedKeys {
  u32 k[(CHUNKS + 1) / 2], v[(CHUNKS + 1) / 2];
  __device__ __forceinline__ SharedKeys(const u16 *keys, const u16 *values) {
    const u32 lane = lane_now();
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
      const bool two = c + 1 < CHUNKS;
      k[c / 2] = shared_address(keys) + (two ? swizzled_offset(lane / 16 * 8 + lane % 8, c + lane / 8 % 2) : swizzled_offset(lane % 16, c));
      v[c / 2] = shared_address(values) + swizzled_offset(lane % 16, two ? c + lane / 16 : c);
    }
  }
  __device__ __forceinline__ void key_words(u32 (&b)[CHUNKS][2], int key) const {
#pragma unroll
    for (int c = 0; c + 1 < CHUNKS; c += 2) ldmatrix(b[c][0], b[c + 1][0], b[c][1], b[c + 1][1], k[c / 2] + key * ROW);
    if (CHUNKS % 2) ldmatrix(b[CHUNKS - 1][0], b[CHUNKS - 1][1], k[CHUNKS / 2] + key * ROW);
  }
  __device__ __forceinline__ void value_words(u32 (&b)[CHUNKS][2], int key) const {
#pragma unroll
    for (int c = 0; c + 1 < CHUNKS; c += 2)
      ldmatrix_transposed(b[c][0], b[c][1], b[c + 1][0], b[c + 1][1], v[c / 2] + key * ROW);
    if (CHUNKS % 2) ldmatrix_transposed(b[CHUNKS - 1][0], b[CHUNKS - 1][1], v[CHUNKS / 2] + key * ROW);
  }
};

// Source of keys and values for the rare second computation: loads them from global memory again, 16 keys at a
// time, into `mine`, the warp's own rows of queries in shared memory (by then in registers). k and v point to
// the sequence's first row of the head.
struct GlobalKeys {
  const Operands &from;
  u16 *mine;
  int length;
  __device__ __forceinline__ void load_rows(const u16 *x, int key) const {
    __syncwarp();
    fetch(mine, x + key * from.kv_stride, from.kv_stride, min(length - key, 16));
    fetched();
  }
  __device__ __forceinline__ void key_words(u32 (&b)[CHUNKS][2], int key) const {
    load_rows(from.k, key);
    rotate_rows(from, mine, min(length - key, 16), mine, 0, key);
    __syncwarp();
    SharedKeys(mine, mine).key_words(b, 0);
  }
  __device__ __forceinline__ void value_words(u32 (&b)[CHUNKS][2], int key) const {
    load_rows(from.v, key);
    SharedKeys(mine, mine).value_words(b, 0);
  }
};

// s = q k^T of M tiles of 16 rows and of 16 keys. (M, 16, d) (16, d) -> (M, 16, 16)
template <int M, class Keys> __device__ __forceinline__ void scores(float (&s)[M][2][4], const Rows *w, const Keys &keys, int key) {
  u32 b[CHUNKS][2];
  keys.key_words(b, key);
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float (&x)[4] = s[m][n];
      x[0] = x[1] = x[2] = x[3] = 0.0f;
#pragma unroll
      for (int c = 0; c + 1 < CHUNKS; c += 2) mma(x, w[m].q[c], w[m].q[c + 1], b[c][n], b[c + 1][n]);
      if (CHUNKS % 2) mma(x, w[m].q[CHUNKS - 1], b[CHUNKS - 1][n]);
    }
}

// Adds a block of 16 keys to `o` and `sum`; `left` is the number of keys from the thread's first one on. SUBTRACT_MAX
// subtracts the maximum. LAST: some keys may be behind the sequence; their values are zeros in shared memory,
// and their column of the matrix of ones is zero, so that they add nothing whatever their weights.
template <bool SUBTRACT_MAX, bool LAST, int M, class Keys>
__device__ __forceinline__ void add_block(Rows *w, const Keys &keys, int key, int left) {
  float s[M][2][4];
  scores<M>(s, w, keys, key);
  u32 a[M][2][2], one[2], b[CHUNKS][2];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const u32 ones = TYPE == 1 ? 0x3F803F80u : 0x3C003C00u; // 1.0 twice
    one[n] = !LAST || left >= n * 8 + 2 ? ones : left == n * 8 + 1 ? ones & 0xFFFFu : 0u;
#pragma unroll
    for (int m = 0; m < M; m++) {
      float (&x)[4] = s[m][n];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (SUBTRACT_MAX) x[e] = LAST && n * 8 + e % 2 >= left ? -INFINITY : x[e] - w[m].row_max[e / 2];
        x[e] = exp2_fast(x[e]);
      }
      a[m][n][0] = pack<TYPE>(x[0], x[1]);
      a[m][n][1] = pack<TYPE>(x[2], x[3]);
    }
  }
#pragma unroll
  for (int m = 0; m < M; m++) mma(w[m].sum, a[m][0], a[m][1], one[0], one[1]);
  keys.value_words(b, key);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int m = 0; m < M; m++) mma(w[m].o[c], a[m][0], a[m][1], b[c][0], b[c][1]);
}

template <bool SUBTRACT_MAX, int M, class Keys> __device__ __forceinline__ void add_keys(Rows *w, const Keys &keys, int count) {
  int key = 0;
#pragma unroll 1
  for (; key + 16 <= count; key += 16) add_block<SUBTRACT_MAX, false, M>(w, keys, key, 16);
  if (key < count) add_block<SUBTRACT_MAX, true, M>(w, keys, key, count - key - (int)(lane_now() % 4 * 2));
}

// Updates `row_max` with the maximum of the scores of `count` keys; per thread, until `reduce_max`.
template <int M, class Keys> __device__ __forceinline__ void update_max(Rows *w, const Keys &keys, int count) {
#pragma unroll 1
  for (int key = 0; key < count; key += 16) {
    float s[M][2][4];
    scores<M>(s, w, keys, key);
    const int left = count - key - (int)(lane_now() % 4 * 2);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (n * 8 + e % 2 < left) w[m].row_max[e / 2] = fmaxf(w[m].row_max[e / 2], s[m][n][e]);
  }
}

// Destination: the rows of o and lse of a warp's first query, the number of heads, and the rows from it to the
// sequence's end.
struct Destination {
  u16 *o;
  float *lse;
  u32 heads, rows;
};

// Writes o / sum of the 16 rows from `from` on and, if `lse` is not null, the natural logarithm of the sum of
// exponentials. The fragments go through the warp's own rows in shared memory, to be written in 16-byte
// accesses.
__device__ __forceinline__ void write_rows(const Rows &w, u16 *mine, const Destination &to, u32 from, u32 lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u32 r = h * 8 + lane / 4;
    const float sum = w.sum[2 * h], inverse = inverse_fast(sum);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      *(u32 *)((char *)mine + swizzled_offset(r, c) + lane % 4 * 4) =
          pack<TYPE>(__fmul_rn(w.o[c][2 * h], inverse), __fmul_rn(w.o[c][2 * h + 1], inverse));
    if (to.lse && lane % 4 == 0 && from + r < to.rows)
      to.lse[(from + r) * to.heads] = (w.row_max[h] + log2f(sum)) * 0.6931471805599453f;
  }
  __syncwarp();
#pragma unroll
  for (u32 i = lane; i < 16 * CHUNKS; i += 32) {
    const u32 r = i / CHUNKS, c = i % CHUNKS;
    if (from + r < to.rows)
      *(uint4 *)(to.o + (from + r) * to.heads * HEAD_DIM + c * 8) = *(const uint4 *)((const char *)mine + swizzled_offset(r, c));
  }
}

// Computes 16 rows again with weights relative to the rows' maxima: one pass for the maxima, one for the sums.
__device__ __forceinline__ void recompute(const GlobalKeys &far, const Destination &to, u32 from) {
  const u32 lane = lane_now();
  Rows w;
  w.load_queries(shared_address(far.mine), lane);
  w.clear();
  w.row_max[0] = w.row_max[1] = -INFINITY;
  update_max<1>(&w, far, far.length);
  w.reduce_max();
  add_keys<true, 1>(&w, far, far.length);
  __syncwarp();
  write_rows(w, far.mine, to, from, lane);
}

// Computes this warp's MT tiles of 16 queries of an item. Their queries are at `mine` in shared memory; `first`
// is the number of the first query in its sequence. Warps without queries release the slots all the same.
__device__ __forceinline__ void attend(Memory &m, SlotCursor &cursor, Operands x, u16 *o, float *lse, int heads, u16 *mine, int first) {
  const int length = m.items[cursor.queries].length;
  Rows w[MT];
#pragma unroll
  for (int t = 0; t < MT; t++) {
    w[t].load_queries(shared_address(mine) + t * 16 * ROW, lane_now());
    w[t].clear();
    w[t].row_max[0] = w[t].row_max[1] = PASSES == 1 ? 0.0f : -INFINITY;
  }
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll 1
    for (int from = 0; from < length; from += TILE, cursor.next()) {
      const int n = min(length - from, TILE);
      wait_for(m.full[cursor.slot], cursor.parity);
      if (first < length) {
        const SharedKeys shared_keys(m.keys[cursor.slot], m.values[cursor.slot]);
        if (PASSES == 1) add_keys<false, MT>(w, shared_keys, n);
        else if (pass == 0) update_max<MT>(w, shared_keys, n);
        else add_keys<true, MT>(w, shared_keys, n);
      }
      __syncwarp();
      signal(m.empty[cursor.slot]);
    }
#pragma unroll
    for (int t = 0; t < MT; t++)
      if (PASSES == 2 && pass == 0) w[t].reduce_max();
  }
  if (first >= length) return;
  const Item item = m.items[cursor.queries]; // read again instead of being held in registers
  const long long row = (long long)(item.start + first) * heads + item.head;
  const Destination to = {o + row * HEAD_DIM, lse ? lse + row : lse, (u32)heads, (u32)(item.length - first)};
  const u32 lane = lane_now();
  u32 out_of_range = 0;
#pragma unroll
  for (int t = 0; t < MT; t++) {
    if (to.rows <= t * 16) break;
    if (PASSES == 1 && w[t].out_of_range()) out_of_range |= 1 << t;
    else write_rows(w[t], mine + t * 16 * HEAD_DIM, to, t * 16, lane);
  }
  const long long head = item.start * x.kv_stride + item.head * HEAD_DIM;
  x.k += head, x.v += head;
#pragma unroll 1
  for (int t = 0; out_of_range >> t; t++)
    if (out_of_range >> t & 1) recompute({x, mine + t * 16 * HEAD_DIM, item.length}, to, t * 16);
}

// q: (T, H d), k, v: (T, H d), each with the stride of its rows; spans: (S, 2); cos, sin: (longest, d/2); o:
// (T, H d); lse: (T, H) or null. Grid: any number of blocks.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention(ATTENTION_PARAMETERS) {
  extern __shared__ __align__(128) char bytes[];
  Memory &m = *(Memory *)bytes;
  const int warp = threadIdx.x / 32;
  const Operands operands = {q, k, v, q_stride, kv_stride, cosines, sines, scale * LOG2E};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) init(shared_address(&m.full[i]), LOAD_WARPS * 32), init(shared_address(&m.empty[i]), WARPS * 32);
    for (int i = 0; i < 2; i++) init(shared_address(&m.item_released[i]), WARPS * 32);
  }
  __syncthreads();
  after_predecessors();
  if (warp >= WARPS) {
    load_items(m, operands, spans, sequences, tokens, longest, heads, status, warp - WARPS);
    return;
  }
  SlotCursor cursor = {0, 0, 0, 0};
#pragma unroll 1
  while (true) {
    wait_for(m.full[cursor.slot], cursor.parity);
    if (m.items[cursor.queries].length == 0) return;
    const int tile = warp * MT * 16;
    attend(m, cursor, operands, o, lse, heads, m.queries[cursor.queries] + tile * HEAD_DIM, m.items[cursor.queries].first + tile);
    __syncwarp();
    signal(m.item_released[cursor.queries]);
    cursor.next_item();
  }
}
PARAMETERS(attention, 136, 132);
