//! Updates of parameters by AdamW, Adafactor and SGD, averages of parameters, and the scale of all gradients of a step. Invariant: the factor
//! of the gradients and the hyperparameters are read from device memory, and the order of every sum follows from the
//! shapes alone.

use super::{Call, Tensor};
use crate::kernel::{Arg, File, Kernel, Shape};
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

pub(super) fn adamw(call: &mut Call<'_>, op: &AdamW) -> Result<(), DeviceError> {
    let [p, g] = [call.input(0)?, call.input(1)?];
    let ins = [p, g, call.input(2)?, call.input(3)?, call.input(4)?, call.input(5)?];
    let [p_new, m_new, v_new] = [call.output(0)?, call.output(1)?, call.output(2)?];
    let [p_at, g_at, m, v, scale, hyper] = ins.map(|t| t.pointer());
    let news = [p_new, m_new, v_new].map(|t| t.pointer());
    let [b1, b2, eps, decay] = [op.beta1, op.beta2, op.eps, op.weight_decay].map(Arg::float);
    let n = Arg::long(p.elements());
    let args = [p_at, g_at, m, v, scale, hyper, news[0], news[1], news[2], n, b1, b2, eps, decay];
    call.kernel(&kernel("adamw", g.dtype), flat(&p), &args)
}

pub(super) fn adamw_8bit(call: &mut Call<'_>, op: &AdamW8bit) -> Result<(), DeviceError> {
    let (p, g) = (call.input(0)?, call.input(1)?);
    let AdamW { beta1, beta2, eps, weight_decay } = op.adamw;
    let mut args = [Arg::pointer(0); 18];
    for (i, arg) in args[..8].iter_mut().enumerate() {
        *arg = call.input(i)?.pointer();
    }
    for (i, arg) in args[8..13].iter_mut().enumerate() {
        *arg = call.output(i)?.pointer();
    }
    args[13] = Arg::long(p.elements());
    for (arg, number) in args[14..].iter_mut().zip([beta1, beta2, eps, weight_decay]) {
        *arg = Arg::float(number);
    }
    let blocks = p.elements().div_ceil(BLOCK).div_ceil(MOMENT_BLOCKS);
    call.kernel(&kernel("adamw_8bit", g.dtype), Shape::of(blocks, THREADS), &args)
}

pub(super) fn sgd(call: &mut Call<'_>, op: &Sgd) -> Result<(), DeviceError> {
    let states = usize::from(op.momentum != 0.0);
    let (p, g) = (call.input(0)?, call.input(1)?);
    let [old, new] = match states {
        0 => [Arg::pointer(0); 2],
        _ => [call.input(2)?.pointer(), call.output(1)?.pointer()],
    };
    let [scale, hyper] = [call.input(2 + states)?.pointer(), call.input(3 + states)?.pointer()];
    let [momentum, decay] = [Arg::float(op.momentum), Arg::float(op.weight_decay)];
    let (p_new, n) = (call.output(0)?.pointer(), Arg::long(p.elements()));
    let nesterov = Arg::int(i32::from(op.nesterov));
    let args = [p.pointer(), g.pointer(), old, scale, hyper, p_new, new, n, momentum, decay, nesterov];
    call.kernel(&kernel("sgd", g.dtype), flat(&p), &args)
}

pub(super) fn ema(call: &mut Call<'_>, op: &Ema) -> Result<(), DeviceError> {
    let [ema, p, scale, steps] = [call.input(0)?, call.input(1)?, call.input(2)?, call.input(3)?];
    let [old, p, scale, steps] = [ema, p, scale, steps].map(|t| t.pointer());
    let (new, n) = (call.output(0)?.pointer(), Arg::long(ema.elements()));
    call.kernel(&kernel("ema", DType::F32), flat(&ema), &[old, p, scale, steps, new, n, Arg::float(op.decay)])
}

pub(super) fn count_steps(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let args = [call.input(0)?, call.input(1)?, call.output(0)?].map(|t| t.pointer());
    call.kernel(&kernel("count_steps", DType::F32), Shape::of(1, 32), &args)
}

