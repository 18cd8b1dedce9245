//! Gradients of row-wise ops, dropout, and the sums over rows that they need. Invariant: kernels are chosen by columns
//! and element types, never by the number of rows; sums over rows are cut into chunks of a fixed number of rows, so
//! they have equal bits on any card.

use super::rows::{elements, flat};
use super::sequence::by_sequence;
use super::{Call, Tensor};
use crate::kernel::{Arg, File, Kernel, Shape, code};
use crate::row_kernels::{THREADS, group, norm_shape, row_width, wide};
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

pub(super) fn accumulate(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (acc, g, keep, y) = (call.input(0)?, call.input(1)?, call.input(2)?, call.output(0)?);
    let [acc_at, g_at, keep_at, y_at] = [acc, g, keep, y].map(|t| t.pointer());
    let shape = flat(&y, wide(y.dtype).min(wide(g.dtype)));
    call.kernel(&accumulate_kernel(y.dtype, g.dtype), shape, &[acc_at, g_at, keep_at, y_at, elements(&y)])
}

fn accumulate_kernel(dtype: DType, gradient: DType) -> Kernel {
    Kernel::new(File::ElementwiseGrad, "accumulate", dtype).with("GRADIENT", code(gradient))
}

pub(super) fn scale(call: &mut Call<'_>, op: &Scale) -> Result<(), DeviceError> {
    let (x, y) = (call.input(0)?, call.output(0)?);
    let args = [x.pointer(), y.pointer(), elements(&y), Arg::float(op.factor)];
    call.kernel(&Kernel::new(File::ElementwiseGrad, "scale", y.dtype), flat(&y, wide(y.dtype)), &args)
}

pub(super) fn dropout(call: &mut Call<'_>, op: &Dropout) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let seed = call.input(1)?;
    let packs = call.input(2)?;
    let y = call.output(0)?;
    let word = call.launch.ins.first().map(|x| Dropout::pack_word(&x.spec));
    let Some(Ok(word)) = word else {
        return Err(call.refused("its rows are neither tokens nor sequences".to_owned()));
    };
    // Fits in 32 bits: p < 1 is an f32, so it is at most 1 - 2^-24.
    let threshold = Arg::long((f64::from(op.p) * 4_294_967_296.0).ceil() as u64);
    let factor = Arg::float(1.0 / (1.0 - op.p));
    let [rows, columns, pack_count] = [y.rows, y.columns, packs.rows].map(Arg::int);
    let [x, seed, packs, y_at] = [x, seed, packs, y].map(|t| t.pointer());
    let word = Arg::int(word);
    let stream = Arg::long(u64::from(op.stream));
    let status = call.status();
    let args = [x, seed, packs, y_at, status, rows, columns, pack_count, word, threshold, factor, stream];
    call.kernel(&dropout_kernel(y.dtype, y.columns), flat(&y, wide(y.dtype)), &args)
}

fn dropout_kernel(dtype: DType, columns: u64) -> Kernel {
    let whole_groups = columns.is_multiple_of(4);
    Kernel::new(File::ElementwiseGrad, "dropout", dtype).with("WHOLE_GROUPS", i64::from(whole_groups))
}

pub(super) fn gelu_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    of_two(call, "gelu_grad")
}

pub(super) fn relu_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    of_two(call, "relu_grad")
}

/// Runs an elementwise kernel of two inputs.
fn of_two(call: &mut Call<'_>, entry: &'static str) -> Result<(), DeviceError> {
    let (dy, x, dx) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let args = [dy.pointer(), x.pointer(), dx.pointer(), elements(&dx)];
    call.kernel(&Kernel::new(File::ElementwiseGrad, entry, dx.dtype), flat(&dx, wide(dx.dtype)), &args)
}

pub(super) fn glu_grad(call: &mut Call<'_>, op: &GluGrad) -> Result<(), DeviceError> {
    let (dy, x, dx) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let accesses = dy.elements() / row_width(dy.dtype, dy.columns);
    let shape = Shape::of(accesses.div_ceil(GLU_STEPS * u64::from(THREADS)), THREADS);
    let args = [dy.pointer(), x.pointer(), dx.pointer(), Arg::long(accesses)];
    call.kernel(&glu_grad_kernel(dy.dtype, dy.columns, op.activation), shape, &args)
}

