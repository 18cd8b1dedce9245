// Shared by the gradient kernels of attention: the kernel that prepares the rows, and the last part of both gradient
// kernels. Constants: HEAD_DIM (d), ROTARY, TABLE (element type of cos and sin).

#pragma once

#include "common.cuh"
#include "attention_args.cuh"

#ifndef LOG2E
#define LOG2E 1.4426950408889634f
#define DIVIDES(n) ((n) % 8 == 0 ? 8 : (n) % 4 == 0 ? 4 : (n) % 2 == 0 ? 2 : 1)
#define CHUNK DIVIDES(HEAD_DIM)
#define HALF (HEAD_DIM / 2)
#define PAIR DIVIDES(HALF)
#endif

// N elements of a row, at an address that is a multiple of N elements.
template <int N> struct __align__(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Some { T x[N]; };
template <int N> struct __align__(N * sizeof(Angle) < 16 ? N * sizeof(Angle) : 16) Angles { Angle x[N]; };

// Computes what both gradient kernels read, for every row t and head h: stats (T, H), each lse[t,h] (times
// log2(e) for 16-bit types) and do[t,h] . o[t,h], and with ROTARY the rotated q: (T, H d) and k: (T, G d). Rows that belong to no sequence get zero gradients
// here, since the gradient kernels write rows of sequences only; null gradients are not used by anyone. The two `counters` of
// attention_grad_hopper.cu get 0.
//
// Work: 8 lanes for each row and head of q; those with h < G also process head h of k.
extern "C" __global__ void __launch_bounds__(256)
prepare(const T *dy, const T *o, const float *lse, const T *q, long long q_stride, const T *k, long long k_stride,
        const int *spans, int sequences, int tokens, const Angle *cosines, const Angle *sines, int longest, float2 *stats,
        T *q_rotated, T *k_rotated, T *dq, T *dk, T *dv, long long dq_stride, long long dk_stride, int heads, int kv_heads,
        int *counters) {
  after_predecessors();
  if (blockIdx.x == 0 && threadIdx.x < 2) counters[threadIdx.x] = 0;
  long long item = (long long)blockIdx.x * 32 + threadIdx.x / 8;
  int lane = threadIdx.x % 8;
  bool live = item < (long long)tokens * heads;
  int row = live ? (int)(item / heads) : 0, head = live ? (int)(item % heads) : 0;
  // Empty sequences may start at the same row: the last one that starts at or before the row is the only candidate.
  int low = 0, high = sequences; // the first start behind the row is that of sequence low .. high
  while (low < high) {
    int middle = low + (high - low) / 2;
    if (spans[2 * middle] <= row) low = middle + 1;
    else high = middle;
  }
  int position = low > 0 ? row - spans[2 * low - 2] : 0;
  bool inside = low > 0 && row < spans[2 * low - 1] && (!ROTARY || position < longest);

  float sum = 0.0f;
  if (live && inside) {
    long long at = item * HEAD_DIM;
    for (int c = lane * CHUNK; c < HEAD_DIM; c += 8 * CHUNK) {
      Some<CHUNK> a = *(const Some<CHUNK> *)(dy + at + c), b = *(const Some<CHUNK> *)(o + at + c);
#pragma unroll
      for (int i = 0; i < CHUNK; i++) sum = fmaf(load(a.x[i]), load(b.x[i]), sum);
    }
  }
  // All lanes of the warp take part, also those without an item.
#pragma unroll
  for (int other = 1; other < 8; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (!live) return;
  if (!inside) {
    Some<CHUNK> zero = {};
    for (int c = lane * CHUNK; c < HEAD_DIM; c += 8 * CHUNK) {
      if (dq) *(Some<CHUNK> *)(dq + row * dq_stride + head * HEAD_DIM + c) = zero;
      if (dk && head < kv_heads) *(Some<CHUNK> *)(dk + row * dk_stride + head * HEAD_DIM + c) = zero;
      if (dv && head < kv_heads) *(Some<CHUNK> *)(dv + row * dk_stride + head * HEAD_DIM + c) = zero;
    }
    return;
  }
  if (lane == 0) stats[item] = make_float2(TYPE == 0 ? lse[item] : __fmul_rn(lse[item], LOG2E), sum);
#if ROTARY
  for (int c = lane * PAIR; c < HALF; c += 8 * PAIR) {
    Angles<PAIR> cosine = *(const Angles<PAIR> *)(cosines + (long long)position * HALF + c);
    Angles<PAIR> sine = *(const Angles<PAIR> *)(sines + (long long)position * HALF + c);
    auto rotate = [&](const T *from, T *to) {
      Some<PAIR> a = *(const Some<PAIR> *)(from + c), b = *(const Some<PAIR> *)(from + c + HALF);
#pragma unroll
      for (int i = 0; i < PAIR; i++) {
        // As in the forward kernels, so that the recomputed scores are those of the forward pass.
        float u = load(a.x[i]), v = load(b.x[i]), cos = widen<TABLE>(cosine.x[i]), sin = widen<TABLE>(sine.x[i]);
        a.x[i] = store(fmaf(u, cos, -__fmul_rn(v, sin)));
        b.x[i] = store(fmaf(v, cos, __fmul_rn(u, sin)));
      }
      *(Some<PAIR> *)(to + c) = a, *(Some<PAIR> *)(to + c + HALF) = b;
    };
    rotate(q + row * q_stride + head * HEAD_DIM, q_rotated + item * HEAD_DIM);
    if (head < kv_heads)
      rotate(k + row * k_stride + head * HEAD_DIM, k_rotated + ((long long)row * kv_heads + head) * HEAD_DIM);
  }
#endif
}
PARAMETERS(prepare, 176, 168);

// Writes rows of sums in shared memory to a gradient, multiplied by `scale`; with `rotated`, the inverse rotation is
// applied first. `sums` has rows `stride` words apart, row 0 is number `position` of its sequence, `to` is its address.
// `thread` of `threads` takes every `threads`-th chunk.
template <bool rotated>
__device__ __forceinline__ void write_sums(const float *sums, int stride, T *to, long long to_stride, int rows, float scale,
                                           const Angle *cosines, const Angle *sines, int position, int thread, int threads) {
  if constexpr (rotated && ROTARY) {
    constexpr int per = HALF / PAIR;
    for (int i = thread; i < rows * per; i += threads) {
      int r = i / per, c = i % per * PAIR;
      Angles<PAIR> cosine = *(const Angles<PAIR> *)(cosines + (long long)(position + r) * HALF + c);
      Angles<PAIR> sine = *(const Angles<PAIR> *)(sines + (long long)(position + r) * HALF + c);
      Some<PAIR> a, b;
#pragma unroll
      for (int j = 0; j < PAIR; j++) {
        float u = sums[r * stride + c + j], v = sums[r * stride + c + HALF + j];
        float cos = widen<TABLE>(cosine.x[j]), sin = widen<TABLE>(sine.x[j]);
        a.x[j] = store(__fmul_rn(fmaf(u, cos, __fmul_rn(v, sin)), scale));
        b.x[j] = store(__fmul_rn(fmaf(v, cos, -__fmul_rn(u, sin)), scale));
      }
      *(Some<PAIR> *)(to + r * to_stride + c) = a, *(Some<PAIR> *)(to + r * to_stride + c + HALF) = b;
    }
  } else {
    constexpr int per = HEAD_DIM / CHUNK;
    for (int i = thread; i < rows * per; i += threads) {
      int r = i / per, c = i % per * CHUNK;
      Some<CHUNK> x;
#pragma unroll
      for (int j = 0; j < CHUNK; j++) x.x[j] = store(__fmul_rn(sums[r * stride + c + j], scale));
      *(Some<CHUNK> *)(to + r * to_stride + c) = x;
    }
  }
}

