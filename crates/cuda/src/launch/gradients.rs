//! Gradients of row-wise ops, dropout, and the sums over rows that they need. Invariant: kernels are chosen by columns
//! and element types, never by the number of rows; sums over rows are cut into chunks of a fixed number of rows, so
//! they have equal bits on any card.

use super::rows::{elements, flat};
use super::sequence::by_sequence;
use super::{DeviceTensor, OpLaunch};
use crate::kernel::{Arg, Kernel, KernelFile, LaunchShape, code, int, kernel_arguments};
use crate::row_kernels::{NormShape, THREADS, group, norm_shape, row_width, wide};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{
    Activation, BatchNormGrad, BatchNormTrain, ConcatGrad, Dropout, EmbedGrad, GluGrad, RmsNorm, RmsNormGrad,
    Scale, SegmentMeanGrad, TokenDropout,
};
use plimsoll_graph::{Bytes, DType};
use plimsoll_plan::{RUN_ROWS, SORT_CHUNK, SUM_ROWS, column_sums_parts, indexed_sums_parts};

/// Warps of a block in which a warp has a row.
const WARPS: u64 = 8;
/// Accesses of a thread of `glu_grad`, which has three matrices in registers.
const GLU_STEPS: u64 = 2;
/// Number of table rows below which a block, not a warp, completes a row: their sums are long.
const FEW_ROWS: u64 = 4096;
/// Status codes of `common.cuh` for a token id and for a row index outside of its table.
const BAD_TOKEN: u64 = 1;
const BAD_ROW: u64 = 3;

pub(super) fn accumulate(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let acc = call.input(0)?;
    let g = call.input(1)?;
    let keep = call.input(2)?;
    let y = call.output(0)?;
    let shape = flat(&y, wide(y.dtype).min(wide(g.dtype)));
    let args = [acc.pointer(), g.pointer(), keep.pointer(), y.pointer(), elements(&y)];
    call.kernel(&accumulate_kernel(y.dtype, g.dtype), shape, &args)
}

fn accumulate_kernel(dtype: DType, gradient: DType) -> Kernel {
    Kernel::new(KernelFile::ElementwiseGrad, "accumulate", dtype).with("GRADIENT", code(gradient))
}

pub(super) fn scale(call: &mut OpLaunch<'_>, op: &Scale) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let y = call.output(0)?;
    let args = [x.pointer(), y.pointer(), elements(&y), Arg::float(op.factor)];
    call.kernel(&Kernel::new(KernelFile::ElementwiseGrad, "scale", y.dtype), flat(&y, wide(y.dtype)), &args)
}

kernel_arguments! {
    /// Arguments of `dropout` (elementwise_grad.cu).
    struct DropoutArgs {
        x: u64,
        seed: u64,
        packs: u64,
        y: u64,
        status: u64,
        rows: i32,
        columns: i32,
        count: i32,
        word: i32,
        threshold: u32,
        factor: f32,
        stream: u32,
    }
    size 72, last 64
}

pub(super) fn dropout(call: &mut OpLaunch<'_>, op: &Dropout) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let seed = call.input(1)?;
    let packs = call.input(2)?;
    let y = call.output(0)?;
    let word = call.launch.ins.first().map(|x| Dropout::pack_word(&x.spec));
    let Some(Ok(word)) = word else {
        return Err(call.refused("its rows are neither tokens nor sequences".to_owned()));
    };
    let args = DropoutArgs {
        x: x.address,
        seed: seed.address,
        packs: packs.address,
        y: y.address,
        status: call.status(),
        rows: int(y.rows),
        columns: int(y.columns),
        count: int(packs.rows),
        word: int(word),
        // Fits in 32 bits: p < 1 is an f32, so it is at most 1 - 2^-24.
        threshold: (f64::from(op.p) * 4_294_967_296.0).ceil() as u32,
        factor: 1.0 / (1.0 - op.p),
        stream: op.stream,
    };
    call.kernel(&dropout_kernel(y.dtype, y.columns), flat(&y, wide(y.dtype)), &args)
}

fn dropout_kernel(dtype: DType, columns: u64) -> Kernel {
    let whole_groups = columns.is_multiple_of(4);
    Kernel::new(KernelFile::ElementwiseGrad, "dropout", dtype).with("WHOLE_GROUPS", i64::from(whole_groups))
}

pub(super) fn gelu_grad(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    binary(call, "gelu_grad")
}

pub(super) fn relu_grad(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    binary(call, "relu_grad")
}

/// Runs an elementwise kernel of two inputs.
fn binary(call: &mut OpLaunch<'_>, entry: &'static str) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let x = call.input(1)?;
    let dx = call.output(0)?;
    let args = [dy.pointer(), x.pointer(), dx.pointer(), elements(&dx)];
    call.kernel(&Kernel::new(KernelFile::ElementwiseGrad, entry, dx.dtype), flat(&dx, wide(dx.dtype)), &args)
}