fn glu_grad_kernel(dtype: DType, columns: u64, activation: Activation) -> Kernel {
    let silu = match activation {
        Activation::Gelu => 0,
        Activation::Silu => 1,
    };
    let kernel = Kernel::new(File::ElementwiseGrad, "glu_grad", dtype);
    kernel.with("COLUMNS", columns as i64).with("SILU", silu)
}

pub(super) fn concat_grad(call: &mut Call<'_>, op: &ConcatGrad) -> Result<(), DeviceError> {
    let (dy, dx) = (call.input(0)?, call.output(0)?);
    // All rows of both matrices are aligned if these three numbers are.
    let width = [dy.columns, dx.columns, op.first].map(|columns| row_width(dy.dtype, columns));
    let width = width.into_iter().min().unwrap_or(1);
    let numbers = [Arg::long(dx.rows), Arg::int(dx.columns), Arg::int(op.first), Arg::int(dy.columns)];
    let args = [dy.pointer(), dx.pointer(), numbers[0], numbers[1], numbers[2], numbers[3]];
    call.kernel(&concat_grad_kernel(dy.dtype, width), Shape::of(dx.rows.div_ceil(WARPS), THREADS), &args)
}

fn concat_grad_kernel(dtype: DType, width: u64) -> Kernel {
    Kernel::new(File::ElementwiseGrad, "concat_grad", dtype).with("WIDTH", width as i64)
}

pub(super) fn softmax_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (dy, y, dx) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let [dy_at, y_at, dx_at] = [dy, y, dx].map(|t| t.pointer());
    let args = [dy_at, y_at, dx_at, Arg::long(dx.rows), Arg::int(dx.columns)];
    let kernel = Kernel::new(File::ElementwiseGrad, "softmax_grad", dx.dtype);
    call.kernel(&kernel, Shape::of(dx.rows.div_ceil(WARPS), THREADS), &args)
}

pub(super) fn rms_norm(call: &mut Call<'_>, op: &RmsNorm) -> Result<(), DeviceError> {
    let (x, gamma) = (call.input(0)?.by_heads(op.heads), call.input(1)?);
    let [y, rstd] = [call.output_if(0)?, call.output_if(1)?].map(pointer);
    let Some(group) = group(x.dtype, x.columns) else {
        return Err(call.refused(format!("rows of {} columns are too wide for a block", x.columns)));
    };
    let (shape, each) = norm_shape(x.rows, group);
    let args = [x.pointer(), gamma.pointer(), y, rstd, Arg::long(x.rows), Arg::int(each), Arg::float(op.eps)];
    call.kernel(&rms_norm_kernel(x.dtype, gamma.dtype, x.columns, group), shape, &args)
}

fn rms_norm_kernel(dtype: DType, params: DType, columns: u64, group: u64) -> Kernel {
    let kernel = Kernel::new(File::NormGrad, "rms_norm", dtype).with("PARAM", code(params));
    kernel.with("COLUMNS", columns as i64).with("GROUP", group as i64)
}

pub(super) fn layer_norm_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (mean, rstd, gamma) = (call.input(2)?, call.input(3)?, call.input(4)?);
    let outs = [call.output_if(0)?, call.output_if(1)?, call.output_if(2)?];
    let rows = [call.input(0)?, call.input(1)?];
    norm_grad(call, rows, Some(mean), rstd, gamma, outs)
}

pub(super) fn rms_norm_grad(call: &mut Call<'_>, op: &RmsNormGrad) -> Result<(), DeviceError> {
    let (rstd, gamma) = (call.input(2)?, call.input(3)?);
    let outs = [call.output_if(0)?, call.output_if(1)?, None];
    let rows = [call.input(0)?, call.input(1)?].map(|rows| rows.by_heads(op.heads));
    norm_grad(call, rows, None, rstd, gamma, outs)
}

