// Header of every kernel file: element types without CUDA's headers, which NVRTC does not contain. A file is compiled
// for one element type at a time: TYPE is 0 for f32, 1 for bf16, 2 for f16. Arithmetic is in f32.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Layout of a kernel's parameters, which is that of a struct: what the host passes is a struct with the same fields in the
// same order (kernel.rs). Parameters stay separate on the device, because NVRTC treats pointers in a struct worse: it ignores
// their __restrict__, and then neither loads through the read-only cache nor joins adjacent stores.
template <class Kernel> struct ParameterLayout;
template <class... P> struct ParameterLayout<void(P...)> {
  static constexpr int SIZES[] = {(int)sizeof(P)...};
  static constexpr int ALIGNMENTS[] = {(int)alignof(P)...};
  __device__ static constexpr int last() {
    int at = 0;
    for (int i = 0; i < (int)sizeof...(P); i++) {
      if (i > 0) at += SIZES[i - 1];
      at = (at + ALIGNMENTS[i] - 1) / ALIGNMENTS[i] * ALIGNMENTS[i];
    }
    return at;
  }
  __device__ static constexpr int size() { return (last() + SIZES[sizeof...(P) - 1] + 7) / 8 * 8; }
};
// Asserts the size of a kernel's parameters and the offset of the last one; the host asserts those of its struct.
#define PARAMETERS(kernel, bytes, offset)                                                             \
  static_assert(ParameterLayout<decltype(kernel)>::size() == (bytes), "size of what the host passes"); \
  static_assert(ParameterLayout<decltype(kernel)>::last() == (offset), "order of what the host passes")

#if TYPE == 0
typedef float T;
#else
typedef u16 T;
#endif

// Codes of the status word, for invalid input data; launch/mod.rs has their messages.
#define BAD_TOKEN 1u
#define BAD_SPAN 2u
#define BAD_ROW 3u
#define BAD_TARGET 4u
#define BAD_PACK 5u

__device__ __forceinline__ float bf16_to_float(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 float_to_bf16(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
__device__ __forceinline__ float f16_to_float(u16 x) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x)); return r; }
__device__ __forceinline__ u16 float_to_f16(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }

// Converts an element to f32, and back with round to nearest even.
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

// Reports invalid input data to the host; the largest code of a step is kept.
__device__ __forceinline__ void refuse(u32 *status, u32 code) { atomicMax(status, code); }

// Called first in every kernel. With programmatic dependent launch, a kernel may start before its predecessors have
// finished; it must not access memory before they have finished and their writes are visible. Every block waits here,
// so whatever waits for this kernel has waited for all before it. (Starting the next kernel earlier by
// griddepcontrol.launch_dependents gains 1 % for steps of 16 384 tokens of ESM-2 8M and 150M and costs 1 to 2 % for
// 35M, where waiting blocks occupy multiprocessors.)
__device__ __forceinline__ void after_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Conversions of several adjacent elements. DTYPE is an element type as in TYPE, so that a kernel can use several types.
template <int DTYPE> struct Element { typedef u16 type; };
template <> struct Element<0> { typedef float type; };

template <int DTYPE> __device__ __forceinline__ float widen(typename Element<DTYPE>::type x) {
  if constexpr (DTYPE == 0) return x;
  else if constexpr (DTYPE == 1) return bf16_to_float(x);
  else return f16_to_float(x);
}

template <int DTYPE> __device__ __forceinline__ typename Element<DTYPE>::type narrow(float x) {
  if constexpr (DTYPE == 0) return x;
  else if constexpr (DTYPE == 1) return float_to_bf16(x);
  else return float_to_f16(x);
}

// Unpacks a word of two 16-bit elements.
template <int DTYPE> __device__ __forceinline__ void unpack(u32 pair, float &low, float &high) {
  if constexpr (DTYPE == 1) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xFFFF0000u);
  } else {
    low = f16_to_float((u16)pair);
    high = f16_to_float((u16)(pair >> 16));
  }
}

template <int DTYPE> __device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  if constexpr (DTYPE == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Loads MANY elements, aligned to 16 bytes (8 bytes if they are no longer), or one element of any alignment.
template <int DTYPE, int MANY>
__device__ __forceinline__ void load_many(const typename Element<DTYPE>::type *from, float (&x)[MANY]) {
  if constexpr (MANY == 1) {
    x[0] = widen<DTYPE>(from[0]);
  } else if constexpr (DTYPE == 0) {
#pragma unroll
    for (int i = 0; i < MANY / 4; i++) {
      float4 v = ((const float4 *)from)[i];
      x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
    }
  } else if constexpr (MANY == 4) {
    uint2 v = *(const uint2 *)from;
    unpack<DTYPE>(v.x, x[0], x[1]), unpack<DTYPE>(v.y, x[2], x[3]);
  } else {
    static_assert(MANY == 8, "16 bytes");
    uint4 v = *(const uint4 *)from;
    unpack<DTYPE>(v.x, x[0], x[1]), unpack<DTYPE>(v.y, x[2], x[3]);
    unpack<DTYPE>(v.z, x[4], x[5]), unpack<DTYPE>(v.w, x[6], x[7]);
  }
}

template <int DTYPE, int MANY>
__device__ __forceinline__ void store_many(typename Element<DTYPE>::type *to, const float (&x)[MANY]) {
  if constexpr (MANY == 1) {
    to[0] = narrow<DTYPE>(x[0]);
  } else if constexpr (DTYPE == 0) {
#pragma unroll
    for (int i = 0; i < MANY / 4; i++)
      ((float4 *)to)[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  } else if constexpr (MANY == 4) {
    *(uint2 *)to = make_uint2(pack<DTYPE>(x[0], x[1]), pack<DTYPE>(x[2], x[3]));
  } else {
    static_assert(MANY == 8, "16 bytes");
    *(uint4 *)to = make_uint4(pack<DTYPE>(x[0], x[1]), pack<DTYPE>(x[2], x[3]), pack<DTYPE>(x[4], x[5]),
                              pack<DTYPE>(x[6], x[7]));
  }
}
