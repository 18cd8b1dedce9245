//! Output projection with softmax cross-entropy, a chunk of rows at a time, so that the logits of all rows never exist.
//! Invariant: rows that do not count contribute nothing, whatever they hold.

use super::linear_grad::{
    ColumnSumsOutput, ForwardMatmul, OverRows, Workspace, carve, column_sums, forward, own, part, round,
    same_types, transpose, zero,
};
use super::{DeviceTensor, OpLaunch};
use crate::gemm::{GemmForm, MANY_ROWS, OwnProduct, Product, ProductForm, ProductOperands};
use crate::kernel::{Kernel, KernelFile, LaunchShape, code, int, kernel_arguments};
use crate::row_kernels::row_width;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{LinearCrossEntropy, LinearCrossEntropyGrad, OperandFormat};
use plimsoll_graph::{Bytes, DType};
use plimsoll_plan::{LossSizes, library_sums_rows};

/// Largest number of classes for which a warp computes a row, rather than a block.
const WARP_CLASSES: u64 = 1024;

kernel_arguments! {
    /// Arguments of `cross_entropy` (cross_entropy.cu).
    struct CrossEntropyArgs {
        logits: u64,
        bias: u64,
        targets: u64,
        lses: u64,
        terms: u64,
        rows: u64,
        classes: i32,
        status: u64,
    }
    size 64, last 56
}

kernel_arguments! {
    /// Arguments of `cross_entropy_grad` (cross_entropy.cu).
    struct CrossEntropyGradArgs {
        logits: u64,
        bias: u64,
        targets: u64,
        lses: u64,
        dloss: u64,
        g: u64,
        rows: u64,
        classes: i32,
        stride: i32,
        z: f32,
        status: u64,
    }
    size 80, last 72
}

kernel_arguments! {
    /// Arguments of `counted_rows` (cross_entropy.cu).
    struct CountedRowsArgs {
        x: u64,
        targets: u64,
        y: u64,
        rows: u64,
        classes: i32,
        accesses: i32,
    }
    size 40, last 36
}

kernel_arguments! {
    /// Arguments of `loss_total` (cross_entropy.cu).
    struct LossTotalArgs {
        lses: u64,
        terms: u64,
        loss: u64,
        cross_entropy: u64,
        z_term: u64,
        rows: u64,
        z: f32,
    }
    size 56, last 48
}

/// The operands of the loss that its gradient has too.
#[derive(Clone, Copy)]
struct LossHead {
    x: DeviceTensor,
    w: DeviceTensor,
    bias: Option<DeviceTensor>,
    targets: DeviceTensor,
    sizes: LossSizes,
}

impl LossHead {
    /// Reads the operands, the first of which is input `at`.
    fn new(call: &OpLaunch<'_>, op: &LinearCrossEntropy, at: usize) -> Result<Self, DeviceError> {
        let x = call.input(at)?;
        let w = call.input(at + 1)?;
        let bias = op.bias.then(|| call.input(at + 2)).transpose()?;
        let targets = call.input(at + 2 + usize::from(op.bias))?;
        same_types(call, x.dtype, &[w])?;
        let sizes = LossSizes {
            rows: x.rows,
            k: x.columns,
            classes: w.rows,
            chunk: u64::from(op.chunk),
            dtype: x.dtype,
        };
        Ok(Self { x, w, bias, targets, sizes })
    }

    /// The chunks of rows as (first row, rows); while preparing only the first, which is the largest.
    fn chunks(&self, preparing: bool) -> impl Iterator<Item = (u64, u64)> + use<> {
        let LossSizes { rows, chunk, .. } = self.sizes;
        let count = if preparing { 1 } else { rows.div_ceil(chunk) };
        (0..count).map(move |i| (i * chunk, chunk.min(rows - i * chunk)))
    }

    /// Largest number of rows of a chunk for which the library is asked. It does not depend on the step.
    fn largest_chunk(&self) -> u64 {
        self.sizes.chunk.min(MANY_ROWS)
    }

