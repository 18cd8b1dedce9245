//! Rows of an embedding table, by token.
//!
//! Invariant: a token's row depends on the token and, for ESM, on its own sequence's share of
//! masks. An id outside the table panics: it is never read past.

use super::Cpu;
use super::element::Element;
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use super::view::{Rows, RowsMut};

/// `y[t] = table[ids[t]] + plus`, for example BERT's word and token-type embeddings.
pub fn gather<E: Element>(cpu: &Cpu, ids: &[u32], table: Rows<'_, E>, plus: Option<&[E]>, y: RowsMut<'_, E>) {
    check(ids, table, plus, &y);
    cpu.by_rows(ids.len(), table.cols(), &|range| {
        for t in range {
            cpu.isa().run(Gather { from: pick(table, ids[t]), scale: 1.0, plus, y: &y, t });
        }
    });
}

/// ESM's token dropout at inference: `y[t] = table[ids[t]] * scale`, zeros for `mask_id`, where
/// scale = keep / (1 - n_mask / n) over the n tokens of t's sequence, all in f32 (fair-esm,
/// `esm2.py`; keep = 0.88 = 1 - 0.15 * 0.8 is the share of tokens seen in training). `spans` are
/// ascending and disjoint; rows outside them are not written. `plus` is added before the scale.
#[allow(clippy::too_many_arguments)] // the op's inputs and outputs, each once
pub fn gather_esm<E: Element>(
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
    super::check_spans(spans, ids.len());
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

fn check<E: Element>(ids: &[u32], table: Rows<'_, E>, plus: Option<&[E]>, y: &RowsMut<'_, E>) {
    assert!(plus.is_none_or(|p| p.len() == table.cols()), "the added row has the table's columns");
    assert_eq!(y.rows(), ids.len(), "one row per token");
    assert_eq!(y.cols(), table.cols(), "columns of the table");
}

/// Where the row of `id` starts.
fn pick<E: Element>(table: Rows<'_, E>, id: u32) -> Option<*const E> {
    assert!((id as usize) < table.rows(), "token {id} of a table of {}", table.rows());
    Some(table.row(id as usize))
}

/// One row; `from` is `None` for zeros.
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
            // SAFETY: `from` is a row of a table of `cols` columns, as `plus` and y's row t.
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
