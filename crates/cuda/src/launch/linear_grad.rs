//! Gradients of a matmul, and the transposes and sums over rows that they consist of. Invariant: sums over rows are added
//! in an order that depends on the number of rows and the shapes only.

use super::rows::cast_to;
use super::{DeviceTensor, OpLaunch};
use crate::gemm::{
    GemmForm, GemmOperands, MANY_ROWS, NormParameters, OwnProduct, Product, ProductForm, ProductOperands,
    takes_w_by_k,
};
use crate::kernel::{Arg, Kernel, KernelFile, LaunchShape, code};
use crate::row_kernels::row_width;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{LinearInputGrad, LinearWeightGrad, OperandFormat};
use plimsoll_graph::{Bytes, DType};
use plimsoll_plan::{
    BIAS_ROWS, GRAD_ROWS, WORKSPACE_ALIGN, input_grad_parts, library_sums_rows, weight_grad_parts,
};

/// Threads of a block of the kernels in this file.
const THREADS: u32 = 256;

/// dx (R, K) = dy (R, N) W (N, K): the forward matmul with W transposed, so it has that matmul's order of sums and its
/// kernels. Where no kernel reads W as it is, it is transposed first.
pub(super) fn input_grad(call: &mut OpLaunch<'_>, op: &LinearInputGrad) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let w = call.input(1)?;
    let Some(dx) = call.output_if(0)? else { return Ok(()) };
    let n = dy.columns;
    let k = w.columns;
    let dtype = dy.dtype;
    same_types(call, dtype, &[w, dx])?;
    let parts = input_grad_parts(n, k, dtype);
    let [transposed, library] = carve(call, parts)?;
    let form = GemmForm { tf32: op.operands == OperandFormat::Tf32, ..GemmForm::new(k, n, dtype) };
    let by_k = takes_w_by_k(call.context, form);
    if !by_k {
        transpose(call, w, transposed, n)?;
    }
    let w = if by_k { w.address } else { transposed };
    let operands = ForwardMatmul { x: dy.address, w, y: dx.address, rows: dy.rows };
    forward(call, GemmForm { by_k, ..form }, operands, Workspace { address: library, bytes: parts[1] })
}

/// dw (N, K) = dy (R, N)^T x (R, K), db (N) = sums of the columns of dy.
pub(super) fn weight_grad(call: &mut OpLaunch<'_>, op: &LinearWeightGrad) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let x = call.input(1)?;
    let dw = call.output_if(0)?;
    let db = if op.bias { call.output_if(1)? } else { None };
    let rows = dy.rows;
    let n = dy.columns;
    let k = x.columns;
    let dtype = dy.dtype;
    let parts = weight_grad_parts(rows, n, k, dtype, op.operands);
    let [dy_t, x_t, wide, sums, library] = carve(call, parts)?;
    let library = Workspace { address: library, bytes: parts[4] };
    if let Some(dw) = dw {
        same_types(call, dtype, &[x, dw])?;
        let tf32 = op.operands == OperandFormat::Tf32;
        let over = OverRows { x, y: dy, tf32, classes: n, y_t: dy_t, x_t, library };
        if library_sums_rows(dtype, op.operands, [n, k]) {
            over.by_library(call, dw.address, dtype, MANY_ROWS, false)?;
        } else if dtype == DType::F32 {
            over.by_own(call, dw.address, false)?;
        } else {
            over.by_own(call, wide, false)?;
            round(call, wide, dw.address, dtype, n * k)?;
        }
    }
    if let Some(db) = db {
        column_sums(call, dy, sums, None, ColumnSumsOutput { at: db.address, dtype: db.dtype, columns: n })?;
    }
    Ok(())
}

/// Divides the workspace into parts; returns their addresses.
pub(super) fn carve<const N: usize>(call: &OpLaunch<'_>, parts: [Bytes; N]) -> Result<[u64; N], DeviceError> {
    let (address, planned) = call.workspace()?;
    let mut end = 0;
    let addresses = parts.map(|part| {
        let at = address + end;
        end += part.align_up(WORKSPACE_ALIGN).0;
        at
    });
    if end > planned.0 {
        return Err(call.refused(format!("its workspace is {planned}, and it needs {}", Bytes(end))));
    }
    Ok(addresses)
}

/// Checks that operands have one float type.
pub(super) fn same_types(
    call: &OpLaunch<'_>,
    dtype: DType,
    others: &[DeviceTensor],
) -> Result<(), DeviceError> {
    match others.iter().find(|other| other.dtype != dtype) {
        None => Ok(()),
        Some(other) => Err(call.refused(format!(
            "operands must have one float type, not {} and {}",
            dtype.name(),
            other.dtype.name()
        ))),
    }
}

