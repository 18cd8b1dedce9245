// Packs of a step: i32 (P, 6), for each pack [first token, end token, first sequence, end sequence, targets, global
// number] (graph/src/packs.rs). Shared by dropout and by the kernels of the router.
//
// Invariant: packs only say which rows belong together. A kernel stays inside its operands whatever their words are:
// it limits rows that it uses as indices to the rows of the step.

#pragma once

#include "common.cuh"

#define PACK_WORDS 6
#define PACK_TOKENS 0 // the first row of a pack of tokens; the next word is their end
#define PACK_TARGETS 4
#define PACK_NUMBER 5

__device__ __forceinline__ const int *pack_at(const int *packs, int p) { return packs + (long long)p * PACK_WORDS; }

// Reports BAD_PACK unless the packs follow one another from row 0 on and cover `rows` rows, and none has a negative
// number of targets. `word` is the word of a pack's first row: that of tokens or of sequences. One warp calls it.
__device__ __forceinline__ void check_packs(const int *packs, int count, int word, int rows, u32 *status) {
  bool good = count > 0 || rows == 0;
  for (int p = threadIdx.x % 32; p < count; p += 32) {
    const int *pack = pack_at(packs, p);
    const int before = p > 0 ? pack[word + 1 - PACK_WORDS] : 0, first = pack[word], end = pack[word + 1];
    good = good && first == before && first <= end && (p + 1 < count || end == rows) && pack[PACK_TARGETS] >= 0;
  }
  if (!good) refuse(status, BAD_PACK);
}
