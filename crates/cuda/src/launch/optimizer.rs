//! Updates of parameters by AdamW, Adafactor and SGD, averages of parameters, and the scale of all gradients of a step. Invariant: the factor
//! of the gradients and the hyperparameters are read from device memory, and the order of every sum follows from the
//! shapes alone.

use super::{DeviceTensor, OpLaunch};
use crate::kernel::{Arg, Kernel, KernelFile, LaunchShape, int, kernel_arguments};
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::{Adafactor, AdamW, AdamW8bit, BLOCK, Ema, GradScale, Sgd};
use plimsoll_plan::{ADAFACTOR_ROWS, SQUARES};

/// Threads of a block.
const THREADS: u32 = 256;
/// Elements of a block of an element-wise update: four accesses of four elements per thread.
const ELEMENTS: u64 = 16 * THREADS as u64;
/// Blocks of 8-bit moments of a block of threads: four for each of its eight warps.
const MOMENT_BLOCKS: u64 = 32;

kernel_arguments! {
    /// Arguments of `adamw` (optimizer.cu).
    struct AdamWArgs {
        p: u64,
        g: u64,
        m: u64,
        v: u64,
        scale: u64,
        hyper: u64,
        p_new: u64,
        m_new: u64,
        v_new: u64,
        n: u64,
        beta1: f32,
        beta2: f32,
        eps: f32,
        decay: f32,
    }
    size 96, last 92
}

kernel_arguments! {
    /// Arguments of `adamw_8bit` (optimizer.cu).
    struct AdamW8bitArgs {
        p: u64,
        g: u64,
        m: u64,
        m_absmax: u64,
        v: u64,
        v_absmax: u64,
        scale: u64,
        hyper: u64,
        p_new: u64,
        m_new: u64,
        m_absmax_new: u64,
        v_new: u64,
        v_absmax_new: u64,
        n: u64,
        beta1: f32,
        beta2: f32,
        eps: f32,
        decay: f32,
    }
    size 128, last 124
}

kernel_arguments! {
    /// Arguments of `sgd` (optimizer.cu).
    struct SgdArgs {
        p: u64,
        g: u64,
        buffer: u64,
        scale: u64,
        hyper: u64,
        p_new: u64,
        buffer_new: u64,
        n: u64,
        momentum: f32,
        decay: f32,
        nesterov: i32,
    }
    size 80, last 72
}

kernel_arguments! {
    /// Arguments of `ema` (optimizer.cu).
    struct EmaArgs {
        mean: u64,
        p: u64,
        scale: u64,
        steps: u64,
        mean_new: u64,
        n: u64,
        decay: f32,
    }
    size 56, last 48
}

kernel_arguments! {
    /// Arguments of `grad_scale` (optimizer.cu).
    struct GradScaleArgs {
        partial: u64,
        count: u64,
        unscale: u64,
        scale: u64,
        norm: u64,
        max_norm: f32,
    }
    size 48, last 40
}

kernel_arguments! {
    /// Arguments of `adafactor_column_means` (optimizer.cu).
    struct AdafactorColumnMeansArgs {
        partial: u64,
        old: u64,
        means: u64,
        scale: u64,
        hyper: u64,
        rows: u64,
        columns: i32,
        eps1: f32,
    }
    size 56, last 52
}

kernel_arguments! {
    /// Arguments of `adafactor_row_means` (optimizer.cu).
    struct AdafactorRowMeansArgs {
        g: u64,
        old: u64,
        means: u64,
        scale: u64,
        hyper: u64,
        columns: i32,
        eps1: f32,
    }
    size 48, last 44
}

kernel_arguments! {
    /// Arguments of `adafactor_squares` (optimizer.cu).
    struct AdafactorSquaresArgs {
        g: u64,
        row: u64,
        column: u64,
        numbers: u64,
        scale: u64,
        partial: u64,
        n: u64,
        columns: i32,
    }
    size 64, last 56
}

kernel_arguments! {
    /// Arguments of `adafactor_rate` (optimizer.cu).
    struct AdafactorRateArgs {
        partial: u64,
        numbers: u64,
        hyper: u64,
        count: u64,
        n: u64,
        clip: f32,
        decay: f32,
    }
    size 48, last 44
}

kernel_arguments! {
    /// Arguments of `adafactor` (optimizer.cu).
    struct AdafactorArgs {
        p: u64,
        g: u64,
        row: u64,
        column: u64,
        numbers: u64,
        scale: u64,
        p_new: u64,
        n: u64,
        columns: i32,
    }
    size 72, last 64
}