/// A part of the workspace.
#[derive(Clone, Copy)]
pub(super) struct Workspace {
    pub(super) address: u64,
    pub(super) bytes: Bytes,
}

/// Device addresses of the operands of a forward matmul, and its number of rows.
#[derive(Clone, Copy)]
pub(super) struct ForwardMatmul {
    pub(super) x: u64,
    pub(super) w: u64,
    pub(super) y: u64,
    pub(super) rows: u64,
}

/// Prepares or runs a forward matmul without bias.
pub(super) fn forward(
    call: &mut OpLaunch<'_>,
    form: GemmForm,
    factors: ForwardMatmul,
    library: Workspace,
) -> Result<(), DeviceError> {
    let ForwardMatmul { x, w, y, rows } = factors;
    let operands = GemmOperands {
        x,
        w,
        scales: (0, 0),
        bias: 0,
        residual: 0,
        norm: NormParameters::default(),
        y,
        rows,
        workspace: (library.address, library.bytes.0),
    };
    if rows == 0 {
        return Ok(());
    }
    if call.preparing {
        call.gemm.prepare(call.context, call.kernels, form, &operands)?;
    } else {
        call.gemm.run(call.context, call.kernels, form, &operands)?;
    }
    Ok(())
}

/// A product summed over rows: d (N, K) = y (R, N)^T x (R, K), of which the first `classes` rows are wanted.
pub(super) struct OverRows {
    pub(super) x: DeviceTensor,
    pub(super) y: DeviceTensor,
    /// Whether f32 x and y are rounded to TF32.
    pub(super) tf32: bool,
    pub(super) classes: u64,
    /// Address of a workspace for the transpose of y.
    pub(super) y_t: u64,
    /// Address of a workspace for the transpose of x.
    pub(super) x_t: u64,
    /// Workspace for the library.
    pub(super) library: Workspace,
}

impl OverRows {
    /// Computes all rows of d by cuBLASLt in type `out`; `accumulate` adds them to d. `max_rows` is the largest number of rows
    /// of any product of the op, at most [`MANY_ROWS`].
    pub(super) fn by_library(
        &self,
        call: &mut OpLaunch<'_>,
        d: u64,
        out: DType,
        max_rows: u64,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let &Self { x, y, tf32, library, .. } = self;
        let n = y.columns;
        let k = x.columns;
        let dtype = x.dtype;
        let rows = x.rows;
        let form = ProductForm { product: Product::OverRows, n, k, dtype, tf32, out, rows: max_rows };
        let workspace = (library.address, library.bytes.0);
        let operands = ProductOperands { x: x.address, y: y.address, d, rows, accumulate, workspace };
        if call.preparing {
            call.gemm.prepare_product(form)?;
        } else if rows > 0 {
            call.gemm.run_product(call.context, form, &operands)?;
        } else if !accumulate {
            zero(call, d, Bytes(n * k * out.size()))?;
        }
        Ok(())
    }

    /// Computes the wanted rows of d by our own kernels in f32, [`GRAD_ROWS`] rows of x and y at a time; `accumulate` adds
    /// them to d.
    pub(super) fn by_own(&self, call: &mut OpLaunch<'_>, d: u64, accumulate: bool) -> Result<(), DeviceError> {
        let &Self { x, y, tf32, classes, y_t, x_t, .. } = self;
        // Without rows, a product of no terms writes zeros.
        let chunks = if call.preparing { 1 } else { x.rows.div_ceil(GRAD_ROWS).max(1) };
        for chunk in 0..chunks {
            let first = chunk * GRAD_ROWS;
            let rows = GRAD_ROWS.min(x.rows - first);
            // Rows of the transposes are padded to 16 bytes, so that one kernel is for any number of rows.
            let padded = rows.next_multiple_of(8);
            transpose(call, part(y, first, rows), y_t, padded)?;
            transpose(call, part(x, first, rows), x_t, padded)?;
            let product = OwnProduct {
                dtype: x.dtype,
                tf32,
                x: y_t,
                w: x_t,
                y: d,
                rows: classes,
                n: x.columns,
                k: padded,
                accumulate: accumulate || chunk > 0,
            };
            own(call, &product)?;
        }
        Ok(())
    }
}

/// Prepares or runs a product by our own kernels.
pub(super) fn own(call: &mut OpLaunch<'_>, product: &OwnProduct) -> Result<(), DeviceError> {
    if call.preparing {
        product.prepare(call.context, call.kernels)?;
    } else {
        product.run(call.context, call.kernels)?;
    }
    Ok(())
}

