// Attention over packed sequences in f32 without tensor cores and with expf, to which the other attention kernels are
// compared: o = softmax(scale q k^T + ALiBi) v per sequence and head, with optional rotary embedding and causal mask.
//
// Invariant: a row of o is a function of its own sequence: keys are visited in tiles of TILE from the
// sequence's start with a running maximum and sum (Milakov and Gimelshein 2018; Dao et al. 2022), and each sum
// has a fixed order. Only rows of sequences are written.
//
// Shared memory: q (ROWS, LD), then one buffer (TILE, LD) for k and afterwards v of a tile, and the weights
// (ROWS, TILE + 4). A tile's keys, then its values, are copied by ordinary loads and stores: a __syncthreads after each
// copy makes it visible to all threads, and one before the buffer is written again waits for its last reads.
//
// Constants: HEAD_DIM (d), ROTARY, TABLE (element type of cos and sin), ALIBI, CAUSAL, for a sliding window or a
// block-sparse mask MASK (attention_mask.cuh; CAUSAL is 1), and ROWS, a multiple of 16. A tile has as many keys as a block
// has queries; the bits depend on it, so that the host chooses ROWS by d alone. A block of 16 x 16 threads computes ROWS
// queries of one head of one sequence; thread (y, x) has queries y + 16 i, keys x + 16 j of a tile and columns x + 16 j of
// o. Rows in shared memory are LD words apart, an odd number of 16-byte words, so that float4 reads of eight rows fall
// into different banks; columns d .. DP are zeros.

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "attention_mask.cuh"

#define TILE ROWS
#define THREADS 256
#define MT (ROWS / 16) // queries and keys per thread
#define DP ((HEAD_DIM + 3) / 4 * 4)
#define LD (DP / 4 % 2 ? DP : DP + 4)
#define WIDTH ((HEAD_DIM + 15) / 16) // columns of o per thread
#define HALF (HEAD_DIM / 2)

// Loads ROWS rows of one head to shared memory, multiplies them by `scale` and, if `rotated`, applies rotary
// embedding (Su et al. 2021, half-split); row 0 has number `position` in the sequence. Rows from `rows` on
// become zeros. (ROWS, d) -> (ROWS, LD)
__device__ __forceinline__ void fetch(float *to, const float *from, long long stride, int rows, float scale, bool rotated,
                                      const Angle *cosines, const Angle *sines, int position) {
  for (int i = threadIdx.x; i < ROWS * DP; i += THREADS) {
    int r = i / DP, c = i % DP;
    float x = 0.0f;
    if (r < rows && c < HEAD_DIM) {
      const float *row = from + r * stride;
      x = __fmul_rn(row[c], scale);
#if ROTARY
      if (rotated) {
        int j = c < HALF ? c : c - HALF;
        long long entry = (long long)(position + r) * HALF + j;
        float other = __fmul_rn(row[c < HALF ? c + HALF : j], scale), sine = widen<TABLE>(sines[entry]);
        x = fmaf(x, widen<TABLE>(cosines[entry]), __fmul_rn(other, c < HALF ? -sine : sine));
      }
#endif
    }
    to[r * LD + c] = x;
  }
}

// s = q k^T of this thread's MT queries and MT keys, summed over d in order. (ROWS, d) (TILE, d) -> (ROWS, TILE)
__device__ __forceinline__ void scores(float (&s)[MT][MT], const float *q, const float *k, int y, int x) {
#pragma unroll
  for (int i = 0; i < MT * MT; i++) s[i / MT][i % MT] = 0.0f;
#pragma unroll 2
  for (int c = 0; c < DP; c += 4) {
    float4 a[MT], b[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) {
      a[i] = *(const float4 *)(q + (y + 16 * i) * LD + c);
      b[i] = *(const float4 *)(k + (x + 16 * i) * LD + c);
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int j = 0; j < MT; j++) {
        s[i][j] = fmaf(a[i].x, b[j].x, s[i][j]);
        s[i][j] = fmaf(a[i].y, b[j].y, s[i][j]);
        s[i][j] = fmaf(a[i].z, b[j].z, s[i][j]);
        s[i][j] = fmaf(a[i].w, b[j].w, s[i][j]);
      }
  }
}

