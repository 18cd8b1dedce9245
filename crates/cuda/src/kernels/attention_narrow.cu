// Packed attention of heads of 16, 24 and 32 columns, 16-bit elements, with rotary embedding and no mask, by mma.sync
// m16n8k16. Such heads are bound by exponentials, one for every 64 to 128 operations, and by what stands beside them. So
// keys and values of a whole short sequence lie in shared memory, rotated once; queries are rotated in registers, with the
// scale and log2(e) in their rounding; sums of weights are a product with ones; and weights are exp2(score) as it is:
// element types with f32's exponents need no maximum. A row whose sums leave the range where all that matters is exact is
// computed again below its maximum; f16 always is. TYPE is 1 (bf16) or 2 (f16).
//
// Invariant: a row of o is a function of its own sequence, the same bits in every form: keys are added in blocks of 16
// from the sequence's start, in order, and rows computed again are 16 MT of the sequence, whatever block has them. Only
// rows of sequences are written.
//
// Constants: HEAD_DIM (d), TABLE (element type of cos and sin), and the form, from which the host computes the shared
// memory: WARPS of a block, ROUNDS of 16 MT queries of each, TILE keys in shared memory.

#define MT 1                                 // 16 queries of a warp at a time
#define UNROLL 2                             // blocks of keys that are worked on together
#define IN_FLIGHT 3                          // loads of a thread that are, while keys and values are fetched
#define THREADS (WARPS * 32)
#define M_ROWS (16 * MT)                     // queries of a warp at a time
#define ROWS (ROUNDS * WARPS * M_ROWS)       // queries of a block
#define HALF (HEAD_DIM / 2)
#define KC ((HEAD_DIM + 15) / 16)            // pieces of 16 columns of q and k: both halves' columns in one, or one each
#define NT (HEAD_DIM / 8)                    // pieces of 8 columns of v and o
// Rows in shared memory are LD elements apart, an odd number of 16-byte words: eight rows lie in different banks.
#define LD (16 * KC + 8)
#define PAIRS (HALF % 8 == 0 ? 8 : 4)         // columns of a half that a thread rotates at once
#define LOG2E 1.4426950408889634f
static_assert(HEAD_DIM == 16 || HEAD_DIM == 24 || HEAD_DIM == 32, "a narrow head");
static_assert(TILE % 16 == 0, "blocks of 16 keys");

typedef Element<TABLE>::type Angle;

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// Two neighbouring columns a and their partners b, of the other half, rotated by two angles and scaled (Su et al. 2021):
// (a, b) -> (a cos - b sin, b cos + a sin).
__device__ __forceinline__ void rotate(u32 &a, u32 &b, const Angle *cosines, const Angle *sines, float factor) {
  float u[2], v[2], x[2], y[2];
  unpack<TYPE>(a, u[0], u[1]);
  unpack<TYPE>(b, v[0], v[1]);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float cos = widen<TABLE>(cosines[e]), sin = widen<TABLE>(sines[e]);
    x[e] = __fmul_rn(factor, fmaf(u[e], cos, -__fmul_rn(v[e], sin)));
    y[e] = __fmul_rn(factor, fmaf(v[e], cos, __fmul_rn(u[e], sin)));
  }
  a = pack<TYPE>(x[0], x[1]);
  b = pack<TYPE>(y[0], y[1]);
}

