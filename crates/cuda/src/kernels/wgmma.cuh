// Shared by the wgmma kernels: operand descriptors and stages in swizzled shared memory, cluster communication, and the
// epilogue of sums in registers.
//
// Invariant: an element of y is a function of its sum and its column.
//
// Constants: TYPE (1 bf16, 2 f16), EPILOGUE (0: none, 1: GELU, 2: residual, 3: gate), BN, the columns of a tile,
// CLUSTER, the blocks that share their loads of w by multicast, STAGES; W_BY_K (1: w is stored as (K, N)).

#pragma once

#include "common.cuh"
#include "copies.cuh"

#if !defined(W_BY_K)
#define W_BY_K 0
#endif
#define DEPTH 64                             // of k in a stage: 128 bytes, as wide as shared memory is swizzled
#define B_BYTES (BN * 128)                   // of w in a stage
#define YN (EPILOGUE == 3 ? BN / 2 : BN)     // columns of y
#define Y_PIECES (YN / 64)                     // pieces of y of 64 columns
#define PIECE 2048                           // bytes of a warp's 16 rows of a piece
static_assert(YN % 64 == 0, "pieces are 64 columns");

// Arrives at the barrier with the same offset in another block of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block) : "memory");
}
// Arrives at the barrier with the same offset in all blocks of the cluster: each lane of the warp in one.
__device__ __forceinline__ void arrive_in_all(u32 barrier, int lane) {
  if (lane < CLUSTER) {
    if (CLUSTER > 1) arrive_at(barrier, lane);
    else arrive(barrier);
  }
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Loads a box by TMA to the same offset in all blocks of the cluster (multicast).
__device__ __forceinline__ void fetch_for_all(u32 to, const Map &map, u32 barrier, int column, int row) {
#if CLUSTER > 1
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
#else
  fetch(to, map, barrier, column, row);
#endif
}
__device__ __forceinline__ void store_box(const Map &map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(&map), "r"(from), "r"(column), "r"(row) : "memory");
}

// d (64, BN) += a b^T, a: (64, 32 bytes), b: (BN, 32 bytes), or (16, BN) with W_BY_K, in swizzled shared memory; without
// `add`, d is overwritten.
#define NAME_(x) #x
#define NAME(x) NAME_(x)
#if TYPE == 1
#define WGMMA "wgmma.mma_async.sync.aligned.m64n" NAME(BN) "k16.f32.bf16.bf16 "
#else
#define WGMMA "wgmma.mma_async.sync.aligned.m64n" NAME(BN) "k16.f32.f16.f16 "
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
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n" WGMMA "{" NUMBERS "}, " INPUTS ", 1, 1, 0, " NAME(W_BY_K) ";\n}"
               : SUMS : "l"(a), "l"(b), "r"(add));
}
// Address field of a matrix descriptor. In a cluster, an address in shared memory has the rank of its block in its upper
// bits, which would change the next field.
__device__ __forceinline__ u64 descriptor_address(u32 address) { return (address & 0x3FFFF) >> 4; }
// Matrix descriptor of an operand in shared memory: K-major rows of 128 bytes, 128-byte swizzle in groups of eight
// rows.
__device__ __forceinline__ u64 operand(u32 address) {
  return descriptor_address(address) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// Matrix descriptor of w stored by k: pieces of 64 columns (W_PIECE bytes apart), each with rows of k of 128 bytes, which
// are swizzled in groups of eight (1024 bytes apart). In the PTX ISA this is the MN-major layout, where the leading
// dimension offset is that of pieces and the stride dimension offset that of groups.
#define W_PIECE (DEPTH * 128)
__device__ __forceinline__ u64 operand_by_k(u32 address) {
  return descriptor_address(address) | (u64)(W_PIECE >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// Keeps the compiler from moving the sums to other registers while asynchronous wgmma instructions write them.
template <int ATOMS> __device__ __forceinline__ void pin_accumulators(float (&d)[ATOMS][BN / 2]) {
#pragma unroll
  for (int m = 0; m < ATOMS; m++)
#pragma unroll
    for (int i = 0; i < BN / 2; i++) asm volatile("" : "+f"(d[m][i])::"memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// A position in the circular buffer of stages, with the parity of its round.
struct StageCursor {
  int stage;
  u32 parity;
  __device__ __forceinline__ explicit StageCursor(u32 number) : stage(number % STAGES), parity(number / STAGES & 1) {}
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

// Address offset of the lane's row in a 16 x 16 block of a piece: the 16-byte word is swizzled by the row.
__device__ __forceinline__ u32 lane_at(int word) {
  const u32 lane = threadIdx.x % 32;
  return lane % 16 * 128 + (((word + lane / 16) ^ lane % 8) << 4);
}

// Adds pairs of 16-bit elements; each sum is rounded to the element type.
template <int DTYPE> __device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
  u32 sums;
  if constexpr (DTYPE == 1) asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
  else asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
  return sums;
}

// Bias of a tile's columns: lane i holds the pairs of columns i, i + 32, ..., and other lanes read them by shuffle.
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
  // Returns the biases that this thread's sums in the 8-column groups j and j + 1 need.
  __device__ __forceinline__ void of(int j, float (&b)[4]) const {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int pair = (j + e) * 4; // and lane % 4
      const u32 both = __shfl_sync(~0u, bias[pair / 32], pair % 32 + threadIdx.x % 4);
      unpack<TYPE>(both, b[2 * e], b[2 * e + 1]);
    }
  }
};

// Writes piece c of a warp's sums to `to` in shared memory and from there, by TMA of one lane, to y. Waiting counts
// commit groups to know that one of the BUFFERS_IN_FLIGHT was read, so a group is
// committed even if there is nothing to store.
template <int BUFFERS_IN_FLIGHT>
__device__ __forceinline__ void store_piece(const Map &y, const float (&sums)[BN / 2], int c, u32 to, int column, int row,
                                          bool there) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(BUFFERS_IN_FLIGHT - 1) : "memory");
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    u32 words[4];
#pragma unroll
    for (int q = 0; q < 4; q++) { // 8 columns j or j + 1, rows lane / 4 or that + 8
      const int at = (c * 8 + j + q / 2) * 4 + q % 2 * 2;
      words[q] = pack<TYPE>(sums[at], sums[at + 1]);
    }
    store_pieces(to + lane_at(j), words);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (lane == 0) {
    if (there) store_box(y, to, column, row);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}
