//! The last affine map and the cross-entropy of its softmax, a few rows of logits at a time; and the gradient.
//!
//! Invariant: rows whose target is negative cost nothing: a chunk is the next rows that count, side by side. Rows
//! count in ascending order, in chunks of one size, and each logit is a product of its own row, so the loss and
//! the gradients depend on the chunk's size but not on the threads; `lse` not even on the chunk's size.

use super::gemm::Epilogue;
use super::isa::Kernel;
use super::math::exp;
use super::product::{self, Factor, add_product, column_sums, product};
use super::simd::{LANES, Simd};
use super::view::{Rows, RowsMut};
use super::{Cpu, elementwise};
use core::ops::Range;
use plimsoll_plan::chunk_words;

/// What the loss is of.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// (R, K)
    pub x: Rows<'a>,
    /// (V, K)
    pub w: Rows<'a>,
    /// (V)
    pub bias: Option<&'a [f32]>,
    /// R classes below V; negative where the row does not count.
    pub targets: &'a [i32],
    /// Most rows of logits that exist at a time.
    pub chunk: usize,
    /// Weight of the squared lse.
    pub z_loss: f32,
}

/// Where the gradients go; `None` is not wanted.
pub struct Gradients<'a> {
    /// (R, K)
    pub dx: Option<RowsMut<'a>>,
    /// (V, K)
    pub dw: Option<RowsMut<'a>>,
    /// (V)
    pub db: Option<&'a mut [f32]>,
}

/// What [`loss`] computes, each rounded from f64 by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Losses {
    /// The sum of both terms.
    pub sum: f32,
    /// `sum_r (lse_r - logit[r, target_r])`.
    pub cross_entropy: f32,
    /// `z sum_r lse_r^2`.
    pub z: f32,
}

/// The sum over rows that count of `lse - logit[target] + z lse^2`, in f64 and in the order of the rows, and the sums
/// of its two terms; `lse` (R)
/// gets ln sum exp(logit), 0 for the other rows. `workspace` holds a product's for
/// each thread, and `plimsoll_plan::chunk_words`. Panics, as all here, on sizes
/// that do not fit together and on targets past V.
pub fn loss(cpu: &Cpu, head: Head<'_>, mut lse: Option<&mut [f32]>, workspace: &mut [f32]) -> Losses {
    let (v, mut total, mut cross_entropy, mut z) = (head.w.rows(), 0.0, 0.0, 0.0);
    if let Some(lse) = lse.as_deref_mut() {
        lse.fill(0.0);
    }
    let mut room = Room::new(cpu, head, workspace);
    while let Some(chunk) = room.next(cpu) {
        let (logits, sums) = (Rows::new(room.logits, chunk, v, v), RowsMut::new(room.sums, chunk, 1, 1));
        cpu.by_rows(chunk, v, &|range| cpu.isa().run(LogSumExp { logits, sums: &sums, range }));
        for (i, &r) in room.index[..chunk].iter().enumerate() {
            let at_target = room.logits[i * v + head.targets[r as usize] as usize];
            let sum = f64::from(room.sums[i]);
            let (entropy, squared) = (sum - f64::from(at_target), f64::from(head.z_loss) * sum * sum);
            total += entropy + squared;
            cross_entropy += entropy;
            z += squared;
            if let Some(lse) = lse.as_deref_mut() {
                lse[r as usize] = room.sums[i];
            }
        }
    }
    Losses { sum: total as f32, cross_entropy: cross_entropy as f32, z: z as f32 }
}

/// With g = dloss (softmax (1 + 2 z lse) - onehot(target)), zero for rows that do not count: dx = g W, dw = g^T x,
/// db = sum g. Logits are computed once more; `lse` is what `loss` gave.
pub fn gradients(
    cpu: &Cpu,
    head: Head<'_>,
    dloss: f32,
    lse: &[f32],
    mut to: Gradients<'_>,
    workspace: &mut [f32],
) {
    assert_eq!(lse.len(), head.x.rows(), "an lse for each row");
    let (v, k) = (head.w.rows(), head.x.cols());
    clear(cpu, &head, &mut to);
    let mut room = Room::new(cpu, head, workspace);
    while let Some(chunk) = room.next(cpu) {
        let g = RowsMut::new(room.logits, chunk, v, v);
        cpu.by_rows(chunk, v, &|range| {
            cpu.isa().run(Softmax { head: &head, dloss, lse, index: room.index, g: &g, range });
        });
        let (g, x) = (Rows::new(room.logits, chunk, v, v), Rows::new(room.rows, chunk, k, k));
        if let Some(dw) = &mut to.dw {
            add_product(cpu, Factor::Transposed(g), Factor::Stored(x), dw.part(0, v), room.units);
        }
        if let Some(db) = &mut to.db {
            column_sums(cpu, g, true, db);
        }
        if let Some(dx) = &to.dx {
            // The rows of x have done their part.
            let y = RowsMut::new(room.rows, chunk, k, k);
            product(cpu, Factor::Stored(g), Factor::Stored(head.w), Epilogue::default(), y, room.units);
            room.scatter(cpu, chunk, dx);
        }
    }
}

