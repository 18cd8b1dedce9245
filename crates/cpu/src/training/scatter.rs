//! Scatter-add of rows by index: the gradients of embeddings and of `select_rows`.
//!
//! Invariant: each element of the result adds its rows in ascending order. Tasks divide the columns, so no two tasks
//! write the same element, and a frequent token costs no more than a rare one.

use crate::Cpu;
use crate::rows::embed::EsmTokenDropout;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use crate::{rows::columns, rows::elementwise};

/// Outputs of the gradient of an embedding; each is computed if given.
pub struct EmbeddingGradients<'a> {
    /// Gradient of the table.
    pub dtable: Option<RowsMut<'a>>,
    /// Gradient of the row that is added to every token's.
    pub drow: Option<&'a mut [f32]>,
}

/// Scatter-add: `y[ids[i]] += x[i]` for every i in order, starting from zeros.
pub fn scatter(cpu: &Cpu, ids: &[u32], x: Rows<'_>, y: RowsMut<'_>) {
    embed_grad(cpu, ids, x, None, EmbeddingGradients { dtable: Some(y), drow: None });
}

/// Gradient of an embedding: `dtable[ids[t]] += scale dx[t]` for every t in order, starting from zeros, and drow
/// is the sum of `scale dx[t]`, where scale is the token's weight. Panics if the shapes do not match or an id is
/// out of range.
pub fn embed_grad(
    cpu: &Cpu,
    ids: &[u32],
    dx: Rows<'_>,
    dropout: Option<EsmTokenDropout<'_>>,
    gradients: EmbeddingGradients<'_>,
) {
    let EmbeddingGradients { mut dtable, drow } = gradients;
    let cols = dx.cols();
    assert_eq!(dx.rows(), ids.len(), "one row per token");
    assert!(dtable.as_ref().is_none_or(|table| table.cols() == cols), "columns of the table");
    let rows = dtable.as_ref().map_or(usize::MAX, RowsMut::rows);
    assert!(ids.iter().all(|&id| (id as usize) < rows), "an index outside of {rows} rows");
    if let Some(dropout) = dropout {
        crate::check_spans(dropout.spans, ids.len());
    }
    if let Some(table) = &mut dtable {
        elementwise::fill(cpu, 0.0, table.columns(0, cols));
    }
    let drow = columns::start_of(drow, cols);
    cpu.pool().run(cols.div_ceil(WIDTH), &|task, _| {
        let dtable = dtable.as_ref();
        let drow = drow as *mut f32;
        let columns = [task * WIDTH, cols.min((task + 1) * WIDTH)];
        cpu.isa().run(ScatterColumns { ids, dx, dropout, dtable, drow, columns });
    });
}

/// Columns per task: two cache lines.
const WIDTH: usize = 2 * LANES;

/// Tokens per partial sum of the added row, if no sequences are given.
const BLOCK: usize = 64;

/// The columns `columns[0]..columns[1]` of the gradient, for `Isa::run`. A null `drow` is not computed.
struct ScatterColumns<'a> {
    ids: &'a [u32],
    dx: Rows<'a>,
    dropout: Option<EsmTokenDropout<'a>>,
    dtable: Option<&'a RowsMut<'a>>,
    drow: *mut f32,
    columns: [usize; 2],
}

impl SimdKernel for ScatterColumns<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [first, end] = self.columns;
        for j in (first..end).step_by(LANES) {
            let n = LANES.min(end - j);
            let zero = s.splat(0.0);
            let mut total = zero;
            match self.dropout {
                Some(dropout) => {
                    for span in dropout.spans {
                        let span = span[0] as usize..span[1] as usize;
                        let scale = dropout.weight(&self.ids[span.clone()]);
                        let mut sum = zero;
                        for t in span.filter(|&t| self.ids[t] != dropout.mask_id) {
                            sum = self.add(s, t, scale, [j, n], sum);
                        }
                        total = s.add(total, sum);
                    }
                }
                None => {
                    for start in (0..self.ids.len()).step_by(BLOCK) {
                        let mut sum = zero;
                        for t in start..self.ids.len().min(start + BLOCK) {
                            sum = self.add(s, t, 1.0, [j, n], sum);
                        }
                        total = s.add(total, sum);
                    }
                }
            }
            if !self.drow.is_null() {
                // SAFETY: one element per column; these columns belong to this task.
                unsafe { s.store_n(self.drow.add(j), total, n) };
            }
        }
    }
}

impl ScatterColumns<'_> {
    /// Adds token `t`, times `scale`, to its row of the table and to `sum`.
    #[inline(always)]
    fn add<S: Simd>(&self, s: S, t: usize, scale: f32, [j, n]: [usize; 2], sum: S::V) -> S::V {
        // SAFETY: columns j..j + n exist in row t of dx and in the table, whose indices were checked; only this task
        // writes them.
        unsafe {
            let v = s.mul(s.load_n(self.dx.row(t).add(j), n), s.splat(scale));
            if let Some(table) = self.dtable {
                let to = table.row(self.ids[t] as usize).add(j);
                s.store_n(to, s.add(s.load_n(to, n), v), n);
            }
            s.add(sum, v)
        }
    }
}
