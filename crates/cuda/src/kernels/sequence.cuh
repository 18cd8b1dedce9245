// Spans of sequences, and the scale of ESM's token dropout. Shared by the operations on sequences and their gradients.

#pragma once

#include "common.cuh"

#define WARPS 8

// Rows of sequence s, and the rows in front of it: those between it and sequence s - 1. For s = sequences, the rows
// behind the last sequence.
struct Span {
  long long before, start, end;
};

// Reads the span of sequence s from spans (sequences, 2), which must ascend and lie in 0 .. tokens; otherwise reports
// BAD_SPAN and returns false, in all threads of the block.
__device__ __forceinline__ bool read_span(const int *__restrict__ spans, int s, int sequences, long long tokens,
                                          u32 *status, Span &span) {
  span.before = s > 0 ? spans[2 * s - 1] : 0;
  span.start = s < sequences ? spans[2 * s] : tokens;
  span.end = s < sequences ? spans[2 * s + 1] : tokens;
  if (span.before < 0 || span.before > span.start || span.start > span.end || span.end > tokens) {
    if (threadIdx.x == 0) refuse(status, BAD_SPAN);
    return false;
  }
  return true;
}

// The factor of a sequence's tokens in ESM's token dropout: keep / (1 - masked / length), where `masked` is its number of
// tokens `mask`. All 32 WARPS threads of a block must call it once.
__device__ __forceinline__ float dropout_scale(const int *__restrict__ ids, const Span &span, int mask, float keep) {
  __shared__ int counts[WARPS];
  int masked = 0;
  for (long long t = span.start + threadIdx.x; t < span.end; t += 32 * WARPS) masked += ids[t] == mask;
  masked = __reduce_add_sync(0xFFFFFFFFu, masked);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = masked;
  __syncthreads();
  masked = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) masked += counts[w];
  return keep / (1.0f - (float)masked / (float)(span.end - span.start));
}

