//! Softmax over rows, the mean of each sequence's rows, and the gradients of both.
//!
//! Invariant: a row's softmax uses sixteen interleaved partial sums, added in a fixed tree. A segment's mean adds its
//! rows in f64, in order from the first to the last.

use crate::Cpu;
use crate::element::Element;
use crate::simd::isa::SimdKernel;
use crate::simd::math::exp;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;

/// Softmax: y = exp(x - max) / sum exp(x - max) for each row. `y` may be exactly `x`.
pub fn softmax(cpu: &Cpu, x: Rows<'_>, y: RowsMut<'_>) {
    assert!(y.rows() == x.rows() && y.cols() == x.cols(), "x and y of one shape");
    if x.cols() > 0 {
        cpu.by_rows(x.rows(), x.cols(), &|range| cpu.isa().run(SoftmaxRows { x, y: &y, range }));
    }
}

/// The rows of each sequence that a mean is taken over.
#[derive(Clone, Copy)]
pub struct MeanSpans<'a> {
    /// (start, end) of every sequence, ascending and disjoint.
    pub spans: &'a [[u32; 2]],
    /// Rows that are left out at the start of each span, and at its end (ESM-2 averages residues only, so 1 and 1).
    pub skip_first: usize,
    /// Rows that are left out at the end.
    pub skip_last: usize,
}

impl MeanSpans<'_> {
    /// The averaged rows of span number `segment`.
    fn rows(&self, segment: usize) -> Range<usize> {
        let [start, end] = self.spans[segment].map(|row| row as usize);
        // The start is limited to `end`, so a span with more skipped rows than rows is an empty range.
        (start + self.skip_first).min(end)..end.saturating_sub(self.skip_last)
    }
}

/// Mean over each span's rows: `y[s]` is the mean of the averaged rows of span s. The sums are f64, because an f32 sum
/// over 3 000 rows would lose up to four digits. A span with no row left gives zeros.
pub fn segment_mean<E: Element>(cpu: &Cpu, x: Rows<'_, E>, segments: MeanSpans<'_>, y: RowsMut<'_>) {
    let count = segments.spans.len();
    assert!(y.rows() == count && y.cols() == x.cols(), "y is (spans, columns of x)");
    crate::check_spans(segments.spans, x.rows());
    let parts = x.cols().div_ceil(CHUNK);
    cpu.pool().run(count * parts, &|task, _| {
        let segment = task / parts;
        let part = task % parts;
        let columns = part * CHUNK..x.cols().min((part + 1) * CHUNK);
        cpu.isa().run(SegmentMeanTask { x, rows: segments.rows(segment), columns, segment, y: &y });
    });
}

/// Gradient of softmax: dx = y (dy - sum dy y) for each row. `dx` may be exactly `dy` or `y`.
pub fn softmax_grad(cpu: &Cpu, dy: Rows<'_>, y: Rows<'_>, dx: RowsMut<'_>) {
    let rows = dy.rows();
    let cols = dy.cols();
    assert!(y.rows() == rows && y.cols() == cols, "y is ({rows}, {cols})");
    assert!(dx.rows() == rows && dx.cols() == cols, "dx is ({rows}, {cols})");
    cpu.by_rows(rows, cols, &|range| cpu.isa().run(SoftmaxGradRows { dy, y, dx: &dx, range }));
}

/// Gradient of `segment_mean`: `dx[t] = dy[s] / n` for the n rows of span s that are averaged; zero for all other
/// rows.
pub fn segment_mean_grad(cpu: &Cpu, dy: Rows<'_>, segments: MeanSpans<'_>, dx: RowsMut<'_>) {
    let spans = segments.spans;
    assert!(dy.rows() == spans.len() && dy.cols() == dx.cols(), "dy is (spans, columns of dx)");
    crate::check_spans(spans, dx.rows());
    cpu.by_rows(dx.rows(), dx.cols(), &|range| {
        for t in range {
            let segment = spans.partition_point(|span| span[1] as usize <= t);
            let averaged = if segment < spans.len() { segments.rows(segment) } else { 0..0 };
            let share = if averaged.contains(&t) { 1.0 / averaged.len() as f32 } else { 0.0 };
            let from = (share > 0.0).then(|| dy.row(segment));
            cpu.isa().run(RowShare { from, share, dx: &dx, t });
        }
    });
}

