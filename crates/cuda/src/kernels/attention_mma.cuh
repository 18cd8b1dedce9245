// Shared by the attention kernels of mma.sync m16n8k16: asynchronous copies, fragments and products. HEAD_DIM is
// the file's constant d. A row of shared memory has d columns, zeros up to DP, and LD elements to the next row: an odd
// number of 16-byte words, so that the eight rows of an ldmatrix lie in different banks.

#pragma once

#include "common.cuh"

#define DP ((HEAD_DIM + 15) / 16 * 16) // d, padded to the depth of an mma
#define LD (DP + 8)
#define LOG2E 1.4426950408889634f

// Elements per copy: the largest power of two, at most 8 (16 bytes), that divides n. Addresses are multiples of
// d elements, so that CHUNK elements are always aligned, and so are PAIR elements of each half of a head.
#define DIVIDES(n) ((n) % 8 == 0 ? 8 : (n) % 4 == 0 ? 4 : (n) % 2 == 0 ? 2 : 1)
#define CHUNK DIVIDES(HEAD_DIM)
#define HALF (HEAD_DIM / 2)
#define PAIR DIVIDES(HALF)

// threadIdx.x. The asm is volatile so that the compiler computes addresses anew at each use instead of holding
// them in registers throughout the loop over the tiles.
__device__ __forceinline__ int thread_now() { int r; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r)); return r; }
template <int N> struct __align__(N * 2) Vector { u16 x[N]; };

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Copies N adjacent elements to shared memory asynchronously; stores zeros unless `valid` (the address must be
// valid all the same). cp.async copies at least 4 bytes, so that one element is copied synchronously.
template <int N> __device__ __forceinline__ void copy(u16 *to, const u16 *from, bool valid) {
  if constexpr (N == 8) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0));
  } else if constexpr (N > 1) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(N * 2),
                 "r"(valid ? N * 2 : 0));
  } else {
    *to = valid ? *from : (u16)0;
  }
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// c += a b: (16, 16) (16, 8) -> (16, 8)
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if TYPE == 1
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
  asm(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// Byte offset of the row that this lane addresses for ldmatrix.x4. `by_row`: 16 rows x 16 columns as operand a
// (queries), or transposed as operand b (values). `by_key`: 16 keys x 16 columns as b of two mma (keys 0 .. 8
// and 8 .. 16): the matrices come in the order that makes b[0], b[1] the first mma's operand and b[2], b[3] the
// second's.
__device__ __forceinline__ int by_row() {
  int lane = thread_now() % 32;
  return (lane % 16 * LD + lane / 16 * 8) * 2;
}
__device__ __forceinline__ int by_key() {
  int lane = thread_now() % 32;
  return ((lane / 16 * 8 + lane % 8) * LD + lane / 8 % 2 * 8) * 2;
}

