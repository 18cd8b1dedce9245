// Fused layer norm and matmul on Hopper's tensor cores: y (R, N) = f(norm(x) (R, K) w (N, K)^T + b (N)),
// row-major. A block loads 128 rows of x to shared memory and normalises them in place; one producer thread
// then loads tiles of w by TMA through a circular buffer of STAGES stages. Two pairs of consumer warpgroups
// alternate (ping-pong): one pair multiplies a tile of BN columns while the other runs the epilogue of its own.
// In a pair, each warpgroup has 64 rows.
//
// Shared memory: the rows of x in PIECES pieces of 64 columns with the 128-byte swizzle; the stages; the warps'
// buffers of y; barriers: `full` and `empty` of each stage, `rows_loaded` (a box of x has arrived), `rows_free` (the rows
// of x may be overwritten), `turn_barriers` (a pair may multiply), `buffer_free` (a shared buffer of y may be written).
//
// Invariant: y has the bits of the separate kernels `layer_norm` and `wgmma`; normalised rows are rounded to
// TYPE before the matmul.
//
// Constants: those of wgmma.cuh (EPILOGUE 0 or 1) and rows.cuh (COLUMNS is K, GROUP 32), PARAM the type of gamma and
// beta, SHARED_BUFFERS (1: the two pairs share their buffers of y, which leaves shared memory for longer rows).

#include "common.cuh"
#include "activation.cuh"
#include "rows.cuh"
#include "copies.cuh"
#include "wgmma.cuh"

#define BM 128                               // rows of a block, 64 for each warpgroup of a pair
#define PIECES ((COLUMNS + DEPTH - 1) / DEPTH)
#define PIECE_BYTES (BM * 128)                // bytes of a piece of x
#define BOX 32                               // rows of x per TMA box, normalised by one warpgroup
#define WARPS 16
#define STAGE_BYTES B_BYTES
#define RELEASE_EARLY (STAGES < 5)                   // with few stages, release each before the next is multiplied
static_assert(GROUP == 32 && BM == 4 * BOX, "a warp has a row, a warpgroup normalises a box");

typedef typename Element<PARAM>::type P;

__device__ __forceinline__ Raw load_word(u32 at) {
  Raw v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_word(u32 at, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// Replaces x by (x - mean) rstd gamma + beta in shared memory in this warp's ROWS_PER_WARP rows from `first` on,
// ROWS_AT_ONCE at a time, with the arithmetic of `layer_norm`.
#define ROWS_PER_WARP (BOX / 4)
#define ROWS_AT_ONCE 2
__device__ __forceinline__ void normalise(u32 rows_at, int first, const P *gamma, const P *beta, float eps) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int begin = first; begin < first + ROWS_PER_WARP; begin += ROWS_AT_ONCE) {
    // Address of access v of row i, in the swizzled layout.
    auto address_of = [&](int v, int i) {
      const int at = v * GROUP + lane, row = begin + i;
      return rows_at + at / 8 * PIECE_BYTES + row * 128 + ((at ^ row) % 8 << 4);
    };
    Raw raw[ROWS_AT_ONCE][VECTORS];
    float mean[ROWS_AT_ONCE], rstd[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++)
#pragma unroll
      for (int v = 0; v < VECTORS; v++)
        if (v * GROUP + lane < ACCESSES) raw[i][v] = load_word(address_of(v, i));
    statistics(raw, lane, eps, mean, rstd);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = v * GROUP + lane;
      if (at >= ACCESSES) continue;
      float g[WIDTH], b[WIDTH];
      load_many<PARAM, WIDTH>(gamma + at * WIDTH, g);
      load_many<PARAM, WIDTH>(beta + at * WIDTH, b);
#pragma unroll
      for (int i = 0; i < ROWS_AT_ONCE; i++) {
        float f[WIDTH];
        widen_raw(raw[i][v], f);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) f[k] = fmaf((f[k] - mean[i]) * rstd[i], g[k], b[k]);
        store_word(address_of(v, i), {pack<TYPE>(f[0], f[1]), pack<TYPE>(f[2], f[3]), pack<TYPE>(f[4], f[5]), pack<TYPE>(f[6], f[7])});
      }
    }
  }
}

