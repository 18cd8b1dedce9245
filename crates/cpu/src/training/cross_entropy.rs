//! Linear layer fused with the cross-entropy loss, computed for a chunk of rows at a time so that the whole matrix of
//! logits never exists, and its gradient.
//!
//! Invariant: rows with a negative target are ignored and cost no computation: a chunk holds the next rows that are
//! not ignored, copied to contiguous memory. Rows are taken in ascending order in chunks of a fixed size, so no
//! result depends on the number of threads. Only dw and db, which are sums over rows, depend on the chunk size.

use crate::matmul::linear::MatmulEpilogue;
use crate::matmul::row_major::{self, Factor, MatmulCall, add_matmul, column_sums, matmul};
use crate::simd::isa::SimdKernel;
use crate::simd::math::{exp, log_sum_exp};
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use crate::{Cpu, rows::elementwise};
use core::ops::Range;
use plimsoll_plan::chunk_words;

/// Inputs and attributes of the fused linear layer and loss, for R rows, K input columns and V classes.
#[derive(Clone, Copy)]
pub struct CrossEntropyHead<'a> {
    /// Input of the linear layer (R, K).
    pub x: Rows<'a>,
    /// Weight (V, K).
    pub w: Rows<'a>,
    /// Bias (V).
    pub bias: Option<&'a [f32]>,
    /// Class of each row (R), below V; negative for an ignored row.
    pub targets: &'a [i32],
    /// Maximum number of rows of logits in memory at once.
    pub chunk: usize,
    /// Weight of the z loss, the sum of lse^2.
    pub z_loss: f32,
}

/// Output gradients; `None` is not computed.
pub struct HeadGradients<'a> {
    /// Gradient of x (R, K).
    pub dx: Option<RowsMut<'a>>,
    /// Gradient of the weight (V, K).
    pub dw: Option<RowsMut<'a>>,
    /// Gradient of the bias (V).
    pub db: Option<&'a mut [f32]>,
}

/// Gradient of the loss, and the results of the forward pass that the other gradients are computed from.
#[derive(Clone, Copy)]
pub struct SavedLoss<'a> {
    /// Gradient of the loss.
    pub dloss: f32,
    /// The output `lse` of [`loss`] (R).
    pub lse: &'a [f32],
}

/// Results of [`loss`], each rounded from f64 separately.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyLosses {
    /// The sum of both terms.
    pub sum: f32,
    /// `sum_r (lse_r - logit[r, target_r])`.
    pub cross_entropy: f32,
    /// `z sum_r lse_r^2`.
    pub z: f32,
}

/// Computes the sum of `lse - logit[target] + z lse^2` over the rows that are not ignored, and the sums of its two
/// terms, in f64 and in row order. `lse` (R), if given, receives ln sum exp(logit) of each row, 0 for ignored rows.
/// `workspace` holds [`row_major::WORKSPACE_BYTES`] for each thread and `plan::chunk_words` words. Panics if the shapes
/// do not match or a target is not below V.
pub fn loss(
    cpu: &Cpu,
    head: CrossEntropyHead<'_>,
    mut lse: Option<&mut [f32]>,
    workspace: &mut [f32],
) -> CrossEntropyLosses {
    let v = head.w.rows();
    let mut total = 0.0;
    let mut cross_entropy = 0.0;
    let mut z = 0.0;
    if let Some(lse) = lse.as_deref_mut() {
        lse.fill(0.0);
    }
    let mut chunks = ChunkedLogits::new(cpu, head, workspace);
    while let Some(chunk) = chunks.next(cpu) {
        let logits = Rows::new(chunks.logits, chunk, v, v);
        let sums = RowsMut::new(chunks.sums, chunk, 1, 1);
        cpu.by_rows(chunk, v, &|range| cpu.isa().run(LogSumExpRows { logits, sums: &sums, range }));
        for (i, &r) in chunks.index[..chunk].iter().enumerate() {
            let at_target = chunks.logits[i * v + head.targets[r as usize] as usize];
            let sum = f64::from(chunks.sums[i]);
            let entropy = sum - f64::from(at_target);
            let squared = f64::from(head.z_loss) * sum * sum;
            total += entropy + squared;
            cross_entropy += entropy;
            z += squared;
            if let Some(lse) = lse.as_deref_mut() {
                lse[r as usize] = chunks.sums[i];
            }
        }
    }
    CrossEntropyLosses { sum: total as f32, cross_entropy: cross_entropy as f32, z: z as f32 }
}

