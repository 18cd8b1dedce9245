// Parameters of the attention kernels and of their gradients; the host has structs with the same fields
// (launch/attention.rs, launch/attention_grad.rs).
//
// Constants: TYPE, TABLE (element type of cos and sin).

#pragma once

#include "common.cuh"

typedef Element<TABLE>::type Angle;

// Parameters of the attention kernels that read q, k and v by address. q: (T, H d), k, v: (T, G d) with G = H / group, rows of q
// are q_stride elements apart, those of k and v kv_stride; spans: (S, 2), first row and end of each sequence, with S =
// `sequences` and T = `tokens`; cos, sin: (longest, d/2); o: (T, H d); lse: (T, H) or null. heads_per_block is for
// attention_hopper.cu, (span, local, global) is the size of a sparse mask (`Extent`).
#define ATTENTION_PARAMETERS                                                                                         \
  const T *q, const T *k, const T *v, long long q_stride, long long kv_stride, const int *spans, int sequences,      \
      int tokens, const Angle *cosines, const Angle *sines, int longest, T *o, float *lse, int heads, int group,     \
      float scale, u32 *status, int heads_per_block, int span, int local, int global

// Parameters of the gradient kernels that read by address. q, do: (T, H d) and k, v: (T, G d) with G = `kv_heads`, q and k
// rotated, each with the stride of its rows, but that of do is H d; stats: (T, H), lse and delta; d1, d2: dk and dv, or dq and
// null, with rows d_stride elements apart.
#define ATTENTION_GRAD_PARAMETERS                                                                                     \
  const T *q, const T *k, const T *v, const T *dy, long long q_stride, long long k_stride, long long v_stride,        \
      const float2 *stats, const int *spans, int sequences, int tokens, const Angle *cosines, const Angle *sines,     \
      int longest, T *d1, T *d2, long long d_stride, int heads, int kv_heads, float scale, int span, int local,       \
      int global, u32 *status