pub(super) fn glu_grad(call: &mut OpLaunch<'_>, op: &GluGrad) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let x = call.input(1)?;
    let dx = call.output(0)?;
    let accesses = dy.elements() / row_width(dy.dtype, dy.columns);
    let shape = LaunchShape::of(accesses.div_ceil(GLU_STEPS * u64::from(THREADS)), THREADS);
    let args = [dy.pointer(), x.pointer(), dx.pointer(), Arg::long(accesses)];
    call.kernel(&glu_grad_kernel(dy.dtype, dy.columns, op.activation), shape, &args)
}

fn glu_grad_kernel(dtype: DType, columns: u64, activation: Activation) -> Kernel {
    let silu = match activation {
        Activation::Gelu => 0,
        Activation::Silu => 1,
    };
    let kernel = Kernel::new(KernelFile::ElementwiseGrad, "glu_grad", dtype);
    kernel.with("COLUMNS", columns as i64).with("SILU", silu)
}

pub(super) fn concat_grad(call: &mut OpLaunch<'_>, op: &ConcatGrad) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let dx = call.output(0)?;
    // All rows of both matrices are aligned if these three numbers are.
    let width = [dy.columns, dx.columns, op.first].map(|columns| row_width(dy.dtype, columns));
    let width = width.into_iter().min().unwrap_or(1);
    let args = [
        dy.pointer(),
        dx.pointer(),
        Arg::long(dx.rows),
        Arg::int(dx.columns),
        Arg::int(op.first),
        Arg::int(dy.columns),
    ];
    call.kernel(&concat_grad_kernel(dy.dtype, width), LaunchShape::of(dx.rows.div_ceil(WARPS), THREADS), &args)
}

fn concat_grad_kernel(dtype: DType, width: u64) -> Kernel {
    Kernel::new(KernelFile::ElementwiseGrad, "concat_grad", dtype).with("WIDTH", width as i64)
}

pub(super) fn softmax_grad(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let y = call.input(1)?;
    let dx = call.output(0)?;
    let args = [dy.pointer(), y.pointer(), dx.pointer(), Arg::long(dx.rows), Arg::int(dx.columns)];
    let kernel = Kernel::new(KernelFile::ElementwiseGrad, "softmax_grad", dx.dtype);
    call.kernel(&kernel, LaunchShape::of(dx.rows.div_ceil(WARPS), THREADS), &args)
}

kernel_arguments! {
    /// Arguments of `rms_norm` (norm_grad.cu).
    struct RmsNormArgs {
        x: u64,
        gamma: u64,
        y: u64,
        rstds: u64,
        rows: u64,
        rows_per_group: i32,
        eps: f32,
    }
    size 48, last 44
}

pub(super) fn rms_norm(call: &mut OpLaunch<'_>, op: &RmsNorm) -> Result<(), DeviceError> {
    let x = call.input(0)?.by_heads(op.heads);
    let gamma = call.input(1)?;
    let y = call.output_if(0)?;
    let rstd = call.output_if(1)?;
    let Some(group) = group(x.dtype, x.columns) else {
        return Err(call.refused(format!("rows of {} columns are too wide for a block", x.columns)));
    };
    let NormShape { shape, rows_per_group } = norm_shape(x.rows, group);
    let args = RmsNormArgs {
        x: x.address,
        gamma: gamma.address,
        y: address_if(y),
        rstds: address_if(rstd),
        rows: x.rows,
        rows_per_group: int(rows_per_group),
        eps: op.eps,
    };
    call.kernel(&rms_norm_kernel(x.dtype, gamma.dtype, x.columns, group), shape, &args)
}

fn rms_norm_kernel(dtype: DType, params: DType, columns: u64, group: u64) -> Kernel {
    let kernel = Kernel::new(KernelFile::NormGrad, "rms_norm", dtype).with("PARAM", code(params));
    kernel.with("COLUMNS", columns as i64).with("GROUP", group as i64)
}

pub(super) fn layer_norm_grad(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let operands = NormGradOperands {
        dy: call.input(0)?,
        x: call.input(1)?,
        mean: Some(call.input(2)?),
        rstd: call.input(3)?,
        gamma: call.input(4)?,
        dx: call.output_if(0)?,
        dgamma: call.output_if(1)?,
        dbeta: call.output_if(2)?,
    };
    norm_grad(call, &operands)
}

pub(super) fn rms_norm_grad(call: &mut OpLaunch<'_>, op: &RmsNormGrad) -> Result<(), DeviceError> {
    let operands = NormGradOperands {
        dy: call.input(0)?.by_heads(op.heads),
        x: call.input(1)?.by_heads(op.heads),
        mean: None,
        rstd: call.input(2)?,
        gamma: call.input(3)?,
        dx: call.output_if(0)?,
        dgamma: call.output_if(1)?,
        dbeta: None,
    };
    norm_grad(call, &operands)
}

/// Inputs and outputs of the gradient of a norm over rows; a norm that subtracts the mean has a `mean`. Rows of `dx` are
/// those of `dy`.
struct NormGradOperands {
    dy: DeviceTensor,
    x: DeviceTensor,
    mean: Option<DeviceTensor>,
    rstd: DeviceTensor,
    gamma: DeviceTensor,
    dx: Option<DeviceTensor>,
    dgamma: Option<DeviceTensor>,
    dbeta: Option<DeviceTensor>,
}