// Maximum and sum over the 16 lanes of a row. A butterfly adds equal pairs in every lane, so that all have
// equal bits.
__device__ __forceinline__ float max_of_row(float x) {
#pragma unroll
  for (int lane = 1; lane < 16; lane *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int lane = 1; lane < 16; lane *= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// q: (T, H d), k, v: (T, G d), each with the stride of its rows; spans: (S, 2); cos, sin: (longest, d/2); o:
// (T, H d); lse: (T, H) or null. Grid: a block for each head and each number below T / ROWS + S (`block_of`).
extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM > 64 ? 1 : 2)
attention(ATTENTION_PARAMETERS) {
  after_predecessors();
  extern __shared__ __align__(16) float memory[]; // q (ROWS, LD); k, then v (TILE, LD); weights (ROWS, TILE + 4)
  float *queries = memory, *keys = memory + ROWS * LD, *weights = keys + TILE * LD;
  int number = blockIdx.x / heads, head = blockIdx.x % heads;
  if (head == 0 && threadIdx.x == 0) check_span(spans, sequences, tokens, ROTARY ? longest : tokens, number, status);
  Block block = block_of<ROWS>(spans, sequences, number);
  int length = block.end - block.start;
  if (block.first >= length || block.first < 0 || block.start < 0 || block.end > tokens) return;
  if (ROTARY && length > longest) return;

  int x = threadIdx.x % 16, y = threadIdx.x / 16, here = length - block.first; // queries from the block's first on
  float slope = ALIBI ? alibi_slope(head, heads) : 0.0f;
  q += (long long)(block.start + block.first) * q_stride + head * HEAD_DIM;
  k += (long long)block.start * kv_stride + head / group * HEAD_DIM;
  v += (long long)block.start * kv_stride + head / group * HEAD_DIM;
  fetch(queries, q, q_stride, here, scale, true, cosines, sines, block.first);
  float sums[MT][WIDTH] = {}, row_max[MT], sum[MT] = {};
#pragma unroll
  for (int i = 0; i < MT; i++) row_max[i] = -INFINITY;

  int end = CAUSAL ? min(length, block.first + ROWS) : length;
#if MASK >= 2
  Extent mask = {span, local, global};
  Tiles tiles = tiles_of<false, ROWS, TILE>(block.first, length, mask);
  for (int item = 0; item < tiles.count; item++) {
    int key = tiles[item] * TILE;
#else
  for (int key = 0; key < end; key += TILE) {
#endif
    int there = length - key;
    fetch(keys, k + key * kv_stride, kv_stride, there, 1.0f, true, cosines, sines, key);
    __syncthreads();
    float s[MT][MT];
    scores(s, queries, keys, y, x);
#pragma unroll
    for (int i = 0; i < MT; i++) {
      int row = block.first + y + 16 * i;
      float maximum = row_max[i];
#if MASK >= 2
      Pairs pairs = pairs_of<false>(row, length, mask); // held over the loop, those of all rows would spill
#endif
#pragma unroll
      for (int j = 0; j < MT; j++) {
        int at = key + x + 16 * j;
        if (ALIBI) s[i][j] = fmaf(-slope, fabsf((float)(row - at)), s[i][j]);
#if MASK >= 2
        if (!pairs.admits(at)) s[i][j] = -INFINITY;
#else
        if (at >= length || (CAUSAL && at > row)) s[i][j] = -INFINITY;
#endif
        maximum = fmaxf(maximum, s[i][j]);
      }
      // Without a sliding window or a block-sparse mask every row sees key 0, so that the maximum is finite from the first
      // tile on. With one, a row may see no key of its first tiles: its maximum is then finite and below every score,
      // since -inf - -inf would be NaN, and its sums remain zero.
      maximum = max_of_row(maximum);
#if MASK >= 2
      if (maximum == -INFINITY) maximum = -3e38f;
#endif
      float correction = expf(row_max[i] - maximum);
      row_max[i] = maximum;
      sum[i] = __fmul_rn(sum[i], correction);
#pragma unroll
      for (int j = 0; j < MT; j++) {
        float p = expf(s[i][j] - maximum);
        sum[i] += p;
        weights[(y + 16 * i) * (TILE + 4) + x + 16 * j] = p;
      }
#pragma unroll
      for (int j = 0; j < WIDTH; j++) sums[i][j] = __fmul_rn(sums[i][j], correction);
    }
    __syncthreads(); // k has been read and may be overwritten by v; all weights are written
    fetch(keys, v + key * kv_stride, kv_stride, there, 1.0f, false, cosines, sines, key);
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < TILE; t++) {
      float values[WIDTH];
#pragma unroll
      for (int j = 0; j < WIDTH; j++) values[j] = x + 16 * j < HEAD_DIM ? keys[t * LD + x + 16 * j] : 0.0f;
#pragma unroll
      for (int i = 0; i < MT; i++) {
        float p = weights[(y + 16 * i) * (TILE + 4) + t];
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sums[i][j] = fmaf(p, values[j], sums[i][j]);
      }
    }
    __syncthreads(); // v and the weights have been read and may be overwritten
  }
#pragma unroll
  for (int i = 0; i < MT; i++) {
    float total = sum_of_row(sum[i]);
    int r = y + 16 * i;
    if (r >= here) continue;
    long long row = block.start + block.first + r;
    if (lse && x == 0) lse[row * heads + head] = row_max[i] + logf(total);
#pragma unroll
    for (int j = 0; j < WIDTH; j++)
      if (x + 16 * j < HEAD_DIM) o[(row * heads + head) * HEAD_DIM + x + 16 * j] = sums[i][j] / total;
  }
}
PARAMETERS(attention, 136, 132);
