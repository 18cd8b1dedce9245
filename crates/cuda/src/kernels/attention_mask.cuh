// Which pairs of queries and keys a mask admits. Constant: MASK (0 full, 1 causal, 2 sliding window, 3 block-sparse). Kernels of the first
// two masks only define CAUSAL instead.

#pragma once

#include "common.cuh"

#ifndef MASK
#define MASK CAUSAL
#endif

// Size of a mask: keys of a window, or positions of a block with the numbers of local and of global blocks.
struct Extent {
  int span, local, global;
};

// The columns that a row of the matrix of scores is paired with: column c if c < high and (c >= low or c < far).
struct Pairs {
  int low, high, far;
  __device__ __forceinline__ bool admits(int c) const { return c < high && (c >= low || (MASK == 3 && c < far)); }
};

// Returns the pairs of row r in a sequence of `length` tokens: the keys of query r, or with `of_keys` the queries of key r
// (`Mask::keys` and `Mask::queries` in attention_mask.rs). Within a sequence `low` and `far` do not decrease with r,
// and the largest `high` of adjacent rows is that of the first or of the last row. A row behind the sequence has no
// pairs. Products of positions are 64-bit, since a span may be any u32 clamped to an int.
template <bool of_keys> __device__ __forceinline__ Pairs pairs_of(int r, int length, Extent mask) {
  if (r >= length) return {0x7fffffff, 0, 0};
  if constexpr (MASK == 0) {
    return {0, length, 0};
  } else if constexpr (of_keys) {
    long long end = length;
    if (MASK == 2) end = (long long)r + mask.span;
    if (MASK == 3 && r / mask.span >= mask.global) end = ((long long)(r / mask.span) + mask.local) * mask.span;
    return {r, (int)min(end, (long long)length), 0};
  } else {
    long long low = 0, far = 0;
    if (MASK == 2) low = max((long long)r + 1 - mask.span, 0ll);
    if (MASK == 3) {
      low = max((long long)(r / mask.span) + 1 - mask.local, 0ll) * mask.span;
      far = min((long long)mask.global * mask.span, low);
    }
    return {(int)low, r + 1, (int)far};
  }
}

// The tiles of columns that a block of rows needs: tiles 0 .. far, then tiles from `near` on.
struct Tiles {
  int far, near, count;
  __device__ __forceinline__ int operator[](int i) const { return MASK == 3 && i >= far ? near + i - far : near * (MASK != 3) + i; }
};

template <bool of_keys, int rows, int tile> __device__ __forceinline__ Tiles tiles_of(int first, int length, Extent mask) {
  Pairs a = pairs_of<of_keys>(first, length, mask), b = pairs_of<of_keys>(min(first + rows, length) - 1, length, mask);
  // The two ranges may meet inside a tile, which is then one of the far tiles alone: visited twice, it would be added
  // twice.
  int far = (b.far + tile - 1) / tile, near = max(a.low / tile, far);
  return {far, near, far + (max(a.high, b.high) + tile - 1) / tile - near};
}