/// Computes the gradients of [`loss`]. With g = dloss (softmax (1 + 2 z lse) - onehot(target)), zero for ignored
/// rows: dx = g W, dw = g^T x and db = sum of g over rows. The logits are recomputed.
/// `workspace` and panics as for [`loss`].
pub fn gradients(
    cpu: &Cpu,
    head: CrossEntropyHead<'_>,
    saved: SavedLoss<'_>,
    mut to: HeadGradients<'_>,
    workspace: &mut [f32],
) {
    let SavedLoss { dloss, lse } = saved;
    assert_eq!(lse.len(), head.x.rows(), "an lse for each row");
    let v = head.w.rows();
    let k = head.x.cols();
    clear(cpu, &head, &mut to);
    let mut chunks = ChunkedLogits::new(cpu, head, workspace);
    while let Some(chunk) = chunks.next(cpu) {
        let g = RowsMut::new(chunks.logits, chunk, v, v);
        cpu.by_rows(chunk, v, &|range| {
            cpu.isa().run(LogitGradRows { head: &head, dloss, lse, index: chunks.index, g: &g, range });
        });
        let g = Rows::new(chunks.logits, chunk, v, v);
        let x = Rows::new(chunks.rows, chunk, k, k);
        if let Some(dw) = &mut to.dw {
            add_matmul(cpu, Factor::Transposed(g), Factor::Stored(x), dw.part(0, v), chunks.matmul);
        }
        if let Some(db) = &mut to.db {
            column_sums(cpu, g, true, db);
        }
        if let Some(dx) = &to.dx {
            // The chunk's rows of x are not needed after dw, so dx overwrites them.
            let y = RowsMut::new(chunks.rows, chunk, k, k);
            let call = MatmulCall {
                a: Factor::Stored(g),
                b: Factor::Stored(head.w),
                epilogue: MatmulEpilogue::default(),
                y,
            };
            matmul(cpu, call, chunks.matmul);
            chunks.scatter(cpu, chunk, dx);
        }
    }
}

/// Zeroes the gradients: chunks accumulate into dw and db, and write only the rows of dx that are not ignored.
fn clear(cpu: &Cpu, head: &CrossEntropyHead<'_>, to: &mut HeadGradients<'_>) {
    if let Some(dx) = &mut to.dx {
        assert!(dx.rows() == head.x.rows() && dx.cols() == head.x.cols(), "dx like x");
        elementwise::fill(cpu, 0.0, dx.part(0, head.x.rows()));
    }
    if let Some(dw) = &mut to.dw {
        assert!(dw.rows() == head.w.rows() && dw.cols() == head.w.cols(), "dw like w");
        elementwise::fill(cpu, 0.0, dw.part(0, head.w.rows()));
    }
    if let Some(db) = &mut to.db {
        assert_eq!(db.len(), head.w.rows(), "db like b");
        db.fill(0.0);
    }
}

/// The partitioned workspace, and the position of the next chunk.
struct ChunkedLogits<'a> {
    head: CrossEntropyHead<'a>,
    /// First row that no chunk has examined.
    next: usize,
    /// Workspace of the matmuls, for all threads.
    matmul: &'a mut [f32],
    /// Logits of the chunk (chunk, V), or their gradients.
    logits: &'a mut [f32],
    /// The chunk's rows of x (chunk, K), contiguous; later their gradients.
    rows: &'a mut [f32],
    /// lse of the chunk's rows.
    sums: &'a mut [f32],
    /// Index in x of each of the chunk's rows.
    index: &'a mut [u32],
}

impl<'a> ChunkedLogits<'a> {
    /// Partitions the workspace. Panics if the shapes do not match or the workspace is too small.
    fn new(cpu: &Cpu, head: CrossEntropyHead<'a>, workspace: &'a mut [f32]) -> Self {
        let v = head.w.rows();
        let k = head.x.cols();
        assert_eq!(head.w.cols(), k, "columns of w");
        assert_eq!(head.targets.len(), head.x.rows(), "a target for each row");
        let chunk = head.chunk.min(head.x.rows());
        let (matmul, rest) = workspace.split_at_mut(row_major::WORKSPACE_BYTES / 4 * cpu.threads());
        let rest = &mut rest[..chunk_words(chunk as u64, k as u64, v as u64) as usize];
        let (logits, rest) = rest.split_at_mut(chunk * v);
        let (rows, rest) = rest.split_at_mut(chunk * k);
        let (sums, rest) = rest.split_at_mut(chunk);
        Self { head, next: 0, matmul, logits, rows, sums, index: bytemuck::cast_slice_mut(rest) }
    }

