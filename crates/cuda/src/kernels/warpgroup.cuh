// Asynchronous matmul of one warpgroup (wgmma) with a in registers and b in shared memory, for sm_90a, as the
// attention kernels use it: m64n64k16 with f32 accumulators.
//
// Invariant: an element of c is a function of its row of a, its column of b and its previous value.

#pragma once

#include "common.cuh"

// Byte offset of a 16-byte word in a tile: rows of 64 elements (128 bytes), where word w of row r is stored at
// w ^ (r % 8). This is the 128-byte swizzle of TMA and wgmma, and is free of bank conflicts along rows and
// columns. A tile starts at a multiple of 1024 bytes, since the hardware takes the swizzle from address bits.
__device__ __forceinline__ u32 tile_at(int row, int word) { return row * 128 + ((word ^ (row % 8)) * 16); }

// Orders this thread's writes to shared memory before later reads by wgmma, which go through the asynchronous proxy.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving reads of c before the preceding `wgmma_wait`: it does not know that wgmma
// writes c asynchronously.
__device__ __forceinline__ void pin_accumulators(float (&c)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(c[i])::"memory");
}

// Descriptor of a tile as operand b: start address, 1024 bytes per eight rows, 128-byte swizzle (PTX ISA, "Matrix
// descriptor"). Addresses and strides are in units of 16 bytes.
__device__ __forceinline__ u64 tile_of(u32 at) { return (u64)(at >> 4 & 0x3FFF) | 64ull << 16 | 64ull << 32 | 1ull << 62; }

#if TYPE == 1
#define WGMMA_TYPES ".f32.bf16.bf16"
#else
#define WGMMA_TYPES ".f32.f16.f16"
#endif
// Asm operands of eight accumulators, and the matching lists of operand numbers.
#define C8(i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define UP_TO_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define UP_TO_31                                                                                                     \
  UP_TO_7 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
          "%29, %30, %31"

// Issues c += a b, or c = a b without `add`: (64, 16) (16, 64) -> (64, 64). A warp has 16 rows of a and c, in
// the register layout of mma.sync m16n8k16. BY_ROWS: each row of b in shared memory has one index of k
// (values); otherwise each row has one column of b (keys). It runs asynchronously: c must not be read before
// `wgmma_wait`.
template <int BY_ROWS> __device__ __forceinline__ void wgmma(float (&c)[32], const u32 (&a)[4], u64 b, int add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES " {" UP_TO_31 "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
               : C8(0), C8(8), C8(16), C8(24)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(BY_ROWS));
}
