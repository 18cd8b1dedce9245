//! Output projection with softmax cross-entropy, a chunk of rows at a time, so that the logits of all rows never exist.
//! Invariant: rows that do not count contribute nothing, whatever they hold.

use super::linear_grad::{
    Factors, OverRows, Sums, carve, column_sums, forward, own, part, round, same_types, transpose, zero,
};
use super::{Call, Tensor};
use crate::gemm::{GemmForm, MANY_ROWS, OwnProduct, Product, ProductForm, ProductOperands};
use crate::kernel::{Arg, File, Kernel, Shape, code};
use crate::row_kernels::row_width;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{LinearCrossEntropy, LinearCrossEntropyGrad, OperandFormat};
use plimsoll_graph::{Bytes, DType};
use plimsoll_plan::{LossSizes, library_sums_rows};

/// Largest number of classes for which a warp computes a row, rather than a block.
const WARP_CLASSES: u64 = 1024;

/// The operands of the loss that its gradient has too.
#[derive(Clone, Copy)]
struct Head {
    x: Tensor,
    w: Tensor,
    bias: Option<Tensor>,
    targets: Tensor,
    sizes: LossSizes,
}

impl Head {
    /// Reads the operands, the first of which is input `at`.
    fn new(call: &Call<'_>, op: &LinearCrossEntropy, at: usize) -> Result<Self, DeviceError> {
        let (x, w) = (call.input(at)?, call.input(at + 1)?);
        let bias = op.bias.then(|| call.input(at + 2)).transpose()?;
        let targets = call.input(at + 2 + usize::from(op.bias))?;
        same_types(call, x.dtype, &[w])?;
        let (rows, k, classes, dtype) = (x.rows, x.columns, w.rows, x.dtype);
        let sizes = LossSizes { rows, k, classes, chunk: u64::from(op.chunk), dtype };
        Ok(Self { x, w, bias, targets, sizes })
    }

    /// The chunks of rows as (first row, rows); while preparing only the first, which is the largest.
    fn chunks(&self, preparing: bool) -> impl Iterator<Item = (u64, u64)> + use<> {
        let LossSizes { rows, chunk, .. } = self.sizes;
        let count = if preparing { 1 } else { rows.div_ceil(chunk) };
        (0..count).map(move |i| (i * chunk, chunk.min(rows - i * chunk)))
    }

    /// Largest number of rows of a chunk for which the library is asked. It does not depend on the step.
    fn most(&self) -> u64 {
        self.sizes.chunk.min(MANY_ROWS)
    }

    /// Writes the products of rows x with the weight, in f32, to `logits`.
    fn logits(
        &self,
        call: &mut Call<'_>,
        x: Tensor,
        logits: u64,
        library: (u64, Bytes),
    ) -> Result<(), DeviceError> {
        let LossSizes { k, classes: n, dtype, .. } = self.sizes;
        let (w, rows) = (self.w.address, x.rows);
        let tf32 = false; // The loss is computed in f32 whatever the linear layers are computed in.
        if !library_sums_rows(dtype, OperandFormat::Stored, [n, k]) {
            let product = OwnProduct { dtype, tf32, x: x.address, w, y: logits, rows, n, k, accumulate: false };
            return own(call, &product);
        }
        let (product, out) = (Product::Logits, DType::F32);
        let form = ProductForm { product, n, k, dtype, tf32, out, rows: self.most() };
        let (x, workspace) = (x.address, (library.0, library.1.0));
        let operands = ProductOperands { x, y: w, d: logits, rows, accumulate: false, workspace };
        match call.preparing {
            true => call.gemm.prepare_product(form)?,
            false => call.gemm.run_product(call.context, form, &operands)?,
        }
        Ok(())
    }

    /// Returns a kernel on rows of logits, and its grid for `rows` rows.
    fn kernel(&self, entry: &'static str, rows: u64) -> (Kernel, Shape) {
        let bias = self.bias.map_or(DType::F32, |bias| bias.dtype);
        let group = group(self.sizes.classes);
        let threads = group.max(128);
        let kernel = rows_kernel(entry, self.sizes.dtype, bias, self.sizes.classes);
        (kernel, Shape::of(rows.div_ceil(threads / group), threads as u32))
    }

    fn bias(&self) -> Arg {
        Arg::pointer(self.bias.map_or(0, |bias| bias.address))
    }
}

/// Number of threads that compute a row.
fn group(classes: u64) -> u64 {
    if classes <= WARP_CLASSES { 32 } else { 256 }
}

fn rows_kernel(entry: &'static str, dtype: DType, bias: DType, classes: u64) -> Kernel {
    Kernel::new(File::CrossEntropy, entry, dtype)
        .with("BIAS", code(bias))
        .with("GROUP", group(classes) as i64)
        .with("WIDTH", row_width(DType::F32, classes) as i64)
}

fn counted_kernel(dtype: DType, columns: u64) -> Kernel {
    Kernel::new(File::CrossEntropy, "counted_rows", dtype).with("WIDTH", row_width(dtype, columns) as i64)
}

fn total_kernel() -> Kernel {
    Kernel::new(File::CrossEntropy, "loss_total", DType::F32)
}

