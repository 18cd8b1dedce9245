// Mixture-of-experts routing, its gradient, and the losses of the router (graph/src/ops/route.rs).
//
// Routing takes three kernels. `choose`: a block has a chunk of CHUNK tokens; it chooses the experts of each token and
// counts the chunk's choices per expert. `rank_chunks`: a block has an expert and turns its counts into the rank of
// each chunk's first choice. `place`: a block has a chunk again and gives each of its choices a row: the first row of
// its expert plus its rank there. Counts and ranks are integers, so the order of the atomic additions does not change
// them, and ranks ascend with the token: the sort is stable.
//
// A warp has a token: lane l has experts l, l + 32, ... in registers. Sums over the experts of a token add a lane's
// experts in order, then the lanes by a butterfly. Sums over the tokens of a pack are in f64: a warp adds every eighth
// token of a chunk, the warps of a block are added in order, and a last block adds the chunks of the pack in slices and
// the slices in order.
//
// With the constant PACKED, as for a capacity and for the losses, no chunk has tokens of two packs (`chunk_of_packs`).
//
// Invariant: the bits depend on the data and the shapes only, and the sums of a pack on the pack only. Indices from the
// inputs are checked before use.
//
// Constants: EXPERTS, the number of experts, at most 256; CHUNK, tokens of a chunk; PACKED.

#include "common.cuh"
#include "rows.cuh"
#include "packs.cuh"

#define WARPS 8
#define THREADS (32 * WARPS)
#define BLOCKS 4 // per multiprocessor; left alone, the compiler aims at eight and spills registers
#define MANY_THREADS 1024 // threads of the single block that adds chunks
#define NOTHING __int_as_float(0xFF800000) // minus infinity
constexpr int EACH = (EXPERTS + 31) / 32;           // experts of a lane
constexpr int SLICES = MANY_THREADS / EXPERTS;      // slices of chunks that are summed in parallel
static_assert(EXPERTS <= THREADS, "a thread of a block has an expert");

// Maps numbers to integers of the same order, all above 0. Both zeros have the same integer, because equal logits must
// go to the lower expert; NaN counts as minus infinity, so that every token has `top_k` different experts.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x != x ? NOTHING : x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The inverse of `ordered`.
__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ float warp_max(float x) { return unordered(__reduce_max_sync(~0u, ordered(x))); }

// Loads the logits of a token; minus infinity behind the last expert.
__device__ __forceinline__ void load_logits(const T *row, float (&x)[EACH]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int v = 0; v < EACH; v++) x[v] = v * 32 + lane < EXPERTS ? load(row[v * 32 + lane]) : NOTHING;
}

// Replaces the logits of a token by exp(logit - top), 0 behind the last expert; returns their sum.
__device__ __forceinline__ float exponentials(float (&x)[EACH], float &top) {
  float largest = x[0], sum = 0.0f;
#pragma unroll
  for (int v = 1; v < EACH; v++) largest = fmaxf(largest, x[v]);
  top = warp_max(largest);
#pragma unroll
  for (int v = 0; v < EACH; v++) {
    x[v] = v * 32 + (int)threadIdx.x % 32 < EXPERTS ? expf(x[v] - top) : 0.0f;
    sum += x[v];
  }
  return warp_sum(sum);
}

// Returns the sum of x over the threads before this one, and the sum over all threads of the block in `total`. All
// threads must call it.
__device__ __forceinline__ int block_scan(int x, int (&sums)[WARPS], int &total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  __syncthreads(); // `sums` may be written again.
  return before + sum - x;
}

// Tokens first .. end of a pack, limited to those of the step.
struct PackTokens {
  int first, end;
};

__device__ __forceinline__ PackTokens tokens_of_pack(const int *packs, int p, int tokens) {
  const int *words = pack_at(packs, p) + PACK_TOKENS;
  const int first = min(max(words[0], 0), tokens);
  return {first, min(max(words[1], first), tokens)};
}

