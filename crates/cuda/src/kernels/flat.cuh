// Arrays of elements that threads access in strides of a block: STEPS accesses per thread, THREADS threads per
// block. Shared by the kernels of elementwise operations and of optimizers.
//
// Invariant: nothing behind the last element is touched.

#define THREADS 256

// Loads and stores elements at .. at + MANY of n: by one access, or one by one at the end of the array.
template <int DTYPE, int MANY>
__device__ __forceinline__ void load_some(const typename Element<DTYPE>::type *x, long long at, long long n,
                                          float (&v)[MANY]) {
  if (at + MANY <= n) {
    load_many<DTYPE, MANY>(x + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < MANY; i++) v[i] = at + i < n ? widen<DTYPE>(x[at + i]) : 0.0f;
  }
}

template <int DTYPE, int MANY>
__device__ __forceinline__ void store_some(typename Element<DTYPE>::type *y, long long at, long long n,
                                           const float (&v)[MANY]) {
  if (at + MANY <= n) {
    store_many<DTYPE, MANY>(y + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < MANY; i++)
      if (at + i < n) y[at + i] = narrow<DTYPE>(v[i]);
  }
}

// The first element of a thread, which then continues in strides of THREADS accesses: adjacent threads access
// adjacent memory, and STEPS loads are in flight per thread.
#define STEPS 4
template <int MANY> __device__ __forceinline__ long long first_element() {
  return ((long long)blockIdx.x * (STEPS * THREADS) + threadIdx.x) * MANY;
}