kernel_arguments! {
    /// Arguments of `norm_grad` (norm_grad.cu).
    struct NormGradArgs {
        dy: u64,
        x: u64,
        means: u64,
        rstds: u64,
        gamma: u64,
        dx: u64,
        partials: u64,
        rows: u64,
    }
    size 64, last 56
}

kernel_arguments! {
    /// Arguments of `norm_grad_wide` (norm_grad.cu).
    struct WideNormGradArgs {
        dy: u64,
        x: u64,
        means: u64,
        rstds: u64,
        gamma: u64,
        dx: u64,
        columns: i32,
    }
    size 56, last 48
}

/// Runs the gradient of a norm.
fn norm_grad(call: &mut OpLaunch<'_>, operands: &NormGradOperands) -> Result<(), DeviceError> {
    let &NormGradOperands { dy, x, mean, rstd, gamma, dx, dgamma, dbeta } = operands;
    check_types(call, &[mean.unwrap_or(rstd), rstd])?;
    let sums = if mean.is_some() { 2 } else { 1 };
    let [partials, _] = parts(call, column_sums_parts(dy.rows, dy.columns, 2, 0))?;
    let types =
        NormTypes { rows: dy.dtype, statistics: rstd.dtype, params: gamma.dtype, centred: mean.is_some() };
    let outs = PartialSumOutputs { first: dgamma, second: dbeta, wide: None };
    if let Some(group) = grad_group(dy.dtype, dy.columns) {
        let threads = if group < 128 { 128 / group * group } else { group };
        let shape = LaunchShape::of(dy.rows.div_ceil(SUM_ROWS * (threads / group)), threads as u32);
        let args = NormGradArgs {
            dy: dy.address,
            x: x.address,
            means: address_if(mean),
            rstds: rstd.address,
            gamma: gamma.address,
            dx: address_if(dx),
            partials,
            rows: dy.rows,
        };
        call.kernel(&norm_grad_kernel(types, dy.columns, group), shape, &args)?;
        return add_partials(call, dy, sums, partials, outs);
    }
    // The sums come first, because dx may be dy or x. A norm without mean has no use for the second of them.
    if dgamma.is_some() || dbeta.is_some() {
        let summed = SummedRows { terms: SummedTerms::RowNorm, dy, x, a: mean, b: Some(rstd), eps: 0.0 };
        column_sums(call, &summed, partials)?;
        add_partials(call, dy, 2, partials, outs)?;
    }
    if dx.is_some() {
        let args = WideNormGradArgs {
            dy: dy.address,
            x: x.address,
            means: address_if(mean),
            rstds: rstd.address,
            gamma: gamma.address,
            dx: address_if(dx),
            columns: int(dy.columns),
        };
        call.kernel(&wide_norm_grad_kernel(types, dy.columns), LaunchShape::of(dy.rows, 512), &args)?;
    }
    Ok(())
}

/// Element types of the gradient of a norm, and whether the norm subtracts the mean.
#[derive(Clone, Copy)]
struct NormTypes {
    rows: DType,
    statistics: DType,
    params: DType,
    centred: bool,
}

impl NormTypes {
    fn kernel(self, entry: &'static str) -> Kernel {
        let kernel = Kernel::new(KernelFile::NormGrad, entry, self.rows).with("PARAM", code(self.params));
        kernel.with("STAT", code(self.statistics)).with("CENTRED", i64::from(self.centred))
    }
}

fn norm_grad_kernel(types: NormTypes, columns: u64, group: u64) -> Kernel {
    let kernel = types.kernel("norm_grad").with("COLUMNS", columns as i64).with("GROUP", group as i64);
    kernel.with("SUM_ROWS", SUM_ROWS as i64)
}

fn wide_norm_grad_kernel(types: NormTypes, columns: u64) -> Kernel {
    let width = row_width(types.rows, columns) as i64;
    types.kernel("norm_grad_wide").with("WIDE_ROWS", 1).with("WIDTH", width)
}

/// Returns the number of threads that share a row of the gradient of a norm: a thread has at most eight elements
/// (four accesses), of which it keeps dy, x, gamma and two sums in registers; `None` if a row needs more than the
/// largest block, of 1024 threads, or 512 for unaligned rows.
fn grad_group(dtype: DType, columns: u64) -> Option<u64> {
    let width = row_width(dtype, columns);
    let group = (columns / width).div_ceil((8 / width).min(4)).next_multiple_of(32).max(32);
    (group <= if width == 1 { 512 } else { 1024 }).then_some(group)
}

kernel_arguments! {
    /// Arguments of `moments` (column_sums.cu).
    struct MomentsArgs {
        partials: u64,
        wide: u64,
        statistic: u64,
        running: u64,
        updated: u64,
        chunks: u64,
        rows: u64,
        columns: i32,
        of_squares: i32,
        eps: f32,
        momentum: f32,
    }
    size 72, last 68
}

kernel_arguments! {
    /// Arguments of `batch_norm_rows` (batch_norm_train.cu).
    struct BatchNormRowsArgs {
        x: u64,
        means: u64,
        rstds: u64,
        gamma: u64,
        beta: u64,
        y: u64,
        rows: u64,
        columns: i32,
    }
    size 64, last 56
}