    /// Collects the next rows that are not ignored and computes their logits. Returns the number of rows, `None`
    /// after the last.
    fn next(&mut self, cpu: &Cpu) -> Option<usize> {
        let head = self.head;
        let mut count = 0;
        while self.next < head.targets.len() && count < self.index.len() {
            let target = head.targets[self.next];
            if target >= 0 {
                assert!((target as usize) < head.w.rows(), "target {target} of {} classes", head.w.rows());
                self.index[count] = self.next as u32;
                count += 1;
            }
            self.next += 1;
        }
        if count == 0 {
            return None;
        }
        let v = head.w.rows();
        let k = head.x.cols();
        let rows = RowsMut::new(self.rows, count, k, k);
        cpu.by_rows(count, k, &|range| {
            for i in range {
                // SAFETY: both rows hold k f32; only this task writes row i.
                unsafe { rows.row(i).copy_from_nonoverlapping(head.x.row(self.index[i] as usize), k) };
            }
        });
        let call = MatmulCall {
            a: Factor::Stored(Rows::new(self.rows, count, k, k)),
            b: Factor::Transposed(head.w),
            epilogue: MatmulEpilogue { bias: head.bias, ..Default::default() },
            y: RowsMut::new(self.logits, count, v, v),
        };
        matmul(cpu, call, self.matmul);
        Some(count)
    }

    /// Copies the chunk's contiguous `rows` to their rows of `to`, which has the shape of x.
    fn scatter(&self, cpu: &Cpu, chunk: usize, to: &RowsMut<'_>) {
        let k = self.head.x.cols();
        let rows = Rows::new(self.rows, chunk, k, k);
        cpu.by_rows(chunk, k, &|range| {
            for i in range {
                // SAFETY: both rows hold k f32; the indices are distinct, so no other task writes this row.
                unsafe { to.row(self.index[i] as usize).copy_from_nonoverlapping(rows.row(i), k) };
            }
        });
    }
}

/// ln sum exp of the rows `range`, for `Isa::run`. The largest element is subtracted first, so that exp cannot
/// overflow (Blanchard, Higham and Higham 2021, "Accurately computing the log-sum-exp").
struct LogSumExpRows<'a> {
    logits: Rows<'a>,
    sums: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for LogSumExpRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in self.range.clone() {
            // SAFETY: row r holds the columns of the logits; its sum is written by this task only.
            unsafe {
                let (largest, total) = sum_exp(s, self.logits.row(r), self.logits.cols());
                *self.sums.row(r) = log_sum_exp(largest, total) as f32;
            }
        }
    }
}

/// The largest of `cols` elements, and the sum of the exponentials of all elements relative to it, in f32 for blocks of
/// 1024 elements and in f64 over blocks.
///
/// # Safety
/// `x` must be valid for reads of `cols` elements.
#[inline(always)]
pub(crate) unsafe fn sum_exp<S: Simd>(s: S, x: *const f32, cols: usize) -> (f32, f64) {
    const BLOCK: usize = 64 * LANES;
    // SAFETY: j + n <= cols.
    unsafe {
        let mut top = s.splat(f32::NEG_INFINITY);
        for j in (0..cols).step_by(LANES) {
            let n = LANES.min(cols - j);
            let v = s.load_n(x.add(j), n);
            top = s.max(top, s.first(v, top, n));
        }
        let largest = s.max_lane(top);
        let top = s.splat(largest);
        let mut total = 0.0;
        for block in (0..cols).step_by(BLOCK) {
            let mut sum = s.splat(0.0);
            for j in (block..cols.min(block + BLOCK)).step_by(LANES) {
                let n = LANES.min(cols - j);
                let e = exp(s, s.sub(s.load_n(x.add(j), n), top));
                sum = s.add(sum, s.first(e, s.splat(0.0), n));
            }
            total += f64::from(s.sum(sum));
        }
        (largest, total)
    }
}

/// Replaces the logits of the chunk's rows `range` by their gradients, for `Isa::run`.
struct LogitGradRows<'a> {
    head: &'a CrossEntropyHead<'a>,
    dloss: f32,
    lse: &'a [f32],
    index: &'a [u32],
    g: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for LogitGradRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.g.cols();
        for i in self.range.clone() {
            let row = self.g.row(i);
            let r = self.index[i] as usize;
            let lse = self.lse[r];
            let factor = s.splat(self.dloss * (1.0 + 2.0 * self.head.z_loss * lse));
            // SAFETY: row i holds `cols` f32 and belongs to this task; the target is below `cols`.
            unsafe {
                for j in (0..cols).step_by(LANES) {
                    let width = LANES.min(cols - j);
                    let p = exp(s, s.sub(s.load_n(row.add(j), width), s.splat(lse)));
                    s.store_n(row.add(j), s.mul(factor, p), width);
                }
                *row.add(self.head.targets[r] as usize) -= self.dloss;
            }
        }
    }
}