pub(super) fn adamw(call: &mut OpLaunch<'_>, op: &AdamW) -> Result<(), DeviceError> {
    let p = call.input(0)?;
    let g = call.input(1)?;
    let args = AdamWArgs {
        p: p.address,
        g: g.address,
        m: call.input(2)?.address,
        v: call.input(3)?.address,
        scale: call.input(4)?.address,
        hyper: call.input(5)?.address,
        p_new: call.output(0)?.address,
        m_new: call.output(1)?.address,
        v_new: call.output(2)?.address,
        n: p.elements(),
        beta1: op.beta1,
        beta2: op.beta2,
        eps: op.eps,
        decay: op.weight_decay,
    };
    call.kernel(&kernel("adamw", g.dtype), flat(&p), &args)
}

pub(super) fn adamw_8bit(call: &mut OpLaunch<'_>, op: &AdamW8bit) -> Result<(), DeviceError> {
    let p = call.input(0)?;
    let g = call.input(1)?;
    let args = AdamW8bitArgs {
        p: p.address,
        g: g.address,
        m: call.input(2)?.address,
        m_absmax: call.input(3)?.address,
        v: call.input(4)?.address,
        v_absmax: call.input(5)?.address,
        scale: call.input(6)?.address,
        hyper: call.input(7)?.address,
        p_new: call.output(0)?.address,
        m_new: call.output(1)?.address,
        m_absmax_new: call.output(2)?.address,
        v_new: call.output(3)?.address,
        v_absmax_new: call.output(4)?.address,
        n: p.elements(),
        beta1: op.adamw.beta1,
        beta2: op.adamw.beta2,
        eps: op.adamw.eps,
        decay: op.adamw.weight_decay,
    };
    let blocks = p.elements().div_ceil(BLOCK).div_ceil(MOMENT_BLOCKS);
    call.kernel(&kernel("adamw_8bit", g.dtype), LaunchShape::of(blocks, THREADS), &args)
}

pub(super) fn sgd(call: &mut OpLaunch<'_>, op: &Sgd) -> Result<(), DeviceError> {
    let p = call.input(0)?;
    let g = call.input(1)?;
    let mut buffer = 0;
    let mut buffer_new = 0;
    let mut states = 0;
    if op.momentum != 0.0 {
        buffer = call.input(2)?.address;
        buffer_new = call.output(1)?.address;
        states = 1;
    }
    let args = SgdArgs {
        p: p.address,
        g: g.address,
        buffer,
        scale: call.input(2 + states)?.address,
        hyper: call.input(3 + states)?.address,
        p_new: call.output(0)?.address,
        buffer_new,
        n: p.elements(),
        momentum: op.momentum,
        decay: op.weight_decay,
        nesterov: i32::from(op.nesterov),
    };
    call.kernel(&kernel("sgd", g.dtype), flat(&p), &args)
}

pub(super) fn ema(call: &mut OpLaunch<'_>, op: &Ema) -> Result<(), DeviceError> {
    let mean = call.input(0)?;
    let args = EmaArgs {
        mean: mean.address,
        p: call.input(1)?.address,
        scale: call.input(2)?.address,
        steps: call.input(3)?.address,
        mean_new: call.output(0)?.address,
        n: mean.elements(),
        decay: op.decay,
    };
    call.kernel(&kernel("ema", DType::F32), flat(&mean), &args)
}

pub(super) fn count_steps(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let args = [call.input(0)?, call.input(1)?, call.output(0)?].map(|t| t.pointer());
    call.kernel(&kernel("count_steps", DType::F32), LaunchShape::of(1, 32), &args)
}

pub(super) fn grad_scale(call: &mut OpLaunch<'_>, op: &GradScale) -> Result<(), DeviceError> {
    let grads = call.launch.ins.len().saturating_sub(1);
    let (partial, _) = call.workspace()?;
    let mut count = 0;
    for i in 0..grads {
        let g = call.input(i)?;
        let ranges = g.elements().div_ceil(SQUARES);
        let args = [g.pointer(), Arg::pointer(partial + 8 * count), Arg::long(g.elements())];
        call.kernel(&kernel("squares", g.dtype), LaunchShape::of(ranges, THREADS), &args)?;
        count += ranges;
    }
    let args = GradScaleArgs {
        partial,
        unscale: call.input(grads)?.address,
        scale: call.output_if(0)?.map_or(0, |t| t.address),
        norm: call.output_if(1)?.map_or(0, |t| t.address),
        count,
        max_norm: op.max_norm,
    };
    call.kernel(&kernel("grad_scale", DType::F32), LaunchShape::of(1, THREADS), &args)
}

