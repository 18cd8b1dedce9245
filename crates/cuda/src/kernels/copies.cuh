// Barriers in shared memory (mbarrier) and loads by Hopper's tensor memory accelerator (TMA), which signal their
// completion at such barriers.

#pragma once

#include "common.cuh"

// A tensor map (CUtensorMap), encoded by the host and passed as a kernel parameter.
struct __align__(64) Map { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// A barrier completes a phase after `count` arrivals and after all bytes announced by `expect` have been written.
__device__ __forceinline__ void init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier, int times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
#if __CUDA_ARCH__ >= 900
#define WAIT "try_wait"
#else
#define WAIT "test_wait"
#endif
// Waits until the phase with this parity is complete. Phases alternate between parity 0 and 1, so a waiter must
// not be two phases ahead of the barrier or behind it. Waiting for parity 1 on a fresh barrier returns at once.
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier." WAIT ".parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// Loads a box of a matrix to shared memory; (column, row) is its first element. Elements outside of the matrix become
// zeros.
__device__ __forceinline__ void fetch(u32 to, const Map &map, u32 barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