/// Runs the gradient of a norm over the rows `dy` and `x`; a norm that subtracts the mean has a `mean`. Rows of `dx` are
/// those of `dy`.
fn norm_grad(
    call: &mut Call<'_>,
    [dy, x]: [Tensor; 2],
    mean: Option<Tensor>,
    rstd: Tensor,
    gamma: Tensor,
    [dx, dgamma, dbeta]: [Option<Tensor>; 3],
) -> Result<(), DeviceError> {
    check_types(call, &[mean.unwrap_or(rstd), rstd])?;
    let sums = if mean.is_some() { 2 } else { 1 };
    let [partials, _] = parts(call, column_sums_parts(dy.rows, dy.columns, 2, 0))?;
    let types =
        NormTypes { rows: dy.dtype, statistics: rstd.dtype, params: gamma.dtype, centred: mean.is_some() };
    let [dy_at, x_at, rstd_at, gamma_at] = [dy, x, rstd, gamma].map(|t| t.pointer());
    let (mean_at, dx_at) = (pointer(mean), pointer(dx));
    if let Some(group) = grad_group(dy.dtype, dy.columns) {
        let threads = if group < 128 { 128 / group * group } else { group };
        let shape = Shape::of(dy.rows.div_ceil(SUM_ROWS * (threads / group)), threads as u32);
        let (partials, rows) = (Arg::pointer(partials), Arg::long(dy.rows));
        let args = [dy_at, x_at, mean_at, rstd_at, gamma_at, dx_at, partials, rows];
        call.kernel(&norm_grad_kernel(types, dy.columns, group), shape, &args)?;
        return add_partials(call, (dy, sums), partials, [dgamma, dbeta], None);
    }
    // The sums come first, because dx may be dy or x. A norm without mean has no use for the second of them.
    if dgamma.is_some() || dbeta.is_some() {
        column_sums(call, Terms::RowNorm, [dy, x], [mean, Some(rstd)], 0.0, partials)?;
        add_partials(call, (dy, 2), Arg::pointer(partials), [dgamma, dbeta], None)?;
    }
    if dx.is_some() {
        let args = [dy_at, x_at, mean_at, rstd_at, gamma_at, dx_at, Arg::int(dy.columns)];
        call.kernel(&wide_norm_grad_kernel(types, dy.columns), Shape::of(dy.rows, 512), &args)?;
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
        let kernel = Kernel::new(File::NormGrad, entry, self.rows).with("PARAM", code(self.params));
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

pub(super) fn batch_norm_train(call: &mut Call<'_>, op: &BatchNormTrain) -> Result<(), DeviceError> {
    let (x, gamma, beta) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let running = [call.input(3)?, call.input(4)?];
    if x.rows < 2 {
        return Err(call.refused("the variance of a batch needs two rows".to_owned()));
    }
    check_types(call, &[gamma, beta])?;
    let [partials, statistics] = parts(call, column_sums_parts(x.rows, x.columns, 1, 2))?;
    let vector =
        |i| Tensor { address: statistics + 4 * i * x.columns, rows: 1, columns: x.columns, dtype: DType::F32 };
    let [mean, rstd] = [0_u64, 1].map(vector);
    for (i, terms) in [(0, Terms::Plain), (1, Terms::Squares)] {
        column_sums(call, terms, [x, x], [Some(mean), None], 0.0, partials)?;
        let [statistic, updated] = [call.output_if(1 + i)?, call.output_if(3 + i)?].map(pointer);
        let (chunks, rows) = (Arg::long(x.rows.div_ceil(SUM_ROWS)), Arg::long(x.rows));
        let args = [
            Arg::pointer(partials),
            [mean, rstd][i].pointer(),
            statistic,
            running[i].pointer(),
            updated,
            chunks,
            rows,
            Arg::int(x.columns),
            Arg::int(i),
            Arg::float(op.eps),
            Arg::float(op.momentum),
        ];
        let shape = Shape::of(x.columns.div_ceil(32), 1024);
        call.kernel(&Kernel::new(File::ColumnSums, "moments", DType::F32), shape, &args)?;
    }
    let Some(y) = call.output_if(0)? else { return Ok(()) };
    let [x_at, mean, rstd, gamma_at, beta, y] = [x, mean, rstd, gamma, beta, y].map(|t| t.pointer());
    let args = [x_at, mean, rstd, gamma_at, beta, y, Arg::long(x.rows), Arg::int(x.columns)];
    let kernel = batch_norm_kernel("batch_norm_rows", x.dtype, DType::F32, gamma.dtype, x.columns);
    call.kernel(&kernel, by_chunks(&x), &args)
}

pub(super) fn batch_norm_train_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (mean, rstd, gamma) = (call.input(2)?, call.input(3)?, call.input(4)?);
    batch_norm_grads(call, Terms::BatchNorm, [mean, rstd, gamma], 0.0)
}

pub(super) fn batch_norm_grad(call: &mut Call<'_>, op: &BatchNormGrad) -> Result<(), DeviceError> {
    let (gamma, mean, var) = (call.input(2)?, call.input(3)?, call.input(4)?);
    batch_norm_grads(call, Terms::Running, [mean, var, gamma], op.eps)
}

/// Runs the gradient of batch norm with statistics `a` and `b`: mean and rstd of the batch, or running mean and variance.
fn batch_norm_grads(
    call: &mut Call<'_>,
    terms: Terms,
    [a, b, gamma]: [Tensor; 3],
    eps: f32,
) -> Result<(), DeviceError> {
    let (dy, x) = (call.input(0)?, call.input(1)?);
    let [dx, dgamma, dbeta] = [call.output_if(0)?, call.output_if(1)?, call.output_if(2)?];
    check_types(call, &[a, b])?;
    let running = terms == Terms::Running;
    let [partials, finished] =
        parts(call, column_sums_parts(dy.rows, dy.columns, 2, if running { 0 } else { 2 }))?;
    let of_rows = (!running).then_some(finished);
    if of_rows.is_some() || dgamma.is_some() || dbeta.is_some() {
        column_sums(call, terms, [dy, x], [Some(a), Some(b)], eps, partials)?;
        add_partials(call, (dy, 2), Arg::pointer(partials), [dgamma, dbeta], of_rows)?;
    }
    let Some(dx) = dx else { return Ok(()) };
    let sums = Arg::pointer(of_rows.unwrap_or(0));
    let kernel = batch_norm_kernel("batch_norm_input_grad", dy.dtype, b.dtype, gamma.dtype, dy.columns);
    let [dy_at, x, a, b, gamma, dx] = [dy, x, a, b, gamma, dx].map(|t| t.pointer());
    let args = [dy_at, x, a, b, gamma, sums, dx, Arg::long(dy.rows), Arg::int(dy.columns), Arg::float(eps)];
    call.kernel(&kernel.with("RUNNING", i64::from(running)), by_chunks(&dy), &args)
}

fn batch_norm_kernel(
    entry: &'static str,
    dtype: DType,
    statistics: DType,
    params: DType,
    columns: u64,
) -> Kernel {
    let kernel = Kernel::new(File::BatchNormTrain, entry, dtype).with("STAT", code(statistics));
    let kernel = kernel.with("PARAM", code(params)).with("SUM_ROWS", SUM_ROWS as i64);
    kernel.with("WIDTH", row_width(dtype, columns) as i64)
}

/// Terms that `column_sums` adds; the numbers are those of column_sums.cu.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Terms {
    Plain = 0,
    Squares = 1,
    BatchNorm = 2,
    Running = 3,
    RowNorm = 4,
    Scaled = 5,
}