pub(super) fn adafactor(call: &mut OpLaunch<'_>, op: &Adafactor) -> Result<(), DeviceError> {
    let p = call.input(0)?;
    let g = call.input(1)?;
    let matrix = call.launch.ins.len() == 6;
    let (rows, columns) = if matrix { (p.rows, p.columns) } else { (1, p.rows) };
    let states = if matrix { 2 } else { 1 };
    let column = call.input(1 + states)?.address;
    let column_new = call.output(states)?.address;
    let scale = call.input(2 + states)?.address;
    let hyper = call.input(3 + states)?.address;
    // Workspace: mean(R), rate and left; partial sums of squares of u; partial sums of the columns.
    let n = p.elements();
    let chunks = rows.div_ceil(ADAFACTOR_ROWS);
    let ranges = n.div_ceil(SQUARES);
    let (numbers, _) = call.workspace()?;
    let squares = numbers + 32;
    let sums = squares + 8 * ranges;
    let tiles = columns.div_ceil(u64::from(THREADS));

    let shape = LaunchShape { blocks: (tiles as u32, chunks as u32, 1), threads: THREADS, shared: 0 };
    let args = [g.pointer(), Arg::pointer(scale), Arg::pointer(sums), Arg::long(rows), Arg::int(columns)];
    call.kernel(&kernel("adafactor_columns", g.dtype), shape, &args)?;
    let args = AdafactorColumnMeansArgs {
        partial: sums,
        old: column,
        means: column_new,
        scale,
        hyper,
        rows,
        columns: int(columns),
        eps1: op.eps1,
    };
    call.kernel(&kernel("adafactor_column_means", DType::F32), LaunchShape::of(tiles, THREADS), &args)?;
    let mut row_new = 0;
    if matrix {
        row_new = call.output(1)?.address;
        let args = AdafactorRowMeansArgs {
            g: g.address,
            old: call.input(2)?.address,
            means: row_new,
            scale,
            hyper,
            columns: int(columns),
            eps1: op.eps1,
        };
        call.kernel(&kernel("adafactor_row_means", g.dtype), LaunchShape::of(rows, THREADS), &args)?;
        let args = [Arg::pointer(row_new), Arg::pointer(numbers), Arg::long(rows)];
        call.kernel(&kernel("adafactor_row_average", DType::F32), LaunchShape::of(1, THREADS), &args)?;
    }
    let args = AdafactorSquaresArgs {
        g: g.address,
        row: row_new,
        column: column_new,
        numbers,
        scale,
        partial: squares,
        n,
        columns: int(columns),
    };
    call.kernel(&kernel("adafactor_squares", g.dtype), LaunchShape::of(ranges, THREADS), &args)?;
    let args = AdafactorRateArgs {
        partial: squares,
        numbers,
        hyper,
        count: ranges,
        n,
        clip: op.clip,
        decay: op.weight_decay,
    };
    call.kernel(&kernel("adafactor_rate", DType::F32), LaunchShape::of(1, THREADS), &args)?;
    let args = AdafactorArgs {
        p: p.address,
        g: g.address,
        row: row_new,
        column: column_new,
        numbers,
        scale,
        p_new: call.output(0)?.address,
        n,
        columns: int(columns),
    };
    let shape = LaunchShape::of(n.div_ceil(4 * u64::from(THREADS)), THREADS);
    call.kernel(&kernel("adafactor", g.dtype), shape, &args)
}

fn kernel(entry: &'static str, dtype: DType) -> Kernel {
    Kernel::new(KernelFile::Optimizer, entry, dtype)
        .with("RANGE", SQUARES as i64)
        .with("ROWS", ADAFACTOR_ROWS as i64)
}

/// The grid of an element-wise update of `p`.
fn flat(p: &DeviceTensor) -> LaunchShape {
    LaunchShape::of(p.elements().div_ceil(ELEMENTS), THREADS)
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let of_gradients = [
        "adamw",
        "adamw_8bit",
        "sgd",
        "squares",
        "adafactor_columns",
        "adafactor_row_means",
        "adafactor_squares",
        "adafactor",
    ];
    let of_sums = [
        "ema",
        "count_steps",
        "grad_scale",
        "adafactor_column_means",
        "adafactor_row_average",
        "adafactor_rate",
    ];
    let types = [DType::F32, DType::Bf16, DType::F16];
    let typed = types.iter().flat_map(|&dtype| of_gradients.map(|entry| kernel(entry, dtype)));
    typed.chain(of_sums.map(|entry| kernel(entry, DType::F32))).collect()
}