// Number of the first chunk of pack p, which begins at token `first`. The chunks of a pack are consecutive and begin with
// the pack, so that they do not depend on the packs in front of it. A pack of tokens a .. b has ceil((b - a) / CHUNK) of
// them, at most floor(b / CHUNK) - floor(a / CHUNK) + 1, so they end in front of those of the next pack, and P packs of T
// tokens use numbers below floor(T / CHUNK) + P. Chunks of the numbers between have no tokens. In return, the numbers
// follow from the pack alone, without a sum over the packs in front of it.
__device__ __forceinline__ int first_chunk(int first, int p) { return first / CHUNK + p; }

__device__ __forceinline__ int chunks_of_pack(PackTokens of) {
  return of.end > of.first ? (of.end - of.first - 1) / CHUNK + 1 : 0;
}

// Tokens begin .. end of a chunk, none if end <= begin, and their pack; -1 if there is no pack, and without PACKED.
struct Chunk {
  long long begin, end;
  int pack;
};

// Finds the chunk with a number: its pack is the last whose chunks begin with that number or a lower one. The 32 threads
// of a warp must call it together.
__device__ __forceinline__ Chunk chunk_of_packs(const int *packs, int pack_count, int tokens, int number) {
  int begun = 0;
  for (int p = threadIdx.x % 32; p < pack_count; p += 32)
    begun += first_chunk(tokens_of_pack(packs, p, tokens).first, p) <= number;
  const int pack = __reduce_add_sync(~0u, begun) - 1;
  if (pack < 0) return {0, 0, -1};
  const PackTokens of = tokens_of_pack(packs, pack, tokens);
  const int before = max(number - first_chunk(of.first, pack), 0); // Negative only if packs do not ascend.
  const long long begin = of.first + (long long)before * CHUNK;
  return {begin, min(begin + CHUNK, (long long)of.end), pack};
}

// The chunk of this block. All threads of the block must call it.
__device__ __forceinline__ Chunk chunk_of_block(const int *packs, int pack_count, int tokens) {
  if constexpr (PACKED) return chunk_of_packs(packs, pack_count, tokens, blockIdx.x);
  const long long begin = (long long)blockIdx.x * CHUNK;
  return {begin, min(begin + CHUNK, (long long)tokens), -1};
}

// Most rows of an expert from a pack of `tokens` tokens: ceil(capacity tokens k / (1000 E)) as `Route::limit`, or the
// tokens, each of which chooses an expert once. The product fits into 64 bits: capacity is below 2^32, tokens k below
// 2^31, because `order` has a row for each choice.
__device__ __forceinline__ int limit_of_pack(PackTokens of, int top_k, u32 capacity) {
  const int tokens = of.end - of.first;
  const u64 limit = ((u64)capacity * ((u64)tokens * top_k) + (1000 * EXPERTS - 1)) / (1000 * EXPERTS);
  return limit < (u64)tokens ? (int)limit : tokens;
}

// Counts the choices of one chunk of tokens for each expert. All threads of the block must call it; the counts are
// complete after the next barrier.
__device__ __forceinline__ void count_chunk(const int *experts, int (&counts)[EXPERTS], u32 *status,
                                            const Chunk &chunk, int top_k) {
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = 0;
  __syncthreads();
  const long long begin = chunk.begin * top_k, end = chunk.end * top_k;
  for (long long i = begin + threadIdx.x; i < end; i += THREADS) {
    const int e = experts[i];
    if (e < 0 || e >= EXPERTS) refuse(status, BAD_ROW);
    else atomicAdd(&counts[e], 1);
  }
}