/// Adds terms of [`SUM_ROWS`] rows at a time to `partials`; `a` and `b` are the vectors that the terms contain.
fn column_sums(
    call: &mut Call<'_>,
    terms: Terms,
    [dy, x]: [Tensor; 2],
    [a, b]: [Option<Tensor>; 2],
    eps: f32,
    partials: u64,
) -> Result<(), DeviceError> {
    let statistics = b.or(a).map_or(DType::F32, |t| t.dtype);
    let vectors = [pointer(a), pointer(b), Arg::pointer(partials)];
    let (rows, columns) = (Arg::long(x.rows), Arg::int(x.columns));
    let args = [dy.pointer(), x.pointer(), vectors[0], vectors[1], vectors[2], rows, columns, Arg::float(eps)];
    call.kernel(&column_sums_kernel(terms, x.dtype, statistics, x.columns), by_chunks(&x), &args)
}

fn column_sums_kernel(terms: Terms, dtype: DType, statistics: DType, columns: u64) -> Kernel {
    let kernel = Kernel::new(File::ColumnSums, "column_sums", dtype).with("OF", terms as i64);
    let kernel = kernel.with("STAT", code(statistics)).with("SUM_ROWS", SUM_ROWS as i64);
    kernel.with("WIDTH", row_width(dtype, columns) as i64)
}

