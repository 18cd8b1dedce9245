// Packed attention of 16-bit elements by mma.sync m16n8k16, after FlashAttention-2 (Dao 2023): scores, softmax and sums
// in f32, keys and values through shared memory, no S x S buffer. TYPE is 1 (bf16) or 2 (f16).
//
// Invariant: a row of o is a function of its own sequence, the same bits in every form. What a row's sums depend on is
// STEP alone: keys are visited in steps of STEP from the sequence's start, in order, and every row keeps a maximum of its
// own. The form (WARPS, MT, TILE, STAGES) says which warp has a row and when keys are fetched; TILE is a multiple of
// STEP, so no step is cut otherwise. It is chosen for speed alone. Only rows of sequences are written.
//
// Constants: HEAD_DIM (d), ROTARY, TABLE (element type of cos and sin), ALIBI, CAUSAL, and the form, from which the host
// computes the shared memory: WARPS, MT, TILE keys of a stage, STAGES of k and v in flight. A block takes ROWS queries of
// one head of one sequence, a warp MT times 16 of them. Rows in shared memory are LD elements apart, an odd number of
// 16-byte words, so that the eight rows of an ldmatrix lie in different banks; columns d .. DP there are zeros.

#define STEP 32                        // keys between two looks at the maximum
#define DP ((HEAD_DIM + 15) / 16 * 16) // d, padded
#define LD (DP + 8)
#define ROWS (WARPS * MT * 16)
#define THREADS (WARPS * 32)
#ifndef BLOCKS
// Blocks of a multiprocessor, as many as have their registers without spilling.
#define BLOCKS (DP < 64 || (DP == 64 && !ALIBI && __CUDA_ARCH__ >= 900) ? 12 / WARPS : WARPS < 8 ? 8 / WARPS : 1)
#endif
static_assert(TILE % STEP == 0 && STAGES >= 2, "a tile is whole steps");
#define LOG2E 1.4426950408889634f

// The most elements, a power of two and 8 at most, that divide n: every address is a multiple of d elements.
#define DIVIDES(n) ((n) % 8 == 0 ? 8 : (n) % 4 == 0 ? 4 : (n) % 2 == 0 ? 2 : 1)
#define CHUNK DIVIDES(HEAD_DIM)
#define HALF (HEAD_DIM / 2)
#define PAIR DIVIDES(HALF)

// The thread's number, read anew: what follows from it is not kept in registers all through the loop over the tiles.
__device__ __forceinline__ int thread_now() { int r; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r)); return r; }
template <int N> struct __align__(N * 2) Vector { u16 x[N]; };

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// N elements to shared memory without waiting; zeros where they are not `there`.
template <int N> __device__ __forceinline__ void copy(u16 *to, const u16 *from, bool there) {
  if constexpr (N == 8) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0));
  } else if constexpr (N > 1) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(N * 2),
                 "r"(there ? N * 2 : 0));
  } else {
    *to = there ? *from : (u16)0;
  }
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Rows 0 .. n of one head to shared memory, of which `rows` are there, the others zeros. (n, d) -> (n, LD)
template <int N> __device__ __forceinline__ void fetch(u16 *to, const u16 *from, long long stride, int rows) {
  constexpr int per = HEAD_DIM / CHUNK;
  int thread = thread_now();
#pragma unroll
  for (int at = 0; at < N * per; at += THREADS) {
    int i = at + thread, r = i / per, c = i % per * CHUNK;
    if (N * per % THREADS == 0 || i < N * per) {
      bool there = r < rows;
      copy<CHUNK>(to + r * LD + c, from + (there ? r * stride : 0) + c, there);
    }
  }
}

// The same for rows that will be rotated: a thread fetches what it will rotate, so it waits for nobody else.
template <int N> __device__ __forceinline__ void fetch_pairs(u16 *to, const u16 *from, long long stride, int rows) {
#if ROTARY
  constexpr int per = HALF / PAIR;
  int thread = thread_now();
#pragma unroll
  for (int at = 0; at < N * per; at += THREADS) {
    int i = at + thread, r = i / per, c = i % per * PAIR;
    if (N * per % THREADS == 0 || i < N * per) {
      bool there = r < rows;
      const u16 *row = from + (there ? r * stride : 0) + c;
      copy<PAIR>(to + r * LD + c, row, there);
      copy<PAIR>(to + r * LD + c + HALF, row + HALF, there);
    }
  }
#else
  fetch<N>(to, from, stride, rows);
#endif
}

