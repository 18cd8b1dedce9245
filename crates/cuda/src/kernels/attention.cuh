// Shared by the attention kernels: the mapping from a block's number to a tile of queries of one sequence, the
// check of the sequence spans, and the slopes of ALiBi.

#pragma once

#include "common.cuh"

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// A tile of queries: the queries from number `first` on of the sequence in rows `start` .. `end` of the packed batch.
struct Block {
  int start, end, first;
};

// Returns the tile of queries with a given number, without a prefix sum over the sequences. `spans` (S, 2) has
// the first row and the end of every sequence, ascending.
//
// Sequence s owns the numbers from start(s) / rows + s on, one for each `rows` of its queries. Because floor(a
// + b) >= floor(a) + floor(b), its last number is below the first number of sequence s + 1: the first numbers
// ascend, no number belongs to two sequences, and all are below tokens / rows + sequences, which the host
// launches without reading the spans. A number that no sequence uses results in a tile behind the end of its
// sequence, or with a negative `first`; callers skip both.
//
// All 32 lanes of a warp must call it: they search the sequences together, dividing the range by 32 per round.
template <int rows> __device__ __forceinline__ Block block_of(const int *spans, int sequences, int number) {
  int low = 0, count = sequences, lane = threadIdx.x % 32;
  while (count > 1) {
    int part = (count + 31) / 32, at = lane * part;
    // First numbers ascend, so that the lanes with `below` are the first ones, and their count gives the last
    // of them.
    bool below = at < count && spans[2 * (low + at)] / rows + low + at <= number;
    int last = __popc(__ballot_sync(~0u, below)) - 1;
    if (last < 0) return {0, 0, 0};
    low += last * part;
    count = min(part, count - last * part);
  }
  if (sequences == 0) return {0, 0, 0};
  int start = spans[2 * low], end = spans[2 * low + 1];
  return {start, end, (number - start / rows - low) * rows};
}

// Reports BAD_SPAN unless span s starts at or behind the end of span s - 1, ends within the `tokens` rows, and
// has at most `longest` rows (the length of the rotary table). Kernels call it with the number of a tile: there are at
// least as many numbers as sequences, so that every span is checked once, also where `block_of` would not find it.
__device__ __forceinline__ void check_span(const int *spans, int sequences, int tokens, int longest, int s, u32 *status) {
  if (s >= sequences) return;
  int before = s ? spans[2 * s - 1] : 0, start = spans[2 * s], end = spans[2 * s + 1];
  if (start < before || start < 0 || end < start || end > tokens || end - start > longest) refuse(status, BAD_SPAN);
}

// The slope of ALiBi for one head, equal to graph::ops::alibi_slopes (Press et al. 2022, reference code). With
// n heads, n a power of two, head i (from 1) has 2^(-8 i / n). Otherwise the first heads have the slopes of the
// next smaller power of two, and the others every second slope of twice that power.
__device__ __forceinline__ float alibi_slope(int head, int heads) {
  int whole = 1 << (31 - __clz(heads)), rest = head - whole;
  int i = rest < 0 ? head + 1 : 2 * rest + 1, n = rest < 0 ? whole : 2 * whole;
  return (float)exp2(-8.0 * i / n);
}
