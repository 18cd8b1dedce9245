// What both forms of attention share: how blocks find their sequence, and ALiBi's slopes.

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// Queries `first` .. of the sequence in rows `start` .. `end`.
struct Block {
  int start, end, first;
};

// The block of a number. Sequence s has the numbers from start(s) / rows + s on, one for each `rows` of its queries. As
// floor(a + b) >= floor(a) + floor(b), those of the next one come after: numbers ascend, none is given twice, and all are
// below tokens / rows + sequences. A number that is left over comes out as a block behind its sequence's end, or with a
// negative `first`. All lanes of a warp search together, in 32 parts at a time.
template <int rows> __device__ __forceinline__ Block block_of(const int *spans, int sequences, int number) {
  int low = 0, count = sequences, lane = threadIdx.x % 32;
  while (count > 1) {
    int part = (count + 31) / 32, at = lane * part;
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

// Refuses span s unless it lies behind the one before it, inside of the step, and is `longest` rows at most.
__device__ __forceinline__ void check_span(const int *spans, int sequences, int tokens, int longest, int s, u32 *status) {
  if (s >= sequences) return;
  int before = s ? spans[2 * s - 1] : 0, start = spans[2 * s], end = spans[2 * s + 1];
  if (start < before || start < 0 || end < start || end > tokens || end - start > longest) refuse(status, BAD_SPAN);
}

// ALiBi's slopes as graph::ops::alibi_slopes has them (Press et al. 2022, reference code): 2^(-8 i / n) for a power of
// two n, else those of the power of two below, followed by every second one of twice as many.
__device__ __forceinline__ float alibi_slope(int head, int heads) {
  int whole = 1 << (31 - __clz(heads)), rest = head - whole;
  int i = rest < 0 ? head + 1 : 2 * rest + 1, n = rest < 0 ? whole : 2 * whole;
  return (float)exp2(-8.0 * i / n);
}