pub(super) fn batch_norm_train(call: &mut OpLaunch<'_>, op: &BatchNormTrain) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let gamma = call.input(1)?;
    let beta = call.input(2)?;
    let running = [call.input(3)?, call.input(4)?];
    if x.rows < 2 {
        return Err(call.refused("the variance of a batch needs two rows".to_owned()));
    }
    check_types(call, &[gamma, beta])?;
    let [partials, statistics] = parts(call, column_sums_parts(x.rows, x.columns, 1, 2))?;
    let [mean, rstd] = [0_u64, 1].map(|i| DeviceTensor {
        address: statistics + 4 * i * x.columns,
        rows: 1,
        columns: x.columns,
        dtype: DType::F32,
    });
    // The squares are of differences from the mean, so they come second.
    for (i, terms) in [(0, SummedTerms::Plain), (1, SummedTerms::Squares)] {
        column_sums(call, &SummedRows { terms, dy: x, x, a: Some(mean), b: None, eps: 0.0 }, partials)?;
        let args = MomentsArgs {
            partials,
            wide: [mean, rstd][i].address,
            statistic: address_if(call.output_if(1 + i)?),
            running: running[i].address,
            updated: address_if(call.output_if(3 + i)?),
            chunks: x.rows.div_ceil(SUM_ROWS),
            rows: x.rows,
            columns: int(x.columns),
            of_squares: int(i),
            eps: op.eps,
            momentum: op.momentum,
        };
        let shape = LaunchShape::of(x.columns.div_ceil(32), 1024);
        call.kernel(&Kernel::new(KernelFile::ColumnSums, "moments", DType::F32), shape, &args)?;
    }
    let Some(y) = call.output_if(0)? else { return Ok(()) };
    let args = BatchNormRowsArgs {
        x: x.address,
        means: mean.address,
        rstds: rstd.address,
        gamma: gamma.address,
        beta: beta.address,
        y: y.address,
        rows: x.rows,
        columns: int(x.columns),
    };
    let kernel = batch_norm_kernel("batch_norm_rows", x.dtype, DType::F32, gamma.dtype, x.columns);
    call.kernel(&kernel, by_chunks(&x), &args)
}

pub(super) fn batch_norm_train_grad(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let statistics =
        BatchNormStatistics { terms: SummedTerms::BatchNorm, a: call.input(2)?, b: call.input(3)?, eps: 0.0 };
    let gamma = call.input(4)?;
    batch_norm_grads(call, &statistics, gamma)
}

pub(super) fn batch_norm_grad(call: &mut OpLaunch<'_>, op: &BatchNormGrad) -> Result<(), DeviceError> {
    let gamma = call.input(2)?;
    let statistics =
        BatchNormStatistics { terms: SummedTerms::Running, a: call.input(3)?, b: call.input(4)?, eps: op.eps };
    batch_norm_grads(call, &statistics, gamma)
}

/// Statistics of a batch norm: mean and rstd of the batch ([`SummedTerms::BatchNorm`]), or running mean and variance
/// ([`SummedTerms::Running`]).
struct BatchNormStatistics {
    terms: SummedTerms,
    a: DeviceTensor,
    b: DeviceTensor,
    /// Added to the running variance.
    eps: f32,
}

kernel_arguments! {
    /// Arguments of `batch_norm_input_grad` (batch_norm_train.cu).
    struct BatchNormInputGradArgs {
        dy: u64,
        x: u64,
        a: u64,
        b: u64,
        gamma: u64,
        sums: u64,
        dx: u64,
        rows: u64,
        columns: i32,
        eps: f32,
    }
    size 72, last 68
}

/// Runs the gradient of batch norm.
fn batch_norm_grads(
    call: &mut OpLaunch<'_>,
    statistics: &BatchNormStatistics,
    gamma: DeviceTensor,
) -> Result<(), DeviceError> {
    let &BatchNormStatistics { terms, a, b, eps } = statistics;
    let dy = call.input(0)?;
    let x = call.input(1)?;
    let dx = call.output_if(0)?;
    let dgamma = call.output_if(1)?;
    let dbeta = call.output_if(2)?;
    check_types(call, &[a, b])?;
    let running = terms == SummedTerms::Running;
    let [partials, finished] =
        parts(call, column_sums_parts(dy.rows, dy.columns, 2, if running { 0 } else { 2 }))?;
    let wide = (!running).then_some(finished);
    if wide.is_some() || dgamma.is_some() || dbeta.is_some() {
        column_sums(call, &SummedRows { terms, dy, x, a: Some(a), b: Some(b), eps }, partials)?;
        add_partials(call, dy, 2, partials, PartialSumOutputs { first: dgamma, second: dbeta, wide })?;
    }
    let Some(dx) = dx else { return Ok(()) };
    let kernel = batch_norm_kernel("batch_norm_input_grad", dy.dtype, b.dtype, gamma.dtype, dy.columns);
    let args = BatchNormInputGradArgs {
        dy: dy.address,
        x: x.address,
        a: a.address,
        b: b.address,
        gamma: gamma.address,
        sums: wide.unwrap_or(0),
        dx: dx.address,
        rows: dy.rows,
        columns: int(dy.columns),
        eps,
    };
    call.kernel(&kernel.with("RUNNING", i64::from(running)), by_chunks(&dy), &args)
}

