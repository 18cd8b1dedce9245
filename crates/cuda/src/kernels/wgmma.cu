// Matmul on Hopper's tensor cores: y (R, N) = f(x (R, K) w (N, K)^T + b (N)) + r (R, N), row-major. Warp-specialised
// and persistent: one producer thread loads tiles by TMA into a circular buffer of STAGES stages in shared memory (the third
// warpgroup); two consumer warpgroups multiply them (wgmma) and run the epilogue in registers.
//
// Invariant: one thread sums an element over k in order, 16 columns of k per instruction, from whole stages that are
// zero-filled at the end of k; the bias is added in f32. With a residual, the sum is rounded to the element type, the
// residual is added, and the result is rounded again. So the bits of an element depend neither on the number of rows,
// nor on its row, nor on the tile shape, which affects speed only.
//
// With a gate, w has 2 N rows and y = gelu(x w[..N]^T) (x w[N..]^T): a tile has as many columns of the first half as
// of the second, so that one thread has both sums of an output.
//
// With W_BY_K, w is stored as (K, N), as the weight of a linear layer is for its input gradient. A stage has it in pieces
// of 64 columns, and the instruction reads them by columns, in the same order of k: the bits are those of the transposed w.
//
// Constants: those of wgmma.cuh; MA, the rows of a warpgroup's tile in units of 64; PINGPONG (1: the consumer
// warpgroups take alternate tiles, so that one multiplies while the other runs its epilogue; 0: cooperative, they
// split the rows of a tile); CLUSTER, the blocks of a cluster, one below the other; GROUP, the rows of tiles that are
// processed over all columns before the next rows, so that their loads hit L2.

#include "common.cuh"
#include "activation.cuh"
#include "copies.cuh"
#include "wgmma.cuh"

#define WM (64 * MA)                         // rows of a warpgroup's tile
#define GROUPS_PER_TILE (PINGPONG ? 1 : 2)             // warpgroups that share a tile
#define TILES_IN_FLIGHT (PINGPONG ? 2 : 1)             // tiles at a time
#define BM (GROUPS_PER_TILE * WM)                      // rows of a block's tile
#define A_BYTES (BM * 128)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define PIECES_PER_STAGE (STAGE_BYTES / A_BYTES)     // pieces of r that fit into a stage
#define RESIDUAL_STAGES (EPILOGUE == 2 ? (Y_PIECES + PIECES_PER_STAGE - 1) / PIECES_PER_STAGE : 0)
#define BUFFERS 2
#define THREADS 384
static_assert(EPILOGUE != 3 || CLUSTER == 2, "a block fetches the gates, the other what they pass");
static_assert(!W_BY_K || EPILOGUE == 0 && BN % 64 == 0, "whole pieces of w");

// Position of tile number t, in units of tiles: within a group of GROUP rows, tiles are numbered column by column.
struct Tile { int row, column; };
__device__ __forceinline__ Tile tile_of(int t, int rows, int columns) {
  int group = t / (GROUP * columns), first = group * GROUP, height = min(GROUP, rows - first);
  int inside = t - group * GROUP * columns;
  return Tile{first + inside % height, inside / height};
}

