//! Quantization of rows to e4m3. Invariant: the kernel is chosen by columns and element types alone, so a row has the
//! same quantized values in any step.

use super::rows::norm;
use super::{Call, Tensor};
use crate::kernel::{Arg, File, Kernel, Shape};
use crate::row_kernels::row_width;
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::{Activation, Glu, Quantize, Quantized};

/// Largest number of elements of a row that a thread keeps in registers. Fewer threads per row wait less for each
/// other: rows of 10 240 with GELU take 481 us with 128 threads, 551 with 256, 670 with 512 (H200, 65 536 rows; 2.0
/// GB).
const ELEMENTS_PER_THREAD: u64 = 80;
/// As `ELEMENTS_PER_THREAD`, for kernels that also hold the gate of each element in registers.
const GATED_ELEMENTS_PER_THREAD: u64 = 48;

pub(super) fn quantize(call: &mut Call<'_>, op: &Quantize) -> Result<(), DeviceError> {
    call.check_quantized_type(op.to)?;
    let (x, quantized, y) = (call.input(0)?, call.output(0)?, call.output_if(1)?);
    let of = match op.of {
        Quantized::LayerNorm(op) => return norm(call, &op, [y, None, None], Some(quantized)),
        Quantized::Rows => Of::Rows,
        Quantized::Gelu(_) => Of::Gelu,
        Quantized::Glu(Glu { activation: Activation::Gelu }) => Of::GluGelu,
        Quantized::Glu(Glu { activation: Activation::Silu }) => Of::GluSilu,
    };
    let Some(group) = group(x.dtype, of, quantized.columns) else {
        return Err(call.refused(format!("rows of {} columns are too wide for a block", quantized.columns)));
    };
    let threads = group.max(128);
    let shape = Shape::of(x.rows.div_ceil(threads / group), threads as u32);
    let y = Arg::pointer(y.map_or(0, |y: Tensor| y.address));
    let args = [x.pointer(), y, quantized.pointer(), Arg::pointer(quantized.scales()), Arg::long(x.rows)];
    call.kernel(&kernel(x.dtype, of, quantized.columns, group), shape, &args)
}

/// Number of the op in front of the quantization in `quantize.cu`.
#[derive(Clone, Copy)]
enum Of {
    Rows,
    Gelu,
    GluGelu,
    GluSilu,
}

fn kernel(dtype: DType, of: Of, columns: u64, group: u64) -> Kernel {
    let kernel = Kernel::new(File::Quantize, "quantize", dtype).quantized().with("OF", of as i64);
    kernel.with("COLUMNS", columns as i64).with("GROUP", group as i64)
}

/// Returns the smallest number of threads that can keep a row in registers.
fn group(dtype: DType, of: Of, columns: u64) -> Option<u64> {
    let limit = match of {
        Of::Rows | Of::Gelu => ELEMENTS_PER_THREAD,
        Of::GluGelu | Of::GluSilu => GATED_ELEMENTS_PER_THREAD,
    };
    let width = row_width(dtype, columns);
    let kept = |group: u64| (columns / width).div_ceil(group) * width;
    [32, 64, 128, 256, 512, 1024].into_iter().find(|&group| kept(group) <= limit)
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    // Rows of attention, rows of MLPs, and rows that are not aligned.
    let forms = [
        (Of::Rows, &[320, 768, 1280, 2560, 33][..]),
        (Of::Gelu, &[1280, 5120, 10_240, 33]),
        (Of::GluGelu, &[3072, 33]),
        (Of::GluSilu, &[3072]),
    ];
    let of = |dtype, of, columns| kernel(dtype, of, columns, group(dtype, of, columns).unwrap_or_default());
    let mut kernels = vec![];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        kernels
            .extend(forms.iter().flat_map(|&(what, columns)| columns.iter().map(move |&n| of(dtype, what, n))));
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_to_the_fewest_threads_that_keep_them() {
        for (columns, threads) in [(320, 32), (1280, 32), (2560, 32), (3072, 64), (5120, 64), (10_240, 128)] {
            assert_eq!(group(DType::Bf16, Of::Gelu, columns), Some(threads), "{columns} columns");
        }
        let [one, other] = [33, 81_921].map(|columns| group(DType::F32, Of::Rows, columns));
        assert_eq!((one, other, group(DType::Bf16, Of::GluGelu, 3072)), (Some(32), None, Some(64)));
    }
}