    /// Writes the products of rows x with the weight, in f32, to `logits`.
    fn logits(
        &self,
        call: &mut OpLaunch<'_>,
        x: DeviceTensor,
        logits: u64,
        library: Workspace,
    ) -> Result<(), DeviceError> {
        let LossSizes { k, classes: n, dtype, .. } = self.sizes;
        let w = self.w.address;
        let rows = x.rows;
        let tf32 = false; // The loss is computed in f32 whatever the linear layers are computed in.
        if !library_sums_rows(dtype, OperandFormat::Stored, [n, k]) {
            let product = OwnProduct { dtype, tf32, x: x.address, w, y: logits, rows, n, k, accumulate: false };
            return own(call, &product);
        }
        let product = Product::Logits;
        let form = ProductForm { product, n, k, dtype, tf32, out: DType::F32, rows: self.largest_chunk() };
        let operands = ProductOperands {
            x: x.address,
            y: w,
            d: logits,
            rows,
            accumulate: false,
            workspace: (library.address, library.bytes.0),
        };
        if call.preparing {
            call.gemm.prepare_product(form)?;
        } else {
            call.gemm.run_product(call.context, form, &operands)?;
        }
        Ok(())
    }

    /// Returns a kernel on rows of logits, and its grid for `rows` rows.
    fn kernel(&self, entry: &'static str, rows: u64) -> (Kernel, LaunchShape) {
        let bias = self.bias.map_or(DType::F32, |bias| bias.dtype);
        let group = group(self.sizes.classes);
        let threads = group.max(128);
        let kernel = rows_kernel(entry, self.sizes.dtype, bias, self.sizes.classes);
        (kernel, LaunchShape::of(rows.div_ceil(threads / group), threads as u32))
    }

    /// Address of the bias; null if there is none.
    fn bias(&self) -> u64 {
        self.bias.map_or(0, |bias| bias.address)
    }
}

/// Number of threads that compute a row.
fn group(classes: u64) -> u64 {
    if classes <= WARP_CLASSES { 32 } else { 256 }
}

fn rows_kernel(entry: &'static str, dtype: DType, bias: DType, classes: u64) -> Kernel {
    Kernel::new(KernelFile::CrossEntropy, entry, dtype)
        .with("BIAS", code(bias))
        .with("GROUP", group(classes) as i64)
        .with("WIDTH", row_width(DType::F32, classes) as i64)
}

fn counted_kernel(dtype: DType, columns: u64) -> Kernel {
    Kernel::new(KernelFile::CrossEntropy, "counted_rows", dtype).with("WIDTH", row_width(dtype, columns) as i64)
}

fn total_kernel() -> Kernel {
    Kernel::new(KernelFile::CrossEntropy, "loss_total", DType::F32)
}

pub(super) fn linear_cross_entropy(
    call: &mut OpLaunch<'_>,
    op: &LinearCrossEntropy,
) -> Result<(), DeviceError> {
    let head = LossHead::new(call, op, 0)?;
    let loss = call.output_if(0)?;
    let lse = call.output_if(1)?;
    let mut cross_entropy = None;
    let mut z_term = None;
    if op.z_loss != 0.0 {
        cross_entropy = call.output_if(2)?;
        z_term = call.output_if(3)?;
    }
    let parts = head.sizes.loss_parts();
    let [logits, terms, own_lse, library] = carve(call, parts)?;
    let library = Workspace { address: library, bytes: parts[3] };
    let lse = lse.map_or(own_lse, |lse| lse.address);
    for (first, rows) in head.chunks(call.preparing) {
        head.logits(call, part(head.x, first, rows), logits, library)?;
        let (kernel, shape) = head.kernel("cross_entropy", rows);
        // Targets, log-sum-exps and terms have 4 bytes a row.
        let args = CrossEntropyArgs {
            logits,
            bias: head.bias(),
            targets: head.targets.address + first * 4,
            lses: lse + first * 4,
            terms: terms + first * 4,
            status: call.status(),
            rows,
            classes: int(head.sizes.classes),
        };
        call.kernel(&kernel, shape, &args)?;
    }
    let args = LossTotalArgs {
        lses: lse,
        terms,
        loss: loss.map_or(0, |out| out.address),
        cross_entropy: cross_entropy.map_or(0, |out| out.address),
        z_term: z_term.map_or(0, |out| out.address),
        rows: head.sizes.rows,
        z: op.z_loss,
    };
    call.kernel(&total_kernel(), LaunchShape::of(1, 1024), &args)
}