// x: (R, K), w: (N, K), y, r: (R, N), as tensor maps with TMA boxes (BM, DEPTH), (BN / CLUSTER, DEPTH), (16, 64), (BM,
// 64); with W_BY_K w: (K, N), with boxes (DEPTH / CLUSTER, 64). b: (N) or null. Grid: any number of clusters.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
wgmma(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map y,
      const __grid_constant__ Map r, const u16 *b, int rows, int n, int k) {
  extern __shared__ __align__(1024) unsigned char memory[]; // STAGES of x and w; 8 warps' BUFFERS of y; barriers
  const u32 stages = shared_address(memory);
  const u32 buffers = stages + STAGES * STAGE_BYTES, full = buffers + 8 * BUFFERS * PIECE, empty = full + STAGES * 8,
            turn_barriers = empty + STAGES * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.x / 128;
  u32 rank = 0;
  if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      init(full + s * 8, 1);
      // A block loads its part of w into the stages of all blocks of the cluster, so it waits for the warps of all.
      init(empty + s * 8, 4 * GROUPS_PER_TILE * CLUSTER); // warps
    }
    init(turn_barriers, GROUPS_PER_TILE), init(turn_barriers + 8, GROUPS_PER_TILE);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();
  after_predecessors();

  const int row_tiles = (rows + BM * CLUSTER - 1) / (BM * CLUSTER), column_tiles = (n + YN - 1) / YN;
  const int tiles = row_tiles * column_tiles, first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  const int blocks = (k + DEPTH - 1) / DEPTH;

  if (group == 2) {
    // 24 registers for each of these 128 threads and 240 for each of the 256 consumers are what the block has at its
    // launch: 168 for each of 384 threads (65536 / 384, down to a multiple of 8). For more, setmaxnreg.inc would wait
    // forever.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256) {
      StageCursor cursor(0);
      for (int t = first; t < tiles; t += step) {
        Tile tile = tile_of(t, row_tiles, column_tiles);
        const int row = (tile.row * CLUSTER + rank) * BM, column = tile.column * YN;
        const int w_row = column + rank * (EPILOGUE == 3 ? n : BN / CLUSTER);
        for (int i = 0; i < blocks; i++, cursor.next()) {
          const u32 to = stages + cursor.stage * STAGE_BYTES, barrier = full + cursor.stage * 8;
          wait(empty + cursor.stage * 8, cursor.parity ^ 1);
          expect(barrier, STAGE_BYTES);
          fetch(to, x, barrier, i * DEPTH, row);
#if W_BY_K
          // A block loads its share of the rows of k of every piece; both parts are whole groups of eight rows.
#pragma unroll
          for (int c = 0; c < BN / 64; c++)
            fetch_for_all(to + A_BYTES + c * W_PIECE + rank * (W_PIECE / CLUSTER), w, barrier, column + c * 64,
                          i * DEPTH + rank * (DEPTH / CLUSTER));
#else
          fetch_for_all(to + A_BYTES + rank * (B_BYTES / CLUSTER), w, barrier, i * DEPTH, w_row);
#endif
        }
        for (int i = 0; i < RESIDUAL_STAGES; i++, cursor.next()) {
          const u32 to = stages + cursor.stage * STAGE_BYTES, barrier = full + cursor.stage * 8;
          const int pieces = min(PIECES_PER_STAGE, Y_PIECES - i * PIECES_PER_STAGE);
          wait(empty + cursor.stage * 8, cursor.parity ^ 1);
          expect(barrier, pieces * A_BYTES);
          for (int c = 0; c < pieces; c++) fetch(to + c * A_BYTES, r, barrier, column + (i * PIECES_PER_STAGE + c) * 64, row);
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int side = group / GROUPS_PER_TILE, first_row = group % GROUPS_PER_TILE * WM; // whose turn, and its rows
    const u32 buffer = buffers + warp * (BUFFERS * PIECE);
    auto release = [&](int stage) { arrive_in_all(empty + stage * 8, lane); };
    u32 number = side * (blocks + RESIDUAL_STAGES), turn = 0;
    for (int t = first + side * step; t < tiles; t += TILES_IN_FLIGHT * step) {
      Tile tile = tile_of(t, row_tiles, column_tiles);
      const int row = (tile.row * CLUSTER + rank) * BM + first_row + warp % 4 * 16, column = tile.column * YN;
      float sums[MA][BN / 2];
      Columns columns;
      columns.load(b, column, n);
      StageCursor cursor(number);
      number += TILES_IN_FLIGHT * (blocks + RESIDUAL_STAGES);
      if (TILES_IN_FLIGHT == 2) {
        // The first tile of the first warpgroup must not wait: no other warpgroup has passed the turn yet.
        if (turn + side > 0) wait(turn_barriers + side * 8, turn + side - 1 & 1);
        turn++;
      }
      int before = 0;
      for (int i = 0; i < blocks; i++) {
        wait(full + cursor.stage * 8, cursor.parity);
        const u32 at = stages + cursor.stage * STAGE_BYTES;
        const u64 a = operand(at + first_row * 128), c = W_BY_K ? operand_by_k(at + A_BYTES) : operand(at + A_BYTES);
        constexpr int W_STEP = W_BY_K ? 16 * 128 >> 4 : 2; // from 16 columns of k to the next, in units of 16 bytes
        pin_accumulators(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
          for (int m = 0; m < MA; m++) multiply(sums[m], a + m * (64 * 128 >> 4) + s * 2, c + s * W_STEP, s > 0 ? 1 : i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        pin_accumulators(sums);
        wgmma_wait<1>();
        // All groups but the newest are complete: this stage is still being read, only the one before is free.
        if (i > 0) release(before);
        before = cursor.stage;
        cursor.next();
      }
      StageCursor residual_cursor = cursor;
#if EPILOGUE == 2
      // Waited for before the turn is passed. The stages of the other warpgroup come next in the ring, and a wait for a
      // stage whose previous round has not been filled would return at once, since a barrier knows only a parity.
#pragma unroll
      for (int i = 0; i < RESIDUAL_STAGES; i++, cursor.next()) wait(full + cursor.stage * 8, cursor.parity);
#endif
      if (TILES_IN_FLIGHT == 2 && threadIdx.x % 128 == 0) arrive(turn_barriers + (1 - side) * 8);
      wgmma_wait<0>();
      pin_accumulators(sums);
      release(before);

      // Epilogue: turns the sums of piece c into the values to store.
      auto apply_epilogue = [&](int c) {
#pragma unroll
        for (int j = c * 8; j < c * 8 + 8; j += 2) {
          float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (EPILOGUE != 3) columns.of(j, bias); // a gate has none
#pragma unroll
          for (int m = 0; m < MA; m++) {
#if EPILOGUE == 2
            u32 residual[4];
            const u32 from = stages + residual_cursor.stage * STAGE_BYTES + c % PIECES_PER_STAGE * A_BYTES +
                             (first_row + m * 64 + warp % 4 * 16) * 128;
            load_pieces(residual, from + lane_at(j % 8));
#endif
#pragma unroll
            for (int q = 0; q < 4; q++) { // 8 columns j or j + 1, rows lane / 4 or that + 8
              const int e = q / 2, at = (j + e) * 4 + q % 2 * 2;
              float &u = sums[m][at], &v = sums[m][at + 1];
              u += bias[2 * e], v += bias[2 * e + 1];
#if EPILOGUE == 1
              u = x_phi(u), v = x_phi(v);
#elif EPILOGUE == 2
              // Rounded before the residual is added, as in separate layers; these are also cuBLASLt's bits with the
              // residual in y.
              unpack<TYPE>(add_pairs<TYPE>(pack<TYPE>(u, v), residual[q]), u, v);
#elif EPILOGUE == 3
              u = x_phi(u) * sums[m][at + BN / 4], v = x_phi(v) * sums[m][at + 1 + BN / 4];
#endif
            }
          }
        }
      };
#if EPILOGUE == 2
      // Stages of the residual are released before anything is stored, so that the producer can continue.
#pragma unroll
      for (int c = 0; c < Y_PIECES; c++) {
        apply_epilogue(c);
        if (c % PIECES_PER_STAGE == PIECES_PER_STAGE - 1 || c == Y_PIECES - 1) {
          // Reads of the residual must have completed before TMA may overwrite the stage: the other warpgroup's wgmma
          // has priority at shared memory, so a read may take longer than the next copy. Hence the proxy fence before
          // the release.
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncwarp();
          release(residual_cursor.stage);
          residual_cursor.next();
        }
      }
#endif
#pragma unroll
      for (int c = 0; c < Y_PIECES; c++) {
#if EPILOGUE != 2
        apply_epilogue(c);
#endif
#pragma unroll
        for (int m = 0; m < MA; m++) {
          const bool there = row + m * 64 < rows && column + c * 64 < n;
          const u32 to = buffer + (c * MA + m) % BUFFERS * PIECE;
          store_piece<BUFFERS>(y, sums[m], c, to, column + c * 64, row + m * 64, there);
        }
      }
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
  }
  // No block may exit while others of the cluster still arrive at its barriers.
  if (CLUSTER > 1) cluster_sync();
}
PARAMETERS(wgmma, 4 * sizeof(Map) + 24, 4 * sizeof(Map) + 16);
