// Mixture-of-experts routing, its gradient, and the losses of the router (graph/src/ops/route.rs).
//
// Routing takes three kernels. `choose`: a block has a chunk of CHUNK tokens; it chooses the experts of each token and
// counts the chunk's choices per expert. `rank_chunks`: a block has an expert and turns its counts into the rank of
// each chunk's first choice. `place`: a block has a chunk again and gives each of its choices a row: the first row of
// its expert plus its rank there. Counts and ranks are integers, so the order of the atomic additions does not change
// them, and ranks ascend with the token: the sort is stable.
//
// A warp has a token: lane l has experts l, l + 32, ... in registers. Sums over the experts of a token add a lane's
// experts in order, then the lanes by a butterfly. Sums over tokens are in f64: a warp adds every eighth token of a
// chunk, the warps of a block are added in order, and a last block adds the chunks in slices and the slices in order.
//
// Invariant: the bits depend on the data and the shapes only. Indices from the inputs are checked before use.
//
// Constants: EXPERTS, the number of experts, at most 256; CHUNK, tokens of a chunk.

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

// Adds to `counts` the choices of one chunk of tokens. All threads of the block must call it; the counts are complete
// after the next barrier.
__device__ __forceinline__ void count_chunk(const int *experts, int (&counts)[EXPERTS], u32 *status, int tokens, int top_k) {
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[e] = 0;
  __syncthreads();
  const long long begin = (long long)blockIdx.x * CHUNK * top_k, all = (long long)tokens * top_k;
  const long long end = min(begin + (long long)CHUNK * top_k, all);
  for (long long i = begin + threadIdx.x; i < end; i += THREADS) {
    const int e = experts[i];
    if (e < 0 || e >= EXPERTS) refuse(status, BAD_ROW);
    else atomicAdd(&counts[e], 1);
  }
}

