// Gradients of embedding, row selection and means over sequences.
//
// The gradient of a table sums the rows of dx by table row. The positions t are sorted by table row (stable radix sort,
// 8 bits a pass), so that the rows of each table row are a range of the sorted positions. The sorted positions are cut
// into runs of RUN_ROWS: `sum_runs` adds up each run, so the work is balanced however often a token occurs. A range
// that lies in one run is written at once; otherwise its parts are written as partial sums, which `finish_rows` adds.
//
// Constants: SORT (the sort), else WIDTH, INTO, and SPREAD or RUN_ROWS.
//
// Invariant: everything is added in the order of the sorted positions, which are ascending for equal table rows, and
// cut at multiples of RUN_ROWS. Ids, row numbers and spans are checked before they are used as indices; invalid ones
// set `status` and get the key `limit`, which is behind all table rows and is summed nowhere.

#include "common.cuh"
#include "sequence.cuh"

#if defined(SORT)

// Keys and positions in a chunk of the sort: a block of 256 threads has 1024, a warp 128 adjacent ones.
#define CHUNK 1024
#define ROUNDS (CHUNK / (32 * WARPS))

// keys[i] = ids[i], or `limit` and a report of `code` for ids outside of 0 .. limit.
extern "C" __global__ void __launch_bounds__(256)
    row_keys(const int *__restrict__ ids, u32 *__restrict__ keys, u32 *status, long long count, int limit, u32 code) {
  after_predecessors();
  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  const int id = ids[i];
  const bool valid = id >= 0 && id < limit;
  if (!valid) refuse(status, code);
  keys[i] = valid ? id : limit;
}

// As row_keys, with ESM's token dropout (embed_dropout in sequence.cu): scales[t] is keep / (1 - masked / length) for
// tokens of a sequence other than `mask`, else 0, and the keys of scale 0 are `limit`. spans: (S, 2), ascending. Block s
// has sequence s and the tokens between it and sequence s - 1, block S the tokens behind the last sequence.
extern "C" __global__ void __launch_bounds__(256)
    token_keys(const int *__restrict__ ids, const int *__restrict__ spans, u32 *__restrict__ keys,
               float *__restrict__ scales, u32 *status, long long tokens, int sequences, int limit, int mask, float keep) {
  after_predecessors();
  Span span;
  if (!read_span(spans, blockIdx.x, sequences, tokens, status, span)) return;
  const float scale = dropout_scale(ids, span, mask, keep);
  for (long long t = span.before + threadIdx.x; t < span.end; t += 256) {
    const int id = ids[t];
    const bool valid = id >= 0 && id < limit, counted = valid && t >= span.start && id != mask;
    if (!valid) refuse(status, BAD_TOKEN);
    keys[t] = counted ? id : limit;
    scales[t] = counted ? scale : 0.0f;
  }
}
PARAMETERS(token_keys, 64, 60);

// counts[digit, chunk] = number of keys of the chunk with the digit at bit `shift`. counts: (256, chunks).
extern "C" __global__ void __launch_bounds__(256)
    count_digits(const u32 *__restrict__ keys, u32 *__restrict__ counts, long long count, int shift) {
  after_predecessors();
  __shared__ u32 digits[256];
  digits[threadIdx.x] = 0;
  __syncthreads();
  const long long first = (long long)blockIdx.x * CHUNK;
#pragma unroll
  for (int i = 0; i < CHUNK; i += 256) {
    const long long at = first + i + threadIdx.x;
    if (at < count) atomicAdd(&digits[keys[at] >> shift & 255], 1u);
  }
  __syncthreads();
  counts[(u64)threadIdx.x * gridDim.x + blockIdx.x] = digits[threadIdx.x];
}

// Replaces counts (n) by their exclusive prefix sums. One block.
extern "C" __global__ void __launch_bounds__(1024) scan_counts(u32 *counts, long long n) {
  after_predecessors();
  __shared__ u32 of_warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 before = 0;
  // A thread has four adjacent counts, a round 4096.
  for (long long first = 0; first < n; first += 4096) {
    const long long at = first + threadIdx.x * 4;
    u32 c[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      c[i] = at + i < n ? counts[at + i] : 0;
      sum += c[i];
    }
    u32 inclusive = sum;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const u32 other = __shfl_up_sync(0xFFFFFFFFu, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    if (lane == 31) of_warps[warp] = inclusive;
    __syncthreads();
    u32 prefix = before + inclusive - sum, total = 0;
    for (int w = 0; w < 32; w++) {
      if (w == warp) prefix += total;
      total += of_warps[w];
    }
    before += total;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (at + i < n) counts[at + i] = prefix;
      prefix += c[i];
    }
    // The sums of the warps are read before the next round overwrites them.
    __syncthreads();
  }
}

