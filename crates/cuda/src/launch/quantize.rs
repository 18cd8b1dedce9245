//! Quantization of rows to e4m3. Invariant: the kernel is chosen by columns and element types alone, so a row has the
//! same quantized values in any step.

use super::OpLaunch;
use super::rows::{NormOutputs, norm};
use crate::kernel::{Arg, Kernel, KernelFile, LaunchShape};
use crate::row_kernels::elements_per_thread;
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::{Activation, Glu, Quantize, Quantized};

/// Largest number of elements of a row that a thread keeps in registers. Fewer threads per row wait less for each
/// other: rows of 10 240 with GELU take 481 us with 128 threads, 551 with 256, 670 with 512 (H200, 65 536 rows; 2.0
/// GB).
const ELEMENTS_PER_THREAD: u64 = 80;
/// As `ELEMENTS_PER_THREAD`, for kernels that also hold the gate of each element in registers.
const GATED_ELEMENTS_PER_THREAD: u64 = 48;

pub(super) fn quantize(call: &mut OpLaunch<'_>, op: &Quantize) -> Result<(), DeviceError> {
    call.check_quantized_type(op.to)?;
    let x = call.input(0)?;
    let quantized = call.output(0)?;
    let y = call.output_if(1)?;
    let of = match op.of {
        Quantized::LayerNorm(op) => {
            let outputs = NormOutputs { y, mean: None, rstd: None, quantized: Some(quantized) };
            return norm(call, &op, outputs);
        }
        Quantized::Rows => QuantizeInput::Rows,
        Quantized::Gelu(_) => QuantizeInput::Gelu,
        Quantized::Glu(Glu { activation: Activation::Gelu }) => QuantizeInput::GluGelu,
        Quantized::Glu(Glu { activation: Activation::Silu }) => QuantizeInput::GluSilu,
    };
    let Some(group) = group(x.dtype, of, quantized.columns) else {
        return Err(call.refused(format!("rows of {} columns are too wide for a block", quantized.columns)));
    };
    let threads = group.max(128);
    let shape = LaunchShape::of(x.rows.div_ceil(threads / group), threads as u32);
    let args = [
        x.pointer(),
        Arg::pointer(y.map_or(0, |y| y.address)),
        quantized.pointer(),
        Arg::pointer(quantized.scales()),
        Arg::long(x.rows),
    ];
    call.kernel(&kernel(x.dtype, of, quantized.columns, group), shape, &args)
}

/// Function of the rows whose result is quantized, in the order of the values of `OF` in `quantize.cu`.
#[derive(Clone, Copy)]
enum QuantizeInput {
    Rows,
    Gelu,
    GluGelu,
    GluSilu,
}

fn kernel(dtype: DType, of: QuantizeInput, columns: u64, group: u64) -> Kernel {
    let kernel = Kernel::new(KernelFile::Quantize, "quantize", dtype).quantized().with("OF", of as i64);
    kernel.with("COLUMNS", columns as i64).with("GROUP", group as i64)
}

/// Returns the smallest number of threads that can keep a row in registers.
fn group(dtype: DType, of: QuantizeInput, columns: u64) -> Option<u64> {
    let limit = match of {
        QuantizeInput::Rows | QuantizeInput::Gelu => ELEMENTS_PER_THREAD,
        QuantizeInput::GluGelu | QuantizeInput::GluSilu => GATED_ELEMENTS_PER_THREAD,
    };
    let groups = [32, 64, 128, 256, 512, 1024];
    groups.into_iter().find(|&group| elements_per_thread(dtype, columns, group) <= limit)
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    // Rows of attention, rows of MLPs, and rows that are not aligned.
    let forms = [
        (QuantizeInput::Rows, &[320, 768, 1280, 2560, 33][..]),
        (QuantizeInput::Gelu, &[1280, 5120, 10_240, 33]),
        (QuantizeInput::GluGelu, &[3072, 33]),
        (QuantizeInput::GluSilu, &[3072]),
    ];
    let mut kernels = vec![];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for (of, widths) in forms {
            for &columns in widths {
                kernels.push(kernel(dtype, of, columns, group(dtype, of, columns).unwrap_or_default()));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_to_the_fewest_threads_that_keep_them() {
        for (columns, threads) in [(320, 32), (1280, 32), (2560, 32), (3072, 64), (5120, 64), (10_240, 128)] {
            assert_eq!(group(DType::Bf16, QuantizeInput::Gelu, columns), Some(threads), "{columns} columns");
        }
        let [one, other] = [33, 81_921].map(|columns| group(DType::F32, QuantizeInput::Rows, columns));
        assert_eq!((one, other, group(DType::Bf16, QuantizeInput::GluGelu, 3072)), (Some(32), None, Some(64)));
    }
}