/// Returns the grid whose blocks have [`SUM_ROWS`] rows of 32 accesses.
fn by_chunks(x: &Tensor) -> Shape {
    let tiles = x.columns.div_ceil(32 * row_width(x.dtype, x.columns));
    Shape { blocks: (x.rows.div_ceil(SUM_ROWS) as u32, tiles as u32, 1), threads: THREADS, shared: 0 }
}

/// Adds the partial sums of a matrix (`sums` for each column) to the given outputs, and to `wide` in f32.
fn add_partials(
    call: &mut Call<'_>,
    (of, sums): (Tensor, u64),
    partials: Arg,
    outs: [Option<Tensor>; 2],
    wide: Option<u64>,
) -> Result<(), DeviceError> {
    let out = outs[0].or(outs[1]);
    if out.is_none() && wide.is_none() {
        return Ok(());
    }
    let [first, second] = outs.map(pointer);
    let chunks = Arg::long(of.rows.div_ceil(SUM_ROWS));
    let args = [partials, first, second, Arg::pointer(wide.unwrap_or(0)), chunks, Arg::int(of.columns)];
    let blocks = (of.columns.div_ceil(32) as u32, sums as u32, 1);
    let kernel = add_partials_kernel(out.map_or(DType::F32, |out| out.dtype));
    call.kernel(&kernel, Shape { blocks, threads: 1024, shared: 0 }, &args)
}

fn add_partials_kernel(into: DType) -> Kernel {
    Kernel::new(File::ColumnSums, "add_partials", DType::F32).with("INTO", code(into))
}

pub(super) fn segment_mean_grad(call: &mut Call<'_>, op: &SegmentMeanGrad) -> Result<(), DeviceError> {
    let (dy, spans, dx) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let [first, last] = [op.skip_first, op.skip_last].map(|skip| Arg::long(u64::from(skip)));
    let [dy_at, spans_at, dx_at] = [dy, spans, dx].map(|t| t.pointer());
    let numbers = [Arg::long(dx.rows), Arg::int(spans.rows), Arg::int(dx.columns)];
    let args = [dy_at, spans_at, dx_at, call.status(), numbers[0], numbers[1], numbers[2], first, last];
    let kernel = indexed_kernel("segment_mean_grad", dy.dtype, dx.dtype, dx.columns).with("SPREAD", 1);
    call.kernel(&kernel, by_sequence(&dx, spans.rows), &args)
}

/// Returns a kernel that reads rows of one element type and writes rows of another.
fn indexed_kernel(entry: &'static str, dtype: DType, into: DType, columns: u64) -> Kernel {
    let kernel = Kernel::new(File::SequenceGrad, entry, dtype).with("INTO", code(into));
    kernel.with("WIDTH", indexed_width(dtype, into, columns) as i64)
}

/// Elements per access to rows of two element types: 16 bytes of the shorter one.
fn indexed_width(dtype: DType, into: DType, columns: u64) -> u64 {
    row_width(if dtype == DType::F32 { into } else { dtype }, columns)
}

