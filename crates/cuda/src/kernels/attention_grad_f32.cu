// Gradient of attention over packed sequences in f32 without tensor cores. The formulas, the two kernels KEYS = 0 and 1
// and their invariant are those of attention_grad.cu; every product and sum is f32 here.
//
// A block of 16 x 16 threads owns ROWS rows and loops over tiles of TILE columns. Thread (y, x) computes the scores of
// rows y + 16 i and columns x + 16 j, and the sums of rows y + 16 i in columns x + 16 j of the head.
//
// Shared memory: x1, x2 (ROWS, LD), y1, y2 (TILE, LD), and ds and p (ROWS, TILE + 4). Rows are LD words apart, an odd
// number of 16-byte words, so that float4 reads of eight rows fall into different banks; columns d .. DP are zeros.
//
// Constants: HEAD_DIM (d), ROTARY, TABLE, ALIBI, MASK, KEYS, and ROWS and TILE, multiples of 16, from which the host computes
// the size of shared memory. The bits depend on neither: columns are added one by one, in order.

#include "common.cuh"
#include "attention.cuh"
#include "attention_args.cuh"
#include "attention_mask.cuh"
#include "attention_grad.cuh"

#define THREADS 256
#define MT (ROWS / 16)
#define NT (TILE / 16)
#define DP ((HEAD_DIM + 3) / 4 * 4)
#define LD (DP / 4 % 2 ? DP : DP + 4)
#define WIDTH ((HEAD_DIM + 15) / 16) // columns of a sum per thread

// Copies N rows of one head to shared memory, zeros for rows from `rows` on. (N, d) -> (N, LD)
template <int N> __device__ __forceinline__ void fetch(float *to, const float *from, long long stride, int rows) {
  for (int i = threadIdx.x; i < N * DP; i += THREADS) {
    int r = i / DP, c = i % DP;
    to[r * LD + c] = r < rows && c < HEAD_DIM ? from[r * stride + c] : 0.0f;
  }
}

// s = x y^T of this thread's rows and columns, summed over d in order. (ROWS, d) (TILE, d) -> (ROWS, TILE)
__device__ __forceinline__ void product(float (&s)[MT][NT], const float *rows, const float *columns, int y, int x) {
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int j = 0; j < NT; j++) s[i][j] = 0.0f;
#pragma unroll 2
  for (int c = 0; c < DP; c += 4) {
    float4 a[MT], b[NT];
#pragma unroll
    for (int i = 0; i < MT; i++) a[i] = *(const float4 *)(rows + (y + 16 * i) * LD + c);
#pragma unroll
    for (int j = 0; j < NT; j++) b[j] = *(const float4 *)(columns + (x + 16 * j) * LD + c);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int j = 0; j < NT; j++) {
        s[i][j] = fmaf(a[i].x, b[j].x, s[i][j]);
        s[i][j] = fmaf(a[i].y, b[j].y, s[i][j]);
        s[i][j] = fmaf(a[i].z, b[j].z, s[i][j]);
        s[i][j] = fmaf(a[i].w, b[j].w, s[i][j]);
      }
  }
}

// sums += p y. (ROWS, TILE) (TILE, d) -> (ROWS, d)
__device__ __forceinline__ void add(float (&sums)[MT][WIDTH], const float *p, const float *columns, int y, int x) {
#pragma unroll 4
  for (int t = 0; t < TILE; t++) {
    float values[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; j++) values[j] = x + 16 * j < HEAD_DIM ? columns[t * LD + x + 16 * j] : 0.0f;
#pragma unroll
    for (int i = 0; i < MT; i++) {
      float weight = p[(y + 16 * i) * (TILE + 4) + t];
#pragma unroll
      for (int j = 0; j < WIDTH; j++) sums[i][j] = fmaf(weight, values[j], sums[i][j]);
    }
  }
}

// Writes sums of the block's rows through `shared`, (ROWS, LD), which all threads have read, to `to`.
template <bool rotated>
__device__ __forceinline__ void write_rows(const float (&sums)[MT][WIDTH], float *shared, float *to, long long stride, int rows,
                                           float scale, const Angle *cosines, const Angle *sines, int position) {
  int x = threadIdx.x % 16, y = threadIdx.x / 16;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int j = 0; j < WIDTH; j++)
      if (x + 16 * j < HEAD_DIM) shared[(y + 16 * i) * LD + x + 16 * j] = sums[i][j];
  __syncthreads();
  if (to)
    write_sums<rotated>(shared, LD, to, stride, min(rows, ROWS), scale, cosines, sines, position, threadIdx.x, THREADS);
}