pub(super) fn linear_cross_entropy_grad(
    call: &mut OpLaunch<'_>,
    op: &LinearCrossEntropyGrad,
) -> Result<(), DeviceError> {
    let bias = usize::from(op.forward.bias);
    let head = LossHead::new(call, &op.forward, 1)?;
    let dloss = call.input(0)?;
    let lse = call.input(4 + bias)?;
    let dx = call.output_if(0)?;
    let dw = call.output_if(1)?;
    let db = if op.forward.bias { call.output_if(2)? } else { None };
    let LossHead { x, w, targets, sizes, .. } = head;
    let LossSizes { k, classes, dtype, .. } = sizes;
    for out in [dx, dw].into_iter().flatten() {
        same_types(call, dtype, &[out])?;
    }
    let padded = sizes.padded();
    let parts = sizes.grad_parts();
    let [logits, g, counted, w_t, g_t, x_t, wide_dw, wide_db, sums, library] = carve(call, parts)?;
    let library = Workspace { address: library, bytes: parts[9] };
    if dx.is_some() {
        transpose(call, w, w_t, padded)?;
    }
    // f32 sums of chunks need no rounding, so they are added in dw itself.
    let sum_dw = dw.map(|dw| if dtype == DType::F32 { dw.address } else { wide_dw });
    for (first, rows) in head.chunks(call.preparing) {
        let chosen = DeviceTensor { address: targets.address + first * 4, rows, ..targets };
        let x = counted_rows(call, part(x, first, rows), chosen, counted, classes)?;
        head.logits(call, x, logits, library)?;
        let (kernel, shape) = head.kernel("cross_entropy_grad", rows);
        let args = CrossEntropyGradArgs {
            logits,
            bias: head.bias(),
            targets: chosen.address,
            lses: lse.address + first * 4,
            dloss: dloss.address,
            g,
            status: call.status(),
            rows,
            classes: int(classes),
            stride: int(padded),
            z: op.forward.z_loss,
        };
        call.kernel(&kernel, shape, &args)?;
        let g = DeviceTensor { address: g, rows, columns: padded, dtype };
        if let Some(dx) = dx {
            let y = part(dx, first, rows).address;
            let factors = ForwardMatmul { x: g.address, w: w_t, y, rows };
            forward(call, GemmForm::new(k, padded, dtype), factors, library)?;
        }
        if let Some(sum_dw) = sum_dw {
            let over = OverRows { x, y: g, tf32: false, classes, y_t: g_t, x_t, library };
            if library_sums_rows(dtype, OperandFormat::Stored, [padded, k]) {
                over.by_library(call, sum_dw, DType::F32, head.largest_chunk(), first > 0)?;
            } else {
                over.by_own(call, sum_dw, first > 0)?;
            }
        }
        if db.is_some() {
            let add = (first > 0).then_some(wide_db);
            column_sums(
                call,
                g,
                sums,
                add,
                ColumnSumsOutput { at: wide_db, dtype: DType::F32, columns: classes },
            )?;
        }
    }
    if sizes.rows == 0 && !call.preparing {
        for out in [dw, db].into_iter().flatten() {
            zero(call, out.address, Bytes(out.elements() * out.dtype.size()))?;
        }
        return Ok(());
    }
    if let Some(dw) = dw
        && dtype != DType::F32
    {
        round(call, wide_dw, dw.address, dtype, classes * k)?;
    }
    if let Some(db) = db {
        round(call, wide_db, db.address, db.dtype, classes)?;
    }
    Ok(())
}

/// Copies rows to `to`, with zeros in those that do not count.
fn counted_rows(
    call: &mut OpLaunch<'_>,
    x: DeviceTensor,
    targets: DeviceTensor,
    to: u64,
    classes: u64,
) -> Result<DeviceTensor, DeviceError> {
    const ACCESSES: u64 = 4 * 256;
    let accesses = x.columns / row_width(x.dtype, x.columns);
    let shape = LaunchShape::of((x.rows * accesses).div_ceil(ACCESSES), 256);
    let args = CountedRowsArgs {
        x: x.address,
        targets: targets.address,
        y: to,
        rows: x.rows,
        classes: int(classes),
        accesses: int(accesses),
    };
    call.kernel(&counted_kernel(x.dtype, x.columns), shape, &args)?;
    Ok(DeviceTensor { address: to, ..x })
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![total_kernel()];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        // Amino acids, codons or bytes, and vocabularies of words.
        for classes in [33, 256, 50_257, 65_536] {
            let biases = [DType::F32, dtype];
            for bias in &biases[usize::from(dtype == DType::F32)..] {
                for entry in ["cross_entropy", "cross_entropy_grad"] {
                    kernels.push(rows_kernel(entry, dtype, *bias, classes));
                }
            }
        }
        kernels.extend([1280, 33].map(|columns| counted_kernel(dtype, columns)));
    }
    kernels
}
