//! Embedding lookup: gathers rows of an embedding table by token id.
//!
//! Invariant: a token's row depends on its id and, with ESM's token dropout, on the share of mask tokens in its own
//! sequence. An id outside the table panics; memory outside the table is never read.

use crate::Cpu;
use crate::element::Element;
use crate::simd::isa::Kernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};

/// Embedding lookup: `y[t] = table[ids[t]] + plus`. `plus` is an optional row that is added to every token's, for
/// example BERT's token-type embedding. Panics if the shapes do not match or an id is out of range.
pub fn gather<E: Element>(cpu: &Cpu, ids: &[u32], table: Rows<'_, E>, plus: Option<&[E]>, y: RowsMut<'_, E>) {
    check(ids, table, plus, &y);
    cpu.by_rows(ids.len(), table.cols(), &|range| {
        for t in range {
            cpu.isa().run(Gather { from: pick(table, ids[t]), scale: 1.0, plus, y: &y, t });
        }
    });
}

/// Embedding lookup with ESM's token dropout at inference: `y[t] = (table[ids[t]] + plus) * scale`, and zeros for
/// tokens `mask_id`. scale = keep / (1 - n_mask / n) over the n tokens of t's sequence, all in f32 (fair-esm,
/// `esm2.py`; keep = 0.88 = 1 - 0.15 * 0.8 is the share of tokens that were not masked in training). `spans` are
/// the (start, end) of the sequences, ascending and disjoint; rows outside of them are not written. Panics as
/// [`gather`].
#[allow(clippy::too_many_arguments)] // the op's inputs and outputs, each once
pub(crate) fn gather_esm<E: Element>(
    cpu: &Cpu,
    ids: &[u32],
    spans: &[[u32; 2]],
    mask_id: u32,
    keep: f32,
    table: Rows<'_, E>,
    plus: Option<&[E]>,
    y: RowsMut<'_, E>,
) {
    check(ids, table, plus, &y);
    crate::check_spans(spans, ids.len());
    cpu.pool().run(spans.len(), &|task, _| {
        let span = spans[task][0] as usize..spans[task][1] as usize;
        let masks = ids[span.clone()].iter().filter(|&&id| id == mask_id).count();
        let scale = keep / (1.0 - masks as f32 / span.len() as f32);
        for t in span {
            let from = (ids[t] != mask_id).then(|| pick(table, ids[t])).flatten();
            cpu.isa().run(Gather { from, scale, plus, y: &y, t });
        }
    });
}

/// Panics unless the shapes match.
fn check<E: Element>(ids: &[u32], table: Rows<'_, E>, plus: Option<&[E]>, y: &RowsMut<'_, E>) {
    assert!(plus.is_none_or(|p| p.len() == table.cols()), "the added row has the table's columns");
    assert_eq!(y.rows(), ids.len(), "one row per token");
    assert_eq!(y.cols(), table.cols(), "columns of the table");
}

/// Address of the table's row `id`. Panics if it is out of range. The result is always `Some`.
fn pick<E: Element>(table: Rows<'_, E>, id: u32) -> Option<*const E> {
    assert!((id as usize) < table.rows(), "token {id} of a table of {}", table.rows());
    Some(table.row(id as usize))
}

/// Row `t` of y: (the row `from` + `plus`) times `scale`, or zeros if `from` is `None`. For `Isa::run`.
struct Gather<'a, E> {
    from: Option<*const E>,
    scale: f32,
    plus: Option<&'a [E]>,
    y: &'a RowsMut<'a, E>,
    t: usize,
}

impl<E: Element> Kernel for Gather<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.y.cols();
        for j in (0..cols).step_by(LANES) {
            let n = LANES.min(cols - j);
            // SAFETY: j + n <= cols, the length of the table's row `from`, of `plus` and of row t of y, which
            // only this task writes.
            unsafe {
                let v = match (self.from, self.plus) {
                    (Some(from), Some(plus)) => {
                        s.add(E::load_n(s, from.add(j), n), E::load_n(s, plus.as_ptr().add(j), n))
                    }
                    (Some(from), None) => E::load_n(s, from.add(j), n),
                    (None, _) => s.splat(0.0),
                };
                let v = if self.from.is_some() { s.mul(v, s.splat(self.scale)) } else { v };
                E::store_n(s, self.y.row(self.t).add(j), v, n);
            }
        }
    }
}
