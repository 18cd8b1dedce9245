// Quantization of rows to e4m3 with a scale each, optionally behind an activation or a gated linear unit.
//
// Invariant: values are quantized from f32, before any rounding to an element type.

#include "common.cuh"
#include "rows.cuh"
#include "activation.cuh"

// The function OF that is applied before quantization: none, GELU, or a gated linear unit (first half of the
// row is the gate of the second).

#define ROWS 0
#define GELU 1
#define GLU_GELU 2
#define GLU_SILU 3
constexpr bool GATED = OF >= GLU_GELU;

// y = f(x), quantized to `quantized` (R, STRIDE) and scales (R), and written to y (R, COLUMNS) unless that is null. x: (R,
// COLUMNS), or (R, 2 COLUMNS) with the gate first. One group of threads per row; y may be x.
extern "C" __global__ void __launch_bounds__(BLOCK)
    quantize(const T *x, T *y, u8 *__restrict__ quantized, float *__restrict__ scales,
             long long rows) {
  after_predecessors();
  const int lane = threadIdx.x % GROUP;
  const long long row = (long long)blockIdx.x * (BLOCK / GROUP) + threadIdx.x / GROUP;
  const T *from = x + row * (GATED ? 2 * COLUMNS : COLUMNS);
  Raw raw[VECTORS], value[GATED ? VECTORS : 1];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = v * GROUP + lane;
    if (row >= rows || at >= ACCESSES) continue;
    raw[v] = *(const Raw *)(from + at * WIDTH);
    if constexpr (GATED) value[v] = *(const Raw *)(from + COLUMNS + at * WIDTH);
  }
  float f[VECTORS][WIDTH];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = v * GROUP + lane;
    if (row >= rows || at >= ACCESSES) continue;
    widen_raw(raw[v], f[v]);
    float g[WIDTH];
    if constexpr (GATED) widen_raw(value[v], g);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
      if constexpr (OF == GELU || OF == GLU_GELU) f[v][k] = x_phi_fine(f[v][k]);
      if constexpr (OF == GLU_SILU) f[v][k] = silu(f[v][k]);
      if constexpr (GATED) f[v][k] *= g[k];
    }
    if (y) store_many<TYPE, WIDTH>(y + row * COLUMNS + at * WIDTH, f[v]);
  }
  write_quantized(f, row, rows, lane, quantized, scales);
}
