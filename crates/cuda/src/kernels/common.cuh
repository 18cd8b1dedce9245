// What every kernel file starts with: element types without CUDA's headers, which NVRTC does not have built in. A file
// is compiled for one element type at a time: TYPE is 0 for f32, 1 for bf16, 2 for f16. Arithmetic is in f32.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if TYPE == 0
typedef float T;
#else
typedef u16 T;
#endif

// Codes of the status word: what a kernel refuses. launch/mod.rs has the sentences.
#define BAD_TOKEN 1u
#define BAD_SPAN 2u
#define BAD_ROW 3u

__device__ __forceinline__ float bf16_to_float(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 float_to_bf16(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
__device__ __forceinline__ float f16_to_float(u16 x) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x)); return r; }
__device__ __forceinline__ u16 float_to_f16(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }

// An element as f32, and back with round to nearest even.
__device__ __forceinline__ float load(T x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return bf16_to_float(x);
#else
  return f16_to_float(x);
#endif
}

__device__ __forceinline__ T store(float x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return float_to_bf16(x);
#else
  return float_to_f16(x);
#endif
}

// Says to the host what a kernel refuses; the largest code of a step stays.
__device__ __forceinline__ void refuse(u32 *status, u32 code) { atomicMax(status, code); }