// Reads that may pass writes to shared memory: nobody writes what is read here.
__device__ __forceinline__ uint4 read(const uint4 *from) {
  uint4 x;
  asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
__device__ __forceinline__ uint2 read(const uint2 *from) {
  uint2 x;
  asm("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}
__device__ __forceinline__ u32 read(const u32 *from) {
  u32 x;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

// N elements, or angles, as words.
template <int BYTES> struct Words { typedef uint4 type; };
template <> struct Words<8> { typedef uint2 type; };
template <> struct Words<4> { typedef u32 type; };
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
    for (int i = 0; i < MANY; i++) whole[i] = read((const Word *)from + i);
  }
};

// Rows `first` .. of a head of k, rotated, and of v to shared memory; behind the last zeros, up to whole blocks of 16.
// Columns of v lie as o's are stored: word t NT + j, of 2, where piece j has a lane's word t. A thread has MANY reads of
// each under way. (n, d) -> (TILE, LD)
template <int MANY, int PAIR>
__device__ __forceinline__ void bring(u16 *keys, u16 *values, const u16 *k, const u16 *v, long long stride,
                                      const Angle *cosines, const Angle *sines, int first, int rows) {
  constexpr int per_k = HALF / PAIR;
  const int padded = (rows + 15) / 16 * 16;
#pragma unroll 1
  for (int at = threadIdx.x; at < padded * NT; at += MANY * THREADS) {
    uint4 x[MANY];
#pragma unroll
    for (int j = 0; j < MANY; j++) {
      int i = at + j * THREADS, r = min(i / NT, rows - 1);
      x[j] = read((const uint4 *)(v + r * stride + i % NT * 8));
    }
#pragma unroll
    for (int j = 0; j < MANY; j++) {
      int i = at + j * THREADS, r = i / NT, c = i % NT;
      if (r >= padded) continue;
      u32 *to = (u32 *)(values + r * LD);
      const u32 words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int w = c * 4 + e;
        to[w % NT * 4 + w / NT] = r < rows ? words[e] : 0;
      }
    }
  }
#pragma unroll 1
  for (int at = threadIdx.x; at < padded * per_k; at += MANY * THREADS) {
    Vector<u16, PAIR> a[MANY], b[MANY];
#pragma unroll
    for (int j = 0; j < MANY; j++) {
      int i = at + j * THREADS, r = min(i / per_k, rows - 1), c = i % per_k * PAIR;
      a[j].load(k + r * stride + c), b[j].load(k + r * stride + c + HALF);
    }
#pragma unroll
    for (int j = 0; j < MANY; j++) {
      int i = at + j * THREADS, r = i / per_k, c = i % per_k * PAIR;
      if (r >= padded) continue;
      const long long entry = (long long)(first + min(r, rows - 1)) * HALF + c;
      Vector<Angle, PAIR> cosine, sine;
      cosine.load(cosines + entry), sine.load(sines + entry);
      u16 *to = keys + r * LD + c;
#pragma unroll
      for (int e = 0; e < PAIR / 2; e++) {
        u32 &low = a[j].words[e], &high = b[j].words[e];
        rotate(low, high, cosine.x + 2 * e, sine.x + 2 * e, 1.0f);
        if (r >= rows) low = high = 0;
      }
      *(typename Vector<u16, PAIR>::Word *)to = a[j].whole[0];
      *(typename Vector<u16, PAIR>::Word *)(to + (KC == 1 ? HALF : 16)) = b[j].whole[0];
    }
  }
}

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[2], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
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

// What a warp holds of its MT * 16 queries. A thread has, of each 16, rows lane / 4 and that + 8.
struct Rows {
  u32 q[MT][KC][4];
  float o[MT][NT][4];  // sums of exp2(score - top) v
  float sum[MT][4];    // and of exp2(score - top): of one row twice, of the other twice
  float top[MT][2];    // read where it is not zero
};

// The warp's queries as they are: pairs of columns of the first half, and their partners.
struct Queries {
  u32 a[MT][2][KC], b[MT][2][KC];
  // `q` points to the warp's first row; rows behind the last are zeros.
  __device__ __forceinline__ void ask(const u16 *q, long long stride, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int r = m * 16 + h * 8 + lane / 4;
#pragma unroll
        for (int e = 0; e < KC; e++) {
          const int c = e * 8 + lane % 4 * 2;
          const u32 *from = (const u32 *)(q + r * stride + c);
          const bool there = r < rows && c < HALF;
          a[m][h][e] = there ? read(from) : 0, b[m][h][e] = there ? read(from + HALF / 2) : 0;
        }
      }
  }
  // Rotated and scaled; the first row is number `position` of its sequence, of `rows` that are left.
  __device__ __forceinline__ void rotated(Rows &w, const Angle *cosines, const Angle *sines, int position, int rows, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int r = min(m * 16 + h * 8 + lane / 4, rows - 1);
#pragma unroll
        for (int e = 0; e < KC; e++) {
          const long long entry = (long long)(position + r) * HALF + min(e * 8 + lane % 4 * 2, HALF - 2);
          Vector<Angle, 2> cosine, sine;
          cosine.load(cosines + entry), sine.load(sines + entry);
          u32 low = a[m][h][e], high = b[m][h][e];
          rotate(low, high, cosine.x, sine.x, factor);
          // Registers of a fragment: rows and rows + 8, then the same of columns 8 ..
          if (KC == 1) w.q[m][0][h] = low, w.q[m][0][2 + h] = high;
          else w.q[m][0][2 * e + h] = low, w.q[m][KC - 1][2 * e + h] = high;
        }
      }
  }
};

// q k^T of the warp's rows and 16 keys at `k`. (MT * 16, d) (16, d) -> (MT * 16, 16)
__device__ __forceinline__ void scores(float (&s)[MT][2][4], const Rows &w, u32 k) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < 2; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
  for (int c = 0; c < KC; c++) {
    u32 b[4];
    ldmatrix(b, k + c * 32);
#pragma unroll
    for (int m = 0; m < MT; m++) {
      mma(s[m][0], w.q[m][c], b[0], b[1]);
      mma(s[m][1], w.q[m][c], b[2], b[3]);
    }
  }
}