fn batch_norm_kernel(
    entry: &'static str,
    dtype: DType,
    statistics: DType,
    params: DType,
    columns: u64,
) -> Kernel {
    let kernel = Kernel::new(KernelFile::BatchNormTrain, entry, dtype).with("STAT", code(statistics));
    let kernel = kernel.with("PARAM", code(params)).with("SUM_ROWS", SUM_ROWS as i64);
    kernel.with("WIDTH", row_width(dtype, columns) as i64)
}

/// Terms that `column_sums` adds; the numbers are those of column_sums.cu.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SummedTerms {
    Plain = 0,
    Squares = 1,
    BatchNorm = 2,
    Running = 3,
    RowNorm = 4,
    Scaled = 5,
}

/// Rows whose terms are summed by column; `a` and `b` are the vectors that the terms contain.
struct SummedRows {
    terms: SummedTerms,
    dy: DeviceTensor,
    x: DeviceTensor,
    a: Option<DeviceTensor>,
    b: Option<DeviceTensor>,
    eps: f32,
}

kernel_arguments! {
    /// Arguments of `column_sums` (column_sums.cu).
    struct ColumnSumsArgs {
        dy: u64,
        x: u64,
        a: u64,
        b: u64,
        partials: u64,
        rows: u64,
        columns: i32,
        eps: f32,
    }
    size 56, last 52
}

/// Adds terms of [`SUM_ROWS`] rows at a time to `partials`.
fn column_sums(call: &mut OpLaunch<'_>, summed: &SummedRows, partials: u64) -> Result<(), DeviceError> {
    let &SummedRows { terms, dy, x, a, b, eps } = summed;
    let statistics = b.or(a).map_or(DType::F32, |t| t.dtype);
    let args = ColumnSumsArgs {
        dy: dy.address,
        x: x.address,
        a: address_if(a),
        b: address_if(b),
        partials,
        rows: x.rows,
        columns: int(x.columns),
        eps,
    };
    call.kernel(&column_sums_kernel(terms, x.dtype, statistics, x.columns), by_chunks(&x), &args)
}

fn column_sums_kernel(terms: SummedTerms, dtype: DType, statistics: DType, columns: u64) -> Kernel {
    let kernel = Kernel::new(KernelFile::ColumnSums, "column_sums", dtype).with("OF", terms as i64);
    let kernel = kernel.with("STAT", code(statistics)).with("SUM_ROWS", SUM_ROWS as i64);
    kernel.with("WIDTH", row_width(dtype, columns) as i64)
}

/// Returns the grid whose blocks have [`SUM_ROWS`] rows of 32 accesses.
fn by_chunks(x: &DeviceTensor) -> LaunchShape {
    let tiles = x.columns.div_ceil(32 * row_width(x.dtype, x.columns));
    LaunchShape { blocks: (x.rows.div_ceil(SUM_ROWS) as u32, tiles as u32, 1), threads: THREADS, shared: 0 }
}

/// Vectors to which partial sums are added: two outputs of one element type, and both sums in f32.
#[derive(Clone, Copy)]
struct PartialSumOutputs {
    first: Option<DeviceTensor>,
    second: Option<DeviceTensor>,
    /// Address of the f32 sums.
    wide: Option<u64>,
}

kernel_arguments! {
    /// Arguments of `add_partials` (column_sums.cu).
    struct AddPartialsArgs {
        partials: u64,
        first: u64,
        second: u64,
        wide: u64,
        chunks: u64,
        columns: i32,
    }
    size 48, last 40
}

/// Adds the partial sums of the rows of `matrix` (`sums` for each column) to the outputs.
fn add_partials(
    call: &mut OpLaunch<'_>,
    matrix: DeviceTensor,
    sums: u32,
    partials: u64,
    outs: PartialSumOutputs,
) -> Result<(), DeviceError> {
    let PartialSumOutputs { first, second, wide } = outs;
    let out = first.or(second);
    if out.is_none() && wide.is_none() {
        return Ok(());
    }
    let args = AddPartialsArgs {
        partials,
        first: address_if(first),
        second: address_if(second),
        wide: wide.unwrap_or(0),
        chunks: matrix.rows.div_ceil(SUM_ROWS),
        columns: int(matrix.columns),
    };
    let blocks = (matrix.columns.div_ceil(32) as u32, sums, 1);
    let kernel = add_partials_kernel(out.map_or(DType::F32, |out| out.dtype));
    call.kernel(&kernel, LaunchShape { blocks, threads: 1024, shared: 0 }, &args)
}

fn add_partials_kernel(into: DType) -> Kernel {
    Kernel::new(KernelFile::ColumnSums, "add_partials", DType::F32).with("INTO", code(into))
}

kernel_arguments! {
    /// Arguments of `segment_mean_grad` (sequence_grad.cu).
    struct SegmentMeanGradArgs {
        dy: u64,
        spans: u64,
        dx: u64,
        status: u64,
        tokens: u64,
        sequences: i32,
        columns: i32,
        skip_first: u64,
        skip_last: u64,
    }
    size 64, last 56
}

