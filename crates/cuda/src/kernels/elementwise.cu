// Elementwise operations (cast, GELU, ReLU, add), gated linear units, and concatenation of columns.
//
// Invariant: a thread reads an element before it writes it, so that y may be x.

#include "common.cuh"
#include "activation.cuh"
#include "elementwise.cuh"

// ReLU: max(x, 0). max.NaN propagates NaN, which fmaxf would replace by 0.
__device__ __forceinline__ float positive_part(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

#if defined(INTO)

// y = x converted from TYPE to the element type INTO, rounded to nearest even.
extern "C" __global__ void __launch_bounds__(THREADS) cast(const void *x, void *y, long long n) {
  after_predecessors();
  map<TYPE, INTO, TYPE == 0 || INTO == 0 ? 4 : 8>(x, y, n, [](float v) { return v; });
}

#elif defined(COLUMNS)

// Gated linear unit: y[r, j] = f(x[r, j]) x[r, COLUMNS + j], where f is SiLU with the constant SILU, else GELU.
// x: (R, 2 COLUMNS), y: (R, COLUMNS). A thread computes STEPS accesses of y; `accesses` is their number in all rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    glu(const T *__restrict__ x, T *__restrict__ y, long long accesses) {
  after_predecessors();
  constexpr int WIDTH = COLUMNS % WIDE == 0 ? WIDE : 1;
  constexpr u32 PER_ROW = COLUMNS / WIDTH;
  const long long first = first_element<1>();
  float gate[STEPS][WIDTH], value[STEPS][WIDTH];
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const u64 at = first + s * THREADS;
    if (at >= accesses) break;
    const T *from = x + (at / PER_ROW * (2ull * COLUMNS) + at % PER_ROW * WIDTH);
    load_many<TYPE, WIDTH>(from, gate[s]);
    load_many<TYPE, WIDTH>(from + COLUMNS, value[s]);
  }
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const u64 at = first + s * THREADS;
    if (at >= accesses) break;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) gate[s][i] = (SILU ? silu(gate[s][i]) : x_phi(gate[s][i])) * value[s][i];
    store_many<TYPE, WIDTH>(y + at * WIDTH, gate[s]);
  }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS) gelu(const void *x, void *y, long long n) {
  after_predecessors();
  map<TYPE, TYPE, WIDE>(x, y, n, [](float v) { return x_phi(v); });
}

extern "C" __global__ void __launch_bounds__(THREADS) relu(const void *x, void *y, long long n) {
  after_predecessors();
  map<TYPE, TYPE, WIDE>(x, y, n, [](float v) { return positive_part(v); });
}

// y = a + b; y may be a or b.
extern "C" __global__ void __launch_bounds__(THREADS) add(const T *a, const T *b, T *y, long long n) {
  after_predecessors();
  map_two(a, b, y, n, [](float u, float v) { return u + v; });
}

// Copies x (R, columns) to the columns from `first` on of y (R, total). One block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    concat(const T *__restrict__ x, T *__restrict__ y, int columns, int first, int total) {
  after_predecessors();
  const T *from = x + (u64)blockIdx.x * columns;
  T *to = y + ((u64)blockIdx.x * total + first);
  for (int c = threadIdx.x; c < columns; c += THREADS) to[c] = from[c];
}

#endif
