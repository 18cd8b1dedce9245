// Shared by the attention kernels of compute capability 9.0: constants, fragments, rotary embedding, and the sums of a
// warp's rows. Constants: HEAD_DIM (d), TABLE (element type of cos and sin).
//
// Invariant: the order of operations on a row is that of the comments here; attention_hopper.cu and attention_persistent.cu
// must give a row the same bits.

#pragma once

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "warpgroup.cuh"

#define STEP 64                // keys (in gradients, columns) that are processed at a time
#define PANELS (HEAD_DIM / 64) // tiles of 64 columns, side by side
#define HALF (HEAD_DIM / 2)
#define TILE (STEP * 128)      // bytes of 64 columns of a step
#define LOG2E 1.4426950408889634f
static_assert(HEAD_DIM % 64 == 0, "tiles have 64 columns");

__device__ __forceinline__ float exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
// threadIdx.x. The asm is volatile so that the compiler reads it again at each use: addresses derived from it are then
// recomputed and do not occupy registers between their uses.
__device__ __forceinline__ int thread_now() { int r; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r)); return r; }

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// wgmma with a in shared memory too: (64, 16) (16, 64) -> (64, 64)
__device__ __forceinline__ void wgmma_shared(float (&c)[32], u64 a, u64 b, int add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES " {" UP_TO_31 "}, %32, %33, add, 1, 1, 0, 0;\n}"
               : C8(0), C8(8), C8(16), C8(24) : "l"(a), "l"(b), "r"(add));
}

// Half-split rotary embedding of 8 adjacent columns and their partners (Su et al. 2021): (a, b) -> (a cos - b sin,
// b cos + a sin).
__device__ __forceinline__ void rotate_pairs(uint4 &x, uint4 &y, const float (&cosine)[8], const float (&sine)[8]) {
  u32 *a = (u32 *)&x, *b = (u32 *)&y;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float a0, a1, b0, b1, c0 = cosine[2 * j], c1 = cosine[2 * j + 1], s0 = sine[2 * j], s1 = sine[2 * j + 1];
    unpack<TYPE>(a[j], a0, a1), unpack<TYPE>(b[j], b0, b1);
    a[j] = pack<TYPE>(fmaf(a0, c0, -__fmul_rn(b0, s0)), fmaf(a1, c1, -__fmul_rn(b1, s1)));
    b[j] = pack<TYPE>(fmaf(b0, c0, __fmul_rn(a0, s0)), fmaf(b1, c1, __fmul_rn(a1, s1)));
  }
}

// Sums of a warp's 16 queries. A thread has rows lane / 4 and lane / 4 + 8.
struct RowSums {
  float o[PANELS][32];      // sums of exp2(score - row_max) v
  float row_max[2], sum[2]; // as in attention.cu; the sum is of this thread's keys
  float correction[2];      // factor that o must be multiplied by after the running P V has finished

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < PANELS; c++)
#pragma unroll
      for (int i = 0; i < 32; i++) o[c][i] = 0.0f;
    row_max[0] = row_max[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
};

// Multiplies o by `correction`. Accumulators i and i ^ 1 are neighbours in one row, so that the row is bit 1 of i.
__device__ __forceinline__ void rescale(RowSums &rows) {
#pragma unroll
  for (int c = 0; c < PANELS; c++)
#pragma unroll
    for (int i = 0; i < 32; i++) rows.o[c][i] = __fmul_rn(rows.o[c][i], rows.correction[i / 2 % 2]);
}

// Rounds the weights to 16 bits as operand a of wgmma, whose register layout is that of the accumulators.
__device__ __forceinline__ void pack_weights(u32 (&p)[STEP / 16][4], const float (&s)[32]) {
#pragma unroll
  for (int n = 0; n < STEP / 16; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) p[n][e] = pack<TYPE>(s[n * 8 + e * 2], s[n * 8 + e * 2 + 1]);
}

// 16-byte read of a warp's output in shared memory; defined by the file, which decides what it may be reordered with.
__device__ __forceinline__ uint4 load_shared(u32 at);

// Writes o / sum to `to` and, if `lse` is not null, the natural logarithm of the sum of exponentials. `to` and
// `lse` point to the warp's first row, `rows` is the number of rows from there to the sequence's end; rows beyond
// it are not written. The fragments go through the warp's own 16 rows in shared memory (`mine`), panels of which are
// PANEL_BYTES apart, to be written to memory in 16-byte accesses. With REUSED, the rows are read before and written
// afterwards by other lanes of the warp.
template <int PANEL_BYTES, bool REUSED>
__device__ __forceinline__ void write_rows(const RowSums &w, u32 mine, u16 *to, float *lse, int heads, int rows) {
  int lane = threadIdx.x % 32;
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int r = h * 8 + lane / 4;
    float sum = w.sum[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    inverse[h] = 1.0f / sum;
    if (lse && lane % 4 == 0 && r < rows) lse[(long long)r * heads] = (w.row_max[h] + log2f(sum)) * 0.6931471805599453f;
  }
  if (REUSED) __syncwarp(); // all lanes have read the earlier contents
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 16; n++) { // 16 columns, as ldmatrix reads them
    u32 r[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float *x = w.o[n / 4] + n % 4 * 8 + e * 2;
      r[e] = pack<TYPE>(__fmul_rn(x[0], inverse[e % 2]), __fmul_rn(x[1], inverse[e % 2]));
    }
    u32 at = mine + n / 4 * PANEL_BYTES + tile_at(lane % 16, n % 4 * 2 + lane / 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
  __syncwarp();
  constexpr int per = PANELS * 8;
#pragma unroll
  for (int i = 0; i < 16 * per / 32; i++) {
    int at = lane + i * 32, r = at / per, word = at % per;
    if (r < rows)
      *(uint4 *)(to + (long long)r * heads * HEAD_DIM + word * 8) = load_shared(mine + word / 8 * PANEL_BYTES + tile_at(r, word % 8));
  }
  if (REUSED) __syncwarp(); // queries come next
}