// Arguments and grid are those of attention_grad.cu.
extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM > 32 ? 1 : 2)
attention_grad(ATTENTION_GRAD_PARAMETERS) {
  after_predecessors();
  extern __shared__ __align__(16) float memory[];
  float *x1 = memory, *x2 = x1 + ROWS * LD, *y1 = x2 + ROWS * LD, *y2 = y1 + TILE * LD;
  float *ds = y2 + TILE * LD, *p = ds + ROWS * (TILE + 4);
  int block_heads = KEYS ? kv_heads : heads, group = heads / kv_heads;
  int number = blockIdx.x / block_heads, head = blockIdx.x % block_heads;
  if (head == 0 && threadIdx.x == 0) check_span(spans, sequences, tokens, ROTARY ? longest : tokens, number, status);
  Block block = block_of<ROWS>(spans, sequences, number);
  int length = block.end - block.start;
  if (block.first >= length || block.first < 0 || block.start < 0 || block.end > tokens) return;
  if (ROTARY && length > longest) return;

  int x = threadIdx.x % 16, y = threadIdx.x / 16, here = length - block.first;
  Extent mask = {span, local, global};
  Tiles tiles = tiles_of<KEYS, ROWS, TILE>(block.first, length, mask);
  int kv_head = KEYS ? head : head / group, first_head = KEYS ? head * group : head;
  k += (long long)block.start * k_stride + kv_head * HEAD_DIM;
  v += (long long)block.start * v_stride + kv_head * HEAD_DIM;
  long long dy_stride = (long long)heads * HEAD_DIM;
  q += (long long)block.start * q_stride + first_head * HEAD_DIM;
  dy += block.start * dy_stride + first_head * HEAD_DIM;
  stats += (long long)block.start * heads + first_head;
  if (KEYS) {
    fetch<ROWS>(x1, k + block.first * k_stride, k_stride, here);
    fetch<ROWS>(x2, v + block.first * v_stride, v_stride, here);
  } else {
    fetch<ROWS>(x1, q + block.first * q_stride, q_stride, here);
    fetch<ROWS>(x2, dy + block.first * dy_stride, dy_stride, here);
  }
  float sums[KEYS ? 2 : 1][MT][WIDTH] = {};
  Pairs pairs[MT];
#pragma unroll
  for (int i = 0; i < MT; i++) pairs[i] = pairs_of<KEYS>(block.first + y + 16 * i, length, mask);

  for (int of = 0; of < (KEYS ? group : 1); of++) {
    float slope = ALIBI ? alibi_slope(first_head + of, heads) : 0.0f;
    for (int item = 0; item < tiles.count; item++) {
      int at = tiles[item] * TILE;
      __syncthreads(); // the previous tile has been read
      if (KEYS) {
        fetch<TILE>(y1, q + at * q_stride + of * HEAD_DIM, q_stride, length - at);
        fetch<TILE>(y2, dy + at * dy_stride + of * HEAD_DIM, dy_stride, length - at);
      } else {
        fetch<TILE>(y1, k + at * k_stride, k_stride, length - at);
        fetch<TILE>(y2, v + at * v_stride, v_stride, length - at);
      }
      __syncthreads();
      float s[MT][NT], dp[MT][NT];
      product(s, x1, y1, y, x);
      product(dp, x2, y2, y, x);
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) {
          int row = block.first + y + 16 * i, column = at + x + 16 * j, query = KEYS ? column : row;
          float weight = 0.0f, gradient = 0.0f;
          if (pairs[i].admits(column)) {
            long long entry = (long long)query * heads + of;
            float2 of_query = stats[entry];
            float score = __fmul_rn(s[i][j], scale);
            if (ALIBI) score = fmaf(-slope, fabsf((float)(row - column)), score);
            weight = expf(score - of_query.x);
            gradient = __fmul_rn(weight, dp[i][j] - of_query.y);
          }
          ds[(y + 16 * i) * (TILE + 4) + x + 16 * j] = gradient;
          if (KEYS) p[(y + 16 * i) * (TILE + 4) + x + 16 * j] = weight;
        }
      __syncthreads();
      add(sums[0], ds, y1, y, x);
      if constexpr (KEYS) add(sums[1], p, y2, y, x);
    }
  }
  long long at = (long long)(block.start + block.first) * d_stride + head * HEAD_DIM;
  write_rows<true>(sums[0], x1, d1 ? d1 + at : d1, d_stride, here, scale, cosines, sines, block.first);
  if constexpr (KEYS) write_rows<false>(sums[1], x1, d2 ? d2 + at : d2, d_stride, here, 1.0f, cosines, sines, block.first);
}
PARAMETERS(attention_grad, 160, 152);