// Chooses the experts of each token and computes their gates. logits: (T, E), gates, experts: (T, k) or null, chosen:
// (T, k), the experts again, for `place`; counts: (E, chunks). Grid: one block per chunk.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    choose(const T *__restrict__ logits, float *gates, int *experts, u8 *chosen, int *counts, int tokens, int top_k,
           int renormalise) {
  after_predecessors();
  __shared__ int of_chunk[EXPERTS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) of_chunk[e] = 0;
  __syncthreads();
  for (int i = warp; i < CHUNK; i += WARPS) {
    const long long t = (long long)blockIdx.x * CHUNK + i;
    if (t >= tokens) break;
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

// Replaces the counts (E, chunks) of each expert by their exclusive prefix sums, and writes their totals (E). Grid: one
// block per expert.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rank_chunks(int *counts, int *totals, int chunks) {
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
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

// Gives each choice its row. chosen: (T, k), ranks: (E, chunks) of `rank_chunks`, totals: (E); gates: (T, k), order,
// places: (kT), offsets: (E + 1), dropped: (1), each or null. Choices from rank `limit` on are dropped. Grid: one block
// per chunk, at least one, because block 0 writes `offsets` and `dropped`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    place(const u8 *__restrict__ chosen, const int *__restrict__ ranks, const int *__restrict__ totals, float *gates,
          int *order, int *places, int *offsets, int *dropped, int tokens, int top_k, int chunks, int limit) {
  after_predecessors();
  __shared__ int sums[WARPS], firsts[EXPERTS], next[EXPERTS];
  const int chunk = blockIdx.x, e = threadIdx.x, lane = threadIdx.x % 32;
  const long long all = (long long)tokens * top_k;
  int kept; // rows of all experts
  const int first = block_scan(e < EXPERTS ? min(totals[e], limit) : 0, sums, kept);
  if (e < EXPERTS) {
    firsts[e] = first;
    next[e] = chunk < chunks ? ranks[(long long)e * chunks + chunk] : 0;
    if (chunk == 0 && offsets) offsets[e] = first;
  }
  if (chunk == 0 && threadIdx.x == 0) {
    if (offsets) offsets[EXPERTS] = kept;
    if (dropped) *dropped = (int)(all - kept);
  }
  __syncthreads();
  const long long begin = (long long)chunk * CHUNK * top_k, end = min(begin + (long long)CHUNK * top_k, all);
  if (order)
    for (long long r = max(begin, (long long)kept) + threadIdx.x; r < end; r += THREADS) order[r] = -1;
  // One warp takes the choices in order, 32 at a time: the lanes with the same expert have successive ranks.
  if (threadIdx.x >= 32) return;
  for (long long i0 = begin; i0 < end; i0 += 32) {
    const long long i = i0 + lane;
    const bool valid = i < end;
    const int expert = valid ? chosen[i] : EXPERTS;
    const u32 same = __match_any_sync(~0u, expert), below = same & ((1u << lane) - 1u);
    const int rank = valid ? next[expert] + __popc(below) : 0;
    __syncwarp(); // All lanes have read `next` before it advances.
    if (valid && below == 0) next[expert] += __popc(same);
    __syncwarp();
    if (!valid) continue;
    const bool fits = rank < limit;
    const int r = firsts[expert] + rank;
    if (places) places[i] = fits ? r : -1;
    if (order && fits) order[r] = (int)i;
    if (gates && !fits) gates[i] = 0.0f;
  }
}

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

// Partial sums of the router's losses over a chunk: for each expert the sum of its probabilities, then the sum of
// lse^2, to sums (chunks, E + 1); the choices of each expert to counts (chunks, E). logits: (T, E), experts: (T, k).
// Grid: one block per chunk.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    router_sums(const T *__restrict__ logits, const int *__restrict__ experts, double *sums, int *counts, u32 *status,
                int tokens, int top_k) {
  after_predecessors();
  __shared__ int of_chunk[EXPERTS];
  __shared__ double of_warps[WARPS][EXPERTS + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  count_chunk(experts, of_chunk, status, tokens, top_k);
  double probabilities[EACH] = {}, squares = 0.0;
  for (int i = warp; i < CHUNK; i += WARPS) {
    const long long t = (long long)blockIdx.x * CHUNK + i;
    if (t >= tokens) break;
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

// The router's losses from the sums of `router_sums`. loss, balance, z: (1), each or null. Grid: one block.
extern "C" __global__ void __launch_bounds__(MANY_THREADS)
    router_loss(const double *__restrict__ sums, const int *__restrict__ counts, float *loss, float *balance, float *z,
                int chunks, int tokens, int top_k, float balance_weight, float z_weight) {
  after_predecessors();
  __shared__ double shares[MANY_THREADS], squares[MANY_THREADS];
  __shared__ int choices[MANY_THREADS];
  const int at = threadIdx.x, slice = at / EXPERTS, e = at % EXPERTS;
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
  if (at > 0) return;
  const double of_tokens = max(tokens, 1), of_choices = of_tokens * top_k;
  const double b = (double)balance_weight * EXPERTS * shares[0] / of_choices / of_tokens;
  const double s = (double)z_weight * squares[0] / of_tokens;
  if (loss) *loss = (float)(b + s);
  if (balance) *balance = (float)b;
  if (z) *z = (float)s;
}

// Counts the choices of each expert in a chunk: counts (chunks, E). experts: (T, k). Grid: one block per chunk.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    count_choices(const int *__restrict__ experts, int *counts, u32 *status, int tokens, int top_k) {
  after_predecessors();
  __shared__ int of_chunk[EXPERTS];
  count_chunk(experts, of_chunk, status, tokens, top_k);
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += THREADS) counts[(long long)blockIdx.x * EXPERTS + e] = of_chunk[e];
}

// Each expert's share of all choices, from counts (chunks, E). shares: (E). Grid: one block.
extern "C" __global__ void __launch_bounds__(MANY_THREADS)
    expert_shares(const int *__restrict__ counts, float *shares, int chunks, int tokens, int top_k) {
  after_predecessors();
  __shared__ int choices[MANY_THREADS];
  const int at = threadIdx.x, slice = at / EXPERTS, e = at % EXPERTS;
  int count = 0;
  if (slice < SLICES) {
#pragma unroll 4
    for (int c = slice; c < chunks; c += SLICES) count += counts[(long long)c * EXPERTS + e];
  }
  choices[at] = count;
  __syncthreads();
  if (at >= EXPERTS) return;
  for (int s = 1; s < SLICES; s++) count += choices[s * EXPERTS + e];
  shares[e] = (float)((double)count / ((double)max(tokens, 1) * top_k));
}

// Gradient of the router's losses: p_e (b (f_e - sum_i f_i p_i) + 2 z lse), times dloss / T, where b is the balance
// weight times E. dloss: (1), logits, dlogits: (T, E), shares f: (E). A warp has a token.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    router_loss_grad(const float *__restrict__ dloss, const T *__restrict__ logits, const float *__restrict__ shares,
                     T *__restrict__ dlogits, int tokens, float balance_weight, float z_weight) {
  after_predecessors();
  const int lane = threadIdx.x % 32;
  const long long t = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (t >= tokens) return;
  const float each = *dloss / (float)tokens;
  const float balance = balance_weight * (float)EXPERTS * each, z = 2.0f * z_weight * each;
  float x[EACH], f[EACH], top, dot = 0.0f;
  load_logits(logits + t * EXPERTS, x);
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