// Bytes, after the first of keys or values, that a lane gives to ldmatrix.
__device__ __forceinline__ int by_key() {
  int lane = threadIdx.x % 32;
  return ((lane / 16 * 8 + lane % 8) * LD + lane / 8 % 2 * 8) * 2;
}
__device__ __forceinline__ int by_row() {
  int lane = threadIdx.x % 32;
  return (lane % 16 * LD + lane / 16 * 8) * 2;
}

// Adds the keys of a tile: `k` and `v` are the lane's addresses. A key that is not there has zeros as value and as one.
template <bool TOPPED> __device__ __forceinline__ void add_keys(Rows &w, u32 k, u32 v, int keys) {
#pragma unroll UNROLL
  for (int key = 0; key < keys; key += 16) {
    float s[MT][2][4];
    scores(s, w, k + key * LD * 2);
    u32 a[MT][4], one[2];
    const int left = keys - key - threadIdx.x % 4 * 2; // from the thread's own first key on
#pragma unroll
    for (int n = 0; n < 2; n++) {
      // 1.0 twice.
      const u32 ones = TYPE == 1 ? 0x3F803F80u : 0x3C003C00u;
      one[n] = left >= n * 8 + 2 ? ones : left == n * 8 + 1 ? ones & 0xFFFFu : 0u;
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float (&x)[4] = s[m][n];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (TOPPED) x[e] = n * 8 + e % 2 < left ? x[e] - w.top[m][e / 2] : -INFINITY;
          x[e] = exp2_fast(x[e]);
        }
        a[m][2 * n] = pack<TYPE>(x[0], x[1]);
        a[m][2 * n + 1] = pack<TYPE>(x[2], x[3]);
      }
#pragma unroll
    for (int m = 0; m < MT; m++) mma(w.sum[m], a[m], one[0], one[1]);
#pragma unroll
    for (int c = 0; c < NT / 2; c++) {
      u32 b[4];
      ldmatrix_transposed(b, v + (key * LD + c * 16) * 2);
#pragma unroll
      for (int m = 0; m < MT; m++) {
        mma(w.o[m][2 * c], a[m], b[0], b[1]);
        mma(w.o[m][2 * c + 1], a[m], b[2], b[3]);
      }
    }
    if constexpr (NT % 2) {
      u32 b[2];
      ldmatrix_transposed(b, v + (key * LD + (NT - 1) * 8) * 2);
#pragma unroll
      for (int m = 0; m < MT; m++) mma(w.o[m][NT - 1], a[m], b[0], b[1]);
    }
  }
}

// Follows the maxima of the rows' scores.
__device__ __forceinline__ void follow(Rows &w, u32 k, int keys) {
#pragma unroll 1
  for (int key = 0; key < keys; key += 16) {
    float s[MT][2][4];
    scores(s, w, k + key * LD * 2);
    const int left = keys - key - threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (n * 8 + e % 2 < left) w.top[m][e / 2] = fmaxf(w.top[m][e / 2], s[m][n][e]);
  }
}

// Before a pass: 0 sums weights as they are, 1 looks for maxima, 2 sums weights below them.
__device__ __forceinline__ void begin(Rows &w, int pass) {
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float &top = w.top[m][h];
      if (pass == 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      } else {
        top = pass == 0 ? 0.0f : -INFINITY;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      w.sum[m][e] = 0.0f;
#pragma unroll
      for (int n = 0; n < NT; n++) w.o[m][n][e] = 0.0f;
    }
  }
}

// Whether any sum of weights that were not taken relative to a maximum has left 2^-60 .. 2^90, where weights of f32's
// exponents lose nothing that 2^-60 of the sum would show, or any sum of values its own range; or is no number.
__device__ __forceinline__ bool astray(const Rows &w) {
  bool far = false;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      far |= !(w.sum[m][e] >= 0x1p-60f && w.sum[m][e] <= 0x1p90f);
#pragma unroll
      for (int n = 0; n < NT; n++) far |= !(fabsf(w.o[m][n][e]) <= 3e38f);
    }
  return far;
}