/// Columns per task of `segment_mean`: their f64 sums stay in registers and L1.
const CHUNK: usize = 64;

/// Softmax of the rows `range`, for `Isa::run`.
struct SoftmaxRows<'a> {
    x: Rows<'a>,
    y: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for SoftmaxRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.cols();
        for r in self.range.clone() {
            let x = self.x.row(r);
            let y = self.y.row(r);
            // SAFETY: row r of x and y holds `cols` f32, and j + n <= cols; the row of y is read only where it has been
            // written.
            unsafe {
                let mut top = s.splat(f32::NEG_INFINITY);
                for j in (0..cols).step_by(LANES) {
                    let n = LANES.min(cols - j);
                    let v = s.load_n(x.add(j), n);
                    top = s.max(top, s.first(v, top, n));
                }
                let top = s.splat(s.max_lane(top));
                let mut sum = s.splat(0.0);
                for j in (0..cols).step_by(LANES) {
                    let n = LANES.min(cols - j);
                    let e = exp(s, s.sub(s.load_n(x.add(j), n), top));
                    s.store_n(y.add(j), e, n);
                    sum = s.add(sum, s.first(e, s.splat(0.0), n));
                }
                let sum = s.splat(s.sum(sum));
                for j in (0..cols).step_by(LANES) {
                    let n = LANES.min(cols - j);
                    s.store_n(y.add(j), s.div(s.load_n(y.add(j), n), sum), n);
                }
            }
        }
    }
}

/// Mean over `rows` of the columns `columns`, written to row `segment` of y.
struct SegmentMeanTask<'a, E> {
    x: Rows<'a, E>,
    rows: Range<usize>,
    columns: Range<usize>,
    segment: usize,
    y: &'a RowsMut<'a>,
}

impl<E: Element> SimdKernel for SegmentMeanTask<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let mut sums = [0.0f64; CHUNK];
        let sums = &mut sums[..self.columns.len()];
        for t in self.rows.clone() {
            let row = self.x.row(t).wrapping_add(self.columns.start);
            // SAFETY: these columns of row t lie in x.
            let row = unsafe { core::slice::from_raw_parts(row, sums.len()) };
            for (sum, &value) in sums.iter_mut().zip(row) {
                *sum += f64::from(value.wide());
            }
        }
        let count = self.rows.len().max(1) as f64;
        for (j, sum) in sums.iter().enumerate() {
            let to = self.y.row(self.segment).wrapping_add(self.columns.start + j);
            // SAFETY: an element of y that only this task writes.
            unsafe { to.write((sum / count) as f32) };
        }
    }
}

/// Softmax gradient of the rows `range`, for `Isa::run`.
struct SoftmaxGradRows<'a> {
    dy: Rows<'a>,
    y: Rows<'a>,
    dx: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for SoftmaxGradRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.y.cols();
        for r in self.range.clone() {
            let dy = self.dy.row(r);
            let y = self.y.row(r);
            let dx = self.dx.row(r);
            // SAFETY: row r of dy, y and dx holds `cols` f32; elements are read before they are written.
            unsafe {
                let mut sum = s.splat(0.0);
                for j in (0..cols).step_by(LANES) {
                    let n = LANES.min(cols - j);
                    sum = s.fma(s.load_n(dy.add(j), n), s.load_n(y.add(j), n), sum);
                }
                let sum = s.splat(s.sum(sum));
                for j in (0..cols).step_by(LANES) {
                    let n = LANES.min(cols - j);
                    let v = s.mul(s.load_n(y.add(j), n), s.sub(s.load_n(dy.add(j), n), sum));
                    s.store_n(dx.add(j), v, n);
                }
            }
        }
    }
}

/// Writes row `t` of dx: the row `from` times `share`, or zeros if `from` is `None`.
struct RowShare<'a> {
    from: Option<*const f32>,
    share: f32,
    dx: &'a RowsMut<'a>,
    t: usize,
}

impl SimdKernel for RowShare<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.dx.cols();
        for j in (0..cols).step_by(LANES) {
            let n = LANES.min(cols - j);
            // SAFETY: `from` is a row of `cols` columns, like row t of dx, which only this task writes.
            unsafe {
                let v = self.from.map_or(s.splat(0.0), |from| s.load_n(from.add(j), n));
                s.store_n(self.dx.row(self.t).add(j), s.mul(v, s.splat(self.share)), n);
            }
        }
    }
}
