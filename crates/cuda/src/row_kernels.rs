//! Kernels on rows that launches of ops and matmuls share: their variants and grids. Invariant: the kernel is chosen by columns
//! and element types, never by the number of rows, so a row has the same bits in any step.

use crate::kernel::{Arg, File, Kernel, Shape, code};
use plimsoll_graph::DType;

/// Threads of a block of an elementwise kernel.
pub(crate) const THREADS: u32 = 256;
/// Memory accesses of a thread of an elementwise kernel.
pub(crate) const STEPS: u64 = 4;
/// Largest number of elements of a row that a thread of a norm keeps in registers, with the parameters beside them.
const ELEMENTS_PER_THREAD: u64 = 24;
/// As `ELEMENTS_PER_THREAD`, for rows that need the largest block.
const WIDEST_ELEMENTS_PER_THREAD: u64 = 32;

/// Returns the kernel, grid and arguments of `x = gelu(x)` over `elements` elements, as a pass behind a matmul.
pub(crate) fn gelu_in_place(dtype: DType, x: u64, elements: u64) -> (Kernel, Shape, [Arg; 3]) {
    let args = [Arg::pointer(x), Arg::pointer(x), Arg::long(elements)];
    (Kernel::new(File::Elementwise, "gelu", dtype), all(elements, wide(dtype)), args)
}

/// Returns the grid for `elements` elements in accesses of `width` elements.
pub(crate) fn all(elements: u64, width: u64) -> Shape {
    Shape::of(elements.div_ceil(width * STEPS * u64::from(THREADS)), THREADS)
}

/// Returns the kernel, grid and arguments of a layer norm in front of a matmul, for rows of at most
/// [`ELEMENTS_PER_THREAD`] elements per lane of a warp.
pub(crate) fn norm_of(
    (dtype, params): (DType, DType),
    (rows, columns): (u64, u64),
    [x, gamma, beta, y]: [u64; 4],
    eps: f32,
) -> (Kernel, Shape, [Arg; 9]) {
    const WARP: u64 = 32;
    let (shape, each) = norm_shape(rows, WARP);
    let [x, gamma, beta, y, none] = [x, gamma, beta, y, 0].map(Arg::pointer);
    let args = [x, gamma, beta, y, none, none, Arg::long(rows), Arg::int(each), Arg::float(eps)];
    (layer_norm_kernel(dtype, params, columns, WARP), shape, args)
}

/// Returns the grid, and the number of rows per group of threads. Once there are enough rows for all groups, a group
/// does several rows, for which it reads gamma and beta once.
pub(crate) fn norm_shape(rows: u64, group: u64) -> (Shape, u64) {
    let each = if rows * group >= 1 << 20 { 8 } else { 1 };
    let threads = group.max(128);
    (Shape::of(rows.div_ceil(each * (threads / group)), threads as u32), each)
}

pub(crate) fn layer_norm_kernel(dtype: DType, params: DType, columns: u64, group: u64) -> Kernel {
    let kernel = Kernel::new(File::Norm, "layer_norm", dtype).with("PARAM", code(params));
    kernel.with("COLUMNS", columns as i64).with("GROUP", group as i64)
}

/// Returns the number of threads that share a row in their registers: the fewest that keep the parameters too,
/// otherwise the largest block; `None` if even that cannot keep a row.
pub(crate) fn group(dtype: DType, columns: u64) -> Option<u64> {
    let width = row_width(dtype, columns);
    let kept = |group: u64| (columns / width).div_ceil(group) * width;
    let few = [32, 64, 128, 256, 512].into_iter().find(|&group| kept(group) <= ELEMENTS_PER_THREAD);
    few.or_else(|| (kept(1024) <= WIDEST_ELEMENTS_PER_THREAD).then_some(1024))
}

/// Number of elements in 16 bytes.
pub(crate) fn wide(dtype: DType) -> u64 {
    if dtype == DType::F32 { 4 } else { 8 }
}

/// Number of elements per access to rows of `columns`: 16 bytes if all rows are aligned to 16 bytes.
pub(crate) fn row_width(dtype: DType, columns: u64) -> u64 {
    if columns.is_multiple_of(wide(dtype)) { wide(dtype) } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_to_the_fewest_threads_that_keep_them() {
        let groups = [(320, 32), (768, 32), (1280, 64), (2560, 128), (24_576, 1024), (32_768, 1024)];
        for (columns, threads) in groups {
            assert_eq!(group(DType::Bf16, columns), Some(threads), "{columns} columns");
        }
        assert_eq!((group(DType::F32, 33), group(DType::F32, 32_769)), (Some(32), None));
    }
}