// Moves keys and positions to their places by the digit at bit `shift`; those with equal digits keep their order.
// places: (256, chunks), the place of a chunk's first key with a digit. `positions` is null in the first pass, where
// the position of key i is i.
extern "C" __global__ void __launch_bounds__(256)
    scatter_digits(const u32 *__restrict__ keys, const u32 *__restrict__ positions, u32 *__restrict__ keys_out,
                   u32 *__restrict__ positions_out, const u32 *__restrict__ places, long long count, int shift) {
  after_predecessors();
  __shared__ u32 next[WARPS][256];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int w = 0; w < WARPS; w++) next[w][threadIdx.x] = 0;
  __syncthreads();
  const long long first = (long long)blockIdx.x * CHUNK + warp * (32 * ROUNDS) + lane;
  u32 key[ROUNDS], rank[ROUNDS];
  // The rank of a key among the keys of its warp with the same digit, in order of rounds and lanes.
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const bool valid = first + r * 32 < count;
    key[r] = valid ? keys[first + r * 32] : 0;
    const u32 digit = valid ? key[r] >> shift & 255 : 256;
    const u32 same = __match_any_sync(0xFFFFFFFFu, digit);
    const u32 lower = same & ((1u << lane) - 1);
    const u32 seen = valid ? next[warp][digit] : 0;
    rank[r] = seen + __popc(lower);
    // All lanes have read the count before the first lane of each digit moves it on.
    __syncwarp();
    if (valid && lower == 0) next[warp][digit] = seen + __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // Counts of the warps become the places of their first keys.
  u32 place = places[(u64)threadIdx.x * gridDim.x + blockIdx.x];
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const u32 of_warp = next[w][threadIdx.x];
    next[w][threadIdx.x] = place;
    place += of_warp;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const long long at = first + r * 32;
    if (at >= count) continue;
    const u32 to = next[warp][key[r] >> shift & 255] + rank[r];
    keys_out[to] = key[r];
    positions_out[to] = positions ? positions[at] : (u32)at;
  }
}
PARAMETERS(scatter_digits, 56, 48);

// starts[v] = number of sorted keys below v, for v in 0 ..= limit: table row v has the sorted positions starts[v] ..
// starts[v + 1].
extern "C" __global__ void __launch_bounds__(256)
    find_starts(const u32 *__restrict__ keys, u32 *__restrict__ starts, long long count, int limit) {
  after_predecessors();
  const u64 v = (u64)blockIdx.x * 256 + threadIdx.x;
  if (v > limit) return;
  u32 low = 0, high = (u32)count;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (keys[middle] < v) low = middle + 1;
    else high = middle;
  }
  starts[v] = low;
}

#else

typedef Element<INTO>::type O;

#if defined(SPREAD)

// Gradient of the means over sequences: dx[t] = dy[s] / n for the n rows start + skip_first .. end - skip_last of
// sequence s, 0 for all other rows. dy: (S, columns), spans: (S, 2), ascending, dx: (T, columns) of type INTO. One warp
// per row. Grid: (S + 1, any); block (s, .) has sequence s and the rows between it and sequence s - 1, block (S, .) the
// rows behind the last sequence.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    segment_mean_grad(const T *__restrict__ dy, const int *__restrict__ spans, O *__restrict__ dx, u32 *status,
                      long long tokens, int sequences, int columns, long long skip_first, long long skip_last) {
  after_predecessors();
  const int s = blockIdx.x, lane = threadIdx.x % 32;
  Span span;
  if (!read_span(spans, s, sequences, tokens, status, span)) return;
  // Rows of block S lie before `start` and are never averaged, so dy[S] is not read.
  const long long first = span.start + skip_first, behind = span.end - skip_last;
  const float share = 1.0f / (float)(behind - first);
  for (long long t = span.before + blockIdx.y * WARPS + threadIdx.x / 32; t < span.end; t += gridDim.y * WARPS) {
    const bool averaged = t >= first && t < behind;
    const T *from = dy + (long long)s * columns;
    O *to = dx + t * columns;
    for (int c = lane * WIDTH; c < columns; c += 32 * WIDTH) {
      float d[WIDTH] = {};
      if (averaged) {
        load_many<TYPE, WIDTH>(from + c, d);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) d[k] *= share;
      }
      store_many<INTO, WIDTH>(to + c, d);
    }
  }
}
PARAMETERS(segment_mean_grad, 64, 56);

#else

// Rows whose loads are in flight together.
#define AHEAD 4

// Writes a sum as the row of a table, or as a partial sum.
__device__ __forceinline__ void write_sum(float (&sum)[WIDTH], bool whole, O *table, float *partial) {
  if (whole) store_many<INTO, WIDTH>(table, sum);
  else store_many<0, WIDTH>(partial, sum);
#pragma unroll
  for (int k = 0; k < WIDTH; k++) sum[k] = 0.0f;
}

