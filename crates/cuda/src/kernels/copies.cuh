// Barriers in shared memory, and Hopper's copy engine, whose copies arrive at them.

// What the engine knows of a matrix; it lies in a kernel's arguments.
struct __align__(64) Map { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers in shared memory.
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
// Until the phase of this parity is complete.
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier." WAIT ".parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// Boxes of matrices: (column, row) is the first element; what lies outside is read as zeros and is not written.
__device__ __forceinline__ void fetch(u32 to, const Map &map, u32 barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