// Half-split rotary embedding of rows in shared memory, which are those from `position` on (Su et al. 2021):
// (a, b) -> (a cos - b sin, b cos + a sin). cos and sin: (longest, d/2)
typedef Element<TABLE>::type Angle;
template <int N>
__device__ __forceinline__ void rotate(u16 *x, const Angle *cosines, const Angle *sines, int position, int rows) {
#if ROTARY
  constexpr int per = HALF / PAIR;
  int thread = thread_now();
  constexpr int bytes = PAIR * sizeof(Angle);
  struct __align__(bytes < 16 ? bytes : 16) Angles { Angle x[PAIR]; };
#pragma unroll
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

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// c += a b: (16, 16) (16, 8) -> (16, 8)
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if TYPE == 1
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
  asm(PRODUCT " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// What a warp holds of its MT * 16 queries. A thread has, of each 16, rows lane / 4 and that + 8.
struct Rows {
  u32 q[MT][DP / 16][4];
  float o[MT][DP / 8][4]; // sums of exp2(score - top) v
  float top[MT][2];       // in units of log2, at most 8 below the row's true maximum so far
  float sum[MT][2];       // of this thread's keys
};

// Bytes of shared memory, after the first, that a lane gives to ldmatrix: for a and for values, and for keys.
__device__ __forceinline__ int by_row() {
  int lane = thread_now() % 32;
  return (lane % 16 * LD + lane / 16 * 8) * 2;
}
__device__ __forceinline__ int by_key() {
  int lane = thread_now() % 32;
  return ((lane / 16 * 8 + lane % 8) * LD + lane / 8 % 2 * 8) * 2;
}

// q k^T of the warp's rows and the next STEP keys. (MT * 16, d) (STEP, d) -> (MT * 16, STEP)
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
        mma(s[m][2 * n], rows.q[m][c], b[0], b[1]);
        mma(s[m][2 * n + 1], rows.q[m][c], b[2], b[3]);
      }
    }
  }
}

// Adds the weighted values of STEP keys. (MT * 16, STEP) (STEP, d) -> (MT * 16, d)
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

// Scores to exp2(score - top). A maximum is followed only when it has grown by 8, which rescales o seldom and exactly:
// o and sum stay relative to the same top (after Zadouri et al. 2026, FlashAttention-4). `row` and `key` are this
// thread's first ones, `factor` and `slope` in units of log2.
template <bool MASKED>
__device__ __forceinline__ void softmax(float (&s)[MT][STEP / 8][4], Rows &rows, int row, int key, int keys, float factor,
                                        float slope) {
  int left = MASKED ? keys - thread_now() % 4 * 2 : 0; // from the thread's own first key on
  bool grown = false;
  float shrink[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int i = row + m * 16 + h * 8;
      float most = -INFINITY;
#pragma unroll
      for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float &x = s[m][n][h * 2 + e];
          int j = n * 8 + e; // after `key`
#if ALIBI
          x = fmaf(x, factor, __fmul_rn(fabsf((float)(i - key) - (float)j), -slope));
#endif
          if (MASKED && (j >= left || (CAUSAL && key + j > i))) x = -INFINITY;
          most = fmaxf(most, x);
        }
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
#if !ALIBI
      most = __fmul_rn(most, factor);
#endif
      shrink[m][h] = 1.0f;
      if (most > rows.top[m][h] + 8.0f) {
        shrink[m][h] = exp2_fast(rows.top[m][h] - most);
        rows.top[m][h] = most;
        grown = true;
      }
    }
  }
  if (__any_sync(~0u, grown)) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        rows.sum[m][h] = __fmul_rn(rows.sum[m][h], shrink[m][h]);
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) rows.o[m][n][h * 2 + e] = __fmul_rn(rows.o[m][n][h * 2 + e], shrink[m][h]);
      }
  }
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < STEP / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float &x = s[m][n][e];
        float top = rows.top[m][e / 2];
#if ALIBI
        x = exp2_fast(x - top);
#else
        x = exp2_fast(fmaf(x, factor, -top));
#endif
        rows.sum[m][e / 2] += x;
      }
}

