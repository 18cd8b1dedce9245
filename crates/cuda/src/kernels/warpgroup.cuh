// Products of a warpgroup (wgmma) with a in registers and b in shared memory, for sm_90a.
//
// Invariant: an element of c is a function of its row of a, its column of b and what it was.

// A tile in shared memory: rows of 64 elements (128 bytes), of which row r has its word w of 16 bytes at w ^ (r % 8): free
// of conflicts by rows and by columns, and the products' own 128-byte swizzle. It starts at a multiple of 1 024 bytes.
__device__ __forceinline__ u32 tile_at(int row, int word) { return row * 128 + ((word ^ (row % 8)) * 16); }

// What this thread wrote to shared memory comes before what products read there.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps what reads c behind the products_wait before it.
__device__ __forceinline__ void settle(float (&c)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(c[i])::"memory");
}

// What a product knows of a tile, as b: where it starts, that eight rows are 1 024 bytes, the swizzle (PTX ISA, "Matrix
// descriptor").
__device__ __forceinline__ u64 tile_of(u32 at) { return (u64)(at >> 4 & 0x3FFF) | 64ull << 16 | 64ull << 32 | 1ull << 62; }

#if TYPE == 1
#define OF_TYPE ".f32.bf16.bf16"
#else
#define OF_TYPE ".f32.f16.f16"
#endif
// Eight accumulators as operands, and lists of operands' numbers.
#define C8(i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define UP_TO_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define UP_TO_31                                                                                                     \
  UP_TO_7 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
          "%29, %30, %31"

// c (+)= a b: (64, 16) (16, 64) -> (64, 64). A thread has of a and c what it has in mma.sync m16n8k16, its warp's 16 rows.
// BY_ROWS: b's rows in shared memory are along k, or else its columns are. It runs until products_wait says otherwise.
template <int BY_ROWS> __device__ __forceinline__ void product(float (&c)[32], const u32 (&a)[4], u64 b, int add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16" OF_TYPE " {" UP_TO_31 "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
               : C8(0), C8(8), C8(16), C8(24)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(BY_ROWS));
}