pub(super) fn grad_scale(call: &mut Call<'_>, op: &GradScale) -> Result<(), DeviceError> {
    let grads = call.launch.ins.len().saturating_sub(1);
    let (partial, _) = call.workspace()?;
    let mut count = 0;
    for i in 0..grads {
        let g = call.input(i)?;
        let ranges = g.elements().div_ceil(SQUARES);
        let args = [g.pointer(), Arg::pointer(partial + 8 * count), Arg::long(g.elements())];
        call.kernel(&kernel("squares", g.dtype), Shape::of(ranges, THREADS), &args)?;
        count += ranges;
    }
    let unscale = call.input(grads)?.pointer();
    let [scale, norm] =
        [call.output_if(0)?, call.output_if(1)?].map(|t| Arg::pointer(t.map_or(0, |t| t.address)));
    let args = [Arg::pointer(partial), Arg::long(count), unscale, scale, norm, Arg::float(op.max_norm)];
    call.kernel(&kernel("grad_scale", DType::F32), Shape::of(1, THREADS), &args)
}

pub(super) fn adafactor(call: &mut Call<'_>, op: &Adafactor) -> Result<(), DeviceError> {
    let (p, g) = (call.input(0)?, call.input(1)?);
    let matrix = call.launch.ins.len() == 6;
    let (rows, columns) = if matrix { (p.rows, p.columns) } else { (1, p.rows) };
    let states = if matrix { 2 } else { 1 };
    let [column, column_new] = [call.input(1 + states)?.pointer(), call.output(states)?.pointer()];
    let [scale, hyper] = [call.input(2 + states)?.pointer(), call.input(3 + states)?.pointer()];
    // Workspace: mean(R), rate and left; partial sums of squares of u; partial sums of the columns.
    let (n, chunks) = (p.elements(), rows.div_ceil(ADAFACTOR_ROWS));
    let ranges = n.div_ceil(SQUARES);
    let (start, _) = call.workspace()?;
    let [numbers, squares, sums] = [start, start + 32, start + 32 + 8 * ranges].map(Arg::pointer);
    let (g_at, dtype, eps1) = (g.pointer(), g.dtype, Arg::float(op.eps1));
    let [rows_, columns_, n_] = [Arg::long(rows), Arg::int(columns), Arg::long(n)];
    let tiles = columns.div_ceil(u64::from(THREADS));

    let shape = Shape { blocks: (tiles as u32, chunks as u32, 1), threads: THREADS, shared: 0 };
    call.kernel(&kernel("adafactor_columns", dtype), shape, &[g_at, scale, sums, rows_, columns_])?;
    let args = [sums, column, column_new, scale, hyper, rows_, columns_, eps1];
    call.kernel(&kernel("adafactor_column_means", DType::F32), Shape::of(tiles, THREADS), &args)?;
    let mut row_new = Arg::pointer(0);
    if matrix {
        let row = call.input(2)?.pointer();
        row_new = call.output(1)?.pointer();
        let args = [g_at, row, row_new, scale, hyper, columns_, eps1];
        call.kernel(&kernel("adafactor_row_means", dtype), Shape::of(rows, THREADS), &args)?;
        let args = [row_new, numbers, rows_];
        call.kernel(&kernel("adafactor_row_average", DType::F32), Shape::of(1, THREADS), &args)?;
    }
    let args = [g_at, row_new, column_new, numbers, scale, squares, n_, columns_];
    call.kernel(&kernel("adafactor_squares", dtype), Shape::of(ranges, THREADS), &args)?;
    let [clip, decay] = [Arg::float(op.clip), Arg::float(op.weight_decay)];
    let args = [squares, numbers, hyper, Arg::long(ranges), n_, clip, decay];
    call.kernel(&kernel("adafactor_rate", DType::F32), Shape::of(1, THREADS), &args)?;
    let args =
        [p.pointer(), g_at, row_new, column_new, numbers, scale, call.output(0)?.pointer(), n_, columns_];
    let shape = Shape::of(n.div_ceil(4 * u64::from(THREADS)), THREADS);
    call.kernel(&kernel("adafactor", dtype), shape, &args)
}

fn kernel(entry: &'static str, dtype: DType) -> Kernel {
    Kernel::new(File::Optimizer, entry, dtype).with("RANGE", SQUARES as i64).with("ROWS", ADAFACTOR_ROWS as i64)
}

/// The grid of an element-wise update of `p`.
fn flat(p: &Tensor) -> Shape {
    Shape::of(p.elements().div_ceil(ELEMENTS), THREADS)
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