pub(super) fn linear_cross_entropy(call: &mut Call<'_>, op: &LinearCrossEntropy) -> Result<(), DeviceError> {
    let head = Head::new(call, op, 0)?;
    let [loss, lse] = [call.output_if(0)?, call.output_if(1)?];
    let [cross_entropy, z_term] = match op.z_loss != 0.0 {
        true => [call.output_if(2)?, call.output_if(3)?],
        false => [None, None],
    };
    let parts = head.sizes.loss_parts();
    let [logits, terms, own_lse, library] = carve(call, parts)?;
    let lse = lse.map_or(own_lse, |lse| lse.address);
    for (first, rows) in head.chunks(call.preparing) {
        head.logits(call, part(head.x, first, rows), logits, (library, parts[3]))?;
        let (kernel, shape) = head.kernel("cross_entropy", rows);
        let at = |address: u64| Arg::pointer(address + first * 4);
        let rows_at = [at(head.targets.address), at(lse), at(terms)];
        let sizes = [Arg::long(rows), Arg::int(head.sizes.classes)];
        let (logits, bias, status) = (Arg::pointer(logits), head.bias(), call.status());
        let args = [logits, bias, rows_at[0], rows_at[1], rows_at[2], sizes[0], sizes[1], status];
        call.kernel(&kernel, shape, &args)?;
    }
    let [loss, cross_entropy, z_term] =
        [loss, cross_entropy, z_term].map(|out| Arg::pointer(out.map_or(0, |out| out.address)));
    let (lse, terms, rows) = (Arg::pointer(lse), Arg::pointer(terms), Arg::long(head.sizes.rows));
    let args = [lse, terms, loss, cross_entropy, z_term, rows, Arg::float(op.z_loss)];
    call.kernel(&total_kernel(), Shape::of(1, 1024), &args)
}

pub(super) fn linear_cross_entropy_grad(
    call: &mut Call<'_>,
    op: &LinearCrossEntropyGrad,
) -> Result<(), DeviceError> {
    let bias = usize::from(op.forward.bias);
    let head = Head::new(call, &op.forward, 1)?;
    let (dloss, lse) = (call.input(0)?, call.input(4 + bias)?);
    let [dx, dw] = [call.output_if(0)?, call.output_if(1)?];
    let db = if op.forward.bias { call.output_if(2)? } else { None };
    let Head { x, w, targets, sizes, .. } = head;
    let LossSizes { k, classes, dtype, .. } = sizes;
    let outs: [Option<Tensor>; 2] = [dx, dw];
    for out in outs.into_iter().flatten() {
        same_types(call, dtype, &[out])?;
    }
    let padded = sizes.padded();
    let parts = sizes.grad_parts();
    let [logits, g, counted, w_t, g_t, x_t, wide_dw, wide_db, sums, library] = carve(call, parts)?;
    let library = (library, parts[9]);
    if dx.is_some() {
        transpose(call, w, w_t, padded)?;
    }
    // f32 sums of chunks need no rounding, so they are added in dw itself.
    let sum_dw = dw.map(|dw| if dtype == DType::F32 { dw.address } else { wide_dw });
    for (first, rows) in head.chunks(call.preparing) {
        let chosen = Tensor { address: targets.address + first * 4, rows, ..targets };
        let x = counted_rows(call, part(x, first, rows), chosen, counted, classes)?;
        head.logits(call, x, logits, library)?;
        let (kernel, shape) = head.kernel("cross_entropy_grad", rows);
        let lse_at = Arg::pointer(lse.address + first * 4);
        let sizes = [Arg::long(rows), Arg::int(classes), Arg::int(padded)];
        let (bias, z, status) = (head.bias(), Arg::float(op.forward.z_loss), call.status());
        let pointers = [Arg::pointer(logits), bias, chosen.pointer(), lse_at, dloss.pointer(), Arg::pointer(g)];
        let [a, b, c, d, e, f] = pointers;
        call.kernel(&kernel, shape, &[a, b, c, d, e, f, sizes[0], sizes[1], sizes[2], z, status])?;
        let g = Tensor { address: g, rows, columns: padded, dtype };
        if let Some(dx) = dx {
            let y = part(dx, first, rows).address;
            let factors = Factors { x: g.address, w: w_t, y, rows };
            forward(call, GemmForm::new(k, padded, dtype), factors, library)?;
        }
        if let Some(sum_dw) = sum_dw {
            let over = OverRows { x, y: g, tf32: false, classes, transposed: [g_t, x_t], library };
            if library_sums_rows(dtype, OperandFormat::Stored, [padded, k]) {
                over.by_library(call, sum_dw, DType::F32, head.most(), first > 0)?;
            } else {
                over.by_own(call, sum_dw, first > 0)?;
            }
        }
        if db.is_some() {
            let add = (first > 0).then_some(wide_db);
            column_sums(call, g, sums, add, Sums { at: wide_db, dtype: DType::F32, columns: classes })?;
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
    call: &mut Call<'_>,
    x: Tensor,
    targets: Tensor,
    to: u64,
    classes: u64,
) -> Result<Tensor, DeviceError> {
    const ACCESSES: u64 = 4 * 256;
    let accesses = x.columns / row_width(x.dtype, x.columns);
    let shape = Shape::of((x.rows * accesses).div_ceil(ACCESSES), 256);
    let sizes = [Arg::long(x.rows), Arg::int(classes), Arg::int(accesses)];
    let args = [x.pointer(), targets.pointer(), Arg::pointer(to), sizes[0], sizes[1], sizes[2]];
    call.kernel(&counted_kernel(x.dtype, x.columns), shape, &args)?;
    Ok(Tensor { address: to, ..x })
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
