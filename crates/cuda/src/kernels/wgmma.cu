// Products on Hopper's tensor cores: y (R, N) = f(x (R, K) w (N, K)^T + b (N)) + r (R, N), row-major. Tiles travel by
// TMA through a ring of stages in shared memory: one warp fetches, two warpgroups multiply (wgmma) and finish in
// registers what stands behind the product.
//
// Invariant: an element is summed over k in order by one thread, from zero-filled whole stages, so its bits do not depend
// on the number of rows nor on its place among them. The form is for speed alone.
//
// With a gate, w has 2 N rows, and y = gelu(x w[..N]^T) (x w[N..]^T): a tile is as many columns of the one as of the other,
// so that a thread has both.
//
// Constants: TYPE (1 bf16, 2 f16), EPILOGUE (0, 1: f is gelu, 2: r is added, 3: the gate), and the form: BN columns of a tile; MA, 64
// rows each, of a warpgroup's; PINGPONG (1: the warpgroups take tiles in turns, so that one multiplies while the other
// finishes; 0: they share a tile's rows); CLUSTER blocks one below the other, which share what they fetch of w; STAGES;
// GROUP: rows of tiles that are swept over all columns together, so that L2 holds what they read.

#define WM (64 * MA)                         // rows of a warpgroup's tile
#define BM (PINGPONG ? WM : 2 * WM)          // rows of a block's tile
#define DEPTH 64                             // of k in a stage: 128 bytes, as wide as shared memory is swizzled
#define A_BYTES (BM * 128)
#define B_BYTES (BN * 128)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define YN (EPILOGUE == 3 ? BN / 2 : BN)     // columns of y
#define CHUNKS (YN / 64)                     // pieces of y and r of 64 columns
#define IN_STAGE (STAGE_BYTES / A_BYTES)     // pieces of r that fit into a stage
#define EXTRA (EPILOGUE == 2 ? (CHUNKS + IN_STAGE - 1) / IN_STAGE : 0)
#define PIECE 2048                           // bytes of a warp's 16 rows of a piece
#define BUFFERS 2
#define THREADS 384
static_assert(YN % 64 == 0, "pieces are 64 columns");
static_assert(EPILOGUE != 3 || CLUSTER == 2, "a block fetches the gates, the other what they pass");

// At the same place in another block of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// To the same place in all blocks of the cluster.
__device__ __forceinline__ void fetch_for_all(u32 to, const Map &map, u32 barrier, int column, int row) {
#if CLUSTER > 1
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
#else
  fetch(to, map, barrier, column, row);
#endif
}
__device__ __forceinline__ void put(const Map &map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(&map), "r"(from), "r"(column), "r"(row) : "memory");
}