pub(super) fn segment_mean_grad(call: &mut OpLaunch<'_>, op: &SegmentMeanGrad) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let spans = call.input(1)?;
    let dx = call.output(0)?;
    let args = SegmentMeanGradArgs {
        dy: dy.address,
        spans: spans.address,
        dx: dx.address,
        status: call.status(),
        tokens: dx.rows,
        skip_first: u64::from(op.skip_first),
        skip_last: u64::from(op.skip_last),
        sequences: int(spans.rows),
        columns: int(dx.columns),
    };
    let kernel = indexed_kernel("segment_mean_grad", dy.dtype, dx.dtype, dx.columns).with("SPREAD", 1);
    call.kernel(&kernel, by_sequence(&dx, spans.rows), &args)
}

/// Returns a kernel that reads rows of one element type and writes rows of another.
fn indexed_kernel(entry: &'static str, dtype: DType, into: DType, columns: u64) -> Kernel {
    let kernel = Kernel::new(KernelFile::SequenceGrad, entry, dtype).with("INTO", code(into));
    kernel.with("WIDTH", indexed_width(dtype, into, columns) as i64)
}

/// Elements per access to rows of two element types: 16 bytes of the shorter one.
fn indexed_width(dtype: DType, into: DType, columns: u64) -> u64 {
    row_width(if dtype == DType::F32 { into } else { dtype }, columns)
}

kernel_arguments! {
    /// Arguments of `token_keys` (sequence_grad.cu).
    struct TokenKeysArgs {
        ids: u64,
        spans: u64,
        keys: u64,
        scales: u64,
        status: u64,
        tokens: u64,
        sequences: i32,
        limit: i32,
        mask: i32,
        keep: f32,
    }
    size 64, last 60
}

pub(super) fn embed_grad(call: &mut OpLaunch<'_>, op: &EmbedGrad) -> Result<(), DeviceError> {
    let dx = call.input(0)?;
    let ids = call.input(1)?;
    let table = call.output_if(0)?;
    let row = if op.row { call.output_if(1)? } else { None };
    let of_table = indexed_sums_parts(dx.rows, dx.columns, op.vocab);
    let of_row = column_sums_parts(dx.rows, dx.columns, u64::from(op.row), 0);
    let [table_parts, row_parts, _] = parts(call, [of_table.into_iter().sum(), of_row[0], of_row[1]])?;
    let sums = IndexedSums::new(table_parts, of_table, op.vocab, dx);
    let mut scales = None;
    if let Some(TokenDropout { mask_id, keep }) = op.token_dropout {
        let spans = call.input(2)?;
        let args = TokenKeysArgs {
            ids: ids.address,
            spans: spans.address,
            keys: sums.keys[0],
            scales: sums.scales,
            status: call.status(),
            tokens: dx.rows,
            sequences: int(spans.rows),
            limit: int(op.vocab),
            mask: int(mask_id),
            keep,
        };
        call.kernel(&sort_kernel("token_keys"), LaunchShape::of(spans.rows + 1, THREADS), &args)?;
        scales = Some(DeviceTensor { address: sums.scales, rows: 1, columns: dx.rows, dtype: DType::F32 });
    } else {
        sums.row_keys(call, ids, BAD_TOKEN)?;
    }
    if let Some(table) = table {
        sums.add(call, scales, table, op.vocab < FEW_ROWS)?;
    }
    if let Some(row) = row {
        let summed = SummedRows { terms: SummedTerms::Scaled, dy: dx, x: dx, a: scales, b: None, eps: 0.0 };
        column_sums(call, &summed, row_parts)?;
        add_partials(call, dx, 1, row_parts, PartialSumOutputs { first: Some(row), second: None, wide: None })?;
    }
    Ok(())
}

pub(super) fn select_rows_grad(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let rows = call.input(1)?;
    let dx = call.output(0)?;
    let sizes = indexed_sums_parts(dy.rows, dy.columns, dx.rows);
    let [at] = parts(call, [sizes.into_iter().sum()])?;
    let sums = IndexedSums::new(at, sizes, dx.rows, dy);
    sums.row_keys(call, rows, BAD_ROW)?;
    sums.add(call, None, dx, false)
}

kernel_arguments! {
    /// Arguments of `scatter_digits` (sequence_grad.cu).
    struct ScatterDigitsArgs {
        keys: u64,
        positions: u64,
        keys_out: u64,
        positions_out: u64,
        places: u64,
        count: u64,
        shift: i32,
    }
    size 56, last 48
}

kernel_arguments! {
    /// Arguments of `sum_runs` (sequence_grad.cu).
    struct SumRunsArgs {
        dx: u64,
        keys: u64,
        positions: u64,
        starts: u64,
        scales: u64,
        table: u64,
        partials: u64,
        limit: i32,
        columns: i32,
    }
    size 64, last 60
}

/// Sums of the rows of a matrix by table row: the parts of the workspace, and the sizes.
struct IndexedSums {
    /// Table rows, one for each row of the matrix, before and after a pass of the sort.
    keys: [u64; 2],
    /// Row numbers in the order of the keys.
    positions: [u64; 2],
    counts: u64,
    starts: u64,
    scales: u64,
    partials: u64,
    /// Number of table rows.
    limit: u64,
    x: DeviceTensor,
}

