// Transpose: y (C, STRIDE) = x (R, C)^T, with zeros in the columns of y behind R. Gradients of matmuls sum over the rows
// of their operands, and the matmul kernels sum along rows.
//
// Work: a block transposes a tile of 64 x 64 through shared memory, so that both sides access memory in whole sectors.
//
// Constants: TYPE, ALIGNED_IN and ALIGNED_OUT: whether all rows of x, and of y, are multiples of 16 bytes; otherwise
// that side is accessed one element at a time.
//
// Invariant: nothing behind the last row of x is read; the padding of y is written as zeros.

#include "common.cuh"

#define TILE 64
#define THREADS 256
#define WIDTH (TYPE == 0 ? 4 : 8)      // elements in 16 bytes
#define WORDS (TILE / WIDTH)           // 16-byte words in a row of the tile
// A row of the tile takes an odd number of banks: 8 lines of one column then lie in different banks.
#define PITCH (TYPE == 0 ? TILE + 1 : TILE + 2)

// Grid: (tiles of C, tiles of STRIDE).
extern "C" __global__ void __launch_bounds__(THREADS)
transpose(const T *__restrict__ x, T *__restrict__ y, int rows, int columns, int stride) {
  after_predecessors();
  __shared__ __align__(16) T tile[TILE][PITCH];
  const int column0 = blockIdx.x * TILE, row0 = blockIdx.y * TILE;
#if ALIGNED_IN
#pragma unroll
  for (int i = 0; i < TILE * WORDS / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, line = at / WORDS, word = at % WORDS;
    const int row = row0 + line, column = column0 + word * WIDTH;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row < rows && column < columns) v = *(const uint4 *)(x + (long long)row * columns + column);
    // Rows of the tile are aligned to 4 bytes only.
    u32 *const to = (u32 *)&tile[line][word * WIDTH];
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
#else
  for (int i = 0; i < TILE * TILE / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, line = at / TILE, in = at % TILE;
    const int row = row0 + line, column = column0 + in;
    tile[line][in] = row < rows && column < columns ? x[(long long)row * columns + column] : (T)0;
  }
#endif
  __syncthreads();
#if ALIGNED_OUT && TYPE == 0
#pragma unroll
  for (int i = 0; i < TILE * WORDS / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, in = at / WORDS, line = at % WORDS * WIDTH;
    const int column = column0 + in, row = row0 + line;
    if (column < columns && row < stride)
      *(float4 *)(y + (long long)column * stride + row) =
          make_float4(tile[line][in], tile[line + 1][in], tile[line + 2][in], tile[line + 3][in]);
  }
#elif ALIGNED_OUT
  // A thread writes eight elements of two adjacent rows of y, whose elements lie in one word of the tile.
  static_assert(TILE / 2 * WORDS == THREADS, "one item per thread");
  const int pair = threadIdx.x / WORDS * 2, line = threadIdx.x % WORDS * WIDTH, row = row0 + line;
  u32 low[WIDTH / 2], high[WIDTH / 2];
#pragma unroll
  for (int j = 0; j < WIDTH / 2; j++) {
    const u32 a = *(const u32 *)&tile[line + 2 * j][pair], b = *(const u32 *)&tile[line + 2 * j + 1][pair];
    low[j] = __byte_perm(a, b, 0x5410);
    high[j] = __byte_perm(a, b, 0x7632);
  }
  T *const to = y + (long long)(column0 + pair) * stride + row;
  if (row < stride) {
    if (column0 + pair < columns) *(uint4 *)to = make_uint4(low[0], low[1], low[2], low[3]);
    if (column0 + pair + 1 < columns) *(uint4 *)(to + stride) = make_uint4(high[0], high[1], high[2], high[3]);
  }
#else
  for (int i = 0; i < TILE * TILE / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, in = at / TILE, line = at % TILE;
    const int column = column0 + in, row = row0 + line;
    if (column < columns && row < stride) y[(long long)column * stride + row] = tile[line][in];
  }
#endif
}