// x: (R, K), w: (N, K), y: (R, N), as tensor maps with TMA boxes (32, DEPTH), (BN / CLUSTER, DEPTH), (16, 64).
// b: (N) or null. `column_splits` clusters divide the columns of each block of rows among them. Grid: any number of
// clusters.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(640, 1)
wgmma_norm(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map y, const P *gamma,
           const P *beta, const u16 *b, int rows, int n, int column_splits, float eps) {
  extern __shared__ __align__(1024) unsigned char memory[]; // rows of x; STAGES of w; the warps' buffers of y; barriers
  const u32 rows_at = shared_address(memory), stages = rows_at + PIECES * PIECE_BYTES, buffers = stages + STAGES * STAGE_BYTES;
  const u32 full = buffers + (SHARED_BUFFERS ? WARPS / 2 : WARPS) * BUFFERS * PIECE, empty = full + STAGES * 8,
            rows_loaded = empty + STAGES * 8,
            rows_free = rows_loaded + BM / BOX * 8, turn_barriers = rows_free + 8, buffer_free = turn_barriers + 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.x / 128;
  u32 rank = 0;
  if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      init(full + s * 8, 1);
      init(empty + s * 8, WARPS / 2 * CLUSTER);
    }
    for (int q = 0; q < BM / BOX; q++) init(rows_loaded + q * 8, 1);
    init(rows_free, WARPS), init(turn_barriers, 2), init(turn_barriers + 8, 2);
    for (int i = 0; i < WARPS; i++) init(buffer_free + i * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
  after_predecessors();

  const int column_tiles = (n + BN - 1) / BN, work_items = (rows + BM * CLUSTER - 1) / (BM * CLUSTER) * column_splits;
  const int step = gridDim.x / CLUSTER;
  u32 round = 0;
  if (group == WARPS / 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == WARPS && lane == 0) {
      StageCursor cursor(0);
      for (int u = blockIdx.x / CLUSTER; u < work_items; u += step, round++) {
        const int row = (u / column_splits * CLUSTER + rank) * BM, part = u % column_splits;
        wait(rows_free, round & 1 ^ 1);
        for (int q = 0; q < BM / BOX; q++) {
          expect(rows_loaded + q * 8, PIECES * BOX * 128);
          for (int p = 0; p < PIECES; p++)
            fetch(rows_at + p * PIECE_BYTES + q * BOX * 128, x, rows_loaded + q * 8, p * DEPTH, row + q * BOX);
        }
        for (int c = part * column_tiles / column_splits; c < (part + 1) * column_tiles / column_splits; c++)
          for (int i = 0; i < PIECES; i++, cursor.next()) {
            const u32 to = stages + cursor.stage * STAGE_BYTES, barrier = full + cursor.stage * 8;
            wait(empty + cursor.stage * 8, cursor.parity ^ 1);
            expect(barrier, STAGE_BYTES);
            fetch_for_all(to + rank * (B_BYTES / CLUSTER), w, barrier, i * DEPTH, c * BN + rank * (BN / CLUSTER));
          }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    const int side = group / 2, half = group % 2; // the pair, and the half of the rows
    const u32 buffer = buffers + (SHARED_BUFFERS ? half * 4 + warp % 4 : warp) * (BUFFERS * PIECE);
    const u64 a = operand(rows_at + half * 64 * 128);
    auto release = [&](int stage) { arrive_in_all(empty + stage * 8, lane); };
    u32 number = 0, turn = 0; // tiles of all previous work items; tiles of this pair
    for (int u = blockIdx.x / CLUSTER; u < work_items; u += step, round++) {
      const int row = (u / column_splits * CLUSTER + rank) * BM + half * 64 + warp % 4 * 16, part = u % column_splits;
      const int first = part * column_tiles / column_splits, last = (part + 1) * column_tiles / column_splits;
      wait(rows_loaded + (half * 2 + side) * 8, round & 1);
      normalise(rows_at, half * 64 + side * BOX + warp % 4 * ROWS_PER_WARP, gamma, beta, eps);
      // Orders the normalised rows before the reads of wgmma. The 64 rows of a warpgroup are normalised by two
      // warpgroups, one of each pair, which meet at this barrier.
      asm volatile("fence.proxy.async.shared::cta;\nbar.sync %0, 256;" ::"r"(1 + half) : "memory");
      // Tiles alternate between the pairs across work items. If every item began with the same pair, an odd number of
      // tiles would give it two in a row: it would wait for a turn that the other pair passes only after its own tile,
      // whose stages come later in the ring.
      int c = first + (number + side & 1);
      // `rows_free` counts the warps of both pairs, also of a pair without a tile in this item.
      if (c >= last && lane == 0) arrive(rows_free);
      for (; c < last; c += 2) {
        const int column = c * BN;
        float sums[1][BN / 2];
        Columns columns;
        columns.load(b, column, n);
        StageCursor cursor((number + c - first) * PIECES);
        // Wait for the turn before waiting for stages: a stage whose previous round has not begun has a barrier two
        // phases behind, whose parity would look like that of a completed phase.
        if (turn + side > 0) wait(turn_barriers + side * 8, turn + side - 1 & 1);
        // Initialised here, so that the sums take no registers while rows are normalised.
#pragma unroll
        for (int i = 0; i < BN / 2; i++) sums[0][i] = 0.0f;
        int before = 0;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          wait(full + cursor.stage * 8, cursor.parity);
          const u64 d = operand(stages + cursor.stage * STAGE_BYTES);
          pin_accumulators(sums);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int s = 0; s < 4; s++)
            if (i * DEPTH + s * 16 < COLUMNS) multiply(sums[0], a + (i * PIECE_BYTES >> 4) + s * 2, d + s * 2, i > 0 || s > 0);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          pin_accumulators(sums);
          if (RELEASE_EARLY) {
            wgmma_wait<0>();
            release(cursor.stage);
          } else {
            wgmma_wait<1>();
            if (i > 0) release(before);
            before = cursor.stage;
          }
          cursor.next();
        }
        if (threadIdx.x % 128 == 0) arrive(turn_barriers + (1 - side) * 8);
        wgmma_wait<0>();
        pin_accumulators(sums);
        if (!RELEASE_EARLY) release(before);
        if (c + 2 >= last && lane == 0) arrive(rows_free);
        // The warp of the other pair with the same buffer, `warp ^ 8`, frees it after each of its tiles. Tiles
        // alternate, so the rounds are those of the turns.
        if (SHARED_BUFFERS && turn + side > 0) wait(buffer_free + warp * 8, turn + side - 1 & 1);
        turn++;
#pragma unroll
        for (int piece = 0; piece < Y_PIECES; piece++) {
#pragma unroll
          for (int j = piece * 8; j < piece * 8 + 8; j += 2) {
            float bias[4];
            columns.of(j, bias);
#pragma unroll
            for (int q = 0; q < 4; q++) { // columns 8 j or 8 (j + 1), rows lane / 4 or lane / 4 + 8
              float &s = sums[0][(j + q / 2) * 4 + q % 2 * 2], &t = sums[0][(j + q / 2) * 4 + q % 2 * 2 + 1];
              s += bias[q / 2 * 2], t += bias[q / 2 * 2 + 1];
              if (EPILOGUE == 1) s = x_phi(s), t = x_phi(t);
            }
          }
          const bool there = row < rows && column + piece * 64 < n;
          store_piece<BUFFERS>(y, sums[0], piece, buffer + piece % BUFFERS * PIECE, column + piece * 64, row, there);
        }
        if (SHARED_BUFFERS && lane == 0) {
          asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
          arrive(buffer_free + (warp ^ 8) * 8);
        }
      }
      number += last - first;
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
  }
  // No block exits while other blocks of the cluster may still arrive at its barriers.
  if (CLUSTER > 1) cluster_sync();
}
PARAMETERS(wgmma_norm, 3 * sizeof(Map) + 40, 3 * sizeof(Map) + 36);