impl IndexedSums {
    fn new(at: u64, sizes: [Bytes; 8], limit: u64, x: DeviceTensor) -> Self {
        let [k, other_k, p, other_p, counts, starts, scales, partials] = addresses(at, sizes);
        Self { keys: [k, other_k], positions: [p, other_p], counts, starts, scales, partials, limit, x }
    }

    /// Checks table rows, and writes them as keys.
    fn row_keys(&self, call: &mut OpLaunch<'_>, ids: DeviceTensor, code: u64) -> Result<(), DeviceError> {
        let args = [
            ids.pointer(),
            Arg::pointer(self.keys[0]),
            Arg::pointer(call.status()),
            Arg::long(self.x.rows),
            Arg::int(self.limit),
            Arg::long(code),
        ];
        let shape = LaunchShape::of(self.x.rows.div_ceil(u64::from(THREADS)), THREADS);
        call.kernel(&sort_kernel("row_keys"), shape, &args)
    }

    /// Sorts row numbers by key and returns the index of the buffers that hold them. Keys are at most `limit`, so the
    /// number of passes follows from it.
    fn sort(&self, call: &mut OpLaunch<'_>) -> Result<usize, DeviceError> {
        let count = self.x.rows;
        let chunks = count.div_ceil(SORT_CHUNK);
        let shape = LaunchShape::of(chunks, THREADS);
        // A pass sorts by 8 bits, the lowest first, and is stable, so rows of one key stay in ascending order: the order in
        // which their sums are added.
        let passes = (u64::BITS - self.limit.leading_zeros()).div_ceil(8).max(1);
        let mut from = 0;
        for pass in 0..passes {
            let to = 1 - from;
            let shift = int(8 * pass);
            let args =
                [Arg::pointer(self.keys[from]), Arg::pointer(self.counts), Arg::long(count), Arg::int(shift)];
            call.kernel(&sort_kernel("count_digits"), shape, &args)?;
            let args = [Arg::pointer(self.counts), Arg::long(256 * chunks)];
            call.kernel(&sort_kernel("scan_counts"), LaunchShape::of(chunks.min(1), 1024), &args)?;
            let args = ScatterDigitsArgs {
                keys: self.keys[from],
                // The first pass takes the row numbers in order.
                positions: if pass == 0 { 0 } else { self.positions[from] },
                keys_out: self.keys[to],
                positions_out: self.positions[to],
                places: self.counts,
                count,
                shift,
            };
            call.kernel(&sort_kernel("scatter_digits"), shape, &args)?;
            from = to;
        }
        Ok(from)
    }

    /// Writes the sums of all table rows to `table`. `few`: whether a block completes a table row.
    fn add(
        &self,
        call: &mut OpLaunch<'_>,
        scales: Option<DeviceTensor>,
        table: DeviceTensor,
        few: bool,
    ) -> Result<(), DeviceError> {
        let sorted = self.sort(call)?;
        let rows = self.x.rows;
        let columns = self.x.columns;
        let keys = self.keys[sorted];
        let args = [Arg::pointer(keys), Arg::pointer(self.starts), Arg::long(rows), Arg::int(self.limit)];
        let shape = LaunchShape::of((self.limit + 1).div_ceil(u64::from(THREADS)), THREADS);
        call.kernel(&sort_kernel("find_starts"), shape, &args)?;

        let columns_of_warp = 32 * indexed_width(self.x.dtype, table.dtype, columns);
        let runs = rows.div_ceil(RUN_ROWS);
        let blocks = (runs as u32, columns.div_ceil(WARPS * columns_of_warp) as u32, 1);
        let args = SumRunsArgs {
            dx: self.x.address,
            keys,
            positions: self.positions[sorted],
            starts: self.starts,
            scales: address_if(scales),
            table: table.address,
            partials: self.partials,
            limit: int(self.limit),
            columns: int(columns),
        };
        let kernel = sum_runs_kernel(self.x.dtype, table.dtype, columns);
        call.kernel(&kernel, LaunchShape { blocks, threads: THREADS, shared: 0 }, &args)?;

        let blocks = if few {
            (self.limit as u32, columns.div_ceil(columns_of_warp) as u32, 1)
        } else {
            (self.limit.div_ceil(WARPS) as u32, 1, 1)
        };
        let args = [
            Arg::pointer(self.starts),
            Arg::pointer(self.partials),
            table.pointer(),
            Arg::int(self.limit),
            Arg::int(columns),
        ];
        let kernel = finish_rows_kernel(self.x.dtype, table.dtype, columns, few);
        call.kernel(&kernel, LaunchShape { blocks, threads: THREADS, shared: 0 }, &args)
    }
}

fn sort_kernel(entry: &'static str) -> Kernel {
    Kernel::new(KernelFile::SequenceGrad, entry, DType::F32).with("SORT", 1)
}

fn sum_runs_kernel(dtype: DType, into: DType, columns: u64) -> Kernel {
    indexed_kernel("sum_runs", dtype, into, columns).with("RUN_ROWS", RUN_ROWS as i64).with("ROW_WARPS", 1)
}