pub(super) fn embed_grad(call: &mut Call<'_>, op: &EmbedGrad) -> Result<(), DeviceError> {
    let (dx, ids) = (call.input(0)?, call.input(1)?);
    let [table, row] = [call.output_if(0)?, if op.row { call.output_if(1)? } else { None }];
    let of_table = indexed_sums_parts(dx.rows, dx.columns, op.vocab);
    let of_row = column_sums_parts(dx.rows, dx.columns, u64::from(op.row), 0);
    let [table_parts, row_parts, _] = parts(call, [of_table.into_iter().sum(), of_row[0], of_row[1]])?;
    let sums = IndexedSums::new(table_parts, of_table, op.vocab, dx);
    let scales = match op.token_dropout {
        None => {
            sums.row_keys(call, ids, BAD_TOKEN)?;
            None
        }
        Some(TokenDropout { mask_id, keep }) => {
            let spans = call.input(2)?;
            let (status, tokens) = (call.status(), Arg::long(dx.rows));
            let (keys, scales) = (Arg::pointer(sums.keys[0]), Arg::pointer(sums.scales));
            let (sequences, mask) = (Arg::int(spans.rows), Arg::int(mask_id));
            let limit = Arg::int(op.vocab);
            let [ids, spans_at] = [ids, spans].map(|t| t.pointer());
            let args = [ids, spans_at, keys, scales, status, tokens, sequences, limit, mask, Arg::float(keep)];
            call.kernel(&sort_kernel("token_keys"), Shape::of(spans.rows + 1, THREADS), &args)?;
            Some(Tensor { address: sums.scales, rows: 1, columns: dx.rows, dtype: DType::F32 })
        }
    };
    if let Some(table) = table {
        sums.add(call, scales, table, op.vocab < FEW_ROWS)?;
    }
    if let Some(row) = row {
        column_sums(call, Terms::Scaled, [dx, dx], [scales, None], 0.0, row_parts)?;
        add_partials(call, (dx, 1), Arg::pointer(row_parts), [Some(row), None], None)?;
    }
    Ok(())
}

pub(super) fn select_rows_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (dy, rows, dx) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let sizes = indexed_sums_parts(dy.rows, dy.columns, dx.rows);
    let [at] = parts(call, [sizes.into_iter().sum()])?;
    let sums = IndexedSums::new(at, sizes, dx.rows, dy);
    sums.row_keys(call, rows, BAD_ROW)?;
    sums.add(call, None, dx, false)
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
    x: Tensor,
}

impl IndexedSums {
    fn new(at: u64, sizes: [Bytes; 8], limit: u64, x: Tensor) -> Self {
        let [k, other_k, p, other_p, counts, starts, scales, partials] = addresses(at, sizes);
        Self { keys: [k, other_k], positions: [p, other_p], counts, starts, scales, partials, limit, x }
    }

    /// Checks table rows, and writes them as keys.
    fn row_keys(&self, call: &mut Call<'_>, ids: Tensor, code: u64) -> Result<(), DeviceError> {
        let (keys, count) = (Arg::pointer(self.keys[0]), Arg::long(self.x.rows));
        let args = [ids.pointer(), keys, call.status(), count, Arg::int(self.limit), Arg::long(code)];
        let shape = Shape::of(self.x.rows.div_ceil(u64::from(THREADS)), THREADS);
        call.kernel(&sort_kernel("row_keys"), shape, &args)
    }

    /// Sorts row numbers by key and returns the index of the buffers that hold them. Keys are at most `limit`, so the
    /// number of passes follows from it.
    fn sort(&self, call: &mut Call<'_>) -> Result<usize, DeviceError> {
        let count = Arg::long(self.x.rows);
        let chunks = self.x.rows.div_ceil(SORT_CHUNK);
        let passes = (u64::BITS - self.limit.leading_zeros()).div_ceil(8).max(1);
        let counts = Arg::pointer(self.counts);
        let mut from = 0;
        for pass in 0..passes {
            let [keys, keys_out] = [self.keys[from], self.keys[1 - from]].map(Arg::pointer);
            let positions = Arg::pointer(if pass == 0 { 0 } else { self.positions[from] });
            let positions_out = Arg::pointer(self.positions[1 - from]);
            let (shape, shift) = (Shape::of(chunks, THREADS), Arg::int(8 * pass));
            call.kernel(&sort_kernel("count_digits"), shape, &[keys, counts, count, shift])?;
            let scan = [counts, Arg::long(256 * chunks)];
            call.kernel(&sort_kernel("scan_counts"), Shape::of(chunks.min(1), 1024), &scan)?;
            let args = [keys, positions, keys_out, positions_out, counts, count, shift];
            call.kernel(&sort_kernel("scatter_digits"), shape, &args)?;
            from = 1 - from;
        }
        Ok(from)
    }