// o / sum to `to`, and the logarithms of the sums. `to` and `lse` point to the warp's first row.
__device__ __forceinline__ void finish(const Rows &w, u16 *to, long long stride, float *lse, int heads, int rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = m * 16 + h * 8 + lane / 4;
      const float sum = w.sum[m][2 * h], inverse = 1.0f / sum;
      u32 words[NT];
#pragma unroll
      for (int n = 0; n < NT; n++)
        words[n] = pack<TYPE>(__fmul_rn(w.o[m][n][2 * h], inverse), __fmul_rn(w.o[m][n][2 * h + 1], inverse));
      if (r >= rows) continue;
      u32 *at = (u32 *)(to + r * stride) + lane % 4 * NT;
      if constexpr (NT == 2) *(uint2 *)at = make_uint2(words[0], words[1]);
      else if constexpr (NT == 4) *(uint4 *)at = make_uint4(words[0], words[1], words[2], words[NT - 1]);
      else at[0] = words[0], at[1] = words[1], at[2] = words[NT - 1];
      if (lse && lane % 4 == 0) lse[(long long)r * heads] = (w.top[m][h] + log2f(sum)) * 0.6931471805599453f;
    }
}

// q: (T, H d), k, v: (T, H d), each with its stride; spans: (S, 2); cos, sin: (longest, d/2); o: (T, H d); lse: (T, H).
// A block for each head and each number below T / ROWS + S: see block_of.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention(const u16 *q, const u16 *k, const u16 *v, long long q_stride, long long kv_stride, const int *spans,
          int sequences, int tokens, const Angle *cosines, const Angle *sines, int longest, u16 *o, float *lse, int heads,
          int, float scale, u32 *status) {
  extern __shared__ __align__(16) u16 memory[]; // keys, then values: (TILE, LD) each
  const int number = blockIdx.x / heads, head = blockIdx.x % heads;
  if (head == 0 && threadIdx.x == 0) check_span(spans, sequences, tokens, longest, number, status);
  Block block = block_of<ROWS>(spans, sequences, number);
  const int length = block.end - block.start;
  if (block.first >= length || block.first < 0 || block.start < 0 || block.end > tokens || length > longest) return;

  u16 *keys = memory, *values = memory + TILE * LD;
  int first = block.first + threadIdx.x / 32 * M_ROWS; // the warp's first row in the sequence
  q += (long long)block.start * q_stride + head * HEAD_DIM;
  k += (long long)block.start * kv_stride + head * HEAD_DIM;
  v += (long long)block.start * kv_stride + head * HEAD_DIM;
  Queries asked;
  asked.ask(q + first * q_stride, q_stride, length - first);
#if HEAD_DIM == 24
  for (int i = threadIdx.x; i < TILE * 2; i += THREADS) *(uint2 *)(keys + i / 2 * LD + i % 2 * 16 + HALF) = make_uint2(0, 0);
#endif
  bring<IN_FLIGHT, PAIRS>(keys, values, k, v, kv_stride, cosines, sines, 0, min(length, TILE));
  __syncthreads();
  const u32 k_at = shared_address(keys) + by_key(), v_at = shared_address(values) + by_row();
  const int tiles = (length + TILE - 1) / TILE;
  int there = 0; // the tile in shared memory

#pragma unroll 1
  for (int round = 0; round < ROUNDS; round++, first += WARPS * M_ROWS) {
    if (block.first + round * WARPS * M_ROWS >= length) break;
    const bool mine = first < length;
    Rows w;
    if (mine) {
      asked.rotated(w, cosines, sines, first, length - first, scale * LOG2E);
      if (round + 1 < ROUNDS) asked.ask(q + (first + WARPS * M_ROWS) * q_stride, q_stride, length - first - WARPS * M_ROWS);
    }
    // Sums of weights as they are; where that does not do, maxima, and sums of weights below them.
    bool work = mine;
#pragma unroll 1
    for (int pass = TYPE == 1 ? 0 : 1; pass < 3; pass++) {
      if (work) begin(w, pass);
#pragma unroll 1
      for (int tile = 0; tile < tiles; tile++) {
        const int from = tile * TILE, n = min(length - from, TILE);
        if (there != tile) {
          __syncthreads(); // all are done with the tile before
          bring<1, 4>(keys, values, k + from * kv_stride, v + from * kv_stride, kv_stride, cosines, sines, from, n);
          there = tile;
          __syncthreads();
        }
        if (!work) continue;
        if (TYPE == 1 && pass == 0) add_keys<false>(w, k_at, v_at, n);
        else if (pass == 1) follow(w, k_at, n);
        else add_keys<true>(w, k_at, v_at, n);
      }
      if (pass > 0) continue;
      work = work && __any_sync(~0u, astray(w));
      if (tiles > 1 ? !__syncthreads_or(work) : !work) break;
    }
    if (mine) {
      const long long row = block.start + first;
      finish(w, o + row * heads * HEAD_DIM + head * HEAD_DIM, (long long)heads * HEAD_DIM,
             lse ? lse + row * heads + head : lse, heads, length - first);
    }
  }
}