fn finish_rows_kernel(dtype: DType, into: DType, columns: u64, few: bool) -> Kernel {
    let warps = if few { WARPS as i64 } else { 1 };
    let kernel = indexed_kernel("finish_rows", dtype, into, columns);
    kernel.with("RUN_ROWS", RUN_ROWS as i64).with("ROW_WARPS", warps)
}

/// Address of a tensor, null if there is none.
fn address_if(tensor: Option<DeviceTensor>) -> u64 {
    tensor.map_or(0, |tensor| tensor.address)
}

/// Checks that tensors have one element type.
fn check_types(call: &OpLaunch<'_>, tensors: &[DeviceTensor]) -> Result<(), DeviceError> {
    match tensors.iter().find(|other| other.dtype != tensors[0].dtype) {
        None => Ok(()),
        Some(other) => {
            Err(call.refused(format!("one parameter is {:?} and another {:?}", tensors[0].dtype, other.dtype)))
        }
    }
}

/// Returns the addresses of adjacent parts of the workspace; an error if the workspace is too small for them.
pub(super) fn parts<const N: usize>(call: &OpLaunch<'_>, sizes: [Bytes; N]) -> Result<[u64; N], DeviceError> {
    let (at, bytes) = call.workspace()?;
    let needed: Bytes = sizes.into_iter().sum();
    if needed > bytes {
        return Err(call.refused(format!("a workspace of {bytes} is too small for {needed}")));
    }
    Ok(addresses(at, sizes))
}

fn addresses<const N: usize>(at: u64, sizes: [Bytes; N]) -> [u64; N] {
    let mut end = at;
    sizes.map(|size| {
        end += size.0;
        end - size.0
    })
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let types = [DType::F32, DType::Bf16, DType::F16];
    let mut kernels =
        ["row_keys", "token_keys", "count_digits", "scan_counts", "scatter_digits", "find_starts"]
            .map(sort_kernel)
            .to_vec();
    kernels.push(Kernel::new(KernelFile::ColumnSums, "moments", DType::F32));
    kernels.extend(types.map(add_partials_kernel));
    for dtype in types {
        let elementwise = ["scale", "gelu_grad", "relu_grad", "softmax_grad"];
        kernels.extend(elementwise.map(|entry| Kernel::new(KernelFile::ElementwiseGrad, entry, dtype)));
        kernels.extend([768, 33].map(|columns| dropout_kernel(dtype, columns)));
        kernels.extend(types.map(|gradient| accumulate_kernel(dtype, gradient)));
        kernels.extend([1, wide(dtype)].map(|width| concat_grad_kernel(dtype, width)));
        // DNABERT-S, and rows that are not aligned.
        for columns in [3072, 33] {
            let activations = [Activation::Gelu, Activation::Silu];
            kernels.extend(activations.map(|activation| glu_grad_kernel(dtype, columns, activation)));
        }
        // A row for a warp, several warps, the largest block, and more than it; rows that are not aligned.
        for columns in [320, 768, 1280, 2560, 8192, 16384, 33, 2001, 4095, 5001] {
            let [rows, params] = [dtype; 2];
            for (params, statistics) in [(DType::F32, DType::F32), (params, dtype)] {
                for centred in [true, false] {
                    let types = NormTypes { rows, statistics, params, centred };
                    kernels.push(match grad_group(dtype, columns) {
                        Some(group) => norm_grad_kernel(types, columns, group),
                        None => wide_norm_grad_kernel(types, columns),
                    });
                }
            }
            let group = group(dtype, columns).unwrap_or_default();
            kernels.push(rms_norm_kernel(dtype, DType::F32, columns, group));
        }
        for columns in [768, 33] {
            for statistics in [DType::F32, dtype] {
                let terms = [
                    SummedTerms::Plain,
                    SummedTerms::Squares,
                    SummedTerms::BatchNorm,
                    SummedTerms::Running,
                    SummedTerms::RowNorm,
                    SummedTerms::Scaled,
                ];
                kernels.extend(terms.map(|of| column_sums_kernel(of, dtype, statistics, columns)));
                let kernel = |entry| batch_norm_kernel(entry, dtype, statistics, statistics, columns);
                kernels.push(kernel("batch_norm_rows"));
                kernels.extend([0, 1].map(|running| kernel("batch_norm_input_grad").with("RUNNING", running)));
            }
            for into in types {
                kernels.push(indexed_kernel("segment_mean_grad", dtype, into, columns).with("SPREAD", 1));
                kernels.push(sum_runs_kernel(dtype, into, columns));
                kernels.extend([true, false].map(|few| finish_rows_kernel(dtype, into, columns, few)));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_at_most_eight_elements_of_a_row() {
        let groups = [(8, 32), (320, 64), (768, 96), (1280, 160), (8192, 1024), (33, 32), (2047, 512)];
        for (columns, threads) in groups {
            assert_eq!(grad_group(DType::Bf16, columns), Some(threads), "{columns} columns");
        }
        assert_eq!((grad_group(DType::F32, 8192), grad_group(DType::F32, 8196)), (Some(1024), None));
    }
}