// Chooses the experts of each token and computes their gates. logits: (T, E), gates, experts: (T, k) or null, chosen:
// (T, k), the experts again, for `place`; counts: (E, chunks); packs: (pack_count, 6) with PACKED, else null. Grid: one
// block per chunk.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    choose(const T *__restrict__ logits, const int *__restrict__ packs, float *gates, int *experts, u8 *chosen,
           int *counts, u32 *status, int tokens, int top_k, int renormalise, int pack_count) {
  after_predecessors();
  __shared__ int of_chunk[EXPERTS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (PACKED && blockIdx.x == 0 && warp == 0) check_packs(packs, pack_count, PACK_TOKENS, tokens, status);
  const Chunk chunk = chunk_of_block(packs, pack_count, tokens);
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) of_chunk[e] = 0;
  __syncthreads();
  for (int i = warp; i < CHUNK; i += WARPS) {
    const long long t = chunk.begin + i;
    if (t >= chunk.end) break;
    const T *row = logits + t * EXPERTS;
    float x[EACH], top;
    u32 keys[EACH]; // 0: chosen already, or no expert
    load_logits(row, x);
#pragma unroll
    for (int v = 0; v < EACH; v++) keys[v] = v * 32 + lane < EXPERTS ? ordered(x[v]) : 0;
    float sum = exponentials(x, top);
    if (renormalise) sum = 0.0f;
    for (int j = 0; j < top_k; j++) {
      u32 best = 0;
      u32 at = 0;
#pragma unroll
      for (int v = 0; v < EACH; v++)
        if (keys[v] > best) best = keys[v], at = v * 32 + lane;
      const u32 largest = __reduce_max_sync(~0u, best);
      const u32 expert = __reduce_min_sync(~0u, best == largest ? at : ~0u);
#pragma unroll
      for (int v = 0; v < EACH; v++)
        if (v * 32 + lane == expert) keys[v] = 0;
      if (renormalise) sum += expf(unordered(largest) - top);
      if (lane == j % 32) {
        chosen[t * top_k + j] = (u8)expert;
        if (experts) experts[t * top_k + j] = (int)expert;
        atomicAdd(&of_chunk[expert], 1);
      }
    }
    if (gates) {
      __syncwarp(); // makes the other lanes' `chosen` visible
      for (int j = lane; j < top_k; j += 32)
        gates[t * top_k + j] = expf(load(row[chosen[t * top_k + j]]) - top) / sum;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[(long long)e * gridDim.x + blockIdx.x] = of_chunk[e];
}
PARAMETERS(choose, 72, 68);

// Replaces the counts (E, chunks) of each expert by their exclusive prefix sums, and writes the rows of each expert to
// totals (E). With PACKED, these are the choices up to the limit of each pack; kept (E, pack_count) gets the rows of each
// expert from the packs in front of each pack. Grid: one block per expert.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rank_chunks(int *counts, int *totals, const int *__restrict__ packs, int *kept, int chunks, int tokens, int top_k,
                int pack_count, u32 capacity) {
  after_predecessors();
  __shared__ int sums[WARPS];
  int *const mine = counts + (long long)blockIdx.x * chunks;
  int before = 0;
  for (int first = 0; first < chunks; first += THREADS) {
    const int at = first + threadIdx.x, count = at < chunks ? mine[at] : 0;
    int total;
    const int rank = before + block_scan(count, sums, total);
    if (at < chunks) mine[at] = rank;
    before += total;
  }
  if constexpr (PACKED) {
    __syncthreads(); // All ranks are written.
    int rows = 0;
    for (int first = 0; first < pack_count; first += THREADS) {
      const int p = first + threadIdx.x;
      int fitting = 0;
      if (p < pack_count) {
        // The choices of a pack are those between the ranks of its first chunk and of the next pack's.
        const PackTokens of = tokens_of_pack(packs, p, tokens);
        int end = before;
        if (p + 1 < pack_count) end = mine[first_chunk(tokens_of_pack(packs, p + 1, tokens).first, p + 1)];
        fitting = max(min(end - mine[first_chunk(of.first, p)], limit_of_pack(of, top_k, capacity)), 0);
      }
      int total;
      const int in_front = rows + block_scan(fitting, sums, total);
      if (p < pack_count) kept[(long long)blockIdx.x * pack_count + p] = in_front;
      rows += total;
    }
    before = rows;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}
PARAMETERS(rank_chunks, 56, 48);

// Gives each choice its row. chosen: (T, k), ranks: (E, chunks), totals: (E) and with PACKED kept: (E, pack_count), as
// `rank_chunks` writes them; gates: (T, k), order, places: (kT), offsets: (E + 1), dropped: (1), each or null. Grid: one
// block per chunk, at least one, because block 0 writes `offsets` and `dropped`.
//
// An expert has the rows first .. first + totals[e] in the order of the tokens. From a pack with the limit m it has the
// rows from first + kept[e, pack] on, at most m: the choice with rank r in the pack has row r of them, or none if r >= m.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    place(const u8 *__restrict__ chosen, const int *__restrict__ ranks, const int *__restrict__ totals,
          const int *__restrict__ packs, const int *__restrict__ kept, float *gates, int *order, int *places,
          int *offsets, int *dropped, int tokens, int top_k, int chunks, int pack_count, u32 capacity) {
  after_predecessors();
  // The row of each expert's next choice in the chunk, and the row behind those that fit.
  __shared__ int sums[WARPS], next[EXPERTS], behind[EXPERTS];
  const int number = blockIdx.x, e = threadIdx.x, lane = threadIdx.x % 32;
  const long long all = (long long)tokens * top_k;
  const Chunk chunk = chunk_of_block(packs, pack_count, tokens);
  int rows; // of all experts
  const int first = block_scan(e < EXPERTS ? totals[e] : 0, sums, rows);
  if (e < EXPERTS) {
    const int *const of_expert = ranks + (long long)e * chunks;
    const int rank = number < chunks ? of_expert[number] : 0;
    if constexpr (PACKED) {
      next[e] = behind[e] = 0;
      if (chunk.pack >= 0) {
        const PackTokens of = tokens_of_pack(packs, chunk.pack, tokens);
        const int limit = limit_of_pack(of, top_k, capacity);
        const int in_pack = rank - of_expert[first_chunk(of.first, chunk.pack)];
        const int from = first + kept[(long long)e * pack_count + chunk.pack];
        next[e] = from + min(in_pack, limit);
        // Limited to the rows of `order`, which more rows would exceed if packs overlap.
        behind[e] = (int)max(min((long long)from + limit, all), 0LL);
      }
    } else {
      next[e] = first + rank;
    }
    if (number == 0 && offsets) offsets[e] = first;
  }
  if (number == 0 && threadIdx.x == 0) {
    if (offsets) offsets[EXPERTS] = rows;
    if (dropped) *dropped = (int)(all - rows);
  }
  __syncthreads();
  const long long begin = chunk.begin * top_k, end = chunk.end * top_k;
  if (order)
    for (long long r = max(begin, (long long)rows) + threadIdx.x; r < end; r += THREADS) order[r] = -1;
  // One warp takes the choices in order, 32 at a time: the lanes with the same expert have successive rows.
  if (threadIdx.x >= 32) return;
  for (long long i0 = begin; i0 < end; i0 += 32) {
    const long long i = i0 + lane;
    const bool valid = i < end;
    const int expert = valid ? chosen[i] : EXPERTS;
    const u32 same = __match_any_sync(~0u, expert), below = same & ((1u << lane) - 1u);
    const int r = valid ? next[expert] + __popc(below) : 0;
    __syncwarp(); // All lanes have read `next` before it advances.
    if (valid && below == 0) next[expert] += __popc(same);
    __syncwarp();
    if (!valid) continue;
    // Unsigned, so that a negative row does not fit either.
    const bool fits = !PACKED || (u32)r < (u32)behind[expert];
    if (places) places[i] = fits ? r : -1;
    if (order && fits) order[r] = (int)i;
    if (gates && !fits) gates[i] = 0.0f;
  }
}
PARAMETERS(place, 104, 96);

// Gradient of the gates: dlogits = p (g - sum p g), where g is the gradient of the gate of each expert, 0 where it was
// not chosen or dropped, and p the softmax of the logits, with `renormalise` among the chosen experts only. dgates:
// (T, k), logits, dlogits: (T, E), experts: (T, k), places: (kT). A warp has a token.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    route_grad(const float *__restrict__ dgates, const T *__restrict__ logits, const int *__restrict__ experts,
               const int *__restrict__ places, T *__restrict__ dlogits, u32 *status, int tokens, int top_k,
               int renormalise) {
  after_predecessors();
  __shared__ float grads[WARPS][EXPERTS];
  __shared__ u8 members[WARPS][EXPERTS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long t = (long long)blockIdx.x * WARPS + warp;
  if (t >= tokens) return;
#pragma unroll
  for (int v = 0; v < EACH; v++)
    if (v * 32 + lane < EXPERTS) grads[warp][v * 32 + lane] = 0.0f, members[warp][v * 32 + lane] = 0;
  __syncwarp();
  for (int j = lane; j < top_k; j += 32) {
    const long long i = t * top_k + j;
    const int e = experts[i];
    if (e < 0 || e >= EXPERTS) {
      refuse(status, BAD_ROW);
      continue;
    }
    members[warp][e] = 1;
    grads[warp][e] = places[i] >= 0 ? dgates[i] : 0.0f;
  }
  __syncwarp();
  float x[EACH], g[EACH], top, dot = 0.0f;
  load_logits(logits + t * EXPERTS, x);
#pragma unroll
  for (int v = 0; v < EACH; v++) {
    const bool inside = v * 32 + lane < EXPERTS;
    g[v] = inside ? grads[warp][v * 32 + lane] : 0.0f;
    if (renormalise && inside && !members[warp][v * 32 + lane]) x[v] = NOTHING; // has probability 0
  }
  const float sum = exponentials(x, top);
#pragma unroll
  for (int v = 0; v < EACH; v++) dot = fmaf(x[v], g[v], dot);
  const float mean = warp_sum(dot) / sum;
#pragma unroll
  for (int v = 0; v < EACH; v++)
    if (v * 32 + lane < EXPERTS) dlogits[t * EXPERTS + v * 32 + lane] = store(x[v] / sum * (g[v] - mean));
}
PARAMETERS(route_grad, 64, 56);

// Partial sums of the router's losses over a chunk: for each expert the sum of its probabilities, then the sum of
// lse^2, to sums (chunks, E + 1); the choices of each expert to counts (chunks, E). logits: (T, E), experts: (T, k),
// packs: (pack_count, 6), done: (1), set to 0 for `router_loss`. Grid: one block per chunk, at least one.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    router_sums(const T *__restrict__ logits, const int *__restrict__ experts, const int *__restrict__ packs,
                double *sums, int *counts, u32 *done, u32 *status, int tokens, int top_k, int pack_count) {
  after_predecessors();
  __shared__ int of_chunk[EXPERTS];
  __shared__ double of_warps[WARPS][EXPERTS + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (blockIdx.x == 0 && warp == 0) check_packs(packs, pack_count, PACK_TOKENS, tokens, status);
  if (blockIdx.x == 0 && threadIdx.x == 0) *done = 0;
  const Chunk chunk = chunk_of_block(packs, pack_count, tokens);
  if (chunk.begin >= chunk.end) return; // No pack has the chunk, and nobody reads its sums.
  count_chunk(experts, of_chunk, status, chunk, top_k);
  double probabilities[EACH] = {}, squares = 0.0;
  for (int i = warp; i < CHUNK; i += WARPS) {
    const long long t = chunk.begin + i;
    if (t >= chunk.end) break;
    float x[EACH], top;
    load_logits(logits + t * EXPERTS, x);
    const float sum = exponentials(x, top);
#pragma unroll
    for (int v = 0; v < EACH; v++) probabilities[v] += x[v] / sum;
    const double lse = (double)top + logf(sum);
    squares += lse * lse;
  }
#pragma unroll
  for (int v = 0; v < EACH; v++)
    if (v * 32 + lane < EXPERTS) of_warps[warp][v * 32 + lane] = probabilities[v];
  if (lane == 0) of_warps[warp][EXPERTS] = squares;
  __syncthreads();
  for (int e = threadIdx.x; e <= EXPERTS; e += THREADS) {
    double total = 0.0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += of_warps[w][e];
    sums[(long long)blockIdx.x * (EXPERTS + 1) + e] = total;
    if (e < EXPERTS) counts[(long long)blockIdx.x * EXPERTS + e] = of_chunk[e];
  }
}
PARAMETERS(router_sums, 72, 64);

// The router's losses from the sums of `router_sums`. A block adds the chunks of a pack and writes the two terms of the
// pack, times its targets, to terms (pack_count, 2); the block that finishes last adds the packs in order. done: (1), the
// finished blocks; loss, balance, z: (1), each or null. Grid: one block per pack, at least one.
extern "C" __global__ void __launch_bounds__(MANY_THREADS)
    router_loss(const double *__restrict__ sums, const int *__restrict__ counts, const int *__restrict__ packs,
                double *terms, u32 *done, float *loss, float *balance, float *z, int tokens, int top_k, int pack_count,
                float balance_weight, float z_weight) {
  after_predecessors();
  __shared__ double shares[MANY_THREADS], squares[MANY_THREADS];
  __shared__ int choices[MANY_THREADS];
  __shared__ bool is_last;
  const int at = threadIdx.x, slice = at / EXPERTS, e = at % EXPERTS, pack = blockIdx.x;
  PackTokens of = {0, 0};
  int targets = 0;
  if (pack < pack_count) of = tokens_of_pack(packs, pack, tokens), targets = pack_at(packs, pack)[PACK_TARGETS];
  const int chunks = chunks_of_pack(of);
  sums += (long long)first_chunk(of.first, pack) * (EXPERTS + 1);
  counts += (long long)first_chunk(of.first, pack) * EXPERTS;
  double probability = 0.0, square = 0.0;
  int count = 0;
  if (slice < SLICES) {
#pragma unroll 4
    for (int c = slice; c < chunks; c += SLICES) {
      probability += sums[(long long)c * (EXPERTS + 1) + e];
      count += counts[(long long)c * EXPERTS + e];
    }
  }
  for (int c = at; c < chunks; c += MANY_THREADS) square += sums[(long long)c * (EXPERTS + 1) + EXPERTS];
  shares[at] = probability, squares[at] = square, choices[at] = count;
  __syncthreads();
  if (at < EXPERTS)
    for (int s = 1; s < SLICES; s++) probability += shares[s * EXPERTS + e], count += choices[s * EXPERTS + e];
  __syncthreads(); // All have read `shares`.
  shares[at] = at < EXPERTS ? count * probability : 0.0;
  __syncthreads();
  for (int half = MANY_THREADS / 2; half > 0; half /= 2) {
    if (at < half) shares[at] += shares[at + half], squares[at] += squares[at + half];
    __syncthreads();
  }
  if (at == 0) {
    double b = 0.0, s = 0.0;
    // Skipped, not multiplied by 0: without tokens the means are 0 / 0, and logits may be infinite.
    if (chunks > 0 && targets > 0) {
      const double of_tokens = of.end - of.first, of_choices = of_tokens * top_k;
      b = targets * ((double)balance_weight * EXPERTS * shares[0] / of_choices / of_tokens);
      s = targets * ((double)z_weight * squares[0] / of_tokens);
    }
    terms[2 * (long long)pack] = b, terms[2 * (long long)pack + 1] = s;
    __threadfence(); // The terms are visible before the block counts as finished.
    is_last = atomicAdd(done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  // Thread 0 adds the first terms and thread 1 the second ones, from shared memory, where a load takes a tenth of the
  // time. The loads go past the L1 cache, which is not coherent with other multiprocessors.
  const long long all = 2LL * gridDim.x;
  double sum = 0.0;
  for (long long first = 0; first < all; first += MANY_THREADS) {
    if (first + at < all) shares[at] = __ldcg(terms + first + at);
    __syncthreads();
    const int many = (int)min(all - first, (long long)MANY_THREADS);
    if (at < 2)
#pragma unroll 4
      for (int i = at; i < many; i += 2) sum += shares[i];
    __syncthreads(); // All have been added before `shares` is written again.
  }
  if (at < 2) squares[at] = sum;
  __syncthreads();
  if (at > 0) return;
  if (loss) *loss = (float)(squares[0] + squares[1]);
  if (balance) *balance = (float)squares[0];
  if (z) *z = (float)squares[1];
}
PARAMETERS(router_loss, 88, 80);

// Counts the choices of each expert in a chunk: counts (chunks, E). experts: (T, k), packs: (pack_count, 6). Grid: one
// block per chunk.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    count_choices(const int *__restrict__ experts, const int *__restrict__ packs, int *counts, u32 *status, int tokens,
                  int top_k, int pack_count) {
  after_predecessors();
  __shared__ int of_chunk[EXPERTS];
  if (blockIdx.x == 0 && threadIdx.x < 32) check_packs(packs, pack_count, PACK_TOKENS, tokens, status);
  const Chunk chunk = chunk_of_block(packs, pack_count, tokens);
  if (chunk.begin >= chunk.end) return; // No pack has the chunk, and nobody reads its counts.
  count_chunk(experts, of_chunk, status, chunk, top_k);
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[(long long)blockIdx.x * EXPERTS + e] = of_chunk[e];
}
PARAMETERS(count_choices, 48, 40);

// From the counts (chunks, E) of `count_choices`, for each pack the share of each expert in its choices, then its
// targets for each token, 0 without tokens: shares (pack_count, E + 1). Grid: one block per pack.
extern "C" __global__ void __launch_bounds__(MANY_THREADS)
    expert_shares(const int *__restrict__ counts, const int *__restrict__ packs, float *shares, int tokens, int top_k) {
  after_predecessors();
  __shared__ int choices[MANY_THREADS];
  const int at = threadIdx.x, slice = at / EXPERTS, e = at % EXPERTS, pack = blockIdx.x;
  const PackTokens of = tokens_of_pack(packs, pack, tokens);
  const int chunks = chunks_of_pack(of);
  counts += (long long)first_chunk(of.first, pack) * EXPERTS;
  int count = 0;
  if (slice < SLICES) {
#pragma unroll 4
    for (int c = slice; c < chunks; c += SLICES) count += counts[(long long)c * EXPERTS + e];
  }
  choices[at] = count;
  __syncthreads();
  if (at >= EXPERTS) return;
  for (int s = 1; s < SLICES; s++) count += choices[s * EXPERTS + e];
  const double of_tokens = max(of.end - of.first, 1);
  float *const mine = shares + (long long)pack * (EXPERTS + 1);
  mine[e] = (float)(count / (of_tokens * top_k));
  if (e == 0) mine[EXPERTS] = chunks > 0 ? (float)(pack_at(packs, pack)[PACK_TARGETS] / of_tokens) : 0.0f;
}

// Gradient of the router's losses: p_e (b (f_e - sum_i f_i p_i) + 2 z lse), times dloss and the targets for each token of
// the pack, where b is the balance weight times E. dloss: (1), logits, dlogits: (T, E), shares: (pack_count, E + 1) with
// the f of each pack. A warp has a token; its pack is the last that begins at the token or before it.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    router_loss_grad(const float *__restrict__ dloss, const T *__restrict__ logits, const float *__restrict__ shares,
                     const int *__restrict__ packs, T *__restrict__ dlogits, int tokens, int pack_count,
                     float balance_weight, float z_weight) {
  after_predecessors();
  const int lane = threadIdx.x % 32;
  const long long t = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (t >= tokens) return;
  float x[EACH], f[EACH], top, dot = 0.0f;
  load_logits(logits + t * EXPERTS, x);
  int begun = 0;
#pragma unroll 1 // A step has few packs, and the registers of more loads would cost warps.
  for (int p = lane; p < pack_count; p += 32) begun += pack_at(packs, p)[PACK_TOKENS] <= t;
  const int pack = __reduce_add_sync(~0u, begun) - 1;
  shares += (long long)max(pack, 0) * (EXPERTS + 1);
  const float targets = pack >= 0 ? shares[EXPERTS] : 0.0f;
  if (targets == 0.0f) { // Not multiplied by 0: logits may be infinite.
#pragma unroll
    for (int v = 0; v < EACH; v++)
      if (v * 32 + lane < EXPERTS) dlogits[t * EXPERTS + v * 32 + lane] = store(0.0f);
    return;
  }
  const float each = *dloss * targets;
  const float balance = balance_weight * (float)EXPERTS * each, z = 2.0f * z_weight * each;
  const float sum = exponentials(x, top);
#pragma unroll
  for (int v = 0; v < EACH; v++) {
    f[v] = v * 32 + lane < EXPERTS ? shares[v * 32 + lane] : 0.0f;
    dot = fmaf(x[v], f[v], dot);
  }
  const float mean = warp_sum(dot) / sum, of_lse = z * (top + logf(sum));
#pragma unroll
  for (int v = 0; v < EACH; v++)
    if (v * 32 + lane < EXPERTS)
      dlogits[t * EXPERTS + v * 32 + lane] = store(x[v] / sum * fmaf(balance, f[v] - mean, of_lse));
}
PARAMETERS(router_loss_grad, 56, 52);
