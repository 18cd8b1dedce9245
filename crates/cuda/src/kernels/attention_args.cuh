// Arguments of the attention kernels and of their gradients; the host declares the same structs (launch/attention.rs,
// launch/attention_grad.rs). A kernel reads what it needs: kernels with tensor maps read the columns of k and v, the others
// their addresses and strides.
//
// Constants: TYPE, TABLE (element type of cos and sin), ROTARY.

#pragma once

#include "common.cuh"
#include "attention.cuh"

typedef Element<TABLE>::type Angle;

struct AttentionArgs {
  const T *q, *k, *v;            // (T, H d), (T, G d), (T, G d), each with the stride of its rows
  const int *spans;              // (S, 2): first row and end of each sequence
  const Angle *cosines, *sines;  // (longest, d/2)
  T *o;                          // (T, H d)
  float *lse;                    // (T, H) or null: logarithms of the rows' sums of exponentials
  u32 *status;
  long long q_stride, kv_stride; // elements from one row to the next
  int sequences, tokens, longest; // S, T, rows of the tables
  int heads, group;              // H, and the query heads that share a head of k and v
  float scale;
  int k_column, v_column;        // first columns of k and v in their matrices
  int heads_per_block;           // read by attention_hopper.cu
  int span, local, global;       // size of a sparse mask (`Extent`)
};
static_assert(sizeof(AttentionArgs) == 136 && __builtin_offsetof(AttentionArgs, global) == 132, "as the host passes it");

// Arguments of `prepare` (attention_grad.cuh).
struct PrepareArgs {
  const T *dy, *o;               // (T, H d)
  const float *lse;              // (T, H)
  const T *q, *k;                // (T, H d), (T, G d), each with the stride of its rows
  const int *spans;              // (S, 2)
  const Angle *cosines, *sines;  // (longest, d/2)
  float2 *stats;                 // (T, H): lse and delta
  T *q_rotated, *k_rotated;      // (T, H d), (T, G d), with ROTARY
  T *dq, *dk, *dv;               // null if not used
  int *counters;                 // (2)
  long long q_stride, k_stride;
  long long dq_stride, dk_stride; // of dq, and of dk and dv
  int sequences, tokens, longest; // S, T, rows of the tables
  int heads, kv_heads;           // H, G
  int unused;
};
static_assert(sizeof(PrepareArgs) == 176 && __builtin_offsetof(PrepareArgs, unused) == 172, "as the host passes it");

struct AttentionGradArgs {
  const T *q, *k, *v, *dy;       // (T, H d) and (T, G d), q and k rotated; rows of dy are H d elements apart
  const float2 *stats;           // (T, H): lse and delta, from `prepare`
  const int *spans;              // (S, 2)
  const Angle *cosines, *sines;  // (longest, d/2)
  T *d1, *d2;                    // with KEYS dk and dv, otherwise dq and null; null if not used
  int *counters;                 // (2): items that units have taken; used by attention_grad_hopper.cu
  u32 *status;
  long long q_stride, k_stride, v_stride, d_stride; // elements from one row to the next; the last is that of d1 and d2
  int sequences, tokens, longest; // S, T, rows of the tables
  int heads, kv_heads;           // H, G
  float scale;
  int k_column, v_column;        // first columns of k and v in their matrices
  int span, local, global;       // size of a sparse mask (`Extent`)
  int unused;
};
static_assert(sizeof(AttentionGradArgs) == 176 && __builtin_offsetof(AttentionGradArgs, unused) == 172, "as the host passes it");

// Reports BAD_SPAN unless span `number` follows its predecessor, lies within the step, and has at most as many rows as the
// rotary tables.
template <class Args> __device__ __forceinline__ void check_span(const Args &args, int number) {
  check_span(args.spans, args.sequences, args.tokens, ROTARY ? args.longest : args.tokens, number, args.status);
}