/// Rows `first..first + rows` of a matrix.
pub(super) fn part(of: DeviceTensor, first: u64, rows: u64) -> DeviceTensor {
    DeviceTensor { address: of.address + first * of.columns * of.dtype.size(), rows, ..of }
}

/// Writes zeros.
pub(super) fn zero(call: &OpLaunch<'_>, address: u64, bytes: Bytes) -> Result<(), DeviceError> {
    if call.preparing || bytes == Bytes::ZERO {
        return Ok(());
    }
    let api = call.context.api;
    // SAFETY: the range is an output, or a part of the workspace.
    let code = unsafe { (api.cuMemsetD8Async)(address, 0, bytes.0 as usize, call.context.stream) };
    Ok(api.check("cuMemsetD8Async", code)?)
}

/// Rounds f32 elements to another type.
pub(super) fn round(
    call: &mut OpLaunch<'_>,
    from: u64,
    to: u64,
    dtype: DType,
    elements: u64,
) -> Result<(), DeviceError> {
    let cast = cast_to(DType::F32, dtype, from, to, elements);
    call.kernel(&cast.kernel, cast.shape, &cast.args)
}

/// Transposes x (R, C) to y (C, `stride`), with zeros in the columns of y behind R. 16-byte loads need an x whose first
/// row is aligned.
pub(super) fn transpose(
    call: &mut OpLaunch<'_>,
    x: DeviceTensor,
    y: u64,
    stride: u64,
) -> Result<(), DeviceError> {
    const TILE: u64 = 64;
    let blocks = (x.columns.div_ceil(TILE) as u32, stride.div_ceil(TILE) as u32, 1);
    let args = [x.pointer(), Arg::pointer(y), Arg::int(x.rows), Arg::int(x.columns), Arg::int(stride)];
    let kernel = transpose_kernel(x.dtype, x.columns, stride);
    call.kernel(&kernel, LaunchShape { blocks, threads: THREADS, shared: 0 }, &args)
}

fn transpose_kernel(dtype: DType, columns: u64, stride: u64) -> Kernel {
    Kernel::new(KernelFile::Transpose, "transpose", dtype)
        .with("ALIGNED_IN", i64::from(row_width(dtype, columns) > 1))
        .with("ALIGNED_OUT", i64::from(row_width(dtype, stride) > 1))
}

/// A vector to which sums are written.
#[derive(Clone, Copy)]
pub(super) struct ColumnSumsOutput {
    pub(super) at: u64,
    pub(super) dtype: DType,
    /// Number of elements: at most the columns of the matrix.
    pub(super) columns: u64,
}

/// Writes to `y` the sums of the columns of x over its rows, plus the f32 vector at `add`, which may be `y`. Needs a
/// workspace of a f32 row for every [`BIAS_ROWS`] rows of x.
pub(super) fn column_sums(
    call: &mut OpLaunch<'_>,
    x: DeviceTensor,
    workspace: u64,
    add: Option<u64>,
    y: ColumnSumsOutput,
) -> Result<(), DeviceError> {
    let width = row_width(x.dtype, x.columns);
    let chunks = x.rows.div_ceil(BIAS_ROWS);
    let blocks = (x.columns.div_ceil(32 * width) as u32, chunks as u32, 1);
    let args = [x.pointer(), Arg::pointer(workspace), Arg::long(x.rows), Arg::int(x.columns)];
    let shape = LaunchShape { blocks, threads: THREADS, shared: 0 };
    call.kernel(&partials_kernel(x.dtype, x.columns), shape, &args)?;
    let args = [
        Arg::pointer(workspace),
        Arg::pointer(add.unwrap_or(0)),
        Arg::pointer(y.at),
        Arg::int(chunks),
        Arg::int(y.columns),
        Arg::int(x.columns),
    ];
    call.kernel(&totals_kernel(y.dtype), LaunchShape::of(y.columns.div_ceil(32), THREADS), &args)
}

fn partials_kernel(dtype: DType, columns: u64) -> Kernel {
    Kernel::new(KernelFile::Sums, "column_partials", dtype)
        .with("ROWS", BIAS_ROWS as i64)
        .with("WIDTH", row_width(dtype, columns) as i64)
}

fn totals_kernel(out: DType) -> Kernel {
    Kernel::new(KernelFile::Sums, "column_totals", DType::F32).with("OUT", code(out))
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let widths = [(1280, 1280), (33, 1280), (1280, 33), (33, 33)];
        kernels.extend(widths.map(|(columns, stride)| transpose_kernel(dtype, columns, stride)));
        kernels.extend([1280, 33].map(|columns| partials_kernel(dtype, columns)));
        kernels.push(totals_kernel(dtype));
    }
    kernels
}