/// Zeros where the chunks will add, and in the rows that no chunk has.
fn clear(cpu: &Cpu, head: &Head<'_>, to: &mut Gradients<'_>) {
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

/// The workspace, and how far the rows have come.
struct Room<'a> {
    head: Head<'a>,
    /// The first row that was not looked at.
    next: usize,
    /// Each thread's, for products.
    units: &'a mut [f32],
    /// (chunk, V)
    logits: &'a mut [f32],
    /// (chunk, K): the rows of x that count, side by side.
    rows: &'a mut [f32],
    /// Their lse.
    sums: &'a mut [f32],
    /// Which they are.
    index: &'a mut [u32],
}

impl<'a> Room<'a> {
    fn new(cpu: &Cpu, head: Head<'a>, workspace: &'a mut [f32]) -> Self {
        let (v, k) = (head.w.rows(), head.x.cols());
        assert_eq!(head.w.cols(), k, "columns of w");
        assert_eq!(head.targets.len(), head.x.rows(), "a target for each row");
        let chunk = head.chunk.min(head.x.rows());
        let (units, rest) = workspace.split_at_mut(product::WORKSPACE_BYTES / 4 * cpu.threads());
        let rest = &mut rest[..chunk_words(chunk as u64, k as u64, v as u64) as usize];
        let (logits, rest) = rest.split_at_mut(chunk * v);
        let (rows, rest) = rest.split_at_mut(chunk * k);
        let (sums, rest) = rest.split_at_mut(chunk);
        Self { head, next: 0, units, logits, rows, sums, index: bytemuck::cast_slice_mut(rest) }
    }

    /// Takes the next rows that count and computes their logits; how many there are, if there are any.
    fn next(&mut self, cpu: &Cpu) -> Option<usize> {
        let (head, mut count) = (self.head, 0);
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
        let (v, k) = (head.w.rows(), head.x.cols());
        let rows = RowsMut::new(self.rows, count, k, k);
        cpu.by_rows(count, k, &|range| {
            for i in range {
                // SAFETY: rows of k f32 each; a task alone writes its own.
                unsafe { rows.row(i).copy_from_nonoverlapping(head.x.row(self.index[i] as usize), k) };
            }
        });
        let (x, w) = (Factor::Stored(Rows::new(self.rows, count, k, k)), Factor::Transposed(head.w));
        let epilogue = Epilogue { bias: head.bias, ..Default::default() };
        product(cpu, x, w, epilogue, RowsMut::new(self.logits, count, v, v), self.units);
        Some(count)
    }

    /// Copies what stands in `rows` to where those rows of x are.
    fn scatter(&self, cpu: &Cpu, chunk: usize, to: &RowsMut<'_>) {
        let k = self.head.x.cols();
        let rows = Rows::new(self.rows, chunk, k, k);
        cpu.by_rows(chunk, k, &|range| {
            for i in range {
                // SAFETY: rows of k f32 each; the rows that count are distinct, and a task has its own.
                unsafe { to.row(self.index[i] as usize).copy_from_nonoverlapping(rows.row(i), k) };
            }
        });
    }
}

/// ln sum exp of each row, from its largest element on (Blanchard, Higham and Higham 2021, "Accurately computing
/// the log-sum-exp"); sums of 1024 elements add up in f64.
struct LogSumExp<'a> {
    logits: Rows<'a>,
    sums: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl Kernel for LogSumExp<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const BLOCK: usize = 64 * LANES;
        let cols = self.logits.cols();
        let width = |j: usize| LANES.min(cols - j);
        for r in self.range.clone() {
            let x = self.logits.row(r);
            // SAFETY: row r holds `cols` f32, and j + width(j) <= cols; its sum is this task's to write.
            unsafe {
                let mut top = s.splat(f32::NEG_INFINITY);
                for j in (0..cols).step_by(LANES) {
                    let v = s.load_n(x.add(j), width(j));
                    top = s.max(top, s.first(v, top, width(j)));
                }
                let largest = s.max_lane(top);
                let top = s.splat(largest);
                let mut total = 0.0;
                for block in (0..cols).step_by(BLOCK) {
                    let mut sum = s.splat(0.0);
                    for j in (block..cols.min(block + BLOCK)).step_by(LANES) {
                        let e = exp(s, s.sub(s.load_n(x.add(j), width(j)), top));
                        sum = s.add(sum, s.first(e, s.splat(0.0), width(j)));
                    }
                    total += f64::from(s.sum(sum));
                }
                // `libm`: the same bits on every machine.
                *self.sums.row(r) = (f64::from(largest) + libm::log(total)) as f32;
            }
        }
    }
}

/// Logits to gradients of logits, in place.
struct Softmax<'a> {
    head: &'a Head<'a>,
    dloss: f32,
    lse: &'a [f32],
    index: &'a [u32],
    g: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl Kernel for Softmax<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.g.cols();
        for i in self.range.clone() {
            let (row, r) = (self.g.row(i), self.index[i] as usize);
            let lse = self.lse[r];
            let factor = s.splat(self.dloss * (1.0 + 2.0 * self.head.z_loss * lse));
            // SAFETY: row i holds `cols` f32 and is this task's; the target is one of them.
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
