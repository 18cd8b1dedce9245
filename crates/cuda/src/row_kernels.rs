//! Kernels on rows that launches of ops and matmuls share: their variants and grids. Invariant: the kernel is chosen by columns
//! and element types, never by the number of rows, so a row has the same bits in any step.

use crate::kernel::{Arg, Kernel, KernelFile, KernelLaunch, LaunchShape, code, int, kernel_arguments};
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
pub(crate) fn gelu_in_place(dtype: DType, x: u64, elements: u64) -> KernelLaunch<[Arg; 3]> {
    KernelLaunch {
        kernel: Kernel::new(KernelFile::Elementwise, "gelu", dtype),
        shape: elementwise_shape(elements, wide(dtype)),
        args: [Arg::pointer(x), Arg::pointer(x), Arg::long(elements)],
    }
}

/// Returns the grid for `elements` elements in accesses of `width` elements.
pub(crate) fn elementwise_shape(elements: u64, width: u64) -> LaunchShape {
    LaunchShape::of(elements.div_ceil(width * STEPS * u64::from(THREADS)), THREADS)
}

kernel_arguments! {
    /// Arguments of `layer_norm` (norm.cu).
    pub(crate) struct LayerNormArgs {
        pub(crate) x: u64,
        pub(crate) gamma: u64,
        pub(crate) beta: u64,
        pub(crate) y: u64,
        pub(crate) means: u64,
        pub(crate) rstds: u64,
        pub(crate) rows: u64,
        pub(crate) rows_per_group: i32,
        pub(crate) eps: f32,
        pub(crate) quantized: u64,
        pub(crate) scales: u64,
    }
    size 80, last 72
}

/// A layer norm that runs as a separate kernel in front of a matmul.
#[derive(Clone, Copy)]
pub(crate) struct SeparateNorm {
    /// Element type of x and y.
    pub(crate) dtype: DType,
    /// Element type of gamma and beta.
    pub(crate) params: DType,
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    pub(crate) x: u64,
    pub(crate) gamma: u64,
    pub(crate) beta: u64,
    pub(crate) y: u64,
    pub(crate) eps: f32,
}

impl SeparateNorm {
    /// Returns the kernel with its grid and arguments, for rows of at most [`ELEMENTS_PER_THREAD`] elements per lane of a
    /// warp.
    pub(crate) fn launch(&self) -> KernelLaunch<LayerNormArgs> {
        const WARP: u64 = 32;
        let NormShape { shape, rows_per_group } = norm_shape(self.rows, WARP);
        let args = LayerNormArgs {
            x: self.x,
            gamma: self.gamma,
            beta: self.beta,
            y: self.y,
            means: 0,
            rstds: 0,
            quantized: 0,
            scales: 0,
            rows: self.rows,
            rows_per_group: int(rows_per_group),
            eps: self.eps,
        };
        let kernel = layer_norm_kernel(self.dtype, self.params, self.columns, WARP);
        KernelLaunch { kernel, shape, args }
    }
}

/// The launch configuration of a norm.
pub(crate) struct NormShape {
    pub(crate) shape: LaunchShape,
    /// Number of rows per group of threads.
    pub(crate) rows_per_group: u64,
}

/// Returns the grid of a norm whose rows have `group` threads each. Once there are enough rows for all groups, a group
/// does several rows, for which it reads gamma and beta once.
pub(crate) fn norm_shape(rows: u64, group: u64) -> NormShape {
    let rows_per_group = if rows * group >= 1 << 20 { 8 } else { 1 };
    let threads = group.max(128);
    let shape = LaunchShape::of(rows.div_ceil(rows_per_group * (threads / group)), threads as u32);
    NormShape { shape, rows_per_group }
}

pub(crate) fn layer_norm_kernel(dtype: DType, params: DType, columns: u64, group: u64) -> Kernel {
    let kernel = Kernel::new(KernelFile::Norm, "layer_norm", dtype).with("PARAM", code(params));
    kernel.with("COLUMNS", columns as i64).with("GROUP", group as i64)
}

/// Returns the number of threads that share a row in their registers: the fewest that keep the parameters too,
/// otherwise the largest block; `None` if even that cannot keep a row.
pub(crate) fn group(dtype: DType, columns: u64) -> Option<u64> {
    for group in [32, 64, 128, 256, 512] {
        if elements_per_thread(dtype, columns, group) <= ELEMENTS_PER_THREAD {
            return Some(group);
        }
    }
    (elements_per_thread(dtype, columns, 1024) <= WIDEST_ELEMENTS_PER_THREAD).then_some(1024)
}

/// Number of elements of a row that each of `group` threads keeps in registers.
pub(crate) fn elements_per_thread(dtype: DType, columns: u64, group: u64) -> u64 {
    let width = row_width(dtype, columns);
    (columns / width).div_ceil(group) * width
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