// Adds scales[t] dx[t] over the sorted positions RUN_ROWS i .. RUN_ROWS (i + 1), separately for each table row. A sum of
// all positions of a table row is written to table (limit, columns); otherwise it is part of a range that goes on
// before or behind this run: partials[i, 0] if it begins with the run, else partials[i, 1]. partials: (runs, 2,
// columns); scales may be null. One warp has 32 WIDTH columns of a run. Grid: (runs, columns / (32 WARPS WIDTH)).
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    sum_runs(const T *__restrict__ dx, const u32 *__restrict__ keys, const u32 *__restrict__ positions,
             const u32 *__restrict__ starts, const float *__restrict__ scales, O *__restrict__ table,
             float *__restrict__ partials, int limit, int columns) {
  after_predecessors();
  const int lane = threadIdx.x % 32, tile = blockIdx.y * WARPS + threadIdx.x / 32;
  const int column = (tile * 32 + lane) * WIDTH;
  const u32 first = blockIdx.x * RUN_ROWS, end = min(first + RUN_ROWS, starts[limit]);
  // Whole warps leave together where a tile lies behind the columns; lanes of a tile at the end stay for the shuffles.
  if (tile * 32 * WIDTH >= columns || first >= end) return;
  const bool inside = column < columns;
  float sum[WIDTH] = {};
  u32 key = keys[first];
  bool from_before = starts[key] < first, is_head = true;
  float *partial = partials + (u64)blockIdx.x * 2 * columns + column;
  for (u32 block = first; block < end; block += 32) {
    // Lanes load the keys, positions and scales of 32 rows, and hand them out by shuffles.
    const u32 mine = min(block + lane, end - 1), my_key = keys[mine], my_position = positions[mine];
    const float my_scale = scales ? scales[my_position] : 1.0f;
    const int rows = min(32u, end - block);
    for (int i = 0; i < rows; i += AHEAD) {
      float d[AHEAD][WIDTH];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const u32 t = __shfl_sync(0xFFFFFFFFu, my_position, min(i + a, rows - 1));
        if (inside && i + a < rows) load_many<TYPE, WIDTH>(dx + (u64)t * columns + column, d[a]);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const u32 next = __shfl_sync(0xFFFFFFFFu, my_key, min(i + a, rows - 1));
        const float scale = __shfl_sync(0xFFFFFFFFu, my_scale, min(i + a, rows - 1));
        if (i + a >= rows) continue;
        if (next != key) {
          // The range of `key` ended inside of this run.
          if (inside) write_sum(sum, !from_before, table + (u64)key * columns + column, partial);
          key = next, from_before = false, is_head = false;
        }
        if (inside) {
#pragma unroll
          for (int k = 0; k < WIDTH; k++) sum[k] = fmaf(scale, d[a][k], sum[k]);
        }
      }
    }
  }
  const bool whole = !from_before && starts[key + 1] <= first + RUN_ROWS;
  if (inside) write_sum(sum, whole, table + (u64)key * columns + column, is_head ? partial : partial + columns);
}
PARAMETERS(sum_runs, 64, 60);

// Completes table (limit, columns): rows without positions become zeros, and rows whose range crosses a boundary of
// runs become the sum of their partial sums. With ROW_WARPS 1 a warp has a row; with ROW_WARPS 8, for few rows with long
// ranges, a block has 32 WIDTH columns of a row: warp w adds every eighth partial sum from w on, and the sums of the
// warps are added in order.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    finish_rows(const u32 *__restrict__ starts, const float *__restrict__ partials, O *__restrict__ table, int limit,
                int columns) {
  after_predecessors();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 v = ROW_WARPS == 1 ? blockIdx.x * WARPS + warp : blockIdx.x;
  if (v >= limit) return;
  const u32 start = starts[v], end = starts[v + 1];
  const u32 run = start / RUN_ROWS, last = end > start ? (end - 1) / RUN_ROWS : run;
  // `sum_runs` has written rows whose range lies in one run.
  if (end > start && run == last) return;
  O *to = table + (u64)v * columns;
  // The first part is a head only if the range begins with the run; all others are heads.
  const u32 tail = start % RUN_ROWS != 0;
  if constexpr (ROW_WARPS == 1) {
    for (int c = lane * WIDTH; c < columns; c += 32 * WIDTH) {
      float sum[WIDTH] = {};
      for (u32 r = run; end > start && r <= last; r++) {
        float p[WIDTH];
        load_many<0, WIDTH>(partials + ((u64)r * 2 + (r == run ? tail : 0)) * columns + c, p);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) sum[k] += p[k];
      }
      store_many<INTO, WIDTH>(to + c, sum);
    }
  } else {
    __shared__ float of_warps[WARPS][32 * WIDTH];
    const int block = blockIdx.y * 32 * WIDTH, c = block + lane * WIDTH;
    float sum[WIDTH] = {};
    if (c < columns && end > start) {
#pragma unroll 4
      for (u32 r = run + warp; r <= last; r += WARPS) {
        float p[WIDTH];
        load_many<0, WIDTH>(partials + ((u64)r * 2 + (r == run ? tail : 0)) * columns + c, p);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) sum[k] += p[k];
      }
    }
#pragma unroll
    for (int k = 0; k < WIDTH; k++) of_warps[warp][lane * WIDTH + k] = sum[k];
    __syncthreads();
    if (warp == 0 && c < columns) {
#pragma unroll
      for (int k = 0; k < WIDTH; k++) {
        sum[k] = 0.0f;
        for (int w = 0; w < WARPS; w++) sum[k] += of_warps[w][lane * WIDTH + k];
      }
      store_many<INTO, WIDTH>(to + c, sum);
    }
  }
}

#endif
#endif