// d (64, BN) += a b^T, a: (64, 32 bytes), b: (BN, 32 bytes) in swizzled shared memory; without `add`, d is overwritten.
#define NAME_(x) #x
#define NAME(x) NAME_(x)
#if TYPE == 1
#define OPERATION "wgmma.mma_async.sync.aligned.m64n" NAME(BN) "k16.f32.bf16.bf16 "
#else
#define OPERATION "wgmma.mma_async.sync.aligned.m64n" NAME(BN) "k16.f32.f16.f16 "
#endif
#define N0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define N1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define N2 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define N3 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D32(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12), D4(i + 16), D4(i + 20), D4(i + 24), D4(i + 28)
#if BN == 64
#define NUMBERS N0
#define SUMS D32(0)
#define INPUTS "%32, %33, p"
#define ADD "%34"
#elif BN == 128
#define NUMBERS N0 N1
#define SUMS D32(0), D32(32)
#define INPUTS "%64, %65, p"
#define ADD "%66"
#elif BN == 192
#define NUMBERS N0 N1 N2
#define SUMS D32(0), D32(32), D32(64)
#define INPUTS "%96, %97, p"
#define ADD "%98"
#else
#define NUMBERS N0 N1 N2 N3
#define SUMS D32(0), D32(32), D32(64), D32(96)
#define INPUTS "%128, %129, p"
#define ADD "%130"
#endif
__device__ __forceinline__ void multiply(float (&d)[BN / 2], u64 a, u64 b, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n" OPERATION "{" NUMBERS "}, " INPUTS ", 1, 1, 0, 0;\n}"
               : SUMS : "l"(a), "l"(b), "r"(add));
}
// What the tensor cores read at an address: rows of 128 bytes, swizzled in groups of eight, k along the rows.
__device__ __forceinline__ u64 operand(u32 address) {
  return (u64)(address >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// The compiler leaves the sums where they are.
__device__ __forceinline__ void pin(float (&d)[MA][BN / 2]) {
#pragma unroll
  for (int m = 0; m < MA; m++)
#pragma unroll
    for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(d[m][i])::"memory");
}
template <int N> __device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Tile number t, in tiles: GROUP rows are swept column by column.
struct Tile { int row, column; };
__device__ __forceinline__ Tile tile_of(int t, int rows, int columns) {
  int group = t / (GROUP * columns), first = group * GROUP, height = min(GROUP, rows - first);
  int inside = t - group * GROUP * columns;
  return Tile{first + inside % height, inside / height};
}

// A place in the ring, and how often it was passed.
struct Place {
  int stage;
  u32 parity;
  __device__ __forceinline__ explicit Place(u32 number) : stage(number % STAGES), parity(number / STAGES & 1) {}
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void load_pieces(u32 (&v)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void store_pieces(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// b of a tile's columns: a lane holds pairs of columns lane, lane + 32, ..., from which
// others take what they need.
struct Columns {
  static const int PAIRS = (BN / 2 + 31) / 32;
  u32 bias[PAIRS];
  __device__ __forceinline__ void load(const u16 *b, int first, int n) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      int column = first + 2 * (i * 32 + (int)(threadIdx.x % 32));
      bool there = column < n; // n is even
      bias[i] = EPILOGUE != 3 && b && there ? *(const u32 *)(b + column) : 0;
    }
  }
};

// x: (R, K), w: (N, K), y, r: (R, N), each described with the box that is fetched: (BM, DEPTH), (BN / CLUSTER, DEPTH),
// (16, 64), (BM, 64). b: (N) or null. Blocks: any number of clusters.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
wgmma(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map y,
      const __grid_constant__ Map r, const u16 *b, int rows, int n, int k) {
  extern __shared__ __align__(1024) unsigned char memory[]; // STAGES of x and w; 8 warps' BUFFERS of y; barriers
  const u32 ring = shared_address(memory);
  const u32 buffers = ring + STAGES * STAGE_BYTES, full = buffers + 8 * BUFFERS * PIECE, empty = full + STAGES * 8,
            turns = empty + STAGES * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, role = threadIdx.x / 128;
  u32 rank = 0;
  if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      init(full + s * 8, 1);
      init(empty + s * 8, (PINGPONG ? 4 : 8) * CLUSTER); // warps
    }
    init(turns, 1), init(turns + 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_sync();

  const int row_tiles = (rows + BM * CLUSTER - 1) / (BM * CLUSTER), column_tiles = (n + YN - 1) / YN;
  const int tiles = row_tiles * column_tiles, first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  const int blocks = (k + DEPTH - 1) / DEPTH;

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      Place place(0);
      for (int t = first; t < tiles; t += step) {
        Tile tile = tile_of(t, row_tiles, column_tiles);
        const int row = (tile.row * CLUSTER + rank) * BM, column = tile.column * YN;
        const int w_row = column + rank * (EPILOGUE == 3 ? n : BN / CLUSTER);
        for (int i = 0; i < blocks; i++, place.next()) {
          const u32 to = ring + place.stage * STAGE_BYTES, barrier = full + place.stage * 8;
          wait(empty + place.stage * 8, place.parity ^ 1);
          expect(barrier, STAGE_BYTES);
          fetch(to, x, barrier, i * DEPTH, row);
          fetch_for_all(to + A_BYTES + rank * (B_BYTES / CLUSTER), w, barrier, i * DEPTH, w_row);
        }
        for (int i = 0; i < EXTRA; i++, place.next()) {
          const u32 to = ring + place.stage * STAGE_BYTES, barrier = full + place.stage * 8;
          const int pieces = min(IN_STAGE, CHUNKS - i * IN_STAGE);
          wait(empty + place.stage * 8, place.parity ^ 1);
          expect(barrier, pieces * A_BYTES);
          for (int c = 0; c < pieces; c++) fetch(to + c * A_BYTES, r, barrier, column + (i * IN_STAGE + c) * 64, row);
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int group = role - 1;
    float sums[MA][BN / 2];
    const u32 buffer = buffers + (warp - 4) * (BUFFERS * PIECE);
    // The lane's place in 16 rows of 8 columns, twice, of a piece: its row, and the word of 16 bytes is swizzled by that.
    const u32 lane_row = lane % 16 * 128, lane_word = lane / 16, swizzle = lane % 8;
    auto release = [&](int stage) {
      if (lane < CLUSTER) {
        if (CLUSTER > 1) arrive_at(empty + stage * 8, lane);
        else arrive(empty + stage * 8);
      }
    };
    u32 number = PINGPONG ? group * (blocks + EXTRA) : 0;
    u32 turn = 0;
    for (int t = first + (PINGPONG ? group * step : 0); t < tiles; t += PINGPONG ? 2 * step : step) {
      Tile tile = tile_of(t, row_tiles, column_tiles);
      const int row = (tile.row * CLUSTER + rank) * BM + (PINGPONG ? 0 : group * WM) + (warp % 4) * 16;
      const int column = tile.column * YN;
      Columns columns;
      columns.load(b, column, n);
      Place place(number);
      if (PINGPONG) {
        // Nobody waits for a stage whose round before has not begun.
        if (turn + group > 0) wait(turns + group * 8, turn + group - 1 & 1);
        turn++;
        number += 2 * (blocks + EXTRA);
      } else {
        number += blocks + EXTRA;
      }
      int before = 0;
      for (int i = 0; i < blocks; i++) {
        wait(full + place.stage * 8, place.parity);
        const u32 at = ring + place.stage * STAGE_BYTES;
        const u64 a = operand(at + (PINGPONG ? 0 : group * WM * 128)), c = operand(at + A_BYTES);
        pin(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
          for (int m = 0; m < MA; m++) multiply(sums[m], a + m * (64 * 128 >> 4) + s * 2, c + s * 2, s > 0 ? 1 : i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        pin(sums);
        wait_products<1>();
        if (i > 0) release(before);
        before = place.stage;
        place.next();
      }
      Place extra = place;
#if EPILOGUE == 2
#pragma unroll
      for (int i = 0; i < EXTRA; i++, place.next()) wait(full + place.stage * 8, place.parity);
#endif
      if (PINGPONG && threadIdx.x % 128 == 0) arrive(turns + (1 - group) * 8);
      wait_products<0>();
      pin(sums);
      release(before);

      // The sums of piece c become what is stored.
      auto finish = [&](int c) {
#pragma unroll
        for (int j = c * 8; j < c * 8 + 8; j += 2) {
          float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int e = 0; e < 2 && EPILOGUE != 3; e++) { // a gate has none
            const int pair = (j + e) * 4; // and lane % 4
            const u32 both = __shfl_sync(~0u, columns.bias[pair / 32], pair % 32 + lane % 4);
            unpack<TYPE>(both, bias[2 * e], bias[2 * e + 1]);
          }
#pragma unroll
          for (int m = 0; m < MA; m++) {
#if EPILOGUE == 2
            u32 there[4];
            const u32 from = ring + extra.stage * STAGE_BYTES + c % IN_STAGE * A_BYTES +
                             ((PINGPONG ? 0 : group * WM) + m * 64 + warp % 4 * 16) * 128;
            load_pieces(there, from + lane_row + (((j % 8 + lane_word) ^ swizzle) << 4));
#endif
#pragma unroll
            for (int q = 0; q < 4; q++) { // 8 columns j or j + 1, rows lane / 4 or that + 8
              const int e = q / 2, at = (j + e) * 4 + q % 2 * 2;
              float &u = sums[m][at], &v = sums[m][at + 1];
              u += bias[2 * e], v += bias[2 * e + 1];
#if EPILOGUE == 1
              u = x_phi(u), v = x_phi(v);
#elif EPILOGUE == 3
              u = x_phi(u) * sums[m][at + BN / 4], v = x_phi(v) * sums[m][at + 1 + BN / 4];
#elif EPILOGUE == 2
              float p, o;
              unpack<TYPE>(there[q], p, o);
              u += p, v += o;
#endif
            }
          }
        }
      };
#if EPILOGUE == 2
      // Stages are given back before anything is stored.
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        finish(c);
        if (c % IN_STAGE == IN_STAGE - 1 || c == CHUNKS - 1) {
          // What was read has arrived before the copy engine may overwrite it: the products of others come first at
          // shared memory, so reads may take longer than a copy.
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncwarp();
          release(extra.stage);
          extra.next();
        }
      }
#endif
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
#if EPILOGUE != 2
        finish(c);
#endif
#pragma unroll
        for (int m = 0; m < MA; m++) {
          const u32 to = buffer + (c * MA + m) % BUFFERS * PIECE;
          if (lane == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(BUFFERS - 1) : "memory");
          __syncwarp();
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            u32 words[4];
#pragma unroll
            for (int q = 0; q < 4; q++) {
              const int at = (c * 8 + j + q / 2) * 4 + q % 2 * 2;
              words[q] = pack<TYPE>(sums[m][at], sums[m][at + 1]);
            }
            store_pieces(to + lane_row + (((j + lane_word) ^ swizzle) << 4), words);
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          __syncwarp();
          if (lane == 0) {
            if (row + m * 64 < rows && column + c * 64 < n) put(y, to, column + c * 64, row + m * 64);
            // A group even of nothing: groups are counted to know which buffer was read.
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
          }
        }
      }
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
  }
  // No block leaves while others arrive at its barriers.
  if (CLUSTER > 1) cluster_sync();
}