// o / sum to `to`, by way of the warp's own rows in shared memory, and the logarithms of the sums. `row` is the warp's
// first of the `rows` that are there; `to` and `lse` point to it.
__device__ __forceinline__ void finish(Rows &w, u16 *mine, u16 *to, long long stride, float *lse, int heads, int rows) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int r = m * 16 + h * 8 + lane / 4;
      float sum = w.sum[m][h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float inverse = 1.0f / sum;
#pragma unroll
      for (int n = 0; n < DP / 8; n++)
        *(u32 *)(mine + r * LD + n * 8 + lane % 4 * 2) =
            pack<TYPE>(__fmul_rn(w.o[m][n][h * 2], inverse), __fmul_rn(w.o[m][n][h * 2 + 1], inverse));
      if (lse && lane % 4 == 0 && r < rows) lse[(long long)r * heads] = (w.top[m][h] + log2f(sum)) * 0.6931471805599453f;
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

// q: (T, H d), k, v: (T, G d), each with its stride; spans: (S, 2); cos, sin: (longest, d/2); o: (T, H d); lse: (T, H).
// A step's keys for the warp's rows: scores, softmax, values. Without a mask there is no branch among them; where nothing
// is masked, both forms give the same bits. `k` and `v` are the lane's addresses, `keys` how many of the step's there are.
template <bool MASKED>
__device__ __forceinline__ void step(Rows &rows, u32 k, u32 v, int row, int key, int keys, float factor, float slope) {
  float s[MT][STEP / 8][4];
  scores<MASKED>(s, rows, k, keys);
  softmax<MASKED>(s, rows, row, key, keys, factor, slope);
  values<MASKED>(rows, s, v, keys);
}

// A block for each head and each number below T / ROWS + S: see block_of.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention(const u16 *q, const u16 *k, const u16 *v, long long q_stride, long long kv_stride, const int *spans,
          int sequences, int tokens, const Angle *cosines, const Angle *sines, int longest, u16 *o, float *lse, int heads,
          int group, float scale, u32 *status) {
  after_predecessors();
  extern __shared__ __align__(16) u16 memory[]; // (ROWS, LD) of q, later o; STAGES times k and v: (TILE, LD) each
  __shared__ float shared_slope;
  int number = blockIdx.x / heads, head = blockIdx.x % heads;
  if (head == 0 && threadIdx.x == 0) check_span(spans, sequences, tokens, ROTARY ? longest : tokens, number, status);
  Block block = block_of<ROWS>(spans, sequences, number);
  int length = block.end - block.start;
  if (block.first >= length || block.first < 0 || block.start < 0 || block.end > tokens) return;
  if (ROTARY && length > longest) return;

  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if HEAD_DIM % 16
  constexpr int padding = DP - HEAD_DIM;
  for (int i = threadIdx.x; i < (ROWS + STAGES * 2 * TILE) * padding; i += THREADS)
    memory[i / padding * LD + HEAD_DIM + i % padding] = 0;
#endif
  u16 *stages = memory + ROWS * LD;
  q += (long long)(block.start + block.first) * q_stride + head * HEAD_DIM;
  int keys = CAUSAL ? min(length, block.first + ROWS) : length;
  int tiles = (keys + TILE - 1) / TILE;
  auto ask = [&](int tile) { // for k and v of a tile; there may be none
    if (tile < tiles) {
      u16 *to = stages + tile % STAGES * 2 * TILE * LD;
      long long at = (long long)(block.start + tile * TILE) * kv_stride + head / group * HEAD_DIM;
      fetch_pairs<TILE>(to, k + at, kv_stride, length - tile * TILE);
      fetch<TILE>(to + TILE * LD, v + at, kv_stride, length - tile * TILE);
    }
    commit();
  };
  fetch_pairs<ROWS>(memory, q, q_stride, length - block.first);
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; tile++) ask(tile);
  if (ALIBI && threadIdx.x == 0) shared_slope = alibi_slope(head, heads);

  wait<STAGES - 2>();
  rotate<ROWS>(memory, cosines, sines, block.first, length - block.first);
  __syncthreads();
  Rows rows;
  int mine = warp * MT * 16, first = block.first + mine; // the warp's first row, in the block and in the sequence
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int c = 0; c < DP / 16; c++)
      ldmatrix(rows.q[m][c], shared_address(memory) + ((mine + m * 16) * LD + c * 16) * 2 + by_row());
#pragma unroll
    for (int n = 0; n < DP / 8; n++) rows.o[m][n][0] = rows.o[m][n][1] = rows.o[m][n][2] = rows.o[m][n][3] = 0.0f;
    rows.top[m][0] = rows.top[m][1] = -INFINITY;
    rows.sum[m][0] = rows.sum[m][1] = 0.0f;
  }
  float factor = __fmul_rn(scale, LOG2E), slope = ALIBI ? __fmul_rn(shared_slope, LOG2E) : 0.0f;

  for (int tile = 0; tile < tiles; tile++) {
    u16 *stage = stages + tile % STAGES * 2 * TILE * LD;
    wait<STAGES - 2>();
    rotate<TILE>(stage, cosines, sines, tile * TILE, length - tile * TILE);
    __syncthreads(); // all see this tile, and nobody reads the stage any more that is asked for next
    ask(tile + STAGES - 1);
    if (first >= length) continue;
    int mine_keys = CAUSAL ? min(keys, first + MT * 16) : keys;
#pragma unroll 1
    for (int at = 0; at < TILE; at += STEP) {
      int key = tile * TILE + at;
      if (key >= mine_keys) break;
      // Read anew in every step: kept, they would take registers that spill.
      int lane = thread_now() % 32;
      u32 k_at = shared_address(stage + at * LD) + by_key(), v_at = shared_address(stage + (TILE + at) * LD) + by_row();
      if (mine_keys - key >= STEP && (!CAUSAL || key + STEP <= first + 1))
        step<false>(rows, k_at, v_at, first + lane / 4, key + lane % 4 * 2, STEP, factor, slope);
      else
        step<true>(rows, k_at, v_at, first + lane / 4, key + lane % 4 * 2, mine_keys - key, factor, slope);
    }
  }
  if (first >= length) return;
  long long row = block.start + first;
  long long stride = (long long)heads * HEAD_DIM;
  finish(rows, memory + mine * LD, o + row * stride + head * HEAD_DIM, stride, lse ? lse + row * heads + head : lse, heads,
         length - first);
}