    /// Writes the sums of all table rows to `table`. `few`: whether a block completes a table row.
    fn add(
        &self,
        call: &mut Call<'_>,
        scales: Option<Tensor>,
        table: Tensor,
        few: bool,
    ) -> Result<(), DeviceError> {
        let sorted = self.sort(call)?;
        let (rows, columns) = (self.x.rows, self.x.columns);
        let [keys, positions] = [self.keys[sorted], self.positions[sorted]].map(Arg::pointer);
        let [starts, partials] = [self.starts, self.partials].map(Arg::pointer);
        let (limit, count) = (Arg::int(self.limit), Arg::long(rows));
        let shape = Shape::of((self.limit + 1).div_ceil(u64::from(THREADS)), THREADS);
        call.kernel(&sort_kernel("find_starts"), shape, &[keys, starts, count, limit])?;

        let (columns_of_warp, runs) =
            (32 * indexed_width(self.x.dtype, table.dtype, columns), rows.div_ceil(RUN_ROWS));
        let blocks = (runs as u32, columns.div_ceil(WARPS * columns_of_warp) as u32, 1);
        let (x, table_at, columns_arg) = (self.x.pointer(), table.pointer(), Arg::int(columns));
        let args = [x, keys, positions, starts, pointer(scales), table_at, partials, limit, columns_arg];
        let kernel = sum_runs_kernel(self.x.dtype, table.dtype, columns);
        call.kernel(&kernel, Shape { blocks, threads: THREADS, shared: 0 }, &args)?;

        let blocks = match few {
            true => (self.limit as u32, columns.div_ceil(columns_of_warp) as u32, 1),
            false => (self.limit.div_ceil(WARPS) as u32, 1, 1),
        };
        let kernel = finish_rows_kernel(self.x.dtype, table.dtype, columns, few);
        let args = [starts, partials, table_at, limit, columns_arg];
        call.kernel(&kernel, Shape { blocks, threads: THREADS, shared: 0 }, &args)
    }
}

fn sort_kernel(entry: &'static str) -> Kernel {
    Kernel::new(File::SequenceGrad, entry, DType::F32).with("SORT", 1)
}

fn sum_runs_kernel(dtype: DType, into: DType, columns: u64) -> Kernel {
    indexed_kernel("sum_runs", dtype, into, columns).with("RUN_ROWS", RUN_ROWS as i64).with("ROW_WARPS", 1)
}

fn finish_rows_kernel(dtype: DType, into: DType, columns: u64, few: bool) -> Kernel {
    let warps = if few { WARPS as i64 } else { 1 };
    let kernel = indexed_kernel("finish_rows", dtype, into, columns);
    kernel.with("RUN_ROWS", RUN_ROWS as i64).with("ROW_WARPS", warps)
}

fn pointer(tensor: Option<Tensor>) -> Arg {
    Arg::pointer(tensor.map_or(0, |tensor| tensor.address))
}

/// Checks that tensors have one element type.
fn check_types(call: &Call<'_>, tensors: &[Tensor]) -> Result<(), DeviceError> {
    match tensors.iter().find(|other| other.dtype != tensors[0].dtype) {
        None => Ok(()),
        Some(other) => {
            Err(call.refused(format!("one parameter is {:?} and another {:?}", tensors[0].dtype, other.dtype)))
        }
    }
}

/// Returns the addresses of adjacent parts of the workspace; an error if the workspace is too small for them.
fn parts<const N: usize>(call: &Call<'_>, sizes: [Bytes; N]) -> Result<[u64; N], DeviceError> {
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
    kernels.push(Kernel::new(File::ColumnSums, "moments", DType::F32));
    kernels.extend(types.map(add_partials_kernel));
    for dtype in types {
        let elementwise = ["scale", "gelu_grad", "relu_grad", "softmax_grad"];
        kernels.extend(elementwise.map(|entry| Kernel::new(File::ElementwiseGrad, entry, dtype)));
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
                    Terms::Plain,
                    Terms::Squares,
                    Terms::BatchNorm,
                    Terms::Running,
                    Terms::RowNorm,
                    Terms::Scaled,
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
